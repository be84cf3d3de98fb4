"""One worker process: what it is told, what it does, what it answers."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from meshcomm.errors import MeshError, fail, text
from meshcomm.runtime import tracebacks
from meshcomm.runtime.process import home
from meshcomm.runtime.start import by_value, rendezvous, world
from meshcomm.runtime.start.launchers import LOOPBACK

_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_SHOWN = 12
"""How many functions of one rank, one inside of the other, are told."""


@dataclass(frozen=True)
class Plan:
    """What a worker must know before its first task."""

    port: int
    """Of the store on loopback at which the ranks meet."""
    environ: dict[str, str]
    world: dict[str, Any]
    """What to ask ``init`` for."""


@dataclass(frozen=True)
class Answer:
    """What came back from one rank: ``kind`` is "result", "error", "died" or "late"."""

    kind: str
    rank: int
    value: Any = None
    summary: str = ""
    trace: str = ""
    when: float = 0.0


def unpack(rank: int, data: bytes) -> Answer:
    """What ``_attempt`` packed, in the parent."""
    kind, when, summary, trace, inner = pickle.loads(data)
    try:
        value = pickle.loads(inner)
    except Exception as error:
        if kind == "error":  # An exception class that pickle cannot build again: its traceback says enough.
            return Answer(kind, rank, None, summary, trace, when)
        summary = f"its result cannot be loaded here: {type(error).__name__}: {error}"
        return Answer("error", rank, error, summary, trace, when)
    return Answer(kind, rank, value, summary, trace, when)


def serve(pipe: Connection, questions: Connection, plan: Plan) -> None:
    """A worker's life: join the group, do tasks until the parent says so or is gone; and say where it is when asked."""
    _settle(plan, questions)
    pipe.send_bytes(_attempt(lambda: _join(plan)))
    with contextlib.suppress(EOFError, OSError):
        while task := pipe.recv_bytes():
            home.say("")
            answer = _attempt(lambda task=task: _perform(task))  # type: ignore[misc]
            if home.listeners:  # the others are still at it, perhaps
                kind, _, summary, *_ = pickle.loads(answer)
                home.say("returned from its function" if kind == "result" else f"failed: {summary}")
            pipe.send_bytes(answer)
    world.shutdown()


def _settle(plan: Plan, questions: Connection) -> None:
    # Ctrl-C reaches the whole terminal: the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _listen_to_parent(questions)
    # The server that forked this process may be older than the parent's present environment.
    os.environ.clear()
    os.environ.update(plan.environ)
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // plan.world["world_size"]))
    with contextlib.suppress(ValueError):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # Forked copies of one random state would hide a missing broadcast. Python's own is renewed by itself.
    torch.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _listen_to_parent(questions: Connection) -> None:
    """Say where this rank is when the parent asks, and end when it is gone. That twice: a thread that sees it go needs
    the interpreter; the kernel's signal does not, but has no name for the parent: it comes when the process that forked
    this one ends, which is soon after.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while parent.sentinel not in wait([parent.sentinel, questions]):
                questions.recv_bytes()
                questions.send_bytes(_whereabouts().encode())
        os._exit(1)

    threading.Thread(target=listen, name="meshcomm-parent", daemon=True).start()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)


def _whereabouts() -> str:
    """The functions that the main thread is in, from the user's on, and what the last of them has called."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inside: list[str] = []
    files: list[str] = []
    while frame is not None and frame.f_code.co_filename != __file__:
        code = frame.f_code
        if not code.co_filename.startswith("<frozen"):  # how Python imports
            inside.insert(0, f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})")
            files.insert(0, code.co_filename)
        frame = frame.f_back
    if frame is None or not inside:
        return "is between two functions"
    users = tracebacks.users(files) if tracebacks.is_wanted() else []
    inside = inside[: users[-1] + 2] if users else inside
    return "is in " + " > ".join(inside if len(inside) <= _SHOWN else [*inside[:2], "...", *inside[2 - _SHOWN :]])


def _join(plan: Plan) -> None:
    store = rendezvous.tcp_store(LOOPBACK, plan.port, serve=False, timeout=plan.world["timeout"])
    world.launched_as(store=store, **plan.world)


def _perform(task: bytes) -> Any:
    path, inner = pickle.loads(task)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    try:
        fn, args, kwargs = pickle.loads(inner)
    except Exception as error:
        what = "the function or its arguments cannot be loaded in a worker process."
        got = f"{type(error).__name__}: {error}"
        raise MeshError(text("launch", what, got=got, fix="define them in a module that can be imported")) from error
    try:
        return fn(*args, **kwargs)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        return None  # the rank has ended well, as in-process


def _attempt(step: Callable[[], Any]) -> bytes:
    """The answer to the parent, whatever happens; a result that cannot be pickled is an error of this rank."""
    try:
        value = step()
        try:
            data = by_value.dumps(value)
        except Exception as error:
            what = f"the result, of type {type(value).__name__}, cannot be sent back."
            fail(
                "launch",
                what,
                got=f"{type(error).__name__}: {error}",
                fix="return tensors, numbers and plain containers",
            )
        return pickle.dumps(("result", time.monotonic(), "", "", data))
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next  # The user's traceback starts with the user's function.
        shown = tracebacks.text(error.with_traceback(frames))
        summary = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        return pickle.dumps(("error", time.monotonic(), summary, shown, _pickled_error(error)))


def _pickled_error(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return b""
