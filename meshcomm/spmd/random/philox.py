"""Random numbers by counting: each number is a function of a key, of which draw it is, and of where in the global
tensor its element stands.

Philox4x32-10 makes four 32-bit words of a key and a counter, on int64 tensors, so that it runs wherever torch does. All
that follows is made of operations that IEEE 754 rounds exactly: a logarithm of the library's vector unit and one of its
scalar unit differ in the last bit, and which of them an element meets depends on how a tensor is cut.
"""

from __future__ import annotations

import itertools
import math
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm._torch import plain_now

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def _keys(key: tuple[int, int]) -> list[tuple[int, int]]:
    """Those of the ten rounds."""
    return [((key[0] + i * _W0) & _MASK, (key[1] + i * _W1) & _MASK) for i in range(10)]


def philox(room: Tensor, key: tuple[int, int]) -> Tensor:
    """Four random words of 32 bits, in int64, for a counter of four; what is above the 32 bits may be anything.
    ``room`` has six rows: the counter's 0, 3, 2 and 1, in whose places are the words 0 to 3 then, and two to spare.

    Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    # torch makes less ado of tensors of no dims than of numbers, and there are a hundred operations.
    numbers = [_M0, _M1, 32, _MASK, *itertools.chain(*_keys(key))]
    m0, m1, half, mask, *keys = torch.tensor(numbers, device="cpu").unbind()
    c0, c3, c2, c1, p0, p1 = room.unbind()
    for k0, k1 in zip(keys[::2], keys[1::2], strict=True):
        # Products wrap at 64 bits, which leaves all bits right. Only the factors need to be free of higher bits.
        torch.mul(c0, m0, out=p0)
        torch.mul(c2, m1, out=p1)
        torch.bitwise_right_shift(p1, half, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(mask)
        torch.bitwise_right_shift(p0, half, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(mask)
        c1, c3, p0, p1 = p1, p0, c1, c3
    return room[:4]


def _philox_of_ints(counter: Sequence[int], key: tuple[int, int], ones: int) -> list[int]:
    """The same of ints that have many words each, where ``ones`` has a one, 64 bits apart: sooner for few."""
    c0, c1, c2, c3 = counter
    mask = _MASK * ones
    for k0, k1 in _keys(key):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> 32 ^ c1 ^ k0 * ones) & mask, p1, (p0 >> 32 ^ c3 ^ k1 * ones) & mask, p0
    return [c0, c1, c2, c3]


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


_Make = Callable[[Tensor, Tensor], None]
"""``make(words, out)`` writes ``[n, per]`` numbers for the :meth:`Stream.words` of n blocks, which it may change."""


class Stream(NamedTuple):
    """The numbers of one draw."""

    key: int
    """64 bits."""
    draw: int
    """Which draw with this key; 32 bits."""
    attempt: int
    """Which one of this draw, where numbers are rejected and drawn again; 32 bits."""
    device: torch.device

    def words(self, blocks: Tensor, bits: int, room: Tensor) -> Tensor:
        """The highest ``bits`` of four words for each block: ``[4, n]``, in ``room``, of six rows."""
        torch.bitwise_and(blocks, _MASK, out=room[0])
        torch.bitwise_right_shift(blocks, 32, out=room[2])
        room[3].fill_(self.draw)
        room[1].fill_(self.attempt)
        words = philox(room, (self.key & _MASK, self.key >> 32))
        (words[1::2] if bits == 32 else words).bitwise_and_(_highest(bits))
        return words

    def few_words(self, blocks: Sequence[int], bits: int) -> Tensor:
        """The same."""
        ones = _lanes((1,) * len(blocks))
        low, high = _lanes(blocks), 0
        if max(blocks) > _MASK:
            low, high = low & _MASK * ones, low >> 32 & _MASK * ones
        counter = low, self.draw * ones, high, self.attempt * ones
        found, kept = _philox_of_ints(counter, (self.key & _MASK, self.key >> 32), ones), _highest(bits) * ones
        memory = bytearray().join([(word & kept).to_bytes(8 * len(blocks), sys.byteorder) for word in found])
        return torch.frombuffer(memory, dtype=torch.int64).view(4, -1)

    def fill(self, part: Part, dtype: torch.dtype, per: int, make: _Make, bits: int = 32) -> Tensor:
        """A tensor with the numbers of ``part``: the element with the global index i is number ``i % per`` of block
        ``i // per``.
        """
        y = torch.empty(part.shape, dtype=dtype, device=self.device)
        if 0 in part.shape:
            return y
        base, length, dims = part.runs()
        exact = not any(each % per for each in (base, length, *(stride for _, stride in dims)))
        # How many blocks a run touches: exactly, or at most if that differs between runs.
        count = -(-(base % per + length) // per) if exact or not dims else (length + 2 * per - 2) // per
        total = count * math.prod(many for many, _ in dims)
        values = y.view(total, per) if exact else torch.empty((total, per), dtype=dtype, device=self.device)
        starts: Any = [base]
        if total <= _FEW and self.device.type == "cpu" and plain_now():
            for many, stride in dims:
                starts = [step + start for step in range(0, many * stride, stride) for start in starts]
            blocks = [block for start in starts for block in range(start // per, start // per + count)]
            make(self.few_words(blocks, bits), values)
        else:
            starts = self._fill_many(values, base, count, dims, bits, make)
        if exact:
            return y
        rows, into = values.view(-1, count * per), y.view(-1, length)
        if dims:
            places = (torch.as_tensor(starts, device=self.device) % per)[:, None] + torch.arange(
                length, device=self.device
            )
            torch.gather(rows, 1, places, out=into)
        else:
            into.copy_(rows.narrow(1, base % per, length))
        return y

    def _fill_many(
        self, values: Tensor, base: int, count: int, dims: list[tuple[int, int]], bits: int, make: _Make
    ) -> Tensor:
        """Write all of them, so many blocks at a time that their words stay in the cache; gives where runs begin."""
        (total, per), device = values.shape, self.device
        chunk = min(total, {"cpu": _ON_CPU, "meta": total}.get(device.type, _ON_OTHERS))
        starts = torch.full((1,), base, dtype=torch.int64, device=device)
        for many, stride in dims:
            steps = torch.arange(many, device=device).mul_(stride)
            starts = (steps[:, None] + starts).view(-1)
        blocks = torch.arange(count if dims else chunk, device=device)
        if dims:
            blocks = ((starts // per)[:, None] + blocks).view(-1)
        room = torch.empty((6, chunk), dtype=torch.int64, device=device)
        for at in range(0, total, chunk):
            some = blocks[at : at + chunk] if dims else blocks[: total - at] + (base // per + at)
            make(self.words(some, bits, room[:, : len(some)]), values[at : at + chunk])
        return starts


_ON_CPU, _ON_OTHERS = 2**15, 2**24
"""Blocks at a time: what stays in the cache and is worth the calls, or bounds the memory that is taken meanwhile."""
_FEW = 2**9
"""Blocks whose words Python's integers give sooner than tensors do."""


