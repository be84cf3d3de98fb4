"""grouped_matmul: rows by own matrices, a group of rows each.

::

    rows [a b c d e]  counts [2 0 3]      a b | . | c d e      times      w0 | w1 | w2

One kernel for all groups where torch has one for the dtype and the device, else one product after the other. Both
derivatives are products of groups again, so a node of autograd that calls its own kind has them of every order::

    y = rows x w          rows' gradient:  g x w^T        w's gradient:  rows^T (x) g, a matrix per group
    h = rows^T (x) g      rows' gradient:  g x H^T        g's gradient:  rows x H
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from meshcomm._torch import dual_level_open, functorch_active, without_modes
from meshcomm.errors import fail, shape_text
from meshcomm.runtime.transports.dry.world import is_dry
from meshcomm.training.split_rows import split_rows
from meshcomm.watch import paused

_WHERE = "grouped_matmul"
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DEVICES = ("cpu", "cuda")
_ALIGNED = 16  # bytes, to which the kernels want rows
_PLAIN = {Tensor, Parameter}
_kernel: Any = getattr(F, "grouped_mm", None)


def grouped_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply each group of rows by a matrix of its own.

    ::

        rows [a b c d]  counts [1 3 0]  ->  [a @ w0  b @ w1  c @ w1  d @ w1]

    What ``torch.cat([part @ w for part, w in zip(split_rows(rows, counts), weights)])`` does, in one kernel where torch
    has one (``torch.nn.functional.grouped_mm``: bfloat16, float16 and float32 on CPU and CUDA, widths of whole 16
    bytes), and without reading ``counts`` on an accelerator; in float64, elsewhere and under transforms it is that,
    and so it is in compiled code but for bfloat16, where it breaks no graph. It is what experts do with the rows that
    :func:`experts` brings: ``lambda rows, counts: grouped_matmul(rows, w, counts)``.

    Type: the result varies along the axes of all three.

    Args:
        rows: ``[r, d]``, floating point, grouped as ``counts`` says; any strides.
        weights: ``[n, d, f]`` of the dtype of ``rows``; any strides. Under autocast both are cast as for ``@``.
        counts: how many rows each group has, integers ``[n]`` that add up to r; entries may be 0. On their device.

    Returns: ``[r, f]`` of the dtype of ``rows``, new storage.

    Backward: products of groups again, with derivatives of every order; a matrix without rows gets zeros. Where an
        operand varies along an axis and another does not, the :func:`pvary` that is due sums that one's gradient.

    Cost: nothing is sent; r x d x f multiplications, and contiguous copies of operands that lie otherwise. The host
        reads ``counts`` on the CPU alone, and where there is no kernel. Fake tensors and those on the meta device give
        shapes.

    Raises:
        MeshError: shapes or dtypes that do not fit; counts that have a negative entry or do not add up to the rows. Of
            counts on an accelerator, and in compiled code, the device asserts instead.

    Example:
        >>> import torch
        >>> from meshcomm import parallel
        >>> rows, w = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([10.0, 20.0, 30.0]).view(3, 1, 1)
        >>> parallel.grouped_matmul(rows, w, torch.tensor([1, 0, 2])).flatten().tolist()
        [10.0, 60.0, 90.0]

    Source: MegaBlocks (Gale et al., 2022); ``torch.nn.functional.grouped_mm``, ``jax.lax.ragged_dot``.
    """
    with paused(), without_modes():
        _shapes_fit(rows, weights, counts)
        valued = _have_values(rows, counts)
    if not valued:
        return rows @ weights.sum(0)  # of that shape, dtype and cost, and so are its derivatives
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        narrow = torch.get_autocast_dtype(kind)
        rows, weights = (x if x.dtype == torch.float64 else x.to(narrow) for x in (rows, weights))  # as torch's own
    with torch.autocast(kind, enabled=False):
        with paused(), without_modes():
            fits, read = _fits_kernel(rows, weights), kind == "cpu" and not torch.compiler.is_compiling()
            if (read or not weights.shape[0]) and not functorch_active():
                _counts_fit(rows, weights, counts)
        if not fits:
            return _one_by_one(rows, weights, counts)
        ends = counts.cumsum(0, dtype=torch.int32)
        if not read:
            wrong = (counts < 0).sum() + (ends[-1:] - rows.shape[0]).abs()
            ends = ends + ends.new_zeros(1).index_select(0, wrong)  # out of range, where they do not fit
        return _by_kernel(rows, weights, ends)


def _have_values(rows: Tensor, counts: Tensor) -> bool:
    """Whether they are more than shapes; fake tensors and those on the meta device are not."""
    if rows.is_meta:
        return False
    if {type(rows), type(counts)} <= _PLAIN or torch.compiler.is_compiling() or functorch_active() or is_dry():
        return True
    try:
        (rows.detach().sum() + counts.sum()).item()
    except RuntimeError:
        return False
    return True


