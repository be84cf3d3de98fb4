"""What one rank has called, and where it has waited: what the judge is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Group", "Issue", "Log", "Message"]


class Group(NamedTuple):
    """A sequence of calls, which these ranks of the world have in common."""

    name: str
    """Alike on all of its ranks, and of no other sequence between them."""
    ranks: tuple[int, ...]
    axis: str
    """In words: ``dp``."""

    def __hash__(self) -> int:  # there may be thousands of ranks
        return hash((self.name, self.ranks[0]))


class Message(NamedTuple):
    """One message, as one of its two sides sees it."""

    rank: int
    """The other side."""
    tag: int
    x: str
    """Dtype and shape: ``f32[8]``."""


class Issue(NamedTuple):
    """One call that is begun: a collective, or a batch of messages."""

    group: Group
    operation: str
    key: str
    """What all ranks of the group must give alike."""
    text: str
    """The call in words: ``all_reduce f32[8] (op='sum')``."""
    line: str
    """The user's: ``train.py:33``."""
    gradient: int = 2
    """As ``Call.gradient`` says it."""
    sent: tuple[Message, ...] = ()
    wanted: tuple[Message, ...] = ()
    runs: tuple[Sequence[int], Sequence[int]] = ((), ())
    """Of an all_to_all, how many elements go to each index and come from each."""
    messages: bool = False
    """Whether it is a batch of messages, which not all ranks of the group need to make."""

    def __str__(self) -> str:
        return f"{self.text} over {self.group.axis}{f' at {self.line}' if self.line else ''}"

    @property
    def short(self) -> str:
        """``all_reduce over dp at train.py:33``."""
        return f"{self.operation} over {self.group.axis}{f' at {self.line}' if self.line else ''}"


@dataclass
class Log:
    """All of one rank, in the order of its program."""

    rank: int
    issues: list[Issue] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """``i``: issue i begins; ``~i``: the rank waits until issue i is over."""
    cut: bool = False
    """Whether it was ended from outside: what it would have called next is not known."""

    def begin(self, issue: Issue) -> int:
        """It begins; its number."""
        number = len(self.issues)
        self.issues.append(issue)
        self.steps.append(number)
        return number

    def wait(self, number: int) -> None:
        """The rank goes on when this issue is over."""
        self.steps.append(~number)

    def call(self, issue: Issue) -> None:
        """It begins, and the rank waits for it."""
        self.wait(self.begin(issue))
