"""How a rank leaves those that it shares memory with: it reads what has come, and waits until its own was read."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from meshcomm.runtime.process import boxes, lending
from meshcomm.runtime.process.boxes import GONE, LEAVING
from meshcomm.runtime.process.lending import Segment
from meshcomm.runtime.transports.shared.mailbox import Mail
from meshcomm.runtime.transports.shared.words import DIGEST

_LONGEST_PAUSE = 1e-3
_PATIENCE, _FAILING = 30.0, 2.0
"""Seconds that a rank that leaves gives the others to read, at least; and at most if it leaves because of an error."""
_QUIETLY = 3.0
"""Seconds after which a rank that leaves says for whom it waits."""


def retire(mail: Mail) -> None:
    """This rank makes no more calls here: its box may serve another sequence when the others have retired theirs."""
    mail.own.say(GONE)
    if mail.letters is not None:
        mail.letters.close()
    others = {i: other.arena for i, other in enumerate(mail.neighbours) if other is not None}
    boxes.arena().retire(boxes.Retired(mail.key, mail.index, mail.number, others))


def take_leave(mails: Sequence[Mail]) -> None:
    """Read what has come, and wait until the others have read what came from here.

    A group that was adopted is left at the end of the process only: it goes on, and may be adopted again.
    """
    for mail in mails:
        mail.own.say(LEAVING)
    failing = sys.exc_info()[0] is not None or hasattr(sys, "last_value") or hasattr(sys, "last_exc")
    patience = _FAILING if failing else max([_PATIENCE, *(mail.timeout for mail in mails)])
    end, pause = time.monotonic() + patience, 1e-5
    tell = time.monotonic() + _QUIETLY
    while True:
        for mail in mails:
            for call in list(mail.open.values()):
                call.end_unasked()
        wanted = lending.room.wanted() if mails else []
        waited_for = [each for each in wanted if not _calls_otherwise(*each)]
        if not waited_for or time.monotonic() > end:
            break
        if time.monotonic() > tell:
            tell = math.inf
            _say("waits at its end, for what was given has not been read", waited_for)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    if wanted and not failing:
        _say("ends, and what was given has not been read", wanted)
    for mail in mails:
        mail.own.say(GONE)


def _calls_otherwise(segment: Segment, reader: Any) -> bool:
    """Whether a reader has made another call instead, so that it will not read."""
    theirs, mine = reader.entry(segment.number), reader.own_entry(segment.number)
    return theirs is not None and mine is not None and theirs[DIGEST] != mine[DIGEST]


def _say(what: str, wanted: Sequence[tuple[Segment, Any]]) -> None:
    """To whoever looks at this process, which nobody hears otherwise."""
    shown = list(dict.fromkeys(reader.told_of(segment.number) for segment, reader in wanted))
    with contextlib.suppress(Exception):
        sys.stderr.write(
            f"meshcomm: process {os.getpid()} {what}: {'; '.join(shown[:4])}{'; ...' if len(shown) > 4 else ''}.\n"
            "  fix: every rank of an axis must make the same calls on it in the same order, with the same src and dst\n"
        )
        sys.stderr.flush()
