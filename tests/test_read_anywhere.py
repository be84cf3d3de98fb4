"""Parameters that each rank uses in its own way ("once", "summed"), read by who is not the module that has them: against
one rank, in values and after steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import meshcomm as mc
from meshcomm.parallel import Block, Cut, full_state_dict, fully_shard, tensor_parallel

F64 = torch.float64


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(shape, dtype=F64)) for shape in ((8, 4), (4, 8)))
        self.bias, self.gain = (nn.Parameter(torch.randn(length, dtype=F64)) for length in (4, 1))

    def run(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.up.T) * self.gain) @ self.down.T + self.bias


class Outer(nn.Module):
    """``how`` says who reads the parameters of the module inside."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, Inner()

    def read(self, x: Tensor) -> Tensor:
        inner = self.inner
        return (torch.tanh(x @ inner.up.T) * inner.gain) @ inner.down.T + inner.bias * inner.bias

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "method":
            return self.inner.run(x)
        if self.how == "parent":
            return self.read(x)
        y: Tensor = checkpoint(self.read, x, use_reentrant=self.how == "reentrant")
        return y


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.mlp = nn.Linear(4, 4, dtype=F64), Outer(how)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(torch.tanh(self.first(x)))
        return y


PLAN = {
    "mlp.inner.up": Cut(0), "mlp.inner.down": Cut(1), "mlp.inner.bias": "once", "mlp.inner.gain": "summed",
    "mlp": Block("enter", "leave"), "first": "replicated",
}  # fmt: skip


def reads(how: str, sharded: bool) -> None:
    mesh = mc.make_mesh({"fsdp": 2 if sharded else 1, "tp": 2})
    torch.manual_seed(0)
    alone = Net(how)
    module = copy.deepcopy(tensor_parallel(copy.deepcopy(alone), PLAN, axis="tp", mesh=mesh))
    bias = module.mlp.inner.bias
    for each in (bias, module.get_parameter("mlp.inner.bias")):
        assert isinstance(each, nn.Parameter)  # as it is, for who looks after it
    if sharded:
        fully_shard(module, "fsdp", grads="sum", mesh=mesh)
    steps = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (module, alone)]
    for _ in range(2):
        rows = torch.randn(mesh.size_of("fsdp"), 3, 4, dtype=F64)
        y = module(rows[mesh.coordinate["fsdp"]])
        assert_close(y, alone(rows[mesh.coordinate["fsdp"]]))
        y.square().sum().backward()
        alone(rows).square().sum().backward()
        for step in steps:
            step.step()
            step.zero_grad()
    for name, whole in full_state_dict(module).items():
        assert_close(whole, alone.state_dict()[name])


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("how", ["method", "parent", "again", "reentrant"])
def test_who_reads_a_parameter(how: str, sharded: bool) -> None:
    mc.launch(reads, 4 if sharded else 2, (how, sharded))


def methods_alone() -> None:
    """Of the module, called from outside."""
    mesh = mc.make_mesh({"tp": 2})
    torch.manual_seed(0)
    alone = Inner()
    module = tensor_parallel(
        copy.deepcopy(alone), {"up": Cut(0), "down": Cut(1), "bias": "once", "gain": "summed"}, axis="tp", mesh=mesh
    )
    x = torch.ones(2, 4, dtype=F64)
    assert_close(mc.all_reduce(module.run(x), "tp", mesh=mesh), alone.run(x))


def test_a_method_that_is_not_forward() -> None:
    mc.launch(methods_alone, 2)


class Headed(nn.Module):
    """Its head is read by the loss alone, or is its first layer."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4, bias=False, dtype=F64), nn.ModuleList([nn.Linear(4, 4, dtype=F64)])
        self.head = nn.Linear(4, 4, bias=False, dtype=F64)
        if tied:
            self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": torch.tanh(self.blocks[0](self.first(x)))}


def loss_of(net: Headed, x: Tensor) -> Tensor:
    return nn.functional.linear(net(x)["hidden"], net.head.weight).square().mean()


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_read_by_the_loss_of_a_sharded_module(tied: bool) -> None:
    x = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(2))

    def made() -> tuple[Headed, torch.optim.SGD]:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            net = Headed(tied)
        return net, torch.optim.SGD(net.parameters(), lr=0.5)

    alone, sgd = made()
    for _ in range(2):
        sgd.zero_grad()
        loss_of(alone, x).backward()
        sgd.step()

    def main() -> None:
        mesh = mc.make_mesh({"fsdp": 2})
        net, mine = made()
        fully_shard(net, "fsdp", grads="mean", mesh=mesh)
        for _ in range(2):
            mine.zero_grad()
            loss = loss_of(net, x[2 * mesh.rank :][:2])
            assert net.head.weight.shape == (4, 4)
            assert all(p.ndim == 1 for p in net.parameters())
            loss.backward()
            assert net.head.weight.ndim == 1  # a slice, though the graph is there still
            mine.step()
        assert_close(full_state_dict(net), alone.state_dict(), rtol=0, atol=1e-12)
        found = net(x)
        del found
        assert net.head.weight.ndim == 1  # nobody has what backward would begin at

    mc.launch(main, ranks=2)
