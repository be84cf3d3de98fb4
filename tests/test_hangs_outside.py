"""prove_no_hang: what a program asks besides its mesh and its tensors, and what the library asks of its place for itself."""

from __future__ import annotations

import ast
import datetime
import os
import random
import secrets
import socket
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from time import time as clock
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshcomm as mc


def ones() -> Tensor:
    return torch.ones(4)


def asking() -> list[tuple[Callable[[], object], str]]:
    """What answers otherwise in each process, by a name that was imported before, or through the standard library."""
    return [
        (lambda: clock(), "time.time()"), (lambda: datetime.datetime.now(), "datetime.now()"),
        (lambda: Path("/none").exists(), "os.stat()"), (lambda: os.path.exists("/none"), "os.stat()"),
        (lambda: uuid.uuid4(), "os.urandom()"), (lambda: secrets.randbelow(9), "os.urandom()"),
        (os.getpid, "os.getpid()"), (lambda: socket.gethostname(), "socket.gethostname()"),
        (lambda: os.environ.get("MINE"), "os.environ['MINE']"), (lambda: random.Random(), "random.Random() without"),
        (lambda: [each for each in {"dp", "tp"}], "the order of a set"),  # noqa: C416
        (lambda: [*map(str, set("ab"))], "the order of a set"),
        (lambda: np.random.default_rng(), "numpy.random.default_rng()"), (lambda: hash("a"), "hash()"),
        (lambda: mc.barrier("dp", timeout=5.0), "a time-out"),
        (lambda: mc.all_reduce(ones(), "dp", async_op=True).wait(5.0), "a time-out"),
        (lambda: mc.all_reduce(ones(), "dp", timeout=5.0), "a time-out"),
        (lambda: futures.ThreadPoolExecutor(1).submit(ones).result(), "a thread, start()"),
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [None, "classes"])
def test_what_answers_otherwise_elsewhere_is_listed(ranks: Any) -> None:
    def main() -> None:
        for ask, _ in asking():
            ask()

    said = mc.prove_no_hang(main, {"dp": 2}, ranks=ranks).unproven
    assert [what for _, what in asking() if not any(line.startswith(what) for line in said)] == []
    assert all(" at test_hangs_outside.py:" in line for line in said)


def test_what_is_the_same_everywhere_is_not_listed() -> None:
    def main() -> None:
        random.Random(0).random(), np.random.default_rng(0).random(), sorted({"dp", "tp"}), "dp" in {"dp", "tp"}
        mc.all_reduce(ones(), "dp")

    assert mc.prove_no_hang(main, {"dp": 2}).unproven == ()


def test_what_is_sent_past_the_library_is_refused() -> None:
    with pytest.raises(
        mc.MeshError, match=r"torch\.distributed\.barrier at test_hangs_outside\.py:\d+ sends by itself"
    ):
        mc.prove_no_hang(lambda: dist.barrier(), {"dp": 2})


def test_a_loop_that_no_guess_ends_is_refused() -> None:
    def main() -> None:
        x = mc.all_reduce(ones(), "dp").sum()
        while x.item() < 9:
            pass

    with pytest.raises(mc.MeshError, match=r"test_hangs_outside\.py:\d+ has read \d+ values that nobody knows"):
        mc.prove_no_hang(main, {"dp": 2}, ranks="classes")


def test_objects_that_ranks_share_are_named_where_they_alone_part_them() -> None:
    made: list[int] = []

    def main() -> None:
        if not made:
            made.append(1)
            mc.barrier("dp")

    proof = mc.prove_no_hang(main, {"dp": 2})
    assert not proof.ok
    assert "made. With objects of each rank's own, as processes have them, nothing hangs" in proof.notes[-1]


# ------------------------------------------------------------------------------------------- the library, for itself

ROOT = Path(mc.__file__).parent
OWN = {"own_index", "own_ranks", "own_coordinate"}
UNNOTED = {
    "runtime/call.py": (1, "what a call was, in words"),
    "runtime/recorder.py": (2, "what a call was, in words"),
    "work.py": (2, "what a call was, in words"),
    "verifying/hangs/prove.py": (1, "which rank runs"),
    "verifying/program.py": (2, "which rank runs"),
    "collectives/exchange/permute.py": (4, "its own peers: who is where it is has others; zeros are not known"),
    "collectives/broadcast.py": (1, "what a dry run knows of a buffer"),
    "collectives/one_rank.py": (1, "an error"),
    "collectives/scan.py": (2, "which rows are added"),
    "tracing/record.py": (5, "events"),
    "tracing/traces.py": (2, "events"),
    "objects/parcels.py": (1, "what is sent; who is at src is read before it"),
    "parallel/cut_parameters.py": (2, "whether two axes have ranks in common, which is alike everywhere"),
    "parallel/data/spread.py": (1, "an error"),
    "parallel/optimizers/sharded.py": (3, "axes in common; where its part is written"),
    "parallel/fsdp/module.py": (3, "how long its part is; what is scattered"),
    "parallel/fewer_axes.py": (1, "an axis of one rank"),
    "parallel/tensor/streams.py": (1, "the state of its generator"),
    "parallel/tensor/module.py": (2, "its part of a parameter; who prints a plan"),
    "parallel/tensor/state.py": (1, "its part of a parameter"),
    "parallel/by_axes.py": (1, "who prints a plan"),
    "spmd/random/rng.py": (1, "noted below, axis by axis"),
    "spmd/types/check_vma.py": (1, "whether it is a rank"),
    "spmd/shard_map/controller.py": (1, "its part of the values"),
    "spmd/shard_map/function.py": (1, "whether it is a rank"),
}
"""Where a rank's place is asked for and no proof by classes hears of it: how often, and why that may be."""


def test_each_place_that_is_read_unnoted_has_a_reason() -> None:
    """Who adds one: ``axis.index``, ``is_at``, ``own_part``, ``own_place`` and ``own_of`` are noted."""
    found: Counter[str] = Counter()
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if name not in ("axis.py", "mesh.py"):
            tree = ast.walk(ast.parse(path.read_text()))
            found[name] += sum(isinstance(node, ast.Attribute) and node.attr in OWN for node in tree)
    reasons = {name: count for name, (count, _) in UNNOTED.items()}
    assert {name: count for name, count in found.items() if count} == reasons
