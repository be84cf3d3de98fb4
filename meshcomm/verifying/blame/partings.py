"""Where the ranks of a program part: the first collective that one of them makes, and another one does not; and
which line an error came from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from meshcomm.runtime.callsite import is_ours
from meshcomm.runtime.ops import talks

_CALLED = re.compile(r" called .* at (\S+:\d+)")
_LINE = re.compile(r" at (\S+:\d+)")
_SIDES = ("send", "recv")


class Issued(NamedTuple):
    """A collective that a rank has called, whether or not it came to an end."""

    line: str
    name: str
    axis: str
    live: bool
    """Whether a gradient goes through it."""

    @property
    def said(self) -> str:
        """``all_reduce over 'dp' at train.py:33``."""
        return f"{self.name}{f' over {self.axis!r}' if self.axis else ''} at {self.line}"


class Parting(NamedTuple):
    """What differs."""

    line: str
    """To blame."""
    told: str
    sure: bool = True
    """Whether both calls are known: an error may have come before the other one, and objects are not seen."""


def first_parting(ranks: Sequence[Sequence[Issued]]) -> Parting | None:
    """The first call that is another one on another rank, over other axes, or has a gradient on some ranks alone.

    Args:
        ranks: what each has called, in order. What has two sides, or sends nothing, does not count.
    """
    calls = [[each for each in issued if each.name not in _SIDES and talks(each.name)] for issued in ranks]
    for i in range(max(map(len, calls), default=0)):
        here = [each[i] if i < len(each) else None for each in calls]
        if len(set(here)) == 1:
            continue
        counts = Counter(here)
        usual = max(counts, key=lambda each: (counts[each], each is not None))
        rank = next(r for r, each in enumerate(here) if each != usual)
        mine, other = here[rank], here.index(usual)
        if usual is not None and mine is not None and usual[:3] == mine[:3]:
            return Parting(mine.line, f"{mine.name} at {mine.line} has a gradient on some ranks alone")
        both = sorted([(rank, mine), (other, usual)], key=lambda each: each[0])
        said = "; ".join(f"rank {r}: {'nothing more' if call is None else call.said}" for r, call in both)
        lines = [call.line for call in (mine, usual) if call is not None]
        told = f"the ranks do different things from here on: {said}"
        return Parting(first_of(lines), told, mine is not None and usual is not None)
    return None


def first_of(lines: Sequence[str]) -> str:
    """What comes first in a file was left out by the one, or done too much by the other."""
    files = {line.rpartition(":")[0] for line in lines}
    return min(lines, key=lambda line: int(line.rpartition(":")[2] or 0)) if len(files) == 1 else lines[0]


def one_line_of(message: str) -> str:
    """The line on which all ranks made the call that differs, as an error between them has it."""
    lines = set(_CALLED.findall(message))
    return lines.pop() if len(lines) == 1 else ""


def lines_in(message: str) -> list[str]:
    """The lines that an error between ranks names; that of the fewest of them first."""
    counts = Counter(line.rstrip(",;.") for line in _LINE.findall(message) if not line.startswith("threading.py"))
    return sorted(counts, key=lambda line: counts[line])


def is_own(error: BaseException) -> bool:
    """Whether it was raised in the program itself, and not by what it calls."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and not is_ours(trace.tb_frame.f_code.co_filename)


def line_of(error: BaseException) -> str:
    """The innermost line of the program's that it came through."""
    found, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not is_ours(name):
            found = f"{name.rsplit('/', 1)[-1]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
