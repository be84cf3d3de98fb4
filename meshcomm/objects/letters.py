"""A Python object from one rank to one other: send_object, recv_object.

A letter is a row of fixed size, which says how long the object is or why there is none, and the object's bytes: in the
row if they are few, in messages behind it if they are many.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.messages import checked_tag, not_oneself
from meshcomm.mesh import Mesh
from meshcomm.objects.parcels import home_of
from meshcomm.objects.pickles import UnpicklableError, byte_view, pack, unpack
from meshcomm.runtime.call import Call, all_or_none, told
from meshcomm.runtime.hooks.ranges import calling
from meshcomm.runtime.ops import Op

T = TypeVar("T")

_ROW = 1024
_HEAD = struct.Struct("=2q")
"""How long a problem is, and how many bytes the object has."""
_ROOM = _ROW - _HEAD.size
_CHUNK = 2**26
"""The bytes of one message at most."""


@Op("send_object", "V -> one rank")
def send_object(obj: object, axis: AxisName, dst: int, tag: int = 0, *, mesh: Mesh | None = None) -> None:
    """Send a Python object to one rank, which calls :func:`recv_object`; returns when it has been taken or may be
    changed.

    Pickle carries it: use it among processes that trust each other. Tensors inside arrive on the receiver's device
    (those on the CPU on the CPU), equal views of one storage stay tied, and a graph of autograd stays behind.

    Type: varying -> one rank.

    Args:
        obj: anything that can be pickled.
        axis: a name, or a tuple of names, of which the first is major.
        dst: the index along ``axis`` to send to.
        tag: as for :func:`send`, whose messages between the same ranks it is one of.
        mesh: the current mesh by default.

    Backward: none.

    Cost: a message of a kilobyte; beyond a kilobyte also the bytes of the pickle, in messages of 64 MiB.

    Raises:
        MeshError: no such axis or index; this rank itself; what cannot be pickled, with the path to the culprit, of
            which the receiver is told; a tensor with a graph while grad mode is on.
        CommError: the time is up; in-process, where nobody can go on.

    Example:
        >>> import meshcomm as mc
        >>> mesh = mc.make_mesh({"pp": 2})
        >>> def main():
        ...     if mesh.rank == 0:
        ...         return mc.send_object({"step": 3}, "pp", dst=1, mesh=mesh)
        ...     return mc.recv_object("pp", src=0, mesh=mesh)
        >>> mc.launch(main, ranks=2)
        [None, {'step': 3}]

    Source: mpi4py's ``send``; ``torch.distributed.send_object_list``.
    """
    ax = check.axis_of("send_object", axis, mesh)
    check.checked_index("send_object", dst, ax, "dst")
    checked_tag("send_object", tag, ax, home_of(ax))
    not_oneself("send_object", dst, ax)
    problem, data = "", bytearray()
    try:
        data = pack(obj)
    except UnpicklableError as error:
        problem = str(error)
    said = problem.encode()[:_ROOM]
    body = said or (data if len(data) <= _ROOM else b"")
    row = bytearray(_ROW)
    _HEAD.pack_into(row, 0, len(said), len(data))
    row[_HEAD.size : _HEAD.size + len(body)] = body
    home = home_of(ax)
    with _moving("send_object", ax):
        for part in (byte_view(row), *(byte_view(data).split(_CHUNK) if len(data) > _ROOM else ())):
            ax.link.exchange([(part.to(home), int(dst), int(tag))], [])
    if problem:
        fix = f"leave it out, or pass what index {dst} can make it from"
        check.explain("send_object", f"{problem}.", ax, fix=fix)


@Op("recv_object", "one rank -> V")
def recv_object(axis: AxisName, src: int, tag: int = 0, *, mesh: Mesh | None = None) -> Any:
    """Receive the Python object that one rank sends with :func:`send_object`.

    Pickle carries it: use it among processes that trust each other.

    Type: one rank -> varying.

    Args:
        axis: a name, or a tuple of names, of which the first is major.
        src: the index along ``axis`` to receive from.
        tag: as for :func:`recv`, whose messages between the same ranks it is one of.
        mesh: the current mesh by default.

    Returns: a new object. Who is interrupted in it (Ctrl-C) has taken nothing, as in :func:`recv`.

    Backward: none.

    Cost: the bytes received.

    Raises:
        MeshError: no such axis or index; this rank itself; what the sender could not pickle, or what cannot be
            unpickled here, of which the sender is not told.
        CommError: the time is up; the sender sends a tensor; in-process, where nobody can go on.

    Example: see :func:`send_object`.

    Source: mpi4py's ``recv``; ``torch.distributed.recv_object_list``.
    """
    ax = check.axis_of("recv_object", axis, mesh)
    check.checked_index("recv_object", src, ax, "src")
    checked_tag("recv_object", tag, ax, home_of(ax))
    not_oneself("recv_object", src, ax)
    return all_or_none(ax.link, _received, ax, int(src), int(tag))


def _received(ax: Axis, src: int, tag: int) -> Any:
    said, data = _come(ax, src, tag)
    if said:
        why = data.decode(errors="ignore")
        check.explain("recv_object", f"index {src} had nothing to send: {why}.", ax, fix="let it leave that out")
    try:
        with _torch.outside_transforms():
            return unpack(data, ax.mesh.device)
    except Exception as error:
        what = f"what came cannot be unpickled here: {type(error).__name__}: {error}".split("\n", 1)[0]
        check.explain("recv_object", f"{what}.", ax, fix=f"let index {src} send what can be read here")


def _come(axis: Axis, src: int, tag: int) -> tuple[int, bytearray]:
    """How long the problem is, and that, or the object's bytes."""

    def come(into: Tensor) -> None:
        want = (src, tuple(into.shape), torch.uint8, tag, home_of(axis))
        before = 0 if told.begun is None else len(told.begun)
        into.copy_(axis.link.exchange([], [want])[0])
        if told.begun is not None:  # should it be given back, it is where it is now: else it would be there twice
            told.begun[before:] = [(axis.link.keep, (want, into))]

    with _moving("recv_object", axis):
        row = bytearray(_ROW)
        come(byte_view(row))
        said, size = _HEAD.unpack_from(row)
        data = row[_HEAD.size :][: said or size]
        if size > _ROOM:
            data = bytearray(size)
            for part in byte_view(data).split(_CHUNK):
                come(part)
    return said, data


@contextmanager
def _moving(where: str, axis: Axis) -> Iterator[None]:
    """What runs inside belongs to one call of this name."""
    with _torch.outside_transforms(), torch.no_grad(), calling(axis, Call(where, (), (), None, axis)):
        yield
