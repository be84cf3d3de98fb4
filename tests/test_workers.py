"""Worker processes: results come back, failures are told, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshcomm.errors import CommError, MeshError
from meshcomm.runtime.start import by_value, workers, world
from meshcomm.runtime.start.worker import Answer
from meshcomm.runtime.start.workers import WorkerPool, run_processes

ROOT = Path(__file__).parent.parent
LIMIT = 280.0


def my_rank() -> int:
    here = world.current()
    assert here is not None
    return here.rank


def total(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def gone(pids: list[int]) -> bool:
    """All of these processes end within a few seconds."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists() and state(pid) != "Z"]
        if not alive:
            return True
        time.sleep(0.05)
    return False


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def note_pid(folder: str) -> None:
    Path(folder, f"pid{my_rank()}").write_text(str(os.getpid()))


def noted_pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid*")]


# ------------------------------------------------------------------------------------------------------------- programs


def report(x: torch.Tensor, *, scale: float) -> dict[str, Any]:
    here = world.current()
    assert here is not None
    return {
        "place": (here.rank, here.size, here.local_rank, here.local_world_size, here.node_rank),
        "sum": total(x * (here.rank + 1)) * scale,
        "loopback": os.environ.get("GLOO_SOCKET_IFNAME"),
        "pid": os.getpid(),
        "seed": torch.initial_seed(),
        "variable": os.environ.get("MESHCOMM_TEST_VARIABLE"),
    }


def fails_on(rank: int) -> None:
    if my_rank() == rank:
        raise ValueError(f"boom on {rank}")
    total(torch.ones(2))


def refuses() -> None:
    raise MeshError("meshcomm.test: refused.")


class StubbornError(Exception):
    """Cannot be built again from its args."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("stubborn")


def stubborn() -> None:
    raise StubbornError(1, 2)


def dies(rank: int, how: str) -> None:
    if my_rank() == rank:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    total(torch.ones(2))


def leaves(rank: int) -> None:
    if my_rank() == rank:
        sys.exit(5)


def hangs(folder: str, rank: int) -> None:
    note_pid(folder)
    if my_rank() == rank:
        time.sleep(1000)


def gives_function() -> Callable[[], None]:
    return threading.Lock()


def gives_leaf() -> torch.Tensor:
    return (torch.ones(2, requires_grad=True) * 3)[::2]


def own_pid() -> int:
    return os.getpid()


# -------------------------------------------------------------------------------------------------------------- running


def test_results_in_order_of_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCOMM_TEST_VARIABLE", "set after the fork server started")
    results = run_processes(report, 3, (torch.ones(2),), {"scale": 0.5}, timeout=LIMIT)
    assert [r["place"] for r in results] == [(rank, 3, rank, 3, 0) for rank in range(3)]
    for result in results:
        torch.testing.assert_close(result["sum"], torch.full((2,), 3.0))
        assert result["loopback"] == {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
        assert result["variable"] == "set after the fork server started"
    assert len({r["seed"] for r in results}) == 3
    assert len({r["pid"] for r in results} | {os.getpid()}) == 4
    assert gone([r["pid"] for r in results])
    assert world.current() is None  # The parent is a plain process still.


@pytest.mark.thorough
def test_one_rank_and_tensors_by_value() -> None:
    (leaf,) = run_processes(gives_leaf, 1, timeout=LIMIT)
    assert leaf.tolist() == [3.0]
    assert not leaf.is_shared()


def test_a_rank_that_raises() -> None:
    begin = time.monotonic()
    with pytest.raises(CommError) as caught:
        run_processes(fails_on, 3, (1,), timeout=LIMIT)
    message = str(caught.value)
    assert message.startswith("meshcomm.launch: rank 1 failed in fails_on: ValueError: boom on 1")
    assert 'raise ValueError(f"boom on {rank}")' in message
    assert "worker.py" not in message  # The traceback starts with the user's function.
    assert isinstance(caught.value.__cause__, ValueError)
    assert time.monotonic() - begin < LIMIT / 2  # The others were waiting in a collective, and were not waited for.


def test_an_exception_that_pickle_cannot_build_again() -> None:
    with pytest.raises(
        CommError, match="(?s)failed in stubborn: StubbornError: stubborn.*raise StubbornError"
    ) as caught:
        run_processes(stubborn, 1, timeout=LIMIT)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(("how", "words"), [("exit", "ended with exit code 7"), ("kill", "was ended by SIGKILL")])
def test_a_rank_that_dies_silently(how: str, words: str) -> None:
    with pytest.raises(CommError, match=f"rank 1 failed in dies: the process {words}"):
        run_processes(dies, 2, (1, how), timeout=LIMIT)


@pytest.mark.thorough
def test_sys_exit_is_a_failure_too() -> None:
    with pytest.raises(CommError, match="rank 0 failed in leaves: SystemExit: 5"):
        run_processes(leaves, 2, (0,), timeout=LIMIT)


@pytest.mark.thorough
def test_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up soon after the ranks stand, however long their start takes."""
    work = workers._Crew.work
    monkeypatch.setattr(
        workers._Crew, "work", lambda self, task, _, prompt: work(self, task, time.monotonic() + 8, prompt)
    )
    words = (
        "(?s)hangs did not end within 280 s on rank 1; all ranks were ended.*got: done: 2 of 3 ranks.*"
        r"; rank 1 is in hangs \(test_workers.py:\d+\)\n.*longer timeout="
    )
    with pytest.raises(CommError, match=words):
        run_processes(hangs, 3, (str(tmp_path), 1), timeout=LIMIT)
    pids = noted_pids(tmp_path)
    assert len(pids) == 3
    assert gone(pids)


