"""This process among the processes of its launch: what it is where something else has made their process group, and
what they tell each other at the store.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from meshcomm import _torch
from meshcomm.errors import MeshError, fail, held
from meshcomm.runtime.process.neighbours import Address, Neighbours
from meshcomm.runtime.start import devices
from meshcomm.runtime.start.launchers import Launcher, detect
from meshcomm.runtime.start.request import GUARD, Request, guard_wanted


class ProcessWorld(NamedTuple):
    """This process among the processes of its launch."""

    rank: int
    size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str
    timeout: timedelta
    adopted: bool
    guard: bool = False
    """Whether the ranks compare their calls."""
    neighbours: Neighbours | None = None
    """All ranks' addresses, if each sees the memory of those that say they are on its machine."""
    name: str = ""
    """Alike in all of them, and in no other launch; empty where :func:`name_of` has to ask for it."""


def adopted(request: Request) -> tuple[ProcessWorld, bool]:
    """The process group that something else has initialised, as it is; and whether all its ranks are known to be on
    this machine.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    config = dist.get_backend_config()
    facts = {"rank": rank, "world_size": size, "backend": dist.get_backend(), "guard": request.guard}
    wrong = {k: v for k, v in request.given().items() if facts.get(k) != v and not (k == "backend" and v == config)}
    if wrong:
        fail(
            "init",
            "torch.distributed is already initialised by something else, otherwise than asked here.",
            got=", ".join(f"{k}={v!r}" for k, v in wrong.items()) + f"; there is rank {rank} of {size} on {config}",
            fix="call init() without arguments to use that group, or init() before it is made",
        )
    found = _matching_launcher(rank, size)
    local_rank, local_size = found.local_rank, found.local_world_size
    kinds = set(devices.types_of(config))
    accelerator = devices.accelerator()
    device = torch.device("cpu")
    if accelerator is not None and accelerator[0] in kinds:
        index = torch.accelerator.current_device_index()
        if index == 0 and local_rank is not None and 0 < local_rank < torch.accelerator.device_count():
            # Its owner has not chosen a device: on one machine all ranks would end up on the first.
            torch.accelerator.set_device_index(local_rank)
            index = local_rank
        device = torch.device(accelerator[0], index)
    here = ProcessWorld(
        rank, size, rank if local_rank is None else local_rank, size if local_size is None else local_size,
        found.node_rank or 0, device, config, dist.distributed_c10d.default_pg_timeout, adopted=True,
        guard=guard_wanted(request.guard),
    )  # fmt: skip
    if gloo_on_cpu(config) or here.guard:
        _publish(rank, here.guard)
    return here, found.one_node


def _matching_launcher(rank: int, size: int) -> Launcher:
    """What the environment says about this very rank, for the place on the machine; else one machine is assumed."""
    with contextlib.suppress(MeshError), held():
        found = detect(os.environ)
        if found is not None and (found.rank, found.world_size) == (rank, size):
            return found
    return Launcher("adopted", rank, size)


def neighbours_of(here: ProcessWorld, ranks: Sequence[int]) -> Neighbours | None:
    """The addresses of some ranks; None where they cannot share memory."""
    found = addresses_of(here, ranks)
    return found if found is not None and found.share() else None


def addresses_of(here: ProcessWorld, ranks: Sequence[int]) -> Neighbours | None:
    """Where some ranks are, wherever that is; None where that is not known. In a group that was adopted, waits until
    they have adopted it too.
    """
    if not here.adopted:
        if here.neighbours is None:
            return None
        return here.neighbours._replace(addresses=tuple(here.neighbours.addresses[rank] for rank in ranks))
    if not gloo_on_cpu(here.backend):
        return None
    store, meeting = _torch.default_store(), _publish(here.rank)
    known = _addresses.setdefault(whole_group(), {})
    for rank in ranks:
        if rank not in known:
            known[rank] = Address.read(store.get(f"meshcomm/{meeting}/address/{rank}").decode())
    return Neighbours(_token(store, meeting), tuple(known[rank] for rank in ranks))


def name_of(here: ProcessWorld) -> str:
    """Tells these processes from those of every other launch, alike in all of them; empty among fake ranks, and where
    the store has gone.
    """
    if here.name or not here.adopted:
        return here.name
    with contextlib.suppress(RuntimeError):
        if (meeting := meeting_number(here)) is not None:
            return _token(_torch.default_store(), meeting)
    return ""


def _token(store: Store, meeting: int) -> str:
    """What the first one who asked has drawn."""
    return str(store.compare_set(f"meshcomm/{meeting}/token", "", os.urandom(8).hex()).decode())


def agree_on_guard(here: ProcessWorld) -> None:
    """In a group that was adopted: wait until all have adopted it, and see whether all are under guard. Those that
    ``init`` made have agreed.
    """
    if here.adopted and here.backend != "fake" and (here.guard or gloo_on_cpu(here.backend)):
        store, meeting = _torch.default_store(), _publish(here.rank, here.guard)
        all_under_guard([store.get(f"meshcomm/{meeting}/guard/{rank}") == b"1" for rank in range(here.size)])


def all_under_guard(guards: Sequence[bool]) -> None:
    """MeshError if only some are."""
    if len(set(guards)) > 1:
        off = ", ".join(str(rank) for rank, guard in enumerate(guards) if not guard)
        fail(
            "init", "the guard is on in some processes only.", got=f"off on rank {off}", fix=f"guard= or {GUARD} in all"
        )


def meeting_number(here: ProcessWorld) -> int | None:
    """Tells the groups apart that have met in one store, one after the other; one that ``init`` made has its own, and
    fake ranks have none.
    """
    if "fake" in here.backend:
        return None
    return _publish(here.rank) if here.adopted else 0


def gloo_on_cpu(config: str) -> bool:
    """Whether gloo moves the CPU tensors of a group with these backends."""
    return config == "gloo" or "cpu:gloo" in config.split(",")


def whole_group() -> dist.ProcessGroup:
    """That of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_addresses: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Address]] = weakref.WeakKeyDictionary()
"""Of the ranks of a group that was adopted, as far as somebody has asked."""


def _publish(rank: int, guard: bool = False) -> int:
    """Tell the others of this group where this process is, once; the number of the group in its store, which may have
    served others.
    """
    group, store = whole_group(), _torch.default_store()
    if group not in _meetings:
        _meetings[group] = store.add(f"meshcomm/groups/{rank}", 1)
        store.set(f"meshcomm/{_meetings[group]}/guard/{rank}", str(int(guard)))
        store.set(f"meshcomm/{_meetings[group]}/address/{rank}", Address.mine().write())
    return _meetings[group]
