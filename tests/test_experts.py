"""experts and balance against every token by its own experts, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm import parallel

Run = Callable[..., list[Any]]
F64 = torch.float64
ROWS, D, E = [5, 0, 7, 3], 3, 8
"""Of each rank; one has none."""


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def given(rank: int, k: int, skew: bool) -> tuple[Tensor, Tensor, Tensor]:
    choice = torch.randint(0, E, (ROWS[rank], k), generator=torch.Generator().manual_seed(rank))
    return drawn(rank, ROWS[rank], D), choice.fill_(3) if skew else choice, drawn(rank + 50, ROWS[rank], k)


def one_by_one(x: Tensor, choice: Tensor, weight: Tensor, w: Tensor, capacity: int | None) -> tuple[Tensor, int]:
    y, seen, dropped = torch.zeros(len(x), w.shape[2], dtype=F64), [0] * E, 0
    for t in range(len(x)):
        for j, e in enumerate(choice[t].tolist()):
            seen[e] += 1
            if capacity is not None and seen[e] > capacity:
                dropped += 1
            else:
                y = y + torch.eye(len(x), dtype=F64)[t][:, None] * (weight[t, j] * torch.tanh(x[t] @ w[e]))
    return y, dropped


def by_parts(w: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def fn(rows: Tensor, counts: Tensor) -> Tensor:
        return torch.cat([torch.tanh(part @ w[e]) for e, part in enumerate(mc.split_rows(rows, counts))])

    return fn


def derivatives(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    nothing = 0 * sum(leaf.sum() for leaf in leaves)
    first = torch.autograd.grad((y**2).sum() + nothing, leaves, create_graph=True)
    return [*first, *torch.autograd.grad(sum((g**2).sum() for g in first) + nothing, leaves)]


def equals_one_by_one(k: int, skew: bool, capacity: int | None) -> None:
    mesh = mc.make_mesh({"ep": 4})
    rank, w = mesh.rank, drawn(99, E, D, 4)
    own = w.chunk(4)[rank].clone().requires_grad_()
    x, choice, weight = given(rank, k, skew)
    leaves = [x.requires_grad_(), weight.requires_grad_(), own]
    y, dropped = parallel.experts(
        x, choice, weight, by_parts(own), axis="ep", count=E, capacity=capacity, return_dropped=True, mesh=mesh
    )
    mine = [y, *derivatives(y, leaves)]
    every = [given(other, k, skew) for other in range(4)]
    all_ = [*(part.requires_grad_() for x, _, weight in every for part in (x, weight)), w.requires_grad_()]
    found = [one_by_one(*each, w, capacity) for each in every]
    whole = derivatives(torch.cat([y for y, _ in found]), all_)
    n = len(all_)
    expected = [found[rank][0]]
    for order in (whole[:n], whole[n:]):
        expected += [order[2 * rank], order[2 * rank + 1], order[-1].chunk(4)[rank]]
    assert_close(mine, expected, rtol=1e-11, atol=1e-11)
    assert dropped.item() == found[rank][1]


@pytest.mark.parametrize("capacity", [None, 2, 0])
@pytest.mark.parametrize("skew", [False, True], ids=["any", "all to one"])
@pytest.mark.parametrize("k", [1, 2])
def test_equals_one_by_one(run4: Run, k: int, skew: bool, capacity: int | None) -> None:
    run4(equals_one_by_one, k, skew, capacity)


def experts_of(rank: int, short: bool) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """This rank's weights, and what they make of rows; ``short``: nothing, of none."""
    own = drawn(99, E, D, 4).chunk(4)[rank].clone().requires_grad_()
    usual = by_parts(own)

    def fn(rows: Tensor, counts: Tensor) -> Tensor:
        return rows.new_zeros(0, 4) if short and not len(rows) else usual(rows, counts)

    return own, fn


def no_rows_no_work() -> None:
    """fn that makes nothing of no rows: ranks without any take part in both derivatives of those that have some."""
    mesh = mc.make_mesh({"ep": 4})
    found = []
    for short in (True, False):
        _, fn = experts_of(mesh.rank, short)
        x, choice, weight = given(mesh.rank, 2, True)
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        y = parallel.experts(x, choice, weight, fn, axis="ep", count=E, mesh=mesh)
        found.append([y, *derivatives(y, leaves)])
    assert_close(*found, rtol=0, atol=0)


