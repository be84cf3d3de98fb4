"""What communicating later buys: computing beside it, sums during backward, and trees instead of leaves.

    python -m benchmarks.overlap                  # 2 gloo processes, about a minute
    python -m benchmarks.overlap --ranks 4 --quick --json out.json
    torchrun --nproc-per-node 2 -m benchmarks.overlap

1. Side by side: a collective alone, matrix products alone, the two one after the other, and the products between the
   call with ``async_op=True`` and its wait; then the same backwards, where the transposed collective is under way while
   autograd does the products. Beside it torch.distributed's own async call in the same program. On gloo moving bytes
   is itself work for the CPU: what can be hidden is the time in which a rank waits for others.
2. A backward pass of a chain of layers whose parameters went through ``pvary`` as a tree: when the sum of each bucket
   starts, between which layers. DistributedDataParallel, with buckets of the same size, and ``pvary`` leaf by leaf run
   beside it.
3. 240 small tensors: time and number of collectives, as a tree and leaf by leaf; and what a rank has to copy and to sum
   for it in its own memory, the floor.

The floor of two things side by side is the longer of them alone, that of a step the same without sums.

The candidates take turns, with a barrier before each sample; a sample is the slowest rank's, a number the median.
"""

from __future__ import annotations

import gc
import os
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts collectives, speaks of its own start

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import meshcomm as mc
from benchmarks.common import Budget, judged, machine, options_of, print_beside, print_machine, print_table, write
from benchmarks.peers import gather_single, scatter_single
from meshcomm.collectives.trees import overlap
from meshcomm.runtime.start import world

AXIS = "dp"
LAYERS, WIDTH, BATCH = 12, 384, 64
BUCKET_MB = 1.0
SMALL = 240
TORCHS = "torch's"
TOGETHER, NO_SUMS = "together", "no sums"
IN_MEMORY = "copies and sums in private memory (floor)"

Call = Callable[[], object]
Times = dict[str, float]


def take_turns(calls: Mapping[str, Call], repeats: int) -> Times:
    """Seconds of each call."""
    for call in calls.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    gc.disable()
    for turn in range(repeats):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            mc.barrier(AXIS)
            begin = time.perf_counter()
            calls[name]()
            samples[name].append(time.perf_counter() - begin)
    gc.enable()
    mine = torch.tensor([samples[name] for name in calls], dtype=torch.float64)
    return dict(zip(calls, mc.all_reduce(mine, AXIS, "max").median(1).values.tolist(), strict=True))


# ------------------------------------------------------------------------------------------------------ side by side


