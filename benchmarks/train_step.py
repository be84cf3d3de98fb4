"""A training step beside torch's own: data parallel, fully sharded, tensor parallel. One run, ratios, no assertions.

    python -m benchmarks.train_step                    # some minutes
    python -m benchmarks.train_step --quick            # smaller and noisier
    python -m benchmarks.train_step --markdown         # the tables of docs/benchmarks.md too
    python -m benchmarks.train_step --json out.json --plot out.png

First the host's part alone, on torch's fake backend (8 ranks, of which this process is rank 0, one thread): time of
this process per step, and of one step the most memory and the collectives. fully_shard has one unit per block on both
sides. "raw collectives" is a floor: the step of one rank and the same collectives as bare C++ calls of the process
group; "bare hooks" is one of fully sharded blocks: the least of hooks and nodes that they need in Python, without a
check (``benchmarks.bare_fsdp``), and "of units" the same without hooks of what autograd saves, which is less and not
right everywhere. Then steps on gloo, on 2 and on 4 processes of this machine, where a number is the
median over the steps of the slowest rank's time. The candidates take turns. There "one rank" is a floor: each process
computes its step alone, at the same time as the others; of tensor parallelism the whole layers, which is no floor but
what it saves. "copies and sums" is the floor with what each rank has to move, in memory of its own and without waiting
for anybody.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import meshcomm as mc
from benchmarks import bare_fsdp, plots
from benchmarks.common import (
    RANKS,
    Budget,
    as_json,
    machine,
    options_of,
    print_budgets,
    print_machine,
    print_markdown,
    print_table,
    steps_in_turns,
    write,
)
from benchmarks.tracked import Tracked
from meshcomm.parallel import data_parallel, fully_shard, tensor_parallel

PLAIN = "one rank"
FLOOR, BARE, MOVED = "raw collectives (floor)", "bare hooks (floor)", "one rank, copies and sums (floor)"
EMPTIED = "bare hooks of units (floor)"
OURS = "meshcomm"
DDP, FSDP, TP = "data parallel", "fully sharded", "tensor parallel"
TORCHS = {DDP: "DistributedDataParallel", FSDP: "fully_shard", TP: "parallelize_module"}

Step = Callable[[], object]


class Size(NamedTuple):
    """Of a model and its batch."""

    layers: int
    width: int
    tokens: int
    batch: int

    def __str__(self) -> str:
        return f"{self.layers} layers, width {self.width}, {self.batch} x {self.tokens} tokens"


# ------------------------------------------------------------------------------------------------------- the models


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = 4
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """Blocks one after another, with an optimiser's worth of parameters around them."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first = nn.Linear(size.width, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Mlp(nn.Module):
    """What tensor parallelism cuts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


def mlps(size: Size) -> nn.Sequential:
    return nn.Sequential(*(Mlp(size.width) for _ in range(size.layers)))


# ------------------------------------------------------------------------------------------------------ the candidates


def our_ddp(size: Size) -> nn.Module:
    return data_parallel(Stack(size), "ranks", grads="mean")


def torch_ddp(size: Size) -> nn.Module:
    return DistributedDataParallel(Stack(size))


def our_fsdp(size: Size) -> nn.Module:
    return fully_shard(Stack(size), "ranks", grads="mean", units=["blocks.*"])


def torch_fsdp(size: Size) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Stack(size)
    for block in model.blocks:
        torch_fully_shard(block, mesh=mesh)
    return torch_fully_shard(model, mesh=mesh)


def our_tp(size: Size) -> nn.Module:
    plan = {"*.up.*": "column", "*.down.*": "row"}
    return tensor_parallel(mlps(size), plan, axis="ranks")  # type: ignore[arg-type]


def torch_tp(size: Size) -> nn.Module:
    model = mlps(size)
    plan = {f"{i}.up": ColwiseParallel() for i in range(size.layers)}
    plan |= {f"{i}.down": RowwiseParallel() for i in range(size.layers)}  # type: ignore[dict-item]
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


MAKERS: dict[tuple[str, str], Callable[[Size], nn.Module]] = {
    (DDP, PLAIN): Stack,
    (DDP, OURS): our_ddp,
    (DDP, TORCHS[DDP]): torch_ddp,
    (FSDP, PLAIN): Stack,
    (FSDP, OURS): our_fsdp,
    (FSDP, TORCHS[FSDP]): torch_fsdp,
    (TP, PLAIN): mlps,
    (TP, OURS): our_tp,
    (TP, TORCHS[TP]): torch_tp,
}


def step_of(make: Callable[[Size], nn.Module], size: Size, seed: int) -> tuple[Step, list[nn.Parameter]]:
    """Forward and backward."""
    torch.manual_seed(0)
    model = make(size)
    shape = (size.batch, size.tokens, size.width) if size.tokens else (size.batch, size.width)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    parameters = list(model.parameters())

    def step() -> float:
        loss = model(x).square().mean()
        loss.backward()
        for parameter in parameters:
            parameter.grad = None
        return loss.item()

    return step, parameters


def raw_step(kind: str, size: Size) -> Step:
    """One rank's step, and the collectives of such a step as C++ calls, of as many bytes."""
    step, parameters = step_of(MAKERS[kind, PLAIN], size, 0)
    group: Any = dist.group.WORLD
    options = dist.AllreduceOptions()
    shard = -(-sum(p.numel() for p in parameters) // RANKS // (size.layers + 1))
    mine, whole, x = torch.zeros(shard), torch.zeros(shard * RANKS), torch.zeros(size.batch, size.width)

    def with_collectives() -> None:
        step()
        for _ in range(size.layers):
            if kind == FSDP:
                group._allgather_base(torch.empty_like(whole), mine).wait()
                group._allgather_base(torch.empty_like(whole), mine).wait()
                group._reduce_scatter_base(torch.empty_like(mine), whole, dist.ReduceScatterOptions()).wait()
            else:
                group.allreduce([x.clone()], options).wait()
                group.allreduce([x.clone()], options).wait()

    return with_collectives


def bare_step(size: Size, kind: type[bare_fsdp.Unit] = bare_fsdp.Unit) -> Step:
    """A fully sharded step with as little around it as can be."""
    torch.manual_seed(0)
    model = Stack(size)
    units = bare_fsdp.sharded(model, list(model.blocks), kind)
    x = torch.randn(size.batch, size.tokens, size.width)

    def step() -> None:
        with bare_fsdp.saved_by_place() if kind is bare_fsdp.Unit else nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        for unit in units:
            for parameter in unit.params:
                parameter.grad = None

    return step


def moved_step(kind: str, size: Size, ranks: int) -> Step:
    """One rank's step, and what each rank of so many has to move of equal units: the parts of a sharded one are put
    together, once forward and once backward; of gradients a rank adds up its part of all, and has those of the others.
    """
    step, parameters = step_of(MAKERS[kind, PLAIN], size, 0)
    units = size.layers + 1
    shard = -(-sum(p.numel() for p in parameters) // ranks // units)
    parts = [[torch.zeros(shard) for _ in range(ranks)] for _ in range(units)]
    gradients = [[torch.zeros(shard) for _ in range(ranks)] for _ in range(units)]
    whole, mine = torch.zeros(ranks, shard), torch.zeros(shard)

    def put_together(rows: Sequence[Tensor]) -> None:
        for into, row in zip(whole, rows, strict=True):
            into.copy_(row)

    def moved() -> None:
        step()
        for each, summed in zip(parts, gradients, strict=True):
            for _ in range(2 if kind == FSDP else 1):
                put_together(each)
            torch.add(summed[0], summed[1], out=mine)
            for row in summed[2:]:
                mine.add_(row)

    return moved


# --------------------------------------------------------------------------------------------- the host's part alone


def tracked_step(make: Callable[[Size], nn.Module], size: Size) -> dict[str, Any]:
    """Memory and collectives of a step after two others."""
    with Tracked() as seen:
        step, kept = step_of(make, size, 0)
        step()
        step()
        gc.collect()
        seen.restart()
        at_rest = seen.now
        step()
        found = {"peak": seen.peak, "at_rest": at_rest, "collectives": dict(seen.collectives), "bytes": seen.bytes}
    del kept
    return found


def on_fake(sizes: Mapping[str, Size], repeats: int) -> dict[str, dict[str, dict[str, Any]]]:
    """By parallelism and candidate: seconds per step, memory, collectives."""
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with mc.use_mesh(mc.make_mesh({"ranks": RANKS})):
        for kind, size in sizes.items():
            makers = {who: make for (what, who), make in MAKERS.items() if what == kind}
            found[kind] = {who: tracked_step(make, size) for who, make in makers.items()}
            kept = {who: step_of(make, size, 0) for who, make in makers.items()}
            floors = {FLOOR: raw_step(kind, size)}
            if kind == FSDP:
                floors |= {BARE: bare_step(size), EMPTIED: bare_step(size, bare_fsdp.Emptied)}
            steps = floors | {who: step for who, (step, _) in kept.items()}
            taken: dict[str, list[float]] = {who: [] for who in steps}
            for number in range(repeats + 2):
                for who, step in steps.items():
                    start = time.process_time()
                    step()
                    if number >= 2:
                        taken[who].append(time.process_time() - start)
            for who in floors:
                found[kind][who] = {"peak": 0, "at_rest": 0, "collectives": {}, "bytes": 0}
            for who, each in taken.items():
                found[kind][who]["seconds"] = median(each)
    mc.shutdown()
    dist.destroy_process_group()
    return found


# ------------------------------------------------------------------------------------------------------- on processes


def on_gloo(sizes: Mapping[str, Size], repeats: int) -> dict[str, dict[str, float]]:
    """One rank's part; seconds per step of the slowest rank."""
    mesh = mc.make_mesh({"ranks": -1})
    found: dict[str, dict[str, float]] = {}
    with mc.use_mesh(mesh):
        for kind, size in sizes.items():
            makers = {who: make for (what, who), make in MAKERS.items() if what == kind}
            seed = 0 if kind == TP else mesh.rank
            kept = {who: step_of(make, size, seed) for who, make in makers.items()}
            floors = {} if kind == TP else {MOVED: moved_step(kind, size, mesh.size)}
            found[kind] = steps_in_turns({who: step for who, (step, _) in kept.items()} | floors, repeats)
    return found


# --------------------------------------------------------------------------------------------------------- results


def budgets_of(fake: Mapping[str, Any], gloo: Mapping[int, Any]) -> list[Budget]:
    """Those of the design that this program can judge."""
    budgets = []
    if FSDP in fake:
        plain, ours, theirs = (fake[FSDP][who]["seconds"] for who in (PLAIN, OURS, TORCHS[FSDP]))
        ratio = (ours - plain) / (theirs - plain)
        budgets.append(Budget("fully sharded, fake: time over one rank's, over torch's", ratio, 0.2, "x"))
        ours, theirs = (fake[FSDP][who]["peak"] for who in (OURS, TORCHS[FSDP]))
        budgets.append(Budget("fully sharded: peak memory", ours / theirs, 1, "x"))
    if TP in fake:
        ours, theirs = (fake[TP][who]["seconds"] for who in (OURS, TORCHS[TP]))
        budgets.append(Budget("tensor parallel, fake: a step", ours / theirs, 0.12, "x"))
    for ranks, found in gloo.items():
        for kind, limit in ((DDP, 0.8), (FSDP, 0.55)):
            if kind in found:
                ratio = found[kind][OURS] / found[kind][TORCHS[kind]]
                budgets.append(Budget(f"{kind}, gloo, {ranks} processes: a step", ratio, limit, "x"))
    return budgets


def report_fake(fake: Mapping[str, Any], sizes: Mapping[str, Size]) -> None:
    for kind, found in fake.items():
        plain = found[PLAIN]["seconds"]
        rows = []
        for who, each in found.items():
            calls = ", ".join(f"{count} {name}" for name, count in sorted(each["collectives"].items()))
            rows.append([
                who, f"{1e3 * each['seconds']:.1f}", f"{1e3 * (each['seconds'] - plain):.1f}",
                *(f"{each[what] / 2**20:.2f}" for what in ("peak", "at_rest", "bytes")), calls or "-",
            ])  # fmt: skip
        head = ["", "ms", "over one rank", "peak MiB", "at rest MiB", "collectives MiB", "collectives"]
        print_table(f"{kind}, fake backend, {RANKS} ranks: {sizes[kind]}", head, rows)


def report_gloo(gloo: Mapping[int, Any], sizes: Mapping[str, Size]) -> None:
    for ranks, found in gloo.items():
        rows = []
        for kind, each in found.items():
            base = each[TORCHS[kind]]
            rows += [[kind, who, f"{1e3 * took:.1f}", f"{took / base:.2f}"] for who, took in each.items()]
        print_table(f"A step on gloo, {ranks} processes: {sizes[DDP]}", ["", "", "ms", "x torch's"], rows)


def plot(path: str, results: Mapping[str, Any]) -> None:
    """Steps as bars, a panel per parallelism and place."""
    panels = [(f"{kind}, fake", {who: each["seconds"] for who, each in found.items()})
              for kind, found in results["fake"].items()]  # fmt: skip
    panels += [(f"{kind}, gloo, {n}", each) for n, found in results["gloo"].items() for kind, each in found.items()]
    figure_module: Any = importlib.import_module("matplotlib.figure")
    figure = figure_module.Figure(figsize=(3.2 * len(panels), 3), layout="constrained")
    for panel, (title, each) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        panel.bar(list(each), [1e3 * took for took in each.values()])
        panel.set_title(title, fontsize="small")
        panel.tick_params(axis="x", labelrotation=20, labelsize="x-small")
        panel.set_ylabel("ms a step", fontsize="small")
    figure.savefig(path, dpi=120, format="png")


def measure(options: Namespace) -> dict[str, Any]:
    quick = options.quick
    fake_sizes = {
        FSDP: Size(4 if quick else 20, 64, 8, 2),
        TP: Size(4 if quick else 20, 64, 0, 8),
    }
    size = Size(2, 64, 16, 2) if quick else Size(4, 256, 64, 4)
    gloo_sizes = {DDP: size, FSDP: size, TP: size._replace(tokens=0, batch=64)}
    fake = {} if options.only == "gloo" else on_fake(fake_sizes, options.repeats or (5 if quick else 50))
    report_fake(fake, fake_sizes)
    gloo: dict[int, Any] = {}
    if options.only != "fake":
        for ranks in options.ranks:
            gloo[ranks] = mc.launch(
                on_gloo, ranks=ranks, args=(gloo_sizes, options.repeats or (5 if quick else 40)), runtime="processes"
            )[0]
        report_gloo(gloo, gloo_sizes)
    budgets = budgets_of(fake, gloo)
    print_budgets(budgets)
    if options.markdown:
        markdown(fake, gloo)
    return {"fake": fake, "gloo": gloo, "budgets": as_json(budgets)}


def markdown(fake: Mapping[str, Any], gloo: Mapping[int, Any]) -> None:
    """The table of docs/benchmarks.md."""
    rows = []
    for kind, name in ((DDP, "data_parallel"), (FSDP, "fully_shard"), (TP, "tensor_parallel")):
        ratios = [found[kind][OURS] / found[kind][TORCHS[kind]] for found in gloo.values()]
        if kind in fake:
            plain, ours, theirs = (fake[kind][who] for who in (PLAIN, OURS, TORCHS[kind]))
            ratios.append((ours["seconds"] - plain["seconds"]) / (theirs["seconds"] - plain["seconds"]))
            ratios.append(ours["peak"] / theirs["peak"])
        cells = [f"{ratio:.2f} ×" for ratio in ratios]
        cells += [""] * (len(gloo) + 2 * bool(fake) - len(cells))
        rows.append([f"`{name}` over `{TORCHS[kind]}`", *cells])
    head = [*(f"{ranks} processes" for ranks in gloo), *(["host's part", "peak memory"] if fake else [])]
    print_markdown(["", *head], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("A training step, ours beside torch's own.")
    parser.add_argument("--repeats", type=int, metavar="N", help="steps per number")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes on gloo (2 4)")
    parser.add_argument("--only", choices=["fake", "gloo"], help="one half of it")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/benchmarks.md too")
    parser.add_argument("--plot", metavar="FILE", help="draw a PNG; needs matplotlib")
    options = parser.parse_args(arguments)
    if options.plot and not plots.available():
        parser.error(plots.MISSING)
    info = machine()
    print_machine(info)
    results = measure(options)
    write(options.json, {"machine": info} | results)
    if options.plot:
        plot(options.plot, results)


if __name__ == "__main__":
    main()
