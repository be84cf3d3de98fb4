"""Pytrees of all kinds of containers and leaves: what comes back is the tree that was given, each leaf a tensor of its own, and derivatives
of every kind go through."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import meshcomm as mc

Pair = namedtuple("Pair", "first second")
RANKS = 2


class Named(Tensor):
    """A subclass that torch's functions keep."""


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape) / 7).to(dtype)


def side_by_side() -> list[Tensor]:
    return [part.view(2, -1) for part in leaf(24).split([4, 12, 8])]


TREES: dict[str, Callable[[], Any]] = {
    "one": lambda: [leaf(3)],
    "none": lambda: {"a": [], "b": ()},
    "shapes": lambda: [leaf(3), leaf(), leaf(0, 2), leaf(2, 3).t(), leaf(1).expand(4), leaf(2, 2)[:, :1]],
    "dtypes": lambda: (leaf(2), leaf(3, dtype=torch.bfloat16), leaf(2, dtype=torch.int64), leaf(2, 2), leaf(1, dtype=torch.complex64).conj()),
    "keys": lambda: {"b": leaf(2), "a": {3: leaf(1), 1: leaf(2)}, "10": leaf(3), "9": [leaf(1), (leaf(2),)]},
    "mixed keys": lambda: {2: leaf(2), "a": leaf(1), (1, 2): leaf(3), None: leaf(1)},
    "torch's own": lambda: {"z": Pair(leaf(2), leaf(1)), "a": OrderedDict(y=leaf(3), x=leaf(2))},
    "parameters": lambda: [Parameter(leaf(2, 2)), leaf(3), Parameter(leaf(1))],
    "side by side": side_by_side,
    "one after the other, not all": lambda: [side_by_side()[0], *side_by_side()[1:]],
    "the same twice": lambda: [x := leaf(3), x, {"again": x}],
    "subclass": lambda: [leaf(2), leaf(3).as_subclass(Named)],
    "many": lambda: {f"k{i}": leaf(1 + i % 4) for i in range(60)},
}  # fmt: skip


def leaves_of(tree: Any) -> list[Tensor]:
    return pytree.tree_leaves(tree)


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("name", TREES)
def test_what_comes_back_is_the_tree_of_the_leaves(name: str, later: bool) -> None:
    def main() -> None:
        mesh = mc.make_mesh({"x": RANKS})
        tree = pytree.tree_map(lambda x: x, TREES[name]())
        scaled = pytree.tree_map(lambda x: x, tree)
        before = [x.detach().clone() for x in leaves_of(tree)]
        for call in (
            lambda x, **k: mc.all_reduce(x, "x", mesh=mesh, **k),
            lambda x, **k: mc.broadcast(x, "x", src=1, mesh=mesh, **k),
            lambda x, **k: mc.shift(x, "x", mesh=mesh, **k),
        ):
            result = call(scaled, async_op=True).wait() if later else call(scaled)
            assert pytree.tree_structure(result) == pytree.tree_structure(tree)
            if isinstance(tree, dict):
                assert list(result) == list(tree)
            found = leaves_of(result)
            for y, x in zip(found, leaves_of(tree), strict=True):
                alone = call(x)
                assert (y.shape, y.dtype, y.requires_grad) == (x.shape, x.dtype, x.requires_grad)
                assert_close(y.detach(), alone.detach(), rtol=0, atol=0)
            with torch.no_grad():
                for i, y in enumerate(found):
                    others = [z.detach().clone() for j, z in enumerate(found) if j != i]
                    y.detach().zero_()
                    rest = [z for j, z in enumerate(found) if j != i]
                    assert all(torch.equal(z, other) for z, other in zip(rest, others, strict=True)), (
                        f"{i} is another's"
                    )
        for x, old in zip(leaves_of(tree), before, strict=True):
            assert torch.equal(x, old)

    mc.launch(main, ranks=RANKS)


class Name(str):
    """A key that equals a str."""


