"""Benchmarks of steps, the checker, calls and the guard: what they count is right, and short runs of them. No times are judged."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm as mc
from benchmarks import all as all_of_them
from benchmarks import bare_fsdp, checker, common, growth, overhead, peers, train_step
from benchmarks import guard as guard_costs
from benchmarks import overlap as overlap_costs
from benchmarks.common import Budget, as_json
from benchmarks.tracked import Tracked
from meshcomm.runtime.process import lending

TORCHS = train_step.TORCHS


def test_memory_is_that_of_storages() -> None:
    kilo = 256 * 4  # bytes of 256 floats
    with Tracked() as seen:
        x = torch.zeros(256)
        y = x.view(16, 16)  # no storage of its own
        assert seen.now == seen.peak == kilo
        z = y + 1
        assert seen.now == 2 * kilo
        del x, y
        assert seen.now == kilo
        z.untyped_storage().resize_(0)  # emptied, as fully_shard does
        assert (seen.now, seen.peak) == (0, 2 * kilo)
        seen.restart()
        assert seen.peak == 0
        w = torch.zeros(512, requires_grad=True)
        (w * 2).sum().backward()
        assert w.grad is not None
        assert seen.now == 4 * kilo
        assert 4 * kilo < seen.peak < 5 * kilo  # w * 2 is gone when the gradient comes


def test_shared_memory_counts_at_its_lender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "room", lending.Room())
    with Tracked() as seen:
        lent = lending.room.lend(2**20, (), (), patient=False)
        assert lent.size >= 2**20
        assert seen.now < 2**14  # no page of it was written
        lent.part(2**20, torch.uint8).fill_(1)
        assert 2**20 <= seen.now < 2**20 + 2**14
        torch.frombuffer(bytearray(2**20), dtype=torch.uint8)[1:].view(torch.uint8)  # as what another lends
        assert seen.now < 2**20 + 2**14
    os.close(lent.fd)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a short run of all parts."""
    path, said = tmp_path_factory.mktemp("steps") / "out.json", io.StringIO()
    assert not dist.is_initialized()
    with contextlib.redirect_stdout(said):
        train_step.main(["--quick", "--json", str(path), "--ranks", "2", "--repeats", "1"])
    assert not dist.is_initialized()
    assert "Budgets, of medians" in said.getvalue()
    return json.loads(path.read_text())


def bare_gradients() -> None:
    """Of one process as of another, and as without any."""
    mc.make_mesh({"ranks": -1})

    def made() -> train_step.Stack:
        torch.manual_seed(0)
        return train_step.Stack(train_step.Size(2, 8, 3, 2))

    x, model, alone = torch.ones(2, 3, 8), made(), made()
    units = bare_fsdp.sharded(model, list(model.blocks))
    with bare_fsdp.saved_by_place():
        loss = model(x).square().mean()
    loss.backward()
    alone(x).square().mean().backward()
    for unit, part in zip(units, [*alone.blocks, alone.first], strict=True):
        whole = torch.cat([*(p.grad.reshape(-1) for p in part.parameters()), unit.zeros])
        own = torch.cat([p.grad for p in unit.params])
        torch.testing.assert_close(own, whole.chunk(dist.get_world_size())[dist.get_rank()])


def test_the_bare_step_is_one_of_a_sharded_model(pool4: Any) -> None:
    pool4.run(bare_gradients)


@pytest.mark.thorough
def test_a_step_on_the_fake_backend(results: Any) -> None:
    found = results["fake"]
    layers = 4
    ours, theirs, alone = (found[train_step.FSDP][who] for who in ("meshcomm", TORCHS[train_step.FSDP], "one rank"))
    # Each block is gathered forwards and backwards, what is around them once; each has its gradients scattered.
    calls = {"allgather": 2 * layers + 1, "reduce_scatter": layers + 1}
    assert theirs["collectives"] == calls
    assert (
        ours["collectives"] == calls
    )  # which parameters have gradients is told by numbers of the host, which no mode sees
    assert alone["collectives"] == {}
    assert ours["peak"] <= theirs["peak"]
    assert ours["peak"] < alone["peak"]
    assert ours["at_rest"] < alone["at_rest"] / 4
    ours, theirs, alone = (found[train_step.TP][who] for who in ("meshcomm", TORCHS[train_step.TP], "one rank"))
    assert ours["collectives"] == {"allreduce": 2 * layers - 1}  # the first input needs no gradient
    assert theirs["collectives"] == {"all_reduce": 2 * layers - 1}
    assert ours["at_rest"] < alone["at_rest"] / 4
    assert theirs["at_rest"] < alone["at_rest"] / 4  # DTensors say the bytes of whole tensors, but have their part


@pytest.mark.thorough
def test_a_step_on_processes(results: Any) -> None:
    assert {kind: set(each) for kind, each in results["gloo"]["2"].items()} == {
        kind: {"one rank", "meshcomm", name} | ({train_step.MOVED} if kind != train_step.TP else set())
        for kind, name in TORCHS.items()
    }
    assert all(took > 0 for each in results["gloo"]["2"].values() for took in each.values())
    assert {budget["verdict"] for budget in results["budgets"]} <= {"holds", "over"}


@pytest.mark.thorough
def test_the_checkers_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert not dist.is_initialized()
    checker.main(["--quick", "--json", str(path)])
    results = json.loads(path.read_text())
    assert set(results["operations"]) == set(checker.OPERATIONS)
    (step,) = results["steps"].values()
    assert set(step) == {"False", "error", "True"}
    assert "check_vma=True" in capsys.readouterr().out


