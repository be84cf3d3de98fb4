"""By which interface ranks of several hosts talk, and whether they can: found, and tried before gloo tries.

    rank 0 on node0 (eth0, docker0)               rank 1 on node1 (eth0, eth1)
    seat: which of my addresses leads to MASTER_ADDR?
          node0 is 127.0.1.1 here: none                 eth0 10.0.0.2
    both know all seats
          10.0.0.2 is reached from eth0                 eth0
    the first rank of each host listens there, and calls those of the other hosts: who does not answer is told to all

gloo itself takes the address of the host's own name, which is loopback on a machine as Debian installs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from meshcomm.runtime.health.hosts import Place

GLOO = "GLOO_SOCKET_IFNAME"
_OTHERS = ("NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""What else says between hosts which interfaces to use: gloo's is to be among these."""
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
_MOST_DOORS = 64
"""The most hosts of which every rank knows where they listen."""
PATIENCE = 10.0
"""The most seconds that a host has to answer."""
_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "podman")
"""Beginnings of the names of interfaces that lead to containers of this host: the last to be thought of."""


class Address(NamedTuple):
    """One address of an interface."""

    interface: str
    address: str


class Seat(NamedTuple):
    """Where a rank is in the network, as it tells the others."""

    host: str
    """Equal on ranks that reach each other by loopback."""
    name: str
    leads: str
    """Its address on the way to where the ranks meet; empty where that is loopback, or not known."""
    addresses: Sequence[Address]
    """All but loopback's."""

    @staticmethod
    def mine(host: str, master: str | None) -> Seat:
        """This process's; ``master``: a name or an address of where the ranks meet."""
        space = ""
        with contextlib.suppress(OSError):
            space = os.readlink("/proc/self/ns/net")
        outside = [each for each in addresses() if not is_loopback(each.address)]
        # Machines that are copies of one picture have one name, and one id of their boot.
        known = " ".join([host, space, *(each.address for each in outside if ":" not in each.address)])
        return Seat(known, socket.gethostname(), source(master) if master else "", outside)

    @staticmethod
    def read(told: Sequence[object]) -> Seat:
        """Of JSON."""
        host, name, leads, outside = told
        return Seat(str(host), str(name), str(leads), [Address(*each) for each in outside])  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------------------------- addresses


_ENTRY = "@PPIPPPP"
"""``struct ifaddrs``: the next one, name, flags, address, mask, the other side's, data."""


def addresses() -> list[Address]:
    """Of all interfaces that are up, in the system's order, by getifaddrs(3); of a name gloo takes the first one."""
    try:
        libc = ctypes.CDLL(None)
        first = ctypes.c_void_p()
        if libc.getifaddrs(ctypes.byref(first)) != 0:
            return []
    except (OSError, AttributeError, TypeError):
        return []
    try:
        return list(_listed(first.value))
    finally:
        libc.freeifaddrs(first)


def _listed(at: int | None) -> Iterator[Address]:
    while at:
        at, name, flags, address, *_ = struct.unpack(_ENTRY, ctypes.string_at(at, struct.calcsize(_ENTRY)))
        if not address or not flags & 1:  # IFF_UP
            continue
        raw = ctypes.string_at(address, 2)
        family = raw[1] if sys.platform == "darwin" else struct.unpack("=H", raw)[0]
        interface = ctypes.string_at(name).decode(errors="replace")
        if family == socket.AF_INET:
            yield Address(interface, socket.inet_ntop(family, ctypes.string_at(address + 4, 4)))
        elif family == socket.AF_INET6:
            yield Address(interface, socket.inet_ntop(family, ctypes.string_at(address + 8, 16)))


def is_loopback(address: str) -> bool:
    """Whether nobody else is reached by it; addresses of one link, which mean nothing without it, too."""
    return address.startswith(("127.", "fe80:", "0.")) or address in ("::1", "::", "")


def source(host: str) -> str:
    """This machine's address on the way to ``host``; empty if that is loopback or there is no way. Sends nothing but
    what a name takes to be known.
    """
    with contextlib.suppress(OSError, UnicodeError):
        for family, _, _, _, to in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asked:
                asked.connect(to)
                found = str(asked.getsockname()[0])
                if not is_loopback(found):
                    return found
    return ""


# -------------------------------------------------------------------------------------------------------------- choice


