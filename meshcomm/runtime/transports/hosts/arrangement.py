"""Which indices of an axis are on which machine, and what that allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST = 32
"""The most machines, and the most ranks on one: every one speaks to every other one at once."""


class Arrangement(NamedTuple):
    """As many indices on each machine, two at least, of two machines at least::

    machine 0    0  1  2  3        the peers of index 1 are 1, 5, 9:
    machine 1    4  5  6  7        it speaks to these over the wire,
    machine 2    8  9 10 11        and to 0, 2, 3 in shared memory
    """

    hosts: tuple[tuple[int, ...], ...]
    """The indices on each machine, in order; the machines in the order of their first ones."""

    @property
    def in_order(self) -> bool:
        """Whether the indices of each machine follow one another, and those of the next machine them."""
        return [index for host in self.hosts for index in host] == list(range(len(self.hosts[0]) * len(self.hosts)))

    @property
    def aligned(self) -> bool:
        """Whether a tree over all indices is one over those of each machine, and then one over the machines."""
        count = len(self.hosts[0])
        return self.in_order and count & (count - 1) == 0

    def host_of(self, index: int) -> int:
        """Which machine has it."""
        return next(j for j, host in enumerate(self.hosts) if index in host)

    def peers_of(self, index: int) -> tuple[int, ...]:
        """The indices at its place on every machine, its own among them."""
        place = self.hosts[self.host_of(index)].index(index)
        return tuple(host[place] for host in self.hosts)


def arrangement_of(machines: Sequence[str]) -> Arrangement | None:
    """By index what is equal where memory can be shared, and empty where it cannot; None where two levels are no use,
    or not all machines have as many. All ranks of an axis know the same of all, and so come to the same.
    """
    found: dict[str, list[int]] = {}
    for index, machine in enumerate(machines):
        found.setdefault(machine, []).append(index)
    counts = {len(host) for host in found.values()}
    few = 2 <= len(found) <= MOST and len(counts) == 1 and 2 <= min(counts) <= MOST
    return Arrangement(tuple(tuple(host) for host in found.values())) if few and "" not in found else None
