"""Work: what a collective with ``async_op=True`` gives is the synchronous result, whenever and however it is waited for.

Most programs run on both runtimes. A peer is kept from coming too early by a message that the first rank sends when it has
seen what it should see, never by a pause: so the same program is exact on processes and an error at once in-process.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gc
import inspect
import os
import random
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pytest
import torch
from cases import BY_NAME, CASES, Case, grid
from oracle import Oracle
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils import _pytree as pytree

import meshcomm as mc
from meshcomm.runtime.pending import Pending
from meshcomm.work import Work

if TYPE_CHECKING:
    from typing_extensions import assert_type

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


def line_of(mark: str) -> int:
    """The line of this file that ends in the comment ``# mark``."""
    lines = inspect.getsourcelines(sys.modules[__name__])[0]
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


# ------------------------------------------------------------------------------------------------- the same values


def call(case: Case, x: Any, axis: Any, mesh: mc.Mesh, **more: Any) -> Any:
    place = mesh.axis(axis)
    kwargs = case.kwargs(place.size) | case.own(place.size, place.index)
    return getattr(mc, case.op)(x, axis, **kwargs, mesh=mesh, **more)


def transposed(x: Tensor) -> Tensor:
    """The same values, laid out the other way round; every other element of 1-d storage."""
    if x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return torch.stack([x, x], -1)[..., 0]


def expanded(x: Tensor) -> Tensor:
    """One row for all."""
    return x[:1].expand_as(x) if x.ndim else x.expand(())


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x, "transposed": transposed, "expanded": expanded, "conjugated": torch.conj,
}  # fmt: skip


def input_of(case: Case, oracle: Oracle, axis: Any, dtype: torch.dtype, rank: int) -> Tensor:
    x = case.inputs(oracle, axis, dtype)[rank]
    return x / 3 if dtype.is_floating_point or dtype.is_complex else x


def same_values(shape: tuple[int, ...], axes: list[Any], form: str) -> None:
    """Everything at once under way, and waited in an order of this rank's own."""
    mesh, oracle = mc.make_mesh(grid(shape)), Oracle(grid(shape))
    begun = []
    for axis in axes:
        for case in CASES:
            for dtype in case.dtypes:
                if form == "conjugated" and not dtype.is_complex:
                    continue
                x = FORMS[form](input_of(case, oracle, axis, dtype, mesh.rank))
                expected = call(case, x, axis, mesh)
                kept = x.clone()
                work = call(case, x, axis, mesh, async_op=True)
                assert isinstance(work, Work)
                what = f"{case.name} over {axis!r} of {form} {dtype} on rank {mesh.rank}"
                begun.append((what, work, expected, x, kept, case.op))
    for what, work, expected, x, kept, op in shuffled(begun, mesh.rank):
        y = work.wait()
        equal(y, expected, what)
        equal(x, kept, f"{what}: the input")
        assert y.stride() == expected.stride(), what
        if y.numel() and op != "pvary":
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), f"{what}: the input's storage"


@pytest.mark.parametrize("form", FORMS)
def test_values(run4: Run4, form: str) -> None:
    run4(same_values, (4,), ["a"], form)


def test_values_over_pairs_and_tuples(run4: Run4) -> None:
    run4(same_values, (2, 2), ["a", "b", ("b", "a")], "dense")


def test_values_on_an_axis_of_one() -> None:
    same_values((1,), ["a"], "dense")


def to_one_rank(mesh: mc.Mesh, x: Tensor, **more: Any) -> dict[str, Any]:
    """Each function to or from one rank, on the same tensor."""
    r, n = mesh.rank, mesh.size
    ops = {torch.bool: ("band", "bxor", "max"), torch.int64: ("sum", "product", "min")}.get(
        x.dtype, ("sum", "mean", "max")
    )
    rows = torch.stack([(x * (i + 1)).to(x.dtype) for i in range(n)])
    after, before = (r + 1) % n, (r - 1) % n
    flat = rows.reshape(n * x.shape[0], *x.shape[1:]) if x.ndim else rows
    mine = x if x.ndim else x.reshape(1)
    return {
        **{f"reduce {op}": mc.reduce(x, "a", 2, op, mesh=mesh, **more) for op in ops},
        "gather": mc.gather(x, "a", 1, 0, mesh=mesh, **more),
        "gather last": mc.gather(x, "a", 3, -1, mesh=mesh, **more),
        "scatter": mc.scatter(flat if r == 1 else None, "a", 1, 0, like=mine, mesh=mesh, **more),
        "exchange": mc.exchange(
            [(x, after), (x.flip(0) if x.ndim else x, before, 5), (x, r, 3)],
            [(r, tuple(x.shape), x.dtype, 3), (before, tuple(x.shape), x.dtype), (after, tuple(x.shape), x.dtype, 5)],
            "a", mesh=mesh, **more,
        ),
        "nothing exchanged": mc.exchange([], [], "a", mesh=mesh, **more),
        "barrier": mc.barrier("a", mesh=mesh, **more),
    }  # fmt: skip


