"""Several hosts: how long collectives take over a slow wire, beside torch's gloo and the wire, and what they send.

    python -m benchmarks.hosts                      # 2 hosts with 4 ranks each at 1 Gbit/s, 16 MB: a minute, as root
    python -m benchmarks.hosts --hosts 4 --ranks 2 --rate 100mbit --mb 4
    python -m benchmarks.hosts --quick
    python -m benchmarks.hosts --json out.json

The hosts are namespaces of this machine (``tests/hosts.py``), whose cables have a rate. They share its cores, which
hosts do not: where all ranks compute at once, the time beside the wire's is longer than it would be. The cables take
segments of 64 KiB whole, as network cards do that cut them into packets themselves; with ``--burst 64kb`` the kernel
does, on the cores that the ranks share, twice the work of all the rest, and headers are counted of each packet.

In turn, in one run: the collective, torch's on the same ranks and its default group, and the wire: for as many bytes as
the limit says plain sockets send from each host to the next, all at the same time. Times are those of the slowest rank,
medians. Bytes are counted by the hosts' interfaces, with all headers, and are those that one host sends, at most: the
limit is what no way of doing it can go below.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import meshcomm as mc
from benchmarks.common import Budget, judged, options_of, print_table, run, say

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

BOUND = 1.3
NAMES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def limit_of(name: str, hosts: int, nbytes: int, wide: int) -> float:
    """Bytes that a host must send at least, of ``nbytes`` in the whole tensor; ``wide``: times as many as it
    accumulates in.
    """
    each = {"all_reduce": 2 * wide, "reduce_scatter": wide, "all_gather": 1, "broadcast": hosts}[name]
    return each * (hosts - 1) / hosts * nbytes


# ---------------------------------------------------------------------------------------------------------- a rank


def collective(name: str, x: Tensor, mesh: mc.Mesh) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Ours and torch's, on this rank's part of ``x``."""
    n, rank = mesh.size, mesh.rank
    part, out = x.chunk(n)[rank].clone(), torch.empty_like(x)
    row = torch.empty_like(part)
    return {
        "all_reduce": (lambda: mc.all_reduce(x, "a", mesh=mesh), lambda: dist.all_reduce(x.clone())),
        "reduce_scatter": (
            lambda: mc.reduce_scatter(x, "a", mesh=mesh),
            lambda: dist.reduce_scatter_tensor(row, x.clone()),
        ),
        "all_gather": (
            lambda: mc.all_gather(part, "a", mesh=mesh),
            lambda: dist.all_gather_into_tensor(out, part),
        ),
        "broadcast": (lambda: mc.broadcast(x, "a", 0, mesh=mesh), lambda: dist.broadcast(x.clone(), 0)),
    }[name]  # type: ignore[return-value]


def sent() -> int:
    """Bytes that this host's interface has sent."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


class Wire:
    """Plain sockets from this host's first rank to the next host's."""

    def __init__(self, host: int, addresses: Sequence[str], port: int) -> None:
        listener = socket.create_server((addresses[host], port))
        dist.barrier()
        self.to = socket.create_connection((addresses[(host + 1) % len(addresses)], port))
        self.of, _ = listener.accept()

    def move(self, nbytes: int) -> None:
        """So many bytes there, and as many from the other side."""
        got, room = 0, memoryview(bytearray(2**20))
        sending = threading.Thread(target=self.to.sendall, args=(bytes(nbytes),))
        sending.start()
        while got < nbytes:
            got += self.of.recv_into(room)
        sending.join()


def rank_main() -> None:
    """What each rank does; the first one prints a line of JSON."""
    asked = json.loads(os.environ["ASKED"])
    mc.init(timeout=300)
    size, rank, hosts = mc.world_size(), mc.rank(), len(asked["addresses"])
    host, first = rank // (size // hosts), rank % (size // hosts) == 0
    mesh = mc.make_mesh({"a": size})
    wire = Wire(host, asked["addresses"], asked["port"]) if first else dist.barrier()
    found: list[dict[str, Any]] = []
    for name, dtype in asked["what"]:
        count = int(asked["mb"] * 1e6) // DTYPES[dtype].itemsize // size * size
        x = (torch.arange(count) % 7).to(DTYPES[dtype])
        wide = 2 if dtype == "bfloat16" else 1
        least = limit_of(name, hosts, x.nbytes, wide)
        ours, torchs = collective(name, x, mesh)
        ways = {"meshcomm": ours, "torch gloo": torchs}
        ways["wire"] = functools.partial(wire.move, int(least)) if isinstance(wire, Wire) else _nothing
        times: dict[str, list[float]] = {way: [] for way in ways}
        bytes_of: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(asked["repeats"] + 1):
            for way in list(ways)[:: -1 if turn % 2 else 1]:
                dist.barrier()
                time.sleep(0.05)  # what is left in the queue of the cable
                before, start = sent(), time.perf_counter()
                ways[way]()
                took = torch.tensor(time.perf_counter() - start)
                dist.barrier()
                counted = torch.tensor(float(sent() - before))
                dist.all_reduce(took, dist.ReduceOp.MAX)
                dist.all_reduce(counted, dist.ReduceOp.MAX)
                if turn:
                    times[way].append(took.item())
                    bytes_of[way].append(counted.item())
        found.append({
            "name": name, "dtype": dtype, "bytes": x.nbytes, "limit": least, "link": type(mesh.axis("a").link).__name__,
            "seconds": {way: statistics.median(each) for way, each in times.items()},
            "least": {way: min(each) for way, each in times.items()},
            "sent": {way: statistics.median(each) for way, each in bytes_of.items()},
        })  # fmt: skip
    if rank == 0:
        print(json.dumps(found), flush=True)
    mc.shutdown()


def _nothing() -> None:
    """On a rank that is not its host's first."""


