"""Collectives in a checked region, and the pvary that is put in once for all uses of a tensor."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from vma_checks import F64, LINE, I, N, V, checked, counted, kind, on_ranks, ones, own, same, sq, two, weight, zeros

import meshcomm as mc
from meshcomm import watch
from meshcomm.spmd.types.checker import Checker

COLLECTIVES: dict[str, tuple[Callable[[Tensor], Any], frozenset[str], bool]] = {
    "pvary": (lambda x: mc.pvary(x, "dp"), V, False),
    "all_reduce": (lambda x: mc.all_reduce(x, "dp"), I, True),
    "all_reduce, mean": (lambda x: mc.all_reduce(x, "dp", "mean"), I, True),
    "all_gather": (lambda x: mc.all_gather(x, "dp"), V, True),
    "all_gather_invariant": (lambda x: mc.all_gather_invariant(x, "dp"), I, True),
    "shard": (lambda x: mc.shard(x, "dp"), V, False),
    "reduce_scatter": (lambda x: mc.reduce_scatter(x, "dp"), V, True),
    "all_to_all": (lambda x: mc.all_to_all(x, "dp", 0, 0), V, True),
    "permute": (lambda x: mc.permute(x, "dp", [(0, 1), (1, 0)]), V, True),
    "shift": (lambda x: mc.shift(x, "dp"), V, True),
    "scan": (lambda x: mc.scan(x, "dp"), V, True),
    "broadcast": (lambda x: mc.broadcast(x, "dp"), I, True),
    "axis_index": (lambda x: mc.axis_index("dp") + x, V, True),
    "reshard": (lambda x: mc.reshard(x, "(dp a) -> a"), I, True),
    "reshard of a whole": (lambda x: mc.reshard(x, "a -> (dp a)"), V, False),
    "einsum": (lambda x: mc.einsum("(dp a), (dp a) ->", x, x), I, True),
    "a tree": (lambda x: mc.all_gather([{"a": x}, {"a": x}], "dp")[1]["a"], V, True),
}


AT_ONCE = ("axis_index", "einsum", "a tree", "reshard", "pvary", "shard")
"""Have no async_op, send nothing, or are tested with it elsewhere."""


@pytest.mark.parametrize(
    ("name", "async_op"),
    [(name, async_op) for name in COLLECTIVES for async_op in (False, True) if not (async_op and name.startswith(AT_ONCE))],
)  # fmt: skip
def test_collectives(name: str, async_op: bool) -> None:
    """What each takes and gives, of a value that varies or of one that does not."""
    fn, gives, takes_varying = COLLECTIVES[name]

    def call(x: Tensor) -> Any:
        if not async_op:
            return fn(x)
        own_name, *op = name.split(", ")
        more = {"all_to_all": (0, 0), "permute": ([(0, 1), (1, 0)],)}.get(own_name, tuple(op))
        return getattr(mc, own_name)(x, "dp", *more, async_op=True).wait()

    def run() -> Any:
        x = two() if takes_varying else zeros(2)
        found = kind(call(x))
        if not takes_varying:
            with pytest.raises(mc.VaryingError, match="'dp'"):
                call(two())
        return found

    assert on_ranks(run) == [gives] * N


def test_to_and_from_one_rank() -> None:
    def run() -> Any:
        with mc.check_vma(False):
            index = mc.current_mesh().rank  # type: ignore[union-attr]
        x = mc.mark_varying(zeros(2), "dp")
        reduced, gathered = mc.reduce(x, "dp"), mc.gather(x, "dp")
        scattered = mc.scatter(zeros(4) if index == 0 else None, "dp", like=zeros(2))
        mc.send(x, "dp", 1 - index) if index == 0 else None
        received = None if index == 0 else mc.recv("dp", 0, shape=(2,), dtype=F64)
        return [None if y is None else kind(y) for y in (reduced, gathered, scattered, received)]

    assert on_ranks(run) == [[V, V, V, None], [None, None, V, V]]


def test_what_comes_from_one_rank_varies_as_the_sender_may() -> None:
    def run() -> Any:
        with mc.check_vma(False):
            index = mc.current_mesh().coordinate["dp"]  # type: ignore[union-attr]
        x = mc.mark_varying(zeros(2), "tp")
        mc.send(x, "dp", 1) if index == 0 else None
        received = None if index == 0 else mc.recv("dp", 0, shape=(2,), dtype=F64)
        scattered = mc.scatter(torch.stack([x, x]).view(4) if index == 0 else None, "dp", like=zeros(2))
        [exchanged] = mc.exchange([(x, 1 - index)], [(1 - index, (2,), F64)], "dp")
        return [None if y is None else kind(y) for y in (received, scattered, exchanged)]

    every = frozenset(["dp", "tp"])
    assert on_ranks(run, axes={"dp": 2, "tp": 2}) == [[None, every, every]] * 2 + [[every] * 3] * 2


def test_works() -> None:
    def run() -> Any:
        x, w = own(), same()
        a = mc.all_reduce(x @ w, "dp", async_op=True)
        b = mc.all_gather(x, "dp", async_op=True).then(lambda y: sq(y @ w))
        c = mc.all_reduce({"u": x}, "dp", async_op=True)

        async def awaited() -> Tensor:
            found: Tensor = await mc.all_reduce(x, "dp", async_op=True)
            return found

        waited = mc.wait({"a": a, "c": c})
        y = b.wait()
        types = [kind(t) for t in (waited["a"], waited["c"]["u"], y, asyncio.run(awaited()))]
        (g,) = torch.autograd.grad(mc.all_reduce(y, "dp"), w)
        return types, g

    every = torch.cat([ones(2, 3) + i for i in range(N)])
    w = weight().requires_grad_()
    (expected,) = torch.autograd.grad(N * sq(every @ w), w)
    for kinds, g in on_ranks(run):
        assert kinds == [I, I, V, I]
        assert_close(g, expected)


def test_another_mesh() -> None:
    def run() -> None:
        other = mc.make_mesh({"a": N})
        with checked() as mesh:
            with pytest.raises(mc.MeshError, match="another mesh than the one that is checked"):
                mc.all_reduce(own(), "a", mesh=other)
            assert kind(mc.all_reduce(own(), "dp", mesh=mc.make_mesh(LINE))) == I
            assert watch.here.watcher is not None
            assert mesh.shape == LINE

    mc.launch(run, ranks=N)


def test_one_pvary_for_all_uses() -> None:
    def run() -> None:
        w = same()
        h = w * 2
        x = own()
        q, k, v = x @ h, x @ h, x @ h
        torch.autograd.grad(sq(q + k) + sq(v), w)

    assert counted(run) == 1


def test_another_pvary_after_a_change() -> None:
    def run() -> None:
        w = same()
        h = w * 2
        x = own()
        a = (x @ h).sum()
        h.mul_(1.0)
        b = sq(x @ h)
        assert kind(h) == I
        torch.autograd.grad(a + b, w)

    def changed_by_a_view() -> None:
        w = same()
        h = w * 2
        x = own()
        first = (x + h[0][None]).sum()
        h[0][0] = 1.0
        torch.autograd.grad(first + sq(x @ h), w)

    assert counted(run) == 2
    assert counted(changed_by_a_view) == 2


def test_the_least_recent_are_forgotten() -> None:
    def run(between: int) -> None:
        w = same()
        h = w * 2
        x = own()
        total = sq(x @ h)
        others = [w * i for i in range(between)]
        for i, other in enumerate(others):
            total = total + sq(x @ other)
            if i == between // 2:
                total = total + sq(x @ h)
        torch.autograd.grad(total + sq(x @ h), w)

    assert counted(lambda: run(63)) == 64
    assert counted(lambda: run(100)) == 101  # in the middle it was used again
    assert counted(lambda: run(140)) == 143


def test_parameters_are_remembered_for_long() -> None:
    def run() -> None:
        w = mc.mark_varying(nn.Parameter(weight()), ())
        x = own()
        total = sq(x @ w)
        for i in range(100):
            total = total + sq(x @ (w.detach() * i).requires_grad_())
        torch.autograd.grad(total + sq(x @ w), w)

    assert counted(run) == 1


def test_nothing_is_kept() -> None:
    def run() -> Any:
        checker = watch.here.watcher
        assert isinstance(checker, Checker)
        w = mc.mark_varying(nn.Parameter(weight()), ())
        activations = []
        sizes = set()
        for _ in range(200):
            h = w * 2
            activations.append(weakref.ref(h))
            leaf = zeros(3).requires_grad_()
            mc.all_reduce(sq(own() @ h + leaf), "dp").backward()
            with torch.no_grad():
                w.sub_(w.grad * 1e-3)  # type: ignore[operator]
            w.grad = None
            sizes.add((len(checker._lately), len(checker._pvaried), len(checker._known)))
        del h, leaf
        gc.collect()
        return len(sizes), sum(each() is not None for each in activations), checker, weakref.ref(w)

    for sizes, alive, checker, w in on_ranks(run):
        assert (sizes, alive) == (1, 0)
        gc.collect()
        assert w() is None
        assert not checker._lately
        assert not checker._pvaried
