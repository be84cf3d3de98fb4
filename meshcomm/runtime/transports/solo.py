"""A group of one: every primitive is a copy, and nothing is communicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshcomm._torch import copied_in_graph
from meshcomm.runtime.call import Post, Want
from meshcomm.runtime.ledger import Ledger
from meshcomm.runtime.transports.exact import EXACT
from meshcomm.runtime.transports.protocol import Defaults


class SoloLink(Defaults):
    """The link of an axis of size 1."""

    size = 1
    index = 0

    def __init__(self) -> None:
        self.orders: dict[Any, list[list[int]]] = {}
        self.ledger = Ledger()

    def copy(self, x: Tensor) -> Tensor:
        """Dense."""
        return x.clone(memory_format=torch.contiguous_format)

    def traced(self) -> SoloLink:
        """With copies that a compiler makes."""
        return _TracedSoloLink()

    def agree(self, values: Sequence[int], src: int | None = None, op: str = "") -> list[list[int]]:
        """The own ones."""
        return [list(values)]

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """A copy; an exact sum has no negative zero."""
        return self.copy(x) if op not in EXACT else self.copy(x).add_(0.0)

    def all_reduce_own(self, x: Tensor, op: str) -> Tensor:
        """Itself."""
        return x if op not in EXACT else x.add_(0.0)

    def all_gather(self, x: Tensor) -> Tensor:
        """One row."""
        return self.copy(x).unsqueeze(0)

    def reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        """The one row."""
        return self.all_reduce(x[0], op)

    def all_to_all(self, x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """A copy."""
        return self.copy(x)

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        """A copy if the rank sends to itself, else zeros."""
        return torch.zeros_like(x, memory_format=torch.contiguous_format) if source is None else self.copy(x)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """A copy."""
        return self.copy(x)

    def reduce(self, x: Tensor, op: str, dst: int) -> Tensor:
        """A copy."""
        return self.copy(x)

    def gather(self, x: Tensor, dst: int) -> Tensor:
        """One row."""
        return self.all_gather(x)

    def scatter(self, x: Tensor | None, like: Tensor, src: int) -> Tensor:
        """The one row."""
        assert x is not None
        return self.copy(x[0])

    def exchange(self, posts: Sequence[Post], wants: Sequence[Want]) -> list[Tensor]:
        """No other rank, no messages."""
        return []

    def barrier(self) -> None:
        """Everyone is here."""

    def barrier_within(self, seconds: float) -> None:
        """Everyone is here."""


class _TracedSoloLink(SoloLink):
    def copy(self, x: Tensor) -> Tensor:
        return copied_in_graph(x)
