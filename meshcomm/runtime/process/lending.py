"""What this process lends to others of its machine, and borrows from them, in segments of shared memory.

The first page of a segment has one byte per place in the group: of who reads, and of the lender. Each sets its own to
zero once, when its call is over; the lender uses the segment again when all are zero::

    free ──► lent: a byte for each reader and for the lender ──► written ──► the entry says where ──► read ──► free
     ▲                                                                │        each byte goes to zero, in any order
     └── nobody reads, as all know: the lender sets all to zero ◄─────┘

So a byte is that of one call from the first to the last: if a segment were free before the lender's call is over, that
would clear a byte of the next call that the segment is lent for, perhaps of a thread that is on another axis.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.runtime.process import forks
from meshcomm.runtime.process.memory import PAGE, READERS, SERIAL, Lease, Memory, create, find

STATE = SERIAL + 1
"""A cell for what the lender says about the contents."""
TABLE = 2 * SERIAL
"""The first of as many cells as there may be readers and one more, for numbers beside the contents."""
NO_READERS = bytes(READERS)
"""The first page's bytes of a segment that is free."""
_SLOT, _SLOTS, _MOST_SLOTS = 2**16, 64, 2**12
"""Bytes of a small segment, how many of them lie in one memory, and the most of them."""
_FIRST = 4
"""How many of them are looked at first: what was lent last is mapped and near on all sides."""
_MOST_LARGE = 256
"""Of larger ones, each of which has a descriptor, if whoever lends has another way."""
_KEEP = 2**28
"""Bytes that a process keeps to lend them again."""
_MUCH, _LITTLE = 2**27, 0.1
"""Bytes of segments beyond which a rank waits so many seconds for one to come back before it makes another."""
_STALE, _LONGER = 2, 8
"""How many times the bytes that lie in a large segment are lent in others before its pages are given back, and how much
longer that takes the next time: to have them again costs about as much as a call, and a program may come back to it.
"""
_MAPPED = 256
"""The most segments of others that stay mapped."""
LARGE = 2**16
"""Bytes from which on it is felt how they are written."""
PART = 2**18
"""Bytes that ``memmove`` is given at once: of more the C library moves vectors."""
_ONE_THREAD = 2**22
"""Bytes from which on torch's threads, if it has some, are faster."""
LOW = 2**40
"""An address below this may be nothing and an offset, of what has no memory (zeros that torch makes when they are read,
what is traced).
"""
_LOWEST = 2**22
"""Nothing of a program's lies below this."""
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_holding = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
copy: Any = _holding(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)
"""``memmove`` that keeps Python's lock, for some µs: who gave it away would wait for other threads after each part."""


class Reader(Protocol):
    """Who has been lent something."""

    place: int

    def is_gone(self) -> bool:
        """Whether it will read no more."""


class Segment:
    """A part of a memory: in its first page one byte per reader and a state; then what is lent."""

    __slots__ = (
        "_mapped", "_part", "address", "bytes", "cells", "fd", "flags", "head", "kept", "lent_at", "number", "offset",
        "patience", "readers", "serial", "size", "touched", "whole",
    )  # fmt: skip

    def __init__(self, memory: Memory, offset: int, size: int) -> None:
        self.fd, self.serial, self.whole, self.offset, self.size = memory.fd, memory.serial, memory.size, offset, size
        self.flags = memory.view[offset : offset + size]
        self.cells = self.flags.cast("q")
        self.head = self.flags[:READERS]
        self.bytes = _torch.lasting(_bytes_of, memory, offset + PAGE, size - PAGE)
        self.address = self.bytes.data_ptr()
        self._part: tuple[int, torch.dtype, Tensor] | None = None
        self._mapped = memory.mapped
        self.kept = True
        self.touched, self.lent_at, self.patience = 0, 0, _STALE
        """Bytes that were lent since its pages were given back, and when: by all bytes that were lent till then."""
        self.readers: Sequence[Reader] = ()
        self.number = 0  # of the call that it was lent for last

    @property
    def where(self) -> tuple[int, int, int, int, int, int]:
        """For who borrows it: descriptor, serial number, bytes of the memory, whether it is kept, offset, bytes."""
        return self.fd, self.serial, self.whole, self.kept, self.offset, self.size

    def part(self, nbytes: int, dtype: torch.dtype) -> Tensor:
        """The first bytes of what is lent, as elements. Kept until others are asked for: most calls are as the last."""
        known = self._part
        if known is not None and known[0] == nbytes and known[1] is dtype and not _torch.functorch_active():
            return known[2]
        part = self.bytes[:nbytes].view(dtype)
        if _torch.plain_now() and not (torch.is_inference_mode_enabled() or _torch.function_modes()):
            self._part = nbytes, dtype, part
        return part

    def is_free(self) -> bool:
        """Whether everybody has read."""
        return bool(self.head == NO_READERS)

    def returned(self, place: int) -> None:
        """A reader has finished."""
        self.flags[place] = 0

    def take_back(self) -> None:
        """No reader will come."""
        self.flags[:READERS] = NO_READERS

    def give_back(self) -> None:
        """Its pages, but for the first one. What is written there next takes new ones."""
        self.touched, self.patience = 0, _LONGER * self.patience
        with contextlib.suppress(OSError):
            self._mapped.madvise(mmap.MADV_REMOVE, self.offset + PAGE, self.size - PAGE)

    def wanted(self) -> list[tuple[Segment, Reader]]:
        """The readers that are alive and have not finished."""
        return [(self, reader) for reader in self.readers if self.flags[reader.place] and not reader.is_gone()]


def _bytes_of(memory: Memory, offset: int, count: int) -> Tensor:
    return torch.frombuffer(memory.mapped, dtype=torch.uint8, offset=offset, count=count)


