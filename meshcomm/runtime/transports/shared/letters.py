"""Messages between ranks that share memory: each sender has a ring of letters for each other rank, in memory that these
look into::

    sender     lends what it sends, and writes a letter: for whom, what it is, where that lies ──► has it been read?
                    │                                                                                  ▲
    receiver   looks through those for it, of all, in their order ──► this one goes to who asked first, of those who
               asked for its route: reads it, and gives the memory back ───────────────────────────────┘

Whoever waits for a message, or for one to be read, looks for all that this rank has asked for; while nobody does, a
thread looks now and then. So who waits for a later receipt keeps nobody, as over gloo, but nobody is woken by a thread.
A letter that was seen is written over; one for which there is no place yet is written when there is. If there is no
memory to lend, what is sent follows over gloo.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import CommError
from meshcomm.runtime.call import Post, Want, told
from meshcomm.runtime.process import forks
from meshcomm.runtime.process.boxes import GONE
from meshcomm.runtime.process.lending import Segment, room
from meshcomm.runtime.process.memory import Lease, Memory, create, find
from meshcomm.runtime.process.reuse import reserve
from meshcomm.runtime.transports import dtypes, envelopes
from meshcomm.runtime.transports.envelopes import LENGTHS, Envelope
from meshcomm.runtime.transports.post import following
from meshcomm.runtime.transports.shared.mailbox import Mail
from meshcomm.runtime.transports.shared.words import dtype_of, number_of
from meshcomm.runtime.transports.underway import Messages

(_NUMBER, _ROUTE, _SEQUENCE, _TAG, _NBYTES, _FOLLOWS, _DTYPE, _NDIM, _REST, _SHAPE) = range(10)
_PLACE = _SHAPE + LENGTHS
_CELLS = _PLACE + 6
"""Of a letter: its number, over which route it goes; what an envelope says; where what is lent lies."""
_MOST = 128
"""How many letters a ring has place for."""
_RING = _CELLS * (1 + _MOST)
"""Before the letters the number of the last one that was seen."""
_FIRST_PAUSE, _LONGEST_PAUSE, _IDLE = 1e-3, 2e-2, 0.5
"""Seconds between looks of the thread that looks while nobody else does, and after which it has nothing to do."""


_NOTHING = contextlib.nullcontext()


class Parcel:
    """A message that was asked for."""

    __slots__ = (
        "_inference", "_thread", "dropped", "error", "index", "is_here", "link", "name", "out", "rest", "want", "where",
    )  # fmt: skip

    def __init__(self, link: Any, where: str, want: Want) -> None:
        self.link: weakref.ref[Any] = weakref.ref(link)
        """Whoever waits has it; if nobody will any more, a message does not keep it."""
        self.name, self.index, self.where, self.want = link.name, link.index, where, want
        self._inference, self._thread = torch.is_inference_mode_enabled(), get_ident()
        self.is_here = self.dropped = False
        self.out: Tensor | None = None
        self.rest: Messages | None = None
        """What follows over gloo."""
        self.error: Exception | None = None

    def as_asked(self) -> contextlib.AbstractContextManager[object]:
        """The mode in which it was asked for, for whoever reads it, in the middle of whatever that is."""
        if self._thread != get_ident() and not _torch.plain_now():
            stack = contextlib.ExitStack()
            stack.enter_context(_torch.outside_transforms())
            stack.enter_context(torch.inference_mode(self._inference))
            return stack
        return (
            _NOTHING if self._inference == torch.is_inference_mode_enabled() else torch.inference_mode(self._inference)
        )


class Sent:
    """A message that was sent: it lies in what is lent, until it has been read; or follows over gloo."""

    __slots__ = ("_is_read", "lent", "number", "rest", "to")

    def __init__(self, to: int, number: int, lent: Segment | None, rest: Messages | None) -> None:
        self.to, self.number, self.lent, self.rest = to, number, lent, rest
        self._is_read = lent is None

    def is_read(self, mail: Mail) -> bool:
        """Whether it has been, or cannot be."""
        if not self._is_read:
            assert self.lent is not None
            if self.lent.flags[self.to]:
                box = mail.boxes[self.to]
                if box is None or not box.is_unread(mail.index, self.number):
                    return False
                self.lent.returned(self.to)
            self.let_go(mail)
        return True

    def let_go(self, mail: Mail) -> None:
        """When it has been read, the memory may be lent again: this rank has a part in it, once."""
        if not self._is_read:
            self._is_read = True  # first, for then the memory may be that of another message
            assert self.lent is not None
            self.lent.returned(mail.index)


class Letters:
    """Those of one group: this rank's, and what it has seen of the others'."""

    def __init__(self, mail: Mail) -> None:
        self.mail = mail
        self._receiving, self._sending = threading.Lock(), threading.Lock()
        self._memory: Memory | None = None
        self._own: Any = None
        self._numbers = [0] * len(mail.neighbours)
        """Of the last letter to each."""
        self._left: dict[int, deque[array[int]]] = {}
        """For whom there are letters for which there is no place yet."""
        self._next = [1] * len(mail.neighbours)
        self._rings: list[Any] = [None] * len(mail.neighbours)
        self._asked: dict[tuple[int, int], deque[Parcel]] = {}
        self._came: dict[tuple[int, int], deque[list[int]]] = {}

    # ------------------------------------------------------------------------------------------------- receiving

    def ask(self, link: Any, where: str, want: Want, route: int, *, ahead: bool = False) -> Parcel:
        """For the next message over this route; ``ahead``: make room for it now."""
        parcel, key = Parcel(link, where, want), (want[0], route)
        if ahead and want[2] in dtypes.PLAIN:
            parcel.out = reserve.empty(want[1], torch.empty(0, dtype=want[2], device="cpu"))
        with self._receiving:
            self._asked.setdefault(key, deque()).append(parcel)
        return parcel

    def look(self) -> None:
        """See what has come, and read what was asked for."""
        mail, base = self.mail, _RING * self.mail.index
        if self._left:
            with self._sending:
                self._write_left()
        with self._receiving:
            for i in mail.others:
                cells = self._rings[i]
                if cells is None and (cells := self._ring(i)) is None:
                    continue
                number = first = self._next[i]
                while cells[at := base + _CELLS * (1 + number % _MOST)] == number:
                    letter = cells[at : at + _CELLS].tolist()
                    self._came.setdefault((i, letter[_ROUTE]), deque()).append(letter)
                    number += 1
                    self._next[i] = number
                if number != first:
                    cells[base] = number - 1
            for key in [key for key in self._came if key in self._asked]:
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
        self._rings[i] = cells = found.view.cast("q")
        return cells

    def _give(self, key: tuple[int, int]) -> None:
        came, asked = self._came[key], self._asked[key]
        while asked and came:
            if not asked[0].is_here:  # else somebody was interrupted here
                self._read(asked[0], came[0], key[0])
            asked.popleft()
            came.popleft()
        if not asked:
            del self._asked[key]
        if not came:
            del self._came[key]

    def _read(self, parcel: Parcel, letter: list[int], src: int) -> None:
        """What does not fit is taken all the same, for who has sent it waits."""
        _, shape, dtype, tag, _ = parcel.want
        link, found = parcel.link(), _envelope(letter)
        fits = found.is_for(parcel.name, tag, dtype, shape)
        if not fits:
            parcel.error = envelopes.misfit(parcel.where, found, src, parcel.index, parcel.name, dtype, shape)
        try:
            with parcel.as_asked():
                if fits and dtype in dtypes.PLAIN:
                    if parcel.out is None:
                        parcel.out = reserve.empty(shape, torch.empty(0, dtype=dtype, device="cpu"))
                    packed = parcel.out.view(-1)
                else:
                    length, kind = (shape, dtype) if fits else ((found.nbytes,), torch.uint8)
                    packed = dtypes.to_bytes(reserve.empty(length, torch.empty(0, dtype=kind, device="cpu")))
                    parcel.out = dtypes.from_bytes(packed, dtype).view(shape) if fits else packed
                if found.follows and link is not None:
                    work = link.base.recv([packed], src, found.follows)
                    parcel.rest = Messages(link, [work], None, packed)
                    if parcel.dropped:
                        parcel.rest.abandon()
                elif not found.follows:
                    self._borrow(letter, src, None if parcel.dropped or not fits else packed)
        except OSError as error:
            self.mail.own.say_unread(src, letter[_NUMBER])
            self.mail.ring_at(src)
            parcel.error = parcel.error or envelopes.lost(parcel.where, src, parcel.index, error)
        except RuntimeError as error:
            parcel.error = error if link is None else link._error(parcel.where, error)
        parcel.is_here = True

    def _borrow(self, letter: list[int], src: int, out: Tensor | None) -> None:
        mail = self.mail
        segment = mail.borrow_at(letter[_PLACE : _PLACE + 6], src)
        try:
            if out is not None and out.numel():
                out.copy_(segment.part(out.nbytes, out.dtype))
        finally:
            segment.returned(mail.index)
            mail.ring_at(src)

    def see_to_it(self) -> None:
        """Somebody has asked, or sent, who does not wait now: have the thread look, until all is here."""
        _looking.add(self)

    def look_after(self) -> bool:
        """As that thread; whether something was there."""
        before = list(self._next)
        with contextlib.suppress(Exception):  # who waits hears of it
            self.look()
        return self._next != before

    def is_busy(self) -> bool:
        """Whether something may come, or is to be written."""
        return bool(self._asked or self._left) and self.mail.own.state() != GONE

    def forget(self, parcels: Sequence[Parcel]) -> None:
        """What has not come is for who asks next."""
        with self._receiving:
            for parcel in parcels:
                for key, asked in list(self._asked.items()):
                    if parcel in asked:
                        asked.remove(parcel)
                        if not asked:
                            del self._asked[key]

    # --------------------------------------------------------------------------------------------------- sending

    def send(self, link: Any, post: Post, route: int) -> Sent:
        """Write a letter, about what stays lent until it has been read and somebody has seen that: ``is_read``."""
        x, dst, tag = post
        mail, packed = self.mail, dtypes.to_bytes(x)
        lent, rest, follows = self._lend(packed, dst), None, 0
        if lent is None:
            follows = following(next(link.numbers))
            rest = Messages(link, [link.base.send([packed], dst, follows)], None, packed)
        try:
            with self._sending:
                number = self._write(dst, _letter(link.name, tag, x, follows, lent, route))
        except BaseException as error:
            if lent is not None:
                lent.take_back()
            if isinstance(error, OSError):
                why = f"there is no memory to share: {error.strerror or error}"
                raise link._error("exchange", RuntimeError(why)) from error
            raise
        mail.ring_at(dst)
        return Sent(dst, number, lent, rest)

    def _lend(self, packed: Tensor, dst: int) -> Segment | None:
        mail = self.mail
        try:
            readers = [mail.addressees[dst]]
            nbytes = max(1, packed.nbytes)
            lent = room.lend(nbytes, (dst, mail.index), readers, patient=not told.later, must=False)
        except (OSError, CommError):
            return None
        try:
            if packed.numel():
                lent.part(packed.nbytes, packed.dtype).copy_(packed)
        except BaseException:  # Ctrl-C: nobody hears of it
            lent.take_back()
            raise
        return lent

    def _write(self, dst: int, letter: array[int]) -> int:
        if self._memory is None:
            self._memory = memory = create(8 * _RING * len(self._numbers))
            self._own = memory.view.cast("q")
            self.mail.own.say_letters(memory.fd, memory.serial, memory.size)
        self._numbers[dst] = number = self._numbers[dst] + 1
        letter[_NUMBER] = number
        if dst in self._left or not self._has_place(dst, number):
            self._left.setdefault(dst, deque()).append(letter)
            self.see_to_it()
        else:
            self._put(dst, letter)
        return number

    def _has_place(self, dst: int, number: int) -> bool:
        return bool(number - self._own[_RING * dst] <= _MOST)

    def _put(self, dst: int, letter: array[int]) -> None:
        cells, at = self._own, _RING * dst + _CELLS * (1 + letter[_NUMBER] % _MOST)
        cells[at + 1 : at + _CELLS] = letter[1:]
        cells[at] = letter[_NUMBER]  # last: now it is there

    def _write_left(self) -> None:
        for dst, letters in list(self._left.items()):
            while letters and self._has_place(dst, letters[0][_NUMBER]):
                self._put(dst, letters[0])
                letters.popleft()
            self.mail.ring_at(dst)
            if not letters:
                del self._left[dst]

    # ------------------------------------------------------------------------------------------------------- the end

    def is_at_rest(self) -> bool:
        """Whether nothing that somebody wants has not come, and the others have seen all letters that are for them."""
        if self._left or any(not parcel.dropped for asked in list(self._asked.values()) for parcel in list(asked)):
            return False
        return self._own is None or all(self._own[_RING * i] == number for i, number in enumerate(self._numbers))

    def close(self) -> None:
        """Nobody writes or reads here any more."""
        memory, self._memory = self._memory, None
        if memory is not None:
            os.close(memory.fd)


class _Looking:
    """The thread of this process that looks for all who do not wait, while there are some: less and less often."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._every: weakref.WeakSet[Letters] = weakref.WeakSet()
        self._runs = False

    def add(self, letters: Letters) -> None:
        """Have it look for these, too."""
        with self._lock:
            self._every.add(letters)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="meshcomm messages", daemon=True).start()

    def _run(self) -> None:
        end, pause = time.monotonic() + _IDLE, _FIRST_PAUSE
        while True:
            time.sleep(pause)
            pause = min(1.2 * pause, _LONGEST_PAUSE)
            if self._look():
                end, pause = time.monotonic() + _IDLE, _FIRST_PAUSE
            with self._lock:
                if not self._every and time.monotonic() > end:
                    self._runs = False
                    return

    def _look(self) -> bool:
        with self._lock:
            every = list(self._every)
        found = False
        for letters in every:
            found |= letters.look_after()
            with self._lock:
                if not letters.is_busy():
                    self._every.discard(letters)
        return found


_looking = _Looking()


@forks.in_every_fork
def _forked() -> None:
    _looking.__init__()  # type: ignore[misc]


def letters_of(mail: Mail) -> Letters:
    """Those of a group."""
    with mail.lock:
        if mail.letters is None:
            mail.letters = Letters(mail)
        return cast(Letters, mail.letters)


def _letter(name: str, tag: int, x: Tensor, follows: int, lent: Segment | None, route: int) -> array[int]:
    shape = tuple(x.shape)
    lengths = [*shape[:LENGTHS], *[0] * (LENGTHS - len(shape))]
    head = (0, route, envelopes.sequence_of(name), tag, x.nbytes, follows, number_of(x.dtype), len(shape))
    return array("q", (*head, envelopes.rest_of(shape), *lengths, *((0,) * 6 if lent is None else lent.where)))


def _envelope(letter: list[int]) -> Envelope:
    ndim, lengths = letter[_NDIM], letter[_SHAPE:_PLACE]
    shape = (*lengths[:ndim], *([letter[_REST]] if ndim > LENGTHS else []))
    kind = str(dtype_of(letter[_DTYPE]))
    return Envelope(letter[_SEQUENCE], letter[_TAG], kind, shape, letter[_NBYTES], letter[_FOLLOWS])
