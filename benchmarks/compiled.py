"""A compiled training step: how long it takes, how often it waits, and whether its numbers are eager's. No assertions.

    python -m benchmarks.compiled                     # 2 gloo processes; minutes, nearly all spent compiling
    python -m benchmarks.compiled --quick             # a tiny model
    python -m benchmarks.compiled --ranks 4 --width 512 --blocks 4 --json out.json
    python -m benchmarks.compiled --only modules --blocks 4    # the second table alone, with buckets of two units
    torchrun --nproc-per-node 4 -m benchmarks.compiled

The model is a stack of gated MLPs on a mesh of dp x tp. Weights are cut over tp and then over dp, as FSDP has them: an
all_gather for each in forward, a reduce_scatter in backward. Gains and biases are replicated over dp: an all_reduce of
their gradients. Each block has tensor parallelism's all_reduce in forward and in backward (tp is 2 of 4 processes, and
1 of 2), and the loss is averaged over dp. Forward, backward and SGD with momentum are one function, compiled with
fullgraph=True by inductor:

    compiled      as inductor does it by default: a wait for each collective
    sunk          with sink_waits_iterative of reorder_for_compute_comm_overlap alone: as many waits, later
    overlapped    with bucket_all_gathers_fx, bucket_reduce_scatters_fx, bucket_all_reduces_fx and
                  reorder_for_compute_comm_overlap

A second table has the adaptors and ``fsdp.apply`` beside torch's compiled ``fully_shard``: compiled_modules.py.

The same step is written a second time with torch's functional collectives, whose all_reduces need an autograd.Function
for each end of a tensor parallel block.

Collectives and waits are counted in the code that inductor generates, by kind: g all_gather, s reduce_scatter,
r all_reduce. Candidates take turns in samples of some steps, with a barrier before each; a sample's time is that of the
slowest rank, and a number is the median of the samples. The last column is the greatest difference of a parameter or
loss from meshcomm's eager ones after the same steps, on any rank. What inductor has compiled for an earlier run it
finds on disk, and the first call is shorter then.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

# Before torch reads them. Ranks share the machine's cores; and workers that compile would have to be started for each
# rank, which takes longer than the few kernels that there are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.autograd import Function
from torch.utils import _pytree as pytree

import meshcomm as mc
from benchmarks import compiled_modules
from benchmarks.common import as_json, machine, print_machine, print_table, say, write

OURS, THEIRS = "meshcomm", "functional collectives"
EAGER = "eager"

# Names of inductor's configuration, as torch.compile(options=) takes them; there are no public ones. A cached graph
# shows no code to count in.
PLAIN: dict[str, Any] = {"fx_graph_cache": False}
OVERLAPPED = PLAIN | {
    **{f"bucket_{kind}_fx": "all" for kind in ("all_gathers", "reduce_scatters", "all_reduces")},
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_communication_preserving_peak_memory",
        "sink_waits_iterative",
        "reorder_communication_preserving_peak_memory",
    ],
}
SUNK = PLAIN | {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits_iterative"],
}
WAYS = {"compiled": PLAIN, "sunk": SUNK, "overlapped": OVERLAPPED}

Step = Callable[[Any, Any, Tensor, Tensor], tuple[Any, Any, Tensor]]


# --------------------------------------------------------------------------------------------------------- the step


class Collectives(NamedTuple):
    """What the step needs: the ends of each kind of parallelism."""

    gathered: Callable[[Tensor], Tensor]  # a shard -> the weight
    replicated: Callable[[Any], Any]  # a tree of replicated parameters
    into: Callable[[Tensor], Tensor]  # into a tensor parallel block
    out_of: Callable[[Tensor], Tensor]  # and out of it
    averaged: Callable[[Tensor], Tensor]  # the loss


def ours(mesh: mc.Mesh) -> Collectives:
    return Collectives(
        lambda shard: mc.all_gather(shard, "dp", mesh=mesh),
        lambda tree: mc.pvary(tree, "dp", mesh=mesh),
        lambda x: mc.pvary(x, "tp", mesh=mesh),
        lambda x: mc.all_reduce(x, "tp", mesh=mesh),
        lambda loss: mc.all_reduce(loss, "dp", "mean", mesh=mesh),
    )


class SumBackward(Function):
    """Nothing; backward a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return funcol.all_reduce(g, "sum", ctx.group), None


