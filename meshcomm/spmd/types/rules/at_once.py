"""What the checker of varying types sees at once: operations on tensors whose types are all known, of which nothing is
refused and nothing new is to be found out. That is nearly all of them, so each microsecond counts here.

::

    x * y      all of one sort, or joined so before ──► the operation ──► its type is noted on what it gives
    x * w      w is to be varied, and was before    ──► the operation on what was made then ──► the same
    x.add_(y)  of the type that x has               ──► the operation ──► the change of x is noted as seen
    else                                            ──► the long way, which does the same for these, at length

What that is for operands of some types is found once and remembered by these (``short``): when the operation comes
again it is one look-up, and a look at what may have changed on each operand: its count of changes, whether it requires
grad, what was written into its memory. What a function does is kept by the function (``torch_rules``), what types make
together by these types and, where it says where it happened, by the instruction.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from meshcomm._torch import functorch_active
from meshcomm.runtime.callsite import is_ours
from meshcomm.spmd.types.core import untraceable
from meshcomm.spmd.types.foreign_memory import lent
from meshcomm.spmd.types.grids import ANYWHERE, wrote
from meshcomm.spmd.types.rules.in_place import NOT_SEEN, InPlace, in_graph_of
from meshcomm.spmd.types.rules.operands import SIMPLE, versions_of
from meshcomm.spmd.types.rules.several import Several
from meshcomm.spmd.types.rules.short import ASKS, SEVERAL, Args, Short, flat_of, simple
from meshcomm.spmd.types.rules.torch_rules import COMPUTES, KINDS, MAKES, READS_ROWS, Kind, in_order
from meshcomm.spmd.types.rules.writes import gradients
from meshcomm.spmd.types.seen_changes import AGAIN, NOTED_AT, Again, saw, stamp
from meshcomm.spmd.types.sizes.size_rules import may_size
from meshcomm.spmd.types.sizes.varying_numbers import made, plain
from meshcomm.spmd.types.vma import (
    HELD,
    INVARIANT,
    NAME,
    WRITTEN,
    Type,
    alike,
    no_wider,
    note_base,
    writes,
)
from meshcomm.watch import here


class AtOnce(Several, InPlace):
    """Sees every operation, most of them at once; the others go the long way."""

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        # All in one: a call of Python is what two of these look-ups cost.
        if self._thread["watcher"] is not self:  # as `here` says it, which takes four times as long
            kwargs = kwargs or {}
            return func(*plain(args), **plain(kwargs)) if made.any else func(*args, **kwargs)
        if is_dynamo_compiling():  # before what it cannot trace: it would go on without the trace
            untraceable()
        if made.any:
            if self._young:
                self._look_at_young()
            return self._operation(KINDS[func], func, args, kwargs)
        if kwargs:
            for value in kwargs.values():
                if type(value) not in SIMPLE and (getattr(value, NAME, None) is not None or not simple((value,))):
                    if (kind := KINDS[func]).names and (ordered := in_order(kind, args, kwargs)) is not None:
                        args, kwargs = ordered, None
                        break
                    return self._operation(kind, func, args, kwargs)
        a: Any
        b: Any
        one: Any
        two: Any
        three: Any
        again: Any
        entry: Any
        short: Any
        rest: Any
        x: Any
        given: Any
        whole: Any
        result: Any
        try:
            three = None
            if (count := len(args)) == 2:
                a, b = args
                one, two = getattr(a, NAME, None), getattr(b, NAME, None)
                if one is None and two is None and type(a) in SEVERAL and len(a) > 1 and type(b) is int:
                    count = 0  # a list, and a dim
            elif count == 1:
                a = args[0]
                b = two = None
                if (one := getattr(a, NAME, None)) is None and type(a) in SEVERAL and len(a) > 1:
                    count = 0
            elif count == 3:
                a, b, c = args
                one, two, three = getattr(a, NAME, None), getattr(b, NAME, None), getattr(c, NAME, None)
                if (
                    type(c) not in SIMPLE and not simple((c,))
                    if three is None
                    else ((at := c._version) and at != getattr(c, NOTED_AT, 0)) or (three.plain and c.requires_grad)
                ):
                    three = False
            elif count and getattr(args[0], NAME, None) is not None:
                a, b, *rest = args
                one, two, three = getattr(a, NAME, None), getattr(b, NAME, None), self._third(rest)
            else:
                a = b = one = two = None
            if not count and args:
                if len(a) == 2:
                    a, b = a
                else:
                    a, b, *rest = a
                    three = self._third(rest)
                one, two = getattr(a, NAME, None), getattr(b, NAME, None)
            short = self._short.get(func)
            if short is None or short.one is not one or short.two is not two or short.three is not three:  # noqa: SIM102
                if short is not ASKS:
                    short = self._short.get((func, one, two) if three is None else (func, one, two, three))
                    if short:
                        self._short[func] = short
                    if three is False:
                        short = False
            if not short:
                pass
            elif (
                (
                    ((of_b := b._version) and of_b != getattr(b, NOTED_AT, 0)) or (two.plain and b.requires_grad)
                    if two is not None
                    else b is not None
                    and (part := type(b)) not in SIMPLE
                    and not (
                        part is slice
                        and (b.start is None or type(b.start) in SIMPLE)
                        and (b.stop is None or type(b.stop) in SIMPLE)
                        and b.step is None
                    )
                    and not simple(b if part is tuple else (b,))
                )
                or functorch_active()
                or (
                    short.mark is not (mark := wrote.mark)
                    and (short.looked is mark or self._looks(short, mark))
                    and (
                        (written := getattr(b.untyped_storage(), WRITTEN, None)) is not None
                        and not no_wider(written, two, self.grid)
                        if not short.more
                        else (
                            short.asks
                            and (kwargs or not short.named)
                            and self._not_at_once(short, short.whole, args, kwargs)
                        )
                        or (
                            short.wide_two
                            and (written := getattr(b.untyped_storage(), WRITTEN, None)) is not None
                            and not no_wider(written, two, self.grid)
                        )
                        or (
                            short.wide_one  # nothing in place: where that lies is looked at below
                            and (written := getattr(a.untyped_storage(), WRITTEN, None)) is not None
                            and not no_wider(written, one, self.grid)
                        )
                        or (
                            three is not None
                            and (
                                self._wider(rest)
                                if count != 3
                                else (written := getattr(c.untyped_storage(), WRITTEN, None)) is not None
                                and not no_wider(written, three, self.grid)
                            )
                        )
                    )
                )
            ):
                short = False
            elif short.reads:
                if ((at := a._version) and at != getattr(a, NOTED_AT, 0)) or (one.plain and a.requires_grad):
                    short = False
            elif short.in_place:
                base = first = None
                if (again := getattr(a, AGAIN, None)) is None:
                    if (base := a._base) is None:
                        if not vars(a.untyped_storage()) and type(a) is Tensor and not a._version:
                            again = first = Again(one, self.grid, [0, 0], 0)
                    elif getattr(base, NAME, None) is one:
                        again = getattr(base, AGAIN, None)  # views count together with what they are of
                if (
                    again is None
                    or (at := again.at) != a._version
                    or again.kind is not one
                    or (first is None and a.untyped_storage()._meshcomm_again is not again)  # or has none: refused
                    or lent
                    or (
                        one.plain or not in_graph_of(a, one) or (short.joins and not is_grad_enabled())
                        if a.requires_grad
                        else short.joins or not one.plain
                    )
                ):
                    short = False
            elif not simple(args if one is None else args[1:]):
                short = False
        except (RuntimeError, TypeError, AttributeError, ValueError):
            short = False  # an inference tensor does not count its changes; what was saved with a type has none
        if not short:
            if short is ASKS and not kwargs and (count == 1 or (count == 2 and type(b) is int)):
                return func(*args)
            result, whole, graph, alone, at = self._one_by_one(func, args, kwargs, short)
            if whole is None:
                return result
            two = three = None if alone else whole
        elif not short.reads:
            if not short.in_place:
                return self._made(func, args, kwargs, short)
            result = func(*args, **kwargs) if kwargs else func(*args)
            if first is not None:
                self._first(a, again, short)
            span, after = again.span, a._version
            if span[1] == at:  # as saw does it
                span[1] = again.at = a._meshcomm_version = after
                if base is not None:
                    base._meshcomm_version = after
            else:
                saw(a, at, after)
                self._spread(a, again.kind)
            if result is not a and result is not None:  # where an operand is of a subclass
                self._note_all(result, again.kind)
            return result
        else:
            if (whole := short.whole) is None:  # it says where
                frame = sys._getframe(1)
                code, place, whole = short.met
                if code is not frame.f_code or place != frame.f_lasti:
                    more = three if type(three) is tuple else () if three is None else (three,)
                    whole = self._joined_here((one, *more) if two is None else (one, two, *more), short.name, frame)
                    if not is_ours(frame.f_code.co_filename):
                        short.met = frame.f_code, frame.f_lasti, whole
            if (lacks := short.lacks) is None or not is_grad_enabled():
                result = func(*args, **kwargs) if kwargs else func(*args)
            else:
                quick, given, due = False, args, True
                if (place := short.narrow) >= 0 and (place < 2 or (count or 2 + len(rest)) == 3):
                    x, at_x = (
                        (a, at)
                        if not place
                        else (b, of_b)
                        if place == 1
                        else (c := args[2] if count else rest[0], c._version)
                    )
                    if due := x.requires_grad:
                        entry = self._pvaried.get(id(x))
                        try:  # as `_varied_before` does it, of a leaf for which the same was asked last
                            quick = (
                                entry is not None
                                and entry.again is lacks
                                and entry.newest
                                and entry.version == at_x
                                and x.dtype is entry.dtype
                                and entry.lies_as(x)
                            )
                        except RuntimeError:
                            quick = False
                elif short.pair and count == 3 and (pair := self._pair_before(b, of_b, args[2], lacks)) is not None:
                    given, due = (a, *pair), False
                if due and not quick:
                    given = self._evened_at_once(whole.axes, short.name, args)
                elif quick and (count != 2 or kwargs):
                    given = [*(args if count else args[0])]
                    given[place] = entry.varied
                    if not count:
                        given = (given, *args[1:])
                try:
                    if given is args and quick:
                        result = func(a, entry.varied) if place else func(entry.varied, b)
                    else:
                        result = func(*given, **kwargs) if kwargs else func(*given)
                except RuntimeError as error:
                    if quick or given is not args:
                        self._not_into_varied(error, short.name)
                    raise
                if quick and short.varies and not types:
                    result._meshcomm_type = whole.seen(True) if whole.plain else whole
                    return result
            if short.one_kernel and (not types or type(result) is Tensor):
                if short.graph:
                    if whole.plain == result.requires_grad:
                        whole = whole.seen(whole.plain)
                elif short.notes:
                    result._meshcomm_like = one
                result._meshcomm_type = whole
                return result
            if short.notes and (gradients.any or not (short.shares and one.plain)):
                self._note_more(short, a, result)
            if short.alone:
                two = three = None
            graph = short.graph
        if type(result) is Tensor and getattr(result, NAME, None) is None:  # as note does it
            if (graph or (kwargs and "requires_grad" in kwargs)) and whole.plain == result.requires_grad:
                result._meshcomm_type = whole.seen(whole.plain)  # type: ignore[attr-defined]
            else:  # otherwise none has a gradient, nor the result
                result._meshcomm_type = whole  # type: ignore[attr-defined]
            base = result._base
            if base is not None and two is None and three is None and getattr(base, NAME, None) is whole:
                # A view of the operand, or of what that is a view of: they count together.
                if at:
                    result._meshcomm_version = at  # type: ignore[attr-defined]
                if whole.axes and (widest := getattr(base, HELD, None)) is not whole:  # type: ignore[union-attr]
                    if widest is None:
                        base._meshcomm_held = whole  # type: ignore[attr-defined]
                    else:
                        note_base(base, whole, self._known, args)  # type: ignore[arg-type]
                return result
            try:
                if at := result._version:
                    result._meshcomm_version = at  # type: ignore[attr-defined]
            except RuntimeError:
                pass
            if base is not None:
                note_base(base, whole, self._known, flat_of(args))
            return result
        if result is not a:
            self._note_parts(result, whole, graph, args)
        return result

    def _note_more(self, kind: Kind | Short, x: Tensor, result: Tensor) -> None:
        """Note what else there is of what has the memory of ``x``, or was made in its image."""
        if kind.shares:
            self._shares(x)
        elif (mine := getattr(x, NAME)).axes:
            alike(result, mine)

    def _made(self, func: Any, args: Args, kwargs: Any, short: Short) -> Any:
        """What is made of simple values, or in the image of something of which nothing else matters."""
        result = func(*args, **kwargs) if kwargs else func(*args)
        kind: Any = INVARIANT
        if short.random:
            frame = sys._getframe(2)
            code, place, kind = short.met
            if here.draws_along is not None:
                kind = self._random(short.name).seen(False)
            elif code is not frame.f_code or place != frame.f_lasti:
                kind = self._random(short.name).seen(False)
                if not is_ours(frame.f_code.co_filename):
                    short.met = frame.f_code, frame.f_lasti, kind
        if type(result) is Tensor:
            result._meshcomm_type = kind  # type: ignore[attr-defined]
            stamp(result)
        else:  # in the image of a subclass
            self._note_all(result, kind)
        return result

    def _note_parts(self, result: Any, whole: Type, graph: bool, args: Args) -> None:
        """Note the type of each tensor that was given, some of which may have been there before."""
        for part in result if isinstance(result, tuple) else (result,):
            if type(part) is not Tensor or getattr(part, NAME, None) is not None:
                if result is not args[0]:
                    self._note_all(result, whole, [x for x in flat_of(args) if isinstance(x, Tensor)])
                break
            kind = whole.seen(part.requires_grad) if graph else whole
            part._meshcomm_type = kind  # type: ignore[attr-defined]
            base = part._base
            if base is not None and not (
                getattr(base, NAME, None) is kind and (not kind.axes or getattr(base, HELD, None) is kind)
            ):
                note_base(base, whole, self._known, flat_of(args))
            try:
                if at := part._version:
                    part._meshcomm_version = at  # type: ignore[attr-defined]
            except RuntimeError:  # an inference tensor does not count
                pass

    def _one_by_one(self, func: Any, args: Args, kwargs: Any, short: Any) -> tuple[Any, Any, bool, bool, int]:
        """What it gives, once each operand was looked at, and its type, if that is still to be noted; whether it may
        have a gradient; whether of one tensor alone, and how often that was changed.

        short: what is remembered of such operands; None: nothing yet.
        """
        kind = KINDS[func]
        way, flat = kind.way, args
        if self._young:
            self._look_at_young()
        if way is COMPUTES:
            return self._in_place(kind, func, args, kwargs, short), None, False, False, 0
        if not way:
            if kind.asks:
                self._short[func] = ASKS
            elif kind.getter:
                return self._get(kind, func, args), None, False, False, 0
            elif kind.setter and len(args) > 1 and args[1] is None:
                return func(*args), None, False, False, 0
            if not kind.each or (result := self._each_at_once(kind, func, args, kwargs)) is NOT_SEEN:
                result = self._operation(kind, func, args, kwargs)
            return result, None, False, False, 0
        if way is MAKES:
            known = bool(args) and kind.name.endswith("_like") and getattr(args[0], NAME, None) is not None
            if short is None and simple(args[known:]) and not kind.unless(args, kwargs):  # type: ignore[misc]
                self._shorten(kind, func, args, INVARIANT)
            return self._operation(kind, func, args, kwargs), None, False, False, 0
        if way is READS_ROWS:
            flat = flat_of(args)
        elif kind.alike or kind.fresh:  # of the others, and of what is fresh, the types do not matter
            flat = args[:1]
        grid, slow, at = self.grid, writes.any, 0
        within = grid.written
        whole: Any = None
        second: Any = None
        more = graph = False
        try:
            for x in flat:
                mine = getattr(x, NAME, None)
                if mine is None:
                    if type(x) in SIMPLE or simple((x,)):
                        continue
                    whole = None
                    break
                if (
                    (mine.grid is not grid and mine.grid is not ANYWHERE)
                    or ((at := x._version) and at != getattr(x, NOTED_AT, 0))
                    or (
                        slow
                        and not within <= mine.axes
                        and (written := getattr(x.untyped_storage(), WRITTEN, None)) is not None
                        and not no_wider(written, mine, grid)
                    )
                ):
                    whole = None
                    break
                if not mine.plain:
                    graph = True
                elif x.requires_grad:
                    # In a graph since its type was noted: changed in place, or given by a function out of sight.
                    if not x.is_leaf:
                        whole = None
                        break
                    graph = True
                if whole is None:
                    whole = mine
                elif second is None:
                    if kind.sized and may_size(kind.name, args):
                        whole = None
                        break
                    second = mine
                else:
                    more = True
                    if mine.sort is not whole.sort:
                        second = mine
        except (RuntimeError, ValueError, AttributeError):
            whole = None  # nothing is noted; an inference tensor does not count its changes; some have no storage
        uneven = second is not None and whole is not None and second.sort is not whole.sort
        transformed = functorch_active()
        if whole is None or (transformed and (slow or uneven or flat is not args or kind.shares)):
            return self._operation(kind, func, args, kwargs), None, False, False, 0
        into = [] if kind.silent is None else kind.silent(args, kwargs or {})
        if into and not [x for x in into if not self._stays_so(x, args)]:
            changes = versions_of(into)
        elif self._not_at_once(kind, None if uneven else whole, args, kwargs) or (kind.host and (uneven or whole.axes)):
            if kind.may_write and kind.drops is None and not uneven:
                return self._in_place(kind, func, args, kwargs, False), None, False, False, 0
            return self._operation(kind, func, args, kwargs), None, False, False, 0
        fresh = kind.fresh
        if fresh:
            whole, graph = INVARIANT, False
            if not simple(args[1:]):
                return self._operation(kind, func, args, kwargs), None, False, False, 0
        given, joined = args, whole
        if uneven:
            types = tuple([m for x in flat if (m := getattr(x, NAME, None)) is not None]) if more else (whole, second)
            whole = self._joined_here(types, kind.name, sys._getframe(2))
            joined = self._joined.get(types)
        if short is None:
            if kind.alike or fresh:
                self._shorten(kind, func, args, joined)
            elif flat is args or (len(args) == 1 and len(flat) > 1):
                self._shorten(kind, func, flat, joined)
            elif len(args) == 2 and len(args[0]) > 1 and type(args[1]) is int:
                self._shorten(kind, func, flat[:-1], joined)
        if uneven and graph and is_grad_enabled():
            given = self._evened_at_once(whole.axes, kind.name, args)
        try:
            result = func(*given, **kwargs) if kwargs else func(*given)
        except RuntimeError as error:
            if given is not args:
                self._not_into_varied(error, kind.name)
            raise
        if into:
            self._saw(into, changes)
        if kind.shares or fresh:
            self._note_more(kind, args[0], result)
        if transformed:
            self._note_all(result, whole, [x for x in flat if isinstance(x, Tensor)])
            return result, None, False, False, 0
        if kind.one_kernel and type(result) is Tensor:
            setattr(result, NAME, whole.seen(result.requires_grad) if graph else whole)
            return result, None, False, False, 0
        return result, whole, graph, second is None, at
