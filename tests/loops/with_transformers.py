"""The Trainer of transformers. Its accelerator would wrap the model and clip by each rank's norm: both are the adaptor's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import meshcomm as mc
from tests.loops.common import loader, made_parallel


class WithLoss(nn.Module):
    """What the Trainer calls by the names of the rows, with the adaptor inside."""

    def __init__(self, way: str, mesh: mc.Mesh) -> None:
        super().__init__()
        self.net = made_parallel(way, mesh)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - y).square().mean()}


class Followed:
    """The loader, and how far it was read."""

    def __init__(self, mesh: mc.Mesh) -> None:
        self.sampler, self.rows = loader(mesh)
        self.rows.collate_fn = self._named

    @staticmethod
    def _named(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack(each) for name, each in zip("xy", zip(*rows, strict=True), strict=True)}

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        return self.sampler.follow(self.rows)


class OfMesh(Trainer):
    """With the rows of the sampler."""

    mesh: mc.Mesh

    def get_train_dataloader(self) -> DataLoader[Any]:
        return Followed(self.mesh)  # type: ignore[return-value]


def trained(way: str, mesh: mc.Mesh) -> nn.Module:
    """After two epochs."""
    model = WithLoss(way, mesh)
    adam = torch.optim.AdamW(model.parameters(), 0.05)
    if way == "dp":
        mc.parallel.shard_optimizer(adam, "dp", mesh=mesh)
    arguments = TrainingArguments(
        tempfile.mkdtemp(), num_train_epochs=2, max_grad_norm=1.0, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.StepLR(adam, 2, 0.5)
    trainer = OfMesh(model, arguments, train_dataset=[0], optimizers=(adam, schedule))  # type: ignore[arg-type]
    trainer.mesh = mesh
    trainer.accelerator.prepare_model = lambda model, **_: model
    trainer.accelerator.clip_grad_norm_ = lambda _, most: mc.parallel.clip_grad_norm(model, most, mesh=mesh)
    trainer.train()
    return model.net
