"""One call of a collective among ranks that share memory: what a rank lends to the others, waits for, and reads.

A call meets once. Without guard it is read when those have come that it reads from; under guard all have to come, and
all read or none does::

                                             all have come, say the same, and none is leaving
        post: the entry says MADE ──────────────────────────────────────────► read ──► what was lent is returned
          │   ▲                   │
          │   │ all have come     │ one says something else, or has given up
          ▼   │                   ▼
        LEAVING ────────────► GAVE_UP                                      nobody reads: what was lent is taken back
               somebody has   (EXPIRED: for a time-out of its own)
               not come

Who wants to give up says that it is leaving, and then looks once more. Who sees all looks once more at what they say:
so either it sees who is leaving, and waits for what becomes of that, or who is leaving sees all, and stays.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import sub
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import CommError, text
from meshcomm.runtime.call import told
from meshcomm.runtime.health import peers
from meshcomm.runtime.health.lateness import Late, late_text
from meshcomm.runtime.pending import Pending, TimedOutError
from meshcomm.runtime.process import memory
from meshcomm.runtime.process.memory import (
    ENTRIES,
    GONE,
    HERE,
    LEAVING,
    STATE,
    TABLE,
    Box,
    Lease,
    Neighbour,
    Segment,
)
from meshcomm.runtime.recorder import DROPPED, ENDED, THREAD, Log, Record, failed
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.shared.differences import Given, compare_given, differ_in, runs_differ
from meshcomm.runtime.transports.shared.lexicon import Meaning, find, lexicon
from meshcomm.runtime.transports.shared.words import (
    CODE,
    COUNT,
    DIGEST,
    ENTRY_CELLS,
    FD,
    GRADIENT,
    KEPT,
    LATER,
    LENGTH,
    OFFSET,
    PERMUTE,
    PLACE,
    ROOT,
    SERIAL,
    SIZE,
    STANDS,
    WHY,
    dtype_of,
    entry_of,
    is_lent_to,
    last_said,
    name_of,
    named,
    said,
)
from meshcomm.runtime.whose import differ

__all__ = ["Call", "Caller", "Fill", "Heard", "Mail", "Meaning", "Reading", "Watch", "retire", "take_leave"]

_LOOKS = 100
"""How often a rank looks and gives way before it sleeps."""
_FIRST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3
_ALIVE = 0.05
"""Seconds between looks at whether the others are alive."""
_HELPFUL = 0.1
"""Seconds after which a rank reduces what another one should have reduced."""
_PATIENCE, _FAILING = 30.0, 2.0
"""Seconds that a rank that leaves gives the others to read, at least; and at most if it leaves because of an error."""
_QUIETLY = 3.0
"""Seconds after which a rank that leaves says for whom it waits."""
_REDUCING, _REDUCED = 1, 2

_NOBODY = -1
Fill = Callable[[list[Tensor]], object]
"""Takes what each rank has brought, to be read until it returns."""


class Caller(Protocol):
    """Who makes a call: a link."""

    mail: Mail
    log: Log
    ranks: tuple[int, ...]
    index: int
    size: int


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

    def begin(self, call: Call) -> None:
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


class Heard(NamedTuple):
    """What another rank has written of a call, for who watches it."""

    digest: int
    stands: int
    gradient: int
    words: bytes
    """Nothing if they have been written over."""
    text: str
    """What is known then."""
    why: bytes


class Mail:
    """The mailboxes of one group: the own one, those of the others, and the number of the last call."""

    def __init__(self, key: int, index: int, neighbours: Sequence[Neighbour | None], timeout: float) -> None:
        """``neighbours``: None for this rank."""
        self.key, self.index, self.neighbours, self.timeout = key, index, tuple(neighbours), timeout
        self.others = tuple(i for i in range(len(self.neighbours)) if i != index)
        self.own = memory.arena().make_box(key)
        self.boxes: list[Box | None] = [self.own if each is None else each.arena.box(key) for each in neighbours]
        self.number = 0
        self.adopted = False
        self.user: Callable[[], object | None] | None = None
        """Gives whoever uses it, while somebody does."""
        self.lock = threading.Lock()
        self.readers = [_Reader(self, i) for i in range(len(self.neighbours))]
        self.open: dict[int, Call] = {}
        self.lexicon = lexicon()
        self.known = self.lexicon.known
        self.given: deque[Given] = deque(maxlen=ENTRIES)
        """Calls that were not compared with those of all others yet."""
        self.dropped: list[Call] = []

    def is_over(self) -> bool:
        """Whether nobody uses it any more, here, and it is at rest."""
        if self.dropped:
            _look_after(self)
        return self.user is not None and self.user() is None and not self.open

    def is_far(self) -> bool:
        """Whether the next call has to see first that the others have followed."""
        return (self.number + 1) % (ENTRIES // 4) == 0

    def box(self, index: int) -> Box | None:
        """That of another rank, once it has made it."""
        found = self.boxes[index]
        if found is None:
            neighbour = self.neighbours[index]
            assert neighbour is not None
            found = self.boxes[index] = neighbour.arena.box(self.key)
        return found

    def heard(self, index: int, number: int) -> Heard | None:
        """Of the call of this number, if that rank has made it."""
        found = entry_of(self.box(index), number)
        if found is None:
            return None
        text = said(found[CODE], found[COUNT], found[ROOT])
        words, why = self.words_at(index, found[PLACE], found[DIGEST]), b""
        if found[WHY]:
            why = self.words_at(index, found[WHY] - 1, number)
        return Heard(found[DIGEST], found[STANDS], found[GRADIENT], words, text, why)

    def borrow(self, entry: Sequence[int], index: int) -> Segment:
        """What that rank lends, as its entry says. Raises OSError if it is not there."""
        neighbour = self.neighbours[index]
        assert neighbour is not None
        lease = Lease(neighbour.pid, entry[FD], entry[SERIAL], entry[SIZE], entry[OFFSET], entry[LENGTH])
        return memory.borrow(lease, keep=bool(entry[KEPT]))

    def words_at(self, index: int, place: int, digest: int) -> bytes:
        """What a rank of the group has written there under this digest; nothing if it has been written over."""
        return find(self.words(index), place, digest)

    def words(self, index: int) -> memoryview[int]:
        """What a rank of the group has called, in words."""
        neighbour = self.neighbours[index]
        return (memory.arena() if neighbour is None else neighbour.arena).words()


class Call:
    """One call of a collective by this rank, from its entry until everything is read."""

    __slots__ = (
        "_decided", "_entries", "_error", "_fill", "_first", "_lent", "_looking", "_missing", "_odd", "_once",
        "_opened", "_over", "_own", "_partly", "_result", "_segments", "_sources", "_tables", "code", "count",
        "digest", "link", "mail", "number", "packed", "place", "record", "root", "total", "watch",
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
        self._entries: dict[int, list[int]] = {}
        self._sources: Sequence[int] = link.mail.others
        self._partly = False  # not compared with those of all others
        self._decided = self._odd = False  # under guard: whether all read, or none does
        self._fill: Fill | None = None
        self._first: Fill | None = None
        self._opened: list[Tensor] | None = None
        self._segments: dict[int, Segment] = {}
        self._result: Any = None
        self._own: Tensor | None = None
        self._tables: dict[int, Sequence[int]] = {}
        self._once, self._looking, self._over = threading.Lock(), threading.Lock(), False
        self._error: Exception | None = None

    # ----------------------------------------------------------------------------------------------- what it gives

    def post(
        self,
        packed: Tensor | None,
        readers: Sequence[int],
        sources: Sequence[int],
        *,
        spare: int = 0,
        table: Sequence[int] | None = None,
        write: Callable[[Tensor], object] | None = None,
    ) -> None:
        """Lend ``packed`` to the readers and tell everybody. ``sources``: who lends something to this rank, known from
        the first: of whoever is interrupted nothing else may be returned. ``spare``: bytes behind it. ``table``: where
        the run for each rank begins and the last one ends, and how long those are that it expects, in elements of
        ``packed``. ``write``: writes what is lent, of which ``packed`` then has the shape alone.
        """
        if self.mail.dropped:
            _look_after(self.mail)
        self.packed, self._sources = packed, sources
        if self.watch is None:
            self._missing, self._partly = list(sources), len(sources) < len(self.mail.others)
        try:
            self._lend(packed, readers, spare, table, write)
            with self.mail.lock:
                self._enter()
        except BaseException:
            own = self.mail.own
            if self.number and own.cells[own.at(self.number)] == self.number:  # Ctrl-C, and the others have heard of it
                if self.watch is not None:
                    self.watch.begin(self)
                self.drop()
            elif self._lent is not None:
                for place in (*readers, self.link.index):
                    self._lent.returned(place)
            raise

    def _lend(
        self,
        packed: Tensor | None,
        readers: Sequence[int],
        spare: int,
        table: Sequence[int] | None,
        write: Callable[[Tensor], object] | None,
    ) -> None:
        mail, link = self.mail, self.link
        if packed is not None and readers and (table or packed.numel()):
            keeps = told.later or bool(spare) or write is not None
            places = (*readers, link.index) if keeps else readers
            try:
                self._lent = lent = memory.room.lend(
                    packed.nbytes + spare, places, [mail.readers[i] for i in readers], patient=not told.later
                )
            except OSError as error:
                self.fail(f"there is no memory to share: {error.strerror or error}")
            if table is not None:
                lent.cells[TABLE : TABLE + len(table)] = array("q", table)
            own = lent.bytes[: packed.nbytes].view(packed.dtype)
            if write is not None:
                write(own)
            elif table is not None and not told.later:  # nobody else reads what this rank keeps
                start, end = table[link.index : link.index + 2]
                own[:start].copy_(packed[:start])
                own[end:].copy_(packed[end:])
            else:
                own.copy_(packed)
            # What is reduced again by who waits no more must not have changed.
            self._own = own if keeps else packed
        elif packed is not None:
            self._own = packed.clone() if told.later else packed
        if table is not None:
            self._tables[link.index] = table

    def _enter(self) -> None:
        mail, lent = self.mail, self._lent
        self.number = number = mail.number + 1
        if mail.is_far():
            self._make_way()
        at, cells = mail.own.at(number), mail.own.cells
        where = (lent.fd, lent.serial, lent.whole, lent.kept) if lent is not None else (0, 0, 0, 0)
        place = (lent.offset, lent.size) if lent is not None else (0, 0)
        watch = self.watch
        says = (0, 0, 0) if watch is None else (watch.stands, watch.gradient, watch.reason)
        said_of = (self.code, self.count, self.root, *where, told.later, *place, self.digest, self.place, *says)
        cells[at] = 0  # what stood there is not to be written to any more
        cells[at + 1 : at + ENTRY_CELLS] = array("q", said_of)
        mail.open[number] = self
        if lent is not None:
            lent.number = number
        mail.number = number
        try:
            if watch is not None:
                watch.begin(self)
        finally:  # Ctrl-C, too: the number is taken
            cells[at] = number  # last: now it is there

    def _make_way(self) -> None:
        """Say what was seen, and wait until the others have seen what will be written over."""
        mail = self.mail
        end = time.monotonic() + mail.timeout
        waiting, watch = list(mail.others), self.watch
        first = _Wait(self, end, None if watch is None else partial(watch.see_behind, self.number))
        with watch or contextlib.nullcontext():
            while True:
                calls = list(mail.open.items())  # other threads finish theirs
                seen = next((number - 1 for number, call in calls if not call.look()), self.number - 1)
                for i in mail.others:
                    box = mail.box(i)
                    if box is not None:
                        box.drain(mail.index, seen)
                waiting = [i for i in waiting if mail.own.drained(i) < self.number - ENTRIES // 2]
                if not waiting:
                    return
                first.more(waiting)

    # -------------------------------------------------------------------------------------------- what it waits for

    def expect(self, fill: Fill, result: Any, first: Fill | None = None) -> None:
        """What shall be done with what is read (and ``first``, for the others), and what comes out."""
        self._fill, self._first, self._result = fill, first, result

    def look(self) -> bool:
        """Whether all have come that it waits for; under guard whether it is decided what becomes of it."""
        watch = self.watch  # once: another thread may end the call
        if (not self._missing and watch is None) or self._decided:
            return True
        with self._looking:
            missing, come = [], not self._missing
            for i in self._missing:
                box = self.mail.boxes[i] or self.mail.box(i)
                if box is not None and box.cells[at := box.at(self.number)] == self.number:
                    self._entries[i] = box.cells[at : at + ENTRY_CELLS].tolist()
                    come = True
                else:
                    missing.append(i)
            self._missing = missing
            if watch is None:
                return not missing
            if come and not self._decided:
                self._decide(watch)
            return self._decided

    def _decide(self, watch: Watch) -> None:
        sure, odd, stands, gradient = not self._missing, False, watch.stands, watch.gradient
        for i, entry in self._entries.items():
            if sure:  # now that all are there
                entry[STANDS] = self.stands_of(i)
            odd = odd or entry[DIGEST] != self.digest or entry[STANDS] != stands or entry[GRADIENT] != gradient
        if odd or watch.wavers:
            said_of = {i: (entry[DIGEST], entry[STANDS], entry[GRADIENT]) for i, entry in self._entries.items()}
            leaving, self._odd = watch.weigh(said_of)
            sure = sure and not leaving
        self._decided = sure or self._odd

    def stands_of(self, index: int) -> int:
        """What one that has come says now."""
        box = self.mail.box(index)
        assert box is not None
        return box.cells[box.at(self.number) + STANDS]

    @property
    def is_decided(self) -> bool:
        """Under guard: whether it is known what becomes of it."""
        return self._decided

    @property
    def is_odd(self) -> bool:
        """Under guard: whether nobody reads."""
        return self._odd

    def doubt(self) -> None:
        """One has given up."""
        self._odd = self._decided = True

    def stand(self, stands: int, why: int = 0) -> None:
        """Say how this rank stands to it now, and where the reason is; unless a later call stands there."""
        at, cells, number = self.mail.own.at(self.number), self.mail.own.cells, self.number
        if cells[at] == number:
            cells[at + WHY] = why
            cells[at + STANDS] = stands

    def is_hopeless(self) -> bool:
        """Whether it cannot come to an end, for somebody has left before coming."""
        return any(self.mail.readers[i].is_leaving() for i in self._missing) and not self.look()

    def wait_for_all(self, timeout: float) -> None:
        """Until all have come; CommError if they will not."""
        if self.look():
            return
        if self.watch is not None:
            self.wait_within(None)
            return
        wait = _Wait(self, time.monotonic() + timeout)
        while not self.look():
            wait.more(self._missing)

    @property
    def missing(self) -> list[int]:
        """Those that have not come."""
        return self._missing

    def wait_within(self, timeout: float | None) -> bool:
        """Whether all have come within the time; CommError if they will not, as far as somebody watches."""
        end, watch = math.inf if timeout is None else time.monotonic() + timeout, self.watch
        wait = _Wait(self, None, None if watch is None else lambda _: watch.see())
        if watch is not None:
            watch.for_program = timeout is None
        with watch or contextlib.nullcontext():
            while not self.look():
                if time.monotonic() > end:
                    return False
                wait.more(self._missing)
        return True

    # ---------------------------------------------------------------------------------------------- what it reads

    def finish(self) -> Any:
        """Read, once, and return what was borrowed."""
        return self._read(all_of_it=True)

    def conclude(self) -> Any:
        """The same, for who asks for the result; and see whether calls before this one were the others' too."""
        result, mail = self._read(all_of_it=True), self.mail
        if mail.given or self._partly:
            if self._partly:
                self._partly = False
                mail.given.append((self.number, self.digest))
            compare_given(mail)
        return result

    def read_early(self) -> None:
        """When all have come: do what the others may wait for, and all if they wait for nothing."""
        self._read(all_of_it=self._first is None)

    def _read(self, all_of_it: bool) -> Any:
        with self._once:
            if not self._over:
                try:
                    if self._opened is None:
                        got = self._got(self._segments)
                        if self._first is not None:
                            self._first(got)
                        self._opened = got
                    if all_of_it and self._fill is not None:
                        self._fill(self._opened)
                except Exception as error:  # after Ctrl-C it can be read again
                    self._error = error
                if all_of_it or self._error is not None:
                    self._end(self._segments)
        if self._error is not None:
            raise self._error
        return self._result

    def _end(self, segments: Mapping[int, Segment]) -> None:
        """Return what was borrowed, and let go of everything."""
        self._over = True
        if self.record[ENDED] is None:
            if self._error is None:
                self.record[ENDED] = time.monotonic()
            else:
                failed(self.record, self._error)
        place = self.link.index
        for segment in segments.values():
            segment.returned(place)
        if self._lent is not None:
            self._lent.returned(place)
        self.mail.open.pop(self.number, None)
        self._decided, self.watch = True, None  # that knows this call: a circle would keep the result
        self._fill = self._first = self._opened = self.packed = self._own = self._lent = None
        self._segments = {}

    def quit(self, error: Exception) -> None:
        """Nobody reads it: all ranks know that, or will."""
        with self._once:
            if not self._over:
                self._error, self._decided = error, True
                self._take_back()
                self._end(self._segments)

    def _take_back(self) -> None:
        """What was lent, once: it may be lent again then."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.take_back()

    def drop(self) -> None:
        """Nobody waits for it: what was lent to this rank is returned all the same, when all have come."""
        if not self._over and self not in self.mail.dropped:
            self.mail.dropped.append(self)

    def give_up(self) -> None:
        """Return what was lent to this rank, if the call cannot come to an end any more. Under guard nobody has read
        then, and each takes back its own.
        """
        watch = self.watch
        if watch is not None:
            watch.settle()
        if not self.is_hopeless():
            return
        why = f"{named(self._missing)} did not come before the end: {self}."
        if watch is not None:
            watch.resign(why)
            return
        with self._once:
            if not self._over:
                self._error = CommError(text(self.name, why))
                self._borrow_unread(self._segments)
                self._end(self._segments)

    @property
    def name(self) -> str:
        """Of the primitive."""
        return name_of(self.code)

    def _got(self, segments: dict[int, Segment]) -> list[Tensor]:
        link = self.link
        packed = self.packed
        wrong, lost, watch = False, None, self.watch
        if self._odd and watch is not None:
            self._take_back()
            watch.differ()
        for i in self._sources:
            entry = self._entries[i]
            if watch is None and (entry[DIGEST] != self.digest or self._another_root(entry)):
                wrong = True
            elif entry[SERIAL]:
                try:
                    segments[i] = self._borrow(entry, i)
                except CommError as error:  # the others want back what they have lent
                    lost = error
        if wrong:
            self._borrow_unread(segments)
            differ_in(self.mail, self.number)
        if lost is not None:
            raise lost
        if packed is None:
            return []
        got = [packed[:0]] * link.size
        for i, segment in segments.items():
            stop = self.total * self._nbytes()
            if self._tables:
                self._tables[i] = table = segment.cells[TABLE : TABLE + 2 * link.size + 1].tolist()
                stop = table[link.size] * packed.element_size()
            got[i] = segment.bytes[:stop].view(packed.dtype)
        if self._tables:
            self._check_runs()
        assert self._own is not None
        got[link.index] = self._own
        return got

    def _check_runs(self) -> None:
        """What goes from one rank to another has one length for both: all compare all, so that all find the same."""
        size = self.link.size
        tables = [self._tables[i] for i in range(size)]
        sent = [tuple(map(sub, table[1 : size + 1], table[:size])) for table in tables]
        wanted = list(zip(*(table[size + 1 :] for table in tables), strict=True))
        if sent != wanted:
            assert self.packed is not None
            if self.watch is not None:
                self.watch.runs_differ()
            width = dtype_of(self.code).itemsize // self.packed.element_size()
            pairs = ((i, j) for i in range(size) for j in range(size))
            i, j = next((i, j) for i, j in pairs if sent[i][j] != wanted[i][j])
            runs_differ(self.mail, self.number, (i, sent[i][j] // width), (j, wanted[i][j] // width))

    def _nbytes(self) -> int:
        return self.count * dtype_of(self.code).itemsize

    def _another_root(self, entry: list[int]) -> bool:
        if self.code >> 16 == PERMUTE:
            return entry[ROOT] != self.link.index
        theirs = entry[ROOT]
        if theirs == self.root:
            return False
        return theirs >= 0 or self.root >= 0 or differ(_NOBODY - theirs, _NOBODY - self.root)

    def of(self, whose: int) -> None:
        """It sums the gradient of this leaf: the word stands in the place of a root, which it has none of."""
        self.root = _NOBODY - whose

    def _borrow(self, entry: list[int], source: int) -> Segment:
        try:
            return self.mail.borrow(entry, source)
        except OSError as error:
            found = peers.account([self.link.ranks[source]], closed=True)
            what = f"the memory of index {source} cannot be read: {error.strerror or error}"
            self.fail(f"{found}: {what}" if found else what)

    def _borrow_unread(self, segments: dict[int, Segment]) -> None:
        """What is lent to this rank, to return it; what is not may be lent for a later call by now."""
        mail = self.mail
        for i in mail.others:
            entry = None if i in segments else entry_of(mail.box(i), self.number)
            if entry is not None and is_lent_to(mail.index, entry):
                with contextlib.suppress(OSError):
                    segments[i] = mail.borrow(entry, i)

    def table_of(self, i: int) -> tuple[int, int]:
        """Where what index i has for this rank begins and ends, in what it lends."""
        return self._tables[i][self.link.index], self._tables[i][self.link.index + 1]

    def reduce_own(self, got: list[Tensor], op: str, out: Tensor) -> None:
        """Each rank its part."""
        size, index = self.link.size, self.link.index
        assert self._lent is not None
        part = out.tensor_split(size)[index]
        self._lent.cells[STATE] = _REDUCING
        dtypes.fold(op, [each.tensor_split(size)[index] for each in got], out=part)
        spare = self._nbytes()
        mine = self._lent.bytes[spare : spare + part.nbytes]
        mine.view(out.dtype).copy_(part)
        self._lent.cells[STATE] = _REDUCED

    def reduce_others(self, got: list[Tensor], op: str, out: Tensor) -> None:
        """The other parts: read, or reduced here for those that are not waiting now."""
        size, index = self.link.size, self.link.index
        parts = out.tensor_split(size)
        late = []
        for step in range(1, size):
            i = (index + step) % size
            if not self._take(i, parts[i]):
                late.append(i)
        for i in late:
            if not self._take(i, parts[i], wait=True):
                dtypes.fold(op, [each.tensor_split(size)[i] for each in got], out=parts[i])

    def _take(self, i: int, part: Tensor, wait: bool = False) -> bool:
        """Copy what index i has reduced, if it has or is about to."""
        segment = self._segments[i]
        if wait:
            waiting, end = _Wait(self, None), time.monotonic() + _HELPFUL
            while (state := segment.cells[STATE]) != _REDUCED:
                if (state != _REDUCING and self._entries[i][LATER]) or time.monotonic() > end:
                    return False
                try:
                    waiting.more([i])
                except CommError:  # it is gone: everything to do its part is here
                    return False
        elif segment.cells[STATE] != _REDUCED:
            return False
        start = self._nbytes()
        part.copy_(segment.bytes[start : start + part.nbytes].view(part.dtype))
        return True

    # ------------------------------------------------------------------------------------------------------ errors

    def __str__(self) -> str:
        return said(self.code, self.count, self.root)

    def whereabouts(self) -> tuple[list[int], dict[int, str]]:
        """Who else has made this call, and what the mailboxes of the others say."""
        boxes = {i: self.mail.box(i) for i in self.mail.others}
        came = [i for i, box in boxes.items() if box is not None and box.cells[box.at(self.number)] >= self.number]
        return came, {i: last_said(box) for i, box in boxes.items() if i not in came}

    def expire(self, missing: list[int]) -> NoReturn:
        """The mesh's time is up."""
        raise CommError(self.late(missing))

    def late(self, missing: list[int]) -> str:
        """That the mesh's time is up, in words."""
        found = peers.account([self.link.ranks[i] for i in missing])
        late = Late(self.name, self.link.log, self.record, self.mail.timeout, missing, *self.whereabouts(), found)
        return late_text(late)

    def fail(self, what: str) -> NoReturn:
        """With where this was, and what to look at."""
        raise CommError(
            text(
                self.name,
                f"the transport failed: {what}",
                got=f"call {self.number} of index {self.link.index} of a group of {self.link.size}: {self}",
                fix="look at the other ranks: the first one that failed or stopped is the cause",
            )
        )


