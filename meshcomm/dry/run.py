"""dry_run: one rank of any mesh, without memory and without the others."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from meshcomm import _torch
from meshcomm.axis import forget_axes
from meshcomm.dry.foretold import Foretold, checked_hardware
from meshcomm.dry.hardware import Hardware
from meshcomm.dry.log import Log
from meshcomm.dry.memory import LiveMemory, Peak, most_of
from meshcomm.dry.operations import Operations
from meshcomm.dry.planning.advice import KINDS, Advice, Again, advised
from meshcomm.dry.planning.outcome import Amount
from meshcomm.dry.values import HostRead, HostValues, Values, of_memory
from meshcomm.errors import fail
from meshcomm.make_mesh import make_mesh
from meshcomm.mesh import Mesh, use_mesh
from meshcomm.runtime.transports.dry.link import DryLink
from meshcomm.runtime.transports.dry.places import PlaceReads
from meshcomm.runtime.transports.dry.world import DryWorld, Message, MissingError, Posted, dry_world, inside
from meshcomm.runtime.transports.threads.random_state import RandomState
from meshcomm.tracing.traces import Trace, together

__all__ = ["DryRun", "dry_run"]

_WHERE = "dry_run"
_MOST = 2**20
"""Ranks."""
_PARTNERS = 64
"""So many ranks run for the sake of times; messages of others are there at once."""


class DryRun(Foretold):
    """What :func:`dry_run` has found.

    ``print(run)`` shows all of it.

    Example:
        >>> import torch, meshcomm as mc
        >>> run = mc.dry_run(lambda: mc.all_reduce(torch.ones(4), "dp"), {"dp": 1000})
        >>> run.trace.summary(), run.ranks, run.host_reads
        ('1 all_reduce over dp', (0,), ())
    """

    def __init__(
        self,
        shape: Mapping[str, int],
        ranks: Sequence[int],
        trace: Trace,
        reads: Sequence[HostRead],
        peaks: Mapping[str, Peak],
    ) -> None:
        self.shape = dict(shape)
        """The mesh as sizes."""
        self.ranks = tuple(ranks)
        """Those that ran, of the mesh's."""
        self.trace = trace
        """What they would communicate. Its times are those of the dry run, and say nothing of a real one."""
        self.host_reads = tuple(reads)
        """The lines that read a value which a dry run has not."""
        self.peaks = dict(peaks)
        """By kind of device, ``"cpu"`` and ``"cuda"``, the most memory at once: of the rank that has most."""
        self.program: Callable[..., object] | None = None
        """What ran."""
        self._again: Again | None = None

    @property
    def peak(self) -> Peak:
        """That of the accelerator, if the program uses one: its bytes, of what they consist, at which line it is."""
        return self.peaks[min(self.peaks, key=lambda device: device == "cpu")]

    @property
    def peak_bytes(self) -> int:
        """The most memory that one of the ranks has at once."""
        return self.peak.bytes

    @property
    def findings(self) -> tuple[HostRead, ...]:
        """What may be otherwise in a real run: the lines of which ``host_values`` says nothing."""
        return tuple(read for read in self.host_reads if read.guessed)

    @property
    def ok(self) -> bool:
        """Whether nothing was found: no value had to be guessed."""
        return not self.findings

    def advice(
        self,
        changes: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        tokens: Amount | None = None,
        kinds: Sequence[str] = KINDS,
    ) -> Advice:
        """Which change would help most: each is tried, by running the program again with it.

        ::

            print(run.advice({"batch of 4": {"batch": 4}}))

                change                                  seconds     gain     peak  ...
                fully_shard(regather=False)               0.201    12.1%  31.2 GB
                a mesh of {'fsdp': 64, 'tp': 4}           0.214     6.4%  22.0 GB
                batch of 4                                ...

        The library makes these changes itself, by their kind:

        * ``"program"``: arguments of :func:`fully_shard` (``regather``, ``prefetch``, units of two, units of each
          layer, dtypes), :func:`data_parallel` (``bucket_mb``, dtypes), :func:`tensor_parallel` (``sequence``) and
          :func:`pipelined` (``microbatches``, ``remat``, ``schedule``), in all of the program's calls of it;
        * ``"mesh"``: other meshes of as many ranks: an axis divided by its least prime factor, another multiplied;
        * ``"machine"``: links, products, memory and host that are twice as fast;
        * ``"limit"``: calls over an axis, or messages, that take no time: more than any overlap can give.

        Args:
            changes: of kind ``"given"``: a name, and arguments by name with which ``fn`` is called: a program of no
                arguments may have some with defaults, ``def train(batch=2): ...``.
            tokens: how much one step does on all ranks, or a function that says it of the mesh, a dict, and of those
                arguments of ``changes`` that it takes, ``lambda mesh, batch=2: ...``; where it differs, seconds are
                those for as much as the program does. Without it, of another mesh the operations (``flops``) of all
                ranks say how much it does, and a change of yours that computes more or less is not the best one.
            kinds: which are tried.

        Returns: an :class:`Advice`. What is refused, because the model does not go on such a mesh or the program takes
            no such argument, stands there with the reason.

        Cost: nothing is communicated; a dry run for each change of the program or the mesh.

        Raises:
            MeshError: no hardware; arguments that ``fn`` has not; a program that does something else when it runs
                again, since it keeps what an earlier run has made, or has used up what it reads; in a dry run.
        """
        if self._again is None or dry_world() is not None:
            fail("DryRun.advice", "this run cannot be repeated here.", fix="call it on what mc.dry_run gives, outside")
        return advised(self, self._again, changes, tokens, kinds)

    def __repr__(self) -> str:
        return f"DryRun({self.shape}, ranks={self.ranks})"

    def __str__(self) -> str:
        ran = f"{_few(self.ranks)} of {math.prod(self.shape.values())}, mesh {self.shape}"
        lines = [ran, self.trace.table(), *map(str, self.peaks.values())]
        lines += [] if self._timeline is None else [self.table()]
        return "\n".join([*lines, *(f"host read at {read}" for read in self.host_reads)])


