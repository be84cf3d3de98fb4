"""Over what a local loss is a mean: what the gradients of parameters are divided by, besides how they are reduced.

Experts are reduced over fewer ranks than those whose tokens they have seen: an all_to_all has brought them the tokens,
and brings back the gradients of the losses, of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from meshcomm._torch import HOOKED
from meshcomm.axis import Axis, AxisName, axes_in
from meshcomm.collectives import check
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.parallel.cut_parameters import known_around

_NAME = "_meshcomm_mean"


_MOVES = frozenset((
    "Alias", "Cat", "Clone", "Expand", "Gather", "Index", "IndexSelect", "Permute", "Reshape", "ReshapeAlias", "Select",
    "Slice", "Split", "SplitWithSizes", "Squeeze", "Stack", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView",
    "Unsqueeze", "View",
))  # fmt: skip
"""Nodes of autograd's that do not change what they move."""
_FEW = 32
"""The most nodes that are looked at."""


class Mean:
    """Gradients that are averaged over the ranks of some axes, though the loss is a mean over those of others."""

    def __init__(self, mesh: Mesh, reduced: tuple[str, ...], over: AxisName | None) -> None:
        self.mesh, self.reduced, self.told = mesh, reduced, over is not None
        self.over = reduced if over is None else mesh.axes_of(over)

    def share(self, reduced: tuple[str, ...]) -> float:
        """By which averages over these axes are to be multiplied."""
        if reduced == self.over:
            return 1.0
        mine = whole = 1
        for name in reduced:
            mine *= self.mesh.shape[name]
        for name in self.over:
            whole *= self.mesh.shape[name]
        return mine / whole

    def look(self, where: str, given: tuple[Any, ...]) -> None:
        """MeshError for a module whose input has come from ranks of which nobody has said whether the mean is over
        them: tokens that an all_to_all has just brought. It is right for experts, and doubles the gradients of others.
        """
        for axis in () if self.told else _came_over(given):
            more = [name for name in axes_in(axis.name) if name not in self.over]
            if more and axis.mesh is self.mesh and axis.size > 1:
                over, alone = (*self.over, *more), self.over if len(self.over) > 1 else self.over[0]
                fail(
                    where,
                    f"the input has come by all_to_all over axis {axis.name!r}: is the loss a mean over its ranks too?",
                    got=f'grads="mean" over {alone!r}; mesh {self.mesh.shape}',
                    fix=f"mean_over={over!r} for experts, whose tokens come from all of them; else mean_over={alone!r}",
                )

    def inside_of(self, outer: Mean) -> None:
        """Its module is a part of one whose loss is a mean over more: so is this one's, unless it was said."""
        if not self.told and self.mesh is outer.mesh and set(self.reduced) < set(outer.over):
            self.over = outer.over


def checked_mean(where: str, grads: str, mesh: Mesh, over: AxisName | None) -> None:
    """``mean_over`` names axes, and there is a mean."""
    if over is not None:
        check.axis_of(where, over, mesh)
        if grads != "mean":
            fix = 'grads="mean"; a loss that you reduce yourself says it itself'
            fail(where, f"mean_over={over!r} with grads={grads!r}.", fix=fix)


def mean_of(
    module: nn.Module,
    grads: str,
    mesh: Mesh,
    reduced: tuple[AxisName, ...],
    over: AxisName | None,
    mine: Mean | None = None,
) -> Mean | None:
    """What is known of the mean of a module's loss; it is told of modules around it and inside. None for sums.
    ``mine``: what is known already, of a list of modules.
    """
    if grads != "mean":
        return None
    mine = mine or Mean(mesh, tuple(name for axis in reduced for name in axes_in(axis)), over)
    vars(module)[_NAME] = mine
    for part in module.modules():
        inner = vars(part).get(_NAME)
        if part is not module and isinstance(inner, Mean):
            inner.inside_of(mine)
    for around in known_around(module):
        outer = vars(around).get(_NAME)
        if around is not module and isinstance(outer, Mean):
            mine.inside_of(outer)
    return mine


def _came_over(given: tuple[Any, ...]) -> Iterator[Axis]:
    """The axes over which an all_to_all has brought these, if nothing was computed of them since."""
    nodes: list[Any] = [x.grad_fn for x in given if isinstance(x, Tensor) and x.grad_fn is not None]
    for node in nodes:
        name = type(node).__name__.partition("Backward")[0]
        call = getattr(node, "call", None)  # of a collective that is not async: its axis and params
        axis = call[0] if isinstance(call, tuple) and call else getattr(getattr(node, "pair", node), "axis", None)
        if isinstance(axis, Axis):
            if name == "AllToAll" or (name == "_Finish" and node.pair.rule.name == "all_to_all"):
                yield axis
        elif name in _MOVES and len(nodes) < _FEW and HOOKED not in node.metadata:
            nodes += [other for other, _ in node.next_functions if other is not None]
