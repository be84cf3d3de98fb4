"""The guard: before a collective moves anything, its ranks compare what they call.

Each rank writes what it calls, and where, to a board that the others read, and waits until all have come; then they
enter the transport, or all raise. A rank that waits for long says so on its shelf, and looks whether those it waits
for can still come: one may be gone, have raised an error, or wait, over whatever axes, for this very rank.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from meshcomm.runtime.health import hosts, peers
from meshcomm.runtime.hooks.guard.boards import Group, Shelf
from meshcomm.runtime.ops import talks
from meshcomm.runtime.process import home as given
from meshcomm.runtime.words import ranks_text

DEADLOCK = "nobody can go on"
LONG = 0.1
"""Seconds of waiting after which a rank says so, and between looks at what the others say."""
FEW_LOOKS, FIRST_PAUSE = 100, 2e-5
_MOST_TEXT = 10_000
"""Letters of an error or of a verdict that others are told."""

_ids = itertools.count(1)


@dataclass(eq=False)
class Wait:
    """What one thread of this process waits in: a collective of one group, or messages."""

    group: Group
    number: int
    words: str
    """What it called."""
    place: str
    keys: dict[int, str] = field(default_factory=dict)
    """For messages: rank of the world to the key at the store that it will write."""
    unless: tuple[str, ...] = ()
    """For messages: where there is one of these keys, it waits no more."""
    since: float = field(default_factory=time.time)
    told: tuple[tuple[Any, ...], ...] = ()
    """For which keys this process has told that it waits; nothing if it has not."""
    id: int = field(default_factory=lambda: next(_ids))
    """Negative where it outlasts a deadlock, for the others may come when they have been told."""

    def write(self) -> dict[str, Any]:
        """For the shelf."""
        return {
            "id": self.id, "key": self.group.key, "ranks": self.group.ranks, "name": self.group.name,
            "number": self.number, "words": self.words, "place": self.place,
            "keys": {str(rank): key for rank, key in self.keys.items()}, "unless": self.unless, "since": self.since,
        }  # fmt: skip

    @staticmethod
    def read(found: dict[str, Any]) -> Wait:
        """The inverse of ``write``."""
        group = Group(found["key"], tuple(found["ranks"]), found["name"])
        keys = {int(rank): key for rank, key in found["keys"].items()}
        said = found["number"], found["words"], found["place"], keys, tuple(found["unless"]), found["since"]
        return Wait(group, *said, ((),), found["id"])


@dataclass
class Status:
    """What a process says of itself."""

    version: int = 0
    home: str = ""
    """How its function has ended."""
    functions: int = 0
    """How many it was given to run so far."""
    left: bool = False
    """Whether it has left the group for good."""
    failures: int = 0
    """Errors in calls of which it is not known over which axis they would have been."""
    failure: str = ""
    waits: list[Wait] = field(default_factory=list)
    main: tuple[int, int, int] | None = None
    """What the program waits for, if it has one thread: the key of a group and a number, or 0 and a wait."""
    issued: dict[int, int] = field(default_factory=dict)
    """How many calls it has made in each group."""
    verdict: str = ""
    """Of the last deadlock that it was in: who waited in what."""
    condemned: list[tuple[int, int]] = field(default_factory=list)
    """The waits that have no end because of it, by rank: each of them raises, and one that goes on before another one
    has is not to be taken for waiting for it.
    """

    def write(self, most: float = math.inf) -> bytes:
        """For the shelf, which takes so many bytes. Of more waits than it has room for some are left out, but not the
        program's own: who waits for this rank hears all else.
        """
        own = self.of_main()
        waits = sorted(self.waits, key=lambda wait: wait is not own)
        while True:
            found = {**vars(self), "waits": [wait.write() for wait in waits]}
            found["issued"] = [[key, count] for key, count in self.issued.items()]
            data = json.dumps(found).encode()
            if len(data) <= most or not waits:
                return data
            waits = waits[: len(waits) // 2]

    @staticmethod
    def read(data: bytes) -> Status:
        """The inverse of ``write``."""
        if not data:
            return Status()
        found = json.loads(data)
        found["waits"] = [Wait.read(wait) for wait in found["waits"]]
        found["condemned"] = [(rank, wait) for rank, wait in found["condemned"]]
        found["main"] = None if found["main"] is None else tuple(found["main"])
        found["issued"] = dict(found["issued"])
        return Status(**found)

    def head(self, key: int) -> Wait | None:
        """The wait of a group's calls."""
        return next((wait for wait in self.waits if wait.group.key == key and not wait.keys), None)

    def of_main(self) -> Wait | None:
        """What the program waits in."""
        if self.main is None:
            return None
        key, number, wait_id = self.main
        if wait_id:
            return next((wait for wait in self.waits if wait.id == wait_id), None)
        head = self.head(key)
        return head if head is not None and head.number <= number else None


