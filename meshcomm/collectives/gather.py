"""Concatenation along an axis and its inverses: all_gather, all_gather_invariant, shard.

n = size of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from meshcomm._torch import copied_in_graph
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.door import (
    EitherOfLocal,
    EitherOfTree,
    LaterOfLocal,
    LaterOfTree,
    NowOfLocal,
    NowOfTree,
    aside,
    carried,
    given_by,
)
from meshcomm.collectives.rule import Described, Params, Rule, apply, rule_named
from meshcomm.collectives.trees.buckets import Rows
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.runtime.pending import then
from meshcomm.watch import here
from meshcomm.work import Work

Tree = TypeVar("Tree")
Sizes = tuple[int, ...] | None
_SMALL = 2**15
"""Elements that one thread copies as fast as several."""


# ------------------------------------------------------------------------------------------------------ the rules


def gather_over(x: Tensor, axis: Axis, dim: int, sizes: Sizes = None) -> Tensor:
    """all_gather of a checked tensor, for backwards."""
    return apply(_ALL_GATHER, x, axis, (dim, sizes))


def _run_gather(x: Tensor, axis: Axis, dim: int, sizes: Sizes) -> Tensor:
    if sizes is None or sizes.count(sizes[0]) == len(sizes):
        if dim == 0:
            return axis.link.gather_flat(x)
        if lies_first(x, dim, axis):
            return as_first(x, dim, axis.link.gather_flat)  # type: ignore[no-any-return]
        rows = axis.link.all_gather(x)
        return then(rows, lambda rows: rows.movedim(0, dim).flatten(dim, dim + 1).contiguous())
    longest = max(sizes)
    padded = x.new_zeros((*x.shape[:dim], longest, *x.shape[dim + 1 :]))
    padded.narrow(dim, 0, axis.own_of(sizes)).copy_(x)

    def cut(rows: Tensor) -> Tensor:
        return torch.cat([row.narrow(dim, 0, length) for row, length in zip(rows, sizes, strict=True)], dim)

    return then(axis.link.all_gather(padded), cut)


def lies_first(x: Tensor, dim: int, axis: Axis) -> bool:
    """Whether ``x`` lies as if it began with ``dim``."""
    return not axis.is_traced and x.shape[:dim].numel() == 1


def as_first(x: Tensor, dim: int, call: Callable[..., Any], *given: Any) -> Any:
    """``call`` works along the first dim; ``x`` lies as if that were ``dim``."""
    before = x.shape[:dim]
    return then(call(x.reshape(x.shape[dim:]), *given), lambda y: y.view(*before, *y.shape))


def _run_shard(x: Tensor, axis: Axis, dim: int, sizes: Sizes, tree: Described = ()) -> Tensor:
    if sizes is None:
        length = x.shape[dim] // axis.size
        if axis.is_traced:  # the same graph on every rank
            places = axis.index_tensor.to(x.device) * length + torch.arange(length, device=x.device)
            return x.index_select(dim, places)
        start = axis.own_place(x) * length
        if x.is_contiguous() and x.numel() <= _SMALL:
            return x.narrow_copy(dim, start, length)  # one operation, on one thread, of what is dense
    else:
        start, length = sum(sizes[: axis.own_place(x)]), axis.own_of(sizes)
    part = x.narrow(dim, start, length)
    return copied_in_graph(part) if axis.is_traced else part.clone(memory_format=torch.contiguous_format)


ALL_GATHER = Op(
    "all_gather",
    "V -> V",
    compared=("dim", "sizes"),
    dims=("dim",),
    primitive="all_gather",
    lengths="pass sizes={lengths} on every rank",
)
ALL_GATHER_INVARIANT = Op(
    "all_gather_invariant",
    "V -> I",
    compared=("dim", "sizes"),
    dims=("dim",),
    primitive="all_gather",
    lengths="pass sizes={lengths} on every rank",
)
SHARD = Op("shard", "I -> V", communicates=False, compared=("dim", "sizes"), dims=("dim",), cuts=("sizes",))

_ALL_GATHER = Rule(
    ALL_GATHER,
    _run_gather,
    lambda g, axis, dim, sizes: apply(rule_named("reduce_scatter"), g, axis, (dim, "sum", sizes)),
)
_ALL_GATHER_INVARIANT = Rule(
    ALL_GATHER_INVARIANT,
    _run_gather,
    lambda g, axis, dim, sizes: apply(_SHARD, g, axis, (dim, sizes)),
)
_SHARD: Rule = Rule(
    SHARD,
    _run_shard,
    lambda g, axis, dim, sizes, tree=(): apply(_ALL_GATHER_INVARIANT, g, axis, (dim, sizes), tree),
    params=("dim", "sizes", "tree"),
)


# ------------------------------------------------------------------------------------------- the public functions


@overload
def all_gather(
    x: Tensor, axis: AxisName, dim: int = 0, sizes: Sequence[int] | None = None, **how: Unpack[NowOfTree]
) -> Tensor: ...
@overload
def all_gather(
    x: Tree, axis: AxisName, dim: int = 0, sizes: Sequence[int] | None = None, **how: Unpack[NowOfTree]
) -> Tree: ...
@overload
def all_gather(
    x: Tree, axis: AxisName, dim: int = 0, sizes: Sequence[int] | None = None, **how: Unpack[LaterOfTree]
) -> Work[Tree]: ...
@overload
def all_gather(
    x: Tree, axis: AxisName, dim: int = 0, sizes: Sequence[int] | None = None, **how: Unpack[EitherOfTree]
) -> Tree | Work[Tree]: ...
@ALL_GATHER
def all_gather(
    x: Tree,
    axis: AxisName,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    *,
    mesh: Mesh | None = None,
    bucket_mb: float = 25,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Concatenate the ranks' ``x`` along ``dim``; each rank goes on with it in its own way.

    ::

        rank 0  [a0 a1]      [a0 a1 b0 b1]
        rank 1  [b0 b1]  ->  [a0 a1 b0 b1]

    Type: varying -> varying. Where the ranks go on alike, :func:`all_gather_invariant` is meant.

    Args:
        x: a tensor ``[..., k, ...]`` of any dtype, or a pytree of tensors; all but ``dim`` equal on every rank. A 0-d
            tensor counts as ``[1]``.
        axis: a name, or a tuple of names, of which the first is major.
        dim: the dim to concatenate along.
        sizes: the length of ``dim`` on each index of the axis, where they differ; equal on every rank.
        mesh: the current mesh by default.
        bucket_mb: leaves of a pytree are sent together until they have this many MiB.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out, which is
            that of its backward too. Not with async_op, whose ``wait`` has one, in compiled code or under a
            ``torch.func`` transform.

    Returns: ``[..., n*k, ...]`` (``sum(sizes)`` with sizes), new storage.

    Backward: :func:`reduce_scatter` (sum) over ``axis`` along ``dim``.

    Cost: each rank receives (n-1)/n of the result; nothing when n == 1. Unequal sizes are padded to the longest.

    Raises:
        MeshError: no such axis or dim; sizes that do not fit the axis or ``x``; not a tensor; a device the mesh cannot
            move; a time-out that is not positive.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> mc.launch(lambda: mc.all_gather(torch.tensor([mesh.rank]), "tp", mesh=mesh).tolist(), ranks=2)
        [[0, 1], [0, 1]]

    Source: MPI_Allgather; ``jax.lax.all_gather(tiled=True)``.
    """
    if here.watcher is not None or timeout is not None:
        return aside(all_gather, x, axis, dim, sizes, mesh, bucket_mb, async_op, timeout)
    return _gather(_ALL_GATHER, x, axis, dim, sizes, mesh, bucket_mb, async_op)


