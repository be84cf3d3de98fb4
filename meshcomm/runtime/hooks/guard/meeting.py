"""One call of one rank under guard, until all ranks agree: why it is given up, and what is told then.

Whoever is about to give up says LEAVING, and looks once more. If all have come it says MADE again, and goes on; else
it has a verdict, and says so. That happens in :meth:`Meeting.leaving`: who is interrupted there has one, or stays.

Where the others read what this rank says, and how it waits for them, is another one's: the store's or a mailbox's.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple, NoReturn

from meshcomm.errors import CommError, described, text
from meshcomm.runtime.callsite import hinted
from meshcomm.runtime.health import hosts
from meshcomm.runtime.hooks.guard.boards import EXPIRED, GAVE_UP, LEAVING, MADE, REFUSED, Entry
from meshcomm.runtime.hooks.guard.guard import DEADLOCK, Wait
from meshcomm.runtime.hooks.guard.link import Room
from meshcomm.runtime.lengths import dims_said
from meshcomm.runtime.words import Words, calls_text, sentence

_ANSWER = 1.0
"""Seconds that the hosts of those that have not come have to answer."""
_ALIKE = 2.0
"""Seconds in which a rank finds by itself, and says in its own words, why another one has given up."""
_LINGER = 2.0
"""Seconds that a rank which sees a difference gives the others to come too, so that all can be told of."""
MET_SINCE = "the ranks have met in a barrier since, which ends what was begun before"


class Verdict(NamedTuple):
    """That a call is given up."""

    state: int
    why: str
    """For the others."""
    text: str
    """For this rank."""


class Meeting:
    """A call among its ranks."""

    __slots__ = ("_follows_at", "_waits", "errors", "number", "room", "verdict", "wavers")

    def __init__(self, room: Room, number: int, errors: int) -> None:
        """``errors``: how many this rank has raised since its last call here, over it is not known which axis."""
        self.room, self.number, self.errors = room, number, errors
        self._waits: Wait | None = None
        self._follows_at = math.inf
        self.verdict: Verdict | None = None
        """Known before it is said, and never taken back."""
        self.wavers = False
        """Whether this rank is about to give up, or has."""

    # ------------------------------------------------------------------------------------- what the other one knows

    @property
    def words(self) -> Words:
        """The call."""
        raise NotImplementedError

    @property
    def missing(self) -> list[int]:
        """The indices that have not come."""
        raise NotImplementedError

    def write(self, state: int, why: str = "") -> None:
        """How this rank stands to it, for the others."""
        raise NotImplementedError

    def over(self, error: CommError) -> None:
        """The verdict has been said."""

    def all_came(self) -> bool:
        """Look again."""
        raise NotImplementedError

    def is_behind(self) -> bool:
        """Whether a call before it still waits."""
        return False

    def agrees(self, entry: Entry) -> bool:
        """Whether another rank has called the same, whatever errors it has raised."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------------------------- giving up

    @property
    def waits(self) -> Wait:
        """What others are told of who waits in it."""
        if self._waits is None:
            words = self.words
            self._waits = Wait(self.room.group, self.number, str(words), words.place)
        return self._waits

    def hope(self, waited: float) -> None:
        """See whether it makes sense to wait on; if not, give up."""
        if self.why(waited, sure=False):
            self._leave(waited)

    def why(self, waited: float, *, sure: bool) -> str:
        """Why it makes no sense to wait any more."""
        room = self.room
        if self.number <= room.void:
            return MET_SINCE
        try:
            reason = room.guard.why_never(self.waits, [room.group.ranks[i] for i in self.missing], sure=sure)
        except CommError as error:  # the store is lost
            return described(error)
        return reason or ("late" if waited > room.timeout else "")

    def is_gone(self, index: int) -> bool:
        """Whether another rank will say nothing more of it."""
        room = self.room
        return bool(room.guard.why_gone(room.group.ranks[index], room.group.key, self.number))

    def follows(self, state: int) -> bool:
        """Whether this rank gives up because another one, which has come and says this now, has: at once where that had
        a time-out of its own; else when this one has not found the same reason for a while.
        """
        if state == GAVE_UP:
            self._follows_at = min(self._follows_at, time.monotonic() + _ALIKE)
        return state == EXPIRED or (state == GAVE_UP and time.monotonic() > self._follows_at)

    def say(self, state: int, why: str = "") -> None:
        """Write how this rank stands to it."""
        self.wavers = state != MADE or self.wavers  # before it is written, and
        self.write(state, why)
        self.wavers = state != MADE  # no more when it is written

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Around what looks whether this rank can give up, and does so by a verdict; one thread at a time."""
        with self.room.leaves:
            if self.verdict is not None:
                raise CommError(self.verdict.text)
            try:
                self.say(LEAVING)
                yield
                if self.verdict is None:
                    self.say(MADE)
            except BaseException:
                self.settle()
                raise

    def settle(self) -> None:
        """Who was interrupted when it was about to give up has done so, or stays."""
        if self.wavers or self.verdict is not None:
            with self.room.leaves:
                if self.verdict is None:
                    self.say(MADE)
                else:
                    self.say(self.verdict.state, self.verdict.why)
                    self.over(CommError(self.verdict.text))

    def resign(self, why: str) -> bool:
        """Give up for this reason, unless all have come; whether this rank has."""
        self.settle()
        with contextlib.suppress(CommError), self.leaving():
            if not self.all_came():
                self.verdict = Verdict(GAVE_UP, why, why)
                self.settle()
        return self.verdict is not None

    def _leave(self, waited: float) -> None:
        """Give up, unless the others have come meanwhile: those that come now see it, and do not go on either."""
        with self.leaving():
            reason = "" if self.all_came() else self.why(waited, sure=True)
            if reason == "late":
                self._late(waited, GAVE_UP)
            elif reason.startswith(DEADLOCK):
                self.fail("deadlock: ranks wait for each other.", reason)
            elif reason:
                self.fail("not all ranks will come.", f"{reason}; {self.room.whereabouts()}")

    def expire(self, seconds: float) -> None:
        """The same, because who waits for it has a time-out of its own."""
        with self.leaving():
            if not self.all_came():
                if self.is_behind():
                    self.fail(*not_begun(seconds), state=EXPIRED)
                self._late(seconds, EXPIRED)

    def _late(self, seconds: float, state: int) -> NoReturn:
        ranks, name, missing = self.room.group.ranks, self.room.guard.name, self.missing
        lost = hosts.no_way(hosts.silent((ranks[i] for i in missing), _ANSWER))
        absent = ", ".join(f"{name(ranks[i])} {hosts.where(ranks[i])}".rstrip() for i in missing)
        came = ", ".join(name(rank) for i, rank in enumerate(ranks) if i not in missing)
        since = time.strftime("%H:%M:%S", time.localtime(self.waits.since))
        what = f"not all ranks came within {seconds:.3g} s, since {since}{': ' if lost else ''}{lost}."
        self.fail(what, f"not there: {absent}; there: {came}; {self.room.whereabouts()}", state=state)

    def fail(self, what: str, got: str, more: str = "", state: int = GAVE_UP) -> NoReturn:
        """Give up, and say why."""
        error = self.error(what, got, more)
        self.verdict = Verdict(state, f"{what} {got}", str(error))
        self.say(state, self.verdict.why)
        raise error

    def error(self, what: str, got: str, more: str = "") -> CommError:
        """Why a call is given up, and what to do."""
        words = self.words
        return CommError(
            hinted(
                text(
                    words.call.split(" ", 1)[0],
                    what,
                    got=f"{got}\n  here: {words.place} called {words}, call {self.number} of this axis",
                    fix="every rank of an axis must make the same calls on it in the same order;"
                    " after an error that was caught, meet with mc.barrier(axis, timeout=...)",
                )
                + more
            )
        )

    # ------------------------------------------------------------------------------------------------- what differs

    def _came(self) -> dict[int, Entry]:
        looked = ((i, self.room.board.look(i, self.number)) for i in self.room.others)
        return {i: entry for i, entry in looked if entry is not None}

    def differ(self) -> NoReturn:
        """Say who called what, when those that are about to come have come, or one has said why it does not go on."""
        end = time.monotonic() + _LINGER
        while len(found := self._came()) < len(self.room.others) and time.monotonic() < end:
            if any(entry.state in (GAVE_UP, EXPIRED) for entry in found.values()):
                found = self._came()  # those too that it had seen, which came while this rank looked
                break
            time.sleep(1e-3)
        made = [entry for entry in found.values() if entry.state != REFUSED]
        if not all(map(self.agrees, made)):
            self.fail(*self._unlike(found))
        odd = [entry.words.place for entry in made if entry.errors != self.errors]
        if odd:
            got = f"{', '.join([self.words.place] if self.errors else odd)} has raised an error in another call"
            self.fail("not all ranks have come here by the same calls.", got)
        gone = [entry for entry in found.values() if entry.state != MADE]
        if gone:
            self.fail("not all ranks are in this call any more.", _given_up(gone))
        self.fail(*self._unlike(found))

    def runs_differ(self) -> NoReturn:
        """In an all_to_all, what one sends another one does not expect: each finds that by itself."""
        raise self.error(*self._unlike(self._came()))

    def _unlike(self, found: dict[int, Entry]) -> tuple[str, str, str]:
        """With what is said where tensors of other lengths are all that differs."""
        words = {i: entry.words for i, entry in found.items() if entry.state != REFUSED}
        others = calls_text([self.words, *words.values()])
        words[self.room.index] = self.words
        lengths = dims_said({i: words[i].call for i in sorted(words)}, len(self.room.group.ranks))
        return "the ranks made different calls.", others, lengths


def not_begun(seconds: float) -> tuple[str, str]:
    """Of a call that was given up while one before it waited."""
    return f"not begun within {seconds:.3g} s.", "a call before it on this axis still waits for the others"


def _given_up(entries: Iterable[Entry]) -> str:
    """What the ranks say that have not made the call, or have given it up."""
    refused = [entry for entry in entries if entry.state == REFUSED]
    if refused:
        first = refused[0]
        did = sentence(first.words.call, "", first.words.site)
        return f"{first.words.place} called {did} and has raised: {first.why}"
    first = min(entries, key=lambda entry: entry.state == LEAVING)
    did = "does not say whether it gives up" if first.state == LEAVING else "has given up"
    return f"{first.words.place} called {first.words} and {did}{first.why and ': '}{first.why}"
