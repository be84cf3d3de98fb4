"""Random numbers by counting: each number is a function of a key, of which draw it is, and of where in the global
tensor its element stands.

Philox4x32-10 makes four 32-bit words of a key and a counter, on int64 tensors, so that it runs wherever torch does. All
that follows is made of operations that IEEE 754 rounds exactly: a logarithm of the library's vector unit and one of its
scalar unit differ in the last bit, and which of them an element meets depends on how a tensor is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Part", "Stream", "below", "exponential", "integers", "normal", "philox", "uniform", "wide"]

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Sequence[Any], key: tuple[int, int]) -> Words:
    """Four random words of 32 bits, in int64 tensors, for a counter of four; the second and the fourth may be ints.

    Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # Products wrap at 64 bits, which leaves all bits right. Only the factors need to be free of higher bits.
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = p1, p0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)


# ------------------------------------------------------------------------------------------------- parts of a tensor


class Part(NamedTuple):
    """The box of a global tensor that a rank holds."""

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    """The shape of the global tensor."""
    start: tuple[int, ...]
    """Where the box begins."""

    def runs(self) -> tuple[int, int, list[tuple[int, int]]]:
        """Runs of elements that are neighbours in the global tensor: where the first begins, how long each is, and the
        counts and strides of the dims that lead from one to the others.
        """
        base, length, stride, at = 0, 1, 1, len(self.shape)
        while at:
            at -= 1
            base += self.start[at] * stride
            length *= self.shape[at]
            stride *= self.whole[at]
            if self.shape[at] != self.whole[at]:
                break
        dims = []
        for count, whole, start in zip(
            self.shape[:at][::-1], self.whole[:at][::-1], self.start[:at][::-1], strict=True
        ):
            base += start * stride
            dims.append((count, stride))
            stride *= whole
        return base, length, dims


