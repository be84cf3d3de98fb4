"""Each rank sends to one other and receives from one: permute, shift.

n = size of the axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.door import EitherOfTree, LaterOfTree, NowOfTree, aside, by_elements, carried
from meshcomm.collectives.rule import Rule, apply
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.watch import here
from meshcomm.work import Work

Tree = TypeVar("Tree")
Perm = tuple[tuple[int, int], ...]


# ------------------------------------------------------------------------------------------------------ the rules


def _run_permute(x: Tensor, axis: Axis, perm: Perm) -> Tensor:
    source = destination = None
    for src, dst in perm:
        if dst == axis.own_index:
            source = src
        if src == axis.own_index:
            destination = dst
    return axis.link.permute(_of_this_call(x, axis, perm), source, destination)


def _run_shift(x: Tensor, axis: Axis, offset: int, wrap: bool) -> Tensor:
    source, destination = axis.own_index - offset, axis.own_index + offset
    if wrap and not axis.is_traced:
        return axis.link.permute(x, source % axis.size, destination % axis.size)
    inside = range(axis.size)
    if axis.is_traced:
        pairs = ((i, (i + offset) % axis.size if wrap else i + offset) for i in inside)
        x = _of_this_call(x, axis, tuple(pair for pair in pairs if pair[1] in inside))
    if wrap:
        return axis.link.permute(x, source % axis.size, destination % axis.size)
    return axis.link.permute(x, source if source in inside else None, destination if destination in inside else None)


def _of_this_call(x: Tensor, axis: Axis, perm: Perm) -> Tensor:
    """In a graph, ``x`` on those that send it and zeros on the others, made in the same way on all ranks.

    Where a rank sends to is in its graph. Two calls that differ may do the same for one rank, and a rank may have
    nothing to do with one: the compiler would leave out there what the other ranks wait for.
    """
    if not axis.is_traced:
        return x
    senders = dict(perm)
    sends = torch.tensor([senders.get(i, -1) for i in range(axis.size)], device=x.device)
    mine = sends.index_select(0, axis.index_tensor.to(x.device).view(1)).view(())
    return torch.where(mine >= 0, x, torch.zeros_like(x))


def _transpose_permute(g: Tensor, axis: Axis, perm: Perm) -> Tensor:
    return apply(_PERMUTE, g, axis, (tuple(sorted((dst, src) for src, dst in perm)),))


PERMUTE = Op("permute", "V -> V", compared=("perm",), primitive="permute")
SHIFT = Op("shift", "V -> V", compared=("offset", "wrap"), primitive="permute")

_PERMUTE = Rule(PERMUTE, _run_permute, _transpose_permute)
_SHIFT: Rule = Rule(
    SHIFT,
    _run_shift,
    lambda g, axis, offset, wrap: apply(_SHIFT, g, axis, (-offset, wrap)),
)


def shifted(x: Tensor, axis: Axis, offset: int) -> Tensor:
    """shift of a checked tensor, without wrap, for backwards."""
    return apply(_SHIFT, x, axis, (offset, False))


# ------------------------------------------------------------------------------------------- the public functions


@overload
def permute(x: Tree, axis: AxisName, perm: Iterable[tuple[int, int]], **how: Unpack[NowOfTree]) -> Tree: ...
@overload
def permute(x: Tree, axis: AxisName, perm: Iterable[tuple[int, int]], **how: Unpack[LaterOfTree]) -> Work[Tree]: ...
@overload
def permute(
    x: Tree, axis: AxisName, perm: Iterable[tuple[int, int]], **how: Unpack[EitherOfTree]
) -> Tree | Work[Tree]: ...
@PERMUTE
def permute(
    x: Tree,
    axis: AxisName,
    perm: Iterable[tuple[int, int]],
    *,
    mesh: Mesh | None = None,
    bucket_mb: float = 25,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Send ``x`` from source to destination for each pair in ``perm``.

    ::

        rank 0  [a]      [0]
        rank 1  [b]  ->  [a]   perm = [(0, 1), (1, 2)]
        rank 2  [c]      [b]

    Type: varying -> varying.

    Args:
        x: a tensor of any shape and dtype, or a pytree of tensors; shapes and dtypes equal on every rank.
        axis: a name, or a tuple of names, of which the first is major.
        perm: (source, destination) indices along ``axis``, equal on every rank; no source and no destination twice.
        mesh: the current mesh by default.
        bucket_mb: leaves of a pytree are sent together until they have this many MiB.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out, which is
            that of its backward too. Not with async_op, whose ``wait`` has one, in compiled code or under a
            ``torch.func`` transform.

    Returns: the shape of ``x``, new storage; zeros on a rank that is nobody's destination.

    Backward: permute of the gradient by the inverse perm; a source that is sent nowhere gets zeros.

    Cost: the bytes of ``x`` sent by each source.

    Raises:
        MeshError: no such axis; a pair out of range; a source or destination twice; not a tensor; a device the mesh
            cannot move; a time-out that is not positive.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"pp": 3})
        >>> mc.launch(
        ...     lambda: mc.permute(torch.tensor(mesh.rank + 1), "pp", [(0, 1), (1, 2)], mesh=mesh).item(), ranks=3
        ... )
        [0, 1, 2]

    Source: ``jax.lax.ppermute``.
    """
    if here.watcher is not None or timeout is not None:
        return aside(permute, x, axis, perm, mesh, bucket_mb, async_op, timeout)
    ax = check.axis_of("permute", axis, mesh)
    params = (check.checked_perm("permute", perm, ax),)
    return carried(_PERMUTE, x, ax, None, params, bucket_mb, async_op, by_elements)


