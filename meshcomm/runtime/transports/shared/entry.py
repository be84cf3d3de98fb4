"""The entry of a call in the mailbox of this rank: what it says, and lends, to the others."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

from torch import Tensor

from meshcomm.errors import FIRST_CAUSE, CommError, text
from meshcomm.runtime.call import told
from meshcomm.runtime.health import peers
from meshcomm.runtime.health.lateness import Late, late_text
from meshcomm.runtime.process import lending
from meshcomm.runtime.process.boxes import ENTRIES, HERE
from meshcomm.runtime.process.lending import NO_READERS, TABLE, Segment, put
from meshcomm.runtime.process.memory import READERS
from meshcomm.runtime.process.reuse import reserve
from meshcomm.runtime.recorder import Log, Record
from meshcomm.runtime.transports.shared.lexicon import Meaning
from meshcomm.runtime.transports.shared.mailbox import FAR, Mail
from meshcomm.runtime.transports.shared.waiting import Wait
from meshcomm.runtime.transports.shared.words import ENTRY_CELLS, ITEMSIZES, STANDS, WHY, last_said, name_of, said

NOBODY = -1
GIVEN_UP = "has given up"
"""What is told of a rank that makes no more calls of a link, because one has failed."""
SMALL = 2**15
"""Bytes up to which it is faster to lend all than to leave out what nobody reads."""


class Caller(Protocol):
    """Who makes a call: a link."""

    mail: Mail
    log: Log
    ranks: tuple[int, ...]
    index: int
    size: int

    def place_on_axis(self, index: int) -> int:
        """What the user knows this index of the link as."""

    def as_called(self, late: Late) -> Late:
        """What the user knows such a call as."""


def gone_among(link: Caller, missing: Sequence[int]) -> dict[int, str]:
    """Who of these will not come, and why."""
    mail, gone = link.mail, {}
    for i in missing:
        box, neighbour = mail.box(i), mail.neighbours[i]
        assert neighbour is not None
        who = f"rank {link.ranks[i]}, process {neighbour.pid}"
        ended = neighbour.is_gone()
        if given_up := mail.why_given_up(i):
            gone[i] = f"index {link.place_on_axis(i)} {GIVEN_UP} ({who}): {given_up}"
        elif ended or (box is not None and box.state() != HERE):
            why = peers.reason(link.ranks[i])
            # Who has said why has left, whether or not its process has come to its end meanwhile.
            how = "has ended" if ended and not why else peers.LEFT
            gone[i] = f"index {link.place_on_axis(i)} {how} ({who})" + (f": {why}" if why else "")
    return gone


class Watch(Protocol):
    """Who wants that all ranks make a call, or none does: the guard, of one call."""

    meaning: Meaning
    stands: int
    gradient: int
    reason: int
    """What the entry says at first."""
    wavers: bool
    """Whether this rank is about to give up, or has."""
    for_program: bool
    """Whether the program does nothing else while it waits."""

    def begin(self, call: Any) -> None:
        """Its number is known."""

    def __enter__(self) -> object:
        """It is waited for."""

    def __exit__(self, *error: object) -> None:
        """No more."""

    def see(self) -> None:
        """Called now and then in a wait: CommError if this rank gives up."""

    def see_behind(self, number: int, behind: Sequence[int]) -> None:
        """Called now and then before the call of this number is made, in a wait for those who have to follow first:
        CommError if they will not.
        """

    def is_hopeless(self) -> bool:
        """Whether a wait would give up."""

    def weigh(self, entries: Mapping[int, tuple[int, int, int]]) -> tuple[bool, bool]:
        """Whether a rank is about to give up, and whether one has, or has called something else, by digest, stand and
        gradient of each of the others.
        """

    def differ(self) -> NoReturn:
        """One has."""

    def runs_differ(self) -> NoReturn:
        """In an all_to_all one sends what another one does not expect."""

    def withdraw(self, seconds: float) -> bool:
        """Give up, unless all have come, since so many seconds are over; whether that can be had."""

    def resign(self, why: str) -> bool:
        """Give up for this reason, unless all have come; whether this rank has."""

    def settle(self) -> None:
        """Who was interrupted when it was about to give up has done so, or stays."""


class Entry:
    """What this rank says and lends of one call of a collective."""

    __slots__ = (
        "_brought", "_lent", "_missing", "_over", "_own", "_partly", "_sources", "_tables", "code", "count", "digest",
        "link", "mail", "number", "packed", "place", "record", "root", "total", "watch",
    )  # fmt: skip

    def __init__(
        self,
        link: Caller,
        mail: Mail,
        meaning: Meaning,
        count: int,
        root: int,
        record: Record,
        watch: Watch | None = None,
    ) -> None:
        self.link, self.mail, self.record, self.watch = link, mail, record, watch
        self.code, self.digest, self.place = meaning
        self.count, self.root = count, root
        self.total = 1
        self._lent: Segment | None = None
        self.number = 0
        self._missing: list[int] = list(link.mail.others)
        self._sources: Sequence[int] = link.mail.others
        self._partly = False  # not compared with those of all others
        self._own: Tensor | None = None
        self._brought: Any = None
        self._tables: dict[int, Sequence[int]] = {}
        self._over = False
        self.prepare()

    def prepare(self) -> None:
        """What a call needs beside its entry."""

    def brings(
        self,
        packed: Tensor | None,
        readers: Sequence[int],
        sources: Sequence[int],
        *,
        spare: int = 0,
        table: Sequence[int] | None = None,
        unread: tuple[int, int] = (0, 0),
        write: Callable[[Tensor], object] | None = None,
    ) -> None:
        """What :meth:`post` lends: ``packed``, to the readers. ``sources``: who lends something to this rank, known
        from the first: of whoever is interrupted nothing else may be returned. ``spare``: bytes behind it. ``table``:
        where the run for each rank begins and the last one ends, and how long those are that it expects, in elements
        of ``packed``. ``unread``: from and to which of these nobody else reads. ``write``: writes what is lent, of
        which ``packed`` then has the shape alone.
        """
        self.packed, self._sources = packed, sources
        self._brought = packed, readers, spare, table, unread, write

    def post(self) -> None:
        """Lend that, and tell everybody. Who is interrupted drops the call, or quits it, if others have heard of it."""
        if self.mail.dropped:
            self.mail.look_after()
        if self.watch is None:
            self._missing, self._partly = list(self._sources), len(self._sources) < len(self.mail.others)
        assert self._brought is not None
        brought, self._brought = self._brought, None
        try:
            self._lend(*brought)
            with self.mail.lock:
                self._enter()
        except BaseException:
            if not self.is_open:
                self._take_back()
            elif self.watch is not None:
                self.watch.begin(self)
            raise

    @property
    def is_open(self) -> bool:
        """Whether the others have heard of it, and it has not come to its end."""
        return self.mail.open.get(self.number) is self  # type: ignore[comparison-overlap]  # the entry of a `Call`

    def _take_back(self) -> None:
        """What was lent, once: it may be lent again then."""
        lent = self._lent
        if lent is not None:
            self._lent, lent.flags[:READERS] = None, NO_READERS  # no call between: Ctrl-C comes with one

    def was_posted(
        self, number: int, lent: Segment | None, own: Tensor, sources: Sequence[int], table: Sequence[int]
    ) -> None:
        """All of that has been done: under this number, with ``own`` written to what is lent."""
        self.number, self._lent, self.packed, self._own = number, lent, own, own
        self._sources, self._missing = sources, list(sources)
        self._partly = len(sources) < len(self.mail.others)
        if table:
            self._tables[self.link.index] = list(table)
        self.mail.open[number] = self  # type: ignore[assignment]  # the entry of a `Call`

    def _lend(
        self,
        packed: Tensor | None,
        readers: Sequence[int],
        spare: int,
        table: Sequence[int] | None,
        unread: tuple[int, int],
        write: Callable[[Tensor], object] | None,
    ) -> None:
        mail, link = self.mail, self.link
        if packed is not None and readers and (table or packed.numel()):
            keeps = told.later or bool(spare) or write is not None
            places = (*readers, link.index)  # it returns its own at its end, which would be another call's otherwise
            try:
                who = mail.other_readers if readers is mail.others else [mail.readers[i] for i in readers]
                self._lent = lent = lending.room.lend(packed.nbytes + spare, places, who, patient=not told.later)
            except OSError as error:
                if isinstance(error, TimeoutError):  # of a signal's
                    raise
                self.fail(f"there is no memory to share: {error.strerror or error}")
            if table is not None:
                lent.cells[TABLE : TABLE + len(table)] = array("q", table)
            own = lent.part(packed.nbytes, packed.dtype)
            if write is not None:
                write(own)
            elif unread[1] > unread[0] and packed.nbytes > SMALL and not keeps:
                start, end = unread
                put(own[:start], packed[:start])
                put(own[end:], packed[end:])
            else:
                put(own, packed)
            # What is reduced again by who waits no more must not have changed.
            self._own = own if keeps else packed
        elif packed is not None:
            self._own = packed.clone() if told.later else packed
        if table is not None:
            self._tables[link.index] = table

    def _enter(self) -> None:
        mail, lent = self.mail, self._lent
        self.number = number = mail.number + 1
        if number % FAR == 0:
            self._make_way()
        at, cells = mail.own.at(number), mail.own.cells
        where = (lent.fd, lent.serial, lent.whole, lent.kept) if lent is not None else (0, 0, 0, 0)
        place = (lent.offset, lent.size) if lent is not None else (0, 0)
        watch = self.watch
        says = (0, 0, 0) if watch is None else (watch.stands, watch.gradient, watch.reason)
        said_of = (self.code, self.count, self.root, *where, told.later, *place, self.digest, self.place, *says)
        cells[at] = 0  # what stood there is not to be written to any more
        cells[at + 1 : at + ENTRY_CELLS] = array("q", said_of)
        try:
            mail.open[number], mail.number = self, number  # type: ignore[assignment]  # the entry of a `Call`
            if lent is not None:
                lent.number = number
            if watch is not None:
                watch.begin(self)
        finally:  # Ctrl-C, too: the number is taken
            cells[at] = number  # last: now it is there
            mail.ring()

    def _make_way(self) -> None:
        """Say what was seen, and wait until the others have seen what will be written over."""
        mail = self.mail
        reserve.trim()
        end = time.monotonic() + mail.timeout
        waiting, watch = list(mail.others), self.watch
        first = Wait(self, end, None if watch is None else partial(watch.see_behind, self.number))
        with watch or contextlib.nullcontext():
            while True:
                calls = mail.open.copy().items()  # other threads finish theirs
                seen = next((number - 1 for number, call in calls if not call.look()), self.number - 1)
                for i in mail.others:
                    box = mail.box(i)
                    if box is not None:
                        box.drain(mail.index, seen)
                waiting = [i for i in waiting if mail.own.drained(i) < self.number - ENTRIES // 2]
                if not waiting:
                    return
                first.more(waiting)

    def stand(self, stands: int, why: int = 0) -> None:
        """Say how this rank stands to it now, and where the reason is; unless a later call stands there."""
        at, cells, number = self.mail.own.at(self.number), self.mail.own.cells, self.number
        if cells[at] == number:
            cells[at + WHY] = why
            cells[at + STANDS] = stands
            self.mail.ring()

    def of(self, whose: int) -> None:
        """It sums the gradient of this leaf: the word stands in the place of a root, which it has none of."""
        self.root = NOBODY - whose

    @property
    def is_over(self) -> bool:
        """Whether it has come to its end."""
        return self._over

    def drop(self) -> None:
        """Nobody waits for it: what was lent to this rank is returned all the same, when all have come."""
        dropped: list[Any] = self.mail.dropped
        if self.is_open and self not in dropped:
            dropped.append(self)

    def _nbytes(self) -> int:
        return self.count * ITEMSIZES[self.code & 255]

    @property
    def name(self) -> str:
        """Of the primitive."""
        return name_of(self.code)

    def __str__(self) -> str:
        return said(self.code, self.count, self.root)

    def whereabouts(self) -> tuple[list[int], dict[int, str]]:
        """Who else has made this call, and what the mailboxes of the others say."""
        boxes = {i: self.mail.box(i) for i in self.mail.others}
        came = [i for i, box in boxes.items() if box is not None and box.cells[box.at(self.number)] >= self.number]
        return came, {i: last_said(box) for i, box in boxes.items() if i not in came}

    def listen(self) -> int:
        """As its own box."""
        return self.mail.own.listen()

    def sleep(self, heard: int, seconds: float) -> bool:
        """As its own box."""
        return self.mail.own.sleep(heard, seconds)

    def gone_among(self, missing: Sequence[int]) -> dict[int, str]:
        """Who of these will not come, and why."""
        return gone_among(self.link, missing)

    def expire(self, missing: list[int]) -> NoReturn:
        """The mesh's time is up."""
        raise CommError(self.late(missing))

    def late(self, missing: list[int]) -> str:
        """That the mesh's time is up, in words."""
        found = peers.account([self.link.ranks[i] for i in missing])
        late = Late(self.name, self.link.log, self.record, self.mail.timeout, missing, *self.whereabouts(), found)
        return late_text(self.link.as_called(late))

    def fail(self, what: str) -> NoReturn:
        """With where this was, and what to look at."""
        raise CommError(
            text(
                self.name,
                f"the transport failed: {what}",
                got=f"call {self.number} of index {self.link.index} of a group of {self.link.size}: {self}",
                fix=FIRST_CAUSE,
            )
        )
