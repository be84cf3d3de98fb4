"""To and from one rank: reduce, gather, scatter; and barrier. None is differentiable: some ranks hold nothing.

n = size of the axis.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.check import Reduced
from meshcomm.collectives.door import Either, Later, Now, aside, kept, made
from meshcomm.collectives.trees.buckets import slice_shape
from meshcomm.errors import MeshError, held, shape_text
from meshcomm.limit import Limit
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.runtime.pending import then
from meshcomm.runtime.start.request import duration
from meshcomm.runtime.transports.dry.world import said_by
from meshcomm.watch import here
from meshcomm.work import Work, kind_of

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
_MOST_DIMS = 14


REDUCE = Op("reduce", "V -> one rank", compared=("op", "dst"), reduces=True)
GATHER = Op(
    "gather",
    "V -> one rank",
    compared=("dst", "dim"),
    lengths="pad it to the longest, or mc.all_gather(x, axis, {dim}, sizes={lengths})",
)
SCATTER = Op("scatter", "one rank -> V", compared=("src",), others=True)
BARRIER = Op("barrier", compared=("timeout",))


@overload
def reduce(x: Tensor, axis: AxisName, dst: int = 0, op: Reduced = "sum", **how: Unpack[Now]) -> Tensor | None: ...
@overload
def reduce(
    x: Tensor, axis: AxisName, dst: int = 0, op: Reduced = "sum", **how: Unpack[Later]
) -> Work[Tensor | None]: ...
@overload
def reduce(
    x: Tensor, axis: AxisName, dst: int = 0, op: Reduced = "sum", **how: Unpack[Either]
) -> Tensor | Work[Tensor | None] | None: ...
@REDUCE
def reduce(
    x: Tensor,
    axis: AxisName,
    dst: int = 0,
    op: Reduced = "sum",
    *,
    mesh: Mesh | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Reduce ``x`` elementwise over the ranks of ``axis``, for one of them.

    ::

        rank 0  [a0 a1]      [a0+b0 a1+b1]
        rank 1  [b0 b1]  ->  None            dst=0

    Type: varying -> one rank.

    Args:
        x: a tensor; shape and dtype equal on every rank.
        axis: a name, or a tuple of names, of which the first is major.
        dst: the index along ``axis`` that gets the result.
        op: as for :func:`all_reduce`.
        mesh: the current mesh by default.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out. Not with
            async_op, whose ``wait`` has one.

    Returns: the shape and dtype of ``x``, new storage, on ``dst``; None elsewhere.

    Backward: none. With grad mode on, an input that requires grad raises: use :func:`all_reduce`.

    Cost: the bytes of ``x`` sent per rank.

    Raises:
        MeshError: no such axis, index or op; an op that the dtype does not have; an input that requires grad; not a
            tensor; a time-out that is not positive.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> mc.launch(lambda: mc.reduce(torch.tensor([1.0]), "dp", mesh=mesh), ranks=2)
        [tensor([2.]), None]

    Source: MPI_Reduce.
    """
    if here.watcher is not None or timeout is not None:
        return aside(reduce, x, axis, dst, op, mesh, async_op, timeout)
    ax = mesh.axis(axis, "reduce") if type(mesh) is Mesh else check.axis_of("reduce", axis, mesh)
    check.tensor("reduce", x, ax)
    check.reducible("reduce", x, op, ax)
    dst = check.checked_index("reduce", dst, ax, "dst")
    check.no_gradient("reduce", x, ax, "use all_reduce")
    x = kept(x, async_op) if async_op else x
    return made(REDUCE, (op, dst), ax, x, async_op, lambda link: link.reduce(x, op, dst))


