"""Batches of messages at the store of the process group: what a rank writes of its own, and which ones go together.

A key for each side of a message says all of the batch that it belongs to. Who has the other side takes the key away
when its batch goes; so one that looks for a key in vain then looks whether a batch that it has found goes already.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from meshcomm.runtime.hooks.guard.store import the_store

LEAVING, GAVE_UP, GOING = "leaving", "gave up", "going"
"""What a rank says of its batch when it has come: it may be about to give up; it has given up; it goes, as all do."""


class Side(NamedTuple):
    """One message, on one of its sides."""

    other: int
    tag: int
    nth: int
    """On its route."""
    sends: bool
    shown: str
    """``f32[8]``."""


class Batch(NamedTuple):
    """The messages of one call of one rank."""

    prefix: str
    owner: int
    number: int
    """Of all batches of this rank."""
    place: str
    words: str
    sides: tuple[Side, ...]

    @property
    def state(self) -> str:
        """The key at which its rank says what is to become of it."""
        return f"{self.prefix}/batch/{self.owner}/{self.number}"

    @property
    def did(self) -> str:
        """In words."""
        return f"{self.place} called {self.words}"

    def key(self, side: Side) -> str:
        """What this rank writes."""
        return self._key(side, side.sends)

    def awaited(self, side: Side) -> str:
        """What the other one does."""
        return self._key(side, not side.sends)

    def _key(self, side: Side, sent: bool) -> str:
        source, destination = (self.owner, side.other) if side.sends else (side.other, self.owner)
        what = "sent" if sent else "wanted"
        return f"{self.prefix}/{source}>{destination}/{side.tag}/{side.nth}/{what}"

    def posted(self) -> list[str]:
        """In the order in which they are written."""
        return [self.key(side) for side in self.sides]

    def write(self) -> str:
        """For the others."""
        return json.dumps(self)

    @staticmethod
    def read(data: bytes) -> Batch:
        """The inverse."""
        prefix, owner, number, place, words, sides = json.loads(data)
        return Batch(prefix, owner, number, place, words, tuple(Side(*side) for side in sides))


class Standing(NamedTuple):
    """What the ranks of the batches that go together say."""

    state: str
    """The strongest word; empty where all have come and are still there."""
    why: str = ""
    leaving: tuple[int, ...] = ()
    """Who is about to give up, or not."""


class Together:
    """The batches that go together with one of this rank: that share a message with it, or with one that does."""

    def __init__(self, mine: Batch) -> None:
        self.mine = mine
        self._found: list[Batch] = []  # each after one that it shares a message with
        self._sides: dict[str, tuple[Batch, Side]] = {}
        self.missing: dict[str, int] = {}
        """The keys that have not been seen, and the index of who writes each; when there are none, all have come."""
        self.misfit = ""
        """What one sends and another one expects, where they differ."""
        self._take(mine, mine.posted()[-1:])

    @property
    def states(self) -> list[str]:
        """Where the others say what is to become of theirs."""
        return [batch.state for batch in self._found[1:]]

    def post(self) -> None:
        """Come."""
        store, said = the_store(), self.mine.write()
        for key in self.mine.posted():
            store.set(key, said)

    @property
    def is_met(self) -> bool:
        """Whether the other sides of this rank's messages have come."""
        return not any(self.mine.awaited(side) in self.missing for side in self.mine.sides)

    def look(self) -> None:
        """See what has come."""
        store, todo = the_store(), list(self.missing)
        while todo:
            key = todo.pop()
            if key in self._sides:  # of a batch that was found; has it been written to the last?
                if store.check([key]):
                    self.missing.pop(key, None)
            elif key in self.missing and (data := store.peek(key)):
                before = set(self.missing)
                self._take(Batch.read(data), [key])
                todo += [each for each in self.missing if each not in before]

    def _take(self, batch: Batch, seen: list[str]) -> None:
        keys = batch.posted()
        self._found.append(batch)
        self._sides |= {batch.key(side): (batch, side) for side in batch.sides}
        for key in keys:
            self.missing.pop(key, None)
        if keys[-1:] != seen:
            self.missing[keys[-1]] = batch.owner
        for side in batch.sides:
            met = self._sides.get(batch.awaited(side))
            if met is None:
                self.missing[batch.awaited(side)] = side.other
            elif met[1].shown != side.shown and not self.misfit:
                self.misfit = _misfit(*met, batch, side)

    def standing(self) -> Standing:
        """What the others say: the ones that were found last first, for who goes takes away keys, and at last its word
        when all that it shares a message with go.
        """
        store, gave_up, leaving = the_store(), "", []
        for batch in reversed(self._found[1:]):
            data = store.peek(batch.state)
            if data:
                state, why = json.loads(data)
                if state == GOING:
                    return Standing(GOING)
                gave_up = why if state == GAVE_UP else gave_up
                leaving += [batch.owner] if state == LEAVING else []
        if gave_up:
            return Standing(GAVE_UP, gave_up)
        return Standing(LEAVING if leaving else "", "", tuple(leaving))

    def say(self, state: str, why: str = "") -> None:
        """What is to become of this rank's."""
        the_store().set(self.mine.state, json.dumps([state, why]))

    def stay(self) -> None:
        """No more than that it has come."""
        the_store().delete_key(self.mine.state)

    def depart(self) -> bool:
        """Go; whether that had to be said, since not all that go with this read each other's keys."""
        said = len(self._found) > 2 or bool(self.missing)
        if said:
            self.say(GOING)
        for side in self.mine.sides:
            the_store().delete_key(self.mine.awaited(side))
        return said


def _misfit(first: Batch, one: Side, second: Batch, two: Side) -> str:
    does = [("sends" if side.sends else "expects") + f" {side.shown}" for side in (one, two)]
    return f"{first.place} {does[0]}, {second.place} {does[1]}: {second.words}"
