"""The examples under torchrun, on two ranks: what they say is what they say elsewhere; each compares with one rank itself.

One torchrun runs them all (in_a_row.py): the interpreters and what they import are most of what a start costs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
FLAGS = {
    "long_context": ["--mesh", "dp=1,cp=2,sp=1"],
    "mixture_of_experts": ["--mesh", "dp=1,ep=2"],
    "pipeline": ["--mesh", "pp=2,dp=1"],
    "collectives_tour": [],
    # Along dp; along tp under mpiexec, and both at once in-process.
    "train_gpt": [
        "--batch", "4", "--context", "8", "--width", "16", "--layers", "2", "--heads", "4", "--sample", "12", "--mesh",
        "dp=2,tp=1", "--steps", "3", "--check",
    ],
    # Cut along tp, and resumed as shards of FSDP; both at once are in-process, in test_finetune.py.
    "finetune": [
        "--steps", "4", "--batch", "4", "--context", "12", "--width", "32", "--layers", "2", "--sample", "4", "--ranks", "2",
    ],
}  # fmt: skip
SAVES = ["train_gpt", "finetune"]


class Said(NamedTuple):
    out: str
    err: str


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    """What each example has printed, those that have ended well on every rank."""
    folder = tmp_path_factory.mktemp("examples")
    programs = []
    for name, flags in FLAGS.items():
        if name == "finetune" and importlib.util.find_spec("transformers") is None:
            continue
        (folder / f"{name}-results").mkdir()
        out = ["--out", str(folder / f"{name}-results")] * (name in SAVES)
        programs.append([name, [str(ROOT / "examples" / f"{name}.py"), *flags, *out]])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    env = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "in_a_row.py"), str(folder), json.dumps(programs)],
        env=env, cwd=folder, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        name: Said((folder / f"{name}.out").read_text(), (folder / f"{name}.err").read_text()) for name, _ in programs
    }
    for name, each in found.items():
        codes = [(folder / f"{name}.{rank}").read_text() for rank in range(RANKS)]
        assert codes == ["0"] * RANKS, f"{name}: {each.out}{each.err}"
    return found


@pytest.mark.parametrize("name", ["long_context", "mixture_of_experts", "pipeline"])
def test_equal_one_rank(said: dict[str, Said], name: str) -> None:
    assert "of one rank" in said[name].out


def test_train_gpt_equals_one_rank(said: dict[str, Said]) -> None:
    out, err = said["train_gpt"]
    # Once each: the first rank alone speaks.
    assert out.count("check: 3 steps on {'dp': 2, 'tp': 1} equal those of one rank") == 1, out
    assert out.count("The ") == 1
    assert err.count(" 3/3  loss ") == 1, err
    assert "tokens/s" in err


def test_finetune_on_two_meshes(said: dict[str, Said]) -> None:
    pytest.importorskip("transformers")
    out, err = said["finetune"]
    assert out.count("losses of the two meshes") == 1
    assert re.search(r"loss [\d.]+ -> [\d.]+; losses of the two meshes are at most \S+ apart", out), out
    assert err.count("2/2") >= 3


def test_the_tour_prints_the_same(
    said: dict[str, Said], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "examples" / "collectives_tour.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--ranks", str(RANKS)])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(script), run_name="__main__")
    alone = capsys.readouterr().out
    assert alone.startswith("2 ranks; ")
    assert said["collectives_tour"].out == alone
