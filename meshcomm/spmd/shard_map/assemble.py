"""The parts of the ranks put together, in the process that holds all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from meshcomm.collectives.check import differentiable
from meshcomm.errors import VaryingError, fail, shape_text
from meshcomm.layout.notation import Layout
from meshcomm.mesh import Mesh
from meshcomm.runtime.process.accelerator import with_doubles
from meshcomm.spmd.shard_map.specs import WHERE, only_cut, own_part


class Outputs(NamedTuple):
    """What one rank gives: tensors, how each is a part of a global one, and the rest."""

    tensors: list[Tensor]
    layouts: list[Layout]
    labels: list[str]
    rest: Any = None


def coordinates(mesh: Mesh) -> Sequence[dict[str, int]]:
    """Where each rank of the mesh is, in order; not to be changed."""
    return _coordinates(tuple(mesh.shape.items()))


@lru_cache(16)
def _coordinates(shape: tuple[tuple[str, int], ...]) -> list[dict[str, int]]:
    places = itertools.product(*[range(length) for _, length in shape])
    return [dict(zip([name for name, _ in shape], place, strict=True)) for place in places]


def assembled(ranks: list[Outputs], places: Sequence[dict[str, int]], mesh: Mesh, order: int) -> list[Tensor]:
    """The global tensors of which the ranks, at these places, have the parts."""
    first = ranks[0]
    forms = [[(y.dtype, y.shape) for y in each.tensors] for each in ranks]
    for rank, outputs in enumerate(ranks):
        if forms[0] != forms[rank] or first.labels != outputs.labels:
            what = "the ranks return different things."
            got = f"rank 0: {_listed(first)}; rank {rank}: {_listed(outputs)}"
            fail(WHERE, what, got=got, fix="return the same structure, shapes and dtypes on every rank")
    names = mesh.axis_names
    whole = []
    for i, (y, layout) in enumerate(zip(first.tensors, first.layouts, strict=True)):
        parts = [outputs.tensors[i] for outputs in ranks]
        axes = layout.axes
        counts = layout.parts(mesh.shape) if axes else [1] * y.ndim
        joined = y.new_empty([length * count for length, count in zip(y.shape, counts, strict=True)])
        whole.append(joined)
        if axes == names and y.layout is torch.strided and (dim := only_cut(layout)) is not None:
            torch.cat(parts, dim, out=joined)
            continue
        originals: dict[tuple[int, ...], Tensor] = {}
        for part, place in zip(parts, places, strict=True):  # along the axes that it does not name all have the same
            original = originals.setdefault(tuple([place[axis] for axis in axes]) if axes else (), part)
            if original is part:
                own_part(joined, layout, place, mesh).copy_(part)
            elif not _alike(original, part):
                _differs(layout, first.labels[i], place, mesh, order)
    return whole


def _listed(outputs: Outputs) -> str:
    pairs = zip(outputs.labels, outputs.tensors, strict=True)
    return ", ".join(f"{label} {shape_text(y.dtype, y.shape)}" for label, y in pairs)


def _differs(layout: Layout, label: str, place: dict[str, int], mesh: Mesh, order: int) -> NoReturn:
    """This rank has something else than the first one that has the same place along the axes of the layout."""
    free = [axis for axis in mesh.axis_names if axis not in layout.axes]
    along = ", ".join(repr(axis) for axis in free if place[axis])
    got = f"mesh {mesh.shape}; rank 0 of the axes and rank {place} have different values"
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
