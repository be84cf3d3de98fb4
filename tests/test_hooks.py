"""Hooks on a link: they stack, in the order in which they were put on, and nothing of them is left when they are off."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import meshcomm as mc
from meshcomm.runtime.call import Call, told
from meshcomm.runtime.hooks.stack import Hook, Running, put_on, take_off
from meshcomm.runtime.start.workers import WorkerPool

Run4 = Callable[..., list[Any]]


class Listed(Hook):
    """One of a user's own: it writes down what it hears, and doubles what an all_reduce gives."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def announce(self, call: Call) -> None:
        self.said.append(f"{self.name} hears {call.what}")

    def run(self, what: Running) -> Any:
        self.said.append(f"{self.name} before {what.name}{' for later' if what.asynchronous else ''}")
        result = what.go()
        self.said.append(f"{self.name} after")
        return 2 * result if what.name == "all_reduce" and isinstance(result, Tensor) else result

    def refuse(self, where: str, why: str, axis: object) -> None:
        self.said.append(f"{self.name} is told that {where} was wrong")


def one_on_the_other() -> dict[str, Any]:
    mesh = mc.make_mesh({"t": 4})
    axis, said = mesh.axis("t"), list[str]()
    kind = type(axis.link)
    first, second = Listed("first", said), Listed("second", said)
    found: dict[str, Any] = {}

    def noted(name: str, call: Callable[[], Any]) -> None:
        said.clear()
        value = call()
        found[name] = (value.tolist() if isinstance(value, Tensor) else value, list(said))

    def summed() -> Any:
        return mc.all_reduce(torch.ones(2), "t", mesh=mesh)

    noted("off", summed)
    put_on(axis.link, first)
    put_on(axis.link, second)
    noted("both", summed)
    noted("async", lambda: mc.all_gather(torch.ones(1), "t", mesh=mesh, async_op=True).wait())
    noted("made of others", lambda: mc.gather(torch.ones(1), "t", dst=0, mesh=mesh) is None)
    with pytest.raises(mc.MeshError):
        mc.reduce_scatter(torch.ones(3), "t", mesh=mesh)
    take_off(axis.link, first)
    noted("second", summed)
    take_off(axis.link, second)
    take_off(axis.link, second)  # it is not there
    noted("off again", summed)
    found["as before"] = type(axis.link) is kind and "hooks" not in vars(axis.link)
    return found


def around(inner: list[str], name: str) -> list[str]:
    return [f"{name} before all_reduce", *inner, f"{name} after"]


def test_hooks_of_ones_own_stack_and_come_off(run4: Run4) -> None:
    for rank, found in enumerate(run4(one_on_the_other)):
        hear = ["first hears all_reduce", "second hears all_reduce"]
        assert found["off"] == found["off again"] == ([4.0, 4.0], [])
        assert found["both"] == ([16.0, 16.0], hear + around(around([], "first"), "second"))
        assert found["second"] == ([8.0, 8.0], hear[1:] + around([], "second"))
        value, said = found["async"]
        assert value == [1.0] * 4
        assert said[2:4] == ["second before all_gather for later", "first before all_gather for later"]
        assert found["made of others"][0] == (rank != 0)
        assert [each for each in found["made of others"][1] if "before" in each] == [
            "second before gather",
            "first before gather",
        ]
        assert found["as before"]


def seen_by_all() -> tuple[list[str], list[str], dict[str, int], list[str]]:
    """What a trace, a hook of one's own and the profiler see of the same calls; and the error of one that differs."""
    mesh = mc.make_mesh({"t": 4})
    axis, said = mesh.axis("t"), list[str]()
    with mc.use_mesh(mesh), mc.trace() as t, profile(activities=[ProfilerActivity.CPU], acc_events=True) as shown:
        put_on(axis.link, Listed("own", said))
        x = torch.ones(4, requires_grad=True)
        assert mc.all_gather(x, "t", async_op=True).wait().sum().backward() is None
        assert x.grad is not None
        assert x.grad.tolist() == [4.0] * 4
        assert mc.shift(torch.ones(2), "t").tolist() == [1.0, 1.0]
        mc.exchange([(torch.ones(1), (mesh.rank + 1) % 4)], [((mesh.rank - 1) % 4, (1,), torch.float32)], "t")
        take_off(axis.link, axis.link.hooks[-1])
        mc.barrier("t")
    ranges = [event.name for event in shown.events() if event.name.startswith("meshcomm.")]
    events = [f"{e.operation}{' later' if e.asynchronous else ''}{' back' if e.backward else ''}" for e in t.events]
    assert all(event.end is not None for event in t.events)
    return events, [each for each in said if "before" in each], {name: ranges.count(name) for name in ranges}, said


def of_four(found: list[Any]) -> None:
    for events, said, ranges, _ in found:
        assert events == ["all_gather later", "reduce_scatter later back", "shift", "exchange", "barrier"]
        assert said == [
            "own before all_gather for later", "own before reduce_scatter for later", "own before permute",
            "own before exchange",
        ]  # fmt: skip
        assert ranges == {
            "meshcomm.all_gather t f32[4]": 1, "meshcomm.reduce_scatter t f32[16]": 1, "meshcomm.shift t f32[2]": 1,
            "meshcomm.exchange t": 1, "meshcomm.barrier t": 1,
        }  # fmt: skip


def test_trace_profiler_and_a_hook_of_ones_own(pool4: WorkerPool) -> None:
    of_four(pool4.run(seen_by_all))