def _one_by_one(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    if not weights.shape[0]:
        return rows @ weights.sum(0)  # of no rows
    parts = split_rows(rows, counts)
    return torch.cat([part @ w for part, w in zip(parts, weights.unbind(), strict=True)])


# ------------------------------------------------------------------------------------------------------- the kernel


def _fits_kernel(rows: Tensor, weights: Tensor) -> bool:
    return (
        _kernel is not None
        and rows.dtype in _DTYPES
        and rows.dtype == weights.dtype
        and rows.device.type in _DEVICES
        and 0 not in weights.shape
        and all(size * rows.element_size() % _ALIGNED == 0 for size in weights.shape[1:])
        and not functorch_active()
        and not dual_level_open()
        and _works(rows)
    )


def _works(rows: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return rows.dtype == torch.bfloat16  # torch does not trace the others
    return rows.shape[0] > 0 and _has_kernel(rows.device.type, rows.dtype)


@functools.cache
def _has_kernel(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch has it there, by trial: no torch says which dtypes it takes on which device."""
    with torch.no_grad():
        try:
            rows, ends = torch.ones(2, 8, dtype=dtype, device=device), torch.ones(1, dtype=torch.int32, device=device)
            weights = torch.ones(1, 8, 8, dtype=dtype, device=device)
            _kernel(rows, weights, offs=2 * ends)
            _kernel(rows.mT, rows, offs=2 * ends)
        except (RuntimeError, NotImplementedError):
            return False
    return True


class _ByKernel(Function):
    """``[r, d]`` and ``[n, d, f]`` to ``[r, f]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        found: Tensor = _kernel(_dense(rows), _dense(weights), offs=ends)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights, ends = ctx.saved_tensors
        of_rows = _by_kernel(g, weights.mT, ends) if ctx.needs_input_grad[0] else None
        of_weights = _matrices(rows, g, ends) if ctx.needs_input_grad[1] else None
        return of_rows, of_weights, None


class _Matrices(Function):
    """``[r, d]`` and ``[r, f]`` to ``[n, d, f]``: the sum of outer products in each group."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, others: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, others, ends)
        found: Tensor = _kernel(_dense(rows).mT, _dense(others), offs=ends)
        if rows.device.type != "cpu":  # some kernels write nothing where there are no rows
            found = found.masked_fill((ends.diff(prepend=ends.new_zeros(1)) == 0).view(-1, 1, 1), 0)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, others, ends = ctx.saved_tensors
        of_rows = _by_kernel(others, g.mT, ends) if ctx.needs_input_grad[0] else None
        of_others = _by_kernel(rows, g, ends) if ctx.needs_input_grad[1] else None
        return of_rows, of_others, None


def _by_kernel(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    found: Tensor = _ByKernel.apply(rows, weights, ends)  # type: ignore[no-untyped-call]
    return found


def _matrices(rows: Tensor, others: Tensor, ends: Tensor) -> Tensor:
    found: Tensor = _Matrices.apply(rows, others, ends)  # type: ignore[no-untyped-call]
    return found


def _dense(x: Tensor) -> Tensor:
    """With the strides that kernels take: each matrix by rows or, of several, by columns; none of an expanded one."""
    *_, m, n = x.shape
    by_rows, by_columns = (m * n, n, 1), (m * n, 1, m)
    fits = x.stride() == by_rows[-x.dim() :] or (x.dim() == 3 and x.stride() == by_columns)
    if fits and (torch.compiler.is_compiling() or x.storage_offset() * x.element_size() % _ALIGNED == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


# ------------------------------------------------------------------------------------------------- what can be wrong


def _shapes_fit(rows: Any, weights: Any, counts: Any) -> None:
    for name, x in (("rows", rows), ("weights", weights), ("counts", counts)):
        if not isinstance(x, Tensor):
            fail(_WHERE, f"{name} is no tensor but {type(x).__name__}.", fix="grouped_matmul(rows, weights, counts)")
    given = rows, weights, counts
    if rows.dim() != 2 or not rows.is_floating_point():
        _wrong("rows are no matrix of floats.", *given, fix="floats [r, d]")
    if weights.dim() != 3 or not weights.is_floating_point() or weights.shape[1] != rows.shape[1]:
        _wrong("weights are no matrices for these rows.", *given, fix=f"floats [n, {rows.shape[1]}, f]")
    if counts.shape != weights.shape[:1] or counts.dtype not in _INTEGERS:
        fix = f"integers [{weights.shape[0]}]: how many rows each matrix has"
        _wrong("counts are not one number for each matrix.", *given, fix=fix)
    if not rows.device == weights.device == counts.device:
        _wrong(f"they are on {rows.device}, {weights.device} and {counts.device}.", *given, fix="all on one device")
    cast = (
        not rows.is_meta
        and torch.is_autocast_enabled(rows.device.type)
        and torch.float64 not in (rows.dtype, weights.dtype)
    )
    if rows.dtype != weights.dtype and not cast:
        _wrong("rows and weights are of two dtypes.", *given, fix="cast them to one, or use autocast")


def _counts_fit(rows: Tensor, weights: Tensor, counts: Tensor) -> None:
    values = counts.tolist()
    if any(value < 0 for value in values):
        _wrong(f"counts has {min(values)} among its entries.", rows, weights, counts, fix="0 or more")
    if sum(values) != rows.shape[0]:
        fix = "counts that add up to the rows: torch.bincount(choice, minlength=n) of all that were sorted"
        _wrong(f"counts add up to {sum(values)}, and there are {rows.shape[0]} rows.", rows, weights, counts, fix=fix)


def _wrong(what: str, rows: Tensor, weights: Tensor, counts: Tensor, *, fix: str) -> NoReturn:
    each = (("rows", rows), ("weights", weights), ("counts", counts))
    got = "; ".join(f"{name} {shape_text(x.dtype, x.shape)}" for name, x in each)
    fail(_WHERE, what, got=got, fix=fix)
