"""How the ranks of one process meet: each comes to a call, the last one makes all results, each takes its own. Calls
that do not agree are an error at once.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from time import monotonic
from types import CodeType
from typing import Any

import torch

from meshcomm._torch import (
    backward_pass,
    carries_tangents,
    carry_tangents,
    dispatch_modes,
    make_graphs,
    outside_dispatch_modes,
)
from meshcomm.errors import CommError, MeshError
from meshcomm.runtime.call import BRIEF_AXIS, Call, told
from meshcomm.runtime.callsite import call_site, known_files
from meshcomm.runtime.ledger import Ledger
from meshcomm.runtime.pending import Pending, TimedOutError
from meshcomm.runtime.recorder import DROPPED, ENDED, THREAD, Owner, Record, inside_again, log_among, made
from meshcomm.runtime.transports.protocol import Defaults
from meshcomm.runtime.transports.threads.meetings import Batch, Came, Circle, Meeting
from meshcomm.runtime.transports.threads.scheduler import Rank, current_rank, local
from meshcomm.runtime.words import axis_text, sentence

Compute = Callable[..., list[Any]]

_UNKNOWN = Call("a collective")
_KEPT = 64
"""How many calls a link knows again."""
_new: Any = tuple.__new__
_frame = sys._getframe
_makes_graphs, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled


Known = tuple[Any, ...]
"""A call that has been made before: what this thread was told of it, what the primitive sees of it, whether backward
makes it; the call, what it is called, its op, dtype and shape; what is the same object on all ranks that make the same
call, None where they have to be compared; and the function that makes it, which is held, for it is known by its id.
"""


class MeetingLink(Defaults):
    """One rank's link to the other ranks of its group in this process, as far as they meet: what becomes of what all
    have brought is said by who calls.
    """

    watched = hears = briefly = True

    def __init__(self, rank: Rank, ranks: tuple[int, ...], name: str) -> None:
        """``name``: of the sequence of calls: two axes have two of them, were they between the same ranks."""
        self.size = len(ranks)
        self.index = ranks.index(rank.index)
        self._ranks = ranks
        self._rank = rank
        self.log = log_among(rank.world.shared, Owner(rank.index, rank.world.size), ranks, name)
        shared = rank.world.shared
        if (circle := shared.get((ranks, name))) is None:
            circle = shared[ranks, name] = Circle(self.size)
        self._circle: Circle = circle
        self._calls: dict[Any, Known] = {}
        self._latest: dict[tuple[int, int], Known] = {}  # from each place in the user's code
        self.orders: dict[Any, list[list[int]]] = {}
        self.ledger = Ledger()

    def sit_down(self, rank: Any) -> None:
        """``rank``, of another run, makes the calls from now on, of which none has been noted; None: nobody does."""
        self._rank = rank
        if rank is not None:
            self.log.restart()
            inside_again(rank.world.shared)

    def at_rest(self) -> bool:
        """Whether nobody waits for anything that was begun."""
        circle = self._circle
        waiting = circle.meetings or circle.rolls or (circle.posts and any(circle.posts.values()))
        return not (waiting or self.log.inside or circle.given_up or (circle.wants and any(circle.wants.values())))

    def references_to(self, axis: object) -> int:
        """How many of its calls that it knows again name this axis."""
        return [_axis_of(key[0]) for key in self._calls].count(axis)

    def refuse(self, where: str, why: str, axis: object) -> None:
        """Take this rank's place at the meeting, and tell those who have come and those who will. A message that is
        not sent is found out when no rank can go on.
        """
        if where in ("send", "recv", "exchange") or current_rank() is not self._rank or self._rank.world.cancelled:
            return
        self._rank.world.idle = 0
        meeting = self._sit(self._circle.counts, self._circle.meetings)
        did = sentence(where, axis_text(axis), call_site())
        said = f"  rank {self._rank.index} called {did} and has raised: {why}"
        meeting.fail(meeting.report("not all ranks of an axis made the same call.") + f"\n{said}")
        self._wake_all(meeting)

    def check_device(self, device: torch.device, strict: bool = False) -> str | None:
        """Every device with real memory."""
        return "tensors on 'meta' hold no values" if device.type == "meta" else None

    # ------------------------------------------------------------------------------------------------ meeting

    def check_rank(self, what: str) -> None:
        """This rank is the one that runs."""
        if local.rank is not self._rank:
            raise MeshError(
                f"meshcomm.{what}: called for rank {self._rank.index} outside of that rank.\n"
                "  fix: run backward(), every collective and every wait inside the function that mc.launch runs"
            )

    def look(self, what: Meeting | Batch, name: str) -> bool:
        """Whether it is over; if not, the others run first."""
        self.check_rank(name)
        self._rank.world.asked()
        if not what.over:
            self._rank.world.look_away(self._rank)
        return what.over

    def _seen(self, **seen: Any) -> Call:
        """The call that is made now, where hardly one is like another one."""
        announced = _call_of(told.call)
        if local.rank is not self._rank:
            self.check_rank(announced.what)
        self._rank.world.check()
        self._rank.world.idle = 0
        return announced.here(skip=3, **seen)

    def _meet(
        self,
        moved: tuple[Any, ...] | None,
        given: Any,
        compute: Compute,
        args: tuple[Any, ...] = (),
        said: Any = None,
        skip: int = 3,
        runs: bool = False,
    ) -> Any:
        """Wait for all ranks of the group, or leave a seat to wait later; the last one to come computes everybody's
        result: ``compute(*args, given)`` of what all have given. Here is, in one function, the way of nearly every
        call: it was made before, all that have come have called the same, and each waits at once.

        ``moved``: what the primitive sees of it and must be equal on all ranks, None where it is what is said; with
        ``runs``, the last of it are those that are sent and received. ``said``: what it belongs to, if this thread was
        not told. ``skip``: the frames down to one that may be the user's.
        """
        rank, circle, index = self._rank, self._circle, self.index
        world = rank.world
        said = said or told.call or _UNKNOWN
        if local.rank is not rank or world.watchful or world.cancelled or world.written:
            self._look_around(said)
        world.idle = 0
        files, frame = known_files, _frame(skip)
        while files[(code := frame.f_code).co_filename] and (outer := frame.f_back) is not None:
            frame = outer  # as `call_spot` does it, without its call
        backward, spot = backward_pass() != -1, (id(code), frame.f_lasti)
        known = self._latest.get(spot)  # most lines make one call
        if known is None or known[0] != said or known[1] != moved or known[2] is not backward:
            known = self._remember((said, moved, backward, spot), code, runs)
        _, _, _, call, what, op, dtype, shape, alike, _ = known
        meetings, counts = circle.meetings, circle.counts
        meeting = meetings.get(seat := counts[index])
        if meeting is None:
            meeting = meetings[seat] = Meeting(self.size)
            meeting.alike = alike
        if alike is None or meeting.alike is not alike or told.later or circle.rolls:
            return self._meet_unlike(call, given, compute, args, alike)
        log = self.log
        record: Record = [  # as `Log.begin` makes it, without its call
            log.number(), what, op, dtype, shape, monotonic(), None, call, -1, rank.thread
        ]  # fmt: skip
        log.records.append(record)
        mine = _new(Came, (rank, index, call, record))  # half of what its own way costs
        counts[index], meeting.inputs[index] = seat + 1, given
        meeting.came.append(mine)
        meeting.count = count = meeting.count + 1
        if count == self.size:
            del meetings[seat]
            self._compute(meeting, call, compute, args)
            world.wake(*meeting.waiting)
            meeting.waiting = []
        else:
            meeting.waiting.append(rank)
            world.wait(rank, mine, None, meeting.fail)
        if meeting.results is None:
            return self._take(meeting, mine)
        record[ENDED] = monotonic()
        result, meeting.results[index] = meeting.results[index], None
        return result

    def _look_around(self, said: Any) -> None:
        """What a call may have to see first, told meanwhile that it is made."""
        if local.rank is not self._rank:
            self.check_rank(_call_of(said).what)
        before = told.call
        try:
            told.call = before or (None if said is _UNKNOWN else said)
            self._rank.world.check()
        finally:
            told.call = before

    def _remember(self, key: tuple[Any, ...], code: CodeType, runs: bool) -> Known:
        """The call that is made now, the same object for the same call from the same place: what is remembered of a
        rank's calls is little, for that of all ranks together shall fit into a processor's memory.
        """
        said, moved, backward, spot = key
        known = self._calls.get(key)
        if known is None:
            call = _call_of(said)
            if runs:
                call = call.here(moved[:-1], moved[-1], moved[-1], skip=3)
            else:
                call = call.here((call.dtype, call.shape, *call.given) if moved is None else moved, skip=3)
            if len(self._calls) >= _KEPT:
                self._calls.clear()
                self._latest.clear()
            form = call.what, _op_of(call), call.dtype, call.shape
            known = said, moved, backward, call, *form, self._circle.one(call), code
            self._calls[key] = known
        self._latest[spot] = known
        return known

    def _meet_unlike(
        self, call: Call, given: Any, compute: Compute, args: tuple[Any, ...] = (), alike: Any = None
    ) -> Any:
        """The same of any call: one that is compared with those of the others, that is waited for later, or for which
        somebody has given up.
        """
        circle = self._circle
        meeting, mine = self._come(circle.counts, circle.meetings, call, given, compute, args, alike)
        if not told.later:
            return self._take(meeting, mine)
        mine.record[THREAD] = 0
        return _Seat(self, meeting, mine)

    def _come(
        self,
        counts: list[int],
        meetings: dict[int, Meeting],
        call: Call,
        given: Any,
        compute: Compute,
        args: tuple[Any, ...] = (),
        alike: Any = None,
    ) -> tuple[Meeting, Came]:
        self.log.call = call
        record = self.log.begin(call.what, _op_of(call), call.dtype, call.shape)
        mine = Came(self._rank, self.index, call, record)
        meeting = self._sit(counts, meetings)
        if meeting.error is None:
            if not meeting.came:
                meeting.alike = alike
            meeting.came.append(mine)
            meeting.inputs[self.index] = given
            all_here = meeting.count == self.size
            if (alike is None or alike is not meeting.alike) and meeting.differs(call, all_here):
                meeting.fail(meeting.report())
            elif all_here:
                self._compute(meeting, call, compute, args)
        if meeting.over:
            self._wake_all(meeting)
        if meeting.error is not None:
            record[ENDED] = meeting.error.splitlines()[0]
            raise CommError(meeting.error)
        return meeting, mine

    def _sit(self, counts: list[int], meetings: dict[int, Meeting]) -> Meeting:
        """This rank's next meeting."""
        seat = counts[self.index]
        counts[self.index] = seat + 1
        meeting = meetings.get(seat)
        if meeting is None:
            meeting = meetings[seat] = Meeting(self.size)
        meeting.count += 1
        if meeting.count == self.size:
            del meetings[seat]
        return meeting

    def _compute(self, meeting: Meeting, call: Call, compute: Compute, args: tuple[Any, ...]) -> None:
        makes_graphs, carries = _makes_graphs(), carries_tangents()
        try:  # no modes of this rank, which came last, have a part in it
            if makes_graphs:
                make_graphs(False)
            if carries:
                carry_tangents(False)  # those of others: each knows its own
            if dispatch_modes() or _is_inference():
                with in_no_modes():
                    meeting.results = compute(*args, meeting.inputs)
            else:
                meeting.results = compute(*args, meeting.inputs)
        except Exception as error:  # every rank of the group is told
            meeting.error = f"meshcomm.{call.what}: {error}\n{meeting.report()}"
        finally:
            if carries:
                carry_tangents(True)
            if makes_graphs:
                make_graphs(True)
        meeting.inputs, meeting.over = [], True

    def _take(self, meeting: Meeting, mine: Came, timeout: float | None = None) -> Any:
        """This rank's result, once all have come."""
        while not meeting.over:
            meeting.waiting.append(self._rank)
            if self._circle.rolls:
                self._rule_out()
                if meeting.over:
                    break
            try:
                self._rank.world.wait(self._rank, mine, timeout, meeting.fail, meeting.outlasts)
            except TimedOutError:
                meeting.waiting.remove(self._rank)
                raise
        if meeting.error is not None:
            mine.record[ENDED] = meeting.error.splitlines()[0]
            raise CommError(meeting.error)
        assert meeting.results is not None
        mine.record[ENDED] = monotonic()
        result, meeting.results[self.index] = meeting.results[self.index], None
        return result

    def _rule_out(self) -> None:
        """Who waits for one that waits in a barrier which outlasts it waits in vain, and may come there."""
        circle = self._circle
        for roll in [roll for roll in circle.rolls.values() if roll.waiting and roll.outlasts]:
            there = [self._ranks.index(rank.index) for rank in roll.waiting]
            for seat, meeting in list(circle.meetings.items()):
                if meeting.waiting and not meeting.over and any(circle.counts[index] <= seat for index in there):
                    meeting.fail(meeting.report(more=roll.came))
                    self._wake_all(meeting)

    def _wake_all(self, meeting: Meeting) -> None:
        self._rank.world.wake(*meeting.waiting)
        meeting.waiting = []


