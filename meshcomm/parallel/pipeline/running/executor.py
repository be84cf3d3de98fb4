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
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from meshcomm.errors import fail
from meshcomm.parallel.pipeline.actions import Action
from meshcomm.parallel.pipeline.closed import closed
from meshcomm.parallel.pipeline.running.weights_later import WeightsLater
from meshcomm.parallel.pipeline.running.wires import (
    FORWARD,
    GRADIENT,
    OUTLINE,
    Leaf,
    Outline,
    Wires,
    outline_of,
    refuse_change,
)
from meshcomm.parallel.pipeline.schedule import Schedule
from meshcomm.work import Work

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
        self.tree: Any = outline.filled(given)

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


class Stages(NamedTuple):
    """What does not change from step to step."""

    modules: Sequence[nn.Module]
    schedule: Schedule
    rank: int
    loss: Callable[[Any, Any], Any]
    remat: bool


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
        row = self.schedule.table[self.rank]
        self.row = [a for a in row if a.microbatch < batch.parts and (self.trains or a.kind == "F")]
        self.split = {(a.chunk, a.microbatch) for a in self.row if a.kind == "D"}
        self.alive: dict[tuple[int, int], Alive] = {}
        self.handed: dict[tuple[int, int, int], tuple[Outline | None, Sequence[Tensor]]] = {}
        """What stages of this rank give to each other: by kind, stage that it leaves, and microbatch."""
        self.asked: dict[Action, Work[list[Tensor]]] = {}
        self._total: Tensor | None = None  # in no half precision: there may be many
        self._ends_in = torch.float32
        self.outputs: dict[int, Any] = {}
        self.input_gradients: dict[int, list[Tensor]] = {}
        self.closing: dict[str, Any] = {}
        self.ran: list[Ran] = []
        self.peak = 0

    # ------------------------------------------------------------------------------------------------ neighbours

    @property
    def last(self) -> int:
        """The last stage of the model."""
        return self.schedule.ranks * self.schedule.chunks - 1

    def _outline(self, stage: int, microbatch: int) -> Outline | None:
        return self.known.get((stage, microbatch))

    def _source(self, action: Action) -> tuple[int, int, int] | None:
        """From which rank comes what an action needs, of which kind, and which stage it has left."""
        stage = self.schedule.stage(self.rank, action.chunk)
        if action.kind == "F":
            return None if stage == 0 else (self.schedule.place(stage - 1)[0], FORWARD, stage - 1)
        if action.kind == "W" or stage == self.last:
            return None
        return self.schedule.place(stage + 1)[0], GRADIENT, stage + 1

    def _ask(self, action: Action) -> None:
        """Begin to receive what an action needs, if it is known how that looks."""
        source = self._source(action)
        if source is None or source[0] == self.rank or action in self.asked:
            return
        src, kind, stage = source
        outline = self._outline(stage - (kind == GRADIENT), action.microbatch)
        if outline is not None:
            leaves = outline.wanted if kind == GRADIENT else outline.tensors
            self.asked[action] = self.wires.receive(leaves, src, self.wires.tag(kind, stage, action.microbatch))

    def _came(self, action: Action) -> Sequence[Tensor]:
        """What an action needs of another stage."""
        source = self._source(action)
        assert source is not None
        src, kind, stage = source
        if src == self.rank:
            outline, tensors = self.handed.pop((kind, stage, action.microbatch))
            if outline is not None:
                self.known[stage, action.microbatch] = outline
            return tensors
        if kind == FORWARD and not self.told:
            tag = self.wires.tag(OUTLINE, stage, action.microbatch)
            self.known[stage, action.microbatch] = self.wires.receive_outline(src, tag)
        self._ask(action)
        tensors = self.asked.pop(action).wait()
        self.wires.proven(src, self._place(kind, stage, action.microbatch)[1])
        return tensors

    def _place(self, kind: int, stage: int, microbatch: int) -> tuple[int, int]:
        """The rank of a stage, and where in its row it does what this kind of message is about."""
        rank, chunk = self.schedule.place(stage)
        return rank, self.schedule.order[rank][Action("F" if kind == FORWARD else "B", chunk, microbatch)]

    def _give(
        self, kind: int, stage: int, to: int, microbatch: int, tensors: Sequence[Tensor], outline: Outline | None
    ) -> None:
        """To stage ``to``."""
        dst, taken = self._place(kind, to, microbatch)
        if dst == self.rank:
            self.handed[kind, stage, microbatch] = outline, [x.detach() for x in tensors]
            return
        if outline is not None and not self.told:
            self.wires.send_outline(outline, dst, self.wires.tag(OUTLINE, stage, microbatch), taken)
        self.wires.send(tensors, dst, self.wires.tag(kind, stage, microbatch), taken)

    # --------------------------------------------------------------------------------------------------- actions

    def run(self) -> None:
        """All of them."""
        for at, action in enumerate(self.row):
            for soon in self.row[at : at + 2]:
                self._ask(soon)
            with torch.set_grad_enabled(self.trains):
                getattr(self, f"_{action.kind.lower()}")(action)
            self.peak = max(self.peak, len(self.alive))
            self.wires.forget_sent()

    @contextlib.contextmanager
    def _timed(self, action: Action) -> Any:
        begin = time.perf_counter()
        yield
        self.ran.append(Ran(action, begin, time.perf_counter()))

    def _f(self, action: Action) -> None:
        _, chunk, microbatch = action
        stage = self.schedule.stage(self.rank, chunk)
        if stage == 0:
            outline, tensors = outline_of(self.batch.inputs[microbatch])
            if self.batch.wants:
                outline = outline._replace(leaves=tuple(map(_wanting, outline.leaves)))
        else:
            tensors = list(self._came(action))
            outline = self.known[stage - 1, microbatch]
        later = WeightsLater() if (chunk, microbatch) in self.split else None
        with self._timed(action):
            arrival = Arrival(outline, tensors, self.trains)
            y = self._through(self.stages.modules[chunk], arrival.tree, later)
            if stage == self.last:
                self._ends(action, arrival, y, later)
                return
        outline, tensors = outline_of(y)
        if (stage, microbatch) in self.known:
            refuse_change(stage, microbatch, self.known[stage, microbatch], outline)
        self.known[stage, microbatch] = outline
        wanted = [x for x in tensors if x.requires_grad]
        if self.trains:
            edges = [get_gradient_edge(x) for x in wanted]
            self.alive[chunk, microbatch] = Alive(arrival, edges, outline.wanted, later)
        self._give(FORWARD, stage, stage + 1, microbatch, tensors, outline)

    @property
    def total(self) -> Tensor | None:
        """The loss of all microbatches, where the last stage is."""
        return None if self._total is None else self._total.to(self._ends_in)

    def _through(self, module: nn.Module, x: Any, later: WeightsLater | None) -> Any:
        def fn(x: Any) -> Any:
            split = contextlib.nullcontext() if later is None else later.forward()
            with closed(WHERE, self.wires.axis, self.closing), split:
                return module(x)

        if self.stages.remat and self.trains:
            return checkpoint(fn, x, use_reentrant=False)
        return fn(x)

    def _ends(self, action: Action, arrival: Arrival, y: Any, later: WeightsLater | None) -> None:
        """The last stage: its loss, if there is one."""
        _, chunk, microbatch = action
        if not self.batch.targets:
            self.outputs[microbatch] = y
            return
        with closed(WHERE, self.wires.axis, self.closing):
            loss = self.stages.loss(y, self.batch.targets[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            fail(WHERE, "the loss is no real number.", got=got, fix="loss(output, target) -> a tensor of one element")
        share = self.batch.shares[microbatch]
        scaled = loss.reshape(()) if share == 1 else loss.reshape(()) * share
        own = loss.detach().reshape(()).to(torch.promote_types(loss.dtype, torch.float32)) * share
        self._total, self._ends_in = own if self._total is None else self._total + own, loss.dtype
        if self.trains:
            leaves = [Leaf((), loss.dtype, True)] if scaled.requires_grad else []
            edges = [get_gradient_edge(scaled)] if leaves else []
            self.alive[chunk, microbatch] = Alive(arrival, edges, leaves, later)

    def _b(self, action: Action) -> None:
        _, chunk, microbatch = action
        stage = self.schedule.stage(self.rank, chunk)
        alive = self.alive[chunk, microbatch]
        if stage == self.last:
            gradients = [torch.ones((), dtype=leaf.dtype, device=self.wires.axis.mesh.device) for leaf in alive.leaves]
        else:
            gradients = list(self._came(action))
        with self._timed(action):
            if gradients:
                with contextlib.nullcontext() if alive.later is None else alive.later.opened():
                    torch.autograd.backward(alive.edges, gradients)
        found = alive.arrival.taken()
        if action.kind == "B":
            del self.alive[chunk, microbatch]
        else:
            kept = alive._replace(arrival=None, edges=(), leaves=())  # type: ignore[arg-type]
            self.alive[chunk, microbatch] = kept
        if stage:
            self._give(GRADIENT, stage, stage - 1, microbatch, found, None)
        elif self.batch.wants:
            self.input_gradients[microbatch] = found

    _d = _b

    def _w(self, action: Action) -> None:
        _, chunk, microbatch = action
        alive = self.alive.pop((chunk, microbatch))
        with self._timed(action):
            if alive.later is not None:
                alive.later.finish()


def _wanting(leaf: Any) -> Any:
    if isinstance(leaf, Leaf):
        return replace(leaf, wants=leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    return leaf
