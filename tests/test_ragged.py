"""all_to_all_ragged: as many rows to each rank as its counts say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import meshcomm as mc

Run = Callable[..., list[Any]]
F64 = torch.float64
COUNTS: dict[str, list[Any]] = {
    "uneven": [[1, 2, 0, 3], [2, 0, 1, 1], [0, 4, 1, 0], [3, 1, 1, 2]],
    "an empty rank": [[0, 0, 0, 0], [1, 2, 0, 1], [2, 2, 0, 1], [1, 1, 0, 1]],
    "all to one": [[0, 0, 5, 0], [0, 0, 3, 0], [0, 0, 0, 0], [0, 0, 1, 0]],
    "nothing": [[0, 0, 0, 0]] * 4,
    "by expert": [
        [[1, 0], [2, 1], [0, 0], [1, 2]], [[0, 0], [0, 3], [1, 1], [0, 1]],
        [[2, 2], [0, 0], [0, 0], [1, 0]], [[0, 1], [1, 1], [3, 0], [0, 0]],
    ],
    "no expert": [[[], [], [], []]] * 4,
}  # fmt: skip
MOST = 5


def given(name: str, rank: int, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    counts = torch.tensor(COUNTS[name][rank], dtype=torch.int64)
    rows = torch.arange(1, 2 * int(counts.sum()) + 1).view(-1, 2) + 100 * rank
    return rows.to(dtype), counts


def expected(name: str, rank: int, ranks: list[int], dtype: torch.dtype = F64) -> tuple[list[Tensor], Tensor]:
    """The rows from each, and the counts."""
    parts, counts, place = [], [], ranks.index(rank)
    for source in ranks:
        rows, sent = given(name, source, dtype)
        parts.append(rows.split(sent.view(len(ranks), -1).sum(1).tolist())[place])
        counts.append(sent[place])
    return parts, torch.stack(counts)


def roomy(parts: list[Tensor], most: int) -> Tensor:
    rooms = [torch.cat([part, part.new_zeros(most - len(part), *part.shape[1:])]) for part in parts]
    return torch.cat(rooms)


def values(axis: Any, ranks: list[int]) -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    with mc.use_mesh(mesh):
        for name in COUNTS:
            for dtype in (F64, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
                x, counts = given(name, mesh.rank, dtype)
                before = x.clone(), counts.clone()
                parts, theirs = expected(name, mesh.rank, ranks, dtype)
                y, counts_from = mc.all_to_all_ragged(x, counts, axis)
                assert all(map(torch.equal, (y, counts_from), (torch.cat(parts), theirs))), (name, dtype)
                z, again = mc.all_to_all_ragged(x, counts.int(), axis, most=MOST)
                assert all(map(torch.equal, (z, again), (roomy(parts, MOST), theirs.int()))), (name, dtype)
                back, ours = mc.all_to_all_ragged(y, counts_from, axis)
                assert torch.equal(back, x)
                assert torch.equal(ours, counts)
                assert torch.equal(before[0], x)
                assert torch.equal(before[1], counts)


@pytest.mark.parametrize(("axis", "ranks"), [(("a", "b"), [0, 1, 2, 3]), (("b", "a"), [0, 2, 1, 3])], ids=["ab", "ba"])
def test_values(run4: Run, axis: Any, ranks: list[int]) -> None:
    run4(values, axis, ranks)


def trees() -> None:
    mesh = mc.make_mesh({"a": 4})
    with mc.use_mesh(mesh):
        x, counts = given("uneven", mesh.rank)
        tree = {"rows": x, "ids": torch.arange(len(x)), "of": (x.float().unsqueeze(1), x[:, 0] > 3)}
        for most in (None, MOST):
            got, theirs = mc.all_to_all_ragged(tree, counts, "a", most=most)
            work = mc.all_to_all_ragged(tree, counts, "a", most=most, async_op=True, bucket_mb=1)
            later, too = work.wait()
            for y, z, leaf in zip(*map(leaves, (got, later, tree)), strict=True):
                assert torch.equal(y, z)
                assert torch.equal(y, mc.all_to_all_ragged(leaf, counts, "a", most=most)[0])
            assert torch.equal(theirs, too)


def leaves(tree: Any) -> list[Tensor]:
    return [tree["rows"], tree["ids"], *tree["of"]]


def test_pytrees_now_and_later(run4: Run) -> None:
    run4(trees)


def derivatives(name: str, most: int | None) -> None:
    """y = x ** 3 by rows that differ: what comes back is each row's own."""
    mesh = mc.make_mesh({"a": 4})
    x, counts = given(name, mesh.rank)

    def fn(x: Tensor) -> Tensor:
        y, _ = mc.all_to_all_ragged(x, counts, "a", most=most, mesh=mesh)
        return y

    x = (x / 10).requires_grad_()
    y = fn(x)
    weights = torch.arange(1, y.numel() + 1, dtype=F64).view_as(y) * (mesh.rank + 1)
    by_row = mc.all_to_all(weights, "a", 0, 0, mesh=mesh) if most else None
    if most:  # what the rows of each rank meet, back in its order
        of = counts.view(4, -1).sum(1).tolist()
        mine = torch.cat([by_row[i * most : i * most + of[i]] for i in range(4)])  # type: ignore[index]
    else:
        theirs = mc.all_to_all(counts, "a", 0, 0, mesh=mesh)
        mine, _ = mc.all_to_all_ragged(weights, theirs, "a", mesh=mesh)
    (g,) = torch.autograd.grad((y**3 * weights).sum(), x, create_graph=True)
    assert_close(g, 3 * x**2 * mine, rtol=1e-12, atol=1e-12)
    (gg,) = torch.autograd.grad((g * x.detach()).sum(), x)
    assert_close(gg, 6 * x * x * mine, rtol=1e-12, atol=1e-12)
    leaf = x.detach()
    g = torch.func.grad(lambda x: (fn(x) ** 3 * weights).sum())(leaf)
    assert_close(g, 3 * leaf**2 * mine, rtol=1e-12, atol=1e-12)
    value, tangent = torch.func.jvp(fn, (leaf,), (2 * leaf,))
    assert torch.equal(value, y.detach())
    assert torch.equal(tangent, 2 * y.detach())
    assert torch.equal(torch.func.vmap(fn, 1, 1)(torch.stack([leaf, 3 * leaf], 1))[:, 1], fn(3 * leaf))
    curve = torch.func.grad(lambda x: (torch.func.grad(lambda x: (fn(x) ** 3 * weights).sum())(x) * leaf).sum())(leaf)
    assert_close(curve, 6 * leaf * leaf * mine, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("most", [None, MOST])
@pytest.mark.parametrize("name", ["uneven", "an empty rank", "by expert"])
def test_derivatives_of_every_order(run4: Run, name: str, most: int | None) -> None:
    run4(derivatives, name, most)


# ---------------------------------------------------------------------------------------------------- varying types

LOADS = torch.tensor([[[1, 2], [3, 0]], [[0, 3], [2, 1]]])
"""Of dp and ep, to each along ep: they vary along dp, where the rows do not."""


def routed(x: Tensor, w: Tensor, most: int | None) -> Tensor:
    counts = LOADS[mc.axis_index("dp"), mc.axis_index("ep")]
    y, theirs = mc.all_to_all_ragged(x * w, counts, "ep", most=most)
    assert mc.varying_axes(theirs) == mc.varying_axes(y) == {"dp", "ep"}
    y = y**2 * torch.arange(1, y.shape[0] + 1, dtype=F64).unsqueeze(1)
    if most is None:
        y, _ = mc.all_to_all_ragged(y, theirs, "ep")
    return mc.all_reduce((y * (1 + mc.axis_index("dp"))).sum(), ("dp", "ep"))


def routed_alone(x: Tensor, w: Tensor, most: int | None) -> Tensor:
    total, halves = torch.zeros((), dtype=F64), (x * w).chunk(2)
    for dp in range(2):
        sent = [half.split(LOADS[dp, i].tolist()) for i, half in enumerate(halves)]
        for ep in range(2):
            parts = [sent[source][ep] for source in range(2)]
            y = torch.cat(parts) if most is None else roomy(parts, most)
            total = total + (1 + dp) * (y**2 * torch.arange(1, len(y) + 1).unsqueeze(1)).sum()
    return total


@pytest.mark.parametrize("most", [None, 4])
def test_the_checker_knows_both_results(most: int | None) -> None:
    """And inserts the pvary of rows that are cut where numbers say that vary along another axis."""
    mesh = mc.make_mesh({"dp": 2, "ep": 2})
    found = []
    for fn in (
        mc.shard_map(lambda x, w: routed(x, w, most), mesh=mesh, in_specs=("(ep b) d", "d"), out_specs=""),
        lambda x, w: routed_alone(x, w, most),
    ):
        x = torch.arange(12, dtype=F64).view(6, 2).requires_grad_()
        w = torch.tensor([1.0, 2.0], dtype=F64, requires_grad=True)
        found.append([(y := fn(x, w)), *torch.autograd.grad(y, (x, w))])
    assert_close(*found, rtol=1e-12, atol=1e-12)


def test_a_missing_pvary_is_named() -> None:
    def main(x: Tensor) -> Tensor:
        counts = LOADS[mc.axis_index("dp"), mc.axis_index("ep")]
        return mc.all_reduce(mc.all_to_all_ragged(x, counts, "ep")[0].sum(), ("dp", "ep"))

    mesh = mc.make_mesh({"dp": 2, "ep": 2})
    fn = mc.shard_map(main, mesh=mesh, in_specs="(ep b) d", out_specs="", check_vma="error")
    with pytest.raises(mc.VaryingError, match=r"invariant along 'dp'[\s\S]*mc.pvary\(x, 'dp'\)"):
        fn(torch.ones(6, 2, requires_grad=True))


# ------------------------------------------------------------------------------------------------------ what else


def test_what_is_sent() -> None:
    def main() -> list[tuple[str, int]]:
        mesh = mc.make_mesh({"a": 2})
        with mc.trace() as trace:
            mc.all_to_all_ragged(torch.ones(5, 3), torch.tensor([[2, 3], [4, 1]][mesh.rank]), "a", mesh=mesh)
        return [(event.operation, event.wire) for event in trace.events]

    assert mc.launch(main, ranks=2) == [
        [("all_to_all", 8), ("all_to_all", 48)],
        [("all_to_all", 8), ("all_to_all", 48)],
    ]


def test_batched_counts_are_refused() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"a": 2})
        counts = torch.tensor([[1, 1], [2, 0]])
        with pytest.raises(mc.MeshError, match=r"counts is batched by vmap"):
            torch.func.vmap(lambda x, c: mc.all_to_all_ragged(x, c, "a", mesh=mesh)[0])(torch.ones(2, 2), counts)

    mc.launch(main, ranks=2)


def compiled(most: int | None) -> None:
    mesh = mc.make_mesh({"a": 4})
    x, counts = given("uneven", mesh.rank)

    def fn(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        y, theirs = mc.all_to_all_ragged(x.sin(), counts, "a", most=most, mesh=mesh)
        return y.cos(), theirs * 2

    torch._dynamo.reset()
    fast = torch.compile(fn, fullgraph=most is not None, backend="aot_eager")
    for _ in range(3):
        got = []
        for run in (fast, fn):
            leaf = x.clone().requires_grad_()
            y, theirs = run(leaf, counts)
            got.append([y, theirs, *torch.autograd.grad((y * torch.arange(y.numel()).view_as(y)).sum(), leaf)])
        assert_close(*got, rtol=1e-12, atol=1e-12)
        if most is None:  # other shapes
            x, counts = torch.cat([x, x]), counts * 2
    if most is None:
        with pytest.raises(Exception, match="most="):
            torch.compile(fn, fullgraph=True, backend="aot_eager")(x, counts)


@pytest.mark.thorough
@pytest.mark.parametrize("most", [None, MOST])
def test_compiled(pool4: Any, most: int | None) -> None:
    pool4.run(compiled, most)
