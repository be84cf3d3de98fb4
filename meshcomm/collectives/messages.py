"""Messages between two ranks, and batches of them: send, recv, exchange. None is differentiable. And tie: what has
come, by a message or a collective, counts as used.

n = size of the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from math import prod
from typing import Any, TypeVar, overload

import torch
from torch import Size, Tensor
from typing_extensions import Unpack

from meshcomm import _torch
from meshcomm._torch import profiler_on
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.door import Either, Later, Now, aside, kept, made
from meshcomm.errors import fail, shape_text
from meshcomm.limit import Limit
from meshcomm.mesh import Mesh
from meshcomm.runtime.call import Post, Want
from meshcomm.runtime.ops import Op
from meshcomm.runtime.pending import then
from meshcomm.runtime.transports.protocol import Link
from meshcomm.watch import here
from meshcomm.work import Work, kind_of

Tree = TypeVar("Tree")

SEND = Op("send", "V -> one rank")
RECV = Op("recv", "one rank -> V", others=True)
_CPU = torch.device("cpu")
EXCHANGE = Op("exchange", "V -> V", others=True)


def _kept_posts(posts: list[Post], later: bool | Limit) -> list[Post]:
    return [(kept(x, later), dst, tag) for x, dst, tag in posts]


@overload
def send(x: Tensor, axis: AxisName, dst: int, tag: int = 0, **how: Unpack[Now]) -> None: ...
@overload
def send(x: Tensor, axis: AxisName, dst: int, tag: int = 0, **how: Unpack[Later]) -> Work[None]: ...
@overload
def send(x: Tensor, axis: AxisName, dst: int, tag: int = 0, **how: Unpack[Either]) -> Work[None] | None: ...
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
    """Send ``x`` to one rank, which calls :func:`recv`; returns when it has been taken or may be overwritten. Of one
    that is interrupted (Ctrl-C) all may have been sent, or nothing; who receives less than all is told.

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
    not_oneself("send", dst, ax)
    if not async_op and _unheard(link := ax.link) and link.exchange_now(link, post, None) is not None:
        return None
    posts = _kept_posts([post], async_op)
    return made(SEND, (), ax, kind_of(x), async_op, lambda link: then(link.exchange(posts, []), lambda _: None))