class _Wait:
    """Waiting for other ranks: look, give way, sleep, and now and then see whether they are alive."""

    __slots__ = ("_call", "_end", "_gone", "_looks", "_next", "_pause", "_sees")

    def __init__(self, call: Call, end: float | None, sees: Callable[[Sequence[int]], None] | None = None) -> None:
        """``sees``: who else asks now and then whether those that are missing will come."""
        self._call, self._end, self._sees = call, end, sees
        self._looks, self._pause, self._next = 0, _FIRST_PAUSE, 0.0
        self._gone: dict[int, str] = {}

    def more(self, missing: Sequence[int]) -> None:
        """A little, after having looked for what is missing."""
        if self._gone and (gone := [self._gone[i] for i in missing if i in self._gone]):
            # and nothing has come that they did before they went; whose end followed from another's is not the cause
            self._call.fail(min(gone, key=peers.distance))
        self._looks += 1
        if self._looks < _LOOKS:
            os.sched_yield()
            return
        time.sleep(self._pause)
        self._pause = min(1.2 * self._pause, _LONGEST_PAUSE)
        now = time.monotonic()
        if now > self._next:
            self._next = now + _ALIVE
            (self._sees or self._see)(missing)
        if self._end is not None and now > self._end:
            self._call.expire(list(missing))

    def _see(self, missing: Sequence[int]) -> None:
        mail = self._call.mail
        for i in missing:
            box, neighbour = mail.box(i), mail.neighbours[i]
            assert neighbour is not None
            who = f"rank {self._call.link.ranks[i]}, process {neighbour.pid}"
            ended = neighbour.is_gone()
            if ended or (box is not None and box.state() != HERE):
                why = peers.reason(self._call.link.ranks[i])
                # Who has said why has left, whether or not its process has come to its end meanwhile.
                how = "has ended" if ended and not why else peers.LEFT
                self._gone[i] = f"index {i} {how} ({who})" + (f": {why}" if why else "")


