"""Messages over gloo, each with an envelope: they carry dtype and shape, and say over which axis they were sent.

The axes between the same ranks share one process group for them, which is there before the first message: who sends or
receives the first one may be two of many ranks. What is larger than an envelope follows it. What two ranks have agreed
on before is carried without envelopes (``carrier.py``). Where ranks share memory there are letters instead: see
``shared/messages/``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm.errors import CommError
from meshcomm.runtime.call import Post, Want
from meshcomm.runtime.pending import Pending
from meshcomm.runtime.process.reuse import reserve
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.gloo import envelopes
from meshcomm.runtime.transports.gloo.envelopes import Envelope

CALLS = 2**30
"""Tags of the library's own messages begin here; up to there are those of users, moved on by as much for each axis."""
_FOLLOWING, _FOLLOWERS = CALLS + 2**29, 2**29
"""Tags of what follows an envelope."""


def route_of(name: str, tag: int) -> int:
    """The tag, to gloo, of a user's messages over the axis whose calls are named so."""
    return (envelopes.sequence_of(name) + tag) % CALLS


def following(number: int) -> int:
    """The tag, to gloo, of what follows by itself."""
    return _FOLLOWING + number % _FOLLOWERS


_numbers = itertools.count()
"""Of what was asked for, in order."""


class Parcel:
    """A message that is expected."""

    __slots__ = ("brought", "data", "found", "is_left", "number", "packed", "rest", "route", "want", "works")

    def __init__(self, data: Tensor, want: Want, route: int) -> None:
        """``route``: the tag, to gloo."""
        self.data, self.want, self.route = data, want, route
        self.works: list[dist.Work] = []
        """Of the envelope, and of what follows it."""
        self.found: Envelope | None = None
        self.packed: Tensor | None = None
        """What has come, and where it is: it fits, or it is bytes."""
        self.brought: Pending | None = None
        self.rest: Pending | None = None
        """Wait for it, and for what follows, where that is done later, or who has asked has given up."""
        self.number = next(_numbers)
        self.is_left = False
        """Whether nobody gets it who has asked."""


def expect(base: dist.ProcessGroup, wants: Sequence[Want], routes: Sequence[int], parcels: list[Parcel]) -> None:
    """Make room for the envelopes, in ``parcels``."""
    for want, route in zip(wants, routes, strict=True):
        parcel = Parcel(envelopes.empty(), want, route)
        parcels.append(parcel)
        # Ctrl-C comes when a call is back: by then what was asked of gloo is in the list.
        parcel.works.extend(map(base.recv, [[parcel.data]], [want[0]], [route]))


def deliver(
    base: dist.ProcessGroup, name: str, numbers: Iterator[int], posts: Sequence[Post], routes: Sequence[int],
    works: list[dist.Work],
) -> list[Tensor]:  # fmt: skip
    """Send, all or nothing, where Ctrl-C comes; ``works`` end when it is sent. Gives what is read until then."""
    kept, to, by = [], [], []
    for (x, dst, tag), route in zip(posts, routes, strict=True):
        packed = dtypes.to_bytes(x)
        large = packed.nbytes > envelopes.ROOM
        follows = following(next(numbers)) if large else 0
        kept.append(Envelope.of(name, tag, x, follows).write(packed))
        to.append(dst)
        by.append(route)
        if follows:
            kept.append(packed)
            to.append(dst)
            by.append(follows)
    works.extend(map(base.send, [[x] for x in kept], to, by))
    return kept


def open_all(base: dist.ProcessGroup, name: str, parcels: Sequence[Parcel]) -> list[dist.Work]:
    """Read the envelopes, which are here: what follows them is under way then. What does not fit is taken all the same,
    for who has sent it waits.
    """
    works = []
    for parcel in parcels:
        data, (src, shape, dtype, tag, _) = parcel.data, parcel.want
        if parcel.found is None:
            found = Envelope.read(data)
            if len(parcel.works) == 1:  # else somebody was interrupted here
                fits = found.is_for(name, tag, dtype, shape)
                length, like = (shape, torch.empty(0, dtype=dtype, device="cpu")) if fits else ((found.nbytes,), data)
                parcel.packed = packed = dtypes.to_bytes(reserve.empty(length, like))
                if found.follows:
                    parcel.works.extend(map(base.recv, [[packed]], [src], [found.follows]))
                elif packed.numel():
                    packed.view(torch.uint8).copy_(envelopes.inside(data, found.nbytes))
            parcel.found = found
        works += [work for work in parcel.works[1:] if not work.is_completed()]
    return works


def taken(where: str, name: str, index: int, parcels: Sequence[Parcel]) -> list[Tensor]:
    """What came, if it is what is wanted; all of it is here."""
    out = []
    error: CommError | None = None
    for parcel in parcels:
        found, packed, (src, shape, dtype, tag, _) = parcel.found, parcel.packed, parcel.want
        assert found is not None
        assert packed is not None
        if found.is_for(name, tag, dtype, shape):
            out.append(dtypes.from_bytes(packed, dtype).view(shape))
        elif error is None:
            error = envelopes.misfit(where, found, src, index, name, dtype, shape)
    if error is not None:
        raise error
    return out
