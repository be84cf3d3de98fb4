"""In which order sums add, and what their bits do not depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import tree
from torch import Tensor

import meshcomm as mc
from meshcomm.runtime.transports import dtypes

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


@pytest.mark.parametrize("n", range(1, 9))
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
