"""Messages under guard: who sends and who receives say so at the store, and go on when both sides have.

So a send returns when it is received, as among the ranks of one process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from meshcomm.errors import CommError, shape_text, text
from meshcomm.runtime.callsite import call_site
from meshcomm.runtime.guard import DEADLOCK, LONG, Guard, Wait
from meshcomm.runtime.guard_board import Group
from meshcomm.runtime.guard_store import the_store
from meshcomm.runtime.guard_tasks import Begun, Task
from meshcomm.runtime.protocol import Note
from meshcomm.runtime.said import Words, axis_text, place_of
from meshcomm.runtime.wrapped import Primitive

__all__ = ["Letters"]

Route = tuple[int, int, int]
"""Source, destination, tag."""
_PAUSE = 2e-3
_NEVER = 2**62
"""The number of a call that nobody has made: what has been sent is at the store."""


class _Side(NamedTuple):
    """One message, on one of its sides."""

    mine: str
    """The key that this rank writes."""
    theirs: str
    other: int
    shown: str
    """``f32[8]``."""
    sends: bool


class Letters:
    """The messages of one group."""

    def __init__(self, index: int, guard: Guard, group: Group, timeout: float) -> None:
        self._index, self._guard, self._group, self._timeout = index, guard, group, timeout
        self._counts: dict[tuple[Route, bool], int] = {}
        self._last: dict[Route, threading.Event] = {}
        self._lock = threading.Lock()
        self._unfit: list[_Side] = []
        self._left: list[str] = []  # keys that nobody may come to read
        self._since = 0

    def run(self, what: Primitive, note: Note, later: bool) -> Any:
        """Meet the other sides, then go; on a thread of its own if it is waited for later."""
        words = Words(place_of(note.axis), self._call_text(what, note), axis_text(note.axis), str(call_site()))
        with self._lock:
            sides, before, over = self._take_places(what)
        self._say(sides, words)
        if later:
            return _posted(lambda: self._deliver(sides, words, before, over, what, for_program=False))
        return self._deliver(sides, words, before, over, what, for_program=True)

    def begin_again(self, number: int) -> None:
        """Count anew; ``number`` is one that all ranks have agreed on, and higher than the last."""
        store = the_store()
        with self._lock:
            for key in self._left:
                store.delete_key(key)
            self._left.clear()
            self._unfit.clear()
            self._counts.clear()
            self._since = number

    def _call_text(self, what: Primitive, note: Note) -> str:
        sent = [f"to {dst} (tag {tag}) {shape_text(x.dtype, x.shape)}" for x, dst, tag in what.posts]
        got = [f"from {src} (tag {tag}) {shape_text(dtype, shape)}" for src, shape, dtype, tag, _ in what.wants]
        return f"{note.what} {', '.join(sent + got)}"

    def _take_places(self, what: Primitive) -> tuple[list[_Side], list[threading.Event], threading.Event]:
        """Messages of one route keep their order: these come after ``before``."""
        me, sides, before, over = self._index, [], [], threading.Event()
        todo = [((me, dst, tag), dst, shape_text(x.dtype, x.shape), True) for x, dst, tag in what.posts]
        todo += [((src, me, tag), src, shape_text(dtype, shape), False) for src, shape, dtype, tag, _ in what.wants]
        for route, other, shown, sends in todo:
            count = self._counts[route, sends] = self._counts.get((route, sends), 0) + 1
            key = f"{self._group.name}/message/{self._since}/{route[0]}>{route[1]}/{route[2]}/{count}"
            keys = (f"{key}/sent", f"{key}/wanted") if sends else (f"{key}/wanted", f"{key}/sent")
            sides.append(_Side(*keys, other, shown, sends))
            last = self._last.get(route)
            if last is not None and not last.is_set():
                before.append(last)
            self._last[route] = over
        return sides, before, over

    def _say(self, sides: list[_Side], words: Words) -> None:
        store = the_store()
        for side in sides:
            store.set(side.mine, json.dumps([side.shown, words.place, str(words)]))

    def _deliver(
        self, sides: list[_Side], words: Words, before: list[threading.Event], over: threading.Event,
        what: Primitive, *, for_program: bool,
    ) -> Any:  # fmt: skip
        try:
            for each in before:
                each.wait()
            self._meet(sides, words, for_program)
            with torch.no_grad():
                return what.go()
        finally:
            over.set()

    def _meet(self, sides: list[_Side], words: Words, for_program: bool) -> None:
        store, start = the_store(), time.monotonic()
        ranks = self._group.ranks
        wait = Wait(self._group, _NEVER, str(words), words.place, {ranks[side.other]: side.theirs for side in sides})
        left = list(sides)
        came: list[_Side] = []
        try:
            self._wait(wait, left, came, words, for_program, start)
        except BaseException as error:  # the others are not to go on without this rank
            nothing = json.dumps([f"nothing, for it has given up: {error}", words.place, str(words)])
            for side in [side for side in sides if side not in self._unfit]:  # who differs knows by itself
                store.set(side.mine, nothing)
            self._left += [side.mine for side in sides]
            raise
        finally:
            for side in came:
                store.delete_key(side.theirs)

    def _wait(
        self, wait: Wait, left: list[_Side], came: list[_Side], words: Words, for_program: bool, start: float
    ) -> None:
        store, ranks, next_look = the_store(), self._group.ranks, start + LONG
        with self._guard.waiting(wait, for_program=for_program) as long:
            while left:
                for side in [side for side in left if store.check([side.theirs])]:
                    left.remove(side)
                    came.append(side)
                    self._compare(side, words)
                if left:
                    time.sleep(_PAUSE)
                now = time.monotonic()
                if left and now > next_look:
                    next_look = now + LONG
                    wait.keys = {ranks[side.other]: side.theirs for side in left}
                    long()
                    self._hope(wait, left, words, now - start)

    def _compare(self, side: _Side, words: Words) -> None:
        store = the_store()
        shown, place, theirs = json.loads(store.get(side.theirs))
        if shown != side.shown:
            self._unfit.append(side)
            mine, other = ("sends", "expects") if side.sends else ("expects", "sends")
            self._fail(
                "a message does not fit.",
                f"{words.place} {mine} {side.shown}, {place} {other} {shown}: {theirs}",
                words,
            )

    def _hope(self, wait: Wait, left: list[_Side], words: Words, waited: float) -> None:
        missing = [self._group.ranks[side.other] for side in left]
        reason = self._guard.why_never(wait, missing, sure=True)
        if reason and any(the_store().check([side.theirs]) for side in left):
            return
        if reason.startswith(DEADLOCK):
            self._fail("deadlock: ranks wait for each other.", reason, words)
        if reason:
            self._fail("not all messages will come.", f"{reason}; {self._guard.where_all_are()}", words)
        if waited > self._timeout:
            absent = ", ".join(f"rank {rank}" for rank in missing)
            self._fail(f"not done within {waited:.3g} s.", f"absent: {absent}; {self._guard.where_all_are()}", words)

    def _fail(self, what: str, got: str, words: Words) -> NoReturn:
        where = words.call.split(" ", 1)[0]
        fix = "to each send belongs one receive, of the same shape, dtype and tag, on the other rank"
        raise CommError(text(where, what, got=f"{got}\n  here: {words.place} called {words}", fix=fix))


def _posted(fn: Callable[[], Any]) -> Begun:
    """Messages on their way, on a thread of their own."""
    task = Task(fn)
    threading.Thread(target=task.run, name="meshcomm letters", daemon=True).start()
    return Begun(task)
