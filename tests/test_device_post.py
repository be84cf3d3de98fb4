"""What an accelerator's backend would be asked for, which matches messages by order: a stand-in for NCCL, on the CPU."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from later import for_later
from stand_in import Stream, stand_in
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import meshcomm as mc
from meshcomm import _torch
from meshcomm.collectives import messages
from meshcomm.runtime.call import Post, Want
from meshcomm.runtime.hooks.stack import Hook, Running, put_on
from meshcomm.runtime.pending import Pending, TimedOutError, begin_all, queued
from meshcomm.runtime.process import accelerator
from meshcomm.runtime.recorder import Log
from meshcomm.runtime.transports import device_post, group_link
from meshcomm.runtime.transports.process_group import ProcessLink

CPU = torch.device("cpu")


class Done:
    """A work that is done when everything has come."""

    def __init__(self, missing: list[Any]) -> None:
        self.missing, self.waits = missing, 0

    def is_completed(self) -> bool:
        return not self.missing

    def wait(self, timeout: Any = None) -> None:
        self.waits += 1
        assert self.is_completed(), "a device would stand still here"


class Wire:
    """Takes batches as NCCL does: whatever one rank sends another one arrives in that order, tags or not; and a rank's
    batches go one after the other.
    """

    def __init__(self) -> None:
        self.batches: dict[int, list[list[tuple[str, int, int]]]] = {0: [], 1: []}
        self.lines: dict[int, deque[list[tuple[Any, ...]]]] = {0: deque(), 1: deque()}

    def begin(self, todo: list[dist.P2POp]) -> list[Any]:
        group: Any = todo[0].group
        me = group.index
        batch: list[tuple[Any, ...]] = [
            ("send" if each.op is dist.isend else "recv", each.group_peer, each.tensor) for each in todo
        ]
        self.batches[me].append([(what, peer, each.tag) for (what, peer, _), each in zip(batch, todo, strict=True)])
        self.lines[me].append(batch)
        self._move()
        return [Done(batch)]

    def _move(self) -> None:
        moved = True
        while moved:
            moved = False
            for me in (0, 1):
                mine, theirs = self.lines[me], self.lines[1 - me]
                if not (mine and theirs):
                    continue
                send = next((each for each in mine[0] if each[0] == "send"), None)
                recv = next((each for each in theirs[0] if each[0] == "recv"), None)
                if send is not None and recv is not None:
                    recv[2].copy_(send[2])
                    mine[0].remove(send)
                    theirs[0].remove(recv)
                    moved = True
                for line in (mine, theirs):
                    while line and not line[0]:
                        line.popleft()


class Group:
    """Stands for a process group of torch's."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.asked: list[tuple[str, bool]] = []

    def _do(self, name: str, options: Any) -> Any:
        self.asked.append((name, options.asyncOp))
        return Done([]) if options.asyncOp else None  # as NCCL

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self._do("allreduce", options)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self._do("broadcast", options)

    def reduce(self, tensors: Any, options: Any) -> Any:
        return self._do("reduce", options)

    def alltoall_base(self, out: Any, x: Any, recv: Any, send: Any, options: Any) -> Any:
        return self._do("alltoall", options)

    def _allgather_base(self, out: Any, x: Any, options: Any) -> Any:
        return self._do("allgather", options)

    def _reduce_scatter_base(self, out: Any, x: Any, options: Any) -> Any:
        return self._do("reduce_scatter", options)


def link_of(index: int) -> Any:
    """Of a rank of two, over a backend called nccl that moves tensors of the CPU."""
    group: Any = Group(index)
    link = ProcessLink(group, (0, 1), index, Log((0, 1), index), "a")
    link.group = group
    return link


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    found = Wire()
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:nccl")
    monkeypatch.setattr(dist, "P2POp", Op)
    monkeypatch.setattr(_torch, "begin_messages", found.begin)
    yield found
    assert not queued


class Op:
    """As ``dist.P2POp``, which wants a real group."""

    def __init__(self, op: Any, tensor: Tensor, *, group: Any, tag: int, group_peer: int) -> None:
        self.op, self.tensor, self.group, self.tag, self.group_peer = op, tensor, group, tag, group_peer


def want(src: int, tag: int = 0, length: int = 1) -> Want:
    return src, (length,), torch.float32, tag, CPU


def post(value: float, dst: int, tag: int = 0) -> Post:
    return torch.tensor([value]), dst, tag


