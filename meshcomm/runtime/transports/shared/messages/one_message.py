"""One message that is waited for at once, as most are: each of its sides in one function.

What its letter says is known from the last one like it. A small message stands in the letter; of another one the letter
is written first, and the receiver copies one part while the sender writes the next::

    sender     lends memory ── letter ── writes part 0 ── part 1 ── part 2 ── read? ──►
                                  │          │ what is lent says how much of it is written
    receiver   allocates ── looks ┴──────────┴─ copies part 0 ── part 1 ── part 2 ── gives back

As soon as anything is not as in nearly all of them (the other side does not come for a while, another message comes
first, nothing can be lent; somebody is interrupted) it goes on as the messages of
:mod:`meshcomm.runtime.transports.shared.messages` do, which knows of all that.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from threading import get_ident
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import CommError
from meshcomm.runtime.call import Post, Want, is_agreed
from meshcomm.runtime.pending import begin_all, queued
from meshcomm.runtime.process import lending
from meshcomm.runtime.process.lending import LOW, PART, STATE, Segment, copy, is_nowhere
from meshcomm.runtime.process.reuse import LEAST, reserve
from meshcomm.runtime.recorder import ENDED, Log, Record, failed
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.gloo.envelopes import LENGTHS
from meshcomm.runtime.transports.gloo.post import route_of
from meshcomm.runtime.transports.shared.messages.letters import Letters
from meshcomm.runtime.transports.shared.messages.parcels import Parcel, Sent
from meshcomm.runtime.transports.shared.messages.written import (
    CELLS,
    DATA,
    HEAD,
    INSIDE,
    MOST,
    OFFSET_AT,
    PLACE,
    RING,
    SERIAL_AT,
    SLOT,
    TAKEN,
    says,
)
from meshcomm.runtime.transports.shared.waiting import give_way

_KNOWN, _PLACES = 512, 64
"""How many kinds of messages are known of an axis, and of each how many places where something is lent."""
_CPU = torch.device("cpu")


class _Known:
    """A message like one before: all of it but its number and the tensor."""

    __slots__ = ("head", "key", "like", "nbytes", "places", "route", "says", "shape")

    def __init__(self, link: Any, other: int, tag: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.route = route_of(link.name, tag)
        self.key = other, self.route
        said = array("q", says(link.name, tag, dtype, shape, self.route)[1:])
        self.says: Any = memoryview(said + array("q", [0] * 6))
        """The letter from its second cell on, if nothing is lent."""
        self.head = self.says[: PLACE - 1]
        """That of any letter that fits."""
        self.like = _torch.lasting(_nothing_of, dtype)
        self.places: dict[Any, Any] = {}

    def room(self) -> Tensor:
        """For what comes."""
        if self.nbytes >= LEAST:
            return reserve.empty(self.shape, self.like)
        return self.like.new_empty(self.shape)

    def letter(self, lent: Segment) -> array[int]:
        """That where this is lent."""
        found = array("q", (*self.head, *lent.where))
        self._keep(lent, lent.kept, found)
        return found

    def lent(self, link: Any, where: Sequence[int], src: int) -> tuple[Segment, int]:
        """What is lent there, and its address. Raises OSError if it is gone."""
        segment = link.mail.borrow_at(where, src)
        found = segment, segment.address
        self._keep((where[1], where[4]), where[3], found)
        return found

    def _keep(self, place: Any, kept: object, found: Any) -> None:
        if kept:
            if len(self.places) >= _PLACES:
                self.places.clear()
            self.places[place] = found


def _nothing_of(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=_CPU)


def _learned(
    known: dict[Any, _Known], key: Any, link: Any, other: int, tag: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> _Known | None:
    if dtype not in dtypes.COPIED or len(shape) > LENGTHS:
        return None
    if len(known) >= _KNOWN:
        known.clear()
    found = known[key] = _Known(link, other, tag, dtype, shape)
    return found


Posts = Callable[[Any, str, Letters, list[Parcel], list[Sent]], Any]
"""Makes what goes on: messages of one call under way."""


def exchange_now_in(log: Log, posts: Posts) -> Callable[[Any, Post | None, Want | None], list[Tensor] | None]:
    """``exchange_now(link, post, want)``: what has come, when it is here and what was sent was read; None, and nothing
    was done, if it goes another way.
    """
    keep, gone, came = log.records.append, dict[Any, _Known](), dict[Any, _Known]()

    @_torch.out_of_graphs
    def exchange_now(link: Any, post: Post | None, want: Want | None) -> list[Tensor] | None:
        letters: Any = link.mail.letters
        if letters is None or not _torch.plain_now():
            return None
        key: Any
        asked: Any = want
        sends: _Known | None = None
        receives: _Known | None = None
        if post is not None:
            x, dst, tag = post
            if letters.own is None or type(x) is not Tensor or not x.is_cpu:
                return None
            key = dst, tag, x.dtype, x.shape
            sends = gone.get(key) or _learned(gone, key, link, *key)
            if sends is None:
                return None
        if want is not None:
            src, shape, dtype, route, device = want
            if letters.rings[src] is None or device.type != "cpu":
                return None
            key = src, route, dtype, shape
            receives = came.get(key) or _learned(came, key, link, *key)
            if receives is None or (letters.asked and receives.key in letters.asked):
                return None
            if letters.came and receives.key in letters.came:
                return None
        if queued:
            begin_all()
        log.messages += 1
        root = [] if post is None else [post[1:]], [] if want is None else [(src, route)]
        record: Record = [0, "exchange", "", None, (), monotonic(), None, log.call, root, get_ident()]
        keep(record)
        sent: Sent | None = None
        parcel: Parcel | None = None
        found: list[Tensor] = []
        is_taken = [False]
        try:
            if sends is not None:
                sent = _put(link, letters, sends, post)
            if receives is not None:
                found = [receives.room()]
                if not _taken(link, letters, receives, src, found[0], is_taken):
                    parcel = Parcel(link, "exchange", asked, receives.route, found[0])
                    letters.ask([parcel])
            if parcel is not None or (sent is not None and not _read_soon(letters, sent)):
                waited = [] if parcel is None else [parcel], [] if sent is None else [sent]
                came_late = posts(link, "exchange", letters, *waited).wait(None, awake=0.0)
                found = found if parcel is None else came_late
            record[ENDED] = monotonic()
            return found  # no call from the line before to where the caller has it
        except BaseException as error:  # Ctrl-C, too
            if sent is not None:
                sent.let_go(letters.mail.index)
            if link.watched and is_agreed(link):  # what comes is nobody else's
                if parcel is not None:
                    parcel.dropped = True
                    letters.see_to_it()
            elif is_taken[0] and receives is not None:
                letters.give_back(link, asked, receives.route, found[0])
            elif parcel is not None:
                letters.forget([parcel])
            failed(record, error)
            raise

    return exchange_now


def _put(link: Any, letters: Letters, what: _Known, post: Any) -> Sent:
    """Write a letter, and what it is about."""
    x, dst, tag = post
    if not x.is_contiguous() or x.is_neg() or x.is_conj():
        x = dtypes.plain(x)
    try:
        address = x.data_ptr()
    except RuntimeError:  # it has escaped from a transform
        x = x.detach()
        address = x.data_ptr()
    if address < LOW and what.nbytes and is_nowhere(x, address):  # or it cannot be read, which torch says
        sent = None
    elif what.nbytes <= INSIDE:
        sent = _put_inside(link, letters, what, address, dst)
    else:
        sent = _put_lent(link, letters, what, address, dst)
    return letters.send(link, (x, dst, tag), what.route) if sent is None else sent


def _put_inside(link: Any, letters: Letters, what: _Known, address: int, dst: int) -> Sent | None:
    """Write a letter in which stands what lies at this address; None if there is no place."""
    cells, mail, nbytes = letters.own, link.mail, what.nbytes
    with letters.sending:
        number = letters.numbers[dst] + 1
        place = number % MOST
        at, held = RING * dst + HEAD + place * SLOT, letters.inside[dst]
        if letters.is_closed or (held[place] and cells[at + TAKEN] != held[place]):
            return None
        if number - cells[RING * dst] > MOST or dst in letters.left:
            return None
        if nbytes:
            copy(letters.own_address + 8 * (at + DATA), address, nbytes)
        cells[at + 1 : at + CELLS] = what.says
        held[place] = number
        cells[at] = number  # now it is there; no call from here to the next line
        letters.numbers[dst] = number
    box = mail.boxes[dst]
    if box is None:
        mail.ring_at(dst)
    elif box.cells[box.listens]:
        box.ring()
    return Sent(dst, number, None, None, at + TAKEN)


def _put_lent(link: Any, letters: Letters, what: _Known, address: int, dst: int) -> Sent | None:
    """Write a letter, then lend what lies at this address; None if nothing can be lent."""
    cells, mail = letters.own, link.mail
    try:
        places, readers = (dst, mail.index), [letters.addressees[dst]]
        lent: Segment = lending.room.lend(what.nbytes, places, readers, patient=True, must=False)
    except (OSError, CommError) as error:
        if isinstance(error, TimeoutError):  # of a signal's
            raise
        return None
    posted = False
    try:
        letter = what.places.get(lent) or what.letter(lent)
        with letters.sending:
            number = letters.numbers[dst] + 1
            if not letters.is_closed and number - cells[RING * dst] <= MOST and dst not in letters.left:
                at = RING * dst + HEAD + number % MOST * SLOT
                cells[at + 1 : at + CELLS] = letter
                cells[at] = number  # now it is there; no call from here to the line after the next
                letters.numbers[dst] = number
                posted = True
        if posted:
            mail.ring_at(dst)
            _write(lent, address, what.nbytes)
            mail.ring_at(dst)
            return Sent(dst, number, lent, None)
    except BaseException:  # Ctrl-C: who reads it is told, or nobody hears of it
        if not posted:
            lent.take_back()
            raise
        if lent.cells[STATE] < what.nbytes:
            lent.cells[STATE] = -1
        lent.returned(mail.index)
        mail.ring_at(dst)
        raise
    lent.take_back()
    return None


def _write(lent: Segment, address: int, nbytes: int) -> None:
    cells, to, written = lent.cells, lent.address, 0
    while written < nbytes:
        part = min(PART, nbytes - written)
        copy(to + written, address + written, part)
        cells[STATE] = written = written + part


def _read_soon(letters: Letters, sent: Sent) -> bool:
    """Whether what was sent was read before one would sleep."""
    if sent.rest is not None:
        return False
    lent, at, number, end = sent.lent, sent.at, sent.number, 0.0
    cells, at = (letters.own, at) if lent is None else (lent.flags, sent.to)
    while cells is not None and (cells[at] if lent is not None else cells[at] < number):
        if (end := give_way(end)) < 0:
            return False
    sent.let_go(letters.mail.index)
    return True


def _taken(link: Any, letters: Letters, what: _Known, src: int, out: Tensor, is_taken: list[bool]) -> bool:
    """Whether the message came, as the next one of its sender, and is here; ``is_taken`` says so as soon as it is."""
    mail, index, cells = link.mail, link.mail.index, letters.rings[src]
    base, following, end = RING * index, letters.next, 0.0
    if cells is None:  # closed
        return False
    while cells[(at := base + HEAD + (number := following[src]) % MOST * SLOT)] != number:
        if (letters.came and what.key in letters.came) or (end := give_way(end)) < 0:  # another thread has looked
            return False
    with letters.receiving:
        if following[src] != number or what.key in letters.came or what.key in letters.asked or letters.is_closed:
            return False
        if cells[at + 1 : at + PLACE] != what.head:
            return False
        if cells[at + SERIAL_AT]:
            try:
                if not _copied(link, what, src, cells, at, out, number, is_taken):
                    return False
            except OSError as error:
                if isinstance(error, TimeoutError):  # of a signal's
                    raise
                return False
        else:
            if what.nbytes:
                copy(out.data_ptr(), letters.addresses[src] + 8 * (at + DATA), what.nbytes)
            following[src] = number + 1  # no call from here to the last of these lines
            cells[base] = cells[at + TAKEN] = number
            is_taken[0] = True
    box = mail.boxes[src]
    if box is None:
        mail.ring_at(src)
    elif box.cells[box.listens]:
        box.ring()
    return True


def _copied(
    link: Any, what: _Known, src: int, cells: Any, at: int, out: Tensor, number: int, is_taken: list[bool]
) -> bool:
    """Whether all of what is lent was written in time, and is here."""
    place = cells[at + SERIAL_AT], cells[at + OFFSET_AT]
    lent, address = what.places.get(place) or what.lent(link, cells[at + PLACE : at + CELLS].tolist(), src)
    mail, state, to, nbytes, read = link.mail, lent.cells, out.data_ptr(), what.nbytes, 0
    while read < nbytes:
        part, end = min(PART, nbytes - read), 0.0
        while state[STATE] < read + part:
            if (end := give_way(end)) < 0:
                return False
        copy(to + read, address + read, part)
        read += part
    index, following = mail.index, mail.letters.next
    following[src] = number + 1  # no call from here to the last of these lines
    cells[RING * index] = number
    lent.flags[index] = 0
    is_taken[0] = True
    return True
