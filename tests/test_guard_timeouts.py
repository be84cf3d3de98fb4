"""Time-outs under guard: all ranks of a call go on or none does, and a rank that stands still after it has agreed is a CommError."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_timeouts
import torch
from conftest import PoolWith
from test_timeouts import CALLS, LONG, SOON, X

import meshcomm as mc
from meshcomm.runtime.hooks.guard import meeting
from meshcomm.runtime.hooks.guard.stored import StoreRoom
from meshcomm.runtime.pending import TimedOutError
from meshcomm.runtime.transports.shared.call import Call

COLLECTIVES = {name: call for name, call in CALLS.items() if name not in ("send and recv", "exchange")}
LATE = 3
"""The rank that the others wait for."""


@pytest.fixture(params=["guarded4", "guarded4_at_the_store"], ids=["shared", "store"])
def guarded(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


class Signs:
    """What ranks tell each other by files, so that no rank waits for another one in a call."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def say(self, what: str, rank: int) -> None:
        (self.folder / f"{what} {rank}").touch()

    def wait(self, what: str) -> None:
        """For all but the late one."""
        end = time.monotonic() + LONG
        while not all((self.folder / f"{what} {rank}").exists() for rank in range(LATE)):
            assert time.monotonic() < end
            time.sleep(1e-3)


def works_on(mesh: mc.Mesh) -> None:
    """Every rank counts alike after the meeting."""
    mc.barrier("a", timeout=LONG, mesh=mesh)
    assert mc.all_reduce(torch.tensor(10.0**mesh.rank), "a", mesh=mesh).item() == 1111
    assert mc.all_gather(torch.tensor(mesh.rank), "a", mesh=mesh, async_op=True).wait().tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------------- all or none


