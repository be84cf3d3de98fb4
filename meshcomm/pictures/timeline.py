"""Bars over time, a lane for each rank and axis.

rank 0 dp  |aaaa    bbbbbb   |
rank 1 dp  |  aaaa  bbbbbb   |
           0 ms         1.2 ms
a all_reduce, b all_gather
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshcomm.pictures.picture import LETTER, LINE, Picture, box, element, written

WIDE = 64
"""Letters of a lane in text."""
MOST = 2000
"""So many bars are drawn in SVG: the longest."""


class Bar(NamedTuple):
    """Something that took its time."""

    lane: str
    kind: str
    start: float
    end: float
    told: str


def timeline(bars: Sequence[Bar], seconds: float, title: str) -> Picture:
    """A picture of them from 0 to ``seconds``."""
    lanes = sorted({bar.lane for bar in bars})
    kinds = {kind: at for at, kind in enumerate(dict.fromkeys(bar.kind for bar in bars))}
    whole = max([seconds, *(bar.end for bar in bars)]) or 1.0
    return Picture(_text(bars, lanes, kinds, whole), lambda: _svg(bars, lanes, kinds, whole, title))


def _letter(at: int) -> str:
    return "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"[at % 52]


def _text(bars: Sequence[Bar], lanes: Sequence[str], kinds: dict[str, int], whole: float) -> str:
    if not bars:
        return "nothing was communicated"
    rows = {lane: [" "] * WIDE for lane in lanes}
    for bar in bars:
        first, last = (min(WIDE - 1, int(WIDE * at / whole)) for at in (bar.start, bar.end))
        rows[bar.lane][first : last + 1] = _letter(kinds[bar.kind]) * (last + 1 - first)
    most = max(map(len, lanes))
    lines = [f"{lane.ljust(most)}  |{''.join(row)}|" for lane, row in rows.items()]
    end = f"{1e3 * whole:.3g} ms"
    lines.append(f"{' ' * most}   0{end.rjust(WIDE - 1)}")
    lines.append(", ".join(f"{_letter(at)} {kind}" for kind, at in kinds.items()))
    return "\n".join(lines)


def _svg(bars: Sequence[Bar], lanes: Sequence[str], kinds: dict[str, int], whole: float, title: str) -> str:
    left, wide, high = LETTER * max(map(len, lanes), default=0) + 16, 720.0, 22.0
    drawn = sorted(bars, key=lambda bar: bar.start - bar.end)[:MOST]
    inside = [written(8, 15 + high * at, lane) for at, lane in enumerate(lanes)]
    for bar in sorted(drawn, key=lambda bar: bar.start):
        x, width = left + wide * bar.start / whole, max(1.5, wide * (bar.end - bar.start) / whole)
        y = high * lanes.index(bar.lane)
        inside.append(box(x, y + 2, width, high - 4, kinds[bar.kind], bar.told))
        if width > LETTER * len(bar.kind) + 6:
            inside.append(written(x + width / 2, y + 15, bar.kind, "middle"))
    y = high * len(lanes)
    inside.append(f'<path d="M{left:.1f} {y + 2:.1f} h{wide:.1f}" stroke="currentColor"/>')
    inside += [written(left, y + LINE, "0"), written(left + wide, y + LINE, f"{1e3 * whole:.3g} ms", "end")]
    x, y = left, y + 2 * LINE
    for kind, at in kinds.items():
        if x + LETTER * len(kind) + 40 > left + wide:
            x, y = left, y + LINE
        inside += [box(x, y - 10, 12, 12, at), written(x + 17, y, kind)]
        x += LETTER * len(kind) + 40
    if len(bars) > MOST:
        y += LINE
        inside.append(written(left, y, f"the {MOST} longest of {len(bars)} calls"))
    return element(left + wide + 8, y + 10, inside, title)
