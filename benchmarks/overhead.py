"""What a collective costs the host, beside what else there is: one run, ratios, no assertions.

    python benchmarks/overhead.py                 # about a minute
    python benchmarks/overhead.py --quick         # some seconds, noisier
    python benchmarks/overhead.py --json out.json

torch's fake backend (8 ranks, of which this process is rank 0) moves nothing, which leaves the host's part of a
collective alone. The candidates take turns in many short samples and each number is the median of its samples, so that
a machine that is slow for a while is slow for all of them. One thread; no garbage collection while the clock runs.

Each candidate is measured on an input without grad, on a leaf that requires grad (forward alone), and with backward.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from timeit import Timer
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshcomm as mc

RANKS = 8
SAMPLE = 1e-3  # seconds that one sample of one candidate should take
MODES = ("no grad", "requires grad", "and backward")
BASE = "clone + dist.all_reduce"
OURS = "meshcomm, mesh="
FUNCTIONAL, SPMD_TYPES, DTENSOR = "functional collective + wait", "spmd_types", "DTensor.redistribute"

Call = Callable[[], object]
Times = dict[str, dict[str, float]]
"""Candidate to mode to seconds."""


class Case(NamedTuple):
    """One candidate: ``run`` on an input that ``make`` gives."""

    run: Callable[[Any], Any]
    make: Callable[[], Tensor]
    differentiable: bool = True


class Budget(NamedTuple):
    """A line of the design's table of budgets."""

    what: str
    measured: float | None
    limit: float
    unit: str

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        return "ok" if self.measured <= self.limit else "over"


# ---------------------------------------------------------------------------------------------------------- timing


def calls_of(cases: Mapping[str, Case]) -> dict[tuple[str, str], Call]:
    """What is timed, by candidate and mode."""
    calls: dict[tuple[str, str], Call] = {}
    for name, case in cases.items():
        calls[name, MODES[0]] = partial(case.run, case.make())
        if case.differentiable:
            leaf = case.make().detach().requires_grad_()
            gradient = torch.ones_like(case.run(leaf).detach())
            calls[name, MODES[1]] = partial(case.run, leaf)
            calls[name, MODES[2]] = partial(forward_backward, case.run, leaf, gradient)
    return calls


def forward_backward(run: Callable[[Tensor], Tensor], leaf: Tensor, gradient: Tensor) -> None:
    torch.autograd.grad(run(leaf), leaf, gradient)


def take_turns(calls: Mapping[tuple[str, str], Call], repeats: int) -> Times:
    """The median time of each call, of samples taken in turns."""
    timers = {key: Timer(call) for key, call in calls.items()}
    counts = {key: max(1, round(SAMPLE / min(timer.repeat(3, 20)) * 20)) for key, timer in timers.items()}
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in timers}
    for _ in range(repeats):
        for key, timer in timers.items():
            samples[key].append(timer.timeit(counts[key]) / counts[key])
    times: Times = {}
    for (name, mode), taken in samples.items():
        times.setdefault(name, {})[mode] = median(taken)
    return times


# ------------------------------------------------------------------------------------------------------ all_reduce


