"""What a collective costs the host, beside what else there is: one run, ratios, no assertions.

    python -m benchmarks.overhead                 # two minutes
    python -m benchmarks.overhead --quick         # some seconds, noisier
    python -m benchmarks.overhead --only collectives --only later
    python -m benchmarks.overhead --markdown      # the tables of docs/benchmarks.md too
    python -m benchmarks.overhead --json out.json

torch's fake backend (8 ranks, of which this process is rank 0) moves nothing, which leaves the host's part of a
collective alone. The candidates take turns in many short samples and each number is the median of its samples, so that
a machine that is slow for a while is slow for all of them. One thread; no garbage collection while the clock runs.

    alone         in-process ranks, 8, 64 and 256, beside a bare ring of as many threads and locks, on one core; a
                  shard_map of a tiny body, checked and not; the import, compiled
    all_reduce    by everyone who offers it
    collectives   ours beside what who uses torch.distributed writes ("direct") and its C++ call ("floor"), on several
                  shapes, dims and dtypes
    kinds         the same of other ops and dtypes (``benchmarks.kinds``)
    later         ``async_op=True`` and its wait, beside the same of torch.distributed
    trees         100 leaves beside torch's flatten, dist.all_reduce, unflatten of a list of them

Each candidate is measured on an input without grad, on a leaf that requires grad (forward alone), and with backward.
The budgets at the end are the design's, line by line.
"""

from __future__ import annotations

import _thread
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it
if not __package__:  # run as a file: the others lie beside it
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import meshcomm as mc
from benchmarks import kinds, peers
from benchmarks.common import (
    MODES,
    RANKS,
    Budget,
    Case,
    Times,
    as_json,
    calls_of,
    options_of,
    print_budgets,
    print_markdown,
    print_table,
    quiet,
    run,
    take_turns,
    timed,
    worst,
)

SECTIONS = ("alone", "all_reduce", "collectives", "kinds", "later", "trees")
BASE = "clone + dist.all_reduce"
OURS = "meshcomm, mesh="
FLOOR = "clone + ProcessGroup (floor)"
BARE = "the same in a bare Function"
FUNCTIONAL, SPMD_TYPES, DTENSOR = "functional collective + wait", "spmd_types", "DTensor.redistribute"
NO_GRAD, GRAD, BACKWARD = MODES
PERMUTED = [(rank, (rank + 1) % RANKS) for rank in range(RANKS)]
MANY = (64, 256)
"""In-process ranks, of which a launch may have more than there are here."""
STATES = 5048
"""The bytes of a rank's random states, of torch and of Python."""
LEAST = "the same with random states and sums (floor)"
BARE_THREADS = "bare threads, started and ended (floor)"
CHECKED = {"check_vma=True": True, "check_vma=False": False}
LEAVES = 100
FLAT = "flatten + dist.all_reduce + unflatten"


class Form(NamedTuple):
    """What a collective is given: a tensor, and the dim that is cut or joined."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    dim: int = 0

    def make(self) -> Tensor:
        return torch.ones(self.shape, dtype=self.dtype)

    def __str__(self) -> str:
        dtype = "" if self.dtype == torch.float32 else f" {str(self.dtype).removeprefix('torch.')}"
        return f"{list(self.shape)}{dtype}{f', dim {self.dim}' if self.dim else ''}"


SMALL = Form((16,))
PLAIN = (SMALL, Form((64, 64)), Form((64, 64), torch.bfloat16), Form((16,), torch.int64))
FORMS = (*PLAIN, Form((1, 64), dim=1))
COPIED = Form((64, 64), dim=1)
"""Here torch's call needs a copy, before it or after it."""