def test_an_fn_that_makes_nothing_of_no_rows(run4: Run) -> None:
    run4(no_rows_no_work)


def frozen_and_short() -> None:
    """The same where x needs no gradient: the weights that fn has tell that others go back."""
    mesh = mc.make_mesh({"ep": 4})
    found = []
    for short in (True, False):
        own, fn = experts_of(mesh.rank, short)
        y = parallel.experts(*given(mesh.rank, 2, True), fn, axis="ep", count=E, mesh=mesh)
        found.append([y, *derivatives(y, [own])])
    assert_close(*found, rtol=0, atol=0)


def test_an_fn_that_makes_nothing_of_no_rows_of_a_frozen_x(run4: Run) -> None:
    run4(frozen_and_short)


@pytest.mark.parametrize("wrong", [E, -1])
def test_choices_are_looked_at_under_transforms(wrong: int) -> None:
    mesh = mc.make_mesh({"ep": 1})
    choice, weight = torch.full((5, 1), wrong), torch.ones(5, 1, dtype=F64)

    def loss(x: Tensor, choice: Tensor) -> Tensor:
        return parallel.experts(x, choice, weight, lambda rows, counts: rows, axis="ep", count=E, mesh=mesh).sum()

    with pytest.raises(mc.MeshError, match=r"is not one of 8 experts"):
        torch.func.grad(loss)(drawn(0, 5, D), choice)
    with pytest.raises(mc.MeshError, match=r"choice is batched by vmap"):
        torch.func.vmap(loss, (None, 0))(drawn(0, 5, D), choice.expand(2, 5, 1) * 0)


WRONG_FNS: dict[str, tuple[Any, str]] = {
    "fewer rows": (lambda rows, counts: rows[:0], r"fn gives f64\[0, 3\] of 1 rows"),
    "one dim": (lambda rows, counts: rows[:, 0], r"fn gives f64\[1\]"),
    "nothing": (lambda rows, counts: None, r"fn gives NoneType"),
    "integers": (lambda rows, counts: rows.long(), r"fn gives i64\[1, 3\][\s\S]*floats"),  # in which weights are 0
}


@pytest.mark.parametrize("which", WRONG_FNS)
def test_what_fn_gives_is_looked_at(which: str) -> None:
    fn, said = WRONG_FNS[which]
    mesh = mc.make_mesh({"ep": 1})
    with pytest.raises(mc.MeshError, match=said):
        parallel.experts(drawn(0, 1, D), torch.zeros(1, 1).long(), drawn(1, 1, 1), fn, axis="ep", count=E, mesh=mesh)


def test_rows_come_by_expert_then_source_then_token() -> None:
    def main() -> tuple[list[float], list[int]]:
        mesh = mc.make_mesh({"ep": 2})
        seen = []

        def fn(rows: Tensor, counts: Tensor) -> Tensor:
            seen.append((rows.flatten().tolist(), counts.tolist()))
            return rows

        x = torch.tensor([[1.0], [2.0], [3.0], [4.0]]) + 10 * mesh.rank
        choice = torch.tensor([[3], [1], [1], [0]])
        y = parallel.experts(x, choice, torch.ones(4, 1), fn, axis="ep", count=4, mesh=mesh)
        assert torch.equal(y, x)
        return seen[0]

    assert mc.launch(main, ranks=2) == [
        ([4.0, 14.0, 2.0, 3.0, 12.0, 13.0], [2, 4]),
        ([1.0, 11.0], [0, 2]),
    ]


