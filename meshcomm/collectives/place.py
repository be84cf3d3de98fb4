"""Where this rank is on an axis: axis_index, axis_size."""

from __future__ import annotations

from torch import Tensor

from meshcomm.collectives import check
from meshcomm.mesh import AxisName, Mesh
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
    return check.axis_of("axis_index", axis, mesh).index_tensor.clone()


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
