"""prove_no_hang: what the judge says of logs, of programs that hang, may hang and cannot, and of traces."""

from __future__ import annotations

import copy
import functools
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fuzz_breaks import broken_of, follow
from fuzz_programs import Rolled
from fuzz_steps import Run
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.dry.run import Program
from meshcomm.tools import prove
from meshcomm.verifying.hangs.classes import Classes
from meshcomm.verifying.hangs.log import Group, Issue, Log, Message
from meshcomm.verifying.hangs.proof import judged
from meshcomm.verifying.hangs.traced import logs_of

SQUARE = {"dp": 2, "tp": 2}
GROUPS = {
    ("dp", 0): Group("dp", (0, 2), "dp"), ("dp", 1): Group("dp", (1, 3), "dp"),
    ("tp", 0): Group("tp", (0, 1), "tp"), ("tp", 1): Group("tp", (2, 3), "tp"),
}  # fmt: skip


def kinds(proof: mc.Proof) -> list[str]:
    return [finding.kind for finding in proof.findings]


# ----------------------------------------------------------------------------------------------- logs made by hand


def call(rank: int, axis: str, line: int, key: str = "sum") -> Issue:
    group = GROUPS[axis, rank % 2 if axis == "dp" else rank // 2]
    return Issue(group, "all_reduce", key, "all_reduce f32[4]", f"a.py:{line}")


def test_the_text_of_an_order_is_one_line_with_its_cycle() -> None:
    logs = {rank: Log(rank) for rank in range(4)}
    for rank, log in logs.items():
        for number in [log.begin(call(rank, axis, 17)) for axis in (("dp", "tp") if rank in (0, 3) else ("tp", "dp"))]:
            log.wait(number)
    (finding,) = judged(logs).findings
    assert (finding.kind, finding.line) == ("order", "a.py:17")
    assert str(finding) == (
        "meshcomm.prove_no_hang: two axes are used in different orders. rank 0 all_reduce over dp at a.py:17 -> "
        "rank 2 all_reduce over tp at a.py:17 -> rank 3 all_reduce over dp at a.py:17 -> rank 1 all_reduce over tp at a.py:17 "
        "-> rank 0; fix: issue them in one order on every rank, or wait between"
    )


def test_waits_where_they_stand_make_a_deadlock_of_it() -> None:
    logs = {rank: Log(rank) for rank in range(4)}
    for rank, log in logs.items():
        for axis in ("dp", "tp") if rank in (0, 3) else ("tp", "dp"):
            log.call(call(rank, axis, 17))
    assert kinds(judged(logs)) == ["deadlock"]


def test_a_call_that_is_missing_in_the_middle_is_named_by_its_line() -> None:
    logs = {rank: Log(rank) for rank in (0, 2)}
    for rank, lines in {0: (1, 2, 3), 2: (1, 3)}.items():
        for line in lines:
            logs[rank].call(call(rank, "dp", line))
    (finding,) = judged(logs).findings
    assert (finding.kind, finding.line) == ("unmatched", "a.py:2")


def test_a_deadlock_behind_another_finding_is_found() -> None:
    logs = {rank: Log(rank) for rank in range(4)}
    other = {axis: Group(axis + "2", (0, 1, 2, 3), axis) for axis in ("x", "y")}
    for rank, log in logs.items():
        log.call(call(rank, "dp", 1, key="max" if rank == 2 else "sum"))
        for axis in ("x", "y") if rank else ("y", "x"):
            log.call(Issue(other[axis], "barrier", "", "barrier", "a.py:2"))
    assert kinds(judged(logs)) == ["mismatch", "deadlock"]


def test_messages_are_met_by_rank_tag_and_order() -> None:
    group = Group("a", (0, 1), "a")
    logs = {0: Log(0), 1: Log(1)}

    def message(log: Log, way: str, tag: int, x: str = "f32[2]") -> None:
        given = {way: (Message(1 - log.rank, tag, x),)}
        log.wait(log.begin(Issue(group, way, "", way, f"a.py:{tag}", messages=True, **given)))  # type: ignore[arg-type]

    for tag in (1, 2):
        message(logs[0], "sent", tag)
    for tag in (2, 1):
        message(logs[1], "wanted", tag)
    assert kinds(judged(logs)) == ["deadlock"]
    message(logs[0], "sent", 3)
    assert kinds(judged(logs)) == ["unmatched", "deadlock"]
    message(logs[1], "wanted", 3, "f32[3]")
    assert kinds(judged(logs)) == ["mismatch", "deadlock"]


# --------------------------------------------------------------------------------------------------------- programs


def ones() -> Tensor:
    return torch.ones(4)


def crossed(later: bool) -> None:
    axes = ("dp", "tp") if mc.current_mesh().rank in (0, 3) else ("tp", "dp")
    works = [mc.all_reduce(ones(), axis, async_op=True) if later else mc.all_reduce(ones(), axis) for axis in axes]
    mc.wait(works)


def in_one_order() -> None:
    works = [mc.all_reduce(ones(), axis, async_op=True) for axis in ("dp", "tp")]
    mc.wait(works[::-1] if mc.current_mesh().rank else works)


def left_out() -> None:
    mc.all_reduce(ones(), "dp")
    if mc.current_mesh().rank != 2:
        mc.all_reduce(ones(), "tp")


def another_op() -> None:
    mc.all_reduce(ones(), "dp", "max" if mc.current_mesh().rank == 2 else "sum")


def ring(later: bool, axis: str = "dp") -> None:
    other = 1 - mc.current_mesh().coordinate[axis]
    work = mc.send(ones(), axis, other, async_op=True) if later else mc.send(ones(), axis, other)
    mc.recv(axis, other, shape=(4,), dtype=torch.float32)
    mc.wait(work)


def exchanged() -> None:
    other = 1 - mc.current_mesh().coordinate["dp"]
    mc.exchange([(ones(), other, 0)], [(other, (4,), torch.float32, 0)], "dp")


def sent_to_nobody() -> None:
    if mc.current_mesh().rank == 0:
        mc.send(ones(), "dp", 1)


def tags_differ() -> None:
    if mc.current_mesh().coordinate["dp"]:
        mc.recv("dp", 0, shape=(4,), dtype=torch.float32, tag=2)
    else:
        mc.send(ones(), "dp", 1, tag=1)


def backward_on_some() -> None:
    x = ones().requires_grad_()
    y = mc.shift(x, "dp")
    if mc.current_mesh().coordinate["dp"] == 0:
        y.sum().backward()


def reads() -> None:
    total = mc.all_reduce(ones().sum(), ("dp", "tp"))
    if total.item() > 3:
        mc.barrier("dp")
    work = mc.all_reduce(ones(), "tp", async_op=True)
    work.done()
    if mc.current_mesh().rank * ones().sum() > 6:
        mc.barrier("tp")
    work.wait()


PROGRAMS: list[tuple[str, Callable[[], object], list[str]]] = [
    ("crossed, waited for at once", lambda: crossed(False), ["deadlock"]),
    ("crossed, waited for later", lambda: crossed(True), ["order"]),
    ("in one order", in_one_order, []),
    ("left out", left_out, ["unmatched"]),
    ("another op", another_op, ["mismatch"]),
    ("send before recv", lambda: ring(False), ["deadlock"]),
    ("send under way before recv", lambda: ring(True), ["order"]),
    ("exchange", exchanged, []),
    ("sent to nobody", sent_to_nobody, ["unmatched"]),
    ("tags that differ", tags_differ, ["deadlock"]),
    ("backward on some ranks", backward_on_some, ["unmatched"]),
]


@pytest.mark.parametrize(("program", "found"), [each[1:] for each in PROGRAMS], ids=[each[0] for each in PROGRAMS])
def test_a_program(program: Callable[[], object], found: list[str]) -> None:
    proof = mc.prove_no_hang(program, SQUARE)
    assert kinds(proof) == found, str(proof)
    assert all("test_hangs.py:" in finding.line for finding in proof.findings)
    if found:
        with pytest.raises(mc.HangError, match=r"meshcomm\.prove_no_hang: "):
            proof.check()
    else:
        assert proof.check() is proof


def test_tags_are_said_where_messages_wait() -> None:
    (finding,) = mc.prove_no_hang(tags_differ, {"dp": 2}).findings
    assert "send to 1 (tag 1) f32[4] over dp at test_hangs.py:" in finding.text
    assert "recv from 0 (tag 2) f32[4] over dp at test_hangs.py:" in finding.text
    assert "the same tag on both sides" in finding.text


def test_what_is_not_proven_is_listed() -> None:
    proof = mc.prove_no_hang(reads, mc.make_mesh(SQUARE))
    assert proof.ok
    said = [line.split(" at ")[0] for line in proof.unproven]
    assert said == ["item()", "bool()", "done()"]
    assert proof.unproven[0].endswith("(all ranks read the same there)")
    assert not proof.unproven[1].endswith("(all ranks read the same there)")


def test_what_the_checker_knows_to_be_the_same_everywhere_is_said() -> None:
    def main() -> None:
        with mc.check_vma():
            total = mc.all_reduce(ones().sum() * (1 + mc.axis_index("dp")), "dp")
            if total.item() > 3:
                mc.barrier("dp")
        if total.item() > 3:
            mc.barrier("tp")

    first, second = mc.prove_no_hang(main, SQUARE).unproven
    assert first.endswith("(by its type the same on every rank)")
    assert second.endswith("(all ranks read the same there)")


def test_an_error_of_the_program_is_raised() -> None:
    def wrong() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mc.prove_no_hang(wrong, SQUARE)


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


# -------------------------------------------------------------------------------- ranks that stand for others


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
        match=r"rank 1 is equal to none of ranks=0 in tp = 1, which is read at test_hangs\.py:\d+\.[\s\S]*\[0, 1\]",
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


# --------------------------------------------------------------------------------------------------- the library itself


def trained(spread: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = spread(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
    for _ in range(2):
        model(ones().view(1, 4)).square().mean().backward()


def sharded(model: nn.Module) -> nn.Module:
    return mc.parallel.fully_shard(model, "dp", grads="mean", replica_axis="tp", units=[nn.Linear])


def copied(model: nn.Module) -> nn.Module:
    return mc.parallel.data_parallel(model, ("dp", "tp"), grads="mean", bucket_mb=1e-4)


def piped() -> None:
    stage = nn.Linear(4, 4)
    step = mc.parallel.pipelined(stage, "dp", loss=nn.functional.mse_loss, microbatches=3, grads="mean")
    step(torch.ones(6, 4), torch.ones(6, 4))


@pytest.mark.parametrize("spread", [sharded, copied])
def test_adaptors(spread: Callable[[nn.Module], nn.Module]) -> None:
    assert mc.prove_no_hang(lambda: trained(spread), SQUARE).check()


def test_a_pipeline_has_messages_under_way_and_nothing_else() -> None:
    proof = mc.prove_no_hang(piped, {"dp": 2})
    assert set(kinds(proof)) <= {"order"}
    assert all("messages wait for each other" in finding.text for finding in proof.findings)
    assert all("are one batch" in note for note in proof.notes)


@pytest.mark.parametrize("breaks", [True, False], ids=["broken", "whole"])
@pytest.mark.parametrize("seed", [0, 15, 16, 23], ids=["mismatch", "unmatched", "deadlock", "another deadlock"])
def test_a_program_hangs_if_and_only_if_the_judge_says_so(seed: int, breaks: bool) -> None:
    program, broken = broken_of(Rolled(seed), [{"a": 2}, {"a": 2, "b": 2}, {"a": 3}])
    assert broken is not None

    def main() -> None:
        mesh = mc.make_mesh(program.axes)
        follow(Run(program, program.sent(mesh.rank), mesh), broken if breaks else None)

    failed = False
    with mc.trace() as t:
        try:
            mc.launch(main, program.size)
        except mc.CommError:
            failed = True
    assert failed is breaks
    assert bool(set(kinds(mc.prove_no_hang(t))) - {"order"}) is failed


# ------------------------------------------------------------------------------------------------------------ traces


def traced(program: Callable[[], object]) -> mc.Trace:
    def main() -> None:
        with mc.use_mesh(mc.make_mesh(SQUARE)):
            program()

    with mc.trace() as t:
        mc.launch(main, 4)
    return t


def test_a_folder_of_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, program, code in (("good", exchanged, 0), ("bad", lambda: crossed(True), 1)):
        folder = tmp_path / name
        folder.mkdir()
        t = traced(program)
        t.save(folder / "trace.json")
        again = mc.Trace.merge([folder / "trace.json"])
        assert again.ranks == t.ranks == (0, 1, 2, 3)
        assert str(mc.prove_no_hang(again)) == str(mc.prove_no_hang(t))
        assert prove.main([str(folder)]) == code
        assert "4 ranks" in capsys.readouterr().out
    assert prove.main([str(tmp_path)]) == 2
    (tmp_path / "other.json").write_text("{}")
    assert prove.main([str(tmp_path)]) == 2
    assert "no trace of meshcomm" in capsys.readouterr().err


def test_traces_that_are_refused(tmp_path: Path) -> None:
    def own() -> mc.Trace:
        with mc.use_mesh(mc.make_mesh({"dp": 2})), mc.trace() as t:
            mc.all_reduce(ones(), "dp")
        return t

    mine, other = mc.launch(own, 2)
    with pytest.raises(mc.MeshError, match=r"the trace has no calls of rank 1, [\s\S]*merge the traces of all ranks"):
        mc.prove_no_hang(mine)
    assert mc.prove_no_hang(mc.Trace.merge([mine, other])).ok
    (_, later) = mc.launch(own, 2)
    for number, t in enumerate((mine, later)):
        t.save(tmp_path / f"rank{number}.json")
    with pytest.raises(mc.MeshError, match=r"different launches[\s\S]*rank 0 of rank0.json and rank 1 of rank1.json"):
        mc.prove_no_hang(mc.Trace.merge(sorted(tmp_path.iterdir())))
    both = mc.Trace.merge([mine, other])
    both.save(tmp_path / "all.json")
    with pytest.raises(mc.MeshError, match=r"the same calls of rank 0[\s\S]*all.json and rank0.json"):
        mc.Trace.merge(sorted(tmp_path.iterdir()))
    with pytest.raises(mc.MeshError, match="the trace is open"), mc.trace() as t:
        mc.prove_no_hang(t)
    with pytest.raises(mc.MeshError, match="leave mesh and ranks out"):
        mc.prove_no_hang(mine, SQUARE)  # type: ignore[call-overload]
