"""Groups of a fully sharded module: one flat shard, one gather, one reduction.

The parameters of a unit that are alike in dtype and in whether they need a gradient are a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import attrgetter, is_, is_not
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from meshcomm import _torch
from meshcomm.axis import Axis
from meshcomm.collectives.agree import agree, begin_to_agree
from meshcomm.collectives.rule import Rule, apply, rule_named
from meshcomm.errors import fail, names
from meshcomm.parallel.data.means import Mean
from meshcomm.parallel.fsdp.buffers.flat_buffers import Layout
from meshcomm.parallel.fsdp.buffers.memory import Memory
from meshcomm.parallel.fsdp.buffers.offload import Copies, pinned
from meshcomm.parallel.fsdp.slots import Counts, Policy, Slot, raw, refuse_replaced
from meshcomm.parallel.optimizers.gradient_dtypes import gradients_in
from meshcomm.parallel.stand_ins import become
from meshcomm.runtime.call import for_later
from meshcomm.runtime.hooks.ranges import calling, in_range
from meshcomm.runtime.pending import Pending, settled
from meshcomm.runtime.transports.protocol import Parts
from meshcomm.spmd.types.vma import lie_apart

_needs = attrgetter("requires_grad")
_GATHER, _SCATTER, _REDUCE = rule_named("all_gather"), rule_named("reduce_scatter"), rule_named("all_reduce")


@dataclass(eq=False)
class Flow:
    """What the groups of a module have to do with each other."""

    policy: Policy
    nothing: Tensor
    """What goes between the nodes of a group in backward."""
    counts: Counts = field(default_factory=Counts)
    quiet: bool = False
    """Forward passes that begin now are of gradients that are added up here and not reduced."""
    collects: bool = False
    """The latest forward pass was such a one; backward computes parts of it again."""
    mean: Mean | None = None
    """Over what the loss is a mean."""
    flight: list[Sums] = field(default_factory=list)
    copies: Copies = field(default_factory=Copies)
    """Between shards on the CPU and the device."""
    memory: Memory = field(default_factory=Memory)
    """Of a pass."""

    def advance(self) -> None:
        """Before the next reduction starts, the one before it takes a step: so much memory is under way and no more."""
        if self.flight:
            self.flight[-1].advance()

    def land(self) -> None:
        """Wait for all reductions, in the order in which they were started; and hear which gradients there are."""
        if not self.flight:
            return
        reductions = [reduction for sums in self.flight for reduction in sums.reductions]
        heard = begin_to_hear_all([(each.marks, each.policy) for each in reductions])
        self.advance()
        for reduction in reductions:
            reduction.total()
        found = heard()
        for reduction in reductions:
            reduction.brought()
        self.copies.landed()
        for reduction, marks in zip(reductions, found, strict=True):
            reduction.marks = marks
        self.flight.clear()
        self.memory.clear()

    def done_with(self, groups: list[Group]) -> None:
        """Backward has the gradients of these groups' parameters."""


