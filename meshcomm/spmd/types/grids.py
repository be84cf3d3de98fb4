"""Which mesh the axes of a type are axes of: equal names say nothing where the meshes differ.

Two meshes that are equal in names, sizes, order and ranks are one grid. On another mesh over the same ranks a value
varies along other axes, if it can be said by axes at all: then the same ranks have the same value.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, NamedTuple, Protocol


class HasGrid(Protocol):
    """What is known of a mesh here: the names and sizes of its axes, and its ranks in order."""

    @property
    def shape(self) -> dict[str, int]:
        """Name to size."""

    ranks: tuple[int, ...]


class Moved(NamedTuple):
    """What the type of a value is on another mesh."""

    axes: frozenset[str]
    closed: bool
    """Whether all ranks that have the same value are ranks of that mesh: otherwise its gradient there is a part."""


class Grid:
    """The names, sizes and ranks of a mesh."""

    def __init__(self, shape: dict[str, int], ranks: tuple[int, ...]) -> None:
        self.shape, self.ranks = shape, ranks
        self.axes = frozenset(shape)
        self._moved: dict[tuple[Grid, frozenset[str]], Moved | None] = {}
        self.named: dict[frozenset[str], str | tuple[str, ...]] = {}
        """What several of its axes are called together, in its order; one by its name."""
        self.joined: dict[Any, Any] = {}
        """What types on it make together, for who joins them."""
        self.given: dict[Any, Any] = {}
        """What collectives over its axes make of types, for who calls them."""
        self.here: dict[Any, Any] = {}
        """The types of random numbers, of what is written, and of gradients, by where these are made."""
        self.short: dict[Any, Any] = {}
        """How operations on operands of types on it are seen, for who sees them."""
        self.written = ANY if wrote.any else frozenset()
        """Nothing was ever written into memory, as far as that is noted, that varies along other axes than these."""

    def moved(self, axes: frozenset[str], to: Grid) -> Moved | None:
        """Along which axes of another mesh varies what varies along these of this one; None if that cannot be said."""
        key = to, axes
        if key not in self._moved:
            self._moved[key] = self._find(axes, to) if set(to.ranks) <= set(self.ranks) else None
        return self._moved[key]

    def _find(self, axes: frozenset[str], to: Grid) -> Moved | None:
        values, places = self._places(axes), to._places(frozenset(to.shape))
        single = {axis for axis, size in to.shape.items() if size == 1 and axis in axes}
        found = frozenset(axis for i, axis in enumerate(to.shape) if _matters(i, values, places))
        mine = to._places(found)
        pairs = {(mine[rank], values[rank]) for rank in to.ranks}
        if not len(pairs) == len({place for place, _ in pairs}) == len({value for _, value in pairs}):
            return None
        inside = {values[rank] for rank in to.ranks}
        closed = all(rank in places for rank, value in values.items() if value in inside)
        return Moved(found | single, closed)

    def _places(self, axes: frozenset[str]) -> dict[int, tuple[int, ...]]:
        """Rank to its indices along these axes."""
        indices = itertools.product(*(range(size) for size in self.shape.values()))
        wanted = [i for i, axis in enumerate(self.shape) if axis in axes]
        return {
            rank: tuple(place[i] for i in wanted) for rank, place in zip(self.ranks, indices, strict=True)
        }  # fmt: skip


def _matters(axis: int, values: dict[int, tuple[int, ...]], places: dict[int, tuple[int, ...]]) -> bool:
    """Whether two ranks that differ along this axis alone have different values."""
    seen: dict[tuple[int, ...], tuple[int, ...]] = {}
    return any(
        seen.setdefault(place[:axis] + place[axis + 1 :], values[rank]) != values[rank]
        for rank, place in places.items()
    )


ANY = frozenset([""])
"""No axes of any grid: what is written may vary as it likes."""


class _Wrote:
    """What is noted as written, whatever it is."""

    __slots__ = ("any", "mark")

    def __init__(self) -> None:
        self.any, self.mark = False, object()
        """Another object each time that more may have been written than before, on any grid."""


wrote = _Wrote()
_grids: dict[tuple[tuple[tuple[str, int], ...], tuple[int, ...]], Grid] = {}
_lock = threading.Lock()

ANYWHERE = Grid({}, ())
"""Of what is the same on every rank there is."""


def grid_of(mesh: HasGrid) -> Grid:
    """The grid of a mesh; the same one for equal meshes."""
    key = tuple(mesh.shape.items()), mesh.ranks
    found = _grids.get(key)
    if found is None:
        with _lock:
            found = _grids.setdefault(key, Grid(mesh.shape, mesh.ranks))
    return found


def written_along(axes: frozenset[str], on: Grid | None) -> None:
    """What varies along these axes of a grid is about to be noted as written; None: along which is not known."""
    if on is not None and axes and axes <= on.written:
        return
    with _lock:
        wrote.any = True
        for grid in sorted(_grids.values(), key=lambda grid: grid is on):  # who finds it on this one looks no further
            more = axes if grid is on else ANY
            if not more <= grid.written:
                grid.written |= more
                wrote.mark = object()