class BareFunction(Function):
    """The least that a differentiable all_reduce can be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, options: dist.AllreduceOptions) -> Tensor:
        return clone_and_group(x, group, options)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return g.view_as(g), None, None


def clone_and_group(x: Tensor, group: dist.ProcessGroup, options: dist.AllreduceOptions) -> Tensor:
    y = x.clone()
    group.allreduce([y], options).wait()
    return y


def clone_and_dist(x: Tensor) -> Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y


def all_reduce_cases(mesh: mc.Mesh, elements: int) -> dict[str, Case]:
    """One all_reduce of so many elements, by everyone who offers it."""
    group, options = mesh.device_mesh.get_group(), dist.AllreduceOptions()  # of a sum, by default
    bare: Callable[..., Tensor] = BareFunction.apply
    make = partial(torch.ones, elements)
    cases = {
        OURS: Case(lambda x: mc.all_reduce(x, "tp", mesh=mesh), make),
        "meshcomm, use_mesh": Case(lambda x: mc.all_reduce(x, "tp"), make),
        BASE: Case(clone_and_dist, make, differentiable=False),
        "clone + ProcessGroup (floor)": Case(lambda x: clone_and_group(x, group, options), make, differentiable=False),
        "the same in a bare Function": Case(lambda x: bare(x, group, options), make),
        FUNCTIONAL: Case(lambda x: funcol.all_reduce(x, "sum", group).wait(), make),
        DTENSOR: Case(
            lambda x: x.redistribute(placements=[Replicate()]),
            lambda: DTensor.from_local(make(), mesh.device_mesh, [Partial()]),
        ),
    }
    if importlib.util.find_spec("spmd_types") is not None:
        spmd: Any = importlib.import_module("spmd_types")
        cases[SPMD_TYPES] = Case(lambda x: spmd.all_reduce(x, group, src=spmd.P, dst=spmd.I), make)
    return cases


# ----------------------------------------------------------------------------------------------- other collectives


# torch 2.13 has renamed two; the old names warn there, which costs time.
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def dist_all_gather(x: Tensor) -> Tensor:
    out = x.new_empty(RANKS * x.shape[0])
    gather_single(out, x)
    return out


def dist_reduce_scatter(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0] // RANKS)
    scatter_single(out, x)
    return out


def dist_all_to_all(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def dist_shift(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    pair = [dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, out, RANKS - 1)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return out


def dist_broadcast(x: Tensor) -> Tensor:
    out = x.clone()
    dist.broadcast(out, 0)
    return out


def other_cases(mesh: mc.Mesh) -> dict[str, tuple[Case, Case, str]]:
    """Our other collectives, each beside the call that a user of torch.distributed would write."""
    one, many = partial(torch.ones, 1), partial(torch.ones, RANKS)

    def pair(
        name: str, make: Callable[[], Tensor], beside: Callable[[Tensor], Tensor], what: str
    ) -> tuple[Case, Case, str]:
        ours = getattr(mc, name)
        more = (0, 0) if name == "all_to_all" else ()
        return Case(lambda x: ours(x, "tp", *more, mesh=mesh), make), Case(beside, make, differentiable=False), what

    return {
        "all_gather": pair("all_gather", one, dist_all_gather, gather_single.__name__),
        "reduce_scatter": pair("reduce_scatter", many, dist_reduce_scatter, scatter_single.__name__),
        "all_to_all": pair("all_to_all", many, dist_all_to_all, "all_to_all_single"),
        "shift": pair("shift", one, dist_shift, "batch_isend_irecv"),
        "broadcast": pair("broadcast", one, dist_broadcast, "clone + broadcast"),
        "pvary": pair("pvary", one, lambda x: x.view_as(x), "(x.view_as(x))"),
        "shard": pair("shard", many, lambda x: x[:1].clone(), "(x[:1].clone())"),
    }


# ------------------------------------------------------------------------------------------- in-process and import


def in_process(repeats: int, elements: int = 16) -> Times:
    """One all_reduce of ranks that are threads of this process: seconds for all of them together."""
    mesh = mc.make_mesh({"tp": RANKS})
    case = Case(lambda x: mc.all_reduce(x, "tp", mesh=mesh), partial(torch.ones, elements))

    def rank() -> Times:
        calls = {mode: Timer(call) for (_, mode), call in calls_of({"": case}).items()}
        samples: dict[str, list[float]] = {mode: [] for mode in calls}
        for _ in range(repeats):
            for mode, timer in calls.items():
                mc.barrier("tp", mesh=mesh)
                samples[mode].append(timer.timeit(10) / 10)  # the same count on every rank, or they would not meet
        return {
            "median": {mode: median(taken) for mode, taken in samples.items()},
            "fastest": {mode: min(taken) for mode, taken in samples.items()},
        }

    gc.disable()  # for all ranks at once: it is the process's own
    try:
        return mc.launch(rank, ranks=RANKS)[0]
    finally:
        gc.enable()


def import_times(repeats: int) -> list[float]:
    """Seconds that ``import meshcomm`` takes after ``import torch``, in each of several fresh processes."""
    program = "import time, torch; start = time.perf_counter(); import meshcomm; print(time.perf_counter() - start)"
    command = [sys.executable, "-c", program]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(repeats)]
    return [float(run.stdout) for run in runs]


# --------------------------------------------------------------------------------------------------------- results


def ratio(times: Times, over: str, modes: tuple[str, str] = (MODES[0], MODES[0])) -> float | None:
    """Our time in a mode over another candidate's in a mode."""
    return times[OURS][modes[0]] / times[over][modes[1]] if over in times else None


def budgets_of(times: Times, inside: Times, imports: Sequence[float]) -> list[Budget]:
    """The budgets that this program can judge."""
    grad = (MODES[1], MODES[1])
    return [
        Budget(f"no grad, over {BASE}", ratio(times, BASE), 1.25, "x"),
        Budget("requires grad, over the same without", ratio(times, BASE, (MODES[1], MODES[0])), 1.9, "x"),
        Budget(f"requires grad, over {FUNCTIONAL}", ratio(times, FUNCTIONAL, grad), 1 / 5, "x"),
        Budget(f"requires grad, over {SPMD_TYPES}", ratio(times, SPMD_TYPES, grad), 1 / 4, "x"),
        Budget(f"requires grad, over {DTENSOR}", ratio(times, DTENSOR, grad), 1 / 8, "x"),
        Budget(f"in-process, {RANKS} ranks, 16 elements, no grad", 1e6 * inside["median"][MODES[0]], 400, "µs"),
        Budget("import meshcomm beyond import torch", median(imports), 0.15, "s"),
    ]


