"""Small calls that are waited for at once: most calls, and most of them like one before.

What such a call says is known from the last one like it, and where the others write and lend theirs: so it is made in
one function, with the protocol of :mod:`meshcomm.runtime.transports.shared.call`. As soon as anything is not as in
nearly all of them (somebody does not come for a while, says something else, lends nothing; this rank is interrupted) it
goes on as a ``Call`` of that file, which knows of all that.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from meshcomm import _torch
from meshcomm.runtime.call import told
from meshcomm.runtime.pending import queued
from meshcomm.runtime.process import lending
from meshcomm.runtime.process.boxes import ENTRIES, ENTRY
from meshcomm.runtime.process.lending import LARGE, TABLE, Segment, put
from meshcomm.runtime.process.reuse import LEAST, reserve
from meshcomm.runtime.recorder import ENDED, Log, Record, failed
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.exact import EXACT
from meshcomm.runtime.transports.shared.differences import compare_given
from meshcomm.runtime.transports.shared.entry import NOBODY, SMALL
from meshcomm.runtime.transports.shared.in_parts import follow, parts_of
from meshcomm.runtime.transports.shared.lexicon import Meaning
from meshcomm.runtime.transports.shared.mailbox import FAR, Mail
from meshcomm.runtime.transports.shared.waiting import give_way
from meshcomm.runtime.transports.shared.words import (
    DIGEST,
    ENTRY_CELLS,
    KEPT,
    OFFSET,
    ROOT,
    SERIAL,
    brief,
    meaning_of,
)

_MOST = 2**22
"""Bytes of a tensor up to which a step of Python's is felt."""
_KEPT, _PLACES = 512, 64
"""How many calls of a group are known, or were made once, and of each how many places where something is lent."""
_KINDS = frozenset((Tensor, Parameter))

Form = Callable[[torch.Size, int], torch.Size]
"""Of the shape of a tensor and the number of ranks."""


def _as_it_is(shape: torch.Size, _: int) -> torch.Size:
    return shape


