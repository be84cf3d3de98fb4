"""Experts that are cut along an axis, beside the same written by hand over ``dist.all_to_all_single``.

    python -m benchmarks.experts                                   # 2 and 4 gloo processes, two minutes
    python -m benchmarks.experts --ranks 2 --tokens 1024 --quick --json out.json

Forward and backward of a mixture of 8 experts, of which each token has two; all have the same function of own rows.
The peer is what a program has without a library: counts sent and read, rows sorted by expert, sent, sorted by own
expert, and back, each exchange a node of autograd of two lines. ``dropless`` is ``parallel.experts``, ``with room`` the
same with a capacity that drops nothing. The floor is what the experts compute, without any exchange.

Candidates take turns; a sample is the slowest rank's, a number the median. Peaks are of the memory that torch gives out
in a step. Bytes are what rank 0 sends, by a trace, beside what tokens and counts say that it must.
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
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

import meshcomm as mc
from benchmarks.common import Budget, judged, options_by_size, print_by_size, run, steps_in_turns
from benchmarks.tracked import Tracked
from meshcomm import parallel

COUNT, CHOSEN, HIDDEN = 8, 2, 2
OURS, ROOM, PEER, FLOOR = "dropless", "with room", "all_to_all_single by hand", "the experts alone (floor)"

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def own(rows: Tensor, counts: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return parallel.grouped_matmul(torch.relu(parallel.grouped_matmul(rows, up, counts)), down, counts)


class Exchange(Function):
    """Rows to where they belong; their gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.lengths = receive, send
        y = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(y, rows.contiguous(), receive, send)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        send, receive = ctx.lengths
        y = g.new_empty(sum(receive), g.shape[1])
        dist.all_to_all_single(y, g.contiguous(), receive, send)
        return y, None, None


def exchanged(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    found: Tensor = Exchange.apply(rows, send, receive)  # type: ignore[no-untyped-call]
    return found


def by_hand(x: Tensor, choice: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    n = dist.get_world_size()
    flat = choice.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=COUNT)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    send, receive = counts.view(n, -1).sum(1).tolist(), theirs.view(n, -1).sum(1).tolist()
    rows = exchanged(x[order // CHOSEN], send, receive)
    by_expert = torch.arange(COUNT // n).repeat(n).repeat_interleave(theirs).argsort(stable=True)
    found = own(rows[by_expert], theirs.view(n, -1).sum(0), up, down)
    back = exchanged(found[by_expert.argsort()], receive, send)
    weighted = back * weight.flatten()[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, order // CHOSEN, weighted)


def by_library(
    x: Tensor, choice: Tensor, weight: Tensor, up: Tensor, down: Tensor, capacity: int | None = None
) -> Tensor:
    fn = partial(own, up=up, down=down)
    return parallel.experts(x, choice, weight, fn, axis="ep", count=COUNT, capacity=capacity)


def alone(x: Tensor, choice: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """As many rows, evenly for own experts."""
    rows = x.repeat(CHOSEN, 1)
    counts = torch.full((up.shape[0],), len(rows) // up.shape[0])
    counts[-1] += len(rows) - int(counts.sum())
    return own(rows, counts, up, down)


def on_gloo(sizes: Sequence[tuple[int, int]], repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """By tokens and width, of each candidate: seconds and bytes."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, float]]] = {}
    mesh = mc.make_mesh({"ep": -1})
    with mc.use_mesh(mesh):
        for tokens, width in sizes:
            given = inputs(tokens, width, mesh)
            layers: dict[str, Layer] = {
                OURS: by_library,
                ROOM: partial(by_library, capacity=tokens * CHOSEN),
                PEER: by_hand,
                FLOOR: alone,
            }
            torch.testing.assert_close(by_library(*given), by_hand(*given))
            steps = {who: step_of(layer, given) for who, layer in layers.items()}
            peaks = {}
            for who, step in steps.items():
                step()
                with Tracked() as seen:
                    step()
                peaks[who] = seen.peak
            seconds = steps_in_turns(steps, repeats)
            with mc.trace() as trace:
                steps[OURS]()
            sent = sum(event.wire for event in trace.events)
            found[f"{tokens} x {width}"] = {
                who: {"seconds": seconds[who], "peak": peaks[who], "sent": sent, "due": due(given, mesh)}
                for who in steps
            }
    return found


def inputs(tokens: int, width: int, mesh: mc.Mesh) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator, mine = torch.Generator().manual_seed(mesh.rank), COUNT // mesh.size
    x = torch.randn(tokens, width, generator=generator, requires_grad=True)
    weight, choice = torch.randn(tokens, COUNT, generator=generator).softmax(-1).topk(CHOSEN)
    up, down = torch.randn(mine, width, HIDDEN * width), torch.randn(mine, HIDDEN * width, width)
    return x, choice, weight.requires_grad_(), up.requires_grad_(), down.requires_grad_()


def due(given: Sequence[Tensor], mesh: mc.Mesh) -> int:
    """Bytes that a rank has to move, as traces count them: the more of what it sends and what it gets, of rows there
    and back, twice; and the counts.
    """
    x, choice = given[:2]
    counts = torch.bincount(choice.flatten(), minlength=COUNT).view(mesh.size, -1)
    theirs = mc.all_to_all(counts, "ep", 0, 0)
    row = x.shape[1] * x.element_size()
    others = [each.sum() - each[mesh.rank].sum() for each in (counts, theirs)]
    numbers = (mesh.size - 1) * COUNT // mesh.size * counts.element_size()
    return int(4 * max(others) * row + numbers)


def step_of(layer: Layer, given: Sequence[Tensor]) -> Callable[[], object]:
    leaves = [x for x in given if x.requires_grad]

    def step() -> object:
        y = layer(*given)
        return torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)

    return step


def report(found: dict[int, dict[str, dict[str, dict[str, float]]]]) -> list[Budget]:
    budgets = []
    for ranks, sizes in found.items():
        print_by_size(ranks, sizes, PEER)
        for size, each in sizes.items():
            ratio = each[OURS]["seconds"] / each[PEER]["seconds"]
            budgets.append(Budget(f"experts over all_to_all_single by hand, {ranks} ranks, {size}", ratio, 1.0, "x"))
            sent = each[OURS]["sent"] / each[OURS]["due"]
            budgets.append(Budget(f"bytes sent over what has to be, {ranks} ranks, {size}", sent, 1.0, "x"))
    return budgets


def measure(options: Namespace) -> dict[str, Any]:
    tokens = options.tokens or ([256] if options.quick else [256, 4096])
    sizes = [(each, 64 if options.quick else 256) for each in tokens]
    repeats = options.repeats or (3 if options.quick else 15)
    found = {ranks: mc.launch(on_gloo, ranks, (sizes, repeats), runtime="processes")[0] for ranks in options.ranks}
    return judged({"gloo": found}, report(found))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_by_size("Experts that are cut along an axis.", "--tokens", "of each rank (256 4096)")
    run(parser, measure, arguments)


if __name__ == "__main__":
    main()