def fails_beside(folder: str) -> None:
    there = Path(folder) / "there"

    def sleeps() -> None:
        there.touch()
        time.sleep(LIMIT)

    if my_rank() == 0:
        sleeps()
    while not there.exists():
        time.sleep(0.01)
    raise KeyError("mine")


@pytest.mark.thorough
def test_who_fails_is_told_with_where_the_others_are(tmp_path: Path) -> None:
    words = r"rank 1 failed in fails_beside: .*mine.*rank 0 is in fails_beside \(test_workers.py:\d+\) > sleeps \(test_workers.py:"
    with pytest.raises(CommError, match=f"(?s){words}"):
        run_processes(fails_beside, 2, (str(tmp_path),), timeout=LIMIT)


def test_who_is_late_is_named_beside_who_is_done() -> None:
    answers = [Answer("result", 0, 7), Answer("late", 1, summary="is stopped (process 5)"), Answer("result", 2, 8)]
    words = r"(?s)train did not end within 4 s on rank 1; .*got: done: 2 of 3 ranks \(rank 0, 2\); rank 1 is stopped"
    with pytest.raises(CommError, match=words):
        workers._results("train", answers, timedelta(seconds=4))
    assert workers._results("train", answers, None) == [7, None, 8]


def test_what_cannot_be_pickled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()
    with pytest.raises(MeshError, match="(?s)<lambda> cannot be sent.*cannot pickle.*with def at the top level"):
        run_processes(lambda: lock, 2)
    with pytest.raises(MeshError, match=r"args\[1\] of fails_on cannot be sent"):
        run_processes(fails_on, 2, (1, lock))
    with pytest.raises(MeshError, match=r"kwargs\['rank'\] of fails_on cannot be sent"):
        run_processes(fails_on, 2, (), {"rank": lock})
    monkeypatch.setattr(by_value, "cloudpickle", None)
    with pytest.raises(
        MeshError,
        match="(?s)<lambda> cannot be sent.*Can't (pickle|get local object).*pip install cloudpickle.*; or define",
    ):
        run_processes(lambda: 1, 2)


def test_a_result_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(CommError, match="the result, of type lock, cannot be sent back"):
        run_processes(gives_function, 1, timeout=LIMIT)


