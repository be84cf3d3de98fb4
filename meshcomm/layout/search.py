"""The search for the cheapest plan: A* over layouts, with a bound on what is left to be sent from each.

A state says for each dim over which axes it is cut, major first. One step gathers the last axes of a dim, cuts a dim
once more, moves the last axes of one dim to another, or lets ranks exchange whole pieces. Many bytes are worse than
many collectives, and those worse than many steps. An exchange leads from a state to every other one with as many
pieces of each dim, at one price: it goes by way of a node of the graph that stands for the numbers of pieces.
Axes of size 1 cut nothing, and the search does not see them.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from meshcomm.runtime.process.garbage import LaterCollection

State = tuple[tuple[str, ...], ...]
"""Per dim the axes that it is cut over, major first."""
Perm = tuple[tuple[int, int], ...]
Cost = tuple[int, int, int]
"""Elements sent by each rank, collectives that send any, steps."""


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


@lru_cache(10_000)
def cheapest(
    source: State, target: State, shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]
) -> tuple[Step, ...]:
    """The steps from one state to another; ``shape`` is the global one, ``sizes`` those of the axes spoken of."""
    cutting = {axis: size for axis, size in sizes if size > 1}
    before, after = (
        tuple(tuple(axis for axis in axes if axis in cutting) for axes in side) for side in (source, target)
    )
    if before == after:
        return _of_size_1(source, target, sizes)
    with LaterCollection():
        *steps, last = _Search(before, after, shape, cutting).steps()
    return (*steps, last._replace(after=target))


def _of_size_1(source: State, target: State, sizes: tuple[tuple[str, int], ...]) -> tuple[Step, ...]:
    """One step over an axis of size 1, if only such ones come and go: what changes its layout is new storage."""
    for axis, _ in sizes:
        places = [[dim for dim, axes in enumerate(state) if axis in axes] for state in (source, target)]
        if source != target and places[0] != places[1]:
            dim = (*places[0], *places[1])[0]
            return (Step("shard", (axis,), dim, dim, (), 0, target),)
    return ()


# ------------------------------------------------------------------------------------------------------- the search


class _Cut:
    """One dim, cut over some axes: told apart by identity, for there is one of each in a search.

    What the bound has to know stands here once: how the axes begin like those of the target, and what comes after that.
    """

    __slots__ = (
        "axes", "dim", "ends", "leaving", "longer", "moves", "number", "steps", "wanted", "wrong",
    )  # fmt: skip

    def __init__(self, search: _Search, dim: int, axes: tuple[str, ...]) -> None:
        self.dim, self.axes = dim, axes
        sizes, home, goal = search.sizes, search.home, search.target[dim]
        self.number = search.number(axes)
        """Of pieces."""
        self.wanted = sum([axis in home for axis in axes])
        """How many of the axes the target cuts anything over."""
        same = 0
        while same < len(axes) and same < len(goal) and axes[same] == goal[same]:
            same += 1
        self.wrong = int(same < len(axes))
        """1 if any axis has to leave the dim, else 0."""
        leaving, flows = 1, dict[int, int]()
        for axis in axes[same:]:
            if axis in home:
                flows[home[axis]] = flows.get(home[axis], 1) * sizes[axis]
            else:
                leaving *= sizes[axis]
        self.leaving = leaving
        """The number of ranks along those that have to leave it and are in no dim of the target."""
        ranks = search.ranks
        self.steps = max(len(flows), self.wrong)
        """The fewest that take all of them to where they belong."""
        self.moves = sum([ranks - ranks // n for n in flows.values()])
        """The least that sends the others elsewhere, in parts of a piece."""
        self.ends = [(axes[first:], search.number(axes[first:]), axes[:first]) for first in range(len(axes))]
        """The axes that can leave it in one step, the number of ranks along them, and what is left."""
        self.longer: dict[tuple[str, ...], _Cut | None] = {}
        """Cut once more over other axes, or None where that does not divide the dim."""


class _Numbers(NamedTuple):
    """Per dim the number of pieces: a node that stands for all states that have as many."""

    each: tuple[int, ...]


_State = tuple[_Cut, ...]
_Node = _State | _Numbers
_Move = tuple[str, tuple[str, ...], int, int]
"""A step as far as its dims."""


class _Left(NamedTuple):
    """What the numbers of pieces tell of the way to the target."""

    elements: int
    """Of one piece now."""
    moved: int
    """The least that all_to_alls send, in parts of a piece."""
    dims: int
    """In how many dims there are too many pieces: each is another collective."""
    shards: int
    """The fewest steps that cut anything once more."""


class _Search:
    """From one state to another, by axes of size 2 and more."""

    def __init__(self, source: State, target: State, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
        self.target, self.shape, self.sizes = target, shape, sizes
        self.whole = math.prod(shape)
        self.ranks = math.prod(sizes.values())
        self.home = {axis: dim for dim, axes in enumerate(target) for axis in axes}
        """The dim that the target cuts over each."""
        self._cuts: dict[tuple[int, tuple[str, ...]], _Cut] = {}
        self._left: dict[tuple[int, ...], _Left] = {}
        self._all_moved: dict[tuple[tuple[int, ...], int], int] = {}
        self.begin, self.end = self._state(source), self._state(target)
        self.numbers = _numbers(self.end)
        self.goal = self.whole // math.prod(self.numbers)
        largest = sorted(sizes.values(), reverse=True)
        self.largest = list(itertools.accumulate(largest, operator.mul))
        self.smallest = largest[-1]
        self.least = self.whole // min(self.ranks, math.prod([math.gcd(length, self.ranks) for length in shape]))
        """No piece is smaller."""

    def number(self, axes: Sequence[str]) -> int:
        """How many ranks there are along these axes."""
        return math.prod([self.sizes[axis] for axis in axes])

    def cut(self, dim: int, axes: tuple[str, ...]) -> _Cut:
        """The cut of a dim over these axes, the same one each time."""
        found = self._cuts.get((dim, axes))
        if found is None:
            found = self._cuts[dim, axes] = _Cut(self, dim, axes)
        return found

    def longer(self, cut: _Cut, axes: tuple[str, ...]) -> _Cut | None:
        """A dim cut once more, over these axes too; None where they do not divide it."""
        if axes not in cut.longer:
            fits = self.shape[cut.dim] % (cut.number * self.number(axes)) == 0
            cut.longer[axes] = self.cut(cut.dim, cut.axes + axes) if fits else None
        return cut.longer[axes]

    def _state(self, state: State) -> _State:
        return tuple([self.cut(dim, axes) for dim, axes in enumerate(state)])

    def steps(self) -> tuple[Step, ...]:
        """The cheapest steps from the source to the target."""
        ticket = itertools.count(0, -1)
        paid: dict[_Node, Cost] = {self.begin: (0, 0, 0)}
        came: dict[_Node, tuple[_Node, _Move]] = {}
        queue: list[tuple[Cost, int, Cost, _Node]] = [(self.bound(self.begin), 0, (0, 0, 0), self.begin)]
        while True:
            total, _, cost, node = heapq.heappop(queue)
            if node == self.end:
                return self._way(came)
            if paid[node] < cost:
                continue
            for after, sent, step, move in self._from(node):
                new = cost[0] + sent, cost[1] + (sent > 0), cost[2] + step
                if after not in paid or new < paid[after]:
                    paid[after], came[after] = new, (node, move)
                    left = self.bound(after)
                    least = new[0] + left[0], new[1] + left[1], new[2] + left[2]
                    heapq.heappush(queue, (max(total, least), next(ticket), new, after))

    def _way(self, came: Mapping[_Node, tuple[_Node, _Move]]) -> tuple[Step, ...]:
        """The steps that led to the target, the first one first."""
        found: list[Step] = []
        node: _Node = self.end
        while node != self.begin:
            before, move = came[node]
            if isinstance(before, _Numbers):
                before, _ = came[before]
            assert not isinstance(node, _Numbers)
            assert not isinstance(before, _Numbers)
            found.append(self._step(before, node, move))
            node = before
        return tuple(reversed(found))

    def _step(self, before: _State, after: _State, move: _Move) -> Step:
        held, wanted = (tuple([cut.axes for cut in state]) for state in (before, after))
        mine = self.whole // math.prod(_numbers(before))
        op, axes, dim, to = move
        if op == "permute":
            axes = tuple(axis for axis in self.sizes if _place(axis, held) != _place(axis, wanted))
            return Step(op, axes, dim, to, self._perm(held, wanted, axes), mine, wanted)
        n = self.number(axes)
        sent = {"shard": 0, "all_to_all": (n - 1) * mine // n}.get(op, (n - 1) * mine)
        return Step(op, axes, dim, to, (), sent, wanted)

    # ------------------------------------------------------------------------------------------------- single steps

    def _from(self, node: _Node) -> Iterator[tuple[_Node, int, int, _Move]]:
        """What comes after a node: the next one, the elements sent, 1 if it is a step, and how."""
        if isinstance(node, _Numbers):
            for state in self._with_numbers(node.each):
                yield self._state(state), 0, 0, _PERMUTE
            return
        numbers = _numbers(node)
        mine = self.left(numbers).elements
        yield _Numbers(numbers), mine, 1, _PERMUTE
        used = {axis for cut in node for axis in cut.axes}
        free = [(axis,) for axis in self.sizes if axis not in used]
        for dim in reversed(range(len(node))):  # of equals the last one is tried first
            before, cut, behind = node[:dim], node[dim], node[dim + 1 :]
            for axis in free:
                longer = self.longer(cut, axis)
                if longer is not None:
                    yield (*before, longer, *behind), 0, 1, ("shard", axis, dim, dim)
            for last, n, first in cut.ends:
                kept = (*before, self.cut(dim, first), *behind)
                yield kept, (n - 1) * mine, 1, ("all_gather_invariant", last, dim, dim)
                for to, other in enumerate(node):
                    longer = None if to == dim else self.longer(other, last)
                    if longer is not None:
                        moved = (*kept[:to], longer, *kept[to + 1 :])
                        yield moved, (n - 1) * mine // n, 1, ("all_to_all", last, dim, to)

    def _with_numbers(self, numbers: tuple[int, ...]) -> Iterator[State]:
        """All states with so many pieces of each dim."""

        def cuts(number: int, free: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
            if number == 1:
                yield ()
            for axis in free:
                if number % self.sizes[axis] == 0:
                    rest = tuple([other for other in free if other != axis])
                    for more in cuts(number // self.sizes[axis], rest):
                        yield (axis, *more)

        def states(dim: int, free: tuple[str, ...]) -> Iterator[State]:
            if dim == len(numbers):
                yield ()
                return
            for axes in cuts(numbers[dim], free):
                for more in states(dim + 1, tuple([axis for axis in free if axis not in axes])):
                    yield (axes, *more)

        return states(0, tuple(self.sizes))

    # ------------------------------------------------------------------------------------------------------ the bound

    def bound(self, node: _Node) -> Cost:
        """No way from here costs less.

        Say that what is left gathers by a factor of G in all. A gather, or an exchange, happens where a piece is at
        least the target's divided by what is gathered after it: all gathers send at least ``goal * (1 - 1 / G)``, and
        with an exchange at least ``goal``. An all_to_all by n sends ``1 - 1 / n`` of a piece, which is never smaller
        than where all axes cut. Now either there is no exchange: then G is at least what has to leave for good, and all
        else that is in a wrong place has to move from there, together only if it goes to the same dim. Or there is
        one: then only the numbers of pieces tell how much has to be moved.
        """
        if isinstance(node, _Numbers):
            left = self.left(node.each)
            sent = max(0, self.goal - left.elements) + self._sent(left.moved)
            return sent, left.dims if self.whole else 0, left.dims + left.shards
        wanted, wrong, steps, leaving, moves = 0, 0, 0, 1, 0
        for cut in node:
            wanted += cut.wanted
            if cut.wrong:
                wrong += 1
                steps += cut.steps
                leaving *= cut.leaving
                moves += cut.moves
        missing = len(self.home) - wanted
        if not wrong:
            return 0, 0, missing
        left = self.left(_numbers(node))
        gathered = self.goal - min(left.elements, self.goal // leaving)
        straight = gathered + self._sent(max(moves, left.moved)), wrong, steps + missing
        exchanging = self.goal + self._sent(left.moved), 1 + left.dims, 1 + left.dims + left.shards
        return min(straight, exchanging) if self.whole else (0, 0, min(straight[2], exchanging[2]))

    def _sent(self, parts: int) -> int:
        """So many parts of the smallest piece that there can be."""
        return -(-self.least * parts // self.ranks)

    def left(self, numbers: tuple[int, ...]) -> _Left:
        """What so many pieces of each dim tell."""
        found = self._left.get(numbers)
        if found is None:
            pairs = zip(numbers, self.numbers, strict=True)
            many = tuple(sorted([n // math.gcd(n, goal) for n, goal in pairs if goal % n]))
            more = -(-math.prod(self.numbers) // math.prod(numbers))
            shards = 0 if more <= 1 else 1 + bisect.bisect_left(self.largest, more)
            moved = self._moved(many, self.goal, self.least) if self.least else 0
            found = self._left[numbers] = _Left(self.whole // math.prod(numbers), moved, len(many), shards)
        return found

    def _moved(self, factors: tuple[int, ...], over: int, under: int) -> int:
        """The least parts that all_to_alls by these factors send, when gathers do ``over / under`` of the product.

        A sum of concave functions is least where gathers do all of some factors, and a part of one more at the most.
        """
        found = self._all_moved.get((factors, under))
        if found is None:
            each = [self.ranks - self.ranks // factor for factor in factors]
            found = whole = sum(each)
            for at, factor in enumerate(factors):
                if factor * under <= over:
                    found = min(found, self._moved(factors[:at] + factors[at + 1 :], over, under * factor))
                else:
                    rest = min(-(-self.ranks * over // (factor * under)), self.ranks // self.smallest)
                    found = min(found, whole - each[at] + self.ranks - rest)
            self._all_moved[factors, under] = found
        return found

    # ----------------------------------------------------------------------------------------------------- exchanges

    def _perm(self, before: State, after: State, axes: tuple[str, ...]) -> Perm:
        """Who sends its piece to whom: each to itself where that will do."""
        held, wanted = (self._pieces_along(state, axes) for state in (before, after))
        free: dict[int, list[int]] = {}
        for rank in range(len(held) - 1, -1, -1):
            if held[rank] != wanted[rank]:
                free.setdefault(held[rank], []).append(rank)
        return tuple((rank if held[rank] == piece else free[piece].pop(), rank) for rank, piece in enumerate(wanted))

    def _pieces_along(self, state: State, axes: tuple[str, ...]) -> list[int]:
        """Which piece each rank along these axes holds, as far as they go: the others are where they were."""
        weights, weight = dict.fromkeys(axes, 0), 1
        for axis in reversed([axis for cuts in state for axis in cuts]):
            weights[axis] = weight
            weight *= self.sizes[axis]
        found = [0]
        for axis in axes:
            found = [piece + at * weights[axis] for piece in found for at in range(self.sizes[axis])]
        return found


_PERMUTE: _Move = ("permute", (), 0, 0)


def _numbers(state: _State) -> tuple[int, ...]:
    """Into how many pieces each dim is cut."""
    return tuple([cut.number for cut in state])


def _place(axis: str, state: State) -> tuple[int, tuple[str, ...]] | None:
    """The dim that an axis cuts, and what comes before it there."""
    for dim, axes in enumerate(state):
        if axis in axes:
            return dim, axes[: axes.index(axis)]
    return None