@contextlib.contextmanager
def patched(**values: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(meeting, name, value)
        yield


def given_up_by_one(folder: str) -> list[str]:
    """Rank 0 gives up each call, before the last one makes it; who hears it does not linger for that one."""
    mesh, signs, told = mc.make_mesh({"a": 4}), Signs(folder), []
    for name, call in COLLECTIVES.items():
        if mesh.rank == LATE:
            signs.wait(name)
        with patched(_LINGER=2 * LONG), pytest.raises(mc.CommError) as caught:
            call(mesh, **({"timeout": SOON} if mesh.rank == 0 else {}))
        told.append(str(caught.value))
        signs.say(name, mesh.rank)
        works_on(mesh)
    return told


@pytest.mark.one_in(2, alike=True)
def test_one_that_gives_up_is_heard_by_all(guarded: Any, tmp_path: Path) -> None:
    first, *others = guarded.run(given_up_by_one, str(tmp_path))
    for name, text in zip(COLLECTIVES, first, strict=True):
        assert re.match(rf"meshcomm\.{name.split()[0]}: not all ranks came within 0\.0\d+ s", text), text
        assert "not there: " in text
        assert "a=3 (rank 3)" in text
    for texts in others:
        for text in texts:
            assert "not all ranks are in this call any more" in text
            assert re.search(r"has given up: not all ranks (came within 0\.0|are in this call any more)", text), text
            assert "not there: " in text
            assert "mc.barrier(axis, timeout=...)" in text


def behind_another(folder: str) -> str:
    """The call that is given up has not begun, for a work before it waits for the last rank; that work succeeds."""
    mesh, signs = mc.make_mesh({"a": 4}), Signs(folder)
    if mesh.rank == LATE:
        signs.wait("issued")
    work = mc.all_gather(torch.tensor(mesh.rank), "a", mesh=mesh, async_op=True)
    again = None
    if mesh.rank in (0, LATE):
        with pytest.raises(mc.CommError) as caught:
            mc.all_reduce(X, "a", mesh=mesh, **({"timeout": SOON} if mesh.rank == 0 else {}))
        signs.say("issued", mesh.rank)
    else:
        again = mc.all_reduce(X, "a", mesh=mesh, async_op=True)
        signs.say("issued", mesh.rank)
        with pytest.raises(mc.CommError) as caught:
            again.wait()
    assert work.wait().tolist() == [0, 1, 2, 3]
    works_on(mesh)
    return str(caught.value)


def test_one_that_gives_up_behind_a_work(guarded: Any, tmp_path: Path) -> None:
    first, *others = guarded.run(behind_another, str(tmp_path))
    assert "meshcomm.all_reduce: not begun within 0.05 s." in first
    assert "a call before it on this axis still waits for the others" in first
    for text in others:
        assert "not begun within 0.05 s" in text


def begun_before_a_barrier() -> str:
    """By one rank alone; the others are in the barrier already."""
    mesh = mc.make_mesh({"a": 4})
    mc.all_reduce(X, "a", mesh=mesh)
    work = mc.all_reduce(X, "a", mesh=mesh, async_op=True) if mesh.rank == 0 else None
    works_on(mesh)
    if work is None:
        return ""
    with pytest.raises(mc.CommError) as caught:
        work.wait()
    return str(caught.value)


def test_a_work_begun_before_a_barrier_is_over(guarded: Any) -> None:
    text, *nothing = guarded.run(begun_before_a_barrier)
    assert nothing == ["", "", ""]
    assert "the ranks have met in a barrier since" in text


def at_the_same_time(rounds: int) -> list[bool]:
    """Ranks come, and give up, at about the same time; whether each call has succeeded."""
    mesh, chance, found = mc.make_mesh({"a": 4}), random.Random(3), []
    names = [*COLLECTIVES]
    for _ in range(rounds):
        name = chance.choice(names)
        late = [chance.uniform(0, 2 * SOON) for _ in range(4)]
        limit = [chance.choice([None, SOON, SOON / 2, LONG]) for _ in range(4)]
        time.sleep(late[mesh.rank])
        try:
            COLLECTIVES[name](mesh, **({} if limit[mesh.rank] is None else {"timeout": limit[mesh.rank]}))
            found.append(True)
        except mc.CommError:
            found.append(False)
        mc.barrier("a", timeout=LONG, mesh=mesh)
    works_on(mesh)
    return found


@pytest.mark.thorough
def test_all_or_none_whenever_they_come(guarded: Any) -> None:
    first, *others = guarded.run(at_the_same_time, 25)
    assert others == [first] * 3


def long_enough() -> None:
    """Time-outs that differ between ranks, some with none, change nothing."""
    mesh = mc.make_mesh({"a": 4})
    for name, call in COLLECTIVES.items():
        limit = {} if mesh.rank == 2 else {"timeout": LONG * (1 + mesh.rank)}
        assert repr(call(mesh, **limit)) == repr(call(mesh)), name
    x = torch.full((4,), float(mesh.rank + 1), requires_grad=True)
    y = mc.reduce_scatter(x * x, "a", mesh=mesh, **({"timeout": LONG} if mesh.rank else {}))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2 * (mesh.rank + 1)] * 4


def test_time_outs_that_are_long_enough(guarded: Any) -> None:
    guarded.run(long_enough)
    assert guarded.run(test_timeouts.gradients) == [[2 * (rank + 1) * 4 * i for i in range(4)] for rank in range(4)]


def waited_twice(folder: str) -> str:
    """The time-out of a wait gives nothing up: the same work can be waited for again, and all ranks get its result."""
    mesh, signs, told = mc.make_mesh({"a": 4}), Signs(folder), ""
    if mesh.rank == LATE:
        signs.wait("waited")
    work = mc.all_reduce({"w": X, "n": torch.tensor(mesh.rank)}, "a", mesh=mesh, async_op=True)
    if mesh.rank == 0:
        with pytest.raises(mc.CommError) as caught:
            work.wait(timeout=SOON)
        told = str(caught.value)
    signs.say("waited", mesh.rank)
    found = work.wait()
    assert torch.equal(found["w"], 4 * X)
    assert found["n"].item() == 6
    assert mc.all_reduce(torch.ones(1), "a", mesh=mesh).item() == 4
    return told


def test_the_wait_of_a_work_loses_nothing(guarded: Any, tmp_path: Path) -> None:
    told, *nothing = guarded.run(waited_twice, str(tmp_path))
    assert nothing == [""] * 3
    assert "wait again, nothing is lost" in told


