"""One step of a pipeline on this rank: its actions, one after the other.

::

    F   input (a microbatch, or what came) ──> stage ──> sent on, or loss
    B   gradient of the output (what came, or the loss) ──> autograd ──> gradient of the input, sent back
    D   the same, but linear layers keep what the gradients of their weights are made of ......... W finishes them

Before an action runs, what the next one waits for is asked for. Between F and B stay: what autograd has saved, and the
edges of the graph; the output itself is let go of when it is sent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from meshcomm import _torch
from meshcomm.errors import MeshError, described, fail, text
from meshcomm.parallel.pipeline.actions import Action
from meshcomm.parallel.pipeline.closed import closed
from meshcomm.parallel.pipeline.running.weights_later import WeightsLater
from meshcomm.parallel.pipeline.running.wires import (
    FORWARD,
    GRADIENT,
    OUTLINE,
    Coming,
    Leaf,
    Outline,
    Wires,
    outline_of,
    refuse_change,
)
from meshcomm.parallel.pipeline.schedule import Schedule
from meshcomm.spmd.random.draws import Rows, only_rows

WHERE = "pipelined"


class Ran(NamedTuple):
    """An action, and when it began and ended by ``time.perf_counter``, without what it waited for."""

    action: Action
    begin: float
    end: float


class Batch(NamedTuple):
    """What this rank has of a batch, by microbatch."""

    parts: int
    """How many microbatches."""
    inputs: Sequence[Any]
    """Of the first stage."""
    targets: Sequence[Any]
    """Of the last one."""
    shares: Sequence[float]
    """By what each loss is multiplied."""
    rows: Sequence[Rows]
    """Of each microbatch."""
    wants: bool = False
    """Whether the inputs of the first stage get gradients."""


class Arrival:
    """What a stage is given, and where the gradients of that come to."""

    def __init__(self, outline: Outline, tensors: Sequence[Tensor], connect: bool) -> None:
        self.outline = outline
        self.gradients: list[Tensor | None] = [None] * len(outline.wanted)
        given = list(tensors)
        places = [at for at, leaf in enumerate(outline.tensors) if leaf.wants] if connect else []
        if places:
            start = torch.empty(0, requires_grad=True, device=given[places[0]].device)
            # Its results are the tensors themselves and no leaves, so that a stage may write to what it is given.
            made = _Arrive.apply(start, self, [given[at] for at in places])  # type: ignore[no-untyped-call]
            for at, x in zip(places, made, strict=True):
                given[at] = x
        self.device = given[0].device if given else None
        self._tree: Any = outline.filled(given)

    def given(self) -> Any:
        """The pytree, once: it is not kept until backward, and not by what its own graph knows, which would be a cycle
        that waits for a collection of garbage.
        """
        tree, self._tree = self._tree, None
        return tree

    def taken(self) -> list[Tensor]:
        """The gradients, once; zeros where the stage has used nothing."""
        found, self.gradients = self.gradients, []
        return [torch.zeros(leaf.shape, dtype=leaf.dtype, device=self.device) if g is None else g
                for leaf, g in zip(self.outline.wanted, found, strict=True)]  # fmt: skip


class _Arrive(Function):
    """Where a stage's graph begins."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, arrival: Arrival, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.arrival, ctx.begins_stage = arrival, True
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.arrival.gradients = [None if g is None else g.detach() for g in gradients]
        return None, None, None


class Alive(NamedTuple):
    """A microbatch within a stage, between F and B, or W."""

    arrival: Arrival
    edges: Sequence[GradientEdge]
    """Of what of the output gets gradients."""
    leaves: Sequence[Leaf]
    """The same."""
    later: WeightsLater | None


class Source(NamedTuple):
    """Where what an action needs comes from."""

    rank: int
    kind: int
    stage: int
    """The stage that it leaves."""
    looks: int
    """The stage whose output it is, or is the gradient of."""
    made: int
    """The place in the row of ``rank`` at which it is made."""


class Goal(NamedTuple):
    """Where what an action makes goes to."""

    rank: int
    taken: int
    """The place in its row at which it is needed."""


class Job(NamedTuple):
    """An action of this rank, and all that its schedule says of it."""

    action: Action
    stage: int
    source: Source | None
    goal: Goal | None