def test_keys_come_back_as_they_were() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"x": RANKS})
        for keys in (("b", "a"), (Name("b"), "a"), (1, 0), (True, 0), (1.0, False), ("a", "b"), ("b", "a")):
            tree = {key: leaf(2) + at for at, key in enumerate(keys)}
            found = mc.broadcast([tree, {"outer": tree, "less": leaf(1)}], "x", mesh=mesh)
            for again in (found[0], found[1]["outer"]):
                assert [(type(key), key) for key in again] == [(type(key), key) for key in keys]
                assert all(torch.equal(again[key], tree[key]) for key in keys)

    mc.launch(main, ranks=RANKS)


def test_a_change_in_place_of_one_leaf_is_no_business_of_the_others() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"x": RANKS})
        weight = torch.ones(3, requires_grad=True)
        first, second = mc.all_reduce([leaf(3), leaf(2)], "x", mesh=mesh)
        kept = second.sin().sum()
        first.mul_(weight)
        assert first.requires_grad
        assert not second.requires_grad
        assert second._version == 0
        first.sum().backward()
        assert_close(weight.grad, 2 * leaf(3))
        xs = [leaf(3).requires_grad_(), leaf(2).requires_grad_()]
        first, second = mc.all_reduce(xs, "x", mesh=mesh)
        kept = (second**2).sum()
        first.mul_(2)
        (kept + first.sum()).backward()
        assert_close(xs[0].grad, torch.full((3,), 2.0))
        assert_close(xs[1].grad, 2 * second.detach())

    mc.launch(main, ranks=RANKS)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "product"])
@pytest.mark.parametrize("lie", [False, True], ids=["apart", "side by side"])
def test_derivatives_are_those_of_the_leaves(op: str, lie: bool) -> None:
    def main() -> None:
        mesh = mc.make_mesh({"x": RANKS})
        given = side_by_side() if lie else [leaf(3), leaf(2, 2).t(), leaf(0), leaf()]
        given = [x * (1 + mesh.rank) for x in given] if not lie else given

        def loss(ys: list[Tensor]) -> Tensor:
            return torch.stack([(y.sin() * (1 + i)).sum() for i, y in enumerate(ys)]).sum()

        def tree(*xs: Tensor) -> Tensor:
            return loss(mc.all_reduce(list(xs), "x", op, mesh=mesh))

        def alone(*xs: Tensor) -> Tensor:
            return loss([mc.all_reduce(x, "x", op, mesh=mesh) for x in xs])

        found = []
        for fn in (tree, alone):
            xs = [x.detach().requires_grad_() for x in given]
            first = torch.autograd.grad(fn(*xs), xs, create_graph=True)
            second = torch.autograd.grad(loss(list(first)), xs, allow_unused=True, materialize_grads=True)
            by_func = torch.func.grad(fn)(*given)
            found.append([*first, *second, by_func])
        for mine, theirs in zip(*found, strict=True):
            assert_close(mine, theirs)

    mc.launch(main, ranks=RANKS)


ROWS: dict[str, Callable[..., Any]] = {
    "all_gather": lambda x, dim, mesh, **k: mc.all_gather(x, "x", dim, mesh=mesh, **k),
    "all_gather_invariant": lambda x, dim, mesh, **k: mc.all_gather_invariant(x, "x", dim, mesh=mesh, **k),
    "reduce_scatter": lambda x, dim, mesh, **k: mc.reduce_scatter(x, "x", dim, mesh=mesh, **k),
    "reduce_scatter, max": lambda x, dim, mesh, **k: mc.reduce_scatter(x, "x", dim, "max", mesh=mesh, **k),
    "all_to_all": lambda x, dim, mesh, **k: mc.all_to_all(x, "x", dim, dim, mesh=mesh, **k),
    "all_to_all, of two dims": lambda x, dim, mesh, **k: mc.all_to_all(x, "x", dim, -1 - dim, mesh=mesh, **k),
    "shard": lambda x, dim, mesh, **k: mc.shard(x, "x", dim, mesh=mesh, **k),
}  # fmt: skip
CUT: dict[str, Callable[[], list[Tensor]]] = {
    "plain": lambda: [leaf(4), leaf(2, 4), leaf(6, 2, 2)],
    "strided": lambda: [leaf(4, 2).t(), leaf(8)[::2], leaf(1, 2).expand(2, 2), leaf(2, 2)],
    "one empty": lambda: [leaf(4), leaf(2, 0), leaf(0), leaf(2, 2)],
    "side by side": lambda: list(leaf(24).view(12, 2).split([2, 6, 4])),
    "dtypes": lambda: [leaf(4, dtype=d) for d in (torch.float32, torch.bfloat16, torch.int64, torch.float32, torch.bfloat16, torch.int64)],
    "complex and bool": lambda: [leaf(4, dtype=torch.complex64).conj(), leaf(2, 2, dtype=torch.complex64), leaf(4) > 0.3, leaf(2, 2) > 0],
}  # fmt: skip


