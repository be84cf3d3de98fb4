"""Ranks of one machine that share memory: what they tell each other when they differ, are late, slow, gone or far ahead."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshcomm as mc
from meshcomm import _torch
from meshcomm.runtime.process import boxes, lending, memory, neighbours
from meshcomm.runtime.transports import process_group
from meshcomm.runtime.transports.shared import at_once, transport, waiting
from meshcomm.runtime.transports.shared.call import Call
from meshcomm.runtime.transports.shared.transport import OneHostLink
from meshcomm.runtime.transports.shared.words import entry_of

LARGE = 200_000


def here(n: int = 4) -> mc.Mesh:
    return mc.make_mesh({"a": n})


def link_of(mesh: mc.Mesh) -> OneHostLink:
    link = mesh.axis("a").link
    assert isinstance(link, OneHostLink)
    return link


# --------------------------------------------------------------------------------------------------- disagreement

DIFFERENT: dict[str, tuple[Callable[[mc.Mesh], Any], Callable[[mc.Mesh], Any], str, str]] = {
    "operation": (
        lambda mesh: mc.all_reduce(torch.ones(3), "a", mesh=mesh),
        lambda mesh: mc.all_gather(torch.ones(3), "a", mesh=mesh),
        "all_reduce f32[3] (op='sum')", "all_gather f32[3] (dim=0)",
    ),
    "reduce op": (
        lambda mesh: mc.all_reduce(torch.ones(3), "a", mesh=mesh),
        lambda mesh: mc.all_reduce(torch.ones(3), "a", "max", mesh=mesh),
        "all_reduce f32[3] (op='sum')", "all_reduce f32[3] (op='max')",
    ),
    "size": (
        lambda mesh: mc.all_gather(torch.ones(3), "a", mesh=mesh),
        lambda mesh: mc.all_gather(torch.ones(4), "a", mesh=mesh),
        "all_gather f32[3] (dim=0)", "all_gather f32[4] (dim=0)",
    ),
    "dtype": (
        lambda mesh: mc.reduce_scatter(torch.ones(4), "a", mesh=mesh),
        lambda mesh: mc.reduce_scatter(torch.ones(4, dtype=torch.bfloat16), "a", mesh=mesh),
        "reduce_scatter f32[4] (dim=0, op='sum')", "reduce_scatter bf16[4] (dim=0, op='sum')",
    ),
    "barrier": (
        lambda mesh: mc.barrier("a", mesh=mesh),
        lambda mesh: mc.all_reduce(torch.ones(1), "a", mesh=mesh),
        "barrier", "all_reduce f32[1] (op='sum')",
    ),
}  # fmt: skip


def differ(what: str, later: bool) -> None:
    """Index 2 calls another thing than the others."""
    mesh = here()
    usual, other, said, otherwise = DIFFERENT[what]
    for _ in range(3):
        with pytest.raises(mc.CommError) as caught:
            (other if mesh.rank == 2 else usual)(mesh)
        text = str(caught.value)
        assert f"the ranks called different things: index 2 {otherwise}; indices 0, 1, 3 {said}." in text
        assert ("make the same calls in the same order" in text) != ("lengths of dim 0: 3 on indices 0, 1, 3" in text)
        # And the group works on.
        x = torch.arange(5.0) + mesh.rank
        work = mc.all_reduce(x, "a", mesh=mesh, async_op=True) if later else None
        assert mc.all_gather(x[:1], "a", mesh=mesh).tolist() == [0, 1, 2, 3]
        if work is not None:
            assert work.wait().tolist() == [6, 10, 14, 18, 22]


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "later"])
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_call_different_things_are_told(pool4: Any, what: str, later: bool) -> None:
    pool4.run(differ, what, later)


def other_roots() -> None:
    mesh = here()
    with pytest.raises(mc.CommError, match=r"broadcast f32\[2\] \(src=0\).*\n.*src=[01] here"):
        mc.broadcast(torch.ones(2), "a", 1 - mesh.rank % 2, mesh=mesh)
    assert mc.all_reduce(torch.ones(1), "a", mesh=mesh).item() == 4


def test_broadcasts_from_different_ranks(pool4: Any) -> None:
    """Each reads from an index that reads from another one."""
    pool4.run(other_roots)


ROOTED: dict[str, Callable[[mc.Mesh, int], Any]] = {
    "broadcast": lambda mesh, root: mc.broadcast(torch.ones(4), "a", root, mesh=mesh),
    "scatter": lambda mesh, root: mc.scatter(
        torch.ones(4, 2) if mesh.rank == root else None, "a", root, like=torch.ones(1, 2), mesh=mesh
    ),
    "gather": lambda mesh, root: mc.gather(torch.ones(4), "a", root, mesh=mesh),
    "reduce": lambda mesh, root: mc.reduce(torch.ones(4), "a", dst=root, mesh=mesh),
}


def another_root(name: str) -> list[str]:
    """Ranks 0 and 2 each give, or take, by themselves: they wait for nobody there, and are told at the next call."""
    mesh, told = here(), []
    for call in (lambda: ROOTED[name](mesh, 2 if mesh.rank == 2 else 0), *[lambda: mc.barrier("a", mesh=mesh)] * 3):
        try:
            call()
        except mc.CommError as error:
            told.append(str(error))
    assert mc.all_reduce(torch.ones(1), "a", mesh=mesh).item() == 4
    return told


@pytest.mark.parametrize("name", ROOTED)
def test_other_roots_are_told_to_those_who_wait_for_nobody(pool4: Any, name: str) -> None:
    for told in pool4.run(another_root, name):
        assert len(told) == 1
        assert re.search(rf"index 2 {name} .*=2\b.*; indices 0, 1, 3 {name} .*=0\b", told[0]), told


def wrong_lengths() -> None:
    """Index 0 sends 2 elements to index 1, which expects 3."""
    mesh = mc.make_mesh({"a": 2}, ranks=[0, 1])
    if dist.get_rank() > 1:
        return
    link = link_of(mesh)
    x = torch.arange(4.0)
    with pytest.raises(mc.CommError, match="index 0 sends 2 elements to index 1, which expects 3"):
        link.all_to_all(x, [2, 2], [2 + mesh.rank, 2])
    assert mc.all_reduce(torch.ones(1), "a", mesh=mesh).item() == 2


def test_an_all_to_all_of_other_lengths_than_expected(pool4: Any) -> None:
    pool4.run(wrong_lengths)


# --------------------------------------------------------------------------------------------- ahead and behind


def escaped(x: Tensor) -> Tensor:
    """What a transform has made, after its end: torch knows it, but not where it lies."""
    kept: list[Tensor] = []
    torch.func.grad(lambda y: (kept.append(2 * y), y.sum())[1])(x)
    return kept[0]


WRITTEN: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: torch.arange(float(LARGE)),
    "not a multiple of a part": lambda: torch.arange(lending.PART + 3.0),
    "small": lambda: torch.arange(5.0),
    "nothing": lambda: torch.ones(0),
    "much": lambda: torch.arange(2.0**21),
    "a parameter": lambda: torch.nn.Parameter(torch.arange(float(LARGE))),
    "a part of another one": lambda: torch.arange(2.0 * LARGE)[LARGE:],
    "not dense": lambda: torch.arange(2.0 * LARGE).view(2, -1).T,
    "every other one": lambda: torch.arange(2.0 * LARGE)[::2],
    "one value": lambda: torch.tensor(3.0).expand(LARGE),
    "negative": lambda: torch._neg_view(torch.arange(float(LARGE))),
    "conjugated": lambda: torch.complex(torch.arange(float(LARGE)), torch.ones(LARGE)).conj(),
    "zeros without memory": lambda: torch._efficientzerotensor((LARGE,)),
    "the end of many zeros without memory": lambda: torch._efficientzerotensor((2**23,))[-LARGE:],
    "copied when it is written to": lambda: torch._lazy_clone(torch.arange(float(LARGE))),
    "escaped from a transform": lambda: escaped(torch.arange(float(LARGE))),
    "half": lambda: torch.arange(LARGE).bfloat16(),
    "bool": lambda: torch.arange(LARGE) % 3 == 0,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_to_where_others_read_it(name: str) -> None:
    x = WRITTEN[name]()
    with torch.no_grad():
        into = torch.empty(x.shape, dtype=x.dtype)
        lending.put(into, x)
        assert torch.equal(into, x)
        if x.ndim == 1:  # where it is not dense, and as another dtype
            wide = torch.zeros(len(x), 2, dtype=torch.complex128)
            lending.put(wide[:, 0], x)
            assert torch.equal(wide[:, 0], x.to(wide.dtype))
            assert not wide[:, 1].any()


def test_who_writes_waits_for_no_other_thread() -> None:
    """It keeps Python's lock, which it would have to wait for after each part."""
    assert type(lending.copy)._flags_ == ctypes.PYFUNCTYPE(None)._flags_ != type(ctypes.memmove)._flags_


