"""The parts of a tensor in a layout, as grids of who has them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from meshcomm.errors import few
from meshcomm.layout.notation import Layout
from meshcomm.pictures.grid import Cell, Grid

_LISTED = 6
"""So many ranks are named."""
_MOST = 8
"""So many grids are drawn of a tensor that is cut along more than two dims."""


def layout_grids(
    layout: Layout, shape: Sequence[int], sizes: Mapping[str, int], ranks: Sequence[int], title: str
) -> list[Grid]:
    """Grids of the parts of a tensor, with who has each: the first cut dim goes down, the second to the right, and for
    each part of further ones there is a grid of its own.
    """
    return list(itertools.islice(_all_grids(layout, shape, sizes, ranks, title), _MOST))


def _all_grids(
    layout: Layout, shape: Sequence[int], sizes: Mapping[str, int], ranks: Sequence[int], title: str
) -> Iterator[Grid]:
    counts = layout.parts(sizes)
    held: dict[tuple[int, ...], list[int]] = {}
    for rank, place in zip(ranks, itertools.product(*map(range, sizes.values())), strict=True):
        at = dict(zip(sizes, place, strict=True))
        held.setdefault(tuple(_index(dim.axes, at, sizes) for dim in layout), []).append(rank)
    cuts = [at for at, dim in enumerate(layout) if dim.axes]
    alone = len(cuts) == 1 and cuts[0] == len(layout) - 1 > 0  # the last dim of several goes to the right
    down, right, *more = [None, *cuts] if alone else [*cuts, None, None] if len(cuts) < 2 else cuts
    more = [at for at in more if at is not None]

    def labels(dim: int | None) -> tuple[str, ...]:
        return ("",) if dim is None else tuple(_slice(layout, shape, counts, dim, at) for at in range(counts[dim]))

    for fixed in itertools.product(*(range(counts[at]) for at in more)):
        chosen: dict[int | None, int] = dict(zip(more, fixed, strict=True))
        name = ", ".join(_slice(layout, shape, counts, dim, at) for dim, at in zip(more, fixed, strict=True))
        rows = []
        for i in range(len(labels(down))):
            row = []
            for j in range(len(labels(right))):
                here = chosen | {down: i, right: j}
                part = tuple(here.get(dim, 0) for dim in range(len(layout)))
                has = held[part]
                row.append(Cell(_ranks(has, len(ranks)), _number(part, counts), ranks[0] in has))
            rows.append(tuple(row))
        yield Grid(
            " ".join(each for each in (title, name and f"[{name}]") if each), labels(down), labels(right), tuple(rows)
        )
        title = ""


def _index(axes: Sequence[str], at: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Which part a rank at this place has of a dim that is cut over ``axes``, the first one major."""
    index = 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index


def _number(part: Sequence[int], counts: Sequence[int]) -> int:
    """The parts counted through, the last dim fastest."""
    number = 0
    for at, count in zip(part, counts, strict=True):
        number = number * count + at
    return number


def _slice(layout: Layout, shape: Sequence[int], counts: Sequence[int], dim: int, at: int) -> str:
    length = shape[dim] // counts[dim]
    return f"{layout[dim].name} {at * length}:{(at + 1) * length}"


def _ranks(has: Sequence[int], of: int) -> str:
    if len(has) == 1:
        return f"rank {has[0]}"
    return "all ranks" if len(has) == of > _LISTED else "ranks " + few(has, _LISTED).replace(",", "")
