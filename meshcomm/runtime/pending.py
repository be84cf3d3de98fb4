"""A result that may not be there yet, and what shall be done with it when it is.

A link's primitives give tensors, and inside of ``call.for_later`` a :class:`Pending` where something is under way. Code
that packs before a primitive and unpacks after it serves both, if what comes after goes through :func:`then`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from meshcomm.errors import CommError, text

T = TypeVar("T")
S = TypeVar("S")


class TimedOutError(Exception):
    """A wait was not long enough; nothing is lost and it can be repeated."""

    def __init__(
        self,
        what: str = "",
        missing: Sequence[int] | None = None,
        came: Sequence[int] = (),
        known: Mapping[int, str] | None = None,
        told: Callable[[], str] | None = None,
    ) -> None:
        """``missing``: the indices that are waited for and have not come, where that is known; ``came``: those that
        have; ``known``: what is known of the others; ``told``: gives all of it in words, for who does not wait again.
        """
        super().__init__(what)
        self.told = told
        self.missing, self.came, self.known = missing, came, known or {}


queued: list[Any] = []
"""Who has called for something in this process that nobody has begun: ``begin()`` does. The program looks when it makes
any other call, and while it waits for one, for others may stand still until they have that.
"""
queueing = threading.RLock()
about_to_queue: list[Callable[[], object]] = []
"""Each waits for what a helper is about to queue: what the others have called for already is to begin together."""


class _Helper(threading.local):
    is_one = False


helper = _Helper()
"""Of a thread that may only queue, for it is not the program's."""


def wait_for_helpers() -> None:
    """For what they are about to queue."""
    for wait in about_to_queue:
        wait()


def begin_all() -> None:
    """All that is queued, unless a helper asks."""
    if helper.is_one:
        return
    wait_for_helpers()
    with queueing:
        for each in list(queued):
            each.begin()


class Pending:
    """Something under way."""

    __slots__ = ("__weakref__",)

    bare: bool = False
    """Whether its wait does nothing with tensors, so that it does not matter in which modes it is made."""

    def wait(self, timeout: float | None) -> Any:
        """The result, once it is there; after ``timeout`` seconds :class:`TimedOutError`."""
        raise NotImplementedError

    def done(self) -> bool:
        """Whether :meth:`wait` would return (or raise) at once."""
        raise NotImplementedError

    def meet(self) -> None:
        """Wait until all ranks have come, where they may wait for more of this one than what it has brought."""

    def read_early(self) -> bool:
        """Read what all have brought, where that costs little to ask: False if it is to be asked again later."""
        return True

    def record(self) -> Any:
        """What is noted of the call that is waited for, where that is known."""
        return None

    def withdraw(self, seconds: float) -> bool:
        """Who has waited so long gives up, with all ranks or with none: whether that can be had here. The next wait
        then tells which, soon: the result, or CommError as the others.
        """
        return False

    def give_up(self) -> None:
        """Who has waited in vain waits no more: messages that come all the same are for who asks for them next."""

    def abandon(self) -> None:
        """Nobody will wait: leave everything in a state in which that does no harm."""


def settled(value: Any) -> Any:
    """The result of what may be a Pending, for who cannot wait again: CommError when the mesh's time is up."""
    if not isinstance(value, Pending):
        return value
    try:
        return value.wait(None)
    except TimedOutError as late:
        fix = "see where the other ranks are: all ranks of an axis must make the same calls in the same order"
        what = late.told() if late.told is not None else text("wait", f"the time is up: {late}.", fix=fix)
        value.give_up()
        raise CommError(what) from None


class _Then(Pending):
    __slots__ = ("_fn", "_source", "_value")

    def __init__(self, source: Pending, fn: Callable[[Any], Any]) -> None:
        self._source: Pending | None = source
        self._fn: Callable[[Any], Any] | None = fn
        self._value: Any = None

    def wait(self, timeout: float | None) -> Any:
        """Wait for the source, then call the function, once."""
        if self._source is not None:
            value = self._source.wait(timeout)
            assert self._fn is not None
            self._value = self._fn(value)
            self._source = self._fn = None
        return self._value

    def done(self) -> bool:
        """What comes after takes no time."""
        return self._source is None or self._source.done()

    def record(self) -> Any:
        """The source's."""
        return None if self._source is None else self._source.record()

    def withdraw(self, seconds: float) -> bool:
        """Pass it on."""
        return self._source is not None and self._source.withdraw(seconds)

    def give_up(self) -> None:
        """Pass it on."""
        if self._source is not None:
            self._source.give_up()

    def abandon(self) -> None:
        """Pass it on."""
        if self._source is not None:
            self._source.abandon()


class Around(Pending):
    """What is around another one, and passes all on."""

    __slots__ = ("bare", "inside")

    def __init__(self, inside: Pending) -> None:
        self.inside, self.bare = inside, inside.bare

    def wait(self, timeout: float | None) -> Any:
        """As the one inside."""
        return self.inside.wait(timeout)

    def done(self) -> bool:
        """As the one inside."""
        return self.inside.done()

    def meet(self) -> None:
        """As the one inside."""
        self.inside.meet()

    def read_early(self) -> bool:
        """Pass it on."""
        return self.inside.read_early()

    def record(self) -> Any:
        """The source's."""
        return self.inside.record()

    def withdraw(self, seconds: float) -> bool:
        """Pass it on."""
        return self.inside.withdraw(seconds)

    def give_up(self) -> None:
        """Pass it on."""
        self.inside.give_up()

    def abandon(self) -> None:
        """Pass it on."""
        self.inside.abandon()


class AllOf(Pending):
    """Several results as a list; what is no Pending stands for itself."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = list(parts)

    def wait(self, timeout: float | None) -> list[Any]:
        """Wait for one after the other, all within the time."""
        end = None if timeout is None else time.monotonic() + timeout
        for i, part in enumerate(self._parts):
            if isinstance(part, Pending):
                self._parts[i] = part.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self._parts

    def done(self) -> bool:
        """Whether every one is."""
        return all(part.done() for part in self._parts if isinstance(part, Pending))

    def record(self) -> Any:
        """That of the first which is waited for."""
        return next((part.record() for part in self._parts if isinstance(part, Pending)), None)

    def withdraw(self, seconds: float) -> bool:
        """All that are left."""
        found = [part.withdraw(seconds) for part in self._parts if isinstance(part, Pending)]
        return any(found)

    def give_up(self) -> None:
        """Pass it on."""
        for part in self._parts:
            if isinstance(part, Pending):
                part.give_up()

    def abandon(self) -> None:
        """Pass it on."""
        for part in self._parts:
            if isinstance(part, Pending):
                part.abandon()


def then(value: T, fn: Callable[[T], S]) -> S:
    """``fn(value)``, now or when the value is there: to the type checker a Pending of a value is that value."""
    return cast(S, _Then(value, fn)) if isinstance(value, Pending) else fn(value)


def then_all(values: Sequence[T], fn: Callable[[list[T]], S]) -> S:
    """``fn(values)``, now or when all values are there."""
    if any(isinstance(value, Pending) for value in values):
        return cast(S, _Then(AllOf(values), fn))
    return fn(list(values))
