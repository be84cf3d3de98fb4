"""Which device and which backends a rank gets, whatever the accelerator is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshcomm.errors import fail
from meshcomm.runtime.start.rendezvous import this_host

_CPU_BACKEND = "gloo"


class Card(NamedTuple):
    """What a rank tells the others before they start: where it is, and the accelerators that it sees."""

    host: str
    local_rank: int | None
    devices: Sequence[str]

    @staticmethod
    def mine(local_rank: int | None, device_type: str) -> Card:
        """This process's card."""
        return Card(this_host(), local_rank, _visible(device_type) if device_type != "cpu" else ())


class Place(NamedTuple):
    """Where a rank is among the machines, and its device."""

    local_rank: int
    local_world_size: int
    node_rank: int
    device: torch.device


def accelerator() -> tuple[str, str] | None:
    """(device type, its own backend) of an accelerator that is here and can communicate by itself, else None."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    if found is None:
        return None
    try:
        own = dist.get_default_backend_for_device(found.type)
    except ValueError:
        return None
    # A device whose backend is the CPU's has none of its own: its ranks communicate from the CPU.
    return (found.type, own) if own != _CPU_BACKEND and dist.is_backend_available(own) else None


def backends() -> list[str]:
    """The names of the backends that torch can use here, those registered by others too."""
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    return [name for name in known if dist.is_backend_available(name)]


def choose_backend(requested: str | None, where: str = "init") -> tuple[str, str]:
    """(backend for torch, device type of the ranks).

    The CPU's backend is always among them, so that CPU tensors have a way.
    """
    found = accelerator()
    if requested is None:
        return (f"cpu:{_CPU_BACKEND},{found[0]}:{found[1]}", found[0]) if found else (_CPU_BACKEND, "cpu")
    if not isinstance(requested, str):
        fail(where, "backend must be a string.", got=repr(requested), fix="backend='gloo', or None to choose")
    if ":" in requested:
        types = types_of(requested)
        return requested, found[0] if found and found[0] in types else "cpu"
    if requested == _CPU_BACKEND:
        return requested, "cpu"
    if found and requested == found[1]:
        return f"cpu:{_CPU_BACKEND},{found[0]}:{found[1]}", found[0]
    if not dist.is_backend_available(requested):
        usable = [_CPU_BACKEND] + ([found[1]] if found else [])
        fail(
            where, f"backend {requested!r} is not available on this machine.", got=f"here: {', '.join(usable)}",
            fix="backend=None chooses",
        )  # fmt: skip
    if requested == "nccl":
        fail(
            where,
            "backend 'nccl' needs a GPU, and none is visible here.",
            fix="backend='gloo' puts all ranks on the CPU",
        )
    return requested, found[0] if found else "cpu"


def present(device_type: str) -> torch.device:
    """The device of this type that this process uses now."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def types_of(config: str) -> list[str]:
    """The accelerator types, with a backend of their own, of torch's backend configuration ``cpu:gloo,cuda:nccl``."""
    pairs = [part.strip().split(":", 1) for part in config.split(",") if ":" in part]
    return [kind for kind, backend in pairs if kind != "cpu" and backend != _CPU_BACKEND]


def has_gloo(config: str) -> bool:
    """Whether gloo is among the backends of this configuration."""
    return any(part.rpartition(":")[2].strip() == _CPU_BACKEND for part in config.split(","))


def place(cards: list[Card], rank: int, device_type: str) -> Place:
    """This rank's place, from all ranks' cards. Raises on all of them alike when two would share an accelerator."""
    nodes = list(dict.fromkeys(card.host for card in cards))
    members = {node: [r for r, card in enumerate(cards) if card.host == node] for node in nodes}
    known = [card.local_rank for card in cards]
    local = [
        members[card.host].index(r) if k is None else k for r, (card, k) in enumerate(zip(cards, known, strict=True))
    ]
    mine = members[cards[rank].host]
    device = torch.device("cpu")
    if device_type != "cpu":
        _no_sharing(cards, local, members, device_type)
        device = torch.device(device_type, local[rank] % len(cards[rank].devices))
    return Place(local[rank], len(mine), nodes.index(cards[rank].host), device)


def _no_sharing(cards: list[Card], local: list[int], members: dict[str, list[int]], device_type: str) -> None:
    taken: dict[tuple[str, str], int] = {}
    for rank, card in enumerate(cards):
        if not card.devices:
            fail("init", f"rank {rank} sees no {device_type} device.", fix="backend='gloo' puts all ranks on the CPU")
        key = (card.host, card.devices[local[rank] % len(card.devices)])
        if key in taken:
            fail(
                "init",
                f"ranks {taken[key]} and {rank} would share one {device_type} device, which its backend cannot do.",
                got=f"local_world_size {len(members[card.host])}, {len(card.devices)} {device_type} device(s) visible",
                fix="start fewer ranks per machine, or backend='gloo' to put all ranks on the CPU",
            )
        taken[key] = rank


def _visible(device_type: str) -> tuple[str, ...]:
    """A name for each visible device that is the same in every process that sees it: its id, whatever the order in
    which a process sees devices; where the device has none, its place in what is said to be visible.
    """
    count = torch.accelerator.device_count()
    properties = getattr(torch.get_device_module(device_type), "get_device_properties", None)
    ids = [None if properties is None else getattr(properties(index), "uuid", None) for index in range(count)]
    return tuple(_in_environment(index, count) if uuid is None else str(uuid) for index, uuid in enumerate(ids))


def _in_environment(index: int, count: int) -> str:
    """What the environment calls the device: ``ZE_AFFINITY_MASK=3``, the second of "2,3"."""
    shown = [
        (k, v.split(",")) for k, v in sorted(os.environ.items()) if k.endswith(("VISIBLE_DEVICES", "AFFINITY_MASK"))
    ]
    listed = [f"{k}={each[index].strip()}" for k, each in shown if len(each) == count]
    return " ".join(listed) or f"{' '.join(','.join(each) for _, each in shown)}:{index}"
