"""A receive that was given up: the message, when it comes, is taken, so that its sender goes on; it is for who asks next."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc
from meshcomm.runtime.transports.gloo.envelopes import ROOM
from meshcomm.runtime.transports.shared.messages.letters import letters_of

Run = Callable[..., list[Any]]
SOON, LONG = 0.02, 60.0
SHORT, WIDE = 3, ROOM
"""Elements of a message that goes in its letter or envelope, and of one that does not."""
F32 = torch.float32
WAYS = ("in time", "work", "followed", "exchange", "waited for twice")
"""How it is given up."""


@pytest.fixture(params=["in-process", "pool4", "gloo4"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "in-process":
        return lambda fn, *args: mc.launch(fn, ranks=2, args=args)
    return request.getfixturevalue(request.param).run  # type: ignore[no-any-return]


def pair() -> mc.Mesh | None:
    """Of the first two ranks."""
    mesh = mc.make_mesh({"a": 2}, ranks=[0, 1])
    return mesh if mc.rank() < 2 else None


def told(fn: Callable[[], Any]) -> str:
    with pytest.raises(mc.CommError) as caught:
        fn()
    return str(caught.value)


def recv(mesh: mc.Mesh, length: int, dtype: torch.dtype = F32, **how: Any) -> Any:
    return mc.recv("a", 1, shape=(length,), dtype=dtype, mesh=mesh, **{"timeout": LONG, **how})


def values(x: Tensor) -> float:
    [value] = x.unique().tolist()
    return float(value)


def give_up(mesh: mc.Mesh, way: str, length: int, tag: int = 0) -> None:
    """Ask rank 1, which does not come."""
    if way == "in time":
        assert "did not come" in told(lambda: recv(mesh, length, tag=tag, timeout=SOON))
    elif way == "exchange":
        asked = [(1, (length,), F32, tag), (1, (), torch.int64, 99)]
        assert "did not come" in told(lambda: mc.exchange([], asked, "a", mesh=mesh, timeout=SOON))
    else:
        work = mc.recv("a", 1, shape=(length,), dtype=F32, tag=tag, mesh=mesh, async_op=True)
        if way == "followed":
            work = work.then(torch.neg)
        assert "not done" in told(lambda: work.wait(SOON))
        if way == "waited for twice":
            assert "not done" in told(lambda: work.wait(SOON))
        del work
        gc.collect()


def send(mesh: mc.Mesh, length: int, *sent: float, dtype: torch.dtype = F32, tag: int = 0) -> None:
    for value in sent:
        mc.send(torch.full((length,), value, dtype=dtype), "a", 0, tag, mesh=mesh, timeout=LONG)


def meet(mesh: mc.Mesh, early: bool) -> None:
    """Before the receiver asks again, if its message is to be here before that."""
    if early:
        mc.barrier("a", mesh=mesh)


# ------------------------------------------------------------------------------------------------------ who asks next


def next_one(way: str, length: int, early: bool) -> list[float]:
    mesh = pair()
    if mesh is None:
        return []
    if mesh.rank == 1:
        mc.barrier("a", mesh=mesh)
        send(mesh, length, 1.0)
        meet(mesh, early)  # the sender has gone on
        send(mesh, length, 2.0, 3.0)
        return []
    give_up(mesh, way, length)
    mc.barrier("a", mesh=mesh)
    meet(mesh, early)
    return [values(recv(mesh, length)) for _ in range(3)]


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("length", [SHORT, WIDE])
@pytest.mark.parametrize("way", WAYS)
def test_the_next_receive_gets_it(run: Run, way: str, length: int, early: bool) -> None:
    assert run(next_one, way, length, early)[0] == [1.0, 2.0, 3.0]


def of_other_kinds(length: int, early: bool) -> list[Any]:
    """Whatever it was that was given up: what counts is what comes, and what is expected then."""
    mesh = pair()
    if mesh is None:
        return []
    found: list[Any] = []
    for longer, dtype in ((1, F32), (0, torch.float64), (WIDE, torch.bool), (0, torch.complex64)):
        if mesh.rank == 1:
            mc.barrier("a", mesh=mesh)
            send(mesh, length + longer, 1.0, dtype=dtype)
            meet(mesh, early)
        else:
            give_up(mesh, "in time", length)
            mc.barrier("a", mesh=mesh)
            meet(mesh, early)
            found.append(bool((recv(mesh, length + longer, dtype) == 1).all()))
    return found


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("length", [SHORT, WIDE])
def test_of_another_shape_or_dtype(run: Run, length: int, early: bool) -> None:
    assert run(of_other_kinds, length, early)[0] == [True] * 4


def of_another_kind_that_has_come(length: int, longer: int) -> float:
    """It came while the Work was there still, and nobody was told that it does not fit."""
    mesh = pair()
    if mesh is None:
        return 0.0
    if mesh.rank == 1:
        mc.barrier("a", mesh=mesh)
        send(mesh, length + longer, 1.0)
        send(mesh, SHORT, 2.0, tag=5)
        return 0.0
    works = [mc.recv("a", 1, shape=(length,), dtype=F32, mesh=mesh, async_op=True)]
    assert "not done" in told(lambda: works[0].wait(SOON))
    mc.barrier("a", mesh=mesh)
    assert values(recv(mesh, SHORT, tag=5)) == 2.0  # who looks for this one sees the other one
    works.clear()
    gc.collect()
    return values(recv(mesh, length + longer))


@pytest.mark.parametrize("longer", [1, WIDE])
@pytest.mark.parametrize("length", [SHORT, WIDE])
def test_of_another_shape_that_has_come(pool4: Any, length: int, longer: int) -> None:
    assert pool4.run(of_another_kind_that_has_come, length, longer)[0] == 1.0


def that_does_not_fit(length: int, early: bool) -> list[Any]:
    mesh = pair()
    if mesh is None:
        return []
    if mesh.rank == 1:
        mc.barrier("a", mesh=mesh)
        if early or not mesh.in_process:
            send(mesh, length, 1.0)
        else:  # there the sender is told as well
            assert "does not fit" in told(lambda: send(mesh, length, 1.0))
        meet(mesh, early)
        send(mesh, length, 2.0)
        return []
    give_up(mesh, "in time", length)
    mc.barrier("a", mesh=mesh)
    meet(mesh, early)
    return [told(lambda: recv(mesh, length + 1)), values(recv(mesh, length))]


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("length", [SHORT, WIDE])
def test_one_that_does_not_fit_is_told_to_who_asks_next(run: Run, length: int, early: bool) -> None:
    said, second = run(that_does_not_fit, length, early)[0]
    assert "does not fit" in said
    assert f"f32[{length}]" in said
    assert f"f32[{length + 1}]" in said
    assert second == 2.0


def in_order(way: str, length: int, early: bool) -> list[float]:
    mesh = pair()
    if mesh is None:
        return []
    if mesh.rank == 1:
        mc.barrier("a", mesh=mesh)
        first = [1.0] if way == "in time" else [1.0, 2.0]  # the second in time has taken the place of the first
        send(mesh, length, *first)
        meet(mesh, early)
        send(mesh, length, *[value for value in (2.0, 3.0, 4.0) if value not in first])
        return []
    if way != "in time":
        works = [mc.recv("a", 1, shape=(length,), dtype=F32, mesh=mesh, async_op=True) for _ in range(2)]
        for work in works:
            told(lambda work=work: work.wait(SOON))  # type: ignore[misc]
        mc.barrier("a", mesh=mesh)
        meet(mesh, early)
        if way == "works, the last first":
            works.reverse()
        while works:
            del works[0], work
            gc.collect()
            work = None  # type: ignore[assignment]
    else:
        give_up(mesh, way, length)
        give_up(mesh, way, length)
        mc.barrier("a", mesh=mesh)
        meet(mesh, early)
    return [values(recv(mesh, length)) for _ in range(4)]


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("length", [SHORT, WIDE])
@pytest.mark.parametrize("way", ["in time", "works", "works, the last first"])
def test_of_several_the_first_one_comes_first(run: Run, way: str, length: int, early: bool) -> None:
    assert run(in_order, way, length, early)[0] == [1.0, 2.0, 3.0, 4.0]


def all_others(length: int) -> list[float]:
    """Of another tag, along another axis, and of a Work that is waited for again."""
    mesh = pair()
    other = mc.make_mesh({"b": 2}, ranks=[0, 1])
    if mesh is None:
        return []
    if mesh.rank == 1:
        mc.barrier("a", mesh=mesh)
        send(mesh, length, 5.0, tag=5)
        mc.send(torch.full((length,), 6.0), "b", 0, mesh=other)
        send(mesh, length, 1.0, 2.0, 3.0)
        return []
    held = mc.recv("a", 1, shape=(length,), dtype=F32, mesh=mesh, async_op=True)
    assert "not done" in told(lambda: held.wait(SOON))
    give_up(mesh, "in time", length)
    mc.barrier("a", mesh=mesh)
    tagged, along = recv(mesh, length, tag=5), mc.recv("b", 1, shape=(length,), dtype=F32, mesh=other)
    second, third = recv(mesh, length), recv(mesh, length)
    return [values(x) for x in (tagged, along, second, third, held.wait(LONG))]


@pytest.mark.parametrize("length", [SHORT, WIDE])
def test_all_others_get_their_own(run: Run, length: int) -> None:
    assert run(all_others, length)[0] == [5.0, 6.0, 2.0, 3.0, 1.0]


def by_other_calls(length: int) -> list[float]:
    """It is taken by an exchange, by a Work, by one in time; and given up once more."""
    mesh = pair()
    if mesh is None:
        return []
    if mesh.rank == 1:
        for _ in range(3):
            mc.barrier("a", mesh=mesh)
            send(mesh, length, 1.0, 2.0)
        return []
    found = []
    for turn in range(3):
        give_up(mesh, "in time", length)
        give_up(mesh, "work", length)
        mc.barrier("a", mesh=mesh)
        if turn == 0:
            found += mc.exchange([], [(1, (length,), F32)] * 2, "a", mesh=mesh)
        elif turn == 1:
            works = [mc.recv("a", 1, shape=(length,), dtype=F32, mesh=mesh, async_op=True) for _ in range(2)]
            found += mc.wait(works)
        else:
            found += mc.exchange([], [(1, (length,), F32)] * 2, "a", mesh=mesh, timeout=LONG)
    return [values(x) for x in found]


@pytest.mark.parametrize("length", [SHORT, WIDE])
def test_any_call_takes_it(run: Run, length: int) -> None:
    assert run(by_other_calls, length)[0] == [1.0, 2.0] * 3


def what_has_come(length: int) -> list[float]:
    """Of an exchange that is given up some has come, which is for who asks next, too; what it has sent is sent."""
    mesh = pair()
    if mesh is None:
        return []
    if mesh.rank == 1:
        send(mesh, length, 1.0)
        got = mc.recv("a", 0, shape=(length,), dtype=F32, mesh=mesh)
        mc.barrier("a", mesh=mesh)
        send(mesh, length, 3.0, tag=3)
        send(mesh, length, 2.0)
        return [values(got)]
    asked: list[Any] = [(1, (length,), F32), (1, (length,), F32, 3)]
    told(lambda: mc.exchange([(torch.full((length,), 9.0), 1)], asked, "a", mesh=mesh, timeout=0.3))
    mc.barrier("a", mesh=mesh)
    return [values(recv(mesh, length, tag=tag)) for tag in (0, 3, 0)]


@pytest.mark.parametrize("length", [SHORT, WIDE])
def test_what_has_come_of_an_exchange(run: Run, length: int) -> None:
    assert run(what_has_come, length)[:2] == [[1.0, 3.0, 2.0], [9.0]]


def one_that_nobody_asks_for(length: int) -> bool:
    """What is kept is asked for by nobody: all else goes on, and the mesh can be left."""
    mesh = pair()
    if mesh is None:
        return True
    if mesh.rank == 1:
        mc.barrier("a", mesh=mesh)
        send(mesh, length, 1.0)
    else:
        give_up(mesh, "in time", length)
        mc.barrier("a", mesh=mesh)
    mc.barrier("a", mesh=mesh)
    return mc.all_reduce(torch.ones(2), "a", mesh=mesh).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("length", [SHORT, WIDE])
def test_one_that_nobody_asks_for(run: Run, length: int) -> None:
    assert all(run(one_that_nobody_asks_for, length))


def let_go_while_it_looks() -> list[float]:
    """Garbage is collected, and with it the Work, by who looks for messages just then."""
    mesh = pair()
    if mesh is None:
        return []
    if mesh.rank == 1:
        mc.barrier("a", mesh=mesh)
        send(mesh, SHORT, 1.0, 2.0)
        return []
    letters = letters_of(mesh.axis("a").link.mail)
    letters.some_left = False
    works = [mc.recv("a", 1, shape=(SHORT,), dtype=F32, mesh=mesh, async_op=True)]
    assert "not done" in told(lambda: works[0].wait(SOON))
    with letters.receiving:
        works.clear()
        gc.collect()
    while not letters.some_left:
        time.sleep(1e-3)
    mc.barrier("a", mesh=mesh)
    return [values(recv(mesh, SHORT)) for _ in range(2)]


def test_a_work_that_is_let_go_of_at_any_time(pool4: Any) -> None:
    assert pool4.run(let_go_while_it_looks)[0] == [1.0, 2.0]


# --------------------------------------------------------------------------------------------------------- under guard


def dropped_under_guard(way: str, length: int, early: bool) -> list[float]:
    return next_one(way, length, early)


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("way", ["work", "followed"])
@pytest.mark.parametrize("pool", ["guarded4", "guarded4_at_the_store"])
def test_a_dropped_work_under_guard(request: pytest.FixtureRequest, pool: str, way: str, early: bool) -> None:
    assert request.getfixturevalue(pool).run(dropped_under_guard, way, SHORT, early)[0] == [1.0, 2.0, 3.0]


def told_under_guard(early: bool) -> list[Any]:
    """Who asks for something else next is told, or the sender is; then they meet again."""
    mesh = pair()
    if mesh is None:
        return []
    if mesh.rank == 1:
        mc.barrier("a", mesh=mesh)
        if early:
            send(mesh, SHORT, 1.0)
        else:
            mc.barrier("a", mesh=mesh)
            assert "has given up" in told(lambda: send(mesh, SHORT, 1.0))
        meet(mesh, early)
        send(mesh, SHORT + 1, 2.0)
        return []
    give_up(mesh, "work", SHORT)
    mc.barrier("a", mesh=mesh)
    if early:
        meet(mesh, early)
        return [told(lambda: recv(mesh, SHORT + 1)), values(recv(mesh, SHORT + 1))]
    work = mc.recv("a", 1, shape=(SHORT + 1,), dtype=F32, mesh=mesh, async_op=True)
    mc.barrier("a", mesh=mesh)
    return ["", values(work.wait())]


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
def test_what_does_not_fit_under_guard(guarded4: Any, early: bool) -> None:
    said, second = guarded4.run(told_under_guard, early)[0]
    assert ("does not fit: index 1 sends f32[3], index 0 expects f32[4]" in said) is early
    assert second == 2.0


# ------------------------------------------------------------------------------------------- when a mesh's time is up


def long_after(way: str, length: int) -> list[float]:
    """To gloo a wait that runs out of time is the end of the group."""
    if mc.rank() > 1:
        return []
    mesh, work = mc.make_mesh({"a": 2}, ranks=[0, 1], timeout=0.5), None
    mc.barrier("a", mesh=mesh, timeout=LONG)
    if mesh.rank == 0 and way.startswith("kept"):
        work = mc.recv("a", 1, shape=(length,), dtype=F32, mesh=mesh, async_op=True)
        assert not work.done()
        if way == "kept, waited for":
            assert "not done" in told(work.wait)  # and it may be waited for again
    elif mesh.rank == 0:
        give_up(mesh, way, length)
    time.sleep(0.7)
    mc.barrier("a", mesh=mesh, timeout=LONG)
    if mesh.rank == 1:
        send(mesh, length, 1.0)
        return []
    return [values(recv(mesh, length) if work is None else work.wait(LONG)), mc.axis_size("a", mesh=mesh)]


@pytest.mark.parametrize(
    ("way", "length"),
    [
        ("in time", SHORT), ("kept, waited for", WIDE),
        *(pytest.param(way, length, marks=pytest.mark.thorough) for way, length in (
            ("in time", WIDE), ("followed", SHORT), ("followed", WIDE), ("kept", SHORT), ("kept", WIDE),
            ("kept, waited for", SHORT),
        )),
    ],
)  # fmt: skip
def test_the_group_goes_on(gloo4: Any, way: str, length: int) -> None:
    assert gloo4.run(long_after, way, length)[0] == [1.0, 2]
