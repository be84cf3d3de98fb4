"""Messages under guard: a rank says at the store what it sends and receives, and goes on when all that goes together
has come. So a send returns when it is received, as among the ranks of one process.

The messages of one call are a batch; batches that share a message go together, all or none::

                       all have come, and none is leaving
        come ─────────────────────────────────────────────────────────► going
        │  ▲           or one of them goes                               (the transport)
        │  │ all have come: it stays
        ▼  │
      leaving ──── somebody has not come ────► gave up                   (CommError)
                   or has given up             who waits, and who comes later, sees that and gives up, too

A rank that wants to give up says that it is leaving, and then looks once more. One that sees all, and after that nobody
leaving, goes: whoever says so later finds that all have come, and stays. So nobody gives up what somebody else goes
with, and no two need to change one key. Where a message does not fit, each that sees both of its sides gives up
by itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from meshcomm.errors import CommError, described, shape_text, text
from meshcomm.runtime.call import messages_of
from meshcomm.runtime.hooks.guard.batches import GAVE_UP, GOING, LEAVING, Batch, Side, Together
from meshcomm.runtime.hooks.guard.boards import Group
from meshcomm.runtime.hooks.guard.guard import DEADLOCK, LONG, Guard, Wait
from meshcomm.runtime.hooks.guard.store import the_store
from meshcomm.runtime.hooks.guard.tasks import Begun, Limit, Task, wait_for
from meshcomm.runtime.hooks.stack import Running
from meshcomm.runtime.pending import Around, about_to_queue, begin_all, helper, queued
from meshcomm.runtime.words import Words

Route = tuple[int, int, int]
"""Source, destination, tag."""
_FIRST_PAUSE, _PAUSE = 2e-4, 2e-3
_SOON = 1e-3
"""Seconds that are up."""
_NEVER = 2**62
"""The number of a call that nobody has made: what has been sent is at the store."""
_SWEEPING = 1.0
"""Seconds for which a thread that has nothing else to do sees whether what it said has been read."""
_ONE_EACH = "to each send belongs one receive, of the same shape, dtype and tag, on the other rank"
_MET_SINCE = "the ranks have met in a barrier since, which ends what was begun before"


class Letters:
    """The messages of one group."""

    def __init__(self, index: int, guard: Guard, group: Group, timeout: float) -> None:
        self.index, self.guard, self.group, self.timeout = index, guard, group, timeout
        self._counts: dict[tuple[Route, bool], int] = {}
        self._last: dict[Route, threading.Event] = {}
        self._lock = threading.Lock()
        self._open: list[_Passage] = []
        self._left: list[str] = []  # keys that nobody may come to read
        self._going: list[tuple[str, list[str]]] = []  # words that are read until these keys are gone
        self._since = self._number = 0
        self._unclaimed: dict[Route, list[tuple[_UnderWay, int, Side]]] = {}
        """What has been asked for, and nobody waits for any more: of what call, at which place, and as what."""
        _every.add(self)

    def run(self, what: Running) -> Any:
        """Meet the other sides, then go; on a thread of its own if it is waited for later."""
        if self._unclaimed and (found := self._left_for(what)) is not None:
            return found if what.asynchronous else found.wait(None)
        words = what.call.here(messages=messages_of(*what.messages)).words
        self.guard.places = getattr(what.call.axis, "places", dict)()
        with self._lock:
            passage = self._take_places(what, words)
        if not passage.batch.sides:
            return what.go()
        passage.post()
        if what.asynchronous:
            return self._posted(passage, what)
        return passage.go(what, for_program=True)

    def _posted(self, passage: _Passage, what: Running) -> Begun:
        """On a thread of its own."""
        passage.is_helped = True
        task = Task(lambda: passage.go(what, for_program=False))

        def live() -> None:
            helper.is_one = True
            task.run()
            with contextlib.suppress(CommError):
                self._sweep_for(_SWEEPING)

        threading.Thread(target=live, name="meshcomm letters", daemon=True).start()
        return _UnderWay(passage, task)

    def leave(self, under_way: _UnderWay, place: int, side: Side) -> None:
        """Nobody waits for it any more: what comes is for who asks next, as those who send it know of no other call."""
        left = self._unclaimed.setdefault((side.other, self.index, side.tag), [])
        if (under_way, place, side) not in left:
            left.append((under_way, place, side))
            left.sort(key=lambda each: (each[0].number, each[1]))

    def _left_for(self, what: Running) -> _Claimed | None:
        """What was left, for who receives one message."""
        posts, wants = what.messages
        if posts or len(wants) != 1:
            return None
        [(src, shape, dtype, tag, _)] = wants
        left = self._unclaimed.get((src, self.index, tag), [])
        while left:
            under_way, place, side = left.pop(0)
            expected = shape_text(dtype, shape)
            if side.shown != expected:
                under_way.withdraw(_SOON)
                under_way.wait_until_decided()
            if under_way.has_failed:
                continue
            if side.shown == expected:
                return _Claimed(under_way, place, side)
            said = f"a message does not fit: index {src} sends {side.shown}, index {self.index} expects {expected}."
            raise CommError(text("recv", said, got=f"tag {tag}", fix=_ONE_EACH))
        return None

    def end_what_was_begun(self) -> None:
        """All ranks are here, and nobody calls anything: what has not come by now does not."""
        end = time.monotonic() + self.timeout
        with self._lock:
            under_way = list(self._open)
        for passage in under_way:
            passage.void = True
        for passage in under_way:
            passage.decided.wait(max(0.0, end - time.monotonic()))

    def begin_again(self, number: int) -> None:
        """Count anew; ``number`` is one that all ranks have agreed on, and higher than the last."""
        store = the_store()
        with self._lock:
            for key in [*self._left, *(state for state, _ in self._going)]:
                store.delete_key(key)
            self._left.clear()
            self._unclaimed.clear()
            self._going.clear()
            self._counts.clear()
            self._last.clear()
            self._since = number

    def keep(self, *, gone: Together | None = None, given_up: Batch | None = None) -> None:
        """What is at the store and has to stay there for now."""
        with self._lock:
            if gone is not None:
                self._going.append((gone.mine.state, gone.mine.posted()))
            if given_up is not None:
                self._left += [*given_up.posted(), given_up.state]

    def look_once_more(self) -> None:
        """Wait until each thread that waits for others has looked once more, and has gone with those who had come
        already. Else a rank may begin to send and to receive one after the other, and the other one too.
        """
        with self._lock:
            waiting = [(passage, passage.looks) for passage in self._open if passage.is_helped]
        for passage, looks in waiting:
            while passage.looks < looks + 2 and not passage.over.wait(_PAUSE):
                pass

    def close(self, passage: _Passage) -> None:
        """It is over here."""
        with self._lock:
            self._open.remove(passage)

    def sweep(self) -> bool:
        """Take away the words of batches that all have read; whether there are none left."""
        store = the_store()
        with self._lock:
            for entry in list(self._going):
                state, keys = entry
                if not any(store.check([key]) for key in keys):
                    store.delete_key(state)
                    self._going.remove(entry)
            return not self._going

    def _sweep_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.sweep() and time.monotonic() < end:
            time.sleep(10 * _PAUSE)

    def _take_places(self, what: Running, words: Words) -> _Passage:
        """Messages of one route keep their order: these come after those ``before``."""
        (posts, wants), me = what.messages, self.index
        sides, before, over = [], [], threading.Event()
        todo = [((me, dst, tag), dst, shape_text(x.dtype, x.shape), True) for x, dst, tag in posts]
        todo += [((src, me, tag), src, shape_text(dtype, shape), False) for src, shape, dtype, tag, _ in wants]
        for route, other, shown, sends in todo:
            count = self._counts[route, sends] = self._counts.get((route, sends), 0) + 1
            sides.append(Side(other, route[2], count, sends, shown))
            last = self._last.get(route)
            if last is not None and last is not over and not last.is_set():
                before.append(last)
            self._last[route] = over
        self._number += 1
        prefix = f"{self.group.name}/message/{self._since}"
        batch = Batch(prefix, me, self._number, words.place, str(words), tuple(sides))
        passage = _Passage(self, batch, words, before, over)
        if sides:
            self._open.append(passage)
        return passage


_every: weakref.WeakSet[Letters] = weakref.WeakSet()


def _look_once_more() -> None:
    for letters in list(_every):
        letters.look_once_more()


about_to_queue.append(_look_once_more)


class _Passage:
    """One batch of this rank, until it goes or is given up."""

    def __init__(
        self, letters: Letters, batch: Batch, words: Words, before: list[threading.Event], over: threading.Event
    ) -> None:
        self.letters, self.batch, self.words = letters, batch, words
        self._before, self.over = before, over
        self.decided = threading.Event()
        self.is_helped, self.looks = False, 0
        self.void = False
        self.limit = Limit()
        self._together = Together(batch)
        self.wait = Wait(letters.group, _NEVER, batch.words, batch.place)
        self._began = time.monotonic()

    def post(self) -> None:
        """Say that it has come."""
        try:
            self._together.post()
        except BaseException as error:
            self._give_up(f"it was interrupted by {described(error)}")
            self._end()
            raise

    def go(self, what: Running, *, for_program: bool) -> Any:
        """Meet, then go, in order. Who is interrupted when all have come does its part first: the others go."""
        try:
            interrupted = self._met(for_program)
            try:
                self._make_ready()
            except CommError:
                raise
            except BaseException as error:
                interrupted = error
                self._make_ready()
            with torch.no_grad():
                found = what.go()
            with contextlib.suppress(CommError):  # the store may be gone
                self.letters.sweep()
            if interrupted is not None:
                raise interrupted
            return found
        finally:
            self._end()

    def _met(self, for_program: bool) -> BaseException | None:
        try:
            with self.letters.guard.waiting(self.wait, for_program=for_program) as long:
                self._wait_for_all(long)
        except CommError:
            raise
        except BaseException as error:  # Ctrl-C, or what a handler of another signal raises
            if self._is_left():
                self._give_up(f"it was interrupted by {described(error)}")
                raise
            return error
        return None

    def _make_ready(self) -> None:
        """Say that this rank goes, and wait for what it has begun before; more than once is as once."""
        if self._together.depart():
            self.letters.keep(gone=self._together)
        self.decided.set()
        for each in self._before:
            while not wait_for(each, _PAUSE):
                self.looks += 1

    def _end(self) -> None:
        self.decided.set()
        self.over.set()
        self.letters.close(self)

    # ---------------------------------------------------------------------------------------------- meeting

    def _wait_for_all(self, long: Callable[[], None]) -> None:
        pause, next_look = _FIRST_PAUSE, self._began + LONG
        while not self._all_go():
            self.looks += 1
            if queued:
                begin_all()
            if self.limit.seconds:
                self._withdraw()
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSE)
            now = time.monotonic()
            if now > next_look:
                next_look = now + LONG
                self._tell(long)
                if self._hear():
                    return
                self._hope(now - self._began)

    def _all_go(self) -> bool:
        self._look()
        return self._together.is_met and self._hear()

    def _look(self) -> None:
        self._together.look()
        if self._together.misfit:
            self._fail("a message does not fit.", self._together.misfit)

    def _hear(self) -> bool:
        """Whether the others go: one of them does already, or all have come and nobody is leaving."""
        standing = self._together.standing()
        if standing.state == GAVE_UP:
            self._fail("not all messages will come.", standing.why, standing.why)
        return standing.state == GOING or not (standing.state or self._together.missing)

    def _tell(self, long: Callable[[], None]) -> None:
        """On the shelf."""
        ranks = self.letters.group.ranks
        self.wait.keys = {ranks[i]: key for key, i in self._together.missing.items()}
        self.wait.unless = tuple(self._together.states)
        long()

    # --------------------------------------------------------------------------------------------- giving up

    def _hope(self, waited: float) -> None:
        if not self._together.missing:
            self._stuck(waited)
        elif self._why(waited, sure=False) and self._is_left():
            reason = self._why(waited, sure=True)
            if reason:
                self._leave(reason, waited)
            self._together.stay()

    def _stuck(self, waited: float) -> None:
        """All have come, but one of them has ended, or stands still, where it was to say that it stays."""
        ranks = [self.letters.group.ranks[i] for i in self._together.standing().leaving]
        reason = self._reason(ranks, waited, sure=True) if ranks else ""
        if reason:
            self._leave(reason, waited)

    def _is_left(self) -> bool:
        """Whether this rank can give up, for no other one goes; else it stays."""
        self._together.say(LEAVING)
        self._look()
        if self._together.missing and not self._hear():
            return True
        self._together.stay()
        return False

    def _withdraw(self) -> None:
        """Who waits for this has a time-out of its own, and it is over."""
        if self._together.missing and self._is_left():
            self._leave("late", self.limit.seconds)

    def _why(self, waited: float, *, sure: bool) -> str:
        if self.void:
            return _MET_SINCE
        return self._reason([self.letters.group.ranks[i] for i in self._absent()], waited, sure=sure)

    def _reason(self, ranks: list[int], waited: float, *, sure: bool) -> str:
        reason = self.letters.guard.why_never(self.wait, ranks, sure=sure)
        return reason or ("late" if waited > self.letters.timeout else "")

    def _absent(self) -> list[int]:
        return sorted(set(self._together.missing.values()))

    def _leave(self, reason: str, waited: float) -> NoReturn:
        guard = self.letters.guard
        if reason.startswith(DEADLOCK):
            self._fail("deadlock: ranks wait for each other.", reason)
        if reason != "late":
            self._fail("not all messages will come.", f"{reason}; {guard.where_all_are()}")
        absent = ", ".join(guard.name(self.letters.group.ranks[i]) for i in self._absent())
        self._fail(f"not done within {waited:.3g} s.", f"absent: {absent or 'nobody'}; {guard.where_all_are()}")

    def _give_up(self, why: str, told: str = "") -> None:
        """``told``: what the others are, if another one has given up first."""
        self.letters.keep(given_up=self.batch)
        self._together.say(GAVE_UP, told or f"{self.batch.did} and has given up: {why}")

    def _fail(self, what: str, got: str, told: str = "") -> NoReturn:
        self._give_up(f"{what} {got}", told)
        where = self.words.call.split(" ", 1)[0]
        fix = f"{_ONE_EACH}; after an error that was caught, meet with mc.barrier(axis, timeout=...)"
        raise CommError(text(where, what, got=f"{got}\n  here: {self.batch.did}", fix=fix))


class _UnderWay(Begun):
    """Messages that are waited for later."""

    __slots__ = ("_passage",)

    def __init__(self, passage: _Passage, task: Task) -> None:
        super().__init__(task)
        self._passage = passage

    def waiting(self) -> AbstractContextManager[None]:
        """The others may want to know."""
        return self._passage.letters.guard.program_waits((0, 0, self._passage.wait.id))

    def withdraw(self, seconds: float) -> bool:
        """Give up, unless all have come."""
        self._passage.limit.seconds = seconds
        return True

    @property
    def number(self) -> int:
        """Of all batches of this rank."""
        return self._passage.batch.number

    @property
    def has_failed(self) -> bool:
        """Whether there is nothing to have of it."""
        return self._task.error is not None

    def wait_until_decided(self) -> None:
        """Whether it goes, or was given up."""
        wait_for(self._task.known, None)

    def give_up(self) -> None:
        """What comes is for who asks next."""
        for place, side in enumerate(side for side in self._passage.batch.sides if not side.sends):
            self._passage.letters.leave(self, place, side)


class _Claimed(Around):
    """One message of a call that nobody waited for any more."""

    __slots__ = ("_place", "_side")
    inside: _UnderWay

    def __init__(self, inside: _UnderWay, place: int, side: Side) -> None:
        super().__init__(inside)
        self._place, self._side = place, side

    def give_up(self) -> None:
        """The same again."""
        self.inside._passage.letters.leave(self.inside, self._place, self._side)

    def wait(self, timeout: float | None) -> Any:
        """That one alone."""
        return [super().wait(timeout)[self._place]]
