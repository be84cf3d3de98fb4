"""The mailboxes of a group: what other ranks have written of their calls, and what they lend."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from meshcomm.runtime.process import boxes, lending
from meshcomm.runtime.process.boxes import ENTRIES, GONE, LEAVING, Box
from meshcomm.runtime.process.lending import Segment
from meshcomm.runtime.process.memory import Lease
from meshcomm.runtime.process.neighbours import Neighbour
from meshcomm.runtime.transports.shared.lexicon import find, lexicon
from meshcomm.runtime.transports.shared.words import (
    CODE,
    COUNT,
    DIGEST,
    FD,
    GRADIENT,
    KEPT,
    LENGTH,
    OFFSET,
    PLACE,
    ROOT,
    SERIAL,
    SIZE,
    STANDS,
    WHY,
    Given,
    entry_of,
    is_lent_to,
    said,
)

FAR = ENTRIES // 4
"""After how many calls a rank sees whether the others have followed."""
_AT_HAND = 64
"""How many of the segments that others lend are found again without asking for their memory."""


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


class Open(Protocol):
    """A call that has an entry and is not at its end."""

    watch: object
    """Who wants that all ranks make it, or none does."""

    @property
    def is_over(self) -> bool:
        """Whether it is at its end now."""

    def look(self) -> bool:
        """Whether all have come that it waits for, or it is decided that nobody reads."""

    def end_unasked(self) -> None:
        """Come to its end if it can now."""


class Letters(Protocol):
    """The messages of a group."""

    def is_at_rest(self) -> bool:
        """Whether nothing is under way."""

    def close(self) -> None:
        """Nobody writes or reads any more."""


class Mail:
    """The mailboxes of one group: the own one, those of the others, and the number of the last call."""

    __slots__ = (
        "_borrowed", "adopted", "boxes", "calls", "dropped", "failed", "given", "index", "key", "known", "letters",
        "lexicon", "lock", "neighbours", "number", "open", "other_readers", "others", "own", "readers", "timeout",
        "user",
    )  # fmt: skip

    def __init__(self, key: int, index: int, neighbours: Sequence[Neighbour | None], timeout: float) -> None:
        """``neighbours``: None for this rank."""
        self.key, self.index, self.neighbours, self.timeout = key, index, tuple(neighbours), timeout
        self.others = tuple([i for i in range(len(self.neighbours)) if i != index])
        self.own = boxes.arena().make_box(key)
        self.boxes: list[Box | None] = [self.own if each is None else each.arena.box(key) for each in neighbours]
        self.number = 0
        self.adopted = False
        self.user: Callable[[], object | None] | None = None
        """Gives whoever uses it, while somebody does."""
        self.lock = threading.Lock()
        self.readers = [Reader(self, i) for i in range(len(self.neighbours))]
        self.other_readers = [self.readers[i] for i in self.others]
        self.failed = False
        """Whether a message has not come, so that those after it do not either."""
        self.open: dict[int, Open] = {}
        self.lexicon = lexicon()
        self.known = self.lexicon.known
        self.given: deque[Given] | None = None
        """Calls that were not compared with those of all others yet, once there has been one."""
        self.dropped: list[Open] = []
        self.calls: dict[Any, Any] = {}
        """Small ones that were made before, as who makes them knows them again."""
        self._borrowed: dict[tuple[int, int], Segment] = {}
        self.letters: Letters | None = None
        """Of messages, once there has been one."""

    def is_over(self) -> bool:
        """Whether nobody uses it any more, here, and it is at rest."""
        if self.dropped:
            self.look_after()
        if self.user is None or self.user() is not None or self.open:
            return False
        return self.letters is None or self.letters.is_at_rest()

    def look_after(self) -> None:
        """Read what nobody waits for."""
        for call in list(self.dropped):
            call.end_unasked()
            if call.is_over:
                with contextlib.suppress(ValueError):  # another thread was here
                    self.dropped.remove(call)

    def keep_given(self) -> deque[Given]:
        """From the first call on that is not compared with those of all others at once."""
        with self.lock:
            if self.given is None:
                self.given = deque(maxlen=ENTRIES)
            return self.given

    def is_far(self) -> bool:
        """Whether the next call has to see first that the others have followed."""
        return (self.number + 1) % FAR == 0

    def give_up(self, why: str) -> None:
        """This rank makes no more calls here, because one has failed: the first one."""
        if self.own.why() is None:
            self.own.give_up(self.lexicon.write(self.key, why.encode()))
            self.ring()

    def why_given_up(self, index: int) -> str:
        """What that rank has said so; empty if it has not."""
        box = self.box(index)
        place = None if box is None else box.why()
        return "" if place is None else self.words_at(index, place, self.key).decode(errors="replace")

    def box(self, index: int) -> Box | None:
        """That of another rank, once it has made it."""
        found = self.boxes[index]
        if found is None:
            neighbour = self.neighbours[index]
            assert neighbour is not None
            found = self.boxes[index] = neighbour.arena.box(self.key)
        return found

    def ring(self) -> None:
        """Wake those of the others that sleep until something was written."""
        for i in self.others:
            box = self.boxes[i]
            if box is not None and box.cells[box.listens]:
                box.ring()

    def ring_at(self, index: int) -> None:
        """Wake that one, if it sleeps."""
        box = self.boxes[index] or self.box(index)
        if box is not None and box.cells[box.listens]:
            box.ring()

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
        found = self._borrowed.get((entry[SERIAL], entry[OFFSET]))
        if found is None:
            where = entry[FD], entry[SERIAL], entry[SIZE], entry[KEPT], entry[OFFSET], entry[LENGTH]
            found = self.borrow_at(where, index)
            if entry[KEPT]:
                if len(self._borrowed) >= _AT_HAND:
                    self._borrowed.clear()
                self._borrowed[entry[SERIAL], entry[OFFSET]] = found
        return found

    def borrow_at(self, where: Sequence[int], index: int) -> Segment:
        """What that rank lends there, as ``Segment.where`` has it."""
        fd, serial, size, kept, offset, length = where
        neighbour = self.neighbours[index]
        assert neighbour is not None
        return lending.borrow(Lease(neighbour.pid, fd, serial, size, offset, length), keep=bool(kept))

    def words_at(self, index: int, place: int, digest: int) -> bytes:
        """What a rank of the group has written there under this digest; nothing if it has been written over."""
        return find(self.words(index), place, digest)

    def words(self, index: int) -> memoryview[int]:
        """What a rank of the group has called, in words."""
        neighbour = self.neighbours[index]
        return (boxes.arena() if neighbour is None else neighbour.arena).words()


class Reader:
    """Another rank of a group, as one who has been lent something."""

    __slots__ = ("_mail", "place")

    def __init__(self, mail: Mail, index: int) -> None:
        self._mail, self.place = mail, index

    def is_gone(self) -> bool:
        """Whether the process has ended, or has nothing to do with the group any more."""
        return self._is(GONE)

    def is_leaving(self) -> bool:
        """Whether it will make no more calls."""
        return self._is(LEAVING)

    def entry(self, number: int) -> list[int] | None:
        """What this rank has written of a call."""
        return entry_of(self._mail.box(self.place), number)

    def own_entry(self, number: int) -> list[int] | None:
        """What its lender has."""
        return entry_of(self._mail.own, number)

    def who(self) -> str:
        """For errors."""
        neighbour = self._mail.neighbours[self.place]
        return f"index {self.place} (process {0 if neighbour is None else neighbour.pid})"

    def told_of(self, number: int) -> str:
        """Who it is, and what it has not read."""
        who, mine, theirs = self.who(), self.own_entry(number), self.entry(number)
        given = "a call" if mine is None else said(mine[CODE], mine[COUNT], mine[ROOT])
        if theirs is None:
            return f"{who} has not made call {number}, {given}"
        called = said(theirs[CODE], theirs[COUNT], theirs[ROOT])
        return f"{who} of call {number}, {given}" + (f", and has called {called}" if called != given else "")

    def _is(self, state: int) -> bool:
        neighbour, box = self._mail.neighbours[self.place], self._mail.box(self.place)
        return (box is not None and box.state() >= state) or (neighbour is not None and neighbour.is_gone())


class Addressee(Reader):
    """The same, of a message that was lent: it belongs to no call."""

    __slots__ = ()

    def is_gone(self) -> bool:
        """As a reader; or it does not hear of messages any more, as at its end: it receives none then."""
        return self._mail.failed or self.is_leaving()

    def entry(self, number: int) -> None:
        """None."""

    def told_of(self, number: int) -> str:
        """Who it is."""
        return f"{self.who()} of a message"


class Unread:
    """What ranks lend for a call that had failed here before they made theirs: it is returned when they have."""

    __slots__ = ("_absent", "_mail", "_number", "_once")
    watch: object = None

    def __init__(self, mail: Mail, number: int, absent: list[int]) -> None:
        self._mail, self._number, self._absent, self._once = mail, number, absent, threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether all have come."""
        return not self._absent

    def look(self) -> bool:
        """Nothing is waited for."""
        return True

    def end_unasked(self) -> None:
        """See who has come meanwhile."""
        mail, number = self._mail, self._number
        with self._once:
            for i in self._absent:
                box = mail.box(i)
                if box is None or box.cells[box.at(number)] < number:
                    continue
                entry = entry_of(box, number)
                segment: Segment | None = None
                if entry is not None and is_lent_to(mail.index, entry):
                    with contextlib.suppress(OSError):
                        segment = mail.borrow(entry, i)
                self._absent = [
                    j for j in self._absent if j != i
                ]  # no call from here: once returned it may be lent again
                if segment is not None:
                    segment.flags[mail.index] = 0
