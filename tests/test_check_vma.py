"""The checker of varying types against programs that are out to deceive it.

A program is a function of one rank's rows ``x`` and of a weight ``w`` that is the same on every rank; its loss is summed
over the ranks. No ``pvary`` is written anywhere. Its value and gradients are those of the sum of the same function over
all parts of ``x``, or it is refused. Ranks are run one by one, without shard_map, where nothing else would notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import einsum, rearrange, reduce, repeat
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import meshcomm as mc
from meshcomm import watch
from meshcomm.runtime.inprocess import InProcessLink
from meshcomm.runtime.protocol import Note
from meshcomm.spmd import torch_rules
from meshcomm.spmd.checker import Checker
from meshcomm.spmd.vma import marked

F64 = torch.float64
Local = Callable[[Tensor, Tensor], Tensor]
N = 2
LINE = {"dp": N}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


def rows() -> Tensor:
    return draw(2 * N, 3)


def weight() -> Tensor:
    return draw(3, 3, seed=1)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=F64)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=F64)


@contextlib.contextmanager
def checked(mode: bool | str = True, axes: dict[str, int] | None = None) -> Iterator[mc.Mesh]:
    mesh = mc.make_mesh(axes or LINE)
    with mc.use_mesh(mesh), mc.check_vma(mode):
        yield mesh


def kind(x: Tensor) -> frozenset[str] | None:
    """The axes along which the checker thinks that ``x`` varies."""
    checker = watch.here.watcher
    assert isinstance(checker, Checker)
    found = checker.type_of(x)
    return None if found is None else found.axes


I, V = frozenset[str](), frozenset(["dp"])  # noqa: E741


def kind_or_none(x: Tensor) -> frozenset[str] | None:
    """The same where nothing is checked, too."""
    return None if watch.here.watcher is None else kind(x)


def on_ranks(fn: Callable[[], Any], mode: bool | str = True, axes: dict[str, int] | None = None) -> list[Any]:
    """What ``fn`` gives on each rank, run in a checked region."""

    def run() -> Any:
        with checked(mode, axes):
            return fn()

    size = 1
    for n in (axes or LINE).values():
        size *= n
    return mc.launch(run, ranks=size)


def mine(local: Local, mode: bool | str) -> Any:
    """Value and gradients on one rank."""
    mesh = mc.make_mesh(LINE)
    index = mesh.rank
    x = mc.mark_varying(rows().chunk(N)[index].clone().requires_grad_(), "dp", mesh=mesh)
    w = mc.mark_varying(weight().requires_grad_(), ())
    with mc.use_mesh(mesh), mc.check_vma(mode):
        y = mc.all_reduce(local(x, w), "dp")
        gx, gw = torch.autograd.grad(y, [x, w])
    return y.detach(), gx, gw


def right(local: Local) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the whole."""
    x, w = rows().requires_grad_(), weight().requires_grad_()
    parts = [local(part, w) for part in x.chunk(N)]
    y = torch.stack(parts).sum()
    gx, gw = torch.autograd.grad(y, [x, w])
    return y.detach(), gx, gw


def compare(found: list[Any], expected: tuple[Tensor, Tensor, Tensor]) -> None:
    y, gx, gw = expected
    for index, (value, of_x, of_w) in enumerate(found):
        assert_close(value, y)
        assert_close(of_x, gx.chunk(N)[index])
        assert_close(of_w, gw)


OLD = torch.__version__.startswith("2.11.")

# ------------------------------------------------------------------------------------------------- the table of programs


def sq(y: Tensor) -> Tensor:
    return y.sin().square().sum()


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Scale(torch.autograd.Function):
    """As people write them: the backward trusts the forward's operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).view(-1, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        g = g.view(x.shape[0], -1)
        return g @ w.T, x.T @ g


class ScaleSet(torch.autograd.Function):
    """The same with setup_context and vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


class OfDict(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: dict[str, Tensor], w: Tensor) -> Tensor:
        ctx.save_for_backward(given["x"])
        return given["x"] @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, ctx.saved_tensors[0].T @ g


class Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, into: Tensor, x: Tensor) -> Tensor:
        ctx.mark_dirty(into)
        return into.copy_(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g


@torch.library.custom_op("meshcomm_tests::scaled", mutates_args=())
def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


scaled.register_autograd(
    lambda ctx, g: (g @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ g),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def setitem(x: Tensor, w: Tensor) -> Tensor:
    y = w * 2
    y[0] = x.sum(0)
    return sq(y)


def setitem_of_a_buffer(x: Tensor, w: Tensor) -> Tensor:
    y = zeros(2, 3)
    y[0] = x.sum(0)
    y[1] = w[0]
    return sq(y * w[1])


def setitem_through_a_view(x: Tensor, w: Tensor) -> Tensor:
    y = w * 2
    y.view(-1)[2:5] = x.view(-1)[:3]
    return sq(y)


def in_place_and_an_older_view(x: Tensor, w: Tensor) -> Tensor:
    y = w * 2
    older = y[1:]
    y[0].mul_(x[0])
    return sq(y) + sq(older)


def in_place_without_grad(x: Tensor, w: Tensor) -> Tensor:
    y = w * 2
    with torch.no_grad():
        y.add_(x[0].detach())
    return sq(y) + 0 * x.sum()


def in_place_operators(x: Tensor, w: Tensor) -> Tensor:
    y = w * 2
    y += x[:1]
    y *= x[:1]
    y -= 1
    return sq(y)


def buffer_through_detach(x: Tensor, w: Tensor) -> Tensor:
    buffer = zeros(3)
    view = buffer[1:]
    buffer.detach().copy_(x[0].detach())
    return sq(view @ w[1:]) + x.sum()


def buffer_through_data(x: Tensor, w: Tensor) -> Tensor:
    buffer = zeros(3)
    buffer.data.add_(x[0].detach())
    return sq(buffer @ w) + x.sum()


def buffer_by_data(x: Tensor, w: Tensor) -> Tensor:
    buffer = zeros(3)
    buffer.data = x[0].detach()
    return sq(buffer @ w) + x.sum()


def out_argument(x: Tensor, w: Tensor) -> Tensor:
    buffer = zeros(3)
    torch.mul(x[0].detach(), 2.0, out=buffer)
    return sq(buffer @ w) + x.sum()


def out_arguments(x: Tensor, w: Tensor) -> Tensor:
    values, indices = zeros(3), torch.zeros(3, dtype=torch.int64)
    torch.max(x.detach(), 0, out=(values, indices))
    return sq(values @ w) + sq(w[indices]) + x.sum()


def foreach_copy(x: Tensor, w: Tensor) -> Tensor:
    a, b = zeros(3), zeros(3)
    torch._foreach_copy_([a, b], [x[0].detach(), ones(3)])
    return sq(a @ w) + x.sum()


def foreach_by_name(x: Tensor, w: Tensor) -> Tensor:
    (a,) = torch._foreach_add(self=[ones(3)], other=[x[0].detach()])
    return sq(a @ w) + x.sum()


def foreach_of_both(x: Tensor, w: Tensor) -> Tensor:
    a, b = torch._foreach_mul([x, w[0]], [w[:2], w[1]])
    (c,) = torch._foreach_mul([x], w[0, 0])
    assert kind_or_none(b) in (None, I)
    return sq(a) + sq(b) + sq(c)


def batch_norm_statistics(x: Tensor, w: Tensor) -> Tensor:
    mean, var = zeros(3), ones(3)
    F.batch_norm(x.detach(), mean, var, training=True)
    return sq(mean @ w) + x.sum()


def scatters(x: Tensor, w: Tensor) -> Tensor:
    at = (x.detach()[:, 0] > 0).long()
    y = zeros(2, 3).index_put_((at,), x, accumulate=True)
    z = zeros(2, 3).scatter_(0, at[:, None].expand(-1, 3), x)
    return sq(y @ w) + sq(z @ w)


def filled_by_a_function(x: Tensor, w: Tensor) -> Tensor:
    buffer = zeros(*x.shape)
    Fill.apply(buffer, x.detach())  # type: ignore[no-untyped-call]
    return sq(buffer @ w) + x.sum()


def gradient_of_gradient(x: Tensor, w: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(sq(x @ w), x, create_graph=True)
    return sq(g)


def seeded_gradient(x: Tensor, w: Tensor) -> Tensor:
    """The factor on the gradients, too, is differentiated."""
    (g,) = torch.autograd.grad((x @ w).sin(), x, w[:2] * 2, create_graph=True)
    return sq(g)


def through_a_parameter_list(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = torch.func.functional_call(nn.Linear(3, 3, bias=False, dtype=F64), {"weight": w}, (x,))
    return sq(y)


def attention(x: Tensor, w: Tensor) -> Tensor:
    y, _ = F.multi_head_attention_forward(
        x[:, None], x[:, None], x[:, None], 3, 1, torch.cat([w, w, w]), None, None, None, False, 0.0, w, None
    )
    return sq(y)


def recurrent(x: Tensor, w: Tensor) -> Tensor:
    h = zeros(1, 3)
    y, _ = torch.rnn_tanh(x, h, [w, w], False, 1, 0.0, True, False, False)
    return sq(y)


def hooked(x: Tensor, w: Tensor) -> Tensor:
    y = w * 2
    y.register_hook(lambda g: g * 3)
    return sq(x @ y)


def saved_elsewhere(x: Tensor, w: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return sq(x @ w)


def chosen_by_where(x: Tensor, w: Tensor) -> Tensor:
    return torch.where(x.sum() > 0, w[0], w[1]).square().sum() + x.sum()


def perturbed(x: Tensor, w: Tensor) -> Tensor:
    """A leaf made in the image of the rows is each rank's own, and so is its gradient."""
    losses = []
    delta = torch.zeros_like(x).requires_grad_()
    for each in (delta, torch.ones_like(x, requires_grad=True)):
        (g,) = torch.autograd.grad(sq((x + each) @ w), each, create_graph=True)
        losses.append(sq((x + g) @ w))
    return torch.stack(losses).sum()


PROGRAMS: dict[str, Local] = {
    "product": lambda x, w: sq(x @ w),
    "T": lambda x, w: sq(x @ w.T),
    "mT and H": lambda x, w: sq(x @ w.mT) + sq(x @ w.H),
    "real and imag": lambda x, w: sq(x @ torch.complex(w, 2 * w).real) + sq(x @ torch.complex(w, 2 * w).imag),
    "detach and data": lambda x, w: sq(x.detach() @ w) + sq(x.data @ w) + x.sum(),
    "unbind": lambda x, w: sum((sq(x * row) for row in w.unbind()), zeros()),
    "iteration": lambda x, w: sum((sq(x * row) for row in w), zeros()),
    "iteration over rows": lambda x, w: sum((sq(row @ w) for row in x), zeros()),
    "chunk and split": lambda x, w: sq(x @ w.chunk(3, 1)[1]) + sq(x @ w.split([1, 2], 1)[1]),
    "indices": lambda x, w: sq(x @ w[torch.tensor([0, 2, 2])]),
    "varying indices": lambda x, w: sq(w[(x.detach()[:, 0] > 0).long()]) + x.sum(),
    "varying mask": lambda x, w: sq(w[0][x.detach()[0] > 0]) + x.sum(),
    "expand": lambda x, w: sq(x * w[:1].expand(2, 3)),
    "einops": lambda x, w: sq(einsum(x, rearrange(w, "i o -> o i"), "b i, o i -> b o"))
    + sq(reduce(x[:, None] * repeat(w, "i o -> b i o", b=2), "b i o -> b", "sum")),
    "tuples": lambda x, w: sq(x * w.max(0).values) + sq(x * torch.sort(w[0])[0]),
    "cat": lambda x, w: sq(torch.cat([x, w])),
    "stack": lambda x, w: sq(torch.stack([x[0], w[0]])),
    "a named tuple": lambda x, w: sq(torch.stack(Pair(x[0], w[0]))),
    "where": lambda x, w: sq(torch.where(x > 0, x, w[:2])),
    "where a varying condition": chosen_by_where,
    "einsum": lambda x, w: sq(torch.einsum("bi,io->bo", x, w)),
    "keyword arguments": lambda x, w: sq(torch.addmm(input=w[:2], mat1=x, mat2=w)),
    "zeros_like": lambda x, w: sq(torch.zeros_like(x) + x.new_ones(3) * w[0] * x),
    "of another dtype": lambda x, w: sq(x @ w.to(x).type_as(x)),
    "setitem": setitem,
    "setitem of a buffer": setitem_of_a_buffer,
    "setitem through a view": setitem_through_a_view,
    "in place, and an older view": in_place_and_an_older_view,
    "in place without grad": in_place_without_grad,
    "in-place operators": in_place_operators,
    "a buffer through detach": buffer_through_detach,
    "a buffer through data": buffer_through_data,
    "a buffer by data": buffer_by_data,
    "out=": out_argument,
    "out=(...)": out_arguments,
    "foreach": foreach_copy,
    "foreach of both": foreach_of_both,
    "foreach by name": foreach_by_name,
    "statistics": batch_norm_statistics,
    "scatters": scatters,
    "a function that fills": filled_by_a_function,
    "sparse": lambda x, w: sq(torch.sparse.mm(x.detach().to_sparse(), w)) + x.sum(),
    "a custom function": lambda x, w: sq(Scale.apply(x, w)),  # type: ignore[no-untyped-call]
    "with setup_context": lambda x, w: sq(ScaleSet.apply(x, w)),  # type: ignore[no-untyped-call]
    "a custom function of a dict": lambda x, w: sq(OfDict.apply({"x": x.detach()}, w)) + x.sum(),  # type: ignore[no-untyped-call]
    "a custom operator": lambda x, w: sq(scaled(x, w)),
    "an operator of torch.ops": lambda x, w: sq(torch.ops.aten.mm(x, w)) + sq(torch.ops.aten.mm.default(x, w)),
    "a leaf of its own": perturbed,
    "second derivative": gradient_of_gradient,
    "gradient of gradients": seeded_gradient,
    "functional_call": through_a_parameter_list,
    "attention": attention,
    "recurrent": recurrent,
    "a hook": hooked,
    "saved tensor hooks": saved_elsewhere,
    "checkpoint": lambda x, w: sq(checkpoint(lambda x, w: torch.tanh(x @ w) @ w, x, w, use_reentrant=False)),
    "embedding": lambda x, w: sq(F.embedding((x.detach()[:, 0] > 0).long(), w)) + x.sum(),
    "softmax and loss": lambda x, w: F.cross_entropy(x @ w, (x.detach()[:, 0] > 0).long(), reduction="sum"),
    "autocast": lambda x, w: sq(x @ w) + torch.autocast("cpu", dtype=torch.bfloat16)(lambda: (0 * (x @ w)).sum())(),
    "func.grad": lambda x, w: sq(torch.func.grad(lambda x: sq(x @ w))(x)),
    "func.vjp": lambda x, w: sq(torch.func.vjp(lambda x: (x @ w).sin(), x)[1](x)[0]),
    "func.vjp of an invariant seed": lambda x, w: sq(torch.func.vjp(lambda x: (x @ w).sin(), x)[1](w[:2])[0]),
    "func.jvp": lambda x, w: sq(torch.func.jvp(lambda x: (x @ w).sin(), (x,), (x,))[1]),
    "func.jvp of an invariant tangent": lambda x, w: sq(torch.func.jvp(lambda x: (x @ w).sin(), (x,), (w[:2],))[1]),
    "func.vmap": lambda x, w: torch.func.vmap(lambda r: sq(r @ w))(x).sum(),
    "func.vmap, dims": lambda x, w: sq(torch.func.vmap(lambda r, u: r * u, in_dims=(1, 0), out_dims=1)(x, w[0])),
    "func.vmap of vmap": lambda x, w: sq(
        torch.func.vmap(torch.func.vmap(lambda a, b: a * b, (0, None)), (None, 0))(w, x)
    ),
    "func.vmap of grad": lambda x, w: sq(torch.func.vmap(torch.func.grad(lambda r: sq(r @ w)))(x)),
    "func.grad of vmap": lambda x, w: sq(torch.func.grad(lambda x: torch.func.vmap(lambda r: sq(r @ w))(x).sum())(x)),
    "func.jacrev": lambda x, w: sq(torch.func.jacrev(lambda x: (x @ w).sin())(x)),
    "func.jacfwd": lambda x, w: sq(torch.func.jacfwd(lambda x: (x @ w).sin())(x)),
    "func.hessian": lambda x, w: sq(torch.func.hessian(lambda x: sq(x @ w))(x)),
    "func.grad of a custom function": lambda x, w: sq(torch.func.grad(lambda x: sq(ScaleSet.apply(x, w)))(x)),  # type: ignore[no-untyped-call]
    "func.grad into a buffer": lambda x, w: sq(
        torch.func.grad(lambda x: sq(zeros(2, 3).copy_(x).mul_(w[0])))(x)
    ),
    "autograd.functional": lambda x, w: sq(
        torch.autograd.functional.hessian(lambda x: sq(x @ w), x, create_graph=True)
    ),
    "autograd.functional.jvp": lambda x, w: sq(
        torch.autograd.functional.jvp(lambda x: (x @ w).sin(), x, x, create_graph=True)[1]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_right_without_any_pvary(name: str) -> None:
    compare(mc.launch(mine, ranks=N, args=(PROGRAMS[name], True)), right(PROGRAMS[name]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_wrong_without_the_checker(name: str) -> None:
    """Or else the program would prove nothing."""
    with pytest.raises(AssertionError, match="not close"):
        compare(mc.launch(mine, ranks=N, args=(PROGRAMS[name], False)), right(PROGRAMS[name]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_refused_under_error(name: str) -> None:
    if name == "checkpoint" and OLD:
        pytest.skip("torch 2.11 leaves the hooks of a checkpoint that was interrupted to the collection of garbage")

    def refused() -> None:
        place = r"\w+\.py" if name == "einops" else r"test_check_vma\.py"
        with pytest.raises(mc.VaryingError, match=rf"{place}:\d+.*along 'dp', where others vary") as caught:
            mine(PROGRAMS[name], "error")
        assert "fix: mc.pvary(" in str(caught.value)

    mc.launch(refused, ranks=N)


# ------------------------------------------------------------------------------------------------------ types of results


def own() -> Tensor:
    """Rows that vary."""
    return mc.axis_index("dp") + ones(2, 3)


def same() -> Tensor:
    return mc.mark_varying(weight().requires_grad_(), ())


def host(value: bool | int | float | None = None) -> Tensor:
    """Something whose type is unknown."""
    with mc.check_vma(False):
        return ones(3) * (1.0 if value is None else value)


TYPES: dict[str, tuple[Callable[[], Any], frozenset[str] | None]] = {
    "numbers": (lambda: torch.tensor([1.0, 2.0]), I),
    "a number of numpy": (lambda: torch.tensor(np.float64(1.0)), I),
    "a list of tensors": (lambda: torch.tensor([own().sum(), own().sum()]), V),
    "an array": (lambda: torch.tensor(np.ones(3)), None),
    "somebody's memory": (lambda: torch.from_numpy(np.ones(3)), None),
    "as_tensor of an array": (lambda: torch.as_tensor(np.ones(3)), None),
    "zeros_like": (lambda: torch.zeros_like(own()), I),
    "ones_like": (lambda: torch.ones_like(own()), I),
    "empty_like": (lambda: torch.empty_like(own()), I),
    "full_like": (lambda: torch.full_like(own(), 2.0), I),
    "new_zeros": (lambda: own().new_zeros(3), I),
    "new_ones": (lambda: own().new_ones(3), I),
    "new_full": (lambda: own().new_full((3,), 2.0), I),
    "new_empty": (lambda: own().new_empty(3), I),
    "a leaf like one that varies": (lambda: torch.zeros_like(own()).requires_grad_(), V),
    "a leaf of zeros": (lambda: zeros(3).requires_grad_(), I),
    "to": (lambda: zeros(3).to(own()), I),
    "to, varying": (lambda: own().to(zeros(3)), V),
    "type_as": (lambda: zeros(3).type_as(own()), I),
    "expand_as": (lambda: zeros(3).expand_as(own()), I),
    "view_as": (lambda: own().view_as(zeros(2, 3)), V),
    "an index of its own": (lambda: zeros(3)[mc.axis_index("dp")], V),
    "arange": (lambda: torch.arange(3), I),
    "detach": (lambda: own().detach(), V),
    "numel": (lambda: zeros(own().numel()), I),
    "overwritten": (lambda: own().zero_(), I),
    "copied over": (lambda: own().copy_(zeros(2, 3)), I),
    "copied into": (lambda: zeros(2, 3).copy_(own()), V),
    "a copied part": (lambda: own()[0].copy_(zeros(3))._base, V),
    "of unknown": (lambda: host() * 2, None),
    "into which unknown was written": (lambda: zeros(3).copy_(host()), None),
    "into which unknown was added": (lambda: zeros(3).add_(host()), None),
    "unknown, overwritten": (lambda: host().fill_(1.0), I),
    "a leaf that is initialised": (lambda: nn.init.ones_(nn.Parameter(torch.empty(3))), I),
    "a gradient": (lambda: torch.autograd.grad((same()[:2] * own()).sum(), own_leaf := same(), allow_unused=True)[0] or own_leaf, I),
    "random": (lambda: torch.rand(3), V),
    "like, random": (lambda: torch.rand_like(zeros(3)), V),
    "initialised at random": (lambda: nn.init.normal_(torch.empty(3)), V),
    "a shape of its own": (lambda: own()[own() > 1], V),
    "deepcopy": (lambda: copy.deepcopy(own()), V),
    "deepcopy of a buffer": (lambda: copy.deepcopy(zeros(3)), I),
    "transposed in place": (lambda: own().t_(), V),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_types_of_results(name: str) -> None:
    make, expected = TYPES[name]
    assert on_ranks(lambda: kind(make())) == [expected] * N


def test_metadata_in_place_writes_nothing() -> None:
    """What pvary gives shares the memory of what it takes."""

    def run() -> Any:
        w = same()
        y = mc.pvary(w.detach(), "dp")
        y.requires_grad_()
        y.detach().squeeze_().unsqueeze_(0)
        return kind(y), kind(w), kind(w.detach())

    assert on_ranks(run) == [(V, I, I)] * N


def test_what_is_written_is_found_by_a_later_check() -> None:
    def run() -> Any:
        mesh = mc.make_mesh(LINE)
        buffer = mc.mark_varying(zeros(3), (), mesh=mesh)
        row = buffer[1:]
        with mc.use_mesh(mesh):
            with mc.check_vma():
                buffer.detach().copy_(own()[0])
            with mc.check_vma():
                found = kind(buffer), kind(row)
            mc.mark_varying(buffer, ())
            with mc.check_vma("error"):
                return *found, kind(buffer)

    assert mc.launch(run, ranks=N) == [(V, V, I)] * N


def test_a_marked_view_says_nothing_of_its_base() -> None:
    def run() -> Any:
        with mc.check_vma(False):
            base = ones(2, 3)
            a, b = base[0], base[1]
        mc.mark_varying(a, ())
        return kind(a), kind(a[1:]), kind(b), kind(base)

    assert on_ranks(run) == [(I, I, None, None)] * N


def test_marks_hold_for_the_object() -> None:
    def run() -> Any:
        x = zeros(3)
        assert mc.mark_varying(x, "dp") is x
        tree = mc.mark_varying({"a": [zeros(2), zeros(3)]}, ("dp",))
        module = mc.mark_varying(nn.BatchNorm1d(3), ())
        return kind(x), [kind(y) for y in tree["a"]], {kind(y) for y in [*module.parameters(), *module.buffers()]}

    assert on_ranks(run) == [(V, [V, V], {I})] * N


def test_mark_varying_refuses() -> None:
    mesh = mc.make_mesh(LINE)
    with pytest.raises(mc.MeshError, match="no axis 'tp'"):
        mc.mark_varying(zeros(1), "tp", mesh=mesh)
    with pytest.raises(mc.MeshError, match=r"x\['a'\] is no tensor but int"):
        mc.mark_varying({"a": 1}, ())
    with pytest.raises(mc.MeshError, match="axes=1"):
        mc.mark_varying(zeros(1), 1)  # type: ignore[arg-type]
    with pytest.raises(mc.MeshError, match="check_vma='yes'"), mc.check_vma("yes"):
        pass
    with pytest.raises(mc.MeshError, match=r"outside|mc\.launch"), mc.check_vma(mesh=mesh):
        pass


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
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    Scaled()(own())


def copied_module() -> None:
    copy.deepcopy(mc.mark_varying(nn.Linear(3, 3, dtype=F64), ()))(own())


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
    "detach().copy_()": (write_past_the_graph, "went past the graph(?s:.)*a write in place at test_check_vma"),
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
    "product": (lambda: mc.all_reduce(same().sum(), "dp", "product"), "multiplies it by the number"),
    "reduce_scatter": (lambda: mc.reduce_scatter(same()[:2], "dp"), "multiplies it by the number"),
    "max_norm": (norm_while_looking_up, "embedding .* changes an operand in place"),
    "a parameter made inside": (module_inside, "mul .* made out of sight(?s:.)*of the module"),
    "a copied module": (copied_module, "linear .* made out of sight(?s:.)*of the module"),
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
            assert "test_check_vma.py:" in str(caught.value)
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


# --------------------------------------------------------------------------------------------------------------- random


def known_as_random(name: str) -> bool:
    return name in torch_rules.RANDOM or torch_rules._drops(name) is not None


SEEDED = sorted(
    name
    for name in dir(torch.ops.aten)
    if hasattr(packet := getattr(torch.ops.aten, name), "overloads")
    and any(torch.Tag.nondeterministic_seeded in getattr(packet, each).tags for each in packet.overloads())
)


def test_every_random_operation_is_known() -> None:
    """A backward gets the random state of its forward."""
    assert len(SEEDED) > 40
    assert [name for name in SEEDED if not known_as_random(name) and not name.endswith("_backward")] == []


def test_every_random_function_of_nn_is_known() -> None:
    written = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    settled = {"constant_", "ones_", "zeros_", "eye_", "dirac_"}
    assert settled < set(written)
    assert [name for name in written if not known_as_random(name)] == sorted(settled)
    assert set(written) <= torch_rules.OVERWRITES
    drops = [name for name in dir(F) if "dropout" in name and callable(getattr(F, name)) and name != "Dropout"]
    assert len(drops) >= 6
    assert [name for name in [*drops, "gumbel_softmax", "rrelu", "rrelu_"] if not known_as_random(name)] == []


@pytest.mark.parametrize(
    "table",
    ["HOST", "FRESH", "ALIKE", "EACH", "RANDOM", "SETTLES", "OVERWRITES", "_IN_PLACE", "_DROPOUT", "_NOISY", "_STATISTICS"],
)  # fmt: skip
def test_the_rules_name_functions_that_exist(table: str) -> None:
    homes = (torch, Tensor, F, nn.init, torch.ops.aten)
    newer = {"_flash_attention_forward_no_dropout_inplace"} if OLD else set()
    lost = {name for name in getattr(torch_rules, table) if not any(hasattr(home, name) for home in homes)}
    assert lost <= newer


ROWS, IMAGE, VOLUME = ones(4, 6), ones(1, 2, 8, 8), ones(1, 2, 8, 8, 8)
MIXES: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "dropout": (lambda x: F.dropout(x), ROWS),
    "dropout, by name": (lambda x: F.dropout(x, training=True, p=0.5), ROWS),
    "torch.dropout": (lambda x: torch.dropout(x, 0.5, True), ROWS),
    "torch.dropout_": (lambda x: torch.dropout_(x.clone(), 0.5, True), ROWS),
    "nn.Dropout": (lambda x: nn.Dropout()(x), ROWS),
    "nn.Dropout2d": (lambda x: nn.Dropout2d()(x), IMAGE),
    "alpha": (lambda x: nn.AlphaDropout()(x), ROWS),
    "feature alpha": (lambda x: nn.FeatureAlphaDropout()(x), IMAGE),
    "native": (lambda x: torch.native_dropout(x, 0.5, True), ROWS),
    "rrelu": (lambda x: F.rrelu(x, training=True), ROWS),
    "nn.RReLU": (lambda x: nn.RReLU()(x), ROWS),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x), ROWS),
    "fractional": (lambda x: F.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5)), IMAGE),
    "fractional, indices": (lambda x: F.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5), return_indices=True), IMAGE),
    "fractional in 3": (lambda x: F.fractional_max_pool3d(x, 2, output_ratio=(0.5, 0.5, 0.5)), VOLUME),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), ROWS[None]),
    "attention, placed": (lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5), ROWS[None]),
    "heads": (lambda x: mc.mark_varying(nn.MultiheadAttention(6, 2, 0.5, dtype=F64), ())(x, x, x), ROWS[None]),
    "lstm": (lambda x: mc.mark_varying(nn.LSTM(6, 6, 2, dropout=0.5, dtype=F64), ())(x), ROWS[None]),
    "gru": (lambda x: mc.mark_varying(nn.GRU(6, 6, 2, dropout=0.5, dtype=F64), ())(x), ROWS[None]),
    "rnn": (lambda x: mc.mark_varying(nn.RNN(6, 6, 2, dropout=0.5, dtype=F64), ())(x), ROWS[None]),
    "aten": (lambda x: torch.ops.aten.native_dropout(x, 0.5, True), ROWS),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXES)
def test_drops_what_is_its_own_only(name: str) -> None:
    fn, like = MIXES[name]

    def run() -> None:
        x = mc.mark_varying(like.clone(), ())
        with pytest.raises(mc.VaryingError, match=r"test_check_vma.py:\d+ draws other numbers on each rank along 'dp'"):
            fn(x)
        y = fn(mc.pvary(x, "dp"))
        assert kind(y[0] if isinstance(y, tuple) else y) == V
        watch.here.draws_along = frozenset()
        try:
            y = fn(x)
            assert kind(y[0] if isinstance(y, tuple) else y) <= V  # type: ignore[operator]
        finally:
            watch.here.draws_along = None

    on_ranks(run)


QUIET: dict[str, Callable[[Tensor], Any]] = {
    "no training": lambda x: F.dropout(x, training=False),
    "no training, placed": lambda x: F.dropout(x, 0.5, False),
    "p=0": lambda x: F.dropout(x, 0.0),
    "nn.Dropout": lambda x: nn.Dropout().eval()(x),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, False),
    "alpha": lambda x: F.alpha_dropout(x),
    "rrelu": lambda x: F.rrelu(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "heads": lambda x: mc.mark_varying(nn.MultiheadAttention(6, 2, 0.5, dtype=F64), ()).eval()(x, x, x)[0],
    "lstm": lambda x: mc.mark_varying(nn.LSTM(6, 6, 2, dropout=0.5, dtype=F64), ()).eval()(x)[0],
    "lstm, p=0": lambda x: mc.mark_varying(nn.LSTM(6, 6, 2, dtype=F64), ())(x)[0],
}


@pytest.mark.parametrize("name", QUIET)
def test_what_drops_nothing_is_not_random(name: str) -> None:
    assert on_ranks(lambda: kind(QUIET[name](mc.mark_varying(ROWS[None].clone(), ())))) == [I] * N


def test_draws_along() -> None:
    """rng and fork_rng say along which axes random numbers differ."""

    def run() -> Any:
        found = []
        for axes in (None, frozenset[str](), frozenset(["tp"]), frozenset(["dp", "tp", "other"])):
            watch.here.draws_along = axes
            try:
                found.append(kind(torch.rand(3)))
                found.append(
                    kind(F.dropout(mc.pvary(zeros(3), tuple(sorted(axes & {"dp", "tp"})))) if axes else zeros(3))
                )
            finally:
                watch.here.draws_along = None
        return found

    every, tp = frozenset(["dp", "tp"]), frozenset(["tp"])
    expected = [every, I, I, I, tp, tp, every, every]
    assert on_ranks(run, axes={"dp": 2, "tp": 2}) == [expected] * 4


# ---------------------------------------------------------------------------------------------------------- collectives


def two() -> Tensor:
    return mc.axis_index("dp") + ones(2)


COLLECTIVES: dict[str, tuple[Callable[[Tensor], Any], frozenset[str], bool]] = {
    "pvary": (lambda x: mc.pvary(x, "dp"), V, False),
    "all_reduce": (lambda x: mc.all_reduce(x, "dp"), I, True),
    "all_reduce, mean": (lambda x: mc.all_reduce(x, "dp", "mean"), I, True),
    "all_gather": (lambda x: mc.all_gather(x, "dp"), V, True),
    "all_gather_invariant": (lambda x: mc.all_gather_invariant(x, "dp"), I, True),
    "shard": (lambda x: mc.shard(x, "dp"), V, False),
    "reduce_scatter": (lambda x: mc.reduce_scatter(x, "dp"), V, True),
    "all_to_all": (lambda x: mc.all_to_all(x, "dp", 0, 0), V, True),
    "permute": (lambda x: mc.permute(x, "dp", [(0, 1), (1, 0)]), V, True),
    "shift": (lambda x: mc.shift(x, "dp"), V, True),
    "broadcast": (lambda x: mc.broadcast(x, "dp"), I, True),
    "axis_index": (lambda x: mc.axis_index("dp") + x, V, True),
    "reshard": (lambda x: mc.reshard(x, "(dp a) -> a"), I, True),
    "reshard of a whole": (lambda x: mc.reshard(x, "a -> (dp a)"), V, False),
    "einsum": (lambda x: mc.einsum("(dp a), (dp a) ->", x, x), I, True),
    "a tree": (lambda x: mc.all_gather([{"a": x}, {"a": x}], "dp")[1]["a"], V, True),
}


AT_ONCE = ("axis_index", "einsum", "a tree", "reshard", "pvary", "shard")
"""Have no async_op, send nothing, or are tested with it elsewhere."""


@pytest.mark.parametrize(
    ("name", "async_op"),
    [(name, async_op) for name in COLLECTIVES for async_op in (False, True) if not (async_op and name.startswith(AT_ONCE))],
)  # fmt: skip
def test_collectives(name: str, async_op: bool) -> None:
    """What each takes and gives, of a value that varies or of one that does not."""
    fn, gives, takes_varying = COLLECTIVES[name]

    def call(x: Tensor) -> Any:
        if not async_op:
            return fn(x)
        own_name, *op = name.split(", ")
        more = {"all_to_all": (0, 0), "permute": ([(0, 1), (1, 0)],)}.get(own_name, tuple(op))
        return getattr(mc, own_name)(x, "dp", *more, async_op=True).wait()

    def run() -> Any:
        x = two() if takes_varying else zeros(2)
        found = kind(call(x))
        if not takes_varying:
            with pytest.raises(mc.VaryingError, match="'dp'"):
                call(two())
        return found

    assert on_ranks(run) == [gives] * N


def test_to_and_from_one_rank() -> None:
    def run() -> Any:
        with mc.check_vma(False):
            index = mc.current_mesh().rank  # type: ignore[union-attr]
        x = mc.mark_varying(zeros(2), "dp")
        reduced, gathered = mc.reduce(x, "dp"), mc.gather(x, "dp")
        scattered = mc.scatter(zeros(4) if index == 0 else None, "dp", like=zeros(2))
        mc.send(x, "dp", 1 - index) if index == 0 else None
        received = None if index == 0 else mc.recv("dp", 0, shape=(2,), dtype=F64)
        return [None if y is None else kind(y) for y in (reduced, gathered, scattered, received)]

    assert on_ranks(run) == [[V, V, V, None], [None, None, V, V]]


def test_works() -> None:
    def run() -> Any:
        x, w = own(), same()
        a = mc.all_reduce(x @ w, "dp", async_op=True)
        b = mc.all_gather(x, "dp", async_op=True).then(lambda y: sq(y @ w))
        c = mc.all_reduce({"u": x}, "dp", async_op=True)

        async def awaited() -> Tensor:
            found: Tensor = await mc.all_reduce(x, "dp", async_op=True)
            return found

        waited = mc.wait({"a": a, "c": c})
        y = b.wait()
        types = [kind(t) for t in (waited["a"], waited["c"]["u"], y, asyncio.run(awaited()))]
        (g,) = torch.autograd.grad(mc.all_reduce(y, "dp"), w)
        return types, g

    every = torch.cat([ones(2, 3) + i for i in range(N)])
    w = weight().requires_grad_()
    (expected,) = torch.autograd.grad(N * sq(every @ w), w)
    for kinds, g in on_ranks(run):
        assert kinds == [I, I, V, I]
        assert_close(g, expected)


def test_another_mesh() -> None:
    def run() -> None:
        other = mc.make_mesh({"a": N})
        with checked() as mesh:
            with pytest.raises(mc.MeshError, match="another mesh than the one that is checked"):
                mc.all_reduce(own(), "a", mesh=other)
            assert kind(mc.all_reduce(own(), "dp", mesh=mc.make_mesh(LINE))) == I
            assert watch.here.watcher is not None
            assert mesh.shape == LINE

    mc.launch(run, ranks=N)


# ------------------------------------------------------------------------------------------------------ remembered pvary


@contextlib.contextmanager
def reductions() -> Iterator[list[str]]:
    """The all_reduces of all ranks."""
    calls: list[str] = []
    announce = InProcessLink.announce

    def listen(self: InProcessLink, note: Note) -> None:
        if note.what == "all_reduce":
            calls.append(note.what)
        announce(self, note)

    InProcessLink.announce = listen  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        InProcessLink.announce = announce  # type: ignore[method-assign]


def counted(fn: Callable[[], Any]) -> int:
    """all_reduces per rank."""
    with reductions() as calls:
        on_ranks(fn)
    return len(calls) // N


def test_one_pvary_for_all_uses() -> None:
    def run() -> None:
        w = same()
        h = w * 2
        x = own()
        q, k, v = x @ h, x @ h, x @ h
        torch.autograd.grad(sq(q + k) + sq(v), w)

    assert counted(run) == 1


def test_another_pvary_after_a_change() -> None:
    def run() -> None:
        w = same()
        h = w * 2
        x = own()
        a = (x @ h).sum()
        h.mul_(1.0)
        b = sq(x @ h)
        assert kind(h) == I
        torch.autograd.grad(a + b, w)

    def changed_by_a_view() -> None:
        w = same()
        h = w * 2
        x = own()
        first = (x + h[0][None]).sum()
        h[0][0] = 1.0
        torch.autograd.grad(first + sq(x @ h), w)

    assert counted(run) == 2
    assert counted(changed_by_a_view) == 2


def test_the_least_recent_are_forgotten() -> None:
    def run(between: int) -> None:
        w = same()
        h = w * 2
        x = own()
        total = sq(x @ h)
        others = [w * i for i in range(between)]
        for i, other in enumerate(others):
            total = total + sq(x @ other)
            if i == between // 2:
                total = total + sq(x @ h)
        torch.autograd.grad(total + sq(x @ h), w)

    assert counted(lambda: run(63)) == 64
    assert counted(lambda: run(100)) == 101  # in the middle it was used again
    assert counted(lambda: run(140)) == 143


def test_parameters_are_remembered_for_long() -> None:
    def run() -> None:
        w = mc.mark_varying(nn.Parameter(weight()), ())
        x = own()
        total = sq(x @ w)
        for i in range(100):
            total = total + sq(x @ (w.detach() * i).requires_grad_())
        torch.autograd.grad(total + sq(x @ w), w)

    assert counted(run) == 1


def test_nothing_is_kept() -> None:
    def run() -> Any:
        checker = watch.here.watcher
        assert isinstance(checker, Checker)
        w = mc.mark_varying(nn.Parameter(weight()), ())
        activations = []
        sizes = set()
        for _ in range(200):
            h = w * 2
            activations.append(weakref.ref(h))
            leaf = zeros(3).requires_grad_()
            mc.all_reduce(sq(own() @ h + leaf), "dp").backward()
            with torch.no_grad():
                w.sub_(w.grad * 1e-3)  # type: ignore[operator]
            w.grad = None
            sizes.add((len(checker._lately), len(checker._always), len(checker._known)))
        del h, leaf
        gc.collect()
        return len(sizes), sum(each() is not None for each in activations), checker, weakref.ref(w)

    for sizes, alive, checker, w in on_ranks(run):
        assert (sizes, alive) == (1, 0)
        gc.collect()
        assert w() is None
        assert not checker._lately
        assert not checker._always


# -------------------------------------------------------------------------------------------------------------- training

STEPS = 3


def network() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 4, dtype=F64), nn.Tanh(), nn.Linear(4, 2, dtype=F64))
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(draw(*p.shape, seed=i))
    return net


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "SGD, foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
}


