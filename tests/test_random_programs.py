"""Programs of several collectives drawn at random, with their gradients, against the oracle.

A program is well typed by construction: each value knows the axes along which it varies, and what is invariant goes through
pvary before it meets what is not. Ranks and oracle interpret the same list of instructions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from cases import grid, seeded
from oracle import Oracle, distinct
from torch import Tensor
from torch.func import jvp
from torch.testing import assert_close

import meshcomm as mc

F64 = torch.float64
SIDE = 8  # every value is [SIDE, SIDE] on every rank, so that any collective can follow any other
SEEDS = range(1, 13)
LENGTH = 6


def settled(y: Tensor) -> Tensor:
    """Back to [SIDE, SIDE] and near to 1 in size, element by element in another way."""
    for dim in (0, 1):
        if y.shape[dim] > SIDE:
            pieces = y.unflatten(dim, (-1, SIDE))
            weights = torch.arange(1, pieces.shape[dim] + 1, dtype=F64).cos()
            y = (pieces.movedim(dim, -1) * weights).sum(-1)
        elif y.shape[dim] < SIDE:
            y = torch.cat([y * (1 + i) for i in range(SIDE // y.shape[dim])], dim)
    return (0.7 * y).tanh() + 0.1 * y.sin()


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "times": lambda x, y: x * y,
    "plus": lambda x, y: x + y.sin(),
    "matmul": lambda x, y: (x @ y / 4).tanh(),
}


@dataclass
class Program:
    """Inputs and instructions; ``varying[i]`` are the axes along which value i varies."""

    axes: tuple[str, ...]
    varying: list[frozenset[str]] = field(default_factory=list)
    inputs: int = 0
    steps: list[tuple[Any, ...]] = field(default_factory=list)


class Sampler:
    """Draws a program."""

    def __init__(self, seed: int, axes: tuple[str, ...]) -> None:
        self.dice = random.Random(seed)
        self.program = Program(axes)
        self.program.varying = [frozenset(axes), frozenset(self.some(0)), frozenset()]
        self.program.inputs = 3

    def some(self, least: int = 1) -> tuple[str, ...]:
        """Axes in any order."""
        axes = self.program.axes
        return tuple(self.dice.sample(axes, self.dice.randint(least, len(axes))))

    def add(self, varying: frozenset[str], *step: Any) -> int:
        self.program.steps.append(step)
        self.program.varying.append(varying)
        return len(self.program.varying) - 1

    def recent(self) -> int:
        count = len(self.program.varying)
        return self.dice.randrange(max(0, count - 4), count)

    def vary(self, value: int, axes: Any) -> int:
        """The value, varying along these axes too."""
        missing = [axis for axis in axes if axis not in self.program.varying[value]]
        if not missing:
            return value
        self.dice.shuffle(missing)
        axis = missing[0] if len(missing) == 1 else tuple(missing)
        return self.add(self.program.varying[value] | set(missing), "pvary", value, axis, {})

    def collective(self) -> None:
        value, axes = self.recent(), self.some()
        axis = axes[0] if len(axes) == 1 else axes
        varying, dim = self.program.varying[value], self.dice.randrange(2)
        ops = [
            "all_reduce",
            "all_gather",
            "all_gather_invariant",
            "reduce_scatter",
            "all_to_all",
            "permute",
            "shift",
            "broadcast",
        ]
        if not varying & set(axes):
            ops = [*ops, "shard", "shard", "shard"]
        op = self.dice.choice(ops)
        reduction = self.dice.choice(["sum", "mean", "max", "min", "product"])
        kwargs: dict[str, Any] = {
            "all_reduce": {"op": reduction},
            "all_gather": {"dim": dim},
            "all_gather_invariant": {"dim": dim},
            "shard": {"dim": dim},
            "reduce_scatter": {"dim": dim, "op": reduction},
            "all_to_all": {"split_dim": dim, "concat_dim": self.dice.randrange(2)},
            "permute": {"perm": self.dice.random()},  # which one depends on the size of the axis
            "shift": {"offset": self.dice.choice([-2, -1, 1, 3]), "wrap": self.dice.random() < 0.5},
            "broadcast": {"src": 1},
        }[op]
        if op == "shard":
            self.add(varying | set(axes), op, value, axis, kwargs)
            return
        value = self.vary(value, axes)
        varying = self.program.varying[value]
        leaves = op in ("all_reduce", "all_gather_invariant", "broadcast")
        self.add(varying - set(axes) if leaves else varying, op, value, axis, kwargs)

    def local(self) -> None:
        if self.dice.random() < 0.3:
            axis = self.dice.choice(self.program.axes)
            value = self.vary(self.recent(), [axis])
            self.add(self.program.varying[value], "weighted", value, axis)
            return
        self.join(self.dice.choice(list(BINARY)), self.recent(), self.recent())

    def join(self, op: str, one: int, two: int) -> int:
        together = self.program.varying[one] | self.program.varying[two]
        return self.add(together, op, self.vary(one, sorted(together)), self.vary(two, sorted(together)))

    def draw(self, length: int) -> Program:
        self.join("times", self.join("plus", 0, 1), 2)
        for _ in range(length):
            self.collective()
            self.local()
        # All that was made counts in the end.
        end = len(self.program.varying) - 1
        for value in range(end - 1, max(end - 4, 0), -1):
            end = self.join("plus", end, value)
        return self.program


def perm_of(drawn: float, n: int) -> list[tuple[int, int]]:
    dice = random.Random(drawn)
    count = dice.randint(1, n)
    return list(zip(dice.sample(range(n), count), dice.sample(range(n), count), strict=True))


def arguments(kwargs: dict[str, Any], n: int) -> dict[str, Any]:
    return {"perm": perm_of(kwargs["perm"], n)} if "perm" in kwargs else kwargs


def run_ranks(program: Program, xs: list[Tensor], mesh: mc.Mesh) -> Tensor:
    values = list(xs)
    for op, value, *rest in program.steps:
        if op in BINARY:
            values.append(settled(BINARY[op](values[value], values[rest[0]])))
        elif op == "weighted":
            values.append(settled(values[value] * (1 + mc.axis_index(rest[0], mesh=mesh))))
        elif op == "pvary":
            values.append(mc.pvary(values[value], rest[0], mesh=mesh))
        else:
            kwargs = arguments(rest[1], mc.axis_size(rest[0], mesh=mesh))
            values.append(settled(getattr(mc, op)(values[value], rest[0], **kwargs, mesh=mesh)))
    return values[-1]


def run_oracle(program: Program, xs: list[list[Tensor]], oracle: Oracle) -> list[Tensor]:
    values = list(xs)
    for op, value, *rest in program.steps:
        if op in BINARY:
            both = oracle.local(BINARY[op], values[value], values[rest[0]])
            values.append(oracle.local(settled, both))
        elif op == "weighted":
            factors = [torch.tensor(1 + index) for index in range(oracle.axis_size(rest[0]))]
            mine = [factors[oracle.index(rank, rest[0])] for rank in range(oracle.size)]
            values.append(oracle.local(settled, oracle.local(torch.mul, values[value], mine)))
        elif op == "pvary":
            values.append(oracle.pvary(values[value], rest[0]))
        else:
            kwargs = arguments(rest[1], oracle.axis_size(rest[0]))
            values.append(oracle.local(settled, getattr(oracle, op)(values[value], rest[0], **kwargs)))
    return values[-1]


# ------------------------------------------------------------------------------------------------------- expected


@dataclass
class Worked:
    """What the oracle says, for each input or for the result, on every rank."""

    program: Program
    inputs: list[list[Tensor]]
    output: list[Tensor]
    gradients: list[list[Tensor]]
    penalty: list[list[Tensor]]
    tangents: list[list[Tensor]]
    pushed: list[Tensor]


def spread(oracle: Oracle, program: Program, along: frozenset[str], seed: int) -> list[Tensor]:
    invariant = tuple(axis for axis in program.axes if axis not in along)
    return oracle.spread(lambda rank: seeded((SIDE, SIDE), F64, rank, seed) / 5, invariant)


def total(values: list[Tensor], fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Each logical value once."""
    return torch.stack([fn(value) for value in distinct(values)]).sum()


