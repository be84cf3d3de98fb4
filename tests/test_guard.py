"""The guard: ranks that call different things, wait for each other or for one that will not come are told, soon."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import PoolWith
from test_random_programs import one_program, one_tangent
from torch import Tensor

import meshcomm as mc
from meshcomm._torch import default_store
from meshcomm.runtime.hooks.guard import guard as guards
from meshcomm.runtime.hooks.guard.boards import Group, StoreBoard, StoreShelf
from meshcomm.runtime.hooks.guard.link import Guarded
from meshcomm.runtime.hooks.guard.setup import _ended_afar
from meshcomm.runtime.hooks.guard.store import PatientStore
from meshcomm.runtime.start.workers import WorkerPool

F64 = torch.float64
BOTH = ("dp", "tp")
SOON = 60.0
"""Seconds: far below the time-out of five minutes, and far above a second, for the machine may be busy."""

GUARDED = ["guarded4", "guarded4_at_the_store"]


@pytest.fixture(params=GUARDED, ids=["shared", "store"])
def guarded(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@contextlib.contextmanager
def square() -> Iterator[mc.Mesh]:
    with mc.use_mesh(mc.make_mesh({"dp": 2, "tp": 2})) as mesh:
        yield mesh


def x(n: int = 8) -> Tensor:
    return torch.ones(n)


def works_on() -> None:
    """Every axis gives the right numbers, after the meeting that follows an error."""
    mc.barrier(BOTH, timeout=60)
    mesh = mc.current_mesh()
    assert mesh is not None
    mine = torch.tensor(10.0**mesh.rank)
    for axis in ("dp", "tp", BOTH, ("tp", "dp")):
        ranks = mesh.axis(axis).ranks
        assert mc.all_reduce(mine, axis).item() == sum(10.0**rank for rank in ranks)
        assert mc.all_gather(mine, axis, async_op=True).wait().tolist() == [10.0**rank for rank in ranks]


# --------------------------------------------------------------------------------------------- one rank is different

Case = tuple[Callable[[], Any], Callable[[], Any], str]
"""What rank 3 does, what the others do, and what all are told: who called what."""


def both(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: (first(), second())


def wrong_fork() -> None:
    with mc.fork_rng("ep"):
        pass


CALLED: dict[str, Case] = {
    "operation": (
        lambda: mc.all_reduce(x(), BOTH), lambda: mc.all_gather(x(), BOTH),
        (r"dp=1,tp=1 called all_reduce f32\[8\] \(op='sum'\) over \('dp', 'tp'\) at test_guard.py:\d+;"
        r" the other 3 called all_gather f32\[8\] \(dim=0\) over \('dp', 'tp'\) at test_guard.py:\d+"),
    ),
    "reduce op": (
        lambda: mc.all_reduce(x(), BOTH, "max"), lambda: mc.all_reduce(x(), BOTH),
        r"dp=1,tp=1 called all_reduce f32\[8\] \(op='max'\) .*; the other 3 called all_reduce f32\[8\] \(op='sum'\)",
    ),
    "dtype": (
        lambda: mc.all_reduce(x().to(torch.int32), BOTH), lambda: mc.all_reduce(x(), BOTH),
        r"dp=1,tp=1 called all_reduce i32\[8\] .*; the other 3 called all_reduce f32\[8\]",
    ),
    "shape of one size": (
        lambda: mc.all_reduce(x().view(2, 4), BOTH), lambda: mc.all_reduce(x().view(4, 2), BOTH),
        r"dp=1,tp=1 called all_reduce f32\[2, 4\] .*; the other 3 called all_reduce f32\[4, 2\]",
    ),
    "length": (
        lambda: mc.all_reduce(x(9), BOTH), lambda: mc.all_reduce(x(), BOTH),
        r"dp=1,tp=1 called all_reduce f32\[9\] .*; the other 3 called all_reduce f32\[8\]",
    ),
    "dim": (
        lambda: mc.all_gather(torch.ones(4, 4), BOTH, 1), lambda: mc.all_gather(torch.ones(4, 4), BOTH),
        r"dp=1,tp=1 called all_gather f32\[4, 4\] \(dim=1\) .*; the other 3 called all_gather f32\[4, 4\] \(dim=0\)",
    ),
    "dim of a tree": (
        lambda: mc.all_gather({"w": torch.ones(4, 4)}, BOTH, 1), lambda: mc.all_gather({"w": torch.ones(4, 4)}, BOTH),
        r"dp=1,tp=1 called all_gather x\['w'\] dim=1 f32\[4, 4\] .*; the other 3 called all_gather x\['w'\] dim=0 f32\[4, 4\]",
    ),
    "root": (
        lambda: mc.broadcast(x(), BOTH, 2), lambda: mc.broadcast(x(), BOTH),
        r"dp=1,tp=1 called broadcast f32\[8\] \(src=2\) .*; the other 3 called broadcast f32\[8\] \(src=0\)",
    ),
    "perm": (
        lambda: mc.permute(x(), BOTH, [(0, 1)]), lambda: mc.permute(x(), BOTH, [(0, 2)]),
        r"dp=1,tp=1 called permute f32\[8\] \(perm=\(\(0, 1\),\)\) .*; the other 3 called permute f32\[8\] \(perm=\(\(0, 2\),\)\)",
    ),
    "splits": (
        lambda: mc.all_to_all(x(), BOTH, 0, 0, [1, 3, 2, 2], [2] * 4), lambda: mc.all_to_all(x(), BOTH, 0, 0, [2] * 4, [2] * 4),
        r"dp=1,tp=1 called all_to_all f32\[8\] \(.*sending \[1, 3, 2, 2\] and receiving \[2, 2, 2, 2\] elements\)",
    ),
    "tree": (
        lambda: mc.all_reduce({"w": x(), "b": x(2)}, BOTH), lambda: mc.all_reduce({"w": x(), "c": x(2)}, BOTH),
        r"dp=1,tp=1 called all_reduce x\['b'\] f32\[2\], x\['w'\] f32\[8\] .*; the other 3 called all_reduce x\['c'\]",
    ),
    "gradient": (
        lambda: mc.all_reduce(x().requires_grad_(), BOTH), lambda: mc.all_reduce(x(), BOTH),
        r"dp=1,tp=1 called all_reduce f32\[8\] \(op='sum'\) that needs a gradient .*; the other 3 called all_reduce f32\[8\]",
    ),
    "later": (
        lambda: mc.all_reduce(x(), BOTH, "max", async_op=True).wait(), lambda: mc.all_reduce(x(), BOTH, async_op=True).wait(),
        r"dp=1,tp=1 called all_reduce f32\[8\] \(op='max'\) .*; the other 3 called all_reduce f32\[8\] \(op='sum'\)",
    ),
    "a skipped call": (
        lambda: mc.all_gather(x(), BOTH), both(lambda: mc.all_reduce(x(), BOTH), lambda: mc.all_gather(x(), BOTH)),
        r"dp=1,tp=1 called all_gather f32\[8\] .*; the other 3 called all_reduce f32\[8\]",
    ),
    "an object": (
        lambda: mc.all_gather_object([1], BOTH), lambda: mc.all_reduce(x(), BOTH),
        r"dp=1,tp=1 called all_gather_object .*; the other 3 called all_reduce f32\[8\]",
    ),
    "wrong on one": (
        lambda: mc.all_reduce("text", BOTH), lambda: mc.all_reduce(x(), BOTH),
        r"dp=1,tp=1 called all_reduce at test_guard.py:\d+ and has raised: meshcomm.all_reduce: x is not a tensor but str",
    ),
    "no such axis on one": (
        lambda: mc.all_reduce(x(), "ep"), lambda: mc.all_reduce(x(), BOTH),
        r"dp=1,tp=1 \(rank 3\) has raised an error instead: meshcomm.all_reduce: no axis 'ep' in the mesh",
    ),
    "no such axis on one, of a layer": (
        lambda: mc.parallel.row_linear(x(), torch.ones(8, 8), axis="ep"), lambda: mc.all_reduce(x(), BOTH),
        r"dp=1,tp=1 \(rank 3\) has raised an error instead: meshcomm.row_linear: no axis 'ep' in the mesh",
    ),
    "no such axis on one, of random numbers": (
        wrong_fork, lambda: mc.all_reduce(x(), BOTH),
        r"dp=1,tp=1 \(rank 3\) has raised an error instead: meshcomm.fork_rng: no axis 'ep' in the mesh",
    ),
    "returned, message": (
        lambda: None, lambda: mc.recv(BOTH, 3, shape=(2,), dtype=torch.float32),
        r"meshcomm.recv: not all messages will come.\n  got: dp=1,tp=1 \(rank 3\) has returned from its function",
    ),
    "returned": (
        lambda: None, lambda: mc.all_reduce(x(), BOTH),
        r"dp=1,tp=1 \(rank 3\) has returned from its function",
    ),
    "returned, later": (
        lambda: None, lambda: mc.all_reduce(x(), BOTH, async_op=True).wait(),
        r"dp=1,tp=1 \(rank 3\) has returned from its function",
    ),
}  # fmt: skip
ALONE = (
    "returned",
    "returned, message",
    "returned, later",
    *(kind for kind in CALLED if kind.startswith("no such axis")),
)
"""Rank 3 itself gets no error, or its own."""


def differ(case: str) -> tuple[float, str]:
    """Every rank but one that has nothing to wait for is told, and soon."""
    odd, usual, _ = CALLED[case]
    with square() as mesh:
        mc.all_reduce(x(), BOTH)
        start = time.monotonic()
        try:
            (odd if mesh.rank == 3 else usual)()
        except (mc.CommError, mc.MeshError) as error:
            return time.monotonic() - start, f"{type(error).__name__} {error}"
        return 0.0, "nothing"


def fails(folder: str) -> None:
    """Rank 3 does not catch its own error; the others note what they are told."""
    with square() as mesh:
        mc.all_reduce(x(), BOTH)
        try:
            mc.all_reduce(x(), BOTH) if mesh.rank != 3 else 1 / 0
        except mc.CommError as error:
            Path(folder, str(mesh.rank)).write_text(str(error))
            raise


def goes_on() -> None:
    with square():
        works_on()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CALLED)
def test_one_that_is_different(guarded: Any, case: str) -> None:
    found = guarded.run(differ, case)
    for rank, (seconds, text) in enumerate(found):
        if rank == 3 and case in ALONE:
            assert text == "nothing" or text.startswith("MeshError")
        elif rank == 3 and case == "wrong on one":
            assert text.startswith("MeshError meshcomm.all_reduce: x is not a tensor")
        else:
            assert text.startswith("CommError"), f"rank {rank}: {text}"
            assert seconds < SOON
            assert re.search(CALLED[case][2], text), f"rank {rank}: {text}"
            assert f"here: dp={rank // 2},tp={rank % 2} called" in text
    guarded.run(goes_on)


def test_one_that_fails(guarded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshcomm.runtime.start.workers._POOL_PROMPT", SOON)  # the pool would end the others before
    with pytest.raises(mc.CommError, match="rank 3 failed in fails: ZeroDivisionError: division by zero"):
        guarded.run(fails, str(tmp_path))
    for rank in range(3):
        assert (
            "dp=1,tp=1 (rank 3) has failed: ZeroDivisionError: division by zero"
            in Path(tmp_path, str(rank)).read_text()
        )


def before_its_first_mesh() -> str:
    """Rank 3 makes none."""
    if dist.get_rank() == 3:
        return "nothing"
    with pytest.raises(mc.CommError) as caught, square():
        mc.all_reduce(x(), BOTH)
    return str(caught.value)


def mesh_of_three(adopted: str) -> None:
    """Rank 3 makes its first mesh in another function than the others. ``adopted``: a group met in this file."""
    rank = dist.get_rank()
    if adopted:
        mc.shutdown()
        dist.init_process_group("gloo", init_method=f"file://{adopted}", rank=rank, world_size=4)
        mc.init()
    if rank != 3:
        mesh = mc.make_mesh({"three": 3}, ranks=[0, 1, 2])
        assert mc.all_reduce(x(), "three", mesh=mesh).sum() == 24


@pytest.mark.parametrize("memory", ["1", "0"], ids=["shared", "store"])
def test_one_that_returns_before_its_first_mesh(monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    monkeypatch.setenv("MESHCOMM_SHARED_MEMORY", memory)
    with WorkerPool(4, guard=True, timeout=SOON) as pool:
        *told, last = pool.run(before_its_first_mesh)
        assert last == "nothing"
        assert all("not all ranks come to set up a group" in each for each in told)
        assert "rank 3: returned from its function" in told[2] or "rank 3 has returned from its function" in told[2]


@pytest.mark.parametrize("is_adopted", [False, True], ids=["", "adopted"])
def test_one_whose_first_mesh_came_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_adopted: bool) -> None:
    """It is known to have returned all the same: each counts the functions that it was given, and not from there on."""
    monkeypatch.setenv("MESHCOMM_GUARD", "1")
    with WorkerPool(4, timeout=SOON) as pool:
        pool.run(mesh_of_three, str(tmp_path / "store") if is_adopted else "")
        for _, text in pool.run(differ, "returned")[:3]:
            assert re.search(CALLED["returned"][2], text), text


def leaves_messages() -> int:
    """Rank 3 returns, and has asked for many messages that it does not wait for: what it says of them is long."""
    with square() as mesh:
        mc.all_reduce(x(), BOTH)
        if mesh.rank == 3:
            want = {"shape": (2,), "dtype": torch.float32, "async_op": True}
            KEPT.extend(mc.recv(BOTH, 0, tag=tag, **want) for tag in range(150))
            guard = guards.current()
            assert guard is not None
            while len(guard._status.waits) < 150:
                time.sleep(0.01)
            return len(guard._status.write())
        with pytest.raises(mc.CommError, match=r"rank 3\) has returned from its function"):
            mc.all_reduce(x(), BOTH)
        return 0


KEPT: list[Any] = []


def test_one_that_has_much_to_say_when_it_returns() -> None:
    with WorkerPool(4, guard=True, timeout=SOON) as pool:
        assert pool.run(leaves_messages)[3] > 2**15


def test_what_is_too_much_for_a_shelf_is_shortened() -> None:
    """But not how the function has ended, nor what the program waits in."""
    status = guards.Status(home="returned", issued={7: 3})
    status.waits = [guards.Wait(Group(7, (0, 1), "g"), n, "words" * 100, "at", {1: f"key {n}"}) for n in range(100)]
    status.main = 0, 0, status.waits[-1].id
    read = guards.Status.read(status.write(8000))
    assert len(status.write(8000)) <= 8000 < len(status.write())
    assert (read.home, read.issued, read.of_main()) != ("", {}, None)
    assert 1 < len(read.waits) < 100
    assert [each.number for each in guards.Status.read(status.write(1200)).waits] == [99]


def finds_a_reason_alone(folder: str) -> str:
    """Rank 0 gives up for a reason that the others do not find; rank 3 comes when they have been told."""
    with square() as mesh:
        mc.all_reduce(x(), BOTH)
        guard: Any = guards.current()
        if mesh.rank == 0:
            guard.why_never = lambda *_, **__: "a reason of its own"
        end = time.monotonic() + SOON
        while mesh.rank == 3 and len(os.listdir(folder)) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        try:
            mc.all_reduce(x(), BOTH)
        except mc.CommError as error:
            return str(error)
        finally:
            vars(guard).pop("why_never", None)
            Path(folder, str(mesh.rank)).touch()
            told = time.monotonic() < end
            assert told
    return ""


def test_a_reason_that_only_one_finds(guarded: Any, tmp_path: Path) -> None:
    for text in guarded.run(finds_a_reason_alone, str(tmp_path)):
        assert "a reason of its own" in text
    guarded.run(goes_on)


# ------------------------------------------------------------------------------------------------------- deadlocks


def two_axes() -> str:
    """Ranks 0 and 3 take dp first, 1 and 2 tp: nobody's other side comes."""
    with square() as mesh:
        order = ("dp", "tp") if mesh.rank in (0, 3) else ("tp", "dp")
        with pytest.raises(mc.CommError) as caught:
            both(lambda: mc.all_reduce(x(), order[0]), lambda: mc.all_reduce(x(), order[1]))()
        works_on()
    return str(caught.value)


