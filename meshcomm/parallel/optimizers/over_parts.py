"""Optimisers of torch's whose step is no function of each number by itself, over parameters that are cut: hooks that
make it one of whole tensors, or of vectors of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.parallel.alike import refuse_others
from meshcomm.parallel.cut_parameters import Part, axes_among, meshes_among, parts_among
from meshcomm.parallel.newcomers import look_for_newcomers
from meshcomm.parallel.optimizers.lbfgs import begin_step, end_step
from meshcomm.parallel.optimizers.scaled import watch_scalers
from meshcomm.parallel.optimizers.stand_in import evaluated, stand_in
from meshcomm.parallel.optimizers.whole_steps import step_whole
from meshcomm.runtime.transports.dry.world import is_dry
from meshcomm.watch import paused

_WHOLE = tuple(getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name))
_hooks: list[Any] = []
"""Those of all optimizers, from the first module that was made parallel on."""


def watch_steps() -> None:
    """From now on the steps of all optimizers are looked at."""
    if not _hooks:
        watch_scalers()
        _hooks.append(register_optimizer_step_post_hook(look_for_newcomers))
        _hooks.append(register_optimizer_step_pre_hook(_before))
        _hooks.append(register_optimizer_step_post_hook(_after))


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(optimizer, (LBFGS, *_WHOLE)) or torch.compiler.is_compiling():
        return None
    params = [p for group in optimizer.param_groups for p in group["params"]]
    parts = parts_among(params)
    _refuse_others(optimizer, params, parts)
    if isinstance(optimizer, LBFGS):
        return _of_vectors(optimizer, args, kwargs, parts, meshes_among(params))
    return _of_whole_tensors(optimizer, args, kwargs, parts) if parts else None


def _refuse_others(optimizer: Optimizer, params: Sequence[Tensor], parts: dict[int, list[Part]]) -> None:
    """Ranks whose optimisers have other parameters, or other gradients, would wait for each other in the step."""
    kind = f"torch.optim.{type(optimizer).__name__}"
    what, fix = "the optimizer has other parameters, or gradients, on other ranks.", "the same ones on each rank"
    with paused(), torch.no_grad():
        of_vectors = isinstance(optimizer, LBFGS)  # whose gradients are looked for in the step
        own = params if of_vectors else [p for p in params if id(p) in parts]
        named = [(repr(parts[id(p)][0].name) if id(p) in parts else "a whole one", p) for p in own]
        without = " without a gradient"  # shapes differ where they are cut unevenly
        lines = [f"{name} {p.dtype}{without * (p.grad is None and not of_vectors)}" for name, p in named]
        for axis in axes_among(params):
            refuse_others(kind, what, lines, axis, fix)


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if isinstance(optimizer, LBFGS) and args and args[0] is not optimizer:
        end_step(optimizer, args[0])


def _of_vectors(
    optimizer: LBFGS,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parts: dict[int, list[Part]],
    meshes: Sequence[Mesh],
) -> Any:
    mesh = max(meshes, key=lambda mesh: mesh.size, default=None)
    if mesh is None or mesh.size == 1:
        return None
    if type(optimizer) is not LBFGS:
        what = f"{type(optimizer).__name__} derives from LBFGS, and its parameters are parallel"
        fail(f"torch.optim.{LBFGS.__name__}", f"{what}: each rank would make its step of what it has.",
             fix="torch.optim.LBFGS; or an optimizer that treats each number by itself, such as AdamW")  # fmt: skip
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure) or len(optimizer.param_groups) != 1:
        return None  # torch says what is wrong
    if is_dry():
        what = "how often a step of LBFGS calls its closure depends on values, which a dry run has not."
        fail(
            f"torch.optim.{LBFGS.__name__}",
            what,
            fix="where mc.is_dry() the closure alone, as often as it is called in a run",
        )
    return begin_step(optimizer, closure, parts, mesh), {}


@torch.no_grad()
def _of_whole_tensors(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], parts: dict[int, list[Part]]
) -> Any:
    rest, named = evaluated(args, kwargs)
    others: list[list[Tensor]] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) in parts and p.grad is not None:
                step_whole(optimizer, group, p, parts[id(p)])
        others.append([p for p in group["params"] if id(p) not in parts])
    other = stand_in(optimizer, others, ())
    other.param_groups = [group for group in other.param_groups if group["params"]]
    other.state = optimizer.state
    return (other, *rest), named
