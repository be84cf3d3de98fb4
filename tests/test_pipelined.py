"""pipelined against the model on one rank: five steps of AdamW."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import meshcomm as mc
from meshcomm import parallel
from meshcomm.parallel.pipeline.running.weights_later import WeightsLater

D = 4
F64 = torch.float64
Batches = Sequence[int]


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, D), nn.LayerNorm(D)).to(F64)


def blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [block() for _ in range(count)]


def batch(number: int, rows: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(number)
    return torch.randn(rows, D, dtype=F64, generator=drawn), torch.randn(rows, D, dtype=F64, generator=drawn)


def trained(params: Any, step: Callable[[Tensor, Tensor], Tensor], rows: Batches) -> list[float]:
    """The losses of five steps."""
    adam = torch.optim.AdamW(params, lr=0.01)
    losses = []
    for number in range(5):
        losses.append(step(*batch(number, rows[number % len(rows)])).item())
        adam.step()
        adam.zero_grad()
    return losses


def on_one_rank(stages: list[nn.Module], rows: Batches) -> list[float]:
    model = nn.Sequential(*stages)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    return trained(model.parameters(), step, rows)


def halves(ranks: int, microbatches: int) -> list[list[Any]]:
    """1F1B with each backward in two."""
    table = parallel.Schedule.of("1f1b", ranks, 1, microbatches).table
    return [[new for kind, *at in row for new in ([(kind, *at)] if kind == "F" else [("D", *at), ("W", *at)])]
            for row in table]  # fmt: skip


def equals_one_rank(n: int, v: int, m: int, schedule: Any, rows: Batches, remat: bool = False) -> None:
    mesh = mc.make_mesh({"pp": n})
    stages = blocks(n * v)
    mine = [mesh.rank, 2 * n - 1 - mesh.rank] if schedule == "zbv" else range(mesh.rank, n * v, n)
    step = parallel.pipelined(
        [stages[number] for number in mine], "pp", loss=functional.mse_loss, microbatches=m, grads="mean",
        schedule=schedule, remat=remat, mesh=mesh,
    )  # fmt: skip
    first, last = 0 in mine, n * v - 1 in mine
    found = trained(step.parameters(), lambda x, y: step(x if first else None, y if last else None), rows)
    assert step.peak <= step.schedule.peak[mesh.rank]
    if max(rows) == min(rows) >= m:
        assert step.peak == step.schedule.peak[mesh.rank]
        assert [each.action for each in step.ran] == list(step.schedule.table[mesh.rank])
    expected = blocks(n * v)
    assert found == pytest.approx(on_one_rank(expected, rows), abs=1e-9)
    for number in mine:
        torch.testing.assert_close(stages[number].state_dict(), expected[number].state_dict(), rtol=1e-9, atol=1e-9)


CASES: list[tuple[Any, ...]] = [
    (2, 1, 4, "gpipe", [8]),
    (4, 1, 6, "1f1b", [8, 3, 7]),
    (4, 1, 2, "1f1b", [8], True),
    (4, 1, 1, "1f1b", [8]),
    (3, 1, 4, halves(3, 4), [8, 2]),
    (2, 1, 4, halves(2, 4), [8], True),
    (2, 2, 3, "interleaved", [8, 5]),
    (2, 2, 4, "zbv", [8, 3]),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[:3]}, {case[3] if isinstance(case[3], str) else 'a table'}"
)
def test_five_steps_in_process(case: tuple[Any, ...]) -> None:
    mc.launch(equals_one_rank, ranks=case[0], args=case)


def test_five_steps_on_processes(pool4: Any) -> None:
    pool4.run(equals_one_rank, 4, 1, 6, halves(4, 6), [8, 3])


def threads_of_a_step(microbatches: int, schedule: str) -> int:
    """How many are started, where what goes between stages is too large for an envelope."""
    mesh = mc.make_mesh({"pp": 4})
    wide, rows = 600, 2 * microbatches
    stages = [nn.LayerNorm(wide, dtype=F64) for _ in range(4)]
    for number, stage in enumerate(stages):
        nn.init.normal_(stage.weight, generator=torch.Generator().manual_seed(number))
    whole, own = nn.Sequential(*copy.deepcopy(stages)), stages[mesh.rank]
    x, y = torch.randn(2, rows, wide, dtype=F64, generator=torch.Generator().manual_seed(9))
    step = parallel.pipelined(
        own, "pp", loss=functional.mse_loss, microbatches=microbatches, grads="mean", schedule=schedule, mesh=mesh
    )
    step(x, y)
    step.zero_grad()
    started: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        start = threading.Thread.start
        patch.setattr(threading.Thread, "start", lambda self: (started.append(self.name), start(self)))
        found = step(x, y)
    expected = functional.mse_loss(whole(x), y)
    expected.backward()
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close([p.grad for p in own.parameters()], [p.grad for p in whole[mesh.rank].parameters()])
    torch.testing.assert_close(step.evaluate(x), whole(x).detach() if mesh.rank == 3 else None)
    return len([name for name in started if name.startswith("meshcomm")])


def test_messages_between_stages_need_no_threads(pool4: Any) -> None:
    assert pool4.run(threads_of_a_step, 9, "1f1b") == [0] * 4


def test_large_messages_where_no_memory_is_shared(gloo4: Any) -> None:
    """Nor where each is larger than what is lent elsewhere."""
    assert gloo4.run(threads_of_a_step, 9, "1f1b") == [0] * 4


class Part(nn.Module):
    """Of three, between which trees go."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(D, D, dtype=F64)

    def forward(self, h: Any) -> Any:
        if self.number == 0:
            return {"h": self.linear(h["x"]), "mask": h["ids"] > 2, "skip": (h["x"], 3), "none": None}
        if self.number == 1:
            return {**h, "h": torch.relu_(h["h"])}
        return self.linear(h["h"]) * h["mask"][:, None] + h["skip"][0] * h["skip"][1]


