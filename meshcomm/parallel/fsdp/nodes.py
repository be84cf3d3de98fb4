"""The nodes of autograd's between the shards of a unit and its parameters.

::

    forward     shards ─> [Shards] ─ empty token ─> [Weights] ─> parameters, views of what was gathered
    backward    shards <─ [Shards] <─ empty token ── [Weights] <─ gradients of the parameters
                          waits for the sums         packs them and starts to reduce them

The later one is new in each forward pass. The earlier one serves all of them; its number is the lowest, so autograd
runs it when nothing else is left: reductions overlap with all of backward. Between the two goes an empty tensor, never
an unfinished sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshcomm import _torch
from meshcomm.collectives.rule import apply, rule_named
from meshcomm.parallel.fsdp.gathered_again import Again
from meshcomm.parallel.fsdp.groups import Group, Sums

_AT_LAST = 0
"""The number of autograd's that comes after all of the user's."""


class Entrance:
    """Where the gradients of a unit's parameters come to its shards: one node of autograd's for all forward passes."""

    __slots__ = ("_shards", "needy", "results", "token", "whole")

    def __init__(self, groups: list[Group], needy: list[list[int]]) -> None:
        self._shards, self.needy = [group.shard for group in groups], needy
        self.whole = all(len(places) == len(group.slots) for places, group in zip(needy, groups, strict=True))
        """Whether every parameter gets a gradient."""
        self.results: dict[int, list[Sums]] = {}
        """Of backward passes that are under way."""
        params = [group.slots[at].param for group, places in zip(groups, needy, strict=True) for at in places]
        self.token: Tensor = _shards(self.results, groups[0].policy.device, *params)
        _torch.set_sequence_number(self.token.grad_fn, _AT_LAST)

    def leads_to(self, groups: list[Group], needy: list[list[int]]) -> bool:
        """Whether these are its parameters still. On a device it belongs to a stream, and a graph of CUDA's that is
        captured may use no other one: it serves once.
        """
        same = all(map(is_, self._shards, [group.shard for group in groups])) and self.needy == needy
        return same and groups[0].policy.device.type == "cpu" and _torch.kind_of(self.token) is Tensor


def connect(
    groups: list[Group], buffers: Sequence[Tensor], entrance: Entrance | None, root: Use | None, *, is_root: bool
) -> tuple[Use | None, list[list[Tensor]]]:
    """Views of the parameters, of which those that get gradients are connected to their shards: by ``entrance``, that
    of the pass before, or a new one. All ranks come back to a unit in backward if they come to one that was gathered
    under it: ``root``, for which ``is_root``.
    """
    needy = [group.needy() for group in groups]
    if not any(needy):
        return None, views_of(groups, buffers)
    if entrance is None or not entrance.leads_to(groups, needy):
        entrance = Entrance(groups, needy)
    use = Use(groups, entrance)
    views: list[list[Tensor]] = []
    connected = _weights(entrance.token, None if root is None else root.token, use, buffers, views, is_root)
    if is_root:
        use.token = connected[-1]
    start = 0
    for places, mine in zip(entrance.needy, views, strict=True):
        if len(places) == len(mine):
            mine[:] = connected[start : start + len(mine)]
        else:
            for number, at in enumerate(places, start):
                mine[at] = connected[number]
        start += len(places)
    return use, views


def views_of(groups: list[Group], buffers: Sequence[Tensor]) -> list[list[Tensor]]:
    """The parameters in gathered buffers."""
    return [group.layout.views(buffer) for group, buffer in zip(groups, buffers, strict=True)]


def views_as_function(groups: list[Group]) -> list[list[Tensor]]:
    """The same, gathered of whatever stands in the place of the parameters, by plain differentiable operations."""
    views = []
    for group in groups:
        policy = group.policy
        flat = group.flat_of_slots()
        flat = flat.to(policy.device, policy.param_dtype or flat.dtype)
        if policy.replica is not None:
            flat = apply(rule_named("pvary"), flat, policy.replica)
        views.append(group.layout.views(apply(rule_named("all_gather"), flat, policy.axis, (0, None))))
    return views


class Use:
    """One forward pass's use of a unit's groups, and what backward passes make of it."""

    __slots__ = ("again", "collects", "entrance", "groups", "token")

    def __init__(self, groups: list[Group], entrance: Entrance) -> None:
        self.groups, self.entrance, self.collects = groups, entrance, groups[0].owner.collects
        self.token: Tensor | None = None
        """What units that are gathered under this one are connected to."""
        self.again: weakref.ref[Again] | None = None

    def ready(self, gradients: Sequence[Tensor | None]) -> bool:
        """Take the gradients of the parameters; whether the shards get any now."""
        owner = self.groups[0].owner
        weights = None if self.again is None else self.again()
        if weights is not None and not torch.is_grad_enabled():  # a graph that is kept for another pass keeps them too
            weights.buffers = None
        owner.done_with(self.groups)
        differentiable = torch.is_grad_enabled() or torch.is_anomaly_enabled()
        if not differentiable:
            owner.advance()
        sums = Sums(owner)
        start = 0
        for group, places in zip(self.groups, self.entrance.needy, strict=True):
            if places:
                own = gradients[start : start + len(places)]
                start += len(places)
                sums.add(group, places, own, collects=self.collects, later=not differentiable)
        if not sums.reductions:
            return False
        self.entrance.results.setdefault(_torch.backward_pass(), []).append(sums)
        owner.flight.append(sums)
        return True


class _Shards(Function):
    """Where the shards come in: takes their gradients when all else is done."""

    @staticmethod
    def forward(ctx: Any, results: dict[int, list[Sums]], device: torch.device, *shards: Tensor) -> Tensor:
        ctx.results, ctx.count = results, len(shards)
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=device)

    @staticmethod
    @_torch.out_of_graphs  # of a step that is compiled, with its backward, and that was broken before
    def backward(ctx: Any, token: Tensor | None) -> tuple[Tensor | None, ...]:
        if token is None:
            return None, None, *[None] * ctx.count
        if _torch.dispatch_modes():
            with _torch.outside_dispatch_modes():
                return None, None, *_landed(*ctx.results.pop(_torch.backward_pass()))
        return None, None, *_landed(*ctx.results.pop(_torch.backward_pass()))


def _landed(first: Sums, *others: Sums) -> list[Tensor | None]:
    """The gradients of the shards of a unit, which ``others`` are of, too, where it was used more than once."""
    first.owner.land()
    pieces = first.pieces()
    for sums in others:
        pieces = [_added(*both) for both in zip(pieces, sums.pieces(), strict=True)]
    return pieces


def _added(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    if x is None or y is None:
        return y if x is None else x
    return x + y


class _Weights(Function):
    """Where the parameters come out: starts to reduce their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        root: Tensor | None,
        use: Use,
        buffers: Sequence[Tensor],
        views: list[Any],
        is_root: bool,
    ) -> tuple[Tensor, ...]:
        views += [group.layout.apart(buffer) for group, buffer in zip(use.groups, buffers, strict=True)]
        needy = use.entrance.needy
        if use.entrance.whole:
            found = views[0] if len(views) == 1 else [*chain.from_iterable(views)]
        else:
            found = [mine[at] for mine, places in zip(views, needy, strict=True) for at in places]
        ctx.use, ctx.count = use, len(found)
        ctx.set_materialize_grads(False)
        return (*found, torch.empty(0, device=token.device)) if is_root else tuple(found)

    @staticmethod
    @_torch.out_of_graphs
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None, None, None]:
        use: Use = ctx.use
        if _torch.dispatch_modes():
            with _torch.outside_dispatch_modes():
                given = use.ready(gradients[: ctx.count])
        else:
            given = use.ready(gradients[: ctx.count])
        return use.groups[0].owner.nothing if given else None, None, None, None, None, None


# Function.apply looks for torch.func, which `Unit.open` does: 3 of 10 µs.
_shards: Any = super(Function, _torch.shortened(_Shards, "results", "count")).apply  # type: ignore[misc]
_weights: Any = super(Function, _torch.shortened(_Weights, "use", "count")).apply  # type: ignore[misc]
