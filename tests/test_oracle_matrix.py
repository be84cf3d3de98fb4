"""Forward values of every differentiable collective on every mesh, axis and dtype, against the oracle, bit for bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ALL, BY_NAME, CASES, MESHES, SHARES, Case, grid, seeded
from oracle import Oracle, axis_choices
from torch import Tensor
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.runtime.transports.protocol import REDUCE_OPS

MOVED = (
    torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float16,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
MOVERS = [case for case in CASES if set(ALL) <= set(case.dtypes)]


def mesh_id(value: tuple[int, ...]) -> str:
    return "x".join(map(str, value))


def equal(actual: Tensor, expected: Tensor, what: str) -> None:
    bits = {1: torch.uint8, 2: torch.int16}.get(actual.element_size())
    if bits is not None and actual.dtype == expected.dtype and actual.dtype.is_floating_point:
        actual, expected = actual.view(bits), expected.contiguous().view(bits)
    assert_close(actual, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


@functools.cache  # for all ranks of a process
def worked(name: str, shape: tuple[int, ...], axis: Any, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """What all ranks put in, and what the oracle gives them."""
    case, oracle = BY_NAME[name], Oracle(grid(shape))
    xs = case.inputs(oracle, axis, dtype)
    return xs, case.reference(oracle, xs, axis)


def check_one(case: Case, axis: Any, mesh: mc.Mesh, x: Tensor, expected: Tensor, what: str) -> None:
    """The result is the oracle's, in new storage, and the input is as it was."""
    mine = x.clone()
    y = case.call(x, axis, mesh)
    equal(x, mine, f"{what}: the input was modified")
    equal(y, expected, what)
    assert type(y) is Tensor
    if y.numel() and case.op != "pvary":
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), f"{what}: the input's storage"


def check_dtypes(shape: tuple[int, ...], axes: list[Any], names: list[str], dtypes: tuple[torch.dtype, ...]) -> None:
    mesh = mc.make_mesh(grid(shape))
    rank = mesh.rank
    # Five axes of a grid, sixteen of a cube: the dtypes take turns, other ones in a 2 x 2 than in a 2 x 4.
    turns = 1 + (len(axes) > 3) + (len(axes) > 8)
    for i, axis in enumerate(axes, shape[-1] // 2):
        for name in names:
            every = dtypes or BY_NAME[name].dtypes
            for dtype in every[i % turns :: turns] if len(every) >= turns else every:
                xs, ys = worked(name, shape, axis, dtype)
                what = f"{name} over {axis!r} of {dtype} on rank {rank}"
                check_one(BY_NAME[name], axis, mesh, xs[rank], ys[rank], what)


def test_every_reduction_has_a_case() -> None:
    """The exact ones are called by a keyword, and proven in test_sums."""
    reduced = {case.kwargs(2).get("op") for case in CASES if case.op == "all_reduce"}
    assert reduced == {op for op in REDUCE_OPS if not op.startswith("exact ")}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_values(shape: tuple[int, ...], case: Case) -> None:
    """Over every axis, and over every tuple of axes in every order."""
    mc.launch(check_dtypes, ranks=math.prod(shape), args=(shape, [*axis_choices(grid(shape)), ("a",)], [case.name], ()))


@pytest.mark.parametrize("names", SHARES)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=mesh_id)
def test_values_on_processes(pool4: Any, shape: tuple[int, ...], names: list[str]) -> None:
    pool4.run(check_dtypes, shape, axis_choices(grid(shape)), names, ())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_every_dtype_moves(run4: Callable[..., list[Any]], dtype: torch.dtype) -> None:
    run4(check_dtypes, (2, 2), ["a", ("b", "a")], [case.name for case in MOVERS], (dtype,))


REDUCED = {
    "sum": (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float16),
    "max": (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float16),
    "min": (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float16),
    "product": (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.float16, torch.complex128),
    "bxor": (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32),
}
BIG = {torch.uint16: 2**16, torch.uint32: 2**32, torch.uint64: 2**64, torch.uint8: 2**8}


