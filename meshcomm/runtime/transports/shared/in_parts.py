"""Calls that take some time, among those that are made at once: how they are written and, of two ranks, read meanwhile.

Views take as long as a part of the copy where torch's code is in no cache, so what lies densely goes from address to
address. Where one of two ranks gives or gets, nothing is overlapped by itself: there the entry stands first under its
number with a minus, as nobody but this file knows it, a cell of what is lent says up to where it is written, and at the
end the entry has its number, as that of any other call, and all may read::

    who gives    -number ──► part ──► STATE ──► part ──► STATE ──► ... ──► number ──► its own, if it has some
                                        │                  │
    who gets     its own, if it has some┴──► part ─────────┴──► part ──► ...

Where both give and get, they are busy anyhow, and who reads what is just being written takes the lines from who writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from meshcomm import _torch
from meshcomm.runtime.process.boxes import ENTRIES, ENTRY
from meshcomm.runtime.process.lending import PART, STATE, Segment, address_of, copy, move
from meshcomm.runtime.transports.shared.mailbox import Mail
from meshcomm.runtime.transports.shared.waiting import give_way
from meshcomm.runtime.transports.shared.words import DIGEST, OFFSET, ROOT, SERIAL

_TOLD = 2**17
"""Bytes that are written before they are told of."""


class _Other(NamedTuple):
    """What this rank reads of what the other one lends."""

    cells: Any
    address: int
    parts: Sequence[Tensor]


def _nowhere(x: Tensor) -> int:
    """In the place of an address, of what is neither lent nor read."""
    return int(_torch.plain_now())


class Parts:
    """How this rank's tensor of a call is written by its address, and what of the result can be made part by part."""

    __slots__ = (
        "_cuts", "_ends", "_own", "_size", "_start", "_writes", "address", "follows", "reduces", "tells",
    )  # fmt: skip

    def __init__(
        self, lent: Sequence[tuple[int, int]], start: int, size: int, own: int | None, itemsize: int,
        tells: bool, follows: bool, reduces: str,
    ) -> None:  # fmt: skip
        """``lent``: from and to which bytes others read this rank's tensor. ``start``, ``size``: where in each tensor
        what this rank reads begins, and how long it is. ``own``: the place of this rank's in the result. ``tells``:
        whether who reads is told part by part; ``follows``: whether this rank reads so, and by which op it
        ``reduces``; nothing if it copies.
        """
        most = _TOLD if tells else PART
        self._writes = [(at, min(most, end - at)) for begin, end in lent for at in range(begin, end, most)]
        self._start, self._size, self._own = start, size, own
        self.address = address_of if lent or own is not None else _nowhere
        """Where a tensor lies; 0 if it cannot be lent and read so."""
        self.tells, self.follows, self.reduces = tells, follows, reduces
        # To reduce takes longer than to write, and each view takes its time: when a quarter is done the rest is there.
        # Which of two zeros is the greater one depends for torch on where they lie: they lie there as in the whole.
        count = size // itemsize
        first = 0 if reduces in ("max", "min") else count // 4
        self._cuts = [first, count - first] if first else [count]
        self._ends = [start + first * itemsize, start + size] if first else [start + size]

    def write(self, lent: Segment, address: int) -> None:
        """All that others read."""
        to, cells, tells = lent.address, lent.cells, self.tells
        for at, nbytes in self._writes:
            copy(to + at, address + at, nbytes)
            if tells:
                cells[STATE] = at + nbytes

    def finish(self, lent: Segment, address: int) -> None:
        """The same of who was interrupted in it, be it more than once: others have heard of it."""
        left, to = self._writes.copy(), lent.address
        while left:
            with contextlib.suppress(BaseException):  # who calls this raises one already
                at, nbytes = left[0]
                copy(to + at, address + at, nbytes)
                lent.cells[STATE] = max(lent.cells[STATE], at + nbytes)
                del left[0]

    def of(self, segment: Segment, x: Tensor) -> _Other:
        """``x``: what this rank reads of what lies in there."""
        return _Other(segment.cells, segment.address + self._start, self.cut(x) if self.reduces else ())

    def cut(self, x: Tensor) -> Sequence[Tensor]:
        """In the parts that are reduced."""
        return (x if x.dim() == 1 else x.view(-1)).split_with_sizes(self._cuts)

    def copy_own(self, address: int, to: int) -> None:
        """To its place in the result, if it has one. ``to``: where that begins."""
        if self._own is not None:
            move(to + self._own * self._size, address + self._start, self._size)

    def copy(self, other: _Other, k: int, cells: Any, at: int, number: int, to: int) -> bool:
        """What is written there to place ``k`` of the result; whether it came in time."""
        state, source, start, size, done = other.cells, other.address, self._start, self._size, 0
        to += k * size
        while done < size:
            there = size if cells[at] == number else state[STATE] - start
            if there > done:
                nbytes = there - done if there - done < PART else PART
                copy(to + done, source + done, nbytes)
                done += nbytes
            elif not _comes(state, STATE, start + done + 1):
                return False
        return True

    def reduce(self, take: Callable[..., object], own: Any, other: _Other, k: int, out: Any) -> bool:
        """The same, reduced with this rank's own; ``own``, ``out``: cut."""
        state = other.cells
        for end, mine, theirs, into in zip(self._ends, own, other.parts, out, strict=True):
            if state[STATE] < end and not _comes(state, STATE, end):
                return False
            take((mine, theirs) if k else (theirs, mine), out=into)
        return True


