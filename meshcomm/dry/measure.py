"""What a machine really does: products by dtype, memory, operations of the host and links, measured in some seconds.

Ranks measure at the same time, for they share the machine: on a CPU two processes, on accelerators as many as there
are; under a launcher the ranks of the launch.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshcomm.collectives.exchange.permute import shift
from meshcomm.collectives.gather import all_gather
from meshcomm.collectives.one_rank import barrier
from meshcomm.collectives.reduce import all_reduce, reduce_scatter
from meshcomm.launch import launch
from meshcomm.make_mesh import make_mesh
from meshcomm.mesh import Mesh
from meshcomm.objects.objects import all_gather_object
from meshcomm.runtime.process import accelerator
from meshcomm.runtime.start import world

__all__ = ["measured"]

_SECONDS = 0.2
"""That each figure takes, once it is warm."""
_SMALL, _LARGE = 2**8, 2**22
"""Elements of float32 that are communicated."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def measured(ranks: int | None = None) -> dict[str, Any]:
    """Fields of :class:`Hardware`: of the launch that this process is a rank of, or of processes that are started."""
    if world.current() is not None or world.under_launcher():
        if world.current() is None:
            world.init()
        return on_a_rank()
    count = ranks or max(2, torch.accelerator.device_count() if torch.accelerator.is_available() else 2)
    found: dict[str, Any] = launch(on_a_rank, count, runtime="processes", timeout=300)[0]
    return found


def on_a_rank() -> dict[str, Any]:
    """What each rank does, together with the others; all of them have the same figures, those of the slowest."""
    mesh = make_mesh({"all": -1})
    own = _computes(mesh)
    every = all_gather_object(own, "all", mesh=mesh)
    slowest: dict[str, Any] = {
        name: (max if name == "launch" else min)(each[name] for each in every) for name in own if name != "flops"
    }
    slowest["flops"] = {dtype: min(each["flops"][dtype] for each in every) for dtype in own["flops"]}
    hosts = all_gather_object(_host(), "all", mesh=mesh)
    per_node = max(hosts.count(host) for host in hosts)
    if len(set(hosts)) == 1:
        within = between = _link(mesh)
    else:
        between = within = _link(mesh)
        if per_node > 1 and len(hosts) % per_node == 0:
            nodes = make_mesh({"node": len(hosts) // per_node, "own": per_node})
            within = _link(nodes, "own")
    # What is sent is read from memory: a link that seems faster was measured beside other work.
    most = slowest["memory_bandwidth"]
    links = {name: (a, min(b, most)) for name, (a, b) in (("within", within), ("between", between))}
    ahead = mesh.device.type != "cpu"
    said = f"measured: {mesh.size} ranks at once, {torch.get_num_threads()} threads each, on {mesh.device.type}"
    sources = dict.fromkeys((*slowest, *links), said)
    if len(set(hosts)) == 1:
        sources["between"] = "as within: one node was measured"
    return {**slowest, **links, "ranks_per_node": per_node, "ahead": ahead, "sources": sources}


def _host() -> str:
    return f"{os.uname().nodename}" if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")


def _best(run: Callable[[], object], mesh: Mesh) -> float:
    """Seconds of the middle of many calls, made by all ranks at once."""

    def timed() -> float:
        start = time.perf_counter()
        run()
        if mesh.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    for _ in range(2):
        timed()
    barrier("all", mesh=mesh)
    taken: list[float] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(taken) < 3:
        taken.append(timed())
    return statistics.median(taken)


def _computes(mesh: Mesh) -> dict[str, Any]:
    size = 4096 if mesh.device.type != "cpu" else 512
    flops = {}
    for dtype in _DTYPES:
        if dtype is torch.float64 and mesh.device.type == "mps":
            continue
        x = torch.ones(size, size, dtype=dtype, device=mesh.device)
        flops[dtype] = 2 * size**3 / _best(lambda x=x: x @ x, mesh)  # type: ignore[misc]
    x = torch.ones(2**24 if mesh.device.type == "cpu" else 2**28, device=mesh.device)
    memory = 2 * x.nbytes / _best(lambda: x.mul_(1.0), mesh)
    small = torch.ones(16, device=mesh.device)

    def many() -> None:
        for _ in range(100):
            small.mul_(1.0)

    return {
        "flops": flops,
        "memory_bandwidth": memory,
        "memory": float(_memory(mesh)),
        "launch": _best(many, mesh) / 100,
    }


def _memory(mesh: Mesh) -> int:
    """Bytes that a rank may have."""
    if mesh.device.type == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**33
        return pages // mesh.size
    properties = accelerator.in_use()
    total = getattr(torch.cuda.get_device_properties(mesh.device), "total_memory", 0) if properties else 0
    return total or 2**34


def _link(mesh: Mesh, axis: str = "all") -> tuple[float, float]:
    """Seconds of a step and bytes per second, so that the formulas of ``speeds`` give what rings take: the middle of
    four collectives, each at two sizes.
    """
    n = mesh.shape[axis]
    if n == 1:
        return 0.0, float("inf")
    steps, wires = [], []
    for run, turns in (
        (lambda x: all_reduce(x, axis, mesh=mesh), 2 * (n - 1)),
        (lambda x: all_gather(x, axis, mesh=mesh), n - 1),
        (lambda x: reduce_scatter(x, axis, mesh=mesh), n - 1),
        (lambda x: shift(x, axis, mesh=mesh), 1),
    ):  # fmt: skip
        tried = [torch.ones(count // n * n, device=mesh.device) for count in (_SMALL, _LARGE)]
        small, large = (_all(run, x, mesh, axis) for x in tried)
        part = {2 * (n - 1): 2 * (n - 1) / n, 1: 1.0}.get(turns, 1.0)
        steps.append(small / turns)
        wires.append(4 * _LARGE * part / max(large - small, 1e-9))
    return statistics.median(steps), statistics.median(wires)


def _all(run: Callable[[Tensor], Tensor], x: Tensor, mesh: Mesh, axis: str) -> float:
    """Seconds of the slowest rank; the number of calls is the same on all."""
    taken = []
    for turn in range(8):
        barrier(axis, mesh=mesh)
        start = time.perf_counter()
        run(x)
        if mesh.device.type != "cpu":
            torch.accelerator.synchronize()
        if turn > 1:
            taken.append(time.perf_counter() - start)
    every: Sequence[float] = all_gather_object(statistics.median(taken), axis, mesh=mesh)
    return max(every)
