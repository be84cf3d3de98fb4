"""What the loops train, on any number of ranks the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshcomm as mc

ROWS, BATCH = 16, 4
WAYS = ("fsdp", "dp")


def model(*norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *norm, nn.Linear(8, 1)).double()


def made_parallel(way: str, mesh: mc.Mesh, *norm: nn.Module) -> nn.Module:
    adaptor = {"fsdp": mc.parallel.fully_shard, "dp": mc.parallel.data_parallel}[way]
    whole = mc.parallel.convert_batch_norm(model(*norm), "dp", mesh=mesh)
    return adaptor(whole, "dp", grads="mean", mesh=mesh)


def loader(mesh: mc.Mesh) -> tuple[mc.MeshBatchSampler, DataLoader[Any]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    sampler = mc.MeshBatchSampler(ROWS, BATCH, "dp", mesh=mesh)
    return sampler, DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_sampler=sampler)
