"""In which dtype gradients are added up, where it is wider than that of the parameter."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshcomm.errors import fail
from meshcomm.parallel.optimizers.stand_in import evaluated


def refuse_narrower(
    where: str, dtype: torch.dtype | None, params: Mapping[str, Tensor], used: torch.dtype | None = None
) -> None:
    """MeshError if gradients that are added up in ``dtype`` would lose what they have as they are computed; ``used``:
    the dtype in which they are, if not that of the parameters.
    """
    if dtype is None:
        return
    for name, p in params.items():
        for own in (p.dtype, used or p.dtype):
            if own.is_complex or (own.itemsize > 1 and torch.promote_types(own, dtype) != dtype):
                what = (
                    f"accumulate_dtype={dtype} has not all that {own} has, which parameter {name!r} is of or used in."
                )
                fail(where, what, fix="a dtype at least as wide, or none")


def gradients_in(dtype: torch.dtype | None, p: Tensor) -> None:
    """Have ``p.grad`` of this dtype from now on, or that of ``p`` if that is wider."""
    if dtype is None or not p.is_leaf or not p.is_floating_point() or p.dtype.itemsize == 1:
        return
    wanted = torch.promote_types(p.dtype, dtype)
    if p.grad_dtype != wanted:
        before, p.grad = p.grad, None
        p.grad_dtype = wanted
        if before is not None:
            p.grad = before.to(wanted)


def put_gradient(p: Tensor, g: Tensor | None) -> None:
    """``p.grad = g``, of whatever dtype."""
    if g is not None and p.grad_dtype != g.dtype:
        p.grad = None
        p.grad_dtype = g.dtype
    p.grad = g


# ------------------------------------------------------------------------------------------------------ optimisers

_INTERPOLATE = tuple(getattr(torch.optim, name) for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam"))
"""Torch's that take no gradients of another dtype than the parameter's; no fused one does."""
_hooks: list[Any] = []
_under_way: weakref.WeakKeyDictionary[Optimizer, list[tuple[Tensor, Tensor]]] = weakref.WeakKeyDictionary()
"""Of steps: parameters, and their gradients."""


def watch_wide_gradients() -> None:
    """From now on optimisers that take no wider gradients see them rounded to the dtype of the parameter."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before))
        _hooks.append(register_optimizer_step_post_hook(_after))


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.compiler.is_compiling() or not any(_takes_none(optimizer, group) for group in optimizer.param_groups):
        return None
    rest, named = evaluated(args, kwargs)
    found = [
        (p, p.grad)
        for group in optimizer.param_groups
        if _takes_none(optimizer, group)
        for p in group["params"]
        if p.grad is not None and p.grad.dtype != p.dtype
    ]
    if found:
        _under_way[optimizer] = found
        for p, g in found:
            put_gradient(p, g.to(p.dtype))
    return (optimizer, *rest), named


def _takes_none(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    return isinstance(optimizer, _INTERPOLATE) or bool(group.get("fused"))


def _after(optimizer: Optimizer, *_: Any) -> None:
    for p, g in _under_way.pop(optimizer, ()):
        if p.grad is not None:
            put_gradient(p, g)