def test_two_axes_in_another_order(guarded: Any) -> None:
    for rank, text in enumerate(guarded.run(two_axes)):
        assert "deadlock: ranks wait for each other" in text
        axis = "dp" if rank in (0, 3) else "tp"
        assert f"here: dp={rank // 2},tp={rank % 2} called all_reduce f32[8] (op='sum') over '{axis}'" in text
    assert any(
        re.search(r"and dp=\d,tp=\d called .* over 'dp' .*; the other 2 called .* over 'tp'", text)
        or re.search(r"and dp=\d,tp=\d called .* over 'tp' .*; the other 2 called .* over 'dp'", text)
        for text in guarded.run(two_axes)
    )


BEHIND: dict[str, Callable[[mc.Mesh], Any]] = {
    "send": lambda pair: mc.send(x(), BOTH, 0),
    "recv": lambda pair: mc.recv(BOTH, 0, shape=(8,), dtype=torch.float32),
    "exchange": lambda pair: mc.exchange([(x(), 0, 1)], [(0, (8,), torch.float32, 2)], BOTH),
    "a message later": lambda pair: mc.send(x(), BOTH, 0, async_op=True).wait(),
    "a collective": lambda pair: mc.all_reduce(x(), "pair", mesh=pair),
    "a collective later": lambda pair: mc.all_reduce(x(), "pair", mesh=pair, async_op=True).wait(),
}
"""What rank 3 waits in, for rank 0."""


