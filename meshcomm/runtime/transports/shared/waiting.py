"""Waiting for other ranks: look, give way, sleep, and now and then see whether they are alive."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from meshcomm.runtime.health import peers
from meshcomm.runtime.process.boxes import HERE, Box
from meshcomm.runtime.process.neighbours import Neighbour

__all__ = ["Wait"]

_LOOKS = 100
"""How often a rank looks and gives way before it sleeps."""
_FIRST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3
_ALIVE = 0.05
"""Seconds between looks at whether the others are alive."""


class _Group(Protocol):
    """Which ranks there are."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """By index."""


class _Near(Protocol):
    """What is seen of them."""

    @property
    def neighbours(self) -> tuple[Neighbour | None, ...]:
        """Their processes."""

    def box(self, index: int) -> Box | None:
        """The mailbox of one, once it has made it."""


class Waiting(Protocol):
    """A call that waits."""

    @property
    def link(self) -> _Group:
        """Its group."""

    @property
    def mail(self) -> _Near:
        """The mailboxes of that."""

    def fail(self, what: str) -> NoReturn:
        """One of the others is gone."""

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
            (self._sees or self._see)(missing)
        if self._end is not None and now > self._end:
            self._call.expire(list(missing))

    def _see(self, missing: Sequence[int]) -> None:
        mail = self._call.mail
        for i in missing:
            box, neighbour = mail.box(i), mail.neighbours[i]
            assert neighbour is not None
            who = f"rank {self._call.link.ranks[i]}, process {neighbour.pid}"
            ended = neighbour.is_gone()
            if ended or (box is not None and box.state() != HERE):
                why = peers.reason(self._call.link.ranks[i])
                # Who has said why has left, whether or not its process has come to its end meanwhile.
                how = "has ended" if ended and not why else peers.LEFT
                self._gone[i] = f"index {i} {how} ({who})" + (f": {why}" if why else "")
