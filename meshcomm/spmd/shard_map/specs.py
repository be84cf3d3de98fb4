"""Layouts for pytrees: a tree of specs whose leaves stand for whole subtrees of the values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm._torch import at_trace_time, tree_flatten, tree_leaves_with_path, tree_unflatten
from meshcomm.collectives.gather import all_gather_invariant, shard
from meshcomm.elsewhere import is_partition_spec
from meshcomm.errors import fail, shape_text
from meshcomm.layout.notation import Dim, Layout, as_text, parse
from meshcomm.layout.shapes import cut, fit, of_graph
from meshcomm.mesh import Mesh, mesh_with_key

WHERE = "shard_map"


class Laid(NamedTuple):
    """One leaf of a pytree."""

    value: Any
    label: str
    layout: Layout | None
    """None: it is no tensor."""


def in_strings(specs: Any) -> Any:
    """With the layout in place of each PartitionSpec."""
    leaves, form = tree_flatten(specs)
    return tree_unflatten([as_text(leaf) if is_partition_spec(leaf) else leaf for leaf in leaves], form)


def checked(specs: Any, label: str, mesh: Mesh | None) -> None:
    """Each leaf is a layout or None; said before any value is there."""
    for path, spec in tree_leaves_with_path(specs):
        if spec is not None and not isinstance(spec, str):
            what = f"{label}{path} is neither a layout nor None but {type(spec).__name__}."
            fail(WHERE, what, got=repr(spec), fix='such as "(dp b) d", "..." for what is not cut, None for no tensor')
        if spec is not None and mesh is not None and not torch.compiler.is_compiling():  # it is read when it is used
            parse(WHERE, spec, mesh.shape)


def spec_of_each_leaf(specs: Any, tree: Any, label: str, spec_label: str) -> list[Any]:
    """The spec of each leaf of ``tree``, of which ``specs`` is a prefix."""
    leaves, whole = tree_flatten(tree)
    if specs is None or type(specs) is str:
        return [specs] * len(leaves)
    entries, prefix = tree_flatten(specs)
    found: list[Any] = [None] * len(leaves)
    places = tree_unflatten(list(range(len(leaves))), whole)
    try:
        parts = prefix.flatten_up_to(places)
    except ValueError:
        path, spec, value = _first_difference(specs, tree, "")
        fail(
            WHERE,
            f"{spec_label}{path} is not a prefix of {label}{path}.",
            got=f"spec {_form(spec)}; value {_form(value)}",
            fix="give the same structure, or one spec for the whole subtree",
        )
    for entry, part in zip(entries, parts, strict=True):
        for place in tree_flatten(part)[0]:
            found[place] = entry
    return found


def _first_difference(spec: Any, value: Any, path: str) -> tuple[str, Any, Any]:
    """The innermost node at which the trees part, as far as keys lead there."""
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(spec, dict) and isinstance(value, dict) and spec.keys() == value.keys():
        pairs = [(f"[{key!r}]", spec[key], value[key]) for key in spec]
    elif type(spec) is type(value) and isinstance(spec, (tuple, list)) and len(spec) == len(value):
        pairs = [(f"[{i}]", *pair) for i, pair in enumerate(zip(spec, value, strict=True))]
    for step, inner, part in pairs:
        try:
            tree_flatten(inner)[1].flatten_up_to(part)
        except ValueError:
            return _first_difference(inner, part, path + step)
    return path, spec, value


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return shape_text(value.dtype, value.shape)
    if isinstance(value, dict):
        return f"{type(value).__name__} with keys {list(value)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of length {len(value)}"
    return repr(value) if isinstance(value, str) else type(value).__name__


def laid_out(specs: Sequence[Any], tree: Any, label: str, mesh: Mesh, *, whole: bool) -> list[Laid]:
    """Each leaf of ``tree`` with its spec read and fitted. ``whole``: its axes must divide the dims, too."""
    leaves = [("", tree)] if isinstance(tree, Tensor) else tree_leaves_with_path(tree)
    pairs = zip(specs, leaves, strict=True)
    return [Laid(leaf, label + path, of_leaf(spec, leaf, label + path, mesh, whole)) for spec, (path, leaf) in pairs]


def of_leaf(spec: str | None, leaf: Any, label: str, mesh: Mesh, whole: bool) -> Layout | None:
    """The layout of a leaf: None where it is no tensor, which the spec must know."""
    if isinstance(leaf, Tensor):
        if spec is None:
            got = f"{label} is {shape_text(leaf.dtype, leaf.shape)}"
            fail(
                WHERE, f"the spec of {label} is None, but it is a tensor.", got=got, fix='"..." for one that is not cut'
            )
        return of_tensor(spec, leaf.shape, label, mesh, whole)
    if spec is not None and leaf is not None:
        what = f"{label} is no tensor but {type(leaf).__name__}, and its spec is {spec!r}."
        fail(WHERE, what, fix="the spec None, or pass a tensor")
    return None


def of_tensor(spec: str, shape: Sequence[int], label: str, mesh: Mesh, whole: bool) -> Layout:
    """The layout with a name for every dim; an error of it says whose it is."""
    if torch.compiler.is_compiling():
        found = _fitted_at_trace_time(spec, of_graph(shape), label, mesh.key, whole)
        return Layout(Dim(name, axes) for name, axes in found)
    return _fitted(spec, tuple(shape), label, mesh.key, whole)


@lru_cache(4096)
def _fitted(spec: str, shape: tuple[int, ...], label: str, mesh: str, whole: bool) -> Layout:
    sizes, where = mesh_with_key(mesh).shape, f"{WHERE}, {label}"
    found = fit(where, parse(WHERE, spec, sizes), shape, sizes, spec)
    if whole:
        cut(where, found, shape, sizes, str(found))
    return found


@at_trace_time
def _fitted_at_trace_time(spec: str, shape: tuple[int, ...], label: str, mesh: str, whole: bool) -> Any:
    return tuple(tuple(dim) for dim in _fitted(spec, shape, label, mesh, whole))  # of types that a graph may hold


def local_part(x: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """This rank's part of a global tensor as each rank has it; the gradient of what is global is global."""
    for dim, (_, axes) in enumerate(layout):
        if axes:
            x = shard(x, axes, dim, mesh=mesh)
    return x


def joined(y: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """The global tensor of which this rank has its part."""
    for dim, (_, axes) in enumerate(layout):
        if axes:
            y = all_gather_invariant(y, axes, dim, mesh=mesh)
    return y


def only_cut(layout: Layout) -> int | None:
    """The dim that alone is cut, if one is."""
    cut = [dim for dim, (_, axes) in enumerate(layout) if axes]
    return cut[0] if len(cut) == 1 else None


def pieces(x: Tensor, layout: Layout, places: Sequence[dict[str, int]], mesh: Mesh) -> Sequence[Tensor]:
    """The part of a global tensor at each place of the mesh, as views without a graph."""
    if layout.axes == mesh.axis_names and x.layout is torch.strided and (dim := only_cut(layout)) is not None:
        return x.detach().chunk(len(places), dim)
    return [own_part(x.detach(), layout, place, mesh) for place in places]


def own_part(x: Tensor, layout: Layout, coordinate: dict[str, int], mesh: Mesh) -> Tensor:
    """The part of a global tensor at a place of the mesh, as a view."""
    for dim, (_, axes) in enumerate(layout):
        index, parts = 0, 1
        for axis in axes:
            index, parts = index * mesh.shape[axis] + coordinate[axis], parts * mesh.shape[axis]
        if parts > 1:
            length = x.shape[dim] // parts
            x = x.narrow(dim, index * length, length)
    return x