@overload
def recv(
    axis: AxisName, src: int, *, shape: Sequence[int], dtype: torch.dtype, tag: int = 0, **how: Unpack[Now]
) -> Tensor: ...
@overload
def recv(
    axis: AxisName, src: int, *, shape: Sequence[int], dtype: torch.dtype, tag: int = 0, **how: Unpack[Later]
) -> Work[Tensor]: ...
@overload
def recv(
    axis: AxisName, src: int, *, shape: Sequence[int], dtype: torch.dtype, tag: int = 0, **how: Unpack[Either]
) -> Tensor | Work[Tensor]: ...
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
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out; the
            message, should it come, is taken all the same, so that its sender goes on, and it is for the next receive
            from this rank, of this tag, along this axis, whatever shape and dtype that expects: it is as if that one
            had been called in the place of this one. Under guard the sender is told instead, and nothing is sent. Not
            with async_op, whose ``wait`` has one and can be repeated; of a Work that was waited for in vain and is
            dropped, the next receive gets the message, too.

    Returns: a tensor of that shape and dtype on the mesh's device, new storage. Who is interrupted in it (Ctrl-C) has
        taken nothing, without guard: the next receive gets the message.

    Backward: none: use :func:`permute` or :func:`shift`.

    Cost: the bytes received.

    Raises:
        MeshError: no such axis or index; this rank itself; a shape or dtype that is none; a time-out that is not
            positive.
        CommError: the time is up; the sender sends another shape or dtype (not compared on an accelerator whose backend
            moves the message: NCCL), or was interrupted in the middle of it; in-process, where nobody can go on.

    Example: see :func:`send`.

    Source: MPI_Recv.
    """
    if here.watcher is not None or timeout is not None:
        return aside(recv, axis, src, shape, dtype, tag, mesh, async_op, timeout)
    ax = check.axis_of("recv", axis, mesh)
    want = _checked_want("recv", (src, shape, dtype, tag), ax)
    not_oneself("recv", src, ax)
    if not async_op and _unheard(link := ax.link) and (got := link.exchange_now(link, None, want)) is not None:
        return got[0]
    kind = dtype, want[1]
    return made(RECV, (), ax, kind, async_op, lambda link: then(link.exchange([], [want]), lambda got: got[0]))


@overload
def exchange(
    sends: Iterable[tuple[Any, ...]], recvs: Iterable[tuple[Any, ...]], axis: AxisName, **how: Unpack[Now]
) -> list[Tensor]: ...
@overload
def exchange(
    sends: Iterable[tuple[Any, ...]], recvs: Iterable[tuple[Any, ...]], axis: AxisName, **how: Unpack[Later]
) -> Work[list[Tensor]]: ...
@overload
def exchange(
    sends: Iterable[tuple[Any, ...]], recvs: Iterable[tuple[Any, ...]], axis: AxisName, **how: Unpack[Either]
) -> list[Tensor] | Work[list[Tensor]]: ...
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
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out: what it
            sends is sent all the same, and what comes, or has come, is for the next receives, as for :func:`recv`. Not
            with async_op, whose ``wait`` has one.

    Returns: the tensors received, in the order of ``recvs``, on the mesh's device.

    Backward: none. With grad mode on, an input that requires grad raises: use :func:`permute` or :func:`all_to_all`.

    Cost: the bytes sent.

    Raises:
        MeshError: as :func:`send` and :func:`recv`; a message to oneself that does not meet its other side in the same
            batch; a time-out that is not positive.
        CommError: the time is up; what comes has another shape or dtype, as for :func:`recv`; a sender was
            interrupted in the middle; in-process, where nobody can go on.

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

    return made(EXCHANGE, (), ax, None, async_op, lambda link: then(link.exchange(sent, away), sort))


def _unheard(link: Link) -> bool:
    """Whether nobody is told of the calls of a link."""
    return not (link.watched or profiler_on())


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
    if type(dst) is not int or not 0 <= dst < axis.size:
        dst = check.checked_index(where, dst, axis, "dst")
    if tag != 0 or type(tag) is not int:
        checked_tag(where, tag, axis)
    check.no_gradient(where, x, axis, "use permute or shift")
    if not axis.mesh.in_process and (x.requires_grad or not (axis.is_on_cpu and x.is_cpu)):
        x = x.detach().to(_home(axis))  # where it is received: all ranks move it the same way
    return x, dst, int(tag)


def _checked_want(where: str, entry: object, axis: Axis) -> Want:
    if not isinstance(entry, tuple) or len(entry) not in (3, 4):
        check.explain(where, f"{entry!r} is not a message to receive.", axis, fix="(src, shape, dtype) or (.., tag)")
    src, shape, dtype, tag = entry if len(entry) == 4 else (*entry, 0)
    if type(src) is not int or not 0 <= src < axis.size:
        src = check.checked_index(where, src, axis, "src")
    if type(shape) is Size:
        shape = tuple(shape)
    elif type(shape) is not tuple or _odd_lengths(shape):
        if not check.are_lengths(shape):
            check.explain(where, f"shape={shape!r} is not a shape.", axis, fix="a tuple of non-negative ints")
        shape = tuple(map(int, shape))
    if not isinstance(dtype, torch.dtype):
        check.explain(where, f"dtype={dtype!r} is not a torch dtype.", axis, fix="such as torch.float32")
    if max(prod(shape) * dtype.itemsize, *shape, 0) >= 2**63:
        check.explain(where, f"shape={shape} is too large.", axis, fix="lengths of fewer than 2**63 bytes in all")
    if tag != 0 or type(tag) is not int:
        checked_tag(where, tag, axis)
    return src, shape, dtype, int(tag), _CPU if axis.is_on_cpu else _home(axis)


def _odd_lengths(shape: tuple[object, ...]) -> bool:
    for length in shape:  # noqa: SIM110  # a generator takes as long again
        if type(length) is not int or length < 0:
            return True
    return False


def _home(axis: Axis) -> torch.device:
    """Where messages over this axis lie."""
    home: torch.device = axis.mesh.device
    axis.is_on_cpu = home.type == "cpu" and not axis.mesh.in_process
    return home


def checked_tag(where: str, tag: object, axis: Axis, device: torch.device | None = None) -> None:
    """``tag`` is one, and what moves messages knows tags."""
    if not check.whole_number(tag) or not 0 <= tag < 2**30:  # type: ignore[operator]
        check.explain(where, f"tag={tag!r} is not a tag.", axis, fix="an int from 0 to 2**30 - 1")
    if not tag:
        return
    device = axis.mesh.device if device is None else device
    if where.removesuffix("_object") not in (may := axis.link.tagged(device)):
        check.explain(
            where, f"tag={tag}, but what moves tensors on {device} matches messages by their order.", axis,
            fix="leave the tag out" + (", or give all that have tags to one exchange, on both sides" if may else ""),
        )  # fmt: skip


def not_oneself(where: str, index: int, axis: Axis) -> None:
    """``index`` is that of another rank."""
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


# ------------------------------------------------------------------------------------------------ what counts as used


@Op("tie", "as ``x``", communicates=False)
def tie(x: Tree, *others: Any) -> Tree:
    """``x``, to whose gradient ``others`` belong from now on: they get zeros, so that their backward runs.

    ::

        forward                 backward
        x      ->  [x]          x      [g]  <-  [g]
        other                   other  [0]

    A rank that does not use what a collective gave it has no backward of that collective, and its peers wait for it::

        y = mc.shift(h, "pp")
        loss = mc.tie(own_loss, y) if mesh.coordinate["pp"] == 0 else loss_of(y)

    Type: as ``x``. No pvary is made, and nothing is said of the types of the others.

    Args:
        x: a floating or complex tensor, or a pytree of such; any dtype where none of the others requires grad.
        others: tensors and pytrees that count as used; what is no tensor in them is passed over.

    Returns: the values of ``x``, bit for bit, new storage; it requires grad if ``x`` or any of the others does.

    Backward: the gradient to ``x``, zeros to the others.

    Cost: a copy of ``x``; nothing is sent.

    Raises:
        MeshError: not a tensor; an integer or bool ``x``, which carries no gradient, tied to what requires grad; a
            :class:`Work` among the others.

    Example:
        >>> import torch, meshcomm as mc
        >>> def main():
        ...     mesh = mc.make_mesh({"pp": 2})
        ...     w = torch.ones((), requires_grad=True)
        ...     y = mc.shift(2 * w, "pp", mesh=mesh)
        ...     loss = mc.tie(w, y) if mesh.rank == 0 else 3 * y
        ...     return torch.autograd.grad(loss, w)[0].item()
        >>> mc.launch(main, ranks=2)
        [7.0, 0.0]
    """
    if here.watcher is not None:
        return here.watcher.tied(tie, x, others)  # type: ignore[no-any-return]
    used = [other for other in _torch.tree_flatten(others)[0] if _counts(other)]
    if isinstance(x, Tensor):
        return _tied(x, used)  # type: ignore[return-value]
    leaves, form = _torch.tree_flatten(x)
    for leaf, (path, _) in zip(leaves, _torch.tree_leaves_with_path(x), strict=True):
        if not isinstance(leaf, Tensor):
            what = f"x{path} is not a tensor but {type(leaf).__name__}."
            fail("tie", what, fix="tie(x, *others): x is what is used, a tensor or a pytree of tensors")
    return _torch.tree_unflatten([_tied(leaf, used) for leaf in leaves], form)  # type: ignore[no-any-return]


def _counts(other: object) -> bool:
    """Whether this is a tensor that can carry a gradient."""
    if isinstance(other, Tensor):
        return other.is_floating_point() or other.is_complex()
    if hasattr(other, "wait"):
        fail("tie", "a Work among the others.", got=repr(other), fix="wait for it: mc.tie(x, work.wait())")
    return False


def _tied(x: Tensor, used: list[Tensor]) -> Tensor:
    in_graph = torch.compiler.is_compiling()
    if not (x.is_floating_point() or x.is_complex()):
        if torch.is_grad_enabled() and any(other.requires_grad for other in used):
            what = "an x of integers or bools carries no gradient, and one of the others requires grad."
            fail(
                "tie",
                what,
                got=f"x {shape_text(x.dtype, x.shape)}",
                fix="tie a floating tensor, such as the loss",
            )
        return _torch.copied_in_graph(x) if in_graph else x.clone(memory_format=torch.contiguous_format)
    # Nothing of each stands behind the values: exact for every value of both, and torch knows all of its derivatives.
    # Two dims: backward of a cat gives what has none of one dim zeros that no later derivative comes through.
    y = torch.cat([x.reshape(-1, 1), *(nothing_of(other, x) for other in used)]).view(x.shape)
    return _torch.copied_in_graph(y) if in_graph else y


def nothing_of(other: Tensor, x: Tensor) -> Tensor:
    """``[0, 1]``: no element of it, as ``x`` has them."""
    none = (other.narrow(0, 0, 0) if other.ndim else other.reshape(1).narrow(0, 0, 0)).reshape(-1)
    if none.is_complex() and not x.is_complex():
        none = none.real  # whose backward makes numbers of its own: those of a cat begin anywhere in its gradient
    return none.to(device=x.device, dtype=x.dtype).unsqueeze(1)
