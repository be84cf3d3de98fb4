"""Collectives that are one call of a backend: of torch's process groups where those do it all, NCCL's above all. What
they do not take as it lies, and all that gloo would move on the CPU, goes the longer way of
:mod:`meshcomm.runtime.transports.process_group`.

n = number of ranks in the group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm._torch import gather_method, profiler_on, scatter_method
from meshcomm.runtime.call import told
from meshcomm.runtime.pending import then
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.algorithms import PacketLink
from meshcomm.runtime.transports.dtypes import HALF, PLAIN
from meshcomm.runtime.transports.protocol import Empty

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
SUMMED = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32})
"""Dtypes whose sum every backend knows."""


@cache
def options_for(name: str, later: bool, **given: Any) -> Any:
    """torch's options of this name; nobody changes them. ``later``: whether the backend gives a work to wait for."""
    options = getattr(dist.distributed_c10d, name)()
    options.asyncOp = later
    for each, value in given.items():
        setattr(options, each, _OPS[value] if each == "reduceOp" else value)
    return options


def _both(name: str, **given: Any) -> tuple[Any, Any]:
    """torch's options of this name: those for now, and those for later."""
    return options_for(name, False, **given), options_for(name, True, **given)


_GATHERS, _EXCHANGES = map(_both, ("AllgatherOptions", "AllToAllOptions"))
_REDUCES = {op: _both("AllreduceOptions", reduceOp=op) for op in _OPS}
_SCATTERS = {op: _both("ReduceScatterOptions", reduceOp=op) for op in _OPS}


