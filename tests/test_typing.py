"""The programs of tests/typing, which `make lint` has mypy and basedpyright read, run: what they are typed as is what they are."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "typing"
READ_ONLY = {"overloads", "mistakes"}
PROGRAMS = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in READ_ONLY)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    assert importlib.import_module(name).main()


def test_only_mistakes_are_excused() -> None:
    """A line that a checker is told to let pass is a line that users have to excuse, too."""
    excused = {path.stem for path in HERE.glob("*.py") if "ignore[" in path.read_text()}
    assert excused == {"mistakes"}
    lines = (HERE / "mistakes.py").read_text().split("def wrong(")[1].splitlines()[1:-1]
    assert not [line for line in lines if "# type: ignore[" not in line or "# pyright: ignore[" not in line]
