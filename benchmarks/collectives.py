"""How fast each collective moves bytes, beside torch.distributed's own call in the same run. No assertions.

    python -m benchmarks.collectives                          # 4 ranks in-process, 2 and 4 processes of this machine
    python -m benchmarks.collectives --quick                  # some seconds, noisier
    python -m benchmarks.collectives --ops all_gather,shift -b 1M -e 64M -f 2
    python -m benchmarks.collectives --markdown               # the table of docs/benchmarks.md too
    python -m benchmarks.collectives --json out.json --plot out.png         # --plot: pip install 'meshcomm[plots]'
    torchrun --nproc-per-node 4 -m benchmarks.collectives     # the ranks of torchrun, mpiexec or srun

The columns are those of NVIDIA's nccl-tests, and so are the short options. size is S, the bytes of the whole buffer: of
all n shares together where a collective is cut over the n ranks. algbw is S / time, and busbw is algbw times

    all_reduce, and the backward of pvary, which is one                                2(n-1)/n
    all_gather, all_gather_invariant, reduce_scatter, all_to_all, gather, scatter      (n-1)/n
    broadcast, reduce, shift (nccl-tests' sendrecv), permute, send (to recv, in pairs)  1

The floor is the same copies and sums in a rank's own memory: what it takes for the result, and between processes of one
machine what the others read of its tensor, which it has to write to where they can. All ranks do so at the same time.
What it leaves out: that they read what another core has written, and that they meet.
From 1 MB on it goes to memory that has been touched before: fresh pages would take longer than all else. On gloo the
last column says whether the line holds the budgets: over torch's call, and of 2 processes over the floor.
#wrong is the number of elements, on all ranks, that differ from what each rank computes by itself.

Processes use NCCL where there are GPUs and gloo elsewhere. Ours and torch's take turns sample by sample, with a barrier
before each. A sample's time is that of the slowest rank, and a number is the median of the samples. On CPUs the host's
clock times one call, and with it that the ranks come from the barrier, with cold caches; ``--in-a-row 20`` times so
many calls one after the other, as nccl-tests does, and so it is on an accelerator, between two synchronisations of it.
Where one machine has as many cores as ranks, each rank has one of its own, as MPI's launchers bind them: gloo's threads
wake all on one core, where ranks that give way to each other stay for thousands of calls, in turns.
In-process, where ranks run one at a time, a sample lasts from the first rank's start to the last one's end;
torch.distributed cannot have its ranks in one process, so there is nothing beside.

Then all_reduce is taken apart: it equals all_gather after reduce_scatter, in value (elements that differ) and in bytes
(what each must send at least, which is its factor times S), with the times of all side by side.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import zlib
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TextIO

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it: ranks share the machine's cores

import torch
import torch.distributed as dist
from torch import Tensor

import meshcomm as mc
from benchmarks import bandwidth, plots
from benchmarks.bandwidth import FACTORS, HEAD, SIDE, UNDER_HEAD, Row
from benchmarks.calls import (
    AXIS,
    EXACT,
    OURS,
    REDUCE_OPS,
    THEIRS,
    Problem,
    copied,
    count_wrong,
    expected,
    given,
    lent_and_copied,
)
from benchmarks.common import (
    Budget,
    as_json,
    machine,
    print_budgets,
    print_machine,
    print_markdown,
    print_table,
    worst,
    write,
)
from meshcomm.runtime.process import table
from meshcomm.runtime.start import world

RUNTIMES = ("in-process", "processes")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in EXACT}
FEWEST = 5
"""Samples of which a number is the median, however long they take."""
SIZES = tuple(map(bandwidth.parse_size, ("64", "1K", "16K", "256K", "1M", "8M", "64M")))
PROCESSES = (2, 4)
LEAD = 3e-4
"""Seconds in which the ranks of one machine have heard when they go on."""
BATCH = 20  # calls of a sample on an accelerator, between two synchronisations

Call = Callable[[], Tensor | None]


# ---------------------------------------------------------------------------------------------------------- timing


class Ranks:
    """The ranks of one run: how they wait for each other and compare notes. Where there are processes this goes through
    torch.distributed and not through what is measured.
    """

    def __init__(self, runtime: str) -> None:
        self.mesh = mc.make_mesh({AXIS: -1})
        self.rank, self.size, self.device = self.mesh.rank, self.mesh.size, self.mesh.device
        self.processes = runtime == "processes"
        self.backend = backend_of(self.device) if self.processes else runtime
        self.one_clock = self.processes and self._on_one_machine()

    def greatest(self, values: Sequence[float]) -> list[float]:
        """The greatest of each number over the ranks."""
        return self.combined(torch.tensor(values, dtype=torch.float64, device=self.device), "max")

    def total(self, values: Sequence[int]) -> list[int]:
        return self.combined(torch.tensor(values, device=self.device), "sum")

    def combined(self, values: Tensor, op: str) -> list[Any]:
        if not self.processes:
            return mc.all_reduce(values, AXIS, op, mesh=self.mesh).tolist()
        dist.all_reduce(values, REDUCE_OPS[op])
        return values.tolist()

    def meet(self) -> None:
        """All ranks are here, and their devices are idle. One rank leaves a collective of gloo up to 100 µs before
        another: on one machine they go on at one moment, so that none waits for another in what is measured.
        """
        (start,) = self.greatest([time.monotonic() + LEAD])
        self.synchronize()
        while self.one_clock and time.monotonic() < start:
            os.sched_yield()

    def _on_one_machine(self) -> bool:
        name = zlib.crc32(table.machine().encode())  # 0: there is no telling
        return name > 0 and self.greatest([name, -name]) == [name, -name]

    @contextlib.contextmanager
    def each_on_its_cores(self) -> Iterator[None]:
        """On CPUs of one machine this thread runs where no other rank's does, if there are as many cores."""
        before = os.sched_getaffinity(0) if self.one_clock and self.device.type == "cpu" else set[int]()
        each = len(before) // self.size
        if each:
            os.sched_setaffinity(0, sorted(before)[self.rank * each : (self.rank + 1) * each])
        try:
            yield
        finally:
            if each:
                os.sched_setaffinity(0, before)

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def spans(self, starts: Sequence[float], ends: Sequence[float]) -> list[float]:
        """How long each sample took, all ranks considered."""
        if self.processes:  # perhaps on machines whose clocks differ: the slowest rank's time
            return self.greatest([end - start for start, end in zip(starts, ends, strict=True)])
        last, first = self.greatest(ends), self.greatest([-start for start in starts])
        return [end + minus_start for end, minus_start in zip(last, first, strict=True)]


