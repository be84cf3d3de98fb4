"""The private names of torch behind kernels for attention: a part of :mod:`meshcomm._torch`.

All give the log of the sum of exponentials beside the result, and all take a backward of *some* of the keys, if result
and log are those of all keys. b batch, h heads of q, s queries, t keys, e width, v's own width f; k and v may have
fewer heads g, each of which serves h / g of q::

                    where  dtype            mask    g < h      log is            widths
    on_cpu          CPU    float64 to 16    yes     yes        [b h s]           e = f
    flash           CUDA   16 bits          no      yes        [b h s]           e = f, of 8
    cudnn           CUDA   16 bits          no      yes        [b h s 1]         e = f, of 8
    efficient       CUDA   float32, 16      yes     repeated   [b h s to 32]     e, f, of 8
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshcomm._versions import find

__all__ = [
    "Attention",
    "AttentionKernel",
    "attention_kernel",
    "attention_of_others",
    "attention_order",
    "set_attention_of_others",
    "set_attention_order",
]

_OPS = "torch.ops.aten._scaled_dot_product_"
_SLOWER = "context_attention takes longer and more memory on {}"
_SHARED = "what sdpa_kernel sets around a collective in one rank of a process may hold for others too"


def _both(get: str, put: str, instead: Callable[..., Any]) -> list[Any]:
    found = [find(f"torch._C.{name}", _SHARED) for name in (get, put)]
    return [instead, instead] if None in found else found


attention_order, set_attention_order = _both("_get_sdp_priority_order", "_set_sdp_priority_order", list)
"""In which order torch tries its kernels."""
attention_of_others, set_attention_of_others = _both("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable", bool)
"""Whether it takes one that is not its own."""


class Attention(NamedTuple):
    """What is computed: of q ``[b, h, s, e]`` and keys and values, by a mask of bools, with which causal is False."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float


