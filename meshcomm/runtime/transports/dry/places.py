"""What a rank of a dry run has read of its place: the ranks that are equal to it there do the same.

::

    mesh.coordinate["tp"], axis_index("tp"), axis.index    its index along tp
    is_main("tp"), axis.is_at(0)                           whether that is 0
    mesh.rank, mc.rank(), a mesh of some of the ranks      its rank: no other is equal to it
    all_reduce(x, "tp")                                    nothing: each rank has a group of its own

A rank goes the way of another if what that one read would have been the same for it: the first thing that is read is,
so is all that is done until the second one, and so on.
"""

from __future__ import annotations

import math
import sys
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any, NamedTuple

from torch import Tensor

from meshcomm.runtime.callsite import call_site, is_ours

Shape = tuple[tuple[str, int], ...]

KNOWN = "_meshcomm_known"
"""On a tensor without memory, its values where a dry run knows them."""


def by_program() -> bool:
    """Whether it is the program that asks the caller, and not the library for itself."""
    return not is_ours(sys._getframe(2).f_code.co_filename)


def forgotten(x: Tensor) -> Tensor:
    """``x``, which is another part on each rank: a dry run does not know its values, whatever they were made of."""
    if hasattr(x, KNOWN):
        delattr(x, KNOWN)
    return x


class PlaceRead(NamedTuple):
    """One thing that was read: an index, or whether it is this one."""

    shape: Shape
    """Of a mesh over all ranks in their order."""
    axes: tuple[str, ...]
    at: int | None = None

    def of(self, rank: int) -> int | bool:
        """What this rank would read."""
        places = {}
        for name, length in reversed(self.shape):
            rank, places[name] = divmod(rank, length)
        index = 0
        for name, length in self.shape_along:
            index = index * length + places[name]
        return index if self.at is None else index == self.at

    @property
    def shape_along(self) -> Shape:
        """Of what was read."""
        sizes = dict(self.shape)
        return tuple((name, sizes[name]) for name in self.axes)

    def __str__(self) -> str:
        over = ",".join(self.axes) if self.axes != (_WORLD,) else "its rank"
        return over if self.at is None else f"whether {over} is {self.at}"


_WORLD = "all ranks"


class PlaceReads:
    """What one rank has read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.found: dict[PlaceRead, str] = {}
        """And at which line first."""
        self.sizes: dict[str, None] = {}
        """Sizes of this rank's parts, which may be other ones elsewhere, and where they were made."""
        self.others: dict[str, None] = {}
        """What other ranks give, which a dry run takes to be what this one does, and where."""
        self.groups: dict[str, tuple[Shape, tuple[str, ...]]] = {}
        """The name of a sequence of calls, to the mesh and the axes that it is over."""
        self._meshes: dict[str, Shape] = {}

    def note(self, shape: Mapping[str, int], axes: tuple[str, ...], at: int | None = None) -> None:
        """The index along these axes of a mesh of this shape is read, or whether it is ``at``."""
        if math.prod(shape.values()) != self.size:
            return  # not of all ranks: the rank itself was read when it was made
        self._note(PlaceRead(tuple(shape.items()), axes, at))

    def note_rank(self, at: int | None = None) -> None:
        """The rank is read, or whether it is ``at``."""
        self._note(PlaceRead(((_WORLD, self.size),), (_WORLD,), at))

    def note_size(self, what: str) -> None:
        """A part of this rank's is made, whose size may depend on its place."""
        self.sizes[f"{what} at {call_site()}"] = None

    def note_others(self, what: str) -> None:
        """What others give is handed to the program, which may go by it."""
        self.others[f"{what} at {call_site()}"] = None

    def _note(self, read: PlaceRead) -> None:
        if read not in self.found:
            self.found[read] = str(call_site())

    def made(self, mesh: str, shape: Mapping[str, int], ranks: tuple[int, ...]) -> None:
        """A mesh of this name, over these ranks."""
        self._meshes[mesh] = tuple(shape.items())
        if len(ranks) != self.size or any(rank != at for at, rank in enumerate(ranks)):
            self.note_rank()

    def linked(self, mesh: str, axes: tuple[str, ...], group: str) -> None:
        """An axis of a mesh, with a sequence of calls."""
        self.groups[group] = self._meshes[mesh], axes

    def note_index(self, group: str, at: int) -> None:
        """Whether the index in this group is ``at`` is read."""
        shape, axes = self.groups[group]
        self.note(dict(shape), axes, at)

    def note_along(self, group: str) -> None:
        """The index in this group is read."""
        shape, axes = self.groups[group]
        self.note(dict(shape), axes)

    def take_over(self, theirs: Mapping[PlaceRead, str], group: str) -> None:
        """What came over ``group`` from an index that is the same for all of it depends on what that rank has read:
        along the other axes it is where this one is.
        """
        shape, along = self.groups[group]
        for read in theirs:
            if read.shape != shape:
                self.note_rank()
            elif rest := tuple(name for name in read.axes if name not in along):
                self._note(PlaceRead(shape, rest))


class ReadCoordinate(dict[str, int]):
    """A coordinate that says which of its entries are looked at."""

    def __init__(self, coordinate: Mapping[str, int], reads: PlaceReads, shape: Mapping[str, int]) -> None:
        super().__init__(coordinate)
        self._reads, self._shape = reads, dict(shape)

    def _all(self) -> None:
        for name in self._shape:
            self._reads.note(self._shape, (name,))

    def __getitem__(self, name: str) -> int:
        if name in self._shape:
            self._reads.note(self._shape, (name,))
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        return self[name] if name in self else default  # noqa: SIM401  # it is what asks

    def __iter__(self) -> Iterator[str]:  # or dict(this) would not ask
        return super().__iter__()

    def items(self) -> ItemsView[str, int]:  # type: ignore[override]
        """As of a dict."""
        self._all()
        return super().items()

    def values(self) -> ValuesView[int]:  # type: ignore[override]
        """As of a dict."""
        self._all()
        return super().values()

    def copy(self) -> dict[str, int]:
        """As of a dict."""
        return dict(self.items())

    def __eq__(self, other: object) -> bool:
        self._all()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def pop(self, name: str, *default: Any) -> Any:
        """As of a dict."""
        self._all()
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, int]:
        """As of a dict."""
        self._all()
        return super().popitem()

    def setdefault(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        self._all()
        return super().setdefault(name, default)

    def __repr__(self) -> str:
        self._all()
        return super().__repr__()

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)
