"""What the checker of varying types sees at once of functions of lists of tensors, element by element: what optimizers
do with all parameters together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from meshcomm._torch import functorch_active
from meshcomm.spmd.types.foreign_memory import lent
from meshcomm.spmd.types.grids import ANYWHERE
from meshcomm.spmd.types.rules.in_place import NOT_SEEN, InPlace, in_graph_of
from meshcomm.spmd.types.rules.operands import SIMPLE
from meshcomm.spmd.types.rules.short import SEVERAL, Args, simple
from meshcomm.spmd.types.rules.torch_rules import Kind
from meshcomm.spmd.types.seen_changes import AGAIN, NOTED_AT
from meshcomm.spmd.types.vma import NAME, WRITTEN, Type, no_wider, writes


class Foreach(InPlace):
    """Sees what is done with each element as what is done with one tensor."""

    def _each_at_once(self, kind: Kind, func: Any, args: Args, kwargs: Any) -> Any:
        """What it gives of rows of tensors, where nothing new is to be found out of any."""
        rows: list[Any] = []
        for arg in (*args, *kwargs.values()) if kwargs else args:
            if type(arg) in SEVERAL and arg and isinstance(arg[0], Tensor):
                rows.append(arg)
            elif isinstance(arg, Tensor) and rows:
                rows.append([arg] * len(rows[0]))
            elif type(arg) not in SIMPLE and not simple((arg,)):
                return NOT_SEEN
        if not rows or rows[0] is not args[0] or not kind.name.startswith("_foreach_") or functorch_active() or lent:
            return NOT_SEEN
        count = len(rows[0])
        for row in rows:
            if len(row) != count:
                return NOT_SEEN
        looked: Any = self._each_into(rows) if kind.in_place else self._even(rows)
        if looked is None:
            return NOT_SEEN
        results = func(*args, **kwargs) if kwargs else func(*args)
        if kind.in_place:
            for x, (again, owner, first) in zip(rows[0], looked, strict=True):
                if owner is x and not first and (span := again.span) is not None and span[1] == again.at:
                    span[1] = again.at = x._meshcomm_version = x._version  # as `_went_into` does it
                else:
                    self._went_into(x, owner, again, first)
        if isinstance(results, (list, tuple)):
            for y, x, whole in zip(results, rows[0], looked, strict=False):
                if y is not x:
                    self._note_new(y, whole[0].kind if kind.in_place else whole)
        return results

    def _note_new(self, y: Any, kind: Type) -> None:
        """Note the type of what was made of one element."""
        new = type(y) is Tensor and getattr(y, NAME, None) is None and y._base is None
        if new and not (y.is_inference() or y._version):  # an inference tensor does not count its changes
            y._meshcomm_type = kind if kind.plain != y.requires_grad else kind.seen(kind.plain)
        else:
            self._note(y, kind)

    def _each_into(self, rows: Sequence[Any]) -> list[Any] | None:
        """What is known of each that those beside it go into; None if one is to be looked at longer."""
        grid, found = self.grid, []
        again: Any
        try:
            for x in rows[0]:
                again, kind = getattr(x, AGAIN, None), x._meshcomm_type
                if (
                    again is None
                    or again.at != x._version
                    or again.kind is not kind
                    or again.grid is not grid
                    or getattr(x.untyped_storage(), AGAIN, None) is not again
                    or (tracked := x.requires_grad) is kind.plain
                    or (tracked and not in_graph_of(x, kind))
                ):
                    again, owner, first = self._again_of(x)
                    if again is None:
                        return None
                    found.append((again, owner, first))
                else:
                    found.append((again, x, False))
            mine = last = None
            looks = True
            for row in rows[1:]:
                for x, y, (again, _, _) in zip(rows[0], row, found, strict=True):
                    other = y._meshcomm_type
                    if (
                        other is not last
                        or again.kind is not mine
                        or ((at := y._version) and at != getattr(y, NOTED_AT, 0))
                        or y.requires_grad
                        or (looks and getattr(y.untyped_storage(), WRITTEN, None) is not None)
                    ):
                        if not self._goes_into(y, other, again, x.requires_grad):
                            return None
                        looks = writes.any and not grid.written <= other.axes
                        mine, last = again.kind if again.span is not None else None, other
        except (RuntimeError, ValueError, AttributeError):  # as in place of one
            return None
        return found

    def _even(self, rows: Sequence[Any]) -> list[Type] | None:
        """The type of each, if those beside it are of the same sort; None if one is to be looked at longer."""
        grid, types = self.grid, []
        try:
            for group in zip(*rows, strict=True):
                mine = group[0]._meshcomm_type
                for x in group:
                    kind = x._meshcomm_type
                    if (
                        kind.sort is not mine.sort
                        or ((at := x._version) and at != getattr(x, NOTED_AT, 0))
                        or (kind.grid is not grid and kind.grid is not ANYWHERE)
                        or (kind.plain and x.requires_grad)
                        or (
                            writes.any
                            and not grid.written <= kind.axes
                            and (written := getattr(x.untyped_storage(), WRITTEN, None)) is not None
                            and not no_wider(written, kind, grid)
                        )
                    ):
                        return None
                types.append(mine)
        except (RuntimeError, ValueError, AttributeError):
            return None
        return types
