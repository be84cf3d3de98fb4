"""Whether the ranks of each group make the same calls, and each message has another side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Any

from meshcomm.errors import few
from meshcomm.runtime.call import gradients_agree
from meshcomm.verifying.hangs.log import Group, Issue, Log, Message
from meshcomm.verifying.report import Finding

__all__ = ["Meetings", "meetings_of", "ranks_said", "said"]

_Sides = list[tuple[int, str]]
_Side = dict[tuple[Group, int, int, int], _Sides]

_SHOWN = 4
"""Ranks, or groups of ranks that call the same, that are told of."""
_NEVER = 2**62


@dataclass
class Meetings:
    """What comes together with what."""

    findings: list[Finding] = field(default_factory=list)
    of: dict[int, list[list[int]]] = field(default_factory=dict)
    """Rank to the meetings of each of its issues: none where something is wrong, so that nobody waits for that."""
    came: list[list[int]] = field(default_factory=list)
    """The ranks that come to each meeting."""
    group: list[Group] = field(default_factory=list)
    """Whose it is."""


def said(what: str, did: str, fix: str) -> str:
    """The text of a finding."""
    return f"meshcomm.prove_no_hang: {what}. {did}; fix: {fix}"


def meetings_of(logs: Mapping[int, Log]) -> Meetings:
    """The k-th calls of each group are one meeting, and the k-th message from one rank to another with one tag and
    the k-th that is expected so are one.
    """
    found = Meetings(of={rank: [[] for _ in log.issues] for rank, log in logs.items()})
    calls: dict[Group, dict[int, list[int]]] = {}
    posts: _Side = {}
    wants: _Side = {}
    for rank, log in logs.items():
        for number, issue in enumerate(log.issues):
            if issue.messages:
                _post(posts, wants, rank, number, issue)
                continue
            of_group = calls.get(issue.group)
            if of_group is None:
                of_group = calls[issue.group] = {each: [] for each in issue.group.ranks}
            of_group[rank].append(number)
    for group, numbers in calls.items():
        _meet(found, logs, group, numbers)
    _exchange(found, logs, posts, wants)
    found.findings = _once(found.findings)
    return found


def _once(findings: list[Finding]) -> list[Finding]:
    """The first of those of one kind and line: every group along an axis says the same."""
    return list({(each.kind, each.line): each for each in reversed(findings)}.values())[::-1]


# ---------------------------------------------------------------------------------------------------- collectives


def _meet(found: Meetings, logs: Mapping[int, Log], group: Group, numbers: Mapping[int, list[int]]) -> None:
    """The k-th calls of a group, up to the first at which the ranks part. A rank that was cut off may come to more."""
    issues = {rank: [logs[rank].issues[i] for i in mine] for rank, mine in numbers.items()}
    ended = [len(mine) for rank, mine in issues.items() if not logs[rank].cut]
    least = min(ended, default=max(map(len, issues.values())))
    parted = _parted(issues, least)
    agreed = least if parted is None else parted
    first = len(found.came)
    ranks = list(numbers)
    found.came.extend([ranks] * agreed)
    found.group.extend([group] * agreed)
    for rank, mine in numbers.items():
        of = found.of[rank]
        for k in range(min(agreed, len(mine))):
            of[mine[k]] = [first + k]
    if parted is not None:
        calls = {rank: mine[parted] for rank, mine in issues.items() if len(mine) > parted}
        found.findings.append(_mismatch(group, parted, calls))
    elif any(len(mine) > least for mine in issues.values()):
        found.findings.append(_missing(group, issues))


def _parted(issues: Mapping[int, list[Issue]], least: int) -> int | None:
    """The first of so many calls at which ranks give what does not agree."""
    mine = max(issues.values(), key=len)
    keys, gradients = [each.key for each in mine[:least]], [each.gradient for each in mine[:least]]
    first = least
    for theirs in issues.values():
        if theirs is mine:
            continue
        first = min(first, _first_unlike(keys, [each.key for each in theirs[:first]]))
        first = min(first, _first_unlike(gradients, [each.gradient for each in theirs[:first]], gradients_agree))
    for k, issue in enumerate(mine[:first]):
        if issue.runs != ((), ()) and _runs_part([each[k] for each in issues.values() if len(each) > k], len(issues)):
            return k
    return first if first < least else None


def _first_unlike(mine: list[Any], theirs: list[Any], alike: Callable[[Any, Any], bool] = eq) -> int:
    """Where two lists first differ, of which the second may be shorter; a large number where they do not."""
    if mine[: len(theirs)] == theirs:
        return _NEVER
    return next((k for k, (a, b) in enumerate(zip(mine, theirs, strict=False)) if not alike(a, b)), _NEVER)


def _runs_part(issues: Sequence[Issue], size: int) -> bool:
    """Whether what one sends is not what another expects, where all ranks are there."""
    if len(issues) < size:
        return False
    lengths = {length for issue in issues for run in issue.runs for length in run}
    if len(lengths) <= 1:
        return False
    return any(mine.runs[0][j] != theirs.runs[1][i] for i, mine in enumerate(issues) for j, theirs in enumerate(issues))


def _alike(calls: Mapping[int, Issue]) -> list[tuple[list[int], Issue]]:
    """Ranks that make one call together, the most last."""
    found: dict[tuple[object, ...], tuple[list[int], Issue]] = {}
    for rank, issue in calls.items():
        found.setdefault((issue.key, issue.gradient, issue.text, issue.line), ([], issue))[0].append(rank)
    return sorted(found.values(), key=lambda each: len(each[0]))


def ranks_said(ranks: Sequence[int]) -> str:
    """``ranks 0, 2``."""
    return f"rank{'s' * (len(ranks) > 1)} {few(ranks, 3)}"


def _mismatch(group: Group, k: int, calls: Mapping[int, Issue]) -> Finding:
    alike = _alike(calls)
    did = "; ".join(f"{ranks_said(ranks)} {issue}" for ranks, issue in alike[:_SHOWN])
    what = f"the ranks of {group.axis} make different calls, the {_nth(k)} over it"
    line = next((issue.line for _, issue in alike if issue.line), "")
    return Finding("mismatch", line, said(what, did, "the same call on every rank of the axis, in the same order"))


def _missing(group: Group, issues: Mapping[int, list[Issue]]) -> Finding:
    longest = max(issues.values(), key=len)
    fewer = {rank: mine for rank, mine in issues.items() if len(mine) < len(longest)}
    shortest = min(fewer.values(), key=len)
    k = next(
        (k for k, (a, b) in enumerate(zip(shortest, longest, strict=False)) if a.line != b.line), len(shortest)
    )  # what is left out in the middle shows at the lines alone, where calls are alike
    issue = longest[k]
    more = [rank for rank, mine in issues.items() if len(mine) == len(longest)]
    none = [rank for rank, mine in fewer.items() if len(mine) == len(shortest)]
    what = f"not all ranks of {group.axis} make a call"
    counts = f"{len(shortest)} of {len(longest)} calls over {group.axis}"
    make = "makes" if len(none) == 1 else "make"
    did = f"{ranks_said(more)} {issue} -> {ranks_said(none)} {make} {counts}, and not this one"
    return Finding("unmatched", issue.line, said(what, did, f"make it on all ranks of {group.axis}, or on none"))


def _nth(k: int) -> str:
    number = k + 1
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


# ------------------------------------------------------------------------------------------------------- messages


def _post(posts: _Side, wants: _Side, rank: int, number: int, issue: Issue) -> None:
    for message in issue.sent:
        posts.setdefault((issue.group, rank, message.rank, message.tag), []).append((number, message.x))
    for message in issue.wanted:
        wants.setdefault((issue.group, message.rank, rank, message.tag), []).append((number, message.x))


def _exchange(found: Meetings, logs: Mapping[int, Log], posts: _Side, wants: _Side) -> None:
    for key in dict.fromkeys((*posts, *wants)):
        group, source, destination, tag = key
        sent, wanted = posts.get(key, []), wants.get(key, [])
        for (i, x), (j, y) in zip(sent, wanted, strict=False):
            if x != y:
                mine, theirs = logs[source].issues[i], logs[destination].issues[j]
                did = f"rank {source} {mine}; rank {destination} {theirs}"
                what = f"{x} is sent and {y} is expected from rank {source} to rank {destination} with tag {tag}"
                found.findings.append(
                    Finding("mismatch", theirs.line, said(what, did, "shape= and dtype= of what is sent"))
                )
                continue
            meeting = len(found.came)
            found.came.append([source, destination])
            found.group.append(group)
            found.of[source][i].append(meeting)
            found.of[destination][j].append(meeting)
        _leave(found, logs, group, source, sent[len(wanted) :], Message(destination, tag, ""), True)
        _leave(found, logs, group, destination, wanted[len(sent) :], Message(source, tag, ""), False)


def _leave(
    found: Meetings, logs: Mapping[int, Log], group: Group, rank: int, left: _Sides, other: Message, sends: bool
) -> None:
    """Messages without another side: nobody waits for them on paper, unless that side was cut off and may yet come."""
    if left and other.rank in logs and not logs[other.rank].cut:
        number, x = left[0]
        found.findings.append(_alone(logs[rank], number, other._replace(x=x), sends))
        return
    for number, _ in left:
        found.of[rank][number].append(len(found.came))
        found.came.append([rank, other.rank])
        found.group.append(group)


def _alone(log: Log, number: int, message: Message, sends: bool) -> Finding:
    issue = log.issues[number]
    way, other = ("sent", "does not receive it") if sends else ("awaited", "does not send it")
    what = f"a message is {way} that has no other side"
    which = f"{message.x} with tag {message.tag}"
    did = f"rank {log.rank} {issue.short}, {which} -> rank {message.rank} {other}"
    fix = f"{'recv' if sends else 'send'} on rank {message.rank} over {issue.group.axis} with tag={message.tag}"
    return Finding("unmatched", issue.line, said(what, did, fix))
