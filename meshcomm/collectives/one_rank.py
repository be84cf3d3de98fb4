"""To and from one rank: reduce, gather, scatter, send, recv, exchange. None is differentiable: some ranks hold nothing.

n = size of the axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from meshcomm.collectives import check
from meshcomm.collectives.door import Later, Now, aside, handed
from meshcomm.collectives.gather import slice_shape
from meshcomm.errors import MeshError, held, shape_text
from meshcomm.mesh import Axis, AxisName, Mesh
from meshcomm.runtime.call import Call, Post, Want, for_later
from meshcomm.runtime.hooks.ranges import calling
from meshcomm.runtime.ops import Op
from meshcomm.runtime.pending import then
from meshcomm.runtime.start.request import duration
from meshcomm.runtime.transports.protocol import Link
from meshcomm.watch import here
from meshcomm.work import Kind, Limit, Work, kind_of

__all__ = ["barrier", "exchange", "gather", "recv", "reduce", "scatter", "send"]

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
SEND = Op("send", "V -> one rank")
RECV = Op("recv", "one rank -> V", others=True)
EXCHANGE = Op("exchange", "V -> V", others=True)
BARRIER = Op("barrier", compared=("timeout",))


def _called(axis: Axis, op: Op, *given: object, x: Tensor | None = None) -> AbstractContextManager[Any]:
    """What runs inside belongs to this call, with the arguments that are compared."""
    seen = (None, ()) if x is None else (x.dtype, x.shape)
    return calling(axis, Call(op.name, given, op.compared[: len(given)], None, axis, *seen))


def _made(
    op: Op, given: tuple[object, ...], axis: Axis, x: Tensor | Kind | None, how: bool | Limit, go: Callable[[Link], Any]
) -> Any:
    """What ``go`` makes of the link of the axis, or the Work of it; ``x``: a tensor that all give alike, or what is
    known of one that not all have.
    """
    with _called(axis, op, *given, x=x if isinstance(x, Tensor) else None), for_later(bool(how)):
        y = go(axis.link)
        return handed(op.name, axis, x, y, how) if how else y


def _kept(x: Tensor, later: bool | Limit) -> Tensor:
    """A copy of what is read after the call."""
    return x.detach().clone(memory_format=torch.contiguous_format) if later else x


def _kept_posts(posts: list[Post], later: bool | Limit) -> list[Post]:
    return [(_kept(x, later), dst, tag) for x, dst, tag in posts]


@overload
def reduce(x: Tensor, axis: AxisName, dst: int = 0, op: str = "sum", **how: Unpack[Now]) -> Tensor | None: ...
@overload
def reduce(x: Tensor, axis: AxisName, dst: int = 0, op: str = "sum", **how: Unpack[Later]) -> Work[Tensor | None]: ...
@REDUCE
def reduce(
    x: Tensor,
    axis: AxisName,
    dst: int = 0,
    op: str = "sum",
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
    ax = check.axis_of("reduce", axis, mesh)
    check.tensor("reduce", x, ax)
    check.reducible("reduce", x, op, ax)
    dst = check.checked_index("reduce", dst, ax, "dst")
    check.no_gradient("reduce", x, ax, "use all_reduce")
    return _made(REDUCE, (op, dst), ax, x, async_op, lambda link: link.reduce(_kept(x, async_op), op, dst))


@overload
def gather(x: Tensor, axis: AxisName, dst: int = 0, dim: int = 0, **how: Unpack[Now]) -> Tensor | None: ...
@overload
def gather(x: Tensor, axis: AxisName, dst: int = 0, dim: int = 0, **how: Unpack[Later]) -> Work[Tensor | None]: ...
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
    ax = check.axis_of("gather", axis, mesh)
    check.tensor("gather", x, ax)
    dst = check.checked_index("gather", dst, ax, "dst")
    x = x.reshape(1) if x.ndim == 0 else x
    place = check.checked_dim("gather", x, dim, ax)
    check.no_gradient("gather", x, ax, "use all_gather")

    def join(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows.movedim(0, place).flatten(place, place + 1).contiguous()

    return _made(GATHER, (dst, place), ax, x, async_op, lambda link: then(link.gather(_kept(x, async_op), dst), join))


@overload
def scatter(
    x: Tensor | None, axis: AxisName, src: int = 0, dim: int = 0, like: Tensor | None = None, **how: Unpack[Now]
) -> Tensor: ...
@overload
def scatter(
    x: Tensor | None, axis: AxisName, src: int = 0, dim: int = 0, like: Tensor | None = None, **how: Unpack[Later]
) -> Work[Tensor]: ...
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
    ax = check.axis_of("scatter", axis, mesh)
    src = check.checked_index("scatter", src, ax, "src")
    if async_op and like is None and not isinstance(async_op, Limit):
        check.explain(
            "scatter", "async_op=True without like=: what comes is not known before it is waited for.", ax,
            fix="pass like= on all ranks, a tensor with the shape, dtype and device of the result",
        )  # fmt: skip
    with held() if like is None else nullcontext():
        problem = _scatter_problem(x, ax, src, dim, like)
    if like is None:  # a rank that has found an error says so in the header: the others would wait for it
        like = _scatter_header(None if problem else x, ax, src, dim, async_op)
        if problem is not None and ax.index != src:
            ax.link.refuse("scatter", str(problem).split("\n", 1)[0], ax)
    if problem is not None:
        raise problem
    rows = None
    if x is not None:
        place = dim % x.ndim
        rows = _kept(x.unflatten(place, (ax.size, x.shape[place] // ax.size)).movedim(place, 0).contiguous(), async_op)
    return _made(SCATTER, (src,), ax, kind_of(like), async_op, lambda link: link.scatter(rows, like, src))


def _scatter_problem(x: Tensor | None, axis: Axis, src: int, dim: int, like: Tensor | None) -> MeshError | None:
    """What is wrong with this rank's arguments."""
    try:
        if like is not None:
            check.tensor("scatter", like, axis, "like")
        if axis.index != src:
            if x is not None:
                check.explain(
                    "scatter", f"index {axis.index} gives a tensor, but src is {src}.", axis, fix="pass None there"
                )
            return None
        if x is None:
            check.explain("scatter", f"x is None on src ({src}).", axis, fix="pass the whole tensor there")
        check.tensor("scatter", x, axis)
        check.no_gradient("scatter", x, axis, "use shard(broadcast(x))")
        place = check.checked_dim("scatter", x, dim, axis)
        check.even("scatter", x, place, axis, "")
        result = slice_shape(x, place, axis.size)
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
        shape = slice_shape(x, dim % x.ndim, axis.size)
        values = [1 + _DTYPES.index(x.dtype), int(x.device.type != "cpu"), len(shape), *shape]
    values += [0] * (_MOST_DIMS + 3 - len(values))
    told = _made(SCATTER, (src,), axis, None, how, lambda link: link.agree(values, src))
    [(code, elsewhere, ndim, *lengths)] = told
    if axis.index == src and x is not None:
        return x.new_empty(slice_shape(x, dim % x.ndim, axis.size))
    if code == 0:
        if axis.index != src:
            with held():
                check.explain("scatter", f"src ({src}) has nothing to scatter; its own error says why.", axis)
        return torch.empty(0)
    device = axis.mesh.device if elsewhere else torch.device("cpu")
    return torch.empty(lengths[:ndim], dtype=_DTYPES[code - 1], device=device)


