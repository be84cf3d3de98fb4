"""Who is this process, or this rank in it, as far as that can be known without talking to anybody."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from meshcomm.runtime.process import forks
from meshcomm.runtime.start import devices, world
from meshcomm.runtime.start.launchers import detect
from meshcomm.runtime.transports.dry.world import dry_world
from meshcomm.runtime.transports.threads.scheduler import current_rank


@dataclass(frozen=True)
class Identity:
    """``None`` stands for what cannot be known before ``init``."""

    rank: int
    size: int
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    backend: str | None
    device: torch.device | None
    launched: bool
    """Whether it is a rank of a launch, were it of one rank."""


def identity() -> Identity:
    """By the dry run or the in-process launch that it is a rank of, else the process group, else the launcher's
    variables; else it is a plain process, alone.
    """
    dry = dry_world()
    if dry is not None:
        place = dry.rank, dry.size
        return Identity(*place, *place, 0, "dry", torch.get_default_device(), True)
    inside = current_rank()
    if inside is not None:
        place = inside.index, inside.world.size
        return Identity(*place, *place, 0, "in-process", torch.get_default_device(), True)
    launched = world.under_launcher()
    if launched and world.is_met() and not forks.is_fork():
        world.ensure()  # a group that something else has initialised is adopted
    here = world.current()
    if here is not None and launched:
        local = here.local_rank, here.local_world_size, here.node_rank
        return Identity(here.rank, here.size, *local, here.backend, here.device, True)
    found = detect(os.environ) if launched else None
    if found is None:
        return Identity(0, 1, 0, 1, 0, None, torch.get_default_device(), False)
    backend, kind = devices.choose_backend(None)
    local_rank, local_size, node = found.local_rank, found.local_world_size, found.node_rank
    if found.world_size == 1:
        local_rank, local_size, node = 0, 1, 0
    device: torch.device | None = torch.device("cpu")
    if kind != "cpu":
        device = None if local_rank is None else torch.device(kind, local_rank % torch.accelerator.device_count())
    return Identity(found.rank, found.world_size, local_rank, local_size, node, backend, device, True)
