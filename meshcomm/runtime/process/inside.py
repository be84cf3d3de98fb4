"""Which of the ranks of this process runs, for who is no transport and does not know how they take turns."""

from __future__ import annotations

from collections.abc import Callable

_Tell = Callable[[], tuple[int, int] | None]
_told: list[_Tell] = []
_dry: list[_Tell] = []


def told_by(tell: _Tell, dry: bool = False) -> None:
    """``tell`` knows which rank runs, and of how many, if one does: one of this process, or of a dry run."""
    (_dry if dry else _told).append(tell)


def running() -> tuple[int, int] | None:
    """The rank that runs, and of how many; None in a process that is one rank, or none."""
    return next((found for tell in _told if (found := tell()) is not None), None)


def running_or_dry() -> tuple[int, int] | None:
    """The same, were it the rank of a dry run."""
    return next((found for tell in (*_dry, *_told) if (found := tell()) is not None), None)
