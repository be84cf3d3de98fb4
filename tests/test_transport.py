"""What CPU tensors go through: every collective by every way that it may take, of every size, against the oracle and bit for
bit. On one machine that is shared memory, else gloo's messages.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import seeded
from oracle import Oracle, fold, tree
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import meshcomm as mc
from meshcomm.runtime.process import lending
from meshcomm.runtime.transports import process_group
from meshcomm.runtime.transports.gloo import post
from meshcomm.runtime.transports.protocol import Link
from meshcomm.runtime.transports.shared import transport
from meshcomm.runtime.transports.turns import Channel

Run = Callable[..., list[Any]]

RANKS = {4: [1, 3, 0, 2], 2: [3, 1], 3: [2, 0, 3]}
"""Of the world's four, in an order of their own."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTS = (torch.int16, torch.uint8, torch.int64, torch.uint16)
MOVED = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int16, torch.uint8, torch.bool)
BOOL = (torch.bool,)
REDUCTIONS: dict[str, tuple[torch.dtype, ...]] = {
    "sum": (*FLOATS, *COMPLEX, *INTS),
    "mean": (*FLOATS, *COMPLEX),
    "max": (*FLOATS[:3], *INTS[:2], *BOOL),
    "min": (*FLOATS[1:], *INTS[2:], *BOOL),
    "product": (*FLOATS[:3], *COMPLEX[:1], *INTS[:3]),
    "band": (*INTS[:2], *BOOL),
    "bor": (*INTS[:1], *BOOL),
    "bxor": (*INTS[1:3], *BOOL),
}

WAYS: dict[str, dict[tuple[ModuleType, str], int]] = {
    "shared": {},
    "shared-in-parts": {(transport, "_ONE_STEP"): 0, (lending, "_KEEP"): 2**17},
    "messages": {},
    # The limits are where float32 on four ranks has 16, 32 elements.
    "by-size": {(process_group, "_SMALL"): 256, (process_group, "LARGE"): 512},
    "always-large": {(process_group, "_SMALL"): 0, (process_group, "LARGE"): 0, (process_group, "_KEEP"): 2000},
    "always-small": {(process_group, "_SMALL"): 2**40, (process_group, "LARGE"): 2**40},
    "too-many-ranks": {(process_group, "FEW"): 1},
}
"""Limits of the modules of the runtime, beside those that they have."""

SHARED = ("shared", "shared-in-parts")
LENGTHS = {
    "shared": (0, 1, 5, 33),
    "shared-in-parts": (1, 3, 4, 7, 2049),
    "messages": (5,),
    "by-size": (0, 1, 16, 17, 22, 32, 33, 65),
    "always-large": (4, 7, 2049),
    "always-small": (1, 2049),
    "too-many-ranks": (0, 1, 33),
}


@contextlib.contextmanager
def limits(way: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), value in WAYS[way].items():
            patch.setattr(module, name, value)
        if way not in SHARED:
            for name in PRIMITIVES:
                patch.setattr(transport.OneHostLink, name, getattr(process_group.ProcessLink, name))
        yield


PRIMITIVES = [name for name in vars(transport.OneHostLink) if name in dir(Link) and name[0] != "_"]


