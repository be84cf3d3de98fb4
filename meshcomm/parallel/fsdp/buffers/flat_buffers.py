"""How tensors lie one behind the other in one flat buffer, of which each rank keeps a chunk.

n = number of ranks, k = elements of a chunk.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshcomm import _torch

_DENSE = (Tensor, nn.Parameter)
_ALIGNED = 8
"""Elements: where a tensor begins, kernels may load 16 bytes at once."""


class Entry(NamedTuple):
    """A tensor in the buffer."""

    shape: torch.Size
    size: int
    start: int


class Row:
    """Tensors one behind the other in one flat buffer, which may be free between them and behind the last one."""

    def __init__(self, places: Sequence[tuple[int, int]], total: int) -> None:
        """``places``: where each tensor begins, and its elements; ``total``: those of the buffer."""
        self.total = total
        self._runs: list[tuple[int, int]] = []
        """What lies there, in order: which tensor, -1 for none, and how many elements."""
        end = 0
        for at in sorted(range(len(places)), key=places.__getitem__):
            start, length = places[at]
            self._free(start - end)
            self._runs.append((at, length))
            end = start + length
        self._free(total - end)
        self._is_dense = [at for at, _ in self._runs] == [*range(len(places))] != []
        """The tensors lie there in their order, and nothing else."""
        self._widths: list[int] = []
        self._parts = [0] * len(places)
        for part, (at, length) in enumerate(self._runs):
            self._widths.append(length)  # of what is empty too: autograd copies a gradient that others have as well
            if at >= 0:
                self._parts[at] = part
        self._is_split = self._parts == [*range(len(self._widths))]
        """Each part is a tensor, in their order."""
        self._zeros: dict[tuple[torch.dtype, torch.device], list[Tensor | None]] = {}

    def _free(self, length: int) -> None:
        if length:
            self._runs.append((-1, length))

    def join(self, tensors: Sequence[Tensor | None], like: Tensor, out: Tensor | None = None) -> Tensor:
        """The buffer: the tensors, zeros where there is none and in between; ``like`` has dtype and device."""
        parts = self.parts(tensors, like)
        return torch.cat(parts) if out is None else torch.cat(parts, out=out)

    def parts(self, tensors: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
        """What lies there one behind the other, flat."""
        if not self._is_dense or any(map(is_, tensors, repeat(None))):
            return self._with_zeros(tensors, like)
        whole: Any = tensors
        return [x if x.ndim == 1 else x.reshape(-1) for x in whole]

    def _with_zeros(self, tensors: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
        parts = []
        for (at, length), zeros in zip(self._runs, self._zeros_like(like), strict=True):
            x = zeros if at < 0 else tensors[at]
            if x is None:
                x = like.new_zeros(length)
            parts.append(x if x.ndim == 1 else x.reshape(-1))
        return parts

    def _zeros_like(self, like: Tensor) -> list[Tensor | None]:
        """For each run the zeros that lie there, if it is free."""
        found = self._zeros.get((like.dtype, like.device))
        if type(like) not in _DENSE or torch.compiler.is_compiling():  # nobody may keep what is traced
            return [like.new_zeros(length) if at < 0 else None for at, length in self._runs]
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = [like.new_zeros(length) if at < 0 else None for at, length in self._runs]
            self._zeros[like.dtype, like.device] = found
        return found

    def lies(self, shapes: Sequence[torch.Size]) -> list[tuple[int, Tensor]]:
        """Tensors that take no memory, of those of these shapes that are not flat, and which part of the buffer each
        is.
        """
        one = torch.empty((), device="cpu")
        return [(self._parts[at], one.expand(shape)) for at, shape in enumerate(shapes) if len(shape) != 1]

    def apart(self, buffer: Tensor, lies: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """The tensors, without a copy, in the shapes of what :meth:`lies` gave; to autograd they have nothing to do
        with each other.
        """
        parts = _torch.apart(buffer, self._widths, lies)
        return parts if self._is_split else [parts[part] for part in self._parts]

    def split(self, buffer: Tensor) -> Sequence[Tensor]:
        """The tensors, flat, without a copy: an operation whose derivative is one concatenation."""
        parts: tuple[Tensor, ...] = buffer.split_with_sizes(self._widths)
        return parts if self._is_split else [parts[part] for part in self._parts]


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
        self.buffer = Row(list(zip(starts, sizes, strict=True)), ranks * self.chunk)
        self._shaped = [(at, shape) for at, shape in enumerate(shapes) if len(shape) != 1]
        """Those that a part of the buffer has not got yet."""
        self._lies: list[tuple[int, Tensor]] | None = None
        self._shapes = list(shapes)
        self._rows: dict[int, Row] = {}
        self.key = f"layout {next(_numbers)}"
        _layouts[self.key] = self

    @property
    def total(self) -> int:
        """Elements of the buffer."""
        return self.buffer.total

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in ``[n * k]``, without a copy."""
        parts = list(self.buffer.split(buffer))
        for at, shape in self._shaped:
            parts[at] = parts[at].view(shape)
        return parts

    def apart(self, buffer: Tensor) -> list[Tensor]:
        """The same for who looks after derivatives and changes in place himself: to autograd they have nothing to do
        with each other, and each counts its own versions. They cost half as much.
        """
        if type(buffer) is not Tensor or not _torch.plain_now():
            return self.views(buffer)
        if self._lies is None:
            with torch.inference_mode(False):
                self._lies = self.buffer.lies(self._shapes)
        return self.buffer.apart(buffer, self._lies)

    # ------------------------------------------------------------------------------------------------- the chunks

    def range_of(self, at: int, index: int) -> tuple[int, int]:
        """Which elements of tensor ``at`` rank ``index`` keeps: from, to."""
        entry, left = self.entries[at], index * self.chunk
        first, last = max(entry.start, left), min(entry.start + entry.size, left + self.chunk)
        return (first - entry.start, last - entry.start) if first < last else (0, 0)

    def row(self, index: int) -> Row:
        """What rank ``index`` keeps of its chunk: all of it, but of whole tensors no more than there are."""
        if index not in self._rows:
            places, free = [], 0 if self.whole else self.chunk
            for at, entry in enumerate(self.entries):
                first, last = self.range_of(at, index)
                start = entry.start + first - index * self.chunk
                # What is empty lies before or behind the rest, in the order of the tensors if that is the buffer's.
                places.append((start, last - first) if first < last else (max(0, min(start, free)), 0))
            end = max((_aligned(start + length) for start, length in places if length), default=0)
            self._rows[index] = Row(places, end if self.whole else self.chunk)
        return self._rows[index]

    def padded(self, stored: Tensor) -> Tensor:
        """The chunk ``[k]`` that goes to the others, of what a rank keeps."""
        free = self.chunk - stored.numel()
        return torch.cat([stored, stored.new_zeros(free)]) if free else stored

    def cut(self, chunk: Tensor, index: int) -> Sequence[Tensor]:
        """The parts of the tensors in what rank ``index`` keeps, without a copy; the chunk ``[k]`` will do too."""
        row = self.row(index)
        if not self.whole:
            return row.split(chunk)
        return [x.view(self.shape_at(at, index)) for at, x in enumerate(row.split(chunk[: row.total]))]

    def shape_at(self, at: int, index: int) -> tuple[int, ...]:
        """Of the part of tensor ``at`` that rank ``index`` keeps: flat, or its own if tensors are kept whole."""
        first, last = self.range_of(at, index)
        return tuple(self.entries[at].shape) if self.whole and last > first else (last - first,)

    def stored_of(self, tensors: Sequence[Tensor], index: int) -> Tensor:
        """What rank ``index`` keeps of the tensors, copied."""
        parts = [x.reshape(-1)[slice(*self.range_of(at, index))] for at, x in enumerate(tensors)]
        return self.row(index).join(parts, tensors[0])


def layout_with_key(key: str) -> Layout:
    """The layout that a graph speaks of: of a module or tree that is still there."""
    return _layouts[key]


_layouts: weakref.WeakValueDictionary[str, Layout] = weakref.WeakValueDictionary()
_numbers = itertools.count()


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
