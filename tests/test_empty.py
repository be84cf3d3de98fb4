"""Tensors without elements, on all ranks and on some: every collective, einsum and reshard, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc

Run = Callable[..., list[Any]]
AXES = ("a", ("b", "a"))
F64 = torch.float64


def empty(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=F64, requires_grad=True)


CALLS: dict[str, tuple[Callable[[Any, Any, int], Any], tuple[int, ...], Callable[[int], tuple[int, ...]]]] = {
    "pvary": (lambda x, axis, n: mc.pvary(x, axis), (0, 3), lambda n: (0, 3)),
    "all_reduce": (lambda x, axis, n: mc.all_reduce(x, axis), (0, 3), lambda n: (0, 3)),
    "mean": (lambda x, axis, n: mc.all_reduce(x, axis, "mean"), (0,), lambda n: (0,)),
    "max": (lambda x, axis, n: mc.all_reduce(x, axis, "max"), (2, 0), lambda n: (2, 0)),
    "product": (lambda x, axis, n: mc.all_reduce(x, axis, "product"), (0, 2), lambda n: (0, 2)),
    "all_gather": (lambda x, axis, n: mc.all_gather(x, axis), (0, 3), lambda n: (0, 3)),
    "all_gather along dim 1": (lambda x, axis, n: mc.all_gather(x, axis, 1), (0, 3), lambda n: (0, 3 * n)),
    "all_gather_invariant": (lambda x, axis, n: mc.all_gather_invariant(x, axis), (0, 3), lambda n: (0, 3)),
    "shard": (lambda x, axis, n: mc.shard(x, axis), (0, 3), lambda n: (0, 3)),
    "shard along dim 1": (lambda x, axis, n: mc.shard(x, axis, 1), (0, 4), lambda n: (0, 4 // n)),
    "reduce_scatter": (lambda x, axis, n: mc.reduce_scatter(x, axis), (0, 3), lambda n: (0, 3)),
    "reduce_scatter max": (lambda x, axis, n: mc.reduce_scatter(x, axis, 0, "max"), (0, 3), lambda n: (0, 3)),
    "all_to_all": (lambda x, axis, n: mc.all_to_all(x, axis, 0, 1), (0, 3), lambda n: (0, 3 * n)),
    "permute": (lambda x, axis, n: mc.permute(x, axis, [(0, 1)]), (0, 3), lambda n: (0, 3)),
    "shift": (lambda x, axis, n: mc.shift(x, axis), (3, 0), lambda n: (3, 0)),
    "scan": (lambda x, axis, n: mc.scan(x, axis, "product"), (3, 0), lambda n: (3, 0)),
    "broadcast": (lambda x, axis, n: mc.broadcast(x, axis, 1), (0,), lambda n: (0,)),
}
SIZED: dict[str, Callable[[Tensor, Any, int], Tensor]] = {
    "all_gather": lambda x, axis, n: mc.all_gather(x, axis, sizes=[0] * n),
    "reduce_scatter": lambda x, axis, n: mc.reduce_scatter(x, axis, sizes=[0] * n),
    "all_to_all": lambda x, axis, n: mc.all_to_all(x, axis, 0, 0, send_sizes=[0] * n, recv_sizes=[0] * n),
}


def check(x: Tensor, y: Tensor, shape: tuple[int, ...]) -> None:
    assert tuple(y.shape) == shape
    (g,) = torch.autograd.grad(y.sum(), x)
    assert g.shape == x.shape


def all_empty() -> None:
    with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})):
        for axis in AXES:
            n = mc.axis_size(axis)
            for fn, shape, given in CALLS.values():
                x = empty(*shape)
                check(x, fn(x, axis, n), given(n))
                x = empty(*shape)
                check(x, fn({"x": x}, axis, n)["x"], given(n))
            for sized in SIZED.values():
                x = empty(0, 3)
                check(x, sized(x, axis, n), (0, 3))


def test_collectives_of_nothing(run4: Run) -> None:
    run4(all_empty)


def some_empty() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    me = mesh.coordinate["a"]
    with mc.use_mesh(mesh):
        x = torch.ones(3 * me, 2, dtype=F64, requires_grad=True)
        y = mc.all_gather(x, "a", sizes=[0, 3])
        assert y.shape == (3, 2)
        assert torch.equal(torch.autograd.grad((y * y).sum(), x)[0], torch.full_like(x, 4))
        x = torch.ones(3, 2, dtype=F64, requires_grad=True)
        y = mc.reduce_scatter(x, "a", sizes=[0, 3])
        assert y.shape == (3 * me, 2)
        assert torch.equal(torch.autograd.grad((y * y).sum(), x)[0], torch.full_like(x, 4))
        y = mc.all_to_all(x, "a", 0, 0, send_sizes=[0, 3], recv_sizes=[3 * me] * 2)
        assert y.shape == (6 * me, 2)
        assert torch.equal(torch.autograd.grad((y * 2).sum(), x)[0], torch.full_like(x, 2))
        y = mc.shard(x, "a", sizes=[3, 0])
        assert y.shape == (3 - 3 * me, 2)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x))


def test_ranks_with_nothing(run4: Run) -> None:
    run4(some_empty)


PRODUCTS = {
    "n d, d (a f) -> n (a f)": ((0, 3), (3, 2)),
    "n (a f), (a f) d -> n d": ((3, 0), (0, 2)),
    "n (a s) d, d (a f) -> n s (a f)": ((2, 0, 3), (3, 2)),
    "n s (a f), (a f) d -> n (a s) d": ((2, 2, 0), (0, 3)),
    "(a n) d, d f -> (a n) f": ((0, 2), (2, 3)),
    "i (a j) -> i": ((2, 0),),
}


def products() -> None:
    with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})):
        for layouts, shapes in PRODUCTS.items():
            for ring in (False, True):
                xs = [empty(*shape) for shape in shapes]
                y = mc.einsum(layouts, *xs, ring=ring)
                assert not y.any()  # a sum of nothing is zero
                for g, x in zip(torch.autograd.grad(y.sum(), xs), xs, strict=True):
                    assert g.shape == x.shape
                    assert not g.any()


def test_einsum_of_nothing(run4: Run) -> None:
    run4(products)


LAYOUTS = {
    "(a x) y -> x (a y)": (0, 4),
    "(a b x) y -> (b a x) y": (0, 4),
    "(a x) y -> x y": (0, 4),
    "x y -> x (b a y)": (4, 0),
    "(a x) y -> x (b y)": (2, 0),
}


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_reshard_of_nothing(layouts: str) -> None:
    def main() -> None:
        left, right = layouts.split(" -> ")
        with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})):
            shape = mc.local_shape(right, mc.global_shape(left, LAYOUTS[layouts]))
            x = empty(*LAYOUTS[layouts])
            check(x, mc.reshard(x, layouts), shape)
            check(x, mc.reshard(x, layouts, async_op=True).wait(), shape)

    mc.launch(main, ranks=4)
