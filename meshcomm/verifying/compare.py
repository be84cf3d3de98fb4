"""When two values are equal but for rounding, and by which factor they differ if they are not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from meshcomm.collectives.check import differentiable
from meshcomm.errors import shape_text

_FLOOR = 1e-11
_WHOLE = 0.02


class Difference(NamedTuple):
    """How a value is off."""

    label: str
    rank: int
    off: float
    """The largest one of any element; inf where shapes differ."""
    said: str
    """What came, in words."""
    factor: float | None
    """By which the right one was multiplied, if that is all."""


def relative(dtype: torch.dtype) -> float:
    """The relative error that a value of this dtype may have: eps to the power of 2/3, four times."""
    return 4 * torch.finfo(dtype).eps ** (2 / 3) if dtype.is_floating_point or dtype.is_complex else 0.0


def scale_of(values: Iterable[Tensor]) -> float:
    """The largest number of all, which says what rounding can do."""
    return max((_largest(x) for x in values), default=0.0)


def _largest(x: Tensor) -> float:
    if not x.numel():
        return 0.0
    sizes = wide(x).abs()
    largest = float(sizes.max())
    return largest if math.isfinite(largest) else float(sizes.nan_to_num(0, 0, 0).max())


def wide(x: Tensor) -> Tensor:
    """The same numbers in the widest dtype."""
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


def difference(
    label: str, rank: int, got: Tensor, right: Tensor, scale: float, *, of: float = 0.0
) -> Difference | None:
    """How ``got`` differs from ``right`` by more than rounding; ``scale``: of all values of its kind, ``of``: of the
    whole value that ``right`` is a part of.
    """
    if got.shape != right.shape or got.dtype != right.dtype:
        said = f"{shape_text(got.dtype, got.shape)} where {shape_text(right.dtype, right.shape)} is right"
        return Difference(label, rank, float("inf"), said, None)
    if torch.equal(got, right):
        return None
    if not differentiable(right):
        wrong = int((got != right).sum())
        off = float((wide(got) - wide(right)).abs().max())
        return Difference(label, rank, off, f"{wrong} of {right.numel()} numbers are others", _factor(got, right))
    a, b = wide(got), wide(right)
    gap, eps = (a - b).abs(), torch.finfo(right.dtype).eps
    least = relative(right.dtype) * of + max(16 * eps, _FLOOR) * scale
    if float(gap.max()) <= least:  # not where one is infinite or no number
        return None
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(gap), gap).nan_to_num(float("inf"))
    size, off = max(_largest(right), of), float(gap.max())
    if off <= relative(right.dtype) * size + max(16 * eps, _FLOOR) * scale:
        return None
    factor = _factor(got, right)
    said = f"{times(factor)} the right one" if factor is not None else _in_words(a, b, gap, size)
    return Difference(label, rank, off, said, factor)


def _in_words(a: Tensor, b: Tensor, gap: Tensor, size: float) -> str:
    if not a.abs().nan_to_num(1).max():
        return "zero everywhere, and the right one is not"
    at = int(gap.flatten().argmax())
    share = f"off by {100 * float(gap.max()) / size:.2g} % of the largest" if size else "where all are 0"
    got, right = a.flatten()[at].item(), b.flatten()[at].item()
    digits = next((n for n in (3, 6, 10) if f"{got:.{n}g}" != f"{right:.{n}g}"), 17)
    return f"{got:.{digits}g} where {right:.{digits}g} is right, {share}"


def times(factor: float) -> str:
    """``2 times``, ``0.66 times``."""
    return f"{factor:.3g} times"


def _factor(got: Tensor, right: Tensor) -> float | None:
    """The number c with got = c right, if there is one."""
    a, b = wide(got).flatten(), wide(right).flatten()
    size = torch.linalg.vector_norm(b)
    if not size or not (a.isfinite().all() and b.isfinite().all()):
        return None
    c = (b.conj() @ a) / size**2
    value = c.real.item()
    if (
        abs(value) < 1e-9
        or abs(value - 1) < 1e-3
        or torch.linalg.vector_norm(a - c * b) > 1e-6 * torch.linalg.vector_norm(a)
    ):
        return None
    return value if abs(c.imag.item() if c.is_complex() else 0.0) < 1e-9 else None


def explained(factor: float | None, sizes: Iterable[tuple[str, int]]) -> str:
    """What a factor means on axes of these sizes; empty where it means nothing."""
    for axis, n in sizes:
        if factor is None or n < 2:
            continue
        if abs(factor - n) < _WHOLE:
            return f"{n} is the size of {axis!r}: added up twice along it, or once where it is the same on all ranks"
        if abs(factor * n - 1) < _WHOLE:
            return f"1/{n}, and {n} is the size of {axis!r}: a mean too much along it, or a sum that is lacking"
        if abs(factor - n * n) < _WHOLE:
            return f"{n * n} is the size of {axis!r} squared: added up twice too often along it"
    return ""
