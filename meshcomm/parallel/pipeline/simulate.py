"""When each action of a schedule begins and ends, if each takes so long; and whether it ends at all.

A rank does its actions in order; each waits for what it needs: a forward for the forward of the stage before, a
backward for its own forward and the backward of the stage after, the weights' for the inputs'. Nobody waits to send.

rank 0  F0 F1 .. .. B0 B1       rank 1 cannot begin before rank 0 has done F0, and rank 0 has nothing to do
rank 1  .. F0 B0 F1 B1 ..       until B0 comes back: the bubble
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshcomm import errors
from meshcomm.parallel.pipeline.actions import KINDS, Action, Stages, Table, needs

Costs = Mapping[str, float | Sequence[float]] | Callable[[str, int, int], float]
"""How long each kind takes, for all stages or one number per stage; or a function of kind, stage and microbatch."""


class Span(NamedTuple):
    """An action with when it begins and ends."""

    action: Action
    begin: float
    end: float


class DeadlockError(Exception):
    """Each of these actions waits for the next one; the last for the first. Its words are for who made the table."""


@dataclass(frozen=True)
class Simulation:
    """What a schedule does in time: ``spans`` has for each rank its actions with their begin and end, in order."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def time(self) -> float:
        """When the last action ends, of those of all ranks."""
        return max((span.end for rank in self.spans for span in rank), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank how long it computes."""
        return tuple(sum(end - begin for _, begin, end in rank) for rank in self.spans)

    @property
    def bubble(self) -> float:
        """How long the rank that has the most to do is idle, as a part of what it has to do."""
        busiest = max(self.busy, default=0.0)
        return self.time / busiest - 1 if busiest else 0.0


def cost_of(costs: Costs | None, stages: int) -> Callable[[str, int, int], float]:
    """How long an action takes: forward, inputs' and weights' backward are equal where nobody says otherwise, and a
    whole backward is both.
    """
    if callable(costs):
        return costs
    given: dict[str, float | Sequence[float]] = {"F": 1.0, "D": 1.0, "W": 1.0} if costs is None else dict(costs)
    unknown = [kind for kind in given if kind not in KINDS]
    if unknown:
        _wrong(f"there is no kind {unknown[0]!r}", f"costs for {errors.names(KINDS)}")
    table: dict[str, list[float]] = {}
    for kind, value in given.items():
        each = list(value) if isinstance(value, Sequence) else [value] * stages
        if len(each) != stages:
            _wrong(f"{len(each)} numbers for {kind!r}, and there are {stages} stages", "one number, or one per stage")
        table[kind] = [float(number) for number in each]
        if any(not 0 <= number < float("inf") for number in table[kind]):
            _wrong(f"{kind!r} has a cost of {min(table[kind])}", "costs are finite and not negative")
    if "B" not in table and {"D", "W"} <= set(table):
        table["B"] = [d + w for d, w in zip(table["D"], table["W"], strict=True)]

    def cost(kind: str, stage: int, microbatch: int) -> float:
        if kind not in table:
            _wrong(f"nothing says how long {kind!r} takes ({KINDS[kind]})", f"costs={{{kind!r}: ..., ...}}")
        return table[kind][stage]

    return cost


def _wrong(what: str, fix: str) -> None:
    errors.fail("parallel.Schedule.simulate", what, fix=fix)


def simulate(table: Table, stages: Stages, cost: Callable[[str, int, int], float], send: float = 0.0) -> Simulation:
    """Run it on paper; ``send`` is what it takes from rank to rank. DeadlockError where it does not end."""
    done: dict[tuple[int, str, int, int], float] = {}
    spans: list[list[Span]] = [[] for _ in table]
    left = [0] * len(table)
    ready = list(range(len(table)))
    waiting: dict[tuple[int, str, int, int], list[int]] = {}
    while ready:
        rank = ready.pop()
        while left[rank] < len(table[rank]):
            action = table[rank][left[rank]]
            begin = spans[rank][-1].end if spans[rank] else 0.0
            for need in needs(rank, action, stages):
                if need not in done:
                    waiting.setdefault(need, []).append(rank)
                    break
                begin = max(begin, done[need] + (send if need[0] != rank else 0.0))
            else:
                end = begin + cost(action.kind, stages.at(rank, action.chunk), action.microbatch)
                spans[rank].append(Span(action, begin, end))
                left[rank] += 1
                key = (rank, "B" if action.kind == "D" else action.kind, action.chunk, action.microbatch)
                done[key] = end
                ready += waiting.pop(key, ())
                continue
            break
    if any(at < len(actions) for at, actions in zip(left, table, strict=True)):
        raise DeadlockError(_cycle(table, stages, left, done))
    return Simulation(tuple(map(tuple, spans)))


def _cycle(table: Table, stages: Stages, left: Sequence[int], done: Mapping[tuple[int, str, int, int], float]) -> str:
    """Who waits for whom, from one rank back to itself."""
    rank = next(rank for rank, actions in enumerate(table) if left[rank] < len(actions))
    seen: list[int] = []
    words: list[str] = []
    while rank not in seen:
        seen.append(rank)
        action = table[rank][left[rank]]
        other, kind, chunk, microbatch = next(need for need in needs(rank, action, stages) if need not in done)
        wanted = next(
            a for a in table[other][left[other] :] if (a.chunk, a.microbatch) == (chunk, microbatch) and
            (a.kind == kind or (kind == "B" and a.kind == "D"))
        )  # fmt: skip
        words.append(f"rank {rank} at {action} waits for {wanted} of rank {other}")
        rank = other
    return "; ".join([*words[seen.index(rank) :], f"and rank {rank} is at {table[rank][left[rank]]}"])
