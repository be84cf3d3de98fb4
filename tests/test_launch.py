"""launch: the same arguments on both runtimes and under a launcher, and starting anew in a process that it started."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import forgotten

import meshcomm as mc
from meshcomm.runtime.start import world

LIMIT = 60.0


def total() -> float:
    return mc.all_reduce(torch.ones(()), "a", mesh=mc.make_mesh({"a": -1})).item()


def facts() -> tuple[float, bool, float]:
    total()
    here = world.current()
    assert here is not None
    return here.size, here.guard, here.timeout.total_seconds()


# ---------------------------------------------------------------------------------------------------------- in-process


@pytest.mark.parametrize("given", [{"backend": "gloo"}, {"timeout": 50}, {"guard": False}, {"guard": True}])
def test_arguments_of_processes_are_taken_in_process_too(given: dict[str, Any]) -> None:
    assert mc.launch(total, ranks=2, **given) == [2.0, 2.0]
    assert mc.launch(total, ranks=2, timeout=timedelta(seconds=50), backend="gloo", guard=False) == [2.0, 2.0]


def without_end() -> None:
    mesh = mc.make_mesh({"a": 2})
    while True:
        mc.all_reduce(torch.ones(()), "a", mesh=mesh)
        time.sleep(0.01)


def works_without_end() -> None:
    mesh = mc.make_mesh({"a": 2})
    if mesh.rank == 0:
        while True:
            mc.shift(torch.ones(()), "a", wrap=False, mesh=mesh, async_op=True).wait()
            time.sleep(0.01)
    while True:
        mc.shift(torch.ones(()), "a", wrap=False, mesh=mesh)


def catches() -> None:
    for _ in range(3):
        with contextlib.suppress(mc.CommError):
            without_end()
    without_end()


@pytest.mark.parametrize("fn", [without_end, works_without_end, catches])
def test_a_run_in_one_process_ends_at_a_collective_when_its_time_is_up(fn: Any) -> None:
    with pytest.raises(mc.CommError, match=r"(?s)^meshcomm.launch: the run did not end within 0.2 s.*rank 1.*fix: "):
        mc.launch(fn, ranks=2, timeout=0.2)
    assert mc.launch(total, ranks=2) == [2.0, 2.0]


def test_a_deadlock_does_not_wait_for_the_time_out() -> None:
    with pytest.raises(mc.CommError, match="deadlock"):
        mc.launch(lambda: mc.make_mesh({"a": 2}).rank or total(), ranks=2, timeout=1e6)


def nested() -> list[Any]:
    found = mc.launch(total, ranks=2, timeout=50, guard=False, backend="gloo")
    with pytest.raises(mc.MeshError, match=r"(?s)timeout=.*but the ranks are running already, with .*leave it out"):
        mc.launch(total, ranks=2, timeout=40)
    return found


def test_inside_a_rank_they_are_those_of_the_launch() -> None:
    assert mc.launch(nested, ranks=2, timeout=50) == [[2.0], [2.0]]


def as_under_a_launcher(**given: Any) -> float:
    """A program for processes: it meets, and leaves at its end."""
    mc.init(**given)
    mesh = mc.make_mesh({"dp": -1})
    found = mc.all_reduce(torch.ones(()), "dp", mesh=mesh).item()
    mc.shutdown()
    return found


@pytest.mark.parametrize(
    "given",
    [{}, {"timeout": 40}, {"guard": True}, {"backend": "gloo"}, {"init_method": "tcp://127.0.0.1:29"}, {"launcher": "slurm"}],
)  # fmt: skip
def test_inside_a_rank_init_begins_nothing(given: dict[str, Any]) -> None:
    """And leaves nothing in the process, whose own init comes later."""
    mc.shutdown()
    assert mc.launch(as_under_a_launcher, ranks=2, kwargs=given) == [2.0, 2.0]
    assert mc.launch(as_under_a_launcher, ranks=2, kwargs={"timeout": 30}) == [2.0, 2.0]
    mc.dry_run(partial(as_under_a_launcher, **given), {"dp": 4})
    mc.init(timeout=20)
    assert mc.launch(as_under_a_launcher, ranks=2, kwargs={"timeout": 30}) == [2.0, 2.0]
    with pytest.raises(mc.MeshError, match="already initialised otherwise: timeout"):
        mc.init(timeout=30)
    mc.shutdown()
    mc.init(timeout=30)
    mc.shutdown()


def test_what_a_test_has_asked_of_init_is_not_handed_on() -> None:
    """conftest.py fails who leaves it; all that follow would get it."""
    mc.init()
    assert forgotten() == {}
    mc.shutdown()
    mc.init(timeout=20)
    assert forgotten() == {"timeout": timedelta(seconds=20)}
    assert forgotten() == {}
    mc.init(timeout=30)
    mc.shutdown()


def test_inside_a_rank_init_says_who_it_is_not() -> None:
    def other() -> None:
        mc.init(rank=5, world_size=8, init_method="tcp://127.0.0.1:29")

    with pytest.raises(mc.MeshError, match="rank=5 of 8; here runs rank 0 of 2"):
        mc.launch(other, ranks=2)
    with pytest.raises(mc.MeshError, match="rank=5 of 8; here runs rank 0 of 4"):
        mc.dry_run(other, {"dp": 4})


# ------------------------------------------------------------------------------------------------------ under a launcher


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process of one, as torchrun would start it."""
    mc.shutdown()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    yield
    mc.shutdown()


