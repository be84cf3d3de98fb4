"""grouped_matmul against one product after the other, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import meshcomm as mc
from meshcomm import parallel
from meshcomm.parallel.expert import grouped

Run = Callable[..., list[Any]]
F64 = torch.float64


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def one_by_one(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    parts = rows.split(counts.tolist())
    return torch.cat([part @ w for part, w in zip(parts, weights.unbind(), strict=True)])


def derivatives(fn: Callable[..., Tensor], rows: Tensor, weights: Tensor, counts: Tensor) -> list[Tensor]:
    """The result, and the first two derivatives by gradients that have no strides of their own."""
    leaves = [rows.detach().requires_grad_(), weights.detach().requires_grad_()]
    y = fn(*leaves, counts)
    ones = torch.ones((), dtype=y.dtype).expand_as(y)
    first = torch.autograd.grad(y, leaves, ones + ones * y, create_graph=True)
    of_first = [torch.ones((), dtype=y.dtype).expand_as(g) for g in first]
    also = torch.autograd.grad(y, leaves, ones, retain_graph=True)
    return [y, *first, *also, *torch.autograd.grad(first, leaves, of_first)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_without_values_it_is_shapes(dtype: torch.dtype) -> None:
    """On the meta device and of fake tensors; afterwards the kernel is where it was."""
    for where in (torch.device("meta"), FakeTensorMode()):
        with where:
            rows, w = (
                torch.empty(5, 8, dtype=dtype).requires_grad_(),
                torch.empty(3, 8, 16, dtype=dtype).requires_grad_(),
            )
            y = parallel.grouped_matmul(rows, w, torch.empty(3, dtype=torch.int64))
            first = torch.autograd.grad(y.sum(), (rows, w), create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), (rows, w))
        assert (y.shape, y.dtype) == ((5, 16), dtype)
        assert [g.shape for g in (*first, *second)] == 2 * [rows.shape, w.shape]
    grouped._has_kernel.cache_clear()
    before = grouped._has_kernel("cpu", dtype)
    grouped._has_kernel.cache_clear()
    with FakeTensorMode():
        parallel.grouped_matmul(torch.empty(5, 8, dtype=dtype), torch.empty(3, 8, 16, dtype=dtype), torch.arange(3))
    assert grouped._has_kernel("cpu", dtype) == before


TOLERANCES = {F64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}
STRIDES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "dense": lambda rows, w: (rows, w),
    "transposed": lambda rows, w: (rows.T.contiguous().T, w.mT.contiguous().mT),
    "expanded": lambda rows, w: (rows[:1, :1].expand_as(rows), w[:1].expand_as(w)),
    "cut": lambda rows, w: (rows.repeat(2, 2)[::2, ::2], w.repeat(1, 1, 2)[..., : w.shape[2]]),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_equals_one_by_one(dtype: torch.dtype, strides: str) -> None:
    for counts, d, f in (([3, 0, 5], 8, 16), ([0, 0, 2], 16, 8), ([1], 8, 8), ([2, 4], 3, 5)):
        seeds = drawn(0, sum(counts), d).to(dtype), drawn(1, len(counts), d, f).to(dtype)
        rows, weights = STRIDES[strides](*seeds)
        many = torch.tensor(counts)
        found = derivatives(parallel.grouped_matmul, rows, weights, many)
        assert {g.dtype for g in found} == {dtype}
        expected = derivatives(one_by_one, rows.double(), weights.double(), many)
        assert_close([g.double() for g in found], expected, rtol=TOLERANCES[dtype], atol=8 * TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_of_nothing(dtype: torch.dtype) -> None:
    for counts, d, f in (([0, 0], 8, 8), ([], 8, 8), ([2], 8, 0), ([2], 0, 8)):
        rows, weights = torch.ones(sum(counts), d, dtype=dtype), torch.ones(len(counts), d, f, dtype=dtype)
        leaves = [rows.requires_grad_(), weights.requires_grad_()]
        y = parallel.grouped_matmul(rows, weights, torch.tensor(counts, dtype=torch.int64))
        assert y.shape == (sum(counts), f)
        assert [not g.any() for g in torch.autograd.grad(y.sum(), leaves)] == [True, True]


def test_the_kernel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has it, once in forward and once for each operand; a torch without goes the other way."""
    calls = []

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return torch.nn.functional.grouped_mm(*args, **kwargs)

    counts, given = torch.tensor([3, 0, 5]), (drawn(0, 8, 8).float(), drawn(1, 3, 8, 16).float())
    rows, weights = (x.requires_grad_() for x in given)
    assert grouped._has_kernel("cpu", torch.float32)
    monkeypatch.setattr(grouped, "_kernel", counting)
    torch.autograd.grad(parallel.grouped_matmul(rows, weights, counts).sum(), (rows, weights))
    assert len(calls) == 3
    monkeypatch.setattr(grouped, "_kernel", None)
    assert_close(parallel.grouped_matmul(rows, weights, counts), one_by_one(rows, weights, counts))
    assert len(calls) == 3


