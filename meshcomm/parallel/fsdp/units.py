"""Units of a fully sharded module: they gather their parameters when they run, one ahead of the other."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshcomm import _torch
from meshcomm.collectives.rule import apply, rule_named
from meshcomm.errors import fail
from meshcomm.parallel.cut_parameters import know
from meshcomm.parallel.fsdp import gathered_again, in_graphs
from meshcomm.parallel.fsdp.gathered_again import Again
from meshcomm.parallel.fsdp.groups import Flow, Group, begin_to_hear_all
from meshcomm.parallel.fsdp.memory import Held
from meshcomm.parallel.fsdp.nodes import Entrance, Use, connect, views_of
from meshcomm.parallel.fsdp.slots import Door, Policy, Slot
from meshcomm.parallel.stand_ins import show_attributes
from meshcomm.runtime.pending import Pending, settled

_FORWARD, _BACKWARD = 0, 1


class Unit:
    """A module whose parameters are gathered together, before its forward, and let go of after it."""

    def __init__(
        self, owner: Sharded, name: str, module: nn.Module, groups: list[Group], regather: bool, policy: Policy
    ) -> None:
        """``regather``: if it is not the outermost one, which keeps what it has until backward has used it."""
        self.owner, self.name, self.module, self.groups, self.policy = owner, name, module, groups, policy
        self.regathers_inside = regather
        self.regather = regather and name != ""
        self.depth = 0
        self.is_open = False
        self.on_demand = False
        self.pending: list[Any] | None = None
        self.use: Use | None = None
        """Of the forward pass that is under way."""
        self._views: list[list[Tensor]] = []
        """What stands in the place of the parameters while it is open."""
        self._made_at: list[tuple[Group, Tensor, int]] = []
        """Of each group one of them, and its version: a change of any changes it."""
        self.traced: list[list[Tensor]] = []
        """Of the forward passes that are being traced into a graph: what stood in the tables of parameters."""
        self.next: list[Unit | None] = [None, None]
        self._entrance: Entrance | None = None
        self._version = 0
        self._seen = False
        """Its input was looked at."""
        self._again: weakref.ref[Again] | None = None
        self._sites = [
            (door.views, name, number, at)
            for number, group in enumerate(groups)
            for at, slot in enumerate(group.slots)
            for door, name in slot.sites
        ]
        self._tagged = [
            (number, at, slot.param)
            for number, group in enumerate(groups)
            for at, slot in enumerate(group.slots)
            if vars(slot.param)
        ]
        for group in groups:
            for slot in group.slots:
                for door, name in slot.sites:
                    door.openers[name] = self.open_on_demand

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """That of the copy of the whole module, which has shards of its own."""
        if id(self.owner.units[0].module) not in memo:
            fail("fully_shard", "a part of a sharded module cannot be copied without the whole.",
                 fix="copy the module that fully_shard was given")  # fmt: skip
        self.owner.copy_units(memo)
        copied: Unit = memo[id(self)]
        return copied

    def __reduce__(self) -> NoReturn:
        fail("fully_shard", "a sharded module cannot be pickled.", fix="save its state_dict, or full_state_dict")

    # ------------------------------------------------------------------------------------------------- gathering

    def version(self) -> int:
        """Changes when a parameter is changed in place."""
        return sum([group.version() for group in self.groups])

    def begin(self, phase: int) -> list[Any]:
        """Start to gather: in backward what forward has gathered, whatever was put in the parameters' place since."""
        held = self.owner.held
        if held is not None and (found := held.find(self)) is not None:
            return found
        self.owner.counts.gathers += len(self.groups)
        return [group.gather(self.owner.counts, phase == _BACKWARD) for group in self.groups]

    def take(self, phase: int) -> list[Tensor]:
        """The gathered buffers; those of the units that came next the last time are started first."""
        if not self.groups:
            return []
        owner = self.owner
        owner.note(self, phase)
        pending = self.begin(phase) if self.pending is None else self.pending
        self.pending = None
        following = self.next[phase]
        for _ in range(self.policy.prefetch):
            if following is None or following is self:
                break
            if following.pending is None and not following.has_buffers():
                following.pending = following.begin(phase)
                owner.counts.ahead += len(following.groups)
            following = following.next[phase]
        found = [settled(each) for each in pending]
        if owner.held is not None:
            owner.held.keep(self, found)
        return found

    def has_buffers(self) -> bool:
        """Whether nothing is to be gathered for it now."""
        held = self._held()
        return self.is_open or (held is not None and held.buffers is not None)

    def _held(self) -> Again | None:
        return None if self._again is None else self._again()

    def forget(self) -> None:
        """What a backward pass that was interrupted has left."""
        if self._entrance is not None:
            self._entrance.results.clear()

    def forget_pass(self) -> None:
        """Begin anew, as a unit of another module."""
        self.depth, self.next, self.use, self._entrance, self._again = 0, [None, None], None, None, None

    def drop(self) -> None:
        """Forget what was started ahead and nobody wanted."""
        for each in self.pending or ():
            if isinstance(each, Pending):
                each.abandon()
        self.pending = None

    def _fetch(self, version: int) -> list[Tensor]:
        if self.version() != version:
            gathered_again.changed("fully_shard")
        self.owner.counts.regathers += len(self.groups)
        with _torch.outside_dispatch_modes():
            return self.take(_BACKWARD)

    # ------------------------------------------------------------------------------------------------- open and shut

    def before(self, _: nn.Module | None = None, given: tuple[Any, ...] = ()) -> None:
        """Forward begins: a hook."""
        if torch.compiler.is_compiling() and _torch.in_one_graph():
            in_graphs.open_unit(self)
        else:
            self._begin_forward(given)

    @_torch.out_of_graphs
    def _begin_forward(self, given: tuple[Any, ...]) -> None:
        self.depth += 1
        if self.depth > 1 and self.version() == self._version and self.is_open:
            return
        if not self._seen and torch.is_grad_enabled():
            self._seen = True
            if self.owner.mean is not None:
                self.owner.mean.look("fully_shard", given)
        self.depth = 1  # of an interrupted forward there may be something left
        self.owner.enter(self)
        if not (self.on_demand and self._is_stood_in()):
            self._open(_BACKWARD if _torch.backward_pass() != -1 else _FORWARD)

    def after(self, *_: Any) -> None:
        """Forward has ended, in one way or another: a hook."""
        if torch.compiler.is_compiling() and _torch.in_one_graph():
            in_graphs.shut_unit(self)
        else:
            self._end_forward()

    @_torch.out_of_graphs
    def _end_forward(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            if self.is_open and not self.on_demand and _torch.backward_pass() != -1:  # a checkpoint may go on at once
                self.on_demand = True
                self.owner.opened.append(self)
                self.owner.leave()
            else:
                try:
                    if not self.on_demand:
                        self.shut()
                finally:
                    self.owner.leave()

    def open_on_demand(self) -> bool:
        """Somebody looks for a parameter outside of this unit's forward; whether forward or backward is under way."""
        return not (torch.compiler.is_compiling() and _torch.in_one_graph()) and self._open_on_demand()

    @_torch.out_of_graphs
    def _open_on_demand(self) -> bool:
        in_backward = _torch.backward_pass() != -1
        if not (in_backward or self.owner.is_running):
            return False
        self._open(_BACKWARD if in_backward else _FORWARD, on_demand=True)
        self.on_demand = True
        self.owner.opened.append(self)
        return True

    def _open(self, phase: int, on_demand: bool = False) -> None:
        if self.is_open:
            self.shut()
        odd = _torch.functorch_active() or _torch.dual_level_open() or True in [g.is_swapped() for g in self.groups]
        if odd and not all(each.swap_in() for each in self.groups):
            self._open_as_function()
            return
        self._version = self.version()
        with _torch.outside_dispatch_modes():
            held = self._held() if phase == _BACKWARD else None
            buffers = self.take(phase) if held is None else list(held.fetched())
            # Who asks first may be without gradients, and who asks next not, as in a checkpoint that is reentrant.
            if self.groups and torch.is_grad_enabled():
                views = self._connect(phase, buffers)
            elif self.groups and on_demand and not torch.is_inference_mode_enabled():
                with torch.enable_grad():
                    views = self._connect(phase, buffers)
            else:
                views = views_of(self.groups, buffers)
        self._show(views)
        if not torch.is_inference_mode_enabled():
            firsts = [mine[0] for mine in views]
            self._made_at = [*zip(self.groups, firsts, map(_torch.version_of, firsts), strict=True)]

    def _is_stood_in(self) -> bool:
        """Whether ``functional_call`` has put others in the place of the parameters that were gathered for it."""
        return any(shown.get(name) is not self._views[number][at] for shown, name, number, at in self._sites)

    def _connect(self, phase: int, buffers: list[Tensor]) -> list[list[Tensor]]:
        """The views, whose gradients come back to the shards and of which autograd saves the places."""
        root = self.owner.units[0]
        under = root.use if root is not self and root.is_open and phase == _FORWARD else None
        at_root = root is self and phase == _FORWARD
        use, views = connect(self.groups, buffers, self._entrance, under, is_root=at_root)
        self._entrance = None if use is None else use.entrance
        self.use = use if phase == _FORWARD else None
        if self.regather and phase == _FORWARD:
            weights = Again(functools.partial(self._fetch, self._version))
            self._again = weakref.ref(weights)
            gathered_again.open_places(weights, buffers)
            if use is not None and use.entrance.whole:  # else what gets no gradient may be needed longer
                use.again = self._again
        return views

    def _open_as_function(self) -> None:
        """Under ``torch.func`` and ``functional_call``: of plain differentiable operations."""
        if self.policy.op == "mean" and torch.is_grad_enabled():
            fail(
                "fully_shard",
                'under torch.func and functional_call gradients are summed, and this module has grads="mean".',
                fix='reduce the loss and shard with grads="sum", or use the functions of meshcomm.parallel.fsdp',
            )
        views = []
        for group in self.groups:
            policy = group.policy
            flat = group.flat_of_slots()
            flat = flat.to(policy.device, policy.param_dtype or flat.dtype)
            if policy.replica is not None:
                flat = apply(rule_named("pvary"), flat, policy.replica)
            whole = apply(rule_named("all_gather"), flat, policy.axis, (0, None))
            views.append(group.layout.views(whole))
        self._show(views)

    def _show(self, views: list[list[Tensor]]) -> None:
        for shown, name, number, at in self._sites:
            shown[name] = views[number][at]
        for number, at, param in self._tagged:
            show_attributes(param, views[number][at])
        self._views, self.is_open = views, True

    def shut(self, *, interrupted: bool = False) -> None:
        """The module has its shards again; of what was written to it in a forward that was ``interrupted`` nothing
        stays.
        """
        if self.is_open:
            written = [group for group, x, at in self._made_at if _torch.version_of(x) != at]
            if self._made_at and self is self.owner.units[0] and self.version() != self._version:
                written += self.groups
            self.is_open = self.on_demand = False
            self._views, self._made_at = [], []
            if self.use is not None:
                self.use.token = None  # a graph that holds itself would never go
            self.use = None
            for shown, name, _, _ in self._sites:
                shown.pop(name, None)
            held = self._held()
            if held is not None:
                gathered_again.close(held)
            if written and not interrupted:
                written[0].refuse_writes(self.name)


@dataclass(eq=False)
class Sharded(Flow):
    """A sharded module as a whole."""

    units: list[Unit] = field(default_factory=list)
    opened: list[Unit] = field(default_factory=list)
    """Units that were opened on demand."""
    entrances: list[RemovableHandle] = field(default_factory=list)
    """Hooks of parts outside of the units."""
    outer: Sharded | None = None
    """Of the module around it, which has taken its units in."""
    held: Held | None = None
    """What is gathered once, while it is: :func:`meshcomm.parallel.gathered`."""
    _depth: int = 0
    _hooks: Any = None
    _last: list[Unit | None] = field(default_factory=lambda: [None, None])

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        """That of the copy of the module, of which it is an attribute."""
        copy.deepcopy(self.now.units[0], memo)
        copied: Sharded = memo[id(self.now)]
        return copied

    def slots(self) -> Iterator[tuple[Group, int, Slot]]:
        """Every parameter once."""
        for unit in self.units:
            for group in unit.groups:
                for at, slot in enumerate(group.slots):
                    yield group, at, slot

    def note(self, unit: Unit, phase: int) -> None:
        """Remember which unit comes after which."""
        last = self._last[phase]
        if last is not None:
            last.next[phase] = unit
        self._last[phase] = unit

    def copy_units(self, memo: dict[int, Any]) -> None:
        """While the module is copied: all units, which know each other."""
        copied = Sharded(self.policy, self.nothing, mean=self.mean)
        copied.units = [Unit.__new__(Unit) for _ in self.units]
        memo[id(self)] = copied
        memo.update({id(old): new for old, new in zip(self.units, copied.units, strict=True)})
        for old, new in zip(self.units, copied.units, strict=True):
            groups = [group.copied(copied, memo) for group in old.groups]
            part = copy.deepcopy(old.module, memo)
            Unit.__init__(new, copied, old.name, part, groups, old.regathers_inside, old.policy)
        register(memo[id(self.units[0].module)], copied)

    @property
    def is_running(self) -> bool:
        """Whether a unit's forward is under way."""
        return self._depth > 0

    def take_in(self, inner: Sharded, name: str) -> None:
        """The units of a part that was sharded by itself before, which is one of this module's: ``name``."""
        for unit in inner.units:
            unit.drop()
            unit.shut(interrupted=True)
            unit.owner, unit.name = self, f"{name}.{unit.name}" if unit.name else name
            unit.regather = unit.regathers_inside
            unit.forget_pass()
            for group in unit.groups:
                group.owner = self
                group.unit = f"unit {unit.name!r} of {type(self.units[0].module).__name__}"
                for slot in group.slots:
                    slot.name = f"{name}.{slot.name}"
        self.units += inner.units
        for hook in inner.entrances:
            hook.remove()
        vars(inner.units[0].module).pop(_HERE)
        inner.outer = self

    @property
    def now(self) -> Sharded:
        """It itself, or what has taken it in."""
        return self if self.outer is None else self.outer.now

    def enter_part(self, *_: Any) -> None:
        """The forward of a part outside of the units begins, maybe by itself: a hook."""
        if not torch.compiler.is_compiling():
            self.now.enter(None)

    def leave_part(self, *_: Any) -> None:
        """It has ended: a hook."""
        if not torch.compiler.is_compiling():
            self.now.leave()

    def enter(self, unit: Unit | None) -> None:
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

    def _begin_pass(self, first: Unit | None) -> None:
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

    def done_with(self, groups: list[Group]) -> None:
        """What was opened on demand is not needed any more."""
        for unit in self.opened:
            if groups is unit.groups and unit.on_demand:
                unit.shut()

    def land(self) -> None:
        """And shut what was opened on demand."""
        super().land()
        self._shut_opened()


_HERE = "_meshcomm_fully_sharded"


def register(module: nn.Module, owner: Sharded) -> None:
    """Remember with a module, and nowhere else, that it is sharded: they go together."""
    vars(module)[_HERE] = owner
    know(module, owner.policy.axis.mesh)


def sharded_of(module: nn.Module) -> Sharded | None:
    """What stands behind a module that was sharded itself; nothing behind a shallow copy, which has the attributes of
    another module.
    """
    owner = vars(module).get(_HERE)
    return owner if isinstance(owner, Sharded) and owner.units[0].module is module else None


def is_sharded(module: nn.Module) -> bool:
    """Whether it, or its own parameters as those of a part of another module, are sharded."""
    return sharded_of(module) is not None or isinstance(_torch.own_parameters(module), Door)


def owner_of(where: str, module: nn.Module) -> Sharded:
    """What stands behind a sharded module."""
    owner = sharded_of(module) if isinstance(module, nn.Module) else None
    if owner is None:
        fail(where, f"this {type(module).__name__} is not sharded.", fix="pass the module that fully_shard was given")
    return owner
