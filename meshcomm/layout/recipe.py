"""The recipe of an einsum: who cuts what, and what is moved for that, found without touching a tensor.

Along each mesh axis that is spoken of, the ranks divide the work by cutting one index, or all do the same. That index
is chosen so that few tensors have to be moved, of those choices the one that sends the fewest bytes forwards and
backwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from meshcomm.errors import fail, names
from meshcomm.layout.notation import Dim, Layout, Pattern
from meshcomm.layout.search import State, Step, cheapest
from meshcomm.layout.shapes import fit


class Move(NamedTuple):
    """What is done with one operand before the product."""

    alone: tuple[int, ...]
    """Dims that stand in this operand only, or have no name: summed here first."""
    alone_axes: tuple[str, ...]
    """Of the axes over which those are cut, the ones over which the sum is made before the product."""
    names: tuple[str, ...]
    """Of the dims that are left."""
    steps: tuple[Step, ...]
    varied: tuple[str, ...]
    """The axes along which it is the same and the others differ."""


class Recipe(NamedTuple):
    """How an einsum is computed."""

    moves: tuple[Move, ...]
    product: tuple[str, ...]
    """The names of the dims of the local product."""
    scattered: tuple[tuple[int, tuple[str, ...]], ...]
    """Dims along which the sums are scattered, and over which axes."""
    reduced: tuple[str, ...]
    """The axes over which the rest of the sums is made."""
    steps: tuple[Step, ...]
    """From there to the layout of the result."""
    ones: tuple[int, ...]
    """Where the result has dims of length 1 without a name."""


def varies(axes: tuple[str, ...], move: Move, at: int) -> bool:
    """Whether what a step gathers stays whole and is varied along all these axes."""
    later = {axis for step in move.steps[at + 1 :] for axis in step.axes}
    return all(axis in move.varied and axis not in later for axis in axes)


def gathers(step: Step, axis: str, move: Move, at: int) -> bool:
    """Whether a step gathers over this axis what each rank along it then uses in another way."""
    return step.op == "all_gather_invariant" and axis in step.axes and varies(step.axes, move, at)


@lru_cache(1000)
def recipe_of(
    where: str, pattern: Pattern, shapes: tuple[tuple[int, ...], ...], mesh: tuple[tuple[str, int], ...]
) -> Recipe:
    """How to compute it, for local shapes."""
    return _Cook(where, pattern, shapes, dict(mesh)).best()


class _Cook:
    def __init__(self, where: str, pattern: Pattern, shapes: Sequence[tuple[int, ...]], mesh: dict[str, int]) -> None:
        self.where, self.pattern, self.mesh = where, pattern, mesh
        self.sizes = {axis: mesh[axis] for axis in mesh if axis in pattern.spoken}
        self.spoken = tuple(self.sizes.items())
        layouts = [
            fit(where, layout, shape, mesh, pattern.text) for layout, shape in zip(pattern.inputs, shapes, strict=True)
        ]
        self.lengths = self._lengths(layouts, shapes)
        self.output, self.ones = self._output(layouts)
        self.inputs = layouts
        uses = [name for layout in layouts for name in layout.names]
        self.alone = {name for name in uses if uses.count(name) == 1 and name not in self.output.names}

    def _lengths(self, layouts: Sequence[Layout], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """The global length of each index."""
        lengths: dict[str, tuple[int, int]] = {}
        for number, (layout, shape) in enumerate(zip(layouts, shapes, strict=True)):
            for dim, local, parts in zip(layout, shape, layout.parts(self.mesh), strict=True):
                found, first = lengths.setdefault(dim.name, (local * parts, number))
                if dim.name != "1" and found != local * parts:
                    fail(
                        self.where,
                        f"dim {dim.name!r} has length {found} in operand {first}, {local * parts} in operand {number}.",
                        got=f"{self.pattern.text!r}; local shapes {tuple(shapes)}; mesh {self.mesh}",
                        fix="lengths of whole tensors: those of a part times the sizes of its axes",
                    )
        return {name: length for name, (length, _) in lengths.items()}

    def _output(self, layouts: Sequence[Layout]) -> tuple[Layout, tuple[int, ...]]:
        """The result's layout without dims called 1, and where those are."""
        dims: list[Dim] = []
        ones: list[int] = []
        dots = [name for name in self.lengths if name.startswith("...")]
        dots.sort(key=lambda name: -int(name[3:]))
        for dim in self.pattern.output:
            if dim.name == "...":
                dims += [Dim(name) for name in dots]
            elif dim.name == "1":
                ones.append(len(dims) + len(ones))
            elif dim.name not in self.lengths:
                text = self.pattern.text
                at = text.index("->") + text[text.index("->") :].index(dim.name)
                what = f"dim {dim.name!r} of the result stands in no operand.\n    {text}\n    {' ' * at}^"
                fail(self.where, what, got=f"mesh {self.mesh}", fix=f"one of {names(self.lengths)}")
            else:
                dims.append(dim)
        if dots and "..." not in self.pattern.output.names:
            what = "an ellipsis of an operand is not in the result."
            fail(self.where, what, got=repr(self.pattern.text), fix="name the dims to sum over them")
        output = Layout(dims)
        for dim, parts in zip(output, output.parts(self.mesh), strict=True):
            if self.lengths[dim.name] % parts:
                what = (
                    f"dim {dim.name!r} of length {self.lengths[dim.name]} is not divisible by {' * '.join(dim.axes)}."
                )
                fail(self.where, what, got=f"{self.pattern.text!r}; mesh {self.mesh}", fix="pad it")
        return output, tuple(ones)

    # ---------------------------------------------------------------------------------------------------- choices

    def best(self) -> Recipe:
        """Of all ways to divide the work, the one that moves the fewest tensors; then the fewest bytes."""
        choices = [self._indices(axis) for axis in self.sizes]
        found: tuple[tuple[int, int, int], Recipe] | None = None
        for chosen in itertools.product(*choices):
            by = dict(zip(self.sizes, chosen, strict=True))
            for cuts in self._orders(by):
                made = self._recipe(by, cuts)
                if made is not None and (found is None or made[0] < found[0]):
                    found = made
        assert found is not None  # cutting nothing is always possible
        return found[1]

    def _indices(self, axis: str) -> list[str | None]:
        """What an axis may cut: an index that it cuts somewhere, or nothing."""
        tensors = [*self.inputs, self.output]
        cut = [dim.name for layout in tensors for dim in layout if axis in dim.axes]
        return [*dict.fromkeys(cut), None]

    def _orders(self, by: Mapping[str, str | None]) -> list[dict[str, tuple[str, ...]]]:
        """Per index the axes that cut it, major first, in every order that stands somewhere, or as in the mesh."""
        found: dict[str, list[tuple[str, ...]]] = {}
        for index in {index for index in by.values() if index is not None}:
            axes = {axis for axis, each in by.items() if each == index}
            written = [dim.axes for layout in [self.output, *self.inputs] for dim in layout if dim.name == index]
            orders = [tuple(axis for axis in each if axis in axes) for each in written]
            whole = [order for order in orders if len(order) == len(axes)]
            found[index] = list(dict.fromkeys([*whole, tuple(axis for axis in self.sizes if axis in axes)]))
        return [dict(zip(found, each, strict=True)) for each in itertools.product(*found.values())]

    def _recipe(
        self, by: Mapping[str, str | None], cuts: Mapping[str, tuple[str, ...]]
    ) -> tuple[tuple[int, int, int], Recipe] | None:
        """The cost and the recipe, if lengths can be divided so."""
        for index, axes in cuts.items():
            if self.lengths[index] % math.prod(self.sizes[axis] for axis in axes):
                return None
        moves, moved, sent = [], 0, 0
        for layout in self.inputs:
            move, bytes_sent = self._move(layout, by, cuts)
            moves.append(move)
            moved += any(step.elements for step in move.steps) + bool(move.alone_axes)
            sent += bytes_sent
        product = self.output.names
        shape = tuple(self.lengths[name] for name in product)
        sums = [axis for axis, index in by.items() if index is not None and index not in product]
        state: State = tuple(cuts.get(name, ()) for name in product)
        scattered, state, rest, bytes_sent = self._scatter(sums, state, shape)
        steps = cheapest(state, tuple(dim.axes for dim in self.output), shape, self.spoken)
        sent += bytes_sent + sum(step.elements + self._backwards(step, shape) for step in steps)
        moved += len(scattered) + bool(rest) + any(step.elements for step in steps)
        idle = sum(index is None for index in by.values())
        ready = Recipe(tuple(moves), product, scattered, rest, steps, self.ones)
        return (moved, sent, idle), ready

    def _move(
        self, layout: Layout, by: Mapping[str, str | None], cuts: Mapping[str, tuple[str, ...]]
    ) -> tuple[Move, int]:
        """One operand's way to the product, and the elements that it sends, forwards and backwards."""
        alone = tuple(at for at, dim in enumerate(layout) if dim.name in self.alone or dim.name == "1")
        summed = [(axis, dim.name) for dim in layout if dim.name in self.alone for axis in dim.axes]
        alone_axes = tuple(axis for axis, name in summed if by[axis] != name)
        partial = {axis for axis, name in summed if by[axis] == name}
        kept = [dim for at, dim in enumerate(layout) if at not in alone]
        shape = tuple(self.lengths[dim.name] for dim in kept)
        target: State = tuple(cuts.get(dim.name, ()) for dim in kept)
        steps = cheapest(tuple(dim.axes for dim in kept), target, shape, self.spoken)
        cut = {axis for axes in target for axis in axes}
        varied = tuple(axis for axis, index in by.items() if index is not None and axis not in cut | partial)
        move = Move(alone, alone_axes, tuple(dim.name for dim in kept), steps, varied)
        local = self._local(shape, target)
        gathered = {axis for at, step in enumerate(steps) for axis in step.axes if gathers(step, axis, move, at)}
        n = math.prod(self.sizes[axis] for axis in varied if axis not in gathered)
        back = 2 * (n - 1) * local // n
        for at, step in enumerate(steps):
            back += self._backwards(step, shape, summed=varies(step.axes, move, at))
        first = self._local(shape, tuple(dim.axes for dim in kept))
        m = math.prod(self.sizes[axis] for axis in alone_axes)
        return move, sum(step.elements for step in steps) + back + 2 * (m - 1) * first // m

    def _backwards(self, step: Step, shape: tuple[int, ...], *, summed: bool = False) -> int:
        """What the transpose of a step sends; of all_gather if it is ``summed``."""
        if step.op == "all_gather_invariant":
            return step.elements if summed else 0
        if step.op == "shard":
            return (math.prod(self.sizes[axis] for axis in step.axes) - 1) * self._local(shape, step.after)
        return step.elements

    def _local(self, shape: tuple[int, ...], state: State) -> int:
        """Elements of a part."""
        return math.prod(shape) // math.prod(self.sizes[axis] for axes in state for axis in axes)

    def _scatter(
        self, sums: Sequence[str], state: State, shape: tuple[int, ...]
    ) -> tuple[tuple[tuple[int, tuple[str, ...]], ...], State, tuple[str, ...], int]:
        """Where sums end: scattered over a dim of the result that is cut so, the others on all ranks."""
        scattered, rest, sent = [], list(sums), 0
        for at, dim in enumerate(self.output):
            have = state[at]
            if dim.axes[: len(have)] == have:
                last = tuple(itertools.takewhile(lambda axis: axis in sums, dim.axes[len(have) :]))
                if last:
                    n = math.prod(self.sizes[axis] for axis in last)
                    local = self._local(shape, state)
                    sent += 2 * (n - 1) * local // n
                    scattered.append((at, last))
                    state = (*state[:at], have + last, *state[at + 1 :])
                    rest = [axis for axis in rest if axis not in last]
        local = self._local(shape, state)
        n = math.prod(self.sizes[axis] for axis in rest)
        return tuple(scattered), state, tuple(rest), sent + 2 * (n - 1) * local // n
