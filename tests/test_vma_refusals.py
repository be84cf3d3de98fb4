"""What the checker refuses, and what it lets through."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_check_vma import PROGRAMS, Fill, Scale
from torch import Tensor, nn
from torch.testing import assert_close
from vma_checks import F64, LINE, I, N, V, host, kind, on_ranks, ones, own, right, rows, same, sq, weight, zeros

import meshcomm as mc
from meshcomm import watch
from meshcomm.spmd.types.rules import torch_rules

# ------------------------------------------------------------------------------------------------------------- refusals


def apply_before(cls: Any) -> Any:
    """``cls.apply`` as it was before any check."""
    descriptor = torch.autograd.Function.__dict__["apply"]
    while hasattr(hook := getattr(descriptor, "__func__", None), "__wrapped__"):
        descriptor = hook.__wrapped__
    return descriptor.__get__(None, cls)


bound_before = apply_before(Scale)
bound_to_c: Any = super(torch.autograd.Function, Scale).apply


def write_past_the_graph() -> None:
    y = same() * 2
    y.detach().copy_(own().sum())
    y.sum()


def write_past_by_data() -> None:
    y = same() * 2
    y.data = own().sum(0).expand(3, 3)


def optimizer_of_unknown_state() -> None:
    w = same()
    with torch.no_grad():
        w.sub_(host())


def in_place_under_func() -> None:
    x = own()

    def f(w: Tensor) -> Tensor:
        y = w * 2
        y[0].add_(x[0])
        return y.sum()

    torch.func.grad(f)(same())


def past_the_graph_under_func() -> None:
    x = own()

    def f(w: Tensor) -> Tensor:
        y = w * 2
        y.detach().copy_(x.sum())
        return y.sum()

    torch.func.grad(f)(same())


def backward_of_other_type() -> None:
    same().sum().backward(own().sum())


def set_gradient() -> None:
    w = same()
    w.grad = own().sum(0).expand(3, 3)


def set_unknown_gradient() -> None:
    w = same()
    w.grad = host().expand(3, 3)


def reduced_gradients() -> None:
    w = same()
    (own() @ w).sum().backward()
    mc.all_reduce(w.grad, "dp")


def gradients_by_grad() -> None:
    w = same()
    (g,) = torch.autograd.grad((own() @ w).sum(), w)
    mc.all_reduce(g.square().sum(), "dp")


def norm_while_looking_up() -> None:
    w = same()
    F.embedding(mc.axis_index("dp").reshape(1), w * 5, max_norm=0.1)


def module_inside() -> None:
    with mc.check_vma(False):
        module = nn.Linear(3, 3, dtype=F64)
    module(own())


def takes_a_module() -> None:
    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
            return module(x)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
            return None, g

    Calls.apply(mc.mark_varying(nn.Linear(3, 3, dtype=F64), ()), own())  # type: ignore[no-untyped-call]


def function_in_place() -> None:
    Fill.apply(same() * 2, own().sum(0).expand(3, 3))  # type: ignore[no-untyped-call]


def thread() -> None:
    found = []
    x, w = own(), same()
    worker = threading.Thread(target=lambda: found.append(x @ w))
    worker.start()
    worker.join()
    found[0].sum()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "item": (lambda: own().sum().item(), "item .* makes a Python value of a tensor that varies along 'dp'"),
    "bool": (lambda: bool(own().sum() > 0), "__bool__ .* makes a Python value"),
    "if": (lambda: 1 if own().sum() else 0, "__bool__"),
    "int": (lambda: int(mc.axis_index("dp")), "__int__"),
    "float": (lambda: float(own().sum()), "__float__"),
    "complex": (lambda: complex(own().sum()), "__complex__"),
    "tolist": (lambda: own().tolist(), "tolist"),
    "numpy": (lambda: own().numpy(), "numpy"),
    "np.asarray": (lambda: np.asarray(own()), "__array__"),
    "equal": (lambda: torch.equal(own(), own()), "equal"),
    "allclose": (lambda: torch.allclose(own(), own()), "allclose"),
    "is_nonzero": (lambda: torch.is_nonzero(own().sum()), "is_nonzero"),
    "range": (lambda: range(mc.axis_index("dp")), "__index__"),
    "in": (lambda: 1.0 in own(), "__contains__"),
    "dlpack": (lambda: torch.utils.dlpack.from_dlpack(own()), "__dlpack__"),
    "mesh.rank": (lambda: mc.current_mesh().rank, r"mesh\.rank is a Python number .*(?s:.)*axis_index"),  # type: ignore[union-attr]
    "mesh.coordinate": (lambda: mc.current_mesh().coordinate, r"mesh\.coordinate is a Python number"),  # type: ignore[union-attr]
    "item of unknown": (lambda: host().sum().item(), "item .* made out of sight"),
    "a leaf of no type": (lambda: host().requires_grad_() * 2, "mul .* made out of sight(?s:.)*mark_varying"),
    "unknown beside a weight": (lambda: same() * host(), r"mul .* made out of sight(?s:.)*operand 1, f64\[3\]"),
    "what unknown was written into": (lambda: same() * zeros(3).copy_(host()), "into which copy_ at .* wrote"),
    "an array beside a weight": (lambda: same() * torch.tensor(np.ones(3)), "made out of sight"),
    "a step by unknown state": (optimizer_of_unknown_state, "sub_ .* made out of sight"),
    "x.data of unknown": (lambda: setattr(same(), "data", host()), r"x\.data = .* made out of sight"),
    "detach().copy_()": (write_past_the_graph, "went past the graph(?s:.)*a write in place at test_vma_refusals"),
    "x.data = ...": (write_past_by_data, "went past the graph"),
    "in place under func.grad": (in_place_under_func, "add_ .*under a transform(?s:.)*out of place"),
    "past the graph under func.grad": (past_the_graph_under_func, "went past the graph"),
    "gradient of other type": (backward_of_other_type, "backward .* is given a gradient that varies along 'dp'"),
    "x.grad = ...": (set_gradient, r"x\.grad = .* of another type"),
    "x.grad = unknown": (set_unknown_gradient, r"x\.grad = .* made out of sight"),
    "gradients reduced": (reduced_gradients, "all_reduce .* is invariant(?s:.)*reduced already by backward at"),
    "a norm of gradients reduced": (gradients_by_grad, "reduced already by backward at"),
    "a loss reduced twice": (lambda: mc.all_reduce(mc.all_reduce(own().sum(), "dp"), "dp"), "by all_reduce at"),
    "a sum of what never varied": (lambda: mc.all_reduce(same().sum(), "dp"), "multiplies it by the number"),
    "bits summed twice": (lambda: mc.all_reduce(mc.all_reduce(own().long(), "dp"), "dp", "bxor"), "by all_reduce at"),
    "product": (lambda: mc.all_reduce(same().sum(), "dp", "product"), "multiplies it by the number"),
    "reduce_scatter": (lambda: mc.reduce_scatter(same()[:2], "dp"), "multiplies it by the number"),
    "max_norm": (norm_while_looking_up, "embedding .* changes an operand in place"),
    "a module made where nobody looks": (module_inside, "linear .* made out of sight(?s:.)*of the module"),
    "a function that takes a module": (takes_a_module, r"Calls\.apply .* takes a function"),
    "a function that fills what has a graph": (function_in_place, "Fill .* changes an operand in place"),
    "apply bound before": (lambda: sq(bound_before(own(), same())), "sin .* ScaleBackward, that was called out of sight"),
    "apply of C": (lambda: sq(bound_to_c(own(), same())), "sin .* ScaleBackward, that was called out of sight"),
    "another thread": (thread, "sum .* made out of sight"),
    "pvary of varying": (lambda: mc.pvary(own(), "dp"), "pvary .* this varies along 'dp'(?s:.)*leave it out"),
    "shard of varying": (lambda: mc.shard(own(), "dp"), "shard .* this varies along 'dp'(?s:.)*reshard"),
    "a tree": (lambda: mc.all_gather({"a": own(), "b": host()}, "dp"), "all_gather .* made out of sight"),
    "foreach into a graph": (
        lambda: torch._foreach_mul_([same() * 2], [own().sum(0).expand(3, 3)]),
        "_foreach_mul_ .* writes what varies into a graph",
    ),
    "dropout": (lambda: F.dropout(same()), r"dropout .* draws other numbers on each rank along 'dp'(?s:.)*mc\.rng"),
    "layout": (lambda: mc.reshard(own(), "b d -> (dp b) d"), "operand 0 varies along 'dp', and its layout 'b d'"),
    "einsum": (lambda: mc.einsum("b d, (dp d) f -> b f", own(), own()), "operand 0 varies along 'dp'"),
}  # fmt: skip


@pytest.mark.parametrize("mode", [True, "error"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, mode: bool | str) -> None:
    fn, match = REFUSED[name]
    if mode == "error" and "x.data" not in name:
        match = f"{match}|a pvary is missing"

    def run() -> None:
        mesh = mc.make_mesh(LINE)
        with mc.use_mesh(mesh):
            with pytest.raises(mc.VaryingError, match=match) as caught, mc.check_vma(mode):
                fn()
            assert watch.here.watcher is None
            assert re.search(r"(test_vma_refusals|vma_checks)\.py:\d", str(caught.value))
            assert "fix: " in str(caught.value)
            assert mesh.rank == mesh.coordinate["dp"]

    mc.launch(run, ranks=N)


def mean_of_invariant() -> Any:
    w = same()
    y = mc.all_reduce(w.sum(), "dp", "mean")
    (g,) = torch.autograd.grad(y, w)
    assert_close(g, ones(3, 3))
    return kind(y)


def largest_of_invariant() -> Any:
    w = same()
    y = mc.all_reduce(w.sum(), "dp", "max")
    (g,) = torch.autograd.grad(y, w)
    assert_close(g, ones(3, 3))
    return kind(y)


ALLOWED: dict[str, Callable[[], Any]] = {
    "item": lambda: mc.all_reduce(own(), "dp").sum().item(),
    "bool": lambda: bool(same().sum() > 0),
    "tolist": lambda: same().tolist(),
    "numpy": lambda: same().detach().numpy(),
    "equal": lambda: torch.equal(same(), same()),
    "range": lambda: list(range(torch.tensor(2))),
    "a slice": lambda: own()[: torch.tensor(1)],
    "a formatted string": lambda: (f"{own()}", f"{own().sum():.2f}", repr(own()), str(own())),
    "a number of ranks": lambda: mc.all_reduce(torch.tensor(1.0), "dp").item() == N,
    "axis_size": lambda: zeros(mc.axis_size("dp")),
    "the mean of what is invariant": mean_of_invariant,
    "the largest of what is invariant": largest_of_invariant,
    "unknown that meets no gradient": lambda: (host() * own()).sum(),
    "a module made and initialised inside": lambda: nn.Linear(3, 3, dtype=F64)(own()),
    "pvary of integers": lambda: mc.pvary({"a": torch.arange(2), "b": own()[0].long()}, "dp"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name: str) -> None:
    on_ranks(ALLOWED[name])


def test_a_missing_pvary_is_refused_for_mean_too() -> None:
    def run() -> None:
        with pytest.raises(mc.VaryingError, match="all_reduce .* a pvary is missing"):
            mc.all_reduce(same().sum(), "dp", "mean")

    on_ranks(run, "error")


def test_collectives_of_torch_that_give_parts() -> None:
    """They write into what they are given and do not say so."""
    ops = torch.ops._c10d_functional
    parts = [dist.recv, dist.irecv, dist.scatter, dist.reduce_scatter, dist.all_to_all, ops.reduce_scatter_tensor]
    assert all(torch_rules.kind_of(each).parts for each in parts)
    others = [dist.all_reduce, dist.broadcast, dist.all_gather, ops.all_reduce, torch.scatter, Tensor.scatter_]
    assert not any(torch_rules.kind_of(each).parts for each in others)


def test_batch_norm_keeps_what_varies() -> None:
    def run() -> Any:
        kinds = []
        for norm in (nn.BatchNorm1d(3, dtype=F64), nn.InstanceNorm1d(2, track_running_stats=True, dtype=F64)):
            mc.mark_varying(norm, ())
            x = own()
            norm.eval()(x)
            kinds.append(kind(norm.running_mean))  # type: ignore[arg-type]
            norm.train()(x)
            kinds += [kind(norm.running_mean), kind(norm.running_var)]  # type: ignore[arg-type]
        return kinds

    assert on_ranks(run) == [[I, V, V] * 2] * N


@pytest.mark.parametrize("name", ["product", "setitem", "a custom function", "func.hessian"])
def test_transforms_around_shard_map(name: str) -> None:
    """Derivatives of the global function, from outside of ranks."""
    local = PROGRAMS[name]
    loss = mc.shard_map(
        lambda x, w: mc.all_reduce(local(x, w), "dp"),
        mesh=mc.make_mesh(LINE), in_specs=("(dp b) d", "d f"), out_specs="",
    )  # fmt: skip
    x, w = rows(), weight()
    y, gx, gw = right(local)
    assert_close(loss(x, w), y)
    assert_close(torch.func.grad(loss, (0, 1))(x, w), (gx, gw))
    both = torch.func.vmap(torch.func.grad(loss, 1), (None, 0))(x, torch.stack([w, 2 * w]))
    assert_close(both[0], gw)
