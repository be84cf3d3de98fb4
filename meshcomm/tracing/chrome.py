"""Traces as Chrome trace JSON, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from meshcomm.axis import AxisName
from meshcomm.errors import shape_text
from meshcomm.runtime.callsite import CallSite
from meshcomm.tracing.event import TraceEvent, axis_text, grouped

_MICRO = 1e6
_CATEGORY = "collective"
_KEPT = ("operation", "primitive", "size", "rank", "place", "payload", "wire", "backward", "asynchronous", "error")
"""What stands in a slice as it is."""
_MEETING = {"group": "", "ranks": (), "key": "", "gradient": 2, "sent": (), "wanted": (), "runs": ((), ()), "asked": "",
            "launch": ""}  # fmt: skip
"""What it meets, and what stands there if it does not say."""


def document(
    events: Sequence[TraceEvent],
    began: float,
    seconds: float,
    compiled: Iterable[AxisName],
    together: Iterable[tuple[str, tuple[str, ...]]] = (),
    ranks: Iterable[tuple[str, int]] = (),
) -> dict[str, Any]:
    """The whole file."""
    slices: list[dict[str, Any]] = []
    for rank, of_rank in sorted(grouped(events, lambda e: e.rank).items()):
        pid = rank + 1  # viewers take 0 for the idle process
        slices += named(pid, 0, "process", f"rank {rank} ({of_rank[0].place})", rank)
        tid = 0
        for axis, of_axis in grouped(of_rank, lambda e: axis_text(e.axis)).items():
            for number, lane in enumerate(_lanes(of_axis, seconds), 1):
                tid += 1
                slices += named(pid, tid, "thread", axis if number == 1 else f"{axis} #{number}", tid)
                for event in lane:
                    slices += _slices(event, pid, tid, seconds)
    about = {"made by": "meshcomm", "began": began, "seconds": seconds, "compiled": [_axis(axis) for axis in compiled],
             "names": [[name, list(axes)] for name, axes in together], "ranks": list(map(list, ranks))}  # fmt: skip
    return {"traceEvents": slices, "displayTimeUnit": "ms", "otherData": about}


def named(pid: int, tid: int, what: str, name: str, at: int) -> list[dict[str, Any]]:
    """What a process or a thread is called, and where it stands."""
    base = {"ph": "M", "pid": pid, "tid": tid}
    return [
        {**base, "name": f"{what}_name", "args": {"name": name}},
        {**base, "name": f"{what}_sort_index", "args": {"sort_index": at}},
    ]


def _lanes(events: Sequence[TraceEvent], seconds: float) -> list[list[TraceEvent]]:
    """Slices of one track may not overlap in part: each goes to the first lane that is free."""
    lanes: list[list[TraceEvent]] = []
    ends: list[float] = []
    for event in sorted(events, key=lambda e: e.start):
        at = next((i for i, end in enumerate(ends) if end <= event.start), len(lanes))
        if at == len(lanes):
            lanes.append([])
            ends.append(0.0)
        lanes[at].append(event)
        ends[at] = _end(event, seconds)
    return lanes


def _end(event: TraceEvent, seconds: float) -> float:
    return max(seconds, event.start) if event.end is None else event.end


def _slices(event: TraceEvent, pid: int, tid: int, seconds: float) -> list[dict[str, Any]]:
    """The whole, and in it the call and the wait of what is asynchronous."""
    end = _end(event, seconds)
    whole = slice_of(event.operation, pid, tid, event.start, end)
    whole["args"] = _args(event)
    found = [whole]
    if event.asynchronous:
        if event.issue is not None:
            found.append(slice_of("issue", pid, tid, event.start, min(event.start + event.issue, end)))
        if event.wait and event.end is not None and event.issue is not None:
            found.append(slice_of("wait", pid, tid, max(end - event.wait, event.start + event.issue), end))
    return found


def slice_of(name: str, pid: int, tid: int, start: float, end: float, kind: str = "") -> dict[str, Any]:
    """Something that took its time, in seconds."""
    kind = kind or (name if name in ("issue", "wait") else _CATEGORY)
    return {
        "name": name, "cat": kind, "ph": "X", "pid": pid, "tid": tid,
        "ts": _MICRO * start, "dur": _MICRO * max(0.0, end - start),
    }  # fmt: skip


def _axis(axis: AxisName) -> Any:
    return axis if isinstance(axis, str) else list(axis)


def _args(event: TraceEvent) -> dict[str, Any]:
    args = {name: getattr(event, name) for name in _KEPT}
    args["axis"], args["called"] = _axis(event.axis), event.called
    args["x"] = None if event.dtype is None else shape_text(event.dtype, event.shape)
    args["dtype"] = None if event.dtype is None else str(event.dtype).removeprefix("torch.")
    args["shape"] = list(event.shape)
    args["at"] = None if event.site is None else f"{event.site.file}:{event.site.line}"
    args["seconds"] = [event.start, event.issue, event.wait, event.end, event.waited_at]
    for name, kept in _MEETING.items():
        if (value := getattr(event, name)) != kept:
            args[name] = value
    return args


def read(file: dict[str, Any]) -> tuple[float, float, tuple[AxisName, ...], tuple[TraceEvent, ...], Any, Any]:
    """When the trace began, how long it was, what was compiled, the events, names of several axes, and the ranks with
    their launch, of what :func:`document` gave.
    """
    about = file["otherData"]
    if about["made by"] != "meshcomm":
        raise ValueError(about["made by"])
    slices = (each["args"] for each in file["traceEvents"] if each.get("cat") == _CATEGORY)
    events = sorted((_event(args) for args in slices), key=lambda e: e.start)
    return (
        float(about["began"]),
        float(about["seconds"]),
        tuple(_name(axis) for axis in about["compiled"]),
        tuple(events),
        [(name, tuple(axes)) for name, axes in about.get("names", ())],
        [(str(launch), int(rank)) for launch, rank in about.get("ranks", ())],
    )


def _name(axis: str | list[str]) -> AxisName:
    return axis if isinstance(axis, str) else tuple(axis)


def _event(args: dict[str, Any]) -> TraceEvent:
    start, issue, wait, end, *waited_at = args["seconds"]
    file, _, line = (args["at"] or "").rpartition(":")
    dtype = None if args["dtype"] is None else getattr(torch, args["dtype"])
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(args["dtype"])
    return TraceEvent(
        **{name: args[name] for name in _KEPT}, called=args.get("called", ""),
        axis=_name(args["axis"]), dtype=dtype, shape=tuple(args["shape"]), start=start, issue=issue, wait=wait, end=end,
        site=CallSite(file, int(line)) if file else None, waited_at=waited_at[0] if waited_at else None,
        **{name: _tuples(args.get(name, kept)) for name, kept in _MEETING.items()},
    )  # fmt: skip


def _tuples(value: Any) -> Any:
    """Lists as what they were."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def moved(events: Iterable[TraceEvent], by: float) -> list[TraceEvent]:
    """Events as they were, so many seconds later."""

    def later(time: float | None) -> float | None:
        return None if time is None else time + by

    return [replace(e, start=e.start + by, end=later(e.end), waited_at=later(e.waited_at)) for e in events]