def backend_of(device: torch.device) -> str:
    """What torch.distributed moves this device's tensors with."""
    pairs = dict(pair.split(":", 1) for pair in dist.get_backend_config().split(","))
    return pairs.get(device.type, "unknown")


def take_turns(
    calls: Sequence[Call], ranks: Ranks, repeats: int, warmup: int, seconds: float, batch: int = 1
) -> list[tuple[float, Tensor | None]]:
    """The median seconds of each call and its last result, of samples taken in turns, of ``batch`` calls each; when
    those have taken so many seconds, of at least ``FEWEST``.
    """
    starts: list[list[float]] = [[] for _ in calls]
    ends: list[list[float]] = [[] for _ in calls]
    results: list[Tensor | None] = [None for _ in calls]

    def turn(number: int) -> None:
        order = range(len(calls)) if number % 2 else reversed(range(len(calls)))  # none always comes first
        for i in order:
            results[i] = None  # its memory may be used again, as in a loop of a program
            ranks.meet()
            start = time.perf_counter()
            for _ in range(batch):
                results[i] = calls[i]()
            ranks.synchronize()
            ends[i].append(time.perf_counter())
            starts[i].append(start)

    begun = time.monotonic()
    gc.disable()
    try:
        for number in range(warmup):
            if number == 0 or ranks.greatest([time.monotonic() - begun])[0] < seconds / 4:
                turn(number)
        first = len(starts[0])
        for number in range(repeats):
            if number < FEWEST or ranks.greatest([time.monotonic() - begun])[0] < seconds:
                turn(number)
    finally:
        gc.enable()
    spans = [ranks.spans(starts[i], ends[i])[first:] for i in range(len(calls))]
    return [(median(taken) / batch, result) for taken, result in zip(spans, results, strict=True)]


def samples_of(options: Namespace, ranks: Ranks) -> tuple[int, int, float, int]:
    """How many, how many before them, for how many seconds, and of how many calls each."""
    batch = options.in_a_row or (1 if ranks.device.type == "cpu" else BATCH)
    return options.repeats, options.warmup, options.seconds, batch


