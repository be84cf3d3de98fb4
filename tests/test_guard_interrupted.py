"""Under guard, whatever happens to a rank at one moment: all get the right result or all an error, soon."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_timeouts import LONG

import meshcomm as mc
from meshcomm.runtime.health import attendance
from meshcomm.runtime.hooks.guard import boards
from meshcomm.runtime.hooks.guard.batches import Together
from meshcomm.runtime.hooks.guard.guard import Guard, current
from meshcomm.runtime.hooks.guard.link import Room
from meshcomm.runtime.hooks.guard.mail import MailRoom, _Watch
from meshcomm.runtime.hooks.guard.meeting import Meeting
from meshcomm.runtime.hooks.stack import Running
from meshcomm.runtime.transports.shared.call import Call

MANY = 2**18
"""Elements that do not lie in a small segment."""


class Alarm(Exception):  # noqa: N818
    """What a handler of a signal raises."""


class Signs:
    """What ranks tell each other by files."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def say(self, what: str) -> None:
        (self.folder / what).touch()

    def wait(self, *whats: str) -> None:
        end = time.monotonic() + LONG
        while not all((self.folder / what).exists() for what in whats):
            assert time.monotonic() < end, whats
            time.sleep(1e-3)


def works_on(mesh: mc.Mesh) -> None:
    mc.barrier("a", timeout=LONG, mesh=mesh)
    assert mc.all_reduce(torch.tensor(10.0**mesh.rank), "a", mesh=mesh).item() == 1111