def in_a_barrier_between(name: str) -> str:
    """Rank 1 waits for 3, 3 for 0, and 0 for 1, in a barrier, which outlasts that: 1 sees it first, and is where it
    meets 3 when that looks.
    """
    told, deaf = "", 0.0
    with square() as mesh, pytest.MonkeyPatch.context() as patch:
        for axis in ("dp", "tp", BOTH):
            mc.all_reduce(x(), axis)
        if mesh.rank in (0, 3):
            pair = mc.make_mesh({"pair": 2}, ranks=(0, 3))
            mc.all_reduce(x(), "pair", mesh=pair)
        mc.barrier(BOTH, timeout=60)
        if mesh.rank == 3:
            deaf, hears = time.monotonic() + 20 * guards.LONG, guards.Guard.why_never
            patch.setattr(
                guards.Guard, "why_never", lambda *of, **kw: hears(*of, **kw) if time.monotonic() > deaf else ""
            )
        if mesh.rank in (1, 3):
            with pytest.raises(mc.CommError) as caught:
                BEHIND[name](pair) if mesh.rank == 3 else mc.recv("dp", 1, shape=(8,), dtype=torch.float32)
            told = str(caught.value)
        for axis in ("dp", "tp"):
            mc.barrier(axis, timeout=60)
        works_on()
    return told


