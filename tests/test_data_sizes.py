"""Sizes that depend on data: followed to where they meet what is invariant, or refused as plain numbers.

Each program is h(s, x): s is one value on both ranks, x this rank's own. Its gradient is held against that of the two
calls, one after the other, without a mesh.
"""

from __future__ import annotations

import copy
import math
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import meshcomm as mc
from meshcomm.spmd.types.sizes import ragged
from meshcomm.spmd.types.sizes.varying_numbers import COUNTS, Varying, varying
from meshcomm.spmd.types.vma import Origin, Type

F64 = torch.float64
Body = Callable[[Tensor, Tensor], Tensor]
MESH = mc.make_mesh({"dp": 2})
DATA = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)
here = threading.local()


def place() -> Tensor:
    """This rank's place, on a mesh and without one."""
    return here.place if getattr(here, "place", None) is not None else mc.axis_index("dp")


def gradient(h: Body) -> Tensor:
    def body(x: Tensor) -> Tensor:
        return mc.all_reduce(h(mc.all_reduce(x, "dp"), x.detach()), "dp")

    whole = DATA.clone().requires_grad_()
    return torch.autograd.grad(mc.shard_map(body, mesh=MESH, in_specs="(dp n)", out_specs="")(whole), whole)[0]


def one_by_one(h: Body) -> Tensor:
    whole = DATA.clone().requires_grad_()
    s = whole[:2] + whole[2:]
    try:
        total = torch.zeros((), dtype=F64)
        for rank in range(2):
            here.place = torch.tensor(rank)
            total = total + h(s, DATA[2 * rank : 2 * rank + 2])
    finally:
        here.place = None
    return torch.autograd.grad(total, whole)[0]


def chosen(x: Tensor) -> Tensor:
    """None of the first rank's, both of the other's."""
    return x[x > 2]


def times(size: Callable[[Tensor], Any]) -> Body:
    """A size that meets what is invariant."""
    return lambda s, x: (s * size(x) * x).sum()


def written(s: Tensor, x: Tensor, key: Any, value: Any) -> Tensor:
    z = torch.zeros(2, dtype=F64)
    z[key] = value
    return (z * s * x).sum()


def n(x: Tensor) -> Any:
    return chosen(x).shape[0]


WHERE_FROM: dict[str, Callable[[Tensor], Any]] = {
    "a mask": lambda x: x[x > 2].shape[0],
    "two dims masked": lambda x: torch.ones(2, 2)[x.expand(2, 2) > 2].shape[0],
    "size": lambda x: chosen(x).size(0),
    "size of all dims": lambda x: chosen(x).size()[-1],
    "numel": lambda x: chosen(x).numel(),
    "nelement": lambda x: chosen(x).nelement(),
    "torch.numel": lambda x: torch.numel(chosen(x)),
    "nbytes": lambda x: chosen(x).nbytes,
    "stride": lambda x: chosen(x).expand(3, -1).contiguous().stride(0),
    "aten.sym_size": lambda x: torch.ops.aten.sym_size(chosen(x), 0),
    "nonzero": lambda x: (x > 2).nonzero().shape[0],
    "nonzero as a tuple": lambda x: (x > 2).nonzero(as_tuple=True)[0].shape[0],
    "aten.nonzero": lambda x: torch.ops.aten.nonzero(x > 2).shape[0],
    "nonzero into": lambda x: torch.nonzero(x > 2, out=torch.empty(0, dtype=torch.long)).shape[0],
    "argwhere": lambda x: torch.argwhere(x > 2).shape[0],
    "where": lambda x: torch.where(x > 2)[0].shape[0],
    "masked_select": lambda x: x.masked_select(x > 2).shape[0],
    "masked_select into": lambda x: torch.masked_select(x, x > 2, out=torch.empty(0, dtype=F64)).shape[0],
    "index_select": lambda x: x.index_select(0, (x > 2).nonzero()[:, 0]).shape[0],
    "an index of nonzero": lambda x: x[(x > 2).nonzero()[:, 0]].shape[0],
    "unique": lambda x: (x > 1).unique().shape[0],
    "torch.unique": lambda x: torch.unique((x > 1).long(), return_inverse=True)[0].shape[0],
    "counts of unique": lambda x: torch.unique(x > 1, return_counts=True)[1].shape[0],
    "unique_consecutive": lambda x: torch.unique_consecutive(x > 1).shape[0],
    "bincount": lambda x: torch.bincount(x.long()).shape[0],
    "one_hot": lambda x: F.one_hot(x.long()).shape[1],
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()).shape[0],
    "repeats alone": lambda x: torch.repeat_interleave(x.long()).shape[0],
    "arange": lambda x: torch.arange(place()).shape[0],
    "arange from to": lambda x: torch.arange(0, place() * 3 + 1).shape[0],
    "a slice": lambda x: torch.ones(4)[: place()].shape[0],
    "a slice from": lambda x: torch.ones(4)[place() :].shape[0],
    "narrow": lambda x: x.narrow(0, 0, place()).shape[0],
    "topk": lambda x: x.topk(place() + 1)[0].shape[0],
    "full": lambda x: torch.full((place() + 1,), 2.0).shape[0],
    "expand": lambda x: torch.ones(1).expand(place() + 1).shape[0],
    "tensor_split": lambda x: x.tensor_split(place()[None])[0].shape[0],
    "split_rows": lambda x: mc.split_rows(x, torch.stack([place(), 2 - place()]))[0].shape[0],
    "split": lambda x: x.split([n(x), 2 - n(x)])[0].shape[0],
    "pack_padded_sequence": lambda x: torch.nn.utils.rnn.pack_padded_sequence(
        torch.ones(2, 4), x.long(), batch_first=True, enforce_sorted=False
    ).data.shape[0],
    "pad_sequence": lambda x: torch.nn.utils.rnn.pad_sequence([chosen(x), x[:1]]).shape[0],
    "to_sparse": lambda x: (x > 2).to(F64).to_sparse().values().shape[0],
}
"""Each gives a number that differs between the ranks."""

