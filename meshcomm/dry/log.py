"""What one rank of a dry run does, one thing after the other: operations, calls, waits, reads of the host, laps.

::

    x @ w                       Op
    mc.all_reduce(x, "dp")      Begin(0, Talk), Wait(0)
    work = mc.shift(x, "tp",    Begin(1, Talk)
        async_op=True)
    x @ w                       Op
    work.wait()                 Wait(1)
    y.item()                    READ
    yield                       LAP

:mod:`meshcomm.dry.replay` runs it on a machine; the same log on any.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from meshcomm._torch import backward_pass
from meshcomm.axis import AxisName
from meshcomm.dry.costs import Op, cost_of
from meshcomm.runtime.hooks.stack import Hook, Running, put_on
from meshcomm.runtime.pending import Around, Pending
from meshcomm.runtime.transports.dry.link import DryLink
from meshcomm.tracing.event import bytes_of, bytes_of_several

__all__ = ["LAP", "READ", "Begin", "Log", "Talk", "Wait"]

READ, LAP = "read", "lap"
_SEVERAL = frozenset(("exchange", "scatter", "barrier", "barrier_within"))

Letter = tuple[str, int, int, int, int]
"""A message: of which group, from which rank of the world, to which, its tag, and how many like it came before."""


class Talk(NamedTuple):
    """A primitive of this rank."""

    name: str
    """Of the primitive: "all_gather"."""
    operation: str
    axis: AxisName
    group: str
    number: int
    """How many of the group came before."""
    ranks: tuple[int, ...]
    payload: int
    wire: int
    backward: bool
    posts: tuple[tuple[Letter, int], ...]
    """Messages, and their bytes."""
    wants: tuple[tuple[Letter, int], ...]


@dataclass(frozen=True)
class Begin:
    """It is called."""

    at: int
    talk: Talk


@dataclass(frozen=True)
class Wait:
    """What follows needs it."""

    at: int


class Log:
    """Of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.steps: list[Op | Begin | Wait | str] = []
        self._begun = 0
        self._numbers: Counter[str] = Counter()
        self._letters: Counter[tuple[Any, ...]] = Counter()

    # ---------------------------------------------------------------------------------------------- what is written

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operation of torch's."""
        op = cost_of(func, args, kwargs, result)
        if op is not None:
            self.steps.append(op)

    def read(self) -> None:
        """The host reads a value."""
        self.steps.append(READ)

    def lap(self) -> None:
        """The program says that something begins anew."""
        self.steps.append(LAP)

    def listen(self, link: DryLink) -> None:
        """To all primitives of a link."""
        put_on(link, _Listener(self, link))

    def begin(self, link: DryLink, what: Running) -> int:
        """A primitive is called."""
        group, number = link.name, self._numbers[link.name]
        self._numbers[group] += 1
        if what.name in _SEVERAL:
            payload, wire = bytes_of_several(what, link.size)
        else:
            x, *given = what.args
            payload, wire = bytes_of(what.name, math.prod(x.shape), x.dtype.itemsize, given, link.size, link.index)
        posts, wants = what.messages
        me = self.rank
        sent = [(self._letter(group, me, link.ranks[dst], tag), x.nbytes) for x, dst, tag in posts]
        wanted = [
            (self._letter(group, link.ranks[src], me, tag), math.prod(shape) * dtype.itemsize)
            for src, shape, dtype, tag, _ in wants
        ]
        talk = Talk(
            what.name, what.call.what, link.axis, group, number, link.ranks, payload, wire, backward_pass() != -1,
            tuple(sent), tuple(wanted),
        )  # fmt: skip
        self._begun += 1
        self.steps.append(Begin(self._begun, talk))
        return self._begun

    def _letter(self, group: str, src: int, dst: int, tag: int) -> Letter:
        key = group, src, dst, tag
        self._letters[key] += 1
        return (*key, self._letters[key])

    def wait(self, at: int) -> None:
        """For a primitive."""
        self.steps.append(Wait(at))

    # ------------------------------------------------------------------------------------------------ what is asked

    def last_lap(self) -> list[Op | Begin | Wait | str]:
        """What counts: all; or, where there are laps, the last one."""
        ends = [at for at, step in enumerate(self.steps) if step is LAP]
        return self.steps if not ends else self.steps[(ends[-2] + 1 if len(ends) > 1 else 0) : ends[-1]]

    def flops(self) -> dict[torch.dtype, int]:
        """By dtype, of what counts."""
        found: Counter[torch.dtype] = Counter()
        for step in self.last_lap():
            if isinstance(step, Op) and step.flops and step.dtype is not None:
                found[step.dtype] += step.flops
        return dict(found)

    def partners(self) -> set[int]:
        """Those with whom it exchanges messages."""
        talks = [step.talk for step in self.steps if isinstance(step, Begin)]
        return {rank for talk in talks for letter, _ in (*talk.posts, *talk.wants) for rank in letter[1:3]} - {
            self.rank
        }


class _Listener(Hook):
    """Writes a link's primitives into a log."""

    def __init__(self, log: Log, link: DryLink) -> None:
        self._log, self._link = log, link

    def run(self, what: Running) -> Any:
        """Write it down, and who waits for it."""
        result = what.go()
        at = self._log.begin(self._link, what)
        if isinstance(result, Pending):
            return _Awaited(result, lambda: self._log.wait(at))
        self._log.wait(at)
        return result


class _Awaited(Around):
    """A primitive under way; the first wait is written down."""

    __slots__ = ("_seen",)

    def __init__(self, source: Pending, seen: Callable[[], None]) -> None:
        super().__init__(source)
        self._seen: Callable[[], None] | None = seen

    def wait(self, timeout: float | None) -> Any:
        """Write it down, then wait."""
        if self._seen is not None:
            self._seen()
            self._seen = None
        return super().wait(timeout)