def parts() -> list[nn.Module]:
    torch.manual_seed(1)
    return [Part(number) for number in range(3)]


def trees_go_between() -> None:
    """With a gradient of the batch, a stage that has nothing to train, one that is frozen, weights of rows."""
    mesh = mc.make_mesh({"pp": 3})
    whole, own = nn.Sequential(*parts()), parts()[mesh.rank]
    for stage in (whole[2], *([own] if mesh.rank == 2 else [])):
        stage.requires_grad_(False)
    rows, y = batch(0, 7)
    weights = torch.tensor([1.0, 0, 2, 3, 1, 1, 5], dtype=F64)

    def loss(out: Tensor, target: Tensor) -> Tensor:
        weight = target[:, -1]
        return ((out - target[:, :-1]) ** 2).mean(1) @ weight / weight.sum()

    target = torch.cat([y, weights[:, None]], 1)
    batches = [{"x": rows.clone().requires_grad_(), "ids": torch.arange(7)} for _ in range(2)]
    step = parallel.pipelined(own, "pp", loss=loss, microbatches=3, grads="mean", schedule="zb-h1", mesh=mesh)
    x = batches[0] if mesh.rank == 0 else None
    for _ in range(2):
        found = step(x, target if mesh.rank == 2 else None, weights=weights if mesh.rank == 2 else None)
        expected = loss(whole(batches[1]), target)
        expected.backward()
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close([p.grad for p in own.parameters()], [p.grad for p in whole[mesh.rank].parameters()])
    if mesh.rank == 0:
        torch.testing.assert_close(batches[0]["x"].grad, batches[1]["x"].grad)
    out = step.evaluate(x)
    assert (out is None) == (mesh.rank < 2)
    if out is not None:
        torch.testing.assert_close(out, whole(batches[1]).detach())
    with torch.no_grad():
        torch.testing.assert_close(step(x, target, weights=weights), expected.detach())


def test_trees_go_between_stages() -> None:
    mc.launch(trees_go_between, ranks=3)


def wrong_batches() -> list[str]:
    mesh = mc.make_mesh({"pp": 2})
    step = parallel.pipelined(
        blocks(2)[mesh.rank], "pp", loss=functional.mse_loss, microbatches=4, grads="mean", mesh=mesh
    )
    x, y = batch(0, 8)
    said = []
    for given, weights in [
        ((None, y), None), ((x, None if mesh.rank else y), None), ((x, y[:5]), None), ((x[:0], y[:0]), None),
        (({"a": x, "b": x[:2]}, y), None), ((x[: 4 + mesh.rank], y), None), ((x, y), [1, 2]), ((x, y), [-1, 1, 1, 1]),
        ((x, y), "x"),
    ]:  # fmt: skip
        with pytest.raises(mc.MeshError) as caught:
            step(*given, weights=weights)
        said.append(str(caught.value).splitlines()[0])
    step(x, y, weights=None if mesh.rank else "not looked at here")
    return said


def test_wrong_batches_are_refused_on_every_rank() -> None:
    first, second = mc.launch(wrong_batches, ranks=2)
    assert first == second
    for text, part in zip(first, [
        "x is not given", "not where the last stage is", "not of the same length", "without rows", "has 8 rows and",
        "different lengths", "weights of shape", "negative", "no numbers but str",
    ], strict=True):  # fmt: skip
        assert part in text


