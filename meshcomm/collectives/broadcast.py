"""The value of one rank on all ranks of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.door import EitherOfTree, LaterOfTree, NowOfTree, aside, by_elements, carried, given_by
from meshcomm.collectives.rule import Rule, apply, rule_named
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.dry.places import KNOWN
from meshcomm.watch import here
from meshcomm.work import Work

Tree = TypeVar("Tree")


def _transpose_broadcast(g: Tensor, axis: Axis, src: int) -> Tensor:
    if not (axis.is_traced or torch.is_grad_enabled()):  # nobody differentiates it
        # New, not ``g`` itself: autograd makes what it is given the ``.grad`` of a leaf, and gives others ``g`` too.
        return g.clone() if axis.own_place(g) == src else torch.zeros_like(g)
    # A condition on a tensor, so that all ranks have the same graph.
    return torch.where(axis.index_tensor.to(g.device) == src, apply(rule_named("pvary"), g, axis), 0)


BROADCAST = Op("broadcast", "V -> I", compared=("src",), primitive="broadcast")
_BROADCAST = Rule(BROADCAST, lambda x, axis, src: axis.link.broadcast(x, src), _transpose_broadcast)


@overload
def broadcast(x: Tensor, axis: AxisName, src: int = 0, **how: Unpack[NowOfTree]) -> Tensor: ...
@overload
def broadcast(x: Tree, axis: AxisName, src: int = 0, **how: Unpack[NowOfTree]) -> Tree: ...
@overload
def broadcast(x: Tree, axis: AxisName, src: int = 0, **how: Unpack[LaterOfTree]) -> Work[Tree]: ...
@overload
def broadcast(x: Tree, axis: AxisName, src: int = 0, **how: Unpack[EitherOfTree]) -> Tree | Work[Tree]: ...
@BROADCAST
def broadcast(
    x: Tree,
    axis: AxisName,
    src: int = 0,
    *,
    mesh: Mesh | None = None,
    bucket_mb: float = 25,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """The ``x`` of one rank, on all.

    ::

        rank 0  [a]      [a]
        rank 1  [b]  ->  [a]   (one logical value)   src=0

    Type: varying -> invariant.

    Args:
        x: a tensor of any shape and dtype, or a pytree of tensors; shapes and dtypes equal on every rank.
        axis: a name, or a tuple of names, of which the first is major.
        src: the index along ``axis`` to take it from.
        mesh: the current mesh by default.
        bucket_mb: leaves of a pytree are sent together until they have this many MiB.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out, which is
            that of its backward too. Not with async_op, whose ``wait`` has one, in compiled code or under a
            ``torch.func`` transform.

    Returns: the shape and dtype of ``x``, new storage.

    Backward: ``pvary(g)`` on ``src``, zeros elsewhere; no communication.

    Cost: the bytes of ``x`` received per rank; nothing when n == 1.

    Raises:
        MeshError: no such axis; a src that is no index along it; not a tensor; a device the mesh cannot move; a
            time-out that is not positive.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> mc.launch(lambda: mc.broadcast(torch.tensor(mesh.rank), "dp", src=1, mesh=mesh).item(), ranks=2)
        [1, 1]

    Source: MPI_Bcast; ``jax.lax.pbroadcast``.
    """
    if here.watcher is not None or timeout is not None:
        return aside(broadcast, x, axis, src, mesh, bucket_mb, async_op, timeout)
    ax = mesh.axis(axis, "broadcast") if type(mesh) is Mesh else check.axis_of("broadcast", axis, mesh)
    params = (check.checked_index("broadcast", src, ax, "src"),)
    if isinstance(x, Tensor):  # most calls, at no call more than needed
        check.tensor("broadcast", x, ax)
        return given_by(_BROADCAST, x, ax, params, async_op)
    return carried(_BROADCAST, x, ax, None, params, bucket_mb, async_op, by_elements)


@torch.no_grad()
def take_from(src: int, tensors: Sequence[Tensor], axis: Axis, bucket_mb: float = 25) -> None:
    """The values of index ``src``, in place and without a trace for autograd: what it has saved and is equal already
    stays as it was.
    """
    whole = [x.detach() for x in tensors]
    if whole and axis.size > 1:
        for x, y in zip(whole, broadcast(whole, axis.name, src, mesh=axis.mesh, bucket_mb=bucket_mb), strict=True):
            if axis.own_index == src and hasattr(x, KNOWN):
                continue  # a dry run, in which nothing else is known of what the others are sent
            if 0 in x.stride():  # expanded: what many places share is written once
                once = tuple(slice(1) if step == 0 else slice(None) for step in x.stride())
                x.data[once].copy_(y[once])
            else:
                x.data.copy_(y)