def side_by_side(megabytes: float, repeats: int) -> dict[str, Times]:
    """By collective: alone, products alone, in turn, together, and torch's together."""
    ranks = mc.axis_size(AXIS)
    count = int(megabytes * 2**18) // ranks * ranks
    whole, share = torch.randn(count), torch.randn(count // ranks)
    out, room = torch.empty(count), torch.empty(count // ranks)
    theirs: dict[str, Callable[[], dist.Work | None]] = {
        "all_reduce": lambda: dist.all_reduce(out, async_op=True),
        "all_gather": lambda: gather_single(out, share, async_op=True),
        "reduce_scatter": lambda: scatter_single(room, whole, async_op=True),
    }
    return {
        name: beside_products(lambda x=x, name=name, **kw: getattr(mc, name)(x, AXIS, **kw), theirs[name], repeats)
        for name, x in (("all_reduce", whole), ("all_gather", share), ("reduce_scatter", whole))
    }


def beside_products(ours: Callable[..., Any], theirs: Callable[[], dist.Work | None], repeats: int) -> Times:
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    alone = take_turns({"alone": ours, "product": lambda: a @ b}, max(3, repeats // 3))
    products = max(1, round(alone["alone"] / alone["product"]))

    def compute() -> None:
        for _ in range(products):
            torch.mm(a, b)

    def in_turn() -> None:
        ours()
        compute()

    def together() -> None:
        work = ours(async_op=True)
        compute()
        work.wait()

    def torchs() -> None:
        work = theirs()
        compute()
        assert work is not None
        work.wait()

    calls = {"alone": ours, "products": compute, "in turn": in_turn, TOGETHER: together, TORCHS: torchs}
    return take_turns(calls, repeats)


def backwards(megabytes: float, repeats: int) -> Times:
    """An all_gather whose result is used late: its reduce_scatter runs beside the products of backward."""
    share = torch.randn(int(megabytes * 2**18) // mc.axis_size(AXIS), requires_grad=True)
    weight = torch.randn(256, 256, requires_grad=True)
    x = torch.randn(256, 256)

    def products(count: int, h: Tensor) -> Tensor:
        for _ in range(count):
            h = torch.tanh(h @ weight)
        return h

    def loss(later: bool, count: int, gather: bool = True) -> Tensor:
        if not gather:
            return products(count, x).sum()
        if later:
            work = mc.all_gather(share, AXIS, async_op=True)
            h = products(count, x)
            return h.sum() + work.wait().sum()
        whole = mc.all_gather(share, AXIS)
        return products(count, x).sum() + whole.sum()

    def timed(later: bool, count: int, gather: bool = True) -> Call:
        return lambda: loss(later, count, gather).backward()

    first = take_turns({"gather": timed(False, 1), "ten": timed(False, 10, False)}, max(3, repeats // 3))
    count = max(1, round(10 * first["gather"] / first["ten"]))
    return take_turns(
        {
            "alone": timed(False, 1),
            "products": timed(False, count, False),
            "in turn": timed(False, count),
            TOGETHER: timed(True, count),
        },
        repeats,
    )


# --------------------------------------------------------------------------------------------------- sums in backward


class Chain(nn.Module):
    """Layers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def step_of(model: nn.Module, x: Tensor, vary: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Call:
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def step() -> None:
        model.zero_grad()
        torch.func.functional_call(model, vary(parameters), (x,)).backward()

    return step


def backward_steps(repeats: int) -> Times:
    """Seconds of forward and backward, by who sums the gradients."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, WIDTH)
    models = [Chain() for _ in range(4)]
    theirs = DistributedDataParallel(models[0], bucket_cap_mb=BUCKET_MB)

    def ddp() -> None:
        theirs.zero_grad()
        theirs(x).backward()

    return take_turns(
        {
            "pvary of the tree": step_of(models[1], x, lambda tree: mc.pvary(tree, AXIS, bucket_mb=BUCKET_MB)),
            "DistributedDataParallel": ddp,
            "pvary leaf by leaf": step_of(models[2], x, lambda tree: {k: mc.pvary(p, AXIS) for k, p in tree.items()}),
            NO_SUMS: step_of(models[3], x, lambda tree: tree),
        },
        repeats,
    )


def events() -> list[tuple[str, float]]:
    """What one backward pass does when: the gradient of each layer's output, the starts of sums, the wait."""
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(BATCH, WIDTH)
    step = step_of(model, x, lambda tree: mc.pvary(tree, AXIS, bucket_mb=BUCKET_MB))
    step()  # in the first pass the ranks find out in which order the gradients come
    log: list[tuple[str, float]] = []

    def note(what: str) -> None:
        log.append((what, time.perf_counter()))

    def when_done(out: Tensor, i: int) -> None:
        out.register_hook(lambda _: note(f"gradient of layer {i}'s output"))

    hooks = [
        layer.register_forward_hook(lambda _layer, _x, out, i=i: when_done(out, i))
        for i, layer in enumerate(model.layers)
    ]
    start, finish = overlap._Sums._start, overlap._Sums.finish

    def noted_start(self: Any, *given: Any, **how: Any) -> None:
        note("sum starts")
        start(self, *given, **how)

    def noted_finish(self: Any, needed: Sequence[bool]) -> list[Tensor | None]:
        note("wait")
        sums = finish(self, needed)
        note("all sums are there")
        return sums

    overlap._Sums._start, overlap._Sums.finish = noted_start, noted_finish  # type: ignore[method-assign]
    try:
        step()
    finally:
        overlap._Sums._start, overlap._Sums.finish = start, finish  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
    return [(what, at - log[0][1]) for what, at in log]


# ------------------------------------------------------------------------------------------------------ small tensors


def collectives_in(call: Call) -> int:
    """How many operations of a process group, or entries in a mailbox, a call makes."""
    mesh = mc.current_mesh()
    assert mesh is not None
    mail = getattr(mesh.axis(AXIS).link, "mail", None)
    before = 0 if mail is None else mail.number
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    entries = 0 if mail is None else mail.number - before
    return entries + sum(event.count for event in seen.key_averages() if event.key.startswith("c10d::"))


def flat_all_reduce(leaves: Sequence[Tensor]) -> Any:
    flat = _flatten_dense_tensors(leaves)
    dist.all_reduce(flat)
    return _unflatten_dense_tensors(flat, leaves)


def sum_of_ranks(leaves: Sequence[Tensor]) -> Tensor:
    """Were all ranks' tensors, as many as there are ranks, in this one's memory."""
    total = _flatten_dense_tensors(leaves)
    for _ in range(mc.axis_size(AXIS) - 1):
        total += total
    return total


def small_tensors(repeats: int) -> tuple[Times, dict[str, int]]:
    leaves = [torch.randn(16 + i % 7, 8) for i in range(SMALL)]
    flat = torch.randn(sum(leaf.numel() for leaf in leaves))
    together = [part.view_as(leaf) for part, leaf in zip(flat.split([x.numel() for x in leaves]), leaves, strict=True)]
    calls: dict[str, Call] = {
        "as a tree": lambda: mc.all_reduce(leaves, AXIS),
        "as a tree that lies together": lambda: mc.all_reduce(together, AXIS),
        "leaf by leaf": lambda: [mc.all_reduce(leaf, AXIS) for leaf in leaves],
        "leaf by leaf, waited at the end": lambda: mc.wait(
            [mc.all_reduce(leaf, AXIS, async_op=True) for leaf in leaves]
        ),
        "torch.distributed, leaf by leaf": lambda: [dist.all_reduce(leaf.clone()) for leaf in leaves],
        "flatten, dist.all_reduce, unflatten": lambda: flat_all_reduce(leaves),
        IN_MEMORY: lambda: _unflatten_dense_tensors(sum_of_ranks(leaves), leaves),
    }
    return take_turns(calls, repeats), {name: collectives_in(call) for name, call in calls.items()}


# -------------------------------------------------------------------------------------------------------------- report


def measure(options: Namespace) -> dict[str, Any]:
    """On every rank."""
    mesh = mc.make_mesh({AXIS: -1})
    repeats = options.repeats or (5 if options.quick else 30)
    megabytes = 1.0 if options.quick else options.megabytes
    with mc.use_mesh(mesh):
        results = {
            "ranks": mesh.size,
            "megabytes": megabytes,
            "side_by_side": side_by_side(megabytes, repeats)
            | {"all_gather, forward and backward": backwards(megabytes, repeats)},
            "backward": backward_steps(repeats),
            "events": events(),
        }
        results["small"], results["counts"] = small_tensors(max(3, repeats // 2))
    return results


def report(results: dict[str, Any]) -> None:
    beside = {
        name: {"ours": times[TOGETHER]}
        | ({"torch's async_op": times[TORCHS]} if TORCHS in times else {})
        | {"in turn": times["in turn"], "the longer alone (floor)": max(times["alone"], times["products"])}
        for name, times in results["side_by_side"].items()
    }
    where = f"{results['ranks']} ranks, {results['megabytes']:g} MB"
    print_beside(f"A collective beside matrix products as long, {where}", beside, "ours", 1e-3)
    base, floor = results["backward"]["DistributedDataParallel"], results["backward"][NO_SUMS]
    print_table(
        f"Forward and backward of {LAYERS} layers, buckets of {BUCKET_MB:g} MB",
        ["ms", "", "x DDP", "x no sums (floor)"],
        [
            [name, f"{1e3 * took:.1f}", f"{took / base:.2f}", f"{took / floor:.2f}"]
            for name, took in results["backward"].items()
        ],
    )
    print_table(
        "One backward pass on rank 0",
        ["ms", "what"],
        [[f"{1e3 * at:.2f}", what] for what, at in results["events"]],
    )
    base, floor = results["small"]["leaf by leaf"], results["small"][IN_MEMORY]
    print_table(
        f"all_reduce of {SMALL} small tensors; collectives: of the process group, or in shared memory",
        ["ms", "", "x leaf by leaf", "x floor", "collectives"],
        [
            [name, f"{1e3 * took:.2f}", f"{took / base:.2f}", f"{took / floor:.2f}", str(results["counts"][name])]
            for name, took in results["small"].items()
        ],
    )


def budgets_of(results: dict[str, Any]) -> list[Budget]:
    """The design's for a step on gloo: a tree that went through pvary does what an adaptor does."""
    steps = results["backward"]
    return [
        Budget(
            f"pvary of the tree, a step on {results['ranks']} processes, over DistributedDataParallel",
            steps["pvary of the tree"] / steps["DistributedDataParallel"],
            0.8,
            "x",
        )
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("What communicating later buys.")
    parser.add_argument("--ranks", type=int, default=None, help="processes to start on this machine (2)")
    parser.add_argument("--megabytes", type=float, default=16.0, help="size of a collective in the first part (16)")
    parser.add_argument("--repeats", type=int, metavar="N", help="samples per number (30; 5 with --quick)")
    options = parser.parse_args(arguments)
    if world.under_launcher():
        mc.init()
        options.ranks = dist.get_world_size()
    leads = not dist.is_initialized() or dist.get_rank() == 0
    found = mc.launch(measure, options.ranks or 2, (options,), runtime="processes")
    if leads:
        info = machine()
        print_machine(info)
        report(found[0])
        write(options.json, {"machine": info} | judged(found[0], budgets_of(found[0])))


if __name__ == "__main__":
    main()
