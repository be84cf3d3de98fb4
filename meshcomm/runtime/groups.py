"""torch's process groups and the links over them, one for each set of ranks and time-out."""

from __future__ import annotations

import hashlib
import importlib
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshcomm import _torch
from meshcomm.errors import CommError, text
from meshcomm.runtime import exits, recorder, shared_memory, world
from meshcomm.runtime.detour import DetouredLink, DetouredOneHostLink, lacks_a_way
from meshcomm.runtime.one_host import Mail, OneHostLink, take_leave
from meshcomm.runtime.processes import FEW, ProcessLink
from meshcomm.runtime.shared_memory import HERE, Neighbours
from meshcomm.runtime.wrapped import WrappedLink, bare

__all__ = ["group_of", "link_of"]

_links: dict[tuple[tuple[int, ...], timedelta], ProcessLink | WrappedLink] = {}
_mails: dict[int, Mail] = {}


def link_of(ranks: tuple[int, ...], timeout: timedelta | None = None) -> ProcessLink | WrappedLink:
    """The link of these ranks of the world in this order, with this time-out or the world's; its members call it
    together the first time.
    """
    here = world.current()
    assert here is not None
    limit = here.timeout if timeout is None else timeout
    if (ranks, limit) not in _links:
        name, guard = f"{ranks} {limit.total_seconds()}", _guard_of(here)
        if guard is None:
            _links[ranks, limit] = _made(here, ranks, limit)
        else:
            guard.agree_to_make(name, ranks, limit.total_seconds())
            _links[ranks, limit] = guard.under_guard(_made(here, ranks, limit), name, limit.total_seconds())
    return _links[ranks, limit]


def _guard_of(here: world.ProcessWorld) -> Any:
    """What guards links, imported where that is asked for; None elsewhere."""
    if here.backend == "fake" or here.size == 1:
        return None
    if not _links:
        world.agree_on_guard(here)
    if not here.guard:
        return None
    if not _guards:
        _guards.append(importlib.import_module("meshcomm.runtime.guard_setup"))
    _guards[0].begin(here)
    return _guards[0]


_guards: list[Any] = []


def _made(here: world.ProcessWorld, ranks: tuple[int, ...], limit: timedelta) -> ProcessLink:
    usual = limit == here.timeout
    name = repr(ranks) if usual else f"{ranks} {limit.total_seconds()}"
    if usual and ranks == tuple(range(here.size)):
        group = dist.group.WORLD
    else:
        group = _torch.new_group(ranks, f"meshcomm_{hashlib.sha256(name.encode()).hexdigest()[:16]}", limit)
    assert group is not None
    index = ranks.index(here.rank)
    ring = recorder.own_ring(recorder.Owner(here.rank, here.size))
    log = ring.log(ranks, index, None if usual else limit.total_seconds())
    near = world.neighbours_of(here, ranks) if _is_small_gloo(group, ranks) else None
    detours = lacks_a_way(dist.get_backend_config(group))
    if near is None:
        return (DetouredLink if detours else ProcessLink)(group, ranks, index, log)
    link = (DetouredOneHostLink if detours else OneHostLink)(group, ranks, index, log)
    link.mail = _mail_of(near, name, index, limit.total_seconds())
    link.mail.adopted = here.adopted
    return link


def _is_small_gloo(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> bool:
    return world.gloo_on_cpu(dist.get_backend_config(group)) and 1 < len(ranks) <= FEW


def _mail_of(near: Neighbours, name: str, index: int, timeout: float) -> Mail:
    """The mailboxes of a group of this name: those that it had, where it is adopted again."""
    key = int.from_bytes(hashlib.sha256(f"{near.token} {name}".encode()).digest()[:7], "little")
    if key not in _mails:
        leases = [address.lease for address in near.addresses]
        try:
            others = [None if i == index else shared_memory.neighbour(lease) for i, lease in enumerate(leases)]
            _mails[key] = Mail(key, index, others, timeout)
        except OSError as error:
            what = f"the memory of another process on this machine cannot be read: {error.strerror or error}."
            raise CommError(text("mesh", what, fix=f"set {shared_memory.SWITCH}=0 for all processes")) from error
    _mails[key].own.say(HERE)
    return _mails[key]


def group_of(ranks: tuple[int, ...], timeout: timedelta | None = None) -> dist.ProcessGroup:
    """torch's process group of these ranks."""
    link: ProcessLink = bare(link_of(ranks, timeout))
    return link.group


def _forget() -> None:
    for link in _links.values():
        if isinstance(link, WrappedLink):
            link.end()
    for guard in _guards:
        guard.end()
    recorder.retire()
    take_leave([mail for mail in _mails.values() if exits.leaving() or not mail.adopted])
    # A reference to a process group that outlives destroy_process_group ends the interpreter with SIGABRT.
    for link in map(bare, _links.values()):
        if link.walker is not None:
            link.walker.end()
            link.walker = None
        if isinstance(link, OneHostLink):
            del link.mail
        del link.group
    _links.clear()
    for key in [key for key, mail in _mails.items() if not mail.adopted]:
        del _mails[key]


world.on_shutdown(_forget)


def _forked() -> None:
    # The child is another process: what it does is not to be taken for its parent's.
    for link in map(bare, _links.values()):
        vars(link).pop("mail", None)
    _mails.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
