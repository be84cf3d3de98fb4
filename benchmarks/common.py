"""What all benchmarks share: taking turns, budgets, tables, options. Nothing here knows what is measured."""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from timeit import Timer
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import meshcomm as mc

RANKS = 8
SAMPLE = 1e-3  # seconds that one sample of one candidate should take
MODES = ("no grad", "requires grad", "and backward")

Call = Callable[[], object]
Times = dict[str, dict[str, float]]
"""Candidate to mode to seconds."""


# ------------------------------------------------------------------------------------------------------------ turns


class Case(NamedTuple):
    """One candidate: ``run`` on an input that ``make`` gives, a tensor or a pytree of them."""

    run: Callable[[Any], Any]
    make: Callable[[], Any]
    differentiable: bool = True


def calls_of(cases: Mapping[str, Case]) -> dict[tuple[str, str], Call]:
    """What is timed, by candidate and mode."""
    calls: dict[tuple[str, str], Call] = {}
    for name, case in cases.items():
        calls[name, MODES[0]] = partial(case.run, case.make())
        if case.differentiable:
            given = tree_map(lambda x: x.detach().requires_grad_(), case.make())
            leaves = tensors_of(given)
            gradients = [torch.ones_like(y.detach()) for y in tensors_of(case.run(given))]
            calls[name, MODES[1]] = partial(case.run, given)
            calls[name, MODES[2]] = partial(forward_backward, case.run, given, leaves, gradients)
    return calls


def tensors_of(tree: Any) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else tree_leaves(tree)


def forward_backward(run: Callable[[Any], Any], given: Any, leaves: list[Tensor], gradients: list[Tensor]) -> None:
    torch.autograd.grad(tensors_of(run(given)), leaves, gradients)