# ------------------------------------------------------------------------------------------------------------- tags


def test_tags_order_the_messages_of_one_exchange(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessLink, "_tags_agree", lambda self, posts, wants: None)  # of gloo, which is not here
    first, second = link_of(0), link_of(1)
    with for_later():
        sent = first.exchange([post(7.0, 1, 7), post(1.0, 1, 1), post(3.0, 1, 3)], [])
        got = second.exchange([], [want(0, 3), want(0, 7), want(0, 1)])
    sent.done()
    assert [each.item() for each in got.wait(None)] == [3.0, 7.0, 1.0]
    assert wire.batches == {0: [[("send", 1, tag) for tag in (1, 3, 7)]], 1: [[("recv", 0, tag) for tag in (1, 3, 7)]]}
    assert sent.wait(None) == []


def test_tags_do_not_change_the_order_of_calls(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessLink, "_tags_agree", lambda self, posts, wants: None)
    link = link_of(0)
    with for_later():
        works = [link.exchange([post(0.0, 1, tag)], []) for tag in (5, 2)]
    works[1].done()
    assert wire.batches[0] == [[("send", 1, 5), ("send", 1, 2)]]


def test_both_sides_say_the_same_tags() -> None:
    posts = [post(0.0, 1, 4), post(0.0, 1, 2)]
    here, there = device_post.tags_of(posts, [want(1)]), device_post.tags_of([post(0.0, 0)], [want(0, 2), want(0, 4)])
    device_post.check_tags(here, [torch.tensor(there[0])], 0)
    device_post.check_tags(there, [torch.tensor(here[1])], 1)
    for wrong in ([want(0, 2)], [want(0, 2), want(0, 5)]):
        other = device_post.tags_of([post(0.0, 0)], wrong)
        with pytest.raises(mc.CommError, match="index 0 and index 1 have not given the messages between them the same"):
            device_post.check_tags(here, [torch.tensor(other[0])], 0)
        with pytest.raises(mc.CommError, match="index 1 and index 0 have not"):
            device_post.check_tags(other, [torch.tensor(here[1])], 1)
    assert device_post.tags_of([post(0.0, 1)], [want(1)]) == {}


def test_who_uses_no_tag_is_not_asked() -> None:
    """Another rank with which this one has no tagged message says nothing, whatever this one sends to a third."""
    mine = device_post.tags_of([post(0.0, 1, 5), post(0.0, 2)], [want(3, 6), want(2), want(1)])
    assert list(mine) == [1, 3]
    assert device_post.tags_of([], [want(0)]) == {}  # as index 2 receives it
    theirs = device_post.tags_of([post(0.0, 0)], [want(0, 5)])
    device_post.check_tags({1: mine[1]}, [torch.tensor(theirs[0])], 0)
    device_post.check_tags(theirs, [torch.tensor(mine[1])], 1)


