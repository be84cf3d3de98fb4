"""Small numbers of the host between ranks: they go as a tensor of the CPU, whichever device the ranks compute on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.runtime.pending import then

__all__ = ["Numbers"]


class Numbers:
    """What a link does with numbers, by its own primitives, so that whoever wants to know of those sees it."""

    def agree(self: Any, values: Sequence[int], src: int | None = None, op: str = "") -> list[list[int]]:
        """Those of every rank, in order of index; with ``src`` those of that rank alone, with ``op`` one row that is
        reduced. Where the group has a backend of the CPU's nobody waits for an accelerator.
        """
        with _torch.outside_transforms():
            mine = torch.tensor(values, dtype=torch.int64, device="cpu")
            if src is not None:
                return then(self.broadcast(mine, src), lambda told: [_read(told)])
            return (
                then(self.all_reduce(mine, op), lambda told: [_read(told)])
                if op
                else then(self.all_gather(mine), _read)
            )


def _read(told: Tensor) -> Any:
    with _torch.outside_transforms():
        return told.tolist()
