"""Copies between shards that stay on the CPU and the device that computes with them: the host waits for many at once.

::

    forward     copy, compute, copy, compute ... │ the last copy has left: the shards may be changed
    backward    copy, compute ... reduce, copy back, copy back ... │ all have come: the gradients may be read

A copy is put on the stream that computes, so it is in order with what uses it there; only the host is ahead of it. It
waits where somebody may touch the memory on the CPU: at the end of a forward, before gradients are handed out, and at
the end of a backward, whatever part of it ran.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshcomm import _torch


class Copies:
    """Those of one module that are under way."""

    def __init__(self) -> None:
        self._last: Any = None
        self._pass = -1
        """The backward pass at whose end these are waited for."""

    def there(self, shard: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The shard on the device; it must not change before :meth:`landed`."""
        now = _torch.backward_pass()
        if now not in (-1, self._pass) and _is_elsewhere(shard, device):
            if not _torch.after_backward(self._end_of_backward):
                return shard.to(device, dtype)
            self._pass = now
        return self._copied(shard, device, dtype)

    def back(self, total: Tensor, device: torch.device) -> Tensor:
        """The same on the CPU, not to be read before :meth:`landed`."""
        return self._copied(total, device, total.dtype)

    def landed(self) -> None:
        """Wait until all have."""
        last, self._last = self._last, None
        if last is not None:
            last.synchronize()

    def _copied(self, x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        if not _is_elsewhere(x, device):
            return x.to(device, dtype)
        y = _begun(x, device, dtype)
        self._last = _mark(x.device if device.type == "cpu" else device)
        return y

    def _end_of_backward(self) -> None:
        self._pass = -1
        self.landed()


def pinned(shard: Tensor, device: torch.device) -> Tensor:
    """A shard of the CPU as ``device`` copies it without the host's help."""
    return _pin(shard) if _is_elsewhere(shard, device) and not shard.is_pinned() else shard


def _is_elsewhere(x: Tensor, device: torch.device) -> bool:
    return x.device.type != device.type


def _begun(x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return x.to(device, dtype, non_blocking=True)


def _mark(device: torch.device) -> Any:
    """What tells when all that has been put on this thread's stream is done."""
    return torch.accelerator.current_stream(device).record_event()


def _pin(shard: Tensor) -> Tensor:
    return shard.pin_memory()
