"""Marks of parameters, 0 or 1, of which the ranks hear which ones any of them has set: 62 to a word of the host's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshcomm.collectives.agree import agree, begin_to_agree
from meshcomm.mesh import Axis
from meshcomm.runtime.pending import settled

_BITS = 62
"""Of a word, that hold a mark each."""


def begin_to_hear(marks: list[int], over: Sequence[Axis]) -> Callable[[], list[int]]:
    """Begin to ask who has set them, over the first axis; what is given asks the others, and waits: for no device."""
    axes = [axis for axis in over if axis.size > 1]
    if not (axes and marks):
        return lambda: marks
    first = begin_to_agree(_words(marks), axes[0], op="bor")

    def hear() -> list[int]:
        [found] = settled(first)
        for axis in axes[1:]:
            [found] = agree(found, axis, op="bor")
        return [found[at // _BITS] >> at % _BITS & 1 for at in range(len(marks))]

    return hear


def _words(marks: Sequence[int]) -> list[int]:
    """The marks, 0 or not, as bits."""
    parts = [marks[at : at + _BITS] for at in range(0, len(marks), _BITS)]
    return [sum(1 << at for at, mark in enumerate(part) if mark) for part in parts]
