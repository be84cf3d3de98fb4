"""Messages under guard whose ranks do not agree to wait as long: those that go together go on, or all are told."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_guard_timeouts import Signs, works_on
from test_timeouts import LONG, SOON
from torch.distributed import HashStore

import meshcomm as mc
from meshcomm._torch import default_store
from meshcomm.runtime.call import Call
from meshcomm.runtime.hooks.guard import messages, store
from meshcomm.runtime.hooks.guard.batches import LEAVING
from meshcomm.runtime.hooks.guard.boards import Group
from meshcomm.runtime.hooks.guard.messages import Letters
from meshcomm.runtime.hooks.guard.store import PatientStore
from meshcomm.runtime.hooks.guard.stored import _StoreMeeting
from meshcomm.runtime.hooks.stack import Running
from meshcomm.runtime.pending import TimedOutError
from meshcomm.runtime.transports.shared.call import Call as MailCall
from meshcomm.runtime.words import Words


@pytest.fixture(params=["guarded4", "guarded4_at_the_store"], ids=["shared", "store"])
def guarded(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


# ----------------------------------------------------------------------------------------------------- what is called

Places = list[tuple[int, int]]
"""Messages: from, to."""

SHAPES: dict[str, Places] = {
    "one": [(0, 1)],
    "two": [(0, 1), (1, 0)],
    "one tag": [(0, 1), (0, 1)],
    "ring of three": [(0, 1), (1, 2), (2, 0)],
    "ring": [(0, 1), (1, 2), (2, 3), (3, 0)],
    "chain of three": [(0, 1), (1, 2)],
    "chain": [(0, 1), (1, 2), (2, 3)],
    "from one": [(0, 1), (0, 2), (0, 3)],
    "to one": [(1, 0), (2, 0), (3, 0)],
    "all": [(i, j) for i in range(4) for j in range(4) if i != j],
}


def partners(shape: Places) -> list[int]:
    return sorted({rank for places in shape for rank in places})


def call(mesh: mc.Mesh, shape: Places, longer: int = 0, **how: Any) -> Any:
    """This rank's part: ``send`` or ``recv`` where it has one message, else an exchange."""
    me, mine = mesh.rank, [(nth, *places) for nth, places in enumerate(shape)]
    sends = [(torch.tensor([10.0 * me, nth] + [0.0] * longer), dst) for nth, src, dst in mine if src == me]
    wants = [(src, (2,), torch.float32) for _, src, dst in mine if dst == me]
    if len(sends) == 1 and not wants:
        return mc.send(sends[0][0], "a", sends[0][1], mesh=mesh, **how)
    if len(wants) == 1 and not sends:
        return mc.recv("a", wants[0][0], shape=(2,), dtype=torch.float32, mesh=mesh, **how)
    return mc.exchange(sends, wants, "a", mesh=mesh, **how)


def right(mesh: mc.Mesh, shape: Places, got: Any) -> None:
    wanted = [[10.0 * src, float(nth)] for nth, (src, dst) in enumerate(shape) if dst == mesh.rank]
    found = [] if got is None else [x.tolist() for x in ([got] if isinstance(got, torch.Tensor) else got)]
    assert found == wanted


def goes_on(mesh: mc.Mesh) -> None:
    """After a meeting all calls are right, and nothing is left at the store."""
    works_on(mesh)
    for shape in SHAPES.values():
        if mesh.rank in partners(shape):
            right(mesh, shape, call(mesh, shape))
    mc.barrier("a", timeout=LONG, mesh=mesh)
    end = time.monotonic() + LONG
    while mesh.rank == 0 and [key for key in default_store().list_keys() if "/message/" in key]:
        assert time.monotonic() < end  # each takes away its own, after the meeting
        time.sleep(0.01)


def told_by(fn: Callable[[], Any]) -> str:
    with pytest.raises(mc.CommError) as caught:
        fn()
    return str(caught.value)


class Sign(Signs):
    def wait_for(self, what: object, ranks: list[int]) -> None:
        end = time.monotonic() + LONG
        while not all((self.folder / f"{what} {rank}").exists() for rank in ranks):
            assert time.monotonic() < end
            time.sleep(1e-3)


