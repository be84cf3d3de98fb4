"""What the guard begins on threads of its own, when the ranks agree, and the wait for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from meshcomm.runtime.hooks.guard.guard import LONG
from meshcomm.runtime.pending import Pending, TimedOutError, begin_all, helper, queued
from meshcomm.runtime.process import exits

_SLICE = 0.01
"""Seconds after which a program that waits looks whether a thread of the guard has left it messages to begin."""


def wait_for(event: threading.Event, seconds: float | None) -> bool:
    """Whether it came within the time. Meanwhile the program begins what threads of the guard may only queue: another
    rank may stand still until it has that, and not come to what is waited for.
    """
    end = None if seconds is None else time.monotonic() + seconds
    while not event.wait(_SLICE if end is None else min(_SLICE, _left(end) or 0.0)):
        if end is not None and time.monotonic() >= end:
            return False
        if queued:
            begin_all()
    return True


class Limit:
    """After how many seconds who waits for a call has given it up, for the thread that asks the others; 0: not."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0


class Task:
    """A call that begins on the group's thread."""

    def __init__(self, fn: Callable[[], Any], limit: Limit | None = None) -> None:
        """``limit``: where ``fn`` looks at it, gives up with all ranks or with none, and at once if it begins so."""
        self.fn: Callable[[], Any] | None = fn
        self.limit = limit
        self._lock, self._runs = threading.Lock(), False
        self.known, self.over = threading.Event(), threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.abandoned = False

    def run(self) -> None:
        """On the thread."""
        assert self.fn is not None
        with self._lock:
            self._runs = True
        try:
            self.result = self.fn()
        except BaseException as error:
            self.error = self.error or error
        self.fn = None
        self.known.set()
        self.over.set()
        if self.abandoned and isinstance(self.result, Pending):
            self.result.abandon()

    def withdraw(self, seconds: float, behind: Callable[[float], BaseException]) -> bool:
        """Whether it can give up with all or none; ``behind``: the error if it has not begun, and cannot agree."""
        if self.limit is None:
            return False
        with self._lock:
            self.limit.seconds = seconds
            if not self._runs:
                self.error = behind(seconds)
                self.known.set()
        return True


class Queue:
    """A thread that begins one group's calls in order."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._left: list[threading.Event] = []  # no tasks: their results lead back here by way of autograd's nodes
        threading.Thread(target=_live, args=(self._tasks,), name="meshcomm guard", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether all have begun."""
        while self._left and self._left[0].is_set():
            self._left.pop(0)
        return not self._left

    def wait(self, seconds: float | None) -> bool:
        """Whether all that were put have begun, or have failed, within the time."""
        return self.idle or all(wait_for(over, seconds) for over in list(self._left))

    def put(self, fn: Callable[[], Any], limit: Limit | None = None) -> Task:
        """Call it after those before."""
        task = Task(fn, limit)
        _ = self.idle
        self._left.append(task.over)
        self._tasks.put(task)
        return task

    def drain(self, seconds: float) -> None:
        """Wait for all of them, so long at most."""
        end = time.monotonic() + seconds
        for over in list(self._left):
            over.wait(max(0.0, end - time.monotonic()))

    def end(self) -> None:
        """After what is in the queue."""
        self._tasks.put(None)

    __del__ = end


def _live(tasks: queue.SimpleQueue[Task | None]) -> None:
    helper.is_one = True
    while (task := tasks.get()) is not None:
        if exits.leaving():
            return
        task.run()
        del task


class Begun(Pending):
    """A task, and then whatever its transport gives."""

    __slots__ = ("_task",)

    def __init__(self, task: Task) -> None:
        self._task = task

    def waiting(self) -> AbstractContextManager[None]:
        """Around a long wait of who does nothing else until it is over."""
        return nullcontext()

    def wait(self, timeout: float | None) -> Any:
        """Until it has begun, and then until it is done."""
        task, end = self._task, None if timeout is None else time.monotonic() + timeout
        if not wait_for(task.known, LONG if timeout is None else min(LONG, timeout)):
            with self.waiting() if timeout is None else nullcontext():
                if not wait_for(task.known, _left(end)):
                    raise TimedOutError("not all ranks have made the call")
        if task.error is not None:
            raise task.error
        if isinstance(task.result, Pending):
            task.result = task.result.wait(_left(end))
        return task.result

    def done(self) -> bool:
        """Whether a wait would return at once."""
        task = self._task
        if not task.known.is_set():
            return False
        return not isinstance(task.result, Pending) or task.result.done()

    def abandon(self) -> None:
        """It begins all the same, for the others."""
        self._task.abandoned = True
        if self._task.over.is_set() and isinstance(self._task.result, Pending):
            self._task.result.abandon()


def _left(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())
