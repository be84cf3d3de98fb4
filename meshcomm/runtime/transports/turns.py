"""Which process group of torch's the collectives of an axis go over: each axis has one for itself, while it lasts.

Calls meet in a group by their order alone. So two axes between the same ranks, which two threads may use, must not
share one. The first axis that asks takes the group which the ranks have anyway; for others the first rank of the axis
says which group is free on all ranks, or that one is to be made.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, NoReturn

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from meshcomm import _torch
from meshcomm.errors import CommError, text
from meshcomm.runtime.health import peers

__all__ = ["Channel", "Family", "Turn"]

_PAUSE, _LONGEST_PAUSE = 1e-4, 1e-2
_ALIVE = 0.5
"""Seconds between looks at whether the others are alive."""

_Place = tuple[int, int]
"""The number of a group, and how many axes have had it before."""


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


class Channel(NamedTuple):
    """What tells an axis' messages from those of others between the same ranks."""

    number: int
    first: bool
    """Whether the group that they share orders this axis' other calls."""


class Turn:
    """An axis' hold on a group; it ends with the last reference."""

    __slots__ = ("__weakref__", "_errors", "group")

    def __init__(self, group: dist.ProcessGroup, errors: list[None]) -> None:
        self.group, self._errors = group, errors

    def spoil(self) -> None:
        """The ranks may have come to different numbers of calls: nobody else shall have the group."""
        self._errors.append(None)


class Family:
    """The groups of some ranks in one order, with one time-out."""

    def __init__(self, ranks: tuple[int, ...], index: int, limit: timedelta, base: dist.ProcessGroup, at: str) -> None:
        """``base``: the group that they have. ``at``: names their keys in the store; empty where there is none."""
        self.ranks, self.index, self.limit, self.base = ranks, index, limit, base
        self._at = at
        self._groups: dict[int, dist.ProcessGroup] = {0: base}
        self._left: list[_Place] = []  # that this rank has not told of yet
        self._uses: dict[int, int] = {0: 0}  # of the first rank: how often each has been given away
        self._lock = threading.Lock()
        self._named: set[str] = set()
        self.numbers = itertools.count()
        """Of what this process sends within the group."""

    def channel(self, name: str) -> Channel:
        """For the axis of this name, the same on all of its ranks: nobody waits for anybody."""
        if not self._at:
            return Channel(0, True)
        self._named.add(name)
        try:
            store = _torch.default_store()
            first = store.compare_set(f"{self._at}/first", "", name).decode() == name
            at = f"{self._at}/channel/{_short(name)}"
            number = store.compare_set(at, "", str(store.add(f"{self._at}/channels", 1))).decode()
        except RuntimeError as error:
            self._lost(str(error).split("\n", 1)[0], error)
        return Channel(int(number), first)

    def turn(self, name: str) -> Turn:
        """For the axis of this name, on all of its ranks."""
        if not self._at:
            return Turn(self.base, [])
        self._named.add(name)
        try:
            store = _torch.default_store()
            first = store.compare_set(f"{self._at}/first", "", name).decode() == name
            place = (0, 0) if first else self._place(store, name)
            group = self._groups.get(place[0])
            if group is None:
                group = self._groups[place[0]] = self._made(store, place[0])
        except CommError:
            raise
        except RuntimeError as error:
            self._lost(str(error).split("\n", 1)[0], error)
        errors: list[None] = []
        turn = Turn(group, errors)
        weakref.finalize(turn, self._ended, place, errors).atexit = False
        return turn

    def forget(self, name: str, alone: bool) -> None:
        """This rank has let go of the axis of this name: the last one that does takes away what is at the store.
        ``alone``: others may have asked for it although this rank has not.
        """
        if not self._at or not (alone or name in self._named):
            return
        self._named.discard(name)
        store, short = _torch.default_store(), _short(name)
        if store.add(f"{self._at}/gone/{short}", 1) == len(self.ranks):
            for kind in ("channel", "of", "gone"):
                store.delete_key(f"{self._at}/{kind}/{short}")

    def _ended(self, place: _Place, errors: list[None]) -> None:
        if not errors:
            self._left.append(place)

    def _place(self, store: Store, name: str) -> _Place:
        while self._left:
            number, use = self._left.pop()
            store.add(f"{self._at}/left/{number}/{use}", 1)
        key = f"{self._at}/of/{_short(name)}"
        if self.index == 0:
            with self._lock:
                place = self._free(store)
            store.set(key, "{} {}".format(*place))
            return place
        self._await(store, {0: key})
        said = store.get(key).decode().split()
        return int(said[0]), int(said[1])

    def _free(self, store: Store) -> _Place:
        """A group that no rank uses any more, or a new one."""
        for number, use in self._uses.items():
            if store.add(f"{self._at}/left/{number}/{use}", 0) == len(self.ranks):
                store.delete_key(f"{self._at}/left/{number}/{use}")
                self._uses[number] = use + 1
                return number, use + 1
        self._uses[len(self._uses)] = 0
        return len(self._uses) - 1, 0

    def _made(self, store: Store, number: int) -> dist.ProcessGroup:
        """When all are there, so that nobody is in the middle of it for long."""
        at = f"{self._at}/making/{number}"
        store.set(f"{at}/{self.index}", "here")
        self._await(store, {i: f"{at}/{i}" for i in range(len(self.ranks)) if i != self.index})
        return _torch.new_group(self.ranks, f"meshcomm_{_short(f'{self._at} {number}')}", self.limit)

    def _await(self, store: Store, keys: dict[int, str]) -> None:
        """Until these indices have written their keys. Nobody waits in the store: others ask over its connection."""
        start = last = time.monotonic()
        pause = _PAUSE
        while missing := [i for i, key in keys.items() if not store.check([key])]:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            now = time.monotonic()
            late = now - start > self.limit.total_seconds()
            found = ""
            if late or now - last > _ALIVE:
                last = now
                found = peers.account([self.ranks[i] for i in missing])
            if late or (found and "is stopped" not in found):
                self._absent(missing, now - start, found)

    def _absent(self, missing: Sequence[int], seconds: float, found: str) -> NoReturn:
        who = f"{'index' if len(missing) == 1 else 'indices'} {', '.join(map(str, missing))}"
        raise CommError(
            text(
                "mesh",
                f"{who} did not come to set up a process group within {seconds:.3g} s{': ' + found if found else ''}.",
                got=f"index {self.index} of the ranks {list(self.ranks)}, at the first call over an axis",
                fix="all ranks of an axis make the same meshes in the same order, and the same calls over them",
            )
        )

    def _lost(self, reason: str, error: RuntimeError) -> NoReturn:
        found = peers.account([rank for rank in self.ranks if rank != self.ranks[self.index]], closed=True)
        what = f"the process group of an axis could not be set up{': ' + found if found else ''}."
        fix = "look at the other ranks: the first one that failed or stopped is the cause"
        raise CommError(text("mesh", what, got=reason, fix=fix)) from error