class Calls(TorchDispatchMode):
    """Operations of torch's process groups on this thread, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.name().removeprefix("c10d::").rstrip("_"))
        return func(*args, **(kwargs or {}))


def mesh_of(n: int) -> mc.Mesh | None:
    """A mesh on some ranks of the world; None on those that are not in it."""
    mesh = mc.make_mesh({"a": n}, ranks=RANKS[n])
    return mesh if dist.get_rank() in RANKS[n] else None


def bits(x: Tensor) -> bytes:
    return x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(y: Tensor, expected: Tensor, what: str) -> None:
    assert (y.dtype, y.shape) == (expected.dtype, expected.shape), what
    if bits(y) != bits(expected):  # -0.0 is 0.0, and NaN is NaN
        wide = torch.float64 if y.dtype.is_floating_point else y.dtype
        assert_close(y.to(wide), expected.to(wide), rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


# ------------------------------------------------------------------------------------------------------- values


def moved(length: int, dtype: torch.dtype, n: int) -> list[tuple[str, Callable[..., Any], list[Tensor], list[Any]]]:
    """Name, call(x, **options), what each index puts in and what it gets."""
    oracle = Oracle({"a": n})
    xs = [seeded((length,), dtype, index, length) for index in range(n)]
    rows = [seeded((n * length, 2), dtype, index, length) for index in range(n)]
    perm = [(0, 1), (1, 1 if n == 2 else 0)][: 1 if n == 2 else 2]
    whole = torch.cat(xs)
    return [
        ("all_gather", mc.all_gather, xs, oracle.all_gather(xs, "a")),
        (
            "all_to_all",
            functools.partial(mc.all_to_all, split_dim=0, concat_dim=1),
            rows,
            oracle.all_to_all(rows, "a", 0, 1),
        ),
        ("permute", functools.partial(mc.permute, perm=perm), xs, oracle.permute(xs, "a", perm)),
        ("shift", functools.partial(mc.shift, offset=-1), xs, oracle.shift(xs, "a", -1)),
        ("no wrap", functools.partial(mc.shift, wrap=False), xs, oracle.shift(xs, "a", 1, False)),
        ("broadcast", functools.partial(mc.broadcast, src=n - 1), xs, oracle.broadcast(xs, "a", n - 1)),
        ("gather", functools.partial(mc.gather, dst=1), xs, [whole if index == 1 else None for index in range(n)]),
        ("scatter", scatter, rows, [rows[1].chunk(n)[index] if length else rows[1] for index in range(n)]),
    ]


def scatter(x: Tensor, axis: str, mesh: mc.Mesh, **options: Any) -> Any:
    like = x.new_empty((x.shape[0] // mesh.size, *x.shape[1:]))
    return mc.scatter(x if mesh.rank == 1 else None, axis, src=1, like=like, mesh=mesh, **options)


def reduced(op: str, length: int, dtype: torch.dtype, n: int) -> list[tuple[str, Callable[..., Any], Any, list[Any]]]:
    xs = [seeded((length,), dtype, index, length, powers=op == "product") for index in range(n)]
    rows = [seeded((3, n * length), dtype, index, length, powers=op == "product") for index in range(n)]
    total, whole = fold(xs, op), fold(rows, op)
    if dtype.is_floating_point and op in ("max", "min") and length > 2:
        xs[1][2] = total[2] = torch.nan
    pieces = list(whole.tensor_split(n, 1))
    return [
        ("all_reduce", functools.partial(mc.all_reduce, op=op), xs, [total] * n),
        ("reduce_scatter", functools.partial(mc.reduce_scatter, dim=1, op=op), rows, pieces),
        ("reduce", functools.partial(mc.reduce, dst=1, op=op), xs, [total if i == 1 else None for i in range(n)]),
    ]


def agree(tasks: Sequence[Any], mesh: mc.Mesh, what: str) -> None:
    """At once, later, and all of them under way together."""
    begun = []
    for _, call, xs, _ in tasks:
        begun.append(call(xs[mesh.rank].clone(), "a", mesh=mesh, async_op=True))
    for later in (False, True):
        for (name, call, xs, ys), work in zip(tasks, begun, strict=True):
            x = xs[mesh.rank].clone()
            y = work.wait() if later else call(x, "a", mesh=mesh)
            text = f"{name} {what}, {'later' if later else 'at once'}, index {mesh.rank} of {mesh.size}"
            same(x, xs[mesh.rank], f"{text}: the input")
            if ys[mesh.rank] is None:
                assert y is None, text
            else:
                same(y, ys[mesh.rank], text)


def every_value(way: str, n: int) -> None:
    mesh = mesh_of(n)
    if mesh is None:
        return
    with limits(way):
        # Where there are lengths enough the dtypes take turns, but for the one for which the lengths were chosen.
        turns = 8 if len(LENGTHS[way]) > 5 else 5 if len(LENGTHS[way]) > 2 else 2
        for i, length in enumerate(LENGTHS[way], n):
            for dtype in in_turn(MOVED, i, turns):
                agree(moved(length, dtype, n), mesh, f"of {length} {dtype}, {way}")
            for j, (op, dtypes) in enumerate(REDUCTIONS.items()):
                for dtype in in_turn(dtypes, i + j, turns):
                    agree(reduced(op, length, dtype, n), mesh, f"{op} of {length} {dtype}, {way}")


def in_turn(dtypes: Sequence[torch.dtype], number: int, turns: int) -> list[torch.dtype]:
    return [dtype for i, dtype in enumerate(dtypes) if dtype == torch.float32 or i % turns == number % turns]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("way", WAYS)
def test_values_by_every_way(pool4: Any, way: str, n: int) -> None:
    pool4.run(every_value, way, n)


def calls_by_size(n: int) -> dict[str, list[list[str]]]:
    """What the group is asked for, for a small tensor and for a large one."""
    mesh = mesh_of(n)
    found: dict[str, list[list[str]]] = {}
    if mesh is None:
        return found
    mesh.axis("a").link.channel = Channel(0, first=True)  # type: ignore[attr-defined]
    for op in (mc.all_reduce, mc.all_gather):
        found[op.__name__] = []
        for length in (16, 64):
            with limits("by-size"), Calls() as calls:
                op(torch.ones(length), "a", mesh=mesh)
            found[op.__name__].append(sorted(calls.names))
    return found


def test_the_limits_are_those_of_the_library(pool4: Any) -> None:
    """Else the tests above would take one way only."""
    for n, ranks in RANKS.items():
        to_all = sorted(["recv", "send"] * (n - 1))
        expected = {
            "all_reduce": [to_all, to_all] if n == 2 else [["alltoall_base"], ["alltoall_base", *to_all]],
            "all_gather": [to_all, to_all] if n == 2 else [["alltoall_base"], to_all],
        }
        for rank, found in enumerate(pool4.run(calls_by_size, n)):
            assert found == (expected if rank in ranks else {})


# ---------------------------------------------------------------------------------------------------- bit for bit


def drawn(length: int, dtype: torch.dtype, *seed: int) -> Tensor:
    """Numbers whose sums round."""
    generator = torch.Generator().manual_seed(sum((value + 1) * 1009**place for place, value in enumerate(seed)))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x = torch.randn(length, dtype=wide, generator=generator)
    return (x * torch.logspace(-2, 2, max(length, 1))[:length]).to(dtype)


LENGTH = 67
SUMMED = {"sum": (*FLOATS, *COMPLEX), "mean": (*FLOATS, *COMPLEX), "product": FLOATS}


def every_bit(ways: Sequence[str], n: int, turns: int) -> None:
    """All ways and forms of a reduction give the same bits, those of the tree by index; ways take turns over dtypes."""
    mesh = mesh_of(n) if ways else mc.make_mesh({"a": n})
    if mesh is None:
        return
    for i, (op, dtypes) in enumerate(SUMMED.items()):
        for j, dtype in enumerate(dtypes if n == 4 else dtypes[:2]):
            xs = [drawn(n * LENGTH, dtype, index) for index in range(n)]
            expected, x = tree(xs, op), xs[mesh.rank]
            forms: list[Any] = []
            for way in ways[(i + j) % turns :: turns] or ["shared"]:
                with limits(way):
                    for _ in range(2):
                        forms.append(mc.all_reduce(x, "a", op, mesh=mesh))
                        forms.append(mc.all_reduce(x, "a", op, mesh=mesh, async_op=True).wait())
                    pieces = list(x.split([5, n * LENGTH - 30, 25]))
                    for bucket_mb in (25, 1e-4, 1e-9):
                        forms.append(torch.cat(mc.all_reduce(pieces, "a", op, mesh=mesh, bucket_mb=bucket_mb)))
                    mine = mc.reduce_scatter(x, "a", op=op, mesh=mesh)
                    later = mc.reduce_scatter(x, "a", op=op, mesh=mesh, async_op=True).wait()
                    assert bits(mine) == bits(later) == bits(expected.chunk(n)[mesh.rank]), f"{op} {dtype} {way}"
                    # All_reduce is all_gather after reduce_scatter.
                    forms.append(mc.all_gather(mine, "a", mesh=mesh))
                    for dst in range(n if way != "too-many-ranks" else 0):  # which goes in the backend's order
                        y = mc.reduce(x, "a", dst, op, mesh=mesh)
                        forms += [] if y is None else [y]
            for i, form in enumerate(forms):
                assert bits(form) == bits(expected), f"{op} of {dtype}, form {i} on index {mesh.rank}"


@pytest.mark.parametrize(
    ("n", "turns"),
    [(4, 3), *(pytest.param(n, 1, marks=pytest.mark.thorough) for n in (2, 3, 4))],
)
def test_sums_have_the_same_bits_by_every_way(pool4: Any, n: int, turns: int) -> None:
    """Repeated, in buckets, at once, later and in-process: those of the tree by index."""
    pool4.run(every_bit, list(WAYS), n, turns)
    mc.launch(every_bit, ranks=n, args=([], n, 1))


def large_sums(way: str) -> None:
    """Around the library's own limits, three times each, so that the memory that is kept is used again."""
    with limits(way):
        check_large_sums(mc.make_mesh({"a": 4}))


