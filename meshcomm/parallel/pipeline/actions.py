"""What a rank of a pipeline does, one after the other, and on which rank each stage of the model is.

loop (2 ranks, 2 chunks)          v (2 ranks, 2 chunks)
          chunk 0   chunk 1                 chunk 0   chunk 1
rank 0    stage 0   stage 2       rank 0    stage 0   stage 3
rank 1    stage 1   stage 3       rank 1    stage 1   stage 2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

KINDS = {
    "F": "forward",
    "B": "the whole backward",
    "D": "backward for the inputs only",
    "W": "backward for the weights only",
}
PLACEMENTS = ("loop", "v")


class Action(NamedTuple):
    """One thing that a rank does: ``kind`` is "F" (forward), "B" (the whole backward), "D" (backward for the inputs
    only) or "W" (backward for the weights only), ``chunk`` is which of this rank's stages, ``microbatch`` which rows.

    Its text is ``F0.3``: forward of chunk 0, microbatch 3.
    """

    kind: str
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.microbatch}"


Table = tuple[tuple[Action, ...], ...]
"""For each rank along the axis what it does, in order."""


class Stages(NamedTuple):
    """Where the stages of a model are: ``ranks`` x ``chunks`` of them, placed as a loop or as a v."""

    ranks: int
    chunks: int
    placement: str

    @property
    def number(self) -> int:
        """How many there are."""
        return self.ranks * self.chunks

    def at(self, rank: int, chunk: int) -> int:
        """The stage that is this chunk of this rank."""
        back = self.placement == "v" and chunk % 2
        return chunk * self.ranks + (self.ranks - 1 - rank if back else rank)

    def place(self, stage: int) -> tuple[int, int]:
        """The rank and the chunk that this stage is."""
        chunk, along = divmod(stage, self.ranks)
        back = self.placement == "v" and chunk % 2
        return (self.ranks - 1 - along if back else along), chunk


def needs(rank: int, action: Action, stages: Stages) -> Iterator[tuple[int, str, int, int]]:
    """What must be done before an action of this rank: rank, kind ("B" stands for D, too), chunk, microbatch."""
    kind, chunk, microbatch = action
    stage = stages.at(rank, chunk)
    if kind == "F":
        if stage:
            before, there = stages.place(stage - 1)
            yield before, "F", there, microbatch
        return
    yield rank, ("B" if kind == "W" else "F"), chunk, microbatch
    if kind != "W" and stage + 1 < stages.number:
        after, there = stages.place(stage + 1)
        yield after, "B", there, microbatch