def score(y: Tensor) -> Tensor:
    return (y * torch.arange(SIDE * SIDE, dtype=F64).view(SIDE, SIDE).sin()).sum()


def squared(g: Tensor) -> Tensor:
    return g.square().sum()


@cache  # for all ranks of a process
def worked(seed: int, shape: tuple[int, ...]) -> Worked:
    oracle = Oracle(grid(shape))
    program = Sampler(seed, tuple(oracle.shape)).draw(LENGTH)
    inputs = [spread(oracle, program, program.varying[i], i) for i in range(program.inputs)]
    tangents = [spread(oracle, program, program.varying[i], 10 + i) for i in range(program.inputs)]
    memo = {id(x): x.clone().requires_grad_() for xs in inputs for x in xs}
    leaves = [[memo[id(x)] for x in xs] for xs in inputs]
    output = run_oracle(program, leaves, oracle)
    flat = list(memo.values())
    of = {id(leaf): i for i, leaf in enumerate(flat)}

    def by_rank(values: Any) -> list[list[Tensor]]:
        return [[values[of[id(leaf)]] for leaf in xs] for xs in leaves]

    first = torch.autograd.grad(total(output, score), flat, create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(total(list(first), squared), flat, materialize_grads=True)
    tangent_of = {
        id(memo[id(x)]): t for xs, ts in zip(inputs, tangents, strict=True) for x, t in zip(xs, ts, strict=True)
    }

    def on_all(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(run_oracle(program, by_rank(values), oracle))

    pushed = jvp(on_all, tuple(leaf.detach() for leaf in flat), tuple(tangent_of[id(leaf)] for leaf in flat))[1]
    detached = [value.detach() for value in first]
    return Worked(
        program, inputs, [y.detach() for y in output], by_rank(detached), by_rank(second), tangents, list(pushed)
    )


# ------------------------------------------------------------------------------------------------------------ ranks


def close(actual: Any, expected: Any, what: str) -> None:
    assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


def over(axes: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(axes))


def summed(x: Tensor, along: frozenset[str], mesh: mc.Mesh) -> Tensor:
    return mc.all_reduce(x, over(along), mesh=mesh) if along else x


def one_program(seed: int, shape: tuple[int, ...], reduced: bool) -> None:
    """Value, gradients and a gradient penalty; the loss is reduced over the axes along which it varies, or varies."""
    mesh, task = mc.make_mesh(grid(shape)), worked(seed, shape)
    program, rank = task.program, mesh.rank
    xs = [shards[rank].clone().requires_grad_() for shards in task.inputs]
    y = run_ranks(program, xs, mesh)
    close(y, task.output[rank], f"value of program {seed}")
    loss = summed(score(y), program.varying[-1], mesh) if reduced else score(y)
    first = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)
    close(list(first), [gs[rank] for gs in task.gradients], f"gradients of program {seed}")
    penalties = [
        summed(squared(g), along, mesh) if reduced else squared(g)
        for g, along in zip(first, program.varying, strict=False)
    ]
    # Invariant and varying summands do not mix in one sum, unless all are reduced.
    second = [torch.zeros_like(x) for x in xs]
    for penalty in [torch.stack(penalties).sum()] if reduced else penalties:
        if penalty.requires_grad:
            parts = torch.autograd.grad(penalty, xs, retain_graph=True, materialize_grads=True)
            second = [have + part for have, part in zip(second, parts, strict=True)]
    close(second, [gs[rank] for gs in task.penalty], f"penalty of program {seed}")


def one_tangent(seed: int, shape: tuple[int, ...]) -> None:
    mesh, task = mc.make_mesh(grid(shape)), worked(seed, shape)
    xs, ts = (tuple(shards[mesh.rank] for shards in each) for each in (task.inputs, task.tangents))
    _, pushed = jvp(lambda *xs: run_ranks(task.program, list(xs), mesh), xs, ts)
    close(pushed, task.pushed[mesh.rank], f"tangent of program {seed}")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "varying"])
