"""The states of Python's random numbers and of torch's on the CPU, exchanged at the price of a copy.

``random.getstate`` and ``setstate`` make and read a tuple of 625 numbers, which takes ten times as long as the rest of
a change-over, and torch makes a tensor. Both generators hold the numbers side by side, so they are copied as bytes,
where a trial shows that this is so.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from typing import Any

import torch

from meshcomm._torch.random import generator_cells

State = list[Any]
"""torch's, Python's numbers, and the normal number that is kept for the next call of ``gauss``."""

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


OWN: random.Random = random.seed.__self__  # type: ignore[attr-defined]
"""Whose numbers those of the module are."""


@functools.cache
def memory() -> tuple[memoryview | None, memoryview | None]:
    """Of torch's generator and of Python's, as far as a trial shows that it may be copied: a millisecond, once."""
    return generator_cells(torch.default_generator), _cells(OWN) if _copies() else None


def seed(number: int) -> None:
    """As ``torch.manual_seed`` for the CPU, and as ``random.seed``, if somebody else stands in its place too."""
    torch.default_generator.manual_seed(number)
    OWN.seed(number)


def take(into: State | None) -> State:
    """The states as they are now, in the memory of former ones."""
    of_torch, of_python = memory()
    if into is None:
        if of_torch is not None and of_python is not None:
            return [memoryview(bytearray(of_torch)), memoryview(bytearray(of_python)), OWN.gauss_next]  # type: ignore[attr-defined]
        into = [None if cells is None else memoryview(bytearray(len(cells))) for cells in (of_torch, of_python, None)]
    if of_torch is None:
        into[0] = torch.default_generator.get_state()
    else:
        into[0][:] = of_torch
    if of_python is None:
        into[1] = random.getstate()
    else:
        into[1][:] = of_python
        into[2] = OWN.gauss_next  # type: ignore[attr-defined]
    return into


def put(state: State) -> None:
    """Make these the states."""
    of_torch, of_python = memory()
    if of_torch is None:
        torch.default_generator.set_state(state[0])
    else:
        of_torch[:] = state[0]
    if of_python is None:
        random.setstate(state[1])
    else:
        of_python[:] = state[1]
        OWN.gauss_next = state[2]  # type: ignore[attr-defined]
