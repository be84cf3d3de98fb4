"""What :mod:`meshcomm.spmd.random.distributions` makes of words, on arrays of numpy: the same operations, in the same
order where it is one for rounding, and so the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from meshcomm.spmd.random.formats import DOUBLE, SINGLE, Format
from meshcomm.spmd.random.programs import Calls, Steps


def uniforms(bits: int) -> Steps:
    """In [0, 1), of so many bits: float64 of 53, float32 of less."""

    def steps(numpy: Any, words: Any, out: Any) -> Calls:
        begin: Calls = []
        if bits == 53:
            words, begin = _twice(numpy, words)
        x = numpy.empty(words.shape, out.dtype)
        return [
            *begin,
            (numpy.right_shift, (words, numpy.array(8 * words.itemsize - bits, words.dtype), words)),
            (x.__setitem__, (..., words)),
            (numpy.multiply, (x, numpy.array(2.0**-bits, out.dtype), out.T)),
        ]

    return steps


def flags(limit: int) -> Steps:
    """Which words are less than that."""

    def steps(numpy: Any, words: Any, out: Any) -> Calls:
        if limit == 0:
            return [(out.fill, (False,))]
        return [(numpy.less_equal, (words, numpy.array(limit - 1, numpy.uint32), out.T))]

    return steps


def integers(low: int, span: int) -> Steps:
    """int64 from low on, of a short span."""

    def steps(numpy: Any, words: Any, out: Any) -> Calls:
        x = numpy.empty(words.shape, numpy.int64)
        return [
            (x.__setitem__, (..., words)),
            (numpy.multiply, (x, numpy.array(span, numpy.int64), x)),
            (numpy.right_shift, (x, numpy.array(32, numpy.int64), out.T)),
            *([(numpy.add, (out, numpy.array(low, numpy.int64), out))] if low else []),
        ]

    return steps


def exponentials(bits: int) -> Steps:
    """With mean 1, of as many bits as a word has or 52."""

    def steps(numpy: Any, words: Any, out: Any) -> Calls:
        begin: Calls = []
        if bits == 52:
            words, begin = _twice(numpy, words)
            begin = [*begin, (numpy.right_shift, (words, numpy.array(12, numpy.uint64), words))]
        t, y, square = numpy.empty((3, *words.shape))
        to_log, power = _to_log(numpy, t, bits, DOUBLE, -1.0)
        return [
            *begin,
            (t.__setitem__, (..., words)),
            (numpy.add, (t, numpy.array(0.5), t)),
            *to_log,
            (numpy.multiply, (t, t, square)),
            *_series(numpy, square, [numpy.array(-factor) for factor in DOUBLE.log], y),
            (numpy.multiply, (y, t, y)),
            (numpy.add, (y, power, out.T)),
        ]

    return steps


def normals(form: Format) -> Steps:
    """With mean 0 and deviation 1. Of few the series of the logarithm, begun with zeros, the cosine and the sine are
    one.
    """
    bits = 31 if form is SINGLE else 53

    def steps(numpy: Any, words: Any, out: Any) -> Calls:
        floats, ints = (functools.partial(numpy.array, dtype=each) for each in _dtypes(numpy, form))
        first, side, turned, begin = (_halves if form is SINGLE else _long_halves)(numpy, words)
        shape = first.shape
        y, square = numpy.empty((2, 3, *shape), out.dtype)
        x = numpy.empty((2, *shape), out.dtype)
        (t, angle), radius = x, y[0]
        to_log, power = _to_log(numpy, t, 32 if form is SINGLE else 53, form, -2.0)
        logs = [floats(factor * -2.0) for factor in form.log]
        both = [floats(pair).reshape(2, 1, 1) for pair in form.cosine_and_sine]
        if shape[1] > _FEW_TO_ADD:
            series = [*_series(numpy, square[0], logs, y[0]), *_series(numpy, square[1], both, y[1:])]
        else:  # one operation on all is sooner done than one on each
            logs += [floats(0.0)] * (len(both) - len(logs))
            columns = [floats([[[log]], *pair]) for log, pair in zip(logs, both, strict=True)]
            columns = [each.repeat(shape[0], 1).repeat(shape[1], 2) for each in columns]
            series = [(square[2].__setitem__, (..., square[1])), *_series(numpy, square, columns, y)]
        return [
            *begin,
            (numpy.subtract, (turned, ints(2 ** (bits - 1)), turned)),
            (t.__setitem__, (..., first)),
            (angle.__setitem__, (..., turned)),
            (numpy.add, (x, floats(0.5), x)),
            (numpy.multiply, (angle, floats(math.pi * 2.0**-bits), angle)),
            *to_log,
            (numpy.multiply, (x, x, square[:2])),
            *series,
            (numpy.multiply, (y[::2], x, y[::2])),
            (numpy.add, (radius, power, radius)),
            (numpy.sqrt, (radius, radius)),
            (numpy.bitwise_and, (side, ints(form.sign), side)),
            (numpy.bitwise_xor, (radius.view(side.dtype), side, radius.view(side.dtype))),
            (numpy.multiply, (y[1:], radius, out.reshape(shape[1], shape[0], 2).T)),
        ]

    return steps


_FEW_TO_ADD = 2**7
"""Blocks for which numbers are repeated."""


def _dtypes(numpy: Any, form: Format) -> tuple[Any, Any]:
    return (numpy.float32, numpy.int32) if form is SINGLE else (numpy.float64, numpy.int64)


def _halves(numpy: Any, words: Any) -> tuple[Any, Any, Any, Calls]:
    """Of two pairs: what becomes radii, the words whose highest bit is a side, what becomes angles, and the calls."""
    side = words[2:].view(numpy.int32)
    turned = numpy.empty(side.shape, numpy.int32)
    return words[:2], side, turned, [(numpy.bitwise_and, (side, numpy.array(2**31 - 1, numpy.int32), turned))]


def _long_halves(numpy: Any, words: Any) -> tuple[Any, Any, Any, Calls]:
    """The same of one pair, of words of 64 bits."""
    number = functools.partial(numpy.array, dtype=numpy.uint64)
    y, begin = _twice(numpy, words)
    first, turned = numpy.empty((2, 1, words.shape[1]), numpy.uint64)
    calls = [
        *begin,
        (numpy.right_shift, (y[:1], number(11), first)),
        (numpy.right_shift, (y[1:], number(10), turned)),
        (numpy.bitwise_and, (turned, number(2**53 - 1), turned)),
    ]
    return first.view(numpy.int64), y[1:].view(numpy.int64), turned.view(numpy.int64), calls


def _twice(numpy: Any, words: Any) -> tuple[Any, Calls]:
    """Two and two words in one of 64 bits, the first one above: a uint64 ``[2, n]``, and the calls."""
    wide, y = numpy.empty(words.shape, numpy.uint64), numpy.empty((2, words.shape[1]), numpy.uint64)
    return y, [
        (wide.__setitem__, (..., words)),
        (numpy.left_shift, (wide[::2], numpy.array(32, numpy.uint64), y)),
        (numpy.bitwise_or, (y, wide[1::2], y)),
    ]


def _to_log(numpy: Any, t: Any, down: int, form: Format, scale: float) -> tuple[Calls, Any]:
    """Of a positive number over ``2**down``, ``m * 2**e``, the calls that put ``(m - 1) / (m + 1)`` in its place, and
    where they put the logarithm of ``2**e`` times a number.
    """
    floats, ints = (functools.partial(numpy.array, dtype=each) for each in _dtypes(numpy, form))
    (power, m), around = numpy.empty((2, 2, *t.shape), t.dtype)
    bits, bits_of_m = t.view(_dtypes(numpy, form)[1]), m.view(_dtypes(numpy, form)[1])
    return [
        (numpy.subtract, (bits, ints(form.half_root + (down << form.fraction)), bits)),
        (numpy.bitwise_and, (bits, ints(2**form.fraction - 1), bits_of_m)),
        (numpy.add, (bits_of_m, ints(form.half_root), bits_of_m)),
        (numpy.right_shift, (bits, ints(form.fraction), bits)),
        (power.__setitem__, (..., bits)),
        (numpy.multiply, (power, floats(math.log(2) * scale), power)),
        (numpy.add, (m, floats([[[-1.0]], [[1.0]]]), around)),
        (numpy.divide, (*around, t)),
    ], power


def _series(numpy: Any, x: Any, factors: Sequence[Any], y: Any) -> Calls:
    """The calls by which ``y`` is the series with these factors, lowest power first."""
    *rest, second, first = factors
    each = [call for factor in rest[::-1] for call in ((numpy.multiply, (y, x, y)), (numpy.add, (y, factor, y)))]
    return [(numpy.multiply, (x, first, y)), (numpy.add, (y, second, y)), *each]
