"""Recorders: hooks on the links of axes, while somebody wants to know of every primitive."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from meshcomm._torch.backward import backward_pass
from meshcomm.axis import Axis
from meshcomm.errors import shape_text
from meshcomm.runtime.call import AXIS, BEHIND, SEEN, Call, messages_of, told
from meshcomm.runtime.callsite import CallSite, Spot, call_spot, is_ours, site_at
from meshcomm.runtime.hooks.stack import Form, Listener, Running, put_on, take_off
from meshcomm.runtime.pending import Around, Pending, TimedOutError
from meshcomm.tracing.event import TraceEvent, bytes_of, bytes_of_several

_clock = time.perf_counter_ns
_SECOND = 1e9
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")


Record = list[Any]
"""One primitive while it runs: a list, for that is the cheapest that can be changed. What can be worked out later is:
that is most of it.
"""
(
    PLACE, NAME, SAID, MORE, FORM, DTYPE, SHAPE, GIVEN, SEVERAL, LATER, BACKWARD, SITE, BEGAN, RETURNED, ENDED, WAITED,
    WAITED_AT, ASKED, ERROR,
) = range(19)  # fmt: skip
"""``SAID``, ``MORE``: the fields of the call before its axis and behind it. ``GIVEN``: the arguments behind the tensor.
``SEVERAL``: of what is given several tensors or none its bytes, messages and key. ``SITE``: the user's line, or the
instruction, of which the line is asked when the trace is. ``WAITED``: for how long after the call. ``ASKED``: what for,
and where.
"""


def _over(record: Record, error: BaseException | None = None) -> None:
    """It is done, or has failed; the first time counts."""
    if record[ENDED] is None:
        record[ENDED] = _clock()
        record[ERROR] = None if error is None else type(error).__name__


def event_of(record: Record, origin: int) -> TraceEvent:
    """What is known by now; times count from ``origin``."""
    (
        axis, name, said, more, form, dtype, shape, given, several, later, backward, site, began, returned, ended,
        waited, waited_at, asked, error,
    ) = record  # fmt: skip
    if not isinstance(site, CallSite):
        site = record[SITE] = site_at(site)
    if form is not None:
        shape, *given = form(axis.size, shape, *given)
    messages: Any = (), ()
    if several is not None:
        figures, messages, key = several
    else:
        figures = bytes_of(name, math.prod(shape), dtype.itemsize, given, axis.size, axis.index)
        key = name, dtype, *(() if name == "all_to_all" else (tuple(shape), *(() if name == "permute" else given)))
    send, recv = map(tuple, given) if name == "all_to_all" else ((), ())
    call = Call._make((*said, None, *more, (), send, recv, messages, None, False))
    return TraceEvent(
        operation=call.what, called=call.text, primitive=name,
        axis=axis.name, size=axis.size, rank=axis.rank, place=axis.place,
        dtype=dtype, shape=tuple(shape), payload=figures[0], wire=figures[1],
        site=None if site.file.startswith(_TORCH) else site,
        backward=backward, asynchronous=later,
        start=(began - origin) / _SECOND,
        issue=None if returned is None else (returned - began) / _SECOND,
        wait=waited / _SECOND,
        end=None if ended is None else (ended - origin) / _SECOND,
        error=error,
        launch=axis.launch, group=axis.group, ranks=axis.ranks,
        key=repr((call.what, call.given, call.fixed, call.tree, key)),
        gradient=call.gradient, sent=axis.named(messages[0]), wanted=axis.named(messages[1]), runs=(send, recv),
        waited_at=None if waited_at is None else (waited_at - origin) / _SECOND,
        asked="" if asked is None else f"{asked[0]} at {site_at(asked[1])}",
    )  # fmt: skip


def _key(what: Running) -> tuple[Any, ...]:
    """What must be equal on all ranks, of what is not given one tensor."""
    return what.key if what.name != "scatter" else (what.name, what.like.dtype, tuple(what.like.shape), *what.args[2:])


_SEVERAL = frozenset(("exchange", "scatter", "barrier", "barrier_within"))
"""Primitives that are not given one tensor."""


class _Place:
    """An axis, for records that outlive it."""

    def __init__(self, axis: Axis, launch: str) -> None:
        self.launch = launch
        self.name, self.size, self.index = axis.name, axis.size, axis.own_index
        self.ranks, self.group = axis.own_ranks, axis.group
        self.rank = axis.own_ranks[axis.own_index]
        self.place = ", ".join(f"{name}={place}" for name, place in axis.own_coordinate.items())

    def named(self, messages: Sequence[Any]) -> tuple[tuple[int, int, str], ...]:
        """Messages with the ranks of the world in place of indices."""
        return tuple((self.ranks[i], tag, shape_text(dtype, shape)) for i, tag, dtype, shape in messages)


class Recorder(Listener):
    """Records every primitive over an axis, for one who listens."""

    def __init__(self, axis: Axis, records: list[Record], launch: str) -> None:
        self.records = records
        self._place = _Place(axis, launch)
        self._announced: tuple[Call | None, CallSite | Spot] = None, CallSite("", 0)

    def announce(self, call: Call) -> None:
        """Leave the user's line at the node of autograd that is being made, if one is."""
        if call.needs_grad and (node := told.node) is not None:
            site = node.call_site = call_spot(3) if backward_pass() == -1 else _site_in_backward()
            self._announced = call, site

    def begins(self, name: str, given: tuple[Any, ...], call: Call, asynchronous: bool, form: Form | None) -> Record:
        """Record it."""
        backward, (announced, site) = backward_pass() != -1, self._announced
        if announced is not call:
            site = _site_in_backward() if backward else call_spot(4)  # nobody but the library calls a primitive
        later, several, x = asynchronous and not told.waits, None, given[0] if given else None
        if name in _SEVERAL:
            what = Running(name, given, call, None, asynchronous, _nothing)
            several, x = (bytes_of_several(what, self._place.size), messages_of(*what.messages), _key(what)), what.x
            given = ()  # among it may be a tensor
        dtype, shape = (None, ()) if x is None else (x.dtype, x.shape)
        record = [
            self._place, name, call[:AXIS], call[BEHIND:SEEN], form, dtype, shape, given[1:], several, later,
            backward, site, _clock(), None, None, 0, None, None, None,
        ]  # fmt: skip
        self.records.append(record)
        return record

    def ended(self, note: Record, result: Any) -> Any:
        """Or it is under way, and will have ended when somebody has waited for it."""
        note[RETURNED] = now = _clock()
        if isinstance(result, Pending):
            return _Watched(result, note)
        note[ENDED] = now
        return result

    def failed(self, note: Record, error: BaseException) -> None:
        """With what."""
        _over(note, error)


