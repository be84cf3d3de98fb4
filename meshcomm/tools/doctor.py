"""``python -m meshcomm``: what it sees here, whether collectives work and how long they take, what is wrong.

Alone it looks at this machine and tries ranks in this process and in processes of their own. Under a launcher
(``torchrun --nproc-per-node 2 -m meshcomm``) it tries the launch itself, and rank 0 prints for all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshcomm.collectives.broadcast import broadcast
from meshcomm.collectives.exchange.all_to_all import all_to_all
from meshcomm.collectives.exchange.permute import shift
from meshcomm.collectives.gather import all_gather
from meshcomm.collectives.one_rank import barrier
from meshcomm.collectives.reduce import all_reduce, reduce_scatter
from meshcomm.errors import CommError, MeshError, few
from meshcomm.launch import launch
from meshcomm.make_mesh import make_mesh
from meshcomm.mesh import Mesh
from meshcomm.objects.objects import all_gather_object
from meshcomm.runtime.start import world
from meshcomm.tools.facts import Facts, Finding, differences, findings, look

_SIZES = (2**10, 2**20)
"""Elements of float32."""
_REPEATS = 5


@dataclass(frozen=True)
class Trial:
    """A collective that was tried."""

    name: str
    bytes: int
    milliseconds: float
    right: bool


def trials(mesh: Mesh, axis: str, sizes: Sequence[int] = _SIZES) -> list[Trial]:
    """Try collectives over the axis, with numbers whose results are known exactly."""
    n, me = mesh.shape[axis], mesh.coordinate[axis]
    found = []
    for size in sizes:
        base = torch.arange(float(size // n * n), device=mesh.device) % 64
        cases = _cases(mesh, axis, base + me, [base + i for i in range(n)], me)
        for name, run, expected in cases:
            found.append(_timed(name, run, expected, 4 * base.numel(), lambda: barrier(axis, mesh=mesh)))
    return found


def _cases(
    mesh: Mesh, axis: str, x: Tensor, rows: list[Tensor], me: int
) -> list[tuple[str, Callable[[], Tensor], Tensor]]:
    """Names, calls and what they give; ``rows`` is what each rank has."""
    n = len(rows)
    total, received = sum(rows, torch.zeros_like(x)), torch.cat([row.chunk(n)[me] for row in rows])
    return [
        ("all_reduce", lambda: all_reduce(x, axis, mesh=mesh), total),
        ("all_gather", lambda: all_gather(x, axis, mesh=mesh), torch.cat(rows)),
        ("reduce_scatter", lambda: reduce_scatter(x, axis, mesh=mesh), total.chunk(n)[me]),
        ("all_to_all", lambda: all_to_all(x, axis, 0, 0, mesh=mesh), received),
        ("broadcast", lambda: broadcast(x, axis, n - 1, mesh=mesh), rows[-1]),
        ("shift", lambda: shift(x, axis, mesh=mesh), rows[me - 1]),
    ]


def _timed(name: str, run: Callable[[], Tensor], expected: Tensor, size: int, together: Callable[[], object]) -> Trial:
    right, seconds = True, []
    for _ in range(1 + _REPEATS):
        together()
        begin = time.perf_counter()
        y = run()
        if y.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - begin)
        right = right and bool(torch.equal(y, expected))
    return Trial(name, size, 1e3 * statistics.median(seconds[1:]), right)


def _everyone(mesh: Mesh, axis: str, sizes: Sequence[int]) -> list[Trial]:
    """Of each trial the slowest rank's time, and whether it was right on all."""
    every = all_gather_object(trials(mesh, axis, sizes), axis, mesh=mesh)
    return [
        Trial(same[0].name, same[0].bytes, max(t.milliseconds for t in same), all(t.right for t in same))
        for same in zip(*every, strict=True)
    ]


def on_a_rank(sizes: Sequence[int]) -> tuple[list[Trial], str]:
    """What each rank of a loopback launch does."""
    mesh = make_mesh({"all": -1})
    here = world.current()
    return _everyone(mesh, "all", sizes), "in-process" if here is None else here.backend


# ---------------------------------------------------------------------------------------------------------- the report


@dataclass
class Report:
    """All that was found out."""

    facts: Facts
    mesh: str
    trials: dict[str, list[Trial]]
    findings: list[Finding]
    networks: list[str] = field(default_factory=list)
    """Of a launch: the interface of each host."""

    @property
    def healthy(self) -> bool:
        """Nothing serious is wrong."""
        return not any(each.serious for each in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "healthy": self.healthy}

    def lines(self) -> Iterator[str]:
        """For people."""
        facts = self.facts
        versions = f"meshcomm {facts.meshcomm}, torch {facts.torch}, Python {facts.python}"
        yield f"{versions}, {facts.platform}, {facts.cores} core(s)"
        nccl = "" if facts.nccl is None else f" (NCCL {facts.nccl})"
        yield f"backends    {', '.join(facts.backends) or 'none'}{nccl}; init() would take {facts.backend}"
        yield f"devices     {', '.join(facts.devices) or 'the CPU alone'}"
        yield f"launcher    {_launcher_line(facts)}"
        yield f"mesh        make_mesh({{'dp': -1}}) gives {self.mesh}"
        for at, line in enumerate(self.networks or filter(None, [facts.network])):
            yield f"{'' if at else 'network':11s} {line}"
        if facts.variables:
            yield f"variables   {' '.join(f'{name}={value}' for name, value in facts.variables.items())}"
        for where, found in self.trials.items():
            yield f"\n{where}"
            yield f"  {'':14s} {'bytes':>10s} {'ms':>9s}"
            for trial in found:
                verdict = "" if trial.right else "  WRONG"
                yield f"  {trial.name:14s} {trial.bytes:10d} {trial.milliseconds:9.3f}{verdict}"
        yield ""
        yield from (str(each) for each in self.findings)
        yield "nothing serious is wrong" if self.healthy else "something is wrong, see above"


