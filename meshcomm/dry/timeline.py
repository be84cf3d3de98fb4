"""When a program's operations and collectives run on a machine, as sums, as a table, as a picture and for Perfetto."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshcomm.axis import AxisName
from meshcomm.dry.hardware import Hardware
from meshcomm.dry.replay import Lap, Ran, Span
from meshcomm.errors import fail
from meshcomm.pictures.picture import Picture
from meshcomm.pictures.timeline import Bar, timeline
from meshcomm.tracing.chrome import named, slice_of
from meshcomm.tracing.event import axis_text

__all__ = ["Timeline"]

_COMPUTES = "computes"


class Timeline:
    """Of one machine. Sums are those of the last lap, of the rank that takes longest for it."""

    def __init__(self, machine: Hardware, ran: Mapping[int, Ran]) -> None:
        self.hardware = machine
        self.ran = dict(ran)
        self._slowest = max(ran.values(), key=lambda each: _lap(each)[2])

    @property
    def seconds(self) -> float:
        """Of the last lap, or of all where there are none."""
        return _lap(self._slowest)[2]

    @property
    def laps(self) -> tuple[float, ...]:
        """Seconds of each lap, of the rank that takes longest for it."""
        every = [_laps(each) for each in self.ran.values()]
        return tuple(max(same) for same in zip(*every, strict=False))

    def exposed(self) -> dict[AxisName, float]:
        """Axis to seconds in which nothing is computed, for the program waits for it: of the rank where it is most."""
        found: dict[AxisName, float] = {}
        for each in self.ran.values():
            begin, end, _ = _lap(each)
            for axis in (*end.exposed, *_axes(each)):
                found[axis] = max(found.get(axis, 0.0), end.exposed.get(axis, 0.0) - begin.exposed.get(axis, 0.0))
        return found

    def rows(self) -> list[tuple[str, float]]:
        """What the time of the slowest rank consists of: what it computes, the axes for which it waits, the host."""
        begin, end, seconds = _lap(self._slowest)
        rows = [(f"{kind} operations", end.computed[kind] - begin.computed.get(kind, 0.0)) for kind in end.computed]
        rows += [
            (f"waits for {axis_text(axis)}", end.exposed[axis] - begin.exposed.get(axis, 0.0)) for axis in end.exposed
        ]
        rows.append(("waits for the host", end.host - begin.host))
        rest = seconds - sum(each for _, each in rows)
        if rest > 1e-3 * seconds:
            rows.append(("what is left on its way at the end", rest))
        return [row for row in rows if row[1] > 0]

    def table(self) -> str:
        """The same in lines."""
        whole = self.seconds or 1.0
        rows = [("seconds", self.seconds), *self.rows()]
        wide = max(len(name) for name, _ in rows)
        lines = [f"{name.ljust(wide)}  {1e3 * each:12.3f} ms  {each / whole:6.1%}" for name, each in rows]
        title = f"on {self.hardware.name}, rank {self._slowest.rank}" + (", last lap" if self._slowest.lapped else "")
        return "\n".join([title, *lines])

    def spans(self) -> list[tuple[int, Span]]:
        """Of the last lap, with their ranks; times from where the first of the ranks begins it."""
        found = []
        since = min(_lap(each)[0].end for each in self.ran.values())
        for rank, each in sorted(self.ran.items()):
            begin, end, _ = _lap(each)
            for span in each.spans:
                if span.end > begin.end and span.start < end.end:
                    found.append((rank, span._replace(start=max(span.start, begin.end) - since, end=span.end - since)))
        return found

    def picture(self) -> Picture:
        """Bars over time: for each rank what it computes, and a lane for each axis."""
        bars = []
        for rank, span in self.spans():
            lane = f"rank {rank} {_lane(span)}"
            bars.append(Bar(lane, _kind(span), span.start, span.end, f"{_kind(span)}: {span.told}, {_long(span)}"))
        return timeline(bars, self.seconds, f"{self.seconds * 1e3:.4g} ms on {self.hardware.name}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """``.json``: what Perfetto and chrome://tracing open; ``.svg``, ``.html``, ``.txt``: the picture."""
        if not isinstance(path, (str, os.PathLike)):
            fail("dry_run", f"path={path!r} is no path.", fix="a file name that ends in .json, .svg, .html or .txt")
        if Path(path).suffix != ".json":
            self.picture().save(path)
            return
        slices: list[dict[str, Any]] = []
        lanes: dict[tuple[int, str], int] = {}
        for rank, span in self.spans():
            key = rank, _lane(span)
            if key not in lanes:
                if not any(known == rank for known, _ in lanes):
                    slices += named(rank + 1, 0, "process", f"rank {rank}", rank)
                lanes[key] = len(lanes) + 1
                slices += named(rank + 1, lanes[key], "thread", key[1], 0 if span.lane is None else lanes[key])
            kind = "compute" if span.lane is None else ""
            one = slice_of(_kind(span), rank + 1, lanes[key], span.start, span.end, kind)
            one["args"] = {"told": span.told, "way": "backward" if span.backward else "forward"}
            slices.append(one)
        about = {"made by": "meshcomm.dry_run", "hardware": self.hardware.name, "seconds": self.seconds}
        file = {"traceEvents": slices, "displayTimeUnit": "ms", "otherData": about}
        Path(path).write_text(json.dumps(file), encoding="utf-8")


def _laps(ran: Ran) -> list[float]:
    ends = [lap.end for lap in (ran.laps[:-1] if ran.lapped else ran.laps)]
    return [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]


def _lap(ran: Ran) -> tuple[Lap, Lap, float]:
    """Sums where the last one begins and ends, and how long it is."""
    laps = [Lap(), *(ran.laps[:-1] if ran.lapped else ran.laps)]
    begin, end = laps[-2], laps[-1]
    return begin, end, end.end - begin.end


def _axes(ran: Ran) -> set[AxisName]:
    return {span.lane for span in ran.spans if span.lane is not None}


def _lane(span: Span) -> str:
    return _COMPUTES if span.lane is None else axis_text(span.lane)


def _kind(span: Span) -> str:
    return f"{span.kind} backward" if span.lane is None and span.backward else span.kind


def _long(span: Span) -> str:
    return f"{1e3 * (span.end - span.start):.4g} ms"
