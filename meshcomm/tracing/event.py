"""One primitive that ran, in figures, and tables of many.

n = size of the axis, b = bytes of the tensor given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from meshcomm.axis import AxisName
from meshcomm.runtime.callsite import CallSite
from meshcomm.runtime.hooks.stack import Running
from meshcomm.runtime.words import sentence


@dataclass(frozen=True)
class TraceEvent:
    """One primitive of one rank: what an operation of the library does on one tensor, or on one bucket of a pytree.

    Times are the host's, in seconds since the trace began: on an accelerator a call that is queued is over; among ranks
    of one process the turns of others are in it.
    """

    operation: str
    """The public name: "all_gather_invariant", "shift", "broadcast_object"."""
    primitive: str
    """What it asked of the transport: "all_gather", "permute", "broadcast"."""
    axis: AxisName
    size: int
    """Ranks along the axis."""
    rank: int
    """Which rank of the world this is."""
    place: str
    """Where on the mesh: "dp=0, tp=1"."""
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    """Of the tensor that this rank gave, as the transport got it: flat for a bucket, with the ranks in front where it
    is cut for them; () for several messages or none.
    """
    payload: int
    """Bytes that this rank gave to the call: none where its tensor is not read, as on the others in a broadcast."""
    wire: int
    """Bytes that it sends to other ranks, or receives from them, whichever is more, by the operation's ``Cost``."""
    site: CallSite | None
    """The user's line; in backward that of the forward call where it is known, else that of ``backward()``; None on a
    thread of autograd's own.
    """
    backward: bool
    """Whether autograd's backward ran it."""
    asynchronous: bool
    """Whether it was issued to be waited for later: by ``async_op=True``, or by the library itself."""
    start: float
    issue: float | None
    """How long the call took; None if it had not returned when the trace ended."""
    wait: float
    """How long it was waited for after the call."""
    end: float | None
    """When it was known to be done; None if that was not before the trace ended."""
    error: str | None = None
    """The kind of exception that it raised."""
    called: str = ""
    """The call in words, as errors and dumps say it: "all_reduce f32[8] (op='sum')"."""
    group: str = ""
    """Whose sequence of calls it belongs to, alike on all of its ranks: a mesh, and an axis of it."""
    ranks: tuple[int, ...] = ()
    """Of the world: those of the group, in order of index."""
    key: str = ""
    """What all ranks of the group must give alike: operation, reduce op, root, perm, dtype, shape."""
    gradient: int = 2
    """Whether a gradient is needed, and of which leaf, as ``Call.gradient`` says it; 2 where that is not known."""
    sent: tuple[tuple[int, int, str], ...] = ()
    """Messages: to which rank of the world, the tag, and dtype and shape."""
    wanted: tuple[tuple[int, int, str], ...] = ()
    """Messages that are received: from which rank of the world, the tag, and dtype and shape."""
    runs: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Of an all_to_all, how many elements go to each index and come from each."""
    waited_at: float | None = None
    """When the wait after the call began that saw its end, or the last one; None if nobody has waited, or nobody had
    to.
    """
    launch: str = ""
    """Which launch of the ranks it is of, alike on all of them; "" where that is not known, and in a trace of all ranks
    of this process.
    """
    asked: str = ""
    """What the program has asked besides whether it was over, and where: "done() at train.py:7"."""

    @property
    def duration(self) -> float | None:
        """From the start to the end; None while there is no end."""
        return None if self.end is None else self.end - self.start

    @property
    def way(self) -> str:
        """ "forward" or "backward"."""
        return "backward" if self.backward else "forward"

    def __str__(self) -> str:
        return sentence(self.called or self.operation, repr(self.axis), self.site or "an unknown line")


class Totals(NamedTuple):
    """What one rank has communicated over an axis."""

    calls: int
    payload: int
    wire: int
    seconds: float
    """From start to end, of all that have ended."""
    waited: float
    """After the calls."""


def axis_text(axis: AxisName) -> str:
    """``dp`` or ``dp,tp``."""
    return axis if isinstance(axis, str) else ",".join(axis)


def bytes_text(count: float) -> str:
    """``512 B``, ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 10_000 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


