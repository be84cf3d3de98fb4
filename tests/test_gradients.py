"""First, second and third derivatives of every collective, against the adjoint identity and the unsharded computation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from cases import BY_NAME, CASES, SHARES, Case, grid, seeded
from oracle import Oracle, distinct
from torch import Tensor
from torch.testing import assert_close

import meshcomm as mc

DIFFERENTIABLE = [case for case in CASES if torch.float64 in case.dtypes]
LINEAR = [case for case in DIFFERENTIABLE if case.linear]
PLACES: list[tuple[tuple[int, ...], Any]] = [
    ((1,), "a"), ((4,), "a"), ((2, 4), ("b", "a")), ((2, 2, 2), ("c", "a")),
]  # fmt: skip
ON_POOL = [pytest.param(((2, 2), "b"), marks=pytest.mark.thorough), ((2, 2), ("b", "a"))]


def place_id(value: tuple[tuple[int, ...], Any]) -> str:
    shape, axis = value
    return f"{'x'.join(map(str, shape))}-{axis if isinstance(axis, str) else ','.join(axis)}"


def close(actual: Any, expected: Any, what: str = "") -> None:
    assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def ranks_of(place: tuple[tuple[int, ...], Any]) -> int:
    return math.prod(place[0])


# ------------------------------------------------------------------------------------------------ adjoint identity


def inner(xs: Sequence[Tensor], ys: Sequence[Tensor], copies: int) -> complex:
    """Summed over the ranks, an invariant value once."""
    return sum(complex((x.conj() * y).sum().item()) for x, y in zip(xs, ys, strict=True)) / copies


def both_ways(name: str, place: tuple[tuple[int, ...], Any], dtype: torch.dtype) -> None:
    """<A x, g> = <x, A^T g> with g of the type of the result; A x by the oracle, A^T g by the library."""
    shape, axis = place
    case, mesh = BY_NAME[name], mc.make_mesh(grid(shape))
    oracle = Oracle(mesh.shape)
    n = oracle.axis_size(axis)
    xs = case.inputs(oracle, axis, dtype)
    ys = case.reference(oracle, xs, axis)
    gs = oracle.spread(lambda rank: seeded(ys[rank].shape, dtype, rank, 7), axis if case.invariant_out else ())
    x = xs[mesh.rank].clone().requires_grad_()
    y = case.call(x, axis, mesh)
    close(y, ys[mesh.rank])
    (gx,) = torch.autograd.grad(y, x, gs[mesh.rank])
    assert (gx.shape, gx.dtype) == (x.shape, dtype)
    # Every rank's, in order, without the collective under test: each writes a row of one sum over all ranks.
    rows = [torch.zeros_like(each) for each in xs]
    rows[mesh.rank] = gx
    everyone = mc.all_reduce(rows, mesh.axis_names, mesh=mesh)
    if case.invariant_in:
        for ranks in oracle.groups(axis):
            for rank in ranks[1:]:
                close(everyone[rank], everyone[ranks[0]], "the gradient of an invariant value is invariant")
    left = inner(gs, ys, n if case.invariant_out else 1)
    right = inner(everyone, xs, n if case.invariant_in else 1)
    assert left == right, f"{left} != {right}"  # sums of small whole numbers, halved at most


def both_dtypes(name: str, place: tuple[tuple[int, ...], Any]) -> None:
    for dtype in (torch.float64, torch.complex128):
        both_ways(name, place, dtype)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", PLACES, ids=place_id)
@pytest.mark.parametrize("case", LINEAR, ids=lambda case: case.name)
def test_adjoint_identity(case: Case, place: tuple[tuple[int, ...], Any]) -> None:
    mc.launch(both_dtypes, ranks=ranks_of(place), args=(case.name, place))


def all_both_ways(place: tuple[tuple[int, ...], Any], names: list[str]) -> None:
    for case in LINEAR:
        if case.name in names:
            both_dtypes(case.name, place)


@pytest.mark.parametrize("names", SHARES)
@pytest.mark.parametrize("place", ON_POOL, ids=place_id)
def test_adjoint_identity_on_processes(pool4: Any, place: tuple[tuple[int, ...], Any], names: list[str]) -> None:
    pool4.run(all_both_ways, place, names)


# ---------------------------------------------------------------------------------- derivatives of three orders


def chain(ys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """A number that depends on each logical value in a non-linear way."""
    terms = {}
    for y, w in zip(ys, weights, strict=True):
        parts, weight = (torch.view_as_real(z) if z.is_complex() else z for z in (y, w))
        terms[id(y)] = (weight * (0.3 * parts).sin()).sum()
    return torch.stack(list(terms.values())).sum()


@lru_cache(maxsize=4)  # for all ranks of a process
def worked(
    name: str, place: tuple[tuple[int, ...], Any], dtype: torch.dtype
) -> tuple[list[Tensor], list[list[Tensor]], list[list[list[Tensor]]]]:
    """Inputs, weights of each order, and on all ranks the derivatives of each order by the input and by the first weight."""
    shape, axis = place
    case, oracle = BY_NAME[name], Oracle(grid(shape))
    inputs = case.inputs(oracle, axis, dtype)
    memo = {id(x): (x + 0).requires_grad_() for x in inputs}
    xs = [memo[id(x)] for x in inputs]
    values = case.reference(oracle, xs, axis)
    shapes = [[y.shape for y in values], *[[x.shape for x in xs]] * 2]
    along = [axis if case.invariant_out else (), *[axis if case.invariant_in else ()] * 2]
    weights = [
        oracle.spread(lambda rank, o=o: seeded(shapes[o][rank], dtype, rank, 11 + o), along[o]) for o in range(3)
    ]
    derivatives = []
    first = [weight.requires_grad_() for weight in weights[0]]
    leaves = [*distinct(xs), *distinct(first)]
    for weight in weights:
        total = chain(values, weight)
        gradients: Any = [torch.zeros_like(leaf) for leaf in leaves]
        if total.requires_grad:
            gradients = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
        of = dict(zip(map(id, leaves), gradients, strict=True))
        values = [of[id(leaf)] for leaf in xs]
        derivatives.append([[of[id(leaf)].detach() for leaf in many] for many in (xs, first)])
    return inputs, weights, derivatives


def orders(name: str, place: tuple[tuple[int, ...], Any], dtype: torch.dtype) -> None:
    """Three derivatives in a row of chain(A(x)): the ranks' own terms of a sum in which an invariant value counts once."""
    mesh = mc.make_mesh(grid(place[0]))
    inputs, weights, derivatives = worked(name, place, dtype)
    x = inputs[mesh.rank].clone().requires_grad_()
    mine = [weight[mesh.rank].detach() for weight in weights]
    mine[0].requires_grad_()
    value = BY_NAME[name].call(x, place[1], mesh)
    for order, (weight, expected) in enumerate(zip(mine, derivatives, strict=True)):
        found = torch.autograd.grad(chain([value], [weight]), [x, mine[0]], create_graph=True, materialize_grads=True)
        close(
            list(found), [each[mesh.rank] for each in expected], f"derivative {order + 1} of {name} on rank {mesh.rank}"
        )
        value = found[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", PLACES, ids=place_id)
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
def test_three_derivatives(case: Case, place: tuple[tuple[int, ...], Any]) -> None:
    mc.launch(orders, ranks=ranks_of(place), args=(case.name, place, torch.float64))


@pytest.mark.parametrize("name", ["all_reduce-product", "reduce_scatter-product", "all_reduce-mean", "broadcast"])
def test_three_derivatives_of_complex(run4: Callable[..., list[Any]], name: str) -> None:
    run4(orders, name, ((2, 2), ("b", "a")), torch.complex128)


def all_orders(place: tuple[tuple[int, ...], Any], names: list[str]) -> None:
    for case in DIFFERENTIABLE:
        if case.name in names:
            orders(case.name, place, torch.float64)


@pytest.mark.parametrize("names", SHARES)
@pytest.mark.parametrize("place", ON_POOL, ids=place_id)
def test_three_derivatives_on_processes(pool4: Any, place: tuple[tuple[int, ...], Any], names: list[str]) -> None:
    pool4.run(all_orders, place, names)


# ------------------------------------------------------------------------------------------- factors of reductions

TABLES = {
    "no-ties": [[1.0, -4.0, 3.0], [2.0, 5.0, -6.0], [3.0, 0.5, 7.0], [4.0, 8.0, 0.25]],
    "ties": [[1.0, 2.0, 3.0], [1.0, 2.0, 0.0], [0.0, 2.0, 3.0], [1.0, 2.0, -1.0]],
    "one-zero": [[0.0, 2.0, 3.0], [5.0, 0.0, 1.0], [2.0, 7.0, 0.0], [3.0, 1.5, 2.0]],
    "two-zeros": [[0.0, 0.0, 3.0], [0.0, 2.0, 0.0], [2.0, 7.0, 0.0], [3.0, 0.0, 2.0]],
    "all-zeros": [[0.0] * 3] * 4,
    "negative-zeros": [[-0.0, 2.0, 3.0], [5.0, -0.0, 1.0], [2.0, 7.0, 0.0], [0.0, 1.5, 2.0]],
}
REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "product": lambda x: x.prod(0),
}


