"""verify: right programs pass, wrong ones are found with the line to blame and what to write there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc

DP = [{"dp": 2}]
F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


X, W = draw(6, 3), draw(3, 2, seed=1)
SPECS: dict[str, Any] = {"in_specs": ("(dp b) d", "d e"), "out_specs": ""}


def line_of(fn: Callable[..., Any]) -> str:
    """The one that ends in ``# here``."""
    lines, first = inspect.getsourcelines(fn)
    return (
        f"{Path(__file__).name}:{first + next(i for i, line in enumerate(lines) if line.endswith('# here' + chr(10)))}"
    )


def right(x: Tensor, w: Tensor) -> Tensor:
    return mc.all_reduce((x @ mc.pvary(w, "dp")).square().sum(), "dp")


def lacks_pvary(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w  # here
    return mc.all_reduce(h.square().sum(), "dp")


def reduced_twice(x: Tensor, w: Tensor) -> Tensor:
    y = mc.all_reduce((x @ mc.pvary(w, "dp")).square().sum(), "dp")
    return mc.all_reduce(y, "dp")  # here


def mean_for_sum(x: Tensor, w: Tensor) -> Tensor:
    h = x @ mc.pvary(w, "dp")
    return mc.all_reduce(h.square().sum(), "dp", "mean")  # here


def not_reduced(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ mc.pvary(w, "dp")).square().sum()  # here
    return (y / 100).tanh()


def scaled(x: Tensor, w: Tensor) -> Tensor:
    y = mc.all_reduce((x @ mc.pvary(w, "dp")).square().sum(), "dp")
    return y * mc.axis_size("dp")  # here


def hooked(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ mc.pvary(w, "dp")).sin()
    n = mc.axis_size("dp")
    h.register_hook(lambda g: g / n)
    return mc.all_reduce(h.square().sum(), "dp")


def stopped(x: Tensor, w: Tensor) -> Tensor:
    h = x @ mc.pvary(w, "dp")
    norm = mc.all_reduce(h.detach().square().sum(), "dp")  # here
    return mc.all_reduce(h.sum(), "dp") / norm


@pytest.mark.parametrize(
    ("fn", "kind", "said"),
    [
        (lacks_pvary, "vjp", r"the gradient of input 1 is off by .* on rank 0 of {'dp': 2}.*\n.*\n  fix: mc.pvary\(operand 1, 'dp'\)"),
        (reduced_twice, "value", r"got: 2 times the right one; .*\n  fix: leave all_reduce at .* out"),
        (mean_for_sum, "value", r"0.5 times the right one; .* a mean too much along it"),
        (not_reduced, "value", r"not yet reduced over 'dp', and tanh .*\n  fix: mc.all_reduce\(it, 'dp'\) after sum"),
        (scaled, "value", r"2 times the right one; .* right up to all_reduce at"),
        (stopped, "finite differences", r"gradients right back to detach at .*, where they stop"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_with_its_line(fn: Callable[..., Any], kind: str, said: str) -> None:
    report = mc.verify(fn, X, W, **SPECS, meshes=DP)
    assert [(each.kind, each.line) for each in report.findings] == [(kind, line_of(fn))], report
    with pytest.raises(mc.VerifyError, match=said):
        report.check()


def test_a_right_program_passes_on_the_meshes_of_its_axes() -> None:
    report = mc.verify(right, X, W, **SPECS)
    assert report.check() is report
    assert report.ran[0].startswith("{'dp': 2}, {'dp': 3}: value, vjp, jvp, second in float64")
    with pytest.raises(AssertionError, match=r"^meshcomm.verify: the gradient of input 0 is off"):
        mc.verify(hooked, X, W, **SPECS).check()