class Stream(NamedTuple):
    """The numbers of one draw."""

    key: int
    """64 bits."""
    draw: int
    """Which draw with this key; 32 bits."""
    attempt: int
    """Which one of this draw, where numbers are rejected and drawn again; 32 bits."""
    device: torch.device

    def words(self, blocks: Tensor) -> Words:
        """Four words for each block."""
        key = self.key & _MASK, self.key >> 32
        return philox((blocks & _MASK, self.draw, blocks >> 32, self.attempt), key)

    def fill(self, part: Part, dtype: torch.dtype, per: int, make: Callable[[Words, Tensor], None]) -> Tensor:
        """A tensor with the numbers of ``part``. ``make`` writes ``[n, per]`` of them for the words of n blocks; the
        element with the global index i is number ``i % per`` of block ``i // per``.
        """
        if 0 in part.shape:
            return torch.empty(part.shape, dtype=dtype, device=self.device)
        base, length, dims = part.runs()
        aligned = not dims or (base % per == 0 and length % per == 0 and all(stride % per == 0 for _, stride in dims))
        # How many blocks a run touches: exactly, or at most if that differs between runs.
        count = -(-(base % per + length) // per) if aligned else (length + 2 * per - 2) // per
        total = count * math.prod(many for many, _ in dims)
        values = torch.empty((total, per), dtype=dtype, device=self.device)
        chunk = {"cpu": _ON_CPU, "meta": total}.get(self.device.type, _ON_OTHERS)
        if not dims:
            steps = torch.arange(min(chunk, total), device=self.device)
            for at in range(0, total, chunk):
                make(self.words(steps[: total - at] + (base // per + at)), values[at : at + chunk])
            first = base % per
            return values.view(-1)[first : first + length].view(part.shape)
        starts = torch.full((1,), base, dtype=torch.int64, device=self.device)
        for many, stride in dims:
            steps = torch.arange(many, device=self.device).mul_(stride)
            starts = (steps[:, None] + starts).view(-1)
        blocks = ((starts // per)[:, None] + torch.arange(count, device=self.device)).view(-1)
        for at in range(0, total, chunk):
            make(self.words(blocks[at : at + chunk]), values[at : at + chunk])
        rows = values.view(len(starts), count * per)
        if not aligned:
            places = (starts % per)[:, None] + torch.arange(length, device=self.device)
            rows = rows.gather(1, places)
        return rows.view(part.shape)


_ON_CPU, _ON_OTHERS = 2**14, 2**24
"""Blocks at a time: what fits into a core's cache, or bounds the memory that is taken meanwhile."""


# ------------------------------------------------------------------------------------------------------ distributions


def wide(dtype: torch.dtype) -> torch.dtype:
    """What numbers are computed in before they are rounded to ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def uniform(stream: Stream, part: Part, dtype: torch.dtype) -> Tensor:
    """In [0, 1), with as many bits as ``dtype`` holds, in :func:`wide` of it."""
    if dtype == torch.float64:
        return stream.fill(part, dtype, 2, _uniform_double)
    bits = _BITS[dtype]

    def make(words: Words, out: Tensor) -> None:
        for i, word in enumerate(words):
            out[:, i] = word.bitwise_right_shift_(32 - bits)
        out.mul_(2.0**-bits)

    return stream.fill(part, torch.float32, 4, make)


def _uniform_double(words: Words, out: Tensor) -> None:
    for i in (0, 2):
        out[:, i // 2] = _many_bits(words[i], words[i + 1])
    out.mul_(2.0**-53)


def _many_bits(high: Tensor, low: Tensor) -> Tensor:
    """53 bits."""
    return (high << 21).bitwise_or_(low >> 11)


def below(stream: Stream, part: Part, p: float | Tensor) -> Tensor:
    """A bool that is true with probability ``p``, to 2**-32; a tensor has the shape of ``part``."""
    if not isinstance(p, Tensor):
        limit = math.ceil(p * 2.0**32)

        def compare(words: Words, out: Tensor) -> None:
            for i, word in enumerate(words):
                torch.lt(word, limit, out=out[:, i])

        return stream.fill(part, torch.bool, 4, compare)

    def make(words: Words, out: Tensor) -> None:
        for i, word in enumerate(words):
            out[:, i] = word
        out.mul_(2.0**-32)

    return stream.fill(part, torch.float64, 4, make) < p.to(stream.device, torch.float64)


def integers(stream: Stream, part: Part, low: int, high: int) -> Tensor:
    """int64 in [low, high). One comes up more often than another one by at most ``(high - low) / 2**63``."""
    span = high - low

    def make(words: Words, out: Tensor) -> None:
        for i in (0, 2):
            torch.bitwise_or(words[i] << 32, words[i + 1], out=out[:, i // 2])
        if span < 2**64:
            out.bitwise_and_(2**63 - 1)
            if span < 2**63:
                out.remainder_(span)
            out.add_(low)

    return stream.fill(part, torch.int64, 2, make)


def exponential(stream: Stream, part: Part, dtype: torch.dtype) -> Tensor:
    """With mean 1, above 0, in :func:`wide` of ``dtype``."""
    double = dtype == torch.float64

    def make(words: Words, out: Tensor) -> None:
        # In float64 also for float32, for one minus what is drawn is fine where the result is small.
        for i in range(out.shape[1]):
            word = _many_bits(words[2 * i], words[2 * i + 1]) >> 1 if double else words[i]
            out[:, i] = _log(_above_zero(word, 52 if double else 32, _DOUBLE), _DOUBLE)
        out.neg_()

    return stream.fill(part, wide(dtype), 2 if double else 4, make)


def normal(stream: Stream, part: Part, dtype: torch.dtype) -> Tensor:
    """With mean 0 and deviation 1, in :func:`wide` of ``dtype``: for two a radius and an angle (Box and Muller)."""
    if dtype == torch.float64:

        def make(words: Words, out: Tensor) -> None:
            radius = _radius(_above_zero(_many_bits(words[0], words[1]), 53, _DOUBLE), _DOUBLE)
            angle = ((words[2] & _HALF) << 22).bitwise_or_(words[3] >> 10)
            _on_circle(radius, angle, words[2] >> 31, 53, _DOUBLE, out)

        return stream.fill(part, dtype, 2, make)

    def make_short(words: Words, out: Tensor) -> None:
        # Both pairs at once. The numbers of a pair need not stand side by side.
        radius = _radius(_above_zero(torch.stack(words[:2], 1), 32, _SINGLE), _SINGLE)
        angle = torch.stack(words[2:], 1)
        _on_circle(radius, angle & _HALF, angle >> 31, 31, _SINGLE, out.view(-1, 2, 2))

    return stream.fill(part, torch.float32, 4, make_short)


_HALF = 2**31 - 1


class _Format(NamedTuple):
    """How a floating-point format is laid out, and series as long as it is precise."""

    dtype: torch.dtype
    bits: torch.dtype
    """Integers of the same width."""
    fraction: int
    """How many bits of it are the fraction."""
    half_root: int
    """The bits of the number nearest to the root of a half."""
    log: Sequence[float]
    sine: Sequence[float]
    cosine: Sequence[float]


def _above_zero(word: Tensor, bits: int, form: _Format) -> Tensor:
    """In (0, 1], from so many bits; as fine as the format is where it is small."""
    return word.to(form.dtype).add_(0.5).mul_(2.0**-bits)


def _radius(x: Tensor, form: _Format) -> Tensor:
    return _log(x, form).mul_(-2.0).sqrt_()


def _on_circle(radius: Tensor, angle: Tensor, side: Tensor, bits: int, form: _Format, out: Tensor) -> None:
    """Write the point with this radius, at ``angle`` of the half of the circle around the first axis, which ``2**bits``
    divide, or opposite to it if ``side`` is 1 and not 0.
    """
    angle = angle.sub_(2 ** (bits - 1)).to(form.dtype).add_(0.5).mul_(math.pi * 2.0**-bits)
    square = angle * angle
    radius.mul_(side.to(form.dtype).mul_(-2.0).add_(1.0))
    torch.mul(_polynomial(square, form.cosine), radius, out=out[..., 0])
    torch.mul(_polynomial(square, form.sine).mul_(angle), radius, out=out[..., 1])


def _polynomial(x: Tensor, factors: Sequence[float]) -> Tensor:
    """Lowest power first."""
    y = (x * factors[-1]).add_(factors[-2])
    for factor in factors[-3::-1]:
        y.mul_(x).add_(factor)
    return y


def _log(x: Tensor, form: _Format) -> Tensor:
    """Of a positive number: ``x = m * 2**e`` with m around 1, and ``log m = 2 artanh((m - 1) / (m + 1))``."""
    bits = x.view(form.bits) - form.half_root
    m = (bits & (2**form.fraction - 1)).add_(form.half_root).view(form.dtype)
    t = (m - 1.0).div_(m.add_(1.0))
    y = _polynomial(t * t, form.log).mul_(t)
    return y.add_(bits.bitwise_right_shift_(form.fraction).to(form.dtype).mul_(math.log(2)))


def _artanh(terms: int) -> list[float]:
    return [2 / (2 * k + 1) for k in range(terms)]


def _taylor(first: int, terms: int) -> list[float]:
    return [(-1) ** k / math.factorial(first + 2 * k) for k in range(terms)]


_DOUBLE = _Format(torch.float64, torch.int64, 52, 0x3FE6A09E667F3BCD, _artanh(9), _taylor(1, 10), _taylor(0, 11))
_SINGLE = _Format(torch.float32, torch.int32, 23, 0x3F3504F3, _artanh(5), _taylor(1, 7), _taylor(0, 7))
