"""Messages of one call between ranks that share memory, from when they are posted until all is here and was read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import Tensor

from meshcomm.errors import FIRST_CAUSE, CommError, text
from meshcomm.runtime.call import Want
from meshcomm.runtime.pending import Pending, TimedOutError, begin_all, queued
from meshcomm.runtime.process.reuse import reserve
from meshcomm.runtime.recorder import DROPPED, ENDED, THREAD, Record, failed
from meshcomm.runtime.transports import dtypes
from meshcomm.runtime.transports.gloo.carrier import Carrier, Room
from meshcomm.runtime.transports.gloo.post import CALLS
from meshcomm.runtime.transports.shared.entry import gone_among
from meshcomm.runtime.transports.shared.mailbox import Mail
from meshcomm.runtime.transports.shared.messages.letters import Letters, letters_of
from meshcomm.runtime.transports.shared.messages.parcels import Parcel, Sent
from meshcomm.runtime.transports.shared.waiting import AWAKE, Wait
from meshcomm.runtime.transports.underway import Messages


class Posted(Pending):
    """Messages of one call under way, to and from others."""

    __slots__ = ("_letters", "_link", "_parcels", "_sent", "_where")

    def __init__(self, link: Any, where: str, letters: Letters, parcels: list[Parcel], sent: list[Sent]) -> None:
        self._link, self._where, self._letters, self._parcels, self._sent = link, where, letters, parcels, sent

    def look(self) -> list[int]:
        """See what has come; who is waited for still."""
        letters, missing = self._letters, []
        letters.look()
        for parcel in self._parcels:  # no function of its own, as in all that is done again and again
            if not parcel.is_here:
                missing.append(parcel.want[0])
        for sent in self._sent:
            if not sent.is_read(letters):
                missing.append(sent.to)
        return missing

    def wait(self, timeout: float | None, awake: float = AWAKE) -> list[Tensor]:
        """What came, when all is here, and all was read that was sent. ``awake``: as in :class:`Wait`."""
        begin = time.monotonic()
        if missing := self.look():
            self._wait_for(missing, timeout, begin, awake)
        for rest in self._rests():
            rest.wait(None if timeout is None else max(0.0, begin + timeout - time.monotonic()))
        for error in [parcel.error for parcel in self._parcels if parcel.error is not None]:
            for parcel in self._parcels:
                parcel.is_settled = True
            raise error
        return [parcel.out for parcel in self._parcels]  # type: ignore[misc]

    def _wait_for(self, missing: list[int], timeout: float | None, begin: float, awake: float) -> None:
        mail = self._letters.mail
        limit = mail.timeout if timeout is None else timeout
        waiting = Wait(_Listener(self._link, mail, self._where, timeout), begin + limit, awake=awake)
        try:
            while missing:
                waiting.more(missing)
                missing = self.look()
        except CommError:
            self.give_up()
            raise

    def give_up(self) -> None:
        """It is not waited for again, and nobody has what has come: both are for who asks next."""
        self._letters.forget(self._parcels)
        self._let_go()

    def _let_go(self) -> None:
        """What was sent may be read."""
        for sent in self._sent:
            sent.let_go(self._letters.mail.index)
        for rest in self._rests():
            rest.abandon()

    def done(self) -> bool:
        """Whether it would not wait: all is here, or will not come."""
        missing = self.look()
        if missing:
            return any(self._letters.mail.readers[i].is_leaving() for i in missing) and bool(self.look())
        return all(rest.done() for rest in self._rests())

    def abandon(self) -> None:
        """What comes is taken, and what was sent may be read."""
        for parcel in self._parcels:
            parcel.dropped = True
        self._let_go()

    def _rests(self) -> list[Messages]:
        """What follows over gloo."""
        found: list[Messages] = []
        every: list[Parcel | Sent] = [*self._parcels, *self._sent]
        for each in every:
            if each.rest is not None:
                found.append(each.rest)
        return found


class Letterbox(Carrier):
    """Messages of which both sides know dtypes and shapes, by letters: nobody waits until one has been read."""

    form = -2

    def take(self, tensors: Sequence[Tensor], dst: int, tag: int) -> Sending:
        """Send them."""
        link, letters = self._link, self._letters()
        record = self._noted(([(dst, tag)] * len(tensors), []))
        route = (self._first + tag) % CALLS
        try:
            for x in tensors:
                sent = letters.send(link, (x, dst, tag), route)
                sent.let_go(link.index)
                if sent.rest is not None:
                    sent.rest.abandon()  # it is sent all the same
        except Exception as error:
            failed(record, error)
            raise
        record[ENDED] = time.monotonic()
        return Sending()

    def bring(self, rooms: Sequence[Room], src: int, tag: int) -> Bringing:
        """Receive tensors of these shapes and dtypes."""
        link, letters, cpu = self._link, self._letters(), torch.device("cpu")
        record = self._noted(([], [(src, tag)] * len(rooms)))
        route = (self._first + tag) % CALLS
        wants = [(src, shape, dtype, tag, cpu) for shape, dtype in rooms]
        parcels = [Parcel(link, "exchange", want, route, _ahead(want)) for want in wants]
        letters.ask(parcels)
        return Bringing(Posted(link, "exchange", letters, parcels, []), record)

    def _letters(self) -> Letters:
        if queued:
            begin_all()
        mail: Mail = self._link.mail
        return mail.letters or letters_of(mail)  # type: ignore[return-value]


def _ahead(want: Want) -> Tensor | None:
    """Room for what comes, if it comes as it is."""
    _, shape, dtype, *_ = want
    return reserve.empty(shape, torch.empty(0, dtype=dtype, device="cpu")) if dtype in dtypes.PLAIN else None


class Sending:
    """What was sent: it lies where it will be read."""

    def wait(self) -> list[Tensor]:
        """Nothing is waited for."""
        return []

    def done(self) -> bool:
        """It may be written to."""
        return True


class Bringing:
    """What was asked for, and one thread waits for."""

    __slots__ = ("_posted", "_record")

    def __init__(self, posted: Posted, record: Record) -> None:
        self._posted, self._record = posted, record

    def wait(self) -> list[Tensor]:
        """What has come."""
        record = self._record
        record[THREAD] = get_ident()
        try:
            found = self._posted.wait(None)
        except Exception as error:
            failed(record, error)
            raise
        record[ENDED] = time.monotonic()
        return found

    def done(self) -> bool:
        """Whether it has come."""
        return self._posted.done()

    def __del__(self) -> None:
        if self._record[ENDED] is None:  # a step has failed; what comes is taken all the same
            self._record[ENDED] = DROPPED
            self._posted.abandon()


class _Listener:
    """Who waits for messages."""

    def __init__(self, link: Any, mail: Mail, where: str, timeout: float | None) -> None:
        self._link, self._mail, self._where, self._timeout = link, mail, where, timeout

    def listen(self) -> int:
        """As its own box."""
        return self._mail.own.listen()

    def sleep(self, heard: int, seconds: float) -> bool:
        """As its own box."""
        return self._mail.own.sleep(heard, seconds)

    def gone_among(self, missing: Sequence[int]) -> dict[int, str]:
        """Who of these will not come, and why."""
        return gone_among(self._link, missing)

    def expire(self, missing: list[int]) -> NoReturn:
        """Time is up: that of the wait, which may be repeated, or the mesh's."""
        if self._timeout is not None:
            raise TimedOutError
        raise self._link._error(self._where, RuntimeError("Timed out"))

    def fail(self, what: str) -> NoReturn:
        """One of them is gone."""
        self._mail.failed = True
        raise CommError(
            text(
                self._where,
                f"the transport failed: {what}",
                got=f"index {self._link.index} of a group of {self._link.size}",
                fix=FIRST_CAUSE,
            )
        )