class Group:
    """Parameters of a unit that go together, and this rank's shard of them."""

    def __init__(
        self, owner: Flow, slots: list[Slot], layout: Layout, shard: Tensor, unit: str, policy: Policy | None = None
    ) -> None:
        """``unit``: whose parameters they are, in the words of all ranks; ``policy``: the owner's by default."""
        self.owner, self.slots, self.layout, self.unit = owner, slots, layout, unit
        self.policy = policy or owner.policy
        self.index = self.policy.axis.own_part("how many elements of a parameter a rank keeps")
        self.row = layout.row(self.index)
        self._flags: list[bool] = []
        self._needy: list[int] = []
        """Which of the parameters get gradients, as these say that need one."""
        self.kept: tuple[Tensor, list[int]] | None = None
        """Gradients that were not reduced, and which parameters had any."""
        self.adopt(shard)

    def copied(self, owner: Flow, memo: dict[int, Any]) -> Group:
        """That of a copy of the module, with a shard of its own."""
        shard = self.checked().detach().clone()
        return Group(owner, [slot.copied(memo) for slot in self.slots], self.layout, shard, self.unit, self.policy)

    def adopt(self, shard: Tensor) -> None:
        """Make the parameters views of ``shard``, what the layout has stored here."""
        policy = self.policy
        self.shard = shard = pinned(shard, policy.device) if policy.offload else shard
        lie_apart(shard)
        pieces = self.layout.cut(shard, self.index)
        self.params = [slot.param for slot in self.slots]
        for param, piece in zip(self.params, pieces, strict=True):
            become(param, piece)
            gradients_in(policy.accumulate_dtype, param)
        self._place_of = _torch.places_like(shard)
        self._addresses = [*map(self._place_of, pieces)]
        sites = [(door, name, slot.param) for slot in self.slots for door, name in slot.sites]
        self._registered = tuple(zip(*sites, strict=True))
        """The doors, the names behind them, and what is registered there."""
        self._dtype = policy.param_dtype or shard.dtype
        self._as_it_is = (
            shard.dtype == self._dtype and shard.device == policy.device and shard.numel() == self.layout.chunk
        )
        self._nbytes = self.layout.total * self._dtype.itemsize
        self._is_elsewhere = not any(param.numel() for param in self.params)

    # -------------------------------------------------------------------------------------------- parameters

    def checked(self) -> Tensor:
        """The shard, of which the parameters are views: made again if ``module.to`` or a load has replaced some."""
        if [*map(self._place_of, self.params)] != self._addresses:
            self._make_again()
        elif self._is_elsewhere:  # what is empty has no address
            first = self.params[0]
            if first.dtype != self.shard.dtype or first.device != self.shard.device:
                self._make_again()
        return self.shard

    def refuse_writes(self, unit: str) -> NoReturn:
        """Some were written in place while they were gathered."""
        what = f"parameters of {unit or 'the module'!r} were written in place during forward: what was gathered and"
        fix = "write to them outside of forward, each rank to its slices, as optimizers do; or keep them whole: ignore="
        got = f"one of {names([slot.name for slot in self.slots[:8]])}"
        fail("fully_shard", f"{what} what each rank keeps are not the same any more.", got=got, fix=fix)

    def is_swapped(self) -> bool:
        """Whether somebody (``functional_call``) has put other tensors in the place of parameters."""
        doors, names, params = self._registered
        return not all(map(is_, map(dict.get, doors, names), params))

    def refuse_replaced(self) -> None:
        """MeshError where something that is no part which this rank may keep stands in the place of a parameter."""
        for at, slot in enumerate(self.slots):
            wanted = self.layout.shape_at(at, self.index)
            for found in (dict.get(door, name) for door, name in slot.sites):
                if not isinstance(found, Tensor) or tuple(found.shape) != wanted:
                    refuse_replaced(slot.name, found, wanted, self.policy.axis)

    def swap_in(self) -> bool:
        """Take over parameters that a load has put in the place of ours; whether all are parameters that fit."""
        for at, slot in enumerate(self.slots):
            door, name = slot.sites[0]
            found = dict.get(door, name)
            if found is None or _torch.kind_of(found) is not nn.Parameter:
                return False
            if tuple(found.shape) != self.layout.shape_at(at, self.index):
                return False
            if any(dict.get(other, alias) is not found for other, alias in slot.sites):
                return False
        for slot in self.slots:
            door, name = slot.sites[0]
            slot.param = raw(door, name)
        self._make_again()
        return True

    def _make_again(self) -> None:
        for at, slot in enumerate(self.slots):  # of whose data another tensor may have taken the place
            wanted = self.layout.shape_at(at, self.index)
            if slot.param.numel() != math.prod(wanted):
                refuse_replaced(slot.name, slot.param, wanted, self.policy.axis)
        first = self.slots[0].param
        if any(slot.param.dtype != first.dtype or slot.param.device != first.device for slot in self.slots):
            fail(
                "fully_shard",
                f"parameters of one unit have become different: {self.slots[0].name!r} is {first.dtype} on "
                f"{first.device}, another is not.",
                fix="change dtype and device of the whole module at once, or before fully_shard",
            )
        self.adopt(self.row.join([slot.param.detach() for slot in self.slots], first.detach()))

    def flat_of_slots(self) -> Tensor:
        """The shard, as a function of whatever stands in the place of the parameters: for ``torch.func``."""
        pieces = [raw(*slot.sites[0]) for slot in self.slots]
        return self.layout.padded(self.row.join(pieces, self.shard))

    # -------------------------------------------------------------------------------------------- gathering

    def gather(self, counts: Counts, again: bool = False) -> Any:
        """Start: a buffer ``[n * k]``, or a Pending of it. ``again``: of the shard that was gathered before."""
        shard = self.shard if again else self.checked()
        if not self._as_it_is:
            shard = self.owner.copies.there(self.layout.padded(shard), self.policy.device, self._dtype)
        counts.bytes_gathered += self._nbytes
        axis = self.policy.axis
        link = axis.link
        if axis.size == 1 or ((link.watched or link.hears) and _is_told(axis, shard)):
            return for_later(True, self._told, _GATHER, shard, axis, (0, None))
        if _torch.profiler_on():
            with in_range("all_gather", axis, shard.dtype, shard.shape):
                return for_later(True, link.gather_flat, shard, self.owner.memory.empty)
        return for_later(True, link.gather_flat, shard, self.owner.memory.empty)

    def needy(self) -> list[int]:
        """Which parameters get gradients."""
        flags = [*map(_needs, self.params)]
        if flags != self._flags:
            self._flags, self._needy = flags, [at for at, flag in enumerate(flags) if flag]
        return self._needy

    def _told(self, rule: Rule, x: Tensor, axis: Axis, params: tuple[Any, ...]) -> Any:
        """Run it, and let who compares calls compare units, too: those of equal size are not to be mixed up."""
        tree = ((f" of {self.unit}", x.dtype, tuple(x.shape)),) if _is_told(axis, x) else ()
        return apply(rule, x, axis, params, tree)

    # -------------------------------------------------------------------------------------------- reducing

    def packed(
        self,
        needy: Sequence[int],
        gradients: Sequence[Tensor | None],
        device: torch.device,
        collects: bool = False,
        later: bool = False,
    ) -> Tensor | Parts:
        """``[n * k]``: the gradients in the dtype in which they are reduced, or in that in which they are added up.
        What is reduced ``later`` may be in parts, if the transport puts them together itself.
        """
        policy = self.policy
        whole: Sequence[Tensor | None] = gradients
        if len(needy) < len(self.slots):
            places = dict(zip(needy, gradients, strict=True))
            whole = [places.get(at) for at in range(len(self.slots))]
        like = gradients[0]
        if like is None:
            like = next((g for g in gradients if g is not None), None)
        if like is None:
            like = torch.empty(0, dtype=policy.param_dtype or self.shard.dtype, device=device)
        wanted = (policy.collected if collects else policy.travels)(like.dtype)
        if torch.is_grad_enabled():
            return self.layout.buffer.join(whole, like).to(wanted)
        if later and for_later(True, policy.axis.link.takes_parts, device, wanted):
            return Parts(self.layout.buffer.parts(whole, like), wanted, rows=policy.axis.size)
        kind = like if wanted == like.dtype else like.new_empty(0, dtype=wanted)
        return self.layout.buffer.join(whole, like, self.owner.memory.empty(kind, self.layout.total))

    def scatter(self, packed: Tensor | Parts) -> Any:
        """Start: ``[k]``."""
        axis, counts = self.policy.axis, self.owner.counts
        link = axis.link
        counts.reductions += 1
        counts.bytes_reduced += packed.nbytes
        if isinstance(packed, Parts):
            given, dtype, shape = (0, self.policy.op, None), packed.dtype, (self.layout.total,)
            tree = ((f" of {self.unit}", dtype, shape),) if link.watched or link.hears else ()
            with calling(axis, _SCATTER.noted(given, dtype, torch.Size(shape), tree, False, axis)):
                return link.scatter_parts(packed, self.policy.op)
        if axis.size == 1 or packed.requires_grad or ((link.watched or link.hears) and _is_told(axis, packed)):
            return self._told(_SCATTER, packed, axis, (0, self.policy.op, None))
        if _torch.profiler_on():
            with in_range("reduce_scatter", axis, packed.dtype, packed.shape):
                return link.scatter_flat(packed, self.policy.op)
        return link.scatter_flat(packed, self.policy.op)

    def spread(self, total: Tensor, replica: Axis) -> Any:
        """Start the sum over the replicas."""
        self.owner.counts.replica_reductions += 1
        return self._told(_REDUCE.for_own, total, replica, (self.policy.op,))

    def brought(self, total: Tensor) -> Tensor:
        """The gradient of the shard, of its dtype and on its way to its device."""
        mean = self.owner.mean
        dtype, wide = self.shard.dtype, self.policy.accumulate_dtype
        if wide is not None:
            dtype = torch.promote_types(dtype, wide)
        if total.dtype != dtype:
            total = total.to(dtype)
        if mean is not None and (share := mean.share(self.policy.names)) != 1:
            total = total * share
        return total if total.device == self.shard.device else self.owner.copies.back(total, self.shard.device)

    def pieces(self, total: Tensor, needy: Sequence[int]) -> Sequence[Tensor]:
        """The gradients of the parts of the shard."""
        pieces = self.layout.cut(total, self.index)
        return pieces if len(needy) == len(pieces) else [pieces[at] for at in needy]

    def kept_marks(self) -> list[int]:
        """Of each parameter whether a gradient was collected."""
        return [0] * len(self.slots) if self.kept is None else self.kept[1]

    @torch.no_grad()
    def reduce_kept(self, marks: Sequence[int]) -> None:
        """Reduce what was collected, by this rank or another one, and add it to the gradients of the shards that
        have any: ``marks``.
        """
        policy, needy = self.policy, self.needy()
        kept, self.kept = self.kept, None
        if not any(marks):
            return
        if kept is None:
            dtype = policy.travels(self._dtype)
            packed = torch.zeros(self.layout.total, dtype=dtype, device=policy.device)
        else:
            packed = kept[0].to(policy.travels(kept[0].dtype))
        for at, piece in zip(needy, _Reduction(self, needy, packed, later=False).pieces(), strict=True):
            if marks[at]:
                p = self.slots[at].param
                p.grad = piece if p.grad is None else p.grad + piece


