"""What a dry run foretells of time: what DryRun says of operations and of seconds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from meshcomm.dry.hardware import Hardware, checked
from meshcomm.dry.log import Log
from meshcomm.dry.replay import replayed
from meshcomm.dry.timeline import Timeline
from meshcomm.errors import fail
from meshcomm.pictures.picture import Picture

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Foretold", "checked_hardware"]

_WHERE = "dry_run"


def checked_hardware(machine: Any, ranks: int) -> Hardware | None:
    """It, if so many ranks fill its nodes."""
    if machine is None:
        return None
    if not isinstance(machine, Hardware):
        fail(_WHERE, f"hardware={machine!r} is none.", fix='mc.hardware("h100")')
    checked(machine)  # it may be made by hand
    node = machine.ranks_per_node
    if ranks > node and ranks % node:
        what = f"{ranks} ranks do not fill nodes of {node}."
        fail(
            _WHERE,
            what,
            got=f"hardware {machine.name!r}",
            fix=f"sizes that do; or ranks_per_node=, of {ranks}",
        )
    return machine


class Foretold:
    """What ranks do, and how long on a machine, if there is one."""

    shape: Mapping[str, int]
    ranks: tuple[int, ...]
    _logs: Mapping[int, Log]
    _names: Mapping[str, tuple[str, ...]]
    _timeline: Timeline | None

    def _foretell(
        self, logs: Mapping[int, Log], names: Mapping[str, tuple[str, ...]], machine: Hardware | None
    ) -> Self:
        """``logs``: of those that ran, and those with whom they exchange messages."""
        self._logs, self._names, self._timeline = logs, names, None
        if machine is not None:
            ran = replayed(logs, machine)
            self._timeline = Timeline(machine, {rank: ran[rank] for rank in self.ranks})
        return self

    @property
    def logs(self) -> Mapping[int, Log]:
        """By rank: what it did, of those that ran and of those with whom they exchange messages."""
        return self._logs

    def on(self, machine: Hardware) -> Self:
        """The same run on another machine: nothing runs again.

        Raises:
            MeshError: no hardware; ranks that do not fill its nodes.
        """
        sizes = 1
        for size in self.shape.values():
            sizes *= size
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made._foretell(self._logs, self._names, checked_hardware(machine, sizes))

    @property
    def timeline(self) -> Timeline:
        """When what runs."""
        if self._timeline is None:
            fail(_WHERE, "nothing is known of times.", fix='dry_run(..., hardware=mc.hardware("h100")), or run.on(...)')
        return self._timeline

    @property
    def seconds(self) -> float:
        """How long the program takes; if it yields, how long from its last ``yield`` but one to the last."""
        return self.timeline.seconds

    @property
    def laps(self) -> tuple[float, ...]:
        """Seconds of each part of a program that yields, up to each ``yield``."""
        return self.timeline.laps

    @property
    def flops(self) -> dict[torch.dtype, int]:
        """Operations of products and attention, by dtype, as ``torch.utils.flop_counter`` counts them, backward and
        what is computed again included: of the rank with most, and of the last lap of a program that yields.
        """
        every = [self._logs[rank].flops() for rank in self.ranks]
        return max(every, key=lambda each: sum(each.values()))

    def exposed(self, axis: str | Iterable[str]) -> float:
        """Seconds for which nothing is computed, for the program waits for calls over ``axis``, a name; or, of calls
        over several axes at once, over all of these names. A pipeline's bubble is of its axis.

        Raises:
            MeshError: an axis that the mesh has not.
        """
        names = [axis] if isinstance(axis, str) else list(axis)
        whole = [each for name in names for each in self._names.get(name, (name,))]
        for name in whole:
            if name not in self.shape:
                fail(_WHERE, f"there is no axis {name!r}.", got=f"axes {', '.join(self.shape)}", fix="one of these")
        every = self.timeline.exposed().items()
        return sum(each for over, each in every if set(whole) == ({over} if isinstance(over, str) else set(over)))

    def table(self) -> str:
        """Of what the seconds consist."""
        return self.timeline.table()

    def picture(self) -> Picture:
        """Bars over time: what each rank computes, and what is on its way along each axis."""
        return self.timeline.picture()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline: ``.json`` for Perfetto, ``.svg``, ``.html`` or ``.txt`` as a picture."""
        self.timeline.save(path)
