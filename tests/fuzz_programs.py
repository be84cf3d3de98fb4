"""Programs drawn by hypothesis, or with dice.

A program is well typed by construction: each value knows the axes along which it varies. While it is drawn its steps run
on the oracle, whose shards say what each value's shape is and, in the end, what every rank must get. Values are small
and dims short, so that any step can follow any other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from cases import seeded
from fuzz_steps import (
    DTYPES,
    FORMS,
    MESSAGES,
    NO_LATER,
    OBJECTS,
    ONE_RANK,
    REDUCTIONS,
    SHAPES,
    SMOOTH,
    TO_INVARIANT,
    TYPED,
    Given,
    Program,
    Step,
    Wait,
    meaning,
    squashed,
)
from hypothesis import strategies as st
from oracle import Oracle
from torch import Tensor

__all__ = ["Dice", "Drawn", "Rolled", "program_of", "programs"]


class Dice(Protocol):
    """Where choices come from."""

    def one_of(self, choices: Sequence[Any]) -> Any: ...
    def number(self, least: int, most: int) -> int: ...
    def order(self, items: Sequence[Any]) -> list[Any]: ...


class Drawn:
    """Choices of hypothesis, which makes them simpler where a program has failed."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def one_of(self, choices: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(choices))

    def number(self, least: int, most: int) -> int:
        return int(self.draw(st.integers(least, most)))

    def order(self, items: Sequence[Any]) -> list[Any]:
        return list(self.draw(st.permutations(items)))


