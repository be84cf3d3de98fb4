"""Links between the ranks of one process: what each collective is made of, and messages.

n = number of ranks in the group.
"""

from __future__ import annotations

import bisect
import functools
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

from torch import Tensor

from meshcomm.errors import CommError, shape_text
from meshcomm.runtime.call import Post, Want, messages_of, told
from meshcomm.runtime.health.attendance import absent_text
from meshcomm.runtime.pending import Pending, TimedOutError
from meshcomm.runtime.recorder import BEGAN, DROPPED, ENDED, Record, failed
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.threads import results
from meshcomm.runtime.transports.threads.meeting_link import MeetingLink, in_no_modes
from meshcomm.runtime.transports.threads.meetings import Batch, Message

_SUM = ("sum",)
_FLAT = "flat"
"""Says that results lie one behind the other: the last one to come makes them for all."""
_SOON = 1.0
"""Seconds within which ranks that wait for one another are told: a barrier that would wait longer outlasts them."""


class InProcessLink(MeetingLink):
    """One rank's link to the other ranks of its group in this process."""

    # --------------------------------------------------------------------------------------------- collectives

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """Folded by index, whatever the order of arrival."""
        result: Tensor = self._meet((x.dtype, x.shape, op), x, results.reduced, (op,))
        return result

    def sum_told(self, x: Tensor, said: tuple[Any, ...]) -> Tensor:
        """The same of a sum that is all of a call, which is said here."""
        return self._meet(None, x, results.reduced, _SUM, said, 4)  # type: ignore[no-any-return]

    def all_gather(self, x: Tensor) -> Tensor:
        """Stacked in order of index."""
        result: Tensor = self._meet((x.dtype, x.shape), x, results.gathered)
        return result

    def gather_flat(self, x: Tensor, empty: Any = None) -> Any:
        """The same, one behind the other."""
        return self._meet((x.dtype, x.shape, _FLAT), x, results.joined)

    def reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        """Each row folded by index."""
        result: Tensor = self._meet((x.dtype, x.shape, op), x, results.scattered, (op,))
        return result

    def scatter_flat(self, x: Tensor, op: str) -> Any:
        """The same of rows that lie one behind the other."""
        return self._meet((x.dtype, x.shape, op, _FLAT), x, results.scattered_flat, (op,))

    def all_to_all(self, x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """Runs handed over; what one sends must be what the other expects."""
        call = self._seen(moved=(x.dtype,), send=tuple(send), recv=tuple(recv))
        result: Tensor = self._meet_unlike(call, (x, send, recv), results.swapped)
        return result

    def swap_flat(self, x: Tensor) -> Any:
        """The same of equal runs."""
        runs = (x.numel() // self.size,) * self.size
        return self._meet((x.dtype, runs), (x, runs, runs), results.swapped_flat, runs=True)

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        """Every rank takes what its source has brought."""
        result: Tensor = self._meet((x.dtype, x.shape), (x, source), results.permuted)
        return result

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Copies of what ``src`` has brought."""
        result: Tensor = self._meet((x.dtype, x.shape, _from(src)), x, results.sent, (src,))
        return result

    def reduce(self, x: Tensor, op: str, dst: int) -> Tensor | None:
        """As all_reduce, for ``dst``."""
        moved = x.dtype, x.shape, f"{op} dst={dst}"
        result: Tensor | None = self._meet(moved, x, results.reduced_to, (dst, op))
        return result

    def gather(self, x: Tensor, dst: int) -> Tensor | None:
        """As all_gather, for ``dst``."""
        result: Tensor | None = self._meet((x.dtype, x.shape, f"dst={dst}"), x, results.gathered_to, (dst,))
        return result

    def scatter(self, x: Tensor | None, like: Tensor, src: int) -> Tensor:
        """Rows of what ``src`` has brought."""
        result: Tensor = self._meet((like.dtype, like.shape, _from(src)), x, results.rows_of, (src,))
        return result

    def barrier(self) -> object:
        """Meet for nothing."""
        return self._meet((), None, _nothing)

    def barrier_within(self, seconds: float) -> None:
        """Meet, beside the other calls, which all count alike afterwards; when no rank can go on, those that have come
        are told who has not, and who comes later too.
        """
        circle = self._circle

        def align(given: list[None]) -> list[None]:
            circle.align()
            return given

        meeting, mine = self._come(circle.roll_calls, circle.rolls, self._seen(), None, align)
        meeting.outlasts = seconds >= _SOON
        try:
            self._take(meeting, mine, seconds)
        except TimedOutError:
            came = {each.rank.index for each in meeting.came}
            absent = [f"index {i} (rank {rank})" for i, rank in enumerate(self._ranks) if rank not in came]
            meeting.fail(absent_text(absent, seconds))
            self._wake_all(meeting)
            raise CommError(meeting.error) from None

    # ---------------------------------------------------------------------------------------------- messages

    def exchange(self, posts: Sequence[Post], wants: Sequence[Want]) -> list[Tensor]:
        """Messages meet by (source, destination, tag) in order; a send returns when it has been received."""
        if told.later:
            copies = [(results.copied(x), dst, tag) for x, dst, tag in posts]
            letters: Any = _Letters(self, self._offer_all(copies, wants))
            return letters  # type: ignore[no-any-return]
        batch = self._offer_all(posts, wants)
        self._settle(batch)
        return batch.received()

    def _offer_all(self, posts: Sequence[Post], wants: Sequence[Want]) -> Batch:
        self.log.call = call = self._seen(messages=messages_of(posts, wants))
        batch = Batch(self._rank, call, self.log.message(posts, wants), len(posts) + len(wants), wants)
        for x, dst, tag in posts:
            self._offer((self.index, dst, tag), Message(batch, dtypes.plain(x.detach()), tuple(x.shape), x.dtype))
        batch.got = [None] * len(wants)
        for place, (src, shape, dtype, tag, _) in enumerate(wants):
            self._offer((src, self.index, tag), Message(batch, None, shape, dtype, place))
        return batch

    def _settle(self, batch: Batch, timeout: float | None = None) -> None:
        """Wait until every message of the batch has met its other side."""
        try:
            while not batch.over:
                batch.waited = True
                self._rank.world.wait(self._rank, batch, timeout, batch.fail)
            if batch.error is not None:
                raise CommError(batch.error)
            batch.record[ENDED] = monotonic()
        except TimedOutError:
            raise
        except BaseException as error:
            failed(batch.record, error)
            batch.fail(str(error))
            self._withdraw(batch)
            raise
        finally:
            batch.waited = False

    def _offer(self, route: tuple[int, int, int], message: Message) -> None:
        """Match a message with its other side, or queue it."""
        circle = self._circle
        here, there = (circle.posts, circle.wants) if message.x is not None else (circle.wants, circle.posts)
        queue = there.get(route)
        # A batch that failed takes its messages back, even before its rank is told: the user may go on afterwards.
        while queue and queue[0].batch.error is not None:
            queue.popleft()
        if message.batch.error is not None:
            return
        if circle.given_up and message.x is None and self._succeed(route, message):
            return
        if not queue:
            here.setdefault(route, deque()).append(message)
            return
        other = queue.popleft()
        post, want = (message, other) if message.x is not None else (other, message)
        assert post.x is not None
        if want.batch.given_up:
            with in_no_modes():
                self._keep(route, want.batch, Message(post.batch, results.copied(post.x), post.shape, post.dtype))
        elif fault := self._hand_over(route, post, want):
            post.batch.error = fault
        for batch in (post.batch, want.batch):
            batch.open -= 1
            if batch.over and batch.waited:
                batch.waited = False
                self._rank.world.wake(batch.rank)

    def _hand_over(self, route: tuple[int, int, int], post: Message, want: Message) -> str:
        """What was sent to who has asked; what is wrong, if it does not fit."""
        if post.shape != want.shape or post.dtype != want.dtype:
            want.batch.error = (
                f"meshcomm: a message from {route[0]} to {route[1]} does not fit.\n"
                f"  sent {shape_text(post.dtype, post.shape)}: rank {post.batch.rank.index} called {post.batch.call}\n"
                f"  expected {shape_text(want.dtype, want.shape)}: rank {want.batch.rank.index}"
                f" called {want.batch.call}"
            )
            return want.batch.error
        assert post.x is not None
        with in_no_modes():
            want.batch.got[want.place] = results.copied(post.x)
        return ""

    def give_up(self, batch: Batch) -> None:
        """Nobody gets what it asks for: its places in the queues are for who asks next, and so is what has come."""
        circle = self._circle
        batch.given_up = circle.given_up = True
        for (src, shape, dtype, tag, _), x in zip(batch.wants, batch.got, strict=True):
            if x is not None:
                self._keep((src, self.index, tag), batch, Message(batch, x, shape, dtype))
        batch.got = [None] * len(batch.wants)

    def _keep(self, route: tuple[int, int, int], asked: Batch, post: Message) -> None:
        """In the order in which they were asked for."""
        bisect.insort(self._circle.kept.setdefault(route, []), (asked.record[BEGAN], post), key=lambda each: each[0])

    def _succeed(self, route: tuple[int, int, int], want: Message) -> bool:
        """Whether it takes the place of one that was given up, or what has come for that."""
        if kept := self._circle.kept.get(route):
            self._hand_over(route, kept.pop(0)[1], want)
            want.batch.open -= 1
            return True
        queue = self._circle.wants.get(route, deque())
        at = next((at for at, other in enumerate(queue) if other.batch.given_up), None)
        if at is None:
            return False
        queue[at] = want
        return True

    def _withdraw(self, batch: Batch) -> None:
        for queues in (self._circle.posts, self._circle.wants):
            for route, queue in queues.items():
                queues[route] = deque(message for message in queue if message.batch is not batch)


@functools.lru_cache(maxsize=1024)
def _from(src: int) -> str:
    return f"src={src}"


def _nothing(given: list[None]) -> list[None]:
    return given


class _Letters(Pending):
    """A batch of messages laid out."""

    __slots__ = ("_batch", "_link")

    def __init__(self, link: InProcessLink, batch: Batch) -> None:
        self._link, self._batch = link, batch

    def wait(self, timeout: float | None) -> list[Tensor]:
        """The others run until all have met their other sides."""
        self._link.check_rank(self._batch.call.what)
        self._link._settle(self._batch, timeout)
        return self._batch.received()

    def done(self) -> bool:
        """If not, the others run first."""
        return self._link.look(self._batch, self._batch.call.what)

    def record(self) -> Record:
        """The call's."""
        return self._batch.record

    def give_up(self) -> None:
        """What comes is for who asks next."""
        self._link.give_up(self._batch)

    def abandon(self) -> None:
        """What was sent can be received all the same."""
        self._batch.record[ENDED] = DROPPED
