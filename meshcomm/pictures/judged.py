"""What a proof has found, drawn: a row for each run, right or wrong, and below them the texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshcomm.pictures.picture import LETTER, LINE, Picture, box, element, written

_RIGHT, _WRONG = 2, 6
"""Colours."""
_WIDE = 150
"""Letters of a line; longer ones go on in the next."""


class Verdict(NamedTuple):
    """One run."""

    said: str
    wrong: tuple[str, ...]
    """In a word each, what is wrong with it."""


def judged(title: str, text: str, rows: Sequence[Verdict]) -> Picture:
    """In text as it stands; in SVG with a coloured row for each run above it."""
    return Picture(text, lambda: _svg(title, text, rows))


def _svg(title: str, text: str, rows: Sequence[Verdict]) -> str:
    lines = [part for line in text.split("\n") for part in _parts(line)]
    inside = [written(8, 20, title, bold=True)]
    y = 32.0
    for row in rows:
        colour = _WRONG if row.wrong else _RIGHT
        said = ", ".join(row.wrong) + " wrong" if row.wrong else "right"
        inside.append(box(8, y, 160, LINE, colour, said))
        inside.append(written(14, y + 13, said if len(said) < 22 else f"{len(row.wrong)} kinds wrong"))
        inside.append(written(178, y + 13, row.said))
        y += LINE + 3
    y += LINE
    for line in lines:
        inside.append(f'<g xml:space="preserve">{written(8, y, line)}</g>')
        y += LINE - 2
    width = 16 + LETTER * max([len(title), *map(len, lines), *(len(row.said) + 24 for row in rows)])
    return element(width, y + 8, inside, title)


def _parts(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    found = []
    while len(line) > _WIDE:
        at = line.rfind(" ", len(indent) + 1, _WIDE)
        at = at if at > 0 else _WIDE
        found.append(line[:at])
        line = indent + line[at:].lstrip()
    return [*found, line]