def parts_of(known: Any, itemsize: int, tells: bool, reduces: str) -> Parts | None:
    """Those of such a call as :mod:`meshcomm.runtime.transports.shared.at_once` knows it, if there are some."""
    size, lent = known.nbytes, [(0, known.nbytes)]
    if known.rows:
        size //= known.rows
        lent = [((span.start or 0) * size, span.stop * size) for span in known.spans]
    follows = tells and bool(known.reads) and known.whole is not None
    if not (known.readers or follows):
        return None
    start = known.index * size if known.rows else 0
    lent = lent if known.readers else []
    return Parts(lent, start, size, known.own_at, itemsize, tells, follows, reduces if follows else "")


def follow(known: Any, mail: Mail, number: int, own: Any, address: int, out: Tensor, flags: list[Any]) -> bool:
    """Whether ``out`` is made of this rank's own and of what the other one writes, if there is one, while it does: it
    may not come in time, or not be such a call. ``flags``: what was borrowed.
    """
    parts, cut, to = known.parts, None, 0
    if not parts.reduces:
        to = out.data_ptr()
        parts.copy_own(address, to)
    for k, i, cells, first, places in known.sources:
        at = first + number % ENTRIES * ENTRY
        if parts.reduces and cells[at] != number:  # views take their time, and the other one is not ready
            cut = parts.cut(own), parts.cut(out)
        if cells[at] != number and not _comes(cells, at, number):
            return False
        if cells[at + DIGEST] != known.meaning[1] or cells[at + ROOT] != known.rooted:
            return False
        found = places.get((cells[at + SERIAL], cells[at + OFFSET])) or known.borrowed(mail, i, cells, at, places)
        if found is None:
            return False
        theirs, flag, _, other = found
        flags.append(flag)
        if not parts.reduces:
            is_done = parts.copy(other, k, cells, at, number, to)
        elif is_done := cut is None or cells[at] == number:
            known.take((own, theirs) if k else (theirs, own), out=out)
        else:
            is_done = parts.reduce(known.take, cut[0], other, k, cut[1])
        if not is_done:
            return False
    return True


def _comes(cells: Any, at: int, least: int) -> bool:
    """Whether as great a number, or that with a minus, stands there before one would sleep."""
    end = 0.0
    while abs(cells[at]) < least:
        if (end := give_way(end)) < 0:
            return False
    return True