def reduce_rare(dtype: torch.dtype, op: str) -> None:
    """Values near the ends of the range, where a wider or signed stand-in would show."""
    mesh = mc.make_mesh({"a": 4})
    # Two's complement: the unsigned numbers near the top are the bits of small negative ones.
    raw = [torch.tensor([rank + 1, 3 - 2 * rank, 1, (-1) ** rank * (rank + 1)]) for rank in range(4)]
    xs = [row.to(dtype) for row in raw]
    numbers = [[value.item() for value in x] for x in xs]
    modulus = BIG.get(dtype)
    expected = []
    for column in zip(*numbers, strict=True):
        if op == "sum":
            value = sum(column)
        elif op == "product":
            value = math.prod(column)
        elif op == "bxor":
            value = column[0] ^ column[1] ^ column[2] ^ column[3]
        else:
            value = max(column) if op == "max" else min(column)
        expected.append(value % modulus if modulus else value)
    equal(mc.all_reduce(xs[mesh.rank], "a", op, mesh=mesh), torch.tensor(expected, dtype=dtype), f"{op} of {dtype}")
    mine = mc.reduce_scatter(xs[mesh.rank], "a", op=op, mesh=mesh)
    equal(mine, torch.tensor([expected[mesh.rank]], dtype=dtype), f"reduce_scatter {op} of {dtype}")


@pytest.mark.parametrize("op", REDUCED)
def test_rare_dtypes_reduce(run4: Callable[..., list[Any]], op: str) -> None:
    for dtype in REDUCED[op]:
        run4(reduce_rare, dtype, op)


# ------------------------------------------------------------------------------------------- layouts of the input


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.ndim > 1 else x


def stepped(x: Tensor) -> Tensor:
    wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]) if x.ndim else (2,))
    view = wide[..., ::2] if x.ndim else wide[1]
    view.copy_(x)
    return view


def conjugated(x: Tensor) -> Tensor:
    return x.conj().resolve_conj().conj()


def negated(x: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(x), -x).conj().imag  # a view with the negative bit


VIEWS = {
    "transposed": (transposed, torch.float64),
    "stepped": (stepped, torch.float32),
    "stepped-int16": (stepped, torch.int16),
    "conjugated": (conjugated, torch.complex64),
    "negated": (negated, torch.float64),
}


def check_view(view: str) -> None:
    mesh = mc.make_mesh(grid((2, 2)))
    viewed, dtype = VIEWS[view]
    for case in CASES:
        if dtype not in case.dtypes and not (case in MOVERS and dtype == torch.int16):
            continue
        xs, ys = worked(case.name, (2, 2), ("b", "a"), dtype)
        what = f"{case.name} of a {view} input on rank {mesh.rank}"
        check_one(case, ("b", "a"), mesh, viewed(xs[mesh.rank]), ys[mesh.rank], what)


@pytest.mark.parametrize("view", VIEWS)
def test_strided_inputs(run4: Callable[..., list[Any]], view: str) -> None:
    run4(check_view, view)


def test_the_views_are_what_they_claim() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert not transposed(x).is_contiguous()
    assert not stepped(x).is_contiguous()
    assert conjugated(x.to(torch.complex64)).is_conj()
    assert negated(x).is_neg()
    for view in (transposed, stepped, negated):
        assert_close(view(x), x, rtol=0, atol=0)


def expanded() -> None:
    mesh = mc.make_mesh({"a": 4})
    x = torch.tensor([[float(mesh.rank)]]).expand(4, 3)
    assert_close(mc.all_reduce(x, "a", mesh=mesh), torch.full((4, 3), 6.0), rtol=0, atol=0)
    assert_close(mc.reduce_scatter(x, "a", mesh=mesh), torch.full((1, 3), 6.0), rtol=0, atol=0)
    assert_close(mc.shift(x, "a", mesh=mesh), torch.full((4, 3), float((mesh.rank - 1) % 4)), rtol=0, atol=0)
    assert_close(mc.broadcast(x, "a", 2, mesh=mesh), torch.full((4, 3), 2.0), rtol=0, atol=0)
    everyone = torch.arange(4.0).repeat_interleave(4)[:, None].expand(16, 3)
    assert_close(mc.all_gather(x, "a", mesh=mesh), everyone, rtol=0, atol=0)
    rows = torch.arange(4.0)[:, None].expand(4, 3)
    assert_close(mc.all_to_all(x, "a", 0, 0, mesh=mesh), rows, rtol=0, atol=0)
    assert_close(mc.shard(x, "a", mesh=mesh), torch.full((1, 3), float(mesh.rank)), rtol=0, atol=0)


def test_expanded_input(run4: Callable[..., list[Any]]) -> None:
    run4(expanded)


