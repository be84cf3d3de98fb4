"""Memory of large results is used again when nobody has it, and only then."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import meshcomm as mc
from meshcomm import _torch
from meshcomm.runtime.process import reuse
from meshcomm.runtime.process.reuse import Reserve

SHAPE = (512, 1024)

needs_counts = pytest.mark.skipif(not _torch.counts_uses(), reason="this torch does not tell who has a storage")


def reserve_of(dtype: torch.dtype = torch.float32) -> Reserve:
    """That has been asked before."""
    reserve = Reserve()
    given(reserve, dtype)
    assert reserve.held == 0
    return reserve


def given(reserve: Reserve, dtype: torch.dtype = torch.float32) -> Tensor:
    return reserve.empty(SHAPE, torch.empty(0, dtype=dtype))


@needs_counts
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.uint8, torch.bool]
)
def test_what_is_dropped_is_given_again(dtype: torch.dtype) -> None:
    reserve = reserve_of(dtype)
    first = given(reserve, dtype)
    assert first.shape == SHAPE
    assert first.dtype == dtype
    assert first.is_contiguous()
    assert first._base is None
    assert first.untyped_storage().nbytes() == first.nbytes
    at = first.data_ptr()
    del first
    assert given(reserve, dtype).data_ptr() == at


HOLDERS: dict[str, Callable[[Tensor], object]] = {
    "the tensor": lambda x: x,
    "a view": lambda x: x[3:5],
    "an alias": lambda x: x.detach(),
    "its storage": lambda x: x.untyped_storage(),
    "numpy": lambda x: x.numpy(),
    "a memoryview": lambda x: memoryview(x.numpy()),
    "dlpack": lambda x: torch.from_dlpack(x),
    "a graph": lambda x: (torch.ones(SHAPE, requires_grad=True) * x).sum(),
    "a parameter": lambda x: torch.nn.Parameter(x),
    "a gradient": lambda x: _with_gradient(x),
    "a shallow copy": lambda x: copy.copy(x),
}


def _with_gradient(x: Tensor) -> Tensor:
    leaf = torch.ones(SHAPE, requires_grad=True)
    leaf.grad = x
    return leaf


@needs_counts
@pytest.mark.parametrize("how", HOLDERS)
def test_what_somebody_has_is_not(how: str) -> None:
    reserve = reserve_of()
    x = given(reserve)
    at, held, as_it_was = x.data_ptr(), HOLDERS[how](x), x.untyped_storage().resizable()
    del x
    gc.collect()
    others = [given(reserve) for _ in range(3)]
    assert at not in {other.data_ptr() for other in others}
    del held, others
    gc.collect()
    assert (at in {other.data_ptr() for other in [given(reserve) for _ in range(4)]}) == as_it_was


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "resized": lambda x: x.resize_(2, *SHAPE),
    "resized storage": lambda x: x.untyped_storage().resize_(0),
    "shared": lambda x: x.share_memory_(),
    "seen by numpy": lambda x: x.numpy(),
}


@needs_counts
@pytest.mark.parametrize("how", CHANGES)
def test_what_was_changed_is_not(how: str) -> None:
    reserve = reserve_of()
    x = given(reserve)
    CHANGES[how](x)
    storage = x.untyped_storage()._cdata
    del x
    y = given(reserve)
    assert y.untyped_storage()._cdata != storage
    assert not y.is_shared()
    assert y.untyped_storage().resizable()
    assert y.fill_(1).sum() == y.numel()


@needs_counts
def test_what_is_given_again_knows_nothing_of_what_was_given_before() -> None:
    reserve, like = reserve_of(), torch.empty(0)
    x = given(reserve)
    at, whole = x.data_ptr(), x.numel()
    x.fill_(1).requires_grad_().register_hook(print)
    x.grad, x.noted = torch.ones_like(x), "x"  # type: ignore[attr-defined]
    for shape, dtype in [
        ((whole,), torch.float32),
        (SHAPE, torch.int32),
        (SHAPE, torch.float32),
        (SHAPE, torch.float32),
    ]:
        del x
        with torch.inference_mode():
            x = reserve.empty(shape, like.to(dtype))
            assert x.is_inference()
            assert (x.data_ptr(), x.shape, x.dtype) == (at, shape, dtype)
            del x
        x = reserve.empty(shape, like.to(dtype))
        assert (x.data_ptr(), x.shape, x.dtype) == (at, shape, dtype)
        assert (x._version, x.requires_grad, x.grad, x.is_leaf, x.is_inference()) == (0, False, None, True, False)
        assert not vars(x)
        x.add_(1)
    assert len(reserve._kept) == 1


def test_it_is_a_tensor_as_any_other(tmp_path: Path) -> None:
    x = given(reserve_of()).copy_(torch.arange(512 * 1024.0).view(SHAPE))
    torch.save(x, tmp_path / "x")
    assert (tmp_path / "x").stat().st_size < x.nbytes + 4096
    for y in (torch.load(tmp_path / "x"), pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        assert torch.equal(x, y)


@needs_counts
def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reuse.SWITCH, "8")
    reserve = Reserve()
    for count in range(200_000, 400_000, 1000):  # no two of one size
        reserve.empty((count,), torch.empty(0))
    assert reserve.held == 0
    for count in range(200_000, 400_000, 1000):
        for _ in range(2):
            reserve.empty((count,), torch.empty(0))
        assert 0 < reserve.held <= 8 * 2**20
    assert reserve.empty((4 * 2**20,), torch.empty(0)).numel() == 4 * 2**20  # too large, and not kept
    assert reserve.held <= 8 * 2**20
    reserve.trim()
    assert reserve.held
    reserve.trim(0)
    assert reserve.held == 0
    now = [0.0]
    reserve = Reserve(now=lambda: now[0])
    given(reserve)
    given(reserve)
    now[0] = 9.0
    reserve.trim()
    assert reserve.held
    now[0] = 11.0
    reserve.trim()
    assert reserve.held == 0
    monkeypatch.setenv(reuse.SWITCH, "0")
    reserve = Reserve()
    given(reserve)
    given(reserve)
    assert reserve.held == 0


@needs_counts
def test_who_is_interrupted_anywhere_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reuse.SWITCH, "5")  # two and a half
    lines = 0
    while True:
        reserve, left = Reserve(), lines

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code is not Reserve._take.__code__:
                return trace if frame.f_code in (Reserve.empty.__code__, Reserve.again.__code__) else None
            left -= event == "line"
            if left < 0:
                raise KeyboardInterrupt
            return trace

        held, before = [given(reserve), given(reserve), given(reserve)], sys.gettrace()
        del held[0], held[1]
        sys.settrace(trace)
        try:
            for _ in range(3):
                given(reserve)
                held.append(given(reserve))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        held.clear()
        for count in (1, 2, 1, 2):
            assert len(reserve.find(SHAPE, torch.empty(0), count) or ()) == count
            assert sum(each.nbytes for each in reserve._kept) <= 5 * 2**20
        held += [given(reserve) for _ in range(4)]
        assert len({x.data_ptr() for x in held}) == 4
        assert reserve.held == sum(each.nbytes for each in reserve._kept) > 0
        if left >= 0:
            break
        lines += 1
    assert lines > 20


@needs_counts
def test_who_is_interrupted_by_a_signal_leaves_no_lock() -> None:
    reserve, is_on, times = reserve_of(), False, 0
    given(reserve)

    def interrupt(*_: object) -> None:
        if is_on:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for k in range(2000):
            with contextlib.suppress(KeyboardInterrupt):
                try:
                    is_on = True
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 + k % 100 * 1e-7)
                    for _ in range(100):
                        given(reserve)
                finally:
                    is_on = False
                continue
            times += 1
            assert not reserve._lock.locked()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert times > 100


def test_small_results_and_those_inside_a_transform_are_plain() -> None:
    reserve = Reserve()
    reserve.empty((3, 0), torch.empty(0))
    reserve.empty((), torch.empty(0))
    torch.func.vmap(lambda x: x + given(reserve).sum())(torch.ones(2))
    assert reserve.held == 0


@needs_counts
def test_threads() -> None:
    reserve, wrong = reserve_of(), []

    def work(number: int) -> None:
        for k in range(50):
            x, y = given(reserve).fill_(number), given(reserve).fill_(-k)
            if x[0, 0] != number or not bool((x == number).all()) or y[-1, -1] != -k:
                wrong.append((number, k))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_counts
def test_a_fork_has_its_own() -> None:
    given(reuse.reserve)
    x = given(reuse.reserve).fill_(1)
    assert reuse.reserve.held
    pid = os.fork()
    if pid == 0:
        ok = reuse.reserve.held == 0 and given(reuse.reserve).data_ptr() != x.data_ptr()
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0


def large_results() -> int:
    """No two that are alive share anything, and memory of those that are gone is found again."""
    mesh = mc.make_mesh({"a": 2}, ranks=[0, 1]) if mc.make_mesh({"all": -1}).rank < 2 else None
    if mesh is None:
        return 0
    x = torch.arange(2.0**18) + mesh.rank
    kept: list[tuple[Tensor, float]] = []
    places: set[int] = set()
    for k in range(6):
        for y in (
            mc.all_reduce(x * k, "a", mesh=mesh), mc.all_gather(x * k, "a", mesh=mesh),
            mc.shift(x * k, "a", mesh=mesh), mc.all_to_all(x * k, "a", 0, 0, mesh=mesh),
            mc.all_reduce(x * k, "a", mesh=mesh, async_op=True).wait(),
        ):  # fmt: skip
            places.add(y.data_ptr())
            if k < 2:
                kept.append((y, float(y.double().sum())))
            y = None
    for y, total in kept:
        assert float(y.double().sum()) == total
    assert len({y.data_ptr() for y, _ in kept}) == len(kept)
    return len(places)


class Subclass(Tensor):
    """Of a user's."""


