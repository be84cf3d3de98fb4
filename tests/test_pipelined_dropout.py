"""Dropout in the stages of a pipeline, by ``mc.rng`` in the layers: the masks of one rank and its whole batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm import parallel

F64 = torch.float64
LAYERS, ROWS = 6, 10
X, TARGETS = torch.randn(2, ROWS, 3, 8, generator=torch.Generator().manual_seed(1), dtype=F64)
STEP = [0]


class Layer(nn.Module):
    """Drops what is of each row, and a table of places that no row has."""

    def __init__(self, number: int, layout: str) -> None:
        super().__init__()
        self.number, self.layout, self.inner = number, layout, nn.Linear(8, 8)
        self.places = nn.Parameter(0.1 * torch.randn(1, 3, 8))

    def forward(self, x: Tensor) -> Tensor:
        with mc.rng(self.layout, seed=(STEP[0], self.number)):
            x = x + nn.functional.dropout(self.inner(x).tanh(), 0.4)
        with mc.rng("...", seed=(STEP[0], self.number, 1)):
            return x + nn.functional.dropout(self.places, 0.4)


def layers(layout: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer(number, layout).to(F64) for number in range(LAYERS)]


def trained(run: Any, params: Any) -> list[float]:
    adam, losses = torch.optim.AdamW(params, lr=1e-2), []
    for step in range(3):
        STEP[0] = step
        adam.zero_grad()
        losses.append(run())
        adam.step()
    return losses


@functools.cache
def alone() -> tuple[list[float], dict[str, Tensor]]:
    with mc.use_mesh(mc.make_mesh({"one": 1})):
        model = nn.Sequential(*layers("b ..."))

        def run() -> float:
            loss = nn.functional.mse_loss(model(X), TARGETS)
            loss.backward()
            return loss.item()

        return trained(run, model.parameters()), dict(model.state_dict())


def on_this_rank(pp: int, v: int, m: int, schedule: Any, remat: bool, dp: int) -> tuple[list[float], dict[str, Tensor]]:
    mesh = mc.make_mesh({"pp": pp, "dp": dp})
    with mc.use_mesh(mesh):
        every, n = layers("(dp b) ..."), pp * v
        places = [chunk * pp + (pp - 1 - mesh.coordinate["pp"] if schedule == "zbv" and chunk % 2 else mesh.coordinate["pp"])
                  for chunk in range(v)]  # fmt: skip
        own = [nn.Sequential() for _ in range(v)]
        for stage, at in zip(own, places, strict=True):
            for number in range(LAYERS * at // n, LAYERS * (at + 1) // n):
                stage.add_module(str(number), every[number])
            parallel.data_parallel(stage, "dp", grads="mean")
        step = parallel.pipelined(own, "pp", loss=nn.functional.mse_loss, microbatches=m, grads="mean",
                                  schedule=schedule, remat=remat)  # fmt: skip
        x, targets = (each.chunk(dp)[mesh.coordinate["dp"]] for each in (X, TARGETS))

        def run() -> float:
            return float(mc.all_reduce(step(x, targets), "dp", "mean"))

        losses = trained(run, step.parameters())
        return losses, parallel.full_state_dict(step)


@pytest.mark.parametrize(
    ("pp", "v", "m", "schedule", "remat", "dp"),
    [
        (1, 1, 3, "1f1b", False, 1),
        (2, 1, 1, "gpipe", False, 1),
        (2, 1, 4, "1f1b", True, 1),
        (4, 1, 2, "1f1b", False, 1),
        (3, 1, 4, "zb-h1", False, 1),
        (3, 2, 4, "interleaved", False, 1),
        (2, 2, 4, "zbv", True, 1),
        (2, 1, 2, "1f1b", False, 2),
    ],
)
def test_the_masks_of_one_rank(pp: int, v: int, m: int, schedule: str, remat: bool, dp: int) -> None:
    losses, state = mc.launch(on_this_rank, pp * dp, (pp, v, m, schedule, remat, dp))[0]
    expected, whole = alone()
    assert losses == pytest.approx(expected, abs=1e-9)
    assert_close({name.rpartition("stages.")[2].split(".", 1)[-1] if "stages." in name else name: x
                  for name, x in state.items()}, whole, rtol=0, atol=1e-9)  # fmt: skip


def test_around_the_step_it_is_refused() -> None:
    def program() -> None:
        with mc.use_mesh(mc.make_mesh({"pp": 2})):
            stage = nn.Sequential(nn.Linear(8, 8, dtype=F64), nn.Dropout(0.4))
            step = parallel.pipelined(stage, "pp", loss=nn.functional.mse_loss, microbatches=2, grads="mean")
            step.eval()
            with mc.rng("b ...", seed=0):
                step(X, TARGETS)  # nothing is drawn
            step.train()
            with mc.rng("b ...", seed=0):
                step(X, TARGETS)

    with pytest.raises(mc.MeshError, match=r"stands around the step[\s\S]*inside of the layers"):
        mc.launch(program, 2)