ZERO = {
    "pvary": ((0, 3), {}), "all_reduce": ((0, 3), {}), "all_gather": ((0, 3), {}), "all_gather_invariant": ((0, 3), {}),
    "shard": ((0, 3), {}), "reduce_scatter": ((0, 3), {}), "all_to_all": ((0, 3), {"split_dim": 0, "concat_dim": 1}),
    "permute": ((0, 3), {"perm": [(0, 1)]}), "shift": ((0, 3), {}), "scan": ((0, 3), {"op": "max"}), "broadcast": ((0, 3), {}),
}  # fmt: skip
ZERO_SHAPES = {"all_to_all": (0, 12)}


def zero_sizes(op: str) -> None:
    mesh = mc.make_mesh({"a": 4})
    shape, kwargs = ZERO[op]
    for dtype in (torch.float32, torch.bool if op not in ("all_reduce", "reduce_scatter") else torch.int16):
        y = getattr(mc, op)(torch.zeros(shape, dtype=dtype), "a", **kwargs, mesh=mesh)
        assert (tuple(y.shape), y.dtype) == (ZERO_SHAPES.get(op, (0, 3)), dtype)
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    getattr(mc, op)(x, "a", **kwargs, mesh=mesh).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    if op in ("all_reduce", "reduce_scatter"):
        for reduction in ("mean", "max", "min", "product"):
            x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
            getattr(mc, op)(x, "a", op=reduction, mesh=mesh).sum().backward()
            assert x.grad is not None


@pytest.mark.parametrize("op", ZERO)
def test_zero_size_inputs(run4: Callable[..., list[Any]], op: str) -> None:
    run4(zero_sizes, op)


SCALAR = {
    "pvary": ({}, lambda r: r),
    "all_reduce": ({}, lambda r: 6),
    "permute": ({"perm": [(3, 0)]}, lambda r: 3 if r == 0 else 0),
    "shift": ({}, lambda r: (r - 1) % 4),
    "scan": ({"exclusive": True}, lambda r: sum(range(r))),
    "broadcast": ({"src": 2}, lambda r: 2),
}


def scalars(op: str) -> None:
    mesh = mc.make_mesh({"a": 4})
    kwargs, expected = SCALAR[op]
    for dtype in (torch.float32, torch.int64):
        y = getattr(mc, op)(torch.tensor(mesh.rank, dtype=dtype), "a", **kwargs, mesh=mesh)
        equal(y, torch.tensor(expected(mesh.rank), dtype=dtype), op)


@pytest.mark.parametrize("op", SCALAR)
def test_0_d_inputs_stay_0_d(run4: Callable[..., list[Any]], op: str) -> None:
    run4(scalars, op)


# --------------------------------------------------------------------------------------------------------- values


