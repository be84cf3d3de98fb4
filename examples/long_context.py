"""A GPT whose sequences are cut: dp x cp x sp, with attention around a ring along cp and over heads along sp.

    python examples/long_context.py                              # 1 x 2 x 2 ranks in this process
    python examples/long_context.py --mesh dp=2,cp=4,sp=1        # a ring of four
    torchrun --nproc-per-node 4 examples/long_context.py

Each rank has its rows of the batch, and of each row a part of the sequence: what it keeps of activations grows with
s / (cp * sp). Only attention knows of that. Tokens, labels and positions are put in the order of ``context_order``, so
that under the causal mask all have as much to compute; all else is a module as ever, data parallel along all three
axes. Rank 0 then trains on whole sequences alone and compares: losses and gradients are the same.
b rows, s bytes of context, d width, h heads, v vocabulary.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.parallel import context_attention, context_order, data_parallel

STEPS, B, S, D, H, V, LAYERS = 5, 4, 64, 32, 4, 256, 2
DATA = ("dp", "cp", "sp")
TEXT = (__doc__ or "").encode()


class Block(nn.Module):
    """Attention and an MLP: b s d -> b s d."""

    def __init__(self, axis: str | None, heads_axis: str | None) -> None:
        super().__init__()
        self.axes = {"axis": axis, "heads_axis": heads_axis}
        self.norm1, self.qkv, self.proj = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm2, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        """With attention to what all ranks of the sequence have."""
        q, k, v = (each.unflatten(-1, (H, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = context_attention(q, k, v, **self.axes)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Logits of the next byte; without axes of whole sequences."""

    def __init__(self, axis: str | None = None, heads_axis: str | None = None) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(V, D), nn.Embedding(S, D)
        self.blocks = nn.ModuleList(Block(axis, heads_axis) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """b s -> b s v, of these places of the sequence."""
        x = self.token(ids) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(step: int) -> Tensor:
    """The rows of all, b s+1."""
    rng = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TEXT) - S - 1, (B, 1), generator=rng)
    return torch.tensor(list(TEXT))[starts + torch.arange(S + 1)]


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor, places: Tensor) -> tuple[Tensor, float]:
    """The loss, and the norm of all gradients."""
    logits = model(rows[:, places], places)
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, places + 1].flatten())
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), norm


def train(mesh: mc.Mesh) -> list[float]:
    """Losses and norms of gradients."""
    torch.manual_seed(0)
    model = data_parallel(GPT("cp", "sp").double(), DATA, grads="mean")
    optimizer, found = torch.optim.AdamW(model.parameters(), 1e-2), []
    mine = mc.shard(context_order(S, "cp").cpu(), ("cp", "sp"))  # which places of the sequence this rank has
    for step in range(STEPS):
        loss, norm = step_of(model, optimizer, mc.shard(batch(step), "dp"), mine)
        found += [mc.all_reduce(loss, DATA, "mean").item(), norm]
    return found


def alone() -> list[float]:
    """The same of all rows and whole sequences, without a mesh."""
    torch.manual_seed(0)
    model = GPT().double()
    optimizer, found = torch.optim.AdamW(model.parameters(), 1e-2), []
    for step in range(STEPS):
        loss, norm = step_of(model, optimizer, batch(step), torch.arange(S))
        found += [loss.item(), norm]
    return found


def main(shape: dict[str, int]) -> None:
    """What each rank runs."""
    mesh = mc.make_mesh(shape)
    with mc.use_mesh(mesh):
        found = train(mesh)
        if mesh.rank == 0:
            torch.testing.assert_close(found, alone(), rtol=1e-9, atol=1e-9)
            print(f"loss {found[0]:.4f} -> {found[-2]:.4f} on {shape}: the losses and gradients of one rank")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A GPT whose sequences are cut.")
    parser.add_argument("--mesh", default="dp=1,cp=2,sp=2", help="sizes of the axes (%(default)s)")
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in parser.parse_args().mesh.split(","))}
    mc.launch(main, ranks=math.prod(sizes.values()), args=(sizes,))
