"""Who names, on the host, the ranks that a device waits for.

A call that returned at once may stand in the device's queue for as long as another rank does not come. Nobody waits for
it here; torch's own watchdog ends the process when its time is up, and knows no names: this tells of it before.
"""

from __future__ import annotations

import sys
import threading
import time

from meshcomm.runtime import recorder
from meshcomm.runtime.health.lateness import Late, late_text
from meshcomm.runtime.process import exits
from meshcomm.runtime.recorder import BEGAN, WHAT, Log, Record, state_of

_SHARE = 0.8
"""Of its time, after which a call is told of."""
_LOOKS = 50
"""How often in that time it is looked at."""
_SHORTEST, _LONGEST = 0.05, 15.0

_watched: list[tuple[Log, float]] = []
_told: dict[int, Record] = {}
"""By log, the call that was told of last."""
_lock = threading.Lock()
_thread: list[threading.Thread] = []


def watch(log: Log, seconds: float) -> None:
    """Tell of calls of this log that a device has not come through when most of their time is up."""
    with _lock:
        _watched.append((log, seconds))
        if not _thread or not _thread[0].is_alive():
            _thread[:] = [threading.Thread(target=_live, name="meshcomm overdue", daemon=True)]
            _thread[0].start()


def _live() -> None:
    while True:
        with _lock:
            _watched[:] = [(log, seconds) for log, seconds in _watched if not log.over]
            if not _watched:
                _thread.clear()
                _told.clear()
                return
            watched = list(_watched)
        with exits.blocked():
            for log, seconds in watched:
                look(log, seconds)
        time.sleep(min(_LONGEST, max(_SHORTEST, min(seconds for _, seconds in watched) / _LOOKS)))


def look(log: Log, seconds: float) -> str:
    """What is said now, once for each call: nothing unless the first that the device has to come through is late.

    The device is asked of none that is younger: while another thread captures a CUDA graph, that may spoil it.
    """
    now = time.monotonic()
    old = (record for record in log.records.copy() if now - record[BEGAN] >= _SHARE * seconds)
    record = next((record for record in old if state_of(record) == "queued"), None)
    if record is None or _told.get(id(log)) is record:
        return ""
    waited = now - record[BEGAN]
    _told[id(log)] = record
    fix = f"the device waits; after {seconds:.3g} s torch may end this process. S"
    said = late_text(Late(record[WHAT], log, record, waited), fix=fix)
    ring = recorder.ring()
    sys.stderr.write(f"meshcomm: rank {'?' if ring is None else ring.owner.rank}: {said}\n")
    sys.stderr.flush()
    return said
