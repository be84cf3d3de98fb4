"""Pipelines by a schedule: pipelined beside torch.distributed.pipelining on gloo, and beside its own simulation.

    python -m benchmarks.pipeline                 # 4 processes, a few minutes
    python -m benchmarks.pipeline --ranks 2 --microbatches 4 --quick --json out.json

Two kinds of stages. Those that sleep show the schedule, on a machine with fewer cores than ranks too: forward sleeps
for one unit and backward for two, the weights' part of it for nothing. What a step takes longer than that is held
against ``schedule.simulate`` with these costs, and what is alive at once, counted where forward keeps it, against
``schedule.peak``. Real stages, residual MLPs, show what messages and the host cost; ranks share the cores there are.

Candidates take turns; a sample is the slowest rank's, a number the median, or the least where that is said. Peaks are
of the memory that torch gives out in a step, the most of any rank's.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it
os.environ.setdefault("MESHCOMM_REUSE_MIB", "0")  # what is kept for reuse would count

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

import meshcomm as mc
from benchmarks.common import Budget, judged, options_of, print_table, run, seconds_in_turns
from benchmarks.tracked import Tracked
from meshcomm import parallel

Step = Callable[[], object]
ROWS = 16
"""Of a microbatch."""


class Pair(NamedTuple):
    """A schedule of ours, torch's, and how much longer ours may take."""

    schedule: str
    chunks: int
    peer: Any
    limit: float


PAIRS = [
    Pair("1f1b", 1, Schedule1F1B, 1.0),
    Pair("interleaved", 2, ScheduleInterleaved1F1B, 1.05),
    Pair("zbv", 2, ScheduleZBVZeroBubble, 1.05),
]
ALONE = [Pair("gpipe", 1, None, 0.0), Pair("zb-h1", 1, None, 0.0)]


def chosen(names: Iterable[str]) -> list[Pair]:
    return [pair for pair in PAIRS + ALONE if pair.schedule in names]


# ------------------------------------------------------------------------------------------------------------ stages


class Alive:
    """How many of these there are, and the most there were."""

    now = most = 0

    def __init__(self) -> None:
        Alive.now += 1
        Alive.most = max(Alive.most, Alive.now)

    def __del__(self) -> None:
        Alive.now -= 1


class _Sleep(Function):
    """Takes one unit forward and two backward; what it keeps is alive until then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: float) -> Tensor:
        time.sleep(unit)
        ctx.unit, ctx.alive = unit, Alive()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.unit)
        ctx.alive = None
        return g, None


class Sleeping(nn.Module):
    """A layer, and time."""

    def __init__(self, width: int, unit: float) -> None:
        super().__init__()
        self.unit, self.layer = unit, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Sleep.apply(self.layer(x), self.unit)  # type: ignore[no-untyped-call]
        return found


class Blocks(nn.Module):
    """Residual MLPs."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


# ------------------------------------------------------------------------------------------------------------- steps


def numbers_of(pair: Pair, rank: int, n: int) -> list[int]:
    """The stages that a rank has."""
    return [rank, 2 * n - 1 - rank] if pair.schedule == "zbv" else [rank + n * chunk for chunk in range(pair.chunks)]


def ours(pair: Pair, stages: list[nn.Module], x: Tensor, target: Tensor, m: int) -> tuple[Step, Any]:
    step = parallel.pipelined(stages, "pp", loss=F.mse_loss, microbatches=m, grads="mean", schedule=pair.schedule)

    def step_and_forget() -> None:
        step(x, target)
        step.zero_grad()

    return step_and_forget, step


def theirs(pair: Pair, stages: list[nn.Module], x: Tensor, target: Tensor, m: int) -> Step:
    rank, n = dist.get_rank(), dist.get_world_size()
    numbers = numbers_of(pair, rank, n)
    last = pair.chunks * n - 1
    made = [
        PipelineStage(stage, number, last + 1, torch.device("cpu"))
        for stage, number in zip(stages, numbers, strict=True)
    ]
    plan = pair.peer(made if pair.chunks > 1 else made[0], m, loss_fn=F.mse_loss)
    given = (x,) if 0 in numbers else ()
    more: dict[str, Any] = {"target": target, "losses": []} if last in numbers else {}

    def step_and_forget() -> None:
        plan.step(*given, **more)
        for stage in stages:
            stage.zero_grad()
        more.get("losses", []).clear()

    return step_and_forget


