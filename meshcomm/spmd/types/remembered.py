"""The pvarys that the checker of varying types has made: each is made once, for all uses of a value."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from meshcomm.spmd.types.rules.operands import version

_LATELY = 64
"""How many values a pvary is remembered for until the next backward; parameters are remembered all the time."""


def _nowhere(x: Tensor) -> bool:
    return False


class Varied:
    """What pvary made of a tensor, by axes."""

    __slots__ = ("again", "by", "dtype", "lies_as", "newest", "node", "varied", "version", "wrapped", "x")

    def __init__(self, x: Tensor) -> None:
        self.x, self.version, self.node = x, version(x), x.grad_fn
        self.by: dict[frozenset[str], Tensor] = {}
        self.wrapped = False
        """Some of it was made under a transform of torch.func, which may have ended."""
        self.newest = False
        """It was used since the last one was made, or is never forgotten."""
        self.again: frozenset[str] | None = None
        """The axes of the one that was asked for last, ``varied``, if ``x`` is a leaf and nothing was wrapped."""
        self.varied: Tensor | None = None
        self.dtype: torch.dtype | None = None
        """Of that one."""
        self.lies_as: Callable[[Tensor], bool] = _nowhere
        """Whether a tensor has the memory of that one, in the same way."""

    def put(self, axes: frozenset[str], y: Tensor) -> None:
        """Remember another one; the one that was asked for last may be what it is in place of, and is held no more."""
        self.by[axes] = y
        self.again = self.varied = self.dtype = None
        self.lies_as = _nowhere


class Remembered:
    """What was made of which tensor, as long as that is what it was then."""

    def __init__(self) -> None:
        super().__init__()
        self._given_as: dict[int, tuple[Tensor, int, str]] = {}
        self._pvaried: dict[int, Varied] = {}
        """By id, the tensors of which a pvary was made."""
        self._lately: OrderedDict[int, Varied] = OrderedDict()
        """Those of them that are forgotten with the next backward, or earlier: when the last one was made, they stood
        in the order of use."""
        self._newest: list[Varied] = []
        """Those of these that were used since."""

    def _remembered(self, x: Tensor) -> Varied:
        key = id(x)
        entry = self._pvaried.get(key)
        if entry is None or entry.version != version(x) or entry.node is not x.grad_fn:
            if entry is not None:
                self.forget_varied((x,))
            entry = self._pvaried[key] = Varied(x)
            if isinstance(x, Parameter) or key in self._given_as:
                entry.newest = True
            else:  # it may have ended for everybody else
                for used in self._newest:
                    used.newest = False
                    self._lately.move_to_end(id(used.x))
                self._newest.clear()
                self._lately[key] = entry
                self._use(entry)
                if len(self._lately) > _LATELY:
                    del self._pvaried[self._lately.popitem(last=False)[0]]
        elif not entry.newest:
            self._use(entry)
        return entry

    def _use(self, entry: Varied) -> None:
        """It is used now, later than all others that were not used since the last one was made."""
        self._newest.append(entry)
        entry.newest = True

    def _forget_lately(self) -> None:
        """Hold nothing that was made of what may have ended."""
        for key in self._lately:
            self._pvaried.pop(key, None)
        self._newest.clear()
        self._lately.clear()

    def _forget_all(self) -> None:
        """Hold nothing."""
        self._forget_lately()
        self._pvaried.clear()

    def forget_varied(self, tensors: Iterable[Tensor]) -> None:
        """Hold nothing that was made of these tensors."""
        for x in tensors:
            self._pvaried.pop(id(x), None)
            if (entry := self._lately.pop(id(x), None)) is not None and entry.newest:
                self._newest.remove(entry)
