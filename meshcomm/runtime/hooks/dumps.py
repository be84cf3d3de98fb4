"""The last collectives of each rank as files, on request, on SIGUSR1 and when a call's time is up.

The signal is caught in C (by faulthandler, which writes to a pipe), and a thread that reads the pipe writes the file:
so it works while the main thread waits inside of a backend.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from meshcomm.errors import fail
from meshcomm.runtime import recorder
from meshcomm.runtime.callsite import CallSite, called_in, is_ours
from meshcomm.runtime.process import forks
from meshcomm.runtime.recorder import Log, Record, Ring

FOLDER = "MESHCOMM_DUMP_DIR"
"""The variable of the environment that names the folder for dumps nobody asks for in Python."""
FORMAT = 1
_DEPTH = 40
"""The most frames of a thread that are written."""


def dump_collectives(folder: str | os.PathLike[str]) -> list[Path]:
    """Write the last 1000 collectives of this rank to a file, for ``python -m meshcomm explain``, which merges those of
    all ranks.

    Each call has its number in its group and in all, operation, reduce op, dtype, shape, when it began and ended, and
    its state: begun, queued on a device that has not come
    through it, completed, failed (and why) or dropped. Of calls under way, of those of in-process ranks and of
    those under guard also the line of the program. No communication: a rank can do it while others hang. On SIGUSR1 a
    rank does it by itself, even while it waits, unless the program has a handler of its own; the folder is then
    MESHCOMM_DUMP_DIR, or one that it prints. With MESHCOMM_DUMP_DIR set it does it when the time of a call is up too.

    Args:
        folder: where; made if it is not there. Each rank writes ``rank<number>.json``, and replaces the one before.

    Returns: the files written: this rank's; outside of a launch those of all ranks of the last launch in this process.

    Cost: some ms; no communication.

    Raises:
        MeshError: not a path; no rank has been in this process.
        OSError: it cannot be written.

    Example:
        >>> import tempfile, torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def main(folder):
        ...     mc.all_reduce(torch.ones(2), "dp", mesh=mesh)
        ...     return mc.dump_collectives(folder)[0].name
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mc.launch(main, ranks=2, args=(folder,))
        ['rank0.json', 'rank1.json']

    Source: the flight recorder of torch's NCCL backend.
    """
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        fail("dump_collectives", f"folder={folder!r} is not a path.", fix="the name of a folder, or a pathlib.Path")
    inside, own = recorder.ring_inside(), recorder.ring()
    if inside is not None:
        chosen = [inside]
    else:
        of_process = [own] if own is not None else []
        of_launch = list(recorder.rings_inside().values())
        ended = own is None or own.retired or not dist.is_initialized()  # its group is no more
        chosen = of_launch or of_process if ended else of_process
    if not chosen:
        fail("dump_collectives", "no rank has been in this process.", fix="call mc.init() or mc.make_mesh() first")
    return [_write(ring, Path(folder), "asked for") for ring in chosen]


def dump_on_time_out() -> Path | None:
    """Write the file of this process if the environment names a folder; where it is."""
    folder, ring = os.environ.get(FOLDER), recorder.ring()
    if not folder or ring is None:
        return None
    try:
        return _write(ring, Path(folder), "a call's time was up")
    except OSError:  # that error is not what matters
        return None


def _write(ring: Ring, folder: Path, why: str) -> Path:
    """Whoever reads meanwhile sees the whole of this or of the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"rank{ring.owner.rank}.json"
    content = json.dumps(_content(ring, why), indent=0)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=folder)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(content)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return target


# ------------------------------------------------------------------------------------------------------ the contents


def _content(ring: Ring, why: str) -> dict[str, Any]:
    logs = list(ring.logs)  # another thread may make an axis meanwhile, and drop the log of one that is gone
    calls = ring.calls(logs)
    places = {id(log): at for at, log in enumerate(logs)}
    total = sum(log.begun + log.messages for log in logs)
    under_way = _under_way(record for _, record in calls)
    offset = time.time() - time.monotonic()
    first = total - len(calls) + 1
    return {
        "format": FORMAT,
        "rank": ring.owner.rank,
        "world_size": ring.owner.size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "why": why,
        "wall": time.time(),
        "monotonic": time.monotonic(),
        "begun": total,
        "groups": [_group(log) for log in logs],
        "calls": [
            _call(places[id(log)], record, first + at, offset, under_way.get(id(record)))
            for at, (log, record) in enumerate(calls)
        ],
        "threads": _threads(ring),
    }


def _group(log: Log) -> dict[str, Any]:
    return {
        "title": log.title,
        "ranks": list(log.ranks),
        "index": log.index,
        "begun": log.begun,
        "messages": log.messages,
        "timeout": log.seconds,
        "axes": [{"name": axis.name, "coordinate": axis.coordinate} for axis in log.axes],
    }


