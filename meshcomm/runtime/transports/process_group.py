"""Links between processes: what takes more than one call of a process group of torch's, and messages. What is one call
of it is in :mod:`meshcomm.runtime.transports.direct`; how calls are begun and waited for in
:mod:`meshcomm.runtime.transports.group_link`.

n = number of ranks in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import CommError
from meshcomm.runtime.call import Post, Want, is_agreed, told
from meshcomm.runtime.health import attendance
from meshcomm.runtime.health.lateness import compiles
from meshcomm.runtime.pending import Pending, begin_all, queued, settled, then
from meshcomm.runtime.process import forks
from meshcomm.runtime.recorder import Named, recorded
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.algorithms import LARGE, PacketLink
from meshcomm.runtime.transports.compiled import TracedLink
from meshcomm.runtime.transports.device_post import (
    KNOW_NO_TAGS,
    Compared,
    check_tags,
    messages_for,
    tags_of,
)  # fmt: skip
from meshcomm.runtime.transports.direct import options_for
from meshcomm.runtime.transports.gloo.carrier import Carrier
from meshcomm.runtime.transports.gloo.post import Parcel, deliver, expect, open_all, route_of, taken
from meshcomm.runtime.transports.gloo.requests import Requests, ask, keep, leave
from meshcomm.runtime.transports.group_link import GroupLink, Message
from meshcomm.runtime.transports.underway import Messages, Walker

T = TypeVar("T")

FEW = 32
"""Up to so many ranks every one exchanges with every other one at once; more might flood a switch."""
_SMALL = 2**19
"""Bytes up to which one step with more bytes beats two with fewer, and one wake-up beats several."""
_KEEP = 2**26
"""The most bytes of memory that stay for the next sum: fresh pages cost as much as a tenth of moving it."""
_ROUND = 1024


class ProcessLink(GroupLink):
    """A torch ProcessGroup, called by its own methods: they cost half of what ``torch.distributed``'s functions
    cost.

    Gloo's all_gather, reduce_scatter and all_reduce go round a ring, a step per rank, and wait at each; on the CPU we
    exchange directly and reduce here, in the tree of ``dtypes.fold``. So sums are bitwise the same however tensors are
    bucketed, and those of half precision are accumulated in float32. NCCL does all of it itself.
    """

    shares_memory = False
    """Whether the ranks read one another's memory, by way of ``mail``."""

    def traced(self) -> Any:
        """As functional operations; what goes to or from one rank is not traced."""
        if self._on_gloo:
            _torch.first_calls_unwatched()
            compiles(self.log)
        return TracedLink(self.size, self.index, self.nccl, self._on_gloo, self.group.group_name)

    def copies(self, name: str, x: Tensor) -> bool:
        """A broadcast begins with a copy; so does what the backend reduces in place."""
        return name == "broadcast" or (name == "all_reduce" and not (self._on_gloo and x.is_cpu))

    def _folds(self, x: Tensor, op: str) -> bool:
        return (self._on_gloo and x.is_cpu) or super()._folds(x, op)

    # The base of it all by name: what lies between has come here, since it does not take what is given.

    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        if not (self._on_gloo and x.is_cpu):
            if told.later and self._folds(x, op):  # then all gather x, and only a sum begins with a copy
                x = x.clone(memory_format=torch.contiguous_format)
            return PacketLink.all_reduce(self, x, op)
        if self.size == 2:
            return self._with_the_other(x, op)
        return self._in_two_steps(x, op) if x.nbytes * self.size > LARGE else PacketLink.all_reduce(self, x, op)

    _all_reduce = recorded(_all_reduce, "all_reduce")
    _all_reduce_own = recorded(PacketLink.all_reduce_own, "all_reduce")
    all_gather = recorded(PacketLink.all_gather)
    reduce_scatter = recorded(PacketLink.reduce_scatter)
    all_to_all = recorded(PacketLink.all_to_all)
    _broadcast_packed = recorded(PacketLink.broadcast, "broadcast")

    def _with_the_other(self, x: Tensor, op: str) -> Tensor:
        """Both send all they have, and reduce it."""
        x, other = dtypes.plain(x), 1 - self.index
        packed = dtypes.to_bytes(x)
        got = torch.empty_like(packed)
        got = self._end(self._begin([(packed, other)], [(got, other)], self._tag()), got, keep=packed)
        got = then(got, lambda got: dtypes.from_bytes(got, x.dtype).view(x.shape))
        return then(got, lambda got: dtypes.fold(op, (x, got) if self.index == 0 else (got, x), out=got))

    def _in_two_steps(self, x: Tensor, op: str) -> Tensor:
        """Everybody reduces its part, then all gather the parts."""
        packed = dtypes.to_bytes(x)
        width = x.element_size() // packed.element_size()
        out = torch.empty_like(packed)
        runs = [width * part.numel() for part in x.reshape(-1).tensor_split(self.size)]
        results, mine = out.split(runs), runs[self.index]
        room, self._room = self._room, None  # taken, so that what runs at the same time gets its own
        if room is None or room.numel() < out.nbytes + _ROUND:
            room = torch.empty(out.nbytes + _ROUND, dtype=torch.uint8, device="cpu")
        got = room[: self.size * mine * out.element_size()].view(out.dtype)
        first, tag = self._swap("all_reduce", got, packed, [mine] * self.size, runs), self._tag()

        def steps() -> Tensor:
            self._wait("all_reduce", first)
            rows = [dtypes.from_bytes(row, x.dtype) for row in got.view(self.size, mine)]
            dtypes.fold(op, rows, out=dtypes.from_bytes(results[self.index], x.dtype))
            if room.numel() <= _KEEP:
                self._room = room
            self._spread(results, tag)
            return dtypes.from_bytes(out, x.dtype).view(x.shape)

        return self._walk(steps)

    def _spread(self, rows: Sequence[Tensor], tag: int) -> None:
        """The own row to everybody, the others' from them: to each, or where they are many round a ring."""
        rounds = [self._row_messages(rows)]
        if self.size > FEW:
            right, left = (self.index + 1) % self.size, self.index - 1
            steps = range(self.size - 1)
            rounds = [([(rows[left + 1 - i], right)], [(rows[left - i], left % self.size)]) for i in steps]
        for posts, wants in rounds:
            self._wait("exchange", self._begin(posts, wants, tag))

    def _walk(self, steps: Callable[[], T]) -> T:
        """Take steps that wait more than once: one operation after the other, if they are waited for later."""
        if not told.later:
            return steps()
        if self.walker is None:
            self.walker = Walker()
        return cast(T, self.walker.take(steps))

    def _reduce(self, x: Tensor, op: str) -> Tensor:
        # A clone has no lazy sign left; naming a memory format costs as much again.
        return self._reduce_own(x.clone() if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format), op)

    def _reduce_own(self, x: Tensor, op: str) -> Tensor:
        if not x.numel():
            return x
        if queued:
            begin_all()
        try:
            work = self.group.allreduce([x], options_for("AllreduceOptions", told.later, reduceOp=op))
        except RuntimeError as error:
            raise self._error("all_reduce", error) from error
        return self._finish("all_reduce", work, x)

    def _gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size * x.numel())
        rows = out.view(self.size, x.numel())
        if not x.numel():
            return rows
        if self._on_gloo and x.is_cpu and self.size <= FEW:
            return self._gather_directly(rows, x)
        options = options_for("AllgatherOptions", told.later)
        work = self._start("all_gather", lambda: _torch.allgather_base(self.group, out, x, options))
        return self._finish("all_gather", work, rows, x)

    def _gather_directly(self, rows: Tensor, x: Tensor) -> Tensor:
        if self.size > 2 and rows.numel() * rows.element_size() <= _SMALL:
            return then(self._all_to_all_same(x), lambda out: out.view_as(rows))
        rows[self.index].copy_(x)
        return self._end(self._begin(*self._row_messages(rows.unbind()), self._tag()), rows)

    def _all_to_all_same(self, x: Tensor) -> Tensor:
        """``x`` to everybody: one call of the backend, which wakes this thread once, for more copying."""
        runs = [x.numel()] * self.size
        return self._all_to_all(x.repeat(self.size), runs, runs)

    def _row_messages(self, rows: Sequence[Tensor]) -> tuple[list[Message], list[Message]]:
        """The own row to everybody, the others' from them."""
        around = [(self.index + step) % self.size for step in range(1, self.size)]
        return [(rows[self.index], other) for other in around], [(rows[other], other) for other in around]

    def _reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        out = x.new_empty(x.shape[1:])
        if not x.numel():
            return out
        flat = x.view(-1)  # torch's fake backend copies a chunk of the input, with its shape
        options = options_for("ReduceScatterOptions", told.later, reduceOp=op)
        work = self._start("reduce_scatter", lambda: _torch.reduce_scatter_base(self.group, out, flat, options))
        return self._finish("reduce_scatter", work, out, x)

    def _all_to_all(self, x: Tensor, send: list[int], recv: list[int]) -> Tensor:
        out = x.new_empty(sum(recv))
        works = self._swap("all_to_all", out, x, recv, send)
        if self._by_messages(x):  # of which there may be one: a wait of one message that runs out ends the group
            return self._end(works, out, keep=x)
        return self._finish("all_to_all", works[0], out, x)

    def _swap(self, where: str, out: Tensor, x: Tensor, recv: list[int], send: list[int]) -> Sequence[dist.Work]:
        """Runs of ``x`` to all, runs of ``out`` from all."""
        if not self._by_messages(x):
            options = options_for("AllToAllOptions", told.later)
            return [self._start(where, lambda: self.group.alltoall_base(out, x, recv, send, options))]
        parts, rows, me = x.split(send), out.split(recv), self.index
        rows[me].copy_(parts[me])
        others = [(me + step) % self.size for step in range(1, self.size)]
        return self._begin([(parts[i], i) for i in others], [(rows[i], i) for i in others], self._tag())

    def _by_messages(self, x: Tensor) -> bool:
        """Whether the ranks' one group orders the calls of another axis, so that this one's go as messages."""
        return self._on_gloo and x.is_cpu and self.size <= FEW and not self.channel.first

    def _permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        if not (self._on_gloo and x.is_cpu):
            return PacketLink.permute(self, x, source, destination)
        tag = self._tag()
        posts = [] if destination is None or destination == self.index else [(x, destination, tag)]
        wants = [] if source is None or source == self.index else [(source, tuple(x.shape), x.dtype, tag, x.device)]
        got = self._by_post("permute", posts, wants, [tag] * len(posts), [tag] * len(wants))
        own = [dtypes.plain(x).clone() if source == self.index else torch.zeros_like(x).contiguous()]
        return then(got, lambda got: [*got, *own][0])

    _permute = recorded(_permute, "permute")

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        y = x.clone() if self.index == src else torch.empty_like(x)
        if not y.numel():
            return y
        if self._by_messages(y):
            others = [i for i in range(self.size) if i != src]
            posts = [(y, i) for i in others] if self.index == src else []
            return self._end(self._begin(posts, [] if self.index == src else [(y, src)], self._tag()), y)
        options = options_for("BroadcastOptions", told.later, rootRank=src)
        work = self._start("broadcast", lambda: self.group.broadcast([y], options))
        return self._finish("broadcast", work, y)

    @recorded
    def reduce(self, x: Tensor, op: str, dst: int) -> Tensor | None:
        """The backend's reduce on a copy (it spoils its input on the other ranks), or a gather and a local
        reduction.
        """
        if PacketLink._folds(self, x, op) or (self._on_gloo and x.is_cpu and self.size <= FEW):
            return then(self.gather(x, dst), lambda rows: None if rows is None else dtypes.fold(op, rows.unbind()))

        def reduce(x: Tensor, op: str) -> Tensor:
            y = x.clone(memory_format=torch.contiguous_format)
            if not y.numel():
                return y
            options = options_for("ReduceOptions", told.later, reduceOp=op, rootRank=dst)
            work = self._start("reduce", lambda: self.group.reduce([y], options))
            return self._finish("reduce", work, y)

        return then(self._dressed(x, op, reduce), lambda y: y if self.index == dst else None)

    @recorded
    def gather(self, x: Tensor, dst: int) -> Tensor | None:
        """An all_to_all in which all runs go to ``dst``."""
        run, shape = x.numel(), x.shape
        send = [run if i == dst else 0 for i in range(self.size)]
        out = self.all_to_all(x.reshape(-1), send, [run if self.index == dst else 0] * self.size)
        return then(out, lambda out: out.view(self.size, *shape) if self.index == dst else None)

    @recorded
    def scatter(self, x: Tensor | None, like: Tensor, src: int) -> Tensor:
        """An all_to_all in which all runs come from ``src``."""
        run = like.numel()
        recv = [run if i == src else 0 for i in range(self.size)]
        flat = like.new_empty(0) if x is None else x.reshape(-1)
        out = self.all_to_all(flat, [run if self.index == src else 0] * self.size, recv)
        return then(out, lambda out: out.view(like.shape))

    @recorded
    def exchange(self, posts: Sequence[Post], wants: Sequence[Want]) -> list[Tensor]:
        """One batch of point-to-point operations, so that no order of sends and receives can lock. Over gloo with
        envelopes, which are compared; what an accelerator's backend moves has none.
        """
        if self._on_gloo and _on_cpu(posts, wants):
            return self._by_post("exchange", posts, wants, [route_of(self.name, tag) for *_, tag in posts],
                                 [route_of(self.name, want[3]) for want in wants])  # fmt: skip
        return self._by_batch(posts, wants)

    def carrier(self, call: Named) -> Carrier | None:
        """Who carries messages of which both sides know dtypes and shapes; None where this rank wants envelopes, for
        somebody watches its calls: the others do not know, see :class:`Carrier`. ``call``: what makes them, of the
        public name and axis.
        """
        if not self._on_gloo or self.watched:
            return None
        return Carrier(self, self.base, self.log, route_of(self.name, 0), call)

    def _by_post(
        self, where: str, posts: Sequence[Post], wants: Sequence[Want], sent: Sequence[int], got: Sequence[int]
    ) -> list[Tensor]:
        """Messages with envelopes: ``sent`` and ``got`` are their tags, to gloo."""

        parcels: list[Parcel] = []
        sending: list[dist.Work] = []
        kept: list[Tensor] = []

        def begin() -> list[Tensor]:
            if self.left:
                ask(self, wants, got, parcels)
            else:
                expect(self.base, wants, got, parcels)
            return deliver(self.base, self.name, self.numbers, posts, sent, sending) if posts else []

        try:
            kept = self._start(where, begin)
            if told.later or (self.left and any(parcel.brought for parcel in parcels)):
                return self._requested(where, parcels, Messages(self, sending, None, kept) if sending else None)
            self._wait("exchange", [parcel.works[0] for parcel in parcels])
            self._wait("exchange", [*self._start(where, lambda: open_all(self.base, self.name, parcels)), *sending])
            found = taken(where, self.name, self.index, parcels)
            if told.begun is not None:
                told.begun.append((leave, (self, parcels)))
            return found
        except BaseException as error:
            if not isinstance(error, CommError):  # Ctrl-C
                Messages(self, [work for work in sending if not work.is_completed()], None, kept).abandon()
                if not (self.watched and is_agreed(self)):
                    leave(self, parcels)
            raise

    def _requested(self, where: str, parcels: list[Parcel], sending: Messages | None) -> list[Tensor]:
        found = Requests(self, where, parcels, sending)
        if told.begun is not None:
            told.begun.append((found.give_up, ()))
        return cast("list[Tensor]", found if told.later else settled(found))

    def keep(self, want: Want, x: Tensor) -> None:
        """Of what gloo has moved."""
        if self._on_gloo and x.is_cpu:
            keep(self, want, route_of(self.name, want[3]), x)

    def _by_batch(self, posts: Sequence[Post], wants: Sequence[Want]) -> list[Tensor]:
        """As an accelerator's backend does it: see ``device_post.py``."""
        if not (posts or wants):
            return []
        device = posts[0][0].device if posts else wants[0][4]
        if self._kinds.get(device.type, self._backends) not in KNOW_NO_TAGS:
            todo, got = messages_for(self.base, posts, wants)
            works = self._start("exchange", lambda: _torch.begin_messages(todo))
            return self._end(works, got, keep=todo, cpu=all(each.tensor.is_cpu for each in todo))
        said = self._tags_agree(posts, wants)
        todo, got = messages_for(self.group, posts, wants)  # matched by order: in the group of this axis alone
        begun = self._outbox.put(self, todo, got)
        if isinstance(said, Pending):
            return cast("list[Tensor]", Compared(said, begun))
        if told.later:
            return cast("list[Tensor]", begun)
        begin_all()
        return cast("list[Tensor]", begun.wait(None))

    def _tags_agree(self, posts: Sequence[Post], wants: Sequence[Want]) -> object:
        """Where tags are used both sides say so over gloo: order alone might match others."""
        if not (mine := tags_of(posts, wants)):
            return None
        cpu, route = torch.device("cpu"), route_of(self.name, 0)
        sent = [(torch.tensor(said, device=cpu), peer, 0) for peer, said in mine.items()]
        asked = [(peer, (4,), torch.int64, 0, cpu) for peer in mine]
        routes = [route] * len(mine)
        found = self._by_post("exchange", sent, asked, routes, routes)
        return then(found, lambda found: check_tags(mine, found, self.index))

    @recorded
    def barrier(self) -> object:
        """By a number, which needs no device of its own; on an accelerator the host waits too, for it reads it."""
        return then(self.agree([0], op="sum"), lambda _: None)

    @recorded
    def barrier_within(self, seconds: float) -> None:
        """At the store, which knows who has come."""
        forks.refuse_if_forked("barrier")
        if queued:
            begin_all()
        if self.log.meeting is not None:
            attendance.all_here(self.place, self.ranks, self.index, seconds)


def _on_cpu(posts: Sequence[Post], wants: Sequence[Want]) -> bool:
    for post in posts:
        if not post[0].is_cpu:
            return False
    for want in wants:  # noqa: SIM110  # each function is felt
        if want[4].type != "cpu":
            return False
    return True
