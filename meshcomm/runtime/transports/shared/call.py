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
import threading
import time
from collections.abc import Callable
from operator import sub
from typing import Any, NoReturn

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import CommError, text
from meshcomm.runtime.health import peers
from meshcomm.runtime.pending import Pending, TimedOutError
from meshcomm.runtime.process.lending import NO_READERS, STATE, TABLE, Segment, put
from meshcomm.runtime.process.memory import READERS
from meshcomm.runtime.recorder import DROPPED, ENDED, THREAD, Record, failed
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.shared.differences import compare_given, differ_in, runs_differ
from meshcomm.runtime.transports.shared.entry import NOBODY, Caller, Entry, Watch
from meshcomm.runtime.transports.shared.lexicon import Meaning
from meshcomm.runtime.transports.shared.mailbox import Mail, Unread
from meshcomm.runtime.transports.shared.waiting import AWAKE, Wait
from meshcomm.runtime.transports.shared.words import (
    DIGEST,
    ENTRY_CELLS,
    GRADIENT,
    ITEMSIZES,
    LATER,
    PERMUTE,
    ROOT,
    SERIAL,
    STANDS,
    dtype_of,
    entry_of,
    is_lent_to,
    named,
)
from meshcomm.runtime.whose import differ

__all__ = ["Call", "Caller", "Fill", "Mail", "Meaning", "Reading", "Watch"]  # all that a guard needs to know

_HELPFUL = 0.1
"""Seconds after which a rank reduces what another one should have reduced."""
_REDUCING, _REDUCED = 1, 2

Fill = Callable[[list[Tensor]], object]
"""Takes what each rank has brought, to be read until it returns."""


