"""What a process has one of, and programs change for a while: each rank of one process has its own.

Who changes it keeps what was there, and puts that back in the end. Where ranks change over meanwhile one would put back
what another one had set, and so it would stay, after the launch too::

    rank 0   redirect_stdout(a) ──► all_reduce ───────────────────────────────────► the end: stdout
    rank 1                              redirect_stdout(b), over a ──► all_reduce ────► the end: a
"""

from __future__ import annotations

import logging
import sys
import warnings
from operator import is_
from typing import Any

import torch
from torch.backends import cuda

from meshcomm._torch.kernels import (
    attention_of_others,
    attention_order,
    set_attention_of_others,
    set_attention_order,
)

Settings = tuple[Any, ...]

_default_dtype = torch.get_default_dtype
_flash: Any = cuda.flash_sdp_enabled
_efficient: Any = cuda.mem_efficient_sdp_enabled
_math: Any = cuda.math_sdp_enabled
_cudnn: Any = cuda.cudnn_sdp_enabled
_warnings: Any = vars(warnings)
_streams: Any = vars(sys).get  # somebody may have taken one away
_SHOWS = "_showwarnmsg_impl"
"""Who is handed a warning, which ``catch_warnings`` exchanges together with the two that have a public name."""
_logging: Any = vars(logging)
_CAPTURED = "_warnings_showwarning"
"""Whom ``logging.captureWarnings`` has taken the place of, and will put back."""
_OF_WARNINGS = slice(4)


def settings_now() -> Settings:
    """The filters of warnings and who shows them, where is written to, torch's default dtype, the kernels of attention
    that may be taken.
    """
    return (
        warnings.filters, warnings.showwarning, _warnings[_SHOWS], _logging.get(_CAPTURED),
        _streams("stdout"), _streams("stderr"),
        _default_dtype(), _flash(), _efficient(), _math(), _cudnn(), attention_order(), attention_of_others(),
    )  # fmt: skip


def alike(one: Settings, other: Settings) -> bool:
    """Whether they are the same; neither lists of filters nor streams are because they are equal."""
    return one[0] is other[0] and one[4] is other[4] and one[5] is other[5] and one == other


def settle(wanted: Settings, found: Settings) -> None:
    """Make ``wanted`` the settings, which are ``found``."""
    if not all(map(is_, wanted[_OF_WARNINGS], found[_OF_WARNINGS])):
        _settle_warnings(*wanted[_OF_WARNINGS])
    sys.stdout, sys.stderr, dtype, flash, efficient, math, cudnn, order, others = wanted[_OF_WARNINGS.stop :]
    torch.set_default_dtype(dtype)
    cuda.enable_flash_sdp(flash)
    cuda.enable_mem_efficient_sdp(efficient)
    cuda.enable_math_sdp(math)
    cuda.enable_cudnn_sdp(cudnn)
    set_attention_order(order)
    set_attention_of_others(others)


def _settle_warnings(filters: Any, shown: Any, shows: Any, captured: Any) -> None:
    _logging[_CAPTURED] = captured
    _warnings.update({"filters": filters, "showwarning": shown, _SHOWS: shows})
    with warnings.catch_warnings():  # says that filters have changed: what was shown once is known until then
        pass
