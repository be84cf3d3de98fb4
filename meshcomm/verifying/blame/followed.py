"""One rank runs a program and its backward, or forward mode, step by step; and all ranks beside one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshcomm._torch import alive
from meshcomm.collectives.check import differentiable
from meshcomm.verifying.blame.trail import Followed, Trail
from meshcomm.verifying.program import OnRank


def follow(
    rank: OnRank, cotangents: Sequence[Any], *, to_error: bool = False, seconds: Sequence[Any] | None = None
) -> Followed:
    """Run the program and its backward on a rank, step by step.

    Args:
        rank: which.
        cotangents: what is pulled back.
        to_error: forward only, as far as it comes.
        seconds: pull these back through the backward pass then: the value of each step is that of its gradient.
    """
    trail = Trail()
    with torch.enable_grad():
        xs = [x.detach().clone().requires_grad_() for x in rank.targets]
        try:
            result = rank(xs, within=trail)
        except Exception:
            if not to_error:
                raise
            return Followed(trail.finished(), [], [], trail.calls)
        outputs = [trail.maker_of(y) for y in result.tensors]
        ends = [y for y in result.tensors if differentiable(y)]
        gs = rank.program.parts(rank.mesh, list(cotangents), rank.place)
        if to_error or [y.shape for y in ends] != [g.shape for g in gs]:
            return Followed(trail.finished(), outputs, [], trail.calls)
        if seconds is not None:
            gs = [g.detach().clone().requires_grad_() for g in gs]
        pairs = [(y, g) for y, g in zip(ends, gs, strict=True) if y.requires_grad]
        if pairs:
            heads, given = zip(*pairs, strict=True)
            dx = torch.autograd.grad(heads, xs, given, allow_unused=True, create_graph=seconds is not None)
            if seconds is not None:
                us = rank.program.parts(rank.mesh, list(seconds), rank.place)
                tops = [(d, u) for d, u in zip(dx, us, strict=True) if d is not None and d.requires_grad]
                trail.second = True
                if tops:
                    heads, given = zip(*tops, strict=True)
                    torch.autograd.grad(heads, [*xs, *gs], given, allow_unused=True)
    return Followed(trail.finished(), outputs, [y.detach() for y in result.tensors], trail.calls)


def follow_tangents(rank: OnRank, tangents: Sequence[Any]) -> Followed:
    """The same of forward mode: the value of each step is its tangent."""
    trail = Trail(tangents=True)
    outputs: list[int | None] = []

    def run(*given: Tensor) -> list[Tensor]:
        result = rank(given, within=trail)
        outputs.extend(trail.maker_of(y) for y in result.tensors)
        return [y for y in result.tensors if differentiable(y)]

    ts = tuple(rank.program.parts(rank.mesh, list(tangents), rank.place))
    torch.func.jvp(run, tuple(x.detach() for x in rank.targets), ts)
    steps = [step._replace(value=alive(step.value)) for step in trail.steps]
    return Followed(steps, outputs, [])
