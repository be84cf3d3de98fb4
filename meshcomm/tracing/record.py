"""Recorders: hooks on the links of axes, while somebody wants to know of every primitive."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from meshcomm._torch.autograd import backward_pass
from meshcomm.errors import shape_text
from meshcomm.mesh import Axis
from meshcomm.runtime.call import Call, messages_of, told
from meshcomm.runtime.callsite import CallSite, Spot, call_spot, site_at
from meshcomm.runtime.hooks.stack import Hook, Running, put_on, take_off
from meshcomm.runtime.pending import Around, Pending, TimedOutError
from meshcomm.tracing.event import TraceEvent, bytes_of, bytes_of_several

_clock = time.perf_counter_ns
_SECOND = 1e9
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")


class Record:
    """One primitive while it runs. What can be worked out later is: that is most of it."""

    __slots__ = (
        "_axis", "_call", "_dtype", "_form", "_given", "_primitive", "_several", "_shape", "_site", "asked",
        "asynchronous", "backward", "began", "ended", "error", "returned", "waited", "waited_at",
    )  # fmt: skip

    def __init__(self, axis: _Place, what: Running, backward: bool, site: CallSite | Spot) -> None:
        """``site``: the user's line, or the instruction, of which the line is asked when the trace is."""
        name, given, call, _, later, _, form = what
        self._axis, self._primitive, self._call, self._form = axis, name, call.apart, form
        self._several: tuple[Any, ...] = ()
        if name in _SEVERAL:
            self._several = bytes_of_several(what, axis.size), messages_of(*what.messages), _key(what)
            given = (what.x,)
        x = given[0]
        self._given: Sequence[Any] = given[1:]
        self._dtype: torch.dtype | None = None if x is None else x.dtype
        self._shape: tuple[int, ...] = () if x is None else x.shape
        self.asynchronous = later and not told.waits
        self.backward, self._site = backward, site
        self.waited = 0
        self.waited_at: int | None = None
        self.asked: tuple[str, Spot] | None = None
        self.returned: int | None = None
        self.ended: int | None = None
        self.error: str | None = None
        self.began = _clock()

    def end(self, error: BaseException | None = None) -> None:
        """It is done, or has failed; the first time counts."""
        if self.ended is None:
            self.ended = _clock()
            self.error = None if error is None else type(error).__name__

    def event(self, origin: int) -> TraceEvent:
        """What is known by now; times count from ``origin``."""
        axis, name, ended, site, dtype = self._axis, self._primitive, self.ended, self._site, self._dtype
        if not isinstance(site, CallSite):
            site = self._site = site_at(site)
        shape, given = self._shape, self._given
        if self._form is not None:
            shape, *given = self._form(axis.size, shape, *given)
        messages: Any = (), ()
        if self._several:
            figures, messages, key = self._several
        else:
            assert dtype is not None
            figures = bytes_of(name, math.prod(shape), dtype.itemsize, given, axis.size, axis.index)
            key = name, dtype, *(() if name == "all_to_all" else (tuple(shape), *(() if name == "permute" else given)))
        send, recv = map(tuple, given) if name == "all_to_all" else ((), ())
        before, behind = self._call
        call = Call._make((*before, None, *behind, (), send, recv, messages, None, False))
        return TraceEvent(
            operation=call.what, called=call.text, primitive=name,
            axis=axis.name, size=axis.size, rank=axis.rank, place=axis.place,
            dtype=dtype, shape=tuple(shape), payload=figures[0], wire=figures[1],
            site=None if site.file.startswith(_TORCH) else site,
            backward=self.backward, asynchronous=self.asynchronous,
            start=(self.began - origin) / _SECOND,
            issue=None if self.returned is None else (self.returned - self.began) / _SECOND,
            wait=self.waited / _SECOND,
            end=None if ended is None else (ended - origin) / _SECOND,
            error=self.error,
            launch=axis.launch, group=axis.group, ranks=axis.ranks,
            key=repr((call.what, call.given, call.fixed, call.tree, key)),
            gradient=call.gradient, sent=axis.named(messages[0]), wanted=axis.named(messages[1]), runs=(send, recv),
            waited_at=None if self.waited_at is None else (self.waited_at - origin) / _SECOND,
            asked="" if self.asked is None else f"{self.asked[0]} at {site_at(self.asked[1])}",
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


class Recorder(Hook):
    """Records every primitive over an axis, for one who listens."""

    def __init__(self, axis: Axis, records: list[Record], launch: str) -> None:
        self.records = records
        self._place = _Place(axis, launch)
        self._announced: tuple[Call | None, CallSite | Spot] = None, CallSite("", 0)

    def announce(self, call: Call) -> None:
        """Leave the user's line at the node of autograd that is being made, if one is."""
        node = told.node
        if node is not None and call.needs_grad:
            site = node.call_site = _site(backward_pass() != -1)
            self._announced = call, site

    def run(self, what: Running) -> Any:
        """Record it, and when it has ended."""
        backward, (announced, site) = backward_pass() != -1, self._announced
        if announced is not what.call:
            site = _site(True) if backward else call_spot(3)
        record = Record(self._place, what, backward, site)
        self.records.append(record)
        try:
            result = what.go()
        except BaseException as error:
            record.end(error)
            raise
        if isinstance(result, Pending):
            record.returned = _clock()
            return _Watched(result, record)
        record.returned = record.ended = _clock()
        return result


class _Watched(Around):
    """A primitive under way, whose end is recorded by who waits for it."""

    __slots__ = ("_record",)

    def __init__(self, source: Pending, record: Record) -> None:
        super().__init__(source)
        self._record = record

    def meet(self) -> None:
        """As the one inside, and note how long."""
        began = _clock()
        self.inside.meet()
        if self._record.ended is None:
            self._record.waited += _clock() - began

    def wait(self, timeout: float | None) -> Any:
        """Wait, and note how long."""
        record, began = self._record, _clock()
        if record.ended is None:
            record.waited_at = began
        if timeout is not None:
            record.asked = "a time-out", call_spot(2)
        try:
            value = self.inside.wait(timeout)
        except TimedOutError:
            record.waited += _clock() - began
            raise
        except BaseException as error:
            record.end(error)
            raise
        if record.ended is None:
            record.ended = ended = _clock()
            record.waited += ended - began
        return value

    def done(self) -> bool:
        """As the one inside; what is done has ended."""
        done = self.inside.done()
        if self._record.asked is None:
            self._record.asked = "done()", call_spot(2)
        if done:
            self._record.end()
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


def _site(backward: bool) -> CallSite | Spot:
    """The user's line that a primitive is due to: that of the node which autograd is running, if it is known; else of
    this call.
    """
    if backward:
        for frame in _library_frames():
            if frame.f_code.co_name == "backward" and frame.f_code.co_filename.startswith(_PACKAGE):
                left: CallSite | Spot | None = getattr(frame.f_locals.get("ctx"), "call_site", None)
                if left is not None:
                    return left
    return call_spot(3)


def _library_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, _TORCH)):
        yield frame
        frame = frame.f_back
