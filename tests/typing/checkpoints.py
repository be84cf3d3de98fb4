"""Tensor parallel model saved on one mesh and loaded again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import meshcomm as mc
from meshcomm.parallel import checkpoint, tensor_parallel


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


def build(mesh: mc.Mesh) -> Mlp:
    torch.manual_seed(0)
    model = tensor_parallel(Mlp(), {"up": "column", "down": "row"}, axis="tp", mesh=mesh)
    assert_type(model, Mlp)
    return model


def rank(folder: str) -> float:
    mesh = mc.make_mesh({"tp": 2})
    with mc.use_mesh(mesh):
        model = build(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        path = Path(folder) / "run"
        saved = checkpoint.save(path, model, optimizer, step=1, extra={"lr": 0.1})
        assert_type(saved, str)
        found = mc.parallel.checkpoint.load(path, model, optimizer)
        assert_type(found, checkpoint.Checkpoint)
        newest = checkpoint.latest(path)
        assert_type(newest, str | None)
        return next(model.parameters()).sum().item()


def main() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return mc.launch(rank, ranks=2, args=(folder,))


if __name__ == "__main__":
    main()
