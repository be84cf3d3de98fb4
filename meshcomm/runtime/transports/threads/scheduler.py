"""Ranks as cooperative threads of one process: one runs at a time, and they change over only where a rank has to wait.

So a run is deterministic, and when no rank can go on that is known at once and said.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from meshcomm import _torch
from meshcomm.errors import CommError, fail, text
from meshcomm.in_thread import in_thread
from meshcomm.runtime.callsite import hinted
from meshcomm.runtime.pending import TimedOutError
from meshcomm.runtime.process import accelerator, forks, inside
from meshcomm.runtime.transports.threads.random_state import RandomState
from meshcomm.runtime.transports.threads.rank_thread import Cancelled, RankThread
from meshcomm.runtime.transports.threads.settings import Settings, alike, at_first, settings_now, settle
from meshcomm.runtime.transports.threads.shared_leaves import SharedLeaves
from meshcomm.runtime.transports.threads.surroundings import (
    Modes,
    caller_modes,
    leave_the_core,
    let_others_finish,
    on_one_core,
)

_running: dict[str, World] = {}
"""The one launch that runs, at its place. No lock: who is interrupted while he takes one does not know whose it is."""
_PLACE = "launch"
_LOOKS = 1000
"""How often each rank may look whether something is done, or run out of time, before that is a deadlock."""
_TOLD_AFTER = 300.0
"""Seconds of others' time-outs after which who waits without one is told, as among processes: they may repeat them."""
_STARTS = 1.0
"""Seconds within which a thread begins to run that was started."""
_DEADLOCK_FIX = "  fix: every rank of an axis must make the same calls on it in the same order"


class _Local(Protocol):
    rank: Rank | None


local: _Local = in_thread
"""``local.rank`` is the in-process rank whose code is running: :func:`current_rank` without the call."""


def current_rank() -> Rank | None:
    """The in-process rank whose code is running, or None outside a launch."""
    return local.rank


def claim(module: torch.nn.Module, where: str) -> None:
    """``where`` makes ``module`` parallel: among ranks of one process it must be this rank's own."""
    rank = local.rank
    if rank is not None and rank.world.leaves is not None:
        rank.world.leaves.claim(module, rank.index, where)


_Setup = Callable[[], None]
_carried: list[Callable[[], _Setup | None]] = []


def carry_over(capture: Callable[[], _Setup | None]) -> None:
    """Register what ranks take over from the caller: ``capture()`` runs there, what it returns, if anything, runs in
    each rank.
    """
    _carried.append(capture)


class Waited(Protocol):
    """What a rank waits for."""

    @property
    def call(self) -> object:
        """The call that it has made."""


class Rank:
    """One rank of a :class:`World`: its thread's turn, its random state, and what it waits for."""

    def __init__(self, world: World, index: int, random: RandomState) -> None:
        self.world = world
        self.index = index
        self.turn = threading.Lock()  # held by nobody's thread in particular: released to let this rank run
        self.turn.acquire()
        self.random = random
        self.settings: Settings = ()
        self.thread = 0  # its number
        self.waits_for: Waited | None = None
        self.patience: float | None = None  # seconds, where it does not wait for ever
        self.timed_out = False
        self.last = False
        self.overtaken = 0.0  # the seconds for which others have said that they would wait, and in vain, meanwhile
        self.gives_up: Callable[[str], None] | None = None  # what it waits for is told when it never comes
        self.fault: str | None = None
        self.over = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.axes: dict[Any, Any] = {}  # of the meshes that this rank uses
        self.made: dict[Any, int] = {}  # how many meshes of a kind

    def give_way(self, other: Rank) -> None:
        """``other`` goes on: keep the random state and the settings of which a process has one, and put its own in
        their place. This is done on the thread of this one, at once; but what a thread has of an accelerator is its
        own.
        """
        world = self.world
        if world.streams is None:
            self.random.give_way(other.random)
        else:
            self.random.save()
            world.streams.leave()
        found, known = settings_now(), self.settings
        if not (found[0] is known[0] and found[4] is known[4] and found[5] is known[5] and found == known):  # alike
            self.settings = known = found
        mine = other.settings
        if mine is not known and not alike(mine, known):
            settle(mine, known)
        world.in_place = other

    def begin(self) -> None:
        """It begins, on its thread: with its random state and its settings, unless they are there."""
        world = self.world
        if world.streams is not None:
            world.streams.begin()
            self.go_on()
        elif world.in_place is not self:
            self.random.load()
        if world.in_place is not self:
            settle(self.settings, settings_now())
            world.in_place = self

    def go_on(self) -> None:
        """It goes on, on its thread: with what that has of an accelerator."""
        if self.world.streams is not None:
            self.world.streams.enter()
            self.random.load()

    def stop(self) -> bool:
        """End it, and all others, at its next collective; whether its code is running, and may come to none."""
        world = self.world
        world.cancelled = True
        return self.waits_for is None and not self.over and self not in world._ready

    def describe(self) -> str:
        """A line for a report."""
        waits = "is running" if self.waits_for is None else f"waits in {self.waits_for.call}"
        return f"  rank {self.index} {'has returned' if self.over else waits}"


