"""The links of the axes of meshes among processes: each has a sequence of calls for itself, as after MPI_Comm_dup.

Two axes between the same ranks may be used by two threads, which come to their calls in another order on each rank. So
what orders calls, a mailbox or a process group of torch's, belongs to one axis of one mesh. What carries messages need
not: each one says whose it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch.distributed as dist

from meshcomm import _torch
from meshcomm.errors import CommError, text
from meshcomm.runtime import recorder
from meshcomm.runtime.health import attendance, lateness, overdue
from meshcomm.runtime.hooks import dumps
from meshcomm.runtime.process import boxes, exits, forks, neighbours
from meshcomm.runtime.process.boxes import HERE
from meshcomm.runtime.process.neighbours import Neighbours
from meshcomm.runtime.start import membership, world
from meshcomm.runtime.transports.detour import DetouredLink, lacks_a_way
from meshcomm.runtime.transports.hosts.arrangement import MOST, Arrangement, arrangement_of
from meshcomm.runtime.transports.hosts.link import HostsLink
from meshcomm.runtime.transports.hosts.near import NearLink
from meshcomm.runtime.transports.process_group import FEW, ProcessLink
from meshcomm.runtime.transports.shared.leaving import retire, take_leave
from meshcomm.runtime.transports.shared.mailbox import Mail
from meshcomm.runtime.transports.shared.transport import OneHostLink
from meshcomm.runtime.transports.turns import Channel, Family, Pool, Turn

_FOR_THE_WIRE = 4.5
"""Seconds that a rank has to tell the others of its machine why nothing came to it from another one: the one by which
gloo is late, and three for asking; what is left of six is for those who then ask themselves.
"""
_families: dict[tuple[tuple[int, ...], timedelta], Family] = {}
_pools: dict[tuple[tuple[int, ...], timedelta], Pool] = {}
_making: dict[tuple[tuple[int, ...], timedelta], threading.Lock] = {}
_links: weakref.WeakSet[ProcessLink] = weakref.WeakSet()
_mails: dict[int, Mail] = {}
_adopting = threading.RLock()
_Left = tuple[weakref.ref[Family], str, str, bool]
_let_go: deque[_Left] = deque()
"""Sequences that this rank needs no more, of which there may be something at the store."""
_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[Any]] = weakref.WeakKeyDictionary()
"""How many of each kind have been made, while the ranks are together."""


class DetouredHostsLink(DetouredLink, HostsLink):
    """Two levels, and by way of another device what lies elsewhere."""


class DetouredOneHostLink(DetouredLink, OneHostLink):
    """Shared memory, and by way of another device what lies elsewhere."""


def identity(shape: Mapping[str, int], ranks: tuple[int, ...], number: int) -> str:
    """Of a mesh: its axes, its ranks, and the how manieth of these it is."""
    axes = ",".join(f"{name}={size}" for name, size in shape.items())
    return f"mesh {axes} of ranks {','.join(map(str, ranks))} #{number}"


def identify(shape: Mapping[str, int], ranks: tuple[int, ...]) -> str:
    """The identity of a mesh that is made now, the same on all of its ranks."""
    key = (*shape.items(), ranks)
    made = _meshes.setdefault(dist.group.WORLD, Counter())  # type: ignore[arg-type]
    made[key] += 1
    return identity(shape, ranks, made[key])


def link_of(ranks: tuple[int, ...], timeout: timedelta | None, mesh: str, axis: tuple[str, ...]) -> ProcessLink:
    """A link for this axis of the mesh of this identity, between these ranks of the world in this order, with this
    time-out or the world's.
    """
    forks.refuse_if_forked("mesh")
    here = world.current()
    assert here is not None
    limit = here.timeout if timeout is None else timeout
    family, guard = _family_of(here, ranks, limit), _guard_of(here)
    name = f"{mesh}, {limit.total_seconds():g} s: {','.join(axis)} over {','.join(map(str, ranks))}"
    made = _made(here, family, name)
    _links.add(made)
    if guard is not None:
        guard.put_under_guard(made, name, limit.total_seconds())
    _keep(here, made, family, name, made.place if guard is None else guard.place_of(name))
    return made


def _keep(here: membership.ProcessWorld, link: ProcessLink, family: Family, name: str, barrier: str) -> None:
    """Until the link goes; those that have gone are seen to when another one is made: here nobody waits for a store."""
    while _let_go:
        held, channel, met, alone = _let_go.popleft()
        gone = held()
        if gone is None:
            continue
        with contextlib.suppress(RuntimeError):  # a store that is lost is told of by the next call
            gone.forget(channel, alone)
            attendance.forget(met, len(gone.ranks))
    if not here.adopted and here.backend != "fake":
        cast(_Hold, link.hold).left = family.ref, name, barrier, not link.shares_memory


def _family_of(here: membership.ProcessWorld, ranks: tuple[int, ...], limit: timedelta) -> Family:
    """The first time its ranks come together."""
    key = ranks, limit
    with _making.setdefault(key, threading.Lock()):
        if key not in _families:
            guard = _guard_of(here)
            if guard is not None:
                guard.agree_to_make(f"{ranks} {limit.total_seconds()}", ranks, limit.total_seconds())
            _families[key] = _new_family(here, ranks, limit)
    return _families[key]


def _new_family(here: membership.ProcessWorld, ranks: tuple[int, ...], limit: timedelta) -> Family:
    meeting = membership.meeting_number(here)

    def at(limit: timedelta) -> str:
        name = repr(ranks) if limit == here.timeout else f"{ranks} {limit.total_seconds()}"
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        return "" if meeting is None else f"meshcomm/turns/{meeting}/{digest}"

    # Communicators of an accelerator are large: axes with other time-outs use the same ones, one after the other.
    shared = here.timeout if meeting is not None and _torch.shares_communicators(here.backend) else limit
    first = dist.group.WORLD if shared == here.timeout and ranks == tuple(range(here.size)) else None
    pool = _pools.setdefault(
        (ranks, shared), Pool(ranks, ranks.index(here.rank), shared, at(shared), first, here.device)
    )
    return Family(pool, limit, at(limit))


def _guard_of(here: membership.ProcessWorld) -> Any:
    """What guards links, imported where that is asked for; None elsewhere."""
    if here.backend == "fake" or here.size == 1:
        return None
    if not _families:
        membership.agree_on_guard(here)
    if not here.guard:
        return None
    if not _guards:
        _guards.append(importlib.import_module("meshcomm.runtime.hooks.guard.setup"))
    guard = _guards[0]
    if not guard.is_on():
        at, near = f"meshcomm/guard/{membership.meeting_number(here)}", membership.neighbours_of(here, range(here.size))
        guard.begin(recorder.Owner(here.rank, here.size), here.timeout.total_seconds(), at, near)
    return guard


_guards: list[Any] = []


def _guard_from_the_first(rank: int, size: int) -> None:
    """A rank that has made no mesh when it returns is told of, too. Who adopts a group would wait for the others."""
    here = world.current()
    if here is not None and not here.adopted:
        _guard_of(here)


def _made(here: membership.ProcessWorld, family: Family, name: str) -> ProcessLink:
    group, ranks, index, limit = family.base, family.ranks, family.index, family.limit
    ring = recorder.own_ring(recorder.Owner(here.rank, here.size))
    seconds = None if limit == here.timeout else limit.total_seconds()
    log = ring.log(ranks, index, name, seconds, membership.meeting_number(here))
    near, hosts = _near_of(here, family)
    args = group, ranks, index, log, name
    link: ProcessLink
    if lacks_a_way(dist.get_backend_config(group)):
        detoured = DetouredHostsLink if hosts is not None else DetouredLink if near is None else DetouredOneHostLink
        link = detoured(*args, own=here.device)
    else:
        link = (HostsLink if hosts is not None else ProcessLink if near is None else OneHostLink)(*args)
    link.hold = hold = _Hold(log, family, name)
    link.makers |= {"turn": hold.turn, "channel": hold.channel}
    link.numbers = family.numbers
    if link.nccl:
        overdue.watch(log, limit.total_seconds())
    if near is not None and hosts is not None and isinstance(link, HostsLink):
        own = hosts.hosts[hosts.host_of(index)]
        those = near._replace(addresses=tuple(near.addresses[i] for i in own))
        among = group, tuple(ranks[i] for i in own), own.index(index)
        parts = []
        for when in ("early", "late"):
            part = NearLink(*among, recorder.Log(*among[1:], seconds), f"{name}, {when} on {own}")
            part.log.title, part.log.meeting, part.log.axes = log.title, log.meeting, log.axes
            part.on_axis, part.axis_log, part.hold = own, log, hold
            patience = limit.total_seconds() + _FOR_THE_WIRE
            part.makers["mail"] = partial(_mail_of, those, part.name, part.index, patience, here.adopted, hold)
            _links.add(part)
            parts.append(part)
        link.meet_in(hosts, *parts)
    elif near is not None:
        link.makers["mail"] = hold.mail
    return link


def _near_of(here: membership.ProcessWorld, family: Family) -> _Near:
    """Where those are that this rank may share memory with, and how they are spread if not all are on its machine."""
    known = _near.get(family)
    if known is None or known[0] is not here.neighbours:
        known = _near[family] = here.neighbours, _found_near(here, family.base, family.ranks)
    return known[1]


_Near = tuple[Neighbours | None, Arrangement | None]
_near: weakref.WeakKeyDictionary[Family, tuple[object, _Near]] = weakref.WeakKeyDictionary()
"""What was found, and of which neighbours of this process."""


def _found_near(
    here: membership.ProcessWorld, group: dist.ProcessGroup, ranks: tuple[int, ...]
) -> tuple[Neighbours | None, Arrangement | None]:
    """All ranks know the same, and so come to the same."""
    if not 1 < len(ranks) <= FEW * MOST or not membership.gloo_on_cpu(dist.get_backend_config(group)):
        return None, None
    near = membership.addresses_of(here, ranks)
    if near is None or near.share():
        return (near if len(ranks) <= FEW else None), None
    hosts = arrangement_of([address.machine for address in near.addresses])
    return (None if hosts is None else near), hosts


class _Hold:
    """Lasts as long as one of the forms of a link, and makes what that asks for. It has no more than a reference to
    what has a group of torch's: one that outlives the end of the interpreter waits for what is under way.
    """

    __slots__ = ("__weakref__", "_family", "_log", "_name", "left", "limit")
    let_go = _let_go
    """A part of the class, for a hold may be the last to go."""

    def __init__(self, log: recorder.Log, family: Family, name: str) -> None:
        self._log, self._family, self._name, self.limit = log, family.ref, name, family.limit.total_seconds()
        self.left: _Left | None = None
        """What there may be at the store once it has gone."""

    def turn(self) -> Turn:
        """As the family."""
        return self._there().turn(self._name)

    def channel(self) -> Channel:
        """As the family."""
        return self._there().channel(self._name)

    def mail(self) -> Mail:
        """Of a link on one machine."""
        here, family = world.current(), self._there()
        assert here is not None
        near, _ = _near_of(here, family)
        assert near is not None
        return _mail_of(near, self._name, family.index, family.limit.total_seconds(), here.adopted, self)

    def _there(self) -> Family:
        family = self._family()
        assert family is not None  # as long as there are groups; then nobody asks
        return family

    def __del__(self) -> None:
        self._log.over = True
        if self.left is not None:
            self.let_go.append(self.left)


def _mail_of(near: Neighbours, name: str, index: int, timeout: float, adopted: bool, hold: _Hold) -> Mail:
    """The mailboxes of the sequence of this name."""
    key = int.from_bytes(hashlib.sha256(f"{near.token} {name}".encode()).digest()[:7], "little")
    with _adopting:  # or one thread would retire what another one has just taken over
        for other, mail in _mails.copy().items():  # at once, for other threads make theirs
            if other != key and mail.is_over() and (not mail.adopted or boxes.arena().is_crowded()):
                retire(mail)
                _mails.pop(other, None)
        if key in _mails:  # of a group that is adopted again
            _mails[key].user = weakref.ref(hold)
            _mails[key].own.say(HERE)
            return _mails[key]
    leases = [address.lease for address in near.addresses]
    try:
        others = [None if i == index else neighbours.neighbour(lease) for i, lease in enumerate(leases)]
        mail = Mail(key, index, others, timeout)
    except OSError as error:
        what = f"the memory of another process on this machine cannot be read: {error.strerror or error}."
        raise CommError(text("mesh", what, fix=f"set {neighbours.SWITCH}=0 for all processes")) from error
    mail.adopted, mail.user = adopted, weakref.ref(hold)
    mail.own.say(HERE)
    _mails[key] = mail
    return mail


def group_of(ranks: tuple[int, ...], timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The process group of torch's that these ranks have."""
    forks.refuse_if_forked("mesh")
    here = world.current()
    assert here is not None
    return _family_of(here, ranks, here.timeout if timeout is None else timeout).base


