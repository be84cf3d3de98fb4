"""An optimiser in place of another one for the length of a step: the same settings and states, over other tensors.

A hook before ``step`` may hand on other arguments, the first of which is the optimiser; torch's own step then runs on
the stand-in, and who made it writes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

States = Iterable[tuple[Tensor, dict[str, Any]]]


def stand_in(optimizer: Optimizer, params: Iterable[list[Tensor]], states: States) -> Optimizer:
    """Of the same class, with these tensors in its groups, and these states of them."""
    other: Optimizer = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer))
    other.param_groups = [
        group | {"params": given} for group, given in zip(optimizer.param_groups, params, strict=True)
    ]
    other.state = defaultdict(dict, states)
    return other


def evaluated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step behind the optimiser, their closure called already: gradients are there."""
    rest, named = list(args[1:]), dict(kwargs)
    closure = rest[0] if rest else named.get("closure")
    if callable(closure):
        with torch.enable_grad():
            loss = closure()
        if rest:
            rest[0] = lambda: loss
        else:
            named["closure"] = lambda: loss
    return tuple(rest), named


def write_back(optimizer: Optimizer, other: Optimizer) -> None:
    """What a step has changed of a stand-in beside its tensors and their states."""
    for group, changed in zip(optimizer.param_groups, other.param_groups, strict=True):
        group.update((key, value) for key, value in changed.items() if key != "params")
    vars(optimizer).update((name, x) for name, x in vars(other).items() if name not in ("param_groups", "state"))


def step_of(kind: type[Optimizer]) -> Callable[..., Any]:
    """The step of a class without its hooks."""
    found: Callable[..., Any] = getattr(kind.step, "__wrapped__", kind.step)
    return found