@pytest.mark.one_in(4, alike=True)
@pytest.mark.parametrize("name", BEHIND)
def test_who_waits_behind_one_in_a_barrier_is_told(guarded: Any, name: str) -> None:
    nothing, first, nothing_either, second = guarded.run(in_a_barrier_between, name)
    assert nothing == nothing_either == ""
    for text in (first, second):
        assert "deadlock: ranks wait for each other" in text
        assert "called barrier over 'tp'" in text


def waits_are_no_deadlock() -> None:
    """Rank 3 is late; 2 waits for it, 0 for 2, and 1 for both: all of it comes to an end."""
    with square() as mesh:
        if mesh.rank == 3:
            time.sleep(3 * guards.LONG)
        order = ("tp", "dp") if mesh.rank > 1 else ("dp", "tp")
        if mesh.rank in (2, 3):
            assert mc.all_reduce(x(), order[0]).sum() == 16
            assert mc.all_reduce(x(), order[1]).sum() == 16
        else:
            assert mc.all_reduce(x(), "dp").sum() == 16
            time.sleep(3 * guards.LONG)
        if mesh.rank < 2:
            assert mc.all_reduce(x(), "tp").sum() == 16


def test_who_waits_for_one_that_waits(guarded: Any) -> None:
    guarded.run(waits_are_no_deadlock)


