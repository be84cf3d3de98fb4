"""all_gather and reduce_scatter of one dense buffer, with as little of Python around the backend's call as can be.

n = number of ranks in the group.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.runtime.pending import then
from meshcomm.runtime.recorder import Marked
from meshcomm.runtime.transports.process_group import Later
from meshcomm.runtime.transports.protocol import Link
from meshcomm.runtime.transports.underway import Started

__all__ = ["gather_flat", "scatter_flat"]

_DIRECT = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def gather_flat(link: Link, x: Tensor) -> Any:
    """``[k] -> [n * k]``, or a Pending of it."""
    if not _is_direct(link, x):
        return then(link.all_gather(x), _as_one)
    assert isinstance(link, Later)
    out = x.new_empty(link.size * x.numel())
    record = link.log.begin("all_gather", "", x.dtype, x.shape)
    work = link._start("all_gather", lambda: _torch.allgather_base(link.group, out, x))
    return Marked(Started(work, out, partial(link._error, "all_gather"), gloo=False, keep=x), record)


def scatter_flat(link: Link, x: Tensor, op: str) -> Any:
    """``[n * k] -> [k]``, or a Pending of it; ``op`` is sum or mean."""
    native = op == "sum" or (isinstance(link, Later) and x.device.type in link.nccl)
    # A sum of half precision may be too large where the mean is not: the link knows.
    if not _is_direct(link, x) or not (native or x.dtype in (torch.float32, torch.float64)):
        return link.reduce_scatter(x.view(link.size, x.numel() // link.size), op)
    assert isinstance(link, Later)
    out = x.new_empty(x.numel() // link.size)
    record = link.log.begin("reduce_scatter", op, x.dtype, (link.size, x.numel() // link.size))
    options = link._scatter_options[op if native else "sum"]
    work = link._start("reduce_scatter", lambda: _torch.reduce_scatter_base(link.group, out, x, options))
    started: Any = Marked(Started(work, out, partial(link._error, "reduce_scatter"), gloo=False, keep=x), record)
    return started if native else then(started, lambda total: total.div_(link.size))


def _is_direct(link: Link, x: Tensor) -> bool:
    """Whether the backend takes it as it is, and does it well."""
    if not isinstance(link, Later) or (x.is_cpu and link._on_gloo):
        return False
    return x.dtype in _DIRECT and x.is_contiguous() and x.numel() > 0


def _as_one(rows: Tensor) -> Tensor:
    return rows.view(-1)