def _forget() -> None:
    for hook in [hook for link in list(_links) for hook in link.hooks]:
        hook.end()
    for guard in _guards:
        guard.end()
    recorder.retire()
    failed = exits.last_error()
    for link in list(_links) if isinstance(failed, CommError) else ():
        if isinstance(link, NearLink) and "mail" in vars(link):
            link.give_up(failed)  # type: ignore[arg-type]  # the store, which knows why, may be what cannot be reached
    take_leave([mail for mail in _mails.values() if exits.leaving() or not mail.adopted])
    # A reference to a process group that outlives destroy_process_group ends the interpreter with SIGABRT.
    for link in list(_links):
        link.let_go()
    _links.clear()
    _meshes.clear()
    _families.clear()
    _pools.clear()
    _let_go.clear()
    for key in [key for key, mail in _mails.items() if not mail.adopted]:
        if (letters := _mails.pop(key).letters) is not None:
            letters.close()


world.on_shutdown(_forget)
world.on_init(dumps.listen)
world.on_init(_guard_from_the_first)
lateness.keep_by(dumps.dump_on_time_out)


def _forked() -> object:
    # The child is another process: what it does is not to be taken for its parent's.
    kept: list[object] = [
        dist.group.WORLD,
        list(exits.loose),
        dict(_families),
        dict(_pools),
        dict(_mails),
        [dict(vars(link)) for link in _links],
    ]
    for link in _links:
        link.let_go()
    _families.clear()
    _pools.clear()
    _mails.clear()
    _making.clear()
    return kept


def _rank() -> int | None:
    """What rank this process is."""
    here = world.current()
    return None if here is None or here.size == 1 else here.rank


forks.on_fork(_rank, _forked)
