"""The time-out of one call that gives its result, and what is said when a time is up."""

from __future__ import annotations

import contextlib
import time
from typing import Any, cast

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.axis import Axis
from meshcomm.errors import CommError, fail, text
from meshcomm.runtime.call import Call, for_later, told
from meshcomm.runtime.health import peers
from meshcomm.runtime.health.lateness import Late, late_text
from meshcomm.runtime.pending import Pending, TimedOutError
from meshcomm.runtime.recorder import ENDED, failed, log_of, made, noted
from meshcomm.runtime.start.request import duration
from meshcomm.runtime.transports.threads.scheduler import current_rank

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape."""


class Limit:
    """The time-out of one call that gives its result. It stands where others say whether they want a Work."""

    __slots__ = ("_end", "seconds")

    def __init__(self, where: str, timeout: object, async_op: bool) -> None:
        self.seconds = _checked_limit(where, timeout, async_op)
        self._end = time.monotonic() + self.seconds

    def settled(self, what: str, axis: Axis, x: Tensor | Kind | None, result: Any) -> Any:
        """The result, or CommError when the time is up; then nobody can wait for it any more. The others, when they
        come, get what this rank has given; under guard they are told, and this rank gets the result if all have come.
        """
        if not isinstance(result, Pending):
            return result
        seen = (x.dtype, x.shape) if isinstance(x, Tensor) else (None, ()) if x is None else x
        call = noted(result.record(), what, axis, *seen)
        try:
            return for_later(False, self._in_time, result)
        except TimedOutError as late:
            error = CommError(self._too_late(cast(Call, made(call)), axis, result.record(), late))
        with contextlib.suppress(Exception):
            if (record := result.record()) is not None and record[ENDED] is None:
                failed(record, error)
            result.give_up()
            result.abandon()
        if told.begun:
            told.begun.clear()  # what comes is taken all the same
        try:
            raise error
        finally:
            del error  # a circle would keep what the frames of its traceback have

    def _in_time(self, result: Pending) -> Any:
        try:
            return result.wait(max(1e-3, self._end - time.monotonic()))
        except TimedOutError:
            if not result.withdraw(self.seconds):
                raise
        return result.wait(None)

    def _too_late(self, call: Call, axis: Axis, record: Any, late: TimedOutError) -> str:
        if record is None:
            return not_done(call, self.seconds, self.seconds, str(late), "the call was given up;")
        link: Any = axis.link
        log = log_of(link)
        assert log is not None  # of which the record is
        absent = range(len(log.ranks)) if late.missing is None else late.missing
        found = peers.account([log.ranks[i] for i in absent]) if current_rank() is None else ""
        return late_text(
            Late(call.what, log, record, self.seconds, late.missing, late.came, late.known, found, call.axis)
        )


def not_done(call: Call | None, waited: float | None, since: float, absent: str, fix: str) -> str:
    """Of what is waited for by who may wait again, or has given it up; None: until the time of the mesh was up."""
    now = "when the time of its mesh was up" if waited is None else f"after {waited:.3g} s of waiting"
    what, got = ("wait", "") if call is None else (call.what, str(call))
    return text(
        what,
        f"not done {now}, {since:.3g} s after it began.",
        got="; ".join(part for part in (got, absent) if part),
        fix=f"{fix} see where the other ranks are, for one of them has not made this call"
        " (py-spy dump --pid, faulthandler.dump_traceback_later; among in-process ranks that is an error which"
        " names the rank and the line)",
    )


def _checked_limit(where: str, timeout: object, async_op: bool) -> float:
    """The seconds of a time-out of a single call."""
    if torch.compiler.is_compiling() or _torch.functorch_active() or _torch.dual_level_open():
        what = "timeout= in compiled code or under a torch.func transform."
        fail(where, what, fix="give it to the mesh: make_mesh(..., timeout=)")
    limit = duration(where, cast(Any, timeout))
    if async_op:
        fail(where, "timeout= with async_op=True.", fix="give the time-out to the wait of the work")
    assert limit is not None
    return limit.total_seconds()