@pytest.mark.parametrize("seed", SEEDS)
def test_program(seed: int, reduced: bool) -> None:
    mc.launch(one_program, ranks=8, args=(seed, (2, 2, 2), reduced))


@pytest.mark.one_in(2, alike=True)
@pytest.mark.parametrize("seed", SEEDS)
def test_tangents_of_program(seed: int) -> None:
    mc.launch(one_tangent, ranks=8, args=(seed, (2, 2, 2)))


def some_programs(shape: tuple[int, ...]) -> None:
    for seed in range(100, 104):
        one_program(seed, shape, seed % 2 == 0)
        one_tangent(seed, shape)


@pytest.mark.parametrize("shape", [pytest.param((4,), marks=pytest.mark.thorough), (2, 2)], ids=str)
def test_programs_on_processes(pool4: Any, shape: tuple[int, ...]) -> None:
    pool4.run(some_programs, shape)


def test_the_programs_use_every_collective_and_tuples_in_both_orders() -> None:
    steps = [step for seed in SEEDS for step in Sampler(seed, ("a", "b", "c")).draw(LENGTH).steps]
    assert {step[0] for step in steps} >= {
        "pvary", "all_reduce", "all_gather", "all_gather_invariant", "shard", "reduce_scatter", "all_to_all", "permute", "shift",
        "broadcast",
    }  # fmt: skip
    tuples = {step[2] for step in steps if isinstance(step[2], tuple)}
    assert {("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")} <= tuples
    assert {step[3]["op"] for step in steps if step[0] == "all_reduce"} == {"sum", "mean", "max", "min", "product"}


def test_the_programs_depend_on_their_inputs() -> None:
    """A program that ignores what it is given would agree with anything."""
    moved = [any(g.abs().max() > 1e-9 for g in worked(seed, (2, 2, 2)).gradients[0]) for seed in SEEDS]
    assert sum(moved) >= len(SEEDS) * 3 // 4
