"""A message that is not what its receiver expects: the receiver is told what was sent, the sender is not hurt, and the axis goes
on; for every way on which one rank hands something to another.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc
from meshcomm.collectives import door
from meshcomm.collectives.door import _handed
from meshcomm.objects import letters as object_letters
from meshcomm.runtime.process import lending
from meshcomm.runtime.process.boxes import Box
from meshcomm.runtime.process.lending import PART
from meshcomm.runtime.transports.gloo.envelopes import ROOM, SIZE, Envelope
from meshcomm.runtime.transports.shared.mailbox import Mail
from meshcomm.runtime.transports.shared.messages import one_message
from meshcomm.runtime.transports.shared.messages.letters import Letters, letters_of
from meshcomm.runtime.transports.shared.messages.one_message import _write
from meshcomm.runtime.transports.shared.messages.posted import Posted
from meshcomm.runtime.transports.shared.messages.written import INSIDE, MOST
from meshcomm.runtime.transports.shared.waiting import Wait
from meshcomm.runtime.transports.underway import Messages

Run = Callable[..., list[Any]]
LARGE = SIZE

UNLIKE = {
    "longer": (torch.arange(6.0), torch.arange(3.0)),
    "shorter": (torch.arange(3.0), torch.arange(6.0)),
    "dtype": (torch.arange(3.0), torch.arange(3)[:3].int()),
    "width": (torch.arange(4.0), torch.arange(4.0).double()),
    "dims": (torch.ones(2, 3), torch.ones(3, 2)),
    "rank": (torch.ones(6), torch.ones(6, 1)),
    "nothing": (torch.ones(0), torch.ones(1)),
    "scalar": (torch.ones(()), torch.ones(1)),
    "large": (torch.ones(LARGE), torch.ones(LARGE + 1)),
    "large and small": (torch.ones(LARGE), torch.ones(2)),
    "small and large": (torch.ones(2), torch.ones(LARGE)),
    "half": (torch.ones(2, LARGE, dtype=torch.bfloat16), torch.ones(2, LARGE, dtype=torch.float16)),
    "complex": (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.float64)),
    "bool": (torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.uint8)),
}  # fmt: skip
"""What is sent, and what its receiver expects."""


def told(fn: Callable[[], Any]) -> str:
    with pytest.raises(mc.CommError) as caught:
        fn()
    return str(caught.value)


def pair() -> mc.Mesh | None:
    """Of the first two ranks."""
    mesh = mc.make_mesh({"a": 2}, ranks=[0, 1])
    return mesh if mc.rank() < 2 else None


def goes_on(mesh: mc.Mesh) -> None:
    assert mc.all_reduce(torch.ones(2), "a", mesh=mesh).tolist() == [2, 2]
    if mesh.rank == 0:
        mc.send(torch.tensor([7, 8]), "a", 1, mesh=mesh)
    else:
        assert mc.recv("a", 0, shape=(2,), dtype=torch.int64, mesh=mesh).tolist() == [7, 8]


def one_way(name: str, how: str) -> str:
    """What rank 1 is told."""
    mesh = pair()
    if mesh is None:
        return ""
    x, like = UNLIKE[name]
    later, text = how == "later", ""
    if mesh.rank == 0:
        if how == "exchange":
            mc.exchange([(x, 1)], [], "a", mesh=mesh)
        else:
            work = mc.send(x, "a", 1, mesh=mesh, async_op=later)  # type: ignore[call-overload]
            _ = work.wait() if later else None
    elif how == "exchange":
        text = told(lambda: mc.exchange([], [(0, tuple(like.shape), like.dtype)], "a", mesh=mesh))
    else:
        want: Any = {"shape": tuple(like.shape), "dtype": like.dtype, "mesh": mesh}
        text = told(lambda: mc.recv("a", 0, **want, async_op=True).wait() if later else mc.recv("a", 0, **want))
    goes_on(mesh)
    return text


def lone_elements() -> list[Any]:
    """One element counts as dense whatever its stride."""
    mesh = pair()
    if mesh is None:
        return []
    found = []
    for dtype in (torch.int64, torch.float64, torch.bfloat16, torch.complex64, torch.bool):
        x = torch.arange(6).to(dtype)[1::4][:1]
        if mesh.rank == 0:
            mc.send(x, "a", 1, mesh=mesh)
        else:
            found.append(mc.recv("a", 0, shape=(1,), dtype=dtype, mesh=mesh).item())
    return found


@pytest.mark.parametrize("pool", ["pool4", "gloo4"])
def test_a_lone_element_of_any_stride(request: pytest.FixtureRequest, pool: str) -> None:
    assert request.getfixturevalue(pool).run(lone_elements)[1] == [1, 1.0, 1.0, 1 + 0j, True]


@pytest.mark.parametrize("pool", ["pool4", "gloo4"])
@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_sent_is_not_what_is_expected(request: pytest.FixtureRequest, pool: str, name: str) -> None:
    x, like = UNLIKE[name]
    for how in ("at once", "later", "exchange") if name in ("longer", "dtype", "large") else ("at once",):
        text = request.getfixturevalue(pool).run(one_way, name, how)[1]
        sent, expected = (mc.errors.shape_text(each.dtype, each.shape) for each in (x, like))  # type: ignore[attr-defined]
        assert f"index 0 sends {sent}, index 1 expects {expected}." in text
        assert "from index 0 to index 1, tag 0" in text


def in_a_circle(name: str) -> list[tuple[str, str]]:
    """Rank 1 has another tensor than the others: what is told of each call, and when the ranks meet after it."""
    mesh = mc.make_mesh({"a": 4})
    x = UNLIKE[name][mesh.rank == 1]
    calls: list[Callable[[], Any]] = [
        lambda: mc.shift(x, "a", mesh=mesh),
        lambda: mc.shift(x, "a", -1, wrap=False, mesh=mesh, async_op=True).wait(),
        lambda: mc.permute(x, "a", [(0, 1), (1, 0)], mesh=mesh),
    ]
    found = []
    for call in calls:
        told = []
        for each in (call, lambda: mc.barrier("a", timeout=60, mesh=mesh)):
            try:
                each()
                told.append("")
            except mc.CommError as error:
                told.append(str(error))
        found.append((told[0], told[1]))
        assert mc.all_reduce(torch.ones(1), "a", mesh=mesh).item() == 4
    return found


@pytest.mark.parametrize("pool", ["pool4", "gloo4"])
@pytest.mark.parametrize("name", ["longer", "dtype", "dims", "rank", "large"])
def test_permutes_of_what_differs(request: pytest.FixtureRequest, pool: str, name: str) -> None:
    """Who gets another tensor than its own is told; where memory is shared, the others are when they have met."""
    shown = [re.escape(mc.errors.shape_text(x.dtype, x.shape)) for x in UNLIKE[name]]  # type: ignore[attr-defined]
    every = request.getfixturevalue(pool).run(in_a_circle, name)
    for call, receivers in enumerate([(1, 2), (0, 1), (0, 1)]):
        for rank, texts in enumerate(every):
            at_once, met = texts[call]
            if pool == "pool4":
                assert at_once or met
                assert at_once or rank not in receivers, (call, rank, texts)
            else:
                assert bool(at_once) == (rank in receivers), (call, rank, texts)
            for text in filter(None, (at_once, met)):
                assert all(re.search(each, text) for each in shown), text


def right(dtype: torch.dtype, length: int) -> None:
    """Many at once, in another order than they are waited for."""
    mesh = mc.make_mesh({"a": 4})
    me, others = mesh.rank, [i for i in range(4) if i != mesh.rank]

    def message(src: int, dst: int, tag: int) -> Tensor:
        return (torch.arange(length) + 7 * src + dst + tag).to(dtype).view(length, 1)

    wants = [(src, (length, 1), dtype, tag) for src in others for tag in (0, 5)]
    posts = [(message(me, dst, tag), dst, tag) for dst in reversed(others) for tag in (5, 0)]
    for later in (False, True):
        got: Any = mc.exchange(posts, wants, "a", mesh=mesh, async_op=later)  # type: ignore[call-overload]
        for (src, _, _, tag), y in zip(wants, got.wait() if later else got, strict=True):
            assert y.dtype == dtype
            assert torch.equal(y.view(torch.uint8), message(src, me, tag).view(torch.uint8))


@pytest.mark.parametrize("pool", ["pool4", "gloo4"])
@pytest.mark.parametrize("length", [0, 1, ROOM // 4, ROOM // 4 + 1, 3 * SIZE])
def test_messages_of_every_size(request: pytest.FixtureRequest, pool: str, length: int) -> None:
    for dtype in (torch.float32, torch.int16, torch.complex128, torch.bool):
        request.getfixturevalue(pool).run(right, dtype, length)


def over_another_axis() -> str:
    """Of the same ranks: a message is for the axis that it was sent over."""
    one, other = mc.make_mesh({"a": 2}, ranks=[0, 1]), mc.make_mesh({"b": 2}, ranks=[0, 1])
    if mc.rank() > 1:
        return ""
    x = torch.arange(3.0)
    if mc.rank() == 0:
        works = [mc.send(x, "a", 1, mesh=one, async_op=True), mc.send(x + 1, "b", 1, mesh=other, async_op=True)]
        mc.wait(works)
        return ""
    want: Any = {"shape": (3,), "dtype": torch.float32}
    assert mc.recv("b", 0, **want, mesh=other).tolist() == [1, 2, 3]
    assert mc.recv("a", 0, **want, mesh=one).tolist() == [0, 1, 2]
    return ""


@pytest.mark.parametrize("pool", ["pool4", "gloo4"])
def test_a_message_is_for_its_axis(request: pytest.FixtureRequest, pool: str) -> None:
    request.getfixturevalue(pool).run(over_another_axis)


def test_in_process_both_sides_are_told() -> None:
    mesh = mc.make_mesh({"a": 2})

    def main() -> str:
        if mesh.rank == 0:
            return told(lambda: mc.send(torch.ones(6), "a", 1, mesh=mesh))
        return told(lambda: mc.recv("a", 0, shape=(3,), dtype=torch.float64, mesh=mesh))

    for text in mc.launch(main, ranks=2):
        assert "sent f32[6]" in text
        assert "expected f64[3]" in text


@pytest.mark.parametrize("shape", [(), (0,), (3, 1, 2), tuple(range(1, 17)), (1,) * 20])
def test_an_envelope_says_what_was_written(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape if len(shape) < 10 else (1,) * len(shape), dtype=torch.bfloat16)
    found = Envelope.read(Envelope.of("one", 3, x, 0).write(x.reshape(-1)))
    assert found.is_for("one", 3, torch.bfloat16, tuple(x.shape))
    assert not found.is_for("other", 3, torch.bfloat16, tuple(x.shape))
    assert not found.is_for("one", 4, torch.bfloat16, tuple(x.shape))
    assert not found.is_for("one", 3, torch.float16, tuple(x.shape))
    assert not found.is_for("one", 3, torch.bfloat16, (*x.shape, 1))


# ------------------------------------------------------------------------------------- what is lent, where memory is shared

BIG = {
    "a vector": torch.arange(30_000.0),
    "not dense": torch.arange(60_000.0).view(200, 300).T,
    "bfloat16": torch.arange(9_000, dtype=torch.bfloat16).view(9, 10, 100),
    "complex": torch.complex(torch.arange(4_000.0), -torch.arange(4_000.0)),
    "conjugate": torch.complex(torch.arange(4_000.0), -torch.arange(4_000.0)).conj(),
    "bool": torch.arange(9_000) % 3 == 0,
    "some MiB": torch.arange(2**20, dtype=torch.int64),
}


def there_and_back(name: str, how: str) -> None:
    """Between two ranks; all that was lent for it is given back."""
    mesh = pair()
    if mesh is None:
        return
    x, other = BIG[name], 1 - mesh.rank
    with pytest.MonkeyPatch.context() as patch:
        if how == "no memory":
            patch.setattr(lending.room, "lend", no_memory)
        for later in (False, True):
            for turn in (0, 1):
                if mesh.rank == turn:
                    sent: Any = mc.send(x, "a", other, mesh=mesh, async_op=later)
                    if later:
                        sent.wait()
                    continue
                got: Any = mc.recv("a", other, shape=x.shape, dtype=x.dtype, mesh=mesh, async_op=later)
                y = got.wait() if later else got
                assert torch.equal(y, x)
                assert y.dtype == x.dtype
                y.requires_grad_(y.is_floating_point() or y.is_complex())  # it is a tensor as any other,
                y.detach().zero_()  # and nobody else's
    goes_on(mesh)
    assert not [reader for _, reader in lending.room.wanted() if "message" in reader.told_of(0)]


def no_memory(*args: Any, **kwargs: Any) -> Any:
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize("how", ["lent", "no memory"])
def test_what_is_lent_arrives_and_is_given_back(pool4: Any, how: str) -> None:
    for name in BIG:
        pool4.run(there_and_back, name, how)


def unlike_and_given_back() -> None:
    mesh = pair()
    if mesh is None:
        return
    for _ in range(3):
        if mesh.rank == 0:
            mc.send(torch.ones(5000), "a", 1, mesh=mesh)
        else:
            assert "a message does not fit" in told(
                lambda: mc.recv("a", 0, shape=(5001,), dtype=torch.float32, mesh=mesh)
            )
    goes_on(mesh)
    assert not [reader for _, reader in lending.room.wanted() if "message" in reader.told_of(0)]


def test_what_was_not_expected_is_given_back(pool4: Any) -> None:
    pool4.run(unlike_and_given_back)


def from_one_that_is_gone() -> str:
    mesh = pair()
    text = ""
    if mesh is None:
        return text
    if mesh.rank == 0:
        mc.send(torch.ones(5000), "a", 1, mesh=mesh)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Mail, "borrow_at", no_memory)
            text = told(lambda: mc.recv("a", 0, shape=(5000,), dtype=torch.float32, mesh=mesh))
    goes_on(mesh)
    for segment, _ in lending.room.wanted():
        segment.take_back()
    return text


def test_who_has_sent_is_gone(pool4: Any) -> None:
    text = pool4.run(from_one_that_is_gone)[1]
    assert "the transport failed: the memory of index 0 cannot be read: Cannot allocate memory" in text


def ends_at_once() -> float:
    """Rank 0 sends and is at its end; rank 1 is slow."""
    mesh = mc.make_mesh({"a": 2})
    if mesh.rank == 0:
        mc.send(torch.full((10_000,), 3.0), "a", 1, mesh=mesh)
        return 0.0
    read = Letters._read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Letters, "_read", lambda *args: (time.sleep(1.0), read(*args)))
        return float(mc.recv("a", 0, shape=(10_000,), dtype=torch.float32, mesh=mesh).sum())


def test_who_has_sent_waits_at_its_end_until_it_was_read() -> None:
    assert mc.launch(ends_at_once, 2, runtime="processes") == [0.0, 30_000.0]


def to_nobody() -> float:
    """Nobody receives it: what was lent for it is not waited for at the end."""
    mesh = mc.make_mesh({"a": 2}, timeout=1.0)
    if mesh.rank == 0:
        told(lambda: mc.send(torch.ones(10_000), "a", 1, mesh=mesh))
        assert not lending.room.wanted()
    return time.monotonic()


def test_what_nobody_receives_keeps_nobody() -> None:
    begin = max(mc.launch(to_nobody, 2, runtime="processes"))
    assert time.monotonic() - begin < 15


def to_one_another() -> float:
    """Neither receives: at their ends both know that nobody will."""
    mesh = mc.make_mesh({"a": 2}, timeout=60.0)
    works = [mc.send(torch.ones(10_000), "a", 1 - mesh.rank, tag, mesh=mesh, async_op=True) for tag in range(3)]
    assert len(works) == 3
    return time.monotonic()


def test_who_is_at_its_end_receives_nothing() -> None:
    begin = max(mc.launch(to_one_another, 2, runtime="processes"))
    assert time.monotonic() - begin < 30


def many_at_once() -> int:
    """Those that are more than may be lent go another way, and all arrive."""
    mesh, count = mc.make_mesh({"a": 2}), 12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lending, "_MOST_LARGE", 4)
        if mesh.rank == 0:
            works = [mc.send(torch.full((20_000,), i), "a", 1, i % 2, mesh=mesh, async_op=True) for i in range(count)]
            mc.barrier("a", mesh=mesh)
            for work in works:
                work.wait()
            return len(lending.room._segments)
        mc.barrier("a", mesh=mesh)
        for i in range(count):
            assert mc.recv("a", 0, shape=(20_000,), dtype=torch.int64, tag=i % 2, mesh=mesh).unique().tolist() == [i]
        return 0


def test_many_messages_under_way_keep_few_descriptors() -> None:
    assert mc.launch(many_at_once, 2, runtime="processes")[0] <= 4


# --------------------------------------------------------------------------------------- one that is waited for at once

NOW = {
    "a number": torch.tensor(3.5),
    "nothing": torch.ones(0, 3),
    "as much as a letter holds": torch.arange(INSIDE // 8),
    "one more": torch.arange(INSIDE // 8 + 1),
    "every other": torch.arange(40.0)[::2],
    "turned": torch.complex(torch.arange(9.0), torch.arange(9.0)).conj().imag,
    "expanded": torch.ones(1).expand(7, 5),
    "a parameter": torch.nn.Parameter(torch.arange(5.0)),
    "bool": torch.arange(9) % 2 == 0,
    "conjugate": torch.complex(torch.arange(9.0), torch.arange(9.0)).conj(),
    "short": torch.arange(900, dtype=torch.int16),
    "half": torch.arange(60, dtype=torch.bfloat16).view(3, 4, 5),
    "a letter is too small for its shape": torch.ones([1] * 20),
    "parts": torch.arange(3 * PART // 8 + 5),
    "parts, not dense": torch.arange(2.0 * PART).view(2, -1).T,
    "zeros without memory": torch._efficientzerotensor((5,)),
    "a part of zeros without memory": torch._efficientzerotensor((5000,))[4990:],
    "many zeros without memory": torch._efficientzerotensor((5000,)),
    "the end of very many zeros without memory": torch._efficientzerotensor((2**23,))[-5:],
}


def now_and_again(name: str, how: str) -> None:
    """More than a ring has place for, each another one; all that was lent is given back."""
    mesh = pair()
    if mesh is None:
        return
    x, times = NOW[name].detach(), 20 if NOW[name].numel() > 2000 else 2 * MOST + 3
    with torch.inference_mode(how == "inference mode"):
        for i in range(times):
            k = max(0, i - 4)  # as it is also when it goes at once
            if mesh.rank == 0:
                with torch.no_grad():
                    more = x ^ bool(k % 2) if x.dtype == torch.bool else x + k
                    mc.send(NOW[name] if k == 0 else more, "a", 1, i % 2, mesh=mesh)
                continue
            y = mc.recv("a", 0, shape=x.shape, dtype=x.dtype, tag=i % 2, mesh=mesh)
            assert torch.equal(y, x ^ bool(k % 2) if x.dtype == torch.bool else x + k)
            assert y.dtype == x.dtype
            assert y.is_contiguous()
            assert y.is_inference() == (how == "inference mode")
    goes_on(mesh)
    assert not [reader for _, reader in lending.room.wanted() if "message" in reader.told_of(0)]


@pytest.mark.parametrize("how", ["plain", "inference mode"])
@pytest.mark.parametrize("name", NOW)
def test_one_that_is_waited_for_at_once(pool4: Any, name: str, how: str) -> None:
    pool4.run(now_and_again, name, how)
    pool4.run(now_and_again, name, "plain")


def between_others() -> None:
    """One that is waited for at once comes in its turn among those that are not, over its route alone."""
    mesh = pair()
    if mesh is None:
        return
    want: Any = {"shape": (3,), "dtype": torch.float32, "mesh": mesh}
    if mesh.rank == 0:
        works = [mc.send(torch.full((3,), float(i)), "a", 1, i % 2, mesh=mesh, async_op=True) for i in range(4)]
        mc.send(torch.full((3,), 4.0), "a", 1, mesh=mesh)
        mc.send(torch.full((3,), 5.0), "a", 1, 1, mesh=mesh)
        mc.wait(works)
        return
    first = mc.recv("a", 0, **want, async_op=True)
    assert [mc.recv("a", 0, **want)[0].item() for _ in range(2)] == [2.0, 4.0]
    assert first.wait()[0].item() == 0.0
    assert [mc.recv("a", 0, **want, tag=1)[0].item() for _ in range(3)] == [1.0, 3.0, 5.0]


def facing() -> None:
    """Both send and then receive: each takes what has come while it waits, if it has asked for that."""
    mesh = pair()
    if mesh is None:
        return
    for length in (4, 5000, PART):
        x, want = torch.full((length,), float(mesh.rank)), (length,)
        got = mc.recv("a", 1 - mesh.rank, shape=want, dtype=x.dtype, mesh=mesh, async_op=True)
        mc.send(x, "a", 1 - mesh.rank, mesh=mesh)
        assert got.wait().unique().tolist() == [1.0 - mesh.rank]


def both_ways_at_once() -> None:
    """What one sends and receives in one call, of any size; or of different sizes."""
    mesh = pair()
    if mesh is None:
        return
    me, other = mesh.rank, 1 - mesh.rank
    for lengths in ((4, 4), (5000, 5000), (PART, PART), (4, 5000), (2 * PART, 0)):
        for turn in range(5):
            x, want = torch.full((lengths[me],), me + 0.5 * turn), (other, (lengths[other],), torch.float32, turn % 2)
            [y] = mc.exchange([(x, other, turn % 2)], [want], "a", mesh=mesh)
            assert torch.equal(y, torch.full((lengths[other],), other + 0.5 * turn))
    for value in range(4):  # one of them is late
        mc.barrier("a", mesh=mesh)
        time.sleep(0.02 * ((value + me) % 2))
        sent, want = [(torch.full((3,), me + value), other)], [(other, (3,), torch.int64)]
        assert mc.exchange(sent, want, "a", mesh=mesh)[0].tolist() == [other + value] * 3


def compiled() -> None:
    """Graphs end before a message and begin after it."""
    mesh = pair()
    if mesh is None:
        return

    def step(x: Tensor) -> Tensor:
        y = 2 * x
        if mesh.rank == 0:
            mc.send(y, "a", 1, mesh=mesh)
            return y
        return mc.recv("a", 0, shape=(16,), dtype=torch.float32, mesh=mesh) + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what dynamo does not trace
        fn = torch.compile(step, backend="eager")
        for i in range(4):
            assert fn(torch.full((16,), float(i))).tolist() == [2.0 * i + mesh.rank] * 16


def escaped() -> None:
    """From a transform that is over, as any tensor."""
    mesh = pair()
    if mesh is None:
        return
    kept: list[Tensor] = []

    def twice(x: Tensor) -> Tensor:
        kept.append(2 * x)
        return x.sum()

    for length in (4, 5000, PART):
        kept.clear()
        torch.func.grad(twice)(torch.ones(length))
        torch.func.jvp(twice, (torch.ones(length),), (torch.ones(length),))
        for _ in range(3):
            for x in kept:
                if mesh.rank == 0:
                    with torch.no_grad():
                        mc.send(x, "a", 1, mesh=mesh)
                else:
                    assert mc.recv("a", 0, shape=(length,), dtype=torch.float32, mesh=mesh).unique().tolist() == [2.0]


def untaken() -> None:
    """Whose time is up has sent what it has sent: it is taken later, and nothing is written over it meanwhile."""
    mesh = pair()
    if mesh is None:
        return
    want: Any = {"shape": (2,), "dtype": torch.float32, "mesh": mesh}
    mail: Any = mesh.axis("a").link.mail
    if mesh.rank == 0:
        mc.send(torch.zeros(2), "a", 1, mesh=mesh)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mail, "timeout", 0.3)
            told(lambda: mc.send(torch.ones(2), "a", 1, 7, mesh=mesh))
        for i in range(2 * MOST):
            mc.send(torch.full((2,), float(i)), "a", 1, mesh=mesh)
        mail.failed = False
        return
    mc.recv("a", 0, **want)
    for i in range(2 * MOST):
        assert mc.recv("a", 0, **want)[1].item() == i
    assert mc.recv("a", 0, **want, tag=7).tolist() == [1.0, 1.0]


def overtaken() -> None:
    """Whose message was taken hears of it also when others of another thread stood in its place since."""
    mesh = pair()
    if mesh is None:
        return
    want: Any = {"shape": (2,), "dtype": torch.float32, "mesh": mesh}
    if mesh.rank == 1:
        for i in range(2 * MOST):
            assert mc.recv("a", 0, **want)[1].item() == i
        assert mc.recv("a", 0, **want, tag=7).tolist() == [1.0, 1.0]
        for i in range(2 * MOST):
            assert mc.recv("a", 0, **want)[1].item() == i
        return
    for i in range(2 * MOST):  # now it goes at once
        mc.send(torch.full((2,), float(i)), "a", 1, mesh=mesh)
    read_soon, others = one_message._read_soon, threading.Event()

    def late(letters: Any, sent: Any) -> bool:
        if threading.current_thread() is slow:
            begun.set()
            others.wait(30)
        return read_soon(letters, sent)

    begun = threading.Event()
    slow = threading.Thread(target=mc.send, args=(torch.ones(2), "a", 1, 7), kwargs={"mesh": mesh}, daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_message, "_read_soon", late)
        slow.start()
        assert begun.wait(30)
        for i in range(2 * MOST):
            mc.send(torch.full((2,), float(i)), "a", 1, mesh=mesh)
        others.set()
        slow.join(10)
    assert not slow.is_alive()


@pytest.mark.parametrize(
    "program", [between_others, facing, both_ways_at_once, escaped, untaken, overtaken], ids=lambda fn: fn.__name__
)
def test_at_once_and_not(pool4: Any, program: Callable[[], None]) -> None:
    pool4.run(program)
    pool4.run(there_and_back, "a vector", "lent")


@pytest.mark.thorough
def test_between_graphs(pool4: Any) -> None:
    pool4.run(compiled)


def broken_off(later: bool) -> list[str]:
    """Who sends is interrupted in the middle: who receives is told, and gets the next one."""
    mesh = pair()
    if mesh is None:
        return []
    length = PART // 2  # of 8 bytes: four parts
    want: Any = {"shape": (length,), "dtype": torch.float64, "mesh": mesh}
    for value in (1.0, 2.0):  # now it goes at once
        if mesh.rank == 0:
            mc.send(torch.full((length,), value, dtype=torch.float64), "a", 1, mesh=mesh)
        else:
            assert mc.recv("a", 0, **want).unique().tolist() == [value]
    mc.barrier("a", mesh=mesh)
    found = []
    if mesh.rank == 0:
        x = torch.full((length,), 3.0, dtype=torch.float64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one_message, "_write", half_of_it)
            with pytest.raises(KeyboardInterrupt):
                mc.send(x, "a", 1, mesh=mesh)
        mc.send(x + 1, "a", 1, mesh=mesh)
    elif later:
        works = [mc.recv("a", 0, **want, async_op=True) for _ in range(2)]
        found = [told(works[0].wait)]
        assert works[1].wait().unique().tolist() == [4.0]
    else:
        found = [told(lambda: mc.recv("a", 0, **want))]
        assert mc.recv("a", 0, **want).unique().tolist() == [4.0]
    goes_on(mesh)
    assert not [reader for _, reader in lending.room.wanted() if "message" in reader.told_of(0)]
    return found


def half_of_it(lent: Any, address: int, nbytes: int) -> None:
    _write(lent, address, nbytes // 2)
    time.sleep(0.05)
    raise KeyboardInterrupt


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_who_is_interrupted_while_it_writes(pool4: Any, later: bool) -> None:
    [text] = pool4.run(broken_off, later)[1]
    assert "the transport failed: index 0 was interrupted in the middle of a message" in text


def slow_and_whole(later: bool) -> list[float]:
    """Who receives waits for each part, and gives up nothing."""
    mesh = pair()
    if mesh is None:
        return []
    length, found = PART, []
    for _ in range(4):
        if mesh.rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(one_message, "_write", one_by_one)
                mc.send(torch.arange(float(length)), "a", 1, mesh=mesh)
        else:
            y: Any = mc.recv("a", 0, shape=(length,), dtype=torch.float32, mesh=mesh, async_op=later)  # type: ignore[call-overload]
            found.append(bool(torch.equal(y.wait() if later else y, torch.arange(float(length)))))
    return found


def one_by_one(lent: Any, address: int, nbytes: int) -> None:
    for length in range(PART, nbytes + 1, PART):
        time.sleep(0.02)
        _write(lent, address, length)


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_who_receives_waits_for_each_part(pool4: Any, later: bool) -> None:
    assert pool4.run(slow_and_whole, later)[1] == [True] * 4


def interrupted_at(door: int, call: Callable[[], Any]) -> bool:
    """Whether an exception came, as Ctrl-C does: at the door of this number, of those where it comes in the library."""
    left = door

    def arrive(frame: Any, event: str, arg: Any) -> None:
        nonlocal left
        if event not in ("call", "c_return") or "/meshcomm/" not in frame.f_code.co_filename:
            return
        if getattr(arg, "__name__", "") in ("sched_yield", "monotonic") or frame.f_code.co_name in WAITS:
            return
        left -= 1
        if left < 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(arrive)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


WAITS = {"look", "more", "listen", "sleep", "is_read", "wait", "_wait_for", "gone_among", "ring", "is_unread"}


def sender_at_each_door(length: int) -> int:
    """Who sends is interrupted wherever that can be: what comes then is whole, at most once, or is told."""
    mesh = pair()
    if mesh is None:
        return 0
    want: Any = {"shape": (length,), "dtype": torch.float32, "mesh": mesh}
    times, over, more = 0, False, 3  # at first it is not known
    while not over:
        if mesh.rank == 0:
            x = torch.full((length,), float(times))
            more = 3 if interrupted_at(times, lambda x=x: mc.send(x, "a", 1, mesh=mesh)) else more - 1
            over = not more
            mc.send(torch.full((length,), -2.0 if over else -1.0), "a", 1, mesh=mesh)
        else:
            found: list[float] = []
            while not found or found[-1] >= 0:
                try:
                    found += mc.recv("a", 0, **want).unique().tolist()
                except mc.CommError as error:
                    if "was interrupted in the middle of a message" not in str(error):
                        raise
            assert found[:-1] in ([], [float(times)]), (times, found)
            over = found[-1] == -2.0
        times += 1
        assert times < 1000
    goes_on(mesh)
    all_given_back()
    return times


def all_given_back() -> None:
    assert not [reader for _, reader in lending.room.wanted() if "message" in reader.told_of(0)]
    free = [segment.is_free() for segment in [*lending.room._segments, *lending.room._small]]
    assert free.count(False) <= 1  # what the last collective lent, which the other one reads


IN_ORDER = bytes(i % 251 for i in range(20_000))


def receiver_at_each_door(length: int, how: str, seconds: float) -> int:
    """Who receives is interrupted wherever that can be, and asks again: it gets that message, and the next one next."""
    mesh = pair()
    if mesh is None:
        return 0
    want: Any = {"shape": (length,), "dtype": torch.float32, "mesh": mesh}

    def take(works: list[Any]) -> Tensor:
        if how == "object":
            x, in_order = mc.recv_object("a", 0, mesh=mesh)
            assert in_order == IN_ORDER
            return x  # type: ignore[no-any-return]
        if how == "exchange":
            return mc.exchange([], [(0, (length,), torch.float32)], "a", mesh=mesh)[0]
        if how == "in time":
            return mc.recv("a", 0, **want, timeout=60)
        if how == "later":
            if not works:
                works.append(mc.recv("a", 0, **want, async_op=True))
            return works[0].wait()
        return mc.recv("a", 0, **want)

    times, over, more = 0, False, 3
    while not over:
        if mesh.rank == 0:
            time.sleep(seconds)
            for value in (float(times), -1.0):
                x = torch.full((length,), value)
                if how == "object":
                    mc.send_object((x, IN_ORDER), "a", 1, mesh=mesh)
                else:
                    mc.send(x, "a", 1, mesh=mesh)
            over = mc.recv("a", 1, shape=(), dtype=torch.bool, mesh=mesh).item()
        else:
            works: list[Any] = []
            found: list[Tensor] = []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of a Work that its caller never had
                hit = interrupted_at(times, lambda found=found, works=works: found.append(take(works)))
            found += [] if found else [take(works)]
            works.clear()
            found.append(take(works))
            assert [y.unique().tolist() for y in found] == [[float(times)], [-1.0]], times
            more = 3 if hit else more - 1
            over = not more
            mc.send(torch.tensor(over), "a", 0, mesh=mesh)
        times += 1
        assert times < 1000
    goes_on(mesh)
    all_given_back()
    return times


@pytest.mark.parametrize("length", [16, 5000, PART])
def test_who_sends_is_interrupted_anywhere(pool4: Any, length: int) -> None:
    assert max(pool4.run(sender_at_each_door, length)) > 10


@pytest.mark.parametrize("length", [16, 5000])
def test_who_sends_over_gloo_is_interrupted_anywhere(gloo4: Any, length: int) -> None:
    assert max(gloo4.run(sender_at_each_door, length)) > 10


@pytest.mark.parametrize("seconds", [0.0, 2e-3], ids=["soon", "late"])
@pytest.mark.parametrize("how", ["now", "exchange", "in time", "later", "object"])
@pytest.mark.parametrize("length", [16, 5000, PART])
def test_who_receives_is_interrupted_anywhere(pool4: Any, length: int, how: str, seconds: float) -> None:
    assert max(pool4.run(receiver_at_each_door, length, how, seconds)) > 10


@pytest.mark.parametrize("how", ["now", "exchange", "in time", "later", "object"])
@pytest.mark.parametrize("length", [16, 5000])
def test_who_receives_over_gloo_is_interrupted_anywhere(gloo4: Any, length: int, how: str) -> None:
    assert max(gloo4.run(receiver_at_each_door, length, how, 0.0)) > 10


def object_in_parts(length: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_letters, "_CHUNK", 4 * length)
        return receiver_at_each_door(length, "object", 0.0)


@pytest.mark.parametrize("pool", ["pool4", pytest.param("gloo4", marks=pytest.mark.thorough)])
def test_who_receives_an_object_in_parts_is_interrupted_anywhere(request: pytest.FixtureRequest, pool: str) -> None:
    assert max(request.getfixturevalue(pool).run(object_in_parts, 5000)) > 10


def interrupted_before_it_says_so() -> list[float]:
    """Who is interrupted when it has seen as many letters as there is place for, and has not said so, gets the rest."""
    mesh = pair()
    if mesh is None:
        return []
    want: Any = {"shape": (1,), "dtype": torch.float32, "mesh": mesh, "timeout": 30}
    if mesh.rank == 0:
        works = [mc.send(torch.tensor([float(i)]), "a", 1, mesh=mesh, async_op=True) for i in range(MOST + 2)]
        mc.barrier("a", mesh=mesh)
        mc.wait(works)
        return []
    mc.barrier("a", mesh=mesh)
    letters = letters_of(mesh.axis("a").link.mail)

    def at_lines(frame: Any, event: str, _: object) -> Any:
        if frame.f_code is not Letters.look.__code__:
            return None
        if event == "line" and letters.next[0] > MOST:
            sys.settrace(None)
            raise KeyboardInterrupt
        return at_lines

    before = sys.gettrace()
    sys.settrace(at_lines)
    try:
        with pytest.raises(KeyboardInterrupt):
            mc.recv("a", 0, **want)
    finally:
        sys.settrace(before)
    return [mc.recv("a", 0, **want).item() for _ in range(MOST + 2)]


def test_who_is_interrupted_before_it_says_what_it_has_seen(pool4: Any) -> None:
    assert pool4.run(interrupted_before_it_says_so)[1] == [float(i) for i in range(MOST + 2)]


def interrupted_before_the_first() -> float:
    """Whose first letter was interrupted sends the next one all the same."""
    mesh = pair()
    if mesh is None:
        return 0.0
    if mesh.rank == 1:
        return mc.recv("a", 0, shape=(1,), dtype=torch.float32, mesh=mesh, timeout=30).item()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Box, "say_letters", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mc.send(torch.tensor([1.0]), "a", 1, mesh=mesh)
    mc.send(torch.tensor([2.0]), "a", 1, mesh=mesh)
    return 0.0


def test_who_is_interrupted_before_the_first_letter(pool4: Any) -> None:
    assert pool4.run(interrupted_before_the_first)[1] == 2.0


def let_go_of_and_interrupted() -> list[float]:
    """Who is interrupted before it has the Work, whose message comes before that is given up, asks again."""
    mesh = pair()
    if mesh is None:
        return []
    want: Any = {"shape": (5000,), "dtype": torch.float32, "mesh": mesh, "timeout": 30}
    if mesh.rank == 0:
        for value in (1.0, 2.0):
            mc.send(torch.full((5000,), value), "a", 1, mesh=mesh)
        return []

    def lets_go(*given: Any) -> None:
        _handed(*given)
        letters = letters_of(mesh.axis("a").link.mail)
        while letters.asked:
            letters.look()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the Work
        patch.setattr(door, "_handed", lets_go)
        with pytest.raises(KeyboardInterrupt):
            mc.recv("a", 0, shape=(5000,), dtype=torch.float32, mesh=mesh, async_op=True)
    return [value for _ in range(2) for value in mc.recv("a", 0, **want).unique().tolist()]


def test_a_message_that_was_let_go_of_and_is_given_back_is_whole(pool4: Any) -> None:
    for _ in range(3):
        assert pool4.run(let_go_of_and_interrupted)[1] == [1.0, 2.0]


def interrupted_when_it_is_back(seconds: float) -> list[float]:
    """Who is interrupted when the call inside of one with a time-out has given what came."""
    mesh = pair()
    if mesh is None:
        return []
    if mesh.rank == 0:
        time.sleep(seconds)
        for value in (1.0, 2.0):
            mc.send(torch.tensor([value]), "a", 1, mesh=mesh)
        return []
    want: Any = {"shape": (1,), "dtype": torch.float32, "mesh": mesh, "timeout": 10}

    def arrive(frame: Any, event: str, _: Any) -> None:
        outer = frame.f_back
        if event == "return" and frame.f_code is mc.recv.__code__ and outer and outer.f_code is door.aside.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(arrive)
    try:
        with pytest.raises(KeyboardInterrupt):
            mc.recv("a", 0, **want)
    finally:
        sys.setprofile(before)
    return [mc.recv("a", 0, **want).item() for _ in range(2)]


@pytest.mark.parametrize("seconds", [0.0, 2e-3], ids=["soon", "late"])
def test_who_is_interrupted_when_a_call_in_time_is_back(pool4: Any, seconds: float) -> None:
    assert pool4.run(interrupted_when_it_is_back, seconds)[1] == [1.0, 2.0]


def interrupted_before_it_is_told() -> list[Any]:
    """Who is interrupted when all is here, of which one does not fit, asks again: is told, and gets the next one next."""
    mesh = pair()
    if mesh is None:
        return []
    if mesh.rank == 0:
        works = [mc.send(torch.ones(length), "a", 1, mesh=mesh, async_op=True) for length in (2, 3, 2, 2)]
        mc.wait(works)
        return []

    def take() -> list[Tensor]:
        return mc.exchange([], [(0, (2,), torch.float32)] * 3, "a", mesh=mesh, timeout=10)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Posted, "_rests", interrupt)
        with pytest.raises(KeyboardInterrupt):
            take()
    found = [told(take)]
    return [*found, mc.recv("a", 0, shape=(2,), dtype=torch.float32, mesh=mesh, timeout=10).tolist()]


def test_what_does_not_fit_is_told_to_who_asks_again(pool4: Any) -> None:
    said, last = pool4.run(interrupted_before_it_is_told)[1]
    assert "does not fit: index 0 sends f32[3]" in said
    assert last == [1.0, 1.0]


def nothing(*_: Any) -> None: ...


def interrupted_while_it_follows(when: str) -> list[Any]:
    """Who is interrupted in what follows over gloo, and asks again."""
    mesh = pair()
    if mesh is None:
        return []
    if mesh.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Letters, "_lend", nothing)
            patch.setattr(one_message, "_put_lent", nothing)
            works = [mc.send(torch.full((5000,), value), "a", 1, mesh=mesh, async_op=True) for value in (1.0, 2.0)]
        mc.wait(works)
        goes_on(mesh)
        return []

    def take() -> list[float]:
        return mc.recv("a", 0, shape=(5000,), dtype=torch.float32, mesh=mesh).unique().tolist()

    def arrive(frame: Any, event: str, arg: Any) -> None:
        if frame.f_code is Messages._wait.__code__ and event == when and getattr(arg, "__name__", "wait") == "wait":
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(arrive)
    try:
        with pytest.raises(KeyboardInterrupt):
            take()
    finally:
        sys.setprofile(None)
    found = [take(), take()]
    goes_on(mesh)
    return found


def test_who_is_interrupted_while_the_message_follows(pool4: Any) -> None:
    for event in ("call", "c_return"):
        assert pool4.run(interrupted_while_it_follows, event)[1] == [[1.0], [2.0]]


def dies_in_the_middle(folder: str) -> None:
    mesh = mc.make_mesh({"a": 2}, timeout=100.0)
    want: Any = {"shape": (PART,), "dtype": torch.float32, "mesh": mesh}
    for number in range(3):
        if mesh.rank == 1:
            if number < 2:
                mc.recv("a", 0, **want)
                continue
            begin, text = time.monotonic(), told(lambda: mc.recv("a", 0, **want))
            with open(f"{folder}/told", "w") as file:
                file.write(text if time.monotonic() - begin < 30 else "")
            return
        with pytest.MonkeyPatch.context() as patch:
            if number == 2:
                patch.setattr(one_message, "_write", half_and_dead)
            mc.send(torch.ones(PART), "a", 1, mesh=mesh)


def half_and_dead(lent: Any, address: int, nbytes: int) -> None:
    _write(lent, address, nbytes // 2)
    os._exit(7)


def test_who_dies_while_it_writes(tmp_path: Path) -> None:
    with pytest.raises(mc.CommError):
        mc.launch(dies_in_the_middle, 2, args=(str(tmp_path),), runtime="processes")
    assert "index 0 has ended" in (tmp_path / "told").read_text()


# ------------------------------------------------------------------------------------------------- who waits for whom


def asked_for_beforehand() -> None:
    """Who has asked comes to a collective before it waits; who sends comes there when that was taken."""
    mesh = mc.make_mesh({"a": 4})
    me, n = mesh.rank, 4
    want: Any = {"shape": (2000,), "dtype": torch.float32, "mesh": mesh}
    got = mc.recv("a", (me - 1) % n, **want, async_op=True) if me % 2 else None
    if me % 2 == 0:
        mc.send(torch.full((2000,), float(me)), "a", me + 1, mesh=mesh)
    assert mc.all_reduce(torch.ones(1), "a", mesh=mesh).item() == 4
    if got is not None:
        assert got.wait().tolist() == [me - 1.0] * 2000


def far_ahead(count: int = 400) -> None:
    """Far more than anybody takes is sent to two ranks, which come to it when all have met."""
    mesh = mc.make_mesh({"a": 4})
    me, others = mesh.rank, [(mesh.rank + step) % 4 for step in (1, 2)]
    works = [
        mc.send(torch.tensor([i, me]), "a", dst, i % 3, mesh=mesh, async_op=True)
        for i in range(count)
        for dst in others
    ]
    mc.barrier("a", mesh=mesh)
    for src in ((me - 2) % 4, (me - 1) % 4):
        for tag in (2, 0, 1):
            for i in range(tag, count, 3):
                got = mc.recv("a", src, shape=(2,), dtype=torch.int64, tag=tag, mesh=mesh)
                assert got.tolist() == [i, src]
    mc.wait(works)


def by_threads() -> None:
    """Each waits for a message of its own, in another order than they are sent."""
    mesh = pair()
    if mesh is None:
        return
    tags, found = list(range(6)), dict[int, float]()
    if mesh.rank == 0:
        for tag in reversed(tags):
            mc.send(torch.full((50,), float(tag)), "a", 1, tag, mesh=mesh)
        return

    def receive(tag: int) -> None:
        found[tag] = mc.recv("a", 0, shape=(50,), dtype=torch.float32, tag=tag, mesh=mesh).mean().item()

    threads = [threading.Thread(target=receive, args=(tag,)) for tag in tags]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {tag: float(tag) for tag in tags}


def dropped_and_late() -> None:
    """What nobody waits for is taken, and the next one gets the next; a wait that was too short is repeated."""
    mesh = pair()
    if mesh is None:
        return
    want: Any = {"shape": (3,), "dtype": torch.float32, "mesh": mesh}
    if mesh.rank == 0:
        mc.barrier("a", mesh=mesh)
        for number in (1.0, 2.0, 3.0):
            mc.send(torch.full((3,), number), "a", 1, mesh=mesh)
        mc.barrier("a", mesh=mesh)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        mc.recv("a", 0, **want, async_op=True)  # and drops it
        gc.collect()
    got = mc.recv("a", 0, **want, async_op=True)
    assert not got.done()
    with pytest.raises(mc.CommError):
        got.wait(0.05)
    mc.barrier("a", mesh=mesh)
    assert got.wait().tolist() == [2.0] * 3
    assert mc.recv("a", 0, **want).tolist() == [3.0] * 3
    mc.barrier("a", mesh=mesh)


@pytest.mark.parametrize("pool", ["pool4", "gloo4"])
@pytest.mark.parametrize(
    "program", [asked_for_beforehand, far_ahead, by_threads, dropped_and_late], ids=lambda fn: fn.__name__
)
def test_who_waits_for_whom(request: pytest.FixtureRequest, pool: str, program: Callable[[], None]) -> None:
    request.getfixturevalue(pool).run(program)


def unseen(seconds: float) -> float:
    """What is sent while the other one neither waits nor looks is there when it does."""
    mesh = pair()
    if mesh is None:
        return 0.0
    if mesh.rank == 0:
        work = mc.send(torch.ones(3), "a", 1, mesh=mesh, async_op=True)
        assert not work.done()
        work.wait()
        return 0.0
    time.sleep(seconds)
    return mc.recv("a", 0, shape=(3,), dtype=torch.float32, mesh=mesh).sum().item()


def test_a_message_keeps(pool4: Any) -> None:
    assert pool4.run(unseen, 0.3)[1] == 3.0


def too_early() -> float:
    """Whose time is up before anything is sent gets it when it asks again."""
    mesh = pair()
    if mesh is None:
        return 0.0
    want: Any = {"shape": (1,), "dtype": torch.float32, "mesh": mesh}
    if mesh.rank == 1:
        mail = mesh.axis("a").link.mail
        before, mail.timeout = mail.timeout, 0.3
        told(lambda: mc.recv("a", 0, **want))
        mail.timeout = before
        mc.barrier("a", mesh=mesh)
        return mc.recv("a", 0, **want).item()
    mc.barrier("a", mesh=mesh)
    mc.send(torch.full((1,), 5.0), "a", 1, mesh=mesh)
    return 0.0


def test_who_asks_again_gets_it(pool4: Any) -> None:
    assert pool4.run(too_early)[1] == 5.0


# ------------------------------------------------------------------------------------------------- what goes wrong


def interrupted_while_it_copies() -> list[float]:
    """Who is interrupted in the midst of a message reads it again when it waits again, and the next one after it."""
    mesh = pair()
    if mesh is None:
        return []
    if mesh.rank == 0:
        mc.barrier("a", mesh=mesh)
        mc.wait([mc.send(torch.full((40_000,), value), "a", 1, mesh=mesh, async_op=True) for value in (1.0, 2.0)])
        return []
    want: Any = {"shape": (40_000,), "dtype": torch.float32, "mesh": mesh}
    part, times = lending.Segment.part, []

    def stopped(segment: Any, *args: Any) -> Any:
        found = part(segment, *args)
        times.append(1)
        if len(times) == 1:
            raise KeyboardInterrupt
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Letters, "see_to_it", lambda self: None)
        work = mc.recv("a", 0, **want, async_op=True)
        mc.barrier("a", mesh=mesh)
        patch.setattr(lending.Segment, "part", stopped)
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        found = [work.wait(), mc.recv("a", 0, **want)]
    return [y.mean().item() for y in found]


def test_who_is_interrupted_while_it_copies(pool4: Any) -> None:
    assert pool4.run(interrupted_while_it_copies)[1] == [1.0, 2.0]


def interrupted_while_it_waits() -> float:
    """A receive that was interrupted takes nothing: what comes is for the next one."""
    mesh = pair()
    if mesh is None:
        return 0.0
    want: Any = {"shape": (1,), "dtype": torch.float32, "mesh": mesh}
    if mesh.rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Wait, "more", interrupt)
            with pytest.raises(KeyboardInterrupt):
                mc.recv("a", 0, **want)
        mc.barrier("a", mesh=mesh)
        return mc.recv("a", 0, **want).item()
    mc.barrier("a", mesh=mesh)
    mc.send(torch.full((1,), 3.0), "a", 1, mesh=mesh)
    return 0.0


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_who_is_interrupted_while_it_waits(pool4: Any) -> None:
    assert pool4.run(interrupted_while_it_waits)[1] == 3.0


def unreadable() -> int:
    """Of several messages none can be read: each is told, and who has sent them goes on."""
    mesh = pair()
    if mesh is None:
        return 0
    if mesh.rank == 0:
        mc.wait([mc.send(torch.ones(20_000), "a", 1, mesh=mesh, async_op=True) for _ in range(3)])
        return 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mail, "borrow_at", no_memory)
        works = [mc.recv("a", 0, shape=(20_000,), dtype=torch.float32, mesh=mesh, async_op=True) for _ in range(3)]
        return sum("cannot be read" in told(work.wait) for work in works)


def test_none_of_several_can_be_read(pool4: Any) -> None:
    assert pool4.run(unreadable)[1] == 3


def polled_in_a_transform() -> float:
    """What is read because ``done`` was asked has nothing to do with what the caller is in the middle of."""
    mesh = pair()
    if mesh is None:
        return 0.0
    if mesh.rank == 0:
        mc.send(torch.ones(4), "a", 1, mesh=mesh)
        return 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Letters, "see_to_it", lambda self: None)
        work = mc.recv("a", 0, shape=(4,), dtype=torch.float32, mesh=mesh, async_op=True)

        def polling(x: Tensor) -> Tensor:
            while not work.done():
                time.sleep(1e-3)
            return x * x

        torch.func.grad(polling)(torch.tensor(1.0))
    y = work.wait()
    assert type(y) is Tensor
    return y.sum().item()


def test_done_reads_outside_of_transforms(pool4: Any) -> None:
    assert pool4.run(polled_in_a_transform)[1] == 4.0
