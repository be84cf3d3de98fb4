"""no_sync and reduce_gradients: one rule for data_parallel and fully_shard, and steps that are those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import meshcomm as mc
from meshcomm.parallel import data_parallel, full_state_dict, fully_shard, no_sync, reduce_gradients

F64 = torch.float64
KINDS = ["data", "sharded", "replicas"]


class Net(nn.Module):
    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.odd = nn.Parameter(torch.ones(4))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(self.again is True)  # as checkpoints of that kind want it
        for block in self.blocks:
            x = torch.tanh(block(x) if self.again is None else checkpoint(block, x, use_reentrant=self.again))
        return x


def net(kind: str, grads: Any = "mean", again: bool | None = None) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Net(again).to(F64)
    if kind == "data":
        return data_parallel(made, ("rep", "dp"), grads=grads)
    if kind == "replicas":
        return fully_shard(made, "dp", grads=grads, replica_axis="rep")
    return fully_shard(made, ("rep", "dp"), grads=grads) if kind == "sharded" else made


def rows(number: int) -> Tensor:
    return torch.randn(8, 4, dtype=F64, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, x: Tensor, over: tuple[str, ...], grads: str) -> Tensor:
    loss = model(x).square().sum() / 8
    if not over:
        return loss
    return mc.all_reduce(loss, over) if grads == "sum" else loss * 4


Step = Callable[[nn.Module, Callable[[int], Tensor]], None]


def inside_then_outside(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    with no_sync(model):
        loss(0).backward()
        loss(1).backward()
    loss(2).backward()


def all_inside(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    with no_sync(model):
        for number in range(3):
            loss(number).backward()
    reduce_gradients(model)
    reduce_gradients(model)  # has nothing to do


def backward_outside(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    with no_sync(model):
        one, two = loss(0), loss(1)
    one.backward()
    two.backward()
    loss(2).backward()


def backward_inside(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    one, two = loss(0), loss(1)
    with no_sync(model):
        one.backward()
        two.backward()
    loss(2).backward()


def reduced_first(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    """What was collected in an order that nobody wants."""
    with no_sync(model):
        one = loss(0)
    loss(2).backward()
    one.backward()
    with no_sync(model):
        loss(1).backward()
    reduce_gradients(model)


STEPS = [inside_then_outside, all_inside, backward_outside, backward_inside, reduced_first]


def trained(kind: str, grads: str, step: Step, again: bool | None = None) -> dict[str, Tensor] | None:
    if kind == "alone":
        model, over = net(kind), ()
        return after_steps(model, lambda number: loss_of(model, rows(number), over, grads), None)
    with mc.use_mesh(mc.make_mesh({"rep": 2, "dp": 2})):
        model = net(kind, grads, again)
        axes = ("rep", "dp")
        after_steps(model, lambda number: loss_of(model, mc.shard(rows(number), axes), axes, grads), step)
        return full_state_dict(model)


def after_steps(model: nn.Module, loss: Callable[[int], Tensor], step: Step | None) -> dict[str, Tensor]:
    adam = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    for at in range(3):
        adam.zero_grad()
        if step is None:
            for number in range(3):
                loss(3 * at + number).backward()
        else:
            step(model, lambda number, at=at: loss(3 * at + number))  # type: ignore[misc]
        adam.step()
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("grads", ["sum", "mean"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", STEPS)
def test_three_steps_are_those_of_one_rank(step: Step, kind: str, grads: str) -> None:
    expected = trained("alone", grads, step)
    assert_close(mc.launch(trained, ranks=4, args=(kind, grads, step))[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "again"), [("data", False), ("sharded", False), ("sharded", True)])
def test_with_checkpoints(kind: str, again: bool) -> None:
    expected = trained("alone", "mean", all_inside)
    for step in (all_inside, inside_then_outside):
        assert_close(mc.launch(trained, ranks=4, args=(kind, "mean", step, again))[0], expected, rtol=1e-9, atol=1e-9)


def test_on_processes(pool4: Any) -> None:
    expected = trained("alone", "sum", all_inside)
    for kind in ("data", "replicas"):
        assert_close(pool4.run(trained, kind, "sum", all_inside)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_forward_pass_ran(kind: str) -> None:
    """Nothing but that decides about what is sent."""

    def main() -> list[bool]:
        with mc.use_mesh(mc.make_mesh({"rep": 2, "dp": 2})):
            model = net(kind)
            model(rows(0)).sum().backward()  # ranks agree on an order
            found = []
            for inside in (True, False):
                with no_sync(model) if inside else mc.use_mesh(mc.current_mesh()):
                    loss = model(rows(0)).sum()
                with mc.trace() as sent, mc.use_mesh(mc.current_mesh()) if inside else no_sync(model):
                    loss.backward()
                calls = sent.summary()
                found.append("reduce" in str(calls))
            reduce_gradients(model)
            return found

    assert mc.launch(main, ranks=4) == [[False, True]] * 4


def test_one_backward_pass_of_both_kinds() -> None:
    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"rep": 1, "dp": 2})):
            model = net("data")
            with no_sync(model):
                one = model(rows(0)).sum()
            with pytest.raises(mc.MeshError, match="collected under no_sync and others that are reduced"):
                (one + model(rows(1)).sum()).backward()

    mc.launch(main, ranks=2)


def test_a_unit_that_some_ranks_use() -> None:
    def main() -> list[Tensor]:
        mesh = mc.make_mesh({"rep": 1, "dp": 2})
        with mc.use_mesh(mesh):
            model = nn.ModuleList(nn.Linear(2, 2, bias=False).to(F64) for _ in range(3))
            fully_shard(model, "dp", grads="sum", units=list(model), methods=[])
            with no_sync(model):
                found = [part(torch.ones(1, 2, dtype=F64)).sum() for part in model]  # all run all, and use some
                (found[0] + found[2 if mesh.rank else 0]).backward()
            reduce_gradients(model)
            return [torch.zeros(2, dtype=F64) if p.grad is None else p.grad for p in model.parameters()]

    found = mc.launch(main, ranks=2)
    assert [torch.cat(of_rank).tolist() for of_rank in zip(*found, strict=True)] == [[3.0] * 4, [0.0] * 4, [1.0] * 4]


def test_a_module_around_several() -> None:
    def main() -> list[float]:
        with mc.use_mesh(mc.make_mesh({"dp": 2})):
            one, two = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
            nn.init.ones_(one.weight), nn.init.ones_(two.weight)
            model = nn.Sequential(data_parallel(one, "dp", grads="mean"), fully_shard(two, "dp", grads="mean"))
            with mc.trace() as sent, no_sync(model):
                model(torch.ones(1, 1) + mc.axis_index("dp")).sum().backward()
            assert "reduce" not in str(sent.summary())
            reduce_gradients(model)
            return [one.weight.grad.item(), two.weight.grad.sum().item()]

    first, second = mc.launch(main, ranks=2)
    assert first[0] == second[0] == 1.5
    assert first[1] + second[1] == 1.5


def test_of_nothing() -> None:
    for function in (reduce_gradients, lambda module: no_sync(module).__enter__()):
        with pytest.raises(mc.MeshError, match="Linear is neither data parallel nor sharded"):
            function(nn.Linear(1, 1))
