"""Reductions over an axis and what they are transposed to: pvary, all_reduce, reduce_scatter.

n = size of the axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from meshcomm import _torch
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.check import Reduced
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
    started,
)
from meshcomm.collectives.gather import as_first, gather_over, lies_first
from meshcomm.collectives.rule import Params, Rule, apply, sums_of
from meshcomm.collectives.trees import buckets
from meshcomm.collectives.trees.buckets import ELEMENTS, Rows
from meshcomm.collectives.trees.overlap import vary_tree
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.runtime.pending import then
from meshcomm.runtime.whose import Whose
from meshcomm.watch import here
from meshcomm.work import Work, begun

Tree = TypeVar("Tree")
Sizes = tuple[int, ...] | None


# ------------------------------------------------------------------------------------------------------ the rules


def _sum_over(x: Tensor, axis: Axis) -> Tensor:
    return _summed(x, axis)


def _vary(x: Tensor, axis: Axis) -> Tensor:
    return apply(_PVARY, x, axis)


def _vary_gradient(g: Tensor, axis: Axis) -> Tensor:
    """The same in a backward pass: the gradient itself, where nobody differentiates it again. A view's memory ``.grad``
    would take, and it may be the caller's.
    """
    if g.requires_grad or _torch.functorch_active() or _torch.dual_level_open():
        return _vary(g, axis)
    if axis.link.watched and not axis.link.briefly:  # who is told of every call is told of this one too
        _vary(g, axis)
    return g


def _scaled(y: Tensor, axis: Axis, op: str) -> Tensor:
    return y / axis.size if op in ("mean", "exact mean") else y


_CURVED = ("max", "min", "product")
"""The ops whose derivative depends on the value."""


def _local_factor(x: Tensor, y: Tensor, axis: Axis, op: str) -> Tensor:
    """How ``y``, the reduction of ``x``, changes with this rank's ``x``, elementwise; V and differentiable.

    max and min: the ranks that attain the extreme share it equally. product: the product of the other ranks' values,
    made of them and not by division, so that zeros are exact in derivatives of every order.
    """
    if op == "product":
        everyone = gather_over(x.unsqueeze(0), axis, 0)
        mine = torch.arange(axis.size, device=x.device) == axis.index_tensor.to(x.device)
        return torch.where(mine.view(-1, *[1] * x.ndim), 1, everyone).prod(0)
    attained = ((x == y) | x.isnan()).to(x.dtype).detach()  # where x is NaN, so is y
    return attained / _sum_over(attained, axis)


def with_gradient_over(x: Tensor, axis: Axis, n: float) -> Tensor:
    """The same values; their gradients are divided by ``n``."""
    if here.watcher is not None:
        return here.watcher.tied(with_gradient_over, x, (axis, n))  # type: ignore[no-any-return]
    return apply(_PVARY_OF_A_MEAN, x, axis, (n,))


def _run_all_reduce(x: Tensor, axis: Axis, op: str, whose: Whose | None = None) -> Tensor:
    return axis.link.all_reduce(x, op)


def _scale_all_reduce(g: Tensor, axis: Axis, x: Tensor, y: Tensor, op: str) -> Tensor:
    return _vary(g, axis) * _local_factor(x, y, axis, op).conj()


def _push_all_reduce(t: Tensor, axis: Axis, x: Tensor, y: Tensor, op: str) -> Tensor:
    return _sum_over(t * _local_factor(x, y, axis, op), axis)


def _run_reduce_scatter(x: Tensor, axis: Axis, dim: int, op: str, sizes: Sizes) -> Tensor:
    if sizes is None:
        if dim == 0:
            return axis.link.scatter_flat(x, op)
        if lies_first(x, dim, axis):
            return as_first(x, dim, axis.link.scatter_flat, op)  # type: ignore[no-any-return]
        rows = x.unflatten(dim, (axis.size, x.shape[dim] // axis.size)).movedim(dim, 0)
        return axis.link.reduce_scatter(rows, op)
    longest = max(sizes)
    rows = x.new_zeros((axis.size, *x.shape[:dim], longest, *x.shape[dim + 1 :]))
    for row, piece in zip(rows, x.split(list(sizes), dim), strict=True):
        row.narrow(dim, 0, piece.shape[dim]).copy_(piece)
    mine, length = axis.link.reduce_scatter(rows, op), axis.own_of(sizes)
    return then(mine, lambda row: row.narrow(dim, 0, length).contiguous())


def _spread(g: Tensor, axis: Axis, dim: int, op: str, sizes: Sizes) -> Tensor:
    whole = gather_over(g, axis, dim, sizes)
    return whole if op == "sum" else then(whole, lambda whole: _scaled(whole, axis, op))


def _scatter_factor(x: Tensor, y: Tensor, axis: Axis, dim: int, op: str, sizes: Sizes) -> Tensor:
    return _local_factor(x, y if op == "product" else gather_over(y, axis, dim, sizes), axis, op)


def _scale_reduce_scatter(g: Tensor, axis: Axis, x: Tensor, y: Tensor, dim: int, op: str, sizes: Sizes) -> Tensor:
    return gather_over(g, axis, dim, sizes) * _scatter_factor(x, y, axis, dim, op, sizes).conj()


def _push_reduce_scatter(t: Tensor, axis: Axis, x: Tensor, y: Tensor, dim: int, op: str, sizes: Sizes) -> Tensor:
    return apply(_REDUCE_SCATTER, t * _scatter_factor(x, y, axis, dim, op, sizes), axis, (dim, "sum", sizes))


PVARY = Op("pvary", "I -> V", communicates=False)
ALL_REDUCE = Op("all_reduce", "V -> I", compared=("op",), reduces=True, primitive="all_reduce")
REDUCE_SCATTER = Op(
    "reduce_scatter",
    "V -> V",
    compared=("dim", "op", "sizes"),
    dims=("dim",),
    cuts=("sizes",),
    reduces=True,
    primitive="reduce_scatter",
    lengths="one shape on every rank; sizes= says how a dim that does not divide is cut",
)

_PVARY = Rule(PVARY, lambda x, axis: x.view_as(x), _sum_over)
_PVARY_OF_A_MEAN = Rule(
    PVARY, lambda x, axis, n: x.view_as(x), lambda g, axis, n: g / n, params=("n",), key="pvary, of a mean"
)
_ALL_REDUCE = Rule(
    ALL_REDUCE,
    _run_all_reduce,
    lambda g, axis, op: _scaled(_vary_gradient(g, axis), axis, op),
    own=lambda x, axis, op: axis.link.all_reduce_own(x, op),
)
_summed = sums_of(_ALL_REDUCE, _vary_gradient)
_PVARY_OF: Rule = Rule(
    PVARY,
    lambda x, axis, whose: x.view_as(x),
    lambda g, axis, whose: apply(_SUM_OF, g, axis, ("sum", whose)),
    params=("whose",),
    whose="whose",
)
_SUM_OF: Rule = Rule(
    ALL_REDUCE,
    _run_all_reduce,
    lambda g, axis, op, whose: apply(_PVARY_OF, g, axis, (whose,)),
    params=("op", "whose"),
    whose="whose",
)
_ALL_REDUCE_CURVED = Rule(
    ALL_REDUCE,
    _run_all_reduce,
    _scale_all_reduce,
    tangent=_push_all_reduce,
    saves=True,
)
_REDUCE_SCATTER = Rule(REDUCE_SCATTER, _run_reduce_scatter, _spread)
_REDUCE_SCATTER_CURVED = Rule(
    REDUCE_SCATTER,
    _run_reduce_scatter,
    _scale_reduce_scatter,
    tangent=_push_reduce_scatter,
    saves=True,
)


# ------------------------------------------------------------------------------------------- the public functions


@overload
def pvary(x: Tensor, axis: AxisName, **how: Unpack[NowOfLocal]) -> Tensor: ...
@overload
def pvary(x: Tree, axis: AxisName, **how: Unpack[NowOfLocal]) -> Tree: ...
@overload
def pvary(x: Tree, axis: AxisName, **how: Unpack[LaterOfLocal]) -> Work[Tree]: ...
@overload
def pvary(x: Tree, axis: AxisName, **how: Unpack[EitherOfLocal]) -> Tree | Work[Tree]: ...
@PVARY
def pvary(x: Tree, axis: AxisName, *, mesh: Mesh | None = None, bucket_mb: float = 25, async_op: bool = False) -> Any:
    """Declare that what is the same on all ranks is used in a way that differs: the value stays, its gradient is
    summed.

    ::

        forward                backward
        rank 0  [a]  ->  [a]   [g0+g1]  <-  [g0]
        rank 1  [a]  ->  [a]   [g0+g1]  <-  [g1]

    Type: invariant -> varying. What is replicated goes through it before it meets anything that differs between ranks.

    Args:
        x: a tensor of any shape and dtype, or a pytree of tensors, equal on every rank. Integer leaves pass through.
        axis: a name, or a tuple of names.
        mesh: the current mesh by default.
        bucket_mb: gradients of the leaves of a pytree are reduced together until they have this many MiB.
        async_op: give a :class:`Work`, done at once. For one tensor the sum of the gradient is then under way in
            backward between where the work was waited for and where this was called; that of a tree always is.

    Returns: the same values. Being no operation, it is the one function here whose result shares its input's storage;
    it is a view to autograd, which refuses some in-place operations on it: use the out-of-place ones.

    Backward: :func:`all_reduce` (sum) of the gradient over ``axis``. That of a pytree goes bucket by bucket, in the
    order in which the gradients become ready, while the rest of the backward pass runs; the sums are waited for at
    its end. The first backward pass for a tree finds out that order on index 0 and sums at its end. A leaf that no
    rank has a gradient for gets none; each rank must use at least one leaf, and where the pass makes other
    collectives over the same axis, all ranks use the leaves in the same order.

    Cost: none forward; backward one all_reduce per tensor or bucket, 2 (n-1)/n times its bytes per rank.

    Raises:
        MeshError: no such axis; not a tensor; a device the mesh cannot move; a bucket size that is not positive.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def grad():
        ...     w = torch.ones((), requires_grad=True)
        ...     (mc.pvary(w, "dp", mesh=mesh) * (1.0 + mesh.rank)).backward()
        ...     return w.grad.item()
        >>> mc.launch(grad, ranks=2)
        [3.0, 3.0]

    Source: ``jax.lax.pvary``; Megatron's copy to the tensor parallel region.
    """
    if here.watcher is not None:
        return aside(pvary, x, axis, mesh, bucket_mb, async_op)
    ax = mesh.axis(axis, "pvary") if type(mesh) is Mesh else check.axis_of("pvary", axis, mesh)
    if isinstance(x, Tensor):
        check.tensor("pvary", x, ax)
        return started(_PVARY, x, ax, (), True) if async_op else apply(_PVARY, x, ax)
    leaves, form, *_ = buckets.leaves_of("pvary", x, ax)
    check.checked_size("pvary", bucket_mb, ax)
    real = [i for i, leaf in enumerate(leaves) if leaf.is_floating_point() or leaf.is_complex()]
    for i, varied in zip(real, vary_tree([leaves[i] for i in real], ax, bucket_mb), strict=True):
        leaves[i] = varied
    tree = buckets.rebuild(leaves, form)
    return begun("pvary", ax, None, tree) if async_op else tree


@overload
def all_reduce(
    x: Tensor, axis: AxisName, op: Reduced = "sum", *, exact: bool = False, **how: Unpack[NowOfTree]
) -> Tensor: ...
@overload
def all_reduce(
    x: Tree, axis: AxisName, op: Reduced = "sum", *, exact: bool = False, **how: Unpack[NowOfTree]
) -> Tree: ...
@overload
def all_reduce(
    x: Tree, axis: AxisName, op: Reduced = "sum", *, exact: bool = False, **how: Unpack[LaterOfTree]
) -> Work[Tree]: ...
@overload
def all_reduce(
    x: Tree, axis: AxisName, op: Reduced = "sum", *, exact: bool = False, **how: Unpack[EitherOfTree]
) -> Tree | Work[Tree]: ...
@ALL_REDUCE
def all_reduce(
    x: Tree,
    axis: AxisName,
    op: Reduced = "sum",
    *,
    exact: bool = False,
    mesh: Mesh | None = None,
    bucket_mb: float = 25,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Reduce ``x`` elementwise over the ranks of ``axis``.

    ::

        rank 0  [a0 a1]      [a0+b0 a1+b1]
        rank 1  [b0 b1]  ->  [a0+b0 a1+b1]   (one logical value)

    Type: varying -> invariant.

    Args:
        x: a tensor of any shape, or a pytree of tensors; shapes and dtypes equal on every rank.
        axis: a name, or a tuple of names.
        op: "sum", "mean", "max", "min", "product"; "band", "bor", "bxor" on integers and bool. max and min propagate
            NaN. On gloo and in-process, numbers are reduced here in a binary tree by index, half precision in float32,
            so that results are bitwise the same on all ranks and every time, alone and in a pytree, and on 1, 2, 4, ...
            ranks where the parts are (docs/sums.md); on NCCL as NCCL does it.
        exact: a sum or mean of floats that depends on no order, of ranks or axes: the same bits for the same addends.
            Rounded once, and at least as near to the true sum as without it; not-finite values are as without it
            (docs/sums.md).
        mesh: the current mesh by default.
        bucket_mb: leaves of a pytree are reduced together until they have this many MiB.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out, which is
            that of its backward too. Not with async_op, whose ``wait`` has one, in compiled code or under a
            ``torch.func`` transform.

    Returns: the shape and dtype of ``x``, new storage.

    Backward: sum: ``pvary(g)``, no communication. mean: that over n. max and min: shared equally by the ranks that
    attain it (one all_reduce). product: times the other ranks' product, exact with zeros (one all_gather). Bitwise
    ops have none.

    Cost: 2 (n-1)/n times the bytes of ``x`` sent per rank; nothing when n == 1. Small ones on the CPU (256 KiB through
    shared memory, 1 MiB over n in messages), a product of complex numbers and bitwise ops on NCCL are gathered and
    reduced here: (n-1) times the bytes. ``exact`` costs no more bytes where numbers are reduced here, and some twenty
    passes over them; on NCCL one maximum of the exponents (a quarter of the bytes of float32), and twice the bytes.

    Raises:
        MeshError: no such axis or op; sum or product of bool, mean of integers, order of complex; not a tensor; a
            device the mesh cannot move; a time-out that is not positive.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"tp": 4})
        >>> mc.launch(lambda: mc.all_reduce(torch.tensor(mesh.rank), "tp", mesh=mesh).item(), ranks=4)
        [6, 6, 6, 6]

    Source: MPI_Allreduce; ``jax.lax.psum``; Megatron's reduce from the tensor parallel region.
    """
    if here.watcher is not None or timeout is not None:
        return aside(all_reduce, x, axis, op, exact, mesh, bucket_mb, async_op, timeout)
    ax = mesh.axis(axis, "all_reduce") if type(mesh) is Mesh else check.axis_of("all_reduce", axis, mesh)
    rule = _ALL_REDUCE if op == "sum" or op not in _CURVED else _ALL_REDUCE_CURVED
    if isinstance(x, Tensor):  # the one that is called most, at no call more than needed
        check.tensor("all_reduce", x, ax)
        if op == "sum" and x.dtype in check.SUMMED:
            if not (exact or async_op):
                return _summed(x, ax)
        else:
            check.reducible("all_reduce", x, op, ax)
        params = _reduced(x, ax, op, exact) if exact else (op,)
        return given_by(rule, x, ax, params, async_op)
    return carried(rule, x, ax, _reduced, (op, exact), bucket_mb, async_op, _reduced_elements)


