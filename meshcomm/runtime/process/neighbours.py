"""Which processes of a group share memory, and whether they are alive."""

from __future__ import annotations

import contextlib
import os
import platform
import select
import sys
from typing import NamedTuple

from meshcomm.runtime.process import forks, table
from meshcomm.runtime.process.boxes import Arena, arena
from meshcomm.runtime.process.memory import Lease, find

SWITCH = "MESHCOMM_SHARED_MEMORY"
"""The variable of the environment that is 0 where no memory shall be shared."""


class Address(NamedTuple):
    """Where a process is, and its mailboxes."""

    machine: str
    """Equal where memory can be shared; empty if it cannot."""
    lease: Lease

    @staticmethod
    def mine() -> Address:
        """This process's."""
        nowhere = Address("", Lease(0, 0, 0, 0, 0, 0))
        fits = sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "pidfd_open")
        if not fits or os.environ.get(SWITCH) == "0":
            return nowhere
        try:
            spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
            mine = arena().lease
            os.close(os.pidfd_open(mine.pid))
            find(mine)  # what this process may not do, others may not either
            return Address(" ".join([table.boot(), *spaces, str(os.getuid())]), mine)
        except OSError:
            return nowhere

    def write(self) -> str:
        """As text."""
        return ";".join([self.machine, *map(str, self.lease)])

    @staticmethod
    def read(text: str) -> Address:
        """The inverse of ``write``."""
        machine, *lease = text.split(";")
        return Address(machine, Lease(*map(int, lease)))


class Neighbours(NamedTuple):
    """The processes of a group, this one among them."""

    token: str
    """Of this meeting; a process may meet the same ones again."""
    addresses: tuple[Address, ...]

    def share(self) -> bool:
        """Whether they all say that they are on one machine: the same answer in all of them."""
        first = self.addresses[0].machine
        return bool(first) and all(address.machine == first for address in self.addresses)

    def are_seen(self, rank: int) -> bool:
        """Whether this process, which is that of this rank, can look into the memory of all that are on its machine."""
        mine = self.addresses[rank].machine
        try:
            for address in self.addresses:
                if mine and address.machine == mine:
                    neighbour(address.lease)
        except OSError:
            return False
        return True


class Neighbour:
    """Another process on this machine."""

    def __init__(self, lease: Lease) -> None:
        self.pid = lease.pid
        self._pidfd = os.pidfd_open(lease.pid)
        try:
            self.arena = Arena(find(lease))
        except BaseException:
            os.close(self._pidfd)
            del self._pidfd  # when this goes another thread may have opened something with that number
            raise

    def is_gone(self) -> bool:
        """Whether the process has ended."""
        life = select.poll()  # its own: several threads may ask
        life.register(self._pidfd, select.POLLIN)
        return bool(life.poll(0))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._pidfd)


@forks.in_every_fork
def _forked() -> None:
    _neighbours.clear()


_neighbours: dict[Lease, Neighbour] = {}


def neighbour(lease: Lease) -> Neighbour:
    """The process with these mailboxes. Raises OSError if it cannot be seen."""
    found = _neighbours.get(lease)
    if found is None:
        for gone in [lease for lease, each in _neighbours.copy().items() if each.is_gone()]:
            _neighbours.pop(gone, None)  # another thread may be here, too
        found = _neighbours[lease] = Neighbour(lease)
    return found
