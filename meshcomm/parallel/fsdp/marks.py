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
    words = _words(marks)
    first = begin_to_agree(words, axes[0], op="bor")

    def hear() -> list[int]:
        [found] = settled(first)
        for axis in axes[1:]:
            [found] = agree(found, axis, op="bor")
        if list(found) == words:
            return marks
        bits = "".join([f"{word:0{_BITS}b}"[::-1] for word in found])
        return [*map(int, bits[: len(marks)])]

    return hear


def _words(marks: Sequence[int]) -> list[int]:
    """The marks, 0 or not, as bits."""
    bits = "".join(["1" if mark else "0" for mark in marks])
    return [int(bits[at : at + _BITS][::-1], 2) for at in range(0, len(marks), _BITS)]
