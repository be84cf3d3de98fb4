"""When Python looks for garbage."""

from __future__ import annotations

import gc


class LaterCollection:
    """Leave a garbage collection that falls due inside for later: one of all that torch has made takes long.

    A class, for a generator would allocate at its end, and with that begin the collection before the caller goes on.
    """

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *exc: object) -> None:
        if self._was_on:
            gc.enable()
