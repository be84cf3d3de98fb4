"""Places on an axis: where this rank is (axis_index, axis_size), and where the largest and the smallest values are
(argmax, argmin).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from meshcomm.axis import AxisName, axes_in
from meshcomm.collectives import check
from meshcomm.collectives.reduce import all_reduce
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.watch import here


@Op("axis_index", "V", communicates=False)
def axis_index(axis: AxisName, *, mesh: Mesh | None = None) -> Tensor:
    """This rank's index along ``axis``, as a tensor.

    Type: varying. A Python int is ``mesh.coordinate[axis]``; it would be compiled into the graph as a constant of
    this rank.

    Args:
        axis: a name, or a tuple of names, of which the first is major.
        mesh: the current mesh by default.

    Returns: int64 ``[]`` on the mesh's device, new storage.

    Backward: none.

    Cost: none.

    Raises:
        MeshError: no such axis; called outside a rank.

    Example:
        >>> import meshcomm as mc
        >>> mesh = mc.make_mesh({"a": 2, "b": 2})
        >>> mc.launch(
        ...     lambda: (mc.axis_index("b", mesh=mesh).item(), mc.axis_index(("b", "a"), mesh=mesh).item()), ranks=4
        ... )
        [(0, 0), (1, 2), (0, 1), (1, 3)]

    Source: ``jax.lax.axis_index``.
    """
    if here.watcher is not None:
        return here.watcher.made(axis_index, axis, mesh, axis, mesh=mesh)  # type: ignore[no-any-return]
    found = check.axis_of("axis_index", axis, mesh)
    if found.mesh.reads is not None:
        found.mesh.reads.note(found.mesh.shape, axes_in(found.name))
    return found.index_tensor.clone()


@Op("axis_size", communicates=False)
def axis_size(axis: AxisName, *, mesh: Mesh | None = None) -> int:
    """How many ranks ``axis`` has.

    Args:
        axis: a name, or a tuple of names.
        mesh: the current mesh by default.

    Returns: a Python int.

    Cost: none.

    Raises:
        MeshError: no such axis.

    Example:
        >>> import meshcomm as mc
        >>> mc.axis_size(("a", "b"), mesh=mc.make_mesh({"a": 2, "b": 3}))
        6

    Source: ``jax.lax.axis_size``.
    """
    return check.mesh_of("axis_size", axis, mesh).size_of(axis, "axis_size")


@Op("argmax", "V -> I", composed=True)
def argmax(x: Tensor, axis: AxisName, *, mesh: Mesh | None = None) -> Tensor:
    """The index along ``axis`` that has the largest value, elementwise.

    ::

        rank 0  [5 1]      [0 1]
        rank 1  [5 2]  ->  [0 1]   (one logical value)

    Type: varying -> invariant.

    Args:
        x: a tensor of any shape that has an order; shapes and dtypes equal on every rank.
        axis: a name, or a tuple of names, of which the first is major.
        mesh: the current mesh by default.

    Returns: int64 of the shape of ``x``, on its device, new storage. Of equal values it is the lowest index; NaN is
    larger than every number, as it is to ``torch.argmax``.

    Backward: none, for there is no derivative: the value itself, ``all_reduce(x, axis, "max")``, has one.

    Cost: two all_reduces, of ``x`` and of as many int64.

    Raises:
        MeshError: no such axis; complex numbers, which have no order; not a tensor; a device the mesh cannot move.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 4})
        >>> mc.launch(lambda: mc.argmax(torch.tensor([3, 9, 9, 1])[mesh.rank], "dp", mesh=mesh).item(), ranks=4)
        [1, 1, 1, 1]

    Source: MPI_MAXLOC; ``pargmax`` of JAX.
    """
    return _extreme("argmax", "max", x, axis, mesh)


@Op("argmin", "V -> I", composed=True)
def argmin(x: Tensor, axis: AxisName, *, mesh: Mesh | None = None) -> Tensor:
    """The index along ``axis`` that has the smallest value, elementwise.

    ::

        rank 0  [5 1]      [0 0]
        rank 1  [5 2]  ->  [0 0]   (one logical value)

    Type: varying -> invariant.

    Args:
        x: a tensor of any shape that has an order; shapes and dtypes equal on every rank.
        axis: a name, or a tuple of names, of which the first is major.
        mesh: the current mesh by default.

    Returns: int64 of the shape of ``x``, on its device, new storage. Of equal values it is the lowest index; NaN is
    smaller than every number, as it is to ``torch.argmin``.

    Backward: none, for there is no derivative: the value itself, ``all_reduce(x, axis, "min")``, has one.

    Cost: two all_reduces, of ``x`` and of as many int64.

    Raises:
        MeshError: no such axis; complex numbers, which have no order; not a tensor; a device the mesh cannot move.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 4})
        >>> mc.launch(lambda: mc.argmin(torch.tensor([3, 1, 9, 1])[mesh.rank], "dp", mesh=mesh).item(), ranks=4)
        [1, 1, 1, 1]

    Source: MPI_MINLOC; ``pargmin`` of JAX.
    """
    return _extreme("argmin", "min", x, axis, mesh)


def _extreme(where: str, op: Literal["max", "min"], x: Tensor, axis: AxisName, mesh: Mesh | None) -> Tensor:
    ax = check.axis_of(where, axis, mesh)
    check.tensor(where, x, ax)
    check.reducible(where, x, op, ax)
    x = x.detach()
    best = all_reduce(x, axis, op, mesh=mesh)
    attained = (x == best) | (x.isnan() if x.is_floating_point() else False)  # where x is NaN, so is the best
    mine = torch.where(attained, axis_index(axis, mesh=mesh).to(x.device), ax.size)
    return all_reduce(mine, axis, "min", mesh=mesh)