@overload
def send(x: Tensor, axis: AxisName, dst: int, tag: int = 0, **how: Unpack[Now]) -> None: ...
@overload
def send(x: Tensor, axis: AxisName, dst: int, tag: int = 0, **how: Unpack[Later]) -> Work[None]: ...
@SEND
def send(
    x: Tensor,
    axis: AxisName,
    dst: int,
    tag: int = 0,
    *,
    mesh: Mesh | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Send ``x`` to one rank, which calls :func:`recv`; returns when it has been taken or may be overwritten.

    Type: varying -> one rank.

    Args:
        x: a tensor of any shape and dtype.
        axis: a name, or a tuple of names, of which the first is major.
        dst: the index along ``axis`` to send to.
        tag: messages between two ranks meet in order per tag; below 2**30. On a backend that matches messages by their
            order alone (NCCL), 0 here, and tags only in ``exchange``, with all that have one in one call on both sides.
        mesh: the current mesh by default.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out. Not with
            async_op, whose ``wait`` has one.

    Backward: none. With grad mode on, an input that requires grad raises: use :func:`permute` or :func:`shift`.

    Cost: the bytes of ``x``.

    Raises:
        MeshError: no such axis or index; this rank itself; an input that requires grad; not a tensor; a time-out that
            is not positive.
        CommError: the time is up; in-process and under guard, where the receiver expects another shape or dtype (among
            processes it is told alone); in-process, where nobody can go on.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"pp": 2})
        >>> def main():
        ...     if mesh.rank == 0:
        ...         return mc.send(torch.ones(2), "pp", dst=1, mesh=mesh)
        ...     return mc.recv("pp", src=0, shape=(2,), dtype=torch.float32, mesh=mesh)
        >>> mc.launch(main, ranks=2)
        [None, tensor([1., 1.])]

    Source: MPI_Send.
    """
    if here.watcher is not None or timeout is not None:
        return aside(send, x, axis, dst, tag, mesh, async_op, timeout)
    ax = check.axis_of("send", axis, mesh)
    post = _checked_post("send", (x, dst, tag), ax)
    _not_oneself("send", dst, ax)
    posts = _kept_posts([post], async_op)
    return _made(SEND, (), ax, kind_of(x), async_op, lambda link: then(link.exchange(posts, []), lambda _: None))


@overload
def recv(
    axis: AxisName, src: int, *, shape: Sequence[int], dtype: torch.dtype, tag: int = 0, **how: Unpack[Now]
) -> Tensor: ...
@overload
def recv(
    axis: AxisName, src: int, *, shape: Sequence[int], dtype: torch.dtype, tag: int = 0, **how: Unpack[Later]
) -> Work[Tensor]: ...
@RECV
def recv(
    axis: AxisName,
    src: int,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    tag: int = 0,
    mesh: Mesh | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Receive what one rank sends with :func:`send`.

    Type: one rank -> varying.

    Args:
        axis: a name, or a tuple of names, of which the first is major.
        src: the index along ``axis`` to receive from.
        shape: the shape that is sent.
        dtype: the dtype that is sent.
        tag: messages between two ranks meet in order per tag; below 2**30. On a backend that matches messages by their
            order alone (NCCL), 0 here, and tags only in ``exchange``, with all that have one in one call on both sides.
        mesh: the current mesh by default.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out. Not with
            async_op, whose ``wait`` has one.

    Returns: a tensor of that shape and dtype on the mesh's device, new storage.

    Backward: none: use :func:`permute` or :func:`shift`.

    Cost: the bytes received.

    Raises:
        MeshError: no such axis or index; this rank itself; a shape or dtype that is none; a time-out that is not
            positive.
        CommError: the time is up; the sender sends another shape or dtype (not compared on an accelerator whose backend
            moves the message: NCCL); in-process, where nobody can go on.

    Example: see :func:`send`.

    Source: MPI_Recv.
    """
    if here.watcher is not None or timeout is not None:
        return aside(recv, axis, src, shape, dtype, tag, mesh, async_op, timeout)
    ax = check.axis_of("recv", axis, mesh)
    want = _checked_want("recv", (src, shape, dtype, tag), ax)
    _not_oneself("recv", src, ax)
    kind = dtype, want[1]
    return _made(RECV, (), ax, kind, async_op, lambda link: then(link.exchange([], [want]), lambda got: got[0]))


