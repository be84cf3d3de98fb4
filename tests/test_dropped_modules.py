"""Modules that were made parallel, trained and dropped are gone, and so is what their steps have left."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import meshcomm as mc
from meshcomm.parallel import (
    clip_grad_norm,
    convert_batch_norm,
    data_parallel,
    full_state_dict,
    fully_shard,
    no_sync,
    reduce_gradients,
    tensor_parallel,
)
from meshcomm.parallel.fsdp.nodes import Use
from meshcomm.runtime.start.workers import WorkerPool


class Net(nn.Module):
    """Functions whose nodes keep their inputs, and such whose nodes keep their results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.down(torch.relu(self.up(x))))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


def sharded(**options: Any) -> nn.Module:
    return fully_shard(Net(), "a", grads="mean", **options)


def parallel() -> nn.Module:
    return tensor_parallel(Net(), {"up": "column", "down": "row", "*": "replicated"}, axis="a")


def in_two_steps() -> nn.Module:
    made = Net()
    fully_shard(made.layers, "b", grads="mean")
    return fully_shard(made, "a", grads="mean")


WAYS: dict[str, Callable[[], nn.Module]] = {
    "sharded": sharded,
    "kept": lambda: sharded(regather=False),
    "replicas": lambda: sharded(replica_axis="b"),
    "copied": lambda: copy.deepcopy(sharded()),
    "in two steps": in_two_steps,
    "recurrent": lambda: fully_shard(Recurrent(), "a", grads="mean"),
    "tensor parallel": parallel,
    "tensor parallel, sharded": lambda: fully_shard(parallel(), "b", grads="mean"),
    "tensor parallel, data parallel": lambda: data_parallel(parallel(), "b", grads="sum"),
    "data parallel": lambda: data_parallel(Net(), "a", grads="mean"),
    "all of them": lambda: data_parallel(convert_batch_norm(parallel(), "b"), "b", grads="sum"),
}


def dropped(way: str) -> None:
    with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})):
        _dropped(way)


def _dropped(way: str) -> None:
    model = WAYS[way]()
    x = torch.ones(3, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    if "parallel, " not in way and way not in ("in two steps", "tensor parallel"):
        with no_sync(model):
            model(x).sum().backward()
        reduce_gradients(model)
    model(x).sum().backward()
    if way == "replicas":
        clip_grad_norm(model, 1.0)
        full_state_dict(model)
    sgd.step()
    model.load_state_dict(model.state_dict())
    model(x)  # a loss that is thrown away
    known = [weakref.ref(each) for each in (model, *model.parameters(), *model.children())]
    del model, sgd
    gc.collect()
    assert all(each() is None for each in known)
    mc.barrier(("a", "b"))


@pytest.mark.one_in(2, alike=True)
@pytest.mark.parametrize("way", list(WAYS))
def test_a_module_goes(way: str) -> None:
    """While its launch goes on, on threads."""
    mc.launch(dropped, ranks=4, args=(way,))


def test_a_module_goes_on_processes(pool4: WorkerPool) -> None:
    pool4.run(dropped, "tensor parallel, sharded")


class Marked(Function):
    """Its node keeps something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: object) -> Tensor:
        ctx.mark = mark
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class Mark:
    pass


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("trains", [True, False])
def test_what_a_step_keeps_goes(way: str, trains: bool) -> None:
    """Without a look for cycles, while the module stays; with a backward pass and with none."""

    def main() -> tuple[nn.Module, list[weakref.ref[Mark]]]:
        with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})):
            model, marks = WAYS[way](), []
            for _ in range(2):
                mark = Mark()
                marks.append(weakref.ref(mark))
                x = torch.ones(3, 4, requires_grad=True)
                y = torch.exp(model(Marked.apply(x, mark)))
                if trains:
                    y.sum().backward()
                del mark, x, y
            return model, marks

    gc.collect()
    before = sum(type(each) is Use for each in gc.get_objects())
    gc.disable()
    try:
        found = mc.launch(main, ranks=4)
        assert all(mark() is None for _, marks in found for mark in marks)
        assert sum(type(each) is Use for each in gc.get_objects()) <= before
    finally:
        gc.enable()


def test_a_shallow_copy_is_not_what_was_sharded() -> None:
    """It has the attributes of the other one, and no units."""

    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"a": 2})):
            other = copy.copy(sharded())
            with pytest.raises(mc.MeshError, match="is not sharded|neither data parallel nor sharded"), no_sync(other):
                pass

    mc.launch(main, ranks=2)
