"""Modules and optimisers that are not alike on all ranks: each says what differs, and where, before anything is changed."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import meshcomm as mc
from meshcomm.parallel import auto_plan, data_parallel, fully_shard, shard_optimizer, tensor_parallel

PLAN = {"0": "column", "2": "row"}
ADAPTORS: dict[str, Callable[[nn.Module], object]] = {
    "data_parallel": lambda module: data_parallel(module, "x", grads="mean"),
    "fully_shard": lambda module: fully_shard(module, "x", grads="mean"),
    "tensor_parallel": lambda module: tensor_parallel(module, PLAN, axis="x"),
    "auto_plan": lambda module: auto_plan(module, "x"),
}
SAID = {
    "shape": r"'2.weight' torch.float32 \(4, 8\) on index 0; '2.weight' torch.float32 \(6, 8\) on ind",
    "dtype": r"'2.weight' torch.float32 .* on index 0; '2.weight' torch.float64 .* on ind",
    "frozen": r"'2.weight' torch.float32 \(4, 8\) on index 0; '2.weight' torch.float32 \(4, 8\) frozen on ind",
    "bias": r"'2.bias' .* on index 0; 'the module' is a Sequential on ind",
    "class": r"'1' is a ReLU on index 0; '1' is a Tanh on ind",
}


def odd(how: str, rank: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6 if how == "shape" and rank else 4))
    if how == "dtype" and rank:
        module[2].double()
    if how == "frozen" and rank:
        module[2].requires_grad_(False)
    if how == "bias" and rank:
        module[2].bias = None
    if how == "class" and rank:
        module[1] = nn.Tanh()
    return module


def refused(adaptor: str, how: str, ranks: int) -> None:
    with mc.use_mesh(mc.make_mesh({"x": ranks})) as mesh:
        module = odd(how, mesh.rank)
        before = {name: p.shape for name, p in module.named_parameters()}
        text = rf"modules differ between ranks[\s\S]*along axis 'x' {SAID[how]}[\s\S]*same module"
        with pytest.raises(mc.MeshError, match=text):
            ADAPTORS[adaptor](module)
        assert {name: p.shape for name, p in module.named_parameters()} == before
        assert type(vars(module[2])["_parameters"]) is dict  # type: ignore[index]


@pytest.mark.parametrize("how", SAID)
@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_said_on_each_rank(adaptor: str, how: str) -> None:
    mc.launch(refused, 2, (adaptor, how, 2))


@pytest.mark.parametrize(("adaptor", "how"), [("data_parallel", "shape"), ("fully_shard", "frozen")])
def test_on_processes(adaptor: str, how: str, pool4: Any) -> None:
    pool4.run(refused, adaptor, how, 4)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda params: torch.optim.Adafactor(params),
    "Muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]),
    "shard_optimizer": lambda params: shard_optimizer(torch.optim.AdamW(params), "x"),
    "LBFGS": lambda params: torch.optim.LBFGS(params, max_iter=2),
}
WITHOUT = [(kind, "no gradient") for kind in OPTIMIZERS if kind != "LBFGS"]  # which makes them in the step


def other_parameters(kind: str, how: str) -> None:
    with mc.use_mesh(mc.make_mesh({"x": 2})) as mesh:
        torch.manual_seed(0)
        module = odd("", 0)
        if kind == "shard_optimizer":
            data_parallel(module, "x", grads="mean")
        else:
            tensor_parallel(module, PLAN, axis="x")
        params = list(module.parameters())
        optimizer: Any = OPTIMIZERS[kind](params[:2] if how == "fewer" and mesh.rank else params)

        def closure() -> Any:
            loss = module(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        closure()
        if how == "no gradient" and mesh.rank:
            params[2].grad = None
        with pytest.raises(mc.MeshError, match=r"on other ranks[\s\S]*on index 0;[\s\S]*on index 1"):
            optimizer.step(*[closure] * (kind == "LBFGS"))


@pytest.mark.parametrize(("kind", "how"), [*((kind, "fewer") for kind in OPTIMIZERS), *WITHOUT])
def test_optimizers_of_other_parameters(kind: str, how: str) -> None:
    mc.launch(other_parameters, 2, (kind, how))


def test_a_plan_for_what_is_cut_already() -> None:
    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"x": 2})):
            module = odd("", 0)
            tensor_parallel(module, PLAN, axis="x")
            with pytest.raises(mc.MeshError, match="auto_plan: the module is tensor parallel already"):
                auto_plan(module, "x")

    mc.launch(main, 2)


class Later(nn.Linear):
    """Computes when it is asked for the next one."""

    def forward(self, x: Tensor) -> Any:
        yield super().forward(x)


class Asked(nn.Module):
    """Computes when what it gives is called, or is used in another way."""

    def __init__(self, gives: Any) -> None:
        super().__init__()
        self.layer, self.gives = nn.Linear(4, 2), gives

    def forward(self, x: Tensor) -> Any:
        return self.gives(self, x, self.layer.weight)


LATER: dict[str, Any] = {
    "function": lambda module, x, w: lambda: module.layer(x),
    "partial": lambda module, x, w: (x, {"logits": functools.partial(module.layer, x)}),
    "Linear": lambda module, x, w: [module.layer],
    "map": lambda module, x, w: map(module.layer, [x]),
    "method": lambda module, x, w: types.SimpleNamespace(logits=module.layer.forward),
}


@pytest.mark.parametrize("kind", LATER)
def test_functions_that_use_parameters_after_forward(kind: str) -> None:
    """Their gradients were never reduced; of what forward has read of the parameters they are."""

    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"x": 2})):
            module = data_parallel(Asked(LATER[kind]), "x", grads="sum")
            with pytest.raises(mc.MeshError, match=rf"gives a {kind}, which computes when(?s:.)*list or a tensor"):
                module(torch.ones(2, 4))
            right = data_parallel(Asked(lambda module, x, w: {"f": lambda: x @ w.T, "n": len}), "x", grads="sum")
            right(torch.ones(2, 4))["f"]().sum().backward()
            assert_close(right.layer.weight.grad, torch.full((2, 4), 4.0))

    mc.launch(main, 2)


@pytest.mark.parametrize("adaptor", ["data_parallel", "tensor_parallel"])
def test_what_computes_after_forward(adaptor: str) -> None:
    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"x": 2})):
            module = nn.Sequential(Later(4, 2))
            if adaptor == "data_parallel":
                data_parallel(module, "x", grads="mean")
            else:
                tensor_parallel(module, {"*": "replicated"}, axis="x")
            with pytest.raises(mc.MeshError, match="gives a generator, which computes when it has ended"):
                module(torch.ones(2, 4))

    mc.launch(main, 2)
