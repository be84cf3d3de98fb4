"""What dry runs foretell, beside what was published, and beside what this machine really does: one run, no assertions.

    python -m benchmarks.dry                  # both; a few minutes
    python -m benchmarks.dry --quick          # the order of plans on this machine, small
    python -m benchmarks.dry --published --markdown   # the tables of docs/dry-runs.md
    python -m benchmarks.dry --gpu --markdown         # steps of one GPU beside what is foretold of them

Published: tokens per second and GPU of torchtitan, Llama 3 in PyTorch, eager, bf16; teraFLOP/s of Megatron-LM's GPT
(benchmarks/megatron.py). The machines are
those of mc.hardware, with the one figure that the source says to be otherwise; no constant is fitted to a row. Of the
layers, which are all alike, some run: the time of a step is a + b x layers, and two numbers of layers give a and b.

This machine: eight plans of one model on processes, timed, beside seconds of dry runs on mc.hardware("this machine"):
what counts is the order.
"""

from __future__ import annotations

import contextlib
import gc
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import meshcomm as mc
from benchmarks import megatron
from benchmarks.common import options_of, print_markdown, print_table, run, say
from benchmarks.llama import PLAN, SIZES, Llama
from meshcomm import parallel

# -------------------------------------------------------------------------------------------------------- published

_DECEMBER = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_OLDER = "torchtitan, docs/performance.md of 2024"
_TITAN_H100 = {"memory_bandwidth": 2.4e12, "memory": 96e9}
"""What the source says of its H100: HBM2e. Its limit of 500 W, of which it gives no rate, is left out."""


class Row(NamedTuple):
    """A published time."""

    model: str
    mesh: dict[str, int]
    machine: str
    batch: int
    again: int
    """1: all layers compute their activations again; 2: every other one; 0: none."""
    sequence: int
    published: float
    """Tokens per second and GPU."""
    source: str
    more: Mapping[str, Any] = MappingProxyType({})


ROWS = (
    Row("8B", {"fsdp": 8}, "h100", 2, 2, 8192, 5762, f"{_DECEMBER}, table 1", _TITAN_H100),
    Row("8B", {"fsdp": 128}, "h100", 2, 2, 8192, 5605, f"{_DECEMBER}, table 3", _TITAN_H100),
    Row("8B", {"fsdp": 64}, "a100", 1, 2, 8192, 2876, f"{_OLDER}, selective layer"),
    Row("70B", {"fsdp": 64}, "a100", 1, 1, 8192, 323, _OLDER),
    Row("405B", {"fsdp": 16, "tp": 8}, "h100", 2, 1, 8192, 109, f"{_OLDER}, 128 H100 of 94 GB", {"memory": 94e9}),
)


def step_of(row: Row, layers: int, device: str | None = None) -> Callable[[], Iterator[None]]:
    """A program of two steps; the second one counts."""

    def main() -> Iterator[None]:
        with contextlib.nullcontext() if device is None else torch.device(device):
            model: nn.Module = Llama(SIZES[row.model], layers, row.again)
        if "tp" in row.mesh:
            model = parallel.tensor_parallel(model, PLAN, axis="tp")
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}  # torchtitan's defaults
        parallel.fully_shard(model, "fsdp", grads="mean", units=["layers.*"], **dtypes)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            yield
            tokens = torch.randint(SIZES[row.model].words, (row.batch, row.sequence), device=device)
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            loss.backward()
            parallel.clip_grad_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yield

    return main


def foretold(row: Row) -> dict[str, float]:
    """Tokens per second and GPU, and how long it took to find out, by layer and step."""
    machine = mc.hardware(row.machine, **row.more)
    few, many = 2, 4
    start = time.perf_counter()
    seconds = [mc.dry_run(step_of(row, layers), row.mesh, hardware=machine).seconds for layers in (few, many)]
    took = (time.perf_counter() - start) / (2 * (few + many))
    whole = seconds[0] + (SIZES[row.model].layers - few) * (seconds[1] - seconds[0]) / (many - few)
    tokens = row.batch * row.sequence / row.mesh.get("tp", 1)
    return {"seconds": whole, "tokens": tokens / whole, "took": took}


