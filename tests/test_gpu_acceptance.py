"""`make test-gpu`, rehearsed: every part of it on the CPU, so that it runs on the day there is a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_parts
from benchmarks.gpu_parts import Place

ROOT = Path(__file__).resolve().parents[1]
ON_RANKS = ("collectives", "kernels", "memory", "graph", "training")
pytestmark = pytest.mark.thorough


@pytest.fixture
def on_pool(gloo4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts' ranks are those that are there already."""
    monkeypatch.setattr(gpu_parts, "processes", lambda fn, *args, **_: gloo4.run(fn, *args))


@pytest.mark.parametrize("part", ON_RANKS)
@pytest.mark.usefixtures("on_pool")
def test_parts(part: str) -> None:
    found = gpu_parts.PARTS[part](Place(4, False))
    assert not found.get("failed")
    json.dumps(found)
    if part == "collectives":
        assert {row["call"] for row in found["rows"]} >= {
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "all_to_all",
            "broadcast",
        }
        assert all(row["us"] > 0 and row["torch us"] > 0 for row in found["rows"])
    if part == "kernels":
        assert all(each["count"] for each in found.values())
    if part == "training":
        assert set(found["kinds"]) == set(gpu_parts.KINDS)


def alone(place: Place) -> list[Any]:
    """On one rank, which asks its backend as a machine with one GPU does."""
    gpu_parts.mesh_of(place)
    return [
        gpu_parts.time_collectives(place),
        gpu_parts.count_kernels(place),
        gpu_parts.capture(place),
        gpu_parts.train(place),
    ]


def test_parts_on_one_rank() -> None:
    rows, kernels, differences, kinds = gpu_parts.processes(alone, Place(1, False))[0]
    assert rows
    assert kernels
    assert differences == []
    assert all(each["losses"] == pytest.approx(kinds["one rank"]["losses"]) for each in kinds.values())


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_hang_on_purpose(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHCOMM_GPU_PATIENCE", "2")
    found = gpu_parts.hang(Place(ranks, False))
    assert not found["failed"], found
    assert len(found["told"]) == max(1, ranks - 1)
    assert all("rank 1" in each or "index 1" in each for each in found["told"].values()), found


def test_a_hang_of_which_nobody_is_told_fails() -> None:
    found = gpu_parts._judged({"rank 0": "", "rank 2": "after 2.0 s: CommError: rank 1 is late"}, 2.0)
    assert found["failed"] == {"rank 0": "was not told"}


def test_wrong_losses_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {kind: {"losses": [1.0, 2.0]} for kind in gpu_parts.KINDS} | {"fully_shard": {"losses": [1.0, 2.1]}}
    monkeypatch.setattr(gpu_parts, "processes", lambda *_: [kinds])
    assert list(gpu_parts.training(Place(4, False))["failed"]) == ["fully_shard"]


def test_outcomes_of_tests(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="x"/><testcase classname="a" name="y"><failure>E no</failure></testcase>'
        '<testcase classname="a" name="z"><skipped message="needs two"/></testcase></testsuite></testsuites>'
    )
    assert gpu_parts.outcomes(report) == {"passed": 1, "skipped": {"needs two": 1}, "failed": {"a.y": "E no"}}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


def test_a_file_of_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "facts.json"
    done = run("--rehearse", "--only", "machine,tests,training", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{out}: all passed" in done.stdout
    facts = json.loads(out.read_text())
    assert facts["rehearsal"]
    assert facts["parts"]["machine"]["found"]["torch"] == torch.__version__
    assert sum(facts["parts"]["tests"]["found"]["skipped"].values()) > 10
    assert gpu.main(["--show", str(out)]) == 0
    said = capsys.readouterr().out
    assert "training: passed" in said
    ms = facts["parts"]["training"]["found"]["kinds"]["torch DDP"]["ms"]
    assert f"| torch DDP | {ms} |" in said


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda patch: patch.setitem(gpu.LIMITS, "machine", 0.01), "took longer than 0.01 s"),
        (lambda patch: patch.setattr(sys, "executable", shutil.which("false")), "exit status"),
    ],
    ids=["late", "broken"],
)
def test_a_part_that_fails_is_told(
    change: Callable[[pytest.MonkeyPatch], object], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    change(monkeypatch)
    out = tmp_path / "facts.json"
    assert gpu.main(["--rehearse", "--only", "machine", "--out", str(out)]) == 1
    assert state in json.loads(out.read_text())["parts"]["machine"]["state"]
    assert "failed: machine; send this file" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "facts.json"))
    assert done.returncode == 2
    assert "no GPU: torch" in done.stderr
    assert "--rehearse" in done.stderr
    assert not list(tmp_path.iterdir())


def test_options_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--only", "tests,speed"])
    assert "no part 'speed': machine, tests" in capsys.readouterr().err


def test_the_page_has_every_part() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert [part for part in gpu.LIMITS if f"| `{part}` |" not in page] == []
    assert list(gpu.LIMITS) == list(gpu_parts.PARTS)
