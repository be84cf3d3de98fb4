"""Who the other processes of this launch are, and what has become of them: for the words of who waits for one in vain.

A process that leaves says why at the store over which the ranks met, as long as that is there. One that was killed or
stopped says nothing, but on the same machine its number in the table of processes tells.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from meshcomm.errors import CommError, described
from meshcomm.runtime.health import hosts
from meshcomm.runtime.process import table
from meshcomm.runtime.process.exits import blocked, last_error

_ANSWER = 1.0
"""Seconds that the store has to answer: who asks is about to fail."""
_SETTLING = 0.5
"""Seconds after which it is known of a process that has closed its connections whether it has ended."""
_FIRST = 2.0
"""Seconds that a rank that fails because of another one gives that one to end first."""
_STAYING = 3.0
"""Seconds that the rank that serves the store gives the others to leave before it ends, and the store with it."""
_SHOWN = 4
_FAILED = "CommError: "
LEFT = "has left the group"
"""What is told of a rank that makes no more calls, and has not said why (yet)."""


class _Peer(NamedTuple):
    machine: str
    pid: int
    began: int
    """Tells processes with one number, one after the other, apart."""


class _Meeting(NamedTuple):
    store: Store
    rank: int
    pid: int
    peers: tuple[_Peer, ...]
    serves: bool
    """Whether the store ends with this process."""


_met: _Meeting | None = None
_last: _Meeting | None = None
"""The one that was left last."""
_blamed: set[_Peer] = set()


# --------------------------------------------------------------------------------------------------------- the meeting


def sign() -> str:
    """This process, for the others."""
    return f"{table.machine()}\t{os.getpid()}\t{table.began(os.getpid())}"


def met(store: Store, rank: int, signs: Sequence[str], *, serves: bool = False) -> None:
    """These are the ranks in order. ``store`` is of this meeting alone; ``serves``: it ends with this process."""
    global _met
    _blamed.clear()
    _met = _Meeting(store, rank, os.getpid(), tuple(map(_read, signs)), serves)


def forget() -> None:
    """The group is no more."""
    global _met
    _met = None
    hosts.forget()


def _read(sign: str) -> _Peer:
    machine, pid, began = sign.split("\t")
    return _Peer(machine, int(pid), int(began))


def _here() -> _Meeting | None:
    """The meeting, in the process that was there: not in its forks."""
    here = _met  # another thread may leave meanwhile
    return here if here is not None and here.pid == os.getpid() else None


# ------------------------------------------------------------------------------------------------------------- leaving


def leave(why: str = "") -> None:
    """Tell the others that this process makes no more calls, and why."""
    global _last
    here, far = _here(), hosts.are_several()
    if here is None:
        return
    forget()
    _last = here
    error = last_error()
    if not why and error is not None:
        why = described(error)[:300].removesuffix(": ")

    def tell() -> None:
        with blocked() if far else contextlib.nullcontext(), contextlib.suppress(RuntimeError):  # not to end under it
            here.store.set(f"left/{here.rank}", why or "its program is over")

    if not (far and _patiently(tell)):
        tell()


def _patiently(ask: Callable[[], None]) -> bool:
    """Ask the store, which may be gone, or stand still, or be on a host that cannot be reached; False where that cannot
    be done, for the interpreter ends, and starts no more threads.
    """
    try:
        asking = threading.Thread(target=ask, name="meshcomm peers", daemon=True)
        asking.start()
    except RuntimeError:
        return False
    asking.join(_ANSWER)
    return True


def distance(reason: str) -> int:
    """How far a rank's end, told so, is from the cause of it all: 2, if it followed from another rank's end; 1, if the
    rank has left and has not said why, for then it may have; else 0.
    """
    return 2 if f": {_FAILED}" in reason else int(LEFT in reason and ": " not in reason.partition(LEFT)[2])


def let_go_first() -> None:
    """The last that a process does. When it ends because others have failed, they end first, so that a launcher takes
    one of them for the cause; then :func:`stay`.
    """
    blamed, end = set(_blamed), time.monotonic() + _FIRST
    while isinstance(last_error(), CommError) and blamed and time.monotonic() < end:
        blamed = {peer for peer in blamed if not _seen(peer)}
        time.sleep(0.01)
    stay()


def stay() -> None:
    """At the end of a process that serves the store: what all have agreed on there, and only this rank has read yet,
    the others shall read, too. They have a moment, until they have left or ended.
    """
    here, end = _last, time.monotonic() + _STAYING
    if here is None or not here.serves or here.pid != os.getpid():
        return
    others = {rank for rank in range(len(here.peers)) if rank != here.rank}
    with contextlib.suppress(RuntimeError):
        while others and not here.store.check([f"left/{rank}" for rank in others]) and time.monotonic() < end:
            time.sleep(0.01)
            others = {rank for rank in others if not _seen(here.peers[rank])}


# -------------------------------------------------------------------------------------------------------------- asking


def ended(sign: str) -> bool:
    """Whether the process that has signed so has ended, as far as can be seen from here."""
    return _seen(_read(sign)) == "ended"


def _seen(peer: _Peer) -> str:
    """ "ended", "stopped", or nothing of the kind."""
    if not peer.machine or peer.machine != table.machine():
        return ""
    fields = table.fields(peer.pid)
    if not fields or fields[0] in "ZX" or int(fields[19]) != peer.began:
        return "ended"
    return "stopped" if fields[0] in "Tt" else ""


def stopped(rank: int) -> str:
    """That a rank of the world stands still after SIGSTOP, as far as can be seen from here; else nothing."""
    here = _here()
    if here is None or rank >= len(here.peers):  # of a world that was made without this one
        return ""
    return _stopped(here.peers[rank]) if _seen(here.peers[rank]) == "stopped" else ""


def _stopped(peer: _Peer) -> str:
    return f"is stopped (process {peer.pid}; kill -CONT lets it go on)"


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine stands still after SIGSTOP."""
    return table.fields(pid)[:1] in (["T"], ["t"])


