"""Which of the ranks of this process runs, for who is no transport and does not know how they take turns."""

from __future__ import annotations

from collections.abc import Callable

_told: list[Callable[[], tuple[int, int] | None]] = []


def told_by(tell: Callable[[], tuple[int, int] | None]) -> None:
    """``tell`` knows which rank runs, and of how many, if one does."""
    _told.append(tell)


def running() -> tuple[int, int] | None:
    """The rank that runs, and of how many; None in a process that is one rank, or none."""
    return next((found for tell in _told if (found := tell()) is not None), None)
