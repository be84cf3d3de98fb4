"""In which order sums add, and what their bits do not depend on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from oracle import tree
from test_transport import limits
from torch import Tensor
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.runtime.transports import dtypes, exact
from meshcomm.runtime.transports.algorithms import PacketLink
from meshcomm.runtime.transports.process_group import ProcessLink

Run = Callable[..., list[Any]]


def drawn(length: int, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers whose sums round, of all magnitudes."""
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(length, dtype=torch.float64, generator=generator)
    return (x * torch.logspace(-2, 2, length)).to(dtype)


def bits(x: Tensor) -> bytes:
    return x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def left(xs: list[Tensor]) -> Tensor:
    return sum(xs[1:], xs[0])


# ------------------------------------------------------------------------------------------------------- the tree


@pytest.mark.parametrize("n", [*range(1, 9), 13, 16])
def test_a_fold_is_the_tree(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """With and without memory of the caller's, in blocks and at once, of tensors that are not dense too."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for length in (1, 7, 64, 65):
            xs = [drawn(2 * length, index, dtype).view(length, 2) for index in range(n)]
            for op in ("sum", "mean", "product"):
                expected = tree(xs, op)
                for block in (2**18, 16):
                    monkeypatch.setattr(dtypes, "_BLOCK", block)
                    assert bits(dtypes.fold(op, xs)) == bits(expected), (op, dtype, length, block)
                    out = torch.empty_like(xs[0])
                    assert dtypes.fold(op, xs, out=out) is out
                    assert bits(out) == bits(expected), (op, dtype, length, block)
                    across = dtypes.fold(op, [x.t() for x in xs])
                    assert bits(across) == bits(expected.t())
                    assert across.is_contiguous()
            assert all(bits(x) == bits(drawn(2 * length, index, dtype)) for index, x in enumerate(xs)), "inputs stay"


@pytest.mark.parametrize("dtype", dtypes.HALF, ids=str)
def test_a_sum_of_two_halves_is_rounded_once(dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(0)
    for length in (2**16, 2**16 - 5, 2**15 + 3):
        x, y = every[-length:], every[torch.randperm(2**16, generator=generator)][:length]
        once = (x.float() + y.float()).to(dtype)
        there = ~once.isnan()
        for total in (dtypes.fold("sum", [x, y]), dtypes.fold("sum", [x, y], out=torch.empty(length, dtype=dtype))):
            assert torch.equal(total[there].view(torch.int16), once[there].view(torch.int16))
            assert torch.equal(total.isnan(), once.isnan())


def test_the_tree_is_aligned() -> None:
    xs = [drawn(100, index) for index in range(8)]
    a, b, c, d, e, f, g, h = xs
    assert bits(tree(xs[:3])) == bits((a + b) + c)
    assert bits(tree(xs[:6])) == bits(((a + b) + (c + d)) + (e + f))
    assert bits(tree(xs[:7])) == bits(((a + b) + (c + d)) + ((e + f) + g))
    assert bits(tree(xs)) == bits(((a + b) + (c + d)) + ((e + f) + (g + h)))
    assert bits(tree(xs)) != bits(left(xs)), "the test can tell"


def sums_of(n: int) -> None:
    mesh = mc.make_mesh({"a": n})
    xs = [drawn(13 * n, index) for index in range(n)]
    x = xs[mesh.rank]
    for op in ("sum", "mean", "product"):
        expected = tree(xs, op)
        assert bits(mc.all_reduce(x, "a", op, mesh=mesh)) == bits(expected)
        mine = mc.reduce_scatter(x, "a", op=op, mesh=mesh)
        assert bits(mine) == bits(expected.chunk(n)[mesh.rank])


@pytest.mark.parametrize("n", range(1, 9))
def test_sums_in_one_process(n: int) -> None:
    mc.launch(sums_of, ranks=n, args=(n,))


# ------------------------------------------------------------------------------------- what bits do not depend on


def by_parts(axis: Any, dtype: torch.dtype) -> None:
    """Both axes at once, and one after the other: the minor one first."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    major, minor = axis
    x = drawn(40, mesh.rank, dtype)
    for op in ("sum", "mean", "product"):
        at_once = mc.all_reduce(x, axis, op, mesh=mesh)
        in_turn = mc.all_reduce(mc.all_reduce(x, minor, op, mesh=mesh), major, op, mesh=mesh)
        assert bits(at_once) == bits(in_turn), op
        mine = mc.reduce_scatter(x, axis, op=op, mesh=mesh)
        assert bits(mc.all_gather(mine, axis, mesh=mesh)) == bits(at_once), op


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("axis", [("a", "b"), ("b", "a")], ids=str)
def test_both_axes_are_the_minor_one_and_then_the_major_one(run4: Run, axis: Any, dtype: torch.dtype) -> None:
    run4(by_parts, axis, dtype)


def parts_summed(n: int) -> list[bytes]:
    """Eight parts, which the ranks have in equal shares and sum alike before they meet."""
    mesh = mc.make_mesh({"a": n, "rest": -1})
    each = 8 // n
    parts = [drawn(40, index) for index in range(8)]
    mine = parts[mesh.coordinate["a"] * each :][:each]
    while len(mine) > 1:
        mine = [x + y for x, y in zip(mine[::2], mine[1::2], strict=True)]
    return [bits(mc.all_reduce(mine[0], "a", mesh=mesh))]


def test_as_many_ranks_as_you_like(pool4: Any) -> None:
    """1, 2, 4 or 8 of them, where each has an aligned part."""
    expected = [bits(tree([drawn(40, index) for index in range(8)]))]
    for n in (1, 2, 4, 8):
        assert mc.launch(parts_summed, ranks=8, args=(n,)) == [expected] * 8
    for n in (1, 2, 4):
        assert pool4.run(parts_summed, n) == [expected] * 4


# ---------------------------------------------------------------------------------------------------------- exact

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def true_sum(xs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Rounded once, or for half precision twice: through float32."""
    totals = [sum(map(Fraction, values), Fraction()) for values in zip(*(x.tolist() for x in xs), strict=True)]
    near = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.tensor([rounded(total, near) for total in totals], dtype=near).to(dtype)


def rounded(total: Fraction, dtype: torch.dtype) -> float:
    if dtype == torch.float64 or not total:
        return float(total)
    unit = Fraction(2) ** (math.frexp(float(total))[1] - 24)
    return float(round(total / unit) * unit)


@pytest.mark.parametrize("n", [2, 3, 8, 50])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_exact_sum_is_the_true_one_in_any_order(dtype: torch.dtype, n: int) -> None:
    xs = [drawn(60, index, dtype) for index in range(n)]
    expected = true_sum(xs, dtype)
    for seed in range(3):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
        mixed = [xs[i] for i in order]
        mixed.insert(seed, torch.zeros(60, dtype=dtype))
        assert bits(dtypes.fold("exact sum", mixed)) == bits(expected)
    near = expected.double() if dtype == torch.float64 else exact.fold("exact sum", [x.float() for x in xs]).double()
    assert_close(dtypes.fold("exact mean", xs), (near / n).to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exact_sums_at_the_ends(dtype: torch.dtype) -> None:
    info, inf, nan = torch.finfo(dtype), torch.inf, torch.nan
    least = info.smallest_normal * info.eps
    cases = {
        "not finite": (
            [inf, inf, -inf, nan, inf, 1.0],
            [1.0, -inf, -inf, 1.0, nan, inf],
            [inf, nan, -inf, nan, nan, inf],
        ),
        "large": ([info.max, info.max, info.max], [info.max, -info.max, 0.0], [inf, 0.0, info.max]),
        "small": ([least, least, 3 * least], [least, -least, least], [2 * least, 0.0, 4 * least]),
        "zero": ([-0.0, 0.0], [-0.0, -0.0], [0.0, 0.0]),
    }
    for name, (a, b, expected) in cases.items():
        y = dtypes.fold("exact sum", [torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)])
        assert torch.equal(y.nan_to_num(7.0), torch.tensor(expected, dtype=dtype).nan_to_num(7.0)), name
        assert not y[y == 0].signbit().any()
    huge = torch.tensor([info.max, info.max], dtype=dtype)
    if dtype != torch.float64:
        assert torch.equal(dtypes.fold("exact mean", [huge, huge]), huge), "a mean is in range where its sum is not"


def exactly(way: str) -> None:
    """By every way, in every order of the axes, one by one and in pytrees, at once and later."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    with limits(way) if way else contextlib.nullcontext():
        for dtype in FLOATS:
            xs = [drawn(36, index, dtype) for index in range(4)]
            x, expected = xs[mesh.rank], dtypes.fold("exact sum", xs)
            for axis in (("a", "b"), ("b", "a")):
                y = mc.all_reduce(x, axis, exact=True, mesh=mesh)
                later = mc.all_reduce(x, axis, exact=True, async_op=True, mesh=mesh)
                tree = mc.all_reduce({"u": x[:5], "v": [x[5:].clone()]}, axis, exact=True, bucket_mb=1e-9, mesh=mesh)
                mine = mc.reduce_scatter(x.view(9, 4), axis, 1, exact=True, mesh=mesh)
                parts = mc.reduce_scatter(x, axis, 0, "sum", [3, 0, 30, 3], exact=True, async_op=True, mesh=mesh).wait()
                for z in (y, later.wait(), torch.cat([tree["u"], *tree["v"]])):
                    assert bits(z) == bits(expected), (dtype, axis)
                assert bits(mc.all_gather(mine, axis, 1, mesh=mesh)) == bits(expected), (dtype, axis)
                assert bits(mc.all_gather(parts, axis, 0, [3, 0, 30, 3], mesh=mesh)) == bits(expected), (dtype, axis)
            mean = mc.all_reduce(x, ("a", "b"), "mean", exact=True, mesh=mesh)
            assert bits(mean) == bits(dtypes.fold("exact mean", xs))


@pytest.mark.parametrize("way", ["shared", "shared-in-parts", "always-large", "too-many-ranks"])
def test_exact_sums_on_processes(pool4: Any, way: str) -> None:
    pool4.run(exactly, way)


def test_exact_sums_in_one_process() -> None:
    mc.launch(exactly, ranks=4, args=("",))


def by_the_backend() -> None:
    """As where the backend adds: one maximum and one sum of integers."""
    mesh = mc.make_mesh({"a": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessLink, "_folds", lambda self, x, op: False)
        link = mesh.axis("a").link
        for dtype in FLOATS:
            xs = [drawn(36, index, dtype) for index in range(4)]
            for op in exact.EXACT:
                expected = dtypes.fold(op, xs)
                y = PacketLink.all_reduce(link, xs[mesh.rank], op)  # type: ignore[arg-type]
                mine = PacketLink.reduce_scatter(link, xs[mesh.rank].view(4, 3, 3), op)  # type: ignore[arg-type]
                assert bits(y) == bits(expected), (dtype, op)
                assert bits(mine) == bits(expected.chunk(4)[mesh.rank]), (dtype, op)


def test_exact_sums_where_the_backend_adds(pool4: Any) -> None:
    pool4.run(by_the_backend)


def exact_gradients() -> None:
    """Those of the sum that is not exact, in every order and under every transform; the checker too."""
    mesh = mc.make_mesh({"a": 4})

    def loss(x: Tensor, how: dict[str, Any]) -> Tensor:
        y = mc.all_reduce(x.sin(), "a", "mean", mesh=mesh, **how)
        z = mc.reduce_scatter(x.exp(), "a", mesh=mesh, **how)
        return (mc.pvary(y, "a", mesh=mesh) ** 2).sum() + (z**3).sum()

    x = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(mesh.rank))
    found = []
    for how in ({}, {"exact": True}):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf, how), leaf, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), leaf)
        batch = torch.stack([x, 2 * x])
        with mc.check_vma("error", mesh=mesh):
            typed = mc.all_reduce(mc.mark_varying(x.clone(), "a"), "a", mesh=mesh, **how)
            assert mc.varying_axes(typed) == frozenset()
        found.append(
            (
                first,
                second,
                torch.func.grad(loss)(x, how),
                torch.func.jvp(lambda x, how=how: loss(x, how), (x,), (x.cos(),))[1],
                torch.func.vmap(lambda x, how=how: loss(x, how))(batch),
                typed,
            )
        )
    assert_close(found[1], found[0])


def test_exact_sums_have_the_gradients_of_others(run4: Run) -> None:
    run4(exact_gradients)


def refused() -> None:
    mesh = mc.make_mesh({"a": 2})
    x = torch.ones(4)
    for call, words in (
        (lambda: mc.all_reduce(x, "a", "max", exact=True, mesh=mesh), "exact=True with op 'max'"),
        (lambda: mc.all_reduce(x.int(), "a", exact=True, mesh=mesh), "exact=True is for floats"),
        (lambda: mc.reduce_scatter([x.cfloat()], "a", exact=True, mesh=mesh), "exact=True is for floats"),
        (lambda: mc.all_reduce(x, "a", "exact sum", mesh=mesh), "no reduce op"),
    ):
        with pytest.raises(mc.MeshError, match=words):
            call()


def test_what_cannot_be_exact_is_refused() -> None:
    mc.launch(refused, ranks=2)


def one_of_them(axis: str) -> None:
    mesh = mc.make_mesh({"a": 4})
    with pytest.raises(mc.CommError, match="exact sum"):
        mc.all_reduce(torch.ones(3), axis, exact=mesh.rank == 1, mesh=mesh)


def test_an_exact_sum_beside_another_is_told(run4: Run) -> None:
    run4(one_of_them, "a")