# ------------------------------------------------------------------------------------------------------- all or none

GIVEN_UP = [
    ("one", 0, 1), ("one", 1, 0), ("two", 0, 1), ("one tag", 1, 0),
    ("ring of three", 0, 2), ("ring of three", 0, 1), ("ring", 0, 2), ("ring", 1, 0),
    ("chain of three", 1, 2), ("chain of three", 0, 2), ("chain", 0, 3), ("chain", 2, 0),
    ("from one", 0, 3), ("from one", 1, 2), ("to one", 3, 0), ("to one", 0, 3), ("all", 2, 3),
]  # fmt: skip
"""What is called, which rank has a time-out, and which one comes when the others have been told that can be."""


def told_before(shape: Places, limited: int, late: int) -> list[int]:
    """Who can know of it before the last one comes."""
    known = {limited}
    for _ in shape:
        known |= {rank for places in shape if late not in places and known & {*places} for rank in places}
    return sorted(known)


def given_up(folder: str) -> list[str]:
    mesh, signs, told = mc.make_mesh({"a": 4}), Sign(folder), []
    for number, (name, limited, late) in enumerate(GIVEN_UP):
        shape = SHAPES[name]
        if mesh.rank in partners(shape):
            if mesh.rank == late:
                signs.wait_for(number, told_before(shape, limited, late))
            told.append(told_by(lambda: call(mesh, shape, **({"timeout": SOON} if mesh.rank == limited else {}))))
            signs.say(str(number), mesh.rank)
        else:
            told.append("")
        mc.barrier("a", timeout=LONG, mesh=mesh)
        if mesh.rank in partners(shape):
            right(mesh, shape, call(mesh, shape))
    goes_on(mesh)
    return told


@pytest.mark.thorough
def test_one_that_gives_up_is_heard_by_all(guarded: Any, tmp_path: Path) -> None:
    for (_, limited, late), *texts in zip(GIVEN_UP, *guarded.run(given_up, str(tmp_path)), strict=True):
        for rank, text in enumerate(texts):
            if rank == limited:
                assert re.match(r"meshcomm\.(send|recv|exchange): not done within 0\.05 s\.", text)
                assert re.search(rf"absent: .*\(rank {late}\)", text)
            elif text:
                assert re.match(r"meshcomm\.(send|recv|exchange): not all messages will come\.", text)
                assert f"got: a={limited} called " in text
                assert "has given up: not done within 0.05 s" in text
            assert not text or "mc.barrier(axis, timeout=...)" in text


def at_the_same_time(rounds: int) -> list[bool | None]:
    """Ranks come, and give up, at about the same time; whether each call has succeeded."""
    mesh, chance, found = mc.make_mesh({"a": 4}), random.Random(7), list[bool | None]()
    for _ in range(rounds):
        shape = SHAPES[chance.choice([*SHAPES])]
        late = [chance.uniform(0, 2 * SOON) for _ in range(4)]
        limit = [chance.choice([None, SOON, SOON / 2, LONG]) for _ in range(4)]
        if mesh.rank not in partners(shape):
            found.append(None)
        else:
            time.sleep(late[mesh.rank])
            mine = limit[mesh.rank]
            try:
                right(mesh, shape, call(mesh, shape, **({} if mine is None else {"timeout": mine})))
                found.append(True)
            except mc.CommError:
                found.append(False)
        mc.barrier("a", timeout=LONG, mesh=mesh)
    goes_on(mesh)
    return found


def test_all_or_none_whenever_they_come(guarded: Any) -> None:
    for results in zip(*guarded.run(at_the_same_time, 15), strict=True):
        assert len({result for result in results if result is not None}) == 1


def waited_twice(folder: str) -> None:
    """The time-out of a wait gives nothing up."""
    mesh, signs = mc.make_mesh({"a": 4}), Sign(folder)
    for name, shape in SHAPES.items():
        if mesh.rank in partners(shape):
            first, *others = partners(shape)
            if mesh.rank == first:
                signs.wait_for(name, others)
            work = call(mesh, shape, async_op=True)
            if mesh.rank != first:
                assert "wait again, nothing is lost" in told_by(lambda: work.wait(timeout=SOON / 5))
                signs.say(name, mesh.rank)
            right(mesh, shape, work.wait())
    goes_on(mesh)


