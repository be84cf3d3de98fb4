"""Messages over gloo, each with an envelope: they carry dtype and shape, and say over which axis they were sent.

The axes between the same ranks share one process group for them, which is there before the first message: who sends or
receives the first one may be two of many ranks. What is larger than an envelope follows it; where ranks share memory it
is lent, and who receives it reads it there once and says so. What two ranks have agreed on before is carried without
envelopes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm.errors import CommError
from meshcomm.runtime.call import Post, Want
from meshcomm.runtime.pending import begin_all, queued
from meshcomm.runtime.process.reuse import reserve
from meshcomm.runtime.recorder import DROPPED, ENDED, THREAD, Log, Named, Record, failed
from meshcomm.runtime.transports import dtypes, envelopes
from meshcomm.runtime.transports.envelopes import LENT, Envelope
from meshcomm.runtime.transports.underway import Messages

CALLS = 2**30
"""Tags of the library's own messages begin here; up to there are those of users, moved on by as much for each axis."""
_FOLLOWING, _FOLLOWERS = CALLS + 2**29, 2**29
"""Tags of what follows an envelope."""


def route_of(name: str, tag: int) -> int:
    """The tag, to gloo, of a user's messages over the axis whose calls are named so."""
    return (envelopes.sequence_of(name) + tag) % CALLS


def following(number: int) -> int:
    """The tag, to gloo, of what follows by itself."""
    return _FOLLOWING + number % _FOLLOWERS


class Lender(Protocol):
    """Who may lend what a message is, and read what another one has lent: a link."""

    def lend_to(self, packed: Tensor, dst: int) -> Sequence[int]:
        """Where it lies from now on, for this index; nothing if it is not lent."""

    def read_lent(self, lease: Sequence[int], src: int, out: Tensor | None) -> None:
        """What this index has lent, into ``out`` if it is wanted. Raises OSError if it is not there."""


class Parcel(NamedTuple):
    """A message that is expected."""

    data: Tensor
    work: dist.Work
    """Of the envelope."""
    want: Want
    tag: int
    """To gloo."""


def expect(base: dist.ProcessGroup, wants: Sequence[Want], routes: Sequence[int]) -> list[Parcel]:
    """Make room for the envelopes."""
    rooms = [envelopes.empty() for _ in wants]
    return [
        Parcel(data, base.recv([data], want[0], route), want, route)
        for data, want, route in zip(rooms, wants, routes, strict=True)
    ]


def deliver(
    base: dist.ProcessGroup, name: str, lender: Lender, numbers: Iterator[int], posts: Sequence[Post],
    routes: Sequence[int],
) -> tuple[list[dist.Work], list[Tensor]]:  # fmt: skip
    """Send; and what is read until it is sent."""
    works, kept = [], []
    for (x, dst, tag), route in zip(posts, routes, strict=True):
        packed = dtypes.to_bytes(x)
        large = packed.nbytes > envelopes.ROOM
        lease = lender.lend_to(packed, dst) if large else ()
        follows = LENT if lease else following(next(numbers)) if large else 0
        data = Envelope.of(name, tag, x, follows).write(packed, lease)
        works.append(base.send([data], dst, route))
        kept.append(data)
        if follows > 0:
            works.append(base.send([packed], dst, follows))
            kept.append(packed)
    return works, kept


def open_all(
    base: dist.ProcessGroup, where: str, name: str, index: int, lender: Lender, parcels: Sequence[Parcel],
    wait: Callable[[Sequence[dist.Work]], Any],
) -> list[Tensor]:  # fmt: skip
    """What came, when all envelopes are here. What does not fit is taken all the same, for who has sent it waits."""
    out, works = [], []
    error: CommError | None = None
    for data, _, (src, shape, dtype, tag, _), _ in parcels:
        found = Envelope.read(data)
        fits = found.is_for(name, tag, dtype, shape)
        if not fits and error is None:
            error = envelopes.misfit(where, found, src, index, name, dtype, shape)
        length, like = (shape, torch.empty(0, dtype=dtype, device="cpu")) if fits else ((found.nbytes,), data)
        packed = dtypes.to_bytes(reserve.empty(length, like))
        if found.follows == LENT:
            try:
                lender.read_lent(envelopes.lease_in(data), src, packed if fits else None)
            except OSError as failed:
                error = error or envelopes.lost(where, src, index, failed)
        elif found.follows:
            works.append(base.recv([packed], src, found.follows))
        elif fits and packed.numel():
            packed.view(torch.uint8).copy_(envelopes.inside(data, found.nbytes))
        out.append(dtypes.from_bytes(packed, dtype).view(shape) if fits else packed)
    wait(works)
    if error is not None:
        raise error
    return out


