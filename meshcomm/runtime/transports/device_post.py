"""Messages that an accelerator's own backend moves, NCCL above all. It knows no tags: what one rank sends another one
it matches by order alone. And it does one thing after the other: two ranks that each begin to send, and then to
receive, wait for one another in the first step, where both are not one batch.

::

    later     exchange ──► queued ──┬─ the first wait ──────────────┐
                                    ├─ the next call of any kind ───┼──► one batch ──► under way ──► waited for
    at once   exchange ─────────────┴─ with all that is queued ─────┘

A batch is begun by the thread that waits or calls next, on its stream, after the streams on which its messages were
made: a thread that only queues (the guard's) touches no device.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import CommError, text
from meshcomm.runtime.call import Post, Want
from meshcomm.runtime.pending import Pending, queued, queueing, wait_for_helpers
from meshcomm.runtime.process import accelerator
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.underway import Started, started

KNOW_NO_TAGS = frozenset({"nccl", "xccl", "hccl"})
"""Backends that match messages by order."""


def messages_for(
    group: dist.ProcessGroup, posts: Sequence[Post], wants: Sequence[Want]
) -> tuple[list[dist.P2POp], list[Tensor]]:
    """What torch is told of them, to and from each rank in order of the tags, whatever order they were given in; and
    the tensors that are received.
    """
    room = [torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype, _, device in wants]
    todo = [
        dist.P2POp(dist.isend, dtypes.to_bytes(x), group=group, tag=tag, group_peer=dst)
        for x, dst, tag in sorted(posts, key=lambda post: post[1:])
    ]
    order = sorted(range(len(wants)), key=lambda i: (wants[i][0], wants[i][3]))
    packed = [dtypes.to_bytes(each) for each in room]
    todo += [dist.P2POp(dist.irecv, packed[i], group=group, tag=wants[i][3], group_peer=wants[i][0]) for i in order]
    return todo, [dtypes.from_bytes(each, want[2]).view(want[1]) for each, want in zip(packed, wants, strict=True)]


class Outbox:
    """The messages of one group that have been called for and not begun."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Queued] = []

    def put(self, link: Any, todo: list[dist.P2POp], result: Any) -> Queued:
        """Behind those that are there."""
        one = Queued(self, link, todo, result)
        with queueing:
            self._waiting.append(one)
            if self not in queued:
                queued.append(self)
        return one

    def __contains__(self, one: Queued) -> bool:
        return one in self._waiting

    def begin(self) -> None:
        """All of it as one batch; who waits is told if that fails."""
        with queueing:
            waiting = self.drop()
            if not waiting:
                return
            found: Sequence[dist.Work] | BaseException = RuntimeError("the messages were interrupted")
            try:
                _after_who_made(waiting)
                found = _torch.begin_messages([each for one in waiting for each in one.todo])
            except BaseException as error:
                found = error
                if not isinstance(error, RuntimeError):  # Ctrl-C, which is whose call this is
                    raise
            finally:
                for one in waiting:
                    one.begun(found)

    def take_out(self, one: Queued) -> None:
        """It was given up before anybody has begun it."""
        with queueing:
            if one not in self._waiting:
                return
            self._waiting.remove(one)
            one.begun(RuntimeError("it was given up before it was begun"))
            if not self._waiting:
                queued.remove(self)

    def drop(self) -> list[Queued]:
        """What has not been begun, which this is not to begin any more."""
        with queueing:
            waiting, self._waiting = self._waiting, []
            if self in queued:
                queued.remove(self)
        return waiting


def _after_who_made(waiting: Sequence[Queued]) -> None:
    """What this thread begins comes after what made the messages, whose memory stays until it has come to there."""
    here = accelerator.stream_of(waiting[0].todo[0].tensor)
    for stream in {stream for one in waiting for stream in one.streams}:
        if here is not None and stream != here:
            here.wait_stream(stream)
    for one in waiting:
        for stream in one.streams:
            accelerator.lend(stream, one.todo)


