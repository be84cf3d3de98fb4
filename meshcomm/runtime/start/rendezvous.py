"""How the processes of one launch find each other: a store that all reach, and a count that says when all are there.

No port need be known beforehand, except where the user or the launcher names one (MASTER_PORT, tcp://).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from meshcomm.errors import CommError, fail
from meshcomm.runtime.health import hosts, peers
from meshcomm.runtime.process import exits, table
from meshcomm.runtime.start import network
from meshcomm.runtime.start.launchers import LOOPBACK, VARIABLES, Launcher
from meshcomm.runtime.start.network import Seat
from meshcomm.runtime.start.request import Request, host_port

T = TypeVar("T")

_SOON, _LOOK = 0.3, 0.5
"""Seconds after which, and between which, who waits looks whether others have ended."""
_FEW = 64
"""Up to so many ranks: each asks for each, and asks again and again (a wait of the store's own that runs out of time
says so on stderr)."""
_PAUSE = 0.03
_SLACK = 2.0
"""Seconds beyond a time-out that a store may take to keep it by itself."""
_HEARING = 1.0
"""The most seconds that rank 0 stays for others to hear of a failure."""
_NO_WAY = (
    "check cables and firewalls between these hosts; if they have another network between them, name its interface in "
    f"{network.GLOO} on each (`python -m meshcomm` tells which one is taken)"
)
_FIRST_ONE = "look at the messages of that process: it failed first"

# A store outlives shutdown(), so that an init() that follows cannot reach the dying server of the one before.
_stores: dict[str, Store] = {}
_served_here: list[Store] = []
"""Those that end with this process."""


def this_host() -> str:
    """What processes on one machine have in common: its name, and where there is one the id of its last boot."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}/{table.boot()}"
    return socket.gethostname()


# ------------------------------------------------------------------------------------------------------------- stores


@contextlib.contextmanager
def meeting_place(who: Launcher, request: Request, timeout: timedelta) -> Iterator[Store]:
    """The store that all ranks reach."""
    agent = who.name == "pytorch" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    method = request.init_method
    who = who._replace(master_port=request.port or who.master_port)
    if request.store is not None:
        yield request.store
    elif method is not None and method.startswith("file://"):
        yield file_store(method.removeprefix("file://"), who.world_size, timeout)
    elif method is not None:
        host, at = host_port(method)
        yield tcp_store(host, at, serve=who.rank == 0, timeout=timeout, one_machine=who.one_node)
    elif who.world_size == 1:
        yield HashStore()
    elif who.master_port is not None and who.master_addr is not None:
        serve, at = who.rank == 0 and not (agent and request.port is None), who.master_port
        yield tcp_store(who.master_addr, at, serve=serve, timeout=timeout, one_machine=who.one_node)
    elif who.unset:
        fail(
            "init",
            f"{who.unset} not set: where do the {who.world_size} ranks meet?",
            got=f"started by {who.name}, rank {who.rank}, {who.local_world_size} ranks on this machine",
            fix="set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, equal in all processes",
        )
    else:
        key = launch_key(who.name, who.job, who.world_size, VARIABLES[who.name].rank)
        with local_store(key, serve=who.rank == 0, timeout=timeout) as store:
            yield store


def tcp_store(host: str, port: int, *, serve: bool, timeout: timedelta, one_machine: bool = False) -> Store:
    """The store at ``host:port``, which this process serves or reaches; ``one_machine`` if it is known that all ranks
    are on this one.
    """
    key = f"tcp://{host}:{port}"
    if key not in _stores:
        _stores[key] = _served(host, port, timeout, one_machine) if serve else _reached(host, port, timeout)
        _served_here.extend([_stores[key]] if serve else [])
    return _stores[key]


def file_store(path: str, size: int, timeout: timedelta) -> Store:
    """The store in a file that all ranks see."""
    key = f"file://{path}"
    if key not in _stores:
        if not Path(path).parent.is_dir():
            fail(
                "init",
                "the folder of init_method's file does not exist.",
                got=repr(path),
                fix="make it on every machine",
            )
        store = FileStore(path, size)
        store.set_timeout(timeout)
        _stores[key] = store
    return _stores[key]


def loopback_server(timeout: timedelta) -> TCPStore:
    """A store served from this process on a free port of the loopback interface; ``port`` tells which."""
    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    return _store_on(listener, LOOPBACK, timeout)


