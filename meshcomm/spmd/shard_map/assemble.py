"""The parts of the ranks put together, in the process that holds all of them."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm.errors import VaryingError, fail, shape_text
from meshcomm.layout.notation import Layout
from meshcomm.mesh import Mesh
from meshcomm.runtime.process.accelerator import with_doubles
from meshcomm.spmd.shard_map.specs import WHERE, own_part


class Outputs(NamedTuple):
    """What one rank gives: tensors, how each is a part of a global one, and the rest."""

    tensors: list[Tensor]
    layouts: list[Layout]
    labels: list[str]
    rest: Any = None


def differentiable(x: Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return x.is_floating_point() or x.is_complex()


def assembled(ranks: list[Outputs], mesh: Mesh, order: int) -> list[Tensor]:
    """The global tensors of which the ranks have the parts."""
    first = ranks[0]
    forms = [[(y.dtype, y.shape) for y in each.tensors] for each in ranks]
    for rank, outputs in enumerate(ranks):
        if forms[0] != forms[rank] or first.labels != outputs.labels:
            what = "the ranks return different things."
            got = f"rank 0: {_listed(first)}; rank {rank}: {_listed(outputs)}"
            fail(WHERE, what, got=got, fix="return the same structure, shapes and dtypes on every rank")
    names, coordinates = mesh.axis_names, _coordinates(mesh)
    whole = []
    for i, (y, layout) in enumerate(zip(first.tensors, first.layouts, strict=True)):
        parts = [outputs.tensors[i] for outputs in ranks]
        axes = layout.axes
        free = [axis for axis in names if axis not in axes]
        counts = layout.parts(mesh.shape) if axes else [1] * y.ndim
        joined = y.new_empty([length * count for length, count in zip(y.shape, counts, strict=True)])
        whole.append(joined)
        if axes == names and y.layout is torch.strided and (dim := _only_cut(layout)) is not None:
            torch.cat(parts, dim, out=joined)
            continue
        if free:
            _check_copies(parts, layout, first.labels[i], coordinates, mesh, order)
        for part, coordinate in zip(parts, coordinates, strict=True):
            if not any(coordinate[axis] for axis in free):
                own_part(joined, layout, coordinate, mesh).copy_(part)
    return whole


def _only_cut(layout: Layout) -> int | None:
    """The dim that alone is cut, if one is."""
    cut = [dim for dim, (_, axes) in enumerate(layout) if axes]
    return cut[0] if len(cut) == 1 else None


def _listed(outputs: Outputs) -> str:
    pairs = zip(outputs.labels, outputs.tensors, strict=True)
    return ", ".join(f"{label} {shape_text(y.dtype, y.shape)}" for label, y in pairs)


def _coordinates(mesh: Mesh) -> list[dict[str, int]]:
    places = itertools.product(*(range(length) for length in mesh.shape.values()))
    return [dict(zip(mesh.axis_names, place, strict=True)) for place in places]


def _check_copies(
    parts: list[Tensor], layout: Layout, label: str, coordinates: list[dict[str, int]], mesh: Mesh, order: int
) -> None:
    """Along the axes that the layout does not name the ranks have the same."""
    originals: dict[tuple[int, ...], Tensor] = {}
    axes = layout.axes
    for part, coordinate in zip(parts, coordinates, strict=True):
        original = originals.setdefault(tuple([coordinate[axis] for axis in axes]), part)
        if original is part or _alike(original, part):
            continue
        free = [axis for axis in mesh.axis_names if axis not in axes]
        along = ", ".join(repr(axis) for axis in free if coordinate[axis])
        got = f"mesh {mesh.shape}; rank 0 of the axes and rank {coordinate} have different values"
        if order:
            what = f"the gradient of {label} differs along {along}, along which its value is invariant."
            fix = f"pvary it over {along} before it meets anything that differs between ranks"
        else:
            what = f"{label} differs along {along}, which its spec {str(layout)!r} does not name."
            fix = f"reduce it over {along}, or name the axis in its spec"
        fail(WHERE, what, got=got, fix=fix, kind=VaryingError)


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two parts are equal up to rounding."""
    if torch.equal(a, b):
        return True
    if not differentiable(a):
        return False
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = (x.to(with_doubles(x.device), wide) for x in (a, b))
    scale = a.abs().nan_to_num(0, 0, 0).max().item()
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