def test_the_wait_of_a_work_loses_nothing(guarded: Any, tmp_path: Path) -> None:
    guarded.run(waited_twice, str(tmp_path))


def behind_a_work(folder: str) -> str:
    """The second receive has a time-out; the first, of the same route, goes on waiting, and gets what is sent first."""
    mesh, signs, text = mc.make_mesh({"a": 4}), Sign(folder), ""
    if mesh.rank == 0:
        work = call(mesh, [(1, 0)], async_op=True)
        text = told_by(lambda: call(mesh, [(1, 0)], timeout=SOON))
        signs.say("told", 0)
        right(mesh, [(1, 0)], work.wait())
    elif mesh.rank == 1:
        signs.wait_for("told", [0])
        call(mesh, [(1, 0)])
        text = told_by(lambda: call(mesh, [(1, 0)]))
    goes_on(mesh)
    return text


def test_one_that_gives_up_behind_a_work(guarded: Any, tmp_path: Path) -> None:
    first, second, *_ = guarded.run(behind_a_work, str(tmp_path))
    assert "not done within 0.05 s" in first
    assert "a=0 called recv" in second
    assert "has given up: not done within 0.05 s" in second


# --------------------------------------------------------------------------------------- other reasons to give up


def unlike() -> list[str]:
    """In a batch of three ranks the message from 0 to 1 does not fit: none goes."""
    mesh, told = mc.make_mesh({"a": 4}), []
    for name in ("ring of three", "chain of three", "ring", "all"):
        if mesh.rank in partners(SHAPES[name]):
            told.append(told_by(lambda: call(mesh, SHAPES[name], longer=int(mesh.rank == 0))))
        mc.barrier("a", timeout=LONG, mesh=mesh)
    goes_on(mesh)
    return told


def test_a_message_that_does_not_fit(guarded: Any) -> None:
    for texts in guarded.run(unlike):
        for text in texts:
            assert "a message does not fit" in text
            assert re.search(
                r"a=0 sends f32\[3\], a=\d expects f32\[2\]|a=\d expects f32\[2\], a=0 sends f32\[3\]", text
            )


def fails_before(how: str) -> str:
    """Rank 2 fails before it comes to its part, and catches that."""
    mesh, shape = mc.make_mesh({"a": 4}), SHAPES["ring of three"]
    text = ""
    if mesh.rank in (0, 1):
        text = told_by(lambda: call(mesh, shape))
    elif mesh.rank == 2 and how == "refused":
        with pytest.raises(mc.MeshError):
            mc.send(torch.ones(2), "a", 9, mesh=mesh)
    elif mesh.rank == 2:
        with contextlib.suppress(ValueError):
            raise ValueError
    goes_on(mesh)
    return text


@pytest.mark.parametrize("how", ["refused", "its own"])
def test_a_rank_that_fails_before(guarded: Any, how: str) -> None:
    for text in guarded.run(fails_before, how)[:2]:
        reasons = ["has given up: ", "deadlock: ranks wait for each other"]
        reasons += ["has raised an error instead: meshcomm.send"] if how == "refused" else []
        assert any(reason in text for reason in reasons)


def one_after_the_other() -> str:
    """What goes together is received in two calls, of which the second cannot be made before the first is over."""
    mesh, text = mc.make_mesh({"a": 4}), ""
    if mesh.rank == 0:
        text = told_by(lambda: call(mesh, [(0, 1), (0, 1)]))
    elif mesh.rank == 1:
        text = told_by(lambda: call(mesh, [(0, 1)]))
    mc.barrier("a", timeout=LONG, mesh=mesh)
    if mesh.rank == 0:
        call(mesh, [(0, 1), (0, 1)])
    elif mesh.rank == 1:
        first, second = (call(mesh, [(0, 1)], async_op=True) for _ in range(2))
        assert second.wait().tolist() == [0, 1]
        assert first.wait().tolist() == [0, 0]
    goes_on(mesh)
    return text


