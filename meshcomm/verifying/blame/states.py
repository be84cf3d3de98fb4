"""What the ranks have of one value of the twin: their parts of it, what adds up to it, or something else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshcomm.collectives.check import differentiable
from meshcomm.layout.notation import Dim, Layout
from meshcomm.mesh import Mesh
from meshcomm.spmd.shard_map.assemble import coordinates
from meshcomm.spmd.shard_map.specs import own_part
from meshcomm.verifying.compare import difference, relative, scale_of, wide


class State(NamedTuple):
    """Of one value."""

    name: str
    """``"right"``, ``"partial"``, ``"wrong"``, or ``"unknown"`` where no layout fits the shapes."""
    over: tuple[str, ...] = ()
    """Of a partial one: the axes over which it is to be reduced."""
    by: str = ""
    """How."""
    factor: float | None = None
    """Of a wrong one that is a multiple of the right one."""


UNKNOWN = State("unknown")
_REDUCTIONS = ("sum", "mean", "amax", "amin")


def state_of(
    parts: Sequence[Tensor], whole: Tensor, mesh: Mesh, *, along: frozenset[str] | None = None, moved: bool = False,
    of: tuple[Sequence[Tensor], Tensor] | None = None,
) -> State:  # fmt: skip
    """What these parts, in order of rank, are of this value. ``along``: they are a gradient, of a value that varies
    along these axes, so that those of the ranks along them add up to it; ``of`` are the parts of that value and the
    value, which say how it is cut. ``moved``: the same numbers in another order,
    as of a sequence that is shared out in zigzag, are right.
    """
    shape = parts[0].shape
    if any(x.shape != shape or x.dtype != whole.dtype for x in parts) or len(shape) != whole.ndim:
        return UNKNOWN
    layouts = list(_layouts(shape, whole.shape, mesh))
    if not layouts:
        return UNKNOWN
    places, factor = coordinates(mesh), None
    if of is not None and len(layouts) > 1:
        layouts = [each for each in layouts if _is_cut(*of, each, mesh)] or layouts
    scale = scale_of([whole])
    rights = [[own_part(whole, layout, place, mesh) for place in places] for layout in layouts]
    free = [
        [axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis not in layout.axes] for layout in layouts
    ]
    mine = [_summed(parts, places, [axis for axis in axes if axis in (along or ())]) for axes in free]
    for here, right in zip(mine, rights, strict=True):
        if all(difference("", 0, x, y, scale) is None for x, y in zip(here, right, strict=True)):
            return State("right")
    if moved and _moved(parts, whole):
        return State("right")
    if not differentiable(whole):
        return UNKNOWN  # an index, which is another one on each rank
    for here, right, axes in zip(mine, rights, free, strict=True):
        axes = [axis for axis in axes if axis not in (along or ())]
        for count in range(1, len(axes) + 1):
            for over in itertools.combinations(axes, count):
                by, alike = _adds_up(here, right, places, over, scale, _REDUCTIONS if along is None else ("sum",))
                if by and not alike:
                    return State("partial", over, by)
        found = [difference("", 0, x, y, scale) for x, y in zip(here, right, strict=True)]
        factors = {None if each is None or each.factor is None else round(each.factor, 6) for each in found}
        factor = factor or (factors.pop() if len(factors) == 1 else None)
    return State("wrong", factor=factor)


def _is_cut(parts: Sequence[Tensor], whole: Tensor, layout: Layout, mesh: Mesh) -> bool:
    """Whether these are the parts of it in this layout."""
    scale, places = scale_of([whole]), coordinates(mesh)
    pairs = ((x, own_part(whole, layout, place, mesh)) for x, place in zip(parts, places, strict=True))
    return all(difference("", 0, x, y, scale) is None for x, y in pairs)


def _summed(parts: Sequence[Tensor], places: Sequence[dict[str, int]], over: Sequence[str]) -> Sequence[Tensor]:
    """On each rank what those along these axes add up to."""
    if not over:
        return parts
    found: dict[tuple[int, ...], Tensor] = {}
    keys = [tuple(n for axis, n in place.items() if axis not in over) for place in places]
    for key, x in zip(keys, parts, strict=True):
        found[key] = found[key] + x if key in found else x
    return [found[key] for key in keys]


def _moved(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether all parts together have the numbers of the whole one, each equally often."""
    count, rest = divmod(sum(x.numel() for x in parts), max(whole.numel(), 1))
    if rest or not count or whole.is_complex():
        return False
    here = torch.cat([wide(x).flatten() for x in parts]).sort().values.to(whole.dtype)
    right = wide(whole).flatten().repeat(count).sort().values.to(whole.dtype)
    return difference("", 0, here, right, scale_of([whole])) is None


def is_part(part: Tensor, whole: Tensor, mesh: Mesh, place: dict[str, int]) -> bool:
    """Whether a rank's tensor is its part of this one, in any layout that has such parts."""
    if part.dtype != whole.dtype or part.ndim != whole.ndim:
        return False
    mine = (own_part(whole, layout, place, mesh) for layout in _layouts(part.shape, whole.shape, mesh))
    scale = scale_of([whole])
    return any(difference("", 0, part, x, scale) is None for x in mine)


def _layouts(part: Sequence[int], whole: Sequence[int], mesh: Mesh) -> Iterator[Layout]:
    """How a tensor of the second shape can be cut so that a part has the first one."""
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    if any(n == 0 or m % n if n else m for n, m in zip(part, whole, strict=True)):
        return
    ways: list[list[tuple[str, ...]]] = []
    for n, m in zip(part, whole, strict=True):
        count = m // n if n else 1
        ways.append([
            order
            for size in range(len(axes) + 1)
            for order in itertools.permutations(axes, size)
            if math.prod(mesh.shape[axis] for axis in order) == count
        ])  # fmt: skip
    for chosen in itertools.product(*ways):
        used = [axis for order in chosen for axis in order]
        if len(set(used)) == len(used):
            yield Layout(Dim(f"d{i}", order) for i, order in enumerate(chosen))


def _adds_up(
    parts: Sequence[Tensor], right: Sequence[Tensor], places: Sequence[dict[str, int]], over: tuple[str, ...],
    scale: float, ways: Sequence[str],
) -> tuple[str, bool]:  # fmt: skip
    """By which reduction, if any, and whether what is reduced is the same on all ranks."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(tuple(n for axis, n in place.items() if axis not in over), []).append(rank)
    for name in ways if not right[0].is_complex() else ("sum", "mean"):
        if all(_close(_reduced(name, [parts[r] for r in ranks]), right[ranks[0]], scale) for ranks in groups.values()):
            return name, all(_close(parts[r], parts[ranks[0]], scale) for ranks in groups.values() for r in ranks)
    return "", False


def _reduced(name: str, parts: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack(list(parts))
    if name in ("amax", "amin"):
        return stacked.amax(0) if name == "amax" else stacked.amin(0)
    return stacked.sum(0) if name == "sum" else stacked.mean(0)


def _close(x: Tensor, y: Tensor, scale: float) -> bool:
    gap = float((wide(x) - wide(y)).abs().nan_to_num(float("inf")).max()) if x.numel() else 0.0
    return gap <= 4 * relative(y.dtype) * max(scale, 1e-30)
