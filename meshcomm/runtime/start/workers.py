"""``runtime="processes"``: one worker process per rank on this machine, and a pool that keeps them.

    parent                                 worker of rank r
    store on a free loopback port  <-----  init(store=, rank=r, ...)
    pipe r: pickled (fn, args)     ----->  fn(*args)
    pipe r: pickled result or error <----
    where is it?                   <---->  the functions that rank r is in, told by a thread

Values travel as pickled bytes (by_value.py), never through shared memory: a result does not depend on a worker that
is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Protocol, TypeVar

from meshcomm.errors import CommError, MeshError, fail, text
from meshcomm.runtime.health import peers
from meshcomm.runtime.start import by_value, rendezvous, worker, world
from meshcomm.runtime.start.request import duration, switch
from meshcomm.runtime.start.worker import Answer, Plan, serve, unpack

T = TypeVar("T")

# How long after the first failure the others may still answer: they may fail alike, or be the failure's cause.
_PROMPT = 0.1
_POOL_PROMPT = 1.0
_FOLLOWS = 1.0  # The same after a CommError: it may follow from the failure of a rank that is slower to say so.
_GOODBYE = 10.0
_ASKED = 1.0  # How long ranks that are late may take to say where they are.


class Watched(Protocol):
    """A program that tells more than its result."""

    program: Callable[..., Any]
    """What the workers run instead: it can be pickled if the program can."""

    def results(self, told: list[Any]) -> list[Any]:
        """The results of the program among what the workers have told."""


watch_workers: Callable[[Callable[..., Any]], Watched | None] | None = None
"""Set by who wants to know what programs in other processes do, if he does: tracing."""


def run_processes(
    fn: Callable[..., T],
    ranks: int,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    guard: bool | None = None,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on ``ranks`` new processes of this machine; the results in order of rank.

    Args:
        fn: a function at the top level of a module (or of the script); it, its arguments and its results are pickled.
            Where cloudpickle is installed, any function, of a notebook, too.
        ranks: number of processes.
        args: positional arguments, equal on every rank.
        kwargs: keyword arguments, equal on every rank.
        backend: as in ``init``.
        timeout: seconds (or a timedelta) for everything, starting included; None: no limit but that of each collective.
        guard: as in ``init``.

    Raises:
        MeshError: what cannot be pickled, named; more ranks than the accelerators can take.
        CommError: a rank that raised (its traceback is in the text, the exception is ``__cause__``), that died, or that
            was not done in time. No process is left behind.
    """
    watched = watch_workers(fn) if watch_workers is not None else None
    task = _pack(fn, args, kwargs or {}, None if watched is None else watched.program)
    with WorkerPool(ranks, backend=backend, timeout=timeout, guard=guard) as pool:
        results = pool.do(task, _name(fn), _PROMPT)
    return results if watched is None else watched.results(results)


class WorkerPool:
    """``ranks`` worker processes that stay, with their process group, from one ``run`` to the next.

    A run in which ranks failed in different ways may leave a collective half done: the next ``run`` then starts new
    workers. A context manager; without one the workers end with this object, or with this process.
    """

    def __init__(
        self,
        ranks: int,
        *,
        backend: str | None = None,
        timeout: float | timedelta | None = None,
        guard: bool | None = None,
    ) -> None:
        """``timeout``: seconds for each run; workers start at the first."""
        self.ranks = ranks
        self._backend, self._timeout, self._guard = backend, duration("launch", timeout), guard
        self._lock = threading.Lock()
        self._crews: list[_Crew] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._crews)

    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """``fn(*args, **kwargs)`` on every rank: the results in order of rank. Raises as ``run_processes``."""
        return self.do(_pack(fn, args, kwargs), _name(fn), _POOL_PROMPT)

    def do(self, task: bytes, name: str, prompt: float) -> list[Any]:
        """A packed task, which is called so in errors. ``prompt``: for so long after a failure others may answer."""
        with self._lock:
            deadline = None if self._timeout is None else time.monotonic() + self._timeout.total_seconds()
            healthy = False
            try:
                answers = self._ready(deadline).work(task, deadline, prompt)
                healthy = _in_step(answers)
            finally:
                if not healthy:
                    _kill_all(self._crews)
        return _results(name, answers, self._timeout)

    def _ready(self, deadline: float | None) -> _Crew:
        if not self._crews:
            crew = _Crew(self.ranks, self._backend, self._timeout, self._guard)
            self._crews.append(crew)
            crew.start(deadline)
        return self._crews[0]

    def close(self) -> None:
        """End the workers. ``run`` would start new ones."""
        with self._lock:
            for crew in self._crews:
                crew.dismiss()
            _kill_all(self._crews)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def _kill_all(crews: list[_Crew]) -> None:
    while crews:
        crews.pop().kill()


