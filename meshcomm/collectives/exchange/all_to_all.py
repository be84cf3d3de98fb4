"""all_to_all.

n = size of the axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.door import EitherOfTree, LaterOfTree, NowOfTree, aside, carried, given_by
from meshcomm.collectives.gather import as_first, lies_first
from meshcomm.collectives.rule import Params, Rule, apply
from meshcomm.collectives.trees.buckets import Rows, cut_rows, join_rows, slice_shape
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.runtime.pending import then
from meshcomm.watch import here
from meshcomm.work import Work

Tree = TypeVar("Tree")
Sizes = tuple[int, ...]


# ------------------------------------------------------------------------------------------------------ the rule


def _piece(x: Tensor, axis: Axis, split_dim: int, concat_dim: int, send: Sizes, recv: Sizes, source: int) -> list[int]:
    """The shape of what comes from ``source``."""
    shape = list(x.shape)
    shape[split_dim] = axis.own_of(send)
    shape[concat_dim] = recv[source]
    return shape


def _run_all_to_all(
    x: Tensor, axis: Axis, split_dim: int, concat_dim: int, send: Sizes | None, recv: Sizes | None
) -> Tensor:
    """Without sizes all runs are equal, and every rank knows that they are."""
    if send is None or recv is None:
        if split_dim == concat_dim == 0:
            return axis.link.swap_flat(x)
        if split_dim == concat_dim and lies_first(x, split_dim, axis):
            return as_first(x, split_dim, axis.link.swap_flat)  # type: ignore[no-any-return]
        shape = slice_shape(x.shape, split_dim, axis.size)
        got = axis.link.swap_flat(x if split_dim == 0 else cut_rows(x, split_dim, axis.size))
        return then(got, lambda got: join_rows(got, shape, concat_dim, axis.size))
    if split_dim == concat_dim == 0:  # they lie as they are sent, and come as they are to lie
        rest = x.shape[1:]
        each = math.prod(rest)
        got = axis.link.all_to_all(x.reshape(-1), [each * rows for rows in send], [each * rows for rows in recv])
        return then(got, lambda got: got.view(sum(recv), *rest))
    pieces = x.split(list(send), split_dim)
    shapes = [_piece(x, axis, split_dim, concat_dim, send, recv, source) for source in range(axis.size)]
    counts = [math.prod(shape) for shape in shapes]
    sent = torch.cat([piece.reshape(-1) for piece in pieces])

    def join(got: Tensor) -> Tensor:
        return torch.cat([part.view(shape) for part, shape in zip(got.split(counts), shapes, strict=True)], concat_dim)

    got = axis.link.all_to_all(sent, [piece.numel() for piece in pieces], counts)
    return then(got, join)


ALL_TO_ALL = Op(
    "all_to_all",
    "V -> V",
    compared=("split_dim", "concat_dim"),
    dims=("split_dim", "concat_dim"),
    cuts=("send_sizes", "recv_sizes"),
    primitive="all_to_all",
    lengths="send_sizes= and recv_sizes= say how much goes from each index to each",
)
_ALL_TO_ALL: Rule = Rule(
    ALL_TO_ALL,
    _run_all_to_all,
    lambda g, axis, split_dim, concat_dim, send, recv: apply(_ALL_TO_ALL, g, axis, (concat_dim, split_dim, recv, send)),
    params=("split_dim", "concat_dim", "send_sizes", "recv_sizes"),
    ragged="concat_dim",
)
# ------------------------------------------------------------------------------------------- the public function


@overload
def all_to_all(
    x: Tree,
    axis: AxisName,
    split_dim: int,
    concat_dim: int,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
    **how: Unpack[NowOfTree],
) -> Tree: ...
@overload
def all_to_all(
    x: Tree,
    axis: AxisName,
    split_dim: int,
    concat_dim: int,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
    **how: Unpack[LaterOfTree],
) -> Work[Tree]: ...
@overload
def all_to_all(
    x: Tree,
    axis: AxisName,
    split_dim: int,
    concat_dim: int,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
    **how: Unpack[EitherOfTree],
) -> Tree | Work[Tree]: ...
@ALL_TO_ALL
def all_to_all(
    x: Tree,
    axis: AxisName,
    split_dim: int,
    concat_dim: int,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
    *,
    mesh: Mesh | None = None,
    bucket_mb: float = 25,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Split ``x`` along ``split_dim``, send piece i to rank i, concatenate what comes along ``concat_dim``.

    ::

        rank 0  [a0 a1]      [a0 b0]
        rank 1  [b0 b1]  ->  [a1 b1]

    Type: varying -> varying.

    Args:
        x: a tensor of any dtype, or a pytree of tensors.
        axis: a name, or a tuple of names, of which the first is major.
        split_dim: the dim to cut into n pieces.
        concat_dim: the dim to join the pieces along; it may be the same.
        send_sizes: the length along ``split_dim`` of the piece for each index. They may differ from rank to rank only
            where ``split_dim == concat_dim``, and must there be what the receivers expect. All ranks give sizes, or
            none does.
        recv_sizes: the length along ``concat_dim`` of the piece from each index. Needed with send_sizes where the two
            dims are the same; where they differ the default is that all ranks have as much of ``concat_dim`` as this
            one.
        mesh: the current mesh by default.
        bucket_mb: leaves of a pytree are sent together until they have this many MiB.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out, which is
            that of its backward too. Not with async_op, whose ``wait`` has one, in compiled code or under a
            ``torch.func`` transform.

    Returns: ``x`` with ``split_dim`` divided by n and ``concat_dim`` multiplied by n, or as the sizes say; new storage.

    Backward: all_to_all with the dims and the sizes exchanged.

    Cost: (n-1)/n times the bytes of ``x`` sent per rank; nothing when n == 1.

    Raises:
        MeshError: no such axis or dim; a dim that the axis does not divide, unless sizes are given; sizes that do not
            fit the tensor or each other; not a tensor; a device the mesh cannot move; a time-out that is not positive.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"ep": 2})
        >>> mc.launch(lambda: mc.all_to_all(torch.arange(2) + 10 * mesh.rank, "ep", 0, 0, mesh=mesh).tolist(), ranks=2)
        [[0, 10], [1, 11]]

    Source: MPI_Alltoall(v); ``jax.lax.all_to_all(tiled=True)``; Ulysses; expert parallelism.
    """
    if here.watcher is not None or timeout is not None:
        return aside(
            all_to_all, x, axis, split_dim, concat_dim, send_sizes, recv_sizes, mesh, bucket_mb, async_op, timeout
        )
    ax = mesh.axis(axis, "all_to_all") if type(mesh) is Mesh else check.axis_of("all_to_all", axis, mesh)
    if isinstance(x, Tensor):  # most calls, at no call more than needed
        check.tensor("all_to_all", x, ax)
        return given_by(_ALL_TO_ALL, x, ax, _exchanged(x, ax, split_dim, concat_dim, send_sizes, recv_sizes), async_op)
    given = split_dim, concat_dim, send_sizes, recv_sizes
    if send_sizes is None and recv_sizes is None:
        return carried(_ALL_TO_ALL, x, ax, _exchanged, given, bucket_mb, async_op, _exchanged_rows)
    return carried(_ALL_TO_ALL, x, ax, _exchanged, given, bucket_mb, async_op, ragged=concat_dim)


