"""Who is told of a call while its primitives run: links that hear, and torch's profiler, as a range with the call's
name and axis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from meshcomm import _torch
from meshcomm.errors import shape_text
from meshcomm.runtime.call import Call, told

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


@contextlib.contextmanager
def calling(axis: Any, call: Call, brief: tuple[Any, ...] | None = None) -> Iterator[None]:
    """What runs inside belongs to ``call``; links that are not watched are told ``brief``, if there is one."""
    link, before = axis.link, told.call
    told.call = call if brief is None or link.watched else brief
    try:
        if link.watched:
            link.announce(call)
        with in_range(call.what, axis, call.dtype, call.shape):
            yield
    finally:
        told.call = before
