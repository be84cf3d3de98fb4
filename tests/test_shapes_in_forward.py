"""Where the forward of a tensor parallel module stumbles over shapes, an error names the module and the way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.parallel import Block, Column, Row, tensor_parallel

D, H = 8, 4


class Attention(nn.Module):
    """With norms over all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = H
        self.q, self.o, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(self.q(x)).view(*x.shape[:-1], self.heads, D // H)
        found: Tensor = self.o(q.softmax(-1).flatten(-2))
        return found


class Model(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"attn": Attention()}) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["attn"](x)
        return x


OVER_ALL = Block("join", "part")
CASES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "a norm over all heads": (
        {"*.q": "column", "*.o": "row", "*": "replicated"}, ["*.heads"],
        r"'layers.0.attn.norm' \(LayerNorm\)(.|\n)*normalized_shape(.|\n)*'\*.norm': Block\('join', 'part'\)",
    ),
    "counts": (
        {"*.norm": OVER_ALL, "*.q": "column", "*.o": "row", "*": "replicated"}, [],
        r"'layers.0.attn' \(Attention\)(.|\n)*1/2 of what a column gives: divide=(.|\n)*'\*.attn.heads'",
    ),
    "a row of what is whole": (
        {"*.q": Column(gather=True), "*.o": "row", "*": "replicated"}, [],
        r"'layers.0.attn.o' \(Linear\)(.|\n)*'\*.o': Row\(split=True\)",
    ),
    "what is whole after a column": (
        {"*.norm": OVER_ALL, "*.q": "column", "*": "replicated"}, ["*.heads"],
        r"'layers.0.attn.o' \(Linear\)(.|\n)*cut: 'row' for it",
    ),
}  # fmt: skip


def as_it_is(model: Model) -> Model:
    return model


def run(
    plan: dict[str, Any], divide: list[str], x: Tensor, wrap: Callable[[Model], Model] = as_it_is, dp: int = 1
) -> Tensor:
    mesh = mc.make_mesh({"dp": dp, "tp": 2})
    torch.manual_seed(0)
    model = tensor_parallel(Model(), plan, axis="tp", divide=divide, mesh=mesh)
    found: Tensor = wrap(model)(x)
    found.sum().backward()
    return found.detach()


@pytest.mark.parametrize("name", CASES)
def test_it_is_named_with_the_way(name: str) -> None:
    plan, divide, text = CASES[name]
    with pytest.raises(mc.MeshError, match=text):
        mc.launch(run, ranks=2, args=(plan, divide, torch.ones(3, D)))


def refused(plan: dict[str, Any], divide: list[str]) -> str:
    try:
        run(plan, divide, torch.ones(3, D), dp=2)
    except mc.MeshError as error:
        return str(error)
    return ""


def test_on_processes(pool4: Any) -> None:
    plan, divide, text = CASES["a norm over all heads"]
    for said in pool4.run(refused, plan, divide):
        assert re.search(text, said)


def test_what_the_errors_say_works() -> None:
    plan = {"*.norm": OVER_ALL, "*.q": "column", "*.o": "row", "*": "replicated"}
    x = torch.randn(3, D)
    torch.manual_seed(0)
    expected = Model()(x)
    for each in (plan, {"*.q": Column(gather=True), "*.o": Row(split=True), "*": "replicated"}):
        found = mc.launch(run, ranks=2, args=(each, ["*.heads"] if each is plan else [], x))
        torch.testing.assert_close(found[0], expected)


def test_other_errors_stay_what_they_are() -> None:
    plan = {"*.norm": OVER_ALL, "*.q": "column", "*.o": "row", "*": "replicated"}

    def failing(model: Model) -> Model:
        def fail(*args: Any) -> None:
            raise RuntimeError("of the user's own")

        model.layers[1]["attn"].register_forward_pre_hook(fail)  # type: ignore[index, union-attr]
        return model

    with pytest.raises(RuntimeError, match="of the user's own") as caught:
        mc.launch(run, ranks=2, args=(plan, ["*.heads"], torch.ones(3, D), failing))
    assert not isinstance(caught.value, mc.MeshError)