def take_turns(
    calls: Mapping[tuple[str, str], Call], repeats: int, clock: Callable[[], float] = time.thread_time
) -> Times:
    """The median time of each call, of samples taken in turns: of this thread's processor, which others that use the
    machine do not lengthen. Each sample begins with calls that are not timed, for what ran before it has the caches,
    and every other turn goes backwards: none always comes after the same one.
    """
    timers = {key: Timer(call, timer=clock) for key, call in calls.items()}
    counts = {key: _count(timer) for key, timer in timers.items()}
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in timers}
    for turn in range(repeats):
        look_at_pace()
        for key in list(timers)[:: -1 if turn % 2 else 1]:
            timers[key].timeit(-(-counts[key] // 8))
            samples[key].append(timers[key].timeit(counts[key]) / counts[key])
    times: Times = {}
    for (name, mode), taken in samples.items():
        times.setdefault(name, {})[mode] = median(taken)
    return times


def _count(timer: Timer) -> int:
    """How many calls take as long as a sample should, guessed from no more calls than that needs."""
    timer.timeit(1)
    few = max(1, min(20, round(SAMPLE / timer.timeit(1))))
    return max(1, round(SAMPLE / min(timer.repeat(3, few)) * few))


def steps_in_turns(steps: Mapping[str, Call], repeats: int) -> dict[str, float]:
    """The median of each step's :func:`seconds_in_turns`."""
    return {who: median(each) for who, each in seconds_in_turns(steps, repeats).items()}


def seconds_in_turns(steps: Mapping[str, Call], repeats: int) -> dict[str, list[float]]:
    """Called by every process: the seconds of each step, those that the slowest one took. Two turns that are not timed
    come first, and every other turn goes backwards.
    """
    taken: dict[str, list[float]] = {who: [] for who in steps}
    for turn in range(repeats + 2):
        for who in list(steps)[:: -1 if turn % 2 else 1]:
            dist.barrier()
            start = time.perf_counter()
            steps[who]()
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= 2:
                taken[who].append(took.item())
    return taken


# ---------------------------------------------------------------------------------------------------------- budgets


ADDS = 1.7e-6
"""The seconds of ``x + x`` of 16 numbers where the budgets that are no ratios were written."""
_paces: list[float] = []


def look_at_pace() -> None:
    """Note how long that takes here and now: machines differ, and one that is shared is now fast and now slow."""
    _paces.append(Timer("x + x", timer=time.thread_time, globals={"x": torch.ones(16)}).timeit(200) / 200 / ADDS)


def pace() -> float:
    """How many times as long as there it took here, by the median of the looks: a budget in seconds is as much more."""
    if not _paces:
        for _ in range(20):
            look_at_pace()
    return median(_paces)


class Budget(NamedTuple):
    """A line of the table of budgets."""

    what: str
    measured: float | None
    limit: float
    unit: str
    pace: float = 1.0
    """How much more a budget that is no ratio may be here and now."""

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        if self.measured <= self.limit:
            return "holds"
        return "holds at this pace" if self.measured <= self.limit * self.pace else "over"


def timed(what: str, measured: float, limit: float, unit: str) -> Budget:
    """A line of a budget in seconds, which depends on the machine."""
    return Budget(what, measured, limit, unit, pace())


def worst(what: str, ratios: Mapping[str, float], limit: float) -> Budget:
    """One line for many ratios: that of the greatest, with its name."""
    if not ratios:
        return Budget(what, None, limit, "x")
    name = max(ratios, key=ratios.__getitem__)
    return Budget(f"{what}, worst of {len(ratios)}: {name}" if len(ratios) > 1 else what, ratios[name], limit, "x")


def as_json(budgets: Sequence[Budget]) -> list[dict[str, Any]]:
    return [budget._asdict() | {"verdict": budget.verdict} for budget in budgets]


# ----------------------------------------------------------------------------------------------------------- tables


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns, the first to the left."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    print(f"\n{title}\n")
    for row in [head, *rows]:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  " + "   ".join([row[0].ljust(len(first)), *rest]).rstrip())


def print_markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The same as the docs have it, to be pasted."""
    print()
    for row in [head, *rows]:
        print(("| " + " | ".join(row) + " |").replace("  ", " "))
        if row is head:
            print("|" + "---|" * len(head))


def print_by_size(ranks: int, sizes: Mapping[str, Mapping[str, Mapping[str, float]]], peer: str) -> None:
    """Seconds and peaks of forward and backward, by size, of each candidate, beside those of one of them."""
    rows = [
        [size, who, f"{1e3 * one['seconds']:.1f}", f"{one['seconds'] / each[peer]['seconds']:.2f}",
         f"{one['peak'] / 2**20:.2f}", f"{one['peak'] / each[peer]['peak']:.2f}"]
        for size, each in sizes.items()
        for who, one in each.items()
    ]  # fmt: skip
    print_table(f"Forward and backward, {ranks} processes", ["", "", "ms", "x peer", "peak MiB", "x peer"], rows)


def judged(found: Mapping[str, Any], budgets: Sequence[Budget]) -> dict[str, Any]:
    """Print whether each budget holds. What was found, and that, as it goes to --json."""
    if budgets:
        print_budgets(budgets)
    return {**found, "budgets": as_json(budgets)}


def print_beside(title: str, found: Mapping[str, Mapping[str, float]], ours: str, unit: float = 1e-6) -> None:
    """Of each line ours, the peers and the floors, and ours over each of them. ``found``: seconds by line and who."""
    names = list(dict.fromkeys(name for times in found.values() for name in times))
    others = [name for name in names if name != ours]
    rows = []
    for what, times in found.items():
        cells = [f"{times[name] / unit:.3g}" if name in times else "-" for name in names]
        cells += [f"{times[ours] / times[name]:.2f}" if {ours, name} <= set(times) else "-" for name in others]
        rows.append([what, *cells])
    head = [{1e-6: "µs", 1e-3: "ms"}.get(unit, "s"), *names, *(f"over {name}" for name in others)]
    print_table(title, head, rows)


def print_budgets(budgets: Sequence[Budget]) -> None:
    rows = []
    for budget in budgets:
        shown = "-" if budget.measured is None else f"{budget.measured:.3g} {budget.unit}"
        paced = "" if budget.pace == 1 else f"{budget.pace:.2f}"
        rows.append([budget.what, shown, f"<= {budget.limit:.4g} {budget.unit}", paced, budget.verdict])
    print_table("Budgets, of medians", ["", "measured", "budget", "pace", ""], rows)
    if any(budget.pace != 1 for budget in budgets):
        print(f"\n  pace: x + x of 16 numbers, over the {1e6 * ADDS:.1f} µs of where budgets in seconds were written")


def machine() -> dict[str, object]:
    """What ran this."""
    return {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "processor": platform.processor() or platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "meshcomm": mc.__version__,
    }


def print_machine(info: Mapping[str, object]) -> None:
    print(", ".join(f"{key} {value}" for key, value in info.items()))


# ---------------------------------------------------------------------------------------------------------- program


def options_of(description: str, markdown: bool = False) -> ArgumentParser:
    """With what every benchmark takes. ``markdown``: whether it has a table for the docs."""
    parser = ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small and few: seconds, for CI")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there too, times in seconds")
    if markdown:
        parser.add_argument("--markdown", action="store_true", help="print the tables of the docs too")
    return parser


def options_by_size(description: str, flag: str, what: str) -> ArgumentParser:
    """Those of a benchmark of steps on processes, by one size."""
    parser = options_of(description)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes on gloo (2 4)")
    parser.add_argument(flag, type=int, nargs="+", help=what)
    parser.add_argument("--repeats", type=int, metavar="N", help="steps per number (15; 3 with --quick)")
    return parser


def run(parser: ArgumentParser, measure: Callable[[Namespace], dict[str, Any]], given: Sequence[str] | None) -> None:
    """Say on what machine, measure, write what there is, and leave no process group."""
    options = parser.parse_args(given)
    info = machine()
    print_machine(info)
    results = measure(options)
    write(options.json, {"machine": info} | results)
    mc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def write(path: str | None, results: Mapping[str, Any]) -> None:
    """As JSON, if a file was asked for."""
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


class quiet:  # noqa: N801  # reads as a verb
    """``with quiet():`` no garbage collection while the clock runs."""

    def __enter__(self) -> None:
        gc.collect()
        gc.disable()

    def __exit__(self, *exc: object) -> None:
        gc.enable()


def say(text: str) -> None:
    """Progress, beside the tables."""
    print(text, file=sys.stderr, flush=True)