# ----------------------------------------------------------------------------------------------------- what is measured


class Halves(NamedTuple):
    """all_reduce beside all_gather after reduce_scatter: elements that differ, bytes a rank sends, seconds."""

    size: int
    differ: int
    bytes_all_reduce: float
    bytes_reduce_scatter: float
    bytes_all_gather: float
    time_all_reduce: float
    time_reduce_scatter: float
    time_all_gather: float
    time_both: float

    def cells(self) -> list[str]:
        sent = [f"{self.bytes_all_reduce:.0f}", f"{self.bytes_reduce_scatter:.0f} + {self.bytes_all_gather:.0f}"]
        times = [self.time_all_reduce, self.time_reduce_scatter, self.time_all_gather, self.time_both]
        ratio = f"{self.time_both / self.time_all_reduce:.2f}"
        return [str(self.size), str(self.differ), *sent, *(f"{1e6 * seconds:.1f}" for seconds in times), ratio]


def problem_of(collective: str, size: int, ranks: Ranks, options: Namespace) -> Problem:
    count = bandwidth.count_of(collective, size, options.dtype.itemsize, ranks.size)
    op = bandwidth.redop_of(collective, options.op)
    return Problem(collective, count, op, options.dtype, ranks.rank, ranks.size, ranks.device, ranks.mesh)


def measure_one(collective: str, size: int, ranks: Ranks, options: Namespace) -> Row:
    """One line of the table."""
    problem = problem_of(collective, size, ranks, options)
    x, wanted = given(problem), expected(problem)
    kinds = [OURS[collective], THEIRS[collective][0]] if ranks.processes else [OURS[collective]]
    calls: list[Call] = [partial(kind, problem, x) for kind in kinds]
    if problem.op in ("none", "sum"):
        every = [given(replace(problem, rank=rank)) for rank in range(ranks.size)]
        out = copied(problem, every) if size >= bandwidth.LARGE else None
        if ranks.processes and ranks.device.type == "cpu":
            calls.append(partial(lent_and_copied, problem, x, x.clone(), every, out))
        else:
            calls.append(partial(copied, problem, every, out))
    turns = take_turns(calls, ranks, *samples_of(options, ranks))
    floor = turns.pop()[0] if len(calls) > len(kinds) else None
    wrong = ranks.total([count_wrong(result, wanted) for _, result in turns])
    size = bandwidth.size_of(collective, problem.count, options.dtype.itemsize, ranks.size)
    sides = [
        bandwidth.side_of(collective, size, seconds, ranks.size, errors)
        for (seconds, _), errors in zip(turns, wrong, strict=True)
    ]
    dtype = str(options.dtype).removeprefix("torch.")
    ours, theirs = sides if len(sides) == 2 else (sides[0], None)
    return Row(collective, size, problem.count, dtype, problem.op, bandwidth.root_of(collective), ours, theirs, floor)


def measure_halves(size: int, ranks: Ranks, options: Namespace) -> Halves:
    """all_reduce, and the same in two steps."""
    problem = problem_of("reduce_scatter", size, ranks, options)
    x, mesh, op = given(problem), ranks.mesh, options.op
    part = mc.reduce_scatter(x, AXIS, op=op, mesh=mesh)
    calls: list[Call] = [
        lambda: mc.all_reduce(x, AXIS, op, mesh=mesh),
        lambda: mc.reduce_scatter(x, AXIS, op=op, mesh=mesh),
        lambda: mc.all_gather(part, AXIS, mesh=mesh),
        lambda: mc.all_gather(mc.reduce_scatter(x, AXIS, op=op, mesh=mesh), AXIS, mesh=mesh),
    ]
    times, results = zip(*take_turns(calls, ranks, *samples_of(options, ranks)), strict=True)
    (differ,) = ranks.total([count_wrong(results[3], results[0])])
    size = bandwidth.size_of("reduce_scatter", problem.count, options.dtype.itemsize, ranks.size)
    sent = [size * FACTORS[name](ranks.size) for name in ("all_reduce", "reduce_scatter", "all_gather")]
    return Halves(size, differ, *sent, *times)


