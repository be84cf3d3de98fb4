"""In which parts a tensor goes: blocks one after the other, and of each a run for every rank of a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshcomm.runtime.transports.shared.words import TURNS

Turn = tuple[int, int, int]
"""Which call of the axis this is a part of, which block of it, and from which index it comes: equal on all ranks."""
Write = Callable[[Tensor], object]
"""Writes into what it is given."""

_BLOCKS = 2**8
_RANKS = TURNS // _BLOCKS


def number_of(turn: Turn) -> int:
    """Another one for each."""
    number, block, index = turn
    return number * TURNS + block * _RANKS + index


def chunks_of(count: int, among: int) -> list[slice]:
    """Runs of as many elements, of which the last ones may be shorter."""
    each = -(-count // among)
    return [slice(min(i * each, count), min((i + 1) * each, count)) for i in range(among)]


def blocks_of(count: int, nbytes: int, most: int) -> list[slice]:
    """Runs of at most so many bytes, or more if there would be more of them than can be told apart."""
    return chunks_of(count, max(1, min(-(-nbytes // most), _BLOCKS, count)))


def room(count: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """For what comes over the wire."""
    return torch.empty(count, dtype=like.dtype if dtype is None else dtype, device="cpu")


class Near(Protocol):
    """The ranks of an axis on one machine."""

    index: int
    size: int

    def give_up(self, error: BaseException) -> None:
        """A call of the axis has failed: the others of this machine need not wait for this rank."""

    def reduce_pieces(
        self, name: str, op: str, x: Tensor, turn: Turn, pieces: Sequence[slice], rows: Sequence[Tensor],
        each: Callable[[int], object],
    ) -> object:  # fmt: skip
        """Of each of these pieces of the flat ``x`` what this machine has, into the row of its number, in the dtype of
        ``dtypes.wide``; ``each(k)`` is called when row k is there.
        """

    def collect(
        self, name: str, own: Tensor, turn: Turn, fill: Callable[[list[Tensor]], object], write: Write | None = None
    ) -> object:
        """``fill`` takes what each rank of this machine has brought, dense and as much from each; ``write`` writes what
        this one brings, if it is not in ``own`` yet.
        """

    def copy_from(self, src: int, x: Tensor, out: Tensor, turn: Turn, after: Callable[[], object]) -> object:
        """The ``x`` of the rank at this place into ``out``; then ``after()``."""
