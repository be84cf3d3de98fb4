"""Ctrl-C at each place of a call through shared memory at which Python sees to it: between two calls of functions."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc
from meshcomm.runtime.process import lending
from meshcomm.runtime.transports.shared import waiting
from meshcomm.runtime.transports.shared.messages import letters

WHERE = ("/transports/shared/", "/process/lending.py", "/process/boxes.py")


def differently(call: Callable[[], Any]) -> Any:
    """One that the other rank does not make, which both are told."""
    try:
        return call()
    except mc.CommError as error:
        assert "the ranks called different things" in str(error)  # noqa: PT017
        return None


Kind = Callable[[Tensor, mc.Mesh, bool], Any]
CALLS: dict[str, Kind] = {
    "at once": lambda x, mesh, _: mc.all_reduce(x, "a", mesh=mesh),
    "of int16": lambda x, mesh, _: mc.all_to_all(x.to(torch.int16), "a", 0, 0, mesh=mesh),
    "later": lambda x, mesh, _: mc.all_reduce(x, "a", mesh=mesh, async_op=True).wait(),
    "moved later": lambda x, mesh, _: mc.all_to_all(x, "a", 0, 0, mesh=mesh, async_op=True).wait(),
    "lengths": lambda x, mesh, _: mc.all_to_all(x, "a", 0, 0, [8, 8], [8, 8], mesh=mesh),
    "given": lambda x, mesh, _: mc.broadcast(x, "a", 0, mesh=mesh, async_op=True).wait(),
    "got": lambda x, mesh, _: mc.broadcast(x, "a", 1, mesh=mesh, async_op=True).wait(),
    "exact": lambda x, mesh, _: mc.all_reduce(x, "a", exact=True, mesh=mesh),
    "barrier": lambda x, mesh, _: mc.barrier("a", mesh=mesh),
    "sent": lambda x, mesh, first: (
        mc.send(x, "a", 1, mesh=mesh, async_op=True).wait()
        if first
        else mc.recv("a", 0, shape=(16,), dtype=x.dtype, mesh=mesh)
    ),
    "other": lambda x, mesh, first: differently(
        lambda: mc.all_reduce(x, "a", mesh=mesh) if first else mc.all_gather(x, "a", mesh=mesh)
    ),
    "other later": lambda x, mesh, first: differently(
        lambda: (mc.all_reduce if first else mc.all_gather)(x, "a", mesh=mesh, async_op=True).wait()
    ),
}


@contextlib.contextmanager
def interrupted_at(place: int) -> Iterator[list[int]]:
    """Ctrl-C at this one of the places where a function in there begins, or has called one of Python's or torch's;
    how many there were.
    """
    seen, before = [0], sys.getprofile()

    def look(frame: Any, event: str, _: object) -> None:
        if event in ("call", "c_return") and any(where in frame.f_code.co_filename for where in WHERE):
            seen[0] += 1
            if seen[0] == place and frame.f_code.co_name not in ("__del__", "is_over"):  # there it goes unheard
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(before)


def is_at_rest(mesh: mc.Mesh) -> None:
    """Nothing is open, and all that was lent is back."""
    for _ in range(3):
        mc.barrier("a", mesh=mesh)
    mail = mesh.axis("a").link.mail  # type: ignore[attr-defined]
    assert not mail.open
    assert not mail.dropped
    assert not mail.lock.locked()
    assert all(segment.is_free() for segment in (*lending.room._small, *lending.room._segments))


def posted(mail: Any) -> int:
    """How many calls and messages the others have heard of."""
    return int(mail.number + (sum(mail.letters.numbers) if mail.letters else 0))


def everywhere(name: str) -> None:
    """Who is interrupted has made the call, or nobody has heard of it; and the next ones are as before."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    first, mail = mesh.coordinate["a"] == 0, mesh.axis("a").link.mail  # type: ignore[attr-defined]
    x, call = torch.arange(16.0) + mesh.rank, CALLS[name]
    expected = [call(x, mesh, first) for _ in range(4)][-1]
    place, is_over = 0, False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lending, "room", lending.Room())
        patch.setattr(letters, "room", lending.room)
        patch.setattr(waiting, "AWAKE", 60.0)  # on a busy machine, too, as few places as can be
        gc.disable()  # what is kept by a circle is kept for as long as a program likes
        try:
            while not is_over:
                place, number, seen = place + 1, posted(mail), [0]
                if first:
                    with contextlib.suppress(KeyboardInterrupt), interrupted_at(place) as seen:
                        call(x, mesh, first)
                if not first or (seen[0] >= place and posted(mail) == number):
                    call(x, mesh, first)
                is_over = bool(mc.broadcast(torch.tensor(float(seen[0] < place)), "a", 0, mesh=mesh))
                y = call(x, mesh, first)
                assert y is expected or torch.equal(y, expected)
                is_at_rest(mesh)
        finally:
            gc.enable()
    assert place > 15


@pytest.mark.parametrize("name", CALLS)
def test_who_is_interrupted_anywhere_loses_nothing(pool4: Any, name: str) -> None:
    pool4.run(everywhere, name)


def while_it_begins() -> None:
    """Who is interrupted while the mailbox is made that others look into already finds that one."""
    place, is_over, agreed = 0, False, mc.make_mesh({"a": 2, "b": 2})
    first = agreed.coordinate["a"] == 0
    while not is_over:
        place, seen = place + 1, [0]
        mesh = mc.make_mesh({"a": 2, "b": 2})
        link = mesh.axis("a").link
        if first:
            with contextlib.suppress(KeyboardInterrupt), interrupted_at(place) as seen:
                link.mail  # type: ignore[attr-defined]  # noqa: B018
            mc.barrier("a", mesh=agreed)
        else:
            link.mail.box(0)  # type: ignore[attr-defined]
            mc.barrier("a", mesh=agreed)
            link.mail.box(0)  # type: ignore[attr-defined]  # what it finds it keeps
        mc.barrier("a", mesh=agreed)
        assert mc.all_reduce(torch.ones(3), "a", mesh=mesh).tolist() == [2.0] * 3
        is_over = bool(mc.broadcast(torch.tensor(float(seen[0] < place)), "a", 0, mesh=agreed))
    assert place > 5


def test_who_is_interrupted_while_its_mailbox_is_made(pool4: Any) -> None:
    pool4.run(while_it_begins)
