"""To and from one rank: reduce, gather, scatter, send, recv, exchange, barrier."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import seeded
from oracle import Oracle, fold, joined
from torch import Tensor
from torch.testing import assert_close

import meshcomm as mc

Run = Callable[..., list[Any]]
AXES: list[Any] = ["a", "b", ("a", "b"), ("b", "a")]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.int16,
    torch.uint64,
    torch.float8_e5m2,
]


def same(actual: Tensor, expected: Tensor) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if actual.dtype == torch.float8_e5m2:
        actual, expected = actual.view(torch.uint8), expected.contiguous().view(torch.uint8)
    assert_close(actual, expected, rtol=0, atol=0)


def grid() -> tuple[mc.Mesh, Oracle]:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    return mesh, Oracle(mesh.shape)


def group_of(mesh: mc.Mesh, oracle: Oracle, axis: Any) -> tuple[list[int], int]:
    """The ranks along the axis in order, and this rank's index among them."""
    ranks = next(ranks for ranks in oracle.groups(axis) if mesh.rank in ranks)
    return ranks, ranks.index(mesh.rank)


# --------------------------------------------------------------------------------------------------- reduce, gather

REDUCTIONS = [
    ("sum", torch.float64), ("mean", torch.float32), ("max", torch.bfloat16), ("min", torch.int64), ("product", torch.complex64),
    ("sum", torch.int16), ("max", torch.uint64), ("band", torch.int64), ("bor", torch.bool), ("bxor", torch.uint8),
]  # fmt: skip


def reduces(op: str, dtype: torch.dtype) -> None:
    mesh, oracle = grid()
    for axis in AXES:
        ranks, index = group_of(mesh, oracle, axis)
        xs = [seeded((3, 2), torch.int64, rank, 1).abs().to(dtype) for rank in range(4)]
        for dst in range(len(ranks)):
            mine = xs[mesh.rank].clone()
            y = mc.reduce(mine, axis, dst=dst, op=op, mesh=mesh)
            same(mine, xs[mesh.rank])  # torch's own reduce spoils the inputs of the others
            if index != dst:
                assert y is None
                continue
            assert y is not None
            same(y, fold([xs[rank] for rank in ranks], op))
            assert y.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS, ids=str)
def test_reduce(run4: Run, op: str, dtype: torch.dtype) -> None:
    run4(reduces, op, dtype)


def gathers(dtype: torch.dtype) -> None:
    mesh, oracle = grid()
    for axis in AXES:
        ranks, index = group_of(mesh, oracle, axis)
        for shape, dim in (((2, 3), 0), ((2, 3), -1), ((2, 1, 2), 1), ((), 0), ((0, 2), 0)):
            xs = [seeded(shape, torch.int64, rank).to(dtype) for rank in range(4)]
            for dst in (0, len(ranks) - 1):
                y = mc.gather(xs[mesh.rank], axis, dst=dst, dim=dim, mesh=mesh)
                assert (y is None) == (index != dst)
                if y is not None:
                    same(y, joined([xs[rank] for rank in ranks], dim))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather(run4: Run, dtype: torch.dtype) -> None:
    run4(gathers, dtype)


# ---------------------------------------------------------------------------------------------------------- scatter