@pytest.mark.parametrize(
    ("ranks", "timeout", "message"),
    [(0, None, "ranks must be a positive int"), (True, None, "ranks must be"), (2, -1, "timeout must be a positive")],
)
def test_wrong_arguments(ranks: int, timeout: float | None, message: str) -> None:
    with pytest.raises(MeshError, match=f"meshcomm.launch: {message}"):
        run_processes(own_pid, ranks, timeout=timeout)


@pytest.mark.thorough
def test_a_backend_that_is_not_there_is_the_users_error() -> None:
    with pytest.raises(MeshError, match="backend 'carrier-pigeon' is not available"):
        run_processes(own_pid, 2, backend="carrier-pigeon", timeout=LIMIT)


# ----------------------------------------------------------------------------------------------------------------- pool


@pytest.mark.thorough
def test_a_pool_keeps_its_processes_and_replaces_broken_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerPool(2, timeout=LIMIT) as pool:
        first = pool.run(own_pid)
        assert pool.run(own_pid) == first
        # Refused on every rank before any communication: nothing is broken.
        words = "(?s)failed in refuses: MeshError: meshcomm.test: refused.*also failed: rank"
        with monkeypatch.context() as patch:
            patch.setattr(workers, "_POOL_PROMPT", LIMIT)  # however much later the other one says so
            with pytest.raises(CommError, match=words):
                pool.run(refuses)
        assert pool.run(own_pid) == first
        # One rank failed while the other waited for it.
        with pytest.raises(CommError, match="rank 0 failed in fails_on"):
            pool.run(fails_on, 0)
        assert gone(first)
        second = pool.run(own_pid)
        assert not set(first) & set(second)
        assert [r["sum"].tolist() for r in pool.run(report, torch.ones(1), scale=1.0)] == [[3.0], [3.0]]
        lock = threading.Lock()
        with pytest.raises(MeshError, match="<lambda> cannot be sent"):
            pool.run(lambda: lock)
        assert pool.run(lambda: 1) == [1, 1]
        assert pool.run(own_pid) == second
        with pytest.raises(CommError, match="was ended by SIGKILL"):
            pool.run(dies, 1, "kill")
        third = pool.run(own_pid)
    assert gone(second + third)


@pytest.mark.thorough
def test_a_pool_that_is_dropped_ends_its_workers() -> None:
    pool = WorkerPool(2, timeout=LIMIT)
    pids = pool.run(own_pid)
    del pool
    assert gone(pids)


# -------------------------------------------------------------------------------------------------------- scripts, and their ends

SCRIPT = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
from meshcomm.runtime.start import world
from meshcomm.runtime.start.workers import WorkerPool, run_processes

def main(folder):
    x = torch.ones(1)
    dist.all_reduce(x)
    pathlib.Path(folder, f"pid{world.current().rank}").write_text(str(os.getpid()))
    if len(sys.argv) > 2:
        time.sleep(1000)
    return float(x)
"""
GUARDED = "\nif __name__ == '__main__':\n    print(run_processes(main, 2, (sys.argv[1],), timeout=280))\n"
UNGUARDED = "\nprint(run_processes(main, 2, (sys.argv[1],), timeout=280))\n"
LEFT_OPEN = GUARDED + "    pool = WorkerPool(2, timeout=280)\n    print(pool.run(main, sys.argv[1] + '/pool'))\n"


def start(tmp_path: Path, body: str, *more: str, interrupts: signal.Handlers = signal.SIG_DFL) -> subprocess.Popen[str]:
    """``interrupts``: how it takes SIGINT when it begins, however the tests were started."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + body)
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), *more],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, interrupts),
    )  # fmt: skip


def wait_for_pids(process: subprocess.Popen[str], folder: Path) -> list[int]:
    until = time.monotonic() + LIMIT
    while time.monotonic() < until and process.poll() is None:
        pids = [path.read_text() for path in folder.glob("pid*")]
        if len(pids) == 2 and all(pids):
            return [int(pid) for pid in pids]
        time.sleep(0.05)
    raise AssertionError(f"the workers did not start: {process.communicate(timeout=5)}")


