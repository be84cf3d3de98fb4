"""What the checker of varying types remembers of operations: how one is seen on operands of some types, so that no more
than these and their changes are looked at when it comes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any

import torch

from meshcomm.spmd.types.grids import ANY, Grid
from meshcomm.spmd.types.rules.operands import SIMPLE
from meshcomm.spmd.types.rules.torch_rules import COMPUTES, MAKES, Kind
from meshcomm.spmd.types.seen_changes import NOTED_AT
from meshcomm.spmd.types.vma import NAME, WRITTEN, Type, no_wider, one_of

Args = tuple[Any, ...]
SEVERAL = frozenset((list, tuple))
"""Types of rows of operands."""
NUMBERS = frozenset((tuple, list, torch.Size))
"""Types of rows of simple values."""
_rows: dict[tuple[Type, ...], tuple[Type, ...]] = {}
"""The types of further operands, one object for all that are equal: who compares them need not look inside."""


class _Asks(tuple[()]):
    one = False


ASKS: Any = _Asks()
"""In place of a Short: it tells how a tensor is seen."""
_MOST = 4096
"""Of so many operations this is remembered."""


class Short:
    """How an operation is seen on operands of these types, beside simple values."""

    __slots__ = (
        "alone", "asks", "drops", "graph", "in_place", "joins", "lacks", "looked", "mark", "met", "more", "name",
        "named", "narrow", "notes", "one", "one_kernel", "pair", "random", "reads", "shares", "silent", "three", "two",
        "unless", "varies", "whole", "wide_one", "wide_two", "within",
    )  # fmt: skip

    def __init__(self, kind: Kind, found: Sequence[Type | None], whole: Type | None, grid: Grid) -> None:
        """``found``: the types of the operands, None in place of each simple value among them."""
        types = [each for each in found if each is not None]
        self.one = types[0] if types else None
        """The types of the operands; None where there is none."""
        self.two: Type | None = None
        self.three: Any = None
        """Of all others; a tuple where they are of several types."""
        self.alone = kind.alike
        """Of the others no more than their looks counts."""
        self.name, self.one_kernel, self.in_place = kind.name, kind.one_kernel, kind.way is COMPUTES
        self.drops, self.random, self.silent = kind.drops, kind.random, kind.silent
        self.graph = not (kind.fresh or kind.way is MAKES or all([each.plain for each in types]))  # noqa: C419 -- half of a generator
        """Whether an operand may have a gradient."""
        self.whole = whole if self.graph or whole is None else whole.seen(False)
        """The type of what it gives; None: that depends on where they meet."""
        looked = [each.axes for each in types[self.in_place :]]  # where what is written into lies is looked at
        self.within = frozenset.intersection(*looked) if looked else grid.axes | ANY
        """While nothing is written that varies along other axes, each operand varies as its type says."""
        self.mark: object = None
        """When that was last found to be so."""
        self.looked: object = None
        """When it was last found to be otherwise: what was written into each operand is looked at."""
        self.wide_one = self.wide_two = False
        """Whether what was written into the first and the second one is looked at then."""
        self.more = True
        """More than that is looked at, or something else than the second one."""
        self.met: tuple[CodeType | None, int, Any] = None, 0, None
        """What they make together at an instruction, if that depends on where they meet: the last one of a user's."""
        self.unless = kind.unless if kind.fresh or kind.sized != 1 + (len(types) < 2) else None
        self.asks = bool(self.unless or self.drops or self.random or self.silent)
        self.named = self.asks and (kind.fresh or kind.way is MAKES) and not self.random
        """That depends on arguments that are given by name alone."""
        self.shares = kind.shares
        self.notes = kind.shares or (kind.fresh and bool(types[0].axes))
        """Something is noted of what it gives beside its type, where there is no second operand."""
        self.reads = not (self.in_place or kind.way is MAKES)
        self.joins = False
        """What is written may have a gradient, and its type where it is written."""
        self.lacks: frozenset[str] | None = None
        """The axes along which an operand is to be varied, if it has a gradient: some of them, if there are several."""
        self.varies = kind.one_kernel and not kind.counts
        """Nothing is to be asked of what it gives where an operand has a gradient."""
        self.narrow = 0
        """Which one of the first three; -1: it is another one, or more than one may be."""
        self.pair = False
        """Of three it is the second and the third one that may be, of as many axes."""
        self._find_narrow(found)

    def _find_narrow(self, found: Sequence[Type | None]) -> None:
        along = [(i, each) for i, each in enumerate(found) if each is not None]
        axes = frozenset[str]().union(*[each.axes for _, each in along])
        # What is plain has no gradient, or this is not how it is seen.
        narrow = [(i, each.axes) for i, each in along if each.axes != axes and not each.plain]
        if narrow and not self.in_place:
            (self.narrow, least), *more = narrow
            self.narrow = -1 if more or (self.narrow > 1 and len(found) != 3) else self.narrow
            self.lacks = one_of(axes - least)
            self.pair = [i for i, _ in narrow] == [1, 2] and len(found) == 3 and narrow[1][1] == least


