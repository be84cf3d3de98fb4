"""The line within a training loop: a step once more, operation by operation, beside the same one of one rank.

::

    a loss, a gradient that ranks agree upon     walk back from what is differentiated to the first value that is wrong
    buffers, averages of parameters              who has written them

And the loop on a mesh of another size: a factor that follows the size of an axis is no chance.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from meshcomm.make_mesh import make_mesh
from meshcomm.verifying.blame.line import Blame
from meshcomm.verifying.blame.story import Story
from meshcomm.verifying.training.runs import Job
from meshcomm.verifying.training.seen import START, Moment, Seen

_MOST_RANKS = 16


class Again:
    """Runs once more what a judge wants to know more of."""

    def __init__(self, job: Job, twin: Job, launched: Callable[[Job], Sequence[Seen]]) -> None:
        """``job``: of the mesh that is judged; ``twin``: of one rank."""
        self._job, self._twin, self._launched = job, twin, launched
        self._pairs: dict[int, tuple[list[Moment], Moment] | None] = {}
        self._others: dict[str, tuple[dict[str, int], Sequence[Seen]] | None] = {}

    def blame(self, number: int) -> Blame:
        """Of what a step has differentiated, or of its loss: the first that is another one than on one rank."""
        pair = self._watched(number)
        if pair is None or any(each.followed is None for each in (*pair[0], pair[1])):
            return Blame()
        here, right = pair
        with contextlib.suppress(Exception):  # the finding stands without it
            ranks = [each.followed for each in here if each.followed is not None]
            assert right.followed is not None
            story = Story(make_mesh(self._job.sizes), ranks, right.followed, moved=True)
            return story.blame_first()
        return Blame()

    def written(self, number: int, names: Sequence[str]) -> list[str]:
        """The lines that have written any of these in a step, on any rank; the last ones last."""
        pair = self._watched(number)
        if pair is None:
            return []
        lines = (line for each in pair[0] for name in names for line in each.written.get(name, ()))
        return list(dict.fromkeys(lines))

    def elsewhere(self, axis: str, number: int) -> tuple[dict[str, int], Sequence[Seen]] | None:
        """The loop up to this step, on a mesh of another size along an axis; None where none can be run."""
        if axis not in self._others:
            self._others[axis] = self._elsewhere(axis, number)
        return self._others[axis]

    def _elsewhere(self, axis: str, number: int) -> tuple[dict[str, int], Sequence[Seen]] | None:
        n = self._job.sizes[axis]
        for size in (2 * n, n + 1, n - 1):
            sizes = {**self._job.sizes, axis: size}
            if size < 2 or math.prod(sizes.values()) > _MOST_RANKS or self._job.first:
                continue
            with contextlib.suppress(Exception):  # it does not divide
                return sizes, self._launched(replace(self._job, sizes=sizes, last=number + 1, half=START))
        return None

    def _watched(self, number: int) -> tuple[list[Moment], Moment] | None:
        if number not in self._pairs:
            self._pairs[number] = None
            with contextlib.suppress(Exception):
                here = [each.moments[number] for each in self._launched(self._until(self._job, number))]
                (right,) = (each.moments[number] for each in self._launched(self._until(self._twin, number)))
                self._pairs[number] = here, right
        return self._pairs[number]

    @staticmethod
    def _until(job: Job, number: int) -> Job:
        return replace(job, last=number + 1, half=START, follow=number)