def reason(rank: int) -> str:
    """Why a rank of the world, which has, has left; empty if it has not said."""
    here = _here()
    if here is None:
        return ""
    _blame(here, [rank])
    return _said(here, [rank]).get(rank, "")


def account(ranks: Iterable[int], *, closed: bool = False) -> str:
    """Which of these ranks of the world have failed or left, and how; empty if none has, as far as can be seen.

    ``closed``: somebody's connection was closed a moment ago, so that one of them is about to be seen.
    """
    here = _here()
    if here is None:
        return ""
    ranks = [rank for rank in ranks if rank != here.rank]
    end = time.monotonic() + (_SETTLING if closed else 0)
    while True:
        last = time.monotonic() >= end  # a look that begins then: the one before may have taken long
        found = _look(here, ranks)
        if found or last:
            break
        time.sleep(0.02)
    _blame(here, found)
    shown = [f"rank {rank} {how}" for rank, how in list(found.items())[:_SHOWN]]
    return ", ".join(shown) + (", ..." if len(found) > _SHOWN else "")


def _blame(here: _Meeting, ranks: Iterable[int]) -> None:
    machine = table.machine()
    _blamed.update(here.peers[rank] for rank in ranks if machine and here.peers[rank].machine == machine)


def _look(here: _Meeting, ranks: Sequence[int]) -> dict[int, str]:
    """The ranks that are not well, the likely cause of it all first."""
    seen = {rank: _seen(here.peers[rank]) for rank in ranks}
    still = [rank for rank in ranks if seen[rank] == "stopped"]
    said = {} if still and "ended" not in seen.values() else _said(here, ranks)
    found = {rank: f"has ended (process {here.peers[rank].pid})" for rank in ranks if seen[rank] == "ended"}
    found = {rank: how for rank, how in found.items() if rank not in said}
    found |= {rank: _stopped(here.peers[rank]) for rank in still}
    found |= {rank: f"has left: {why}" for rank, why in said.items() if not why.startswith(_FAILED)}
    return found or {rank: f"has failed: {why.removeprefix(_FAILED)}" for rank, why in list(said.items())[:1]}


def _said(here: _Meeting, ranks: Sequence[int]) -> dict[int, str]:
    """What those who have left have said, if the store answers in time."""
    answers: dict[int, str] = {}

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            for rank in ranks:
                if here.store.check([f"left/{rank}"]):
                    answers[rank] = here.store.get(f"left/{rank}").decode(errors="replace")

    _patiently(ask)
    return dict(answers)