def _served(host: str, port: int, timeout: timedelta, one_machine: bool) -> TCPStore:
    # We bind the port ourselves: the error is then ours, and it is not offered to more of the network than was named.
    try:
        listener = _listener(port, _address(host, one_machine))
    except OSError as error:
        what = f"rank 0 cannot serve port {port} for the other ranks: {error.strerror}."
        fix = "another program has it: give another port by MASTER_PORT, or by init's port= or init_method="
        fail("init", what, got=f"{host}:{port}", fix=fix, kind=CommError)
    return _store_on(listener, host, timeout)


def _address(host: str, one_machine: bool) -> str | None:
    """The only address at which the others will look for this host; None if it may have several. A name may mean one
    address here and another one elsewhere: that of this machine is often loopback in its own /etc/hosts.
    """
    if host == "localhost":
        return LOOPBACK
    with contextlib.suppress(ValueError):
        return None if ipaddress.ip_address(host).is_unspecified else host
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]) if one_machine else None
    return None


def _listener(port: int, address: str | None) -> socket.socket:
    if address is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or ipaddress.ip_address(address).is_loopback:
                raise
        # Nobody here has this address: another machine forwards to one that is ours.
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def _store_on(listener: socket.socket, host: str, timeout: timedelta) -> TCPStore:
    port = listener.getsockname()[1]
    _see_ourselves(listener, host, port)
    try:
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
        )
    except RuntimeError as error:
        what = f"this process cannot reach the store that it serves at {host}:{port}."
        fail("init", what, got=_first_line(error), fix="check the interfaces of this machine", kind=CommError)


def _see_ourselves(listener: socket.socket, host: str, port: int) -> None:
    """Where an address leads nowhere, as loopback does in a new network namespace, a store's client asks for long."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL):
            listener.close()
            what = f"this machine cannot reach its own address {host}: {error.strerror}."
            fix = "bring the interface up (`ip link set lo up`), or name another address in MASTER_ADDR"
            fail("init", what, got=f"{host}:{port}", fix=fix, kind=CommError)


def _reached(host: str, port: int, timeout: timedelta) -> TCPStore:
    try:
        return within(timeout, lambda: _client(host, port, timeout))
    except RuntimeError as error:
        what = f"no answer from rank 0's store at {host}:{port} within {timeout.total_seconds():g} s."
        fix = "start all ranks; check MASTER_ADDR and MASTER_PORT, the firewall, and rank 0's own messages"
        got = network.no_way(host, port) or _first_line(error)
        fail("init", what, got=f"{got}; asked from {network.here(host)}", fix=fix, kind=CommError)


def _client(host: str, port: int, timeout: timedelta) -> TCPStore:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def within(timeout: timedelta, do: Callable[[], T]) -> T:
    """Call it, but not for ever: a store's client waits so for a server that has stopped, or that is something else."""
    done: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        with exits.blocked():
            try:
                done.append(do())
            except BaseException as error:
                errors.append(error)

    exits.never_abort()
    thread = threading.Thread(target=run, name="meshcomm store", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + _SLACK)  # ends early where the calls keep the time-out by themselves
    if errors:
        raise errors[0]
    if not done:
        raise RuntimeError("who listens there says nothing: it is stopped, or another program has the port")
    return done[0]


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


# ---------------------------------------------------------------------------------------- one machine, without a port


@contextlib.contextmanager
def local_store(key: str, *, serve: bool, timeout: timedelta) -> Iterator[Store]:
    """The store of the launch ``key`` on this machine, for launchers that give no port.

    Rank 0 takes a free port of the loopback interface and leaves it in a file that only this user can read; the others
    read it there. A port computed from the job's number could be taken; a FileStore would outlive a crash and mislead
    the next program of the launch. This file lasts until all have met, and the store must know the file's secret.
    """
    if key in _stores:
        yield _stores[key]
        return
    path = _private_folder() / key
    if not serve:
        _stores[key] = _announced(path, timeout)
        yield _stores[key]
        return
    store = loopback_server(timeout)
    secret = os.urandom(16).hex()
    store.set("meshcomm/secret", secret)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(f"{store.port} {secret}")
    draft.replace(path)
    _stores[key] = store
    _served_here.append(store)
    try:
        yield store
    finally:
        path.unlink(missing_ok=True)


def _private_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"meshcomm-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        what = "the folder in which ranks of one machine meet is open to other users."
        fail("init", what, got=str(folder), fix=f"remove it, or set TMPDIR, or MASTER_ADDR={LOOPBACK} and MASTER_PORT")
    return folder


