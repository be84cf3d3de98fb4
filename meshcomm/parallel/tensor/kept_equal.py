"""A look, from time to time, at whether parameters that are whole have stayed the same on all ranks.

A plan that calls replicated what each rank uses with its own part of the weights gives each rank another gradient, and
nothing fails. After an optimiser's step such a parameter differs between ranks, by about as much as it has moved; what
is really the same on all ranks has moved to the same bits, or nearly.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from meshcomm import _torch
from meshcomm.axis import AxisName
from meshcomm.collectives.gather import all_gather_invariant
from meshcomm.errors import fail, names
from meshcomm.mesh import Mesh
from meshcomm.runtime.transports.dry.world import is_dry
from meshcomm.watch import paused

_FEW = 256
"""Elements of a parameter that are looked at."""


class KeptEqual:
    """Of one module; each rank looks at the same steps."""

    def __init__(self, where: str, mesh: Mesh, name: AxisName) -> None:
        self.where, self.mesh, self.name = where, mesh, name
        self._before: dict[str, Tensor] = {}
        self._watched: list[tuple[Tensor, int]] = []  # all, until one moves: some have no gradient
        self._steps = 0

    def look(self, module: nn.Module, cut: Collection[str]) -> None:
        """Before a forward: whether an optimiser has stepped, and after steps 1, 2, 4, 8 and so on what has moved."""
        if self._watched:
            moved = next((p for p, version in self._watched if _torch.version_hint(p) != version), None)
            if moved is None:
                return
            self._watched = [(moved, _torch.version_hint(moved))]
            self._steps += 1
            if self._steps & (self._steps - 1):
                return
        with paused(), _torch.outside_transforms(), _torch.without_modes(), torch.no_grad():
            self._compare(module, cut)

    def _compare(self, module: nn.Module, cut: Collection[str]) -> None:
        whole = {name: p for name, p in module.named_parameters() if p.requires_grad and name not in cut and p.numel()}
        if not self._watched:
            # Without their graph, which has the module: inside of a data parallel one they are results of a node.
            self._watched = [(p.detach(), _torch.version_hint(p)) for p in whole.values()]
        before, self._before = self._before, {name: _some(p) for name, p in whole.items()}
        moved = [name for name, x in self._before.items() if name in before and before[name].shape == x.shape]
        if not moved:
            return
        every = all_gather_invariant(torch.cat([self._before[name] for name in moved])[None], self.name, mesh=self.mesh)
        odd = []
        for name, here in (
            () if is_dry() else zip(moved, every.split([len(self._before[name]) for name in moved], 1), strict=True)
        ):
            apart, way = (here - here[:1]).norm(dim=1).amax(), (here[0] - before[name]).norm()
            if apart > 0.01 * way and apart > 1e-6 * here[0].norm():
                odd.append(name)
        if odd:
            what = f"{names(odd[:4])}{' and others' if len(odd) > 4 else ''}: whole, and no more the same on all ranks"
            fix = (
                "'summed' for what each rank uses with its own part of other weights; or Block() around the module in "
                "which it is used so, and 'summed' inside; check_vma('error') tells the line"
            )
            fail(self.where, f"{what} of axis {self.name!r}.", got="other gradients on each rank", fix=fix)


def _some(p: Tensor) -> Tensor:
    flat = p.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _FEW)][:_FEW].to(torch.complex128 if p.is_complex() else torch.float64).clone()
