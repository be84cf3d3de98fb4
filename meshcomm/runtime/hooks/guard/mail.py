"""The guard where ranks share memory: a call's entry in the mailbox says what the guard wants to know, and the call is
agreed upon where it meets (:mod:`meshcomm.runtime.transports.shared.call` has a drawing).

What goes another way than through shared memory has an entry of its own first, that lends nothing.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Mapping, Sequence
from itertools import combinations
from threading import get_ident
from typing import Any, Protocol

import torch

from meshcomm.errors import CommError, described
from meshcomm.runtime.call import gradients_agree
from meshcomm.runtime.hooks.guard.boards import (
    LEAVING,
    MADE,
    REFUSED,
    Entry,
    Group,
)
from meshcomm.runtime.hooks.guard.guard import LONG, Guard
from meshcomm.runtime.hooks.guard.link import Guarded, Room
from meshcomm.runtime.hooks.guard.meeting import MET_SINCE, Meeting
from meshcomm.runtime.hooks.stack import Running
from meshcomm.runtime.pending import Pending
from meshcomm.runtime.recorder import ENDED, Marked, Record, failed, noted_in
from meshcomm.runtime.transports.shared.call import Call, Caller, Mail, Meaning, Watch
from meshcomm.runtime.words import Words

_MOST_WHY = 1500
"""Bytes of a reason."""
_NOTHING = 1
"""In the place of a digest, of a call that was not made."""


_BELOW = 8
"""The states are less; above them stands how many errors the rank has raised."""


def _stands(state: int, errors: int) -> int:
    """Both in the cell of an entry that others may see change."""
    return state + _BELOW * errors


def _errors_and_state(found: int) -> tuple[int, int]:
    return divmod(found, _BELOW)


class _MailLink(Caller, Protocol):
    """A link that makes its calls by mail."""

    watches: dict[int, tuple[Watch, Record]]

    def meet(self, name: str, dtype: torch.dtype) -> None:
        """An entry that lends nothing."""


class GuardedByMail(Guarded):
    """A link's calls are watched where they meet."""

    room: MailRoom

    def defers(self, name: str, x: Any) -> bool:
        """What is lent is a copy."""
        return not x.is_cpu

    def agree_and_go(self, what: Running) -> Any:
        """With a watch that says what the guard wants to know."""
        room, x = self.room, what.like
        said, meaning = room.put(what, x)
        watch = _Watch(room, meaning, said.gradient)
        record = noted_in(self.log, what.name, what.args)
        thread = get_ident()
        room.watches[thread] = watch, record
        interrupted = None
        try:
            if not (x is None or x.is_cpu):
                interrupted = _meet(what, watch)
            result = what.go()
        except BaseException as error:
            failed(record, error)
            watch.broken(error)
            raise
        finally:
            room.watches.pop(thread, None)
        if interrupted is not None:
            raise interrupted
        if isinstance(result, Pending):
            return Marked(result, record)
        if record[ENDED] is None:
            record[ENDED] = time.monotonic()
        return result


def _meet(what: Running, watch: _Watch) -> BaseException | None:
    """An entry that lends nothing, before what goes another way. Who is interrupted when all have come goes on: the
    others do.
    """
    try:
        what.link.meet(what.name, what.like.dtype)
    except CommError:
        raise
    except BaseException as error:
        if not watch.has_begun:  # who called this refuses it, once
            raise
        watch.broken(error)
        if not watch.goes_on():
            raise
        return error
    return None


class _MailBoard:
    """The entries of mailboxes: the call's own meeting is that of the guard, too."""

    def __init__(self, mail: Mail) -> None:
        self.mail = mail

    def look(self, index: int, number: int) -> Entry | None:
        """From the memory of the other process, once it has made its part."""
        found = self.mail.heard(index, number)
        if found is None:
            return None
        words = found.words or Words(f"index {index}", found.text, "?", "?").write()
        errors, state = _errors_and_state(found.stands)
        return Entry(state, (found.digest, 0), found.gradient, words, errors, found.why.decode(errors="replace"))

    def say_count(self, turn: int, count: int) -> None:
        """Beside the entries."""
        self.mail.own.say_count(turn, count)

    def counts(self, turn: int) -> list[int | None]:
        """From all."""
        boxes = [self.mail.box(i) for i in range(len(self.mail.boxes))]
        return [None if box is None else box.count(turn) for box in boxes]


