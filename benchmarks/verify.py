"""What a proof costs: mc.verify of a program that passes, beside one run of it on the same mesh in this process.

    python -m benchmarks.verify             # a tensor parallel block of some 20 ms
    python -m benchmarks.verify --quick     # a smaller one, fewer repeats
    python -m benchmarks.verify --json out.json

The two take turns in one run; the least and the median of the ratios of processor time count. The budget is 25 of one
forward run, all derivatives and the orders of the ranks included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import meshcomm as mc

BUDGET = 25.0


def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """An MLP, its rows over dp and its hidden width over tp."""
    up, down = mc.pvary((up, down), "dp")
    return x + mc.all_reduce(torch.tanh(mc.pvary(x, "tp") @ up) @ down, "tp")


SPECS = ("(dp b) d", "d (tp f)", "(tp f) d")


def seconds(fn: Callable[[], object]) -> float:
    """How much of the processor one call takes: beside other programs the clock says little."""
    began = time.process_time()
    fn()
    return time.process_time() - began


def measured(rows: int, width: int, repeats: int) -> tuple[list[float], float]:
    """The ratios, and how long a run took at least."""
    shape = {"dp": 2, "tp": 2}
    generator = torch.Generator().manual_seed(0)
    x, up, down = (
        torch.randn(size, generator=generator, dtype=torch.float64) / size[1] ** 0.5
        for size in ((rows, width), (width, 4 * width), (4 * width, width))
    )
    run = mc.shard_map(block, mesh=mc.make_mesh(shape), in_specs=SPECS, out_specs=SPECS[0], check_vma=False)

    def proof() -> None:
        mc.verify(block, x, up, down, in_specs=SPECS, out_specs=SPECS[0], meshes=[shape]).check()

    proof()
    ratios, least = [], float("inf")
    for _ in range(repeats):
        with torch.no_grad():
            one = statistics.median(seconds(lambda: run(x, up, down)) for _ in range(3))
        least = min(least, one)
        ratios.append(seconds(proof) / one)
    return ratios, least


def main(argv: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    ratios, least = measured(*((256, 128, 3) if given.quick else (768, 256, 5)))
    found = {"least": min(ratios), "median": statistics.median(ratios), "budget": BUDGET}
    print(f"one run {1e3 * least:.1f} ms; verify / run: {', '.join(f'{name} {n:.1f}' for name, n in found.items())}")
    if given.json is not None:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
