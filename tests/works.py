"""What the tests of works share: meshes, data, and messages that let others go on."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import torch
from cases import Case
from oracle import Oracle
from torch import Tensor
from torch.utils import _pytree as pytree

import meshcomm as mc

T = TypeVar("T")
Run4 = Callable[..., list[Any]]
ROOT = Path(__file__).parent.parent
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
BIG = 1 << 19
"""Elements of what goes another way, and in several steps: 2 MiB of float32, and flags are beyond the limit too."""


def mesh4() -> mc.Mesh:
    return mc.make_mesh({"a": 4})


def mesh22() -> mc.Mesh:
    return mc.make_mesh({"a": 2, "b": 2})


def line_of(mark: str, file: str) -> int:
    """The line of this file that ends in the comment ``# mark``."""
    lines = Path(file).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {mark}"))


def data(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    """Fractions whose sums round, different on every rank through ``seed``."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return (x > 0) if dtype == torch.bool else (x * 5).to(dtype)


def equal(actual: Any, expected: Any, what: str) -> None:
    """The same tree, bit for bit."""
    ours, spec = pytree.tree_flatten(actual)
    theirs, other = pytree.tree_flatten(expected)
    assert spec == other, f"{what}: {spec} is not {other}"
    for x, y in zip(ours, theirs, strict=True):
        if not isinstance(y, Tensor):
            assert x == y, f"{what}: {x} is not {y}"
            continue
        assert type(x) is Tensor, what
        assert (x.dtype, x.shape) == (y.dtype, y.shape), f"{what}: {x.dtype} {x.shape} is not {y.dtype} {y.shape}"
        same = torch.equal(bits(x), bits(y))
        assert same, f"{what}: {x.flatten()[:8]} is not {y.flatten()[:8]}"


def bits(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)


def shuffled(items: list[T], seed: int) -> list[T]:
    items = list(items)
    random.Random(seed).shuffle(items)
    return items


def go(mesh: mc.Mesh, axis: Any = "a") -> None:
    """Rank 0 lets the others pass; they wait here for that."""
    if mesh.rank == 0:
        for rank in range(1, mesh.size):
            mc.send(torch.ones(1), axis, rank, tag=77, mesh=mesh)
    else:
        mc.recv(axis, 0, shape=(1,), dtype=F32, tag=77, mesh=mesh)


def warm(mesh: mc.Mesh, axis: Any = "a") -> None:
    """Make the groups of the axis: that meets, once."""
    mc.all_reduce(torch.ones(BIG // 4), axis, mesh=mesh, async_op=True).wait()


def call(case: Case, x: Any, axis: Any, mesh: mc.Mesh, **more: Any) -> Any:
    place = mesh.axis(axis)
    kwargs = case.kwargs(place.size) | case.own(place.size, place.index)
    return getattr(mc, case.op)(x, axis, **kwargs, mesh=mesh, **more)


def input_of(case: Case, oracle: Oracle, axis: Any, dtype: torch.dtype, rank: int) -> Tensor:
    x = case.inputs(oracle, axis, dtype)[rank]
    return x / 3 if dtype.is_floating_point or dtype.is_complex else x


def weighted(y: Any) -> Tensor:
    leaves = [leaf for leaf in pytree.tree_leaves(y) if leaf.is_floating_point()]
    weights = [torch.arange(1, leaf.numel() + 1, dtype=leaf.dtype).view(leaf.shape).cos() for leaf in leaves]
    return torch.stack([(leaf.tanh() * w).sum() for leaf, w in zip(leaves, weights, strict=True)]).sum()


def gradients(fn: Callable[[Tensor], Any], x: Tensor) -> dict[str, Any]:
    """Everything that can be asked of autograd, after other work has been done between start and wait."""
    found: dict[str, Any] = {}
    leaf = x.clone().requires_grad_()
    h = leaf.sin()
    seen: list[Tensor] = []
    h.register_hook(lambda g: seen.append(g.clone()))  # the gradient as it comes out, finished
    loss = weighted(fn(h))
    loss.backward(retain_graph=True)
    found["backward"] = leaf.grad
    leaf.grad = None
    loss.backward(retain_graph=True)
    loss.backward()
    found["twice more"] = leaf.grad
    found["seen by a hook"] = list(seen)
    h = leaf.sin()
    (found["grad"],) = torch.autograd.grad(weighted(fn(h)), leaf)
    (found["grad of what is no leaf"],) = torch.autograd.grad(weighted(fn(h)), h)
    (g,) = torch.autograd.grad(weighted(fn(leaf.sin())), leaf, create_graph=True)
    found["create_graph"] = g.detach()
    (found["second order"],) = torch.autograd.grad(weighted(g), leaf)
    return found


SOME = [
    "pvary", "all_reduce-sum", "all_reduce-mean", "all_reduce-max", "all_reduce-product", "all_gather-middle", "all_gather_invariant",
    "shard-dim-1", "reduce_scatter-mean", "reduce_scatter-min", "all_to_all-0-1", "permute", "shift-no-wrap", "broadcast-last",
]  # fmt: skip


async def awaited(work: Awaitable[T]) -> T:
    return await work


def by_hand(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it without an event loop."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