def _is_told(axis: Axis, x: Tensor) -> bool:
    """Whether what moves this says what it belongs to."""
    return axis.link.watched or (axis.link.hears and x.is_cpu and not torch.compiler.is_compiling())


class Sums:
    """The gradients of a unit's parameters in one backward pass, and whether there are any."""

    __slots__ = ("owner", "reductions")

    def __init__(self, owner: Flow) -> None:
        self.owner = owner
        self.reductions: list[_Reduction] = []

    def add(
        self, group: Group, needy: list[int], gradients: Sequence[Tensor | None], *, collects: bool, later: bool
    ) -> None:
        """Start to reduce the gradients of a group, or collect them."""
        adds_up = collects or group.kept is not None
        packed: Any = group.packed(needy, gradients, group.policy.device, adds_up, later and not adds_up)
        marks = [*map(int, map(is_not, gradients, repeat(None)))]
        if group.kept is not None:
            before, seen = group.kept
            packed, group.kept = packed + before, None
            marks = [mark | seen[at] for mark, at in zip(marks, needy, strict=True)]
        if collects:
            collected = [0] * len(group.slots)
            for at, mark in zip(needy, marks, strict=True):
                collected[at] = mark
            group.kept = packed.detach(), collected
        else:
            if adds_up:
                packed = packed.to(group.policy.travels(packed.dtype))
            self.reductions.append(_Reduction(group, needy, packed, later, marks))

    def advance(self) -> None:
        """Each one takes its step."""
        for reduction in self.reductions:
            reduction.advance()

    def pieces(self) -> list[Tensor | None]:
        """The gradients of the shards, none where no rank has one."""
        found: list[Tensor | None] = [*chain.from_iterable([each.pieces() for each in self.reductions])]
        marks = [*chain.from_iterable([each.marks for each in self.reductions])]
        if not all(marks):
            found = [piece if mark else None for piece, mark in zip(found, marks, strict=True)]
        return found


