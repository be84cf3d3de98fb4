"""What each rank has called last: a ring of records for each group, always on, and where it is written when asked.

A record is a list that is filled without a word of text; words are made of it when somebody asks.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from types import CodeType
from typing import Any, NamedTuple, TypeVar, cast

import torch

from meshcomm._torch.backward import backward_pass
from meshcomm.runtime.call import AxisAt, Call, Post, Want
from meshcomm.runtime.callsite import call_site, call_spot, site_at
from meshcomm.runtime.pending import Pending, TimedOutError
from meshcomm.runtime.process import accelerator, forks, inside
from meshcomm.runtime.words import call_text, messages_text, primitive_arguments, primitive_text

MOST = 1000
"""The calls of a rank that are kept."""
_OVER = 64
"""The logs that are kept of meshes that are gone."""

Record = list[Any]
"""One call: a list, for that is the cheapest that can be changed."""
NUMBER, WHAT, OP, DTYPE, SHAPE, BEGAN, ENDED, CALL, ROOT, THREAD = range(10)
"""``NUMBER``: of the call in its group from 1 on, 0 for messages, which not all ranks need to send. ``WHAT``: the
primitive. ``BEGAN``: as time.monotonic() says. ``ENDED``: None while it is under way; when; True where it came back at
once; a mark in its work where a device has yet to come through it; else why it failed. ``CALL``: the call, or what
makes it, where somebody knows it: see :func:`call_of`. ``ROOT``: an index or -1; of messages, to and from whom.
``THREAD``: which one is in it; 0 where it is waited for later.
"""
DROPPED = "nobody waited for it"

F = TypeVar("F", bound=Callable[..., Any])


class Log:
    """The last calls of this rank in one group."""

    __slots__ = (
        "_count", "axes", "begin", "call", "index", "inside", "meeting", "messages", "number", "over", "ranks",
        "records", "seconds", "title",
    )  # fmt: skip

    def __init__(self, ranks: tuple[int, ...], index: int, seconds: float | None = None) -> None:
        self.ranks, self.index, self.seconds = ranks, index, seconds
        self.title = ""
        """Of the group, the same on all of its ranks."""
        self.meeting: int | None = None
        """Which meeting of its ranks at the store this is; None where they have no store."""
        self.axes: list[AxisAt] = []
        self.records: deque[Record] = deque(maxlen=MOST)
        self.over = False  # whether its mesh is gone
        self.restart()

    def restart(self) -> None:
        """Nothing has been called."""
        self.records.clear()
        self.messages = 0
        self.inside = False  # a primitive that is made of others is one call
        self.call: Call | None = None
        """Set by who knows it before each call."""
        self._count = itertools.count(1)
        self.number = self._count.__next__
        self.begin = self._begin()

    def _begin(self) -> Callable[..., Record]:
        """``begin(what, op, dtype, shape, root=-1)``: note a call. A closure: it costs half of what a method does."""
        number, keep, now = self.number, self.records.append, time.monotonic

        def begin(what: str, op: str, dtype: torch.dtype | None, shape: Any, root: Any = -1) -> Record:
            record = [number(), what, op, dtype, shape, now(), None, self.call, root, get_ident()]
            keep(record)
            return record

        return begin

    def message(self, posts: Sequence[Post], wants: Sequence[Want]) -> Record:
        """Note a batch of messages."""
        root = [post[1:] for post in posts], [(want[0], want[3]) for want in wants]
        self.messages += 1
        record: Record = [0, "exchange", "", None, (), time.monotonic(), None, self.call, root, get_ident()]
        self.records.append(record)
        return record

    def named(self, name: str | tuple[str, ...], coordinate: dict[str, int]) -> None:
        """A mesh has an axis over this group."""
        axis = AxisAt(name, coordinate)
        if axis not in self.axes:
            self.axes.append(axis)

    @property
    def begun(self) -> int:
        """The number of the last call, 0 before the first."""
        return int(repr(self._count)[6:-1]) - 1  # there is no other way to look without taking

    @property
    def last(self) -> Record | None:
        """The call that was begun last."""
        return self.records[-1] if self.records else None

    @property
    def last_done(self) -> Record | None:
        """The call that was begun last of those that came to a good end."""
        return next((each for each in reversed(self.records.copy()) if state_of(each) == "completed"), None)

    def __str__(self) -> str:
        named = list(dict.fromkeys(repr(axis.name) for axis in self.axes))[:3]  # several meshes may have this group
        return " or ".join(named) if named else f"the group of ranks {list(self.ranks)}"


def log_of(link: Any) -> Log | None:
    """Where the calls of a link are noted first: by a hook, or by its transport, if one does."""
    found: Log | None = next((hook.log for hook in link.hooks if hook.log is not None), getattr(link, "log", None))
    return found


def state_of(record: Record) -> str:
    """One word."""
    ended = record[ENDED]
    if ended is None:
        return "begun"
    if isinstance(ended, str):
        return "dropped" if ended == DROPPED else "failed"
    if ended is not True and not isinstance(ended, float):
        try:
            if not ended.query():
                return "queued"
        except RuntimeError:  # the device is in an error
            return "queued"
        record[ENDED] = True
    return "completed"


def under_way(log: Log) -> Record | None:
    """The first call of this log that has not come to its end."""
    return next((record for record in log.records.copy() if state_of(record) in ("begun", "queued")), None)


def waits_on_a_device(since: float) -> bool:
    """Whether a call of this process that was made before is one that its device has not come through."""
    every = [] if _ring is None else [record for log in list(_ring.logs) for record in log.records.copy()]
    return any(record[BEGAN] < since and state_of(record) == "queued" for record in every)


def call_of(record: Record) -> Call | None:
    """The call, where it is known; made when it is asked for, of a function and its arguments."""
    record[CALL] = call = made(record[CALL])
    return call


def made(call: Any) -> Call | None:
    """A call that may be a function and its arguments, of which it is made when somebody asks."""
    if type(call) is tuple:
        return call[0](*call[1:]) if call else None
    return cast("Call | None", call)


Named = tuple[Any, ...]
"""What makes a call when somebody asks for it."""


def noted(record: Record | None, what: str, axis: Any, dtype: torch.dtype | None, shape: Sequence[int]) -> Named:
    """What makes the public call, of this line of the user's, that a record is of; it is made of that from now on.

    The axis may be gone when somebody asks. Who asks for this is called by a function of the library.
    """
    spot = call_spot(3)
    backward = backward_pass() != -1
    if record is None:
        return public_call, what, axis.name, axis.own_coordinate, dtype, shape, *spot, backward
    number, primitive, op, _, _, _, _, known, root, _ = record
    seen = known, primitive, op, root, number
    record[CALL] = call = public_call, what, axis.name, axis.own_coordinate, dtype, shape, *spot, backward, *seen
    return call


def public_call(
    what: str,
    name: Any,
    coordinate: dict[str, int],
    dtype: torch.dtype | None,
    shape: Sequence[int],
    code: CodeType,
    place: int,
    backward: bool,
    before: Any = None,
    primitive: str = "",
    op: str = "",
    root: Any = -1,
    number: int = -1,
) -> Call:
    """What was noted, as a value. What comes behind ``backward`` is of the record, as it was."""
    axis, site = AxisAt(name, coordinate), site_at((code, place))
    call = Call(what, axis=axis, dtype=dtype, shape=tuple(shape), site=site, backward=backward)
    known = made(before)
    if known is not None and known.what == what:
        return known._replace(axis=axis, site=site, backward=backward)
    if primitive == what:
        given = primitive_arguments(what, op, root)
        messages = root if number == 0 else call.messages
        return call._replace(names=tuple(given), given=tuple(given.values()), messages=messages)
    return call


def text_of(record: Record, what: str = "") -> str:
    """``all_reduce f32[8] (op='sum')``. ``what``: what was called, where only the caller knows it."""
    call = call_of(record)
    if call is not None:
        return call.text
    what = what or record[WHAT]
    if record[NUMBER] == 0:
        return call_text(what, messages_text(*record[ROOT]))
    return primitive_text(what, record[WHAT], record[OP], record[DTYPE], record[SHAPE], record[ROOT])


def site_of(record: Record) -> str:
    """``train.py:88``, where it is known: the line that made the call, or the one that this thread is in."""
    call = call_of(record)
    if call is not None and call.site is not None:
        return call.at
    return str(call_site()) if record[THREAD] == get_ident() else ""


def wall(monotonic: float) -> float:
    """That moment as time.time() says it."""
    return monotonic + (time.time() - time.monotonic())


# ------------------------------------------------------------------------------------------------------- one's own


class Owner(NamedTuple):
    """Whose records they are."""

    rank: int
    size: int


class Ring:
    """All logs of one rank."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.logs: list[Log] = []
        self.retired = False
        self.by_name: dict[Any, Log] = {}

    def log(
        self,
        ranks: tuple[int, ...],
        index: int,
        name: str = "",
        seconds: float | None = None,
        meeting: int | None = None,
    ) -> Log:
        """A log for the calls over an axis; ``name`` tells it, on all of its ranks, from others of the same ranks."""
        log = Log(ranks, index, seconds)
        log.meeting = meeting
        log.title = _title(ranks, name, seconds)
        over = [each for each in self.logs if each.over]
        for each in over[:-_OVER]:
            self.logs.remove(each)
        self.logs.append(log)
        return log

    def calls(self, logs: Sequence[Log] | None = None) -> list[tuple[Log, Record]]:
        """The last calls in all groups, or in those of these ``logs``, the oldest first."""
        every = [(log, record) for log in list(self.logs if logs is None else logs) for record in log.records.copy()]
        every.sort(key=lambda call: call[1][BEGAN])
        return every[-MOST:]

    def last_done(self) -> tuple[Log, Record] | None:
        """The call that was begun last of those that came to a good end, in whatever group."""
        return next((call for call in reversed(self.calls()) if state_of(call[1]) == "completed"), None)


