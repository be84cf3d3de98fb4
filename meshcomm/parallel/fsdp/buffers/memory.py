"""Memory of gathered parameters and of packed gradients, which those that come after them take over; and what is held.

A unit's buffer is as large as the next one's, and is free when that one's is wanted: memory that was just used is
still in the processor's cache, and has its pages. It is given again when nothing else has its storage, neither a
tensor nor a graph nor who has asked for the storage itself, so whoever keeps a weight of forward keeps what it was.
"""

from __future__ import annotations

from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from meshcomm import _torch

_MOST = 6
"""Pieces that are known at once: a pass has some ahead, and what goes on holding them is forgotten."""


class _Piece:
    """A storage that was given."""

    __slots__ = ("base", "dtype", "length", "nbytes", "storage")

    def __init__(self, like: Tensor, length: int) -> None:
        self.base = like.new_empty(length)
        self.storage = self.base.untyped_storage()
        self.length, self.dtype, self.nbytes = length, self.base.dtype, self.base.nbytes

    def is_free(self) -> bool:
        """Whether nobody else has it, and it is as it was."""
        storage = self.storage
        if _of_tensor(storage, 1) or getrefcount(storage) > _UNHELD or storage.nbytes() != self.nbytes:
            return False
        return storage.resizable() and not storage.is_shared()  # as numpy and other processes leave it


_COUNTS, _of_tensor, _modes = _torch.counts_uses(), _torch.of_tensor, _torch.dispatch_modes
with _torch.outside_transforms():  # who imports this may be in a mode, or in a dry run
    _spare = _Piece(torch.empty(0, device="cpu"), 1)
_UNHELD = getrefcount(_spare.storage) + 1
"""As many references as Python has to a storage that nobody else has, beside the one who looks."""


class Memory:
    """What the units of a module leave to each other during a pass."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    def empty(self, like: Tensor, length: int) -> Tensor:
        """A new flat tensor of the dtype of ``like``, on its device. Only the CPU's: others keep such memory
        themselves.
        """
        if not (like.is_cpu and type(like) is Tensor and _COUNTS) or _modes():
            return like.new_empty(length)
        if _torch.functorch_active() or torch.is_inference_mode_enabled():  # a tensor of that mode stays in it
            return like.new_empty(length)
        pieces, dtype = self._pieces, like.dtype
        for piece in pieces:
            if piece.length == length and piece.dtype == dtype and piece.is_free():
                return piece.base.data  # a tensor of its own: nothing of what the last one had is known of it
        if pieces:  # never more than there would be without this
            pieces[:] = [piece for piece in pieces[1 - _MOST :] if not piece.is_free()]
        pieces.append(_Piece(like, length))
        return pieces[-1].base.data

    def clear(self) -> None:
        """Forget all of it: who has some has it alone."""
        self._pieces.clear()


class Held:
    """Gathered buffers by unit, with what they were gathered of."""

    def __init__(self) -> None:
        self._of: dict[Any, tuple[Any, list[Tensor]]] = {}

    def find(self, unit: Any) -> list[Tensor] | None:
        """Those of a unit, if its parameters are as they were."""
        made_of, found = self._of.get(unit, (None, []))
        if made_of is None or made_of != _state(unit):
            self._of.pop(unit, None)
            return None
        return found

    def keep(self, unit: Any, buffers: list[Tensor]) -> None:
        """For the next pass."""
        if not torch.is_inference_mode_enabled():  # tensors of that mode are of no use outside of it
            self._of[unit] = _state(unit), buffers


def _state(unit: Any) -> tuple[int, list[int]]:
    return unit.version(), [id(group.checked()) for group in unit.groups]