def _few(ranks: Sequence[int]) -> str:
    said = ", ".join(map(str, ranks[:4])) + ", ..." * (len(ranks) > 4)
    return f"rank{'s' * (len(ranks) > 1)} {said}"


def dry_run(
    fn: Callable[[], object],
    mesh: Mapping[str, int] | Mesh,
    *,
    ranks: Sequence[int] | None = (0,),
    hardware: Hardware | None = None,
    host_values: HostValues = None,
) -> DryRun:
    """Run ``fn`` as one rank, or a few, of a mesh of any size, without memory, devices or other ranks.

    ::

        def step():                                            run.trace       what it communicates, line by line
            model = parallel.fully_shard(Llama(), "fsdp", ...)     run.host_reads  the lines that read a number
            model(tokens).mean().backward()

        run = mc.dry_run(step, {"rep": 64, "fsdp": 16, "tp": 8})

    Tensors that are made inside have a shape and a dtype, and no memory and no values: what each operation gives is
    worked out from shapes. The other ranks are not there either; what they would send has the shape that it would have,
    and where ranks agree on a number they say what this rank says. So what is known of a call on the mesh (operation,
    axis, bytes, line) is what it would be, provided that what the program calls does not depend on values.

    Values of the program's own numbers (``torch.tensor(0.0)``, ``torch.arange(8)``, an optimiser's count of steps) are
    known. Others that the host reads, by ``item()``, ``tolist()``, ``bool(x)``, ``torch.equal``, are ``host_values``,
    and so are the counts of ``torch.bincount`` and those of rows that come by ``all_to_all_ragged``, each of which is
    guessed as many where nothing is said of the line.

    Args:
        fn: the program of one rank, without arguments. It makes its model and its tensors inside, and finds the mesh as
            the current one; what :func:`make_mesh` makes inside is a mesh over the same ranks. It may run more than
            once: on each of ``ranks``, and again where a rank needs bytes (an outline, an object) that another one
            sends, which is then run before it.
        mesh: axis to size, or a mesh, of which sizes and names are taken.
        ranks: those that run, numbers in row-major order; all of them when None.
        hardware: the machine, ``mc.hardware("h100")``: then ``.seconds``, ``.exposed(axis)``, ``.table()`` and
            ``.save("timeline.json")`` say how long it takes. Ranks with whom the others exchange messages run too then,
            as the stages of a pipeline do. A program that yields is timed from its last ``yield`` but one to the last:
            ``def train(): ...; for _ in range(3): yield; step()`` and a ``yield`` at the end.
        host_values: what is read where a value is not known: one number, 0 by default; a mapping of lines to a number,
            or to the numbers that are read there in turn, ``{"train.py:33": [4, 2]}``; or a function of the line and
            the dtype.

    Returns: a :class:`DryRun`: ``trace``, ``host_reads``, and ``peak_bytes``, the most memory at once; ``peak`` says of
        what that consists and at which line it is.

    Cost: nothing is communicated. Random states are as they were.

    Raises:
        MeshError: sizes that are none, or more than 2**20 ranks, or that do not fill nodes of ``hardware``; ranks that
            are not of the mesh; a parameter that was made outside of ``fn``; a tensor whose size depends on values;
            bytes that no rank sends; called inside of a dry run; what ``fn`` itself does wrong on such a mesh.

    Example:
        >>> import torch, meshcomm as mc
        >>> def main():
        ...     x = torch.randn(8, 4) @ torch.randn(4, 4)
        ...     if mc.all_reduce(x.sum(), ("dp", "tp")).item() > 100:
        ...         print("never, for 0 is read")
        >>> run = mc.dry_run(main, {"dp": 512, "tp": 8})
        >>> run.trace.count("all_reduce", ("dp", "tp")), run.host_reads[0].count, run.findings[0].kind
        (1, 1, 'guessed')
        >>> mc.dry_run(main, {"dp": 512, "tp": 8}, host_values=7.0).ok
        True

    Source: torch's fake tensors; the dry runs of compilers and of ``make -n``.
    """
    shape, names = checked_mesh(_WHERE, mesh)
    if not callable(fn):
        fail(
            _WHERE,
            f"fn is not callable but {type(fn).__name__}.",
            fix="a function without arguments: one rank's program",
        )
    try:
        inspect.signature(fn).bind()
    except TypeError as error:
        what = f"fn is called without arguments, and has some: {error}."
        fail(_WHERE, what, fix="lambda: train(model_size), or functools.partial")
    except ValueError:  # one of C's, of which nothing is known
        pass
    if dry_world() is not None:
        fail(_WHERE, "called inside of a dry run.", fix="call it outside; mc.is_dry() says where one is")
    program = Program(fn, shape, names, host_values)
    chosen = checked_ranks(_WHERE, ranks, program.size)
    return run_of(program, chosen, checked_hardware(hardware, program.size))


