"""Run a function on every rank, wherever the ranks are."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from numbers import Integral
from typing import Any, Literal, TypeVar

from meshcomm.errors import fail
from meshcomm.runtime.process.reuse import reserve
from meshcomm.runtime.start import devices, world
from meshcomm.runtime.start.request import duration, switch
from meshcomm.runtime.transports.dry.world import dry_world
from meshcomm.runtime.transports.threads.orders import world_of
from meshcomm.runtime.transports.threads.scheduler import current_rank

T = TypeVar("T")


_MOST = 10_000
"""Threads or processes: some tens of thousands are what a system allows."""


def launch(
    fn: Callable[..., T],
    ranks: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    runtime: Literal["in-process", "processes"] = "in-process",
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    guard: bool | None = None,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on every rank and give what it returns on each.

    In a plain process this starts the ranks. Under a launcher (torchrun, mpiexec, srun) or inside a rank they are
    there already: ``fn`` runs once, on this rank, and the list holds its one result. So a script that ends in
    ``mc.launch(main, ranks=4)`` runs unchanged either way.

    Args:
        fn: the program of one rank.
        ranks: how many.
        args: its positional arguments; in-process all ranks get the same objects, as they see the same globals. A
            parameter that two ranks train or write has to be made, or deep-copied, inside of ``fn``.
        kwargs: its keyword arguments.
        runtime: "in-process": every rank is a thread of this process, one runs at a time, and they change over at
            collectives only, so that a run is deterministic and a deadlock or mismatch is an error at once. Where
            torch computes with one thread they share one core, which what a rank starts inherits.
            "processes": one process per rank on this machine, on loopback; ``fn``, its arguments and results are
            pickled, lambdas and what a notebook defines where cloudpickle is installed.
        backend: of the processes, as in ``init``; in-process nothing depends on it.
        timeout: in seconds, or a timedelta: for the whole run, and of processes for each collective within. In-process
            the run ends at its first collective after that.
        guard: of the processes, as in ``init``: whether they compare their calls. Ranks of one process always do.

        Where the ranks are there already, these three go to ``init``, whose time-out is that of each collective.

    Returns: the results in order of rank, None of a rank that ends with ``sys.exit(0)``; ``[result]`` on a rank.

    Raises:
        MeshError: ``ranks`` that is no positive int, is more than 10 000 or differs from the launcher's; an unknown
            runtime or backend; a backend, time-out or guard other than that of the ranks that are there already; a
            leaf that requires grad and that two ranks of one process train, or that one writes and another one uses.
        CommError: a deadlock, different calls on ranks of one axis; a process that failed; a run that took too long.
        Exception: in-process, whatever a rank raised, with its traceback; the other ranks are ended.

    Example:
        >>> import meshcomm as mc
        >>> def main(greeting):
        ...     return f"{greeting} from {mc.make_mesh({'dp': 2}).coordinate}"
        >>> mc.launch(main, ranks=2, args=("hello",))
        ["hello from {'dp': 0}", "hello from {'dp': 1}"]
    """
    if isinstance(ranks, bool) or not isinstance(ranks, Integral) or ranks < 1:
        fail("launch", f"ranks={ranks!r} is not a positive int.", fix="how many ranks to start")
    ranks = int(ranks)
    if ranks > _MOST:
        fail("launch", f"ranks={ranks} is more than one machine should start.", fix=f"at most {_MOST}")
    if not callable(fn):
        fail("launch", f"fn is not callable but {type(fn).__name__}.", fix="a function of one rank's program")
    named = isinstance(kwargs or {}, Mapping) and all(isinstance(name, str) for name in kwargs or {})
    if not isinstance(args, Sequence) or isinstance(args, str) or not named:
        fail(
            "launch",
            f"args={args!r} and kwargs={kwargs!r} are not a sequence and a mapping.",
            fix="args=(1, 2), kwargs={'name': 3}",
        )
    if runtime not in ("in-process", "processes"):
        fail("launch", f"no runtime {runtime!r}.", fix="'in-process' or 'processes'")
    limit, guard = duration("launch", timeout), switch("launch", "guard", guard)
    present = _ranks_present(backend, limit, guard)
    if present is not None:
        if present != ranks:
            fail(
                "launch",
                f"ranks={ranks}, but {present} ranks are running already.",
                got="a launcher started this process, or it has initialised torch.distributed, or is a rank",
                fix=f"ranks={present}, or start {ranks}",
            )
        return [fn(*args, **(kwargs or {}))]
    if runtime == "processes":
        workers: Any = importlib.import_module("meshcomm.runtime.start.workers")  # not every program starts processes
        results: list[T] = workers.run_processes(
            fn, ranks, tuple(args), dict(kwargs or {}), backend=backend, timeout=limit, guard=guard
        )
        return results
    devices.choose_backend(backend, "launch")
    inside = world_of(ranks, limit)
    try:
        found: list[T] = inside.run(lambda: to_its_end(fn, args, kwargs or {}))
    finally:
        reserve.trim(0)
    inside.forget()
    return found


def to_its_end(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``sys.exit(0)`` is how a program ends well: the rank has returned, and the others go on, as processes would."""
    try:
        return fn(*args, **kwargs)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        return None


def _ranks_present(backend: str | None, limit: timedelta | None, guard: bool | None) -> int | None:
    """How many ranks there are, where this process is one of them: with this backend, time-out and guard."""
    dry = dry_world()
    if dry is not None:
        devices.choose_backend(backend, "launch")
        return dry.size
    inside = current_rank()
    if inside is not None:
        devices.choose_backend(backend, "launch")
        if limit not in (None, inside.world.limit):
            fail(
                "launch",
                f"timeout={limit}, but the ranks are running already, with {inside.world.limit}.",
                fix="leave it out, or give it to the launch that started them",
            )
        return inside.world.size
    if not world.under_launcher():
        return None
    if any(given is not None for given in (backend, limit, guard)):
        world.init(backend=backend, timeout=limit, guard=guard)
    here = world.ensure()
    return None if here is None else here.size
