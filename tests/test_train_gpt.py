"""The example, run as its users run it: in this process, under mpiexec, interrupted and resumed."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import meshcomm as mc

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "train_gpt.py"
TINY = ["--batch", "4", "--context", "8", "--width", "16", "--layers", "2", "--heads", "4", "--sample", "12"]


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example() -> ModuleType:
    return load_example()


def start(command: list[str], out: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script's end, started by command with the tiny model."""
    env = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": str(ROOT)} | variables
    line = [*command, str(SCRIPT), *TINY, "--out", str(out), *flags]
    return subprocess.run(line, env=env, cwd=out, capture_output=True, text=True, timeout=280, check=False)


def assert_checked(code: int, out: str, err: str, mesh: str = "{'dp': 2, 'tp': 2}") -> None:
    assert code == 0, out + err
    # Once each: the first rank alone speaks.
    assert out.count(f"check: 3 steps on {mesh} equal those of one rank") == 1, out
    assert out.count("The ") == 1
    assert err.count(" 3/3  loss ") == 1, err
    assert "tokens/s" in err


def train(example: ModuleType, out: Path, *flags: str) -> dict[str, Any]:
    """The checkpoint of a run in this process."""
    assert example.run([*TINY, "--dtype", "float64", "--out", str(out), *flags]) == 0
    return torch.load(out / "checkpoint.pt", weights_only=True)


def test_in_process_equals_one_rank(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = example.run([*TINY, "--mesh", "dp=2,tp=2", "--steps", "3", "--check", "--out", str(tmp_path)])
    assert_checked(code, *capsys.readouterr())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt"]


@pytest.mark.thorough
@pytest.mark.parametrize("variable", ["MESHCOMM_MPICH", "MESHCOMM_OPENMPI"])
def test_mpiexec_equals_one_rank(tmp_path: Path, variable: str) -> None:
    if not os.environ.get(variable):
        pytest.skip(f"{variable} does not say which environment has bin/mpiexec")
    mpiexec = [str(Path(os.environ[variable], "bin", "mpiexec")), "-n", "2"]
    allowed: dict[str, str] = {}
    if variable == "MESHCOMM_OPENMPI":
        mpiexec.append("--oversubscribe")
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ended = start([*mpiexec, sys.executable], tmp_path, "--mesh", "dp=1,tp=2", "--steps", "3", "--check", **allowed)
    assert_checked(ended.returncode, ended.stdout, ended.stderr, "{'dp': 1, 'tp': 2}")


@pytest.mark.one_in(2, alike=True)
@pytest.mark.parametrize("mesh", ["dp=1", "dp=4", "tp=4", "tp=2,dp=2"])
def test_any_mesh_equals_one_rank(example: ModuleType, tmp_path: Path, mesh: str) -> None:
    flags = ["--mesh", mesh, "--steps", "2", "--check", "--out", str(tmp_path)]
    assert example.run([*TINY, *flags]) == 0


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("pvary", "tp"),
        ("all_reduce", "dp"),
        *(pytest.param(name, "dp", marks=pytest.mark.thorough) for name in ("pvary", "shard")),
    ],
)
def test_check_finds_a_mistake(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    axis: str,
) -> None:
    """With one of its collectives forgotten, the program is still right on one rank, and wrong on four."""

    def forgetful(x: Any, over: Any, **rest: Any) -> Any:
        return x if over == axis else getattr(mc, name)(x, over, **rest)

    names = {each: getattr(mc, each) for each in mc.__all__} | {name: forgetful}
    monkeypatch.setattr(example, "mc", SimpleNamespace(**names))
    assert example.run([*TINY, "--steps", "1", "--check", "--out", str(tmp_path)]) == 1
    assert "DIFFER FROM those of one rank" in capsys.readouterr().out


def test_resumed_equals_uninterrupted(example: ModuleType, tmp_path: Path) -> None:
    whole = train(example, tmp_path / "whole", "--steps", "4", "--seed", "3")
    train(example, tmp_path / "halves", "--steps", "2", "--seed", "3")
    # The other flags, seed and dtype among them, come from the checkpoint.
    assert example.run(["--resume", "--steps", "4", "--sample", "0", "--out", str(tmp_path / "halves")]) == 0
    halves = torch.load(tmp_path / "halves" / "checkpoint.pt", weights_only=True)
    assert halves.pop("flags") == whole.pop("flags")
    assert_close(halves, whole, rtol=0, atol=0)