def behind() -> str:
    """Works and calls of three ranks, which the fourth leaves out for a barrier: they are told, and come there."""
    with square() as mesh:
        mc.all_reduce(x(), BOTH)
        told, works = "", []
        if mesh.rank != 1:
            works.append(mc.all_reduce(x(1), BOTH, async_op=True))
            with pytest.raises(mc.CommError) as caught:
                mc.all_reduce(x(2), BOTH)
            told = str(caught.value)
        works_on()
        for work in works:
            with pytest.raises(mc.CommError):
                work.wait()
    return told


def test_a_rank_that_goes_ahead_to_a_barrier(guarded: Any) -> None:
    texts = guarded.run(behind)
    assert texts.pop(1) == ""
    for text in texts:
        assert re.search(r"called barrier over \('dp', 'tp'\) at test_guard.py", text)


def new_axes() -> str:
    """A tuple that one rank alone orders otherwise, before any of them has been used."""
    mesh = mc.make_mesh({"u": 2, "v": 2})
    with pytest.raises(mc.CommError) as caught:
        mc.all_reduce(x(), ("v", "u") if mesh.rank == 2 else ("u", "v"), mesh=mesh)
    return str(caught.value)


def test_an_axis_that_only_one_rank_uses_for_the_first_time() -> None:
    with PoolWith(4, MESHCOMM_GUARD="1") as pool:
        for text in pool.run(new_axes):
            assert "not all ranks come to set up a group" in text
            assert re.search(r"the set-up of the group of ranks \[0, (1, 2|2, 1), 3\] at test_guard.py", text)


def forgiven() -> None:
    """An error that one rank has caught is no news after all have met."""
    with square() as mesh:
        mc.all_reduce(x(), BOTH)
        if mesh.rank == 0:
            with pytest.raises(mc.MeshError):
                mc.all_reduce(x(), "nowhere")
        works_on()
        if mesh.rank == 0:
            time.sleep(3 * guards.LONG)
        assert mc.all_reduce(x(), BOTH).sum() == 32


