"""Links under guard: every primitive waits, before it moves anything, until its ranks agree on what it is.

Those that are waited for later agree on a thread of the group, one after the other, and begin there.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor

from meshcomm.errors import CommError, described, text
from meshcomm.runtime.call import Call, Said, for_later, told
from meshcomm.runtime.callsite import call_site, hinted
from meshcomm.runtime.health.attendance import all_here
from meshcomm.runtime.hooks.guard.boards import EXPIRED, GAVE_UP, LEAVING, MADE, REFUSED, Board, Entry, Group
from meshcomm.runtime.hooks.guard.guard import DEADLOCK, FEW_LOOKS, FIRST_PAUSE, LONG, Guard, Wait
from meshcomm.runtime.hooks.guard.messages import Letters
from meshcomm.runtime.hooks.guard.tasks import Begun, Limit, Queue, Task
from meshcomm.runtime.hooks.wrapped import WrappedLink
from meshcomm.runtime.lengths import dims_said
from meshcomm.runtime.pending import settled
from meshcomm.runtime.process import forks
from meshcomm.runtime.recorder import Log, recorded
from meshcomm.runtime.transports.protocol import Link, Primitive
from meshcomm.runtime.words import Words, axis_text, calls_text, place_of, sentence

__all__ = ["GuardedLink", "Room"]

_LINGER = 2.0
"""Seconds that a rank which sees a difference gives the others to come too, so that all can be told of."""
_MOST_WORDS = 4096
_DRAIN = 2.0
"""Seconds that a rank which leaves, or meets the others in a barrier, gives what was begun before."""


class GuardedLink(WrappedLink):
    """A link whose ranks compare their calls first."""

    def __init__(self, inner: Link, room: Room, log: Log) -> None:
        """``log``: of the calls, from when they are made on."""
        super().__init__(inner)
        self._log, self.room = log, room
        room.guard.rooms.add(room)

    @property
    def log(self) -> Log:
        """Its own: the one of the link inside begins when the ranks have agreed."""
        return self._log

    def announce(self, call: Call) -> None:
        """Keep it for the ring, too."""
        super().announce(call)
        self._log.call = self.call.here()

    all_reduce = recorded(WrappedLink.all_reduce)
    all_gather = recorded(WrappedLink.all_gather)
    reduce_scatter = recorded(WrappedLink.reduce_scatter)
    all_to_all = recorded(WrappedLink.all_to_all)
    permute = recorded(WrappedLink.permute)
    broadcast = recorded(WrappedLink.broadcast)
    reduce = recorded(WrappedLink.reduce)
    gather = recorded(WrappedLink.gather)
    scatter = recorded(WrappedLink.scatter)
    exchange = recorded(WrappedLink.exchange)
    barrier = recorded(WrappedLink.barrier)

    def copies(self, name: str, x: Tensor) -> bool:
        """What is begun later is read later."""
        return False

    def run(self, what: Primitive) -> Any:
        """Agree, then go."""
        room = self.room
        forks.refuse_if_forked("mesh")
        if what.name == "barrier_within":
            return self._realign(what)
        room.guard.acts()
        if what.name == "exchange":
            return room.letters.run(what, self.call, told.later)
        said = room.said(self.call, what)
        on_cpu = what.x is None or what.x.is_cpu
        if (told.later and on_cpu) or not room.idle():
            begun = room.later(said, what)
            return begun if told.later else settled(begun)
        return room.go(room.next(), said, what, for_program=True)

    def refuse(self, where: str, why: str, axis: object) -> None:
        """This rank does not make the call that the others may make: it was wrong."""
        if forks.is_fork():
            return
        room = self.room
        if where in ("send", "recv", "exchange"):
            room.guard.failed(why)
            return
        room.guard.acts()
        words = Words(place_of(axis), where, axis_text(axis), str(call_site())).write()
        room.refuse(Entry(REFUSED, (0, 0), 2, words, 0, why))

    def _realign(self, what: Primitive) -> None:
        """A meeting apart from the calls: afterwards all count them alike, whatever has failed before, along this axis
        and all others on which only ranks of this one are.
        """
        room, seconds, axis = self.room, what.key[1], self.call.axis
        words = Words(place_of(axis), "barrier", axis_text(axis), str(call_site()))
        alone = room.guard.is_alone()  # else another thread may be in the middle of the calls of another axis
        rooms = [each for each in room.guard.rooms if alone or each is room]
        inside = [each for each in rooms if set(each.group.ranks) <= set(room.group.ranks)]
        turn = room.next_turn()
        room.come_together(seconds, words)
        for each in inside:
            each.say_count(turn)
        room.guard.forgive(room.group.ranks)  # between two meetings: nobody raises anything now
        room.come_together(seconds, words)
        for each in inside:
            each.align(turn)

    def end(self) -> None:
        """No more calls."""
        self.room.end()


class Room:
    """What both forms of a guarded link share: where its calls are."""

    def __init__(self, index: int, guard: Guard, group: Group, board: Board, timeout: float) -> None:
        self.index, self.guard, self.group, self.board, self.timeout = index, guard, group, board, timeout
        self._turns = 0
        weakref.finalize(self, guard.issued.pop, group.key, None).atexit = False
        self.others = [i for i in range(len(group.ranks)) if i != index]
        self.letters = Letters(index, guard, group, timeout)
        self._number = self.void = 0
        self._errors = guard.failures  # those before are no news on an axis that is new
        self._lock = threading.Lock()
        self._words: dict[Any, Said] = {}
        self._queue: Queue | None = None

    def said(self, announced: Call, what: Primitive) -> Said:
        """Of this call; the same call at the same place in the program is put into words once."""
        axis = announced.axis
        call = announced.here(moved=what.key, send=tuple(what.send), recv=tuple(what.recv))
        key = (*call._replace(axis=None), getattr(axis, "key", None))
        try:
            found = self._words.get(key)
        except TypeError:  # an argument without a hash
            return Said.of(call)
        if found is None:
            self.guard.places = getattr(axis, "places", dict)()
            if len(self._words) >= _MOST_WORDS:
                self._words.clear()
            found = self._words[key] = Said.of(call)
        return found

    # ---------------------------------------------------------------------------------------------- numbers

    def next(self) -> tuple[int, int]:
        """The number of the call that is made now, and how many errors this rank has raised since the last one."""
        with self._lock:
            self._number += 1
            self.guard.issued[self.group.key] = self._number
            before, self._errors = self._errors, self.guard.failures
            return self._number, self._errors - before

    def next_turn(self) -> int:
        """Names a meeting that aligns numbers, the same on all ranks that come to it."""
        self._turns += 1
        return (self.group.key + self._turns) % 2**62 + 1

    def say_count(self, turn: int) -> None:
        """How many calls this rank has made."""
        if self._queue is not None:
            self._queue.drain(_DRAIN)  # all are here: what has not begun by then has no other side
            self.void = self._number
            self._queue.drain(self.timeout)
        self.letters.end_what_was_begun()
        self.board.say_count(turn, self._number)

    def align(self, turn: int) -> None:
        """Count on from the rank that has made the most calls, and one more: it is new to all; if all want to."""
        said = self.board.counts(turn)
        counts = [count for count in said if count is not None]
        if len(counts) < len(said):
            return
        with self._lock:
            self._number = max(self._number, *counts) + 1
            self._errors = self.guard.failures
            self.guard.issued[self.group.key] = self._number
        self.letters.begin_again(self._number)

    def come_together(self, seconds: float, words: Words) -> None:
        """At the store."""
        wait = Wait(self.group, 0, str(words), words.place)
        wait.id = -wait.id
        last = time.monotonic()

        def hope(keys: dict[int, str]) -> str:
            nonlocal last
            if time.monotonic() - last < LONG:
                return ""
            last, wait.keys = time.monotonic(), keys
            long()
            # Who cannot go on elsewhere is told there, and may come here then.
            gone = [self.guard.why_gone(rank, self.group.key, self._number + 1) for rank in keys]
            reason = next(filter(None, gone), "")
            if not reason:
                return ""
            return text("barrier", "not everybody will come.", got=f"{reason}; {self.guard.where_all_are()}")

        with self.guard.waiting(wait, for_program=True) as long:
            all_here(self.group.name, self.group.ranks, self.index, seconds, hope)

    def idle(self) -> bool:
        """Whether no earlier call waits for the others' agreement."""
        return self._queue is None or self._queue.idle

    def later(self, said: Said, what: Primitive) -> _Deferred:
        """Agree and begin when those before have."""
        if self._queue is None:
            self._queue = Queue()
        turn, inference, limit, later = self.next(), torch.is_inference_mode_enabled(), Limit(), told.later

        def begin() -> Any:
            with torch.inference_mode(inference), torch.no_grad(), for_later(later):
                return self.go(turn, said, what, limit, for_program=False)

        return _Deferred(self, turn[0], said, self._queue.put(begin, limit))

    def refuse(self, entry: Entry) -> None:
        """Write it, after what was called before."""
        number, _ = self.next()
        if self._queue is None or self._queue.idle:
            self.board.post(number, entry)
        else:
            self._queue.put(lambda: self.board.post(number, entry))

    def end(self) -> None:
        """Let what was begun begin, and stop."""
        if self._queue is not None:
            self._queue.drain(_DRAIN)
            self._queue.end()

    # ---------------------------------------------------------------------------------------------- meeting

    def go(
        self, turn: tuple[int, int], said: Said, what: Primitive, limit: Limit | None = None, *, for_program: bool
    ) -> Any:
        """Meet, then go. Who is interrupted when all have come does its part first: the others go."""
        interrupted = self.meet(turn, said, what, limit, for_program)
        self.board.forget(turn[0])
        found = what.go()
        if interrupted is not None:
            raise interrupted
        return found

    def meet(
        self, turn: tuple[int, int], said: Said, what: Primitive, limit: Limit | None, for_program: bool
    ) -> BaseException | None:
        """Return when all ranks have called the same; CommError when they have not, or will not."""
        words = Words.read(said.words)
        wait = Wait(self.group, turn[0], str(words), words.place)
        meeting = _Meeting(self, turn, said, what, wait)
        if limit is not None and limit.seconds:
            meeting.not_begun(limit.seconds)
        try:
            meeting.say(MADE)
            with self.guard.waiting(wait, for_program=for_program) as long:
                meeting.wait_for_all(long, limit)
        except CommError:
            raise
        except BaseException as error:  # Ctrl-C, or what a handler of another signal raises
            if not meeting.must_stay(f"it was interrupted by {described(error)}"):
                raise
            return error
        return None


