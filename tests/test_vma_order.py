"""Ranks that build the same graph in another order: the sums that the checker has inserted are compared by whose they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.runtime.whose import Whose, differ

F64 = torch.float64
Pair = tuple[Tensor, Tensor]


def ones() -> Tensor:
    return torch.ones(2, dtype=F64, requires_grad=True)


def on_lines() -> Pair:
    w = mc.mark_varying(ones(), ())
    v = mc.mark_varying(ones(), ())
    return w, v


def in_a_loop() -> Pair:
    w, v = (mc.mark_varying(ones(), ()) for _ in range(2))
    return w, v


def as_a_tree() -> Pair:
    tree = mc.mark_varying({"w": ones(), "v": [ones()]}, ())
    return tree["w"], tree["v"][0]


def as_a_module() -> Pair:
    norm = mc.mark_varying(nn.LayerNorm(2, dtype=F64), ())
    with torch.no_grad():
        norm.bias.fill_(1.0)
    return norm.weight, norm.bias


def results() -> Pair:
    """What is no leaf and was declared."""
    w, v = mc.mark_varying([ones() * 1, ones() * 1], ())
    return w, v


def as_views() -> Pair:
    w, v = mc.mark_varying([torch.ones(2, 1, dtype=F64, requires_grad=True) for _ in range(2)], ())
    return w, v


def made_inside() -> Pair:
    return ones(), torch.ones(2, dtype=F64).requires_grad_()


MADE = {make.__name__: make for make in (on_lines, in_a_loop, as_a_tree, as_a_module, results, as_views)}
INSIDE = {"made_inside": made_inside}


def by_one(x: Tensor, w: Tensor) -> Tensor:
    return (x * w.view(2)).sum()


def by_collective(x: Tensor, w: Tensor) -> Tensor:
    return (mc.all_gather(w.view(2), "dp").sum() * x).sum()


def gradients(make: str, reversed_on: int | None, use: Callable[[Tensor, Tensor], Tensor] = by_one) -> Any:
    """Of a sum of two terms, which one rank makes in another order; or what it is told."""
    mesh = mc.make_mesh({"dp": mc.world_size()})
    index = mesh.rank
    x = mc.mark_varying(torch.ones(2, dtype=F64) * (index + 1), "dp", mesh=mesh)
    pair = MADE[make]() if make in MADE else None
    with mc.use_mesh(mesh), mc.check_vma():
        w, v = pair if pair is not None else made_inside()
        if index == reversed_on:
            b = 3 * use(x, v)
            a = use(x, w)
        else:
            a = use(x, w)
            b = 3 * use(x, v)
        try:
            found = torch.autograd.grad(mc.all_reduce(a + b, "dp"), [w, v])
        except mc.CommError as error:
            return str(error)
    return [g.flatten()[0].item() for g in found]


@pytest.mark.parametrize("use", [by_one, by_collective])
@pytest.mark.parametrize("make", [*MADE, *INSIDE])
def test_another_order_is_refused_on_every_rank(make: str, use: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert all("the gradient of leaf" in told for told in mc.launch(gradients, ranks=2, args=(make, 1, use)))
    right = mc.launch(gradients, ranks=2, args=(make, None, use))
    assert right[0] == right[1]
    assert right[0][1] == 3 * right[0][0] > 0


def test_it_says_which_and_where() -> None:
    told = mc.launch(gradients, ranks=2, args=("on_lines", 1))
    assert "for the gradient of leaf 1, mark_varying at test_vma_order.py:" in told[0]
    assert "for the gradient of leaf 2, mark_varying at test_vma_order.py:" in told[0]


@pytest.mark.parametrize("last", [1, 2, 3])
def test_one_of_four(last: int) -> None:
    assert all(isinstance(told, str) for told in mc.launch(gradients, ranks=4, args=("as_a_tree", last)))


def on_processes() -> None:
    """On every rank, and before anything comes of it; afterwards they go on together."""
    told = [gradients("as_a_tree", 2), gradients("on_lines", 0)]
    assert all(isinstance(each, str) for each in told), told
    mc.barrier("dp", mesh=mc.make_mesh({"dp": 4}), timeout=60)
    assert gradients("as_a_tree", None) == [10.0, 30.0]


def test_on_processes_that_share_memory(pool4: Any) -> None:
    assert all("the gradient of leaf" in told for told in pool4.run(gradients, "as_a_tree", 2))
    pool4.run(on_processes)


@pytest.mark.parametrize("pool", ["guarded4", "guarded4_at_the_store"])
def test_under_guard(pool: str, request: pytest.FixtureRequest) -> None:
    ranks = request.getfixturevalue(pool)
    assert all("for the gradient of leaf" in told for told in ranks.run(gradients, "as_a_tree", 1))


# ---------------------------------------------------------------------------------------------- what may differ


def with_one_more(site: str) -> Any:
    """One rank types a leaf more before, or does it on another line."""
    mesh = mc.make_mesh({"dp": 2})
    if mesh.rank == 0 and site == "one more":
        mc.mark_varying(ones(), ())
    w = ones()
    if mesh.rank == 0 and site == "another line":
        mc.mark_varying(w, ())
    else:
        mc.mark_varying(w, ())
    v = mc.mark_varying(ones(), ())
    with mc.use_mesh(mesh), mc.check_vma():
        x = 1.0 + mc.axis_index("dp")
        return [g[0].item() for g in torch.autograd.grad(mc.all_reduce((x * w * v).sum(), "dp"), [w, v])]


@pytest.mark.parametrize("site", ["one more", "another line"])
def test_a_rank_may_type_more_or_elsewhere(site: str) -> None:
    assert mc.launch(with_one_more, ranks=2, args=(site,)) == [[3.0, 3.0]] * 2


def test_stages_have_leaves_of_their_own() -> None:
    """What varies along an axis is not counted along it: stages of a pipeline need not have equally many."""

    def run() -> float:
        mesh = mc.make_mesh({"pp": 2})
        for _ in range(3 * mesh.rank):
            mc.mark_varying(ones(), "pp", mesh=mesh)
        tied = mc.mark_varying([ones(), ones()], ())[mesh.rank - mesh.rank]
        with mc.use_mesh(mesh), mc.check_vma():
            x = 1.0 + mc.axis_index("pp")
            return torch.autograd.grad(mc.all_reduce((x * tied).sum(), "pp"), tied)[0][0].item()

    assert mc.launch(run, ranks=2) == [3.0, 3.0]


def test_calls_of_the_user_are_not_compared_by_it() -> None:
    def run() -> float:
        mesh = mc.make_mesh({"dp": 2})
        a, b = mc.mark_varying([ones(), 2 * ones()], ())
        first = mesh.rank == 0
        with mc.use_mesh(mesh), mc.check_vma():
            y = mc.broadcast(a, "dp") if first else mc.broadcast(b, "dp")
            return y.sum().item()

    assert mc.launch(run, ranks=2) == [2.0, 2.0]


def test_in_a_shard_map_on_ranks() -> None:
    """Arguments, and what is closed over, are compared by their specs and names."""

    def run(swapped: bool) -> Any:
        mesh = mc.make_mesh({"dp": 2})
        turned = swapped and mesh.rank == 1
        w, v, x = ones(), ones(), torch.arange(4, dtype=F64)

        def body(x: Tensor, w: Tensor) -> Tensor:
            terms = [lambda: (x * w).sum(), lambda: 3 * (x * v).sum()]
            return mc.all_reduce(sum([term() for term in (terms[::-1] if turned else terms)], torch.zeros(())), "dp")

        fn = mc.shard_map(body, mesh=mesh, in_specs=("(dp n)", "n"), out_specs="")
        try:
            return [g.tolist() for g in torch.autograd.grad(fn(x, w), [w, v])]
        except mc.CommError as error:
            return str(error)

    assert mc.launch(run, ranks=2, args=(False,)) == [[[2.0, 4.0], [6.0, 12.0]]] * 2
    assert all("the gradient of leaf" in told for told in mc.launch(run, ranks=2, args=(True,)))


def test_words() -> None:
    a, b = Whose(1, "here"), Whose(2, "there")
    assert 0 < a.word < 2**60
    assert Whose(10**9, "x").word < 2**60
    assert differ(a.word, b.word)
    assert not differ(a.word, Whose(1, "there").word)
    assert not differ(a.word, Whose(2, "here").word)
    assert not differ(a.word, a.word)
    assert not differ(0, a.word)
    assert not differ(a.word, 0)
