"""What ranks of one process do with an accelerator, on one that is not there (``stand_in.py``): random states and streams."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in import Stream, stand_in

import meshcomm as mc
from meshcomm.collectives import overlap
from meshcomm.runtime.process import accelerator


@pytest.mark.parametrize("waits", [True, False], ids=["what waits is known", "not known"])
def test_the_first_launch_that_uses_an_accelerator_draws_as_the_next(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    module, _, _ = stand_in(monkeypatch)
    if not waits:
        monkeypatch.setattr("meshcomm._torch._has_tracker", False)

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

    def __init__(self, order: list[int]) -> None:
        self.orders: dict[Any, list[int]] = Everywhere(order)
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


class Everywhere(dict[Any, list[int]]):
    def __init__(self, order: list[int]) -> None:
        self.order = order

    def get(self, key: Any, default: Any = None) -> Any:
        return self.order


def test_two_threads_of_autograd_start_each_sum_once() -> None:
    """One for the leaves on the CPU, one for those on the device; they come in the order of neither."""
    link = Sums([0, 1])
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
    accelerator.lend([x, (x, torch.ones(1))], made)
    assert (made.waits, lent) == ([], [here])
    use(here)
    accelerator.lend([x, (x, torch.ones(1))], made)
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