def _exchanged_rows(axis: Axis, split_dim: int, concat_dim: int, *_: None) -> tuple[Params, Rows]:
    return (0, 0, None, None), Rows(axis.size, cut=split_dim, joined=concat_dim)


def _exchanged(
    x: Tensor,
    axis: Axis,
    split_dim: int,
    concat_dim: int,
    send_sizes: Sequence[int] | None,
    recv_sizes: Sequence[int] | None,
) -> tuple[int, int, Sizes | None, Sizes | None]:
    where, more = "all_to_all", ", or pass send_sizes= and recv_sizes="
    if send_sizes is None and recv_sizes is None:
        split = check.slices(where, x, split_dim, None, axis, "split_dim", more)
        concat = split if concat_dim is split_dim else check.checked_dim(where, x, concat_dim, axis, "concat_dim")
        return split, concat, None, None
    split = check.checked_dim(where, x, split_dim, axis, "split_dim")
    concat = check.checked_dim(where, x, concat_dim, axis, "concat_dim")
    send = check.checked_sizes(where, send_sizes, axis, "send_sizes")
    recv = check.checked_sizes(where, recv_sizes, axis, "recv_sizes")
    if split == concat and (send is None) != (recv is None):
        given, missing = ("recv_sizes", "send_sizes") if send is None else ("send_sizes", "recv_sizes")
        check.explain(
            where, f"{given} without {missing} where split_dim and concat_dim are the same.", axis, x=x,
            fix="give both: what this rank sends to each index, and what it gets from each",
        )  # fmt: skip
    if send is None:
        check.even(where, x, split, axis, more)
        send = (x.shape[split] // axis.size,) * axis.size
    else:
        check.total(where, x, split, send, axis, "send_sizes")
    if recv is None:
        recv = send if split == concat else (x.shape[concat],) * axis.size
    elif split != concat:
        check.own(where, x, concat, recv, axis, "recv_sizes")
    elif axis.own_of(send) != axis.own_of(recv):
        check.explain(
            where, f"this rank sends {send[axis.index]} to itself and expects {recv[axis.index]}.", axis, x=x,
            got=f"send_sizes={send}; recv_sizes={recv}", fix=f"make both sizes at index {axis.index} the same",
        )  # fmt: skip
    return split, concat, send, recv
