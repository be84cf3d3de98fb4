"""What is known of the types of parameters and buffers that adaptors spread: along some axes each rank has a part of
its own, along others all have the same. What is known along all axes of a mesh is a type, marked or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import Module

from meshcomm._torch import own_parameters
from meshcomm.mesh import Mesh
from meshcomm.runtime.axis_names import written_out
from meshcomm.spmd.types.grids import Grid, grid_of
from meshcomm.spmd.types.notes import Note
from meshcomm.spmd.types.vma import Origin, Type, marked, note_by_hand, unmark

_TOLD = "_meshcomm_told"


@dataclass(frozen=True)
class _Told(Note):
    grid: Grid
    names: Mapping[str, tuple[str, ...]]
    """Of several axes together."""
    varies: frozenset[str]
    same: frozenset[str]


def tell(where: str, x: Tensor, mesh: Mesh, varies: Collection[str], same: Collection[str] = ()) -> None:
    """``where`` has made ``x`` another one on each rank along some axes, and the same along others."""
    grid, cut, equal = grid_of(mesh), frozenset(varies), frozenset(same)
    before = getattr(x, _TOLD, None)
    if isinstance(before, _Told) and before.grid is grid:
        cut |= before.varies - equal
        equal |= before.same
    told = _Told(grid, mesh.names, cut, equal - cut)
    setattr(x, _TOLD, told)
    if (kind := marked(x)) is not None:
        _note(where, x, told, kind)
    elif told.varies | told.same >= {axis for axis, size in mesh.shape.items() if size > 1}:
        note_by_hand(x, Type(_since(where, told.varies), grid=grid))


def told_to_vary(x: Tensor) -> bool:
    """Whether an adaptor has made it another one on each rank along some axis."""
    told = getattr(x, _TOLD, None)
    return isinstance(told, _Told) and bool(told.varies)


def remember(module: Module) -> None:
    """What is known of each parameter is that of the one of its name too, whichever stands there later: copies of a
    module, ``load_state_dict(assign=True)`` and some conversions make new ones, of which nothing is known.
    """
    for owner in module.modules():
        known = {name: told for name, p in own_parameters(owner).items()
                 if isinstance(told := getattr(p, _TOLD, None), _Told)}  # fmt: skip
        if known:
            vars(owner)[_TOLD] = known


def tell_again(module: Module) -> None:
    """Parameters that stand where others have stood vary along the axes along which those were cut; nothing says that
    they are the same along others.
    """
    for owner in module.modules():
        for name, told in vars(owner).get(_TOLD, {}).items():
            p = dict.get(own_parameters(owner), name)
            if told.varies and p is not None and not isinstance(getattr(p, _TOLD, None), _Told):
                setattr(p, _TOLD, replace(told, same=frozenset()))
                as_told(p)


def as_told(x: Tensor) -> None:
    """What somebody has just said of ``x`` holds, but along axes along which it was cut: there it varies."""
    told, kind = getattr(x, _TOLD, None), marked(x)
    if isinstance(told, _Told) and kind is not None:
        _note("an adaptor", x, replace(told, same=frozenset()), kind)


def keep_types(module: Module) -> None:
    """All parameters and buffers have other values of the types that they had."""
    for x in (*module.parameters(), *module.buffers()):
        if (kind := marked(x)) is not None:
            note_by_hand(x, kind)


def _note(where: str, x: Tensor, told: _Told, kind: Type) -> None:
    if kind.grid is None or not kind.axes:
        axes = frozenset(written_out(kind.axes, told.names))
        if not axes <= told.grid.shape.keys():  # of a mesh that is not known yet
            return
    else:
        there = kind.grid.moved(kind.axes, told.grid)
        if there is None:
            unmark(x)
            return
        axes = there.axes
    axes = (axes - told.same) | told.varies
    if axes != kind.axes or (axes and kind.grid is not told.grid):
        known = {axis: kind.since[axis] for axis in axes if axis in kind.since}
        note_by_hand(x, Type(_since(where, axes) | known, grid=told.grid))
    else:
        note_by_hand(x, kind)


def _since(where: str, axes: Collection[str]) -> dict[str, Origin]:
    return dict.fromkeys(sorted(axes), Origin(where, leaf=True))