def _in_rows(shape: torch.Size, n: int) -> torch.Size:
    return torch.Size((n, shape[0] // n, *shape[1:]))


def _copied(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    (x,) = parts
    if x.dtype not in dtypes.PLAIN and x.dim():  # of which torch copies some, uint16 say, element by element
        return torch.cat((x,)) if out is None else torch.cat((x,), out=out)
    return x.clone() if out is None else out.copy_(x)


def _added(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    return torch.add(*parts) if out is None else torch.add(*parts, out=out)


NOTHING: Any = object()
"""What a call gives that has come to its end where nothing is read."""


def _nothing(parts: Sequence[Tensor], out: Tensor | None = None) -> Any:
    return NOTHING


@dataclass(frozen=True, eq=False)
class Way:
    """One way to call a collective."""

    name: str
    form: Form = _as_it_is
    """What is said of the tensor."""
    part: Form = _as_it_is
    """What a rank reads of what another one lends."""
    rows: bool = False
    """Whether that is its own row of as many as there are ranks."""
    take: Callable[..., Tensor] | None = None
    """Makes the result of a list of these, in memory of its own or in ``out``; None: they are reduced."""
    src: bool = False
    """Whether all read from one."""
    dst: bool = False
    """Whether one reads from all."""


ALL_REDUCE = Way("all_reduce")
ALL_GATHER = Way("all_gather", part=lambda shape, _: torch.Size((1, *shape)), take=torch.cat)
GATHER_FLAT = Way("all_gather", take=torch.cat)
REDUCE_SCATTER = Way("reduce_scatter", part=lambda shape, _: shape[1:], rows=True)
SCATTER_FLAT = Way("reduce_scatter", _in_rows, lambda shape, n: _in_rows(shape, n)[1:], rows=True)
SWAP_FLAT = Way(
    "all_to_all",
    lambda shape, _: torch.Size((shape.numel(),)),
    lambda shape, n: _in_rows(shape, n)[1:],
    rows=True,
    take=torch.cat,
)
PERMUTE = Way("permute", take=_copied)
BROADCAST = Way("broadcast", take=_copied, src=True)
REDUCE = Way("reduce", dst=True)
GATHER = Way("gather", part=lambda shape, _: torch.Size((1, *shape)), take=torch.cat, dst=True)
JOIN = Way("gather", take=torch.cat, dst=True)
SCATTER = Way("scatter", lambda shape, _: shape[1:], lambda shape, _: shape[1:], rows=True, take=_copied, src=True)
SCATTERED = Way("scatter", rows=True, take=_copied, src=True)
"""The same where there is no tensor, but one like the result."""


class _UnderWay:
    """In the place of a call that only the thread that makes it has to do with."""

    watch = None
    is_over = False

    def look(self) -> bool:
        """Nobody else looks."""
        return False

    def end_unasked(self) -> None:
        """Who makes it does."""


_UNDER_WAY = _UnderWay()


class _Known:
    """A call that was made before: all of it but its number and the tensor."""

    __slots__ = (
        "called", "count", "dtype", "entries", "form", "index", "made", "meaning", "nbytes", "noted", "others",
        "own_at", "part", "partly", "parts", "places", "readers", "reads", "root", "rooted", "rows", "shape", "sources",
        "spans", "table", "take", "total", "turn", "who", "whole",
    )  # fmt: skip

    def __init__(self, link: Any, way: Way, op: str, x: Tensor, at: Any, said: tuple[Any, ...]) -> None:
        mail, n, index = link.mail, link.size, link.index
        self.called, tree, whose = said
        self.form = form = way.form(x.shape, n)
        self.index, self.dtype, self.count, self.total = index, x.dtype, form.numel(), n if way.name == "scatter" else 1
        self.shape = shape = torch.Size((n, *form)) if way is SCATTERED else x.shape
        self.nbytes = shape.numel() * x.itemsize
        self.noted = root = at if way.src or way.dst else NOBODY
        key = way.name, op, x.dtype, form, root, self.called, tree
        self.turn, meaning = mail.lexicon.turn, mail.known.get(key)
        self.meaning: Meaning = meaning or meaning_of(mail.lexicon, key, self.called, tree, *key[:5])
        self.readers: Sequence[int] = mail.others
        self.reads: Sequence[int] = range(n)
        self.root = self.rooted = root if whose is None else NOBODY - whose.word
        self.table = array("q")
        if way.src:
            self.readers, self.reads = mail.others if index == at else (), (at,)
        elif way.dst:
            self.readers, self.reads = ((), self.reads) if index == at else ((at,), ())
        elif way is PERMUTE:
            source, self.root = at
            self.readers, self.reads, self.rooted = (self.root,), (source,), index
        elif way is SWAP_FLAT:
            width = 1 if x.dtype in dtypes.PLAIN else x.itemsize  # as who gives lengths says them: what moves has it
            run, self.count = width * self.count // n, 0  # it may differ
            self.table = array("q", [*(run * i for i in range(n + 1)), *[run] * n])
        self.take = (way.take or _reduction(op, x.dtype, n)) if self.reads else _nothing
        self.part, self.rows = part, rows = way.part(x.shape, n), n if way.rows else 0
        spans = [slice(index), slice(index + 1, n)] if rows and self.nbytes > SMALL else []
        self.spans = [
            span for span in spans if range(n)[span]
        ]  # the others' rows, where it pays to leave out one's own
        whole = torch.Size((n * part[0], *part[1:])) if self.take is torch.cat else part
        self.made = whole.numel() * x.itemsize
        self.whole = whole if self.reads and self.made >= LEAST else None
        self.places, self.who = (*self.readers, index), [mail.readers[i] for i in self.readers]
        self.others = [(box, box.cells, box.listens) for box in map(mail.boxes.__getitem__, mail.others)]
        boxes = [(k, i, mail.boxes[i]) for k, i in enumerate(self.reads) if i != index]
        self.sources: list[Any] = [(k, i, box.cells, box.first, {}) for k, i, box in boxes]
        self.own_at = None if index not in self.reads else self.reads.index(index)
        self.partly = len(boxes) < n - 1
        self.entries: dict[Segment | None, Any] = {}
        tells = n == 2 and (way.dst or way.name == "scatter")
        self.parts: Any = None
        if self.nbytes >= LARGE:
            self.parts = parts_of(self, x.itemsize, tells, op if way.take is None else "")

    def entry(self, lent: Segment | None) -> tuple[Any, ...]:
        """What is said where this is lent; where the tensor is written to, and what this rank reads of it."""
        where = (0,) * 6 if lent is None else (lent.fd, lent.serial, lent.whole, lent.kept, lent.offset, lent.size)
        code, digest, place = self.meaning
        says = array("q", (code, self.count, self.root, *where[:4], 0, *where[4:], digest, place, 0, 0, 0))
        found: tuple[Any, ...] = says, None, None
        if lent is not None:
            found = says, *_torch.lasting(self.views, lent)
        if lent is None or lent.kept:
            _keep(self.entries, lent, found)
        return found

    def views(self, lent: Segment) -> tuple[Any, Tensor]:
        """Of what lies in there: as the tensor, or the rows of it that are written, and what this rank reads of it."""
        flat = lent.part(self.nbytes, self.dtype)
        if self.spans:
            return [(span, flat.view(self.rows, -1)[span]) for span in self.spans], self.cut(flat)
        return flat.view(self.shape), self.cut(flat)

    def read_of(self, lent: Segment) -> tuple[Tensor, Any]:
        """What this rank reads of what lies in there, and the same in parts."""
        x = self.views(lent)[1]
        return x, None if self.parts is None else self.parts.of(lent, x)

    def cut(self, flat: Tensor) -> Tensor:
        """What this rank reads."""
        return (flat.view(self.rows, -1)[self.index] if self.rows else flat).view(self.part)

    def lend_rows(self, x: Tensor, written: Sequence[tuple[slice, Tensor]]) -> Tensor:
        """Those that the others read; the one that this rank reads."""
        rows = x.reshape(self.rows, -1)
        for span, into in written:
            put(into, rows[span])
        return rows[self.index].view(self.part)

    def own_row(self, x: Tensor) -> Tensor:
        """What this rank reads of its own dense tensor."""
        if self.part == x.shape[1:]:
            return x[self.index]
        return x.view(self.rows, -1)[self.index].view(self.part)

    def borrowed(self, mail: Mail, i: int, cells: Any, at: int, places: dict[Any, Any]) -> tuple[Any, ...] | None:
        """What this rank reads of what index i lends, its flags, its table of runs, and the same for who reads it in
        parts; None if it cannot be read.
        """
        entry = cells[at : at + ENTRY_CELLS].tolist()
        if not entry[SERIAL]:
            return None
        try:
            segment = mail.borrow(entry, i)
        except OSError as error:
            if isinstance(error, TimeoutError):  # of a signal's
                raise
            return None
        table = segment.cells[TABLE : TABLE + len(self.table)]
        if self.table and table != self.table:  # of other lengths: as much need not lie there
            return None
        x, in_parts = _torch.lasting(self.read_of, segment)
        found = x, segment.flags, table, in_parts
        if entry[KEPT]:
            _keep(places, (entry[SERIAL], entry[OFFSET]), found)
        return found

    def read(
        self, mail: Mail, number: int, x: Tensor, own: Any, lent: Segment | None, record: Record, address: int
    ) -> Tensor | None:
        """The result, and the call is over; None if it has to go on as a ``Call``."""
        out: Any = None
        flags: list[Any] = []
        if self.whole is not None:  # who has an address knows that nothing is in the way
            out = reserve.again(self.made, self.whole, x) if address else None
            out = reserve.empty(self.whole, x) if out is None else out
        result: Any = out
        if address and self.parts.follows:
            if not follow(self, mail, number, own, address, out, flags):
                return None
        else:
            parts: list[Any] = [None] * len(self.reads)
            if self.own_at is not None:
                parts[self.own_at] = own
            slot, digest, rooted, end = number % ENTRIES * ENTRY, self.meaning[1], self.rooted, 0.0
            for k, i, cells, first, places in self.sources:
                at = first + slot
                while cells[at] != number:
                    if (end := give_way(end)) < 0:
                        return None
                if cells[at + DIGEST] != digest or cells[at + ROOT] != rooted:
                    return None
                place = cells[at + SERIAL], cells[at + OFFSET]
                found = places.get(place) or self.borrowed(mail, i, cells, at, places)
                if found is None:
                    return None
                parts[k], flag, table, _ = found
                if self.table and table != self.table:
                    return None
                flags.append(flag)
            result = self.take(parts) if out is None else self.take(parts, out=out)
        left = iter(flags)
        record[ENDED] = monotonic()  # no call from here to the returns: Ctrl-C comes with one
        del mail.open[number]  # from here on nobody else returns what was lent
        if lent is not None:
            lent.flags[self.index] = 0
        try:
            for flag in left:
                flag[self.index] = 0
        except BaseException:  # Ctrl-C, between two of them; one that was returned may be lent again
            for flag in left:
                flag[self.index] = 0
            raise
        return result  # type: ignore[no-any-return]

    def goes_on(
        self, link: Any, record: Record, number: int, lent: Segment | None, x: Tensor
    ) -> tuple[Any, list[Tensor]]:
        """The same as a ``Call``, of which all is said; and where its result will be."""
        result: list[Tensor] = []

        def part(i: int, flat: Tensor) -> Tensor:
            run = dtypes.from_bytes(flat[slice(*call.table_of(i))] if self.table else flat, self.dtype)
            return run.view(self.part) if self.table else self.cut(run)

        def fill(got: list[Tensor]) -> None:
            parts = [part(i, got[i]) for i in self.reads]
            result.append(
                self.take(parts) if self.whole is None else self.take(parts, out=reserve.empty(self.whole, x))
            )

        call = link.call_of(self.meaning, self.count, self.root, record)
        call.total = self.total
        own = dtypes.to_bytes(x.detach())
        call.was_posted(number, lent, own, [i for _, i, *_ in self.sources], self.table)
        call.expect(fill, None)
        return call, result

    def drop(self, link: Any, record: Record, number: int, lent: Segment | None, x: Tensor) -> None:
        """Nobody waits for it: who makes it was interrupted."""
        call = link.mail.open[number]
        (self.goes_on(link, record, number, lent, x)[0] if call is _UNDER_WAY else call).drop()

    def compare(self, mail: Mail, number: int) -> None:
        """Those before it, and, at one of the next ones, this one with those that it has read nothing from."""
        if self.partly:
            (mail.keep_given() if mail.given is None else mail.given).append((number, self.meaning.digest))
        compare_given(mail)


def _keep(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) >= _PLACES:
        known.clear()
    known[key] = value


def _reduction(op: str, dtype: torch.dtype, n: int) -> Callable[..., Tensor]:
    if dtypes.is_one_sum(op, dtype, n):
        return _added
    return partial(dtypes.fold, op)


def _known(link: Any, way: Way, op: str, x: Tensor, at: Any) -> _Known | None:
    """The call that is made now, if it is one of these."""
    mail, said = link.mail, told.call if link.hears else None
    if told.later or queued or link.watches or type(x) not in _KINDS or (mail.number + 1) % FAR == 0:
        return None
    if (way.src or way.dst) and _torch.functorch_active():  # which lets nobody write to what is known from outside
        return None
    key = way, op, x.dtype, x.shape, at, said if said is None or type(said) is tuple else (said := brief(said))
    try:
        found: _Known | None = mail.calls.get(key)
    except TypeError:  # an argument without a hash
        return None
    if found is None or found.turn != mail.lexicon.turn:
        return _learned(link, way, op, x, at, said, key)
    return found


def _learned(link: Any, way: Way, op: str, x: Tensor, at: Any, said: Any, key: Any) -> _Known | None:
    """A call that is not known, if it is one of these, and is made for the second time: most meshes make many calls
    again, and what makes each but once shall keep little.
    """
    mail = link.mail
    if not 0 < x.nbytes <= _MOST or x.dtype not in dtypes.COPIED or op in EXACT:
        return None
    if None in map(mail.box, mail.others) or (way is PERMUTE and (None in at or link.index in at)):
        return None
    if len(mail.calls) >= _KEPT:
        mail.calls.clear()
    if (first := hash(key)) not in mail.calls:
        mail.calls[first] = None
        return None
    known = mail.calls[key] = _Known(link, way, op, x, at, said or ((), (), None))
    return known


def at_once_in(log: Log) -> Callable[..., Tensor | None]:
    """``at_once(link, way, op, x, at=-1)``: what the call gives, ``NOTHING`` where nothing is read; or None, and it is
    not made, if it is not small, or not as most are. ``at``: the root, or source and destination.

    A closure, with as few steps as can be: each is felt.
    """
    number, keep = log.number, log.records.append

    def at_once(link: Any, way: Way, op: str, x: Tensor, at: Any = NOBODY) -> Tensor | None:
        mail, known = link.mail, _known(link, way, op, x, at)
        if known is None:
            return None
        if mail.dropped:
            mail.look_after()
        mine, posted, tells = 0, False, False
        record: Any = None
        parts: Any = None
        lent: Any = None
        try:
            try:
                if known.readers:
                    lent = lending.room.lend(known.nbytes, known.places, known.who, patient=True)
            except OSError as error:
                if isinstance(error, TimeoutError):  # of a signal's
                    raise
                return None  # there is no memory to lend: the longer way says so
            entry, written, own = known.entries.get(lent) or known.entry(lent)
            parts = known.parts
            address = 0 if parts is None else parts.address(x)
            tells = bool(address) and lent is not None and parts.tells
            if lent is not None:
                if address:
                    if known.spans and not parts.follows:
                        own = known.own_row(x)
                    if not tells:
                        parts.write(lent, address)
                elif known.spans:
                    own = known.lend_rows(x, written)
                elif known.nbytes < LARGE:
                    written.copy_(x)
                else:
                    put(written, x)
                if known.table:
                    lent.cells[TABLE : TABLE + len(known.table)] = known.table
            elif address:  # of what is read in parts, which is copied from there
                own = x if parts.reduces else None
            elif known.own_at is not None:
                own = dtypes.plain(x).view(known.part)
            cells, first = mail.own.cells, mail.own.first
            with mail.lock:
                mine = mail.number + 1
                if mine % FAR == 0:  # another thread was here
                    back, lent = lent, None
                    if back is not None:
                        back.take_back()
                    return None
                record = [
                    number(), way.name, op, known.dtype, known.form, monotonic(), None, known.called, known.noted,
                    get_ident(),
                ]  # fmt: skip
                keep(record)
                place = first + mine % ENTRIES * ENTRY
                cells[place] = 0  # what stood there is not to be written to any more
                cells[place + 1 : place + ENTRY_CELLS] = entry
                # No call until it is there: Ctrl-C comes with one.
                posted, mail.open[mine], mail.number = True, _UNDER_WAY, mine
                if lent is not None:
                    lent.number = mine
                cells[place] = -mine if tells else mine
            if tells:
                parts.write(lent, address)
                cells[place] = mine
            for box, there, listens in known.others:
                if there[listens]:
                    box.ring()
            result = known.read(mail, mine, x, own, lent, record, address)
            if result is None:
                call, results = known.goes_on(link, record, mine, lent, x)
                call.conclude(mail.timeout, awake=0.0)
                return results[0]
        except BaseException as error:
            if posted and mine in mail.open:
                if tells and cells[place] != mine:
                    parts.finish(lent, address)
                mail.number, cells[place] = max(mail.number, mine), mine  # Python 3.10 is interrupted anywhere
                known.drop(link, record, mine, lent, x)
            elif lent is not None and (record is None or record[ENDED] is None):
                lent.take_back()
            if record is not None and record[ENDED] is None:
                failed(record, error)
            raise
        if known.partly or mail.given:
            known.compare(mail, mine)
        return result

    return at_once
