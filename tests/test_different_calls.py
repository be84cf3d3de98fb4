"""Ranks that share memory and call different things: each is told once what differs, and the next call is right.

``PAIRS`` are calls of the other ranks, of rank 2, and words that stand in what every rank is told. What may differ
between ranks is in ``ALIKE``.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import meshcomm as mc
from meshcomm import parallel
from meshcomm.runtime.call import Call
from meshcomm.runtime.hooks.ranges import calling
from meshcomm.runtime.transports.shared import differences, lexicon
from meshcomm.runtime.transports.shared.transport import OneHostLink

ODD = 2
MATRIX, I32 = torch.ones(4, 4), torch.int32


class Pair(NamedTuple):
    """Two calls that do not go together."""

    usual: Callable[[int], Any]
    """By the index, of all ranks but one."""
    odd: Callable[[int], Any]
    words: tuple[str, ...]


def ones(*shape: int, **kwargs: Any) -> Tensor:
    return torch.ones(*shape, **kwargs)


def pair(usual: Callable[[int], Any], odd: Callable[[int], Any], *words: str) -> Pair:
    return Pair(usual, odd, words)


def reduced(op: str, *shape: int, **kwargs: Any) -> Callable[[int], Any]:
    """An all_reduce."""
    return lambda r: mc.all_reduce(ones(*shape, **kwargs), "a", op)


def later(name: str, *args: Any, **kwargs: Any) -> Callable[[int], Any]:
    """A call that is waited for later."""
    return lambda r: getattr(mc, name)(*args, async_op=True, **kwargs).wait()


def trained(wrap: Callable[..., Any], grads: str) -> Callable[[int], Any]:
    """One step of a linear layer in an adaptor."""

    def run(r: int) -> None:
        module = torch.nn.Linear(4, 4)
        module = wrap(module, "a", grads=grads) or module
        module(MATRIX).sum().backward()

    return run


def of_two(which: int) -> Callable[[int], Any]:
    """One step of the first or of the second of two modules."""

    def run(r: int) -> None:
        modules = [parallel.data_parallel(torch.nn.Linear(4, 4), "a", grads="sum") for _ in range(2)]
        modules[which](MATRIX).sum().backward()

    return run


SIZES = ((1, 2, 3, 4), (1, 3, 3, 3))
PAIRS: dict[str, Pair] = {
    "reduce ops": pair(reduced("sum", 3), reduced("max", 3), "op='sum'", "'max'"),
    "sum and mean": pair(reduced("sum", 3), reduced("mean", 3), "op='mean'", "same op"),
    "shapes of one size": pair(reduced("sum", 2, 3), reduced("sum", 3, 2), "[2, 3]", "[3, 2]", "same shape"),
    "a dim more": pair(reduced("sum", 4), reduced("sum", 1, 4), "f32[4]", "f32[1, 4]", "same shape"),
    "seven dims": pair(
        reduced("sum", 1, 1, 1, 1, 1, 2, 3), reduced("sum", 1, 1, 1, 1, 1, 3, 2), "1, 2, 3]", "1, 3, 2]"
    ),
    "no elements": pair(reduced("sum", 0, 2), reduced("sum", 2, 0), "f32[0, 2]", "f32[2, 0]"),
    "dtypes of one width": pair(reduced("sum", 3), reduced("sum", 3, dtype=I32), "torch.float32", "torch.int32"),
    "later, reduce ops": pair(later("all_reduce", MATRIX, "a"), later("all_reduce", MATRIX, "a", "min"), "op='min'"),
    "one later, shapes": pair(later("all_reduce", ones(2, 3), "a"), reduced("sum", 3, 2), "f32[3, 2]", "f32[2, 3]"),
    "within a time": pair(
        lambda r: mc.all_reduce(MATRIX, "a", timeout=60), lambda r: mc.all_reduce(MATRIX, "a", "max", timeout=60), "max"
    ),
    "dims of a gather": pair(
        lambda r: mc.all_gather(MATRIX, "a"), lambda r: mc.all_gather(MATRIX, "a", 1), "dim=0", "dim=1", "same dim"
    ),
    "later, dims of a gather": pair(later("all_gather", MATRIX, "a"), later("all_gather", MATRIX, "a", 1), "same dim"),
    "invariant and not": pair(
        lambda r: mc.all_gather(MATRIX, "a"), lambda r: mc.all_gather_invariant(MATRIX, "a"), "all_gather_invariant"
    ),
    "sizes": pair(
        lambda r: mc.all_gather(ones(r + 1), "a", sizes=SIZES[0]),
        lambda r: mc.all_gather(ones(3), "a", sizes=SIZES[1]),
        f"sizes={SIZES[0]}", f"sizes={SIZES[1]}", "same sizes",
    ),
    "sizes and none": pair(
        lambda r: mc.all_gather(ones(2), "a", sizes=(2, 2, 2, 2)), lambda r: mc.all_gather(ones(2), "a"), "same sizes"
    ),
    "lengths": pair(
        lambda r: mc.all_gather(ones(2), "a"), lambda r: mc.all_gather(ones(3), "a"), "pass sizes=[2, 2, 3, 2]"
    ),
    "dims of a reduce_scatter": pair(
        lambda r: mc.reduce_scatter(MATRIX, "a"), lambda r: mc.reduce_scatter(MATRIX, "a", 1), "dim=1", "same dim"
    ),
    "later, ops of a reduce_scatter": pair(
        later("reduce_scatter", MATRIX, "a"), later("reduce_scatter", MATRIX, "a", 0, "max"), "op='max'", "same op"
    ),
    "lengths of a reduce_scatter": pair(
        lambda r: mc.reduce_scatter(ones(4, 2), "a"), lambda r: mc.reduce_scatter(ones(8, 2), "a"),
        "lengths of dim 0: 4 on indices 0, 1, 3, 8 on index 2", "one shape on every rank",
    ),
    "sizes of a reduce_scatter": pair(
        lambda r: mc.reduce_scatter(ones(10), "a", sizes=SIZES[0]),
        lambda r: mc.reduce_scatter(ones(10), "a", sizes=SIZES[1]), "same sizes",
    ),
    "dims of an all_to_all": pair(
        lambda r: mc.all_to_all(MATRIX, "a", 0, 1), lambda r: mc.all_to_all(MATRIX, "a", 1, 0),
        "split_dim=1", "same split_dim, concat_dim",
    ),
    "lengths of an all_to_all": pair(
        lambda r: mc.all_to_all(ones(4, 3), "a", 0, 1), lambda r: mc.all_to_all(ones(8, 3), "a", 0, 1),
        "lengths of dim 0: 4 on indices 0, 1, 3, 8 on index 2", "send_sizes= and recv_sizes=",
    ),
    "lengths of an all_to_all along one dim": pair(
        lambda r: mc.all_to_all(ones(4), "a", 0, 0), lambda r: mc.all_to_all(ones(8), "a", 0, 0),
        "index 0 sends 1 elements to index 2, which expects 2", "lengths of dim 0", "send_sizes= and recv_sizes=",
    ),
    "later, what is sent and expected": pair(
        later("all_to_all", ones(4), "a", 0, 0, [1, 1, 1, 1], [1, 1, 1, 1]),
        later("all_to_all", ones(5), "a", 0, 0, [1, 1, 1, 2], [1, 1, 1, 1]),
        "index 2 sends 2 elements to index 3, which expects 1",
    ),
    "perms": pair(
        lambda r: mc.permute(ones(2), "a", [(0, 1), (1, 2)]), lambda r: mc.permute(ones(2), "a", [(0, 1), (1, 3)]),
        "perm=((0, 1), (1, 2))", "(1, 3)", "same perm",
    ),
    "later, perms": pair(
        later("permute", ones(2), "a", [(0, 1)]), later("permute", ones(2), "a", [(3, 2)]), "((3, 2),)", "same perm"
    ),
    "perms of nobody": pair(
        lambda r: mc.permute(ones(2), "a", []), lambda r: mc.permute(ones(2), "a", [(2, 2)]), "perm=()", "((2, 2),)"
    ),
    "shapes of a permute": pair(
        lambda r: mc.permute(ones(2, 3), "a", [(0, 1), (1, 2)]),
        lambda r: mc.permute(ones(3, 2), "a", [(0, 1), (1, 2)]), "f32[2, 3]", "f32[3, 2]",
    ),
    "offsets": pair(lambda r: mc.shift(ones(2), "a", 1), lambda r: mc.shift(ones(2), "a", -1), "offset=-1"),
    "rings": pair(
        lambda r: mc.shift(ones(2), "a", 1), lambda r: mc.shift(ones(2), "a", 1, False), "wrap=True", "wrap=False"
    ),
    "a shift and a permute": pair(
        lambda r: mc.shift(ones(2), "a", 1), lambda r: mc.permute(ones(2), "a", [(0, 1)]), "shift", "permute"
    ),
    "sources": pair(
        lambda r: mc.broadcast(ones(2), "a", 0), lambda r: mc.broadcast(ones(2), "a", 1), "src=0", "src=1", "same src"
    ),
    "shapes of a broadcast": pair(
        lambda r: mc.broadcast(ones(2, 3), "a", 0), lambda r: mc.broadcast(ones(6), "a", 0), "f32[2, 3]", "f32[6]"
    ),
    "later, shapes of the source": pair(
        later("broadcast", ones(2, 3), "a", ODD), later("broadcast", ones(3, 2), "a", ODD), "f32[2, 3]", "f32[3, 2]"
    ),
    "destinations": pair(
        lambda r: mc.reduce(ones(2), "a", 0), lambda r: mc.reduce(ones(2), "a", 1), "dst=0", "dst=1", "same dst"
    ),
    "ops of a reduce": pair(
        lambda r: mc.reduce(ones(2), "a", 0), lambda r: mc.reduce(ones(2), "a", 0, "max"), "op='max'", "same op"
    ),
    "dims of a gather to one": pair(
        lambda r: mc.gather(MATRIX, "a"), lambda r: mc.gather(MATRIX, "a", 0, 1), "dim=0", "dim=1", "same dim"
    ),
    "later, lengths of a gather to one": pair(
        later("gather", ones(2), "a"), later("gather", ones(3), "a"), "sizes=[2, 2, 3, 2]"
    ),
    "what a scatter is like": pair(
        lambda r: mc.scatter(ones(4, 6) if r == 0 else None, "a", like=ones(1, 6)),
        lambda r: mc.scatter(None, "a", like=ones(1, 2, 3)), "f32[1, 6]", "f32[1, 2, 3]",
    ),
    "keys": pair(
        lambda r: mc.all_reduce({"x": ones(2), "y": ones(3)}, "a"),
        lambda r: mc.all_reduce({"x": ones(2), "z": ones(3)}, "a"), "x['y']", "x['z']", "same leaves of x",
    ),
    "later, keys": pair(
        later("all_gather", {"x": ones(2)}, "a"), later("all_gather", {"y": ones(2)}, "a"), "x['x']", "x['y']"
    ),
    "containers": pair(
        lambda r: mc.all_reduce([ones(2), ones(2)], "a"), lambda r: mc.all_reduce({"x": ones(4)}, "a"), "x[0]", "x['x']"
    ),
    "leaves of a tree": pair(
        lambda r: mc.all_reduce([ones(2), ones(4)], "a"), lambda r: mc.all_reduce([ones(4), ones(2)], "a"),
        "x[0]=", "x[1]=", "f32[4]", "same leaves of x",
    ),
    "a tree and a tensor": pair(reduced("sum", 4), lambda r: mc.all_reduce([ones(2), ones(2)], "a"), "x[0] f32[2]"),
    "dims of a tree": pair(
        lambda r: mc.all_gather([MATRIX], "a"), lambda r: mc.all_gather([MATRIX], "a", 1), "dim=0", "dim=1"
    ),
    "a barrier": pair(lambda r: mc.barrier("a"), reduced("sum", 1), "barrier", "all_reduce f32[1]"),
    "later, a barrier": pair(later("barrier", "a"), later("all_reduce", ones(1), "a"), "barrier", "all_reduce"),
    "layouts": pair(
        lambda r: mc.reshard(MATRIX, "(a x) y -> x (a y)"), lambda r: mc.reshard(MATRIX, "x (a y) -> (a x) y"),
        "all_to_all", "split_dim",
    ),
    "layouts of other steps": pair(
        lambda r: mc.reshard(MATRIX, "(a x) y -> x (a y)"), lambda r: mc.reshard(MATRIX, "(a x) y -> x y"),
        "all_to_all", "all_gather_invariant",
    ),
    "gradients of a data parallel module": pair(
        trained(parallel.data_parallel, "sum"), trained(parallel.data_parallel, "mean"), "op='sum'", "op='mean'"
    ),
    "modules of one size": pair(of_two(0), of_two(1), " of Linear, module ", "same leaves of x"),
    "gradients of a sharded module": pair(
        trained(parallel.fully_shard, "sum"), trained(parallel.fully_shard, "mean"), "op='sum'", "reduce_scatter"
    ),
    "parameters": pair(
        lambda r: mc.all_reduce_params([ones(2)], "a", "sum"),
        lambda r: mc.all_reduce_params([ones(2)], "a", "mean"), "op='mean'",
    ),
    "a seed": pair(lambda r: mc.sync_seed("a"), lambda r: mc.broadcast(ones(1), "a", 0), "torch.int64", "torch.float32"),
    "objects": pair(lambda r: mc.all_gather_object(r, "a"), lambda r: mc.barrier("a"), "exchange of objects", "barrier"),
}  # fmt: skip


def of_pairs(names: list[str]) -> dict[str, list[str]]:
    """What this rank is told of each pair, one after the other on one axis."""
    mesh, found = mc.make_mesh({"a": 4}, timeout=60), dict[str, list[str]]()
    with mc.use_mesh(mesh):
        for name in names:
            usual, odd, _ = PAIRS[name]
            found[name] = []
            # Who waits for nobody in a call is told at the next one.
            for call in (odd if mesh.rank == ODD else usual, lambda r: mc.barrier("a"), lambda r: mc.barrier("a")):
                try:
                    call(mesh.rank)
                except mc.CommError as error:
                    found[name].append(str(error))
            found[name].append(str(mc.all_reduce(torch.arange(3.0) + mesh.rank, "a").tolist()))
    return found


@pytest.fixture(scope="module")
def told(pool4: Any) -> list[dict[str, list[str]]]:
    found: list[dict[str, list[str]]] = pool4.run(of_pairs, list(PAIRS))
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_every_rank_is_told_once_what_differs(told: list[dict[str, list[str]]], name: str) -> None:
    for rank, each in enumerate(told):
        *texts, right = each[name]
        assert len(texts) == 1, (rank, texts)
        for word in PAIRS[name].words:
            assert word in texts[0], texts[0]
        assert f"here (index {rank})" in texts[0] or "which expects" in texts[0], texts[0]
        assert "call different" in texts[0] or "fix: " in texts[0]
        assert right == "[6.0, 10.0, 14.0]"


# ------------------------------------------------------------------------------------ in-process, and under guard

NAMED: dict[str, tuple[Callable[[int], Any], Callable[[int], Any], str]] = {
    "op": (reduced("sum", 3), reduced("max", 3), "op='sum' {usual}, 'max' {odd}"),
    "dim": (
        lambda r: mc.all_gather(MATRIX, "a"), lambda r: mc.all_gather(MATRIX, "a", 1), "dim=0 {usual}, 1 {odd}"
    ),
    "dst": (lambda r: mc.reduce(MATRIX, "a"), lambda r: mc.reduce(MATRIX, "a", 1), "dst=0 {usual}, 1 {odd}"),
    "perm": (
        lambda r: mc.permute(MATRIX, "a", [(0, 1)]), lambda r: mc.permute(MATRIX, "a", [(1, 0)]),
        "perm=((0, 1),) {usual}, ((1, 0),) {odd}",
    ),
    "shape": (reduced("sum", 2, 3), reduced("sum", 3, 2), "shape=[2, 3] {usual}, [3, 2] {odd}"),
    "dtype": (reduced("sum", 3), reduced("sum", 3, dtype=I32), "dtype=torch.float32 {usual}, torch.int32 {odd}"),
    "leaf": (
        lambda r: mc.all_reduce({"w": ones(2), "b": ones(3)}, "a"),
        lambda r: mc.all_reduce({"w": ones(2), "b": ones(3, dtype=I32)}, "a"),
        "x['b']=f32[3] {usual}, i32[3] {odd}",
    ),
    "operation": (reduced("sum", 3), lambda r: mc.all_gather(ones(3), "a"), "all_gather f32[3] (dim=0)"),
}  # fmt: skip


def named_in(name: str) -> str:
    with mc.use_mesh(mc.make_mesh({"a": -1})) as mesh:
        try:
            NAMED[name][mesh.rank == ODD](mesh.rank)
        except mc.CommError as error:
            return str(error)
        return ""


def all_named() -> list[str]:
    texts = []
    for name in NAMED:
        texts.append(named_in(name))
        with mc.use_mesh(mc.make_mesh({"a": -1})):
            mc.barrier("a", timeout=60)
    return texts


@pytest.mark.parametrize("name", NAMED)
def test_in_process_the_argument_is_named_and_both_values(name: str) -> None:
    with pytest.raises(mc.CommError, match="different calls") as caught:
        mc.launch(named_in_process, ranks=4, args=(name,))
    assert NAMED[name][2].format(usual="on ranks 0, 1", odd="on rank 2") in str(caught.value)
    assert "operation=" not in str(caught.value)


def named_in_process(name: str) -> None:
    with mc.use_mesh(mc.make_mesh({"a": -1})) as mesh:
        NAMED[name][mesh.rank == ODD](mesh.rank)


@pytest.mark.parametrize("pool", ["guarded4", "guarded4_at_the_store"])
def test_under_guard_the_argument_is_named_and_both_values(request: pytest.FixtureRequest, pool: str) -> None:
    for rank, texts in enumerate(request.getfixturevalue(pool).run(all_named)):
        for name, text in zip(NAMED, texts, strict=True):
            values = re.split(r" \{\w+\}(?:, )?", NAMED[name][2])
            assert "different calls" in text, (rank, name, text)
            for value in filter(None, values):
                assert value.partition("=")[2] in text.partition("; ")[2] or name == "operation", (rank, name, text)
            assert name == "operation" or f"; {values[0].partition('=')[0]}=" in text, (rank, name, text)


# -------------------------------------------------------------------------------------------------- what may differ


def at_odd(r: int, usual: Any, odd: Any) -> Any:
    return odd if r == ODD else usual


def with_anomaly(r: int) -> Tensor:
    """Gradients take another way where autograd looks for NaN."""
    x = ones(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):  # the order of gradients is learnt in the first pass
            x.grad = None
            with torch.autograd.set_detect_anomaly(r == ODD):
                mc.pvary([x], "a")[0].sum().backward()
    assert x.grad is not None
    return x.grad[:1]


def traced(r: int) -> Tensor:
    with mc.trace() if r == ODD else contextlib.nullcontext():
        mc.gather(ones(1), "a", 1, 0)
        return mc.all_gather(ones(1), "a")


def on_another_line() -> Tensor:
    return mc.all_reduce(ones(1), "a")


ALIKE: dict[str, tuple[Callable[[int], Tensor | None], Any]] = {
    "dims from behind": (lambda r: mc.all_gather(ones(1, 2), "a", at_odd(r, 1, -1)), [[1.0] * 8]),
    "a dim as another int": (
        lambda r: mc.reduce_scatter(ones(4), "a", at_odd(r, 0, torch.tensor(0).numpy()[()])), [4.0]
    ),
    "lengths with sizes": (lambda r: mc.all_gather(ones(r), "a", sizes=at_odd(r, (0, 1, 2, 3), [0, 1, 2, 3])), [1.0] * 6),
    "lengths that are sent": (
        lambda r: mc.all_to_all(ones(r + 4), "a", 0, 0, [r + 1, 1, 1, 1], [1] * 4 if r else [1, 2, 3, 4])[:1], [1.0]
    ),
    "a perm in another order": (
        lambda r: mc.permute(ones(1), "a", at_odd(r, [(0, 1), (1, 0), (2, 3), (3, 2)], ((3, 2), (2, 3), (1, 0), (0, 1)))),
        [1.0],
    ),
    "a dict in another order": (
        lambda r: mc.all_reduce(at_odd(r, {"x": ones(1), "y": ones(2)}, {"y": ones(2), "x": ones(1)}), "a")["x"], [4.0]
    ),
    "a gradient": (lambda r: mc.all_reduce(ones(1, requires_grad=r == ODD), "a").detach(), [4.0]),
    "no gradient": (lambda r: mc.all_gather(ones(1, requires_grad=r != ODD), "a").detach(), [1.0] * 4),
    "later": (
        lambda r: at_odd(r, lambda: mc.all_gather(ones(1), "a"), later("all_gather", ones(1), "a"))(*[r] * (r == ODD)),
        [1.0] * 4,
    ),
    "within a time": (lambda r: mc.all_reduce(ones(1), "a", timeout=at_odd(r, None, 60)), [4.0]),
    "strides": (lambda r: mc.all_reduce(at_odd(r, ones(2, 3), ones(3, 2).T), "a")[0, :1], [4.0]),
    "a scatter": (
        lambda r: mc.scatter(ones(4) if r == 1 else None, "a", 1, like=at_odd(r, None, None)), [1.0]
    ),
    "a trace": (traced, [1.0] * 4),
    "another line": (lambda r: on_another_line() if r == ODD else mc.all_reduce(ones(1), "a"), [4.0]),
    "where autograd looks for NaN": (with_anomaly, [4.0]),
    "vmap over another dim": (
        lambda r: torch.vmap(lambda x: mc.all_reduce(x, "a"), in_dims=at_odd(r, 0, 1))(at_odd(r, ones(2, 3), ones(3, 2)))[
            0, :1
        ],
        [4.0],
    ),
}  # fmt: skip


def of_alike() -> dict[str, Any]:
    mesh, found = mc.make_mesh({"a": 4}, timeout=60), dict[str, Any]()
    with mc.use_mesh(mesh):
        for name, (call, _) in ALIKE.items():
            for _ in range(2):
                y = call(mesh.rank)
                found[name] = None if y is None else y.tolist()
                mc.barrier("a")
    return found


def test_what_may_differ(pool4: Any) -> None:
    want = {name: value for name, (_, value) in ALIKE.items()}
    assert pool4.run(of_alike) == [want] * 4


# ----------------------------------------------------------------------------------------------------------- words


def told_of(usual: Callable[[int], Any], odd: Callable[[int], Any], mesh: mc.Mesh) -> str:
    with mc.use_mesh(mesh), pytest.raises(mc.CommError) as caught:
        (odd if mesh.rank == ODD else usual)(mesh.rank)
    return str(caught.value)


def after_many_others() -> tuple[str, int]:
    """What was called last is known, however many calls there were."""
    mesh = mc.make_mesh({"a": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lexicon, "_MOST", 5)
        patch.setattr(lexicon, "_HALF", 4096)
        for length in range(40):
            mc.all_reduce(ones(length), "a", mesh=mesh)
            mc.all_reduce({f"{length:0100}": ones(length)}, "a", mesh=mesh)
        text = told_of(reduced("sum", 41), reduced("sum", 42), mesh)
    return text, len(lexicon.lexicon().known)


def test_words_after_many_calls(pool4: Any) -> None:
    for text, known in pool4.run(after_many_others):
        assert "index 2 all_reduce f32[42] (op='sum'); indices 0, 1, 3 all_reduce f32[41] (op='sum')" in text
        assert known <= 5


def without_words() -> str:
    """A rank far behind finds what another one has said for itself, in short."""
    mesh = mc.make_mesh({"a": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(differences, "find", lambda words, place, digest: b"")
        return told_of(reduced("sum", 3), reduced("max", 3), mesh)


def test_words_that_are_forgotten(pool4: Any) -> None:
    for text in pool4.run(without_words):
        assert "index 2 all_reduce f32[3] (op='max'); indices 0, 1, 3 all_reduce f32[3] (op='sum')." in text


def without_a_hash() -> str:
    mesh = mc.make_mesh({"a": 4})
    axis = mesh.axis("a")
    assert isinstance(axis.link, OneHostLink)

    def call(value: int) -> Tensor:
        with calling(axis, Call("a call", ([value],), ("rows",), None, axis)):
            return axis.link.all_reduce(ones(2), "sum")

    for _ in range(2):
        assert call(3).tolist() == [4, 4]
    return told_of(lambda r: call(3), lambda r: call(4), mesh)


def test_an_argument_without_a_hash(pool4: Any) -> None:
    for text in pool4.run(without_a_hash):
        assert "a call f32[2] (rows=[4])" in text


def known_after(count: int) -> int:
    mesh = mc.make_mesh({"a": 4})
    before = len(lexicon.lexicon().known)
    for number in range(count):
        mc.all_gather([ones(3) + number, ones(5)], "a", mesh=mesh)
        mc.shift(ones(7), "a", 1 + number % 2, mesh=mesh)
    return len(lexicon.lexicon().known) - before


def test_the_same_calls_are_put_into_words_once(pool4: Any) -> None:
    assert pool4.run(known_after, 10) == [3] * 4


def with_a_barrier() -> list[str]:
    mesh, found = mc.make_mesh({"a": 4}), list[str]()
    for call in (
        lambda: mc.broadcast(ones(2), "a", 3 if mesh.rank == 3 else 0, mesh=mesh),
        lambda: mc.barrier("a", timeout=60, mesh=mesh),
    ):
        try:
            call()
        except mc.CommError as error:
            found.append(str(error))
    assert mc.all_reduce(ones(1), "a", mesh=mesh).item() == 4
    return found


def test_a_barrier_with_a_time_out_tells_what_was_not_compared(pool4: Any) -> None:
    for found in pool4.run(with_a_barrier):
        assert len(found) == 1
        assert "meshcomm.broadcast: the ranks called different things: index 3 broadcast f32[2] (src=3)" in found[0]