def test_the_checked_step_is_the_plain_one() -> None:
    """The three programs that are compared compute the same."""
    found = []
    for mode in checker.MODES:
        torch.manual_seed(0)
        with checker.mc.use_mesh(checker.mc.make_mesh(checker.AXES)):
            found.append(checker.step_with(mode, 16, 4)())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.thorough
def test_what_a_call_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts, with results of one kind on each line; every budget of the design has its line. Samples are short, and
    ranks few.
    """
    monkeypatch.setattr(common, "SAMPLE", 1e-4)
    monkeypatch.setattr(overhead, "MANY", (16,))
    path = tmp_path / "out.json"
    overhead.main(["--repeats", "1", "--quick", "--markdown", "--json", str(path)])
    assert not dist.is_initialized()
    results = json.loads(path.read_text())
    assert set(overhead.SECTIONS) < set(results)
    for what in ("collectives", "later"):
        for forms in results[what].values():
            assert {str(form) for form in overhead.PLAIN} <= set(forms)
            assert all(times["ours"]["no grad"] > 0 and times["direct"]["no grad"] > 0 for times in forms.values())
    judged = " ".join(budget["what"] for budget in results["budgets"])
    for line in (
        "all_reduce over",
        "requires grad",
        *overhead.LIMITS,
        "async_op=True",
        "tree of",
        "in-process",
        "import",
    ):
        assert line in judged
    assert "| **`mc.all_reduce" in capsys.readouterr().out


def test_exponents() -> None:
    for power in (0, 1, 2):
        times = {n: 1e-6 * n**power for n in (100, 200, 400, 800)}
        assert growth.exponent(times) == pytest.approx(power, abs=1e-6)
    assert all(len(sizes) >= 4 for curve in growth.CURVES for sizes in (curve.sizes, curve.few))
    assert len({(curve.group, curve.what) for curve in growth.CURVES}) == len(growth.CURVES)


@pytest.mark.thorough
@pytest.mark.parametrize("curve", growth.CURVES, ids=lambda curve: f"{curve.group}: {curve.what}")
def test_every_curve_can_be_measured(curve: growth.Curve) -> None:
    assert not dist.is_initialized()
    small = curve._replace(few=curve.few[:1])
    ((size, took),) = growth.measure_curve(small, quick=True).items()
    assert size == curve.few[0]
    assert took > 0
    assert not dist.is_initialized()


def test_the_rest_of_growth(capsys: pytest.CaptureFixture[str]) -> None:
    """Plans between random layouts are made, and a curve that is one is told so."""
    slowest, *rest = growth.measure_plans(3)
    assert slowest[0] >= max(each[0] for each in rest) > 0
    growth.print_curves({"ranks: all": {"times": {1: 1.0, 2: 4.0}, "exponent": 2.0, "limit": 1.25}})
    assert "over" in capsys.readouterr().out


def test_peers_compute_what_we_do() -> None:
    """Dims are joined and cut as ours are."""
    x = torch.arange(24.0).view(2, 3, 4)
    for dim in range(3):
        whole = torch.stack([x, x + 1])
        torch.testing.assert_close(peers.joined(whole, dim), torch.cat([x, x + 1], dim))
        parts = peers.parted(torch.cat([x, x + 1], dim), dim, 2)
        torch.testing.assert_close(parts.view(2, *x.shape), whole)
        torch.testing.assert_close(peers.shard(torch.cat([x, x + 1], dim), dim, 2), x)


@pytest.mark.thorough
def test_the_guards_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks and one call are enough; each way that is compared is the one that it says."""
    monkeypatch.setattr(guard_costs, "RANKS", 2)
    monkeypatch.setattr(guard_costs, "OURS", {"all_reduce": guard_costs.OURS["all_reduce"]})
    path = tmp_path / "out.json"
    guard_costs.main(["--quick", "--json", str(path)])
    (times,) = json.loads(path.read_text())["calls"].values()
    assert set(times) == set(guard_costs.HOW)
    assert all(each > 0 for each in times.values())
    assert "memory adds" in capsys.readouterr().out
    assert "MESHCOMM_GUARD" not in os.environ


@pytest.mark.thorough
def test_one_run_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables and budgets of the programs that ran stand at the end."""
    path = tmp_path / "out.json"
    assert all_of_them.main(["--quick", "--json", str(path), "--only", "functions"]) == 0
    assert set(json.loads(path.read_text())["programs"]) == {"functions"}
    said = capsys.readouterr().out
    assert "mc.rng over torch's" in said
    assert said.endswith("hold\n")


@pytest.mark.thorough
def test_what_communicating_later_buys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    overlap_costs.main(["--quick", "--repeats", "2", "--json", str(path)])
    (budget,) = json.loads(path.read_text())["budgets"]
    assert budget["measured"] > 0
    assert "sum starts" in capsys.readouterr().out


def test_what_one_run_of_all_collects() -> None:
    lines = ["words", "", "| a | b |", "|---|---|", "| 1 | 2 |", "", "more", "| c |", "over"]
    assert all_of_them.tables_in(lines) == ["| a | b |", "|---|---|", "| 1 | 2 |", "", "| c |", ""]
    budgets = [Budget("one", 1.0, 2.0, "x"), Budget("two", None, 2.0, "x"), Budget("three", 3.0, 2.0, "x")]
    found = {"runs": [{"budgets": as_json(budgets[:1])}], "budgets": as_json(budgets[1:])}
    assert list(all_of_them.budgets_in(found)) == budgets
    assert [budget.verdict for budget in budgets] == ["holds", "not measured", "over"]
    assert [Budget("four", 3.0, 2.0, "ms", pace).verdict for pace in (1.4, 1.6)] == ["over", "holds at this pace"]
