"""lightning's Trainer. Each process is alone for it; gradients and rows are the adaptor's and the sampler's."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

import meshcomm as mc
from tests.loops.common import loader, made_parallel


class Module(lightning.LightningModule):
    """As one writes it, with the adaptor inside."""

    def __init__(self, way: str, sampler: mc.MeshBatchSampler, mesh: mc.Mesh) -> None:
        super().__init__()
        self.way, self.sampler, self.mesh = way, sampler, mesh
        self.net = made_parallel(way, mesh)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        mc.parallel.clip_grad_norm(self.net, 1.0, mesh=self.mesh)

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(self.parameters(), 0.05)
        if self.way == "dp":
            mc.parallel.shard_optimizer(adam, "dp", mesh=self.mesh)
        return [adam], [{"scheduler": torch.optim.lr_scheduler.StepLR(adam, 2, 0.5), "interval": "step"}]

    def on_train_epoch_start(self) -> None:
        self.sampler.set_epoch(self.current_epoch)


def trained(way: str, mesh: mc.Mesh) -> torch.nn.Module:
    """After two epochs."""
    sampler, rows = loader(mesh)
    module = Module(way, sampler, mesh)
    trainer = lightning.Trainer(
        max_epochs=2, strategy=SingleDeviceStrategy("cpu"), plugins=[LightningEnvironment()], use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, rows)
    return module.net
