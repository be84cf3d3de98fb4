"""Wrong calls are refused in words, on every rank of both runtimes, before anything is communicated."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_calls import (
    FEW_WRONG,
    ONE_WRONG,
    PEER,
    PLAIN,
    ROWS,
    WRONG_RANK,
    Here,
    Outcome,
    Row,
    Together,
    one_wrong,
    outcome,
    outcomes,
    runs_on,
    silent,
    works,
)

import meshcomm as mc
from meshcomm import parallel
from meshcomm.runtime.start.workers import WorkerPool

Found = list[Mapping[int, Outcome]]
FUNCTIONS = list(dict.fromkeys(row.function for row in ROWS))

# ------------------------------------------------------------------------------------------------------- the table

NO_ROW = {
    "Proof": "what prove_no_hang gives", "HangError": "what a proof raises",
    "Finding": "what verify gives", "Report": "what verify gives", "VerifyError": "what a report raises",
    "CommError": "an error", "MeshError": "an error", "VaryingError": "an error", "Plan": "what plan gives",
    "Piece": "what pieces gives", "Column": "a tuple: tensor_parallel looks at it",
    "Row": "as Column", "Vocab": "as Column", "Cut": "as Column", "Block": "as Column", "TensorPlan": "what auto_plan gives",
    "PipelineStep": "what pipelined gives",
    "backend": "no arguments", "current_mesh": "no arguments", "device": "no arguments", "get_dist_info": "no arguments",
    "is_distributed": "no arguments", "local_rank": "no arguments", "local_world_size": "no arguments", "node_rank": "no arguments",
    "rank": "no arguments", "shutdown": "no arguments", "world_size": "no arguments",
    "is_dry": "no arguments", "Advice": "what DryRun.advice gives", "Sweep": "what sweep gives", "Hardware": "what hardware gives", "trace": "no arguments", "Trace": "what trace gives", "TraceEvent": "of a trace",
}  # fmt: skip
"""Public names that cannot be called wrongly."""


def test_the_pairs_are_distinct() -> None:
    pairs = [(row.function, row.cause) for row in (*ROWS, *PLAIN)]
    twice = {pair for pair in pairs if pairs.count(pair) > 1} - {("make_mesh", "no axes")}  # on ranks, and on none
    assert not twice
    assert len(set(pairs)) >= 600


def test_every_public_name_has_rows() -> None:
    tops = {row.function.split(".")[0] for row in (*ROWS, *PLAIN)}
    public = {*mc.__all__, *parallel.__all__}
    assert public - tops - NO_ROW.keys() == set()
    assert not NO_ROW.keys() & tops
    assert tops <= public | {"comm_budget"}


# ------------------------------------------------------------------------------------------------- wrong on all ranks


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Found:
    with silent():
        return mc.launch(outcomes, ranks=4, args=(str(tmp_path_factory.mktemp("saved")),))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory, pool4: Any) -> Found:
    found: Found = pool4.run(outcomes, str(tmp_path_factory.mktemp("saved")))
    return found


def problem(row: Row, found: Outcome) -> str:
    """What an error lacks; nothing if it is as it should be."""
    if not found.is_kind:
        return f"{found.kind} in place of {row.kind.__name__}"
    if not re.search(row.text, found.text):
        return f"does not say {row.text!r}"
    if row.kind is mc.MeshError and not re.match(r"meshcomm\.[\w.]+(, \S+)?: ", found.text):
        return "does not say who speaks"
    if row.kind is mc.MeshError and not ("\n  got: " in found.text or "\n  fix: " in found.text):
        return "has neither got nor fix"
    if found.primitives and not row.told:
        return f"called {found.primitives} primitives"
    return ""


def problems(row: Row, ranks: list[Outcome]) -> list[str]:
    found = [(rank, problem(row, each), each) for rank, each in enumerate(ranks)]
    return [f"{row.function}, {row.cause}, rank {rank} {what}:\n{each.text}" for rank, what, each in found if what]


@pytest.mark.parametrize("runtime", ["in-process", "processes"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_on_all_ranks(request: pytest.FixtureRequest, runtime: str, function: str) -> None:
    ranks: Found = request.getfixturevalue(runtime.replace("-", "_"))
    seen, wrong = 0, []
    for number, row in enumerate(ROWS):
        if row.function == function and runs_on(row, runtime):
            seen += 1
            wrong += problems(row, [of_rank[number] for of_rank in ranks])
    assert not wrong, "\n\n".join(wrong)
    assert seen or all(row.where not in ("", runtime) for row in ROWS if row.function == function)


@pytest.mark.parametrize("row", PLAIN, ids=lambda row: f"{row.function}, {row.cause}")
def test_wrong_in_a_plain_process(row: Row) -> None:
    here: Any = None
    with silent():
        assert not problems(row, [outcome(row, here)])


# ---------------------------------------------------------------------------------------------------- wrong on one rank


def others_are_told(ranks: list[dict[int, Together]]) -> None:
    """The one raises its own error, who waits for it is told of it, who does not has its result, and all goes on."""
    for number in ranks[0]:
        row, at = ROWS[number], f"{ROWS[number].function}, {ROWS[number].cause}"
        first = [of_rank[number].first for of_rank in ranks]
        assert not problem(row, first[WRONG_RANK]), (at, first[WRONG_RANK])
        assert first[PEER].kind == "CommError", (at, first[PEER])
        for said in (r"rank 1\b|a=0,b=1", r"over 'a'", r" at bad_calls.py:\d+"):
            assert re.search(said, first[PEER].text), (at, first[PEER])
        for rank in {*range(4)} - {WRONG_RANK, PEER}:
            assert first[rank].kind == "nothing", (at, rank, first[rank])
        assert [of_rank[number].after for of_rank in ranks] == [""] * 4, at


def test_wrong_on_one_rank_in_process(tmp_path: Path) -> None:
    others_are_told(mc.launch(one_wrong, ranks=4, args=(str(tmp_path), ONE_WRONG)))


@pytest.mark.thorough
def test_wrong_on_one_rank_under_guard(guarded4: WorkerPool, tmp_path: Path) -> None:
    ranks = guarded4.run(one_wrong, str(tmp_path), FEW_WRONG)
    others_are_told(ranks)
    waited = sorted(each.seconds for each in ranks[PEER].values())
    assert waited[len(waited) // 2] < 1.0  # most of them on a machine that does other things too


def late() -> tuple[str, float]:
    """What a rank is told that waits without a guard, and what it gets when the other one comes at last."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    if mesh.rank == WRONG_RANK:
        with pytest.raises(mc.MeshError, match=r"no reduce op 'avg'"):
            mc.all_reduce(torch.ones(2), "a", "avg", mesh=mesh)
        mc.recv("b", 0, shape=(), dtype=torch.bool, mesh=mesh)  # when the other one has given up
    told, work = "", mc.all_reduce(torch.ones(2), "a", mesh=mesh, async_op=True)
    if mesh.rank == PEER:
        with pytest.raises(mc.CommError) as caught:
            work.wait(0.3)
        told = str(caught.value)
        mc.send(torch.tensor(True), "b", 0, mesh=mesh)
    if mesh.rank == 2:
        mc.recv("b", 1, shape=(), dtype=torch.bool, mesh=mesh)
        mc.send(torch.tensor(True), "a", 0, mesh=mesh)
    if mesh.rank == 0:
        mc.recv("a", 1, shape=(), dtype=torch.bool, mesh=mesh)
        mc.send(torch.tensor(True), "b", 1, mesh=mesh)
    return told, work.wait().sum().item()