@overload
def gather(x: Tensor, axis: AxisName, dst: int = 0, dim: int = 0, **how: Unpack[Now]) -> Tensor | None: ...
@overload
def gather(x: Tensor, axis: AxisName, dst: int = 0, dim: int = 0, **how: Unpack[Later]) -> Work[Tensor | None]: ...
@overload
def gather(
    x: Tensor, axis: AxisName, dst: int = 0, dim: int = 0, **how: Unpack[Either]
) -> Tensor | Work[Tensor | None] | None: ...
@GATHER
def gather(
    x: Tensor,
    axis: AxisName,
    dst: int = 0,
    dim: int = 0,
    *,
    mesh: Mesh | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Concatenate the ranks' ``x`` along ``dim``, on one of them.

    ::

        rank 0  [a]      [a b]
        rank 1  [b]  ->  None    dst=0

    Type: varying -> one rank.

    Args:
        x: a tensor of any dtype; shape equal on every rank. A 0-d tensor counts as ``[1]``.
        axis: a name, or a tuple of names, of which the first is major.
        dst: the index along ``axis`` that gets the result.
        dim: the dim to concatenate along.
        mesh: the current mesh by default.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out. Not with
            async_op, whose ``wait`` has one.

    Returns: ``[..., n*k, ...]``, new storage, on ``dst``; None elsewhere.

    Backward: none. With grad mode on, an input that requires grad raises: use :func:`all_gather`.

    Cost: the bytes of ``x`` sent per rank.

    Raises:
        MeshError: no such axis, index or dim; an input that requires grad; not a tensor; a device the mesh cannot move;
            a time-out that is not positive.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> mc.launch(lambda: mc.gather(torch.tensor([mesh.rank]), "dp", mesh=mesh), ranks=2)
        [tensor([0, 1]), None]

    Source: MPI_Gather.
    """
    if here.watcher is not None or timeout is not None:
        return aside(gather, x, axis, dst, dim, mesh, async_op, timeout)
    ax = mesh.axis(axis, "gather") if type(mesh) is Mesh else check.axis_of("gather", axis, mesh)
    check.tensor("gather", x, ax)
    dst = check.checked_index("gather", dst, ax, "dst")
    x = x.reshape(1) if x.ndim == 0 else x
    place = check.checked_dim("gather", x, dim, ax)
    check.no_gradient("gather", x, ax, "use all_gather")

    x = kept(x, async_op) if async_op else x
    if place == 0:
        return made(GATHER, (dst, 0), ax, x, async_op, lambda link: link.join(x, dst))

    def join(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows.movedim(0, place).flatten(place, place + 1).contiguous()

    return made(GATHER, (dst, place), ax, x, async_op, lambda link: then(link.gather(x, dst), join))


@overload
def scatter(
    x: Tensor | None, axis: AxisName, src: int = 0, dim: int = 0, like: Tensor | None = None, **how: Unpack[Now]
) -> Tensor: ...
@overload
def scatter(
    x: Tensor | None, axis: AxisName, src: int = 0, dim: int = 0, like: Tensor | None = None, **how: Unpack[Later]
) -> Work[Tensor]: ...
@overload
def scatter(
    x: Tensor | None, axis: AxisName, src: int = 0, dim: int = 0, like: Tensor | None = None, **how: Unpack[Either]
) -> Tensor | Work[Tensor]: ...
@SCATTER
def scatter(
    x: Tensor | None,
    axis: AxisName,
    src: int = 0,
    dim: int = 0,
    like: Tensor | None = None,
    *,
    mesh: Mesh | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Cut the ``x`` of one rank along ``dim`` and give each rank its slice.

    ::

        rank 0  [a b]      [a]
        rank 1  None   ->  [b]   src=0

    Type: one rank -> varying.

    Args:
        x: on ``src`` a tensor ``[..., n*k, ...]`` of any dtype; None elsewhere.
        axis: a name, or a tuple of names, of which the first is major.
        src: the index along ``axis`` that has it.
        dim: the dim to cut.
        like: a tensor with the shape, dtype and device of the *result*; given on all ranks or on none. Without it
            ``src`` sends shape and dtype ahead in a small broadcast.
        mesh: the current mesh by default.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out. Not with
            async_op, whose ``wait`` has one.

    Returns: ``[..., k, ...]``, new storage, on ``like``'s device, else the mesh's.

    Backward: none. With grad mode on, an input that requires grad raises: use ``shard(broadcast(x))``.

    Cost: (n-1)/n times the bytes of ``x`` sent by ``src``; without ``like`` 128 bytes more and one more step.

    Raises:
        MeshError: no such axis, index or dim; a dim that the axis does not divide; None on ``src``, a tensor elsewhere;
            a ``like`` that does not fit; an input that requires grad; a time-out that is not positive.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> mc.launch(lambda: mc.scatter(None if mesh.rank else torch.arange(4), "dp", mesh=mesh), ranks=2)
        [tensor([0, 1]), tensor([2, 3])]

    Source: MPI_Scatter.
    """
    if here.watcher is not None or timeout is not None:
        return aside(scatter, x, axis, src, dim, like, mesh, async_op, timeout)
    ax = mesh.axis(axis, "scatter") if type(mesh) is Mesh else check.axis_of("scatter", axis, mesh)
    src = check.checked_index("scatter", src, ax, "src")
    if async_op and like is None and not isinstance(async_op, Limit):
        check.explain(
            "scatter", "async_op=True without like=: what comes is not known before it is waited for.", ax,
            fix="pass like= on all ranks, a tensor with the shape, dtype and device of the result",
        )  # fmt: skip
    if like is not None:
        problem = _scatter_problem(x, ax, src, dim, like)
    else:
        with held():
            problem = _scatter_problem(x, ax, src, dim, like)
        # A rank that has found an error says so in the header: the others would wait for it.
        like = _scatter_header(None if problem else x, ax, src, dim, async_op)
        if problem is not None and ax.index != src:
            ax.link.refuse("scatter", str(problem).split("\n", 1)[0], ax)
    if problem is not None:
        raise problem
    rows = None
    if x is not None:
        place, (first, *others) = dim % x.ndim, x.shape
        if place == 0 and x.is_contiguous():
            rows = x.view(ax.size, first // ax.size, *others)
        else:
            rows = x.unflatten(place, (ax.size, x.shape[place] // ax.size)).movedim(place, 0).contiguous()
        rows = kept(rows, async_op) if async_op else rows
    return made(SCATTER, (src,), ax, kind_of(like), async_op, lambda link: link.scatter(rows, like, src))


def _scatter_problem(x: Tensor | None, axis: Axis, src: int, dim: int, like: Tensor | None) -> MeshError | None:
    """What is wrong with this rank's arguments."""
    try:
        if like is not None:
            check.tensor("scatter", like, axis, "like")
        if not axis.is_at(src):
            if x is not None:
                check.explain(
                    "scatter", f"index {axis.own_index} gives a tensor, but src is {src}.", axis, fix="pass None there"
                )
            return None
        if x is None:
            check.explain("scatter", f"x is None on src ({src}).", axis, fix="pass the whole tensor there")
        check.tensor("scatter", x, axis)
        check.no_gradient("scatter", x, axis, "use shard(broadcast(x))")
        place = check.checked_dim("scatter", x, dim, axis)
        check.even("scatter", x, place, axis, "")
        result = slice_shape(x.shape, place, axis.size)
        if like is None and x.dtype not in _DTYPES:
            check.explain("scatter", f"{x.dtype} needs like=.", axis, x=x, fix="pass like= on all ranks")
        if like is not None and (like.dtype != x.dtype or tuple(like.shape) != result):
            check.explain(
                "scatter",
                f"like is {shape_text(like.dtype, like.shape)}, the slices are {shape_text(x.dtype, result)}.",
                axis,
                x=x,
            )
    except MeshError as error:
        return error
    return None


def _scatter_header(x: Tensor | None, axis: Axis, src: int, dim: int, how: bool | Limit) -> Tensor:
    """Shape, dtype and device of the slices, sent by ``src``; raises on every rank when it has none."""
    values: list[int] = []
    if x is not None:
        shape = slice_shape(x.shape, dim % x.ndim, axis.size)
        values = [1 + _DTYPES.index(x.dtype), int(x.device.type != "cpu"), len(shape), *shape]
    values += [0] * (_MOST_DIMS + 3 - len(values))
    with said_by(src):
        told = made(SCATTER, (src,), axis, None, how, lambda link: link.agree(values, src))
    [(code, elsewhere, ndim, *lengths)] = told
    if axis.is_at(src) and x is not None:
        return x.new_empty(slice_shape(x.shape, dim % x.ndim, axis.size))
    if code == 0:
        if not axis.is_at(src):
            with held():
                check.explain("scatter", f"src ({src}) has nothing to scatter; its own error says why.", axis)
        return torch.empty(0, device="cpu")
    device = axis.mesh.device if elsewhere else torch.device("cpu")
    return torch.empty(lengths[:ndim], dtype=_DTYPES[code - 1], device=device)


@overload
def barrier(
    axis: AxisName,
    timeout: float | timedelta | None = None,
    *,
    mesh: Mesh | None = None,
    async_op: Literal[False] = False,
) -> None: ...
@overload
def barrier(
    axis: AxisName, timeout: None = None, *, mesh: Mesh | None = None, async_op: Literal[True]
) -> Work[None]: ...
@overload
def barrier(axis: AxisName, timeout: None = None, *, mesh: Mesh | None = None, async_op: bool) -> Work[None] | None: ...
@BARRIER
def barrier(
    axis: AxisName,
    timeout: float | timedelta | None = None,
    *,
    mesh: Mesh | None = None,
    async_op: bool = False,
) -> Any:
    """Return when every rank of ``axis`` has called it.

    Args:
        axis: a name, or a tuple of names.
        timeout: seconds or a timedelta, equal on every rank, after which the ranks that came are told who did not. The
            ranks then meet at the store of their process group and not through its backend, which tells even where
            the backend is stuck. Among the ranks of one process no time passes: it runs out when no rank can go on, and
            from a second on ranks that wait elsewhere are told first, and may come. In-process and under guard all
            ranks count their calls alike afterwards, along this axis: so one goes on after an error that was caught.
        mesh: the current mesh by default.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.

    Cost: one all_reduce of a number; on an accelerator alone it also waits for the device. With a time-out some
    messages to the store.

    Raises:
        MeshError: no such axis; a time-out that is not positive, or with async_op, whose ``wait`` has its own.
        CommError: the time is up; it names the absent, on every rank alike, on those that come later too.

    Example:
        >>> import meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> mc.launch(lambda: mc.barrier("dp", timeout=60, mesh=mesh), ranks=2)
        [None, None]

    Source: MPI_Barrier; ``torch.distributed.monitored_barrier``.
    """
    ax = check.axis_of("barrier", axis, mesh)
    limit = duration("barrier", timeout)
    if limit is None:
        return made(BARRIER, (), ax, None, async_op, lambda link: then(link.barrier(), lambda _: None))
    if async_op:
        check.explain("barrier", "timeout= with async_op=True.", ax, fix="give the time-out to the wait of the work")
    seconds = limit.total_seconds()
    return made(BARRIER, (seconds,), ax, None, False, lambda link: link.barrier_within(seconds))