# ---------------------------------------------------------------------------------------------------------- the hosts


def measure(options: Namespace) -> dict[str, Any]:
    import hosts as rig  # noqa: PLC0415  # it needs tests/, and pytest

    if rig.missing():
        say(f"benchmarks.hosts: {rig.missing()}")
        return {"missing": rig.missing()}
    mb, repeats = (1.0, 2) if options.quick else (options.mb, options.repeats)
    names = NAMES[:1] if options.quick else options.only or NAMES
    what = [(name, "float32") for name in names] + [("all_reduce", "bfloat16")] * ("all_reduce" in names)
    with rig.Hosts(options.hosts) as hosts:
        for host in hosts:
            host.limit(options.rate, burst=options.burst)
        asked = {
            "addresses": [host.address for host in hosts],
            "port": 29600,
            "mb": mb,
            "repeats": repeats,
            "what": what,
        }
        more = {"ASKED": json.dumps(asked), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
        more |= {"WORLD_SIZE": str(options.hosts * options.ranks), "LOCAL_WORLD_SIZE": str(options.ranks)}
        more["GLOO_SOCKET_IFNAME"] = "eth0"
        ranks = [
            host.start(sys.executable, "-m", "benchmarks.hosts", **more, RANK=str(host.index * options.ranks + local),
                       LOCAL_RANK=str(local))
            for host in hosts
            for local in range(options.ranks)
        ]  # fmt: skip
        said = [each.communicate(timeout=900)[0] for each in ranks]
    for rank, text in zip(ranks, said, strict=True):
        if rank.returncode:
            raise subprocess.CalledProcessError(rank.returncode, "a rank", text)
    found = next(json.loads(line) for line in said[0].splitlines() if line.startswith("[{"))
    return shown(found, options)


def shown(found: Sequence[dict[str, Any]], options: Namespace) -> dict[str, Any]:
    """The tables, and the budget."""
    rows, sizes = [], []
    for each in found:
        what, times, counted = f"{each['name']} {each['dtype']}", each["seconds"], each["sent"]
        ours = times["meshcomm"]
        rows.append([what, *(f"{1e3 * times[way]:.1f}" for way in times), f"{ours / times['wire']:.2f}",
                     f"{ours / times['torch gloo']:.2f}"])  # fmt: skip
        sizes.append([what, f"{each['limit'] / 1e6:.2f}", *(f"{counted[way] / 1e6:.2f}" for way in counted),
                      f"{counted['meshcomm'] / each['limit']:.3f}"])  # fmt: skip
    cable = f"{options.rate}, bursts of {options.burst}"
    where = f"{options.hosts} hosts x {options.ranks} ranks, {cable}, {found[0]['bytes'] / 1e6:.1f} MB"
    ways = list(found[0]["seconds"])
    print_table(f"Times over {where}", ["ms", *ways, "over wire", "over gloo"], rows)
    print_table("Bytes that a host sends, with headers", ["MB", "limit", *ways, "over limit"], sizes)
    first = next((each for each in found if each["name"] == "all_reduce"), None)
    if first is None:
        return {"found": found}
    ratio = first["seconds"]["meshcomm"] / first["seconds"]["wire"]
    return judged({"found": found}, [Budget(f"all_reduce float32 over the wire, {where}", ratio, BOUND, "x")])


def main(given: Sequence[str] | None = None) -> None:
    if "ASKED" in os.environ:
        rank_main()
        return
    parser = options_of("Collectives over several hosts, beside torch's gloo and the wire.")
    parser.add_argument("--hosts", type=int, default=2, help="how many (2)")
    parser.add_argument("--ranks", type=int, default=4, help="on each (4)")
    parser.add_argument("--rate", default="1gbit", help="of each host's cable, as tc writes it (1gbit)")
    parser.add_argument("--burst", default="128kb", help="what goes at once, as tc writes it (128kb)")
    parser.add_argument("--mb", type=float, default=16.0, help="of the whole tensor (16)")
    parser.add_argument("--only", choices=NAMES, nargs="+", help="these collectives")
    parser.add_argument("--repeats", type=int, default=7, help="turns (7)")
    run(parser, measure, given)


if __name__ == "__main__":
    main()