class Choice(NamedTuple):
    """What gloo is to listen at."""

    interface: str
    why: str


def choose(mine: Seat, seats: Sequence[Seat], environ: Mapping[str, str]) -> Choice | None:
    """The interface that gloo is to be told; None where a variable tells it, or where none leads anywhere."""
    if environ.get(GLOO):
        return None
    if all(seat.host == mine.host for seat in seats):
        name = LOOPBACK.get(sys.platform)
        return None if name is None else Choice(name, "all ranks are on this machine")
    usable = [each for each in mine.addresses if _is_meant(each.interface, environ)]
    for found, why in _ways(mine, seats):
        for each in usable:
            if each.address == found:
                return Choice(each.interface, why)
    usable.sort(key=lambda each: each.interface.startswith(_VIRTUAL))
    saying = [variable for variable in _OTHERS if environ.get(variable)]
    among = f"the first one that {' and '.join(saying)} name" if saying else "the first one that is up"
    return Choice(usable[0].interface, among) if usable else None


def _ways(mine: Seat, seats: Sequence[Seat]) -> Iterator[tuple[str, str]]:
    """This host's addresses, the best first: on the way to where ranks meet; to where others are on that way; to
    whatever addresses others have.
    """
    yield mine.leads, "it leads to where the ranks meet"
    others = {seat.host: seat for seat in seats if seat.host != mine.host}.values()
    for seat in others:
        if seat.leads:
            yield source(seat.leads), f"it leads to {seat.name} ({seat.leads})"
    for seat in others:
        for each in sorted(seat.addresses, key=lambda each: each.interface.startswith(_VIRTUAL)):
            if each.address not in {own.address for own in mine.addresses}:
                yield source(each.address), f"it leads to {seat.name} ({each.address})"


def _is_meant(interface: str, environ: Mapping[str, str]) -> bool:
    """By NCCL's variable (beginnings of names, = for whole ones, ^ for not these) and TensorPipe's (a name)."""
    for variable in _OTHERS:
        value = environ.get(variable, "")
        if not value:
            continue
        refuses, value = value.startswith("^"), value.removeprefix("^")
        whole, value = value.startswith("=") or variable != _OTHERS[0], value.removeprefix("=")
        names = [name.partition(":")[0] for name in value.split(",") if name]
        if any(interface == name or (not whole and interface.startswith(name)) for name in names) == refuses:
            return False
    return True


def bound(interface: str | None) -> str:
    """The address that gloo listens at: of this interface, or of the host's own name."""
    if interface:
        name = interface.split(",")[0]
        return next((each.address for each in addresses() if each.interface == name), "")
    with contextlib.suppress(OSError, UnicodeError):
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    return "127.0.0.1"


def told(environ: Mapping[str, str], master: str | None, one_machine: bool, chosen: Choice | None) -> str:
    """Which interface gloo listens at, and why; ``chosen`` when the ranks have met."""
    if chosen is None and environ.get(GLOO):
        chosen = Choice(environ[GLOO], f"{GLOO} says so")
    if chosen is None and one_machine and sys.platform in LOOPBACK:
        chosen = Choice(LOOPBACK[sys.platform], "all ranks are on this machine")
    if chosen is None and master:
        seat = Seat.mine("", master)
        chosen = choose(seat, [seat, Seat("elsewhere", "", "", [])], environ) if seat.leads else None
    if chosen is None:
        return "to be found when the ranks have met" if master else ""
    return f"{chosen.interface} ({bound(chosen.interface) or 'no address'}): {chosen.why}"


def here(to: str) -> str:
    """This host as it asks another one: its name, its address and interface on the way there."""
    address = source(to)
    names = [each.interface for each in addresses() if each.address == address]
    return socket.gethostname() + (f" ({address}{', ' if names else ''}{''.join(names[:1])})" if address else "")


# ------------------------------------------------------------------------------------------------------------- tried


