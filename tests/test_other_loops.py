"""Loops around models that adaptors have made parallel, with what torch has for them: the same weights as on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import meshcomm as mc

ROWS, BATCH = 16, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def made_parallel(way: str, mesh: mc.Mesh) -> nn.Module:
    adaptor = {"fsdp": mc.parallel.fully_shard, "dp": mc.parallel.data_parallel}[way]
    return adaptor(model(), "dp", grads="mean", mesh=mesh)


def loader(mesh: mc.Mesh) -> tuple[mc.MeshBatchSampler, DataLoader[Any]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    sampler = mc.MeshBatchSampler(ROWS, BATCH, "dp", mesh=mesh)
    return sampler, DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_sampler=sampler)


def plain_loop(way: str, ranks: int) -> Any:
    """A schedule, gradients scaled, an average of the weights: on this number of ranks."""

    def main() -> Any:
        mesh = mc.make_mesh({"dp": ranks})
        with mc.use_mesh(mesh):
            net = made_parallel(way, mesh)
            average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
            adam = torch.optim.AdamW(net.parameters(), 0.05)
            if way == "dp":
                mc.parallel.shard_optimizer(adam, "dp")
            schedule = torch.optim.lr_scheduler.SequentialLR(
                adam,
                [torch.optim.lr_scheduler.LinearLR(adam, 0.1, total_iters=2), torch.optim.lr_scheduler.StepLR(adam, 2)],
                [2],
            )
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            sampler, rows = loader(mesh)
            for x, y in sampler.follow(rows):
                adam.zero_grad()
                scaler.scale((net(x) - y).square().mean()).backward()
                scaler.step(adam)
                scaler.update()
                schedule.step()
                average.update_parameters(net)
            return mc.parallel.full_state_dict(net), mc.parallel.full_state_dict(average.module)

    return mc.launch(main, ranks=ranks)[0]


@pytest.mark.parametrize("way", ["fsdp", "dp"])
def test_schedules_scaled_gradients_and_averages(way: str) -> None:
    assert_close(plain_loop(way, 2), plain_loop(way, 1), rtol=1e-9, atol=1e-11)