@functools.lru_cache(maxsize=64)
def _title(ranks: tuple[int, ...], name: str, seconds: float | None) -> str:
    within = "" if seconds is None else f" within {seconds:g} s"
    return f"{','.join(map(str, ranks))}{within}{name and f' of {name}'}"


_ring: Ring | None = None


def ring() -> Ring | None:
    """That of this process, if it is a rank."""
    return _ring


def own_ring(owner: Owner) -> Ring:
    """That of this process, a new one after :func:`retire`."""
    global _ring
    if _ring is None or _ring.retired or _ring.owner != owner:
        _ring = Ring(owner)
    return _ring


def retire() -> None:
    """The groups have ended: what was called can be asked for until there are new ones."""
    if _ring is not None:
        _ring.retired = True


_inside: dict[Any, Any] = {}
"""What the ranks of the last launch in this process share, their rings among it."""


def log_among(shared: dict[Any, Any], owner: Owner, ranks: tuple[int, ...], name: str) -> Log:
    """The log of one of the ranks of this process, which share a dict."""
    global _inside
    _inside = shared.setdefault("rings", {})
    if not _inside:
        _inside.update({rank: Ring(Owner(rank, owner.size)) for rank in range(owner.size)})
    mine: Ring = _inside[owner.rank]
    log = mine.by_name.get((ranks, name))
    if log is None:
        log = mine.by_name[ranks, name] = mine.log(ranks, ranks.index(owner.rank), name)
    return log


