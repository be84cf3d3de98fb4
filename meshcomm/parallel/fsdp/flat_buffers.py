"""How tensors lie one behind the other in one flat buffer, of which each rank keeps a chunk.

n = number of ranks, k = elements of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Entry", "Layout"]

_ALIGNED = 8
"""Elements: where a tensor begins, kernels may load 16 bytes at once."""


class Entry(NamedTuple):
    """A tensor in the buffer."""

    shape: torch.Size
    size: int
    start: int


class Layout:
    """Where each tensor of a list lies in a buffer of ``ranks * chunk`` elements, ``[n * k]``.

    The chunks cut through the tensors, wherever their borders fall; with ``whole`` each tensor lies in one chunk, the
    largest first where there is most room; chunks are as long as the fullest one, and that is how long they are sent.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], ranks: int, *, whole: bool = False, loads: list[int] | None = None
    ) -> None:
        """``loads``: how much each rank has of other layouts, to be added to; of ranks that do equally the one with
        least takes the next whole tensor.
        """
        self.ranks, self.whole = ranks, whole
        sizes = [shape.numel() for shape in shapes]
        rooms = [_aligned(size) for size in sizes]
        if whole:
            starts, self.chunk = _starts_of_whole(rooms, [0] * ranks if loads is None else loads)
        else:
            starts, self.chunk = _starts(rooms, ranks)
        self.entries = [Entry(*each) for each in zip(shapes, sizes, starts, strict=True)]
        self._runs = self._all_runs()
        self._has_gaps = any(free for _, free in self._runs)
        self._widths, self._parts = self._all_widths()
        self._cuts: dict[int, tuple[list[int], list[int]]] = {}
        self._zeros: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    @property
    def total(self) -> int:
        """Elements of the buffer."""
        return self.ranks * self.chunk

    def _all_runs(self) -> list[tuple[int, int]]:
        """The entries in their order in the buffer, each with the elements that are free behind it; -1 in front."""
        order = sorted(range(len(self.entries)), key=lambda at: (self.entries[at].start, self.entries[at].size))
        ends = [(-1, 0), *((at, self.entries[at].start + self.entries[at].size) for at in order)]
        begins = [*(self.entries[at].start for at in order), self.total]
        return [(at, begin - end) for (at, end), begin in zip(ends, begins, strict=True)]

    def _all_widths(self) -> tuple[list[int], list[int]]:
        """How to split the buffer, and which part each entry is."""
        widths: list[int] = []
        parts = [0] * len(self.entries)
        for at, free in self._runs:
            if at >= 0:
                parts[at] = len(widths)
                widths.append(self.entries[at].size)
            if free:
                widths.append(free)
        return widths, parts

    # ------------------------------------------------------------------------------------------------ the buffer

    def join(self, tensors: Sequence[Tensor | None], like: Tensor, out: Tensor | None = None) -> Tensor:
        """``[n * k]``: the tensors, zeros where there is none and in between; ``like`` has dtype and device."""
        if not self._has_gaps:
            found = [tensors[at] for at, _ in self._runs[1:]]
            if all(x is not None for x in found):
                dense = [x if x.ndim == 1 else x.reshape(-1) for x in found if x is not None]
                return torch.cat(dense) if out is None else torch.cat(dense, out=out)
        zeros = self._zeros.get((like.dtype, like.device))
        if zeros is None:
            with torch.inference_mode(False), torch.no_grad():
                zeros = [like.new_zeros(free) for _, free in self._runs]
            self._zeros[like.dtype, like.device] = zeros
        parts: list[Tensor] = []
        for (at, free), gap in zip(self._runs, zeros, strict=True):
            if at >= 0:
                x = tensors[at]
                parts.append(
                    like.new_zeros(self.entries[at].size) if x is None else x if x.ndim == 1 else x.reshape(-1)
                )
            if free:
                parts.append(gap)
        return torch.cat(parts) if out is None else torch.cat(parts, out=out)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in ``[n * k]``, without a copy: two operations whose derivative is one concatenation."""
        parts = buffer.split_with_sizes(self._widths)
        return [
            parts[part] if len(entry.shape) == 1 else parts[part].view(entry.shape)
            for part, entry in zip(self._parts, self.entries, strict=True)
        ]

    # ------------------------------------------------------------------------------------------------- the chunks

    def range_of(self, at: int, index: int) -> tuple[int, int]:
        """Which elements of tensor ``at`` rank ``index`` keeps: from, to."""
        entry, left = self.entries[at], index * self.chunk
        first, last = max(entry.start, left), min(entry.start + entry.size, left + self.chunk)
        return (first - entry.start, last - entry.start) if first < last else (0, 0)

    def places(self, index: int) -> list[tuple[int, int]]:
        """Where in the chunk of rank ``index`` its part of each tensor lies: from, length."""
        places = []
        for at, entry in enumerate(self.entries):
            first, last = self.range_of(at, index)
            places.append((entry.start + first - index * self.chunk if first < last else 0, last - first))
        return places

    def stored(self, index: int) -> int:
        """Elements that rank ``index`` keeps of its chunk: all, but of whole tensors no more than there are."""
        if not self.whole:
            return self.chunk
        return max((_aligned(start + length) for start, length in self.places(index) if length), default=0)

    def padded(self, stored: Tensor) -> Tensor:
        """The chunk ``[k]`` that goes to the others."""
        if stored.numel() == self.chunk:
            return stored
        chunk = stored.new_zeros(self.chunk)
        chunk[: stored.numel()] = stored
        return chunk

    def cut(self, chunk: Tensor, index: int) -> list[Tensor]:
        """The parts of the tensors in what rank ``index`` keeps, without a copy; the chunk ``[k]`` will do too."""
        widths, parts = self._cuts[index] if index in self._cuts else self._all_cuts(index)
        if not self.whole:
            found = chunk.split_with_sizes(widths)
            return [found[part] for part in parts]
        found = chunk[: sum(widths)].split_with_sizes(widths)
        return [found[part].view(self.shape_at(at, index)) for at, part in enumerate(parts)]

    def _all_cuts(self, index: int) -> tuple[list[int], list[int]]:
        """How to split the chunk, and which part each entry is: the empty one in front for those that are elsewhere."""
        widths, parts, end = [0], [0] * len(self.entries), 0
        places = self.places(index)
        for at in sorted(range(len(places)), key=lambda at: places[at]):
            start, length = places[at]
            if length:
                if start > end:
                    widths.append(start - end)
                parts[at] = len(widths)
                widths.append(length)
                end = start + length
        widths.append(self.stored(index) - end)
        self._cuts[index] = widths, parts
        return widths, parts

    def shape_at(self, at: int, index: int) -> tuple[int, ...]:
        """Of the part of tensor ``at`` that rank ``index`` keeps: flat, or its own if tensors are kept whole."""
        first, last = self.range_of(at, index)
        return tuple(self.entries[at].shape) if self.whole and last > first else (last - first,)

    def chunk_of(self, tensors: Sequence[Tensor], index: int, out: Tensor) -> Tensor:
        """Copy what rank ``index`` keeps of the tensors into ``out``, ``[k]``."""
        for at, (start, length) in enumerate(self.places(index)):
            first, last = self.range_of(at, index)
            if length:
                out[start : start + length].copy_(tensors[at].reshape(-1)[first:last])
        return out


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _starts(rooms: Sequence[int], ranks: int) -> tuple[list[int], int]:
    return [sum(rooms[:at]) for at in range(len(rooms))], _aligned(-(-sum(rooms) // ranks))


def _starts_of_whole(rooms: Sequence[int], loads: list[int]) -> tuple[list[int], int]:
    filled = [0] * len(loads)
    places = [(0, 0)] * len(rooms)
    for at in sorted(range(len(rooms)), key=lambda at: -rooms[at]):
        owner = min(range(len(loads)), key=lambda rank: (filled[rank], loads[rank]))
        places[at] = owner, filled[owner]
        filled[owner] += rooms[at]
        loads[owner] += rooms[at]
    chunk = max(filled, default=0)
    return [owner * chunk + offset for owner, offset in places], chunk