def on_gloo(make: Callable[[int], nn.Module], width: int, m: int, repeats: int, names: Sequence[str]) -> dict[str, Any]:
    """By schedule: seconds and bytes of ours and of torch's, what is alive on each rank, and what was foretold."""
    torch.set_num_threads(1)
    mesh = mc.make_mesh({"pp": -1})
    n = mesh.size
    x, target = torch.randn(ROWS * m, width), torch.randn(ROWS * m, width)
    steps: dict[str, Step] = {}
    plans: dict[str, Any] = {}
    with mc.use_mesh(mesh):
        for pair in chosen(names):
            stages = [make(pair.chunks) for _ in range(pair.chunks)]
            steps[pair.schedule], plans[pair.schedule] = ours(pair, stages, x, target, m)
            if pair.peer is not None:
                stages = [make(pair.chunks) for _ in range(pair.chunks)]
                steps["torch " + pair.schedule] = theirs(pair, stages, x, target, m)
        found: dict[str, Any] = {}
        for who, step in steps.items():
            step()
            Alive.now = Alive.most = 0
            with Tracked() as seen:
                step()
            every = mc.all_gather(torch.tensor([float(seen.peak), float(Alive.most)]), "pp").view(n, 2)
            found[who] = {"peak": every[:, 0].max().item(), "alive": every[:, 1].int().tolist()}
            if who in plans:
                plan = plans[who].schedule
                costs = {"F": 1.0, "B": 2.0, "D": 2.0, "W": 0.0}
                counted = mc.all_gather(torch.tensor([plans[who].peak]), "pp").tolist()
                found[who] |= {"foretold": plan.simulate(costs).bubble, "counted": counted, "most": list(plan.peak)}
        for who, seconds in seconds_in_turns(steps, repeats).items():
            found[who] |= {"seconds": median(seconds), "least": min(seconds)}
    return found


def sleeping(width: int, unit: float, m: int, repeats: int, names: Sequence[str]) -> dict[str, Any]:
    """As much time on a rank whatever the number of its stages."""
    found = on_gloo(lambda chunks: Sleeping(width, unit / chunks), width, m, repeats, names)
    for each in found.values():
        each["bubble"] = each["seconds"] / (3 * unit * m) - 1
    return found


def real(width: int, count: int, m: int, repeats: int, names: Sequence[str]) -> dict[str, Any]:
    return on_gloo(lambda chunks: Blocks(width, count // chunks), width, m, repeats, names)


# ------------------------------------------------------------------------------------------------------------ report


def report(ranks: int, kinds: dict[str, dict[str, Any]]) -> list[Budget]:
    budgets = []
    for kind, found in kinds.items():
        rows = []
        for pair in chosen(found):
            one, peer = found[pair.schedule], found.get("torch " + pair.schedule)
            times = [f"{1e3 * one['seconds']:.1f}", "", "", ""]
            if peer:
                ratios = [f"{one[which] / peer[which]:.2f}" for which in ("seconds", "least")]
                times[1:] = [f"{1e3 * peer['seconds']:.1f}", *ratios]
            peaks = [f"{one['peak'] / 2**20:.2f}", f"{one['peak'] / peer['peak']:.2f}" if peer else ""]
            peaks = ["", ""] if "bubble" in one else peaks  # of next to nothing
            bubble = [f"{one['bubble']:.3f}", f"{one['foretold']:.3f}"] if "bubble" in one else ["", ""]
            alive = (
                [" ".join(map(str, one[name])) for name in ("alive", "counted", "most")]
                if "bubble" in one
                else [""] * 3
            )
            rows.append([pair.schedule, *times, *peaks, *bubble, *alive])
            if peer:
                ratio = one["seconds"] / peer["seconds"]
                budgets.append(Budget(f"{pair.schedule} over torch's, {ranks} ranks, {kind}", ratio, pair.limit, "x"))
            if "bubble" in one:
                more = (1 + one["bubble"]) / (1 + one["foretold"])
                budgets.append(Budget(f"{pair.schedule} over its simulation, {ranks} ranks", more, 1.05, "x"))
        head = [
            "schedule",
            "ms",
            "torch",
            "x",
            "least, x",
            "MiB",
            "x",
            "bubble",
            "foretold",
            "kept",
            "alive",
            "foretold",
        ]
        print_table(f"A step, {ranks} processes, {kind}", head, rows)
    return budgets


def measure(options: Namespace) -> dict[str, Any]:
    repeats = options.repeats or (3 if options.quick else 11)
    m, unit = options.microbatches, options.unit or (0.004 if options.quick else 0.05)
    names = options.schedules
    budgets, results = [], {}
    for ranks in options.ranks:
        kinds = {}
        if options.kind != "real":
            kinds["stages that sleep"] = mc.launch(sleeping, ranks, (16, unit, m, repeats, names), runtime="processes")[
                0
            ]
        if options.kind != "sleep":
            kinds["residual MLPs"] = mc.launch(real, ranks, (options.width, 4, m, repeats, names), runtime="processes")[
                0
            ]
        results[ranks] = kinds
        budgets += report(ranks, kinds)
    return judged({"gloo": results}, budgets)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("Pipelines by a schedule.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4], help="processes on gloo (4)")
    parser.add_argument("--kind", choices=["sleep", "real"], help="of stages (both)")
    names = [pair.schedule for pair in PAIRS + ALONE]
    parser.add_argument("--schedules", nargs="+", choices=names, default=names, help="those (all)")
    parser.add_argument("--microbatches", type=int, default=8, metavar="M", help="of a step (8)")
    parser.add_argument(
        "--unit", type=float, metavar="S", help="seconds that a forward sleeps (0.05; 0.004 with --quick)"
    )
    parser.add_argument("--width", type=int, default=128, metavar="D", help="of the residual MLPs (128)")
    parser.add_argument("--repeats", type=int, metavar="N", help="steps per number (11; 3 with --quick)")
    run(parser, measure, arguments)


if __name__ == "__main__":
    main()