class Rolled:
    """Choices that follow from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def one_of(self, choices: Sequence[Any]) -> Any:
        return self.random.choice(choices)

    def number(self, least: int, most: int) -> int:
        return self.random.randint(least, most)

    def order(self, items: Sequence[Any]) -> list[Any]:
        return self.random.sample(list(items), len(items))


class Builder:
    """Draws a program step by step."""

    def __init__(self, dice: Dice, axes: dict[str, int], kinds: Sequence[str]) -> None:
        self.kinds, self.one_of, self.number, self.order = kinds, dice.one_of, dice.number, dice.order
        self.oracle = Oracle(axes)
        self.program = Program(axes)
        self.pending: list[int] = []

    def flag(self) -> bool:
        return self.number(0, 1) == 1

    def rarely(self) -> bool:
        return self.number(0, 4) == 4

    # ------------------------------------------------------------------------------------------------ values

    def give(self, seed: int) -> None:
        dtype, shape = self.one_of(DTYPES), self.one_of(SHAPES)
        along = frozenset(axis for axis in self.program.axes if self.flag())
        grad = (dtype.is_floating_point or dtype.is_complex) and self.flag()
        given = Given(shape, dtype, along, grad, seed)
        self.program.inputs.append(given)
        equal = tuple(axis for axis in self.program.axes if axis not in along)
        self.program.shards.append(self.oracle.spread(lambda rank: values_of(given, rank), equal))
        self.program.varying.append(along)

    def ready(self) -> list[int]:
        waiting = {
            self.program.first_of[number] + i
            for number in self.pending
            for i in range(self.program.events[number].gives)  # type: ignore[union-attr]
        }
        return [i for i in range(len(self.program.shards)) if i not in waiting]

    def some_value(self) -> int:
        ready = self.ready()
        return ready[-1 - self.number(0, min(4, len(ready) - 1))]

    def some_axis(self) -> Any:
        axes = list(self.program.axes)
        order = self.order(axes)[: self.number(1, len(axes))] if len(axes) > 1 else axes
        return order[0] if len(order) == 1 else tuple(order)

    # ------------------------------------------------------------------------------------------------ steps

    def add(self, step: Step, varying: Sequence[frozenset[str]]) -> int:
        program = self.program
        number = len(program.events)
        program.first_of[number] = len(program.shards)
        program.events.append(step)
        program.shards += meaning(self.oracle, step, [program.shards[i] for i in step.of])
        program.varying += varying
        if step.later:
            self.pending.append(number)
        return program.first_of[number]

    def vary(self, value: int, axes: Sequence[str]) -> int:
        missing = [axis for axis in axes if axis not in self.program.varying[value]]
        if not missing:
            return value
        axis = missing[0] if len(missing) == 1 else tuple(missing)
        return self.add(Step("pvary", (value,), axis), [self.program.varying[value] | set(missing)])

    def some_step(self) -> None:
        """Not every step can follow: try another one."""
        before = len(self.program.events)
        for _ in range(3):
            self.step()
            if len(self.program.events) > before:
                return

    def step(self) -> None:
        kind = self.one_of(self.kinds)
        if kind == "join":
            self.join()
        elif kind == "weighted":
            axis = self.one_of(list(self.program.axes))
            value = self.vary(self.some_value(), [axis])
            self.add(Step("weighted", (value,), axis), [self.program.varying[value]])
        elif kind == "wait":
            self.wait()
        elif kind == "barrier":
            self.add(Step("barrier", (), self.some_axis(), later=self.rarely()), [])
        elif kind == "tree":
            self.collective(self.one_of((*TYPED, "pvary", "shard")), self.number(1, 3))
        elif kind in (*TYPED, "shard"):
            self.collective(kind, 0)
        else:
            self.plain(kind)

    def join(self) -> None:
        one = self.some_value()
        x = self.program.shards[one][0]
        alike = [
            i for i in self.ready()
            if self.program.shards[i][0].shape == x.shape and self.program.shards[i][0].dtype == x.dtype
        ]  # fmt: skip
        two = alike[-1 - self.number(0, len(alike) - 1)]
        together = self.program.varying[one] | self.program.varying[two]
        pair = self.vary(one, sorted(together)), self.vary(two, sorted(together))
        self.add(Step("join", pair), [together])

    def collective(self, op: str, leaves: int) -> None:
        """``leaves``: of a tree; 0 is a single tensor."""
        axis = self.some_axis()
        axes = axis if isinstance(axis, tuple) else (axis,)
        chosen = [self.some_value() for _ in range(max(1, leaves))]
        if op in ("shard", "pvary") and any(self.program.varying[i] & set(axes) for i in chosen):
            return
        kwargs = self.kwargs_of(op, [self.program.shards[i][0] for i in chosen], self.oracle.axis_size(axis), leaves)
        if kwargs is None:
            return
        if op not in ("shard", "pvary"):
            chosen = [self.vary(i, axes) for i in chosen]
        if leaves and self.rarely():
            kwargs["bucket_mb"] = 1e-5
        before = [self.program.varying[i] for i in chosen]
        varying = [
            v | set(axes) if op in ("shard", "pvary") else v - set(axes) if op in TO_INVARIANT else v for v in before
        ]
        tree = self.one_of(("list", "dict", "nested")) if leaves else ""
        later = self.rarely() and op != "pvary"
        self.add(Step(op, tuple(chosen), axis, kwargs, self.one_of(FORMS), tree, later), varying)

    def kwargs_of(self, op: str, xs: list[Tensor], n: int, leaves: int) -> dict[str, Any] | None:
        """Arguments that are right for these; None where there are none."""
        kwargs: dict[str, Any] = {}
        if op in ("all_reduce", "reduce_scatter"):
            common = [r for r in REDUCTIONS[xs[0].dtype] if all(r in REDUCTIONS[x.dtype] for x in xs)]
            if not common:
                return None
            kwargs["op"] = self.one_of(common)
        ndim = min(x.ndim for x in xs)
        ragged = not leaves and ndim > 0 and self.rarely()
        if op in ("all_gather", "all_gather_invariant"):
            kwargs["dim"] = self.number(0, max(0, ndim - 1))
            if ragged:
                kwargs["sizes"] = [self.number(0, xs[0].shape[kwargs["dim"]]) for _ in range(n)]
        elif op in ("shard", "reduce_scatter"):
            return self.cut(xs, n, ragged, kwargs)
        elif op == "all_to_all":
            return self.traffic(xs, n, ragged)
        elif op == "permute":
            count = self.number(0, n)
            ends = [self.order(range(n))[:count] for _ in range(2)]
            kwargs["perm"] = list(zip(*ends, strict=True))
        elif op == "shift":
            kwargs |= {"offset": self.number(-3, 3), "wrap": self.flag()}
        elif op == "broadcast":
            kwargs["src"] = self.number(0, n - 1)
        return kwargs

    def cut(self, xs: list[Tensor], n: int, ragged: bool, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        if ragged:
            dim = self.number(0, xs[0].ndim - 1)
            return kwargs | {"dim": dim, "sizes": self.parts(xs[0].shape[dim], n)}
        dims = self.even_dims(xs, n)
        return kwargs | {"dim": self.one_of(dims)} if dims else None

    def even_dims(self, xs: list[Tensor], n: int) -> list[int]:
        ndim = min(x.ndim for x in xs)
        return [dim for dim in range(ndim) if all(x.shape[dim] % n == 0 for x in xs)]

    def parts(self, length: int, n: int) -> list[int]:
        ends = sorted(self.number(0, length) for _ in range(n - 1))
        return [b - a for a, b in zip([0, *ends], [*ends, length], strict=True)]

    def traffic(self, xs: list[Tensor], n: int, ragged: bool) -> dict[str, Any] | None:
        if ragged:
            dim = self.number(0, xs[0].ndim - 1)
            rows = [self.parts(self.number(0, xs[0].shape[dim]), n) for _ in range(n)]
            return {"split_dim": dim, "concat_dim": dim, "traffic": rows}
        dims = self.even_dims(xs, n)
        if not dims:
            return None
        return {"split_dim": self.one_of(dims), "concat_dim": self.number(0, min(x.ndim for x in xs) - 1)}

    def plain(self, op: str) -> None:
        """What has no gradient."""
        axis, value = self.some_axis(), self.some_value()
        x, n = self.program.shards[value][0], self.oracle.axis_size(axis)
        root = self.number(0, n - 1)
        kwargs: dict[str, Any] = {"src": root} if op in ("scatter", "broadcast_object", "scatter_object") else {}
        if op in ("reduce", "gather", "gather_object"):
            kwargs["dst"] = root
        later = self.rarely() and op not in NO_LATER
        if op == "reduce":
            kwargs["op"] = self.one_of(REDUCTIONS[x.dtype])
        elif op == "gather":
            kwargs["dim"] = self.number(0, max(0, x.ndim - 1))
        elif op == "scatter":
            dims = self.even_dims([x], n)
            if not dims:
                return
            kwargs |= {"dim": self.one_of(dims), "like": later or self.flag()}
        elif op == "exchange":
            kwargs["offset"] = self.number(0, n)
        elif op == "send":
            if n == 1:
                return
            kwargs |= {"src": root, "to": (root + self.number(1, n - 1)) % n}
        axes = set(axis) if isinstance(axis, tuple) else {axis}
        before = self.program.varying[value]
        varying = before - axes if op in TO_INVARIANT else before | axes
        tag = len(self.program.events)
        self.add(Step(op, (value,), axis, kwargs, self.one_of(FORMS), later=later, tag=tag), [varying])

    def wait(self, everything: bool = False) -> None:
        if self.pending:
            order = self.order(self.pending)
            chosen = order if everything else order[: self.number(1, len(order))]
            flags = [self.flag() for _ in range(2)]
            self.program.events.append(Wait(tuple(chosen), *flags, polled=self.rarely()))
            self.pending = [number for number in self.pending if number not in chosen]


def values_of(given: Given, rank: int) -> Tensor:
    """A leaf."""
    x = seeded(given.shape, given.dtype, rank, given.seed)
    if given.dtype in SMOOTH:
        noise = torch.Generator().manual_seed(7919 * given.seed + rank)
        x = x / 5 + 0.1 * torch.randn(given.shape, generator=noise, dtype=given.dtype)
    return squashed(x).detach().requires_grad_(given.grad)


KINDS = (
    *TYPED, "join", "weighted", "shard", "tree", "tree", "wait", *ONE_RANK, *MESSAGES, *OBJECTS[:2], *TYPED, "barrier", "join",
    *OBJECTS[2:],
)  # fmt: skip


def program_of(dice: Dice, meshes: Sequence[dict[str, int]], most: int = 12, kinds: Sequence[str] = KINDS) -> Program:
    """A program on one of these meshes, of about so many steps."""
    builder = Builder(dice, dice.one_of(meshes), kinds)
    for seed in range(builder.number(1, 3)):
        builder.give(seed)
    for _ in range(builder.number(1, most)):
        builder.some_step()
    builder.wait(everything=True)
    return builder.program


@st.composite
def programs(draw: Any, meshes: Sequence[dict[str, int]]) -> Program:
    """Programs on one of these meshes."""
    return program_of(Drawn(draw), meshes)
