"""Other people's loops around models that adaptors have made parallel: the same weights as on one rank."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.testing import assert_close

import meshcomm as mc
from tests.loops.common import WAYS, loader, made_parallel, model

ROOT = Path(__file__).resolve().parents[1]


def alone() -> dict[str, torch.Tensor]:
    """What the loops come to, in torch alone and on all rows."""
    net = model()
    adam = torch.optim.AdamW(net.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 2, 0.5)
    sampler, rows = loader(mc.make_mesh({"dp": 1}))
    for _ in range(2):
        for x, y in sampler.follow(rows):
            adam.zero_grad()
            (net(x) - y).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            adam.step()
            schedule.step()
    return {name: x.flatten() for name, x in net.state_dict().items()}


LIBRARIES = ("accelerate", "lightning", "transformers")


@pytest.fixture(scope="module")
def trained() -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """What the loops of the libraries that are installed come to on two ranks, by library and adaptor."""
    there = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.loops"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([*command, *there], cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=280, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line.removeprefix("WEIGHTS ")) for line in done.stdout.splitlines() if line[:8] == "WEIGHTS "]
    return {
        (library, way): {name: torch.tensor(x, dtype=torch.float64) for name, x in weights.items()}
        for library, way, weights in found
    }


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_on_two_ranks_as_in_torch_alone(library: str, way: str, request: pytest.FixtureRequest) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs the extra `loops`: {library} is not installed")
    assert_close(request.getfixturevalue("trained")[library, way], alone(), rtol=1e-9, atol=1e-10)


def plain_loop(way: str, ranks: int) -> Any:
    """A schedule, gradients scaled, an average of the weights and its batch norm: on this number of ranks."""

    def main() -> Any:
        mesh = mc.make_mesh({"dp": ranks})
        with mc.use_mesh(mesh):
            net = made_parallel(way, mesh, nn.BatchNorm1d(8))
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
            update_bn(sampler.follow(rows), average)
            return mc.parallel.full_state_dict(net), mc.parallel.full_state_dict(average.module)

    return mc.launch(main, ranks=ranks)[0]


@pytest.mark.parametrize("way", ["fsdp", "dp"])
def test_schedules_scaled_gradients_averages_and_their_batch_norm(way: str) -> None:
    assert_close(plain_loop(way, 2), plain_loop(way, 1), rtol=1e-9, atol=1e-11)
