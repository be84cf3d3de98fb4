"""Reductions of what training counts and keeps: weighted_mean, all_reduce_params."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.check import Reduced
from meshcomm.collectives.reduce import all_reduce
from meshcomm.errors import MeshError
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.runtime.process.accelerator import with_doubles

Tree = TypeVar("Tree")
_WHERE = "weighted_mean"


@Op("weighted_mean", "V -> I", composed=True)
def weighted_mean(total: Tree, count: Any, axis: AxisName, *, mesh: Mesh | None = None) -> Tree:
    """The sum of all ``total`` over the sum of all ``count``: the mean over all tokens, samples or weights.

    ::

        rank 0  total=6 count=3      1.5
        rank 1  total=3 count=3  ->  1.5   (one logical value)

    Where counts differ between ranks, the mean of the ranks' means is another number: a rank with few tokens would
    weigh as much as one with many.

    Type: varying -> invariant.

    Args:
        total: this rank's sum of losses, a tensor of any shape, or a pytree of them. Integers and bool count as
            numbers.
        count: how many it is the sum of: a number, a tensor that broadcasts to ``total``, or for a pytree one of the
            same structure. It may be 0 on some ranks.
        axis: a name, or a tuple of names: all axes along which the data differ.
        mesh: the current mesh by default.

    Returns: the shape of ``total``; its dtype, or torch's default dtype for integers. NaN where nobody has counted
    anything.

    Backward: ``pvary(g) / sum of counts``; no communication.

    Cost: one all_reduce of totals and counts together, half precision as float32 and integers as float64.

    Raises:
        MeshError: no such axis; not tensors; counts that are no real numbers or do not fit the totals.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def loss():
        ...     losses = torch.tensor([[1.0, 2.0, 3.0], [3.0]][mesh.rank])
        ...     return mc.weighted_mean(losses.sum(), len(losses), "dp", mesh=mesh).item()
        >>> mc.launch(loss, ranks=2)
        [2.25, 2.25]

    Source: the loss over tokens of variable-length batches.
    """
    ax = check.axis_of(_WHERE, axis, mesh)
    totals, spec = _torch.tree_flatten(total)
    paths = [path for path, _ in _torch.tree_leaves_with_path(total)]
    counts = dict(_torch.tree_leaves_with_path(count))
    if list(counts) == [""]:
        counts = dict.fromkeys(paths, count)
    elif counts.keys() != set(paths):
        check.explain(
            _WHERE, "count has another structure than total.", ax,
            fix="one count for all leaves, or a pytree of counts like that of the totals",
        )  # fmt: skip
    pairs = []
    for path, leaf in zip(paths, totals, strict=True):
        try:
            check.tensor(_WHERE, leaf, ax, "total")
            whole = _widened(leaf)
            pairs.append((whole, _checked_count(whole, counts[path], ax)))
        except MeshError as error:
            if not path:
                raise
            raise MeshError(f"{error}\n  leaf: total{path}") from None
    sums = all_reduce(pairs, axis, mesh=mesh)
    means = [
        (whole / number).to(leaf.device, _mean_dtype(leaf.dtype))
        for leaf, (whole, number) in zip(totals, sums, strict=True)
    ]
    found: Tree = _torch.tree_unflatten(means, spec)
    return found


def _widened(total: Tensor) -> Tensor:
    """As what sums of counts are exact enough in."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return total.to(torch.promote_types(total.dtype, torch.float32))
    return total.to(with_doubles(total.device), torch.float64)


def _mean_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def _checked_count(total: Tensor, count: object, axis: Axis) -> Tensor:
    dtype = total.dtype
    if isinstance(count, (torch.SymInt, torch.SymFloat)):  # the size of something that depends on data, under a checker
        return torch.zeros((), dtype=dtype, device=total.device).add(count)
    if check.whole_number(count) or isinstance(count, float):
        try:
            return torch.full((), float(count), dtype=dtype, device=total.device)  # type: ignore[arg-type]
        except OverflowError:
            check.explain(_WHERE, "count is an int too large for a float.", axis, fix="a number that a float can hold")
    if not isinstance(count, Tensor) or count.is_complex():
        what = str(count.dtype) if isinstance(count, Tensor) else type(count).__name__
        check.explain(_WHERE, f"count is {what}.", axis, fix="a number or a tensor of real numbers")
    check.tensor(_WHERE, count, axis, "count")
    shape = list(total.shape)
    fits = count.ndim <= total.ndim and all(
        length in (1, shape[-1 - i]) for i, length in enumerate(reversed(count.shape))
    )
    if not fits:
        check.explain(
            _WHERE, f"count of shape {list(count.shape)} does not broadcast to total of shape {shape}.", axis,
            fix="one count per entry of total, or one for all",
        )  # fmt: skip
    return count.to(device=total.device, dtype=dtype)


@Op("all_reduce_params", "V -> I", composed=True)
def all_reduce_params(
    params: Iterable[Tensor], axis: AxisName, op: Reduced = "sum", *, mesh: Mesh | None = None, bucket_mb: float = 25
) -> None:
    """Reduce parameters or buffers in place, in buckets: what has drifted apart is one value again.

    ::

        rank 0  [a0 a1]      [a0+b0 a1+b1]
        rank 1  [b0 b1]  ->  [a0+b0 a1+b1]

    Type: varying -> invariant. It is no part of any graph; in a differentiated program use :func:`all_reduce`.

    Args:
        params: tensors, as ``module.parameters()`` or ``module.buffers()`` gives them; as many, of equal shapes and
            dtypes, on every rank.
        axis: a name, or a tuple of names.
        op: as for :func:`all_reduce`; "mean" averages.
        mesh: the current mesh by default.
        bucket_mb: they are reduced together until they have this many MiB.

    Returns: nothing.

    Backward: none.

    Cost: that of :func:`all_reduce` for all of them, and one copy.

    Raises:
        MeshError: no such axis or op; what is not a tensor, with its place; "mean" of integers, as
            ``num_batches_tracked`` is: reduce those by "max".

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def main():
        ...     w = torch.nn.Parameter(torch.full((2,), float(mesh.rank)))
        ...     mc.all_reduce_params([w], "dp", "mean", mesh=mesh)
        ...     return w.tolist()
        >>> mc.launch(main, ranks=2)
        [[0.5, 0.5], [0.5, 0.5]]

    Source: ``mmengine.dist.all_reduce_params``.
    """
    ax = check.axis_of("all_reduce_params", axis, mesh)
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        check.explain(
            "all_reduce_params", f"params is a {type(params).__name__}.", ax, fix="pass module.parameters() or a list"
        )
    given = list(params)
    with torch.no_grad():
        values = [param.detach() if isinstance(param, Tensor) else param for param in given]
        for param, value in zip(given, all_reduce(values, axis, op, mesh=mesh, bucket_mb=bucket_mb), strict=True):
            param.copy_(value)
