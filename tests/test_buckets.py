"""Pytrees in buckets: a tree gives bit for bit what its leaves give, in few collectives and without needless copies; the sums
of pvary's gradients overlap with the backward pass."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import meshcomm as mc
from meshcomm import _torch
from meshcomm.runtime.call import told
from meshcomm.runtime.pending import Pending
from meshcomm.runtime.transports.shared.transport import OneHostLink
from meshcomm.runtime.transports.solo import SoloLink

Run = Callable[..., list[Any]]
Loss = Callable[[Any, int], Tensor]

PRIMITIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast")
SIZES = [25, 1e-4, 1e-9]
"""One bucket per dtype; about 100 bytes, so that some leaves go together; every leaf alone."""


# ---------------------------------------------------------------------------------------------------------- watching


class Waited(Pending):
    """A pending result that says when it is waited for."""

    __slots__ = ("_log", "_source")

    def __init__(self, source: Pending, log: list[Any]) -> None:
        self._source, self._log = source, log

    def wait(self, timeout: float | None) -> Any:
        self._log.append("wait")
        return self._source.wait(timeout)

    def done(self) -> bool:
        return self._source.done()

    def abandon(self) -> None:
        self._source.abandon()


@contextlib.contextmanager
def seen_by_the_link(mesh: mc.Mesh, axis: Any, log: list[Any]) -> Iterator[None]:
    """Log this rank's primitives over ``axis``: (name, the tensor), "start" for one that is begun, "wait" for its end."""
    link: Any = mesh.axis(axis).link
    kind = type(link)
    inside = []

    def seen(name: str, said: str) -> Any:
        def call(self: Any, x: Tensor, *args: Any) -> Any:
            if inside:  # a primitive made of another one
                return getattr(kind, name)(self, x, *args)
            inside.append(None)
            try:
                result = getattr(kind, name)(self, x, *args)
            finally:
                inside.pop()
            log.append("start" if told.later and kind is not SoloLink else (said, x))
            return Waited(result, log) if isinstance(result, Pending) else result

        return call

    names = {name: name for name in (*PRIMITIVES, "sum_parts")} | {
        "gather_flat": "all_gather",
        "scatter_flat": "reduce_scatter",
        "swap_flat": "all_to_all",
        "sum_told": "all_reduce",
    }
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(link, OneHostLink):  # its short way makes no primitives
            patch.setattr(link, "_at_once", lambda *_: None)
        patch.setattr(
            link, "__class__", type(kind.__name__, (kind,), {name: seen(name, names[name]) for name in names})
        )
        yield


class Seen(TorchDispatchMode):
    """Counts concatenations and operations of torch's process groups on this thread."""

    joins = 0
    communications = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.joins += func is torch.ops.aten.cat.default
        self.communications += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


HAS_SEQUENCE_NUMBERS = _torch.has_sequence_numbers


@contextlib.contextmanager
def without_sequence_numbers(mesh: mc.Mesh, axis: Any) -> Iterator[None]:
    """A torch whose order of ready nodes cannot be set."""
    _torch.has_sequence_numbers = lambda: False
    try:
        yield
        mc.barrier(axis, mesh=mesh)  # in-process ranks share the patch
    finally:
        _torch.has_sequence_numbers = HAS_SEQUENCE_NUMBERS


# --------------------------------------------------------------------------------------------------- tree and leaves


def bits(x: Tensor) -> bytes:
    dense = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy().tobytes()


def same_bits(actual: Any, expected: Any, what: str) -> None:
    ys, zs = flat_leaves(actual), flat_leaves(expected)
    assert len(ys) == len(zs), what
    for i, (y, z) in enumerate(zip(ys, zs, strict=True)):
        assert (y.dtype, y.shape) == (z.dtype, z.shape), f"{what}: leaf {i}"
        assert bits(y) == bits(z), f"{what}: leaf {i}, {y.dtype}{list(y.shape)}, {(y - z).abs().max()}"


def flat_leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    parts = [tree[key] for key in sorted(tree)] if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in flat_leaves(part)]


def digest(leaves: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(bits(leaf) for leaf in leaves)).hexdigest()


def drawn(shape: tuple[int, ...], dtype: torch.dtype, *seed: int) -> Tensor:
    """Numbers whose sums round."""
    generator = torch.Generator().manual_seed(sum((value + 1) * 1009**place for place, value in enumerate(seed)))
    if dtype == torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-5, 6, shape, generator=generator).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=wide, generator=generator).to(dtype)


FLOATS = (torch.float32, torch.bfloat16, torch.float64)
COMPLEX = (torch.complex64,)
INTS = (torch.int64, torch.int16, torch.uint8)
BOOL = (torch.bool,)
EVERY = (*FLOATS, *COMPLEX, *INTS, *BOOL)

CALLS: dict[str, tuple[str, dict[str, Any], tuple[torch.dtype, ...]]] = {
    "pvary": ("pvary", {}, EVERY),
    "sum": ("all_reduce", {}, (*FLOATS, *COMPLEX, *INTS)),
    "mean": ("all_reduce", {"op": "mean"}, (*FLOATS, *COMPLEX)),
    "max": ("all_reduce", {"op": "max"}, (*FLOATS, *INTS, *BOOL)),
    "min": ("all_reduce", {"op": "min"}, (*FLOATS, *INTS, *BOOL)),
    "product": ("all_reduce", {"op": "product"}, (*FLOATS, *INTS)),
    "product-complex": ("all_reduce", {"op": "product"}, COMPLEX),
    "band": ("all_reduce", {"op": "band"}, (*INTS, *BOOL)),
    "bxor": ("all_reduce", {"op": "bxor"}, (*INTS, *BOOL)),
    "all_gather": ("all_gather", {}, EVERY),
    "all_gather-last": ("all_gather", {"dim": -1}, EVERY),
    "all_gather_invariant": ("all_gather_invariant", {}, EVERY),
    "shard": ("shard", {}, EVERY),
    "scatter-sum": ("reduce_scatter", {}, (*FLOATS, *COMPLEX, *INTS)),
    "scatter-mean": ("reduce_scatter", {"op": "mean"}, (*FLOATS, *COMPLEX)),
    "scatter-max": ("reduce_scatter", {"op": "max"}, (*FLOATS, *INTS, *BOOL)),
    "scatter-product": ("reduce_scatter", {"op": "product"}, FLOATS),
    "scatter-product-complex": ("reduce_scatter", {"op": "product"}, COMPLEX),
    "all_to_all": ("all_to_all", {"split_dim": 0, "concat_dim": -1}, EVERY),
    "permute": ("permute", {"perm": [(0, 1)]}, EVERY),
    "shift": ("shift", {"offset": -1}, EVERY),
    "scan": ("scan", {"op": "max", "exclusive": True}, (*FLOATS, *INTS, *BOOL)),
    "broadcast": ("broadcast", {"src": 1}, EVERY),
}
ANY_SHAPE = ("pvary", "all_reduce", "permute", "shift", "scan", "broadcast")


def mixed_tree(op: str, dtypes: Sequence[torch.dtype], rank: int) -> dict[str, Any]:
    """Leaves of every dtype in turn, so that those of a bucket do not stand together; one of them stands twice."""
    shapes: list[tuple[int, ...]] = [(4, 3), (8,)]
    rows = [[drawn(shape, dtype, rank, i, j) for j, dtype in enumerate(dtypes)] for i, shape in enumerate(shapes)]
    rows.append([drawn((0, 2), dtypes[0], rank), drawn((4, 1, 5), dtypes[0], rank, 5)])
    rows.append([drawn((), dtypes[0], rank, 6), drawn((3,), dtypes[0], rank, 8)] if op in ANY_SHAPE else [])
    strided = drawn((3, 4), dtypes[0], rank, 99).t()
    return {"rows": rows, "again": (rows[0][0], {"strided": strided}), "one": drawn((4, 2), dtypes[-1], rank, 7)}


