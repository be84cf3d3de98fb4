"""What the function of a shard_map finds around it on a rank, and what it must not find there."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from meshcomm._torch import default_device, dual_level_open, functorch_active, tree_flatten
from meshcomm.collectives.check import differentiable
from meshcomm.errors import fail, shape_text
from meshcomm.mesh import Mesh, begin, current_mesh, use_mesh
from meshcomm.runtime.process import accelerator
from meshcomm.runtime.transports.threads.eras import of_thread
from meshcomm.runtime.transports.threads.random_state import RandomState
from meshcomm.spmd.shard_map.specs import WHERE
from meshcomm.spmd.types.reachable import Reachable, Slot

_NOTHING = contextlib.nullcontext()


def _in_nothing() -> contextlib.AbstractContextManager[None]:
    return _NOTHING


class body_of(use_mesh):  # noqa: N801
    """What runs inside is the body of a shard_map over this mesh, whose axes it can name."""

    def __init__(self, mesh: Mesh) -> None:
        not_in_a_body(mesh)
        super().__init__(mesh)

    def __enter__(self) -> Mesh:
        mesh = super().__enter__()
        of_thread.body = mesh
        return mesh

    def __exit__(self, *exc: object) -> None:
        of_thread.body = None
        super().__exit__(*exc)


def begin_body(mesh: Mesh) -> None:
    """What this thread does until it ends is the body of a shard_map over this mesh."""
    of_thread.body = mesh
    begin(mesh)


def not_in_a_body(mesh: Mesh) -> None:
    """Refuse a shard_map inside of another one."""
    if of_thread.body is not None:
        fail(
            WHERE,
            "called inside the function of another shard_map.",
            got=f"mesh {mesh.shape} inside of mesh {of_thread.body.shape}; the values there are a rank's own parts",
            fix="call the function itself there, or use collectives",
        )


class OwnState(RandomState):
    """A rank's random state, and what stands in the modules that all ranks reach: functional_call exchanges it, and
    while one rank is in the midst of that another one goes on.
    """

    def __init__(self, slots: Sequence[Slot], seed: int, rank: int) -> None:
        super().__init__(seed, rank)
        self._slots = slots
        self._values = [slot.read() for slot in self._slots]

    def save(self) -> None:
        """Keep the random state and what stands in the modules here."""
        super().save()
        self._values = [slot.read() for slot in self._slots]

    def give_way(self, other: RandomState) -> None:
        """The same of both."""
        self.save()
        other.load()

    def load(self) -> None:
        """Make the random state and what stands in the modules the ones that are seen."""
        super().load()
        for slot, value in zip(self._slots, self._values, strict=True):
            if slot.read() is not value:
                slot.write(value)


class Modes:
    """The grad mode, autocast and default device of the call: a backward happens in other ones."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.transformed = functorch_active() or dual_level_open()
        self.device = default_device()
        self.casts = accelerator.casts(self.device)

    def missing(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        """What brings back the modes of the call on ranks, which have those of who asks."""
        moved = self.device != default_device()
        casts = [cast for cast in self.casts if cast[2] or torch.is_autocast_enabled(cast[0])]
        return partial(self._enter, moved, casts) if self.transformed or moved or casts else _in_nothing

    @contextlib.contextmanager
    def _enter(self, moved: bool, casts: Sequence[tuple[str, torch.dtype, bool]]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.transformed:
                stack.enter_context(_NoWrappers())
            if moved:
                stack.enter_context(self.device)
            for kind, dtype, enabled in casts:  # what one rank has cast would be found by another one
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


def closed_over(reach: Reachable) -> list[tuple[str, Tensor]]:
    """The tensors in reach that are inputs: those that have a gradient, a batch or a tangent."""
    dual = dual_level_open()
    return [
        (name or "a tensor in the closure", x)
        for name, x in reach.tensors.values()
        if x.requires_grad or (dual and differentiable(x)) or (functorch_active() and _wrapped(x))
    ]


def _wrapped(x: Tensor) -> bool:
    """Whether a torch.func transform has put it into a tensor without memory of its own."""
    try:
        x.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return True
    return False


class _NoWrappers(TorchFunctionMode):
    """Refuses what a transform of the caller has wrapped: a rank would compute with it as if it were a constant."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not functorch_active():
            for x in tree_flatten((args, kwargs))[0]:
                if isinstance(x, Tensor) and _wrapped(x):
                    mesh = current_mesh()
                    assert mesh is not None
                    _not_found(x, mesh, "a transform has wrapped")
        return func(*args, **(kwargs or {}))


def _not_found(x: Tensor, mesh: Mesh, how: str) -> NoReturn:
    fail(
        WHERE,
        f"the result depends on a tensor that {how} and that was not found to be an input.",
        got=f"{shape_text(x.dtype, x.shape)}; mesh {mesh.shape}",
        fix="pass it as an argument, or detach it; found are closures, defaults, attributes, modules, globals",
    )


def no_tangents(outputs: list[Tensor], mesh: Mesh) -> None:
    """The inputs had none, so one would be that of a tensor that is none."""
    for y in outputs:
        if differentiable(y) and forward_ad.unpack_dual(y, level=0).tangent is not None:
            _not_found(y, mesh, "has a tangent")


def leaves_behind(outputs: list[Tensor], places: dict[int, int], mesh: Mesh) -> list[set[int]]:
    """Which inputs each output depends on. A leaf that is none, and that somebody still has, would lose its gradient;
    one that was made on the way (``x.detach().requires_grad_()``) and that nobody else has any more is a constant.
    """
    live = [y for y in outputs if y.requires_grad]
    every, others = _leaves(live, places)
    if not others:
        return [every if y.requires_grad else set() for y in outputs]
    for node in others:
        if not _is_constant(node, 2 * sum(y is node.variable for y in live)):  # in both lists
            _not_found(node.variable, mesh, "requires grad")
    return [_leaves([y], places)[0] if y.requires_grad else set() for y in outputs]


def _leaves(outputs: list[Tensor], places: dict[int, int]) -> tuple[set[int], list[Any]]:
    """The inputs that these depend on, and the nodes of all other leaves."""
    used: set[int] = set()
    others: list[Any] = []
    nodes: list[Any] = [get_gradient_edge(y).node for y in outputs]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node.name().endswith("AccumulateGrad"):
            place = places.get(id(node.variable))
            if place is None:
                others.append(node)
            else:
                used.add(place)
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                nodes.append(other)
    return used, others


def _is_constant(node: Any, known: int) -> bool:
    """Whether nobody has this leaf but the graph, and ``known`` others."""
    alone = _references(get_gradient_edge(torch.ones(1, requires_grad=True, device="cpu")).node) + known
    if _references(node) > alone:
        gc.collect()  # a function that names itself keeps what it has seen
    return _references(node) <= alone


def _references(node: Any) -> int:
    """How many there are to the leaf of this node."""
    return sys.getrefcount(node.variable)