def same_to_one_rank(sizes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> None:
    mesh = mesh4()
    begun: list[tuple[str, Any, Any]] = []
    for shape in sizes:
        for dtype in dtypes:
            for form in ("dense", "transposed"):
                x = FORMS[form](data(*shape, seed=mesh.rank, dtype=dtype))
                expected, works = to_one_rank(mesh, x), to_one_rank(mesh, x, async_op=True)
                begun += [(f"{name} of {form} {dtype} {shape}", works[name], expected[name]) for name in works]
                x.fill_(1)
    for what, work, expected in shuffled(begun, mesh.rank):
        equal(work.wait(), expected, f"{what} on rank {mesh.rank}")


def test_to_and_from_one_rank(run4: Run4) -> None:
    run4(same_to_one_rank, [(3, 2), (), (0, 2)], [F32, torch.int64, BF16, torch.bool])


def messages(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """send and recv: all begun before one is waited, on two tags, taken in an order of this rank's own."""
    mesh = mesh4()
    r = mesh.rank
    after, before = (r + 1) % 4, (r - 1) % 4
    sends = [
        mc.send(data(*shape, seed=10 * r + i, dtype=dtype), "a", after, i % 2, mesh=mesh, async_op=True)
        for i in range(6)
    ]
    recvs = [mc.recv("a", before, shape=shape, dtype=dtype, tag=i % 2, mesh=mesh, async_op=True) for i in range(6)]
    for i, work in shuffled(list(enumerate(recvs)), r):
        equal(work.wait(), data(*shape, seed=10 * before + i, dtype=dtype), f"message {i} to rank {r}")
    assert mc.wait(sends) == [None] * 6


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3), BF16), ((), torch.int64), ((0,), F32), ((BIG,), F32)], ids=str)
def test_messages(run4: Run4, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    run4(messages, shape, dtype)


def zero_size(mesh: mc.Mesh, x: Tensor, **more: Any) -> list[Any]:
    return [
        mc.pvary(x, "a", mesh=mesh, **more),
        *(mc.all_reduce(x, "a", op, mesh=mesh, **more) for op in ("sum", "mean", "max")),
        mc.all_gather(x, "a", mesh=mesh, **more),
        mc.all_gather_invariant(x, "a", 1, mesh=mesh, **more),
        mc.shard(x, "a", mesh=mesh, **more),
        mc.reduce_scatter(x, "a", mesh=mesh, **more),
        mc.reduce_scatter(x, "a", op="min", mesh=mesh, **more),
        mc.all_to_all(x, "a", 0, 1, mesh=mesh, **more),
        mc.all_to_all(x, "a", 0, 0, [x.shape[0] // 4] * 4, [x.shape[0] // 4] * 4, mesh=mesh, **more),
        mc.permute(x, "a", [(0, 1), (1, 3)], mesh=mesh, **more),
        mc.shift(x, "a", wrap=False, mesh=mesh, **more),
        mc.broadcast(x, "a", 2, mesh=mesh, **more),
        mc.all_reduce({"x": x, "y": [x + 1, x.double()]}, "a", mesh=mesh, **more),
        mc.all_gather([], "a", mesh=mesh, **more),
    ]


def nothing_in_it() -> None:
    mesh = mesh4()
    for shape in ((0, 3), (4, 0)):
        x = torch.zeros(shape, dtype=BF16)
        expected, works = zero_size(mesh, x), zero_size(mesh, x, async_op=True)
        for i, work in shuffled(list(enumerate(works)), mesh.rank):
            equal(work.wait(), expected[i], f"{i} of {shape} on rank {mesh.rank}")


def test_zero_size(run4: Run4) -> None:
    run4(nothing_in_it)


def numbers(mesh: mc.Mesh, x: Tensor, **more: Any) -> list[Any]:
    return [
        mc.pvary(x, "a", mesh=mesh, **more),
        *(mc.all_reduce(x, "a", op, mesh=mesh, **more) for op in ("sum", "max", "product")),
        mc.all_gather_invariant(x, "a", mesh=mesh, **more),
        mc.permute(x, "a", [(0, 1), (1, 3)], mesh=mesh, **more),
        mc.shift(x, "a", 3, mesh=mesh, **more),
        mc.broadcast(x, "a", 2, mesh=mesh, **more),
        mc.all_gather([x, x.double()], "a", mesh=mesh, **more),
    ]


def without_a_dim() -> None:
    mesh = mesh4()
    for dtype in (F32, BF16, torch.int64):
        x = data(seed=mesh.rank, dtype=dtype)
        expected, works = numbers(mesh, x), numbers(mesh, x, async_op=True)
        for i, work in shuffled(list(enumerate(works)), mesh.rank):
            equal(work.wait(), expected[i], f"{i} of {dtype} on rank {mesh.rank}")


def test_0_d(run4: Run4) -> None:
    run4(without_a_dim)


def scatters_something() -> None:
    mesh = mesh4()
    with pytest.raises(
        mc.MeshError, match=r"scatter: async_op=True without like=.*\n.*\n  fix: pass like= on all ranks"
    ):
        mc.scatter(None if mesh.rank else torch.ones(4), "a", mesh=mesh, async_op=True)
    mc.barrier("a", mesh=mesh)


def test_scatter_needs_to_know_what_comes(run4: Run4) -> None:
    run4(scatters_something)


def large(r: int) -> dict[str, tuple[Any, ...]]:
    """What takes the ways of large tensors: two steps, messages, the sum after an exchange."""
    x = data(BIG, seed=r)
    half, ints = x.bfloat16(), x.long()
    uneven = [BIG // 4 + 7 * i for i in range(4)]
    runs = [BIG // 4 + (i - 1) * (r - i) for i in range(4)]
    back = [BIG // 4 + (r - 1) * (i - r) for i in range(4)]
    return {
        **{f"all_reduce {op}": (mc.all_reduce, x, "a", op) for op in ("sum", "mean", "max", "min", "product")},
        **{f"all_reduce {op} of ints": (mc.all_reduce, ints, "a", op) for op in ("sum", "max", "band", "bor", "bxor")},
        **{f"all_reduce {op} of half": (mc.all_reduce, half, "a", op) for op in ("sum", "mean", "max")},
        "all_reduce strided": (mc.all_reduce, x.view(1024, -1).T, "a"),
        "all_reduce odd": (mc.all_reduce, x[:-3], "a"),
        "all_reduce tree": (mc.all_reduce, {"w": x, "b": [half, x[:5]]}, "a"),
        "all_gather": (mc.all_gather, x, "a"),
        "all_gather dim 1": (mc.all_gather, half.view(1024, -1), "a", 1),
        "all_gather sizes": (mc.all_gather_invariant, x[: uneven[r]], "a", 0, uneven),
        "shard": (mc.shard, x, "a"),
        "reduce_scatter": (mc.reduce_scatter, x, "a"),
        "reduce_scatter dim 1": (mc.reduce_scatter, x.view(1024, -1), "a", 1, "max"),
        "reduce_scatter half": (mc.reduce_scatter, half, "a", 0, "mean"),
        "all_to_all": (mc.all_to_all, x.view(1024, -1), "a", 0, 1),
        "all_to_all ragged": (mc.all_to_all, x[: sum(runs)], "a", 0, 0, runs, back),
        "permute": (mc.permute, x, "a", [(0, 2), (2, 1), (3, 3)]),
        "shift": (mc.shift, x, "a", 3),
        "shift, no wrap": (mc.shift, half, "a", -1, False),
        "broadcast": (mc.broadcast, x, "a", 3),
        "reduce": (mc.reduce, x, "a", 1),
        "gather": (mc.gather, half, "a", 2),
        "scatter": (mc.scatter, x if r == 3 else None, "a", 3, 0, x[: BIG // 4]),
        "exchange": (mc.exchange, [(x, (r + 1) % 4), (half, (r + 2) % 4)], [((r - 1) % 4, (BIG,), F32), ((r + 2) % 4, (BIG,), BF16)], "a"),
    }  # fmt: skip


def large_and_odd(r: int) -> dict[str, tuple[Any, ...]]:
    """Dtypes that gloo does not take everywhere."""
    whole = data(BIG, seed=r).round()
    pairs, short, flags = torch.complex(whole, whole.flip(0)), whole.to(torch.int16), whole > 0
    return {
        "all_reduce sum of complex": (mc.all_reduce, pairs, "a"),
        "all_reduce product of complex": (mc.all_reduce, pairs, "a", "product"),
        "all_reduce sum of short": (mc.all_reduce, short, "a"),
        "all_reduce max of unsigned": (mc.all_reduce, short.view(torch.uint16), "a", "max"),
        "all_reduce bor of flags": (mc.all_reduce, flags, "a", "bor"),
        "all_gather": (mc.all_gather, short, "a"),
        "all_gather of complex": (mc.all_gather, pairs, "a"),
        "reduce_scatter": (mc.reduce_scatter, pairs, "a"),
        "all_to_all": (mc.all_to_all, flags, "a", 0, 0),
        "shift": (mc.shift, short.view(torch.uint16), "a"),
        "broadcast": (mc.broadcast, pairs, "a", 1),
        "exchange": (mc.exchange, [(pairs, (r + 1) % 4)], [((r - 1) % 4, (BIG,), pairs.dtype)], "a"),
    }  # fmt: skip


def same_large_values(which: Callable[[int], dict[str, tuple[Any, ...]]]) -> None:
    mesh = mesh4()
    calls = list(which(mesh.rank).items())
    for start in range(0, len(calls), 6):  # six under way at a time: all of them would be a gigabyte
        begun = []
        for name, (fn, *args) in calls[start : start + 6]:
            expected = fn(*args, mesh=mesh)
            begun.append((name, fn(*args, mesh=mesh, async_op=True), expected))
        for name, work, y in shuffled(begun, mesh.rank):
            equal(work.wait(), y, f"{name} on rank {mesh.rank}")


def test_large_values(run4: Run4) -> None:
    run4(same_large_values, large)


def test_large_values_of_other_dtypes(run4: Run4) -> None:
    run4(same_large_values, large_and_odd)


# ---------------------------------------------------------------------------------------------------------- pytrees


def tree_like(case: Case, x: Tensor) -> dict[str, Any]:
    """Leaves of several dtypes, all of this shape."""
    second, third = (case.dtypes * 2)[1:3]
    return {"z": x, "list": [(x * 2).to(second), x.to(third)], "tuple": (x.to(third), {"deep": (x * 1).to(second)})}


def ragged(case: Case) -> bool:
    return len({case.shape(4, index) for index in range(4)}) > 1


def same_trees(cases: list[str], bucket_mb: float) -> None:
    mesh, oracle = mesh4(), Oracle(grid((4,)))
    begun = []
    for case in [BY_NAME[name] for name in cases]:
        x = input_of(case, oracle, "a", case.dtypes[0], mesh.rank)
        tree = tree_like(case, x)
        expected = call(case, tree, "a", mesh, bucket_mb=bucket_mb)
        begun.append((case.name, call(case, tree, "a", mesh, bucket_mb=bucket_mb, async_op=True), expected))
        if case.op != "pvary":
            for leaf in pytree.tree_leaves(tree):
                leaf.fill_(1)
    for name, work, expected in shuffled(begun, mesh.rank):
        equal(work.wait(), expected, f"{name} on rank {mesh.rank}")


@pytest.mark.parametrize("bucket_mb", [25, 1e-5], ids=["in few buckets", "each leaf alone"])
def test_trees(run4: Run4, bucket_mb: float) -> None:
    run4(same_trees, [case.name for case in CASES if not ragged(case)], bucket_mb)


def test_trees_with_sizes_of_their_own(run4: Run4) -> None:
    run4(same_trees, [case.name for case in CASES if ragged(case)], 25)


# --------------------------------------------------------------------------------------------------------- gradients


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


def same_gradients(names: list[str], shape: tuple[int, ...], axis: Any, as_tree: bool, dtype: torch.dtype) -> None:
    mesh, oracle = mc.make_mesh(grid(shape)), Oracle(grid(shape))
    for case in [BY_NAME[name] for name in names]:
        x = input_of(case, oracle, axis, dtype, mesh.rank)

        def now(x: Tensor, case: Case = case) -> Any:
            return call(case, {"x": x, "y": [2 * x, x.square()]} if as_tree else x, axis, mesh)

        def later(x: Tensor, case: Case = case) -> Any:
            work = call(case, {"x": x, "y": [2 * x, x.square()]} if as_tree else x, axis, mesh, async_op=True)
            torch.ones(3).sin()
            return work.wait()

        equal(gradients(later, x), gradients(now, x), f"{case.name} over {axis!r} of {dtype} on rank {mesh.rank}")


SOME = [
    "pvary", "all_reduce-sum", "all_reduce-mean", "all_reduce-max", "all_reduce-product", "all_gather-middle", "all_gather_invariant",
    "shard-dim-1", "reduce_scatter-mean", "reduce_scatter-min", "all_to_all-0-1", "permute", "shift-no-wrap", "broadcast-last",
]  # fmt: skip


def test_gradients(run4: Run4) -> None:
    run4(same_gradients, [case.name for case in CASES if F32 in case.dtypes], (4,), "a", False, F32)


def test_gradients_of_half_precision(run4: Run4) -> None:
    run4(same_gradients, SOME, (4,), "a", False, BF16)


def test_gradients_of_trees(run4: Run4) -> None:
    run4(same_gradients, SOME, (4,), "a", True, F32)


def test_gradients_over_a_tuple(run4: Run4) -> None:
    run4(same_gradients, SOME, (2, 2), ("b", "a"), False, F64)


def in_anomaly_mode() -> None:
    mesh, oracle = mesh4(), Oracle(grid((4,)))
    with torch.autograd.set_detect_anomaly(True):
        for name in SOME:
            case = BY_NAME[name]
            leaf = input_of(case, oracle, "a", F32, mesh.rank).requires_grad_()
            (expected,) = torch.autograd.grad(weighted(call(case, leaf.sin(), "a", mesh)), leaf)
            (found,) = torch.autograd.grad(weighted(call(case, leaf.sin(), "a", mesh, async_op=True).wait()), leaf)
            equal(found, expected, f"{name} on rank {mesh.rank}")
        leaf = torch.zeros(4, requires_grad=True)
        total = mc.all_gather(leaf.sqrt() * 0, "a", mesh=mesh, async_op=True).wait().sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of where the node was made
            with pytest.raises(RuntimeError, match="returned nan values"):
                total.backward()


def test_anomaly_mode(run4: Run4) -> None:
    run4(in_anomaly_mode)


def large_gradients() -> None:
    mesh = mesh4()
    x = data(BIG // 2, seed=mesh.rank)
    cases: dict[str, Callable[..., Any]] = {
        "pvary": lambda x, **k: mc.pvary(x, "a", **k),
        "pvary of a tree": lambda x, **k: mc.pvary([x, x * 2, x.sin()], "a", bucket_mb=3, **k),
        "all_reduce max": lambda x, **k: mc.all_reduce(x, "a", "max", **k),
        "all_gather": lambda x, **k: mc.all_gather(x, "a", **k),
        "reduce_scatter": lambda x, **k: mc.reduce_scatter(x, "a", **k),
        "all_to_all": lambda x, **k: mc.all_to_all(x, "a", 0, 0, **k),
        "shift": lambda x, **k: mc.shift(x, "a", -1, **k),
        "broadcast": lambda x, **k: mc.broadcast(x, "a", 3, **k),
    }
    for name, fn in cases.items():
        leaf = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(weighted(fn(leaf.sin(), mesh=mesh)), leaf)
        (found,) = torch.autograd.grad(weighted(fn(leaf.sin(), mesh=mesh, async_op=True).wait()), leaf)
        equal(found, expected, f"{name} on rank {mesh.rank}")


def test_large_gradients(run4: Run4) -> None:
    run4(large_gradients)


# ------------------------------------------------------------------------------------- what happens between the two


MODES = {"grad": torch.enable_grad, "no grad": torch.no_grad, "inference": torch.inference_mode}


def other_modes(large: bool) -> None:
    """What counts is the mode at the call, as for a synchronous collective; the mode of the wait does not."""
    mesh = mesh4()
    cases: dict[str, Callable[..., Any]] = {
        "large all_reduce": lambda x, **k: mc.all_reduce(x.repeat(BIG // 16), "a", "mean", **k),
        "large all_gather": lambda x, **k: mc.all_gather(x.repeat(BIG // 16), "a", **k),
        "large reduce_scatter": lambda x, **k: mc.reduce_scatter(x.repeat(BIG // 16), "a", **k),
    } if large else {
        "all_reduce": lambda x, **k: mc.all_reduce(x, "a", **k),
        "max": lambda x, **k: mc.all_reduce(x, "a", "max", **k),
        "all_gather": lambda x, **k: mc.all_gather(x, "a", **k),
        "a tree": lambda x, **k: mc.reduce_scatter({"x": x, "y": [x * 2]}, "a", **k),
        "pvary": lambda x, **k: mc.pvary(x, "a", **k),
        "a pvaried tree": lambda x, **k: mc.pvary([x, x * 3], "a", **k),
        "shift": lambda x, **k: mc.shift(x, "a", wrap=False, **k),
    }  # fmt: skip
    x = data(4, seed=mesh.rank)
    for name, fn in cases.items():
        for at_call in MODES:
            for at_wait in MODES:
                what = f"{name}, called under {at_call}, waited under {at_wait}, on rank {mesh.rank}"
                leaf = x.clone().requires_grad_()
                with MODES[at_call]():
                    expected = fn(leaf * 2, mesh=mesh)
                    work = fn(leaf * 2, mesh=mesh, async_op=True)
                with MODES[at_wait]():
                    y = work.wait()
                equal(y, expected, what)
                needed = [[leaf.requires_grad for leaf in pytree.tree_leaves(tree)] for tree in (y, expected)]
                assert needed[0] == needed[1] == [at_call == "grad"] * len(needed[0]), what
                if at_call == "grad":
                    found = [torch.autograd.grad(weighted(tree), leaf)[0] for tree in (y, expected)]
                    equal(found[0], found[1], what)


def test_wait_in_another_grad_mode(run4: Run4) -> None:
    run4(other_modes, False)


def test_wait_in_another_grad_mode_of_large_tensors(run4: Run4) -> None:
    run4(other_modes, True)


def changed_and_dropped() -> None:
    """x is changed in place at once, then nobody holds it, and its memory is given to others."""
    mesh, oracle = mesh4(), Oracle(grid((4,)))
    begun = []
    for case in CASES:
        if case.op == "pvary" or F32 not in case.dtypes:  # the result of pvary is x
            continue
        leaf = input_of(case, oracle, "a", F32, mesh.rank).requires_grad_()
        expected = call(case, leaf * 1, "a", mesh)
        (g,) = torch.autograd.grad(weighted(expected), leaf)
        x = leaf * 1
        begun.append((case, leaf, call(case, x, "a", mesh, async_op=True), expected, g))
        x.mul_(0).add_(7)
    del x
    gc.collect()
    junk = [torch.full_like(leaf, 1e9) for _, leaf, *_ in begun for _ in range(3)]
    for case, leaf, work, expected, g in shuffled(begun, 5):
        what = f"{case.name} on rank {mesh.rank}"
        if not case.linear:  # its derivative needs the x that was
            errors = []
            for wait in (work.wait, work.wait, work.then(torch.sum).wait):
                with pytest.raises(mc.MeshError, match="changed in place between the start and the wait") as caught:
                    wait()
                errors.append(caught.value)
            assert errors[0] is errors[1] is errors[2]
            assert work.done()
            continue
        equal(work.wait(), expected, what)
        equal(torch.autograd.grad(weighted(work.wait()), leaf)[0], g, what)
    del junk


def test_x_may_be_changed_and_dropped_meanwhile(run4: Run4) -> None:
    run4(changed_and_dropped)


def changed_without_gradient() -> None:
    mesh = mesh4()
    for x in (data(6, seed=mesh.rank), data(BIG // 2, seed=mesh.rank)):
        leaf = x.clone().requires_grad_()
        expected = mc.all_reduce(leaf, "a", "max", mesh=mesh).detach()
        with torch.no_grad():
            work = mc.all_reduce(leaf, "a", "max", mesh=mesh, async_op=True)
            leaf.fill_(1e9)
        equal(work.wait(), expected, f"max on rank {mesh.rank}")


def test_x_of_a_maximum_may_be_changed_where_no_gradient_is_asked_for(run4: Run4) -> None:
    run4(changed_without_gradient)


def neighbours() -> list[float]:
    """Parameters that are views of one flat tensor: each has a version counter of its own."""
    mesh = mesh4()
    flat = torch.tensor([1.0, 1.0, 2.0, 2.0])
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for i, param in enumerate(params):
        param.data = flat[2 * i : 2 * i + 2]
    work = mc.all_reduce(params, "a", "max", mesh=mesh, async_op=True)
    with torch.no_grad():
        params[1].fill_(7.0)
    try:
        first, second = work.wait()
    except mc.MeshError:
        return [0.25, 0.25]  # said clearly: as good
    (first.sum() + second.sum()).backward()
    assert params[1].grad is not None
    return params[1].grad.tolist()


def test_a_changed_leaf_beside_others_does_not_spoil_the_gradient(run4: Run4) -> None:
    assert run4(neighbours) == [[0.25, 0.25]] * 4


def in_an_order(orders: list[list[int]], how: str) -> None:
    """Works of several axes, which each rank waits for in the order given for it; then backward, and backward of that."""
    mesh = mesh22()
    leaves = [data(4, seed=9 * mesh.rank + i).requires_grad_() for i in range(9)]

    def begin(later: bool) -> list[Any]:
        k: dict[str, Any] = {"mesh": mesh, "async_op": later}
        return [
            mc.all_gather(leaves[0], "a", **k),
            mc.all_gather(leaves[1], "a", **k),
            mc.all_reduce(leaves[2], "b", "max", **k),
            mc.reduce_scatter(leaves[3], ("b", "a"), **k),
            mc.all_gather(leaves[4], "b", **k),
            mc.all_reduce(leaves[5], "a", "product", **k),
            mc.shift(leaves[6], "a", **k),
            mc.all_to_all(leaves[7], "b", 0, 0, **k),
        ]

    def at_once() -> Tensor:
        return mc.all_reduce(mc.all_gather(leaves[8], "a", mesh=mesh).cos(), "b", "min", mesh=mesh)

    def finish(begun: list[Any]) -> list[Any]:
        ys: list[Any] = [None] * 9
        for step, i in enumerate(orders[mesh.rank]):
            if how == "polled":
                while not begun[i].done():
                    pass
            ys[i] = begun[i].wait().sin()
            if step == 3:
                ys[8] = at_once()
        return ys

    async def gathered(begun: list[Any]) -> list[Any]:
        async def one(i: int) -> Any:
            return (await begun[i]).sin()

        ys = await asyncio.gather(*(one(i) for i in orders[mesh.rank]))
        return [ys[orders[mesh.rank].index(i)] for i in range(8)] + [at_once()]

    def program(later: bool) -> list[Tensor]:
        begun = begin(later)
        if not later:
            ys = [y.sin() for y in begun] + [at_once()]
        else:
            ys = asyncio.run(gathered(begun)) if how == "gathered" else finish(begun)
        loss = torch.stack([weighted(y) * (i + 1) for i, y in enumerate(ys)]).sum()
        gs = torch.autograd.grad(loss, leaves, create_graph=True)
        return [y.detach() for y in ys] + list(gs) + list(torch.autograd.grad(weighted(list(gs)), leaves))

    for _ in range(2):
        equal(program(True), program(False), f"order {orders[mesh.rank]} on rank {mesh.rank}")
        loss = torch.stack([weighted(y) * (i + 1) for i, y in enumerate(finish(begin(True)))]).sum()
        found = torch.autograd.grad(loss, leaves)  # no create_graph: the transposes overlap
        equal(list(found), program(False)[9:18], f"once, order {orders[mesh.rank]} on rank {mesh.rank}")


EVERY = list(range(8))
ORDERS = {
    "backwards": [EVERY[::-1]] * 4,
    "one that is mixed": [shuffled(EVERY, 3)] * 4,
    "two that are turned round": [EVERY, EVERY[::-1], EVERY[::-1], EVERY],
    "four of their own": [shuffled(EVERY, seed) for seed in range(4)],
    "four others": [shuffled(EVERY, seed) for seed in range(4, 8)],
}


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
def test_gradients_whatever_is_waited_for_first(run4: Run4, orders: list[list[int]]) -> None:
    run4(in_an_order, orders, "waited")


@pytest.mark.parametrize("how", ["polled", "gathered"])
def test_gradients_however_they_are_waited_for(run4: Run4, how: str) -> None:
    run4(in_an_order, ORDERS["four of their own"], how)


# --------------------------------------------------------------------------------------------------- wait and then


class Pair(NamedTuple):
    left: Any
    right: Any


def futures() -> None:
    mesh = mesh4()
    x = data(4, seed=mesh.rank)
    total, gathered = mc.all_reduce(x, "a", mesh=mesh), mc.all_gather(x, "a", mesh=mesh)

    def begin() -> tuple[Work[Tensor], Work[Tensor]]:
        return mc.all_reduce(x, "a", mesh=mesh, async_op=True), mc.all_gather(x, "a", mesh=mesh, async_op=True)

    one, two = begin()
    assert "under way: all_reduce of f32[4] over 'a'" in repr(one)
    y = one.wait()
    assert one.wait() is y is one.wait(timeout=3) is mc.wait(one)
    assert one.done()
    assert "done" in repr(one)
    equal((y, two.wait(timeout=float("inf"))), (total, gathered), "wait again")

    one, two = begin()
    tree = {"w": one, "rest": [3, None, "text", x, Pair(two, (one,))]}
    found = mc.wait(tree, timeout=60)
    equal(found, {"w": total, "rest": [3, None, "text", x, Pair(gathered, (total,))]}, "a tree")
    assert found["rest"][3] is x
    assert found["w"] is found["rest"][4].right[0]
    assert tree["w"] is one
    assert mc.wait(3) == 3
    assert mc.wait(None) is None
    assert mc.wait([]) == []


def test_wait(run4: Run4) -> None:
    run4(futures)


def followers() -> None:
    mesh = mesh4()
    x = data(4, seed=mesh.rank).requires_grad_()
    expected = mc.all_gather(x, "a", mesh=mesh)
    calls: list[str] = []

    def named(name: str, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def logged(value: Any) -> Any:
            calls.append(name)
            return fn(value)

        return logged

    first = mc.all_gather(x, "a", mesh=mesh, async_op=True)
    doubled = first.then(named("double", lambda y: y * 2))
    summed = doubled.then(named("sum", torch.sum))
    other = first.then(named("other", lambda y: y.shape))
    assert "all_gather" in repr(summed)
    assert calls == []
    while not summed.done():
        pass
    assert calls == []  # in the first wait, and not before
    value = summed.wait()
    assert calls == ["double", "sum"]
    assert summed.wait() is value
    equal(doubled.wait(), expected * 2, "then")
    assert other.wait() == (16,)
    equal(first.wait(), expected, "the first")
    assert calls == ["double", "sum", "other"]
    equal(torch.autograd.grad(value, x), torch.autograd.grad((expected * 2).sum(), x), "the gradient of what then gave")

    boom = ValueError("boom")

    def fails(value: Any) -> Any:
        raise boom

    first = mc.all_gather(x, "a", mesh=mesh, async_op=True)
    broken = first.then(named("broken", fails))
    after = broken.then(named("after", torch.sum))
    calls.clear()
    for work in (after, broken, after, broken):
        with pytest.raises(ValueError, match="boom") as caught:
            work.wait()
        assert caught.value is boom
        assert work.done()
        assert "failed" in repr(work)
    assert calls == ["broken"]
    equal(first.wait(), expected, "the first is none the worse")
    done = mc.pvary(x, "a", mesh=mesh, async_op=True)
    assert done.done()
    equal(done.then(torch.sum).wait(), x.sum(), "then of what is done")


def test_then(run4: Run4) -> None:
    run4(followers)


def later_than_later() -> None:
    """A work begun in ``then``, and a work that gives a work: as many steps as the user likes."""
    mesh = mesh4()
    x = data(4, seed=mesh.rank)
    first = mc.all_gather(x, "a", mesh=mesh, async_op=True)
    second = first.then(lambda y: mc.reduce_scatter(y, "a", mesh=mesh, async_op=True))
    equal(second.wait().wait(), 4 * x, "two steps")


def test_then_may_begin_another(run4: Run4) -> None:
    run4(later_than_later)


# ------------------------------------------------------------------------------------------------------------ await


async def awaited(work: Awaitable[T]) -> T:
    return await work


def by_hand(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it without an event loop."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


def coroutines() -> None:
    mesh = mesh4()
    x = data(4, seed=mesh.rank)
    total, gathered = mc.all_reduce(x, "a", mesh=mesh), mc.all_gather(x, "a", mesh=mesh)

    async def main() -> None:
        work = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
        one, two = await asyncio.gather(awaited(work), awaited(work))
        assert one is two is await work
        equal(one, total, "two tasks")
        works = [mc.all_reduce(x, "a", mesh=mesh, async_op=True), mc.all_gather(x, "a", mesh=mesh, async_op=True)]
        works.append(mc.shift(x, "a", mesh=mesh, async_op=True).then(torch.sum))
        found = await asyncio.gather(*works)
        equal(found[:2], [total, gathered], "gather")

    asyncio.run(main())
    asyncio.run(main())  # another loop

    async def twice() -> Tensor:
        works = [mc.all_gather(x, "a", mesh=mesh, async_op=True) for _ in range(2)]
        return await works[1] + await works[0]

    equal(by_hand(twice()), 2 * gathered, "driven by hand")


def test_await(run4: Run4) -> None:
    run4(coroutines)


def others_go_on() -> int:
    """The task that lets the peers go runs only if the one that awaits them does not hold up the loop."""
    mesh = mesh4()
    x = data(4, seed=mesh.rank)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        for _ in range(100):
            ticks += 1
            await asyncio.sleep(0)
        go(mesh)

    async def main() -> Tensor:
        ticking = asyncio.ensure_future(tick())
        y = await mc.all_reduce(x, "a", mesh=mesh, async_op=True)
        await ticking
        return y

    if mesh.rank == 0:
        y = asyncio.run(main())
    else:
        go(mesh)
        y = mc.all_reduce(x, "a", mesh=mesh, async_op=True).wait()
    equal(y, mc.all_reduce(x, "a", mesh=mesh), "the sum")
    return ticks


def test_other_tasks_run_while_one_awaits(run4: Run4) -> None:
    assert run4(others_go_on) == [100, 0, 0, 0]


def waits_for_a_while() -> None:
    mesh = mesh4()
    x = data(4, seed=mesh.rank)

    async def main() -> Tensor:
        work = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
        for _ in range(2):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(work, 0.001)
        assert not work.done()
        go(mesh)
        return await asyncio.wait_for(work, 60)

    if mesh.rank == 0:
        y = asyncio.run(main())
    else:
        go(mesh)
        y = mc.all_reduce(x, "a", mesh=mesh, async_op=True).wait()
    equal(y, mc.all_reduce(x, "a", mesh=mesh), "the sum")


def test_wait_for_that_runs_out_and_awaits_again(run4: Run4) -> None:
    run4(waits_for_a_while)


# ----------------------------------------------------------------------------------------------------------- errors


def every_way_of_waiting(work: Work[Any]) -> list[Exception]:
    """What each of them raises."""
    follow = work.then(torch.sum)
    after = follow.then(torch.sum)

    found: list[Exception] = []
    for wait in (
        work.wait,
        lambda: work.wait(5),
        lambda: mc.wait({"x": [1, work]}),
        after.wait,
        follow.wait,
        lambda: asyncio.run(awaited(work)),
        lambda: asyncio.run(awaited(after)),
        lambda: by_hand(awaited(work)),
    ):
        with pytest.raises(mc.CommError) as caught:
            wait()
        found.append(caught.value)
    assert work.done()
    assert after.done()
    return found


def one_differs(first: bool) -> list[str]:
    mesh = mesh4()
    odd = 0 if first else 3
    texts = []
    for tree in (False, True):
        x = torch.ones(3 if mesh.rank == odd else 4)
        try:
            work = mc.all_reduce([x] if tree else x, "a", mesh=mesh, async_op=True)
        except mc.CommError as error:  # who comes when it is known is told at the call
            texts.append(str(error))
            continue
        errors = every_way_of_waiting(work)
        assert len({id(error) for error in errors}) == 1
        texts.append(str(errors[0]))
    equal(mc.all_reduce(torch.ones(2), "a", mesh=mesh), torch.full((2,), 4.0), "afterwards")
    return texts


@pytest.mark.parametrize("first", [True, False])
def test_a_mismatch_reaches_every_waiter(first: bool) -> None:
    for texts in mc.launch(one_differs, ranks=4, args=(first,)):
        assert len(texts) == 2
        for text in texts:
            assert "ranks of one axis made different calls" in text
            assert re.search(r"called all_reduce\(op='sum'\) of .*f32\[3\]", text)
            assert re.search(r"called all_reduce\(op='sum'\) of .*f32\[4\]", text)


def messages_that_do_not_fit() -> None:
    mesh = mesh4()
    if mesh.rank == 0:
        work: Work[Any] = mc.send(torch.ones(3), "a", 1, mesh=mesh, async_op=True)
    elif mesh.rank == 1:
        work = mc.recv("a", 0, shape=(4,), dtype=F32, mesh=mesh, async_op=True)
    else:
        return
    for error in every_way_of_waiting(work):
        assert "a message from 0 to 1 does not fit" in str(error)


def test_a_message_that_does_not_fit_reaches_every_waiter() -> None:
    mc.launch(messages_that_do_not_fit, ranks=4)


def one_fails() -> None:
    mesh = mesh4()
    work = mc.all_gather(torch.ones(2), "a", mesh=mesh, async_op=True)
    if mesh.rank == 2:
        work.wait()
        raise ValueError("boom")
    if mesh.rank == 1:
        mc.recv("a", 2, shape=(1,), dtype=F32, mesh=mesh, async_op=True).wait()
    work.wait()
    mc.barrier("a", mesh=mesh, async_op=True).wait()


def test_a_rank_that_fails_ends_those_that_wait() -> None:
    with pytest.raises(ValueError, match="boom"):
        mc.launch(one_fails, ranks=4)


def several_threads(kind: str) -> None:
    """Which of them gets the result does not matter: all have it, it is one object, and no thread is left behind."""
    mesh = mesh4()
    warm(mesh)
    r = mesh.rank
    small, large = data(4, seed=r), data(BIG // 2, seed=r)
    begin: Callable[[], Work[Any]] = {
        "all_reduce": lambda: mc.all_reduce(small, "a", mesh=mesh, async_op=True),
        "large all_reduce": lambda: mc.all_reduce(large, "a", mesh=mesh, async_op=True),
        "large all_gather": lambda: mc.all_gather(large, "a", mesh=mesh, async_op=True),
        "shift": lambda: mc.shift(small, "a", mesh=mesh, async_op=True),
    }[kind]
    expected = begin().wait()
    before = set(threading.enumerate())
    if r == 0:
        work, found = begin(), []
        waits = work.wait, lambda: work.wait(60), lambda: asyncio.run(awaited(work)), work.wait
        waiting = [threading.Thread(target=lambda wait=wait: found.append(wait()), daemon=True) for wait in waits]
        for thread in waiting:
            thread.start()
            assert not work.done()
        with pytest.raises(mc.CommError, match=rf"{kind.split()[-1]}: not done after"):
            work.wait(0.02)  # while others hold it
        go(mesh)
        for thread in waiting:
            thread.join()
        assert len(found) == 4
        assert all(y is found[0] for y in found)
        equal(found[0], expected, "in a thread")
        assert work.done()
    else:
        go(mesh)
        begin().wait()
    mc.barrier("a", mesh=mesh)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread.name


@pytest.mark.parametrize("kind", ["all_reduce", "large all_reduce", "large all_gather", "shift"])
def test_several_threads_wait_for_one_work(pool4: Any, kind: str) -> None:
    pool4.run(several_threads, kind)


# --------------------------------------------------------------------------------------------------------- time-outs


def runs_out(kind: str) -> list[str]:
    """Rank 0 waits before the others have been let go; then again, when they come."""
    mesh = mesh4()
    warm(mesh)
    r = mesh.rank
    kinds: dict[str, Callable[[], Work[Any]]] = {
        "all_reduce": lambda: mc.all_reduce(data(2, 3, seed=r), "a", mesh=mesh, async_op=True),  # timed all_reduce
        "large": lambda: mc.all_reduce(data(BIG, seed=r), "a", mesh=mesh, async_op=True),  # timed large
        "all_gather": lambda: mc.all_gather(data(BIG, seed=r).bfloat16(), "a", mesh=mesh, async_op=True),  # timed all_gather
        "tree": lambda: mc.reduce_scatter([data(4, seed=r)], "a", mesh=mesh, async_op=True),  # timed tree
        "shift": lambda: mc.shift(data(3, seed=r), "a", mesh=mesh, async_op=True),  # timed shift
        "barrier": lambda: mc.barrier("a", mesh=mesh, async_op=True),  # timed barrier
        "exchange": lambda: mc.exchange([(data(3), (r + 1) % 4)], [((r - 1) % 4, (3,), F32)], "a", mesh=mesh, async_op=True),  # timed exchange
    }  # fmt: skip
    begin = kinds[kind]
    expected = begin().wait()
    texts = []
    if r == 0:
        work = begin()
        follow = work.then(lambda y: y)
        waits: list[Callable[[], Any]] = [lambda: work.wait(0.03), lambda: work.wait(0), lambda: follow.wait(0.01)]
        waits.append(lambda: mc.wait([1, work], timeout=0.01))
        for wait in waits:
            with pytest.raises(mc.CommError) as caught:
                wait()
            texts.append(str(caught.value))
        assert not work.done()
        go(mesh)
        y = work.wait(60)
        assert follow.wait() is work.wait() is y
    else:
        go(mesh)
        y = begin().wait()
    equal(y, expected, f"{kind} on rank {r}")
    equal(begin().wait(), expected, f"another {kind} on rank {r}")
    return texts


NAMED = {
    "all_reduce": ("all_reduce", r"of f32\[2, 3\] "), "large": ("all_reduce", rf"of f32\[{BIG}\] "), "all_gather": ("all_gather", rf"of bf16\[{BIG}\] "),
    "tree": ("reduce_scatter", ""), "shift": ("shift", r"of f32\[3\] "), "barrier": ("barrier", ""), "exchange": ("exchange", ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMED)
def test_a_time_out_is_told_and_can_be_waited_again(run4: Run4, kind: str) -> None:
    what, shape = NAMED[kind]
    texts, *others = run4(runs_out, kind)
    assert others == [[], [], []]
    seconds = r"[\d.e+-]+ s"
    for text in texts:
        pattern = (
            rf"meshcomm\.{what}: not done after {seconds} of waiting, {seconds} after it began\.\n"
            rf"  got: {shape}over 'a' \(a=0\) of size 4, begun at test_work\.py:{line_of(f'timed {kind}')}"
            r"(; index 3 has not made the call|; indices 1, 2, 3 have not made the call)?\n"
            r"  fix: wait again, nothing is lost; .*py-spy dump --pid"
        )
        assert re.fullmatch(pattern + ".*", text, re.DOTALL), text
    assert len(texts) == 4


def recv_runs_out() -> str:
    """A message that comes after the time-out is the one that is received, and none is lost."""
    mesh = mesh4()
    text = ""
    if mesh.rank == 0:
        work = mc.recv("a", 1, shape=(2,), dtype=F32, mesh=mesh, async_op=True)  # timed recv
        other = mc.recv("a", 1, shape=(2,), dtype=F32, mesh=mesh, async_op=True)
        for _ in range(2):
            with pytest.raises(mc.CommError) as caught:
                work.wait(0.02)
            text = str(caught.value)
        go(mesh)
        assert work.wait(60).tolist() == [1.0, 1.0]
        assert other.wait().tolist() == [2.0, 2.0]
    else:
        go(mesh)
    if mesh.rank == 1:
        for value in (1.0, 2.0):
            mc.send(torch.full((2,), value), "a", 0, mesh=mesh)
    mc.barrier("a", mesh=mesh)
    return text


def test_recv_with_a_time_out(run4: Run4) -> None:
    text = run4(recv_runs_out)[0]
    assert text.startswith("meshcomm.recv: not done after")
    assert f"got: of f32[2] over 'a' (a=0) of size 4, begun at test_work.py:{line_of('timed recv')}" in text


BAD_TIMES: tuple[Any, ...] = (-1, -0.5, float("nan"), "1", True, [1], torch.tensor(1.0), -float("inf"))


def bad_times() -> None:
    mesh = mesh4()
    work = mc.all_reduce(torch.ones(2), "a", mesh=mesh, async_op=True)
    for bad in BAD_TIMES:
        for wait in (work.wait, lambda bad: mc.wait([work], bad), lambda bad: mc.wait(3, bad)):
            with pytest.raises(mc.MeshError, match=r"timeout=.* is not a number of seconds") as caught:
                wait(bad)
            assert "fix: a number from 0 on, or None" in str(caught.value)
    equal(work.wait(), torch.full((2,), 4.0), "none the worse")


def test_a_time_out_that_is_none(run4: Run4) -> None:
    run4(bad_times)


def patience(log: list[int]) -> None:
    mesh = mesh4()
    x = torch.ones(1)
    if mesh.rank == 3:
        go(mesh)
        mc.all_reduce(x, "a", mesh=mesh)
        return
    work = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
    with pytest.raises(mc.CommError, match="not done"):
        work.wait([90, 70, 80][mesh.rank])
    log.append(mesh.rank)
    go(mesh)
    assert work.wait().item() == 4


@pytest.mark.timeout(60)  # less than any of the three
def test_among_ranks_of_one_process_the_shortest_time_out_comes_first_and_takes_no_time() -> None:
    log: list[int] = []
    mc.launch(patience, ranks=4, args=(log,))
    assert log == [1, 2, 0]


def someone_can_still_act() -> float:
    """Rank 0 waits for ever, rank 1 does not: it is told first, and lets rank 0 go on."""
    mesh = mc.make_mesh({"a": 2})
    if mesh.rank == 0:
        return mc.recv("a", 1, shape=(), dtype=F32, mesh=mesh).item()
    work = mc.recv("a", 0, shape=(), dtype=F32, mesh=mesh, async_op=True)
    with pytest.raises(mc.CommError, match="not done"):
        work.wait(1000)
    mc.send(torch.tensor(5.0), "a", 0, mesh=mesh)
    with pytest.raises(mc.CommError, match="deadlock"):  # rank 0 has returned
        work.wait()
    with pytest.raises(mc.CommError, match="deadlock"):
        work.wait(1)
    return 0.0


def test_a_time_out_comes_before_a_deadlock() -> None:
    assert mc.launch(someone_can_still_act, ranks=2) == [5.0, 0.0]


def never_gives_up() -> None:
    mesh = mc.make_mesh({"a": 2})
    if mesh.rank == 1:
        return
    work = mc.all_reduce(torch.ones(1), "a", mesh=mesh, async_op=True)
    while True:
        try:
            work.wait(1)
        except mc.CommError as error:
            if "deadlock" in str(error):
                raise


def test_waiting_again_and_again_for_nobody_is_a_deadlock() -> None:
    with pytest.raises(mc.CommError, match="deadlock") as caught:
        mc.launch(never_gives_up, ranks=2)
    assert "rank 1 has returned" in str(caught.value)


# -------------------------------------------------------------------------------------------------------------- done


def every_kind(mesh: mc.Mesh, x: Tensor) -> list[Work[Any]]:
    r = mesh.rank
    k: dict[str, Any] = {"mesh": mesh, "async_op": True}
    return [
        mc.all_reduce(x, "a", **k),
        mc.all_reduce(x, "a", "max", **k),
        mc.all_gather(x, "a", **k),
        mc.reduce_scatter(x, "a", **k),
        mc.all_to_all(x, "a", 0, 0, **k),
        mc.shift(x, "a", **k),
        mc.permute(x, "a", [(1, 2)], **k),
        mc.broadcast(x, "a", 1, **k),
        mc.all_gather({"x": x, "y": x.double()}, "a", **k),
        mc.reduce(x, "a", 3, **k),
        mc.gather(x, "a", 0, **k),
        mc.scatter(x if r == 2 else None, "a", 2, like=x[: len(x) // 4], **k),
        mc.exchange([(x, (r + 1) % 4)], [((r - 1) % 4, tuple(x.shape), x.dtype)], "a", **k),
        mc.barrier("a", **k),
    ]


def all_poll() -> None:
    """Nobody waits before everything is done."""
    mesh = mesh4()
    for x in (data(8, seed=mesh.rank), data(BIG // 4, seed=mesh.rank)):
        works = every_kind(mesh, x)
        works.append(works[0].then(torch.sum))
        for i in shuffled(list(range(len(works))), mesh.rank):
            while not works[i].done():
                pass
        assert all(work.done() for work in works)
        equal(works[0].wait(), mc.all_reduce(x, "a", mesh=mesh), "all_reduce")
        mc.wait(works)


def test_done_becomes_true_without_a_wait(run4: Run4) -> None:
    run4(all_poll)


def a_chain_of_polls() -> int:
    """Each rank polls for a message of the one before it, which polls too."""
    mesh = mesh4()
    r = mesh.rank
    work = mc.recv("a", (r - 1) % 4, shape=(), dtype=torch.int64, mesh=mesh, async_op=True)
    if r == 0:
        mc.send(torch.tensor(1), "a", 1, mesh=mesh, async_op=True).wait()
    while not work.done():
        pass
    got = int(work.wait().item())
    if r:
        sending = mc.send(torch.tensor(got + 1), "a", (r + 1) % 4, mesh=mesh, async_op=True)
        while not sending.done():
            pass
        sending.wait()
    return got


def test_polling_ranks_let_each_other_go_on(run4: Run4) -> None:
    assert run4(a_chain_of_polls) == [4, 1, 2, 3]


def polls_for_ever(others: str) -> None:
    mesh = mc.make_mesh({"a": 3})
    if mesh.rank and others == "return":
        return
    if mesh.rank and others == "wait":
        mc.recv("a", 0, shape=(1,), dtype=F32, mesh=mesh)
    work = mc.recv("a", (mesh.rank + 1) % 3, shape=(1,), dtype=F32, tag=3, mesh=mesh, async_op=True)
    while not work.done():
        pass


@pytest.mark.parametrize(
    ("others", "state"),
    [("return", "has returned"), ("wait", r"waits in recv.*f32\[1\] over 'a'"), ("poll", "is running")],
    ids=lambda value: value.split()[0],
)
def test_polling_for_ever_is_a_deadlock(others: str, state: str) -> None:
    with pytest.raises(mc.CommError, match="deadlock: ranks poll a Work for ever") as caught:
        mc.launch(polls_for_ever, ranks=3, args=(others,))
    assert "fix: every rank of an axis" in str(caught.value)
    for rank in (1, 2):
        assert re.search(rf"  rank {rank} {state}", str(caught.value)), str(caught.value)


def polls_for_one_with_patience() -> float:
    """Rank 0 does nothing but poll, so the time-out of rank 1 runs out, and it comes."""
    mesh = mc.make_mesh({"a": 2})
    if mesh.rank == 0:
        work = mc.all_reduce(torch.ones(1), "a", mesh=mesh, async_op=True)
        while not work.done():
            pass
        mc.send(torch.ones(1), "a", 1, mesh=mesh)
        return work.wait().item()
    message = mc.recv("a", 0, shape=(1,), dtype=F32, mesh=mesh, async_op=True)
    with pytest.raises(mc.CommError, match="not done"):
        message.wait(1e6)
    total = mc.all_reduce(torch.ones(1), "a", mesh=mesh).item()
    return total + message.wait().item()


def test_a_time_out_runs_out_while_others_poll() -> None:
    assert mc.launch(polls_for_one_with_patience, ranks=2) == [2.0, 3.0]


def logs_its_turns(log: list[tuple[int, str]]) -> None:
    mesh = mesh4()
    log.append((mesh.rank, "comes"))
    works = every_kind(mesh, data(8, seed=mesh.rank))
    log.append((mesh.rank, "has begun"))
    mc.wait(works)
    log.append((mesh.rank, "goes"))


def test_the_call_returns_before_the_peers_come() -> None:
    log: list[tuple[int, str]] = []
    mc.launch(logs_its_turns, ranks=4, args=(log,))
    assert log[:8] == [(rank, what) for rank in range(4) for what in ("comes", "has begun")]
    assert sorted(log[8:]) == [(rank, "goes") for rank in range(4)]


def first_comer(elements: int) -> None:
    """Rank 0 has begun everything before any other rank begins anything."""
    mesh = mesh4()
    warm(mesh)
    x = data(elements, seed=mesh.rank)
    if mesh.rank:
        go(mesh)
    works = every_kind(mesh, x)
    if not mesh.rank:
        go(mesh)
    equal(works[0].wait(), mc.all_reduce(x, "a", mesh=mesh), "all_reduce")
    mc.wait(works)


@pytest.mark.parametrize("elements", [8, BIG // 4])
def test_the_call_does_not_wait_for_its_peers(run4: Run4, elements: int) -> None:
    run4(first_comer, elements)


def first_large() -> None:
    """Nor where no large tensor has gone over the axis before."""
    mesh = mesh22()
    mc.barrier(("b", "a"), mesh=mesh)
    if mesh.rank:
        go(mesh, ("b", "a"))
    work = mc.all_reduce(torch.ones(BIG), ("b", "a"), mesh=mesh, async_op=True)
    if not mesh.rank:
        go(mesh, ("b", "a"))
    assert work.wait()[-1].item() == 4


def test_the_first_large_one_does_not_wait_for_its_peers_either(run4: Run4) -> None:
    run4(first_large)


def one_calls_synchronously(elements: int) -> None:
    """It has nothing to do meanwhile."""
    mesh = mesh4()
    x = data(elements, seed=mesh.rank)
    for fn in (mc.all_reduce, mc.all_gather, mc.reduce_scatter, mc.shift, mc.broadcast):
        for odd in range(4):
            y = fn(x, "a", mesh=mesh) if mesh.rank == odd else fn(x, "a", mesh=mesh, async_op=True).wait()
            equal(y, fn(x, "a", mesh=mesh), f"{fn.__name__} on rank {mesh.rank}")


@pytest.mark.parametrize("elements", [8, BIG // 4])
def test_one_rank_may_call_synchronously(run4: Run4, elements: int) -> None:
    run4(one_calls_synchronously, elements)


# ---------------------------------------------------------------------------------------------------------- dropped


def dropped(kind: str, elements: int) -> list[tuple[str, int, str, str]]:
    """Rank 0 drops its work; the others are none the worse, nor is what comes after. Gives the warnings of rank 0."""
    mesh = mesh4()
    warm(mesh)
    r = mesh.rank
    x = data(elements, seed=r)
    expected = mc.all_gather(x, "a", mesh=mesh) if kind == "in a tree" else mc.all_reduce(x, "a", mesh=mesh)
    with warnings.catch_warnings(record=True) as caught:  # no change-over in here: warnings are caught for the process
        warnings.simplefilter("always")
        if kind == "dropped":
            work: Any = mc.all_reduce(x.clone(), "a", mesh=mesh, async_op=True)  # dropped
        elif kind == "looked at":
            work = mc.all_reduce(x.clone(), "a", mesh=mesh, async_op=True)  # looked at
            repr(work)
            work.then  # noqa: B018
        elif kind == "followed":
            work = mc.all_reduce(x.clone(), "a", mesh=mesh, async_op=True).then(torch.sum).then(float)  # followed
        elif kind == "in a tree":
            work = [{"x": mc.all_gather({"x": x.clone()}, "a", mesh=mesh, async_op=True)}]  # in a tree
        if r == 0:
            del work
            gc.collect()
    junk = [torch.full((elements,), 1e9) for _ in range(8)]
    if r:
        y = mc.wait(work)
        y = y[0]["x"]["x"] if kind == "in a tree" else y
        equal(y, float(expected.sum()) if kind == "followed" else expected, f"{kind} on rank {r}")
    equal(mc.all_gather(x, "a", mesh=mesh, async_op=True).wait(), mc.all_gather(x, "a", mesh=mesh), "afterwards")
    del junk
    return [(Path(each.filename).name, each.lineno, each.category.__name__, str(each.message)) for each in caught]


@pytest.mark.parametrize("elements", [3, BIG], ids=["small", "large"])
@pytest.mark.parametrize("kind", ["dropped", "looked at", "followed", "in a tree"])
def test_one_dropped_warns_with_the_line_that_made_it(run4: Run4, kind: str, elements: int) -> None:
    first, *others = run4(dropped, kind, elements)
    assert others == [[], [], []]
    ((name, line, category, text),) = first
    assert (name, line, category) == ("test_work.py", line_of(kind), "RuntimeWarning")
    op, shape = ("all_gather", "") if kind == "in a tree" else ("all_reduce", rf"of f32\[{elements}\] ")
    where = rf"{shape}over 'a' \(a=0\) of size 4, begun at test_work\.py:{line}"
    assert re.fullmatch(rf"meshcomm\.{op}: the Work {where} was dropped and never waited for", text), text


def test_the_warning_comes_out_of_a_launch() -> None:
    def drops() -> None:
        mc.all_reduce(torch.ones(2), "a", mesh=mesh4(), async_op=True)  # in a launch

    with pytest.warns(RuntimeWarning, match="dropped and never waited for") as caught:
        mc.launch(drops, ranks=4)
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, line_of("in a launch"))] * 4


def not_dropped() -> list[str]:
    """Waited for in one way or another, or done when it was made."""
    mesh = mesh4()
    x = data(4, seed=mesh.rank)

    def begin() -> Work[Tensor]:
        return mc.all_reduce(x, "a", mesh=mesh, async_op=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin().wait()
        mc.wait([begin()])
        begin().then(torch.sum).wait()
        asyncio.run(awaited(begin()))
        mc.pvary(x, "a", mesh=mesh, async_op=True)
        mc.shard(x, "a", mesh=mesh, async_op=True)
        if mesh.rank == 0:
            work = begin()
            with pytest.raises(mc.CommError):
                work.wait(0.001)
            del work
            go(mesh)
        else:
            go(mesh)
            begin().wait()
        gc.collect()
    return [str(each.message) for each in caught]


def test_no_warning_where_somebody_has_waited(pool4: Any) -> None:
    """Not in-process, where warnings are caught for all ranks at once."""
    assert pool4.run(not_dropped) == [[]] * 4


def dropped_messages() -> None:
    """A message that was to be received is received, and the next one is the next one's."""
    mesh = mesh4()
    if mesh.rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mc.recv("a", 1, shape=(4,), dtype=F32, mesh=mesh, async_op=True)
            mc.send(data(4), "a", 2, mesh=mesh, async_op=True)
            gc.collect()
        junk = [torch.full((4,), 1e9) for _ in range(8)]
        go(mesh)
        assert mc.recv("a", 1, shape=(4,), dtype=F32, mesh=mesh).tolist() == [2.0] * 4
        del junk
    else:
        go(mesh)
    if mesh.rank == 1:
        for value in (1.0, 2.0):
            mc.send(torch.full((4,), value), "a", 0, mesh=mesh)
    if mesh.rank == 2:
        equal(mc.recv("a", 0, shape=(4,), dtype=F32, mesh=mesh), data(4), "what was sent")
    mc.barrier("a", mesh=mesh)


def test_dropped_messages_are_sent_and_received_all_the_same(run4: Run4) -> None:
    run4(dropped_messages)


HARNESS = """
import ast, os, signal, sys, tempfile
import torch
import meshcomm as mc

def fork(programs, ranks):
    running = {}
    for name, program in programs.items():
        folder = tempfile.mkdtemp()
        running[name] = folder, []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                signal.alarm(60)  # one that hangs ends with -14
                out = os.open(folder + "/" + str(rank), os.O_WRONLY | os.O_CREAT)
                os.dup2(out, 1)
                os.dup2(out, 2)
                return program, folder, rank
            running[name][1].append(child)
    found = {}
    for name, (folder, children) in running.items():
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        found[name] = codes, [open(folder + "/" + str(rank)).read() for rank in range(ranks)]
    print(found, flush=True)
    os._exit(0)

program, folder, rank = fork(ast.literal_eval(sys.stdin.read()), 3)
mc.init(init_method="file://" + folder + "/meeting", rank=rank, world_size=3, timeout=30)
mesh = mc.make_mesh({"a": 3})
mc.all_reduce(torch.ones(1 << 18), "a", mesh=mesh, async_op=True).wait()
mc.barrier("a", mesh=mesh)
exec(compile(program, "program.py", "exec"))
"""
"""Each program on three ranks of its own, which end as any script does; prints its exit codes and what it wrote."""


def ends(programs: dict[str, str], tmp_path: Path) -> dict[str, tuple[list[int], list[str]]]:
    script = tmp_path / "harness.py"
    script.write_text(HARNESS)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)], input=repr(programs), env=environ, capture_output=True, text=True, timeout=90, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[list[int], list[str]]] = ast.literal_eval(done.stdout)
    return found


DROPPED_AT_THE_END = {
    "small": "work = mc.all_reduce(torch.ones(5), 'a', mesh=mesh, async_op=True)",
    "many": "works = [fn(torch.ones(1 << 18), 'a', mesh=mesh, async_op=True) for fn in (mc.all_reduce, mc.all_gather, mc.shift) * 3]",
    "never joined": "if rank == 0: work = mc.all_gather(torch.ones(5), 'a', mesh=mesh, async_op=True)",
    "large, never joined": "if rank == 0: work = mc.all_reduce(torch.ones(1 << 18), 'a', mesh=mesh, async_op=True)",
}
RECV = "work = mc.recv('a', (rank + 1) % 3, shape=(2,), dtype=torch.float32, mesh=mesh, async_op=True)"
PEER_DIES = """
import threading
if rank == 1:
    mc.recv("a", 0, shape=(1,), dtype=torch.float32, mesh=mesh)
    os._exit(3)
works = [
    mc.all_reduce(torch.ones(5), "a", mesh=mesh, async_op=True),
    mc.all_reduce(torch.ones(1 << 18), "a", mesh=mesh, async_op=True),
    mc.all_gather(torch.ones(1 << 18), "a", mesh=mesh, async_op=True),
    mc.recv("a", 1, shape=(2,), dtype=torch.float32, mesh=mesh, async_op=True),
]
def wait(work, found):
    try:
        work.wait()
        found.append("a result")
    except mc.CommError as error:
        found.append(error)
lists = [[] for _ in works]
threads = [threading.Thread(target=wait, args=(work, found)) for work, found in zip(works, lists) for _ in range(2)]
for thread in threads:
    thread.start()
if rank == 0:
    mc.send(torch.ones(1), "a", 1, mesh=mesh)
for thread in threads:
    thread.join()
for work, found in zip(works, lists):
    wait(work, found)
    assert work.done()
    assert len(set(map(id, found))) == 1, found
    print(str(found[0]).split(chr(10))[0])
"""


@pytest.mark.timeout(110)
def test_works_under_way_at_the_end_of_the_program(tmp_path: Path) -> None:
    """No rank aborts or hangs; a message that can no longer come is said to be missing."""
    messages = {
        "not asked for": RECV,
        "polled": RECV + "; work.done()",
        "waited out": RECV + "\ntry: work.wait(0.05)\nexcept mc.CommError: pass",
    }
    found = ends({**DROPPED_AT_THE_END, **messages, "a peer dies": PEER_DIES}, tmp_path)
    for name in DROPPED_AT_THE_END:
        codes, texts = found[name]
        assert codes == [0, 0, 0], found[name]
        assert "was dropped and never waited for" in texts[0]
    for name in messages:
        codes, texts = found[name]
        assert 1 in codes, found[name]
        for code, text in zip(codes, texts, strict=True):
            # 0: its peer was gone before, and with it the message.
            assert code == 0 or (code == 1 and "ends while a message is neither sent nor received" in text), found[name]
    codes, texts = found["a peer dies"]
    assert codes == [0, 3, 0], found["a peer dies"]
    for text in (texts[0], texts[2]):
        lines = text.splitlines()
        assert len(lines) == 4, text
        assert all(re.match(r"meshcomm\.\w+: the transport failed: ", line) for line in lines), text


# -------------------------------------------------------------------------------------------- transforms and compile


def transformed() -> None:
    mesh, oracle = mesh4(), Oracle(grid((4,)))
    for name in SOME[::2]:
        case = BY_NAME[name]
        x = input_of(case, oracle, "a", F64, mesh.rank)
        batch = torch.stack([x, 2 * x, x - 1])

        def now(x: Tensor, case: Case = case) -> Any:
            return call(case, x.sin(), "a", mesh).tanh()

        def later(x: Tensor, case: Case = case) -> Any:
            work = call(case, x.sin(), "a", mesh, async_op=True)
            assert work.done()  # when it is made
            return work.then(torch.tanh).wait()

        def scalar(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: weighted(fn(x))

        what = f"{name} on rank {mesh.rank}"
        equal(grad(scalar(later))(x), grad(scalar(now))(x), f"grad of {what}")
        equal(vmap(later)(batch), vmap(now)(batch), f"vmap of {what}")
        equal(jvp(later, (x,), (x.cos(),)), jvp(now, (x,), (x.cos(),)), f"jvp of {what}")


def test_transforms(run4: Run4) -> None:
    run4(transformed)


def waited_for_inside(needs_grad: bool) -> None:
    """Begun outside of the transform: what is waited for is a constant to it, and as differentiable as ever outside."""
    mesh = mesh4()
    x = data(4, seed=mesh.rank, dtype=F64).requires_grad_(needs_grad)
    z, zs = data(4, dtype=F64), data(3, 4, dtype=F64)
    total = mc.all_reduce(x, "a", mesh=mesh)
    for transform in (lambda fn: grad(fn)(z), lambda fn: vmap(fn)(zs), lambda fn: jvp(fn, (z,), (z,))):
        work = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
        equal(transform(lambda z: (work.wait() * z).sum()), transform(lambda z: (total * z).sum()), "inside")
        equal(work.wait(), total, "outside")
        if needs_grad:
            equal(torch.autograd.grad(work.wait().sum(), x), (torch.ones(4, dtype=F64),), "the gradient")


@pytest.mark.parametrize("needs_grad", [False, True])
def test_waited_for_under_a_transform(run4: Run4, needs_grad: bool) -> None:
    run4(waited_for_inside, needs_grad)


def compiled() -> None:
    mesh = mesh4()
    k: dict[str, Any] = {"mesh": mesh, "async_op": True}

    def fn(x: Tensor) -> Any:
        total, highest = mc.all_reduce(x.sin(), "a", **k), mc.all_reduce(x, "a", "max", **k).then(torch.cos)
        params = mc.pvary({"w": x, "b": [2 * x]}, "a", **k).wait()
        works = [mc.reduce_scatter([params["w"].sin()], "a", **k), 3, mc.shift(params["b"], "a", **k)]
        z = x.cos()
        while not total.done():
            pass
        scattered, _, shifted = mc.wait(works)
        swapped = mc.all_to_all(z * highest.wait(), "a", 0, 0, **k).wait(timeout=5)
        first = mc.broadcast(x, "a", 1, **k).wait()
        return (total.wait() * swapped * shifted[0] + first).sum() + scattered[0].exp().sum()

    torch._dynamo.reset()
    results = []
    for run in (fn, torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=False)):
        leaf = torch.linspace(-1, 1, 8, dtype=F64).mul(1 + mesh.rank).requires_grad_()
        y = run(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


def test_compile(pool4: Any) -> None:
    pool4.run(compiled)


# -------------------------------------------------------------------------------------------------- overlap in backward


class Logged(Pending):
    """Says when it is waited for."""

    def __init__(self, inner: Pending, log: list[str]) -> None:
        self.inner, self.log = inner, log

    def wait(self, timeout: float | None) -> Any:
        self.log.append("waited for")
        return self.inner.wait(timeout)

    def done(self) -> bool:
        return self.inner.done()


@contextlib.contextmanager
def logging(link: Any, log: list[str]) -> Iterator[None]:
    """Note when a primitive of this link is called that does not wait, and when what it gave is waited for."""
    inside: list[None] = []  # one primitive may be made of others
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast")

    def logged(inner: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any) -> Any:
            if inside:
                return inner(*args)
            log.append("begun")
            inside.append(None)
            result = inner(*args)
            inside.pop()
            return Logged(result, log) if isinstance(result, Pending) else result

        return begin

    for name in names:
        setattr(link, name, logged(getattr(link, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(link, name)


def order_in_backward(name: str, order: list[int]) -> list[str]:
    """As many works as there are numbers, waited for in this order."""
    mesh = mesh4()
    case = BY_NAME[name]
    log: list[str] = []
    before = [data(8, 8, seed=mesh.rank).requires_grad_() * 1 for _ in order]
    before[0].register_hook(lambda g: log.append("what was before the start"))
    works = [call(case, x, "a", mesh, async_op=True) for x in before]
    between = data(8).requires_grad_().sin()
    between.register_hook(lambda g: log.append("what was between"))
    after = sum(works[i].wait() for i in order) * 2
    after.register_hook(lambda g: log.append("what was after the wait"))
    loss = after.sum() + between.square().sum()
    with logging(mesh.axis("a").later.link, log):
        loss.backward()
    return log


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter-mean", "all_to_all-0-1", "permute", "shift"])
def test_the_transpose_starts_where_the_wait_was_and_is_waited_for_where_the_start_was(run4: Run4, name: str) -> None:
    expected = ["what was after the wait", "begun", "what was between", "waited for", "what was before the start"]
    assert run4(order_in_backward, name, [0]) == [expected] * 4


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]], ids=str)
def test_several_transposed_collectives_are_under_way_at_once(run4: Run4, order: list[int]) -> None:
    """However they were waited for."""
    begun, waited = ["begun"] * 3, ["waited for"] * 3
    expected = ["what was after the wait", *begun, "what was between", *waited, "what was before the start"]
    assert run4(order_in_backward, "all_gather", order) == [expected] * 4


# ----------------------------------------------------------------------------------------------------------- typing


if TYPE_CHECKING:

    async def typed(x: Tensor, tree: dict[str, list[Tensor]], later: bool) -> None:
        """What mypy makes of the overloads."""
        assert_type(mc.all_reduce(x, "a"), Tensor)
        assert_type(mc.all_reduce(x, "a", "max", async_op=False), Tensor)
        assert_type(mc.all_reduce(x, "a", async_op=True), Work[Tensor])
        assert_type(mc.pvary(tree, "a", async_op=True), Work[dict[str, list[Tensor]]])
        assert_type(mc.all_gather(tree, ("a", "b"), 1, async_op=True).wait(), dict[str, list[Tensor]])
        assert_type(mc.all_gather_invariant(x, "a", sizes=[1, 2], async_op=True).wait(timeout=1), Tensor)
        assert_type(mc.shard(x, "a", async_op=True), Work[Tensor])
        assert_type(mc.reduce_scatter(x, "a", async_op=True), Work[Tensor])
        assert_type(mc.all_to_all(x, "a", 0, 1, async_op=True), Work[Tensor])
        assert_type(mc.permute(x, "a", [(0, 1)], async_op=True), Work[Tensor])
        assert_type(mc.shift([x], "a", -1, async_op=True), Work[list[Tensor]])
        assert_type(mc.broadcast(x, "a", async_op=True), Work[Tensor])
        assert_type(mc.reduce(x, "a"), Tensor | None)
        assert_type(mc.reduce(x, "a", async_op=True), Work[Tensor | None])
        assert_type(mc.gather(x, "a", async_op=True), Work[Tensor | None])
        assert_type(mc.scatter(None, "a", like=x, async_op=True), Work[Tensor])
        assert_type(mc.send(x, "a", 1, async_op=True), Work[None])
        assert_type(mc.recv("a", 1, shape=(2,), dtype=F32), Tensor)
        assert_type(mc.recv("a", 1, shape=(2,), dtype=F32, async_op=True), Work[Tensor])
        assert_type(mc.exchange([(x, 1)], [], "a", async_op=True), Work[list[Tensor]])
        assert_type(mc.barrier("a", async_op=True), Work[None])
        work = mc.all_reduce(x, "a", async_op=True)
        assert_type(mc.wait(work), Tensor)
        assert_type(mc.wait([work], 3), Any)
        assert_type(work.then(lambda y: [float(y)]), Work[list[float]])
        assert_type(await work, Tensor)
        assert_type(work.done(), bool)
        mc.all_reduce(x, "a", async_op=later)  # type: ignore[call-overload]  # which of the two is not known