class Stages:
    """What does not change from step to step."""

    def __init__(
        self, modules: Sequence[nn.Module], schedule: Schedule, rank: int, loss: Callable[[Any, Any], Any], remat: bool
    ) -> None:
        self.modules, self.schedule, self.rank, self.loss, self.remat = modules, schedule, rank, loss, remat
        self.last = schedule.ranks * schedule.chunks - 1
        """The last stage of the model."""
        self.jobs = [self._job(action) for action in schedule.table[rank]]

    def _job(self, action: Action) -> Job:
        kind, chunk, microbatch = action
        stage = self.schedule.stage(self.rank, chunk)
        before, after = self._met("F", stage - 1, microbatch), self._met("B", stage + 1, microbatch)
        if kind == "W":
            return Job(action, stage, None, None)
        if kind == "F":
            after = self._met("F", stage + 1, microbatch)
            return Job(action, stage, before and Source(before[0], FORWARD, stage - 1, stage - 1, before[1]),
                       after and Goal(*after))  # fmt: skip
        before = self._met("B", stage - 1, microbatch)
        return Job(action, stage, after and Source(after[0], GRADIENT, stage + 1, stage, after[1]),
                   before and Goal(*before))  # fmt: skip

    def _met(self, kind: str, stage: int, microbatch: int) -> tuple[int, int] | None:
        """The rank of a stage, and where in its row it does this; None if there is no such stage."""
        if not 0 <= stage <= self.last:
            return None
        rank, chunk = self.schedule.place(stage)
        return rank, self.schedule.order[rank][Action(kind, chunk, microbatch)]


