"""Links under guard: no primitive moves anything before its ranks agree on what it is.

How they do so is the store's (:mod:`meshcomm.runtime.hooks.guard.stored`) or a mailbox's
(:mod:`meshcomm.runtime.hooks.guard.mail`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Hashable, Iterable
from typing import Any

from meshcomm.errors import CommError, described, text
from meshcomm.runtime.call import AXIS, BEHIND, Call
from meshcomm.runtime.callsite import call_site, in_backward
from meshcomm.runtime.health.attendance import Gathering
from meshcomm.runtime.hooks.guard.boards import Board, Entry, Group
from meshcomm.runtime.hooks.guard.guard import LONG, Guard, Wait
from meshcomm.runtime.hooks.guard.messages import Letters
from meshcomm.runtime.hooks.stack import UNKNOWN, Hook, Running
from meshcomm.runtime.pending import begin_all, queued
from meshcomm.runtime.process import forks
from meshcomm.runtime.recorder import Log, recorded
from meshcomm.runtime.words import Words, axis_text, place_of

_MOST = 4096
"""The calls that are known before all of them are forgotten."""


class Guarded(Hook):
    """A link's ranks compare their calls first."""

    compares = True
    log: Log

    def __init__(self, room: Room, log: Log) -> None:
        """``log``: of the calls, from when they are made on; the transport's begins when the ranks have agreed."""
        self.log, self.room = log, room
        room.guard.rooms.add(room)

    def announce(self, call: Call) -> None:
        """Keep it for the ring, and for the comparison of its primitives, with the user's line."""
        said = self.room.known_as(call)
        self.log.call = said.here
        self.room.announced = call, said

    def run(self, what: Running) -> Any:
        """Agree, then go."""
        forks.refuse_if_forked("mesh")
        if what.name == "barrier_within":
            return self._realign(what)
        self.room.guard.acts()
        return self._exchange(what) if what.name == "exchange" else self.agree_and_go(what)

    def agree_and_go(self, what: Running) -> Any:
        """A primitive that all ranks make."""
        raise NotImplementedError

    def _exchange(self, what: Running) -> Any:
        return self.room.letters.run(what)

    _exchange = recorded(_exchange, "run")

    def refuse(self, where: str, why: str, axis: object) -> None:
        """This rank does not make the call that the others may make: it was wrong."""
        if forks.is_fork():
            return
        room = self.room
        if where in ("send", "recv", "exchange"):
            room.guard.failed(why)
            return
        room.guard.acts()
        room.refuse(Words(place_of(axis), where, axis_text(axis), str(call_site())), why)

    def _realign(self, what: Running) -> None:
        """A meeting apart from the calls: afterwards all count them alike, whatever has failed before, along this axis
        and all others on which only ranks of this one are.
        """
        room, seconds, axis = self.room, what.args[0], what.call.axis
        words = Words(place_of(axis), "barrier", axis_text(axis), str(call_site()))
        alone = room.guard.is_alone()  # else another thread may be in the middle of the calls of another axis
        rooms = [each for each in room.guard.rooms if alone or each is room]
        inside = [each for each in rooms if set(each.group.ranks) <= set(room.group.ranks)]
        gathering = Gathering(room.group.name, room.group.ranks, room.index, steps=2)
        turn = (room.group.key + gathering.number) % 2**62 + 1  # which is the same on all ranks
        try:
            room.come_together(gathering, 0, seconds, words)
            for each in inside:
                each.say_count(turn)
            room.guard.forgive(room.group.ranks)  # between two steps: nobody raises anything now
            room.come_together(gathering, 1, seconds, words)
            self._align(inside, turn)
        except CommError:
            raise
        except BaseException as error:  # Ctrl-C, or what a handler of another signal raises
            if gathering.give_up(error):  # else no rank counts anew
                self._align(inside, turn)
            raise

    def _align(self, rooms: Iterable[Room], turn: int) -> None:
        """Who is interrupted here does it again, from the beginning."""
        for each in rooms:
            if not each.align(turn) and each is self.room:
                what = "the ranks met, and do not know how many calls they have made."
                raise CommError(text("barrier", what, fix="make a new mesh"))

    def end(self) -> None:
        """No more calls."""
        self.room.end()


class Said:
    """A call at one line of the program, and what this rank says of it."""

    __slots__ = ("gradient", "here", "primitives")

    def __init__(self, here: Call) -> None:
        self.here, self.gradient = here, here.gradient
        self.primitives: dict[Hashable, Any] = {}
        """By all that makes them what they are on this rank."""


def _make_room(known: dict[Hashable, Any]) -> None:
    if len(known) >= _MOST:
        known.clear()


