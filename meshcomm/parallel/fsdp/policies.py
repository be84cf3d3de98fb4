"""Over which axes each parameter of a module is sharded, where some go over fewer of them: as experts do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from meshcomm.axis import axes_in
from meshcomm.parallel.alike import refuse_other_modules, refuse_others
from meshcomm.parallel.cut_parameters import refuse_overlap
from meshcomm.parallel.fewer_axes import axis_over, fewer_axes
from meshcomm.parallel.fsdp.slots import Policy, Slot
from meshcomm.spmd.types.told import remember, tell

WHERE = "fully_shard"


class Policies:
    """That of the module, and those of what goes over fewer axes."""

    def __init__(self, module: nn.Module, policy: Policy, told: Mapping[str, tuple[str, ...]], apart: set[int]) -> None:
        self.module, self.policy = module, policy
        self.fewer = fewer_axes(WHERE, module, told, policy.axis.mesh, policy.names, apart)
        self.loads: dict[Policy, list[int]] = {}
        """How much each rank has of what is kept whole."""
        self._others: dict[tuple[tuple[str, ...], tuple[str, ...]], Policy] = {}

    def of(self, x: Tensor) -> Policy:
        """That of a parameter or a buffer."""
        fewer, policy = self.fewer.get(id(x)), self.policy
        if fewer is None:
            return policy
        replicas = () if policy.replica is None else fewer.of(axes_in(policy.replica.name))
        axes = fewer.of(axes_in(policy.axis.name)) if fewer.told is None else fewer.told
        key = axes, tuple(name for name in replicas if name not in axes)
        if key not in self._others:
            along = [axis_over(policy.axis.mesh, names, WHERE) for names in key]
            self._others[key] = replace(policy, axis=along[0], replica=along[1] if key[1] else None)
        return self._others[key]

    def refuse_overlaps(self, params: Sequence[nn.Parameter]) -> None:
        """MeshError for a parameter that is cut along an axis of its own already."""
        over: dict[Policy, set[int]] = {}
        for param in params:
            over.setdefault(self.of(param), set()).add(id(param))
        for policy, own in over.items():
            for axis in policy.axes:
                refuse_overlap(WHERE, self.module, axis, own)

    def refuse_others(self, slots: Sequence[Slot], besides: set[nn.Module]) -> None:
        """MeshError, on every rank, where modules differ; parameters along the axes along which they are the same."""
        spread: dict[Policy, list[tuple[str, nn.Parameter]]] = {self.policy: []}
        for slot in slots:
            spread.setdefault(self.of(slot.param), []).append((slot.name, slot.param))
        for axis in self.policy.axes:
            others = [repr(policy.names) for policy in spread if policy is not self.policy]
            what = "some parameters go over other axes on one rank than on another."
            refuse_others(WHERE, what, others, axis, "the same axes= on all ranks, and the same mark_varying before")
        for policy, mine in spread.items():
            for axis in policy.axes:
                refuse_other_modules(WHERE, self.module, mine, axis, besides)

    def tell_types(self, slots: Sequence[Slot], buffers: bool) -> None:
        """Say along which axes parameters and buffers vary now."""
        for slot in slots:
            policy = self.of(slot.param)
            cut = axes_in(policy.axis.name) if policy.axis.name else ()
            self._tell(slot.param, cut, policy.names)
        for each in self.module.buffers() if buffers else ():
            self._tell(each, (), self.of(each).names)
        remember(self.module)

    def _tell(self, x: Tensor, cut: tuple[str, ...], over: tuple[str, ...]) -> None:
        fewer = self.fewer.get(id(x))
        others = () if fewer is None else fewer.others(self.policy.names)
        tell(WHERE, x, self.policy.axis.mesh, (*cut, *others), over)

    def loads_of(self, policy: Policy) -> list[int]:
        """What is kept whole adds to it."""
        return self.loads.setdefault(policy, [0] * policy.axis.size)