def _launcher_line(facts: Facts) -> str:
    if facts.launcher is None:
        return "none: a plain process"
    told = {name: value for name, value in facts.launcher.items() if value not in (None, "") and name != "name"}
    return f"{facts.launcher['name']}: {', '.join(f'{name} {value}' for name, value in told.items())}"


def _broken(where: str, error: Exception) -> Finding:
    what, _, rest = str(error).partition("\n")
    fix = rest.rpartition("fix: ")[2] if "fix: " in rest else "see the text above"
    return Finding(True, f"{where}: {what}" + (f" ({rest.strip().splitlines()[0]})" if rest.strip() else ""), fix)


@contextmanager
def _noted(where: str, found: list[Finding]) -> Iterator[None]:
    try:
        yield
    except (MeshError, CommError, RuntimeError, OSError) as error:
        found.append(_broken(where, error))


def _wrong_results(tried: dict[str, list[Trial]]) -> list[Finding]:
    every = [(where, trial) for where, found in tried.items() for trial in found]
    bad = [f"{trial.name} of {trial.bytes} bytes ({where})" for where, trial in every if not trial.right]
    what, fix = f"wrong results: {', '.join(bad)}", "report it, with the lines above; try another backend"
    return [Finding(True, what, fix)] if bad else []


def alone(timeout: float, quick: bool, sizes: Sequence[int] = _SIZES) -> Report:
    """The report of a plain process: ranks are started here."""
    facts = look()
    found: list[Finding] = findings(facts)
    tried: dict[str, list[Trial]] = {}
    if facts.launcher_error is not None:  # everything else would fail of it
        return Report(facts, "an error", tried, found)
    with _noted("ranks in this process", found):
        tried["4 ranks in this process"] = launch(on_a_rank, 4, (sizes,))[0][0]
    if not quick:
        count = min(2, len(facts.devices)) if f"{facts.accelerator}:" in facts.backend else 2
        with _noted(f"{count} processes on this machine", found):
            began = time.perf_counter()
            done, backend = launch(on_a_rank, count, (sizes,), runtime="processes", timeout=timeout)[0]
            tried[f"{count} process(es) on {backend}, {time.perf_counter() - began:.1f} s with their start"] = done
    return Report(facts, repr(make_mesh({"dp": -1})), tried, found + _wrong_results(tried))


def together(timeout: float, sizes: Sequence[int] = _SIZES) -> tuple[Report, bool]:
    """The report of a rank of a launch, and whether it is the one that speaks."""
    facts = look()
    found: list[Finding] = findings(facts)
    tried: dict[str, list[Trial]] = {}
    every: list[Facts] = []
    shown, speaks = "an error", True  # who has met nobody speaks for itself
    with _noted("init" if facts.launcher is None else f"rank {facts.launcher['rank']}", found):
        if world.current() is None:
            world.init(timeout=timeout)
        mesh = make_mesh({"dp": -1})
        facts = look()  # with the interface that was found
        every = all_gather_object(facts, "dp", mesh=mesh)
        shown, speaks = repr(mesh), mesh.rank == 0
        found += differences(every) + _of_others(found, every)
        began, here = time.perf_counter(), world.current()
        done = _everyone(mesh, "dp", sizes)
        name = "in-process" if here is None else here.backend
        tried[f"{mesh.size} rank(s) on {name}, {time.perf_counter() - began:.1f} s in all"] = done
    return Report(facts, shown, tried, found + _wrong_results(tried), _networks(every)), speaks


def _networks(every: Sequence[Facts]) -> list[str]:
    """A line for each host and interface."""
    seen: dict[str, list[int]] = {}
    for rank, facts in enumerate(every):
        if facts.network:
            seen.setdefault(f"on {facts.host} {facts.network}", []).append(rank)
    return [f"rank {few(ranks)} {line}" for line, ranks in seen.items()]


def _of_others(mine: list[Finding], every: Sequence[Facts]) -> list[Finding]:
    """What is wrong with what the other ranks see, and not here too."""
    known = {each.what for each in mine}
    return [
        Finding(each.serious, f"rank {rank}: {each.what}", each.fix)
        for rank, facts in enumerate(every)
        for each in findings(facts)
        if each.what not in known
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0 where nothing serious is wrong, else 1."""
    parser = argparse.ArgumentParser(prog="python -m meshcomm", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="start no processes")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for ranks to meet and to answer")
    asked = parser.parse_args(argv)
    launched = False
    with suppress(MeshError):  # it is among the findings
        launched = world.under_launcher()
    report, speaks = together(asked.timeout) if launched else (alone(asked.timeout, asked.quick), True)
    if not speaks:
        return 0
    text = json.dumps(report.as_dict(), indent=1) if asked.json else "\n".join(report.lines())
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return 0 if report.healthy else 1
