"""Which process group of torch's the collectives of an axis go over: each axis has one for itself, while it lasts.

Calls meet in a group by their order alone. So two axes between the same ranks, which two threads may use, must not
share one. The first axis that asks takes the group which the ranks have anyway; for others the first rank of the axis
says which group is free on all ranks, or that one is to be made. A group is made, and the communicator that it has on
accelerators, when all ranks of the axis have come to it: who waits is told who does not come.

A communicator of NCCL's is large. So where there are such, axes with other time-outs take their turns at the same
groups, and the group has the time-out of the axis. None is split from another one: a part takes as much memory as a
whole one unless it shares what the whole has, and then both may not be used at once, and who ends one ends both.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from meshcomm import _torch
from meshcomm.errors import FIRST_CAUSE, CommError, fail, text
from meshcomm.runtime.health import peers
from meshcomm.runtime.pending import begin_all, queued
from meshcomm.runtime.process import accelerator

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


class Pool:
    """The groups between some ranks in one order, at which their axes take turns."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        index: int,
        limit: timedelta,
        at: str,
        first: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """``limit``: of the groups while no axis has another one; of the first of them always, for it carries messages
        of other axes too. ``first``: that one, if it is there already. ``at``: names their keys in the store; empty
        where there is none. ``device``: the mesh's, for which they are connected.
        """
        self.ranks, self.index, self.limit, self.at, self._device = ranks, index, limit, at, device
        self._groups: dict[int, dist.ProcessGroup] = {} if first is None else {0: first}
        self._limits: dict[int, timedelta] = {}
        self._making: dict[int, threading.Lock] = {}
        self._left: list[_Place] = []  # that this rank has not told of yet
        self._uses: dict[int, int] = {0: 0}  # of the first rank: how often each has been given away
        self._given: dict[str, _Place] = {}  # of the first rank: to axes that may have to ask again
        self._lock = threading.Lock()

    def group(self, number: int, limit: timedelta) -> dist.ProcessGroup:
        """The group of this number, made or connected now if it was not; all ranks come to it."""
        with self._making.setdefault(number, threading.Lock()):
            group = self._groups.get(number)
            if group is None:
                group = self._groups[number] = self.made(str(number), limit)
            elif _torch.is_to_connect(group, self._device):  # it was adopted
                self._all_come(str(number), limit)
                _torch.connect(group, self._device)
        return group

    def made(self, name: str, limit: timedelta, *, connected: bool = True) -> dist.ProcessGroup:
        """A group of this name, made by all ranks. ``connected``: with the communicator for accelerators."""
        self._all_come(name, limit)
        unique = f"meshcomm_{_short(f'{self.at or self.ranks} {name}')}"
        return _torch.new_group(self.ranks, unique, limit, self._device if connected else None)

    def _all_come(self, name: str, limit: timedelta) -> None:
        """To the making of a group, so that nobody is in the middle of it for long."""
        if accelerator.capturing():
            what = "an axis has no communicator yet, and none can be made while a CUDA graph is captured."
            got = f"index {self.index} of the ranks {list(self.ranks)}, at the first call over an axis"
            fail("mesh", what, got=got, fix="make the mesh, and the same call once, before the capture")
        if self.at:
            store, at = _torch.default_store(), f"{self.at}/making/{name}"
            store.set(f"{at}/{self.index}", "here")
            self._await(store, {i: f"{at}/{i}" for i in range(len(self.ranks)) if i != self.index}, limit)

    def take(self, name: str, limit: timedelta) -> Turn:
        """A turn for the axis of this name, on all of its ranks."""
        place = self._place(_torch.default_store(), name, limit)
        group = self.group(place[0], limit)
        self._given.pop(name, None)
        if limit != self._limits.get(place[0], self.limit):
            _torch.set_limit(group, limit)
            self._limits[place[0]] = limit
        errors: list[None] = []
        turn = Turn(group, errors)
        weakref.finalize(turn, self._ended, place, errors).atexit = False
        return turn

    def _ended(self, place: _Place, errors: list[None]) -> None:
        if not errors:
            self._left.append(place)

    def _place(self, store: Store, name: str, limit: timedelta) -> _Place:
        own = limit != self.limit
        if not own and store.compare_set(f"{self.at}/first", "", name).decode() == name:
            return 0, 0
        while self._left:
            number, use = self._left.pop()
            store.add(f"{self.at}/left/{number}/{use}", 1)
        key = f"{self.at}/of/{_short(name)}"
        if self.index == 0:
            with self._lock:
                place = self._given.setdefault(name, self._given.get(name) or self._free(store, own))
            store.set(key, "{} {}".format(*place))
            return place
        self._await(store, {0: key}, limit)
        said = store.get(key).decode().split()
        return int(said[0]), int(said[1])

    def _free(self, store: Store, own: bool) -> _Place:
        """A group that no rank uses any more, or a new one."""
        for number, use in self._uses.items():
            if own and number == 0:
                continue
            if store.add(f"{self.at}/left/{number}/{use}", 0) == len(self.ranks):
                store.delete_key(f"{self.at}/left/{number}/{use}")
                self._uses[number] = use + 1
                return number, use + 1
        self._uses[len(self._uses)] = 0
        return len(self._uses) - 1, 0

    def _await(self, store: Store, keys: dict[int, str], limit: timedelta) -> None:
        """Until these indices have written their keys. Nobody waits in the store: others ask over its connection."""
        start = last = time.monotonic()
        pause = _PAUSE
        while keys and not store.check(list(keys.values())):
            if queued:  # who is to come may stand still until it has that
                begin_all()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            now = time.monotonic()
            late = now - start > limit.total_seconds()
            if late or now - last > _ALIVE:
                last = now
                missing = [i for i, key in keys.items() if not store.check([key])]
                found = peers.account([self.ranks[i] for i in missing])
                if missing and (late or (found and "is stopped" not in found)):
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

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """What torch says of a store or of a group that could not be made, in our words."""
        try:
            yield
        except CommError:
            raise
        except RuntimeError as error:
            found = peers.account([rank for rank in self.ranks if rank != self.ranks[self.index]], closed=True)
            what = f"the process group of an axis could not be set up{': ' + found if found else ''}."
            fix = FIRST_CAUSE
            raise CommError(text("mesh", what, got=str(error).split("\n", 1)[0], fix=fix)) from error