class Call(Entry):
    """One call of a collective by this rank, from its entry until everything is read."""

    __slots__ = (
        "_decided", "_entries", "_error", "_fill", "_first", "_looking", "_odd", "_once", "_opened", "_result",
        "_segments", "_unread",
    )  # fmt: skip

    def prepare(self) -> None:
        """For what it waits for and reads."""
        self._entries: dict[int, list[int]] = {}
        self._decided = self._odd = False  # under guard: whether all read, or none does
        self._fill: Fill | None = None
        self._first: Fill | None = None
        self._opened: list[Tensor] | None = None
        self._segments: dict[int, Segment] = {}
        self._result: Any = None
        self._once, self._looking = threading.Lock(), threading.Lock()
        self._error: Exception | None = None
        self._unread: Unread | None = None

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
        sure, odd, said = not self._missing, False, (self.digest, watch.stands, watch.gradient)
        for i, entry in self._entries.items():
            if sure:  # now that all are there
                entry[STANDS] = self.stands_of(i)
            odd = odd or (entry[DIGEST], entry[STANDS], entry[GRADIENT]) != said
        if odd or watch.wavers:
            said_of = {i: (entry[DIGEST], entry[STANDS], entry[GRADIENT]) for i, entry in self._entries.items()}
            leaving, self._odd = watch.weigh(said_of)
            sure = sure and not leaving
        self._decided = sure or self._odd

    def stands_of(self, index: int) -> int:
        """What one that has come says now."""
        box = self.mail.boxes[index] or self.mail.box(index)
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

    def is_hopeless(self) -> bool:
        """Whether it cannot come to an end, for somebody has left before coming."""
        return any(self.mail.readers[i].is_leaving() for i in self._missing) and not self.look()

    def wait_for_all(self, timeout: float, awake: float = AWAKE) -> None:
        """Until all have come; CommError if they will not. ``awake``: as in :class:`Wait`."""
        if self.look():
            return
        if self.watch is not None:
            self.wait_within(None)
            return
        wait = Wait(self, time.monotonic() + timeout, awake=awake)
        while not self.look():
            wait.more(self._missing)

    @property
    def missing(self) -> list[int]:
        """Those that have not come."""
        return self._missing

    def wait_within(self, timeout: float | None) -> bool:
        """Whether all have come within the time; CommError if they will not, as far as somebody watches."""
        end, watch = math.inf if timeout is None else time.monotonic() + timeout, self.watch
        wait = Wait(self, None, None if watch is None else lambda _: watch.see())
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

    def conclude(self, timeout: float | None = None, awake: float = AWAKE) -> Any:
        """The same, for who asks for the result; and see whether calls before this one were the others' too. First
        wait so long for all to come, if that was not done.
        """
        if timeout is not None and not self.look():
            self.wait_for_all(timeout, awake)
        result, mail = self._read(all_of_it=True), self.mail
        if mail.given or self._partly:
            if self._partly:
                self._partly = False
                (mail.given if mail.given is not None else mail.keep_given()).append((self.number, self.digest))
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
                    self._end_in(error)
                else:
                    if all_of_it:
                        self._end()
        if self._error is not None:
            raise self._error
        return self._result

    def _end(self, taken_back: bool = False) -> None:
        """Return what was borrowed, and let go of everything. ``taken_back``: nobody reads what was lent either."""
        if self.record[ENDED] is None:
            if self._error is None:
                self.record[ENDED] = time.monotonic()
            else:
                failed(self.record, self._error)
        place, lent, is_open = self.link.index, self._lent, self.mail.open
        left = iter([segment.flags for segment in self._segments.values()])
        self._over = True  # no call from here to the next one: Ctrl-C comes with one, and nobody ends it a second time
        if lent is not None:
            if taken_back:
                lent.flags[:READERS] = NO_READERS
            else:
                lent.flags[place] = 0
        self._decided, self.watch = True, None  # that knows this call: a circle would keep the result
        self._fill = self._first = self._opened = self.packed = self._own = self._lent = None
        self._segments = {}
        try:
            is_open.pop(self.number, None)
            for flags in left:
                flags[place] = 0
        except BaseException:  # what was returned may be lent again
            for flags in left:
                flags[place] = 0
            raise

    def _end_in(self, error: Exception, taken_back: bool = False) -> None:
        """It has failed: nobody reads it again."""
        self._error = error
        try:
            self._end(taken_back)
        except BaseException:  # Ctrl-C
            if not self._over:
                self._end(taken_back)
            raise

    def quit(self, error: Exception) -> None:
        """Nobody reads it: all ranks know that, or will."""
        with self._once:
            if not self._over:
                self._end_in(error, taken_back=True)

    def end_unasked(self) -> None:
        """For those who do not wait: whatever the caller is in the middle of has nothing to do with it."""
        if not self.look():
            self.give_up()
            return
        # Its result may have been made in inference mode.
        with contextlib.suppress(Exception), _torch.outside_transforms(), torch.inference_mode():
            if self._odd:
                self.quit(CommError("the ranks have made different calls"))
            if not self._over:  # else an error is raised again, in the midst of another one's: a circle of both
                self.finish()

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
                self._borrow_unread(self._segments)
                self._end_in(CommError(text(self.name, why)))

    def _got(self, segments: dict[int, Segment]) -> list[Tensor]:
        link = self.link
        packed = self.packed
        wrong, lost, watch = False, None, self.watch
        mail, digest, root = self.mail, self.digest, self.root
        to_one = self.code >> 16 == PERMUTE
        if self._odd and watch is not None:
            self._take_back()
            watch.differ()
        for i in self._sources:
            entry = self._entries[i]
            another = to_one or entry[ROOT] != root
            if watch is None and (entry[DIGEST] != digest or (another and self._another_root(entry))):
                wrong = True
            elif entry[SERIAL]:
                try:
                    segments[i] = mail.borrow(entry, i)
                except OSError as error:  # the others want back what they have lent
                    lost = i, error
        if wrong:
            self._borrow_unread(segments)
            differ_in(self.mail, self.number)
        if lost is not None:
            self._unreadable(*lost)
        if packed is None:
            return []
        size, dtype, stop = link.size, packed.dtype, self.total * self.count * ITEMSIZES[self.code & 255]
        got = [packed[:0]] * size if len(segments) < size - 1 else [packed] * size
        for i, segment in segments.items():
            if self._tables:
                self._tables[i] = table = segment.cells[TABLE : TABLE + 2 * size + 1].tolist()
                stop = table[size] * dtype.itemsize
            got[i] = segment.part(stop, dtype)
        if self._tables:
            self._check_runs()
        assert self._own is not None
        got[link.index] = self._own
        return got

    def _check_runs(self) -> None:
        """What goes from one rank to another has one length for both: all compare all, so that all find the same."""
        size = self.link.size
        tables = [self._tables[i] for i in range(size)]
        run = tables[0][1]
        even = [*(run * i for i in range(size + 1)), *[run] * size]
        if all(table == even for table in tables):
            return
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

    def _another_root(self, entry: list[int]) -> bool:
        if self.code >> 16 == PERMUTE:
            return entry[ROOT] != self.link.index
        theirs = entry[ROOT]
        if theirs == self.root:
            return False
        return theirs >= 0 or self.root >= 0 or differ(NOBODY - theirs, NOBODY - self.root)

    def _unreadable(self, source: int, error: OSError) -> NoReturn:
        found = peers.account([self.link.ranks[source]], closed=True)
        what = f"the memory of index {source} cannot be read: {error.strerror or error}"
        self.fail(f"{found}: {what}" if found else what)

    def _borrow_unread(self, segments: dict[int, Segment]) -> None:
        """What is lent to this rank, to return it; what is not may be lent for a later call by now. What those lend it
        that have not come yet is returned at one of its next calls.
        """
        mail, absent = self.mail, []
        for i in mail.others:
            entry = None if i in segments else entry_of(mail.box(i), self.number)
            if entry is not None and is_lent_to(mail.index, entry):
                with contextlib.suppress(OSError):
                    segments[i] = mail.borrow(entry, i)
            elif entry is None and i not in segments:
                absent.append(i)
        if absent and self._unread is None:
            unread, dropped = Unread(mail, self.number, absent), mail.dropped
            self._unread = unread  # no call from here to the next line: what is returned twice may be another call's
            dropped += (unread,)

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
        put(mine.view(out.dtype), part)
        self._lent.cells[STATE] = _REDUCED
        self.mail.ring()

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
            waiting, end = Wait(self, None), time.monotonic() + _HELPFUL
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
        return self._call.is_over or (watch is not None and watch.withdraw(seconds))

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
            if not self._call.is_over:
                self.abandon()