def published(markdown: bool) -> list[dict[str, Any]]:
    """All rows, and how far off they are."""
    found: list[dict[str, Any]] = []
    cells = []
    for row in ROWS:
        say(f"{row.model} on {row.mesh}")
        one = foretold(row)
        off = one["tokens"] / row.published - 1
        found.append({"row": {**row._asdict(), "more": dict(row.more)}, **one, "off": off})
        mesh = ", ".join(f"{axis} {size}" for axis, size in row.mesh.items())
        cells.append([f"{row.model}, {mesh}", row.machine, f"{row.published:.0f}", f"{one['tokens']:.0f}",
                      f"{off:+.0%}", row.source])  # fmt: skip
    head = ["Llama 3", "GPU", "published", "foretold", "off", "source"]
    print(f"{max(one['took'] for one in found):.2f} s of this machine per layer and step, at most")
    (print_markdown if markdown else lambda *table: print_table("Tokens per second and GPU", *table))(head, cells)
    return [*found, *published_of_gpt(markdown)]


def published_of_gpt(markdown: bool) -> list[dict[str, Any]]:
    """Megatron's rows."""
    found: list[dict[str, Any]] = []
    cells = []
    for case in megatron.CASES:
        say(f"GPT {case.model}")
        rate = megatron.foretold(case)
        off = rate / case.published - 1
        found.append({"row": case._asdict(), "teraflops": rate, "off": off})
        mesh = f"{case.model}, dp {case.gpus // case.tensor}, tp {case.tensor}"
        cells.append([mesh, f"{case.published:.0f}", f"{rate:.0f}", f"{off:+.0%}"])
    head = ["GPT, A100", "published", "foretold", "off"]
    print(f"\n{megatron.SOURCE}")
    (print_markdown if markdown else lambda *table: print_table("teraFLOP/s of each GPU", *table))(head, cells)
    return found


# ----------------------------------------------------------------------------------------------------------- one GPU

STEPS = (
    (Row("8B", {"fsdp": 1}, "", 1, 0, 4096, 0, ""), 2),
    (Row("8B", {"fsdp": 1}, "", 2, 0, 4096, 0, ""), 4),
    (Row("8B", {"fsdp": 1}, "", 2, 1, 8192, 0, ""), 4),
    (Row("8B", {"fsdp": 1}, "", 8, 2, 1024, 0, ""), 6),
    (Row("70B", {"fsdp": 1}, "", 1, 1, 8192, 0, ""), 1),
)
"""Rows, of which no time was published, and layers."""


def measured(program: Callable[[], Iterator[None]]) -> tuple[float, int]:
    """Seconds of the second step, and the most bytes that the allocator has given out."""
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    steps = program()
    next(steps)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in steps:
        marks[0], marks[1] = marks[1], torch.cuda.Event(enable_timing=True)
        marks[1].record()
    torch.cuda.synchronize()
    return 1e-3 * marks[0].elapsed_time(marks[1]), torch.cuda.max_memory_allocated() - before


def on_gpu(markdown: bool) -> list[dict[str, Any]]:
    """Steps of the GPU that is here, under each machine of mc.hardware that has its name in it."""
    name = torch.cuda.get_device_name()
    machine = next(mc.hardware(each) for each in ("h100", "h200", "b200", "a100") if each.upper() in name.upper())
    found: list[dict[str, Any]] = []
    cells = []
    for row, layers in STEPS:
        run = mc.dry_run(step_of(row, layers, "cuda"), row.mesh, hardware=machine)
        with mc.use_mesh(mc.make_mesh(row.mesh)):
            seconds, peak = measured(step_of(row, layers, "cuda"))
        said = run.peaks["cuda"].bytes
        what = f"{row.model}, {layers} layers, {row.batch} x {row.sequence}, again {row.again}"
        one = {"seconds": seconds, "foretold": run.seconds, "peak": peak, "foretold peak": said}
        found.append({"row": {**row._asdict(), "more": {}}, "layers": layers, **one})
        times = [f"{1e3 * seconds:.1f}", f"{1e3 * run.seconds:.1f}", f"{run.seconds / seconds:.2f}"]
        cells.append([what, *times, f"{peak / 2**30:.2f}", f"{said / 2**30:.2f}", f"{said / peak - 1:+.1%}"])
    head = ["Llama 3", "ms", "foretold", "ratio", "GiB", "foretold", "off"]
    print(f"{name}, torch {torch.__version__}")
    (print_markdown if markdown else lambda *table: print_table("A step", *table))(head, cells)
    return found