def test_what_goes_together_and_is_received_in_two_calls(guarded: Any) -> None:
    sender, receiver, *_ = guarded.run(one_after_the_other)
    assert "meshcomm.recv: deadlock: ranks wait for each other" in receiver
    assert "a=1 called recv from 0 (tag 0) f32[2]" in sender


def works_that_nobody_sends_for() -> str:
    mesh = mc.make_mesh({"a": 4})
    text = told_by(call(mesh, [(1 - mesh.rank, mesh.rank)], async_op=True).wait) if mesh.rank < 2 else ""
    goes_on(mesh)
    return text


def test_works_that_nobody_sends_for(guarded: Any) -> None:
    for text in guarded.run(works_that_nobody_sends_for)[:2]:
        assert "meshcomm.recv: deadlock: ranks wait for each other" in text


@contextlib.contextmanager
def interrupted_by(seconds: float) -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted(folder: str) -> str:
    """Rank 0 is interrupted while it waits for rank 2."""
    mesh, signs, text, shape = mc.make_mesh({"a": 4}), Sign(folder), "", SHAPES["ring of three"]
    if mesh.rank == 0:
        with pytest.raises(KeyboardInterrupt), interrupted_by(SOON):
            call(mesh, shape)
    elif mesh.rank in (1, 2):
        if mesh.rank == 2:
            signs.wait_for("told", [1])
        text = told_by(lambda: call(mesh, shape))
        signs.say("told", mesh.rank)
    goes_on(mesh)
    return text


def test_an_interrupt(guarded: Any, tmp_path: Path) -> None:
    for text in guarded.run(interrupted, str(tmp_path))[1:3]:
        assert "a=0 called exchange" in text
        assert "has given up: it was interrupted by KeyboardInterrupt" in text


def interrupted_at_last(name: str) -> None:
    """Rank 0 is interrupted when all have come: it does its part, and the others have what they want."""
    mesh, shape = mc.make_mesh({"a": 4}), SHAPES[name]
    if mesh.rank == 0:
        wait = messages._Passage._wait_for_all

        def waits(self: Any, long: Any) -> None:
            wait(self, long)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(messages._Passage, "_wait_for_all", waits)
            with pytest.raises(KeyboardInterrupt):
                call(mesh, shape)
    elif mesh.rank in partners(shape):
        right(mesh, shape, call(mesh, shape))
    goes_on(mesh)


@pytest.mark.parametrize("name", ["two", "ring"])
def test_an_interrupt_when_all_have_come(guarded: Any, name: str) -> None:
    guarded.run(interrupted_at_last, name)


def interrupted_at_last_in_a_collective() -> None:
    """The same where all ranks make the call, at the moment that the last one has come, and while it is put down."""
    mesh = mc.make_mesh({"a": 4})
    at_the_store = not mesh.axis("a").link.shares_memory
    kind: Any = _StoreMeeting if at_the_store else MailCall
    for name in ("wait_for_all", "say") if at_the_store else ("conclude", "post"):
        for _ in range(3):
            if mesh.rank:
                assert mc.all_reduce(torch.ones(3), "a", mesh=mesh).tolist() == 3 * [4]
                continue
            step = getattr(kind, name)

            def then_an_interrupt(self: Any, *args: Any, step: Any = step, name: str = name, **kwargs: Any) -> None:
                setattr(kind, name, step)
                if name != "conclude":  # which waits, and reads: it is interrupted between the two
                    step(self, *args, **kwargs)
                while not (self.all_came() if at_the_store else self.look()):
                    time.sleep(1e-3)
                raise KeyboardInterrupt

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kind, name, then_an_interrupt)
                with pytest.raises(KeyboardInterrupt):
                    mc.all_reduce(torch.ones(3), "a", mesh=mesh)
    goes_on(mesh)


def test_an_interrupt_when_all_have_come_to_a_collective(guarded: Any) -> None:
    guarded.run(interrupted_at_last_in_a_collective)