def can(name: str, x: Tensor) -> bool:
    return not (name.startswith("reduce") and (x.dtype == torch.bool or (x.is_complex() and "max" in name)))


@pytest.mark.parametrize("how", ["now", "later", "inference", "one rank"])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_those_of_the_leaves(name: str, dim: int, how: str) -> None:
    def main() -> None:
        mesh = mc.make_mesh({"x": 1 if how == "one rank" else RANKS})
        for what, make in CUT.items():
            given = [x if x.dtype == torch.bool else x * (1 + mesh.rank) for x in make() if can(name, x)]
            if what == "side by side":
                given = make()
            before = [x.clone() for x in given]
            found = (
                ROWS[name](given, dim, mesh, async_op=True).wait() if how == "later" else ROWS[name](given, dim, mesh)
            )
            alone = [ROWS[name](x, dim, mesh) for x in given]
            for i, (y, one) in enumerate(zip(found, alone, strict=True)):
                assert (y.shape, y.dtype) == (one.shape, one.dtype), (what, i)
                assert torch.equal(y, one), (what, i)
            for i, y in enumerate(found):  # nor is one the memory of another, or of what was given
                y.zero_()
                assert all(torch.equal(z, one) for z, one in zip(found[i + 1 :], alone[i + 1 :], strict=True)), what
            assert all(torch.equal(x, old) for x, old in zip(given, before, strict=True)), what

    with torch.inference_mode(how == "inference"):
        mc.launch(main, ranks=1 if how == "one rank" else RANKS)


@pytest.mark.parametrize("which", ["plain", "strided", "one empty", "side by side"])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", ROWS)
def test_derivatives_of_rows_are_those_of_the_leaves(name: str, dim: int, which: str) -> None:
    def main() -> None:
        mesh = mc.make_mesh({"x": RANKS})
        given = [*CUT[which](), leaf(4)] if which == "side by side" else [x * (1 + mesh.rank) for x in CUT[which]()]

        def loss(ys: list[Tensor]) -> Tensor:
            return torch.stack([(y.sin() * (1 + i)).sum() for i, y in enumerate(ys)]).sum()

        def tree(*xs: Tensor) -> Tensor:
            return loss(ROWS[name](list(xs), dim, mesh))

        def alone(*xs: Tensor) -> Tensor:
            return loss([ROWS[name](x, dim, mesh) for x in xs])

        found = []
        for fn in (tree, alone):
            xs = [x.detach().requires_grad_(i != 1) for i, x in enumerate(given)]
            of = [x for x in xs if x.requires_grad]
            first = torch.autograd.grad(fn(*xs), of, create_graph=True)
            second = torch.autograd.grad(loss(list(first)), of, allow_unused=True, materialize_grads=True)
            tangent = torch.func.jvp(fn, tuple(given), tuple(x.cos() for x in given))[1]
            batch = torch.func.vmap(fn)(*(torch.stack([x, x * 2]) for x in given))
            found.append([*first, *second, *torch.func.grad(fn, (0, 1))(*given), tangent, batch])
            ys = ROWS[name](xs, dim, mesh) if fn is tree else [ROWS[name](x, dim, mesh) for x in xs]
            assert [y.requires_grad for y in ys] == [x.requires_grad for x in xs]
        for mine, theirs in zip(*found, strict=True):
            assert_close(mine, theirs)

    mc.launch(main, ranks=RANKS)


