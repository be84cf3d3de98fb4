"""What a time says about bandwidth: sizes, factors and columns as in NVIDIA's nccl-tests.

For a collective over n ranks that takes t seconds:

    size     bytes of the whole buffer, S; for one that is cut over the ranks (n shares) that of all shares together
    count    elements of what one call is told to move: of one share where the buffer is cut, else of the buffer
    algbw    S / t
    busbw    algbw times the collective's factor, which makes figures for different n and collectives comparable with
             the speed of the wire
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from typing import Any, NamedTuple

# busbw / algbw, from nccl-tests' doc/PERFORMANCE.md and, for those that it leaves out, its src/*.cu. There shift is
# called sendrecv. It has no permute, where a rank sends as much as in shift, no send, where every other one does, and
# no all_gather_invariant and pvary, which move what all_gather and, backward, all_reduce move.
FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_gather_invariant": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "shift": lambda n: 1.0,
    "permute": lambda n: 1.0,
    "send": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "pvary": lambda n: 2 * (n - 1) / n,
}
# The buffer is n shares, one per rank.
CUT = frozenset({"all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all", "gather", "scatter"})
REDUCING = frozenset({"all_reduce", "reduce_scatter", "reduce"})
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
ROOT = 0  # the rank that these go to or come from

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
LARGE = 10**6
"""Bytes from which the budgets speak: 1M, also when a share's rounding took some bytes off."""
LIMITS = {"all_gather": 0.5, "all_gather_invariant": 0.5, "reduce_scatter": 0.7}
LIMIT = 1.05
"""The budgets on gloo from 1 MB: our time over torch's."""
OVER_MEMORY = ((64, 64, 8.0), (2**20, 2**26, 2.0))
"""On 2 processes that share memory: from and up to so many bytes, our time over the floor's. Of ranks of one process
the last line, for what takes a copy takes no less.
"""

HEAD = ["size", "count", "type", "redop", "root"]
SIDE = ["time", "algbw", "busbw", "#wrong"]
UNDER_HEAD = ["B", "elements", "", "", "", *["µs", "GB/s", "GB/s", ""] * 2, "", "µs", ""]


class Side(NamedTuple):
    """One way to call a collective: seconds, bytes per second, how many elements of the results are wrong."""

    time: float
    algbw: float
    busbw: float
    wrong: int


@dataclass(frozen=True)
class Row:
    """One collective at one size. ``theirs`` is torch.distributed's call, where there is one."""

    collective: str
    size: int
    count: int
    type: str
    redop: str
    root: int
    ours: Side
    theirs: Side | None
    floor: float | None = None
    """Seconds of the same copies and sums in private memory, which from 1 MB on has been touched before."""

    @property
    def ratio(self) -> float | None:
        """Our time over torch's."""
        return None if self.theirs is None else self.ours.time / self.theirs.time

    def fields(self) -> dict[str, Any]:
        """As it goes to --json, with the units in the names."""
        return {
            **{name: getattr(self, name) for name in ("collective", "size", "count", "type", "redop", "root")},
            "meshcomm": side_fields(self.ours),
            "torch": None if self.theirs is None else side_fields(self.theirs),
            "ratio": self.ratio,
            "floor_us": None if self.floor is None else 1e6 * self.floor,
        }

    def cells(self) -> list[str]:
        """As it stands in the table."""
        sides = [*side_cells(self.ours), *side_cells(self.theirs)]
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        floor = ["-", "-"] if self.floor is None else [f"{1e6 * self.floor:.1f}", f"{self.ours.time / self.floor:.2f}"]
        return [str(self.size), str(self.count), self.type, self.redop, str(self.root), *sides, ratio, *floor]


def side_fields(side: Side) -> dict[str, float | int]:
    return {
        "time_us": 1e6 * side.time,
        "algbw_gb_s": side.algbw / 1e9,
        "busbw_gb_s": side.busbw / 1e9,
        "wrong": side.wrong,
    }


