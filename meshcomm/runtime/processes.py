"""Links between processes: a torch ProcessGroup called directly, and the same operations in a form that compiles.

n = number of ranks in the group.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import CommError, fail, text
from meshcomm.runtime import exits, wire, world
from meshcomm.runtime.pending import Pending, TimedOutError, then, then_all
from meshcomm.runtime.protocol import Note, Post, Want

__all__ = ["PacketLink", "ProcessLink", "TracedLink", "group_of", "link_of"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
_DIRECT = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32})
"""Dtypes whose sum every backend knows."""

_BITWISE = ("band", "bor", "bxor")
_NAMES = {"mean": "avg"}
"""What functional ops call the ops of ours."""


class PacketLink:
    """The primitives of a link in terms of five raw ones, which work on dense tensors of dtypes that every backend
    knows.
    """

    size: int
    index: int
    watched = False
    tree: tuple[Any, ...] = ()
    averages: bool
    """Whether the backend has a mean (NCCL alone)."""
    bitwise: bool
    """Whether the backend has and, or, xor (NCCL has not)."""

    def announce(self, note: Note) -> None:
        """Nobody listens; a rank that calls something else is a matter for the guard."""

    def check_device(self, device: torch.device) -> str | None:
        """Traced tensors were checked before."""
        return None

    def _reduce(self, x: Tensor, op: str) -> Tensor:
        raise NotImplementedError

    def _gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        raise NotImplementedError

    def _all_to_all(self, x: Tensor, send: list[int], recv: list[int]) -> Tensor:
        raise NotImplementedError

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        raise NotImplementedError

    def _folds(self, x: Tensor, op: str) -> bool:
        """Whether this is moved whole and reduced here, since the backend cannot."""
        return (op == "product" and x.dtype.is_complex) or (op in _BITWISE and not self.bitwise)

    def _dressed(self, x: Tensor, op: str, reduce: Callable[[Tensor, str], Tensor]) -> Tensor:
        """Have the backend reduce ``x``, dressed as it likes it."""
        if op == "mean" and not self.averages:
            wide = x.float() if x.dtype in wire.HALF else x  # a sum may be too large where the mean is not
            return then(self._dressed(wide, "sum", reduce), lambda y: (y / self.size).to(x.dtype))
        clothes = wire.dress(op, x.dtype)
        if clothes is None:
            return reduce(wire.plain(x), op)
        return then(reduce(clothes.on(x).contiguous(), op), clothes.off)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """One all_reduce, or an all_gather and a local reduction where the backend cannot."""
        if self._folds(x, op):
            return then(self.all_gather(x), lambda rows: wire.fold(op, rows.unbind()))
        return self._dressed(x, op, self._reduce)

    def all_gather(self, x: Tensor) -> Tensor:
        """One all_gather of the elements, or of their bytes."""
        rows = self._gather(wire.to_bytes(x))
        return then(rows, lambda rows: wire.from_bytes(rows.reshape(-1), x.dtype).view(self.size, *x.shape))

    def reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        """One reduce_scatter, or an all_to_all and a local reduction where the backend cannot."""
        if self._folds(x, op):
            shape = x.shape[1:]
            runs = [shape.numel()] * self.size
            got = self.all_to_all(x.reshape(-1), runs, runs)
            return then(got, lambda got: wire.fold(op, got.view(self.size, *shape).unbind()))

        def reduce(dressed: Tensor, op: str) -> Tensor:
            shape = dressed.shape[1:]
            return then(
                self._reduce_scatter(dressed.reshape(self.size, shape.numel()), op), lambda row: row.view(shape)
            )

        return self._dressed(x, op, reduce)

    def all_to_all(self, x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """One all_to_all of the elements, or of their bytes."""
        packed = wire.to_bytes(x)
        width = x.element_size() // packed.element_size()
        out = self._all_to_all(packed, [width * run for run in send], [width * run for run in recv])
        return then(out, lambda out: wire.from_bytes(out, x.dtype))

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        """An all_to_all in which at most one run is not empty: no order of sends and receives can lock."""
        send, recv = [0] * self.size, [0] * self.size
        if destination is not None:
            send[destination] = x.numel()
        if source is not None:
            recv[source] = x.numel()
        flat = x.reshape(-1)
        out = self.all_to_all(flat if destination is not None else flat[:0], send, recv)
        shape, empty = (
            x.shape,
            None if source is not None else torch.zeros_like(x, memory_format=torch.contiguous_format),
        )
        return then(out, lambda out: out.view(shape) if empty is None else empty)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """One broadcast of the elements, or of their bytes."""
        out = self._broadcast(wire.to_bytes(x), src)
        return then(out, lambda out: wire.from_bytes(out, x.dtype).view(x.shape))


_FEW = 32
"""Up to so many ranks every one exchanges with every other one at once; more might flood a switch."""
_SMALL = 2**19
"""Bytes up to which one step with more bytes beats two with fewer, and one wake-up beats several."""
_TAG = 2**30
"""The tag of the library's own messages; those of users are below."""


