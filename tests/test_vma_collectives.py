"""Collectives in a checked region, and the pvary that is put in once for all uses of a tensor."""

from __future__ import annotations

import asyncio
import gc
import sys
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
from meshcomm._torch import tree_flatten
from meshcomm.spmd.types import vma
from meshcomm.spmd.types.checker import Checker
from meshcomm.spmd.types.sizes import varying_numbers
from meshcomm.work import looked_at

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


def test_none_is_forgotten_that_the_program_has() -> None:
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
    assert counted(lambda: run(140)) == 141  # and all of them are there still


def test_a_leaf_that_is_used_all_the_time_is_not_forgotten() -> None:
    def run() -> None:
        w, x = same(), mc.axis_index("dp") + ones(3, 3)
        total = sq(x)
        for i in range(100):
            total = total + sq(x * w) + sq(x * (w * i))
        torch.autograd.grad(total, w)

    assert counted(run) == 101


def test_parameters_are_remembered_for_long() -> None:
    def run() -> None:
        w = mc.mark_varying(nn.Parameter(weight()), ())
        x = own()
        total = sq(x @ w)
        for i in range(100):
            total = total + sq(x @ (w.detach() * i).requires_grad_())
        torch.autograd.grad(total + sq(x @ w), w)

    assert counted(run) == 1


def test_a_pvary_of_where_a_leaf_lay_before_is_not_kept() -> None:
    def run() -> Any:
        checker = watch.here.watcher
        assert isinstance(checker, Checker)
        x, w = own(), mc.mark_varying(nn.Parameter(weight()[:2]), ())
        for _ in range(5):
            x * w
        before = weakref.ref(checker._pvaried[id(w)].by[V])
        assert before() is not None
        w.data = zeros(2, 3)
        x * w
        gc.collect()
        return before()

    assert on_ranks(run) == [None] * N


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
        own().requires_grad_().sum().backward()
        gc.collect()
        return len(sizes), sum(each() is not None for each in activations), checker, weakref.ref(w)

    for sizes, alive, checker, w in on_ranks(run):
        assert (sizes, alive) == (1, 0)
        gc.collect()
        assert w() is None
        assert not checker._lately
        assert not checker._pvaried


def again(call: Callable[[Tensor], Any], make: Callable[[], Tensor]) -> list[Any]:
    """What it gives when it is called again and again by one line, with grad mode and without, or how it is refused."""
    found: list[Any] = []
    for grad in (True, True, False, False, True):
        x = make()
        try:
            with torch.set_grad_enabled(grad):
                y = call(x)
                leaves = tree_flatten(y.wait() if isinstance(y, mc.Work) else y)[0]
        except (mc.VaryingError, mc.MeshError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            noted = [getattr(x, name, None) is None for name in sorted(vars(x))]
            for each in filter(torch.is_tensor, leaves):
                mine = vma.marked(each)
                told = kind(each), mine is not None and mine.plain, each.requires_grad, each.is_inference(), noted
                found.append((told, each.detach().clone()))
    return found


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda x: mc.all_reduce(x, "dp"),
    "all_reduce, later": lambda x: mc.all_reduce(x, "dp", async_op=True),
    "all_reduce, in time": lambda x: mc.all_reduce(x, "dp", timeout=60.0),
    "max": lambda x: mc.all_reduce(x, "dp", "max"),
    "all_gather": lambda x: mc.all_gather(x, "dp"),
    "all_gather, later": lambda x: mc.all_gather(x, "dp", async_op=True),
    "all_gather of sizes": lambda x: mc.all_gather(x, "dp", sizes=[2, 2]),
    "all_gather_invariant": lambda x: mc.all_gather_invariant(x, "dp"),
    "reduce_scatter": lambda x: mc.reduce_scatter(x, "dp", op="mean"),
    "reduce_scatter of sizes": lambda x: mc.reduce_scatter(x, "dp", sizes=[1, 1], mesh=mc.current_mesh()),
    "all_to_all": lambda x: mc.all_to_all(x, "dp", 0, 0),
    "shift": lambda x: mc.shift(x, "dp", wrap=False),
    "permute": lambda x: mc.permute(x, ("dp",), [(0, 1)]),
    "scan": lambda x: mc.scan(x, "dp"),
    "broadcast": lambda x: mc.broadcast(x, "dp", 1),
    "reduce": lambda x: mc.reduce(x.detach(), "dp"),
    "pvary": lambda x: mc.pvary(x, "dp"),
    "pvary, later": lambda x: mc.pvary(x, "dp", async_op=True),
    "shard": lambda x: mc.shard(x, "dp"),
    "no axis": lambda x: mc.all_reduce(x, "no"),
    "no name": lambda x: mc.all_reduce(x, ["dp"]),  # type: ignore[call-overload]
    "a size of one": lambda x: mc.all_reduce(x, "one", async_op=True),
    "several axes": lambda x: mc.all_reduce(x, ("dp", "one")),
    "a tree": lambda x: mc.all_reduce([x, x], "dp"),
    "batches": lambda x: torch.func.vmap(lambda x: mc.all_reduce(x, "dp"))(x[:, None]),
    "a gradient": lambda x: torch.func.grad(lambda x: mc.all_reduce((x * x).sum(), "dp"))(x.detach()),
}