class OfItsInput(nn.Module):
    """Linear layers whose weights are made of the input, and of others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(D, D), nn.Linear(D, D * D)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight.tanh()
        return functional.linear(x, self.made(x[:1]).view(D, D)) + functional.linear(x, weight) + x @ weight


class Derivative(nn.Module):
    """What an energy gives by its derivatives, one of them differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        z = x.detach().requires_grad_()
        [force] = torch.autograd.grad(self.energy(z).sum(), z, create_graph=True)
        [plain] = torch.autograd.grad(self.energy(z).sum(), z)
        return x - force + plain


class Odd(nn.Module):
    """Complex weights, one of one dim, and under torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.row = nn.Linear(D, D), nn.Parameter(torch.randn(D))
        self.turn = nn.Parameter(torch.randn(D, D, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(torch.complex(x, x), torch.view_as_complex(self.turn))
        return y.imag * functional.linear(x, self.row)[:, None] + torch.func.vmap(self.linear)(x)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return y


def weights_come_later(kind: type[nn.Module]) -> None:
    """Backward in halves is the whole one."""
    mesh = mc.make_mesh({"pp": 2})
    torch.manual_seed(0)
    stages = [nn.Linear(D, D).to(F64), kind().to(F64)]
    whole = copy.deepcopy(nn.Sequential(*stages))
    step = parallel.pipelined(
        stages[mesh.rank], "pp", loss=functional.mse_loss, microbatches=2, grads="mean", schedule="zb-h1", mesh=mesh
    )
    x, y = batch(0, 4)
    step(x, y)
    sum(functional.mse_loss(whole(x[at]), y[at]) / 2 for at in (slice(2), slice(2, 4))).backward()  # type: ignore[union-attr]
    pairs = [
        (p.grad, q.grad) for p, q in zip(stages[mesh.rank].parameters(), whole[mesh.rank].parameters(), strict=True)
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [OfItsInput, Derivative, Odd, Checkpointed])
def test_weights_of_whatever_layers_come_later(kind: type[nn.Module]) -> None:
    mc.launch(weights_come_later, ranks=2, args=(kind,))


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at inputs
def test_a_compiled_stage_has_its_weights_gradients_at_once() -> None:
    mc.launch(weights_come_later, ranks=2, args=(Compiled,))


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.c, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, (x @ self.a).flatten(0, -2), self.b)
        return torch.mm(y, self.c.t()).view(x.shape)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, x.flip(1), x.flip(1))[0]
        return y


APART: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "linear": (lambda: nn.Linear(8, 3), [2, 5, 8]),
    "products": (Products, [2, 5, 8]),
    "attention": (Attention, [2, 5, 8]),
    "conv1d same": (lambda: nn.Conv1d(2, 4, 3, padding="same", dilation=2), [3, 2, 7]),
    "conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=2, padding=(1, 0), groups=2), [3, 4, 7, 6]),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, bias=False), [2, 2, 3, 4, 3]),
    "conv transposed": (lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1, groups=2), [2, 4, 3, 3]),
}


@pytest.mark.parametrize("name", APART)
def test_the_gradients_of_a_layers_weights_come_after_that_of_its_input(name: str) -> None:
    make, shape = APART[name]
    torch.manual_seed(0)
    layer, x, later = make().to(F64), torch.randn(shape, dtype=F64, requires_grad=True), WeightsLater()
    y = layer(x)
    seed = torch.randn_like(y)
    expected = torch.autograd.grad(y, [x, *layer.parameters()], seed)
    with later.forward():
        again = layer(x)
    torch.testing.assert_close(again, y)
    with later.opened():
        again.backward(seed)
    assert all(p.grad is None for p in layer.parameters())
    later.finish()
    torch.testing.assert_close([x.grad, *(p.grad for p in layer.parameters())], [*expected])


def half_precision() -> None:
    mesh = mc.make_mesh({"pp": 2})
    values: Tensor = torch.linspace(0.9, 1.1, 64, dtype=torch.bfloat16)
    step = parallel.pipelined(
        nn.Identity(), "pp", loss=lambda y, _: y.mean(), microbatches=64, grads="mean", schedule="gpipe", mesh=mesh
    )
    with torch.no_grad():
        loss = step(values[:, None], values)
    assert loss.dtype == torch.bfloat16
    assert loss == values.float().mean().bfloat16()


def test_a_loss_in_half_precision_is_added_up_in_float32() -> None:
    mc.launch(half_precision, ranks=2)


@pytest.mark.parametrize("adaptor", [None, parallel.data_parallel, parallel.fully_shard])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_a_microbatch_of_no_tokens_counts_for_nothing(schedule: str, adaptor: Callable[..., Any] | None) -> None:
    """Its mean is no number; which of them it is differs between data ranks."""
    counts = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 0]])
    chunks = 2 if schedule == "zbv" else 1
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, dtype=F64) for _ in range(2 * chunks)]
    x, targets = torch.randn(2, 6, 4, dtype=F64), torch.where(counts == 0, -100, torch.arange(6) % 4)

    def main() -> tuple[Tensor, dict[str, Tensor]]:
        mesh = mc.make_mesh({"dp": 2, "pp": 2})
        placed = parallel.Schedule.of(schedule, 2, chunks, 3)
        own = [copy.deepcopy(layers[placed.stage(mesh.coordinate["pp"], chunk)]) for chunk in range(chunks)]
        for stage in own if adaptor else ():
            adaptor(stage, "dp", grads="mean", mesh=mesh)
        step = parallel.pipelined(
            own, "pp", loss=functional.cross_entropy, microbatches=3, grads="mean", schedule=schedule, mesh=mesh
        )
        at = mesh.coordinate["dp"] if adaptor else 0
        loss = step(x[at], targets[at], weights=counts[at])
        torch.optim.SGD(step.parameters(), 1.0).step()
        return mc.all_reduce(loss, "dp", "mean", mesh=mesh), parallel.full_state_dict(step, mesh=mesh)

    whole = nn.Sequential(*copy.deepcopy(layers))
    ranks = range(2 if adaptor else 1)
    loss = sum(functional.cross_entropy(whole(x[at]), targets[at]) for at in ranks) / len(ranks)
    loss.backward()
    torch.optim.SGD(whole.parameters(), 1.0).step()
    for found, state in mc.launch(main, ranks=4):
        torch.testing.assert_close(found, loss.detach())
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(state[f"stages.{name}"], value)


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=F64))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return self.scale * functional.cross_entropy(y, t)


class Headed(nn.Module):
    """A last stage that gives its weight, too, for a loss that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4, dtype=F64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(x), self.head.weight


