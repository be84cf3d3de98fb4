"""benchmarks/collectives.py: its arithmetic, its check of results, and short real runs of every kind. No times are judged."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc
from benchmarks import bandwidth, calls, collectives, plots
from benchmarks.bandwidth import Row
from benchmarks.calls import Problem
from benchmarks.common import print_table

ROOT = Path(__file__).parent.parent
QUICK = ["--quick", "-b", "1K", "-e", "4K", "-f", "4", "-n", "2"]


def row_of(collective: str, size: int, ours: float, theirs: float | None) -> Row:
    sides = [None if t is None else bandwidth.side_of(collective, size, t, 4, 0) for t in (ours, theirs)]
    assert sides[0] is not None
    return Row(collective, size, size // 4, "float32", "sum", -1, sides[0], sides[1])


# ---------------------------------------------------------------------------------------------------- factors and sizes


@pytest.mark.parametrize(
    ("names", "of_2", "of_4", "of_8"),
    [
        ("all_reduce pvary", 1, 1.5, 1.75),
        ("all_gather all_gather_invariant reduce_scatter all_to_all gather scatter", 0.5, 0.75, 0.875),
        ("broadcast reduce shift permute send", 1, 1, 1),
    ],
)
def test_factors_are_nccl_tests(names: str, of_2: float, of_4: float, of_8: float) -> None:
    for name in names.split():
        assert [bandwidth.FACTORS[name](n) for n in (2, 4, 8)] == [of_2, of_4, of_8]


def test_every_collective_has_a_factor_and_a_call_of_torch() -> None:
    assert set(calls.OURS) == set(calls.THEIRS) == set(bandwidth.FACTORS)


def test_bandwidths() -> None:
    assert bandwidth.bandwidths("all_reduce", 10**6, 1e-3, 4) == pytest.approx((1e9, 1.5e9))
    assert bandwidth.bandwidths("all_gather", 10**6, 1e-3, 4) == pytest.approx((1e9, 0.75e9))
    assert bandwidth.bandwidths("broadcast", 10**6, 1e-3, 4) == pytest.approx((1e9, 1e9))


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("1K", 1024), ("1k", 1024), ("1.5M", 3 * 2**19), ("2G", 2**31), (" 32M ", 2**25), ("1e3", 1000)],
)
def test_parse_size(text: str, size: int) -> None:
    assert bandwidth.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "4T", "1KB", "-1K", "0", "nan", "inf", "1e30G", "many"])
def test_parse_size_errors(text: str) -> None:
    with pytest.raises(ValueError, match="is no size: bytes, or a number and K, M or G"):
        bandwidth.parse_size(text)


def test_show_size() -> None:
    assert [bandwidth.show_size(size) for size in (8, 1024, 3 * 2**19, 2**31)] == ["8", "1K", "1.5M", "2G"]


def test_size_range() -> None:
    assert bandwidth.size_range(1024, 70_000, 4) == [1024, 4096, 16384, 65536]
    assert bandwidth.size_range(8, 8, 2) == [8]


@pytest.mark.parametrize(
    ("collective", "count", "size"),
    [("all_reduce", 250, 1000), ("all_gather", 83, 996), ("scatter", 83, 996), ("shift", 250, 1000)],
)
def test_size_is_that_of_all_shares(collective: str, count: int, size: int) -> None:
    assert bandwidth.count_of(collective, 1000, 4, 3) == count
    assert bandwidth.size_of(collective, count, 4, 3) == size


def test_a_share_has_one_element_at_least() -> None:
    assert bandwidth.count_of("all_gather", 4, 4, 8) == 1
    assert bandwidth.size_of("all_gather", 1, 4, 8) == 32


def test_columns_of_what_is_done() -> None:
    assert [bandwidth.redop_of(name, "max") for name in ("all_reduce", "shift", "pvary")] == ["max", "none", "sum"]
    assert [bandwidth.root_of(name) for name in ("broadcast", "scatter", "all_reduce")] == [0, 0, -1]


# ------------------------------------------------------------------------------------------------------------ the table


def test_cells_stand_under_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    row = row_of("all_reduce", 2_000_000, 1e-3, 4e-3)
    assert row.cells() == [
        "2000000", "500000", "float32", "sum", "-1",
        "1000.0", "2.000", "3.000", "0", "4000.0", "0.500", "0.750", "0", "0.25", "-", "-",
    ]  # fmt: skip
    head = [*bandwidth.HEAD, *bandwidth.SIDE, *bandwidth.SIDE, "x", "floor", "x"]
    assert len(head) == len(bandwidth.UNDER_HEAD) == len(row.cells())
    print_table("all_reduce", head, [bandwidth.UNDER_HEAD, row.cells()])
    title, names, units, cells = [line for line in capsys.readouterr().out.splitlines() if line]
    assert title == "all_reduce"
    for name, cell in [("count", "500000"), ("busbw", "3.000"), ("#wrong", "0")]:
        assert names.index(name) + len(name) == cells.index(f" {cell} ") + 1 + len(cell)
    assert units.split() == ["B", "elements", "µs", "GB/s", "GB/s", "µs", "GB/s", "GB/s", "µs"]


def test_nothing_beside() -> None:
    row = row_of("shift", 4096, 1e-3, None)
    assert row.ratio is None
    assert row.cells()[-7:] == ["-"] * 7
    assert row.fields() == {
        "collective": "shift", "size": 4096, "count": 1024, "type": "float32", "redop": "sum", "root": -1,
        "meshcomm": {"time_us": 1000.0, "algbw_gb_s": 0.004096, "busbw_gb_s": 0.004096, "wrong": 0},
        "torch": None, "ratio": None, "floor_us": None,
    }  # fmt: skip


def test_budgets() -> None:
    rows = [
        row_of("all_gather", 1000, 9.0, 1.0),  # too small to count
        row_of("all_gather", 2**20, 0.2, 1.0),
        row_of("all_gather", 2**22, 0.8, 1.0),
        row_of("shift", 2**20, 1.0, 1.0),
        row_of("reduce", 2**20, 1.0, None),
    ]
    budgets = collectives.budgets_of(rows, "gloo", 4)
    assert [(b.what, b.limit, b.verdict) for b in budgets] == [
        ("all_gather, geometric mean from 1 MB", 0.5, "holds"),
        ("all_gather, worst, at 4M", 0.5, "over"),
        ("shift, geometric mean from 1 MB", 1.05, "holds"),
        ("shift, worst, at 1M", 1.05, "holds"),
        ("over torch's own call, all sizes, worst of 4: all_gather of 1e+03", 1.05, "over"),
    ]
    assert [b.measured for b in budgets] == pytest.approx([0.4, 0.8, 1.0, 1.0, 9.0])
    verdicts = ["over torch", "holds", "over torch", "holds", "holds"]
    assert [bandwidth.verdict(row, 4) for row in rows] == verdicts
    assert collectives.budgets_of(rows, "nccl", 4) == []
    near = [replace(rows[1], floor=0.04), replace(rows[2], floor=0.5), replace(rows[0], size=64, floor=3.0)]
    assert [(b.what, b.measured, b.limit) for b in collectives.budgets_of(near, "gloo", 2)[-2:]] == [
        ("over the same in private memory, 64 to 64", pytest.approx(3.0), 8.0),
        ("over the same in private memory, 1M to 64M, worst of 2: all_gather of 1M", pytest.approx(5.0), 2.0),
    ]
    assert [bandwidth.verdict(row, 2) for row in near] == ["over 2 floors", "over torch", "over torch"]
    assert bandwidth.verdict(near[0], 4) == "holds"  # the floor's budget is for two
    assert bandwidth.verdict(replace(near[2], floor=1.0), 2) == "over torch, 8 floors"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file, None):
        progress = collectives.Progress(4, stream, width=8)
        for what in ("shift", "shift", "reduce", "reduce"):
            progress.step(what, "1K")
        progress.clear()
    shown = terminal.getvalue().split("\r\033[K")
    assert [text.split()[:2] for text in shown[1:5]] == [
        ["[........]", "0/4"], ["[##......]", "1/4"], ["[####....]", "2/4"], ["[######..]", "3/4"],
    ]  # fmt: skip
    assert shown[4].endswith("reduce 1K")
    assert shown[5] == ""
    assert file.getvalue() == "shift (0/4)\nreduce (2/4)\n"


# ------------------------------------------------------------------------------------------------------ the check column


def test_count_wrong() -> None:
    wanted = torch.arange(6.0)
    assert calls.count_wrong(wanted.clone(), wanted) == 0
    wrong = wanted.clone()
    wrong[2], wrong[4] = 7.0, float("nan")
    assert calls.count_wrong(wrong, wanted) == 2
    for other in (None, wanted[:5], wanted.double()):
        assert calls.count_wrong(other, wanted) == 6
    assert calls.count_wrong(None, None) == 0
    assert calls.count_wrong(wanted, None) == 6


@pytest.mark.parametrize(
    ("dtype", "op"),
    [(d, op) for d, op in itertools.product(calls.EXACT, calls.REDUCE_OPS) if op != "mean" or d.is_floating_point],
)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_reductions_are_exact_in_the_dtype(dtype: torch.dtype, op: str, ranks: int) -> None:
    tiles = [calls.tile_of(rank, ranks, dtype, op) for rank in range(ranks)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(tiles[: calls.TWOS], 2))
    known = calls.reduced_tile(tiles, op)
    running = tiles[0].to(dtype)
    for tile in tiles[1:]:
        y = tile.to(dtype)
        running = {"max": torch.maximum, "min": torch.minimum, "product": torch.mul}.get(op, torch.add)(running, y)
    assert torch.equal((running / ranks if op == "mean" else running).long(), known)


def test_too_many_ranks_to_be_exact() -> None:
    with pytest.raises(
        ValueError, match=r"a sum over 300 ranks is not exact in torch.bfloat16: choose another --dtype"
    ):
        calls.tile_of(0, 300, torch.bfloat16, "sum")


def problem(collective: str, rank: int, op: str = "none") -> Problem:
    return Problem(collective, 5, op, torch.float32, rank, 3, torch.device("cpu"), mc.make_mesh({"ranks": 3}))


def test_what_must_come_out() -> None:
    """Against plain lists of shares."""
    whole = [calls.given(problem("all_to_all", rank)).split(5) for rank in range(3)]
    one = [calls.given(problem("shift", rank)) for rank in range(3)]
    assert all(torch.equal(one[rank], whole[rank][0]) for rank in range(3))
    for rank in range(3):
        wanted: dict[str, Tensor | None] = {
            "all_to_all": torch.cat([whole[source][rank] for source in range(3)]),
            "all_gather": torch.cat(one),
            "scatter": whole[0][rank],
            "broadcast": one[0],
            "shift": one[rank - 1],
            "permute": one[2 - rank],
            "send": one[0] if rank == 1 else None,
            "gather": torch.cat(one) if rank == 0 else None,
        }
        for name, value in wanted.items():
            torch.testing.assert_close(calls.expected(problem(name, rank)), value, rtol=0, atol=0)
        summed = torch.stack([torch.cat(calls.given(problem("reduce_scatter", r, "sum")).split(5)) for r in range(3)])
        shares = summed.sum(0).split(5)
        torch.testing.assert_close(calls.expected(problem("reduce_scatter", rank, "sum")), shares[rank])
        torch.testing.assert_close(calls.expected(problem("all_reduce", rank, "sum")), shares[0])


@pytest.mark.parametrize(
    "collective", sorted({*calls.OURS} - {"all_reduce", "pvary", "shift", "permute", "send", "scatter"})
)
def test_the_floor_computes_the_result(collective: str) -> None:
    """But for what another rank sums, or sends: there it copies as many bytes."""
    op = "sum" if collective in bandwidth.REDUCING | {"pvary"} else "none"
    for rank in range(3):
        p = problem(collective, rank, op)
        xs = [calls.given(replace(p, rank=other)) for other in range(3)]
        wanted = calls.expected(p)
        for out in (None, None if wanted is None else torch.empty_like(wanted)):
            assert calls.count_wrong(calls.copied(p, xs, out), wanted) == 0


def test_values_repeat_beyond_their_period() -> None:
    long = replace(problem("shift", 1), count=2 * calls.PERIOD + 3)
    tile = long.tile(1).float()
    assert torch.equal(long.stretched(tile, start=7), torch.cat([tile, tile, tile, tile])[7 : long.count + 7])


def test_a_wrong_result_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(p: Problem, x: Tensor) -> Tensor:
        y = mc.all_reduce(x, calls.AXIS, mesh=p.mesh)
        y[:3] += p.rank  # wrong on every rank but the first
        return y

    monkeypatch.setitem(calls.OURS, "all_reduce", off_by_one)
    monkeypatch.setitem(calls.OURS, "reduce", lambda p, x: calls.expected(replace(p, rank=0)))
    results = in_process(tmp_path, "--ranks", "3", "--ops", "all_reduce,reduce,shift", "-e", "1K")
    wrong = {row["collective"]: row["meshcomm"]["wrong"] for row in results["runs"][0]["rows"]}
    assert wrong == {"all_reduce": 6, "reduce": 2 * 256, "shift": 0}


# -------------------------------------------------------------------------------------------------------------- options


def test_quick_and_given_options() -> None:
    options = collectives.parsed(["--quick", "-n", "7", "-d", "bfloat16", "--ops", "shift, reduce"])
    assert (options.min_bytes, options.max_bytes, options.factor) == (1024, 2**20, 32)
    assert (options.repeats, options.warmup, options.dtype) == (7, 1, torch.bfloat16)
    assert (options.ops, options.runtime, options.ranks) == (["shift", "reduce"], ["in-process", "processes"], 4)
    assert (options.sizes, options.worlds) == ([1024, 2**15, 2**20], [("in-process", 4), ("processes", 4)])
    options = collectives.parsed(["-d", "int32"])
    assert options.worlds == [("in-process", 4), ("processes", 2), ("processes", 4)]
    assert (options.sizes[0], options.sizes[-1], 2**20 in options.sizes) == (64, 2**26, True)
    assert collectives.parsed(["-b", "1M", "-e", "4M", "--ranks", "2"]).sizes == [2**20, 2**22]
    assert (options.max_bytes, options.factor, options.repeats, options.warmup) == (2**25, 4, 20, 5)
    assert set(calls.OURS) - set(options.ops) == {"pvary"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "shift,swap"], "swap is none of all_reduce, "),
        (["--runtime", "threads"], "threads is none of in-process, processes"),
        (["-b", "1T"], "'1T' is no size"),
        (["-b", "2M", "-e", "1M"], "--max-bytes is no less than --min-bytes"),
        (["-f", "1"], "--factor is at least 2"),
        (["-n", "0"], "--repeats 1"),
        (["--in-a-row", "0"], "--in-a-row is at least 1"),
        (["--ranks", "1"], "at least 2 ranks, not 1"),
        (["-d", "int8", "-o", "mean"], "no mean of torch.int8"),
        (["-d", "int8", "--ops", "pvary"], "no pvary of torch.int8"),
    ],
)
def test_options_that_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        collectives.parsed(arguments)
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    with pytest.raises(SystemExit):
        collectives.parsed(["--plot", "out.png"])
    assert "pip install 'meshcomm[plots]'" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match="pip install 'meshcomm"):
        plots.save("out.png", [])


# ------------------------------------------------------------------------------------------------------------ real runs


def run_here(tmp_path: Path, runtime: str, *arguments: str) -> dict[str, Any]:
    """What a run that this process starts writes."""
    file = tmp_path / "results.json"
    collectives.main([*QUICK, "--runtime", runtime, "--json", str(file), *arguments])
    return dict(json.loads(file.read_text()))


def in_process(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    return run_here(tmp_path, "in-process", *arguments)


def command(tmp_path: Path, launcher: list[str], *arguments: str) -> tuple[str, dict[str, Any]]:
    """What the program prints and writes when it is started as a user starts it."""
    file = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "benchmarks.collectives", *QUICK, "--json", str(file), *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text())


def check_run(run: dict[str, Any], ranks: int, beside: bool) -> None:
    """A row per collective and size, all results right, and an all_reduce that equals its halves."""
    assert run["ranks"] == ranks
    assert [(row["collective"], row["size"]) for row in run["rows"]] == [
        (name, bandwidth.size_of(name, bandwidth.count_of(name, size, 4, ranks), 4, ranks))
        for name, size in itertools.product(calls.OURS, (1024, 4096))
    ]
    for row in run["rows"]:
        sides = [row["meshcomm"], row["torch"]] if beside else [row["meshcomm"]]
        assert beside or row["torch"] is row["ratio"] is None
        for side in sides:
            assert side["wrong"] == 0, row
            assert side["time_us"] > 0
            assert side["algbw_gb_s"] == pytest.approx(row["size"] / side["time_us"] / 1e3)
            factor = bandwidth.FACTORS[row["collective"]](ranks)
            assert side["busbw_gb_s"] == pytest.approx(side["algbw_gb_s"] * factor)
    assert len(run["all_reduce_in_two"]) == 2
    for half in run["all_reduce_in_two"]:
        assert half["differ"] == 0
        assert half["bytes_all_reduce"] == half["bytes_reduce_scatter"] + half["bytes_all_gather"]


def test_in_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = in_process(tmp_path, "--ranks", "3")
    (run,) = results["runs"]
    check_run(run, 3, beside=False)
    assert (run["runtime"], run["backend"], run["budgets"]) == ("in-process", "in-process", [])
    assert results["machine"]["torch"] == torch.__version__
    assert (results["repeats"], results["warmup"], results["op"]) == (2, 1, "sum")
    out, err = capsys.readouterr()
    assert "all_reduce: in-process, 3 ranks; torch.distributed: cannot have its ranks in one process" in out
    assert "wrong elements: 0" in out
    assert "in-process: all_reduce (0/" in err


@pytest.mark.parametrize(("op", "dtype"), [("mean", "bfloat16"), ("product", "int32"), ("min", "float16")])
def test_other_ops_and_dtypes(op: str, dtype: str, tmp_path: Path) -> None:
    results = in_process(tmp_path, "-o", op, "-d", dtype, "--ops", "all_reduce,reduce_scatter,reduce", "-e", "1K")
    rows = results["runs"][0]["rows"]
    assert [(row["redop"], row["type"], row["meshcomm"]["wrong"]) for row in rows] == [(op, dtype, 0)] * 3


@pytest.mark.thorough
def test_processes_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_here(tmp_path, "processes", "--ranks", "2", "--backend", "gloo")
    (run,) = results["runs"]
    out = capsys.readouterr().out
    check_run(run, 2, beside=True)
    assert (run["runtime"], run["backend"], run["device"]) == ("processes", "gloo", "cpu")
    assert "wrong elements: 0" in out


def cores() -> tuple[set[int], set[int], set[int]]:
    before, ranks = os.sched_getaffinity(0), collectives.Ranks("processes")
    with ranks.each_on_its_cores():
        within = os.sched_getaffinity(0)
    return before, within, os.sched_getaffinity(0)


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs a core for each rank")
def test_each_rank_has_cores_of_its_own_for_a_while() -> None:
    first, second = mc.launch(cores, 2, runtime="processes", backend="gloo")
    assert len(first[1]) == len(second[1]) > 0
    assert not first[1] & second[1]
    assert first[0] == first[2] == second[0] == second[2]


@pytest.mark.thorough
def test_torchrun(tmp_path: Path) -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    out, results = command(tmp_path, torchrun, "--backend", "gloo")
    (run,) = results["runs"]
    check_run(run, 2, beside=True)
    assert out.count("all_reduce: gloo, 2 ranks; torch.distributed: clone + all_reduce") == 1  # one rank speaks
    assert out.count("wrong elements: 0") == 1


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    rows = [row_of(name, 4**k, 1e-3 * k, 2e-3).fields() for name in ("shift", "reduce") for k in range(6, 10)]
    inside = [row_of("shift", 4**k, 1e-3, None).fields() for k in range(6, 10)]
    runs = [{"backend": "gloo", "ranks": 4, "rows": rows}, {"backend": "in-process", "ranks": 4, "rows": inside}]
    plots.save(str(tmp_path / "out.png"), runs)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
