"""Which mesh and which option: each row and each trial is what a dry run of the program that is written so says."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshcomm as mc
from meshcomm import parallel

H100 = mc.hardware("h100")
Program = Callable[..., Iterator[None]]
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "plan_a_cluster.py"
WIDE = 512


def sharded(layers: int = 4, rows: int = 2048, **options: Any) -> Iterator[None]:
    model = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(layers)))
    parallel.fully_shard(model, "fsdp", grads="mean", **{"units": ["*"], **options})
    for _ in range(2):
        yield
        model(torch.randn(rows, WIDE)).square().mean().backward()
    yield


def staged(microbatches: int = 2) -> Iterator[None]:
    """Stages of unlike size: the last one has most."""
    wide = 64 * (1 + mc.axis_index("pp"))
    stage = nn.Sequential(nn.Linear(64, wide), nn.Linear(wide, 64))
    parallel.data_parallel(stage, "dp", grads="mean")
    step = parallel.pipelined(stage, "pp", loss=F.mse_loss, microbatches=microbatches, grads="mean")
    x = torch.randn(64, 64)
    for _ in range(2):
        yield
        step(x, x)
    yield


def foretold(fn: Any, mesh: dict[str, int], machine: mc.Hardware = H100, **more: Any) -> tuple[float, int]:
    run = mc.dry_run(fn, mesh, hardware=machine, **more)
    return run.seconds, run.peak_bytes


# ------------------------------------------------------------------------------------------------------------- sweep


def test_rows_are_dry_runs_in_order_of_what_they_do() -> None:
    """The mesh with more ranks takes longer for a step and has more tokens per second."""
    meshes = [{"fsdp": 8}, {"fsdp": 64}, {"dp": 8}, {"fsdp": 12}]
    found = mc.sweep(sharded, meshes, H100, tokens=lambda mesh: 2048 * mesh.get("fsdp", 1))
    assert [dict(row.mesh) for row in found] == [{"fsdp": 64}, {"fsdp": 8}]
    for row in found:
        assert (row.seconds, row.peak_bytes) == foretold(sharded, dict(row.mesh))
        assert row.tokens_per_second == pytest.approx(2048 * row.mesh["fsdp"] / row.seconds)
        assert row.exposed["fsdp"] == mc.dry_run(sharded, row.mesh, hardware=H100).exposed("fsdp")
    assert [re.search("no axis 'fsdp'|do not fill nodes", row.reason) is not None for row in found.refused] == [
        True
    ] * 2
    assert found.best is found.rows[0]
    alone = mc.sweep(sharded, meshes[:2], H100)
    assert [row.mesh["fsdp"] for row in alone] == [8, 64]
    assert "8 times as much" in alone.notes[0]


def test_what_is_too_large_comes_last_and_machines_are_told_apart() -> None:
    small = dataclasses.replace(H100, name="small", memory=float(foretold(sharded, {"fsdp": 8})[1] - 1))
    found = mc.sweep(sharded, [{"fsdp": 8}], [small, H100])
    assert [(row.hardware.name, row.fits) for row in found] == [("h100", True), ("small", False)]
    with pytest.raises(mc.MeshError, match="no mesh fits: the least is"):
        assert mc.sweep(sharded, [{"fsdp": 8}], small).best
    with pytest.raises(mc.MeshError, match="no mesh runs"):
        assert mc.sweep(sharded, [{"dp": 8}], small).best


@pytest.mark.thorough
def test_the_stage_with_most_counts() -> None:
    row = mc.sweep(staged, [{"pp": 3, "dp": 2}], H100).best
    assert row.ranks == (0, 2, 4)
    assert (row.seconds, row.peak_bytes) == foretold(staged, {"pp": 3, "dp": 2}, ranks=(0, 2, 4))
    assert row.peak_bytes > foretold(staged, {"pp": 3, "dp": 2})[1]


def test_a_line_through_few_layers_is_what_all_take() -> None:
    row = mc.sweep(sharded, [{"fsdp": 64}], H100, layers=(4, 6, 16)).best
    seconds, peak = foretold(lambda: sharded(16), {"fsdp": 64})
    assert row.seconds == pytest.approx(seconds, rel=1e-2)
    assert row.peak_bytes == pytest.approx(peak, rel=1e-2)


def test_files(tmp_path: Path) -> None:
    found = mc.sweep(sharded, [{"fsdp": 8}, {"dp": 8}], H100, tokens=2048)
    advice = mc.dry_run(sharded, {"fsdp": 8}, hardware=H100).advice(kinds=["machine"])
    for name, each in (("meshes", found), ("changes", advice)):
        for end in ("csv", "json", "svg", "txt"):
            each.save(tmp_path / f"{name}.{end}")
    with (tmp_path / "meshes.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["mesh"], float(first["seconds"]), first["fits"]) == ("fsdp 8", found.best.seconds, "True")
    assert "no axis" in second["reason"]
    rows = json.loads((tmp_path / "changes.json").read_text())
    assert rows[0]["change"] == "as it is"
    assert len(rows) == len(advice.trials) + 1
    assert "<svg" in (tmp_path / "meshes.svg").read_text()
    assert "fsdp 8" in (tmp_path / "meshes.txt").read_text()


# ------------------------------------------------------------------------------------------------------------ advice


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("fully_shard(regather=False)", {"regather": False}),
    ("fully_shard(prefetch=0)", {"prefetch": 0}),
    ("fully_shard(param_dtype=bfloat16)", {"param_dtype": torch.bfloat16}),
    ("fully_shard(reduce_dtype=bfloat16)", {"reduce_dtype": torch.bfloat16}),
]


@pytest.mark.thorough
def test_a_trial_is_the_program_with_that_option() -> None:
    run = mc.dry_run(sharded, {"fsdp": 64}, hardware=H100)
    advice = run.advice({"half the rows": {"rows": 1024}, "eight": {"layers": 8}})
    tried = {each.name: each for each in advice.trials}
    for name, options in OPTIONS:
        after = tried[name].after
        assert after is not None
        assert (after.seconds, after.peak_bytes) == foretold(lambda o=options: sharded(**o), {"fsdp": 64})
    assert tried["half the rows"].seconds == foretold(lambda: sharded(rows=1024), {"fsdp": 64})[0]
    assert "computes 0.5 times as much" in tried["half the rows"].told
    assert tried["fully_shard(units=) of each layer"].seconds == run.seconds  # they are already
    pairs = tried["fully_shard(units=) of two each"].after
    assert pairs is not None
    assert pairs.seconds != run.seconds
    twice = dataclasses.replace(H100, memory_bandwidth=2 * H100.memory_bandwidth)
    assert tried["memory of twice the bandwidth"].seconds == run.on(twice).seconds
    assert advice.best is not None
    assert advice.best.kind == "program"
    assert advice.best.seconds == min(each.seconds for each in advice.trials if each.kind == "program")
    assert tried["calls over fsdp that take no time"].seconds < run.seconds
    assert f"most helps {advice.best.name}" in str(advice)


@pytest.mark.thorough
def test_other_meshes_are_compared_by_what_they_do() -> None:
    """The pipeline gets fewer stages and more copies; one that the program cannot take is listed."""

    def whole(microbatches: int = 2) -> Iterator[None]:
        if mc.axis_size("pp") > 2:
            raise ValueError("two stages at most")
        return staged(microbatches)

    run = mc.dry_run(whole, {"pp": 2, "dp": 2}, hardware=H100)
    given = {"of four": {"microbatches": 4}}
    advice = run.advice(given, tokens=lambda mesh: 64 * mesh["dp"], kinds=["program", "mesh"])
    tried = {each.name: each for each in advice.trials}
    other = tried["a mesh of {'pp': 1, 'dp': 4}"]
    assert other.seconds == pytest.approx(foretold(staged, {"pp": 1, "dp": 4})[0] / 2)
    four = foretold(lambda: staged(4), {"pp": 2, "dp": 2})[0]
    assert tried["of four"].seconds == tried["pipelined(microbatches=4)"].seconds == four
    assert [each.told for each in advice.refused] == ["ValueError: two stages at most"]


def test_what_cannot_be_repeated_is_refused() -> None:
    batches = iter([torch.Size((2048, WIDE)), torch.Size((4096, WIDE))])

    def main() -> Any:
        return sharded(rows=next(batches)[0])

    run = mc.dry_run(main, {"fsdp": 8}, hardware=H100)
    with pytest.raises(mc.MeshError, match="does something else when it runs again"):
        run.advice()
    with pytest.raises(mc.MeshError, match="nothing is known of times"):
        mc.dry_run(sharded, {"fsdp": 8}).advice()


@pytest.mark.thorough
def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An 8-B model on 2 GPUs: without tensor parallelism more tokens, with it all in memory; a picture."""
    out = tmp_path / "meshes.svg"
    monkeypatch.setattr(
        sys, "argv", ["plan_a_cluster.py", "--gpus", "2", "--on", "b200", "--few", "1", "--out", str(out)]
    )
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    rows = re.findall(r"^rep 1, fsdp (\d), tp (\d) +[\d.]+ +(\d+) +([\d.]+) +(yes|no)", said, re.MULTILINE)
    assert sorted((fsdp, tp) for fsdp, tp, *_ in rows) == [("1", "2"), ("2", "1")]
    assert rows[0][:2] == ("2", "1")
    assert "not possible" not in said
    assert "most helps fully_shard" in said
    assert out.read_text().startswith("<svg")
