"""A link around another one, for who wants to know of every primitive that goes through: the guard, a trace.

n = number of ranks in the group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshcomm.runtime.call import Call, Post, Want
from meshcomm.runtime.ledger import Ledger
from meshcomm.runtime.transports.protocol import Defaults, Link, Primitive

__all__ = ["WrappedLink", "bare"]

L = TypeVar("L")


class _Said(threading.local):
    """What was announced, by each thread for itself."""

    call = Call("a collective")


class WrappedLink(Defaults):
    """All primitives of ``inner``, each by way of :meth:`run`."""

    watched = hears = True

    def __init__(self, inner: Link) -> None:
        self.inner = inner
        self.size, self.index = inner.size, inner.index
        self._said = _Said()

    @property
    def call(self) -> Call:
        """What this thread has announced."""
        return self._said.call

    @call.setter
    def call(self, call: Call) -> None:
        self._said.call = call

    def run(self, what: Primitive) -> Any:
        """Give what ``what.go()`` gives; ``self.call`` says what it belongs to. Of what is waited for later that may be
        a Pending.
        """
        raise NotImplementedError

    def end(self) -> None:
        """No more calls."""

    @property
    def log(self) -> Any:
        """Where the calls are noted."""
        return self.inner.log  # type: ignore[attr-defined]

    @property
    def orders(self) -> dict[Any, list[int]]:
        """The inner link's."""
        return self.inner.orders

    @property
    def ledger(self) -> Ledger:
        """The inner link's."""
        return self.inner.ledger

    def copies(self, name: str, x: Tensor) -> bool:
        """As the inner link does."""
        return self.inner.copies(name, x)

    def announce(self, call: Call) -> None:
        """Keep it for the primitive that follows."""
        self.call = call
        if self.inner.watched:
            self.inner.announce(call)

    def refuse(self, where: str, why: str, axis: object) -> None:
        """As the inner link does."""
        self.inner.refuse(where, why, axis)

    def check_device(self, device: torch.device, strict: bool = False) -> str | None:
        """As the inner link does."""
        return self.inner.check_device(device, strict)

    def tagged(self, device: torch.device) -> tuple[str, ...]:
        """As the inner link does."""
        return self.inner.tagged(device)

    def all_reduce(self, x: Tensor, op: str) -> Any:
        """Wrapped."""
        return self._same("all_reduce", x, lambda: self.inner.all_reduce(x, op), op)

    def all_reduce_own(self, x: Tensor, op: str) -> Any:
        """Wrapped."""
        return self._same("all_reduce", x, lambda: self.inner.all_reduce_own(x, op), op)

    def all_gather(self, x: Tensor) -> Any:
        """Wrapped."""
        return self._same("all_gather", x, lambda: self.inner.all_gather(x))

    def reduce_scatter(self, x: Tensor, op: str) -> Any:
        """Wrapped."""
        return self._same("reduce_scatter", x, lambda: self.inner.reduce_scatter(x, op), op)

    def all_to_all(self, x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Any:
        """Wrapped; shapes may differ."""
        go = lambda: self.inner.all_to_all(x, send, recv)  # noqa: E731
        return self.run(Primitive("all_to_all", x, ("all_to_all", x.dtype), go, send, recv))

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Any:
        """Wrapped."""
        return self._same("permute", x, lambda: self.inner.permute(x, source, destination))

    def broadcast(self, x: Tensor, src: int) -> Any:
        """Wrapped."""
        return self._same("broadcast", x, lambda: self.inner.broadcast(x, src), src)

    def reduce(self, x: Tensor, op: str, dst: int) -> Any:
        """Wrapped."""
        return self._same("reduce", x, lambda: self.inner.reduce(x, op, dst), op, dst)

    def gather(self, x: Tensor, dst: int) -> Any:
        """Wrapped."""
        return self._same("gather", x, lambda: self.inner.gather(x, dst), dst)

    def scatter(self, x: Tensor | None, like: Tensor, src: int) -> Any:
        """Wrapped."""
        key = ("scatter", like.dtype, tuple(like.shape), src)
        return self.run(Primitive("scatter", x, key, lambda: self.inner.scatter(x, like, src)))

    def exchange(self, posts: Sequence[Post], wants: Sequence[Want]) -> Any:
        """Wrapped; not all ranks need to call it."""
        go = lambda: self.inner.exchange(posts, wants)  # noqa: E731
        return self.run(Primitive("exchange", None, ("exchange",), go, posts=posts, wants=wants))

    def barrier(self) -> object:
        """Wrapped."""
        return self.run(Primitive("barrier", None, ("barrier",), self.inner.barrier))

    def barrier_within(self, seconds: float) -> None:
        """Wrapped."""
        key = ("barrier within", seconds)
        self.run(Primitive("barrier_within", None, key, lambda: self.inner.barrier_within(seconds)))

    def _same(self, name: str, x: Tensor, go: Callable[[], Any], *extra: object) -> Any:
        return self.run(Primitive(name, x, (name, x.dtype, tuple(x.shape), *extra), go))


def bare(link: Any) -> Any:
    """The link inside of all that is around it."""
    while isinstance(link, WrappedLink):
        link = link.inner
    return link
