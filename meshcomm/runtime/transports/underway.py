"""What a process group has under way: one operation, messages between ranks, or several steps."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import get_ident
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm.errors import CommError
from meshcomm.runtime.pending import Pending, TimedOutError
from meshcomm.runtime.process import accelerator, exits
from meshcomm.runtime.recorder import ENDED, THREAD, Noted, Record, failed, waits_on_a_device


class Started(Noted):
    """One operation of a backend that reports when it is done."""

    __slots__ = ("_gloo", "_keep", "_link", "_what", "result", "work")
    bare = True
    _mark: Callable[[], Any] | None = None
    """What a wait without a time-out does, and what there is to note of it."""

    def __init__(
        self,
        link: Any,
        what: str,
        work: dist.Work,
        result: Any,
        keep: object,
        record: Record | None,
        gloo: bool = False,
    ) -> None:
        """``what`` of ``link`` is under way, which says in the library's words what the backend said in its own.
        ``keep`` is what it reads.
        """
        self._link = link
        self._what = what
        self.work = work
        self.result = result
        self._keep = keep
        self._gloo = gloo
        self.noted = record
        if record is not None:
            record[THREAD] = 0

    def wait(self, timeout: float | None) -> Any:
        """As in the base, with a short way where all is well and nobody hurries, which a Work takes by itself."""
        record = self.noted
        if timeout is not None or record is None:
            return super().wait(timeout)
        record[THREAD] = get_ident()
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.failure(record, error) from error
        marked = None if self._mark is None else self._mark()
        if record[ENDED] is None:
            record[ENDED] = marked or monotonic()
        return self.result

    def failure(self, record: Record, error: RuntimeError) -> CommError:
        """In the library's words, and noted."""
        said: CommError = self._link._error(self._what, error)
        failed(record, said)
        return said

    def _wait(self, timeout: float | None) -> Any:
        try:
            if timeout is None:
                self.work.wait()
            elif self._gloo:
                self.work.wait(timedelta(milliseconds=max(1, round(1000 * timeout))))  # 0 means for ever
            else:
                self._poll(timeout)
                self.work.wait()
        except RuntimeError as error:
            if timeout is not None:
                if not self.work.is_completed():
                    raise TimedOutError from None
                return self._wait(None)  # it ended just now: how?
            raise self._link._error(self._what, error) from error
        return self.result

    def _poll(self, timeout: float) -> None:
        # A wait of NCCL's that runs out of time ends the communicator.
        end = None
        pause = 1e-5
        while not self.work.is_completed():
            if end is None and self._others_could_come():
                end = time.monotonic() + timeout
            if end is not None and time.monotonic() > end:
                raise TimedOutError
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    def _others_could_come(self) -> bool:
        """Whether it is not this rank's own work before it that keeps it, unless others are waited for in that."""
        return True

    def done(self) -> bool:
        """As the backend says."""
        return self.work.is_completed()

    def abandon(self) -> None:
        """The backend may still read and write the tensors."""
        super().abandon()
        if not self._gloo:
            self.work.wait()


class StartedOnDevice(Started):
    """The same on a device, on a stream of the backend's own; a wait without a time-out orders the streams and does not
    hold up the host: ::

        this rank's stream   ---- what it has to do first ----|before|---- what does not need the result ----|wait|----
        the backend's                                              |---- the others are waited for ----|result|

    Others are late from ``before`` on. Who waits on another stream than the one that made the tensors has them until
    it has come that far; who gives up ends the backend, for whatever waited on its stream would never go on.
    """

    __slots__ = ("_before", "_began", "_first", "_in_vain", "_stream")
    bare = False  # memory is lent to streams by an operation of torch's

    def __init__(self, first: Tensor, *given: Any) -> None:
        """``first``: one of the tensors."""
        super().__init__(*given)
        self._stream = stream = accelerator.stream_at(first)
        self._first, self._before = first, accelerator.mark_at(stream)
        self._began = time.monotonic()
        self._in_vain = False

    def _mark(self) -> Any:
        before, self._before = self._before, None
        return accelerator.mark_at(self._lent(), before)

    def _wait(self, timeout: float | None) -> Any:
        result = super()._wait(timeout)
        self._lent()
        return result

    def _lent(self) -> torch.Stream:
        """This thread's stream, which the tensors are lent to if it is another one."""
        here = accelerator.stream_at(self._first)
        if here != self._stream:
            accelerator.lend(self._stream, self.result, self._keep)
        return here

    def _poll(self, timeout: float) -> None:
        try:
            super()._poll(timeout)
        except TimedOutError:
            self._in_vain = True
            raise

    def _others_could_come(self) -> bool:
        if self._before is None or self._before.query() or waits_on_a_device(self._began):
            self._before = None
        return self._before is None

    def abandon(self) -> None:
        """What comes on the stream of the tensors waits for the backend's. If it was waited for in vain, that would
        wait for ever.
        """
        if not self._in_vain or self._stream is None:
            with accelerator.on(self._stream):
                super().abandon()
            return
        Noted.abandon(self)
        if not self.work.is_completed():
            self._link.end_backend(self._what, self._stream.device)


def started(
    link: Any,
    what: str,
    work: dist.Work,
    result: Any,
    keep: object = None,
    record: Record | None = None,
    *,
    gloo: bool = False,
) -> Started:
    """``work`` under way, on a device if one of its tensors lies there; see :class:`Started`."""
    if not (gloo or accelerator.module() is None):
        for first in accelerator.tensors(result, keep):
            return StartedOnDevice(first, link, what, work, result, keep, record)
    return Started(link, what, work, result, keep, record, gloo)


