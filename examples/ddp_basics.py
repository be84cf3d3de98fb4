"""Data parallelism on one page: the same model on each rank, other rows of the batch, and equal gradients.

    python examples/ddp_basics.py                              # 2 ranks in this process
    torchrun --nproc-per-node 2 examples/ddp_basics.py

It trains one model three times: as a function (``pvary`` and a reduced loss), as a module with ``data_parallel``, and
alone on the whole batch. All three take the same steps. b rows, d features.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.parallel import data_parallel, join, no_sync
from meshcomm.training.process import is_distributed, world_size

STEPS, B, D = 5, 8, 16


def make_model() -> nn.Module:
    """Each call gives the same values: a seed of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(D, 4 * D), nn.Tanh(), nn.Linear(4 * D, 1)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The rows of all ranks: b d, b 1."""
    rng = torch.Generator().manual_seed(1 + step)
    x = torch.randn(B, D, dtype=torch.float64, generator=rng)
    return x, x.square().mean(1, keepdim=True)


def as_function(mesh: mc.Mesh) -> list[Tensor]:
    """The library's rule: what is replicated goes through pvary, and the loss is reduced once."""
    model = make_model().to(mesh.device)
    params = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    adam = torch.optim.AdamW(params.values(), lr=0.01)
    for step in range(STEPS):
        x, target = (mc.shard(each.to(mesh.device), "dp") for each in batch(step))
        y = torch.func.functional_call(model, mc.pvary(params, "dp"), (x,))
        loss = mc.all_reduce(F.mse_loss(y, target), "dp", "mean")
        loss.backward()  # the gradients are those of all rows already
        adam.step()
        adam.zero_grad()
    return [p.detach() for p in params.values()]


def as_module(mesh: mc.Mesh) -> list[Tensor]:
    """The same with a module that knows nothing of it, in DistributedDataParallel's way: the loss is local."""
    model = data_parallel(make_model().to(mesh.device), "dp", grads="mean", bucket_mb=1)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, target = (mc.shard(each.to(mesh.device), "dp") for each in batch(step))
        with mc.trace() as t:
            loss = F.mse_loss(model(x), target)
            loss.backward()
        if mesh.rank == 0 and step < 2:
            forward, backward = t.summary(backward=False), t.summary(backward=True)
            print(f"step {step}: loss {loss.item():.4f}; sent forwards: {forward}; backwards: {backward}")
        adam.step()
        adam.zero_grad()
    return [p.detach() for p in model.parameters()]


def alone(mesh: mc.Mesh) -> list[Tensor]:
    """Each rank by itself, with all rows."""
    model = make_model().to(mesh.device)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, target = (each.to(mesh.device) for each in batch(step))
        F.mse_loss(model(x), target).backward()
        adam.step()
        adam.zero_grad()
    return [p.detach() for p in model.parameters()]


def uneven(mesh: mc.Mesh) -> None:
    """Micro-steps without communication, and ranks that run out of data at different times."""
    model = data_parallel(make_model().to(mesh.device), "dp", grads="sum")
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        sgd.step()
        sgd.zero_grad()

    x, _ = (each.to(mesh.device) for each in batch(0))
    with mc.trace() as sent, no_sync(model):
        model(x).sum().backward()
    model(x).sum().backward()  # reduces both
    step()
    with join(model, step=step):  # who is done contributes zero until all are
        for _ in range(1 + mesh.rank):
            model(x).sum().backward()
            step()
    spread = max(mc.all_reduce(p.detach(), "dp", "max").sub(p).abs().max().item() for p in model.parameters())
    if mesh.rank == 0:
        print(f"under no_sync sent: {sent.summary()}; after uneven batches parameters differ by {spread}")


def main() -> None:
    """What each rank runs."""
    mesh = mc.make_mesh({"dp": -1})
    with mc.use_mesh(mesh):
        x, _ = batch(0)
        held = sum(p.nbytes for p in make_model().parameters())
        print(f"rank {mesh.rank} of {mesh.size}: {held} bytes of parameters, {len(x) // mesh.size} of {len(x)} rows")
        whole, function, module = alone(mesh), as_function(mesh), as_module(mesh)
        for found in (function, module):
            torch.testing.assert_close(found, whole)
        uneven(mesh)
        if mesh.rank == 0:
            print(f"after {STEPS} steps of AdamW: function, module and one rank alone agree")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Data parallelism on one page.")
    parser.add_argument("--ranks", type=int, default=2, help="ranks in this process (2); torchrun has its own number")
    options = parser.parse_args()
    mc.launch(main, ranks=world_size() if is_distributed() else options.ranks)
