"""Sums of floats that do not depend on the order of their addends: in fixed point, as 64-bit integers.

The largest addend of a place sets its unit: 2**-42 or, for float64, 2**-84 of the power of two above it. Every addend
is rounded to whole units, and integers add in any order. float64 takes two words, each of 42 bits. A float whose
exponent is the highest is infinite or not a number: such a place counts those instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshcomm.runtime.process.accelerator import with_doubles

EXACT = ("exact sum", "exact mean")
"""What these ops are called below the public functions."""
_WIDTH = 42
"""Bits of a word that one addend fills; the others are for sums."""
MOST_RANKS = 2**20
"""Addends that fit."""
_COUNTER = 21


class _Form(NamedTuple):
    """How a dtype holds its numbers."""

    ints: torch.dtype
    mantissa: int
    special: int
    """The exponent of what is infinite or not a number."""
    bias: int
    """What is below 2**(exponent - bias) has at most this exponent."""
    words: int
    small: torch.dtype
    """Holds the exponents."""


_SINGLE = _Form(torch.int32, 23, 255, 126, 1, torch.uint8)
_DOUBLE = _Form(torch.int64, 52, 2047, 1022, 2, torch.int16)


def _form(dtype: torch.dtype) -> _Form:
    return _DOUBLE if dtype == torch.float64 else _SINGLE


def exponents(x: Tensor) -> Tensor:
    """Of each number, to be compared with those of the other ranks: their maximum sets the unit."""
    form = _form(x.dtype)
    bits = (x if x.dtype == torch.float64 else x.float()).view(form.ints)
    return ((bits >> form.mantissa) & form.special).to(form.small)


def _units(form: _Form, top: Tensor) -> Tensor:
    """The binary logarithm of the unit of the first word. That of the last is not below the least number there is."""
    return top.to(torch.int64).clamp(min=_WIDTH * form.words - form.mantissa) - (form.bias + _WIDTH)


def _times(x: Tensor, power: Tensor) -> Tensor:
    """``x`` times two to the power, where that alone may be too large or too small for a number."""
    half = power >> 1
    return x * _two_to(half) * _two_to(power - half)


def _two_to(power: Tensor) -> Tensor:
    return ((power + 1023) << 52).view(torch.float64)


def in_units(x: Tensor, top: Tensor) -> Tensor:
    """``x`` as whole numbers, ``[*s] -> [*s, words]``; ``top``: the maximum of all ranks' exponents."""
    form, is_special = _form(x.dtype), top == _form(x.dtype).special
    rest = torch.where(is_special, 0.0, _times(x.double(), -_units(form, top)))
    words = []
    for _ in range(form.words):
        whole = rest.round()
        words.append(whole.to(torch.int64))
        rest = (rest - whole) * 2.0**_WIDTH
    kinds = (x == torch.inf, x == -torch.inf, x.isnan())
    counts = sum(kind.to(torch.int64) << _COUNTER * place for place, kind in enumerate(kinds))
    words[0] = torch.where(is_special, counts, words[0])
    return torch.stack(words, -1)


def value(total: Tensor, top: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """The sum of all ranks' units as a number again, divided by ``count``: no step depends on an order."""
    form, first = _form(dtype), total[..., 0]
    if form.words == 1:
        y = _times(first.float().double(), _units(form, top))
    else:
        carry = (total[..., 1] + (1 << _WIDTH - 1)) >> _WIDTH
        high = first + carry
        near = high.double()
        rest = ((high - near.to(torch.int64)) << _WIDTH) + (total[..., 1] - (carry << _WIDTH))
        y = _times(near * 2.0**_WIDTH + rest.double(), _units(form, top) - _WIDTH)
    counter = (1 << _COUNTER) - 1
    plus, minus, nans = (first & counter, (first >> _COUNTER) & counter, first >> 2 * _COUNTER)
    infinite = torch.where(minus > 0, -torch.inf, torch.inf)
    special = torch.where((nans > 0) | ((plus > 0) & (minus > 0)), torch.nan, infinite)
    y = torch.where(top == form.special, special, y) / count
    return y.to(torch.float64 if dtype == torch.float64 else torch.float32).to(dtype)


def fold(op: str, xs: Sequence[Tensor]) -> Tensor:
    """The exact sum or mean of what is here."""
    device = xs[0].device
    if (place := with_doubles(device)) != device:
        return fold(op, [x.to(place) for x in xs]).to(device)
    top = exponents(xs[0])
    for x in xs[1:]:
        top = torch.maximum(top, exponents(x))
    total = in_units(xs[0], top)
    for x in xs[1:]:
        total = total + in_units(x, top)
    return value(total, top, xs[0].dtype, len(xs) if op == "exact mean" else 1)