def machine() -> dict[str, object]:
    return {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "processor": platform.processor() or platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "meshcomm": mc.__version__,
    }


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    print(f"\n{title}\n")
    for row in [head, *rows]:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  " + "   ".join([row[0].ljust(len(first)), *rest]).rstrip())


def print_times(title: str, times: Times, base: float) -> None:
    """µs by mode, each with its ratio to ``base`` seconds."""
    rows = []
    for name, modes in times.items():
        cells = [(f"{1e6 * modes[m]:.1f}", f"{modes[m] / base:.2f}") if m in modes else ("-", "") for m in MODES]
        rows.append([name, *(part for cell in cells for part in cell)])
    if SPMD_TYPES not in times:
        rows.append([SPMD_TYPES, "not installed", *[""] * 5])
    print_table(title, ["µs", *(part for mode in MODES for part in (mode, "x"))], rows)


def print_others(times: Times, pairs: Mapping[str, tuple[Case, Case, str]]) -> None:
    rows = []
    for name, (_, _, beside) in pairs.items():
        ours, other = times[name], times[beside][MODES[0]]
        rows.append([name, f"{1e6 * ours[MODES[0]]:.1f}", beside, f"{1e6 * other:.1f}"])
        rows[-1] += [f"{ours[MODES[0]] / other:.2f}", *(f"{1e6 * ours[mode]:.1f}" for mode in MODES[1:])]
    print_table(
        "The other collectives, ours beside torch's", ["µs", MODES[0], "beside", MODES[0], "x", *MODES[1:]], rows
    )


def print_budgets(budgets: Sequence[Budget]) -> None:
    rows = []
    for what, measured, limit, unit in budgets:
        shown = "-" if measured is None else f"{measured:.3g} {unit}"
        rows.append([what, shown, f"<= {limit:.4g} {unit}", Budget(what, measured, limit, unit).verdict])
    print_table("Budgets, of medians", ["", "measured", "budget", ""], rows)


# ---------------------------------------------------------------------------------------------------------- program


def measure_alone(repeats: int, starts: int) -> tuple[Times, list[float]]:
    """What needs a process without a process group; printed too."""
    inside, imports = in_process(repeats), import_times(starts)
    rows = [[name, *(f"{1e6 * modes[mode]:.0f}" for mode in MODES)] for name, modes in inside.items()]
    print_table(f"One in-process all_reduce of 16 elements, all {RANKS} ranks together", ["µs", *MODES], rows)
    print(f"\nimport meshcomm after import torch, s: median {median(imports):.3f}, fastest {min(imports):.3f}")
    return inside, imports


def measure_on_fake(repeats: int) -> tuple[dict[str, Times], Times]:
    """What runs on the fake backend, printed as it comes."""
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    mesh = mc.make_mesh({"tp": RANKS})
    with mc.use_mesh(mesh):
        one = take_turns(calls_of(all_reduce_cases(mesh, 1)), repeats)
        print_times(f"One all_reduce of 1 element; x: over {BASE} without grad", one, one[BASE][MODES[0]])
        more = take_turns(calls_of(all_reduce_cases(mesh, 4096)), repeats)
        print_times("The same of 4096 elements", more, more[BASE][MODES[0]])
        pairs = other_cases(mesh)
        cases = {name: ours for name, (ours, _, _) in pairs.items()}
        cases |= {what: theirs for _, theirs, what in pairs.values()}
        others = take_turns(calls_of(cases), repeats)
    print_others(others, pairs)
    return {"1": one, "4096": more}, others


def measure(options: Namespace) -> dict[str, Any]:
    """Everything, as it goes to --json."""
    repeats = options.repeats or (15 if options.quick else 200)
    info = machine()
    print(", ".join(f"{key} {value}" for key, value in info.items()))
    inside, imports = measure_alone(repeats, 3 if options.quick else 7)
    reduces, others = measure_on_fake(repeats)
    budgets = budgets_of(reduces["1"], inside, imports)
    print_budgets(budgets)
    return {
        "machine": info,
        "repeats": repeats,
        "in_process": inside,
        "import": imports,
        "all_reduce": reduces,
        "others": others,
        "budgets": [budget._asdict() | {"verdict": budget.verdict} for budget in budgets],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="What a collective costs the host, beside what else there is.")
    parser.add_argument("--quick", action="store_true", help="few repeats: seconds, for CI")
    parser.add_argument("--repeats", type=int, metavar="N", help="samples per number (200; 15 with --quick)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there too, times in seconds")
    options = parser.parse_args(arguments)
    results = measure(options)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)
    mc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