def _highest(bits: int) -> int:
    """The mask of so many of 32."""
    return _MASK >> (32 - bits) << (32 - bits)


def _lanes(numbers: Sequence[int]) -> int:
    """All of them in one, 64 bits apart."""
    return int.from_bytes(struct.pack(f"{len(numbers)}Q", *numbers), sys.byteorder)


# ------------------------------------------------------------------------------------------------------ distributions


def wide(dtype: torch.dtype) -> torch.dtype:
    """What numbers are computed in before they are rounded to ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def uniform(stream: Stream, part: Part, dtype: torch.dtype) -> Tensor:
    """In [0, 1), with as many bits as ``dtype`` holds, in :func:`wide` of it."""
    if dtype == torch.float64:

        def make_double(words: Tensor, out: Tensor) -> None:
            _put(_many_bits(words[0::2], words[1::2]), out)
            out.mul_(_numbers(dtype)[2.0**-53])

        return stream.fill(part, dtype, 2, make_double)

    def make(words: Tensor, out: Tensor) -> None:
        _put(words, out)
        out.mul_(_numbers(out.dtype)[2.0**-32])

    return stream.fill(part, torch.float32, 4, make, _BITS[dtype])


def _put(rows: Tensor, out: Tensor) -> None:
    """Write numbers where they belong, a row into each column."""
    for row, column in _columns(rows, out):
        column.copy_(row)


def _columns(rows: Tensor, out: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """A tensor of rows as it lies in the columns of ``out``: at once where there are few, else one by one."""
    return [(rows.t(), out)] if len(out) <= _FEW else zip(rows.unbind(), out.unbind(1), strict=True)


def _many_bits(high: Tensor, low: Tensor) -> Tensor:
    """53 bits."""
    return (high << 21).bitwise_or_(low >> 11)


def below(stream: Stream, part: Part, p: float | Tensor) -> Tensor:
    """A bool that is true with probability ``p``, to 2**-32; a tensor has the shape of ``part``."""
    if not isinstance(p, Tensor):
        limit = math.ceil(p * 2.0**32)

        def compare(words: Tensor, out: Tensor) -> None:
            for word, column in _columns(words, out):
                torch.lt(word, limit, out=column)

        return stream.fill(part, torch.bool, 4, compare)

    def make(words: Tensor, out: Tensor) -> None:
        _put(words, out)
        out.mul_(_numbers(out.dtype)[2.0**-32])

    return stream.fill(part, torch.float64, 4, make) < p.to(stream.device, torch.float64)


def integers(stream: Stream, part: Part, low: int, high: int) -> Tensor:
    """int64 in [low, high). One comes up more often than another one by at most ``(high - low) / 2**63``."""
    span = high - low

    def make(words: Tensor, out: Tensor) -> None:
        _put((words[0::2] << 32).bitwise_or_(words[1::2]), out)
        if span < 2**64:
            out.bitwise_and_(2**63 - 1)
            if span < 2**63:
                out.fmod_(span)
            if low:
                out.add_(low)

    return stream.fill(part, torch.int64, 2, make)


def exponential(stream: Stream, part: Part, dtype: torch.dtype) -> Tensor:
    """With mean 1, above 0, in :func:`wide` of ``dtype``."""
    double = dtype == torch.float64

    def make(words: Tensor, out: Tensor) -> None:
        # In float64 also for float32, for one minus what is drawn is fine where the result is small.
        rows = _many_bits(words[0::2], words[1::2]).bitwise_right_shift_(1) if double else words
        for row, column in _columns(rows, out):
            column.copy_(_log(_above_zero(row, _DOUBLE), 52 if double else 32, _DOUBLE, -1.0))

    return stream.fill(part, wide(dtype), 2 if double else 4, make)


def normal(stream: Stream, part: Part, dtype: torch.dtype) -> Tensor:
    """With mean 0 and deviation 1, in :func:`wide` of ``dtype``: for two a radius and an angle (Box and Muller)."""
    if dtype == torch.float64:

        def make(words: Tensor, out: Tensor) -> None:
            first, second, third, fourth = words.split(1)
            x = _above_zero(_many_bits(first, second), _DOUBLE)
            angle = ((third & _HALF) << 22).bitwise_or_(fourth >> 10)
            _put(_on_circle(_log(x, 53, _DOUBLE, -2.0).sqrt_(), angle, third << 32, 53, _DOUBLE), out)

        return stream.fill(part, dtype, 2, make)

    def make_short(words: Tensor, out: Tensor) -> None:
        # Both pairs at once. The numbers of a pair need not stand side by side.
        x, angle = _above_zero(words[:2], _SINGLE), words[2:].to(torch.int32)
        _put(_on_circle(_log(x, 32, _SINGLE, -2.0).sqrt_(), angle & _HALF, angle, 31, _SINGLE), out)

    return stream.fill(part, torch.float32, 4, make_short)


_HALF = 2**31 - 1


class _Format(NamedTuple):
    """How a floating-point format is laid out, and series as long as it is precise."""

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


def _above_zero(word: Tensor, form: _Format) -> Tensor:
    """From so many bits a number above 0, a half more; as fine as the format is where it is small."""
    return word.to(form.dtype).add_(_numbers(form.dtype)[0.5])


def _on_circle(radius: Tensor, angle: Tensor, side: Tensor, bits: int, form: _Format) -> Tensor:
    """The points with these radii, two rows for one, at ``angle`` of the half of the circle around the first axis,
    which ``2**bits`` divide, or opposite to it where the highest bit of ``side`` is set.
    """
    of, whole = _numbers(form.dtype), _numbers(form.bits)
    radius.view(form.bits).bitwise_xor_(side & whole[form.sign])
    angle = angle.sub_(2 ** (bits - 1)).to(form.dtype).add_(of[0.5]).mul_(of[math.pi * 2.0**-bits])
    y = _cosine_and_sine((angle * angle)[:, None], form)
    y[:, 1].mul_(angle)
    return y.mul_(radius[:, None]).flatten(0, 1)


def _cosine_and_sine(square: Tensor, form: _Format) -> Tensor:
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


def _log(x: Tensor, down: int, form: _Format, scale: float) -> Tensor:
    """Of a positive number over ``2**down``, times a power of two: ``x = m * 2**e`` with m around 1, and ``log m =
    2 artanh((m - 1) / (m + 1))``.
    """
    of, whole = _numbers(form.dtype), _numbers(form.bits)
    bits = x.view(form.bits) - whole[form.half_root + (down << form.fraction)]
    m = (bits & whole[2**form.fraction - 1]).add_(whole[form.half_root]).view(form.dtype)
    t = (m - of[1.0]).div_(m.add_(of[1.0]))
    y = _polynomial(t * t, [factor * scale for factor in form.log]).mul_(t)
    return y.add_(bits.bitwise_right_shift_(whole[form.fraction]).to(form.dtype).mul_(of[math.log(2) * scale]))


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


def _artanh(terms: int) -> list[float]:
    return [2 / (2 * k + 1) for k in range(terms)]


def _taylor(first: int, terms: int) -> list[float]:
    return [(-1) ** k / math.factorial(first + 2 * k) for k in range(terms)]


def _circle(terms: int) -> list[tuple[float, float]]:
    cosine, sine = _taylor(0, terms), _taylor(1, terms)
    return list(zip(cosine, sine, strict=True))


_DOUBLE = _Format(
    torch.float64, torch.int64, 52, -(2**63), 0x3FE6A09E667F3BCD, _artanh(9), [*_circle(10), (_taylor(0, 11)[10], 0.0)]
)
_SINGLE = _Format(torch.float32, torch.int32, 23, -(2**31), 0x3F3504F3, _artanh(5), _circle(7))
