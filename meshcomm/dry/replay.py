"""Logs of ranks run on paper, on a machine: when each operation and each collective begins and ends.

::

    host       |op|op|ag|op|op|wait|op ...             goes on at once (ahead), or with what it has called for
    computes      |-op---|-op-|.....|-op-|              one after the other; waits where the program waits: exposed
    dp              |====ag=======|                     one after the other along an axis, each once the operations that
    tp                  |==ar==|                        were called before it have ended, and all its ranks have come;
                                                        two that fill the same kind of link go half as fast

Of ranks that are not in the logs one knows nothing: they come when this one comes, and their messages are there at
once. The rank that is behind goes on first, so that whatever it does finds the others no later than it is itself.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from meshcomm.axis import AxisName
from meshcomm.dry.costs import Op
from meshcomm.dry.hardware import Hardware
from meshcomm.dry.log import LAP, Begin, Letter, Log, Talk, Wait
from meshcomm.dry.speeds import seconds_of, transfer_of

__all__ = ["HOST", "Lap", "Ran", "Span", "replayed"]

HOST = "host"
"""For what the device waits, where it waits for none of the axes."""


class Span(NamedTuple):
    """Something that took its time."""

    lane: AxisName | None
    """The axis; None: it computes."""
    kind: str
    start: float
    end: float
    told: str
    backward: bool


@dataclass
class Lap:
    """Up to one moment: sums since the rank began."""

    end: float = 0.0
    computed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Kind of operation to seconds."""
    exposed: dict[AxisName, float] = field(default_factory=lambda: defaultdict(float))
    """Axis to seconds in which nothing is computed, for it is waited for."""
    moved: dict[AxisName, float] = field(default_factory=lambda: defaultdict(float))
    """Axis to seconds in which something is on its way."""
    host: float = 0.0
    """Seconds in which nothing is computed, for the host has called for nothing."""

    def copy(self, end: float) -> Lap:
        """As it is now."""
        computed, exposed, moved = dict(self.computed), dict(self.exposed), dict(self.moved)
        return Lap(end, computed, exposed, moved, self.host)


@dataclass
class Ran:
    """What one rank did."""

    rank: int
    spans: list[Span]
    laps: list[Lap]
    """Where its laps end, and where it does."""
    lapped: bool


@dataclass(eq=False)
class _Move:
    """A collective under way."""

    talk: Talk
    latency: float
    left: float
    link: str
    began: float
    ready: float | None
    """When all its ranks have come; None: not known yet."""
    start: float = 0.0
    end: float | None = None


class _Links:
    """What one rank has on its way."""

    def __init__(self) -> None:
        self.time = 0.0
        self.queues: dict[str, list[_Move]] = {}
        self.ended: list[_Move] = []

    def put(self, move: _Move) -> None:
        """Behind what its group has called for; messages go by themselves."""
        messages = move.talk.posts or move.talk.wants
        key = f"{move.talk.group} {len(self.ended)} {id(move)}" if messages else move.talk.group
        self.queues.setdefault(key, []).append(move)

    def advance(self, to: float, wanted: _Move | None = None) -> None:
        """Let time pass, to then or until ``wanted`` has ended."""
        while self.time < to and (wanted is None or wanted.end is None):
            heads = [(key, queue[0]) for key, queue in self.queues.items() if queue[0].ready is not None]
            if not heads:
                break
            now, until = self.time, to
            running = []
            for key, move in heads:
                assert move.ready is not None
                if move.ready > now:
                    until = min(until, move.ready)
                else:
                    if not move.start:
                        move.start = max(now, move.ready)
                    running.append((key, move))
            if not running:
                if until == math.inf:
                    break
                self.time = until
                continue
            filling = Counter(move.link for _, move in running if move.latency <= 0 and move.left > 0)
            for _, move in running:
                until = min(until, now + (move.latency if move.latency > 0 else move.left * max(1, filling[move.link])))
            for key, move in running:
                if move.latency > 0:
                    move.latency = 0.0 if now + move.latency <= until else move.latency - (until - now)
                else:
                    share = max(1, filling[move.link])
                    move.left = 0.0 if now + move.left * share <= until else move.left - (until - now) / share
                if move.latency <= 0 and move.left <= 0:
                    move.end = until
                    self.ended.append(move)
                    queue = self.queues[key]
                    queue.pop(0)
                    if not queue:
                        del self.queues[key]
            self.time = until
        if to != math.inf and (wanted is None or wanted.end is None):
            self.time = max(self.time, to)


