"""torch.func and forward-mode AD through every collective: no tangent dropped, no batch mixed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from cases import BY_NAME, CASES, grid, seeded
from oracle import Oracle, distinct
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.testing import assert_close

import meshcomm as mc

SHAPE = (2, 2)
AXES: list[Any] = ["b", ("b", "a")]
F64 = torch.float64
ALIKE = {  # to a transform: others stand for them, and test_gradients has them all
    "all_gather-middle", "all_gather_invariant", "all_gather_invariant-0-d", "all_gather_invariant-middle", "all_reduce-min",
    "reduce_scatter-mean", "reduce_scatter-min", "reduce_scatter-sizes-mean", "all_to_all", "permute-nobody", "shift-back-2",
    "shift-no-wrap-back", "broadcast", "shard-dim-1", "scan-min",
}  # fmt: skip
NAMES = [case.name for case in CASES if F64 in case.dtypes and case.name not in ALIKE]
SMALL = [  # jacobians and hessians take a row per element
    "pvary", "all_reduce-sum", "all_reduce-mean", "all_reduce-max", "all_reduce-product", "all_gather", "all_gather_invariant-dim-1",
    "shard", "reduce_scatter-sum", "reduce_scatter-product", "reduce_scatter-sizes-max", "all_to_all-0-1", "all_to_all-sizes",
    "permute", "shift", "shift-no-wrap", "broadcast-last", "scan-sum-exclusive", "scan-product", "scan-max",
]  # fmt: skip


def close(actual: Any, expected: Any, what: str) -> None:
    assert_close(actual, expected, rtol=1e-11, atol=1e-11, msg=lambda text: f"{what}: {text}")


class Everyone:
    """One collective over one axis on all ranks, by the oracle: worked out once for all ranks of a process."""

    def __init__(self, name: str, axis: Any) -> None:
        self.case, self.axis, self.oracle = BY_NAME[name], axis, Oracle(grid(SHAPE))
        self.along_out = axis if self.case.invariant_out else ()
        self.kept: dict[Any, Any] = {}
        self.xs = self.like_input(0)

    def once(self, key: tuple[Any, ...], fn: Callable[[], Any], *lists: list[Tensor]) -> Any:
        """``fn()``, remembered for these lists of tensors, which are kept alive: they are known by their addresses."""
        key = (*key, *(id(x) for xs in lists for x in xs))
        if key not in self.kept:
            self.kept[key] = lists, fn()
        return self.kept[key][1]

    def like_input(self, seed: int) -> list[Tensor]:
        """Values of the type and the shapes of the input."""
        make = lambda: shared(self.case.inputs(self.oracle, self.axis, F64, seed), lambda x: x / 3)  # noqa: E731
        found: list[Tensor] = self.once(("in", seed), make)
        return found

    def like_output(self, seed: int) -> list[Tensor]:
        shapes = [y.shape for y in self.all(self.xs)]
        make = lambda: self.oracle.spread(lambda rank: seeded(shapes[rank], F64, rank, seed), self.along_out)  # noqa: E731
        found: list[Tensor] = self.once(("out", seed), make)
        return found

    def basis(self, xs: list[Tensor]) -> list[list[Tensor]]:
        """Each unit vector, the same on all ranks, of the type and shape of ``xs``."""
        units = torch.eye(xs[0].numel(), dtype=F64).unbind()
        make = lambda: [shared(xs, lambda x, unit=unit: unit.view(x.shape).clone()) for unit in units]  # noqa: E731
        found: list[list[Tensor]] = self.once(("basis",), make, xs)
        return found

    def compute(self, xs: list[Tensor]) -> list[Tensor]:
        """The collective between two non-linear functions, on all ranks."""
        inner = self.oracle.local(lambda x: x.sin() + 2, xs)
        return self.oracle.local(torch.tanh, self.case.reference(self.oracle, inner, self.axis))

    def all(self, xs: list[Tensor]) -> list[Tensor]:
        found: list[Tensor] = self.once(("all",), lambda: self.compute(xs), xs)
        return found

    def push(self, xs: list[Tensor], ts: list[Tensor], order: int = 1) -> tuple[Tensor, ...]:
        """Everybody's tangents of the results, or the derivatives of that order along the same direction."""
        leaves = distinct(xs)
        tangent_of = {id(x): t for x, t in zip(xs, ts, strict=True)}
        at = {id(x): i for i, x in enumerate(leaves)}
        tangents = tuple(tangent_of[id(x)] for x in leaves)

        def derivative(count: int) -> Callable[..., tuple[Tensor, ...]]:
            if count == 0:
                return lambda *values: tuple(self.compute([values[at[id(x)]] for x in xs]))
            return lambda *values: jvp(derivative(count - 1), values, tangents)[1]

        found: tuple[Tensor, ...] = self.once(("push", order), lambda: derivative(order)(*leaves), xs, ts)
        return found

    def pull(self, xs: list[Tensor], gs: list[Tensor]) -> list[Tensor]:
        """Everybody's gradients of the sum over all logical values of <value, g>."""

        def work() -> list[Tensor]:
            memo = {id(x): x.detach().clone().requires_grad_() for x in xs}
            ys = self.compute([memo[id(x)] for x in xs])
            total = torch.stack(list({id(y): (y * g).sum() for y, g in zip(ys, gs, strict=True)}.values())).sum()
            if not total.requires_grad:
                return [torch.zeros_like(x) for x in xs]
            found = torch.autograd.grad(total, list(memo.values()), materialize_grads=True)
            of = dict(zip(memo, found, strict=True))
            return [of[id(x)] for x in xs]

        found: list[Tensor] = self.once(("pull",), work, xs, gs)
        return found


