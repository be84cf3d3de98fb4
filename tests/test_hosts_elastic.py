"""examples/elastic.py on two hosts, of which one loses its power in the middle: the other goes on as if nothing had been."""

from __future__ import annotations

import json
import runpy
import time
from pathlib import Path
from typing import Any

import pytest
from hosts import ROOT, Hosts, needs_hosts

import meshcomm as mc

pytestmark = pytest.mark.thorough

EXAMPLE = str(ROOT / "examples" / "elastic.py")
STEPS = 10


def lines_of(out: Path) -> list[dict[str, Any]]:
    path = out / "losses.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_fewer_hosts_go_on_with_the_same_batches(tmp_path: Path) -> None:
    needs_hosts()
    out, alone = tmp_path / "two", tmp_path / "one"
    with Hosts(2) as hosts:
        flags = ["--out", str(out), "--steps", str(STEPS), "--timeout", "8", "--pause", "0.5"]
        started = hosts.torchrun(2, EXAMPLE, *flags, nnodes="1:2", restarts=3)
        end = time.monotonic() + 200
        while len(lines_of(out)) < 3:
            assert started[0].poll() is None, started[0].communicate()[0]
            assert time.monotonic() < end, lines_of(out)
            time.sleep(0.05)
        hosts[1].die()
        text = started[0].communicate(timeout=200)[0]
        assert started[0].returncode == 0, text
    example = runpy.run_path(EXAMPLE)
    mc.shutdown()  # whatever a test before has left, of another time limit
    mc.launch(example["main"], ranks=1, args=(example["parse"](["--out", str(alone), "--steps", str(STEPS)]),))

    found, wanted = {line["step"]: line for line in lines_of(out)}, lines_of(alone)  # a step may have been done again
    assert [found[1]["ranks"], found[STEPS]["ranks"]] == [4, 2]
    assert [found[line["step"]]["rows"] for line in wanted] == [line["rows"] for line in wanted]
    assert [found[line["step"]]["loss"] for line in wanted] == pytest.approx(
        [line["loss"] for line in wanted], rel=1e-9
    )
