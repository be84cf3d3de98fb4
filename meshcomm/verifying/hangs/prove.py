"""prove_no_hang: of a program, or of a trace of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

from meshcomm.dry.run import Program, checked_mesh, checked_ranks, kept_random
from meshcomm.errors import CommError, MeshError, fail, few
from meshcomm.launch import launch, to_its_end
from meshcomm.make_mesh import make_mesh
from meshcomm.mesh import Mesh, use_mesh
from meshcomm.runtime.start import world
from meshcomm.runtime.transports.threads.random_state import RandomState
from meshcomm.runtime.transports.threads.scheduler import current_rank
from meshcomm.tracing.traces import Trace
from meshcomm.tracing.traces import trace as traced
from meshcomm.verifying.hangs.classes import Classes
from meshcomm.verifying.hangs.log import Log
from meshcomm.verifying.hangs.outside import Outside
from meshcomm.verifying.hangs.proof import Proof, judged
from meshcomm.verifying.hangs.reads import Reads, said_of
from meshcomm.verifying.hangs.traced import Groups, logs_of, unproven_of
from meshcomm.verifying.shared_state import SharedState

__all__ = ["prove_no_hang"]

_WHERE = "prove_no_hang"
_MOST = 10_000
"""Ranks."""
_RUN = 64
"""Ranks that are run together; more of them run dry, one after the other."""
_OPERATIONS = 100_000
"""Of torch's, all ranks together: so many are made one after the other, in less than a minute."""
_LOOKED_FOR = 256
"""Ranks that a list lacks and that run, so that the error can name all of them."""
Ranks = Sequence[int] | Literal["classes"] | None


@overload
def prove_no_hang(program: Trace) -> Proof: ...
@overload
def prove_no_hang(program: Callable[[], object], mesh: Mapping[str, int] | Mesh, ranks: Ranks = None) -> Proof: ...
def prove_no_hang(program: Any, mesh: Mapping[str, int] | Mesh | None = None, ranks: Ranks = None) -> Proof:
    """Whether the ranks of a program can wait for each other for ever: it names the calls that part, or the cycle.

    ::

        a log per rank        rank 0  begin all_reduce dp, wait, begin all_gather tp, wait
                              rank 1  ...
        (a) calls agree       the k-th call of each group is the same on all of its ranks; messages have another side
        (b) run on paper      with the waits where they stand: who is stuck is in a "deadlock"
        (c) once more         with every call blocking where it is made: stuck is an "order"

    Messages are met by source, destination and tag, and collectives by their number: what a rank does next depends on
    no race, so that one way through stands for all schedules (a Kahn network). What it can depend on beside that, the
    values of tensors read on the host, ``done()``, time-outs, random numbers, the clock, threads, and Python objects
    that the ranks of this process share, is listed in ``unproven``.

    "order" is safe on gloo, on shared memory and in one process, where a call that is under way holds nobody up. On
    transports where calls over several communicators run one after the other it is not, and NCCL says so of its own
    ("Using multiple NCCL communicators concurrently").

    Args:
        program: a function of no arguments, the program of one rank, which finds its mesh as the current one; or a
            closed trace of all ranks: :meth:`Trace.merge` makes one of those of several processes.
        mesh: of the function: axis to size, or a mesh, of which sizes and names are taken. Its ranks run in this
            process until they end or nobody can go on; where they are more than 64, or ``ranks`` are given, each runs
            alone, as :func:`dry_run` does it, with zeros for values that are read.
        ranks: those that run, when None all of them; all ranks are judged. Where some do not run, the others stand for
            those that are equal to them in all that they read of their place (``mesh.coordinate["tp"]``,
            :func:`axis_index`, ``mesh.rank``, :func:`is_main`; what a collective does by itself reads nothing, and each
            rank has groups of its own), and the proof says that it is one by classes. ``"classes"``: one of each class;
            so it is with None, too, where all ranks together would make more than 100,000 of torch's operations.

    Returns: a :class:`Proof`: ``ok``, ``findings`` of kind "mismatch", "unmatched", "deadlock", "order", ``unproven``;
        ``check()`` raises :class:`HangError`.

    Cost: none on a mesh of the caller's: a function is run on ranks of this process, of a trace nothing is. The judge
        itself takes half a second for 100,000 calls.

    Raises:
        MeshError: neither a function nor a trace; a mesh without a function or the other way round; sizes that are
            none, ranks that are not on the mesh, or none among them that is equal to another rank in what it read;
            called on a rank, or under a launcher; a trace that is open, lacks ranks, or of which compiled graphs are
            not known.
        Exception: what the program itself raises.

    Example:
        >>> import torch, meshcomm as mc
        >>> def main():
        ...     mesh, x = mc.current_mesh(), torch.ones(4)
        ...     axes = ("dp", "tp") if mesh.rank in (0, 3) else ("tp", "dp")
        ...     works = [mc.all_reduce(x, axis, async_op=True) for axis in axes]
        ...     mc.wait(works)
        >>> proof = mc.prove_no_hang(main, {"dp": 2, "tp": 2})
        >>> proof.ok, proof.findings[0].kind
        (False, 'order')

    Source: MPI's deadlock detectors (wait-for graphs); Kahn, The semantics of a simple language for parallel
        programming; the NCCL User Guide, Using multiple NCCL communicators concurrently.
    """
    if isinstance(program, Trace):
        if mesh is not None or ranks is not None:
            fail(_WHERE, "a trace has its mesh and its ranks.", fix="leave mesh and ranks out")
        return _of_trace(program)
    if not callable(program):
        what = f"expected a trace or a function, got {type(program).__name__}."
        fail(_WHERE, what, fix="prove_no_hang(fn, {'dp': 2}), or a closed trace of all ranks")
    shape, names = checked_mesh(_WHERE, mesh, _MOST)
    size = math.prod(shape.values())
    listed = None if ranks is None or ranks == "classes" else checked_ranks(_WHERE, ranks, size)
    if current_rank() is not None or world.under_launcher():
        fail(_WHERE, "called on a rank: it starts ranks of its own.", fix="call it in a plain process")
    outside = Outside(program)
    with outside:
        if ranks is None and size <= _RUN:
            dry = partial(_of_dry, program, shape, names, None, outside, _OPERATIONS)
            return _looked_twice(program, partial(_of_program, program, shape, names, outside), dry)
        every = _OPERATIONS if ranks is None else 0
        dry = partial(_of_dry, program, shape, names, listed, outside, every)
        return _looked_twice(program, dry, dry)


