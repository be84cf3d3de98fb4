"""Where what a rank has of a tensor lies in the global one.

A part is a box: where it begins in the global tensor, its lengths, and the local memory that holds it. A flat slice is
several boxes; what is cut in several matrices is several again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import fail


class Kind(NamedTuple):
    """Of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Box(NamedTuple):
    """A part of a global tensor, and the memory in which it is here."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    view: Tensor


def part_of(whole: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """The elements of a box, without a copy."""
    for dim, (offset, length) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, offset, length)
    return whole


class Spread(NamedTuple):
    """A global tensor, of which this rank has some boxes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[Box]

    @staticmethod
    def whole(x: Tensor) -> Spread:
        """A tensor that is the same on every rank; of a DTensor what is here."""
        chunks = getattr(x, "__create_chunk_list__", None)
        if chunks is None:
            return Spread(tuple(x.shape), x.dtype, [Box((0,) * x.ndim, tuple(x.shape), _dense(x))])
        here: Any = x.detach().to_local()  # type: ignore[attr-defined]
        found = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks()]
        if len(found) > 1:
            fail("checkpoint", "a DTensor that lies in several pieces on a rank.", got=str(x.placements))  # type: ignore[attr-defined]
        boxes = [Box(offsets, sizes, here) for offsets, sizes in found if math.prod(sizes) or not x.numel()]
        return Spread(tuple(x.shape), x.dtype, boxes)


class Run(NamedTuple):
    """Consecutive places along a dim: where they are here and where in the global tensor."""

    here: int
    length: int
    there: int


class Place:
    """How tensors that are shaped like a parameter lie in the global one: cut along dims, then a flat slice of that."""

    def __init__(self, shape: Sequence[int], start: int = 0, stop: int | None = None, cut: bool = False) -> None:
        """``shape``: before it was sliced flat."""
        self.shape = tuple(shape)
        self.runs = [[Run(0, length, 0)] for length in self.shape]
        self.start, self.stop = start, math.prod(self.shape) if stop is None else stop
        self.is_cut = cut

    def cut(self, dim: int, lengths: Sequence[int], size: int, index: int) -> None:
        """Another cut came before those that are known: each of these lengths into ``size`` parts."""
        table: list[Run] = []
        here = there = 0
        for length in lengths:
            table.append(Run(here, length // size, there + index * (length // size)))
            here, there = here + length // size, there + length
        joined = []
        for a, b in itertools.product(self.runs[dim], table):
            first, last = _overlap(a.there, a.length, b.here, b.length)
            if first < last:
                joined.append(Run(a.here + first - a.there, last - first, b.there + first - b.here))
        self.runs[dim] = joined
        self.shape = (*self.shape[:dim], there, *self.shape[dim + 1 :])
        self.is_cut = True

    def plain(self) -> tuple[Any, ...]:
        """As plain data: equal for equal places."""
        return self.shape, tuple(tuple(tuple(run) for run in runs) for runs in self.runs), self.start, self.stop

    def of(self, x: Tensor) -> Spread:
        """``x`` is shaped like the parameter here."""
        if hasattr(x, "__create_chunk_list__"):
            return Spread.whole(x)
        x = _dense(x)
        if not math.prod(self.shape):
            return Spread(self.shape, x.dtype, [Box((0,) * len(self.shape), self.shape, x.new_empty(self.shape))])
        local = tuple(sum(run.length for run in runs) for runs in self.runs)
        if x.numel() != self.stop - self.start:
            count = self.stop - self.start
            what = f"a parameter was replaced after it was cut: {x.numel()} elements are here, in place of {count}."
            fix = "replace and tie parameters before they are cut; load_full_state_dict gives them other values"
            fail("parallel", what, got=f"its shape {[*self.shape]}", fix=fix)
        boxes = []
        for at, offsets, sizes in flat_boxes(local, self.start, self.stop):
            whole = x if tuple(x.shape) == local else x.view(-1)[at : at + math.prod(sizes)].view(sizes)
            boxes += list(self._spread(whole, offsets, sizes))
        return Spread(self.shape, x.dtype, boxes)

    def _spread(self, x: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Box]:
        """The global boxes in one local box."""
        for runs in itertools.product(*self.runs):
            y, there = x, []
            for dim, (run, offset, size) in enumerate(zip(runs, offsets, sizes, strict=True)):
                first, last = _overlap(run.here, run.length, offset, size)
                if first >= last:
                    break
                y = y.narrow(dim, first - offset, last - first)
                there.append(run.there + first - run.here)
            else:
                yield Box(tuple(there), tuple(y.shape), y)


def _dense(x: Tensor) -> Tensor:
    """The same memory; files have nothing but dense tensors."""
    y = x.detach()
    if _torch.kind_of(y) is not Tensor or y.layout is not torch.strided or y.is_quantized or y.is_nested:
        fail("checkpoint", f"a {type(x).__name__} of layout {x.layout} is no dense tensor.", got=str(tuple(x.shape)))
    return y


def _overlap(a: int, a_length: int, b: int, b_length: int) -> tuple[int, int]:
    return max(a, b), min(a + a_length, b + b_length)


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Boxes that are elements ``start`` to ``stop`` of the flattened shape: where in the slice each begins, its offsets
    and sizes; at most 2 d - 1 for d dims.
    """
    at = start
    while at < stop:
        if not shape:
            yield 0, (), ()
            return
        rows = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        # The outermost dim of which a whole row begins here.
        dim, row = next((dim, row) for dim, row in enumerate(rows) if at % row == 0 and at + row <= stop)
        offsets = _unflat(at, shape)
        count = min((stop - at) // row, shape[dim] - offsets[dim])
        yield at - start, offsets, (*(1,) * dim, count, *shape[dim + 1 :])
        at += count * row


def _unflat(at: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    offsets = []
    for length in reversed(shape):
        at, offset = divmod(at, length)
        offsets.append(offset)
    return tuple(reversed(offsets))