def test_wrong_on_one_rank_without_guard(pool4: WorkerPool) -> None:
    """Its peer waits as long as it was told to, and nothing is lost."""
    found = pool4.run(late)
    assert re.search(r"not done after [\d.]+ s of waiting[\s\S]*f32\[2\] .*over 'a'[\s\S]*wait again", found[PEER][0])
    assert [total for _, total in found] == [4.0] * 4


def given_up() -> tuple[str, float, float]:
    """What a rank is told when the mesh's time is up, after how long, and that other meshes go on."""
    mesh, brief = mc.make_mesh({"a": 2, "b": 2}), mc.make_mesh({"a": 2, "b": 2}, timeout=1.25)
    mc.barrier(("a", "b"), mesh=mesh)  # however late one of them begins
    told, began = "", time.monotonic()
    if mesh.rank == WRONG_RANK:
        with pytest.raises(mc.MeshError, match=r"no axis 'A'"):
            mc.all_reduce(torch.ones(2), "A", mesh=brief)
    elif mesh.rank == PEER:
        with pytest.raises(mc.CommError) as caught:
            mc.all_reduce(torch.ones(2), "a", mesh=brief)
        told = str(caught.value)
    else:
        mc.all_reduce(torch.ones(2), "a", mesh=brief)
    waited = time.monotonic() - began
    return told, waited, mc.all_reduce(torch.ones(()), ("a", "b"), mesh=mesh).item()


def test_wrong_on_one_rank_of_a_mesh_with_a_time_out(pool4: WorkerPool) -> None:
    found = pool4.run(given_up)
    told, waited, _ = found[PEER]
    for said in (
        r"^meshcomm.all_reduce: index 0 did not come within 1.25 s", r"got: all_reduce f32\[2\].*here a=1,b=1",
        r"not arrived: index 0 \(rank 1\)", r"fix: the call was given up",
    ):  # fmt: skip
        assert re.search(said, told), told
    assert 1.25 <= waited < 60
    assert [total for *_, total in found] == [4.0] * 4


