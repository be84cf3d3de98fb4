"""A link in terms of five raw operations on dense tensors of common dtypes, whoever performs those.

n = number of ranks in the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshcomm.runtime.pending import Pending, settled, then
from meshcomm.runtime.process.accelerator import lend, stream_of
from meshcomm.runtime.transports import dtypes, exact
from meshcomm.runtime.transports.protocol import Defaults

LARGE = 2**20
"""Bytes that a rank would receive, from which on sums are made in two steps."""

Reduce = Callable[[Tensor, str], Tensor]

_BITWISE = ("band", "bor", "bxor")


class PacketLink(Defaults):
    """The primitives of a link in terms of five raw ones, which work on dense tensors of dtypes that every backend
    knows.
    """

    size: int
    index: int
    nccl: frozenset[str]
    """The kinds of device whose backend is NCCL: it has a mean, and no and, or, xor; the others the other way round."""

    def moves_beside(self, device: torch.device) -> bool:
        """NCCL does."""
        return device.type in self.nccl

    def _reduce(self, x: Tensor, op: str) -> Tensor:
        raise NotImplementedError

    def _reduce_own(self, x: Tensor, op: str) -> Tensor:
        """As ``_reduce``, where nobody else has ``x``: the result may lie in its memory."""
        return self._reduce(x, op)

    def _gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        raise NotImplementedError

    def _all_to_all(self, x: Tensor, send: list[int], recv: list[int]) -> Tensor:
        raise NotImplementedError

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        raise NotImplementedError

    def _folds(self, x: Tensor, op: str) -> bool:
        """Whether this is moved whole and reduced here, since the backend cannot."""
        return (op == "product" and x.dtype.is_complex) or (op in _BITWISE and x.device.type in self.nccl)

    def _dressed(
        self, x: Tensor, op: str, reduce: Reduce, own: Reduce | None = None, *, is_own: bool = False
    ) -> Tensor:
        """Have the backend reduce ``x``, dressed as it likes it; ``own`` reduces what nobody else has, as ``x`` if it
        ``is_own``.
        """
        own = reduce if own is None else own
        if op in exact.EXACT:
            return self._exactly(x, op, reduce)
        if op == "mean" and x.device.type not in self.nccl:
            wide = x.float() if x.dtype in dtypes.HALF else x  # a sum may be too large where the mean is not
            is_own = is_own or wide is not x
            total = self._dressed(wide, "sum", reduce, own, is_own=is_own)
            return then(total, lambda y: (y / self.size).to(x.dtype))
        clothes = dtypes.dress(op, x.dtype)
        if clothes is None:
            return (own if is_own else reduce)(dtypes.plain(x), op)
        dressed = clothes.on(x).contiguous()
        return then((own if is_own or clothes.copies else reduce)(dressed, op), clothes.off)

    def _exactly(self, x: Tensor, op: str, reduce: Reduce) -> Tensor:
        """The maximum of the exponents, which is waited for, and the sum of the integers."""
        x = dtypes.plain(x)
        top: Tensor = settled(self._dressed(exact.exponents(x), "max", self._reduce, self._reduce_own))

        def value(total: Tensor) -> Tensor:
            if made_on is not None:
                lend(made_on, top)
            mine = top if total.ndim == x.ndim + 1 else top[self.index]
            return exact.value(total, mine, x.dtype, self.size if op == "exact mean" else 1)

        total = reduce(exact.in_units(x, top), "sum")
        made_on = stream_of(top) if isinstance(total, Pending) else None  # it may be waited for on another one
        return then(total, value)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """One all_reduce, or an all_gather and a local reduction where the backend cannot."""
        if self._folds(x, op):
            return then(self.all_gather(x), lambda rows: dtypes.fold(op, rows.unbind()))
        return self._dressed(x, op, self._reduce, self._reduce_own)

    def all_reduce_own(self, x: Tensor, op: str) -> Tensor:
        """The same, in place where the backend does it."""
        if self._folds(x, op):
            return self.all_reduce(x, op)
        return self._dressed(x, op, self._reduce, self._reduce_own, is_own=True)

    def all_gather(self, x: Tensor) -> Tensor:
        """One all_gather of the elements, or of their bytes."""
        rows = self._gather(dtypes.to_bytes(x))
        return then(rows, lambda rows: dtypes.from_bytes(rows.reshape(-1), x.dtype).view(self.size, *x.shape))

    def reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        """One reduce_scatter, or an all_to_all and a local reduction where the backend cannot."""
        if self._folds(x, op):
            shape = x.shape[1:]
            runs = [math.prod(shape)] * self.size  # Size.numel would make a graph for this length alone
            got = self.all_to_all(x.reshape(-1), runs, runs)
            return then(got, lambda got: dtypes.fold(op, got.view(self.size, *shape).unbind()))

        def reduce(dressed: Tensor, op: str) -> Tensor:
            shape = dressed.shape[1:]
            return then(
                self._reduce_scatter(dressed.reshape(self.size, math.prod(shape)), op), lambda row: row.view(shape)
            )

        return self._dressed(x, op, reduce)

    def all_to_all(self, x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """One all_to_all of the elements, or of their bytes."""
        packed = dtypes.to_bytes(x)
        width = x.element_size() // packed.element_size()
        out = self._all_to_all(packed, [width * run for run in send], [width * run for run in recv])
        return then(out, lambda out: dtypes.from_bytes(out, x.dtype))

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        """An all_to_all in which at most one run is not empty: no order of sends and receives can lock."""
        send, recv = [0] * self.size, [0] * self.size
        if destination is not None:
            send[destination] = x.numel()
        if source is not None:
            recv[source] = x.numel()
        flat, shape = x.reshape(-1), x.shape
        # Before the call, which may be waited for on another stream.
        empty = None if source is not None else torch.zeros_like(x, memory_format=torch.contiguous_format)
        out = self.all_to_all(flat if destination is not None else flat[:0], send, recv)
        made_on = stream_of(empty) if empty is not None and isinstance(out, Pending) else None

        def arrived(out: Tensor) -> Tensor:
            if empty is None:
                return out.view(shape)
            if made_on is not None:
                lend(made_on, empty)
            return empty

        return then(out, arrived)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """One broadcast of the elements, or of their bytes."""
        out = self._broadcast(dtypes.to_bytes(x), src)
        return then(out, lambda out: dtypes.from_bytes(out, x.dtype).view(x.shape))