def by_hand(y: Any, t: Tensor) -> Tensor:
    """A mean over the rows that count; over none it has a gradient that is no number, too."""
    counts = t >= 0
    if isinstance(y, tuple):
        y = y[0] + y[0].detach() @ y[1]
    total: Tensor = (y.square().mean(1) * counts).sum() / counts.sum()
    return total


@pytest.mark.parametrize("last", [lambda: nn.Linear(4, 4, dtype=F64), Headed])
def test_a_mean_by_hand_over_no_tokens(last: Callable[[], nn.Module]) -> None:
    counts = torch.tensor([0, 0, 1, 1, 1, 0])
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, dtype=F64), last()]
    x, targets = torch.randn(6, 4, dtype=F64), torch.where(counts == 0, -1, 1)

    def main() -> tuple[Tensor, list[Tensor]]:
        mesh = mc.make_mesh({"pp": 2})
        own = copy.deepcopy(layers[mesh.rank])
        step = parallel.pipelined(own, "pp", loss=by_hand, microbatches=3, grads="mean", mesh=mesh)
        losses = [step(x, targets, weights=counts) for _ in range(2)]  # nothing of the first step stays
        return losses[1], [p.grad for p in own.parameters() if p.grad is not None]

    whole = nn.Sequential(*copy.deepcopy(layers))
    loss = by_hand(whole(x), targets)
    (2 * loss).backward()
    for rank, (found, gradients) in enumerate(mc.launch(main, ranks=2)):
        torch.testing.assert_close(found, loss.detach())
        assert len(gradients) == 2
        for g, p in zip(gradients, whole[rank].parameters(), strict=True):
            torch.testing.assert_close(g, p.grad)


def test_no_tokens_and_a_loss_with_parameters() -> None:
    """Backward goes through the loss, whose parameters may be sharded: all ranks come there."""
    counts, criterion = torch.tensor([[0, 1], [1, 1]]), Scaled()

    def main() -> float:
        mesh = mc.make_mesh({"dp": 2})
        own = parallel.fully_shard(copy.deepcopy(criterion), "dp", grads="mean", mesh=mesh)
        stage = parallel.data_parallel(nn.Linear(4, 4, dtype=F64), "dp", grads="mean", mesh=mesh)
        pipe = mc.make_mesh({"dp": 2, "pp": 1})
        step = parallel.pipelined(stage, "pp", loss=own, microbatches=2, grads="mean", mesh=pipe)
        mine = counts[mesh.rank]
        return float(step(torch.ones(2, 4, dtype=F64), torch.where(mine == 0, -100, 1), weights=mine))

    assert all(math.isfinite(each) for each in mc.launch(main, ranks=2))
