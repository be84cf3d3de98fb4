"""Checkpoints in the background: checkpoint.async_save beside torch.distributed.checkpoint's, and both saves that wait.

    python -m benchmarks.checkpoints              # 2 gloo processes, minutes
    python -m benchmarks.checkpoints --quick --json out.json

A module whose parameters are all the same on each rank, so that torch writes it without DTensors. "call" is what the
program waits for, "steps" what steps of training take beside the save over what they take alone, "written" from the
call until the disk has it. Candidates take turns; a sample is the slowest rank's, a number the median.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import meshcomm as mc
from benchmarks.common import options_of, print_table, run
from meshcomm.parallel import checkpoint

OURS, TORCH = "checkpoint.async_save", "dcp.async_save"
WAITS, TORCH_WAITS = "checkpoint.save", "dcp.save"


def saves(module: nn.Module, folder: str) -> dict[str, Callable[[int], Callable[[], object]]]:
    """By candidate: begin a save of this number, and what waits until it is on the disk."""

    def ours(at: int) -> Callable[[], object]:
        return checkpoint.async_save(f"{folder}/ours", module, step=at).wait

    def torchs(at: int) -> Callable[[], object]:
        future: Any = dcp.async_save(module.state_dict(), checkpoint_id=f"{folder}/torch-{at}")
        return future.result  # type: ignore[no-any-return]

    def waits(at: int) -> Callable[[], object]:
        checkpoint.save(f"{folder}/waits", module, step=at)
        return lambda: None

    def torch_waits(at: int) -> Callable[[], object]:
        dcp.save(module.state_dict(), checkpoint_id=f"{folder}/torch-waits-{at}")
        return lambda: None

    return {OURS: ours, TORCH: torchs, WAITS: waits, TORCH_WAITS: torch_waits}


def slowest(seconds: float) -> float:
    """Of all ranks."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def on_rank(folder: str, layers: int, width: int, steps: int, repeats: int) -> dict[str, dict[str, float]]:
    """By candidate: seconds of the call, of what the steps take longer, and until all is written; bytes."""
    warnings.simplefilter("ignore")
    mesh = mc.make_mesh({"ranks": -1})
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    rows = torch.randn(16, width)

    def train() -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            module(rows).square().mean().backward()
            module.zero_grad()
        return time.perf_counter() - begin

    taken: dict[str, dict[str, list[float]]] = {}
    with mc.use_mesh(mesh):
        candidates = saves(module, folder)
        for at in range(repeats + 1):
            for who in list(candidates)[:: -1 if at % 2 else 1]:
                dist.barrier()
                alone = train()
                dist.barrier()
                begin = time.perf_counter()
                wait = candidates[who](at)
                called = time.perf_counter() - begin
                beside = train()
                wait()
                done = time.perf_counter() - begin
                row = {"call": slowest(called), "steps": slowest(beside) / slowest(alone), "written": slowest(done)}
                for name, value in row.items() if at else ():  # the first turn makes folders, pools and buffers
                    taken.setdefault(who, {}).setdefault(name, []).append(value)
    size = sum(p.nbytes for p in module.parameters())
    return {who: {name: median(each) for name, each in of.items()} | {"bytes": size} for who, of in taken.items()}


def measure(options: Namespace) -> dict[str, Any]:
    layers, width, steps, repeats = (4, 512, 4, 3) if options.quick else (8, 1024, 8, 7)
    folder = tempfile.mkdtemp(dir=options.folder)
    try:
        given = (folder, layers, width, steps, repeats)
        found = mc.launch(on_rank, ranks=options.ranks, args=given, runtime="processes")[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    base = found[TORCH]
    rows = [
        [who, *(f"{1e3 * each[what]:.1f} ({each[what] / base[what]:.2f})" for what in ("call", "written")),
         f"{each['steps']:.2f}", f"{each['bytes'] / each['written'] / 2**20:.0f}"]
        for who, each in found.items()
    ]  # fmt: skip
    head = ["", "call ms (x dcp.async_save's)", "written ms", "steps beside it", "MiB/s"]
    print_table(f"{options.ranks} processes, {base['bytes'] / 2**20:.0f} MiB", head, rows)
    return {"checkpoints": found}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("Checkpoints in the background, beside torch's own.")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--folder", metavar="DIR", help="where to write; a temporary one by default")
    run(parser, measure, arguments)


if __name__ == "__main__":
    main()