class Reading(Pending):
    """A call that is waited for later."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call
        call.record[THREAD] = 0

    def wait(self, timeout: float | None) -> Any:
        """Wait for the others, and read."""
        call = self._call
        call.record[THREAD] = threading.get_ident()
        limit = call.mail.timeout if timeout is None and call.watch is None else timeout
        if not call.wait_within(limit):
            missing = list(call.missing)
            has = "has" if len(missing) == 1 else "have"
            found = "" if timeout is not None else peers.account([call.link.ranks[i] for i in missing])
            what = f"{named(missing)} {has} not made the call{f' ({found})' if found else ''}"
            raise TimedOutError(what, missing, *call.whereabouts(), told=lambda: call.late(missing))
        return call.conclude()

    def record(self) -> Record:
        """The call's."""
        return self._call.record

    def done(self) -> bool:
        """Whether all have come, or somebody will not."""
        call = self._call
        watch = call.watch
        return call.look() or (call.is_hopeless() if watch is None else watch.is_hopeless())

    def withdraw(self, seconds: float) -> bool:
        """Under guard."""
        watch = self._call.watch
        return self._call._over or (watch is not None and watch.withdraw(seconds))

    def meet(self) -> None:
        """Wait until all have made the call, and read what can be read without waiting more."""
        self._call.wait_for_all(self._call.mail.timeout)
        self._call.read_early()

    def read_early(self) -> bool:
        """If all have made the call, read what can be read without waiting; whether they have."""
        if not self._call.look():
            return False
        self._call.read_early()
        return True

    def abandon(self) -> None:
        """What was lent to us must be returned all the same."""
        if self._call.record[ENDED] is None:
            self._call.record[ENDED] = DROPPED
        self._call.drop()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):  # at the end of the interpreter
            if not self._call._over:
                self.abandon()


