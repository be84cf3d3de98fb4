"""Modules as their users have written them, under data_parallel and fully_shard, beside one rank: what they do with
parameters, buffers and gradients that plain layers do not do. Each was found where torch's own adaptors take it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.parallel import data_parallel, full_state_dict, fully_shard, no_sync, reduce_gradients, tensor_parallel

D, ROWS, TOLERANCE = 6, 4, 1e-9
F64 = torch.float64


def numbers(step: int) -> Tensor:
    return torch.randn(ROWS, D, generator=torch.Generator().manual_seed(step), dtype=F64)


def words(step: int) -> Tensor:
    return torch.randint(9, (ROWS, 5), generator=torch.Generator().manual_seed(step))


class Borrows(nn.Module):
    """Calls a layer with another weight than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.other = nn.Parameter(torch.eye(D))

    def forward(self, x: Tensor) -> Tensor:
        borrowed = {"weight": self.other, "bias": self.layer.bias}
        out: Tensor = torch.func.functional_call(self.layer, borrowed, (x,))
        return out + torch.func.functional_call(self.layer, {"weight": 2 * self.layer.weight}, (out,))


class Named(nn.Parameter):
    """A parameter of another class."""


class Tagged(nn.Module):
    """Reads what somebody has set on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Named(torch.randn(D, D))
        self.weight.scale = 0.5  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        scale: float = self.weight.scale  # type: ignore[attr-defined]
        return x @ self.weight * scale


class Expanded(nn.Module):
    """With buffers in which one number stands at many places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.register_buffer("ones", torch.rand(1, D).expand(ROWS, D))
        self.register_buffer("one", torch.rand(()).expand(3, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.ones[: len(x)] + self.one[0]


class Clamps(nn.Module):
    """Writes to its own weight before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)
        out: Tensor = self.layer(x)
        return out


class Tied(nn.Module):
    """Sparse rows and a dense use of one weight."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(9, D, sparse=sparse)
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.words(x)) @ self.words.weight.T


def scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.Tanh())))


def traced() -> nn.Module:
    inner = torch.jit.trace(nn.Sequential(nn.Linear(D, D), nn.Tanh()).double(), torch.zeros(2, D, dtype=F64))
    return nn.Sequential(nn.Linear(D, D), inner)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor] = numbers
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    ways: tuple[str, ...] = ("dp", "fsdp", "units")


SGD, DP = torch.optim.SGD, ("dp",)
CASES = {
    "functional_call inside": Case(Borrows),
    "a class and attributes of a parameter": Case(Tagged),
    "expanded buffers": Case(Expanded, ways=("dp", "fsdp", "units", "tp")),
    "scripted": Case(scripted, ways=("dp", "tp")),
    "traced": Case(traced, ways=("dp", "tp")),
    "writes in forward": Case(Clamps, ways=DP),
    "sparse": Case(lambda: nn.Embedding(9, D, sparse=True), words, torch.optim.SparseAdam, DP),
    "sparse and dense": Case(
        lambda: nn.Sequential(nn.Embedding(9, D, sparse=True), nn.Linear(D, D)), words, torch.optim.Adagrad, DP
    ),
    "sparse, bag": Case(
        lambda: nn.Sequential(nn.EmbeddingBag(9, D, sparse=True, mode="sum"), nn.Linear(D, D)), words, SGD, DP
    ),
    "sparse, tied": Case(lambda: Tied(sparse=False), words, SGD, ("dp", "fsdp")),
}


def made(case: Case) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return case.make().double()


