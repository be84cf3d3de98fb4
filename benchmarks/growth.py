"""How costs grow: with ranks, leaves, works, calls, axes, units and meshes. One run, exponents, no assertions.

    python -m benchmarks.growth                   # some minutes: 8192 ranks, 10,000 leaves, 1,000,000 calls
    python -m benchmarks.growth --quick           # small sizes, a third of the time for each: some ten seconds
    python -m benchmarks.growth --only "in-process" --only trees
    python -m benchmarks.growth --json out.json

Each curve is measured at four sizes or more, the small ones first, on torch's fake backend or between in-process ranks:
time of this process, the least of a few repeats. The exponent is the slope of log(time) over log(n) between the sizes,
by least squares: 1 is linear, and n log n is 1.1 to 1.2 at these sizes. What every rank must hold or do for every other
one is quadratic for all of them together: those in-process curves say so. What does not grow has an exponent near 0.
Floors are curves too: where the machine's caches bend those of plain torch, ours may bend as much.

Then plans between random layouts of five axes on five dims, each made for the first time; and 100 meshes on 8 processes
of this machine, used once: start-up and memory per rank, beside torch's DeviceMesh and the commit of the budget.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import resource
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import init_device_mesh

import meshcomm as mc
from benchmarks.common import (
    RANKS,
    Budget,
    Call,
    as_json,
    options_of,
    pace,
    print_budgets,
    print_table,
    run,
    say,
    timed,
)
from meshcomm.parallel import checkpoint, clip_grad_norm, data_parallel, fully_shard, tensor_parallel

N_LOG_N = 1.25
"""The exponent up to which a curve is n log n, with what the machine's caches add."""
SQUARE = 2.1
FLAT = 0.3

MOST, ENOUGH, LONG, SHORT = 5, 0.25, 1.5, 0.02
"""Of one size: calls, seconds after which no third call is needed, after which no second one, and which calls that are
shorter than that fill together: the least of five of some microseconds is what else the machine did.
"""
SOONER = 3
"""A quick run has so many times less of these seconds."""

Prepare = Callable[[int], Iterator[Call]]
"""For a size: a generator that yields what is timed, between what comes before and after."""


class Curve(NamedTuple):
    """One line of the table."""

    group: str
    what: str
    sizes: Sequence[int]
    few: Sequence[int]
    """The sizes of a quick run."""
    limit: float
    prepare: Prepare
    floor: str = ""
    """The curve of the same group that this one may bend as much as, and a tenth more."""


CURVES: list[Curve] = []
FAKE_RANKS = ((1024, 2048, 4096, 8192), (32, 64, 128, 256))
LEAVES = ((1250, 2500, 5000, 10_000), (50, 100, 200, 400))
CALLS = ((15_625, 62_500, 250_000, 1_000_000), (100, 200, 400, 800))
SAVED = ((15_625, 31_250, 62_500, 250_000), (100, 200, 400, 800))
THREADS = ((32, 64, 128, 256), (4, 8, 16, 32))
UNITS = ((20, 40, 80, 160), (2, 4, 8, 16))
MESHES = ((50, 100, 200, 400), (5, 10, 20, 40))


def curve(
    group: str, what: str, sizes: tuple[Sequence[int], Sequence[int]], limit: float = N_LOG_N, floor: str = ""
) -> Callable[[Prepare], Prepare]:
    """Put what prepares it into the table."""

    def add(prepare: Prepare) -> Prepare:
        CURVES.append(Curve(group, what, *sizes, limit, prepare, floor))
        return prepare

    return add


# ------------------------------------------------------------------------------------------------------ fake ranks


@contextlib.contextmanager
def fake(ranks: int, axes: dict[str, int] | None = None) -> Iterator[mc.Mesh]:
    """Of many ranks the last, for the first one is found at once wherever one looks; of few the first, whose numbers
    count where ranks agree: nothing moves here.
    """
    dist.init_process_group("fake", rank=ranks - 1 if ranks > RANKS else 0, world_size=ranks)
    try:
        mesh = mc.make_mesh(axes or {"a": ranks})
        with mc.use_mesh(mesh):
            yield mesh
    finally:
        mc.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


