"""The soak: a quarter of a minute of it, or MESHCOMM_SOAK_SECONDS; and it finds what leaks."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import soak
from soak_rounds import LEAKS

SECONDS = float(os.environ.get("MESHCOMM_SOAK_SECONDS", "15"))
SCRIPT = Path(soak.__file__)


def soaked(*arguments: str, timeout: float) -> tuple[int, str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout, check=False)
    return done.returncode, f"{done.stdout}\n{done.stderr}"


@pytest.mark.thorough
@pytest.mark.timeout(SECONDS + 240)
def test_nothing_grows_and_no_number_is_wrong() -> None:
    faulthandler.cancel_dump_traceback_later()  # pytest's own clock is shorter
    code, text = soaked("--seconds", str(SECONDS), timeout=SECONDS + 230)
    assert code == 0, text
    assert "nothing has grown, and every number was right" in text
    assert "guarded: rss MiB" in text


@pytest.mark.thorough
def test_what_leaks_with_each_program_is_found() -> None:
    leaks = ",".join(LEAKS)
    code, text = soaked(
        "--rounds", "30", "--intervals", "8", "--guard", "off", "--only", "program", "--leak", leaks, timeout=280
    )
    assert code == 1, text
    for rank in range(4):
        for name in ("rss MiB", "descriptors", "threads", "works", "calls open"):
            assert f"plain rank {rank}: {name} grew by" in text, text


def crew_that_saw(series: list[float], name: str = "descriptors") -> soak.Crew:
    pool: Any = None  # it is not asked
    crew = soak.Crew("plain", pool)
    crew.seen = [[{name: value}] * 4 for value in series]
    return crew


@pytest.mark.parametrize(
    "series",
    [[7.0] * 20, [7, 9, 8, 10] * 5, [3, 30, 30, 31, 30, 30, 30, 30], [9.0, 8, 7, 6, 5, 4, 3, 2], [5], [9, 12, 12, 12]],
    ids=["flat", "up and down", "a late start", "falling", "one", "within the slack"],
)
def test_what_does_not_grow_is_not_found(series: list[float]) -> None:
    assert crew_that_saw(series).growth() == []


@pytest.mark.parametrize(
    "series", [list(range(20)), [*range(0, 40, 2), *range(39, 60)], [5, 6, 5, 6, 30, 31, 30, 31]], ids=str
)
def test_what_grows_is_found(series: list[float]) -> None:
    found = crew_that_saw(series).growth()
    assert len(found) == 4
    assert found[2].startswith("plain rank 2: descriptors grew by ")


@pytest.mark.thorough
def test_a_round_that_fails_says_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: the crews are real, the judge is out of his mind."""

    def unjust(program: Any, results: Any) -> None:
        if seeds.append(0) or len(seeds) > 3:
            raise AssertionError("value 0 on rank 1: 2 is not 3")

    seeds: list[int] = []
    monkeypatch.setattr(soak, "right", unjust)
    assert soak.main(["--rounds", "5", "--guard", "off", "--only", "program", "--seed", "70"]) == 1
    assert (
        "again with --guard off --only program --seed 71 --rounds 1: AssertionError: value 0" in capsys.readouterr().out
    )