@overload
def all_gather_invariant(
    x: Tensor, axis: AxisName, dim: int = 0, sizes: Sequence[int] | None = None, **how: Unpack[NowOfTree]
) -> Tensor: ...
@overload
def all_gather_invariant(
    x: Tree, axis: AxisName, dim: int = 0, sizes: Sequence[int] | None = None, **how: Unpack[NowOfTree]
) -> Tree: ...
@overload
def all_gather_invariant(
    x: Tree, axis: AxisName, dim: int = 0, sizes: Sequence[int] | None = None, **how: Unpack[LaterOfTree]
) -> Work[Tree]: ...
@overload
def all_gather_invariant(
    x: Tree, axis: AxisName, dim: int = 0, sizes: Sequence[int] | None = None, **how: Unpack[EitherOfTree]
) -> Tree | Work[Tree]: ...
@ALL_GATHER_INVARIANT
def all_gather_invariant(
    x: Tree,
    axis: AxisName,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    *,
    mesh: Mesh | None = None,
    bucket_mb: float = 25,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Concatenate the ranks' ``x`` along ``dim`` into one value, which all ranks then use alike.

    ::

        rank 0  [a0 a1]      [a0 a1 b0 b1]
        rank 1  [b0 b1]  ->  [a0 a1 b0 b1]   (one logical value)

    Type: varying -> invariant. The gradient of the result is the same on every rank, so backward needs no
    communication. To use the result with what differs between ranks, call :func:`all_gather`, or :func:`pvary` the
    result.

    Args:
        x: a tensor ``[..., k, ...]`` of any dtype, or a pytree of tensors; all but ``dim`` equal on every rank. A 0-d
            tensor counts as ``[1]``.
        axis: a name, or a tuple of names, of which the first is major.
        dim: the dim to concatenate along.
        sizes: the length of ``dim`` on each index of the axis, where they differ; equal on every rank.
        mesh: the current mesh by default.
        bucket_mb: leaves of a pytree are sent together until they have this many MiB.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out, which is
            that of its backward too. Not with async_op, whose ``wait`` has one, in compiled code or under a
            ``torch.func`` transform.

    Returns: ``[..., n*k, ...]`` (``sum(sizes)`` with sizes), new storage.

    Backward: :func:`shard` of the gradient along ``dim``: the own slice, no communication.

    Cost: each rank receives (n-1)/n of the result; nothing when n == 1. Unequal sizes are padded to the longest.

    Raises:
        MeshError: no such axis or dim; sizes that do not fit the axis or ``x``; not a tensor; a device the mesh cannot
            move; a time-out that is not positive.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> mc.launch(lambda: mc.all_gather_invariant(torch.tensor([mesh.rank]), "tp", mesh=mesh).tolist(), ranks=2)
        [[0, 1], [0, 1]]

    Source: ``jax.lax.all_gather_invariant``; the gather of Megatron's output layer.
    """
    if here.watcher is not None or timeout is not None:
        return aside(all_gather_invariant, x, axis, dim, sizes, mesh, bucket_mb, async_op, timeout)
    return _gather(_ALL_GATHER_INVARIANT, x, axis, dim, sizes, mesh, bucket_mb, async_op)


@overload
def shard(
    x: Tensor, axis: AxisName, dim: int = 0, sizes: Sequence[int] | None = None, **how: Unpack[NowOfLocal]
) -> Tensor: ...
@overload
def shard(
    x: Tree, axis: AxisName, dim: int = 0, sizes: Sequence[int] | None = None, **how: Unpack[NowOfLocal]
) -> Tree: ...
@overload
def shard(
    x: Tree, axis: AxisName, dim: int = 0, sizes: Sequence[int] | None = None, **how: Unpack[LaterOfLocal]
) -> Work[Tree]: ...
@overload
def shard(
    x: Tree, axis: AxisName, dim: int = 0, sizes: Sequence[int] | None = None, **how: Unpack[EitherOfLocal]
) -> Tree | Work[Tree]: ...
@SHARD
def shard(
    x: Tree,
    axis: AxisName,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    *,
    mesh: Mesh | None = None,
    bucket_mb: float = 25,
    async_op: bool = False,
) -> Any:
    """This rank's slice along ``dim`` of a value that all ranks have.

    ::

        rank 0  [a b c d]      [a b]
        rank 1  [a b c d]  ->  [c d]

    Type: invariant -> varying.

    Args:
        x: a tensor ``[..., n*k, ...]`` of any dtype, or a pytree of tensors, equal on every rank.
        axis: a name, or a tuple of names, of which the first is major.
        dim: the dim to cut.
        sizes: the length of each rank's slice, where they shall differ; equal on every rank.
        mesh: the current mesh by default.
        bucket_mb: gradients of the leaves of a pytree are sent together until they have this many MiB.
        async_op: give a :class:`Work`, done at once; in backward the gather is then under way between where the work
            was waited for and where this was called.

    Returns: ``[..., k, ...]`` (``sizes[i]`` with sizes), new storage.

    Backward: :func:`all_gather_invariant` of the gradient along ``dim``.

    Cost: none forward; backward each rank receives (n-1)/n of the gradient.

    Raises:
        MeshError: no such axis or dim; a dim that the axis does not divide, unless sizes are given; sizes that do not
            sum to the dim; not a tensor.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> mc.launch(lambda: mc.shard(torch.arange(4), "tp", mesh=mesh).tolist(), ranks=2)
        [[0, 1], [2, 3]]

    Source: Megatron's scatter to the tensor parallel region; a slice by ``axis_index`` in JAX.
    """
    if here.watcher is not None:
        return aside(shard, x, axis, dim, sizes, mesh, bucket_mb, async_op)
    ax = check.axis_of("shard", axis, mesh)
    lengths = None if sizes is None else check.checked_sizes("shard", sizes, ax)
    return carried(_SHARD, x, ax, _cut, (dim, lengths), bucket_mb, async_op, _cut_rows if lengths is None else None)


def _cut(x: Tensor, axis: Axis, dim: int, sizes: Sizes) -> tuple[int, Sizes]:
    return check.slices("shard", x, dim, sizes, axis), sizes


def _cut_rows(axis: Axis, dim: int, sizes: None) -> tuple[Params, Rows]:
    return (0, None), Rows(axis.size, cut=dim)


def _gather(
    rule: Rule,
    x: Tree,
    axis: AxisName,
    dim: int,
    sizes: Sequence[int] | None,
    mesh: Mesh | None,
    bucket_mb: float,
    async_op: bool,
) -> Any:
    ax = mesh.axis(axis, rule.name) if type(mesh) is Mesh else check.axis_of(rule.name, axis, mesh)
    if sizes is None:
        if isinstance(x, Tensor):  # most calls, at no call more than needed
            check.tensor(rule.name, x, ax)
            own = _with_dims(x) if x.ndim == 0 else x
            return given_by(rule, own, ax, (check.checked_dim(rule.name, own, dim, ax), None), async_op, x)
        return carried(
            rule, x, ax, _joined, (dim, None, rule.name), bucket_mb, async_op, _joined_rows, shaped=_with_dims
        )
    given = dim, check.checked_sizes(rule.name, sizes, ax), rule.name
    return carried(rule, x, ax, _joined, given, bucket_mb, async_op, shaped=_with_dims, ragged=dim)


def _joined(x: Tensor, axis: Axis, dim: int, sizes: Sizes, where: str) -> tuple[int, Sizes]:
    place = check.checked_dim(where, x, dim, axis)
    if sizes is not None:
        check.own(where, x, place, sizes, axis)
    return place, sizes


def _joined_rows(axis: Axis, dim: int, sizes: None, where: str) -> tuple[Params, Rows]:
    return (0, None), Rows(axis.size, joined=dim)


def _with_dims(x: Tensor) -> Tensor:
    return x.reshape(1) if x.ndim == 0 else x
