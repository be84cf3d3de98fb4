"""How many functions of ours a small call runs: in shared memory and between ranks of one process each costs as much as a small copy."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshcomm as mc

WAITS = {
    "look", "more", "at", "listen", "sleep", "ring", "wait_for_all", "gone_among", "is_read", "is_unread", "_wait_for",
    "is_gone", "why_given_up", "why", "state", "give_way",
}  # fmt: skip
"""What is called as often as it takes until the others have come."""


def counted(call: Callable[[], object], where: str = "/meshcomm/runtime/") -> Counter[str]:
    """The functions of the runtime, or in all files with this in their path, that it runs, but for those that wait."""
    seen: Counter[str] = Counter()

    def look(frame: Any, event: str, _: object) -> None:
        if event == "call" and where in frame.f_code.co_filename.replace("\\", "/"):
            seen[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return Counter({name: count for name, count in seen.items() if name not in WAITS})


def functions_of(name: str) -> Counter[str]:
    mesh = mc.make_mesh({"pair": 2, "a": 2})
    x = torch.ones(16)
    call = {
        "all_reduce": lambda: mc.all_reduce(x, "a", mesh=mesh),
        "all_gather": lambda: mc.all_gather(x, "a", mesh=mesh),
        "reduce_scatter": lambda: mc.reduce_scatter(x, "a", mesh=mesh),
        "all_to_all": lambda: mc.all_to_all(x, "a", 0, 0, mesh=mesh),
        "shift": lambda: mc.shift(x, "a", mesh=mesh),
        "permute": lambda: mc.permute(x, "a", [(0, 1), (1, 0)], mesh=mesh),
        "reduce": lambda: mc.reduce(x, "a", mesh=mesh),
        "gather": lambda: mc.gather(x, "a", mesh=mesh),
        "scatter": lambda: mc.scatter(x if mesh.coordinate["a"] == 0 else None, "a", like=x[:8], mesh=mesh),
    }[name]
    found = []
    for _ in range(16):  # it is known from the third on, and what the others lend is mapped
        mc.barrier("a", mesh=mesh)  # who reads nothing runs ahead, as far as there are places to lend
        found.append(counted(call))
    return min(found, key=lambda seen: seen.total())


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("all_reduce", 6),
        ("all_gather", 5),
        ("reduce_scatter", 6),
        ("all_to_all", 5),
        ("shift", 6),
        ("permute", 6),
        ("reduce", 13),
        ("gather", 14),
        ("scatter", 14),
    ],
)
def test_a_small_call_runs_few_functions(pool4: Any, name: str, most: int) -> None:
    for seen in pool4.run(functions_of, name):
        assert seen.total() <= most, seen


def functions_of_a_message(length: int) -> Counter[str]:
    mesh = mc.make_mesh({"pair": 2, "a": 2})
    x, index = torch.ones(length), mesh.coordinate["a"]

    def call() -> None:
        if index == 0:
            mc.send(x, "a", 1, mesh=mesh)
        else:
            mc.recv("a", 0, shape=x.shape, dtype=x.dtype, mesh=mesh)

    return min((counted(call) for _ in range(12)), key=lambda seen: seen.total())


@pytest.mark.parametrize(("length", "most"), [(16, 7), (5000, 14), (300_000, 17)])
def test_a_message_runs_few_functions(pool4: Any, length: int, most: int) -> None:
    for seen in pool4.run(functions_of_a_message, length):
        assert seen.total() <= most, seen


def functions_in_process(name: str) -> Counter[str]:
    mesh = mc.make_mesh({"a": 8})
    x, w = torch.ones(16), torch.ones(16, requires_grad=True)
    call = {
        "all_reduce": lambda: mc.all_reduce(x, "a", mesh=mesh),
        "all_gather": lambda: mc.all_gather(x, "a", mesh=mesh),
        "later": lambda: mc.all_reduce(x, "a", mesh=mesh, async_op=True).wait(),
        "barrier": lambda: mc.barrier("a", mesh=mesh),
        "requires grad": lambda: mc.all_reduce(w, "a", mesh=mesh),
        "and backward": lambda: torch.autograd.grad(mc.all_reduce(w, "a", mesh=mesh), w, x),
    }[name]
    return min([counted(call, "/meshcomm/") for _ in range(16)][2:], key=lambda seen: seen.total())


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("all_reduce", 15),
        ("all_gather", 23),
        ("later", 30),
        ("barrier", 23),
        ("requires grad", 16),
        ("and backward", 24),
    ],
)
def test_a_call_of_ranks_of_one_process_runs_few_functions(name: str, most: int) -> None:
    for seen in mc.launch(functions_in_process, ranks=8, args=(name,)):
        assert seen.total() <= most, seen


def added_by_a_trace() -> int:
    """How many functions of ours more one small call runs while a trace is open."""
    mesh, x = mc.make_mesh({"pair": 2, "a": 2}), torch.ones(16)

    def call() -> object:
        return mc.all_reduce(x, "a", mesh=mesh)

    call()
    off = min(counted(call, "/meshcomm/").total() for _ in range(12))
    with mc.trace():
        call()
        return min(counted(call, "/meshcomm/").total() for _ in range(12)) - off


def test_a_trace_adds_few_functions_to_a_call(pool4: Any) -> None:
    """Its own are five: one for the link, three for the beginning, the end."""
    assert max(pool4.run(added_by_a_trace)) <= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 2), (0, 2), (2, 0)])
def test_what_is_gathered_has_the_shape_and_the_rows_of_all(
    pool4: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    pool4.run(gathered, dtype, shape)


def gathered(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """At once and later, also of what lies transposed; its own storage, whose memory is nobody else's."""
    mesh = mc.make_mesh({"a": 4})
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)).mul(3).to(dtype) for rank in range(4)]
    for whole, mine in (
        (parts, parts[mesh.rank]),
        ([p.mT.contiguous().mT for p in parts] if len(shape) > 1 else parts, None),
    ):
        x = whole[mesh.rank] if mine is None else mine
        before = x.clone()
        for y in (mc.all_gather(x, "a", mesh=mesh), mc.all_gather(x, "a", mesh=mesh, async_op=True).wait()):
            torch.testing.assert_close(y, torch.cat(whole), rtol=0, atol=0)
            assert y.is_contiguous()
            assert y.untyped_storage().nbytes() == y.nbytes
            y.zero_()
        assert torch.equal(x, before)