def unsharded(table: str, op: str, dtype: torch.dtype) -> list[Tensor]:
    """Gradient, gradient of the gradient's square and the third of the reduction of one tensor."""
    x = torch.tensor(TABLES[table], dtype=dtype, requires_grad=True)
    weight = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    (first,) = torch.autograd.grad((weight * REDUCED[op](x)).real.sum(), x, create_graph=True)
    found = [first]
    if op == "product":
        for _ in range(2):
            square = (found[-1] * found[-1].conj()).real.sum() + found[-1].real.sum()
            found += torch.autograd.grad(square, x, create_graph=True)
    return [each.detach() for each in found]


def factors(table: str, op: str, scattered: bool, dtype: torch.dtype) -> None:
    mesh = mc.make_mesh({"a": 4})
    weight = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    x = torch.tensor(TABLES[table][mesh.rank], dtype=dtype, requires_grad=True)
    if scattered:
        y = mc.reduce_scatter(x.repeat_interleave(4).view(3, 4), "a", dim=1, op=op, mesh=mesh)[:, 0]
        mine = (weight * y).real.sum() / 4  # every rank has an equal slice
    else:
        mine = (weight * mc.all_reduce(x, "a", op, mesh=mesh)).real.sum()
    for order, expected in enumerate(unsharded(table, op, dtype)):
        (g,) = torch.autograd.grad(mine, x, create_graph=True)
        close(g, expected[mesh.rank], f"{op} of {table}, order {order + 1}, rank {mesh.rank}")
        assert order == 0 or g.abs().max() > 0 or table == "all-zeros" or not expected.any()
        mine = (g * g.conj()).real.sum() + g.real.sum()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scattered", [False, True], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("op", REDUCED)
