"""A mixture of experts on dp x ep, whose router learns to spread its tokens: the load, drawn.

    python examples/mixture_of_experts.py                              # 2 x 4 ranks in this process
    python examples/mixture_of_experts.py --mesh dp=1,ep=2
    torchrun --nproc-per-node 8 examples/mixture_of_experts.py

Each rank has its own rows and, along ep, its own experts; along dp experts are replicated. ``experts`` sends each token
to the ranks of its two experts and back; ``balance`` changes the bias with which the router chooses, once per step,
until all experts have as much to do. The gradients of what is replicated are summed over all axes, those of an expert
over dp: tokens of the whole ep axis have come to it already. Rank 0 then trains the whole model alone and compares.
t rows, d width, E experts.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.parallel import balance, experts, grouped_matmul

STEPS, T, D, E, CHOSEN, RATE = 60, 512, 16, 8, 2, 0.01
DATA = ("dp", "ep")


class Mixture(nn.Module):
    """t d -> t d, by two of the experts; this rank has ``own`` of them."""

    def __init__(self, own: int, axis: str | None) -> None:
        super().__init__()
        self.axis, self.router = axis, nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, D, 2 * D) / 4), nn.Parameter(torch.randn(E, 2 * D, D) / 6)
        self.register_buffer("bias", torch.linspace(0.5, 0, E))  # it prefers the first experts
        if axis is not None:  # the whole was drawn alike on all ranks, each keeps its part
            first = own * mc.current_mesh().coordinate[axis]
            self.up, self.down = (nn.Parameter(w[first : first + own].clone().detach()) for w in (self.up, self.down))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The result, and what was chosen: with the bias, weighted without it."""
        scores = self.router(x).sigmoid()
        choice = (scores + self.bias).topk(CHOSEN).indices
        weight = scores.gather(1, choice)
        if self.axis is not None:
            return experts(x, choice, weight, self.own, axis=self.axis, count=E), choice
        counts = torch.bincount(choice.flatten(), minlength=E)
        order = choice.flatten().argsort(stable=True)
        rows = self.own(x[order // CHOSEN], counts)[order.argsort()]
        return (rows.unflatten(0, (-1, CHOSEN)) * weight.unsqueeze(-1)).sum(1), choice

    def own(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What the experts here make of their rows."""
        return grouped_matmul(F.gelu(grouped_matmul(rows, self.up, counts)), self.down, counts)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Rows, and what is to be made of them."""
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x.roll(1, 1).sin()


def train(mesh: mc.Mesh) -> tuple[list[float], list[Tensor]]:
    """Losses, and the load of the experts in each step."""
    torch.manual_seed(0)
    model = Mixture(E // mesh.shape["ep"], "ep").double()
    adam, losses, loads = torch.optim.AdamW(model.parameters(), 3e-3), [], []
    for step in range(STEPS):
        x, target = (mc.shard(each, DATA) for each in batch(step))
        y, choice = model(x)
        loss = F.mse_loss(y, target, reduction="sum") / (T * D)  # this rank's share of the mean over all
        loss.backward()
        model.router.weight.grad = mc.all_reduce(model.router.weight.grad, DATA)
        model.up.grad, model.down.grad = mc.all_reduce((model.up.grad, model.down.grad), "dp")
        adam.step()
        adam.zero_grad()
        model.bias = balance(model.bias, choice, DATA, rate=RATE)
        losses.append(mc.all_reduce(loss.detach(), DATA).item())
        loads.append(mc.all_reduce(torch.bincount(choice.flatten(), minlength=E), DATA))
    return losses, loads


def alone() -> list[float]:
    """The whole model on all rows, without a mesh."""
    torch.manual_seed(0)
    model = Mixture(E, None).double()
    adam, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for step in range(STEPS):
        x, target = batch(step)
        y, choice = model(x)
        loss = F.mse_loss(y, target)
        loss.backward()
        adam.step()
        adam.zero_grad()
        load = torch.bincount(choice.flatten(), minlength=E)
        model.bias = model.bias + RATE * (load.sum() - load * E).sign()
        losses.append(loss.item())
    return losses


def drawn(load: Tensor) -> str:
    """A letter per expert, the taller the more tokens it has; ▄ is as many as all have on the average."""
    mean = T * CHOSEN / E
    return "".join("▁▂▃▄▅▆▇█"[min(7, round(3 * tokens / mean))] for tokens in load.tolist())


def main(shape: dict[str, int]) -> None:
    """What each rank runs."""
    mesh = mc.make_mesh(shape)
    with mc.use_mesh(mesh):
        losses, loads = train(mesh)
        if mesh.rank == 0:
            torch.testing.assert_close(losses, alone(), rtol=1e-9, atol=1e-9)
            for step in range(0, STEPS, STEPS // 6):
                print(f"step {step:2}  {drawn(loads[step])}  loss {losses[step]:.4f}")
            most = max(loads[-1].tolist()) * E / (T * CHOSEN)
            print(f"at the end the busiest expert has {most:.2f} x the mean; the losses are those of one rank")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A mixture of experts.")
    parser.add_argument("--mesh", default="dp=2,ep=4", help="sizes of the axes (%(default)s)")
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in parser.parse_args().mesh.split(","))}
    mc.launch(main, ranks=math.prod(sizes.values()), args=(sizes,))
