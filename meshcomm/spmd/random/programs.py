"""Numbers made of words on arrays of numpy, of which one operation costs the host a third of one on tensors: what is
done with which arrays is worked out once, and done again for each draw of the kind.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshcomm._torch import out_of_graphs, plain_now

Calls = Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]
"""Functions, each with what it is given."""
Steps = Callable[[Any, Any, Any], Calls]
"""``steps(numpy, words, out)``: the calls that make of words, a uint32 ``[4, n]`` that they may write over, the numbers
of as many blocks, ``[n, per]``.
"""


class Program:
    """The numbers of so many blocks at a time. Its arrays are one thread's at a time."""

    __slots__ = ("_steps", "made", "words")

    @out_of_graphs
    def __init__(self, words: Any, per: int, dtype: torch.dtype, steps: Steps) -> None:
        self.words, self.made = words, torch.empty((words.shape[1], per), dtype=dtype, device="cpu")
        self._steps = steps(_numpy(), words, self.made.numpy())

    @out_of_graphs
    def run(self) -> None:
        """What is made of ``words`` is in ``made``, whose memory is written over next time."""
        for call, given in self._steps:
            call(*given)


def low_halves(numbers: Any) -> Any:
    """The low 32 bits of each of an array's 64, which may be written over."""
    return numbers.view("uint32")[..., sys.byteorder == "big" :: 2]


def high_halves(numbers: Any) -> Any:
    """The other 32."""
    return numbers.view("uint32")[..., sys.byteorder == "little" :: 2]


def numpy_now() -> Any:
    """numpy, where it can have the memory of tensors of the CPU: torch knows it, they are plain, and nothing is traced,
    for then torch's own numpy would take its place.
    """
    return _numpy() if plain_now() and not torch.compiler.is_compiling() else None


@functools.cache
def _numpy() -> Any:
    try:
        torch.empty(0, device="cpu").numpy()
    except RuntimeError:
        return None
    return sys.modules["numpy"]
