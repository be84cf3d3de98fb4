"""A loop of data parallel training, as under torchrun."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import meshcomm as mc


def batches(count: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, 8, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)]


def train(steps: int = 2) -> float:
    mc.init()
    mesh = mc.make_mesh({"dp": -1})
    assert_type(mesh.coordinate["dp"], int)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).to(mc.device())
    model = mc.parallel.data_parallel(model, "dp", grads="mean", mesh=mesh)
    assert_type(model, nn.Sequential)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.zeros(())
    for x, y in batches(steps, mc.rank()):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norm = mc.parallel.clip_grad_norm(model, 1.0, mesh=mesh)
        assert_type(norm, Tensor)
        optimizer.step()
    with mc.parallel.no_sync(model):
        pass
    mean = mc.all_reduce(loss.detach(), "dp", "mean", mesh=mesh)
    assert_type(mean, Tensor)
    if mc.is_main():
        print(f"loss {mean:.3f} on {mc.world_size()} ranks")
    return mean.item()


@mc.main_only
def log(step: int, loss: float) -> None:
    print(step, loss)


def main() -> list[float]:
    losses = mc.launch(train, ranks=2, kwargs={"steps": 2})
    assert_type(losses, list[float])
    return losses


if __name__ == "__main__":
    main()