def _announced(path: Path, timeout: timedelta) -> TCPStore:
    deadline = time.monotonic() + timeout.total_seconds()
    while (left := deadline - time.monotonic()) > 0:
        # A file that a killed launch left behind names a dead port, or somebody else's: then wait for a newer one.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            port, secret = path.read_text().split()
            socket.create_connection((LOOPBACK, int(port)), timeout=left).close()
            store = _client(LOOPBACK, int(port), timedelta(seconds=left))
            if store.check(["meshcomm/secret"]) and store.get("meshcomm/secret").decode() == secret:
                store.set_timeout(timeout)
                return store
        time.sleep(0.01)
    what = f"rank 0 of this launch did not appear on this machine within {timeout.total_seconds():g} s."
    fix = "if the ranks are on several machines, set MASTER_ADDR (rank 0's host) and MASTER_PORT on all of them"
    fail("init", what, got=f"no valid address in {path}", fix=fix, kind=CommError)


def launch_key(name: str, job: str, size: int, variable: str) -> str:
    """A name for this launch that its ranks on this machine share, and no launch before or beside it has."""
    parts = (name, job, str(size), str(os.getuid()), this_host(), _starter(variable))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _starter(variable: str) -> str:
    """The process that started the ranks here: the nearest ancestor without the rank's variable."""
    pid = os.getppid()
    while pid > 1:
        try:
            mine = f"\0{variable}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # Another user's process, slurmstepd for one; or a system without /proc.
            break
        if not mine:
            break
        pid = table.parent(pid)
    return f"{pid} {table.began(pid)}"


# -------------------------------------------------------------------------------------------------------------- meeting


def join(store: Store, rank: int, size: int, card: str, timeout: timedelta) -> tuple[Store, list[str]]:
    """Wait until all ``size`` ranks are here.

    Returns the part of the store that belongs to this meeting, and every rank's ``card``. Meetings in one store are
    told apart by counting arrivals: nobody leaves before all have come, so ``init`` may follow ``shutdown`` in a
    store that lives on. One that outlives processes too, torchrun's agent's, has a part for each attempt: a rank of an
    earlier one may have ended before it came.
    """
    peers.forget()
    try:
        here = within(timeout, lambda: _arrive(store, rank, size, card))
    except RuntimeError as error:
        _lost(rank, error)
    _await(here, "go", rank, size, timeout)
    told = [card.decode() for card in here.multi_get([f"go/{r}" for r in range(size)])]
    signs, cards = zip(*(each.split("\n", 1) for each in told), strict=True)
    peers.met(here, rank, signs, serves=any(each is store for each in _served_here))
    return here, list(cards)


def _arrive(store: Store, rank: int, size: int, card: str) -> Store:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt:
        store = PrefixStore(f"meshcomm/attempt/{attempt}", store)
    meeting = (store.add("meshcomm/arrivals", 1) - 1) // size
    here = PrefixStore(f"meshcomm/{meeting}", store)
    agreed = here.compare_set("size", "", str(size)).decode()
    if agreed != str(size):
        here.set("go", f"?world sizes differ: some ranks were started with {agreed}, rank {rank} with {size}")
    elif here.add(f"rank/{rank}", 1) > 1:
        here.set("go", f"?two processes are rank {rank} of {size}")
    else:
        here.set(f"go/{rank}", f"{peers.sign()}\n{card}")
        if here.add("go/came", 1) == size:
            here.compare_set("go", "", "ok")
    return here


def agreed(here: Store, rank: int, size: int, mine: bool, timeout: timedelta) -> bool:
    """Whether all ranks say yes; known when all are past set-up: only then may rank 0 end, and its store with it."""

    def say() -> None:
        if not mine:
            here.set("no", "1")
        here.set(f"ready/{rank}", "1")
        if here.add("ready/came", 1) == size:
            here.compare_set("ready", "", "no" if here.check(["no"]) else "ok")

    return _await(here, "ready", rank, size, timeout, say) == "ok"


