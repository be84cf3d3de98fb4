"""The gradient of a program on one device, held against finite differences of its values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshcomm.errors import text
from meshcomm.mesh import Mesh
from meshcomm.verifying.blame.followed import follow
from meshcomm.verifying.blame.trail import Trail
from meshcomm.verifying.compare import wide
from meshcomm.verifying.derivatives import Reference, drawn
from meshcomm.verifying.program import WHERE, Leaf, OnRank
from meshcomm.verifying.report import Finding

_STEPS = (1e-5, 1e-6, 1e-4)
_NEAR = 1e-5


def held_against_differences(reference: Reference, ones: Mesh) -> Finding | None:
    """One difference along one direction for all inputs; if it is off, one for each."""
    tangents = [leaf.value for leaf in reference.directions.tangents]
    every = _gaps(reference, ones, tangents)
    if every is None:
        return None
    for i, leaf in enumerate(reference.program.targets):
        alone = [t if j == i else torch.zeros_like(t) for j, t in enumerate(tangents)]
        gap = _gaps(reference, ones, alone)
        if gap is not None:
            got, right = gap
            what = f"the gradient of {leaf.label} is not that of the values, on one device."
            said = f"{got:.4g} along a direction in which the values change by {right:.4g}"
            line, told = _blamed(reference, ones)
            fix = "mend the backward (a detach, a custom Function, a hook); if it is meant, pass twin="
            return Finding("finite differences", line, text(WHERE, what, got=said + told, fix=fix))
    return None


def _blamed(reference: Reference, ones: Mesh) -> tuple[str, str]:
    """Nudge the result of each step, the last one first: where the gradient does not say what that does, what came
    after it is to blame.
    """
    program, cotangents = reference.program, reference.directions.cotangents
    steps = program.run(ones, lambda rank: follow(rank, cotangents))[0].steps
    for i in reversed(range(len(steps))):
        x = steps[i].value
        if not steps[i].live or not x.numel():
            continue
        t = drawn([Leaf("", x, None)], i)[0].value * (float(wide(x).abs().mean()) or 1.0)
        said = 0.0 if steps[i].gradient is None else float((wide(steps[i].gradient).conj() * wide(t)).sum().real)
        gaps = []
        for h in _STEPS[:2]:
            up, down = (_nudged(reference, ones, (i, at * t)) for at in (h, -h))
            right = (up - down) / (2 * h)
            gaps.append(abs(said - right) > 1e-4 * max(abs(said), abs(right)) + 1e-7)
        if all(gaps):
            takers = [step for step in steps if i in step.of]
            stopped = [step for step in takers if not step.live]
            if takers:
                last = (stopped or takers)[0]
                return last.line, f"; gradients right back to {last.name}" + (", where they stop" if stopped else "")
    return "", ""


def _nudged(reference: Reference, ones: Mesh, nudge: tuple[int, Tensor]) -> float:
    def job(rank: OnRank) -> float:
        with torch.enable_grad():
            xs = [x.detach().clone().requires_grad_() for x in rank.targets]
            return _weighed(reference, rank(xs, within=Trail({nudge[0]: nudge[1]})).tensors)

    return float(reference.program.run(ones, job)[0])


def _gaps(reference: Reference, ones: Mesh, tangents: Sequence[Tensor]) -> tuple[float, float] | None:
    """The slope that the gradient says and the one of the values, if they differ wherever the values are smooth."""
    pairs = zip(reference.derived.by["vjp"], tangents, strict=True)
    said = sum(float((wide(g).conj() * wide(t)).sum().real) for g, t in pairs)
    scale = _scale(reference)

    def near(slope: float) -> bool:
        return abs(said - slope) <= _NEAR * (max(abs(said), abs(slope)) + scale)

    h = _STEPS[1]
    once = _value(reference, ones, tangents, h)
    if near((once - _weighed(reference, reference.derived.result.tensors)) / h):
        return None  # most are: one run in place of two
    slopes = []
    for h in _STEPS:
        up = once if h == _STEPS[1] else _value(reference, ones, tangents, h)
        down = _value(reference, ones, tangents, -h)
        right = (up - down) / (2 * h)
        slopes.append(right)
        if near(right):
            return None
        middle = _value(reference, ones, tangents, 0.0)
        one, two = (up - middle) / h, (middle - down) / h
        size = max(abs(said), abs(right), abs(one), abs(two)) + scale
        if abs(said - right) <= _NEAR * size or abs(one - two) > 0.01 * size:  # right, or a kink
            return None
        noise = 1e-14 * abs(middle) / h
        if abs(said - right) <= 100 * noise:
            return None
    return said, slopes[0]


def _scale(reference: Reference) -> float:
    return 1e-3 * max((float(wide(g).abs().sum()) for g in reference.derived.by["vjp"]), default=0.0)


def _value(reference: Reference, ones: Mesh, tangents: Sequence[Tensor], h: float) -> float:
    def job(rank: OnRank) -> float:
        with torch.enable_grad():  # what registers hooks needs it
            xs = [(x + h * t).requires_grad_() for x, t in zip(rank.targets, tangents, strict=True)]
            return _weighed(reference, rank(xs).tensors)

    return float(reference.program.run(ones, job)[0])


def _weighed(reference: Reference, ys: Sequence[Tensor]) -> float:
    """The outputs against the cotangents: those that have a gradient; a metric beside a loss has none."""
    ends = [(i in reference.derived.live, y) for i, y in enumerate(ys) if y.is_floating_point() or y.is_complex()]
    gs = [leaf.value for leaf in reference.directions.cotangents]
    pairs = zip(gs, ends, strict=True)
    return sum(float((wide(g).conj() * wide(y)).sum().real) for g, (live, y) in pairs if live)
