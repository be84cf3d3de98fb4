"""Random numbers of a part of a global tensor, made of the words of :mod:`meshcomm.spmd.random.philox`.

It is made of operations that give an element the same bits wherever it stands in a tensor: a logarithm of torch's
vector unit and one of its scalar unit differ in the last bit, and which of them an element meets depends on how a
tensor is cut. IEEE 754 rounds all of them exactly, on every device and in every build of torch, but for the square
root: a vector library's has another last bit in some, so that it is made here (:func:`_root`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshcomm._torch import plain_now
from meshcomm.spmd.random import arrays
from meshcomm.spmd.random.formats import DOUBLE, SINGLE, Format
from meshcomm.spmd.random.parts import Part
from meshcomm.spmd.random.philox import Stream, Words
from meshcomm.spmd.random.programs import numpy_now


def wide(dtype: torch.dtype) -> torch.dtype:
    """What numbers are computed in before they are rounded to ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def uniform(stream: Stream, part: Part, dtype: torch.dtype) -> Tensor:
    """In [0, 1), with as many bits as ``dtype`` holds, in :func:`wide` of it."""
    if dtype == torch.float64:

        def make_double(words: Words, out: Tensor) -> None:
            y = words.twice(out.view(torch.int64)).bitwise_right_shift_(11).bitwise_and_(2**53 - 1)
            torch.mul(y, _numbers(dtype)[2.0**-53], out=out)

        return stream.fill(part, dtype, 2, make_double, "uniform", steps=arrays.uniforms(53))
    bits = _BITS[dtype]

    def make(words: Words, out: Tensor) -> None:
        out.copy_(words.bits(bits)).mul_(_numbers(torch.float32)[2.0**-bits])

    return stream.fill(part, torch.float32, 4, make, "uniform", bits, steps=arrays.uniforms(bits))


def below(stream: Stream, part: Part, p: float | Tensor) -> Tensor:
    """A bool that is true with probability ``p``, to 2**-32; a tensor has the shape of ``part``."""
    if not isinstance(p, Tensor):
        limit = math.ceil(p * 2.0**32)

        def make_flags(words: Words, out: Tensor) -> None:
            words.less(limit, out)

        return stream.fill(part, torch.bool, 4, make_flags, "below", limit, steps=arrays.flags(limit))

    def make(words: Words, out: Tensor) -> None:
        for row, column in words.columns(out):
            column.copy_(row)
        out.mul_(_numbers(out.dtype)[2.0**-32])

    return stream.fill(part, torch.float64, 4, make, "fractions") < p.to(stream.device, torch.float64)


def integers(stream: Stream, part: Part, low: int, high: int) -> Tensor:
    """int64 in [low, high). One comes up more often than another one by at most a part of ``span / 2**32``, and of
    ``span / 2**63`` where the span is above ``2**20``.
    """
    span = high - low
    if span <= _SHORT:  # the whole part of a fraction of the span: half the words, and no division

        def make_short(words: Words, out: Tensor) -> None:
            for row, column in words.columns(out):
                torch.bitwise_right_shift(row.mul_(span), 32, out=column)
            if low:
                out.add_(low)

        return stream.fill(part, torch.int64, 4, make_short, "integers", low, high, steps=arrays.integers(low, span))

    def make(words: Words, out: Tensor) -> None:
        words.twice(out)
        if span < 2**64:
            out.bitwise_and_(2**63 - 1)
            if span < 2**63:
                out.fmod_(span)
            if low:
                out.add_(low)

    return stream.fill(part, torch.int64, 2, make, "integers", low, high)


_SHORT = 2**20
"""Up to this span a word is enough for an integer."""


def exponential(stream: Stream, part: Part, dtype: torch.dtype) -> Tensor:
    """With mean 1, above 0, in :func:`wide` of ``dtype``."""
    # In float64 also for float32, for one minus what is drawn is fine where the result is small.
    if dtype == torch.float64:

        def make_double(words: Words, out: Tensor) -> None:
            y = words.twice(out.view(torch.int64)).bitwise_right_shift_(12).bitwise_and_(2**52 - 1)
            out.copy_(_log(_above_zero(y, DOUBLE), 52, DOUBLE, -1.0))

        return stream.fill(part, dtype, 2, make_double, "exponential", steps=arrays.exponentials(52))

    def make(words: Words, out: Tensor) -> None:
        for row, column in words.columns(out):
            column.copy_(_log(_above_zero(row, DOUBLE), 32, DOUBLE, -1.0))

    return stream.fill(part, torch.float32, 4, make, "exponential", steps=arrays.exponentials(32))


def normal(stream: Stream, part: Part, dtype: torch.dtype) -> Tensor:
    """With mean 0 and deviation 1, in :func:`wide` of ``dtype``: for two a radius and an angle (Box and Muller)."""
    if dtype == torch.float64:

        def make_double(words: Words, out: Tensor) -> None:
            y = words.twice(torch.empty_like(out, dtype=torch.int64))
            x, angle = (y[:, 0] >> 11).bitwise_and_(2**53 - 1), (y[:, 1] >> 10).bitwise_and_(2**53 - 1)
            radius = _root(_log(_above_zero(x, DOUBLE), 53, DOUBLE, -2.0))
            _on_circle(radius[None], angle[None], y[:, 1], 53, DOUBLE, out)

        return stream.fill(part, dtype, 2, make_double, "normal", steps=arrays.normals(DOUBLE))

    def make(words: Words, out: Tensor) -> None:
        # Both pairs at once. The numbers of a pair need not stand side by side.
        x, side = words.halves(torch.float32, torch.int32)
        radius = _root(_log(x.add_(_numbers(torch.float32)[0.5]), 32, SINGLE, -2.0))
        _on_circle(radius, side & _HALF, side, 31, SINGLE, out)

    return stream.fill(part, torch.float32, 4, make, "normal", steps=arrays.normals(SINGLE))


