"""A collective with ``async_op=True`` gives what it gives without: values of every kind, and trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cases import BY_NAME, CASES, SHARES, Case, grid
from oracle import Oracle
from torch import Tensor
from torch.utils import _pytree as pytree

import meshcomm as mc
from meshcomm.work import Work

if TYPE_CHECKING:
    pass
from works import BF16, BIG, F32, Run4, call, data, equal, input_of, mesh4, shuffled


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


def same_values(shape: tuple[int, ...], axes: list[Any], form: str, names: Any = tuple(BY_NAME)) -> None:
    """Everything at once under way, and waited in an order of this rank's own."""
    mesh, oracle = mc.make_mesh(grid(shape)), Oracle(grid(shape))
    begun = []
    for axis in axes:
        for case in [BY_NAME[name] for name in names]:
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", FORMS)
def test_values(run4: Run4, form: str) -> None:
    run4(same_values, (4,), ["a"], form)


@pytest.mark.parametrize("names", SHARES)
def test_values_over_pairs_and_tuples(run4: Run4, names: list[str]) -> None:
    run4(same_values, (2, 2), ["a", "b", ("b", "a")], "dense", names)


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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bucket_mb", [25, 1e-5], ids=["in few buckets", "each leaf alone"])
def test_trees(run4: Run4, bucket_mb: float) -> None:
    run4(same_trees, [case.name for case in CASES if not ragged(case)], bucket_mb)


def test_trees_with_sizes_of_their_own(run4: Run4) -> None:
    run4(same_trees, [case.name for case in CASES if ragged(case)], 25)
