"""Parameters that came to a module after an adaptor had spread it: nothing has made them equal on the ranks, and
nothing reduces their gradients. Where the program does neither, the ranks part: they are compared once, before the
first step of an optimiser.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshcomm.errors import fail
from meshcomm.mesh import Axis, axes_in
from meshcomm.parallel.cut_parameters import all_known, axes_of_module, axes_of_parts, came_later, parts_of, take_in
from meshcomm.parallel.data.same_gradients import are_apart, norms, said
from meshcomm.watch import paused

_seen: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()
"""The ids of the parameters that each had when it was last looked at: at the same step on all ranks."""


def look_for_newcomers(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """MeshError, on every rank, for one that they do not have alike: before a step."""
    if torch.compiler.is_compiling():
        return
    params = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if _seen.get(optimizer) == params:
        return
    stepped = set(params)
    for module in all_known():
        if any(id(p) in stepped for p in module.parameters()):  # else it may be another rank's, in its forward
            new = {name: p for name, p in came_later(module).items() if id(p) in stepped}
            if new:
                with paused():
                    _compare(module, new)
                take_in(module, new.values())
    _seen[optimizer] = params


def _compare(module: nn.Module, new: dict[str, nn.Parameter]) -> None:
    parts = parts_of(module)
    for axis in axes_of_module(module):
        same = {
            name: p
            for name, p in new.items()
            if not axes_of_parts(p, parts.get(id(p), ()), axis.mesh)[0] & {*axes_in(axis.name)}
        }
        if same and axis.size > 1:
            _look(module, "value", dict[str, "Tensor | None"](same), axis)
            _look(module, "gradient", {name: p.grad for name, p in same.items()}, axis)


def _look(module: nn.Module, what: str, tensors: dict[str, Tensor | None], axis: Axis) -> None:
    for (name, x), found in zip(tensors.items(), norms([*tensors.values()], axis), strict=True):
        if are_apart(found, torch.float32 if x is None else x.dtype):
            fail(
                "parallel",
                f"{name!r} came to {type(module).__name__} after it was made parallel, and its {what} is another one "
                "on each rank.",
                got=f"{said(found)} along axis {axis.name!r}",
                fix="add and replace parameters before; or mc.broadcast its value, and mc.all_reduce its gradient "
                "before each step; or, if it is to differ, mc.mark_varying(module, axes) of what has it",
            )
