"""Where the parameters of a fully sharded module stand, and what is the same for all of its units."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from operator import is_, setitem
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from meshcomm.axis import Axis, axes_in
from meshcomm.errors import fail, shape_text


@dataclass(frozen=True)
class Policy:
    """What is the same for all units, but for parameters that go over fewer axes."""

    axis: Axis
    replica: Axis | None
    op: str
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    accumulate_dtype: torch.dtype | None
    prefetch: int
    device: torch.device
    offload: bool
    names: tuple[str, ...] = field(init=False, compare=False)
    """Of the axes that gradients are reduced over, written out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(name for axis in self.axes for name in axes_in(axis.name)))

    def travels(self, computed: torch.dtype) -> torch.dtype:
        """In which dtype gradients are reduced."""
        return self.reduce_dtype or self.accumulate_dtype or computed

    def collected(self, computed: torch.dtype) -> torch.dtype:
        """In which dtype they are added up before that."""
        return self.accumulate_dtype or self.travels(computed)

    @property
    def axes(self) -> list[Axis]:
        """Those that gradients are reduced over, one after the other."""
        return [self.axis] if self.replica is None else [self.axis, self.replica]


@dataclass
class Counts:
    """What a sharded module has communicated: calls, bytes that this rank has then, and what was started ahead."""

    gathers: int = 0
    regathers: int = 0
    ahead: int = 0
    reductions: int = 0
    replica_reductions: int = 0
    bytes_gathered: int = 0
    bytes_reduced: int = 0


raw: Any = dict.__getitem__
"""What is registered under a name behind a door."""


class Door(dict[str, "nn.Parameter | None"]):
    """A module's table of parameters: iterated over it gives the shards; looked into it gives the whole parameters
    while these are there. It has them gathered when a part of forward looks that no unit's forward surrounds, and when
    a checkpoint computes a part of forward again in backward. Between forward and backward it gives those of the
    outermost unit that forward has used.
    """

    def __init__(self, table: dict[str, nn.Parameter | None]) -> None:
        super().__init__(table)
        self.views: dict[str, Tensor] = {}
        self.openers: dict[str, Callable[[], bool]] = {}
        self.left: dict[str, Callable[[], Tensor | None]] = {}
        self.see: Mapping[str, Callable[[Any], Any]] = getattr(table, "see", {})  # as what tensor_parallel reads some

    def __getitem__(self, name: str) -> Any:
        found = self.views.get(name)
        if found is None:
            found = self.unseen(name)
        if self.see and found is not None and (see := self.see.get(name)) is not None:
            return see(found)
        return found

    def unseen(self, name: str) -> Any:
        """What there is under a name."""
        view = self.views.get(name)
        if view is not None:
            return view
        opener = self.openers.get(name)
        if opener is not None and opener():
            return self.views[name]
        if opener is not None and (view := self.left[name]()) is not None:
            return view
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """While the whole parameters are there, what ``functional_call`` puts in the place of one is seen, and the one
        that it has found is put back.
        """
        if name in self.views:
            self.views[name] = value
        else:
            super().__setitem__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Door:
        """Of what is registered; the units that are copied show their own."""
        copied = memo[id(self)] = Door({})
        copied.see = copy.deepcopy(self.see, memo)
        for name in self:
            dict.__setitem__(copied, name, copy.deepcopy(raw(self, name), memo))
        return copied


@dataclass(eq=False)
class Slot:
    """One parameter, wherever it is registered."""

    name: str
    param: nn.Parameter
    sites: list[tuple[Door, str]]

    def copied(self, memo: dict[int, Any]) -> Slot:
        """That of a copy of the module."""
        sites = [(copy.deepcopy(door, memo), name) for door, name in self.sites]
        return Slot(self.name, copy.deepcopy(self.param, memo), sites)


def refuse_replaced(name: str, found: Any, wanted: Sequence[int], axis: Axis) -> NoReturn:
    """MeshError: what stands in the place of a parameter is nothing of the ``wanted`` shape, of which this rank's part
    of it is.
    """
    now = f"it is {shape_text(found.dtype, found.shape)}" if isinstance(found, Tensor) else "it is not there any more"
    what = f"{name!r} was replaced or removed after fully_shard: {now}."
    if axis.size > 1:  # who waits for this rank
        axis.link.refuse("all_gather", f"meshcomm.fully_shard: {what}", axis)
    fail(
        "fully_shard",
        what,
        got=f"this rank has {[*wanted]} of it, along axis {axis.name!r} of {axis.mesh}",
        fix="replace, remove, tie and parametrize before fully_shard; other values come by load_full_state_dict, and "
        "functional_call takes each rank's parts",
    )


_run: Any = partial(deque, maxlen=0)
"""Goes through an iterator for what that does: a loop that is not Python's."""


class Sites:
    """Where the parameters of a unit are registered, and are shown while they are whole."""

    __slots__ = ("_each_once", "_names", "_tables", "_which")

    def __init__(self, slots: Sequence[Slot]) -> None:
        sites = [(door.views, name, which) for which, slot in enumerate(slots) for door, name in slot.sites]
        self._tables: Any = [table for table, _, _ in sites]
        self._names = [name for _, name, _ in sites]
        self._which = [which for _, _, which in sites]
        """Of the parameters of all groups, one behind the other."""
        self._each_once = self._which == [*range(len(slots))]

    def show(self, views: Sequence[list[Tensor]]) -> None:
        """These, of each group."""
        _run(map(setitem, self._tables, self._names, self._there(views)))

    def have(self, views: Sequence[list[Tensor]]) -> bool:
        """Whether these are what is shown."""
        return all(map(is_, map(dict.get, self._tables, self._names), self._there(views)))

    def hide(self) -> None:
        """Whatever is shown."""
        _run(map(dict.pop, self._tables, self._names, repeat(None)))

    def _there(self, views: Sequence[list[Tensor]]) -> list[Tensor]:
        every = views[0] if len(views) == 1 else [*chain.from_iterable(views)]
        return every if self._each_once else [every[which] for which in self._which]
