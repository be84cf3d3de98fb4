"""Where the ranks of a mesh are: in processes, in this process, or one rank alone."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from meshcomm.runtime import groups
from meshcomm.runtime.groups import identity
from meshcomm.runtime.start import world
from meshcomm.runtime.transports.compiled import TracedLink
from meshcomm.runtime.transports.process_group import ProcessLink
from meshcomm.runtime.transports.protocol import Link
from meshcomm.runtime.transports.solo import SoloLink
from meshcomm.runtime.transports.threads.scheduler import current_rank

__all__ = ["InProcess", "Processes", "Solo"]

_outside = itertools.count()


class Processes:
    """The ranks are processes."""

    in_process = False

    def rank(self) -> int | None:
        """This process's rank in the world; None when there is no world any more."""
        here = world.current()
        return None if here is None else here.rank

    def world_size(self) -> int | None:
        """How many processes there are."""
        here = world.current()
        return None if here is None else here.size

    def identify(self, shape: Mapping[str, int], ranks: tuple[int, ...]) -> str:
        """Names a mesh that is made now, alike in all of its processes."""
        return groups.identify(shape, ranks)

    def link(self, ranks: tuple[int, ...], timeout: timedelta | None, mesh: str, axis: tuple[str, ...]) -> Link:
        """A link between these ranks for an axis of the mesh of this name; the first one between them is made by all
        of them together.
        """
        return cast(Link, groups.link_of(ranks, timeout, mesh, axis))

    def traced(self, link: Link) -> Link:
        """As functional operations; what goes to or from one rank is not traced."""
        return cast(Link, TracedLink(link)) if isinstance(link, ProcessLink) else link

    def group(self, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
        """The one that these ranks have; they make it together, once."""
        return groups.group_of(ranks, timeout)

    def device(self) -> torch.device:
        """The device that ``init`` chose."""
        here = world.current()
        return torch.get_default_device() if here is None else here.device


class InProcess:
    """The ranks are threads of this process: who this rank is depends on who asks."""

    in_process = True

    def rank(self) -> int | None:
        """The rank that is running; None outside a launch."""
        here = current_rank()
        return None if here is None else here.index

    def world_size(self) -> int | None:
        """How many ranks the launch has."""
        here = current_rank()
        return None if here is None else here.world.size

    def identify(self, shape: Mapping[str, int], ranks: tuple[int, ...]) -> str:
        """Names a mesh that is made now: by a rank, alike on all of them; outside of a launch it is the one object."""
        here = current_rank()
        if here is None:
            return f"made outside, {next(_outside)}"
        key = (*shape.items(), ranks)
        here.made[key] += 1
        return identity(shape, ranks, here.made[key])

    def link(self, ranks: tuple[int, ...], timeout: timedelta | None, mesh: str, axis: tuple[str, ...]) -> Link:
        """A link of the rank that is running to these ranks; no time passes among them."""
        # Programs on processes do without.
        inprocess: Any = importlib.import_module("meshcomm.runtime.transports.threads.transport")
        return cast(Link, inprocess.InProcessLink(current_rank(), ranks, f"{mesh}: {','.join(axis)}"))

    def traced(self, link: Link) -> Link:
        """Nothing of it compiles, which is said where it is tried."""
        return link

    def group(self, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
        """Not among threads: the mesh says so."""
        raise NotImplementedError

    def device(self) -> torch.device:
        """The caller's default device."""
        return torch.get_default_device()


class Solo:
    """One rank that is alone, with no process group and no launch."""

    in_process = False

    def rank(self) -> int | None:
        """The only one."""
        return 0

    def world_size(self) -> int | None:
        """One."""
        return 1

    def identify(self, shape: Mapping[str, int], ranks: tuple[int, ...]) -> str:
        """Nobody asks."""
        return ""

    def link(self, ranks: tuple[int, ...], timeout: timedelta | None, mesh: str, axis: tuple[str, ...]) -> Link:
        """A link to nobody."""
        return SoloLink()

    def traced(self, link: Link) -> Link:
        """The same: nothing moves."""
        return link

    def group(self, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
        """One of one, which torch wants."""
        world.solo_process_group()
        return groups.group_of(ranks, timeout)

    def device(self) -> torch.device:
        """The default device."""
        return torch.get_default_device()
