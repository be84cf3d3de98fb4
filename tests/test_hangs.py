"""prove_no_hang: what the judge says of logs, and of programs that hang, may hang and cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_breaks import broken_of, follow
from fuzz_programs import Rolled
from fuzz_steps import Run
from torch import Tensor, nn

import meshcomm as mc
from meshcomm.verifying.hangs.log import Group, Issue, Log, Message
from meshcomm.verifying.hangs.proof import judged

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


def test_what_the_library_reads_is_not_listed() -> None:
    def main() -> None:
        model = mc.parallel.data_parallel(nn.Linear(4, 4), "dp", grads="mean")
        model(ones().view(1, 4)).sum().backward()
        mc.parallel.clip_grad_norm(model, 1.0)
        x = torch.randn(6, 2)
        x[0], x[:, 1], x[torch.tensor([0, 1])], x[None]  # no values are read

    assert mc.prove_no_hang(main, {"dp": 2}).unproven == ()


def test_a_mask_as_an_index_is_listed() -> None:
    def main() -> None:
        x = torch.randn(6)
        mc.all_gather_object((len(x[x > 0]), x.masked_select(x > 0).numel()), "dp")

    said = [line.split(" at ")[0] for line in mc.prove_no_hang(main, {"dp": 2}).unproven]
    assert said == ["a mask as an index", "masked_select()"]


INSIDE: dict[str, Callable[[Tensor], object]] = {
    "a slice": lambda x: x[: x.long()[0]],
    "a size": lambda x: torch.arange(x.long()[0]),
    "in": lambda x: 3 in x,
    "a format": lambda x: f"{x[0]:.1f}",
    "where": lambda x: torch.where(x > 0),
    "classes": lambda x: nn.functional.one_hot(x.long()),
    "counts": lambda x: x.long().bincount(),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "runs": lambda x: x.unique_consecutive(),
    "places": lambda x: x.argwhere(),
    "parts": lambda x: x.tensor_split(x.long()[:1]),
    "is_nonzero": lambda x: torch.is_nonzero(x[0]),
    "elements": lambda x: x.to_sparse().indices(),
    "memory of numpy's": lambda x: np.from_dlpack(x),
}


@pytest.mark.parametrize("read", INSIDE.values(), ids=INSIDE)
def test_what_functions_of_torch_read_inside_is_listed(read: Callable[[Tensor], object]) -> None:
    def main() -> None:
        read(ones() * 2)
        mc.barrier("dp")

    assert len(mc.prove_no_hang(main, {"dp": 2}).unproven) == 1


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * (grads[0][0].item() > 0)


def read_by_a_hook() -> None:
    x = ones().requires_grad_()
    x.register_hook(lambda g: g if g.sum() > 0 else None)
    x.sum().backward()


def read_by_a_backward() -> None:
    Backward.apply(ones().requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]


def read_where_numbers_are_drawn() -> None:
    with mc.rng("(dp b)", seed=0):
        torch.randn(4).sum().item()


@pytest.mark.parametrize("main", [read_by_a_hook, read_by_a_backward, read_where_numbers_are_drawn])
def test_what_is_read_within_backward_and_under_modes_is_listed(main: Callable[[], None]) -> None:
    (said,) = mc.prove_no_hang(main, {"dp": 2}).unproven
    assert "test_hangs.py:" in said


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
