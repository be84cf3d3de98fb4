"""Passes through the units of a fully sharded module: where one begins and ends, and which unit comes after which."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from meshcomm import _torch
from meshcomm.parallel.fsdp import gathered_again
from meshcomm.parallel.fsdp.buffers.memory import Held
from meshcomm.parallel.fsdp.groups import Flow, Group, begin_to_hear_all


@dataclass(eq=False)
class Passes(Flow):
    """Forward passes of the units of a module, and what they leave for backward."""

    units: list[Any] = field(default_factory=list)
    opened: list[Any] = field(default_factory=list)
    """Units that were opened on demand."""
    between: list[Any] = field(default_factory=list)
    """Units of several modules, not all of which have run."""
    held: Held | None = None
    """What is gathered once, while it is: :func:`meshcomm.parallel.gathered`."""
    _depth: int = 0
    _hooks: Any = None
    _last: list[Any] = field(default_factory=lambda: [None, None])

    def note(self, unit: Any, phase: int) -> None:
        """Remember which unit comes after which."""
        last = self._last[phase]
        if last is not None:
            last.next[phase] = unit
        self._last[phase] = unit

    @property
    def is_running(self) -> bool:
        """Whether a unit's forward is under way."""
        return self._depth > 0

    def enter(self, unit: Any) -> None:
        """The forward of a unit, or of what is none, begins."""
        if unit is self.units[0]:  # nothing can be left of an earlier call
            self._depth = 0
        self._depth += 1
        if self._depth == 1:
            if _torch.backward_pass() == -1:
                self._begin_pass(unit)
            gathered_again.leave(self._hooks)
            plain = torch.is_grad_enabled() and not (_torch.functorch_active() or _torch.dual_level_open())
            regathers = plain and any(part.regather for part in self.units)  # else nothing is saved by place
            self._hooks = gathered_again.enter() if regathers else None

    def leave(self) -> None:
        """It has ended."""
        self._depth -= 1
        if self._depth == 0:
            gathered_again.leave(self._hooks)
            self._hooks = None
            if _torch.backward_pass() == -1:
                self._shut_opened()
                if self.between and self.between != self.units[:1]:  # in a list alone the others come by themselves
                    self._forget_between()
                self.copies.landed()
                self.memory.clear()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As :func:`meshcomm.parallel.no_sync`.

        The unreduced gradients, all parameters' on each rank, stay in memory until the next backward outside; without
        it those of micro-batches add up in the shards, 1/n of that, at a reduction each.
        """
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    def reduce_collected(self) -> None:
        """Reduce what was collected under no_sync, of each group of which any rank has something."""
        groups = [group for unit in self.units for group in unit.groups if group.needy()]
        found = begin_to_hear_all([(group.kept_marks(), group.policy) for group in groups])()
        for group, marks in zip(groups, found, strict=True):
            group.reduce_kept(marks)

    def _begin_pass(self, first: Any) -> None:
        self.collects = self.quiet
        for phase, last in enumerate(self._last):
            if last is not None:
                last.next[phase] = None
            self._last[phase] = None
        for unit in self.units:
            if unit.pending is not None:
                unit.drop()
            unit.shut(interrupted=True)  # what an interrupted call may have left open
            unit.depth = int(unit is first)
            unit.forget()
        self.flight.clear()
        self.opened.clear()

    def _shut_opened(self) -> None:
        for unit in self.opened:
            if unit.on_demand:
                unit.shut()
        self.opened.clear()

    def _forget_between(self) -> None:
        for unit in self.between:
            unit.forget_between()
        self.between.clear()

    def done_with(self, groups: list[Group]) -> None:
        """What was opened on demand is not needed any more, nor what is kept for modules that did not run."""
        if self.between:
            self._forget_between()
        if groups is self.units[0].groups:
            self.units[0].has_gradients()
        for unit in self.opened:
            if groups is unit.groups and unit.on_demand:
                unit.shut()

    def land(self) -> None:
        """And shut what was opened on demand."""
        super().land()
        self._shut_opened()
