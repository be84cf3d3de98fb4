"""The guard where ranks do not share memory: they agree at the store before each call.

Those that are waited for later agree on a thread of the group, one after the other, and begin there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from meshcomm.errors import CommError, described
from meshcomm.runtime.hooks.guard.boards import (
    EXPIRED,
    GAVE_UP,
    LEAVING,
    MADE,
    REFUSED,
    Entry,
    Group,
    StoreBoard,
)
from meshcomm.runtime.hooks.guard.guard import FEW_LOOKS, FIRST_PAUSE, LONG, Guard
from meshcomm.runtime.hooks.guard.link import Guarded, Room
from meshcomm.runtime.hooks.guard.meeting import Meeting, not_begun
from meshcomm.runtime.hooks.guard.tasks import Begun, Limit, Queue, Task
from meshcomm.runtime.hooks.stack import Running
from meshcomm.runtime.pending import begin_all, queued, settled
from meshcomm.runtime.recorder import recorded
from meshcomm.runtime.words import Words

_DRAIN = 2.0
"""Seconds that a rank which leaves, or meets the others in a barrier, gives what was begun before."""


class GuardedAtTheStore(Guarded):
    """A link's ranks compare their calls first."""

    room: StoreRoom

    def defers(self, name: str, x: Any) -> bool:
        """What is begun later is read later."""
        return True

    def agree_and_go(self, what: Running) -> Any:
        """At once, or on the group's thread, after what was begun before. What is on a device begins on the program's
        thread, in its order.
        """
        room = self.room
        x = what.like
        _, said = room.put(what, x)
        on_cpu = x is None or x.is_cpu
        if not on_cpu:
            room.wait_until_idle()
        elif what.asynchronous or not room.idle():
            begun = room.later(said, what)
            return begun if what.asynchronous else settled(begun)
        return room.go(_StoreMeeting(room, room.next(), said, what), for_program=True)

    agree_and_go = recorded(agree_and_go, "run")

    def end(self) -> None:
        """No more calls."""
        self.room.end()


class StoreRoom(Room):
    """The calls of a group, at the store."""

    board: StoreBoard

    def __init__(self, index: int, guard: Guard, group: Group, timeout: float) -> None:
        super().__init__(index, guard, group, StoreBoard(group, index), timeout)
        self._number = 0
        self._lock = threading.Lock()
        self._queue: Queue | None = None

    @property
    def number(self) -> int:
        """Of the last call."""
        return self._number

    def next(self) -> tuple[int, int]:
        """The number of the call that is made now, and how many errors this rank has raised since the last one."""
        with self._lock:
            self._number += 1
            self.guard.issued[self.group.key] = self._number
            return self._number, self.errors_since()

    def say_count(self, turn: int) -> None:
        """How many calls this rank has made."""
        if self._queue is not None:
            self._queue.drain(_DRAIN)  # all are here: what has not begun by then has no other side
            self.void = self._number
            self._queue.drain(self.timeout)
        super().say_count(turn)

    def count_from(self, number: int) -> None:
        """All are here."""
        with self._lock:
            self._number = number

    def idle(self) -> bool:
        """Whether no earlier call waits for the others' agreement."""
        return self._queue is None or self._queue.idle

    def wait_until_idle(self) -> None:
        """Until none does."""
        if self._queue is not None and not self._queue.wait(LONG):
            with self.guard.program_waits((self.group.key, self._number, 0)):
                self._queue.wait(None)

    def later(self, said: Entry, what: Running) -> _Deferred:
        """Agree and begin when those before have."""
        if self._queue is None:
            self._queue = Queue()
        inference, limit = torch.is_inference_mode_enabled(), Limit()
        meeting = _StoreMeeting(self, self.next(), said, what)

        def begin() -> Any:
            with torch.inference_mode(inference), torch.no_grad():
                return self.go(meeting, limit, for_program=False)

        return _Deferred(meeting, self._queue.put(begin, limit))

    def refuse(self, words: Words, why: str) -> None:
        """Write it, after what was called before."""
        number, _ = self.next()
        entry = Entry(REFUSED, (0, 0), 2, words.write(), 0, why)
        if self._queue is None or self._queue.idle:
            self.board.post(number, entry)
        else:
            self._queue.put(lambda: self.board.post(number, entry))

    def end(self) -> None:
        """Let what was begun begin, and stop."""
        if self._queue is not None:
            self._queue.drain(_DRAIN)
            self._queue.end()

    # ---------------------------------------------------------------------------------------------- meeting

    def go(self, meeting: _StoreMeeting, limit: Limit | None = None, *, for_program: bool) -> Any:
        """Meet, then go. Who is interrupted when all have come does its part first: the others go."""
        interrupted = self.meet(meeting, limit, for_program)
        found = meeting.what.go()
        if interrupted is not None:
            raise interrupted
        with contextlib.suppress(CommError):  # of a store that is lost the next call tells
            self.board.forget(meeting.number)
        return found

    def meet(self, meeting: _StoreMeeting, limit: Limit | None, for_program: bool) -> BaseException | None:
        """Return when all ranks have called the same; CommError when they have not, or will not."""
        if limit is not None and limit.seconds:
            meeting.fail(*not_begun(limit.seconds), state=EXPIRED)  # the others may be there
        try:
            meeting.say(MADE)
            with self.guard.waiting(meeting.waits, for_program=for_program) as long:
                meeting.wait_for_all(long, limit)
        except CommError:
            raise
        except BaseException as error:  # Ctrl-C, or what a handler of another signal raises
            if not meeting.must_stay(f"it was interrupted by {described(error)}"):
                raise
            return error
        return None


