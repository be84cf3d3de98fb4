"""What ranks have, held against what one rank has: how far it is off, by which factor, and why.

All of it stands in one place: the parts of all ranks beside the whole tensors of the twin, and nothing communicates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshcomm.collectives.check import differentiable
from meshcomm.parallel.global_places import part_of
from meshcomm.verifying.training.seen import Part, Parts, Seen

_ADDED = 16
"""Of how many parts a sum may be made that are rounded one by one: ranks, microbatches, layers, steps."""
_ENOUGH = 2e-2
"""So much of the largest number is seen in any dtype that has the digits for it."""
_LOST = 64
"""Times eps of the largest one: what cancels out over a batch, such as the gradient of a bias of keys, is left with."""
_NEAR = 1e-3
"""Of factors, where the numbers have the digits for it."""
_APART = 0.25
"""What differs by more of the largest number is another thing, however few digits there are: twice as much is."""


class Off(NamedTuple):
    """One rank's part of one tensor is another one."""

    rank: int
    name: str
    by: float
    """The largest difference."""
    factor: float | None
    """What is here is so many times the right one; None: no single factor, or it is not there."""
    missing: str = ""
    near: float = _NEAR
    """Factors that differ by less are one."""


def tolerance(dtype: torch.dtype) -> float:
    """Of numbers of this dtype after some steps, relative to the largest one.

    A sum of n parts that are rounded one by one is off by some sqrt(n) eps. An optimiser that divides by the root of a
    square leaves half of the digits, where there are more than it takes to see a mistake.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    eps, n = torch.finfo(dtype).eps, math.sqrt(_ADDED)
    return max(2 * eps * n, min(math.sqrt(eps * n), _ENOUGH))


def _rounding(dtype: torch.dtype) -> float:
    """Of sums of numbers of this dtype, relative to the largest one of its kind: more than small differences are."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    eps = torch.finfo(dtype).eps
    return max(4 * eps, min(_LOST * eps, 1e-5))


def whole(part: Part) -> Tensor:
    """Of one rank that has all of it."""
    x = torch.zeros(part.shape, dtype=part.dtype, device="cpu")
    for offsets, box in part.boxes:
        part_of(x, offsets, tuple(box.shape)).copy_(box)
    return x


def wholes(parts: Parts) -> dict[str, Tensor | None]:
    """All that one rank has."""
    return {name: None if part is None else whole(part) for name, part in parts.items()}


def scale_of(right: Iterable[Tensor | None]) -> float:
    """The largest number of all."""
    return max((x.abs().max().item() for x in right if x is not None and x.numel() and not x.is_complex()), default=0.0)


def differences(
    ranks: Sequence[Parts], right: Mapping[str, Tensor | None], small: float, kind_of: Callable[[str], str] = str
) -> list[Off]:
    """What is off on which rank.

    Args:
        ranks: what each has.
        right: the twin's.
        small: a number is held against the largest one of its tensor, or against so much of the largest one of all
            tensors of its kind: what is zero but for rounding has no size of its own.
        kind_of: what numbers are of one kind, by name.
    """
    scales: dict[str, float] = {}
    for name, x in right.items():
        kind = kind_of(name)
        scales[kind] = max(scales.get(kind, 0.0), scale_of([x]))
    found = []
    for rank, parts in enumerate(ranks):
        for name, part in parts.items():
            wanted = right.get(name)
            if name not in right:
                found.append(Off(rank, name, math.inf, None, "one rank has none of this name"))
            elif (part is None) != (wanted is None):
                found.append(Off(rank, name, math.inf, None, "nothing here" if part is None else "none on one rank"))
            elif part is not None and wanted is not None:
                off = _difference(rank, name, part, wanted, scales[kind_of(name)], small)
                found += [] if off is None else [off]
    for name in right:
        if not any(name in parts for parts in ranks):
            found.append(Off(0, name, math.inf, None, "no rank has it"))
    return found


def noise(right: Mapping[str, Tensor | None], small: float) -> dict[str, Tensor]:
    """Which elements of gradients are zero but for rounding, where there are any: an optimiser that divides a gradient
    by its size makes something of them that is another thing on each mesh.
    """
    scale, found = scale_of(right.values()), {}
    for name, g in right.items():
        if g is not None and g.numel() and differentiable(g):
            floor, size = max(tolerance(g.dtype) * small, _rounding(g.dtype)) * scale, g.abs()
            left = (size > 0) & (size <= floor)
            mask = (size <= floor) if left.any() else left  # a zero among them is one by chance
            if mask.any():
                found[name] = mask
    return found


def without(parts: Parts, right: Mapping[str, Tensor | None], masks: Mapping[str, Tensor]) -> Parts:
    """These, with the right numbers where a mask, by the name of the parameter, holds: for its states too."""
    found = dict(parts)
    for name, part in parts.items():
        mask, wanted = masks.get(name, masks.get(name.rpartition(".")[0])), right.get(name)
        if part is None or mask is None or wanted is None or not part.shape == tuple(mask.shape) == tuple(wanted.shape):
            continue
        boxes = []
        for offsets, box in part.boxes:
            here, instead = (part_of(x, offsets, tuple(box.shape)) for x in (mask, wanted))
            boxes.append((offsets, torch.where(here, instead.to(box.dtype), box)))
        found[name] = part._replace(boxes=tuple(boxes))
    return found