everyone = lru_cache(maxsize=4)(Everyone)


class Setting:
    """The same for one rank: its own function, and what the oracle says of it."""

    def __init__(self, name: str, axis: Any) -> None:
        self.everyone = everyone(name, axis)
        self.case, self.axis, self.mesh = self.everyone.case, axis, mc.make_mesh(grid(SHAPE))
        self.rank = self.mesh.rank
        self.xs = self.everyone.xs
        self.x = self.xs[self.rank]
        self.like_input, self.like_output, self.all = (
            self.everyone.like_input,
            self.everyone.like_output,
            self.everyone.all,
        )
        self.what = f"{name} over {axis!r} on rank {self.rank}"

    def one(self, x: Tensor) -> Tensor:
        """The collective between two non-linear functions, on this rank."""
        return self.case.call(x.sin() + 2, self.axis, self.mesh).tanh()

    def push(self, xs: list[Tensor], ts: list[Tensor], order: int = 1) -> Tensor:
        return self.everyone.push(xs, ts, order)[self.rank]

    def pull(self, xs: list[Tensor], gs: list[Tensor]) -> Tensor:
        return self.everyone.pull(xs, gs)[self.rank]


def shared(xs: list[Tensor], fn: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """``fn`` of each, with equal objects staying one."""
    memo = {id(x): fn(x) for x in xs}
    return [memo[id(x)] for x in xs]


# ----------------------------------------------------------------------------------------------- one function each


def check_grad(s: Setting) -> None:
    gs = s.like_output(1)
    found = grad(lambda x: (s.one(x) * gs[s.rank]).sum())(s.x)
    close(found, s.pull(s.xs, gs), s.what)


def check_vjp(s: Setting) -> None:
    gs = s.like_output(1)
    y, pull = vjp(s.one, s.x)
    close(y, s.all(s.xs)[s.rank], s.what)
    close(pull(gs[s.rank])[0], s.pull(s.xs, gs), s.what)


def check_jvp(s: Setting) -> None:
    ts = s.like_input(2)
    y, tangent = jvp(s.one, (s.x,), (ts[s.rank],))
    close(y, s.all(s.xs)[s.rank], s.what)
    close(tangent, s.push(s.xs, ts), s.what)


def check_jvp_of_jvp(s: Setting) -> None:
    """The second derivative along one direction."""
    ts = s.like_input(2)
    expected, t = s.push(s.xs, ts, order=2), ts[s.rank]
    close(jvp(lambda x: jvp(s.one, (x,), (t,))[1], (s.x,), (t,))[1], expected, s.what)


def check_dual_level(s: Setting) -> None:
    ts = s.like_input(2)
    with forward_ad.dual_level():
        y = s.one(forward_ad.make_dual(s.x, ts[s.rank]))
        primal, tangent = forward_ad.unpack_dual(y)
    assert tangent is not None, f"{s.what}: tangent dropped"
    close(primal, s.all(s.xs)[s.rank], s.what)
    close(tangent, s.push(s.xs, ts), s.what)


def check_grad_of_grad(s: Setting) -> None:
    """A gradient penalty by torch.func equals the one by autograd (which test_gradients compares with the oracle)."""
    gs = s.like_output(1)[s.rank]

    def penalty(x: Tensor) -> Tensor:
        return grad(lambda x: (s.one(x) * gs).sum())(x).square().sum()

    x = s.x.clone().requires_grad_()
    (first,) = torch.autograd.grad((s.one(x) * gs).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(first.square().sum(), x)
    close(grad(penalty)(s.x), expected, s.what)


def check_forward_over_reverse(s: Setting) -> None:
    """A Hessian-vector product: jvp of grad equals grad of <grad, t>."""
    gs, t = s.like_output(1)[s.rank], s.like_input(2)[s.rank]
    first = grad(lambda x: (s.one(x) * gs).sum())
    expected = grad(lambda x: (first(x) * t).sum())(s.x)
    close(jvp(first, (s.x,), (t,))[1], expected, s.what)


def check_vmap(s: Setting) -> None:
    batch = [s.like_input(seed) for seed in (3, 4, 5)]
    expected = torch.stack([s.all(xs)[s.rank] for xs in batch])
    for dim in (0, 1, -1):
        if dim == 1 and not s.x.ndim:
            continue
        stacked = torch.stack([xs[s.rank] for xs in batch], dim)
        close(vmap(s.one, in_dims=dim)(stacked), expected, f"{s.what}, in_dims={dim}")
        out = vmap(s.one, in_dims=dim, out_dims=-1)(stacked)
        close(out, expected.movedim(0, -1), f"{s.what}, in_dims={dim}, out_dims=-1")


def check_vmap_differing_dims(s: Setting) -> None:
    """Ranks may hold the batch at different places."""
    if not s.x.ndim:
        return
    batch = [s.like_input(seed) for seed in (3, 4, 5)]
    dim = s.rank % 2
    found = vmap(s.one, in_dims=dim)(torch.stack([xs[s.rank] for xs in batch], dim))
    close(found, torch.stack([s.all(xs)[s.rank] for xs in batch]), s.what)


def check_vmap_unbatched(s: Setting) -> None:
    """What goes in is the same for the whole batch; only what is done with the result differs."""
    factors = torch.tensor([1.0, -2.0, 5.0], dtype=F64)
    found = vmap(lambda factor, x: factor * s.one(x), in_dims=(0, None))(factors, s.x)
    y = s.all(s.xs)[s.rank]
    close(found, torch.stack([factor * y for factor in factors]), s.what)


def check_nested_vmap(s: Setting) -> None:
    table = [[s.like_input(10 * i + j) for j in range(2)] for i in range(3)]
    expected = torch.stack([torch.stack([s.all(xs)[s.rank] for xs in row]) for row in table])
    stacked = torch.stack([torch.stack([xs[s.rank] for xs in row], -1) for row in table], 0)
    close(vmap(vmap(s.one, in_dims=-1), in_dims=0)(stacked), expected, s.what)
    turned = stacked.movedim(0, -1)
    close(vmap(vmap(s.one, in_dims=-1), in_dims=-1)(turned), expected, s.what)


def check_vmap_of_grad(s: Setting) -> None:
    """Gradients per sample."""
    batch, gs = [s.like_input(seed) for seed in (3, 4, 5)], s.like_output(1)
    per_sample = vmap(grad(lambda x: (s.one(x) * gs[s.rank]).sum()))
    expected = torch.stack([s.pull(xs, gs) for xs in batch])
    close(per_sample(torch.stack([xs[s.rank] for xs in batch])), expected, s.what)


def check_grad_of_vmap(s: Setting) -> None:
    batch, gs = [s.like_input(seed) for seed in (3, 4, 5)], s.like_output(1)
    expected = torch.stack([s.pull(xs, gs) for xs in batch])
    stacked = torch.stack([xs[s.rank] for xs in batch])
    close(grad(lambda xs: (vmap(s.one)(xs) * gs[s.rank]).sum())(stacked), expected, s.what)
    leaf = stacked.clone().requires_grad_()
    close(torch.autograd.grad((vmap(s.one)(leaf) * gs[s.rank]).sum(), leaf)[0], expected, s.what)


def check_vmap_of_jvp(s: Setting) -> None:
    batch, ts = [s.like_input(seed) for seed in (3, 4)], [s.like_input(seed) for seed in (6, 7)]
    expected = torch.stack([s.push(xs, t) for xs, t in zip(batch, ts, strict=True)])
    stacked, tangents = (torch.stack([xs[s.rank] for xs in each]) for each in (batch, ts))
    found = vmap(lambda x, t: jvp(s.one, (x,), (t,))[1])(stacked, tangents)
    close(found, expected, s.what)
    close(jvp(vmap(s.one), (stacked,), (tangents,))[1], expected, s.what)


EACH = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}  # fmt: skip


def every(check: str) -> None:
    for name in SMALL:
        EACH[check](Setting(name, "b"))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", EACH)
def test_transform(check: str, name: str) -> None:
    """Of neighbours in either list one is over an axis and the other one over a tuple: a transform does not see which."""
    axis = AXES[(list(EACH).index(check) + NAMES.index(name)) % 2]
    mc.launch(lambda: EACH[check](Setting(name, axis)), ranks=4)


@pytest.mark.parametrize(
    "check", [pytest.param(each, marks=pytest.mark.thorough if at % 6 else []) for at, each in enumerate(EACH)]
)
def test_transform_on_processes(pool4: Any, check: str) -> None:
    pool4.run(every, check)


# ----------------------------------------------------------------------------------------------------- jacobians


def units(x: Tensor) -> list[Tensor]:
    return [row.view(x.shape) for row in torch.eye(x.numel(), dtype=F64)]


def jacobians(name: str, axis: Any) -> None:
    """A row or column of a jacobian is one gradient or tangent, seeded with the same unit vector on all ranks."""
    s = Setting(name, axis)
    ys = s.all(s.xs)
    if len({y.shape for y in ys}) == 1:
        rows = [s.pull(s.xs, unit) for unit in s.everyone.basis(ys)]
        expected = torch.stack(rows).view(*ys[s.rank].shape, *s.x.shape)
        close(jacrev(s.one)(s.x), expected, f"jacrev, {s.what}")
        close(jacrev(s.one, chunk_size=2)(s.x), expected, f"jacrev in chunks, {s.what}")
    if len({x.shape for x in s.xs}) == 1:
        columns = [s.push(s.xs, unit) for unit in s.everyone.basis(s.xs)]
        expected = torch.stack(columns, -1).view(*ys[s.rank].shape, *s.x.shape)
        close(jacfwd(s.one)(s.x), expected, f"jacfwd, {s.what}")


@pytest.mark.parametrize("name", SMALL)
def test_jacobians(name: str) -> None:
    mc.launch(jacobians, ranks=4, args=(name, AXES[SMALL.index(name) % 2]))


def some_jacobians() -> None:
    for name in SMALL:
        jacobians(name, "b")


@pytest.mark.thorough
def test_jacobians_on_processes(pool4: Any) -> None:
    pool4.run(some_jacobians)


def hessians(name: str, axis: Any) -> None:
    """Column k of the Hessian on a rank: how its gradient changes when element k changes on all ranks."""
    s = Setting(name, axis)
    if len({x.shape for x in s.xs}) > 1:
        return
    memo = {id(x): x.detach().clone().requires_grad_() for x in s.xs}
    xs = [memo[id(x)] for x in s.xs]
    gs = s.like_output(1)
    terms = {id(y): (y * g).sum() for y, g in zip(s.everyone.compute(xs), gs, strict=True)}
    leaves = distinct(xs)
    firsts = torch.autograd.grad(
        torch.stack(list(terms.values())).sum(), leaves, create_graph=True, materialize_grads=True
    )
    columns = []
    for unit in units(s.x):
        # By symmetry: the gradient of the sum over ranks of <gradient, unit>.
        along = sum((first * unit).sum() for first in firsts)
        columns.append(torch.autograd.grad(along, xs[s.rank], retain_graph=True, materialize_grads=True)[0])
    expected = torch.stack(columns, -1).view(*s.x.shape, *s.x.shape)
    local = lambda x: (s.one(x) * gs[s.rank]).sum()  # noqa: E731
    close(hessian(local)(s.x), expected, f"hessian, {s.what}")
    close(jacrev(jacrev(local))(s.x), expected, f"jacrev of jacrev, {s.what}")


@pytest.mark.one_in(2, alike=True)
@pytest.mark.parametrize("name", SMALL)
def test_hessian(name: str) -> None:
    mc.launch(hessians, ranks=4, args=(name, AXES[1 - SMALL.index(name) % 2]))


# ------------------------------------------------------------------------------------------ modules, trees, mixtures


class Parallel(torch.nn.Module):
    """A column- and a row-parallel layer."""

    def __init__(self, mesh: mc.Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.up = torch.nn.Parameter(seeded((3, 4), F64, 1, mesh.rank) / 4)
        self.down = torch.nn.Parameter(seeded((4, 3), F64, 2, mesh.rank) / 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = mc.pvary(x, "a", mesh=self.mesh) @ self.up
        return mc.all_reduce(hidden.tanh() @ self.down, "a", mesh=self.mesh)


def functional() -> None:
    """grad of functional_call, and vmap of it per sample, against autograd."""
    mesh = mc.make_mesh({"a": 4})
    module = Parallel(mesh)
    params = {name: value.detach() for name, value in module.named_parameters()}
    batch = seeded((5, 3), F64, 3) / 2

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, params, (x,)).square().sum()

    found = grad(loss)(params, batch)
    expected = torch.autograd.grad(module(batch).square().sum(), list(module.parameters()))
    close(list(found.values()), list(expected), "functional_call")
    per_sample = vmap(grad(loss), in_dims=(None, 0))(params, batch)
    for i, x in enumerate(batch):
        one = torch.autograd.grad(module(x[None]).square().sum(), list(module.parameters()))
        close([g[i] for g in per_sample.values()], list(one), f"sample {i}")


def test_functional_call(run4: Callable[..., list[Any]]) -> None:
    run4(functional)


def ensembles() -> None:
    """vmap over stacked parameters with the data unbatched."""
    mesh = mc.make_mesh({"a": 4})
    module = Parallel(mesh)
    stacked = {
        name: torch.stack([value.detach() * (i + 1) for i in range(3)]) for name, value in module.named_parameters()
    }
    x = seeded((2, 3), F64, 4)
    found = vmap(lambda params: functional_call(module, params, (x,)))(stacked)
    for i in range(3):
        params = {name: value[i] for name, value in stacked.items()}
        close(found[i], functional_call(module, params, (x,)).detach(), f"member {i}")


def test_an_ensemble_of_models(run4: Callable[..., list[Any]]) -> None:
    run4(ensembles)


TREES: dict[str, dict[str, Any]] = {
    "pvary": {}, "all_reduce": {"op": "product"}, "all_gather": {"dim": 1}, "all_gather_invariant": {}, "shard": {},
    "reduce_scatter": {}, "all_to_all": {"split_dim": 0, "concat_dim": 1}, "permute": {"perm": [(0, 1), (1, 3)]},
    "shift": {}, "scan": {"op": "max"}, "broadcast": {"src": 3},
}  # fmt: skip


def trees(op: str) -> None:
    """A pytree under each transform gives what its leaves give alone; a leaf may be unbatched or without tangent."""
    mesh = mc.make_mesh({"a": 4})
    source = 0 if op in ("pvary", "shard") else mesh.rank
    w, b = (seeded((4, 2), F64, source, i) / 2 for i in range(2))
    tw, tb = (seeded((4, 2), F64, source, i + 5) for i in range(2))
    call = lambda tree: getattr(mc, op)(tree, "a", **TREES[op], mesh=mesh)  # noqa: E731
    y, tangent = jvp(lambda w, b: call({"w": w, "rest": [b]}), (w, b), (tw, tb))
    for found, leaf, t in ((0, w, tw), (1, b, tb)):
        expected = jvp(call, (leaf,), (t,))
        pick = (lambda tree: tree["w"]) if found == 0 else (lambda tree: tree["rest"][0])
        close((pick(y), pick(tangent)), expected, f"jvp of {op}")
    only = jvp(lambda w: call([w, b]), (w,), (tw,))[1]
    close(only[0], jvp(call, (w,), (tw,))[1], f"{op}: tangent of one leaf")
    close(only[1], torch.zeros_like(only[1]), f"{op}: the other leaf has none")
    batch = torch.stack([w, 2 * w, 3 - w], 1)
    found = vmap(lambda w, b: call([w, b]), in_dims=(1, None))(batch, b)
    close(found[0], torch.stack([call(batch[:, i]) for i in range(3)]), f"vmap of {op}")
    close(found[1], call(b).expand_as(found[1]), f"vmap of {op}, unbatched leaf")
    close(
        grad(lambda w: sum(y.square().sum() for y in call([w, b])))(w),
        grad(lambda w: call(w).square().sum())(w), f"grad of {op}",
    )  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("op", TREES)
def test_pytrees(run4: Callable[..., list[Any]], op: str) -> None:
    run4(trees, op)


def dual_beside_grad() -> None:
    """Forward over reverse with autograd's own dual numbers: a tensor that requires grad and has a tangent."""
    mesh = mc.make_mesh({"a": 4})
    x, t = seeded((3,), F64, mesh.rank) / 3, seeded((3,), F64, mesh.rank, 9)
    loss = lambda x: mc.all_reduce(x.sin(), "a", "product", mesh=mesh).square().sum()  # noqa: E731
    with forward_ad.dual_level():
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(forward_ad.make_dual(leaf, t)), leaf, create_graph=True)
        tangent = forward_ad.unpack_dual(g).tangent
    assert tangent is not None
    close(tangent.detach(), jvp(grad(loss), (x,), (t,))[1], "hessian-vector product")


def test_tangent_and_gradient_together(run4: Callable[..., list[Any]]) -> None:
    run4(dual_beside_grad)


def no_tangent() -> None:
    """A level is open and the input has no tangent: the result has none either, and its value is right."""
    mesh = mc.make_mesh({"a": 4})
    with forward_ad.dual_level():
        y = mc.all_reduce(torch.ones(2), "a", mesh=mesh)
        assert forward_ad.unpack_dual(y).tangent is None
    close(y, torch.full((2,), 4.0), "value")


def test_an_open_level_without_tangents(run4: Callable[..., list[Any]]) -> None:
    run4(no_tangent)


def integers() -> None:
    """Collectives without a derivative work under transforms."""
    mesh = mc.make_mesh({"a": 4})
    ids = torch.arange(6).view(3, 2) + mesh.rank
    found = vmap(lambda row: mc.all_gather(row, "a", mesh=mesh))(ids)
    assert found.tolist() == [[value + rank for rank in range(4) for value in row] for row in [[0, 1], [2, 3], [4, 5]]]
    top = vmap(lambda row: mc.all_reduce(row, "a", "max", mesh=mesh), in_dims=1)(ids)
    assert top.tolist() == [[3, 5, 7], [4, 6, 8]]

    def weighted(x: Tensor) -> Tensor:
        place = mc.axis_index("a", mesh=mesh)
        return mc.all_reduce(x * place, "a", mesh=mesh).sum()

    close(grad(weighted)(torch.ones(2, dtype=F64)), torch.full((2,), float(mesh.rank), dtype=F64), "axis_index")
    many = vmap(weighted)(torch.ones(3, 2, dtype=F64))
    close(many, torch.full((3,), 12.0, dtype=F64), "axis_index under vmap")


def test_integers_under_transforms(run4: Callable[..., list[Any]]) -> None:
    run4(integers)
