"""``python -m meshcomm explain DIR``: what the ranks' last collectives, dumped to files, say about why they hang.

Merges the dumps of all ranks and names the first call at which they differ, or who has not come to it and where it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from meshcomm.runtime.hooks.dumps import FORMAT
from meshcomm.runtime.words import ranks_text, sentence

_SKEW = 1.0
"""Seconds by which clocks and dumps may differ."""
_NOT_COMPARED = frozenset(("scatter", "all_to_all"))
"""Primitives whose tensors may differ in shape."""
_NO_DUMP = "has left no dump: it had ended, or could not be reached"


@dataclass
class Call:
    """One record of a dump."""

    facts: Mapping[str, Any]
    number: int
    """In its group; 0 for messages."""
    state: str
    """begun, queued (the device has not come through it), completed, failed or dropped."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal on all ranks."""
        facts = self.facts
        shape = () if facts["what"] in _NOT_COMPARED else tuple(facts["shape"])
        root = facts["root"] if isinstance(facts["root"], int) else -1
        return facts["what"], facts["op"], facts["dtype"], shape, root

    @property
    def text(self) -> str:
        """``all_reduce f32[8] (op='sum')``."""
        return str(self.facts.get("words", self.facts["called"]))

    def over(self, axis: str = "") -> str:
        """``all_reduce f32[8] (op='sum') over 'dp' at train.py:88``, where the line is known."""
        return sentence(self.text, axis, self.facts["site"])


@dataclass
class Group:
    """What one rank says of a group."""

    facts: Mapping[str, Any]
    begun: int
    """The number of its last call, 0 if there is none."""
    calls: dict[int, Call] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """The oldest number that is still known."""
        return min(self.calls, default=self.begun + 1)

    @property
    def done(self) -> Call | None:
        """The last one that came to a good end."""
        return next((call for _, call in sorted(self.calls.items(), reverse=True) if call.state == "completed"), None)


@dataclass
class Dump:
    """One rank's file."""

    facts: Mapping[str, Any]
    rank: int
    """In the world."""
    wall: float
    """When it was written."""
    groups: dict[str, Group] = field(default_factory=dict)
    under_way: list[tuple[str, Call]] = field(default_factory=list)
    """The title of the group, and the call."""

    @staticmethod
    def of(facts: Mapping[str, Any]) -> Dump:
        """Sorted by group; KeyError, TypeError or ValueError where it is no dump."""
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']!r}, {FORMAT} is known")
        dump = Dump(facts, int(facts["rank"]), float(facts["wall"]))
        titles = [str(group["title"]) for group in facts["groups"]]
        for title, group in zip(titles, facts["groups"], strict=True):
            _ = group["ranks"][group["index"]], [axis["coordinate"].items() for axis in group["axes"]]
            dump.groups[title] = Group(group, int(group["begun"]))
        for each in facts["calls"]:
            call, title = Call(each, int(each["number"]), str(each["state"])), titles[each["group"]]
            _ = call.over(), call.key, each["began"] + 0.0
            if call.number:
                dump.groups[title].calls[call.number] = call
            if call.state in ("begun", "queued"):
                dump.under_way.append((title, call))
        _ = int(facts["world_size"]), dump.where
        return dump

    @property
    def where(self) -> str:
        """Where the main thread is, in the user's program."""
        thread = next((thread for thread in self.facts["threads"] if thread["main"]), None)
        frame = None if thread is None else next((frame for frame in thread["frames"] if frame["user"]), None)
        return "" if frame is None else f"{frame['site']} in {frame['in']}"


def read(folder: Path) -> tuple[dict[int, Dump], list[str]]:
    """The dumps in a folder by rank, and what is wrong with the files that are none."""
    dumps: dict[int, Dump] = {}
    damaged = []
    for path in sorted(folder.glob("rank*.json")):
        try:
            dump = Dump.of(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, StopIteration) as error:
            damaged.append(f"{path.name}: {type(error).__name__}: {error}")
            continue
        dumps[dump.rank] = dump
    return dumps, damaged


# ------------------------------------------------------------------------------------------------- one group's story