def differentiated(ys: Sequence[Tensor], xs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """The gradients of those of ``xs`` that have one, for gradients of ``ys`` that no rounding leaves as they are."""
    wanted = list({id(x): x for x in xs if x.requires_grad}.values())
    if not wanted:
        return []
    given = [(y, drawn(tuple(y.shape), y.dtype, seed, i)) for i, y in enumerate(ys) if y.requires_grad]
    return list(torch.autograd.grad([y for y, _ in given], wanted, [g for _, g in given]))


def tree_and_leaves(call: str, axis: Any) -> list[str]:
    """Tree, tree with async_op and leaf by leaf are compared here; what comes of them is told in short."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    name, kwargs, dtypes = CALLS[call]
    function, n = getattr(mc, name), mesh.axis(axis).size
    tree = mixed_tree(name, dtypes, 0 if name in ("pvary", "shard") else mesh.rank)
    leaves = flat_leaves(tree)
    for leaf in leaves:
        leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
    seed = 0 if name in ("all_reduce", "all_gather_invariant", "broadcast") else mesh.rank
    apart = [function(leaf, axis, **kwargs, mesh=mesh) for leaf in leaves]
    gradients = differentiated(apart, leaves, seed)
    for bucket_mb in SIZES if mesh.size > n else SIZES[:2]:
        for later in (False, True) if bucket_mb == SIZES[0] else (mesh.size == n,):
            work = function(tree, axis, **kwargs, mesh=mesh, bucket_mb=bucket_mb, async_op=later)
            result = work.wait() if later else work
            what = f"{call} over {axis!r} with {bucket_mb} MiB, async_op={later}, rank {mesh.rank}"
            same_bits(result, apart, what)
            found = differentiated(flat_leaves(result), leaves, seed)
            if "product" not in call or (n == 2 and "complex" not in call):
                same_bits(found, gradients, f"gradient of {what}")
            else:  # torch's prod over the ranks, and its complex products, are rounded by their place
                for g, expected in zip(found, gradients, strict=True):
                    assert_close(g, expected)
    return [digest(apart), digest(gradients)]


def in_both_runtimes(pool: Any, call: str, axis: Any) -> None:
    here = mc.launch(tree_and_leaves, ranks=4, args=(call, axis))
    there = pool.run(tree_and_leaves, call, axis)
    assert here == there, f"{call}: two runtimes"
    if call in ("sum", "scatter-mean"):
        assert here == mc.launch(tree_and_leaves, ranks=4, args=(call, axis)), f"{call}: two runs"
        assert there == pool.run(tree_and_leaves, call, axis), f"{call}: two runs on processes"


FIRST = {function: call for call, (function, *_) in reversed(CALLS.items())}.values()
"""One call of each function."""


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("axis", [pytest.param("a", marks=pytest.mark.thorough), ("b", "a")], ids=["2", "4"])
def test_a_tree_gives_bit_for_bit_what_its_leaves_give(pool4: Any, axis: Any, first: bool) -> None:
    """In each runtime, every time, and the same in both. Promised on gloo and in-process, where sums are made in a tree
    by index: NCCL may sum a bucket in another order than its leaves."""
    for call in CALLS:
        if (call in FIRST) == first:
            in_both_runtimes(pool4, call, axis)


# -------------------------------------------------------------------------------------------------- without a copy

JOINABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "all_reduce": ("all_reduce", {}),
    "all_reduce-product": ("all_reduce", {"op": "product"}),
    "all_gather": ("all_gather", {}),
    "all_gather_invariant": ("all_gather_invariant", {"dim": -1}),
    "permute": ("permute", {"perm": [(0, 1), (1, 0)]}),
    "shift": ("shift", {}),
    "broadcast": ("broadcast", {"src": 1}),
}
"""The collectives that take a bucket as one row."""


def parted(flat: Tensor) -> dict[str, Any]:
    return {"a": flat[:6].view(2, 3), "b": [flat[6:14], flat[14:15].view(())], "c": (flat[15:25].view(5, 2),)}


def views(flat: Tensor) -> Any:
    """Views of one tensor that requires grad."""
    return parted(flat.requires_grad_())


def owners(flat: Tensor) -> Any:
    """Parameters whose memory is one buffer's."""
    flat.requires_grad_(False)
    return {key: [torch.nn.Parameter(leaf) for leaf in flat_leaves(part)] for key, part in parted(flat).items()}


def moved_in(flat: Tensor) -> Any:
    """Parameters that were made elsewhere and then moved into one buffer: each counts its changes for itself."""
    tree = {}
    for key, part in parted(flat).items():
        tree[key] = [torch.nn.Parameter(torch.empty_like(leaf)) for leaf in flat_leaves(part)]
        for parameter, leaf in zip(tree[key], flat_leaves(part), strict=True):
            parameter.data = leaf
    return tree


def plain_views(flat: Tensor) -> Any:
    return parted(flat)


WAYS_TO_LIE = [plain_views, views, owners, moved_in]


def lying_together(name: str, way: Callable[[Tensor], Any]) -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    op, kwargs = JOINABLE[name]
    function = getattr(mc, op)
    flat = drawn((25,), torch.float32, mesh.rank)
    tree = way(flat)
    before, address = flat.detach().clone(), flat.data_ptr()
    log: list[Any] = []
    with seen_by_the_link(mesh, "a", log), Seen() as seen:
        result = function(tree, "a", **kwargs, mesh=mesh)
    # Where the derivative needs the value there is a copy, so that a change of the buffer does no harm.
    copied = name == "all_reduce-product" and way is not plain_views
    assert seen.joins == copied, f"{name}: copied on the way"
    assert [(x.data_ptr() == address, x.numel()) for _, x in log] == [(not copied, 25)], f"{name}: not the buffer"
    apart = [function(leaf, "a", **kwargs, mesh=mesh) for leaf in flat_leaves(tree)]
    same_bits(result, apart, name)
    same_bits(flat, before, f"{name}: the input")
    assert all(y.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr() for y in flat_leaves(result))
    leaves = flat_leaves(tree)
    found, expected = (differentiated(flat_leaves(ys), leaves, mesh.rank) for ys in (result, apart))
    assert bool(found) == (way is not plain_views)
    same_bits(found, expected, f"{name}: gradient")
    if way is views:
        ys, zs = function(tree, "a", **kwargs, mesh=mesh), [function(x, "a", **kwargs, mesh=mesh) for x in leaves]
        found, expected = (differentiated(flat_leaves(each), [flat], mesh.rank) for each in (ys, zs))
        same_bits(found, expected, f"{name}: gradient of the buffer")


@pytest.mark.parametrize("way", WAYS_TO_LIE, ids=lambda way: way.__name__)
def test_leaves_that_lie_together_go_as_they_lie(run4: Run, way: Callable[[Tensor], Any]) -> None:
    for name in JOINABLE:
        run4(lying_together, name, way)


def lying_on_an_axis_of_one() -> None:
    """Nothing is communicated, and results are still no views of the input."""
    mesh = mc.make_mesh({"a": 4, "one": 1})
    flat = drawn((25,), torch.float32, mesh.rank)
    for name, (op, kwargs) in JOINABLE.items():
        own = {"perm": [(0, 0)]} if op == "permute" else {"src": 0} if op == "broadcast" else kwargs
        for way in (plain_views, owners):
            tree = way(flat)
            for y in flat_leaves(getattr(mc, op)(tree, "one", **own, mesh=mesh)):
                assert y.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr(), name


def test_results_are_new_on_an_axis_of_one_too(run4: Run) -> None:
    run4(lying_on_an_axis_of_one)


def changed_after(way: Callable[[Tensor], Any], op: str, which: int) -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    flat = drawn((25,), torch.float64, mesh.rank)
    tree = way(flat)
    leaves = flat_leaves(tree)
    x = flat if way is views else leaves[which]
    apart = [mc.all_reduce(leaf, "a", op, mesh=mesh) for leaf in leaves]
    (expected,) = torch.autograd.grad(apart[which].square().sum(), x)
    result = flat_leaves(mc.all_reduce(tree, "a", op, mesh=mesh))
    with torch.no_grad():
        leaves[which].mul_(2)
    (found,) = torch.autograd.grad(result[which].square().sum(), x)
    assert torch.equal(found, expected), f"{op} of leaf {which}"


@pytest.mark.parametrize("way", WAYS_TO_LIE[1:], ids=lambda way: way.__name__)
def test_a_later_change_of_a_leaf_does_no_harm(run4: Run, way: Any) -> None:
    """Of leaves that count their changes together, and of leaves that count them each for itself."""
    for op in ("product", "max", "mean"):
        for which in (0, 1, 3):
            run4(changed_after, way, op, which)


def overlapping(flat: Tensor) -> list[Tensor]:
    return [flat[:6], flat[4:10]]


def reversed_order(flat: Tensor) -> list[Tensor]:
    return [flat[6:10], flat[:6]]


def with_a_gap(flat: Tensor) -> list[Tensor]:
    return [flat[:6], flat[7:10]]


def the_same_twice(flat: Tensor) -> list[Tensor]:
    return [flat[:6], flat[:6]]


def other_storages(flat: Tensor) -> list[Tensor]:
    """Side by side in memory, but to torch two storages: a view from one into the other is refused or wrong."""
    array = flat.numpy()
    return [torch.from_numpy(array[:6]), torch.from_numpy(array[6:10])]


def unrelated(flat: Tensor) -> list[Tensor]:
    return [flat[:6].clone(), flat[6:10].clone()]


def not_dense(flat: Tensor) -> list[Tensor]:
    return [flat[:6].view(2, 3).t(), flat[6:10]]


def stepped(flat: Tensor) -> list[Tensor]:
    return [flat[:6], flat[6:12:2]]


def broadened(flat: Tensor) -> list[Tensor]:
    return [flat[:6], flat[6:7].expand(4)]


def of_two_kinds(flat: Tensor) -> list[Tensor]:
    return [flat[:6], flat[6:10].view(torch.int32), flat[10:13]]


def turned_sign(flat: Tensor) -> list[Tensor]:
    """The imaginary part of a conjugate: the minus is still to be done."""
    numbers = torch.view_as_complex(flat[:12].view(6, 2))
    return [numbers[:3].conj(), numbers[3:]]


def a_gradient_in_some(flat: Tensor) -> list[Tensor]:
    """One leaf requires grad and the next one, which lies beside it, does not."""
    return [torch.nn.Parameter(flat[:6]), flat[6:10]]


APART = [
    overlapping, reversed_order, with_a_gap, the_same_twice, other_storages, unrelated, not_dense, stepped, broadened,
    of_two_kinds, turned_sign, a_gradient_in_some,
]  # fmt: skip


def needs_no_gradient(lying: bool) -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    for name, (op, kwargs) in JOINABLE.items():
        flat = drawn((13,), torch.float32, mesh.rank)
        leaves = a_gradient_in_some(flat) if lying else [torch.nn.Parameter(flat[:6]), flat[6:10].clone()]
        result = getattr(mc, op)(leaves, "a", **kwargs, mesh=mesh)
        assert [y.requires_grad for y in result] == [True, False], name


@pytest.mark.parametrize("lying", [True, False], ids=["together", "apart"])
def test_a_leaf_that_needs_no_gradient_gets_a_result_that_needs_none(run4: Run, lying: bool) -> None:
    run4(needs_no_gradient, lying)


def lying_apart(way: Callable[[Tensor], list[Tensor]]) -> None:
    mesh = mc.make_mesh({"a": 2, "b": 2})
    for name, (op, kwargs) in JOINABLE.items():
        if name == "all_reduce-product" and way is turned_sign:
            continue  # see the product of complex above
        for needs in (False, True):
            leaves = way(drawn((13,), torch.float32, mesh.rank))
            for leaf in leaves:
                if needs and (leaf.is_floating_point() or leaf.is_complex()) and way is not a_gradient_in_some:
                    leaf.requires_grad_()
            log: list[Any] = []
            with seen_by_the_link(mesh, "a", log), Seen() as seen:
                result = getattr(mc, op)(leaves, "a", **kwargs, mesh=mesh)
            if way is not a_gradient_in_some:
                assert seen.joins == 1, name
                assert len(log) == len({leaf.dtype for leaf in leaves}), name
            apart = [getattr(mc, op)(leaf, "a", **kwargs, mesh=mesh) for leaf in leaves]
            same_bits(result, apart, f"{name} of {way.__name__}")
            found, expected = (differentiated(ys, leaves, mesh.rank) for ys in (result, apart))
            same_bits(found, expected, f"{name} of {way.__name__}: gradient")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", APART, ids=lambda way: way.__name__)
def test_leaves_that_do_not_lie_together_are_copied_together(run4: Run, way: Callable[[Tensor], list[Tensor]]) -> None:
    run4(lying_apart, way)


def filled_in_other_orders() -> None:
    """Each rank has put the entries of its dicts in an order of its own, which its results keep."""
    mesh = mc.make_mesh({"a": 4})
    for names in (["w", "b", "a"], ["w", 1, ("t", 2)]):
        turned = names[mesh.rank % 3 :] + names[: mesh.rank % 3]
        tree = {"x": {name: torch.full((2,), 10.0 ** names.index(name)) for name in turned}}
        found = mc.all_reduce(tree, "a", mesh=mesh)
        assert list(found["x"]) == turned
        assert {name: y.tolist() for name, y in found["x"].items()} == {
            name: [4 * 10.0**place] * 2 for place, name in enumerate(names)
        }


def test_dicts_that_were_filled_in_other_orders(run4: Run) -> None:
    run4(filled_in_other_orders)


def test_the_first_of_several_wrong_leaves_is_named() -> None:
    mesh, right, wrong = mc.make_mesh({"a": 1}), torch.ones(2), torch.ones(2, dtype=torch.bool)

    def main() -> None:
        with pytest.raises(mc.MeshError, match=r"leaf: x\[1\]$"):
            mc.all_reduce([right, wrong, right, wrong], "a", mesh=mesh)

    mc.launch(main, ranks=1)


# ----------------------------------------------------------------------------------------------- how many collectives


def small_tensors(bucket_mb: float | None) -> dict[str, int]:
    """Primitives of the link for 240 tensors, forward and backward."""
    mesh = mc.make_mesh({"a": 4})
    calls: dict[str, dict[str, Any]] = {"all_reduce": {}, "all_gather": {}, "pvary": {}, "shard": {}}
    if bucket_mb == 25:
        calls |= {"reduce_scatter": {}, "all_to_all": {"split_dim": 0, "concat_dim": 0}, "shift": {}, "broadcast": {}}
    found = {}
    for op, kwargs in calls.items():
        xs = [drawn((4, 1 + i % 5), torch.float32, i).requires_grad_() for i in range(240)]
        function, log = getattr(mc, op), []
        for _ in range(1 + (op == "pvary")):  # the first backward pass of a tree sends its order besides
            log.clear()
            with seen_by_the_link(mesh, "a", log):
                if bucket_mb is None:
                    ys = [function(x, "a", **kwargs, mesh=mesh) for x in xs]
                else:
                    ys = function(xs, "a", **kwargs, mesh=mesh, bucket_mb=bucket_mb)
                forward = len(log)
                torch.autograd.grad([y.sum() for y in ys], xs)
        found[f"{op} forward"] = forward
        found[f"{op} backward"] = len(log) - forward - log.count("wait")
    return found


MOVING = {
    "all_reduce forward", "all_gather forward", "all_gather backward", "reduce_scatter forward", "reduce_scatter backward",
    "all_to_all forward", "all_to_all backward", "shift forward", "shift backward", "broadcast forward", "pvary backward",
    "shard backward",
}  # fmt: skip


@pytest.mark.parametrize(
    ("bucket_mb", "times"), [pytest.param(None, 240, marks=pytest.mark.thorough), (25, 1)], ids=str
)
def test_240_small_tensors_go_in_one_collective(run4: Run, bucket_mb: float | None, times: int) -> None:
    for found in run4(small_tensors, bucket_mb):
        assert found == {name: times if name in MOVING else 0 for name in found}
        assert len(found.keys() & MOVING) > len(found) / 2


def calls_of_the_group(tree: bool) -> list[int]:
    """Entries in this rank's mailbox for an all_reduce of 240 tensors, and for the backward pass of their pvary."""
    mesh = mc.make_mesh({"a": 4})
    link = mesh.axis("a").link
    assert isinstance(link, OneHostLink)
    xs = [drawn((1 + i % 7,), torch.float32, i, mesh.rank).requires_grad_() for i in range(240)]
    before = link.mail.number
    with torch.no_grad():
        mc.all_reduce(xs, "a", mesh=mesh) if tree else [mc.all_reduce(x, "a", mesh=mesh) for x in xs]
    reduced = link.mail.number - before
    for _ in range(2):
        varied = mc.pvary(xs, "a", mesh=mesh) if tree else [mc.pvary(x, "a", mesh=mesh) for x in xs]
        loss = sum((v * mesh.rank).sum() for v in varied)
        before = link.mail.number
        torch.autograd.grad(loss, xs)
    return [reduced, link.mail.number - before]


def test_so_do_the_mailboxes_see_it(pool4: Any) -> None:
    together, apart = pool4.run(calls_of_the_group, True), pool4.run(calls_of_the_group, False)
    assert together == [[1, 1]] * 4
    assert apart == [[240, 240]] * 4


# ------------------------------------------------------------------------------------- pvary: one step, many forms
# A scenario takes the mesh and a function that varies a tree over an axis. It gives the gradients it found and those of the
# same computation without ranks, in float64. Run with several bucket sizes and leaf by leaf, it must find the same bits.

Vary = Callable[..., Any]
Found = "list[Tensor | None]"
PVARY_SIZES = [25, 2.5e-4, 1e-9]  # all layers; one layer (a weight of 200 bytes and its bias of 40); every leaf alone


def layers(count: int = 3, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """A weight and a bias per layer, equal on every rank."""
    shapes = [((5, 5), i) for i in range(count)], [((5,), 100 + i) for i in range(count)]
    weights, biases = ([torch.nn.Parameter(drawn(shape, dtype, seed)) for shape, seed in each] for each in shapes)
    return list(zip(weights, biases, strict=True))


def batch(rank: int, micro: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return drawn((3, 5), dtype, rank, micro, 41)


def mlp(params: Any, rank: int, micro: int = 0, hooks: list[Any] | None = None) -> Tensor:
    """A rank's loss; ``hooks`` gets the number of each layer when its backward begins."""
    h = batch(rank, micro, params[0][0].dtype)
    for i, (w, b) in enumerate(params):
        h = torch.tanh(h @ w + b)
        if hooks is not None:
            h.register_hook(lambda g, i=i: hooks.append(i))
    return (h * h).sum() if not h.is_complex() else (h * h.conj()).real.sum()


def alone(loss: Loss, leaves: Sequence[Tensor], ranks: int = 4) -> list[Tensor | None]:
    """The gradients of the sum of every rank's loss(leaves, rank), computed here without communication."""
    copies = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
    total = torch.stack([loss(copies, rank) for rank in range(ranks)]).sum()
    wanted = [copy for copy in copies if copy.requires_grad]
    found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
    return [next(found) if copy.requires_grad else None for copy in copies]


def paired(leaves: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(leaves[::2], leaves[1::2], strict=True))


def grads(leaves: Sequence[Tensor]) -> list[Tensor | None]:
    return [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


def plainly(mesh: mc.Mesh, vary: Vary) -> Any:
    params = layers()
    leaves = flat_leaves(params)
    mlp(vary(params, "all"), mesh.rank).backward()
    return grads(leaves), alone(lambda copies, rank: mlp(paired(copies), rank), leaves)


def accumulated(mesh: mc.Mesh, vary: Vary) -> Any:
    """Over micro-steps, twice: what an earlier step left is neither lost nor counted again."""
    params = layers()
    leaves = flat_leaves(params)
    found, expected = [], []
    for step in range(2):
        for leaf in leaves:
            leaf.grad = None
        for micro in range(3):
            mlp(vary(params, "all"), mesh.rank, 3 * step + micro).backward()

        def loss(copies: Any, rank: int, step: int = step) -> Tensor:
            return torch.stack([mlp(paired(copies), rank, 3 * step + micro) for micro in range(3)]).sum()

        found += grads(leaves)
        expected += alone(loss, leaves)
    return found, expected


def varied_once_for_micro_steps(mesh: mc.Mesh, vary: Vary) -> Any:
    """One pvary, several losses on it, each with a backward of its own."""
    params = layers()
    leaves = flat_leaves(params)
    varied = vary(params, "all")
    for micro in range(3):
        mlp(varied, mesh.rank, micro).backward(retain_graph=micro < 2)

    def loss(copies: Any, rank: int) -> Tensor:
        return torch.stack([mlp(paired(copies), rank, micro) for micro in range(3)]).sum()

    return grads(leaves), alone(loss, leaves)


def unused_everywhere(mesh: mc.Mesh, vary: Vary) -> Any:
    """A parameter that no rank uses gets no gradient, and keeps the one that it has."""
    params = layers(4)
    leaves = flat_leaves(params)
    leaves[3].grad = torch.full_like(leaves[3], 7.0)
    varied = vary(params, "all")
    used = [varied[0], (varied[1][0], torch.zeros(5, dtype=torch.float64)), varied[3]]
    mlp(used, mesh.rank).backward()
    found = grads(leaves)
    assert found[4] is None
    assert found[5] is None

    def loss(copies: Any, rank: int) -> Tensor:
        mine = paired(copies)
        return mlp([mine[0], (mine[1][0], torch.zeros(5, dtype=torch.float64)), mine[3]], rank)

    expected = alone(loss, leaves)
    expected[3] = leaves[3].grad
    asked = torch.autograd.grad(mlp([vary(params, "all")[0]], mesh.rank), leaves, allow_unused=True)
    return [*found, *asked], [*expected, *alone(lambda copies, rank: mlp([paired(copies)[0]], rank), leaves)]


def shared(mesh: mc.Mesh, vary: Vary) -> Any:
    """A parameter twice in the tree, and used beside it where all ranks do the same."""
    (w, b), (other, _) = layers(2)
    tree = [(w, b), (other, b), (w, b)]
    torch.autograd.backward([mlp(vary(tree, "all"), mesh.rank), (w**3).sum() + (w @ other).sum()])

    def loss(copies: Any, rank: int) -> Tensor:
        w, b, other = copies
        together = (w**3).sum() + (w @ other).sum() if rank == 0 else 0
        return mlp([(w, b), (other, b), (w, b)], rank) + together

    return grads([w, b, other]), alone(loss, [w, b, other])


def frozen(mesh: mc.Mesh, vary: Vary) -> Any:
    """Leaves that are not trained stand between those that are."""
    params = layers()
    leaves = flat_leaves(params)
    for i in (0, 3, 4):
        leaves[i].requires_grad_(False)
    varied = vary(params, "all")
    for x, y in zip(leaves, flat_leaves(varied), strict=True):
        assert x.data_ptr() == y.data_ptr()
        assert x.requires_grad == y.requires_grad
    mlp(varied, mesh.rank).backward()
    return grads(leaves), alone(lambda copies, rank: mlp(paired(copies), rank), leaves)


def made_of_leaves(mesh: mc.Mesh, vary: Vary) -> Any:
    """What is varied has a graph of its own: transposed, scaled, cast, tied, cut."""
    params = layers()
    leaves = flat_leaves(params)

    def made(leaves: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        (w0, b0), (w1, b1), (w2, b2) = paired(leaves)
        both = w1 @ w2.t()
        return [(w0.t(), b0 * 2), (both, b1.clone()), (both + w0, torch.cat([b2[1:], b0[:1]]))]

    mlp(vary(made(leaves), "all"), mesh.rank).backward()
    return grads(leaves), alone(lambda copies, rank: mlp(made(copies), rank), leaves)


def over_two_axes(mesh: mc.Mesh, vary: Vary) -> Any:
    params = layers()
    leaves = flat_leaves(params)
    mlp(vary(vary(params, "a"), "b"), mesh.rank).backward()
    mlp(vary(vary(params, "b"), "a"), mesh.rank).backward()
    mlp(vary(params, ("b", "a")), mesh.rank).backward()
    found = grads(leaves)
    once = alone(lambda copies, rank: mlp(paired(copies), rank), leaves)
    return found, [3 * g for g in once if g is not None]


def over_an_axis_of_one(mesh: mc.Mesh, vary: Vary) -> Any:
    """Nothing to sum, and still a leaf without a gradient gets none."""
    params = layers(4)
    leaves = flat_leaves(params)
    mlp(vary(vary(params, "one")[:3], "all"), mesh.rank).backward()
    found = grads(leaves)
    assert found[6] is found[7] is None
    return found, alone(lambda copies, rank: mlp(paired(copies)[:3], rank), leaves)


def twice_in_a_step(mesh: mc.Mesh, vary: Vary) -> Any:
    """Two trees that share parameters, in one loss."""
    params = layers()
    leaves = flat_leaves(params)
    first, second = vary(params, "all"), vary({"some": params[1:], "again": [params[1]]}, "all")
    (mlp(first, mesh.rank) * mlp([*second["again"], *second["some"]], mesh.rank, 1)).backward()

    def loss(copies: Any, rank: int) -> Tensor:
        mine = paired(copies)
        return mlp(mine, rank) * mlp([mine[1], *mine[1:]], rank, 1)

    return grads(leaves), alone(loss, leaves)


def one_in_the_others_graph(mesh: mc.Mesh, vary: Vary) -> Any:
    """Weights made of varied weights and of data that differs along a, varied along b; between them a sum over a."""
    params = layers()
    leaves = flat_leaves(params)
    here = mesh.coordinate["a"]
    made = [(torch.tanh(w * batch(here)[0]), b) for w, b in vary(params, "a")]
    made = mc.all_reduce(made, "a", mesh=mesh)
    mlp(vary(vary(made, "b"), "a"), mesh.rank).backward()

    def loss(copies: Any, rank: int) -> Tensor:
        mine = [(sum(torch.tanh(w * batch(a)[0]) for a in range(2)), 2 * b) for w, b in paired(copies)]
        return mlp(mine, rank)

    return grads(leaves), alone(loss, leaves)


def beside_other_collectives(mesh: mc.Mesh, vary: Vary) -> Any:
    """Layers cut over the same ranks, whose backward sums something of its own in between."""
    params = layers()
    leaves = flat_leaves(params)
    h, everybody = batch(9), ("a", "b")
    for w, (_, b) in zip(vary([w for w, _ in params], "all"), params, strict=True):
        part = mc.pvary(h, everybody, mesh=mesh) @ w * (1 + mesh.rank)
        h = torch.tanh(mc.all_reduce(part, everybody, mesh=mesh) + b)
    h.sum().backward()

    def loss(copies: Any, _: int) -> Tensor:
        h = batch(9)
        for w, b in paired(copies):
            h = torch.tanh(sum(h @ w * (1 + rank) for rank in range(4)) + b)
        return h.sum()

    return grads(leaves), alone(loss, leaves, ranks=1)


def sharded_and_replicated(mesh: mc.Mesh, vary: Vary) -> Any:
    """The pieces of weights cut over b, replicated over a, gathered while other layers compute."""
    params = layers()
    mine = [mc.shard(flat, "b", mesh=mesh).detach() for flat in [torch.cat([w, b[None]]).flatten() for w, b in params]]
    for piece in mine:
        piece.requires_grad_()
    pieces = vary(mine, "a")
    h, gathering = batch(mesh.rank), mc.all_gather(pieces[0], "b", mesh=mesh, async_op=True)
    for i in range(len(pieces)):
        whole = gathering.wait().view(6, 5)
        if i + 1 < len(pieces):
            gathering = mc.all_gather(pieces[i + 1], "b", mesh=mesh, async_op=True)
        h = torch.tanh(h @ whole[:5] + whole[5])
    (h * h).sum().backward()
    full = alone(lambda copies, rank: mlp(paired(copies), rank), flat_leaves(params))
    expected = [torch.cat([w, b[None]]).flatten() for w, b in paired(full)]
    return grads(mine), [g.chunk(2)[mesh.coordinate["b"]] for g in expected]


def backward_twice(mesh: mc.Mesh, vary: Vary) -> Any:
    params = layers()
    leaves = flat_leaves(params)
    loss = mlp(vary(params, "all"), mesh.rank)
    loss.backward(retain_graph=True)
    once = grads(leaves)
    loss.backward()
    expected = alone(lambda copies, rank: mlp(paired(copies), rank), leaves)
    return [*once, *grads(leaves)], [*expected, *(2 * g for g in expected)]


def asked_for(mesh: mc.Mesh, vary: Vary) -> Any:
    """torch.autograd.grad, for all leaves and for some; backward(inputs=); what was varied, besides."""
    params = layers()
    leaves = flat_leaves(params)
    varied = vary(params, "all")
    loss = mlp(varied, mesh.rank)
    whole = alone(lambda copies, rank: mlp(paired(copies), rank), leaves)
    found, expected = list(torch.autograd.grad(loss, leaves, retain_graph=True)), list(whole)
    for some in ([0], [5], [1, 4], [4, 3, 2]):
        found += torch.autograd.grad(loss, [leaves[i] for i in some], retain_graph=True)
        expected += [whole[i] for i in some]
    loss.backward(inputs=[leaves[2], leaves[3]], retain_graph=True)
    assert [leaf.grad is None for leaf in leaves] == [True, True, False, False, True, True]
    found += grads(leaves)[2:4]
    expected += whole[2:4]
    # Those of this rank alone: nothing is summed, and nobody is waited for.
    if mesh.rank == 1:
        own = torch.autograd.grad(loss, flat_leaves(varied), retain_graph=True)
        for g, h in zip(own, alone(lambda copies, _: mlp(paired(copies), 1), leaves, ranks=1), strict=True):
            close(g, h)
    loss.backward()
    return [*found, *grads(leaves)[:2]], [*expected, *whole[:2]]


def differentiated_again(mesh: mc.Mesh, vary: Vary) -> Any:
    """A penalty on the gradient that all ranks share."""
    params = layers()
    leaves = flat_leaves(params)
    loss = mlp(vary(params, "all"), mesh.rank)
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    penalty = sum((g**2).sum() for g in first)
    second = torch.autograd.grad(penalty, leaves)
    copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    whole = sum(mlp(paired(copies), rank) for rank in range(4))
    gs = torch.autograd.grad(whole, copies, create_graph=True)
    return [*first, *second], [*gs, *torch.autograd.grad(sum((g**2).sum() for g in gs), copies)]


def penalised_and_trained(mesh: mc.Mesh, vary: Vary) -> Any:
    """A penalty on each rank's own gradient, in the loss that is then differentiated."""
    params = layers()
    leaves = flat_leaves(params)

    def penalised(params: Any, rank: int) -> Tensor:
        loss = mlp(params, rank)
        return loss + sum((g**2).sum() for g in torch.autograd.grad(loss, flat_leaves(params), create_graph=True))

    penalised(vary(params, "all"), mesh.rank).backward()
    return grads(leaves), alone(lambda copies, rank: penalised(paired(copies), rank), leaves)


def checkpointed(mesh: mc.Mesh, vary: Vary) -> Any:
    """Around each layer, of both kinds; the parameters varied outside, and inside."""
    params = layers()
    leaves = flat_leaves(params)

    def layer(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(h @ w + b)

    def varying_layer(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        w, b = vary((w, b), "all")
        return torch.tanh(h @ w + b)

    found: list[Any] = []
    for reentrant in (False, True):
        for function in (layer, varying_layer):
            h = batch(mesh.rank).requires_grad_()
            for w, b in vary(params, "all") if function is layer else params:
                h = torch.utils.checkpoint.checkpoint(function, h, w, b, use_reentrant=reentrant)
            (h * h).sum().backward()
            found += grads(leaves)
            for leaf in leaves:
                leaf.grad = None
    return found, 4 * alone(lambda copies, rank: mlp(paired(copies), rank), leaves)


def hooked(mesh: mc.Mesh, vary: Vary) -> Any:
    """Hooks on leaves, before and after the gradient is kept, see each finished sum once."""
    params = layers()
    leaves = flat_leaves(params)
    before: dict[int, list[Tensor]] = {i: [] for i in range(len(leaves))}
    after: dict[int, list[Tensor]] = {i: [] for i in range(len(leaves))}
    for i, leaf in enumerate(leaves):
        leaf.register_hook(lambda g, i=i: before[i].append(g.clone()))
        leaf.register_post_accumulate_grad_hook(lambda p, i=i: after[i].append(p.grad.clone()))
    varied = vary(params, "all")
    own: dict[int, list[Tensor]] = {i: [] for i in range(len(leaves))}
    for i, y in enumerate(flat_leaves(varied)):
        y.register_hook(lambda g, i=i: own[i].append(g.clone()))
    mlp(varied, mesh.rank).backward()
    assert {len(seen) for each in (before, after, own) for seen in each.values()} == {1}
    for i, g in enumerate(alone(lambda copies, _: mlp(paired(copies), mesh.rank), leaves, ranks=1)):
        close(own[i][0], g)  # what was varied sees this rank's own
    expected = alone(lambda copies, rank: mlp(paired(copies), rank), leaves)
    return [*(before[i][0] for i in before), *(after[i][0] for i in after)], [*expected, *expected]


def changed_by_hooks(mesh: mc.Mesh, vary: Vary) -> Any:
    """A hook may give another gradient, to what is varied and to the leaf."""
    params = layers()
    leaves = flat_leaves(params)
    leaves[0].register_hook(lambda g: g * 3)
    varied = vary(params, "all")
    varied[1][0].register_hook(lambda g: g * (1 + mesh.rank))
    mlp(varied, mesh.rank).backward()
    expected = alone(lambda copies, rank: mlp(paired(copies), rank), leaves)
    each = [alone(lambda copies, _, r=r: mlp(paired(copies), r), leaves, ranks=1)[2] for r in range(4)]
    expected[2] = sum((1 + rank) * g for rank, g in enumerate(each))
    return grads(leaves), [3 * expected[0], *expected[1:]]


def stepping_in_backward(mesh: mc.Mesh, vary: Vary) -> Any:
    """An optimiser that steps, and frees each gradient, as soon as it is there."""
    params, reference = layers(), layers()
    leaves, others = flat_leaves(params), flat_leaves(reference)

    def step(p: Tensor) -> None:
        with torch.no_grad():
            p -= 0.05 * p.grad
        p.grad = None

    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        mlp(vary(params, "all"), mesh.rank).backward()
        expected = alone(lambda copies, rank: mlp(paired(copies), rank), others)
        with torch.no_grad():
            for other, g in zip(others, expected, strict=True):
                other -= 0.05 * g
    return [leaf.detach() for leaf in leaves], [other.detach() for other in others]


def an_error_in_the_middle(mesh: mc.Mesh, vary: Vary) -> Any:
    """Sums that were begun are never asked for; the next step is as if they had not been."""
    params = layers()
    leaves = flat_leaves(params)

    def fail(g: Tensor) -> None:
        raise ArithmeticError

    for where in (2, 0, 1):
        varied = vary(params, "all")
        varied[where][0].register_hook(fail)
        with pytest.raises(ArithmeticError):
            mlp(varied, mesh.rank).backward()
    for leaf in leaves:
        leaf.grad = None
    loss = mlp(vary(params, "all"), mesh.rank)
    loss.backward()
    return grads(leaves), alone(lambda copies, rank: mlp(paired(copies), rank), leaves)


def complex_leaves(mesh: mc.Mesh, vary: Vary) -> Any:
    params = layers(dtype=torch.complex128)
    leaves = flat_leaves(params)
    mlp(vary(params, "all"), mesh.rank).backward()
    return grads(leaves), alone(lambda copies, rank: mlp(paired(copies), rank), leaves)


def without_recording(mesh: mc.Mesh, vary: Vary) -> Any:
    """Where nothing is recorded there is nothing to sum."""
    params = layers()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not mlp(vary(params, "all"), mesh.rank).requires_grad
    assert not any(y.requires_grad for y in flat_leaves(vary([w.detach() for w, _ in params], "all")))
    return plainly(mesh, vary)


def passed_on(mesh: mc.Mesh, vary: Vary) -> Any:
    """The gradient of what is varied is another leaf's gradient too, whose hook changes it where it lies."""
    x, y = (torch.nn.Parameter(drawn((5, 5), torch.float64, seed)) for seed in range(2))

    def zero(p: Tensor) -> None:
        p.grad.zero_()

    y.register_post_accumulate_grad_hook(zero)
    (varied,) = vary([x], "all")
    (torch.tanh(varied + y) * batch(mesh.rank)[0]).sum().backward()
    expected = alone(lambda xs, rank: (torch.tanh(xs[0] + y.detach()) * batch(rank)[0]).sum(), [x])
    return [x.grad], expected


SCENARIOS = [
    plainly, accumulated, varied_once_for_micro_steps, unused_everywhere, shared, frozen, made_of_leaves, over_two_axes, over_an_axis_of_one,
    twice_in_a_step, one_in_the_others_graph, beside_other_collectives, sharded_and_replicated, backward_twice,
    asked_for, differentiated_again, penalised_and_trained, checkpointed, hooked, changed_by_hooks,
    stepping_in_backward, an_error_in_the_middle, complex_leaves, without_recording, passed_on,
]  # fmt: skip
ROUNDED = [shared, made_of_leaves, twice_in_a_step, one_in_the_others_graph, differentiated_again]
"""Several gradients of one leaf are added up in the order in which they come."""


def close(actual: Any, expected: Any) -> None:
    assert_close(actual, expected, rtol=1e-11, atol=1e-13)


def played(scenario: Callable[[mc.Mesh, Vary], Any], patched: bool) -> str:
    mesh = mc.make_mesh({"a": 2, "b": 2, "one": 1})

    def vary(tree: Any, axis: Any, bucket_mb: float | None) -> Any:
        axis = ("a", "b") if axis == "all" else axis
        if bucket_mb is not None:
            return mc.pvary(tree, axis, mesh=mesh, bucket_mb=bucket_mb)
        if isinstance(tree, Tensor):
            return mc.pvary(tree, axis, mesh=mesh)
        if isinstance(tree, dict):
            return {key: vary(part, axis, None) for key, part in tree.items()}
        return [vary(part, axis, None) for part in tree]

    apart = None
    for bucket_mb in (None, *PVARY_SIZES, *PVARY_SIZES):  # twice: a tree's order is learnt in its first backward pass
        with without_sequence_numbers(mesh, ("a", "b")) if patched else contextlib.nullcontext():
            found, expected = scenario(mesh, lambda tree, axis, size=bucket_mb: vary(tree, axis, size))
        assert [g is None for g in found] == [g is None for g in expected]
        found = [g for g in found if g is not None]
        close(found, [g for g in expected if g is not None])
        if apart is None:
            apart = found
        elif scenario in ROUNDED:
            close(found, apart)
        else:
            same_bits(found, apart, f"{scenario.__name__} with {bucket_mb} MiB")
    return digest(apart or [])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_gradients_of_a_varied_tree(scenario: Callable[[mc.Mesh, Vary], Any]) -> None:
    """Bucket by bucket, leaf by leaf and without ranks."""
    mc.launch(played, ranks=4, args=(scenario, False))


@pytest.mark.one_in(3, alike=True)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_gradients_of_a_varied_tree_on_processes(pool4: Any, scenario: Callable[[mc.Mesh, Vary], Any]) -> None:
    """With the same bits as in one process."""
    assert pool4.run(played, scenario, False) == mc.launch(played, ranks=4, args=(scenario, False))


UNORDERED = [
    plainly, accumulated, shared, over_two_axes, twice_in_a_step, one_in_the_others_graph, backward_twice, complex_leaves,
    unused_everywhere, frozen,
]  # fmt: skip


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(each, marks=pytest.mark.thorough if at % 3 else []) for at, each in enumerate(UNORDERED)],
    ids=[each.__name__ for each in UNORDERED],
)
def test_the_same_where_autograds_order_cannot_be_set(pool4: Any, scenario: Callable[[mc.Mesh, Vary], Any]) -> None:
    """A torch without that switch sums at the end of the backward pass."""
    assert mc.launch(played, ranks=4, args=(scenario, True)) == pool4.run(played, scenario, True)


HALVES = (torch.bfloat16, torch.float16)


def halves(dtype: torch.dtype) -> str:
    """Leaf by leaf, in a tree of one dtype and in one of several; a sum of halves is made in single precision."""
    mesh = mc.make_mesh({"a": 4})
    params = layers(dtype=dtype)
    leaves = flat_leaves(params)
    wide = [torch.nn.Parameter(drawn((3,), torch.float32, 1)), torch.nn.Parameter(drawn((2, 2), torch.complex64, 2))]

    def found(varied: Any, others: Any) -> list[Tensor]:
        loss = mlp(varied, mesh.rank).float() + (others[0] * mesh.rank).sum() + (others[1].abs() * mesh.rank).sum()
        return list(torch.autograd.grad(loss, [*leaves, *wide]))

    apart = found([[mc.pvary(x, "a", mesh=mesh) for x in each] for each in params], mc.pvary(wide, "a", mesh=mesh))
    for bucket_mb in PVARY_SIZES:
        varied = mc.pvary({"wide": wide, "layers": params}, "a", mesh=mesh, bucket_mb=bucket_mb)
        same_bits(found(varied["layers"], varied["wide"]), apart, f"{dtype} with {bucket_mb} MiB")
    # On each rank the gradient is 256 or 1: in half precision 256 + 1 is 256.
    one, two = (torch.ones(1, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    factor = 256.0 if mesh.rank == 0 else 1.0
    (sum(mc.pvary([one, two], "a", mesh=mesh)) * factor).backward()
    assert [one.grad.item(), two.grad.item()] == [260.0, 260.0]  # 259 rounds to 260
    return digest(apart)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_of_halves(pool4: Any, dtype: torch.dtype) -> None:
    assert mc.launch(halves, ranks=4, args=(dtype,)) == pool4.run(halves, dtype)


def looking_for_nan() -> None:
    mesh = mc.make_mesh({"a": 4})
    params = layers()
    leaves = flat_leaves(params)
    for bucket_mb in PVARY_SIZES:
        for leaf in leaves:
            leaf.grad = None
        mlp(mc.pvary(params, "a", mesh=mesh, bucket_mb=bucket_mb), mesh.rank).backward()
        close(grads(leaves), alone(lambda copies, rank: mlp(paired(copies), rank), leaves))
        with pytest.raises(RuntimeError, match="returned nan values"):
            (mlp(mc.pvary(params, "a", mesh=mesh, bucket_mb=bucket_mb), mesh.rank) * 0).sqrt().backward()


def looking_for_nan_on_processes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True):
            looking_for_nan()


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_anomaly_detection(pool4: Any) -> None:
    """No sum that is under way is looked at, and an error on every rank leaves none behind."""
    pool4.run(looking_for_nan_on_processes)
    with torch.autograd.set_detect_anomaly(True):  # of the whole process: not to be set by one of its ranks
        mc.launch(looking_for_nan, ranks=4)


def in_threads() -> None:
    """The step in a thread of its own, after steps in others; then forward in one thread and backward in another."""
    mesh = mc.make_mesh({"a": 4})
    params = layers()
    leaves = flat_leaves(params)
    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    expected = alone(lambda copies, rank: mlp(paired(copies), rank), leaves)
    for bucket_mb in PVARY_SIZES:
        seen: list[Tensor] = []
        losses: list[Tensor] = []
        log: list[Any] = []

        def forward(bucket_mb: float = bucket_mb, losses: list[Tensor] = losses, log: list[Any] = log) -> None:
            varied = mc.pvary(params, "a", mesh=mesh, bucket_mb=bucket_mb)
            losses.append(mlp(varied, mesh.rank, hooks=log))

        def backward(losses: list[Tensor] = losses) -> None:
            losses.pop().backward()

        def step(forward: Any = forward, backward: Any = backward) -> None:
            forward()
            backward()

        with seen_by_the_link(mesh, "a", log):
            for jobs in ([step], [step], [forward, backward]):
                for leaf in leaves:
                    leaf.grad = None
                log.clear()
                for job in jobs:
                    thread = threading.Thread(target=job)
                    thread.start()
                    thread.join()
                close(grads(leaves), expected)
                # In the first step the order of the gradients is learnt.
                sums = [each for each in log if not (isinstance(each, tuple) and each[0] == "broadcast")]
                assert len(sums) == 3 + 2 * sums.count("wait"), log
                assert set(sums[-sums.count("wait") :]) == {"wait"}, log
        assert len(seen) == 3 * len(leaves)


def test_steps_in_threads(pool4: Any) -> None:
    pool4.run(in_threads)


# ------------------------------------------------------------------------------------------------ where ranks differ


STEPS = 3
"""In the first step a tree's order is learnt, in the others it is used."""


def one_uses_it(bucket_mb: float, user: int, early: bool) -> None:
    """A leaf that one rank alone uses, first or last of all."""
    mesh = mc.make_mesh({"a": 4})
    params = [*layers(), torch.nn.Parameter(torch.ones(3, 5, dtype=torch.float64))]
    leaves = flat_leaves(params)

    def loss(params: Any, rank: int) -> Tensor:
        *some, extra = params
        if rank != user:
            return mlp(some, rank)
        if not early:
            return mlp(some, rank) + (extra * 5).sum()
        (w, b), *more = some
        h = torch.tanh((batch(rank) + extra) @ w + b)
        for w, b in more:
            h = torch.tanh(h @ w + b)
        return (h * h).sum()

    for _ in range(STEPS):
        for leaf in leaves:
            leaf.grad = None
        loss(mc.pvary(params, "a", mesh=mesh, bucket_mb=bucket_mb), mesh.rank).backward()
        close(grads(leaves), alone(lambda copies, rank: loss([*paired(copies[:-1]), copies[-1]], rank), leaves))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bucket_mb", PVARY_SIZES)
@pytest.mark.parametrize("early", [False, True], ids=["last", "first"])
@pytest.mark.parametrize("user", [0, 2])
def test_a_leaf_that_one_rank_alone_uses(run4: Run, user: int, early: bool, bucket_mb: float) -> None:
    """In a bucket with others, and in one that the other ranks do not use at all."""
    run4(one_uses_it, bucket_mb, user, early)


def other_orders(bucket_mb: float) -> None:
    """Branches that a rank computes in an order of its own, so that its gradients come in another order."""
    mesh = mc.make_mesh({"a": 4})
    leaves = [torch.nn.Parameter(drawn((5,), torch.float64, i)) for i in range(4)]

    def loss(leaves: Sequence[Tensor], rank: int) -> Tensor:
        order = [(i + rank) % 4 for i in range(4)]
        return sum(torch.tanh(leaves[i] * batch(rank, i)).sum() for i in order)

    for _ in range(STEPS):
        for leaf in leaves:
            leaf.grad = None
        loss(mc.pvary(leaves, "a", mesh=mesh, bucket_mb=bucket_mb), mesh.rank).backward()
        close(grads(leaves), alone(loss, leaves))


@pytest.mark.parametrize("bucket_mb", [25, 8e-5, 1e-9])
def test_ranks_whose_backward_takes_another_order(run4: Run, bucket_mb: float) -> None:
    run4(other_orders, bucket_mb)


def other_orders_beside_sums(bucket_mb: float) -> None:
    """Each rank takes another leaf in each layer; all ranks make the same calls in the same order, in backward too."""
    mesh = mc.make_mesh({"a": 4})
    leaves = [torch.nn.Parameter(drawn((15,), torch.float64, i)) for i in range(4)]
    for _ in range(STEPS):
        for leaf in leaves:
            leaf.grad = None
        varied = mc.pvary(leaves, "a", mesh=mesh, bucket_mb=bucket_mb)
        h = batch(9).flatten()
        for i in range(4):
            mine = mc.pvary(h, "a", mesh=mesh) * varied[(i + mesh.rank) % 4] * (1 + mesh.rank)
            h = torch.tanh(mc.all_reduce(mine, "a", mesh=mesh))
        h.sum().backward()

        def loss(leaves: Sequence[Tensor], _: int) -> Tensor:
            h = batch(9).flatten()
            for i in range(4):
                h = torch.tanh(sum(h * leaves[(i + rank) % 4] * (1 + rank) for rank in range(4)))
            return h.sum()

        close(grads(leaves), alone(loss, leaves, ranks=1))


def test_another_order_beside_other_sums_is_told() -> None:
    """The tree's sums would stand between the user's in another place on each rank: pvary's docstring rules it out."""
    mc.launch(other_orders_beside_sums, ranks=4, args=(25,))
    for bucket_mb in (1.3e-4, 1e-9):
        with pytest.raises(mc.CommError, match="ranks of one axis made different calls"):
            mc.launch(other_orders_beside_sums, ranks=4, args=(bucket_mb,))


def warmed_up_ranks() -> None:
    """Some ranks have recorded more than others before: autograd numbers its nodes from there on."""
    mesh = mc.make_mesh({"a": 2, "b": 2})
    for _ in range(200 * mesh.coordinate["b"]):
        torch.ones(1, requires_grad=True) * 2
    for _ in range(STEPS):
        pieces = [torch.nn.Parameter(torch.full((2,), i + 1.0)) for i in range(5)]
        whole = [mc.all_gather(piece, "b", mesh=mesh) for piece in pieces]
        varied = mc.pvary(whole, "a", mesh=mesh, bucket_mb=1e-9)
        sum((x * 10**i).sum() for i, x in enumerate(varied)).backward()
        assert [piece.grad.tolist() for piece in pieces] == [[4.0 * 10**i] * 2 for i in range(5)]


def test_ranks_that_have_recorded_more_than_others() -> None:
    """Nodes between a leaf and pvary communicate in the same order on all ranks. In new threads and new processes."""
    mc.launch(warmed_up_ranks, ranks=4)
    mc.launch(warmed_up_ranks, ranks=4, runtime="processes", timeout=280)


def after_an_error(bucket_mb: float) -> None:
    """A backward pass fails half way, on all ranks; another one follows through the same pvary, of another loss."""
    mesh = mc.make_mesh({"a": 4})
    params = layers()
    leaves = flat_leaves(params)
    for step in range(STEPS):
        for leaf in leaves:
            leaf.grad = None
        varied = mc.pvary(params, "a", mesh=mesh, bucket_mb=bucket_mb)

        def fail(g: Tensor) -> None:
            raise ArithmeticError

        handle = varied[1][0].register_hook(fail)
        with pytest.raises(ArithmeticError):
            mlp(varied, mesh.rank, step).mul(1000).backward()
        handle.remove()
        assert all(leaf.grad is None for leaf in leaves)
        mlp(varied, mesh.rank, 7).backward()
        close(grads(leaves), alone(lambda copies, rank: mlp(paired(copies), rank, 7), leaves))


@pytest.mark.parametrize("bucket_mb", PVARY_SIZES)
def test_a_failed_backward_leaves_nothing_behind(run4: Run, bucket_mb: float) -> None:
    run4(after_an_error, bucket_mb)


def nested_in_backward(bucket_mb: float) -> None:
    """Checkpoints that use what was varied without taking it as an argument: each runs a backward pass inside of the
    backward pass, through the same pvary."""
    mesh = mc.make_mesh({"a": 4})
    params = layers()
    leaves = flat_leaves(params)
    for _ in range(STEPS):
        for leaf in leaves:
            leaf.grad = None
        varied = mc.pvary(params, "a", mesh=mesh, bucket_mb=bucket_mb)
        h = batch(mesh.rank).requires_grad_()
        for i, (w, b) in enumerate(varied):

            def layer(h: Tensor, w: Tensor = w, b: Tensor = b) -> Tensor:
                return torch.tanh(h @ w + b)

            h = layer(h) if i == 2 else torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=True)
        (h * h).sum().backward()
        close(grads(leaves), alone(lambda copies, rank: mlp(paired(copies), rank), leaves))


@pytest.mark.parametrize("bucket_mb", PVARY_SIZES)
def test_a_backward_pass_inside_of_a_backward_pass(run4: Run, bucket_mb: float) -> None:
    run4(nested_in_backward, bucket_mb)


# -------------------------------------------------------------------------------------------------------- overlapping


def interleaved(bucket_mb: float, patched: bool) -> list[list[Any]]:
    """What happens in the backward passes of some steps: the number of a layer whose backward begins, a sum that is
    begun or waited for, a leaf's gradient. The size of a bucket is no other test's: a process keeps what order it has
    learnt for trees of these shapes."""
    mesh = mc.make_mesh({"a": 4})
    logs = []
    for _ in range(STEPS):
        log: list[Any] = []
        context = without_sequence_numbers(mesh, "a") if patched else contextlib.nullcontext()
        with context, seen_by_the_link(mesh, "a", log):
            # Made of leaves: what comes after the sums waits for them, and nothing else does.
            params = [(w * 2, b + 1) for w, b in layers(4)]
            for leaf in flat_leaves(params):
                leaf.register_hook(lambda g, log=log: log.append("leaf"))
            mlp(mc.pvary(params, "a", mesh=mesh, bucket_mb=bucket_mb), mesh.rank, hooks=log).backward()
        logs.append([entry[0] if isinstance(entry, tuple) else entry for entry in log])
    return logs


def after_the_first(logs: list[list[Any]]) -> list[Any]:
    """The log of every step but the first, up to the first wait; then there are waits and finished gradients only."""
    assert logs[1:] == [logs[1]] * (len(logs) - 1)
    log = logs[1]
    begun = log[: log.index("wait")]
    assert set(log[len(begun) :]) == {"wait", "leaf"}
    assert log.count("wait") == log.count("start")
    assert log.count("leaf") == 8
    return begun


def test_sums_begin_between_the_layers_and_are_waited_for_at_the_end(run4: Run) -> None:
    """A bucket per layer: 3, 2, 1, 0 are the beginnings of the layers' backwards."""
    for logs in run4(interleaved, 2.01e-4, False):
        assert after_the_first(logs) == [3, "start", 2, "start", 1, "start", 0, "start"]


def test_two_layers_a_bucket(run4: Run) -> None:
    for logs in run4(interleaved, 4.51e-4, False):
        assert after_the_first(logs) == [3, 2, "start", 1, 0, "start"]


def test_one_bucket_is_summed_when_all_is_there(run4: Run) -> None:
    for logs in run4(interleaved, 25.1, False):
        assert after_the_first(logs) == [3, 2, 1, 0, "start"]


def test_every_leaf_alone(run4: Run) -> None:
    """The bias's gradient is ready before the weight's."""
    layer = ["start", "start"]
    for logs in run4(interleaved, 1.1e-9, False):
        assert after_the_first(logs) == [3, *layer, 2, *layer, 1, *layer, 0, *layer]


def test_the_first_step_sums_after_the_layers(run4: Run) -> None:
    for logs in run4(interleaved, 2.6e-4, False):
        assert [entry for entry in logs[0] if isinstance(entry, int)] == [3, 2, 1, 0]
        assert logs[0][:4] == [3, 2, 1, 0]


def test_without_autograds_order_the_sums_come_last(run4: Run) -> None:
    for logs in run4(interleaved, 2.4e-4, True):
        for log in logs:
            assert "leaf" not in log[: log.index(0)]


def in_the_order_of_use() -> list[Any]:
    """A tree whose order is not that of its layers: buckets are made anew in the order in which gradients came."""
    mesh = mc.make_mesh({"a": 4})
    params = layers(4)
    log: list[Any] = []
    for _ in range(STEPS):
        log.clear()
        with seen_by_the_link(mesh, "a", log):
            tree = {name: params[i] for name, i in zip("abcd", (2, 0, 3, 1), strict=True)}
            varied = mc.pvary(tree, "a", mesh=mesh, bucket_mb=2.05e-4)  # no other test's
            mlp([varied[name] for name in "bdac"], mesh.rank, hooks=log).backward()
    return log


def test_buckets_follow_the_order_in_which_gradients_become_ready(run4: Run) -> None:
    for log in run4(in_the_order_of_use):
        assert log[: log.index("wait")] == [3, "start", 2, "start", 1, "start", 0, "start"]


def two_trees() -> list[Any]:
    """A tree of the first layers and a tree of the last ones, varied one after the other."""
    mesh = mc.make_mesh({"a": 4})
    log: list[Any] = []
    params = layers(4)
    for _ in range(STEPS):
        log.clear()
        with seen_by_the_link(mesh, "a", log):
            first, last = (mc.pvary(part, "a", mesh=mesh, bucket_mb=25.2) for part in (params[:2], params[2:]))
            mlp([*first, *last], mesh.rank, hooks=log).backward()
    return log


def test_two_trees(run4: Run) -> None:
    assert run4(two_trees) == [[3, 2, "start", 1, 0, "start", "wait", "wait"]] * 4