def values() -> dict[str, Callable[[], Tensor]]:
    """Each as long as one call needs it."""

    def inference() -> Tensor:
        with torch.inference_mode():
            return mc.mark_varying(two() * 1.0, "dp")

    def written() -> Tensor:
        x = zeros(2)
        x.data.copy_(two())
        return x

    def written_wider() -> Tensor:
        x = two() * 1.0
        x.data.copy_(mc.mark_varying(two(), ("dp", "one")))
        return x

    def behind_its_back() -> Tensor:
        x = two() * 1.0
        with torch._C.DisableTorchFunction():
            x.add_(1.0)
        return x

    def unseen() -> Tensor:
        with torch._C.DisableTorchFunction():
            return torch.ones(2, dtype=F64)

    def seen() -> Tensor:
        x = two() * 1.0
        x.add_(1.0)
        return x

    def needs_grad() -> Tensor:
        return (two() * 1.0).requires_grad_()

    return {
        "varies": two, "seen": seen, "is invariant": lambda: zeros(2), "needs grad": needs_grad,
        "is an invariant leaf": lambda: zeros(2).requires_grad_(), "is a parameter": lambda: nn.Parameter(two()),
        "is of integers": lambda: two().long(), "is written": written,
        "is written wider": written_wider, "is changed": behind_its_back,
        "is unseen": unseen, "is of inference": inference, "is a view": lambda: two().view(1, 2)[0],
    }  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_as_if_all_were_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of a line and a type is used for no other one, and for nothing that has changed."""
    call = CALLS[name]

    def run() -> Any:
        for first in ("varies", "is invariant", "needs grad"):  # from then on the line is known
            again(call, values()[first])
        return {value: again(call, make) for value, make in values().items()}

    monkeypatch.setattr(varying_numbers.made, "any", False)
    axes = {"dp": N, "one": 1}
    short = on_ranks(run, axes=axes)
    monkeypatch.setattr(Checker, "called", watch.told_of_call)
    long = on_ranks(run, axes=axes)
    for mine, others in zip(short, long, strict=True):
        for value, found in mine.items():
            assert len(found) == len(others[value]), value
            for one, other in zip(found, others[value], strict=True):
                if isinstance(one, str):
                    assert one == other
                else:
                    assert one[0] == other[0], value
                    assert_close(one[1], other[1], rtol=0, atol=0)


def test_a_call_of_what_is_known_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many functions of the library run more than without the checker: each is felt."""

    def calls(call: Callable[[], object]) -> int:
        seen = []
        for _ in range(4):
            seen.clear()
            sys.setprofile(lambda frame, event, _: seen.append(frame.f_code) if event == "call" else None)
            call()
            sys.setprofile(None)
        return sum("/meshcomm/" in code.co_filename.replace("\\", "/") for code in seen)

    def run() -> Any:
        mesh, more = mc.make_mesh(LINE), []
        with mc.use_mesh(mesh):
            x = mc.mark_varying(zeros(2), "dp")
            for call in (lambda: mc.all_reduce(x, "dp"), lambda: mc.reduce_scatter(x, "dp")):
                before = calls(call)
                with mc.check_vma():
                    more.append(calls(call) - before)
        return more

    for ever in (varying_numbers.made, vma.writes):
        monkeypatch.setattr(ever, "any", False)
    for more in mc.launch(run, ranks=N):
        assert max(more) <= 4, more


def test_who_looks_at_the_result_of_a_work_sees_it_once_and_first() -> None:
    def run() -> Any:
        x, seen = two(), []
        work = mc.all_reduce(x, "dp", async_op=True)
        looked_at(work, seen.append)
        y = work.wait()
        assert work.wait() is y
        wrong = looked_at(mc.all_reduce(x, "dp", async_op=True), lambda y: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                wrong.wait()
        followed = looked_at(mc.all_reduce(x, "dp", async_op=True), seen.append).then(lambda y: len(seen)).wait()
        return len(seen), seen[0] is y, followed

    with mc.use_mesh(mc.make_mesh(LINE)):
        assert mc.launch(run, ranks=N) == [(2, True, 2)] * N


@pytest.mark.parametrize("times", [0, 2])
def test_a_work_that_has_failed_keeps_nothing(times: int) -> None:
    mesh = mc.make_mesh(LINE)

    def run() -> Any:
        rank = mesh.rank
        with mc.use_mesh(mesh), mc.check_vma():
            for size in [3] * times + [3 + rank]:  # after two the line is known
                x = mc.mark_varying(ones(size), "dp")
                seen, work, error = weakref.ref(x), None, ""
                try:
                    work = mc.all_reduce(x, "dp", async_op=True)
                    work.wait()
                except mc.CommError as wrong:
                    error = str(wrong)
                    wrong.__traceback__ = None
                del x
        gc.collect()
        return "different calls" in error, seen() is None, repr(work).split(":")[0]

    one, other = mc.launch(run, ranks=N)
    assert one[:2] == other[:2] == (True, True)
    assert "<Work failed" in (one[2], other[2])  # held until the end