class ProcessLink(PacketLink):
    """A torch ProcessGroup, called by its own methods: they cost half of what ``torch.distributed``'s functions
    cost.

    Gloo's all_gather, reduce_scatter and all_reduce go round a ring, a step per rank, and wait at each; on the CPU we
    exchange directly and reduce here, in order of index. So sums are bitwise the same however tensors are bucketed, and
    those of half precision are accumulated in float32. NCCL does all of it itself.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], index: int) -> None:
        self.group = group
        self.ranks = ranks
        self.size = len(ranks)
        self.index = index
        backends = dist.get_backend_config(group)
        self._kinds = dict(part.split(":") for part in backends.split(",")) if ":" in backends else {}
        self.bitwise = "nccl" not in backends
        self.averages = "nccl" in backends
        self._on_gloo = self._kinds.get("cpu", backends) == "gloo"
        self._options = {name: _options(dist.AllreduceOptions(), op) for name, op in _OPS.items()}
        self._scatter_options = {name: _options(dist.ReduceScatterOptions(), op) for name, op in _OPS.items()}
        self.copies = frozenset({"broadcast"} if self._on_gloo else {"all_reduce", "broadcast"})
        self.lane: Lane | None = None
        self._later: Any = None

    def later(self) -> LaterLink:
        """The same group; what is started is waited for later."""
        if self._later is None:
            self._later = LaterLink.__new__(LaterLink)
            self._later.__dict__ = self.__dict__  # one state: shutdown takes the group away from both
        return self._later  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> NoReturn:
        # Called for what is missing only: the group, once shutdown() has taken it away.
        if name == "group":
            fail(
                "mesh",
                "the mesh belongs to a process group that was shut down.",
                fix="make the mesh again after mc.init()",
            )
        raise AttributeError(name)

    def check_device(self, device: torch.device) -> str | None:
        """Whether a backend is registered for this kind of device."""
        if device.type == "meta" or (self._kinds and device.type not in self._kinds):
            return f"the mesh moves tensors on {', '.join(sorted(self._kinds)) or 'real devices'}"
        return None

    def _folds(self, x: Tensor, op: str) -> bool:
        return (self._on_gloo and x.is_cpu and self.size <= _FEW) or super()._folds(x, op)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """As in the base, with a short way for what is reduced as it is, and two steps for what is large."""
        if not self._on_gloo:
            if op == "sum" and x.dtype in _DIRECT:
                return self._reduce(x, op)
        elif x.is_cpu and 2 < self.size <= _FEW and x.numel() * x.element_size() * self.size > _SMALL:
            return self._in_two_steps(x, op)
        elif x.is_cpu and self.size == 2:
            return self._with_the_other(x, op)
        return super().all_reduce(x, op)

    def _with_the_other(self, x: Tensor, op: str) -> Tensor:
        """Both send all they have, and reduce it in order of index."""
        x = wire.plain(x)
        got = self.permute(x, 1 - self.index, 1 - self.index)
        return then(got, lambda got: wire.fold(op, (x, got) if self.index == 0 else (got, x)))

    def _in_two_steps(self, x: Tensor, op: str) -> Tensor:
        """Everybody reduces its part, then all gather the parts."""
        flat = wire.plain(x).reshape(-1)
        runs = [part.numel() for part in flat.tensor_split(self.size)]
        mine = runs[self.index]
        got = self.all_to_all(flat, runs, [mine] * self.size)
        part = wire.fold(op, got.view(self.size, mine).unbind())
        out = torch.empty_like(flat)
        self._swap_rows(list(out.split(runs)), part)
        return out.view(x.shape)

    def _error(self, what: str, error: RuntimeError) -> CommError:
        return CommError(
            text(
                what,
                f"the transport failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
                got=f"index {self.index} of a group of {self.size}",
                fix="look at the other ranks: the first one that failed or stopped is the cause",
            )
        )

    def _finish(self, what: str, work: dist.Work, result: Tensor) -> Tensor:
        """``result``, once ``work`` is done."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._error(what, error) from error
        return result

    def _reduce(self, x: Tensor, op: str) -> Tensor:
        # A clone has no lazy sign left; naming a memory format costs as much again.
        y = x.clone() if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        if not y.numel():
            return y
        try:
            work = self.group.allreduce([y], self._options[op])
        except RuntimeError as error:
            raise self._error("all_reduce", error) from error
        return self._finish("all_reduce", work, y)

    def _gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size * x.numel())
        rows = out.view(self.size, x.numel())
        if not x.numel():
            return rows
        if self._on_gloo and x.is_cpu and self.size <= _FEW:
            return self._gather_directly(rows, x)
        try:
            work = _torch.allgather_base(self.group, out, x)
        except RuntimeError as error:
            raise self._error("all_gather", error) from error
        return self._finish("all_gather", work, rows)

    def _gather_directly(self, rows: Tensor, x: Tensor) -> Tensor:
        if self.size > 2 and rows.numel() * rows.element_size() <= _SMALL:
            return then(self._all_to_all_same(x), lambda out: out.view_as(rows))
        self._swap_rows(list(rows.unbind()), x)
        return rows

    def _all_to_all_same(self, x: Tensor) -> Tensor:
        """``x`` to everybody: one call of the backend, which wakes this thread once, for more copying."""
        runs = [x.numel()] * self.size
        return self._all_to_all(x.repeat(self.size), runs, runs)

    def _swap_rows(self, rows: Sequence[Tensor], mine: Tensor) -> None:
        """Send ``mine`` to everybody and receive everybody's into ``rows``."""
        row = rows[self.index].copy_(mine)
        around = [(self.index + step) % self.size for step in range(1, self.size)]
        self._messages([(row, other, _TAG) for other in around], [(rows[other], other, _TAG) for other in around])

    def _row_by_row(self, rows: Sequence[Tensor], mine: Tensor) -> list[tuple[dist.Work, Tensor]]:
        """As :meth:`_swap_rows`, but begun only, in all_to_alls in which each rank sends to one other."""
        row = rows[self.index].copy_(mine)
        begun = []
        for step in range(1, self.size):
            to, source = (self.index + step) % self.size, (self.index - step) % self.size
            send, recv = [0] * self.size, [0] * self.size
            send[to], recv[source] = row.numel(), rows[source].numel()
            try:
                work = self.group.alltoall_base(rows[source], row, recv, send, dist.AllToAllOptions())
            except RuntimeError as error:
                raise self._error("all_gather", error) from error
            begun.append((work, rows[source]))
        return begun

    def _messages(self, posts: Sequence[Post], wants: Sequence[tuple[Tensor, int, int]]) -> None:
        """Point-to-point messages, all under way before the first is waited for, so that no order can lock."""
        try:
            works = [self.group.recv([x], src, tag) for x, src, tag in wants if x.numel()]
            works += [self.group.send([x], dst, tag) for x, dst, tag in posts if x.numel()]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._error("exchange", error) from error

    def _reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        out = x.new_empty(x.shape[1:])
        if not x.numel():
            return out
        try:
            # Flat: torch's fake backend copies a chunk of the input, with its shape.
            work = _torch.reduce_scatter_base(self.group, out, x.view(-1), self._scatter_options[op])
        except RuntimeError as error:
            raise self._error("reduce_scatter", error) from error
        return self._finish("reduce_scatter", work, out)

    def _all_to_all(self, x: Tensor, send: list[int], recv: list[int]) -> Tensor:
        out = x.new_empty(sum(recv))
        try:
            work = self.group.alltoall_base(out, x, recv, send, dist.AllToAllOptions())
        except RuntimeError as error:
            raise self._error("all_to_all", error) from error
        return self._finish("all_to_all", work, out)

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        """Two messages on gloo, else as in the base."""
        if not (self._on_gloo and x.is_cpu):
            return super().permute(x, source, destination)
        packed = wire.to_bytes(x)
        if source is None:
            got = torch.zeros_like(packed)
        else:
            got = packed.clone() if source == self.index else torch.empty_like(packed)
        self._messages(
            [] if destination in (None, self.index) else [(packed, destination, _TAG)],
            [] if source in (None, self.index) else [(got, source, _TAG)],
        )
        return wire.from_bytes(got, x.dtype).view(x.shape)

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        y = x.clone() if self.index == src else torch.empty_like(x)
        if not y.numel():
            return y
        options = dist.BroadcastOptions()
        options.rootRank = src
        try:
            work = self.group.broadcast([y], options)
        except RuntimeError as error:
            raise self._error("broadcast", error) from error
        return self._finish("broadcast", work, y)

    def reduce(self, x: Tensor, op: str, dst: int) -> Tensor | None:
        """The backend's reduce on a copy (it spoils its input on the other ranks), or a gather and a local
        reduction.
        """
        if self._folds(x, op):
            return then(self.gather(x, dst), lambda rows: None if rows is None else wire.fold(op, rows.unbind()))

        def reduce(x: Tensor, op: str) -> Tensor:
            y = x.clone(memory_format=torch.contiguous_format)
            if not y.numel():
                return y
            options = _options(dist.ReduceOptions(), _OPS[op])
            options.rootRank = dst
            try:
                work = self.group.reduce([y], options)
            except RuntimeError as error:
                raise self._error("reduce", error) from error
            return self._finish("reduce", work, y)

        return then(self._dressed(x, op, reduce), lambda y: y if self.index == dst else None)

    def gather(self, x: Tensor, dst: int) -> Tensor | None:
        """An all_to_all in which all runs go to ``dst``."""
        run, shape = x.numel(), x.shape
        send = [run if i == dst else 0 for i in range(self.size)]
        out = self.all_to_all(x.reshape(-1), send, [run if self.index == dst else 0] * self.size)
        return then(out, lambda out: out.view(self.size, *shape) if self.index == dst else None)

    def scatter(self, x: Tensor | None, like: Tensor, src: int) -> Tensor:
        """An all_to_all in which all runs come from ``src``."""
        run = like.numel()
        recv = [run if i == src else 0 for i in range(self.size)]
        flat = like.new_empty(0) if x is None else x.reshape(-1)
        out = self.all_to_all(flat, [run if self.index == src else 0] * self.size, recv)
        return then(out, lambda out: out.view(like.shape))

    def exchange(self, posts: Sequence[Post], wants: Sequence[Want]) -> list[Tensor]:
        """One batch of point-to-point operations, so that no order of sends and receives can lock."""
        sent = [(wire.to_bytes(x), dst, tag) for x, dst, tag in posts]
        buffers = [
            wire.to_bytes(torch.empty(shape, dtype=dtype, device=device)) for _, shape, dtype, _, device in wants
        ]
        todo = [dist.P2POp(dist.isend, x, group=self.group, tag=tag, group_peer=dst) for x, dst, tag in sent]
        todo += [
            dist.P2POp(dist.irecv, buffer, group=self.group, tag=want[3], group_peer=want[0])
            for buffer, want in zip(buffers, wants, strict=True)
        ]
        try:
            works = dist.batch_isend_irecv(todo) if todo else []
        except RuntimeError as error:
            raise self._error("exchange", error) from error
        got = [wire.from_bytes(buffer, want[2]).view(want[1]) for buffer, want in zip(buffers, wants, strict=True)]
        return self._finish_messages(works, sent, got)

    def _finish_messages(self, works: list[dist.Work], sent: list[Post], got: list[Tensor]) -> list[Tensor]:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._error("exchange", error) from error
        return got

    def barrier(self) -> object:
        """An all_reduce of one element on the CPU where it can be, else on the device: it needs no device of its
        own.
        """
        kind = "cpu" if not self._kinds or "cpu" in self._kinds else next(iter(self._kinds))

        def see(flag: Tensor) -> None:
            flag.item()  # on an accelerator, wait on the host too

        return then(self.all_reduce(torch.zeros(1, device=kind), "sum"), see)