class MailRoom(Room):
    """The calls of a group that has mailboxes."""

    board: _MailBoard

    def __init__(self, link: _MailLink, guard: Guard, group: Group, timeout: float) -> None:
        super().__init__(link.index, guard, group, _MailBoard(link.mail), timeout)
        self._link, self.mail = weakref.ref(link), link.mail  # which has the room
        self.watches: dict[int, tuple[Watch, Record]] = {}
        link.watches = self.watches
        self.known = self.mail.lexicon.known

    def learn(self, entry: Entry) -> Meaning:
        """With its words where others find them."""
        return Meaning(0, entry.digest[0], self.mail.lexicon.write(entry.digest[0], entry.data))

    def words_of(self, meaning: Meaning) -> Words:
        """What stands there, if it has not been written over."""
        words = self.mail.words_at(self.index, meaning.place, meaning.digest)
        return Words.read(words) if words else Words("?", "a call", "?", "?")

    @property
    def number(self) -> int:
        """Of the last call."""
        return self.mail.number

    def refuse(self, words: Words, why: str) -> None:
        """An entry that says so."""
        if self.mail.is_far():  # there may be no room for one, and no time to wait for it
            self.guard.failed(why)
            return
        watch = _Watch(self, Meaning(0, _NOTHING, self.mail.lexicon.write(_NOTHING, words.write())), 0, REFUSED)
        watch.reason = self.put_reason(why, self.mail.number + 1)
        link = self._link()
        assert link is not None
        call = Call(link, self.mail, watch.meaning, 0, -1, [None] * 16, watch)
        call.brings(None, (), ())
        try:
            call.post()
            call.quit(CommError(why))
        except BaseException:  # Ctrl-C
            call.quit(CommError(why))
            raise

    def put_reason(self, why: str, number: int) -> int:
        """Its place, for an entry."""
        return self.mail.lexicon.write(number, why.encode()[:_MOST_WHY]) + 1

    def count_from(self, number: int) -> None:
        """All are here: what has not come by now does not, and what has come was seen."""
        mail = self.mail
        for call in list(mail.open.values()):
            watch = call.watch  # once: another thread may end the call
            if isinstance(watch, _Watch) and not call.look():
                watch.end()
        with mail.lock:
            mail.number = number
        for i in self.others:
            if (box := mail.box(i)) is not None:
                box.drain(mail.index, number)