def raised_elsewhere() -> str:
    """An error that one rank has caught, and not met since: its numbers may be of other calls than the others'."""
    with square() as mesh:
        mc.all_reduce(x(), BOTH)
        if mesh.rank == 1:
            with pytest.raises(mc.MeshError):
                mc.all_reduce(x(), "nowhere")
        with pytest.raises(mc.CommError) as caught:
            mc.all_reduce(x(), BOTH)
        works_on()
        return str(caught.value)


def test_errors_that_were_caught_are_told_to_all(guarded: Any) -> None:
    for text in guarded.run(raised_elsewhere):
        assert "not all ranks have come here by the same calls" in text
        assert "got: dp=0,tp=1 has raised an error in another call" in text


def test_errors_before_a_meeting_are_forgiven(guarded: Any) -> None:
    guarded.run(forgiven)


def receives() -> str:
    """0 and 2 receive from each other, and nobody sends; 1 and 3 talk past each other by the tag."""
    with square() as mesh:
        other = 1 - mesh.coordinate["dp"]
        calls: list[Callable[[], Any]] = [
            lambda: mc.recv("dp", other, shape=(3,), dtype=torch.float32),
            lambda: mc.send(x(3), "dp", 1, tag=5),
            lambda: mc.recv("dp", other, shape=(3,), dtype=torch.float32),
            lambda: mc.recv("dp", 0, tag=6, shape=(3,), dtype=torch.float32),
        ]
        with pytest.raises(mc.CommError) as caught:
            calls[mesh.rank]()
        works_on()
    return str(caught.value)


def test_messages_that_nobody_sends(guarded: Any) -> None:
    for text in guarded.run(receives):
        assert "deadlock: ranks wait for each other" in text
        assert re.search(r"called (recv from|send to) \d \(tag \d\) f32\[3\] over 'dp' at test_guard.py", text)


def unlike_messages() -> str:
    with square() as mesh:
        send, receive = lambda: mc.send(x(3), "dp", 1), lambda: mc.recv("dp", 0, shape=(4,), dtype=torch.float32)
        with pytest.raises(mc.CommError) as caught:
            (send if mesh.coordinate["dp"] == 0 else receive)()
        works_on()
        if mesh.coordinate["dp"] == 0:
            mc.send(torch.arange(3.0), "dp", 1)
        else:
            assert mc.recv("dp", 0, shape=(3,), dtype=torch.float32).tolist() == [0, 1, 2]
    return str(caught.value)


def test_messages_that_do_not_fit(guarded: Any) -> None:
    for text in guarded.run(unlike_messages):
        assert "a message does not fit" in text
        assert "f32[3]" in text
        assert "f32[4]" in text


# ---------------------------------------------------------------------------------------------------- right programs


def right_programs() -> None:
    """Values, gradients, second derivatives and tangents of random programs; test_fuzz.py has more under guard."""
    one_program(201, (2, 2), False)
    one_tangent(203, (2, 2))


def later_in_any_order() -> None:
    """Ranks start the same works and wait in different orders, across axes, with messages between."""
    with square() as mesh:
        r = mesh.rank
        works = {
            "a": mc.all_reduce(torch.tensor(float(r)), "dp", async_op=True),
            "b": mc.all_gather(torch.tensor([r]), "tp", async_op=True),
            "c": mc.all_reduce({"w": x() * r, "b": x(2)}, BOTH, async_op=True),
            "d": mc.shift(torch.tensor(r), "dp", async_op=True),
        }
        sent = mc.send(torch.tensor([r]), "dp", 1 - mesh.coordinate["dp"], async_op=True)
        got = mc.recv("dp", 1 - mesh.coordinate["dp"], shape=(1,), dtype=torch.int64)
        sent.wait()
        assert got.tolist() == [(r + 2) % 4]
        order = sorted(works, reverse=r % 2 == 1)
        found = {name: works[name].wait() for name in order}
        assert found["a"] == r + (r + 2) % 4
        assert found["b"].tolist() == [r - r % 2, r - r % 2 + 1]
        assert found["c"]["w"].tolist() == [6.0] * 8
        assert found["d"] == (r + 2) % 4
        works_on()


def trained() -> list[float]:
    """Some steps of FSDP beside DDP: buckets and gathers that overlap."""
    with square() as mesh:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
        mc.parallel.fully_shard(model, "dp", grads="mean", replica_axis="tp")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for step in range(3):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + mesh.rank), dtype=F64)
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mc.all_reduce(loss.detach(), BOTH, "mean").item())
    return losses


def is_guarded() -> None:
    with square() as mesh:
        assert guards.current() is not None
        assert [isinstance(hook, Guarded) for hook in mesh.axis("dp").link.hooks] == [True]


