"""Grids of boxes with labels: the ranks of a mesh, the parts of a tensor, and steps from one grid to the next.

"(dp b) (tp d)"                the title
         d 0:3      d 3:6      a label per column
b 0:2    rank 0     rank 1     a label per row; in each box who has it
b 2:4    rank 2     rank 3
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshcomm.pictures.picture import LETTER, LINE, Picture, box, element, written

MOST = 16
"""So many rows or columns are drawn; of more, the first ones, a row of dots and the last one."""


class Cell(NamedTuple):
    """One box."""

    text: str
    colour: int = 0
    thick: bool = False


class Grid(NamedTuple):
    """Rows of boxes, all of them as long."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]


class Arrow(NamedTuple):
    """What leads from the grid before it to the next one."""

    lines: tuple[str, ...]


def grids(parts: Sequence[Grid | Arrow], title: str) -> Picture:
    """One picture of them: in text one under the other, in SVG from left to right."""
    few = [_fewer(part) if isinstance(part, Grid) else part for part in parts]
    text = "\n\n".join(_text(part) for part in few)
    return Picture(text, lambda: _svg(few, title))


def mesh_grids(sizes: Mapping[str, int], ranks: Sequence[int], title: str) -> Picture:
    """Where the ranks of a mesh are: the last axis goes to the right, the one before it down, a grid for each place on
    the others.
    """
    *more, down, right = [*([("", 1)] if len(sizes) == 1 else []), *sizes.items()]
    parts: list[Grid | Arrow] = []
    for at, place in enumerate(itertools.islice(itertools.product(*(range(length) for _, length in more)), MOST)):
        first = at * down[1] * right[1]
        rows = [ranks[first + i * right[1] : first + (i + 1) * right[1]] for i in range(down[1])]
        where = ", ".join(f"{name}={index}" for (name, _), index in zip(more, place, strict=True))
        parts.append(
            Grid(
                " ".join(each for each in (title if not at else "", where and f"[{where}]") if each),
                tuple(f"{down[0]}={i}" if down[0] else "" for i in range(down[1])),
                tuple(f"{right[0]}={j}" for j in range(right[1])),
                tuple(tuple(Cell(str(rank), i) for rank in row) for i, row in enumerate(rows)),
            )
        )
    return grids(parts, title)


def _fewer(grid: Grid) -> Grid:
    rows, columns = _chosen(len(grid.rows)), _chosen(len(grid.columns))
    dots = Cell("...", 7)
    return Grid(
        grid.title,
        tuple("..." if at is None else grid.rows[at] for at in rows),
        tuple("..." if at is None else grid.columns[at] for at in columns),
        tuple(tuple(dots if None in (i, j) else grid.cells[i][j] for j in columns) for i in rows),  # type: ignore[index]
    )


def _chosen(count: int) -> list[int | None]:
    """Which of so many are drawn; None is what stands for the others."""
    return [*range(count)] if count <= MOST else [*range(MOST - 2), None, count - 1]


def _text(part: Grid | Arrow) -> str:
    if isinstance(part, Arrow):
        return "\n".join(f"  | {line}" for line in part.lines)
    first = max(map(len, part.rows), default=0)
    widths = [
        max(len(label), *(len(row[at].text) for row in part.cells)) if part.cells else len(label)
        for at, label in enumerate(part.columns)
    ]
    lines = [part.title] if part.title else []
    if any(part.columns):
        lines.append(_line("", first, part.columns, widths))
    lines += [
        _line(row, first, [c.text for c in cells], widths) for row, cells in zip(part.rows, part.cells, strict=True)
    ]
    return "\n".join(lines)


def _line(label: str, first: int, texts: Sequence[str], widths: Sequence[int]) -> str:
    head = [label.ljust(first)] if first else []
    return ("  " + "   ".join([*head, *(t.ljust(w) for t, w in zip(texts, widths, strict=True))])).rstrip()


def _svg(parts: Sequence[Grid | Arrow], title: str) -> str:
    inside: list[str] = []
    x, bottom = 8.0, 0.0
    for part in parts:
        if isinstance(part, Arrow):
            width = 16 + LETTER * max(map(len, part.lines))
            for up, line in enumerate(reversed(part.lines)):
                inside.append(written(x + width / 2, 42 - LINE * up, line, "middle"))
            head = f"M{x:.1f} 66 H{x + width:.1f} m-7 -4 l7 4 l-7 4"
            inside.append(f'<path d="{head}" fill="none" stroke="currentColor" stroke-width="1.5"/>')
            height = 80.0
        else:
            made, width, height = _drawn(part, x)
            inside += made
        x, bottom = x + width + 20, max(bottom, height)
    return element(x - 12, bottom + 8, inside, title)


def _drawn(grid: Grid, x: float) -> tuple[list[str], float, float]:
    """Its elements from ``x`` on, its width and height."""
    left = LETTER * max(map(len, grid.rows), default=0) + (8 if any(grid.rows) else 0)
    texts = [*grid.columns, *(cell.text for row in grid.cells for cell in row)]
    wide, high = max(34.0, LETTER * max(map(len, texts), default=0) + 12), 26.0
    top = LINE * (bool(grid.title) + any(grid.columns)) + 6
    made = [written(x, 14, grid.title, bold=True)] if grid.title else []
    made += [written(x + left + wide * (at + 0.5), top - 5, label, "middle") for at, label in enumerate(grid.columns)]
    for i, (label, cells) in enumerate(zip(grid.rows, grid.cells, strict=True)):
        y = top + high * i
        made.append(written(x, y + 17, label))
        for j, cell in enumerate(cells):
            made.append(box(x + left + wide * j + 1, y + 1, wide - 2, high - 2, cell.colour, thick=cell.thick))
            made.append(written(x + left + wide * (j + 0.5), y + 17, cell.text, "middle"))
    return made, max(left + wide * len(grid.columns), LETTER * len(grid.title)), top + high * len(grid.rows)