def measure(options: Namespace, runtime: str) -> dict[str, Any]:
    """One run, on one rank: all rows, printed by rank 0 as they come, and as they go to --json."""
    ranks = Ranks(runtime)
    with ranks.each_on_its_cores():
        return measure_all(options, runtime, ranks)


def measure_all(options: Namespace, runtime: str, ranks: Ranks) -> dict[str, Any]:
    """The same, where the ranks run."""
    leads = ranks.rank == 0
    in_two = options.sizes if "all_reduce" in options.ops else []
    progress = Progress(len(options.sizes) * len(options.ops) + len(in_two), sys.stderr if leads else None)
    rows: list[Row] = []
    for collective in options.ops:
        for size in options.sizes:
            progress.step(f"{ranks.backend}: {collective}", bandwidth.show_size(size))
            rows.append(measure_one(collective, size, ranks, options))
        progress.clear()
        if leads:
            print_rows(rows[-len(options.sizes) :], ranks)
    halves: list[Halves] = []
    for size in in_two:
        progress.step(f"{ranks.backend}: all_reduce in two", bandwidth.show_size(size))
        halves.append(measure_halves(size, ranks, options))
    progress.clear()
    if leads and halves:
        print_halves(halves, ranks)
    return {
        "runtime": runtime,
        "backend": ranks.backend,
        "device": ranks.device.type,
        "ranks": ranks.size,
        "rows": [{**row.fields(), "budget": verdict_of(row, ranks)} for row in rows],
        "all_reduce_in_two": [half._asdict() for half in halves],
        "budgets": as_json(budgets_of(rows, ranks.backend, ranks.size)),
    }


def budgets_of(rows: Sequence[Row], backend: str, ranks: int) -> list[Budget]:
    """The design's budgets, which are for gloo; and that of ranks of one process."""
    if backend == RUNTIMES[0]:
        return budgets_over_memory(rows, bandwidth.OVER_MEMORY[-1:])
    if backend != "gloo":
        return []
    budgets = []
    for collective, ratios in bandwidth.ratios_from_1mb(rows).items():
        limit = bandwidth.LIMITS.get(collective, bandwidth.LIMIT)
        mean = bandwidth.geometric_mean([ratio for ratio, _ in ratios])
        most, size = max(ratios)
        budgets.append(Budget(f"{collective}, geometric mean from 1 MB", mean, limit, "x"))
        budgets.append(Budget(f"{collective}, worst, at {bandwidth.show_size(size)}", most, limit, "x"))
    everywhere = {
        f"{row.collective} of {bandwidth.show_size(row.size)}": row.ratio for row in rows if row.ratio is not None
    }
    if everywhere:
        budgets.append(worst("over torch's own call, all sizes", everywhere, bandwidth.LIMIT))
    return budgets + (budgets_over_memory(rows) if ranks == 2 else [])


def budgets_over_memory(
    rows: Sequence[Row], limits: Sequence[tuple[int, int, float]] = bandwidth.OVER_MEMORY
) -> list[Budget]:
    """Of two processes, or of ranks of one, over the same copies and sums in private memory."""
    budgets = []
    for least, most, limit in limits:
        found = {
            f"{row.collective} of {bandwidth.show_size(row.size)}": row.ours.time / row.floor
            for row in rows
            if row.floor is not None and least <= row.size <= most
        }
        if found:
            what = f"over the same in private memory, {bandwidth.show_size(least)} to {bandwidth.show_size(most)}"
            budgets.append(worst(what, found, limit))
    return budgets


# --------------------------------------------------------------------------------------------------------- results


class Progress:
    """A bar on a terminal; elsewhere a line per collective. Nothing without a stream."""

    def __init__(self, steps: int, stream: TextIO | None, width: int = 30) -> None:
        self.steps, self.stream, self.width = steps, stream, width
        self.done, self.what = 0, ""
        self.start = time.monotonic()

    def step(self, what: str, detail: str) -> None:
        """Begin a step; those before it are done."""
        if self.stream is None:
            return
        if self.stream.isatty():
            full = self.width * self.done // self.steps
            bar = "#" * full + "." * (self.width - full)
            text = f"[{bar}] {self.done}/{self.steps}  {time.monotonic() - self.start:.0f} s  {what} {detail}"
            self.stream.write(f"\r\033[K{text}")
        elif what != self.what:
            self.stream.write(f"{what} ({self.done}/{self.steps})\n")
        self.stream.flush()
        self.done, self.what = self.done + 1, what

    def clear(self) -> None:
        """Make room for a table."""
        if self.stream is not None and self.stream.isatty():
            self.stream.write("\r\033[K")
            self.stream.flush()


