"""pipelined against the model on one rank: five steps of AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import meshcomm as mc
from meshcomm import parallel

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