def test_under_transforms_and_autocast() -> None:
    rows, weights, counts = drawn(0, 5, 8).float(), drawn(1, 2, 8, 8).float(), torch.tensor([2, 3])

    def of(fn: Callable[..., Tensor]) -> list[Any]:
        def loss(rows: Tensor, weights: Tensor) -> Tensor:
            return fn(rows, weights, counts).sin().sum()

        return [
            torch.func.grad(loss, (0, 1))(rows, weights),
            torch.func.vmap(lambda w: fn(rows, w, counts))(weights.expand(3, 2, 8, 8)),
            torch.func.jvp(lambda x: fn(x, weights, counts), (rows,), (rows,)),
        ]

    assert_close(of(parallel.grouped_matmul), of(one_by_one))
    with torch.autocast("cpu", torch.bfloat16):
        leaves = [rows.requires_grad_(), weights.bfloat16().requires_grad_()]
        y = parallel.grouped_matmul(*leaves, counts)
        assert y.dtype == torch.bfloat16
        assert [g.dtype for g in torch.autograd.grad(y.sum(), leaves)] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_under_a_checker(dtype: torch.dtype) -> None:
    """Experts that are replicated along dp have the sum of its gradients, in the kernel as in the loop."""
    mesh = mc.make_mesh({"dp": 2, "ep": 2})
    x, router, w = drawn(1, 12, 8).to(dtype), drawn(2, 8, 4).to(dtype), drawn(3, 4, 8, 8).to(dtype)

    def body(x: Tensor, router: Tensor, w: Tensor, fn: Callable[..., Tensor]) -> Tensor:
        weight, choice = (x @ router).softmax(-1).topk(2)
        y = parallel.experts(x, choice, weight, lambda rows, counts: fn(rows, w, counts), axis="ep", count=4)
        assert mc.varying_axes(y) == {"dp", "ep"}
        return mc.all_reduce((y**2).sum(), ("dp", "ep"))

    def by_parts(rows: Tensor, w: Tensor, counts: Tensor) -> Tensor:
        return torch.cat([part @ one for part, one in zip(mc.split_rows(rows, counts), w.unbind(), strict=True)])

    found = []
    for fn in (parallel.grouped_matmul, by_parts):
        leaves = [leaf.clone().requires_grad_() for leaf in (x, router, w)]
        specs = ("(dp ep t) d", "d e", "(ep e) d f")
        run = mc.shard_map(lambda *given, fn=fn: body(*given, fn), mesh=mesh, in_specs=specs, out_specs="")
        found.append([y := run(*leaves), *torch.autograd.grad(y, leaves)])
    assert_close(*found, rtol=1e-5, atol=1e-5)


def trained_alike() -> None:
    """On each rank, experts by groups and by parts, with second derivatives; some experts and ranks have no rows."""
    mesh = mc.make_mesh({"ep": 4})
    found = []
    for fn in (parallel.grouped_matmul, one_by_one):
        own = drawn(9, 8, 8, 8).float().chunk(4)[mesh.rank].clone().requires_grad_()
        x = drawn(mesh.rank, [5, 0, 7, 3][mesh.rank], 8).float().requires_grad_()
        choice, weight = torch.full((len(x), 2), 3), torch.ones(len(x), 2)
        choice[:, 1] = 6
        y = parallel.experts(
            x, choice, weight, lambda rows, counts, own=own, fn=fn: fn(rows, own, counts), axis="ep", count=8, mesh=mesh
        )
        first = torch.autograd.grad((y**2).sum(), [x, own], create_graph=True)
        found.append([y, *first, *torch.autograd.grad(sum((g**2).sum() for g in first), [x, own])])
    assert_close(*found, rtol=1e-3, atol=1e-3)


def test_in_experts(run4: Run) -> None:
    run4(trained_alike)