def test_resumed_on_another_mesh(example: ModuleType, tmp_path: Path) -> None:
    whole = train(example, tmp_path / "whole", "--steps", "4", "--mesh", "dp=1")
    for mesh, steps in ("dp=2,tp=2", "1"), ("tp=4", "2"), ("dp=4", "3"), ("dp=1", "4"):
        resume = [] if steps == "1" else ["--resume"]
        parts = train(example, tmp_path / "parts", "--mesh", mesh, "--steps", steps, *resume)
        assert parts["step"] == int(steps)
    for key in "params", "exp_avg", "exp_avg_sq":
        assert_close(parts[key], whole[key], rtol=0, atol=1e-9)


def test_resume_checks_what_it_resumes(example: ModuleType, tmp_path: Path) -> None:
    flags = [*TINY, "--mesh", "tp=2", "--out", str(tmp_path), "--steps", "2"]
    assert example.run([*flags, "--check"]) == 0
    assert example.run([*flags, "--check", "--resume", "--steps", "4"]) == 0


def test_text_is_the_same_on_every_rank_and_mesh(example: ModuleType, tmp_path: Path) -> None:
    def text(args: Namespace) -> str:
        mesh = mc.make_mesh(args.mesh)
        with mc.use_mesh(mesh):
            _, params = example.train(args, mesh.device, report=False, save=False)
            return example.generate(params, args, mesh.device)

    flags = [*TINY, "--dtype", "float64", "--steps", "2", "--sample", "20", "--out", str(tmp_path)]
    texts = [
        one
        for mesh, ranks in (("dp=2,tp=2", 4), ("dp=1", 1))
        for one in mc.launch(text, ranks=ranks, args=(example.parse([*flags, "--mesh", mesh]),))
    ]
    assert len(texts) == 5
    assert set(texts) == {texts[0]}
    assert texts[0].startswith("The ")
    assert list(tmp_path.iterdir()) == []


def test_unfinished_write_leaves_the_old_checkpoint(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(example, tmp_path, "--steps", "1", "--mesh", "dp=1")
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def full_disk(content: Any, path: Path) -> None:
        path.write_bytes(b"half of")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="no space left"):
        example.run(["--resume", "--steps", "2", "--mesh", "dp=1", "--out", str(tmp_path)])
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_progress_on_a_terminal_and_in_a_log(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        written = io.StringIO()
        monkeypatch.setattr(written, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stderr", written)
        for step in range(100):
            example.show_progress(step + 1, 100, "loss 1.0", first=step == 0)
        lines = written.getvalue().split("\n")
        assert "[##############################] 100/100  loss 1.0" in lines[-2]
        assert written.getvalue().count("\r") == (100 if terminal else 0)
        assert len(lines) == (2 if terminal else 12)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mesh dp=2,pp=2", "argument --mesh: unknown axis 'pp' in 'dp=2,pp=2': there are dp and tp"),
        ("--mesh dp=2,dp=2", "argument --mesh: 'dp=2' in 'dp=2,dp=2': an axis has one size of at least 1"),
        ("--mesh dp", "argument --mesh: 'dp' in 'dp': an axis has one size of at least 1, as in dp=2,tp=2"),
        ("--mesh dp=-1", "argument --mesh: 'dp=-1' in 'dp=-1': an axis has one size of at least 1"),
        ("--mesh tp=3", "--heads 4 is not a multiple of tp=3 in --mesh"),
        ("--batch 3", "--batch 3 is not a multiple of dp=2 in --mesh"),
        ("--width 18", "--width 18 is not a multiple of --heads 4"),
        ("--context 10000000", "--context 10000000 is more than the"),
        ("--heads 0", "--heads 0 is less than 1"),
        ("--sample -1", "--sample -1 is less than 0"),
        ("--lr nan", "--lr nan is less than 0"),
        ("--steps many", "argument --steps: invalid int value: 'many'"),
        ("--dtype float16", "argument --dtype: invalid choice: 'float16'"),
        ("--check --dtype float32", "--check is to 1e-09: float32 is too coarse, use float64"),
        ("--resume", "--resume: [Errno 2] No such file"),
        ("--frobnicate", "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_flags(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        example.run(["--out", str(tmp_path / "new"), *flags.split()])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_resume_refuses_another_model(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(example, tmp_path, "--steps", "1", "--mesh", "dp=1")
    for flags, message in (
        ("--width 32", "--width is 16 in the checkpoint and cannot be 32"),
        ("--dtype float32", "--dtype is float64 in the checkpoint and cannot be float32"),
        ("--check --steps 1", "--check has no step to compare: give more --steps"),
    ):
        with pytest.raises(SystemExit):
            example.run(["--resume", "--mesh", "dp=1", "--out", str(tmp_path), *flags.split()])
        assert message in capsys.readouterr().err
