"""The logs of ranks that did not run: those of ranks that did, and are equal to them in all that they read of a place.

::

    {"dp": 1000, "tp": 2}   rank 0 runs, reads its index along tp   ->  ranks 2, 4, ... do the same over groups of
                            rank 1 runs, and reads that too             ->  ranks 3, 5, ...   their own
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from meshcomm.errors import fail, few
from meshcomm.runtime.axis_names import ranks_along
from meshcomm.runtime.transports.dry.places import PlaceRead, PlaceReads
from meshcomm.verifying.hangs.log import Group, Issue, Log, Message

__all__ = ["Classes"]


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

    def refuse(self, where: str, rank: int) -> None:
        """No rank that has run goes the way of this one: say in what it differs, and which ranks are needed."""
        apart = {twin: [read for read in reads.found if read.of(rank) != read.of(twin)]
                 for twin, (_, reads) in self.ran.items()}  # fmt: skip
        nearest = min(apart, key=lambda twin: len(apart[twin]))
        read = apart[nearest][0]
        line = self.ran[nearest][1].found[read]
        value = read.of(rank)
        place = (
            f"{read} = {value}" if read.at is None else f"{read}, which holds for {'it' if value else 'none of these'}"
        )
        what = f"rank {rank} is equal to none of ranks={few(list(self.ran))} in {place}, which is read at {line}."
        needed = list(self._needed(rank))
        fix = f"ranks={needed if len(needed) <= 64 else few(needed)}, one for each way; or None, which finds them"
        fail(where, what, got=f"mesh {self.shape}", fix=fix)

    def _needed(self, _: int) -> Iterator[int]:
        """One rank for each that differs from all before in what is known to be read; those that ran first."""
        reads = list(dict.fromkeys(read for _, reads in self.ran.values() for read in reads.found))
        size = next(iter(self.ran.values()))[1].size
        seen = set()
        for rank in dict.fromkeys((*self.ran, *range(size))):
            values = tuple(read.of(rank) for read in reads)
            if values not in seen:
                seen.add(values)
                yield rank


def _moved(messages: Sequence[Message], group: Group, to: Group) -> tuple[Message, ...]:
    """To and from the same indices of another group."""
    return tuple(message._replace(rank=to.ranks[group.ranks.index(message.rank)]) for message in messages)
