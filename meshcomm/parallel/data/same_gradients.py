"""Whether the ranks have come to the same gradients, asked once for each module: when its first backward pass that
reduces some has ended, or, if there was none, before the first step of an optimiser that finds any.

What a method does with parameters is reduced. What is done with them elsewhere is not, and is right only where all
ranks do it with equal values, such as a penalty; else ``.grad`` is another one on each rank, and soon the parameters
are.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Container, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshcomm._torch import is_without_memory
from meshcomm.axis import Axis
from meshcomm.collectives.agree import agree
from meshcomm.errors import fail

_MISSING = -1.0
_LEAST = {torch.float64: 1e-7, torch.float32: 1e-4}
"""From which difference of norms on: sums are the same bits on all ranks, and kernels of devices need not be."""


class Unheard(Protocol):
    """A module of whose gradients nothing was reduced yet."""

    def look_before_step(self, params: Container[int]) -> None:
        """Compare them if some of these parameters, by their ids, have any."""


_unheard: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""In the order in which they were made, which is that of all ranks: they communicate."""
_hooks: list[Any] = []


def wait_for_gradients(state: Unheard) -> None:
    """From now on the steps of all optimizers look for gradients of this one, until :func:`heard`."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    _unheard[state] = None


def heard(state: Unheard) -> None:
    """Its gradients come as they should."""
    _unheard.pop(state, None)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _unheard and not torch.compiler.is_compiling():
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for state in list(_unheard):
            state.look_before_step(params)


def compare(where: str, names: Sequence[str], leaves: Sequence[Tensor], axis: Axis) -> bool:
    """Fail, on every rank, if a gradient has another norm on one of them; False if none has any."""
    every = norms([leaf.grad for leaf in leaves], axis)
    for name, leaf, found in zip(names, leaves, every, strict=True):
        if are_apart(found, leaf.dtype):
            _differ(where, name, found, axis)
    return any(norm != _MISSING for found in every for norm in found)


def norms(tensors: Sequence[Tensor | None], axis: Axis) -> list[tuple[float, ...]]:
    """Of each, that of each rank along ``axis``."""
    with torch.no_grad():
        mine = [_MISSING if x is None else _norm(x) for x in tensors]
    rows = agree(_bits([norm if norm == norm else float("inf") for norm in mine]), axis)
    return [*zip(*map(_floats, rows), strict=True)]


def are_apart(found: Sequence[float], dtype: torch.dtype) -> bool:
    """Whether these norms are not of one tensor, computed on several devices."""
    low, high = min(found), max(found)
    return low != high and (high == float("inf") or high - low > _LEAST.get(dtype, 1e-2) * high)


def said(found: Sequence[float]) -> str:
    """The first of them."""
    return f"norms {', '.join('none' if norm == _MISSING else f'{norm:.6g}' for norm in found[:8])}"


def _differ(where: str, name: str, found: Sequence[float], axis: Axis) -> NoReturn:
    fail(
        where,
        f"the gradient of {name!r} is another one on each rank: the parameter was used outside of the module's "
        "methods, where gradients are not reduced.",
        got=f"{said(found)} along axis {axis.name!r}",
        fix="use it in forward, or in a method named in methods=, none of which is replaced later; or "
        'mc.pvary(parameter, axis) there with grads="sum"',
    )


def _norm(g: Tensor) -> float:
    if is_without_memory(g):
        return 0.0
    norm: float = torch.linalg.vector_norm(g.coalesce().values() if g.is_sparse else g).item()
    return norm


def _bits(norms: Sequence[float]) -> list[int]:
    return list(struct.unpack(f"{len(norms)}q", struct.pack(f"{len(norms)}d", *norms)))


def _floats(bits: Sequence[int]) -> tuple[float, ...]:
    return struct.unpack(f"{len(bits)}d", struct.pack(f"{len(bits)}q", *bits))
