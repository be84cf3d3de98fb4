"""What the checker of varying types sees at once: operations on tensors whose types are all known, of which nothing is
refused and nothing new is to be found out. That is nearly all of them, so each microsecond counts here.

::

    x * y      all of one sort, or joined so before ──► the operation ──► its type is noted on what it gives
    x * w      w is to be varied, and was before    ──► the operation on what was made then ──► the same
    x.add_(y)  of the type that x has               ──► the operation ──► the change of x is noted as seen
    else                                            ──► the long way, which does the same for these, at length

An operation that is seen at once costs some look-ups in dicts: what a function does is kept by the function
(``torch_rules``), what types make together by these types and, where it says where it happened, by the instruction.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from meshcomm._torch import functorch_active, unwrap_if_dead, version_of
from meshcomm.mesh import Mesh
from meshcomm.runtime.callsite import is_ours, outermost
from meshcomm.spmd.types.core import untraceable
from meshcomm.spmd.types.foreign_memory import lent
from meshcomm.spmd.types.grids import ANYWHERE, Grid
from meshcomm.spmd.types.rules.operands import SIMPLE, same_place
from meshcomm.spmd.types.rules.torch_rules import COMPUTES, READS_ROWS, Kind, kind_of
from meshcomm.spmd.types.rules.writes import Writes
from meshcomm.spmd.types.seen_changes import AGAIN, NOTED_AT, SEEN, Again, saw
from meshcomm.spmd.types.sizes.varying_numbers import made, plain
from meshcomm.spmd.types.vma import (
    HELD,
    LEAF,
    NAME,
    WRITTEN,
    Type,
    join,
    no_wider,
    note,
    note_base,
    shared_leaves,
    writes,
)
from meshcomm.watch import here

Args = tuple[Any, ...]
_SEVERAL = frozenset((list, tuple))
_NUMBERS = frozenset((tuple, list, slice, torch.Size))
_NONE = None, None
_MOST = 1024
"""Joins that are remembered: of as many types, and of one pair at as many places."""


class AtOnce(Writes):
    """Sees every operation, most of them at once; the others go the long way."""

    def __init__(self, mesh: Mesh, *, insert: bool, grid: Grid | None = None) -> None:
        super().__init__(mesh, insert=insert, grid=grid)
        self._joined: dict[tuple[Type, ...], Type | dict[tuple[int, int, str], tuple[CodeType, Type]]]
        self._joined = self.grid.joined  # a step is checked by a checker of its own

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        watcher: object = here.watcher
        if watcher is not self:
            kwargs = kwargs or {}
            return func(*plain(args), **plain(kwargs)) if made.any else func(*args, **kwargs)
        if is_dynamo_compiling():  # before what it cannot trace: it would go on without the trace
            untraceable()
        kind = kind_of(func)
        way = kind.way
        if not way or made.any:
            return self._operation(kind, func, args, kwargs)
        if kwargs:
            for value in kwargs.values():
                if type(value) not in SIMPLE and not simple((value,)):
                    return self._operation(kind, func, args, kwargs)
        if way is COMPUTES:
            return self._in_place(kind, func, args, kwargs)
        # From here on all in one: a call of Python is what two of these look-ups cost.
        flat = args
        if way is READS_ROWS and args and type(args[0]) in _SEVERAL:
            flat = args[0] if len(args) == 1 else (*args[0], *args[1:])
        grid, slow = self.grid, writes.any
        whole: Any = None
        second: Any = None
        more = known = graph = False
        try:
            for x in flat:
                mine = getattr(x, NAME, None)
                if mine is None:
                    if (one := type(x)) in SIMPLE or (
                        (type(x.start) in SIMPLE and type(x.stop) in SIMPLE and type(x.step) in SIMPLE)
                        if one is slice
                        else one in _NUMBERS and simple(x)
                    ):
                        continue
                    break
                if mine.grid is not grid and mine.grid is not ANYWHERE:
                    break
                if (at := version_of(x)) and at != getattr(x, NOTED_AT, 0):
                    break
                if not mine.plain:
                    graph = True
                elif x.requires_grad:
                    # In a graph since its type was noted: changed in place, or given by a function out of sight.
                    if not x.is_leaf:
                        break
                    graph = True
                if (
                    slow
                    and (written := getattr(x.untyped_storage(), WRITTEN, None)) is not None
                    and not no_wider(written, mine, grid)
                ):
                    break
                if whole is None:
                    whole = mine
                elif kind.sized:
                    break
                elif second is None:
                    second = mine
                else:
                    more = True
                    if mine.sort is not whole.sort:
                        second = mine
            else:
                known = True
        except (RuntimeError, ValueError, AttributeError):
            pass  # nothing is noted; an inference tensor does not count its changes; some have no storage
        transformed = functorch_active()
        if not known or whole is None or (slow and transformed):
            return self._operation(kind, func, args, kwargs)
        if second is None or second.sort is whole.sort:
            result = func(*args, **kwargs) if kwargs else func(*args)
        else:
            joined: Any = None if graph or more or transformed else self._joined.get((whole, second))
            if type(joined) is dict:  # it says where
                frame = sys._getframe(1)
                joined = joined.get((id(frame.f_code), frame.f_lasti, kind.name), _NONE)[1]
            if type(joined) is Type:  # and nothing is to be varied, for nothing has a gradient
                whole = joined
                result = func(*args, **kwargs) if kwargs else func(*args)
            else:
                types = (whole, second)
                if more:
                    types = tuple([m for x in flat if (m := getattr(x, NAME, None)) is not None])
                if transformed or (joined := self._evened_at_once(kind.name, types, args, flat)) is None:
                    return self._operation(kind, func, args, kwargs)
                whole, given = joined
                try:
                    result = func(*given, **kwargs) if kwargs else func(*given)
                except RuntimeError as error:
                    if given is not args:
                        self._not_into_varied(error, kind.name)
                    raise
        if type(result) is Tensor and not transformed and getattr(result, NAME, None) is None:  # as note does it
            if (graph or kwargs) and whole.plain == result.requires_grad:  # else none has a gradient, nor the result
                setattr(result, NAME, whole.seen(whole.plain))
            else:
                setattr(result, NAME, whole)
            base = result._base
            if base is None:
                if not kind.one_kernel:
                    try:
                        if at := version_of(result):
                            setattr(result, NOTED_AT, at)
                    except RuntimeError:
                        pass
                return result
            if second is None and getattr(base, NAME, None) is whole:
                # A view of the operand, or of what that is a view of: they count together.
                if at:
                    setattr(result, NOTED_AT, at)
                if whole.axes and getattr(base, HELD, None) is not whole:  # type: ignore[union-attr]
                    note_base(base, whole, self._known, flat)  # type: ignore[arg-type]
                return result
            try:
                if at := version_of(result):
                    setattr(result, NOTED_AT, at)
            except RuntimeError:
                pass
            note_base(base, whole, self._known, flat)
            return result
        for part in result if type(result) is tuple else (result,):
            if type(part) is not Tensor or getattr(part, NAME, None) is not None:
                if result is not args[0]:
                    self._note_all(result, whole, [x for x in flat if isinstance(x, Tensor)])
                break
            note(part, whole, self._known, flat)
        return result

    def _operation(self, kind: Kind, func: Any, args: Args, kwargs: Any) -> Any:
        """The long way."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ of several types

    def _evened_at_once(self, name: str, types: tuple[Type, ...], args: Args, flat: Args) -> tuple[Type, Args] | None:
        """The type of what is made of operands of several types, all known as of now, and the arguments, with what is
        to be varied varied; None if that was not done before.
        """
        joined: Any = self._joined.get(types)
        if type(joined) is Type:
            whole = joined
        else:
            frame = sys._getframe(2)
            if is_ours(frame.f_code.co_filename):
                frame = outermost(frame)
            place = id(frame.f_code), frame.f_lasti, name
            found = None if joined is None else joined.get(place)
            whole = self._join(types, name, place, frame) if found is None else found[1]
        axes, given = whole.axes, args
        if not axes or not is_grad_enabled():
            return whole, args
        for i, x in enumerate(flat):
            mine = getattr(x, NAME, None)
            if mine is None or mine is whole or len(mine.axes) == len(axes) or not x.requires_grad:
                continue
            # The pvary of x that vary would give, if it was made before.
            key = id(x)
            entry = self._always.get(key)
            if entry is None:
                entry = self._lately.get(key)
                if entry is None:
                    return None
                self._lately.move_to_end(key)
            if flat is not args or entry.x is not x or entry.version != version_of(x) or entry.node is not x.grad_fn:
                return None
            y = entry.by.get(axes - mine.axes if mine.axes else axes)
            if y is None or not self.insert or unwrap_if_dead(y) is not y or not same_place(x, y):
                return None
            given = (given[0], y) if i == 1 and len(given) == 2 else (*given[:i], y, *given[i + 1 :])
        return whole, given

    def _join(self, types: tuple[Type, ...], name: str, place: tuple[int, int, str], frame: FrameType) -> Type:
        """The join of these types, remembered. Where it is one of theirs, that is all there is to it; otherwise it says
        where they have met, and holds for this instruction.
        """
        whole = join(types, name)
        if len(self._joined) >= _MOST:
            self._joined.clear()
        for each in types:
            if whole is each:
                self._joined[types] = whole
                return whole
        if whole.grid is None:
            whole.placed_on(self.grid)
        places = self._joined.setdefault(types, {})
        assert isinstance(places, dict)
        if len(places) >= _MOST:
            places.clear()
        places[place] = frame.f_code, whole
        return whole

    # ------------------------------------------------------------------------------------------------------- in place

    def _in_place(self, kind: Kind, func: Any, args: Args, kwargs: Any) -> Any:
        """What is computed in place of operands that are all of the type of the first argument: that is left as it is
        where no graph has to do with it, and the change is noted as seen.
        """
        grid, known, even = self.grid, False, not kind.overwrites
        again: Any
        try:
            x = args[0]
            mine, again = getattr(x, NAME), getattr(x, AGAIN, None)
            same = again is not None and getattr(x.untyped_storage(), AGAIN, None) is again
            if (
                not same
                or (before := again.at) != version_of(x)
                or again.kind is not mine
                or again.grid is not grid
                or lent
            ):
                before = version_of(x)
                again = self._target(x, mine, before)
            if again is not None and not (x.requires_grad and (mine.plain or is_grad_enabled() or not x.is_leaf)):
                for y in args:
                    if y is x:
                        continue
                    other = getattr(y, NAME, None)
                    if other is None:
                        if type(y) in SIMPLE or simple((y,)):
                            continue
                        break
                    if (
                        other.sort is not mine.sort
                        or ((at := version_of(y)) and at != getattr(y, NOTED_AT, 0))
                        or (other.grid is not grid and other.grid is not ANYWHERE)
                        or (y.requires_grad and (other.plain or is_grad_enabled() or not y.is_leaf))
                        or (
                            writes.any
                            and (written := getattr(y.untyped_storage(), WRITTEN, None)) is not None
                            and not no_wider(written, mine, grid)
                        )
                    ):
                        break
                    even = True
                else:
                    known = even or not mine.axes  # or it is overwritten with what is the same everywhere
        except (RuntimeError, ValueError, AttributeError, IndexError):
            pass  # as above
        if not known or functorch_active():
            return self._operation(kind, func, args, kwargs)
        result = func(*args, **kwargs) if kwargs else func(*args)
        after = version_of(x)
        if (last := again.span) is not None and last[1] == before:  # as saw does it
            last[1] = again.at = after
            setattr(x, NOTED_AT, after)
        else:
            saw(x, before, after)
            self._spread(x, mine)
        return result

    def _target(self, x: Any, mine: Type, before: int) -> Again | None:
        """What may be written into by what is of its own type, and is no view, as long as nothing else is noted of its
        memory; None if it may not.
        """
        grid = self.grid
        if (
            (before and before != getattr(x, NOTED_AT, 0))
            or (mine.grid is not grid and mine.grid is not ANYWHERE)
            or (type(x) is not Tensor and type(x) is not Parameter)
            or x._base is not None
        ):
            return None
        storage = x.untyped_storage()
        written, seen = getattr(storage, WRITTEN, None), getattr(storage, SEEN, None)
        if (
            written is not None and not (type(written) is Type and written.grid is grid and written.axes == mine.axes)
        ) or (shared_leaves.any and (leaf := getattr(storage, LEAF, None)) is not None and leaf() is not x):
            return None
        if lent or seen is None or seen[-1][1] != before or (written is None and mine.axes):
            return Again(mine, grid, None, before)
        again = Again(mine, grid, seen[-1], before)
        setattr(x, AGAIN, again)
        setattr(storage, AGAIN, again)
        return again


def simple(values: Iterable[Any]) -> bool:
    """Whether all are simple values, or tuples, lists and slices of them, such as shapes and places."""
    for value in values:
        kind = type(value)
        if kind not in SIMPLE:
            parts = (value.start, value.stop, value.step) if kind is slice else value
            if kind not in _NUMBERS or not simple(parts):
                return False
    return True
