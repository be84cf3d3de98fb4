"""What processes of one machine tell each other: each has mailboxes, in memory that the others look into."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from meshcomm.runtime.process.memory import PAGE, READERS, Lease, Memory, create

ENTRIES = 4096
"""The entries of a mailbox: how far a rank may run ahead of the others."""
ENTRY = 16
_ENTRIES_AT = 128
_STATE, _TURN, _COUNT, _LISTENS, _BELL, _WHY = range(6)
HERE, LEAVING, GONE = 0, 1, 2
_DRAINED = 8
_LETTERS = _DRAINED + READERS
"""Where a rank's letters lie: the descriptor and size of their memory, and last its serial number."""
_FAR = 2**62
"""What a reader says to have seen who will never look again."""
_BOX = _ENTRIES_AT + ENTRIES * ENTRY
_DIRECTORY = PAGE // 8
_BOXES = 2 * PAGE
"""Where the boxes begin; before them lie pairs of key and place."""
_MOST_BOXES = 1000
_TRIED = 4
"""How many boxes are looked at, whether they can serve again."""
NOTES = 2**20
"""Bytes for what the guard writes of the process, which may wait for 1000 messages; what is not written takes none."""
WORDS = 2**22
"""Bytes for what the calls of a process are in words."""
_NOTES_AT = 8 * (_BOXES + _MOST_BOXES * _BOX)
_WORDS_AT = _NOTES_AT + NOTES
_ARENA = _WORDS_AT + WORDS


_FUTEX, _WAIT, _WAKE = 202, 0, 1
"""Of Linux on x86-64."""
_MOST_RINGS = 2**31 - 1


