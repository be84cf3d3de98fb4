"""pvary of a pytree: the gradients are summed bucket by bucket while the rest of the backward pass runs.

n = number of leaves in a bucket.

Source: the buckets of DistributedDataParallel; that they are rebuilt in the order of the first pass is its idea too.
"""

from __future__ import annotations

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
    if functorch_active() or dual_level_open():
        return list(_one_node(axis, bucket_mb, *leaves))
    needy = [at for at, leaf in enumerate(leaves) if leaf.requires_grad and torch.is_grad_enabled()]
    varied = [leaf.view_as(leaf) for leaf in leaves]
    if needy:
        for at, leaf in zip(needy, _vary([leaves[at] for at in needy], axis, bucket_mb), strict=True):
            varied[at] = leaf
    return varied


# -------------------------------------------------------------------------------------------- sums during backward
# Autograd runs the ready node with the highest number first, by default the one made last: a node at the top of the
# step would run after all layers. So nodes with a high number take the gradients as they become ready, bucket by
# bucket, and start the sums; a node with a low number waits for all sums when nothing else is left. Between them goes
# an empty tensor, never an unfinished sum.
#
# Buckets start in one order on all ranks, whatever the order in which their gradients become ready on each. The first
# backward pass for a tree finds out that order, starts nothing early, and the ranks agree on what index 0 saw.

_AT_ONCE = 2**62
_AT_LAST = 0


class _First(threading.local):
    """Uses up autograd's first number on this thread, so that all of the user's are above ``_AT_LAST``: compared with
    them it must not come out in one way on one rank and in another way on another.
    """

    def __init__(self) -> None:
        with torch.enable_grad():
            torch.zeros(1, requires_grad=True).view(1)

    def number(self) -> int:
        return _AT_LAST


_last = _First()


def _vary(leaves: list[Tensor], axis: Axis, bucket_mb: float) -> list[Tensor]:
    sums = _Sums(leaves, axis, bucket_mb)
    token: Tensor = _Wait.apply(sums, *leaves)  # type: ignore[no-untyped-call]
    _torch.set_sequence_number(token.grad_fn, _last.number())
    varied = list(leaves)
    nodes = [[at] for at in range(len(leaves))] if sums.learning else sums.buckets
    for node in nodes:
        parts: tuple[Tensor, ...] = _Start.apply(token, sums, node, *[leaves[at].detach() for at in node])  # type: ignore[no-untyped-call]
        _torch.set_sequence_number(parts[0].grad_fn, _AT_ONCE)
        for at, part in zip(node, parts, strict=True):
            varied[at] = part
    return varied


class _Sums:
    """The gradients of the leaves of a tree on their way.

    Behind those of the n leaves of a bucket go n numbers, 1 where this rank has a gradient: a leaf that no rank has one
    for gets none, as it would alone.
    """

    def __init__(self, leaves: list[Tensor], axis: Axis, bucket_mb: float) -> None:
        self.axis = axis
        self.kinds = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        self._key = (bucket_mb, *self.kinds)
        known = axis.link.orders.get(self._key)
        self.learning = known is None
        order = list(range(len(leaves)))[::-1] if known is None else known  # a guess: the last layers are ready first
        groups = buckets.groups_of("pvary", [leaves[at] for at in order], bucket_mb, axis)
        self.buckets = [[order[at] for at in group] for group in groups]
        self._passes: dict[int, _Pass] = {}

    def ready(self, places: list[int], gs: Sequence[Tensor | None]) -> None:
        """Take gradients, and start the buckets whose turn it is, unless somebody differentiates the sums or looks for
        NaN on the way.
        """
        now = self._passes.setdefault(_torch.backward_pass(), _Pass())
        now.gradients.update(zip(places, gs, strict=True))
        if self.learning or torch.is_grad_enabled() or torch.is_anomaly_enabled():
            return
        while len(now.totals) < len(self.buckets) and self.buckets[len(now.totals)][0] in now.gradients:
            self._start(now, self.axis.later)

    def _start(self, now: _Pass, axis: Axis) -> None:
        bucket = self.buckets[len(now.totals)]
        parts, flags = [], []
        for at in bucket:
            shape, dtype, device = self.kinds[at]
            g = now.gradients.get(at)
            flags.append(g is not None)
            parts.append(torch.zeros((1, shape.numel()), dtype=dtype, device=device) if g is None else g.reshape(1, -1))
        parts.append(torch.tensor([flags], dtype=parts[0].dtype, device=parts[0].device))
        now.totals.append(apply(rule_named("all_reduce"), torch.cat(parts, 1), axis, ("sum",)))

    def finish(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """The sums of the needed leaves, in their order."""
        later = not (torch.is_grad_enabled() or torch.is_anomaly_enabled())
        now = self._passes.pop(_torch.backward_pass(), None) or _Pass()
        while len(now.totals) < len(self.buckets):
            if any(needed[at] for at in self.buckets[len(now.totals)]):
                self._start(now, self.axis.later if later else self.axis)
            else:
                now.totals.append(None)
        sums: list[Tensor | None] = [None] * len(self.kinds)
        for bucket, total in zip(self.buckets, now.totals, strict=True):
            if total is not None:
                whole: Tensor = total.wait(None) if isinstance(total, Pending) else total
                self._unpack(whole, bucket, now.gradients, sums)
        if self.learning and self._key not in self.axis.link.orders:
            self._agree([*now.gradients, *(at for at in range(len(sums)) if at not in now.gradients)])
        return sums

    def _unpack(
        self, whole: Tensor, bucket: list[int], gradients: dict[int, Tensor | None], sums: list[Tensor | None]
    ) -> None:
        place, flags = 0, whole.shape[1] - len(bucket)
        for i, at in enumerate(bucket):
            shape = self.kinds[at][0]
            size = shape.numel()
            if gradients.get(at) is not None or whole[0, flags + i]:
                sums[at] = whole[0, place : place + size].view(shape)
            place += size

    def _agree(self, seen: list[int]) -> None:
        """Keep the order that index 0 has seen."""
        with torch.no_grad():
            mine = torch.tensor(seen, device=self.kinds[0][2])
            order = apply(rule_named("broadcast"), mine, self.axis, (0,)).tolist()
        if len(self.axis.link.orders) >= _MOST_ORDERS:
            self.axis.link.orders.clear()
        self.axis.link.orders[self._key] = order


class _Pass:
    """One backward pass: what has come, and what has been started, bucket after bucket."""

    def __init__(self) -> None:
        self.gradients: dict[int, Tensor | None] = {}
        self.totals: list[Any] = []


_MOST_ORDERS = 1000


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, sums: _Sums, *xs: Tensor) -> Tensor:
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        return xs[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.sums.finish(ctx.needs_input_grad[1:])


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, sums: _Sums, places: list[int], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.sums, ctx.places = sums, places
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.sums.ready(ctx.places, gs)
        return torch.empty(0, device=ctx.sums.kinds[0][2]), None, None, *[None] * len(gs)


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
