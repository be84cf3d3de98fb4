"""Whether the ranks that share memory have called the same, and what they are told if they have not.

A rank compares a call with those that it reads from when it reads. Where these are not all others, the rest is compared
at one of its next calls, when they have come: nobody waits for that.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from meshcomm.errors import CommError, text
from meshcomm.runtime.callsite import hinted, in_backward
from meshcomm.runtime.lengths import dims_said
from meshcomm.runtime.process.boxes import Box
from meshcomm.runtime.process.lending import Segment
from meshcomm.runtime.transports.shared.lexicon import find
from meshcomm.runtime.transports.shared.words import (
    CODE,
    COUNT,
    DIGEST,
    PLACE,
    ROOT,
    Given,
    entry_of,
    is_lent_to,
    name_of,
    named,
    said,
)
from meshcomm.runtime.words import Words, differing

_COMPARED = 4
"""How many calls are compared at a time."""
_PARTS = 4
"""The arguments that are named as what should be the same."""


class Boxes(Protocol):
    """The mailboxes of a group."""

    index: int
    others: tuple[int, ...]
    given: deque[Given] | None

    def box(self, index: int) -> Box | None:
        """Of a rank of it."""

    def words(self, index: int) -> memoryview[int]:
        """Its lexicon."""

    def borrow(self, entry: Sequence[int], index: int) -> Segment:
        """What it lends."""


def compare_given(mail: Boxes) -> None:
    """See whether the others have made the calls that were not compared with theirs; CommError if not."""
    for _ in range(_COMPARED):
        if not mail.given:
            return
        given, found = mail.given.popleft(), None
        try:
            found = _compared(mail, *given)
        finally:  # Ctrl-C, too
            if found is None:
                mail.given.appendleft(given)
        if found is None:
            return
        differs, lent = found
        try:
            for flags in lent:
                flags[mail.index] = 0
        except BaseException:  # what was returned may be lent again
            for flags in lent:
                flags[mail.index] = 0
            raise
        if differs:
            differ_in(mail, given[0])


def _compared(mail: Boxes, number: int, digest: int) -> tuple[bool, Iterator[Any]] | None:
    """Whether one of the others has made another call, and the flags of what those lend this rank, which has read
    from none of them; None if not all have made this call.
    """
    odd, lent = [], []
    for i in mail.others:
        box = mail.box(i)
        if box is None:
            return None
        at = box.at(number)
        come = box.cells[at]
        if come < number:
            return None
        if come == number and box.cells[at + DIGEST] != digest:
            odd.append(i)
    for i in odd:
        if (entry := entry_of(mail.box(i), number)) is not None and is_lent_to(mail.index, entry):
            with contextlib.suppress(OSError):
                lent.append(mail.borrow(entry, i).flags)
    return bool(odd), iter(lent)


def differ_in(mail: Boxes, number: int) -> NoReturn:
    """Another rank has made another call of this number: who has called what, and what differs."""
    boxes = {i: mail.box(i) for i in sorted((mail.index, *mail.others))}
    entries = {i: entry for i, box in boxes.items() if (entry := entry_of(box, number)) is not None}
    meant = {i: _meant(mail, i, entry) for i, entry in entries.items()}
    mine = meant[mail.index]
    groups: dict[tuple[int, int], list[int]] = {}
    for i, entry in entries.items():
        groups.setdefault((entry[DIGEST], min(-1, entry[ROOT])), []).append(i)
    ordered = sorted(groups.values(), key=lambda indices: (len(indices), mail.index in indices))
    calls = "; ".join(f"{named(indices)} {_call_of(meant[indices[0]], entries[indices[0]])}" for indices in ordered)
    others = [(f"on {named(indices)}", meant[indices[0]]) for indices in ordered if mail.index not in indices]
    unlike = differing([(f"here (index {mail.index})", mine), *others])
    lengths = dims_said({i: each.call for i, each in meant.items()}, len(boxes))
    told = text(
        mine.parts.get("operation") or name_of(entries[mail.index][CODE]),
        f"the ranks called different things: {calls}.",
        got="; ".join([*unlike.values(), f"call {number} of a group of {len(boxes)}"]),
        fix="" if lengths else _fix(unlike),
    )
    raise CommError(hinted(told + lengths, backward=in_backward()))


def runs_differ(mail: Boxes, number: int, source: tuple[int, int], other: tuple[int, int]) -> NoReturn:
    """In an all_to_all one index sends so many elements to another one, which expects so many."""
    meant = _all_meant(mail, number)
    what = f"index {source[0]} sends {source[1]} elements to index {other[0]}, which expects {other[1]}."
    calls = [f"{named([i])} {meant[i].call}" for i in dict.fromkeys((source[0], other[0], mail.index)) if i in meant]
    got = f"{'; '.join(calls)}; call {number} of a group of {len(mail.others) + 1}"
    lengths = dims_said({i: each.call for i, each in meant.items()}, len(mail.others) + 1)
    fix = "" if lengths else "recv_sizes[i] on index j is send_sizes[j] on index i"
    raise CommError(hinted(text("all_to_all", what, got=got, fix=fix) + lengths, backward=in_backward()))


def _all_meant(mail: Boxes, number: int) -> dict[int, Words]:
    boxes = ((i, mail.box(i)) for i in sorted((mail.index, *mail.others)))
    return {i: _meant(mail, i, entry) for i, box in boxes if (entry := entry_of(box, number)) is not None}


def _meant(mail: Boxes, index: int, entry: Sequence[int]) -> Words:
    with contextlib.suppress(ValueError):  # nothing there, or it is just being written over
        return Words.read(find(mail.words(index), entry[PLACE], entry[DIGEST]))
    name = name_of(entry[CODE])
    return Words("", said(entry[CODE], entry[COUNT], entry[ROOT]), "", "", parts={"operation": name})


def _call_of(meant: Words, entry: Sequence[int]) -> str:
    """With the leaf whose gradient it is."""
    return said(entry[CODE], entry[COUNT], entry[ROOT]) if entry[ROOT] < -1 else meant.call


def _fix(unlike: Iterable[str]) -> str:
    same = "make the same calls in the same order on all ranks"
    leaves = ("leaves of x" if name.startswith("x") else name for name in unlike if name != "operation")
    names = list(dict.fromkeys(leaves))
    return f"{same}, with the same {', '.join(names[:_PARTS])}" if names else same