class Shorts:
    """Remembers how operations are seen."""

    grid: Grid
    _short: dict[Any, Any]

    def _shorten(self, kind: Kind, func: Any, flat: Args, whole: Any) -> None:
        """Remember how this operation is seen on operands of these types. ``whole``: what they make together, if it is
        a type wherever they meet.
        """
        if kind.way is not MAKES and getattr(flat[0], NAME, None) is None:
            return
        found = [getattr(x, NAME, None) for x in flat]
        types = [each for each in found if each is not None]
        one, two = found[0] if found else None, found[1] if len(found) > 1 else None
        three = one_row(types[(one is not None) + (two is not None) :])
        key = (func, one, two) if three is None else (func, one, two, three)
        before = self._short.get(key, self)
        if before is self:  # not before it is asked for again: types may be those of one step
            if len(self._short) >= _MOST:
                self._short.clear()
            self._short[key] = None
        elif before is None:
            if kind.alike or kind.fresh:
                found = found[:1]
            short = Short(kind, found, whole if type(whole) is Type else None, self.grid)
            short.two, short.three = two, three
            short.more = short.asks or two is None or three is not None
            if short.in_place:
                short.joins = not all([each.plain for each in types[1:]])  # noqa: C419 -- as above
            uneven = [each for each in types if each.sort is not types[0].sort]
            self._short[key] = False if short.joins and uneven else short

    def _looks(self, short: Short, mark: object) -> bool:
        """Whether to look at more than the operands: how it is called, and what was written into each operand, where
        something was that varies along other axes than that, somewhere; until more is written this is not asked again.
        """
        written = self.grid.written
        if written <= short.within and not short.asks:
            short.mark = mark
            return False
        # Never back to False: another rank's thread may have read what was written later than this one.
        if short.reads and short.one is not None and not written <= short.one.axes:
            short.more = short.wide_one = True
        if short.two is not None and not written <= short.two.axes:
            short.wide_two = True
        short.looked = mark
        return True

    def _wider(self, rest: Iterable[Any]) -> bool:
        """Whether something was written into one of these operands that varies along other axes than it does."""
        for x in rest:
            mine = getattr(x, NAME, None)
            if mine is not None:
                written = getattr(x.untyped_storage(), WRITTEN, None)
                if written is not None and not no_wider(written, mine, self.grid):
                    return True
        return False

    @staticmethod
    def _third(rest: Sequence[Any]) -> Any:
        """The type of all tensors among further arguments, of which the others are simple values, or the row of their
        types: None if there is none, False if more is to be looked at.
        """
        found: Any = None
        row: list[Type] | None = None
        for x in rest:
            mine = getattr(x, NAME, None)
            if mine is None:
                if type(x) not in SIMPLE and not simple((x,)):
                    return False
            elif ((at := x._version) and at != getattr(x, NOTED_AT, 0)) or (mine.plain and x.requires_grad):
                return False
            elif found is not mine:
                if row is not None:
                    row.append(mine)
                elif found is not None:
                    row = [found, mine]
                found = mine
        return found if row is None else _rows.get(tuple(row)) or one_row(row)


def one_row(types: Sequence[Type]) -> Any:
    """The types of further operands, each once for those beside each other that have it: None of none, itself of one,
    otherwise one object of all that are equal.
    """
    row = tuple([each for i, each in enumerate(types) if not i or each is not types[i - 1]])
    if len(row) < 2:
        return row[0] if row else None
    if len(_rows) >= _MOST:
        _rows.clear()
    return _rows.setdefault(row, row)


def flat_of(args: Args) -> Args:
    """The arguments, with what is in the first one, if that is a list."""
    if not args or type(args[0]) not in SEVERAL:
        return args
    return args[0] if len(args) == 1 else (*args[0], *args[1:])


def simple(values: Iterable[Any]) -> bool:
    """Whether all are simple values, or tuples, lists and slices of them, such as shapes and places."""
    for value in values:
        kind = type(value)
        if kind is slice:
            if not (type(value.start) in SIMPLE and type(value.stop) in SIMPLE and type(value.step) in SIMPLE):
                return False
        elif kind not in SIMPLE and not (kind in NUMBERS and simple(value)):
            return False
    return True
