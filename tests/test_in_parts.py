"""Calls of two ranks whose tensor is read while it is written: their results, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import meshcomm as mc
from meshcomm.runtime.process import lending
from meshcomm.runtime.transports.shared import at_once, in_parts, waiting
from meshcomm.runtime.transports.shared.call import Call
from meshcomm.runtime.transports.shared.in_parts import Parts
from meshcomm.runtime.transports.shared.messages import one_message

ROWS = 2048
"""Of 256 elements: half of them are as much as a result in parts has at least, and all not more than at most."""


def scattered(x: Tensor, mesh: mc.Mesh, root: int, dim: int = 0, **how: Any) -> Any:
    """From one, by what the others know of it."""
    at = mesh.coordinate["a"]
    return mc.scatter(x if at == root else None, "a", root, dim, x.chunk(2, dim)[0], mesh=mesh, **how)


Kind = Callable[..., Any]
CALLS: dict[str, Kind] = {
    "gather": lambda x, mesh, root, **how: mc.gather(x, "a", root, mesh=mesh, **how),
    "gather of dim 1": lambda x, mesh, root, **how: mc.gather(x, "a", root, 1, mesh=mesh, **how),
    "scatter": scattered,
    "scatter of dim 1": lambda x, mesh, root, **how: scattered(x, mesh, root, 1, **how),
    "reduce": lambda x, mesh, root, **how: mc.reduce(x, "a", root, mesh=mesh, **how),
    "reduce max": lambda x, mesh, root, **how: mc.reduce(x, "a", root, "max", mesh=mesh, **how),
}
SOME = ("gather", "scatter", "reduce")


def pairs(**other: int) -> mc.Mesh:
    """Whose ranks have heard of each other."""
    mesh = mc.make_mesh({"a": 2, **(other or {"b": 2})})
    mc.barrier("a", mesh=mesh)
    return mesh


def given(rank: int, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(rank)).mul(9).to(dtype)


def alike(y: Any, expected: Any) -> bool:
    return y is expected if expected is None else torch.equal(y.view(torch.uint8), expected.view(torch.uint8))


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """What was told part by part, and read so."""
    seen: list[str] = []
    own_write, own_follow = Parts.write, in_parts.follow

    def write(self: Parts, *given: Any) -> None:
        if self.tells:
            seen.append("write")
        own_write(self, *given)

    def follow(*given: Any) -> bool:
        seen.append("read")
        return own_follow(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "write", write)
        patch.setattr(at_once, "follow", follow)
        yield seen


def as_later(name: str, dtype: torch.dtype) -> None:
    """The same bits as those of calls that are waited for later, also beside a rank that waits later."""
    mesh = pairs()
    call, me = CALLS[name], mesh.coordinate["a"]
    x = given(mesh.rank, dtype)
    for own in (x, torch.cat([x, x])[::2], torch.nn.Parameter(x, requires_grad=False)):
        before = own.detach().clone()
        for root in (0, 1):
            expected = call(own, mesh, root, async_op=True).wait()
            with counted() as seen:
                for later in (None, None, None, 0, 1, None):
                    y = call(own, mesh, root, async_op=True).wait() if later == me else call(own, mesh, root)
                    assert alike(y, expected)
                    if y is not None:
                        assert (y.shape, y.dtype, y.is_contiguous(), type(y)) == (expected.shape, dtype, True, Tensor)
                        assert y.untyped_storage().nbytes() == y.nbytes
                        y.zero_()
            if own.is_contiguous():  # one only gives, and of a scatter both get
                writes = (me == root) == name.startswith("scatter")
                assert ("write" in seen) == writes
                assert ("read" in seen) == (name.startswith("scatter") or me == root)
        assert torch.equal(own, before)


@pytest.mark.parametrize("name", CALLS)
def test_the_results_are_those_of_calls_that_are_waited_for_later(pool4: Any, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.uint32, torch.complex64):
        if name != "reduce max" or not dtype.is_complex:
            pool4.run(as_later, name, dtype)


def complex_numbers(op: Any, dtype: torch.dtype) -> None:
    """The same bits wherever they lie in a part: what is infinite, no number or zero, too."""
    mesh = pairs()
    for n in (2**16 + 3, 2**17 + 5):
        x = torch.complex(*given(mesh.rank, torch.float64, n // 128 + 1).view(2, -1)[:, :n]).to(dtype)
        for at, value in enumerate((complex(torch.inf, -0.0), complex(-0.0, torch.nan), 0, complex(-0.0, -torch.inf))):
            x[at :: n // 9] = value
        expected = mc.reduce(x, "a", 1, op, mesh=mesh, async_op=True).wait()
        for _ in range(4):
            assert alike(mc.reduce(x, "a", 1, op, mesh=mesh), expected)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("op", ["sum", "mean", "product"])
def test_complex_numbers(pool4: Any, op: str, dtype: torch.dtype) -> None:
    pool4.run(complex_numbers, op, dtype)


def slowly(name: str) -> None:
    """Who reads does not wait awake for one that stops in the middle."""
    mesh = pairs()
    call, x = CALLS[name], given(mesh.rank)
    expected = [call(x, mesh, root) for root in (0, 1) for _ in range(3)]
    own, parts = lending.copy, 0

    def copy(*given: Any) -> None:
        nonlocal parts
        parts += 1
        if parts % 3 == 2:
            time.sleep(0.01)
        own(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_parts, "copy", copy)
        for root in (0, 1, 0):
            assert alike(call(x, mesh, root), expected[3 * root])
    assert parts
    is_at_rest(mesh)


@pytest.mark.parametrize("name", SOME)
def test_one_that_stops_in_the_middle(pool4: Any, name: str) -> None:
    pool4.run(slowly, name)


def sent(x: Tensor, mesh: mc.Mesh, root: int) -> Tensor | None:
    """To the root."""
    if mesh.coordinate["a"] != root:
        mc.send(x, "a", root, mesh=mesh)
        return None
    return mc.recv("a", 1 - root, shape=x.shape, dtype=x.dtype, mesh=mesh)


def killed_in_the_middle(folder: str, name: str) -> None:
    mesh = pairs(b=1)
    call, x, root = {**CALLS, "send": sent}[name], given(mesh.rank), int(name == "scatter")
    for _ in range(4):
        call(x, mesh, root)
    mc.barrier("a", mesh=mesh)
    parts = 0

    def copy(*given: Any) -> None:
        nonlocal parts
        parts += 1
        if parts == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        lending.copy(*given)

    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 1:
            patch.setattr(in_parts, "copy", copy)
            patch.setattr(one_message, "copy", copy)
        try:
            call(x, mesh, root)
        except mc.CommError as error:
            Path(folder, f"{mesh.rank}.told").write_text(f"{time.monotonic() - begin:.1f} {error}")
            raise


@pytest.mark.parametrize("name", [*SOME, "send"])
def test_who_reads_is_told_of_one_that_is_killed_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("meshcomm.runtime.start.workers._PROMPT", 250.0)  # the launch would end the other at once
    with pytest.raises(mc.CommError):
        mc.launch(killed_in_the_middle, 2, (str(tmp_path), name), runtime="processes", timeout=280)
    (text,) = [file.read_text() for file in tmp_path.glob("*.told")]
    assert "index 1 has ended" in text
    assert float(text.split()[0]) < 100


def too_slow(folder: str, name: str) -> str:
    """Who reads has its time run out while the other one writes; what that one lends comes back, and both go on."""
    mesh = pairs(b=1)
    call, x, root = CALLS[name], given(mesh.rank), int(name == "scatter")
    expected = [call(x, mesh, root) for _ in range(4)][-1]
    mc.barrier("a", mesh=mesh)
    mail, own, parts, told = mesh.axis("a").link.mail, lending.copy, 0, Path(folder, "told")  # type: ignore[attr-defined]
    limit = time.monotonic() + 100

    def copy(*given: Any) -> None:
        nonlocal parts
        parts += 1
        while parts == 3 and not told.exists():
            assert time.monotonic() < limit
            time.sleep(0.01)
        own(*given)

    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 1:
            patch.setattr(in_parts, "copy", copy)
            assert alike(call(x, mesh, root), expected)
        else:
            patch.setattr(mail, "timeout", 0.3)
            with pytest.raises(mc.CommError) as caught:
                call(x, mesh, root)
            told.touch()
    for _ in range(5):
        mc.barrier("a", mesh=mesh)
        assert alike(call(x, mesh, root), expected)
    is_at_rest(mesh)
    return "" if mesh.rank else str(caught.value)


@pytest.mark.parametrize("name", SOME)
def test_a_time_out_in_the_middle(tmp_path: Path, name: str) -> None:
    text, _ = mc.launch(too_slow, 2, (str(tmp_path), name), runtime="processes", timeout=280)
    assert "index 1 did not come within 0.3 s" in text


def is_at_rest(mesh: mc.Mesh) -> None:
    """Nothing is open, and all that was lent is back."""
    for _ in range(3):
        mc.barrier("a", mesh=mesh)
    assert not mesh.axis("a").link.mail.open  # type: ignore[attr-defined]
    assert all(segment.is_free() for segment in lending.room._segments)


@contextlib.contextmanager
def interrupted_in(codes: tuple[CodeType, ...], line: int) -> Iterator[list[int]]:
    """Ctrl-C at this line of those that run in there; the lines that have run."""
    lines, before = [0], sys.gettrace()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code not in codes:
            return trace if event == "call" else None
        if event == "line":
            lines[0] += 1
            if lines[0] == line:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def interrupted_often(part: int) -> Iterator[list[int]]:
    """Ctrl-C before this part, and then before each but every third one; the parts that were to be written."""
    own, parts = lending.copy, [0]

    def copy(*given: Any) -> None:
        parts[0] += 1
        if parts[0] == part or (parts[0] > part and parts[0] % 3):
            raise KeyboardInterrupt
        own(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_parts, "copy", copy)
        yield parts


PLACES: dict[str, tuple[CodeType, ...]] = {
    "written": (Parts.write.__code__,),
    "read": tuple(each.__code__ for each in (in_parts.follow, Parts.copy, Parts.reduce, Parts.copy_own, Parts.cut)),
}


def interrupted(name: str, where: str) -> None:
    """Whoever is interrupted while something is written or read has the others finish, and all comes back."""
    mesh = pairs()
    call, x, me = CALLS[name], given(mesh.rank), mesh.coordinate["a"]
    root = 0
    expected = [call(x, mesh, root) for _ in range(4)][-1]
    giver = root if name == "scatter" else 1 - root
    who = 1 - giver if where == "read" else giver
    line, is_over = 0, False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "AWAKE", 60.0)  # on a busy machine too it is this way that is interrupted
        while not is_over:
            line += 1
            if me == who:
                with interrupted_in(PLACES[where], line) if where in PLACES else interrupted_often(line) as lines:
                    try:
                        y = call(x, mesh, root)
                        assert alike(y, expected)
                    except KeyboardInterrupt:
                        pass
                is_over = lines[0] < line
            else:
                assert alike(call(x, mesh, root), expected)
            is_over = bool(mc.broadcast(torch.tensor(float(is_over)), "a", who, mesh=mesh))
            assert alike(call(x, mesh, root), expected)
            is_at_rest(mesh)
    assert line > 5


@pytest.mark.parametrize("where", [*PLACES, "written, often"])
@pytest.mark.parametrize("name", SOME)
def test_who_is_interrupted(pool4: Any, name: str, where: str) -> None:
    pool4.run(interrupted, name, where)


def interrupted_at_the_end(way: str) -> None:
    """As soon as any of the calls in it has returned."""
    mesh = pairs()
    x, me, number, is_over = given(mesh.rank), mesh.coordinate["a"], 0, False
    expected = mc.all_reduce(x, "a", mesh=mesh)

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal left
        if frame.f_code is Call._end.__code__ and event == "c_return":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    while not is_over:
        number += 1
        left, before = number if me == 0 else -1, sys.getprofile()
        work = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
        sys.setprofile(profile)
        try:
            work.wait()
        except KeyboardInterrupt:
            assert left == 0
        finally:
            sys.setprofile(before)
        if way == "waited for again" and left == 0:
            assert alike(work.wait(), expected)
        del work
        is_at_rest(mesh)
        is_over = bool(mc.broadcast(torch.tensor(left > 0), "a", 0, mesh=mesh))
    assert number > 3


@pytest.mark.parametrize("way", ["waited for again", "dropped"])
def test_who_is_interrupted_at_the_end_of_a_call_returns_what_was_lent(pool4: Any, way: str) -> None:
    pool4.run(interrupted_at_the_end, way)


def other_roots(name: str) -> None:
    """Ranks that name another root: each is told, and nothing stays lent."""
    mesh = pairs()
    call, x, me = CALLS[name], given(mesh.rank), mesh.coordinate["a"]
    expected = [call(x, mesh, root) for root in (0, 1) for _ in range(3)]
    mc.barrier("a", mesh=mesh)
    for root in (me, 1 - me):
        told = []
        for make in (lambda root=root: call(x, mesh, root), lambda: mc.barrier("a", mesh=mesh)):
            try:
                make()
            except mc.CommError as error:  # in the barrier where nothing was read from who differs
                told.append(str(error))
        (error_text,) = told
        assert "the ranks called different things" in error_text
        mc.barrier("a", mesh=mesh)
        for same in (0, 1):
            assert alike(call(x, mesh, same), expected[3 * same])
        is_at_rest(mesh)


@pytest.mark.parametrize("name", SOME)
def test_ranks_that_name_another_root(pool4: Any, name: str) -> None:
    pool4.run(other_roots, name)


def in_turns() -> None:
    """Results of many forms in the same memory, held for a while or not, of inputs that come and go."""
    mesh = pairs()
    me = mesh.coordinate["a"]
    inputs = [torch.cat([given(1 - me + 2 * step), given(me)]) for step in range(2)]
    held: list[Tensor] = []
    for step in range(40):
        whole, dtype = inputs[step % 2], (torch.float32, torch.int32, torch.bfloat16)[step % 3]
        x = whole[ROWS:] if step % 5 else whole[:ROWS] * step  # of memory that goes after the call
        x = x.to(dtype).view((ROWS * 256,) if step % 4 else (ROWS, 256))
        root, mode = step // 20, (torch.inference_mode, torch.no_grad)[step // 7 % 2]
        expected = mc.reduce(x, "a", root, mesh=mesh, async_op=True).wait()
        for _ in range(3):
            with mode():
                y = mc.reduce(x, "a", root, mesh=mesh)
            assert alike(y, expected)
            if y is not None:
                assert y.is_inference() == (mode is torch.inference_mode)
                assert (y.shape, y.dtype, y.requires_grad) == (x.shape, dtype, False)
                assert all(torch.equal(other, same) for other, same in zip(held[::2], held[1::2], strict=True))
                if step % 3 == 0:
                    held = [*held[-4:], y, y.clone()]
                else:
                    with mode():
                        y.zero_()
    del held, y
    is_at_rest(mesh)


def test_results_of_many_forms_in_turns(pool4: Any) -> None:
    pool4.run(in_turns)


def signs_of_zeros(op: str) -> None:
    """They do not depend on whether the other one is just writing."""
    mesh = pairs()
    me = mesh.coordinate["a"]
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros(2**18 + 27, dtype=dtype) * (1 - 2 * me)
        expected = mc.reduce(x, "a", 0, op, mesh=mesh, async_op=True).wait()
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            own = Parts.reduce
            patch.setattr(Parts, "reduce", lambda *given: seen.append(given) or own(*given))
            patch.setattr(waiting, "AWAKE", 60.0)
            for slow in (0.001, 0.005, 0.02, 0.08):  # whoever is late to read, by so many parts he is not
                patch.setattr(in_parts, "copy", lambda *given, slow=slow: (time.sleep(slow), lending.copy(*given)))
                assert alike(mc.reduce(x, "a", 0, op, mesh=mesh), expected)
        assert bool(seen) == (me == 0)


@pytest.mark.parametrize("op", ["max", "min"])
def test_signs_of_zeros(pool4: Any, op: str) -> None:
    pool4.run(signs_of_zeros, op)


class _Spoiling(TorchDispatchMode):
    """What comes of it is no number any more, for who has it later."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As it is, but for what is cut."""
        y = func(*args, **(kwargs or {}))
        return [torch.zeros_like(part) for part in y] if isinstance(y, (list, tuple)) else y


def in_a_mode() -> None:
    """Whatever the first one to read it is in the middle of, what is remembered is what is lent."""
    mesh = pairs()
    x = given(mesh.rank)
    for root in (0, 1):
        expected = mc.reduce(x, "a", root, mesh=mesh, async_op=True).wait()
        with _Spoiling():
            for _ in range(4):
                mc.reduce(x, "a", root, mesh=mesh)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(waiting, "AWAKE", 60.0)
            patch.setattr(in_parts, "copy", lambda *given: (time.sleep(0.001), lending.copy(*given)))
            for _ in range(4):
                assert alike(mc.reduce(x, "a", root, mesh=mesh), expected)


def test_what_is_remembered_outlives_a_mode(pool4: Any) -> None:
    pool4.run(in_a_mode)
