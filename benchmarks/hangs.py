"""How long the judge of hangs takes, by events and by ranks: one run, no assertions.

    python -m benchmarks.hangs                  # some seconds
    python -m benchmarks.hangs --quick
    python -m benchmarks.hangs --json out.json

Logs are made, not run: ranks of a mesh of two axes, whose calls go over one and the other, a quarter of them waited
for later, and messages to the next rank. Nothing is wrong with them, so that all of it is judged: agreement, the run on
paper, and the run with every call blocking. Budgets: 100,000 calls in a second; 256 ranks of 1,000 calls in ten.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from benchmarks.common import as_json, options_of, print_budgets, print_table, run, timed
from meshcomm.verifying.hangs.log import Group, Issue, Log, Message
from meshcomm.verifying.hangs.proof import judged

SIZES = ((100, 1000, 1.0), (256, 1000, 10.0))
"""Ranks, calls of each, and seconds that it may take."""


def logs_of(ranks: int, calls: int) -> dict[int, Log]:
    """Of ranks on a mesh with rows and columns."""
    width = max(w for w in range(1, ranks) if ranks % w == 0 and w * w <= ranks)
    rows = [tuple(range(i, i + width)) for i in range(0, ranks, width)]
    columns = [tuple(range(i, ranks, width)) for i in range(width)]
    found = {}
    for rank in range(ranks):
        axes = Group("tp", rows[rank // width], "tp"), Group("dp", columns[rank % width], "dp")
        around = Group("all", tuple(range(ranks)), "all")
        log = found[rank] = Log(rank)
        later = []
        for k in range(calls):
            if k % 10 == 9:
                to, source = Message((rank + 1) % ranks, 0, "f32[8]"), Message((rank - 1) % ranks, 0, "f32[8]")
                log.call(Issue(around, "exchange", "", "", "train.py:3", sent=(to,), wanted=(source,), messages=True))
                continue
            called = "all_reduce f32[8] (op='sum')"
            number = log.begin(Issue(axes[k % 2], "all_reduce", f"key {k % 7}", called, f"train.py:{k % 50}"))
            if k % 4:
                log.wait(number)
            else:
                later.append(number)
            if k % 20 == 19:
                for each in later:
                    log.wait(each)
                later = []
    return found


def seconds_of(logs: dict[int, Log]) -> float:
    """Of this process, to judge them."""
    start = time.process_time()
    proof = judged(logs)
    assert proof.ok, proof
    return time.process_time() - start


def measure(options: Namespace) -> dict[str, Any]:
    """Everything, as it goes to --json."""
    rows, budgets = [], []
    for ranks, calls, limit in SIZES:
        few = max(ranks // 10, 10) if options.quick else ranks
        logs = logs_of(few, calls)
        best = min(seconds_of(logs) for _ in range(1 if options.quick else 3))
        rows.append([str(few), str(calls), f"{best:.2f}", f"{1e6 * best / (few * calls):.1f}"])
        budgets.append(timed(f"{few * calls} calls of {few} ranks", best, limit, "s"))
    print_table("Is there a hang", ["ranks", "calls of each", "seconds", "µs per call"], rows)
    print_budgets(budgets)
    return {"budgets": as_json(budgets)}


def main(arguments: Sequence[str] | None = None) -> None:
    run(options_of("How long the judge of hangs takes."), measure, arguments)


if __name__ == "__main__":
    main()