class LaterLink(ProcessLink):
    """The same link, whose primitives give a Pending.

    What gloo does not report as done until it is waited for (messages between two ranks) is replaced by what it does.
    """

    def _finish(self, what: str, work: dist.Work, result: Tensor) -> Any:
        return Started(self, what, work, result)

    def _finish_messages(self, works: list[dist.Work], sent: list[Post], got: list[Tensor]) -> Any:
        if not works:
            return got
        if self._on_gloo and all(x.is_cpu for x in (*(post[0] for post in sent), *got)):
            return Messages(self, works, sent, got)
        return then_all([Started(self, "exchange", work, None) for work in works], lambda _: (sent, got)[1])

    def _in_two_steps(self, x: Tensor, op: str) -> Any:
        if self.lane is None:
            self.lane = Lane(self)
        return self.lane.run(lambda link: link.all_reduce(x, op))

    def _gather_directly(self, rows: Tensor, x: Tensor) -> Any:
        if self.size > 2 and rows.numel() * rows.element_size() <= _SMALL:
            return super()._gather_directly(rows, x)
        begun = [Started(self, "all_gather", work, row) for work, row in self._row_by_row(list(rows.unbind()), x)]
        return then_all(begun, lambda _: rows)

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        """An all_to_all."""
        return PacketLink.permute(self, x, source, destination)


