"""What ranks of one process do with an accelerator, on one that is not there (``stand_in.py``): random states and streams."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from later import for_later
from stand_in import Stream, stand_in

import meshcomm as mc
from meshcomm.collectives.trees import overlap
from meshcomm.runtime import recorder
from meshcomm.runtime.call import told
from meshcomm.runtime.health import overdue
from meshcomm.runtime.hooks import dumps
from meshcomm.runtime.pending import Pending, TimedOutError
from meshcomm.runtime.process import accelerator
from meshcomm.runtime.transports.algorithms import PacketLink
from meshcomm.runtime.transports.process_group import ProcessLink
from meshcomm.runtime.transports.turns import Turn
from meshcomm.tools import explain


@pytest.mark.parametrize("waits", [True, False], ids=["what waits is known", "not known"])
def test_the_first_launch_that_uses_an_accelerator_draws_as_the_next(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    module, _, _ = stand_in(monkeypatch)
    if not waits:
        monkeypatch.setattr("meshcomm._torch.random._has_tracker", False)

    def draws() -> list[float]:
        mesh, found = mc.make_mesh({"a": 3}), []
        for _ in range(2):
            mc.barrier("a", mesh=mesh)
            found.append(module.draw())
        return found

    torch.manual_seed(1)
    first, again = (mc.launch(draws, ranks=3) for _ in range(2))
    assert first == again
    assert len({x for rank in first for x in rank}) == 6


def test_a_seed_of_a_rank_before_the_first_use_is_that_ranks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        module, _, _ = stand_in(patch)

        def draws(first: int) -> float:
            mesh = mc.make_mesh({"a": 3})
            module.manual_seed_all(mesh.rank)
            for _ in range(mesh.rank != first):
                mc.barrier("a", mesh=mesh)
            found = module.draw()
            for _ in range(mesh.rank == first):
                mc.barrier("a", mesh=mesh)
            return found

        wanted = [torch.rand(1, generator=torch.Generator().manual_seed(rank)).item() for rank in range(3)]
        assert mc.launch(draws, ranks=3, args=(1,)) == wanted
        assert mc.launch(draws, ranks=3, args=(0,)) == wanted


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("used", [True, False])
def test_the_callers_device_goes_on_as_if_no_rank_had_drawn(
    monkeypatch: pytest.MonkeyPatch, seed: int | None, used: bool
) -> None:
    module, _, _ = stand_in(monkeypatch)
    if seed is not None:
        module.manual_seed_all(seed)
    mc.launch(lambda: module.draw() if used else 0.0, ranks=2)
    wanted = torch.Generator() if seed is None else torch.Generator().manual_seed(seed)
    assert module.draw() == torch.rand(1, generator=wanted).item()


def test_a_device_that_is_always_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal has no ``is_initialized``."""
    module, _, _ = stand_in(monkeypatch)
    monkeypatch.delattr(type(module), "is_initialized")
    assert accelerator.in_use() is module
    first, again = (mc.launch(module.draw, ranks=2) for _ in range(2))
    assert first == again


def test_ranks_have_the_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    module, stream, use = stand_in(monkeypatch)
    module.begin()
    mine = Stream("mine")
    use(mine)  # and with it the device: torch.accelerator.set_stream sets both

    def main() -> Any:
        mc.barrier("a", mesh=mc.make_mesh({"a": 2}))
        return stream()

    assert mc.launch(main, ranks=2) == [mine, mine]
    assert mine.waits == []  # nobody had another one


def test_a_rank_on_a_stream_of_its_own_is_waited_for_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    module, stream, use = stand_in(monkeypatch)
    module.begin()
    own = [Stream("0"), Stream("1")]

    def main() -> None:
        mesh = mc.make_mesh({"a": 2})
        use(own[mesh.rank])
        own[mesh.rank].wait_stream(Stream("mine"))  # as torch's users do
        mc.all_reduce(torch.ones(1), "a", mesh=mesh)

    mc.launch(main, ranks=2)
    assert own[0].waits == ["mine", "1"]
    assert own[1].waits == ["mine", "0"] or own[1].waits == ["mine"]
    assert stream().waits, "the caller's work could run before that of the ranks"


def test_nothing_begins_an_accelerator_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, _ = stand_in(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: pytest.fail("this begins the device"))
    mc.launch(lambda: mc.barrier("a", mesh=mc.make_mesh({"a": 2})), ranks=2)
    assert not module.begun


