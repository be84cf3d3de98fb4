"""Schedules of pipelines: formulas of the bubble and of what is alive, tables of users, what is wrong with them, pictures."""

from __future__ import annotations

import importlib
import inspect
import itertools
import random
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

import pytest

from meshcomm import MeshError, parallel
from meshcomm.parallel import Schedule

SIZES = [(n, m) for n in (1, 2, 3, 4, 7) for m in sorted({1, 2, n, n + 1, 2 * n - 1, 2 * n, 3 * n + 2})]
ONE_CHUNK = ("gpipe", "1f1b", "zb-h1")


def schedule(name: str, n: int, v: int, m: int) -> Schedule:
    return Schedule.of(name, n, v, m)


def oracle(made: Schedule, costs: dict[str, float]) -> list[float]:
    """When each rank is done: rounds over all actions until nothing changes, from what the words mean."""
    stages = made.ranks * made.chunks
    ends: dict[tuple[str, int, int], float] = {}
    for _ in range(4 * stages * made.microbatches):
        before = dict(ends)
        for rank, row in enumerate(made.table):
            free = 0.0
            for kind, chunk, at in row:
                stage = made.stage(rank, chunk)
                need = {
                    "F": [("F", stage - 1, at)] * (stage > 0),
                    "W": [("D", stage, at)],
                }.get(kind, [("F", stage, at)] + [("back", stage + 1, at)] * (stage + 1 < stages))
                free = max([free, *(ends.get(each, 0.0) for each in need)]) + costs[kind]
                ends[kind, stage, at] = free
                if kind in "BD":
                    ends["back", stage, at] = free
        if ends == before:
            return [
                max(ends[kind, made.stage(rank, c), at] for kind, c, at in row) for rank, row in enumerate(made.table)
            ]
    raise AssertionError("it does not end")


