"""Reentrant checkpoints inside of a data parallel module: they compute parts of it again outside of its methods, where
parameters are themselves, and a backward pass of their own brings this rank's gradients to ``.grad``.

::

    backward begins     .grad is set aside: from now on it is this rank's own, as under no_sync
    ...                 parts that are computed again add to it; no sum starts
    the sums at last    each takes what is in .grad with it; without any, all of .grad is reduced
    backward ends       what was set aside is added
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshcomm import _torch


class Reduces(Protocol):
    """Who reduces the gradients of a module."""

    collected: bool
    set_aside: int

    def apart(self, collecting: bool) -> bool:
        """Say which kind of gradients this backward pass has; whether it begins."""

    def look_after(self, leaves: Sequence[Tensor]) -> None:
        """Compare the gradients of the ranks when it has ended."""

    def collect(self) -> None:
        """From now on ``.grad`` is this rank's own."""

    def reduce_collected(self) -> None:
        """Reduce what is in ``.grad``."""

    def computes_again(self) -> None:
        """A reentrant checkpoint begins in the module."""


def tensors_of(result: Any) -> list[Tensor]:
    """Those of a result of a method with gradients: of a pytree, or among the attributes of its leaves."""
    found: list[Tensor] = []
    for leaf in _torch.tree_flatten(result)[0]:
        inside = [leaf] if isinstance(leaf, Tensor) else _torch.tree_flatten(dict(getattr(leaf, "__dict__", {})))[0]
        found += [x for x in inside if isinstance(x, Tensor) and x.requires_grad]
    return found


class _Running(threading.local):
    """The modules that run on this thread, outermost first."""

    def __init__(self) -> None:
        self.states: list[Reduces] = []


_here = _Running()


@contextlib.contextmanager
def running(state: Reduces) -> Iterator[None]:
    """Inside, a method of the module runs: a reentrant checkpoint in it is noticed."""
    if torch.compiler.is_compiling():
        yield
        return
    _here.states.append(state)
    try:
        yield
    finally:
        _here.states.pop()


def look_for_checkpoints() -> None:
    """From now on those that begin are noticed, of all kinds that are there."""
    _torch.watch_checkpoints(_notice)


def _notice() -> None:
    for state in _here.states:
        state.computes_again()


def follow(state: Reduces, leaves: Sequence[Tensor], result: Iterable[Tensor], collects: bool) -> None:
    """Be there when backward comes to the result: set ``.grad`` aside; or, where it ``collects``, say that it does."""
    for x in result:
        x.register_hook(functools.partial(_collect if collects else _begin, state, leaves))


def _collect(state: Reduces, leaves: Sequence[Tensor], _: Tensor) -> None:
    state.apart(collecting=True)
    state.collect()


def _begin(state: Reduces, leaves: Sequence[Tensor], _: Tensor) -> None:
    number = _torch.backward_pass()
    if state.set_aside == number:
        return
    begins = state.apart(collecting=False)
    state.set_aside = number
    before: list[Tensor | None] = [None] * len(leaves)
    if not state.collected:
        for at, leaf in enumerate(leaves):
            before[at], leaf.grad = leaf.grad, None
        state.collected = True
    _torch.after_backward(functools.partial(_end, state, leaves, before))
    if begins:
        state.look_after(leaves)  # when all are reduced


def _end(state: Reduces, leaves: Sequence[Tensor], before: Sequence[Tensor | None]) -> None:
    state.set_aside = -2
    state.reduce_collected()
    with torch.no_grad():
        for leaf, old in zip(leaves, before, strict=True):
            if old is not None:
                leaf.grad = old if leaf.grad is None else old.add_(leaf.grad)
