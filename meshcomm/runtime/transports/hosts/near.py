"""What the ranks of one machine do of a collective over several: they reduce parts, and put parts together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.shared.call import Call
from meshcomm.runtime.transports.shared.transport import OneHostLink

Turn = tuple[int, int, int]
"""Which call of the axis this is a part of, which block of it, and from which index it comes: equal on all ranks."""

_BLOCKS, _RANKS = 2**8, 2**11


class NearLink(OneHostLink):
    """The ranks of an axis on this machine. Each call says of which call of the axis it is a part: after one that has
    failed the next is not taken for it.
    """

    hears = False

    def reduce_pieces(
        self, name: str, op: str, x: Tensor, turn: Turn, pieces: Sequence[slice], rows: Sequence[Tensor],
        each: Callable[[int], object],
    ) -> object:  # fmt: skip
        """Of each of these pieces of the flat ``x`` what this machine has, into the row of its number, in the dtype of
        ``wide``; ``each(k)`` is called when row k is there.
        """
        packed = dtypes.to_bytes(x)
        width = packed.numel() // x.numel()
        call = self._part(name, op, x, turn)
        own = (width * pieces[0].start, width * pieces[0].stop) if len(pieces) == 1 else (0, 0)
        call.post(packed, self.mail.others, self.mail.others, unread=own)

        def fill(got: list[Tensor]) -> None:
            xs = [dtypes.from_bytes(part, x.dtype) for part in got]
            for k, (piece, row) in enumerate(zip(pieces, rows, strict=True)):
                dtypes.fold_part(op, [part[piece] for part in xs], row)
                each(k)

        return self._done(call, fill, None)

    def collect(self, name: str, own: Tensor, turn: Turn, fill: Callable[[list[Tensor]], object]) -> object:
        """``fill`` takes what each rank of this machine has brought, dense and as much from each."""
        call = self._part(name, "", own, turn)
        call.post(dtypes.to_bytes(own), self.mail.others, self.mail.others)
        return self._done(call, lambda got: fill([dtypes.from_bytes(part, own.dtype) for part in got]), None)

    def copy_from(self, src: int, x: Tensor, out: Tensor, turn: Turn, after: Callable[[], object]) -> object:
        """The ``x`` of the rank at this place into ``out``."""
        call = self._part("broadcast", "", x, turn)
        call.post(x, *self._from_one(src))

        def fill(got: list[Tensor]) -> None:
            out.copy_(got[src])
            after()

        return self._done(call, fill, None)

    def _part(self, name: str, op: str, x: Tensor, turn: Turn) -> Call:
        call = self._call(name, op, x)
        number, block, root = turn
        call.root = (number * _BLOCKS + block) * _RANKS + root
        return call


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
