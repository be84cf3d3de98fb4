"""What is said when the time of a call is up: what it is, since when, who has come, and where the others are.

Ranks whose time is up write at the store what they wait for, and read for a moment what the others have written.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from meshcomm import _torch
from meshcomm.errors import text
from meshcomm.runtime import recorder
from meshcomm.runtime.call import AxisAt
from meshcomm.runtime.callsite import hinted, in_backward
from meshcomm.runtime.health import hosts
from meshcomm.runtime.process import exits
from meshcomm.runtime.recorder import BEGAN, NUMBER, Log, Record, site_of, text_of
from meshcomm.runtime.words import axis_text, place_of, sentence

_GRACE, _LEAST, _SHARE = 2.0, 0.25, 0.25
"""Seconds for which others are asked, at most where nothing else is said and at least, and the share of the time that
was waited.
"""
_SKEW = 5.0
"""Seconds by which the clocks of two machines may differ."""
_SHOWN = 16
"""The most ranks that are shown one by one."""
_PAUSE = 0.02
_COMPILES = (
    "it has compiled calls over this axis (torch.compile): if it stands in one of these, it meets no other on the CPU;"
    " all ranks compile a call or none, and one may have stopped by itself (recompile_limit; TORCH_LOGS=recompiles says"
    " so)"
)


class Late(NamedTuple):
    """A call whose time is up."""

    where: str
    """The public function."""
    log: Log
    record: Record
    seconds: float
    """How long was waited."""
    missing: Sequence[int] | None = None
    """The indices that were waited for and have not come, where that is known."""
    came: Sequence[int] = ()
    """Those that are known to have come."""
    known: Mapping[int, str] = {}
    """What is known of them."""
    found: str = ""
    """What has become of their processes."""
    axis: AxisAt | None = None
    """Which of the names of the group was used, where that is known."""
    aside: Sequence[int] = ()
    """Those that this rank itself does not wait for, but another one may."""
    grace: float = _GRACE
    """Seconds for which others are asked, at most."""

    @property
    def over(self) -> str:
        """``'dp'``."""
        return str(self.log) if self.axis is None else axis_text(self.axis)

    @property
    def call(self) -> str:
        """``all_reduce f32[8] (op='sum') over 'dp' at train.py:88``."""
        return sentence(text_of(self.record), self.over, site_of(self.record))

    @property
    def suspects(self) -> list[int]:
        """Who may not have come."""
        return [i for i in range(len(self.log.ranks)) if i != self.log.index and i not in self.came]


_keepers: list[Callable[[], Path | None]] = []


def keep_by(keep: Callable[[], Path | None]) -> None:
    """Call ``keep`` when a call's time is up: the file that it has written is named in the error."""
    _keepers.append(keep)


def late_text(late: Late, fix: str = "the call was given up; s") -> str:
    """All of it. ``fix``: what has become of the call, and the beginning of "see"."""
    lines = [_itself(late)]
    found, far, compiled = _ask(late)
    came, elsewhere, silent = _sorted(late, found)
    lost = {i: far[rank] for i, rank in enumerate(late.log.ranks) if rank in far and i not in came}
    blamed = lost or [i for i in silent if i not in late.aside]
    absent = sorted([*elsewhere, *blamed]) if late.missing is None else list(late.missing)
    late = late._replace(known={**late.known, **dict.fromkeys(compiled, _COMPILES)})
    lines += _who(late, came, elsewhere, silent, lost, asked=late.log.meeting is not None)
    lines += [f"  last completed: {line}" for line in _completed(late, found)]
    for dumped in (path for keep in _keepers if late.log.meeting is not None and (path := keep()) is not None):
        lines.append(
            f"  the last calls of this rank are in {dumped}; python -m meshcomm explain {os.path.dirname(dumped)}"
        )
    far_off = dict.fromkeys(filter(None, (_place(late.log, i) for i in absent[:_SHOWN])))
    what = (
        f"{' '.join([_named(absent), ', '.join(far_off)]).rstrip()} did not come"
        if absent
        else "all ranks came, and not all that they sent"
    )
    why = "; ".join(filter(None, (hosts.no_way(far), late.found)))
    said = text(
        late.where,
        f"{what} within {late.seconds:.3g} s{': ' if why else ''}{why}.",
        got="\n".join(lines),
        fix=f"{fix}ee where the ranks that have not come are (kill -USR1, then python -m meshcomm explain; py-spy dump"
        " --pid): all ranks of an axis must make the same calls in the same order",
    )
    return hinted(said, backward=in_backward())


def _named(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:_SHOWN])) + (", ..." if len(indices) > _SHOWN else "")
    return f"{'index' if len(indices) == 1 else 'indices'} {shown}"


def _itself(late: Late) -> str:
    log, record = late.log, late.record
    axis = late.axis or (log.axes[0] if log.axes else None)
    here = "" if axis is None else f", here {place_of(axis)}"
    number = f", call {record[NUMBER]} of a group of {len(log.ranks)}" if record[NUMBER] else ", messages"
    return f"{late.call}{here}{number}, since {_clock(recorder.wall(record[BEGAN]))}"


def _clock(when: float) -> str:
    return f"{datetime.fromtimestamp(when):%H:%M:%S} ({time.time() - when:.3g} s)"


