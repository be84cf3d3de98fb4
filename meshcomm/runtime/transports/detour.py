"""Links whose backends do not move tensors of every device here: those go by way of another device and come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshcomm.runtime.call import Post, Want
from meshcomm.runtime.pending import then
from meshcomm.runtime.transports.process_group import ProcessLink
from meshcomm.runtime.transports.protocol import Empty

T = TypeVar("T")


def lacks_a_way(config: str) -> bool:
    """Whether a group with these backends cannot move tensors of the CPU or of the accelerator that is here."""
    if ":" not in config:
        return False
    kinds = {part.split(":")[0] for part in config.split(",")}
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" not in kinds or (here is not None and here.type not in kinds)


def _by_way_of(name: str) -> Any:
    """The primitive of the link after this one, on a tensor that is moved."""

    def primitive(self: DetouredLink, x: Tensor, *args: Any) -> Any:
        return self._back(getattr(super(DetouredLink, self), name)(self._there(x), *args), x)

    return primitive


class DetouredLink(ProcessLink):
    """Every primitive, with a tensor that is moved and back where it must be; before another link, if it is not to be
    made of messages.
    """

    sums_directly = False

    def __init__(self, *args: Any, own: torch.device) -> None:
        """``own``: this rank's device, by which it goes if no backend moves tensors of the CPU."""
        super().__init__(*args)
        self._own = own

    def check_device(self, device: torch.device, strict: bool = False) -> str | None:
        """A real device will do, unless detours are refused."""
        return super().check_device(device) if strict or device.type == "meta" else None

    def _way(self, device: torch.device) -> torch.device:
        """``device`` itself, or the one that its tensors go by."""
        if super().check_device(device) is None:
            return device
        if "cpu" in self._kinds:
            return torch.device("cpu")
        return self._own if self._own.type in self._kinds else torch.device(next(iter(self._kinds)))

    def _there(self, x: Tensor) -> Tensor:
        return x.to(self._way(x.device))

    def _back(self, y: T, x: Tensor) -> T:
        device = x.device
        if self._way(device) == device:
            return y
        return then(y, lambda y: y.to(device) if isinstance(y, Tensor) else y)  # type: ignore[return-value]

    def _as_it_lies(self, x: Tensor) -> bool:
        return self._way(x.device) == x.device and super()._as_it_lies(x)

    def copies(self, name: str, x: Tensor) -> bool:
        """A tensor that is moved is copied."""
        return self._way(x.device) != x.device or super().copies(name, x)

    all_reduce = _by_way_of("all_reduce")
    all_reduce_own = _by_way_of("all_reduce_own")
    all_gather = _by_way_of("all_gather")
    reduce_scatter = _by_way_of("reduce_scatter")
    all_to_all = _by_way_of("all_to_all")
    swap_flat = _by_way_of("swap_flat")
    permute = _by_way_of("permute")
    broadcast = _by_way_of("broadcast")
    reduce = _by_way_of("reduce")
    gather = _by_way_of("gather")

    def gather_flat(self, x: Tensor, empty: Empty | None = None) -> Any:
        """By way of; then into memory of its own."""
        if self._way(x.device) == x.device:
            return super().gather_flat(x, empty)
        return self._back(super().gather_flat(self._there(x)), x)

    def scatter(self, x: Tensor | None, like: Tensor, src: int) -> Tensor:
        """By way of."""
        moved = torch.empty(like.shape, dtype=like.dtype, device=self._way(like.device))
        return self._back(super().scatter(None if x is None else self._there(x), moved, src), like)

    def exchange(self, posts: Sequence[Post], wants: Sequence[Want]) -> list[Tensor]:
        """By way of, each message."""
        sent = [(self._there(x), dst, tag) for x, dst, tag in posts]
        asked = [(src, shape, dtype, tag, self._way(device)) for src, shape, dtype, tag, device in wants]
        got = super().exchange(sent, asked)
        return then(got, lambda got: [y.to(want[4]) for y, want in zip(got, wants, strict=True)])