def check_large_sums(mesh: mc.Mesh) -> None:
    for dtype, length in ((torch.float32, 65_535), (torch.float32, 65_537), (torch.bfloat16, 400_003)):
        xs = [drawn(length, dtype, index) for index in range(4)]
        expected, x = tree(xs, "sum"), xs[mesh.rank]
        for _ in range(3):
            first = mc.all_reduce(x, "a", mesh=mesh, async_op=True)
            second = mc.all_reduce(2 * x, "a", mesh=mesh, async_op=True)
            for y, what in ((mc.all_reduce(x, "a", mesh=mesh), "at once"), (first.wait(), "later")):
                assert bits(y) == bits(expected), f"{length} {dtype} {what}"
            assert bits(second.wait() / 2) == bits(expected), f"{length} {dtype} beside another"
            gathered = mc.all_gather(x, "a", mesh=mesh)
            assert bits(gathered) == bits(torch.cat(xs)), f"{length} {dtype} gathered"


@pytest.mark.one_in(2, alike=True)
@pytest.mark.parametrize("way", ["shared", "shared-in-parts", "messages", "too-many-ranks"])
def test_large_tensors(pool4: Any, way: str) -> None:
    pool4.run(large_sums, way)


# --------------------------------------------------------------------------------------------- half and narrow