class LateError(Exception):
    """Of a handler of an alarm."""


def alarmed(flag: str) -> str:
    """A signal's handler raises in rank 1 while it waits for the others, which come when that is over."""

    def handler(number: int, frame: Any) -> None:
        while frame is not None and frame.f_code.co_name != "wait_for_all":
            frame = frame.f_back
        if frame is not None:
            raise LateError("too late for me")

    with square() as mesh:
        mc.all_reduce(x(), BOTH)  # the group is there
        kind: type[Exception] = mc.CommError
        if mesh.rank == 1:
            before, kind = signal.signal(signal.SIGALRM, handler), LateError
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        else:
            while not Path(flag).exists():
                time.sleep(0.01)
        with pytest.raises(kind) as caught:
            mc.all_reduce(x(), BOTH)
        if mesh.rank == 1:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            Path(flag).touch()
        works_on()
        return str(caught.value)


def test_who_is_interrupted_says_by_what(guarded: Any, tmp_path: Path) -> None:
    told = guarded.run(alarmed, str(tmp_path / "flag"))
    assert told[1] == "too late for me"
    for rank in (0, 2, 3):
        assert "it was interrupted by LateError: too late for me" in told[rank]


def errors_on_all() -> None:
    """What all ranks do wrong in the same way is their own error, and nobody else's."""
    with square() as mesh:
        for wrong in (
            lambda: mc.all_reduce(None, "dp"),
            lambda: mc.all_reduce(x(), "ep"),
            lambda: mc.shard(x(3), "tp"),
        ):
            with pytest.raises(mc.MeshError):
                wrong()
            assert mc.all_reduce(x(), "dp").sum() == 16
        with pytest.raises(mc.MeshError):
            mc.scatter(x(3) if mesh.coordinate["tp"] == 0 else None, "tp")
        with pytest.raises(mc.MeshError):
            mc.broadcast_object(lambda: 0, "tp")
        for axis in ("dp", "tp", BOTH):
            assert mc.all_reduce(x(), axis).sum() == 8 * mesh.axis(axis).size


def test_right_programs(guarded: Any) -> None:
    guarded.run(is_guarded)
    guarded.run(right_programs)
    guarded.run(later_in_any_order)
    guarded.run(errors_on_all)


def test_training_is_the_same(guarded: Any, pool4: Any) -> None:
    under, bare_ = guarded.run(trained), pool4.run(trained)
    assert under == bare_
    assert under[0][0] > under[0][-1]


# ------------------------------------------------------------------------------------------------------ what is left


def keys_left() -> tuple[int, int]:
    """How many keys of the guard a hundred calls leave at the store."""
    with square() as mesh:
        works_on()
        before = len(guard_keys())
        for _ in range(25):
            mc.all_reduce(x(), BOTH)
            mc.all_gather(x(), "tp", async_op=True).wait()
            mc.shift(x(), "dp")
            if mesh.coordinate["dp"] == 0:
                mc.send(x(3), "dp", 1)
            else:
                mc.recv("dp", 0, shape=(3,), dtype=torch.float32)
        works_on()
        return before, len(guard_keys())


def guard_keys() -> list[str]:
    return [key for key in default_store().list_keys() if "guard" in key]


def test_nothing_is_left_at_the_store(guarded: Any) -> None:
    for before, after in guarded.run(keys_left):
        assert after <= before + 8


def rounds_that_let_go(rounds: int) -> list[int]:
    """How many keys there are at the store while meshes are made, used, met over and dropped."""
    found = []
    for _ in range(rounds):
        with square() as mesh:
            for axis in ("dp", "tp", BOTH):
                mc.all_reduce(x(), axis)
                mc.shift(x(), axis)
                mc.barrier(axis, timeout=60)
        del mesh
        gc.collect()
        found.append(default_store().num_keys())
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["pool4", "gloo4", "guarded4"])
def test_a_mesh_that_is_dropped_leaves_nothing_at_the_store(request: pytest.FixtureRequest, kind: str) -> None:
    counts = request.getfixturevalue(kind).run(rounds_that_let_go, 6)[0]
    assert max(counts[4:]) <= max(counts[:2]) + 8, counts  # each of 18 axes has left ten keys or more


def drops_what_it_waited_for() -> list[bool]:
    """Whether meshes are gone whose last call was waited for later, with a graph."""
    gone = []
    for _ in range(3):
        with square() as mesh:
            y = mc.all_reduce(x().requires_grad_(), "dp", async_op=True).wait()
            y.sum().backward()
            z = mc.shift(x().requires_grad_(), "tp", async_op=True).wait()
        there = weakref.ref(mesh)
        del mesh, y, z
        with square():
            mc.all_reduce(x(), BOTH)  # this thread's last call
        gc.collect()
        gone.append(there() is None)
    return gone


