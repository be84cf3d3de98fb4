"""Small calls through shared memory that are waited for at once: the results of those that are not, and what they leave behind."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc
from meshcomm.runtime.process import lending
from meshcomm.runtime.transports.dtypes import to_bytes
from meshcomm.runtime.transports.shared import at_once, waiting

REVERSED = [(0, 3), (3, 0), (1, 2), (2, 1)]
CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda x, mesh, **how: mc.all_reduce(x, "a", mesh=mesh, **how),
    "mean": lambda x, mesh, **how: mc.all_reduce(x, "a", "mean", mesh=mesh, **how),
    "max": lambda x, mesh, **how: mc.all_reduce(x, "a", "max", mesh=mesh, **how),
    "exact": lambda x, mesh, **how: mc.all_reduce(x, "a", exact=True, mesh=mesh, **how),
    "all_gather": lambda x, mesh, **how: mc.all_gather(x, "a", mesh=mesh, **how),
    "all_gather of dim 1": lambda x, mesh, **how: mc.all_gather(x, "a", 1, mesh=mesh, **how),
    "reduce_scatter": lambda x, mesh, **how: mc.reduce_scatter(x, "a", mesh=mesh, **how),
    "reduce_scatter of dim 1": lambda x, mesh, **how: mc.reduce_scatter(x, "a", 1, mesh=mesh, **how),
    "all_to_all": lambda x, mesh, **how: mc.all_to_all(x, "a", 0, 0, mesh=mesh, **how),
    "all_to_all of dim 1": lambda x, mesh, **how: mc.all_to_all(x, "a", 1, 0, mesh=mesh, **how),
    "broadcast": lambda x, mesh, **how: mc.broadcast(x, "a", 2, mesh=mesh, **how),
    "scatter": lambda x, mesh, **how: scattered(x, mesh, **how),
    "scatter of dim 1": lambda x, mesh, **how: scattered(x, mesh, 1, **how),
    "reduce": lambda x, mesh, **how: mc.reduce(x, "a", 2, mesh=mesh, **how),
    "reduce max": lambda x, mesh, **how: mc.reduce(x, "a", 1, "max", mesh=mesh, **how),
    "gather": lambda x, mesh, **how: mc.gather(x, "a", 2, mesh=mesh, **how),
    "gather of dim 1": lambda x, mesh, **how: mc.gather(x, "a", 0, 1, mesh=mesh, **how),
    "shift": lambda x, mesh, **how: mc.shift(x, "a", mesh=mesh, **how),
    "shift without wrap": lambda x, mesh, **how: mc.shift(x, "a", wrap=False, mesh=mesh, **how),
    "permute": lambda x, mesh, **how: mc.permute(x, "a", REVERSED, mesh=mesh, **how),
}


def scattered(x: Tensor, mesh: mc.Mesh, dim: int = 0, **how: Any) -> Any:
    """From one, by what the others know of it."""
    return mc.scatter(x if mesh.rank == 2 else None, "a", 2, dim, x.chunk(4, dim)[0], mesh=mesh, **how)


class Other(Tensor):
    """A kind of tensor that goes the long way."""


def given(rank: int, dtype: torch.dtype, rows: int) -> list[Tensor]:
    """As it lies most often, and otherwise."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rank)).mul(9)
    x = torch.complex(x, x.flip(0)).to(dtype) if dtype.is_complex else (x if dtype.is_signed else x.abs()).to(dtype)
    lazily = [x.conj()] if dtype.is_complex else []
    return [x, x.mT.contiguous().mT, torch.cat([x, x])[::2], x.as_subclass(Other), *lazily]


