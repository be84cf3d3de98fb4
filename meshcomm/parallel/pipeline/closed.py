"""A stage must not communicate along the axis of its pipeline: each rank runs it at other times, and the others would
wait. It may ask where it is.
"""

from __future__ import annotations

import copy
from typing import Any

from meshcomm.axis import Axis, axes_in
from meshcomm.errors import fail
from meshcomm.runtime.transports.threads.scheduler import current_rank


class closed:  # noqa: N801
    """Inside, a collective along ``axis``, or along axes that it is part of, is refused; ``where`` names the caller. It
    may be entered again and again, once at a time.
    """

    __slots__ = ("_axis", "_holder", "_made", "_open", "_where")

    def __init__(self, where: str, axis: Axis) -> None:
        self._where, self._axis = where, axis
        self._made: _Tables | None = None

    def __enter__(self) -> None:
        axis = self._axis
        rank = current_rank() if axis.mesh.in_process else None
        self._holder: Any = axis.mesh if rank is None else rank
        self._open = tables = self._holder.axes
        made = self._made
        if made is None or not made.is_of(self._holder, tables):
            self._made = made = _Tables(self._where, axis, self._holder, tables)
        self._holder.axes = made

    def __exit__(self, *_: object) -> None:
        self._holder.axes = self._open


class _Tables(dict[Any, Axis]):
    """The axes that a rank finds, made of those that it has."""

    def __init__(self, where: str, axis: Axis, holder: Any, tables: dict[Any, Axis]) -> None:
        super().__init__()
        self._where, self._axis, self._holder, self._open = where, axis, holder, tables
        for key, found in tables.items():
            self[key] = self._seen(found)

    def is_of(self, holder: Any, tables: dict[Any, Axis]) -> bool:
        """Whether it would be made of these."""
        return self._open is tables and self._holder is holder

    def __missing__(self, key: Any) -> Axis:
        mesh, name = (self._axis.mesh, key) if self._holder is self._axis.mesh else key
        self._holder.axes = self._open
        try:
            found: Axis = mesh.axis(name, self._where)
        finally:
            self._holder.axes = self
        self[key] = found = self._seen(found)
        return found

    def _seen(self, axis: Axis) -> Axis:
        apart = set(axes_in(axis.name)).isdisjoint(axes_in(self._axis.name))
        return axis if apart or axis.mesh is not self._axis.mesh else _closed(axis, self._where)


def _closed(axis: Axis, where: str) -> Axis:
    other = copy.copy(axis)
    other.__class__ = _Closed
    other.pipeline = where  # type: ignore[attr-defined]
    return other


class _Closed(Axis):
    """Says all that an axis says, and has no link."""

    pipeline: str

    @property
    def link(self) -> Any:  # type: ignore[override]
        """None: who asks wants to communicate."""
        what = f"a stage communicates along axis {self.name!r}, along which its pipeline goes."
        at = ", ".join(f"{name}={place}" for name, place in self.coordinate.items())
        fix = "before the pipeline or after it: each rank runs its stage at other times"
        fail(self.pipeline, what, got=f"mesh {self.mesh.shape}; at {at}", fix=fix)