class _Reader:
    """Another rank of a group, as one who has been lent something."""

    def __init__(self, mail: Mail, index: int) -> None:
        self._mail, self._index, self.place = mail, index, index

    def is_gone(self) -> bool:
        """Whether the process has ended, or has nothing to do with the group any more."""
        return self._is(GONE)

    def is_leaving(self) -> bool:
        """Whether it will make no more calls."""
        return self._is(LEAVING)

    def entry(self, number: int) -> list[int] | None:
        """What this rank has written of a call."""
        return entry_of(self._mail.box(self._index), number)

    def own_entry(self, number: int) -> list[int] | None:
        """What its lender has."""
        return entry_of(self._mail.own, number)

    def told_of(self, number: int) -> str:
        """Who it is, and what it has not read."""
        neighbour = self._mail.neighbours[self._index]
        who = f"index {self._index} (process {0 if neighbour is None else neighbour.pid})"
        mine, theirs = self.own_entry(number), self.entry(number)
        given = "a call" if mine is None else said(mine[CODE], mine[COUNT], mine[ROOT])
        if theirs is None:
            return f"{who} has not made call {number}, {given}"
        called = said(theirs[CODE], theirs[COUNT], theirs[ROOT])
        return f"{who} of call {number}, {given}" + (f", and has called {called}" if called != given else "")

    def _is(self, state: int) -> bool:
        neighbour, box = self._mail.neighbours[self._index], self._mail.box(self._index)
        return (box is not None and box.state() >= state) or (neighbour is not None and neighbour.is_gone())


