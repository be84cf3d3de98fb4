"""What the checker of varying types sees at once of what is computed in place: nearly all of what optimizers do."""

from __future__ import annotations

from typing import Any

from torch import Tensor, is_grad_enabled
from torch.nn import Parameter

from meshcomm._torch import functorch_active
from meshcomm.spmd.types.foreign_memory import lent
from meshcomm.spmd.types.grids import ANYWHERE
from meshcomm.spmd.types.rules.operands import SIMPLE
from meshcomm.spmd.types.rules.short import Args, Shorts, simple
from meshcomm.spmd.types.rules.torch_rules import Kind
from meshcomm.spmd.types.rules.writes import Writes
from meshcomm.spmd.types.seen_changes import AGAIN, NOTED_AT, SEEN, Again, saw
from meshcomm.spmd.types.vma import LEAF, NAME, WRITTEN, Type, no_wider, shared_leaves, writes


def remains(kind: Type, other: Type) -> bool:
    """Whether what is of a type stays as it is when what is of another type, and no gradient, is computed into it."""
    return other.axes <= kind.axes and not kind.leaf and other.ended.keys() <= kind.ended.keys() | kind.axes


class InPlace(Shorts, Writes):
    """Sees what is written by what has the type of what was there."""

    def _operation(self, kind: Kind, func: Any, args: Args, kwargs: Any) -> Any:
        """The long way."""
        raise NotImplementedError

    def _in_place(self, kind: Kind, func: Any, args: Args, kwargs: Any, short: Any) -> Any:
        """What is computed in place of operands that are all of the type of the first argument: that is left as it is
        where no graph has to do with it, and the change is noted as seen.
        """
        grid, slow, even = self.grid, writes.any, False
        within = grid.written
        again: Any = None
        try:
            x: Any = args[0]
            mine = x._meshcomm_type
            base = x._base
            owner = x if base is None or getattr(base, NAME, None) is not mine else base
            again = getattr(owner, AGAIN, None)
            if (
                again is None
                or (before := again.at) != x._version
                or again.kind is not mine
                or again.grid is not grid
                or getattr(x.untyped_storage(), AGAIN, None) is not again
                or lent
            ):
                before = x._version
                again = None
                if owner is x or owner.untyped_storage() is x.untyped_storage():
                    again = self._target(owner, mine, before)
            if x.requires_grad and (mine.plain or is_grad_enabled() or not x.is_leaf):
                again = None
            elif again is not None:
                last = x
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
                    if (
                        (other.sort is not mine.sort and (again.span is None or not remains(mine, other)))
                        or ((at := y._version) and at != getattr(y, NOTED_AT, 0))
                        or (other.grid is not grid and other.grid is not ANYWHERE)
                        or (y.requires_grad and (other.plain or is_grad_enabled() or not y.is_leaf))
                        or (
                            slow
                            and not within <= other.axes
                            and (written := getattr(y.untyped_storage(), WRITTEN, None)) is not None
                            and not no_wider(written, other, grid)
                        )
                    ):
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
        after = x._version
        if (span := again.span) is not None and span[1] == before:  # as saw does it
            span[1] = again.at = x._meshcomm_version = owner._meshcomm_version = after
            if short is None and (owner is x or even or kind.random or not kind.overwrites):
                self._shorten(kind, func, args, mine)
        else:
            saw(x, before, after)
            self._spread(x, mine)
        if result is not x and result is not None:
            self._note_all(result, mine)
        return result

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