def begun_before_a_barrier() -> str:
    """A receive that nobody has sent for when all have met ends there."""
    mesh, text = mc.make_mesh({"a": 4}), ""
    work = call(mesh, [(1, 0)], async_op=True) if mesh.rank == 0 else None
    mc.barrier("a", timeout=LONG, mesh=mesh)
    if work is not None:
        text = told_by(work.wait)
    goes_on(mesh)
    return text


def test_a_message_begun_before_a_barrier(guarded: Any) -> None:
    assert (
        "the ranks have met in a barrier since, which ends what was begun before"
        in guarded.run(begun_before_a_barrier)[0]
    )


# -------------------------------------------------------------------------------------- many, without a transport


class Quiet:
    """A guard that finds no reason to give up."""

    name = staticmethod(str)

    @contextlib.contextmanager
    def waiting(self, wait: object, *, for_program: bool) -> Iterator[Callable[[], None]]:
        yield lambda: None

    @contextlib.contextmanager
    def program_waits(self, what: object) -> Iterator[None]:
        yield

    def why_never(self, *_: object, **__: object) -> str:
        return ""

    def where_all_are(self) -> str:
        return ""


def one_round(letters: list[Letters], shape: Places, chance: random.Random, more: float = 0) -> list[bool]:
    """Each rank's part on a thread of its own, with a time-out that may be over before all have come."""
    went: dict[int, bool] = {}

    def part(me: int, pause: float, limit: float) -> None:
        posts = [(torch.ones(2), dst, 0) for src, dst in shape if src == me]
        wants = [(src, (2,), torch.float32, 0, torch.device("cpu")) for src, dst in shape if dst == me]
        what = Running("exchange", (posts, wants), Call("exchange"), None, True, lambda: None)
        time.sleep(pause)
        under_way = letters[me].run(what)
        try:
            with contextlib.suppress(TimedOutError):
                under_way.wait(limit + more)
            under_way.withdraw(SOON)
            under_way.wait(LONG)
            went[me] = True
        except mc.CommError:
            went[me] = False

    threads = [
        threading.Thread(target=part, args=(me, chance.uniform(0, 3e-3), chance.uniform(0, 4e-3)))
        for me in partners(shape)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(went.values())


@contextlib.contextmanager
def letters_of(count: int) -> Iterator[list[Letters]]:
    """Of as many ranks, which write to a store of their own; they leave nothing there."""
    served, before = HashStore(), list(store._store)
    store._store.append(PatientStore(served, LONG))
    try:
        group = Group(1, tuple(range(count)), "many")
        letters = [Letters(rank, Quiet(), group, LONG) for rank in range(count)]  # type: ignore[arg-type]
        yield letters
        for each in letters:
            each.begin_again(1)
            assert each.sweep()
        assert served.num_keys() == 0
    finally:
        store._store.pop().end()
        assert store._store == before


@pytest.mark.parametrize("stays", [True, False])
def test_who_may_be_leaving_is_waited_for(stays: bool) -> None:
    """All have come, and one of them is about to give up: nobody goes until that one has said."""
    with letters_of(2) as letters:
        posts, wants = [(torch.ones(2), 1, 0)], [(0, (2,), torch.float32, 0, torch.device("cpu"))]
        sends, receives = (
            Running("exchange", messages, Call("exchange"), None, True, lambda: None)
            for messages in ((posts, []), ([], wants))
        )
        passage = letters[0]._take_places(sends, Words("rank 0", "send", "", ""))
        passage.post()
        passage._together.say(LEAVING)
        receipt = letters[1].run(receives)
        with pytest.raises(TimedOutError):
            receipt.wait(0.1)
        if stays:
            passage._together.stay()
            receipt.wait(LONG)
            passage.go(sends, for_program=True)
        else:
            passage._give_up("it was enough")
            passage._end()
            with pytest.raises(mc.CommError, match="it was enough"):
                receipt.wait(LONG)


def test_many_that_may_give_up() -> None:
    chance = random.Random(5)
    with letters_of(4) as letters:
        for _ in range(12):
            for shape in SHAPES.values():
                went = one_round(letters, shape, chance)
                assert len(went) == len(partners(shape))
                assert len(set(went)) == 1, (shape, went)
            assert all(one_round(letters, shape, chance, LONG))