def _call(group: int, record: Record, number: int, offset: float, found: tuple[str, CallSite] | None) -> dict[str, Any]:
    call, ended = recorder.call_of(record), record[recorder.ENDED]
    public, site = found or ("", None)
    if call is not None:
        public, site = call.what, call.site or site
    return {
        "all": number,
        "group": group,
        "number": record[recorder.NUMBER],
        "what": record[recorder.WHAT],
        "called": public or record[recorder.WHAT],
        "words": recorder.text_of(record, public),
        "op": record[recorder.OP],
        "dtype": None if record[recorder.DTYPE] is None else str(record[recorder.DTYPE]).removeprefix("torch."),
        "shape": list(record[recorder.SHAPE]),
        "root": record[recorder.ROOT],
        "state": recorder.state_of(record),
        "why": ended if isinstance(ended, str) else "",
        "began": record[recorder.BEGAN] + offset,
        "began_monotonic": record[recorder.BEGAN],
        "ended": ended + offset if isinstance(ended, float) else None,
        "site": "" if site is None else str(site),
        "path": "" if site is None else site.file,
    }


def _under_way(records: Iterable[Record]) -> dict[int, tuple[str, CallSite]]:
    """The public function and the line of the calls that threads are in, by record: a thread is in its last one."""
    last = {record[recorder.THREAD]: record for record in records if record[recorder.ENDED] is None}
    frames = sys._current_frames()
    found = {id(record): called_in(frames[thread]) for thread, record in last.items() if thread in frames}
    return {key: each for key, each in found.items() if each is not None}


def _threads(ring: Ring) -> list[dict[str, Any]]:
    """Where each thread is: of a rank in this process its own."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    if ring is recorder.ring():
        main = threading.main_thread()
    else:
        name = f"meshcomm rank {ring.owner.rank}"
        threads = {ident: thread for ident, thread in threads.items() if thread.name == name}
        main = next(iter(threads.values()), threading.main_thread())
    return [
        {
            "name": thread.name,
            "main": thread is main,
            "frames": [_frame(*place) for place in itertools.islice(traceback.walk_stack(top), _DEPTH)],
        }
        for ident, top in sys._current_frames().items()
        if (thread := threads.get(ident)) is not None and thread.name != _NAME
    ]


def _frame(frame: FrameType, line: int) -> dict[str, Any]:
    path = frame.f_code.co_filename
    return {
        "site": f"{os.path.basename(path)}:{line}",
        "in": frame.f_code.co_name,
        "user": not is_ours(path),
    }


# -------------------------------------------------------------------------------------------------------- the signal

_NAME = "meshcomm dumps"
_listening: list[int] = []


def listen(rank: int, size: int) -> None:
    """This process is a rank: write its file on SIGUSR1 from now on, if nobody else has a handler for that."""
    recorder.own_ring(recorder.Owner(rank, size))
    if os.getpid() in _listening or not _is_free() or threading.current_thread() is not threading.main_thread():
        return
    ears, mouth = os.pipe()
    os.set_blocking(mouth, False)
    try:
        faulthandler.register(signal.SIGUSR1, file=mouth, all_threads=False, chain=False)
    except (AttributeError, RuntimeError, ValueError, OSError):
        os.close(ears)
        os.close(mouth)
        return
    _listening.append(os.getpid())
    threading.Thread(target=_hear, args=(ears,), name=_NAME, daemon=True).start()


def _is_free() -> bool:
    """Whether the signal would end the process."""
    if not hasattr(signal, "SIGUSR1") or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return False
    try:
        with open("/proc/self/status") as file:  # handlers that Python does not know of
            lines = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return True
    bit = 1 << (signal.SIGUSR1 - 1)
    return not any(int(lines.get(name, "0").strip(), 16) & bit for name in ("SigCgt", "SigIgn"))


def _hear(ears: int) -> None:
    while os.read(ears, 2**16):
        time.sleep(0.05)  # one signal may take several writes
        with contextlib.suppress(BlockingIOError):
            os.set_blocking(ears, False)
            while os.read(ears, 2**16):
                pass
        os.set_blocking(ears, True)
        with contextlib.suppress(Exception):
            _on_signal()


def _on_signal() -> None:
    ring = recorder.ring()
    if ring is None:
        return
    folder = os.environ.get(FOLDER)
    chosen = Path(folder) if folder else _own_folder()
    try:
        path = str(_write(ring, chosen, "SIGUSR1"))
    except OSError as error:
        path = f"not written: {error}"
    if not folder or path.startswith("not written"):
        sys.stderr.write(f"meshcomm: rank {ring.owner.rank}: the last collectives: {path}\n")
        sys.stderr.flush()


def _own_folder() -> Path:
    """One that the ranks of a launch on this machine have in common, and nobody else can write to."""
    folder = Path(tempfile.gettempdir()) / f"meshcomm-{os.getuid()}-{os.getppid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        if not folder.is_symlink() and facts.st_uid == os.getuid() and not facts.st_mode & 0o022:
            return folder
    return Path(tempfile.mkdtemp(prefix="meshcomm-"))


@forks.in_every_fork
def _forked() -> None:
    # The pipe is the parent's: what is signalled to the child is not its business.
    if _listening:
        _listening.clear()
        faulthandler.unregister(signal.SIGUSR1)