class _Caller:
    """Who has called for a run, and has its random state and its settings again in the end."""

    def __init__(self) -> None:
        self.random, self.settings = RandomState(), settings_now()

    def load(self) -> None:
        """The run has ended."""
        self.random.load()
        settle(self.settings, settings_now())


class World:
    """All ranks of one launch."""

    def __init__(
        self,
        size: int,
        limit: timedelta | None = None,
        *,
        share: bool = False,
        state: Callable[[int], RandomState] | None = None,
    ) -> None:
        """``limit``: how long a run may last; ``share``: the ranks share leaves, and know what they do; ``state``:
        makes the random state of a rank.
        """
        seed = torch.initial_seed()
        make = state or (lambda index: RandomState(seed, index))
        self.limit = limit
        self.leaves = None if share else SharedLeaves()
        self.watchful = limit is not None
        """Whether there is more to check than whether another rank has failed, or written what others share."""
        self.written: Sequence[object] = () if self.leaves is None else self.leaves.shared
        """The leaves that nobody may write."""
        self._end: float | None = None
        self.size = size
        self.shared: dict[Any, Any] = {}
        self.streams = None if accelerator.module() is None else accelerator.Order()
        self.ranks = [Rank(self, index, make(index)) for index in range(size)]
        self.in_place: _Caller | Rank  # whose random state and settings are those of the process
        self._ready: deque[Rank] = deque(self.ranks)
        self.cancelled = False
        self.idle = 0  # looks and time-outs since a rank last did something that others may have waited for
        self._ended = threading.Lock()
        self._ended.acquire()
        self._is_at_end = False

    # ------------------------------------------------------------------------------------------- for the caller

    def run(self, body: Callable[[], Any]) -> list[Any]:
        """Run ``body`` on every rank and give the results in order of rank; the first error of a rank ends all of
        them.
        """
        modes, setups = caller_modes(), [setup for capture in _carried if (setup := capture()) is not None]
        threads: list[RankThread] = []
        for rank in self.ranks:
            before = threads[-1] if threads else None
            threads.append(RankThread(rank.index, rank, self._live, rank, body, modes, setups, before))
        self.in_place = caller = _Caller()
        first = at_first(caller.settings)
        try:  # Ctrl-C comes behind any call, and no other launch could follow where one kept its place
            if _running.setdefault(_PLACE, self) is not self:
                fail(
                    "launch",
                    "another launch is running in this process.",
                    got="a call from another thread",
                    fix="one launch at a time: random states and others are global to the process",
                )
            if self.limit is not None:
                self._end = time.monotonic() + self.limit.total_seconds()
            for rank in self.ranks:
                rank.settings = first
            with _torch.forward_ad_shared(), self._watched(), on_one_core():
                self._ready.popleft().turn.release()
                self._await_end(threads)
        finally:
            if _running == {_PLACE: self}:  # which is no call
                try:
                    self._put_back(caller)
                except BaseException:  # Ctrl-C, in the midst of it
                    self._put_back(caller)
                    raise
                finally:
                    del _running[_PLACE]
        for rank, thread in zip(self.ranks, threads, strict=True):
            if rank.over:
                thread.join()
        failed = [rank for rank in self.ranks if rank.error is not None]
        if failed:
            blamed = min(failed, key=self._by_failure)
            error = _named(blamed.error, blamed, self.size)
            for rank in failed:
                rank.error = None
            try:
                raise error
            finally:
                del error  # nor does a rank have it: a circle would keep what the frames of its traceback have
        return [rank.result for rank in self.ranks]

    def forget(self) -> None:
        """It has come to a good end, and nobody asks for its ranks any more: they go at once, and not when Python looks
        for what refers to itself, which takes a tenth of a short run.
        """
        self.ranks = []

    def _put_back(self, caller: _Caller) -> None:
        if self.streams is not None:
            self.streams.enter()
        caller.load()
        self.in_place = caller

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        if self.leaves is None:
            return contextlib.nullcontext()
        return self.leaves.watched(lambda: None if local.rank is None else local.rank.index)

    def _await_end(self, threads: Sequence[RankThread]) -> None:
        """Start the thread of the last rank, each of which starts the one before it, and wait until all have ended."""
        last = threads[-1]
        try:
            last.start()
            self._ended.acquire()
        except BaseException:  # Ctrl-C: the rank that runs is stopped at its next collective, then the others
            self.cancelled = True
            end = time.monotonic() + _STARTS
            while last.ident is None and time.monotonic() < end:  # it may be on its way
                time.sleep(1e-3)
            if last.ident is not None and not self._is_at_end:  # else they have, and the lock may be taken already
                self._await_stop(threads)
            raise

    def _await_stop(self, threads: Sequence[RankThread]) -> None:
        try:
            self._ended.acquire()
        except BaseException:  # Ctrl-C again: the one that runs may never come to a collective
            for thread in threads:
                thread.interrupt()
            self._ended.acquire(timeout=_STARTS)
            raise

    @staticmethod
    def _by_failure(rank: Rank) -> tuple[bool, int]:
        # A deadlock or mismatch is raised on several ranks; what is not a CommError is the likelier cause.
        return isinstance(rank.error, CommError), rank.index

    # ------------------------------------------------------------------------------------------- for the ranks

    def check(self) -> None:
        """End this rank if another one has failed, if the time is up, or if it has written what others share."""
        if self.cancelled:
            forks.refuse_if_forked("launch")
            raise Cancelled
        if self._end is not None and time.monotonic() > self._end:
            assert self.limit is not None
            what = f"the run did not end within {self.limit.total_seconds():g} s."
            fix = "give a longer timeout=, or look for a loop without an end"
            raise CommError(text("launch", what, got="\n" + self._report(), fix=fix))
        if self.leaves is not None and self.leaves.shared:
            self._look()

    def _look(self) -> None:
        if self.leaves is not None and self.leaves.shared and local.rank is not None:
            self.leaves.look(local.rank.index)

    def wait(
        self,
        rank: Rank,
        waits_for: Waited,
        timeout: float | None = None,
        gives_up: Callable[[str], None] | None = None,
        last: bool = False,
    ) -> None:
        """Let others run until :meth:`wake`; raises CommError when none can.

        ``gives_up`` is told why before any rank goes on: what this rank has brought shall meet nobody's next call.
        With a ``timeout`` it raises TimedOutError instead, and at once: no time passes while nobody can do anything;
        with ``last`` only when all others who wait have been told, for they may come then.
        """
        rank.waits_for, rank.patience, rank.gives_up, rank.last = waits_for, timeout, gives_up, last
        rank.overtaken = 0.0
        ready = self._ready  # as `_hand_over` does it, without its call
        after = ready.popleft() if ready and not self.cancelled else self._next()
        if after is not rank and after is not None:
            rank.give_way(after)
            after.turn.release()
            rank.turn.acquire()
            if self.streams is not None:
                rank.go_on()
        if self.watchful or self.cancelled or self.written:
            self.check()
        if rank.fault is not None:
            fault, rank.fault = rank.fault, None
            raise CommError(fault)
        if rank.timed_out:
            rank.timed_out = False
            raise TimedOutError

    def wake(self, *ranks: Rank) -> None:
        """Let those of them that wait go on when their turn comes."""
        for rank in ranks:
            if rank.waits_for is not None:
                rank.waits_for = rank.patience = rank.gives_up = None
                self._ready.append(rank)

    def asked(self) -> None:
        """The rank that runs asks whether something is done; who shows that a run depends on no order listens."""

    def look_away(self, rank: Rank) -> None:
        """Let the others run once while ``rank`` polls; raises CommError when it has done so often in vain."""
        self.check()
        self.idle += 1
        if self.idle > _LOOKS * self.size:
            self.idle = 0
            if not self._end_of_patience():
                raise CommError(f"meshcomm: deadlock: ranks poll a Work for ever.\n{self._report()}\n{_DEADLOCK_FIX}")
        self._ready.append(rank)
        self._hand_over(rank)
        self.check()

    def _end_of_patience(self, last: bool = False) -> bool:
        """Wake who waits with the shortest time-out, since nobody can do anything before; whether there is one."""
        waiting = [rank for rank in self.ranks if rank.waits_for is not None and rank.last == last]
        patient = [rank for rank in waiting if rank.patience is not None]
        if any(rank.patience is None and rank.overtaken > _TOLD_AFTER for rank in waiting):
            return False
        if not patient or self.idle > _LOOKS * self.size:
            return False
        self.idle += 1
        first = min(patient, key=lambda rank: (rank.patience, rank.index))
        for rank in waiting:
            rank.overtaken += first.patience or 0.0
        first.timed_out = True
        self.wake(first)
        return True

    def _hand_over(self, rank: Rank) -> None:
        after = self._ready.popleft() if self._ready and not self.cancelled else self._next()
        if after is rank:
            return
        assert after is not None
        rank.give_way(after)
        after.turn.release()
        rank.turn.acquire()
        if self.streams is not None:
            rank.go_on()

    def _next(self) -> Rank | None:
        """Who runs next; when nobody can, everybody who waits is told."""
        if self._ready and not self.cancelled:
            return self._ready.popleft()
        if not self.cancelled and self._end_of_patience():
            return self._ready.popleft()
        waiting = [rank for rank in self.ranks if rank.waits_for is not None]
        if not self.cancelled and not all(rank.last for rank in waiting):
            waiting = [rank for rank in waiting if not rank.last]
        elif not self.cancelled and self._end_of_patience(last=True):
            return self._ready.popleft()
        if not self.cancelled and waiting:
            report = self._report()
            for rank in waiting:
                rank.fault = hinted(f"meshcomm: deadlock: no rank can go on.\n{report}\n{_DEADLOCK_FIX}")
                if rank.gives_up is not None:
                    rank.gives_up(rank.fault)
        for rank in waiting:
            self.wake(rank)
        return self._ready.popleft() if self._ready else None

    def _report(self) -> str:
        return "\n".join(rank.describe() for rank in self.ranks)

    def _live(
        self, rank: Rank, body: Callable[[], Any], modes: Modes, setups: Sequence[_Setup], before: RankThread | None
    ) -> None:
        """The life of one rank's thread. It starts the one of the rank before while it is as new as the caller's
        settings made it: what a thread inherits, such as its core and its signal mask, no rank has changed yet.
        """
        local.rank = rank
        rank.thread = threading.get_ident()
        try:
            if rank is self.ranks[-1]:
                let_others_finish()
            if before is not None:
                before.start()
            rank.turn.acquire()
        except BaseException as error:  # no more threads are to be had: those that run end, this one first
            rank.error, self.cancelled = error, True
            self._ready = deque(self.ranks[rank.index + 1 :])
        rank.begin()
        try:
            with modes():
                for setup in setups:
                    setup()
                self.check()
                rank.result = body()
                self._look()
        except Cancelled:
            pass
        except BaseException as error:  # raised again in the caller
            rank.error, self.cancelled = error, True
        rank.over = True
        self.idle = 0
        after = self._next()
        if after is not None:
            rank.give_way(after)
        elif self.streams is not None:
            self.streams.leave()
        self._is_at_end = after is None
        (self._ended if after is None else after.turn).release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: None if local.rank is None else leave_the_core())


def _alone() -> None:
    """A process forked in a rank has none of the others."""
    if local.rank is not None:
        local.rank.world.cancelled = True


inside.told_by(lambda: None if local.rank is None else (local.rank.index, local.rank.world.size))
forks.on_fork(lambda: None if local.rank is None or local.rank.world.size == 1 else local.rank.index, _alone)


def _named(error: BaseException | None, rank: Rank, size: int) -> BaseException:
    """The rank's own exception, with its traceback and a note that says whose it is."""
    assert error is not None
    if hasattr(error, "add_note"):  # Python 3.11 on
        error.add_note(f"raised by rank {rank.index} of {size} in meshcomm.launch")
    return error
