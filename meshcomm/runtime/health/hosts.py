"""On which hosts the ranks are, where there are several, and which of those answer: for the words of who waits in vain.

A host that answers has a network, whatever its processes do. So one whose cable is out, or that has no power, is told
apart from one that is slow, by a connection to the port that its first rank has open since the ranks met.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

_SHOWN = 4
_FRESH = 3.0
"""Seconds for which is believed what was found."""
_ON_THE_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN)


class Place(NamedTuple):
    """Where a rank is."""

    host: str
    """Equal on the ranks of one host."""
    name: str
    address: str
    """Of its host, where that is known."""
    heard: str
    """At which address its host was reached when the ranks met; empty where that was not tried."""
    port: int

    @property
    def words(self) -> str:
        """``node1 (10.0.0.2)``."""
        address = self.heard or self.address
        return f"{self.name} ({address})" if address else self.name


class _Met(NamedTuple):
    pid: int
    rank: int
    places: tuple[Place, ...]


_met: _Met | None = None
_open: list[Callable[[], object]] = []
_silent: dict[str, tuple[float, str]] = {}
"""By host, when it was found not to answer, and why."""


def placed(rank: int, places: Sequence[Place], close: Callable[[], object] | None) -> None:
    """This rank of the world, and where all are, in order; ``close``: what it has open for the others."""
    global _met
    forget()
    _met = _Met(os.getpid(), rank, tuple(places))
    if close is not None:
        _open.append(close)


def forget() -> None:
    """The group is no more."""
    global _met
    here, _met = _met, None
    _silent.clear()
    while _open:
        close = _open.pop()
        if here is None or here.pid == os.getpid():
            close()


def _here() -> _Met | None:
    """The meeting, in the process that was there: not in its forks."""
    here = _met
    return here if here is not None and here.pid == os.getpid() else None


def are_several() -> bool:
    """Whether the ranks are known to be on more than one."""
    return _here() is not None


def where(rank: int) -> str:
    """``on node1 (10.0.0.2)``: where a rank of the world is, if there are several hosts and this is another one."""
    here = _here()
    if here is None or max(rank, here.rank) >= len(here.places):
        return ""
    place = here.places[rank]
    return "" if place.host == here.places[here.rank].host else f"on {place.words}"


def at(said: str) -> str:
    """Whom an address in what a backend says belongs to: ``ranks 2, 3 on node1 (10.0.0.2)``; empty if to nobody."""
    here = _here()
    for place in () if here is None else dict.fromkeys(here.places):
        known = "|".join(re.escape(each) for each in {place.address, place.heard} if each)
        if known and re.search(rf"(?<![\w.:])({known})(?![\w.])", said):
            return _ranks(here, place.host) + f" on {place.words}"  # type: ignore[arg-type]
    return ""


def _ranks(here: _Met, host: str) -> str:
    there = [rank for rank, place in enumerate(here.places) if place.host == host]
    shown = ", ".join(map(str, there[:_SHOWN])) + (", ..." if len(there) > _SHOWN else "")
    return f"rank{'s' * (len(there) > 1)} {shown}"


# -------------------------------------------------------------------------------------------------------------- asking


def silent(ranks: Iterable[int], seconds: float) -> dict[int, str]:
    """Those of these ranks of the world whose hosts do not answer from here within that time, and why not."""
    here = _here()
    if here is None:
        return {}
    mine = here.places[here.rank].host
    asked = [rank for rank in ranks if rank < len(here.places) and here.places[rank].host != mine]
    doors = {here.places[rank].host: here.places[rank] for rank in asked if here.places[rank].heard}
    old = {host for host in doors if found_silent(host)}  # who fails for it has asked a moment ago, step by step
    failed = _try([place for host, place in doors.items() if host not in old], seconds)
    _silent.update({host: (time.monotonic(), why) for host, why in failed.items()})
    failed |= {host: found_silent(host) for host in old}
    return {rank: failed[here.places[rank].host] for rank in asked if here.places[rank].host in failed}


def found_silent(host: str) -> str:
    """Why a host did not answer when somebody asked a moment ago; empty if it did, or nobody has."""
    when, why = _silent.get(host, (0.0, ""))
    return why if time.monotonic() < when + _FRESH else ""


def unreached(rank: int) -> str:
    """That the host of a rank did not answer when somebody asked a moment ago; empty if it did, or nobody has."""
    here = _here()
    why = "" if here is None or rank >= len(here.places) else found_silent(here.places[rank].host)
    return f"its host does not answer: {why}" if why else ""


def no_way(found: dict[int, str]) -> str:
    """``node0 (10.0.0.1) cannot reach node1 (10.0.0.2): no answer within 1 s``, of what ``silent`` has found; empty if
    that is nothing.
    """
    here = _here()
    if here is None:
        return ""
    whys = {here.places[rank].host: f"{here.places[rank].words}: {why}" for rank, why in found.items()}
    whom = "; ".join(list(whys.values())[:_SHOWN]) + ("; ..." if len(whys) > _SHOWN else "")
    return f"{here.places[here.rank].words} cannot reach {whom}" if whom else ""


def _try(places: Collection[Place], seconds: float) -> dict[str, str]:
    """The hosts of those that do not answer, and why; all at the same time. Who refuses a connection has answered."""
    end, failed = time.monotonic() + seconds, dict[str, str]()
    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as opened:
        for place in places:
            family = socket.AF_INET6 if ":" in place.heard else socket.AF_INET
            try:
                calling = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            except OSError:  # no more files: nothing is known
                continue
            calling.setblocking(False)
            error = calling.connect_ex((place.heard, place.port))
            if error in _ON_THE_WAY:
                waiting.register(calling, selectors.EVENT_WRITE, place.host)
            elif error not in (0, errno.ECONNREFUSED):
                failed[place.host] = os.strerror(error)
        while waiting.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                waiting.unregister(key.fileobj)
                error = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                if error not in (0, errno.ECONNREFUSED):
                    failed[key.data] = os.strerror(error)
        failed |= {key.data: f"no answer within {seconds:.3g} s" for key in waiting.get_map().values()}
    return failed
