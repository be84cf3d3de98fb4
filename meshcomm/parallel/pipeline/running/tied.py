"""Parameters that several stages have, such as the embedding that is also the last layer: one value, one gradient.

::

    stage 0       gradient a   ──┐        ┌──  a + b
                                 ├─ sum ──┤                 once per step, after the stages' own reductions
    last stage    gradient b   ──┘        └──  a + b

Stages say which they are: ``stage.tied_parameters``, from names in the stage to a name that all of them know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshcomm.axis import Axis
from meshcomm.collectives.gather import all_gather
from meshcomm.collectives.messages import exchange
from meshcomm.errors import fail
from meshcomm.objects.objects import all_gather_object
from meshcomm.parallel.checkpoint.parts import ties_of
from meshcomm.parallel.cut_parameters import Flat, Part, know_shared, parts_of
from meshcomm.runtime.transports.dry.world import said_by_each

WHERE = "pipelined"


class Held(NamedTuple):
    """One of the parameters that are tied."""

    param: nn.Parameter
    part: Part | None
    """How it is cut here, where others are cut in other ways."""

    def whole(self, x: Tensor) -> Tensor:
        """What travels of it: ``x``, or all of what it is a part of."""
        if self.part is None:
            return x
        assert isinstance(self.part.how, Flat)
        sizes = [stop - start for start, stop in self.part.how.ranges]
        found = all_gather(x.reshape(-1), self.part.axis, sizes=sizes, mesh=self.part.mesh)
        return found.view(self.part.how.shape)

    def own(self, x: Tensor) -> Tensor:
        """What is kept here of what has travelled."""
        if self.part is not None:
            assert isinstance(self.part.how, Flat)
            x = x.reshape(-1)[self.part.how.start : self.part.how.stop]
        return x.clone().view(self.param.shape)


class Tie(NamedTuple):
    """Parameters that are one."""

    here: Sequence[Held]
    holders: tuple[int, ...]
    """The ranks, along the axis, in the order of their first stages that have it."""


class Ties:
    """Those of this rank."""

    def __init__(self, stages: Sequence[nn.Module], numbers: Sequence[int], axis: Axis) -> None:
        """``numbers``: which stages of the model these are."""
        self._axis, self._mesh = axis.name, axis.mesh
        own: dict[str, list[nn.Parameter]] = {}
        first: dict[str, int] = {}
        parts: dict[int, list[Part]] = {}
        for stage, number in zip(stages, numbers, strict=True):
            params = dict(stage.named_parameters(remove_duplicate=False))
            parts |= parts_of(stage)
            for name, key in ties_of(stage).items():
                if name not in params:
                    fail(WHERE, f"tied_parameters of stage {number} names {name!r}, which it has not.", fix="its names")
                known = own.setdefault(key, [])
                if not any(p is params[name] for p in known):
                    known.append(params[name])
                first.setdefault(key, number)
        here = {key: (first[key], [_told(p, parts.get(id(p), ())) for p in ps]) for key, ps in own.items()}
        with said_by_each():
            every = all_gather_object(here, axis.name, mesh=axis.mesh)
        self._ties: list[Tie] = []
        for key in sorted({key for of_rank in every for key in of_rank}):
            found = {rank: of_rank[key] for rank, of_rank in enumerate(every) if key in of_rank}
            told = [each for _, of_rank in found.values() for each in of_rank]
            if len({shape for shape, _ in told}) > 1:
                what = f"tied parameter {key!r} has other shapes or dtypes elsewhere."
                fail(WHERE, what, got=", ".join(str(shape) for shape, _ in told), fix="the same, cut alike")
            if axis.index not in found or len(told) == 1:
                continue
            apart = len({how for _, how in told}) > 1
            held = [Held(p, _flat(parts.get(id(p), ())) if apart else None) for p in own[key]]
            self._ties.append(Tie(held, tuple(sorted(found, key=lambda rank: found[rank][0]))))
            for p in own[key]:
                know_shared(p, len(told))
        with torch.no_grad():
            for tie in self._ties:
                value, *_ = self._everyone(tie, tie.here[0].whole(tie.here[0].param.detach()))
                for each in tie.here:
                    each.param.copy_(each.own(value))

    @contextlib.contextmanager
    def added_up(self) -> Iterator[None]:
        """At the end the gradients that have come inside are those of all ranks; what was there before is added."""
        before = [[each.param.grad for each in tie.here] for tie in self._ties]
        for tie in self._ties:
            for each in tie.here:
                each.param.grad = None
        try:
            yield
        except BaseException:
            for tie, old in zip(self._ties, before, strict=True):
                for each, g in zip(tie.here, old, strict=True):
                    each.param.grad = g
            raise
        with torch.no_grad():
            for tie, old in zip(self._ties, before, strict=True):
                total = _sum(self._everyone(tie, _sum([each.whole(_gradient(each.param)) for each in tie.here])))
                for each, g in zip(tie.here, old, strict=True):
                    if each.param.requires_grad:
                        each.param.grad = each.own(total) if g is None else g + each.own(total)

    def _everyone(self, tie: Tie, x: Tensor) -> list[Tensor]:
        """What each of the ranks that have it has, in order."""
        axis = self._mesh.axis(self._axis, WHERE)
        others = [rank for rank in tie.holders if rank != axis.index]
        x = x.contiguous()
        came = exchange([(x, rank) for rank in others], [(rank, tuple(x.shape), x.dtype) for rank in others],
                        axis.name, mesh=axis.mesh)  # fmt: skip
        found = dict(zip(others, came, strict=True))
        return [found.get(rank, x) for rank in tie.holders]


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """In order, so that all ranks come to the same bits."""
    total, *more = parts
    for each in more:
        total = total + each
    return total


def _gradient(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def _flat(parts: Sequence[Part]) -> Part | None:
    return next((part for part in parts if isinstance(part.how, Flat)), None)


def _told(p: nn.Parameter, parts: Sequence[Part]) -> tuple[Any, Any]:
    """What must be the same for all who have it, and how each of them keeps it."""
    part = _flat(parts)
    if part is None:
        return (tuple(p.shape), p.dtype), None
    assert isinstance(part.how, Flat)
    return (tuple(part.how.shape), p.dtype), part.how.ranges
