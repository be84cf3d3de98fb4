"""Waiting for other ranks: look and give way; then sleep, until somebody rings; now and then see who is alive::

    look, give way ──► listen ──► look ──► sleep ──► somebody has rung: look, and listen anew
     for a moment        ▲                   │
                         └───────────────────┴─────► nobody has, in that time: look, and sleep longer

Who has written something rings where somebody listens. So who listens looks once more before it sleeps: either it sees
what was written, or who wrote it sees that it listens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from meshcomm.runtime.health import peers

AWAKE = 2e-4
"""Seconds for which a rank looks and gives way before it sleeps: to be woken takes as long as a small call, and of more
ranks than cores who gives way lets those come that are waited for.
"""
_FIRST_PAUSE, _LONGEST_PAUSE = 1e-4, 1e-3
_ALIVE = 0.05
"""Seconds between looks at whether the others are alive."""


def give_way(end: float) -> float:
    """Let others run, having looked for what one of them writes. ``end``: 0 at first, then what this gave: until when
    one looks on; less than 0 when one would sleep.
    """
    now = time.monotonic()
    if end and now > end:
        return -1.0
    os.sched_yield()
    return end or now + AWAKE


class Waiting(Protocol):
    """A call that waits."""

    def listen(self) -> int:
        """Have whoever writes something ring; until that, :meth:`sleep` takes what this gave."""

    def sleep(self, heard: int, seconds: float) -> bool:
        """Until somebody rings, or the time is over; whether nobody has rung."""

    def gone_among(self, missing: Sequence[int]) -> dict[int, str]:
        """Who of these will not come, and why."""

    def fail(self, what: str) -> NoReturn:
        """One of them is gone."""

    def expire(self, missing: list[int]) -> NoReturn:
        """Time is up."""


class Wait:
    """Waiting for other ranks: look, give way, sleep, and now and then see whether they are alive."""

    __slots__ = ("_awake", "_call", "_end", "_gone", "_heard", "_next", "_pause", "_sees")

    def __init__(
        self,
        call: Waiting,
        end: float | None,
        sees: Callable[[Sequence[int]], None] | None = None,
        awake: float = AWAKE,
    ) -> None:
        """``sees``: who else asks now and then whether those that are missing will come. ``awake``: seconds, less where
        it has looked and given way before.
        """
        self._call, self._end, self._sees = call, end, sees
        self._awake, self._pause, self._next = time.monotonic() + awake, _FIRST_PAUSE, 0.0
        self._heard: int | None = None
        self._gone: dict[int, str] = {}

    def more(self, missing: Sequence[int]) -> None:
        """A little, after having looked for what is missing."""
        if self._gone and (gone := [self._gone[i] for i in missing if i in self._gone]):
            # and nothing has come that they did before they went; whose end followed from another's is not the cause
            self._call.fail(min(gone, key=peers.distance))
        now = time.monotonic()
        if now < self._awake:
            os.sched_yield()
            return
        if self._heard is None:
            self._heard = self._call.listen()
            return
        if not self._call.sleep(self._heard, self._pause):
            self._heard = None
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