def _reduced(x: Tensor, axis: Axis, op: str, exact: bool, where: str = "all_reduce") -> tuple[str]:
    check.reducible(where, x, op, axis)
    if not exact:
        return (op,)
    check.exact(where, x, op, axis)
    return (f"exact {op}",)


def _reduced_elements(axis: Axis, op: str, exact: bool) -> tuple[Params, Rows]:
    return (f"exact {op}" if exact else op,), ELEMENTS


@overload
def reduce_scatter(
    x: Tensor,
    axis: AxisName,
    dim: int = 0,
    op: Reduced = "sum",
    sizes: Sequence[int] | None = None,
    *,
    exact: bool = False,
    **how: Unpack[NowOfTree],
) -> Tensor: ...
@overload
def reduce_scatter(
    x: Tree,
    axis: AxisName,
    dim: int = 0,
    op: Reduced = "sum",
    sizes: Sequence[int] | None = None,
    *,
    exact: bool = False,
    **how: Unpack[NowOfTree],
) -> Tree: ...
@overload
def reduce_scatter(
    x: Tree,
    axis: AxisName,
    dim: int = 0,
    op: Reduced = "sum",
    sizes: Sequence[int] | None = None,
    *,
    exact: bool = False,
    **how: Unpack[LaterOfTree],
) -> Work[Tree]: ...
@overload
def reduce_scatter(
    x: Tree,
    axis: AxisName,
    dim: int = 0,
    op: Reduced = "sum",
    sizes: Sequence[int] | None = None,
    *,
    exact: bool = False,
    **how: Unpack[EitherOfTree],
) -> Tree | Work[Tree]: ...
@REDUCE_SCATTER
def reduce_scatter(
    x: Tree,
    axis: AxisName,
    dim: int = 0,
    op: Reduced = "sum",
    sizes: Sequence[int] | None = None,
    *,
    exact: bool = False,
    mesh: Mesh | None = None,
    bucket_mb: float = 25,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Reduce ``x`` over the ranks of ``axis`` and keep this rank's slice of ``dim``.

    ::

        rank 0  [a0 a1]      [a0+b0]
        rank 1  [b0 b1]  ->  [a1+b1]

    Type: varying -> varying.

    Args:
        x: a tensor ``[..., n*k, ...]``, or a pytree of tensors; shapes and dtypes equal on every rank.
        axis: a name, or a tuple of names, of which the first is major.
        dim: the dim to cut.
        op: as for :func:`all_reduce`.
        sizes: the length of each rank's slice, where they shall differ; equal on every rank.
        exact: as for :func:`all_reduce`.
        mesh: the current mesh by default.
        bucket_mb: leaves of a pytree go together until they have this many MiB.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out, which is
            that of its backward too. Not with async_op, whose ``wait`` has one, in compiled code or under a
            ``torch.func`` transform.

    Returns: ``[..., k, ...]`` (``sizes[i]`` with sizes), new storage.

    Backward: :func:`all_gather` of the gradient along ``dim``, times the same local factors as for all_reduce.

    Cost: (n-1)/n times the bytes of ``x`` sent per rank; nothing when n == 1. Unequal sizes are padded to the longest.

    Raises:
        MeshError: no such axis, dim or op; a dim that the axis does not divide, unless sizes are given; sizes that do
            not sum to the dim; an op that the dtype does not have; not a tensor; a device the mesh cannot move; a
            time-out that is not positive.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> mc.launch(lambda: mc.reduce_scatter(torch.arange(4), "tp", mesh=mesh).tolist(), ranks=2)
        [[0, 2], [4, 6]]

    Source: MPI_Reduce_scatter; ``jax.lax.psum_scatter(tiled=True)``; sequence parallelism in Megatron.
    """
    if here.watcher is not None or timeout is not None:
        return aside(reduce_scatter, x, axis, dim, op, sizes, exact, mesh, bucket_mb, async_op, timeout)
    ax = mesh.axis(axis, "reduce_scatter") if type(mesh) is Mesh else check.axis_of("reduce_scatter", axis, mesh)
    lengths = None if sizes is None else check.checked_sizes("reduce_scatter", sizes, ax)
    rule = _REDUCE_SCATTER_CURVED if op in _CURVED else _REDUCE_SCATTER
    if isinstance(x, Tensor):  # most calls, at no call more than needed
        check.tensor("reduce_scatter", x, ax)
        return given_by(rule, x, ax, _scattered(x, ax, dim, op, exact, lengths), async_op)
    in_rows = _scattered_rows if lengths is None else None
    return carried(rule, x, ax, _scattered, (dim, op, exact, lengths), bucket_mb, async_op, in_rows)


def _scattered(x: Tensor, axis: Axis, dim: int, op: str, exact: bool, sizes: Sizes) -> tuple[int, str, Sizes]:
    if op != "sum" or exact or x.dtype not in check.SUMMED:
        (op,) = _reduced(x, axis, op, exact, "reduce_scatter")
    return check.slices("reduce_scatter", x, dim, sizes, axis), op, sizes


def _scattered_rows(axis: Axis, dim: int, op: str, exact: bool, sizes: None) -> tuple[Params, Rows]:
    return (0, f"exact {op}" if exact else op, None), Rows(axis.size, cut=dim)
