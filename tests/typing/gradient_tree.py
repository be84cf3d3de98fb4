"""Functional training: trees of parameters and gradients through collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import assert_type

import meshcomm as mc

Params = dict[str, Tensor]
T = TypeVar("T")


class State(NamedTuple):
    params: Params
    moments: list[Tensor]
    scale: Tensor


def averaged(tree: T, axis: str | tuple[str, ...]) -> T:
    return mc.all_reduce(tree, axis, "mean")


def loss_of(params: Params, x: Tensor) -> Tensor:
    return (x @ params["w"] + params["b"]).square().mean()


def step(params: Params, x: Tensor, lr: float) -> tuple[Params, Tensor]:
    gradient: Callable[[Params, Tensor], tuple[Params, Tensor]] = torch.func.grad_and_value(loss_of)
    gradients, loss = gradient(params, x)
    total = averaged(gradients, "dp")
    assert_type(total, dict[str, Tensor])
    return {name: p - lr * total[name] for name, p in params.items()}, averaged(loss, "dp")


def with_module(model: nn.Module, x: Tensor) -> Tensor:
    params: Params = dict(model.named_parameters())
    varied = mc.pvary(params, "dp")
    assert_type(varied, dict[str, Tensor])
    y: Tensor = functional_call(model, varied, (x,))
    return mc.all_reduce(y.square().sum(), "dp")


def single(weight: nn.Parameter, x: Tensor) -> Tensor:
    w = mc.pvary(weight, "dp")
    assert_type(w, Tensor)
    w = w.to(torch.float64)
    whole = mc.all_gather(weight, "dp")
    whole = whole * 2
    return x.double() @ w + whole.sum()


def main_on_rank() -> float:
    mesh = mc.make_mesh({"dp": 2})
    with mc.use_mesh(mesh):
        x = torch.full((2, 3), 1.0 + mesh.rank)
        params: Params = {"w": torch.ones(3, 2), "b": torch.zeros(2)}
        params, loss = step(params, x, 0.1)
        state = State(params, [loss], torch.ones(()))
        same = mc.broadcast(state, "dp")
        assert_type(same, State)
        nested = mc.all_gather({"a": [x, x], "b": [x]}, "dp", dim=1)
        assert_type(nested, dict[str, list[Tensor]])
        pair = mc.reduce_scatter((x, x), "dp", op="mean")
        assert_type(pair, tuple[Tensor, Tensor])
        frozen: Mapping[str, Tensor] = mc.all_reduce(params, "dp", "max", bucket_mb=1)
        with_module(nn.Linear(3, 2), x)
        single(nn.Parameter(torch.ones(3, 2)), x)
        return (loss + frozen["w"].sum()).item()


def main() -> list[float]:
    return mc.launch(main_on_rank, ranks=2)


if __name__ == "__main__":
    main()
