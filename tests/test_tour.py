"""The tour shows what the collectives do: its numbers against lists of blocks, every function, in-process and launched."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import meshcomm as mc

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "collectives_tour.py"
Blocks = list[list[float]]


@cache
def load_tour() -> ModuleType:
    spec = importlib.util.spec_from_file_location("collectives_tour", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["collectives_tour"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


# Each collective on lists: what all ranks have to what all ranks get, and back for gradients.


def total(xs: Blocks) -> Blocks:
    return [[sum(column) for column in zip(*xs, strict=True)]] * len(xs)


def joined(xs: Blocks) -> Blocks:
    return [[v for x in xs for v in x]] * len(xs)


def slices(xs: Blocks) -> Blocks:
    k = len(xs[0]) // len(xs)
    return [x[k * r : k * r + k] for r, x in enumerate(xs)]


def swapped(xs: Blocks) -> Blocks:
    return [[x[r] for x in xs] for r in range(len(xs))]


def moved(xs: Blocks, pairs: list[tuple[int, int]]) -> Blocks:
    source = {dst: src for src, dst in pairs}
    return [xs[source[r]] if r in source else [0.0] * len(xs[0]) for r in range(len(xs))]


def rows(n: int, rank: int) -> list[int]:
    """How many this rank sends to each: as the tour has it."""
    first = [1, 2, 0, *[1] * (n - 3)] if n > 2 else [1] * n
    return [first[(to - rank) % n] for to in range(n)]


def apart(x: list[float], counts: list[int]) -> Blocks:
    return [x[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]


def sent(xs: Blocks) -> Blocks:
    n = len(xs)
    return [[v for source in range(n) for v in apart(xs[source], rows(n, source))[to]] for to in range(n)]


def sent_back(gs: Blocks) -> Blocks:
    n = len(gs)
    came = [[rows(n, source)[to] for source in range(n)] for to in range(n)]
    return [[v for to in range(n) for v in apart(gs[to], came[to])[source]] for source in range(n)]


def forward(code: str, xs: Blocks) -> Blocks:
    n = len(xs)
    ring = [(r, (r + 1) % n) for r in range(n)]
    return {
        'pvary(x, "r")': lambda: xs,
        'all_reduce(x, "r")': lambda: total(xs),
        'all_reduce(x, "r", "mean")': lambda: [[v / n for v in x] for x in total(xs)],
        'all_reduce(x, "r", "max")': lambda: [[max(c) for c in zip(*xs, strict=True)]] * n,
        'all_gather(x, "r")': lambda: joined(xs),
        'all_gather_invariant(x, "r")': lambda: joined(xs),
        'shard(x, "r")': lambda: slices(xs),
        'reduce_scatter(x, "r")': lambda: slices(total(xs)),
        'all_to_all(x, "r", 0, 0)': lambda: swapped(xs),
        'all_to_all_ragged(x, counts, "r")[0]': lambda: sent(xs),
        'permute(x, "r", [(0, n - 1)])': lambda: moved(xs, [(0, n - 1)]),
        'shift(x, "r", 1)': lambda: moved(xs, ring),
        'shift(x, "r", 1, wrap=False)': lambda: moved(xs, ring[:-1]),
        'broadcast(x, "r", src=0)': lambda: [xs[0]] * n,
    }[code]()


def backward(code: str, xs: Blocks, gs: Blocks) -> Blocks:
    n = len(xs)
    ring = [((r + 1) % n, r) for r in range(n)]
    zeros = [[0.0] * len(xs[0])] * n
    return {
        'pvary(x, "r")': lambda: total(gs),
        'all_reduce(x, "r")': lambda: gs,
        'all_reduce(x, "r", "mean")': lambda: [[v / n for v in g] for g in gs],
        'all_reduce(x, "r", "max")': lambda: [*zeros[:-1], gs[-1]],
        'all_gather(x, "r")': lambda: slices(total(gs)),
        'all_gather_invariant(x, "r")': lambda: slices(gs),
        'shard(x, "r")': lambda: joined(gs),
        'reduce_scatter(x, "r")': lambda: joined(gs),
        'all_to_all(x, "r", 0, 0)': lambda: swapped(gs),
        'all_to_all_ragged(x, counts, "r")[0]': lambda: sent_back(gs),
        'permute(x, "r", [(0, n - 1)])': lambda: moved(gs, [(n - 1, 0)]),
        'shift(x, "r", 1)': lambda: moved(gs, ring),
        'shift(x, "r", 1, wrap=False)': lambda: moved(gs, ring[:-1]),
        'broadcast(x, "r", src=0)': lambda: [gs[0], *zeros[1:]],
    }[code]()


def stops_of(lines: list[str]) -> dict[str, list[list[list[float]]]]:
    """Of each stop's table: a row per rank, of each row its columns' numbers."""
    found: dict[str, list[list[list[float]]]] = {}
    code = ""
    for line in lines:
        if " backward: " in line:
            code = line.split("   ")[0]
            found[code] = []
        elif line.startswith("  rank ") and code:
            found[code].append([[float(v) for v in cell.split()] for cell in re.findall(r"\[([^\]]*)\]", line)])
        elif not line.startswith(" "):
            code = ""
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_numbers_are_right(n: int) -> None:
    tour = load_tour()
    shown, *others = mc.launch(tour.tour, ranks=n, args=([],))
    assert others == [[]] * (n - 1), "one rank speaks"
    found = stops_of(shown)
    assert list(found) == [stop.code for stop in tour.STOPS]
    for code, rows in found.items():
        xs, ys, gs, dxs = (list(column) for column in zip(*rows, strict=True))
        assert len(rows) == n
        assert ys == forward(code, xs), code
        for dx, expected in zip(dxs, backward(code, xs, gs), strict=True):
            assert dx == pytest.approx(expected, rel=1e-5), code
    assert shown.count("  <f(x), g> = <x, dx>: yes") == len(tour.STOPS)


def test_every_collective_is_visited() -> None:
    tour = load_tour()
    text = "\n".join(mc.launch(tour.tour, ranks=4, args=([],))[0])
    visited = set(re.findall(r"^(\w+)\(", text, re.MULTILINE)) | set(re.findall(r"(recv)\(", text))
    modules = [
        importlib.import_module(f"meshcomm.collectives.{name}")
        for name in (
            "exchange.all_to_all",
            "exchange.permute",
            "exchange.ragged",
            "gather",
            "one_rank",
            "place",
            "reduce",
        )
    ]
    found = ((name, value, module) for module in modules for name, value in vars(module).items() if name in mc.__all__)
    collectives = {name for name, value, module in found if value.__module__ == module.__name__}
    assert {"pvary", "barrier", "shift", "axis_index"} <= collectives
    assert collectives <= visited
    assert {"broadcast_object", "all_gather_object", "gather_object", "scatter_object"} <= visited
    types = {stop.name: (stop.takes, stop.gives) for stop in tour.STOPS}
    for name, (takes, gives) in types.items():
        assert f"Type: {takes} -> {gives}" in getattr(mc, name).__doc__, name


def test_a_wrong_gradient_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tour = load_tour()
    wrong = tour.Stop(
        'all_gather(x, "r")', "varying", "varying", "", lambda x, m: mc.all_gather_invariant(x, "r", mesh=m)
    )
    monkeypatch.setattr(tour, "STOPS", [wrong])
    assert "  <f(x), g> = <x, dx>: NO" in mc.launch(tour.tour, ranks=2, args=([],))[0]


def test_some_stops() -> None:
    shown = mc.launch(load_tour().tour, ranks=2, args=(["shift", "gather", "all_gather_object"],))[0]
    heads = [line for line in shown if re.match(r"\w+\(", line)]
    assert [head.split("(")[0] for head in heads] == ["shift", "shift", "gather", "all_gather_object"]
