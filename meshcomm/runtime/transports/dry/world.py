"""Which rank of a dry run this thread is, and what the runs of all of them have posted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from meshcomm.runtime.process.inside import told_by
from meshcomm.runtime.transports.dry.places import PlaceRead, PlaceReads

Message = tuple[str, int, int, int, int]
"""Of which sequence of calls, from which rank, to which, its tag, and how many like it came before."""


class MissingError(Exception):
    """Messages whose bytes only the runs of other ranks know."""

    def __init__(self, *messages: Message) -> None:
        super().__init__(f"rank {messages[0][1]} has not run")
        self.messages = messages


Posted = dict[Message, tuple[Tensor | None, Mapping[PlaceRead, str]]]
"""Bytes, and what the rank that posted them had read of its place by then."""


class DryWorld:
    """The rank that runs, of how many, and what the runs of all of them have posted."""

    def __init__(
        self,
        rank: int,
        size: int,
        posted: Posted | None = None,
        suppose: Callable[..., None] = lambda *given: None,
    ) -> None:
        self.rank, self.size = rank, size
        self.posted: Posted = {} if posted is None else posted
        self.reads = PlaceReads(size)
        """What this rank has read of its place."""
        self.suppose = suppose
        """``suppose(x, values, sure)``: x, which nobody knows, is what the caller says, or these values."""
        self.linked: Callable[[Any], None] = lambda link: None
        """Who is told of each link that is made."""
        self.options: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any] | None = None
        """``options(fn, args, kwargs)``: who calls the functions that have options in the program's place."""
        self.reserve: Any = None
        """What its links keep of the memory of large results, to use it again."""
        self.made: Counter[Any] = Counter()
        """How many meshes like it were made before."""

    def post(self, message: Message, x: Tensor | None) -> None:
        """Bytes for another rank, or None where they are not known."""
        self.posted[message] = x, dict(self.reads.found)

    def take(self, message: Message) -> Tensor | None:
        """What its sender has posted."""
        if message not in self.posted:
            raise MissingError(message)
        x, theirs = self.posted[message]
        if message[1] != self.rank:
            self.reads.take_over(theirs, message[0])
        return x

    def take_all(self, messages: Sequence[Message]) -> list[Tensor | None]:
        """The same of several, whose senders run together."""
        missing = [message for message in messages if message not in self.posted]
        if missing:
            raise MissingError(*missing)
        return [self.take(message) for message in messages]


class _Here(threading.local):
    world: DryWorld | None = None
    source: int | None = None
    """The index whose bytes count."""
    each: bool = False
    """Whether all of them do."""


here = _Here()


def dry_world() -> DryWorld | None:
    """That of the dry run that this thread is in."""
    return here.world


told_by(lambda: None if here.world is None else (here.world.rank, here.world.size), dry=True)


@contextmanager
def inside(world: DryWorld) -> Iterator[None]:
    """This thread is the rank of a dry run."""
    before, here.world = here.world, world
    try:
        yield
    finally:
        here.world = before


@contextmanager
def said_by(index: int) -> Iterator[None]:
    """What is called inside depends on what the rank of this index says, which may differ from what this one says: in a
    dry run that one runs first.
    """
    before, here.source = here.source, index
    try:
        yield
    finally:
        here.source = before


@contextmanager
def said_by_each() -> Iterator[None]:
    """What is called inside depends on what each of the ranks says: in a dry run all of the axis run first."""
    before, here.each = here.each, True
    try:
        yield
    finally:
        here.each = before


def is_dry() -> bool:
    """Whether this is a rank of :func:`dry_run`: tensors have no values, and nothing is sent.

    For what a dry run cannot do, or need not: reading a file, printing numbers.

    Returns: a bool, the same on every rank.

    Cost: none; nobody is asked.

    Example:
        >>> import meshcomm as mc
        >>> mc.is_dry()
        False
        >>> seen = []
        >>> run = mc.dry_run(lambda: seen.append(mc.is_dry()), {"dp": 4})
        >>> seen
        [True]
    """
    return here.world is not None