def _who(
    late: Late,
    came: Sequence[int],
    elsewhere: Mapping[int, str],
    silent: Sequence[int],
    lost: Mapping[int, str],
    *,
    asked: bool,
) -> Iterator[str]:
    yield f"  arrived: {', '.join(_rank(i, late.log) for i in sorted([*came, late.log.index]))}"
    for i, where in list(elsewhere.items())[:_SHOWN]:
        yield f"  not arrived: {_rank(i, late.log)}: {where}"
    for i in silent[:_SHOWN]:
        said = f"its host does not answer: {lost[i]}" if i in lost else late.known.get(i)
        said = said or ("it does not answer: it may still compute, wait with more patience, or hang" if asked else "")
        aside = i in late.aside or (late.missing is None and lost)
        how = "not known of" if aside and i not in lost else "not arrived"
        yield f"  {how}: {_rank(i, late.log)}{': ' + said if said else ''}"
    if len(silent) > _SHOWN or len(elsewhere) > _SHOWN:
        yield "  and more"


def _rank(index: int, log: Log) -> str:
    place, ranks = _place(log, index), log.ranks
    who = f"index {index} (rank {ranks[index]})" if ranks[index] != index else f"rank {index}"
    return f"{who} {place}" if place else who


def _place(log: Log, index: int) -> str:
    """On which other host; the ranks of one process have no store, and its numbers of them are not the world's."""
    return "" if log.meeting is None else hosts.where(log.ranks[index])


def _sorted(late: Late, found: Mapping[int, Any]) -> tuple[list[int], dict[int, str], list[int]]:
    """Who has come, who is elsewhere and where, who says nothing."""
    came, elsewhere, silent = list(late.came), {}, []
    for i in late.suspects:
        answer = found.get(i)
        if answer is None:
            silent.append(i)
        elif late.record[NUMBER] and (answer["group"], answer["number"]) == (late.log.title, late.record[NUMBER]):
            if late.missing is None:
                came.append(i)
            else:
                silent.append(i)
        else:
            elsewhere[i] = f"its time was up in {answer['call']}, since {_clock(answer['since'])}"
    return came, elsewhere, silent


def _completed(late: Late, found: Mapping[int, Any]) -> Iterator[str]:
    """Each rank's last call that came to an end, as far as it is known."""
    mine = late.log.last_done
    yield f"this rank {'nothing yet on this axis' if mine is None else f'{text_of(mine)}, call {mine[NUMBER]}'}"
    for i, answer in list(found.items())[:_SHOWN]:
        yield f"{_rank(i, late.log)} {answer['done'] or 'nothing yet'}"


# ----------------------------------------------------------------------------------------------------- at the store


def compiles(log: Log) -> None:
    """Calls of this rank over a group are being compiled; at the store, for who waits for one that is not."""
    if log.meeting is not None and (key := _compiled(log, log.index)) not in _told:
        _told.add(key)
        with exits.blocked(), contextlib.suppress(RuntimeError):
            _torch.default_store().set(key, "")


def _compiled(log: Log, index: int) -> str:
    return f"meshcomm/compiled/{log.meeting}/{log.title}/{index}"


_told: set[str] = set()


def _ask(late: Late) -> tuple[dict[int, Any], dict[int, str], list[int]]:
    """What others say, by index; by rank of the world whose hosts do not answer, and why not; and who compiles."""
    if late.log.meeting is None:
        return {}, {}, []
    grace = min(late.grace, _LEAST + _SHARE * late.seconds)
    found: dict[int, Any] = {}
    compiled: list[int] = []
    asking = threading.Thread(
        target=_meet, args=(late, grace, found, compiled), name="meshcomm late", daemon=True
    )  # the store may not answer, if the process that serves it has stopped
    asking.start()
    end = time.monotonic() + grace + late.grace / 2
    far = hosts.silent((late.log.ranks[i] for i in late.suspects), grace)
    asking.join(max(0.0, end - time.monotonic()))
    return dict(found), far, list(compiled)


def _meet(late: Late, grace: float, found: dict[int, Any], compiled: list[int]) -> None:
    try:
        with exits.blocked():
            compiled += [i for i in late.suspects if _torch.default_store().check([_compiled(late.log, i)])]
            _write_and_read(late, grace, found)
    except (RuntimeError, ValueError):  # without the store there is nothing more to say
        return


def _write_and_read(late: Late, grace: float, found: dict[int, Any]) -> None:
    store, prefix = _torch.default_store(), f"meshcomm/late/{late.log.meeting}"
    store.set(f"{prefix}/{late.log.ranks[late.log.index]}", json.dumps(_status(late)))
    left, end = set(late.suspects), time.monotonic() + grace
    since = recorder.wall(late.record[BEGAN])
    while left:
        for i in list(left):
            key = f"{prefix}/{late.log.ranks[i]}"
            if store.check([key]):
                answer = json.loads(store.get(key))
                if answer["at"] > since - (0.0 if answer["host"] == socket.gethostname() else _SKEW):
                    found[i] = answer
                    left.discard(i)
        if time.monotonic() > end:
            return
        time.sleep(_PAUSE)


def _status(late: Late) -> dict[str, Any]:
    ring = recorder.ring()
    done = None if ring is None else ring.last_done()
    number = late.record[NUMBER]
    return {
        "at": time.time(),
        "host": socket.gethostname(),
        "group": late.log.title,
        "number": number,
        "call": f"{late.call}{f', call {number}' if number else ''}",
        "since": recorder.wall(late.record[BEGAN]),
        "done": "" if done is None else f"{sentence(text_of(done[1]), str(done[0]), '')}, call {done[1][NUMBER]}",
    }