@curve("ranks", "make_mesh of three axes, and seven axes of it", FAKE_RANKS)
def _meshes(n: int) -> Iterator[Call]:
    def made() -> None:
        mesh = mc.make_mesh({"a": n // 16, "b": 4, "c": 4})
        for axis in ("a", "b", "c", ("a", "b"), ("c", "a"), ("a", "b", "c"), ("c", "b", "a")):
            mc.axis_size(axis, mesh=mesh)
            mc.axis_index(axis, mesh=mesh)

    with fake(n):
        yield made


@curve("ranks", "mesh.rank, coordinate, shape", FAKE_RANKS, FLAT)
def _places(n: int) -> Iterator[Call]:
    with fake(n, {"a": n // 4, "b": 4}) as mesh:
        yield lambda: [(mesh.rank, mesh.coordinate, mesh.shape) for _ in range(100)]


def on_fake(what: str, limit: float, run: Callable[[int, Tensor, Tensor], object]) -> None:
    """A collective over n ranks: of 16 numbers, or of one for each rank."""

    @curve("ranks", what, FAKE_RANKS, limit)
    def _(n: int) -> Iterator[Call]:
        x, each = torch.ones(16), torch.ones(n)
        with fake(n):
            yield lambda: [run(n, x, each) for _ in range(5)]


def swapped(n: int) -> list[tuple[int, int]]:
    return [(rank, n - 1 - rank) for rank in range(n)]


def forward_backward(tree: Any, call: Callable[[Any], Any]) -> None:
    """Sums of all that comes out, and gradients of all that went in."""
    leaves = [leaf.requires_grad_() for leaf in torch.utils._pytree.tree_leaves(tree)]
    out = torch.utils._pytree.tree_leaves(call(tree))
    torch.autograd.grad(out, leaves, [torch.ones_like(y) for y in out])


on_fake("all_reduce", FLAT, lambda n, x, each: mc.all_reduce(x, "a"))
on_fake("all_reduce, backward", FLAT, lambda n, x, each: forward_backward(x.clone(), lambda y: mc.all_reduce(y, "a")))
on_fake("all_reduce, async_op=True", FLAT, lambda n, x, each: mc.all_reduce(x, "a", async_op=True).wait())
on_fake("shift, an all_to_all whose other runs are empty", N_LOG_N, lambda n, x, each: mc.shift(x, "a"))
on_fake("broadcast", FLAT, lambda n, x, each: mc.broadcast(x, "a"))
on_fake("barrier", FLAT, lambda n, x, each: mc.barrier("a"))
on_fake("permute, of a list as long", N_LOG_N, lambda n, x, each: mc.permute(x, "a", swapped(n)))
on_fake("all_gather", N_LOG_N, lambda n, x, each: mc.all_gather(x[:1], "a"))
on_fake("all_gather, sizes=", N_LOG_N, lambda n, x, each: mc.all_gather(x[:1], "a", sizes=[1] * n))
on_fake("reduce_scatter", N_LOG_N, lambda n, x, each: mc.reduce_scatter(each, "a"))
on_fake("all_to_all", N_LOG_N, lambda n, x, each: mc.all_to_all(each, "a", 0, 0))
on_fake("scan", N_LOG_N, lambda n, x, each: mc.scan(x, "a"))
on_fake("gather", N_LOG_N, lambda n, x, each: mc.gather(x[:1], "a", n - 1))
on_fake("broadcast_object", N_LOG_N, lambda n, x, each: mc.broadcast_object(1, "a", n - 1))
on_fake("all_gather_object", N_LOG_N, lambda n, x, each: mc.all_gather_object(1, "a"))


# ----------------------------------------------------------------------------------------------------- trees and works


def leaves_of(n: int) -> list[Tensor]:
    return [torch.ones(16) for _ in range(n)]


def nested(n: int) -> dict[str, Any]:
    """As parameters often stand."""
    return {f"layer{i}": {"weight": torch.ones(4, 4), "more": (torch.ones(4), [torch.ones(2)])} for i in range(n // 3)}


def lying_together(n: int) -> list[Tensor]:
    return list(torch.ones(16 * n).split(16))


TORCHS = "torch's flatten, dist.all_reduce, unflatten (floor)"


def of_a_tree(
    what: str, run: Callable[[Any], object], make: Callable[[int], Any] = leaves_of, floor: str = TORCHS
) -> None:
    @curve("trees", what, LEAVES, floor=floor)
    def _(n: int) -> Iterator[Call]:
        tree = make(n)
        with fake(RANKS):
            yield lambda: run(tree)


def torchs(leaves: list[Tensor]) -> object:
    flat = _flatten_dense_tensors(leaves)
    dist.all_reduce(flat)
    return _unflatten_dense_tensors(flat, leaves)


of_a_tree(TORCHS, torchs, floor="")
of_a_tree("all_reduce of n leaves", lambda tree: mc.all_reduce(tree, "a"))
of_a_tree("the same, nested", lambda tree: mc.all_reduce(tree, "a"), nested)
of_a_tree("the same that lie together", lambda tree: mc.all_reduce(tree, "a"), lying_together)
of_a_tree("all_reduce in buckets of 1 KiB", lambda tree: mc.all_reduce(tree, "a", bucket_mb=1 / 1024))
of_a_tree("the same, async_op=True", lambda tree: mc.all_reduce(tree, "a", async_op=True).wait())
of_a_tree("the same, backward", lambda tree: forward_backward(tree, lambda t: mc.all_reduce(t, "a")))
of_a_tree("pvary of n leaves, backward", lambda tree: forward_backward(tree, lambda t: mc.pvary(t, "a")))
of_a_tree("all_gather of n leaves", lambda tree: mc.all_gather(tree, "a"))
of_a_tree("reduce_scatter of n leaves", lambda tree: mc.reduce_scatter(tree, "a"))


@curve("works", "n Works in flight", LEAVES)
def _works(n: int) -> Iterator[Call]:
    x = torch.ones(16)
    with fake(RANKS):
        yield lambda: mc.wait([mc.all_reduce(x, "a", async_op=True) for _ in range(n)])


@curve("works", "the same, waited for from the last on", LEAVES)
def _works_backwards(n: int) -> Iterator[Call]:
    x = torch.ones(16)
    with fake(RANKS):
        yield lambda: [work.wait() for work in reversed([mc.all_reduce(x, "a", async_op=True) for _ in range(n)])]


@curve("works", "the same, backward", LEAVES)
def _works_with_grad(n: int) -> Iterator[Call]:
    def all_waited(x: Tensor) -> list[Tensor]:
        return [work.wait() for work in [mc.all_reduce(x, "a", async_op=True) for _ in range(n)]]

    with fake(RANKS):
        yield lambda: forward_backward(torch.ones(16), all_waited)


# ------------------------------------------------------------------------------------------------------------- calls


_traces: dict[int, mc.Trace] = {}
"""The last one of so many calls, for the curves of what is made of it."""


def traced(n: int) -> None:
    _traces.pop(n, None)
    x = torch.ones(16)
    with mc.trace() as t:
        for _ in range(n):
            mc.all_reduce(x, "a")
    _traces[n] = t


def trace_of(n: int) -> mc.Trace:
    if n not in _traces:
        traced(n)
    return _traces[n]


@curve("calls", "n calls, recorded as always", CALLS)
def _recorded(n: int) -> Iterator[Call]:
    x = torch.ones(16)
    with fake(RANKS):
        yield lambda: [mc.barrier("a") if i % 50 else mc.all_reduce(x, "a") for i in range(n // 10)]


@curve("calls", "a trace of n calls", CALLS)
def _traced(n: int) -> Iterator[Call]:
    with fake(RANKS):
        yield lambda: traced(n)


@curve("calls", "its table", CALLS)
def _told(n: int) -> Iterator[Call]:
    with fake(RANKS):
        t = trace_of(n)
        yield lambda: str(t)
    if n not in SAVED[0]:
        _traces.pop(n)


@curve("calls", "its file", SAVED)
def _saved(n: int) -> Iterator[Call]:
    with fake(RANKS), tempfile.TemporaryDirectory() as folder:
        t = trace_of(n)
        yield lambda: t.save(Path(folder, "trace.json"))
    _traces.pop(n)


@curve("calls", "n operations under check_vma", ((1000, 4000, 16_000, 64_000), (50, 100, 200, 400)))
def _checked(n: int) -> Iterator[Call]:
    def chain() -> None:
        y = x
        with mc.check_vma():
            for _ in range(n):
                y = y * x

    with fake(RANKS):
        x = mc.mark_varying(torch.ones(8), "a")
        yield chain


@curve("calls", "the same with a graph, backward", ((1000, 4000, 16_000, 64_000), (50, 100, 200, 400)))
def _checked_graph(n: int) -> Iterator[Call]:
    def chain(x: Tensor) -> Tensor:
        with mc.check_vma():
            y = x
            for _ in range(n):
                y = y * x
            return y

    with fake(RANKS):
        yield lambda: forward_backward(mc.mark_varying(torch.ones(8), "a"), chain)


@curve("calls", "n meshes, each used once, all kept", MESHES)
def _many_meshes(n: int) -> Iterator[Call]:
    def made() -> list[mc.Mesh]:
        meshes = [mc.make_mesh({"a": 4, "b": 2}) for _ in range(n)]
        for mesh in meshes:
            mc.all_reduce(torch.ones(1), "a", mesh=mesh)
            mc.all_reduce(torch.ones(1), "b", mesh=mesh)
        return meshes

    with fake(RANKS):
        yield made


@curve("calls", "n meshes, one after the other", MESHES)
def _meshes_in_turn(n: int) -> Iterator[Call]:
    def made() -> None:
        for _ in range(n):
            mc.all_reduce(torch.ones(1), "a", mesh=mc.make_mesh({"a": 4, "b": 2}))

    with fake(RANKS):
        yield made


# -------------------------------------------------------------------------------------------------- in-process ranks


def inside(what: str, body: Callable[[int], object], limit: float = N_LOG_N) -> None:
    """Of all ranks together; ten times, so that what a launch costs by itself counts for little."""

    @curve("in-process", what, THREADS, limit)
    def _(n: int) -> Iterator[Call]:
        mesh = mc.make_mesh({"a": n})

        def rank() -> None:
            for _ in range(10):
                body(n)

        with mc.use_mesh(mesh):
            yield lambda: mc.launch(rank, ranks=n)


@curve("in-process", "n threads that do nothing (floor)", THREADS)
def _threads(n: int) -> Iterator[Call]:
    def started() -> None:
        threads = [threading.Thread(target=int) for _ in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    yield started


@curve("in-process", "launch of n ranks", THREADS)
def _launched(n: int) -> Iterator[Call]:
    yield lambda: mc.launch(lambda: None, ranks=n)


inside("all_reduce of n ranks", lambda n: mc.all_reduce(torch.ones(16), "a"))
inside("the same, backward", lambda n: forward_backward(torch.ones(16), lambda x: mc.all_reduce(x, "a")))
inside("shift", lambda n: mc.shift(torch.ones(16), "a"))
inside("all_gather: n rows for each of n", lambda n: mc.all_gather(torch.ones(1), "a"), SQUARE)
inside("reduce_scatter: n rows of each of n", lambda n: mc.reduce_scatter(torch.ones(n), "a"), SQUARE)
inside("all_to_all: n rows of each of n", lambda n: mc.all_to_all(torch.ones(n), "a", 0, 0), SQUARE)


@curve("in-process", "shard_map of a tiny body", THREADS)
def _mapped(n: int) -> Iterator[Call]:
    mesh, x = mc.make_mesh({"a": n}), torch.ones(2 * n)
    yield mc.shard_map(lambda x: mc.all_reduce(x.sum(), "a"), in_specs="(a b)", out_specs="", mesh=mesh).__get__(x)


@curve("in-process", "shard_map, backward", THREADS)
def _mapped_back(n: int) -> Iterator[Call]:
    mesh = mc.make_mesh({"a": n})
    doubled = mc.shard_map(lambda x: 2 * x, in_specs="(a b)", out_specs="(a b)", mesh=mesh)
    yield lambda: forward_backward(torch.ones(2 * n), doubled)


@curve("in-process", "shard_map of n leaves", (LEAVES[0][:4], LEAVES[1]))
def _mapped_leaves(n: int) -> Iterator[Call]:
    mesh, tree = mc.make_mesh({"a": 2}), {f"leaf{i}": torch.ones(4) for i in range(n // 5)}
    specs = dict.fromkeys(tree, "(a b)")
    mapped = mc.shard_map(lambda tree: tree, in_specs=(specs,), out_specs=specs, mesh=mesh)
    yield lambda: mapped(tree)


# -------------------------------------------------------------------------------------------------------------- modules


def layers(n: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(n)))


def stepping(model: nn.Module) -> Call:
    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        model.zero_grad()

    step()
    step()
    return step


@curve("modules", "fully_shard of n units", UNITS)
def _sharding(n: int) -> Iterator[Call]:
    with fake(RANKS):
        yield lambda: fully_shard(layers(n), "a", grads="mean")


@curve("modules", "a step of it", UNITS)
def _sharded_step(n: int) -> Iterator[Call]:
    with fake(RANKS):
        yield stepping(fully_shard(layers(n), "a", grads="mean"))


@curve("modules", "a step of data_parallel, 4 n parameters", UNITS)
def _replicated_step(n: int) -> Iterator[Call]:
    with fake(RANKS):
        yield stepping(data_parallel(layers(n), "a", grads="mean"))


@curve("modules", "tensor_parallel of 2 n layers", UNITS)
def _cutting(n: int) -> Iterator[Call]:
    with fake(RANKS):
        yield lambda: tensor_parallel(layers(n), {"*.0": "column", "*.2": "row"}, axis="a")


@curve("modules", "clip_grad_norm of 4 n parameters", UNITS)
def _clipped(n: int) -> Iterator[Call]:
    with fake(RANKS):
        model = fully_shard(layers(n), "a", grads="mean")
        model(torch.ones(2, 8)).sum().backward()
        yield lambda: clip_grad_norm(model, 1.0)


@curve("modules", "checkpoint of 4 n parameters, saved and loaded", UNITS)
def _saved_model(n: int) -> Iterator[Call]:
    with tempfile.TemporaryDirectory() as folder, mc.use_mesh(mc.make_mesh({"a": 1})):
        model = fully_shard(layers(n), "a", grads="mean")
        optimiser = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        optimiser.step()

        def there_and_back() -> None:
            checkpoint.save(Path(folder, "here"), model, optimiser)
            checkpoint.load(Path(folder, "here"), model, optimiser)

        yield there_and_back


# ---------------------------------------------------------------------------------------------------------- measuring


def seconds(call: Call, sooner: float = 1) -> float:
    """The least time of this process: of at least two calls, if they are short, and of at most five, or as many as
    take no time.
    """
    taken: list[float] = []
    total, short, enough, long = 0.0, SHORT / sooner, ENOUGH / sooner, LONG / sooner
    gc.collect()
    gc.disable()
    try:
        while (total < short and len(taken) < 1000) or (
            len(taken) < MOST and total < (enough if len(taken) > 1 else long)
        ):
            start = time.process_time()
            call()
            taken.append(time.process_time() - start)
            total += taken[-1]
    finally:
        gc.enable()
    return max(min(taken), 1e-7)


def exponent(times: dict[int, float]) -> float:
    """The slope of log(time) over log(size)."""
    xs, ys = [math.log(n) for n in times], [math.log(took) for took in times.values()]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def measure_curve(curve: Curve, quick: bool) -> dict[int, float]:
    found = {}
    for n in curve.few if quick else curve.sizes:
        prepared = contextlib.contextmanager(curve.prepare)(n)
        with prepared as call:
            found[n] = seconds(call, SOONER if quick else 1)
    return found


def measure_curves(options: Namespace) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    gc.collect()
    gc.freeze()  # what is imported stays: to look through it before each size took longer than the calls
    for curve in CURVES:
        if options.only and curve.group not in options.only:
            continue
        what = f"{curve.group}: {curve.what}"
        start = time.perf_counter()
        times = measure_curve(curve, options.quick)
        floor = found.get(f"{curve.group}: {curve.floor}")
        limit = curve.limit if floor is None else max(curve.limit, floor["exponent"] + 0.1)
        found[what] = {"times": times, "exponent": exponent(times), "limit": limit}
        say(f"{what}: {time.perf_counter() - start:.1f} s")
    return found


def print_curves(found: dict[str, dict[str, Any]]) -> None:
    rows = []
    for what, each in found.items():
        cells = [f"{1e3 * took:.3g} at {n:,}" for n, took in each["times"].items()]
        verdict = Budget(what, each["exponent"], each["limit"], "").verdict
        rows.append([what, *cells, f"{each['exponent']:.2f}", f"<= {each['limit']:.2f}", verdict])
    if rows:
        print_table("ms by size, and the exponent", ["", *[""] * (len(rows[0]) - 4), "exponent", "limit", ""], rows)


# --------------------------------------------------------------------------------------------------------------- plans


def measure_plans(count: int, seed: int = 0) -> list[tuple[float, str, list[int], dict[str, int]]]:
    """Seconds of each plan between random layouts of five axes on five dims, the first time; the slowest first."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        sizes = {axis: draw.choice([2, 2, 2, 3, 4, 8]) for axis in "abcde"}
        sides = [placed(draw, list(sizes)) for _ in range(2)]
        lengths = [
            math.lcm(*(math.prod(sizes[axis] for axis in side[dim]) for side in sides)) * draw.choice([1, 2, 6, 64])
            for dim in range(5)
        ]
        layouts = " -> ".join(" ".join(f"({' '.join(axes)} d{dim})" for dim, axes in enumerate(side)) for side in sides)
        mesh = mc.make_mesh(sizes)
        start = time.process_time()
        mc.plan(layouts, lengths, mesh)
        found.append((time.process_time() - start, layouts, lengths, sizes))
    return sorted(found, key=lambda each: -each[0])


def placed(draw: random.Random, axes: list[str]) -> list[list[str]]:
    """Most of the axes, each on some dim, in some order."""
    draw.shuffle(axes)
    dims: list[list[str]] = [[] for _ in range(5)]
    for axis in axes[: draw.choice([3, 4, 5, 5])]:
        draw.choice(dims).append(axis)
    return dims


# -------------------------------------------------------------------------------------------------- meshes of processes

HUNDRED = {"start_up": 0.54, "memory": 1.94}
"""Seconds and MiB per rank of 100 meshes on 8 processes at 4dd4e6b, 2 shared cores: the least that was seen."""


def meshes_of_processes(count: int, torchs: bool = False) -> tuple[float, float]:
    """On every rank: seconds for so many meshes whose axes are used once, and the MiB that this rank has grown by.
    ``torchs``: DeviceMeshes.
    """
    first = mc.make_mesh({"dp": -1})
    mc.barrier("dp", mesh=first)
    before, start = memory(), time.perf_counter()
    kept: list[object] = []
    for _ in range(count):
        if torchs:
            theirs = init_device_mesh("cpu", (mc.world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
            for axis in ("dp", "tp"):
                dist.all_reduce(torch.ones(16), group=theirs.get_group(axis))
            kept.append(theirs)
            continue
        mesh = mc.make_mesh({"dp": mc.world_size() // 2, "tp": 2})
        for axis in ("dp", "tp"):
            mc.all_reduce(torch.ones(16), axis, mesh=mesh)
        kept.append(mesh)
    mc.barrier("dp", mesh=first)
    return time.perf_counter() - start, memory() - before


def memory() -> float:
    """MiB that this process has to itself and has touched."""
    with contextlib.suppress(OSError), open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines if ":" in line.split(" ")[0])
        return sum(int(fields[name].split()[0]) for name in ("Private_Dirty", "Private_Clean")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_meshes(ranks: int, runs: Sequence[tuple[int, bool]]) -> dict[str, dict[str, float]]:
    """By whose and how many; ours more than once, for the least is what it takes."""
    found: dict[str, dict[str, float]] = {}
    for count, torchs in runs:
        took = mc.launch(meshes_of_processes, ranks, (count, torchs), runtime="processes", backend="gloo")
        now = {"start_up": max(each[0] for each in took), "memory": median(each[1] for each in took)}
        name = f"{count} of {'DeviceMesh' if torchs else 'meshcomm'}"
        found[name] = {what: min(each, found.get(name, now)[what]) for what, each in now.items()}
    rows = [[name, f"{each['start_up']:.2f}", f"{each['memory']:.2f}"] for name, each in found.items()]
    print_table(f"Meshes of two axes on {ranks} processes", ["", "s, slowest rank", "MiB per rank"], rows)
    return found


# ------------------------------------------------------------------------------------------------------------- program

OTHERS = ("plans", "processes")


def measure(options: Namespace) -> dict[str, Any]:
    """Everything, as it goes to --json."""
    curves = measure_curves(options)
    print_curves(curves)
    budgets = [Budget(f"exponent, {what}", each["exponent"], each["limit"], "") for what, each in curves.items()]
    found: dict[str, Any] = {"curves": curves}
    if not options.only or "plans" in options.only:
        slowest, *rest = measure_plans(20 if options.quick else 500)
        found["plans"] = {"slowest": slowest, "median": median(each[0] for each in rest)}
        took, layouts, lengths, sizes = slowest
        print(f"\nThe slowest plan of {1 + len(rest)}, {1e3 * took:.1f} ms: {layouts} of {lengths} on {sizes}")
        budgets.append(timed("plan, 5 axes on 5 dims, the first time", 1e3 * took, 50, "ms"))
    if not options.only or "processes" in options.only:
        runs = [(2, False), (2, True)] if options.quick else [(100, False), (10, True), (100, False), (25, False)]
        meshes = found["meshes"] = measure_meshes(2 if options.quick else 8, runs)
        for what, limit, slower in (("start_up", 1.5, pace()), ("memory", 1.2, 1.0)):
            if (ours := meshes.get("100 of meshcomm")) is not None:
                then = ours[what] / HUNDRED[what]
                budgets.append(Budget(f"100 meshes on 8 processes, {what}, over 4dd4e6b's", then, limit, "x", slower))
    print_budgets([budget for budget in budgets if not budget.what.startswith("exponent") or budget.verdict == "over"])
    return found | {"budgets": as_json(budgets)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("How costs grow.")
    groups = (*dict.fromkeys(curve.group for curve in CURVES), *OTHERS)
    parser.add_argument("--only", action="append", choices=groups, help="these curves; may be given several times")
    run(parser, measure, arguments)


if __name__ == "__main__":
    main()
