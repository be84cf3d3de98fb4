"""What a trace costs the host when it is off, and when it is on: one run, ratios, no assertions.

    python -m benchmarks.tracing                  # about a minute
    python -m benchmarks.tracing --quick          # some seconds, noisier
    python -m benchmarks.tracing --json out.json

One all_reduce, on torch's fake backend (8 ranks, of which this process is one), which moves nothing, and between 8
in-process ranks; then every collective on the fake backend, waited for and not, with grad and without. An axis that was
never traced, one after a trace of it was closed, and one in a trace take turns in short samples; each number is the
median of its samples, in time of the processor, which others that use the machine do not lengthen. An axis that was
traced has its own link back: "after" over "never" is 1.0, give or take the noise that "another" over "never" shows, of
two axes of which neither was traced.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch
import torch.distributed as dist

import meshcomm as mc
from benchmarks.common import RANKS, as_json, options_of, print_budgets, print_table, quiet, run, timed
from meshcomm.tracing.traces import trace

STATES = ("never traced", "another one", "after a trace", "in a trace")
MODES = ("no grad", "and backward")

Times = dict[str, dict[str, float]]
"""Mode to state to seconds per call."""


def call_in(mode: str, elements: int, mesh: mc.Mesh) -> Callable[[], object]:
    x = torch.ones(elements, requires_grad=mode == MODES[1])
    if mode == MODES[0]:
        return lambda: mc.all_reduce(x, "tp", mesh=mesh)
    g = torch.ones(elements)
    return lambda: torch.autograd.grad(mc.all_reduce(x, "tp", mesh=mesh), x, g)


def sample(state: str, mode: str, elements: int, count: int) -> float:
    """Seconds of this process per call, over an axis made for this sample."""
    mesh = mc.make_mesh({"tp": RANKS})
    call = call_in(mode, elements, mesh)
    call()
    if state == "after a trace":
        with trace():
            call()
    with trace() if state == "in a trace" else nullcontext():
        mc.barrier("tp", mesh=mesh)
        start = time.process_time()
        for _ in range(count):
            call()
        return (time.process_time() - start) / count


def take_turns(repeats: int, elements: int, count: int) -> Times:
    """The same number of calls on every rank, or they would not meet."""
    taken: dict[str, dict[str, list[float]]] = {mode: {state: [] for state in STATES} for mode in MODES}
    for number in range(repeats):
        for mode in MODES:
            for state in STATES[number % 4 :] + STATES[: number % 4]:
                taken[mode][state].append(sample(state, mode, elements, count))
    return {mode: {state: median(each) for state, each in states.items()} for mode, states in taken.items()}


def in_process(repeats: int, count: int) -> Times:
    """Seconds for all ranks together."""
    return mc.launch(take_turns, ranks=RANKS, args=(repeats, 16, count))[0]


def on_fake(repeats: int, count: int) -> Times:
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    return take_turns(repeats, 16, count)


CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": lambda x: mc.all_reduce(x, "tp"),
    "all_reduce, max": lambda x: mc.all_reduce(x, "tp", op="max"),
    "all_reduce, mean": lambda x: mc.all_reduce(x, "tp", op="mean"),
    "all_gather": lambda x: mc.all_gather(x, "tp"),
    "reduce_scatter": lambda x: mc.reduce_scatter(x, "tp"),
    "all_to_all": lambda x: mc.all_to_all(x, "tp", split_dim=0, concat_dim=0),
    "broadcast": lambda x: mc.broadcast(x, "tp", src=0),
    "shift": lambda x: mc.shift(x, "tp"),
    "all_reduce, started and waited for": lambda x: mc.all_reduce(x, "tp", async_op=True).wait(),
    "all_gather, started and waited for": lambda x: mc.all_gather(x, "tp", async_op=True).wait(),
}


def every_call(repeats: int, count: int) -> dict[str, dict[str, float]]:
    """Seconds per call of each collective on the fake backend, never traced and in a trace, with grad and without."""
    found: dict[str, dict[str, float]] = {}
    for name, call in CALLS.items():
        for grad in (False, True):
            x = torch.ones(16, requires_grad=grad)
            taken: dict[str, list[float]] = {STATES[0]: [], STATES[3]: []}
            with mc.use_mesh(mc.make_mesh({"tp": RANKS})):
                for _ in range(repeats):
                    for state, times in taken.items():
                        with trace() if state == STATES[3] else nullcontext():
                            call(x)
                            start = time.process_time()
                            for _ in range(count):
                                call(x)
                            times.append((time.process_time() - start) / count)
            found[name + ", with grad" * grad] = {state: median(times) for state, times in taken.items()}
    return found


def report(found: dict[str, Times]) -> None:
    for where, times in found.items():
        rows = []
        for mode, took in times.items():
            never = took[STATES[0]]
            rows.append(
                [
                    mode,
                    *(f"{1e6 * took[state]:.2f}" for state in STATES),
                    *(f"{took[STATES[i]] / never:.3f}" for i in (2, 1, 3)),
                    f"{1e6 * (took[STATES[3]] - never):.2f}",
                ]
            )
        head = ["µs", *STATES, "after / never", "another / never", "in / never", "in - never"]
        print_table(f"One all_reduce of 16 elements, {where}", head, rows)


def measure(options: Namespace) -> dict[str, Any]:
    """Everything, as it goes to --json."""
    repeats, few = (2, 2) if options.quick else (40, 10)
    with quiet():  # of the process, and so of all ranks
        found = {
            f"{RANKS} in-process ranks together": in_process(repeats, few),
            "the fake backend": on_fake(repeats, 10 * few),
        }
        calls = every_call(repeats, 10 * few)
    report(found)
    adds = {name: 1e6 * (took[STATES[3]] - took[STATES[0]]) for name, took in calls.items()}
    rows = [
        [name, *(f"{1e6 * took[STATES[i]]:.2f}" for i in (0, 3)), f"{adds[name]:.2f}"] for name, took in calls.items()
    ]
    print_table("One call of 16 elements, the fake backend", ["µs", STATES[0], STATES[3], "in - never"], rows)
    most = max(adds, key=adds.__getitem__)
    budgets = [timed(f"what a trace adds to a call, fake, worst of {len(adds)}: {most}", adds[most], 8, "µs")]
    print_budgets(budgets)
    return {"repeats": repeats, "all_reduce": found, "calls": calls, "budgets": as_json(budgets)}


def main(arguments: Sequence[str] | None = None) -> None:
    run(options_of("What a trace costs, off and on."), measure, arguments)


if __name__ == "__main__":
    main()
