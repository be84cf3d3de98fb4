"""pvary of a pytree: the gradients are summed bucket by bucket while the rest of the backward pass runs.

n = number of leaves in a bucket.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshcomm import _torch
from meshcomm._torch import dual_level_open, functorch_active, in_graph, let_into_graph
from meshcomm.collectives import buckets
from meshcomm.collectives.rule import apply, refuse_in_process, rule_named
from meshcomm.mesh import Axis, axis_with_key
from meshcomm.runtime.pending import Pending

__all__ = ["vary_tree"]


def vary_tree(leaves: list[Tensor], axis: Axis, bucket_mb: float) -> list[Tensor]:
    """The same values, whose gradients are summed over ``axis``."""
    if torch.compiler.is_compiling():
        refuse_in_process("pvary", axis)
        let_into_graph()
        return list(_vary_in_graph(leaves, axis.index_tensor, axis.key, bucket_mb))
    needy = [at for at, leaf in enumerate(leaves) if leaf.requires_grad and torch.is_grad_enabled()]
    if functorch_active() or dual_level_open() or (needy and not _torch.has_sequence_numbers()):
        return list(_one_node(axis, bucket_mb, *leaves))
    varied = [leaf.view_as(leaf) if at not in needy else leaf for at, leaf in enumerate(leaves)]
    # In reverse: the last layers' gradients are ready first.
    last_first = list(reversed(needy))
    for group in buckets.groups_of("pvary", [leaves[at] for at in last_first], bucket_mb, axis):
        places = [last_first[at] for at in group]
        for at, leaf in zip(places, _vary_bucket([leaves[at] for at in places], axis), strict=True):
            varied[at] = leaf
    return varied


# ------------------------------------------------------------------------------------------- two nodes for a bucket
# Autograd runs the ready node with the highest number first, which by default is the one made last: a single node at
# the top of the step would run after all layers. So one node starts the sum as soon as its gradients are there, and
# another one waits for it when nothing else is left. Between them goes an empty tensor, never the unfinished sum.

_AT_ONCE = 2**62


class _Numbers(threading.local):
    """Below those that autograd gives on this thread, and rising, so that what was made later still goes first."""

    def __init__(self) -> None:
        self.next = itertools.count().__next__


_numbers = _Numbers()


def _vary_bucket(leaves: list[Tensor], axis: Axis) -> Sequence[Tensor]:
    bucket = _Bucket(leaves, axis)
    token: Tensor = _Wait.apply(bucket, *leaves)  # type: ignore[no-untyped-call]
    varied: tuple[Tensor, ...] = _Start.apply(token, bucket, *[x.detach() for x in leaves])  # type: ignore[no-untyped-call]
    _torch.set_sequence_number(token.grad_fn, _numbers.next())
    _torch.set_sequence_number(varied[0].grad_fn, _AT_ONCE)
    return varied


class _Bucket:
    """The gradients of some leaves on their way.

    Behind those of n > 1 leaves go n numbers, 1 where this rank has a gradient: a leaf that no rank has one for gets
    none, as it would alone.
    """

    __slots__ = ("axis", "missing", "shapes", "sizes", "total")

    def __init__(self, leaves: list[Tensor], axis: Axis) -> None:
        self.axis = axis
        self.shapes = [leaf.shape for leaf in leaves]
        self.sizes = [leaf.numel() for leaf in leaves]
        self.missing: list[int] = []
        self.total: Any = None

    def start(self, gs: Sequence[Tensor | None]) -> None:
        """Sum them, later unless somebody differentiates it or looks for NaN on the way."""
        self.missing = [i for i, g in enumerate(gs) if g is None]
        some = next(g for g in gs if g is not None)
        parts = [
            some.new_zeros(1, size) if g is None else g.reshape(1, size) for g, size in zip(gs, self.sizes, strict=True)
        ]
        if len(gs) > 1:
            flags = some.new_ones(1, len(gs))
            if self.missing:
                flags[0, self.missing] = 0
            parts.append(flags)
        at_once = torch.is_grad_enabled() or torch.is_anomaly_enabled()
        flat = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        self.total = apply(rule_named("all_reduce"), flat, self.axis if at_once else self.axis.later, ("sum",))

    def finish(self) -> list[Tensor | None]:
        """The sums."""
        total, self.total = self.total, None
        whole: Tensor = total.wait(None) if isinstance(total, Pending) else total
        sums: list[Tensor | None] = []
        place = 0
        for shape, size in zip(self.shapes, self.sizes, strict=True):
            sums.append(whole[0, place : place + size].view(shape))
            place += size
        if len(sums) > 1:
            for i in self.missing:
                if not whole[0, place + i]:
                    sums[i] = None
        return sums


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, bucket: _Bucket, *xs: Tensor) -> Tensor:
        ctx.bucket = bucket
        return xs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.bucket.finish()


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, bucket: _Bucket, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        bucket: _Bucket = ctx.bucket
        some = next((g for g in gs if g is not None), None)
        if some is None:  # no gradient came through
            return (None,) * (2 + len(gs))
        bucket.start(gs)
        return some.new_empty(0), None, *[None] * len(gs)


# ---------------------------------------------------------------------------------------------- one node for a tree


class _OneNode(Function):
    """pvary of many tensors where autograd's order is not ours to choose: under transforms and in a graph."""

    @staticmethod
    def forward(axis: Axis, bucket_mb: float, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.axis, ctx.bucket_mb = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> tuple[Tensor | None, ...]:
        needed = [i for i in range(len(gs)) if ctx.needs_input_grad[2 + i]]
        results: list[Tensor | None] = [None] * len(gs)
        for i, total in zip(needed, _sum_tree([gs[i] for i in needed], ctx.axis, ctx.bucket_mb), strict=True):
            results[i] = total
        return None, None, *results

    @staticmethod
    def jvp(ctx: Any, _axis: None, _bucket_mb: None, *ts: Tensor) -> tuple[Tensor, ...]:
        return tuple(apply(rule_named("pvary"), t, ctx.axis) for t in ts)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], axis: Axis, bucket_mb: float, *xs: Tensor) -> tuple[Any, Any]:
        return tuple(vary_tree(list(xs), axis, bucket_mb)), in_dims[2:]


_one_node: Callable[..., tuple[Tensor, ...]] = _OneNode.apply


def _sum_tree(leaves: list[Tensor], axis: Axis, bucket_mb: float) -> list[Tensor]:
    rule = rule_named("all_reduce")
    return buckets.elementwise("pvary", leaves, axis, bucket_mb, lambda flat: apply(rule, flat, axis, ("sum",)))


@in_graph
def _vary_in_graph(leaves: list[Tensor], index: Tensor, key: int, bucket_mb: float) -> tuple[Tensor, ...]:
    return _one_node(axis_with_key(key).traced(index), bucket_mb, *leaves)