class _Watch(Meeting):
    """Of one call: what its entry says for the guard, and what is done while it is waited for."""

    __slots__ = ("_began", "_ended", "_next", "call", "for_program", "gradient", "meaning", "reason", "stands")

    room: MailRoom
    call: Call

    def __init__(self, room: MailRoom, meaning: Meaning, gradient: int, state: int = MADE) -> None:
        errors = room.errors_since()
        super().__init__(room, 0, errors)
        self.meaning, self.gradient, self.stands = meaning, gradient, state + _BELOW * errors
        self.reason, self.for_program, self._began = 0, True, 0.0
        self._ended: tuple[int, ...] = ()  # they were about to give up, and did not come to it

    def begin(self, call: Call) -> None:
        """Its number is known, and nobody has seen it yet."""
        self.call, self.number = call, call.number
        self.room.guard.issued[self.room.group.key] = call.number
        self._next = time.monotonic() + LONG

    @property
    def has_begun(self) -> bool:
        """Whether there is an entry."""
        return hasattr(self, "call")

    # ------------------------------------------------------------------------------------------------ for a meeting

    @property
    def words(self) -> Words:
        """Where others read them, too."""
        return self.room.words_of(self.meaning)

    @property
    def missing(self) -> list[int]:
        """As the call knows."""
        return self.call.missing

    def write(self, state: int, why: str = "") -> None:
        """In the entry."""
        self.call.stand(_stands(state, self.errors), self.room.put_reason(why, self.number) if why else 0)

    def over(self, error: CommError) -> None:
        """Nobody reads it."""
        self.call.quit(error)

    def all_came(self) -> bool:
        """Look again."""
        self.call.look()
        return not self.call.missing

    def is_behind(self) -> bool:
        """As the mailbox knows."""
        calls = self.room.mail.open.copy().items()  # other threads finish theirs
        return any(number < self.number and not call.look() for number, call in calls)

    def agrees(self, entry: Entry) -> bool:
        """By the digest in the mailbox."""
        return entry.digest[0] == self.meaning.digest and gradients_agree(self.gradient, entry.gradient)

    # ------------------------------------------------------------------------------------------------- for the call

    def __enter__(self) -> None:
        self._began = time.monotonic()
        self._next = self._began + LONG

    def __exit__(self, *error: object) -> None:
        if self._waits is not None:
            self.room.guard.no_more(self._waits, self.for_program)

    def weigh(self, entries: Mapping[int, tuple[int, int, int]]) -> tuple[bool, bool]:
        """Every rank compares all of them, so that all find the same."""
        gradients = {self.gradient, *(gradient for *_, gradient in entries.values())}
        odd = not all(gradients_agree(one, two) for one, two in combinations(gradients, 2))
        leaving = self.wavers
        for i, (digest, stands, _) in entries.items():
            errors, state = _errors_and_state(stands)
            odd = odd or (digest, errors) != (self.meaning.digest, self.errors) or state not in (MADE, LEAVING)
            leaving = leaving or (state == LEAVING and i not in self._ended)
        return leaving, odd or self.verdict is not None

    def see(self) -> None:
        """When it has become long, tell the others, and see whether there is hope."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LONG
        self.settle()
        self.room.guard.tell_of(self.waits, self.for_program)
        if self._hears():
            self.call.doubt()
        else:
            self.hope(now - self._began)

    def see_behind(self, number: int, behind: Sequence[int]) -> None:
        """The same, before there is an entry: nobody relies on this rank yet."""
        now, guard = time.monotonic(), self.room.guard
        if now < self._next:
            return
        self._next, self.number = now + LONG, number
        guard.tell_of(self.waits, self.for_program)
        ranks = [self.room.group.ranks[i] for i in behind]
        if guard.why_never(self.waits, ranks, sure=False) and (reason := guard.why_never(self.waits, ranks, sure=True)):
            raise self.error("not all ranks will come.", f"{reason}; {self.room.whereabouts()}")

    def _hears(self) -> bool:
        """Whether one that came has given up meanwhile, without a reason that this rank finds, too. Who has ended when
        it was about to has not: then the others, who may have read already, go on.
        """
        room, call = self.room, self.call
        for i in room.others:
            if i not in call.missing:
                state = _errors_and_state(call.stands_of(i))[1]
                if self.follows(state):
                    return True
                if state == LEAVING and self.is_gone(i):
                    self._ended = (*self._ended, i)
        return False

    def is_hopeless(self) -> bool:
        """Asked now and then, for it takes long."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LONG
        return self._hears() or bool(self.why(0.0, sure=False))

    def withdraw(self, seconds: float) -> bool:
        """With all ranks or with none."""
        with contextlib.suppress(CommError):
            self.expire(seconds)
        return True

    def end(self) -> None:
        """The ranks have met elsewhere."""
        with contextlib.suppress(CommError), self.leaving():
            if not self.all_came():
                self.fail("not all ranks will come.", f"{MET_SINCE}; {self.room.whereabouts()}")

    def broken(self, error: BaseException) -> None:
        """The call has raised this: without an entry, for one of the reasons here, or by Ctrl-C, or what a handler of
        another signal raises. Then the others read where all have come, and none does where not.
        """
        if not self.has_begun:
            self.room.refuse(self.words, described(error))
            return
        self.settle()
        if not self.call.is_decided:
            self.resign(f"it was interrupted by {described(error)}")
        self.__exit__()  # at whose door it may have been interrupted
        self.call.drop()

    def goes_on(self) -> bool:
        """Whether all ranks make the call; returns when that is known."""
        if self.verdict is not None or self.call.is_odd:
            return False
        try:
            self.call.wait_within(None)
        except CommError:
            return False
        return not self.call.is_odd
