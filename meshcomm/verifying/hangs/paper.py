"""The logs run on paper: who gets to its end, and who waits for whom for ever.

::

    steps of rank 0      begin 0   wait 0   begin 1   wait 1            where the waits stand: stuck is a deadlock
    all blocking         begin 0   wait 0   begin 1   wait 1            each is waited for at once: stuck is an order,
                                                                        wrong where one call blocks the next one

    a meeting is over when all that belong to it have begun theirs; who waits for one goes on then. Messages are met
    by (source, destination, tag), so what a rank does next depends on no race: one way through stands for all.

Linear in the steps: a rank is looked at again when the meeting is over that it waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshcomm.verifying.hangs.agree import Meetings, ranks_said, said
from meshcomm.verifying.hangs.log import Issue, Log
from meshcomm.verifying.report import Finding

__all__ = ["WAITING", "findings_of"]

WAITING = "messages wait for each other"
"""What is wrong where messages alone do."""

_SHOWN = 6
"""Ranks of a cycle that are named."""
_COUNTS = {2: "two", 3: "three", 4: "four"}


def findings_of(logs: Mapping[int, Log], meetings: Meetings, *, blocking: bool) -> list[Finding]:
    """Who is stuck, a finding per cycle of calls: "deadlock", or "order" if every call is ``blocking`` at issue."""
    stuck, left = _run(logs, meetings, blocking)

    def ended(rank: int) -> set[int]:
        return (
            begun[rank] if rank in begun else _begun(logs[rank], meetings.of[rank], len(logs[rank].issues) - 1, 0, True)
        )

    begun = {rank: _begun(logs[rank], meetings.of[rank], number, at, blocking) for rank, (at, number) in stuck.items()}
    missing = {
        rank: sorted(
            other
            for meeting in meetings.of[rank][number]
            for other in meetings.came[meeting]
            if other in stuck and meeting not in begun[other]
        )
        for rank, (_, number) in stuck.items()
    }
    found: dict[frozenset[str], Finding] = {}
    for cycle in _cycles(missing):
        calls = [(rank, logs[rank].issues[stuck[rank][1]]) for rank in cycle]
        found.setdefault(frozenset(issue.short for _, issue in calls), _finding(calls, blocking))
    if not found and not meetings.findings:  # who is waited for has ended, or was ended
        for rank, (_, number) in stuck.items():
            if not missing[rank]:
                issue, meeting = logs[rank].issues[number], next(m for m in meetings.of[rank][number] if left[m])
                absent = [other for other in meetings.came[meeting] if other != rank and meeting not in ended(other)]
                found.setdefault(frozenset([issue.short]), _ended(rank, issue, absent))
    return list(found.values())


def _run(logs: Mapping[int, Log], meetings: Meetings, blocking: bool) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Those that do not get to their end: at which step, and for which issue they wait. And of each meeting, how many
    have not come.
    """
    left = [len(ranks) for ranks in meetings.came]
    waiting: dict[int, list[int]] = {}
    at = dict.fromkeys(logs, 0)
    all_steps = {rank: _all_at_once(log) if blocking else log.steps for rank, log in logs.items()}
    stuck: dict[int, tuple[int, int]] = {}
    ready = deque(logs)
    while ready:
        rank = ready.popleft()
        stuck.pop(rank, None)
        steps, mine = all_steps[rank], meetings.of[rank]
        place, end = at[rank], len(steps)
        while place < end:
            step = steps[place]
            if step >= 0:
                for meeting in mine[step]:
                    left[meeting] -= 1
                    if not left[meeting]:
                        ready.extend(waiting.pop(meeting, ()))
            else:
                open_one = next((meeting for meeting in mine[~step] if left[meeting]), None)
                if open_one is not None:
                    waiting.setdefault(open_one, []).append(rank)
                    stuck[rank] = place, ~step
                    break
            place += 1
        at[rank] = place
    return stuck, left


def _all_at_once(log: Log) -> list[int]:
    """The steps, each issue waited for at once."""
    return [step for number in range(len(log.issues)) for step in (number, ~number)]


def _begun(log: Log, of: Sequence[Sequence[int]], number: int, at: int, blocking: bool) -> set[int]:
    """The meetings that a rank which waits has come to."""
    issues = range(number + 1) if blocking else [step for step in log.steps[:at] if step >= 0]
    return {meeting for issue in issues for meeting in of[issue]}


def _cycles(waits: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
    """Ranks of which each waits for the next one, and the last one for the first; each of them short. Some of those
    that wait may do so for nobody of them.
    """
    missing = {rank: list(others) for rank, others in waits.items()}
    gone = [-1]
    while gone:
        gone = [rank for rank, others in missing.items() if not others]
        missing = {rank: [other for other in others if other not in gone] for rank, others in missing.items() if others}
    seen: set[int] = set()
    for start in sorted(missing):
        path: dict[int, None] = {}
        rank = start
        while rank not in seen and rank not in path:
            path[rank] = None
            rank = missing[rank][0]
        if rank in path:
            yield _shortest(missing, rank)
        seen.update(path)


def _shortest(missing: Mapping[int, Sequence[int]], start: int) -> list[int]:
    """The shortest cycle through a rank that is on one."""
    came: dict[int, int] = {}
    ready = deque([start])
    while ready:
        rank = ready.popleft()
        for other in missing[rank]:
            if other == start:
                cycle = [rank]
                while cycle[-1] != start:
                    cycle.append(came[cycle[-1]])
                return cycle[::-1]
            if other not in came:
                came[other] = rank
                ready.append(other)
    raise AssertionError("it is on a cycle")


# ------------------------------------------------------------------------------------------------------------- in words


def _finding(calls: Sequence[tuple[int, Issue]], blocking: bool) -> Finding:
    alone = all(issue.messages for _, issue in calls)  # then their tags say which is for which
    shown = [f"rank {rank} {issue if alone else issue.short}" for rank, issue in calls]
    if len(shown) > _SHOWN:
        shown = [*shown[: _SHOWN - 1], "..."]
    did = " -> ".join((*shown, f"rank {calls[0][0]}"))
    line = next((issue.line for _, issue in calls if issue.line), "")
    what = _what([issue for _, issue in calls])
    if alone:
        fix = "mc.exchange sends and receives at once"
        if not blocking:
            fix = f"the same tag on both sides; {fix}, or begin one of them with async_op=True"
    elif blocking:
        fix = "issue them in one order on every rank, or wait between"
    else:
        fix = "wait for them in one order on every rank"
    return Finding("order" if blocking else "deadlock", line, said(what, did, fix))


def _ended(rank: int, issue: Issue, absent: Sequence[int]) -> Finding:
    did = f"rank {rank} {issue} -> {ranks_said(absent)} had not come there, and waited for nothing, when the run ended"
    fix = f"make it on all ranks of {issue.group.axis}, or on none"
    if issue.messages:
        fix = f"its other side over {issue.group.axis}, with the same tag"
    return Finding("unmatched", issue.line, said(f"a call over {issue.group.axis} has no other side", did, fix))


def _what(issues: Iterable[Issue]) -> str:
    """What goes wrong among these calls."""
    calls = list(issues)
    groups = {each.group for each in calls}
    names = {each.group.axis for each in calls}
    if all(each.messages for each in calls):
        return WAITING
    if any(each.messages for each in calls):
        return "messages and collectives are used in different orders"
    if len(names) > 1:
        return f"{_COUNTS.get(len(names), str(len(names)))} axes are used in different orders"
    if len({each.name for each in groups}) > 1:
        return "axes of two meshes are used in different orders"
    return "collectives of one axis wait for each other"
