"""What ends a wait: an error of this rank or of another, and a time-out, after which one waits again."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

import meshcomm as mc
from meshcomm.runtime.pending import Pending, TimedOutError
from meshcomm.work import Work

if TYPE_CHECKING:
    pass
from works import BIG, F32, Run4, awaited, by_hand, data, equal, go, line_of, mesh4, warm

# ----------------------------------------------------------------------------------------------------------- errors


def every_way_of_waiting(work: Work[Any]) -> list[Exception]:
    """What each of them raises."""
    follow = work.then(torch.sum)
    after = follow.then(torch.sum)

    found: list[Exception] = []
    for wait in (
        work.wait,
        lambda: work.wait(5),
        lambda: mc.wait({"x": [1, work]}),
        after.wait,
        follow.wait,
        lambda: asyncio.run(awaited(work)),
        lambda: asyncio.run(awaited(after)),
        lambda: by_hand(awaited(work)),
    ):
        with pytest.raises(mc.CommError) as caught:
            wait()
        found.append(caught.value)
    assert work.done()
    assert after.done()
    return found


def one_differs(first: bool) -> list[str]:
    mesh = mesh4()
    odd = 0 if first else 3
    texts = []
    for tree in (False, True):
        x = torch.ones(3 if mesh.rank == odd else 4)
        try:
            work = mc.all_reduce([x] if tree else x, "a", mesh=mesh, async_op=True)
        except mc.CommError as error:  # who comes when it is known is told at the call
            texts.append(str(error))
            continue
        errors = every_way_of_waiting(work)
        assert len({id(error) for error in errors}) == 1
        texts.append(str(errors[0]))
    equal(mc.all_reduce(torch.ones(2), "a", mesh=mesh), torch.full((2,), 4.0), "afterwards")
    return texts


@pytest.mark.parametrize("first", [True, False])
def test_a_mismatch_reaches_every_waiter(first: bool) -> None:
    for texts in mc.launch(one_differs, ranks=4, args=(first,)):
        assert len(texts) == 2
        for text in texts:
            assert "ranks of one axis made different calls" in text
            assert re.search(r"called all_reduce .*f32\[3\] \(op='sum'\)", text)
            assert re.search(r"called all_reduce .*f32\[4\] \(op='sum'\)", text)


def messages_that_do_not_fit() -> None:
    mesh = mesh4()
    if mesh.rank == 0:
        work: Work[Any] = mc.send(torch.ones(3), "a", 1, mesh=mesh, async_op=True)
    elif mesh.rank == 1:
        work = mc.recv("a", 0, shape=(4,), dtype=F32, mesh=mesh, async_op=True)
    else:
        return
    for error in every_way_of_waiting(work):
        assert "a message from 0 to 1 does not fit" in str(error)


def test_a_message_that_does_not_fit_reaches_every_waiter() -> None:
    mc.launch(messages_that_do_not_fit, ranks=4)


def one_fails() -> None:
    mesh = mesh4()
    work = mc.all_gather(torch.ones(2), "a", mesh=mesh, async_op=True)
    if mesh.rank == 2:
        work.wait()
        raise ValueError("boom")
    if mesh.rank == 1:
        mc.recv("a", 2, shape=(1,), dtype=F32, mesh=mesh, async_op=True).wait()
    work.wait()
    mc.barrier("a", mesh=mesh, async_op=True).wait()


def test_a_rank_that_fails_ends_those_that_wait() -> None:
    with pytest.raises(ValueError, match="boom"):
        mc.launch(one_fails, ranks=4)


def several_threads(kind: str) -> None:
    """Which of them gets the result does not matter: all have it, it is one object, and no thread is left behind."""
    mesh = mesh4()
    warm(mesh)
    r = mesh.rank
    small, large = data(4, seed=r), data(BIG // 2, seed=r)
    begin: Callable[[], Work[Any]] = {
        "all_reduce": lambda: mc.all_reduce(small, "a", mesh=mesh, async_op=True),
        "large all_reduce": lambda: mc.all_reduce(large, "a", mesh=mesh, async_op=True),
        "large all_gather": lambda: mc.all_gather(large, "a", mesh=mesh, async_op=True),
        "shift": lambda: mc.shift(small, "a", mesh=mesh, async_op=True),
    }[kind]
    expected = begin().wait()
    before = set(threading.enumerate())
    if r == 0:
        work, found = begin(), []
        waits = work.wait, lambda: work.wait(60), lambda: asyncio.run(awaited(work)), work.wait
        waiting = [threading.Thread(target=lambda wait=wait: found.append(wait()), daemon=True) for wait in waits]
        for thread in waiting:
            thread.start()
            assert not work.done()
        with pytest.raises(mc.CommError, match=rf"{kind.split()[-1]}: not done after"):
            work.wait(0.02)  # while others hold it
        go(mesh)
        for thread in waiting:
            thread.join()
        assert len(found) == 4
        assert all(y is found[0] for y in found)
        equal(found[0], expected, "in a thread")
        assert work.done()
    else:
        go(mesh)
        begin().wait()
    mc.barrier("a", mesh=mesh)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread.name


@pytest.mark.parametrize("kind", ["all_reduce", "large all_reduce", "large all_gather", "shift"])
def test_several_threads_wait_for_one_work(pool4: Any, kind: str) -> None:
    pool4.run(several_threads, kind)


# --------------------------------------------------------------------------------------------------------- time-outs


def runs_out(kind: str) -> list[str]:
    """Rank 0 waits before the others have been let go; then again, when they come."""
    mesh = mesh4()
    warm(mesh)
    r = mesh.rank
    kinds: dict[str, Callable[[], Work[Any]]] = {
        "all_reduce": lambda: mc.all_reduce(data(2, 3, seed=r), "a", mesh=mesh, async_op=True),  # timed all_reduce
        "large": lambda: mc.all_reduce(data(BIG, seed=r), "a", mesh=mesh, async_op=True),  # timed large
        "all_gather": lambda: mc.all_gather(data(BIG, seed=r).bfloat16(), "a", mesh=mesh, async_op=True),  # timed all_gather
        "tree": lambda: mc.reduce_scatter([data(4, seed=r)], "a", mesh=mesh, async_op=True),  # timed tree
        "shift": lambda: mc.shift(data(3, seed=r), "a", mesh=mesh, async_op=True),  # timed shift
        "barrier": lambda: mc.barrier("a", mesh=mesh, async_op=True),  # timed barrier
        "exchange": lambda: mc.exchange([(data(3), (r + 1) % 4)], [((r - 1) % 4, (3,), F32)], "a", mesh=mesh, async_op=True),  # timed exchange
    }  # fmt: skip
    begin = kinds[kind]
    expected = begin().wait()
    texts = []
    if r == 0:
        work = begin()
        follow = work.then(lambda y: y)
        waits: list[Callable[[], Any]] = [lambda: work.wait(0.03), lambda: work.wait(0), lambda: follow.wait(0.01)]
        waits.append(lambda: mc.wait([1, work], timeout=0.01))
        for wait in waits:
            with pytest.raises(mc.CommError) as caught:
                wait()
            texts.append(str(caught.value))
        assert not work.done()
        go(mesh)
        y = work.wait(60)
        assert follow.wait() is work.wait() is y
    else:
        go(mesh)
        y = begin().wait()
    equal(y, expected, f"{kind} on rank {r}")
    equal(begin().wait(), expected, f"another {kind} on rank {r}")
    return texts


NAMED = {
    "all_reduce": ("all_reduce", r" f32\[2, 3\]"), "large": ("all_reduce", rf" f32\[{BIG}\]"), "all_gather": ("all_gather", rf" bf16\[{BIG}\]"),
    "tree": ("reduce_scatter", ""), "shift": ("shift", r" f32\[3\]"), "barrier": ("barrier", ""), "exchange": ("exchange", ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMED)
def test_a_time_out_is_told_and_can_be_waited_again(run4: Run4, kind: str) -> None:
    what, shape = NAMED[kind]
    texts, *others = run4(runs_out, kind)
    assert others == [[], [], []]
    seconds = r"[\d.e+-]+ s"
    for text in texts:
        pattern = (
            rf"meshcomm\.{what}: not done after {seconds} of waiting, {seconds} after it began\.\n"
            rf"  got: {what}{shape}.* over 'a' at test_work_errors\.py:{line_of(f'timed {kind}', __file__)}"
            r"(; index 3 has not made the call|; indices 1, 2, 3 have not made the call)?\n"
            r"  fix: wait again, nothing is lost; .*py-spy dump --pid"
        )
        assert re.fullmatch(pattern + ".*", text, re.DOTALL), text
    assert len(texts) == 4


def recv_runs_out() -> str:
    """A message that comes after the time-out is the one that is received, and none is lost."""
    mesh = mesh4()
    text = ""
    if mesh.rank == 0:
        work = mc.recv("a", 1, shape=(2,), dtype=F32, mesh=mesh, async_op=True)  # timed recv
        other = mc.recv("a", 1, shape=(2,), dtype=F32, mesh=mesh, async_op=True)
        for _ in range(2):
            with pytest.raises(mc.CommError) as caught:
                work.wait(0.02)
            text = str(caught.value)
        go(mesh)
        assert work.wait(60).tolist() == [1.0, 1.0]
        assert other.wait().tolist() == [2.0, 2.0]
    else:
        go(mesh)
    if mesh.rank == 1:
        for value in (1.0, 2.0):
            mc.send(torch.full((2,), value), "a", 0, mesh=mesh)
    mc.barrier("a", mesh=mesh)
    return text


def test_recv_with_a_time_out(run4: Run4) -> None:
    text = run4(recv_runs_out)[0]
    assert text.startswith("meshcomm.recv: not done after")
    assert f"over 'a' at test_work_errors.py:{line_of('timed recv', __file__)}" in text


BAD_TIMES: tuple[Any, ...] = (-1, -0.5, float("nan"), "1", True, [1], torch.tensor(1.0), -float("inf"))


def bad_times() -> None:
    mesh = mesh4()
    work = mc.all_reduce(torch.ones(2), "a", mesh=mesh, async_op=True)
    for bad in BAD_TIMES:
        for wait in (work.wait, lambda bad: mc.wait([work], bad), lambda bad: mc.wait(3, bad)):
            with pytest.raises(mc.MeshError, match=r"timeout=.* is not a number of seconds") as caught:
                wait(bad)
            assert "fix: a number from 0 on, or None" in str(caught.value)
    equal(work.wait(), torch.full((2,), 4.0), "none the worse")


def test_a_time_out_that_is_none(run4: Run4) -> None:
    run4(bad_times)


def patience(log: list[int]) -> None:
    mesh = mesh4()
    x = torch.ones(1)
    if mesh.rank == 3:
        go(mesh)
        mc.all_reduce(x, "a", mesh=mesh)
        return
    work = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
    with pytest.raises(mc.CommError, match="not done"):
        work.wait([90, 70, 80][mesh.rank])
    log.append(mesh.rank)
    go(mesh)
    assert work.wait().item() == 4


@pytest.mark.timeout(60)  # less than any of the three
def test_among_ranks_of_one_process_the_shortest_time_out_comes_first_and_takes_no_time() -> None:
    log: list[int] = []
    mc.launch(patience, ranks=4, args=(log,))
    assert log == [1, 2, 0]


def someone_can_still_act() -> float:
    """Rank 0 waits for ever, rank 1 does not: it is told first, and lets rank 0 go on."""
    mesh = mc.make_mesh({"a": 2})
    if mesh.rank == 0:
        return mc.recv("a", 1, shape=(), dtype=F32, mesh=mesh).item()
    work = mc.recv("a", 0, shape=(), dtype=F32, mesh=mesh, async_op=True)
    with pytest.raises(mc.CommError, match="not done"):
        work.wait(1000)
    mc.send(torch.tensor(5.0), "a", 0, mesh=mesh)
    with pytest.raises(mc.CommError, match="deadlock"):  # rank 0 has returned
        work.wait()
    with pytest.raises(mc.CommError, match="deadlock"):
        work.wait(1)
    return 0.0


def test_a_time_out_comes_before_a_deadlock() -> None:
    assert mc.launch(someone_can_still_act, ranks=2) == [5.0, 0.0]


def never_gives_up() -> None:
    mesh = mc.make_mesh({"a": 2})
    if mesh.rank == 1:
        return
    work = mc.all_reduce(torch.ones(1), "a", mesh=mesh, async_op=True)
    while True:
        try:
            work.wait(1)
        except mc.CommError as error:
            if "deadlock" in str(error):
                raise


def test_waiting_again_and_again_for_nobody_is_a_deadlock() -> None:
    with pytest.raises(mc.CommError, match="deadlock") as caught:
        mc.launch(never_gives_up, ranks=2)
    assert "rank 1 has returned" in str(caught.value)


# ----------------------------------------------------------------------------------------------------- interrupted


class Soon(Pending):
    """What another thread says, when somebody waits for it."""

    bare = True

    def __init__(self) -> None:
        self.asked, self.here = threading.Event(), threading.Event()

    def wait(self, timeout: float | None) -> Any:
        self.asked.set()
        if not self.here.wait(timeout):
            raise TimedOutError
        return 7

    def abandon(self) -> None: ...


def test_another_thread_waits_for_what_one_was_interrupted_in() -> None:
    """Wherever Ctrl-C comes: where a call begins, and where one of C's is over."""
    for door in range(100):
        source, left = Soon(), door
        source.here.set()
        work: Work[int] = Work(source)

        def arrive(frame: Any, event: str, _: Any) -> None:
            nonlocal left
            if event in ("call", "c_return") and frame.f_code in (Work.wait.__code__, Soon.wait.__code__):
                left -= 1
                if left < 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        before = sys.getprofile()
        sys.setprofile(arrive)
        try:
            work.wait()
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.setprofile(before)
        found: list[int] = []
        other = threading.Thread(target=lambda work=work, found=found: found.append(work.wait(5)))
        other.start()
        other.join()
        assert found == [7], door
    assert 3 < door < 100


def test_who_waits_in_vain_for_another_thread_that_waits_leaves_it_alone() -> None:
    source = Soon()
    work: Work[int] = Work(source)
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(work.wait()))
    other.start()
    assert source.asked.wait(30)
    for _ in range(2):
        with pytest.raises(mc.CommError, match="not done after"):
            work.wait(0.01)
    source.here.set()
    other.join()
    assert found == [7]
    assert work.wait() == 7