def test_a_mesh_goes_although_its_last_calls_had_a_graph(guarded: Any) -> None:
    for gone in guarded.run(drops_what_it_waited_for):
        assert all(gone[:2]), gone


def test_who_begins_later_is_not_taken_for_one_that_has_ended(guarded4: Any) -> None:
    """A rank that has not been given this function yet has returned from the one before."""
    pids = guarded4.run(os.getpid)
    os.kill(pids[2], signal.SIGSTOP)
    late = threading.Timer(1.0, os.kill, (pids[2], signal.SIGCONT))
    late.start()
    try:
        assert guarded4.run(sums_over_all) == [4.0] * 4
    finally:
        late.join()


def circle_after_a_thread() -> str:
    """Another thread has made calls and ended; the number that it had belongs to one now that makes none."""
    other = threading.Thread(target=lambda: mc.all_reduce(x(), BOTH, mesh=mc.make_mesh({"dp": 2, "tp": 2})))
    other.start()
    other.join()
    stop = threading.Event()
    idle = [threading.Thread(target=stop.wait) for _ in range(4)]
    for thread in idle:
        thread.start()
    try:
        with square() as mesh:
            try:
                mc.all_reduce(x(), "dp" if mesh.rank in (0, 3) else "tp")
            except mc.CommError as error:
                mc.barrier(BOTH, timeout=60)
                return str(error)
    finally:
        stop.set()
    return ""


def test_a_thread_that_has_ended_is_not_taken_for_another(guarded4: Any) -> None:
    begin = time.monotonic()
    assert all("wait for each other" in each for each in guarded4.run(circle_after_a_thread))
    assert time.monotonic() - begin < SOON


def sums_over_all() -> float:
    with square():
        return mc.all_reduce(torch.ones(()), BOTH).item()


def without() -> None:
    """No link has a hook, and nobody listens."""
    assert guards.current() is None
    with square() as mesh:
        link = mesh.axis("dp").link
        assert not link.hooks
        assert not link.watched


def test_off_costs_nothing(pool4: Any) -> None:
    pool4.run(without)


# ----------------------------------------------------------------------------------------------------------- turning on


def test_a_variable_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    mc.shutdown()  # whatever a test before has left
    monkeypatch.setenv("MESHCOMM_GUARD", "yes")
    with pytest.raises(mc.MeshError, match=r"meshcomm.init: MESHCOMM_GUARD='yes' is not known.\n  fix: 0 or 1"):
        mc.init(rank=0, world_size=1)
    assert not dist.is_initialized()


def test_what_is_taken_away_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that goes on takes its keys away: who looks at that moment finds nothing, and does not wait for them."""

    class Fleeting(dist.HashStore):
        """Once it has said that a key is there, the key is gone."""

        def check(self, keys: list[str]) -> bool:
            found = super().check(keys)
            for key in keys:
                self.delete_key(key)
            return found

    served, group = Fleeting(), Group(1, (0, 1), "g")
    patient = PatientStore(served, SOON)
    monkeypatch.setattr("meshcomm.runtime.hooks.guard.store._store", [patient])
    shelf, board = StoreShelf("p", 0), StoreBoard(group, 0)
    reads: list[Callable[[], object]] = [
        lambda: shelf.status(1),
        lambda: board.look(1, 3),
        lambda: board.counts(5)[1],
        lambda: _ended_afar("p/ended/1"),
    ]
    try:
        for read in reads:
            for key in ("p/status/1", "g/3/1", "g/count/1", "p/ended/1"):
                served.set(key, b"5 7" + 80 * b" ")
            begin = time.monotonic()
            read()
            assert time.monotonic() - begin < SOON / 2
    finally:
        patient.end()


SCRIPT = """
import os, sys
import meshcomm as mc, torch
rank = int(sys.argv[1])
try:
    mc.init(rank=rank, world_size=2, init_method=f"file://{sys.argv[2]}", guard=rank == 0, timeout=60)
except mc.MeshError as error:
    print(error)
"""


@pytest.mark.thorough
def test_on_in_some_processes_only(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True, env={**os.environ}
        )
        for rank in (0, 1)
    ]
    try:
        for process in processes:
            out, _ = process.communicate(timeout=280)
            assert "the guard is on in some processes only.\n  got: off on rank 1" in out
    finally:
        for process in processes:
            process.kill()