@pytest.mark.parametrize(
    ("config", "device", "may"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", ("exchange",)),
        ("cpu:gloo,cuda:nccl", "cpu", ("send", "recv", "exchange")),
        ("cuda:nccl", "cuda", ()),
        ("nccl", "cuda", ()),
        ("gloo", "cpu", ("send", "recv", "exchange")),
        ("cpu:gloo,xpu:xccl", "xpu", ("exchange",)),
    ],
)
def test_where_tags_may_be_given(
    config: str, device: str, may: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert link_of(0).tagged(torch.device(device)) == may


def test_a_tag_is_refused_where_messages_are_matched_by_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def main() -> None:
        mesh = mc.make_mesh({"a": 2})
        link = type(mesh.axis("a").link)
        with pytest.raises(mc.MeshError, match=r"tag=3, but .* by their order[\s\S]*leave the tag out, or give all"):
            mc.send(torch.ones(1), "a", dst=1 - mesh.rank, tag=3, mesh=mesh)
        with pytest.raises(mc.MeshError, match="tag=3, but"):
            mc.recv("a", src=1 - mesh.rank, shape=(1,), dtype=torch.float32, tag=3, mesh=mesh)
        monkeypatch.setattr(link, "tagged", lambda self, device: ())
        with pytest.raises(mc.MeshError, match=r"leave the tag out$"):
            mc.exchange([(torch.ones(1), 1 - mesh.rank, 2)], [], "a", mesh=mesh)
        monkeypatch.setattr(link, "tagged", lambda self, device: ("exchange",))

    monkeypatch.setattr("meshcomm.runtime.transports.threads.transport.InProcessLink.tagged",
                        lambda self, device: ("exchange",))  # fmt: skip
    mc.launch(main, ranks=2)


# ------------------------------------------------------------------------------------------------------------ batches


def test_a_send_and_a_receipt_that_are_waited_for_later_are_one_batch(wire: Wire) -> None:
    links = [link_of(0), link_of(1)]
    works = []
    with for_later():
        for me, link in enumerate(links):
            sent = link.exchange([post(10.0 + me, 1 - me)], [])
            works.append((sent, link.exchange([], [want(1 - me)])))
    assert wire.batches == {0: [], 1: []}
    for sent, _ in works:
        sent.done()
    for me, (sent, got) in enumerate(works):
        assert wire.batches[me] == [[("send", 1 - me, 0), ("recv", 1 - me, 0)]]
        assert sent.wait(None) == []
        assert got.wait(None)[0].item() == 11.0 - me
        assert got.done()


def test_what_is_queued_goes_with_the_next_message_at_once(wire: Wire) -> None:
    link, other = link_of(0), link_of(1)
    with for_later():
        theirs = other.exchange([post(5.0, 0)], [want(0)])
        mine = link.exchange([post(4.0, 1)], [])
    theirs.done()
    [got] = link.exchange([], [want(1)])
    assert (got.item(), wire.batches[0]) == (5.0, [[("send", 1, 0), ("recv", 1, 0)]])
    assert theirs.wait(None)[0].item() == 4.0
    assert mine.wait(None) == []


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "broadcast", "mean"])
def test_whatever_is_called_next_begins_what_is_queued(wire: Wire, call: str) -> None:
    """The rank that receives may do so before it comes to that call."""
    link, x = link_of(0), torch.ones(2)
    with for_later():
        work = link.exchange([post(1.0, 1)], [])
    calls: dict[str, Any] = {
        "all_reduce": lambda: link.all_reduce(x, "sum"),
        "all_gather": lambda: link.all_gather(x),
        "broadcast": lambda: link.broadcast(x, 0),
        "mean": lambda: link.all_reduce(x, "mean"),
    }
    calls[call]()
    assert wire.batches[0] == [[("send", 1, 0)]]
    assert not work.done()


def test_nobody_waits_and_the_other_side_gets_it(wire: Wire) -> None:
    link, other = link_of(0), link_of(1)
    with for_later():
        got = other.exchange([], [want(0)])
        got.done()
        link.exchange([post(2.0, 1)], []).abandon()
    assert got.wait(None)[0].item() == 2.0


