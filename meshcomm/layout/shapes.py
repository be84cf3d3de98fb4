"""What a layout makes of a shape, and layouts as JAX's PartitionSpec tuples."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence, Set
from operator import index
from typing import Any

from torch import Tensor

from meshcomm.collectives import check
from meshcomm.elsewhere import is_partition_spec
from meshcomm.errors import fail, names
from meshcomm.layout.notation import Dim, Layout, as_text, expand, parse, pointed
from meshcomm.mesh import Mesh
from meshcomm.runtime.axis_names import together_of, written_out


def fit(where: str, layout: Layout, shape: Sequence[int], mesh: Mapping[str, int], text: str) -> Layout:
    """The layout with its ellipsis written out, for a tensor of this shape, global or local.

    Raises MeshError where the number of dims is another one, or a dim called 1 is longer.
    """
    given = f"shape {tuple(shape)}; mesh {dict(mesh)}"
    ellipsis = sum(name == "..." for name in layout.names)
    extra = len(shape) - len(layout) + ellipsis
    if extra < 0 or (extra and not ellipsis):
        count = len(layout) - ellipsis
        dims = f"{count} dim{'' if count == 1 else 's'}{' or more' if ellipsis else ''}"
        what = f"{str(layout)!r} has {dims}, the tensor {len(shape)}."
        places = [at for dim, at in zip(layout, layout.at, strict=False) if dim.name != "..."]
        at = places[min(len(shape), count - 1)] if places else None
        fix = "name every dim" if extra > 0 else "name no more dims than there are"
        fail(where, pointed(what, text, at), got=given, fix=fix)
    layout = expand(layout, extra)
    for i, (dim, length) in enumerate(zip(layout, shape, strict=True)):
        if dim.name == "1" and length != 1:
            at = layout.at[i] if layout.at else None
            fail(where, pointed(f"a dim called 1 has length {length}.", text, at), got=given, fix="give it a name")
    return layout


def of_graph(shape: Sequence[int]) -> tuple[int, ...]:
    """The lengths in a graph that holds a plan for them, and is for no others: ranks with other graphs, for any length
    or for these, have the same plan.
    """
    return tuple([index(length) for length in shape])


def checked_shape(where: str, shape: object) -> tuple[int, ...]:
    """Lengths, or those of a tensor."""
    lengths = tuple(shape.shape) if isinstance(shape, Tensor) else shape
    if not check.are_lengths(lengths):
        fail(where, f"{shape!r} is not a shape.", fix="a tuple of lengths, or a tensor")
    return tuple(map(int, lengths))


def cut(where: str, layout: Layout, shape: Sequence[int], mesh: Mapping[str, int], text: str) -> tuple[int, ...]:
    """The shape of a rank's part of a global shape, for a layout that :func:`fit` has seen."""
    counts = layout.parts(mesh)
    for dim, length, parts in zip(layout, shape, counts, strict=True):
        if length % parts:
            sizes = " * ".join(f"{axis}={mesh[axis]}" for axis in dim.axes)
            what = f"dim {dim.name!r} of length {length} is not divisible by {sizes}."
            name = re.escape(dim.name)
            ways = (" +".join(dim.axes), "[^()]+")  # as they are, or by a name for several
            found = next(filter(None, (re.search(rf"\( *{way} +({name}) *\)", text) for way in ways)), None)
            fail(
                where,
                pointed(what, text, found and found.start(1)),
                got=f"global shape {tuple(shape)}; mesh {dict(mesh)}",
                fix=f"pad it to {-(-length // parts) * parts}",
            )
    return tuple(length // parts for length, parts in zip(shape, counts, strict=True))


def dim_names(where: str, dims: str | None, mesh: Mapping[str, int], least: int, exact: bool = False) -> list[str]:
    """The names in a string such as ``"b s d"``, or ``d0 d1 ...``: at least so many, or exactly."""
    if dims is None:
        called = [f"d{i}" for i in range(least)]
        if {*called} & {*mesh, *together_of(mesh)}:
            fail(where, "a mesh axis has the name that a dim would get.", got=f"mesh {dict(mesh)}", fix="pass dims=")
        return called
    parsed = parse(where, dims, mesh)
    wrong = next((i for i, dim in enumerate(parsed) if dim.axes or dim.name == "..."), None)
    if wrong is not None:
        fix = "the names alone, one per dim, such as 'b s d'"
        fail(where, pointed("dims= names the dims.", dims, parsed.at[wrong]), got=f"mesh {dict(mesh)}", fix=fix)
    if len(parsed) < least or (exact and len(parsed) > least):
        has, needed = f"{len(parsed)} name{'' if len(parsed) == 1 else 's'}", f"{least} dim{'' if least == 1 else 's'}"
        at = parsed.at[least] if len(parsed) > least else len(dims)
        what = f"{has} for {needed}{'' if exact else ' or more'}."
        fail(where, pointed(what, dims, at), got=f"mesh {dict(mesh)}", fix="one name per dim")
    return list(parsed.names)


def local_shape(layout: str | Collection[Any], shape: Sequence[int], mesh: Mesh | None = None) -> tuple[int, ...]:
    """The shape of each rank's part of a global tensor.

    Type: lengths, the same on every rank.

    Args:
        layout: such as ``"(dp b) s (tp d)"``, or a PartitionSpec.
        shape: the global shape, or a tensor that has it.
        mesh: the current mesh by default.

    Returns: a tuple of lengths.

    Backward: none, for lengths are Python ints.

    Cost: none.

    Raises:
        MeshError: a layout that is none, or of another number of dims; a dim that its axes do not divide.

    Example:
        >>> import meshcomm as mc
        >>> mc.local_shape("(dp b) (tp d)", (8, 6), mc.make_mesh({"dp": 4, "tp": 2}))
        (2, 3)
    """
    where, text = "local_shape", as_text(layout)
    sizes = check.mesh_of(where, "", mesh).shape
    whole = checked_shape(where, shape)
    fitted = fit(where, parse(where, text, sizes), whole, sizes, text)
    return cut(where, fitted, whole, sizes, text)


def global_shape(layout: str | Collection[Any], shape: Sequence[int], mesh: Mesh | None = None) -> tuple[int, ...]:
    """The shape of the global tensor of which each rank has a part of this shape: undoes :func:`local_shape`.

    Type: lengths, the same on every rank.

    Args:
        layout: such as ``"(dp b) s (tp d)"``, or a PartitionSpec.
        shape: the local shape, or a tensor that has it.
        mesh: the current mesh by default.

    Returns: a tuple of lengths.

    Backward: none, for lengths are Python ints.

    Cost: none.

    Raises:
        MeshError: a layout that is none, or of another number of dims.

    Example:
        >>> import meshcomm as mc
        >>> mc.global_shape("(dp b) (tp d)", (2, 3), mc.make_mesh({"dp": 4, "tp": 2}))
        (8, 6)
    """
    where, text = "global_shape", as_text(layout)
    sizes = check.mesh_of(where, "", mesh).shape
    mine = checked_shape(where, shape)
    parts = fit(where, parse(where, text, sizes), mine, sizes, text).parts(sizes)
    return tuple(math.prod(pair) for pair in zip(mine, parts, strict=True))


def partition_spec(layout: str, mesh: Mesh | None = None) -> tuple[str | tuple[str, ...] | None, ...]:
    """A layout as the tuple that ``jax.sharding.PartitionSpec`` takes: per dim None, an axis, or a tuple of axes.

    Type: names, the same on every rank.

    Args:
        layout: such as ``"(dp b) s (tp d)"``; no ellipsis.
        mesh: the current mesh by default.

    Returns: a tuple, one entry per dim.

    Backward: none, for there are no tensors.

    Cost: none.

    Raises:
        MeshError: a layout that is none; an ellipsis.

    Example:
        >>> import meshcomm as mc
        >>> mc.partition_spec("(dp fsdp b) s (tp d)", mc.make_mesh({"dp": 1, "fsdp": 2, "tp": 2}))
        (('dp', 'fsdp'), None, 'tp')
    """
    where = "partition_spec"
    sizes = check.mesh_of(where, "", mesh).shape
    parsed = parse(where, layout, sizes)
    no_ellipsis(where, parsed, layout, sizes)
    return tuple(None if not dim.axes else dim.axes[0] if len(dim.axes) == 1 else dim.axes for dim in parsed)


def no_ellipsis(where: str, layout: Layout, text: str, mesh: Mapping[str, int]) -> None:
    """Refuse an ellipsis where a layout is turned into something with one entry per dim."""
    if "..." in layout.names:
        at = layout.at[layout.names.index("...")]
        what = "an ellipsis is any number of dims, and here each is counted."
        fail(where, pointed(what, text, at), got=f"mesh {dict(mesh)}", fix="name every dim")


def layout_of(spec: Collection[Any], dims: str | None = None, mesh: Mesh | None = None) -> str:
    """The layout that a JAX-style PartitionSpec says: undoes :func:`partition_spec`.

    Type: names, the same on every rank.

    Args:
        spec: per dim None, the name of an axis, or a tuple of names, the first one major.
        dims: the names of the dims, such as ``"b s d"``; ``d0 d1 ...`` by default. Dims beyond the spec are not cut.
        mesh: the current mesh by default.

    Returns: a string, such as ``"(dp b) s (tp d)"``.

    Backward: none, for there are no tensors.

    Cost: none.

    Raises:
        MeshError: entries that are no axes of the mesh; an axis twice; fewer names than entries; a cut dim called 1.

    Example:
        >>> import meshcomm as mc
        >>> mc.layout_of((("dp", "fsdp"), None, "tp"), "b s d", mc.make_mesh({"dp": 1, "fsdp": 2, "tp": 2}))
        '(dp fsdp b) s (tp d)'
    """
    where = "layout_of"
    sizes = check.mesh_of(where, "", mesh).shape
    spec = tuple(spec) if is_partition_spec(spec) else spec  # it is no Collection
    if isinstance(spec, (str, Mapping, Set)) or not isinstance(spec, Collection):
        fail(where, f"a PartitionSpec is a tuple, not {spec!r}.", fix='such as (("dp", "fsdp"), None, "tp")')
    called, together = dim_names(where, dims, sizes, len(spec)), together_of(sizes)
    found, seen = [], set[str]()
    for name, entry in zip(called, [*spec, *[None] * (len(called) - len(spec))], strict=True):
        said = () if entry is None else tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)
        axes = written_out(said, together) if all(isinstance(axis, str) for axis in said) else said
        for axis in axes:
            if not isinstance(axis, str) or axis not in sizes:
                given = f"{spec!r}; mesh {sizes}"
                fail(where, f"no axis {axis!r} in the mesh.", got=given, fix=f"one of {names(sizes)}")
            if axis in seen:
                fail(
                    where, f"the axis {axis!r} stands twice.", got=f"{spec!r}", fix="a tensor is cut over an axis once"
                )
            seen.add(axis)
        if axes and name == "1":
            fail(where, f"a dim called 1 is cut over {names(axes)}.", got=f"{spec!r}; dims {dims!r}", fix="name it")
        found.append(Dim(name, axes))
    return str(Layout(found))