class SumForward(Function):
    """A sum; backward nothing. The functional all_reduce's own backward is a sum again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        y: Tensor = funcol.all_reduce(x, "sum", group)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g.view_as(g), None


def theirs(mesh: mc.Mesh) -> Collectives:
    dp, tp = (mesh.device_mesh.get_group(axis) for axis in ("dp", "tp"))
    into: Callable[..., Tensor] = SumBackward.apply
    out_of: Callable[..., Tensor] = SumForward.apply
    return Collectives(
        lambda shard: funcol.all_gather_tensor_autograd(shard, 0, dp),
        lambda tree: pytree.tree_map(lambda leaf: into(leaf, dp), tree),
        lambda x: into(x, tp),
        lambda x: out_of(x, tp),
        lambda loss: out_of(loss, dp) / dp.size(),
    )


def step_with(have: Collectives) -> Step:
    """Forward, backward and update as one function without side effects."""

    def loss_of(params: Any, x: Tensor, target: Tensor) -> Tensor:
        replicated = have.replicated(params["replicated"])
        for shards, here in zip(params["shards"], replicated, strict=True):
            up, gate, down = (have.gathered(shards[name]) for name in ("up", "gate", "down"))
            inside = have.into(F.layer_norm(x, x.shape[-1:]) * here["gain"])
            x = x + have.out_of((F.silu(inside @ gate) * (inside @ up)) @ down) + here["bias"]
        return have.averaged((x - target).square().mean())

    def step(params: Any, momentum: Any, x: Tensor, target: Tensor) -> tuple[Any, Any, Tensor]:
        params = pytree.tree_map(lambda p: p.detach().requires_grad_(), params)
        loss = loss_of(params, x, target)
        leaves, spec = pytree.tree_flatten(params)
        gradients = pytree.tree_unflatten(torch.autograd.grad(loss, leaves), spec)
        with torch.no_grad():
            momentum = pytree.tree_map(lambda m, g: 0.9 * m + g, momentum, gradients)
            params = pytree.tree_map(lambda p, m: p - 0.02 * m, params, momentum)
        return params, momentum, loss.detach()

    return step


class Problem:
    """This rank's part of the parameters and of the data."""

    def __init__(self, mesh: mc.Mesh, options: Namespace) -> None:
        numbers = torch.Generator().manual_seed(0)
        width, hidden = options.width, 4 * options.width

        def shard(rows: int, columns: int, dim: int) -> Tensor:
            whole = torch.randn(rows, columns, generator=numbers) / rows**0.5
            column: Tensor = mc.shard(whole, "tp", dim, mesh=mesh)
            return mc.shard(column, "dp", mesh=mesh)

        self.params = {
            "shards": [
                {"up": shard(width, hidden, 1), "gate": shard(width, hidden, 1), "down": shard(hidden, width, 0)}
                for _ in range(options.blocks)
            ],
            "replicated": [{"gain": torch.ones(width), "bias": torch.zeros(width)} for _ in range(options.blocks)],
        }
        numbers.manual_seed(1 + mesh.coordinate["dp"])
        self.data = torch.randn(2, options.tokens, width, generator=numbers).unbind()


# ------------------------------------------------------------------------------------------------------- candidates


