"""Work: what a collective with ``async_op=True`` gives is the synchronous result, whenever and however it is waited for.

Most programs run on both runtimes. A peer is kept from coming too early by a message that the first rank sends when it has
seen what it should see, never by a pause: so the same program is exact on processes and an error at once in-process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from cases import BY_NAME, Case, grid
from oracle import Oracle
from torch import Tensor
from torch.func import grad, jvp, vmap
from works import F64, SOME, Run4, awaited, by_hand, call, data, equal, go, input_of, mesh4, weighted

import meshcomm as mc
from meshcomm.work import Work

# --------------------------------------------------------------------------------------------------- wait and then


class Pair(NamedTuple):
    left: Any
    right: Any


def futures() -> None:
    mesh = mesh4()
    x = data(4, seed=mesh.rank)
    total, gathered = mc.all_reduce(x, "a", mesh=mesh), mc.all_gather(x, "a", mesh=mesh)

    def begin() -> tuple[Work[Tensor], Work[Tensor]]:
        return mc.all_reduce(x, "a", mesh=mesh, async_op=True), mc.all_gather(x, "a", mesh=mesh, async_op=True)

    one, two = begin()
    assert "under way: all_reduce f32[4] (op='sum') over 'a'" in repr(one)
    y = one.wait()
    assert one.wait() is y is one.wait(timeout=3) is mc.wait(one)
    assert one.done()
    assert "done" in repr(one)
    equal((y, two.wait(timeout=float("inf"))), (total, gathered), "wait again")

    one, two = begin()
    tree = {"w": one, "rest": [3, None, "text", x, Pair(two, (one,))]}
    found = mc.wait(tree, timeout=60)
    equal(found, {"w": total, "rest": [3, None, "text", x, Pair(gathered, (total,))]}, "a tree")
    assert found["rest"][3] is x
    assert found["w"] is found["rest"][4].right[0]
    assert tree["w"] is one
    assert mc.wait(3) == 3
    assert mc.wait(None) is None
    assert mc.wait([]) == []


def test_wait(run4: Run4) -> None:
    run4(futures)


def followers() -> None:
    mesh = mesh4()
    x = data(4, seed=mesh.rank).requires_grad_()
    expected = mc.all_gather(x, "a", mesh=mesh)
    calls: list[str] = []

    def named(name: str, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def logged(value: Any) -> Any:
            calls.append(name)
            return fn(value)

        return logged

    first = mc.all_gather(x, "a", mesh=mesh, async_op=True)
    doubled = first.then(named("double", lambda y: y * 2))
    summed = doubled.then(named("sum", torch.sum))
    other = first.then(named("other", lambda y: y.shape))
    assert "all_gather" in repr(summed)
    assert calls == []
    while not summed.done():
        pass
    assert calls == []  # in the first wait, and not before
    value = summed.wait()
    assert calls == ["double", "sum"]
    assert summed.wait() is value
    equal(doubled.wait(), expected * 2, "then")
    assert other.wait() == (16,)
    equal(first.wait(), expected, "the first")
    assert calls == ["double", "sum", "other"]
    equal(torch.autograd.grad(value, x), torch.autograd.grad((expected * 2).sum(), x), "the gradient of what then gave")

    boom = ValueError("boom")

    def fails(value: Any) -> Any:
        raise boom

    first = mc.all_gather(x, "a", mesh=mesh, async_op=True)
    broken = first.then(named("broken", fails))
    after = broken.then(named("after", torch.sum))
    calls.clear()
    for work in (after, broken, after, broken):
        with pytest.raises(ValueError, match="boom") as caught:
            work.wait()
        assert caught.value is boom
        assert work.done()
        assert "failed" in repr(work)
    assert calls == ["broken"]
    equal(first.wait(), expected, "the first is none the worse")
    done = mc.pvary(x, "a", mesh=mesh, async_op=True)
    assert done.done()
    equal(done.then(torch.sum).wait(), x.sum(), "then of what is done")


def test_then(run4: Run4) -> None:
    run4(followers)


def later_than_later() -> None:
    """A work begun in ``then``, and a work that gives a work: as many steps as the user likes."""
    mesh = mesh4()
    x = data(4, seed=mesh.rank)
    first = mc.all_gather(x, "a", mesh=mesh, async_op=True)
    second = first.then(lambda y: mc.reduce_scatter(y, "a", mesh=mesh, async_op=True))
    equal(second.wait().wait(), 4 * x, "two steps")


def test_then_may_begin_another(run4: Run4) -> None:
    run4(later_than_later)


def coroutines() -> None:
    mesh = mesh4()
    x = data(4, seed=mesh.rank)
    total, gathered = mc.all_reduce(x, "a", mesh=mesh), mc.all_gather(x, "a", mesh=mesh)

    async def main() -> None:
        work = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
        one, two = await asyncio.gather(awaited(work), awaited(work))
        assert one is two is await work
        equal(one, total, "two tasks")
        works = [mc.all_reduce(x, "a", mesh=mesh, async_op=True), mc.all_gather(x, "a", mesh=mesh, async_op=True)]
        works.append(mc.shift(x, "a", mesh=mesh, async_op=True).then(torch.sum))
        found = await asyncio.gather(*works)
        equal(found[:2], [total, gathered], "gather")

    asyncio.run(main())
    asyncio.run(main())  # another loop

    async def twice() -> Tensor:
        works = [mc.all_gather(x, "a", mesh=mesh, async_op=True) for _ in range(2)]
        return await works[1] + await works[0]

    equal(by_hand(twice()), 2 * gathered, "driven by hand")


def test_await(run4: Run4) -> None:
    run4(coroutines)


def others_go_on() -> int:
    """The task that lets the peers go runs only if the one that awaits them does not hold up the loop."""
    mesh = mesh4()
    x = data(4, seed=mesh.rank)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        for _ in range(100):
            ticks += 1
            await asyncio.sleep(0)
        go(mesh)

    async def main() -> Tensor:
        ticking = asyncio.ensure_future(tick())
        y = await mc.all_reduce(x, "a", mesh=mesh, async_op=True)
        await ticking
        return y

    if mesh.rank == 0:
        y = asyncio.run(main())
    else:
        go(mesh)
        y = mc.all_reduce(x, "a", mesh=mesh, async_op=True).wait()
    equal(y, mc.all_reduce(x, "a", mesh=mesh), "the sum")
    return ticks


def test_other_tasks_run_while_one_awaits(run4: Run4) -> None:
    assert run4(others_go_on) == [100, 0, 0, 0]


def waits_for_a_while() -> None:
    mesh = mesh4()
    x = data(4, seed=mesh.rank)

    async def main() -> Tensor:
        work = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
        for _ in range(2):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(work, 0.001)
        assert not work.done()
        go(mesh)
        return await asyncio.wait_for(work, 60)

    if mesh.rank == 0:
        y = asyncio.run(main())
    else:
        go(mesh)
        y = mc.all_reduce(x, "a", mesh=mesh, async_op=True).wait()
    equal(y, mc.all_reduce(x, "a", mesh=mesh), "the sum")


def test_wait_for_that_runs_out_and_awaits_again(run4: Run4) -> None:
    run4(waits_for_a_while)


# -------------------------------------------------------------------------------------------- transforms and compile


def transformed() -> None:
    mesh, oracle = mesh4(), Oracle(grid((4,)))
    for name in SOME[::2]:
        case = BY_NAME[name]
        x = input_of(case, oracle, "a", F64, mesh.rank)
        batch = torch.stack([x, 2 * x, x - 1])

        def now(x: Tensor, case: Case = case) -> Any:
            return call(case, x.sin(), "a", mesh).tanh()

        def later(x: Tensor, case: Case = case) -> Any:
            work = call(case, x.sin(), "a", mesh, async_op=True)
            assert work.done()  # when it is made
            return work.then(torch.tanh).wait()

        def scalar(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: weighted(fn(x))

        what = f"{name} on rank {mesh.rank}"
        equal(grad(scalar(later))(x), grad(scalar(now))(x), f"grad of {what}")
        equal(vmap(later)(batch), vmap(now)(batch), f"vmap of {what}")
        equal(jvp(later, (x,), (x.cos(),)), jvp(now, (x,), (x.cos(),)), f"jvp of {what}")


def test_transforms(run4: Run4) -> None:
    run4(transformed)


def waited_for_inside(needs_grad: bool) -> None:
    """Begun outside of the transform: what is waited for is a constant to it, and as differentiable as ever outside."""
    mesh = mesh4()
    x = data(4, seed=mesh.rank, dtype=F64).requires_grad_(needs_grad)
    z, zs = data(4, dtype=F64), data(3, 4, dtype=F64)
    total = mc.all_reduce(x, "a", mesh=mesh)
    for transform in (lambda fn: grad(fn)(z), lambda fn: vmap(fn)(zs), lambda fn: jvp(fn, (z,), (z,))):
        work = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
        equal(transform(lambda z: (work.wait() * z).sum()), transform(lambda z: (total * z).sum()), "inside")
        equal(work.wait(), total, "outside")
        if needs_grad:
            equal(torch.autograd.grad(work.wait().sum(), x), (torch.ones(4, dtype=F64),), "the gradient")


@pytest.mark.parametrize("needs_grad", [False, True])
def test_waited_for_under_a_transform(run4: Run4, needs_grad: bool) -> None:
    run4(waited_for_inside, needs_grad)


def compiled() -> None:
    mesh = mesh4()
    k: dict[str, Any] = {"mesh": mesh, "async_op": True}

    def fn(x: Tensor) -> Any:
        total, highest = mc.all_reduce(x.sin(), "a", **k), mc.all_reduce(x, "a", "max", **k).then(torch.cos)
        params = mc.pvary({"w": x, "b": [2 * x]}, "a", **k).wait()
        works = [mc.reduce_scatter([params["w"].sin()], "a", **k), 3, mc.shift(params["b"], "a", **k)]
        z = x.cos()
        while not total.done():
            pass
        scattered, _, shifted = mc.wait(works)
        swapped = mc.all_to_all(z * highest.wait(), "a", 0, 0, **k).wait(timeout=5)
        first = mc.broadcast(x, "a", 1, **k).wait()
        return (total.wait() * swapped * shifted[0] + first).sum() + scattered[0].exp().sum()

    torch._dynamo.reset()
    results = []
    for run in (fn, torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=False)):
        leaf = torch.linspace(-1, 1, 8, dtype=F64).mul(1 + mesh.rank).requires_grad_()
        y = run(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
def test_compile(pool4: Any) -> None:
    pool4.run(compiled)