def went_on_meanwhile(what: str) -> None:
    """A wait with a time-out is no deadlock: rank 0 does then what rank 1 waits for."""
    mesh = mc.make_mesh({"a": 4})
    if what == "a collective":
        begin = partial(mc.all_reduce, torch.ones(1), "a", mesh=mesh, async_op=True)
    elif mesh.rank == 0:
        begin = partial(mc.recv, "a", 1, shape=(1,), dtype=torch.float32, tag=1, mesh=mesh, async_op=True)
    else:
        begin = partial(mc.send, torch.full((1,), 4.0), "a", 0, tag=1, mesh=mesh, async_op=True)
    if mesh.rank == 0:
        work = begin()
        with pytest.raises(mc.CommError, match="wait again, nothing is lost"):
            work.wait(timeout=1.0)
        mc.send(X, "a", 1, mesh=mesh)
        assert work.wait().item() == 4
    elif mesh.rank == 1:
        assert torch.equal(mc.recv("a", 0, shape=(8,), dtype=X.dtype, mesh=mesh), X)
        begin().wait()
    elif what == "a collective":
        begin().wait()
    works_on(mesh)


@pytest.mark.parametrize("what", ["a collective", "a message"])
def test_a_wait_with_a_time_out_is_no_deadlock(guarded: Any, what: str) -> None:
    guarded.run(went_on_meanwhile, what)


def barrier_in_time(folder: str) -> str:
    """A barrier's time-out, over before the last rank comes: all are told the same."""
    mesh, signs = mc.make_mesh({"a": 4}), Signs(folder)
    if mesh.rank == LATE:
        signs.wait("barrier")
    with pytest.raises(mc.CommError) as caught:
        mc.barrier("a", timeout=LONG if mesh.rank else SOON, mesh=mesh)
    signs.say("barrier", mesh.rank)
    works_on(mesh)
    return str(caught.value)


def test_a_barrier_too(guarded: Any, tmp_path: Path) -> None:
    for text in guarded.run(barrier_in_time, str(tmp_path)):
        assert "not everybody came within 0.05 s" in text
        assert "absent: " in text


# ---------------------------------------------------------------------------- stopped in its call, or when all agree


def later(mesh: mc.Mesh) -> None:
    mc.all_reduce(X, "a", mesh=mesh, async_op=True).wait()


def behind(mesh: mc.Mesh) -> None:
    work = mc.all_gather(X, "a", mesh=mesh, async_op=True)
    try:
        mc.all_reduce(X, "a", mesh=mesh)
    finally:
        with contextlib.suppress(mc.CommError):
            work.wait()


def sums_of_a_tree(mesh: mc.Mesh) -> None:
    leaves = {"w": torch.ones(3, requires_grad=True), "b": torch.ones(5, requires_grad=True)}
    varied = mc.pvary(leaves, "a", mesh=mesh)
    (varied["w"].sum() + varied["b"].sum()).backward()


def backward_of_a_work(mesh: mc.Mesh) -> None:
    x = torch.ones(4, requires_grad=True)
    mc.all_gather(x, "a", mesh=mesh, async_op=True).wait().sum().backward()


STILL: dict[str, tuple[Callable[[mc.Mesh], None], int]] = {
    "wait": (later, 0),
    "behind a work": (behind, 1),
    "backward of a tree": (sums_of_a_tree, 0),
    "backward of a work": (backward_of_a_work, 1),
}
"""What the ranks do, and how many calls go well before."""


@contextlib.contextmanager
def still_after(calls: int, signs: Signs) -> Iterator[None]:
    """This rank agrees to the call after so many, and does nothing until the others are through: on shared memory it
    agrees by the entry of the call itself.
    """
    left = [calls]

    def then_stands(step: Callable[..., Any]) -> Callable[..., Any]:
        def steps(*args: Any, **kwargs: Any) -> Any:
            found = step(*args, **kwargs)
            left[0] -= 1
            if left[0] == -1:
                signs.wait("told")
            return found

        return steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "post", then_stands(Call.post))
        patch.setattr(StoreRoom, "meet", then_stands(StoreRoom.meet))
        yield


