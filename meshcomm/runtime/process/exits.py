"""The end of the interpreter while a process group is alive."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol

from meshcomm.errors import CommError
from meshcomm.runtime import tracebacks

# A process that has used next to no time for so long has threads that wait, and none that lets go of tensors.
_QUIET = 0.03
# For collectives that are under way and may never end, since a peer has failed.
_PATIENCE = 2.0


class _Exit(threading.Thread):
    """When the interpreter ends, runs ``leave`` on a thread of its own, ``prepare`` on the interpreter's, ``end`` on
    its own, and ``last`` on the interpreter's.

    Why at all: a backend's thread that is about to let go of a tensor needs the interpreter; when that is gone, C++
    calls std::terminate (SIGABRT). Ending the group joins those threads. Why on a thread: the join waits for
    collectives under way, and a peer that has failed never joins those. It stands ready from the start, because an
    interpreter that ends starts no new threads.
    """

    def __init__(self, *steps: Callable[[], object]) -> None:
        super().__init__(name="meshcomm-exit", daemon=True)
        self._leave, self._prepare, self._end, self._last = steps
        self._pid = os.getpid()
        self._asked, self._settled, self._prepared, self._done = (threading.Event() for _ in range(4))

    def run(self) -> None:
        """Wait to be asked."""
        self._asked.wait()
        with contextlib.suppress(Exception):
            self._leave()
        with blocked():
            for each in list(loose):
                with contextlib.suppress(Exception):
                    each.settle()
        self._settled.set()
        self._prepared.wait()
        with contextlib.suppress(Exception):
            self._end()
        self._done.set()

    def finish(self) -> None:
        """At exit."""
        if os.getpid() != self._pid:  # A forked child: it has the object, but not the threads.
            return
        _left.append(None)
        with contextlib.suppress(Exception):
            _tell_launcher()
        self._asked.set()
        self._settled.wait(_PATIENCE)
        with contextlib.suppress(Exception):
            self._prepare()
        self._prepared.set()
        self._done.wait(_PATIENCE if self._settled.is_set() else 0)
        self._last()
        _leave_if_blocked()


class Loose(Protocol):
    """What nothing but a wait brings to an end."""

    def settle(self) -> None:
        """Wait."""


loose: weakref.WeakSet[Loose] = weakref.WeakSet()
_left: list[None] = []
_blocked: list[None] = []


def leaving() -> bool:
    """Whether the interpreter has begun to end: no new threads."""
    return bool(_left)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Around a wait in a thread that nothing can interrupt."""
    _blocked.append(None)
    try:
        yield
    finally:
        _blocked.pop()


def never_abort() -> None:
    """Whatever threads wait then, this process's interpreter ends without SIGABRT; asking again changes nothing."""
    pid = os.getpid()
    if pid not in _registered:
        _registered.append(pid)
        # A forked child has the list, but not the threads.
        atexit.register(lambda: _leave_if_blocked() if os.getpid() == pid else None)


def _leave_if_blocked() -> None:
    """A thread that comes back from such a wait to an interpreter that is gone ends the process with SIGABRT."""
    end = time.monotonic() + _PATIENCE / 4
    while _blocked and time.monotonic() < end:
        time.sleep(_QUIET)
    if _blocked:
        leave_at_once("the program ends while a message is neither sent nor received.")


def leave_at_once(why: str) -> NoReturn:
    """End the process without the end of the interpreter, which a thread would not survive, nor the process with it."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"meshcomm: {why}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def last_error() -> BaseException | None:
    """What the interpreter ends of."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _tell_launcher() -> None:
    """Leave for torchrun's summary what this rank fails of, as ``torch.distributed.elastic``'s ``record`` would.

    It takes the earliest failure for the cause and counts whole seconds: one that follows from another rank's comes
    later.
    """
    path, error = os.environ.get("TORCHELASTIC_ERROR_FILE"), last_error()
    if not path or error is None or os.path.exists(path):
        return
    when = math.ceil(time.time()) + 1 if isinstance(error, CommError) else int(time.time())
    about = {"py_callstack": tracebacks.text(error), "timestamp": str(when)}
    with open(path, "w") as file:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": about}}, file)


_watched: list[int] = []
_registered: list[int] = []


def watch(
    leave: Callable[[], object], prepare: Callable[[], object], end: Callable[[], object], last: Callable[[], object]
) -> None:
    """Call these, in this order, when this process's interpreter ends; asking again changes nothing."""
    if os.getpid() in _watched:
        return
    _watched.append(os.getpid())
    waiting = _Exit(leave, prepare, end, last)
    waiting.start()
    atexit.register(waiting.finish)


def settle() -> None:
    """Let other threads run until they have nothing to do: those of a group that is held elsewhere are not joined."""
    end = time.monotonic() + _PATIENCE / 2
    used = time.process_time()
    while time.monotonic() < end:
        time.sleep(_QUIET)
        before, used = used, time.process_time()
        if used - before < _QUIET / 20 and not _others_run():
            return


def _others_run() -> bool:
    """Whether another thread of this process has the processor or waits for it."""
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ():
        with contextlib.suppress(OSError):  # this one has ended since
            if int(thread) != threading.get_native_id():
                with open(f"/proc/self/task/{thread}/stat") as file:
                    if file.read().rsplit(")", 1)[1].split()[0] in "RD":
                        return True
    return False
