"""A range of torch's profiler around each collective, so that it shows their names and axes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from meshcomm import _torch
from meshcomm.errors import shape_text

__all__ = ["in_range"]

_NONE: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def in_range(
    what: str, axis: Any, dtype: torch.dtype | None = None, shape: Sequence[int] = ()
) -> contextlib.AbstractContextManager[Any]:
    """What runs inside is ``meshcomm.all_reduce dp f32[1000]`` to torch's profiler, where one is on."""
    if not _torch.profiler_on() or axis.is_traced:
        return _NONE
    names = axis.name if isinstance(axis.name, str) else ",".join(axis.name)
    given = "" if dtype is None else f" {shape_text(dtype, shape)}"
    return torch.profiler.record_function(f"meshcomm.{what} {names}{given}")