_HALF = 2**31 - 1


def _above_zero(word: Tensor, form: Format) -> Tensor:
    """From so many bits a number above 0, a half more; as fine as the format is where it is small."""
    return word.to(form.dtype).add_(_numbers(form.dtype)[0.5])


def _on_circle(radius: Tensor, angle: Tensor, side: Tensor, bits: int, form: Format, out: Tensor) -> None:
    """The points with these radii, two columns of ``out`` for each row, at ``angle`` of the half of the circle around
    the first axis, which ``2**bits`` divide, or opposite to it where the highest bit of ``side`` is set.
    """
    of, whole = _numbers(form.dtype), _numbers(form.bits)
    radius.view(form.bits).bitwise_xor_(side & whole[form.sign])
    angle = angle.sub_(2 ** (bits - 1)).to(form.dtype).add_(of[0.5]).mul_(of[math.pi * 2.0**-bits])
    y = _cosine_and_sine((angle * angle).view(1, -1), form)
    y[1].mul_(angle.view(-1))
    points = y.mul_(radius.view(-1)).view(2, *radius.shape)
    for cosine, sine, column in zip(*points, torch.view_as_complex(out.view(len(out), -1, 2)).unbind(1), strict=True):
        torch.complex(cosine, sine, out=column)


def _cosine_and_sine(square: Tensor, form: Format) -> Tensor:
    """Both side by side along the dim before the last one, where ``square`` has length 1; the sine over the angle."""
    if square.device.type == "cpu":
        return _polynomial(square, form.cosine_and_sine)
    return torch.cat([_polynomial(square, each) for each in zip(*form.cosine_and_sine, strict=True)], -2)


def _polynomial(x: Tensor, factors: Sequence[Any]) -> Tensor:
    """Lowest power first; of pairs of factors two of them, in the rows that follow from the row of ``x``."""
    *rest, second, first = map(_numbers(x.dtype).__getitem__, factors)
    y = (x * first).add_(second)
    for factor in reversed(rest):
        y.mul_(x).add_(factor)
    return y


def _log(x: Tensor, down: int, form: Format, scale: float) -> Tensor:
    """Of a positive number over ``2**down``, times a power of two: ``x = m * 2**e`` with m around 1, and ``log m =
    2 artanh((m - 1) / (m + 1))``. ``x`` is written over.
    """
    of, whole = _numbers(form.dtype), _numbers(form.bits)
    bits = x.view(form.bits).sub_(whole[form.half_root + (down << form.fraction)])
    m = (bits & whole[2**form.fraction - 1]).add_(whole[form.half_root]).view(form.dtype)
    t = (m - of[1.0]).div_(m.add_(of[1.0]))
    y = _polynomial(torch.mul(t, t, out=m), [factor * scale for factor in form.log]).mul_(t)
    return y.add_(t.copy_(bits.bitwise_right_shift_(whole[form.fraction])).mul_(of[math.log(2) * scale]))


def _root(x: Tensor) -> Tensor:
    """The square root of positive numbers as IEEE 754 rounds it, written over ``x``. On CPUs torch asks a library (MKL)
    that is one unit off in up to 15 % of them; devices round exactly.
    """
    if x.device.type != "cpu":
        return x.sqrt_()
    if type(x) is Tensor and (numpy := numpy_now()) is not None:  # rounds as the processor does
        numpy.sqrt(x.numpy(), x.numpy())
        return x
    if x.dtype == torch.float32:  # a unit of float64 is too little to lead to another float32
        return x.copy_(x.double().sqrt_())
    # One step of Newton's from the exact rest, of Dekker's halves, whose products are exact.
    y = x.sqrt()
    high = y * _numbers(x.dtype)[2.0**27 + 1]
    high = high - (high - y)
    low = y - high
    square = y * y
    beyond = (high * high).sub_(square).add_(2 * (high * low)).add_(low * low)
    return x.sub_(square).sub_(beyond).div_(y + y).add_(y)


class _Numbers(dict[Any, Tensor]):
    """Numbers as tensors of no dims, of which torch makes less ado, and pairs of them as tensors of two rows."""

    def __init__(self, dtype: torch.dtype, kept: bool) -> None:
        super().__init__()
        self.dtype, self.kept = dtype, kept

    def __missing__(self, number: Any) -> Tensor:
        with torch.inference_mode(False):
            made = torch.tensor(number, dtype=self.dtype, device="cpu")
        made = made[:, None] if made.dim() else made
        if self.kept:
            self[number] = made
        return made


_kept: dict[torch.dtype, _Numbers] = {}


def _numbers(dtype: torch.dtype) -> _Numbers:
    """Those of the library; what is made under a mode or transform is that one's own."""
    if not plain_now():
        return _Numbers(dtype, kept=False)
    return _kept.get(dtype) or _kept.setdefault(dtype, _Numbers(dtype, kept=True))
