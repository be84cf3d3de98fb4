"""A barrier that knows who is missing: ranks sign in at the store over which their group met.

No backend is asked, so it tells who is missing even where a collective of the backend would wait for ever.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from meshcomm import _torch
from meshcomm.errors import CommError, text

__all__ = ["Hope", "absent_text", "all_here", "forget"]

_LONGEST_PAUSE = 0.02
_met: set[str] = set()
"""The axes that have met at the store."""


def absent_text(absent: Sequence[str], seconds: float) -> str:
    """What a barrier says whose time is up."""
    shown = ", ".join(absent[:16]) + (", ..." if len(absent) > 16 else "")
    return text(
        "barrier",
        f"not everybody came within {seconds:g} s.",
        got=f"absent: {shown or 'nobody, at last'}",
        fix="see where they are (py-spy dump --pid), or give a longer timeout=; the ranks that came are all told this",
    )


Hope = Callable[[dict[int, str]], str]
"""Is told which keys the others have not written, by rank of the world; why they never will, or nothing."""


def all_here(name: str, ranks: tuple[int, ...], index: int, seconds: float, hope: Hope | None = None) -> None:
    """Return when all of these ranks of the world have called it for the axis of this name, which no other meeting at
    this store has had; the first one whose time is up (or who has no ``hope``), and the last one to come, decide for
    all of them: CommError with the absent, or none.
    """
    _met.add(name)
    try:
        verdict = _meet(_place_of(name), ranks, index, seconds, hope)
    except RuntimeError as error:
        _lost(error)
    if verdict:
        raise CommError(verdict)


def forget(name: str, size: int) -> None:
    """This rank has let go of the axis of this name: the last one that does takes away what is at the store."""
    if name not in _met:
        return
    _met.discard(name)
    store, prefix = _torch.default_store(), _place_of(name)
    if store.add(f"{prefix}/gone", 1) < size:
        return
    calls = {store.add(f"{prefix}/calls/{i}", 0) for i in range(size)}
    for call in range(max(1, min(calls) - 1), max(calls) + 1):
        for key in (*map(str, range(size)), "came", "verdict"):
            store.delete_key(f"{prefix}/{call}/{key}")
    for key in (*(f"calls/{i}" for i in range(size)), "gone"):
        store.delete_key(f"{prefix}/{key}")


def _place_of(name: str) -> str:
    return f"meshcomm/barrier/{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _lost(error: RuntimeError) -> NoReturn:
    reason = str(error).split("\n", 1)[0]
    what = "the store of the process group does not answer."
    raise CommError(text("barrier", what, got=reason, fix="look at rank 0, which serves it")) from error


def _meet(prefix: str, ranks: tuple[int, ...], index: int, seconds: float, hope: Hope | None) -> str:
    store, end = _torch.default_store(), time.monotonic() + seconds
    call = store.add(f"{prefix}/calls/{index}", 1)  # counted there: a group that is adopted again goes on in its store
    key = f"{prefix}/{call}"
    store.set(f"{key}/{index}", "here")
    if store.add(f"{key}/came", 1) == len(ranks):
        store.compare_set(f"{key}/verdict", "", "all")
        if call > 1:  # all have left the call before
            for name in (*map(str, range(len(ranks))), "came", "verdict"):
                store.delete_key(f"{prefix}/{call - 1}/{name}")
    pause = 1e-4
    while not store.check([f"{key}/verdict"]):
        if time.monotonic() > end:
            absent = [f"index {i} (rank {rank})" for i, rank in enumerate(ranks) if not store.check([f"{key}/{i}"])]
            store.compare_set(f"{key}/verdict", "", absent_text(absent, seconds))
        elif hope is not None and pause >= _LONGEST_PAUSE:
            keys = {rank: f"{key}/{i}" for i, rank in enumerate(ranks)}
            left = {rank: name for rank, name in keys.items() if not store.check([name])}
            reason = hope(left) if left else ""
            if reason:
                store.compare_set(f"{key}/verdict", "", reason)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    verdict = store.get(f"{key}/verdict").decode()
    return "" if verdict == "all" else verdict