def run_of(program: Program, chosen: Sequence[int], machine: Hardware | None, partners: bool = False) -> DryRun:
    """What these ranks do; with ``partners``, those with whom they exchange messages count as they do."""
    with kept_random():
        done = {rank: program.run(rank) for rank in chosen}
        if machine is not None or partners:
            program.run_partners(done)
    counted = sorted(done) if partners else list(chosen)
    reads = dict.fromkeys(read for rank in counted for read in done[rank].values.reads)
    peaks = most_of([done[rank].memory.peaks(rank) for rank in counted])
    found = DryRun(program.shape, counted, together([done[rank].trace for rank in counted]), tuple(reads), peaks)
    logs = {rank: each.log for rank, each in done.items()}

    def again(machine: Hardware, shape: Mapping[str, int] | None, options: Any, given: Mapping[str, Any]) -> DryRun:
        fn = functools.partial(program.fn, **given) if given else program.fn
        other = Program(fn, dict(shape or program.shape), program.names, program.given, options)
        return run_of(other, chosen, machine, partners)

    found.program, found._again = program.fn, again
    return found._foretell(logs, program.names, machine)


def checked_mesh(where: str, mesh: Any, most: int = _MOST) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """The sizes and names of a mesh that is given as one, or as a mapping; no more than so many ranks."""
    if isinstance(mesh, Mesh):
        shape, names = {name: mesh.shape[name] for name in mesh.axis_names}, dict(mesh.names)
    else:
        if not isinstance(mesh, Mapping) or not mesh:
            what = "a mesh is a mapping of axis names to sizes."
            fail(where, what, got=repr(mesh), fix='such as {"fsdp": 64, "tp": 8}')
        for name, length in mesh.items():
            if isinstance(length, bool) or not isinstance(length, Integral) or length < 1:
                got = repr(dict(mesh))
                fail(where, f"axis {name!r} has size {length!r}.", got=got, fix="a positive int: nobody counts ranks")
        shape, names = {name: int(length) for name, length in mesh.items()}, {}
    if math.prod(shape.values()) > most:
        fail(where, f"{math.prod(shape.values())} ranks are more than {most}.", got=repr(shape), fix="smaller sizes")
    return shape, names


def checked_ranks(where: str, ranks: Any, size: int) -> tuple[int, ...]:
    """Some of so many ranks, each once; None is all."""
    if ranks is None:
        return tuple(range(size))
    whole = isinstance(ranks, Sequence) and all(isinstance(r, Integral) and not isinstance(r, bool) for r in ranks)
    if not whole or not ranks or len(set(ranks)) != len(ranks):
        fail(where, f"ranks={ranks!r} are not different ints.", fix="such as (0,), or None for all of them")
    outside = [rank for rank in ranks if not 0 <= rank < size]
    if outside:
        fail(where, f"rank {outside[0]} is not on the mesh.", got=f"{size} ranks", fix=f"ranks from 0 to {size - 1}")
    return tuple(map(int, ranks))