def test_a_transform_sees_what_is_written() -> None:
    def doubled(x: Tensor) -> Tensor:
        into = torch.zeros_like(x)
        lending.put(into, 2 * x)
        return into.sum()

    x = torch.arange(float(LARGE))
    assert torch.func.grad(doubled)(x).eq(2).all()
    assert torch.func.vmap(doubled)(x.expand(3, -1)).eq(2 * x.sum()).all()


def test_who_listens_is_woken() -> None:
    box = boxes.Arena(memory.create(boxes._ARENA)).make_box(7)
    heard = box.listen()
    assert box.sleep(heard, 0.01)  # nobody has rung
    for late in (0.0, 0.1):  # before it sleeps, and while it does
        heard, began = box.listen(), time.monotonic()
        timer = threading.Timer(late, box.ring)
        timer.start()
        if not late:
            timer.join()
        assert not box.sleep(heard, 0.99)
        assert time.monotonic() - began < 0.9
        timer.join()
    assert box.sleep(box.listen(), 0.01)
    box.ring()
    heard = box.cells[box.at(0) - boxes._ENTRIES_AT + boxes._BELL]
    box.ring()  # nobody listens any more
    assert heard == box.cells[box.at(0) - boxes._ENTRIES_AT + boxes._BELL]


def far_ahead(limit: float) -> None:
    """The source does not wait for who reads late, but waits before it writes over what was not read: rank 3 reads
    nothing before the source waits for it, or has given all without.
    """
    mesh = mc.make_mesh({"a": 4}, timeout=limit)
    count, store = boxes.ENTRIES + 200, _torch.default_store()
    key = f"far ahead {mesh.axis('a').link.mail.number} {limit}"
    more = waiting.Wait.more

    def seen(wait: Any, missing: Any) -> None:
        if mesh.rank == 0 and 3 in missing:
            store.set(key, "the source waits")
        more(wait, missing)

    if mesh.rank == 3:
        store.wait([key])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting.Wait, "more", seen)
        for number in range(count):
            assert mc.broadcast(torch.tensor([number + 0.5]), "a", 0, mesh=mesh).item() == number + 0.5
    if mesh.rank == 0:
        store.set(key, "all was given")
    if mesh.rank == 3:
        store.delete_key(key)


