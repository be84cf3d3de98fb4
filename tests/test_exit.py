"""Processes end cleanly: with and without shutdown, with a global mesh, after an exception, with a collective under way.

A thread of gloo that lets go of a tensor while the interpreter ends makes C++ abort. The programs below end in the middle of
ten collectives whose results nobody waits for, which hits that moment in every second run of plain ``torch.distributed``; one
finished collective hits it in every tenth. To have many runs in little time, each rank is a fork of an interpreter that has
imported torch and started no thread, and then ends as any script does.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

HARNESS = """
import collections, os, sys, tempfile, time
import torch
import torch.distributed as dist
import meshcomm as mc

def run(times, ranks):
    codes, slowest = collections.Counter(), 0.0
    for _ in range(times):
        begin, folder = time.monotonic(), tempfile.mkdtemp()
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                return rank, folder
            children.append(child)
        codes[os.waitstatus_to_exitcode(os.waitpid(children.pop(0), 0)[1])] += 1
        slowest = max(slowest, time.monotonic() - begin)
        for child in children:
            codes[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])] += 1
        for name in os.listdir(folder):
            os.remove(os.path.join(folder, name))
        os.rmdir(folder)
    print((dict(codes), slowest), flush=True)
    os._exit(0)

rank, folder = run(int(sys.argv[1]), 2)
where = dict(init_method="file://" + folder + "/meeting", rank=rank, world_size=2)
"""
INIT = """
mc.init(timeout=30, **where)
mesh = mc.make_mesh({"dp": 2})
assert mc.all_reduce(torch.ones(2), "dp", mesh=mesh).tolist() == [2.0, 2.0]
"""
UNDER_WAY = """
for _ in range(10):
    dist.all_reduce(torch.ones(200_000), async_op=True)
"""


def end(tmp_path: Path, program: str, times: int) -> tuple[dict[int, int], float, str]:
    """How often each exit code came, the longest that rank 0 took, what was printed to stderr."""
    script = tmp_path / "program.py"
    script.write_text(HARNESS + program)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(times)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    codes, slowest = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    return codes, slowest, done.stderr


@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    ("program", "code"),
    [
        pytest.param(INIT + UNDER_WAY, 0, id="without shutdown"),
        pytest.param(INIT + UNDER_WAY + "mc.shutdown()", 0, id="with shutdown"),
        pytest.param(INIT + UNDER_WAY + "raise ValueError('boom')", 1, id="after an exception"),
    ],
)
def test_ten_runs_in_a_row(tmp_path: Path, program: str, code: int) -> None:
    codes, _, stderr = end(tmp_path, program, 10)
    assert codes == {code: 20}, stderr


@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    ("program", "code"),
    [
        pytest.param(
            INIT + "kept = [dist.group.WORLD, mesh.device_mesh, dist.new_group([0, 1])]" + UNDER_WAY,
            0,
            id="groups held",
        ),
        pytest.param(
            """
dist.init_process_group("gloo", **where)
mesh = mc.make_mesh({"dp": 2})
mc.all_reduce(torch.ones(2), "dp", mesh=mesh)
mc.shutdown()
dist.destroy_process_group()
""",
            0,
            id="adopted",
        ),
        pytest.param(INIT + "mc.shutdown(); mc.shutdown()" + INIT, 0, id="initialised twice"),
        pytest.param("mesh = mc.make_mesh({'dp': 1}); group = mesh.device_mesh.get_group()", 0, id="a world of one"),
        pytest.param(INIT + "\nif os.fork() == 0:\n    os._exit(0)\nos.wait()", 0, id="a fork"),
    ],
)
def test_unusual_ends(tmp_path: Path, program: str, code: int) -> None:
    codes, _, stderr = end(tmp_path, program, 3)
    assert codes == {code: 6}, stderr


@pytest.mark.timeout(60)
def test_a_rank_that_fails_while_its_peer_waits_ends_at_once_and_so_does_the_peer(tmp_path: Path) -> None:
    program = INIT + "if rank == 0: raise ValueError('boom')\nmc.all_reduce(torch.ones(2), 'dp', mesh=mesh)"
    begin = time.monotonic()
    codes, _, stderr = end(tmp_path, program, 1)
    assert codes == {1: 2}
    assert "boom" in stderr
    assert "all_reduce" in stderr  # The peer's traceback.
    assert time.monotonic() - begin < 25  # The time-out is 30 s.


@pytest.mark.timeout(60)
def test_a_collective_that_its_peer_never_joins_does_not_hold_up_the_end(tmp_path: Path) -> None:
    program = (
        INIT
        + """
if rank == 0:
    kept = dist.all_reduce(torch.ones(2), async_op=True)
    raise ValueError("boom")
time.sleep(8)
"""
    )
    codes, slowest, stderr = end(tmp_path, program, 1)
    assert codes == {1: 1, 0: 1}, stderr
    assert slowest < 7
