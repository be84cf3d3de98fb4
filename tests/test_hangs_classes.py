"""prove_no_hang: many ranks, of which some run dry and stand for the others."""

from __future__ import annotations

import copy
import functools
import json
import os
import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshcomm as mc
from meshcomm.dry.run import Program
from meshcomm.verifying.hangs.classes import Classes
from meshcomm.verifying.hangs.log import Log
from meshcomm.verifying.hangs.traced import logs_of

SQUARE = {"dp": 2, "tp": 2}


def ones() -> Tensor:
    return torch.ones(4)


def kinds(proof: mc.Proof) -> list[str]:
    return [finding.kind for finding in proof.findings]


def test_many_ranks_run_dry() -> None:
    def main() -> None:
        axes = ("dp", "tp") if sum(mc.current_mesh().coordinate.values()) % 2 else ("tp", "dp")
        for axis in axes:
            mc.all_reduce(ones(), axis)

    proof = mc.prove_no_hang(main, {"dp": 33, "tp": 2})
    assert kinds(proof) == ["deadlock"]
    assert "dry" in proof.ran[0]


def test_one_of_many_ranks_calls_nothing() -> None:
    def main() -> None:
        if mc.current_mesh().rank != 64:
            mc.barrier("dp")

    assert kinds(mc.prove_no_hang(main, {"dp": 65})) == ["unmatched"]


def reading() -> None:
    """What is read of a place in many ways, what comes of it at others, and groups and peers of all kinds."""
    mesh, x = mc.current_mesh(), ones()
    place = mesh.coordinate["pp"]
    if place:
        mc.recv("pp", place - 1, shape=(4,), dtype=torch.float32)
    if place < 2:
        mc.send(x, "pp", place + 1)
    if mc.reduce(x, "tp", dst=1) is not None:
        mc.all_reduce(x, ("dp", "pp"))
    told = mc.broadcast_object(mesh.coordinate["tp"] if mc.is_main("dp") else None, "dp")
    for _ in range(told):
        mc.barrier("dp")
    finer = mesh.split("dp", a=2, b=2)
    mc.all_reduce(ones().requires_grad_(), ("b", "tp"), mesh=finer).sum().backward()
    mc.shift(x, "dp"), mc.all_to_all(torch.ones(4, 2), "dp", 0, 0), mc.scan(x, "pp")


def alone() -> None:
    half = mc.make_mesh({"half": 6}, ranks=range(6))
    if mc.current_mesh().rank < 6:
        mc.barrier("half", mesh=half)


def by_main() -> None:
    for _ in range(mc.is_main() + 2 * mc.is_main("dp")):
        mc.barrier("tp")


@pytest.mark.parametrize(
    ("program", "runs"), [(reading, 12), (alone, 24), (by_main, 3), (lambda: mc.shift(ones(), "dp"), 1)]
)
def test_who_takes_the_log_of_another_would_have_had_the_same(program: Callable[[], object], runs: int) -> None:
    shape = {"dp": 4, "pp": 3, "tp": 2}
    dry, classes = Program(program, shape, {}, None), Classes(shape)
    for rank in range(24):
        done, twin = dry.run(rank), classes.twin(rank)
        mine = logs_of(done.trace, alone=True).get(rank, Log(rank))
        if twin is None:
            classes.add(rank, mine, done.places)
        else:
            assert classes.log(rank, twin) == mine
    assert len(classes.ran) == runs


@functools.lru_cache
def kept_rank() -> int:
    return mc.rank()


def by_environment() -> int:
    return int(os.environ.get("RANK", 0))


def by_torch() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@pytest.mark.parametrize("shape", [{"dp": 2}, {"dp": 66}], ids=str)
@pytest.mark.parametrize("rank", [kept_rank, by_environment, by_torch])
def test_a_rank_that_is_read_elsewhere(rank: Callable[[], int], shape: dict[str, int]) -> None:
    kept_rank.cache_clear()

    def main() -> None:
        if rank() == 0:
            mc.barrier("dp")

    assert kinds(mc.prove_no_hang(main, shape)) == ["unmatched"]


def test_what_differs_between_processes_is_listed() -> None:
    def main() -> None:
        time.time(), random.random(), os.environ.get("SLURM_PROCID")
        mc.all_gather_object(mc.rank(), "dp")

    said = [line.split(" at ")[0] for line in mc.prove_no_hang(main, {"dp": 66}, ranks="classes").unproven]
    assert said == ["all_gather_object()", "time.time()", "random.random()", "os.environ['SLURM_PROCID']"]