def test_the_same_in_one_process() -> None:
    """The profiler of one rank alone: torch has one for all threads."""

    def main() -> Any:
        mesh = mc.make_mesh({"t": 4})
        said: list[str] = []
        hook = Listed("own", said)
        with mc.use_mesh(mesh), mc.trace() as t:
            put_on(mesh.axis("t").link, hook)
            x = torch.ones(4, requires_grad=True)
            mc.all_gather(x, "t", async_op=True).wait().sum().backward()
            take_off(mesh.axis("t").link, hook)
        return [event.primitive for event in t.events], len([each for each in said if "before" in each])

    assert mc.launch(main, ranks=4) == [(["all_gather", "reduce_scatter"], 2)] * 4


def differing() -> tuple[str, list[str], list[str | None]]:
    mesh = mc.make_mesh({"t": 4})
    said: list[str] = []
    with mc.use_mesh(mesh), mc.trace() as t:
        put_on(mesh.axis("t").link, Listed("own", said))
        with pytest.raises(mc.CommError) as error:
            mc.all_reduce(torch.ones(2 if mesh.rank else 3), "t", async_op=True).wait()
        mc.barrier("t", timeout=100)
        take_off(mesh.axis("t").link, mesh.axis("t").link.hooks[-1])
    return str(error.value), said, [event.error for event in t.events]


def of_differing(found: list[Any]) -> None:
    for error, said, errors in found:
        assert "all_reduce f32[3]" in error
        assert "all_reduce f32[2]" in error
        assert "own before all_reduce for later" in said
        assert errors == ["CommError", None]


def test_guard_trace_profiler_and_a_hook_of_ones_own(guarded4: WorkerPool) -> None:
    of_four(guarded4.run(seen_by_all))
    of_differing(guarded4.run(differing))


def test_the_guard_at_the_store_too(guarded4_at_the_store: WorkerPool) -> None:
    of_four(guarded4_at_the_store.run(seen_by_all))
    of_differing(guarded4_at_the_store.run(differing))


def refused() -> list[str]:
    mesh = mc.make_mesh({"t": 4})
    said: list[str] = []
    hook = Listed("own", said)
    with mc.use_mesh(mesh):
        put_on(mesh.axis("t").link, hook)
        with pytest.raises(mc.MeshError, match="reduce_scatter"):
            mc.reduce_scatter(torch.ones(3), "t", sizes=[1, 1, 1])
        take_off(mesh.axis("t").link, hook)
    return said


def test_a_hook_hears_of_what_a_rank_does_not_call(pool4: WorkerPool) -> None:
    assert pool4.run(refused) == [["own is told that reduce_scatter was wrong"]] * 4


class Calls(Hook):
    """It makes a call of its own in each that it is told of."""

    def __init__(self, mesh: mc.Mesh) -> None:
        self.mesh, self.kinds = mesh, set[type]()

    def run(self, what: Running) -> Any:
        self.kinds.add(type(mc.all_reduce(torch.ones(1), "u", mesh=self.mesh)))
        return what.go()


def hook_with_calls() -> list[str]:
    mesh = mc.make_mesh({"t": 2, "u": 2})
    hook = Calls(mesh)
    link = mesh.axis("t").link
    put_on(link, hook)
    try:
        work = mc.all_gather(torch.ones(1), "t", mesh=mesh, async_op=True)
        assert work.wait().tolist() == [1.0, 1.0]
        assert mc.all_reduce(torch.ones(1), "t", mesh=mesh, timeout=30).item() == 2
        mc.barrier("t", mesh=mesh, async_op=True).wait()
    finally:
        take_off(link, hook)
    return [kind.__name__ for kind in hook.kinds]


@pytest.mark.parametrize("where", ["processes", "in_process"])
def test_what_a_hook_calls_at_once_is_waited_for_at_once(where: str, pool4: WorkerPool) -> None:
    run: Run4 = pool4.run if where == "processes" else lambda fn: mc.launch(fn, ranks=4)
    assert run(hook_with_calls) == [["Tensor"]] * 4


def being_dropped(frame: Any) -> bool:
    """Whether it is a finalizer's, in which Python lets no exception out."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def interrupted_at_a_door() -> list[str]:
    """An exception at each entry of a Python function of the library, as Ctrl-C comes: whatever was called for later,
    what this thread calls next at once is not.
    """
    mesh = mc.make_mesh({"a": 1})
    tree = {"x": torch.ones(2), "y": torch.ones(3)}
    calls: list[Callable[[], Any]] = [
        lambda: mc.barrier("a", mesh=mesh, async_op=True),
        lambda: mc.gather(torch.ones(1), "a", dst=0, mesh=mesh, async_op=True),
        lambda: mc.all_reduce(torch.ones(2, requires_grad=True), "a", mesh=mesh, timeout=30),
        lambda: mc.all_gather(tree, "a", mesh=mesh, async_op=True),
    ]
    stuck = []
    for at, call in enumerate(calls):
        for door in range(400):
            left = door

            def arrive(frame: Any, event: str, arg: Any) -> None:
                nonlocal left
                if event == "call" and "meshcomm" in frame.f_code.co_filename and not being_dropped(frame):
                    left -= 1
                    if left < 0:
                        sys.setprofile(None)
                        raise KeyboardInterrupt

            sys.setprofile(arrive)
            try:
                call()
            except KeyboardInterrupt:
                pass
            else:
                break
            finally:
                sys.setprofile(None)
            if told.later or told.waits:
                stuck.append(f"call {at} at door {door}")
                told.later = told.waits = False
        else:
            stuck.append(f"call {at} never came to its end")
    return stuck


def test_who_is_interrupted_at_any_door_of_a_call_waits_at_once_afterwards() -> None:
    assert mc.launch(interrupted_at_a_door, ranks=1) == [[]]