class Pass:
    """One step, or one evaluation."""

    def __init__(
        self, stages: Stages, wires: Wires, kind: object, known: dict[tuple[int, int], Outline], batch: Batch
    ) -> None:
        """``known``: how what leaves a stage looks for a microbatch, of an earlier step with a batch of this kind."""
        self.stages, self.wires, self.kind, self.batch = stages, wires, kind, batch
        self.schedule, self.rank = stages.schedule, stages.rank
        self.known, self.told = known, bool(known)
        self.trains = torch.is_grad_enabled()
        self.row = [job for job in stages.jobs
                    if job.action.microbatch < batch.parts and (self.trains or job.action.kind == "F")]  # fmt: skip
        self.split = {job.action[1:] for job in self.row if job.action.kind == "D"}
        self.edges: dict[int, GradientEdge] = {}
        """Where gradients of parameters go to, by ``id``: asked once a step."""
        self.alive: dict[tuple[int, int], Alive] = {}
        self.handed: dict[tuple[int, int, int], tuple[Outline | None, Sequence[Tensor]]] = {}
        """What stages of this rank give to each other: by kind, stage that it leaves, and microbatch."""
        self.asked: dict[Action, Coming] = {}
        self._losses: list[tuple[Tensor, float]] = []
        self.outputs: dict[int, Any] = {}
        self.input_gradients: dict[int, list[Tensor]] = {}
        self.closed = closed(WHERE, wires.axis)
        self.ran: list[Ran] = []
        self.peak = 0

    # ------------------------------------------------------------------------------------------------ neighbours

    def _ask(self, job: Job) -> None:
        """Begin to receive what an action needs, if it is known how that looks."""
        source = job.source
        if source is None or source.rank == self.rank or job.action in self.asked:
            return
        microbatch = job.action.microbatch
        outline = self.known.get((source.looks, microbatch))
        if outline is not None:
            leaves = outline.wanted if source.kind == GRADIENT else outline.tensors
            tag = self.wires.tag(source.kind, source.stage, microbatch)
            self.asked[job.action] = self.wires.receive(leaves, source.rank, tag)

    def _came(self, job: Job) -> Sequence[Tensor]:
        """What an action needs of another stage."""
        source, microbatch = job.source, job.action.microbatch
        assert source is not None
        if source.rank == self.rank:
            outline, tensors = self.handed.pop((source.kind, source.stage, microbatch))
            if outline is not None:
                self.known[source.stage, microbatch] = outline
            return tensors
        if source.kind == FORWARD and not self.told:
            tag = self.wires.tag(OUTLINE, source.stage, microbatch)
            self.known[source.stage, microbatch] = self.wires.receive_outline(source.rank, tag)
        self._ask(job)
        tensors = self.asked.pop(job.action).wait()
        self.wires.proven(source.rank, source.made)
        return tensors

    def _give(self, kind: int, job: Job, tensors: Sequence[Tensor], outline: Outline | None) -> None:
        """To the stage behind, or before."""
        goal, microbatch = job.goal, job.action.microbatch
        assert goal is not None
        if goal.rank == self.rank:
            self.handed[kind, job.stage, microbatch] = outline, [x.detach() for x in tensors]
            return
        if outline is not None and not self.told:
            self.wires.send_outline(outline, goal.rank, self.wires.tag(OUTLINE, job.stage, microbatch), goal.taken)
        self.wires.send(tensors, goal.rank, self.wires.tag(kind, job.stage, microbatch), goal.taken)

    # --------------------------------------------------------------------------------------------------- actions

    def run(self) -> None:
        """All of them."""
        do = {"F": self._f, "B": self._b, "D": self._b, "W": self._w}
        row, wires, alive = self.row, self.wires, self.alive
        if row:
            self._ask(row[0])
        for job, after in zip(row, [*row[1:], None], strict=True):
            if after is not None:
                self._ask(after)
            do[job.action.kind](job)
            self.peak = max(self.peak, len(alive))
            wires.forget_sent()

    def _f(self, job: Job) -> None:
        action, stage = job.action, job.stage
        _, chunk, microbatch = action
        if stage == 0:
            outline, tensors = outline_of(self.batch.inputs[microbatch])
            if self.batch.wants:
                outline = Outline(tuple(map(_wanting, outline.leaves)), outline.form)
        else:
            tensors = list(self._came(job))
            outline = self.known[stage - 1, microbatch]
        later = WeightsLater(self.edges) if (chunk, microbatch) in self.split else None
        begin = time.perf_counter()
        arrival = Arrival(outline, tensors, self.trains)
        module, rows = self.stages.modules[chunk], self.batch.rows[microbatch]
        if self.told:
            y = self._through(module, arrival.given(), later, rows)
        else:
            with _explained(self._given(job, outline)):
                y = self._through(module, arrival.given(), later, rows)
        if stage == self.stages.last:
            self._ends(action, arrival, y, later)
        self.ran.append(Ran(action, begin, time.perf_counter()))
        if stage == self.stages.last:
            return
        known = self.known.get((stage, microbatch))
        outline, tensors = outline_of(y, known)
        odd = next((x for x in tensors if x.layout is not torch.strided), None)
        if odd is not None and job.goal is not None and job.goal.rank != self.rank:
            fail(WHERE, f"stage {stage} gives another rank a tensor of layout {odd.layout}.", fix="x.to_dense()")
        if known is not None and outline is not known:
            refuse_change(stage, microbatch, known, outline)
        self.known[stage, microbatch] = outline
        if self.trains:
            edges = [get_gradient_edge(x) for x in tensors if x.requires_grad]
            self.alive[chunk, microbatch] = Alive(arrival, edges, outline.wanted, later)
        self._give(FORWARD, job, tensors, outline)

    @property
    def total(self) -> Tensor | None:
        """The loss of all microbatches, where the last stage is; added up in no half precision, for there may be
        many.
        """
        if not self._losses:
            return None
        dtype = self._losses[-1][0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        counted = [loss.reshape(()).to(wide) * share for loss, share in self._losses if share]
        return sum(counted).to(dtype)  # type: ignore[union-attr]

    def _through(self, module: nn.Module, x: Any, later: WeightsLater | None, rows: Rows) -> Any:
        def fn(x: Any) -> Any:
            with self.closed, only_rows(rows):
                if later is None:
                    return module(x)
                with later.forward():
                    return module(x)

        if self.stages.remat and self.trains:
            return checkpoint(fn, x, use_reentrant=False)
        return fn(x)

    def _given(self, job: Job, outline: Outline) -> tuple[str, str]:
        """A stage, and what it is given, in words."""
        stage, microbatch = job.stage, job.action.microbatch
        name = type(self.stages.modules[job.action.chunk]).__name__
        given = f"stage {stage - 1} gives {outline}" if stage else f"x has {outline}"
        return f"stage {stage} ({name})", f"{given} for microbatch {microbatch}"

    def _ends(self, action: Action, arrival: Arrival, y: Any, later: WeightsLater | None) -> None:
        """The last stage: its loss, if there is one."""
        _, chunk, microbatch = action
        if not self.batch.targets:
            self.outputs[microbatch] = y
            return
        target = self.batch.targets[microbatch]
        with self.closed, only_rows(self.batch.rows[microbatch]):
            if self.told:
                loss = self.stages.loss(y, target)
            else:
                with _explained(_compared(y, target)):
                    loss = self.stages.loss(y, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            fail(WHERE, "the loss is no real number.", got=got, fix="loss(output, target) -> a tensor of one element")
        share = self.batch.shares[microbatch]
        self._losses.append((loss.detach(), share))
        if self.trains:
            roots = [x for x in (self._unlearnt(y, loss) if not share else [loss]) if x.requires_grad]
            leaves = [Leaf(tuple(x.shape), x.dtype, True) for x in roots]
            self.alive[chunk, microbatch] = Alive(arrival, [*map(get_gradient_edge, roots)], leaves, later)

    def _unlearnt(self, y: Any, loss: Tensor) -> list[Tensor]:
        """What zeros go back from, of a microbatch that counts for nothing: its outputs, for the loss may be a mean
        over no tokens, whose gradient is no number. The loss where it has parameters of its own: ranks may meet there.
        """
        outputs: list[Tensor] = [x for x in outline_of(y)[1] if x.requires_grad]
        known = {*map(id, _torch.leaves_of_graph(outputs))}
        return outputs if known.issuperset(map(id, _torch.leaves_of_graph([loss]))) else [loss]

    def _b(self, job: Job) -> None:
        action = job.action
        _, chunk, microbatch = action
        alive = self.alive[chunk, microbatch]
        if job.stage == self.stages.last:
            share, device = self.batch.shares[microbatch], self.wires.axis.mesh.device
            gradients = [torch.full(leaf.shape, share, dtype=leaf.dtype, device=device) for leaf in alive.leaves]
        else:
            gradients = list(self._came(job))
        begin = time.perf_counter()
        if gradients:
            if alive.later is None:
                torch.autograd.backward(alive.edges, gradients)
            else:
                with alive.later.opened():
                    torch.autograd.backward(alive.edges, gradients)
        self.ran.append(Ran(action, begin, time.perf_counter()))
        found = alive.arrival.taken()
        if action.kind == "B":
            del self.alive[chunk, microbatch]
        else:
            kept = alive._replace(arrival=None, edges=(), leaves=())  # type: ignore[arg-type]
            self.alive[chunk, microbatch] = kept
        if job.stage:
            self._give(GRADIENT, job, found, None)
        elif self.batch.wants:
            self.input_gradients[microbatch] = found

    def _w(self, job: Job) -> None:
        _, chunk, microbatch = job.action
        alive = self.alive.pop((chunk, microbatch))
        begin = time.perf_counter()
        if alive.later is not None:
            alive.later.finish()
        self.ran.append(Ran(job.action, begin, time.perf_counter()))


def _compared(y: Any, target: Any) -> tuple[str, str]:
    """The loss, and what it is given, in words."""
    return "the loss", f"the output is {outline_of(y)[0]}, the target {outline_of(target)[0]}"


@contextlib.contextmanager
def _explained(said: tuple[str, str]) -> Iterator[None]:
    """What torch says of shapes, dtypes and numbers of arguments, when something is given to what it was never given
    before, with what that is.
    """
    try:
        yield
    except (RuntimeError, TypeError, IndexError) as error:
        if type(error) not in (RuntimeError, TypeError, IndexError):  # those of more than torch's words
            raise
        what, given = said
        fix = "a stage takes what the one before gives: its shapes, its dtypes, and one argument, which may be a pytree"
        raise MeshError(
            text(WHERE, f"{what} fails on what it is given: {described(error)}", got=given, fix=fix)
        ) from error


def _wanting(leaf: Any) -> Any:
    if isinstance(leaf, Leaf):
        return replace(leaf, wants=leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    return leaf
