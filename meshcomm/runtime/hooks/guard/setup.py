"""How the guard begins and ends: where it writes, and how it knows that a rank is gone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from meshcomm import _torch, errors
from meshcomm.errors import CommError, text
from meshcomm.runtime.callsite import call_site
from meshcomm.runtime.hooks.guard import guard as guards
from meshcomm.runtime.hooks.guard.boards import Group, SharedShelf, StoreShelf
from meshcomm.runtime.hooks.guard.guard import Guard, Wait
from meshcomm.runtime.hooks.guard.mail import GuardedByMail, MailRoom
from meshcomm.runtime.hooks.guard.store import PatientStore, set_store, the_store
from meshcomm.runtime.hooks.guard.stored import GuardedAtTheStore, StoreRoom
from meshcomm.runtime.hooks.stack import put_on
from meshcomm.runtime.process import home, neighbours, table
from meshcomm.runtime.recorder import Log, Owner
from meshcomm.runtime.transports.process_group import ProcessLink

_PAUSE = 2e-3
_HERE, _LEAVING = "here", "leaving"
"""What a rank says that has come to make a group: that it waits for the others; that it gives up, or will see."""
_LOOK = 0.5
"""Seconds after which the thread that watches other processes sees whether it is still wanted."""


def is_on() -> bool:
    """Whether this process has a guard."""
    return guards.current() is not None


def begin(here: Owner, seconds: float, prefix: str, near: neighbours.Neighbours | None) -> None:
    """The guard of this process, which writes at the store under this prefix, or into memory that it shares with those
    who are ``near``. ``seconds``: for which it waits for the store.
    """
    set_store(PatientStore(_torch.default_store(), seconds))
    if near is not None:
        leases = [address.lease for address in near.addresses]
        others = [None if i == here.rank else neighbours.neighbour(lease) for i, lease in enumerate(leases)]
        made = Guard(here.rank, here.size, SharedShelf(here.rank, others), _is_there, _ended_near(others))
    else:
        shelf = StoreShelf(prefix, here.rank)
        made = Guard(here.rank, here.size, shelf, _is_there, lambda rank: _ended_afar(f"{prefix}/ended/{rank}"))
    made.at = prefix
    guards.set_current(made)
    if near is None:
        _watch_neighbours(prefix, here, made)
    made.begin()
    errors.listeners.append(guards.failed)
    home.listeners.append(guards.home)


def agree_to_make(name: str, ranks: tuple[int, ...], seconds: float) -> None:
    """Before these ranks make a group together, which they could only wait for: all of them have come to it."""
    guard = guards.current()
    if guard is None:
        return
    prefix = f"{place_of(name)}/making"
    store, keys = the_store(), {rank: f"{prefix}/{rank}" for rank in ranks if rank != guard.rank}
    own = f"{prefix}/{guard.rank}"
    shown = f"{list(ranks[:8])}{' and more' if len(ranks) > 8 else ''}"
    words = f"the set-up of the group of ranks {shown} at {call_site()}"
    wait = Wait(Group(0, ranks, prefix), 1, words, guard.name(guard.rank), keys)
    start = last = time.monotonic()
    store.set(own, _HERE)
    try:
        with guard.waiting(wait, for_program=True) as long:
            while not _all_stay(keys.values()):
                time.sleep(_PAUSE)
                if time.monotonic() - last < guards.LONG:
                    continue
                last = time.monotonic()
                long()
                left = [rank for rank, key in keys.items() if not store.check([key])]
                reason = left and (guard.why_never(wait, left, sure=True) or (last - start > seconds and "time is up"))
                if reason and _is_left(own, keys.values()):
                    got = f"{reason}; {guard.where_all_are()}"
                    fix = "an axis, or a tuple of axes in this order, is used for the first time by all of its ranks"
                    raise CommError(text("mesh", "not all ranks come to set up a group.", got=got, fix=fix))
    except CommError:
        raise
    except BaseException:  # Ctrl-C
        _is_left(own, keys.values())
        raise


def _is_left(own: str, keys: Iterable[str]) -> bool:
    """Whether this rank can give up, for no other one goes on: who does has seen all, and after that nobody leaving."""
    store = the_store()
    store.set(own, _LEAVING)
    if all(store.check([key]) for key in keys):
        store.set(own, _HERE)
        return False
    store.delete_key(own)
    return True


def _all_stay(keys: Iterable[str]) -> bool:
    """Whether all have come, and then none of them was about to give up."""
    store = the_store()
    return all(store.check([key]) for key in keys) and all(store.peek(key) == _HERE.encode() for key in keys)


def put_under_guard(link: ProcessLink, name: str, timeout: float) -> None:
    """The link of the sequence of calls of this name, if the guard is on."""
    guard = guards.current()
    if guard is None:
        return
    shared = link.shares_memory and isinstance(guard.shelf, SharedShelf)
    digest, at = hashlib.sha256(name.encode()).digest(), place_of(name)
    log, inner = link.log, Log(link.ranks, link.index)
    inner.title, inner.axes, inner.meeting = log.title, log.axes, log.meeting
    link.note_in(inner)
    group = Group(link.mail.key if shared else int.from_bytes(digest[:7], "little"), link.ranks, at)
    near: Any = link
    if shared:
        put_on(link, GuardedByMail(MailRoom(near, guard, group, timeout), log))
    else:
        put_on(link, GuardedAtTheStore(StoreRoom(link.index, guard, group, timeout), log))


def place_of(name: str) -> str:
    """Of the sequence of this name, at the store."""
    guard = guards.current()
    assert guard is not None
    return f"{guard.at}/{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def end() -> None:
    """This rank makes no more calls."""
    guard = guards.current()
    if guard is not None:
        with contextlib.suppress(RuntimeError):  # the store may be gone
            guard.leave()
        errors.listeners.remove(guards.failed)
        home.listeners.remove(guards.home)
        guards.set_current(None)
        set_store(None)


def _forked() -> None:
    """What a fork of a rank is refused is none of the others' business."""
    if guards.current() is not None:
        errors.listeners.remove(guards.failed)
        home.listeners.remove(guards.home)
        guards.set_current(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _is_there(key: str) -> bool:
    return the_store().check([key])


def _ended_near(others: list[neighbours.Neighbour | None]) -> Callable[[int], str]:
    def ended(rank: int) -> str:
        other = others[rank]
        return f"has ended (process {other.pid})" if other is not None and other.is_gone() else ""

    return ended


def _ended_afar(key: str) -> str:
    return the_store().peek(key).decode()


# ------------------------------------------------------------------------- processes that do not share their memory


def _watch_neighbours(prefix: str, here: Owner, guard: Guard) -> None:
    """Tell everybody, at the store, of processes on this machine that end: nobody else would know."""
    machine = table.machine()
    if not machine or not hasattr(os, "pidfd_open"):
        return
    with contextlib.suppress(OSError):
        store = _torch.default_store()
        store.set(f"{prefix}/process/{here.rank}", json.dumps([machine, os.getpid(), table.began(os.getpid())]))
        thread = threading.Thread(target=_watch, args=(store, prefix, here, guard), name="meshcomm watch", daemon=True)
        thread.start()


def _watch(store: dist.Store, prefix: str, here: Owner, guard: Guard) -> None:  # type: ignore[name-defined]
    waiting = set(range(here.size)) - {here.rank}
    poll, watched = select.poll(), dict[int, tuple[int, int]]()
    me = os.getpid()
    try:
        while guards.current() is guard and os.getpid() == me:
            for rank in [rank for rank in waiting if store.check([f"{prefix}/process/{rank}"])]:
                waiting.discard(rank)
                machine, pid, started = json.loads(store.get(f"{prefix}/process/{rank}"))
                if machine == table.machine():
                    fd = _opened(pid, started)
                    if fd is None:
                        _tell(store, prefix, rank, pid)
                    else:
                        watched[fd] = rank, pid
                        poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(1000 * (0.05 if waiting else _LOOK)):
                poll.unregister(fd)
                os.close(fd)
                _tell(store, prefix, *watched.pop(fd))
    except (RuntimeError, OSError):  # the store is gone
        pass
    for fd in watched:
        os.close(fd)


def _opened(pid: int, started: int) -> int | None:
    try:
        fd = os.pidfd_open(pid)
        if table.began(pid) == started:
            return fd
        os.close(fd)
    except OSError:
        pass
    return None


def _tell(store: dist.Store, prefix: str, rank: int, pid: int) -> None:  # type: ignore[name-defined]
    store.set(f"{prefix}/ended/{rank}", f"has ended (process {pid})")
