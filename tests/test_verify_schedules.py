"""Whether what ranks give depends on their order: what is heard, orders that differ, the shortest one, what is put back."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshcomm as mc
from meshcomm.runtime.transports.threads.orders import Order, OrderedWorld, ordered, world_of
from meshcomm.runtime.transports.threads.scheduler import World, current_rank
from meshcomm.verifying.schedules import Alike, runs_alike

RANKS = 3
log: list[int] = []
kept = torch.zeros(())


def reduce(x: float = 1.0, **how: Any) -> Any:
    return mc.all_reduce(torch.full((2,), x), "dp", mesh=mc.make_mesh({"dp": RANKS}), **how)


def rank() -> int:
    here = current_rank()
    assert here is not None
    return here.index


def plain() -> Any:
    return reduce(rank())


def by_messages() -> Any:
    mesh = mc.make_mesh({"dp": RANKS})
    nexts, prevs = (rank() + 1) % RANKS, (rank() - 1) % RANKS
    (got,) = mc.exchange([(torch.ones(1) * rank(), nexts)], [(prevs, (1,), torch.float32)], "dp", mesh=mesh)
    return got


def early() -> Any:
    work = reduce(async_op=True)
    return 2 * work.wait() if work.done() else work.wait()  # here it is asked


def patient() -> Any:
    work = reduce(async_op=True)
    try:
        return work.wait(timeout=1e-3)  # here time runs out
    except mc.CommError:
        return 2 * work.wait()


def first_come() -> Any:
    log.append(rank())
    return reduce() * log[0]


def written() -> Any:
    kept.add_(rank())
    mine = kept.item()
    return reduce() * mine


def logged() -> Any:
    log.append(rank())
    return reduce()


def threaded() -> Any:
    other = threading.Thread(target=lambda: None, name="mine")
    other.start()
    other.join()
    return reduce()


def later() -> Any:
    return reduce() * (time.perf_counter_ns() % 1_000_003)


def judged(fn: Callable[[], Any], **how: Any) -> Alike:
    del log[:]
    return runs_alike(lambda: mc.launch(fn, RANKS), fn, **how)


@pytest.mark.parametrize("fn", [plain, by_messages])
def test_one_order_stands_for_all_where_nothing_is_heard(fn: Callable[[], Any]) -> None:
    findings, (note,) = judged(fn)
    assert not findings
    assert "stands for all: no done()" in note
    assert "Kahn network; one more was run" in note


@pytest.mark.parametrize(
    ("fn", "heard", "fix"),
    [
        (early, r"got: done\(\) \(test_verify_schedules.py:\d+\)", "depend on done()"),
        (first_come, r"got: shared Python state \('log'\)", "objects of its own"),
        (written, r"got: shared Python state \('kept'\)", "objects of its own"),
    ],
)
def test_two_orders_that_differ_are_printed(fn: Callable[[], Any], heard: str, fix: str) -> None:
    findings, notes = judged(fn, on="{'dp': 3}")
    assert not notes
    (finding,) = findings
    assert finding.kind == "order"
    assert finding.line.startswith("test_verify_schedules.py:")
    assert "what the ranks give depends on their order, on {'dp': 3}: rank " in str(finding)
    assert re.search(heard, str(finding))
    one, another = str(finding).split("  one order:\n")[1].split("  another one:\n")
    assert one != another.split("  fix")[0]
    assert "all_reduce at test_verify_schedules.py" in one
    assert fix in str(finding)


def test_what_could_depend_on_the_order_and_does_not_is_noted() -> None:
    for fn, heard in (
        (patient, "a time-out"),
        (logged, "shared Python state ('log')"),
        (threaded, "a thread ('mine')"),
    ):
        findings, (note,) = judged(fn, schedules=2)
        assert not findings
        assert heard in note
        assert "2 orders that were drawn gave the same bits" in note
    assert not log  # what was written is put back


def test_runs_that_differ_in_one_order_say_so() -> None:
    findings, (note,) = judged(later)
    assert not findings
    assert "two runs in one order differ, so that orders cannot be compared: rank 0 gives" in note


def test_a_seed_gives_the_same_order_again_and_a_list_of_turns_too() -> None:
    def turns(order: Order) -> list[int]:
        with ordered(order):
            mc.launch(plain, RANKS)
        return order.turns

    drawn = Order("7")
    assert turns(drawn) == turns(Order("7")) == turns(Order(first=drawn.turns)) != turns(Order("8"))
    assert {issue.rank for issue in drawn.issued} == set(range(RANKS))


def test_what_fails_in_another_order_is_found_and_what_fails_as_usual_is_raised() -> None:
    def picky() -> Any:
        log.append(rank())
        if log[0] == 2:
            raise RuntimeError("2 came first")
        return reduce()

    (finding,), _ = judged(picky)
    assert "in one of them it raises RuntimeError: 2 came first" in str(finding)

    def stuck() -> Any:
        return reduce() if rank() else None

    with pytest.raises(mc.CommError, match="deadlock"):
        judged(stuck)


def test_without_an_order_the_world_is_the_plain_one() -> None:
    assert type(world_of(2, None)) is World
    with ordered(Order()):
        assert type(world_of(2, None)) is OrderedWorld
    assert type(world_of(2, None)) is World