class Lane:
    """Runs what takes several steps on a thread, in order, over a group of its own; so that the steps follow each other
    whatever is waited for first, and the order of collectives on the group is the same on all ranks.
    """

    def __init__(self, link: ProcessLink) -> None:
        self._link = _LaneLink(_group(link.ranks, "_lane"), link.ranks, link.index)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name="meshcomm lane", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[ProcessLink], Tensor]) -> _Job:
        """Put a job in the queue."""
        pending = _Job(lambda: job(self._link))
        self._jobs.put(pending.run)
        return pending

    def end(self) -> None:
        """Stop, in the middle of a job if need be, and let go of the group."""
        self._link.ended = True
        self._jobs.put(None)
        self._thread.join(1.0)
        del self._link.group

    def _live(self) -> None:
        with torch.no_grad():
            while (run := self._jobs.get()) is not None:
                run()
                del run  # and with it the tensors, while it waits for the next


class _LaneLink(ProcessLink):
    """The link of a lane: its waits can be ended, as those for messages cannot."""

    ended = False

    def _finish(self, what: str, work: dist.Work, result: Tensor) -> Tensor:
        while not self.ended:
            try:
                work.wait(_SLICE)
            except RuntimeError as error:
                if work.is_completed():
                    raise self._error(what, error) from error
            else:
                return result
        raise CommError(text(what, "meshcomm was shut down before it was done."))

    def _swap_rows(self, rows: Sequence[Tensor], mine: Tensor) -> None:
        for work, row in self._row_by_row(rows, mine):
            self._finish("all_gather", work, row)