HANDED_ON: dict[str, Callable[[Tensor], Any]] = {
    "detach": lambda x: chosen(x).detach().clone().shape[0],
    "two dims": lambda x: chosen(x)[:, None].T.shape[1],
    "unsqueeze_": lambda x: chosen(x).unsqueeze_(0).shape[1],
    "matmul": lambda x: (chosen(x)[:, None] @ torch.ones(1, 3, dtype=F64)).shape[0],
    "einsum": lambda x: torch.einsum("i,j->ij", chosen(x), x).shape[0],
    "sort": lambda x: chosen(x).sort()[0].shape[0],
    "cat": lambda x: torch.cat([chosen(x), x]).shape[0],
    "stack": lambda x: torch.stack([chosen(x), chosen(x)]).shape[1],
    "flip": lambda x: chosen(x).flip(0).shape[0],
    "the first": lambda x: chosen(x)[:1].shape[0],
    "zeros_like": lambda x: torch.zeros_like(chosen(x)).shape[0],
    "pad": lambda x: F.pad(x, (0, n(x))).shape[0],
    "meshgrid": lambda x: torch.meshgrid(chosen(x), x, indexing="ij")[0].shape[0],
    "a module": lambda x: torch.nn.Identity()(chosen(x)).shape[0],
    ".data": lambda x: setattr(z := torch.zeros(4, dtype=F64), "data", chosen(x)) or z.shape[0],
    "resize_": lambda x: torch.empty(0).resize_(n(x)).shape[0],
    "func.grad": lambda x: torch.func.grad(lambda r: (r * r).sum())(chosen(x)).shape[0],
    "vmap": lambda x: torch.vmap(lambda r: r * 2)(x[x > 1]).shape[0],
    "autograd.grad": lambda x: torch.autograd.grad((r := chosen(x).requires_grad_()).square().sum(), r)[0].shape[0],
    "checkpoint": lambda x: checkpoint(lambda r: r * 2, chosen(x), use_reentrant=False).shape[0],
    "custom function": lambda x: Twice.apply(chosen(x)).shape[0],
}
"""The same, further on."""


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


COMPUTED: dict[str, Callable[[Tensor], Any]] = {
    "numpy's sqrt": lambda x: np.sqrt(n(x)),
    "numpy's log": lambda x: np.log(n(x) + 1),
    "a quotient": lambda x: n(x).numerator / n(x).denominator,
    "real": lambda x: n(x).real + n(x).imag,
    "sum": lambda x: 5 - (n(x) + 1),
    "power": lambda x: n(x) ** 2,
    "root": lambda x: n(x) ** 0.5,
    "quotient": lambda x: 1 / (n(x) + 1),
    "whole quotient": lambda x: (7 + n(x)) // 2,
    "remainder": lambda x: -n(x) % 4,
    "divmod": lambda x: divmod(n(x) + 3, 2)[0],
    "negative": lambda x: -n(x) + abs(n(x) - 1),
    "rounded": lambda x: round(n(x) / 3) + math.ceil(n(x) / 4) + math.floor(n(x) / 2) + math.trunc(n(x) / 2),
    "bits": lambda x: (n(x) << 1) | 1,
    "product of a shape": lambda x: math.prod(chosen(x).shape),
    "sum of sizes": lambda x: sum([n(x), n(x)]),
    "sym_max": lambda x: 1 / torch.sym_max(n(x), 1),
    "sym_min": lambda x: torch.sym_min(n(x), 1),
    "sym_float": lambda x: torch.sym_float(n(x)) / 3,
    "ones": lambda x: torch.ones(n(x)).sum(),
    "ones of a shape": lambda x: torch.ones(*chosen(x).shape).sum(),
    "ones_like": lambda x: torch.ones_like(chosen(x)).sum(),
    "new_ones": lambda x: x.new_ones(chosen(x).shape).sum(),
    "expand_as": lambda x: torch.ones(1).expand_as(chosen(x)).sum(),
    "arange of it": lambda x: torch.arange(n(x)).sum(),
    "full of it": lambda x: torch.full((2,), n(x)),
    "a tensor of it": lambda x: torch.tensor([n(x), 1]),
    "eye": lambda x: torch.eye(n(x) + 1).sum(),
    "randn": lambda x: torch.ones_like(torch.randn(n(x))).sum(),
    "where": lambda x: torch.where(x > 2, 1.0, n(x) + 1),
    "foreach": lambda x: torch._foreach_mul([torch.ones(2)], n(x))[0],
    "a place": lambda x: torch.ones(2, 2)[:, : n(x)].sum(),
}
"""Numbers made of a size."""