# Ours over "direct" with backward, at the commit that the design halves (4dd4e6b, of SMALL).
BACKWARD_ONCE = {"all_gather": 8.8, "reduce_scatter": 10.4, "all_to_all": 22, "broadcast": 12.5}
TRANSPOSED = {
    "all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "all_to_all", "broadcast": "",
    "permute": "permute", "shift": "shift", "shard": "all_gather",
}  # fmt: skip
"""What the backward of each is; "" where this rank's is the gradient itself."""
LIMITS = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "broadcast"), 1.35)
LIMITS |= dict.fromkeys(("permute", "shift", "shard"), 1.5)


# ------------------------------------------------------------------------------------------------------ all_reduce


class BareFunction(Function):
    """The least that a differentiable collective can be, by its floor and that of its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return call(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(g), None, None


def in_a_bare_function(
    call: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    apply: Callable[..., Tensor] = BareFunction.apply
    return lambda x: apply(x, call, back)


def itself(g: Tensor) -> Tensor:
    """The gradient where nothing is communicated."""
    return g


def all_reduce_cases(mesh: mc.Mesh, form: Form) -> dict[str, Case]:
    """One all_reduce of such a tensor, by everyone who offers it."""
    group, grad = mesh.device_mesh.get_group(), form.dtype.is_floating_point
    floor = peers.floors_of(RANKS, 0, group)["all_reduce"]
    cases = {
        OURS: Case(lambda x: mc.all_reduce(x, "tp", mesh=mesh), form.make, grad),
        "meshcomm, use_mesh": Case(lambda x: mc.all_reduce(x, "tp"), form.make, grad),
        BASE: Case(peers.peers_of(RANKS, 0)["all_reduce"][0], form.make, False),
        FLOOR: Case(floor, form.make, False),
        BARE: Case(in_a_bare_function(floor, itself), form.make, grad),
        FUNCTIONAL: Case(lambda x: funcol.all_reduce(x, "sum", group).wait(), form.make, grad),
        DTENSOR: Case(
            lambda x: x.redistribute(placements=[Replicate()]),
            lambda: DTensor.from_local(form.make(), mesh.device_mesh, [Partial()]),
            grad,
        ),
    }
    if importlib.util.find_spec("spmd_types") is not None:
        spmd: Any = importlib.import_module("spmd_types")
        cases[SPMD_TYPES] = Case(lambda x: spmd.all_reduce(x, group, src=spmd.P, dst=spmd.I), form.make, grad)
    return cases


def measure_all_reduce(mesh: mc.Mesh, repeats: int) -> dict[str, Times]:
    found = {}
    for form in PLAIN:
        times = take_turns(calls_of(all_reduce_cases(mesh, form)), repeats)
        print_reduces(f"One all_reduce of {form}; x: over {BASE} without grad", times)
        found[str(form)] = times
    return found


def print_reduces(title: str, times: Times) -> None:
    """µs by mode, each with its ratio to what a user would write."""
    base, rows = times[BASE][NO_GRAD], []
    for name, modes in times.items():
        cells = [(f"{1e6 * modes[m]:.1f}", f"{modes[m] / base:.2f}") if m in modes else ("-", "") for m in MODES]
        rows.append([name, *(part for cell in cells for part in cell)])
    if SPMD_TYPES not in times:
        rows.append([SPMD_TYPES, "not installed", *[""] * 5])
    print_table(title, ["µs", *(part for mode in MODES for part in (mode, "x"))], rows)


def judge_all_reduce(found: Mapping[str, Times]) -> list[Budget]:
    def over(who: str, ours: str = NO_GRAD, theirs: str = NO_GRAD) -> dict[str, float]:
        return {
            form: times[OURS][ours] / times[who][theirs]
            for form, times in found.items()
            if who in times and ours in times[OURS] and theirs in times[who]
        }

    return [
        worst(f"all_reduce over {BASE}", over(BASE), 1.2),
        worst("the same, x requires grad", over(BASE, GRAD), 1.9),
        worst(f"all_reduce, x requires grad, over {FUNCTIONAL}", over(FUNCTIONAL, GRAD, GRAD), 1 / 6),
        worst(f"all_reduce, x requires grad, over {SPMD_TYPES}", over(SPMD_TYPES, GRAD, GRAD), 1 / 4),
        worst(f"all_reduce, x requires grad, over {DTENSOR}", over(DTENSOR, GRAD, GRAD), 1 / 12),
    ]


# ----------------------------------------------------------------------------------------------- other collectives


def ours_of(name: str, form: Form, mesh: mc.Mesh, **more: Any) -> Callable[[Tensor], Any]:
    """Our collective, as a user calls it for this form."""
    collective = getattr(mc, name)
    extra: dict[str, tuple[Any, ...]] = {"all_to_all": (0, form.dim), "permute": (PERMUTED,)}
    own = extra.get(name, (form.dim,) if name in ("all_gather", "reduce_scatter", "shard") else ())
    return lambda x: collective(x, "tp", *own, mesh=mesh, **more)


def input_of(name: str, form: Form) -> Form:
    """The form, of such a shape that it can be cut: the one row of an all_to_all becomes a row per rank."""
    return form._replace(shape=(RANKS, *form.shape[1:])) if name == "all_to_all" and form.shape[0] == 1 else form


def measure_collectives(mesh: mc.Mesh, repeats: int) -> dict[str, dict[str, Times]]:
    """By collective and form: ours, the direct call, its floor."""
    found: dict[str, dict[str, Times]] = {name: {} for name in LIMITS}
    for form in (*FORMS, COPIED):
        theirs, floors = peers.peers_of(RANKS, form.dim), peers.floors_of(RANKS, form.dim, mesh.device_mesh.get_group())
        for name in LIMITS:
            given = input_of(name, form)
            grad = form.dtype.is_floating_point
            bare = in_a_bare_function(floors[name], floors.get(TRANSPOSED[name], itself))
            cases = {
                "ours": Case(ours_of(name, form, mesh), given.make, grad),
                "direct": Case(theirs[name][0], given.make, False),
                "floor": Case(floors[name], given.make, False),
                "bare": Case(
                    bare, given.make, grad and (form.dim == 0 or name != "all_to_all")
                ),  # back its dims change
            }
            check_alike(name, form, [case.run(given.make()) for case in cases.values()])
            cases["autograd"] = Case(Tensor.clone, given.make, grad)
            found[name][str(form)] = take_turns(calls_of(cases), repeats)
    title = (
        "The other collectives; x: over the direct call without grad; bare: the floors in a bare Function; autograd: "
        "a clone and its backward, and no collective"
    )
    print_collectives(title, found, peers.peers_of(RANKS, 0))
    return found


def check_alike(name: str, form: Form, results: Sequence[Tensor]) -> None:
    """What is compared gives the same kind of result."""
    if len({(tuple(y.shape), y.dtype) for y in results}) > 1:
        raise AssertionError(f"{name} of {form}: shapes {[list(y.shape) for y in results]}")


def print_collectives(title: str, found: Mapping[str, Mapping[str, Times]], theirs: Mapping[str, Any]) -> None:
    rows = []
    for name, forms in found.items():
        for form, times in forms.items():
            ours, direct = times["ours"], times["direct"][NO_GRAD]
            cells = [f"{1e6 * times[who][NO_GRAD]:.1f}" for who in ("ours", "direct", "floor") if who in times]
            cells += [""] * (3 - len(cells)) + [f"{ours[NO_GRAD] / direct:.2f}"]
            for mode in MODES[1:]:
                cells += [f"{1e6 * ours[mode]:.1f}", f"{ours[mode] / direct:.2f}"] if mode in ours else ["-", ""]
                cells.append(f"{1e6 * times['bare'][mode]:.1f}" if mode in times.get("bare", ()) else "")
            alone = times.get("autograd", {}).get(BACKWARD)
            cells.append("" if alone is None else f"{1e6 * alone:.1f}")
            rows.append([name, form, *cells, theirs[name][1]])
    more = (part for mode in MODES[1:] for part in (mode, "x", "bare"))
    head = ["µs", "", "ours", "direct", "floor", "x", *more, "autograd", ""]
    print_table(title, head, rows)


def judge_collectives(found: Mapping[str, Mapping[str, Times]]) -> list[Budget]:
    budgets = []
    for name, forms in found.items():
        fast = {form: times for form, times in forms.items() if form != str(COPIED) or name in ("broadcast", "shift")}
        ratios = {form: times["ours"][NO_GRAD] / times["direct"][NO_GRAD] for form, times in fast.items()}
        budgets.append(worst(f"{name} over the direct call", ratios, LIMITS[name]))
        if name in BACKWARD_ONCE:
            small = forms[str(SMALL)]
            both = small["ours"][BACKWARD] / small["direct"][NO_GRAD]
            budgets.append(
                Budget(f"{name} of {SMALL} and backward over the direct call", both, BACKWARD_ONCE[name] / 2, "x")
            )
    return budgets


# ------------------------------------------------------------------------------------------------- futures and trees


def measure_later(mesh: mc.Mesh, repeats: int) -> dict[str, dict[str, Times]]:
    """Start and wait, ours and torch's."""
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    found: dict[str, dict[str, Times]] = {name: {} for name in names}
    for form in FORMS:
        theirs = peers.peers_of(RANKS, form.dim, asynchronous=True)
        for name in names:
            ours, given = ours_of(name, form, mesh, async_op=True), input_of(name, form)
            cases = {
                "ours": Case(lambda x, ours=ours: ours(x).wait(), given.make, form.dtype.is_floating_point),
                "direct": Case(theirs[name][0], given.make, False),
            }
            check_alike(name, form, [case.run(given.make()) for case in cases.values()])
            found[name][str(form)] = take_turns(calls_of(cases), repeats)
    print_collectives("async_op=True, start and wait; x: over the same of torch.distributed", found, theirs)
    return found