def half_sums(way: str, n: int) -> None:
    """In half precision 256 + 1 is 256, and 2048 + 1 is 2048; products round at every step too."""
    mesh = mesh_of(n)
    if mesh is None:
        return
    with limits(way):
        for later in (False, True):
            for dtype, big in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
                x = torch.full((9 * n,), big if mesh.rank == 0 else 1.0, dtype=dtype)
                expected = torch.tensor(big + n - 1).to(dtype).item()
                assert expected > big or n == 2
                for y in (
                    done(mc.all_reduce(x, "a", mesh=mesh, async_op=later)),
                    done(mc.reduce_scatter(x, "a", mesh=mesh, async_op=later)),
                    done(mc.reduce(x, "a", mesh=mesh, async_op=later)),
                    done(mc.all_reduce([x, x.clone()], "a", mesh=mesh, async_op=later))[1],
                ):
                    assert y is None or set(y.tolist()) == {expected}, (dtype, way, n, y)
                # 1.25 ** 4 has more digits than bfloat16, and its steps round down.
                x = torch.full((5 * n,), 1.0 + 2.0**-7, dtype=torch.bfloat16)
                y = mc.all_reduce(x, "a", "product", mesh=mesh)
                assert set(y.tolist()) == {torch.tensor((1.0 + 2.0**-7) ** n).bfloat16().item()}


def done(result: Any) -> Any:
    return result.wait() if isinstance(result, mc.Work) else result


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("way", ["shared", "always-large", "always-small"])
def test_halves_are_summed_in_single_precision(pool4: Any, way: str, n: int) -> None:
    pool4.run(half_sums, way, n)


def means(way: str, n: int) -> None:
    mesh = mesh_of(n)
    if mesh is None:
        return
    with limits(way):
        for later in (False, True):
            for values, dtype in (
                ([60000.0] * n, torch.float16),  # the sum is beyond 65504
                ([-60000.0] * n, torch.float16),
                ([1.0] * (n - 1) + [2.0], torch.bfloat16),
                ([complex(index, -2 * index) for index in range(n)], torch.complex64),
                ([complex(0, 1 + index) for index in range(n)], torch.complex128),
            ):
                expected = torch.tensor(sum(values) / n).to(dtype).item()
                x = torch.full((n * 8,), values[mesh.rank], dtype=dtype)
                for y in (
                    done(mc.all_reduce(x, "a", "mean", mesh=mesh, async_op=later)),
                    done(mc.reduce_scatter(x, "a", op="mean", mesh=mesh, async_op=later)),
                    done(mc.reduce(x, "a", n - 1, "mean", mesh=mesh, async_op=later)),
                    done(mc.all_reduce({"x": x}, "a", "mean", mesh=mesh, async_op=later))["x"],
                ):
                    if y is not None:
                        assert_close(y, torch.full_like(y, expected), rtol=1e-6 if dtype.is_complex else 0, atol=0)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("way", ["shared", "always-large", "too-many-ranks"])
def test_means(pool4: Any, way: str, n: int) -> None:
    """Right though the sum of halves is infinite, and for complex numbers."""
    pool4.run(means, way, n)