def test_a_rank_far_ahead(pool4: Any) -> None:
    pool4.run(far_ahead, 60.0)


def many_under_way() -> None:
    mesh = mc.make_mesh({"a": 2}, ranks=[0, 1])
    if dist.get_rank() > 1:
        return
    count = boxes.ENTRIES + 200
    works = [
        mc.all_reduce(torch.tensor([float(number), mesh.rank]), "a", mesh=mesh, async_op=True)
        for number in range(count)
    ]
    for number in reversed(range(count)) if mesh.rank % 2 else range(count):
        assert works[number].wait().tolist() == [2.0 * number, 1.0]


@pytest.mark.thorough
def test_more_works_under_way_than_a_mailbox_has_entries(pool4: Any) -> None:
    pool4.run(many_under_way)


def begun_before_a_message() -> None:
    """Rank 0 begins many calls and then sends what rank 1 waits for before its own."""
    mesh = mc.make_mesh({"a": 2}, ranks=[0, 1])
    if dist.get_rank() > 1:
        return
    x = torch.ones(1)
    if mesh.rank == 1:
        mc.recv("a", 0, shape=(1,), dtype=torch.float32, mesh=mesh)
    works = [mc.all_reduce(x, "a", mesh=mesh, async_op=True) for _ in range(1000)]
    if mesh.rank == 0:
        mc.send(x, "a", 1, mesh=mesh)
    assert sum(work.wait().item() for work in works) == 2000


def test_a_start_does_not_wait_for_the_others(pool4: Any) -> None:
    pool4.run(begun_before_a_message)


def late_reader() -> None:
    """Rank 0 needs nobody's wait for its own: the others wait only for what it does after that."""
    mesh = here()
    x = torch.arange(LARGE, dtype=torch.float64) * (mesh.rank + 1)
    work = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
    x.zero_()
    if mesh.rank == 0:
        y = work.wait()
        for other in (1, 2, 3):
            mc.send(torch.ones(1), "a", other, mesh=mesh)
    else:
        mc.recv("a", 0, shape=(1,), dtype=torch.float32, mesh=mesh)
        y = work.wait()
    assert torch.equal(y, torch.arange(LARGE, dtype=torch.float64) * 10)


