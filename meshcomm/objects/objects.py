"""Python objects along an axis: broadcast_object, all_gather_object, gather_object, scatter_object.

n = size of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from meshcomm import _torch
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.mesh import Mesh
from meshcomm.objects.parcels import FIX, Courier
from meshcomm.objects.pickles import UnpicklableError, pack, unpack
from meshcomm.runtime.ops import Op

T = TypeVar("T")


def packed(make: Callable[[], T]) -> tuple[T | None, str | None]:
    """What ``make`` packs, or why it cannot."""
    try:
        return make(), None
    except UnpicklableError as error:
        return None, f"{error}{FIX}leave it out, or pass what the receiver can make it from"


def unpacked(courier: Courier, parcels: Sequence[bytearray]) -> list[Any]:
    """The objects; where one rank cannot read its own, all raise."""
    found, problem = [], None
    for parcel in parcels:
        try:
            with _torch.outside_transforms():
                found.append(unpack(parcel, courier.axis.mesh.device))
        except Exception as error:
            problem = f"what came cannot be unpickled here: {type(error).__name__}: {error}".split("\n", 1)[0]
            break
    courier.meet(problem)
    return found


@Op("broadcast_object", "V -> I", compared=("src",))
def broadcast_object(obj: T, axis: AxisName, src: int = 0, *, mesh: Mesh | None = None) -> T:
    """The Python object of one rank, on all.

    ::

        rank 0  a      a
        rank 1  b  ->  a    src=0

    Pickle carries it: use it among processes that trust each other. Tensors inside arrive on the receiver's device
    (those on the CPU on the CPU), equal views of one storage stay tied, and a graph of autograd stays behind.

    Type: varying -> invariant.

    Args:
        obj: on ``src`` what shall be sent; what the others give is not looked at.
        axis: a name, or a tuple of names, of which the first is major.
        src: the index along ``axis`` to take it from.
        mesh: the current mesh by default.

    Returns: a new object on every rank, ``src`` included.

    Backward: none.

    Cost: two steps with a kilobyte from each rank; beyond a kilobyte also the bytes of the pickle, received by each
    rank in chunks of 64 MiB.

    Raises:
        MeshError: no such axis or index; on all ranks, with the path to the culprit, what cannot be pickled, what
            cannot be unpickled on one of them, a tensor with a graph while grad mode is on, a ``src`` that differs.

    Example:
        >>> import meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> mc.launch(lambda: mc.broadcast_object({"from": mesh.rank}, "dp", src=1, mesh=mesh), ranks=2)
        [{'from': 1}, {'from': 1}]

    Source: ``torch.distributed.broadcast_object_list``; mpi4py's ``bcast``.
    """
    ax = check.axis_of("broadcast_object", axis, mesh)
    courier = Courier("broadcast_object", ax, src=src)
    courier.index(src, "src")
    data, problem = packed(lambda: pack(obj)) if ax.is_at(src) else (None, None)
    found: T = unpacked(courier, [courier.broadcast(data, src, problem)])[0]
    return found


@Op("all_gather_object", "V -> I")
def all_gather_object(obj: T, axis: AxisName, *, mesh: Mesh | None = None) -> list[T]:
    """The Python objects of all ranks, on every one.

    ::

        rank 0  a      [a, b]
        rank 1  b  ->  [a, b]

    Pickle carries them: use it among processes that trust each other. Tensors inside arrive on the receiver's device
    (those on the CPU on the CPU), equal views of one storage stay tied, and a graph of autograd stays behind.

    Type: varying -> invariant.

    Args:
        obj: anything that can be pickled; types and sizes may differ between ranks.
        axis: a name, or a tuple of names, of which the first is major.
        mesh: the current mesh by default.

    Returns: n new objects in order of index, this rank's own included.

    Backward: none.

    Cost: two steps with a kilobyte from each rank; beyond a kilobyte also the bytes of all pickles, in chunks of
    64 MiB, padded to at most twice as many.

    Raises:
        MeshError: no such axis; on all ranks, with the path to the culprit, what cannot be pickled on one of them, what
            cannot be unpickled, a tensor with a graph while grad mode is on.

    Example:
        >>> import meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> mc.launch(lambda: mc.all_gather_object("ab"[mesh.rank], "dp", mesh=mesh), ranks=2)
        [['a', 'b'], ['a', 'b']]

    Source: ``torch.distributed.all_gather_object``; mpi4py's ``allgather``.
    """
    ax = check.axis_of("all_gather_object", axis, mesh)
    if ax.mesh.reads is not None:
        ax.mesh.reads.note_others("all_gather_object()")
    courier = Courier("all_gather_object", ax)
    data, problem = packed(lambda: pack(obj))
    return unpacked(courier, courier.all_gather(data or bytearray(), problem))


@Op("gather_object", "V -> one rank", compared=("dst",))
def gather_object(obj: T, axis: AxisName, dst: int = 0, *, mesh: Mesh | None = None) -> list[T] | None:
    """The Python objects of all ranks, on one of them.

    ::

        rank 0  a      [a, b]
        rank 1  b  ->  None     dst=0

    Pickle carries them: use it among processes that trust each other. Tensors inside arrive on the receiver's device
    (those on the CPU on the CPU), equal views of one storage stay tied, and a graph of autograd stays behind.

    Type: varying -> one rank.

    Args:
        obj: anything that can be pickled; types and sizes may differ between ranks.
        axis: a name, or a tuple of names, of which the first is major.
        dst: the index along ``axis`` that gets them.
        mesh: the current mesh by default.

    Returns: n new objects in order of index on ``dst``; None elsewhere.

    Backward: none.

    Cost: two steps with a kilobyte from each rank; beyond a kilobyte also the bytes of the pickle, sent by each rank
    in chunks.

    Raises:
        MeshError: no such axis or index; on all ranks, with the path to the culprit, what cannot be pickled on one of
            them or unpickled on ``dst``, a tensor with a graph while grad mode is on, a ``dst`` that differs.

    Example:
        >>> import meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> mc.launch(lambda: mc.gather_object([mesh.rank], "dp", dst=1, mesh=mesh), ranks=2)
        [None, [[0], [1]]]

    Source: ``torch.distributed.gather_object``; mpi4py's ``gather``.
    """
    ax = check.axis_of("gather_object", axis, mesh)
    if ax.mesh.reads is not None:
        ax.mesh.reads.note_others("gather_object()")
    courier = Courier("gather_object", ax, dst=dst)
    courier.index(dst, "dst")
    data, problem = packed(lambda: pack(obj))
    got = courier.gather(data or bytearray(), dst, problem)
    found = unpacked(courier, got or ())
    return None if got is None else found


@Op("scatter_object", "one rank -> V", compared=("src",))
def scatter_object(objs: Sequence[T] | None, axis: AxisName, src: int = 0, *, mesh: Mesh | None = None) -> T:
    """Give each rank one of the Python objects of one rank.

    ::

        rank 0  [a, b]      a
        rank 1  None    ->  b    src=0

    Pickle carries them: use it among processes that trust each other. Tensors inside arrive on the receiver's device
    (those on the CPU on the CPU), and a graph of autograd stays behind.

    Type: one rank -> varying.

    Args:
        objs: on ``src`` a sequence of n objects; None elsewhere.
        axis: a name, or a tuple of names, of which the first is major.
        src: the index along ``axis`` that has them.
        mesh: the current mesh by default.

    Returns: a new object: the one of this rank's index.

    Backward: none.

    Cost: two steps with a kilobyte from each rank, one with 8 n bytes, and the bytes of the pickles, sent by ``src``
    in chunks.

    Raises:
        MeshError: no such axis or index; on all ranks: not n objects on ``src``, objects elsewhere, what cannot be
            pickled (with the path to the culprit) or unpickled, a tensor with a graph while grad mode is on.

    Example:
        >>> import meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> mc.launch(lambda: mc.scatter_object(None if mesh.rank else ["a", {}], "dp", mesh=mesh), ranks=2)
        ['a', {}]

    Source: ``torch.distributed.scatter_object_list``; mpi4py's ``scatter``.
    """
    ax = check.axis_of("scatter_object", axis, mesh)
    courier = Courier("scatter_object", ax, src=src)
    courier.index(src, "src")
    datas, problem = None, _scatter_problem(objs, ax, src)
    if problem is None and objs is not None:
        datas, problem = packed(lambda: [pack(each, f"objs[{i}]") for i, each in enumerate(objs)])
    found: T = unpacked(courier, [courier.scatter(datas, src, problem)])[0]
    return found


def _scatter_problem(objs: object, axis: Axis, src: int) -> str | None:
    if axis.index != src:
        return None if objs is None else f"objs is given, but src is {src}: pass None elsewhere"
    if not isinstance(objs, Sequence) or isinstance(objs, (str, bytes)):
        return f"objs on src is a {type(objs).__name__}: pass a list of {axis.size} objects"
    return None if len(objs) == axis.size else f"objs has {len(objs)} objects for {axis.size} ranks"
