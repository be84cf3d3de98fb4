"""Which calls on a link have a backward, in the order in which they were made."""

from __future__ import annotations

import weakref
from typing import Any


class Entry:
    """One call that is waited for later, and by way of the next one those that were begun after it."""

    __slots__ = ("call", "following", "number")

    def __init__(self, call: weakref.ref[Any], number: int) -> None:
        self.call = call
        self.number = number
        self.following: Entry | None = None


class Ledger:
    """One link's calls that autograd will run backwards."""

    __slots__ = ("_last", "_open", "at_once", "modules")

    def __init__(self) -> None:
        self.at_once = 0
        """How many gave their result at once."""
        self.modules = 0
        """How many modules were given to the link that have their gradients summed over it, by all of its ranks."""
        self._open: set[weakref.ref[Any]] | None = None  # those that are not waited for, and that somebody has
        self._last: Entry | None = None

    def begin(self, call: Any) -> Entry:
        """A call that is waited for later. Where none is under way nobody will look on from the entries before."""
        if self._open is None:
            self._open = set()
        before, known = self._last, weakref.ref(call, self._open.discard)
        entry = self._last = Entry(known, 0 if before is None else before.number + 1)
        if before is not None and self._open:
            before.following = entry
        self._open.add(known)
        return entry

    def wait(self, own: Entry) -> Entry | None:
        """The last of the calls begun after the one with this entry, which has now been waited for; its own if there is
        none.
        """
        if self._open is not None:
            self._open.discard(own.call)
        return self._last
