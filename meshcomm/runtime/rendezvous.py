"""How the processes of one launch find each other: a store that all reach, and a count that says when all are there.

No port need be known beforehand, except where the user or the launcher names one (MASTER_PORT, tcp://).
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from meshcomm.errors import CommError, MeshError, fail

__all__ = ["file_store", "join", "launch_key", "local_store", "loopback_server", "ready", "tcp_store", "this_host"]

LOOPBACK = "127.0.0.1"

# A store outlives shutdown(), so that an init() that follows cannot reach the dying server of the one before.
_stores: dict[str, Store] = {}


def this_host() -> str:
    """What processes on one machine have in common: its name, and where there is one the id of its last boot."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return socket.gethostname()


# ------------------------------------------------------------------------------------------------------------- stores


def tcp_store(host: str, port: int, *, serve: bool, timeout: timedelta) -> Store:
    """The store at ``host:port``, which this process serves or reaches."""
    key = f"tcp://{host}:{port}"
    if key not in _stores:
        _stores[key] = _served(host, port, timeout) if serve else _reached(host, port, timeout)
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


def _served(host: str, port: int, timeout: timedelta) -> TCPStore:
    # We bind the port ourselves: the error is then ours, and a loopback address is not offered to the whole network.
    try:
        listener = _listener(host, port)
    except OSError as error:
        what = f"rank 0 cannot serve port {port} for the other ranks: {error.strerror}."
        fix = "another program has it: give another port by MASTER_PORT, or by init's port= or init_method="
        fail("init", what, got=f"{host}:{port}", fix=fix, kind=CommError)
    return _store_on(listener, host, timeout)


def _listener(host: str, port: int) -> socket.socket:
    if host == "localhost":
        return socket.create_server((LOOPBACK, port), backlog=1024)
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_loopback:
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def _store_on(listener: socket.socket, host: str, timeout: timedelta) -> TCPStore:
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _reached(host: str, port: int, timeout: timedelta) -> TCPStore:
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        what = f"no answer from rank 0's store at {host}:{port} within {timeout.total_seconds():g} s."
        fix = "start all ranks; check MASTER_ADDR and MASTER_PORT, the firewall, and rank 0's own messages"
        fail("init", what, got=_first_line(error), fix=fix, kind=CommError)


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
    secret = secrets.token_hex(16)
    store.set("meshcomm/secret", secret)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(f"{store.port} {secret}")
    draft.replace(path)
    _stores[key] = store
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
            store = TCPStore(
                LOOPBACK, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=left)
            )
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
        pid = _field(pid, 4)
    return f"{pid} {_field(pid, 22)}"


def _field(pid: int, number: int) -> int:
    """A field of /proc/PID/stat by its number in proc(5): 4 is the parent; 22, the start, tells reused pids apart."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[number - 3])
    except (OSError, IndexError, ValueError):
        return 0


# -------------------------------------------------------------------------------------------------------------- meeting


def join(store: Store, rank: int, size: int, card: str, timeout: timedelta) -> tuple[Store, list[str]]:
    """Wait until all ``size`` ranks are here.

    Returns the part of the store that belongs to this meeting, and every rank's ``card``. Meetings in one store are
    told apart by counting arrivals: nobody leaves before all have come, so ``init`` may follow ``shutdown`` in a
    store that lives on (torchrun's does).
    """
    meeting = (store.add("meshcomm/arrivals", 1) - 1) // size
    here = PrefixStore(f"meshcomm/{meeting}", store)
    agreed = here.compare_set("size", "", str(size)).decode()
    if agreed != str(size):
        here.set("go", f"world sizes differ: some ranks were started with {agreed}, rank {rank} with {size}")
    elif here.add(f"rank/{rank}", 1) > 1:
        here.set("go", f"two processes are rank {rank} of {size}")
    else:
        here.set(f"card/{rank}", card)
        if here.add("arrived", 1) == size:
            here.set("go", "ok")
    _await(here, "go", rank, size, timeout)
    verdict = here.get("go").decode()
    if verdict != "ok":
        raise MeshError(f"meshcomm.init: {verdict}.\n  fix: give each process its own rank and the same world size")
    return here, [card.decode() for card in here.multi_get([f"card/{r}" for r in range(size)])]


def agreed(here: Store, rank: int, size: int, mine: bool, timeout: timedelta) -> bool:
    """Whether all ranks say yes."""
    if not mine:
        here.set("no", "1")
    if here.add("said", 1) == size:
        here.set("all said", "no" if here.check(["no"]) else "yes")
    _await(here, "all said", rank, size, timeout)
    return here.get("all said") == b"yes"


def ready(here: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Wait until all ranks are past set-up: only then may rank 0 end, and its store with it."""
    if here.add("ready", 1) == size:
        here.set("all ready", "ok")
    _await(here, "all ready", rank, size, timeout)


def _await(here: Store, key: str, rank: int, size: int, timeout: timedelta) -> None:
    try:
        here.wait([key], timeout)
        return
    except RuntimeError as error:
        reason = _first_line(error)
    missing: list[int] = []
    with contextlib.suppress(RuntimeError):
        missing = [r for r in range(size) if not here.check([f"rank/{r}"])]
    if not missing:
        fail("init", f"rank {rank} lost the other ranks during set-up.", got=reason, kind=CommError)
    shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    fail(
        "init",
        f"only {size - len(missing)} of {size} ranks came within {timeout.total_seconds():g} s.",
        got=f"rank {rank} waits for rank {shown}",
        fix="start as many processes as the world size says, or give a longer timeout=",
        kind=CommError,
    )
