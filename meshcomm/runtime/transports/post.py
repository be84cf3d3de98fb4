"""Messages over gloo, each with an envelope: they carry dtype and shape, and say over which axis they were sent.

The axes between the same ranks share one process group for them, which is there before the first message: who sends or
receives the first one may be two of many ranks. What is larger than an envelope follows it; where ranks share memory it
is lent, and who receives it reads it there once and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm.errors import CommError
from meshcomm.runtime.call import Post, Want
from meshcomm.runtime.process.reuse import reserve
from meshcomm.runtime.transports import dtypes, envelopes
from meshcomm.runtime.transports.envelopes import LENT, Envelope

CALLS = 2**30
"""Tags of the library's own messages begin here; up to there are those of users, moved on by as much for each axis."""
_FOLLOWING, _FOLLOWERS = CALLS + 2**29, 2**29
"""Tags of what follows an envelope."""


def route_of(name: str, tag: int) -> int:
    """The tag, to gloo, of a user's messages over the axis whose calls are named so."""
    return (envelopes.sequence_of(name) + tag) % CALLS


class Lender(Protocol):
    """Who may lend what a message is, and read what another one has lent: a link."""

    def lend_to(self, packed: Tensor, dst: int) -> Sequence[int]:
        """Where it lies from now on, for this index; nothing if it is not lent."""

    def read_lent(self, lease: Sequence[int], src: int, out: Tensor | None) -> None:
        """What this index has lent, into ``out`` if it is wanted. Raises OSError if it is not there."""


class Parcel(NamedTuple):
    """A message that is expected."""

    data: Tensor
    work: dist.Work
    """Of the envelope."""
    want: Want
    tag: int
    """To gloo."""


def expect(base: dist.ProcessGroup, wants: Sequence[Want], routes: Sequence[int]) -> list[Parcel]:
    """Make room for the envelopes."""
    rooms = [envelopes.empty() for _ in wants]
    return [
        Parcel(data, base.recv([data], want[0], route), want, route)
        for data, want, route in zip(rooms, wants, routes, strict=True)
    ]


def deliver(
    base: dist.ProcessGroup, name: str, lender: Lender, numbers: Iterator[int], posts: Sequence[Post],
    routes: Sequence[int],
) -> tuple[list[dist.Work], list[Tensor]]:  # fmt: skip
    """Send; and what is read until it is sent."""
    works, kept = [], []
    for (x, dst, tag), route in zip(posts, routes, strict=True):
        packed = dtypes.to_bytes(x)
        large = packed.nbytes > envelopes.ROOM
        lease = lender.lend_to(packed, dst) if large else ()
        follows = LENT if lease else _FOLLOWING + next(numbers) % _FOLLOWERS if large else 0
        data = Envelope.of(name, tag, x, follows).write(packed, lease)
        works.append(base.send([data], dst, route))
        kept.append(data)
        if follows > 0:
            works.append(base.send([packed], dst, follows))
            kept.append(packed)
    return works, kept


def open_all(
    base: dist.ProcessGroup, where: str, name: str, index: int, lender: Lender, parcels: Sequence[Parcel],
    wait: Callable[[Sequence[dist.Work]], Any],
) -> list[Tensor]:  # fmt: skip
    """What came, when all envelopes are here. What does not fit is taken all the same, for who has sent it waits."""
    out, works = [], []
    error: CommError | None = None
    for data, _, (src, shape, dtype, tag, _), _ in parcels:
        found = Envelope.read(data)
        fits = found.is_for(name, tag, dtype, shape)
        if not fits and error is None:
            error = envelopes.misfit(where, found, src, index, name, dtype, shape)
        length, like = (shape, torch.empty(0, dtype=dtype, device="cpu")) if fits else ((found.nbytes,), data)
        packed = dtypes.to_bytes(reserve.empty(length, like))
        if found.follows == LENT:
            try:
                lender.read_lent(envelopes.lease_in(data), src, packed if fits else None)
            except OSError as failed:
                error = error or envelopes.lost(where, src, index, failed)
        elif found.follows:
            works.append(base.recv([packed], src, found.follows))
        elif fits and packed.numel():
            packed.view(torch.uint8).copy_(envelopes.inside(data, found.nbytes))
        out.append(dtypes.from_bytes(packed, dtype).view(shape) if fits else packed)
    wait(works)
    if error is not None:
        raise error
    return out