# ------------------------------------------------------------------------------------- leaves on two kinds of devices


class Sums:
    """A link that lets another thread try to come in while it starts a sum."""

    watched = hears = False

    def __init__(self, *order: list[int]) -> None:
        self.orders: dict[Any, list[list[int]]] = Everywhere([*order])
        self.started: list[list[float]] = []
        self.inside, self.other_is_there = threading.Event(), threading.Event()

    def takes_parts(self, *_: object) -> bool:
        return True

    def sum_parts(self, parts: Any) -> torch.Tensor:
        self.started.append(torch.cat(list(parts.parts)).tolist())
        self.inside.set()
        assert self.other_is_there.wait(20)
        time.sleep(0.05)  # and does what it can
        return torch.cat(list(parts.parts))


class Everywhere(dict[Any, list[list[int]]]):
    def __init__(self, order: list[list[int]]) -> None:
        self.order = order

    def get(self, key: Any, default: Any = None) -> Any:
        return self.order


def test_two_threads_of_autograd_start_each_sum_once() -> None:
    """One for the leaves on the CPU, one for those on the device; they come in the order of neither."""
    link = Sums([0], [1])
    axis: Any = SimpleNamespace(link=link, size=2, name="a", mesh=None, index=0)
    leaves = [torch.ones(2), torch.ones(3)]
    sums = overlap._Sums(leaves, axis, 1e-6, overlap.How())
    assert sums.buckets == [[0], [1]]

    def second() -> None:
        assert link.inside.wait(20)
        link.other_is_there.set()
        with torch.no_grad():
            sums.ready([1], [torch.full((3,), 7.0)])

    thread = threading.Thread(target=second)
    thread.start()
    with torch.no_grad():
        sums.ready([0], [torch.full((2,), 5.0)])
    thread.join()
    assert link.started == [[5.0, 5.0, 1.0], [7.0, 7.0, 7.0, 1.0]]
    assert [None if x is None else x.tolist() for x in sums.finish([True, True])] == [[5.0, 5.0], [7.0, 7.0, 7.0]]


def test_a_sum_that_another_thread_starts_comes_after_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    _, stream, use = stand_in(monkeypatch)
    made, here = Stream("made"), stream()
    lent: list[object] = []
    x = OnDevice(lent)
    accelerator.take_over(x, made)
    assert here.waits == ["made"]
    assert lent == [here]
    use(made)
    accelerator.take_over(x, made)
    accelerator.lend(made, [x, (x, torch.ones(1))])
    assert (made.waits, lent) == ([], [here])
    use(here)
    accelerator.lend(made, [x, (x, torch.ones(1))])
    assert lent == [here] * 3


class OnDevice(torch.Tensor):
    """Says that it is not on the CPU, and for which streams its memory is kept."""

    is_cpu = is_meta = False  # type: ignore[assignment]

    def __new__(cls, lent: list[object]) -> OnDevice:
        return torch.Tensor._make_subclass(cls, torch.ones(2))

    def __init__(self, lent: list[object]) -> None:
        self.lent = lent

    def record_stream(self, stream: object) -> None:  # type: ignore[override]
        self.lent.append(stream)


# --------------------------------------------------------------------------- what a device has not come through


class Mark:
    """A place in the device's work; it has come there when somebody says so."""

    reached = False

    def query(self) -> bool:
        return self.reached


class Work:
    """Of a backend with a stream of its own."""

    over = False
    waits = 0

    def is_completed(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.waits += 1


class Backend:
    """A group whose all_reduce others do not come to."""

    def __init__(self) -> None:
        self.ended: list[torch.device] = []
        self.work = Work()

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self.work if told.later else None

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(abort=lambda: self.ended.append(device))


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Backend, list[Mark]]:
    """A link of two over such a group, and the marks that are made in the device's work."""
    marks: list[Mark] = []

    def record_event(stream: Stream, event: Any = None) -> Any:
        if event is not None:
            assert event in marks
            event.reached = False
            return event
        marks.append(Mark())
        return marks[-1]

    stand_in(monkeypatch)
    monkeypatch.setattr(Stream, "record_event", record_event)
    monkeypatch.setattr(OnDevice, "device", torch.device("cuda", 0), raising=False)
    monkeypatch.setattr(recorder, "_ring", ring := recorder.Ring(recorder.Owner(0, 2)))
    link, backend = ProcessLink.__new__(ProcessLink), Backend()
    vars(link).update(
        base=backend, group=backend, size=2, index=0, makers={}, _kinds={"cpu": "gloo", "cuda": "nccl"}, _on_gloo=True,
        nccl=frozenset({"cuda"}), _making=threading.Lock(), walker=None, turn=Turn(cast(Any, backend), []), ranks=(0, 1),
        _room=None, _near={},
    )  # fmt: skip
    link.note_in(ring.log((0, 1), 0, "a test's", 10.0))
    return link, backend, marks