class DirectLink(PacketLink):
    """The short ways of a group of processes."""

    _on_gloo: bool
    _direct: Callable[..., Tensor]
    """One call of the backend, see :mod:`meshcomm.runtime.transports.group_link`."""
    _summed: Callable[..., Tensor | None]

    def _as_it_lies(self, x: Tensor) -> bool:
        """Whether the backend sees in the memory of ``x`` what it is, and does with it what is called."""
        return x.is_contiguous() and not (x.is_neg() or x.is_conj() or (self._on_gloo and x.is_cpu))

    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        raise NotImplementedError

    def _all_reduce_own(self, x: Tensor, op: str) -> Tensor:
        raise NotImplementedError

    def _broadcast_packed(self, x: Tensor, src: int) -> Tensor:
        raise NotImplementedError

    def _permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ what is reduced

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """As in the base, with a short way for what is reduced as it is."""
        plain = op == "sum" and x.dtype in SUMMED
        if (self._on_gloo and x.is_cpu) or not (plain or self._takes(x, op)):
            return self._all_reduce(x, op)
        later = told.later
        if plain and not (later or profiler_on()):
            return self._summed(self, x)  # type: ignore[return-value]
        if not plain and self._widens(x, op):
            return self._reduced_in_place(x, x.to(torch.float32, memory_format=torch.contiguous_format), op)
        y = x.clone() if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        if plain:
            return self._direct(self, "all_reduce", op, x, -1, y, later, "allreduce", [y], _REDUCES[op][later])
        return self._reduced_in_place(x, y, op)

    def all_reduce_own(self, x: Tensor, op: str) -> Tensor:
        """In place, but for gloo's on the CPU, which are moved and reduced here. A sum of half precision may be too
        large where the mean is not: the base knows.
        """
        if self._on_gloo and x.is_cpu:
            return self.all_reduce(x, op)
        if self._widens(x, op) or not (self._as_it_lies(x) and self._takes(x, op)):
            return self._all_reduce_own(x, op)
        return self._reduced_in_place(x, x, op)

    def _asked(self, x: Tensor, op: str) -> str:
        """For what the backend is: only NCCL knows a mean, which may be where the sum would be too large."""
        return "sum" if op == "mean" and x.device.type not in self.nccl else op

    def _widens(self, x: Tensor, op: str) -> bool:
        """Whether that sum is one in float32."""
        return op == "mean" and x.dtype in HALF and self._asked(x, op) != op

    def _takes(self, x: Tensor, op: str) -> bool:
        """Whether the backend reduces such a tensor in place, or a view of it."""
        return _shown(op, x.dtype) is not None and not self._folds(x, op)

    def _reduced_in_place(self, x: Tensor, y: Tensor, op: str) -> Tensor:
        """``y``, which is ``x`` and nobody else has, in place."""
        asked, later = self._asked(x, op), told.later
        given = [y if (shown := _shown(asked, y.dtype)) is _as_it_is else shown(y)]
        got = self._direct(self, "all_reduce", op, x, -1, y, later, "allreduce", given, _REDUCES[asked][later])
        return got if asked == op else self._divided(got, x.dtype)

    def _divided(self, got: Tensor, dtype: torch.dtype) -> Tensor:
        if type(got) is Tensor:  # without the step that `then` takes
            return got.div_(self.size) if got.dtype is dtype else got.div_(self.size).to(dtype)
        return then(got, lambda total: total.div_(self.size).to(dtype))

    def scatter_flat(self, x: Tensor, op: str) -> Any:
        """One call of the backend, if it takes ``x`` as it lies. A mean of half precision is one in float32."""
        asked, later = self._asked(x, op) if op == "mean" else op, told.later
        shown, wide = _shown(asked, x.dtype), op == "mean" and self._widens(x, op)
        if (
            shown is None
            or not (scatter_method and self._as_it_lies(x))
            or (op != "sum" and self._folds(x, op))
            or (wide and later)  # who waits keeps what it knows, which is ``x``
        ):
            return super().scatter_flat(x, op)
        read = x.float() if wide else x
        first, *others = x.shape
        y = read.new_empty(first // self.size, *others)
        given, into = (read, y) if shown is _as_it_is else (shown(read), shown(y))
        options, name = _SCATTERS[asked][later], scatter_method
        got = self._direct(self, "reduce_scatter", op, x, -1, y, later, name, into, given, options)
        return got if asked == op else self._divided(got, x.dtype)

    # --------------------------------------------------------------------------------------------------- what is moved

    def gather_flat(self, x: Tensor, empty: Empty | None = None) -> Any:
        """One call of the backend, if it takes ``x`` as it lies."""
        known = x.dtype in PLAIN
        if not (gather_method and self._as_it_lies(x) and (known or _has_bytes(x))):
            return super().gather_flat(x)
        first, *others = x.shape
        first *= self.size  # and numbers: a tuple takes half as long again
        y, later = x.new_empty(first, *others) if empty is None else empty(x, first), told.later
        given, into = (x, y) if known else (_as_bytes(x), _as_bytes(y))
        return self._direct(self, "all_gather", "", x, -1, y, later, gather_method, into, given, _GATHERS[later])

    def swap_flat(self, x: Tensor) -> Any:
        """The same, without lengths. NCCL has another call for who gives them, so how ``x`` lies is no reason to."""
        if self._on_gloo and x.is_cpu:
            return super().swap_flat(x)
        if x.is_neg() or x.is_conj() or not x.is_contiguous():
            x = dtypes.plain(x)
        if not ((known := x.dtype in PLAIN) or _has_bytes(x)):
            x = x.clone(memory_format=torch.contiguous_format)
        y, later, options = torch.empty_like(x), told.later, _EXCHANGES[told.later]
        given, into = (x, y) if known else (_as_bytes(x), _as_bytes(y))
        return self._direct(self, "all_to_all", "", x, -1, y, later, "alltoall_base", into, given, [], [], options)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """The same."""
        known = x.dtype in PLAIN
        if not x.is_contiguous() or (self._on_gloo and x.is_cpu) or not (known or _has_bytes(x)):
            return self._broadcast_packed(x, src)
        y = x.clone() if self.index == src else torch.empty_like(x)
        given, later = y if known else _as_bytes(y), told.later
        return self._direct(self, "broadcast", "", x, src, y, later, "broadcast", [given], _from(src)[later])

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        """An all_to_all in which at most one run is not empty; two messages on gloo."""
        known = x.dtype in PLAIN
        if (
            source is None
            or destination is None
            or not (x.ndim and x.numel() and self._as_it_lies(x) and (known or _has_bytes(x)))
        ):
            return self._permute(x, source, destination)  # what is empty too: not all ranks may have both ends
        send, recv, y = [0] * self.size, [0] * self.size, torch.empty_like(x)
        given, into = (x, y) if known else (_as_bytes(x), _as_bytes(y))
        send[destination] = recv[source] = given.shape[0]
        later, name, options = told.later, "alltoall_base", _EXCHANGES[told.later]
        return self._direct(self, "permute", "", x, -1, y, later, name, into, given, recv, send, options)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _has_bytes(x: Tensor) -> bool:
    """Whether dense ``x`` can be seen as bytes: one element, or none, counts as dense whatever its stride."""
    return x.itemsize == 1 or (x.ndim > 0 and x.stride(-1) == 1)


@cache
def _shown(op: str, dtype: torch.dtype) -> Any:
    """A view of a tensor which a backend reduces as it is to reduce the tensor; None if there is none."""
    if op not in _OPS:  # what is exact
        return None
    if dtype.is_complex:
        return torch.view_as_real if op in ("sum", "mean") else None
    if dtype == torch.bool:
        return _as_bytes
    return _as_it_is if dtype in PLAIN and dtypes.dress(op, dtype) is None else None


@cache
def _from(src: int) -> tuple[Any, Any]:
    return _both("BroadcastOptions", rootRank=src)