class _Meeting:
    """One call of one rank, from its entry until all ranks agree."""

    def __init__(self, room: Room, turn: tuple[int, int], said: Said, what: Primitive, wait: Wait) -> None:
        self.room, self.said, self.what, self._wait = room, said, what, wait
        self.number, self.errors = turn
        self.missing = list(room.others)
        self.found: dict[int, Entry] = {}

    def say(self, state: int, why: str = "") -> None:
        """Write this rank's entry."""
        self.room.board.post(self.number, Entry.of(self.said, self.errors, state, why))

    def wait_for_all(self, long: Callable[[], None], limit: Limit | None) -> None:
        """Look, give way, sleep; when that is long, tell, and see whether there is hope, or ``limit`` says to stop."""
        start = time.monotonic()
        looks, pause, next_look = 0, FIRST_PAUSE, start + LONG
        while not self._look():
            if limit is not None and limit.seconds and self.missing:
                self._withdraw(limit.seconds)
            looks += 1
            if looks < FEW_LOOKS:
                os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
                continue
            time.sleep(pause)
            pause = min(1.2 * pause, 1e-3)
            now = time.monotonic()
            if now < next_look:
                continue
            next_look = now + LONG
            long()
            self._hear()
            if self._why(now - start, sure=False):
                self._leave(now - start)

    def _look(self) -> bool:
        """Whether all have come; none of them is about to give up, for all or none may go on."""
        last = -1
        for i in list(self.missing):
            entry = self.room.board.look(i, self.number)
            if entry is not None:
                last = i
                self.missing.remove(i)
                self._compare(i, entry)
        if self.missing:
            return False
        for i in [i for i, entry in self.found.items() if i != last or entry.state == LEAVING]:
            entry = self.room.board.look(i, self.number)
            assert entry is not None
            self._compare(i, entry)
        if any(entry.state != MADE for entry in self.found.values()):
            return False
        self._check_lengths()
        return True

    def _hear(self) -> None:
        """Whether one that came has given up meanwhile, without a reason that this rank finds, too."""
        for i in list(self.found):
            entry = self.room.board.look(i, self.number)
            if entry is not None and entry.state == EXPIRED:
                self._compare(i, entry)

    def _compare(self, index: int, entry: Entry) -> None:
        self.found[index] = entry
        if not entry.agrees(self.said, self.errors) or entry.state in (GAVE_UP, REFUSED, EXPIRED):
            self._differ()

    def _check_lengths(self) -> None:
        """What goes from one rank to another has one length for both: every rank compares all of them, so that all find
        the same.
        """
        if self.what.name != "all_to_all":
            return
        words = {i: entry.words for i, entry in self.found.items()}
        words[self.room.index] = Words.read(self.said.words)
        if not all(each.send for each in words.values()):  # too many to be told
            return
        if any(words[i].send[j] != words[j].recv[i] for i in words for j in words):
            self._differ()

    def _differ(self) -> NoReturn:
        """Say who called what, when those that are about to come have come."""
        end = time.monotonic() + _LINGER
        while self.missing and time.monotonic() < end:
            for i in list(self.missing):
                entry = self.room.board.look(i, self.number)
                if entry is not None:
                    self.missing.remove(i)
                    self.found[i] = entry
            time.sleep(1e-3)
        made = [entry for entry in self.found.values() if entry.state != REFUSED]
        if not all(self.said.agrees(entry.digest, entry.gradient) for entry in made):
            calls = [Words.read(self.said.words), *(entry.words for entry in made)]
            self._fail("the ranks made different calls.", calls_text(calls), self._lengths())
        odd = [entry.words.place for entry in made if entry.errors != self.errors]
        if odd:
            me = Words.read(self.said.words).place
            got = f"{', '.join([me] if self.errors else odd)} has raised an error in another call"
            self._fail("not all ranks have come here by the same calls.", got)
        gone = [entry for entry in self.found.values() if entry.state in (GAVE_UP, REFUSED, EXPIRED)]
        if gone:
            self._fail("not all ranks are in this call any more.", _given_up(gone))
        self._fail(
            "the ranks made different calls.",
            calls_text([Words.read(self.said.words), *(e.words for e in made)]),
            self._lengths(),
        )

    def _lengths(self) -> str:
        """What is said where tensors of other lengths are all that differs."""
        words = {i: entry.words for i, entry in self.found.items() if entry.state != REFUSED}
        words[self.room.index] = Words.read(self.said.words)
        return dims_said({i: words[i].call for i in sorted(words)}, len(self.room.group.ranks))

    def _why(self, seconds: float, *, sure: bool) -> str:
        """Why it makes no sense to wait any more."""
        if self.number <= self.room.void:
            return "the ranks have met in a barrier since, which ends what was begun before"
        ranks = [self.room.group.ranks[i] for i in self.missing]
        reason = self.room.guard.why_never(self._wait, ranks, sure=sure)
        return reason or ("late" if seconds > self.room.timeout else "")

    def _leave(self, seconds: float) -> None:
        """Give up, unless the others have come meanwhile: those that come now see it, and do not go on either."""
        self.say(LEAVING)
        reason = "" if self._all_came() else self._why(seconds, sure=True)
        if not reason:
            self.say(MADE)
        elif reason == "late":
            self._late(seconds)
        elif reason.startswith(DEADLOCK):
            self._fail("deadlock: ranks wait for each other.", reason)
        else:
            self._fail("not all ranks will come.", f"{reason}; {self.room.guard.where_all_are()}")

    def _withdraw(self, seconds: float) -> None:
        """The same, because who waits for it has a time-out of its own."""
        self.say(LEAVING)
        if not self._all_came():
            self._late(seconds, EXPIRED)
        self.say(MADE)

    def must_stay(self, why: str) -> bool:
        """Give up for this reason, unless the others have come: then they go on, and so does this rank."""
        try:
            self.say(LEAVING)
            if self._all_came():
                self.say(MADE)
                self.wait_for_all(lambda: None, None)
                return True
        except CommError:  # they have not called the same, or somebody has given up: that is said already
            return False
        self.say(GAVE_UP, why)
        return False

    def not_begun(self, seconds: float) -> NoReturn:
        """Tell the others, who may be there, that this rank has given up before it could come."""
        self._fail(*_not_begun(seconds), state=EXPIRED)

    def _all_came(self) -> bool:
        self._look()
        return not self.missing

    def _late(self, seconds: float, state: int = GAVE_UP) -> NoReturn:
        ranks = self.room.group.ranks
        name = self.room.guard.name
        absent = ", ".join(name(ranks[i]) for i in self.missing)
        came = ", ".join(name(rank) for i, rank in enumerate(ranks) if i not in self.missing)
        since = time.strftime("%H:%M:%S", time.localtime(self._wait.since))
        what = f"not all ranks came within {seconds:.3g} s, since {since}."
        got = f"not there: {absent}; there: {came}; {self.room.guard.where_all_are()}"
        self._fail(what, got, state=state)

    def _fail(self, what: str, got: str, more: str = "", state: int = GAVE_UP) -> NoReturn:
        self.say(state, f"{what} {got}")
        raise CommError(hinted(_told(self.said, self.number, what, got) + more))