def subclasses(size: int) -> None:
    mesh = mc.make_mesh({"a": 4})
    plain = torch.ones(4, size)
    for x in [plain.as_subclass(Subclass), plain] * 3:  # whose memory the other one had
        for y in (mc.all_reduce(x, "a", mesh=mesh), mc.all_gather(x, "a", mesh=mesh), mc.shift(x, "a", mesh=mesh)):
            assert type(y) is type(x)
            del y
        assert type(mc.all_to_all(x, "a", 0, 0, mesh=mesh)) is type(x)
        assert type(mc.broadcast(x, "a", 1, mesh=mesh)) is type(x)


@pytest.mark.parametrize("size", [3, 2**17])
def test_results_are_of_the_class_that_they_were(pool4: Any, size: int) -> None:
    pool4.run(subclasses, size)


class _Wrapping(TorchFunctionMode):
    """What is made while it is on is of a user's class."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = function(*args, **(kwargs or {}))
        return y.as_subclass(Subclass) if type(y) is Tensor else y


def after_a_mode(size: int) -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    x, at = torch.ones(4, size), mesh.coordinate["a"]
    mc.barrier("a", mesh=mesh)
    calls: list[Callable[[], Any]] = [
        lambda: mc.all_reduce(x, "a", mesh=mesh),
        lambda: mc.reduce(x, "a", 0, mesh=mesh),
        lambda: mc.gather(x, "a", 0, mesh=mesh),
        lambda: mc.scatter(None if at else x, "a", 0, 0, x[:2], mesh=mesh),
        lambda: mc.broadcast(x, "a", 1, mesh=mesh),
        lambda: mc.exchange([(x, 1 - at)], [(1 - at, x.shape, x.dtype)], "a", mesh=mesh)[0],
    ]
    for call in calls:
        for _ in range(4):
            with _Wrapping():
                call()
        assert {type(call()) for _ in range(4)} <= {Tensor, type(None)}


@pytest.mark.parametrize("size", [3, 2**17])
def test_no_result_is_of_a_class_that_another_one_was_made(pool4: Any, size: int) -> None:
    pool4.run(after_a_mode, size)


@needs_counts
def test_results_of_collectives_of_ranks_of_one_process() -> None:
    first, second, *_ = mc.launch(large_results, ranks=4)
    assert 10 <= first < 28
    assert 10 <= second < 28
    assert reuse.reserve.held == 0  # when the launch has ended


def of_every_collective() -> dict[str, Tensor]:
    """What each gives of several dtypes and layouts, the last of three times; no two share memory."""
    mesh, found = mc.make_mesh({"a": 4}), dict[str, Tensor]()
    index, x = mesh.rank, torch.arange(2.0**12).view(4, -1).add(mesh.rank).sin()
    other = [(i, (i + 1) % 4) for i in range(3)]
    calls: dict[str, Callable[[Tensor], Any]] = {
        "permute of nothing": lambda x: mc.permute(x, "a", []),
        **{f"all_reduce {op}": lambda x, op=op: mc.all_reduce(x, "a", op) for op in ("sum", "mean", "product", "max")},
        "all_reduce exact": lambda x: mc.all_reduce(x, "a", exact=True),
        "all_gather": lambda x: mc.all_gather(x, "a"),
        **{f"reduce_scatter {op}": lambda x, op=op: mc.reduce_scatter(x, "a", op=op) for op in ("sum", "mean", "min")},
        "all_to_all": lambda x: mc.all_to_all(x, "a", 0, 0),
        "all_to_all of sizes": lambda x: mc.all_to_all(
            x.expand(4, -1, -1).reshape(16, -1), "a", 0, 0, send_sizes=[1, 2, 3, 10], recv_sizes=[(1, 2, 3, 10)[index]] * 4
        ),
        "permute": lambda x: mc.permute(x, "a", other),
        "broadcast": lambda x: mc.broadcast(x, "a", 2),
        "reduce": lambda x: mc.reduce(x, "a", 1),
        "gather": lambda x: mc.gather(x, "a", 3),
        "scatter": lambda x: mc.scatter(None if index else x, "a", 0, like=x[:1]),
        "exchange": lambda x: mc.exchange([(x, (index + 1) % 4)], [((index - 1) % 4, x.shape, x.dtype)], "a")[0],
    }  # fmt: skip
    with mc.use_mesh(mesh):
        for name, call in calls.items():
            for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int16):
                if dtype == torch.int16 and name.endswith(("mean", "exact")):
                    continue
                if dtype == torch.complex64 and name.endswith(("max", "min", "exact")):
                    continue
                given = x.to(dtype)
                for layout, each in enumerate((given, given.t().contiguous().t(), given.conj())):
                    got = [y for y in (call(each) for _ in range(3)) if y is not None]
                    assert len({y.untyped_storage()._cdata for y in (each, *got)}) == 1 + len(got)
                    if got:
                        found[f"{name} {dtype} {layout}"] = got[-1].resolve_conj()
    return found


@needs_counts
def test_ranks_of_one_process_get_the_same_in_memory_that_was_used_before(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = mc.launch(of_every_collective, ranks=4)
    monkeypatch.setattr(reuse, "LEAST", 2**10)
    find, given_again = reuse.reserve.find, []

    def seen(*given: Any) -> list[Tensor] | None:
        found = find(*given)
        given_again.append(found is not None)
        return found

    monkeypatch.setattr(reuse.reserve, "find", seen)
    for each, plain in zip(mc.launch(of_every_collective, ranks=4), wanted, strict=True):
        assert each.keys() == plain.keys()
        assert [name for name, y in each.items() if not torch.equal(y, plain[name])] == []
    assert sum(given_again) > 200


def dropped_results() -> int:
    """How many results of calls, waited for at once or later, are still there when nobody has them any more."""
    mesh, x = mc.make_mesh({"a": 2}), torch.ones(8)
    got: list[weakref.ref[Any]] = []
    with mc.use_mesh(mesh):
        other = 1 - mesh.rank
        for later in (False, True):
            for call in (
                lambda **how: mc.all_reduce(x, "a", **how), lambda **how: mc.all_gather(x, "a", **how),
                lambda **how: mc.all_to_all(x, "a", 0, 0, **how), lambda **how: mc.shift(x, "a", **how),
                lambda **how: mc.exchange([(x, other)], [(other, x.shape, x.dtype)], "a", **how),
            ):  # fmt: skip
                found = call(async_op=True).wait() if later else call()
                got.append(weakref.ref(found[0] if isinstance(found, list) else found))
                found = None
        mc.barrier("a")
    return sum(each() is not None for each in got)


def test_nothing_else_has_a_result_of_ranks_of_one_process() -> None:
    gc.disable()
    try:
        assert mc.launch(dropped_results, ranks=2) == [0, 0]
    finally:
        gc.enable()


@needs_counts
def test_results_of_collectives(pool4: Any) -> None:
    first, second, *_ = pool4.run(large_results)
    assert 10 <= first < 28
    assert 10 <= second < 28
