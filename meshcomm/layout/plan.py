"""The cheapest way from one layout to another: a shortest path, in bytes sent, over what single collectives do.

A state says for each dim over which axes it is cut, major first. One step gathers the last axes of a dim, cuts a dim
once more, moves the last axes of one dim to another, or lets ranks exchange whole pieces. Many bytes are worse than
many steps, and of plans that send the same the one with fewer collectives is taken.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from meshcomm.collectives import check
from meshcomm.errors import fail, names
from meshcomm.layout.notation import Dim, Layout, Pattern, parse_arrow
from meshcomm.layout.shapes import checked_shape, cut, fit
from meshcomm.mesh import Mesh

__all__ = ["Plan", "State", "Step", "cheapest", "plan", "plan_of", "sides_of"]

State = tuple[tuple[str, ...], ...]
"""Per dim the axes that it is cut over, major first."""
Perm = tuple[tuple[int, int], ...]


class Step(NamedTuple):
    """One collective of a plan."""

    op: str
    """"all_gather_invariant", "shard", "all_to_all" or "permute"."""
    axes: tuple[str, ...]
    dim: int
    """The dim that is gathered or cut; of all_to_all the one that is gathered."""
    to: int
    """The dim that all_to_all cuts; else the same as ``dim``."""
    perm: Perm
    """Of permute: pairs of indices along ``axes``."""
    elements: int
    """How many elements a rank sends."""
    after: State
    """The layout that comes out."""


class Plan(NamedTuple):
    """What :func:`meshcomm.reshard` will do. ``str`` prints it with the bytes that each rank sends."""

    text: str
    shape: tuple[int, ...]
    """The global shape, its dims in the order of the left side."""
    itemsize: int
    mesh: dict[str, int]
    steps: tuple[Step, ...]
    dims: tuple[str, ...]
    """The names of the dims."""
    order: tuple[int, ...]
    """Where each dim of the result is on the left."""

    @property
    def bytes_sent(self) -> int:
        """By each rank, in all."""
        return self.itemsize * sum(step.elements for step in self.steps)

    @property
    def bytes_by_axes(self) -> dict[tuple[str, ...], int]:
        """By each rank, per axis or tuple of axes."""
        found: dict[tuple[str, ...], int] = {}
        for step in self.steps:
            if step.elements:
                found[step.axes] = found.get(step.axes, 0) + self.itemsize * step.elements
        return found

    @property
    def collectives(self) -> tuple[str, ...]:
        """The names of those that communicate, in order."""
        return tuple(step.op for step in self.steps if step.elements)

    def __str__(self) -> str:
        lines = [f"{self.text}: {self.bytes_sent:,} bytes sent per rank"]
        for step in self.steps:
            what = f"{step.op} over {' '.join(step.axes)}"
            where = f"dim {self.dims[step.dim]}"
            if step.op == "all_to_all":
                where += f" to dim {self.dims[step.to]}"
            layout = Layout(Dim(name, axes) for name, axes in zip(self.dims, step.after, strict=True))
            told = "" if step.op == "permute" else f", {where}"
            lines.append(f"  {what}{told}: {self.itemsize * step.elements:,} bytes -> {layout}")
        if self.order != tuple(range(len(self.order))):
            lines.append("  the dims are moved: 0 bytes")
        return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- the search


def cheapest(source: State, target: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[Step, ...]:
    """The steps from one state to another; ``shape`` is the global one, ``sizes`` those of the axes spoken of."""
    return _cheapest(source, target, shape, tuple(sizes.items()))


@lru_cache(10_000)
def _cheapest(
    source: State, target: State, shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]
) -> tuple[Step, ...]:
    search = _Search(shape, dict(sizes))
    ticket = itertools.count()
    paths: dict[State, tuple[Step, ...]] = {}
    queue: list[tuple[int, int, int, int, State, tuple[Step, ...]]] = [(0, 0, 0, next(ticket), source, ())]
    while queue:
        sent, collectives, count, _, state, path = heapq.heappop(queue)
        if state in paths:
            continue
        paths[state] = path
        if state == target:
            break
        for step in search.steps(state):
            if step.after not in paths:
                cost = sent + step.elements, collectives + bool(step.elements), count + 1
                heapq.heappush(queue, (*cost, next(ticket), step.after, (*path, step)))
    return paths[target]


class _Search:
    """What single steps lead to."""

    def __init__(self, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
        self.shape, self.sizes = shape, sizes
        self.states: dict[tuple[int, ...], list[State]] = {}

    def number(self, axes: Sequence[str]) -> int:
        """How many ranks there are along these axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def parts(self, state: State) -> tuple[int, ...]:
        """Into how many pieces each dim is cut."""
        return tuple(self.number(axes) for axes in state)

    def elements(self, state: State) -> int:
        """Of one piece."""
        return math.prod(self.shape) // math.prod(self.parts(state))

    def divides(self, dim: int, axes: Sequence[str]) -> bool:
        """Whether a dim can be cut over these axes."""
        return self.shape[dim] % self.number(axes) == 0

    def steps(self, state: State) -> Iterator[Step]:
        """All from here."""
        mine = self.elements(state)
        for dim, axes in enumerate(state):
            for first in range(len(axes)):
                last = axes[first:]
                kept = _with(state, dim, axes[:first])
                n = self.number(last)
                yield Step("all_gather_invariant", last, dim, dim, (), (n - 1) * mine, kept)
                for to in range(len(state)):
                    if to != dim and self.divides(to, state[to] + last):
                        after = _with(kept, to, state[to] + last)
                        yield Step("all_to_all", last, dim, to, (), (n - 1) * mine // n, after)
        for axis in self.sizes:
            if not any(axis in axes for axes in state):
                for dim, axes in enumerate(state):
                    if self.divides(dim, (*axes, axis)):
                        yield Step("shard", (axis,), dim, dim, (), 0, _with(state, dim, (*axes, axis)))
        yield from self._permutes(state, mine)

    def _permutes(self, state: State, mine: int) -> Iterator[Step]:
        if not self.states:
            for each in self._all_states(len(state)):
                self.states.setdefault(self.parts(each), []).append(each)
        for after in self.states[self.parts(state)]:
            if after != state:
                axes = tuple(axis for axis in self.sizes if _place(axis, state) != _place(axis, after))
                perm = self._perm(state, after, axes)
                moved = any(a != b for a, b in perm)
                yield Step("permute", axes, 0, 0, perm, mine if moved else 0, after)

    def _all_states(self, dims: int) -> Iterator[State]:
        def put(state: State, rest: tuple[str, ...]) -> Iterator[State]:
            if not rest:
                yield state
                return
            axis, *others = rest
            yield from put(state, tuple(others))
            for dim, axes in enumerate(state):
                for at in range(len(axes) + 1):
                    cut_once_more = (*axes[:at], axis, *axes[at:])
                    if self.divides(dim, cut_once_more):
                        yield from put(_with(state, dim, cut_once_more), tuple(others))

        yield from put(((),) * dims, tuple(self.sizes))

    def _perm(self, state: State, after: State, axes: tuple[str, ...]) -> Perm:
        """Who sends its piece to whom: each to itself where that will do."""
        places = list(itertools.product(*(range(self.sizes[axis]) for axis in axes)))
        held, wanted = ([self._piece(each, axes, place) for place in places] for each in (state, after))
        free: dict[tuple[int, ...], list[int]] = {}
        for rank, piece in enumerate(held):
            if wanted[rank] != piece:
                free.setdefault(piece, []).append(rank)
        return tuple((rank if held[rank] == piece else free[piece].pop(0), rank) for rank, piece in enumerate(wanted))

    def _piece(self, state: State, axes: tuple[str, ...], place: tuple[int, ...]) -> tuple[int, ...]:
        """Which piece a rank holds, as far as these axes go: the others are where they were."""
        index = dict(zip(axes, place, strict=True))
        found = []
        for dim in state:
            number = 0
            for axis in dim:
                number = number * self.sizes[axis] + index.get(axis, 0)
            found.append(number)
        return tuple(found)


def _with(state: State, dim: int, axes: tuple[str, ...]) -> State:
    return (*state[:dim], axes, *state[dim + 1 :])


def _place(axis: str, state: State) -> tuple[int, tuple[str, ...]] | None:
    """The dim that an axis cuts, and what comes before it there."""
    for dim, axes in enumerate(state):
        if axis in axes:
            return dim, axes[: axes.index(axis)]
    return None


# ------------------------------------------------------------------------------------------------------- the plan


def sides_of(where: str, pattern: Pattern, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[Layout, Layout]:
    """Both sides of an arrow with their ellipses written out, for a tensor with so many dims."""
    text = pattern.text
    source = fit(where, pattern.inputs[0], shape, sizes, text)
    extra = sum(name.startswith("...") for name in source.names)
    dotted = ["..." in layout.names for layout in (pattern.inputs[0], pattern.output)]
    if dotted[0] != dotted[1]:
        fail(where, "an ellipsis stands on one side only.", got=repr(text), fix="write it on both")
    target = (
        fit(where, pattern.output, shape, sizes, text)
        if len(pattern.output) - dotted[1] + extra == len(shape)
        else None
    )
    if target is None or sorted(source.names) != sorted(target.names):
        left, right = (names(layout.names) or "none" for layout in (pattern.inputs[0], pattern.output))
        fail(where, f"the sides have other dims: {left}; {right}.", got=repr(text), fix="the same names on both sides")
    return _told_apart(source), _told_apart(target)


def _told_apart(layout: Layout) -> Layout:
    """With dims of length 1 numbered, for they all have the same name."""
    ones = itertools.count(1)
    return Layout(dim._replace(name=f"1.{next(ones)}") if dim.name == "1" else dim for dim in layout)


def plan(layouts: str, shape: Sequence[int], mesh: Mesh | None = None, *, dtype: torch.dtype = torch.float32) -> Plan:
    """What :func:`reshard` does, and what it sends.

    Args:
        layouts: ``"src -> dst"``, as for :func:`reshard`.
        shape: the global shape, or a tensor that has it, its dims in the order of ``src``.
        mesh: the current mesh by default.
        dtype: of the tensor.

    Returns: a :class:`Plan`: ``steps``, ``bytes_sent`` per rank, ``bytes_by_axes``, ``collectives``; printed as a list.

    Cost: none.

    Raises:
        MeshError: layouts that are none; other dims on the two sides; a dim that its axes do not divide.

    Example:
        >>> import meshcomm as mc
        >>> print(mc.plan("b (tp s) h -> b s (tp h)", (2, 8, 4), mc.make_mesh({"tp": 4})))
        b (tp s) h -> b s (tp h): 48 bytes sent per rank
          all_to_all over tp, dim s to dim h: 48 bytes -> b s (tp h)
    """
    where = "plan"
    sizes = check.mesh_of(where, "", mesh).shape
    whole = checked_shape(where, shape)
    if not isinstance(dtype, torch.dtype):
        fail(where, f"dtype={dtype!r} is not a dtype.", fix="such as torch.float32")
    return plan_of(where, parse_arrow(where, layouts, sizes, 1), whole, sizes, dtype.itemsize)


def plan_of(where: str, pattern: Pattern, whole: tuple[int, ...], sizes: dict[str, int], itemsize: int) -> Plan:
    """The plan for a global shape."""
    source, target = sides_of(where, pattern, whole, sizes)
    order = tuple(source.names.index(name) for name in target.names)
    for layout, lengths in ((source, whole), (target, [whole[at] for at in order])):
        cut(where, layout, lengths, sizes, pattern.text)
    spoken = {axis: sizes[axis] for axis in sizes if axis in pattern.spoken}
    goal: list[tuple[str, ...]] = [()] * len(order)
    for dim, at in zip(target, order, strict=True):
        goal[at] = dim.axes
    steps = cheapest(tuple(dim.axes for dim in source), tuple(goal), whole, spoken)
    return Plan(pattern.text, whole, itemsize, sizes, steps, source.names, order)
