"""send_object and recv_object: what arrives, in which order, and what both sides are told when something cannot go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm as mc
from meshcomm.objects import letters

Run = Callable[..., list[Any]]
EVERYTHING = [
    None,
    7,
    "text",
    b"",
    {"a": [1, (2.5, {3})]},
    10**40,
    "x" * 5000,
    [torch.arange(3), "x" * 2000],
    bytes(1008),
    bytes(900),
]


@pytest.fixture(params=["in-process", "pool4", "gloo4", "guarded4", "guarded4_at_the_store"])
def everywhere(request: pytest.FixtureRequest) -> Run:
    """Four ranks of every kind."""
    if request.param == "in-process":
        return lambda fn, *args: mc.launch(fn, ranks=4, args=args)
    run: Run = request.getfixturevalue(request.param).run
    return run


def across(mesh: mc.Mesh) -> list[Any]:
    """Along an axis, and along both as one."""
    me = mesh.coordinate["a"]
    mc.barrier(("b", "a"), mesh=mesh)  # all that are on an axis set it up together
    for obj in EVERYTHING:
        if me == 0:
            mc.send_object(obj, "a", 1, mesh=mesh)
    found = [mc.recv_object("a", 0, mesh=mesh) for _ in EVERYTHING] if me == 1 else []
    if mesh.rank == 3:
        mc.send_object("from the last", ("b", "a"), 0, mesh=mesh)
    return [*found, mc.recv_object(("b", "a"), 3, mesh=mesh)] if mesh.rank == 0 else found


def all_of_it() -> list[Any]:
    return across(mc.make_mesh({"a": 2, "b": 2}))


def test_every_object_arrives(everywhere: Run) -> None:
    first, second, *others = everywhere(all_of_it)
    assert first == ["from the last"]
    assert second == []
    for found in others:
        assert [len(str(obj)) for obj in found] == [len(str(obj)) for obj in EVERYTHING]
        assert torch.equal(found[7][0], torch.arange(3))
        assert found[:7] == EVERYTHING[:7]


def in_order() -> Any:
    """Letters and tensors between two ranks meet in the order of each tag."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    with mc.use_mesh(mesh):
        if mesh.coordinate["a"] == 0:
            mc.send_object("one", "a", 1)
            mc.send(torch.ones(2), "a", 1)
            mc.send_object("z" * 3000, "a", 1)
            return None
        got = [
            mc.recv_object("a", 0),
            mc.recv("a", 0, shape=(2,), dtype=torch.float32).tolist(),
            mc.recv_object("a", 0),
        ]
        return [got[0], got[1], len(got[2])]


def test_in_order(run4: Run) -> None:
    assert run4(in_order) == [None, None, ["one", [1.0, 1.0], 3000], ["one", [1.0, 1.0], 3000]]


def by_tags() -> Any:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    with mc.use_mesh(mesh):
        if mesh.coordinate["a"] == 0:
            return [mc.send_object(f"tag {tag}", "a", 1, tag) for tag in (1, 2)]
        return [mc.recv_object("a", 0, tag) for tag in (1, 2)]


def test_tags(run4: Run) -> None:
    assert run4(by_tags)[2:] == [["tag 1", "tag 2"]] * 2


def unpicklable() -> str:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    with mc.use_mesh(mesh):
        try:
            if mesh.coordinate["a"] == 0:
                mc.send_object({"x": [threading.Lock()]}, "a", 1)
            else:
                mc.recv_object("a", 0)
        except mc.MeshError as error:
            said = str(error)
        if mesh.coordinate["a"] == 0:
            mc.send_object("next", "a", 1)
        else:
            assert mc.recv_object("a", 0) == "next"
        return said


def test_what_cannot_be_pickled_is_told_to_both(run4: Run) -> None:
    sender, _, receiver, _ = run4(unpicklable)
    assert sender.startswith("meshcomm.send_object: obj['x'][0]")
    assert "lock" in sender
    assert receiver.startswith("meshcomm.recv_object: index 0 had nothing to send: obj['x'][0]")


class Unreadable:
    """Pickles, and cannot be read."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def unreadable() -> str:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    with mc.use_mesh(mesh):
        if mesh.coordinate["a"] == 0:
            mc.send_object(Unreadable(), "a", 1)
            return ""
        with pytest.raises(mc.MeshError) as caught:
            mc.recv_object("a", 0)
        return str(caught.value)


def test_what_cannot_be_read_is_told_to_the_receiver(run4: Run) -> None:
    assert "recv_object: what came cannot be unpickled here: ValueError: invalid literal for int" in run4(unreadable)[2]


def test_a_large_one_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "_CHUNK", 1000)
    sent = {"x": torch.arange(5000), "y": "z" * 3001}

    def main() -> Any:
        mesh = mc.make_mesh({"a": 2})
        return mc.send_object(sent, "a", 1, mesh=mesh) if mesh.rank == 0 else mc.recv_object("a", 0, mesh=mesh)

    with mc.trace() as trace:
        _, found = mc.launch(main, ranks=2)
    assert torch.equal(found["x"], sent["x"])
    assert found["y"] == sent["y"]
    assert trace.count("send_object") > 40
    assert trace.count("recv_object") == trace.count("send_object")


def test_a_tensor_in_place_of_a_letter_is_an_error() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"a": 2})
        if mesh.rank == 0:
            mc.send(torch.ones(2), "a", 1, mesh=mesh)
        else:
            mc.recv_object("a", 0, mesh=mesh)

    with pytest.raises(mc.CommError, match=r"recv_object|u8\[1024\]"):
        mc.launch(main, ranks=2)


def test_nobody_sends() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"a": 2})
        if mesh.rank == 1:
            mc.recv_object("a", 0, mesh=mesh)

    with pytest.raises(mc.CommError, match="recv_object"):
        mc.launch(main, ranks=2)


def test_under_transforms_and_a_checker() -> None:
    def main() -> Any:
        mesh = mc.make_mesh({"a": 2})

        def sent(x: Tensor) -> Tensor:
            if mesh.own_index() == 0:
                mc.send_object({"w": 2}, "a", 1, mesh=mesh)
            else:
                assert mc.recv_object("a", 0, mesh=mesh) == {"w": 2}
            return x * x

        with mc.check_vma(True, mesh=mesh):
            return torch.func.grad(sent)(torch.tensor(3.0))

    assert mc.launch(main, ranks=2) == [torch.tensor(6.0)] * 2