class _Rank:
    """One that runs."""

    def __init__(self, log: Log, world: _World) -> None:
        self.log, self.world = log, world
        self.at = 0
        self.host = self.device = 0.0
        self.links = _Links()
        self.moves: dict[int, _Move] = {}
        self.spans: list[Span] = []
        self.now = Lap()
        self.laps: list[Lap] = []
        self.waits_for: _Move | None = None

    @property
    def time(self) -> float:
        return max(self.host, self.device)

    def step(self) -> bool:
        """Do the next thing; False if it waits for another rank."""
        step = self.log.steps[self.at]
        if isinstance(step, Op):
            self._compute(step)
        elif isinstance(step, Begin):
            self._begin(step)
        elif isinstance(step, Wait):
            if not self._wait(step):
                return False
        elif step is LAP:
            self.laps.append(self.now.copy(self.time))
        else:
            self.host = self.time
        self.at += 1
        return True

    def _compute(self, op: Op) -> None:
        machine = self.world.machine
        self.host += machine.launch
        start = max(self.device, self.host)
        self.now.host += start - self.device
        self.device = start + seconds_of(op, machine)
        if not machine.ahead:
            self.host = self.device
        self.now.computed[op.kind] += self.device - start
        last = self.spans[-1] if self.spans else None
        if last is not None and last[:2] == (None, op.kind) and last.end == start and last.backward == op.backward:
            self.spans[-1] = last._replace(end=self.device)
        else:
            self.spans.append(Span(None, op.kind, start, self.device, op.name, op.backward))

    def _begin(self, begin: Begin) -> None:
        machine = self.world.machine
        self.host += machine.launch
        latency, seconds, link = transfer_of(begin.talk, machine)
        began = self.time if not machine.ahead else max(self.device, self.host)
        self.links.advance(began)
        move = self.moves[begin.at] = _Move(begin.talk, latency, seconds, link, began, None)
        self.links.put(move)
        self.world.called(self.log.rank, move)

    def _wait(self, wait: Wait) -> bool:
        move = self.moves[wait.at]
        self.links.advance(math.inf, move)
        if move.end is None:
            self.waits_for = move
            return False
        del self.moves[wait.at]
        talk, before = move.talk, max(self.device, self.host)
        if move.end > before:
            self.now.exposed[talk.axis] += move.end - before
            self.now.host += before - self.device
            self.device = move.end
        if not self.world.machine.ahead or talk.name.startswith("barrier"):
            self.host = max(self.host, self.device)
        return True

    def end(self) -> Ran:
        """All that is on its way has come."""
        self.links.advance(math.inf)
        for move in self.links.ended:
            assert move.end is not None
            self.now.moved[move.talk.axis] += move.end - move.start
        last = self.now.copy(max([self.time, *(move.end or 0.0 for move in self.links.ended)]))
        spans = [*self.spans, *(_span(move) for move in self.links.ended)]
        return Ran(self.log.rank, sorted(spans, key=lambda span: span.start), [*self.laps, last], bool(self.laps))


def _span(move: _Move) -> Span:
    talk = move.talk
    return Span(talk.axis, talk.operation, move.start, move.end or move.start, f"{talk.wire} bytes", talk.backward)


class _World:
    """The ranks that run, and who has come to what."""

    def __init__(self, logs: Iterable[Log], machine: Hardware) -> None:
        self.machine = machine
        self.ranks = {log.rank: _Rank(log, self) for log in logs}
        self._here: dict[tuple[str, int], list[_Move]] = defaultdict(list)
        self._sent: dict[Letter, float] = {}
        self._wanted: dict[Letter, list[_Move]] = defaultdict(list)

    def called(self, rank: int, move: _Move) -> None:
        """It begins, once all whom it needs have come."""
        talk = move.talk
        if talk.posts or talk.wants:
            for letter, _ in talk.posts:
                self._sent[letter] = move.began
                for other in self._wanted.pop(letter, ()):
                    self._arrive(other)
            for letter, _ in talk.wants:
                if letter not in self._sent and letter[1] in self.ranks:
                    self._wanted[letter].append(move)
            self._arrive(move)
            return
        there = self._here[talk.group, talk.number]
        there.append(move)
        if len(there) == sum(rank in self.ranks for rank in talk.ranks):
            ready = max(each.began for each in there)
            for each in there:
                each.ready = ready
            del self._here[talk.group, talk.number]

    def _arrive(self, move: _Move) -> None:
        wanted = [letter for letter, _ in move.talk.wants if letter[1] in self.ranks]
        if all(letter in self._sent for letter in wanted):
            move.ready = max([move.began, *(self._sent[letter] for letter in wanted)])

    def run(self) -> None:
        """The one that is behind first."""
        behind = [(0.0, rank) for rank in self.ranks]
        asleep: list[int] = []
        while behind or asleep:
            if not behind:
                self._go_on(asleep)
            _, number = heapq.heappop(behind) if behind else (0.0, asleep.pop(0))
            rank = self.ranks[number]
            limit = behind[0][0] if behind else math.inf
            while rank.at < len(rank.log.steps):
                if not rank.step():
                    asleep.append(number)
                    break
                if rank.time > limit:
                    heapq.heappush(behind, (rank.time, number))
                    break
            for each in list(asleep):
                waits_for = self.ranks[each].waits_for
                if waits_for is not None and self._may_end(self.ranks[each], waits_for):
                    asleep.remove(each)
                    heapq.heappush(behind, (self.ranks[each].time, each))

    def _may_end(self, rank: _Rank, move: _Move) -> bool:
        rank.links.advance(math.inf, move)
        return move.end is not None

    def _go_on(self, asleep: list[int]) -> None:
        """Nobody can: what the others never call for begins without them."""
        for each in asleep:
            for queue in self.ranks[each].links.queues.values():
                for move in queue:
                    move.ready = move.began if move.ready is None else move.ready


def replayed(logs: Mapping[int, Log], machine: Hardware) -> dict[int, Ran]:
    """What each rank did."""
    world = _World(logs.values(), machine)
    world.run()
    return {number: rank.end() for number, rank in world.ranks.items()}
