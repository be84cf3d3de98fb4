"""What happens at one moment of another process or thread, or never: each forced here, at that moment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm as mc
from meshcomm.errors import CommError
from meshcomm.runtime import recorder
from meshcomm.runtime.call import Call as Announced
from meshcomm.runtime.health import peers
from meshcomm.runtime.hooks import dumps
from meshcomm.runtime.hooks.guard import guard as guards
from meshcomm.runtime.hooks.guard import setup
from meshcomm.runtime.hooks.guard.boards import Group, SharedShelf, StoreShelf
from meshcomm.runtime.hooks.guard.guard import Guard, Status, Wait
from meshcomm.runtime.hooks.guard.link import Room
from meshcomm.runtime.hooks.guard.store import PatientStore
from meshcomm.runtime.process import boxes, exits, lending, memory, neighbours, table
from meshcomm.runtime.start import workers
from meshcomm.runtime.start.worker import Answer
from meshcomm.runtime.transports.shared.call import Call
from meshcomm.runtime.transports.shared.words import ENTRY_CELLS
from meshcomm.runtime.transports.threads import scheduler

SOON = 30.0
"""Seconds within which something that takes none is over, on a busy machine."""


class AtKey(dist.HashStore):  # type: ignore[misc]
    """A store of which somebody else does something between two questions: ``moments`` has what, by question."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[tuple[str, str], Callable[[], object]] = {}

    def after(self, name: str, key: str) -> None:
        """Once."""
        self.moments.pop((name, key), lambda: None)()

    def check(self, keys: list[str]) -> bool:
        found = bool(super().check(keys))
        self.after("check", keys[0])
        return found

    def set(self, key: str, value: Any) -> None:
        super().set(key, value)
        self.after("set", key)

    def delete_key(self, key: str) -> bool:
        found = bool(super().delete_key(key))
        self.after("delete", key)
        return found


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[AtKey]:
    """The guard's."""
    served = AtKey()
    patient = PatientStore(served, SOON)
    monkeypatch.setattr("meshcomm.runtime.hooks.guard.store._store", [patient])
    yield served
    patient.end()


# --------------------------------------------------------------------------------------------- all or none make a group


@pytest.fixture
def making(monkeypatch: pytest.MonkeyPatch, store: AtKey) -> Callable[[int, int], str]:
    """``agree_to_make`` as one of two ranks, with a time-out: what comes of it."""
    monkeypatch.setattr(setup, "place_of", lambda name: "made")
    monkeypatch.setattr(guards, "LONG", 0.01)

    def make(rank: int, size: int, seconds: float = 0.0) -> str:
        guard = Guard(rank, size, StoreShelf("shelf", rank), setup._is_there, lambda _: "")
        monkeypatch.setattr(guards, "_current", [guard])
        try:
            setup.agree_to_make("a group", tuple(range(size)), seconds)
        except CommError as error:
            return str(error)
        return "made"

    return make


