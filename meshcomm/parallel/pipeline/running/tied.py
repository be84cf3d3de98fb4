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

from meshcomm.collectives.gather import all_gather
from meshcomm.collectives.messages import exchange
from meshcomm.errors import fail
from meshcomm.mesh import Axis
from meshcomm.objects.objects import all_gather_object
from meshcomm.parallel.cut_parameters import Flat, Part, know_shared, parts_of

WHERE = "pipelined"


def ties_of(stage: nn.Module) -> dict[str, str]:
    """From the names of a stage's parameters that others have, too, to the name that all of them know."""
    found = getattr(stage, "tied_parameters", None)
    return dict(found) if isinstance(found, dict) else {}


class Tie(NamedTuple):
    """A parameter that several ranks have."""

    param: nn.Parameter
    holders: tuple[int, ...]
    """The ranks, along the axis, in the order of their first stages that have it."""
    part: Part | None
    """How it is cut here, where its holders have cut it in other ways."""
    shape: tuple[int, ...]
    """What travels."""


class Ties:
    """Those of this rank."""

    def __init__(self, stages: Sequence[nn.Module], numbers: Sequence[int], axis: Axis) -> None:
        """``numbers``: which stages of the model these are."""
        self._axis = axis.name
        self._mesh = axis.mesh
        own: dict[str, nn.Parameter] = {}
        first: dict[str, int] = {}
        parts: dict[int, list[Part]] = {}
        for stage, number in zip(stages, numbers, strict=True):
            params = dict(stage.named_parameters(remove_duplicate=False))
            parts |= parts_of(stage)
            for name, key in ties_of(stage).items():
                if name not in params:
                    fail(WHERE, f"tied_parameters of stage {number} names {name!r}, which it has not.", fix="its names")
                if own.setdefault(key, params[name]) is not params[name]:
                    what = f"two stages of one rank have a parameter each for {key!r}, which is tied."
                    fail(WHERE, what, fix="the same Parameter in both")
                first.setdefault(key, number)
        self._ties: list[Tie] = []
        here = {key: (first[key], *_told(p, parts.get(id(p), ()))) for key, p in own.items()}
        every = all_gather_object(here, axis.name, mesh=axis.mesh)
        for key in sorted({key for of_rank in every for key in of_rank}):
            found = {rank: of_rank[key] for rank, of_rank in enumerate(every) if key in of_rank}
            if len({each[1] for each in found.values()}) > 1:
                what = f"tied parameter {key!r} has other shapes or dtypes on other ranks."
                fail(WHERE, what, got=", ".join(str(each[1]) for each in found.values()), fix="the same, cut alike")
            if axis.index not in found or len(found) == 1:
                continue
            p = own[key]
            apart = len({each[2] for each in found.values()}) > 1
            part = next(part for part in parts[id(p)] if isinstance(part.how, Flat)) if apart else None
            holders = tuple(sorted(found, key=lambda rank: found[rank][0]))
            self._ties.append(Tie(p, holders, part, found[axis.index][1][0] if apart else tuple(p.shape)))
            know_shared(p, len(found))
        with torch.no_grad():
            for tie in self._ties:
                [value, *_] = self._everyone(tie, tie.param.detach())
                tie.param.copy_(_own(value, tie))

    @contextlib.contextmanager
    def added_up(self) -> Iterator[None]:
        """At the end the gradients that have come inside are those of all ranks; what was there before is added."""
        before = [tie.param.grad for tie in self._ties]
        for tie in self._ties:
            tie.param.grad = None
        yield
        with torch.no_grad():
            for tie, old in zip(self._ties, before, strict=True):
                p = tie.param
                own = torch.zeros_like(p) if p.grad is None else p.grad
                total, *more = self._everyone(tie, own)
                for g in more:
                    total = total + g
                if p.requires_grad:
                    mine = _own(total, tie)
                    p.grad = mine if old is None else old + mine

    def _everyone(self, tie: Tie, x: Tensor) -> list[Tensor]:
        """What each of the ranks that have it has, in order."""
        if tie.part is not None:
            x = _gathered(x, tie.part)
        axis = self._mesh.axis(self._axis, WHERE)
        others = [rank for rank in tie.holders if rank != axis.index]
        x = x.contiguous()
        came = exchange([(x, rank) for rank in others], [(rank, tuple(x.shape), x.dtype) for rank in others],
                        axis.name, mesh=axis.mesh)  # fmt: skip
        found = dict(zip(others, came, strict=True))
        return [found.get(rank, x) for rank in tie.holders]


def _told(p: nn.Parameter, parts: Sequence[Part]) -> tuple[Any, Any]:
    """What must be the same for all who have it, and how each of them keeps it."""
    flat = next((part.how for part in parts if isinstance(part.how, Flat)), None)
    if flat is None:
        return (tuple(p.shape), p.dtype), None
    return (tuple(flat.shape), p.dtype), flat.ranges


def _gathered(x: Tensor, part: Part) -> Tensor:
    assert isinstance(part.how, Flat)
    sizes = [stop - start for start, stop in part.how.ranges]
    return all_gather(x.reshape(-1), part.axis, sizes=sizes, mesh=part.mesh).view(part.how.shape)


def _own(x: Tensor, tie: Tie) -> Tensor:
    """What this rank keeps of it."""
    if tie.part is None:
        return x.view(tie.param.shape)
    assert isinstance(tie.part.how, Flat)
    return x.reshape(-1)[tie.part.how.start : tie.part.how.stop].clone().view(tie.param.shape)
