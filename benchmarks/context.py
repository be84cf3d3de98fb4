"""Attention over a sequence that is cut: context_attention beside a gather of all keys and a masked attention.

    python -m benchmarks.context                  # 2 and 4 gloo processes, two minutes
    python -m benchmarks.context --ranks 2 --lengths 4096 --quick --json out.json

Forward and backward of a causal attention. The peer gathers keys and values by ``mc.all_gather``, whose backward is a
reduce_scatter, and hands torch's scaled_dot_product_attention the rows of the mask; its rows are contiguous, as in a
program without an order. The floor is what one rank has to compute: its share of the products, by the kernel.

Candidates take turns; a sample is the slowest rank's, a number the median. Peaks are of the memory that torch gives out
in a step.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it
os.environ.setdefault("MESHCOMM_REUSE_MIB", "0")  # what is kept for reuse would count

import torch
import torch.nn.functional as F
from torch import Tensor

import meshcomm as mc
from benchmarks.common import Budget, judged, options_by_size, print_by_size, run, steps_in_turns
from benchmarks.tracked import Tracked
from meshcomm import parallel

HEADS, KEYS, WIDTH = 8, 4, 64
PEER, FLOOR = "all_gather, masked attention", "a rank's share alone (floor)"
RING, CONTIGUOUS, KEPT, HEADS_EXCHANGED = "ring, zigzag", "ring, contiguous", "ring, keys kept", "heads exchanged"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def gathered(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = mc.all_gather((k, v), "cp", 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def alone(q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
    """As many products: half of the queries by all keys."""
    keys, values = (x.repeat(1, 1, max(1, n // 2), 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def candidates(length: int) -> dict[str, Attention]:
    mesh = mc.current_mesh()
    assert mesh is not None
    n, rank = mesh.size, mesh.rank
    rows = torch.arange(length).chunk(n)[rank]
    mask = rows[:, None] >= torch.arange(length)
    ours = partial(parallel.context_attention, axis="cp")
    return {
        RING: ours,
        CONTIGUOUS: partial(ours, order="contiguous"),
        KEPT: partial(ours, regather=False),
        HEADS_EXCHANGED: partial(parallel.context_attention, heads_axis="cp"),
        PEER: partial(gathered, mask=mask),
        FLOOR: partial(alone, n=n),
    }


def step_of(attention: Attention, mine: Sequence[Tensor], g: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(attention(*mine), mine, g)


def on_gloo(lengths: Sequence[int], repeats: int) -> dict[int, dict[str, dict[str, float]]]:
    """By length, of each candidate: seconds and bytes."""
    torch.set_num_threads(1)
    found: dict[int, dict[str, dict[str, float]]] = {}
    mesh = mc.make_mesh({"cp": -1})
    with mc.use_mesh(mesh):
        for length in lengths:
            own = length // mesh.size
            mine = [torch.randn(1, heads, own, WIDTH, requires_grad=True) for heads in (HEADS, KEYS, KEYS)]
            steps = {who: step_of(fn, mine, torch.ones(1, HEADS, own, WIDTH)) for who, fn in candidates(length).items()}
            peaks = {}
            for who, step in steps.items():
                step()
                with Tracked() as seen:
                    step()
                peaks[who] = seen.peak
            seconds = steps_in_turns(steps, repeats)
            found[length] = {who: {"seconds": seconds[who], "peak": peaks[who]} for who in steps}
    return found


def report(found: dict[int, dict[int, dict[str, dict[str, float]]]]) -> list[Budget]:
    budgets = []
    for ranks, lengths in found.items():
        print_by_size(ranks, {f"{length} places": each for length, each in lengths.items()}, PEER)
        for length, each in lengths.items():
            ratio = each[RING]["seconds"] / each[PEER]["seconds"]
            budgets.append(Budget(f"ring over gather and masked attention, {ranks} ranks, {length}", ratio, 0.7, "x"))
    return budgets


def measure(options: Namespace) -> dict[str, Any]:
    lengths = options.lengths or ([512] if options.quick else [2048, 4096])
    repeats = options.repeats or (3 if options.quick else 15)
    found = {ranks: mc.launch(on_gloo, ranks, (lengths, repeats), runtime="processes")[0] for ranks in options.ranks}
    return judged({"gloo": found}, report(found))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_by_size("Attention over a sequence that is cut.", "--lengths", "of the whole sequence (2048 4096)")
    run(parser, measure, arguments)


if __name__ == "__main__":
    main()
