"""What one dry run says of a plan: seconds, memory, what is waited for; and tables, files and bars of many of them."""

from __future__ import annotations

import csv
import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from meshcomm.errors import fail
from meshcomm.pictures.picture import Picture, element, written
from meshcomm.pictures.timeline import Bar, timeline
from meshcomm.tracing.event import axis_text

__all__ = ["Amount", "Outcome", "amount_of", "bars", "line_of", "outcome_of", "reason_of", "saved", "tabled"]

Amount = float | Callable[..., float]
"""How much a step does on all ranks: a number, or a function of the mesh that gives it."""


@dataclass(frozen=True)
class Outcome:
    """Of one dry run, on one machine."""

    seconds: float
    """Of the program, or of its last lap."""
    peak_bytes: int
    """The most memory that a rank has."""
    exposed: Mapping[str, float] = field(default_factory=dict)
    """Axis to seconds for which a rank computes nothing, since it waits for calls over it."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Of what the seconds of the slowest rank consist."""
    flops: float = 0.0
    """Operations of all ranks, if all do as many."""


def outcome_of(run: Any) -> Outcome:
    """Of a dry run with a machine."""
    times = run.timeline
    exposed = {axis_text(axis): seconds for axis, seconds in times.exposed().items()}
    whole = sum(run.flops.values()) * math.prod(run.shape.values())
    return Outcome(times.seconds, run.peak_bytes, exposed, dict(times.rows()), whole)


def line_of(few: Outcome, many: Outcome, share: float) -> Outcome:
    """A line through both: ``share`` of the way from the first to the second one."""

    def at(a: float, b: float) -> float:
        return max(0.0, a + share * (b - a))

    def each(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {name: at(a.get(name, 0.0), b.get(name, 0.0)) for name in (*b, *(name for name in a if name not in b))}

    return Outcome(
        at(few.seconds, many.seconds), round(at(few.peak_bytes, many.peak_bytes)), each(few.exposed, many.exposed),
        each(few.parts, many.parts), at(few.flops, many.flops),
    )  # fmt: skip


def amount_of(
    where: str, tokens: Amount | None, shape: Mapping[str, int], given: Mapping[str, Any] | None = None
) -> float | None:
    """What is said of this mesh, if something is, and of a program that is called with these arguments."""
    if tokens is None:
        return None
    more = {name: value for name, value in (given or {}).items() if callable(tokens) and _takes(tokens, name)}
    found: Any = tokens(dict(shape), **more) if callable(tokens) else tokens
    if not isinstance(found, Real) or isinstance(found, bool) or not math.isfinite(found) or found <= 0:
        fix = "how many tokens one step takes in on all ranks: a positive number, or a function of the mesh, a dict"
        fail(where, f"tokens={found!r} makes no sense.", got=f"mesh {dict(shape)}", fix=fix)
    return float(found)


def _takes(fn: Callable[..., Any], name: str) -> bool:
    known = inspect.signature(fn).parameters
    return name in known or any(each.kind is each.VAR_KEYWORD for each in known.values())


def reason_of(error: BaseException) -> str:
    """Why a program did not run, in a line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.startswith("meshcomm.") else f"{type(error).__name__}: {text}"


# ------------------------------------------------------------------------------------------------------------- shown


def tabled(rows: Sequence[Sequence[str]]) -> str:
    """Columns under their heads; all but the first one to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = (
        "  ".join(f"{cell:<{w}}" if not at else f"{cell:>{w}}" for at, (cell, w) in enumerate(zip(row, widths)))  # noqa: B905
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def bars(named: Iterable[tuple[str, Outcome, float]], title: str) -> Picture:
    """A bar for each, of what its seconds consist, times a factor."""
    found, longest = [], 0.0
    chosen = list(named)
    digits = len(str(len(chosen)))
    for number, (name, outcome, factor) in enumerate(chosen, 1):
        start, lane = 0.0, f"{number:{digits}} {name}"
        longest = max(longest, factor * outcome.seconds)
        for part, seconds in outcome.parts.items():
            end = start + factor * seconds
            found.append(Bar(lane, part, start, end, f"{part}: {1e3 * factor * seconds:.4g} ms"))
            start = end
    if not found:
        return Picture(title, lambda: element(600, 30, [written(8, 20, title)], title))
    return timeline(found, longest, title)


def saved(
    where: str, path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], picture: Callable[[], Picture]
) -> None:
    """``.csv``, ``.json``; else the picture."""
    if not isinstance(path, (str, os.PathLike)):
        fail(where, f"path={path!r} is no path.", fix="a file name that ends in .csv, .json, .svg, .html or .txt")
    file = Path(path)
    if file.suffix == ".json":
        file.write_text(json.dumps(list(rows), indent=1), encoding="utf-8")
    elif file.suffix == ".csv":
        heads = list(dict.fromkeys(name for row in rows for name in row))
        with file.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, heads)
            writer.writeheader()
            writer.writerows(rows)
    else:
        picture().save(file)
