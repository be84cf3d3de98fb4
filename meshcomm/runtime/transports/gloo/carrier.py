"""Messages over gloo of which both sides know dtypes and shapes, as they have agreed: without envelopes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from threading import get_ident
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm.runtime.pending import begin_all, queued, settled
from meshcomm.runtime.process.reuse import reserve
from meshcomm.runtime.recorder import DROPPED, ENDED, THREAD, Log, Named, Record, failed
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.gloo.post import CALLS
from meshcomm.runtime.transports.underway import Messages

Room = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of what comes."""


class Coming(Protocol):
    """Messages under way."""

    def wait(self) -> list[Tensor]:
        """What has come."""

    def done(self) -> bool:
        """Whether it has."""


class Carrier:
    """Of one link: messages of the CPU's of which both sides know dtypes and shapes. ::

        with an envelope    4 KiB that say what it is, and where it lies or what follows ──> read ──> taken
        carried             the elements ──> into the room that was made for them

    Who sends without an envelope to who expects one ends both. So ranks agree beforehand that all of them carry, in the
    same way (:attr:`form`).
    """

    form = -1
    """How it carries, as a number that is not 0: it does only where all ranks say the same."""

    def __init__(self, link: Any, base: dist.ProcessGroup, log: Log, first: int, call: Named) -> None:
        """``first``: of the axis's tags, to gloo."""
        self._link, self._send, self._recv, self._log = link, base.send, base.recv, log
        self._first, self._call = first, call

    def take(self, tensors: Sequence[Tensor], dst: int, tag: int) -> Coming:
        """Send them."""
        if queued:
            begin_all()
        record = self._noted(([(dst, tag)] * len(tensors), []))
        route = (self._first + tag) % CALLS
        try:
            kept = [dtypes.to_bytes(x) for x in tensors]
            return Carried(self._link, [self._send([x], dst, route) for x in kept if x.numel()], [], kept, record)
        except RuntimeError as error:
            raise self._failed(record, error) from error

    def bring(self, rooms: Sequence[Room], src: int, tag: int) -> Coming:
        """Receive tensors of these shapes and dtypes."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in rooms]
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
                settled(self._messages)
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