def judge_later(found: Mapping[str, Mapping[str, Times]]) -> list[Budget]:
    return [
        worst(
            f"{name}, async_op=True and wait, over the direct call's",
            {form: times["ours"][NO_GRAD] / times["direct"][NO_GRAD] for form, times in forms.items()},
            2.0,
        )
        for name, forms in found.items()
    ]


def apart(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.ones(shape, dtype=dtype) for _ in range(LEAVES)]


def lying_together() -> list[Tensor]:
    return list(torch.ones(LEAVES * 16).split(16))


def nested() -> dict[str, Any]:
    """As a model's parameters often stand."""
    return {
        f"layer{i}": {"weight": torch.ones(8, 4), "more": (torch.ones(4), [torch.ones(2, 2)]), "bias": torch.ones(8)}
        for i in range(LEAVES // 4)
    }


TREES: Mapping[str, Callable[[], Any]] = {
    "list of [16]": partial(apart, (16,)),
    "list of [8, 4] bfloat16": partial(apart, (8, 4), torch.bfloat16),
    "dict of dicts and lists": nested,
    "list of [16] that lie together": lying_together,
}


def flat_all_reduce(leaves: list[Tensor]) -> Any:
    """By torch's own C++, of a list: what a tree is nobody asks."""
    flat = _flatten_dense_tensors(leaves)
    dist.all_reduce(flat)
    return _unflatten_dense_tensors(flat, leaves)


def tree_all_reduce(tree: Any) -> Any:
    """The same with torch's pytrees around it."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten(list(flat_all_reduce(leaves)), spec)


def measure_trees(mesh: mc.Mesh, repeats: int) -> dict[str, Times]:
    found = {}
    for what, make in TREES.items():
        cases = {
            "ours": Case(lambda tree: mc.all_reduce(tree, "tp", mesh=mesh), make),
            FLAT: Case(flat_all_reduce, lambda make=make: tree_leaves(make()), False),
            "of a pytree": Case(tree_all_reduce, make, False),
        }
        found[what] = take_turns(calls_of(cases), max(5, repeats // 4))
    rows = []
    for what, times in found.items():
        cells = [*times["ours"].values(), times[FLAT][NO_GRAD], times["of a pytree"][NO_GRAD]]
        ratio = times["ours"][NO_GRAD] / times[FLAT][NO_GRAD]
        rows.append([what, *(f"{1e6 * took:.0f}" for took in cells), f"{ratio:.2f}"])
    head = ["µs", *(f"ours, {mode}" for mode in MODES), FLAT, "of a pytree", "x"]
    print_table(f"all_reduce of a tree of {LEAVES} leaves; x: over {FLAT}", head, rows)
    return found


def judge_trees(found: Mapping[str, Times]) -> list[Budget]:
    return [
        worst(
            f"tree of {LEAVES} leaves over {FLAT}",
            {what: times["ours"][NO_GRAD] / times[FLAT][NO_GRAD] for what, times in found.items()},
            1.8,
        )
    ]


# ------------------------------------------------------------------------------------------- in-process and import


@contextmanager
def one_core() -> Iterator[None]:
    """This thread, and those that it starts, on one core, where the system can."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def bare_ring(laps: int, ranks: int = RANKS, turn: Callable[[int], object] | None = None) -> float:
    """Seconds per lap of a turn that goes round as many threads as there are ranks, from lock to lock. ``turn``: what
    each does when it is its turn.
    """
    locks = [threading.Lock() for _ in range(ranks)]
    taken: list[float] = []

    def rank(index: int) -> None:
        mine, following = locks[index], locks[(index + 1) % ranks]
        for lap in range(laps + 1):
            mine.acquire()
            if index == 0 and lap in (0, laps):
                taken.append(time.perf_counter())
            if turn is not None:
                turn(index)
            following.release()

    for lock in locks:
        lock.acquire()
    threads = [threading.Thread(target=rank, args=(index,)) for index in range(ranks)]
    for thread in threads:
        thread.start()
    locks[0].release()
    for thread in threads:
        thread.join()
    return (taken[1] - taken[0]) / laps


def least_turn(ranks: int, elements: int) -> Callable[[int], object]:
    """What a rank cannot do without in an all_reduce: its own random states, of torch and of Python, are copied in and
    out, and the last one adds up what all have brought and copies the sum for each.
    """
    places, states = bytearray(STATES), [bytearray(STATES) for _ in range(ranks)]
    xs = [torch.ones(elements) for _ in range(ranks)]
    sums: list[Tensor] = []

    def turn(index: int) -> None:
        places[:] = states[index]
        if index == ranks - 1:
            rows = xs
            while len(rows) > 1:
                rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
            sums[:] = [rows[0], *(rows[0].clone() for _ in xs[1:])]
        states[index][:] = places

    return turn


def in_process(repeats: int, elements: int = 16, ranks: int = RANKS) -> dict[str, float]:
    """One all_reduce of ranks that are threads of this process: seconds for all of them together; and the ring."""
    mesh = mc.make_mesh({"tp": ranks})
    case = Case(lambda x: mc.all_reduce(x, "tp", mesh=mesh), partial(torch.ones, elements))

    def rank() -> dict[str, float]:
        found = {}
        for (_, mode), call in calls_of({"": case}).items():
            call()
            mc.barrier("tp", mesh=mesh)
            start = time.perf_counter()
            for _ in range(20):  # the same count on every rank, or they would not meet
                call()
            found[mode] = (time.perf_counter() - start) / 20
        return found

    samples: dict[str, list[float]] = {}
    with quiet(), one_core():
        for _ in range(max(repeats, 3)):
            rings = {"ring": bare_ring(50, ranks), LEAST: bare_ring(50, ranks, least_turn(ranks, elements))}
            for what, took in (rings | mc.launch(rank, ranks=ranks)[0]).items():
                samples.setdefault(what, []).append(took)
    return {what: median(taken) for what, taken in samples.items()}


def bare_threads() -> None:
    """As many threads as ranks, each of which wakes the next one and ends."""
    locks = [threading.Lock() for _ in range(RANKS + 1)]

    def rank(index: int) -> None:
        locks[index].acquire()
        locks[index + 1].release()

    for lock in locks:
        lock.acquire()
    for index in range(RANKS):
        _thread.start_new_thread(rank, (index,))
    locks[0].release()
    locks[-1].acquire()


def mapped(repeats: int) -> dict[str, float]:
    """Seconds of a shard_map of a tiny body over in-process ranks, checked and not."""
    mesh, x = mc.make_mesh({"tp": RANKS}), torch.ones(2 * RANKS)
    calls: dict[tuple[str, str], Callable[[], object]] = {(BARE_THREADS, NO_GRAD): bare_threads}
    for what, check in CHECKED.items():
        total = mc.shard_map(
            lambda x: mc.all_reduce(x.sum(), "tp"), in_specs="(tp b)", out_specs="", mesh=mesh, check_vma=check
        )
        calls[what, NO_GRAD] = partial(total, x)
    with quiet():
        times = take_turns(calls, repeats, time.perf_counter)
    return {what: modes[NO_GRAD] for what, modes in times.items()}


def import_times(repeats: int) -> list[float]:
    """Seconds that ``import meshcomm`` takes after ``import torch``, in each of several fresh processes. All is
    compiled to bytecode, in a folder of its own, whatever the environment says of that.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = f"import sys, time, torch; sys.dont_write_bytecode, sys.pycache_prefix = False, {folder!r}\n"
        program += "start = time.perf_counter(); import meshcomm; print(time.perf_counter() - start)"
        command = [sys.executable, "-c", program]
        runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(repeats + 1)]
    return [float(each.stdout) for each in runs[1:]]  # the first one compiles


def measure_alone(repeats: int, starts: int) -> dict[str, Any]:
    """What needs a process without a process group."""
    inside, imports = in_process(min(repeats, 15)), import_times(starts)
    ring = inside["ring"]
    rows = [
        [{"ring": "a bare ring of threads and locks", LEAST: LEAST}.get(what, f"all_reduce of 16 elements, {what}"),
         f"{1e6 * took:.0f}", f"{took / ring:.2f}"]
        for what, took in inside.items()
    ]  # fmt: skip
    print_table(f"In-process, all {RANKS} ranks together, on one core", ["µs", "", "x"], rows)
    many = {ranks: in_process(min(repeats, 5), ranks=ranks) for ranks in MANY}
    rows = [
        [f"{ranks} ranks, {what}", f"{1e6 * took:.0f}", f"{1e6 * took / ranks:.1f}", f"{took / times['ring']:.2f}"]
        for ranks, times in {RANKS: inside, **many}.items()
        for what, took in times.items()
    ]
    print_table("The same of many ranks; x: over a bare ring of as many", ["µs", "", "each", "x"], rows)
    body = mapped(min(repeats, 15))
    rows = [[what, f"{1e3 * took:.2f}"] for what, took in body.items()]
    print_table(f"shard_map of a tiny body, {RANKS} in-process ranks", ["", "ms"], rows)
    print()
    print(f"import meshcomm after import torch, s: median {median(imports):.3f}, fastest {min(imports):.3f}")
    return {"in_process": inside, "many": many, "shard_map": body, "import": imports}


def judge_alone(found: Mapping[str, Any]) -> list[Budget]:
    inside = found["in_process"]
    what = f"in-process all_reduce, {RANKS} ranks, over a bare ring on one core"
    return [
        Budget(what, inside[NO_GRAD] / inside["ring"], 2.4, "x"),
        *(
            timed(f"shard_map of a tiny body, {RANKS} in-process ranks, {how}", 1e3 * took, 1.5, "ms")
            for how, took in found["shard_map"].items()
            if how in CHECKED
        ),
        timed("import meshcomm beyond import torch, byte-compiled", median(found["import"]), 0.05, "s"),
    ]


# ---------------------------------------------------------------------------------------------------------- program


def markdown(found: Mapping[str, Any]) -> None:
    """The table of docs/benchmarks.md."""
    times = found["all_reduce"][str(SMALL)]
    base = times[BASE][NO_GRAD]
    shown = {
        OURS: "**`mc.all_reduce(x, \"tp\", mesh=mesh)`**",
        BASE: "`x.clone()` + `dist.all_reduce`: in place, no gradient",
        FLOOR: "`x.clone()` + the C++ call of the process group: the floor",
        BARE: "the floor in a bare `autograd.Function`",
        FUNCTIONAL: "functional collective + `wait`",
        DTENSOR: "DTensor `redistribute`",
    }  # fmt: skip
    rows = []
    for who, name in shown.items():
        cells = [cell for mode in MODES[:2] for cell in ratio_cells(times[who].get(mode), base)]
        rows.append([name, *cells, f"{1e6 * times[who][BACKWARD]:.1f}" if BACKWARD in times[who] else ""])
    print_markdown(["", NO_GRAD, "", GRAD, "", BACKWARD], rows)
    if "collectives" in found:
        rows = []
        for name, forms in found["collectives"].items():
            small = forms[str(SMALL)]
            direct = small["direct"][NO_GRAD]
            cells = [f"{1e6 * small[who][NO_GRAD]:.1f}" for who in ("ours", "direct", "floor")]
            cells.append(f"{small['ours'][NO_GRAD] / direct:.2f} ×")
            cells += [f"{1e6 * small[who][BACKWARD]:.1f}" for who in ("ours", "bare")]
            rows.append([name, *cells])
        head = [
            "",
            "ours",
            "torch.distributed's",
            "its C++ call",
            "",
            f"ours {BACKWARD}",
            "its C++ calls in a bare Function",
        ]
        print_markdown(head, rows)


def ratio_cells(took: float | None, base: float) -> list[str]:
    return ["", ""] if took is None else [f"{1e6 * took:.1f}", f"{took / base:.2f} ×"]


def measure(options: Namespace) -> dict[str, Any]:
    """Everything, as it goes to --json."""
    repeats = options.repeats or (15 if options.quick else 200)
    wanted = options.only or SECTIONS
    found: dict[str, Any] = {"repeats": repeats}
    if "alone" in wanted:
        found["alone"] = measure_alone(repeats, min(repeats, 3 if options.quick else 7))
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    mesh = mc.make_mesh({"tp": RANKS})
    measures = {
        "all_reduce": measure_all_reduce, "collectives": measure_collectives, "kinds": kinds.measure,
        "later": measure_later, "trees": measure_trees,
    }  # fmt: skip
    with mc.use_mesh(mesh), quiet():
        for what, section in measures.items():
            if what in wanted:
                found[what] = section(mesh, max(3, repeats // (1 if what == "all_reduce" else 2)))
    judges: dict[str, Callable[[Any], list[Budget]]] = {
        "all_reduce": judge_all_reduce, "collectives": judge_collectives, "later": judge_later, "trees": judge_trees,
        "alone": judge_alone,
    }  # fmt: skip
    budgets = [budget for what, judge in judges.items() if what in found for budget in judge(found[what])]
    print_budgets(budgets)
    if options.markdown and "all_reduce" in found:
        markdown(found)
    return found | {"budgets": as_json(budgets)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("What a collective costs the host, beside what else there is.")
    parser.add_argument("--repeats", type=int, metavar="N", help="samples per number (200; 15 with --quick)")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="this part; may be given several times")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/benchmarks.md too")
    run(parser, measure, arguments)


if __name__ == "__main__":
    main()