def print_rows(rows: Sequence[Row], ranks: Ranks) -> None:
    """One collective's table: ours, then torch's."""
    collective = rows[0].collective
    what = "pvary, forward and backward" if collective == "pvary" else collective
    theirs = THEIRS[collective][1] if ranks.processes else "cannot have its ranks in one process"
    head = [*HEAD, "meshcomm: time", *SIDE[1:], "torch: time", *SIDE[1:], "x", "floor", "x", "budget"]
    title = f"{what}: {ranks.backend}, {ranks.size} ranks; torch.distributed: {theirs}; x: our time over theirs"
    print_table(title, head, [[*UNDER_HEAD, ""], *([*row.cells(), verdict_of(row, ranks)] for row in rows)])


def verdict_of(row: Row, ranks: Ranks) -> str:
    """Whether it holds the design's budgets, which are for gloo."""
    return bandwidth.verdict(row, ranks.size) if ranks.backend == "gloo" else "-"


def print_halves(halves: Sequence[Halves], ranks: Ranks) -> None:
    title = f"all_reduce(x) and all_gather(reduce_scatter(x)): {ranks.backend}, {ranks.size} ranks"
    title += "; x: the two one after the other, over all_reduce"
    head = ["size", "differ", "all_reduce sends", "the two send", "all_reduce", "reduce_scatter", "all_gather", "both"]
    under = ["B", "elements", "B per rank", "B per rank", *["µs"] * 4, ""]
    print_table(title, [*head, "x"], [under, *(half.cells() for half in halves)])


# ---------------------------------------------------------------------------------------------------------- program


def parser() -> ArgumentParser:
    """The options; the short ones are nccl-tests'."""
    parser = ArgumentParser(description="How fast each collective moves bytes, beside torch.distributed's own call.")
    add = parser.add_argument
    add("--runtime", type=names_of(RUNTIMES), help="processes, in-process or both (both; a launcher's are processes)")
    add("--ranks", type=int, metavar="N", help="how many, at least 2 (4, and 2 processes; a launcher knows by itself)")
    add("--backend", choices=["gloo", "nccl"], help="of the processes (nccl where GPUs are, else gloo)")
    add("--ops", type=names_of(list(OURS)), default=list(OURS), metavar="NAME,...", help=f"of {', '.join(OURS)} (all)")
    add("-b", "--min-bytes", type=size, metavar="SIZE", help="smallest size (1K)")
    add("-e", "--max-bytes", type=size, metavar="SIZE", help="largest (32M; 1M with --quick)")
    add("-f", "--factor", type=int, metavar="N", help="from one size to the next (4; 32 with --quick)")
    parser.epilog = f"Without -b, -e, -f, --quick the sizes are {', '.join(map(bandwidth.show_size, SIZES))}."
    add("-d", "--dtype", choices=list(DTYPES), default="float32")
    add("-o", "--op", choices=list(REDUCE_OPS), default="sum", help="of the collectives that reduce (sum)")
    add("-n", "--repeats", type=int, metavar="N", help="samples per number (20; 3 with --quick)")
    add("--seconds", type=float, metavar="S", default=1.0, help=f"per line, from {FEWEST} samples per number on (1)")
    add("--in-a-row", type=int, metavar="N", help=f"calls per sample, one after the other (1; {BATCH} on accelerators)")
    add("-w", "--warmup", type=int, metavar="N", help="samples before those (5; 1 with --quick)")
    add("--quick", action="store_true", help="few sizes and repeats: seconds, for CI")
    add("--json", metavar="FILE", help="write all numbers there too")
    add("--markdown", action="store_true", help="print the table of the docs too")
    add("--plot", metavar="FILE", help="draw busbw against size there, as PNG; needs the extra `plots`")
    return parser


