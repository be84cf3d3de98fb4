"""torch's process groups and the links over them, one for each set of ranks."""

from __future__ import annotations

import hashlib
import os

import torch.distributed as dist

from meshcomm import _torch
from meshcomm.errors import CommError, text
from meshcomm.runtime import exits, shared_memory, world
from meshcomm.runtime.detour import DetouredLink, DetouredOneHostLink, lacks_a_way
from meshcomm.runtime.one_host import Mail, OneHostLink, take_leave
from meshcomm.runtime.processes import FEW, ProcessLink
from meshcomm.runtime.shared_memory import HERE, Neighbours

__all__ = ["group_of", "link_of"]

_links: dict[tuple[int, ...], ProcessLink] = {}
_mails: dict[int, Mail] = {}


def link_of(ranks: tuple[int, ...]) -> ProcessLink:
    """The link of these ranks of the world in this order; its members call it together the first time."""
    if ranks not in _links:
        here = world.current()
        assert here is not None
        whole = ranks == tuple(range(here.size))
        digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        group = dist.group.WORLD if whole else _torch.new_group(ranks, f"meshcomm_{digest}", here.timeout)
        assert group is not None
        index = ranks.index(here.rank)
        near = world.neighbours_of(here, ranks) if _is_small_gloo(group, ranks) else None
        detours = lacks_a_way(dist.get_backend_config(group))
        if near is None:
            _links[ranks] = (DetouredLink if detours else ProcessLink)(group, ranks, index)
        else:
            _links[ranks] = link = (DetouredOneHostLink if detours else OneHostLink)(group, ranks, index)
            link.mail = _mail_of(near, ranks, index, here.timeout.total_seconds())
            link.mail.adopted = here.adopted
    return _links[ranks]


def _is_small_gloo(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> bool:
    return world.gloo_on_cpu(dist.get_backend_config(group)) and 1 < len(ranks) <= FEW


def _mail_of(near: Neighbours, ranks: tuple[int, ...], index: int, timeout: float) -> Mail:
    """The mailboxes of these ranks: those that they had, where a group is adopted again."""
    key = int.from_bytes(hashlib.sha256(f"{near.token} {ranks}".encode()).digest()[:7], "little")
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


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """torch's process group of these ranks."""
    return link_of(ranks).group


def _forget() -> None:
    take_leave([mail for mail in _mails.values() if exits.leaving() or not mail.adopted])
    # A reference to a process group that outlives destroy_process_group ends the interpreter with SIGABRT.
    for link in _links.values():
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
    for link in _links.values():
        vars(link).pop("mail", None)
    _mails.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
