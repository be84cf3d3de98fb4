"""accelerate's loop. The optimizer, the schedule and backward are its own; the model, which has an adaptor, and the loader,
which has its rows, do not go through ``prepare``.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator

import meshcomm as mc
from tests.loops.common import loader, made_parallel


def trained(way: str, mesh: mc.Mesh) -> torch.nn.Module:
    """After two epochs."""
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    model = made_parallel(way, mesh)
    adam = torch.optim.AdamW(model.parameters(), 0.05)
    if way == "dp":
        mc.parallel.shard_optimizer(adam, "dp", mesh=mesh)
    optimizer, schedule = accelerator.prepare(adam, torch.optim.lr_scheduler.StepLR(adam, 2, 0.5))
    sampler, rows = loader(mesh)
    for _ in range(2):
        for x, y in sampler.follow(rows):
            accelerator.backward((model(x) - y).square().mean())
            mc.parallel.clip_grad_norm(model, 1.0, mesh=mesh)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model
