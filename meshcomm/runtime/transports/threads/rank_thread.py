"""The thread of a rank of this process, and its end, which comes before that of the interpreter.

A thread that comes back to Python when the interpreter is gone ends at once, and where C++ has called it, that ends the
process with SIGABRT ("terminate called without an active exception"): a rank that computes still, and one whose
function has returned while torch lets go of what it keeps for each thread, such as what is left of a failed backward.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from meshcomm.runtime.process import exits

_PATIENCE = 2.0
"""Seconds within which the code of a rank ends that is told to."""
_RETURNED = 30.0
"""Seconds within which a thread has ended whose function has returned, however busy the machine is."""
_SOON = 1e-3
_TASKS = "/proc/self/task"
_MANY = 500

_returned: list[tuple[int | None, float]] = []
"""The system's numbers of threads whose function has returned, and when; ``join`` may not wait until they have ended,
too. Later threads may be given the numbers of those that have.
"""


class Cancelled(BaseException):
    """Ends a rank because another one failed; no Exception, so that user code does not catch it."""


class Interruptible(Protocol):
    """Whose thread it is."""

    def stop(self) -> bool:
        """Have it end where it communicates; whether it may be far from there, for its code is running."""


class _Started(threading.Event):
    """Nobody waits for it, so it needs no lock."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        """Whether the thread runs."""
        return self._is_set

    def set(self) -> None:
        """It runs."""
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        """Go on."""
        return True

    def _at_fork_reinit(self) -> None:
        """In a forked process."""


class RankThread(threading.Thread):
    """A thread of a rank; who starts it goes on at once, where ``Thread.start`` would wait until it runs."""

    def __init__(self, index: int, rank: Interruptible, *target: Any) -> None:
        super().__init__(target=contextvars.copy_context().run, args=target, name=f"meshcomm rank {index}", daemon=True)
        self._started = _Started()  # a Python that has no such attribute waits, which takes longer
        self._rank = rank

    def run(self) -> None:
        """The life of the rank."""
        super().run()
        if len(_returned) >= _MANY:
            _returned[:] = _ending()
        _returned.append((self.native_id, _now()))

    def interrupt(self) -> None:
        """Have the rank end, where it communicates or, if its code is running, as soon as that is Python's."""
        if self._rank.stop() and self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(Cancelled))


def _now() -> float:
    """Seconds since what the system counts the starts of threads from."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else 0.0


def _ending() -> list[tuple[int | None, float]]:
    there = set(os.listdir(_TASKS)) if os.path.isdir(_TASKS) else ()
    return [(thread, at) for thread, at in _returned if str(thread) in there and _started(thread) <= at]


def _started(thread: int | None) -> float:
    """When this thread began; never, if it has ended."""
    try:
        with open(f"{_TASKS}/{thread}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return math.inf


def _running() -> list[RankThread]:
    me = threading.current_thread()  # a process that was forked in a rank has its thread
    return [each for each in threading.enumerate() if isinstance(each, RankThread) and each is not me]


def _has_ended(threads: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while (there := threads()) and time.monotonic() < end:
        time.sleep(_SOON)
    return not there


def _end_all() -> None:
    """At exit, end what ranks are left, and wait until their threads have ended; or leave without the interpreter."""
    ended = False
    with contextlib.suppress(KeyboardInterrupt):
        for each in _running():
            each.interrupt()
        if _returned and not os.path.isdir(_TASKS):  # nobody can tell, but that they have little to do
            time.sleep(_PATIENCE / 20)
        ended = _has_ended(lambda: bool(_running()), _PATIENCE) and _has_ended(lambda: bool(_ending()), _RETURNED)
    if not ended:
        exits.leave_at_once("the program ends while a rank still runs.")


atexit.register(_end_all)