def test_bubbles_and_what_is_alive_are_what_the_formulas_say() -> None:
    """m < n too, where a formula is known for it."""
    for n, m in SIZES:
        for name in ("gpipe", "1f1b"):
            assert schedule(name, n, 1, m).bubble == pytest.approx((n - 1) / m), (name, n, m)
        assert schedule("gpipe", n, 1, m).peak == (m,) * n
        assert schedule("1f1b", n, 1, m).peak == tuple(min(n - r, m) for r in range(n))
        zero = schedule("zb-h1", n, 1, m)
        assert max(zero.peak) <= min(n, m)
        if m >= n:
            assert zero.bubble == pytest.approx((n - 1) / (3 * m)), (n, m)
            assert zero.peak == (n,) * n
        v_shape = schedule("zbv", n, 2, m)
        assert max(v_shape.peak) <= 2 * min(n, m)
        if m >= n:
            assert v_shape.bubble == pytest.approx((n - 1) / (6 * m)), (n, m)
        for v in (1, 2, 3):
            made = schedule("interleaved", n, v, m)
            assert sum(map(len, made.table)) == 2 * n * v * m, "no microbatch more than there are"
            if m >= n:
                assert made.bubble == pytest.approx((n - 1) / (v * m)), (n, v, m)
            else:
                assert made.bubble <= schedule("gpipe", n, v, m).bubble + 1e-9
            group = -(-m // max(1, m // n))
            if v > 1:  # with groups of n as Megatron has it
                assert made.peak == tuple(min((v - 1) * group + 2 * (n - r) - 1, v * m) for r in range(n)), (n, v, m)


def test_other_costs_follow_the_formulas_too() -> None:
    costs = {"F": 2.0, "D": 3.0, "W": 1.0}
    assert schedule("1f1b", 4, 1, 8).simulate(costs).bubble == pytest.approx(3 / 8)
    assert schedule("gpipe", 4, 1, 8).simulate({"F": 1.0, "B": 5.0}).bubble == pytest.approx(3 / 8)
    assert schedule("interleaved", 4, 2, 8).simulate({"F": 2.0, "B": 4.0}).bubble == pytest.approx(3 / 16)


@pytest.mark.parametrize("name", [*ONE_CHUNK, "interleaved", "zbv"])
def test_the_simulation_is_what_the_rules_say(name: str) -> None:
    """With costs that are no whole numbers, and a stage that takes longer."""
    costs = {"F": 1.25, "B": 2.5, "D": 0.75, "W": 1.5}
    made = schedule(name, 3, 1 if name in ONE_CHUNK else 2, 5)
    run = made.simulate(costs)
    assert [spans[-1].end for spans in run.spans] == pytest.approx(oracle(made, costs))
    slow = made.simulate(lambda kind, stage, microbatch: costs[kind] * (2 if stage == 1 else 1))
    per_stage = {kind: [cost * (2 if s == 1 else 1) for s in range(3 * made.chunks)] for kind, cost in costs.items()}
    assert slow == made.simulate(per_stage)
    assert slow.time > run.time
    assert made.simulate(send=0.5).time > made.simulate().time
    for spans in run.spans:
        assert all(a.end <= b.begin for a, b in itertools.pairwise(spans))


def test_stages_lie_as_a_loop_or_as_a_v() -> None:
    loop, v_shape = schedule("interleaved", 3, 2, 3), schedule("zbv", 3, 2, 3)
    assert [[loop.stage(r, c) for c in range(2)] for r in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [[v_shape.stage(r, c) for c in range(2)] for r in range(3)] == [[0, 5], [1, 4], [2, 3]]
    for made in (loop, v_shape):
        assert [made.stage(*made.place(s)) for s in range(6)] == [*range(6)]


def test_tables_of_users_in_any_form() -> None:
    tuples: Any = [[("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)], ["F0.0", "B0.0", "F0.1", "B0.1"]]
    made = Schedule.of(tuples, 2, 1, 2)
    assert made == Schedule.of(["F0.0 F0.1 B0.0 B0.1", "F0.0 B0.0 F0.1 B0.1"], 2, 1, 2)  # type: ignore[arg-type]
    assert made == schedule("1f1b", 2, 1, 2)
    assert hash(made) == hash(schedule("1f1b", 2, 1, 2))
    assert Schedule.of(made, 2, 1, 2) is made
    assert (made.ranks, made.chunks, made.microbatches) == (2, 1, 2)


def test_any_order_that_can_run_is_taken_and_ends() -> None:
    """Shuffled tables: those that are refused are those in which somebody waits for ever."""
    draw = random.Random(0)
    taken, refused = 0, list[str]()
    for _ in range(300):
        n, v, m = draw.choice([(2, 1, 2), (3, 1, 2), (2, 2, 1)])
        rows = [shuffled(draw, v, m) for _ in range(n)]
        try:
            made = Schedule(rows, placement=draw.choice(["loop", "v"]))  # type: ignore[arg-type]
        except MeshError as error:
            refused.append(str(error))
            continue
        taken += 1
        assert max(oracle(made, {"F": 1, "B": 2, "D": 1, "W": 1})) == made.simulate().time
    assert all("wait for each other" in text for text in refused)
    assert taken > 30
    assert len(refused) > 30


def shuffled(draw: random.Random, v: int, m: int) -> list[tuple[str, int, int]]:
    """A rank's actions in an order that is right for itself."""
    lines = [[(k, c, i) for k in draw.choice(["FB", "FDW"])] for c in range(v) for i in range(m)]
    row = []
    while any(lines):
        row.append(draw.choice([line for line in lines if line]).pop(0))
    return row


WRONG: list[tuple[Any, str]] = [
    ([["F0.0", "B0.0", "F0.0"]], r"rank 0 repeats F0\.0"),
    ([["F0.0", "B0.0"], ["F0.0"]], r"rank 1 misses B0\.0 \(or D0\.0 and W0\.0\)"),
    ([["F0.0", "B0.0"], ["B0.0"]], r"rank 1 misses F0\.0"),
    ([["F0.0", "B0.0", "F0.2", "B0.2"]], r"rank 0 misses F0\.1; rank 0 misses B0\.1"),
    ([["F0.0", "X0.0"]], r"rank 0 has \('X', 0, 0\): there is no kind 'X'[\s\S]*'F'|one of F \(forward\)"),
    ([["F0"]], r"rank 0 has 'F0', which is no action"),
    ([[("F", 0)]], r"which is no action"),
    ([[("F", 0, -1)]], r"chunk and microbatch are numbers from 0"),
    ([[("F", True, 0)]], r"chunk and microbatch are numbers from 0"),
    ([["F0.0", "D0.0", "W0.0", "B0.0"]], r"rank 0 has B0\.0 and D0\.0 and W0\.0, which is a part of it"),
    ([["F0.0", "D0.0"]], r"rank 0 has D0\.0 and misses W0\.0"),
    ([["F0.0", "W0.0"]], r"rank 0 has W0\.0 and misses D0\.0"),
    ([["B0.0", "F0.0"]], r"rank 0 has B0\.0 before F0\.0, which it needs"),
    ([["F0.0", "W0.0", "D0.0"]], r"rank 0 has W0\.0 before D0\.0"),
    (
        [["F0.0", "B0.0", "F0.1", "B0.1"], ["F0.1", "F0.0", "B0.0", "B0.1"]],
        r"rank 0 at B0\.0 waits for B0\.0 of rank 1; rank 1 at F0\.1 waits for F0\.1 of rank 0; and rank 0 is at B0\.0",
    ),
    ([["F1.0", "F0.0", "B1.0", "B0.0"]], r"rank 0 at F1\.0 waits for F0\.0 of rank 0; and rank 0 is at F1\.0"),
    ([], r"no rank"),
    ([3], r"rank 0 has 3 for its actions"),
    (7, r"not 7"),
]


@pytest.mark.parametrize(("table", "said"), WRONG)
def test_what_is_wrong_with_a_table_is_said(table: Any, said: str) -> None:
    with pytest.raises(MeshError, match=said):
        Schedule(table)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("1f1b", 2, 2, 4), r"'1f1b' has 1 stage on each rank, not 2[\s\S]*interleaved"),
        (("zbv", 2, 1, 4), r"'zbv' has 2 stages on each rank, not 1[\s\S]*split_stages\(model, 4\)"),
        (("1F1b", 2, 1, 4), r"no schedule '1F1b'; did you mean '1f1b'\?"),
        (("zb-v", 2, 1, 4), r"did you mean 'zbv'\?"),
        (("1f1b", 2, 1, 0), r"microbatches=0 is no number"),
        (("1f1b", 2.0, 1, 4), r"ranks=2.0 is no number"),
        (([["F0.0", "B0.0"]], 2, 1, 1), r"a table of 1 ranks, and there are 2"),
        (([["F0.0", "B0.0"]], 1, 1, 2), r"a table of 1 microbatches, and there are 2"),
        (([["F0.0", "B0.0"]], 1, 2, 1), r"a table of 1 chunks, and there are 2"),
    ],
)
def test_what_does_not_fit_is_said(call: tuple[Any, ...], said: str) -> None:
    with pytest.raises(MeshError, match=said):
        Schedule.of(*call)


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ({"F": 1.0}, r"nothing says how long 'B' takes"),
        ({"G": 1.0}, r"no kind 'G'"),
        ({"F": [1.0], "B": 2.0}, r"1 numbers for 'F', and there are 2 stages"),
        ({"F": -1.0, "B": 2.0}, r"'F' has a cost of -1.0"),
        ({"F": float("nan"), "B": 2.0}, r"'F' has a cost of nan"),
    ],
)
def test_costs_that_are_none(costs: dict[str, float | Sequence[float]], said: str) -> None:
    with pytest.raises(MeshError, match=said):
        schedule("1f1b", 2, 1, 2).simulate(costs)


