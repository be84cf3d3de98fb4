"""Over what a local loss is a mean: what the gradients of parameters are divided by, besides how they are reduced.

Experts are reduced over fewer ranks than those whose tokens they have seen: an all_to_all has brought them the tokens,
and brings back the gradients of the losses, of the others.
"""

from __future__ import annotations

import weakref

from torch import nn

from meshcomm.collectives import check
from meshcomm.errors import fail
from meshcomm.mesh import AxisName, Mesh

__all__ = ["Mean", "checked_mean", "mean_of"]

_NAME = "_meshcomm_mean"
_known: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Mean:
    """Gradients that are averaged over the ranks of some axes, though the loss is a mean over those of others."""

    def __init__(self, mesh: Mesh, reduced: tuple[str, ...], over: AxisName | None) -> None:
        self.mesh, self.reduced, self.told = mesh, reduced, over is not None
        self.over = reduced if over is None else _flat(over)
        self.share = self._share()
        """By which the averages are to be multiplied."""

    def _share(self) -> float:
        return self.mesh.size_of(self.reduced) / self.mesh.size_of(self.over)

    def inside_of(self, outer: Mean) -> None:
        """Its module is a part of one whose loss is a mean over more: so is this one's, unless it was said."""
        if not self.told and self.mesh is outer.mesh and set(self.reduced) < set(outer.over):
            self.over = outer.over
            self.share = self._share()


def checked_mean(where: str, grads: str, mesh: Mesh, over: AxisName | None) -> None:
    """``mean_over`` names axes, and there is a mean."""
    if over is not None:
        check.axis_of(where, over, mesh)
        if grads != "mean":
            fix = 'grads="mean"; a loss that you reduce yourself says it itself'
            fail(where, f"mean_over={over!r} with grads={grads!r}.", fix=fix)


def mean_of(
    where: str, module: nn.Module, grads: str, mesh: Mesh, reduced: tuple[AxisName, ...], over: AxisName | None
) -> Mean | None:
    """What is known of the mean of a module's loss; it is told of modules around it and inside. None for sums."""
    if grads != "mean":
        return None
    mine = Mean(mesh, tuple(name for axis in reduced for name in _flat(axis)), over)
    vars(module)[_NAME] = mine
    for part in module.modules():
        inner = vars(part).get(_NAME)
        if part is not module and isinstance(inner, Mean):
            inner.inside_of(mine)
    for around in list(_known):
        outer = vars(around).get(_NAME)
        if around is not module and isinstance(outer, Mean) and any(part is module for part in around.modules()):
            mine.inside_of(outer)
    _known.add(module)
    return mine


def _flat(axis: AxisName) -> tuple[str, ...]:
    return axis if isinstance(axis, tuple) else (axis,)