@pytest.mark.usefixtures("launched")
def test_under_a_launcher_they_go_to_init() -> None:
    assert mc.launch(facts, ranks=1, timeout=50, guard=True, backend="gloo") == [(1, True, 50.0)]
    assert mc.launch(facts, ranks=1, timeout=50, guard=True) == [(1, True, 50.0)]
    for given in ({"timeout": 40}, {"guard": False}, {"backend": "fake"}):
        with pytest.raises(mc.MeshError, match="already initialised otherwise"):
            mc.launch(facts, ranks=1, **given)


# ------------------------------------------------------------------------------------------------------------ processes


NO_LOOPBACK = """
import meshcomm as mc, sys, time
if __name__ == "__main__":
    start = time.monotonic()
    try:
        mc.launch(print, ranks=2, runtime="processes") if len(sys.argv) < 2 else mc.init(
            init_method="tcp://127.0.0.1:29876", rank=0, world_size=2
        )
    except mc.CommError as error:
        print(error)
        assert time.monotonic() - start < 150  # the time-out is 300 s
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", [[], ["init"]])
def test_a_machine_without_loopback_is_told_at_once(tmp_path: Path, how: list[str]) -> None:
    apart = ["unshare", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    script = tmp_path / "script.py"
    script.write_text(NO_LOOPBACK)
    done = subprocess.run(
        [*apart, sys.executable, script, *how], capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "this machine cannot reach its own address 127.0.0.1: Network is unreachable" in done.stdout
    assert "fix: bring the interface up" in done.stdout


def refused_and_begun_again() -> list[Any]:
    before = facts()
    with pytest.raises(
        mc.MeshError, match=r"(?s)already initialised otherwise: guard.*give them to mc.launch, or call"
    ):
        mc.init(guard=not before[1])
    mc.shutdown()
    without = total()  # as it was asked for by launch
    mc.shutdown()
    mc.init(guard=not before[1])
    return [before, without, facts(), mc.launch(total, ranks=2)]


@pytest.mark.parametrize("guard", [True, False])
def test_processes_take_the_guard_and_may_begin_again(guard: bool) -> None:
    found = mc.launch(refused_and_begun_again, ranks=2, runtime="processes", guard=guard, timeout=LIMIT)
    assert found == [[(2, guard, LIMIT), 2.0, (2, not guard, LIMIT), [2.0]]] * 2