class _Reduction:
    """A sum of gradients over the ranks on its way."""

    __slots__ = ("_group", "_is_brought", "_needy", "_over_replicas", "_value", "marks", "policy")

    def __init__(
        self, group: Group, needy: Sequence[int], packed: Tensor | Parts, later: bool, marks: Sequence[int] = ()
    ) -> None:
        self.policy = policy = group.policy
        self.marks = marks
        """Of each parameter that gets gradients whether this rank has one, or has collected one; once the sums have
        landed, whether any rank has.
        """
        self._group, self._needy = group, needy
        self._over_replicas = self._is_brought = False
        self._value: Any = for_later(later, group.scatter, packed)
        if not later:
            self._add_replicas(policy.replica)

    def _add_replicas(self, replica: Axis | None) -> None:
        self._over_replicas = True
        if replica is not None:
            self._value = self._group.spread(self._value, replica)

    def advance(self) -> None:
        """Wait for the sum over the ranks that have slices, and start that over the replicas."""
        if not self._over_replicas:
            self._value = settled(self._value)
            replica = self.policy.replica
            if replica is None:
                self._over_replicas = True
            else:
                for_later(True, self._add_replicas, replica)

    def total(self) -> Tensor:
        """This rank's chunk of the sum."""
        if not self._over_replicas:
            self.advance()
        if isinstance(self._value, Pending):
            self._value = settled(self._value)
        return self._value  # type: ignore[no-any-return]

    def brought(self) -> Tensor:
        """The same as the gradient of the shard, on its way to it."""
        if not self._is_brought:
            self._value, self._is_brought = self._group.brought(self.total()), True
        return self._value  # type: ignore[no-any-return]

    def pieces(self) -> Sequence[Tensor]:
        """The gradients of the parts of the shard."""
        total = self.brought()
        self._group.owner.copies.landed()
        return self._group.pieces(total, self._needy)