def trained(make: Callable[[Any], torch.optim.Optimizer], parts: int, clip: bool) -> list[Tensor]:
    """What data parallelism on ranks makes of the network; ``parts=0``: without a mesh."""
    net = network()
    optimizer = make(net.parameters())
    x, y = draw(4, 3), draw(4, 2)
    mesh = mc.make_mesh(LINE)
    if parts:
        index = mesh.rank
        x, y = x.chunk(N)[index].clone(), y.chunk(N)[index].clone()
        mc.mark_varying((x, y), "dp")
        mc.mark_varying(net, ())

    def step() -> None:
        optimizer.zero_grad()
        loss = (net(x) - y).square().sum()
        if parts:
            loss = mc.all_reduce(loss, "dp")
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()

    if not parts:
        for _ in range(2 * STEPS):
            step()
        return list(net.parameters())
    with mc.use_mesh(mesh):
        for _ in range(2):
            with mc.check_vma():
                for _ in range(STEPS):
                    step()
                assert {kind(p) for p in net.parameters()} == {I}
                assert {kind(p.grad) for p in net.parameters() if p.grad is not None} == {I}
    return list(net.parameters())


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_data_parallel_training(name: str, clip: bool) -> None:
    expected = trained(OPTIMIZERS[name], 0, clip)
    for found in mc.launch(trained, ranks=N, args=(OPTIMIZERS[name], N, clip)):
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Adafactor"])
def test_fully_sharded_and_tensor_parallel_training(name: str) -> None:
    """A first weight in parts along dp, a second one in parts along tp. Adafactor's steps depend on the whole of each."""
    x, y, w1, w2 = draw(4, 4), draw(4, 2), draw(4, 4), draw(4, 2)

    def whole() -> list[Tensor]:
        a, b = nn.Parameter(w1.clone()), nn.Parameter(w2.clone())
        optimizer = OPTIMIZERS[name]([a, b])
        for _ in range(STEPS):
            optimizer.zero_grad()
            (torch.tanh(x @ a) @ b - y).square().sum().backward()
            optimizer.step()
        return [a, b]

    def parallel() -> tuple[int, int, Tensor, Tensor]:
        mesh = mc.make_mesh({"dp": 2, "tp": 2})
        dp, tp = mesh.coordinate["dp"], mesh.coordinate["tp"]
        a = mc.mark_varying(nn.Parameter(w1.chunk(2)[dp].clone()), "dp", mesh=mesh)
        b = mc.mark_varying(nn.Parameter(w2.chunk(2)[tp].clone()), "tp", mesh=mesh)
        rows, targets = mc.mark_varying((x.chunk(2)[dp].clone(), y.chunk(2)[dp].clone()), "dp", mesh=mesh)
        optimizer = OPTIMIZERS[name]([a, b])
        with mc.use_mesh(mesh), mc.check_vma():
            for _ in range(STEPS):
                optimizer.zero_grad()
                h = torch.tanh(rows @ mc.all_gather(a, "dp"))
                part = mc.shard(h, "tp", dim=1) @ b
                mc.all_reduce((mc.all_reduce(part, "tp") - targets).square().sum(), "dp").backward()
                optimizer.step()
            assert (kind(a), kind(b)) == (frozenset(["dp"]), frozenset(["tp"]))
        return dp, tp, a.detach(), b.detach()

    first, second = whole()
    for dp, tp, a, b in mc.launch(parallel, ranks=4):
        assert_close(a, first.chunk(2)[dp])
        assert_close(b, second.chunk(2)[tp])


