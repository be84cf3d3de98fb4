"""AdamW whose states are cut: shard_optimizer beside torch's ZeroRedundancyOptimizer, and fully_shard beside both.

    python -m benchmarks.optimizers               # 2 and 4 gloo processes, a minute
    python -m benchmarks.optimizers --ranks 2 --quick --json out.json

"step" is the optimizer's alone, "training" forward, backward and step. fully_shard(regather=False) sums gradients by a
reduce_scatter and gathers parameters once, where the others gather after an all_reduce: 2/3 of the bytes.

Candidates take turns; a sample is the slowest rank's, a number the median. Bytes of the states are one rank's.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import meshcomm as mc
from benchmarks.common import options_of, print_table, run, steps_in_turns
from benchmarks.train_step import Size, Stack
from meshcomm.parallel import data_parallel, fully_shard, shard_optimizer

ZERO, DDP = "DistributedDataParallel, ZeroRedundancyOptimizer", "DistributedDataParallel, AdamW"
CUT, WHOLE, FSDP = "data_parallel, shard_optimizer", "data_parallel, AdamW", "fully_shard(regather=False), AdamW"


def made(who: str, size: Size) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Stack(size)
    if who in (ZERO, DDP):
        model = DistributedDataParallel(model)
    elif who == FSDP:
        model = fully_shard(model, "ranks", grads="mean", units=["blocks.*"], regather=False)
    else:
        model = data_parallel(model, "ranks", grads="mean")
    if who == ZERO:
        return model, ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-3)  # type: ignore[no-untyped-call]
    adam = AdamW(model.parameters(), lr=1e-3)
    return model, shard_optimizer(adam, "ranks") if who == CUT else adam


def states_of(optimizer: Optimizer) -> int:
    """Bytes of the states that this rank has."""
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return sum(x.nbytes for state in inner.state.values() for x in state.values() if isinstance(x, Tensor))


def on_rank(size: Size, repeats: int) -> dict[str, dict[str, float]]:
    """By candidate: seconds of a step and of training, bytes of states."""
    mesh = mc.make_mesh({"ranks": -1})
    x = torch.randn(size.batch, size.tokens, size.width, generator=torch.Generator().manual_seed(mesh.rank))
    steps: dict[str, Callable[[], object]] = {}
    training: dict[str, Callable[[], object]] = {}
    kept: dict[str, Optimizer] = {}
    with mc.use_mesh(mesh):
        for who in (ZERO, DDP, CUT, WHOLE, FSDP):
            model, optimizer = made(who, size)

            def train(model: nn.Module = model, optimizer: Optimizer = optimizer) -> None:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

            train()
            steps[who], training[who], kept[who] = optimizer.step, train, optimizer
        step = steps_in_turns(steps, repeats)
        whole = steps_in_turns(training, repeats)
    return {who: {"step": step[who], "training": whole[who], "states": states_of(kept[who])} for who in kept}


def measure(options: Namespace) -> dict[str, Any]:
    size = Size(2, 64, 16, 2) if options.quick else Size(4, 256, 64, 4)
    found = {}
    for ranks in options.ranks:
        repeats = 3 if options.quick else 15
        found[ranks] = mc.launch(on_rank, ranks=ranks, args=(size, repeats), runtime="processes")[0]
        base = found[ranks][ZERO]
        rows = [
            [who, *(f"{1e3 * each[what]:.1f} ({each[what] / base[what]:.2f})" for what in ("step", "training")),
             f"{each['states'] / 2**20:.2f}"]
            for who, each in found[ranks].items()
        ]  # fmt: skip
        head = ["", "step ms (x ZeRO's)", "training ms (x ZeRO's)", "states MiB"]
        print_table(f"AdamW on gloo, {ranks} processes: {size}", head, rows)
    return {"optimizers": found}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("Steps of optimizers whose states are cut, beside torch's own.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="numbers of processes")
    run(parser, measure, arguments)


if __name__ == "__main__":
    main()
