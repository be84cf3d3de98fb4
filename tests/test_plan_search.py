"""The search for a plan: never worse than trying everything, and few layouts are looked at."""

from __future__ import annotations

import gc
import heapq
import math
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import meshcomm as mc
from meshcomm.layout import search
from meshcomm.layout.search import State, Step, cheapest
from meshcomm.runtime.process.garbage import LaterCollection, ToStay

Cost = tuple[int, int, int]
Case = tuple[State, State, tuple[int, ...], dict[str, int]]


def cost_of(steps: tuple[Step, ...]) -> Cost:
    return sum(step.elements for step in steps), sum(step.elements > 0 for step in steps), len(steps)


def planned(case: Case) -> tuple[Step, ...]:
    source, target, shape, sizes = case
    return cheapest(source, target, shape, tuple(sizes.items()))


def random_case(draw: random.Random, axes: int, dims: int, of: tuple[int, ...]) -> Case:
    """Of axes whose sizes are drawn, too."""
    return random_layouts(draw, {axis: draw.choice(of) for axis in "abcde"[:axes]}, dims)


def random_layouts(draw: random.Random, sizes: dict[str, int], dims: int) -> Case:
    """Axes that are kept, moved, reordered, come and go; lengths with no room to spare, with some, and with much."""

    def state(always: set[str]) -> State:
        found: list[list[str]] = [[] for _ in range(dims)]
        some = [axis for axis in sizes if axis in always or draw.random() < 0.7]
        for axis in draw.sample(some, len(some)):
            draw.choice(found).append(axis)
        return tuple(map(tuple, found))

    source = state(set())
    target = state(set(sizes) - {axis for cut in source for axis in cut})
    room = draw.choice([(1,), (1, 2, 3, 4), (math.prod(sizes.values()),)])
    pieces = [[math.prod(sizes[axis] for axis in cut) for cut in side] for side in (source, target)]
    shape = tuple(math.lcm(*pair) * draw.choice(room) for pair in zip(*pieces, strict=True))
    return source, target, shape, sizes


def exhaustive(case: Case) -> Cost:
    """What the cheapest sequence costs: the shortest path over all that single collectives do, with no bound."""
    source, target, shape, sizes = case
    alike: dict[tuple[int, ...], list[State]] = {}

    def number(axes: tuple[str, ...]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    def cut(state: State, dim: int, axes: tuple[str, ...]) -> State:
        return (*state[:dim], axes, *state[dim + 1 :])

    def everything(state: State, rest: str) -> Iterator[State]:
        if not rest:
            yield state
            return
        yield from everything(state, rest[1:])
        for dim, axes in enumerate(state):
            for at in range(len(axes) + 1):
                more = (*axes[:at], rest[0], *axes[at:])
                if shape[dim] % number(more) == 0:
                    yield from everything(cut(state, dim, more), rest[1:])

    for state in everything(((),) * len(shape), "".join(sizes)):
        alike.setdefault(tuple(map(number, state)), []).append(state)

    def moves(state: State) -> Iterator[tuple[int, State]]:
        mine = math.prod(shape) // math.prod(map(number, state))
        for dim, axes in enumerate(state):
            for first in range(len(axes)):
                last, n, kept = axes[first:], number(axes[first:]), cut(state, dim, axes[:first])
                yield (n - 1) * mine, kept
                for to in range(len(state)):
                    if to != dim and shape[to] % (n * number(state[to])) == 0:
                        yield (n - 1) * mine // n, cut(kept, to, state[to] + last)
            for axis in sizes:
                if not any(axis in each for each in state) and shape[dim] % (sizes[axis] * number(axes)) == 0:
                    yield 0, cut(state, dim, (*axes, axis))
        for other in alike[tuple(map(number, state))]:
            if other != state:
                yield (0 if drop_ones(other) == drop_ones(state) else mine), other

    def drop_ones(state: State) -> State:
        return tuple(tuple(axis for axis in axes if sizes[axis] > 1) for axes in state)

    queue: list[tuple[Cost, State]] = [((0, 0, 0), source)]
    done: set[State] = set()
    while queue:
        cost, state = heapq.heappop(queue)
        if state == target:
            return cost
        if state not in done:
            done.add(state)
            for sent, after in moves(state):
                if after not in done:
                    heapq.heappush(queue, ((cost[0] + sent, cost[1] + (sent > 0), cost[2] + 1), after))
    raise AssertionError("there is always a way")


def check(case: Case) -> None:
    found, least = cost_of(planned(case)), exhaustive(case)
    ones = 1 in case[3].values()
    assert (found <= least) if ones else (found == least), (case, found, least)  # axes of size 1 take no steps


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_is_worse_than_trying_everything(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        check(random_case(draw, draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 4]), (2, 3)))


def test_nor_with_axes_of_any_size() -> None:
    draw = random.Random(7)
    for of in [(1, 2), (1, 2, 3), (2, 4), (2, 3, 5)] * 8:
        check(random_case(draw, 3, draw.choice([2, 3]), of))


def test_nor_with_four_axes() -> None:
    draw = random.Random(5)
    for _ in range(12):
        check(random_case(draw, 4, 2, (2, 3)))


def test_nor_of_tensors_without_elements() -> None:
    draw = random.Random(3)
    for _ in range(30):
        source, target, shape, sizes = random_case(draw, 3, 3, (2, 3))
        empty = draw.randrange(3)
        check((source, target, (*shape[:empty], 0, *shape[empty + 1 :]), sizes))