def test_scaled_gradients() -> None:
    def run() -> Any:
        found = zeros(1).float()
        gradient = torch.ones(3) * mc.axis_index("dp")
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, torch.ones(1))
        return kind(found)

    assert on_ranks(run) == [V] * N


# ------------------------------------------------------------------------------------------- contexts, threads, compiler


@pytest.mark.parametrize("inside", [True, False])
def test_reentrant_checkpoint(inside: bool) -> None:
    """Computed again in backward, in the region or behind it."""

    def run() -> Any:
        mesh = mc.make_mesh(LINE)
        index = mesh.rank
        x = mc.mark_varying(rows().chunk(N)[index].clone().requires_grad_(), "dp", mesh=mesh)
        w = mc.mark_varying(weight().requires_grad_(), ())
        with mc.use_mesh(mesh), mc.check_vma():
            y = checkpoint(lambda x, w: torch.tanh(x @ w) @ w, x, w, use_reentrant=True)
            assert kind(y) == V
            loss = mc.all_reduce(sq(y), "dp")
            if inside:
                loss.backward()
            checker = watch.here.watcher
        if not inside:
            loss.backward()
        assert watch.here.watcher is None
        assert isinstance(checker, Checker)
        assert not checker._lately
        return loss.detach(), x.grad, w.grad

    compare(mc.launch(run, ranks=N), right(lambda x, w: sq(torch.tanh(x @ w) @ w)))


