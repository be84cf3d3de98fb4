"""Processes end cleanly: with and without shutdown, with a global mesh, after an exception, with a collective under way.

A thread of gloo that lets go of a tensor while the interpreter ends makes C++ abort. The programs below end in the middle of
ten collectives whose results nobody waits for, which hits that moment in every fourth run of plain ``torch.distributed``; one
finished collective hits it in fewer. To have many runs in little time, each rank is a fork of one interpreter that has
imported torch and started no thread, and then ends as any script does: it is the same interpreter for all programs.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from meshcomm.runtime.process import exits

ROOT = Path(__file__).parent.parent

HARNESS = """
import collections, gc, json, os, pathlib, sys, tempfile, time
import torch
import torch.distributed as dist
import meshcomm as mc

def watch(folder, times, ranks):
    \"\"\"Returns in each rank of each run, and never in the process that waits for them.\"\"\"
    codes, begun = collections.Counter(), time.monotonic()
    os.dup2(os.open(folder + "/stderr", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    for run in range(times):
        meeting, children = tempfile.mktemp(dir=folder), []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                # Two ends of three in less than half of the time: what was imported is neither looked at nor copied.
                if run % 3:
                    gc.freeze()
                return rank, meeting
            children.append(child)
        codes[os.waitstatus_to_exitcode(os.waitpid(children.pop(0), 0)[1])] += 1
        pathlib.Path(meeting + "-left").touch()
        for child in children:
            codes[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])] += 1
    found = [list(codes.items()), time.monotonic() - begun]
    pathlib.Path(folder, "found").write_text(json.dumps(found))
    os._exit(0)

def each(jobs):
    \"\"\"The program of this process, its rank and where it meets the other one.\"\"\"
    for name, (program, times) in jobs.items():
        os.mkdir(name)
        child = os.fork()
        if child == 0:
            return program, *watch(os.path.abspath(name), times, 2)
        os.waitpid(child, 0)
    os._exit(0)

program, rank, meeting = each(json.loads(sys.argv[1]))
where = dict(init_method="file://" + meeting, rank=rank, world_size=2)
exec(compile(program, "program.py", "exec"))
"""
INIT = """
mc.init(timeout=150, **where)
mesh = mc.make_mesh({"dp": 2})
assert mc.all_reduce(torch.ones(2), "dp", mesh=mesh).tolist() == [2.0, 2.0]
"""
UNDER_WAY = """
for _ in range(10):
    dist.all_reduce(torch.ones(200_000), async_op=True)
"""


class Job(NamedTuple):
    """A program that two ranks run, so many times in a row."""

    program: str
    times: int


IN_A_ROW = 5
JOBS = {
    "without-shutdown": Job(INIT + UNDER_WAY, IN_A_ROW),
    "with-shutdown": Job(INIT + UNDER_WAY + "mc.shutdown()", IN_A_ROW),
    "after-an-exception": Job(INIT + UNDER_WAY + "raise ValueError('boom')", IN_A_ROW),
    "groups-held": Job(INIT + "kept = [dist.group.WORLD, mesh.device_mesh, dist.new_group([0, 1])]" + UNDER_WAY, 3),
    "adopted": Job(
        """
dist.init_process_group("gloo", **where)
mesh = mc.make_mesh({"dp": 2})
mc.all_reduce(torch.ones(2), "dp", mesh=mesh)
mc.shutdown()
dist.destroy_process_group()
""",
        2,
    ),
    "initialised-twice": Job(INIT + "mc.shutdown(); mc.shutdown()" + INIT, 1),
    "a-world-of-one": Job("mesh = mc.make_mesh({'dp': 1}); group = mesh.device_mesh.get_group()", 1),
    "a-fork": Job(INIT + "\nif os.fork() == 0:\n    os._exit(0)\nos.wait()", 1),
    "fails-while-its-peer-waits": Job(
        INIT + "if rank == 0: raise ValueError('boom')\nmc.all_reduce(torch.ones(2), 'dp', mesh=mesh)", 1
    ),
    "its-peer-never-joins": Job(
        INIT
        + """
if rank == 0:
    kept = dist.all_reduce(torch.ones(2), async_op=True)
    raise ValueError("boom")
until = time.monotonic() + 100
while not os.path.exists(meeting + "-left"):
    assert time.monotonic() < until, "rank 0 is still there"
    time.sleep(0.05)
""",
        1,
    ),
}

FAILING = ["fails-while-its-peer-waits", "its-peer-never-joins"]
UNUSUAL = ["groups-held", "adopted", "initialised-twice", "a-world-of-one", "a-fork"]


class Ended(NamedTuple):
    """How the runs of a program ended."""

    codes: dict[int, int]
    """How often each exit code came."""
    seconds: float
    """What all runs took together."""
    stderr: str


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """The programs of the tests that run, by one interpreter."""
    run = [item for item in request.session.items if item.path == Path(__file__)]
    jobs = {name: job for name, job in JOBS.items() if name in FAILING or any(f"[{name}" in item.name for item in run)}
    folder = tmp_path_factory.mktemp("exit")
    script = folder / "harness.py"
    script.write_text(HARNESS)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), json.dumps(jobs)]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr
    found = {}
    for name in jobs:
        codes, seconds = json.loads((folder / name / "found").read_text())
        found[name] = Ended(dict(codes), seconds, (folder / name / "stderr").read_text())
    return found


pytestmark = pytest.mark.timeout(600)  # of the first test, which waits for all programs


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "code"), [("without-shutdown", 0), ("with-shutdown", 0), ("after-an-exception", 1)])
def test_several_runs_in_a_row(ended: dict[str, Ended], name: str, code: int) -> None:
    assert ended[name].codes == {code: 2 * IN_A_ROW}, ended[name].stderr
    assert ("boom" in ended[name].stderr) == (code == 1)


@pytest.mark.thorough
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_ends(ended: dict[str, Ended], name: str) -> None:
    assert ended[name].codes == {0: 2 * JOBS[name].times}, ended[name].stderr


@pytest.mark.thorough
def test_a_rank_that_fails_while_its_peer_waits_ends_at_once_and_so_does_the_peer(ended: dict[str, Ended]) -> None:
    found = ended["fails-while-its-peer-waits"]
    assert found.codes == {1: 2}
    assert "boom" in found.stderr
    assert "all_reduce" in found.stderr  # The peer's traceback.
    assert found.seconds < 120  # The time-out is 150 s.


@pytest.mark.thorough
def test_a_collective_that_its_peer_never_joins_does_not_hold_up_the_end(ended: dict[str, Ended]) -> None:
    found = ended["its-peer-never-joins"]
    assert found.codes == {1: 1, 0: 1}, found.stderr  # The peer has seen it leave.


def test_the_end_waits_for_a_thread_that_comes_back_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked, codes, seconds = [None], [], itertools.count()
    monkeypatch.setattr(exits, "_blocked", blocked)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(exits, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: blocked.clear()))
    exits._leave_if_blocked()
    assert codes == []
    blocked.append(None)
    monkeypatch.setattr(exits, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
    exits._leave_if_blocked()
    assert codes == [1]
