"""The examples of cut sequences, experts and pipelines, run as their users run them; all compare with one rank themselves."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *flags])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize("mesh", ["dp=1,cp=2,sp=2", "dp=2,cp=3,sp=1", "dp=1,cp=1,sp=4"])
def test_long_context(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mesh: str) -> None:
    if "cp=3" in mesh:
        with pytest.raises(Exception, match="cannot be cut into 6 chunks"):
            run(monkeypatch, "long_context.py", "--mesh", mesh)
        return
    run(monkeypatch, "long_context.py", "--mesh", mesh)
    found = re.search(r"loss ([\d.]+) -> ([\d.]+) on .*: the losses and gradients of one rank", capsys.readouterr().out)
    assert found is not None
    assert float(found[2]) < float(found[1]) - 1


def test_experts_are_evened_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "mixture_of_experts.py", "--mesh", "dp=2,ep=2")
    out = capsys.readouterr().out
    first, *_, last = re.findall(r"step +\d+  (\S+)  loss", out)
    assert ord(max(first)) - ord(min(first)) > ord(max(last)) - ord(min(last))
    assert float(re.search(r"busiest expert has ([\d.]+) x", out)[1]) < 1.6  # type: ignore[index]


def test_a_pipeline_is_drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "pipeline.py", "--schedule", "zbv", "--runtime", "in-process")
    planned, rest = capsys.readouterr().out.split("what ran, in")
    ran, sent = rest.split("what rank 0 sent")
    actions = sorted(re.findall(r"\b[FDW]\d\.\d\b", planned))
    assert len(actions) == 2 * 2 * 4 * 3
    assert sorted(re.findall(r"\b[FDW]\d\.\d\b", ran)) == actions
    assert "those of one rank" in sent
