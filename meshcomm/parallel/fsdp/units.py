"""Units of a fully sharded module: they gather their parameters when they run, one ahead of the other."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshcomm import _torch
from meshcomm.errors import fail
from meshcomm.parallel.cut_parameters import know
from meshcomm.parallel.data.computed_again import tensors_of
from meshcomm.parallel.fsdp import gathered_again, in_graphs
from meshcomm.parallel.fsdp.gathered_again import Again
from meshcomm.parallel.fsdp.groups import Group
from meshcomm.parallel.fsdp.nodes import Entrance, Use, connect, views_as_function, views_of
from meshcomm.parallel.fsdp.passes import Passes
from meshcomm.parallel.fsdp.slots import Door, Policy, Sites, Slot, raw
from meshcomm.parallel.fsdp.together import Between, modules_of, name_around
from meshcomm.parallel.stand_ins import show_attributes
from meshcomm.runtime.pending import Pending, settled
from meshcomm.spmd.types.told import tell_again
from meshcomm.watch import here, paused

_FORWARD, _BACKWARD = 0, 1
_LEFT = "meshcomm: what is left for the loss"


class Left:
    """What stood in the place of parameters, for as long as the graph that has used them."""

    __slots__ = ("__weakref__", "views")

    def __init__(self, views: list[list[Tensor]]) -> None:
        self.views = views


class Unit:
    """A module, or several, whose parameters are gathered together, before forward, and let go of after it."""

    def __init__(
        self, owner: Sharded, name: str, module: nn.Module, groups: list[Group], regather: bool, policy: Policy
    ) -> None:
        """``regather``: if it is not the outermost one, which keeps what it has until backward has used it."""
        self.owner, self.name, self.module, self.groups, self.policy = owner, name, module, groups, policy
        self.modules = modules_of(module)
        self._between = Between(self.modules) if len(self.modules) > 1 else None
        self.regathers_inside = regather
        self.regather = regather and name != ""
        self.depth = 0
        self.is_open = False
        self.on_demand = False
        self.pending: list[Any] | None = None
        self.use: Use | None = None
        """Of the forward pass that is under way."""
        self.views: list[list[Tensor]] = []
        """What stands in the place of the parameters while it is open."""
        self._made_at: list[tuple[Group, list[Tensor], int]] = []
        """Of each group them, and what their versions add up to."""
        self.traced: list[list[Tensor]] = []
        """Of the forward passes that are being traced into a graph: what stood in the tables of parameters."""
        self.next: list[Unit | None] = [None, None]
        self._entrance: Entrance | None = None
        self._version = 0
        self._seen = False
        """Its input was looked at."""
        self._again: weakref.ref[Again] | None = None
        self._left: weakref.ref[Left] | None = None
        self._sites = Sites([slot for group in groups for slot in group.slots])
        self._tagged = [
            (number, at, slot.param)
            for number, group in enumerate(groups)
            for at, slot in enumerate(group.slots)
            if vars(slot.param)
        ]
        for number, group in enumerate(groups):
            for at, slot in enumerate(group.slots):
                for door, name in slot.sites:
                    door.openers[name] = self.open_on_demand
                    door.left[name] = functools.partial(self._left_view, number, at)

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
        total = 0
        for group in self.groups:
            try:
                total += sum(map(_torch.version_of, group.params))
            except RuntimeError:  # made in inference mode, where nobody counts
                total += sum(map(_torch.version_hint, group.params))
        return total

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
        found = [settled(pending[0])] if len(pending) == 1 else [settled(each) for each in pending]
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
        self._left = None

    def forget_pass(self) -> None:
        """Begin anew, as a unit of another module."""
        self.depth, self.next, self.use, self._entrance, self._again = 0, [None, None], None, None, None
        self.forget_between()

    def forget_between(self) -> None:
        """What is kept for others of its modules."""
        if self._between is not None:
            self._between.forget()

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
        if _torch.dispatch_modes():
            with _torch.outside_dispatch_modes():
                return self.take(_BACKWARD)
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

    def after(self, part: nn.Module | None = None, _: Any = None, result: Any = None) -> None:
        """Forward has ended, in one way or another: a hook."""
        if torch.compiler.is_compiling() and _torch.in_one_graph():
            in_graphs.shut_unit(self)
        else:
            self._end_forward(part, result)

    @_torch.out_of_graphs
    def _end_forward(self, part: nn.Module | None, result: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            if self.is_open and not self.on_demand and _torch.backward_pass() != -1:  # a checkpoint may go on at once
                self.on_demand = True
                self.owner.opened.append(self)
                self.owner.leave()
            else:
                try:
                    if not self.on_demand:
                        if self._between is not None:
                            self._between.ended(self, part, self._held())
                        self._leave_for_loss(result)
                        self.shut()
                finally:
                    self.owner.leave()

    def _leave_for_loss(self, result: Any) -> None:
        """The outermost unit's parameters may be read until backward comes to them, as a loss reads those of a head:
        whole, and of the same node. Who has the result has them. Where gradients are summed a penalty of what is whole
        on each rank would count once for each of them.
        """
        if self is self.owner.units[0] and self.use is not None and self._between is None and self.policy.op == "mean":
            left = Left(self.views)
            own = {x.grad_fn for views in self.views for x in views}  # a node that has itself would never go
            for x in tensors_of(result):
                if x.grad_fn is not None and x.grad_fn not in own:
                    kept: Any = x.grad_fn.metadata
                    kept[_LEFT] = left
            self._left = weakref.ref(left)

    def _left_view(self, number: int, at: int) -> Tensor | None:
        """What stood in the place of a parameter in the last forward, if backward has not come to it."""
        left = None if self._left is None else self._left()
        return None if left is None or _torch.backward_pass() != -1 else left.views[number][at]

    def has_gradients(self) -> None:
        """Backward has come to it."""
        self._left = None

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
        watcher = here.watcher
        if watcher is None:
            self._gather(phase, on_demand)
            return
        for part in self.modules:
            tell_again(part)
        with paused():
            self._gather(phase, on_demand)
        for group, views in zip(self.groups, self.views, strict=True):
            leaves = [raw(*slot.sites[0]) for slot in group.slots]
            watcher.gathered("fully_shard", views, leaves, group.policy.names, group.policy.axis.mesh)

    def _gather(self, phase: int, on_demand: bool) -> None:
        if self.is_open:
            self.shut()
        odd = _torch.functorch_active() or _torch.dual_level_open()
        for group in () if odd else self.groups:
            odd = odd or group.is_swapped()
        if odd and not all(each.swap_in() for each in self.groups):
            for group in self.groups:
                group.refuse_replaced()
            self._open_as_function()
            return
        self._version = self.version()
        between = None if phase == _BACKWARD or on_demand else self._between
        if between is not None and self._open_kept(between.taken(self)):
            return
        if _torch.dispatch_modes():
            with _torch.outside_dispatch_modes():
                buffers, views = self._gathered(phase, on_demand)
        else:
            buffers, views = self._gathered(phase, on_demand)
        self._show_written(views)
        if between is not None:
            between.opened(self, buffers)

    def _gathered(self, phase: int, on_demand: bool) -> tuple[list[Tensor], list[list[Tensor]]]:
        """The buffers, and what is in them."""
        held = self._held() if phase == _BACKWARD else None
        buffers = self.take(phase) if held is None else list(held.fetched())
        # Who asks first may be without gradients, and who asks next not, as in a checkpoint that is reentrant.
        if self.groups and torch.is_grad_enabled():
            return buffers, self._connect(phase, buffers)
        if self.groups and on_demand and not torch.is_inference_mode_enabled():
            with torch.enable_grad():
                return buffers, self._connect(phase, buffers)
        return buffers, views_of(self.groups, buffers)

    def _open_kept(self, kept: Any) -> bool:
        """What another one of its modules has gathered is shown again, if there is something."""
        if kept is None:
            return False
        self.use = kept.use
        if kept.use is not None:
            kept.use.token = kept.token
        if kept.again is not None:
            self._again = weakref.ref(kept.again)
            gathered_again.open_places(kept.again, kept.buffers)
        self._show_written(kept.views)
        return True

    def _show_written(self, views: list[list[Tensor]]) -> None:
        """And see whether they are written to."""
        self._show(views)
        if not torch.is_inference_mode_enabled():
            self._made_at = [*zip(self.groups, views, map(_torch.versions_of, views), strict=True)]

    def _is_stood_in(self) -> bool:
        """Whether ``functional_call`` has put others in the place of the parameters that were gathered for it."""
        return not self._sites.have(self.views)

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
                fix='reduce the loss and shard with grads="sum", or use the functions of meshcomm.parallel.fsdp; what '
                "puts other parameters in the place of some, or ties them, goes before fully_shard",
            )
        self._show(views_as_function(self.groups))

    def _show(self, views: list[list[Tensor]]) -> None:
        self._sites.show(views)
        for number, at, param in self._tagged:
            show_attributes(param, views[number][at])
        self.views, self.is_open = views, True

    def shut(self, *, interrupted: bool = False) -> None:
        """The module has its shards again; of what was written to it in a forward that was ``interrupted`` nothing
        stays.
        """
        if self.is_open:
            written = [group for group, mine, at in self._made_at if _torch.versions_of(mine) != at]
            if self._made_at and self is self.owner.units[0] and self.version() != self._version:
                written += self.groups
            self.is_open = self.on_demand = False
            self.views, self._made_at = [], []
            if self.use is not None:
                self.use.token = None  # a graph that holds itself would never go
            self.use = None
            self._sites.hide()
            held = self._held()
            if held is not None:
                gathered_again.close(held)
            if written:
                self.forget_between()
            if written and not interrupted:
                written[0].refuse_writes(self.name)


@dataclass(eq=False)
class Sharded(Passes):
    """A sharded module as a whole."""

    entrances: list[RemovableHandle] = field(default_factory=list)
    """Hooks of parts outside of the units."""
    outer: Sharded | None = None
    """Of the module around it, which has taken its units in."""

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

    def take_in(self, inner: Sharded, names: Sequence[str]) -> None:
        """The units of a part that was sharded by itself before, or of some, which are this module's: ``names``."""
        first = inner.units[0]
        name = name_around(first.module, names)
        for unit in inner.units:
            unit.drop()
            unit.shut(interrupted=True)
            unit.owner, unit.name = self, name(unit.name)
            unit.regather = unit.regathers_inside
            unit.forget_pass()
            for group in unit.groups:
                group.owner = self
                group.unit = f"unit {unit.name!r} of {type(self.units[0].module).__name__}"
                for slot in group.slots:
                    slot.name = name(slot.name)
        self.units += inner.units
        for hook in inner.entrances:
            hook.remove()
        for part in {first.module, *first.modules}:
            vars(part).pop(_HERE)
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


_HERE = "_meshcomm_fully_sharded"


def register(module: nn.Module, owner: Sharded) -> None:
    """Remember with a module, and nowhere else, that it is sharded: they go together."""
    for part in {module, *owner.units[0].modules}:
        vars(part)[_HERE] = owner
    know(module, owner.policy.axis.mesh)


def sharded_of(module: nn.Module) -> Sharded | None:
    """What stands behind a module that was sharded itself; nothing behind a shallow copy, which has the attributes of
    another module.
    """
    owner = vars(module).get(_HERE)
    return owner if isinstance(owner, Sharded) and module in (owner.units[0].module, *owner.units[0].modules) else None


def is_sharded(module: nn.Module) -> bool:
    """Whether it, or its own parameters as those of a part of another module, are sharded."""
    return sharded_of(module) is not None or isinstance(_torch.own_parameters(module), Door)


def owner_of(where: str, module: nn.Module) -> Sharded:
    """What stands behind a sharded module."""
    owner = sharded_of(module) if isinstance(module, nn.Module) else None
    if owner is None:
        fail(where, f"this {type(module).__name__} is not sharded.", fix="pass the module that fully_shard was given")
    return owner
