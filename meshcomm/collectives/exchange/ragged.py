"""Rows that go where each rank says: all_to_all_ragged.

n = size of the axis. Without ``most`` the rows go as they lie, and the host reads how many come; with it each pair of
ranks has as much room as any of them may need, and no shape depends on what is sent::

    counts [2 0 1]   rows  a b c      most = 2   a b | . . | c .
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from meshcomm._torch import functorch_active, in_one_graph, out_of_graphs, tree_flatten, tree_unflatten, without_modes
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.door import EitherOfTree, LaterOfTree, NowOfTree
from meshcomm.collectives.exchange.all_to_all import all_to_all
from meshcomm.collectives.trees.buckets import leaves_of
from meshcomm.errors import shape_text
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.dry.world import dry_world
from meshcomm.watch import here, paused
from meshcomm.work import Work

Tree = TypeVar("Tree")

_WHERE = "all_to_all_ragged"
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@overload
def all_to_all_ragged(
    x: Tree, counts: Tensor, axis: AxisName, *, most: int | None = None, **how: Unpack[NowOfTree]
) -> tuple[Tree, Tensor]: ...
@overload
def all_to_all_ragged(
    x: Tree, counts: Tensor, axis: AxisName, *, most: int | None = None, **how: Unpack[LaterOfTree]
) -> Work[tuple[Tree, Tensor]]: ...
@overload
def all_to_all_ragged(
    x: Tree, counts: Tensor, axis: AxisName, *, most: int | None = None, **how: Unpack[EitherOfTree]
) -> tuple[Tree, Tensor] | Work[tuple[Tree, Tensor]]: ...
@Op(_WHERE, "V -> V", composed=True)
def all_to_all_ragged(
    x: Any,
    counts: Tensor,
    axis: AxisName,
    *,
    most: int | None = None,
    mesh: Mesh | None = None,
    bucket_mb: float = 25,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Send as many rows of ``x`` to each rank as this rank's ``counts`` say.

    ::

        rank 0  [a b c]  counts [1 2]      [a d e]  counts_from [1 2]
        rank 1  [d e]    counts [2 0]  ->  [b c]    counts_from [2 0]

    Rows grouped by destination come out grouped by source. With ``counts`` of ``[n, e]`` they are grouped by e within
    each, such as by the expert there that is to have them, and come out so. The way back is the same call with what
    came: ``back, _ = mc.all_to_all_ragged(y, counts_from, axis)``.

    Type: varying -> varying, both results.

    Args:
        x: ``[rows, ...]`` of any dtype, or a pytree of such with as many rows each, which travel together; ranks may
            have different numbers of rows, also none.
        counts: how many rows go to each index along ``axis``, integers ``[n]`` or ``[n, e]`` that add up to the rows.
        axis: a name, or a tuple of names, of which the first is major.
        most: at least as many as the rows that any rank sends to any other, the same on all ranks. With it no shape
            depends on data: nothing is read by the host of an accelerator, and it compiles into one graph.
        mesh: the current mesh by default.
        bucket_mb: leaves of a pytree are sent together until they have this many MiB.
        async_op: give a :class:`Work` of both results; the counts have gone by then, the rows are under way.
        timeout: seconds or a timedelta after which each of the two calls is given up, in place of the mesh's own
            time-out. Not with async_op, whose ``wait`` has one.

    Returns: ``(y, counts_from)``, new storage: y has the rows that came, ``[sum(counts_from), ...]``, and counts_from
    how many of them are of each index, of the shape and dtype of ``counts``. With ``most`` y is ``[n * most, ...]``:
    from row ``i * most`` on what index i sent, then zeros; ``all_to_all(y, axis, 0, 0)`` takes such rows back.

    Backward: of y, the gradient's rows back to where they came from; counts have none.

    Cost: one all_to_all of the counts and one of the rows: (n-1) numbers, and the bytes of the rows for others, sent
    per rank; with ``most`` (n-1) times ``most`` rows. Without it the host reads the counts, which waits for an
    accelerator, and breaks the graph under ``torch.compile``.

    Raises:
        MeshError: no such axis; counts that are no integers ``[n]`` or ``[n, e]``, have a negative entry or do not add
            up to the rows of each leaf; more than ``most`` for one rank; a ``most`` that is no int or negative; not a
            tensor; a device the mesh cannot move. Of counts on an accelerator with ``most``, and in compiled code, the
            device asserts instead, as it does for an index that is out of range.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"ep": 2})
        >>> def main():
        ...     x = torch.arange(3.0) + 10 * mesh.rank
        ...     y, counts_from = mc.all_to_all_ragged(x, torch.tensor([[1, 2], [3, 0]][mesh.rank]), "ep", mesh=mesh)
        ...     return y.tolist(), counts_from.tolist()
        >>> mc.launch(main, ranks=2)
        [([0.0, 10.0, 11.0, 12.0], [1, 3]), ([1.0, 2.0], [2, 0])]

    Source: MPI_Alltoallv; ``jax.lax.ragged_all_to_all``; the dispatch of dropless mixtures of experts.
    """
    ax = check.axis_of(_WHERE, axis, mesh)
    how = {"mesh": ax.mesh, "bucket_mb": bucket_mb, "async_op": async_op, "timeout": timeout}
    if torch.compiler.is_compiling():
        _shapes_fit(x, counts, ax, most)
        if most is not None:
            return _in_rooms(x, counts, ax, most, how)
        if in_one_graph():
            what = "without most= the host reads how many rows come, which no graph can."
            check.explain(_WHERE, what, ax, fix="most=, the most rows that any rank sends to another")
        return _out_of_graphs(x, counts, ax, how)
    with paused(), without_modes():
        _shapes_fit(x, counts, ax, most)
        if most is None or counts.device.type == "cpu":
            _counts_fit(x, counts, ax, most)
    return _as_they_lie(x, counts, ax, how) if most is None else _in_rooms(x, counts, ax, most, how)


