"""What a program asks besides its mesh and its tensors, on which what it does next can depend.

::

    os.environ["RANK"], torch.distributed.get_rank()   answered as by a launcher: a read of the rank
    torch.distributed.all_reduce(x)                    sent past the library: refused
    other variables, such as SLURM_PROCID              not known here: the line is listed
    random, numpy.random, os.urandom, time, hash, id   other ones in each process: the line is listed (and profiled.py)
    threads of the program's own                       not seen: the line is listed

Heard is what stands in the user's own files, while ranks of a proof run.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import os
import random
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch.distributed as dist

from meshcomm.errors import fail
from meshcomm.runtime.callsite import CallSite, is_ours
from meshcomm.runtime.transports.dry.world import dry_world
from meshcomm.runtime.transports.threads.scheduler import current_rank
from meshcomm.verifying.hangs.profiled import heard_by

__all__ = ["Outside"]

_OF_RANK = ("RANK", "LOCAL_RANK")
_OF_SIZE = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")
_LIBRARIES = tuple({sysconfig.get_paths()[kind] + os.sep for kind in ("stdlib", "purelib", "platlib")})
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_THROUGH = tuple(f"<frozen {each}>" for each in ("_collections_abc", "genericpath", "os", "posixpath")) + tuple(
    _STANDARD + each.replace("/", os.sep)
    for each in (
        "_collections_abc.py", "concurrent/futures/", "genericpath.py", "glob.py", "os.py", "pathlib", "platform.py",
        "posixpath.py", "random.py", "secrets.py", "shutil.py", "socket.py", "tempfile.py", "threading.py", "uuid.py",
    )
)  # fmt: skip
"""Of the standard library, what asks for who calls it."""


class Outside:
    """``with outside:`` the ranks of a proof run. ``found``: what is to be listed, in the order in which it came."""

    def __init__(self, fn: Callable[..., object] | None = None) -> None:
        self.found: dict[str, None] = {}
        self._globals: dict[str, Any] = fn.__globals__ if isinstance(fn, FunctionType) else {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Outside:
        try:
            self._stack.enter_context(_heard_environment(self))
            for name, answer in (("is_initialized", lambda _: True), ("get_rank", _rank), ("get_world_size", _size)):
                if hasattr(dist, name):
                    self._replace(dist, name, _answering(getattr(dist, name), answer))
            for name in [*_that_send()]:
                self._replace(dist, name, _refusing(getattr(dist, name), name))
            for name in _CLOCKS:
                self._listen(time, name, "time")
            self._listen(os, "urandom", "os")
            self._listen(threading.Thread, "start", "a thread, ")
            self._drawn(random, "random")
            if "numpy" in sys.modules:
                numpy = sys.modules["numpy"].random
                self._drawn(numpy, "numpy.random")
                self._replace(numpy, "default_rng", self._unseeded(numpy.default_rng))
            for name in ("hash", "id"):
                if name not in self._globals and self._globals:
                    self._stack.callback(self._globals.pop, name, None)
                    self._globals[name] = self._noting(getattr(builtins, name), f"{name}()")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def note(self, what: str, site: CallSite) -> None:
        """A line of the program's that asks for something."""
        self.found[f"{what} at {site}"] = None

    def of_thread(self) -> contextlib.AbstractContextManager[None]:
        """``with`` it a rank's program runs in this thread."""
        return heard_by(self.note, asker)

    def _drawn(self, module: Any, name: str) -> None:
        """Its functions that draw of the one state that a process has, or seed another one by nothing."""
        for each in dir(module):
            known = getattr(module, each)
            owner = type(getattr(known, "__self__", None)).__name__
            if owner in ("Random", "RandomState") and each not in (
                "seed",
                "setstate",
                "getstate",
                "set_state",
                "get_state",
            ):
                self._listen(module, each, name)

    def _unseeded(self, known: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            site = None if args or kwargs else asker(sys._getframe(1))
            if site is not None:
                self.note("numpy.random.default_rng()", site)
            return known(*args, **kwargs)

        return asked

    def _listen(self, owner: Any, name: str, said: str) -> None:
        what = f"{said}{name}()" if said.endswith(" ") else f"{said}.{name}()"
        self._replace(owner, name, self._noting(getattr(owner, name), what))

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, new)

    def _noting(self, known: Callable[..., Any], what: str) -> Callable[..., Any]:
        def heard(*args: Any, **kwargs: Any) -> Any:
            site = asker(sys._getframe(1))
            if site is not None:
                self.note(what, site)
            return known(*args, **kwargs)

        return heard


def asker(frame: FrameType | None) -> CallSite | None:
    """Where a rank of a proof asks, if it is its program that does, and no library."""
    while frame is not None and (frame.f_code.co_filename.startswith(_THROUGH) or _is_made(frame.f_code)):
        frame = frame.f_back
    if frame is None or (dry_world() is None and current_rank() is None):
        return None
    file = frame.f_code.co_filename
    return None if is_ours(file) or file.startswith((*_LIBRARIES, "<frozen")) else CallSite(file, frame.f_lineno)


def _is_made(code: CodeType) -> bool:
    """Whether it is a method of a dataclass, which stands in no file."""
    return code.co_filename == "<string>" and code.co_name.startswith("__")


def _rank(group: Any = None) -> int:
    """That of the rank that asks, which a dry run is told."""
    world, rank = dry_world(), current_rank()
    if world is not None:
        world.reads.note_rank()
        return world.rank
    assert rank is not None
    return rank.index


def _size(group: Any = None) -> int:
    world, rank = dry_world(), current_rank()
    if world is not None:
        return world.size
    assert rank is not None
    return rank.world.size


def _that_send() -> Iterator[str]:
    """What torch.distributed sends by itself: what it does with a group, but asking of it."""
    for name, known in vars(dist).items():
        if type(known) is FunctionType and not name.startswith(("_", "get_", "is_", "destroy_", "abort_")):
            parameters = inspect.signature(known).parameters
            if "group" in parameters or name in ("batch_isend_irecv", "init_process_group", "new_group"):
                yield name


def _refusing(known: Callable[..., Any], name: str) -> Callable[..., Any]:
    def asked(*args: Any, **kwargs: Any) -> Any:
        site = asker(sys._getframe(1))
        if site is not None:
            what = f"torch.distributed.{name} at {site} sends by itself, and nothing here knows of it."
            fail("prove_no_hang", what, fix="call meshcomm's own, over a named axis")
        return known(*args, **kwargs)

    return asked


def _answering(known: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    def asked(group: Any = None) -> Any:
        if group is None and asker(sys._getframe(1)) is not None:
            return answer(group)
        return known() if group is None else known(group)

    return asked


@contextlib.contextmanager
def _heard_environment(outside: Outside) -> Iterator[None]:
    """``os.environ`` says to each rank's program which rank it is."""
    plain: Any = type(os.environ)

    class Heard(plain):  # type: ignore[misc]
        def __getitem__(self, name: str) -> str:
            site = asker(sys._getframe(1))
            if site is not None:
                if name in _OF_RANK or name in _OF_SIZE:
                    return str(_rank() if name in _OF_RANK else _size())
                outside.note(f"os.environ[{name!r}]", site)
            return str(super().__getitem__(name))

    environ: MutableMapping[str, str] = os.environ
    environ.__class__ = Heard
    try:
        yield
    finally:
        environ.__class__ = plain
