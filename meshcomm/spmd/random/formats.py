"""How floating-point formats are laid out, and series as long as each is precise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Format(NamedTuple):
    """One of them."""

    dtype: torch.dtype
    bits: torch.dtype
    """Integers of the same width."""
    fraction: int
    """How many bits of it are the fraction."""
    sign: int
    """The bit of the sign alone."""
    half_root: int
    """The bits of the number nearest to the root of a half."""
    log: Sequence[float]
    cosine_and_sine: Sequence[tuple[float, float]]


def _artanh(terms: int) -> list[float]:
    return [2 / (2 * k + 1) for k in range(terms)]


def _taylor(first: int, terms: int) -> list[float]:
    return [(-1) ** k / math.factorial(first + 2 * k) for k in range(terms)]


def _circle(terms: int) -> list[tuple[float, float]]:
    cosine, sine = _taylor(0, terms), _taylor(1, terms)
    return list(zip(cosine, sine, strict=True))


DOUBLE = Format(
    torch.float64, torch.int64, 52, -(2**63), 0x3FE6A09E667F3BCD, _artanh(9), [*_circle(10), (_taylor(0, 11)[10], 0.0)]
)
SINGLE = Format(torch.float32, torch.int32, 23, -(2**31), 0x3F3504F3, _artanh(5), _circle(7))
