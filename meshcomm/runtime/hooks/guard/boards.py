"""Where ranks under guard write what they call, for the others to read: memory that they share, or the store.

A :class:`Shelf` is one process's, about itself; a :class:`Board` one group's, with an entry for each call.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from meshcomm.runtime.call import Call, gradients_agree
from meshcomm.runtime.hooks.guard.store import the_store
from meshcomm.runtime.process.boxes import NOTES, arena
from meshcomm.runtime.process.neighbours import Neighbour
from meshcomm.runtime.words import Words

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
    def of(call: Call) -> Entry:
        """Of a call that is made."""
        return Entry(MADE, call.digest, call.gradient, call.words.write())

    def agrees(self, other: Entry) -> bool:
        """Whether it is the same call."""
        return self.digest == other.digest and gradients_agree(self.gradient, other.gradient)


class Board(Protocol):
    """The calls of one group."""

    def look(self, index: int, number: int) -> Entry | None:
        """What another one has written, if it has."""

    def say_count(self, turn: int, count: int) -> None:
        """How many calls this rank has made, in this meeting."""

    def counts(self, turn: int) -> list[int | None]:
        """What each index has said in this meeting; None: nothing."""


class Shelf(Protocol):
    """What each process says of itself."""

    most: float
    """Bytes that it takes."""

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

_SHEET = NOTES // 2


class SharedShelf:
    """A part of each process's memory: two sheets, of which one is written while the others read the other one. So who
    is stopped, or gives way, in the middle of writing still says what it has said before.
    """

    most: float = _SHEET - 16

    def __init__(self, rank: int, neighbours: Sequence[Neighbour | None]) -> None:
        """``neighbours``: all ranks of the world; None for this one."""
        self._arenas = [arena() if each is None else each.arena for each in neighbours]
        self._rank = rank

    def tell(self, status: bytes) -> None:
        """Cells: the version, of which the parity is the sheet, written last; on a sheet the length, then the bytes."""
        view = self._arenas[self._rank].notes()
        cells = view.cast("q")
        assert len(status) <= self.most, len(status)  # who says nothing is waited for
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
        box = self._arenas[rank].box(group.key)
        return box is not None and box.cells[box.at(number)] >= number


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
            store.delete_key(f"{self._prefix}/{old}/{self._index}")
            self._kept.remove(old)

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

    most: float = math.inf

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
