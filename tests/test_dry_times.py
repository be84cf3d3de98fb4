"""How long a dry run says that a program takes: held against sums by hand, on a machine of round numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import meshcomm as mc
from meshcomm import parallel
from meshcomm.dry import measure
from meshcomm.tools.hardware import main

ROUND = mc.hardware(
    "h100", flops={"float32": 1e12}, memory_bandwidth=1e15, within=(0.0, 1e9), between=(0.0, 1e8), ranks_per_node=4,
    launch=0.0, call=0.0, product_efficiency=1.0, attention_efficiency=1.0, memory_efficiency=1.0, units=0,
)  # fmt: skip
"""Products of 1e12 a second, links of 1e9 and 1e8 bytes a second; all else takes no time to speak of."""
FAST = dataclasses.replace(ROUND, within=mc.hardware("h100", within=(0.0, 1e12)).within)
"""Links that take no time to speak of."""
PRODUCT = 2 * 1000**3 / 1e12
WIRE = 2 * 3 / 4 * 4e6 / 1e9
"""Seconds of x @ x, and of all_reduce(x) within a node of four, where x is 1000 x 1000."""


def seconds(fn: Any, mesh: dict[str, int], **more: Any) -> float:
    return mc.dry_run(fn, mesh, hardware=ROUND, **more).seconds


def x() -> torch.Tensor:
    return torch.empty(1000, 1000)


def test_calls_wait_or_run_beside_products() -> None:
    def waits() -> None:
        mc.all_reduce(x(), "dp")
        x() @ x()

    def beside(count: int) -> None:
        work = mc.all_reduce(x(), "dp", async_op=True)
        for _ in range(count):
            x() @ x()
        work.wait()

    assert seconds(waits, {"dp": 4}) == pytest.approx(PRODUCT + WIRE, rel=1e-3)
    assert seconds(lambda: beside(4), {"dp": 4}) == pytest.approx(4 * PRODUCT, rel=1e-3)
    run = mc.dry_run(lambda: beside(1), {"dp": 4}, hardware=ROUND)
    assert run.seconds == pytest.approx(WIRE, rel=1e-3)
    assert run.exposed("dp") == pytest.approx(WIRE - PRODUCT, rel=1e-2)
    assert run.flops == {torch.float32: 2 * 1000**3}
    assert "waits for dp" in run.table()


@pytest.mark.parametrize(
    ("mesh", "share"), [({"a": 2, "b": 2}, 2.0), ({"a": 2, "b": 4}, 1.0)], ids=["one link", "two links"]
)
def test_axes_share_a_link(mesh: dict[str, int], share: float) -> None:
    """Two at once take twice as long where both lie within a node, and not where one goes to other nodes."""

    def main() -> None:
        works = [mc.all_reduce(x(), axis, async_op=True) for axis in mesh]
        for work in works:
            work.wait()

    inner = (mesh["b"] - 1) / mesh["b"] * 2 * 4e6 / 1e9
    outer = 4e6 / (1e9 if mesh["b"] == 2 else 1e8)
    assert seconds(main, mesh) == pytest.approx(max(share * inner, share * outer), rel=1e-3)


def test_axes_between_nodes_use_a_link_of_each_rank() -> None:
    """All of 8 ranks: 4 on each node, so 4 links out of it; those of one place on each node: one."""
    every = seconds(lambda: mc.all_gather(x(), ("n", "l")), {"n": 2, "l": 4})
    apart = seconds(lambda: mc.all_gather(x(), "n"), {"n": 2, "l": 4})
    run = mc.dry_run(lambda: mc.all_gather(x(), ("n", "l")), {"n": 2, "l": 4}, hardware=ROUND)
    assert run.exposed(("l", "n")) == every
    assert run.exposed("l") == 0.0
    assert every == pytest.approx(7 * 4e6 / 4e8, rel=1e-3)
    assert apart == pytest.approx(4e6 / 1e8, rel=1e-3)


def test_pipelines_have_their_bubble() -> None:
    """As many forward and backward products as the slowest path of the schedule has; the stages run too, unasked."""

    def main() -> None:
        stage = nn.Linear(2000, 2000, bias=False)
        step = parallel.pipelined(stage, "pp", loss=F.mse_loss, microbatches=4, grads="mean")
        batch = torch.empty(4000, 2000)
        step(batch, batch)

    run = mc.dry_run(main, {"pp": 4}, hardware=FAST)
    alone = 2 * 1000 * 2000**2 / 1e12
    # 4 microbatches and 3 stages before or behind, of 1 product forwards and 2 backwards; the first stage's input
    # needs no gradient.
    assert run.ranks == (0,)
    assert run.seconds == pytest.approx((4 * 2 + 3 * 3 + 3) * alone, rel=0.2)
    assert run.seconds > 1.2 * 4 * 3 * alone


def test_flops_are_those_of_torch() -> None:
    """Backward, causal attention and what a checkpoint computes again included."""

    def step() -> None:
        model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        again = torch.utils.checkpoint.checkpoint(model, torch.randn(2, 8, 32, requires_grad=True), use_reentrant=False)
        again.sum().backward()
        q = torch.randn(1, 2, 8, 16, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    found = sum(mc.dry_run(step, {"dp": 2}).flops.values())
    kernels = 2 * (2 + 5) * 2 * 8 * 8 * 16  # torch has no formula for the CPU's kernels of attention
    assert found >= counter.get_total_flops()
    assert found - counter.get_total_flops() <= 3 * kernels * 4


def test_laps_and_files(tmp_path: Path) -> None:
    def main() -> Any:
        for count in (1, 3, 2):
            for _ in range(count):
                x() @ x()
            yield
        mc.barrier("dp")

    run = mc.dry_run(main, {"dp": 8}, hardware=ROUND)
    assert run.laps == pytest.approx([PRODUCT, 3 * PRODUCT, 2 * PRODUCT], rel=1e-3)
    assert run.seconds == pytest.approx(2 * PRODUCT, rel=1e-3)
    assert run.flops == {torch.float32: 4 * 1000**3}
    assert run.on(mc.hardware("h100", flops={"float32": 4e13})).seconds < run.seconds
    run.save(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert sum(e["dur"] for e in events if e["ph"] == "X" and e["cat"] == "compute") == pytest.approx(4e3, rel=1e-2)
    run.save(tmp_path / "timeline.svg")
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")


def test_machines_are_read_as_they_were_written(tmp_path: Path) -> None:
    for name in ("a100", "H100", "h200", "b200"):
        machine = mc.hardware(name)
        assert {"flops", "memory_bandwidth", "memory", "within.bandwidth"} <= set(machine.sources)
        machine.save(tmp_path / "machine.json")
        assert mc.hardware(tmp_path / "machine.json") == machine


def test_what_is_asked_of_a_tensor_takes_no_time() -> None:
    """Its device, a view, an allocation; products and what is written do."""

    def main() -> None:
        y = x()
        y.view(-1, 1000).transpose(0, 1).expand(1, 1000, 1000).detach()
        torch.empty_like(y), y.device, y.is_floating_point()
        torch.utils.checkpoint.checkpoint(lambda z: z.view(-1), y, use_reentrant=False)

    assert seconds(main, {"dp": 2}) == 0.0


@pytest.mark.thorough
def test_this_machine_is_measured_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks have the same figures, those of the slowest; what ``python -m meshcomm hardware FILE`` writes is read."""
    monkeypatch.setattr(measure, "_SECONDS", 0.001)
    monkeypatch.setattr(measure, "_LARGE", 2**16)
    figures, others = mc.launch(measure.on_a_rank, ranks=2)
    assert figures == others
    monkeypatch.setattr(measure, "measured", lambda: figures)
    assert main([str(tmp_path / "machine.json")]) == 0
    machine = mc.hardware(tmp_path / "machine.json")
    assert machine == mc.hardware("this machine")
    assert (machine.ranks_per_node, machine.ahead) == (2, False)
    assert machine.within.bandwidth <= machine.memory_bandwidth
    assert machine.launch > 0
    assert mc.dry_run(lambda: mc.all_reduce(x() @ x(), "dp"), {"dp": 2}, hardware=machine).seconds > 0
    assert main([str(tmp_path / "none" / "machine.json")]) == 2
    assert "none" in capsys.readouterr().err
