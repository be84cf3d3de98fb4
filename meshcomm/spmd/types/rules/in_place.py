"""What the checker of varying types sees at once of what is computed in place: nearly all of what optimizers do."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, is_grad_enabled
from torch.nn import Parameter

from meshcomm._torch import functorch_active
from meshcomm.runtime.callsite import is_ours
from meshcomm.spmd.types.foreign_memory import lent
from meshcomm.spmd.types.grids import ANYWHERE, written_along
from meshcomm.spmd.types.rules.operands import SIMPLE
from meshcomm.spmd.types.rules.short import Args, Short, Shorts, simple
from meshcomm.spmd.types.rules.torch_rules import Kind
from meshcomm.spmd.types.rules.writes import Writes
from meshcomm.spmd.types.seen_changes import AGAIN, NOTED_AT, SEEN, Again, saw
from meshcomm.spmd.types.vma import HELD, LEAF, NAME, WRITTEN, Type, is_written, no_wider, shared_leaves, writes

_NOWHERE = None, 0, None
NOT_SEEN: Any = object()
"""In place of a result: it goes the long way."""


def remains(kind: Type, other: Type) -> bool:
    """Whether what is of a type stays as it is when what is of another type, and no gradient, is computed into it."""
    return other.axes <= kind.axes and not kind.leaf and other.ended.keys() <= kind.ended.keys() | kind.axes


def in_graph_of(x: Any, mine: Type) -> bool:
    """Whether what requires grad may be written into as what does not: a leaf of which no graph is made, or the result
    of an operation, in its graph, of which no view varies along other axes.
    """
    if not is_grad_enabled():
        return bool(x.is_leaf)
    widest = getattr(x, HELD, None)
    return not x.is_leaf and x._base is None and (widest is None or widest.axes <= mine.axes)


class InPlace(Shorts, Writes):
    """Sees what is written by what has the type of what was there."""

    def _operation(self, kind: Kind, func: Any, args: Args, kwargs: Any) -> Any:
        """The long way."""
        raise NotImplementedError

    def _each_at_once(self, kind: Kind, func: Any, args: Args, kwargs: Any) -> Any:
        """What a function of lists gives, if it is seen at once."""
        raise NotImplementedError

    def _not_at_once(self, kind: Kind | Short, whole: Type | None, args: Args, kwargs: Any) -> bool:
        """Whether such a call, on operands that are of this type together, goes the long way: it writes without saying
        so, or mixes random numbers into what is the same on every rank.
        """
        if kind.random and kind.in_place:
            return whole is not None and self._drawn_along() != whole.axes
        return (
            (kind.unless is not None and kind.unless(args, kwargs))
            or (
                kind.drops is not None
                and not (whole is not None and self._draws_own(whole))
                and kind.drops(args, kwargs or {})
            )
            or (kind.silent is not None and bool(kind.silent(args, kwargs or {})))
        )

    def _in_place(self, kind: Kind, func: Any, args: Args, kwargs: Any, short: Any) -> Any:
        """What is computed in place of operands that are all of the type of the first argument: that is left as it is
        where no graph has to do with it, and the change is noted as seen.
        """
        even = False
        again: Any = None
        try:
            x: Any = args[0]
            again, owner, first = self._again_of(x)
            if again is not None:
                mine, tracked, last = again.kind, x.requires_grad, x
                for y in args:
                    if y is x or y is last:
                        continue
                    last = y
                    other = getattr(y, NAME, None)
                    if other is None:
                        if type(y) in SIMPLE or simple((y,)):
                            continue
                        again = None
                        break
                    if not self._goes_into(y, other, again, tracked):
                        again = None
                        break
                    even = even or other.sort is mine.sort
        except (RuntimeError, ValueError, AttributeError, IndexError):
            again = None  # as above
        if (
            again is None
            or functorch_active()
            or (
                (mine.ended or self._drawn_along() != mine.axes)
                if kind.random
                else kind.overwrites and not even and (mine.axes or mine.ended)  # it is of the type of what is written
            )
        ):
            return self._operation(kind, func, args, kwargs)
        result = func(*args, **kwargs) if kwargs else func(*args)
        self._went_into(x, owner, again, first)
        if short is None and again.span is not None and (owner is x or even or kind.random or not kind.overwrites):
            self._shorten(kind, func, args, mine)
        if result is not x and result is not None:
            self._note_all(result, mine)
        return result

    def _again_of(self, x: Any) -> tuple[Again | None, Any, bool]:
        """What is known of ``x``, which is to be written into, None if it is to be looked at longer; of whom it is
        known, ``x`` or what that is a view of; whether nothing was ever noted of its memory.
        """
        mine, base = x._meshcomm_type, x._base
        owner = x if base is None or getattr(base, NAME, None) is not mine else base
        again, first, before = getattr(owner, AGAIN, None), False, x._version
        if (
            again is None
            or again.at != before
            or again.kind is not mine
            or again.grid is not self.grid
            or getattr(x.untyped_storage(), AGAIN, None) is not again
            or lent
        ):
            again = None
            if owner is x or owner.untyped_storage() is x.untyped_storage():
                again = self._target(owner, mine, before)
                first = again is not None and again.span is not None and getattr(owner, AGAIN, None) is not again
        tracked = x.requires_grad  # where its type says otherwise, that is to be noted
        if (
            tracked is mine.plain
            or (tracked and not in_graph_of(x, mine))
            or (first and getattr(x, NOTED_AT, 0) != before)
        ):
            again = None
        return again, owner, first

    def _goes_into(self, y: Any, other: Type, again: Again, tracked: bool) -> bool:
        """Whether ``y``, of this type, leaves that of what is written as it is, and nothing is to be looked for; that
        may be in a graph, if it is ``tracked``.
        """
        grid, mine = self.grid, again.kind
        return not (
            (other.sort is not mine.sort and (again.span is None or not remains(mine, other)))
            or ((at := y._version) and at != getattr(y, NOTED_AT, 0))
            or (other.grid is not grid and other.grid is not ANYWHERE)
            or (
                y.requires_grad
                and (other.plain or not (tracked and other.sort is mine.sort if is_grad_enabled() else y.is_leaf))
            )
            or (
                writes.any
                and not grid.written <= other.axes
                and (written := getattr(y.untyped_storage(), WRITTEN, None)) is not None
                and not no_wider(written, other, grid)
            )
        )

    def _stays_so(self, x: Any, others: Args) -> bool:
        """Whether no type is to be noted where ``x`` is computed of these."""
        mine = getattr(x, NAME)
        if mine.axes and not is_written(x.untyped_storage(), mine, self.grid):
            return False
        for y in others:
            other = getattr(y, NAME, None)
            if other is not None and other.sort is not mine.sort and not remains(mine, other):
                return False
        return True

    def _went_into(self, x: Any, owner: Any, again: Again, first: bool) -> None:
        """Note that ``x`` was written into."""
        span = again.span
        if first:
            if vars(owner.untyped_storage()):  # another one of the same list has this memory
                span = None
            else:
                self._first(owner, again)
        before, after = again.at, x._version
        if span is not None and span[1] == before:  # as saw does it
            span[1] = again.at = x._meshcomm_version = owner._meshcomm_version = after
        else:
            saw(x, before, after)
            self._spread(x, again.kind)

    def _target(self, x: Any, mine: Type, before: int) -> Again | None:
        """What may be written into, itself or through a view of its type, by what is of this type, as long as nothing
        else is noted of its memory; None if it may not.
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
        if not (vars(storage) or lent):
            return Again(mine, grid, [before, before], before)
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

    def _first(self, x: Any, again: Again, short: Any = None) -> None:
        """Note what was written into ``x``, of whose memory nothing was noted before; ``short``: by what, which
        remembers the instruction of the frame before the last one.
        """
        storage, axes = x.untyped_storage(), again.kind.axes
        if axes:
            writes.any = True
            written_along(axes, self.grid)
            frame = sys._getframe(2)
            code, place, kind = short.met if short is not None else _NOWHERE
            if code is not frame.f_code or place != frame.f_lasti:
                kind = self._begun_here("a write in place", axes)
                if short is not None and not is_ours(frame.f_code.co_filename):
                    short.met = frame.f_code, frame.f_lasti, kind
            setattr(storage, WRITTEN, kind)
        setattr(storage, SEEN, [again.span])
        x._meshcomm_again = storage._meshcomm_again = again  # AGAIN
