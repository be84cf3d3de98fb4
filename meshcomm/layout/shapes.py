"""What a layout makes of a shape, and layouts as JAX's PartitionSpec tuples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from meshcomm.collectives import check
from meshcomm.errors import fail, names
from meshcomm.layout.notation import Dim, Layout, expand, parse
from meshcomm.mesh import Mesh

__all__ = ["fit", "global_shape", "layout_of", "local_shape", "partition_spec"]


def fit(where: str, layout: Layout, shape: Sequence[int], mesh: Mapping[str, int], text: str) -> Layout:
    """The layout with its ellipsis written out, for a tensor of this shape, global or local.

    Raises MeshError where the number of dims is another one, or a dim called 1 is longer.
    """
    ellipsis = sum(name == "..." for name in layout.names)
    extra = len(shape) - len(layout) + ellipsis
    if extra < 0 or (extra and not ellipsis):
        count = f"{len(layout) - ellipsis} dims{' or more' if ellipsis else ''}"
        what = f"{str(layout)!r} has {count}, the tensor {len(shape)}."
        fail(where, what, got=f"{text!r}; shape {tuple(shape)}; mesh {dict(mesh)}", fix="name every dim")
    layout = expand(layout, extra)
    for dim, length in zip(layout, shape, strict=True):
        if dim.name == "1" and length != 1:
            what = f"a dim called 1 has length {length}."
            fail(where, what, got=f"{text!r}; shape {tuple(shape)}; mesh {dict(mesh)}", fix="give the dim a name")
    return layout


def _checked_shape(where: str, shape: object) -> tuple[int, ...]:
    lengths = tuple(shape.shape) if isinstance(shape, Tensor) else shape
    if not isinstance(lengths, Sequence) or not all(check.whole_number(n) and n >= 0 for n in lengths):
        fail(where, f"{shape!r} is not a shape.", fix="a tuple of lengths, or a tensor")
    return tuple(lengths)


def cut(where: str, layout: Layout, shape: Sequence[int], mesh: Mapping[str, int], text: str) -> tuple[int, ...]:
    """The shape of a rank's part of a global shape, for a layout that :func:`fit` has seen."""
    for dim, length, parts in zip(layout, shape, layout.parts(mesh), strict=True):
        if length % parts:
            sizes = " * ".join(f"{axis}={mesh[axis]}" for axis in dim.axes)
            fail(
                where,
                f"dim {dim.name!r} of length {length} is not divisible by {sizes}.",
                got=f"{text!r}; global shape {tuple(shape)}; mesh {dict(mesh)}",
                fix=f"pad it to {-(-length // parts) * parts}",
            )
    return tuple(length // parts for length, parts in zip(shape, layout.parts(mesh), strict=True))


def local_shape(layout: str, shape: Sequence[int], mesh: Mesh | None = None) -> tuple[int, ...]:
    """The shape of each rank's part of a global tensor.

    Args:
        layout: such as ``"(dp b) s (tp d)"``.
        shape: the global shape, or a tensor that has it.
        mesh: the current mesh by default.

    Returns: a tuple of lengths.

    Cost: none.

    Raises:
        MeshError: a layout that is none, or of another number of dims; a dim that its axes do not divide.

    Example:
        >>> import meshcomm as mc
        >>> mc.local_shape("(dp b) (tp d)", (8, 6), mc.make_mesh({"dp": 4, "tp": 2}))
        (2, 3)
    """
    where = "local_shape"
    sizes = check.mesh_of(where, "", mesh).shape
    whole = _checked_shape(where, shape)
    fitted = fit(where, parse(where, layout, sizes), whole, sizes, layout)
    return cut(where, fitted, whole, sizes, layout)


def global_shape(layout: str, shape: Sequence[int], mesh: Mesh | None = None) -> tuple[int, ...]:
    """The shape of the global tensor of which each rank has a part of this shape: undoes :func:`local_shape`.

    Args:
        layout: such as ``"(dp b) s (tp d)"``.
        shape: the local shape, or a tensor that has it.
        mesh: the current mesh by default.

    Returns: a tuple of lengths.

    Cost: none.

    Raises:
        MeshError: a layout that is none, or of another number of dims.

    Example:
        >>> import meshcomm as mc
        >>> mc.global_shape("(dp b) (tp d)", (2, 3), mc.make_mesh({"dp": 4, "tp": 2}))
        (8, 6)
    """
    where = "global_shape"
    sizes = check.mesh_of(where, "", mesh).shape
    mine = _checked_shape(where, shape)
    parts = fit(where, parse(where, layout, sizes), mine, sizes, layout).parts(sizes)
    return tuple(math.prod(pair) for pair in zip(mine, parts, strict=True))


def partition_spec(layout: str, mesh: Mesh | None = None) -> tuple[Any, ...]:
    """A layout as the tuple that ``jax.sharding.PartitionSpec`` takes: per dim None, an axis, or a tuple of axes.

    Args:
        layout: such as ``"(dp b) s (tp d)"``; no ellipsis.
        mesh: the current mesh by default.

    Returns: a tuple, one entry per dim.

    Cost: none.

    Raises:
        MeshError: a layout that is none; an ellipsis.

    Example:
        >>> import meshcomm as mc
        >>> mc.partition_spec("(dp fsdp b) s (tp d)", mc.make_mesh({"dp": 1, "fsdp": 2, "tp": 2}))
        (('dp', 'fsdp'), None, 'tp')
    """
    where = "partition_spec"
    parsed = parse(where, layout, check.mesh_of(where, "", mesh).shape)
    if "..." in parsed.names:
        fail(where, "a PartitionSpec has one entry per dim, and an ellipsis any number.", got=repr(layout))
    return tuple(None if not dim.axes else dim.axes[0] if len(dim.axes) == 1 else dim.axes for dim in parsed)


def layout_of(spec: Sequence[Any], dims: str | None = None, mesh: Mesh | None = None) -> str:
    """The layout that a JAX-style PartitionSpec says: undoes :func:`partition_spec`.

    Args:
        spec: per dim None, the name of an axis, or a tuple of names, the first one major.
        dims: the names of the dims, such as ``"b s d"``; ``d0 d1 ...`` by default. Dims beyond the spec are not cut.
        mesh: the current mesh by default.

    Returns: a string.

    Cost: none.

    Raises:
        MeshError: entries that are no axes of the mesh; an axis twice; fewer names than entries.

    Example:
        >>> import meshcomm as mc
        >>> mc.layout_of((("dp", "fsdp"), None, "tp"), "b s d", mc.make_mesh({"dp": 1, "fsdp": 2, "tp": 2}))
        '(dp fsdp b) s (tp d)'
    """
    where = "layout_of"
    sizes = check.mesh_of(where, "", mesh).shape
    if isinstance(spec, str) or not isinstance(spec, Sequence):
        fail(where, f"a PartitionSpec is a tuple, not {spec!r}.", fix='such as (("dp", "fsdp"), None, "tp")')
    called = [f"d{i}" for i in range(len(spec))] if dims is None else list(parse(where, dims, sizes).names)
    if len(called) < len(spec):
        fail(where, f"{len(called)} names for a PartitionSpec of {len(spec)} entries.", got=f"{dims!r}; {spec!r}")
    found = []
    for name, entry in zip(called, [*spec, *[None] * (len(called) - len(spec))], strict=True):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        for axis in axes:
            if axis not in sizes:
                fail(
                    where, f"no axis {axis!r} in the mesh.", got=f"{spec!r}; mesh {sizes}", fix=f"one of {names(sizes)}"
                )
        found.append(Dim(name, axes))
    return str(parse(where, str(Layout(found)), sizes))
