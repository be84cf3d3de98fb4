"""Links in a form that compiles: functional collectives, which trace into one graph with fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.algorithms import LARGE, PacketLink, Reduce
from meshcomm.runtime.transports.exact import EXACT


def _is_small(count: Any, nbytes: int) -> bool:
    """Of a number that a graph is for, or of one of those that it is for: then it is for those alone which are the same
    way. One rank may have a graph for any length, when another one has one for this length, and they must meet.
    """
    # Of what depends on data no rank knows it, though one may know that it is small.
    return not _torch.depends_on_data(count) and bool(count * nbytes <= LARGE)


_NAMES = {"mean": "avg"}
"""What functional ops call the ops of ours."""


class TracedLink(PacketLink):
    """The same operations as functional ops, which trace into one graph with fake tensors.

    The compiler moves the waits apart from the starts, so nothing is waited for later.
    """

    def _dressed(
        self, x: Tensor, op: str, reduce: Reduce, own: Reduce | None = None, *, is_own: bool = False
    ) -> Tensor:
        # As eager accumulates.
        if x.dtype in dtypes.HALF and op in ("sum", "product") and x.device.type not in self.nccl:
            return reduce(dtypes.plain(x).float(), op).to(x.dtype)
        return super()._dressed(x, op, reduce, own, is_own=is_own)

    def __init__(self, size: int, index: int, nccl: frozenset[str], on_gloo: bool, name: Any) -> None:
        """``name``: of the group of torch's."""
        self.size, self.index, self.nccl, self._on_gloo, self._name = size, index, nccl, on_gloo, name

    def _folds(self, x: Tensor, op: str) -> bool:
        # The backend's order of addends is another than ours, if there are more than two.
        rounds = op in ("sum", "mean", "product") and (x.is_floating_point() or x.is_complex()) and self.size > 2
        return ((rounds or op in EXACT) and self._on_gloo and x.is_cpu) or super()._folds(x, op)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """As in the base; what is large and reduced here in parts, which all gather."""
        count = x.numel()
        if not self._folds(x, op) or _is_small(count, x.element_size() * self.size):
            return super().all_reduce(x, op)
        flat, each = x.reshape(-1), -(-count // self.size)
        rows = torch.cat([flat, flat.new_zeros(each * self.size - count)]).view(self.size, each)
        return self.all_gather(self.reduce_scatter(rows, op)).view(-1)[:count].view(x.shape)

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        """As in the base; a rank without a source gets zeros from itself.

        A collective of which nothing is used is dropped from the graph, on this rank alone, and its peers would wait.
        """
        if source is not None:
            return super().permute(x, source, destination)
        flat = x.reshape(-1)
        # Who sends nothing has zeros.
        runs = {self.index: flat} if destination is None else {self.index: torch.zeros_like(flat), destination: flat}
        send = [flat.numel() if target in runs else 0 for target in range(self.size)]
        recv = [flat.numel() if target == self.index else 0 for target in range(self.size)]
        return self.all_to_all(torch.cat([runs[target] for target in sorted(runs)]), send, recv).view(x.shape)

    def _done(self, x: Tensor) -> Tensor:
        result: Tensor = _torch.functional.wait_tensor(x)
        return result

    def _reduce(self, x: Tensor, op: str) -> Tensor:
        return self._done(_torch.functional.all_reduce(x, _NAMES.get(op, op), self._name))

    def _gather(self, x: Tensor) -> Tensor:
        return self._done(_torch.functional.all_gather_into_tensor(x, self.size, self._name)).view(self.size, *x.shape)

    def _reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        out = self._done(_torch.functional.reduce_scatter_tensor(x, _NAMES.get(op, op), self.size, self._name))
        return out.view(x.shape[1:])

    def _all_to_all(self, x: Tensor, send: list[int], recv: list[int]) -> Tensor:
        return self._done(_torch.functional.all_to_all_single(x, recv, send, self._name))

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        return self._done(_torch.functional.broadcast(x, src, self._name))
