"""Waiting for other ranks: look, give way, sleep, and now and then see whether they are alive."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from meshcomm.runtime.health import peers

_LOOKS = 100
"""How often a rank looks and gives way before it sleeps."""
_FIRST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3
_ALIVE = 0.05
"""Seconds between looks at whether the others are alive."""


class Waiting(Protocol):
    """A call that waits."""

    def gone_among(self, missing: Sequence[int]) -> dict[int, str]:
        """Who of these will not come, and why."""

    def fail(self, what: str) -> NoReturn:
        """One of them is gone."""

    def expire(self, missing: list[int]) -> NoReturn:
        """Time is up."""


class Wait:
    """Waiting for other ranks: look, give way, sleep, and now and then see whether they are alive."""

    __slots__ = ("_call", "_end", "_gone", "_looks", "_next", "_pause", "_sees")

    def __init__(self, call: Waiting, end: float | None, sees: Callable[[Sequence[int]], None] | None = None) -> None:
        """``sees``: who else asks now and then whether those that are missing will come."""
        self._call, self._end, self._sees = call, end, sees
        self._looks, self._pause, self._next = 0, _FIRST_PAUSE, 0.0
        self._gone: dict[int, str] = {}

    def more(self, missing: Sequence[int]) -> None:
        """A little, after having looked for what is missing."""
        if self._gone and (gone := [self._gone[i] for i in missing if i in self._gone]):
            # and nothing has come that they did before they went; whose end followed from another's is not the cause
            self._call.fail(min(gone, key=peers.distance))
        self._looks += 1
        if self._looks < _LOOKS:
            os.sched_yield()
            return
        time.sleep(self._pause)
        self._pause = min(1.2 * self._pause, _LONGEST_PAUSE)
        now = time.monotonic()
        if now > self._next:
            self._next = now + _ALIVE
            if self._sees is not None:
                self._sees(missing)
            else:
                self._gone |= self._call.gone_among(missing)
        if self._end is not None and now > self._end:
            self._call.expire(list(missing))