def _segment(memory: Memory, offset: int, length: int) -> Segment:
    """The part that begins there."""
    found: Segment | None = memory.segments.get(offset)
    if found is None:
        found = memory.segments[offset] = Segment(memory, offset, length)
    return found


def put(into: Tensor, x: Tensor) -> None:
    """Copy ``x`` to where others read it. The processor's own way to move bytes writes whole lines; torch's vectors
    have each fetched first from the core that has read it, which may take longer than all else.
    """
    nbytes = into.nbytes
    if not LARGE <= nbytes <= _ONE_THREAD and (nbytes < LARGE or torch.get_num_threads() > 1):
        into.copy_(x)
        return
    address = address_of(x) if x.dtype is into.dtype and x.nbytes == nbytes and into.is_contiguous() else 0
    if address:
        move(into.data_ptr(), address, nbytes)
    else:
        into.copy_(x)


def move(to: int, address: int, nbytes: int) -> None:
    """Copy so many bytes from there."""
    end = address + nbytes
    while address < end:
        part = min(PART, end - address)
        copy(to, address, part)
        to, address = to + part, address + part


def address_of(x: Tensor) -> int:
    """Where all of it lies as it is; 0 if it does not."""
    if type(x) not in _PLAIN or not _torch.plain_now() or not x.is_contiguous() or x.is_neg() or x.is_conj():
        return 0
    try:
        address = x.data_ptr()
    except RuntimeError:  # it has escaped from a transform
        return 0
    return 0 if address < LOW and is_nowhere(x, address) else address


def is_nowhere(x: Tensor, address: int) -> bool:
    """Whether this address of ``x``, which is low, is nothing and an offset: torch knows what stands there."""
    try:
        return address < _LOWEST or x.untyped_storage().data_ptr() < _LOWEST
    except RuntimeError:  # torch has none to give
        return True


class Room:
    """The segments that this process lends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._kept = self._lent = 0
        self._small: list[Segment] = []
        self._next = 0

    def lend(
        self, nbytes: int, places: Iterable[int], readers: Sequence[Reader], *, patient: bool, must: bool = True
    ) -> Segment:
        """Memory for so many bytes, until it was returned from each of these places.

        Who is ``patient``, and has lent much to others that are slower, gives them a little time; not for ever, for
        they may be waiting for something else. Who need not have it gets an OSError where there are many already.
        """
        need, lent = PAGE + nbytes, None
        try:
            with self._lock:
                if need > _SLOT:
                    found = self._free(need)
                else:
                    for found in self._small[:_FIRST]:
                        if found.head == NO_READERS:  # `is_free`, without a call
                            break
                    else:
                        found = self._slot()
                if found is None:
                    self._drop_used()
                    found = self._wait_for(need) if patient else None
                if found is None:
                    if not must and len(self._segments) >= _MOST_LARGE:
                        raise OSError(errno.EMFILE, "as much is lent as shall be")
                    found = self._another(PAGE + max(_SLOT, 1 << (nbytes - 1).bit_length()))
                lent = found
                if need > _SLOT:
                    self._note(lent, nbytes)
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
        """Another small one. Many of them lie in one memory: there are only so many descriptors."""
        small = self._small
        for _ in range(len(small)):
            self._next = (self._next + 1) % len(small)
            if small[self._next].is_free():
                return small[self._next]
        if len(small) >= _MOST_SLOTS:
            return None
        memory = create(_SLOTS * _SLOT)
        small += [_segment(memory, i * _SLOT, _SLOT) for i in range(_SLOTS)]
        self._next = len(small) - _SLOTS
        return small[self._next]

    def _free(self, need: int) -> Segment | None:
        found = None
        for segment in self._segments:
            if segment.size >= need and (found is None or segment.size < found.size) and segment.is_free():
                found = segment
        return found

    def _note(self, lent: Segment, nbytes: int) -> None:
        """That it is lent, and so which others are not: a program goes on with some of those that it began with."""
        self._lent = now = self._lent + nbytes
        lent.lent_at, lent.touched = now, max(lent.touched, nbytes)
        for segment in self._segments:
            if segment.touched and now - segment.lent_at > segment.patience * segment.touched and segment.is_free():
                segment.give_back()

    def _wait_for(self, need: int) -> Segment | None:
        end = time.monotonic() + _LITTLE
        while sum(segment.size for segment in self._segments if not segment.is_free()) > _MUCH:
            time.sleep(1e-4)
            found = self._free(need)
            if found is not None or time.monotonic() > end:
                return found
        return None

    def _another(self, size: int) -> Segment:
        segment = _segment(create(size), 0, size)
        segment.kept = self._kept + size <= _KEEP
        self._segments.append(segment)
        self._kept += size if segment.kept else 0
        return segment

    def _drop_used(self) -> None:
        for segment in [segment for segment in self._segments if not segment.kept and segment.is_free()]:
            try:
                self._segments.remove(segment)
            finally:  # Ctrl-C, too: its pages are there as long as it is open
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


_mapped: OrderedDict[int, Memory] = OrderedDict()
_mapping = threading.Lock()


def borrow(lease: Lease, keep: bool) -> Segment:
    """What another process lends; ``keep`` it mapped for the next time. Raises OSError if it is not there."""
    with _mapping:
        found = _mapped.get(lease.serial)
        if found is None:
            found = find(lease)
            if keep:
                _mapped[lease.serial] = found
                if len(_mapped) > _MAPPED:
                    _mapped.popitem(last=False)
        else:
            _mapped.move_to_end(lease.serial)
        return _segment(found, lease.offset, lease.length)