_SLICE = timedelta(seconds=0.2)


class _Job(Pending):
    """What a lane has to do."""

    __slots__ = ("_error", "_fn", "_over", "_result")

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._fn: Callable[[], Any] | None = fn
        self._over = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        """On the lane's thread."""
        assert self._fn is not None
        try:
            self._result = self._fn()
        except Exception as error:
            self._error = error
        self._fn = None
        self._over.set()

    def wait(self, timeout: float | None) -> Any:
        """Until it has run."""
        if not self._over.wait(timeout):
            raise TimedOutError
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        """Whether it has run."""
        return self._over.is_set()


class Started(Pending):
    """One operation of a backend."""

    __slots__ = ("_keep", "_link", "_result", "_what", "_work")

    def __init__(self, link: ProcessLink, what: str, work: dist.Work, result: Any, keep: object = None) -> None:
        self._link, self._what, self._work, self._result, self._keep = link, what, work, result, keep

    def wait(self, timeout: float | None) -> Any:
        """On an accelerator without a time-out: order the streams, and do not wait on the host."""
        try:
            if timeout is None:
                self._work.wait()
            elif self._link._on_gloo:
                self._work.wait(timedelta(milliseconds=max(1, round(1000 * timeout))))  # 0 means for ever
            else:
                self._poll(timeout)
                self._work.wait()
        except RuntimeError as error:
            if timeout is not None and not self._work.is_completed():
                raise TimedOutError from None
            raise self._link._error(self._what, error) from error
        return self._result

    def _poll(self, timeout: float) -> None:
        # A wait of NCCL's that runs out of time ends the communicator.
        end = time.monotonic() + timeout
        pause = 1e-5
        while not self._work.is_completed():
            if time.monotonic() > end:
                raise TimedOutError
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    def done(self) -> bool:
        """As the backend says."""
        return self._work.is_completed()

    def abandon(self) -> None:
        """The backend's stream may still read and write the tensors: what comes on this one waits for it."""
        if not self._link._on_gloo:
            self._work.wait()


