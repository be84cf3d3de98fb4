"""What the checker of varying types remembers of operations: how one is seen on operands of some types, so that no more
than these and their changes are looked at when it comes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from meshcomm.spmd.types.grids import ANY, Grid, wrote
from meshcomm.spmd.types.rules.operands import SIMPLE
from meshcomm.spmd.types.rules.torch_rules import COMPUTES, Kind
from meshcomm.spmd.types.seen_changes import NOTED_AT
from meshcomm.spmd.types.vma import NAME, Type, one_of

Args = tuple[Any, ...]
SEVERAL = frozenset((list, tuple))
"""Types of rows of operands."""
NUMBERS = frozenset((tuple, list, slice, torch.Size))
"""Types of values that have simple ones in them."""
ASKS: Any = ()
"""In place of a Short: it tells how a tensor is seen."""
_MOST = 4096
"""Of so many operations this is remembered."""


class Short:
    """How an operation is seen on operands of these types, one to three, beside simple values."""

    __slots__ = (
        "graph", "in_place", "lacks", "mark", "name", "narrow", "one_kernel", "varies", "whole", "within",
    )  # fmt: skip

    def __init__(self, kind: Kind, types: Sequence[Type], whole: Type | None, grid: Grid) -> None:
        self.name, self.one_kernel, self.in_place = kind.name, kind.one_kernel, kind.way is COMPUTES
        self.graph = not all([each.plain for each in types])  # noqa: C419 -- a generator costs twice as much
        """Whether an operand may have a gradient."""
        self.whole = whole if self.graph or whole is None else whole.seen(False)
        """The type of what it gives; None: that depends on where they meet."""
        looked = [each.axes for each in types[self.in_place :]]  # where what is written into lies is looked at
        self.within = frozenset.intersection(*looked) if looked else grid.axes | ANY
        """While nothing is written that varies along other axes, each operand varies as its type says."""
        self.mark: object = None
        """When that was last found to be so."""
        self.lacks: frozenset[str] | None = None
        """The axes along which an operand is to be varied, if it has a gradient: some of them, if there are several."""
        self.varies = False
        """One of two lacks axes, and nothing is to be asked of what the two give."""
        self.narrow = 0
        """Which one of two; -1: it is none of two, or more than one may be."""
        uneven = [each.axes for each in types if each.axes is not types[0].axes]
        if self.graph and uneven and not self.in_place:
            first, second = types[0].axes, uneven[0]
            self.narrow = -1 if len(types) > 2 or not (first < second or second < first) else int(second < first)
            self.lacks = one_of(first ^ second)
            self.varies = self.one_kernel and self.narrow >= 0


class Shorts:
    """Remembers how operations are seen."""

    grid: Grid
    _short: dict[Any, Any]

    def _shorten(self, kind: Kind, func: Any, flat: Args, whole: Any) -> None:
        """Remember how this operation is seen on operands of these types. ``whole``: what they make together, if it is
        a type wherever they meet.
        """
        if getattr(flat[0], NAME, None) is None:
            return
        found = [getattr(x, NAME, None) for x in flat]
        types = [each for each in found if each is not None]
        if len(types) > 3 or (len(types) == 3 and found[1] is None):
            return
        one, two = found[0], found[1] if len(found) > 1 else None
        rest = types[1 + (two is not None) :]
        key = (func, one, two, *rest)
        before = self._short.get(key, self)
        if before is self:  # not before it is asked for again: types may be those of one step
            if len(self._short) >= _MOST:
                self._short.clear()
            self._short[key] = None
        elif before is None:
            short = Short(kind, types, whole if type(whole) is Type else None, self.grid)
            if two is None:
                short.narrow = -1
            if short.in_place:
                fits = all([each.plain for each in types[1:]])  # noqa: C419 -- a generator costs twice as much
            else:
                fits = short.whole is not None or (len(types) == 2 and short.narrow >= 0)
            self._short[key] = short if fits else False

    def _holds(self, short: Short, key: Args) -> bool:
        """Whether nothing was written that varies along other axes; if something was, this is not asked again."""
        mark = wrote.mark
        if self.grid.written <= short.within:
            short.mark = mark
            return True
        self._short[key if key[3] is not None else key[:3]] = False
        return False

    @staticmethod
    def _third(rest: Sequence[Any]) -> Any:
        """The type of the one tensor among further arguments, of which the others are simple values: None if there is
        none, False if more is to be looked at.
        """
        found = None
        for x in rest:
            mine = getattr(x, NAME, None)
            if mine is None:
                if type(x) not in SIMPLE and not simple((x,)):
                    return False
            elif (
                found is not None
                or ((at := x._version) and at != getattr(x, NOTED_AT, 0))
                or (mine.plain and x.requires_grad)
            ):
                return False
            else:
                found = mine
        return found


def flat_of(args: Args) -> Args:
    """The arguments, with what is in the first one, if that is a list."""
    if not args or type(args[0]) not in SEVERAL:
        return args
    return args[0] if len(args) == 1 else (*args[0], *args[1:])


def simple(values: Iterable[Any]) -> bool:
    """Whether all are simple values, or tuples, lists and slices of them, such as shapes and places."""
    for value in values:
        kind = type(value)
        if kind not in SIMPLE:
            parts = (value.start, value.stop, value.step) if kind is slice else value
            if kind not in NUMBERS or not simple(parts):
                return False
    return True
