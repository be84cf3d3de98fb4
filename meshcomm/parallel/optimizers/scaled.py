"""``torch.amp.GradScaler`` over parameters that are cut: a gradient that is not finite on one rank is one of the model,
so all ranks skip the step, and none does alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshcomm._torch import watch_unscaled
from meshcomm.collectives.reduce import all_reduce
from meshcomm.mesh import Mesh
from meshcomm.parallel.cut_parameters import axes_of_parts, meshes_among, parts_among
from meshcomm.watch import paused


def watch_scalers() -> None:
    """From now on the ranks of a mesh agree whether gradients are finite, wherever a scaler looks at them."""
    watch_unscaled(_agree)


def _mesh_of(params: list[Tensor]) -> Mesh | None:
    """The largest mesh over which these are spread, if ranks of it have others; else all of them see the same."""
    mesh = max(meshes_among(params), key=lambda mesh: mesh.size, default=None)
    if mesh is None or mesh.size == 1:
        return None
    return mesh if parts_among(params) or any(axes_of_parts(p, (), mesh)[0] for p in params) else None


@torch.no_grad()
def _agree(optimizer: Optimizer, own: Tensor, found: dict[torch.device, Tensor]) -> None:
    """``found``: by device 1 where a gradient of this rank is not finite; ``own``: the 0 that this was made of."""
    mesh = _mesh_of([p for group in optimizer.param_groups for p in group["params"]])
    if mesh is None:
        return
    if not found:
        found[own.device] = own  # there are no gradients here, and some on other ranks
    with paused():
        here = torch.stack([x.to(mesh.device) for x in found.values()]).amax()
        most = all_reduce(here, mesh.axis_names, "max", mesh=mesh)
    for x in found.values():
        x.copy_(most)
