"""A GPT over pp x dp: cut into stages, run by a schedule, and the schedule drawn beside what really ran.

    python examples/pipeline.py                                        # 2 x 2 processes; or --schedule zb-h1, gpipe
    python examples/pipeline.py --mesh pp=2,dp=1 --schedule zbv
    torchrun --nproc-per-node 4 examples/pipeline.py

``split_stages`` cuts the model where the stages are even and leaves its parameters their names; ``data_parallel`` goes
around each stage, and ``pipelined`` around them all: a schedule is a table of what each rank does, checked when it is
made. Rank 0 then trains the whole model alone and compares the losses. Its embedding is tied to its head, which is on
the last stage. b rows, s tokens, d width, V words, M microbatches of each rank along dp.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.parallel import clip_grad_norm, data_parallel, pipelined, split_stages

STEPS, B, S, D, V, BLOCKS, M = 4, 16, 64, 64, 128, 6, 4
CHUNKS = {"interleaved": 2, "zbv": 2}


class Block(nn.Module):
    """b s d -> b s d."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm2, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then two layers."""
        q, k, v = (each.unflatten(2, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """b s -> b s V."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(V, D), nn.Parameter(torch.zeros(S, D))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(ids) / 8 + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) / 8


def new_model() -> GPT:
    """Drawn alike on all ranks."""
    torch.manual_seed(0)
    return GPT().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens, and the next ones: each is the one before, times 5 plus 1 or 2."""
    draws = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, V, (B,), generator=draws)]
    for _ in range(S):
        ids.append((5 * ids[-1] + torch.randint(1, 3, (B,), generator=draws)) % V)
    whole = torch.stack(ids, 1)
    return whole[:, :-1], whole[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(mesh: mc.Mesh, schedule: str) -> list[float]:
    """Losses; the first rank prints what ran in the last step."""
    n, chunks = mesh.shape["pp"], CHUNKS.get(schedule, 1)
    plan = mc.parallel.Schedule.of(schedule, n, chunks, M)
    stages = split_stages(new_model(), n * chunks)
    own = [stages[plan.stage(mesh.coordinate["pp"], chunk)] for chunk in range(chunks)]
    for stage in own:
        data_parallel(stage, "dp", grads="mean")
    step = pipelined(own, "pp", loss=loss_of, microbatches=M, grads="mean", schedule=plan)
    adam, losses = torch.optim.AdamW(step.parameters(), 3e-3), []
    for at in range(STEPS):
        x, targets = (mc.shard(each, "dp") for each in batch(at))
        with mc.trace() as traced:
            loss = step(x, targets)
        clip_grad_norm(step, 1.0)
        adam.step()
        adam.zero_grad()
        losses.append(mc.all_reduce(loss, "dp", "mean").item())
    ran, events = mc.all_gather_object((step.ran, len(traced.events)), "pp"), traced.table()
    if mesh.rank == 0:
        print(f"the schedule: {plan}\n{plan.draw()}\n\nwhat ran, in {1e3 * traced.seconds:.0f} ms:")
        print(plan.draw(ran=[actions for actions, _ in ran]))
        print(f"\nwhat rank 0 sent for it ({[count for _, count in ran]} calls along pp):\n{events}")
    return losses


def alone() -> list[float]:
    """The whole model on all rows, without a mesh."""
    model, losses = new_model(), []
    adam = torch.optim.AdamW(model.parameters(), 3e-3)
    for at in range(STEPS):
        x, targets = batch(at)
        loss = loss_of(model(x), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def main(shape: dict[str, int], schedule: str) -> None:
    """What each rank runs."""
    mesh = mc.make_mesh(shape)
    with mc.use_mesh(mesh):
        losses = train(mesh, schedule)
        if mesh.rank == 0:
            torch.testing.assert_close(losses, alone(), rtol=1e-9, atol=1e-9)
            print(f"\nloss {losses[0]:.4f} -> {losses[-1]:.4f}: those of one rank")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A pipeline.")
    parser.add_argument("--mesh", default="pp=2,dp=2", help="sizes of the axes (%(default)s)")
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved, zb-h1, zbv (%(default)s)")
    parser.add_argument("--runtime", default="processes", help="or in-process: ranks take turns, and nothing overlaps")
    parser.add_argument("--backend", help="gloo: all ranks on the CPU, where there are fewer GPUs than ranks")
    flags = parser.parse_args()
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in flags.mesh.split(","))}
    ranks, given = math.prod(sizes.values()), (sizes, flags.schedule)
    mc.launch(main, ranks=ranks, args=given, runtime=flags.runtime, backend=flags.backend)
