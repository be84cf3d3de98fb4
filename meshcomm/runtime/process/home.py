"""Who wants to know when a worker's function begins and ends: the guard, while it is on."""

from __future__ import annotations

from collections.abc import Callable

listeners: list[Callable[[str], object]] = []


def say(how: str) -> None:
    """How what this rank was given to run has ended; nothing where it begins."""
    for listener in listeners:
        listener(how)