# ---------------------------------------------------------------------------------------------------------- bytes


def bytes_of(name: str, count: int, width: int, args: Sequence[Any], size: int, index: int) -> tuple[int, int]:
    """What this rank gives, and what moves between it and the others, in a primitive that is given one tensor of so
    many elements of so many bytes, and these arguments after it.
    """
    b = count * width
    if name == "all_to_all":
        return b, width * max(sum(runs) - runs[index] for runs in args)
    if name == "permute":
        source, destination = args
        sends, receives = destination not in (None, index), source not in (None, index)
        return 0 if destination is None else b, b if sends or receives else 0
    if name == "gather":
        return b, (size - 1) * b if args[0] == index else b
    if name == "broadcast":
        return b if args[0] == index else 0, b
    return b, _WIRE[name](b, size) if name in _WIRE else 0


_WIRE: dict[str, Callable[[int, int], int]] = {
    "all_reduce": lambda b, n: -(-2 * (n - 1) * b // n),
    "all_gather": lambda b, n: (n - 1) * b,
    "reduce_scatter": lambda b, n: (n - 1) * b // n,
    "reduce": lambda b, n: b,
}


def bytes_of_several(what: Running, size: int) -> tuple[int, int]:
    """The same of what is given several tensors, or none."""
    if what.name == "exchange":
        posts, wants = what.messages
        sent = sum(x.nbytes for x, _, _ in posts)
        return sent, max(sent, sum(math.prod(shape) * dtype.itemsize for _, shape, dtype, _, _ in wants))
    if what.name != "scatter":
        return 0, 0
    row = what.like.nbytes
    return (0, row) if what.x is None else (size * row, (size - 1) * row)


# --------------------------------------------------------------------------------------------------------- tables


def per_rank(events: Iterable[TraceEvent]) -> dict[int, Totals]:
    """Rank to its sums."""
    found: dict[int, list[Any]] = {}
    for event in events:
        sums = found.setdefault(event.rank, [0, 0, 0, 0.0, 0.0])
        for i, more in enumerate((1, event.payload, event.wire, event.duration or 0.0, event.wait)):
            sums[i] += more
    return {rank: Totals(*sums) for rank, sums in found.items()}


def most(events: Iterable[TraceEvent]) -> tuple[Totals, int]:
    """Each figure of the rank where it is largest, and how many ranks there are."""
    ranks = per_rank(events)
    figures: Any = zip(*ranks.values(), strict=True)
    return Totals(*(max(each) for each in figures)), len(ranks)


def grouped(events: Iterable[TraceEvent], key: Callable[[TraceEvent], Any]) -> dict[Any, list[TraceEvent]]:
    """In the order in which the keys first occur."""
    found: dict[Any, list[TraceEvent]] = {}
    for event in events:
        found.setdefault(key(event), []).append(event)
    return found


_HEAD = ("operation", "axis", "way", "calls", "ranks", "payload", "wire", "ms", "waited", "at")
_TEXT = (0, 1, 2, 9)
"""The columns that begin at the left."""


def table_of(events: Iterable[TraceEvent]) -> str:
    """A line per operation, axis, way and call site; figures per rank, the largest where ranks differ."""
    lines = [_HEAD]
    for same in grouped(events, lambda e: (e.operation, e.axis, e.backward, e.site)).values():
        first, (totals, ranks) = same[0], most(same)
        open_ones = any(event.end is None for event in same)
        lines.append(
            (
                first.operation, axis_text(first.axis), first.way, str(totals.calls), str(ranks),
                bytes_text(totals.payload), bytes_text(totals.wire),
                f"{1e3 * totals.seconds:.3f}{'+' if open_ones else ''}",
                f"{1e3 * totals.waited:.3f}" if totals.waited else "", str(first.site or "?"),
            )
        )  # fmt: skip
    return _aligned(lines) if len(lines) > 1 else "nothing was communicated"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = (
        "  ".join(
            f"{cell:<{w}}" if i in _TEXT else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return "\n".join(row.rstrip() for row in rows)