def test_a_batch_that_cannot_be_begun_fails_all_that_are_in_it(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(todo: Any) -> Any:
        raise RuntimeError("the card is gone")

    link = link_of(0)
    monkeypatch.setattr(group_link.peers, "account", lambda ranks, closed=False: "")
    monkeypatch.setattr(_torch, "begin_messages", broken)
    with for_later():
        works = [link.exchange([post(1.0, 1)], []), link.exchange([], [want(1)])]
    for work in works:
        with pytest.raises(mc.CommError, match=r"exchange: the transport failed: the card is gone"):
            work.wait(None)


def test_a_batch_that_is_interrupted_gives_nobody_what_was_not_received(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(todo: Any) -> Any:
        raise KeyboardInterrupt

    link = link_of(0)
    monkeypatch.setattr(group_link.peers, "account", lambda ranks, closed=False: "")
    with for_later():
        work = link.exchange([], [want(1)])
    with monkeypatch.context() as patch:
        patch.setattr(_torch, "begin_messages", interrupted)
        with pytest.raises(KeyboardInterrupt):
            link.all_reduce(torch.ones(1), "sum")
    with pytest.raises(mc.CommError, match=r"interrupted by KeyboardInterrupt"):
        work.wait(None)
    with pytest.raises(mc.CommError, match=r"interrupted by KeyboardInterrupt"):
        work.done()
    work.abandon()


class Said(Pending):
    """A comparison of tags on its way."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.given_up = error, False

    def wait(self, timeout: float | None) -> Any:
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return False

    def abandon(self) -> None:
        self.given_up = True


def test_who_asks_does_not_begin_what_has_other_tags(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    link, said = link_of(0), Said(mc.CommError("not the same tags"))
    monkeypatch.setattr(ProcessLink, "_tags_agree", lambda self, posts, wants: said)
    with for_later():
        work = link.exchange([post(1.0, 1, 3)], [])
    assert not work.done()
    monkeypatch.setattr(said, "done", lambda: True)
    assert work.done()
    link.all_reduce(torch.ones(1), "sum")
    assert wire.batches[0] == []
    with pytest.raises(mc.CommError, match="not the same tags"):
        work.wait(None)


@pytest.mark.parametrize("error", [TimedOutError("late"), mc.CommError("not the same tags")])
def test_what_is_given_up_while_tags_are_compared_is_not_begun(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    link, said = link_of(0), Said(error)
    monkeypatch.setattr(ProcessLink, "_tags_agree", lambda self, posts, wants: said)
    with for_later():
        work = link.exchange([post(1.0, 1, 3)], [])
    with pytest.raises(type(error)):
        work.wait(1.0)
    work.abandon()
    assert said.given_up
    link.all_reduce(torch.ones(1), "sum")
    assert wire.batches[0] == []


def test_tags_that_are_the_same_begin_the_messages(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    link, other = link_of(0), link_of(1)
    monkeypatch.setattr(ProcessLink, "_tags_agree", lambda self, posts, wants: Said(None))
    with for_later():
        sent, got = link.exchange([post(6.0, 1, 3)], []), other.exchange([], [want(0, 3)])
    assert not sent.done()
    link.all_reduce(torch.ones(1), "sum")  # begins it
    assert got.wait(None)[0].item() == 6.0
    assert sent.wait(None) == []


def test_groups_that_end_begin_nothing(wire: Wire) -> None:
    link = link_of(0)
    with for_later():
        link.exchange([post(1.0, 1)], [])
    link.let_go()
    begin_all()
    assert wire.batches[0] == []


class Elsewhere(Hook):
    """Goes on, on a thread of its own, as the guard does."""

    def run(self, what: Running) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(what.go()))
        thread.start()
        thread.join()
        return found[0]


def test_a_thread_of_a_hook_begins_nothing_and_keeps_the_callers_stream(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a backend has begun to put together is one for all threads; and messages are made on the caller's stream."""
    module, stream, use = stand_in(monkeypatch)
    module.begin()
    monkeypatch.setattr(accelerator, "stream_of", lambda x: stream())
    begun: list[tuple[Any, bool]] = []
    monkeypatch.setattr(
        _torch, "begin_messages", lambda todo: begun.append((threading.get_ident(), len(todo) == 2)) or wire.begin(todo)
    )
    link, other = link_of(0), link_of(1)
    put_on(link, Elsewhere())
    use(Stream("mine"))
    with for_later():
        sent = link.exchange([post(6.0, 1)], [])
        got = link.exchange([], [want(1)])
        theirs = other.exchange([post(8.0, 0)], [want(0)])
    assert not begun
    waiting = list(link._outbox._waiting)
    assert [{each.name for each in one.streams} for one in waiting] == [{"mine"}] * 2
    use(later := Stream("later"))
    theirs.done()
    assert got.wait(None)[0].item() == 8.0
    assert later.waits[-1:] == ["mine"]
    assert begun == [(threading.get_ident(), True)] * 2
    assert sent.wait(None) == []


@pytest.mark.parametrize("ends", ["waited for", "dropped"])
def test_messages_keep_their_memory_for_the_stream_that_begins_them(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The first wait begins them, so a wait on another stream is where both they and the result are used."""
    module, stream, use = stand_in(monkeypatch)
    module.begin()
    lent: list[tuple[str, str]] = []
    monkeypatch.setattr(accelerator, "stream_of", lambda x: stream())
    monkeypatch.setattr(accelerator, "stream_at", lambda x: stream())
    monkeypatch.setattr(
        accelerator,
        "tensors",
        lambda *things: iter([Lent(lent, op.op.__name__) for op in things[0]] if things[0] else []),
    )
    monkeypatch.setattr(accelerator, "mark", lambda *things: None)
    link, other = link_of(0), link_of(1)
    use(Stream("mine"))
    with for_later():
        sent, got = link.exchange([post(6.0, 1)], []), link.exchange([], [want(1)])
        other.exchange([post(8.0, 0)], [want(0)]).done()
    use(Stream("other"))
    if ends == "dropped":
        sent.abandon()
    assert ends == "dropped" or got.wait(None)[0].item() == 8.0
    assert {("isend", "other"), ("irecv", "other")} <= set(lent)


class Lent:
    """A tensor of a device, which notes for which streams it is kept."""

    device = torch.device("cuda", 0)

    def __init__(self, lent: list[tuple[str, str]], name: str) -> None:
        self.lent, self.name = lent, name

    def record_stream(self, stream: Any) -> None:
        self.lent.append((self.name, stream.name))


@pytest.mark.parametrize("later", [False, True])
def test_a_thread_of_a_hook_calls_on_the_callers_stream(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    """What is waited for at once, too: a thread begins on the default stream, which waits for nothing of the caller's."""
    module, stream, use = stand_in(monkeypatch)
    module.begin()
    seen: list[str] = []
    link = link_of(0)
    monkeypatch.setattr(link.group, "_do", lambda name, options: seen.append(stream().name) or Done([]))
    put_on(link, Elsewhere())
    use(Stream("mine"))
    if later:
        with for_later():
            link.all_reduce(torch.ones(2), "sum")
    else:
        link.all_reduce(torch.ones(2), "sum")
    assert seen == ["mine"]


# ------------------------------------------------------------------------------------------------- devices, and works


def test_batches_are_split_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def batch(todo: list[Any]) -> list[Any]:
        begun.append([each.tensor.device.type for each in todo])
        return [f"work {len(begun)}"]

    class Plain:
        pass

    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    monkeypatch.setattr(dist, "ProcessGroup", Plain)
    todo: Any = [Op(dist.isend, torch.empty(1, device=kind), group=Plain(), tag=0, group_peer=1)
                 for kind in ("meta", "cpu", "meta")]  # fmt: skip
    assert _torch.begin_messages(todo) == ["work 1", "work 2"]
    assert begun == [["meta", "meta"], ["cpu"]]


def test_a_message_is_sent_from_the_device_on_which_it_is_received() -> None:
    class Axis:
        size, is_on_cpu = 2, False

        class mesh:  # noqa: N801
            in_process, device = False, torch.device("meta")

    class Checks:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: True

    before, messages.check = messages.check, Checks()  # type: ignore[assignment]
    try:
        x, _, _ = messages._checked_post("send", (torch.ones(2), 1), Axis)  # type: ignore[arg-type]
    finally:
        messages.check = before
    assert x.device.type == "meta"


def each_of(link: Any, x: Tensor) -> list[Any]:
    return [
        link.all_reduce(x, "sum"), link.all_reduce(x, "max"), link.all_gather(x), link.reduce_scatter(x, "sum"),
        link.broadcast(x, 0), link.reduce(x, "sum", 0), link.permute(x, 1, 1),
    ]  # fmt: skip


def test_what_is_waited_for_at_once_stays_on_the_callers_stream(wire: Wire) -> None:
    """NCCL does it there if asked for nothing to wait for: no hop to its own stream and back."""
    link = link_of(0)
    x = torch.ones(2, 3)
    names = ["allreduce", "allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "alltoall"]
    each_of(link, x)
    assert link.group.asked == [(name, False) for name in names]
    link.group.asked.clear()
    with for_later():
        works = each_of(link, x)
        works += [link.gather_flat(x.view(-1)), link.scatter_flat(x.view(-1), "sum")]
    assert all(isinstance(work, Pending) for work in works)
    assert link.group.asked == [(name, True) for name in [*names, "allgather", "reduce_scatter"]]


class Clones(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def test_one_copy_of_what_is_reduced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend of the other device says nothing of this one's, which copies what it reduces in place."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,meta:nccl")
    link, x = link_of(0), torch.ones(2, device="meta")
    assert link.copies("all_reduce", x)
    assert link.copies("broadcast", x)
    assert not link.copies("all_gather", x)
    assert not link.copies("all_reduce", torch.ones(2))
    for op, count in (("sum", 1), ("max", 0), ("mean", 1)):  # a max has other clothes, which are new
        with for_later(), Clones() as clones:
            link.all_reduce(x, op)
        assert (op, clones.count) == (op, count)
    bits = torch.ones(2, device="meta", dtype=torch.int32)
    with for_later(), Clones() as clones:
        link.all_reduce(bits, "bor")  # is gathered, which reads it later
    assert clones.count == 1