def _difference(rank: int, name: str, part: Part, wanted: Tensor, scale: float, small: float) -> Off | None:
    if part.shape != tuple(wanted.shape):
        said = f"its shape is {part.shape} as a whole, {tuple(wanted.shape)} on one rank"
        return Off(rank, name, math.inf, None, said)
    got, right = flat(part), flat_of(wanted, part)
    if not got.numel():
        return None
    if not differentiable(got):
        return None if torch.equal(got, right.to(got.dtype)) else Off(rank, name, _by(got, right), None)
    got, right = got.to(torch.promote_types(got.dtype, torch.float64)), right.to(
        torch.promote_types(right.dtype, torch.float64))  # fmt: skip
    odd = got.isfinite() != right.isfinite()
    if odd.any():
        return Off(rank, name, math.inf, None, "numbers that are not finite")
    got, right = got.nan_to_num(), right.nan_to_num()
    by, near = _by(got, right), max(tolerance(part.dtype), tolerance(wanted.dtype))
    least = max(near * small, _rounding(wanted.dtype)) * scale
    if by <= max(near * wanted.abs().max().item(), least):
        return None
    return Off(rank, name, by, factor_of(got, right, near), near=nearness([part.dtype, wanted.dtype]))


def _by(got: Tensor, right: Tensor) -> float:
    return (got.to(torch.complex128) - right.to(torch.complex128)).abs().max().item()


def factor_of(got: Tensor, right: Tensor, near: float) -> float | None:
    """What is here is so many times the right one, if it is that everywhere."""
    got, right = got.flatten(), right.flatten()
    if got.is_complex() or not right.numel() or not right.abs().max():
        return None
    factor = (got @ right / (right @ right)).item()
    rest = (got - factor * right).abs().max().item()
    return factor if rest <= _loosely(near) * max(got.abs().max().item(), right.abs().max().item()) else None


def _loosely(near: float) -> float:
    return min(10 * max(near, 1e-7), _APART)


def nearness(dtypes: Iterable[torch.dtype]) -> float:
    """By how much two factors of such numbers may differ that are one, relative to them."""
    return max([_NEAR, *(torch.finfo(each).eps for each in dtypes if each.is_floating_point or each.is_complex)])


def flat(part: Part) -> Tensor:
    """All that a rank has of it."""
    return (
        torch.cat([box.reshape(-1) for _, box in part.boxes])
        if part.boxes
        else torch.zeros(0, dtype=part.dtype, device="cpu")
    )


def flat_of(x: Tensor, part: Part) -> Tensor:
    """The same elements of a whole tensor."""
    boxes = [part_of(x, offsets, tuple(box.shape)).reshape(-1) for offsets, box in part.boxes]
    return torch.cat(boxes) if boxes else x.new_zeros(0)


def same_factor(offs: Sequence[Off]) -> float | None:
    """That of all of them, if it is one."""
    factors = [off.factor for off in offs]
    first = factors[0] if factors else None
    near = max((off.near for off in offs), default=_NEAR)
    if first is None or any(each is None or abs(each - first) > near * max(abs(first), 1e-3) for each in factors):
        return None
    return first


def axes_of(factor: float, sizes: Mapping[str, int], near: float) -> list[tuple[str, ...]]:
    """The axes whose sizes multiply to this; fewest first."""
    return [axes for axes in subsets(sizes) if near_to(factor, math.prod(sizes[axis] for axis in axes), near)]


def near_to(factor: float, other: float, near: float) -> bool:
    """Whether two factors are one."""
    return abs(factor - other) <= near * abs(other)


def subsets(sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Of the axes that have more than one index, fewest first."""
    names = [name for name, size in sizes.items() if size > 1]
    return [axes for count in range(1, len(names) + 1) for axes in itertools.combinations(names, count)]


def unreduced(
    seen: Sequence[Seen], parts: Sequence[Parts], right: Mapping[str, Tensor | None], offs: Sequence[Off],
    sizes: Mapping[str, int],
) -> tuple[tuple[str, ...], str] | None:  # fmt: skip
    """Along which axes the ranks' sum, or mean, is what each should have."""
    names = sorted({off.name for off in offs})
    for axes in subsets(sizes):
        for how in ("sum", "mean"):
            if all(_sums_to(seen, parts, right, name, axes, how) for name in names):
                return axes, how
    return None


def _sums_to(
    seen: Sequence[Seen], parts: Sequence[Parts], right: Mapping[str, Tensor | None], name: str, axes: tuple[str, ...],
    how: str,
) -> bool:  # fmt: skip
    teams: dict[tuple[tuple[str, int], ...], list[Part]] = {}
    for each, has in zip(seen, parts, strict=True):
        part = has.get(name)
        if part is not None:
            key = tuple((axis, at) for axis, at in each.place.items() if axis not in axes)
            teams.setdefault(key, []).append(part)
    wanted = right.get(name)
    if wanted is None or not teams:
        return False
    for team in teams.values():
        first = [offsets for offsets, _ in team[0].boxes]
        if len(team) < 2 or any([offsets for offsets, _ in part.boxes] != first for part in team):
            return False
        total = torch.stack([flat(part) for part in team]).sum(0) / (len(team) if how == "mean" else 1)
        here = flat_of(wanted, team[0])
        near = _loosely(tolerance(wanted.dtype))
        if total.numel() and _by(total, here) > near * max(here.abs().max().item(), total.abs().max().item()):
            return False
    return True


def norm_of(parts: Parts) -> float:
    """Of all gradients that one rank has."""
    return math.sqrt(sum(flat(part).double().square().sum().item() for part in parts.values() if part is not None))


def norm_of_wholes(right: Mapping[str, Tensor | None]) -> float:
    """Of all gradients."""
    return math.sqrt(sum(x.double().square().sum().item() for x in right.values() if x is not None))