@dataclass
class Story:
    """A group as all of its ranks tell it."""

    title: str
    ranks: Sequence[int]
    dumps: Mapping[int, Dump]

    @property
    def members(self) -> dict[int, Group]:
        """Those that have dumped, by rank; who knows nothing of the group has called nothing in it."""
        return {
            rank: self.dumps[rank].groups.get(self.title, Group({"axes": []}, 0))
            for rank in self.ranks
            if rank in self.dumps
        }

    @property
    def name(self) -> str:
        """``axis 'dp'``."""
        axes = [axis["name"] for group in self.members.values() for axis in group.facts["axes"]]
        shown = [repr(axis if isinstance(axis, str) else tuple(axis)) for axis in axes[:1]]
        return f"axis {shown[0]}" if shown else f"the group of ranks {self.title}"

    def place(self, rank: int) -> str:
        """``dp=3,tp=1``."""
        known = [self.members[rank], *self.dumps[rank].groups.values()] if rank in self.dumps else []
        axis = next((axis for group in known for axis in group.facts["axes"]), None)
        return f"rank {rank}" if axis is None else ",".join(f"{n}={at}" for n, at in axis["coordinate"].items())

    def divergence(self) -> Divergence | None:
        """The first call that not all make alike."""
        members = self.members
        if not members:
            return None
        start = max(group.first for group in members.values())
        for number in range(start, 1 + max(group.begun for group in members.values())):
            calls = {rank: group.calls[number] for rank, group in members.items() if number in group.calls}
            absent = [rank for rank in self.ranks if rank not in calls and self._should_have_come(rank, number, calls)]
            if len({call.key for call in calls.values()}) > 1:
                return Divergence(self, number, calls, absent, True)
            if absent and any(call.state != "completed" for call in calls.values()):
                return Divergence(self, number, calls, absent, False)
        return None

    def _should_have_come(self, rank: int, number: int, calls: Mapping[int, Call]) -> bool:
        """Whether its dump is not older than the others' call, nor has lost it."""
        if rank not in self.dumps:
            return True
        if self.members[rank].begun >= number:
            return False
        return any(call.facts["began"] < self.dumps[rank].wall + _SKEW for call in calls.values())

    def doing(self, rank: int) -> str:
        """Where a rank is that has not come."""
        if rank not in self.dumps:
            return _NO_DUMP
        dump = self.dumps[rank]
        if dump.under_way:
            title, call = dump.under_way[-1]
            over = "" if title == self.title else Story(title, (rank,), self.dumps).name.removeprefix("axis ")
            return f"called {call.over(over)}, and has not come"
        return f"has not come, and is in no collective{f' but at {dump.where}' if dump.where else ''}"

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Rank, place, last completed, now."""
        for rank in self.ranks:
            if rank not in self.dumps:
                yield str(rank), self.place(rank), "", "no dump"
                continue
            group = self.members[rank]
            done = "nothing yet" if group.done is None else f"{group.done.number} {group.done.text}"
            yield str(rank), self.place(rank), done, self._now(rank, group)

    @property
    def _unfinished(self) -> bool:
        """Whether anybody is in a call, or its last one has failed."""
        lasts = [group.calls.get(group.begun) for group in self.members.values()]
        failed = any(last is not None and last.state != "completed" for last in lasts)
        return failed or any(title == self.title for dump in self.dumps.values() for title, _ in dump.under_way)

    def _now(self, rank: int, group: Group) -> str:
        dump = self.dumps[rank]
        mine = [call for title, call in dump.under_way if title == self.title]
        last = group.calls.get(group.begun)
        if mine:
            call = mine[0]
            since = datetime.fromtimestamp(call.facts["began"])
            waits = f"{dump.wall - call.facts['began']:.3g} s"
            number = f"{call.number} " if call.number else ""
            return f"in {number}{call.over()} since {since:%H:%M:%S} ({waits})"
        if last is not None and last.state in ("failed", "dropped"):
            return f"{last.number} {last.text} {last.state}{': ' if last.facts['why'] else ''}{last.facts['why']}"
        return self.doing(rank)

    def lines(self) -> Iterator[str]:
        """A table for people."""
        counts = {group.begun for group in self.members.values()}
        quiet = len(counts) == 1 and len(self.members) == len(self.ranks) and not self._unfinished
        yield f"{self.name}, ranks {', '.join(map(str, self.ranks))}" + (
            f": all have completed {counts.pop()} calls" if quiet else ""
        )
        if quiet:
            return
        rows = [("rank", "place", "last completed", "now"), *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        for row in rows:
            yield "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        late = [rank for rank, group in self.members.items() if group.first > 1]
        if late:
            yield f"  of rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))} older calls are not kept"


@dataclass
class Divergence:
    """A call that not all ranks of a group made alike."""

    story: Story
    number: int
    calls: Mapping[int, Call]
    absent: Sequence[int]
    differs: bool

    @property
    def when(self) -> float:
        """It began."""
        return min(float(call.facts["began"]) for call in self.calls.values())

    @property
    def is_a_cause(self) -> bool:
        """Whether somebody who has not come waits for nobody."""
        dumps = self.story.dumps
        return any(rank not in dumps or not dumps[rank].under_way for rank in self.absent)

    def __str__(self) -> str:
        groups: dict[str, list[str]] = {}
        for rank, call in self.calls.items():
            groups.setdefault(f"called {call.over()}", []).append(self.story.place(rank))
        for rank in self.absent:
            groups.setdefault(self.story.doing(rank), []).append(self.story.place(rank))
        what = ranks_text([(places, did) for did, places in groups.items()])
        return f"{self.story.name}, call {self.number}: {what}"


# --------------------------------------------------------------------------------------------------------- all of it


@dataclass
class Explanation:
    """What all dumps say together."""

    dumps: Mapping[int, Dump]
    damaged: Sequence[str]

    @property
    def stories(self) -> list[Story]:
        """By group, the largest first."""
        ranks: dict[str, Sequence[int]] = {}
        for dump in self.dumps.values():
            for title, group in dump.groups.items():
                ranks.setdefault(title, group.facts["ranks"])
        return [Story(title, members, self.dumps) for title, members in sorted(ranks.items(), key=lambda x: -len(x[1]))]

    @property
    def missing(self) -> list[int]:
        """The ranks without a dump."""
        size = max((int(dump.facts["world_size"]) for dump in self.dumps.values()), default=0)
        return [rank for rank in range(size) if rank not in self.dumps]

    @property
    def first(self) -> Divergence | None:
        """What the others come of: calls that differ, then ranks that wait for nobody, then the oldest."""
        found = [divergence for story in self.stories if (divergence := story.divergence()) is not None]
        return min(found, key=lambda each: (not each.differs, not each.is_a_cause, each.when), default=None)

    @property
    def verdict(self) -> str:
        """One line."""
        first = self.first
        if first is not None:
            return str(first)
        failed = [
            f"rank {rank}: {call['called']}: {call['why']}"
            for rank, dump in self.dumps.items()
            for call in dump.facts["calls"][-1:]
            if call["state"] == "failed"
        ]
        return "; ".join(failed) or "no divergence: as far as the dumps go, all ranks made the same calls"

    def lines(self) -> Iterator[str]:
        """For people."""
        for each in self.damaged:
            yield f"not readable: {each}"
        if self.missing:
            yield f"no dump of rank{'s' if len(self.missing) > 1 else ''} {', '.join(map(str, self.missing))}"
        walls = [dump.wall for dump in self.dumps.values()]
        if walls and max(walls) - min(walls) > _SKEW:
            yield f"the dumps were written within {max(walls) - min(walls):.3g} s of each other, not at one time"
        hosts = {str(dump.facts["world_size"]) for dump in self.dumps.values()}
        if len(hosts) > 1:
            yield f"the dumps are of launches of different sizes, {', '.join(sorted(hosts))}: an old one among them?"
        for story in self.stories:
            yield ""
            yield from story.lines()
        yield ""
        yield self.verdict

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "verdict": self.verdict,
            "diverged": self.first is not None,
            "missing": self.missing,
            "damaged": list(self.damaged),
            "groups": [
                {"name": s.name, "ranks": list(s.ranks), "rows": [list(r) for r in s.rows()]} for s in self.stories
            ],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Print what the dumps say: 0 where the ranks agree, 1 where they do not, 2 without a dump."""
    parser = argparse.ArgumentParser(prog="python -m meshcomm explain", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the ranks' dumps are, rank0.json and so on")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args(argv)
    found = Explanation(*read(asked.folder))
    if not found.dumps:
        sys.stderr.write("\n".join([f"no dumps in {asked.folder}", *found.damaged]) + "\n")
        return 2
    text = json.dumps(found.as_dict(), indent=1) if asked.json else "\n".join(found.lines())
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return 0 if found.first is None else 1
