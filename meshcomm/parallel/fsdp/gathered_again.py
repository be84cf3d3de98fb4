"""Weights that autograd does not keep: it saves their place, and backward gathers them again.

A pair of saved-tensor hooks, one for all that is open on a thread, turns a view of a gathered buffer into its place.
The first place that backward asks for fetches the buffer; it goes when the last place in it has gone, which is when
autograd has run the last node that needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from meshcomm import _torch
from meshcomm.errors import fail

Span = tuple[int, int, torch.dtype, int, "Again", int]
"""From and to which address, the elements' dtype and width, whose, and which of its buffers."""


class Again:
    """Buffers that were gathered once, and are when backward needs them."""

    __slots__ = ("__weakref__", "_fetch", "buffers")

    def __init__(self, fetch: Callable[[], Sequence[Tensor]]) -> None:
        self._fetch = fetch
        self.buffers: Sequence[Tensor] | None = None

    def fetched(self) -> Sequence[Tensor]:
        """The buffers, fetched by who asks first."""
        if self.buffers is None:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    self.buffers = self._fetch()
            else:
                self.buffers = self._fetch()
        return self.buffers


class _Here(threading.local):
    def __init__(self) -> None:
        self.open: list[Span] = []


_here = _Here()
_DENSE = (Tensor, Parameter)


def open_places(again: Again, buffers: Sequence[Tensor]) -> None:
    """From now on what lies in these buffers, those that were gathered first, is saved by place."""
    spans = _here.open
    for at, buffer in enumerate(buffers):
        dtype = buffer.dtype
        if not dtype.is_complex:  # a view may be conjugated: keep those
            first = _torch.places_like(buffer)(buffer)
            spans.append((first, first + buffer.nbytes, dtype, dtype.itemsize, again, at))


def close(again: Again) -> None:
    """From now on they are not: the memory may be used for something else."""
    spans = _here.open
    while spans and spans[-1][4] is again:  # as it is, but where an inner one was left open
        del spans[-1]
    if spans:
        _here.open = [span for span in spans if span[4] is not again]


def _pack(x: Tensor) -> tuple[Any, ...]:
    """A view of an open buffer as its place, anything else with its version."""
    spans = _here.open
    if spans and ((plain := type(x) in _DENSE) or _torch.is_without_memory(x)):
        place = x.data_ptr() if plain else _torch.places_like(x)(x)
        for span in spans:  # taken apart where it is that one, which it is for few
            if span[0] <= place < span[1] and x.dtype == span[2]:
                return span[4], span[5], x.size(), x.stride(), (place - span[0]) // span[3]
    # Autograd knows of whom it is the result; kept with that, a node would keep itself.
    return None, x if x.is_leaf else x.detach(), x._version


@_torch.out_of_graphs
def _unpack(saved: tuple[Any, ...]) -> Tensor:
    if saved[0] is None:  # most are
        _, x, version = saved
        if x._version != version:  # autograd does not look where there are hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(x.shape)} is at version {x._version}; expected version {version} instead"
            )
        return x  # type: ignore[no-any-return]
    again, at, size, stride, offset = saved
    buffer = again.fetched()[at] if again.buffers is None else again.buffers[at]
    view: Tensor = buffer.as_strided(size, stride, offset)  # a gathered buffer has a storage of its own
    return view


_torch.not_users(_pack)


def enter() -> torch.autograd.graph.saved_tensors_hooks | None:
    """Put the hooks up for :func:`leave` to take down; None where there are some.

    Other hooks, those of a checkpoint, must stay on top: it would keep what it promises to compute again.
    """
    if _torch.saved_hooks_on_top() is not None:
        return None
    hooks = torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)
    hooks.__enter__()
    return hooks


def leave(hooks: torch.autograd.graph.saved_tensors_hooks | None) -> None:
    """Undo :func:`enter`."""
    if hooks is not None:
        hooks.__exit__()


def changed(where: str) -> NoReturn:
    """Backward wants weights that are no longer what forward used."""
    fail(
        where,
        "the shards were changed in place between forward and backward, which gathers them again.",
        fix="step the optimiser after backward, or pass regather=False",
        kind=RuntimeError,
    )
