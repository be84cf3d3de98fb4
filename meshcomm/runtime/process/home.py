"""Who wants to know when a worker's function begins and ends: the guard, while it is on."""

from __future__ import annotations

from collections.abc import Callable

listeners: list[Callable[[str], object]] = []
begun = 0
"""How many functions this process was given to run so far: as many as the other ranks, whenever each one listens."""


def say(how: str) -> None:
    """How what this rank was given to run has ended; nothing where it begins."""
    global begun
    begun += not how
    for listener in listeners:
        listener(how)
