"""Compiled steps over the adaptors, beside torch's compiled ``fully_shard``: time, waits and memory of one step.

A part of ``benchmarks.compiled``. A step is forward, a local loss and backward; one unit per block on both sides. Ours
go into one graph (fullgraph=True), as inductor has it, bucketed, and bucketed and reordered; torch's ``fully_shard``
ends graphs where its units begin, and communicates between them. What a step waits for is counted, and its memory
added up, by torch's profiler in one step: each collective that torch makes outside of graphs is waited for once.
"""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.func import functional_call
from torch.profiler import ProfilerActivity, profile

import meshcomm as mc
from benchmarks.common import Budget, print_budgets, print_table, worst
from meshcomm.parallel import data_parallel, fsdp, fully_shard, tensor_parallel

AXIS = "ranks"
TORCHS = "torch's fully_shard, compiled"
COLLECTIVES = ("allgather", "reduce_scatter", "allreduce", "all_gather", "all_reduce", "alltoall")


class Block(nn.Module):
    """A gated MLP with a residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm(x)
        return x + self.down(F.silu(self.gate(inside)) * self.up(inside))  # type: ignore[no-any-return]


def stack(options: Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(options.width) for _ in range(options.blocks)))


def loss_of(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (run(x) - x).square().mean()


class Candidate:
    """A module, or shards, and the compiled function that has their loss."""

    def __init__(self, params: list[nn.Parameter] | list[Tensor], run: Callable[[Tensor], Tensor]) -> None:
        self.params, self.run = params, run
        self.samples: list[float] = []

    def step(self, x: Tensor) -> None:
        loss_of(self.run, x).backward()
        for p in self.params:
            p.grad = None


def applied(options: Namespace) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
    """``fsdp.apply``, block by block."""
    blocks = list(stack(options))
    cut = [fsdp.shard(dict(block.named_parameters()), AXIS) for block in blocks]

    def run(x: Tensor) -> Tensor:
        for block, (shards, tree) in zip(blocks, cut, strict=True):
            x = fsdp.apply(lambda p, x, block=block: functional_call(block, p, (x,)), shards, tree, x)
        return x

    return [shard for shards, _ in cut for shard in shards], run


def adapted(make: Callable[[nn.Sequential], nn.Module]) -> Callable[[Namespace], Any]:
    def made(options: Namespace) -> tuple[list[nn.Parameter], nn.Module]:
        model = make(stack(options))
        return list(model.parameters()), model

    return made


def torchs(model: nn.Sequential) -> nn.Module:
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model:
        torch_fully_shard(block, mesh=mesh)
    return torch_fully_shard(model, mesh=mesh)


PLAN = {"*.up": "column", "*.gate": "column", "*.down": "row", "*.norm": "replicated"}
OURS: dict[str, Callable[[Namespace], Any]] = {
    "fully_shard": adapted(lambda model: fully_shard(model, AXIS, grads="mean", units=["*"])),
    "fsdp.apply": applied,
    "data_parallel": adapted(lambda model: data_parallel(model, AXIS, grads="mean")),
    "tensor_parallel": adapted(lambda model: tensor_parallel(model, PLAN, axis=AXIS)),
}


def seen(step: Callable[[], object]) -> tuple[int, int]:
    """Waits of a step, and the most bytes that it has at once beside what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        with open(file.name, encoding="utf-8") as text:
            events = json.load(text)["traceEvents"]
    names = [event.get("name", "") for event in events]
    outside = sum(name.startswith("c10d::") and any(word in name for word in COLLECTIVES) for name in names)
    inside = names.count("_c10d_functional::wait_tensor")
    now = most = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return inside or outside, most


def measure(options: Namespace, ways: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What one rank does: rows of the table, torch's first."""
    mesh = mc.make_mesh({AXIS: options.ranks})
    x = torch.randn(options.tokens, options.width, generator=torch.Generator().manual_seed(0))
    with mc.use_mesh(mesh):
        todo: dict[str, Candidate] = {}
        params, model = adapted(torchs)(options)
        todo[TORCHS] = Candidate(params, torch.compile(model, dynamic=False, options=dict(ways["compiled"])))
        for name, make in OURS.items():
            for way, settings in ways.items():
                params, run = make(options)
                compiled = torch.compile(run, fullgraph=True, dynamic=False, options=dict(settings))
                todo[f"{name}, {way}"] = Candidate(params, compiled)
        for candidate in todo.values():
            candidate.step(x)  # compiles
        for _ in range(options.repeats):
            for candidate in todo.values():
                mc.barrier(AXIS)
                start = time.perf_counter()
                for _ in range(options.steps):
                    candidate.step(x)
                taken = torch.tensor((time.perf_counter() - start) / options.steps, dtype=torch.float64)
                candidate.samples.append(mc.all_reduce(taken, AXIS, "max").item())
        rows = []
        for name, candidate in todo.items():
            waits, most = seen(lambda candidate=candidate: candidate.step(x))
            rows.append({"name": name, "step": median(candidate.samples), "waits": waits, "peak": most})
    return rows


def report(rows: list[dict[str, Any]]) -> list[Budget]:
    base = rows[0]
    print_table(
        "A step over modules, in one graph each but torch's",
        ["", "ms a step", "x", "waits", "peak, MiB", "x"],
        [
            [
                row["name"],
                f"{1e3 * row['step']:.2f}",
                f"{row['step'] / base['step']:.2f}",
                str(row["waits"]),
                f"{row['peak'] / 2**20:.2f}",
                f"{row['peak'] / base['peak']:.2f}",
            ]
            for row in rows
        ],
    )
    cut = [row for row in rows[1:] if row["name"].startswith(("fully_shard", "fsdp.apply"))]
    budgets = [
        worst(
            f"{what} of fully_shard and fsdp.apply over compiled torch's, the best way of each",
            {
                name: min(row[key] / base[key] for row in cut if row["name"].startswith(name))
                for name in ("fully_shard", "fsdp.apply")
            },
            1.0,
        )
        for what, key in (("time", "step"), ("waits", "waits"), ("peak memory", "peak"))
    ]
    print_budgets(budgets)
    return budgets
