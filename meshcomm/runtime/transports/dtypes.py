"""How a tensor is dressed for a backend that cannot move or reduce it as it is, and the reductions done here.

Gloo does not add 16-bit integers, no backend knows complex maxima, and NaN comes through a maximum on some backends
and ranks only. Each such case is turned into one that every backend does alike: complex as pairs of reals, narrow
integers widened, floats under max and min as integers of the same order, in which NaN is the extreme.
"""

from __future__ import annotations

import math
import operator
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm._torch import elementwise, outside_transforms, plain_now
from meshcomm.runtime.process.accelerator import stream_of
from meshcomm.runtime.transports import exact

HALF = (torch.float16, torch.bfloat16)
FLOATS = frozenset((*HALF, torch.float32, torch.float64))

PLAIN = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)
"""What every backend moves."""
COPIED = PLAIN | {
    torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
}  # fmt: skip
"""What torch copies and puts together as it is, and says nothing: where memory is shared, that is all it takes."""
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_ORDERED = {
    torch.float16: torch.int32,
    torch.bfloat16: torch.int32,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_SIGN = torch.iinfo(torch.int64).min


class Dress(NamedTuple):
    """How to reduce a dtype that is not reduced as it is: ``off(reduce(on(x)))``."""

    on: Callable[[Tensor], Tensor]
    off: Callable[[Tensor], Tensor]
    copies: bool = True
    """Whether what ``on`` gives is in memory of its own."""


def plain(x: Tensor) -> Tensor:
    """``x`` dense and with no lazy conjugation or sign, which a backend would not see."""
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.contiguous()


def to_bytes(x: Tensor) -> Tensor:
    """A dense 1-d tensor of a dtype that every backend moves: the elements, or their bytes."""
    if x.dtype in PLAIN and x.is_contiguous() and not x.is_neg():
        return x if x.dim() == 1 else x.view(-1)
    flat = plain(x).reshape(-1)
    if x.dtype in PLAIN:
        return flat
    # One element or none counts as dense whatever its stride, but a view of another width minds.
    return (flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def from_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo :func:`to_bytes` along the last dim."""
    return x if x.dtype == dtype else x.view(dtype)


@cache
def dress(op: str, dtype: torch.dtype) -> Dress | None:
    """How ``dtype`` is reduced by ``op``; None if as it is."""
    if dtype.is_complex:
        return Dress(lambda x: torch.view_as_real(plain(x)), torch.view_as_complex, copies=False)
    if dtype.is_floating_point and op in ("max", "min"):
        return _ordered(dtype, op)
    if dtype == torch.bool:
        return Dress(lambda x: plain(x).view(torch.uint8), lambda x: x.view(torch.bool), copies=False)
    if dtype in _WIDER:
        return Dress(lambda x: x.to(_WIDER[dtype]), lambda x: x.to(dtype))
    if dtype == torch.uint64:
        flip = _SIGN if op in ("max", "min") else 0
        return Dress(lambda x: plain(x).view(torch.int64) ^ flip, lambda x: (x ^ flip).view(torch.uint64))
    return None


FLIPPED = """
template <typename T> T meshcomm_flipped(T bits) {
    const T most = sizeof(T) == 8 ? 0x7fffffffffffffffLL : 0x7fffffffLL;
    return bits < 0 ? bits ^ most : bits;
}
"""
"""In C++: floats, by their bits, as integers of the same order, and back. Without a ">" but the first: torch looks for
names by it.
"""
FLIPPED_WITH_NAN = """
template <typename T> T meshcomm_flipped_nan_{op}(T bits) {{
    const T most = sizeof(T) == 8 ? 0x7fffffffffffffffLL : 0x7fffffffLL;
    const T infinity = sizeof(T) == 8 ? 0x7ff0000000000000LL : 0x7f800000LL;
    return infinity < (bits & most) ? {nan} : bits < 0 ? bits ^ most : bits;
}}
"""
"""The same, with NaN where ``nan`` says."""


def _ordered(dtype: torch.dtype, op: str) -> Dress:
    """Floats as integers of the same order, NaN beyond the infinities on the side that wins: in few kernels of an
    accelerator's, so what has 16 bits is looked up, and what has more is computed by one that is made for it.
    """
    ints = _ORDERED[dtype]
    info = torch.iinfo(ints)
    floats = torch.float64 if ints == torch.int64 else torch.float32
    winner = info.max if op == "max" else info.min
    (nan,) = struct.unpack("=d", struct.pack("=q", 2**63 - 1 if op == "max" else -1))  # flipped it is the winner
    with_nan = FLIPPED_WITH_NAN.format(op=op, nan="most" if op == "max" else "-most - 1")

    def flip(bits: Tensor) -> Tensor:  # its own inverse
        if plain_now() and (flipped := elementwise(FLIPPED, bits)) is not None:
            return flipped
        sign = bits >> (info.bits - 1)
        if _is_traced(bits):  # in place, compiled ranks with other lengths would save and compute again others
            return bits ^ (sign & info.max)
        return sign.bitwise_and_(info.max).bitwise_xor_(bits)

    def ordered(x: Tensor) -> Tensor:
        x = x.to(floats)
        if plain_now() and (flipped := elementwise(with_nan, x.view(ints))) is not None:
            return flipped
        if _is_traced(x):
            return torch.where(x.isnan(), winner, flip(x.view(ints)))
        return flip(x.nan_to_num(nan, math.inf, -math.inf).view(ints))

    def floating(bits: Tensor) -> Tensor:
        return flip(bits).view(floats).to(dtype)

    def every_ordered(patterns: Tensor) -> Tensor:
        return ordered(patterns.view(dtype))

    def every_floating(patterns: Tensor) -> Tensor:
        # The half of the bits that bfloat16 has; the other one is all ones in what is negative.
        wide = patterns.to(ints)
        return floating(wide << 16 | wide >> 15 & 0xFFFF)

    def on(x: Tensor) -> Tensor:
        x = plain(x)
        if dtype not in HALF or not _can_look_up(x):
            return ordered(x)
        return _looked_up(_table(every_ordered, x.device), x)

    def off(bits: Tensor) -> Tensor:
        if dtype != torch.bfloat16 or not _can_look_up(bits):
            return floating(bits)
        return _looked_up(
            _table(every_floating, bits.device), bits.view(torch.int16).unflatten(-1, (-1, 2))[..., _HIGH]
        )

    return Dress(on, off)


_HIGH = int(sys.byteorder == "little")


def _is_traced(x: Tensor) -> bool:
    return type(x.detach()) is not Tensor


def _can_look_up(x: Tensor) -> bool:
    """Not what is traced, which has a type of its own, and not while a graph of a device's is captured: what is made
    then is there when the graph has run, and not before. Both ways give the same numbers.
    """
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return x.ndim > 0 and not _is_traced(x) and not capturing


@cache
def _table(fn: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """What ``fn`` gives of every pattern of 16 bits; for use on any stream, so it is there when this returns."""
    with outside_transforms():
        table = fn(torch.arange(2**16, dtype=torch.int32, device=device).to(torch.int16))
    if (stream := stream_of(table)) is not None:
        stream.synchronize()
    return table


def _looked_up(table: Tensor, x: Tensor) -> Tensor:
    return table.index_select(0, x.view(torch.uint16).to(torch.int32).view(-1)).view(x.shape)


SUMMED_AS_THEY_ARE = frozenset(
    (
        torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex64,
        torch.complex128,
    )
)  # fmt: skip
"""Their sums are calls of torch's and nothing else, and most calls are that."""


def is_one_sum(op: str, dtype: torch.dtype, count: int) -> bool:
    """Whether torch's sum of two is all there is to do: that of two halves is one in float32, rounded once."""
    return count == 2 and op == "sum" and (dtype in SUMMED_AS_THEY_ARE or dtype in HALF)


_BLOCK = 2**18
"""Elements that are reduced at a time: partial results stay where the processor finds them at once."""
_FEW = 2**12
"""Elements of a tensor that adds no memory to speak of."""


def fold(op: str, xs: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Reduce here, in an aligned binary tree by index; half precision is accumulated in float32. The result is ``out``,
    which may be one of two, or new storage.

    ::

        0   1   2   3   4   5   6
        0+1     2+3     4+5     |      pairs whose first is even; what has no pair goes up as it is
        (01)+(23)       (45)+6
        (0123)+(456)

    So reducing 2, 4, ... neighbours first, each pair on a rank of its own, gives the same bits.
    """
    if len(xs) == 1:
        return xs[0].clone(memory_format=torch.contiguous_format) if out is None else out.copy_(xs[0])
    dtype = xs[0].dtype
    if op == "sum" and dtype in SUMMED_AS_THEY_ARE and type(xs[0]) is Tensor:  # a graph may be for any number of them
        if len(xs) == 2 and out is not None:
            return torch.add(xs[0], xs[1], out=out)
        if (numel := xs[0].numel()) <= _BLOCK:
            return (_levels(xs) if out is None and numel <= _FEW else _tree(torch.add, xs, out)).contiguous()
    if is_one_sum(op, dtype, len(xs)) and (out is None or out.dtype is dtype):
        return torch.add(xs[0], xs[1]).contiguous() if out is None else torch.add(xs[0], xs[1], out=out)
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        clothes = dress(op, dtype)
        assert clothes is not None
        y = clothes.off(fold(op, [clothes.on(x) for x in xs]))
        return y if out is None else out.copy_(y)
    few = 2 if dtype in HALF or op in exact.EXACT else 4  # whose reduction needs memory of its own
    # What is traced has a type of its own.
    if len(xs) >= few and type(xs[0]) is Tensor and xs[0].numel() > _BLOCK and all(x.is_contiguous() for x in xs):
        return _in_blocks(op, xs, out)
    return _folded(op, xs, out)


def spare_bytes(op: str, dtype: torch.dtype, numel: int, count: int) -> int:
    """What ``fold`` of ``count`` tensors of ``numel`` takes at once, beside them and the result."""
    if is_one_sum(op, dtype, count):
        return 0
    levels = (count - 1).bit_length()
    if count > 1 and wide(op, dtype) != dtype:
        return (count + levels) * 4 * min(numel, _BLOCK)
    return max(0, levels - 1) * dtype.itemsize * (min(numel, _BLOCK) if count >= 4 else numel)


def wide(op: str, dtype: torch.dtype) -> torch.dtype:
    """In which a reduction is accumulated, and its parts travel."""
    return torch.float32 if dtype in HALF and op in ("sum", "mean", "product") else dtype


def fold_part(op: str, xs: Sequence[Tensor], out: Tensor) -> Tensor:
    """``fold`` of a block of the tree, without its last step: ``out`` has the dtype of :func:`wide`, and a mean is not
    divided yet. Of such parts ``fold_parts`` makes the whole.
    """
    step = "sum" if op == "mean" else op
    if xs[0].dtype == out.dtype:
        return fold(step, xs, out=out)
    for into, *parts in zip(out.split(_BLOCK), *(x.split(_BLOCK) for x in xs), strict=True):
        if len(parts) == 1:
            into.copy_(parts[0])
        else:
            _folded(step, [part.float() for part in parts], into)
    return out


def fold_parts(op: str, parts: Sequence[Tensor], count: int, out: Tensor) -> Tensor:
    """The whole of the blocks of a tree over ``count``, in the dtype of ``out``."""
    step = "sum" if op == "mean" else op
    plainly = op != "mean" and parts[0].dtype == out.dtype
    total = fold(step, parts, out=out if plainly else None)
    return out if plainly else out.copy_(total.div_(count) if op == "mean" else total)


def _in_blocks(op: str, xs: Sequence[Tensor], out: Tensor | None) -> Tensor:
    y = torch.empty_like(xs[0], memory_format=torch.contiguous_format) if out is None else out
    for into, *parts in zip(y.view(-1).split(_BLOCK), *(x.view(-1).split(_BLOCK) for x in xs), strict=True):
        _folded(op, parts, into)
    return y


def _folded(op: str, xs: Sequence[Tensor], out: Tensor | None) -> Tensor:
    if op in exact.EXACT:
        y = exact.fold(op, [plain(x) for x in xs])
        return y if out is None else out.copy_(y)
    if xs[0].dtype in HALF and op in ("sum", "mean", "product"):
        y = _folded(op, [x.float() for x in xs], None)
        return y.to(xs[0].dtype) if out is None else out.copy_(y)
    y = _tree(_STEPS[op], xs, out).contiguous()
    return y.div_(len(xs)) if op == "mean" else y


def _levels(xs: Sequence[Tensor]) -> Tensor:
    """The sum of that tree level by level, in less time and more memory: what was made is the left one of a pair."""
    ys, join = list(xs), operator.add
    while len(ys) > 1:
        odd = ys[-1:] if len(ys) & 1 else []
        ys, join = [*map(join, ys[::2], ys[1::2]), *odd], _ADD
    return ys[0]


_ADD: Any = Tensor.add_


def _tree(step: Callable[..., Tensor], xs: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """The tree above ``xs``; its root, and its left side, are ``out`` if there is one."""

    def into(left: Tensor, right: Tensor) -> Tensor:
        return step(left, right, out=left)

    join: Callable[[Tensor, Tensor], Tensor] = Tensor.add_ if step is torch.add else into
    totals: list[Tensor] = []  # of the blocks so far, the greatest first
    for i in range(0, len(xs) - 1, 2):
        total = step(xs[i], xs[i + 1]) if out is None or i else step(xs[i], xs[i + 1], out=out)
        pairs = i // 2 + 1
        while not pairs & 1:  # as many before these: together they are a block
            total, pairs = join(totals.pop(), total), pairs >> 1
        totals.append(total)
    total = xs[-1] if len(xs) & 1 else totals.pop()
    while totals:
        total = join(totals.pop(), total)
    return total


def _product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    if not a.dtype.is_complex:
        return torch.mul(a, b, out=out)
    # torch rounds a complex product in one way or another, by its place in the memory.
    (ar, ai), (br, bi) = (torch.view_as_real(plain(x)).unbind(-1) for x in (a, b))
    y = torch.complex(ar * br - ai * bi, ar * bi + ai * br)
    return y if out is None else out.copy_(y)


_STEPS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": _product,
    "max": torch.maximum,
    "min": torch.minimum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
