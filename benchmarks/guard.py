"""What the guard costs: small collectives between four processes of this machine, with and without it, in turn.

    python -m benchmarks.guard                  # about a minute
    python -m benchmarks.guard --quick          # some seconds, noisier
    python -m benchmarks.guard --json out.json

"off" is how everybody runs; without the guard its code is not called at all. "shared memory" is where ranks of one
machine write what they call, "store" where those of several machines do. Each number is the median over rounds of the
slowest rank's median, in microseconds per call.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch

import meshcomm as mc
from benchmarks.common import machine, print_table
from meshcomm.runtime.start.workers import WorkerPool

RANKS = 4
HOW = {
    "off": {},
    "guard, shared memory": {"MESHCOMM_GUARD": "1"},
    "off, gloo": {"MESHCOMM_SHARED_MEMORY": "0"},
    "guard, store": {"MESHCOMM_GUARD": "1", "MESHCOMM_SHARED_MEMORY": "0"},
}
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda x: mc.all_reduce(x, "dp"),
    "all_gather": lambda x: mc.all_gather(x, "dp"),
    "all_to_all": lambda x: mc.all_to_all(x, "dp", 0, 0),
    "later": lambda x: mc.all_reduce(x, "dp", async_op=True).wait(),
}


def times(name: str, repeats: int, numel: int) -> list[float]:
    """Seconds of each call on this rank."""
    x, call, found = torch.ones(numel), CALLS[name], []
    with mc.use_mesh(mc.make_mesh({"dp": -1})):
        for _ in range(repeats + 3):
            mc.barrier("dp")
            start = time.perf_counter()
            call(x)
            found.append(time.perf_counter() - start)
    return found[3:]


def measured(repeats: int, rounds: int, numel: int) -> dict[str, dict[str, float]]:
    """Call, then how: microseconds."""
    before = dict(os.environ)
    pools = {}
    try:
        for how, variables in HOW.items():
            os.environ.update(variables)
            pools[how] = WorkerPool(RANKS)
            pools[how].run(times, "all_reduce", 1, numel)  # starts them, with these variables
            os.environ.clear()
            os.environ.update(before)
        found: dict[str, dict[str, list[float]]] = {name: {how: [] for how in HOW} for name in CALLS}
        for _ in range(rounds):
            for name in CALLS:
                for how, pool in pools.items():
                    found[name][how].append(max(median(each) for each in pool.run(times, name, repeats, numel)))
    finally:
        os.environ.clear()
        os.environ.update(before)
        for pool in pools.values():
            pool.close()
    return {name: {how: 1e6 * median(each) for how, each in of.items()} for name, of in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="What the guard costs.")
    parser.add_argument("--quick", action="store_true", help="few calls: seconds, for CI")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there too, times in microseconds")
    options = parser.parse_args(arguments)
    found = measured(5 if options.quick else 50, 1 if options.quick else 7, 16)
    rows = []
    for name, of in found.items():
        shared, store = of["guard, shared memory"] - of["off"], of["guard, store"] - of["off, gloo"]
        rows.append([name, *(f"{of[how]:.0f}" for how in HOW), f"{shared:+.0f}", f"{store:+.0f}"])
    title = f"{RANKS} processes, 16 elements: µs per call of the slowest rank, and what the guard adds"
    print_table(title, ["call", *HOW, "memory adds", "store adds"], rows)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(), "calls": found}, file)


if __name__ == "__main__":
    main()
