"""What the ranks of one process come together in: a meeting for each call, and batches of messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm.runtime.call import Call, Want
from meshcomm.runtime.callsite import hinted
from meshcomm.runtime.lengths import dims_said
from meshcomm.runtime.recorder import Record
from meshcomm.runtime.transports.threads.scheduler import Rank
from meshcomm.runtime.whose import differ
from meshcomm.runtime.words import differing

_KEPT = 1000
"""How many calls a circle knows again."""
_GIVEN_UP = "not all ranks made a call before they met in a barrier with a time-out, which ends what was begun before."


class Came(NamedTuple):
    """A rank that has come, with a call."""

    rank: Rank
    place: int
    """Its index in the group."""
    call: Call
    record: Record


class Meeting:
    """One collective: who has come, with what, and what came of it."""

    __slots__ = ("alike", "came", "count", "error", "inputs", "odd", "outlasts", "over", "results", "waiting")

    def __init__(self, size: int) -> None:
        self.came: list[Came] = []
        self.alike: Any = None  # what stands for the call of all that have come, see Circle.one; or they are compared
        self.inputs: list[Any] = [None] * size
        self.results: list[Any] | None = None
        self.error: str | None = None
        self.over = False  # there are results, or an error
        self.count = 0
        self.odd = False  # not all have called the same
        self.waiting: list[Rank] = []
        self.outlasts = False  # who waits here does so longer than others in vain

    def fail(self, error: str) -> None:
        """Whoever comes later is told the same."""
        if not self.over:
            self.error, self.inputs, self.over, self.alike = error, [], True, None

    def differs(self, call: Call, all_here: bool) -> bool:
        """Whether this one, which came last, makes it a call that not all make, and they are told so now."""
        came = self.came
        self.odd = self.odd or not came[0].call.agrees(call)
        if self.odd:
            self.alike = None
        if call.whose is not None and any(differ(each.call.word, call.word) for each in came):
            return True
        return self.odd and (all_here or not self.lengths())  # else all are told, of lengths

    def lengths(self) -> str:
        """What is said where tensors of other lengths are all that differs."""
        calls = {each.place: each.call.text for each in self.came}
        return dims_said(dict(sorted(calls.items())), len(self.inputs))

    def report(self, title: str = "ranks of one axis made different calls.", more: Sequence[Came] = ()) -> str:
        """Which ranks called what, equal calls together."""
        groups: list[tuple[Call, list[int]]] = []
        for each in (*self.came, *more):
            same = next((ranks for other, ranks in groups if other.agrees(each.call)), None)
            if same is None:
                groups.append((each.call, [each.rank.index]))
            else:
                same.append(each.rank.index)
        called = [(f"rank{'s'[: len(ranks) - 1]} {', '.join(map(str, sorted(ranks)))}", call) for call, ranks in groups]
        lines = [f"  {who} called {call}" for who, call in called]
        unlike = differing([(f"on {who}", call.meaning) for who, call in called], operation=False)
        lines += [f"  {each}" for each in unlike.values()]
        return hinted(f"meshcomm: {title}\n" + "\n".join(lines) + self.lengths())


@dataclass(eq=False)
class Batch:
    """The messages of one exchange of one rank that have not met their other side."""

    rank: Rank
    call: Call
    record: Record
    open: int
    wants: Sequence[Want]
    """What is asked for."""
    error: str | None = None
    waited: bool = False
    given_up: bool = False
    """Whether nobody gets what it asks for: its places are for who asks next."""
    got: list[Tensor | None] = field(default_factory=list)
    """What has come of that. The batch knows no message, which knows the batch: else its tensors would stay."""

    @property
    def over(self) -> bool:
        """Whether none is left, or it has failed."""
        return self.open == 0 or self.error is not None

    def fail(self, error: str) -> None:
        """It will not meet the other sides any more."""
        if not self.over:
            self.error = error

    def received(self) -> list[Tensor]:
        """What has come, on the devices asked for."""
        return [x.to(want[4]) for x, want in zip(self.got, self.wants, strict=True) if x is not None]


@dataclass(eq=False)
class Message:
    """One of them: what is sent, or asked for."""

    batch: Batch
    x: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: int = 0
    """Which of those that its batch asks for."""


class Circle:
    """What the links of one group share."""

    def __init__(self, size: int) -> None:
        self.counts = [0] * size  # how often each rank has come
        self.meetings: dict[int, Meeting] = {}
        self.roll_calls = [0] * size
        self.rolls: dict[int, Meeting] = {}
        self.posts: dict[tuple[int, int, int], deque[Message]] = {}
        self.wants: dict[tuple[int, int, int], deque[Message]] = {}
        self.kept: dict[tuple[int, int, int], list[tuple[float, Message]]] = {}
        """What has come for receives that were given up, and when these began."""
        self.given_up = False  # any of them
        self._ones: dict[Any, object] = {}

    def one(self, call: Call) -> object:
        """The same object for calls that agree, whichever rank makes them; None for one that is to be compared."""
        if call.whose is not None:
            return None
        if len(self._ones) >= _KEPT:
            self._ones.clear()
        return self._ones.setdefault((call.compared, call.needs_grad), object())

    def align(self) -> None:
        """All ranks count on from the one that has made the most calls."""
        self.counts = [max(self.counts)] * len(self.counts)
        for meeting in self.meetings.values():
            meeting.fail(meeting.report(_GIVEN_UP))
        self.meetings.clear()