def test_a_wait_depends_on_calls_and_not_on_waits(pool4: Any) -> None:
    pool4.run(late_reader)


def one_waits_later() -> None:
    mesh = here()
    x = torch.arange(LARGE, dtype=torch.float32) + mesh.rank
    for turn in range(8):
        if mesh.rank == turn % 4:
            work = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
            time.sleep(0.01)
            y = work.wait()
        else:
            y = mc.all_reduce(x, "a", mesh=mesh)
        assert torch.equal(y, 4 * torch.arange(LARGE, dtype=torch.float32) + 6)


def test_at_once_where_another_waits_later(pool4: Any) -> None:
    pool4.run(one_waits_later)


# ----------------------------------------------------------------------------------------------------- memory


def lent() -> tuple[int, int]:
    return len(lending.room._segments), len(os.listdir("/proc/self/fd"))


def memory_comes_back() -> None:
    mesh = here()
    mc.barrier("a", mesh=mesh)
    x = torch.ones(LARGE)
    for _ in range(20):
        mc.all_reduce(x, "a", mesh=mesh)
    before = lent()
    for _ in range(100):
        mc.all_reduce(x, "a", mesh=mesh)
        mc.all_gather(x[:1000], "a", mesh=mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mc.reduce_scatter(x, "a", mesh=mesh, async_op=True)  # dropped
    for _ in range(5):
        mc.barrier("a", mesh=mesh)
    after = lent()
    assert after[0] <= before[0] + 12, (before, after)
    assert after[1] <= before[1] + 60, (before, after)
    mail = link_of(mesh).mail
    assert len(mail.open) + len(mail.dropped) <= 2


def test_memory_is_used_again_also_that_of_dropped_works(pool4: Any) -> None:
    pool4.run(memory_comes_back)


def differs_late(folder: str) -> list[float]:
    """Rank 1 calls another thing than the others, when rank 0 has lent that memory again, to rank 1 too."""
    mesh, x = here(), torch.ones(LARGE)

    def say(what: str) -> None:
        (Path(folder) / what).touch()

    def wait(*whats: str) -> None:
        end = time.monotonic() + 60
        while not all((Path(folder) / what).exists() for what in whats):
            assert time.monotonic() < end, whats
            time.sleep(1e-3)

    def broadcast(value: float) -> float:
        return float(mc.broadcast(torch.full((LARGE,), value), "a", src=0, mesh=mesh).max())

    mc.barrier("a", mesh=mesh)
    if mesh.rank == 1:
        wait("lent again")
        with pytest.raises(mc.CommError, match="different things"):
            broadcast(0.0)
        say("told")
        wait("lent once more")
        return [broadcast(0.0), broadcast(0.0)]
    mc.permute(x, "a", [(0, 2)], mesh=mesh)
    say(f"read {mesh.rank}")
    wait("read 2")
    broadcast(22.0)
    say(f"read again {mesh.rank}")
    if mesh.rank == 0:
        wait("read again 2", "read again 3")
        say("lent again")
        wait("told")
    with pytest.raises(mc.CommError, match="different things"):
        broadcast(33.0)
    if mesh.rank == 0:
        say("lent once more")
    return [22.0, 33.0]


def test_what_was_not_lent_in_a_call_that_differs_is_not_returned(pool4: Any, tmp_path: Path) -> None:
    assert pool4.run(differs_late, str(tmp_path)) == 4 * [[22.0, 33.0]]


def unread(name: str) -> None:
    """Rank 1 does not read what the others have lent to it, for it has called another thing."""
    mesh, x = here(), torch.ones(LARGE)
    mc.barrier("a", mesh=mesh)
    mail = link_of(mesh).mail
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lending, "room", lending.Room())
        if mesh.rank == 1:
            end = time.monotonic() + 60
            while any(entry_of(mail.box(i), mail.number + 1) is None for i in mail.others):
                assert time.monotonic() < end
                time.sleep(1e-3)
            with pytest.raises(mc.CommError, match="different things"):
                mc.broadcast(x, "a", src=1, mesh=mesh) if name == "gives" else mc.permute(x, "a", [(0, 1)], mesh=mesh)
        else:
            with pytest.raises(mc.CommError, match="different things"):
                mc.all_gather(x, "a", mesh=mesh)
        mc.barrier("a", mesh=mesh)
        assert not lending.room.wanted()


