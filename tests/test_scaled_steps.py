"""A gradient that is not finite on one rank, and optimisers whose step sums over all parameters, where ranks have
different parts of a model: all of them do what one rank does.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm import parallel

F64 = torch.float64
ROWS, TARGETS = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1), dtype=F64)
mse = nn.functional.mse_loss


def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)).to(F64)


def of(parts: nn.ModuleList) -> nn.Sequential:
    return nn.Sequential(*parts)


class Run:
    """A model, made parallel: what a loop needs of it."""

    def __init__(self, way: str, scaler: torch.amp.GradScaler | None = None) -> None:
        self.mesh = mc.make_mesh({"pp": 2, "fsdp": 2} if way == "pp x fsdp" else {"x": 2})
        whole = of(blocks())
        self.own: nn.Module = whole
        index, self.way, loss = self.mesh.coordinate.get("pp", self.mesh.rank), way, mse
        if scaler is not None:
            scaler.scale(torch.zeros(()))  # each rank has one, and only the last stage has a loss

            def scaled(y: Tensor, t: Tensor) -> Tensor:
                return scaler.scale(mse(y, t))

            loss = scaled
        self.loss = loss
        if way == "dp":
            parallel.data_parallel(whole, "x", grads="mean", mesh=self.mesh)
        elif way == "fsdp":
            parallel.fully_shard(whole, "x", grads="mean", mesh=self.mesh)
        elif way == "tp":
            plan = {"0.0": "column", "1.0": "row", "2.0": "column", "3.0": "row"}
            whole[0][1], whole[2][1] = nn.Identity(), nn.Identity()  # type: ignore[index, operator]
            parallel.tensor_parallel(whole, plan, axis="x", mesh=self.mesh)
        else:
            self.own = whole[:2] if index == 0 else whole[2:]
            if way == "pp x fsdp":
                parallel.fully_shard(self.own, "fsdp", grads="mean", mesh=self.mesh)
            self.own = parallel.pipelined(
                self.own, "pp" if way == "pp x fsdp" else "x", loss=loss, microbatches=2, grads="mean", mesh=self.mesh
            )

    def backward(self) -> Tensor:
        part = {"dp": self.mesh.rank, "fsdp": self.mesh.rank, "pp x fsdp": self.mesh.coordinate.get("fsdp")}.get(
            self.way
        )
        x, t = (ROWS, TARGETS) if part is None else (ROWS.chunk(2)[part], TARGETS.chunk(2)[part])
        if isinstance(self.own, parallel.PipelineStep):
            return self.own(x, t)  # type: ignore[no-any-return]
        loss = self.loss(self.own(x), t)
        loss.backward()
        return loss.detach()


def scaled(way: str) -> list[Any]:
    """Three steps, of which the second one has a gradient that is not finite, on the last rank alone."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    run = Run(way, scaler)
    sgd, seen = torch.optim.SGD(run.own.parameters(), lr=0.1), list[Any]()
    for step in range(3):
        sgd.zero_grad()
        run.backward()
        grads = [p.grad for p in run.own.parameters() if p.grad is not None]
        if step == 1 and run.mesh.rank == run.mesh.size - 1:
            grads[-1].view(-1)[-1] = math.inf
        scaler.step(sgd)
        scaler.update()
        seen.append((scaler.get_scale(), copy.deepcopy([p.detach() for p in run.own.parameters()])))
    return seen


@pytest.mark.parametrize("way", ["fsdp", "tp", "pp", "pp x fsdp"])
def test_all_ranks_skip_a_step_or_none(way: str) -> None:
    _skips(mc.launch(scaled, 4 if way == "pp x fsdp" else 2, (way,)))


def test_all_processes_skip_a_step_or_none(pool4: Any) -> None:
    _skips(pool4.run(scaled, "pp x fsdp"))


def _skips(found: list[Any]) -> None:
    for first, second, third in found:
        assert [first[0], second[0], third[0]] == [64.0, 32.0, 32.0]
        assert_close(second[1], first[1], rtol=0, atol=0)
        assert any(not torch.equal(a, b) for a, b in zip(second[1], third[1], strict=True))


def last_has_none(folder: str) -> list[Any]:
    """The last stage has no parameters, and the loop is the same on each rank; so is what is kept of it."""
    mesh = mc.make_mesh({"pp": 2})
    torch.manual_seed(0)
    stage = [nn.Linear(8, 8).to(F64), nn.Tanh()][mesh.rank]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    scaler.scale(torch.zeros(()))
    step = parallel.pipelined(
        stage, "pp", loss=lambda y, t: scaler.scale(mse(y, t)), microbatches=2, grads="mean", mesh=mesh
    )
    adam, seen = torch.optim.AdamW(step.parameters(), lr=0.1), list[Any]()
    for number in range(3):
        adam.zero_grad()
        step(ROWS, TARGETS)
        if number == 1 and mesh.rank == 0:
            stage.weight.grad[0, 0] = math.inf
        scaler.unscale_(adam)
        parallel.clip_grad_norm(step, 1.0, mesh=mesh)
        scaler.step(adam)
        scaler.update()
        seen.append((scaler.get_scale(), copy.deepcopy(step.state_dict())))
    parallel.checkpoint.save(folder, step, adam)
    parallel.checkpoint.load(folder, step, adam)
    assert (
        [name for name, _ in step.named_parameters()]
        == list(step.state_dict())
        == ([] if mesh.rank else ["weight", "bias"])
    )
    return seen


def test_a_stage_without_parameters_skips_too(tmp_path: Path) -> None:
    found = mc.launch(last_has_none, 2, (str(tmp_path),))
    assert [[scale for scale, _ in each] for each in found] == [[64.0, 32.0, 32.0]] * 2
    first, second, third = (state["weight"] for _, state in found[0])
    assert torch.equal(first, second)
    assert not torch.equal(second, third)


def test_copies_need_not_ask_each_other() -> None:
    """Of parameters that are the same on all ranks gradients are, too: nothing is sent."""

    def program() -> int:
        scaler = torch.amp.GradScaler("cpu")
        run = Run("dp", scaler)
        sgd = torch.optim.SGD(run.own.parameters(), lr=0.1)
        run.backward()
        with mc.trace() as t:
            scaler.step(sgd)
            scaler.update()
        return len(t.events)

    assert mc.launch(program, 2) == [0, 0]


def minimised(way: str) -> Any:
    run = Run(way)
    lbfgs = torch.optim.LBFGS(run.own.parameters(), lr=0.5, max_iter=4)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        return run.backward()

    return [lbfgs.step(closure).item() for _ in range(3)], parallel.full_state_dict(run.own)


@pytest.mark.parametrize("way", ["fsdp", "pp", "pp x fsdp"])
def test_lbfgs_is_that_of_one_rank(way: str) -> None:
    losses, state = mc.launch(minimised, 4 if way == "pp x fsdp" else 2, (way,))[0]
    alone = of(blocks())
    lbfgs = torch.optim.LBFGS(alone.parameters(), lr=0.5, max_iter=4)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = mse(alone(ROWS), TARGETS)
        loss.backward()
        return loss

    expected = [lbfgs.step(closure).item() for _ in range(3)]
    assert_close(list(state.values()), list(alone.state_dict().values()), rtol=0, atol=1e-9)
    assert way == "pp x fsdp" or losses == pytest.approx(expected, abs=1e-9)
