"""prove_no_hang: traces of runs: of ranks in this process, and files of a torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import meshcomm as mc
from meshcomm.tools import prove

ROOT = Path(__file__).resolve().parents[1]
SQUARE = {"dp": 2, "tp": 2}


def ones() -> Tensor:
    return torch.ones(4)


def exchanged() -> None:
    other = 1 - mc.current_mesh().coordinate["dp"]
    mc.exchange([(ones(), other, 0)], [(other, (4,), torch.float32, 0)], "dp")


def crossed() -> None:
    axes = ("dp", "tp") if mc.current_mesh().rank in (0, 3) else ("tp", "dp")
    mc.wait([mc.all_reduce(ones(), axis, async_op=True) for axis in axes])


def traced(program: Callable[[], object]) -> mc.Trace:
    def main() -> None:
        with mc.use_mesh(mc.make_mesh(SQUARE)):
            program()

    with mc.trace() as t:
        mc.launch(main, 4)
    return t


def test_a_folder_of_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, program, code in (("good", exchanged, 0), ("bad", crossed, 1)):
        folder = tmp_path / name
        folder.mkdir()
        t = traced(program)
        t.save(folder / "trace.json")
        again = mc.Trace.merge([folder / "trace.json"])
        assert again.ranks == t.ranks == (0, 1, 2, 3)
        assert str(mc.prove_no_hang(again)) == str(mc.prove_no_hang(t))
        assert prove.main([str(folder)]) == code
        assert "4 ranks" in capsys.readouterr().out
    assert prove.main([str(tmp_path)]) == 2
    (tmp_path / "other.json").write_text("{}")
    assert prove.main([str(tmp_path)]) == 2
    assert "no trace of meshcomm" in capsys.readouterr().err


def test_traces_that_are_refused(tmp_path: Path) -> None:
    def own() -> mc.Trace:
        with mc.use_mesh(mc.make_mesh({"dp": 2})), mc.trace() as t:
            mc.all_reduce(ones(), "dp")
        return t

    mine, other = mc.launch(own, 2)
    with pytest.raises(mc.MeshError, match=r"the trace has no calls of rank 1, [\s\S]*merge the traces of all ranks"):
        mc.prove_no_hang(mine)
    assert mc.prove_no_hang(mc.Trace.merge([mine, other])).ok
    (_, later) = mc.launch(own, 2)
    for number, t in enumerate((mine, later)):
        t.save(tmp_path / f"rank{number}.json")
    with pytest.raises(mc.MeshError, match=r"different launches[\s\S]*rank 0 of rank0.json and rank 1 of rank1.json"):
        mc.prove_no_hang(mc.Trace.merge(sorted(tmp_path.iterdir())))
    both = mc.Trace.merge([mine, other])
    both.save(tmp_path / "all.json")
    with pytest.raises(mc.MeshError, match=r"the same calls of rank 0[\s\S]*all.json and rank0.json"):
        mc.Trace.merge(sorted(tmp_path.iterdir()))
    with pytest.raises(mc.MeshError, match="the trace is open"), mc.trace() as t:
        mc.prove_no_hang(t)
    with pytest.raises(mc.MeshError, match="leave mesh and ranks out"):
        mc.prove_no_hang(mine, SQUARE)  # type: ignore[call-overload]


# ------------------------------------------------------------------------------------------------- of a torchrun

FINDINGS = {
    "fsdp": set[str](), "tensor": set[str](), "experts": set[str](), "1f1b": {"order"}, "interleaved": {"order"},
    "crossed": {"order"}, "left_out": {"unmatched"},
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files for each of the programs of traced_programs.py."""
    folder = tmp_path_factory.mktemp("traces")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    env = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "traced_programs.py"), str(folder)],
        env=env, cwd=folder, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("name", FINDINGS)
def test_files_of_a_torchrun(name: str, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Backward, units gathered ahead, experts and pipelines: what the ranks have sent, each in a process of its own."""
    files = sorted((saved / name).iterdir())
    assert len(files) == 4
    proof = mc.prove_no_hang(mc.Trace.merge(files))
    assert {finding.kind for finding in proof.findings} == FINDINGS[name], str(proof)
    if name in ("1f1b", "interleaved"):
        assert all("messages wait for each other" in finding.text for finding in proof.findings)
    assert prove.main([str(saved / name)]) == bool(proof.findings)
    assert "4 ranks" in capsys.readouterr().out
