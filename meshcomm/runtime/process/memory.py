"""Memory that processes of one machine share: what one lends, others read where it is.

A segment is a memfd: anonymous, of no file system that could be full, gone with its last mapping. Other processes of
the same user find it under /proc by process and descriptor, and know it by a random serial number. Its first page says
who has not finished reading yet; the lender uses it again when nobody is left.

Only 64-bit x86 has what this relies upon: writes of one processor are seen by the others in their order.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
import select
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from meshcomm import _torch
from meshcomm.runtime.process import forks, table

__all__ = [
    "ENTRIES",
    "GONE",
    "HERE",
    "LEAVING",
    "NOTES",
    "PAGE",
    "READERS",
    "STATE",
    "TABLE",
    "WORDS",
    "Address",
    "Arena",
    "Box",
    "Lease",
    "Neighbour",
    "Neighbours",
    "Retired",
    "Segment",
    "arena",
    "borrow",
    "neighbour",
    "room",
]

READERS = 64
"""The most readers of one segment."""
PAGE = 4096
_SERIAL = READERS // 8
"""The cell with the serial number. Cells are of 8 bytes."""
STATE = _SERIAL + 1
"""A cell for what the lender says about the contents."""
TABLE = 2 * _SERIAL
"""The first of as many cells as there may be readers and one more, for numbers beside the contents."""
_NOBODY = bytes(READERS)
_SLOT, _SLOTS, _MOST_SLOTS = 2**16, 64, 2**12
"""Bytes of a small segment, how many of them lie in one memory, and the most of them."""
_KEEP = 2**28
"""Bytes that a process keeps to lend them again."""
_MUCH, _LITTLE = 2**27, 0.1
"""Bytes of segments beyond which a rank waits so many seconds for one to come back before it makes another."""
_MAPPED = 256
"""The most segments of others that stay mapped."""
SWITCH = "MESHCOMM_SHARED_MEMORY"
"""The variable of the environment that is 0 where no memory shall be shared."""


class Lease(NamedTuple):
    """Where to find a segment."""

    pid: int
    fd: int
    serial: int
    size: int
    """Of the whole memory."""
    offset: int
    """Where in it the segment begins."""
    length: int


class Reader(Protocol):
    """Who has been lent something."""

    place: int

    def is_gone(self) -> bool:
        """Whether it will read no more."""


class Memory:
    """A memfd, mapped; its serial number stands in its first page."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        # Without a copy of the descriptor, where Python can.
        more: dict[str, Any] = {} if sys.version_info < (3, 13) else {"trackfd": False}
        self.mapped = mmap.mmap(fd, size, **more)
        self.view = memoryview(self.mapped)
        self.serial = self.view.cast("q")[_SERIAL]
        self.segments: dict[int, Segment] = {}

    def segment(self, offset: int, length: int) -> Segment:
        """The part that begins there."""
        found = self.segments.get(offset)
        if found is None:
            found = self.segments[offset] = Segment(self, offset, length)
        return found


class Segment:
    """A part of a memory: in its first page one byte per reader and a state; then what is lent."""

    __slots__ = ("bytes", "cells", "fd", "flags", "kept", "number", "offset", "readers", "serial", "size", "whole")

    def __init__(self, memory: Memory, offset: int, size: int) -> None:
        self.fd, self.serial, self.whole, self.offset, self.size = memory.fd, memory.serial, memory.size, offset, size
        self.flags = memory.view[offset : offset + size]
        self.cells = self.flags.cast("q")
        with _torch.outside_transforms():  # it outlives whatever the first user is in the middle of
            self.bytes = torch.frombuffer(memory.mapped, dtype=torch.uint8, offset=offset + PAGE, count=size - PAGE)
        self.kept = True
        self.readers: Sequence[Reader] = ()
        self.number = 0  # of the call that it was lent for last

    def is_free(self) -> bool:
        """Whether everybody has read."""
        return bool(self.flags[:READERS] == _NOBODY)

    def returned(self, place: int) -> None:
        """A reader has finished."""
        self.flags[place] = 0

    def take_back(self) -> None:
        """No reader will come."""
        self.flags[:READERS] = _NOBODY

    def wanted(self) -> list[tuple[Segment, Reader]]:
        """The readers that are alive and have not finished."""
        return [(self, reader) for reader in self.readers if self.flags[reader.place] and not reader.is_gone()]