@pytest.mark.parametrize("table", TABLES)
def test_factors_equal_the_unsharded_ones(run4: Callable[..., list[Any]], table: str, op: str, scattered: bool) -> None:
    run4(factors, table, op, scattered, torch.float64)


@pytest.mark.parametrize("table", ["no-ties", "one-zero", "two-zeros", "all-zeros"])
@pytest.mark.parametrize("scattered", [False, True], ids=["all_reduce", "reduce_scatter"])
def test_product_of_complex(run4: Callable[..., list[Any]], table: str, scattered: bool) -> None:
    run4(factors, table, "product", scattered, torch.complex128)


def conjugate_factor() -> None:
    """The factor of a product is conjugated: d|xy|^2/dx = 2 x |y|^2."""
    mesh = mc.make_mesh({"a": 2})
    values = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)
    x = values[mesh.rank].clone().requires_grad_()
    mc.all_reduce(x, "a", "product", mesh=mesh).abs().square().backward()
    close(x.grad, 2 * values[mesh.rank] * values[1 - mesh.rank].abs() ** 2)


def test_factor_of_a_complex_product_is_conjugated() -> None:
    mc.launch(conjugate_factor, ranks=2)


def tie_with_nan() -> None:
    """Ranks that hold NaN are the ones that attain it."""
    mesh = mc.make_mesh({"a": 4})
    x = torch.tensor([math.nan if mesh.rank in (1, 3) else 9.0, 1.0], dtype=torch.float64, requires_grad=True)
    mc.all_reduce(x, "a", "max", mesh=mesh).sum().backward()
    close(x.grad, torch.tensor([0.5 if mesh.rank in (1, 3) else 0.0, 0.25], dtype=torch.float64))


def test_nan_shares_the_gradient_of_a_maximum(run4: Callable[..., list[Any]]) -> None:
    run4(tie_with_nan)


# ------------------------------------------------------------------------------------------------ gradient penalty


