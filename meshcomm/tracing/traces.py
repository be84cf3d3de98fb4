"""Traces: everything that this process, or this rank, communicates while one is open."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from meshcomm.axis import Axis, AxisName, all_axes, axes_in, on_new_axis
from meshcomm.errors import fail, names
from meshcomm.mesh import Mesh
from meshcomm.pictures.picture import Picture, Shown
from meshcomm.pictures.timeline import Bar, timeline
from meshcomm.runtime.ops import is_operation, operations
from meshcomm.runtime.start import workers, world
from meshcomm.runtime.start.membership import name_of
from meshcomm.runtime.transports.dry.world import DryWorld, dry_world
from meshcomm.runtime.transports.threads.scheduler import Rank, current_rank
from meshcomm.tracing import chrome
from meshcomm.tracing.event import Totals, TraceEvent, axis_text, bytes_text, grouped, most, table_of
from meshcomm.tracing.record import Record, attach, detach, event_of

_SECOND = 1e9


class Trace(Shown):
    """What was communicated between entering and leaving it; made by :func:`trace`."""

    def __init__(self) -> None:
        self.began = 0.0
        """When it was entered, in seconds since 1970."""
        self.compiled: tuple[AxisName, ...] = ()
        """Axes over which compiled graphs may have communicated, of which a trace knows nothing."""
        self._compiled_now: tuple[AxisName, ...] = ()
        self._names: dict[str, set[tuple[str, ...]]] = {}  # what stands for several axes, on any of the meshes
        self._heard: set[tuple[str, int]] = set()  # launches and their ranks whose calls it would have
        self._files: dict[tuple[str, int], str] = {}  # where those of a rank were read
        self._home: Rank | None = None
        self._dry: DryWorld | None = None  # the dry run in which it was entered: it hears of nothing outside
        self._origin = 0
        self._end: int | None = None
        self._records: list[Record] = []
        self._abroad: list[TraceEvent] = []  # of processes that were started inside
        self._events: tuple[TraceEvent, ...] = ()
        self._axes: list[weakref.ref[Axis]] = []
        self._closed = False
        self._lock = threading.Lock()

    # ----------------------------------------------------------------------------------------- opening and closing

    def __enter__(self) -> Trace:
        if torch.compiler.is_compiling():
            fail("trace", "opened inside of torch.compile.", fix="open it around the call of the compiled function")
        if self._origin:
            fail("trace", "a trace is entered once.", fix="make another one: with mc.trace() as t:")
        self._home, self._dry = current_rank(), dry_world()
        self.began, self._origin = time.time(), time.perf_counter_ns()
        with _changing:
            _open.append(self)
        for axis in all_axes() if self._home is None else list(self._home.axes.values()):
            self._listen(axis)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()
        if kind is None:
            self._warn(2)

    def _close(self) -> None:
        """Record no more, and leave all axes as they were."""
        with _changing:
            _open.remove(self)
        with self._lock:
            self._closed = True
        for ref in self._axes:
            axis = ref()
            if axis is not None:
                detach(axis, self._records)
        end = time.perf_counter_ns()
        self._events = self._so_far()
        self._end = end
        self._records, self._abroad = [], []
        self._axes.clear()
        self._home = None

    def _warn(self, stacklevel: int) -> None:
        """Say what may have been missed."""
        if self.compiled:
            over = ", ".join(repr(axis_text(axis)) for axis in self.compiled)
            warnings.warn(
                f"meshcomm.trace: a function that torch.compile has compiled may have communicated over {over}:"
                " what is inside of a compiled graph is not recorded. Trace it on all ranks under"
                " torch.compiler.set_stance('force_eager').",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )

    def _listen(self, axis: Axis) -> None:
        """Hear of all that goes over ``axis``, if this trace is about it."""
        if self._home is not None and current_rank() is not self._home:
            return
        if self._dry is not None and dry_world() is not self._dry:
            return
        if axis.name in _compiled.get(axis.mesh, ()):
            self._note_compiled(axis)
        with self._lock:
            if not self._closed:
                self._learn((name, axes) for name, axes in axis.mesh.names.items())
                self._axes.append(weakref.ref(axis))
                every = axis.mesh.in_process and self._home is None
                launch = self._launch(axis)
                own = range(axis.mesh.world_size) if every else [axis.own_ranks[axis.own_index]]
                self._heard.update((launch, rank) for rank in own)
                attach(axis, self._records, launch)

    def _launch(self, axis: Axis) -> str:
        """Which one the rank is of whose axis this is, if the others have traces of their own."""
        if self._home is not None:
            found: str = self._home.world.shared.setdefault("launch", os.urandom(8).hex())
            return found
        here = None if axis.mesh.in_process or self._dry is not None else world.current()
        return "" if here is None else name_of(here)

    def _note_compiled(self, axis: Axis, now: bool = False) -> None:
        """Something that communicates over ``axis`` is being compiled, or was in another trace."""
        with self._lock:
            if axis.name not in self.compiled:
                self.compiled = (*self.compiled, axis.name)
            if now and axis.name not in self._compiled_now:
                self._compiled_now = (*self._compiled_now, axis.name)

    def _learn(self, names: Iterable[tuple[str, tuple[str, ...]]]) -> None:
        for name, axes in names:
            self._names.setdefault(name, set()).add(axes)

    def _known(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(name, axes) for name, several in sorted(self._names.items()) for axes in sorted(several)]

    def meant(self, axis: AxisName) -> set[AxisName]:
        """The axes, as events have them, that a name is of: itself, and what it stands for on a mesh that was used."""
        ways = [[(part,), *self._names.get(part, ())] for part in axes_in(axis)]
        found = {tuple(itertools.chain(*way)) for way in itertools.product(*ways)}
        return {axes[0] if len(axes) == 1 else axes for axes in found}

    def _so_far(self) -> tuple[TraceEvent, ...]:
        return (*(event_of(record, self._origin) for record in list(self._records)), *self._abroad)

    def _take_over(self, other: Trace, now: tuple[AxisName, ...]) -> None:
        """What a process that was started inside has recorded; ``now``: over what it ran compiled code."""
        with self._lock:
            if not self._closed:
                self._abroad += chrome.moved(other._events, other.began - self.began)
                self._learn(other._known())
                self._heard |= other._heard
                self.compiled = tuple(dict.fromkeys((*self.compiled, *other.compiled)))
                self._compiled_now = tuple(dict.fromkeys((*self._compiled_now, *now)))

    # ------------------------------------------------------------------------------------------------ what it knows

    @property
    def events(self) -> tuple[TraceEvent, ...]:
        """One per primitive and rank, in the order in which they were issued; those so far, while it is open."""
        return self._so_far() if self._origin and self._end is None else self._events

    @property
    def is_open(self) -> bool:
        """Whether it is being recorded."""
        return bool(self._origin) and self._end is None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the world: those of the groups in use whose calls it has, were there none."""
        used = {rank for event in self.events for rank in event.ranks}
        heard = {rank for _, rank in self._heard}
        return tuple(sorted(used.intersection(heard).union(event.rank for event in self.events)))

    @property
    def launches(self) -> dict[str, dict[int, str]]:
        """Launch to the ranks of it whose calls it has, were there none, and the name of each one's file, or ""."""
        found: dict[str, dict[int, str]] = {}
        for at in sorted(self._heard.union((event.launch, event.rank) for event in self.events)):
            found.setdefault(at[0], {})[at[1]] = self._files.get(at, "")
        return found

    @property
    def seconds(self) -> float:
        """How long it was open, or has been by now."""
        if not self._origin:
            return 0.0
        return ((time.perf_counter_ns() if self._end is None else self._end) - self._origin) / _SECOND

    def count(
        self,
        operation: str | None = None,
        axis: AxisName | None = None,
        *,
        backward: bool | None = None,
        rank: int | None = None,
    ) -> int:
        """How many primitives ran for ``operation`` over ``axis``; None stands for all. ``backward``: only those that
        autograd's backward ran, or only the others. ``rank``: of the world; by default the one with the most.
        """
        if operation is not None and not is_operation(operation):
            fail("Trace.count", f"no operation {operation!r}.", fix=f"one of {names(operations())}")
        axes = None if axis is None else self.meant(axis)
        chosen = [
            event
            for event in self._of(backward, rank)
            if operation in (None, event.operation) and (axes is None or event.axis in axes)
        ]
        return most(chosen)[0].calls if chosen else 0

    def totals(self, *, backward: bool | None = None, rank: int | None = None) -> dict[AxisName, Totals]:
        """Axis to sums per rank: of ``rank``, or each figure of the rank where it is largest; ``backward`` as above."""
        return {axis: most(events)[0] for axis, events in grouped(self._of(backward, rank), lambda e: e.axis).items()}

    def table(self, *, backward: bool | None = None, rank: int | None = None) -> str:
        """A line per operation, axis, way and call site: how many primitives, bytes, and milliseconds from start to
        end and in waits. Figures are per rank, the largest where ranks differ. A "+" says that some have no end.
        ``backward`` and ``rank`` choose as above.
        """
        return table_of(self._of(backward, rank))

    def summary(self, *, backward: bool | None = None, rank: int | None = None) -> str:
        """``2 all_reduce over dp, 1 broadcast over dp``, or ``nothing``; ``backward`` and ``rank`` choose as above."""
        kinds = grouped(self._of(backward, rank), lambda e: (e.operation, axis_text(e.axis)))
        found = ((most(events)[0].calls, *kind) for kind, events in sorted(kinds.items()))
        return ", ".join(f"{count} {operation} over {axis}" for count, operation, axis in found) or "nothing"

    def _of(self, backward: bool | None, rank: int | None) -> list[TraceEvent]:
        return [e for e in self.events if backward in (None, e.backward) and rank in (None, e.rank)]

    def __str__(self) -> str:
        lines = [self.table()]
        for axis, sums in self.totals().items():
            calls = f"{sums.calls} call{'' if sums.calls == 1 else 's'}"
            moved = f"payload {bytes_text(sums.payload)}, wire {bytes_text(sums.wire)}"
            lines.append(f"{axis_text(axis)}: {calls}, {moved}, {1e3 * sums.seconds:.3f} ms")
        if self.compiled:
            lines.append(f"not recorded: compiled graphs over {', '.join(map(axis_text, self.compiled))}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        state = "open" if self._origin and self._end is None else "closed" if self._origin else "not entered"
        return f"<Trace {state}: {self.summary()}>"

    def picture(self) -> Picture:
        """What ran when, a lane per rank and axis."""
        end = self.seconds
        bars = [
            Bar(f"rank {e.rank} {axis_text(e.axis)}", e.operation, e.start, end if e.end is None else e.end, str(e))
            for e in self.events
        ]
        return timeline(bars, end, f"trace: {self.summary()}")

    # ------------------------------------------------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as Chrome trace JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing: a process per rank, a
        track per axis, more of them where works overlap; inside of each slice the call and the wait.
        """
        document = chrome.document(
            self.events, self.began, self.seconds, self.compiled, self._known(), sorted(self._heard)
        )
        text = json.dumps(document)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    @staticmethod
    def merge(traces: Iterable[Trace | str | os.PathLike[str]]) -> Trace:
        """One trace of several, by the clocks of their machines: closed traces, such as
        ``mc.gather_object(t, axis)`` gives them, and files that :meth:`save` has written.
        """
        if isinstance(traces, (Trace, str, os.PathLike)) or not isinstance(traces, Iterable):
            fail("Trace.merge", f"expected several traces or files, got {type(traces).__name__}.", fix="pass a list")
        parts = [_loaded(part) for part in traces]
        whole = Trace()
        whole._origin, whole._end = 1, 1
        if parts:
            whole.began = min(part.began for part in parts)
            _refuse_twice(parts)
            moved = [chrome.moved(part.events, part.began - whole.began) for part in parts]
            whole._events = tuple(sorted((e for events in moved for e in events), key=lambda e: e.start))
            whole._end += round(_SECOND * max(part.began - whole.began + part.seconds for part in parts))
            for part in parts:
                whole._learn(part._known())
                whole._heard |= part._heard
                whole._files |= part._files
            whole.compiled = tuple(dict.fromkeys(axis for part in parts for axis in part.compiled))
        return whole

    def __getstate__(self) -> dict[str, Any]:
        if self._end is None:
            fail("trace", "a trace that is open cannot be pickled.", fix="leave its with block first")
        return {"began": self.began, "seconds": self.seconds, "compiled": self.compiled, "events": self._events,
                "names": self._known(), "ranks": sorted(self._heard)}  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        Trace.__init__(self)
        self.began, self.compiled, self._events = state["began"], state["compiled"], state["events"]
        self._origin, self._end = 1, 1 + round(_SECOND * state["seconds"])
        self._learn(state.get("names", ()))
        self._heard.update((launch, rank) for launch, rank in state.get("ranks", ()))


def _loaded(part: object) -> Trace:
    if isinstance(part, Trace):
        if part._end is None:
            fail("Trace.merge", "a trace is open.", got=repr(part), fix="leave its with block first")
        return part
    if not isinstance(part, (str, os.PathLike)):
        fail("Trace.merge", f"expected a trace or a file, got {type(part).__name__}.")
    path = os.fspath(part)
    with open(part, encoding="utf-8") as file:
        try:
            began, seconds, compiled, events, together, ranks = chrome.read(json.load(file))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            cut = isinstance(error, json.JSONDecodeError)
            what = "is no trace of meshcomm" + (", or one that was not written to its end." if cut else ".")
            fail("Trace.merge", f"{path!r} {what}", fix="a file that Trace.save has written")
    found = Trace()
    found.__setstate__({"began": began, "seconds": seconds, "compiled": compiled, "events": events, "names": together,
                        "ranks": ranks})  # fmt: skip
    found._files = dict.fromkeys(found._heard.union((e.launch, e.rank) for e in events), os.path.basename(path))
    return found


def _refuse_twice(parts: Sequence[Trace]) -> None:
    """Two traces that have the same calls of a rank: a file and its copy, or one of all ranks beside those of each."""
    seen: dict[tuple[str, int], list[tuple[Trace, set[tuple[Any, ...]]]]] = {}
    for part in parts:
        for at, events in grouped(part.events, lambda e: (e.launch, e.rank)).items():
            calls: set[tuple[Any, ...]] = {
                (e.group, e.key, e.site, round(1e5 * (part.began + e.start))) for e in events
            }
            for other, others in seen.setdefault(at, []):
                if min(len(calls), len(others)) <= sum(_is_in(others, call) for call in calls):
                    got = " and ".join(each._files.get(at) or repr(each) for each in (other, part))
                    what = f"two traces have the same calls of rank {at[1]}, which would count twice."
                    fail("Trace.merge", what, got=got, fix="one of them")
            seen[at].append((part, calls))


def _is_in(calls: set[tuple[Any, ...]], call: tuple[Any, ...]) -> bool:
    """At the same time, as far as its number was rounded."""
    *what, time = call
    return any((*what, time + by) in calls for by in (0, -1, 1))


def trace() -> Trace:
    """``with mc.trace() as t:`` records everything that is communicated inside, forward and backward.

    Outside of ranks, and where ranks are processes, it records this process: all threads, autograd's too, and all ranks
    of each :func:`launch` and ``shard_map`` inside. Processes that a ``launch`` starts inside record what they do from
    its first line to its last, and hand it over with their results; others open their own.
    In a rank of :func:`launch` it records that rank. Traces may be nested, and overlap between threads; each has its
    own events.

    There is one :class:`TraceEvent` per primitive: an operation on a tensor, or on one bucket of a pytree; what a sync
    and an ``async_op`` call does; what backward runs; what FSDP, DDP and helpers for objects send. Operations that send
    nothing (``pvary`` and ``shard`` forward, an axis of size 1) do not occur.

    Bytes are counted twice. ``payload``: the tensor that this rank gives to the call. ``wire``: what the rank sends to
    the others or receives from them, whichever is more, by the ``Cost`` line of the operation (all_reduce 2 (n-1)/n of
    the payload, all_gather n-1 times it); transports send small messages otherwise.

    Works that were begun before are not recorded. One that is waited for after the trace keeps an open end. Graphs of
    ``torch.compile`` are not recorded: a compiled function that communicates and is called inside is warned of, where
    its forward runs.

    Returns: a :class:`Trace`, to be entered once: ``events``, ``table()``, ``totals()``, ``count(operation, axis)``,
    ``summary()``, ``save(file)``, ``str``.

    Cost: none when no trace is open: axes have their own links. Some ten µs per primitive inside. Functions that are
    compiled already are compiled once more when first called in a trace.

    Raises:
        RuntimeWarning: at the end, where a compiled function has communicated.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2, "tp": 2})
        >>> def main():
        ...     x = torch.ones(8, requires_grad=True)
        ...     y = mc.all_reduce(mc.pvary(x, "dp", mesh=mesh), "tp", mesh=mesh)
        ...     y.sum().backward()
        >>> with mc.trace() as t:
        ...     _ = mc.launch(main, ranks=4)
        >>> t.summary(), t.count("all_reduce", "dp", backward=True), t.totals()["tp"].payload
        ('1 all_reduce over dp, 1 all_reduce over tp', 1, 32)

    Source: the timelines of torch.profiler; MPI's profiling interface.
    """
    if (dry := dry_world()) is not None:  # its events say which rank this is
        dry.reads.note_rank()
    return Trace()


_open: list[Trace] = []
_changing = threading.Lock()
_compiled: weakref.WeakKeyDictionary[Mesh, set[AxisName]] = weakref.WeakKeyDictionary()
"""The axes over which something was compiled while it was traced: it runs unseen from then on."""


def _listen_to(axis: Axis) -> None:
    if not _open or axis.size == 1:
        return
    for each in tuple(_open):
        if axis.is_traced:  # it is made while a graph is, which will not be seen
            _compiled.setdefault(axis.mesh, set()).add(axis.name)
            each._note_compiled(axis, now=True)
        else:
            each._listen(axis)


on_new_axis(_listen_to)


class _Traced:
    """A program that a worker traces: it gives its result, and what it communicated."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program in a trace."""
        t = Trace()
        t.__enter__()
        try:
            result = self.fn(*args, **kwargs)
        finally:
            t._close()
        return result, t, t._compiled_now


class _Watched:
    """A launch of processes while traces are open."""

    def __init__(self, fn: Callable[..., Any], traces: Sequence[Trace]) -> None:
        self.program: Callable[..., Any] = _Traced(fn)
        self._traces = traces

    def results(self, told: list[Any]) -> list[Any]:
        """Hand what each worker has recorded to the traces, in order of rank."""
        for _, theirs, now in told:
            for mine in self._traces:
                mine._take_over(theirs, now)
        return [result for result, _, _ in told]


def _watch(fn: Callable[..., Any]) -> _Watched | None:
    return _Watched(fn, tuple(_open)) if _open else None


workers.watch_workers = _watch


def together(traces: Sequence[Trace]) -> Trace:
    """The first one, which has ended, with what others that have ended recorded of other ranks."""
    first, *others = traces
    for other in others:
        first._events += tuple(chrome.moved(other._events, other.began - first.began))
        first._heard |= other._heard
        first._learn(other._known())
    return first
