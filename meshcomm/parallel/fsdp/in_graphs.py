"""Fully sharded parameters in a graph that torch.compile makes: gathered where they are used, and in backward again.

Nothing is started ahead here: the compiler moves starts and waits apart, and joins what is alike, if it is told to.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshcomm._torch import computed_again, in_graph, let_into_graph
from meshcomm.axis import Axis, axis_with_key
from meshcomm.collectives.rule import refuse_in_process
from meshcomm.errors import fail
from meshcomm.parallel.fsdp.buffers.flat_buffers import Layout, layout_with_key


def whole(
    pieces: Sequence[Tensor],
    axis: Axis,
    layout: Layout,
    replica: Axis | None = None,
    op: str = "sum",
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    share: float = 1.0,
    again: bool = True,
) -> tuple[Tensor, ...]:
    """The tensors of which this rank keeps ``pieces``, in ``dtype``; their gradients are reduced in another one, and
    the result multiplied by ``share``. With ``again`` the graph keeps none of them for its backward.
    """
    refuse_in_process("all_gather", axis)
    let_into_graph()
    dtype = dtype or pieces[0].dtype
    others = None if replica is None else replica.key
    here = [each.index_tensor for each in (axis, replica) if each is not None]
    return _whole(list(pieces), here, axis.key, others, layout.key, again, (op, dtype, reduce_dtype or dtype, share))


@in_graph
def _whole(
    pieces: list[Tensor],
    here: list[Tensor],
    axis: str,
    replica: str | None,
    layout: str,
    again: bool,
    how: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    along = [axis_with_key(key).traced(at) for key, at in zip((axis, replica), here, strict=False) if key is not None]
    lies = layout_with_key(layout)
    with computed_again() if again else nullcontext():
        shard = pieces[0] if len(pieces) == 1 else lies.row(along[0].index).join(pieces, pieces[0])
        return _gather(lies.padded(shard), [each.link for each in along], lies, how)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------- modules


def open_unit(unit: Any) -> None:
    """Forward of a unit of a module begins: its parameters are whole now."""
    unit.traced.append([])
    owner = unit.owner
    if len(unit.traced) > 1:
        return
    if owner.quiet:
        fail("no_sync", "gradients are not collected in compiled code.", fix="compile what is inside the module")
    if unit.policy.offload:
        fail("fully_shard", "offload=True does not go into one graph.", fix="compile without fullgraph=True")
    for group in unit.groups:
        policy = group.policy
        share = 1.0 if owner.mean is None else owner.mean.share(policy.names)
        pieces = [dict.__getitem__(*slot.sites[0]) for slot in group.slots]  # dynamo knows it by this name alone
        unit.traced[0] += pieces
        dtypes = policy.param_dtype, policy.reduce_dtype or policy.accumulate_dtype
        found = whole(pieces, policy.axis, group.layout, policy.replica, policy.op, *dtypes, share, unit.regather)
        _show(group, found)


def shut_unit(unit: Any) -> None:
    """It has ended: the module has its shards again."""
    pieces = unit.traced.pop()
    start = 0
    for group in unit.groups if pieces else ():
        _show(group, pieces[start : (start := start + len(group.slots))])


def _show(group: Any, tensors: Sequence[Tensor]) -> None:
    for slot, x in zip(group.slots, tensors, strict=True):
        for door, name in slot.sites:
            dict.__setitem__(door, name, x)


# ------------------------------------------------------------------------------------------------------- in a graph


class _Gather(Function):
    @staticmethod
    def forward(shard: Tensor, links: list[Any], layout: Layout, how: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return tuple(layout.views(links[0].gather_flat(shard.to(how[1]))))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        shard, ctx.links, ctx.layout, ctx.how = inputs
        ctx.dtype = shard.dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        op, _, reduce_dtype, share = ctx.how
        like = next(g for g in gradients if g is not None)
        packed = ctx.layout.buffer.join(gradients, like).to(reduce_dtype)
        link, *replicas = ctx.links
        total = link.scatter_flat(packed, op)
        for replica in replicas:
            total = replica.all_reduce(total, op)
        total = total.to(ctx.dtype)
        return total if share == 1 else total * share, None, None, None


_gather: Any = _Gather.apply