def nans(op: str, dtype: torch.dtype) -> None:
    mesh = mc.make_mesh({"a": 4})
    nan, inf = math.nan, math.inf
    table = torch.tensor(
        [[nan, 1, -inf, -1, 0.5], [1, nan, inf, -2, 0.5], [2, 2, 0, -3, -0.5], [3, 3, nan, -4, inf]]
    ).to(dtype)
    best = {"max": [nan, nan, nan, -1, inf], "min": [nan, nan, nan, -4, -0.5]}[op]
    expected = torch.tensor(best).to(dtype)
    x = table[mesh.rank]
    assert_close(mc.all_reduce(x, "a", op, mesh=mesh), expected, rtol=0, atol=0, equal_nan=True)
    tiled = x.repeat(4)
    assert_close(mc.reduce_scatter(tiled, "a", op=op, mesh=mesh), expected, rtol=0, atol=0, equal_nan=True)
    top = mc.reduce(x, "a", dst=2, op=op, mesh=mesh)
    assert (top is None) == (mesh.rank != 2)
    if top is not None:
        assert_close(top, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", ["max", "min"])
def test_max_and_min_propagate_nan(run4: Callable[..., list[Any]], op: str, dtype: torch.dtype) -> None:
    run4(nans, op, dtype)


def negative_nan_and_zero() -> None:
    """Floats compared as integers: a NaN with its sign bit set, -0.0 against 0.0, subnormals."""
    mesh = mc.make_mesh({"a": 4})
    x = torch.tensor([-math.nan if mesh.rank == 1 else 1.0, -0.0 if mesh.rank else 0.0, 5e-324 if mesh.rank else 0.0])
    x = x.to(torch.float64)
    x[2] = 5e-324 * (mesh.rank - 1)
    top, bottom = (mc.all_reduce(x, "a", op, mesh=mesh) for op in ("max", "min"))
    assert_close(top, torch.tensor([math.nan, 0.0, 1e-323], dtype=torch.float64), rtol=0, atol=0, equal_nan=True)
    low = torch.tensor([math.nan, 0.0, -5e-324], dtype=torch.float64)
    assert_close(bottom, low, rtol=0, atol=0, equal_nan=True)


def test_extremes_of_odd_floats(run4: Callable[..., list[Any]]) -> None:
    run4(negative_nan_and_zero)


def half_sums() -> None:
    """A sum of halves is accumulated in single precision: 256 + 1 + 1 + ... would stay 256 in bfloat16."""
    mesh = mc.make_mesh({"a": 8})
    x = torch.tensor([256.0 if mesh.rank == 0 else 1.0], dtype=torch.bfloat16)
    assert mc.all_reduce(x, "a", mesh=mesh).item() == 264.0  # 263 rounds to 264


def test_bfloat16_sums_are_accumulated_in_float32() -> None:
    mc.launch(half_sums, ranks=8)


def storages() -> list[tuple[str, int]]:
    mesh = mc.make_mesh({"a": 4})
    oracle = Oracle(mesh.shape)
    found = []
    for case in CASES:
        y = case.call(case.inputs(oracle, "a", case.dtypes[0])[mesh.rank], "a", mesh)
        if y.numel() and case.op != "pvary":
            found.append((case.name, y))
    # In-process the results of all ranks are alive at once, so that equal addresses are shared storage.
    mc.barrier("a", mesh=mesh)
    addresses = [(name, y.untyped_storage().data_ptr()) for name, y in found]
    mc.barrier("a", mesh=mesh)
    return addresses


def test_ranks_of_one_process_share_no_storage() -> None:
    everywhere = [entry for found in mc.launch(storages, ranks=4) for entry in found]
    assert len({address for _, address in everywhere}) == len(everywhere)


def same_storage() -> bool:
    mesh = mc.make_mesh({"a": 2})
    x = seeded((3,), torch.float32, 1)
    return mc.pvary(x, "a", mesh=mesh).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_pvary_copies_nothing() -> None:
    assert mc.launch(same_storage, ranks=2) == [True, True]


def places(shape: tuple[int, ...]) -> None:
    mesh = mc.make_mesh(grid(shape))
    oracle = Oracle(mesh.shape)
    assert mesh.coordinate == oracle.coordinates[mesh.rank]
    for axis in [*axis_choices(mesh.shape), ("a",)]:
        here = mc.axis_index(axis, mesh=mesh)
        equal(here, torch.tensor(oracle.index(mesh.rank, axis)), f"axis_index({axis!r})")
        here += 1  # new storage each time
        assert mc.axis_index(axis, mesh=mesh).item() == oracle.index(mesh.rank, axis)
        assert mc.axis_size(axis, mesh=mesh) == oracle.axis_size(axis)
        assert type(mc.axis_size(axis, mesh=mesh)) is int


@pytest.mark.parametrize("shape", MESHES, ids=mesh_id)
def test_axis_index_and_size(shape: tuple[int, ...]) -> None:
    mc.launch(places, ranks=math.prod(shape), args=(shape,))


def test_axis_index_and_size_on_processes(pool4: Any) -> None:
    pool4.run(places, (2, 2))


def test_a_mesh_of_one_works_outside_a_launch() -> None:
    check_dtypes((1,), ["a"], [case.name for case in CASES], ())


def subset() -> list[Any]:
    mesh, whole = mc.make_mesh({"a": 3}, ranks=[3, 0, 2]), mc.make_mesh({"all": 4})
    if whole.rank == 1:
        with pytest.raises(mc.MeshError, match=r"rank 1 is not in the mesh"):
            mc.all_reduce(torch.ones(1), "a", mesh=mesh)
        return []
    return mc.all_gather(torch.tensor([whole.rank]), "a", mesh=mesh).tolist()


def test_a_mesh_on_some_ranks_in_the_order_given(run4: Callable[..., list[Any]]) -> None:
    assert run4(subset) == [[3, 0, 2], [], [3, 0, 2], [3, 0, 2]]
