"""Which calls on a link have a backward, in the order in which they were made."""

from __future__ import annotations

import weakref
from typing import Any


class Ledger:
    """One link's calls that autograd will run backwards."""

    def __init__(self) -> None:
        self.at_once = 0
        """How many gave their result at once."""
        self.modules = 0
        """How many modules were given to the link that have their gradients summed over it, by all of its ranks."""
        self._begun: list[weakref.ref[Any]] = []  # from the oldest that is not waited for on

    def begin(self, call: Any) -> None:
        """A call that is waited for later; it has an attribute ``waited``."""
        self._begun.append(weakref.ref(call))

    def wait(self, call: Any) -> list[weakref.ref[Any]]:
        """The calls begun after this one, which has now been waited for."""
        call.waited = True
        at = next(i for i, other in enumerate(self._begun) if other() is call)
        after = self._begun[at + 1 :]
        while self._begun and ((oldest := self._begun[0]()) is None or oldest.waited):
            self._begun.pop(0)
        return after