def as_later(name: str, dtype: torch.dtype, rows: int) -> None:
    """The same bits as those of calls that are waited for later, also beside ranks that do that, and of new memory; and
    from the second one on they are known.
    """
    mesh = mc.make_mesh({"a": 4})
    mc.barrier("a", mesh=mesh)  # who only gives would be through before the others have heard of it
    call, later = CALLS[name], [mesh.rank == 1, mesh.rank > 1, False, False, mesh.rank == 2]
    for x, waits in zip(given(mesh.rank, dtype, rows), later, strict=False):
        before = x.clone()
        expected = call(x, mesh, async_op=True).wait()
        for _ in range(4):
            y = call(x, mesh, async_op=True).wait() if waits else call(x, mesh)
            if expected is None:  # one has all
                assert y is None
                continue
            assert torch.equal(y.view(torch.uint8), expected.view(torch.uint8))
            assert (y.shape, y.dtype, y.is_contiguous()) == (expected.shape, dtype, True)
            assert type(y) is type(expected)
            assert y.untyped_storage().nbytes() == y.nbytes
            y.zero_()
        assert torch.equal(to_bytes(x), to_bytes(before))
    calls = mesh.axis("a").link.mail.calls  # type: ignore[attr-defined]
    assert any(known is not None and known.dtype is dtype for known in calls.values()) or name in LONG


@pytest.mark.parametrize("name", CALLS)
def test_the_results_are_those_of_calls_that_are_waited_for_later(pool4: Any, name: str) -> None:
    dtypes = (torch.float32, torch.bfloat16) + (() if name in ("mean", "exact") else (torch.int32,))
    for dtype in dtypes:
        pool4.run(as_later, name, dtype, 4)
    pool4.run(as_later, name, torch.float32, 4 * 1024)


LONG = ("exact", "shift without wrap")
"""Those of which at least some ranks go the long way."""
REDUCING = {"all_reduce", "mean", "max", "reduce", "reduce max", "reduce_scatter", "reduce_scatter of dim 1"}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
OTHERS = (torch.bool, torch.int8, torch.int16, torch.uint16, torch.uint64, torch.complex64, torch.complex128, *FLOAT8)


def is_defined(name: str, dtype: torch.dtype) -> bool:
    """Whether there is such a call of that dtype."""
    if name not in REDUCING:
        return True
    if name == "mean" or dtype.is_complex or dtype in FLOAT8:
        return dtype.is_complex and "max" not in name
    return dtype is not torch.bool or "max" in name


def of_other_dtypes(name: str, rows: int) -> None:
    for dtype in OTHERS:
        if is_defined(name, dtype):
            as_later(name, dtype, rows)


@pytest.mark.parametrize("rows", [4, 2 * 1024])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "exact"])
def test_dtypes_that_no_backend_knows(pool4: Any, name: str, rows: int) -> None:
    pool4.run(of_other_dtypes, name, rows)


def in_other_modes(rows: int) -> None:
    """Who makes a call first in another mode leaves nothing of that in what is kept for the next one."""
    mesh = mc.make_mesh({"a": 4})
    x = torch.ones(rows, 8)
    for call in (CALLS["all_reduce"], CALLS["all_gather"], CALLS["reduce_scatter"], CALLS["shift"]):
        with torch.inference_mode():
            for _ in range(3):
                assert call(x, mesh).is_inference()
        y = call(x, mesh)
        assert not y.is_inference()
        assert torch.equal(torch.func.vmap(lambda each: call(each, mesh).sum())(torch.stack([x, x])), y.sum().expand(2))
        w = x.clone().requires_grad_()
        call(w, mesh).sum().backward()
        assert w.grad is not None
        assert torch.equal(call(x, mesh), y)


@pytest.mark.parametrize("rows", [4, 4 * 1024])
def test_other_modes(pool4: Any, rows: int) -> None:
    pool4.run(in_other_modes, rows)


