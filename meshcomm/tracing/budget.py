"""Budgets: a test says what a function may communicate, and fails when it communicates more."""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import EllipsisType, TracebackType
from typing import Any, TypeVar, cast

from meshcomm.axis import AxisName
from meshcomm.errors import fail, names, text
from meshcomm.runtime.ops import is_operation, operations
from meshcomm.tracing.event import TraceEvent, axis_text, bytes_text, grouped, per_rank, table_of
from meshcomm.tracing.traces import Trace

F = TypeVar("F", bound=Callable[..., Any])
Allowed = Mapping[str, int] | None
"""Operation to how many, "any" to how many beyond those; None: as many as one likes."""

_ANY = "any"
_FIX = "such as '2 all_reduce, 1 all_gather', 'nothing' or 0, 'any' or ..., or an int for so many of any kind"


class comm_budget:  # noqa: N801  # reads as what it says, as use_mesh does
    """A test fails when what is decorated, or what is inside of ``with``, communicates more than this.

    ::

        @mc.comm_budget(tp="2 all_reduce", dp="nothing", bytes=4096)
        with mc.comm_budget({("dp", "tp"): "1 all_reduce", ...: "any"}, tp="1 all_gather, 1 reduce_scatter") as t:

    An axis that is not named may not be communicated over, unless ``...`` is, or nothing but ``bytes`` is given. Less
    is always fine. Counted are the primitives that :func:`trace` records: one per tensor or bucket of a pytree, forward
    and backward, on each rank; the worst rank counts, of this process and of those that a :func:`launch` starts inside.
    A tuple of axes is an axis of its own.

    Args:
        axes: axis to what is allowed; for tuples of axes, written ``("dp", "tp")`` or ``"dp,tp"``; ``...`` stands for
            all that are not named.
        bytes: the most that a rank may have on the wire (see :func:`trace`), over all axes together.
        backward: whether what backward communicates counts.
        named: axis to what is allowed: counts and operations, ``"2 all_reduce, 1 all_gather"``; ``"3 any"`` or ``3``
            for so many of any kind; ``"nothing"`` or ``0``; ``"any"`` or ``...``.

    Raises:
        AssertionError: when it is over, with a table of what goes beyond, and its lines. What the function itself
            raises comes first.
        MeshError: a budget that cannot be read, where it stands; a function that torch.compile compiled meanwhile,
            whose communication is not seen.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> @mc.comm_budget(tp="1 all_reduce", bytes=32)
        ... def norm(x):
        ...     return mc.all_reduce(x.square().sum(), "tp", mesh=mesh).sqrt()
        >>> mc.launch(lambda: norm(torch.ones(2)).item(), ranks=2)
        [2.0, 2.0]

    Source: ``CommDebugMode`` of DTensor; the query counts of web frameworks' tests.
    """

    def __init__(
        self,
        axes: Mapping[Any, Any] | None = None,
        /,
        *,
        bytes: float | None = None,
        backward: bool = True,
        **named: str | int | EllipsisType,
    ) -> None:
        if axes is not None and not isinstance(axes, Mapping):
            fail("comm_budget", f"axes={axes!r} is not a mapping.", fix='{("dp", "tp"): "1 all_reduce"}, or tp="..."')
        if bytes is not None and (isinstance(bytes, bool) or not isinstance(bytes, (int, float)) or not bytes >= 0):
            fail("comm_budget", f"bytes={bytes!r} is not a number of bytes.", fix="a number from 0 on")
        if not isinstance(backward, bool):
            fail("comm_budget", f"backward={backward!r} is not a bool.", fix="True or False")
        self._bytes, self._backward = bytes, backward
        self._axes: dict[AxisName, Allowed] = {}
        self._others: Allowed = None if bytes is not None and not axes and not named else {}
        for axis, allowed in [*(axes or {}).items(), *named.items()]:
            self._add(axis, allowed)
        self._open = _Open()

    def _add(self, axis: object, allowed: object) -> None:
        if axis is ...:
            self._others = _allowed("...", allowed)
            return
        name = _axis_name(axis)
        if name in self._axes:
            fail("comm_budget", f"axis {axis_text(name)!r} is named twice.", fix="name it once")
        self._axes[name] = _allowed(axis_text(name), allowed)

    def __call__(self, fn: F) -> F:
        """``fn`` under this budget, each call for itself."""
        if not callable(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            what = getattr(fn, "__name__", repr(fn))
            fail(
                "comm_budget", f"{what} is not a function that can be budgeted.", fix="decorate what runs it to its end"
            )

        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def later(*args: Any, **kwargs: Any) -> Any:
                with self._of(fn):
                    return await fn(*args, **kwargs)

            return cast(F, later)

        @functools.wraps(fn)
        def now(*args: Any, **kwargs: Any) -> Any:
            with self._of(fn):
                return fn(*args, **kwargs)

        return cast(F, now)

    def _of(self, fn: Callable[..., Any]) -> _Budgeted:
        return _Budgeted(self, getattr(fn, "__qualname__", type(fn).__qualname__) + "()")

    def __enter__(self) -> Trace:
        call = _Budgeted(self, "the with block")
        self._open.calls.append(call)
        return call.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.calls.pop().__exit__(kind, error, traceback)

    # ------------------------------------------------------------------------------------------------- the verdict

    def check(self, t: Trace, what: str = "the trace") -> None:
        """Raise AssertionError if a trace holds more than this budget; ``what`` it is about."""
        events = [event for event in t.events if self._backward or not event.backward]
        complaints, culprits = self._over_counts(t, events)
        if self._bytes is not None:
            complaint = _over_bytes(events, self._bytes)
            if complaint:
                complaints.append(complaint)
                culprits = events
        if complaints:
            said = text("comm_budget", f"{what} communicated more than its budget.", got="; ".join(complaints))
            raise AssertionError(f"{said}\n  beyond it, per rank:\n{_indented(table_of(culprits))}")

    def _over_counts(self, t: Trace, events: Iterable[TraceEvent]) -> tuple[list[str], list[TraceEvent]]:
        complaints, culprits = [], []
        whose: dict[AxisName, AxisName] = {}
        for name in self._axes:
            for axis in t.meant(name):
                if axis in whose:
                    what = f"{axis_text(whose[axis])!r} and {axis_text(name)!r} are one axis."
                    fail("comm_budget", what, fix="name it once")
                whose[axis] = name
        for axis, of_axis in grouped(events, lambda e: whose.get(e.axis, e.axis)).items():
            allowed = self._axes.get(axis, self._others)
            if allowed is None:
                continue
            worst, kinds = _worst(of_axis, allowed)
            if kinds:
                over = " and ".join(dict.fromkeys(axis_text(event.axis) for event in of_axis))
                complaints.append(f"{over}: {worst}, allowed {_written(allowed)}")
                culprits += [event for event in of_axis if event.operation in kinds]
        return complaints, culprits


class _Budgeted:
    """One call under a budget."""

    def __init__(self, budget: comm_budget, what: str) -> None:
        self._budget, self._what, self._trace = budget, what, Trace()

    def __enter__(self) -> Trace:
        return self._trace.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._trace._close()
        if kind is not None:
            return
        if self._trace._compiled_now:
            over = names(axis_text(axis) for axis in self._trace._compiled_now)
            fail(
                "comm_budget",
                f"{self._what} called a function that torch.compile compiled, whose communication is not seen.",
                got=f"over {over}",
                fix="budget it under torch.compiler.set_stance('force_eager'), on all ranks",
            )
        self._trace._warn(3)
        self._budget.check(self._trace, self._what)


class _Open(threading.local):
    """The ``with`` blocks that this thread is in."""

    def __init__(self) -> None:
        self.calls: list[_Budgeted] = []


def _worst(events: Iterable[TraceEvent], allowed: Mapping[str, int]) -> tuple[str, set[str]]:
    """What the rank that is furthest beyond has sent, and which kinds are too many on some rank."""
    worst, most, kinds = "", 0, set()
    for rank, of_rank in sorted(grouped(events, lambda e: e.rank).items()):
        counts = Counter(event.operation for event in of_rank)
        beyond = {kind: count - allowed.get(kind, 0) for kind, count in counts.items() if count > allowed.get(kind, 0)}
        excess = sum(beyond.values()) - allowed.get(_ANY, 0)
        if excess > 0:
            kinds |= set(beyond)
            if excess > most:
                worst, most = f"{_written(counts)} on rank {rank}", excess
    return worst, kinds


def _over_bytes(events: Iterable[TraceEvent], limit: float) -> str:
    wire = {rank: sums.wire for rank, sums in per_rank(events).items()}
    if not wire or max(wire.values()) <= limit:
        return ""
    rank = max(sorted(wire), key=lambda rank: wire[rank])
    return f"bytes: {bytes_text(wire[rank])} on the wire of rank {rank}, allowed {bytes_text(limit)}"


def _written(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "nothing"


def _indented(lines: str) -> str:
    return "\n".join(f"    {line}" for line in lines.splitlines())


# ----------------------------------------------------------------------------------------------- reading budgets


def _axis_name(axis: object) -> AxisName:
    parts = tuple(axis.split(",")) if isinstance(axis, str) else axis
    if isinstance(parts, tuple) and parts:
        stripped = tuple(part.strip() if isinstance(part, str) else "" for part in parts)
        if all(part.isidentifier() for part in stripped) and len(set(stripped)) == len(stripped):
            return stripped[0] if len(stripped) == 1 else stripped
    fail("comm_budget", f"{axis!r} is not an axis.", fix="a name, a tuple of names, 'dp,tp', or ... for all others")


def _allowed(axis: str, given: object) -> Allowed:
    if given is ... or given == _ANY:
        return None
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return {_ANY: given} if given else {}
    if not isinstance(given, str):
        fail("comm_budget", f"the budget of {axis!r} cannot be read.", got=repr(given), fix=_FIX)
    found: dict[str, int] = {}
    for part in [] if given.strip() == "nothing" else given.split(","):
        kind, count = _entry(axis, given, part)
        if kind in found:
            fail("comm_budget", f"the budget of {axis!r} names {kind} twice.", got=repr(given), fix="name it once")
        found[kind] = count
    return {kind: count for kind, count in found.items() if count}


def _entry(axis: str, given: str, part: str) -> tuple[str, int]:
    match = re.fullmatch(r"\s*(\d+)\s+([\w.]+)\s*", part, re.ASCII)
    if match is None:
        fail("comm_budget", f"the budget of {axis!r} cannot be read.", got=repr(given), fix=_FIX)
    if match[2] != _ANY and not is_operation(match[2]):
        fail(
            "comm_budget",
            f"no operation {match[2]!r}.",
            got=f"{axis}={given!r}",
            fix=f"one of {names((*operations(), _ANY))}",
        )
    return match[2], int(match[1])
