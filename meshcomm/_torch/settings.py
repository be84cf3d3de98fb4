"""The private names of torch behind what it has one of in a process, and programs change for a while: a part of
:mod:`meshcomm._torch`. It is read all at once, for that is done whenever a rank of one process goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.backends import cuda

from meshcomm._torch.kernels import (
    attention_of_others,
    attention_order,
    set_attention_of_others,
    set_attention_order,
)
from meshcomm._versions import find, has

__all__ = [
    "settings_of_torch",
    "settle_torch",
    "without_levels",
]

_COSTS = "each change-over between ranks of one process takes a tenth of a µs longer"
_default_dtype = torch.get_default_dtype
_flash: Any = find("torch._C._get_flash_sdp_enabled", _COSTS, cuda.flash_sdp_enabled)
_efficient: Any = find("torch._C._get_mem_efficient_sdp_enabled", _COSTS, cuda.mem_efficient_sdp_enabled)
_math: Any = find("torch._C._get_math_sdp_enabled", _COSTS, cuda.math_sdp_enabled)
_cudnn: Any = find("torch._C._get_cudnn_sdp_enabled", _COSTS, cuda.cudnn_sdp_enabled)
_seeks_anomalies = torch.is_anomaly_enabled
_LEVELS = 2
"""How many of them say it, the last ones."""

_OF_LEVELS = "torch._functorch.eager_transforms.JVP_NESTING", "torch.autograd.forward_ad._current_level"
_has_levels = all([has(name, "forward mode is refused on ranks of one process") for name in _OF_LEVELS])  # noqa: C419
_transforms: Any = torch._functorch.eager_transforms if _has_levels else None

if _transforms is None:

    def settings_of_torch() -> tuple[Any, ...]:
        """The default dtype, the kernels of attention that may be taken, whether autograd looks for anomalies."""
        return (
            _default_dtype(), _flash(), _efficient(), _math(), _cudnn(), attention_order(), attention_of_others(),
            _anomaly() if _seeks_anomalies() else None, -1, 0,
        )  # fmt: skip
else:

    def settings_of_torch() -> tuple[Any, ...]:
        """The default dtype, the kernels of attention that may be taken, whether autograd looks for anomalies, and the
        level of forward mode.
        """
        return (
            _default_dtype(), _flash(), _efficient(), _math(), _cudnn(), attention_order(), attention_of_others(),
            _anomaly() if _seeks_anomalies() else None, forward_ad._current_level, _transforms.JVP_NESTING,
        )  # fmt: skip


def _anomaly() -> bool:
    return torch.is_anomaly_check_nan_enabled()


def without_levels(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """These settings, with no level of forward mode."""
    return (*found[:-_LEVELS], -1, 0)


def settle_torch(wanted: tuple[Any, ...]) -> None:
    """Make ``wanted`` the settings, as :func:`settings_of_torch` gave them."""
    dtype, flash, efficient, math, cudnn, order, others, anomaly, level, nesting = wanted
    torch.set_default_dtype(dtype)
    cuda.enable_flash_sdp(flash)
    cuda.enable_mem_efficient_sdp(efficient)
    cuda.enable_math_sdp(math)
    cuda.enable_cudnn_sdp(cudnn)
    set_attention_order(order)
    set_attention_of_others(others)
    torch.set_anomaly_enabled(anomaly is not None, anomaly is not False)
    if _transforms is not None:
        forward_ad._current_level, _transforms.JVP_NESTING = level, nesting
