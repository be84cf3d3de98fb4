"""As which one, and where, a leaf got its type: equal on all ranks that do the same, whatever order they use it in."""

from __future__ import annotations

import weakref
from collections import Counter

from torch import Tensor

from meshcomm.runtime.transports.threads.scheduler import current_rank
from meshcomm.runtime.whose import Whose
from meshcomm.spmd.types.notes import Note

_NUMBER = "_meshcomm_number"
_GIVEN = 1 << 18
"""Leaves that are given to a function count by themselves, from here on."""


class Number(Note):
    """What was noted of a leaf."""

    __slots__ = ("before", "declared", "name")

    def __init__(self, before: dict[frozenset[str], int], name: str, declared: bool) -> None:
        self.before = before
        """How many leaves had got a type before, by the axes along which they vary."""
        self.name, self.declared = name, declared


class _Typed:
    """The leaves that a rank has typed."""

    def __init__(self) -> None:
        self.count: Counter[frozenset[str]] = Counter()
        self.times: Counter[str] = Counter()


_of_process = _Typed()
_of_rank: weakref.WeakKeyDictionary[object, _Typed] = weakref.WeakKeyDictionary()


def _typed() -> _Typed:
    rank = current_rank()
    return _of_process if rank is None else _of_rank.setdefault(rank, _Typed())


def next_time(place: str) -> str:
    """The name of a line for all that gets a type there now."""
    times = _typed().times
    times[place] += 1
    return place if times[place] == 1 else f"{place}, time {times[place]}"


def numbered(x: Tensor, axes: frozenset[str], name: str, *, declared: bool = True) -> None:
    """Note that ``x``, if it requires grad, has got its type from outside; the first time counts."""
    if x.requires_grad and number(x) is None:
        count = _typed().count
        setattr(x, _NUMBER, Number(dict(count), name, declared))
        count[axes] += 1


def number(x: Tensor) -> Number | None:
    """What was noted of ``x``."""
    found = getattr(x, _NUMBER, None)
    return found if type(found) is Number else None


def is_declared(x: Tensor) -> bool:
    """Whether somebody has said what its type is."""
    found = number(x)
    return found is not None and found.declared


def whose(x: Tensor, axes: frozenset[str], given: tuple[int, str] | None) -> Whose | None:
    """Whose gradient a sum over these axes is; ``given``: which one ``x`` is of what was given to a function."""
    if given is not None:
        return Whose(_GIVEN + given[0], given[1])
    found = number(x)
    if found is None:
        return None
    return Whose(1 + sum(count for kind, count in found.before.items() if not kind & axes), found.name)
