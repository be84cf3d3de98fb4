"""Messages between ranks that share memory: each sender has a ring of letters for each other rank, in memory that these
look into::

    sender     lends what it sends, and writes a letter: for whom, what it is, where that lies ──► has it been read?
                    │                                                                                  ▲
    receiver   looks through those for it, of all, in their order ──► this one goes to who asked first, of those who
               asked for its route: reads it, and gives the memory back ───────────────────────────────┘

What is lent says how much of it is written already: a letter may be there before that, and is read when all of it is. A
small message that is waited for at once stands in the letter itself (see ``one_message.py``), and is taken from there.

Whoever waits for a message, or for one to be read, looks for all that this rank has asked for; while nobody does, a
thread looks now and then. So who waits for a later receipt keeps nobody, as over gloo, but nobody is woken by a thread.
A letter that was seen is written over; one for which there is no place yet is written when there is. If there is no
memory to lend, what is sent follows over gloo.
"""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from meshcomm.errors import CommError
from meshcomm.runtime.call import Post, Want, told
from meshcomm.runtime.process.boxes import GONE
from meshcomm.runtime.process.lending import STATE, Segment, put, room
from meshcomm.runtime.process.memory import Lease, Memory, create, find
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.gloo import envelopes
from meshcomm.runtime.transports.gloo.envelopes import Envelope
from meshcomm.runtime.transports.gloo.post import CALLS, following
from meshcomm.runtime.transports.shared.mailbox import Addressee, Mail
from meshcomm.runtime.transports.shared.messages.looking import looking
from meshcomm.runtime.transports.shared.messages.parcels import Parcel, Sent, room_for
from meshcomm.runtime.transports.shared.messages.written import (
    CELLS,
    DATA,
    DTYPE,
    FOLLOWS,
    HEAD,
    MOST,
    NBYTES,
    NUMBER,
    PLACE,
    RING,
    ROUTE,
    SEQUENCE,
    SERIAL_AT,
    SLOT,
    TAKEN,
    UNREAD,
    envelope_of,
    letter_of,
    says,
)
from meshcomm.runtime.transports.underway import Messages

_PATIENCE = 0.1
"""Seconds after which who waits for those that look may be one of them."""


