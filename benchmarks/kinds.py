"""Collectives of other ops and dtypes beside torch's call: a section of ``benchmarks.overhead``.

"direct" is torch's call alone, as it takes the tensor: no backend divides by the number of ranks but NCCL, none says
what becomes of NaN in a maximum, and gloo takes no int16 and no bool. What we do for that is in our time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import meshcomm as mc
from benchmarks import peers
from benchmarks.common import MODES, RANKS, Case, Times, calls_of, print_table, take_turns

SHAPE = (8, 4)
OPS = {
    "sum": (torch.uint8, torch.int16, torch.complex64),
    "mean": (torch.float32, torch.bfloat16, torch.complex64),
    "max": (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool),
}
"""Each op, and of what: sums of other dtypes have rows of their own."""
MOVED = (torch.uint8, torch.int16, torch.bool, torch.complex64)
_THEIRS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


def pairs(mesh: mc.Mesh) -> dict[tuple[str, torch.dtype], tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]]:
    """By what is done and the dtype: ours, and torch's."""
    peer, found = peers.peers_of(RANKS, 0), {}
    for op, dtypes in OPS.items():
        for dtype in dtypes:
            found["all_reduce, " + op, dtype] = (
                lambda x, op=op: mc.all_reduce(x, "tp", op, mesh=mesh),
                lambda x, op=op: peers.all_reduce(x, lambda y: dist.all_reduce(y, _THEIRS[op])),
            )
            found["reduce_scatter, " + op, dtype] = (
                lambda x, op=op: mc.reduce_scatter(x, "tp", op=op, mesh=mesh),
                peer["reduce_scatter"][0],  # whose time is the same, whatever is reduced
            )
    for dtype in MOVED:
        found["all_gather", dtype] = lambda x: mc.all_gather(x, "tp", mesh=mesh), peer["all_gather"][0]
        found["all_to_all", dtype] = lambda x: mc.all_to_all(x, "tp", 0, 0, mesh=mesh), peer["all_to_all"][0]
        found["broadcast", dtype] = lambda x: mc.broadcast(x, "tp", mesh=mesh), peer["broadcast"][0]
    return found


def measure(mesh: mc.Mesh, repeats: int) -> dict[str, Times]:
    """One call without grad."""
    found = {}
    for (what, dtype), (ours, theirs) in pairs(mesh).items():
        cases = {
            "ours": Case(ours, lambda dtype=dtype: torch.ones(SHAPE).to(dtype), False),
            "direct": Case(theirs, lambda dtype=dtype: torch.ones(SHAPE).to(dtype), False),
        }
        found[f"{what} of {str(dtype).removeprefix('torch.')}"] = take_turns(calls_of(cases), repeats)
    show(found)
    return found


def show(found: Mapping[str, Times]) -> None:
    rows = []
    for name, times in found.items():
        ours, direct = times["ours"][MODES[0]], times["direct"][MODES[0]]
        rows.append([name, f"{1e6 * ours:.1f}", f"{1e6 * direct:.1f}", f"{ours / direct:.2f}"])
    print_table(f"Other ops and dtypes, {list(SHAPE)}, no grad", ["µs", "ours", "direct", "x"], rows)
