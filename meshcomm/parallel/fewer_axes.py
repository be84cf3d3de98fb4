"""Parameters that go over fewer axes than the module that they are in: experts, of which each index of an axis has
others.

They are told by patterns of names, ``axes={"*.experts": "dp"}``, or were said to vary by :func:`mark_varying`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshcomm.axis import Axis, axes_in
from meshcomm.errors import fail, likely, names
from meshcomm.mesh import Mesh
from meshcomm.parallel.cut_parameters import named_by, parts_of
from meshcomm.runtime.axis_names import written_out
from meshcomm.runtime.transports.solo import SoloLink
from meshcomm.spmd.types.vma import declared

Axes = tuple[str, ...]


class Fewer(NamedTuple):
    """Of a parameter or a buffer."""

    told: Axes | None
    """The axes that a pattern gives it."""
    varies: frozenset[str]
    """The axes along which it is known to be another one."""

    def of(self, axes: Axes) -> Axes:
        """What is left of these."""
        return tuple(axis for axis in axes if axis not in self.varies)

    def others(self, within: Axes) -> Axes:
        """Those of these along which a pattern says that it is another one."""
        return () if self.told is None else tuple(axis for axis in within if axis not in self.told)


def axis_over(mesh: Mesh, axes: Axes, where: str) -> Axis:
    """These as one axis, or this rank by itself where there are none."""
    if axes:
        return mesh.axis(axes if len(axes) > 1 else axes[0], where)
    index = mesh.own_index()
    return Axis(mesh, (), (mesh.ranks[index],), 0, SoloLink(), mesh.coordinate_of(index))


def checked_axes(where: str, axes: object, mesh: Mesh, within: Axes) -> dict[str, Axes]:
    """The axes of each pattern, which are some of ``within``: those of the module."""
    fix = f'such as {{"*.experts": {within[0]!r}}}: names of parts or parameters, and the axes that they go over'
    if axes is None:
        return {}
    if not isinstance(axes, Mapping) or not all(isinstance(pattern, str) for pattern in axes):
        fail(where, f"axes={axes!r} is not a mapping of patterns to axes.", fix=fix)
    found = {pattern: mesh.axes_of(name, where) if name != () else () for pattern, name in axes.items()}
    for pattern, given in found.items():
        more = [name for name in given if name not in within]
        if more:
            what = f"axes: {pattern!r} goes over {names(more)}, and the module over {names(within)}."
            fail(where, what, fix="some of the module's axes, those along which what is named is the same")
    return found


def fewer_axes(
    where: str, module: nn.Module, told: Mapping[str, Axes], mesh: Mesh, within: Axes, apart: Collection[int] = ()
) -> dict[int, Fewer]:
    """By id, what is known of the parameters and buffers that go over fewer axes than ``within``, all but ``apart``."""
    found: dict[int, Fewer] = {}
    used: set[str] = set()
    parts, by_name = parts_of(module), _tensors_of(module)
    seen: dict[int, tuple[str, Axes | None]] = {}
    for path, x in by_name:
        pattern = next((each for each in told if named_by(each, path)), None)
        if pattern is not None:
            used.add(pattern)
        if id(x) in apart:
            continue
        mine = None if pattern is None else told[pattern]
        first, theirs = seen.setdefault(id(x), (path, mine))
        if theirs != mine:
            what = f"axes: {first!r} and {path!r} are one parameter, of which only one is named, or each otherwise."
            fail(where, what, fix="a pattern for each name, with the same axes")
        marks = _marks(x, mesh)
        if mine is None and not marks.isdisjoint(within):
            found[id(x)] = Fewer(None, marks)
        elif mine is not None:
            both = [axis for axis in mine if axis in marks]
            if both:
                what = f"axes: {path!r} goes over {names(both)}, along which it was said to vary."
                fail(where, what, fix=f"the other axes of {names(within)}; or mark_varying of it, ()")
            cut = {axis for part in parts.get(id(x), ()) if part.mesh is mesh for axis in axes_in(part.axis)}
            found[id(x)] = Fewer(mine, marks | cut)
    idle = [pattern for pattern in told if pattern not in used]
    if idle:
        known = [path for path, _ in by_name]
        fix = f"a pattern of names of parts or parameters{likely(idle[0], known)}"
        fail(where, f"axes: {idle[0]!r} names nothing.", got=f"parameters {names(known[:8])}", fix=fix)
    _refuse_nothing_left(where, module, found, within)
    return found


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    params: Sequence[tuple[str, Tensor]] = list(module.named_parameters(remove_duplicate=False))
    return [*params, *module.named_buffers(remove_duplicate=False)]


def _marks(x: Any, mesh: Mesh) -> frozenset[str]:
    """The axes of the mesh along which somebody has said that it varies."""
    return frozenset(written_out(declared(x), mesh.names)).intersection(mesh.shape)


def _refuse_nothing_left(where: str, module: nn.Module, found: Mapping[int, Fewer], within: Axes) -> None:
    """MeshError for a module of which nothing is the same along any of its axes, as far as marks tell."""
    params = [found.get(id(p)) for p in module.parameters()]
    if params and all(mine is not None and mine.told is None and not mine.of(within) for mine in params):
        what = f"all parameters were said to vary along {names(within)}: nothing of the module would be the same."
        fail(where, what, fix="mc.mark_varying(module, ()) if they shall be; other axes; or no adaptor")


def checked_patterns(where: str, name: str, patterns: object) -> None:
    """They are a list of texts."""
    if isinstance(patterns, str) or not isinstance(patterns, Collection):
        fail(where, f"{name}={patterns!r} is not a list of patterns.", fix="such as ['*.bias']")


def all_matched(where: str, name: str, patterns: Collection[str], found: Iterable[str]) -> None:
    """Every pattern matches something."""
    known = list(found)
    for pattern in patterns:
        if not any(pattern == each or fnmatchcase(each, pattern) for each in known):
            got = names(known[:8]) or "there is nothing to match"
            fix = f"a name or a pattern{likely(pattern, known)}"
            fail(where, f"{name}: {pattern!r} matches nothing.", got=got, fix=fix)
