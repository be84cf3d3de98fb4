"""The schedules that have names: which actions each rank does in which order.

gpipe: all forwards, then all backwards           1f1b: as few forwards ahead as keep the ranks busy
rank 0  F0 F1 F2 .. .. .. B0 == B1 == B2 ==       rank 0  F0 F1 .. B0 == F2 B1 == .. B2 ==
rank 1  .. F0 F1 F2 B0 == B1 == B2 == .. ..       rank 1  .. F0 B0 == F1 B1 == F2 B2 == ..

interleaved: several smaller stages on each rank, a loop around the ranks: a microbatch comes back sooner
rank 0  F0.0 F0.1 F1.0 F1.1 .... .... B1.0 ==== .... B1.1 ==== B0.0 ==== B0.1 ====
rank 1  .... F0.0 F0.1 F1.0 B1.0 ==== F1.1 B1.1 ==== B0.0 ==== B0.1 ==== .... ....
"""

from __future__ import annotations

from collections.abc import Callable

from meshcomm.parallel.pipeline.actions import Action, Table
from meshcomm.parallel.pipeline.zero_bubble import zero_bubble_1f1b, zero_bubble_v


def gpipe(ranks: int, chunks: int, microbatches: int) -> Table:
    """All forwards, chunk by chunk, then all backwards: everything is alive at once (Huang et al. 2019)."""
    row = [Action("F", chunk, at) for chunk in range(chunks) for at in range(microbatches)]
    row += [Action("B", chunk, at) for chunk in reversed(range(chunks)) for at in range(microbatches)]
    return (tuple(row),) * ranks


def one_forward_one_backward(ranks: int, chunks: int, microbatches: int) -> Table:
    """Rank r is ``ranks - r`` forwards ahead of its backwards (PipeDream-flush, Narayanan et al. 2021)."""
    forwards = [Action("F", 0, at) for at in range(microbatches)]
    backwards = [Action("B", 0, at) for at in range(microbatches)]
    return tuple(_alternating(forwards, backwards, ranks - rank - 1) for rank in range(ranks))


def interleaved(ranks: int, chunks: int, microbatches: int) -> Table:
    """Groups of microbatches go through all chunks of a rank, one chunk after the other (Megatron-LM, Narayanan et al.
    2021).

    There a group has as many microbatches as there are ranks, and nothing may be left over. Here groups may be larger
    than that, up to two times less one: of 11 microbatches on 4 ranks one has 6 and one 5, the larger first. No rank
    waits longer for that; what is alive grows with the first group.
    """
    if chunks == 1:
        return one_forward_one_backward(ranks, chunks, microbatches)
    groups = max(1, microbatches // ranks)
    sizes = [microbatches // groups + (at < microbatches % groups) for at in range(groups)]
    forwards: list[Action] = []
    backwards: list[Action] = []
    first = 0
    for size in sizes:
        group = range(first, first + size)
        forwards += [Action("F", chunk, at) for chunk in range(chunks) for at in group]
        backwards += [Action("B", chunk, at) for chunk in reversed(range(chunks)) for at in group]
        first += size
    ahead = (chunks - 1) * sizes[0]
    return tuple(_alternating(forwards, backwards, ahead + 2 * (ranks - rank - 1)) for rank in range(ranks))


def _alternating(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """``ahead`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    row = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        row += [forward, backward]
    return (*row, *backwards[max(0, len(forwards) - ahead) :])


NAMED: dict[str, Callable[[int, int, int], Table]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": lambda ranks, chunks, microbatches: zero_bubble_1f1b(ranks, microbatches),
    "zbv": lambda ranks, chunks, microbatches: zero_bubble_v(ranks, microbatches),
}
"""Who makes the table of each, of ranks, chunks and microbatches."""

CHUNKS = {"1f1b": 1, "zb-h1": 1, "zbv": 2}
"""How many stages a rank has, where a schedule leaves no choice."""

PLACED = {"zbv": "v"}
"""How the stages are placed, where it is not as a loop."""
