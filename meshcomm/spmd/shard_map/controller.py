"""shard_map from outside of ranks: one process holds the global tensors and runs all ranks on their parts.

The backward of such a run is another one: of the vector-Jacobian product of the same function, on the parts of inputs
and gradients. Therefore derivatives of every order are what the collectives inside say that they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from meshcomm._torch import alive, dispatch_modes, dual_level_open, functorch_active, outside_transforms
from meshcomm.collectives.check import differentiable
from meshcomm.errors import fail
from meshcomm.layout.notation import Layout
from meshcomm.mesh import Mesh
from meshcomm.runtime.transports.threads.random_state import RandomState
from meshcomm.runtime.transports.threads.scheduler import World, current_rank, local
from meshcomm.spmd.shard_map import kept_axes
from meshcomm.spmd.shard_map.assemble import Outputs, assembled, coordinates
from meshcomm.spmd.shard_map.rank_context import Modes, OwnState, begin_body, leaves_behind, no_tangents
from meshcomm.spmd.shard_map.specs import WHERE, pieces
from meshcomm.spmd.types.reachable import Reachable, in_place_of

_NONE: frozenset[int] = frozenset()
_PLAINLY = contextlib.nullcontext()
_REQUIRES_GRAD, _CLONE, _DETACH = attrgetter("requires_grad"), methodcaller("clone"), methodcaller("detach")

Local = Callable[[list[Tensor], list[Tensor]], Outputs]
"""One rank's work: on its parts, and on tensors that all ranks share."""


@dataclass
class _Result:
    """What is known after a run: the outputs' layouts and types, and which inputs they depend on."""

    outputs: Outputs
    needs_grad: list[bool] = field(default_factory=list)
    used: set[int] = field(default_factory=set)


@dataclass
class Program:
    """A function of global tensors: the first ones are cut by ``layouts``, the others are shared by all ranks."""

    mesh: Mesh
    local: Local
    layouts: list[Layout]
    labels: list[str]
    reach: Reachable
    shared: list[int]
    """The ids of the tensors for which the shared ones stand while it runs."""
    modes: Modes
    seed: int | None = None
    order: int = 0
    """Of the derivative."""

    def run(self, tensors: Sequence[Tensor], wanted: Sequence[bool] | None) -> tuple[list[Tensor], _Result]:
        """Run all ranks; ``wanted``: which inputs shall be differentiated, None where there will be no backward."""
        if current_rank() is not None:
            fail(
                WHERE,
                "what was computed outside of ranks is differentiated inside of one.",
                fix="call backward outside of mc.launch, or the function inside",
            )
        seed, mesh = self.draw(), self.mesh
        count, modes = len(self.layouts), self.modes.missing()
        places = coordinates(mesh)
        with torch.no_grad():
            shared = [_leaf(x) for x in tensors[count:]]
            inputs = [pieces(x, layout, places, mesh) for x, layout in zip(tensors, self.layouts, strict=False)]
        slots = [slot for slot in self.reach.slots if slot.of_module]
        state = partial(OwnState, slots, seed) if slots else partial(RandomState, seed)
        grad = self.modes.grad if self.order == 0 and wanted is None else wanted is not None
        others = dict(zip(self.shared, shared, strict=True))
        with in_place_of(self.reach.slots, others) if self.reach.slots else _PLAINLY:
            world = World(mesh.world_size, share=True, state=state)
            kept_axes.take(mesh, world)
            found = world.run(lambda: self._on_rank(inputs, shared, wanted, grad, modes))
        if any(x.grad is not None for x in shared):
            what = "backward() ran inside the function and reached a tensor that it closes over."
            fail(WHERE, what, fix="call backward() on what the function returns, or return torch.autograd.grad(...)")
        kept_axes.leave(mesh, world)
        world.forget()
        ranks = [found[rank] for rank in mesh.ranks]
        outputs = ranks[0][0]
        result = _Result(outputs)
        if wanted is not None:
            result.needs_grad = [any(needs) for needs in zip(*(rank[1] for rank in ranks), strict=True)]
            result.used = set().union(*(rank[2] for rank in ranks))
        with torch.no_grad():
            return assembled([rank[0] for rank in ranks], places, mesh, self.order), result

    def draw(self) -> int:
        """The seed of the ranks' random states: later runs, in backward, draw what the first one drew."""
        if self.seed is None:
            # vmap refuses random numbers that are the same for the whole batch
            with outside_transforms() if functorch_active() or dispatch_modes() else contextlib.nullcontext():
                self.seed = int(torch.randint(2**62, (), device="cpu").item())
        return self.seed

    def _on_rank(
        self,
        inputs: Sequence[Sequence[Tensor]],
        shared: list[Tensor],
        wanted: Sequence[bool] | None,
        grad: bool,
        modes: Callable[[], contextlib.AbstractContextManager[object]],
    ) -> Any:
        mesh = self.mesh
        rank = local.rank.index  # type: ignore[union-attr]
        if rank not in mesh.ranks:
            return None
        place = mesh.own_index()
        if grad != torch.is_grad_enabled():
            torch.set_grad_enabled(grad)
        with modes():
            begin_body(mesh)  # the thread ends with it
            leaves = list(map(itemgetter(place), inputs))  # what is done for each rank is felt
            if wanted is not None:
                leaves = [x.requires_grad_() if want else x for x, want in zip(leaves, wanted, strict=False)]
            parts = list(map(_CLONE, leaves))  # the function may change its own copy
            outputs = self.local(parts, shared)
        parts.clear()  # what the function has made of them is nobody's any more
        tensors = outputs.tensors
        needs, all_used = [False] * len(tensors), _NONE
        if any(map(_REQUIRES_GRAD, tensors)):
            used = leaves_behind(tensors, {id(leaf): i for i, leaf in enumerate([*leaves, *shared])}, mesh)
            needs, all_used = list(map(bool, used)), _NONE.union(*used)
        if self.modes.transformed:
            no_tangents(tensors, mesh)
        return tuple.__new__(Outputs, (list(map(_DETACH, tensors)), *outputs[1:])), needs, all_used

    def pullback(self, result: _Result, wanted: Sequence[bool]) -> Program:
        """The program from inputs and output gradients to the gradients of the inputs that are wanted."""
        count, outputs, inner = len(self.layouts), result.outputs, self.local
        chosen = [i for i, needs in enumerate(result.needs_grad) if needs]
        targets = [i for i, want in enumerate(wanted) if want]
        invariant = Layout()
        layouts = [*self.layouts, *[invariant] * len(self.shared)]
        gradients = [layouts[i] for i in targets]
        labels = [self.labels[i] for i in targets]

        def local(parts: list[Tensor], shared: list[Tensor]) -> Outputs:
            create_graph = torch.is_grad_enabled()
            with torch.enable_grad():
                leaves = [_leaf(x) if i in targets and not x.requires_grad else x for i, x in enumerate(parts[:count])]
                ys = inner([x.clone() for x in leaves], shared).tensors
                pairs = [(ys[i], g) for i, g in zip(chosen, parts[count:], strict=True) if ys[i].requires_grad]
            xs = [[*leaves, *shared][i] for i in targets]
            found: Sequence[Tensor | None] = [None] * len(xs)
            if pairs:
                ends, gs = zip(*pairs, strict=True)
                found = torch.autograd.grad(ends, xs, gs, create_graph=create_graph, allow_unused=True)
            zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True)]
            return Outputs(zeros, gradients, labels)

        return replace(
            self,
            local=local,
            layouts=[*self.layouts, *(outputs.layouts[i] for i in chosen)],
            labels=[
                *self.labels[:count],
                *(f"the gradient of {outputs.labels[i]}" for i in chosen),
                *self.labels[count:],
            ],
            order=self.order + 1,
        )


