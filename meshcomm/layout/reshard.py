"""From one layout to another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from meshcomm.collectives import check
from meshcomm.collectives.exchange import all_to_all, permute
from meshcomm.collectives.gather import all_gather_invariant, shard
from meshcomm.layout.notation import parse_arrow
from meshcomm.layout.plan import Step, plan_of, sides_of
from meshcomm.mesh import Mesh

__all__ = ["reshard", "take"]


def reshard(x: Tensor, layouts: str, *, mesh: Mesh | None = None) -> Tensor:
    """Take this rank's part of a global tensor in one layout to its part in another.

    ::

        "b (tp s) h -> b s (tp h)"

        rank 0  x[:, :s/2, :]      x[:, :, :h/2]
        rank 1  x[:, s/2:, :]  ->  x[:, :, h/2:]

    A layout is einops' notation in which parentheses hold mesh axes and the dim that is cut over them, major first:
    ``"(dp b) s (tp d)"``. Along an axis that stands anywhere in the string, a side that does not name it is invariant;
    axes that stand nowhere are left as they are. The dims of the two sides may stand in different orders.

    Type: as the string says. The gradient of a side has the layout of that side.

    Args:
        x: this rank's part, with one dim for each of the left side's.
        layouts: ``"src -> dst"``.
        mesh: the current mesh by default.

    Returns: this rank's part in the layout on the right, new storage; ``x`` itself (a view where dims are moved) if
        nothing has to be sent or cut.

    Backward: the arrow turned round. What comes out invariant and is used with what varies goes through :func:`pvary`.

    Cost: the cheapest sequence of all_to_all, all_gather, local cuts and exchanges of whole parts that there is, in
    bytes sent per rank; :func:`plan` shows it.

    Raises:
        MeshError: layouts that are none; other dims on the two sides; a dim that its axes do not divide; not a tensor.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> def columns():
        ...     rows = torch.arange(2) + 2 * mesh.rank  # of [[0, 1], [2, 3]]
        ...     return mc.reshard(rows[None], "(tp r) c -> r (tp c)", mesh=mesh).tolist()
        >>> mc.launch(columns, ranks=2)
        [[[0], [2]], [[1], [3]]]

    Source: einops; the layouts of Mesh TensorFlow; array redistribution by portable collectives (Zhang et al., 2021).
    """
    where = "reshard"
    here = check.mesh_of(where, "", mesh)
    sizes = here.shape
    pattern = parse_arrow(where, layouts, sizes, 1)
    check.tensor(where, x, here.axis((pattern.spoken or here.axis_names)[0], where))
    source, _ = sides_of(where, pattern, x.shape, sizes)
    whole = tuple(math.prod(pair) for pair in zip(x.shape, source.parts(sizes), strict=True))
    found = plan_of(where, pattern, whole, sizes, x.element_size())
    x = take(x, found.steps, here)
    return x if found.order == tuple(range(x.ndim)) else x.permute(found.order)


def take(x: Tensor, steps: Sequence[Step], mesh: Mesh) -> Tensor:
    """Take the steps of a plan."""
    for step in steps:
        axes = step.axes[0] if len(step.axes) == 1 else step.axes
        if step.op == "shard":
            x = shard(x, axes, step.dim, mesh=mesh)
        elif step.op == "all_gather_invariant":
            x = all_gather_invariant(x, axes, step.dim, mesh=mesh)
        elif step.op == "all_to_all":
            x = all_to_all(x, axes, step.to, step.dim, mesh=mesh)
        elif step.elements:
            x = permute(x, axes, step.perm, mesh=mesh)
    return x