# ---------------------------------------------------------------------------------------------- without envelopes


Room = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of what comes."""


class Carrier:
    """Of one link: messages of the CPU's of which both sides know dtypes and shapes. ::

        with an envelope    4 KiB that say what it is, and where it lies or what follows ──> read ──> taken
        carried             the elements ──> into the room that was made for them

    Who sends without an envelope to who expects one ends both. So ranks agree beforehand that all of them carry, by the
    same limit (:attr:`form`), and then decide by dtype and shape alone.
    """

    def __init__(self, link: Any, base: dist.ProcessGroup, log: Log, first: int, most: int | None, call: Named) -> None:
        """``first``: of the axis's tags, to gloo; ``most``: bytes of a tensor that is read faster where it lies."""
        self._link, self._send, self._recv, self._log = link, base.send, base.recv, log
        self._first, self._most, self._call = first, most, call

    @property
    def form(self) -> int:
        """How it carries, as a number that is not 0: it does only where all ranks say the same."""
        return -1 if self._most is None else self._most

    def take(self, tensors: Sequence[Tensor], dst: int, tag: int) -> Carried | None:
        """Send them; None where they go with envelopes."""
        most = self._most
        if most is not None and max(x.nbytes for x in tensors) > most:
            return None
        if queued:
            begin_all()
        record = self._noted(([(dst, tag)] * len(tensors), []))
        route = (self._first + tag) % CALLS
        try:
            kept = [dtypes.to_bytes(x) for x in tensors]
            return Carried(self._link, [self._send([x], dst, route) for x in kept if x.numel()], [], kept, record)
        except RuntimeError as error:
            raise self._failed(record, error) from error

    def bring(self, rooms: Sequence[Room], src: int, tag: int) -> Carried | None:
        """Receive tensors of these shapes and dtypes; None where they come with envelopes."""
        most = self._most
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in rooms]
        if most is not None and max(sizes) > most:
            return None
        if queued:
            begin_all()
        record = self._noted(([], [(src, tag)] * len(rooms)))
        route = (self._first + tag) % CALLS
        works, came = [], []
        try:
            for (shape, dtype), nbytes in zip(rooms, sizes, strict=True):
                x = torch.empty(shape, dtype=dtype, device="cpu") if nbytes < _FEW else _large(shape, dtype)
                packed = x if dtype in dtypes.PLAIN else dtypes.to_bytes(x)
                if nbytes:
                    works.append(self._recv([packed], src, route))
                came.append(x if packed is x else dtypes.from_bytes(packed, dtype).view(shape))
        except RuntimeError as error:
            raise self._failed(record, error) from error
        return Carried(self._link, works, came, None, record)

    def _noted(self, root: tuple[list[tuple[int, int]], list[tuple[int, int]]]) -> Record:
        self._log.messages += 1
        record: Record = [0, "exchange", "", None, (), time.monotonic(), None, self._call, root, get_ident()]
        self._log.records.append(record)
        return record

    def _failed(self, record: Record, error: RuntimeError) -> Exception:
        found: Exception = self._link._error("exchange", error)
        failed(record, found)
        return found


_FEW = 2**16


def _large(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return reserve.empty(shape, torch.empty(0, dtype=dtype, device="cpu"))


class Carried:
    """Messages under way that one thread begins and waits for, with as little around them as can be."""

    __slots__ = ("_keep", "_link", "_messages", "_record", "_result", "_works")

    def __init__(
        self, link: Any, works: Sequence[dist.Work], result: list[Tensor], keep: object, record: Record
    ) -> None:
        self._link, self._works, self._result, self._keep, self._record = link, works, result, keep, record
        self._messages: Messages | None = None

    def wait(self) -> list[Tensor]:
        """What has come."""
        record = self._record
        record[THREAD] = get_ident()
        try:
            if self._messages is not None:
                self._messages.wait(None)
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            said = self._link._error("exchange", error)
            failed(record, said)
            raise said from error
        self._works = ()
        record[ENDED] = time.monotonic()
        return self._result

    def done(self) -> bool:
        """By a thread that waits."""
        if self._messages is None:
            self._messages, self._works = Messages(self._link, self._works, None, self._keep), ()
        return self._messages.done()

    def __del__(self) -> None:
        if self._works:  # a step has failed; they come all the same
            self._record[ENDED] = DROPPED
            Messages(self._link, self._works, None, (self._keep, self._result)).abandon()
