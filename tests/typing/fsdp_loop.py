"""A fully sharded loop with micro batches, metrics and a whole state at its end."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import assert_type

import meshcomm as mc
from meshcomm.parallel import clip_grad_norm, full_state_dict, fully_shard, load_full_state_dict, no_sync


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return x + y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def micro_batches(mesh: mc.Mesh, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(mesh.rank)
    for _ in range(count):
        yield torch.randn(2, 8, generator=generator), torch.randint(4, (2,), generator=generator)


def train() -> dict[str, Tensor] | None:
    mesh = mc.make_mesh({"replica": 1, "fsdp": 2})
    with mc.use_mesh(mesh):
        torch.manual_seed(0)
        model = fully_shard(Model(), "fsdp", grads="sum", units=["blocks.*"], replica_axis="replica")
        assert_type(model, Model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        meter = mc.Metrics({"loss": "mean", "seen": "sum"})
        for at, (x, y) in enumerate(micro_batches(mesh, 2)):
            if at == 0:
                with no_sync(model):
                    F.cross_entropy(model(x), y).backward()
                continue
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            meter.add("loss", loss.detach())
            meter.add("seen", len(x))
        clip_grad_norm(model, 1.0)
        optimizer.step()
        found = meter.reduce(("replica", "fsdp"))
        assert_type(found, dict[str, float])
        state = full_state_dict(model, dst=0)
        assert_type(state, dict[str, Tensor] | None)
        everywhere = full_state_dict(model)
        assert_type(everywhere, dict[str, Tensor])
        load_full_state_dict(model, everywhere)
        return state


def main() -> list[dict[str, Tensor] | None]:
    return mc.launch(train, 2)


if __name__ == "__main__":
    main()