class AttentionKernel:
    """One of them, by its two operations."""

    def __init__(self, name: str, where: str) -> None:
        forward, backward = name, f"{name}_backward"
        self.ahead: Any = find(_OPS + forward, _SLOWER.format(where))
        self.back: Any = find(_OPS + backward, _SLOWER.format(where))

    def takes(self, of: Attention) -> bool:
        """Whether it does on this machine; users of torch switch kernels off by ``torch.nn.attention.sdpa_kernel``."""
        raise NotImplementedError

    def forward(self, of: Attention) -> tuple[Tensor, Tensor]:
        """``[b, h, s, f]``, and ``[b, h, s]`` the log of the sum of exponentials: float32, of float64 float64, -inf
        where nothing is seen.
        """
        raise NotImplementedError

    def backward(self, of: Attention, g: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, of which these k and v may be some, if ``out`` and ``lse`` are those of all; lse
        is +inf where nothing was seen.
        """
        raise NotImplementedError


class _OnCPU(AttentionKernel):
    def takes(self, of: Attention) -> bool:
        return of.q.device.type == "cpu" and of.q.dtype in _FLOATS and of.q.shape[-1] == of.v.shape[-1]

    def forward(self, of: Attention) -> tuple[Tensor, Tensor]:
        q, k, v, mask, causal, scale = of
        out, lse = self.ahead(q, k, v, 0.0, causal, attn_mask=_added(mask, q.dtype), scale=scale)
        if mask is not None:  # the kernel says 0
            lse = lse.masked_fill(mask.any(-1).logical_not(), -torch.inf)
        return out, lse

    def backward(self, of: Attention, g: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, mask, causal, scale = of
        found: tuple[Tensor, Tensor, Tensor] = self.back(
            g, q, k, v, out, lse, 0.0, causal, attn_mask=_added(mask, q.dtype), scale=scale
        )
        return found


class _Flash(AttentionKernel):
    def takes(self, of: Attention) -> bool:
        q, k, v, _, causal, _ = of
        return (
            _narrow_on_cuda(of)
            and q.shape[-1] <= _WIDEST
            and torch.backends.cuda.can_use_flash_attention(_asked(q, k, v, None, causal))
        )

    def forward(self, of: Attention) -> tuple[Tensor, Tensor]:
        q, k, v, _, causal, scale = of
        out, lse, *_ = self.ahead(*_by_rows(q, k, v), 0.0, causal, False, scale=scale)
        return out, lse

    def backward(self, of: Attention, g: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, causal, scale = of
        none = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)  # of no dropout
        lengths = None, None, q.shape[2], k.shape[2]
        given = *_by_rows(g, q, k, v, out), lse.contiguous()
        found: tuple[Tensor, Tensor, Tensor] = self.back(*given, *lengths, 0.0, causal, *none, scale=scale)
        return found


class _CuDNN(AttentionKernel):
    def takes(self, of: Attention) -> bool:
        q, k, v, _, causal, _ = of
        return _narrow_on_cuda(of) and torch.backends.cuda.can_use_cudnn_attention(_asked(q, k, v, None, causal))

    def forward(self, of: Attention) -> tuple[Tensor, Tensor]:
        q, k, v, _, causal, scale = of
        out, lse, *_ = self.ahead(*_by_rows(q, k, v), None, True, 0.0, causal, False, scale=scale)
        return out, lse.view(q.shape[:3])

    def backward(self, of: Attention, g: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, causal, scale = of
        none = q.new_zeros((), dtype=torch.int64), q.new_zeros((), dtype=torch.int64)  # of no dropout
        lengths = None, None, q.shape[2], k.shape[2]
        given = *_by_rows(g, q, k, v, out), lse.contiguous().unsqueeze(-1)
        found: tuple[Tensor, Tensor, Tensor] = self.back(*given, *none, None, *lengths, 0.0, causal, scale=scale)
        return found


class _Efficient(AttentionKernel):
    def takes(self, of: Attention) -> bool:
        q, k, v, mask, causal, _ = of
        if q.device.type != "cuda" or q.dtype not in _FLOATS[1:] or (q.shape[-1] | v.shape[-1]) % _ALIGNED:
            return False
        k, v = (_repeated(x, q) for x in (k, v))
        bias = None if mask is None else q.new_empty(1).expand(*q.shape[:3], k.shape[2])
        return _fits_square(q, k, causal) and torch.backends.cuda.can_use_efficient_attention(
            _asked(q, k, v, bias, causal)
        )

    def forward(self, of: Attention) -> tuple[Tensor, Tensor]:
        q, k, v, mask, causal, scale = of
        given = _by_rows(q, _repeated(k, q), _repeated(v, q))
        out, lse, *_ = self.ahead(*given, _aligned(mask, q, k), True, 0.0, causal, scale=scale)
        lse = lse.narrow(-1, 0, q.shape[2])
        if mask is not None:
            none = mask.any(-1).logical_not().expand(q.shape[:3])
            out, lse = out.masked_fill(none.unsqueeze(-1), 0), lse.masked_fill(none, -torch.inf)
        return out, lse

    def backward(self, of: Attention, g: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, mask, causal, scale = of
        none = q.new_zeros((), dtype=torch.int64), q.new_zeros((), dtype=torch.int64)  # of no dropout
        lse = F.pad(lse, (0, -lse.shape[-1] % _LOGS), value=torch.inf)
        given = *_by_rows(g, q, _repeated(k, q), _repeated(v, q)), _aligned(mask, q, k), *_by_rows(out), lse
        of_q, of_k, of_v, _ = self.back(*given, *none, 0.0, [True, True, True, False], causal, scale=scale)
        return of_q, _summed(of_k, k), _summed(of_v, v)


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ALIGNED = 8
_LOGS = 32
_WIDEST = 192  # beyond it some GPUs have no backward

_KERNELS = {
    "on_cpu": _OnCPU("flash_attention_for_cpu", "the CPU"),
    "flash": _Flash("flash_attention", "CUDA"),
    "cudnn": _CuDNN("cudnn_attention", "CUDA"),
    "efficient": _Efficient("efficient_attention", "CUDA"),
}


def attention_kernel(of: Attention) -> AttentionKernel | None:
    """What computes this, the first that takes it; None: nothing but mathematics."""
    if any(0 in x.shape for x in of[:3]):  # of no keys some divide by zero, which ends the process
        return None
    for kernel in _KERNELS.values():
        if kernel.ahead is not None and kernel.back is not None and kernel.takes(of):
            return kernel
    return None


def _narrow_on_cuda(of: Attention) -> bool:
    q, k, v, mask, causal, _ = of
    return (
        q.device.type == "cuda"
        and q.dtype in _FLOATS[2:]
        and mask is None
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] % _ALIGNED == 0
        and _fits_square(q, k, causal)
    )


def _fits_square(q: Tensor, k: Tensor, causal: bool) -> bool:
    return not causal or q.shape[2] == k.shape[2]  # kernels disagree on whose corner it is


def _asked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Any:
    return torch.backends.cuda.SDPAParams(q, k, v, bias, 0.0, causal, k.shape[1] != q.shape[1])


def _by_rows(*given: Tensor) -> tuple[Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous() for x in given)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """A head for each of q's."""
    times = q.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _summed(g: Tensor, like: Tensor) -> Tensor:
    return g if g.shape[1] == like.shape[1] else g.unflatten(1, (like.shape[1], -1)).sum(2)


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask.logical_not(), -torch.inf)


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The same for all heads, in rows that begin at whole 16 bytes."""
    if mask is None:
        return None
    t = mask.shape[-1]
    rows = q.new_zeros(*mask.shape[:-1], t + -t % _ALIGNED).narrow(-1, 0, t)
    return rows.masked_fill_(mask.logical_not(), -torch.inf).expand(*q.shape[:3], k.shape[2])