def result_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What it gives, or the first words of its error."""
    try:
        return fn(*args, **kwargs).tolist()
    except (mc.CommError, Alarm) as error:
        return f"{type(error).__name__} {error}"


def once(step: Callable[..., Any], *, before: bool = False, when: Callable[..., bool] = lambda *_: True) -> Any:
    """``step``, in which an alarm goes off the first time that it is called so."""
    left = [True]

    def steps(*args: Any, **kwargs: Any) -> Any:
        rings = left[0] and when(*args)
        if rings:
            left[0] = False
            if before:
                raise Alarm
        found = step(*args, **kwargs)
        if rings:
            raise Alarm
        return found

    return steps


def leaves(self: Meeting, state: int, *_: object) -> bool:
    return state == boards.LEAVING


def gives_up(self: Meeting, state: int, *_: object) -> bool:
    return state in (boards.GAVE_UP, boards.EXPIRED)


def stays(self: Meeting, state: int, *_: object) -> bool:
    return state == boards.MADE


MOMENTS: dict[str, tuple[type, str, Any]] = {
    "before it says that it leaves": (_Watch, "write", {"before": True, "when": leaves}),
    "when it has said that it leaves": (_Watch, "write", {"when": leaves}),
    "while it looks again": (_Watch, "all_came", {}),
    "while it looks for the reason": (_Watch, "is_behind", {}),
    "before it says that it gives up": (_Watch, "write", {"before": True, "when": gives_up}),
    "when it has said that it gives up": (_Watch, "write", {"when": gives_up}),
    "before it is put down": (_Watch, "over", {"before": True}),
}


def alarmed(folder: str, asynchronous: bool) -> list[tuple[str, list[Any]]]:
    """Rank 0 gives up a call before the last one has made it, and an alarm goes off at this moment of it."""
    mesh, x, found = mc.make_mesh({"a": 4}), torch.ones(3), []
    for k, (kind, name, how) in enumerate(MOMENTS.values()):
        signs = Signs(folder)
        works_on(mesh)
        if mesh.rank == 3:
            signs.wait(f"alarmed {k}")
        if mesh.rank:
            got = [result_of(mc.all_reduce, x, "a", mesh=mesh)]
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kind, name, once(getattr(kind, name), **how))
                if asynchronous:
                    work = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
                    source: Any = work._source
                    with pytest.raises(Alarm):
                        source.withdraw(0.1)
                    signs.say(f"alarmed {k}")
                    got = [result_of(work.wait)]
                else:
                    got = [result_of(mc.all_reduce, x, "a", mesh=mesh, timeout=0.2)]
                    signs.say(f"alarmed {k}")
        found.append(got[0])
        works_on(mesh)
    return found


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waits", "work"])
def test_an_alarm_while_a_rank_gives_up(guarded4: Any, tmp_path: Path, asynchronous: bool) -> None:
    start = time.monotonic()
    results = guarded4.run(alarmed, str(tmp_path), asynchronous)
    assert time.monotonic() - start < LONG
    for moment, first, *others in zip(MOMENTS, *results, strict=True):
        assert others[0] == others[1] == others[2] or all("CommError" in each for each in others), (moment, others)
        if first == 3 * [4.0]:
            assert others[0] == 3 * [4.0], moment
        elif "CommError" in first:
            assert "CommError" in others[0], (moment, others)
        else:
            assert "Alarm" in first, (moment, first)
            assert not asynchronous


def store_lost(folder: str) -> Any:
    """Rank 0 cannot ask why the last one does not come."""
    mesh, signs, x = mc.make_mesh({"a": 4}), Signs(folder), torch.ones(MANY)
    mc.all_reduce(x, "a", mesh=mesh)

    def lost(*_: object, **__: object) -> str:
        raise mc.CommError("the store does not answer")

    if mesh.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Guard, "why_never", lost)
            got = result_of(mc.all_gather, x, "a", mesh=mesh)
        work = mc.all_gather(100 * x, "a", mesh=mesh, async_op=True)  # what it gave may be written over now
        signs.say("lost")
        signs.wait("over 1", "over 2", "over 3")
        work._claimed = True
    else:
        if mesh.rank == 3:
            signs.wait("lost")
        got = result_of(mc.all_gather, x, "a", mesh=mesh)
        signs.say(f"over {mesh.rank}")
    return got if isinstance(got, str) else sorted(set(got))


def test_a_rank_that_cannot_ask_for_the_others(guarded4: Any, tmp_path: Path) -> None:
    for got in guarded4.run(store_lost, str(tmp_path)):
        assert "CommError" in got


def interrupted_between(folder: str, name: str) -> list[float]:
    """Rank 1 is interrupted when its entry is there, in a call in which nothing is lent to it by some; then it is slow
    to read what they have lent to it.
    """
    mesh = mc.make_mesh({"a": 4})
    with pytest.MonkeyPatch.context() as patch:  # the short way of most calls has no places to hold it up at
        patch.setattr(mesh.axis("a").link, "_at_once", lambda *_: None)
        return held_up_between(mesh, Signs(folder), name)


def held_up_between(mesh: mc.Mesh, signs: Signs, name: str) -> list[float]:
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "reduce": lambda x: mc.reduce(x, "a", dst=0, mesh=mesh),
        "gather": lambda x: mc.gather(x, "a", dst=0, mesh=mesh),
        "broadcast": lambda x: mc.broadcast(x, "a", src=0, mesh=mesh),
        "shift": lambda x: mc.shift(x, "a", wrap=True, mesh=mesh),
    }
    mc.barrier("a", mesh=mesh)
    enter, post = Call._enter, Call.post

    def enters(self: Call) -> None:
        enter(self)
        while not self.look():  # under guard the others get an error as long as they have not come
            time.sleep(1e-3)
        raise Alarm

    if mesh.rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Call, "_enter", enters)
            with pytest.raises(Alarm):
                calls[name](torch.ones(MANY))
        signs.wait(*(f"posted {i}" for i in (0, 2, 3)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Call, "post", lambda call: (post(call), signs.wait("again 0", "again 2", "again 3")))
            y = mc.all_gather(torch.ones(MANY), "a", mesh=mesh)
    else:
        calls[name](torch.ones(MANY))
        time.sleep(0.3)  # all but rank 1 have returned what was lent

        def posted(call: Call) -> None:
            post(call)
            signs.say(f"posted {mesh.rank}")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Call, "post", posted)
            y = mc.all_gather(torch.ones(MANY), "a", mesh=mesh)
    work = mc.all_gather(torch.full((MANY,), 100.0), "a", mesh=mesh, async_op=True)
    signs.say(f"again {mesh.rank}")
    work.wait()
    return sorted(set(y.tolist()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["reduce", "gather", "broadcast", "shift"])
@pytest.mark.parametrize("pool", ["guarded4", "pool4"], ids=["guard", "none"])
def test_what_was_not_lent_is_not_returned(
    request: pytest.FixtureRequest, pool: str, name: str, tmp_path: Path
) -> None:
    for got in request.getfixturevalue(pool).run(interrupted_between, str(tmp_path), name):
        assert got == [1.0]


def on_another_device() -> list[str]:
    """Rank 0 computes on the host, and the others say that they do not."""
    mesh, found = mc.make_mesh({"a": 4}), []
    x, key = torch.ones(4), Running.key.fget  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank:
            there = property(lambda self: tuple("cuda" if each == "cpu" else each for each in key(self)))
            patch.setattr(Running, "key", there)
        for call in (mc.all_reduce, mc.all_gather, mc.broadcast):
            with pytest.raises(mc.CommError) as caught:
                call(x, "a", mesh=mesh)  # type: ignore[operator]
            found.append(str(caught.value))
    works_on(mesh)
    return found


def test_ranks_on_several_kinds_of_device(guarded4: Any) -> None:
    for text in [text for texts in guarded4.run(on_another_device) for text in texts]:
        assert "the ranks made different calls" in text, text


class NotOfTheHost:
    """What a tensor of another device says to the guard."""

    is_cpu = False

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __getattr__(self, name: str) -> Any:
        return getattr(self.x, name)


def interrupted_before(step: str) -> list[Any]:
    """Rank 0 is interrupted before the entry that goes before a call on a device."""
    mesh = mc.make_mesh({"a": 4})
    works_on(mesh)
    kind, found, like = type(mesh.axis("a").link), [], Running.like.fget  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Running, "like", property(lambda what: NotOfTheHost(like(what))))
        if mesh.rank == 0:
            where: tuple[type, str] = (kind, "meet") if step == "meet" else (Call, "_lend")
            patch.setattr(*where, once(getattr(*where), before=True))
        for k in range(4):
            found.append(result_of(mc.all_reduce, torch.tensor(float(k)), "a", mesh=mesh))
    works_on(mesh)
    return found


@pytest.mark.parametrize("step", ["meet", "lend"])
def test_who_is_interrupted_before_it_says_what_it_calls_refuses_it_once(guarded4: Any, step: str) -> None:
    first, *others = guarded4.run(interrupted_before, step)
    assert first == ["Alarm ", 4.0, 8.0, 12.0]
    for told, *rest in others:
        assert "has raised: Alarm" in told, told
        assert rest == [4.0, 8.0, 12.0]


def test_a_call_that_another_thread_ends_while_its_rank_meets_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    watches, ended = [object.__new__(_Watch), None], []

    class Ends:
        watch = property(lambda _: watches.pop(0))

        def look(self) -> bool:
            return False

    room: Any = object.__new__(MailRoom)
    room.others, room.mail = (), SimpleNamespace(open={1: Ends()}, lock=threading.Lock(), number=0)
    monkeypatch.setattr(_Watch, "end", lambda watch: ended.append(watch))
    room.count_from(3)
    assert len(ended) == 1
    assert room.mail.number == 3


def far_ahead() -> tuple[float, str]:
    """The last one does not come any more, and the others need not wait for it for long."""
    mesh, works = mc.make_mesh({"a": 4}, timeout=LONG), []
    mc.barrier("a", mesh=mesh)
    if mesh.rank == 3:
        return 0.0, "CommError"
    start = time.monotonic()
    told = ""
    while not told and len(works) < 5000:
        try:
            works.append(mc.all_reduce(torch.ones(2), "a", mesh=mesh, async_op=True))
        except mc.CommError as error:
            told = f"CommError {error}"
    for work in works:
        work._claimed = True
    assert len(works) > 2000
    return time.monotonic() - start, told


def meet_again() -> None:
    works_on(mc.make_mesh({"a": 4}))


@pytest.mark.thorough
def test_who_is_far_ahead_of_one_that_does_not_come(guarded4: Any) -> None:
    found = guarded4.run(far_ahead)
    for took, text in found:
        assert took < LONG / 2
        assert "CommError" in text
    assert any("has returned from its function" in text for _, text in found)
    guarded4.run(meet_again)  # that they raised something is no news any more


def a_ring_later() -> list[Any]:
    """Rank 0 finds that a call was another one when a new one stands where it was."""
    mesh, x, ring = mc.make_mesh({"a": 4}), torch.ones(2), 4096
    mail: Any = mesh.axis("a").link.mail  # type: ignore[attr-defined]
    mc.barrier("a", mesh=mesh)
    first = mc.all_reduce(x, "a", "max" if mesh.rank == 0 else "sum", mesh=mesh, async_op=True)
    first._claimed = True
    number = mail.number
    while mail.number < number + ring - 1:
        mc.barrier("a", mesh=mesh)
    if mesh.rank == 0:
        last = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
        with pytest.raises(mc.CommError, match="different calls"):
            first.wait()
        return last.wait().tolist()
    time.sleep(1.0)
    return mc.all_reduce(x, "a", mesh=mesh).tolist()


@pytest.mark.thorough
def test_a_difference_that_is_read_late(guarded4: Any) -> None:
    assert guarded4.run(a_ring_later) == 4 * [[4.0, 4.0]]


def ended_while_it_leaves(folder: str) -> Any:
    """Rank 0 says that it is about to give up, and nothing more for a while, as one that is killed then."""
    mesh, signs, x = mc.make_mesh({"a": 4}), Signs(folder), torch.ones(MANY)
    write = _Watch.write

    def writes(self: _Watch, state: int, why: str = "") -> None:
        write(self, state, why)
        if state == boards.LEAVING:
            signs.say("leaves")
            signs.wait("over 1", "over 2", "over 3")

    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 0:
            patch.setattr(_Watch, "write", writes)
            got = result_of(mc.all_gather, x, "a", mesh=mesh, timeout=0.2)
        else:
            signs.wait("leaves")
            patch.setattr(Meeting, "is_gone", lambda *_: True)
            got = result_of(mc.all_gather, x, "a", mesh=mesh)
            signs.say(f"over {mesh.rank}")
    return got if isinstance(got, str) else sorted(set(got))


def test_a_rank_that_ends_while_it_leaves(guarded4: Any, tmp_path: Path) -> None:
    assert guarded4.run(ended_while_it_leaves, str(tmp_path)) == 4 * [[1.0]]


BARRIER: dict[str, tuple[Any, str, int, bool]] = {
    "before it comes": (Room, "come_together", 1, True),
    "while it waits": (attendance.time, "sleep", 1, True),
    "when all have come": (Room, "come_together", 1, False),
    "before it comes again": (Room, "come_together", 2, True),
    "when all have come again": (Room, "come_together", 2, False),
    "before it counts": (MailRoom, "count_from", 1, True),
    "when it counts": (MailRoom, "count_from", 1, False),
    "when it counts alike": (Room, "align", 1, False),
}
"""Where an alarm goes off in a barrier: in which step, and before or after it."""
CARRIED = list(BARRIER)[4:]


def messages_alarmed(before: bool) -> list[Any]:
    """Each of two ranks is interrupted when both have come to a message, before or after it has said that it goes."""
    mesh, found = mc.make_mesh({"a": 4}, timeout=LONG), []
    for k in range(8):
        hit = mesh.rank == (k // 2) % 2
        with pytest.MonkeyPatch.context() as patch:
            if hit:
                patch.setattr(Together, "depart", once(Together.depart, before=before))
            if mesh.rank == 0:
                begin = time.monotonic()
                x = torch.full((5 if k % 2 else MANY,), float(k))
                found.append(result_of(lambda x=x: mc.send(x, "a", 1, mesh=mesh) or torch.ones(1)))
                assert time.monotonic() - begin < LONG / 2
            elif mesh.rank == 1:
                want: Any = {"shape": (5 if k % 2 else MANY,), "dtype": torch.float32, "mesh": mesh}
                found.append(result_of(lambda want=want: mc.recv("a", 0, **want).unique()))
    works_on(mesh)
    return found


@pytest.mark.parametrize("before", [True, False], ids=["before it says so", "after that"])
def test_an_alarm_when_both_have_come_to_a_message(guarded4: Any, before: bool) -> None:
    sender, receiver, *_ = guarded4.run(messages_alarmed, before)
    alarmed = "Alarm "
    assert sender == [alarmed if k // 2 % 2 == 0 else [1.0] for k in range(8)]
    assert receiver == [alarmed if k // 2 % 2 else [float(k)] for k in range(8)]


def at(time_of: int, step: Callable[..., Any], before: bool) -> Any:
    """``step``, in which an alarm goes off the time of this number."""
    calls, mine = iter(range(1, 1000)), threading.get_ident()
    return once(step, before=before, when=lambda *_: threading.get_ident() == mine and next(calls) == time_of)


def barrier_alarmed(folder: str) -> list[str]:
    """Rank 0 is interrupted in a barrier; afterwards, alone, it gives up a call, and all meet again."""
    mesh, found = mc.make_mesh({"a": 4}), []
    works_on(mesh)
    for k, (moment, (kind, name, nth, before)) in enumerate(BARRIER.items()):
        signs = Signs(folder)
        if mesh.rank:
            if moment == "while it waits":
                signs.wait(f"alarmed {k}")
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kind, name, at(nth, getattr(kind, name), before))
                with pytest.raises(Alarm):
                    mc.barrier("a", timeout=LONG, mesh=mesh)
            signs.say(f"alarmed {k}")
        if mesh.rank or moment == "before it comes":
            try:
                mc.barrier("a", timeout=LONG, mesh=mesh)
                found.append("")
            except mc.CommError as error:
                found.append(str(error))
        if moment in CARRIED:
            assert mc.all_reduce(torch.tensor(10.0**mesh.rank), "a", mesh=mesh).item() == 1111, moment
        else:
            works_on(mesh)
        if mesh.rank == 0:
            with pytest.raises(mc.CommError):
                mc.all_reduce(torch.ones(1), "a", mesh=mesh, timeout=0.05)
        works_on(mesh)
    return found


def test_an_alarm_in_a_barrier(guarded4: Any, tmp_path: Path) -> None:
    start = time.monotonic()
    first, *others = guarded4.run(barrier_alarmed, str(tmp_path))
    assert time.monotonic() - start < LONG
    assert first == [""]
    for moment, *told in zip(BARRIER, *others, strict=True):
        if moment == "before it comes" or moment in CARRIED:
            assert told == 3 * [""], moment
        else:
            assert all("index 0 (rank 0): Alarm" in each for each in told), (moment, told)


def cleaning_alarmed() -> list[Any]:
    """Rank 0 is interrupted when all have agreed, as it takes away what it has written before."""
    mesh, forget = mc.make_mesh({"a": 4}, timeout=LONG), boards.StoreBoard.forget
    works_on(mesh)
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 0:
            patch.setattr(boards.StoreBoard, "forget", once(forget, before=True))
        found = [result_of(mc.all_reduce, torch.ones(1), "a", mesh=mesh)]
    works_on(mesh)
    return found


def test_an_alarm_when_all_have_agreed_at_the_store(guarded4_at_the_store: Any) -> None:
    start = time.monotonic()
    assert guarded4_at_the_store.run(cleaning_alarmed) == [["Alarm "], *3 * [[[4.0]]]]
    assert time.monotonic() - start < LONG / 2


def at_the_door(folder: str) -> list[Any]:
    """An alarm goes off where rank 0 has waited for long, and is about to take back that it waits."""
    mesh, signs = mc.make_mesh({"a": 4}), Signs(folder)
    works_on(mesh)
    guard = current()
    assert guard is not None
    if mesh.rank != 0:
        signs.wait("told")
        return [mc.all_reduce(torch.ones(1), "a", mesh=mesh).item(), 0, works_on(mesh)]
    with pytest.MonkeyPatch.context() as patch:
        tell_of = Guard.tell_of
        patch.setattr(Guard, "tell_of", lambda *args: (tell_of(*args), signs.say("told")))
        patch.setattr(_Watch, "__exit__", once(_Watch.__exit__, before=True))
        found = result_of(mc.all_reduce, torch.ones(1), "a", mesh=mesh)
    return [found, len(guard._status.waits), works_on(mesh)]


def test_who_is_interrupted_at_the_end_of_a_wait_is_not_told_to_wait(guarded4: Any, tmp_path: Path) -> None:
    found = guarded4.run(at_the_door, str(tmp_path))
    assert found == [["Alarm ", 0, None]] + [[4.0, 0, None]] * 3


def interrupted_and_let_go() -> None:
    """What it was in the midst of goes at once: without a collection what others lend would stay lent."""
    mesh = mc.make_mesh({"a": 4})
    x = torch.arange(8.0)
    gc.disable()
    try:
        for _ in range(3):
            kept = weakref.ref(each := x.clone())
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Alarm, mc.CommError):
                if mesh.rank == 1:
                    patch.setattr(Call, "wait_for_all", raising)
                mc.all_reduce(each, "a", mesh=mesh)
            del each
            mc.barrier("a", timeout=LONG, mesh=mesh)
            mc.barrier("a", timeout=LONG, mesh=mesh)
            assert mesh.rank != 1 or kept() is None
    finally:
        gc.enable()


def raising(*_: object) -> None:
    raise Alarm


def test_who_is_interrupted_keeps_nothing(guarded4: Any) -> None:
    guarded4.run(interrupted_and_let_go)
