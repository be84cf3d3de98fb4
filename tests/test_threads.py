"""Threads that communicate at the same time, each on a mesh or an axis of its own: none receives what is another one's, in
whatever order they come to their calls; and meshes by the hundred, which leave nothing behind.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshcomm as mc
from meshcomm.runtime import groups
from meshcomm.runtime.process import boxes

POOLS = ["pool4", "gloo4", "guarded4", "guarded4_at_the_store"]


def rounds(mesh: mc.Mesh, axis: Any, base: int, count: int) -> None:
    """Every kind of call; what comes tells whose it is."""
    at = mesh.axis(axis)
    me, n = at.index, at.size
    everybody = [base + i for i in range(n)]
    for turn in range(count):
        x = torch.tensor([base + me])
        assert mc.all_reduce(x, axis, mesh=mesh).tolist() == [sum(everybody)]
        assert mc.all_gather(x, axis, mesh=mesh).tolist() == everybody
        assert mc.broadcast(x, axis, turn % n, mesh=mesh).tolist() == [everybody[turn % n]]
        assert mc.shift(x, axis, mesh=mesh).tolist() == [everybody[me - 1]]
        works = [
            mc.all_reduce(x, axis, "max", mesh=mesh, async_op=True),
            mc.all_to_all(torch.arange(n) + 10 * (base + me), axis, 0, 0, mesh=mesh, async_op=True),
        ]
        peak, swapped = mc.wait(works)
        assert peak.tolist() == [everybody[-1]]
        assert swapped.tolist() == [10 * each + me for each in everybody]
    assert mc.all_gather_object((base, me), axis, mesh=mesh) == [(base, i) for i in range(n)]
    got = mc.exchange([(x, (me + 1) % n, 4)], [((me - 1) % n, (1,), x.dtype, 4)], axis, mesh=mesh)
    assert got[0].tolist() == [everybody[me - 1]]
    mc.barrier(axis, mesh=mesh)
    mc.barrier(axis, timeout=60, mesh=mesh)
    assert mc.all_reduce(torch.full((200_000,), base), axis, mesh=mesh)[-1].item() == n * base


def side_by_side(jobs: list[Callable[[], None]]) -> None:
    """Each on a thread, started in an order that differs from rank to rank."""
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    turn = mc.rank() % len(threads)
    for thread in threads[turn:] + threads[:turn]:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def on_meshes(kind: str, count: int) -> None:
    if kind == "other names":
        pairs: list[Any] = [(mc.make_mesh({name: 4}), name) for name in ("data", "metrics", "eval")]
    elif kind == "the same name":
        pairs = [(mc.make_mesh({"data": 4}), "data") for _ in range(3)]
    elif kind == "axes and tuples":
        mesh = mc.make_mesh({"a": 4, "b": 1})
        pairs = [(mesh, "a"), (mesh, ("a", "b")), (mesh, ("b", "a"))]
    else:
        mesh = mc.make_mesh({"a": 2, "b": 2})
        pairs = [(mesh, "a"), (mesh, "b"), (mesh, ("a", "b"))]
    side_by_side([
        lambda mesh=mesh, axis=axis, base=100 * i: rounds(mesh, axis, base, count)  # type: ignore[misc]
        for i, (mesh, axis) in enumerate(pairs)
    ])  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("kind", ["other names", "the same name", "axes and tuples", "two axes"])
def test_threads_do_not_receive_each_others_data(request: pytest.FixtureRequest, pool: str, kind: str) -> None:
    request.getfixturevalue(pool).run(on_meshes, kind, 4 if "guarded" in pool else 12)


def made_inside() -> None:
    def alone(name: str, base: int) -> None:
        rounds(mc.make_mesh({name: 4}), name, base, 3)

    side_by_side([lambda: alone("x", 0), lambda: alone("y", 100)])


@pytest.mark.parametrize("pool", ["pool4", "gloo4"])
def test_threads_that_make_their_meshes(request: pytest.FixtureRequest, pool: str) -> None:
    request.getfixturevalue(pool).run(made_inside)


def crossed() -> list[int]:
    """Rank 0 begins on one mesh, the others on the other: the calls meet by mesh."""
    one, other = mc.make_mesh({"a": 4}), mc.make_mesh({"a": 4})
    order = [(one, 1), (other, 10)][:: 1 if one.rank else -1]
    works = [(value, mc.all_reduce(torch.tensor(value), "a", mesh=mesh, async_op=True)) for mesh, value in order]
    return [int(work.wait()) for _, work in sorted(works, key=lambda pair: pair[0])]


def test_calls_meet_by_mesh(run4: Callable[..., list[Any]]) -> None:
    assert run4(crossed) == [[4, 40]] * 4


@pytest.mark.parametrize("pool", ["gloo4", "guarded4"])
def test_calls_meet_by_mesh_elsewhere(request: pytest.FixtureRequest, pool: str) -> None:
    assert request.getfixturevalue(pool).run(crossed) == [[4, 40]] * 4


def aliases() -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    assert mesh.axis("a") is mesh.axis(("a",))
    assert mesh.axis(("a", "b")) is mesh.axis(("a", "b"))
    assert mesh.axis(("a", "b")) is not mesh.axis(("b", "a"))
    x = torch.ones(1)
    assert mc.all_reduce(x, "a" if mesh.rank < 2 else ("a",), mesh=mesh).item() == 2


def test_a_name_and_the_tuple_of_it_alone_are_one_axis(run4: Callable[..., list[Any]]) -> None:
    run4(aliases)


def one_after_the_other(count: int) -> tuple[int, int]:
    """Meshes that are used and dropped."""
    for number in range(count):
        mesh = mc.make_mesh({"a": 2, "b": 2})
        for axis in ("a", ("a", "b")):
            assert mc.all_reduce(torch.tensor(number), axis, mesh=mesh).item() == number * mesh.size_of(axis)
        del mesh
    gc.collect()
    mc.barrier("a", mesh=mc.make_mesh({"a": 4}))
    made = boxes.arena()._cells[boxes._DIRECTORY]
    return len([link for link in groups._links if link.size == 4]), int(made)


def test_meshes_that_are_dropped_leave_nothing_behind(pool4: Any) -> None:
    before = pool4.run(one_after_the_other, 1)
    after = pool4.run(one_after_the_other, 60)
    for (links, made), (later_links, later_made) in zip(before, after, strict=True):
        assert later_links <= links + 4
        assert later_made <= made + 40


def groups_of_torch() -> tuple[bool, bool, list[int]]:
    """A backend whose collectives are torch's own has a group for each sequence, and gives it back."""
    first, second = mc.make_mesh({"q": 4}), mc.make_mesh({"r": 4})
    links = [mesh.axis(name).link for mesh, name in ((first, "q"), (second, "r"))]
    own = [link.group for link in links]
    numbers = []
    for _ in range(4):
        mesh = mc.make_mesh({"s": 4})
        group = mesh.axis("s").link.group
        numbers.append(id(group))
        mc.barrier("s", timeout=200, mesh=mesh)
        del mesh, group
        gc.collect()
        mc.barrier("q", timeout=200, mesh=first)
    return own[0] is own[1], links[0].base is links[1].base, [numbers.count(each) for each in numbers]


def test_groups_of_torch_are_used_again(gloo4: Any) -> None:
    for same, same_base, again in gloo4.run(groups_of_torch):
        assert not same
        assert same_base
        assert max(again) > 1