def test_gradients_of_a_batch_of_cotangents() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"x": RANKS})
        xs = [leaf(3).requires_grad_(), leaf(2, 2).requires_grad_()]
        ys = mc.all_reduce(xs, "x", mesh=mesh)
        batch = [torch.randn(5, *y.shape, generator=torch.Generator().manual_seed(0)) for y in ys]
        together = torch.autograd.grad(ys, xs, batch, is_grads_batched=True, retain_graph=True)
        for i in range(5):
            one = torch.autograd.grad(ys, xs, [b[i] for b in batch], retain_graph=True)
            for mine, theirs in zip(together, one, strict=True):
                assert_close(mine[i], theirs)

    mc.launch(main, ranks=RANKS)


def test_gradients_have_memory_of_their_own() -> None:
    def main() -> None:
        mesh = mc.make_mesh({"x": RANKS})
        xs = [leaf(3).requires_grad_(), leaf(2).requires_grad_(), leaf(2)]
        ys = mc.all_reduce(xs, "x", mesh=mesh)
        whole = torch.ones(5)
        torch.autograd.backward(ys[:2], [whole[:3], whole[3:]])
        for x in xs[:2]:
            assert x.grad is not None
            x.grad.zero_()
        assert torch.equal(whole, torch.ones(5))
        assert not ys[2].requires_grad

    mc.launch(main, ranks=RANKS)


def test_what_has_leaked_out_of_a_transform() -> None:
    mesh, kept = mc.make_mesh({"x": 1}), list[Tensor]()
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(torch.ones(2))
    first, _ = mc.all_reduce([*kept, leaf(1)], "x", mesh=mesh)
    assert first.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("tree", [[leaf(2), 3], {"a": leaf(1), "b": None}, [leaf(2), [leaf(1).to_sparse()]], ["text"]])
def test_what_is_no_tensor_is_named_by_its_path(tree: Any) -> None:
    mesh = mc.make_mesh({"x": 1})
    path = (
        r"x\[1\]\[0\]"
        if isinstance(tree, list) and isinstance(tree[-1], list)
        else r"x\['b'\]"
        if isinstance(tree, dict)
        else r"x\[\d\]"
    )
    with pytest.raises(mc.MeshError, match=rf"leaf: {path}"):
        mc.all_reduce(tree, "x", mesh=mesh)


def test_a_tree_that_contains_itself() -> None:
    tree: list[Any] = [leaf(1)]
    tree.append(tree)
    with pytest.raises(mc.MeshError, match="contains itself"):
        mc.all_reduce(tree, "x", mesh=mc.make_mesh({"x": 1}))


def test_of_a_tree_without_leaves_nothing_is_said() -> None:
    """Nor kept: what is given beside it may have no hash."""

    def main() -> None:
        mesh = mc.make_mesh({"a": 2})
        for tree in ([], {}, ((), {"b": []})):
            assert mc.shard(tree, "a", torch.tensor(0).numpy(), mesh=mesh) == tree
            assert mc.all_reduce(tree, "a", mesh=mesh) == tree

    mc.launch(main, ranks=2)


