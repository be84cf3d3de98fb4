"""What all pictures are: a text, an SVG, and the file that either is written to."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from meshcomm.errors import fail

# Okabe and Ito's colours, which people with any kind of colour blindness can tell apart. What a colour says stands
# beside it in letters, too.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#0072B2", "#D55E00", "#999999")
LETTER, LINE = 7.3, 18.0
"""How wide a letter and how high a line is, in SVG's units."""


_ESCAPED = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
"""As html.escape does; to import html takes longer than all that is here."""


class Picture:
    """Something drawn: ``print`` and the prompt show it as text, notebooks as SVG; :meth:`save` writes a file."""

    def __init__(self, text: str, svg: Callable[[], str]) -> None:
        self._text = text
        self._svg = svg

    @property
    def svg(self) -> str:
        """An ``<svg>`` element that stands alone."""
        return self._svg()

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self.svg

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file that ends in ``.svg``, ``.html`` or ``.txt``."""
        if not isinstance(path, (str, os.PathLike)):
            fail("show", f"path={path!r} is no path.", fix="a file name that ends in .svg, .html or .txt")
        file = Path(path)
        kinds = {
            ".svg": lambda: self.svg,
            ".html": lambda: f'<!doctype html><meta charset="utf-8"><title>meshcomm</title>{self.svg}',
            ".txt": lambda: self._text + "\n",
        }
        if file.suffix not in kinds:
            fail("show", f"{file.name!r} ends in none of {', '.join(kinds)}.", fix="one of these endings says the form")
        file.write_text(kinds[file.suffix](), encoding="utf-8")


class Shown:
    """What draws itself, in notebooks too."""

    __slots__ = ()

    def picture(self) -> Picture:
        """Of it."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self.picture().svg


def element(width: float, height: float, inside: Sequence[str], title: str) -> str:
    """The ``<svg>`` around: as wide as it is, or as the page is if that is less; in the page's colour of letters."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        'style="max-width: 100%; height: auto" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12" '
        f'fill="currentColor" role="img"><title>{title.translate(_ESCAPED)}</title>{"".join(inside)}</svg>'
    )


def written(x: float, y: float, text: str, anchor: str = "start", bold: bool = False) -> str:
    """Letters at a place."""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{text.translate(_ESCAPED)}</text>'


def box(x: float, y: float, width: float, height: float, colour: int, told: str = "", thick: bool = False) -> str:
    """A rectangle in one of the colours; ``told`` is shown where the mouse rests on it."""
    fill = COLOURS[colour % len(COLOURS)]
    tip = f"<title>{told.translate(_ESCAPED)}</title>" if told else ""
    edge = 'stroke="currentColor" stroke-width="2.5"' if thick else f'stroke="{fill}"'
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" fill-opacity="0.35" '
        f"{edge}>{tip}</rect>"
    )
