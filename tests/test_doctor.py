"""The doctor: what it sees, what it finds wrong with which fix, and that it runs alone and under a launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshcomm as mc
from meshcomm.runtime.start import world
from meshcomm.tools import doctor
from meshcomm.tools.doctor import Trial
from meshcomm.tools.facts import Facts, Finding, differences, findings, look

ROOT = Path(mc.__file__).resolve().parents[1]
FOUR = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
MET = {**FOUR, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}
SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "no-such-host[1-2].invalid", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "MPI_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")):
            monkeypatch.delenv(name)
    world.shutdown()
    yield monkeypatch
    world.shutdown()


def on_gpus(seen: Facts, count: int) -> Facts:
    return replace(seen, accelerator="cuda", devices=["a GPU"] * count, backend="cpu:gloo,cuda:nccl")


def told(environ: dict[str, str], **changes: Any) -> list[Finding]:
    seen = look(environ)
    cpu = replace(seen, accelerator=None, devices=[], backend="gloo", interfaces=["lo", "eth0"], cores=8)
    return findings(replace(cpu, **changes))


def test_what_it_sees(plain: pytest.MonkeyPatch) -> None:
    seen = look({**MET, "GLOO_SOCKET_IFNAME": "lo", "HOME": "/secret"})
    assert (seen.torch, seen.ranks, seen.resolves) == (torch.__version__, 4, True)
    assert "gloo" in seen.backends
    assert seen.launcher is not None
    assert (seen.launcher["name"], seen.launcher["rank"]) == ("pytorch", 1)
    assert seen.variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert "HOME" not in seen.variables, "no more of the environment than is of use"
    assert look({}).launcher is None
    json.dumps(asdict(seen))


@pytest.mark.parametrize(
    "environ", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, MET, {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "1"}]
)
def test_nothing_wrong(environ: dict[str, str]) -> None:
    assert told(environ) == []


@pytest.mark.parametrize(
    ("environ", "serious", "what", "fix"),
    [
        ({"RANK": "0"}, True, "RANK is set and WORLD_SIZE is not", "set both, or unset RANK"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, True, "RANK must be below WORLD_SIZE", "start with torchrun"),
        (FOUR, True, "MASTER_ADDR and MASTER_PORT not set: the 4 ranks", "set MASTER_ADDR to rank 0's host"),
        ({**FOUR, "MASTER_ADDR": "h"}, True, "MASTER_PORT not set", "MASTER_PORT to a free port"),
        ({**MET, "MASTER_ADDR": "no-such-host.invalid"}, True, "MASTER_ADDR, 'no-such-host.invalid', has no address", "rank 0's machine"),
        (SLURM, True, "MASTER_ADDR, 'no-such-host1.invalid', has no address", "rank 0's machine"),
        ({**MET, "GLOO_SOCKET_IFNAME": "eth9"}, True, "GLOO_SOCKET_IFNAME names 'eth9'", "name one of lo, eth0"),
        ({**MET, "NCCL_SOCKET_IFNAME": "=eth"}, True, "NCCL_SOCKET_IFNAME names 'eth'", "unset it"),
        ({**MET, "OMP_NUM_THREADS": "1", "MESHCOMM_SHARED_MEMORY": "0"}, False, "MESHCOMM_SHARED_MEMORY=0", "unset it"),
        ({k: v for k, v in MET.items() if k != "OMP_NUM_THREADS"}, False, "each of 2 ranks starts a thread for each of 8", "export OMP_NUM_THREADS=4"),
        ({"SLURM_JOB_ID": "3", "SLURM_NTASKS": "4"}, False, "Slurm has given 4 tasks, but", "srun"),
        ({"CUDA_VISIBLE_DEVICES": ""}, False, "CUDA_VISIBLE_DEVICES is empty", "unset it"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_its_fix(environ: dict[str, str], serious: bool, what: str, fix: str) -> None:
    (found,) = told(environ)
    assert found.serious == serious
    assert what in found.what
    assert fix in found.fix
    assert str(found).startswith("wrong: " if serious else "mind: ")


@pytest.mark.parametrize("names", ["lo", "eth0,lo", "=eth0", "^docker"])
def test_interfaces_that_are_there(names: str) -> None:
    assert told({**MET, "NCCL_SOCKET_IFNAME": names}) == []
    assert told({**MET, "NCCL_SOCKET_IFNAME": "et"}) == [], "NCCL takes the beginning of a name"
    assert told({**MET, "GLOO_SOCKET_IFNAME": "et"}) != []


def test_more_ranks_than_devices() -> None:
    assert findings(on_gpus(look(MET), 2)) == []
    (found,) = findings(on_gpus(look(MET), 1))
    assert found.serious
    assert found.what.startswith("2 ranks on this machine and 1 cuda device(s)")
    assert "backend='gloo'" in found.fix
    (found,) = findings(replace(on_gpus(look(MET), 1), backend="gloo"))
    assert not found.serious
    assert "no backend of theirs" in found.what


def test_the_worst_comes_first() -> None:
    found = told({**FOUR, "MESHCOMM_SHARED_MEMORY": "0", "GLOO_SOCKET_IFNAME": "x"})
    assert [each.serious for each in found] == [True, True, False]


def test_what_this_torch_lacks() -> None:
    slow, none = "some µs", "jvp is refused"
    found = told({}, torch="2.16.0", lacking={"torch.a._b": slow, "torch.c._d": none, "torch.e._f": slow})
    assert [str(each).splitlines()[0] for each in found] == [
        "mind: torch 2.16.0 has no torch.a._b, torch.e._f: some µs",
        "mind: torch 2.16.0 has no torch.c._d: jvp is refused",
    ]
    assert found[0].fix == "install a torch that was tested: 2.11, 2.13, 2.14, 2.15"
    (found_newer,) = told({}, untested="torch 2.16.0 is newer than 2.15")
    assert not found_newer.serious
    assert found_newer.what == "torch 2.16.0 is newer than 2.15"
    assert "install a torch that was tested" in found_newer.fix


def test_mixed_versions() -> None:
    seen = look({})
    assert differences([seen] * 3) == []
    found = differences(
        [seen, replace(seen, torch="2.11.0"), seen, replace(seen, host="other", python="3.10.1", nccl="2.1.0")]
    )
    assert [each.serious for each in found] == [True, True, True]
    assert found[0].what == f"the ranks have different torch: {torch.__version__} on rank 0, 2, 3; 2.11.0 on rank 1"
    assert "different python" in found[1].what
    assert "different nccl: None on rank 0, 1, 2; 2.1.0 on rank 3" in found[2].what


def test_trials_are_checked() -> None:
    """They are right, and a wrong one is found."""
    for n in (1, 3, 4):
        for found in mc.launch(lambda: doctor.trials(mc.make_mesh({"x": -1}), "x", (8, 1000)), ranks=n):
            assert len(found) == 12
            assert all(trial.right and trial.milliseconds > 0 for trial in found)
    wrong = {"here": [Trial("shift", 4, 1.0, True), Trial("broadcast", 8, 1.0, False)]}
    (finding,) = doctor._wrong_results(wrong)
    assert finding.what == "wrong results: broadcast of 8 bytes (here)"
    bad = doctor._timed("x", lambda: torch.ones(2), torch.zeros(2), 8, lambda: None)
    assert not bad.right


def test_alone(plain: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain.setattr(doctor, "look", lambda: replace(look({}), interfaces=[]))
    assert doctor.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "torch ",
        "backends    ",
        "launcher    none",
        "make_mesh({'dp': -1}) gives Mesh({'dp': 1})",
        "4 ranks in this process",
        "  all_to_all ",
    ):
        assert expected in printed
    assert "WRONG" not in printed
    assert printed.endswith("nothing serious is wrong\n")


@pytest.mark.thorough
def test_alone_with_processes(plain: pytest.MonkeyPatch) -> None:
    report = doctor.alone(60.0, False, (64,))
    assert report.healthy, report.findings
    here, there = report.trials.items()
    assert here[0] == "4 ranks in this process"
    assert re.match(r"\d process\(es\) on \S+, \d+\.\d s with their start", there[0])
    assert [(trial.name, trial.right) for trial in here[1]] == [(trial.name, True) for trial in there[1]]


def test_what_fails_is_a_finding(plain: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise mc.CommError("meshcomm.launch: rank 1 died.\n  got: signal 11\n  fix: look at it")

    plain.setattr(doctor, "launch", broken)
    report = doctor.alone(60.0, True)
    assert not report.healthy
    (found,) = [each for each in report.findings if each.serious]
    assert found == Finding(True, "ranks in this process: meshcomm.launch: rank 1 died. (got: signal 11)", "look at it")


def test_as_json_and_with_something_wrong(plain: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain.setenv("WORLD_SIZE", "2")
    assert doctor.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["healthy"]
    assert found["trials"] == {}, "nothing is tried where nothing can work"
    assert found["findings"][0]["what"].startswith("WORLD_SIZE is set and RANK is not")


def test_a_launch_that_does_not_meet(
    plain: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain.setattr("tempfile.tempdir", str(tmp_path))
    for name, value in {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}.items():
        plain.setenv(name, value)
    assert doctor.main(["--timeout", "0.2"]) == 1
    printed = capsys.readouterr().out
    assert "launcher    mpich: rank 1, world_size 2" in printed
    assert "wrong: rank 1: meshcomm.init: rank 0 of this launch did not appear on this machine within 0.2 s." in printed


def in_a_launch() -> list[Any]:
    report, speaks = doctor.together(30.0, (64,))
    return [
        speaks,
        report.healthy,
        report.mesh,
        [(t.name, t.right) for found in report.trials.values() for t in found],
        list(report.trials),
    ]


def test_ranks_of_a_launch_speak_with_one_voice() -> None:
    found = mc.launch(in_a_launch, ranks=3)
    assert [each[0] for each in found] == [True, False, False]
    assert found[0][1:4] == found[1][1:4] == found[2][1:4]
    assert found[0][2] == "Mesh({'dp': 3})"
    assert len(found[0][3]) == 6
    assert all(right for _, right in found[0][3])


def test_what_other_ranks_see() -> None:
    mine = look(MET)
    odd = replace(mine, interfaces=["lo"], variables={**mine.variables, "GLOO_SOCKET_IFNAME": "ib0"})
    (found,) = doctor._of_others(findings(mine), [mine, mine, odd])
    assert found.what.startswith("rank 2: GLOO_SOCKET_IFNAME names 'ib0'")


@pytest.mark.thorough
def test_under_torchrun() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "meshcomm", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)  # one object: the other rank is silent
    assert found["healthy"], found["findings"]
    assert found["mesh"] == "Mesh({'dp': 2})"
    ((title, trials),) = found["trials"].items()
    assert title.startswith("2 rank(s) on ")
    assert all(trial["right"] for trial in trials)
