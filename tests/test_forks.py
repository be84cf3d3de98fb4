"""A process that was forked from a rank: every call is refused there at once, by name, and the rank goes on."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import meshcomm as mc

POOLS = ["pool4", "gloo4", "guarded4", "guarded4_at_the_store"]
X = torch.ones(3)
WANT: Any = {"shape": (3,), "dtype": torch.float32}

CALLS: dict[str, Callable[[mc.Mesh, Any], Any]] = {
    "all_reduce": lambda mesh, _: mc.all_reduce(X, "a", mesh=mesh),
    "large": lambda mesh, _: mc.all_reduce(torch.ones(200_000), "a", mesh=mesh),
    "tree": lambda mesh, _: mc.all_gather({"x": X, "y": X}, "a", mesh=mesh),
    "later": lambda mesh, _: mc.all_reduce(X, "a", mesh=mesh, async_op=True).wait(),
    "within": lambda mesh, _: mc.all_to_all(torch.ones(4), "a", 0, 0, mesh=mesh, timeout=1),
    "the parent's work": lambda _, work: work.wait(),
    "is it done": lambda _, work: work.done(),
    "send": lambda mesh, _: mc.send(X, "a", (mesh.rank + 1) % 4, mesh=mesh),
    "recv": lambda mesh, _: mc.recv("a", (mesh.rank + 1) % 4, **WANT, mesh=mesh, async_op=True).wait(),
    "shift": lambda mesh, _: mc.shift(X, "a", mesh=mesh),
    "barrier": lambda mesh, _: mc.barrier("a", mesh=mesh),
    "barrier within": lambda mesh, _: mc.barrier("a", timeout=1, mesh=mesh),
    "object": lambda mesh, _: mc.broadcast_object("x", "a", mesh=mesh),
    "backward": lambda mesh, _: mc.all_reduce(torch.ones(2, requires_grad=True), "a", mesh=mesh).sum().backward(),
    "mesh": lambda *_: mc.make_mesh({"a": 4}),
    "tuple": lambda mesh, _: mesh.axis(("a", "b")),
    "init": lambda *_: mc.init(),
    "after shutdown": lambda mesh, _: (mc.shutdown(), mc.all_reduce(X, "a", mesh=mesh)),
}


def refusals(mesh: mc.Mesh, work: Any) -> dict[str, tuple[str, float]]:
    found = {}
    for name, call in CALLS.items():
        began = time.monotonic()
        try:
            text = f"no error: {call(mesh, work)}"
        except mc.MeshError as error:
            text = str(error)
        found[name] = text, time.monotonic() - began
    return found


def in_a_fork(how: str) -> dict[str, tuple[str, float]]:
    mesh = mc.make_mesh({"a": 4, "b": 1})
    assert mc.all_reduce(X, "a", mesh=mesh).tolist() == [4, 4, 4]
    work = mc.all_reduce(X, "a", mesh=mesh, async_op=True)
    out, into = os.pipe()
    if how == "os.fork":
        child = os.fork()
        if child == 0:
            with os.fdopen(into, "wb") as file:
                pickle.dump(refusals(mesh, work), file)
            os._exit(0)
        os.close(into)
    else:

        def target() -> None:
            with os.fdopen(into, "wb") as file:
                pickle.dump(refusals(mesh, work), file)

        process = multiprocessing.get_context("fork").Process(target=target, daemon=True)
        process.start()
        os.close(into)
    with os.fdopen(out, "rb") as file:
        found: dict[str, tuple[str, float]] = pickle.load(file)
    if how == "os.fork":
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    else:
        process.join(30)
        assert process.exitcode == 0
    assert work.wait().tolist() == [4, 4, 4]
    for _ in range(3):
        assert mc.all_reduce(X, "a", mesh=mesh).tolist() == [4, 4, 4]
    mc.barrier("a", timeout=60, mesh=mesh)
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
def test_every_call_is_refused_at_once(request: pytest.FixtureRequest, pool: str, how: str) -> None:
    for rank, found in enumerate(request.getfixturevalue(pool).run(in_a_fork, how)):
        assert found.keys() == CALLS.keys()
        for name, (text, seconds) in found.items():
            assert f"this process is a fork of rank {rank}, and no rank itself." in text, (name, text)
            assert "\n  fix: " in text
            assert seconds < 30, name


class Asking(Dataset[str]):
    """Items that a worker cannot make, for it is no rank."""

    def __init__(self, mesh: mc.Mesh) -> None:
        self.mesh = mesh

    def __len__(self) -> int:
        return 2

    def __getitem__(self, item: int) -> str:
        try:
            return str(mc.all_reduce(X, "a", mesh=self.mesh))
        except mc.MeshError as error:
            return str(error)


def in_a_loader() -> list[str]:
    mesh = mc.make_mesh({"a": 4})
    mc.all_reduce(X, "a", mesh=mesh)
    found = [text for (text,) in DataLoader(Asking(mesh), num_workers=1, multiprocessing_context="fork")]
    assert mc.all_reduce(X, "a", mesh=mesh).tolist() == [4, 4, 4]
    return found


@pytest.mark.parametrize("pool", ["pool4", "gloo4"])
def test_the_workers_of_a_data_loader(request: pytest.FixtureRequest, pool: str) -> None:
    for rank, texts in enumerate(request.getfixturevalue(pool).run(in_a_loader)):
        assert len(texts) == 2
        assert all(f"a fork of rank {rank}" in text for text in texts)


def test_a_fork_of_a_rank_of_this_process() -> None:
    mesh = mc.make_mesh({"a": 2})

    def main() -> str:
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                text = str(mc.all_reduce(X, "a", mesh=mesh))
            except mc.MeshError as error:
                text = str(error)
            with os.fdopen(into, "w") as file:
                file.write(text)
            os._exit(0)
        os.close(into)
        os.waitpid(child, 0)
        with os.fdopen(out) as file:
            found = file.read()
        assert mc.all_reduce(X, "a", mesh=mesh).tolist() == [2, 2, 2]
        return found

    for rank, text in enumerate(mc.launch(main, ranks=2)):
        assert f"this process is a fork of rank {rank}, and no rank itself." in text