class _StoreMeeting(Meeting):
    """One call of one rank, from its entry until all ranks agree."""

    room: StoreRoom

    def __init__(self, room: StoreRoom, turn: tuple[int, int], said: Entry, what: Running) -> None:
        super().__init__(room, *turn)
        self.said, self.what = said, what
        self._missing = list(room.others)
        self.found: dict[int, Entry] = {}
        self._ended: set[int] = set()  # it was about to give up, and did not come to it

    @property
    def words(self) -> Words:
        """The call."""
        return self.said.words

    @property
    def missing(self) -> list[int]:
        """The indices that have not come."""
        return self._missing

    def write(self, state: int, why: str = "") -> None:
        """In this rank's entry."""
        self.room.board.post(self.number, self.said._replace(state=state, errors=self.errors, why=why))

    def agrees(self, entry: Entry) -> bool:
        """By the digest at the store."""
        return self.said.agrees(entry)

    def wait_for_all(self, long: Callable[[], None], limit: Limit | None) -> None:
        """Look, give way, sleep; when that is long, tell, and see whether there is hope, or ``limit`` says to stop."""
        start = time.monotonic()
        looks, pause, next_look = 0, FIRST_PAUSE, start + LONG
        while not self._look():
            if limit is not None and limit.seconds and self.missing:
                self.expire(limit.seconds)
            looks += 1
            if looks < FEW_LOOKS:
                os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
                continue
            if queued:
                begin_all()
            time.sleep(pause)
            pause = min(1.2 * pause, 1e-3)
            now = time.monotonic()
            if now < next_look:
                continue
            next_look = now + LONG
            long()
            self._hear()
            self.hope(now - start)

    def _look(self) -> bool:
        """Whether all have come; none of them is about to give up, for all or none may go on."""
        last = -1
        for i in list(self.missing):
            entry = self.room.board.look(i, self.number)
            if entry is not None:
                last = i
                self._missing.remove(i)
                self._compare(i, entry)
        if self.missing:
            return False
        for i in [i for i, entry in self.found.items() if i != last or entry.state == LEAVING]:
            entry = self.room.board.look(i, self.number)
            assert entry is not None
            self._compare(i, entry)
        if any(entry.state != MADE and i not in self._ended for i, entry in self.found.items()):
            return False
        self._check_lengths()
        return True

    def _hear(self) -> None:
        """Whether one that came has given up meanwhile, without a reason that this rank finds, too."""
        for i in list(self.found):
            entry = self.room.board.look(i, self.number)
            if entry is not None and self.follows(entry.state):
                self._compare(i, entry)
            elif entry is not None and entry.state == LEAVING and self.is_gone(i):
                self._ended.add(i)

    def _compare(self, index: int, entry: Entry) -> None:
        self.found[index] = entry
        if not self.agrees(entry) or entry.errors != self.errors or entry.state in (GAVE_UP, REFUSED, EXPIRED):
            self.differ()

    def _check_lengths(self) -> None:
        """What goes from one rank to another has one length for both: every rank compares all of them, so that all find
        the same.
        """
        if self.what.name != "all_to_all":
            return
        words = {i: entry.words for i, entry in self.found.items()}
        words[self.room.index] = self.words
        if not all(each.send for each in words.values()):  # too many to be told
            return
        if any(words[i].send[j] != words[j].recv[i] for i in words for j in words):
            self.differ()

    def all_came(self) -> bool:
        """Look again."""
        self._look()
        return not self.missing

    def must_stay(self, why: str) -> bool:
        """Give up for this reason, unless the others have come: then they go on, and so does this rank."""
        try:
            if self.resign(why):
                return False
            self.wait_for_all(lambda: None, None)
            return True
        except CommError:  # they have not called the same, or somebody has given up: that is said already
            return False


class _Deferred(Begun):
    """A call on the group's thread, and then whatever its transport gives."""

    __slots__ = ("_meeting",)

    def __init__(self, meeting: Meeting, task: Task) -> None:
        super().__init__(task)
        self._meeting = meeting

    def waiting(self) -> AbstractContextManager[None]:
        """The others may want to know."""
        room = self._meeting.room
        return room.guard.program_waits((room.group.key, self._meeting.number, 0))

    def withdraw(self, seconds: float) -> bool:
        """Give up, unless all have come."""
        return self._task.withdraw(seconds, self._behind)

    def _behind(self, seconds: float) -> CommError:
        return self._meeting.error(*not_begun(seconds))