class _Span(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall: Any = None
if sys.platform == "linux":  # elsewhere no memory is shared
    _syscall = ctypes.CDLL(None).syscall
    _syscall.argtypes = ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.POINTER(_Span)


class Box:
    """What one rank of a group tells the others: an entry for each call, in a ring. In units of cells."""

    __slots__ = ("_address", "_base", "cells", "first", "listens", "writes")

    def __init__(self, cells: memoryview[int], base: int, address: int) -> None:
        """``address``: of the first cell."""
        self.cells, self._base, self._address = cells, base, address
        self.first = base + _ENTRIES_AT
        """Where its entries begin."""
        self.listens = base + _LISTENS
        """The cell that says whether its rank listens."""
        self.writes = base + _LETTERS + 2
        """That which is 0 until there are letters of it."""

    def at(self, number: int) -> int:
        """Where the entry of a call is, which begins with its number."""
        return self.first + number % ENTRIES * ENTRY

    def say(self, state: int) -> None:
        """``HERE``; ``LEAVING``: no more entries will come; ``GONE``: nothing will be read either."""
        self.cells[self._base + _STATE] = state

    def state(self) -> int:
        """What was said."""
        return self.cells[self._base + _STATE]

    def give_up(self, why: int) -> None:
        """``LEAVING``, because of a call that has failed; ``why``: what others find the reason by."""
        self.cells[self._base + _WHY] = why + 1
        self.say(max(LEAVING, self.state()))

    def why(self) -> int | None:
        """What was said so."""
        found = self.cells[self._base + _WHY]
        return found - 1 if found else None

    def drained(self, place: int) -> int:
        """The last call up to which the reader at this place has seen every entry."""
        return self.cells[self._base + _DRAINED + place]

    def drain(self, place: int, number: int) -> None:
        """As that reader."""
        self.cells[self._base + _DRAINED + place] = number

    def say_letters(self, fd: int, serial: int, size: int) -> None:
        """Where the letters of its rank are from now on."""
        at = self._base + _LETTERS
        self.cells[at], self.cells[at + 1] = fd, size
        self.cells[self.writes] = serial  # last

    def letters(self) -> tuple[int, int, int] | None:
        """Descriptor, serial number and size of the memory in which they are, if there are some."""
        at = self._base + _LETTERS
        serial = self.cells[self.writes]
        return (self.cells[at], serial, self.cells[at + 1]) if serial else None

    def listen(self) -> int:
        """As its rank: from now on who has written something rings. Look once more, and then :meth:`sleep`."""
        heard = self.cells[self._base + _BELL]
        self.cells[self._base + _LISTENS] = 1
        return heard

    def sleep(self, heard: int, seconds: float) -> bool:
        """Until somebody rings after ``heard``, or the time (less than a second) is over, or a signal comes; whether
        nobody has rung.
        """
        _syscall(_FUTEX, self._address + 8 * (self._base + _BELL), _WAIT, heard, _Span(0, int(1e9 * seconds)))
        return self.cells[self._base + _BELL] == heard

    def ring(self) -> None:
        """As another rank: wake who sleeps here."""
        cells, base = self.cells, self._base
        if cells[base + _LISTENS]:
            cells[base + _LISTENS] = 0
            cells[base + _BELL] = (cells[base + _BELL] + 1) % _MOST_RINGS
            _syscall(_FUTEX, self._address + 8 * (base + _BELL), _WAKE, _MOST_RINGS, None)

    def say_count(self, turn: int, count: int) -> None:
        """How many calls this rank has made, in this meeting of all."""
        self.cells[self._base + _COUNT] = count
        self.cells[self._base + _TURN] = turn  # last

    def count(self, turn: int) -> int | None:
        """What was said in this meeting."""
        return self.cells[self._base + _COUNT] if self.cells[self._base + _TURN] == turn else None

    def clear(self, calls: int) -> None:
        """As it was before so many calls."""
        first = self._base + _ENTRIES_AT
        for cell in [*range(self._base, first), *range(first, first + ENTRIES * ENTRY, ENTRY)[: calls + 1]]:
            self.cells[cell] = 0


class Retired(NamedTuple):
    """A box whose sequence of calls has ended here."""

    key: int
    place: int
    """Of this rank in the group."""
    calls: int
    """How many there were."""
    others: Mapping[int, Arena]
    """By index."""


class Arena:
    """The mailboxes of a process; made once, for good."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self._cells = memory, memory.view.cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory.mapped))
        self._lock = threading.Lock()
        self._retired: deque[Retired] = deque()

    @property
    def lease(self) -> Lease:
        """For the others."""
        return Lease(os.getpid(), self._memory.fd, self._memory.serial, self._memory.size, 0, 0)

    def box(self, key: int) -> Box | None:
        """The box with this key, if it has been made."""
        place = self.place(key)
        return None if place is None else Box(self._cells, self._cells[_DIRECTORY + 2 + 2 * place], self._address)

    def place(self, key: int) -> int | None:
        """Which of the boxes it is."""
        cells = self._cells
        newest_first = range(cells[_DIRECTORY] - 1, -1, -1)  # which is asked for most
        return next((i for i in newest_first if cells[_DIRECTORY + 1 + 2 * i] == key), None)

    def notes(self) -> memoryview[int]:
        """Bytes about this process as a whole."""
        return self._memory.view[_NOTES_AT : _NOTES_AT + NOTES]

    def words(self) -> memoryview[int]:
        """Bytes about what has been called."""
        return self._memory.view[_WORDS_AT : _WORDS_AT + WORDS]

    def make_box(self, key: int) -> Box:
        """A box with this key; raises OSError when there is no room for one more."""
        cells = self._cells
        with self._lock:
            at = self._begun(key)
            if at is None:
                at = self._used_before()
            if at is None:
                at = cells[_DIRECTORY]
                if at == _MOST_BOXES:
                    raise OSError(f"there are {at} axes of meshes already")
                cells[_DIRECTORY + 2 + 2 * at] = _BOXES + at * _BOX
                cells[_DIRECTORY + 1 + 2 * at] = key
                cells[_DIRECTORY] = at + 1
            else:
                cells[_DIRECTORY + 1 + 2 * at] = key
        return Box(cells, _BOXES + at * _BOX, self._address)

    def _begun(self, key: int) -> int | None:
        """The place of one that was made, and that nobody got: Ctrl-C. Others may look into it already."""
        box = self.box(key)
        return None if box is None or box.state() != HERE else self.place(key)

    def is_crowded(self) -> bool:
        """Whether there is little room left."""
        return self._cells[_DIRECTORY] > _MOST_BOXES * 3 // 4

    def retire(self, old: Retired) -> None:
        """A box that is not used here any more, nor will be."""
        with self._lock:
            self._retired.append(old)

    def _used_before(self) -> int | None:
        """The place of a box that nobody looks into any more, emptied."""
        for _ in range(min(_TRIED, len(self._retired))):
            old = self._retired.popleft()
            at, mine = self.place(old.key), self.box(old.key)
            if at is None or mine is None:
                continue
            boxes = {i: arena.box(old.key) for i, arena in old.others.items()}  # first these, then what they have said
            if all((box is not None and box.state() == GONE) or mine.drained(i) == _FAR for i, box in boxes.items()):
                for box in boxes.values():
                    if box is not None:
                        box.drain(old.place, _FAR)
                self._cells[_DIRECTORY + 1 + 2 * at] = 0
                mine.clear(old.calls)
                return at
            self._retired.append(old)
        return None


@cache
def _arena(pid: int) -> Arena:
    return Arena(create(_ARENA))


def arena() -> Arena:
    """This process's own. Raises OSError if there is no such memory."""
    return _arena(os.getpid())