@pytest.mark.parametrize("name", ["gives", "takes"])
def test_what_is_lent_for_a_call_that_differs_comes_back(pool4: Any, name: str) -> None:
    pool4.run(unread, name)


def test_who_is_interrupted_while_it_lends_has_lent_nothing() -> None:
    def places() -> Iterator[int]:
        yield 1
        raise KeyboardInterrupt

    room = lending.Room()
    with pytest.raises(KeyboardInterrupt):
        room.lend(10, places(), [], patient=False)
    assert all(segment.is_free() for segment in room._small)


def test_pages_that_a_program_does_not_go_on_with_are_given_back() -> None:
    room, mib = lending.Room(), 2**20

    def pages(segment: lending.Segment) -> int:
        return 512 * os.fstat(segment.fd).st_blocks

    def lend(nbytes: int) -> lending.Segment:
        lent = room.lend(nbytes, (0,), (), patient=False)
        lent.part(nbytes, torch.uint8).fill_(7)
        return lent

    first, still_read, small = lend(3 * mib), lend(3 * mib), lend(mib)
    first.returned(0)
    small.returned(0)
    for _ in range(2):  # with the three and one MiB that came after it not yet twice as much
        lend(mib).returned(0)
        assert pages(first) > 3 * mib
    lend(mib).returned(0)
    assert pages(first) == lending.PAGE
    assert not first.touched
    assert pages(small) > mib  # it is what the program goes on with
    assert bool((still_read.part(3 * mib, torch.uint8) == 7).all())
    assert lend(3 * mib) is first
    assert first.is_free() is False
    first.returned(0)
    for _ in range(12):  # what was come back to is kept longer
        lend(mib).returned(0)
    assert pages(first) > 3 * mib
    for segment in (first, still_read, small):
        os.close(segment.fd)


FIRST_CALLS: dict[str, Callable[[Tensor, mc.Mesh], object]] = {
    "all_reduce": lambda x, mesh: mc.all_reduce(x, "b", mesh=mesh),
    "all_gather": lambda x, mesh: mc.all_gather(x, "b", mesh=mesh),
    "reduce_scatter": lambda x, mesh: mc.reduce_scatter(x, "b", mesh=mesh),
    "all_to_all": lambda x, mesh: mc.all_to_all(x, "b", 0, 0, mesh=mesh),
    "broadcast": lambda x, mesh: mc.broadcast(x, "b", 1, mesh=mesh),
    "gather": lambda x, mesh: mc.gather(x, "b", 0, mesh=mesh),
    "shift": lambda x, mesh: mc.shift(x, "b", mesh=mesh),
    "later": lambda x, mesh: mc.all_reduce(x, "b", mesh=mesh, async_op=True).wait(),
}


def ends_late(name: str, n: int, last: int) -> None:
    """What rank 1 lends in its first call has been read, and another thread of it makes a second call before the first
    one is over; rank ``last`` reads the second when rank 1 has made a third.
    """
    mesh, apart = mc.make_mesh({"a": 2, "b": 2}), here()
    axis = "a" if last == 3 else ("a", "b")  # rank 1 has another place there than in "b", and the same one
    works: list[Any] = []
    x, end = torch.full((n,), 1 + mesh.rank), Call._end
    now = time.monotonic

    def begin(factor: int) -> None:
        works.append(mc.all_reduce(factor * x, axis, mesh=mesh, async_op=True))

    def begin_beside(lent: Any) -> None:
        if not works and lent is not None and mesh.rank == 1:
            limit = now() + 60
            while lent.flags[0]:  # of the reader
                assert now() < limit
                time.sleep(1e-3)
            thread = threading.Thread(target=begin, args=(1,))
            thread.start()
            thread.join()

    def end_late(call: Call, taken_back: bool = False) -> None:
        begin_beside(call._lent)
        end(call, taken_back)

    def end_late_at_once() -> float:
        seen = sys._getframe(1).f_locals
        if "result" in seen:  # asked when it has been read
            begin_beside(seen["lent"])
        return now()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lending, "room", lending.Room())
        patch.setattr(Call, "_end", end_late)
        patch.setattr(at_once, "monotonic", end_late_at_once)
        FIRST_CALLS[name](x, mesh)
        if mesh.rank != 1:
            begin(1)
        total = 6 if axis == "a" and mesh.rank % 2 else 4 if axis == "a" else 10
        for turn in range(2):
            if (mesh.rank == last) == turn:
                assert torch.equal(works[0].wait(), torch.full((n,), total))
            mc.barrier("a", mesh=apart)
            if not turn:
                begin(100)
            mc.barrier("a", mesh=apart)
        assert torch.equal(works[1].wait(), torch.full((n,), 100 * total))