def penalty(n: int) -> tuple[Tensor, Tensor]:
    whole = seeded((n, 3), torch.float64, 5).div(7).requires_grad_()
    (g,) = torch.autograd.grad(whole.square().sum(0).tanh().sum(), whole, create_graph=True)
    loss = g.square().sum()
    return loss.detach(), torch.autograd.grad(loss, whole)[0]


def sharded_penalty() -> None:
    mesh = mc.make_mesh({"a": 4})
    x = seeded((4, 3), torch.float64, 5).div(7)[mesh.rank].requires_grad_()
    (g,) = torch.autograd.grad(mc.all_reduce(x**2, "a", mesh=mesh).tanh().sum(), x, create_graph=True)
    loss = mc.all_reduce(g.square().sum(), "a", mesh=mesh)
    loss.backward()
    expected, gradient = penalty(4)
    close(loss.detach(), expected)
    close(x.grad, gradient[mesh.rank])


def test_gradient_penalty_equals_the_unsharded_one(run4: Callable[..., list[Any]]) -> None:
    run4(sharded_penalty)


# ---------------------------------------------------------------------------------------------------------- pytrees

TREE_OPS: dict[str, dict[str, Any]] = {
    "pvary": {}, "all_reduce": {"op": "mean"}, "all_gather": {"dim": -1}, "all_gather_invariant": {"dim": 0},
    "shard": {"dim": 0}, "reduce_scatter": {"dim": 0}, "all_to_all": {"split_dim": 0, "concat_dim": -1},
    "permute": {"perm": [(0, 2), (2, 3)]}, "shift": {"offset": -1}, "scan": {"op": "product"}, "broadcast": {"src": 1},
}  # fmt: skip
SHAPES = {"w": (4, 2), "b": (8,), "deep": (4, 1, 3), "none": (0, 2)}


def tree(rank: int) -> dict[str, Any]:
    """Float32 and float64 leaves in dicts, lists and tuples."""
    leaves = {name: seeded(shape, torch.float64, rank, i) for i, (name, shape) in enumerate(SHAPES.items())}
    return {
        "first": [leaves["w"], (leaves["b"].float(), leaves["deep"])],
        "second": {"again": leaves["w"].float() * 2, "strided": leaves["w"].t().contiguous().t(), "n": leaves["none"]},
    }


def leaves_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [leaf for part in parts for leaf in leaves_of(part)]


def structure(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: structure(part) for key, part in value.items()}
    return type(value) if isinstance(value, Tensor) else (type(value), [structure(part) for part in value])