def reached(here: Store, rank: int, seats: Sequence[Seat], interface: str | None, timeout: timedelta) -> None:
    """CommError on all ranks where the hosts do not reach each other, as gloo will: which ranks, and at which address.
    Nothing where there is one host. Else it is known from now on where all are, and what a host's first rank has open
    stays so: who waits in vain tries it again.
    """
    if len(network.first_ranks(seats)) == 1:
        return
    address, doors = network.bound(interface), list[network.Door | None]()
    seconds = min(timeout.total_seconds(), network.PATIENCE)

    def say() -> None:
        door, whom = network.misses(here, seats, rank, address, seconds)
        doors.append(door)
        if whom:
            what = f"{network.who(seats, rank, address)} cannot reach {whom}."
            here.compare_set("reached", "", f"!{what}\n\n{_NO_WAY}")
        here.set(f"reached/{rank}", "1")
        if here.add("reached/came", 1) == len(seats):
            here.compare_set("reached", "", "ok")

    try:
        _await(here, "reached", rank, len(seats), timeout, say)
        places = network.places(here, seats)
    except BaseException:
        for door in filter(None, doors):
            door.close()
        raise
    hosts.placed(rank, places, next((door.close for door in doors if door is not None), None))


def _await(here: Store, key: str, rank: int, size: int, timeout: timedelta, first: Callable[[], object] = bool) -> str:
    """The verdict, which the last one to come gives, or the first one who gives up: then for all who wait."""

    def waited() -> str:
        first()
        return _verdict(here, key, rank, size, timeout)

    try:
        verdict = within(timeout, waited)
    except RuntimeError as error:
        who = peers.account(range(size), closed=True)
        _lost(rank, error, who)
    if verdict.startswith("?"):
        fail("init", f"{verdict[1:]}.", fix="give each process its own rank and the same world size")
    if verdict.startswith("!"):
        what, whom, fix = verdict[1:].split("\n")
        fail("init", what, got=f"rank {rank} waits for {whom}" if whom else "", fix=fix, kind=CommError)
    return verdict


def _lost(rank: int, error: RuntimeError, who: str = "") -> NoReturn:
    what = f"rank {rank} lost the other ranks during set-up{': ' if who else '.'}{who}"
    fix = "look at the messages of rank 0, or of torchrun: it serves the store over which the ranks meet"
    fail("init", what, got=_first_line(error), fix=_FIRST_ONE if who else fix, kind=CommError)


def _verdict(here: Store, key: str, rank: int, size: int, timeout: timedelta) -> str:
    end, look, pause = time.monotonic() + timeout.total_seconds(), time.monotonic() + _SOON, 1e-3
    while not here.check([key]):
        now = time.monotonic()
        if now > look:
            look = now + _LOOK
            gone = _gone(here, key, rank, size)
            if gone:
                here.compare_set(key, "", f"!{_ranks(gone)} ended during set-up.\n{_ranks(gone)}\n{_FIRST_ONE}")
        if now >= end:
            here.compare_set(key, "", _late(here, key, size, timeout))
        elif size <= _FEW:
            time.sleep(min(pause, max(0.0, end - now)))
            pause = min(1.5 * pause, _PAUSE)
        else:
            with contextlib.suppress(RuntimeError):  # the time is up, or the store is gone, which a check tells
                here.wait([key], timedelta(seconds=max(1e-3, end - now)))
    verdict = here.get(key).decode()
    if verdict.startswith(("!", "?")):
        _hear(here, key, rank)
    return verdict


def _late(here: Store, key: str, size: int, timeout: timedelta) -> str:
    missing = [r for r in range(size) if not here.check([f"{key}/{r}"])]
    limit = f"within {timeout.total_seconds():g} s"
    if key == "go":
        what = f"only {size - len(missing)} of {size} ranks came {limit}."
        return f"!{what}\n{_ranks(missing)}\nstart as many processes as the world size says, or give a longer timeout="
    how = peers.account(missing)
    what = f"{_ranks(missing)} did not come through set-up {limit}{': ' if how else ''}{how}."
    return f"!{what}\n{_ranks(missing)}\n{_FIRST_ONE}"


def _gone(here: Store, key: str, rank: int, size: int) -> list[int]:
    """Those that had come to this meeting, have not come to this point, and will not."""
    if size > _FEW:
        return []
    signs = {r: here.get(f"go/{r}").decode() for r in range(size) if r != rank and here.check([f"go/{r}"])}
    awaited = [r for r in signs if key == "go" or not here.check([f"{key}/{r}"])]
    gone = [r for r in awaited if peers.ended(signs[r].split("\n", 1)[0])]
    return [] if here.check([key]) else gone


def _hear(here: Store, key: str, rank: int) -> None:
    """Who serves the store stays until the others have heard why it leaves."""
    here.add(f"{key}/heard", 1)
    end = time.monotonic() + _HEARING
    while rank == 0 and here.add(f"{key}/heard", 0) < here.add(f"{key}/came", 0) and time.monotonic() < end:
        time.sleep(0.01)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}"