def _leaf(x: Tensor) -> Tensor:
    x = x.detach()
    return x.requires_grad_() if differentiable(x) else x


def run_global(program: Program, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """Run it, differentiably where that is asked for; gives the global outputs, and what is no tensor."""
    transformed = functorch_active() or dual_level_open()
    needs = [differentiable(x) and (transformed or x.requires_grad) for x in tensors]
    if not any(needs) or not (transformed or torch.is_grad_enabled()):
        outputs, result = program.run(tensors, None)
        return outputs, result.outputs.rest
    call = _Call(program, needs)
    if not transformed:
        # Run now, for what is in reach but not used must not stand in the graph: it may be of an older one.
        call.run(tensors)
        tensors = [x if i in call.result.used else x.detach() for i, x in enumerate(tensors)]
    return list(_run_sharded(call, *tensors)), call.result.outputs.rest


class _Call:
    """A run of a program that has a backward."""

    def __init__(self, program: Program, wanted: list[bool]) -> None:
        self.program, self.wanted = program, wanted
        self.result = _Result(Outputs([], [], []))
        self.outputs: list[Tensor] | None = None

    def run(self, tensors: Sequence[Tensor]) -> None:
        """Have the outputs here until :meth:`take`."""
        self.outputs, result = self.program.run(tensors, self.wanted)
        self.result = replace(result, outputs=result.outputs._replace(tensors=[]))

    def take(self) -> tuple[Tensor, ...]:
        """The outputs, which nobody else has."""
        assert self.outputs is not None
        outputs, self.outputs = self.outputs, None
        return tuple(outputs)


class _Sharded(Function):
    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        if call.outputs is None:
            call.run(tensors)
        return call.take()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        needs = ctx.call.result.needs_grad
        ctx.mark_non_differentiable(*(y for y, need in zip(output, needs, strict=True) if not need))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        program, result = ctx.call.program, ctx.call.result
        wanted = [need and i in result.used for i, need in enumerate(ctx.needs_input_grad[1:])]
        if not any(wanted):
            return None, *(None for _ in wanted)
        # Of torch.func.vjp, the pullback is called when its level has ended.
        tensors, count = [alive(x) for x in ctx.saved_tensors], len(program.layouts)
        given = [alive(g) for g, need in zip(gradients, result.needs_grad, strict=True) if need]
        pullback = program.pullback(result, wanted)
        found = iter(run_global(pullback, [*tensors[:count], *given, *tensors[count:]])[0])
        return None, *(next(found) if want else None for want in wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        fix = "call mc.shard_map's function inside of mc.launch; or torch.func.vjp, jacrev, torch.autograd.grad"
        fail(WHERE, "forward mode works on ranks only.", got=f"mesh {ctx.call.program.mesh.shape}", fix=fix)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: _Call, *tensors: Tensor) -> Any:
        """One run per element of the batch, for a batch of what is closed over cannot be put in its place."""
        runs = []
        for i in range(info.batch_size):
            # An outer transform sees through the select, so each run has a backward of its own.
            own = _Call(replace(call.program, seed=_seed_in_batch(call.program, info.randomness)), call.wanted)
            pairs = zip(tensors, in_dims[1:], strict=True)
            runs.append(_run_sharded(own, *(x if dim is None else x.select(dim, i) for x, dim in pairs)))
            call.result = own.result
        return tuple(torch.stack(ys) for ys in zip(*runs, strict=True)), (0,) * len(runs[0])


def _seed_in_batch(program: Program, randomness: str) -> int | None:
    """The seed for one element of a batch: drawn by its own run where they shall differ."""
    return None if program.seed is None and randomness == "different" else program.draw()


_run_sharded: Any = _Sharded.apply