def test_under_a_checker() -> None:
    """dp x ep: experts vary along ep alone, tokens along both; the router is replicated."""
    mesh = mc.make_mesh({"dp": 2, "ep": 2})
    x, router, w = drawn(1, 12, D), drawn(2, D, E), drawn(3, E, D, 4)

    def layer(x: Tensor, router: Tensor, run: Callable[..., Tensor]) -> Tensor:
        weight, choice = (x @ router).softmax(-1).topk(2)
        return run(x, choice, weight)

    def body(x: Tensor, router: Tensor, w: Tensor) -> Tensor:
        def run(*given: Tensor) -> Tensor:
            return parallel.experts(*given, by_parts(w), axis="ep", count=E)

        y = layer(x, router, run)
        assert mc.varying_axes(y) == {"dp", "ep"}
        bias = parallel.balance(torch.zeros(E), (x @ router).topk(2).indices, ("dp", "ep"), rate=1.0)
        assert not mc.varying_axes(bias)
        return mc.all_reduce((y**2).sum(), ("dp", "ep"))

    specs = ("(dp ep t) d", "d e", "(ep e) d f")
    ours = mc.shard_map(body, mesh=mesh, in_specs=specs, out_specs="")

    def whole(x: Tensor, router: Tensor, w: Tensor) -> Tensor:
        return (layer(x, router, lambda *given: one_by_one(*given, w, None)[0]) ** 2).sum()

    found = []
    for fn in (ours, whole):
        leaves = [leaf.clone().requires_grad_() for leaf in (x, router, w)]
        found.append([y := fn(*leaves), *torch.autograd.grad(y, leaves)])
    assert_close(*found, rtol=1e-11, atol=1e-11)


class Mixture(nn.Module):
    """Experts beside a router, of which each rank has its own."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False, dtype=F64)
        self.experts = nn.Parameter(torch.zeros(E // n, D, D, dtype=F64))

    def forward(self, x: Tensor, axis: str | None = None) -> Tensor:
        weight, choice = self.router(x).softmax(-1).topk(2)
        if axis is None:
            return x + one_by_one(x, choice, weight, self.experts, None)[0]
        return x + parallel.experts(x, choice, weight, by_parts(self.experts), axis=axis, count=E)


def trained(steps: int = 3) -> None:
    """dp x ep, the gradients of experts summed where their tokens came from: one rank's run of all tokens."""
    mesh = mc.make_mesh({"dp": 2, "ep": 2})
    place = mesh.coordinate
    whole = Mixture(1)
    with torch.no_grad():
        whole.router.weight.copy_(drawn(1, E, D))
        whole.experts.copy_(drawn(2, E, D, D))
    ours = Mixture(2)
    ours.router.weight.data.copy_(whole.router.weight)
    ours.experts.data.copy_(whole.experts.chunk(2)[place["ep"]])
    optimizers = [torch.optim.AdamW(module.parameters(), 0.05) for module in (ours, whole)]
    with mc.use_mesh(mesh):
        for step in range(steps):
            x = drawn(10 + step, 16, D)
            loss = ours(x.chunk(4)[mesh.rank], "ep").square().sum() / 16
            loss.backward()
            ours.router.weight.grad = mc.all_reduce(ours.router.weight.grad, ("dp", "ep"))
            ours.experts.grad = mc.all_reduce(ours.experts.grad, "dp")
            (whole(x).square().sum() / 16).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_close(ours.router.weight, whole.router.weight, rtol=1e-10, atol=1e-10)
    assert_close(ours.experts, whole.experts.chunk(2)[place["ep"]], rtol=1e-10, atol=1e-10)


def test_training(run4: Run) -> None:
    run4(trained)