@pytest.mark.parametrize("name", FIRST_CALLS)
@pytest.mark.parametrize(("n", "last"), [(8, 1), (8, 3), (30_000, 1), (30_000, 3)])
def test_memory_is_not_lent_again_before_its_call_is_over(pool4: Any, name: str, n: int, last: int) -> None:
    pool4.run(ends_late, name, n, last)


def beyond_what_is_kept() -> None:
    """Segments that are not kept are closed when they were read."""
    mesh = here()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lending, "_KEEP", 0)
        patch.setattr(lending, "room", lending.Room())
        for length in (10, LARGE, 10, 3 * LARGE, LARGE):
            x = torch.full((length,), float(mesh.rank))
            assert torch.equal(mc.all_reduce(x, "a", mesh=mesh), torch.full((length,), 6.0))
        mc.barrier("a", mesh=mesh)
        assert not any(segment.kept for segment in lending.room._segments)
        assert len(lending.room._segments) <= 3
        mc.barrier("a", mesh=mesh)
        assert not lending.room.wanted()


def test_memory_beyond_what_is_kept(pool4: Any) -> None:
    pool4.run(beyond_what_is_kept)


def nothing_is_held(name: str) -> None:
    """What a call has used goes with it, and not when the garbage is collected."""
    mesh = here()
    call = {
        "all_reduce": lambda x: mc.all_reduce(x, "a", mesh=mesh),
        "all_to_all": lambda x: mc.all_to_all(x, "a", 0, 0, mesh=mesh),
        "later": lambda x: mc.all_reduce(x, "a", mesh=mesh, async_op=True).wait(),
    }[name]
    gc.collect()
    gc.disable()
    try:
        x = torch.ones(LARGE)
        given, got = weakref.ref(x), weakref.ref(call(x))
        del x
        assert given() is None
        assert got() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["all_reduce", "all_to_all", "later"])
def test_a_call_holds_nothing_when_it_is_over(pool4: Any, name: str) -> None:
    pool4.run(nothing_is_held, name)


def begun_in_another_mode() -> None:
    """What was begun in inference mode and dropped is no business of what comes after."""
    mesh = here()
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mc.all_reduce(torch.ones(3), "a", mesh=mesh, async_op=True)
        kept = mc.all_reduce(torch.ones(3), "a", mesh=mesh, async_op=True)
    for _ in range(2):
        mc.barrier("a", mesh=mesh)
    g = torch.func.grad(lambda x: mc.all_reduce(x, "a", mesh=mesh).sum())(torch.ones(2))
    assert g.tolist() == [1, 1]
    assert kept.wait().tolist() == [4.0] * 3
    mc.barrier("a", mesh=mesh)
    assert not link_of(mesh).mail.dropped


def test_works_of_another_mode(pool4: Any) -> None:
    pool4.run(begun_in_another_mode)


def failed_backwards() -> None:
    """A backward pass that ends between the two nodes of a collective leaves nothing open."""
    mesh = here()

    def fails(_: Tensor) -> None:
        raise ZeroDivisionError

    for _ in range(3):
        x = torch.ones(1000, requires_grad=True)
        work = mc.all_gather(x, "a", mesh=mesh, async_op=True)
        z = 2 * x
        z.register_hook(fails)
        y = work.wait()
        with pytest.raises(ZeroDivisionError):
            (y.sum() + z.sum()).backward()
        del x, y, z, work
        gc.collect()
    for _ in range(3):
        mc.barrier("a", mesh=mesh)
    assert len(link_of(mesh).mail.open) <= 1


def test_backward_passes_that_fail(pool4: Any) -> None:
    pool4.run(failed_backwards)


# ------------------------------------------------------------------------------------------- ends and failures


