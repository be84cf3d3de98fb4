"""Reduceds of all ranks up to one's own: scan.

n = size of the axis. Rank i's neighbour before is i - 1, or i + 1 in reverse.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from meshcomm._torch import copied_in_graph
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.check import Reduced, Scanned
from meshcomm.collectives.door import EitherOfTree, LaterOfTree, NowOfTree, aside, by_elements, carried
from meshcomm.collectives.exchange.permute import shifted
from meshcomm.collectives.rule import Rule, apply, rule_named
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.runtime.pending import then
from meshcomm.runtime.transports.dtypes import HALF, fold
from meshcomm.watch import here
from meshcomm.work import Work

Tree = TypeVar("Tree")


# ------------------------------------------------------------------------------------------------------- the rule


def _steps(axis: Axis) -> list[int]:
    """1, 2, 4, ...: in each step a rank takes in as many ranks again as it has already."""
    return [2**k for k in range((axis.size - 1).bit_length())]


def _has(axis: Axis, step: int, x: Tensor) -> Tensor:
    """Whether there is a rank ``step`` before this one."""
    source = axis.index_tensor.to(x.device) - step
    return (source >= 0) & (source < axis.size)


def _run_scan(x: Tensor, axis: Axis, op: str, exclusive: bool, reverse: bool) -> Tensor:
    sign, dtype = -1 if reverse else 1, x.dtype
    y = wide = x.float() if dtype in HALF and op in ("sum", "product") else x
    if not axis.is_traced:  # one meeting, whoever has a time-out or waits later: a step cannot begin in a wait
        rows = axis.link.all_gather(wide)
        return then(rows, lambda rows: _of_rows(rows, axis, op, exclusive, reverse).to(dtype))
    for step in _steps(axis):
        y = _taken_in(y, axis, sign * step, op, y)
    if exclusive:
        y = _taken_in(y, axis, sign, "", torch.full_like(y, _identity(op, y.dtype)))
    y = y.to(dtype)
    return copied_in_graph(y) if y is x else y


def _taken_in(y: Tensor, axis: Axis, step: int, op: str, alone: Tensor) -> Tensor:
    """What comes from the rank ``step`` before, with ``y`` if there is an ``op``; ``alone`` where there is none."""
    came = rule_named("shift").run(y, axis, step, False)
    return torch.where(_has(axis, step, y), fold(op, [came, y]) if op else came, alone)  # the same graph on every rank


def _of_rows(rows: Tensor, axis: Axis, op: str, exclusive: bool, reverse: bool) -> Tensor:
    """The same from the tensors of all ranks, in the same order: the same bits. In pairs from this rank's own row on,
    all pairs at once; the row farthest away goes up as it is where it is alone.
    """
    mine = rows[axis.own_index + exclusive :] if reverse else rows[: axis.own_index + 1 - exclusive]
    if not len(mine):
        return torch.full_like(rows[0], _identity(op, rows.dtype), memory_format=torch.contiguous_format)
    while len(mine) > 1:
        count, odd = len(mine), len(mine) % 2
        alone, even = (mine[count - odd :], mine[: count - odd]) if reverse else (mine[:odd], mine[odd:])
        pairs = fold(op, [even[1::2], even[::2]] if reverse else [even[::2], even[1::2]])
        mine = torch.cat([pairs, alone] if reverse else [alone, pairs]) if odd else pairs
    return mine[0].clone(memory_format=torch.contiguous_format)


def _identity(op: str, dtype: torch.dtype) -> Any:
    """What changes nothing."""
    if op in ("max", "min"):
        if dtype == torch.bool:
            return op == "min"
        if dtype.is_floating_point:
            return float("-inf" if op == "max" else "inf")
        return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max
    if op == "band":
        return True if dtype == torch.bool else -1 if dtype.is_signed else torch.iinfo(dtype).max
    return int(op == "product")


# --------------------------------------------------------------------------------------------------- its derivatives


def _before(x: Tensor, axis: Axis, reverse: bool) -> Tensor:
    """What the neighbour before has, zeros where there is none."""
    return shifted(x, axis, -1 if reverse else 1)


def _affine(a: Tensor, b: Tensor, axis: Axis, reverse: bool) -> Tensor:
    """d = b + a * (the neighbour's d), from the first rank on; differentiable in both."""
    for step in _steps(axis):
        step = -step if reverse else step
        factor, more = shifted(torch.stack([a, b]), axis, step).unbind()
        b = torch.where(_has(axis, step, b), b + a * more, b)
        a = a * factor
    return b


def _left(y: Tensor, axis: Axis, exclusive: bool, reverse: bool) -> Tensor:
    """The product of the ranks before."""
    return y if exclusive else torch.where(_has(axis, -1 if reverse else 1, y), _before(y, axis, reverse), 1)


def _attained(
    x: Tensor, y: Tensor, axis: Axis, op: str, exclusive: bool, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Whether x is the extreme so far, whether that is the neighbour's too, and how many have attained it."""
    x, y = x.detach(), y.detach()
    y = fold(op, [y, x]) if exclusive else y
    mine = _same(x, y).to(x.dtype)
    kept = _same(y, _before(y, axis, reverse)).to(x.dtype)
    return mine, kept, _affine(kept, mine, axis, reverse)


def _same(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | (x.isnan() & y.isnan())


def _pull_scan(
    g: Tensor, axis: Axis, x: Tensor, y: Tensor, op: str, exclusive: bool, reverse: bool
) -> Tensor:  # the gradient goes from the last rank to the first
    g = _before(g, axis, not reverse) if exclusive else g
    if op == "product":
        later = _affine(_before(x, axis, not reverse).conj().resolve_conj(), g, axis, not reverse)
        return later * _left(y, axis, exclusive, reverse).conj()
    mine, kept, count = _attained(x, y, axis, op, exclusive, reverse)
    return mine * _affine(_before(kept, axis, not reverse), g / count, axis, not reverse)


def _push_scan(t: Tensor, axis: Axis, x: Tensor, y: Tensor, op: str, exclusive: bool, reverse: bool) -> Tensor:
    if op == "product":
        d = _affine(x, t * _left(y, axis, exclusive, reverse), axis, reverse)
    else:
        mine, kept, count = _attained(x, y, axis, op, exclusive, reverse)
        d = _affine(kept, mine * t, axis, reverse) / count
    return _before(d, axis, reverse) if exclusive else d


SCAN = Op("scan", "V -> V", compared=("op", "exclusive", "reverse"))

_SCAN: Rule = Rule(
    SCAN,
    _run_scan,
    lambda g, axis, op, exclusive, reverse: apply(_SCAN, g, axis, (op, exclusive, not reverse)),
)
_SCAN_CURVED = Rule(SCAN, _run_scan, _pull_scan, tangent=_push_scan, saves=True)


# -------------------------------------------------------------------------------------------- the public function


@overload
def scan(
    x: Tree,
    axis: AxisName,
    op: Scanned = "sum",
    *,
    exclusive: bool = False,
    reverse: bool = False,
    **how: Unpack[NowOfTree],
) -> Tree: ...
@overload
def scan(
    x: Tree,
    axis: AxisName,
    op: Scanned = "sum",
    *,
    exclusive: bool = False,
    reverse: bool = False,
    **how: Unpack[LaterOfTree],
) -> Work[Tree]: ...
@overload
def scan(
    x: Tree,
    axis: AxisName,
    op: Scanned = "sum",
    *,
    exclusive: bool = False,
    reverse: bool = False,
    **how: Unpack[EitherOfTree],
) -> Tree | Work[Tree]: ...
@SCAN
def scan(
    x: Tree,
    axis: AxisName,
    op: Reduced = "sum",
    *,
    exclusive: bool = False,
    reverse: bool = False,
    mesh: Mesh | None = None,
    bucket_mb: float = 25,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Any:
    """Reduce ``x`` elementwise over this rank and those before it.

    ::

        rank 0  [a]      [a]
        rank 1  [b]  ->  [a+b]
        rank 2  [c]      [a+b+c]

    Type: varying -> varying.

    Args:
        x: a tensor of any shape, or a pytree of tensors; shapes and dtypes equal on every rank.
        axis: a name, or a tuple of names, of which the first is major.
        op: "sum", "max", "min", "product"; "band", "bor", "bxor" on integers and bool. max and min propagate NaN; half
            precision is summed and multiplied in float32.
        exclusive: without this rank: ranks 0 to i-1. Rank 0 gets what changes nothing: 0, 1, minus or plus infinity,
            the least or the largest of the integers.
        reverse: from the last rank on: ranks i to n-1.
        mesh: the current mesh by default.
        bucket_mb: leaves of a pytree go together until they have this many MiB.
        async_op: give a :class:`Work` of the result at once, and communicate meanwhile.
        timeout: seconds or a timedelta after which this call is given up, in place of the mesh's own time-out, which is
            that of its backward too. Not with async_op, whose ``wait`` has one, in compiled code or under a
            ``torch.func`` transform.

    Returns: the shape and dtype of ``x``, new storage.

    Backward: sum: the scan of the gradient the other way. product: the same with what the later ranks multiply it with,
    exact with zeros. max and min: each rank's gradient in equal shares to those up to it that attain the extreme.
    Bitwise ops have none.

    Cost: one all_gather, (n-1) times the bytes of ``x`` received per rank; in compiled code the bytes of ``x`` in each
    of log2(n) steps, and in one more if exclusive. Backward of a sum as much; of the others log2(n) steps of two
    tensors.

    Raises:
        MeshError: no such axis or op; sum or product of bool, order of complex; exclusive or reverse that is no bool;
            not a tensor; a device the mesh cannot move; a time-out that is not positive.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 4})
        >>> mc.launch(lambda: mc.scan(torch.tensor(mesh.rank + 1), "dp", mesh=mesh).item(), ranks=4)
        [1, 3, 6, 10]
        >>> mc.launch(lambda: mc.scan(torch.tensor(mesh.rank + 1), "dp", exclusive=True, mesh=mesh).item(), ranks=4)
        [0, 1, 3, 6]

    Source: MPI_Scan, MPI_Exscan; ``jax.lax.associative_scan``.
    """
    if here.watcher is not None or timeout is not None:
        return aside(scan, x, axis, op, exclusive, reverse, mesh, bucket_mb, async_op, timeout)
    ax = check.axis_of("scan", axis, mesh)
    for name, value in (("exclusive", exclusive), ("reverse", reverse)):
        if not isinstance(value, bool):
            check.explain("scan", f"{name}={value!r} is not a bool.", ax, fix="True or False")
    if isinstance(op, str) and op == "mean":
        check.explain("scan", "no reduce op 'mean'.", ax, fix="the sum, over mc.axis_index(axis) + 1")
    rule = _SCAN_CURVED if op in ("max", "min", "product") else _SCAN
    return carried(rule, x, ax, _scan_fits, (op, exclusive, reverse), bucket_mb, async_op, by_elements)


def _scan_fits(x: Tensor, axis: Axis, op: str, exclusive: bool, reverse: bool) -> tuple[str, bool, bool]:
    check.reducible("scan", x, op, axis)
    return op, exclusive, reverse
