"""The logs of ranks that did not run: those of ranks that did, and are equal to them in all that they read of a place.

::

    {"dp": 1000, "tp": 2}   rank 0 runs, reads its index along tp   ->  ranks 2, 4, ... do the same over groups of
                            rank 1 runs, and reads that too             ->  ranks 3, 5, ...   their own
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from meshcomm.errors import fail, few
from meshcomm.runtime.axis_names import ranks_along
from meshcomm.runtime.transports.dry.places import PlaceRead, PlaceReads
from meshcomm.verifying.hangs.log import Group, Issue, Log, Message

__all__ = ["Classes"]

_SHOWN = 256
"""Ranks of a list."""


class Classes:
    """Ranks that have run, and for whom each of them stands."""

    def __init__(self, shape: Mapping[str, int]) -> None:
        self.shape = dict(shape)
        self.ran: dict[int, tuple[Log, PlaceReads]] = {}
        self._by_value: dict[tuple[PlaceRead, ...], dict[tuple[int | bool, ...], int]] = {}
        self._issues: dict[tuple[int, int, int], Issue] = {}
        self._groups: dict[tuple[str, int], Group] = {}
        self._everyone = tuple(range(math.prod(shape.values())))

    def add(self, rank: int, log: Log, reads: PlaceReads) -> None:
        """It has run."""
        self.ran[rank] = log, reads
        key = tuple(reads.found)
        self._by_value.setdefault(key, {}).setdefault(tuple(read.of(rank) for read in key), rank)

    def twin(self, rank: int) -> int | None:
        """One that has run and whose way this one goes."""
        if rank in self.ran:
            return rank
        for key, values in self._by_value.items():
            found = values.get(tuple(read.of(rank) for read in key))
            if found is not None:
                return found
        return None

    def log(self, rank: int, twin: int) -> Log:
        """What this rank does: what ``twin`` does, over its own groups."""
        log, reads = self.ran[twin]
        if rank == twin:
            return log
        return Log(rank, [self._issue(issue, twin, n, rank, reads) for n, issue in enumerate(log.issues)], log.steps)

    def _issue(self, issue: Issue, twin: int, number: int, rank: int, reads: PlaceReads) -> Issue:
        group = self._group(issue.group, rank, reads)
        key = twin, number, group.ranks[0]
        if key not in self._issues:
            sent = _moved(issue.sent, issue.group, group)
            wanted = _moved(issue.wanted, issue.group, group)
            self._issues[key] = issue._replace(group=group, sent=sent, wanted=wanted)
        return self._issues[key]

    def _group(self, group: Group, rank: int, reads: PlaceReads) -> Group:
        found = self._groups.get((group.name, rank))
        if found is None:
            shape, axes = reads.groups[group.name.partition(", barriers")[0]]
            coordinate = {name: PlaceRead(shape, (name,)).of(rank) for name, _ in shape}
            ranks = ranks_along(dict(shape), self._everyone, axes, coordinate)
            found = Group(group.name, ranks, group.axis)
            self._groups |= {(group.name, each): found for each in ranks}
        return found

    # --------------------------------------------------------------------------------------------- who is missing

    def lacks(self, rank: int) -> str:
        """No rank that has run goes the way of this one: in what it differs, and where that was read."""
        apart = {twin: [read for read in reads.found if read.of(rank) != read.of(twin)]
                 for twin, (_, reads) in self.ran.items()}  # fmt: skip
        nearest = min(apart, key=lambda twin: len(apart[twin]))
        read = apart[nearest][0]
        line = self.ran[nearest][1].found[read]
        value = read.of(rank)
        place = (
            f"{read} = {value}" if read.at is None else f"{read}, which holds for {'it' if value else 'none of these'}"
        )
        return f"rank {rank} is equal to none of ranks={few(list(self.ran))} in {place}, which is read at {line}."

    def refuse(self, where: str, what: str, more: bool) -> NoReturn:
        """Say which ranks are needed: those that have run, all of them or the first."""
        needed = sorted(self.ran)
        listed = few(needed) if more or len(needed) > _SHOWN else repr(needed)
        fix = f'ranks={listed}, one for each way{", and more" if more else ""}; or "classes", which finds them'
        fail(where, what, got=f"mesh {self.shape}", fix=fix)


def _moved(messages: Sequence[Message], group: Group, to: Group) -> tuple[Message, ...]:
    """To and from the same indices of another group."""
    return tuple(message._replace(rank=to.ranks[group.ranks.index(message.rank)]) for message in messages)
