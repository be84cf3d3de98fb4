"""On which meshes a program is verified, and along which axes its layouts are cut."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshcomm._torch import tree_flatten
from meshcomm.errors import fail
from meshcomm.layout.notation import parse
from meshcomm.layout.shapes import cut, fit
from meshcomm.mesh import Mesh

Shape = dict[str, int]
_GROUP = re.compile(r"\(([^()]*)\)")
_NUMBER, _INDEX = re.compile(r"^input (\d+)"), r"inputs[\1]"


def axes_of(specs: Iterable[Any], where: str) -> list[str]:
    """The axes that stand in layouts, in order: all names in parentheses but the last. MeshError for what is none."""
    found: dict[str, int] = {}
    texts = [spec for tree in specs for spec in tree_flatten(tree)[0] if spec is not None]
    for spec in texts:
        if not isinstance(spec, str):
            what = f"a spec is neither a layout nor None but {type(spec).__name__}."
            fail(where, what, got=repr(spec), fix='such as "(dp b) d", "..." for what is not cut, None for no tensor')
        for group in _GROUP.findall(spec):
            found |= dict.fromkeys(group.split()[:-1], 2)
    for spec in texts:
        parse(where, spec, found)
    return list(found)


def smallest_first(shapes: Iterable[Shape]) -> list[Shape]:
    """Each once, by the number of ranks."""
    once = {tuple(shape.items()): shape for shape in shapes}
    return sorted(once.values(), key=lambda shape: math.prod(shape.values()))


def of_axes(axes: Sequence[str]) -> list[Shape]:
    """Each axis at sizes 2 and 3, each pair 2 x 2; all others at 1."""
    ones = dict.fromkeys(axes, 1)
    alone = [ones | {axis: size} for size in (2, 3) for axis in axes]
    pairs = [ones | dict.fromkeys(pair, 2) for pair in itertools.combinations(axes, 2)]
    return smallest_first([*alone, *pairs])


def given(meshes: object, where: str) -> list[Shape]:
    """The meshes that a user gave, as sizes: one, or several; smallest first."""
    several = [meshes] if isinstance(meshes, (Mapping, Mesh)) else meshes
    if not isinstance(several, Iterable) or isinstance(several, str):
        fail(where, f"meshes={meshes!r} are no meshes.", fix='a list such as [{"dp": 2}, {"dp": 2, "tp": 2}]')
    return smallest_first([_shape(each, where) for each in several])


def _shape(mesh: object, where: str) -> Shape:
    fix = 'such as {"dp": 2, "tp": 2}'
    if isinstance(mesh, Mesh):
        return dict(mesh.shape)
    if not isinstance(mesh, Mapping) or not mesh:
        fail(where, f"{mesh!r} in meshes= is no mesh.", fix=fix)
    for name, size in mesh.items():
        if not isinstance(name, str) or not name.isidentifier() or isinstance(size, bool) or not isinstance(size, int):
            fail(where, f"{mesh!r} in meshes= is no mesh: {name!r} has size {size!r}.", fix=fix)
        if size < 1 or math.prod(map(int, mesh.values())) > 64:
            fail(where, f"{mesh!r} in meshes= has no size that can be run here.", fix="1 to 64 ranks in all")
    return dict(mesh)


def divides(spec: str | None, shape: tuple[int, ...], label: str, mesh: Mapping[str, int], where: str) -> None:
    """MeshError where a tensor of this shape cannot be cut so."""
    if spec is None:
        fail(where, f"the spec of {label} is None, but it is a tensor.", fix='"..." for one that is not cut')
    here = f"{where}, {_NUMBER.sub(_INDEX, label)}"
    cut(here, fit(here, parse(where, spec, mesh), shape, mesh, spec), shape, mesh, spec)
