"""What ranks send of whole tensors, some MiB at a time, to the one that writes them.

A strip is consecutive elements of the flattened whole, and a box of it: it comes together from the parts that ranks
have of it, and goes to one place of a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshcomm.parallel.checkpoint.parts import Entries, Path, dotted
from meshcomm.parallel.checkpoint.team import Together
from meshcomm.parallel.global_places import Kind, flat_boxes, part_of
from meshcomm.parallel.weights.full_files import OF_TORCH, SAFE, Files, Lot

_BATCH = 2**21
"""Bytes that travel at a time."""


class Strip(NamedTuple):
    """A box of a whole tensor: its elements from ``at`` on."""

    path: Path
    at: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


Sent = tuple[int, tuple[int, ...], Tensor]
"""Of which strip of a batch, where in it, and what is there."""


def parts_in(found: Entries, batch: Sequence[Strip], mine: set[tuple[str, tuple[int, ...]]]) -> list[Sent]:
    """What this rank sends of these strips; ``mine``: the boxes that it and no other one sends, by name and place."""
    sent = []
    for number, strip in enumerate(batch):
        for box in found.tensors[strip.path].boxes if strip.path in found.tensors else ():
            if (dotted(strip.path), box.offsets) in mine:
                both = [*zip(strip.offsets, strip.sizes, box.offsets, box.sizes, strict=True)]
                first = [max(a, b) for a, _, b, _ in both]
                sizes = tuple(min(a + x, b + y) - start for start, (a, x, b, y) in zip(first, both, strict=True))
                if all(size > 0 for size in sizes):
                    here = tuple(start - b for start, (_, _, b, _) in zip(first, both, strict=True))
                    there = tuple(start - a for start, (a, _, _, _) in zip(first, both, strict=True))
                    sent.append((number, there, part_of(box.view, here, sizes).to("cpu", copy=True).contiguous()))
    return sent


class Writing:
    """One save, on the rank that writes: what comes in which order, and where it goes."""

    def __init__(
        self,
        where: str,
        path: str,
        most: int,
        together: Together,
        in_folders: Callable[[Mapping[str, Kind]], list[Lot]],
    ) -> None:
        """``in_folders``: how tensors of the module are kept in those."""
        kinds = {at[1]: Kind(*kind) for at, kind in together.tensors.items() if isinstance(at[1], str)}
        kinds = {name: kinds[name] for name in together.names if name in kinds}
        first = {alias.partition(".")[2]: name.partition(".")[2] for alias, name in together.aliases.items()}
        called = {name: first.get(name, name) for name in together.names}
        called = {name: each for name, each in called.items() if each in kinds}
        is_file = path.endswith((SAFE, *OF_TORCH))
        lots = [Lot([name], {name: kind}, None) for name, kind in kinds.items()]
        lots = lots if is_file else in_folders(kinds)
        self._lots = {name: lot for lot in lots for name in lot.sources}
        self._kinds = kinds
        self._whole: dict[str, Tensor] = {}
        """Of the lot that is converted next."""
        self._lacking = 0
        self.batches = [*_batches([*self._lots], kinds)]
        self._files = Files(where, path, {name: kind for lot in lots for name, kind in lot.kinds.items()}, called, most)

    def take(self, batch: Sequence[Strip], every: Sequence[Sequence[Sent]]) -> None:
        """Write these strips, of which each rank has sent its parts."""
        parts: list[list[Sent]] = [[] for _ in batch]
        for sent in every:
            for each in sent:
                parts[each[0]].append(each)
        for strip, found in zip(batch, parts, strict=True):
            name = str(strip.path[1])
            if len(found) == 1 and tuple(found[0][2].shape) == strip.sizes:
                x = found[0][2]
            else:
                x = torch.empty(strip.sizes, dtype=self._kinds[name].dtype, device="cpu")
                for _, there, part in found:
                    part_of(x, there, tuple(part.shape)).copy_(part)
            self._put(self._lots[name], name, strip.at, x)

    def _put(self, lot: Lot, name: str, at: int, x: Tensor) -> None:
        if lot.convert is None:
            self._files.put(next(iter(lot.kinds)), at, x)
            return
        if not self._whole:
            self._whole = {name: torch.empty(self._kinds[name].shape, dtype=self._kinds[name].dtype, device="cpu")
                           for name in lot.sources}  # fmt: skip
            self._lacking = sum(map(Tensor.numel, self._whole.values()))
        self._whole[name].view(-1)[at : at + x.numel()].copy_(x.reshape(-1))
        self._lacking -= x.numel()
        if not self._lacking:
            given, self._whole = self._whole, {}
            for target, made in lot.convert(given).items():
                self._files.put(target, 0, made)

    def finish(self) -> None:
        """All files appear."""
        self._files.finish()

    def drop(self) -> None:
        """Leave nothing of what has not been finished."""
        self._files.drop()


def _batches(order: Sequence[str], kinds: dict[str, Kind]) -> Iterator[list[Strip]]:
    batch: list[Strip] = []
    room = _BATCH
    for name in order:
        shape, dtype = kinds[name]
        step, total, start = max(_BATCH // dtype.itemsize, 1), math.prod(shape), 0
        while start < total:
            stop = min(start + min(step, max(room // dtype.itemsize, 1)), total)
            for at, offsets, sizes in flat_boxes(shape, start, stop):
                batch.append(Strip(("model", name), start + at, offsets, sizes))
            room -= (stop - start) * dtype.itemsize
            start = stop
            if room < dtype.itemsize:
                yield batch
                batch, room = [], _BATCH
    if batch:
        yield batch
