"""What a process group has under way: one operation, messages between ranks, or several steps."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshcomm.runtime.pending import Pending, TimedOutError
from meshcomm.runtime.process import accelerator, exits
from meshcomm.runtime.recorder import THREAD, Noted, Record, waits_on_a_device

Explain = Callable[[RuntimeError], Exception]
"""Says in the library's words what the transport said in its own."""


class Fault:
    """The same, of an operation of a link, which is told where one has been given up that a device waits for."""

    __slots__ = ("_link", "_what")

    def __init__(self, link: Any, what: str) -> None:
        self._link, self._what = link, what

    def __call__(self, error: RuntimeError) -> Exception:
        """In the link's words."""
        return self._link._error(self._what, error)  # type: ignore[no-any-return]

    def give_up(self, device: torch.device) -> None:
        """Nothing comes after it on the device until it has ended: end it, and the link with it."""
        self._link.end_backend(self._what, device)


class Started(Noted):
    """One operation of a backend that reports when it is done.

    On a device it runs on a stream of the backend's own: ::

        this rank's stream   ---- what it has to do first ----|before|---- what does not need the result ----|wait|----
        the backend's                                              |---- the others are waited for ----|result|

    Others are late from ``before`` on. Who waits on another stream than the one that made the tensors has them until
    it has come that far; who gives up ends the backend, for whatever waited on its stream would never go on.
    """

    __slots__ = ("_before", "_began", "_explain", "_gloo", "_in_vain", "_keep", "_result", "_stream", "_work", "bare")

    def __init__(
        self,
        work: dist.Work,
        result: Any,
        explain: Explain,
        *,
        gloo: bool,
        keep: object = None,
        record: Record | None = None,
    ) -> None:
        self._work, self._result, self._explain, self._gloo, self._keep = work, result, explain, gloo, keep
        self._stream: torch.Stream | None = None
        self._before: Any = None
        self._in_vain = False
        self.bare = True
        self._record = record
        if record is not None:
            record[THREAD] = 0
        if gloo or accelerator.module() is None:
            return
        for first in accelerator.tensors(result, keep):
            self._stream, self._before = accelerator.stream_of(first), accelerator.mark(first)
            self.bare = False  # memory is lent to streams by an operation of torch's
            self._began = time.monotonic()
            break

    def _wait(self, timeout: float | None) -> Any:
        # On an accelerator without a time-out: order the streams, and do not wait on the host.
        try:
            if timeout is None:
                self._work.wait()
            elif self._gloo:
                self._work.wait(timedelta(milliseconds=max(1, round(1000 * timeout))))  # 0 means for ever
            else:
                self._poll(timeout)
                self._work.wait()
        except RuntimeError as error:
            if timeout is not None:
                if not self._work.is_completed():
                    raise TimedOutError from None
                return self._wait(None)  # it ended just now: how?
            raise self._explain(error) from error
        if self._stream is not None:
            accelerator.lend(self._stream, self._result, self._keep)
        return self._result

    def _poll(self, timeout: float) -> None:
        # A wait of NCCL's that runs out of time ends the communicator.
        end = None
        pause = 1e-5
        while not self._work.is_completed():
            if end is None and self._others_could_come():
                end = time.monotonic() + timeout
            if end is not None and time.monotonic() > end:
                self._in_vain = True
                raise TimedOutError
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    def _others_could_come(self) -> bool:
        """Whether it is not this rank's own work before it that keeps it, unless others are waited for in that."""
        if self._before is None or self._before.query() or waits_on_a_device(self._began):
            self._before = None
        return self._before is None

    def done(self) -> bool:
        """As the backend says."""
        return self._work.is_completed()

    def abandon(self) -> None:
        """The backend's stream may still read and write the tensors: what comes on theirs waits for it. If it was
        waited for in vain, that would wait for ever.
        """
        super().abandon()
        if self._gloo:
            return
        if self._in_vain and self._stream is not None and isinstance(self._explain, Fault):
            if not self._work.is_completed():
                self._explain.give_up(self._stream.device)
            return
        with accelerator.on(self._stream):
            self._work.wait()


_claiming = threading.Lock()


class Messages(Pending):
    """A batch of messages over gloo, which says that one is done only to who waits for it, and takes a time-out for
    the end of the group: a thread waits where somebody wants to know, or not to wait for ever.
    """

    __slots__ = ("_error", "_explain", "_keep", "_over", "_result", "_works")

    def __init__(self, works: Sequence[dist.Work], result: Any, explain: Explain, *, keep: object = None) -> None:
        self._works, self._result, self._explain, self._keep = list(works), result, explain, keep
        self._over: threading.Event | None = None
        self._error: RuntimeError | None = None
        exits.loose.add(self)

    def settle(self) -> None:
        """Wait, on this thread if none does already: gloo tells one thread only."""
        if self._claim():
            self._wait()
        else:
            assert self._over is not None
            self._over.wait()

    def _claim(self) -> bool:
        with _claiming:
            if self._over is None:
                self._over = threading.Event()
                return True
        return False

    def _wait(self) -> None:
        assert self._over is not None
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        except BaseException:  # Ctrl-C
            self._error = RuntimeError("the wait was interrupted")
            raise
        finally:
            self._works.clear()
            exits.loose.discard(self)
            self._over.set()

    def _watch(self) -> threading.Event:
        if self._claim():

            def watch() -> None:
                with exits.blocked():
                    self._wait()

            threading.Thread(target=watch, name="meshcomm messages", daemon=True).start()
        assert self._over is not None
        return self._over

    def wait(self, timeout: float | None) -> Any:
        """On this thread, unless there is one that waits already."""
        if timeout is None:
            self.settle()
        elif not self._watch().wait(timeout):
            raise TimedOutError
        if self._error is not None:
            raise self._explain(self._error) from self._error
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