# --------------------------------------------------------------------------------------------------- messages


def all_kinds(mesh: mc.Mesh, length: int, later: bool, turn: int) -> None:
    """Each collective once; what it gives is known."""
    n, rank = mesh.size, mesh.rank
    x = torch.arange(length, dtype=torch.float64) + 1000 * rank + turn
    xs = [torch.arange(length, dtype=torch.float64) + 1000 * index + turn for index in range(n)]
    rows = [torch.arange(n * length, dtype=torch.float64) * (index + 1) + turn for index in range(n)]
    oracle = Oracle({"a": n})
    tasks = [
        (mc.shift(x, "a", mesh=mesh, async_op=later), xs[rank - 1]),
        (mc.all_reduce(x, "a", mesh=mesh, async_op=later), fold(xs, "sum")),
        (mc.all_gather(x, "a", mesh=mesh, async_op=later), torch.cat(xs)),
        (mc.reduce_scatter(rows[rank], "a", mesh=mesh, async_op=later), fold(rows, "sum").chunk(n)[rank]),
        (mc.all_to_all(rows[rank], "a", 0, 0, mesh=mesh, async_op=later), oracle.all_to_all(rows, "a", 0, 0)[rank]),
        (mc.shift(x, "a", -1, mesh=mesh, async_op=later), xs[(rank + 1) % n]),
        (mc.broadcast(x, "a", 2, mesh=mesh, async_op=later), xs[2]),
        (mc.permute(x, "a", [(0, 1)], mesh=mesh, async_op=later), xs[0] if rank == 1 else 0 * x),
    ]
    order = list(range(len(tasks)))
    for at in order[rank:] + order[:rank]:  # each rank waits in an order of its own
        result, expected = tasks[at]
        same(done(result), expected, f"task {at}, turn {turn}, later {later}")


TAGS = (0, 1, 5, 2**30 - 1)


def message(source: int, destination: int, tag: int, shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, float(100 * source + 10 * destination + tag % 7), dtype=torch.float64)


def beside_messages(way: str, length: int, receive_first: bool) -> None:
    """Between the two ends of users' messages, of the same sizes as the collectives' own, collectives run."""
    mesh = mc.make_mesh({"a": 4})
    after, before = (mesh.rank + 1) % 4, (mesh.rank - 1) % 4

    def receive() -> list[mc.Work[Tensor]]:
        kind = {"shape": (length,), "dtype": torch.float64}
        return [mc.recv("a", before, tag=tag, **kind, mesh=mesh, async_op=True) for tag in reversed(TAGS)]

    def send() -> list[mc.Work[None]]:
        xs = [message(mesh.rank, after, tag, (length,)) for tag in TAGS]
        return [mc.send(x, "a", after, tag, mesh=mesh, async_op=True) for x, tag in zip(xs, TAGS, strict=True)]

    with limits(way) if way else contextlib.nullcontext():
        for turn in range(3):
            first = receive() if receive_first else send()
            for later in (False, True):
                all_kinds(mesh, length, later, turn)
            second = send() if receive_first else receive()
            all_kinds(mesh, length, True, turn)
            got = mc.wait(first if receive_first else second)
            mc.wait(second if receive_first else first)
            for y, tag in zip(got, reversed(TAGS), strict=True):
                same(y, message(before, mesh.rank, tag, (length,)), f"tag {tag} in turn {turn}")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("receive_first", [True, False], ids=["receive-first", "send-first"])
@pytest.mark.parametrize("way", ["shared", "always-large"])
def test_messages_are_not_mixed_up_with_collectives(pool4: Any, way: str, receive_first: bool) -> None:
    for length in (1, 12, 100):
        pool4.run(beside_messages, way, length, receive_first)
        mc.launch(beside_messages, ranks=4, args=("", length, receive_first))


def tags() -> None:
    mesh = mc.make_mesh({"a": 4})
    x = torch.ones(1)
    other = mesh.rank ^ 1
    for tag in (2**30, 2**31 - 1, 2**31, -1, True, 1.0, None):
        with pytest.raises(mc.MeshError, match=r"is not a tag.*\n.*\n  fix: an int from 0 to 2\*\*30 - 1"):
            mc.send(x, "a", other, tag, mesh=mesh)  # type: ignore[arg-type, call-overload]
        with pytest.raises(mc.MeshError, match="is not a tag"):
            mc.recv("a", other, shape=(1,), dtype=x.dtype, tag=tag, mesh=mesh)  # type: ignore[call-overload]
        with pytest.raises(mc.MeshError, match="is not a tag"):
            mc.exchange([(x, other, tag)], [(other, (1,), x.dtype, 0)], "a", mesh=mesh)
        with pytest.raises(mc.MeshError, match="is not a tag"):
            mc.exchange([(x, other, 0)], [(other, (1,), x.dtype, tag)], "a", mesh=mesh)
    (y,) = mc.exchange([(x + mesh.rank, other, 2**30 - 1)], [(other, (1,), x.dtype, 2**30 - 1)], "a", mesh=mesh)
    assert y.item() == 1 + other