def test_checks_in_checks() -> None:
    def run() -> None:
        mesh = mc.make_mesh(LINE)
        with mc.use_mesh(mesh), mc.check_vma():
            x, w = own(), same()
            outer = watch.here.watcher
            with mc.check_vma("error"):
                assert kind(x) == V
                with pytest.raises(mc.VaryingError, match="a pvary is missing"):
                    x @ w
            with mc.check_vma(False):
                assert watch.here.watcher is None
                y = x @ mc.pvary(w, "dp")
                assert mesh.rank in range(N)
            assert watch.here.watcher is outer
            with pytest.raises(mc.VaryingError, match="made out of sight"):
                y.sum()
            assert kind(x @ w) == V
            with pytest.raises(KeyError), mc.check_vma("error"):
                raise KeyError
            with pytest.raises(KeyError), mc.check_vma(False):
                raise KeyError
            assert watch.here.watcher is outer
        assert watch.here.watcher is None

    mc.launch(run, ranks=N)


def test_shard_map_in_a_check() -> None:
    """Its function is checked as well."""

    def run() -> Any:
        mesh = mc.make_mesh(LINE)
        loss = mc.shard_map(
            lambda x, w: mc.all_reduce(sq(x @ w), "dp"), mesh=mesh, in_specs=("(dp b) d", "d f"), out_specs=""
        )
        with mc.use_mesh(mesh), mc.check_vma():
            x, w = mc.mark_varying(rows(), ()), same()
            y = loss(x, w)
            assert kind(y) == I
            (g,) = torch.autograd.grad(y, w)
            assert kind(g) == I
            with pytest.raises(mc.VaryingError, match="takes global tensors, and x varies along 'dp'"):
                loss(own(), w)
            assert kind(own()) == V
        return g

    _, _, expected = right(lambda x, w: sq(x @ w))
    for g in mc.launch(run, ranks=N):
        assert_close(g, expected)


