"""Links between processes of several machines, as many on each: in two levels, of shared memory and of the wire.

h machines with l ranks each; the wire is what costs. Each rank has a part of the tensor, and speaks of it to its peers,
who have the same part on the other machines::

    all_reduce of abcd on two machines with two ranks each

    machine 0   index 0  [a b c d] ─┐ shared   [a b]  ── wire ──  its sum ─┐ shared   [a b c d]
                index 1  [a b c d] ─┘ memory   [c d]  ── wire ──  its sum ─┘ memory   [a b c d]
    machine 1   index 2  [a b c d] ─┐          [a b]  ── wire ──  its sum ─┐          [a b c d]
                index 3  [a b c d] ─┘          [c d]  ── wire ──  its sum ─┘          [a b c d]

So a machine sends 2 (h - 1) / h of a tensor in all, and not each of its ranks. The sums are those of the aligned tree
of ``dtypes.fold``: where the indices of a machine are a block of it, parts are added as they would be without machines;
where they are not, what depends on the order goes in one level. Large tensors go in blocks: while one is on the wire,
the next is reduced, and the one before put together.

A call waits several times. Its steps are taken at once, or, if it is waited for later, one call after the other by the
link's walker; then a call that is not waited for later takes its turn there too. So what the ranks of a machine do
together comes in the same order on all of them, whoever of them waits later:

    early   what begins a call in shared memory, when it is called
    late    what ends it there, after the wire, in the order of the calls
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm.runtime.call import told
from meshcomm.runtime.health.lateness import Late
from meshcomm.runtime.pending import begin_all, queued, settled
from meshcomm.runtime.process.reuse import reserve
from meshcomm.runtime.recorder import recorded
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.exact import EXACT
from meshcomm.runtime.transports.hosts.arrangement import Arrangement
from meshcomm.runtime.transports.hosts.parts import Near, Turn, Write, blocks_of, chunks_of, room
from meshcomm.runtime.transports.process_group import ProcessLink
from meshcomm.runtime.transports.underway import Steps, Walker

T = TypeVar("T")

_FLOATS = dtypes.FLOATS | {torch.complex64, torch.complex128}
_SIGNED = frozenset((torch.int8, torch.int16, torch.int32, torch.int64))
_WHOLE = _SIGNED | {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
"""Dtypes of which it does not matter in which order they are reduced."""
_BLOCK = 2**22
"""Bytes of a tensor that go together: enough that the wire is never idle, few enough that the first ones go soon."""
_ONE_STEP = 2**16
"""Bytes up to which two machines send whole parts of half precision to each other, in twice as many bytes."""

First = Callable[[], object]
"""A step in shared memory: what waits, or nothing."""


class HostsLink(ProcessLink):
    """A group of processes on several machines: sums, gathers and broadcasts of CPU tensors in two levels."""

    hosts: Arrangement
    early: Near
    late: Near

    def meet_in(self, hosts: Arrangement, early: Near, late: Near) -> None:
        """``early`` and ``late``: of the ranks on this machine."""
        self.hosts, self.early, self.late = hosts, early, late
        self._host, self._peers = hosts.host_of(self.index), hosts.peers_of(self.index)
        self._number = 0
        self._last: Steps | None = None
        self._lost: list[object] = []

    def let_go(self) -> None:
        """Of those on this machine, too."""
        super().let_go()
        self._last = None
        self._lost.clear()

    def copies(self, name: str, x: Tensor) -> bool:
        """What is lent is a copy; so is what is sent to peers. In two levels goes what this class has a method for."""
        return (self._here(x) and name in vars(HostsLink)) or super().copies(name, x)

    def _late(self, found: str) -> Late | None:
        """Of the wire: those of this machine are not waited for there."""
        late = super()._late(found)
        return late and late._replace(aside=self.hosts.hosts[self._host])

    def _here(self, x: Tensor) -> bool:
        return self._on_gloo and x.is_cpu

    def _reduces(self, x: Tensor, op: str) -> bool:
        """Whether its sum is the same in two levels."""
        if not (self._here(x) and x.numel()) or op in EXACT:
            return False
        return (x.dtype in _FLOATS and self.hosts.aligned) or (x.dtype in _WHOLE and op != "mean")

    def _unchanged(self, x: Tensor) -> Tensor:
        """``x``, of which ``copies`` has said that it is copied."""
        return x.clone(memory_format=torch.contiguous_format) if told.later and self._here(x) else x

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """Each rank reduces a part on its machine, and then with its peers."""
        return self._all_reduced(x, op) if self._reduces(x, op) else super().all_reduce(self._unchanged(x), op)

    def all_gather(self, x: Tensor) -> Tensor:
        """The own to the peers; what came from them to those of this machine."""
        return self._all_gathered(x) if self._here(x) and x.numel() else super().all_gather(x)

    def reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        """The peers' rows are reduced on this machine, and go to them."""
        if self._reduces(x, op):
            return self._reduced_rows(x, op)
        return super().reduce_scatter(self._unchanged(x), op)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Each rank of the machine of ``src`` sends a part to its peers."""
        return self._spread_from(x, src) if self._here(x) and x.numel() else super().broadcast(x, src)

    # ------------------------------------------------------------------------------------------- in two levels

    def _all_reduced(self, x: Tensor, op: str) -> Tensor:
        flat, number = dtypes.plain(x).reshape(-1), self._begun()
        wide, place, count = dtypes.wide(op, x.dtype), self.late.index, self.late.size
        result = reserve.empty(x.shape, flat)
        out, todo = result.view(-1), list[tuple[First, First, First]]()
        for k, block in enumerate(blocks_of(flat.numel(), flat.nbytes, _BLOCK)):
            mine, into = flat[block], out[block]
            parts = chunks_of(mine.numel(), count)
            own, each = parts[place], parts[0].stop
            part, piece = room(each, flat, wide), room(each, flat)
            size = own.stop - own.start
            exchange = self._exchange("all_reduce", op, part[:size], piece[:size])

            def first(mine: Tensor = mine, own: slice = own, part: Tensor = part, size: int = size, k: int = k,
                      send: First = exchange[0]) -> object:  # fmt: skip
                turn: Turn = number, k, 0
                return self.early.reduce_pieces("all_reduce", op, mine, turn, [own], [part[:size]], lambda _: send())

            def last(piece: Tensor = piece, into: Tensor = into, parts: list[slice] = parts, k: int = k,
                     wait: First = exchange[2], write: Write | None = exchange[3]) -> object:  # fmt: skip
                def fill(got: list[Tensor]) -> None:
                    for run, each in zip(parts, got, strict=True):
                        into[run].copy_(each[: run.stop - run.start])

                wait()
                return self.late.collect("all_reduce", piece, (number, k, 0), fill, write)

            todo.append((first, exchange[1], last))
        return self._take(todo, result)

    def _exchange(self, name: str, op: str, part: Tensor, piece: Tensor) -> tuple[First, First, First, Write | None]:
        """Reduce the peers' ``part`` into ``piece``: to be called when this rank's is there; then; and at last.

        Two machines send each other the whole of it; more reduce a run each, and send that to the others. Those two
        give what writes it, wherever it is wanted.
        """
        h, me, peers = len(self._peers), self._host, self._peers
        sent: list[dist.Work] = []
        if h == 2 and (part.dtype == piece.dtype or part.nbytes <= _ONE_STEP):
            other, got, tag = peers[1 - me], torch.empty_like(part), self._tag()
            coming = self._begin([], [(got, other)], tag)

            def send() -> None:
                sent.extend(self._begin([(part, other)], [], tag))

            def write(into: Tensor) -> None:
                if part.numel():
                    dtypes.fold_parts(op, (part, got) if me == 0 else (got, part), self.size, into[: part.numel()])

            return send, _nothing, lambda: self._wait(name, [*coming, *sent]), write
        runs, others = chunks_of(part.numel(), h), [j for j in range(h) if j != me]
        own = runs[me]
        rows, tag, tag_back = room(h * (own.stop - own.start), part).view(h, -1), self._tag(), self._tag()
        coming = self._begin([], [(rows[j], peers[j]) for j in others], tag)
        coming_back = self._begin([], [(piece[runs[j]], peers[j]) for j in others], tag_back)

        def send_runs() -> None:
            sent.extend(self._begin([(part[runs[j]], peers[j]) for j in others], [], tag))

        def reduce_run() -> None:
            self._wait(name, coming)
            if rows.numel():
                parts = [part[own] if j == me else rows[j] for j in range(h)]
                dtypes.fold_parts(op, parts, self.size, piece[own])
            sent.extend(self._begin([(piece[own], peers[j]) for j in others], [], tag_back))

        return send_runs, reduce_run, lambda: self._wait(name, [*coming_back, *sent]), None

    def _all_gathered(self, x: Tensor) -> Tensor:
        flat, number = dtypes.to_bytes(x), self._begun()
        h, here, me = len(self._peers), self.late.size, self._host
        out = reserve.empty((self.size * flat.numel(),), flat)
        rows, todo = out.view(self.size, flat.numel()), list[tuple[First, First, First]]()
        for k, block in enumerate(blocks_of(flat.numel(), flat.nbytes, _BLOCK // h)):
            got = room(h * (block.stop - block.start), flat).view(h, -1)
            got[me].copy_(flat[block])
            others = [(got[j], peer) for j, peer in enumerate(self._peers) if j != me]
            works = self._begin([(got[me], peer) for _, peer in others], others, self._tag())

            def last(got: Tensor = got, block: slice = block, k: int = k, works: Sequence[dist.Work] = works) -> object:
                self._wait("all_gather", works)

                def fill(all_got: list[Tensor]) -> None:
                    for place, each in enumerate(all_got):
                        if self.hosts.in_order:
                            rows.view(h, here, -1)[:, place, block].copy_(each.view(h, -1))
                        else:
                            for host, row in zip(self.hosts.hosts, each.view(h, -1), strict=True):
                                rows[host[place], block].copy_(row)

                return self.late.collect("all_gather", got.view(-1), (number, k, 0), fill)

            todo.append((_nothing, _nothing, last))
        return self._take(todo, dtypes.from_bytes(out, x.dtype).view(self.size, *x.shape))

    def _reduced_rows(self, x: Tensor, op: str) -> Tensor:
        flat, number = dtypes.plain(x).reshape(-1), self._begun()
        h, me, peers, wide = len(self._peers), self._host, self._peers, dtypes.wide(op, x.dtype)
        out = reserve.empty(x.shape[1:], flat)
        count, into = out.numel(), out.view(-1)
        pieces, parts, todo = list[slice](), list[Tensor](), list[tuple[First, First, First]]()
        sends: list[First] = []
        for block in blocks_of(count, flat.nbytes // self.late.size, _BLOCK):
            part = room(h * (block.stop - block.start), flat, wide).view(h, -1)
            got, tag, sent = torch.empty_like(part), self._tag(), list[dist.Work]()
            pieces += [slice(peer * count + block.start, peer * count + block.stop) for peer in peers]
            parts += part.unbind()
            coming = self._begin([], [(got[j], peers[j]) for j in range(h) if j != me], tag)

            def send(part: Tensor = part, tag: int = tag, sent: list[dist.Work] = sent) -> None:
                sent.extend(self._begin([(part[j], peers[j]) for j in range(h) if j != me], [], tag))

            def last(block: slice = block, part: Tensor = part, got: Tensor = got, sent: list[dist.Work] = sent,
                     coming: Sequence[dist.Work] = coming) -> None:  # fmt: skip
                self._wait("reduce_scatter", coming)
                rows = [part[j] if j == me else got[j] for j in range(h)]
                dtypes.fold_parts(op, rows, self.size, into[block])
                self._wait("reduce_scatter", sent)

            sends.append(send)
            todo.append((_nothing, _nothing, last))

        def each(k: int) -> None:
            if k % h == h - 1:
                sends[k // h]()

        def first() -> object:
            return self.early.reduce_pieces("reduce_scatter", op, flat, (number, 0, 0), pieces, parts, each)

        return self._take([(first, _nothing, _nothing), *todo], out)

    def _spread_from(self, x: Tensor, src: int) -> Tensor:
        flat, number = dtypes.to_bytes(x), self._begun()
        host, place, count = self.hosts.host_of(src), self.late.index, self.late.size
        out, todo = reserve.empty(flat.shape, flat), list[tuple[First, First, First]]()
        for k, block in enumerate(blocks_of(flat.numel(), flat.nbytes, _BLOCK)):
            mine, into, tag, turn = flat[block], out[block], self._tag(), (number, k, src)
            parts, works = chunks_of(into.numel(), count), list[dist.Work]()
            own = parts[place]
            if host == self._host:

                def send(into: Tensor = into, own: slice = own, tag: int = tag,
                         works: list[dist.Work] = works) -> None:  # fmt: skip
                    others = [peer for peer in self._peers if peer != self.index]
                    works.extend(self._begin([(into[own], peer) for peer in others], [], tag))

                def first(mine: Tensor = mine, into: Tensor = into, turn: Turn = turn, send: First = send) -> object:
                    return self.early.copy_from(self.hosts.hosts[host].index(src), mine, into, turn, send)

                todo.append((first, _nothing, lambda works=works: self._wait("broadcast", works)))  # type: ignore[misc]
                continue
            piece = room(parts[0].stop, flat)
            works += self._begin([], [(piece[: own.stop - own.start], self._peers[host])], tag)

            def last(piece: Tensor = piece, into: Tensor = into, parts: list[slice] = parts, turn: Turn = turn,
                     works: list[dist.Work] = works) -> object:  # fmt: skip
                self._wait("broadcast", works)

                def fill(got: list[Tensor]) -> None:
                    for run, each in zip(parts, got, strict=True):
                        into[run].copy_(each[: run.stop - run.start])

                return self.late.collect("broadcast", piece, turn, fill)

            todo.append((_nothing, _nothing, last))
        return self._take(todo, dtypes.from_bytes(out, x.dtype).view(x.shape))

    # ------------------------------------------------------------------------------------------- the steps

    def _begun(self) -> int:
        if queued:
            begin_all()
        self._number += 1
        return self._number

    def _take(self, todo: Sequence[tuple[First, First, First]], result: T) -> T:
        """Of each block what comes before the wire; then of each what comes on it, and of the one before what comes
        after it, while the next ones are on the wire.
        """
        later = told.later
        begun = [first() for first, _, _ in todo] if later else []

        def steps() -> T:
            try:
                for i, (first, _, _) in enumerate(todo):
                    settled(begun[i] if later else first())
                todo[0][1]()
                for (_, second, _), (_, _, last) in zip([*todo[1:], _NO_STEPS], todo, strict=True):
                    second()
                    last()
            except BaseException as error:
                self._lost.append(todo)  # what is under way goes on reading and writing
                for near in (self.early, self.late):
                    near.give_up(error)
                raise
            return result

        if not (later or (self._last is not None and not self._last.done())):
            return steps()
        if self.walker is None:
            self.walker = Walker()
        self._last = self.walker.take(steps)
        return cast(T, self._last) if later else cast(T, settled(self._last))

    _all_reduced = recorded(_all_reduced, "all_reduce")
    _all_gathered = recorded(_all_gathered, "all_gather")
    _reduced_rows = recorded(_reduced_rows, "reduce_scatter")
    _spread_from = recorded(_spread_from, "broadcast")


def _nothing() -> None:
    """Where there is no such step."""


_NO_STEPS = _nothing, _nothing, _nothing
