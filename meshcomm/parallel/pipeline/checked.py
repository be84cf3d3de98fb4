"""Tables of users: read, and what is wrong with them said by rank and action."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from meshcomm import errors
from meshcomm.parallel.pipeline.actions import KINDS, Action, Table

WHERE = "parallel.Schedule"
FORM = "'F0.3' or ('F', 0, 3): kind, chunk, microbatch"
_TEXT = re.compile(r"([A-Za-z])(\d+)\.(\d+)")


def read(table: object) -> Table:
    """The actions of a table, of whatever it is made."""
    if isinstance(table, (str, bytes)) or not isinstance(table, Iterable):
        errors.fail(WHERE, f"a table is a sequence of actions for each rank, not {table!r:.60}", fix=FORM)
    return tuple(tuple(_actions(rank, row)) for rank, row in enumerate(table))


def _actions(rank: int, row: object) -> Iterator[Action]:
    if isinstance(row, str):
        row = row.split()
    if not isinstance(row, Iterable):
        errors.fail(WHERE, f"rank {rank} has {row!r:.60} for its actions", fix=f"a sequence of {FORM}")
    for item in row:
        found = _TEXT.fullmatch(item) if isinstance(item, str) else None
        if found:
            item = (found[1], int(found[2]), int(found[3]))
        if not isinstance(item, (tuple, list)) or len(item) != 3:
            errors.fail(WHERE, f"rank {rank} has {item!r:.60}, which is no action", fix=f"write {FORM}")
        kind, *numbers = item
        if kind not in KINDS:
            known = ", ".join(f"{letter} ({told})" for letter, told in KINDS.items())
            errors.fail(WHERE, f"rank {rank} has {item!r:.60}: there is no kind {kind!r}", fix=f"one of {known}")
        if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers):
            errors.fail(WHERE, f"rank {rank} has {item!r:.60}: chunk and microbatch are numbers from 0", fix=FORM)
        yield Action(kind, *numbers)


def check(table: Table, chunks: int, microbatches: int) -> None:
    """Each rank does all of its actions once, and none before what it needs of itself."""
    found = [words for rank, row in enumerate(table) for words in _wrong(rank, row, chunks, microbatches)]
    if found:
        more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
        errors.fail(
            WHERE,
            "; ".join(found[:4]) + more,
            got=f"{len(table)} ranks, {chunks} chunks, {microbatches} microbatches",
            fix="for each chunk and microbatch of a rank one F, then either one B, or one D and later one W",
        )


def _wrong(rank: int, row: tuple[Action, ...], chunks: int, microbatches: int) -> Iterator[str]:
    at: dict[Action, int] = {}
    for place, action in enumerate(row):
        if action in at:
            yield f"rank {rank} repeats {action}"
        elif action.chunk >= chunks:
            yield f"rank {rank} has {action}, and chunks go from 0 to {chunks - 1}"
        elif action.microbatch >= microbatches:
            yield f"rank {rank} has {action}, and microbatches go from 0 to {microbatches - 1}"
        at.setdefault(action, place)
    for chunk in range(chunks):
        for microbatch in range(microbatches):
            yield from _one(rank, at, chunk, microbatch)


def _one(rank: int, at: dict[Action, int], chunk: int, microbatch: int) -> Iterator[str]:
    f, b, d, w = (Action(kind, chunk, microbatch) for kind in "FBDW")
    halves = [half for half in (d, w) if half in at]
    if f not in at:
        yield f"rank {rank} misses {f}"
    if b in at and halves:
        yield f"rank {rank} has {b} and {' and '.join(map(str, halves))}, which is a part of it"
    elif b not in at and not halves:
        yield f"rank {rank} misses {b} (or {d} and {w})"
    elif halves and len(halves) < 2:
        yield f"rank {rank} has {halves[0]} and misses {w if d in at else d}"
    for late, early in ((b, f), (d, f), (w, d)):
        if late in at and early in at and at[late] < at[early]:
            yield f"rank {rank} has {late} before {early}, which it needs"