def _finish(call: Call) -> None:
    """For those who do not wait: whatever the caller is in the middle of has nothing to do with it."""
    # Its result may have been made in inference mode.
    with contextlib.suppress(Exception), _torch.outside_transforms(), torch.inference_mode():
        if call.is_odd:
            call.quit(CommError("the ranks have made different calls"))
        call.finish()


def _look_after(mail: Mail) -> None:
    """Read what nobody waits for."""
    for call in list(mail.dropped):
        if call.look():
            _finish(call)
        else:
            call.give_up()
        if call._over:
            with contextlib.suppress(ValueError):  # another thread was here
                mail.dropped.remove(call)


def retire(mail: Mail) -> None:
    """This rank makes no more calls here: its box may serve another sequence when the others have retired theirs."""
    mail.own.say(GONE)
    others = {i: other.arena for i, other in enumerate(mail.neighbours) if other is not None}
    memory.arena().retire(memory.Retired(mail.key, mail.index, mail.number, others))


def take_leave(mails: Sequence[Mail]) -> None:
    """Read what has come, and wait until the others have read what came from here.

    A group that was adopted is left at the end of the process only: it goes on, and may be adopted again.
    """
    for mail in mails:
        mail.own.say(LEAVING)
    failing = sys.exc_info()[0] is not None or hasattr(sys, "last_value") or hasattr(sys, "last_exc")
    patience = _FAILING if failing else max([_PATIENCE, *(mail.timeout for mail in mails)])
    end, pause = time.monotonic() + patience, 1e-5
    tell = time.monotonic() + _QUIETLY
    while True:
        for mail in mails:
            for call in list(mail.open.values()):
                if call.look():
                    _finish(call)
                else:
                    call.give_up()
        wanted = memory.room.wanted() if mails else []
        waited_for = [each for each in wanted if not _calls_otherwise(*each)]
        if not waited_for or time.monotonic() > end:
            break
        if time.monotonic() > tell:
            tell = math.inf
            _say("waits at its end, for what was given has not been read", waited_for)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    if wanted and not failing:
        _say("ends, and what was given has not been read", wanted)
    for mail in mails:
        mail.own.say(GONE)


def _calls_otherwise(segment: Segment, reader: Any) -> bool:
    """Whether a reader has made another call instead, so that it will not read."""
    theirs, mine = reader.entry(segment.number), reader.own_entry(segment.number)
    return theirs is not None and mine is not None and theirs[DIGEST] != mine[DIGEST]


def _say(what: str, wanted: Sequence[tuple[Segment, Any]]) -> None:
    """To whoever looks at this process, which nobody hears otherwise."""
    shown = list(dict.fromkeys(reader.told_of(segment.number) for segment, reader in wanted))
    with contextlib.suppress(Exception):
        sys.stderr.write(
            f"meshcomm: process {os.getpid()} {what}: {'; '.join(shown[:4])}{'; ...' if len(shown) > 4 else ''}.\n"
            "  fix: every rank of an axis must make the same calls on it in the same order, with the same src and dst\n"
        )
        sys.stderr.flush()
