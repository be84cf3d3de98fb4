"""What a letter says, cell by cell, and where it stands in its sender's memory."""

from __future__ import annotations

import math
from array import array
from functools import lru_cache

import torch
from torch import Tensor

from meshcomm.runtime.process.lending import Segment
from meshcomm.runtime.transports.gloo import envelopes
from meshcomm.runtime.transports.gloo.envelopes import LENGTHS, Envelope
from meshcomm.runtime.transports.shared.words import dtype_of, number_of

(NUMBER, ROUTE, SEQUENCE, TAG, NBYTES, FOLLOWS, DTYPE, NDIM, REST, SHAPE) = range(10)
PLACE = SHAPE + LENGTHS
CELLS = PLACE + 6
"""Of a letter: its number, over which route it goes; what an envelope says; where what is lent lies."""
SERIAL_AT, OFFSET_AT = PLACE + 1, PLACE + 4
"""Of what is lent; 0 if nothing is."""
TAKEN, DATA = CELLS, CELLS + 1
"""Then the number of the last one here that was taken out of its letter, by the receiver; and what stands inside."""
INSIDE = 1024
"""Bytes of a message that stand in the letter, if nothing is lent for it and nothing follows."""
SLOT = DATA + INSIDE // 8
MOST = 128
"""How many letters a ring has place for."""
UNREAD = 16
HEAD = UNREAD + MOST
RING = HEAD + SLOT * MOST
"""Before the letters the number of the last one that was seen, and of each place that of the last one of which what is
lent could not be read. (The first ring has the serial number of the memory there, too.)
"""


@lru_cache(1024)
def says(name: str, tag: int, dtype: torch.dtype, shape: tuple[int, ...], route: int) -> list[int]:
    """What a letter says before what is lent, if nothing follows."""
    lengths = [*shape[:LENGTHS], *[0] * (LENGTHS - len(shape))]
    nbytes = math.prod(shape) * dtype.itemsize
    head = (0, route, envelopes.sequence_of(name), tag, nbytes, 0, number_of(dtype), len(shape))
    return [*head, envelopes.rest_of(tuple(shape)), *lengths]


def letter_of(name: str, tag: int, x: Tensor, follows: int, lent: Segment | None, route: int) -> array[int]:
    """About ``x``, which is lent or follows over gloo."""
    said = says(name, tag, x.dtype, x.shape, route)
    letter = array("q", (*said, *((0,) * 6 if lent is None else lent.where)))
    letter[FOLLOWS] = follows
    return letter


def envelope_of(letter: list[int]) -> Envelope:
    """What it says of its message."""
    ndim, lengths = letter[NDIM], letter[SHAPE:PLACE]
    shape = (*lengths[:ndim], *([letter[REST]] if ndim > LENGTHS else []))
    kind = str(dtype_of(letter[DTYPE]))
    return Envelope(letter[SEQUENCE], letter[TAG], kind, shape, letter[NBYTES], letter[FOLLOWS])