def _told(said: Said, number: int, what: str, got: str) -> str:
    """Why a call is given up, and what to do."""
    words = Words.read(said.words)
    return text(
        words.call.split(" ", 1)[0],
        what,
        got=f"{got}\n  here: {words.place} called {words}, call {number} of this axis",
        fix="every rank of an axis must make the same calls on it in the same order;"
        " after an error that was caught, meet with mc.barrier(axis, timeout=...)",
    )


def _not_begun(seconds: float) -> tuple[str, str]:
    """Of a call that was given up while one before it waited."""
    return f"not begun within {seconds:.3g} s.", "a call before it on this axis still waits for the others"


def _given_up(entries: Iterable[Entry]) -> str:
    """What the ranks say that have not made the call, or have given it up."""
    refused = [entry for entry in entries if entry.state == REFUSED]
    if refused:
        first = refused[0]
        did = sentence(first.words.call, "", first.words.site)
        return f"{first.words.place} called {did} and has raised: {first.why}"
    first = next(entry for entry in entries if entry.state in (GAVE_UP, EXPIRED))
    return f"{first.words.place} called {first.words} and has given up: {first.why}"


# -------------------------------------------------------------------------------------------------------- for later


class _Deferred(Begun):
    """A call on the group's thread, and then whatever its transport gives."""

    __slots__ = ("_number", "_room", "_said")

    def __init__(self, room: Room, number: int, said: Said, task: Task) -> None:
        super().__init__(task)
        self._room, self._number, self._said = room, number, said

    def waiting(self) -> AbstractContextManager[None]:
        """The others may want to know."""
        return self._room.guard.program_waits((self._room.group.key, self._number, 0))

    def withdraw(self, seconds: float) -> bool:
        """Give up, unless all have come."""
        return self._task.withdraw(seconds, self._behind)

    def _behind(self, seconds: float) -> CommError:
        return CommError(hinted(_told(self._said, self._number, *_not_begun(seconds))))
