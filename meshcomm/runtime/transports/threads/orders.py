"""Ranks of one process in another order than the usual one: drawn by a seed, or given turn by turn.

::

    World           a rank runs until it has to wait; then the one that has been ready for longest
    OrderedWorld    wherever a rank begins, issues a call or has waited, an Order says which of the ready ones goes on

Collectives meet by number and messages by (source, destination, tag), so no order makes another result: ranks form a
Kahn network. What can make one is heard here too: ``done()``, time-outs, and threads of the program's own.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NamedTuple

from meshcomm.runtime.call import told
from meshcomm.runtime.callsite import Spot, call_spot, site_at
from meshcomm.runtime.recorder import made
from meshcomm.runtime.transports.threads.scheduler import Rank, Waited, World, current_rank


class Issue(NamedTuple):
    """A call that a rank has issued."""

    rank: int
    what: str
    spot: Spot

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what} at {site_at(self.spot)}"


class Order:
    """Whose turn it is, and what came of it.

    ``first`` gives the first turns, by index of the rank; after them a rank goes on until it has to wait, as usual, or,
    with a ``seed``, whoever is drawn.
    """

    def __init__(self, seed: str | None = None, first: Sequence[int] = ()) -> None:
        self._drawn = None if seed is None else random.Random(seed)
        self._first = first
        self.turns: list[int] = []
        """Who was given each turn that more than one rank could have."""
        self.issued: list[Issue] = []
        self.heard: dict[str, str] = {}
        """What can make a result depend on the order, and where it was first seen."""

    def choose(self, ready: Sequence[Rank], usual: int) -> int:
        """Which of these goes on."""
        at, turn = usual, len(self.turns)
        if turn < len(self._first):
            at = next((i for i, rank in enumerate(ready) if rank.index == self._first[turn]), usual)
        elif self._drawn is not None:
            at = self._drawn.randrange(len(ready))
        self.turns.append(ready[at].index)
        return at

    def hear(self, what: str, where: str) -> None:
        """Something of which a result can depend on the order."""
        self.heard.setdefault(what, where)


class _Ready(deque[Rank]):
    """Those that can go on; an order says which one does."""

    def __init__(self, ranks: Sequence[Rank], order: Order) -> None:
        super().__init__(ranks)
        self._order = order
        self._begun = False
        self.stays = False
        """Whether, as usual, the one that came last would go on."""

    def popleft(self) -> Rank:
        """The next one: the first rank of all begins, when all threads are there, and gives way at once."""
        at = len(self) - 1 if self.stays else 0
        if self._begun and len(self) > 1:
            at = self._order.choose(tuple(self), at)
        self._begun, self.stays = True, False
        found = self[at]
        del self[at]
        return found


class OrderedWorld(World):
    """All ranks of one launch, in turns that an order gives."""

    def __init__(self, size: int, limit: timedelta | None, order: Order, **more: Any) -> None:
        super().__init__(size, limit, **more)
        self._order = order
        self.watchful = True
        self._ready: _Ready = _Ready(self.ranks, order)
        self._within: set[int] = set()  # ranks that wait, or look whether something is done

    def run(self, body: Callable[[], Any]) -> list[Any]:
        """As usual; threads that the ranks start are heard of."""
        before = threading.getprofile()

        def begun(*event: Any) -> None:
            sys.setprofile(before)
            thread = threading.current_thread()
            if not thread.name.startswith("meshcomm rank "):
                self._order.hear("a thread", repr(thread.name))
            if before is not None:
                before(*event)

        threading.setprofile(begun)
        try:
            return super().run(body)
        finally:
            threading.setprofile(before)

    def check(self) -> None:
        """As usual; and others may run first."""
        super().check()
        rank = current_rank()
        if rank is None:
            return
        self._ready.append(rank)
        self._ready.stays = True
        self._hand_over(rank)
        super().check()
        if rank.index not in self._within and (call := made(told.call)) is not None:
            self._order.issued.append(Issue(rank.index, call.what, call_spot(2)))

    def wait(
        self,
        rank: Rank,
        waits_for: Waited,
        timeout: float | None = None,
        gives_up: Callable[[str], None] | None = None,
        last: bool = False,
    ) -> None:
        """As usual; time-outs are heard of."""
        if timeout is not None:
            self._order.hear("a time-out", str(site_at(call_spot(2))))
        with self._inside(rank):
            super().wait(rank, waits_for, timeout, gives_up, last)

    def asked(self) -> None:
        """``done()`` is heard of."""
        self._order.hear("done()", str(site_at(call_spot(2))))

    def look_away(self, rank: Rank) -> None:
        """As usual."""
        with self._inside(rank):
            super().look_away(rank)

    @contextlib.contextmanager
    def _inside(self, rank: Rank) -> Iterator[None]:
        self._within.add(rank.index)
        try:
            yield
        finally:
            self._within.discard(rank.index)


_wanted: ContextVar[Order | None] = ContextVar("order", default=None)


@contextlib.contextmanager
def ordered(order: Order) -> Iterator[None]:
    """What :func:`meshcomm.launch` starts meanwhile takes its turns in this order."""
    token = _wanted.set(order)
    try:
        yield
    finally:
        _wanted.reset(token)


def world_of(size: int, limit: timedelta | None, **more: Any) -> World:
    """All ranks of a launch, in the order that is wanted. ``more``: as a World has it."""
    order = _wanted.get()
    return World(size, limit, **more) if order is None else OrderedWorld(size, limit, order, **more)