# ------------------------------------------------------------------------------------- wrong where nothing would be sent

NOTHING_SENT = (
    "pvary", "shard", "axis_index", "axis_size", "heads_of", "sequence_layer_norm", "sequence_rms_norm", "fsdp.shard", "plan",
    "local_shape", "layout_of", "Metrics.add", "Work.wait", "mark_varying", "varying_axes", "assert_varying", "init", "split_rows",
    "grouped_matmul",
)  # fmt: skip
LOCAL = [n for n, row in enumerate(ROWS) if row.function in NOTHING_SENT and not row.where]


def alone(folder: str) -> list[str]:
    """One rank makes wrong calls of functions that send nothing, and mends them; the others know nothing of it."""
    h, wrong = Here(folder), []
    with mc.use_mesh(h.mesh):
        for number in LOCAL if h.mesh.rank == WRONG_RANK else []:
            wrong += [what for what in [problem(ROWS[number], outcome(ROWS[number], h))] if what]
        return [*wrong, works()]


def test_wrong_on_one_rank_where_nothing_is_sent(run4: Any, tmp_path: Path) -> None:
    assert [each for of_rank in run4(alone, str(tmp_path)) for each in of_rank] == [""] * 4


# ---------------------------------------------------------------------------------------------------- right after all


def numbers_of_numpy() -> None:
    """Ints of numpy are ints, as torch has it."""
    mesh = mc.make_mesh({"a": np.int64(2), "b": np.int32(2)})
    one, two, minus = np.int64(1), np.uint8(2), np.int32(-1)
    y = torch.arange(8.0).view(2, 4) + 100 * mesh.rank
    with mc.use_mesh(mesh):
        for got, expected in (
            (mc.all_gather(y, "a", one), mc.all_gather(y, "a", 1)),
            (mc.all_gather(y, "a", minus, [np.int64(4), 4]), mc.all_gather(y, "a", -1, [4, 4])),
            (mc.shard(y, "a", one, [two, two]), mc.shard(y, "a", 1, [2, 2])),
            (mc.reduce_scatter(y, "a", one), mc.reduce_scatter(y, "a", 1)),
            (mc.all_to_all(y, "a", one, np.int64(0)), mc.all_to_all(y, "a", 1, 0)),
            (mc.permute(y, "a", np.array([[0, 1], [1, 0]])), mc.permute(y, "a", [(0, 1), (1, 0)])),
            (mc.shift(y, ("a", "b"), minus), mc.shift(y, ("a", "b"), -1)),
            (mc.broadcast(y, "a", one), mc.broadcast(y, "a", 1)),
            (mc.reduce(y, "a", one), mc.reduce(y, "a", 1)),
            (mc.gather(y, "a", one, one), mc.gather(y, "a", 1, 1)),
        ):
            torch.testing.assert_close(got, expected) if expected is not None else None
            assert (got is None) == (expected is None)
        other = np.int64(1 - mesh.coordinate["a"])
        (got,) = mc.exchange([(y, other, two)], [(other, (two, np.int64(4)), torch.float32, two)], "a")
        torch.testing.assert_close(got, mc.shift(y, "a"))
        # what one rank writes as an int another may have from numpy
        assert mc.broadcast_object(mesh.rank, "b", src=one if mesh.rank else 1) == 1 + 2 * mesh.coordinate["a"]
        assert mc.local_shape("(a d)", (np.int64(4),)) == (2,)


def test_ints_of_numpy(run4: Any) -> None:
    run4(numbers_of_numpy)


class Dim(IntEnum):
    """Of an activation."""

    BATCH = 0
    FEATURES = 1


def named_dims() -> None:
    """What one rank writes so another one writes as a number."""
    mesh = mc.make_mesh({"a": 2})
    y = torch.arange(8.0).view(2, 4) + 100 * mesh.rank
    one = Dim.FEATURES if mesh.rank else 1
    with mc.use_mesh(mesh):
        for got, expected in (
            (mc.all_gather(y, "a", one), mc.all_gather(y, "a", 1)),
            (mc.reduce_scatter(y, "a", one), mc.reduce_scatter(y, "a", 1)),
            (mc.shard(y, "a", one), mc.shard(y, "a", 1)),
            (mc.all_to_all(y, "a", one, 0), mc.all_to_all(y, "a", 1, 0)),
            (mc.broadcast(y, "a", one), mc.broadcast(y, "a", 1)),
        ):
            torch.testing.assert_close(got, expected)


def test_dims_with_names() -> None:
    mc.launch(named_dims, ranks=2)
