"""What operands of several types make together: the join of their types, for which the checker of varying types
varies what lacks axes.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from meshcomm._torch import unwrap_if_dead
from meshcomm.runtime.callsite import outermost
from meshcomm.spmd.types.core import Core
from meshcomm.spmd.types.rules.operands import same_place
from meshcomm.spmd.types.rules.short import SEVERAL, Args
from meshcomm.spmd.types.vma import NAME, Type, join

_NOWHERE: dict[Any, Any] = {}
_MOST = 1024
"""Joins that are remembered: of as many types, and of one pair at as many places."""


class Several(Core):
    """Joins types, and varies what is to be varied."""

    _joined: dict[tuple[Type, ...], Type | dict[tuple[int, int, str], tuple[CodeType, Type]]]

    def _joined_here(self, types: tuple[Type, ...], name: str, frame: FrameType) -> Type:
        """The type of what is made of operands of these types by the instruction of this frame, where it matters."""
        joined: Any = self._joined.get(types, _NOWHERE)
        if type(joined) is Type:
            return joined
        frame = outermost(frame)
        place = id(frame.f_code), frame.f_lasti, name
        found = joined.get(place)
        return self._join(types, name, place, frame) if found is None else found[1]

    def _join_here(self, types: tuple[Type, ...], name: str) -> Type:
        """The same, by the user's instruction that has led here, if any."""
        return self._joined_here(types, name, sys._getframe(1))

    def _evened_at_once(self, axes: frozenset[str], name: str, args: Args) -> Args:
        """The arguments, of which the first may be a list, and all types are known as of now, with a pvary of what is
        to be varied to vary along these axes.
        """
        given: Any = None
        rows = type(args[0]) in SEVERAL
        flat = args[0] if rows else args
        for i, x in enumerate(flat):
            mine = getattr(x, NAME, None)
            if mine is None or mine.axes is axes or not x.requires_grad:
                continue
            lacks, at = axes - mine.axes if mine.axes else axes, x._version
            entry, y = self._pvaried.get(id(x)), None
            if (
                entry is not None
                and (entry.again is lacks or entry.again == lacks)
                and entry.newest
                and entry.version == at
            ):
                try:  # as `_varied_before` does it, of a leaf for which the same was asked last
                    y = entry.varied if x.dtype is entry.dtype and entry.lies_as(x) else None
                except RuntimeError:
                    y = None
            if y is None and (y := self._varied_before(x, at, lacks)) is None:
                operands = [each for each in flat if getattr(each, NAME, None) is not None]
                y = self.vary(x, lacks, name, operands, [getattr(each, NAME) for each in operands])
            if given is None:
                given = list(flat)
            given[i] = y
        return args if given is None else (given, *args[1:]) if rows else given

    def _pair_before(self, x: Tensor, at: int, y: Tensor, lacks: frozenset[str]) -> tuple[Any, Any] | None:
        """The pvarys of two leaves, the first one changed so often, if these were asked for last, as a weight and a
        bias are.
        """
        first, second = self._pvaried.get(id(x)), self._pvaried.get(id(y))
        try:  # as `_varied_before` does it of one
            if (
                first is not None
                and second is not None
                and first.again is lacks
                and second.again is lacks
                and first.newest
                and second.newest
                and first.version == at
                and second.version == y._version
                and x.requires_grad
                and y.requires_grad
                and x.dtype is first.dtype
                and y.dtype is second.dtype
                and first.lies_as(x)
                and second.lies_as(y)
            ):
                return first.varied, second.varied
        except RuntimeError:
            pass
        return None

    def _varied_before(self, x: Tensor, at: int, axes: frozenset[str]) -> Tensor | None:
        """The pvary of ``x``, changed so often, that vary would give, if it was made before."""
        entry = self._pvaried.get(id(x))
        if (
            entry is None
            or entry.version != at
            or not x.requires_grad
            or (entry.node is not None and entry.node is not x.grad_fn)
            or (y := entry.by.get(axes)) is None
            or (entry.wrapped and unwrap_if_dead(y) is not y)
        ):
            return None
        try:
            if x.dtype is not y.dtype or not x.is_set_to(y):
                return None
            if entry.node is None and not entry.wrapped:
                entry.again, entry.varied, entry.dtype, entry.lies_as = axes, y, y.dtype, y.is_set_to
        except (NotImplementedError, RuntimeError):
            if not same_place(x, y):
                return None
        if not entry.newest:
            self._use(entry)
        return y

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
        if all([each.plain for each in types]):  # noqa: C419 -- a generator costs twice as much
            whole = whole.seen(False)
        places = self._joined.setdefault(types, {})
        assert isinstance(places, dict)
        if len(places) >= _MOST:
            places.clear()
        places[place] = frame.f_code, whole
        return whole