@overload
def shift(x: Tree, axis: AxisName, offset: int = 1, wrap: bool = True, **how: Unpack[NowOfTree]) -> Tree: ...
@overload
def shift(x: Tree, axis: AxisName, offset: int = 1, wrap: bool = True, **how: Unpack[LaterOfTree]) -> Work[Tree]: ...
@overload
def shift(
    x: Tree, axis: AxisName, offset: int = 1, wrap: bool = True, **how: Unpack[EitherOfTree]
) -> Tree | Work[Tree]: ...
@SHIFT
def shift(
    x: Tree,
    axis: AxisName,
    offset: int = 1,
    wrap: bool = True,
    *,
    mesh: Mesh | None = None,
    bucket_mb: float = 25,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Rank i sends ``x`` to rank i + ``offset``.

    ::

        rank 0  [a]      [c]
        rank 1  [b]  ->  [a]   offset = 1
        rank 2  [c]      [b]

    Type: varying -> varying.

    Args:
        x: a tensor of any shape and dtype, or a pytree of tensors; shapes and dtypes equal on every rank.
        axis: a name, or a tuple of names, of which the first is major.
        offset: how far, of either sign.
        wrap: whether the axis is a ring; else what leaves it at one end is dropped and zeros come in at the other.
        mesh: the current mesh by default.
        bucket_mb: leaves of a pytree are sent together until they have this many MiB.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out, which is
            that of its backward too. Not with async_op, whose ``wait`` has one, in compiled code or under a
            ``torch.func`` transform.

    Returns: the shape of ``x``, new storage.

    Backward: shift of the gradient by ``-offset``.

    Cost: the bytes of ``x`` sent per rank; nothing when n == 1.

    Raises:
        MeshError: no such axis; an offset that is no int; not a tensor; a device the mesh cannot move; a time-out that
            is not positive.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"cp": 3})
        >>> mc.launch(lambda: mc.shift(torch.tensor(mesh.rank), "cp", mesh=mesh).item(), ranks=3)
        [2, 0, 1]

    Source: MPI_Cart_shift; ring attention; pipeline stages.
    """
    if here.watcher is not None or timeout is not None:
        return aside(shift, x, axis, offset, wrap, mesh, bucket_mb, async_op, timeout)
    ax = check.axis_of("shift", axis, mesh)
    if not check.whole_number(offset):
        check.explain("shift", f"offset={offset!r} is not an int.", ax, fix="how far, of either sign")
    if not isinstance(wrap, bool):
        check.explain("shift", f"wrap={wrap!r} is not a bool.", ax, fix="True or False")
    return carried(_SHIFT, x, ax, None, (int(offset), wrap), bucket_mb, async_op, by_elements)
