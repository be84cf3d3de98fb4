"""A barrier that knows who is missing: ranks sign in at the store over which their group met.

No backend is asked, so it tells who is missing even where a collective of the backend would wait for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from meshcomm import _torch
from meshcomm.errors import CommError, described, text

_ALL = "all"
_MOST_STEPS = 2
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


class Gathering:
    """A meeting of ranks of the world at the store, for the axis of this name, which no other one there has had; in one
    step or in several. Who is interrupted in it comes to this one again, or to the next one, as all others do: the
    number counts the meetings that are over, and a rank does nothing here that it may not do twice.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], index: int, steps: int = 1) -> None:
        self._place, self._ranks, self._index, self._steps = _place_of(name), ranks, index, steps
        _met.add(name)
        with _answering():
            self._store = _torch.default_store()
            self.number = (
                self._store.add(self._over, 0) + 1
            )  # there: a group that is adopted again goes on in its store

    @property
    def _over(self) -> str:
        return f"{self._place}/calls/{self._index}"

    def come(self, seconds: float, hope: Hope | None = None, step: int = 0) -> None:
        """Return when all ranks have come to this step; the first one whose time is up (or who has no ``hope``), and
        the last one to come, decide for all of them: CommError with the absent, or none.
        """
        with _answering():
            verdict = self._verdict(_keys(self._place, self.number, step, len(self._ranks)), seconds, hope)
        if verdict != _ALL or step == self._steps - 1:
            self._end()
        if verdict != _ALL:
            raise CommError(verdict)

    def give_up(self, error: BaseException) -> bool:
        """This rank was interrupted: whether all have come to the last step. Else they are told, if it was there."""
        why = text(
            "barrier", "a rank was interrupted in it.",
            got=f"index {self._index} (rank {self._ranks[self._index]}): {described(error)}",
            fix="meet again: mc.barrier(axis, timeout=...)",
        )  # fmt: skip
        steps = [_keys(self._place, self.number, step, len(self._ranks)) for step in range(self._steps)]
        with contextlib.suppress(RuntimeError):
            if self._store.check([steps[0].signs[self._index]]):
                verdicts = (bytes(self._store.compare_set(keys.verdict, "", why)).decode() for keys in steps)
                all_came = all(verdict == _ALL for verdict in verdicts)
                self._end()
                return all_came
        return False

    def _end(self) -> None:
        with contextlib.suppress(RuntimeError):  # who serves the store may have met, and ended
            self._store.set(self._over, str(self.number))

    def _verdict(self, keys: _Keys, seconds: float, hope: Hope | None) -> str:
        store, end, mine = self._store, time.monotonic() + seconds, keys.signs[self._index]
        store.set(mine, "here")
        if store.check(keys.signs):
            store.compare_set(keys.verdict, "", _ALL)
            if keys.step == 0 and self.number > 1:  # all have left the meeting before
                _take_away(store, self._place, self.number - 1, self._steps, len(self._ranks))
        pause = 1e-4
        while not store.check([keys.verdict]):
            if time.monotonic() > end:
                here = zip(self._ranks, keys.signs, strict=True)
                absent = [f"index {i} (rank {rank})" for i, (rank, sign) in enumerate(here) if not store.check([sign])]
                store.compare_set(keys.verdict, "", absent_text(absent, seconds))
            elif hope is not None and pause >= _LONGEST_PAUSE:
                here = zip(self._ranks, keys.signs, strict=True)
                left = {rank: sign for rank, sign in here if not store.check([sign])}
                reason = hope(left) if left else ""
                if reason:
                    store.compare_set(keys.verdict, "", reason)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return str(store.get(keys.verdict).decode())


def all_here(name: str, ranks: tuple[int, ...], index: int, seconds: float) -> None:
    """Return when all of these ranks have called it."""
    gathering = Gathering(name, ranks, index)
    try:
        gathering.come(seconds)
    except CommError:
        raise
    except BaseException as error:  # Ctrl-C, or what a handler of another signal raises
        gathering.give_up(error)
        raise


def forget(name: str, size: int) -> None:
    """This rank has let go of the axis of this name: the last one that does takes away what is at the store."""
    if name not in _met:
        return
    _met.discard(name)
    store, prefix = _torch.default_store(), _place_of(name)
    if store.add(f"{prefix}/gone", 1) < size:
        return
    calls = {store.add(f"{prefix}/calls/{i}", 0) for i in range(size)}
    for call in range(max(1, min(calls) - 1), max(calls) + 2):
        _take_away(store, prefix, call, _MOST_STEPS, size)
    for key in (*(f"calls/{i}" for i in range(size)), "gone"):
        store.delete_key(f"{prefix}/{key}")


def _place_of(name: str) -> str:
    return f"meshcomm/barrier/{hashlib.sha256(name.encode()).hexdigest()[:16]}"


class _Keys(NamedTuple):
    """Of one step of a meeting."""

    step: int
    signs: list[str]
    """Of all indices: they are here."""
    verdict: str


def _keys(place: str, number: int, step: int, size: int) -> _Keys:
    prefix = f"{place}/{number}/{step}"
    return _Keys(step, [f"{prefix}/{i}" for i in range(size)], f"{prefix}/verdict")


def _take_away(store: Store, place: str, number: int, steps: int, size: int) -> None:
    for step in range(steps):
        keys = _keys(place, number, step, size)
        for key in (*keys.signs, keys.verdict):
            store.delete_key(key)


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0]
        what = "the store of the process group does not answer."
        raise CommError(text("barrier", what, got=reason, fix="look at rank 0, which serves it")) from error