# ----------------------------------------------------------------------------------------------------- this machine


class Net(nn.Module):
    """Blocks of two products."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.relu(up(x)))
        return x


Step = Callable[[], object]
Make = Callable[[], Step]


def plans(width: int, rows: int) -> dict[str, Make]:
    """Name to what makes a step."""

    def stepping(
        make: Callable[[nn.Module], nn.Module], batch: int, blocks: int = 2
    ) -> Callable[[], Callable[[], object]]:
        def made() -> Callable[[], object]:
            model = make(Net(width, blocks))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.ones(batch, width)

            def step() -> None:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        return made

    def dp(model: nn.Module) -> nn.Module:
        return parallel.data_parallel(model, "all", grads="mean")

    def fsdp(model: nn.Module) -> nn.Module:
        return parallel.fully_shard(model, "all", grads="mean", units=["up.*", "down.*"])

    def tp(model: nn.Module) -> nn.Module:
        return parallel.tensor_parallel(model, {"up.*": "column", "down.*": "row"}, axis="all")

    return {
        "dp, few rows": stepping(dp, rows // 16),
        "dp": stepping(dp, rows),
        "dp, 4 x rows": stepping(dp, 4 * rows),
        "fsdp, few rows": stepping(fsdp, rows // 16),
        "fsdp, 2 x blocks": stepping(fsdp, rows, 4),
        "tp": stepping(tp, rows),
        "tp, 8 x rows": stepping(tp, 8 * rows),
        "dp, 4 x blocks": stepping(dp, rows, 8),
    }


def timed(width: int, rows: int, repeats: int) -> dict[str, float]:
    """On each process: seconds of each plan's step, the least of many."""
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    with mc.use_mesh(mc.make_mesh({"all": -1})):
        steps = {name: make() for name, make in plans(width, rows).items()}
        for turn in range(repeats + 2):
            for name, step in steps.items():
                mc.barrier("all")
                start = time.perf_counter()
                step()
                took = time.perf_counter() - start
                if turn > 1:
                    found[name] = min(found.get(name, took), took)
    return found


def dry(make: Make) -> Callable[[], Iterator[None]]:
    """Three steps of a plan; the last one counts."""

    def main() -> Iterator[None]:
        step = make()
        for _ in range(3):
            yield
            step()
        yield

    return main


def order_here(quick: bool) -> dict[str, Any]:
    """Times of the plans, and those that were foretold."""
    ranks, (width, rows, repeats) = 2, (256, 256, 3) if quick else (512, 256, 10)
    machine = mc.hardware("this machine")
    print(machine)
    real = mc.launch(timed, ranks, (width, rows, repeats), runtime="processes", timeout=600)[0]
    said = {
        name: mc.dry_run(dry(make), {"all": ranks}, hardware=machine).seconds
        for name, make in plans(width, rows).items()
    }
    by_time = sorted(real, key=real.__getitem__)
    cells = [
        [name, f"{1e3 * real[name]:.2f}", f"{1e3 * said[name]:.2f}", f"{said[name] / real[name]:.2f}"]
        for name in by_time
    ]
    print_table(f"Milliseconds of a step, {ranks} processes", ["", "measured", "foretold", "ratio"], cells)
    pairs = list(combinations(by_time, 2))
    right = sum(said[a] < said[b] for a, b in pairs)
    print(f"\n{right} of {len(pairs)} pairs of plans in the order that was foretold")
    return {"measured": real, "foretold": said, "pairs": len(pairs), "right": right}


def main(given: list[str] | None = None) -> None:
    parser = options_of(__doc__ or "", markdown=True)
    parser.add_argument("--published", action="store_true", help="only what was published")
    parser.add_argument("--gpu", action="store_true", help="only steps of the GPU that is here")

    def measure(options: Namespace) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if options.gpu:
            return {"gpu": on_gpu(options.markdown)}
        if not options.quick:
            found["published"] = published(options.markdown)
        if not options.published:
            found["here"] = order_here(options.quick)
        return found

    run(parser, measure, given)


if __name__ == "__main__":
    main()