def no_way(host: str, port: int) -> str:
    """Why no connection can be made; empty if one can."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except TimeoutError:
        return "nothing comes back from there: no such host, no way to it, or a firewall"
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


class Door:
    """What a host's first rank has open while the others try to reach it, and later, when they miss it."""

    def __init__(self, address: str) -> None:
        self.address, self.token, self.error = address, os.urandom(16), ""
        self._listener: socket.socket | None = None
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, 0), family=family, backlog=4096)
            threading.Thread(target=self._answer, name="meshcomm door", daemon=True).start()
        except OSError as error:
            self.error = f"nothing can listen there: {error.strerror or error}"

    def write(self) -> str:
        """For the others."""
        port = self._listener.getsockname()[1] if self._listener is not None else 0
        return json.dumps([self.address, port, self.token.hex(), self.error])

    def _answer(self) -> None:
        listener = self._listener
        while listener is not None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            with contextlib.suppress(OSError), connection:
                connection.sendall(self.token)

    def close(self) -> None:
        """Nobody tries any more."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # who accepts wakes up
            self._listener.close()


def first_ranks(seats: Sequence[Seat]) -> dict[str, int]:
    """The lowest rank of each host."""
    first: dict[str, int] = {}
    for rank, seat in enumerate(seats):
        first.setdefault(seat.host, rank)
    return first


def try_all(doors: Mapping[int, str], rank: int, seconds: float) -> dict[int, str]:
    """Those of ``doors`` (what they wrote, by rank) that do not answer from here, and why; all at the same time."""
    end, failed = time.monotonic() + seconds, dict[int, str]()
    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as opened:
        for other, told in doors.items():
            address, port, token, error = json.loads(told)
            if other == rank and not error:
                continue
            if error:
                failed[other] = error
                continue
            calling = opened.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
            calling.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                try:
                    calling.connect((address, port))
                except BlockingIOError:
                    raise
                except OSError as wrong:
                    failed[other] = wrong.strerror or str(wrong)
                    continue
            waiting.register(calling, selectors.EVENT_READ, (other, bytes.fromhex(token)))
        while waiting.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                other, token = key.data
                waiting.unregister(key.fileobj)
                try:
                    said = key.fileobj.recv(len(token))  # type: ignore[union-attr]
                except OSError as wrong:
                    failed[other] = wrong.strerror or str(wrong)
                    continue
                if said != token:
                    failed[other] = "something else answers there"
        failed |= {key.data[0]: f"no answer within {seconds:g} s" for key in waiting.get_map().values()}
    return dict(sorted(failed.items()))


def master_of(store: object) -> str | None:
    """The host at which a store is, as far as it tells."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host = getattr(store, "host", None)
    return host if isinstance(host, str) else None


def misses(here: Store, seats: Sequence[Seat], rank: int, address: str, seconds: float) -> tuple[Door | None, str]:
    """The door of this rank, and whom it cannot reach, in words; only the first rank of a host tries. ``here`` is of
    this meeting alone.
    """
    first = first_ranks(seats)
    if first[seats[rank].host] != rank:
        return None, ""
    door = Door(address)
    here.set(f"door/{rank}", door.write())
    told = here.multi_get([f"door/{other}" for other in first.values()])
    doors = {other: each.decode() for other, each in zip(first.values(), told, strict=True)}
    failed, whom = try_all(doors, rank, seconds), list[str]()
    for other, why in list(failed.items())[:4]:
        there = json.loads(doors[other])[0]
        same = " (both have this address, the first one of the interface)" if there == address else ""
        whom.append(f"{who(seats, other, there)}: {why}{same}")
    return door, ("; ".join(whom) + ("; ..." if len(failed) > 4 else "")) if whom else ""


def places(here: Store, seats: Sequence[Seat]) -> list[Place]:
    """Of all ranks in order; with what the first of each host has open, unless these are too many to ask for."""
    first = first_ranks(seats)
    doors = dict.fromkeys(first, ("", 0))
    if len(first) <= _MOST_DOORS:
        told = here.multi_get([f"door/{rank}" for rank in first.values()])
        doors = {host: tuple(json.loads(each)[:2]) for host, each in zip(first, told, strict=True)}
    known = [seat.leads or next((each.address for each in seat.addresses), "") for seat in seats]
    return [Place(seat.host, seat.name, each, *doors[seat.host]) for seat, each in zip(seats, known, strict=True)]


def who(seats: Sequence[Seat], rank: int, address: str) -> str:
    """The ranks of one host: ``ranks 2 and 3 (node1, 10.0.0.2)``."""
    there = [other for other, seat in enumerate(seats) if seat.host == seats[rank].host]
    shown = ", ".join(map(str, there[:8])) + (", ..." if len(there) > 8 else "")
    return f"rank{'s' * (len(there) > 1)} {shown} ({seats[rank].name}, {address or 'no address'})"