class Letters:
    """Those of one group: this rank's, and what it has seen of the others'."""

    def __init__(self, mail: Mail) -> None:
        self.mail = mail
        self.receiving, self.sending = threading.Lock(), threading.Lock()
        self._memory: Memory | None = None
        self.own: Any = None
        """The letters of this rank, once there has been one; and where they lie."""
        self.own_address = 0
        self.numbers = [0] * len(mail.neighbours)
        """Of the last letter to each."""
        self.inside = [[0] * MOST for _ in mail.neighbours]
        """To each, of each place in its ring, the number of the last letter there that had what is sent inside."""
        self.left: dict[int, deque[array[int]]] = {}
        """For whom there are letters for which there is no place yet."""
        self.next = [1] * len(mail.neighbours)
        """The number of the letter of each that is looked at next."""
        self.is_closed = False
        self.addressees = [Addressee(mail, i) for i in range(len(mail.neighbours))]
        self.rings: list[Any] = [None] * len(mail.neighbours)
        """The letters of each that has written some; and where they lie."""
        self.addresses = [0] * len(mail.neighbours)
        self.asked: dict[tuple[int, int], deque[Parcel]] = {}
        self.came: dict[tuple[int, int], deque[list[Any]]] = {}
        """By whom, and over which route: letters, of which those with something inside end with that."""
        self.some_left = False
        """Whether somebody has ever given up what he asked for."""

    # ------------------------------------------------------------------------------------------------- receiving

    def ask(self, parcels: Sequence[Parcel]) -> None:
        """For the next messages over their routes."""
        with self.receiving:
            for parcel in parcels:
                if not (self.some_left and self._succeed(parcel)):
                    self.asked.setdefault(parcel.key, deque()).append(parcel)

    def _succeed(self, parcel: Parcel) -> bool:
        """Whether it takes the place of one that was given up, or what has come there."""
        if parcel.key in self.came and parcel.key in self.asked:
            self._give(parcel.key)
        asked = self.asked.get(parcel.key, deque())
        at = next((at for at, other in enumerate(asked) if other.is_left), None)
        if at is None:
            return False
        other = asked[at]
        parcel.number = other.number
        if not other.is_kept:
            asked[at] = parcel
            return True
        self._take_over(parcel, other)
        parcel.is_here = True  # no call from here to the next line
        del asked[at]
        if not asked:
            del self.asked[parcel.key]
        return True

    def look(self) -> None:
        """See what has come, and read what was asked for."""
        mail, base = self.mail, RING * self.mail.index
        if self.is_closed:
            return
        if self.left:
            with self.sending:
                self._write_left()
        with self.receiving:
            for i in mail.others:
                cells = self.rings[i]
                if cells is None:
                    box = mail.boxes[i]
                    if (box is not None and not box.cells[box.writes]) or (cells := self._ring(i)) is None:
                        continue
                number = self.next[i]
                while cells[at := base + HEAD + number % MOST * SLOT] == number:
                    letter = cells[at : at + CELLS].tolist()
                    if not (letter[FOLLOWS] or letter[SERIAL_AT]):  # it may be written over, once it was seen
                        letter += (bytearray(cells[at + DATA : at + SLOT].cast("B")[: letter[NBYTES]]),)
                    queue = self.came.setdefault((i, letter[ROUTE]), deque())
                    queue += (letter,)  # no call from here to the next line: Ctrl-C comes between calls
                    self.next[i] = number + 1
                    number += 1
                if cells[base] != number - 1:  # also where it was not said last time, because of Ctrl-C
                    cells[base] = number - 1
            if self.came:
                for key in [key for key in self.came if key in self.asked]:
                    self._give(key)

    def _ring(self, i: int) -> Any:
        """The letters of a rank, once it has written one."""
        box, neighbour = self.mail.box(i), self.mail.neighbours[i]
        where = None if box is None else box.letters()
        if where is None or neighbour is None:
            return None
        try:
            found = find(Lease(neighbour.pid, *where, 0, 0))
        except OSError:  # it has gone: who waits sees that
            return None
        self.addresses[i] = found.address
        self.rings[i] = cells = found.view.cast("q")
        return cells

    def _give(self, key: tuple[int, int]) -> None:
        came, asked, at = self.came[key], self.asked[key], 0
        while came and at < len(asked):
            parcel = asked[at]
            if parcel.is_kept:
                at += 1
                continue
            if not parcel.is_here and not self._read(parcel, came[0], key[0]):  # else somebody was interrupted here
                return  # it is not written yet
            if parcel.is_left:  # both, without a call between
                parcel.is_kept = True
            else:
                del asked[at]
            del came[0]
        if not asked:
            del self.asked[key]
        if not came:
            del self.came[key]

    def _read(self, parcel: Parcel, letter: list[Any], src: int) -> bool:
        """Whether all of it is there. What does not fit is taken all the same, for who has sent it waits."""
        link, follows, segment, written = parcel.link(), letter[FOLLOWS], None, letter[NBYTES]
        try:
            if letter[SERIAL_AT]:
                segment = self.mail.borrow_at(letter[PLACE:CELLS], src)
                written = segment.cells[STATE]
                if 0 <= written < letter[NBYTES]:
                    return False
            left = parcel.is_left
            fits = left or self._fits(parcel, letter, src)
            with parcel.as_asked():
                packed = room_for(parcel, fits and not left, letter[NBYTES])
                if written > 0 and not follows:  # dropped or not: an interrupted call may give it back yet
                    if segment is not None:
                        packed.copy_(segment.part(packed.nbytes, packed.dtype))
                    else:
                        packed.view(torch.uint8).copy_(torch.frombuffer(letter[-1], dtype=torch.uint8))
            if written >= 0 and (left or not fits):  # nobody may be told of it, and who asks next may expect it
                parcel.letter = letter
            if follows and link is not None:
                parcel.rest = Messages(link, [link.base.recv([packed], src, follows)], None, packed)
                if parcel.dropped:
                    parcel.rest.abandon()
        except OSError as error:
            if isinstance(error, TimeoutError) or segment is not None or follows:  # of a signal's
                raise
            self._say_unread(src, letter[NUMBER])
            if not parcel.is_left:
                self._fits(parcel, letter, src)
            parcel.error = parcel.error or envelopes.lost(parcel.where, src, parcel.index, error)
        except RuntimeError as error:  # no memory, or gloo's
            if segment is not None:
                segment.returned(self.mail.index)
            elif not follows:
                self._say_taken(src, letter[NUMBER])
            parcel.error = error if link is None else link._error(parcel.where, error)
        else:
            if written < 0:
                parcel.error = parcel.error or envelopes.broken_off(parcel.where, src, parcel.index)
            if segment is not None:
                flags, index = segment.flags, self.mail.index
                flags[index] = 0  # no call from here to the next line: it is read again, or given back
                parcel.is_here = True
            elif not follows:
                self._say_taken(src, letter[NUMBER])
        parcel.is_here = True
        self.mail.ring_at(src)
        return True

    def _fits(self, parcel: Parcel, letter: list[Any], src: int) -> bool:
        _, shape, dtype, tag, _ = parcel.want
        said = says(parcel.name, tag, dtype, shape, letter[ROUTE])
        if letter[DTYPE:PLACE] == said[DTYPE:] and letter[SEQUENCE:FOLLOWS] == said[SEQUENCE:FOLLOWS]:
            return True
        found = envelope_of(letter)
        parcel.error = envelopes.misfit(parcel.where, found, src, parcel.index, parcel.name, dtype, shape)
        return False

    def _take_over(self, parcel: Parcel, other: Parcel) -> None:
        """What came for the other one, which nobody got."""
        src, shape, dtype, *_ = parcel.want
        out = other.out
        if other.error is not None and other.letter is None:  # else it has not fitted there
            parcel.error = other.error
            return
        assert out is not None
        if other.letter is not None:
            if not self._fits(parcel, other.letter, src):
                return
            out = dtypes.from_bytes(out, dtype).view(shape)
        elif parcel.name != other.name or parcel.want[:4] != other.want[:4]:
            found = Envelope.of(other.name, other.want[3], out, 0)
            parcel.error = envelopes.misfit(parcel.where, found, src, parcel.index, parcel.name, dtype, shape)
            return
        with parcel.as_asked():
            parcel.out = out if other.rest is not None else out.clone()
        parcel.rest = other.rest

    def _say_taken(self, src: int, number: int) -> None:
        cells, at = self.rings[src], RING * self.mail.index + HEAD + number % MOST * SLOT + TAKEN
        if cells[at] < number:  # else it was said before Ctrl-C, and another one may have stood there since
            cells[at] = number

    def _say_unread(self, src: int, number: int) -> None:
        self.rings[src][RING * self.mail.index + UNREAD + number % MOST] = number

    def is_unread(self, dst: int, number: int) -> bool:
        """Whether that one has said that it cannot read what is lent with this letter."""
        own = self.own
        return own is not None and own[RING * dst + UNREAD + number % MOST] == number

    def see_to_it(self) -> None:
        """Somebody has asked, or sent, who does not wait now: have the thread look, until all is here."""
        looking.add(self)

    def look_after(self) -> bool:
        """As that thread; whether something was there."""
        before = list(self.next)
        with contextlib.suppress(Exception):  # who waits hears of it
            self.look()
        return self.next != before

    def is_busy(self) -> bool:
        """Whether something may come, or is to be written."""
        return (bool(self.left) or self._is_asked()) and self.mail.own.state() != GONE

    def _is_asked(self) -> bool:
        """Whether anything that was asked for has not come, be it for who asks next."""
        return any(not parcel.is_here for asked in list(self.asked.values()) for parcel in list(asked))

    def give_back(self, link: Any, want: Want, route: int, out: Tensor) -> None:
        """Nobody got this message, which was taken out of its letter: it is for who asks next."""
        parcel = Parcel(link, "exchange", want, route, out)
        parcel.is_here = True
        parcel.number = -parcel.number  # before all others
        self.forget([parcel])

    def forget(self, parcels: Sequence[Parcel]) -> None:
        """Nobody gets these: the places of those that have not come are for who asks next, and so is what has come; so
        is an error that nobody was told of, for those after it are not to take its place.
        """
        taken: list[bool] = []
        try:  # a Work may be let go of while this thread looks: Python collects garbage at any time
            taken.extend(map(self.receiving.acquire, [True], [_PATIENCE]))
            if taken[0]:
                self._forget(parcels)
            else:
                threading.Thread(target=self.forget, args=(parcels,), name="meshcomm messages", daemon=True).start()
        finally:
            if taken and taken[0]:
                self.receiving.release()

    def _forget(self, parcels: Sequence[Parcel]) -> None:
        self.some_left = True
        for parcel in parcels:
            if parcel.key[1] >= CALLS:  # no other call asks for what this one's are
                parcel.dropped = True
                continue
            if parcel.is_left or parcel.is_settled:
                continue
            asked = self.asked.setdefault(parcel.key, deque())
            if parcel in asked:
                parcel.is_left = True
                if not parcel.is_here:
                    parcel.out = None
            elif parcel.is_here:
                at = sum(other.number < parcel.number for other in asked)
                parcel.is_left = parcel.is_kept = True  # no call from here to that of the next line
                asked.insert(at, parcel)
            elif not asked:
                del self.asked[parcel.key]

    # --------------------------------------------------------------------------------------------------- sending

    def send(self, link: Any, post: Post, route: int) -> Sent:
        """Write a letter, about what stays lent until it has been read and somebody has seen that: ``is_read``."""
        x, dst, tag = post
        mail, packed = self.mail, dtypes.to_bytes(x)
        lent, rest, follows, letter = self._lend(packed, dst), None, 0, None
        try:
            if lent is None:
                follows = following(next(link.numbers))
                rest = Messages(
                    link, [link._start("exchange", lambda: link.base.send([packed], dst, follows))], None, packed
                )
            letter = letter_of(link.name, tag, x, follows, lent, route)
            with self.sending:
                self._write(dst, letter)
            mail.ring_at(dst)
            return Sent(dst, letter[NUMBER], lent, rest)
        except BaseException as error:
            if lent is not None:
                if letter is not None and 0 < letter[NUMBER] <= self.numbers[dst]:  # it is there: Ctrl-C
                    lent.returned(mail.index)
                else:
                    lent.take_back()
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                why = f"there is no memory to share: {error.strerror or error}"
                raise link._error("exchange", RuntimeError(why)) from error
            raise

    def _lend(self, packed: Tensor, dst: int) -> Segment | None:
        mail = self.mail
        try:
            readers = [self.addressees[dst]]
            nbytes = max(1, packed.nbytes)
            lent = room.lend(nbytes, (dst, mail.index), readers, patient=not told.later, must=False)
        except (OSError, CommError):
            return None
        try:
            if packed.numel():
                put(lent.part(packed.nbytes, packed.dtype), packed)
            lent.cells[STATE] = packed.nbytes
        except BaseException:  # Ctrl-C: nobody hears of it
            lent.take_back()
            raise
        return lent

    def _write(self, dst: int, letter: array[int]) -> None:
        if self.own is None:
            if self._memory is None:
                self._memory = create(8 * RING * len(self.numbers))
            memory = self._memory  # the others may know of it already, if this was interrupted
            self.mail.own.say_letters(memory.fd, memory.serial, memory.size)
            self.own_address = memory.address
            self.own = memory.view.cast("q")
        number = self.numbers[dst] + 1
        letter[NUMBER] = number
        cells = self.own
        if dst not in self.left and number - cells[RING * dst] <= MOST:
            at = RING * dst + HEAD + number % MOST * SLOT
            cells[at + 1 : at + CELLS] = letter[1:]
            cells[at] = number  # now it is there; no call from here to the next line
            self.numbers[dst] = number
            return
        left = self.left.setdefault(dst, deque())
        left += (letter,)  # the same
        self.numbers[dst] = number
        self.see_to_it()

    def _write_left(self) -> None:
        for dst, letters in list(self.left.items()):
            cells = self.own
            while letters and (number := letters[0][NUMBER]) - cells[RING * dst] <= MOST:
                at = RING * dst + HEAD + number % MOST * SLOT
                cells[at + 1 : at + CELLS] = letters[0][1:]
                cells[at] = number
                letters.popleft()
            self.mail.ring_at(dst)
            if not letters:
                del self.left[dst]

    # ------------------------------------------------------------------------------------------------------- the end

    def is_at_rest(self) -> bool:
        """Whether nothing that somebody wants has not come, and the others have seen all letters that are for them."""
        every = [parcel for asked in list(self.asked.values()) for parcel in list(asked)]
        if self.left or any(not (parcel.dropped or parcel.is_left) for parcel in every):
            return False
        return self.own is None or all(self.own[RING * i] == number for i, number in enumerate(self.numbers))

    def close(self) -> None:
        """Nobody writes or reads here any more."""
        with self.sending, self.receiving:
            memory, self._memory, self.own = self._memory, None, None
            self.rings = [None] * len(self.rings)
            self.left.clear()
            self.asked.clear()
            self.is_closed = True
            if memory is not None:
                os.close(memory.fd)


def letters_of(mail: Mail) -> Letters:
    """Those of a group."""
    with mail.lock:
        if mail.letters is None:
            mail.letters = Letters(mail)
        return cast(Letters, mail.letters)