def markdown(rows: Sequence[dict[str, Any]]) -> None:
    """Ours in ms by size, each with its ratio to torch's call where there is one."""
    sizes = list(dict.fromkeys(bandwidth.show_size(row["size"]) for row in rows))
    lines: dict[str, list[str]] = {}
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f} ×"
        lines.setdefault(row["collective"], [row["collective"]]).extend(
            [f"{row['meshcomm']['time_us'] / 1e3:.2f}", ratio]
        )
    print_markdown(["", *(cell for size in sizes for cell in (f"{size}B", ""))], list(lines.values()))


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A type of option: names with commas between them."""

    def names(text: str) -> list[str]:
        given = [name.strip() for name in text.split(",")]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(known)}")
        return list(dict.fromkeys(given))

    return names


def size(text: str) -> int:
    try:
        return bandwidth.parse_size(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def parsed(arguments: Sequence[str] | None) -> Namespace:
    """The options, filled in and checked."""
    here = parser()
    options = here.parse_args(arguments)
    options.dtype = DTYPES[options.dtype]
    ranged = options.quick or {options.min_bytes, options.max_bytes, options.factor} != {None}
    options.min_bytes = options.min_bytes or 2**10
    quick = {"max_bytes": 2**20, "factor": 32, "repeats": 3, "warmup": 1}
    usual = {"max_bytes": 2**25, "factor": 4, "repeats": 20, "warmup": 5}
    for name, value in (quick if options.quick else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.factor < 2 or options.repeats < 1 or options.warmup < 0 or options.max_bytes < options.min_bytes:
        here.error("--factor is at least 2, --repeats 1, --warmup 0, and --max-bytes is no less than --min-bytes")
    if options.in_a_row is not None and options.in_a_row < 1:
        here.error("--in-a-row is at least 1")
    span = options.min_bytes, options.max_bytes, options.factor
    options.sizes = bandwidth.size_range(*span) if ranged else list(SIZES)
    if not options.dtype.is_floating_point:
        if options.op == "mean":
            here.error(f"no mean of {options.dtype}")
        options.ops = [name for name in options.ops if name != "pvary"]  # integers have no gradient
        if not options.ops:
            here.error(f"no pvary of {options.dtype}")
    if options.plot and not plots.available():
        here.error(plots.MISSING)
    settle_ranks(here, options)
    return options


def settle_ranks(here: ArgumentParser, options: Namespace) -> None:
    """Whose ranks, and how many."""
    if world.under_launcher():
        mc.init(backend=options.backend)
        options.runtime = options.runtime or ["processes"]
        present = dist.get_world_size()
        if options.runtime != ["processes"] or options.ranks not in (None, present):
            here.error(f"the launcher has started {present} processes: leave --runtime and --ranks out")
        options.ranks = present
    options.runtime = options.runtime or list(RUNTIMES)
    counts = PROCESSES if options.ranks is None and not options.quick else (options.ranks or 4,)
    options.worlds = [(each, n) for each in options.runtime for n in (counts if each == "processes" else counts[-1:])]
    options.ranks = 4 if options.ranks is None else options.ranks
    if options.ranks < 2:
        here.error(f"a collective needs at least 2 ranks, not {options.ranks}")


def run(runtime: str, ranks: int, options: Namespace) -> dict[str, Any]:
    """One run on ranks that this starts, or on the launcher's."""
    backend = options.backend if runtime == "processes" else None
    return mc.launch(measure, ranks, (options, runtime), runtime=runtime, backend=backend)[0]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    leads = not dist.is_initialized() or dist.get_rank() == 0
    info = machine()
    if leads:
        print_machine(info)
    runs = [run(runtime, ranks, options) for runtime, ranks in options.worlds]
    if leads:
        report(info, runs, options)
    mc.shutdown()


def report(info: dict[str, object], runs: list[dict[str, Any]], options: Namespace) -> None:
    """What is said once, after all runs."""
    for each in runs:
        if each["budgets"]:
            print(f"\n{each['backend']}, {each['ranks']} ranks")
            print_budgets([Budget(*(budget[name] for name in Budget._fields)) for budget in each["budgets"]])
    if options.markdown:
        for each in runs:
            markdown(each["rows"])
    sides = [side for each in runs for row in each["rows"] for side in (row["meshcomm"], row["torch"]) if side]
    print(f"\nwrong elements: {sum(side['wrong'] for side in sides)}")
    settings = {"repeats": options.repeats, "warmup": options.warmup, "op": options.op}
    write(options.json, {"machine": info, **settings, "runs": runs})
    if options.plot:
        plots.save(options.plot, runs)


if __name__ == "__main__":
    main()
