"""From one layout to another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.collectives import check
from meshcomm.collectives.exchange import all_to_all, permute
from meshcomm.collectives.gather import all_gather_invariant, shard
from meshcomm.layout.notation import parse_arrow
from meshcomm.layout.plan import Step, plan_of, sides_of
from meshcomm.mesh import Mesh, mesh_with_key

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
    check.tensor(where, x, here.axis(here.axis_names[0], where))
    planned = _planned_at_trace_time if torch.compiler.is_compiling() else _planned
    steps, order = planned(layouts, tuple(x.shape), here._key)
    x = take(x, steps, here)
    return x if order == tuple(range(x.ndim)) else x.permute(order)


def _planned(layouts: str, shape: tuple[int, ...], mesh: int) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """The steps, and where each dim of the result is then, for a local shape on the mesh with this key."""
    where, sizes = "reshard", mesh_with_key(mesh).shape
    pattern = parse_arrow(where, layouts, sizes, 1)
    source, _ = sides_of(where, pattern, shape, sizes)
    whole = tuple(math.prod(pair) for pair in zip(shape, source.parts(sizes), strict=True))
    found = plan_of(where, pattern, whole, sizes, 1)
    return found.steps, found.order


@_torch.at_trace_time
def _planned_at_trace_time(layouts: str, shape: tuple[int, ...], mesh: int) -> Any:
    steps, order = _planned(layouts, shape, mesh)
    return tuple(tuple(step) for step in steps), order  # of types that a graph may hold


def take(x: Tensor, steps: Sequence[Step], mesh: Mesh) -> Tensor:
    """Take the steps of a plan."""
    for op, axes, dim, to, perm, elements, _ in steps:
        axis = axes[0] if len(axes) == 1 else axes
        if op == "shard":
            x = shard(x, axis, dim, mesh=mesh)
        elif op == "all_gather_invariant":
            x = all_gather_invariant(x, axis, dim, mesh=mesh)
        elif op == "all_to_all":
            x = all_to_all(x, axis, to, dim, mesh=mesh)
        elif elements:
            x = permute(x, axis, perm, mesh=mesh)
    return x
