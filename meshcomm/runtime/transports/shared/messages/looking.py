"""The thread that looks for messages while nobody does who waits for them."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

from meshcomm.runtime.process import forks

_FIRST_PAUSE, _LONGEST_PAUSE, _IDLE = 1e-3, 2e-2, 0.5
"""Seconds between looks of the thread that looks while nobody else does, and after which it has nothing to do."""


class Looks(Protocol):
    """Who has asked, or sent, and does not wait."""

    def look_after(self) -> bool:
        """Look; whether something was there."""

    def is_busy(self) -> bool:
        """Whether something may come, or is to be written."""


class _Looking:
    """The thread of this process that looks for all who do not wait, while there are some: less and less often."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._every: weakref.WeakSet[Looks] = weakref.WeakSet()
        self._runs = False

    def add(self, letters: Looks) -> None:
        """Have it look for these, too."""
        with self._lock:
            self._every.add(letters)
            if not self._runs:
                threading.Thread(target=self._run, name="meshcomm messages", daemon=True).start()
                self._runs = True

    def _run(self) -> None:
        end, pause = time.monotonic() + _IDLE, _FIRST_PAUSE
        while True:
            time.sleep(pause)
            pause = min(1.2 * pause, _LONGEST_PAUSE)
            if self._look():
                end, pause = time.monotonic() + _IDLE, _FIRST_PAUSE
            with self._lock:
                if not self._every and time.monotonic() > end:
                    self._runs = False
                    return

    def _look(self) -> bool:
        with self._lock:
            every = list(self._every)
        found = False
        for letters in every:
            found |= letters.look_after()
            with self._lock:
                if not letters.is_busy():
                    self._every.discard(letters)
        return found


looking = _Looking()


@forks.in_every_fork
def _forked() -> None:
    looking.__init__()  # type: ignore[misc]
