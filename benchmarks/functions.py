"""What is made of collectives: reshard, einsum, mc.rng, an operation inside shard_map; beside torch's own.

    python -m benchmarks.functions              # a minute
    python -m benchmarks.functions --quick      # some seconds, noisier
    python -m benchmarks.functions --json out.json

On torch's fake backend (8 ranks, of which this process is rank 0), one thread; the candidates take turns, and a number
is the median of their samples.

    reshard   beside DTensor's redistribute; the floor is the C++ call that moves the bytes, its result made
    einsum    a row parallel product, beside DTensor's; the floor is the product and the C++ call
    numbers   drawn under mc.rng, beside torch's from a generator, which is the floor: 16 and a million
    inside    an operation of 8 in-process ranks inside a shard_map body, beside that of torch's LocalTensor of 8 ranks;
              the floor is torch's own, 8 times
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import meshcomm as mc
from benchmarks import peers
from benchmarks.common import (
    RANKS,
    Budget,
    Call,
    judged,
    options_of,
    print_beside,
    quiet,
    run,
    take_turns,
    timed,
    worst,
)

try:
    from torch.distributed._local_tensor import LocalTensorMode
except ImportError:  # another torch
    LocalTensorMode = None  # type: ignore[assignment,misc]

OURS, DTENSOR, FLOOR, LOCAL = "meshcomm", "DTensor", "torch's (floor)", "LocalTensor"
UNCHECKED, INSIDE = "check_vma=False", f"an operation inside shard_map, {RANKS} ranks together"
MILLION = 2**20
Found = dict[str, dict[str, float]]
"""Line to candidate to seconds."""


def beside(lines: Mapping[str, Mapping[str, Call]], repeats: int) -> Found:
    found: Found = {}
    for what, calls in lines.items():
        times = take_turns({(who, ""): call for who, call in calls.items()}, repeats)
        found[what] = {who: took[""] for who, took in times.items()}
    return found


def measure_reshard(mesh: mc.Mesh, repeats: int) -> Found:
    floors = peers.floors_of(RANKS, 0, mesh.device_mesh.get_group())
    x = torch.ones(RANKS * 2, 16)

    def torchs(before: Any, after: Any) -> Call:
        given = DTensor.from_local(x, mesh.device_mesh, [before])
        return lambda: given.redistribute(placements=[after]).to_local()

    return beside(
        {
            "reshard (tp b) d -> b d": {
                OURS: lambda: mc.reshard(x, "(tp b) d -> b d"),
                DTENSOR: torchs(Shard(0), Replicate()),
                FLOOR: lambda: floors["all_gather"](x),
            },
            "reshard (tp b) d -> b (tp d)": {
                OURS: lambda: mc.reshard(x, "(tp b) d -> b (tp d)"),
                DTENSOR: torchs(Shard(0), Shard(1)),
                FLOOR: lambda: floors["all_to_all"](x),
            },
        },
        repeats,
    )


def measure_einsum(mesh: mc.Mesh, repeats: int) -> Found:
    floor = peers.floors_of(RANKS, 0, mesh.device_mesh.get_group())["all_reduce"]
    h, w = torch.ones(4, 8, 16), torch.ones(16, 32)
    on = mesh.device_mesh
    theirs = DTensor.from_local(h, on, [Shard(2)]), DTensor.from_local(w, on, [Shard(0)])

    def torchs() -> object:
        product: Any = theirs[0] @ theirs[1]
        return product.redistribute(placements=[Replicate()]).to_local()

    lines: dict[str, dict[str, Call]] = {
        "einsum b s (tp f), (tp f) d -> b s d": {
            OURS: lambda: mc.einsum("b s (tp f), (tp f) d -> b s d", h, w),
            DTENSOR: torchs,
            FLOOR: lambda: floor(h @ w),
        }
    }
    return beside(lines, repeats)


def measure_numbers(mesh: mc.Mesh, repeats: int) -> Found:
    draws: dict[str, Callable[[int], Tensor]] = {
        "rand": torch.rand,
        "randn": torch.randn,
        "randint": lambda n: torch.randint(0, 100, (n,)),
    }

    def ours(draw: Callable[[int], Tensor], count: int) -> object:
        with mc.rng("(tp n)", seed=0):
            return draw(count)

    return beside(
        {
            f"{name}, {count:,} numbers": {OURS: partial(ours, draw, count), FLOOR: partial(draw, count)}
            for name, draw in draws.items()
            for count in (16, MILLION)
        },
        repeats,
    )


def measure_inside(repeats: int, count: int) -> Found:
    """Of a chain of operations, so that what is around it counts for little; of the process, for ranks are threads."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(count):
            x = x * x
        return x

    mesh, x = mc.make_mesh({"tp": RANKS}), torch.ones(RANKS * 8)
    calls: dict[str, Call] = {
        OURS: partial(mc.shard_map(chain, mesh=mesh, in_specs="(tp b)", out_specs="(tp b)"), x),
        UNCHECKED: partial(mc.shard_map(chain, mesh=mesh, in_specs="(tp b)", out_specs="(tp b)", check_vma=False), x),
        FLOOR: lambda: [chain(x[:8]) for _ in range(RANKS)],
    }
    if LocalTensorMode is not None:
        calls[LOCAL] = lambda: in_local_tensors(chain)
    taken: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(max(3, repeats // 12)):
        for who, call in calls.items():
            start = time.process_time()
            call()
            taken[who].append((time.process_time() - start) / count)
    return {INSIDE: {who: median(each) for who, each in taken.items()}}


def in_local_tensors(chain: Callable[[Tensor], Tensor]) -> object:
    with LocalTensorMode(RANKS) as mode:
        return chain(mode.rank_map(lambda _: torch.ones(8)))


def budgets_of(found: Mapping[str, Mapping[str, float]]) -> list[Budget]:
    """Those of the design that this program can judge."""
    small = {what: 1e6 * times[OURS] for what, times in found.items() if "16 numbers" in what}
    large = {what: times[OURS] / times[FLOOR] for what, times in found.items() if f"{MILLION:,} numbers" in what}
    most = max(small, key=small.__getitem__)
    budgets = [timed(f"mc.rng, worst of {len(small)}: {most}", small[most], 40, "µs")]
    budgets.append(worst("mc.rng over torch's", large, 3))
    if LOCAL in found[INSIDE]:
        ratio = found[INSIDE][OURS] / RANKS / found[INSIDE][LOCAL]
        budgets.append(Budget("an operation of one rank inside shard_map over LocalTensor's", ratio, 1 / 50, "x"))
    return budgets


def measure(options: Namespace) -> dict[str, Any]:
    """Everything, as it goes to --json."""
    repeats = 5 if options.quick else 60
    with quiet():
        found = measure_inside(repeats, 200 if options.quick else 2000)
        mc.shutdown()  # the mesh of in-process ranks: the next one has others
        dist.init_process_group("fake", rank=0, world_size=RANKS)
        mesh = mc.make_mesh({"tp": RANKS})
        with mc.use_mesh(mesh):
            for part in (measure_reshard, measure_einsum, measure_numbers):
                found |= part(mesh, repeats)
    print_beside(f"What is made of collectives, {RANKS} ranks", found, OURS)
    return judged({"functions": found}, budgets_of(found))


def main(arguments: Sequence[str] | None = None) -> None:
    run(options_of("What is made of collectives, beside torch's own."), measure, arguments)


if __name__ == "__main__":
    main()
