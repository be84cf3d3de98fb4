"""What the ranks of one machine do of a collective over several: they reduce parts, and put parts together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from meshcomm.errors import described
from meshcomm.runtime.health.lateness import Late
from meshcomm.runtime.recorder import WHAT, Log, under_way
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.hosts.parts import Turn, Write, number_of
from meshcomm.runtime.transports.shared.call import Call
from meshcomm.runtime.transports.shared.entry import GIVEN_UP
from meshcomm.runtime.transports.shared.transport import OneHostLink

_GRACE = 0.5
"""Seconds for which others are asked: whose time was up on the wire has said long ago what it knows."""


class NearLink(OneHostLink):
    """The ranks of an axis on this machine. Each call says of which call of the axis it is a part: after one that has
    failed the next is not taken for it.
    """

    hears = False
    on_axis: tuple[int, ...]
    """The indices of its ranks along the axis."""
    axis_log: Log
    """Where calls of the axis are noted."""

    def place_on_axis(self, index: int) -> int:
        """As the axis has it."""
        return self.on_axis[index]

    def as_called(self, late: Late) -> Late:
        """The call of the axis."""
        record = under_way(self.axis_log)
        if record is None:
            return late
        missing, came = ([self.on_axis[i] for i in each] for each in (late.missing or (), late.came))
        far = [i for i in range(len(self.axis_log.ranks)) if i not in self.on_axis]
        return Late(
            record[WHAT], self.axis_log, record, late.seconds, missing, came, found=late.found, aside=far, grace=_GRACE
        )

    def give_up(self, error: BaseException) -> None:
        """A call of the axis has failed: the others of this machine need not wait for this rank."""
        why = described(error).split("\n", 1)[0].removeprefix("CommError: ")
        if GIVEN_UP not in why:  # else they hear it from that one
            self.mail.give_up(why)

    def reduce_pieces(
        self, name: str, op: str, x: Tensor, turn: Turn, pieces: Sequence[slice], rows: Sequence[Tensor],
        each: Callable[[int], object],
    ) -> object:  # fmt: skip
        """Each folds its pieces of what all lend."""
        packed = dtypes.to_bytes(x)
        width = packed.numel() // x.numel()
        call = self._part(name, op, x, turn)
        own = (width * pieces[0].start, width * pieces[0].stop) if len(pieces) == 1 else (0, 0)
        call.brings(packed, self.mail.others, self.mail.others, unread=own)

        def fill(got: list[Tensor]) -> None:
            xs = [dtypes.from_bytes(part, x.dtype) for part in got]
            for k, (piece, row) in enumerate(zip(pieces, rows, strict=True)):
                dtypes.fold_part(op, [part[piece] for part in xs], row)
                each(k)

        return self._done(call, fill, None)

    def collect(
        self, name: str, own: Tensor, turn: Turn, fill: Callable[[list[Tensor]], object], write: Write | None = None
    ) -> object:
        """All read all."""
        call, others = self._part(name, "", own, turn), self.mail.others
        into = None if write is None else lambda lent: write(dtypes.from_bytes(lent, own.dtype))
        call.brings(dtypes.to_bytes(own), others, others, write=into)
        return self._done(call, lambda got: fill([dtypes.from_bytes(part, own.dtype) for part in got]), None)

    def copy_from(self, src: int, x: Tensor, out: Tensor, turn: Turn, after: Callable[[], object]) -> object:
        """All read from one."""
        call = self._part("broadcast", "", x, turn)
        call.brings(x, *self._from_one(src))

        def fill(got: list[Tensor]) -> None:
            out.copy_(got[src])
            after()

        return self._done(call, fill, None)

    def _part(self, name: str, op: str, x: Tensor, turn: Turn) -> Call:
        call = self._call(name, op, x)
        call.root = number_of(turn)
        return call
