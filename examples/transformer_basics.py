"""A GPT on replica × fsdp × tp: a module that knows nothing of it, cut by a plan of names, with sequence parallelism.

    python examples/transformer_basics.py                              # 2 x 2 x 2 ranks in this process
    python examples/transformer_basics.py --mesh replica=1,fsdp=1,tp=4
    torchrun --nproc-per-node 8 examples/transformer_basics.py

Along tp each rank holds and computes a part of every matrix, some of the heads and some of the vocabulary, and between
attention and MLP a part of the sequence. Along fsdp it keeps a slice of that part, gathered block by block, and
along replica ranks keep the same; along both it sees other rows. Rank 0 then trains the whole model alone and compares.
b rows, s bytes of context, d width, h heads, v vocabulary.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.parallel import Column, full_state_dict, fully_shard, tensor_parallel, vocab_cross_entropy

STEPS, B, S, D, H, V, LAYERS = 5, 4, 32, 32, 4, 256, 2
DATA = ("replica", "fsdp")
TEXT = (__doc__ or "").encode()

PLAN = {
    "token": "vocab",  # rows of the table; its result is cut along s
    "head": "column",  # the same weight: logits of a part of the vocabulary
    "position": "split",
    "*.qkv": Column(parts=3),  # three matrices in one: heads of q, of k and of v
    "*.proj": "row",
    "*.up": "column",
    "*.down": "row",
    "*norm*": "sequence",
}


class Block(nn.Module):
    """Attention and an MLP: b s d -> b s d."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm2, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        """However many heads this rank has."""
        q, k, v = (
            each.unflatten(-1, (-1, D // H)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(V, D), nn.Embedding(S, D)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        """b s -> b s v."""
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def make_model() -> GPT:
    """Of index 0 alone the values count: the same seed gives the same model on any mesh."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT().double()


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bytes and those that follow, of all rows: b s each."""
    starts = torch.randint(len(TEXT) - S, (B, 1), generator=torch.Generator().manual_seed(step))
    rows = torch.tensor(list(TEXT))[starts + torch.arange(S + 1)].to(device)
    return rows[:, :-1], rows[:, 1:]


def train(mesh: mc.Mesh) -> tuple[list[float], dict[str, Tensor] | None]:
    """On the mesh; the parameters on rank 0."""
    model = make_model().to(mesh.device)
    whole = sum(p.nbytes for p in model.parameters())
    tensor_parallel(model, PLAN, axis="tp", sequence=True)
    fully_shard(model, "fsdp", grads="mean", replica_axis="replica", units=[Block])
    held = sum(p.nbytes for p in model.parameters())
    print(f"rank {mesh.rank} at {mesh.coordinate}: {held} of {whole} bytes held, {B // mc.axis_size(DATA)} rows")
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    losses = []
    for step in range(STEPS):
        ids, target = (mc.shard(each, DATA) for each in batch(step, mesh.device))
        with mc.trace() as t:
            loss = vocab_cross_entropy(model(ids), target, axis="tp")  # the same on all ranks of tp
            loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(mc.all_reduce(loss.detach(), DATA, "mean").item())
        if mesh.rank == 0 and step == 1:
            print(f"a step sends forwards {t.summary(backward=False)}")
            print(f"    and backwards {t.summary(backward=True)}")
    return losses, full_state_dict(model)


def alone(device: torch.device) -> tuple[list[float], dict[str, Tensor]]:
    """The whole model with all rows."""
    model = make_model().to(device)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    losses = []
    for step in range(STEPS):
        ids, target = batch(step, device)
        loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().cpu() for name, p in model.state_dict().items()}


def main(shape: dict[str, int]) -> None:
    """What each rank runs."""
    mesh = mc.make_mesh(shape)
    with mc.use_mesh(mesh):
        found = train(mesh)
        if mesh.rank == 0:
            torch.testing.assert_close(found, alone(mesh.device))
            print(
                f"losses {', '.join(f'{loss:.4f}' for loss in found[0])}: those of one rank, and so are all parameters"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A GPT on replica × fsdp × tp.")
    parser.add_argument("--mesh", default="replica=2,fsdp=2,tp=2", help="sizes of the axes (%(default)s)")
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in parser.parse_args().mesh.split(","))}
    mc.launch(main, ranks=math.prod(sizes.values()), args=(sizes,))
