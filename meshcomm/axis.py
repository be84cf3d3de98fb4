"""What an axis of a mesh is for the rank that asks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.elsewhere import Answers
from meshcomm.errors import fail
from meshcomm.runtime.transports.dry.places import KNOWN, ReadCoordinate, by_program
from meshcomm.runtime.transports.protocol import Link

T = TypeVar("T")
AxisName = str | tuple[str, ...]
"""The name of a mesh axis, or several in order, the first one major."""


def axes_in(name: AxisName | tuple[()]) -> tuple[str, ...]:
    """The names of the axes in a name, which is one, or several already."""
    return name if isinstance(name, tuple) else (name,)


_keys = itertools.count()


class Axis(Answers):
    """One rank's view of an axis (or of several as one): its size, this rank's index on it and the link to the
    others.
    """

    def __init__(
        self,
        mesh: Any,
        name: AxisName,
        ranks: tuple[int, ...],
        index: int,
        link: Link,
        coordinate: dict[str, int],
        index_tensor: Tensor | None = None,
    ) -> None:
        self.mesh = mesh  # its Mesh, which knows its axes
        self.name = name
        self.ranks = self.own_ranks = ranks
        self.size = len(ranks)
        self.index = self.own_index = index
        self.link = link
        self.coordinate = self.own_coordinate = coordinate
        self.devices: tuple[torch.device, ...] = ()  # those that the link is known to move, but for the CPU:
        self.moves_cpu = False  # to ask for that takes a tenth of the time
        self.is_on_cpu = False  # whether its processes are known to compute on the CPU
        self.sum_hook: Tensor | None = None  # what a gradient goes through behind a sum; see collectives/rule.py
        self.key = str(next(_keys))  # a graph takes a number that has changed for one that may be any
        _axes[self.key] = self
        self.is_traced = index_tensor is not None
        if index_tensor is not None:
            self.index_tensor = index_tensor
        elif not mesh.in_process:
            self.index_tensor = self._own_index_tensor()  # a graph finds it made
        for told in _told:
            told(self)

    @cached_property
    def index_tensor(self) -> Tensor:
        """The index on the mesh's device."""
        return self._own_index_tensor()

    def _own_index_tensor(self) -> Tensor:
        with _torch.outside_transforms():  # it outlives whatever the first user is in the middle of
            return torch.tensor(self.own_index, device=self.mesh.device)

    def traced(self, index_tensor: Tensor) -> Axis:
        """The same axis with a link whose operations trace.

        ``index_tensor`` is an input of the graph: a constant would make the ranks' graphs differ, and the compiler
        might drop from one of them what another one waits for.
        """
        if self.is_traced:
            return self
        return Axis(
            self.mesh, self.name, self.own_ranks, self.own_index, self.link.traced(), self.own_coordinate, index_tensor
        )

    def is_at(self, index: int) -> bool:
        """Whether this is the rank of this index, for what depends on nothing else of it."""
        if self.mesh.reads is not None:
            self.mesh.reads.note(self.mesh.shape, axes_in(self.name), index)
        return self.own_index == index

    def own_part(self, what: str) -> int:
        """This rank's index, for a part of something whose size may depend on it and nothing else does; ``what``: which
        size that is, in words.
        """
        if self.mesh.reads is not None:
            self.mesh.reads.note_size(what)
        return self.own_index

    def own_place(self, x: Tensor) -> int:
        """This rank's index, for its part of ``x``: it is read with the part, where the values of that are known."""
        known = self.mesh.reads is not None and (not _torch.is_without_memory(x) or hasattr(x, KNOWN))
        return self.index if known else self.own_index

    def own_of(self, of_each: Sequence[T]) -> T:
        """What is this rank's of what there is for each index."""
        alike = self.mesh.reads is not None and all(each == of_each[0] for each in of_each)
        return of_each[self.own_index if alike else self.index]

    def places(self) -> dict[int, str]:
        """Rank of the world to its place on the mesh: ``dp=1,tp=0``."""
        found: dict[int, str] = self.mesh.places()
        return found

    @property
    def group(self) -> str:
        """The name of its sequence of calls, alike on all of its ranks: that of the mesh, and its own."""
        return f"{self.mesh._identity}: {self.name if isinstance(self.name, str) else ','.join(self.name)}"

    def __repr__(self) -> str:
        at = ", ".join(f"{name}={place}" for name, place in self.coordinate.items())
        return f"{self.name!r} ({at})"


_OWN = frozenset(("own_index", "own_ranks", "own_coordinate"))


class ReadAxis(Axis):
    """One of a run in which somebody wants to know what a rank asks of its place."""

    @property
    def index(self) -> int:
        """This rank's, which what it does next may depend on; ``own_index`` where that is not so."""
        assert self.mesh.reads is not None
        self.mesh.reads.note(self.mesh.shape, axes_in(self.name))
        return self.own_index

    @index.setter
    def index(self, index: int) -> None:
        self.own_index = self.__dict__["index"] = index

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN and by_program():
            name = name.removeprefix("own_")
        return super().__getattribute__(name)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those along it, which say where this one is along the others."""
        assert self.mesh.reads is not None
        if rest := tuple(name for name in self.mesh.axis_names if name not in axes_in(self.name)):
            self.mesh.reads.note(self.mesh.shape, rest)
        return self.own_ranks

    @ranks.setter
    def ranks(self, ranks: tuple[int, ...]) -> None:
        self.own_ranks = self.__dict__["ranks"] = ranks

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's place; ``own_coordinate`` where nothing that it does next depends on it."""
        assert self.mesh.reads is not None
        return ReadCoordinate(self.own_coordinate, self.mesh.reads, self.mesh.shape)

    @coordinate.setter
    def coordinate(self, coordinate: dict[str, int]) -> None:
        self.own_coordinate = self.__dict__["coordinate"] = coordinate


_axes: weakref.WeakValueDictionary[str, Axis] = weakref.WeakValueDictionary()

_told: list[Callable[[Axis], object]] = []


def on_new_axis(tell: Callable[[Axis], object]) -> None:
    """Call ``tell`` with every axis that is made from now on."""
    _told.append(tell)


def all_axes() -> list[Axis]:
    """Those of all meshes, and of all ranks of this process."""
    return [axis for ref in _axes.valuerefs() if (axis := ref()) is not None]


def forget_axes(ended: Callable[[Axis], bool]) -> None:
    """What is told of all axes no longer hears of these, though somebody may have them still."""
    for key, axis in list(_axes.items()):
        if ended(axis):
            _axes.pop(key, None)


def axis_with_key(key: str) -> Axis:
    """The axis that a compiled graph speaks of."""
    try:
        return _axes[key]
    except KeyError:
        fail("mesh", "a compiled function uses a mesh that is gone.", fix="compile it again with the new mesh")
