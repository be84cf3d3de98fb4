"""A schedule, or what really ran, drawn: a lane for each rank, time to the right.

rank 0  F0 F1 .. .. B0 == .. B1 ==   F forward, B backward, D and W its halves; then chunk (where there are several) and
rank 1  .. F0 B0 == F1 B1 == .. ..   microbatch; == goes on with what is left of it, .. is idle
"""

from __future__ import annotations

from itertools import chain
from math import isclose

from meshcomm.parallel.pipeline.actions import KINDS, Action, Stages
from meshcomm.parallel.pipeline.simulate import Simulation, Span
from meshcomm.pictures.picture import LETTER, LINE, Picture, box, element, written

COLUMNS = 400
"""So many columns a text has at most: of a schedule in steps of one, that of its first steps."""
WIDE = 36
"""Columns of a text of times that are not whole numbers; an action has one at least."""
_COLOUR = {"F": 0, "B": 1, "D": 3, "W": 2}


def drawn(simulation: Simulation, stages: Stages, title: str) -> Picture:
    """A picture of it."""
    return Picture(_text(simulation, stages), lambda: _svg(simulation, stages, title))


def _label(action: Action, stages: Stages) -> str:
    return str(action) if stages.chunks > 1 else f"{action.kind}{action.microbatch}"


def _text(simulation: Simulation, stages: Stages) -> str:
    whole = simulation.time
    every = [at for span in chain(*simulation.spans) for at in (span.begin, span.end)]
    step = 1.0 if all(isclose(at, round(at), abs_tol=1e-9) for at in every) else whole / WIDE
    columns = min(COLUMNS, max(1, round(whole / (step or 1.0))))
    wide = max((len(_label(span.action, stages)) for span in chain(*simulation.spans)), default=2)
    lines = []
    for rank, spans in enumerate(simulation.spans):
        row = ["." * wide] * columns
        free = 0
        for span in spans:
            first = max(free, round(span.begin / step))
            free = max(first + 1, round(span.end / step))
            row += ["." * wide] * (min(free, COLUMNS) - len(row))
            for at in range(first, min(free, len(row))):
                row[at] = _label(span.action, stages).ljust(wide) if at == first else "=" * wide
        lines.append(f"rank {rank}".ljust(len(f"rank {len(simulation.spans) - 1}")) + "  " + " ".join(row).rstrip())
    return "\n".join(lines)


def _svg(simulation: Simulation, stages: Stages, title: str) -> str:
    whole, high = simulation.time or 1.0, 24.0
    left = LETTER * len(f"rank {len(simulation.spans)}") + 16
    shortest = min((span.end - span.begin for span in chain(*simulation.spans) if span.end > span.begin), default=1.0)
    wide = min(1600.0, max(640.0, 26 * whole / shortest))
    inside = [written(8, 14, title, bold=True)]
    for rank, spans in enumerate(simulation.spans):
        y = LINE + 6 + high * rank
        inside.append(written(8, y + 16, f"rank {rank}"))
        line = f"M{left:.1f} {y + high - 1:.1f} h{wide:.1f}"
        inside.append(f'<path d="{line}" stroke="currentColor" stroke-opacity="0.3"/>')
        for span in spans:
            inside += _bar(span, rank, stages, left + wide * span.begin / whole, wide / whole, y)
    x, y = left, LINE + 6 + high * len(simulation.spans) + LINE
    for kind in dict.fromkeys(span.action.kind for span in chain(*simulation.spans)):
        inside += [box(x, y - 10, 12, 12, _COLOUR[kind]), written(x + 17, y, f"{kind} {KINDS[kind]}")]
        x += LETTER * len(KINDS[kind]) + 60
    return element(left + wide + 8, y + 10, inside, title)


def _bar(span: Span, rank: int, stages: Stages, x: float, scale: float, y: float) -> list[str]:
    """What is drawn of one action."""
    action, width = span.action, max(1.0, scale * (span.end - span.begin))
    what = f"{action}: {KINDS[action.kind]} of stage {stages.at(rank, action.chunk)}"
    told = f"{what}, {span.begin:.4g} to {span.end:.4g}"
    made = [box(x, y + 1, width, high := 20.0, _COLOUR[action.kind], told, thick=False)]
    label = _label(action, stages)
    for text in (label, label[1:]):
        if width > LETTER * len(text) + 2:
            made.append(written(x + width / 2, y + high - 5, text, "middle"))
            break
    return made
