"""The example that fine-tunes a model of transformers, run as its users run it."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import meshcomm as mc

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "finetune.py"
TINY = ["--steps", "4", "--batch", "4", "--context", "12", "--width", "32", "--layers", "2", "--sample", "4"]


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["finetune.py", *TINY, "--out", str(out), *flags])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


def losses(out: str) -> tuple[float, float]:
    """The first and the last one; the program itself asserts that both meshes have the same."""
    found = re.search(r"loss ([\d.]+) -> ([\d.]+); losses of the two meshes are at most \S+ apart", out)
    assert found is not None, out
    return float(found[1]), float(found[2])


@pytest.mark.thorough
def test_on_two_meshes_and_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    run(monkeypatch, tmp_path)
    first, last = losses(capsys.readouterr().out)
    assert last < first
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    saved = {name: x.clone() for name, x in model.state_dict().items()}

    run(monkeypatch, tmp_path, "--tp", "4")  # goes on from the last checkpoint, on other meshes
    assert losses(capsys.readouterr().out)[0] < first
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["step-00000006", "step-00000008"]

    run(monkeypatch, tmp_path / "of a model", "--model", str(tmp_path / "model"), "--ranks", "1", "--tp", "1")
    assert losses(capsys.readouterr().out)[0] < first
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64).state_dict()
    assert any(not torch.equal(saved[name], x) for name, x in again.items())
    mc.shutdown()


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=r"needs transformers: pip install 'meshcomm\[models\]'"):
        run(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--steps", "1"], "--steps is at least 2"),
        (["--context", "0"], "--context and --sample are at least 1"),
        (["--model", "no-such-folder"], "there is no folder 'no-such-folder'"),
    ],
)
def test_wrong_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], said: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, *flags)
    assert said in capsys.readouterr().err


def test_heads_that_are_not_divided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit, match="tp=8 does not divide the 4 heads"):
        run(monkeypatch, tmp_path, "--ranks", "8", "--tp", "8")