def train(case: Case, module: nn.Module, rows: slice) -> None:
    optimizer = case.optimizer(module.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        module(case.inputs(step)[rows]).square().mean().backward()
        optimizer.step()


def spread(way: str, module: nn.Module) -> nn.Module:
    if way == "dp":
        return data_parallel(module, "x", grads="mean")
    if way == "tp":
        return tensor_parallel(module, {"*": "replicated"}, axis="x")
    units = [child for child in module.children() if next(child.parameters(), None) is not None]
    return fully_shard(module, "x", grads="mean", units=units if way == "units" and units else None)


def trained(name: str, way: str) -> dict[str, Tensor]:
    with mc.use_mesh(mc.make_mesh({"x": 2})) as mesh:
        module = spread(way, made(CASES[name]))
        train(CASES[name], module, slice(None) if way == "tp" else slice(mesh.rank * 2, mesh.rank * 2 + 2))
        return full_state_dict(module)


def alone(name: str) -> dict[str, Tensor]:
    module = made(CASES[name])
    train(CASES[name], module, slice(None))
    return module.state_dict()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=0, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


WAYS = [(name, way) for name, case in CASES.items() for way in case.ways]


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:Sparse invariant checks")
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_as_on_one_rank(name: str, way: str) -> None:
    expected = alone(name)
    for found in mc.launch(trained, ranks=2, args=(name, way)):
        assert_same(found, expected)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_on_processes(pool4: Any) -> None:
    for name, way in WAYS:
        if name not in ("scripted", "traced"):
            expected = alone(name)
            for found in pool4.run(trained_of_four, name, way)[:2]:
                assert_same(found, expected)


def trained_of_four(name: str, way: str) -> dict[str, Tensor]:
    with mc.use_mesh(mc.make_mesh({"y": 2, "x": 2})) as mesh:
        module = spread(way, made(CASES[name]))
        at = mesh.coordinate["x"]
        train(CASES[name], module, slice(None) if way == "tp" else slice(at * 2, at * 2 + 2))
        return full_state_dict(module, mesh=mesh)


# -------------------------------------------------------------------------------------------------- sparse gradients


def sparse_gradient(uses: list[list[int]], how: dict[str, Any]) -> Tensor | None:
    """What comes of a loss over these rows on each rank."""
    with mc.use_mesh(mc.make_mesh({"x": len(uses)})) as mesh:
        module = nn.ModuleList([nn.Embedding(5, 2, sparse=True, dtype=F64), nn.Linear(2, 2, dtype=F64)])
        module.forward = lambda ids, x: module[0](ids).sum() if len(ids) else module[1](x).sum()
        data_parallel(module, "x", **how)
        module(torch.tensor(uses[mesh.rank], dtype=torch.int64), torch.ones(1, 2, dtype=F64)).backward()
        return module[0].weight.grad


@pytest.mark.parametrize(
    ("uses", "rows"),
    [
        ([[0, 0, 3], [3, 4]], {0: 2.0, 3: 2.0, 4: 1.0}),
        ([[1], []], {1: 1.0}),  # one rank has none
        ([[], [2], [2]], {2: 2.0}),
        ([[0]], {0: 1.0}),
        ([[], []], None),  # nobody has any
    ],
)
def test_sparse_gradients_are_summed_by_rows(uses: list[list[int]], rows: dict[int, float] | None) -> None:
    for how, over in (({"grads": "sum"}, 1), ({"grads": "mean", "reduce_dtype": torch.float32}, len(uses))):
        for g in mc.launch(sparse_gradient, ranks=len(uses), args=(uses, how)):
            if rows is None:
                assert g is None
                continue
            assert g.is_sparse
            assert g.dtype == F64
            assert g.coalesce().indices()[0].tolist() == sorted(rows)
            assert [row[0].item() * over for row in g.coalesce().values()] == pytest.approx(
                [rows[i] for i in sorted(rows)]
            )


def test_sparse_gradients_that_were_collected() -> None:
    def main() -> list[float]:
        with mc.use_mesh(mc.make_mesh({"x": 2})) as mesh:
            layer = data_parallel(nn.Embedding(4, 1, sparse=True), "x", grads="sum")
            with no_sync(layer):
                layer(torch.tensor([mesh.rank])).sum().backward()
            layer(torch.tensor([3])).sum().backward()
            with no_sync(layer):
                layer(torch.tensor([2])).sum().backward()
            reduce_gradients(layer)
            return layer.weight.grad.to_dense().flatten().tolist()

    assert mc.launch(main, ranks=2) == [[1.0, 1.0, 2.0, 2.0]] * 2


def test_sparse_and_dense_gradients_of_one_weight() -> None:
    """Dense where any rank has a dense one."""

    def main() -> list[float]:
        with mc.use_mesh(mc.make_mesh({"x": 2})) as mesh:
            layer = nn.Embedding(3, 1, sparse=True)
            nn.init.ones_(layer.weight)

            def forward(ids: Tensor) -> Tensor:
                return layer.weight.square().sum() if mesh.rank else F.embedding(ids, layer.weight, sparse=True).sum()

            layer.forward = forward  # type: ignore[method-assign]
            data_parallel(layer, "x", grads="sum")
            layer(torch.tensor([1])).backward()
            assert not layer.weight.grad.is_sparse
            return layer.weight.grad.flatten().tolist()

    assert mc.launch(main, ranks=2) == [[2.0, 3.0, 2.0]] * 2


# ---------------------------------------------------------------------------------------------------------- refusals


class Momentum(nn.Module):
    """Moves its slow part in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(D, D), nn.Linear(D, D).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return self.fast(x) - self.slow(x)


def refused(make: Callable[[], nn.Module], x: Tensor, how: Callable[[nn.Module], nn.Module]) -> None:
    with mc.use_mesh(mc.make_mesh({"x": 2})):
        how(make())(x).sum().backward()


@pytest.mark.parametrize(
    ("make", "x", "text"),
    [
        (lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), torch.tensor([1]), "'0' has sparse gradients"),
        (lambda: nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), torch.tensor([1]), "'0' has max_norm"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))), torch.ones(1, 2), "'0' is torch.jit's"),
        (Momentum, torch.ones(1, D), "were written in place during forward"),
    ],
)
def test_what_shards_cannot_do_says_the_way(make: Callable[[], nn.Module], x: Tensor, text: str) -> None:
    with pytest.raises(mc.MeshError, match=rf"{text}[\s\S]*fix: "):
        mc.launch(refused, ranks=2, args=(make, x, lambda m: fully_shard(m, "x", grads="sum")))


def test_a_gathered_weight_of_a_unit_that_is_written_is_refused() -> None:
    with pytest.raises(mc.MeshError, match="parameters of 'layer' were written in place during forward"):
        mc.launch(refused, ranks=2, args=(
            Clamps, torch.ones(1, D), lambda m: fully_shard(m, "x", grads="sum", units=["layer"])))  # fmt: skip


def test_max_norm_of_copies_is_refused() -> None:
    with pytest.raises(mc.MeshError, match=r"data_parallel: '0' has max_norm: each rank would scale"):
        mc.launch(refused, ranks=2, args=(
            lambda: nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), torch.tensor([1]),
            lambda m: data_parallel(m, "x", grads="sum")))  # fmt: skip
