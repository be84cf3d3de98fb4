"""Start-up by numbers of ranks: seconds, what each rank asks of the store, and what it keeps of all others.

    python -m benchmarks.startup                    # 4 to 64 processes of this machine: minutes
    python -m benchmarks.startup --quick
    python -m benchmarks.startup --markdown         # the tables of docs/benchmarks.md

Ranks are processes that are there already. They meet at a store that rank 0 serves, which counts: what each of them
writes, reads and asks, gloo's own meeting too; then they make a mesh {dp, tp=2} and call something over each axis once.
What is foretold are lines through the two smallest sizes, in which nobody waits for long. Of up to 64 ranks one that
waits looks every half second whether the others are alive, of more it does not: of our operations the least stands.
All figures are of one rank: the store has those of all of them.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch
from torch.distributed import Store, TCPStore

import meshcomm as mc
from benchmarks.common import options_of, print_markdown, print_table, run
from meshcomm.runtime.start import membership, world

SIZES, FEW = (4, 8, 16, 32, 64), (2, 4)
FORETOLD = (1024, 10_000)
PHASES = ("init", "make_mesh", "first calls")
SHOWN = {
    "ours": "our operations",
    "torchs": "torch's operations",
    "bytes": "bytes",
    "asked": "looks whether it is there",
}


class Load(NamedTuple):
    """Of one rank, in one phase."""

    seconds: float
    operations: int
    asked: int
    """Looks whether something is there, again and again while a rank waits: of these there are more the longer."""
    nbytes: int
    """Written and read."""
    torchs: int
    """Of the operations, those of torch's process groups."""


class Counting(Store):
    """A store that counts what is asked of it."""

    def __init__(self, store: TCPStore) -> None:
        super().__init__()
        self.store = store
        self.operations = self.asked = self.nbytes = self.torchs = 0

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """What there was up to now."""
        return self.operations, self.asked, self.nbytes, self.torchs

    def _one(self, *of: Any) -> None:
        self.operations += 1
        inside = of[0].partition("group/")[2]  # the process group's part of the store, in which we have ours
        self.torchs += bool(inside) and "meshcomm/" not in inside
        self.nbytes += sum(len(each) for each in of)

    def set(self, key: str, value: Any) -> None:
        self._one(key, value)
        self.store.set(key, value)

    def get(self, key: str) -> Any:
        found = self.store.get(key)
        self._one(key, found)
        return found

    def add(self, key: str, value: int) -> int:
        self._one(key)
        return int(self.store.add(key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        found = self.store.compare_set(key, expected, desired)
        self._one(key, desired, found)
        return found

    def multi_get(self, keys: Sequence[str]) -> Any:
        found = self.store.multi_get(keys)
        self._one(*keys, *found)
        return found

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._one(*keys, *values)
        self.store.multi_set(keys, values)

    def check(self, keys: Sequence[str]) -> bool:
        self.asked += 1
        return bool(self.store.check(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.asked += 1
        if timeout is None:
            self.store.wait(keys)
        else:
            self.store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        self._one(key)
        return bool(self.store.delete_key(key))

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self.store.set_timeout(timeout)


def rank_main(port: int) -> tuple[list[Load], int]:
    """What a rank does and asks, by phase; and the bytes that it keeps of all others' addresses."""
    rank, size = mc.rank(), mc.world_size()
    mc.all_reduce(torch.ones(1), "all", mesh=mc.make_mesh({"all": size}))  # all are here
    mc.shutdown()
    limit = timedelta(seconds=300)
    served = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=limit)
    store, loads = Counting(served), list[Load]()

    def phase(start: float, before: tuple[int, ...]) -> None:
        seconds = time.perf_counter() - start
        loads.append(Load(seconds, *(b - a for a, b in zip(before, store.counts, strict=True))))

    start, before = time.perf_counter(), store.counts
    mc.init(store=store, rank=rank, world_size=size, timeout=300)
    phase(start, before)
    start, before = time.perf_counter(), store.counts
    mesh = mc.make_mesh({"dp": size // 2, "tp": 2})
    phase(start, before)
    start, before = time.perf_counter(), store.counts
    for axis in ("dp", "tp"):
        mc.all_reduce(torch.ones(1), axis, mesh=mesh)
    phase(start, before)
    here = world.current()
    assert isinstance(here, membership.ProcessWorld)
    kept = len(pickle.dumps(here.neighbours))
    mc.all_reduce(torch.ones(1), ("dp", "tp"), mesh=mesh)  # rank 0's store lasts until all are through
    mc.shutdown()
    return loads, kept


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def line(sizes: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """``a + b n`` through the first two."""
    slope = (values[1] - values[0]) / (sizes[1] - sizes[0])
    return values[0] - slope * sizes[0], slope


def measure(options: Namespace) -> dict[str, Any]:
    sizes = FEW if options.quick else tuple(options.ranks)
    rows: dict[int, dict[str, Any]] = {}
    for size in sizes:
        told = mc.launch(rank_main, ranks=size, runtime="processes", args=(free_port(),), timeout=900)
        loads = {name: [each[0][i] for each in told] for i, name in enumerate(PHASES)}
        rows[size] = {"kept": told[0][1]} | {
            name: {
                "seconds": max(load.seconds for load in found),
                "operations": sum(load.operations for load in found) / size,
                "most": max(load.operations for load in found),
                "torchs": sum(load.torchs for load in found) / size,
                "asked": sum(load.asked for load in found) / size,
                "bytes": sum(load.nbytes for load in found) / size,
            }
            for name, found in loads.items()
        }
    head = ["", *(f"{size} ranks" for size in sizes), *(f"{size} (foretold)" for size in FORETOLD)]
    table = []
    for name in PHASES:
        found = [rows[size][name] for size in sizes]
        table.append([f"{name}: s", *(f"{each['seconds']:.2f}" for each in found), *["-"] * len(FORETOLD)])
        for what in ("ours", "torchs", "bytes", "asked"):
            values = [each[what] if what != "ours" else each["operations"] - each["torchs"] for each in found]
            base, slope = line(sizes, values) if what != "ours" else (min(values), 0.0)
            more = ["-" if what == "asked" else f"{base + slope * size:.0f}" for size in FORETOLD]
            table.append([f"{name}: {SHOWN[what]}", *(f"{value:.1f}" for value in values), *more])
    kept = [rows[size]["kept"] for size in sizes]
    base, slope = line(sizes, kept)
    foretold = [f"{base + slope * size:.0f}" for size in FORETOLD]
    table.append(["bytes kept of addresses", *map(str, kept), *foretold])
    if options.markdown:
        print_markdown(head, table)
    else:
        print_table("Start-up by numbers of ranks", head, table)
    return {"sizes": list(sizes), "rows": {str(size): row for size, row in rows.items()}}


def main(given: Sequence[str] | None = None) -> None:
    parser = options_of("Start-up: seconds, and the load of the store.", markdown=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(SIZES), help="processes (4 8 16 32 64)")
    run(parser, measure, given)


if __name__ == "__main__":
    main()