class Candidate:
    """One way to run the step: its state goes on from sample to sample."""

    def __init__(self, name: str, way: str, step: Step, problem: Problem) -> None:
        self.name, self.way, self.step, self.problem = name, way, step, problem
        self.params = problem.params
        self.momentum = pytree.tree_map(torch.zeros_like, problem.params)
        self.losses: list[Tensor] = []
        self.samples: list[float] = []
        self.code = ""
        self.error: str | None = None
        self.first = 0.0

    def run(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.params, self.momentum, loss = self.step(self.params, self.momentum, *self.problem.data)
            self.losses.append(loss)

    def begin(self) -> None:
        """The first step, in which it is compiled."""
        start = time.perf_counter()
        if self.way == EAGER:
            self.run()
        else:
            compiled = torch.compile(self.step, fullgraph=True, dynamic=False, options=WAYS[self.way])
            self.step = compiled
            try:
                _, codes = run_and_get_code(self.run)
            except Exception as error:  # on every rank: what does not trace does so nowhere
                self.error = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            else:
                self.code = "\n".join(codes)
        self.first = time.perf_counter() - start

    def counts(self) -> dict[str, int]:
        """Collectives in the generated code by kind, and waits."""
        return compiled_modules.counts_in(self.code)

    def differs(self, other: Candidate) -> float:
        """The greatest difference of a loss or parameter."""
        pairs = zip(self.state(), other.state(), strict=True)
        return max(float((mine - its).abs().max()) for mine, its in pairs)

    def state(self) -> list[Tensor]:
        return [*self.losses, *pytree.tree_leaves(self.params)]


def candidates_of(mesh: mc.Mesh, options: Namespace) -> list[Candidate]:
    problem = Problem(mesh, options)
    both = {OURS: ours(mesh), THEIRS: theirs(mesh)}
    return [Candidate(name, way, step_with(have), problem) for name, have in both.items() for way in (EAGER, *WAYS)]


# -------------------------------------------------------------------------------------------------------- measuring


def slowest(seconds: float, mesh: mc.Mesh) -> float:
    return mc.all_reduce(torch.tensor(seconds, dtype=torch.float64), ("dp", "tp"), "max", mesh=mesh).item()


def measure(options: Namespace) -> dict[str, Any]:
    """What one rank does."""
    tp = 2 if options.ranks > 2 and options.ranks % 2 == 0 else 1
    mesh = mc.make_mesh({"dp": options.ranks // tp, "tp": tp})
    if options.only:
        return {"rank": mesh.rank, "mesh": mesh.shape, "rows": [], "modules": compiled_modules.measure(options, WAYS)}
    todo = candidates_of(mesh, options)
    # torch.autograd.grad inside of what is compiled. torch.func.grad needs no switch, but functional collectives do not
    # go through it.
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for candidate in todo:
            candidate.begin()
            if mesh.rank == 0:
                say(f"{candidate.name}, {candidate.way}: {candidate.first:.1f} s")
        working = [candidate for candidate in todo if candidate.error is None]
        for _ in range(options.repeats):
            for candidate in working:
                mc.barrier(("dp", "tp"), mesh=mesh)
                start = time.perf_counter()
                candidate.run(options.steps)
                candidate.samples.append(slowest(time.perf_counter() - start, mesh) / options.steps)
    rows = [row_of(candidate, todo[0], mesh) for candidate in todo]
    return {"rank": mesh.rank, "mesh": mesh.shape, "rows": rows, "modules": compiled_modules.measure(options, WAYS)}


def row_of(candidate: Candidate, eager: Candidate, mesh: mc.Mesh) -> dict[str, Any]:
    row: dict[str, Any] = {"name": candidate.name, "way": candidate.way, "first": slowest(candidate.first, mesh)}
    if candidate.error is not None:
        return row | {"error": candidate.error}
    difference = slowest(candidate.differs(eager), mesh)
    return row | {"step": median(candidate.samples), "counts": candidate.counts(), "difference": difference}


# ---------------------------------------------------------------------------------------------------------- results


def cells(row: dict[str, Any], base: float) -> list[str]:
    """A line of the table."""
    head = [f"{row['name']}, {row['way']}", f"{row['first']:.1f}"]
    if "error" in row:
        return [*head, "-", "", "-", "-", "-"]
    counts = row["counts"]
    kinds = {"g": "all_gather", "s": "reduce_scatter", "r": "all_reduce"}
    collectives = " + ".join(f"{counts.get(kind, 0)}{letter}" for letter, kind in kinds.items())
    shown = [collectives, str(counts["wait"])] if counts else ["-", "-"]
    return [*head, f"{1e3 * row['step']:.2f}", f"{row['step'] / base:.2f}", *shown, f"{row['difference']:.1e}"]


def report(info: dict[str, object], options: Namespace, found: dict[str, Any]) -> None:
    print_machine(info)
    mesh = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    rows = found["rows"]
    sizes = ", ".join(f"{name} {getattr(options, name)}" for name in ("blocks", "width", "tokens"))
    if rows:
        print_table(
            f"A training step on gloo, mesh {mesh}; {sizes}",
            ["", "first call, s", "ms a step", "x", "collectives", "waits", "difference"],
            [cells(row, rows[0]["step"]) for row in rows],
        )
    for row in rows:
        if "error" in row:
            print(f"\n{row['name']}, {row['way']}, did not compile: {row['error']}")
    found["budgets"] = as_json(compiled_modules.report(found["modules"]))
    settings = {name: getattr(options, name) for name in ("ranks", "blocks", "width", "tokens", "steps", "repeats")}
    write(options.json, {"machine": info, "options": settings, **found})


def parsed(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description="A compiled training step: time, waits and numbers.")
    parser.add_argument("--quick", action="store_true", help="one narrow block, few repeats")
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="how many processes (2); tp is 2 of 4, 6 and so on"
    )
    parser.add_argument("--blocks", type=int, metavar="N", help="depth of the model (2; 1 with --quick)")
    parser.add_argument("--width", type=int, metavar="N", help="and its width (256; 32 with --quick)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens on each dp rank (256; 16 with --quick)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps in a sample (5; 2 with --quick)")
    parser.add_argument("--repeats", type=int, metavar="N", help="samples per candidate (11; 3 with --quick)")
    parser.add_argument("--only", choices=["modules"], help="the second table alone")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there too, times in seconds")
    options = parser.parse_args(arguments)
    usual = {"blocks": (2, 1), "width": (256, 32), "tokens": (256, 16), "steps": (5, 2), "repeats": (11, 3)}
    for name, (full, quick) in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    found = mc.launch(measure, ranks=options.ranks, args=(options,), runtime="processes")[0]
    if found["rank"] == 0:
        report(machine(), options, found)
    mc.shutdown()


if __name__ == "__main__":
    main()
