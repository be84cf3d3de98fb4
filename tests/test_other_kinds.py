"""Modules that are not alike on all ranks: data_parallel says on each of them what differs, before it changes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import meshcomm as mc
from meshcomm.parallel import auto_plan, data_parallel, tensor_parallel

PLAN = {"0": "column", "2": "row"}
ADAPTORS: dict[str, Callable[[nn.Module], object]] = {
    "data_parallel": lambda module: data_parallel(module, "x", grads="mean"),
}


def odd(how: str, rank: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6 if how == "shape" and rank else 4))
    if how == "dtype" and rank:
        module[2].double()
    if how == "frozen" and rank:
        module[2].requires_grad_(False)
    if how == "bias" and rank:
        module[2].bias = None
    return module


def refused(adaptor: str, how: str, ranks: int) -> None:
    with mc.use_mesh(mc.make_mesh({"x": ranks})) as mesh:
        module = odd(how, mesh.rank)
        before = {name: p.shape for name, p in module[2].named_parameters()}  # type: ignore[index]
        with pytest.raises(
            mc.MeshError, match=r"differ between ranks[\s\S]*along axis 'x'[\s\S]*same module"
        ) as caught:
            ADAPTORS[adaptor](module)
        if how == "bias":
            assert "[4, 3" in str(caught.value) or "[2, 1" in str(caught.value)
        else:
            assert "weight" in str(caught.value)
        assert {name: p.shape for name, p in module[2].named_parameters()} == before  # type: ignore[index]


@pytest.mark.parametrize("how", ["shape", "dtype", "frozen", "bias"])
@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_said_on_each_rank(adaptor: str, how: str) -> None:
    mc.launch(refused, 3, (adaptor, how, 3))


@pytest.mark.parametrize("adaptor", ["data_parallel"])
def test_on_processes(adaptor: str, pool4: Any) -> None:
    pool4.run(refused, adaptor, "shape", 4)


def test_a_plan_for_what_is_cut_already() -> None:
    def main() -> None:
        with mc.use_mesh(mc.make_mesh({"x": 2})):
            module = odd("", 0)
            tensor_parallel(module, PLAN, axis="x")
            with pytest.raises(mc.MeshError, match="auto_plan: the module is tensor parallel already"):
                auto_plan(module, "x")

    mc.launch(main, 2)