def _create(size: int) -> Memory:
    fd = os.memfd_create("meshcomm", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        os.pwrite(fd, secrets.randbits(62).to_bytes(8, "little"), 8 * _SERIAL)
        return Memory(fd, size)
    except BaseException:
        os.close(fd)
        raise


def _open(lease: Lease) -> Memory:
    """Raises OSError if it is not there or must not be seen."""
    fd = os.open(f"/proc/{lease.pid}/fd/{lease.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != lease.size:
            raise FileNotFoundError("it holds something else by now")
        memory = Memory(fd, lease.size)
    finally:
        os.close(fd)
    if memory.serial != lease.serial:
        raise FileNotFoundError("it holds something else by now")
    return memory


# ---------------------------------------------------------------------------------------------------------- lending


class Room:
    """The segments that this process lends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._kept = 0
        self._small: list[Segment] = []
        self._next = 0

    def lend(self, nbytes: int, places: Iterable[int], readers: Sequence[Reader], *, patient: bool) -> Segment:
        """Memory for so many bytes, until it was returned from each of these places.

        Who is ``patient``, and has lent much to others that are slower, gives them a little time; not for ever, for
        they may be waiting for something else.
        """
        need, lent = PAGE + nbytes, None
        try:
            with self._lock:
                found = self._slot() if need <= _SLOT else self._free(need)
                if found is None:
                    self._drop_used()
                    found = self._wait_for(need) if patient else None
                if found is None:
                    found = self._another(PAGE + max(_SLOT, 1 << (nbytes - 1).bit_length()))
                lent = found
                for place in places:
                    lent.flags[place] = 1
                lent.readers = readers
                lent.cells[STATE] = 0
            return lent
        except BaseException:  # Ctrl-C: nobody hears of it
            if lent is not None:
                lent.take_back()
            raise

    def _slot(self) -> Segment | None:
        """One of the small ones, of which many lie in one memory: there are only so many descriptors."""
        small = self._small
        for _ in range(len(small)):
            self._next = (self._next + 1) % len(small)
            if small[self._next].is_free():
                return small[self._next]
        if len(small) >= _MOST_SLOTS:
            return None
        memory = _create(_SLOTS * _SLOT)
        small += [memory.segment(i * _SLOT, _SLOT) for i in range(_SLOTS)]
        self._next = len(small) - _SLOTS
        return small[self._next]

    def _free(self, need: int) -> Segment | None:
        found = None
        for segment in self._segments:
            if segment.size >= need and (found is None or segment.size < found.size) and segment.is_free():
                found = segment
        return found

    def _wait_for(self, need: int) -> Segment | None:
        end = time.monotonic() + _LITTLE
        while sum(segment.size for segment in self._segments if not segment.is_free()) > _MUCH:
            time.sleep(1e-4)
            found = self._free(need)
            if found is not None or time.monotonic() > end:
                return found
        return None

    def _another(self, size: int) -> Segment:
        segment = _create(size).segment(0, size)
        segment.kept = self._kept + size <= _KEEP
        self._segments.append(segment)
        self._kept += size if segment.kept else 0
        return segment

    def _drop_used(self) -> None:
        for segment in [segment for segment in self._segments if not segment.kept and segment.is_free()]:
            self._segments.remove(segment)
            os.close(segment.fd)

    def wanted(self) -> list[tuple[Segment, Reader]]:
        """Who is going to read what is lent: it is lost when this process ends."""
        return [each for segment in [*self._segments, *self._small] for each in segment.wanted()]


room = Room()


@forks.in_every_fork
def _forked() -> None:
    # The child is another process: what its parent lends and borrows is not its own.
    room.__init__()  # type: ignore[misc]
    _mapped.clear()
    _neighbours.clear()


_mapped: OrderedDict[int, Memory] = OrderedDict()
_mapping = threading.Lock()


def borrow(lease: Lease, keep: bool) -> Segment:
    """What another process lends; ``keep`` it mapped for the next time. Raises OSError if it is not there."""
    with _mapping:
        found = _mapped.get(lease.serial)
        if found is None:
            found = _open(lease)
            if keep:
                _mapped[lease.serial] = found
                if len(_mapped) > _MAPPED:
                    _mapped.popitem(last=False)
        else:
            _mapped.move_to_end(lease.serial)
        return found.segment(lease.offset, lease.length)


# -------------------------------------------------------------------------------------------------------- mailboxes

ENTRIES = 4096
"""The entries of a mailbox: how far a rank may run ahead of the others."""
ENTRY = 16
_ENTRIES_AT = 128
_STATE, _TURN, _COUNT = 0, 1, 2
HERE, LEAVING, GONE = 0, 1, 2
_DRAINED = 8
_FAR = 2**62
"""What a reader says to have seen who will never look again."""
_BOX = _ENTRIES_AT + ENTRIES * ENTRY
_DIRECTORY = PAGE // 8
_BOXES = 2 * PAGE
"""Where the boxes begin; before them lie pairs of key and place."""
_MOST_BOXES = 1000
_TRIED = 4
"""How many boxes are looked at, whether they can serve again."""
NOTES = 2**16
"""Bytes for what the guard writes of the process."""
WORDS = 2**22
"""Bytes for what the calls of a process are in words."""
_NOTES_AT = 8 * (_BOXES + _MOST_BOXES * _BOX)
_WORDS_AT = _NOTES_AT + NOTES
_ARENA = _WORDS_AT + WORDS


class Box:
    """What one rank of a group tells the others: an entry for each call, in a ring. In units of cells."""

    __slots__ = ("_base", "cells")

    def __init__(self, cells: memoryview[int], base: int) -> None:
        self.cells, self._base = cells, base

    def at(self, number: int) -> int:
        """Where the entry of a call is, which begins with its number."""
        return self._base + _ENTRIES_AT + number % ENTRIES * ENTRY

    def say(self, state: int) -> None:
        """``HERE``; ``LEAVING``: no more entries will come; ``GONE``: nothing will be read either."""
        self.cells[self._base + _STATE] = state

    def state(self) -> int:
        """What was said."""
        return self.cells[self._base + _STATE]

    def drained(self, place: int) -> int:
        """The last call up to which the reader at this place has seen every entry."""
        return self.cells[self._base + _DRAINED + place]

    def drain(self, place: int, number: int) -> None:
        """As that reader."""
        self.cells[self._base + _DRAINED + place] = number

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
        self._lock = threading.Lock()
        self._retired: deque[Retired] = deque()

    @property
    def lease(self) -> Lease:
        """For the others."""
        return Lease(os.getpid(), self._memory.fd, self._memory.serial, self._memory.size, 0, 0)

    def box(self, key: int) -> Box | None:
        """The box with this key, if it has been made."""
        place = self.place(key)
        return None if place is None else Box(self._cells, self._cells[_DIRECTORY + 2 + 2 * place])

    def place(self, key: int) -> int | None:
        """Which of the boxes it is."""
        cells = self._cells
        return next((i for i in range(cells[_DIRECTORY]) if cells[_DIRECTORY + 1 + 2 * i] == key), None)

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
        return Box(cells, _BOXES + at * _BOX)

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
    return Arena(_create(_ARENA))


def arena() -> Arena:
    """This process's own. Raises OSError if there is no such memory."""
    return _arena(os.getpid())


# ------------------------------------------------------------------------------------------------------- neighbours


class Address(NamedTuple):
    """Where a process is, and its mailboxes."""

    machine: str
    """Equal where memory can be shared; empty if it cannot."""
    lease: Lease

    @staticmethod
    def mine() -> Address:
        """This process's."""
        nowhere = Address("", Lease(0, 0, 0, 0, 0, 0))
        fits = sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "pidfd_open")
        if not fits or os.environ.get(SWITCH) == "0":
            return nowhere
        try:
            spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
            mine = arena().lease
            os.close(os.pidfd_open(mine.pid))
            _open(mine)  # what this process may not do, others may not either
            return Address(" ".join([table.boot(), *spaces, str(os.getuid())]), mine)
        except OSError:
            return nowhere

    def write(self) -> str:
        """As text."""
        return ";".join([self.machine, *map(str, self.lease)])

    @staticmethod
    def read(text: str) -> Address:
        """The inverse of ``write``."""
        machine, *lease = text.split(";")
        return Address(machine, Lease(*map(int, lease)))


class Neighbours(NamedTuple):
    """The processes of a group, this one among them."""

    token: str
    """Of this meeting; a process may meet the same ones again."""
    addresses: tuple[Address, ...]

    def share(self) -> bool:
        """Whether they all say that they are on one machine: the same answer in all of them."""
        first = self.addresses[0].machine
        return bool(first) and all(address.machine == first for address in self.addresses)

    def are_seen(self) -> bool:
        """Whether this process can look into the memory of all."""
        if not self.share():
            return False
        try:
            for address in self.addresses:
                neighbour(address.lease)
        except OSError:
            return False
        return True


class Neighbour:
    """Another process on this machine."""

    def __init__(self, lease: Lease) -> None:
        self.pid = lease.pid
        self._pidfd = os.pidfd_open(lease.pid)
        try:
            self.arena = Arena(_open(lease))
        except BaseException:
            os.close(self._pidfd)
            raise

    def is_gone(self) -> bool:
        """Whether the process has ended."""
        life = select.poll()  # its own: several threads may ask
        life.register(self._pidfd, select.POLLIN)
        return bool(life.poll(0))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._pidfd)


_neighbours: dict[Lease, Neighbour] = {}


def neighbour(lease: Lease) -> Neighbour:
    """The process with these mailboxes. Raises OSError if it cannot be seen."""
    found = _neighbours.get(lease)
    if found is None:
        for gone in [lease for lease, each in list(_neighbours.items()) if each.is_gone()]:
            _neighbours.pop(gone, None)  # another thread may be here, too
        found = _neighbours[lease] = Neighbour(lease)
    return found