Seen = dict[int, Status]


class _Here(threading.local):
    """This thread."""

    acted = False  # it is known to make calls


class Guard:
    """What this process knows of the others, and tells them."""

    def __init__(
        self, rank: int, size: int, shelf: Shelf, is_there: Callable[[str], bool], gone: Callable[[int], str]
    ) -> None:
        """``is_there``: whether a key is at the store. ``gone``: why a rank of the world will not come any more."""
        self.rank, self.size, self.shelf = rank, size, shelf
        self._is_there, self._ended = is_there, gone
        self._lock = threading.RLock()
        self._status = Status(functions=given.begun)
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # numbers of threads come again
        self._here = _Here()
        self._acknowledged: dict[int, int] = {}
        self.issued: dict[int, int] = {}
        self.rooms: weakref.WeakSet[Any] = weakref.WeakSet()
        """Of all groups."""
        self.at = ""
        """Where it writes at the store."""
        self.places: dict[int, str] = {}
        """Where the ranks of the world are on the mesh that was used last: ``dp=1,tp=0``."""

    def name(self, rank: int) -> str:
        """Of a rank of the world, in errors."""
        place = self.places.get(rank)
        return f"rank {rank}" if place is None else f"{place} (rank {rank})"

    @property
    def failures(self) -> int:
        """How many errors this process has told of."""
        return self._status.failures

    # ---------------------------------------------------------------------------------------------- telling

    def _tell(self) -> None:
        status = self._status
        status.version += 1
        status.issued = dict(self.issued)
        nothing = not (status.home or status.left or status.failures or status.waits or status.condemned)
        self.shelf.tell(b"" if nothing else status.write(self.shelf.most))

    def acts(self) -> None:
        """A thread of the program makes a call."""
        if not self._here.acted:
            with self._lock:
                self._threads.add(threading.current_thread())
            self._here.acted = True

    def is_alone(self) -> bool:
        """Whether what this thread waits for, the program waits for: autograd's own threads run while it waits."""
        with self._lock:
            alive = [each for each in self._threads if each.is_alive() and type(each).__name__ != "_DummyThread"]
        return len(alive) <= 1

    @contextmanager
    def waiting(self, wait: Wait, *, for_program: bool) -> Iterator[Callable[[], None]]:
        """Around a wait; what it gives is to be called when the wait has become long."""
        try:
            yield lambda: self.tell_of(wait, for_program)
        finally:
            self.no_more(wait, for_program)

    def tell_of(self, wait: Wait, for_program: bool) -> None:
        """It has become long."""
        keys = (*wait.keys.items(), *wait.unless)
        if wait.told == (keys,):
            return
        with self._lock:
            wait.told = (keys,)  # first: whoever is interrupted from here on takes it back
            if wait not in self._status.waits:
                self._status.waits.append(wait)
            if for_program and self.is_alone():
                self._status.main = (0, 0, wait.id) if wait.keys else (wait.group.key, wait.number, 0)
            self._tell()

    def no_more(self, wait: Wait, for_program: bool) -> None:
        """It is over."""
        if not wait.told:
            return
        with self._lock:
            self._status.waits[:] = [each for each in self._status.waits if each is not wait]
            wait.told = ()
            if for_program:
                self._status.main = None
            self._tell()

    @contextmanager
    def program_waits(self, what: tuple[int, int, int]) -> Iterator[None]:
        """Around a long wait of the program for what a thread of the guard waits in: as in a status."""
        with self._lock:
            self._status.main = what if self.is_alone() else None
            self._tell()
        try:
            yield
        finally:
            with self._lock:
                self._status.main = None
                self._tell()

    def failed(self, text: str) -> None:
        """This rank has raised an error in a call that it should perhaps have made on an axis."""
        with self._lock:
            self._status.failures += 1
            self._status.failure = text.split("\n", 1)[0][:_MOST_TEXT]
            self._tell()

    def begin(self) -> None:
        """This process is there, whatever one before it has left behind."""
        with self._lock:
            self._tell()

    def leave(self) -> None:
        """This process makes no more calls."""
        with self._lock:
            self._status.left = True
            self._tell()

    def home(self, how: str) -> None:
        """How this rank's function has ended: it makes no more calls until it is given another one."""
        with self._lock:
            self._status.home = how
            self._status.functions += not how
            self._tell()

    # --------------------------------------------------------------------------------------------- looking

    def forgive(self, ranks: Sequence[int]) -> None:
        """All of these have met: what they have raised before is no news any more."""
        for rank in ranks:
            if rank != self.rank:
                self._acknowledged[rank] = self.status(rank).failures - self.failures

    def status(self, rank: int) -> Status:
        """Of another rank of the world."""
        return Status.read(self.shelf.status(rank))

    def why_never(self, wait: Wait, missing: Sequence[int], *, sure: bool) -> str:
        """Why one of these ranks of the world will not come; nothing if they may come. ``sure``: this rank does not
        wait for them any more, if there is a reason.
        """
        weaker = []  # another rank's end was this one's, too, or may have been
        for rank in missing:
            status = self.status(rank)
            if self._has_news(rank, status) and not status.waits:
                if sure:
                    self._acknowledged[rank] = status.failures - self.failures
                return f"{self.name(rank)} has raised an error instead: {status.failure}"
            reason = self.why_gone(rank, wait.group.key, wait.number)
            if reason and not peers.distance(reason):
                return reason
            if reason:
                weaker.append(reason)
            if (self.rank, wait.id) in status.condemned:
                return self._told_by(status, sure)
        return min(weaker, key=peers.distance, default="") or self._deadlock(wait, sure)

    def _deadlock(self, wait: Wait, sure: bool) -> str:
        """Who waits in what, if whom this wait is for waits for this rank."""
        seen: Seen = {}
        circle = self._circle(self.rank, wait, [], set(), seen)
        others = (self.status(rank) for rank in range(self.size) if rank != self.rank)
        for status in others if circle else seen.values():  # those behind who outlasts it in a barrier know of it, too
            if (self.rank, wait.id) in status.condemned:
                return self._told_by(status, sure)
        if not circle:
            return ""
        again: Seen = {}  # at one moment, between the two looks, all of them waited
        if self._circle(self.rank, wait, [], set(), again) != circle:
            return ""
        if {r: s.version for r, s in seen.items()} != {r: s.version for r, s in again.items()}:
            return ""
        told = {each for status in again.values() for each in status.condemned}
        if not told.isdisjoint(circle):  # who waits there is told of another one, in which who waits for it has been
            return ""
        return self._condemn(circle, f"{DEADLOCK}; {self.where_all_are()}") if sure else DEADLOCK

    def _told_by(self, status: Status, sure: bool) -> str:
        """Of a deadlock that another rank has found, in which this one is."""
        return self._condemn(status.condemned, status.verdict) if sure else status.verdict

    def _condemn(self, circle: list[tuple[int, int]], verdict: str) -> str:
        with self._lock:
            self._status.condemned = [(rank, wait) for rank, wait in circle if wait > 0]
            self._status.verdict = verdict[:_MOST_TEXT]
            self._tell()
        return verdict

    def gone(self, rank: int, status: Status) -> str:
        """Why a rank will make no more calls."""
        ended = self._ended(rank)
        if not ended and not status.left:
            return ""
        why = peers.reason(rank)
        return f"{peers.LEFT}: {why}" if why else ended or peers.LEFT

    def _has_news(self, rank: int, status: Status) -> bool:
        return status.failures - self.failures > self._acknowledged.get(rank, 0)

    def why_gone(self, rank: int, key: int, number: int) -> str:
        """Why a rank will not make the call of this number in a group."""
        status = self.status(rank)
        reason = self.gone(rank, status)
        if reason:
            return " ".join(filter(None, (self.name(rank), hosts.where(rank), reason)))
        home = self._home(status)
        if home and status.issued.get(key, 0) < number:
            return f"{self.name(rank)} has {home}"
        return ""

    def _home(self, status: Status) -> str:
        """How another rank's function has ended; not of one before this rank's, for it may be given this one yet."""
        return status.home if status.functions >= self._status.functions else ""

    def _circle(
        self, rank: int, wait: Wait, path: list[tuple[int, int]], been: set[tuple[int, int]], seen: Seen
    ) -> list[tuple[int, int]]:
        """The waits, one for the other, from the first one of the path and back to it. Who waits for ranks that wait
        for each other is not told: they are, and may find a way out.
        """
        if (rank, wait.id) in been:
            return path if (rank, wait.id) == path[0] else []
        been.add((rank, wait.id))
        path = [*path, (rank, wait.id)]
        for other in self._missing(rank, wait):
            next_wait = self._next_wait(other, wait, seen)
            found = [] if next_wait is None else self._circle(other, next_wait, path, been, seen)
            if found:
                return found
        return []

    def _missing(self, rank: int, wait: Wait) -> list[int]:
        if wait.keys:
            missing = [other for other, key in wait.keys.items() if not self._is_there(key)]
            return [] if any(map(self._is_there, wait.unless)) else missing
        group = wait.group
        return [
            other for other in group.ranks if other != rank and not self.shelf.has_posted(other, group, wait.number)
        ]

    def _next_wait(self, rank: int, wait: Wait, seen: Seen) -> Wait | None:
        """What ``rank`` waits in before it comes to ``wait``, if it is nothing that it is about to be told of."""
        status = seen.get(rank)
        if status is None:
            status = seen[rank] = self._own_status() if rank == self.rank else self.status(rank)
        if not wait.keys and status.issued.get(wait.group.key, 0) >= wait.number:
            next_wait = status.head(wait.group.key)
        else:
            next_wait = status.of_main()
        if next_wait is None or (rank, next_wait.id) in self._status.condemned:
            return None
        return next_wait

    def _own_status(self) -> Status:
        with self._lock:
            return Status.read(self._status.write()) if self._status.waits else Status()

    def where_all_are(self) -> str:
        """What each rank of the world that waits has called, equal calls together."""
        groups: dict[str, list[str]] = {}
        for rank in range(self.size):
            status = self._own_status() if rank == self.rank else self.status(rank)
            reason = (
                "" if rank == self.rank else self.gone(rank, status) or peers.stopped(rank) or hosts.unreached(rank)
            )
            wait = status.of_main() or next(iter(status.waits), None)
            if wait is not None and not reason:
                groups.setdefault(f"called {wait.words}", []).append(wait.place)
            else:
                elsewhere = reason or self._home(status) or "computing, or waiting for something else"
                groups.setdefault(elsewhere, []).append(self.name(rank))
        return ranks_text([(places, did) for did, places in groups.items()])


_current: list[Guard] = []


def current() -> Guard | None:
    """The guard of this process, while one is on."""
    return _current[-1] if _current else None


def set_current(guard: Guard | None) -> None:
    """Turn it on, or off."""
    _current[:] = [] if guard is None else [guard]


def failed(text: str) -> None:
    """A call was refused before it was known over which axis it would have been."""
    if _current and talks(text.split(":", 1)[0].removeprefix("meshcomm.")):
        _current[-1].failed(text)


def home(how: str) -> None:
    """How what this rank was given to run has ended; nothing where it begins."""
    if _current:
        _current[-1].home(how)
