"""What a program calls that answers otherwise in each process, however it came by the name: heard by a profiler.

::

    from time import time; time()        a function of C: the one that is called is in the table
    Path("a").exists(), uuid.uuid4()     the same, called by a module of the standard library for the program
    for name in {"dp", "tp"}             a set of strings is gone through: found in the code, once for each function

Where a profiler of the user's is on, nothing is heard.
"""

from __future__ import annotations

import contextlib
import datetime
import dis
import gc
import io
import os
import platform
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from meshcomm.runtime.callsite import CallSite

__all__ = ["heard_by"]

_FILES = "os.stat os.lstat os.access os.listdir os.scandir os.open os.readlink os.getcwd"
_PROCESS = "os.getpid os.getppid os.urandom os.uname os.getlogin os.getloadavg os.times socket.gethostname"
_CLOCKS = (
    "time.time time.time_ns time.monotonic time.monotonic_ns time.perf_counter time.perf_counter_ns time.process_time"
)
_MODULES = {"os": os, "socket": socket, "time": time, "gc": gc}
_SAFE = frozenset(("sorted", "len", "sum", "min", "max", "any", "all", "frozenset"))
"""Who is given a set and does not tell its order."""
_TELL = frozenset(("list", "tuple", "next", "iter", "enumerate", "zip", "map", "pop", "join"))


def _of_c() -> dict[Any, str]:
    """Functions of C, and what they are called."""
    found: dict[Any, str] = {io.open: "open()", hash: "hash()", id: "id()"}
    for path in (*_FILES.split(), *_PROCESS.split(), *_CLOCKS.split(), "gc.get_count"):
        module, name = path.split(".")
        known = getattr(_MODULES[module], name, None)
        if known is not None:
            found[known] = f"{path}()"
    for each in ("now", "utcnow", "today"):
        found[getattr(datetime.datetime, each)] = f"datetime.{each}()"
    found[datetime.date.today] = "date.today()"
    for each in ("random", "getrandbits"):
        found[getattr(random, each)] = f"random.{each}()"
    return found


_OF_C = _of_c()


class _Heard:
    """The profiler of one thread's run."""

    def __init__(
        self, note: Callable[[str, CallSite], None], asker: Callable[[FrameType | None], CallSite | None]
    ) -> None:
        self._note, self._asker = note, asker
        self._seen = set[CodeType]()
        count = getattr(torch.cuda.device_count, "__wrapped__", torch.cuda.device_count)
        self._of_python: dict[CodeType, Callable[[FrameType], None]] = {
            random.Random.seed.__code__: self._seeded,
            platform.node.__code__: lambda frame: self._say("platform.node()", frame.f_back),
            count.__code__: lambda frame: self._say("torch.cuda.device_count()", frame.f_back),
        }

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            what = _OF_C.get(arg)
            if what is not None:
                self._say(what, frame)
        elif event == "call" and frame.f_code not in self._seen:
            found = self._of_python.get(frame.f_code)
            if found is not None:
                found(frame)
                return
            self._seen.add(frame.f_code)
            if self._asker(frame) is not None:
                for line in _sets_of(frame.f_code):
                    self._note("the order of a set", CallSite(frame.f_code.co_filename, line))

    def _say(self, what: str, frame: FrameType | None) -> None:
        site = self._asker(frame)
        if site is not None:
            self._note(what, site)

    def _seeded(self, frame: FrameType) -> None:
        if frame.f_locals.get("a") is None:
            self._say("random.Random() without a seed", frame)


@contextlib.contextmanager
def heard_by(
    note: Callable[[str, CallSite], None], asker: Callable[[FrameType | None], CallSite | None]
) -> Iterator[None]:
    """What this thread's program calls is noted, with the line for which ``asker`` says that it is the program's."""
    if sys.getprofile() is not None:
        yield
        return
    sys.setprofile(_Heard(note, asker))
    try:
        yield
    finally:
        sys.setprofile(None)


def _sets_of(code: CodeType) -> Iterator[int]:
    """Lines at which a set is made whose order can be told."""
    steps = [
        step for step in dis.get_instructions(code) if step.opname not in ("PRECALL", "CACHE", "PUSH_NULL", "RESUME")
    ]
    told = any(step.opname == "GET_ITER" for step in steps) or not _TELL.isdisjoint(code.co_names)
    line, asked = code.co_firstlineno, ""
    if code.co_name == "<setcomp>":
        return
    starts = dict(dis.findlinestarts(code))
    for i, step in enumerate(steps):
        line = starts.get(step.offset) or line
        after = steps[i + 1].opname if i + 1 < len(steps) else ""
        if step.opname == "LOAD_CONST" and isinstance(step.argval, frozenset):
            if after == "GET_ITER" and any(isinstance(each, str) for each in step.argval):
                yield line
        elif _makes_a_set(step) and asked not in _SAFE and told and after != "CONTAINS_OP":
            yield line
        if step.opname.startswith("LOAD_"):
            asked = step.argval if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else asked if _is_part(step) else ""


def _makes_a_set(step: dis.Instruction) -> bool:
    return step.opname == "BUILD_SET" or (step.opname == "LOAD_GLOBAL" and step.argval in ("set", "frozenset"))


def _is_part(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST"