def test_a_proof_by_classes_says_so() -> None:
    def main() -> None:
        mc.barrier("dp")

    proof = mc.prove_no_hang(main, {"dp": 66}, ranks="classes")
    assert proof.ok
    assert proof.classes == (0,)
    assert "proven for classes of ranks" in str(proof)
    assert not mc.prove_no_hang(main, {"dp": 66}).classes


def random_along_tp() -> float:
    with mc.fork_rng("tp"):
        return random.random()


@pytest.mark.one_in(4, alike=True)
@pytest.mark.parametrize(
    "place",
    [lambda: mc.current_mesh().axis("dp").ranks[0], lambda: mc.current_mesh().axis("dp").coordinate["tp"],
     lambda: repr(mc.current_mesh().axis("dp")), lambda: mc.shard(torch.arange(6), "tp")[0].item(),
     lambda: mc.reshard(torch.arange(6), "r -> (tp r)")[0].item(), random_along_tp,
     lambda: mc.current_mesh().axis("tp").link.index, lambda: mc.current_mesh().axis("dp").link.ranks,
     lambda: mc.current_mesh().axis("tp").own_index, lambda: mc.current_mesh().axis("dp").own_ranks[0],
     lambda: mc.current_mesh().own_index(), lambda: mc.current_mesh().place.rank()],
)  # fmt: skip
def test_what_says_where_a_rank_is_makes_it_run(place: Callable[[], object]) -> None:
    at = iter("abc")
    first: dict[object, str] = {}

    def main() -> None:
        if first.setdefault(place(), next(at, "")) == "a":
            mc.all_reduce(ones(), "tp")

    proof = mc.prove_no_hang(main, {"dp": 40, "tp": 3})
    assert kinds(proof) == ["unmatched"] * len(proof.findings) != []


@pytest.mark.thorough
def test_zeros_that_nobody_sent_are_not_believed() -> None:
    def main() -> None:
        if not mc.shift(ones(), "tp", 1, wrap=False).any():
            mc.all_reduce(ones(), "tp")

    assert mc.prove_no_hang(main, {"dp": 40, "tp": 3}).unproven


@pytest.mark.parametrize(
    "look",
    [dict, str, list, lambda c: {**c}, lambda c: c.copy(), lambda c: [*c.values()], lambda c: {} | c, lambda c: c == {}, lambda c: copy.deepcopy(c),
     lambda c: json.dumps(c), lambda c: max(c.items())],
)  # fmt: skip
def test_all_of_a_coordinate_is_read_in_any_way(look: Callable[[dict[str, int]], object]) -> None:
    def main() -> None:
        look(mc.current_mesh().coordinate)

    done = Program(main, SQUARE, {}, None).run(3)
    assert [str(read) for read in done.places.found] == ([] if look is list else ["dp", "tp"])  # names alone


def test_a_coordinate_that_is_missing_is_named() -> None:
    def main() -> None:
        axis = mc.current_mesh().coordinate["tp"]
        mc.all_reduce(ones(), "dp", "max" if axis else "sum")

    with pytest.raises(
        mc.MeshError,
        match=r"rank 1 is equal to none of ranks=0 in tp = 1, which is read at test_hangs_classes\.py:\d+\.[\s\S]*\[0, 1\]",
    ):
        mc.prove_no_hang(main, {"dp": 4, "tp": 2}, ranks=[0])
    assert mc.prove_no_hang(main, {"dp": 4, "tp": 2}, ranks=[0, 1]).ok


def test_the_list_that_an_error_gives_is_all_that_is_needed() -> None:
    def main() -> None:
        mesh = mc.current_mesh()
        if mesh.coordinate["tp"] == 2 and mesh.coordinate["dp"] == 1:
            mesh.coordinate["pp"]

    with pytest.raises(mc.MeshError, match=r"fix: ranks=\[0, 2, 4, 10, 11\], one for each way; or"):
        mc.prove_no_hang(main, {"dp": 2, "tp": 3, "pp": 2}, ranks=[2])
    assert mc.prove_no_hang(main, {"dp": 2, "tp": 3, "pp": 2}, ranks=[0, 2, 4, 10, 11]).ok


def test_ranks_that_did_not_run_are_in_the_findings() -> None:
    def main() -> None:
        if mc.current_mesh().coordinate["dp"] == 1:
            mc.all_reduce(ones(), "tp")
        mc.send(ones(), "dp", 0) if mc.current_mesh().coordinate["dp"] == 2 else None

    proof = mc.prove_no_hang(main, {"dp": 3, "tp": 400}, ranks=[0, 400, 800])
    assert kinds(proof) == ["unmatched"]
    assert "rank 800 send" in proof.findings[0].text