class Family:
    """What some ranks in one order have together, for axes with one time-out."""

    def __init__(self, pool: Pool, limit: timedelta, at: str) -> None:
        """``at``: names their keys in the store; empty where there is none."""
        self.ranks, self.index, self.limit, self.pool = pool.ranks, pool.index, limit, pool
        self._at = at
        self.ref = weakref.ref(self)
        """For who must not keep it. Its own, for a reference that is garbage together with who has it is cleared."""
        self._named: set[str] = set()
        self.numbers = itertools.count()
        """Of what this process sends within the group."""
        with pool.explained():
            first = limit == pool.limit
            self.base = pool.group(0, limit) if first else pool.made(f"for {limit}", limit, connected=False)
            """Carries messages, of all of these axes."""

    def channel(self, name: str) -> Channel:
        """For the axis of this name, the same on all of its ranks: nobody waits for anybody."""
        if not self._at:
            return Channel(0, True)
        self._named.add(name)
        with self.pool.explained():
            store = _torch.default_store()
            first = store.compare_set(f"{self._at}/first", "", name).decode() == name
            at = f"{self._at}/channel/{_short(name)}"
            number = store.compare_set(at, "", str(store.add(f"{self._at}/channels", 1))).decode()
        return Channel(int(number), first)

    def turn(self, name: str) -> Turn:
        """For the axis of this name, on all of its ranks."""
        if not self._at:
            return Turn(self.base, [])
        self._named.add(name)
        with self.pool.explained():
            return self.pool.take(name, self.limit)

    def forget(self, name: str, alone: bool) -> None:
        """This rank has let go of the axis of this name: the last one that does takes away what is at the store.
        ``alone``: others may have asked for it although this rank has not.
        """
        if not self._at or not (alone or name in self._named):
            return
        self._named.discard(name)
        store, short = _torch.default_store(), _short(name)
        if store.add(f"{self._at}/gone/{short}", 1) == len(self.ranks):
            for kind in ("channel", "gone"):
                store.delete_key(f"{self._at}/{kind}/{short}")
            store.delete_key(f"{self.pool.at}/of/{short}")