def test_a_call_that_a_device_waits_in_is_queued_and_not_completed(
    linked: tuple[Any, Backend, list[Mark]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link, backend, marks = linked
    link.all_reduce(OnDevice([]), "sum")
    with for_later():
        work = link.all_reduce(OnDevice([]), "sum")
    backend.work.over = True
    work.wait(None)
    for record in link.log.records:
        assert recorder.state_of(record) == "queued"
    assert len(marks) == 2, "one of each call: to make them takes as long as the call"
    assert link.log.last_done is None
    assert recorder.waits_on_a_device(time.monotonic())
    path = dumps._write(cast(recorder.Ring, recorder.ring()), tmp_path, "asked for")
    assert [each["state"] for each in json.loads(path.read_text())["calls"]] == ["queued"] * 2
    explain.main([str(tmp_path)])
    assert "in 1 all_reduce" in capsys.readouterr().out
    for each in marks:
        each.reached = True
    assert [recorder.state_of(record) for record in link.log.records] == ["completed"] * 2
    assert not recorder.waits_on_a_device(time.monotonic())


def test_the_time_of_the_others_begins_where_this_ranks_own_work_ends(linked: tuple[Any, Backend, list[Mark]]) -> None:
    link, _, marks = linked
    with for_later():
        work = link.all_reduce(OnDevice([]), "sum")
    before, began = marks[0], time.monotonic()
    threading.Timer(0.3, lambda: setattr(before, "reached", True)).start()
    with pytest.raises(TimedOutError):
        work.wait(0.05)
    assert time.monotonic() - began >= 0.3
    link.all_reduce(OnDevice([]), "sum")  # others are waited for in this one, and so in what comes after
    with for_later():
        other = link.all_reduce(OnDevice([]), "sum")
    began = time.monotonic()
    with pytest.raises(TimedOutError):
        other.wait(0.05)
    assert time.monotonic() - began < 20  # it does come to an end


def test_who_gives_up_ends_the_backend_and_what_comes_after_is_refused(linked: tuple[Any, Backend, list[Mark]]) -> None:
    link, backend, marks = linked
    with for_later():
        work = link.all_reduce(OnDevice([]), "sum")
    marks[0].reached = True
    with pytest.raises(TimedOutError):
        work.wait(0.01)
    work.abandon()
    assert backend.ended == [torch.device("cuda", 0)]
    assert backend.work.waits == 0, "this rank's stream waits for what will not come"
    with pytest.raises(
        mc.CommError, match=r"(?s)all_reduce over .* was given up .*communicator .* ended.*fix: end all"
    ):
        link.all_reduce(OnDevice([]), "sum")
    with pytest.raises(mc.CommError, match="was given up"):
        link.all_gather(OnDevice([]))


def test_who_drops_a_work_orders_the_stream_that_began_it(linked: tuple[Any, Backend, list[Mark]]) -> None:
    link, backend, _ = linked
    seen: list[Any] = []
    backend.work.wait = lambda: seen.append(torch.accelerator.current_stream())  # type: ignore[method-assign]
    first = torch.accelerator.current_stream()
    with for_later():
        work = link.all_reduce(OnDevice([]), "sum")
    other = Stream("of the collector of garbage")
    torch.accelerator.set_stream(cast(Any, other))
    work.abandon()
    assert seen == [first]
    assert torch.accelerator.current_stream() is other
    assert backend.ended == []


def test_a_wait_on_another_stream_keeps_the_memory(linked: tuple[Any, Backend, list[Mark]]) -> None:
    link, backend, _ = linked
    lent: list[object] = []
    x = OnDevice(lent)
    x.clone = lambda **_: x  # type: ignore[method-assign, assignment]
    with for_later():
        works = [link.all_reduce(x, "sum") for _ in range(2)]
    backend.work.over = True
    works[0].wait(None)
    assert lent == []
    other = Stream("other")
    torch.accelerator.set_stream(cast(Any, other))
    works[1].wait(None)
    assert lent == [other]


@pytest.mark.parametrize("name", ["_gather", "_reduce_scatter", "_all_to_all"])
def test_a_wait_on_another_stream_keeps_what_is_read(linked: tuple[Any, Backend, list[Mark]], name: str) -> None:
    """What was packed for the call has no other owner when the backend lets go of it, at the wait."""
    link, backend, _ = linked
    for call in ("_allgather_base", "_reduce_scatter_base", "alltoall_base"):
        setattr(backend, call, lambda *args: backend.work)
    read, written = [], []  # type: list[object], list[object]
    x, out = OnDevice(read), OnDevice(written)
    vars(x).update(new_empty=lambda *shape: out, view=lambda *shape: x)
    vars(out).update(view=lambda *shape: out)
    with for_later():
        work = getattr(link, name)(x, *{"_gather": (), "_reduce_scatter": ("sum",)}.get(name, ([1, 1], [1, 1])))
    backend.work.over = True
    other = Stream("other")
    torch.accelerator.set_stream(cast(Any, other))
    assert work.wait(None) is out
    assert read == written == [other]


def test_zeros_of_who_receives_nothing_are_made_before_the_call(linked: tuple[Any, Backend, list[Mark]]) -> None:
    """Whoever waits on another stream comes after what was on this one at the call, and no more."""
    link, *_ = linked
    seen: list[str] = []
    zeros: list[object] = []

    class Sees(OnDevice):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.zeros_like:
                seen.append("zeros")
                return OnDevice(zeros)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = Sees([])
    link.all_to_all = lambda *args: (seen.append("call"), Later())[1]
    work = PacketLink.permute(link, x, None, None)
    assert seen == ["zeros", "call"]
    torch.accelerator.set_stream(cast(Any, other := Stream("other")))
    assert cast(Any, work).wait(None).tolist() == [1.0, 1.0]
    assert zeros == [other]


class Later(Pending):
    def wait(self, timeout: float | None) -> Any:
        return torch.ones(0)


def test_who_is_late_is_said_before_the_time_is_up(
    linked: tuple[Any, Backend, list[Mark]], capsys: pytest.CaptureFixture[str]
) -> None:
    link, _, marks = linked
    link.all_reduce(OnDevice([]), "sum")
    assert overdue.look(link.log, 1e6) == ""
    time.sleep(0.02)
    said = overdue.look(link.log, 0.02)
    assert "index 1 did not come" in said
    assert "the device waits; after 0.02 s torch may end this process. See" in said
    assert said in capsys.readouterr().err
    assert overdue.look(link.log, 0.02) == "", "each call once"
    marks[0].reached = True
    link.all_reduce(OnDevice([]), "sum")
    marks[1].reached = True
    time.sleep(0.02)
    assert overdue.look(link.log, 0.02) == ""


def test_a_device_is_not_asked_before_a_call_can_be_late(
    linked: tuple[Any, Backend, list[Mark]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another thread that asks, and the program may be capturing a graph."""
    link, *_ = linked
    link.all_reduce(OnDevice([]), "sum")
    asked: list[Mark] = []
    monkeypatch.setattr(Mark, "query", lambda self: bool(asked.append(self)))
    assert overdue.look(link.log, 1e6) == ""
    assert not asked
    time.sleep(0.02)
    assert overdue.look(link.log, 0.02)
    assert asked


def test_a_thread_looks_as_long_as_there_is_a_link(
    linked: tuple[Any, Backend, list[Mark]], capfd: pytest.CaptureFixture[str]
) -> None:
    link, *_ = linked
    link.all_reduce(OnDevice([]), "sum")
    overdue.watch(link.log, 0.1)
    thread = overdue._thread[0]
    end = time.monotonic() + 30
    while "did not come" not in capfd.readouterr().err:
        assert time.monotonic() < end
        time.sleep(0.01)
    link.log.over = True
    thread.join(30)
    assert not thread.is_alive()