LATER: dict[str, Callable[[list[Tensor], Any, bool], Any]] = {
    "all_reduce": lambda xs, mesh, later: mc.all_reduce(xs, "a", mesh=mesh, async_op=later),
    "the largest": lambda xs, mesh, later: mc.all_reduce(xs, "a", "max", mesh=mesh, async_op=later),
    "all_gather": lambda xs, mesh, later: mc.all_gather(xs, "a", mesh=mesh, async_op=later),
    "all_gather of dim 1": lambda xs, mesh, later: mc.all_gather(xs, "a", 1, mesh=mesh, async_op=later),
    "reduce_scatter": lambda xs, mesh, later: mc.reduce_scatter(xs, "a", mesh=mesh, async_op=later),
    "all_to_all": lambda xs, mesh, later: mc.all_to_all(xs, "a", 0, 1, mesh=mesh, async_op=later),
    "shift": lambda xs, mesh, later: mc.shift(xs, "a", mesh=mesh, async_op=later),
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", LATER)
def test_what_is_given_may_be_resized_before_the_wait(name: str, needs_grad: bool) -> None:
    """Where the values of a tree end and begin is as it was when they were given."""

    def leaves() -> list[Tensor]:
        made = [torch.arange(8.0).view(2, 4), -torch.arange(4.0).view(4, 1), torch.ones(2, 3)]
        return [x.clone().requires_grad_(needs_grad).clone() for x in made]

    def main() -> None:
        mesh = mc.make_mesh({"a": 2})
        expected, given = LATER[name](leaves(), mesh, False), leaves()
        work = LATER[name](given, mesh, True)
        for x in given:
            x.detach_().resize_(1).zero_()
        assert all(map(torch.equal, work.wait(), expected))

    mc.launch(main, ranks=2)


SOME: dict[str, Callable[[Any, mc.Mesh], Any]] = {
    "all_gather": lambda xs, mesh: mc.all_gather(xs, "a", mesh=mesh),
    "all_to_all of other dims": lambda xs, mesh: mc.all_to_all(xs, "a", 0, 1, mesh=mesh),
    "shift, later": lambda xs, mesh: mc.shift(xs, "a", mesh=mesh, async_op=True).wait(),
    "shard": lambda xs, mesh: mc.shard(xs, "a", mesh=mesh),
    "pvary": lambda xs, mesh: mc.pvary(xs, "a", mesh=mesh),
}


def gradients_of_some(name: str, needs: Callable[[int, int], bool]) -> list[Tensor | None]:
    """Of the leaves, where ``needs(leaf, rank)``, of one call with all of them."""
    mesh = mc.make_mesh({"a": 4})
    xs = {at: torch.full((4, 4), at + 1.0).requires_grad_(needs(at, mesh.rank)) for at in range(3)}
    given = {"b": [xs[0], {"c": xs[1]}], "a": xs[2], "n": torch.arange(16).view(4, 4)}
    ys = [y for y in leaves_of(SOME[name](given, mesh)) if y.is_floating_point()]
    sum(((1 + mesh.rank) * y.square()).sum() for y in ys).backward()  # type: ignore[union-attr]
    return [x.grad for x in xs.values()]


def one_each(at: int, rank: int) -> bool:
    return at == rank % 2


def none_of_one(at: int, rank: int) -> bool:
    return at < 2 or rank > 0


def all_of_all(at: int, rank: int) -> bool:
    return True


@pytest.mark.parametrize("needs", [one_each, none_of_one])
@pytest.mark.parametrize("name", SOME)
def test_leaves_that_need_gradients_on_some_ranks_are_refused(name: str, needs: Callable[[int, int], bool]) -> None:
    """As a single tensor is, though the tree as a whole needs a gradient on every rank."""
    with pytest.raises(mc.CommError, match=r"requires_grad=False|leaves \[.*\] of a tree"):
        mc.launch(gradients_of_some, ranks=4, args=(name, needs))


def refused_on_each() -> None:
    with pytest.raises(mc.CommError, match="requires_grad=False"):
        gradients_of_some("all_gather", none_of_one)


def test_leaves_that_need_gradients_on_some_ranks_are_refused_on_processes(pool4: Any) -> None:
    pool4.run(refused_on_each)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all of other dims", "shard"])
def test_leaves_that_need_gradients_on_some_ranks_where_nobody_compares(gloo4: Any, name: str) -> None:
    """All ranks take part in the gradient of each leaf."""
    expected = gloo4.run(gradients_of_some, name, all_of_all)
    for rank, (found, right) in enumerate(zip(gloo4.run(gradients_of_some, name, one_each), expected, strict=True)):
        for at, (mine, whole) in enumerate(zip(found, right, strict=True)):
            assert (mine is not None) == one_each(at, rank)
            assert mine is None or torch.equal(mine, whole)
