"""Parameters that came to a module after an adaptor had spread it: nothing has made them equal on the ranks, and
nothing reduces their gradients, but for those of a data parallel module. Where the program does not either, the ranks
part: they are compared once, after the first step that an optimiser makes with a gradient of theirs.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshcomm.axis import Axis, axes_in
from meshcomm.collectives.agree import agree
from meshcomm.errors import fail
from meshcomm.parallel.cut_parameters import all_known, axes_of_module, axes_of_parts, came_later, parts_of, take_in
from meshcomm.parallel.data.same_gradients import are_apart, norms, said
from meshcomm.watch import paused

_seen: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()
"""The ids of the parameters that each had when it was last looked at: at the same step on all ranks."""


def look_for_newcomers(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """After a step, in which they may have been reduced: MeshError on every rank where these have not the same."""
    if torch.compiler.is_compiling():
        return
    params = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if _seen.get(optimizer) == params:
        return
    stepped, over = set(params), True
    for module in all_known():
        if any(id(p) in stepped for p in module.parameters()):  # else it may be another rank's, in its forward
            new = {name: p for name, p in came_later(module).items() if id(p) in stepped}
            if new:
                with paused(), torch.no_grad():
                    found = _compare(module, new)
                take_in(module, [p for name, p in new.items() if name in found])
                over &= len(found) == len(new)
    if over:
        _seen[optimizer] = params


def _compare(module: nn.Module, new: Mapping[str, nn.Parameter]) -> set[str]:
    """The names of those that need not be looked at again: all but who had a gradient on no rank."""
    parts, waiting = parts_of(module), set[str]()
    for axis in axes_of_module(module):
        same = {}
        for name, p in new.items():
            cut, elsewhere = axes_of_parts(p, parts.get(id(p), ()), axis.mesh)
            if elsewhere == 1 and not cut & {*axes_in(axis.name)}:
                same[name] = p
        mine = zlib.crc32(" ".join(same).encode())
        if axis.size > 1 and same and all(theirs == mine for [theirs] in agree([mine], axis)):
            _look(module, "value", dict[str, "Tensor | None"](same), axis)
            waiting |= _look(module, "gradient", {name: p.grad for name, p in same.items()}, axis)
    return {*new} - waiting


def _look(module: nn.Module, what: str, tensors: Mapping[str, Tensor | None], axis: Axis) -> set[str]:
    """The names of those that no rank has."""
    missing = set[str]()
    for (name, x), found in zip(tensors.items(), norms([*tensors.values()], axis), strict=True):
        if are_apart(found, torch.float32 if x is None else x.dtype):
            fail(
                "parallel",
                f"{name!r} came to {type(module).__name__} after it was made parallel, and its {what} is another one "
                "on each rank.",
                got=f"{said(found)} along axis {axis.name!r}, after a step",
                fix="add and replace parameters before; or mc.broadcast its value, and mc.all_reduce its gradient "
                "before each step; or, if it is to differ, mc.mark_varying(module, axes) of what has it",
            )
        if max(found) < 0:
            missing.add(name)
    return missing
