"""Messages over gloo that were asked for and are waited for later, and those that nobody waits for any more. What gloo
was asked for cannot be taken back::

    asked for ── waits ──► the caller
        │
        └── in vain, or was interrupted: left on the link ──► who asks that rank for the next message of that tag
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshcomm.runtime.call import Want
from meshcomm.runtime.pending import Pending
from meshcomm.runtime.process import exits
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.gloo import envelopes
from meshcomm.runtime.transports.gloo.envelopes import Envelope
from meshcomm.runtime.transports.gloo.post import CALLS, Parcel, expect, open_all, taken
from meshcomm.runtime.transports.underway import FOR_EVER, Messages, Steps, apart, out_of_time


class Requests(Pending):
    """Messages of one call that are waited for later, each by itself: who waits in vain leaves them one by one."""

    __slots__ = ("_inference", "_is_left", "_link", "_parcels", "_sending", "_where")

    def __init__(self, link: Any, where: str, parcels: Sequence[Parcel], sending: Messages | None) -> None:
        """``sending``: what the same call sends."""
        self._link, self._where, self._parcels, self._sending = link, where, parcels, sending
        self._inference, self._is_left = torch.is_inference_mode_enabled(), False
        for parcel in parcels:
            if parcel.brought is None:
                self._bring(parcel)

    def _bring(self, parcel: Parcel) -> None:
        """What is large has a thread, which opens its envelope: who has sent it waits for that."""
        parcel.brought = envelope = Messages(self._link, parcel.works[:1], None, parcel.data)
        _, shape, dtype, *_ = parcel.want
        if math.prod(shape) * dtype.itemsize > envelopes.ROOM:
            parcel.brought = _opening(self._link, parcel, envelope, self._inference)

    def wait(self, timeout: float | None) -> list[Tensor]:
        """All of them, and until what was sent was taken, within the time."""
        link, end = self._link, None if timeout is None else time.monotonic() + timeout
        for each in self._under_way():
            if end is None and isinstance(each, Steps) and not each.ends_within(link.hold.limit):
                raise out_of_time(link)
            each.wait(None if end is None else max(0.0, end - time.monotonic()))
        _open(link, self._where, self._parcels, self._inference)
        if self._sending is not None:
            self._sending.wait(None if end is None else max(0.0, end - time.monotonic()))
        found = taken(self._where, link.name, link.index, self._parcels)
        with torch.inference_mode(self._inference):
            return [x if x.is_inference() == self._inference else x.clone() for x in found]

    def _under_way(self) -> list[Pending]:
        return [parcel.brought for parcel in self._parcels if parcel.brought is not None]

    def done(self) -> bool:
        """What comes after takes no time."""
        return all(each.done() for each in self._under_way()) and (self._sending is None or self._sending.done())

    def give_up(self) -> None:
        """What comes is for who asks next."""
        if not self._is_left:
            self._is_left = True
            leave(self._link, self._parcels)

    def abandon(self) -> None:
        """They come all the same, into memory that must not be given to others meanwhile."""
        for each in self._under_way():
            each.abandon()
        if self._sending is not None:
            self._sending.abandon()


_to_open = threading.RLock()


def _open(link: Any, where: str, parcels: Sequence[Parcel], inference: bool) -> None:
    """Until all of them is here. ``inference``: in which mode they were asked for, not that of who opens them."""

    def opened() -> None:
        with _to_open, torch.inference_mode(inference):
            for parcel in parcels:
                works = open_all(link.base, link.name, [parcel])
                if works and parcel.rest is None:
                    parcel.rest = Messages(link, works, None, parcel.packed)

    link._start(where, opened)
    for parcel in parcels:
        if parcel.rest is not None:
            parcel.rest.wait(None)


def _opening(link: Any, parcel: Parcel, envelope: Messages, inference: bool) -> Steps:
    """The same of one whose envelope is not here yet, on a thread."""

    def steps() -> None:
        envelope.settle(FOR_EVER)
        envelope.wait(None)
        _open(link, "exchange", [parcel], inference)

    return apart(steps)


def _left_over(link: Any, parcel: Parcel) -> None:
    """Who was interrupted waits no more; what brings the rest does."""
    works = [work for work in parcel.works if not work.is_completed()]
    parcel.brought = Messages(link, works, None, (parcel.data, parcel.packed))


def leave(link: Any, parcels: Sequence[Parcel]) -> None:
    """Nobody gets these: they are for who asks next, in the order in which they were asked for."""
    if exits.leaving():
        return
    for parcel in parcels:
        asked = parcel.works or parcel.found is not None
        if parcel.is_left or not asked or parcel.route >= CALLS:  # of which no other call asks
            continue
        if parcel.brought is None:
            _left_over(link, parcel)
        brought = parcel.brought
        if isinstance(brought, Messages):
            parcel.brought = _opening(link, parcel, brought, torch.is_inference_mode_enabled())
        parcel.is_left = True
        queue = link.left.setdefault((parcel.want[0], parcel.route), [])
        queue.append(parcel)
        queue.sort(key=lambda parcel: parcel.number)


def keep(link: Any, want: Want, route: int, x: Tensor) -> None:
    """Leave what came for this, and nobody got."""
    parcel = Parcel(envelopes.empty(), want, route)
    parcel.packed = dtypes.to_bytes(x)
    parcel.found = Envelope.of(link.name, want[3], x, 0)
    parcel.number = -parcel.number  # before all others
    leave(link, [parcel])


def ask(link: Any, wants: Sequence[Want], routes: Sequence[int], parcels: list[Parcel]) -> None:
    """Make room for the envelopes, in ``parcels``; what somebody has left comes first."""
    for want, route in zip(wants, routes, strict=True):
        queue = link.left.get((want[0], route))
        if not queue:
            expect(link.base, [want], [route], parcels)
            continue
        parcel = queue[0]
        parcel.want = want
        parcels.append(parcel)
        parcel.is_left = False
        queue.remove(parcel)  # which need not be the first any more: a Work may be let go of at any time
