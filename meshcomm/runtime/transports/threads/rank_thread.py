"""The thread of a rank of this process."""

from __future__ import annotations

import contextvars
import threading
from typing import Any


class _Started(threading.Event):
    """Nobody waits for it, so it needs no lock."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        """Whether the thread runs."""
        return self._is_set

    def set(self) -> None:
        """It runs."""
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        """Go on."""
        return True

    def _at_fork_reinit(self) -> None:
        """In a forked process."""


class RankThread(threading.Thread):
    """A thread of a rank; who starts it goes on at once, where ``Thread.start`` would wait until it runs."""

    def __init__(self, index: int, *target: Any) -> None:
        super().__init__(target=contextvars.copy_context().run, args=target, name=f"meshcomm rank {index}", daemon=True)
        self._started = _Started()  # a Python that has no such attribute waits, which takes longer