def changed_afterwards() -> list[float] | None:
    """Rank 0 gives up, changes its input and leaves; what the others get is made of what it was."""
    mesh = here(3)
    mc.barrier("a", mesh=mesh)
    x = torch.ones(LARGE)
    if mesh.rank == 0:
        link_of(mesh).mail.timeout = 0.3
        with pytest.raises(mc.CommError, match="did not come within"):
            mc.all_reduce(x, "a", mesh=mesh)
        x.fill_(1000)
        for other in (1, 2):
            mc.send(torch.ones(1), "a", other, mesh=mesh)
        mc.shutdown()
        return None
    mc.recv("a", 0, shape=(1,), dtype=torch.float32, mesh=mesh)
    found: list[float] = mc.all_reduce(x, "a", mesh=mesh).unique().tolist()
    return found


def test_an_input_changed_after_a_time_out() -> None:
    assert mc.launch(changed_afterwards, ranks=3, runtime="processes", timeout=280) == [None, [3.0], [3.0]]


def with_a_child(what: str) -> list[float]:
    """A forked child is another process: it cannot speak for its parent."""
    mesh = here(2)
    mc.barrier("a", mesh=mesh)
    if mesh.rank == 0:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                signal.alarm(20)
                mc.shutdown() if what == "shutdown" else mc.broadcast(torch.full((3,), 99.0), "a", 0, mesh=mesh)
            os._exit(0)
        os.waitpid(child, 0)
    return [mc.broadcast(torch.full((3,), value), "a", 0, mesh=mesh)[0].item() for value in (1.0, 2.0)]


@pytest.mark.parametrize("what", ["shutdown", "call"])
def test_a_forked_child(what: str) -> None:
    assert mc.launch(with_a_child, ranks=2, args=(what,), runtime="processes", timeout=280) == [[1.0, 2.0]] * 2


def read_after_the_end(_: None = None) -> float:
    """The source's function is over before the others wait."""
    mesh = here(3)
    x = torch.full((LARGE,), 7.0 if mesh.rank == 0 else 0.0)
    work = mc.broadcast(x, "a", 0, mesh=mesh, async_op=True)
    if mesh.rank:
        time.sleep(0.5)
    return work.wait()[-1].item()


def test_what_was_lent_is_read_after_the_lender_has_finished() -> None:
    assert mc.launch(read_after_the_end, ranks=3, runtime="processes", timeout=280) == [7.0] * 3


def killed(folder: str, polled: bool) -> None:
    mesh = here(3)
    mc.barrier("a", mesh=mesh)
    if mesh.rank == 2:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        work = mc.all_reduce(torch.ones(LARGE), "a", mesh=mesh, async_op=True)
        while polled and not work.done():
            time.sleep(0.01)
        work.wait()
    except mc.CommError as error:
        Path(folder, f"{mesh.rank}.told").write_text(f"{time.monotonic() - begin:.1f} {error}")
        raise


@pytest.mark.parametrize("polled", [False, True], ids=["waited-for", "polled"])
def test_a_killed_rank_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, polled: bool) -> None:
    monkeypatch.setattr("meshcomm.runtime.start.workers._PROMPT", 250.0)  # the launch would end the others at once
    with pytest.raises(mc.CommError):
        mc.launch(killed, ranks=3, args=(str(tmp_path), polled), runtime="processes", timeout=280)
    found = [file.read_text() for file in tmp_path.glob("*.told")]
    assert len(found) == 2
    for text in found:
        assert "index 2 has ended" in text
        assert float(text.split()[0]) < 100


def too_late() -> str:
    mesh = here(2)
    mc.barrier("a", mesh=mesh)
    told = ""
    if mesh.rank == 0:
        link_of(mesh).mail.timeout = 0.3
        with pytest.raises(mc.CommError) as caught:
            mc.all_reduce(torch.ones(2), "a", mesh=mesh)
        told = str(caught.value)
        link_of(mesh).mail.timeout = 60
        mc.send(torch.ones(1), "a", 1, mesh=mesh)
    else:
        mc.recv("a", 0, shape=(1,), dtype=torch.float32, mesh=mesh)
        mc.all_reduce(torch.ones(2), "a", mesh=mesh)  # what index 0 has lent is still there
    assert waited_out(mesh) == 2
    assert mc.all_reduce(torch.ones(1), "a", mesh=mesh).item() == 2
    return told


