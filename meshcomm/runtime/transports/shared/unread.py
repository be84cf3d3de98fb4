"""What is lent to a rank for a call that has failed there, by ranks that make theirs later."""

from __future__ import annotations

import contextlib
import threading

from meshcomm.runtime.process.lending import Segment
from meshcomm.runtime.transports.shared.mailbox import Mail
from meshcomm.runtime.transports.shared.words import entry_of, is_lent_to


class Unread:
    """What ranks lend for a call that had failed here before they made theirs: it is returned when they have."""

    __slots__ = ("_absent", "_mail", "_number", "_once")
    watch: object = None

    def __init__(self, mail: Mail, number: int, absent: list[int]) -> None:
        self._mail, self._number, self._absent, self._once = mail, number, absent, threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether all have come."""
        return not self._absent

    def look(self) -> bool:
        """Nothing is waited for."""
        return True

    def end_unasked(self) -> None:
        """See who has come meanwhile."""
        mail, number = self._mail, self._number
        with self._once:
            for i in list(self._absent):
                box = mail.box(i)
                if box is None or box.cells[box.at(number)] < number:
                    continue
                entry = entry_of(box, number)
                segment: Segment | None = None
                if entry is not None and is_lent_to(mail.index, entry):
                    with contextlib.suppress(OSError):
                        segment = mail.borrow(entry, i)
                self._absent.remove(i)  # first, for once returned it may be lent again
                if segment is not None:
                    segment.returned(mail.index)