class Block(nn.Module):
    """Attention and a mixture; ``cp`` None: on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = (nn.Linear(4, wide, bias=False, dtype=F64) for wide in (12, 4))
        self.router = nn.Linear(4, E, bias=False, dtype=F64)
        self.experts = Experts()

    def forward(self, x: Tensor, ep: str | None = None, cp: str | None = None, own: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 6)).transpose(1, 2).chunk(3, -1)
        if ep is None:
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            z = (q @ k.mT * 2**-0.5).masked_fill(~seen, -torch.inf)
            y = z.softmax(-1) @ v
        else:
            y = parallel.context_attention(q, k, v, axis=cp)
        h = (x + self.out(y.transpose(1, 2).flatten(2))).flatten(0, 1)
        weight, choice = self.router(h).softmax(-1).topk(2)
        if ep is None:
            return h + one_by_one(h, choice, weight, self.experts.w, None)[0]
        return h + parallel.experts(h, choice, weight, self.experts, axis=ep, count=E)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(E, 4, 4, dtype=F64))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return by_parts(self.w)(rows, counts)


def composed(shape: dict[str, int], data: tuple[str, ...], ep: str, cp: str | None, grads: Any) -> None:
    """Experts cut along ``ep`` by a plan, sharded along the rest of the data axes; the model sharded along them all."""
    mesh = mc.make_mesh(shape)
    whole, ours = Block(), Block()
    with torch.no_grad():
        for seed, p in enumerate(whole.parameters()):
            p.copy_(drawn(seed, *p.shape))
    ours.load_state_dict(whole.state_dict())
    with mc.use_mesh(mesh):
        parallel.tensor_parallel(ours.experts, {"w": parallel.Cut(0)}, axis=ep)
        if "tp" in shape:
            rest = {"router": "replicated", "experts.*": "replicated", "out": "row"}
            parallel.tensor_parallel(ours, {"qkv": "column", **rest}, axis="tp")
        over = tuple(name for name in data if name != ep)
        parallel.fully_shard(ours, data, grads=grads, axes={"experts": over})
        place = torch.arange(8) if cp is None else parallel.context_order(8, cp)
        cut = [name for name in data if name != cp]
        optimizers = [torch.optim.AdamW(module.parameters(), 0.05) for module in (ours, whole)]
        for step in range(3):
            x = drawn(10 + step, 4, 8, 4)
            mine = mc.shard(x[:, place], tuple(cut), 0)
            mine = mine if cp is None else mc.shard(mine, cp, 1)
            loss = ours(mine, ep, cp).square().sum() / x.numel()
            (loss * mesh.size_of(data, "test") if grads == "mean" else loss).backward()
            (whole(x).square().sum() / x.numel()).backward()
            norms = [
                parallel.clip_grad_norm(ours, 0.5),
                torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5),
            ]
            assert_close(*norms, rtol=1e-9, atol=1e-9)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_close(parallel.full_state_dict(ours), dict(whole.state_dict()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("grads", ["sum", "mean"])
@pytest.mark.parametrize("way", ["ep x tp x fsdp", "ep x cp x dp"])
def test_with_everything(way: str, grads: str) -> None:
    if way == "ep x tp x fsdp":
        given = {"fsdp": 2, "ep": 2, "tp": 2}, ("fsdp", "ep"), "ep", None, grads
    else:
        given = {"dp": 2, "ep": 2, "cp": 2}, ("dp", "ep", "cp"), "ep", "cp", grads
    mc.launch(composed, ranks=8, args=given)


def test_experts_along_the_axis_of_the_sequence(run4: Run) -> None:
    run4(composed, {"dp": 2, "cp": 2}, ("dp", "cp"), "cp", "cp", "mean")


def test_balance_evens_out() -> None:
    """A router that likes two experts sends them less with each step, until all have as much."""

    def main() -> list[int]:
        mesh = mc.make_mesh({"ep": 2})
        likes = torch.tensor([2.0, 1.0, 0.0, 0.0])
        bias, load = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
        for step in range(400):
            scores = likes + torch.randn(64, 4, generator=torch.Generator().manual_seed(2 * step + mesh.rank))
            choice = (scores + bias).topk(1).indices
            load = torch.bincount(choice.flatten(), minlength=4)
            bias = parallel.balance(bias, choice, "ep", rate=0.01, mesh=mesh)
        return mc.all_reduce(load, "ep", mesh=mesh).tolist()

    (first, second) = mc.launch(main, ranks=2)
    assert first == second
    assert max(first) < 2 * min(first)


def test_what_is_sent() -> None:
    def main() -> list[str]:
        mesh = mc.make_mesh({"ep": 2})
        x = torch.ones(4, 2, requires_grad=True)
        with mc.trace() as trace:
            choice, weight = torch.tensor([[0], [1], [1], [0]]), torch.ones(4, 1)
            y = parallel.experts(x, choice, weight, lambda rows, counts: rows * 2, axis="ep", count=2, mesh=mesh)
            y.sum().backward()
        return [event.operation for event in trace.events]

    assert mc.launch(main, ranks=2) == [["all_to_all"] * 5] * 2, "counts and rows, back, and rows twice in backward"