def test_the_function_is_not_hidden_by_the_room_of_its_name() -> None:
    importlib.import_module("meshcomm.parallel.pipeline.schedule")
    assert callable(parallel.pipeline)
    assert inspect.isfunction(parallel.pipeline)


def test_pictures() -> None:
    made = schedule("zb-h1", 2, 1, 3)
    assert made.draw().splitlines() == [
        "rank 0  F0 F1 .. D0 W0 F2 D1 W1 D2 W2",
        "rank 1  .. F0 D0 F1 D1 W0 F2 D2 W1 W2",
    ]
    assert len(made.draw({"F": 0.3, "D": 0.31, "W": 0.7}).splitlines()) == 2
    svg = ET.fromstring(made.svg())
    boxes = [each for each in svg.iter() if each.tag.endswith("rect")]
    assert len(boxes) == 2 * 9 + 3, "the actions and the legend"
    assert "F0.0: forward of stage 1" in made.svg()
    assert made._repr_html_() == made.svg()
    ran = [[(span.action, 7 + 0.5 * span.begin, 7 + 0.5 * span.end) for span in row] for row in made.simulate().spans]
    text = made.draw(ran=ran)
    assert all(text.count(f"{kind}{at}") == 2 for kind in "FDW" for at in range(3)), "every action has its place"