MET: dict[str, Body] = {
    "a slice of s": lambda s, x: (s[: place()].sum() * x).sum(),
    "a place of s": lambda s, x: (s[n(x) - 1] * x).sum(),
    "a split of s": lambda s, x: (mc.split_rows(s, torch.stack([place(), 2 - place()]))[0].sum() * x).sum(),
    "added in place": lambda s, x: (s.clone().add_(n(x)) * s).sum(),
    "clamp": lambda s, x: (s.clamp(max=n(x) + 4) * x).sum(),
    "fill_": lambda s, x: (torch.zeros(2, dtype=F64).fill_(n(x)) * s * x).sum(),
    "written": lambda s, x: written(s, x, 0, n(x)),
    "written there": lambda s, x: written(s, x, slice(0, n(x)), 1.0),
    "mean of what is chosen": lambda s, x: (s * chosen(x).sum() / (1 + chosen(x).numel())).sum(),
    "from the right": lambda s, x: ((7 - n(x)) * s * x + n(x) / s).sum(),
    "a mean over all": lambda s, x: (s * x).sum() / (1 + n(x)),
    "as a type": lambda s, x: (s * x).sum() if isinstance(n(x), (int, torch.SymInt)) else x.sum(),
}

DIMS: dict[str, Callable[[Tensor], Any]] = {
    "transpose": lambda y: y.view(1, 2).transpose(place(), 0).shape[0],
    "movedim": lambda y: y.view(1, 2).movedim(place(), 0).shape[0],
    "unsqueeze": lambda y: y.unsqueeze(place()).shape[0],
    "pooling": lambda y: F.avg_pool1d(y[None], place() + 1).shape[1],
    "a window": lambda y: F.max_pool1d(y[None], place() + 1).shape[1],
    "fft": lambda y: torch.fft.fft(y, n=place() + 3).shape[0],
    "minlength": lambda y: torch.bincount(torch.tensor([0]), minlength=place() + 4).shape[0],
    "rot90": lambda y: torch.rot90(y.view(1, 2), place()).shape[0],
    "glu": lambda y: F.glu(y.repeat(4).view(2, 4), dim=place()).shape[0],
    "vander": lambda y: torch.vander(y, place() + 1).shape[1],
    "pixel_shuffle": lambda y: F.pixel_shuffle(y.repeat(2).view(1, 4, 1, 1), place() + 1).shape[2],
}
"""Tensors that stand for a dim, or for a length that says only in the end how long the result is."""

RIGHT: dict[str, Body] = {f"from {name}": times(size) for name, size in WHERE_FROM.items()}
RIGHT |= {f"through {name}": times(size) for name, size in HANDED_ON.items()}
RIGHT |= {f"by a tensor: {name}": times(size) for name, size in DIMS.items()}
RIGHT |= {f"number: {name}": times(size) for name, size in COMPUTED.items()} | MET


@pytest.mark.parametrize("name", RIGHT)
def test_a_size_is_followed(name: str) -> None:
    right = one_by_one(RIGHT[name])
    assert_close(gradient(RIGHT[name]), right)
    assert right.any()


def looped(x: Tensor) -> float:
    return sum(1.0 for _ in range(n(x)))


def counted_down(x: Tensor) -> float:
    total, left = 0.0, n(x)
    while left > 0:
        total, left = total + 1.0, left - 1
    return total