def inside_again(shared: dict[Any, Any]) -> None:
    """The ranks that share this dict run again."""
    global _inside
    _inside = shared["rings"]


def ring_inside() -> Ring | None:
    """That of the rank of this process which runs."""
    place = inside.running()
    return None if place is None else _inside.get(place[0]) or Ring(Owner(*place))


def rings_inside() -> dict[int, Ring]:
    """Those of the ranks of the last launch in this process."""
    return _inside


@forks.in_every_fork
def _forked() -> None:
    global _ring
    _ring = None


# -------------------------------------------------------------------------------------------------------- at work


def recorded(primitive: F, name: str = "") -> F:
    """A primitive of a link with a ``log``, or the ``run`` of a hook with one; the log keeps the outermost call."""
    name = name or primitive.__name__

    @functools.wraps(primitive)
    def noted(self: Any, *args: Any) -> Any:
        log: Log = self.log
        if log.inside:
            return primitive(self, *args)
        record = noted_in(log, name, args)
        log.inside = True
        try:
            result = primitive(self, *args)
        except BaseException as error:
            failed(record, error)
            raise
        finally:
            log.inside = False
        if isinstance(result, Pending):
            return Marked(result, record)
        marked = None if accelerator.module() is None else accelerator.mark(result, args)
        record[ENDED] = marked or time.monotonic()
        return result

    return cast(F, noted)


def noted_in(log: Log, name: str, args: tuple[Any, ...]) -> Record:
    """The record of a primitive that begins."""
    if name == "run":  # of a hook, which is given what runs
        name, args = args[0].name, args[0].args
    if name == "exchange":
        return log.message(*args)
    if name.startswith("barrier"):
        return log.begin("barrier", "", None, ())
    x = args[1] if name == "scatter" else args[0]
    op = args[1] if name in ("all_reduce", "reduce_scatter", "reduce") else ""
    root = args[-1] if name in ("broadcast", "reduce", "gather", "scatter") else -1
    return log.begin(name, op, x.dtype, x.shape, root)


def failed(record: Record, error: BaseException) -> None:
    """Note why."""
    record[ENDED] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class Noted(Pending):
    """Something under way whose end is noted, if it has a record."""

    __slots__ = ("noted",)
    noted: Record | None

    def __init__(self, record: Record | None = None) -> None:
        self.noted = record
        if record is not None:
            record[THREAD] = 0

    def wait(self, timeout: float | None) -> Any:
        """Note how it ends."""
        record = self.noted
        if record is None:
            return self._wait(timeout)
        record[THREAD] = get_ident()
        try:
            result = self._wait(timeout)
        except TimedOutError:
            raise
        except Exception as error:
            failed(record, error)
            raise
        if record[ENDED] is None:
            marked = None if accelerator.module() is None else accelerator.mark(result)
            record[ENDED] = marked or time.monotonic()
        return result

    def _wait(self, timeout: float | None) -> Any:
        raise NotImplementedError

    def record(self) -> Record | None:
        """Its own."""
        return self.noted

    def abandon(self) -> None:
        """Nobody waits for it."""
        if self.noted is not None and self.noted[ENDED] is None:
            self.noted[ENDED] = DROPPED


class Marked(Noted):
    """Something under way whose end is noted for it."""

    __slots__ = ("_source", "bare")

    def __init__(self, source: Pending, record: Record) -> None:
        super().__init__(record)
        self._source, self.bare = source, source.bare

    def _wait(self, timeout: float | None) -> Any:
        return self._source.wait(timeout)

    def done(self) -> bool:
        """As the source."""
        return self._source.done()

    def withdraw(self, seconds: float) -> bool:
        """Pass it on."""
        return self._source.withdraw(seconds)

    def give_up(self) -> None:
        """Pass it on."""
        self._source.give_up()

    def abandon(self) -> None:
        """Pass it on."""
        super().abandon()
        self._source.abandon()