@overload
def exchange(
    sends: Iterable[tuple[Any, ...]], recvs: Iterable[tuple[Any, ...]], axis: AxisName, **how: Unpack[Now]
) -> list[Tensor]: ...
@overload
def exchange(
    sends: Iterable[tuple[Any, ...]], recvs: Iterable[tuple[Any, ...]], axis: AxisName, **how: Unpack[Later]
) -> Work[list[Tensor]]: ...
@EXCHANGE
def exchange(
    sends: Iterable[tuple[Any, ...]],
    recvs: Iterable[tuple[Any, ...]],
    axis: AxisName,
    *,
    mesh: Mesh | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Send and receive a batch of messages at once: no order of them can lock.

    Type: varying -> varying.

    Args:
        sends: ``(x, dst)`` or ``(x, dst, tag)`` each. On a backend that matches messages by their order alone (NCCL)
            the tags order those of one call, and are compared with the other side's.
        recvs: ``(src, shape, dtype)`` or ``(src, shape, dtype, tag)`` each.
        axis: a name, or a tuple of names, of which the first is major.
        mesh: the current mesh by default.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out. Not with
            async_op, whose ``wait`` has one.

    Returns: the tensors received, in the order of ``recvs``, on the mesh's device.

    Backward: none. With grad mode on, an input that requires grad raises: use :func:`permute` or :func:`all_to_all`.

    Cost: the bytes sent.

    Raises:
        MeshError: as :func:`send` and :func:`recv`; a message to oneself that does not meet its other side in the same
            batch; a time-out that is not positive.
        CommError: the time is up; what comes has another shape or dtype, as for :func:`recv`; in-process, where nobody
            can go on.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"pp": 2})
        >>> def main():
        ...     other = 1 - mesh.rank
        ...     return mc.exchange([(torch.tensor(mesh.rank), other)], [(other, (), torch.int64)], "pp", mesh=mesh)
        >>> mc.launch(main, ranks=2)
        [[tensor(1)], [tensor(0)]]

    Source: MPI_Sendrecv; ``torch.distributed.batch_isend_irecv``.
    """
    if here.watcher is not None or timeout is not None:
        return aside(exchange, sends, recvs, axis, mesh, async_op, timeout)
    ax = check.axis_of("exchange", axis, mesh)
    posts = [_checked_post("exchange", entry, ax) for entry in _entries(sends, "sends", ax)]
    wants = [_checked_want("exchange", entry, ax) for entry in _entries(recvs, "recvs", ax)]
    kept = _to_oneself(
        [post for post in posts if post[1] == ax.index], [want for want in wants if want[0] == ax.index], ax
    )
    away = [want for want in wants if want[0] != ax.index]
    sent = _kept_posts([post for post in posts if post[1] != ax.index], async_op)

    def sort(received: list[Tensor]) -> list[Tensor]:
        got = iter(received)
        return [next(kept if want[0] == ax.index else got) for want in wants]

    return _made(EXCHANGE, (), ax, None, async_op, lambda link: then(link.exchange(sent, away), sort))


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
        return _made(BARRIER, (), ax, None, async_op, lambda link: then(link.barrier(), lambda _: None))
    if async_op:
        check.explain("barrier", "timeout= with async_op=True.", ax, fix="give the time-out to the wait of the work")
    with _called(ax, BARRIER, limit.total_seconds()):
        ax.link.barrier_within(limit.total_seconds())
    return None


# -------------------------------------------------------------------------------------------------------- messages


def _entries(entries: object, name: str, axis: Axis) -> list[tuple[Any, ...]]:
    if not isinstance(entries, Iterable) or isinstance(entries, Tensor):
        fix = "a list of (x, dst)" if name == "sends" else "a list of (src, shape, dtype)"
        check.explain(
            "exchange", f"{name} is not a list of messages.", axis, got=f"{name} {type(entries).__name__}", fix=fix
        )
    return list(entries)


def _checked_post(where: str, entry: object, axis: Axis) -> Post:
    if not isinstance(entry, tuple) or len(entry) not in (2, 3):
        check.explain(where, f"{entry!r} is not a message to send.", axis, fix="(x, dst) or (x, dst, tag)")
    x, dst, tag = entry if len(entry) == 3 else (*entry, 0)
    check.tensor(where, x, axis)
    check.checked_index(where, dst, axis, "dst")
    _checked_tag(where, tag, axis)
    check.no_gradient(where, x, axis, "use permute or shift")
    home = axis.mesh.device  # where it is received: all ranks move it the same way
    return x if axis.mesh.in_process else x.detach().to(home), int(dst), int(tag)


def _checked_want(where: str, entry: object, axis: Axis) -> Want:
    if not isinstance(entry, tuple) or len(entry) not in (3, 4):
        check.explain(where, f"{entry!r} is not a message to receive.", axis, fix="(src, shape, dtype) or (.., tag)")
    src, shape, dtype, tag = entry if len(entry) == 4 else (*entry, 0)
    check.checked_index(where, src, axis, "src")
    if not check.are_lengths(shape):
        check.explain(where, f"shape={shape!r} is not a shape.", axis, fix="a tuple of non-negative ints")
    if not isinstance(dtype, torch.dtype):
        check.explain(where, f"dtype={dtype!r} is not a torch dtype.", axis, fix="such as torch.float32")
    shape = tuple(map(int, shape))
    if max(math.prod(shape) * dtype.itemsize, *shape, 0) >= 2**63:
        check.explain(where, f"shape={shape} is too large.", axis, fix="lengths of fewer than 2**63 bytes in all")
    _checked_tag(where, tag, axis)
    return int(src), shape, dtype, int(tag), axis.mesh.device


def _checked_tag(where: str, tag: object, axis: Axis) -> None:
    if not check.whole_number(tag) or not 0 <= tag < 2**30:  # type: ignore[operator]
        check.explain(where, f"tag={tag!r} is not a tag.", axis, fix="an int from 0 to 2**30 - 1")
    if tag and where not in (may := axis.link.tagged(axis.mesh.device)):
        check.explain(
            where, f"tag={tag}, but what moves tensors on {axis.mesh.device} matches messages by their order.", axis,
            fix="leave the tag out" + (", or give all that have tags to one exchange, on both sides" if may else ""),
        )  # fmt: skip


def _not_oneself(where: str, index: int, axis: Axis) -> None:
    if index == axis.index:
        check.explain(
            where, f"index {index} is this rank itself, which would wait for itself.", axis, fix="use exchange"
        )


def _to_oneself(posts: list[Post], wants: list[Want], axis: Axis) -> Iterator[Tensor]:
    """Pair the messages of this rank to itself by tag, in order."""
    left, got = list(posts), []
    for _, shape, dtype, tag, device in wants:
        post = next((post for post in left if post[2] == tag), None)
        if post is None or tuple(post[0].shape) != shape or post[0].dtype != dtype:
            sent = "nothing is sent" if post is None else f"{shape_text(post[0].dtype, post[0].shape)} is sent"
            expected = shape_text(dtype, shape)
            check.explain("exchange", f"from this rank to itself {sent} with tag {tag}, {expected} expected.", axis)
        left = [other for other in left if other is not post]
        got.append(post[0].clone().to(device))
    if left:
        check.explain("exchange", f"a message from this rank to itself with tag {left[0][2]} is never received.", axis)
    return iter(got)