def test_who_gives_up_a_group_looks_whether_all_have_come_since(
    making: Any, store: AtKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 comes, and goes on, when rank 0 has looked for it for the last time: so rank 0 goes on, too."""

    def why_never(*_: object, **__: object) -> str:
        store.set("made/making/1", "here")
        return "it is late"

    monkeypatch.setattr(Guard, "why_never", why_never)
    assert making(0, 2) == "made"
    assert store.check(["made/making/0"])


def test_who_sees_all_come_waits_for_one_that_gives_up(making: Any, store: AtKey) -> None:
    """Rank 0 has given up for rank 2 had not come, which comes now: rank 1 has seen both, one after the other."""
    store.set("made/making/0", "here")
    store.moments["check", "made/making/0"] = lambda: (
        store.delete_key("made/making/0"),
        dist.HashStore.set(store, "made/making/2", "here"),
    )
    assert "time is up" in making(1, 3, 0.2)


# ----------------------------------------------------------------------------------------------------- the guard's words


def test_who_is_stopped_while_it_says_something_has_said_what_it_said_before() -> None:
    """Nobody takes the rank for one that has raised no error, or waits for nothing."""

    class Half(bytes):
        """It has a length, and then the process is stopped."""

        def __len__(self) -> int:
            return 7

    shelf = SharedShelf(0, [None])
    shelf.tell(b"before")
    assert shelf.status(0) == b"before"
    with pytest.raises(ValueError, match="lvalue and rvalue"):
        shelf.tell(Half(b"other than its length"))
    assert shelf.status(0) == b"before"
    for said in (b"", b"after", 1000 * b"long", b"short", b""):
        shelf.tell(said)
        assert shelf.status(0) == said


def test_a_thread_that_outlasts_the_guard_does_not_wait_for_its_store() -> None:
    patient = PatientStore(dist.HashStore(), SOON)
    patient.set("key", "value")
    patient.end()
    begin = time.monotonic()
    with pytest.raises(CommError, match="the process group was shut down meanwhile"):
        patient.peek("key")
    assert time.monotonic() - begin < SOON / 2


def test_a_wait_that_is_interrupted_while_it_is_told_is_told_no_more(store: AtKey) -> None:
    """Ctrl-C: else the others would take this rank for waiting in it."""

    class Waits(list[Any]):
        def append(self, wait: Any) -> None:
            super().append(wait)
            raise KeyboardInterrupt

    guard = Guard(0, 2, StoreShelf("shelf", 0), lambda _: False, lambda _: "")
    guard._status.waits = waits = Waits()
    with pytest.raises(KeyboardInterrupt):  # noqa: SIM117
        with guard.waiting(Wait(Group(1, (0, 1), "g"), 1, "waited in", "here"), for_program=True) as long:
            long()
    assert not waits
    assert not store.check(["shelf/status/0"])


def test_calls_that_are_all_different_are_not_all_kept() -> None:
    """Messages with a tag of their own, say: no primitive of theirs is put into words."""
    room: Any = SimpleNamespace(known={})
    for tag in range(5000):
        once, again = (Room.known_as(room, Announced("send", (tag,))) for _ in range(2))
        assert once.here.given == again.here.given == (tag,)
        assert once is again
    assert len(room.known) < 5000


def test_who_was_told_of_a_deadlock_and_waits_anew_is_in_no_other_one() -> None:
    """Rank 0 is told of the deadlock with rank 1, and waits for it in the next call, while rank 1 looks at what it says:
    rank 1 is to be told of the same deadlock.
    """
    here, there = Group(1, (0, 1), "g"), Group(2, (0, 1), "h")
    mine = Wait(here, 1, "my call", "rank 1")
    first, second = (
        Status(
            waits=[wait], main=(wait.group.key, 1, 0), issued={wait.group.key: 1}, condemned=told, verdict="the first"
        )
        for wait, told in (
            (Wait(there, 1, "its call", "rank 0"), []),
            (Wait(Group(3, (0, 1), "i"), 1, "the next one", "rank 0"), [(0, 7), (1, mine.id)]),
        )
    )

    class Shelf:
        looked, most = 0, 1000.0

        def tell(self, status: bytes) -> None:
            pass

        def status(self, rank: int) -> bytes:
            Shelf.looked += 1
            return (first if Shelf.looked == 1 else second).write()

        def has_posted(self, rank: int, group: Group, number: int) -> bool:
            return False

    guard = Guard(1, 2, Shelf(), lambda _: False, lambda _: "")
    guard.issued[here.key] = 1
    guard.tell_of(mine, True)
    assert guard.why_never(mine, [0], sure=True) == "the first"


def test_the_watch_of_a_guard_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although there is another one already, which a program gets that calls shutdown and init."""
    served, mine, next_one = dist.HashStore(), object(), object()
    here: Any = type("World", (), {"rank": 0, "size": 2})
    monkeypatch.setattr(guards, "_current", [mine])
    watching = threading.Thread(target=setup._watch, args=(served, "p", here, mine), daemon=True)
    watching.start()
    time.sleep(0.1)
    assert watching.is_alive()
    monkeypatch.setattr(guards, "_current", [next_one])
    watching.join(SOON)
    assert not watching.is_alive()


# --------------------------------------------------------------------------------------------------------- other threads


def test_what_cannot_be_seen_of_another_process_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread opens meanwhile gets the number that was free."""
    opened: list[int] = []

    def gone(lease: Any) -> Any:
        raise FileNotFoundError("it has ended")

    monkeypatch.setattr(neighbours, "find", gone)
    try:
        neighbours.Neighbour(memory.Lease(os.getpid(), 0, 0, 0, 0, 0))
    except OSError:  # until its end the error keeps what failed
        opened += os.pipe()
    os.write(opened[1], b"x")
    for each in opened:
        os.close(each)


def test_a_dump_while_another_thread_makes_a_mesh(tmp_path: Any) -> None:
    """The log of a mesh that is gone is dropped between two looks at the logs."""

    class Dropping(recorder.Ring):
        def calls(self, *logs: Any) -> Any:
            found = super().calls(*logs)
            self.logs.pop(0)
            return found

    ring = Dropping(recorder.Owner(0, 2))
    for _ in range(2):
        ring.log((0, 1), 0).begin("barrier", "", None, ())
    path = dumps._write(ring, tmp_path, "asked for")
    assert path.read_text().count('"barrier"') >= 2


def test_threads_that_end_while_they_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one runs all the same."""
    me = threading.get_native_id()
    monkeypatch.setattr(os, "listdir", lambda _: ["0", str(me)])
    monkeypatch.setattr(threading, "get_native_id", lambda: -1)  # so that this thread is another one
    assert exits._others_run()


def test_who_is_to_blame_is_not_the_next_process_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has the number of one that has ended: nobody waits for it."""
    machine = table.machine()
    if not machine:
        pytest.skip("no table of processes")
    another = peers._Peer(machine, os.getpid(), table.began(os.getpid()) - 1)
    monkeypatch.setattr(peers, "_blamed", {another})
    monkeypatch.setattr(peers, "last_error", lambda: CommError("of another rank"))
    monkeypatch.setattr(peers, "_FIRST", SOON)
    begin = time.monotonic()
    peers.let_go_first()
    assert time.monotonic() - begin < SOON / 2


# ------------------------------------------------------------------------------------------------------------- the end


def met(monkeypatch: pytest.MonkeyPatch, store: AtKey, pids: list[int], *, serves: bool) -> None:
    """This process is rank 0 of those, and leaves."""
    for name in ("_met", "_last"):
        monkeypatch.setattr(peers, name, None)
    machine = table.machine()
    peers.met(store, 0, [f"{machine}\t{pid}\t{table.began(pid)}" for pid in pids], serves=serves)
    peers.leave("its program is over")


def test_who_serves_the_store_stays_until_the_others_have_left(monkeypatch: pytest.MonkeyPatch, store: AtKey) -> None:
    """What all have agreed on there, such as the end of a barrier, one of them may not have read yet."""
    monkeypatch.setattr(peers, "_STAYING", SOON)
    met(monkeypatch, store, [os.getpid(), os.getppid()], serves=True)
    looked = []

    def leave() -> None:
        looked.append(1)
        if len(looked) == 3:
            store.set("left/1", "its program is over")
        else:
            store.moments["check", "left/1"] = leave

    store.moments["check", "left/1"] = leave
    begin = time.monotonic()
    peers.stay()
    assert len(looked) == 3
    assert time.monotonic() - begin < SOON / 2


def test_who_has_ended_is_not_stayed_for(monkeypatch: pytest.MonkeyPatch, store: AtKey) -> None:
    if not table.machine():
        pytest.skip("no table of processes")
    monkeypatch.setattr(peers, "_STAYING", SOON)
    begin = time.monotonic()
    met(monkeypatch, store, [os.getpid(), 2**22 + 1], serves=True)
    peers.stay()
    met(monkeypatch, store, [os.getpid(), os.getppid()], serves=False)
    peers.stay()
    assert time.monotonic() - begin < SOON / 2


LEAVES_FIRST = """
import time
import meshcomm as mc
from meshcomm.runtime.health import attendance, peers

peers._STAYING = 100.0
mesh = mc.make_mesh({"a": 2})
if mesh.rank == 1:
    real = time.sleep
    attendance.time = type("", (), {"sleep": lambda _: real(4), "monotonic": time.monotonic})
else:
    time.sleep(1)  # the last one to come: it says that all have
mc.barrier("a", mesh=mesh, timeout=200)
"""


@pytest.mark.thorough
def test_a_program_may_end_with_a_barrier(tmp_path: Any) -> None:
    """Rank 0 serves the store, and ends before rank 1 has looked again."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES_FIRST], env={**os.environ, **places, "RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    ends = [(rank.communicate(timeout=300)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [0, 0], ends


def answers_of(*given: tuple[float, str, BaseException]) -> list[Answer]:
    return [Answer("error", rank, error, text, when=when) for rank, (when, text, error) in enumerate(given)]


def test_the_rank_that_others_fail_because_of_is_named_although_it_says_so_later() -> None:
    """It had to clean up first."""
    answers = answers_of((1.0, "CommError: rank 1", CommError("rank 1")), (2.0, "ValueError: boom", ValueError("boom")))
    with pytest.raises(CommError, match="rank 1 failed in train: ValueError: boom"):
        workers._results("train", answers, None)


def test_who_follows_from_a_failure_does_not_end_the_launch_before_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer of the rank that has failed first comes after that of one that failed because of it."""
    crew: Any = workers._Crew(2, None, None, False)
    given = answers_of((1.0, "CommError: rank 1", CommError("rank 1")), (0.5, "ValueError: boom", ValueError("boom")))
    crew._pipes, crew._workers = [0, 1], [type("", (), {"sentinel": 0, "pid": None})] * 2
    monkeypatch.setattr(workers, "_FOLLOWS", SOON)
    looks: list[float] = []

    def wait(waiting: Any, left: float | None) -> bool:
        looks.append(SOON if left is None else left)
        return looks[-1] > 1.0  # the second one comes a second later

    monkeypatch.setattr(workers, "wait", wait)
    crew._answer = lambda rank: given[rank] if rank < len(looks) else None
    assert [answer.kind for answer in crew._collect(None, 0.1)] == ["error", "error"]


# ------------------------------------------------------------------------------------------------------- shared memory


def test_who_helps_a_slow_rank_does_not_tell_of_a_time_that_is_up() -> None:
    """It reduces the other's part itself: nobody has to be asked, and no dump is written, which takes seconds."""

    class Slow(Call):
        def __init__(self) -> None:
            own = boxes.Arena(memory.create(boxes._ARENA)).make_box(7)  # nobody rings
            mail = {"box": lambda *_: None, "neighbours": [None, Alive()], "own": own, "why_given_up": lambda *_: ""}
            self.mail: Any = type("Mail", (), mail)
            self.link: Any = type("Link", (), {"ranks": (0, 1), "mail": self.mail})
            self._segments: Any = {1: type("Segment", (), {"cells": {lending.STATE: 1}})}  # it has begun to reduce
            self._entries = {1: ENTRY_CELLS * [0]}

        def late(self, missing: list[int]) -> str:
            raise AssertionError("its time is not up")

    class Alive:
        pid = 1

        def is_gone(self) -> bool:
            return False

    begin = time.monotonic()
    assert not Slow()._take(1, torch.empty(0), wait=True)
    assert time.monotonic() - begin < SOON / 2


def test_two_threads_that_meet_the_same_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find that one has gone, and forget it."""

    class Gone:
        def is_gone(self) -> bool:
            known.clear()
            return True

    known: dict[Any, Any] = {memory.Lease(pid, 0, 0, 0, 0, 0): Gone() for pid in (1, 2)}
    monkeypatch.setattr(neighbours, "_neighbours", known)
    monkeypatch.setattr(neighbours, "Neighbour", lambda lease: lease)
    lease = memory.Lease(3, 0, 0, 0, 0, 0)
    assert neighbours.neighbour(lease) == lease


def test_a_launch_that_is_interrupted_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C: the next one finds that none is running."""

    real = scheduler.RandomState

    def interrupt(*of_a_rank: int) -> scheduler.RandomState:
        if not of_a_rank:
            raise KeyboardInterrupt
        return real(*of_a_rank)

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "RandomState", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mc.launch(lambda: 1, ranks=2)
    assert mc.launch(lambda: 1, ranks=2) == [1, 1]