def trees(op: str, bucket_mb: float) -> None:
    """A pytree gives what its leaves give one by one, gradients of two orders included."""
    mesh = mc.make_mesh({"a": 4})
    invariant = op in ("pvary", "shard")
    call, kwargs = getattr(mc, op), TREE_OPS[op]
    whole, single = (tree(0 if invariant else mesh.rank) for _ in range(2))
    for leaf in [*leaves_of(whole), *leaves_of(single)]:
        leaf.requires_grad_()
    result = call(whole, "a", **kwargs, mesh=mesh, bucket_mb=bucket_mb)
    assert structure(result) == structure(whole)
    apart = [call(leaf, "a", **kwargs, mesh=mesh) for leaf in leaves_of(single)]
    close(leaves_of(result), apart)

    def twice(ys: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(sum((y.double() ** 3).sum() for y in ys), xs, create_graph=True)
        return [*first, *torch.autograd.grad(sum((g.double() ** 2).sum() for g in first), xs)]

    close(twice(leaves_of(result), leaves_of(whole)), twice(apart, leaves_of(single)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bucket_mb", [25, 1e-5], ids=["one-bucket", "small-buckets"])
@pytest.mark.parametrize("op", TREE_OPS)
def test_a_pytree_gives_what_its_leaves_give(run4: Callable[..., list[Any]], op: str, bucket_mb: float) -> None:
    run4(trees, op, bucket_mb)


def shared_leaf(op: str) -> None:
    """A tensor that stands twice in a tree gets both gradients."""
    mesh = mc.make_mesh({"a": 4})
    call, kwargs = getattr(mc, op), TREE_OPS[op]
    x = seeded((4, 2), torch.float64, 0 if op in ("pvary", "shard") else mesh.rank).requires_grad_()
    ys = call([x, {"again": x}], "a", **kwargs, mesh=mesh)
    (both,) = torch.autograd.grad((ys[0] * 2).sum() + (ys[1]["again"] ** 2).sum(), x)
    y = call(x, "a", **kwargs, mesh=mesh)
    (expected,) = torch.autograd.grad((y * 2).sum() + (y**2).sum(), x)
    close(both, expected)


@pytest.mark.parametrize("op", TREE_OPS)
def test_a_leaf_that_stands_twice(run4: Callable[..., list[Any]], op: str) -> None:
    run4(shared_leaf, op)


def partly_trained(op: str) -> None:
    """A leaf without a gradient beside one with."""
    mesh = mc.make_mesh({"a": 4})
    frozen, trained = (seeded((4, 2), torch.float64, i) for i in range(2))
    trained.requires_grad_()
    ys = getattr(mc, op)((frozen, trained), "a", **TREE_OPS[op], mesh=mesh)
    ys[1].sum().backward()
    assert frozen.grad is None
    alone = trained.detach().clone().requires_grad_()
    getattr(mc, op)(alone, "a", **TREE_OPS[op], mesh=mesh).sum().backward()
    close(trained.grad, alone.grad)


@pytest.mark.parametrize("op", TREE_OPS)
def test_a_leaf_without_gradient(run4: Callable[..., list[Any]], op: str) -> None:
    run4(partly_trained, op)


def integers_through_pvary() -> None:
    mesh = mc.make_mesh({"a": 2})
    ids, flags, w = torch.arange(3), torch.tensor([True]), torch.ones(2, dtype=torch.complex128, requires_grad=True)
    varied = mc.pvary({"ids": ids, "w": w, "flags": [flags]}, "a", mesh=mesh)
    assert varied["ids"] is ids
    assert varied["flags"][0] is flags
    (varied["w"] * (1 + mesh.rank)).real.sum().backward()
    close(w.grad, torch.full((2,), 3.0, dtype=torch.complex128))
    assert mc.pvary(ids, "a", mesh=mesh).tolist() == [0, 1, 2]
    assert mc.pvary({}, "a", mesh=mesh) == {}


def test_integer_leaves_pass_pvary() -> None:
    mc.launch(integers_through_pvary, ranks=2)


def unused_leaves() -> None:
    """The gradient of a leaf that some ranks do not use is summed over the ranks that do, with no rank left waiting."""
    mesh = mc.make_mesh({"a": 4})
    used, maybe = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    varied = mc.pvary([used, maybe], "a", mesh=mesh)
    loss = varied[0].sum() + (varied[1].sum() * 5 if mesh.rank == 2 else 0)
    loss.backward()
    close(used.grad, torch.full((2,), 4.0, dtype=torch.float64))
    close(maybe.grad, torch.full((2,), 5.0, dtype=torch.float64))


def test_a_leaf_that_one_rank_alone_uses(run4: Callable[..., list[Any]]) -> None:
    run4(unused_leaves)


# ------------------------------------------------------------------------------------------------------ autograd's ways


def accumulated() -> None:
    mesh = mc.make_mesh({"a": 4})
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for step in range(3):
        (mc.pvary(w, "a", mesh=mesh) * (mesh.rank + step)).sum().backward()
    close(w.grad, torch.full((2,), 6.0 + 10.0 + 14.0, dtype=torch.float64))


def test_gradients_accumulate(run4: Callable[..., list[Any]]) -> None:
    run4(accumulated)


def in_place_after() -> None:
    """Results and inputs are the user's: changing them spoils no gradient of what is linear, and is noticed for the others."""
    mesh = mc.make_mesh({"a": 2})
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    y = mc.all_reduce(x * 1, "a", mesh=mesh)
    y.mul_(3)
    y.sum().backward()
    close(x.grad, torch.full((2,), 3.0, dtype=torch.float64))
    y = mc.all_reduce(x * 1, "a", "product", mesh=mesh)
    y.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_changing_a_result_in_place() -> None:
    mc.launch(in_place_after, ranks=2)


def not_its_own(ranks: int, traced: bool) -> list[str]:
    """The collectives after whose backward ``.grad`` is in memory of the gradient that backward was given."""
    mesh = mc.make_mesh({"a": ranks})
    place, oracle, found = mesh.axis("a"), Oracle(mesh.shape), []
    with mc.trace() if traced else contextlib.nullcontext():
        for case in DIFFERENTIABLE:
            for how, more in {"": {}, ", later": {"async_op": True}, ", in time": {"timeout": 60.0}}.items():
                if case.op in ("pvary", "shard") and "timeout" in more:  # nobody waits in them
                    continue
                x = case.inputs(oracle, "a", torch.float64)[mesh.rank].clone().requires_grad_()
                kwargs = case.kwargs(ranks) | case.own(ranks, place.index) | more
                y = mc.wait(getattr(mc, case.op)(x, "a", mesh=mesh, **kwargs))
                g = torch.ones_like(y)
                y.backward(g)
                assert x.grad is not None
                kept = x.grad.clone()
                g.zero_()
                found += [case.name + how] * (not torch.equal(x.grad, kept))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
def test_gradients_have_memory_of_their_own(ranks: int, traced: bool) -> None:
    """Who changes what backward was given changes no ``.grad``, as with torch's operations."""
    assert mc.launch(not_its_own, ranks=ranks, args=(ranks, traced)) == [[]] * ranks


def not_its_own_on_processes() -> list[str]:
    return not_its_own(4, False)


def test_gradients_have_memory_of_their_own_on_processes(pool4: Any) -> None:
    assert pool4.run(not_its_own_on_processes) == [[]] * 4


def not_written_to(ranks: int) -> list[str]:
    """The linear collectives whose result autograd has not let one write to, or which then had another gradient."""
    mesh = mc.make_mesh({"a": ranks})
    place, oracle, found = mesh.axis("a"), Oracle(mesh.shape), []
    for case in LINEAR:
        if case.op == "pvary":  # a view, as it says
            continue
        for how, more in {"": {}, ", later": {"async_op": True}}.items():
            x = case.inputs(oracle, "a", torch.float64)[mesh.rank].clone().requires_grad_()
            kwargs = case.kwargs(ranks) | case.own(ranks, place.index) | more
            y = mc.wait(getattr(mc, case.op)(x, "a", mesh=mesh, **kwargs))
            (expected,) = torch.autograd.grad(y, x, torch.full_like(y, 3), retain_graph=True)
            try:
                y.mul_(3)
            except RuntimeError:
                found.append(case.name + how)  # the others do not wait for its backward: all write, or none
            else:
                (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
                found += [case.name + how + ": gradient"] * (not torch.equal(g, expected))
    return found


@pytest.mark.parametrize("ranks", [1, 4])
def test_results_may_be_written_to(ranks: int) -> None:
    """On every rank and whatever has moved them: the memory is theirs."""
    assert mc.launch(not_written_to, ranks=ranks, args=(ranks,)) == [[]] * ranks


def test_results_of_processes_may_be_written_to(pool4: Any) -> None:
    assert pool4.run(not_written_to, 4) == [[]] * 4


def no_grad_results() -> list[bool]:
    mesh = mc.make_mesh({"a": 2})
    x = torch.ones(2, requires_grad=True)
    found = [mc.all_reduce(x, "a", mesh=mesh).requires_grad, mc.all_reduce([x], "a", mesh=mesh)[0].requires_grad]
    with torch.no_grad():
        found += [mc.all_reduce(x, "a", mesh=mesh).requires_grad, mc.all_gather([x], "a", mesh=mesh)[0].requires_grad]
    return found


def test_grad_mode_is_obeyed() -> None:
    assert mc.launch(no_grad_results, ranks=2) == [[True, True, False, False]] * 2


def checkpointed() -> None:
    mesh = mc.make_mesh({"a": 4})
    x = seeded((3,), torch.float64, mesh.rank).requires_grad_()

    def block(x: Tensor) -> Tensor:
        return mc.all_gather(x.sin(), "a", mesh=mesh).square()

    (plain,) = torch.autograd.grad(block(x).sum(), x)
    y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    close(torch.autograd.grad(y.sum(), x)[0], plain)


def test_checkpoint_recomputes_a_collective(run4: Callable[..., list[Any]]) -> None:
    run4(checkpointed)


# ------------------------------------------------------------------------------------------------------------- scan


def scanned(x: Tensor, op: str, exclusive: bool, reverse: bool, weights: Tensor) -> Tensor:
    """The weighted sum of what all ranks get, where it is finite, from the rows of ``x``."""
    ys = torch.stack(Oracle({"a": len(x)}).scan(list(x.unbind()), "a", op, exclusive, reverse))
    return torch.where(ys.isinf(), 0, ys * weights).sum()


def scans(op: str, exclusive: bool, reverse: bool) -> None:
    """First and second derivatives, tangents and works, with zeros and ties in the way."""
    mesh = mc.make_mesh({"a": 4})
    whole, weights, other = (
        torch.randint(-2, 3, (4, 8), generator=torch.Generator().manual_seed(seed)).to(torch.float64)
        for seed in (1, 2, 3)
    )
    whole = whole if op in ("max", "min") else whole / 2
    leaf, how, i = whole.clone().requires_grad_(), {"op": op, "exclusive": exclusive, "reverse": reverse}, mesh.rank
    mine = whole[i].clone().requires_grad_()

    def loss(x: Tensor, **more: Any) -> Tensor:
        y = mc.scan(x, "a", mesh=mesh, **how, **more)
        y = y.wait() if more else y
        return torch.where(y.isinf(), 0, y * weights[i]).sum()

    if op in ("max", "min"):  # torch gives all of it to one of those that attain the extreme
        near = [whole[: i + 1] if not reverse else whole[i:].flip(0) for i in range(4)]
        ends = [part[:-1] if exclusive else part for part in near]
        expected = torch.zeros_like(whole)
        for rank, part in enumerate(ends):
            if len(part):
                hits = (part == (part.amax(0) if op == "max" else part.amin(0))).to(torch.float64)
                share = weights[rank] * hits / hits.sum(0)
                rows = list(range(len(part))) if not reverse else [3 - k for k in range(len(part))]
                expected[rows] += share
        assert_close(torch.autograd.grad(loss(mine), mine)[0], expected[i])
    else:
        (expected,) = torch.autograd.grad(scanned(leaf, op, exclusive, reverse, weights), leaf, create_graph=True)
        (got,) = torch.autograd.grad(loss(mine), mine, create_graph=True)
        assert_close(got, expected[i])
        if op == "product":
            (twice,) = torch.autograd.grad((expected * other).sum(), leaf)
            assert_close(torch.autograd.grad((got * other[i]).sum(), mine)[0], twice[i])
    (later,) = torch.autograd.grad(loss(mine, async_op=True), mine)
    assert_close(later, expected[i].detach())
    _, tangent = torch.func.jvp(loss, (whole[i],), (other[i],))
    total = mc.all_reduce(tangent, "a", mesh=mesh)
    assert_close(total, (expected.detach() * other).sum())


@pytest.mark.parametrize("op", ["sum", "product", "max", "min"])
def test_scan_equals_the_unsharded_one(run4: Callable[..., list[Any]], op: str) -> None:
    for exclusive, reverse in ((False, False), (True, False), (False, True), (True, True)):
        run4(scans, op, exclusive, reverse)


def scans_of_nan() -> None:
    mesh = mc.make_mesh({"a": 4})
    x = torch.full((2,), float("nan") if mesh.rank == 1 else 1.0, dtype=torch.float64, requires_grad=True)
    y = mc.scan(x, "a", "max", mesh=mesh)
    assert y.isnan().all() == (mesh.rank > 0)
    (g,) = torch.autograd.grad(y, x, torch.ones(2, dtype=torch.float64))
    assert g.tolist() == [[1.0, 3.0, 0.0, 0.0][mesh.rank]] * 2
    large = mc.scan(
        torch.tensor([torch.inf if mesh.rank == 0 else 0.1], dtype=torch.float64),
        "a",
        reverse=True,
        exclusive=True,
        mesh=mesh,
    )
    assert_close(large, torch.tensor([0.1 * (3 - mesh.rank)], dtype=torch.float64))


def test_scan_of_nan_and_infinity(run4: Callable[..., list[Any]]) -> None:
    run4(scans_of_nan)


def broadcasts_added_up() -> None:
    """The gradients of two tensors are two tensors, also where one gradient reaches both: they may be written to."""
    mesh = mc.make_mesh({"a": 4})
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    ((mc.broadcast(x, "a", 1, mesh=mesh) + mc.broadcast(y, "a", 1, mesh=mesh)) * torch.full((3,), 2.0)).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    x.grad.zero_()
    close(y.grad, torch.full((3,), 2.0 * (mesh.rank == 1)))
    x.grad, g = None, torch.ones(3)
    mc.broadcast(x, "a", 1, mesh=mesh).backward(g)
    x.grad.zero_()
    close(g, torch.ones(3))


def test_broadcasts_added_up(run4: Callable[..., list[Any]]) -> None:
    run4(broadcasts_added_up)
