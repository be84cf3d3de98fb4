"""The logs of all ranks, as a trace has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshcomm.errors import fail
from meshcomm.tracing.event import TraceEvent, axis_text
from meshcomm.tracing.traces import Trace
from meshcomm.verifying.hangs.agree import ranks_said
from meshcomm.verifying.hangs.log import Group, Issue, Log, Message

__all__ = ["logs_of", "unproven_of"]

_WHERE = "prove_no_hang"


Groups = dict[tuple[str, tuple[int, ...]], Group]
"""Those that are known, by name and ranks: thousands of ranks have them in common."""


def logs_of(trace: Trace, *, alone: bool = False, known: Groups | None = None) -> dict[int, Log]:
    """Rank to what it has called and where it has waited; ``alone``: of one rank, the others are not asked for.
    ``known``: groups of other traces, which it adds to.
    """
    events = trace.events
    _checked(trace, events, alone)
    broken = any(event.error is not None for event in events)  # then nobody's last call may be the last one
    found = {rank: Log(rank, cut=broken) for rank in trace.ranks}
    known = {} if known is None else known
    groups: dict[tuple[str, int], Group] = {}
    of_rank: dict[int, list[TraceEvent]] = {rank: [] for rank in found}
    for event in events:
        of_rank[event.rank].append(event)
    for rank, mine in of_rank.items():
        log, steps = found[rank], list[tuple[float, int, int]]()
        for event in mine:
            name = _rolled(event)
            group = groups.get((name, id(event.ranks)))
            if group is None:
                key = name, event.ranks
                group = groups[name, id(event.ranks)] = known.setdefault(key, Group(*key, axis_text(event.axis)))
            number = len(log.issues)
            log.issues.append(_issue(event, group))
            steps.append((event.start, 2 * number, number))
            if not event.asynchronous or event.issue is None:
                steps.append((event.start, 2 * number + 1, ~number))
            elif event.waited_at is not None:
                steps.append((event.waited_at, 2 * number + 1, ~number))
        log.steps = [step for _, _, step in sorted(steps)]
    return found


def _issue(event: TraceEvent, group: Group) -> Issue:
    return Issue(
        group,
        event.operation,
        event.key,
        event.called or event.operation,
        f"{event.site}{', in backward' if event.backward else ''}" if event.site is not None else "",
        event.gradient,
        tuple(Message(*each) for each in event.sent),
        tuple(Message(*each) for each in event.wanted),
        event.runs,
        event.primitive == "exchange",
    )


def _rolled(event: TraceEvent) -> str:
    """Its sequence of calls: each launch has its own, and barriers with a time-out count for themselves."""
    timed = ", barriers with a time-out" if event.primitive == "barrier_within" else ""
    launch = f" of launch {event.launch}" if event.launch else ""
    return f"{event.group}{launch}{timed}"


def unproven_of(events: Iterable[TraceEvent]) -> list[str]:
    """The lines at which what a rank does next can depend on when it asks."""
    asked = [event.asked for event in events if event.asked]
    timed = [f"a time-out at {event.site}" for event in events if event.primitive == "barrier_within"]
    return list(dict.fromkeys((*asked, *timed)))


def _has_all_ranks(trace: Trace, events: Sequence[TraceEvent]) -> None:
    """Those that others call with, of the same launch."""
    groups = {(event.launch, id(event.ranks)): event.ranks for event in events}  # thousands of events have a few
    launches = trace.launches
    for launch in {launch: None for launch, _ in groups}:
        needed = {rank for (of, _), ranks in groups.items() if of == launch for rank in ranks}
        lacking = sorted(needed.difference(launches[launch]))
        elsewhere = [(rank, of[rank]) for rank in lacking for of in launches.values() if rank in of]
        if elsewhere:
            here = [(rank, file) for rank, file in launches[launch].items() if rank in needed]
            got = " and ".join(f"rank {rank}{f' of {file}' if file else ''}" for rank, file in (here[0], elsewhere[0]))
            fix = "the traces of one launch alone: a folder for each, of its own"
            fail(_WHERE, "traces of different launches, whose ranks have not met.", got=got, fix=fix)
        if lacking:
            got = f"those of {ranks_said(sorted(launches[launch]))}"
            fix = "merge the traces of all ranks: mc.Trace.merge(...) of saved files, or of mc.gather_object(t, axis)"
            fail(_WHERE, f"the trace has no calls of {ranks_said(lacking)}, which others call with.", got=got, fix=fix)


def _checked(trace: Trace, events: Sequence[TraceEvent], alone: bool) -> None:
    """Refuse what nothing can be said of."""
    if trace.is_open:
        fail(_WHERE, "the trace is open.", got=repr(trace), fix="leave its with block first")
    if any(not event.ranks for event in events):
        fail(_WHERE, "the trace is one of an older version, whose events do not say what they meet.", fix="trace again")
    if not alone:
        _has_all_ranks(trace, events)
    if trace.compiled:
        over = ", ".join(map(axis_text, trace.compiled))
        fix = "trace it under torch.compiler.set_stance('force_eager')"
        fail(
            _WHERE, "compiled graphs have communicated, of which the trace knows nothing.", got=f"over {over}", fix=fix
        )
