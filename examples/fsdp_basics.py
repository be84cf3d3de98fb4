"""Fully sharded training on one page: what each rank holds, and what it communicates.

    python examples/fsdp_basics.py                                  # four ranks in this process
    torchrun --nproc-per-node 4 examples/fsdp_basics.py             # four processes

Each rank keeps a quarter of every layer. A layer is gathered when it runs, let go of, gathered again in backward, and
its gradients are reduced to the quarters while backward goes on. The steps are those of the unsharded model.

Shape letters: b = rows, d = width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.parallel import clip_grad_norm, counts, fsdp, fully_shard, pieces
from meshcomm.parallel.full_state import full_state_dict

RANKS, WIDTH, LAYERS, ROWS, STEPS = 4, 64, 4, 32, 5


class Report(NamedTuple):
    """What a rank has to say."""

    rank: int
    held: int
    whole: int
    owned: dict[str, str]
    traffic: str
    losses: list[float]
    apart: float
    square: float


class Tower(nn.Module):
    """Residual layers: b d -> b d."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The next x."""
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def model() -> Tower:
    """The same on every rank: its numbers do not come from the rank's own random state."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Tower().double()


def batch(step: int) -> Tensor:
    """The whole batch of a step."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def orthogonal(g: Tensor) -> Tensor:
    """What Muon does to the gradient of a matrix: singular values near one, by Newton's iteration."""
    x = g / g.norm()
    for _ in range(8):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


@torch.no_grad()
def step_of(net: nn.Module, rest: torch.optim.Optimizer) -> None:
    """Matrices, of which this rank has whole ones, take an orthogonal step; the rest is AdamW's."""
    for p in net.parameters():
        if p.ndim == 2 and p.grad is not None:
            p -= 0.01 * orthogonal(p.grad)
    rest.step()


def train(net: nn.Module, rows: slice, clip: bool) -> list[float]:
    """The loss of each step, on these rows of the batch."""
    rest = torch.optim.AdamW([p for p in net.parameters() if p.ndim != 2], lr=1e-2)
    losses = []
    for step in range(STEPS):
        x = batch(step)[rows]
        loss = (net(x) - x.roll(1, 1)).square().mean()
        net.zero_grad()
        loss.backward()
        clip_grad_norm(net, 1.0) if clip else nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        step_of(net, rest)
        losses.append(loss.item())
    return losses


def as_functions(rows: slice) -> float:
    """The same idea without a module: shard, apply, and a gradient that is the shard's own; its squared norm."""
    w = torch.eye(WIDTH, dtype=torch.float64, requires_grad=True)
    shards, tree = fsdp.shard({"w": w}, "fsdp")
    loss = fsdp.apply(lambda params, x: (x @ params["w"]).square().mean(), shards, tree, batch(0)[rows])
    mc.all_reduce(loss, "fsdp", "mean").backward()
    return mc.all_reduce(shards[0].grad.square().sum(), "fsdp").item()


def held(net: nn.Module) -> dict[str, str]:
    """What this rank keeps of the parameters of which it has something."""
    kept = {name: piece for name, piece in pieces(net).items() if piece.stop > piece.start}
    return {name: "whole" if piece.whole else f"[{piece.start}:{piece.stop}]" for name, piece in kept.items()}


def main() -> Report:
    """What each rank runs."""
    with mc.use_mesh(mc.make_mesh({"fsdp": -1})) as mesh:
        mine = slice(mesh.rank * ROWS // mesh.size, (mesh.rank + 1) * ROWS // mesh.size)
        # Of the layers each matrix is some rank's own, for the orthogonal step; of the rest each rank has a slice.
        net = fully_shard(model(), "fsdp", grads="mean", whole=["layers.*"])
        losses = mc.all_reduce(torch.tensor(train(net, mine, clip=True)), "fsdp", "mean").tolist()
        after, state = counts(net), full_state_dict(net)

        alone = model()
        train(alone, slice(ROWS), clip=False)
        apart = max((x - alone.state_dict()[name]).abs().max().item() for name, x in state.items())
        return Report(
            mesh.rank,
            sum(p.numel() * p.element_size() for p in net.parameters()),
            sum(p.numel() * p.element_size() for p in alone.parameters()),
            held(net),
            f"{after.gathers} all_gather ({after.regathers} for backward, {after.ahead} ahead of need), "
            f"{after.reductions} reduce_scatter",
            losses,
            apart,
            as_functions(mine),
        )


def show(report: Report) -> None:
    """One rank's part of the print."""
    print(
        f"rank {report.rank} keeps {report.held:,} of {report.whole:,} bytes: "
        + ", ".join(f"{name} {part}" for name, part in report.owned.items())
    )
    print(f"  in {STEPS} steps: {report.traffic}")


if __name__ == "__main__":
    reports = mc.launch(main, ranks=RANKS)
    for report in reports:
        show(report)
    first = reports[0]
    if first.rank == 0:
        print("losses:", " ".join(f"{loss:.4f}" for loss in first.losses))
        print(f"sharded by functions: a gradient whose square is {first.square:.4f}")
        print(f"largest difference from the unsharded model: {first.apart:.1e}")
    assert first.apart < 1e-9