def scatters(dtype: torch.dtype) -> None:
    mesh, oracle = grid()
    for axis in AXES:
        ranks, index = group_of(mesh, oracle, axis)
        n = len(ranks)
        for shape, dim in (((2 * n, 3), 0), ((3, n), -1), ((2, n, 2), 1), ((n,), 0), ((0, 2 * n), 1)):
            for src in (0, n - 1):
                whole = seeded(shape, torch.int64, ranks[src], 3).to(dtype)
                expected = whole.chunk(n, dim)[index] if whole.numel() else whole.narrow(dim, 0, shape[dim] // n)
                x = whole if index == src else None
                y = mc.scatter(x, axis, src=src, dim=dim, mesh=mesh)
                same(y, expected)
                same(mc.scatter(x, axis, src, dim, like=torch.empty_like(expected), mesh=mesh), expected)
                if x is not None and y.numel():
                    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter(run4: Run, dtype: torch.dtype) -> None:
    run4(scatters, dtype)


def strided() -> None:
    mesh, _ = grid()
    base = torch.arange(24.0).view(4, 6)
    whole = base[:, ::2].t()  # [3, 4]
    y = mc.scatter(whole if mesh.coordinate["a"] == 1 else None, "a", src=1, dim=1, mesh=mesh)
    same(y, whole.chunk(2, 1)[mesh.coordinate["a"]])
    top = mc.gather(whole + mesh.rank, "b", dst=1, dim=1, mesh=mesh)
    if top is not None:
        same(top, torch.cat([whole + mesh.rank - 1, whole + mesh.rank], 1))
    total = mc.reduce(whole, ("a", "b"), dst=3, mesh=mesh)
    if total is not None:
        same(total, whole * 4)


def test_strided_inputs(run4: Run) -> None:
    run4(strided)


def alone() -> None:
    mesh = mc.make_mesh({"a": 1})
    x = torch.arange(4.0)
    for y in (
        mc.reduce(x, "a", mesh=mesh), mc.gather(x, "a", mesh=mesh), mc.scatter(x, "a", mesh=mesh),
        mc.exchange([(x, 0)], [(0, (4,), torch.float32)], "a", mesh=mesh)[0],
    ):  # fmt: skip
        assert y is not None
        same(y, x)
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    mc.barrier("a", mesh=mesh)


def test_on_an_axis_of_one() -> None:
    alone()
    mc.launch(alone, ranks=1)


# --------------------------------------------------------------------------------------------------------- messages


def ring_of_sends(dtype: torch.dtype) -> None:
    """Even indices send first, odd ones receive first."""
    mesh = mc.make_mesh({"a": 4})
    rank, right, left = mesh.rank, (mesh.rank + 1) % 4, (mesh.rank - 1) % 4
    xs = [seeded((2, 3), torch.int64, r).to(dtype) for r in range(4)]

    def receive() -> Tensor:
        return mc.recv("a", left, shape=(2, 3), dtype=dtype, mesh=mesh)

    if rank % 2 == 0:
        mc.send(xs[rank], "a", right, mesh=mesh)
        got = receive()
    else:
        got = receive()
        mc.send(xs[rank], "a", right, mesh=mesh)
    same(got, xs[left])
    got.zero_()  # new storage
    mc.barrier("a", mesh=mesh)
    same(xs[rank], seeded((2, 3), torch.int64, rank).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_send_and_recv(run4: Run, dtype: torch.dtype) -> None:
    run4(ring_of_sends, dtype)


def along_tuples() -> None:
    """Indices along the axis as written, not ranks of the world."""
    mesh, oracle = grid()
    for axis in (("b", "a"), "b", "a"):
        ranks, index = group_of(mesh, oracle, axis)
        last = len(ranks) - 1
        if index == 0:
            mc.send(torch.tensor(mesh.rank), axis, last, mesh=mesh)
        elif index == last:
            got = mc.recv(axis, 0, shape=(), dtype=torch.int64, mesh=mesh)
            assert got.item() == ranks[0]


def test_messages_over_tuples(run4: Run) -> None:
    run4(along_tuples)


def ordered() -> list[float]:
    """Messages of one tag arrive in order."""
    mesh = mc.make_mesh({"a": 4})
    if mesh.rank == 0:
        for value in range(5):
            mc.send(torch.tensor([float(value)]), "a", 3, tag=7, mesh=mesh)
    if mesh.rank == 3:
        return [mc.recv("a", 0, shape=(1,), dtype=torch.float32, tag=7, mesh=mesh).item() for _ in range(5)]
    return []


def test_messages_of_a_tag_keep_their_order(run4: Run) -> None:
    assert run4(ordered) == [[], [], [], [0.0, 1.0, 2.0, 3.0, 4.0]]


def tagged() -> list[float]:
    """In one batch, tags are matched whatever the order in which they are listed."""
    mesh = mc.make_mesh({"a": 4})
    if mesh.rank == 1:
        mc.exchange([(torch.tensor([5.0]), 2, 5), (torch.tensor([6.0]), 2, 6)], [], "a", mesh=mesh)
    if mesh.rank == 2:
        wants = [(1, (1,), torch.float32, 6), (1, (1,), torch.float32, 5)]
        return [x.item() for x in mc.exchange([], wants, "a", mesh=mesh)]
    return []


def test_tags(run4: Run) -> None:
    assert run4(tagged) == [[], [], [6.0, 5.0], []]


def everyone_to_everyone() -> None:
    """Sends listed before receives on all ranks, with messages to oneself, of several shapes and dtypes."""
    mesh = mc.make_mesh({"a": 4})
    rank = mesh.rank

    def message(source: int, target: int) -> Tensor:
        dtype = (torch.float32, torch.int16, torch.bool, torch.complex64)[source]
        return seeded((source + 1, target), torch.int64, source, target).to(dtype)

    sends = [(message(rank, target), target) for target in range(4)]
    wants = [(source, message(source, rank).shape, message(source, rank).dtype) for source in reversed(range(4))]
    got = mc.exchange(sends, wants, "a", mesh=mesh)
    for source, x in zip(reversed(range(4)), got, strict=True):
        same(x, message(source, rank))
    assert got[3 - rank].untyped_storage().data_ptr() != sends[rank][0].untyped_storage().data_ptr() or not rank


def test_exchange(run4: Run) -> None:
    run4(everyone_to_everyone)


def nothing() -> list[Any]:
    mesh = mc.make_mesh({"a": 4})
    return mc.exchange([], [], "a", mesh=mesh)


def test_an_empty_exchange(run4: Run) -> None:
    assert run4(nothing) == [[], [], [], []]


def strided_message() -> None:
    mesh = mc.make_mesh({"a": 4})
    x = torch.arange(6.0).view(2, 3).t()
    other = mesh.rank ^ 1
    (got,) = mc.exchange([(x + mesh.rank, other)], [(other, (3, 2), torch.float32)], "a", mesh=mesh)
    same(got, x + other)


def test_a_strided_message(run4: Run) -> None:
    run4(strided_message)


# ------------------------------------------------------------------------------------------------- gradients refused


def detached() -> None:
    """Without grad mode, and detached, what requires grad passes; results never require grad."""
    mesh = mc.make_mesh({"a": 4})
    x = torch.ones(4, requires_grad=True)
    other = mesh.rank ^ 1
    with torch.no_grad():
        y = mc.reduce(x, "a", mesh=mesh)
        z = mc.gather(x, "a", mesh=mesh)
        s = mc.scatter(x if mesh.rank == 0 else None, "a", mesh=mesh)
        (e,) = mc.exchange([(x, other)], [(other, (4,), torch.float32)], "a", mesh=mesh)
    assert mc.gather(x.detach(), "a", mesh=mesh) is None or mesh.rank == 0
    for result in (y, z, s, e):
        assert result is None or not result.requires_grad
    with pytest.raises(mc.MeshError, match="requires grad"):
        mc.reduce(x, "a", mesh=mesh)
    mc.barrier("a", mesh=mesh)


def test_detached_inputs_pass(run4: Run) -> None:
    run4(detached)


# ------------------------------------------------------------------------------------------- faults of ranks in-process


def both_send_first() -> None:
    mesh = mc.make_mesh({"a": 2})
    mc.send(torch.ones(3), "a", 1 - mesh.rank, tag=4, mesh=mesh)
    mc.recv("a", 1 - mesh.rank, shape=(3,), dtype=torch.float32, tag=4, mesh=mesh)


def test_both_send_first() -> None:
    with pytest.raises(mc.CommError, match=r"deadlock") as caught:
        mc.launch(both_send_first, ranks=2)
    for rank in (0, 1):
        line = rf"rank {rank} waits in send.* to {1 - rank} \(tag 4\) f32\[3\] over 'a' at test_one_rank.py:\d+"
        assert re.search(line, str(caught.value)), caught.value


def wrong_message(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mesh = mc.make_mesh({"a": 2})
    if mesh.rank == 0:
        mc.send(torch.ones(3), "a", 1, mesh=mesh)
    else:
        mc.recv("a", 0, shape=shape, dtype=dtype, mesh=mesh)


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [((4,), torch.float32, r"f32\[4\]"), ((3,), torch.int64, r"i64\[3\]"), ((3, 1), torch.float32, r"f32\[3, 1\]")],
    ids=["shape", "dtype", "dims"],
)
def test_a_message_that_does_not_fit(shape: tuple[int, ...], dtype: torch.dtype, text: str) -> None:
    pattern = (
        r"a message from 0 to 1 does not fit\.\n"
        r"  sent f32\[3\]: rank 0 called send.* at test_one_rank.py:\d+\n"
        rf"  expected {text}: rank 1 called recv.* at test_one_rank.py:\d+"
    )
    with pytest.raises(mc.CommError, match=pattern):
        mc.launch(wrong_message, ranks=2, args=(shape, dtype))


def caught_misfit() -> str:
    mesh = mc.make_mesh({"a": 2})
    try:
        wrong_message((4,), torch.float32)
    except mc.CommError:
        mc.barrier("a", mesh=mesh)
        other = 1 - mesh.rank
        (got,) = mc.exchange([(torch.tensor(mesh.rank), other)], [(other, (), torch.int64)], "a", mesh=mesh)
        return f"got {got.item()}"
    return "nothing noticed"


def test_both_ends_are_told_and_go_on() -> None:
    assert mc.launch(caught_misfit, ranks=2) == ["got 1", "got 0"]


def misfit_in_a_batch(mesh: mc.Mesh) -> None:
    if mesh.rank == 0:
        mc.exchange([(torch.ones(3), 1), (torch.tensor([1.0]), 1, 9)], [(1, (1,), torch.float32, 9)], "a", mesh=mesh)
    else:
        mc.recv("a", 0, shape=(4,), dtype=torch.float32, mesh=mesh)


def both_wait(mesh: mc.Mesh) -> None:
    other = 1 - mesh.rank
    mc.exchange([(torch.tensor([1.0]), other, 9)], [(other, (1,), torch.float32, 8)], "a", mesh=mesh)


def stale(fault: Callable[[mc.Mesh], None]) -> float:
    """What was open in a batch that failed is taken back."""
    mesh = mc.make_mesh({"a": 2})
    with pytest.raises(mc.CommError):
        fault(mesh)
    other = 1 - mesh.rank
    fresh = torch.tensor([5.0 + mesh.rank])
    return mc.exchange([(fresh, other, 9)], [(other, (1,), torch.float32, 9)], "a", mesh=mesh)[0].item()


@pytest.mark.parametrize("fault", [misfit_in_a_batch, both_wait])
def test_a_batch_that_failed_leaves_no_message_behind(fault: Callable[[mc.Mesh], None]) -> None:
    assert mc.launch(stale, ranks=2, args=(fault,)) == [6.0, 5.0]


def never_received() -> None:
    mesh = mc.make_mesh({"a": 3})
    if mesh.rank == 0:
        mc.send(torch.ones(2), "a", 2, mesh=mesh)


def test_a_message_that_nobody_receives() -> None:
    with pytest.raises(mc.CommError, match=r"rank 0 waits in send[\s\S]*rank 1 has returned[\s\S]*rank 2 has returned"):
        mc.launch(never_received, ranks=3)


def scatter_header_mismatch() -> None:
    mesh = mc.make_mesh({"a": 2})
    if mesh.rank == 0:
        mc.scatter(torch.ones(2), "a", like=torch.ones(1), mesh=mesh)
    else:
        mc.scatter(None, "a", mesh=mesh)


def test_like_on_some_ranks_only() -> None:
    with pytest.raises(mc.CommError, match=r"ranks of one axis made different calls[\s\S]*scatter"):
        mc.launch(scatter_header_mismatch, ranks=2)


def arrivals() -> int:
    mesh = mc.make_mesh({"a": 4})
    arrived.append(mesh.rank)
    mc.barrier("a", mesh=mesh)
    return len(arrived)


arrived: list[int] = []


def test_nobody_passes_a_barrier_before_all_have_come() -> None:
    arrived.clear()
    assert mc.launch(arrivals, ranks=4) == [4] * 4


def barriers() -> None:
    mesh, _ = grid()
    for axis in AXES:
        assert mc.barrier(axis, mesh=mesh) is None


def test_barrier_over_every_axis(run4: Run) -> None:
    run4(barriers)