def uneven(dtype: torch.dtype) -> None:
    """A rank that gives lengths says the same as one that does not, if they are equal."""
    mesh = mc.make_mesh({"a": 4})
    x, even = (torch.arange(8) + 10 * mesh.rank).to(dtype), [2, 2, 2, 2]
    for turn in range(4):
        sizes = (even, even) if (mesh.rank + turn) % 2 else ()
        got = mc.all_to_all(x, "a", 0, 0, *sizes, mesh=mesh)
        assert got.tolist() == [10 * i + 2 * mesh.rank + k for i in range(4) for k in range(2)]
        sizes = ([1, 2, 3, 2], even) if mesh.rank == 1 else ()
        with pytest.raises(mc.CommError, match="index 1 sends 1 elements to index 0, which expects 2"):
            mc.all_to_all(x, "a", 0, 0, *sizes, mesh=mesh)


def unlike(n: int, dtype: torch.dtype) -> None:
    """Ranks whose tensors are not as long, of which what one lends has no room for another one's."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    first = mesh.coordinate["a"] == 0
    whole = (torch.arange(2 * n) % 30011).to(dtype)
    x, sizes = (whole, ()) if first else (whole[:n], ([n, 0], [n, 0]))
    for _ in range(4):
        got = mc.all_to_all(x, "a", 0, 0, *sizes, mesh=mesh)  # type: ignore[misc]
        assert torch.equal(got, torch.cat([whole[:n], whole[:n]]) if first else whole[n:])
        with pytest.raises(mc.CommError, match=f"index 0 sends {n} elements to index 1, which expects 8"):
            mc.all_to_all(whole if first else whole[:16], "a", 0, 0, mesh=mesh)


def interrupted(where: str, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Whoever is interrupted in a call has others finish it, and what it has lent and was lent comes back."""
    mesh = mc.make_mesh({"a": 4})
    x, call = (torch.arange(16) + mesh.rank).to(dtype), CALLS[name]
    expected = call(x, mesh, async_op=True).wait()
    for _ in range(4):  # it is known then, and so are the others
        call(x, mesh)
        mc.barrier("a", mesh=mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lending, "room", room := lending.Room())
        patch.setattr(waiting, "AWAKE", 60.0)  # on a busy machine too it is this way that is interrupted
        if mesh.rank == interrupted_rank(where, name):
            with pytest.raises(raised_in(where)), interrupts(where):
                call(x, mesh)
            if where in BEFORE:  # nobody has heard of it
                call(x, mesh)
        else:
            if where == "waiting":
                time.sleep(0.05)
            call(x, mesh)
        for _ in range(3):
            y = call(x, mesh)
            assert y is expected or torch.equal(y, expected)
            mc.barrier("a", mesh=mesh)
        mail = mesh.axis("a").link.mail  # type: ignore[attr-defined]
        assert not mail.open
        assert all(segment.is_free() for segment in room._small)


def interrupted_rank(where: str, name: str) -> int:
    """The root, 2, of a broadcast or scatter only lends; that of a reduce or gather only reads."""
    if where in BEFORE:
        return 1 if name in ("reduce", "gather") else 2
    return 1 if name in ("broadcast", "scatter") else 2


def other_roots(name: str) -> None:
    """Ranks that name another root, in the middle of calls that all make alike: each is told, and nothing stays lent."""
    mesh = mc.make_mesh({"a": 4})
    x = torch.arange(16.0) + mesh.rank
    call: Callable[[int], Any] = {
        "reduce": lambda root: mc.reduce(x, "a", root, mesh=mesh),
        "gather": lambda root: mc.gather(x, "a", root, mesh=mesh),
        "scatter": lambda root: mc.scatter(x if mesh.rank == root else None, "a", root, like=x[:4], mesh=mesh),
    }[name]
    expected = [call(root) for root in range(2) for _ in range(3)]
    mc.barrier("a", mesh=mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lending, "room", room := lending.Room())
        if mesh.rank == 0:  # when another one's error has come
            time.sleep(0.05)
        told = []
        for make in (lambda: call(int(mesh.rank == 3)), lambda: mc.barrier("a", mesh=mesh)):
            try:
                make()
            except mc.CommError as error:  # in the barrier where nothing was read from who differs
                told.append(str(error))
        (error_text,) = told
        assert "the ranks called different things" in error_text
        mc.barrier("a", mesh=mesh)
        for root in range(2):
            y = call(root)
            assert y is expected[3 * root] or torch.equal(y, expected[3 * root])
        mc.barrier("a", mesh=mesh)
        assert all(segment.is_free() for segment in room._small)


