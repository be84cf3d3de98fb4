"""The accelerator of this process while it is in use, and the streams on which threads put work for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@cache
def module() -> ModuleType | None:
    """torch's module for the accelerator that is here, such as ``torch.cuda``."""
    if not torch.accelerator.is_available():
        return None
    found: ModuleType = torch.get_device_module(torch.accelerator.current_accelerator())
    return found


def in_use() -> ModuleType | None:
    """The same once something has used it: to ask for more would begin it, which takes seconds and memory."""
    found = module()
    if found is None:
        return None
    begun = getattr(found, "is_initialized", None)  # Metal has no beginning
    return found if begun is None or begun() else None


@cache
def _casting(default: str) -> tuple[str, ...]:
    found = None if module() is None else torch.accelerator.current_accelerator()
    here = {"cpu", default} | (set() if found is None else {found.type})
    return tuple(sorted(here - {"meta"}))


def casts(default: torch.device) -> list[tuple[str, torch.dtype, bool]]:
    """Of each kind of device that computes here: to what autocast casts for it, and whether it does. ``default``: the
    default device.
    """
    kinds = _casting(default.type)
    return [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]


NO_DOUBLES = {"mps"}
"""Kinds of device that have no float64."""


def with_doubles(device: torch.device) -> torch.device:
    """Where something of this device can be computed in float64: there, or on the CPU."""
    return torch.device("cpu") if device.type in NO_DOUBLES else device


def capturing() -> bool:
    """Whether what this thread puts on its stream goes into a graph, in which nothing can be made or waited for."""
    return _captures(in_use())


def _captures(device: ModuleType | None) -> bool:
    asks = getattr(device, "is_current_stream_capturing", None)
    return asks is not None and bool(asks())


# ------------------------------------------------------------------------------------------------------------ streams


def stream_of(x: Tensor) -> torch.Stream | None:
    """The stream on which this thread puts what it does with ``x``; None on the CPU."""
    return None if x.is_cpu or x.is_meta else stream_at(x)


def stream_at(x: Tensor) -> torch.Stream:
    """The same, of what lies on an accelerator. Asked for by its number: a device is looked at in Python first."""
    return torch.accelerator.current_stream(x.get_device())


def tensors(*things: Any) -> Iterator[Tensor]:
    """Those of an accelerator in lists, tuples and messages."""
    for each in things:
        if isinstance(each, Tensor):
            if not (each.is_cpu or each.is_meta):
                yield each
        elif isinstance(each, (list, tuple)):
            yield from tensors(*each)
        elif isinstance(each, dist.P2POp):
            yield from tensors(each.tensor)


def mark(*things: Any) -> Any:
    """Has a ``query()`` that is true when the device has come to here, on this thread's stream for the first tensor of
    an accelerator among these; None if there is none, and while a graph is captured.
    """
    for x in tensors(*things):
        return mark_at(stream_at(x))
    return None


def mark_at(stream: torch.Stream, again: Any = None) -> Any:
    """The same on this thread's stream for something that lies on the accelerator, which has begun therefore. A mark
    that nobody needs where it was may be put there ``again``, for to make one takes as long as to put it.
    """
    if _captures(module()):
        return None
    return stream.record_event() if again is None else stream.record_event(again)


def lend(stream: torch.Stream, *things: Any) -> None:
    """The tensors were made on ``stream``: if this thread uses another one, their memory stays until that has come to
    here.
    """
    for x in tensors(*things):
        if (here := stream_at(x)) != stream:
            x.record_stream(here)


def take_over(x: Tensor, stream: torch.Stream) -> None:
    """What this thread does with ``x`` comes after what has been put on ``stream``, which makes it."""
    here = stream_of(x)
    if here is not None and here != stream:
        here.wait_stream(stream)
        x.record_stream(here)


@contextmanager
def on(stream: torch.Stream | None) -> Iterator[None]:
    """This thread uses this stream."""
    if stream is None or (before := torch.accelerator.current_stream()) == stream:
        yield
        return
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


class Order:
    """Threads of which one works at a time: what one has put on its stream comes before what the next puts on its own.

    Each thread has a device and a stream of its own. Those that begin here begin with the ones of who made this.
    """

    def __init__(self) -> None:
        self._first = self._stream = None if in_use() is None else torch.accelerator.current_stream()

    def begin(self) -> None:
        """This thread is one of them: on the same device and stream."""
        if self._first is not None:
            torch.accelerator.set_stream(self._first)

    def leave(self) -> None:
        """Another one goes on."""
        if in_use() is not None:
            self._stream = torch.accelerator.current_stream()

    def enter(self) -> None:
        """This one goes on."""
        if self._stream is not None and (here := torch.accelerator.current_stream()) != self._stream:
            here.wait_stream(self._stream)