class Messages(Pending):
    """A batch of messages over gloo, which says that one is done only to who waits for it, and takes a time-out for
    the end of the group: a thread waits where somebody wants to know or not to wait for ever.
    """

    __slots__ = ("_error", "_link", "_over", "_result", "_sent", "_works")

    def __init__(self, link: ProcessLink, works: list[dist.Work], sent: object, result: Any) -> None:
        self._link, self._works, self._sent, self._result = link, works, sent, result
        self._over: threading.Event | None = None
        self._error: RuntimeError | None = None

    def _wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error

    def _watch(self) -> threading.Event:
        if self._over is None:
            self._over = over = threading.Event()

            def watch() -> None:
                with exits.blocked():
                    self._wait()
                over.set()

            threading.Thread(target=watch, name="meshcomm messages", daemon=True).start()
        return self._over

    def wait(self, timeout: float | None) -> Any:
        """On this thread, unless there is one that waits already."""
        if timeout is None and self._over is None:
            self._wait()
        elif not self._watch().wait(timeout):
            raise TimedOutError
        if self._error is not None:
            raise self._link._error("exchange", self._error) from self._error
        self._works.clear()
        return self._result

    def done(self) -> bool:
        """As the thread says."""
        return not self._works or self._watch().is_set()

    def abandon(self) -> None:
        """Messages are received all the same, into memory that must not be given to others meanwhile."""
        if self._works:
            self._watch()


class TracedLink(PacketLink):
    """The same operations as functional ops, which trace into one graph with fake tensors.

    The compiler moves the waits apart from the starts, so there is no other form for later.
    """

    copies = frozenset[str]()

    def later(self) -> TracedLink:
        """The same."""
        return self

    def _dressed(self, x: Tensor, op: str, reduce: Callable[[Tensor, str], Tensor]) -> Tensor:
        if x.dtype in wire.HALF and op in ("sum", "product") and not self.averages:  # as eager accumulates
            return reduce(wire.plain(x).float(), op).to(x.dtype)
        return super()._dressed(x, op, reduce)

    def __init__(self, link: ProcessLink) -> None:
        self.size = link.size
        self.index = link.index
        self.bitwise = link.bitwise
        self.averages = link.averages
        self._name: Any = link.group.group_name

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        """As in the base; a rank without a source gets zeros from itself.

        A collective of which nothing is used is dropped from the graph, on this rank alone, and its peers would wait.
        """
        if source is not None:
            return super().permute(x, source, destination)
        flat = x.reshape(-1)
        runs = {self.index: torch.zeros_like(flat)}
        if destination is not None:
            runs[destination] = flat
        send = [flat.numel() if target in runs else 0 for target in range(self.size)]
        recv = [flat.numel() if target == self.index else 0 for target in range(self.size)]
        return self.all_to_all(torch.cat([runs[target] for target in sorted(runs)]), send, recv).view(x.shape)

    def _done(self, x: Tensor) -> Tensor:
        result: Tensor = _torch.functional.wait_tensor(x)
        return result

    def _reduce(self, x: Tensor, op: str) -> Tensor:
        return self._done(_torch.functional.all_reduce(x, _NAMES.get(op, op), self._name))

    def _gather(self, x: Tensor) -> Tensor:
        return self._done(_torch.functional.all_gather_into_tensor(x, self.size, self._name)).view(self.size, *x.shape)

    def _reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        out = self._done(_torch.functional.reduce_scatter_tensor(x, _NAMES.get(op, op), self.size, self._name))
        return out.view(x.shape[1:])

    def _all_to_all(self, x: Tensor, send: list[int], recv: list[int]) -> Tensor:
        return self._done(_torch.functional.all_to_all_single(x, recv, send, self._name))

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        return self._done(_torch.functional.broadcast(x, src, self._name))


def _options(options: Any, op: Any) -> Any:
    options.reduceOp = op
    return options


_links: dict[tuple[int, ...], ProcessLink] = {}


def link_of(ranks: tuple[int, ...]) -> ProcessLink:
    """The link of these ranks of the world in this order; its members call it together the first time."""
    if ranks not in _links:
        here = world.current()
        assert here is not None
        whole = ranks == tuple(range(here.size))
        group = dist.group.WORLD if whole else _group(ranks, "")
        assert group is not None
        _links[ranks] = ProcessLink(group, ranks, ranks.index(here.rank))
    return _links[ranks]


def _group(ranks: tuple[int, ...], suffix: str) -> dist.ProcessGroup:
    here = world.current()
    assert here is not None
    digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    return _torch.new_group(ranks, f"meshcomm_{digest}{suffix}", here.timeout)


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """torch's process group of these ranks."""
    return link_of(ranks).group


def _forget() -> None:
    # A reference to a process group that outlives destroy_process_group ends the interpreter with SIGABRT.
    for link in _links.values():
        if link.lane is not None:
            link.lane.end()
            link.lane = None
        del link.group
    _links.clear()


world.on_shutdown(_forget)