# ------------------------------------------------------------------------------------ which gradients any rank has
# Marks of parameters, 0 or 1, of which the ranks hear which ones any of them has set: 62 to a word of the host's.

_BITS = 62
"""Of a word, that hold a mark each."""


def _begin_to_hear(marks: list[int], over: Sequence[Axis]) -> Callable[[], list[int]]:
    """Begin to ask who has set them, over the first axis; what is given asks the others, and waits: for no device."""
    axes = [axis for axis in over if axis.size > 1]
    if not (axes and marks):
        return lambda: marks
    words = _words(marks)
    first = begin_to_agree(words, axes[0], op="bor")

    def hear() -> list[int]:
        [found] = settled(first)
        for axis in axes[1:]:
            [found] = agree(found, axis, op="bor")
        if list(found) == words:
            return marks
        bits = "".join([f"{word:0{_BITS}b}"[::-1] for word in found])
        return [*map(int, bits[: len(marks)])]

    return hear


def _words(marks: Sequence[int]) -> list[int]:
    """The marks, 0 or not, as bits."""
    bits = "".join(map("01".__getitem__, map(bool, marks)))
    return [int(bits[at : at + _BITS][::-1], 2) for at in range(0, len(marks), _BITS)]


def begin_to_hear_all(every: Sequence[tuple[Sequence[int], Policy]]) -> Callable[[], list[Sequence[int]]]:
    """The same of many lists, each over the axes that its gradients are reduced over."""
    over: dict[tuple[str, ...], list[int]] = {}
    for at, (_, policy) in enumerate(every):
        over.setdefault(policy.names, []).append(at)
    heard = [
        (places, _begin_to_hear([*chain(*[every[at][0] for at in places])], every[places[0]][1].axes))
        for places in over.values()
    ]

    def hear() -> list[Sequence[int]]:
        found: list[Sequence[int]] = [marks for marks, _ in every]
        for places, hears in heard:
            marks, start = hears(), 0
            for at in places:
                found[at] = marks[start : (start := start + len(found[at]))]
        return found

    return hear