def stands_still(what: str, folder: str, more: int = 0) -> str:
    """The last rank stands still between the agreement and its part."""
    act, before = STILL[what]
    mesh, signs, told = mc.make_mesh({"a": 4}, timeout=4), Signs(folder), ""
    mc.barrier("a", mesh=mesh, timeout=LONG)  # however late one of them begins
    mc.all_reduce(X, "a", mesh=mesh)
    with still_after(before + more, signs) if mesh.rank == LATE else contextlib.nullcontext():
        try:
            act(mesh)
        except (mc.CommError, TimedOutError) as error:
            told = f"{type(error).__name__} {error}"
    signs.say("told", mesh.rank)
    return told


@pytest.mark.parametrize("what", STILL)
def test_a_rank_that_stands_still_in_its_last_call_keeps_nobody(guarded4: Any, tmp_path: Path, what: str) -> None:
    more = 1 if what == "backward of a tree" else 0
    assert guarded4.run(stands_still, what, str(tmp_path), more) == [""] * 4


@pytest.mark.parametrize(
    "what", [what if what == "wait" else pytest.param(what, marks=pytest.mark.thorough) for what in STILL]
)
def test_a_rank_that_stands_still_when_all_have_agreed(tmp_path: Path, what: str) -> None:
    # A pool of its own, for gloo has closed its pairs afterwards.
    with PoolWith(4, MESHCOMM_GUARD="1", MESHCOMM_SHARED_MEMORY="0") as pool:
        for text in pool.run(stands_still, what, str(tmp_path))[:LATE]:
            assert text.startswith("CommError meshcomm."), text
            assert "\n  fix: " in text
            assert "over axis 'a'" in text or "over 'a'" in text, text


# ------------------------------------------------------------------------------------------------ on shared memory alone


class BrokenOffError(Exception):
    """Of a handler of a signal."""


def broken_off(when_all_are_there: bool, folder: str) -> str:
    """In the last rank a signal's handler raises between the entry of its call and the wait for the others."""
    mesh, signs, told, post = mc.make_mesh({"a": 4}), Signs(folder), "", Call.post
    mc.all_reduce(X, "a", mesh=mesh)

    def raises(call: Call) -> None:
        post(call)
        while when_all_are_there and call.missing:
            call.look()
            time.sleep(1e-3)
        raise BrokenOffError

    if mesh.rank == LATE:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Call, "post", raises)
            with pytest.raises(BrokenOffError):
                mc.all_reduce(X, "a", mesh=mesh)
        signs.say("broken", LATE)
    else:
        while not when_all_are_there and not (signs.folder / f"broken {LATE}").exists():
            time.sleep(1e-3)
        try:
            assert torch.equal(mc.all_reduce(X, "a", mesh=mesh), 4 * X)
        except mc.CommError as error:
            told = str(error)
    works_on(mesh)
    return told


@pytest.mark.parametrize("when_all_are_there", [False, True])
def test_who_is_interrupted_before_it_waits(guarded4: Any, tmp_path: Path, when_all_are_there: bool) -> None:
    for text in guarded4.run(broken_off, when_all_are_there, str(tmp_path))[:LATE]:
        assert ("it was interrupted by BrokenOffError" in text) is not when_all_are_there, text


def far_ahead(folder: str) -> list[int]:
    """All but the last rank issue works on and on before it comes: as many as a mailbox holds in half of itself."""
    mesh, signs, count = mc.make_mesh({"a": 4}), Signs(folder), 2100
    if mesh.rank == LATE:
        signs.wait("issued")
    works = [mc.all_reduce(torch.tensor(i), "a", mesh=mesh, async_op=True) for i in range(count)]
    signs.say("issued", mesh.rank)
    found = [int(work.wait()) for work in works]
    works_on(mesh)
    return [i for i, value in enumerate(found) if value != 4 * i]


@pytest.mark.thorough
def test_works_that_are_issued_far_ahead(guarded4: Any, tmp_path: Path) -> None:
    assert guarded4.run(far_ahead, str(tmp_path)) == [[]] * 4