def _nothing() -> None:
    """What does not go on from here."""


class _Watched(Around):
    """A primitive under way, whose end is recorded by who waits for it."""

    __slots__ = ("_record",)

    def __init__(self, source: Pending, record: Record) -> None:
        self.inside, self.bare, self._record = source, source.bare, record

    def meet(self) -> None:
        """As the one inside, and note how long."""
        began = _clock()
        self.inside.meet()
        if self._record[ENDED] is None:
            self._record[WAITED] += _clock() - began

    def wait(self, timeout: float | None) -> Any:
        """Wait, and note how long."""
        record, began = self._record, _clock()
        if record[ENDED] is None:
            record[WAITED_AT] = began
        if timeout is not None:
            record[ASKED] = "a time-out", call_spot(2)
        try:
            value = self.inside.wait(timeout)
        except TimedOutError:
            record[WAITED] += _clock() - began
            raise
        except BaseException as error:
            _over(record, error)
            raise
        if record[ENDED] is None:
            record[ENDED] = ended = _clock()
            record[WAITED] += ended - began
        return value

    def done(self) -> bool:
        """As the one inside; what is done has ended."""
        done = self.inside.done()
        if self._record[ASKED] is None:
            self._record[ASKED] = "done()", call_spot(2)
        if done:
            _over(self._record)
        return done


# ---------------------------------------------------------------------------------------------- coming and going


def attach(axis: Axis, records: list[Record], launch: str) -> None:
    """Put every primitive over ``axis`` into ``records``: not of a graph that is compiled, nor of one rank alone.
    ``launch``: whose ranks they are.
    """
    if axis.is_traced or axis.size == 1:
        return
    detach(axis, records)
    put_on(axis.link, Recorder(axis, records, launch))


def detach(axis: Axis, records: list[Record]) -> None:
    """No more."""
    for hook in axis.link.hooks:
        if isinstance(hook, Recorder) and hook.records is records:
            take_off(axis.link, hook)


# ---------------------------------------------------------------------------------------------------- call sites


def _site_in_backward() -> CallSite | Spot:
    """The user's line that a primitive of a backward is due to: that of the node which autograd is running, if it is
    known; else of this call.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_ours((code := frame.f_code).co_filename):
        if code.co_name == "backward" and code.co_filename.startswith(_PACKAGE):
            left: CallSite | Spot | None = getattr(frame.f_locals.get("ctx"), "call_site", None)
            if left is not None:
                return left
        frame = frame.f_back
    return call_spot(3)
