"""The state of Python's own random numbers, exchanged at the price of a copy.

``random.getstate`` and ``setstate`` make and read a tuple of 625 numbers, which takes ten times as long as the rest of
a change-over. The generator holds them side by side, so they are copied as bytes, where a trial shows that this is so.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

State = tuple[Any, Any]
"""The numbers, and the normal number that is kept for the next call of ``gauss``."""

_START = object.__basicsize__
_SIZE = random.Random.__mro__[1].__basicsize__ - _START
_WORDS = 625


def _cells(twister: random.Random) -> memoryview[int]:
    return memoryview((ctypes.c_ubyte * _SIZE).from_address(id(twister) + _START)).cast("B")


def _copies() -> bool:
    """Whether copied bytes make one generator go on as another one would have, on this Python."""
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    if not 4 * _WORDS <= _SIZE < 4 * _WORDS + 16:
        return False
    one, other = random.Random(1), random.Random(2)
    one.random()
    before = other.getstate()
    taken, kept = bytes(_cells(one)), bytes(_cells(other))
    _cells(other)[:] = taken
    alike = other.getstate() == one.getstate() and [other.random() for _ in range(700)] == [
        one.random() for _ in range(700)
    ]
    _cells(other)[:] = kept
    return alike and other.getstate() == before


_own: random.Random = random.seed.__self__  # type: ignore[attr-defined]
_bytes = _cells(_own) if _copies() else None


def seed(number: int) -> None:
    """As ``random.seed``, if somebody else stands in its place too."""
    _own.seed(number)


def take() -> State:
    """The state as it is now."""
    if _bytes is None:
        return random.getstate(), None
    return bytes(_bytes), _own.gauss_next  # type: ignore[attr-defined]


def put(state: State) -> None:
    """Make this the state."""
    if _bytes is None:
        random.setstate(state[0])
    else:
        _bytes[:] = state[0]
        _own.gauss_next = state[1]  # type: ignore[attr-defined]
