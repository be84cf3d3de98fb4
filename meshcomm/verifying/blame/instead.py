"""What would be right: the program once more, with an all_gather_invariant where it has an all_gather."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshcomm.collectives.check import differentiable
from meshcomm.collectives.gather import all_gather_invariant
from meshcomm.mesh import Mesh
from meshcomm.runtime.callsite import call_site
from meshcomm.spmd.shard_map.assemble import coordinates
from meshcomm.verifying.blame.line import Blame
from meshcomm.verifying.blame.trail import Trail
from meshcomm.verifying.compare import difference, scale_of
from meshcomm.verifying.derivatives import Reference
from meshcomm.verifying.program import OnRank

_MOST = 8
"""Lines that are tried."""


class _Instead(Trail):
    """Notes what is called, with another call at one line."""

    def __init__(self, at: str = "") -> None:
        super().__init__()
        self._at = at

    def collective(self, fn: Any, x: Any, axis: Any, /, *args: Any, mesh: Any, **kwargs: Any) -> Any:
        """Call it, or what stands for it."""
        if fn.__name__ == "all_gather" and self._at == str(call_site()):
            fn = all_gather_invariant
        return super().collective(fn, x, axis, *args, mesh=mesh, **kwargs)


def gathered_as_one(reference: Reference, mesh: Mesh) -> Blame | None:
    """The line of an all_gather whose result is used as what is the same on all ranks: as an all_gather_invariant it
    makes all gradients right.
    """

    def job(rank: OnRank, at: str = "") -> tuple[list[str], list[Tensor]]:
        trail = _Instead(at)
        with torch.enable_grad():
            xs = [x.detach().clone().requires_grad_() for x in rank.targets]
            result = rank(xs, within=trail)
        gs = rank.program.parts(rank.mesh, reference.directions.cotangents, rank.place)
        ends = [y for y in result.tensors if differentiable(y)]
        pairs = [(y, g) for y, g in zip(ends, gs, strict=True) if y.requires_grad]
        heads, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(heads, xs, given, allow_unused=True)
        grads = [torch.zeros_like(x) if g is None else g.detach() for x, g in zip(xs, found, strict=True)]
        return [call.line for call in trail.calls if call.name == "all_gather" and call.live], grads

    lines = dict.fromkeys(line for of_rank, _ in reference.program.run(mesh, job) for line in of_rank)
    for line in list(lines)[:_MOST]:  # the same ones on all ranks of a group
        found = reference.program.run(mesh, partial(job, at=line))
        if _are_right(reference, mesh, [grads for _, grads in found]):
            told = f"all gradients are right with all_gather_invariant in place of all_gather at {line}"
            fix = f"mc.all_gather_invariant at {line}, whose result is used as one value that all ranks have"
            return Blame(line, (told,), fix)
    return None


def _are_right(reference: Reference, mesh: Mesh, found: list[list[Tensor]]) -> bool:
    program, expected = reference.program, reference.expected("vjp")
    scale = scale_of(leaf.value for leaf in expected)
    for place, mine in zip(coordinates(mesh), found, strict=True):
        right = program.parts(mesh, expected, place)
        if any(difference("", 0, x, y, scale) is not None for x, y in zip(mine, right, strict=True)):
            return False
    return True