def test_no_grad_and_inference_mode() -> None:
    def run() -> None:
        x, w = own(), same()
        for mode in (torch.no_grad, torch.inference_mode):
            with reductions() as calls, mode():
                y = x @ w
                z = zeros(3)
                z += y[0]
                assert kind(y) == kind(z) == V
                assert kind(mc.all_reduce(y, "dp")) == I
                with pytest.raises(mc.VaryingError, match="item"):
                    y.sum().item()
            assert calls

    on_ranks(run)


def test_a_mesh_of_one() -> None:
    def run() -> Any:
        x, w = mc.mark_varying(rows(), "dp"), same()
        y = mc.all_reduce(sq(x @ w), "dp")
        (g,) = torch.autograd.grad(y, w)
        with pytest.raises(mc.VaryingError, match="reduced already"):
            mc.all_reduce(y, "dp")
        return g

    w = weight().requires_grad_()
    (expected,) = torch.autograd.grad(sq(rows() @ w), w)
    for mode in (True, False):
        if mode is True:
            assert_close(on_ranks(run, mode, {"dp": 1})[0], expected)


def test_threads_of_their_own() -> None:
    """A check is its thread's."""

    def run() -> None:
        found: list[Any] = []
        worker = threading.Thread(target=lambda: found.append((watch.here.watcher, ones(2) + ones(2))))
        worker.start()
        worker.join()
        assert found[0][0] is None
        assert kind(found[0][1]) is None
        assert kind(ones(2) + ones(2)) == I

    on_ranks(run)


