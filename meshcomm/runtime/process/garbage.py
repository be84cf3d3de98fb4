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


class ToStay(LaterCollection):
    """The same of what is imported, which is no garbage: nor does the next collection look at each of its things. They
    go where those are that have outlived many, unless somebody has frozen what is there, who would find it thawed.
    """

    _frozen = False
    """Whether somebody had when it was asked last: all that is frozen is counted, which is not done again."""

    def __exit__(self, *exc: object) -> None:
        if self._was_on and hasattr(gc, "freeze") and not ToStay._frozen:
            ToStay._frozen = gc.get_freeze_count() > 0
            if not ToStay._frozen:
                gc.freeze()
                gc.unfreeze()
        super().__exit__(*exc)
