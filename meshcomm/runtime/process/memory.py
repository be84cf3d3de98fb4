"""Memory that processes of one machine share: what one lends, others read where it is.

It is a memfd: anonymous, of no file system that could be full, gone with its last mapping. Other processes of the same
user find it under /proc by process and descriptor, and know it by a random serial number, which stands in its first
page.

Only 64-bit x86 has what this relies upon: writes of one processor are seen by the others in their order.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Any, NamedTuple

READERS = 64
"""The most readers of one segment."""
PAGE = 4096
SERIAL = READERS // 8
"""The cell with the serial number. Cells are of 8 bytes."""


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


class Memory:
    """A memfd, mapped; its serial number stands in its first page."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        # Without a copy of the descriptor, where Python can.
        more: dict[str, Any] = {} if sys.version_info < (3, 13) else {"trackfd": False}
        self.mapped = mmap.mmap(fd, size, **more)
        self.view = memoryview(self.mapped)
        self.serial = self.view.cast("q")[SERIAL]
        self.segments: dict[int, Any] = {}
        """Its parts in use, by where they begin: see ``lending``."""

    @property
    def address(self) -> int:
        """Where it is mapped, as long as somebody has a view of it."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.mapped))


def create(size: int) -> Memory:
    """Memory of so many bytes."""
    fd = os.memfd_create("meshcomm", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        os.pwrite(fd, os.urandom(7) + b"\0", 8 * SERIAL)  # no secrets: its import takes half a ms
        return Memory(fd, size)
    except BaseException:
        os.close(fd)
        raise


def find(lease: Lease) -> Memory:
    """That of another process. Raises OSError if it is not there or must not be seen."""
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