@contextlib.contextmanager
def in_no_modes() -> Iterator[None]:
    """What is made inside goes to any rank: whoever makes it, and in which modes, has no part in it."""
    with outside_dispatch_modes(), torch.inference_mode(False), torch.no_grad():  # without inference grad mode is on
        yield


def _op_of(call: Call) -> Any:
    return call.given[call.names.index("op")] if "op" in call.names else ""


def _call_of(said: Any) -> Call:
    return made(said) or _UNKNOWN


def _axis_of(said: Any) -> Any:
    return said.axis if type(said) is Call else said[BRIEF_AXIS]


class _Seat(Pending):
    """A place kept at a meeting."""

    __slots__ = ("_link", "_meeting", "_mine")

    def __init__(self, link: MeetingLink, meeting: Meeting, mine: Came) -> None:
        self._link, self._meeting, self._mine = link, meeting, mine

    def wait(self, timeout: float | None) -> Any:
        """The others run until all have come."""
        self._link.check_rank(self._mine.call.what)
        try:
            return self._link._take(self._meeting, self._mine, timeout)
        except TimedOutError as late:
            ranks, here = self._link._ranks, {each.rank.index for each in self._meeting.came}
            came = [i for i, rank in enumerate(ranks) if rank in here and i != self._link.index]
            missing = [i for i, rank in enumerate(ranks) if rank not in here]
            raise TimedOutError(str(late), missing, came) from None

    def done(self) -> bool:
        """If not, the others run first."""
        return self._link.look(self._meeting, self._mine.call.what)

    def record(self) -> Record:
        """The call's."""
        return self._mine.record

    def abandon(self) -> None:
        """The others need nothing more of this rank."""
        self._mine.record[ENDED] = DROPPED
