"""The checker of varying types against programs that are out to deceive it.

A program is a function of one rank's rows ``x`` and of a weight ``w`` that is the same on every rank; its loss is summed
over the ranks. No ``pvary`` is written anywhere. Its value and gradients are those of the sum of the same function over
all parts of ``x``, or it is refused. Ranks are run one by one, without shard_map, where nothing else would notice.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import einsum, rearrange, reduce, repeat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from vma_checks import F64, I, Local, N, Pair, compare, kind_or_none, mine, ones, right, sq, zeros

import meshcomm as mc


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
    def refused() -> None:
        place = r"\w+\.py" if name == "einops" else r"test_check_vma\.py"
        with pytest.raises(mc.VaryingError, match=rf"{place}:\d+.*along 'dp', where others vary") as caught:
            mine(PROGRAMS[name], "error")
        assert "fix: mc.pvary(" in str(caught.value)
        del caught  # a circle: torch 2.11 leaves the hooks of a checkpoint as long as what was raised in it is there

    mc.launch(refused, ranks=N)