# -------------------------------------------------------------------------------------------------------------- answers


def _in_step(answers: Sequence[Answer]) -> bool:
    """All ranks finished, or all refused a call before it communicated: no collective is half done."""
    if all(answer.kind == "error" for answer in answers):
        return all(isinstance(answer.value, MeshError) for answer in answers)
    return all(answer.kind == "result" for answer in answers)


def _results(what: str, answers: Sequence[Answer], limit: timedelta | None) -> list[Any]:
    """The results, or the first failure as an error; ``what`` was done."""
    failed = [a for a in answers if a.kind in ("died", "error")]
    if failed:
        # A rank that dies, or raises, makes its peers fail: it comes first.
        first = min(failed, key=lambda a: (a.kind == "error", isinstance(a.value, CommError), a.when))
        _raise_failure(what, first, [a for a in answers if a is not first])
    late = [a for a in answers if a.kind == "late"]
    if late and limit is not None:
        done = _ranks(answers, "result")
        stopped = [f"rank {a.rank} {a.summary}" for a in late if a.summary]
        fail(
            "launch",
            f"{what} did not end within {limit.total_seconds():g} s on {_ranks(late, 'late')}; all ranks were ended.",
            got="; ".join(
                [f"done: {len(answers) - len(late)} of {len(answers)} ranks{done and f' ({done})'}", *stopped]
            ),
            fix="give a longer timeout=; if some ranks wait for others, look for a collective that not all call",
            kind=CommError,
        )
    return [a.value for a in answers]


def _ranks(answers: Sequence[Answer], kind: str) -> str:
    found = [str(a.rank) for a in answers if a.kind == kind]
    return f"rank {', '.join(found)}" if found else ""


def _raise_failure(what: str, first: Answer, others: Sequence[Answer]) -> None:
    also = "; ".join(f"rank {a.rank}: {a.summary[:120]}" for a in others if a.kind in ("died", "error"))
    more = [f"also failed: {also}"] if also else []
    more += [f"rank {a.rank} {a.summary}" for a in others if a.kind == "late" and a.summary]
    more += [f"done already: {done}"] if (done := _ranks(others, "result")) else []
    message = text("launch", f"rank {first.rank} failed in {what}: {first.summary}", got="; ".join(more))
    if first.trace:
        lines = first.trace.rstrip().replace("\n", f"\n  [rank {first.rank}] ")
        message += f"\n\n  [rank {first.rank}] {lines}"
    raise CommError(message) from (first.value if isinstance(first.value, BaseException) else None)


# ----------------------------------------------------------------------------------------------------------- the parent


def _context() -> ForkServerContext | SpawnContext:
    """Forking this process is not safe once torch has threads; a server that has only imported torch may fork."""
    if sys.platform == "linux":
        if sys.version_info < (3, 11, 1):  # there the server's socket is open to all users of the machine otherwise
            multiprocessing.util.abstract_sockets_supported = False  # type: ignore[misc]
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["torch", "torch.distributed", worker.__name__])
        return server
    return multiprocessing.get_context("spawn")