class Queued(Pending):
    """The messages of one call."""

    __slots__ = ("_failed", "_link", "_outbox", "_result", "_works", "streams", "todo")

    def __init__(self, outbox: Outbox, link: Any, todo: list[dist.P2POp], result: Any) -> None:
        self.todo = todo
        self.streams = {stream for each in todo if (stream := accelerator.stream_of(each.tensor)) is not None}
        self._outbox, self._link, self._result = outbox, link, result
        self._works: Sequence[Started] = ()
        self._failed: RuntimeError | None = None

    def begun(self, found: Sequence[dist.Work] | BaseException) -> None:
        """They are under way, with all that were in the batch; or could not be."""
        if isinstance(found, BaseException):
            self._failed = found if isinstance(found, RuntimeError) else RuntimeError(f"interrupted by {found!r}")
        else:
            self._works = [started(self._link, "exchange", work, None, self.todo) for work in found]
        self.todo = []

    def _under_way(self) -> Sequence[Started]:
        if self in self._outbox:
            wait_for_helpers()
            self._outbox.begin()
        if self._failed is not None:
            raise self._link._error("exchange", self._failed) from self._failed
        return self._works

    def wait(self, timeout: float | None) -> Any:
        """The batch, which is begun now if nobody has."""
        for work in self._under_way():
            work.wait(timeout)
        return self._result

    def done(self) -> bool:
        """Whether the batch is, which is begun now if nobody has."""
        return all(work.done() for work in self._under_way())

    def abandon(self) -> None:
        """The other sides wait all the same."""
        if self._failed is None:
            with contextlib.suppress(CommError):  # it fails now, and nobody waits
                for work in self._under_way():
                    work.abandon()

    def cancel(self) -> None:
        """It is not to be begun any more, if it was not."""
        self._outbox.take_out(self)


class Compared(Pending):
    """The messages of one call whose tags both sides say first: what is refused, or given up meanwhile, is not begun,
    for order alone would match it with the next call's.
    """

    __slots__ = ("_messages", "_said")

    def __init__(self, said: Pending, messages: Queued) -> None:
        self._said: Pending | None = said
        self._messages = messages

    def wait(self, timeout: float | None) -> Any:
        """The comparison, then the messages, all within the time."""
        end = None if timeout is None else time.monotonic() + timeout
        self._hear(timeout)
        return self._messages.wait(None if end is None else max(0.0, end - time.monotonic()))

    def _hear(self, timeout: float | None) -> None:
        if self._said is not None:
            try:
                self._said.wait(timeout)
            except CommError:
                self._messages.cancel()
                raise
            self._said = None

    def done(self) -> bool:
        """Whether both are; or the tags are not the same, which the wait says."""
        if self._said is not None:
            if not self._said.done():
                return False
            try:
                self._hear(None)
            except CommError:
                return True
        return self._messages.done()

    def abandon(self) -> None:
        """Nobody knows yet whether the others have them."""
        if self._said is not None:
            self._said.abandon()
            self._messages.cancel()
        self._messages.abandon()


def tags_of(posts: Sequence[Post], wants: Sequence[Want]) -> dict[int, list[int]]:
    """For each rank with which a tag is used, how many messages and a digest of their tags: of those to it and of those
    from it. Whoever has messages without tags alone does not ask, whatever this rank has with others.
    """
    peers = sorted({dst for _, dst, tag in posts if tag} | {want[0] for want in wants if want[3]})
    to = {peer: sorted(tag for _, dst, tag in posts if dst == peer) for peer in peers}
    of = {peer: sorted(want[3] for want in wants if want[0] == peer) for peer in peers}
    return {peer: [*_brief(to[peer]), *_brief(of[peer])] for peer in peers}


def _brief(tags: list[int]) -> tuple[int, int]:
    return len(tags), zlib.crc32(repr(tags).encode())


def check_tags(mine: dict[int, list[int]], found: Sequence[Tensor], index: int) -> None:
    """What each of the others says of the messages between it and this rank is what this rank says."""
    for (peer, (*to, count, of)), said in zip(mine.items(), found, strict=True):
        if said.tolist() != [count, of, *to]:
            raise CommError(
                text(
                    "exchange",
                    f"index {index} and index {peer} have not given the messages between them the same tags.",
                    got=f"index {index} sends {to[0]} and receives {count}; index {peer} says otherwise",
                    fix="on an accelerator's backend send and receive those with tags in one exchange on both sides",
                )
            )
