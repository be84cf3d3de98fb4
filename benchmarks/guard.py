"""What the guard costs: small collectives between four processes of this machine, with and without it, in turn.

    python -m benchmarks.guard                  # about a minute
    python -m benchmarks.guard --quick          # some seconds, noisier
    python -m benchmarks.guard --markdown       # the table of docs/guard.md too
    python -m benchmarks.guard --json out.json

"off" is how everybody runs; without the guard its code is not called at all. "shared memory" is where ranks of one
machine write what they call, "store" where those of several machines do. Beside them what who uses torch.distributed
writes, and gloo's C++ call with its result made, the floor of what goes through gloo. Each number is the median over
rounds of the slowest rank's median.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch
import torch.distributed as dist

import meshcomm as mc
from benchmarks import peers
from benchmarks.common import Budget, judged, options_of, print_markdown, print_table, run
from meshcomm.runtime.start.workers import WorkerPool

RANKS = 4
OFF, SHARED, GLOO, STORE = "off", "guard, shared memory", "off, gloo", "guard, store"
POOLS = {
    OFF: {},
    SHARED: {"MESHCOMM_GUARD": "1"},
    GLOO: {"MESHCOMM_SHARED_MEMORY": "0"},
    STORE: {"MESHCOMM_GUARD": "1", "MESHCOMM_SHARED_MEMORY": "0"},
}
THEIRS, FLOOR = "torch.distributed", "its C++ call (floor)"
HOW = {how: (how, "ours") for how in POOLS} | {THEIRS: (GLOO, THEIRS), FLOOR: (GLOO, FLOOR)}
"""In which processes, and who is called."""
OURS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda x: mc.all_reduce(x, "dp"),
    "all_gather": lambda x: mc.all_gather(x, "dp"),
    "all_to_all": lambda x: mc.all_to_all(x, "dp", 0, 0),
    "all_reduce, later": lambda x: mc.all_reduce(x, "dp", async_op=True).wait(),
}
ONCE = {"all_reduce": 283, "all_gather": 287, "all_to_all": 339, "all_reduce, later": 452}
"""µs with the guard in shared memory at 535dacf, 2 shared idle cores."""

Found = dict[str, dict[str, float]]
"""Call, then how: seconds."""


def call_of(name: str, who: str) -> Callable[[torch.Tensor], Any]:
    if who == "ours":
        return OURS[name]
    assert dist.group.WORLD is not None
    collective, later = name.partition(", ")[::2]
    ranks = dist.get_world_size()
    if who == THEIRS:
        return peers.peers_of(ranks, 0, asynchronous=bool(later))[collective][0]
    return peers.floors_of(ranks, 0, dist.group.WORLD)[collective]


def times(name: str, who: str, repeats: int, numel: int) -> list[float]:
    """Seconds of each call on this rank."""
    x, found = torch.ones(numel), []
    with mc.use_mesh(mc.make_mesh({"dp": -1})):
        call = call_of(name, who)
        for _ in range(repeats + 3):
            mc.barrier("dp")
            start = time.perf_counter()
            call(x)
            found.append(time.perf_counter() - start)
    return found[3:]


def measured(repeats: int, rounds: int, numel: int) -> Found:
    before = dict(os.environ)
    pools = {}
    try:
        for how, variables in POOLS.items():
            os.environ.update(variables)
            pools[how] = WorkerPool(RANKS)
            pools[how].run(times, "all_reduce", "ours", 1, numel)  # starts them, with these variables
            os.environ.clear()
            os.environ.update(before)
        found: dict[str, dict[str, list[float]]] = {name: {how: [] for how in HOW} for name in OURS}
        for _ in range(rounds):
            for name in OURS:
                for how, (pool, who) in HOW.items():
                    taken = pools[pool].run(times, name, who, repeats, numel)
                    found[name][how].append(max(median(each) for each in taken))
    finally:
        os.environ.clear()
        os.environ.update(before)
        for each in pools.values():
            each.close()
    return {name: {how: median(each) for how, each in of.items()} for name, of in found.items()}


def report(found: Mapping[str, Mapping[str, float]]) -> None:
    rows = []
    for name, of in found.items():
        adds = (of[SHARED] - of[OFF], of[STORE] - of[GLOO])
        rows.append([name, *(f"{1e6 * of[how]:.0f}" for how in HOW), *(f"{1e6 * each:+.0f}" for each in adds)])
    title = f"{RANKS} processes, 16 elements: µs per call of the slowest rank, and what the guard adds"
    print_table(title, ["call", *HOW, "memory adds", "store adds"], rows)


def measure(options: Namespace) -> dict[str, Any]:
    """Everything, as it goes to --json."""
    found = measured(5 if options.quick else 50, 1 if options.quick else 7, 16)
    report(found)
    budgets = [
        Budget(f"{name} under guard, shared memory, over 535dacf's", 1e6 * of[SHARED] / ONCE[name], 0.6, "x")
        for name, of in found.items()
    ]
    if options.markdown:
        print_markdown(["", *HOW], [[name, *(f"{1e6 * of[how]:.0f}" for how in HOW)] for name, of in found.items()])
    return judged({"calls": found}, budgets)


def main(arguments: Sequence[str] | None = None) -> None:
    run(options_of("What the guard costs.", markdown=True), measure, arguments)


if __name__ == "__main__":
    main()