PLAIN: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "len": (lambda x: len(chosen(x)), r"len\(\) at test_data_sizes.py:\d+ gives a plain number"),
    "__len__": (lambda x: chosen(x).__len__(), r"len\(\)"),
    "iteration": (lambda x: sum(1.0 for _ in chosen(x)), "unbind, or iterating,"),
    "list": (lambda x: len(list(chosen(x))), "unbind, or iterating,"),
    "enumerate": (lambda x: sum(i for i, _ in enumerate(chosen(x))), "unbind, or iterating,"),
    "zip": (lambda x: len(list(zip(chosen(x), [1, 2], strict=False))), "unbind, or iterating,"),
    "a star": (lambda x: len([*chosen(x)]), "unbind, or iterating,"),
    "reversed": (lambda x: len(list(reversed(chosen(x)))), "unbind, or iterating,"),
    "unbind": (lambda x: len(chosen(x).unbind()), "unbind, or iterating,"),
    "split": (lambda x: len(chosen(x).split(1)), "split, or iterating,"),
    "chunk": (lambda x: len(chosen(x).chunk(2)), "chunk, or iterating,"),
    "chunks": (lambda x: len(x.chunk(n(x) + 1)), "the number of parts, or of dims, of chunk"),
    "range": (looped, "range, an index of a list or another use as a plain number"),
    "an index": (lambda x: [1.0, 2.0, 3.0][n(x)], "an index of a list"),
    "a slice of a list": (lambda x: len([1, 2, 3][: n(x)]), "an index of a list"),
    "a list, repeated": (lambda x: len([0] * n(x)), "an index of a list"),
    "a text, repeated": (lambda x: len("a" * n(x)), "an index of a list"),
    "a key": (lambda x: {0: 1.0, 2: 3.0}[n(x)], "a key"),
    "if": (lambda x: 1.0 if n(x) else 2.0, "if at"),
    "not": (lambda x: 1.0 if not n(x) else 2.0, "if at"),
    "==": (lambda x: 1.0 if n(x) == 2 else 2.0, "a comparison"),
    ">": (lambda x: 1.0 if chosen(x).numel() > 1 else 2.0, "a comparison"),
    "a shape": (lambda x: 1.0 if chosen(x).shape == (2,) else 2.0, "a comparison"),
    "in a shape": (lambda x: 1.0 if 2 in chosen(x).shape else 2.0, "a comparison"),
    "max": (lambda x: max(n(x), 1), "a comparison"),
    "sorted": (lambda x: sorted([n(x), 1])[0], "a comparison"),
    "while": (counted_down, "a comparison"),
    "int": (lambda x: int(n(x)), r"int\(\)"),
    "float": (lambda x: float(n(x)), r"float\(\)"),
    "complex": (lambda x: complex(n(x)).real, r"complex\(\)"),
    "math.sqrt": (lambda x: math.sqrt(n(x)), r"float\(\)"),
    "of a quotient": (lambda x: int(n(x) / 2), r"int\(\)"),
    "tolist": (lambda x: len(chosen(x).tolist()), "tolist"),
    "_local_scalar_dense": (lambda x: torch.ops.aten._local_scalar_dense(x.sum()), "_local_scalar_dense"),
    "parts": (lambda x: len(x.chunk(place() + 1)), "the number of parts, or of dims, of chunk"),
    "parts, by their length": (lambda x: len(x.split(place() + 1)), "the number of parts, or of dims, of split"),
    "sections": (lambda x: len(x.tensor_split(place() + 1)), "the number of parts, or of dims, of tensor_split"),
    "hsplit": (lambda x: len(x.hsplit(n(x))), "the number of parts, or of dims, of hsplit"),
    "how many dims": (lambda x: x.view(1, 2).flatten(place()).dim(), "the number of parts, or of dims, of flatten"),
    "squeezed": (lambda x: x.view(1, 2).squeeze(place()).dim(), "the number of parts, or of dims, of squeeze"),
    "a size by a tensor": (lambda x: torch.ones(2, 3).size(place()), "size"),
    "a stride by a tensor": (lambda x: torch.ones(2, 3).stride(place()), "stride"),
    "_nnz": (lambda x: (x > 2).to(F64).to_sparse()._nnz(), "_nnz"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_number_is_refused(name: str) -> None:
    size, text = PLAIN[name]
    with pytest.raises(mc.VaryingError, match=text) as caught:
        gradient(times(size))
    assert "'dp'" in str(caught.value).split("\n")[0]
    assert "  fix: " in str(caught.value)


def test_a_number_that_is_returned_is_refused() -> None:
    """The caller would have that of one rank."""

    def body(x: Tensor) -> tuple[Tensor, int]:
        return x, n(x)

    with pytest.raises(mc.VaryingError, match=r"the return of output\[1\] .*is a size that depends on data"):
        mc.shard_map(body, mesh=MESH, in_specs="(dp n)", out_specs=("(dp n)", None))(DATA)


def test_a_key_is_refused_as_unhashable_too() -> None:
    """So that who caches by sizes goes without."""
    with pytest.raises(TypeError, match="a key"):
        gradient(times(PLAIN["a key"][0]))


# --------------------------------------------------------------------------------------------------- not to be refused


def same_everywhere(s: Tensor, x: Tensor) -> Tensor:
    """Sizes that only look as if they depended on what varies."""
    q, mask, rows = s.detach() + 3, x > 2, x[x > 2][:, None].expand(-1, 5)
    count = int((q > 4).sum())  # of what is invariant
    for _ in range(len(q[q > 4])):
        count += 1
    count += len(torch.unique(q)) + q.nonzero().shape[0] + len(q[q > 4].tolist())
    for part in q[q > 4]:
        count += int(part > 0)
    assert rows.shape[1] == 5
    assert rows.dim() == 2
    assert len(rows.T) == 5
    assert len(rows.sum(0)) == 5
    assert rows.shape == rows.shape
    assert rows.shape == (rows * 2).shape
    assert (rows.T @ rows).shape == (5, 5)
    assert len(torch.bincount(x.long(), minlength=9)) == 9
    assert F.one_hot(x.long(), 7).shape[1] == 7
    assert len(x.where(mask, 0)) == 2
    assert len(torch.zeros(4).index_add(0, mask.nonzero()[:, 0], x[mask].float())) == 4
    whole = torch.cat([x[mask], x[~mask]]) + x
    assert len(whole) == 2
    assert len(whole * whole) == 2
    assert len(x.narrow(0, place(), 1)) == 1
    assert len(x[place()].expand(3)) == 3
    assert f"{n(x)} {n(x):3d} {n(x)!r} {x}"
    assert str(n(x) / 2)
    return (s * x).sum() * count


def test_what_is_the_same_everywhere_is_a_plain_number() -> None:
    assert_close(gradient(same_everywhere), one_by_one(same_everywhere))


def test_where_nobody_looks_a_size_is_an_int() -> None:
    number = varying(3, COUNTS, Type({"dp": Origin("here")}))
    half = varying(1.5, (0.0, 1.0, 2.0), Type({"dp": Origin("here")}))
    assert isinstance(number, int)
    assert isinstance(half, float)
    assert list(range(number)) == [0, 1, 2]
    assert {3: "x"}[number] == "x"
    assert (int(half), float(half), number + 1, type(number + 1), -half) == (1, 1.5, 4, int, -1.5)
    assert number > 2
    assert number == 3
    assert not number < 1
    assert torch.equal(torch.ones(2) * number, torch.full((2,), 3.0))
    assert torch.equal(number * torch.ones(2), torch.full((2,), 3.0))
    assert torch.zeros(number, 2).shape == (3, 2)
    assert copy.deepcopy(number) is number
    assert pickle.loads(pickle.dumps([number, half])) == [3, 1.5]


def test_a_size_that_was_kept_is_used_outside() -> None:
    kept: dict[int, Any] = {}

    def body(x: Tensor) -> Tensor:
        kept[len(kept)] = n(x)
        with mc.check_vma(False):
            assert sum(1 for _ in range(n(x) + 0)) in (0, 2)
        return x * 2

    mc.shard_map(body, mesh=MESH, in_specs="(dp n)", out_specs="(dp n)")(DATA)
    assert sorted(int(number) for number in kept.values()) == [0, 2]
    assert (torch.ones(2) * kept[1]).tolist() == [2.0 * kept[1] / 2] * 2


# ------------------------------------------------------------------------------------------------- dropless experts

D, E, N = 4, 4, 8
Expert = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def gated(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    weight, choice = (x @ g).softmax(-1).max(-1)
    return weight, choice


def every_expert(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
    weight, choice = gated(x, g)
    return weight[:, None] * torch.tanh(torch.einsum("nd,ndf->nf", x, w[choice]) + b[choice])


def by_split_rows(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
    weight, choice = gated(x, g)
    order = choice.argsort(stable=True)
    parts = mc.split_rows(x[order], torch.bincount(choice, minlength=E))
    y = torch.cat([torch.tanh(part @ w[e] + b[e]) for e, part in enumerate(parts)])
    assert len(y[order.argsort()] + x) == N // 2
    return weight[:, None] * torch.zeros_like(x).index_copy(0, order, y)


def by_index_add(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
    weight, choice = gated(x, g)
    y = torch.zeros_like(x)
    for e in range(E):
        (rows,) = torch.where(choice == e)
        y.index_add_(0, rows, torch.tanh(F.linear(x[rows], w[e].T, b[e])) * weight[rows, None])
    return y


def by_masks(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
    weight, choice = gated(x, g)
    y = torch.zeros_like(x)
    for e in range(E):
        mine = choice == e
        rows = x[mine]
        count, width = rows.shape
        assert rows.shape == (count, width)
        halves = rows.view(count, 2, width // 2).flatten(1).reshape(-1, width)
        y[mine] = torch.tanh(halves @ w[e] + b[e].expand(count, width)) * weight[mine].unsqueeze(-1)
    return y


def by_masked_scatter(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
    weight, choice = gated(x, g)
    y = torch.zeros_like(x)
    for e in range(E):
        mine = choice == e
        y = y.masked_scatter(mine[:, None], torch.tanh(x[mine] @ w[e] + b[e]) * weight[mine].view(-1, 1))
    return y


def by_checkpoint(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
    weight, choice = gated(x, g)
    y = torch.zeros_like(x)

    def expert(rows: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(rows @ w + b) * torch.ones(rows.shape[0], 1, dtype=F64)

    for e in range(E):
        mine = choice == e
        y[mine] = checkpoint(expert, x[mine], w[e], b[e], use_reentrant=False) * weight[mine].unsqueeze(-1)
    return y


def exchanged(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
    """The experts are cut, and the tokens go to them."""
    (weight, choice), ranks = gated(x, g), mc.axis_size("dp")
    order = choice.argsort(stable=True)
    counts = torch.bincount(choice, minlength=E)
    theirs = mc.all_to_all(counts, "dp", 0, 0)
    with mc.check_vma(False):
        send, receive = (each.view(ranks, -1).sum(1).tolist() for each in (counts, theirs))
    rows = mc.all_to_all(x[order], "dp", 0, 0, send, receive)
    expert = torch.arange(E // ranks).repeat(ranks).repeat_interleave(theirs)
    by_expert = expert.argsort(stable=True)
    first = mc.axis_index("dp") * (E // ranks)
    parts = mc.split_rows(rows[by_expert], theirs.view(ranks, -1).sum(0))
    y = torch.cat([torch.tanh(part @ w[e] + b[first + e]) for e, part in enumerate(parts)])
    back = mc.all_to_all(y[by_expert.argsort()], "dp", 0, 0, receive, send)
    return weight[:, None] * back[order.argsort()]


def exchanged_by_sizes(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
    """The same, and what was counted is followed all along."""
    (weight, choice), ranks = gated(x, g), mc.axis_size("dp")
    order = choice.argsort(stable=True)
    counts = torch.bincount(choice, minlength=E)
    theirs = mc.all_to_all(counts, "dp", 0, 0)
    send = [part.shape[0] for part in mc.split_rows(x[order], counts.view(ranks, -1).sum(1))]
    receive = [torch.arange(count).shape[0] for count in theirs.view(ranks, -1).sum(1).unbind()]
    rows = mc.all_to_all(x[order], "dp", 0, 0, send, receive)
    expert = torch.arange(E // ranks).repeat(ranks).repeat_interleave(theirs)
    first, y = mc.axis_index("dp") * (E // ranks), torch.zeros_like(rows)
    for e in range(E // ranks):
        y[expert == e] = torch.tanh(rows[expert == e] @ w[e] + b[first + e])
    back = mc.all_to_all(y, "dp", 0, 0, send_sizes=receive, recv_sizes=send)
    return weight[:, None] * back[order.argsort()]


EXPERTS = (by_split_rows, by_index_add, by_masks, by_masked_scatter, by_checkpoint, exchanged, exchanged_by_sizes)


def drawn() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((N, D), (E, D, D), (E, D), (D, E))
    return [torch.randn(shape, dtype=F64, generator=generator).requires_grad_() for shape in shapes]


def outcome(fn: Expert, *, twice: bool = False) -> list[Tensor]:
    given = drawn()
    y = fn(*given)
    found = torch.autograd.grad((y * torch.arange(y.numel(), dtype=F64).view_as(y)).sum(), given, create_graph=twice)
    if not twice:
        return [y, *found]
    curves = torch.autograd.grad(torch.stack([g.square().sum() for g in found]).sum(), given)
    return [y, *found, *curves]


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("fn", EXPERTS)
def test_dropless_experts(fn: Expert, mode: bool) -> None:
    def expert(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
        if not mode:
            w, b, g = (w if fn in (exchanged, exchanged_by_sizes) else mc.pvary(w, "dp")), *mc.pvary((b, g), "dp")
        return fn(x, w, b, g)

    weights = "(dp e) a b" if fn in (exchanged, exchanged_by_sizes) else "e a b"
    specs = ("(dp n) d", weights, "e d", "d e")
    parallel = mc.shard_map(expert, mesh=MESH, in_specs=specs, out_specs="(dp n) d", check_vma=mode)
    twice = fn in (by_split_rows, exchanged_by_sizes)
    assert_close(outcome(parallel, twice=twice), outcome(every_expert, twice=twice))


def test_a_branch_on_what_was_chosen_is_refused() -> None:
    """Only the ranks on which an expert has tokens would sum its gradient."""

    def expert(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
        weight, choice = gated(x, g)
        y = torch.zeros_like(x)
        for e in range(E):
            rows = (choice == e).nonzero()[:, 0]
            if rows.numel() == 0:
                continue
            y = y.index_add(0, rows, torch.tanh(x[rows] @ w[e] + b[e]) * weight[rows, None])
        return y

    specs = ("(dp n) d", "e a b", "e d", "d e")
    with pytest.raises(mc.VaryingError, match="a comparison at .* of a size that depends on data"):
        mc.shard_map(expert, mesh=MESH, in_specs=specs, out_specs="(dp n) d")(*drawn())


def on_a_rank() -> list[Any]:
    """The same around any code of a rank, with a weighted mean over what each has."""
    mesh = mc.make_mesh({"dp": 2})
    w = mc.mark_varying(torch.tensor([1.0, 2.0], dtype=F64, requires_grad=True), ())
    x = mc.mark_varying(DATA.view(2, 2)[mesh.rank], "dp")
    with mc.use_mesh(mesh), mc.check_vma():
        rows = x[x > 1]
        loss = mc.weighted_mean((rows[:, None] * w).sum(), rows.shape[0], "dp")
        loss.backward()
        gathered = mc.all_gather(torch.tensor([rows.shape[0]]), "dp")
        total = mc.all_reduce(torch.tensor(rows.shape[0]), "dp").item()
        parts = mc.shard(torch.arange(3.0), "dp", sizes=[1, 2])
        with pytest.raises(mc.VaryingError, match=r"len\(\)"):
            len(parts)
        with pytest.raises(mc.VaryingError, match="range"):
            range(mc.all_gather(rows, "dp", sizes=[1, 2]).shape[0] + rows.shape[0])
        assert len(mc.all_gather(rows, "dp", sizes=[1, 2])) == 3
    return [round(loss.item(), 9), w.grad.round(decimals=9).tolist(), gathered.tolist(), total]


def test_around_any_code() -> None:
    assert mc.launch(on_a_rank, ranks=2) == [[9.0, [3.0, 3.0], [1, 2], 3]] * 2


# ---------------------------------------------------------------------------------------------------- shapes elsewhere

ALONG = Type({"dp": Origin("here")})


def cut(x: Tensor, *dims: int) -> Tensor:
    """Of unknown length along these dims."""
    ragged.note_ragged(x, ragged.fresh(x.shape, dims, ALONG))
    return x


A, B, C = cut(torch.ones(3, 4), 0), torch.ones(3, 4), cut(torch.ones(3, 4, 2), 0)
PICK, LENGTH = cut(torch.tensor([0, 1, 2]), 0), ragged.number_of(ALONG)
ITEM, EVERY = Tensor.__getitem__, slice(None)
CALLS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (torch.mul, (A, 2)), (torch.mul, (A, A)), (torch.add, (A, torch.ones(4))), (torch.add, (A, B)),
    (torch.where, (A > 0, A, 0.0)), (torch.sum, (A,)), (torch.sum, (A, 0)), (torch.sum, (A, (0, -1))),
    (Tensor.sum, (A, 1, True)), (torch.mean, (C, (1, 2))), (torch.zeros, (LENGTH, 3)), (torch.zeros, ((LENGTH, 3),)),
    (Tensor.new_zeros, (B, LENGTH)), (Tensor.new_zeros, (B, (LENGTH, 2))), (Tensor.view, (A, -1)),
    (Tensor.view, (A, LENGTH, 2, 2)), (Tensor.reshape, (A, (-1, 2))), (Tensor.view, (A, -1, 7)), (torch.cat, ([A, A],)),
    (torch.cat, ([A, B],)), (torch.cat, ([A, A], -1)), (torch.cat, ([A, B], 1)), (F.linear, (A, torch.ones(5, 4))),
    (F.linear, (A, torch.ones(4, 6))), (torch.matmul, (A, torch.ones(4, 6))), (torch.matmul, (torch.ones(4, 4), A)),
    (ITEM, (A, 0)), (ITEM, (A, (EVERY, 0))), (ITEM, (A, (EVERY, None))), (ITEM, (A, (..., slice(1, 3)))),
    (ITEM, (A, slice(1, None))), (ITEM, (A, slice(None, 2))), (ITEM, (A, slice(None, -1, 1))),
    (ITEM, (A, slice(None, None, 2))), (ITEM, (B, PICK)), (ITEM, (B, (EVERY, PICK))), (ITEM, (B, (PICK, PICK))),
    (ITEM, (B, (PICK, 0))), (ITEM, (B, (0, PICK))), (ITEM, (C, (PICK, EVERY, None, 1))), (ITEM, (A, True)),
    (ITEM, (C, (..., 0))), (ITEM, (C, (None, ..., None))), (ITEM, (C, (1, ..., slice(0, 1)))),
    (torch.transpose, (A, 0, 1)), (torch.transpose, (C, -1, 1)), (torch.unsqueeze, (A, -1)), (torch.unsqueeze, (A, 0)),
    (torch.sort, (A,)), (torch.arange, (LENGTH,)), (torch.softmax, (A, -1)), (F.layer_norm, (A, (4,))),
    (torch.zeros_like, (A,)), (Tensor.index_add, (torch.zeros(9, 4), 0, PICK, A)), (Tensor.t, (A,)),
]  # fmt: skip


def shapes_there(fn: Callable[..., Any], args: tuple[Any, ...], world: int) -> list[tuple[int, ...]] | None:
    """What a call gives on ranks that have selected as many rows as they have in another place, by itself."""

    def there(value: Any) -> Any:
        if isinstance(value, Tensor):
            found = ragged.ragged_of(value)
            shape = value.shape if found is None else found.shapes[world]
            assert shape is not None
            return torch.empty(shape, dtype=value.dtype, device="meta")
        if isinstance(value, (tuple, list)):
            return type(value)(map(there, value))
        return value.others[world] if isinstance(value, Varying) else value

    try:
        with torch.device("meta"):
            return [tuple(y.shape) for y in ragged.tensors_of(fn(*map(there, args)))]
    except (RuntimeError, IndexError):
        return None


def test_shapes_elsewhere_are_those_of_the_call_there() -> None:
    for _ in range(2):  # computed, and looked up
        for fn, args in CALLS:
            found = ragged.shapes_elsewhere(fn, args, {}, 2 if fn is torch.sort else 1)
            assert found == [shapes_there(fn, args, world) for world in range(3)], (fn, args)
    assert ragged.shapes_elsewhere(torch.add, (A, 1), {"out": B}, 2) == [None] * 3
    size = ragged.shapes_elsewhere(torch.eye, (LENGTH,), {"device": "cpu"}, 1)[0]
    assert (size, ragged.shapes_elsewhere(Tensor.to, (A, "cpu"), {}, 1)[0]) == ([(0, 0)], [(0, 4)])


def test_one_is_neither_true_nor_a_float() -> None:
    """What was computed for one call is looked up for no other."""
    told = [ragged.shapes_elsewhere(ITEM, (A, index), {}, 1)[0] for index in (EVERY, None, True, slice(0, 1), 0)]
    assert told == [[(0, 4)], [(1, 0, 4)], [(1, 0, 4)], [(0, 4)], None]
    many = len(ragged._seen)
    assert ragged.shapes_elsewhere(ITEM, (torch.ones(200, 3), (list(range(200)), 0)), {}, 1) == [[(200,)]] * 3
    assert len(ragged._seen) == many
    assert [ragged.shapes_elsewhere(torch.arange, (end,), {}, 1)[0] for end in (1, 1.5, True)] == [
        [(1,)],
        [(2,)],
        [(1,)],
    ]


# ---------------------------------------------------------------------------------------------------------- split_rows


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_split_rows(dtype: torch.dtype) -> None:
    rows = torch.arange(12.0, dtype=F64).view(4, 3).requires_grad_()
    counts = torch.tensor([1, 0, 3], dtype=dtype)
    parts = mc.split_rows(rows, counts)
    assert [part.shape for part in parts] == [(1, 3), (0, 3), (3, 3)]
    assert_close(torch.cat(parts), rows)
    sum((i + 1) * part.square().sum() for i, part in enumerate(parts)).backward()
    assert_close(rows.grad, 2 * rows * torch.tensor([1.0, 3, 3, 3])[:, None])
    assert mc.split_rows(rows[:0], counts[:0]) == ()
    assert_close(torch.func.grad(lambda x: mc.split_rows(x, counts)[2].sum())(rows)[0], torch.zeros(3, dtype=F64))


@pytest.mark.parametrize(
    ("rows", "counts", "text"),
    [
        (torch.ones(4), torch.tensor([1, 2]), r"counts add up to 3, and there are 4 rows[\s\S]*bincount"),
        (torch.ones(4), torch.tensor([5, -1]), r"counts has -1 among its entries"),
        (torch.ones(4), torch.tensor([[4]]), r"counts is i64\[1, 1\]"),
        (torch.ones(4), torch.tensor([4.0]), r"counts is f32\[1\]"),
        (torch.ones(4), torch.tensor([True]), r"counts is bool\[1\]"),
        (torch.ones(4), [4], r"counts is no tensor but list"),
        (torch.ones(()), torch.tensor([1]), r"rows is f32\[\]"),
        ([1.0], torch.tensor([1]), r"rows is no tensor but list"),
    ],
)
@pytest.mark.parametrize("checked", [False, True])
def test_arguments_of_split_rows(rows: Any, counts: Any, text: str, checked: bool) -> None:
    def call(x: Tensor) -> Tensor:
        mc.split_rows(rows, counts)
        return x

    with pytest.raises(mc.MeshError, match="meshcomm.split_rows: " + text):
        mc.shard_map(call, mesh=MESH, in_specs="(dp n)", out_specs="(dp n)", check_vma=checked)(DATA)


def test_as_many_parts_on_every_rank() -> None:
    def call(x: Tensor) -> Tensor:
        return torch.cat(mc.split_rows(x, torch.ones(n(x), dtype=torch.long)))

    with pytest.raises(mc.VaryingError, match="split_rows at .* gives a plain number of what depends on data"):
        mc.shard_map(call, mesh=MESH, in_specs="(dp n)", out_specs="(dp n)")(DATA)