ODD = [
    (((("c",), ("a",), ()), (("a", "c"), ("b",), ()), (12, 12, 1), {"a": 4, "b": 3, "c": 3})),  # two exchanges
    (((("a",),), (("b",),), (6,), {"a": 2, "b": 3})),  # cut, exchange, gather: less than gather and cut
    (((("a", "b"), ("c",)), ((), ("b",)), (4, 4), {"a": 2, "b": 2, "c": 2})),
    (((("a", "b"), ("c",)), (("b",), ("a",)), (8, 8), {"a": 2, "b": 2, "c": 2})),  # a ride on another axis
]


@pytest.mark.parametrize("case", ODD, ids=lambda case: f"{case[0]} to {case[1]}")
def test_odd_ones(case: Case) -> None:
    check(case)


def looked_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many layouts searches have gone on from."""
    count, before = [0], search._Search._from

    def counted(self: Any, node: Any) -> Any:
        count[0] += 1
        return before(self, node)

    monkeypatch.setattr(search._Search, "_from", counted)
    cheapest.cache_clear()
    return lambda: count[0]


def test_five_axes_that_only_go_need_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    count = looked_at(monkeypatch)
    mesh = mc.make_mesh(dict.fromkeys("abcde", 2))
    found = mc.plan("(a v) (b w) (c x) (d y) (e z) -> v w x y z", (32,) * 5, mesh)
    assert found.collectives == ("all_gather_invariant",) * 5
    assert found.bytes_sent == 4 * (32**5 - 16**5)
    assert count() == 5


def test_five_axes_on_five_dims_are_planned_by_looking_at_few_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    count = looked_at(monkeypatch)
    draw = random.Random(11)
    for _ in range(40):
        before = count()
        planned(random_case(draw, 5, 5, (1, 2, 3)))
        assert count() - before < 400  # of 25,952


def test_axes_of_size_1_send_nothing() -> None:
    mesh = mc.make_mesh({"a": 2, "u": 1, "v": 1})
    assert [(step.op, step.elements) for step in mc.plan("(u x) y -> x (v y)", (4, 4), mesh).steps] == [("shard", 0)]
    assert mc.plan("(u v x) y -> (v u x) y", (4, 4), mesh).steps == ()
    found = mc.plan("(u a x) y -> x (a v y)", (4, 4), mesh)
    assert found.collectives == ("all_to_all",)
    assert str(found).endswith("all_to_all over a, dim x to dim y: 16 bytes -> x (a v y)")


# ----------------------------------------------------------------------------------------------------------- on data


def part(x: torch.Tensor, state: State, mesh: mc.Mesh) -> torch.Tensor:
    for dim, axes in enumerate(state):
        for axis in axes:
            x = x.chunk(mesh.shape[axis], dim)[mesh.coordinate[axis]]
    return x


def written(state: State) -> str:
    return " ".join(f"({' '.join((*axes, name))})" for axes, name in zip(state, "vwxyz", strict=False))


def on_data(cases: list[Case], sizes: dict[str, int]) -> None:
    mesh = mc.make_mesh(sizes)
    generator = torch.Generator().manual_seed(0)
    for source, target, shape, _ in cases:
        x, g = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
        mine = part(x, source, mesh).clone().requires_grad_()
        y = mc.reshard(mine, f"{written(source)} -> {written(target)}", mesh=mesh)
        assert torch.equal(y, part(x, target, mesh))
        (grad,) = torch.autograd.grad(y, mine, part(g, target, mesh))
        assert torch.equal(grad, part(g, source, mesh))


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 3, 1, 2), (2, 1, 2, 1, 2)], ids=str)
def test_random_plans_on_data(sizes: tuple[int, ...]) -> None:
    draw, of = random.Random(2), dict(zip("abcde", sizes, strict=False))
    cases = [random_layouts(draw, of, draw.choice([2, 3])) for _ in range(30)]
    small = [case for case in cases if math.prod(case[2]) <= 3000]
    assert len(small) > 8
    mc.launch(on_data, ranks=math.prod(sizes), args=(small, of))


def test_a_collection_that_falls_due_waits_until_a_plan_is_found() -> None:
    """One of all that torch has made takes longer than the plan."""
    seen: list[bool] = []
    inside = [False]
    before = gc.get_threshold()

    def collected(phase: str, info: dict[str, int]) -> None:
        seen.append(inside[0])

    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        with LaterCollection():
            inside[0] = True
            with LaterCollection():
                kept = [[number] for number in range(100)]
            kept += [[number] for number in range(100)]
            inside[0] = False
        kept += [[number] for number in range(100)]
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
    assert len(kept) == 300
    assert gc.isenabled()
    assert seen
    assert not any(seen)


def test_who_has_turned_collection_off_finds_it_off() -> None:
    gc.disable()
    try:
        with LaterCollection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="each collection of Python 3.12 freezes its own objects again"
)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_imported_is_old_at_once(monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    """The first collection after an import need not look at it; what somebody has frozen stays so."""
    monkeypatch.setattr(ToStay, "_frozen", False)
    before = gc.get_freeze_count()
    if before:  # by who runs all tests
        gc.unfreeze()
    gc.collect()
    others = [[]]  # what somebody has frozen: another thread may let go of things of its own meanwhile
    if frozen:
        gc.freeze()
    try:
        with ToStay():
            kept = [[number] for number in range(2000)]
        old = {id(each) for each in gc.get_objects(generation=2)}
        assert gc.isenabled()
        assert (id(others) in old) is not frozen
        assert all(id(each) in old for each in kept) is not frozen
    finally:
        gc.unfreeze()
        if before:
            gc.freeze()


def test_what_is_frozen_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python counts it one by one, which takes longer than many an import."""
    asked: list[int] = []
    monkeypatch.setattr(ToStay, "_frozen", False)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: asked.append(1) or 300_000)
    for _ in range(3):
        with ToStay():
            pass
    assert len(asked) == 1