# ------------------------------------------------------------------------------------------------------ one rank


@dataclass
class Done:
    """One rank that has run to its end."""

    trace: Trace
    values: Values
    log: Log
    memory: LiveMemory
    places: PlaceReads
    """What it has read of its place."""
    operations: int = 0
    """How many of torch's it made."""


@contextlib.contextmanager
def kept_random() -> Iterator[None]:
    """What runs inside leaves random states as they were."""
    outer = RandomState()
    try:
        yield
    finally:
        outer.load()


class Program:
    """What runs on each rank, and what those that ran have posted."""

    def __init__(
        self,
        fn: Callable[[], object],
        shape: dict[str, int],
        names: dict[str, tuple[str, ...]],
        host_values: HostValues,
        options: Any = None,
        *,
        measured: bool = True,
    ) -> None:
        """``measured``: whether somebody wants to know of operations, and of memory."""
        self.fn, self.shape, self.names, self.given, self.options = fn, shape, names, host_values, options
        self._measured = measured
        self.size = math.prod(shape.values())
        self._posted: Posted = {}
        self._needed: list[tuple[int, Message]] = []

    def run(self, rank: int) -> Done:
        """To its end; before it, as far as it takes, those whose messages it needs."""
        while True:
            try:
                return self._once(rank)
            except MissingError as missing:
                self._provide(rank, missing)

    def run_partners(self, done: dict[int, Done]) -> None:
        """Those with whom the others exchange messages, too: at most so many."""
        while new := sorted({rank for each in done.values() for rank in each.log.partners()} - set(done)):
            for rank in new:
                if len(done) >= _PARTNERS:
                    return
                done[rank] = self.run(rank)

    def _provide(self, rank: int, missing: MissingError) -> None:
        """Run the senders until they have posted the messages."""
        for message in missing.messages:
            self._post(rank, message)

    def _post(self, rank: int, message: Message) -> None:
        if (rank, message) in self._needed:
            self._nobody(rank, message)
        self._needed.append((rank, message))
        try:
            while message not in self._posted:
                try:
                    self._once(message[1])
                    break
                except MissingError as other:
                    if message not in self._posted:
                        self._provide(message[1], other)
            if message not in self._posted:
                self._nobody(rank, message)
        finally:
            self._needed.pop()

    def _nobody(self, rank: int, message: Message) -> None:
        what = f"rank {rank} receives bytes from rank {message[1]} that it does not send."
        fix = "send them; or have the program know them where mc.is_dry()"
        fail(_WHERE, what, got=f"tag {message[3]} over {message[0]}", fix=fix)

    def _once(self, rank: int) -> Done:
        values, trace, memory = Values(self.given), Trace(), LiveMemory()
        world, log = DryWorld(rank, self.size, self._posted, values.suppose), Log(rank)
        operations, world.options = Operations(values), self.options
        if self._measured:
            world.linked, operations = log.listen, Operations(values, log, memory)
        with contextlib.ExitStack() as stack:
            stack.callback(forget_axes, lambda axis: isinstance(axis.link, DryLink) and axis.link.is_of(world))
            stack.enter_context(inside(world))
            mesh = make_mesh(self.shape, names=self.names or None)
            with use_mesh(mesh):
                stack.enter_context(trace)
                mesh.axis(mesh.axis_names[0])  # the trace is of this rank, though it may call nothing
                if self._measured:
                    stack.enter_context(memory.watching(world))
                states = memory.hold if self._measured else lambda x: None
                stack.enter_context(_torch.handled_without_memory(operations, states))
                try:
                    self._call(log)
                except MissingError as missing:
                    drop(missing)
                    raise MissingError(*missing.messages) from None
        return Done(trace, values, log, memory, world.reads, operations.count)

    def _call(self, log: Log) -> None:
        try:
            result = self.fn()
            if inspect.isgenerator(result):
                for _ in result:
                    log.lap()
        except RuntimeError as error:
            told = of_memory(error)
            if told is None:
                raise
            raise told from None


def drop(missing: BaseException) -> None:
    """What was under way in a run that has ended too early."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        traceback.clear_frames(missing.__traceback__)
        gc.collect()
