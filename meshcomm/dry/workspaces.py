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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm import _torch

__all__ = ["lstm_keeps", "workspace"]


def workspace(func: Any, args: Sequence[Any], operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Bytes of an operation that gave ``results``; ``operands``: the tensors that it was given."""
    name = _torch.operation_name(func)
    if (asked := _OF_ARGUMENTS.get(name)) is not None:
        return asked(args, results)
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


def _block() -> int:
    """Channels of a block, as kernels of the CPU take images."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _blocked(x: Tensor, *dims: int) -> int:
    """Bytes with these dims, an image's channels by default, in whole blocks."""
    block, lengths = _block(), list(x.shape)
    for dim in dims or (1,):
        lengths[dim] = -(-lengths[dim] // block) * block
    return math.prod(lengths) * x.itemsize


class _Windows(NamedTuple):
    """A convolution, and in whose kernel it is."""

    x: Tensor
    w: Tensor
    y: Tensor
    strided: bool
    transposed: bool
    groups: int

    @staticmethod
    def of(x: Tensor, w: Tensor, y: Tensor, stride: Sequence[int], transposed: bool, groups: int) -> _Windows:
        """With what torch's operations are given."""
        return _Windows(x, w, y, any(step > 1 for step in stride), transposed, groups)

    @property
    def small(self) -> bool:
        """Whether each element is computed of one alone."""
        return math.prod(self.w.shape[2:]) == 1

    @property
    def by_onednn(self) -> bool:
        """Whether torch leaves it to oneDNN: not what that cannot do, nor what is little."""
        x, least = self.x, min(self.w.shape[2:][-2:])
        if x.dtype != torch.float32 and not (x.dtype == torch.bfloat16 and _block() == 16):
            return False
        if self.small and not self.strided and len(x) < 16 and torch.get_num_threads() == 1:
            return False
        return self.groups > 1 or least > 3 or len(x) > 1 or x.numel() > 20480

    @property
    def in_blocks(self) -> bool:
        """Whether oneDNN takes images in blocks: groups of channels only if they are blocks, or one channel each."""
        return self.groups in (1, self.x.shape[1]) or self.x.shape[1] // self.groups % _block() == 0

    @property
    def columns(self) -> int:
        """Bytes of all windows of a group, one beside the other."""
        moved = self.x if self.transposed else self.y
        count = 0 if self.small and not self.strided else math.prod(self.w.shape[1:])
        return count * moved[:, 0].numel() * moved.itemsize


def _convolution(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """oneDNN's: operands in blocks, images of few channels as they are; then its result in blocks. Others: windows."""
    x: Tensor = args[0]
    y, (_, w, _, stride, _, _, transposed, _, groups) = results[0], args
    if not y.is_cpu:
        return 0
    one = _Windows.of(x, w, y, stride, transposed, groups)
    if not one.by_onednn:
        return one.columns if groups == 1 else max(y.nbytes, x.nbytes // groups + one.columns)
    if not one.in_blocks:
        return max(y.nbytes, torch.get_num_threads() * one.columns // max(1, len(x)))
    image = 0 if x.shape[1] < 4 else _blocked(x)
    return max(image + _blocked(w, 0) + _blocked(y) - y.nbytes, _blocked(y))


def _convolution_backward(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """First the gradient of the image, then that of the weight, each in blocks; a copy of what comes in stays."""
    g: Tensor = args[0]
    x: Tensor = args[1]
    w: Tensor = args[2]
    groups: int = args[9]
    stride, transposed, (of_image, _, of_bias) = args[4], args[7], args[10]
    if not x.is_cpu:
        return 0
    one = _Windows.of(x, w, g, stride, transposed, groups)
    made, own = sum(each.nbytes for each in results), x.nbytes if of_image else 0
    copy = 0 if g.is_contiguous() else g.nbytes
    if not one.by_onednn:
        if groups > 1:
            return max(made, (g.nbytes + x.nbytes) // groups + one.columns)
        columns = one.columns // max(1, len(x)) if transposed else one.columns
        return max(copy + columns, _wide(g) - w.nbytes if of_bias else 0)
    first = x.shape[1] == 3 or (x.shape[1] < 4 and _block() == 16)
    if not one.in_blocks:
        steps = [2 * own, own + w.nbytes + torch.get_num_threads() * (one.columns // max(1, len(x)) + 4 * w.nbytes)]
    else:
        of_weight = _blocked(w, 0) if first else _blocked(w, 0, 1)
        steps = [own + of_weight + w.nbytes, own + _blocked(g) + of_weight + (0 if first else _blocked(x))]
        if of_image and one.strided and not transposed:
            steps += [x.nbytes + _blocked(g) + _blocked(w, 0, 1), 3 * own]
        elif of_image:
            steps.append(_blocked(x) + max(_blocked(g) + _blocked(w, 0, 1), own))
    return max(0, copy + max(steps) - made)


def _pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def _lying(count: int) -> int:
    """How far apart rows of so many floats lie in oneDNN's LSTM: in whole lines of a cache, not all in one set."""
    lines = -(-count // 16) * 16
    return lines + 16 if lines % 256 == 0 else lines


def lstm_keeps(args: Sequence[Any]) -> int:
    """Bytes that a layer of an LSTM keeps for its backward on the CPU, by oneDNN; torch's own shapes have none."""
    (steps, rows, width), hidden = args[0].shape, args[10]
    states = 2 * (steps + 1) * rows * 4
    gates = steps * rows * 4 * _lying(4 * hidden), steps * rows * 4 * _lying(hidden)
    return sum(map(_pages, gates)) + 3 * _pages(states * _lying(max(width, hidden))) + 2 * _pages(states * hidden)


def _lstm_scratch(x: Tensor, w: Sequence[Tensor]) -> int:
    """All gates, two states, and the sum of the biases; and the weights once more, cut by gates."""
    (steps, rows, _), hidden = x.shape, w[1].shape[1]
    work: int = _pages(steps * rows * 4 * _lying(4 * hidden)) + 2 * _pages(rows * 4 * _lying(hidden)) + 4664
    return work + w[2].nbytes + sum(4 * each.shape[1] * _lying(len(each)) for each in w[:2])


def _lstm(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    return _lstm_scratch(args[0], args[1:5])


def _lstm_backward(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Zeros where no gradient has come, a copy of one that is not dense, weights whose rows must lie farther apart."""
    (x, *w), states, (g, *grads) = args[:5], args[5:7], args[10:13]
    zeros: int = sum(state.nbytes for state, each in zip(states, grads, strict=True) if each is None)
    zeros += 0 if g is None or g.is_contiguous() else g.nbytes
    moved = sum(4 * len(each) * _lying(each.shape[1]) for each in w[:2] if _lying(each.shape[1]) != each.shape[1])
    return _lstm_scratch(x, w) + zeros + moved


def _roll(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Along each dim one result; of all elements, in their order, a copy of what does not lie so."""
    x, shifts, *dims = args
    if not any(dims):
        return _nothing_but_copies([x])
    return x.nbytes if len(shifts) > 1 else 0


def _index_add(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Along the last dim as ``scatter_add``."""
    x, dim, *_ = args
    return _wide(x) if x.ndim > 1 and dim % x.ndim == x.ndim - 1 else 0


def _nothing_but_copies(operands: Sequence[Tensor]) -> int:
    """Kernels that go through memory from front to end take copies of what does not lie so."""
    return sum(x.numel() * x.itemsize for x in operands if x.is_cpu and not x.is_contiguous())


def _upsampled(operands: Sequence[Tensor]) -> int:
    """Small images, and by lines those of three channels, with channels last: a copy of what lies otherwise."""
    x, y = operands[0], operands[-1]
    if not x.is_cpu or y.shape[-2] + y.shape[-1] > 128:
        return 0
    return sum(each.nbytes for each in (x, y) if not each.is_contiguous(memory_format=torch.channels_last))


def _upsampled_by_lines(operands: Sequence[Tensor]) -> int:
    x, y = operands[0], operands[-1]
    images = x.is_cpu and x.shape[1] == 3 and not x.is_contiguous(memory_format=torch.channels_last)
    return x.nbytes + y.nbytes if images else _upsampled(operands)


def _antialiased(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """One dim after the other."""
    x: Tensor = args[0]
    return x.nbytes // x.shape[-1] * results[0].shape[-1] if x.is_cpu else 0


def _of_channels(operands: Sequence[Tensor]) -> int:
    """A copy of what has its channels neither first nor last."""
    x = operands[0]
    lies = x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))
    return 0 if lies or not x.is_cpu else x.numel() * x.itemsize


def _drawn(args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Without replacement as many random numbers as there are weights, of which the largest are taken."""
    x, count, *replaced = args
    largest = results[0].numel() * x.itemsize if count > 1 else 0
    return x.nbytes + largest if count == 1 or not any(replaced[:1]) else 0


def _bags_backward(operands: Sequence[Tensor]) -> int:
    """Places are sorted."""
    return _nothing_but_copies(operands[:1]) + 3 * operands[1].nbytes if operands[0].is_cpu else 0


def _products(operands: Sequence[Tensor]) -> int:
    """Those of BLAS want rows or columns that lie together."""
    lying = [x for x in operands if x.ndim == 2 and x.is_cpu and not (x.is_contiguous() or x.t().is_contiguous())]
    return sum(x.numel() * x.itemsize for x in lying if 0 in x.stride())


def _is_dense(x: Tensor) -> bool:
    return x.is_cpu and x.is_contiguous()


def _batched_products(operands: Sequence[Tensor]) -> int:
    """The same, of one matrix of a batch at a time."""
    lying = [x[0] for x in operands if x.ndim == 3 and x.is_cpu and len(x) and 1 not in x.stride()[1:]]
    return max([x.numel() * x.itemsize for x in lying], default=0)


def _windows(operands: Sequence[Tensor]) -> int:
    """Room as large as the image, which then grows."""
    return operands[0].nbytes + _nothing_but_copies(operands[:1]) if operands[0].is_cpu else 0


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
    *(f"{name}_backward" for name in (
        "gelu", "native_layer_norm", "native_group_norm", "embedding_dense", "avg_pool2d",
        "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices", "fractional_max_pool2d",
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
        "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
        "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "grid_sampler_2d",
    )),
    *(f"{name}{dims}d_backward" for dims in (1, 2, 3)
      for name in ("reflection_pad", "replication_pad", "upsample_nearest", "_upsample_nearest_exact")),
    "_softmax_backward_data", "_log_softmax_backward_data", "col2im", "channel_shuffle",
)  # fmt: skip
_WORKSPACES: dict[str, Callable[[Sequence[Tensor]], int]] = {
    **{f"aten::{name}": _nothing_but_copies for name in _COPYING},
    "aten::native_batch_norm_backward": lambda operands: operands[1].nbytes if _is_dense(operands[0]) else 0,
    "aten::mm": _products,
    "aten::bmm": _batched_products,
    "aten::im2col": _windows,
    "aten::pixel_shuffle": _of_channels,
    "aten::pixel_unshuffle": _of_channels,
    "aten::upsample_nearest2d": _upsampled,
    "aten::_upsample_nearest_exact2d": _upsampled,
    "aten::upsample_bilinear2d": _upsampled_by_lines,
    "aten::_embedding_bag_backward": _bags_backward,
    "aten::_embedding_bag_dense_backward": _bags_backward,
    "aten::logsumexp": _one_more,
    "aten::median": _one_more,
    "aten::kthvalue": lambda operands: operands[0].nbytes + 8 * operands[0].numel() if operands[0].is_cpu else 0,
    "aten::mse_loss": _mean_of_losses,
    "aten::smooth_l1_loss": _mean_of_losses,
    "aten::huber_loss": _mean_of_losses,
    "aten::binary_cross_entropy_with_logits": lambda operands: operands[0].nbytes + _mean_of_losses(operands),
    "aten::gather": lambda operands: _wide(operands[-1]),
    "aten::scatter_add": lambda operands: _wide(operands[-1]),
    "aten::scatter_add_": lambda operands: _wide(operands[-1]),
    "aten::scatter": lambda operands: _wide(operands[-1]),
    "aten::scatter_": lambda operands: _wide(operands[-1]),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
"""Bytes that kernels take while they run, where it is much: of the operands, and the results behind them."""
_OF_ARGUMENTS: dict[str, Callable[[Sequence[Any], Sequence[Tensor]], int]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::mkldnn_rnn_layer": _lstm,
    "aten::mkldnn_rnn_layer_backward": _lstm_backward,
    "aten::_upsample_bilinear2d_aa": _antialiased,
    "aten::_upsample_bicubic2d_aa": _antialiased,
    "aten::multinomial": _drawn,
    "aten::index_add": _index_add,
    "aten::index_add_": _index_add,
    "aten::roll": _roll,
}
"""The same of all arguments, and the results."""