def _as_they_lie(x: Any, counts: Tensor, axis: Axis, how: dict[str, Any]) -> Any:
    theirs = _counts_from(counts, axis, how)
    y = all_to_all(x, axis.name, 0, 0, lengths_of(counts, axis), lengths_of(theirs, axis), **how)
    return y.then(lambda y: (y, theirs)) if how["async_op"] else (y, theirs)


@out_of_graphs
def _out_of_graphs(x: Any, counts: Tensor, axis: Axis, how: dict[str, Any]) -> Any:
    _counts_fit(x, counts, axis, None)
    return _as_they_lie(x, counts, axis, how)


def _in_rooms(x: Any, counts: Tensor, axis: Axis, most: int, how: dict[str, Any]) -> Any:
    theirs, ends = _counts_from(counts, axis, how), counts.reshape(axis.size, -1).sum(1).cumsum(0)
    leaves, form = tree_flatten(x)
    rooms = [_with_room(leaf, ends.to(leaf.device), axis.size, most) for leaf in leaves]
    y = all_to_all(tree_unflatten(rooms, form), axis.name, 0, 0, **how)
    return y.then(lambda y: (y, theirs)) if how["async_op"] else (y, theirs)


def _with_room(x: Tensor, ends: Tensor, n: int, most: int) -> Tensor:
    """``[n * most, ...]``: the rows for each index at the beginning of its room. ``ends``: where they end in ``x``."""
    row = torch.arange(x.shape[0], device=x.device)
    to = torch.searchsorted(ends, row, right=True)
    begin = torch.cat([ends.new_zeros(1), ends])
    place = row - begin[to]
    place = torch.where((place < most) & (to < n), to * most + place, n * most)  # out of range: the device asserts
    return x.new_zeros(n * most, *x.shape[1:]).index_copy(0, place, x)


def _counts_from(counts: Tensor, axis: Axis, how: dict[str, Any]) -> Tensor:
    theirs = all_to_all(counts, axis.name, 0, 0, mesh=how["mesh"], timeout=how["timeout"])
    dry = None if torch.compiler.is_compiling() else dry_world()
    if dry is not None:  # each of the others sends this rank as much as it sends itself
        dry.suppose(theirs, counts[axis.index].expand(counts.shape).contiguous(), axis.index)
    return theirs


def lengths_of(counts: Tensor, axis: Axis) -> list[Any]:
    """How many rows go to each index, or come; under the checker numbers that know along which axes they vary."""
    with paused(), without_modes():
        values = [sum(row) for row in counts.reshape(axis.size, -1).tolist()]
    return values if here.watcher is None else here.watcher.numbers(counts, values, _WHERE)


# ------------------------------------------------------------------------------------------------- what can be wrong


def _shapes_fit(x: Any, counts: Any, axis: Axis, most: Any) -> None:
    """What can be said without reading the counts."""

    def has_rows(leaf: Tensor) -> None:
        if not leaf.dim():
            _wrong("x has no rows.", leaf, axis, "", "a tensor of at least one dim, or a pytree of such")

    _each(x, axis, has_rows)
    check.tensor(_WHERE, counts, axis, "counts")
    if counts.dim() not in (1, 2) or counts.shape[0] != axis.size or counts.dtype not in _INTEGERS:
        fix = f"integers [{axis.size}] or [{axis.size}, e]: how many rows go to each index of axis {axis.name!r}"
        _wrong(f"counts is {shape_text(counts.dtype, counts.shape)}.", x, axis, "", fix)
    if most is not None and (not check.whole_number(most) or most < 0):
        fix = "an int, at least 0, the same on all ranks"
        _wrong(f"most={most!r} is not a number of rows.", x, axis, "", fix)


def _counts_fit(x: Any, counts: Tensor, axis: Axis, most: int | None) -> None:
    """What the counts themselves say."""
    try:
        read = counts.reshape(axis.size, -1).tolist()
    except RuntimeError:
        if not functorch_active():
            raise
        _wrong("counts is batched by vmap.", x, axis, "", "the same counts for all of the batch, or a loop")
    got = f"counts={counts.tolist()}"
    least = min((count for row in read for count in row), default=0)
    if least < 0:
        _wrong(f"counts has {least} among its entries.", x, axis, got, "how many rows go to each index, 0 or more")
    rows = [sum(row) for row in read]

    def adds_up(leaf: Tensor) -> None:
        if leaf.shape[0] != sum(rows):
            fix = "counts that add up to the rows: torch.bincount(choice, minlength=n) of all that were sorted"
            _wrong(f"counts add up to {sum(rows)}, and there are {leaf.shape[0]} rows.", leaf, axis, got, fix)

    _each(x, axis, adds_up)
    if most is not None and max(rows) > most:
        what = f"{max(rows)} rows go to index {rows.index(max(rows))}, more than most={most}."
        fix = "a larger most=, the same on all ranks; or leave it out, and the host reads how many come"
        _wrong(what, x, axis, got, fix)


def _each(x: Any, axis: Axis, fits: Callable[[Tensor], None]) -> None:
    """All leaves are tensors that the mesh moves, and fit; if not, the path to one that does not is said."""
    if isinstance(x, Tensor):
        check.tensor(_WHERE, x, axis)
        fits(x)
    else:
        leaves_of(_WHERE, x, axis, fits, 0)


def _wrong(what: str, x: Any, axis: Axis, got: str, fix: str) -> NoReturn:
    check.explain(_WHERE, what, axis, x=x if isinstance(x, Tensor) else None, got=got, fix=fix)