class _Crew:
    """One process per rank, a pipe to each, and the store in which they meet."""

    def __init__(self, ranks: int, backend: str | None, limit: timedelta | None, guard: bool | None) -> None:
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            fail("launch", "ranks must be a positive int.", got=repr(ranks))
        self._ranks, self._limit, guard = ranks, limit, switch("launch", "guard", guard)
        # A collective does not wait longer than the run may last.
        self._timeout = min(world.DEFAULT_TIMEOUT, limit or world.DEFAULT_TIMEOUT)
        self._asked = {"world_size": ranks, "backend": backend, "timeout": self._timeout, "guard": guard}
        self._pipes: list[Connection] = []
        self._questions: list[Connection] = []
        self._workers: list[BaseProcess] = []

    def start(self, deadline: float | None) -> None:
        """Start the processes and wait until their group stands."""
        context = _context()
        self._store = rendezvous.loopback_server(self._timeout)
        for rank in range(self._ranks):
            plan = Plan(self._store.port, dict(os.environ), {**self._asked, "rank": rank})
            mine, theirs = context.Pipe()
            ask, asked = context.Pipe()
            process = context.Process(target=serve, args=(theirs, asked, plan), name=f"meshcomm-rank-{rank}")
            self._pipes.append(mine)
            self._questions.append(ask)
            with by_value.main_left_alone():
                process.start()
            self._workers.append(process)
            theirs.close()
            asked.close()
        answers = self._collect(deadline, _PROMPT)
        died = [a for a in answers if a.kind == "died"]
        refused = [a.value for a in answers if isinstance(a.value, MeshError)]
        if died:
            fix = "call launch(..., runtime='processes') under `if __name__ == '__main__':`; see also its messages"
            fail("launch", f"rank {died[0].rank} ended while starting: {died[0].summary}", fix=fix, kind=CommError)
        if refused:
            raise refused[0]
        _results("the start of the ranks", answers, self._limit)

    def work(self, task: bytes, deadline: float | None, prompt: float) -> list[Answer]:
        """Every rank's answer to the task."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # A dead worker is found when its answer is awaited.
                pipe.send_bytes(task)
        return self._collect(deadline, prompt)

    def _collect(self, deadline: float | None, prompt: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        while len(answers) < self._ranks:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            waiting: list[Any] = []
            for rank in set(range(self._ranks)) - set(answers):
                waiting += [self._pipes[rank], self._workers[rank].sentinel]
            if not wait(waiting, left):
                break
            for rank in sorted(set(range(self._ranks)) - set(answers)):
                answer = self._answer(rank)
                if answer is not None:
                    answers[rank] = answer
                    if answer.kind != "result":
                        follows = isinstance(answer.value, CommError)
                        soon = time.monotonic() + (max(prompt, _FOLLOWS) if follows else prompt)
                        deadline = soon if deadline is None else min(deadline, soon)
        places = self._whereabouts([rank for rank in range(self._ranks) if rank not in answers])
        return [answers.get(rank) or Answer("late", rank, summary=places[rank]) for rank in range(self._ranks)]

    def _whereabouts(self, ranks: list[int]) -> dict[int, str]:
        """What these ranks do, which have not answered."""
        found = {}
        for rank in ranks:
            pid = self._workers[rank].pid
            if pid is not None and peers.is_stopped(pid):
                found[rank] = f"is stopped (process {pid})"
            else:
                with contextlib.suppress(OSError):
                    self._questions[rank].send_bytes(b"?")
        end = time.monotonic() + _ASKED
        for rank in set(ranks) - set(found):
            found[rank] = "does not say where it is"
            with contextlib.suppress(EOFError, OSError):
                if self._questions[rank].poll(max(0.0, end - time.monotonic())):
                    found[rank] = self._questions[rank].recv_bytes().decode()
        return found

    def _answer(self, rank: int) -> Answer | None:
        pipe, process = self._pipes[rank], self._workers[rank]
        try:
            if pipe.poll():
                return unpack(rank, pipe.recv_bytes())
        except (EOFError, OSError):
            process.join(1.0)
        if process.exitcode is None:
            return None
        return Answer("died", rank, summary=_epitaph(process.exitcode), when=time.monotonic())

    def dismiss(self) -> None:
        """Let the workers leave their group and end by themselves."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
        until = time.monotonic() + _GOODBYE
        for process in self._workers:
            process.join(max(0.0, until - time.monotonic()))

    def kill(self) -> None:
        """End whatever still runs, now."""
        for process in self._workers:
            if process.exitcode is None:
                process.kill()
        for process in self._workers:
            process.join()
            process.close()
        for pipe in (*self._pipes, *self._questions):
            pipe.close()
        self._workers.clear()
        self._pipes.clear()
        self._questions.clear()


def _epitaph(exitcode: int) -> str:
    if exitcode >= 0:
        return f"the process ended with exit code {exitcode} and no result."
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"the process was ended by {name}."


def _pack(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], instead: Callable[..., Any] | None = None
) -> bytes:
    """The task as bytes, or an error that names what cannot be sent; ``instead``: what is run in place of ``fn``."""
    if (
        getattr(fn, "__module__", None) == "__main__"
        and not by_value.main_can_be_imported()
        and not by_value.is_there()
    ):
        fix = f"{by_value.INSTALL}; or put it into a file, and import it from there; or use runtime='in-process'"
        fail("launch", f"{_name(fn)} lives in an interactive session, where other processes cannot import it.", fix=fix)
    named = "define it with def at the top level of a module; or use runtime='in-process'"
    parts = [(_name(fn), fn, named if by_value.is_there() else f"{by_value.INSTALL}; or {named}")]
    parts += [(f"args[{index}] of {_name(fn)}", value, "make it in fn instead") for index, value in enumerate(args)]
    parts += [(f"kwargs[{key!r}] of {_name(fn)}", value, "make it in fn instead") for key, value in kwargs.items()]
    try:
        inner = by_value.dumps((fn if instead is None else instead, args, dict(kwargs)))
    except Exception:
        for what, value, fix in parts:
            _check_pickles(what, value, fix)
        raise
    return pickle.dumps((list(sys.path), inner))


def _check_pickles(what: str, value: Any, fix: str) -> None:
    try:
        by_value.dumps(value)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        fail("launch", f"{what} cannot be sent to other processes.", got=got, fix=fix)


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", None) or repr(fn))
