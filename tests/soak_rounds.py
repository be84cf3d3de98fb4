"""What the ranks of the soak do, round by round, and what each of them says of itself."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import shutil
import sys
import threading
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fuzz_breaks import Break, Outcome, run_broken, works_again
from fuzz_steps import Program, run, run_backward
from oracle import axis_choices
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import meshcomm as mc
from meshcomm import axis as every_axis
from meshcomm import mesh as meshes
from meshcomm._torch import default_store
from meshcomm.collectives.trees import buckets
from meshcomm.parallel import checkpoint, data_parallel, fully_shard, tensor_parallel
from meshcomm.runtime import groups
from meshcomm.runtime.pending import Pending
from meshcomm.runtime.process import exits

__all__ = ["LEAKS", "ROUNDS", "allocated", "leak", "measured", "on_rank", "train", "warm_up", "with_error"]

MIB = 2**20


def on_rank(program: Program) -> tuple[list[Tensor], list[Tensor]]:
    """All values and gradients of a program."""
    mesh = mc.make_mesh(program.axes)
    xs = program.sent(mesh.rank)
    values = run(program, xs, mesh)
    return [value.detach() for value in values], run_backward(program, xs, values, mesh)


def with_error(program: Program, broken: Break) -> Outcome:
    return run_broken(program, broken)


# ---------------------------------------------------------------------------------------------------------- training


def model_of(seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()


def rows(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return tuple(torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def steps_of(model: nn.Module, loss: Callable[[], Tensor], count: int) -> list[float]:
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    found = []
    for _ in range(count):
        adam.zero_grad()
        value = loss()
        value.backward()
        adam.step()
        found.append(value.item())
    return found


def train(seed: int, folder: str) -> None:
    """Three steps on a (2, 2) mesh, data parallel or fully sharded, with or without tensor parallelism, beside three
    without any; now and then by way of a checkpoint.
    """
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    cut, whole, saved = (random.Random(f"{seed} {what}").random() < 0.5 for what in ("cut", "whole", "saved"))
    with mc.use_mesh(mesh):
        x, target = rows(seed)
        model, alone = model_of(seed), model_of(seed)
        if cut:
            tensor_parallel(model, {"0": "column", "2": "row"}, axis="tp")
        if whole:
            data_parallel(model, "dp", grads="sum")
        else:
            fully_shard(model, "dp", grads="sum")
        mine, aim = mc.shard(x, "dp"), mc.shard(target, "dp")

        def loss() -> Tensor:
            return mc.all_reduce(mse_loss(model(mine), aim), "dp", "mean")

        found = steps_of(model, loss, 3)
        expected = steps_of(alone, lambda: mse_loss(alone(x), target), 3)
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-9, (found, expected)
        if saved:
            _by_checkpoint(model, loss, folder)


def _by_checkpoint(model: nn.Module, loss: Callable[[], Tensor], folder: str) -> None:
    """What was saved comes back."""
    before = loss().item()
    checkpoint.save(folder, model, keep=1)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(0.5)
    assert loss().item() != before
    checkpoint.load(folder, model)
    assert loss().item() == before


# ------------------------------------------------------------------------------------------------------------- rounds


def make_meshes(seed: int, folder: str) -> None:
    """Meshes that come and go, over all ranks and over some."""
    rank = mc.rank()
    for axes in ({"x": 4}, {"y": 2, "x": 2}, {"z": 2, "y": 1, "x": -1}):
        mesh = mc.make_mesh(axes)
        total = mc.all_reduce(torch.tensor([rank + seed]), tuple(axes), mesh=mesh)
        assert total.item() == 6 + 4 * seed
    pairs = (((0, 1), (2, 3)), ((3, 1), (0, 2)), ((0, 3), (1, 2)))[seed % 3]
    mine = next(pair for pair in pairs if rank in pair)
    part = mc.make_mesh({"pair": 2}, ranks=mine)
    assert mc.all_gather(torch.tensor([rank]), "pair", mesh=part).tolist() == list(mine)


def big_ones(seed: int, folder: str) -> None:
    """Beyond what small messages take: tensors of some MiB, at once and later, and a tree in buckets."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    x = torch.full((MIB // 2,), float(mesh.rank + seed % 7))
    with mc.use_mesh(mesh):
        later = mc.all_gather(x, "dp", async_op=True)
        total = mc.all_reduce(x, ("dp", "tp"))
        tree = mc.all_reduce([x[:1000], {"rest": x[1000:]}], "tp", bucket_mb=0.5, async_op=True)
        assert total[::4096].eq(6.0 + 4 * (seed % 7)).all()
        assert later.wait()[:: MIB // 2].tolist() == [mesh.rank % 2 + seed % 7, mesh.rank % 2 + 2 + seed % 7]
        first = tree.wait()[0][0].item()
        assert first == 2 * (seed % 7) + 4 * mesh.coordinate["dp"] + 1
        del later, tree


def objects(seed: int, folder: str) -> None:
    """Python objects, large and small, to all and to one."""
    mesh = mc.make_mesh({"dp": 2, "tp": 2})
    with mc.use_mesh(mesh):
        mine = {"rank": mesh.rank, "payload": "x" * (seed * 977 % 100_000), "t": torch.arange(seed % 50)}
        found = mc.all_gather_object(mine, ("dp", "tp"))
        assert [each["rank"] for each in found] == [0, 1, 2, 3]
        assert all(len(each["payload"]) == seed * 977 % 100_000 for each in found)
        told = mc.broadcast_object(mine if mesh.coordinate["tp"] == 1 else None, "tp", src=1)
        assert told["rank"] == 2 * mesh.coordinate["dp"] + 1
        mc.barrier(("dp", "tp"), timeout=60)


def moves(x: Tensor, mesh: mc.Mesh) -> list[tuple[Callable[[], Tensor | None], int]]:
    """Collectives and a message of ``x``, which each rank has filled with its number; what the first of every rank's
    elements come to.
    """
    rank, count = mesh.rank, x.numel()
    other = rank ^ 1
    return [
        (lambda: mc.all_reduce(x, "x", mesh=mesh)[:1], 6),
        (lambda: mc.all_gather(x, "x", mesh=mesh)[::count], 6),
        (lambda: mc.reduce_scatter(x, "x", mesh=mesh)[:1], 6),
        (lambda: mc.all_to_all(x, "x", 0, 0, mesh=mesh)[:: count // 4], 6),
        (lambda: mc.broadcast(x, "x", 3, mesh=mesh)[:1], 3),
        (lambda: mc.scatter(x if rank == 2 else None, "x", 2, like=x[: count // 4], mesh=mesh)[:1], 2),
        (lambda: mc.gather(x, "x", 1, mesh=mesh), 6),
        (lambda: mc.shift(x, "x", mesh=mesh)[:1], (rank - 1) % 4),
        (lambda: mc.all_reduce(x, "x", mesh=mesh, async_op=True).wait()[:1], 6),
        (lambda: mc.exchange([(x, other, 1)], [(other, x.shape, x.dtype, 1)], "x", mesh=mesh)[0][:1], other),
    ]


@cache
def ring() -> mc.Mesh:
    """One for all rounds, as a program has: of each mesh the last calls are kept for a time."""
    return mc.make_mesh({"x": 4})


def calls(seed: int, folder: str) -> None:
    """500 small calls and 5 large ones, of lengths that change from round to round: ``--only calls --rounds 4000`` are
    as many as some programs make in an hour.
    """
    mesh = ring()
    for count, numbers in ((500, 64 + 4 * (seed % 5)), (5, MIB // 4 + 4096 * (seed % 4))):
        each = moves(torch.full((numbers,), float(mesh.rank)), mesh)
        for number in range(count):
            move, expected = each[(seed + number) % len(each)]
            found = move()
            assert found is None or found[:: max(1, found.numel() // 4)].sum().item() == expected, (number, expected)


ROUNDS: dict[str, Callable[[int, str], None]] = {
    "train": train, "meshes": make_meshes, "big": big_ones, "objects": objects, "calls": calls,
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- leaks

_leaked: list[Any] = []


def leak_memory() -> None:
    _leaked.append(bytearray(os.urandom(MIB)))


def leak_descriptor() -> None:
    _leaked.append(os.open(os.devnull, os.O_RDONLY))


def leak_thread() -> None:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()


def leak_work() -> None:
    mesh = mc.make_mesh({"leak": 4})
    _leaked.append(mc.all_reduce(torch.ones(1), "leak", mesh=mesh, async_op=True))


LEAKS: dict[str, Callable[[], None]] = {
    "memory": leak_memory, "descriptor": leak_descriptor, "thread": leak_thread, "work": leak_work,
}  # fmt: skip
"""What a run can be told to do wrong with each program, to see that it is found out."""


def leak(kinds: list[str]) -> None:
    for kind in kinds:
        LEAKS[kind]()


# ----------------------------------------------------------------------------------------------------------- measuring


def warm_up(traced: bool) -> None:
    """Use every group of ranks that a round may use, and look no more at what there is by then."""
    for axes in ({"a": 4}, {"a": 2, "b": 2}):
        mesh = mc.make_mesh(axes)
        for axis in axis_choices(axes):
            works_again(mesh, [axis])
            mc.barrier(axis, timeout=60, mesh=mesh)
    for seed in range(3):
        make_meshes(seed, "")
        for _ in range(3):
            big_ones(seed, "")
    gc.collect()
    gc.freeze()
    if traced:
        tracemalloc.start()


def allocated() -> list[str]:
    """The lines that have allocated most since then."""
    gc.collect()
    return [str(each) for each in tracemalloc.take_snapshot().statistics("lineno")[:12]]


def measured() -> dict[str, float]:
    """What must not grow, of this process at rest."""
    for kept in (buckets._like, buckets._places, buckets._places_of):  # a hundred forms of trees at most
        kept.cache_clear()
    gc.collect()
    if sys.platform == "linux":  # what malloc keeps for later is no leak
        ctypes.CDLL(None).malloc_trim(0)
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    open_files = [os.readlink(link) for link in links if os.path.lexists(link)]
    found = gc.get_objects()
    mails = list(groups._mails.values())
    return {
        "rss MiB": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / MIB,
        "shared MiB": int(Path("/proc/self/status").read_text().partition("RssShmem:")[2].split()[0]) / 1024,
        "/dev/shm MiB": shutil.disk_usage("/dev/shm").used / MIB,
        "descriptors": len(open_files),
        "shared memories": sum("memfd:" in name for name in open_files),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "threads": len(os.listdir("/proc/self/task")),
        "works": sum(issubclass(type(each), (mc.Work, Pending)) for each in found),
        "tensors": sum(issubclass(type(each), Tensor) for each in found),
        "objects / 1000": len(found) / 1000,
        "calls open": sum(len(mail.open) for mail in mails),
        "calls dropped": sum(len(mail.dropped) for mail in mails),
        "messages loose": len(exits.loose),
        "meshes": len(meshes._meshes),
        "axes": len(every_axis._axes),
        "groups": len(groups._links),
        "keys at the store": int(default_store().num_keys()) if mc.rank() == 0 else 0,
    }