class Room:
    """Where the calls of a guarded link are."""

    void = 0
    """The last call that a barrier has ended."""

    def __init__(self, index: int, guard: Guard, group: Group, board: Board, timeout: float) -> None:
        self.index, self.guard, self.group, self.board, self.timeout = index, guard, group, board, timeout
        self.announced: tuple[Call | None, Said] = None, Said(UNKNOWN)
        """The last call, and what is known of it."""
        self.known: dict[Hashable, Any] = {}
        """A :class:`Said` for each call and line. Who puts words into memory that is written over clears it then."""
        self.leaves = threading.RLock()
        """Held by the thread that is about to give up a call, or sees that it stays."""
        weakref.finalize(self, guard.issued.pop, group.key, None).atexit = False
        self.others = [i for i in range(len(group.ranks)) if i != index]
        self.letters = Letters(index, guard, group, timeout)
        self._errors = guard.failures  # those before are no news on an axis that is new

    def known_as(self, call: Call) -> Said:
        """What is known of such a call of this line."""
        axis = call.axis
        key = call[:AXIS], call[BEHIND:], call_site(), in_backward(), getattr(axis, "key", None)
        try:
            said: Said | None = self.known.get(key)
        except TypeError:  # an argument without a hash
            return Said(call.here())
        if said is None:
            _make_room(self.known)
            said = self.known[key] = Said(call.here())
        return said

    def put(self, what: Running, x: Any) -> tuple[Said, Any]:
        """What is said of a primitive, and of its call; put into words once for each line. ``x``: ``what.like``."""
        announced, said = self.announced
        if announced is not what.call:  # another thread's, or nobody's
            said = self.known_as(what.call)
        more = tuple(map(tuple, what.runs)) if what.name == "all_to_all" else what.args[1 + (what.name == "scatter") :]
        key = what.name, more, None if x is None else (x.dtype, x.device, x.shape)
        found = said.primitives.get(key)
        if found is None:
            _make_room(said.primitives)
            found = said.primitives[key] = self.learn(self._in_words(what, said.here))
        return said, found

    def learn(self, entry: Entry) -> Any:
        """What is to be known of it."""
        return entry

    def _in_words(self, what: Running, here: Call) -> Entry:
        send, recv = map(tuple, what.runs)
        call = here._replace(moved=what.key, send=send, recv=recv)
        self.guard.places = getattr(what.call.axis, "places", dict)()
        said, x = Entry.of(call), what.like
        if x is None or x.is_cpu:
            return said
        words = call.words
        return said._replace(data=words._replace(call=f"{words.call} on {x.device.type}").write())

    # ---------------------------------------------------------------------------------------------- numbers

    @property
    def number(self) -> int:
        """Of the last call."""
        raise NotImplementedError

    def refuse(self, words: Words, why: str) -> None:
        """This rank does not make a call."""
        raise NotImplementedError

    def say_count(self, turn: int) -> None:
        """How many calls this rank has made."""
        self.letters.end_what_was_begun()
        self.board.say_count(turn, self.number)

    def align(self, turn: int) -> bool:
        """Count on from the rank that has made the most calls, and one more: it is new to all; if all want to. Whether
        they do. What is done twice is the same.
        """
        said = self.board.counts(turn)
        counts = [count for count in said if count is not None]
        if len(counts) < len(said):
            return False
        number = max(counts) + 1
        self.count_from(number)
        self._errors = self.guard.failures
        self.guard.issued[self.group.key] = number
        self.letters.begin_again(number)
        return True

    def count_from(self, number: int) -> None:
        """All are here."""
        raise NotImplementedError

    def errors_since(self) -> int:
        """How many errors this rank has raised since its last call here."""
        before, self._errors = self._errors, self.guard.failures
        return self._errors - before

    def whereabouts(self) -> str:
        """What the ranks of the world wait in, where it can be known."""
        try:
            return self.guard.where_all_are()
        except CommError as error:  # the store is lost
            return described(error)

    def come_together(self, gathering: Gathering, step: int, seconds: float, words: Words) -> None:
        """At the store."""
        wait = Wait(self.group, 0, str(words), words.place)
        wait.id = -wait.id
        last = time.monotonic()

        def hope(keys: dict[int, str]) -> str:
            nonlocal last
            if queued:
                begin_all()
            if time.monotonic() - last < LONG:
                return ""
            last, wait.keys = time.monotonic(), keys
            long()
            # Who cannot go on elsewhere is told there, and may come here then.
            gone = [self.guard.why_gone(rank, self.group.key, self.number + 1) for rank in keys]
            reason = next(filter(None, gone), "")
            if not reason:
                return ""
            return text("barrier", "not everybody will come.", got=f"{reason}; {self.guard.where_all_are()}")

        with self.guard.waiting(wait, for_program=True) as long:
            gathering.come(seconds, hope, step)

    def end(self) -> None:
        """No more calls."""
