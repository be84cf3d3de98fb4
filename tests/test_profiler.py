"""What torch's profiler shows of collectives: names and axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import meshcomm as mc
from meshcomm.parallel import fully_shard
from meshcomm.runtime.hooks.ranges import in_range


def ranges_of(program: Callable[[], object]) -> dict[str, int]:
    """The ranges that it opens, and how often."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        program()
    names = [event.name for event in seen.events() if event.name.startswith("meshcomm.")]
    return dict(Counter(name.removeprefix("meshcomm.") for name in names))


def reduced_and_shifted() -> None:
    w = torch.ones(3, requires_grad=True)
    y = mc.all_reduce(mc.pvary(w, "a") * (1 + mc.axis_index("a")), "a")
    y.sum().backward()
    mc.shift(torch.ones(2, dtype=torch.int64), ("a", "b"))


def begun_and_waited_for() -> None:
    x = torch.ones(4, requires_grad=True)
    work = mc.all_gather(x, "b", async_op=True)
    work.wait().sum().backward()


def of_one_rank_and_objects() -> None:
    mc.gather(torch.ones(2), "a", dst=0)
    mc.barrier("b")
    mc.all_gather_object("it", "a")
    mc.sync_seed("b")
    metrics = mc.Metrics({"loss": "mean", "tokens": "sum"})
    metrics.reduce("b")


def sharded() -> None:
    net = fully_shard(torch.nn.Linear(2, 2), "a", grads="sum")
    net(torch.ones(1, 2)).sum().backward()


WANTED: dict[Callable[[], object], dict[str, int]] = {
    reduced_and_shifted: {"all_reduce a f32[3]": 2, "shift a,b i64[2]": 1},
    begun_and_waited_for: {"all_gather b f32[4]": 1, "reduce_scatter b f32[8]": 1},
    of_one_rank_and_objects: {
        "gather a f32[2]": 1,
        "barrier b": 1,
        "all_gather_object a": 2,
        "broadcast b i64[1]": 1,
        "Metrics.reduce b": 1,
        "Metrics.reduce b f64[2, 2]": 1,
    },
    sharded: {
        "all_gather a i64[2]": 2,
        "scatter a": 1,
        "all_gather a f32[8]": 1,
        "reduce_scatter a f32[16]": 1,
        "all_reduce a i64[1]": 1,
    },
}


def seen_here() -> list[dict[str, int]]:
    with mc.use_mesh(mc.make_mesh({"a": 2, "b": 2})):
        return [ranges_of(program) for program in WANTED]


def test_ranges_on_processes(pool4: Any) -> None:
    assert pool4.run(seen_here) == [list(WANTED.values())] * 4


def test_ranges_in_one_process() -> None:
    """Of the first rank alone, whose others are not profiled."""

    def main() -> list[dict[str, int]] | None:
        mesh = mc.make_mesh({"a": 2, "b": 2})
        with mc.use_mesh(mesh):
            if mesh.rank == 0:
                return [ranges_of(program) for program in WANTED]
            for program in WANTED:
                program()
        return None

    found, *others = mc.launch(main, ranks=4)
    assert found == list(WANTED.values())
    assert others == [None] * 3


def test_nothing_is_opened_where_no_profiler_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.profiler, "record_function")

    def main() -> Any:
        with mc.use_mesh(mc.make_mesh({"a": 2})):
            mc.barrier("a")
            return mc.all_reduce(torch.ones(2), "a").tolist(), in_range("all_reduce", mc.current_mesh().axis("a", ""))

    (first, nothing), (second, same) = mc.launch(main, ranks=2)
    assert first == second == [2, 2]
    assert nothing is same
