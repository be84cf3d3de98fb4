"""Where what a rank draws lies in a global tensor."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple


class Part(NamedTuple):
    """The box of a global tensor that a rank holds."""

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    """The shape of the global tensor."""
    start: tuple[int, ...]
    """Where the box begins."""

    def runs(self) -> tuple[int, int, list[tuple[int, int]]]:
        """Runs of elements that are neighbours in the global tensor: where the first begins, how long each is, and the
        counts and strides of the dims that lead from one to the others.
        """
        base, length, stride, at = 0, 1, 1, len(self.shape)
        while at:
            at -= 1
            base += self.start[at] * stride
            length *= self.shape[at]
            stride *= self.whole[at]
            if self.shape[at] != self.whole[at]:
                break
        dims = []
        for count, whole, start in zip(
            self.shape[:at][::-1], self.whole[:at][::-1], self.start[:at][::-1], strict=True
        ):
            base += start * stride
            dims.append((count, stride))
            stride *= whole
        return base, length, dims


@functools.lru_cache(maxsize=1024)
def blocks_of(part: Part, per: int) -> tuple[int, int, list[tuple[int, int]], bool, int, int]:
    """Its runs, whether they are of whole blocks of so many numbers, how many blocks one touches, and all of them."""
    base, length, dims = part.runs()
    exact = not any(each % per for each in (base, length, *(stride for _, stride in dims)))
    # How many blocks a run touches: exactly, or at most if that differs between runs.
    count = -(-(base % per + length) // per) if exact or not dims else (length + 2 * per - 2) // per
    return base, length, dims, exact, count, count * math.prod(many for many, _ in dims)
