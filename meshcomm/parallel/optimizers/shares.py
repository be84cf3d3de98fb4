"""Which rank has the states of which part of each parameter of an optimiser that is sharded; sends nothing."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshcomm.errors import fail

Cut = Literal["elements", "tensors"]
WHERE = "shard_optimizer"
WHOLE_STATES = ("row_var", "col_var")
"""What Adafactor keeps of whole tensors, however a parameter is cut."""
_ALIGNED = 64
"""Elements: so that what a kernel does many at a time, and what is left over, is the same in a part as in the whole."""
_sharded: weakref.WeakKeyDictionary[Optimizer, Shares] = weakref.WeakKeyDictionary()


def know_shares(optimizer: Optimizer, shares: Shares) -> None:
    """From now on it is sharded."""
    _sharded[optimizer] = shares


def shares_of(optimizer: Optimizer) -> Shares | None:
    """What is known of an optimiser that is sharded."""
    shares = _sharded.get(optimizer)
    if shares is not None:
        shares.add_new(optimizer)
    return shares


def is_kept(optimizer: Optimizer, p: Tensor) -> bool:
    """Whether this rank has states of a parameter."""
    shares = shares_of(optimizer)
    return shares is None or shares.is_kept(p)


class _Share(NamedTuple):
    """Which elements of a parameter each rank has: from, to."""

    p: Tensor
    shape: torch.Size
    ranges: tuple[tuple[int, int], ...]


class Shares:
    """Which part of each parameter is whose."""

    def __init__(self, index: int, ranks: int, cut: Cut, refuse: Callable[[Sequence[Tensor]], None]) -> None:
        """``refuse``: raises if there is one among new parameters that has no parts."""
        self.cut, self._index, self._refuse = cut, index, refuse
        self._shares: dict[int, _Share] = {}
        self._loads = [0] * ranks

    def add_new(self, optimizer: Optimizer) -> bool:
        """Parameters that are not known yet get their owners; whether there were any."""
        if any(nn.parameter.is_lazy(p) for p in params_of(optimizer)):
            fail(WHERE, "a parameter has no shape yet.", fix="run the module once before")
        new = [p for p in params_of(optimizer) if self._shape(p) != p.shape]
        if not new:
            return False
        if any(id(p) in self._shares and optimizer.state.get(p) for p in new):
            fix = "cut parameters before they are trained"
            fail(WHERE, "a parameter got another shape after its first step.", fix=fix)
        self._refuse(new)
        for p, ranges in zip(new, self._ranges(new), strict=True):
            self._shares[id(p)] = _Share(p, p.shape, ranges)
        return True

    def _shape(self, p: Tensor) -> torch.Size | None:
        """As it was when its parts were made."""
        share = self._shares.get(id(p))
        return None if share is None else share.shape

    def _ranges(self, params: Sequence[Tensor]) -> list[tuple[tuple[int, int], ...]]:
        """The parts of new parameters: of all of them in a row, as many elements for each rank; or whole ones, the
        largest first to whom has least.
        """
        n = len(self._loads)
        if self.cut == "tensors":
            owners = {}
            for at in sorted(range(len(params)), key=lambda at: -params[at].numel()):
                owners[at] = min(range(n), key=self._loads.__getitem__)
                self._loads[owners[at]] += params[at].numel()
            sizes = [p.numel() for p in params]
            return [tuple((0, size * (rank == owners[at])) for rank in range(n)) for at, size in enumerate(sizes)]
        found, begin, total = [], 0, sum(p.numel() for p in params)
        for p in params:
            size = p.numel()
            ends = [*(_border(rank * total // n - begin, size) for rank in range(n)), size]
            found.append(tuple(itertools.pairwise(ends)))
            begin += size
        return found

    def ranges_of(self, p: Tensor) -> tuple[tuple[int, int], ...]:
        """The elements of a parameter that each rank has: from, to."""
        return self._shares[id(p)].ranges

    def range_of(self, p: Tensor) -> tuple[int, int]:
        """The elements of a parameter that this rank has."""
        return self.ranges_of(p)[self._index]

    def is_whole(self, p: Tensor) -> bool:
        """Whether this rank has all of a parameter, in its own shape."""
        return self.range_of(p) == (0, p.numel())

    def shape_of(self, p: Tensor) -> tuple[int, ...]:
        """Of this rank's part."""
        first, last = self.range_of(p)
        return tuple(p.shape) if last - first == p.numel() else (last - first,)

    def part(self, x: Tensor, p: Tensor) -> Tensor:
        """Of ``x``, which is shaped like ``p``, what this rank has, without a copy where there is a way."""
        return x if self.is_whole(p) else x.reshape(-1)[slice(*self.range_of(p))]

    def is_kept(self, p: Tensor) -> bool:
        """Whether this rank has states of a parameter."""
        return self.is_whole(p) or bool(self.shape_of(p)[0])


def params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Of all groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _border(at: int, size: int) -> int:
    """Where a part of a parameter begins, near this element."""
    return min(max((at + _ALIGNED // 2) // _ALIGNED * _ALIGNED, 0), size)
