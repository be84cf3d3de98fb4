"""Gradients through works: those of the synchronous call, whenever, wherever and in whatever order they are waited for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cases import BY_NAME, SHARES, Case, grid
from oracle import Oracle
from torch import Tensor
from torch.utils import _pytree as pytree

import meshcomm as mc
from meshcomm.runtime.call import told
from meshcomm.runtime.ledger import Ledger
from meshcomm.runtime.pending import Pending

if TYPE_CHECKING:
    pass
from works import (
    BF16,
    BIG,
    F32,
    F64,
    SOME,
    Run4,
    call,
    data,
    equal,
    gradients,
    input_of,
    mesh4,
    mesh22,
    shuffled,
    weighted,
)


def same_gradients(names: list[str], shape: tuple[int, ...], axis: Any, as_tree: bool, dtype: torch.dtype) -> None:
    mesh, oracle = mc.make_mesh(grid(shape)), Oracle(grid(shape))
    for case in [BY_NAME[name] for name in names]:
        x = input_of(case, oracle, axis, dtype, mesh.rank)

        def now(x: Tensor, case: Case = case) -> Any:
            return call(case, {"x": x, "y": [2 * x, x.square()]} if as_tree else x, axis, mesh)

        def later(x: Tensor, case: Case = case) -> Any:
            work = call(case, {"x": x, "y": [2 * x, x.square()]} if as_tree else x, axis, mesh, async_op=True)
            torch.ones(3).sin()
            return work.wait()

        equal(gradients(later, x), gradients(now, x), f"{case.name} over {axis!r} of {dtype} on rank {mesh.rank}")


@pytest.mark.parametrize("names", SHARES)
def test_gradients(run4: Run4, names: list[str]) -> None:
    run4(same_gradients, [name for name in names if F32 in BY_NAME[name].dtypes], (4,), "a", False, F32)


def test_gradients_of_half_precision(run4: Run4) -> None:
    run4(same_gradients, SOME, (4,), "a", False, BF16)


def test_gradients_of_trees(run4: Run4) -> None:
    run4(same_gradients, SOME, (4,), "a", True, F32)


def test_gradients_over_a_tuple(run4: Run4) -> None:
    run4(same_gradients, SOME, (2, 2), ("b", "a"), False, F64)


def in_anomaly_mode() -> None:
    mesh, oracle = mesh4(), Oracle(grid((4,)))
    with torch.autograd.set_detect_anomaly(True):
        for name in SOME:
            case = BY_NAME[name]
            leaf = input_of(case, oracle, "a", F32, mesh.rank).requires_grad_()
            (expected,) = torch.autograd.grad(weighted(call(case, leaf.sin(), "a", mesh)), leaf)
            (found,) = torch.autograd.grad(weighted(call(case, leaf.sin(), "a", mesh, async_op=True).wait()), leaf)
            equal(found, expected, f"{name} on rank {mesh.rank}")
        leaf = torch.zeros(4, requires_grad=True)
        total = mc.all_gather(leaf.sqrt() * 0, "a", mesh=mesh, async_op=True).wait().sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of where the node was made
            with pytest.raises(RuntimeError, match="returned nan values"):
                total.backward()


def test_anomaly_mode(run4: Run4) -> None:
    run4(in_anomaly_mode)


def large_gradients() -> None:
    mesh = mesh4()
    x = data(BIG // 2, seed=mesh.rank)
    cases: dict[str, Callable[..., Any]] = {
        "pvary": lambda x, **k: mc.pvary(x, "a", **k),
        "pvary of a tree": lambda x, **k: mc.pvary([x, x * 2, x.sin()], "a", bucket_mb=3, **k),
        "all_reduce max": lambda x, **k: mc.all_reduce(x, "a", "max", **k),
        "all_gather": lambda x, **k: mc.all_gather(x, "a", **k),
        "reduce_scatter": lambda x, **k: mc.reduce_scatter(x, "a", **k),
        "all_to_all": lambda x, **k: mc.all_to_all(x, "a", 0, 0, **k),
        "shift": lambda x, **k: mc.shift(x, "a", -1, **k),
        "broadcast": lambda x, **k: mc.broadcast(x, "a", 3, **k),
    }
    for name, fn in cases.items():
        leaf = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(weighted(fn(leaf.sin(), mesh=mesh)), leaf)
        (found,) = torch.autograd.grad(weighted(fn(leaf.sin(), mesh=mesh, async_op=True).wait()), leaf)
        equal(found, expected, f"{name} on rank {mesh.rank}")


def test_large_gradients(run4: Run4) -> None:
    run4(large_gradients)


# ------------------------------------------------------------------------------------- what happens between the two


MODES = {"grad": torch.enable_grad, "no grad": torch.no_grad, "inference": torch.inference_mode}


def other_modes(large: bool) -> None:
    """What counts is the mode at the call, as for a synchronous collective; the mode of the wait does not."""
    mesh = mesh4()
    cases: dict[str, Callable[..., Any]] = {
        "large all_reduce": lambda x, **k: mc.all_reduce(x.repeat(BIG // 16), "a", "mean", **k),
        "large all_gather": lambda x, **k: mc.all_gather(x.repeat(BIG // 16), "a", **k),
        "large reduce_scatter": lambda x, **k: mc.reduce_scatter(x.repeat(BIG // 16), "a", **k),
    } if large else {
        "all_reduce": lambda x, **k: mc.all_reduce(x, "a", **k),
        "max": lambda x, **k: mc.all_reduce(x, "a", "max", **k),
        "all_gather": lambda x, **k: mc.all_gather(x, "a", **k),
        "a tree": lambda x, **k: mc.reduce_scatter({"x": x, "y": [x * 2]}, "a", **k),
        "pvary": lambda x, **k: mc.pvary(x, "a", **k),
        "a pvaried tree": lambda x, **k: mc.pvary([x, x * 3], "a", **k),
        "shift": lambda x, **k: mc.shift(x, "a", wrap=False, **k),
    }  # fmt: skip
    x = data(4, seed=mesh.rank)
    for name, fn in cases.items():
        for at_call in MODES:
            for at_wait in MODES:
                what = f"{name}, called under {at_call}, waited under {at_wait}, on rank {mesh.rank}"
                leaf = x.clone().requires_grad_()
                with MODES[at_call]():
                    expected = fn(leaf * 2, mesh=mesh)
                    work = fn(leaf * 2, mesh=mesh, async_op=True)
                with MODES[at_wait]():
                    y = work.wait()
                equal(y, expected, what)
                needed = [[leaf.requires_grad for leaf in pytree.tree_leaves(tree)] for tree in (y, expected)]
                assert needed[0] == needed[1] == [at_call == "grad"] * len(needed[0]), what
                made = [[leaf.is_inference() for leaf in pytree.tree_leaves(tree)] for tree in (y, expected)]
                assert made[0] == made[1], what
                if at_call == "grad":
                    found = [torch.autograd.grad(weighted(tree), leaf)[0] for tree in (y, expected)]
                    equal(found[0], found[1], what)


def test_wait_in_another_grad_mode(run4: Run4) -> None:
    run4(other_modes, False)


def test_wait_in_another_grad_mode_of_large_tensors(run4: Run4) -> None:
    run4(other_modes, True)


def changed_and_dropped(names: list[str]) -> None:
    """x is changed in place at once, then nobody holds it, and its memory is given to others."""
    mesh, oracle = mesh4(), Oracle(grid((4,)))
    begun = []
    for case in [BY_NAME[name] for name in names]:
        if case.op == "pvary" or F32 not in case.dtypes:  # the result of pvary is x
            continue
        leaf = input_of(case, oracle, "a", F32, mesh.rank).requires_grad_()
        expected = call(case, leaf * 1, "a", mesh)
        (g,) = torch.autograd.grad(weighted(expected), leaf)
        x = leaf * 1
        begun.append((case, leaf, call(case, x, "a", mesh, async_op=True), expected, g))
        x.mul_(0).add_(7)
    del x
    gc.collect()
    junk = [torch.full_like(leaf, 1e9) for _, leaf, *_ in begun for _ in range(3)]
    for case, leaf, work, expected, g in shuffled(begun, 5):
        what = f"{case.name} on rank {mesh.rank}"
        if not case.linear:  # its derivative needs the x that was
            errors = []
            for wait in (work.wait, work.wait, work.then(torch.sum).wait):
                with pytest.raises(mc.MeshError, match="changed in place between the start and the wait") as caught:
                    wait()
                errors.append(caught.value)
            assert errors[0] is errors[1] is errors[2]
            assert work.done()
            continue
        equal(work.wait(), expected, what)
        equal(torch.autograd.grad(weighted(work.wait()), leaf)[0], g, what)
    del junk


@pytest.mark.parametrize("names", SHARES)
def test_x_may_be_changed_and_dropped_meanwhile(run4: Run4, names: list[str]) -> None:
    run4(changed_and_dropped, names)


def changed_without_gradient() -> None:
    mesh = mesh4()
    for x in (data(6, seed=mesh.rank), data(BIG // 2, seed=mesh.rank)):
        leaf = x.clone().requires_grad_()
        expected = mc.all_reduce(leaf, "a", "max", mesh=mesh).detach()
        with torch.no_grad():
            work = mc.all_reduce(leaf, "a", "max", mesh=mesh, async_op=True)
            leaf.fill_(1e9)
        equal(work.wait(), expected, f"max on rank {mesh.rank}")


def test_x_of_a_maximum_may_be_changed_where_no_gradient_is_asked_for(run4: Run4) -> None:
    run4(changed_without_gradient)


def neighbours() -> list[float]:
    """Parameters that are views of one flat tensor: each has a version counter of its own."""
    mesh = mesh4()
    flat = torch.tensor([1.0, 1.0, 2.0, 2.0])
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for i, param in enumerate(params):
        param.data = flat[2 * i : 2 * i + 2]
    work = mc.all_reduce(params, "a", "max", mesh=mesh, async_op=True)
    with torch.no_grad():
        params[1].fill_(7.0)
    try:
        first, second = work.wait()
    except mc.MeshError:
        return [0.25, 0.25]  # said clearly: as good
    (first.sum() + second.sum()).backward()
    assert params[1].grad is not None
    return params[1].grad.tolist()


def test_a_changed_leaf_beside_others_does_not_spoil_the_gradient(run4: Run4) -> None:
    assert run4(neighbours) == [[0.25, 0.25]] * 4


def in_an_order(orders: list[list[int]], how: str) -> None:
    """Works of several axes, which each rank waits for in the order given for it; then backward, and backward of that."""
    mesh = mesh22()
    leaves = [data(4, seed=9 * mesh.rank + i).requires_grad_() for i in range(9)]

    def begin(later: bool) -> list[Any]:
        k: dict[str, Any] = {"mesh": mesh, "async_op": later}
        return [
            mc.all_gather(leaves[0], "a", **k),
            mc.all_gather(leaves[1], "a", **k),
            mc.all_reduce(leaves[2], "b", "max", **k),
            mc.reduce_scatter(leaves[3], ("b", "a"), **k),
            mc.all_gather(leaves[4], "b", **k),
            mc.all_reduce(leaves[5], "a", "product", **k),
            mc.shift(leaves[6], "a", **k),
            mc.all_to_all(leaves[7], "b", 0, 0, **k),
        ]

    def at_once() -> Tensor:
        return mc.all_reduce(mc.all_gather(leaves[8], "a", mesh=mesh).cos(), "b", "min", mesh=mesh)

    def finish(begun: list[Any]) -> list[Any]:
        ys: list[Any] = [None] * 9
        for step, i in enumerate(orders[mesh.rank]):
            if how == "polled":
                while not begun[i].done():
                    pass
            ys[i] = begun[i].wait().sin()
            if step == 3:
                ys[8] = at_once()
        return ys

    async def gathered(begun: list[Any]) -> list[Any]:
        async def one(i: int) -> Any:
            return (await begun[i]).sin()

        ys = await asyncio.gather(*(one(i) for i in orders[mesh.rank]))
        return [ys[orders[mesh.rank].index(i)] for i in range(8)] + [at_once()]

    def program(later: bool) -> list[Tensor]:
        begun = begin(later)
        if not later:
            ys = [y.sin() for y in begun] + [at_once()]
        else:
            ys = asyncio.run(gathered(begun)) if how == "gathered" else finish(begun)
        loss = torch.stack([weighted(y) * (i + 1) for i, y in enumerate(ys)]).sum()
        gs = torch.autograd.grad(loss, leaves, create_graph=True)
        return [y.detach() for y in ys] + list(gs) + list(torch.autograd.grad(weighted(list(gs)), leaves))

    for _ in range(2):
        equal(program(True), program(False), f"order {orders[mesh.rank]} on rank {mesh.rank}")
        loss = torch.stack([weighted(y) * (i + 1) for i, y in enumerate(finish(begin(True)))]).sum()
        found = torch.autograd.grad(loss, leaves)  # no create_graph: the transposes overlap
        equal(list(found), program(False)[9:18], f"once, order {orders[mesh.rank]} on rank {mesh.rank}")


EVERY = list(range(8))
ORDERS = {
    "backwards": [EVERY[::-1]] * 4,
    "one that is mixed": [shuffled(EVERY, 3)] * 4,
    "two that are turned round": [EVERY, EVERY[::-1], EVERY[::-1], EVERY],
    "four of their own": [shuffled(EVERY, seed) for seed in range(4)],
    "four others": [shuffled(EVERY, seed) for seed in range(4, 8)],
}


@pytest.mark.one_in(2, alike=True)
@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
def test_gradients_whatever_is_waited_for_first(run4: Run4, orders: list[list[int]]) -> None:
    run4(in_an_order, orders, "waited")


@pytest.mark.parametrize("how", ["polled", "gathered"])
def test_gradients_however_they_are_waited_for(run4: Run4, how: str) -> None:
    run4(in_an_order, ORDERS["four of their own"], how)


# -------------------------------------------------------------------------------------------------- overlap in backward


class Logged(Pending):
    """Says when it is waited for."""

    def __init__(self, inner: Pending, log: list[str]) -> None:
        self.inner, self.log = inner, log

    def wait(self, timeout: float | None) -> Any:
        self.log.append("waited for")
        return self.inner.wait(timeout)

    def done(self) -> bool:
        return self.inner.done()


@contextlib.contextmanager
def logging(link: Any, log: list[str]) -> Iterator[None]:
    """Note when a primitive of this link is begun for later, and when what it gave is waited for."""
    inside: list[None] = []  # one primitive may be made of others
    names = (
        "all_reduce", "all_gather", "gather_flat", "reduce_scatter", "scatter_flat", "all_to_all", "swap_flat",
        "permute", "broadcast",
    )  # fmt: skip

    def logged(inner: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any) -> Any:
            if inside or not told.later:
                return inner(*args)
            log.append("begun")
            inside.append(None)
            result = inner(*args)
            inside.pop()
            return Logged(result, log) if isinstance(result, Pending) else result

        return begin

    for name in names:
        setattr(link, name, logged(getattr(link, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(link, name)


def order_in_backward(name: str, order: list[int]) -> list[str]:
    """As many works as there are numbers, waited for in this order."""
    mesh = mesh4()
    case = BY_NAME[name]
    log: list[str] = []
    before = [data(8, 8, seed=mesh.rank).requires_grad_() * 1 for _ in order]
    before[0].register_hook(lambda g: log.append("what was before the start"))
    works = [call(case, x, "a", mesh, async_op=True) for x in before]
    between = data(8).requires_grad_().sin()
    between.register_hook(lambda g: log.append("what was between"))
    after = sum(works[i].wait() for i in order) * 2
    after.register_hook(lambda g: log.append("what was after the wait"))
    loss = after.sum() + between.square().sum()
    with logging(mesh.axis("a").link, log):
        loss.backward()
    return log


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter-mean", "all_to_all-0-1", "permute", "shift"])
def test_the_transpose_starts_where_the_wait_was_and_is_waited_for_where_the_start_was(run4: Run4, name: str) -> None:
    expected = ["what was after the wait", "begun", "what was between", "waited for", "what was before the start"]
    assert run4(order_in_backward, name, [0]) == [expected] * 4


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]], ids=str)
def test_several_transposed_collectives_are_under_way_at_once(run4: Run4, order: list[int]) -> None:
    """However they were waited for."""
    begun, waited = ["begun"] * 3, ["waited for"] * 3
    expected = ["what was after the wait", *begun, "what was between", *waited, "what was before the start"]
    assert run4(order_in_backward, "all_gather", order) == [expected] * 4


@pytest.mark.parametrize("step", [1, -1])
def test_a_thousand_works_are_run_backwards(step: int) -> None:
    """Whichever is waited for first: who holds back whom is a chain as long."""

    def main() -> float:
        x = torch.ones(2, requires_grad=True)
        with mc.use_mesh(mc.make_mesh({"dp": 2})):
            works = [mc.all_reduce(x, "dp", async_op=True) for _ in range(1000)]
            return torch.autograd.grad([work.wait().sum() for work in works[::step]], x)[0].sum().item()

    assert mc.launch(main, ranks=2) == [2000.0, 2000.0]


def test_what_was_dropped_or_waited_for_is_not_under_way() -> None:
    """Nobody looks on from what came before."""

    class Dropped:
        pass

    ledger, call = Ledger(), Dropped()
    first = ledger.begin(call)
    del call
    waited, kept = Dropped(), Dropped()
    second = ledger.begin(waited)
    assert first.following is None
    assert first.call() is None
    third = ledger.begin(kept)
    assert second.following is third
    assert ledger.wait(second) is third
    assert ledger.wait(third) is third
    ledger.begin(kept)
    assert third.following is None
