"""What kernels take while they run and give back, where it is much: a part of the peak of a dry run.

::

    on the CPU    operands of another dtype than the result's        a copy of each in that dtype
                  a sum in another dtype, a mean of half precision   a copy of all that is added up
    named ones    attention, convolutions, losses, ...               what each of them is known to take
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshcomm import _torch

__all__ = ["workspace"]


def workspace(func: Any, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Bytes of an operation that gave ``results``."""
    name = _torch.operation_name(func)
    work = _WORKSPACES.get(name)
    if work is not None:
        return work([*operands, *results])
    if not operands or not results[0].is_cpu:
        return 0
    if name in _ADDING:
        x, y = operands[0], results[0]
        return x.numel() * y.itemsize if x.dtype != y.dtype else _wide(x) if name == "aten::mean" else 0
    if torch.Tag.pointwise in func.tags and name not in _CASTS:
        return _promoted(operands[1:] if name == "aten::where" else operands, results[0])
    return 0


_ADDING = frozenset(f"aten::{name}" for name in ("sum", "mean", "prod", "cumsum", "cumprod", "linalg_vector_norm"))
_CASTS = frozenset(f"aten::{name}" for name in ("_to_copy", "copy_", "masked_fill", "masked_fill_"))


def _promoted(operands: Sequence[Tensor], result: Tensor) -> int:
    """Copies in the dtype in which operands of several dtypes meet; numbers have none."""
    many = [x for x in operands if x.ndim]
    if len({x.dtype for x in many}) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (x.dtype for x in many))
    copied = [x.numel() for x in many if x.dtype != common]
    if result.dtype not in (common, torch.bool):  # x += y
        copied.append(result.numel())
    return sum(copied) * common.itemsize


def _blocks(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Of how many queries, and by how many keys, are the tiles of attention on the CPU."""
    length = q.shape[2]
    return min(256 if length >= 768 else 64 if length >= 192 else 32, length), min(512, k.shape[2])


def _attention(operands: Sequence[Tensor]) -> int:
    q, k = operands[:2]
    rows, columns = _blocks(q, k)
    narrow = q.itemsize * rows * columns if q.itemsize < 4 else 0
    return torch.get_num_threads() * (4 * rows * (columns + 2 + q.shape[3]) + narrow)


def _attention_backward(operands: Sequence[Tensor]) -> int:
    g, q, k = operands[:3]
    rows, columns = _blocks(q, k)
    narrow = 2 * q.itemsize * rows * columns if q.itemsize < 4 else 0
    copy = 0 if g.transpose(1, 2).is_contiguous() else g.nbytes
    return copy + torch.get_num_threads() * (8 * rows * columns + 4 * rows + narrow)


def _blocked(x: Tensor) -> int:
    """Bytes of an image with its channels in blocks, as kernels of the CPU take it; few channels are none."""
    channels, block = x.shape[1], 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
    return 0 if channels < 4 else x.nbytes // channels * -(-channels // block) * block


def _convolution(operands: Sequence[Tensor]) -> int:
    """Its operands in blocks, then its result in blocks; what has no window takes them as they are."""
    x, w, *_, y = operands
    if math.prod(w.shape[2:]) == 1 or not y.is_cpu:
        return 0
    return max(_blocked(x) + w.nbytes + _blocked(y) - y.nbytes, _blocked(y))


def _convolution_backward(operands: Sequence[Tensor]) -> int:
    g, x, w = operands[:3]
    return 0 if math.prod(w.shape[2:]) == 1 or not x.is_cpu else _blocked(g) + _blocked(x)


def _nothing_but_copies(operands: Sequence[Tensor]) -> int:
    """Kernels that go through memory from front to end take copies of what does not lie so."""
    return sum(x.numel() * x.itemsize for x in operands if x.is_cpu and not x.is_contiguous())


def _products(operands: Sequence[Tensor]) -> int:
    """Those of BLAS want rows or columns that lie together."""
    lying = [x for x in operands if x.ndim == 2 and x.is_cpu and not (x.is_contiguous() or x.t().is_contiguous())]
    return sum(x.numel() * x.itemsize for x in lying if 0 in x.stride())


def _one_more(operands: Sequence[Tensor]) -> int:
    return operands[0].nbytes


def _mean_of_losses(operands: Sequence[Tensor]) -> int:
    """All losses once more, and of those of half precision the float32 of which the mean is made."""
    x, *_, y = operands
    return 0 if y.ndim else x.nbytes + _wide(x) if x.is_cpu else 0


def _wide(x: Tensor) -> int:
    return 4 * x.numel() if x.dtype in _HALF and x.is_cpu else 0


_HALF = torch.bfloat16, torch.float16
_COPYING = (
    "_softmax_backward_data", "_log_softmax_backward_data", "gelu_backward", "native_layer_norm_backward",
    "native_group_norm_backward", "embedding_dense_backward", "avg_pool2d_backward",
    "max_pool2d_with_indices_backward", "upsample_nearest2d_backward",
)  # fmt: skip
_WORKSPACES: dict[str, Callable[[Sequence[Tensor]], int]] = {
    **{f"aten::{name}": _nothing_but_copies for name in _COPYING},
    "aten::mm": _products,
    "aten::logsumexp": _one_more,
    "aten::median": _one_more,
    "aten::mse_loss": _mean_of_losses,
    "aten::smooth_l1_loss": _mean_of_losses,
    "aten::binary_cross_entropy_with_logits": lambda operands: operands[0].nbytes + _mean_of_losses(operands),
    "aten::gather": lambda operands: _wide(operands[-1]),
    "aten::scatter_add": lambda operands: _wide(operands[-1]),
    "aten::scatter_add_": lambda operands: _wide(operands[-1]),
    "aten::scatter": lambda operands: _wide(operands[-1]),
    "aten::scatter_": lambda operands: _wide(operands[-1]),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
}
"""Bytes that kernels take while they run, where it is much."""
