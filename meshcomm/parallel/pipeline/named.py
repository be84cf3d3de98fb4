"""The schedules that have names: which actions each rank does in which order.

gpipe: all forwards, then all backwards               1f1b: as few forwards ahead as keep the ranks busy
rank 0  F0 F1 F2 .. .. B0 B1 B2                       rank 0  F0 F1 .. B0 F2 B1 .. B2
rank 1  .. F0 F1 F2 B0 B1 B2 ..                       rank 1  .. F0 B0 F1 B1 F2 B2 ..
"""

from __future__ import annotations

from meshcomm.parallel.pipeline.actions import Action, Table


def gpipe(ranks: int, chunks: int, microbatches: int) -> Table:
    """All forwards, chunk by chunk, then all backwards: everything is alive at once (Huang et al. 2019)."""
    row = [Action("F", chunk, at) for chunk in range(chunks) for at in range(microbatches)]
    row += [Action("B", chunk, at) for chunk in reversed(range(chunks)) for at in range(microbatches)]
    return (tuple(row),) * ranks


def one_forward_one_backward(ranks: int, chunks: int, microbatches: int) -> Table:
    """Rank r is ``ranks - r`` forwards ahead of its backwards (PipeDream-flush, Narayanan et al. 2021)."""
    return tuple(
        _alternating(
            [Action("F", 0, at) for at in range(microbatches)],
            [Action("B", 0, at) for at in range(microbatches)],
            ranks - rank - 1,
        )
        for rank in range(ranks)
    )


def _alternating(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """``ahead`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    row = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        row += [forward, backward]
    return (*row, *backwards[max(0, len(forwards) - ahead) :])


NAMED = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}
"""Who makes the table of each, of ranks, chunks and microbatches."""

CHUNKS = {"1f1b": 1, "zb-h1": 1, "zbv": 2}
"""How many stages a rank has, where a schedule leaves no choice."""

PLACED = {"zbv": "v"}
"""How the stages are placed, where it is not as a loop."""
