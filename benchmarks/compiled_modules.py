"""Compiled steps over the adaptors, beside torch's compiled ``fully_shard``: time, waits and memory of one step.

A part of ``benchmarks.compiled``. A step is forward, a local loss and backward; one unit per block on both sides. Ours
go into one graph (fullgraph=True); torch's ``fully_shard`` ends graphs where its units begin, and communicates between
them. All that is cut is compiled as inductor does it by default, and with its bucketing and reordering; where there are
more blocks than two, with buckets of two units at most, too. Waits are
counted in the code that inductor generates, and where that has none, in torch's profiler: each collective that torch
makes outside of graphs is waited for once. The profiler also adds up the memory of one step: the most that there is at
once beside what was there before. The floor is the module that nothing cuts, compiled, on this rank alone. Ratios are
medians of those of each turn.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.func import functional_call
from torch.profiler import ProfilerActivity, profile

import meshcomm as mc
from benchmarks.common import Budget, print_budgets, print_table, say, worst
from meshcomm.parallel import data_parallel, fsdp, fully_shard, tensor_parallel

AXIS = "ranks"
TORCHS, FLOOR = "torch's fully_shard", "compute alone"
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

    def __init__(self, name: str, way: str, options: Namespace, settings: Mapping[str, Any]) -> None:
        self.name, self.way = name, way
        self.params, run = MADE[name](options)
        whole = name != TORCHS
        self.run = torch.compile(run, fullgraph=whole, dynamic=False, options=dict(settings))
        self.samples: list[float] = []
        self.first = 0.0
        self.code = ""

    def begin(self, x: Tensor) -> None:
        """The first step, in which it is compiled."""
        start = time.perf_counter()
        _, codes = run_and_get_code(self.step, x)
        self.code = "\n".join(codes)
        self.first = time.perf_counter() - start

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
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model:
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(model, mesh=mesh)
    return model


PLAN = {"*.up": "column", "*.gate": "column", "*.down": "row", "*.norm": "replicated"}
MADE: dict[str, Callable[[Namespace], Any]] = {
    TORCHS: adapted(torchs),
    "fully_shard": adapted(lambda model: fully_shard(model, AXIS, grads="mean", units=["*"])),
    "fsdp.apply": applied,
    "data_parallel": adapted(lambda model: data_parallel(model, AXIS, grads="mean")),
    "tensor_parallel": adapted(lambda model: tensor_parallel(model, PLAN, axis=AXIS)),
    FLOOR: adapted(lambda model: model),
}
CUT = ("fully_shard", "fsdp.apply")


def counts_in(code: str) -> dict[str, int]:
    """Collectives in the code that inductor has generated by kind, and waits."""
    found = Counter(re.findall(r"_c10d_functional\.(\w+?)(?:_out|_)?\.default\(", code))
    return {kind.removesuffix("_into_tensor").removesuffix("_tensor"): count for kind, count in found.items()}


def seen(step: Callable[[], object]) -> tuple[int, int]:
    """Collectives that a step makes outside of graphs, and the most bytes that it has at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        with open(file.name, encoding="utf-8") as text:
            events = json.load(text)["traceEvents"]
    names = [event.get("name", "") for event in events]
    outside = sum(name.startswith("c10d::") and any(word in name for word in COLLECTIVES) for name in names)
    now = most = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return outside, most


def bounded(settings: Mapping[str, Any], options: Namespace) -> dict[str, Any]:
    """With buckets of at most two units."""
    most = 2.1e-6 * sum(p.nbytes for p in Block(options.width).parameters())
    kinds = "all_gathers", "reduce_scatters"
    return {**settings, **{f"bucket_{kind}_fx_bucket_size_determinator": lambda _: most for kind in kinds}}


def measure(options: Namespace, ways: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What one rank does: rows of the table, torch's first."""
    mesh = mc.make_mesh({AXIS: options.ranks})
    if options.blocks > 2:
        ways = {**ways, "two units": bounded(ways["overlapped"], options)}
    x = torch.randn(options.tokens, options.width, generator=torch.Generator().manual_seed(0))
    # Candidates share code, Sequential's forward, of which the compiler keeps a few versions by default.
    with mc.use_mesh(mesh), torch._dynamo.config.patch(recompile_limit=64):
        todo: list[Candidate] = []
        for name in MADE:
            several = name in (TORCHS, *CUT)  # the others' collectives are few: all ways are alike
            todo += [Candidate(name, way, options, ways[way]) for way in list(ways)[: None if several else 1]]
        for candidate in todo:
            candidate.begin(x)
            if mesh.rank == 0:
                say(f"{candidate.name}, {candidate.way}: {candidate.first:.1f} s")
        for _ in range(options.repeats):
            for candidate in todo:
                mc.barrier(AXIS)
                start = time.perf_counter()
                for _ in range(options.steps):
                    candidate.step(x)
                taken = torch.tensor((time.perf_counter() - start) / options.steps, dtype=torch.float64)
                candidate.samples.append(mc.all_reduce(taken, AXIS, "max").item())
        return [row_of(candidate, x) for candidate in todo]


def row_of(candidate: Candidate, x: Tensor) -> dict[str, Any]:
    outside, most = seen(lambda: candidate.step(x))
    waits = counts_in(candidate.code).get("wait", 0) or outside
    row = {name: getattr(candidate, name) for name in ("name", "way", "first", "samples")}
    return row | {"step": median(candidate.samples), "waits": waits, "peak": most}


def over(row: dict[str, Any], base: dict[str, Any]) -> float:
    """How many times as long a step takes: the median of the turns."""
    ratios: list[float] = [mine / its for mine, its in zip(row["samples"], base["samples"], strict=True)]
    return median(ratios)


def report(rows: list[dict[str, Any]]) -> list[Budget]:
    """A table, and how what is cut stands beside torch's, compiled in the same way."""
    base, floor = rows[0], rows[-1]
    print_table(
        "A step over modules, in one graph each but torch's",
        ["", "first call, s", "ms a step", "over torch's", "over compute", "waits", "peak, MiB", "over torch's"],
        [
            [
                f"{row['name']}, {row['way']}",
                f"{row['first']:.1f}",
                f"{1e3 * row['step']:.2f}",
                f"{over(row, base):.2f}",
                f"{over(row, floor):.2f}",
                str(row["waits"]),
                f"{row['peak'] / 2**20:.2f}",
                f"{row['peak'] / base['peak']:.2f}",
            ]
            for row in rows
        ],
    )
    torchs_rows = {row["way"]: row for row in rows if row["name"] == TORCHS}
    pairs = {f"{row['name']}, {row['way']}": (row, torchs_rows[row["way"]]) for row in rows if row["name"] in CUT}
    ratios = {
        "time": {name: over(mine, its) for name, (mine, its) in pairs.items()},
        "waits": {name: mine["waits"] / its["waits"] for name, (mine, its) in pairs.items()},
        "peak memory": {name: mine["peak"] / its["peak"] for name, (mine, its) in pairs.items()},
    }
    budgets = [worst(f"{what} over compiled torch's", ratio, 1.0) for what, ratio in ratios.items()]
    print_budgets(budgets)
    return budgets