def test_saved_copied_and_pickled() -> None:
    def run() -> None:
        x, w = own(), mc.mark_varying(nn.Parameter(ones(3)), ())
        file = io.BytesIO()
        torch.save({"x": x, "w": w, "y": x * w}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert isinstance(loaded["w"], nn.Parameter)
        with mc.check_vma(False):
            assert_close(loaded["x"], x)
            assert_close(pickle.loads(pickle.dumps(x)), x)
        assert kind(copy.deepcopy(x)) == V
        assert kind(mc.mark_varying(loaded["w"], ())) == I
        assert kind(mc.mark_varying(copy.deepcopy(w), ())) == I

    on_ranks(run)
    assert marked(pickle.loads(pickle.dumps(mc.mark_varying(ones(2), "dp")))) is None


BACKENDS = ["eager", "aot_eager"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_code_is_refused(backend: str) -> None:
    if OLD:
        pytest.skip("torch 2.11's dynamo ends the process where it is called in a mode on a thread of its own")
    compiled = torch.compile(lambda x, w: x @ w, backend=backend)

    def run() -> None:
        mesh = mc.make_mesh(LINE)
        assert_close(compiled(ones(2, 3), ones(3, 3)), 3 * ones(2, 3))  # also what was compiled before
        with mc.use_mesh(mesh), mc.check_vma():
            x, w = own(), same()
            with pytest.raises(
                Exception, match=r"torch\.compile cannot trace checked code(?s:.)*mc\.check_vma\(False\)"
            ):
                compiled(x, w)
            with mc.check_vma(False):
                y = compiled(x, mc.pvary(w, "dp"))
            mc.mark_varying(y, "dp")
            (g,) = torch.autograd.grad(mc.all_reduce(y.sum(), "dp"), w)
        assert_close(g, (ones(2, 3) * 3).T @ ones(2, 3))

    mc.launch(run, ranks=N)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_check_in_compiled_code_is_refused(fullgraph: bool) -> None:
    @torch.compile(backend="eager", fullgraph=fullgraph)
    def compiled(x: Tensor, w: Tensor) -> Tensor:
        with mc.check_vma():
            return x @ w

    def run() -> None:
        x, w = mc.mark_varying(rows(), "dp"), same()
        with mc.use_mesh(mc.make_mesh(LINE)), pytest.raises(Exception, match="cannot trace checked code|check_vma"):
            compiled(x, w)

    mc.launch(run, ranks=N)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_functions_compile_after_a_check() -> None:
    on_ranks(lambda: Scale.apply(own(), same()))  # type: ignore[no-untyped-call]
    x, w = rows().requires_grad_(), weight()
    compiled = torch.compile(lambda x, w: sq(Scale.apply(x, w)), backend="eager", fullgraph=True)  # type: ignore[no-untyped-call]
    assert_close(torch.autograd.grad(compiled(x, w), x)[0], torch.autograd.grad(sq(x @ w), x)[0])


# ------------------------------------------------------------------------------------------------------------- processes

ON_PROCESSES = ["product", "setitem", "a custom function", "checkpoint"]


def all_on_a_process() -> list[Any]:
    mesh = mc.make_mesh({"dp": 2, "rest": 2})
    index = mesh.coordinate["dp"]
    found = []
    for name in ON_PROCESSES:
        x = mc.mark_varying(rows().chunk(N)[index].clone().requires_grad_(), "dp", mesh=mesh)
        w = mc.mark_varying(weight().requires_grad_(), ())
        with mc.use_mesh(mesh), mc.check_vma():
            y = mc.all_reduce(PROGRAMS[name](x, w), "dp")
            found.append((index, y.detach(), *torch.autograd.grad(y, [x, w])))
    return found


def test_on_processes(pool4: Any) -> None:
    for found in pool4.run(all_on_a_process):
        for name, (index, y, of_x, of_w) in zip(ON_PROCESSES, found, strict=True):
            expected = right(PROGRAMS[name])
            assert_close(y, expected[0])
            assert_close(of_x, expected[1].chunk(N)[index])
            assert_close(of_w, expected[2])


def sent_typed(given: Tensor) -> Any:
    with checked(axes={"dp": 4}):
        assert kind(given) is None  # what it was elsewhere says nothing of what it is here
        return own() + mc.mark_varying(given, ())[0]


def test_typed_tensors_between_processes(pool4: Any) -> None:
    for index, x in enumerate(pool4.run(sent_typed, mc.mark_varying(ones(2, 3), "dp", mesh=mc.make_mesh(LINE)))):
        assert marked(x) is None
        assert_close(x, ones(2, 3) + index + 1)
