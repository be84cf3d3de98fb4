"""Which step hands on a gradient that is not that of the values, on the ranks themselves: for steps to which none of
one device belongs, such as those of a ring, of a pipeline or of what only varies.

::

    a step          one rank's own part of its result is replaced by one a little off: so much the outputs change
                    the gradient that came to it says how much they should
    bisection       all steps from one on are nudged at once; the last one from which on both agree has good gradients,
                    and what takes the one before it is to blame
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshcomm.collectives.check import differentiable
from meshcomm.mesh import Mesh
from meshcomm.spmd.shard_map.assemble import coordinates
from meshcomm.verifying.blame.trail import Followed, Trail
from meshcomm.verifying.compare import wide
from meshcomm.verifying.derivatives import Reference, drawn
from meshcomm.verifying.program import Leaf, OnRank

_STEPS = (1e-5, 1e-6)
_NEAR = 1e-4


class Wrong(NamedTuple):
    """A step whose gradient is not that of the values."""

    step: int
    factor: float | None
    """It is so many times the right one; None where no single factor is in it."""


def last_wrong(reference: Reference, mesh: Mesh, ranks: Sequence[Followed], among: Sequence[int]) -> Wrong | None:
    """The last of these steps whose gradient is wrong, if there is one.

    Args:
        reference: what was pulled back.
        mesh: of the ranks.
        ranks: their steps, the same ones on each.
        among: which steps may be nudged, in order.
    """
    nudger = _Nudger(reference, mesh, ranks)
    may = [i for i in among if nudger.can(i)]
    if reference.program.dtype != torch.float64 or not may or not nudger.off(may):
        return None
    low, high = 0, len(may)  # from `low` on they are off, from `high` on they are not
    while high - low > 1:
        middle = (low + high) // 2
        if nudger.off(may[middle:]):
            low = middle
        else:
            high = middle
    return Wrong(may[low], nudger.factor(may[low]))


class _Nudger:
    def __init__(self, reference: Reference, mesh: Mesh, ranks: Sequence[Followed]) -> None:
        self.reference, self.mesh, self.ranks = reference, mesh, ranks
        self.places = coordinates(mesh)
        self.axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]

    def can(self, i: int) -> bool:
        """Whether a part of it can be replaced: a new tensor of numbers that have a gradient, of known type."""
        steps = [rank.steps[i] for rank in self.ranks]
        name = steps[0].key[1]
        kept = name in ("setitem", "attribute", "add_", "mul_") or name.endswith("_")
        good = all(step.live and step.along is not None and differentiable(step.value) for step in steps)
        return good and not kept and any(step.value.numel() for step in steps)

    def along(self, i: int) -> tuple[str, ...]:
        """The axes along which ranks have parts of their own: those of its type, and those along which they differ."""
        typed = self.ranks[0].steps[i].along or frozenset()
        found = []
        for axis in self.axes:
            own = axis in typed
            for rank, place in enumerate(self.places):
                first = self.places.index(place | {axis: 0})
                x, y = self.ranks[rank].steps[i].value, self.ranks[first].steps[i].value
                own = own or not torch.equal(x, y)
            found += [axis] if own else []
        return tuple(found)

    def off(self, steps: Sequence[int], seed: int = 0) -> bool:
        """Whether the outputs change otherwise than the gradients of these say."""
        said, right = self.slopes(steps, seed)
        return all(abs(said - each) > _NEAR * max(abs(said), abs(each)) + 1e-7 for each in right)

    def factor(self, step: int) -> float | None:
        """The gradient over the right one, if that is the same in two directions."""
        found = []
        for seed in (1, 2):
            said, right = self.slopes([step], seed)
            found.append(said / right[0] if right[0] else 0.0)
        return found[0] if abs(found[0] - found[1]) < 1e-3 * max(1e-3, abs(found[0])) and abs(found[0]) > 1e-9 else None

    def slopes(self, steps: Sequence[int], seed: int) -> tuple[float, list[float]]:
        """What the gradients say, and the outputs do, when each rank's own part of these is a little off."""
        nudges: list[dict[int, Tensor]] = [{} for _ in self.ranks]
        said = 0.0
        for i in steps:
            along, made = self.along(i), dict[tuple[int, ...], Tensor]()
            for rank, place in enumerate(self.places):
                step = self.ranks[rank].steps[i]
                key = tuple(place[axis] for axis in along)
                if key not in made:
                    size = float(wide(step.value).abs().mean()) if step.value.numel() else 1.0
                    number = 10_007 * seed + 101 * i + sum(n * 7**at for at, n in enumerate(key))
                    t = made[key] = drawn([Leaf("", step.value, None)], number)[0].value * (size or 1.0)
                    if step.gradient is not None:
                        said += float((wide(step.gradient).conj() * wide(t)).sum().real)
                nudges[rank][i] = made[key]
        right = []
        for h in _STEPS:
            up, down = (self.value([{i: at * t for i, t in each.items()} for each in nudges]) for at in (h, -h))
            right.append((up - down) / (2 * h))
        return said, right

    def value(self, nudges: Sequence[dict[int, Tensor]]) -> float:
        """The outputs against the cotangents, each part of them once."""
        reference, places = self.reference, self.places
        cotangents = reference.directions.cotangents
        layouts = reference.program.layouts(self.mesh, cotangents)
        live = [i in reference.derived.live for i, leaf in enumerate(reference.outputs) if differentiable(leaf.value)]

        def job(rank: OnRank) -> float:
            trail = Trail(nudges[places.index(dict(rank.place))])
            with torch.enable_grad():
                result = rank([x.detach().clone().requires_grad_() for x in rank.targets], within=trail)
            ends = [y for y in result.tensors if differentiable(y)]
            gs, total = rank.program.parts(rank.mesh, cotangents, rank.place), 0.0
            for y, g, layout, counts in zip(ends, gs, layouts, live, strict=True):
                first = layout is None or all(n == 0 for axis, n in rank.place.items() if axis not in layout.axes)
                total += float((wide(g).conj() * wide(y)).sum().real) if counts and first else 0.0
            return total

        return float(sum(reference.program.run(self.mesh, job)))