def waited_out(mesh: mc.Mesh) -> float:
    """A work whose time is up, be it the mesh's own, names who is missing, and can be waited for again."""
    if mesh.rank == 1:
        mc.recv("a", 0, shape=(1,), dtype=torch.float32, mesh=mesh)
        return mc.all_reduce(torch.ones(1), "a", mesh=mesh).item()
    work = mc.all_reduce(torch.ones(1), "a", mesh=mesh, async_op=True)
    link_of(mesh).mail.timeout = 0.3
    for timeout in (0.05, None):
        with pytest.raises(mc.CommError, match="index 1 has not made the call"):
            work.wait(timeout)
    link_of(mesh).mail.timeout = 60
    mc.send(torch.ones(1), "a", 1, mesh=mesh)
    value = work.wait(20).item()
    with pytest.raises(mc.MeshError, match="timeout='x' is not a number of seconds"):
        work.wait("x")  # type: ignore[arg-type]
    return value


def test_who_does_not_come_is_named_and_the_group_goes_on() -> None:
    told, _ = mc.launch(too_late, ranks=2, runtime="processes", timeout=280)
    assert "all_reduce" in told
    assert "index 1 did not come within 0.3 s" in told


# ------------------------------------------------------------------------------------------------------- where


def switched_off() -> str:
    mesh = here(2)
    assert mc.all_reduce(torch.ones(LARGE), "a", mesh=mesh)[0].item() == 2
    return type(mesh.axis("a").link).__name__


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mc.launch(switched_off, ranks=2, runtime="processes") == ["OneHostLink"] * 2
    monkeypatch.setenv(neighbours.SWITCH, "0")
    assert mc.launch(switched_off, ranks=2, runtime="processes") == ["ProcessLink"] * 2


def unseen() -> str:
    return switched_off()


def test_all_ranks_send_messages_where_one_cannot_see_the_memory() -> None:
    """One rank of a world says that it shares nothing."""
    assert mc.launch(one_alone, ranks=2, runtime="processes") == ["ProcessLink"] * 2


def one_alone() -> str:
    rank = mc.make_mesh({"a": -1}).rank
    port = mc.all_reduce(torch.tensor(free_port() if rank == 0 else 0), "a", mesh=mc.make_mesh({"a": -1})).item()
    mc.shutdown()
    if rank == 1:
        os.environ[neighbours.SWITCH] = "0"
    mc.init(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=200)
    return unseen()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port


def adopted() -> list[str]:
    """A group that torch made; rank 1 forgets it and takes it up again, rank 0 does not."""
    rank = mc.make_mesh({"a": -1}).rank
    port = mc.all_reduce(torch.tensor(free_port() if rank == 0 else 0), "a", mesh=mc.make_mesh({"a": -1})).item()
    mc.shutdown()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh, found = here(2), []
    for _ in range(3):
        if rank == 1:
            mc.shutdown()
            mesh = here(2)
        for length in (3, LARGE):
            y: Tensor = mc.all_reduce(torch.full((length,), rank + 1.0), "a", mesh=mesh)
            assert torch.equal(y, torch.full((length,), 3.0))
        found.append(type(mesh.axis("a").link).__name__)
        dist.barrier()
    return found


def test_an_adopted_group() -> None:
    assert mc.launch(adopted, ranks=2, runtime="processes", timeout=280) == [["OneHostLink"] * 3] * 2


def test_addresses_are_of_this_machine() -> None:
    mine = neighbours.Address.mine()
    assert neighbours.Address.read(mine.write()) == mine
    elsewhere = mine._replace(machine="another")
    for others, share in (((mine, mine), True), ((mine, elsewhere), False), ((elsewhere,), True)):
        assert neighbours.Neighbours("", others).share() is share
    nobody = neighbours.Address("", mine.lease)
    assert not neighbours.Neighbours("", (nobody, nobody)).share()
    gone = mine._replace(lease=mine.lease._replace(serial=1))
    assert not neighbours.Neighbours("", (mine, gone)).are_seen(0)
    assert neighbours.Neighbours("", (mine, mine)).are_seen(0)
    assert neighbours.Neighbours("", (mine, gone._replace(machine="another"))).are_seen(0)


def test_few_enough_readers() -> None:
    assert process_group.FEW <= memory.READERS
    assert transport._ONE_STEP > 0


@pytest.mark.parametrize("size", [3, 4, 7])
def test_the_longest_part_has_room(size: int) -> None:
    """Behind what is lent, to the last byte: a rank's part of a sum that not all parts are equal of."""
    link = SimpleNamespace(size=size)
    for length in range(3 * size):
        for dtype in (torch.uint8, torch.float32, torch.complex128):
            x = torch.empty(length, dtype=dtype)
            assert OneHostLink._spare(link, x) >= max(part.nbytes for part in x.tensor_split(size))  # type: ignore[arg-type]