# ------------------------------------------------------------------------------------------------------ what is judged


def _of_trace(trace: Trace) -> Proof:
    logs = logs_of(trace)
    calls = sum(len(log.issues) for log in logs.values())
    return judged(logs, unproven_of(trace.events), [f"a trace of {len(logs)} ranks and {calls} calls"])


def _looked_twice(
    fn: Callable[[], object],
    first: Callable[[], Proof],
    dry: Callable[..., Proof],
) -> Proof:
    """Where ranks have changed Python objects that they share here: once more, each from what it was, as processes
    begin, which share none.
    """
    before = SharedState(fn)
    proof = first()
    after = SharedState(fn)
    changed = after.changed(before)
    if not changed:
        return proof
    try:
        again = dry(begin=before)
    except (MeshError, CommError) as error:
        again = Proof(notes=[f"not seen with Python objects of each rank's own: {error}"])
    finally:
        after.restore()
    if not proof.ok:
        note = f"the ranks share Python objects here and change them: {few(changed)}. With objects of each rank's own,"
        note = f"{note} as processes have them, nothing hangs."
        return proof if not again.ok or again.notes else replace(proof, notes=(*proof.notes, note))
    said = f"Python objects that the ranks share here and change, and of which each process has its own: {few(changed)}"
    return replace(
        proof,
        findings=again.findings,
        unproven=(*proof.unproven, said),
        notes=tuple(dict.fromkeys((*proof.notes, *again.notes))),
    )


def _of_program(
    fn: Callable[[], object], shape: dict[str, int], names: Mapping[str, tuple[str, ...]], outside: Outside
) -> Proof:
    size = math.prod(shape.values())
    reads = {rank: Reads() for rank in range(size)}

    def run() -> None:
        mesh = make_mesh(shape, names=names)
        with use_mesh(mesh), reads[mesh.own_index()], outside.of_thread():
            fn()

    error: CommError | None = None
    with traced() as t:
        try:
            launch(run, size)
        except CommError as raised:
            error = raised
    logs = logs_of(t)
    calls = sum(len(log.issues) for log in logs.values())
    ran = [f"{size} ranks of {shape}, {calls} calls"]
    proof = judged(logs, [*said_of(reads), *unproven_of(t.events), *outside.found], ran)
    if error is not None and proof.ok:  # it is about something else
        raise error
    return proof


def _of_dry(
    fn: Callable[[], object],
    shape: dict[str, int],
    names: Mapping[str, tuple[str, ...]],
    ranks: Sequence[int] | None,
    outside: Outside,
    every: int,
    begin: SharedState | None = None,
) -> Proof:
    """Without memory and values, one rank after the other; nobody waits. ``ranks``: those that run; None: all while
    they make no more operations than ``every``, else the first of those that go the same way. ``begin``: what each of
    them begins with.
    """

    def run() -> None:
        with outside.of_thread():
            to_its_end(fn, (), {})

    program = Program(run, shape, dict(names), None, measured=False)
    classes, known, listed = Classes(shape), Groups(), frozenset(ranks or ())
    logs: dict[int, Log] = {}
    unproven: list[str] = []
    lacking = ""
    with kept_random():
        random, left = RandomState(), every
        for rank in (*(ranks or ()), *range(program.size)):
            if rank in logs:
                continue
            twin = None if rank in listed or left > 0 else classes.twin(rank)
            if twin is None:
                if ranks is not None and rank not in listed:
                    lacking = lacking or classes.lacks(rank)
                    if len(classes.ran) >= len(listed) + _LOOKED_FOR:
                        classes.refuse(_WHERE, lacking, more=True)
                random.load()  # they agree on numbers by saying the same
                if begin is not None:
                    begin.restore()
                done = program.run(rank)
                left = 0 if not classes.ran and done.operations * program.size > every else left - done.operations - 1
                classes.add(rank, logs_of(done.trace, alone=True, known=known).get(rank, Log(rank)), done.places)
                unproven += [f"a value at {read.line}" for read in done.values.reads]
                unproven += [*unproven_of(done.trace.events), *done.places.others]
                twin = rank
            logs[rank] = classes.log(rank, twin)
    if lacking:
        classes.refuse(_WHERE, lacking, more=False)
    by_classes = len(classes.ran) < program.size
    if by_classes:
        unproven += [what for _, reads in classes.ran.values() for what in reads.sizes]
    logs = {rank: logs[rank] for rank in range(program.size)}
    calls = sum(len(log.issues) for log in logs.values())
    ran = [f"{program.size} ranks of {shape}, dry, {calls} calls"]
    if by_classes:
        stood = few(sorted(classes.ran))
        ran.append(f"run were {stood}; each other rank is equal to one of them in all that it read of its place")
        if every:
            ran.append(
                f"all ranks together would make more than {every} operations: ranks=range({program.size}) runs them"
            )
    proof = judged(logs, [*unproven, *outside.found], ran)
    return replace(proof, classes=tuple(sorted(classes.ran))) if by_classes else proof