def side_cells(side: Side | None) -> list[str]:
    if side is None:
        return ["-"] * len(SIDE)
    return [f"{1e6 * side.time:.1f}", f"{side.algbw / 1e9:.3f}", f"{side.busbw / 1e9:.3f}", str(side.wrong)]


def bandwidths(collective: str, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """(algbw, busbw) in bytes per second."""
    algbw = size / seconds
    return algbw, algbw * FACTORS[collective](ranks)


def side_of(collective: str, size: int, seconds: float, ranks: int, wrong: int) -> Side:
    return Side(seconds, *bandwidths(collective, size, seconds, ranks), wrong)


# ----------------------------------------------------------------------------------------------------------- sizes


def parse_size(text: str) -> int:
    """Bytes, from ``4096``, ``1K``, ``1.5m`` or ``2G``: powers of 1024."""
    number, unit = text.strip(), 1
    if number[-1:].upper() in UNITS:
        number, unit = number[:-1], UNITS[number[-1].upper()]
    try:
        size = float(number) * unit
    except ValueError:
        size = 0.0
    if not 1 <= size < 2**63:  # nan fails too
        raise ValueError(f"{text!r} is no size: bytes, or a number and K, M or G")
    return int(size)


def show_size(size: int) -> str:
    """The inverse, rounded: ``4M``."""
    unit, name = max(((unit, name) for name, unit in UNITS.items() if unit <= size), default=(1, ""))
    return f"{size / unit:.3g}{name}"


def size_range(smallest: int, largest: int, factor: int) -> list[int]:
    """From ``smallest``, times ``factor`` each, up to ``largest``."""
    sizes = []
    while smallest <= largest:
        sizes.append(smallest)
        smallest *= factor
    return sizes


def count_of(collective: str, size: int, itemsize: int, ranks: int) -> int:
    """The elements that a call is told to move where the buffer has about ``size`` bytes: one at least."""
    return max(1, size // itemsize // (ranks if collective in CUT else 1))


def size_of(collective: str, count: int, itemsize: int, ranks: int) -> int:
    """The bytes of the buffer with so many elements per call."""
    return count * itemsize * (ranks if collective in CUT else 1)


def redop_of(collective: str, op: str) -> str:
    """What is done to the values: ``op`` where the collective takes one; a gradient of pvary is summed."""
    return "sum" if collective == "pvary" else op if collective in REDUCING else "none"


def root_of(collective: str) -> int:
    """-1 where there is none, as in nccl-tests."""
    return ROOT if collective in ROOTED else -1


# -------------------------------------------------------------------------------------------------------- verdicts


def verdict(row: Row, ranks: int) -> str:
    """Whether one line holds the budgets: over torch's own call, and of 2 processes over the floor too."""
    over = []
    if row.ratio is not None and row.ratio > (LIMITS.get(row.collective, LIMIT) if row.size >= LARGE else LIMIT):
        over.append("torch")
    limit = limit_over_memory(row.size) if ranks == 2 else None
    if limit is not None and row.floor is not None and row.ours.time > limit * row.floor:
        over.append(f"{limit:g} floors")
    return f"over {', '.join(over)}" if over else "holds"


def limit_over_memory(size: int) -> float | None:
    """How many times the floor a call of so many bytes may take; None where that is not said."""
    return next((limit for least, most, limit in OVER_MEMORY if least <= size <= most), None)


def geometric_mean(values: Sequence[float]) -> float:
    return exp(fsum(log(value) for value in values) / len(values))


def ratios_from_1mb(rows: Sequence[Row]) -> dict[str, list[tuple[float, int]]]:
    """Collective to (our time over torch's, size) for the large sizes."""
    found: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        if row.ratio is not None and row.size >= LARGE:
            found.setdefault(row.collective, []).append((row.ratio, row.size))
    return found
