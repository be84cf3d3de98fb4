"""A message that was asked for of ranks that share memory, and one that was sent to them."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.runtime.call import Want
from meshcomm.runtime.process.lending import Segment
from meshcomm.runtime.process.reuse import reserve
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.underway import Messages

_NOTHING = contextlib.nullcontext()
_numbers = itertools.count()
"""Of what was asked for, in order."""


class Parcel:
    """A message that was asked for."""

    __slots__ = (
        "_inference", "_plain", "_thread", "dropped", "error", "index", "is_here", "is_kept", "is_left", "is_settled",
        "key", "letter", "link", "name", "number", "out", "rest", "want", "where",
    )  # fmt: skip

    def __init__(self, link: Any, where: str, want: Want, route: int, room: Tensor | None = None) -> None:
        """``room``: where it goes, if there is something already."""
        self.link: weakref.ref[Any] = weakref.ref(link)
        """Whoever waits has it; if nobody will any more, a message does not keep it."""
        self.name, self.index, self.where, self.want = link.name, link.index, where, want
        self.key = want[0], route
        """By whom it comes, and over which route."""
        self.number = next(_numbers)
        self._inference, self._thread = torch.is_inference_mode_enabled(), get_ident()
        self._plain = _torch.plain_now()
        self.is_here = self.dropped = self.is_settled = False
        """``is_settled``: who has asked was told of an error."""
        self.is_left = self.is_kept = False
        """Who has asked has given up: its place is for who asks next, and so is what has come there (it is kept)."""
        self.letter: list[Any] | None = None
        """What came to a place that was left already, or does not fit there, as bytes: it may be anything."""
        self.out = room
        self.rest: Messages | None = None
        """What follows over gloo."""
        self.error: Exception | None = None

    def as_asked(self) -> contextlib.AbstractContextManager[object]:
        """The mode in which it was asked for, for whoever reads it, in the middle of whatever that is."""
        if (self._plain or self._thread != get_ident()) and not _torch.plain_now():
            stack = contextlib.ExitStack()
            stack.enter_context(_torch.outside_transforms())
            stack.enter_context(torch.inference_mode(self._inference))
            return stack
        return (
            _NOTHING if self._inference == torch.is_inference_mode_enabled() else torch.inference_mode(self._inference)
        )


class Sent:
    """A message that was sent: it lies in what is lent, until it was read; or in the letter; or follows over gloo."""

    __slots__ = ("_is_read", "at", "lent", "number", "rest", "to")

    def __init__(self, to: int, number: int, lent: Segment | None, rest: Messages | None, at: int = 0) -> None:
        """``at``: the cell that says that it was taken out of its letter."""
        self.to, self.number, self.lent, self.rest, self.at = to, number, lent, rest, at
        self._is_read = lent is None and not at

    def is_read(self, letters: Any) -> bool:
        """Whether it has been, or cannot be."""
        if not self._is_read:
            if self.lent is None:
                # or one after it was, in the same place, which another thread has sent since this one looked
                self._is_read = letters.own is None or letters.own[self.at] >= self.number
                return self._is_read
            if self.lent.flags[self.to]:
                if not letters.is_unread(self.to, self.number):
                    return False
                self.lent.returned(self.to)
            self.let_go(letters.mail.index)
        return True

    def let_go(self, index: int) -> None:
        """The memory may be lent again when it has been read: this rank (``index``) has a part in it, once."""
        if not self._is_read:
            lent = self.lent
            self._is_read = True  # first, for then the memory may be that of another message
            if lent is not None:
                lent.flags[index] = 0


def room_for(parcel: Parcel, fits: bool, nbytes: int) -> Tensor:
    """Flat, for what it shall be; or for what does not fit, which follows it over gloo."""
    _, shape, dtype, *_ = parcel.want
    if not fits:
        parcel.out = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return parcel.out
    if dtype in dtypes.PLAIN:
        if parcel.out is None:
            parcel.out = reserve.empty(shape, torch.empty(0, dtype=dtype, device="cpu"))
        return parcel.out.view(-1)
    packed = dtypes.to_bytes(reserve.empty(shape, torch.empty(0, dtype=dtype, device="cpu")))
    parcel.out = dtypes.from_bytes(packed, dtype).view(shape)
    return packed