@pytest.mark.thorough
def test_a_script(tmp_path: Path) -> None:
    """Runs some processes, then others in a pool that it leaves open."""
    (tmp_path / "pool").mkdir()
    process = start(tmp_path, LEFT_OPEN)
    out, err = process.communicate(timeout=280)
    assert (process.returncode, out, err) == (0, "[2.0, 2.0]\n[2.0, 2.0]\n", "")
    assert len(noted_pids(tmp_path)) == len(noted_pids(tmp_path / "pool")) == 2
    assert gone(noted_pids(tmp_path) + noted_pids(tmp_path / "pool"))


@pytest.mark.thorough
def test_a_script_without_a_main_guard_is_told(tmp_path: Path) -> None:
    process = start(tmp_path, UNGUARDED)
    _, err = process.communicate(timeout=280)
    assert process.returncode == 1
    assert "ended while starting" in err
    assert "if __name__ == '__main__':" in err


@pytest.mark.thorough
def test_a_function_of_an_interactive_session_is_told(tmp_path: Path) -> None:
    program = "import sys; sys.modules['cloudpickle'] = None\n" + SCRIPT + "\nrun_processes(main, 2, ('',))"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert "MeshError: meshcomm.launch: main lives in an interactive session" in done.stderr
    assert "fix: pip install cloudpickle" in done.stderr


NAMELESS = """
import functools
import torch
import meshcomm as mc

class Point:
    def __init__(self, x):
        self.x = x

offset = 3

def around(n):
    def main(add):
        y = mc.all_reduce(torch.tensor(n), "a", mesh=mc.make_mesh({"a": 2}))
        return Point(add(mc.rank()) + offset + y.item())
    return main

points = mc.launch(functools.partial(around(4), lambda r: r * 10), ranks=2, runtime="processes")
print([type(p) is Point for p in points], [p.x for p in points])
"""


@pytest.mark.thorough
def test_what_has_no_name_elsewhere_is_sent_by_value(tmp_path: Path) -> None:
    """Of a script from stdin, of ``python -c``, and of the prompt, where ``__main__`` is no file; side by side."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = {
        how: subprocess.Popen(
            [sys.executable, *args], env=env, cwd=tmp_path, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for how, args in {"stdin": ["-"], "-c": ["-c", NAMELESS], "prompt": ["-i", "-q"]}.items()
    }  # fmt: skip
    for how, process in started.items():
        out, err = process.communicate(None if how == "-c" else NAMELESS, timeout=280)
        assert out.splitlines() == ["[True, True] [11, 21]"], (how, err)


@pytest.mark.thorough
def test_no_orphans_when_the_parent_is_ended(tmp_path: Path) -> None:
    """By each of three signals: three scripts that start side by side."""
    started = {}
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        folder = tmp_path / number.name
        folder.mkdir()
        started[number] = folder, start(folder, GUARDED, "sleep")
    for number, (folder, process) in started.items():
        pids = wait_for_pids(process, folder)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # As a terminal does: to the whole group.
        else:
            process.send_signal(number)
        _, err = process.communicate(timeout=LIMIT)
        assert process.returncode != 0, number
        assert gone(pids), number
        assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT), err
        assert err.count("Traceback") == (1 if number == signal.SIGINT else 0), err


@pytest.mark.thorough
def test_who_was_started_to_ignore_interrupts_does(tmp_path: Path) -> None:
    """A job in the background: the terminal's Ctrl-C, which goes to all, is not meant for it, nor for its workers."""
    process = start(tmp_path, GUARDED, "sleep", interrupts=signal.SIG_IGN)
    pids = wait_for_pids(process, tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    assert {state(pid) for pid in pids}.isdisjoint("ZX")
    process.terminate()
    process.communicate(timeout=LIMIT)
    assert process.returncode == -signal.SIGTERM
    assert gone(pids)
