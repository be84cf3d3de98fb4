"""What goes with a message between two processes, so that who receives another dtype or shape than it expects is told.

A message begins with an envelope of fixed size, which says what it is and holds it too, if it is small. What is larger
follows by itself when the envelope has been read: gloo ends a process that gets more than it has room for.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from meshcomm.errors import FIRST_CAUSE, CommError, shape_text, text

_HEAD = struct.Struct("<6q24s16q")
LENGTHS = 16
"""Of a shape, that are written out."""
SIZE = 4096
ROOM = SIZE - _HEAD.size
"""Bytes of a message that goes inside."""


class Envelope(NamedTuple):
    """Of one message."""

    sequence: int
    """Of the axis that it was sent over."""
    tag: int
    """The user's."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    follows: int
    """The tag of what follows; 0 if nothing does."""

    @staticmethod
    def of(name: str, tag: int, x: Tensor, follows: int) -> Envelope:
        """For ``x``, over the axis whose calls are named so."""
        return Envelope(sequence_of(name), tag, str(x.dtype), tuple(x.shape), x.nbytes, follows)

    def write(self, packed: Tensor) -> Tensor:
        """With what fits inside."""
        lengths = [*self.shape[:LENGTHS], *[0] * (LENGTHS - len(self.shape))]
        head = (self.sequence, self.tag, self.nbytes, self.follows, len(self.shape), rest_of(self.shape))
        out = torch.zeros(SIZE, dtype=torch.uint8, device="cpu")
        data = bytearray(_HEAD.pack(*head, self.dtype.removeprefix("torch.").encode(), *lengths))
        out[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        if not self.follows and packed.numel():
            # One element counts as dense whatever its stride, but a view of another width minds.
            dense = packed.clone(memory_format=torch.contiguous_format)
            out[_HEAD.size : _HEAD.size + packed.nbytes] = dense.view(torch.uint8)
        return out

    @staticmethod
    def read(data: Tensor) -> Envelope:
        """The inverse."""
        found = _HEAD.unpack(data[: _HEAD.size].numpy().tobytes())
        sequence, tag, nbytes, follows, ndim, rest = found[:6]
        shape = (*found[7 : 7 + min(ndim, LENGTHS)], *([rest] if ndim > LENGTHS else []))
        return Envelope(sequence, tag, f"torch.{found[6].rstrip(bytes(1)).decode()}", shape, nbytes, follows)

    def is_for(self, name: str, tag: int, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        """Whether it is what is expected."""
        expected = shape if len(shape) <= LENGTHS else (*shape[:LENGTHS], rest_of(shape))
        return self[:4] == (sequence_of(name), tag, str(dtype), expected)


def empty() -> Tensor:
    """Room for one."""
    return torch.empty(SIZE, dtype=torch.uint8, device="cpu")


def inside(data: Tensor, nbytes: int) -> Tensor:
    """The bytes in it."""
    return data[_HEAD.size : _HEAD.size + nbytes]


@lru_cache(1024)
def sequence_of(name: str) -> int:
    """A number for the name of a sequence of calls."""
    return zlib.crc32(name.encode())


def rest_of(shape: tuple[int, ...]) -> int:
    """Stands for the lengths that have no place of their own."""
    return zlib.crc32(repr(shape).encode()) if len(shape) > LENGTHS else 0


def misfit(
    where: str, found: Envelope, source: int, index: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> CommError:
    """Who has sent what to whom, and what was expected."""
    sent, expected = shape_text(found.dtype, found.shape), shape_text(dtype, shape)
    other = "" if found.sequence == sequence_of(name) else ", over another axis"
    return CommError(
        text(
            where,
            f"a message does not fit: index {source} sends {sent}{other}, index {index} expects {expected}.",
            got=f"from index {source} to index {index}, tag {found.tag}",
            fix="to each send belongs one receive, of the same shape, dtype and tag, on the other rank",
        )
    )


def lost(where: str, source: int, index: int, error: OSError) -> CommError:
    """Who has sent it is gone with it."""
    return CommError(
        text(
            where,
            f"the transport failed: the memory of index {source} cannot be read: {error.strerror or error}",
            got=f"a message from index {source} to index {index}",
            fix=FIRST_CAUSE,
        )
    )


def broken_off(where: str, source: int, index: int) -> CommError:
    """Who sends it was interrupted while it did."""
    return CommError(
        text(
            where,
            f"the transport failed: index {source} was interrupted in the middle of a message",
            got=f"a message from index {source} to index {index}",
            fix=FIRST_CAUSE,
        )
    )
