"""Training in a checked region gives the weights that it gives on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from vma_checks import LINE, I, N, V, draw, kind, network, on_ranks, zeros

import meshcomm as mc

# -------------------------------------------------------------------------------------------------------------- training

STEPS = 3


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "SGD, foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
}


def trained(make: Callable[[Any], torch.optim.Optimizer], parts: int, clip: bool) -> list[Tensor]:
    """What data parallelism on ranks makes of the network; ``parts=0``: without a mesh."""
    net = network()
    optimizer = make(net.parameters())
    x, y = draw(4, 3), draw(4, 2)
    mesh = mc.make_mesh(LINE)
    if parts:
        index = mesh.rank
        x, y = x.chunk(N)[index].clone(), y.chunk(N)[index].clone()
        mc.mark_varying((x, y), "dp")
        mc.mark_varying(net, ())

    def step() -> None:
        optimizer.zero_grad()
        loss = (net(x) - y).square().sum()
        if parts:
            loss = mc.all_reduce(loss, "dp")
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()

    if not parts:
        for _ in range(2 * STEPS):
            step()
        return list(net.parameters())
    with mc.use_mesh(mesh):
        for _ in range(2):
            with mc.check_vma():
                for _ in range(STEPS):
                    step()
                assert {kind(p) for p in net.parameters()} == {I}
                assert {kind(p.grad) for p in net.parameters() if p.grad is not None} == {I}
    return list(net.parameters())


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_data_parallel_training(name: str, clip: bool) -> None:
    expected = trained(OPTIMIZERS[name], 0, clip)
    for found in mc.launch(trained, ranks=N, args=(OPTIMIZERS[name], N, clip)):
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Adafactor"])
def test_fully_sharded_and_tensor_parallel_training(name: str) -> None:
    """A first weight in parts along dp, a second one in parts along tp. Adafactor's steps depend on the whole of each."""
    x, y, w1, w2 = draw(4, 4), draw(4, 2), draw(4, 4), draw(4, 2)

    def whole() -> list[Tensor]:
        a, b = nn.Parameter(w1.clone()), nn.Parameter(w2.clone())
        optimizer = OPTIMIZERS[name]([a, b])
        for _ in range(STEPS):
            optimizer.zero_grad()
            (torch.tanh(x @ a) @ b - y).square().sum().backward()
            optimizer.step()
        return [a, b]

    def parallel() -> tuple[int, int, Tensor, Tensor]:
        mesh = mc.make_mesh({"dp": 2, "tp": 2})
        dp, tp = mesh.coordinate["dp"], mesh.coordinate["tp"]
        a = mc.mark_varying(nn.Parameter(w1.chunk(2)[dp].clone()), "dp", mesh=mesh)
        b = mc.mark_varying(nn.Parameter(w2.chunk(2)[tp].clone()), "tp", mesh=mesh)
        rows, targets = mc.mark_varying((x.chunk(2)[dp].clone(), y.chunk(2)[dp].clone()), "dp", mesh=mesh)
        optimizer = OPTIMIZERS[name]([a, b])
        with mc.use_mesh(mesh), mc.check_vma():
            for _ in range(STEPS):
                optimizer.zero_grad()
                h = torch.tanh(rows @ mc.all_gather(a, "dp"))
                part = mc.shard(h, "tp", dim=1) @ b
                mc.all_reduce((mc.all_reduce(part, "tp") - targets).square().sum(), "dp").backward()
                optimizer.step()
            assert (kind(a), kind(b)) == (frozenset(["dp"]), frozenset(["tp"]))
        return dp, tp, a.detach(), b.detach()

    first, second = whole()
    for dp, tp, a, b in mc.launch(parallel, ranks=4):
        assert_close(a, first.chunk(2)[dp])
        assert_close(b, second.chunk(2)[tp])


def test_scaled_gradients() -> None:
    def run() -> Any:
        found = zeros(1).float()
        gradient = torch.ones(3) * mc.axis_index("dp")
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, torch.ones(1))
        return kind(found)

    assert on_ranks(run) == [V] * N