_claiming = threading.RLock()  # for what is let go of while one is held may claim, too


FOR_EVER = timedelta(days=365)
"""Of gloo."""


def out_of_time(link: Any) -> TimedOutError:
    """When the mesh's time is up, of what a thread waits for, which has no time-out."""
    return TimedOutError(told=lambda: str(link._error("exchange", RuntimeError("Timed out"))))


class Messages(Pending):
    """A batch of messages over gloo, which says that one is done only to who waits for it, and takes a time-out for
    the end of the group: a thread waits where somebody wants to know, or not to wait for ever. It has all the time
    there is, for the group goes on when nobody waits any more.
    """

    __slots__ = ("_error", "_is_watched", "_keep", "_link", "_over", "_result", "_works")

    def __init__(self, link: Any, works: Sequence[dist.Work], result: Any, keep: object = None) -> None:
        self._link, self._works, self._result, self._keep = link, list(works), result, keep
        self._over: threading.Event | None = None
        self._is_watched = False
        self._error: RuntimeError | None = None
        exits.loose.add(self)

    def settle(self, time: timedelta | None = None) -> None:
        """Wait, on this thread if none does already: gloo tells one thread only. ``time``: in place of the mesh's."""
        mine = threading.Event()
        try:
            if (over := self._claimed(mine)) is mine:
                self._wait(time)
            elif not over.wait(self._link.hold.limit if time is None else time.total_seconds()):
                raise out_of_time(self._link)
        except BaseException:  # Ctrl-C
            if self._over is mine and not mine.is_set():
                self._go_on()  # somebody may ask for it again
            raise

    def _claimed(self, mine: threading.Event) -> threading.Event:
        """What says that it is over: that of who asked first, who waits."""
        with _claiming:
            if self._over is None:
                self._over = mine
            return self._over

    def _wait(self, time: timedelta | None) -> None:
        assert self._over is not None
        works, at = self._works, -1
        try:
            for at, work in enumerate(works):  # noqa: B007
                work.wait() if time is None else work.wait(time)
        except RuntimeError as error:
            self._error = error
        except BaseException:  # Ctrl-C, which comes when a wait is over
            del works[: at + 1]
            raise
        works.clear()
        exits.loose.discard(self)
        self._over.set()

    def _watch(self) -> threading.Event:
        mine = threading.Event()
        try:
            if (over := self._claimed(mine)) is mine:
                self._go_on()
        except BaseException:  # Ctrl-C
            if self._over is mine:
                self._go_on()
            raise
        return over

    def _go_on(self) -> None:
        """On a thread, the first one of those that were started before Ctrl-C and after."""

        def watch() -> None:
            with _claiming:
                if self._is_watched:
                    return
                self._is_watched = True
            with exits.blocked():
                self._wait(FOR_EVER)

        threading.Thread(target=watch, name="meshcomm messages", daemon=True).start()

    def wait(self, timeout: float | None) -> Any:
        """On this thread, unless there is one that waits already."""
        if timeout is None:
            self.settle()
        elif not self._watch().wait(timeout):
            raise TimedOutError
        if self._error is not None:
            raise self._link._error("exchange", self._error) from self._error
        return self._result

    def done(self) -> bool:
        """As the thread says."""
        return self._watch().is_set()

    def abandon(self) -> None:
        """Messages come all the same, into memory that must not be given to others meanwhile."""
        if not exits.leaving():
            self._watch()


class Steps(Pending):
    """A function that waits more than once, on a thread of its own."""

    __slots__ = ("_error", "_fn", "_over", "_result")

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._fn: Callable[[], Any] | None = fn
        self._over = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None
        exits.loose.add(self)

    def walk(self) -> None:
        """On the walker's thread."""
        assert self._fn is not None
        try:
            with exits.blocked():
                self._result = self._fn()
        except Exception as error:
            self._error = error
        self._fn = None
        self._over.set()

    def settle(self) -> None:
        """Wait for the walker."""
        self._over.wait()

    def ends_within(self, seconds: float | None) -> bool:
        """Wait so long; whether they are done."""
        return self._over.wait(seconds)

    def wait(self, timeout: float | None) -> Any:
        """Until all steps are done."""
        if not self._over.wait(timeout):
            raise TimedOutError
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        """Whether they are."""
        return self._over.is_set()


def apart(fn: Callable[[], Any]) -> Steps:
    """Steps that are taken on a thread of their own."""
    steps = Steps(fn)

    def live() -> None:
        with torch.inference_mode():
            steps.walk()

    threading.Thread(target=live, name="meshcomm message", daemon=True).start()
    return steps


class Walker:
    """A thread that takes the steps of one group's operations, one operation after the other."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Steps | None] = queue.SimpleQueue()
        threading.Thread(target=_walk, args=(self._queue,), name="meshcomm steps", daemon=True).start()

    def take(self, fn: Callable[[], Any]) -> Steps:
        """Call ``fn`` when those before are done."""
        steps = Steps(fn)
        self._queue.put(steps)
        return steps

    def end(self) -> None:
        """After what is in the queue."""
        self._queue.put(None)

    __del__ = end


def _walk(queue: queue.SimpleQueue[Steps | None]) -> None:
    with torch.inference_mode():  # it writes into tensors that may have been made in that mode
        while (steps := queue.get()) is not None:
            steps.walk()
            del steps  # and with it the tensors, while it waits for the next