def test_a_users_tags_are_below_the_librarys(run4: Run) -> None:
    run4(tags)


def lowest_tag() -> int:
    return int(post.CALLS)


def test_the_librarys_tags_are_above_the_users(pool4: Any) -> None:
    assert pool4.run(lowest_tag) == [2**30] * 4


# ------------------------------------------------------------------------------------------------------ failures

LOST: dict[str, Callable[[mc.Mesh], Any]] = {
    "all_reduce": lambda mesh: mc.all_reduce(torch.ones(3), "a", mesh=mesh),
    "large all_reduce": lambda mesh: mc.all_reduce(torch.ones(400_000), "a", mesh=mesh),
    "all_gather": lambda mesh: mc.all_gather(torch.ones(3), "a", mesh=mesh),
    "large all_gather": lambda mesh: mc.all_gather(torch.ones(400_000), "a", mesh=mesh),
    "reduce_scatter": lambda mesh: mc.reduce_scatter(torch.ones(300_000), "a", mesh=mesh),
    "all_to_all": lambda mesh: mc.all_to_all(torch.ones(3), "a", 0, 0, mesh=mesh),
    "broadcast": lambda mesh: mc.broadcast(torch.ones(3), "a", 0, mesh=mesh),
    "reduce": lambda mesh: mc.reduce(torch.ones(3), "a", mesh.rank, mesh=mesh),
    "permute": lambda mesh: mc.permute(torch.ones(3), "a", [(0, mesh.rank)], mesh=mesh),
    "recv": lambda mesh: mc.recv("a", 0, shape=(3,), dtype=torch.float32, mesh=mesh),
    "barrier": lambda mesh: mc.barrier("a", mesh=mesh),
    "all_reduce later": lambda mesh: mc.all_reduce(torch.ones(3), "a", mesh=mesh, async_op=True).wait(),
    "large all_reduce later": lambda mesh: mc.all_reduce(torch.ones(400_000), "a", mesh=mesh, async_op=True).wait(),
    "large all_gather later": lambda mesh: mc.all_gather(torch.ones(400_000), "a", mesh=mesh, async_op=True).wait(),
    "permute later": lambda mesh: mc.permute(torch.ones(3), "a", [(0, mesh.rank)], mesh=mesh, async_op=True).wait(),
    "recv with a time-out": lambda mesh: mc.recv(
        "a", 0, shape=(3,), dtype=torch.float32, mesh=mesh, async_op=True
    ).wait(30),
}
"""What waits for index 0 in any case."""


def left_alone(folder: str) -> dict[str, str]:
    """Index 0 leaves the group; its peers are told, whatever they are about to do or wait for already."""
    mesh = mc.make_mesh({"a": 3})
    mc.barrier("a", mesh=mesh)
    told = {}
    if mesh.rank == 0:
        time.sleep(0.3)  # the others wait
        mc.shutdown()
        while len(list(Path(folder).iterdir())) < 2:
            time.sleep(0.02)
        return told
    first = mc.recv("a", 0, shape=(3,), dtype=torch.float32, mesh=mesh, async_op=True)
    try:
        for name, call in {"recv begun before": lambda _: first.wait(), **LOST}.items():
            with pytest.raises(mc.CommError) as caught:
                call(mesh)
            told[name] = str(caught.value)
    finally:
        (Path(folder) / str(mesh.rank)).touch()
    return told


def test_a_peer_that_is_gone_is_told(tmp_path: Path) -> None:
    nothing, *told = mc.launch(left_alone, ranks=3, args=(str(tmp_path),), runtime="processes", timeout=280)
    assert nothing == {}
    for texts in told:
        assert texts.keys() == {"recv begun before", *LOST}
        for name, text in texts.items():
            assert "the transport failed" in text, name
            assert "look at the other ranks" in text, name
            assert "of a group of 3" in text, name
