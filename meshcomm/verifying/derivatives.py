"""The value of a program and its derivatives, on one rank or on its twin: VJP, JVP, and the VJP of the VJP.

::

    y        = fn(x)
    vjp      = y pulled back:  g ──► dx
    jvp      = x pushed on:    t ──► dy
    second   = the VJP of (x, g) ──► dx:  u ──► ddx, dg

Cotangents and tangents are global values, drawn once, of which every rank takes its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshcomm.collectives.check import differentiable
from meshcomm.errors import CommError, MeshError, described
from meshcomm.mesh import Mesh
from meshcomm.verifying.program import Leaf, OnRank, Program, Result

KINDS = ("vjp", "jvp", "second")


@dataclass
class Directions:
    """What is pulled back and pushed on: global values."""

    cotangents: list[Leaf] = field(default_factory=list)
    """Of the outputs that can have a gradient."""
    tangents: list[Leaf] = field(default_factory=list)
    """Of what is differentiated."""
    seconds: list[Leaf] = field(default_factory=list)


@dataclass
class Derived:
    """The value, and by kind what came of it."""

    result: Result
    live: list[int] = field(default_factory=list)
    """The outputs that depend on what is differentiated."""
    by: dict[str, list[Tensor]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    draws: bool = False
    """Whether it draws at random other than under rng."""


def drawn(leaves: Sequence[Leaf], seed: int) -> list[Leaf]:
    """A direction per leaf."""
    made = torch.Generator().manual_seed(seed)
    return [
        leaf._replace(
            value=torch.randn(leaf.value.shape, generator=made, dtype=_wide(leaf.value), device="cpu").to(
                leaf.value.dtype
            )
        )
        for leaf in leaves
    ]


def _wide(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def job_of(
    directions: Directions,
    kinds: Sequence[str],
    *,
    twin: bool = False,
    lenient: bool = False,
    seen: Callable[[Result], None] | None = None,
) -> Callable[[OnRank], Derived]:
    """What a rank does. ``lenient``: a derivative that torch does not have is no error. ``seen``: is told of the values
    before there are derivatives.
    """

    def job(rank: OnRank) -> Derived:
        xs, before = [x.detach().clone().requires_grad_() for x in rank.targets], torch.get_rng_state()
        if xs and kinds:
            with torch.enable_grad():
                found = _backward(rank, xs, directions, kinds, twin, lenient, seen)
        else:
            with torch.no_grad():
                found = Derived(_detached(rank([x.detach() for x in xs], twin=twin)))
            if seen is not None:
                seen(found.result)
        found.draws = not torch.equal(before, torch.get_rng_state())
        if not directions.cotangents or any(x.shape != y.shape for x, y in _ends(rank, found, directions)):
            return found
        if "jvp" in kinds and xs:
            try:
                found.by["jvp"] = _forward(rank, xs, directions, twin)
            except (CommError, MeshError):
                raise
            except Exception as error:
                if not lenient:
                    raise
                found.failed["jvp"] = described(error)
        return found

    return job


def _ends(rank: OnRank, found: Derived, directions: Directions) -> list[tuple[Tensor, Tensor]]:
    """The outputs that can have a gradient beside what is pulled back from them."""
    ys = [y for y in found.result.tensors if differentiable(y)]
    return list(zip(ys, _part(rank, directions.cotangents), strict=False))


def _detached(result: Result) -> Result:
    return result._replace(tensors=[y.detach().clone() for y in result.tensors])


def _part(rank: OnRank, leaves: Sequence[Leaf]) -> list[Tensor]:
    return rank.program.parts(rank.mesh, leaves, rank.place)


def _backward(
    rank: OnRank, xs: list[Tensor], directions: Directions, kinds: Sequence[str], twin: bool, lenient: bool,
    seen: Callable[[Result], None] | None,
) -> Derived:  # fmt: skip
    result = rank(xs, twin=twin)
    found = Derived(_detached(result))
    if seen is not None:
        seen(found.result)
    ends = [y for y in result.tensors if differentiable(y)]
    found.live = [i for i, y in enumerate(result.tensors) if y.requires_grad]
    if not directions.cotangents or not set(kinds) & {"vjp", "second"}:
        return found
    gs = [g.detach().clone().requires_grad_() for g in _part(rank, directions.cotangents)]
    pairs = [(y, g) for y, g in zip(ends, gs, strict=False) if y.requires_grad]
    if len(ends) != len(gs) or any(y.shape != g.shape for y, g in pairs):  # the value is wrong already
        return found
    again = "second" in kinds
    found.by["vjp"] = [torch.zeros_like(x) for x in xs]
    if again:
        found.by["second"] = [torch.zeros_like(x) for x in (*xs, *gs)]
    if not pairs:
        return found
    heads, given = zip(*pairs, strict=True)
    try:
        dx = torch.autograd.grad(heads, xs, given, create_graph=again, allow_unused=True)
    except (CommError, MeshError):
        raise
    except Exception as error:
        if not lenient:
            raise
        found.failed |= dict.fromkeys(("vjp", "second"), described(error))
        return found
    found.by["vjp"] = [torch.zeros_like(x) if d is None else d.detach().clone() for x, d in zip(xs, dx, strict=True)]
    if again:
        us, tops = _part(rank, directions.seconds), [d for d in dx if d is not None and d.requires_grad]
        along = [u for d, u in zip(dx, us, strict=True) if d is not None and d.requires_grad]
        try:
            if tops:
                dd = torch.autograd.grad(tops, [*xs, *gs], along, allow_unused=True)
                found.by["second"] = [
                    torch.zeros_like(x) if d is None else d.detach() for x, d in zip([*xs, *gs], dd, strict=True)
                ]
        except (CommError, MeshError):
            raise
        except Exception as error:
            if not lenient:
                raise
            found.failed["second"] = described(error)
    return found


def _forward(rank: OnRank, xs: list[Tensor], directions: Directions, twin: bool) -> list[Tensor]:
    def run(*given: Tensor) -> list[Tensor]:
        return [y for y in rank(given, twin=twin).tensors if differentiable(y)]

    ts = tuple(_part(rank, directions.tangents))
    pushed: Sequence[Tensor] = torch.func.jvp(run, tuple(x.detach() for x in xs), ts)[1]
    return [d.detach().clone() for d in pushed]


@dataclass
class Reference:
    """What the twin gives: global values."""

    program: Program
    directions: Directions
    derived: Derived
    outputs: list[Leaf]
    """The tensors among them."""

    def expected(self, kind: str) -> list[Leaf]:
        """Each value of this kind, named."""
        targets, ends = self.program.targets, self.directions.cotangents
        if kind == "value":
            return self.outputs
        values = self.derived.by[kind]
        if kind == "vjp":
            names = [leaf._replace(label=f"the gradient of {leaf.label}") for leaf in targets]
        elif kind == "jvp":
            names = [leaf._replace(label=f"the tangent of {leaf.label}") for leaf in ends]
        else:
            names = [leaf._replace(label=f"the second derivative by {leaf.label}") for leaf in targets]
            names += [leaf._replace(label=f"the second derivative by the gradient of {leaf.label}") for leaf in ends]
        return [leaf._replace(value=value) for leaf, value in zip(names, values, strict=True)]


def reference_of(program: Program, ones: Mesh, kinds: Sequence[str]) -> Reference:
    """Run the twin. Directions are drawn when its outputs are there."""
    directions, outputs = Directions(), list[Leaf]()

    def found(result: Result) -> None:
        outputs.extend(Leaf(*leaf) for leaf in zip(result.labels, result.tensors, result.specs, strict=True))
        ends, targets, seed = [leaf for leaf in outputs if differentiable(leaf.value)], program.targets, program.seed
        directions.cotangents = drawn(ends, seed + 1)
        directions.tangents, directions.seconds = drawn(targets, seed + 2), drawn(targets, seed + 3)

    derived = program.run(ones, job_of(directions, kinds, twin=True, lenient=True, seen=found))[0]
    return Reference(program, directions, derived, outputs)
