"""The pvarys that the checker of varying types has made: each is made once, for all uses of a value.

It is remembered as long as the program has the value, for a second one would be one more sum in backward, which other
ranks may not have: what one rank alone does beside may have made it forget. A value that nobody else has is held
here, for it may be a view's or a transform's that is asked for again: a few of them, until the next backward. One that
somebody has at that backward, such as the function that calls it, is let go soon after it is nobody's.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from meshcomm._torch import without_modes
from meshcomm.spmd.types.rules.operands import version

_LATELY = 64
"""How many values are held until the next backward that nobody else may have; parameters are held all the time."""


def _nowhere(x: Tensor) -> bool:
    return False


class Varied:
    """What pvary made of a tensor, by axes."""

    __slots__ = ("again", "by", "dtype", "key", "lies_as", "newest", "node", "varied", "version", "wrapped", "x")

    def __init__(self, x: Tensor) -> None:
        self.x, self.key, self.version, self.node = x, id(x), version(x), x.grad_fn
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

    @property
    def alone(self) -> bool:
        """Whether nobody else has ``x``."""
        return sys.getrefcount(self.x) <= _own_references(self.x._base is not None and self.node is not None)


@functools.cache
def _own_references(view: bool) -> int:
    """To a value that nobody has but its pvary and who remembers that; ``view``: a result, whose base the pvary has."""
    with without_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.empty((), device="cpu", requires_grad=True)
        entry = Varied(x.view(()) if view else x)
        del x
        entry.put(frozenset(), entry.x.view_as(entry.x))
    return sys.getrefcount(entry.x)


class Remembered:
    """What was made of which tensor, as long as that is what it was then."""

    def __init__(self) -> None:
        super().__init__()
        self._given_as: dict[int, tuple[Tensor, int, str]] = {}
        self._pvaried: dict[int, Varied] = {}
        """By id, the tensors of which a pvary was made."""
        self._lately: OrderedDict[int, Varied] = OrderedDict()
        """Those of them that are held until the next backward, or not as long: when the last one was made, they stood
        in the order of use."""
        self._shared: dict[int, Varied] = {}
        """Those that are held as long as somebody else has them: who holds what was made of a value holds that, too."""
        self._young: dict[int, Varied] = {}
        """Those that are, too, since the last backward or by it: most of them are results that end with a step."""
        self._wait = 0
        """How much is done before these are looked at again: as much as there are, so that it is one look each time."""
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
                self._look_at_young()
                for used in self._newest:
                    used.newest = False
                    self._lately.move_to_end(used.key)
                self._newest.clear()
                self._lately[key] = entry
                self._use(entry)
                if len(self._lately) > _LATELY:
                    self._let_go(self._lately.popitem(last=False)[1])
        elif not entry.newest:
            self._use(entry)
        return entry

    def _use(self, entry: Varied) -> None:
        """It is used now, later than all others that were not used since the last one was made."""
        self._newest.append(entry)
        entry.newest = True

    def _let_go(self, entry: Varied) -> None:
        """Remember it as long as somebody else has the value."""
        if entry.alone:
            del self._pvaried[entry.key]
            return
        entry.newest = True
        self._young[entry.key] = entry

    def _look_at_young(self) -> None:
        """Something is done: hold none of these that nobody else has, if it is time to look."""
        self._wait -= 1
        if self._wait < 0:
            self._forget_unshared(self._young)
            self._wait = len(self._young)

    def _forget_unshared(self, held: dict[int, Varied]) -> None:
        """Hold nothing of this that nobody else has."""
        ended = [entry for entry in held.values() if entry.alone]
        for entry in ended:  # with which they end, and what their graphs hold, once all are out of these
            del held[entry.key], self._pvaried[entry.key]

    def _forget_lately(self) -> None:
        """Hold nothing that was made of what has ended."""
        self._newest.clear()
        self._shared.update(self._young)
        self._forget_unshared(self._shared)
        self._young, self._lately = dict(self._lately), OrderedDict()
        for entry in self._young.values():
            entry.newest = True
        self._forget_unshared(self._young)
        self._wait = 0

    def _forget_all(self) -> None:
        """Hold nothing."""
        self._newest.clear()
        self._lately.clear()
        self._shared.clear()
        self._young.clear()
        self._pvaried.clear()

    def forget_varied(self, tensors: Iterable[Tensor]) -> None:
        """Hold nothing that was made of these tensors."""
        for x in tensors:
            self._pvaried.pop(id(x), None)
            self._shared.pop(id(x), None)
            self._young.pop(id(x), None)
            if (entry := self._lately.pop(id(x), None)) is not None and entry.newest:
                self._newest.remove(entry)
