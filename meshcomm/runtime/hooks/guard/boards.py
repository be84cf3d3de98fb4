"""Where ranks under guard write what they call, for the others to read: memory that they share, or the store.

A :class:`Shelf` is one process's, about itself; a :class:`Board` one group's, with an entry for each call.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from meshcomm.runtime.call import Said
from meshcomm.runtime.hooks.guard.store import the_store
from meshcomm.runtime.process.memory import NOTE, NOTE_RING, NOTES, Neighbour, arena
from meshcomm.runtime.transports.shared.transport import Mail
from meshcomm.runtime.words import Words

__all__ = [
    "EXPIRED",
    "GAVE_UP",
    "LEAVING",
    "MADE",
    "REFUSED",
    "Board",
    "Entry",
    "Group",
    "SharedBoard",
    "SharedShelf",
    "Shelf",
    "StoreBoard",
    "StoreShelf",
]

MADE, GAVE_UP, REFUSED, LEAVING, EXPIRED = range(5)
"""A call that was made; one that the rank no longer waits in; one that it did not make, for it was wrong; one that it
is about to give up, or not: who sees that waits; one that it no longer waits in for a time-out of its own was over, so
that the others may not know it yet.
"""


class Entry(NamedTuple):
    """What a rank has written of one call."""

    state: int
    digest: tuple[int, int]
    gradient: int
    data: bytes
    """Its words."""
    errors: int = 0
    """How many errors this rank has raised since its last call here, in calls over it is not known which axis."""
    why: str = ""
    """Why it was given up or refused."""

    @property
    def words(self) -> Words:
        """Read when they are needed."""
        return Words.read(self.data)

    @staticmethod
    def of(said: Said, errors: int, state: int = MADE, why: str = "") -> Entry:
        """A call that is made now."""
        return Entry(state, said.digest, said.gradient, said.words, errors, why)

    def agrees(self, said: Said, errors: int) -> bool:
        """Whether it is the same call."""
        return said.agrees(self.digest, self.gradient) and self.errors == errors


class Board(Protocol):
    """The calls of one group."""

    def post(self, number: int, entry: Entry) -> None:
        """Write what this rank does as its call of this number; once more to change it."""

    def look(self, index: int, number: int) -> Entry | None:
        """What another one has written, if it has."""

    def forget(self, number: int) -> None:
        """All have read what this rank has written up to this call."""

    def say_count(self, turn: int, count: int) -> None:
        """How many calls this rank has made, in this meeting."""

    def counts(self, turn: int) -> list[int | None]:
        """What each index has said in this meeting; None: nothing."""


class Shelf(Protocol):
    """What each process says of itself."""

    def tell(self, status: bytes) -> None:
        """Say what this process waits for."""

    def status(self, rank: int) -> bytes:
        """What another one has said; nothing if it has said nothing."""

    def has_posted(self, rank: int, group: Group, number: int) -> bool:
        """Whether this rank of the world has written its call of this number in a group, which may not be ours."""


class Group(NamedTuple):
    """Names a group, in all of its processes."""

    key: int
    ranks: tuple[int, ...]
    name: str
    """At the store."""


# ---------------------------------------------------------------------------------------------------- shared memory

_STATE = 1
"""Cells: the number, the state, two of the digest, gradient, errors, lengths of the words and of the reason."""
_CELLS, _DATA, _WHY_AT, _COUNT_AT = 8, 128, 2560, 128 - 16
_LAST = NOTE // 8


class SharedBoard:
    """Entries in a ring, each with its number, which is written last."""

    def __init__(self, mail: Mail, index: int) -> None:
        self._mail, self._index = mail, index
        mail.noted = True
        place = arena().place(mail.key)
        assert place is not None
        own = arena().notes_of(place)
        self._views: list[memoryview[int] | None] = [None] * len(mail.neighbours)
        self._cells: list[memoryview[int] | None] = [None] * len(mail.neighbours)
        self._views[index], self._cells[index] = own, own.cast("q")

    def post(self, number: int, entry: Entry) -> None:
        """Whoever reads meanwhile sees the number of another call, or none."""
        view, cells = self._views[self._index], self._cells[self._index]
        assert view is not None
        assert cells is not None
        at = number % NOTE_RING
        base, why = at * NOTE, entry.why.encode()[: NOTE - _WHY_AT]
        data = entry.data if len(entry.data) <= _WHY_AT - _DATA else _shortened(entry.data)
        if cells[at * _LAST] != number:
            cells[at * _LAST] = 0
            view[base + _DATA : base + _DATA + len(data)] = data
        view[base + _WHY_AT : base + _WHY_AT + len(why)] = why
        rest = (*entry.digest, entry.gradient, entry.errors, len(data), len(why))
        cells[at * _LAST + 2 : at * _LAST + _CELLS] = array("q", rest)
        cells[at * _LAST + _STATE] = entry.state
        cells[at * _LAST] = number

    def look(self, index: int, number: int) -> Entry | None:
        """From the memory of the other process, once it has made its part."""
        cells = self._cells[index] or self._map(index)
        at = number % NOTE_RING
        if cells is None or cells[at * _LAST] < number:
            return None
        view = self._views[index]
        assert view is not None
        found, state, *digest, gradient, errors, length, why = cells[at * _LAST : at * _LAST + _CELLS].tolist()
        base = at * NOTE
        data = bytes(view[base + _DATA : base + _DATA + length])
        reason = bytes(view[base + _WHY_AT : base + _WHY_AT + why]).decode(errors="replace")
        if found != number or cells[at * _LAST] != number:  # it is far ahead
            return Entry(GAVE_UP, (0, 0), 2, data, 0, "it has gone on without the others")
        return Entry(state, (digest[0], digest[1]), gradient, data, errors, reason)

    def _map(self, index: int) -> memoryview[int] | None:
        neighbour = self._mail.neighbours[index]
        place = None if neighbour is None else neighbour.arena.place(self._mail.key)
        if neighbour is not None and place is not None:
            view = neighbour.arena.notes_of(place)
            self._views[index], self._cells[index] = view, view.cast("q")
        return self._cells[index]

    def forget(self, number: int) -> None:
        """It is written over."""

    def say_count(self, turn: int, count: int) -> None:
        """In the space before the first entry's words."""
        own = self._cells[self._index]
        assert own is not None
        own[_COUNT_AT // 8 : _COUNT_AT // 8 + 2] = array("q", (turn, count))

    def counts(self, turn: int) -> list[int | None]:
        """From all."""
        cells = [self._cells[i] or self._map(i) for i in range(len(self._views))]
        said = [(0, 0) if each is None else each[_COUNT_AT // 8 : _COUNT_AT // 8 + 2].tolist() for each in cells]
        return [count if other == turn else None for other, count in said]


def _shortened(data: bytes) -> bytes:
    words = Words.read(data)
    return words._replace(call=words.call[:400], site=words.site[-200:], send=(), recv=()).write()[: _WHY_AT - _DATA]


_SHEET = NOTES // 2


class SharedShelf:
    """A part of each process's memory: two sheets, of which one is written while the others read the other one. So who
    is stopped, or gives way, in the middle of writing still says what it has said before.
    """

    def __init__(self, rank: int, neighbours: Sequence[Neighbour | None]) -> None:
        """``neighbours``: all ranks of the world; None for this one."""
        self._arenas = [arena() if each is None else each.arena for each in neighbours]
        self._rank = rank

    def tell(self, status: bytes) -> None:
        """Cells: the version, of which the parity is the sheet, written last; on a sheet the length, then the bytes."""
        view = self._arenas[self._rank].notes()
        cells = view.cast("q")
        status = status if len(status) <= _SHEET - 16 else b""
        at = (cells[0] + 1) % 2 * _SHEET + 8
        cells[at // 8] = len(status)
        view[at + 8 : at + 8 + len(status)] = status
        cells[0] += 1

    def status(self, rank: int) -> bytes:
        """The last one that is whole. The sheet is written over when the version has moved on."""
        view = self._arenas[rank].notes()
        cells = view.cast("q")
        while True:
            version = cells[0]
            at = version % 2 * _SHEET + 8
            found = bytes(view[at + 8 : at + 8 + cells[at // 8]])
            if cells[0] == version:
                return found

    def has_posted(self, rank: int, group: Group, number: int) -> bool:
        """In that rank's memory."""
        found = self._arenas[rank]
        place = found.place(group.key)
        if place is None:
            return False
        cells = found.notes_of(place).cast("q")
        return any(cells[at * _LAST] >= number for at in range(NOTE_RING))


# --------------------------------------------------------------------------------------------------------- the store

_HEAD = struct.Struct("<qqqqqqq")


class StoreBoard:
    """A key for each call of each index; taken away when all have read it."""

    def __init__(self, group: Group, index: int) -> None:
        self._prefix, self._index, self._size = group.name, index, len(group.ranks)
        self._kept: list[int] = []
        self._found: dict[tuple[int, int], Entry] = {}

    def post(self, number: int, entry: Entry) -> None:
        """Under the number and the index."""
        if number not in self._kept:
            self._kept.append(number)
        why = entry.why.encode()
        head = _HEAD.pack(entry.state, *entry.digest, entry.gradient, entry.errors, len(entry.data), len(why))
        the_store().set(f"{self._prefix}/{number}/{self._index}", head + entry.data + why)

    def look(self, index: int, number: int) -> Entry | None:
        """If the key is there."""
        data = the_store().peek(f"{self._prefix}/{number}/{index}")
        return unpacked(data) if len(data) >= _HEAD.size else None

    def forget(self, number: int) -> None:
        """Delete what is older."""
        store = the_store()
        for old in [old for old in self._kept if old < number]:
            self._kept.remove(old)
            store.delete_key(f"{self._prefix}/{old}/{self._index}")

    def say_count(self, turn: int, count: int) -> None:
        """A key per index."""
        the_store().set(f"{self._prefix}/count/{self._index}", f"{turn} {count}")

    def counts(self, turn: int) -> list[int | None]:
        """If the keys are there."""
        store = the_store()
        found = [store.peek(f"{self._prefix}/count/{i}") for i in range(self._size)]
        said = [(data or b"- 0").decode().split() for data in found]
        return [int(count) if other == str(turn) else None for other, count in said]


def unpacked(data: bytes) -> Entry:
    """The inverse of what ``post`` writes."""
    state, first, second, gradient, errors, length, why = _HEAD.unpack_from(data)
    words = data[_HEAD.size : _HEAD.size + length]
    reason = data[_HEAD.size + length : _HEAD.size + length + why].decode(errors="replace")
    return Entry(state, (first, second), gradient, words, errors, reason)


class StoreShelf:
    """A key for each rank."""

    def __init__(self, prefix: str, rank: int) -> None:
        self._prefix, self._rank = prefix, rank

    def tell(self, status: bytes) -> None:
        """Gone when there is nothing to say, so that nothing is left behind."""
        key = f"{self._prefix}/status/{self._rank}"
        if status:
            the_store().set(key, status)
        else:
            with contextlib.suppress(RuntimeError):
                the_store().delete_key(key)

    def status(self, rank: int) -> bytes:
        """If it is there."""
        return the_store().peek(f"{self._prefix}/status/{rank}")

    def has_posted(self, rank: int, group: Group, number: int) -> bool:
        """A key of this or of a later call."""
        keys = the_store()
        index = group.ranks.index(rank)
        return keys.check([f"{group.name}/{number}/{index}"])