@pytest.mark.parametrize("name", ["reduce", "gather", "scatter"])
def test_ranks_that_name_another_root(pool4: Any, name: str) -> None:
    pool4.run(other_roots, name)


def raised_in(where: str) -> type[BaseException]:
    """By Ctrl-C, or by a handler of the user's: a TimeoutError is an OSError, and no lack of memory."""
    return TimeoutError if where == "alarm" else KeyboardInterrupt


@contextlib.contextmanager
def interrupts(where: str) -> Iterator[None]:
    """Once."""
    if where == "returning":
        with between_returns():
            yield
        return
    owner, name = PLACES[where]
    own, calls = getattr(owner, name, None) or getattr(builtins, name), itertools.count()

    def interrupt(*given: Any, **how: Any) -> Any:
        if next(calls) == 0:
            raise raised_in(where)
        return own(*given, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupt, raising=False)  # what is built in stands in no module
        yield


@contextlib.contextmanager
def between_returns() -> Iterator[None]:
    """When it has told the first of those that it has read from, or, where that is one, all of them."""
    code, before = at_once._Known.read.__code__, sys.gettrace()
    lines, first = inspect.getsourcelines(code)
    loop = first + next(at for at, line in enumerate(lines) if "for flag in left" in line)
    seen = itertools.count()

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == loop and next(seen) == 1:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


PLACES: dict[str, tuple[Any, str]] = {
    "alarm": (lending.Room, "lend"),
    "lending": (at_once._Known, "entry"),
    "posting": (at_once, "get_ident"),
    "waiting": (os, "sched_yield"),
    "reading": (at_once._Known, "borrowed"),
    "has read": (at_once, "iter"),
}
BEFORE = ("alarm", "lending", "posting")


def inside_transforms(known: bool) -> None:
    """What torch.func has nothing to do with, and yet lets nobody write to what was made outside."""
    mesh = mc.make_mesh({"a": 4})
    x = torch.arange(8.0) + mesh.rank

    def all_of_them() -> list[Any]:
        return [CALLS[name](x, mesh) for name in ("scatter", "reduce", "gather", "reduce max")]

    expected = [all_of_them() for _ in range(3 * known or 1)][-1]
    found: list[Any] = []
    for _ in range(3):
        torch.func.grad(lambda v: (found.append(all_of_them()), v.sum())[1])(x)
    for got in (*found, all_of_them()):
        for y, other in zip(got, expected, strict=True):
            assert y is other or torch.equal(y, other)


@pytest.mark.parametrize("known", [False, True])
def test_inside_transforms(pool4: Any, known: bool) -> None:
    pool4.run(inside_transforms, known)


@pytest.mark.parametrize("name", ["all_reduce", "shift", "broadcast", "reduce", "gather", "scatter"])
@pytest.mark.parametrize("where", [*PLACES, "returning"])
def test_who_is_interrupted(pool4: Any, where: str, name: str) -> None:
    pool4.run(interrupted, where, name)


@pytest.mark.parametrize("name", ["all_reduce", "all_to_all", "shift", "gather"])
@pytest.mark.parametrize("where", ["waiting", "reading"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.complex64])
def test_who_is_interrupted_with_another_dtype(pool4: Any, where: str, name: str, dtype: torch.dtype) -> None:
    pool4.run(interrupted, where, name, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex128])
def test_lengths_on_some_ranks(pool4: Any, dtype: torch.dtype) -> None:
    pool4.run(uneven, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex128])
@pytest.mark.parametrize("n", [8 * 1024, 128 * 1024])
def test_ranks_that_have_not_as_much(pool4: Any, n: int, dtype: torch.dtype) -> None:
    pool4.run(unlike, n, dtype)
