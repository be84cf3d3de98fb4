"""Well-typed programs drawn at random as source text, a line each step; and what can be wrong in them, at a line.

python tests/verify_programs.py right 0 1000     # false alarms
python tests/verify_programs.py broken 0 60      # what is found of each kind of mistake, and on which line
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import meshcomm as mc

SIDE = 12
LOCAL = ("torch.tanh({0})", "torch.sin({0}) + {0}", "torch.nn.functional.gelu({0})", "0.5 * {0} * {0}")


@dataclass(frozen=True)
class Value:
    """A global value [SIDE, SIDE] as ranks have it: cut along axes, the same but varying, or yet to be summed."""

    name: str
    cut: tuple[tuple[str, ...], tuple[str, ...]]
    same: frozenset[str] = frozenset()
    summed: frozenset[str] = frozenset()
    op: str = ""
    axis: str = ""

    @property
    def along(self) -> frozenset[str]:
        """The axes along which it varies."""
        return frozenset((*self.cut[0], *self.cut[1])) | self.same | self.summed

    @property
    def spec(self) -> str:
        """Its layout."""
        return " ".join(
            f"({' '.join([*axes, dim])})" if axes else dim for axes, dim in zip(self.cut, "mn", strict=True)
        )


def with_cut(value: Value, dim: int, axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (axes, value.cut[1]) if dim == 0 else (value.cut[0], axes)


class Drawn:
    """A program."""

    def __init__(self, seed: int, steps: int = 7) -> None:
        self.dice = random.Random(seed)
        self.axes = ("dp", "tp")[: self.dice.randint(1, 2)]
        self.lines: list[str] = []
        self.made: list[Value] = []
        self.inputs = [Value(f"x{i}", self.any_cut()) for i in range(self.dice.randint(2, 3))]
        self.values = list(self.inputs)
        for _ in range(steps):
            self.step()
        self.end()

    def any_cut(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        cut: list[list[str]] = [[], []]
        for axis in self.axes:
            if self.dice.random() < 0.5:
                self.dice.choice(cut).append(axis)
        return tuple(cut[0]), tuple(cut[1])

    def add(self, text: str, like: Value, op: str = "", axis: str = "", **changes: Any) -> Value:
        fields = {"cut": like.cut, "same": like.same, "summed": like.summed} | changes
        value = Value(f"h{len(self.made)}", op=op, axis=axis, **fields)
        self.lines.append(f"{value.name} = {text}")
        self.made.append(value)
        self.values.append(value)
        return value

    def vary(self, x: Value, axes: frozenset[str]) -> Value:
        for axis in sorted(axes - x.along):
            x = self.add(f"mc.pvary({x.name}, {axis!r})", x, "pvary", axis, same=x.same | {axis})
        return x

    def reduced(self, x: Value) -> Value:
        for axis in sorted(x.summed):
            left, dim = x.summed - {axis}, self.dice.choice([0, 1])
            if self.dice.random() < 0.6:
                x = self.add(f"mc.all_reduce({x.name}, {axis!r})", x, "all_reduce", axis, summed=left)
            else:
                cut = with_cut(x, dim, (*x.cut[dim], axis))
                text = f"mc.reduce_scatter({x.name}, {axis!r}, {dim})"
                x = self.add(text, x, "reduce_scatter", axis, cut=cut, summed=left)
        return x

    def whole(self, x: Value, dim: int) -> Value:
        while x.cut[dim]:
            axis = x.cut[dim][-1]
            text = f"mc.all_gather_invariant({x.name}, {axis!r}, {dim})"
            x = self.add(text, x, "all_gather_invariant", axis, cut=with_cut(x, dim, x.cut[dim][:-1]))
        return x

    def step(self) -> None:
        x = self.reduced(self.dice.choice(self.values[-4:]))
        what = self.dice.choice(["matmul", "matmul", "matmul", "local", "gather", "shard", "plus"])
        free = [axis for axis in self.axes if axis not in x.along]
        if what == "matmul":
            self.matmul(x, self.reduced(self.dice.choice(self.values)))
        elif what == "local":
            self.add(self.dice.choice(LOCAL).format(x.name), x)
        elif what == "gather":
            self.whole(x, self.dice.choice([0, 1]))
        elif what == "shard" and free:
            axis, dim = self.dice.choice(free), self.dice.choice([0, 1])
            cut = with_cut(x, dim, (*x.cut[dim], axis))
            self.add(f"mc.shard({x.name}, {axis!r}, {dim})", x, "shard", axis, cut=cut)
        elif what == "plus":
            y = self.dice.choice(self.values)
            if y.cut == x.cut and not y.summed:
                both = x.along | y.along
                x, y = self.vary(x, both), self.vary(y, both)
                self.add(f"{x.name} + 0.5 * {y.name}", x)

    def matmul(self, x: Value, y: Value) -> None:
        if x.cut[1] != y.cut[0]:
            x, y = self.whole(x, 1), self.whole(y, 0)
        inner = frozenset(x.cut[1])
        if (frozenset(x.cut[0]) | inner) & frozenset(y.cut[1]) or frozenset(x.cut[0]) & inner:
            return
        both = x.along | y.along
        x, y = self.vary(x, both), self.vary(y, both)
        cut = (x.cut[0], y.cut[1])
        self.add(f"({x.name} @ {y.name}) / 12", x, cut=cut, same=both - {*cut[0], *cut[1]} - inner, summed=inner)

    def end(self) -> None:
        terms = []
        for i, x in enumerate(self.values[-3:]):
            x = self.reduced(x)
            for axis in sorted(x.same):
                x = self.add(f"mc.all_reduce({x.name}, {axis!r}, 'mean')", x, "mean", axis, same=x.same - {axis})
            y = self.add(f"torch.sin({x.name} + {i}).sum() / 20", x, cut=((), ()), summed=x.along)
            for axis in sorted(x.along):
                y = self.add(f"mc.all_reduce({y.name}, {axis!r})", y, "all_reduce", axis, summed=y.summed - {axis})
            terms.append(y.name)
        self.lines.append("return " + " + ".join(terms))

    def counts(self, at: int) -> bool:
        """Whether what a line makes reaches the return."""
        needed: set[str] = set()
        for line in reversed(self.lines[at + 1 :]):
            name, _, text = line.partition(" = ")
            if not text or name in needed:
                needed |= set(re.findall(r"\b[hx]\d+\b", text or line))
        return self.made[at].name in needed

    def verified(self, lines: list[str] | None = None, name: str = "drawn.py", **given: Any) -> mc.Report:
        """What verify says of it."""
        body = "\n".join(f"    {line}" for line in lines or self.lines)
        space: dict[str, Any] = {"mc": mc, "torch": torch, "Scaled": Scaled, "half": half, "hooked": hooked}
        exec(compile(f"def f({', '.join(x.name for x in self.inputs)}):\n{body}\n", name, "exec"), space)
        inputs = []
        for seed in range(len(self.inputs)):
            made = torch.Generator().manual_seed(seed)
            inputs.append(torch.randn(SIDE, SIDE, generator=made, dtype=torch.float64) / 3)
        specs, shape = tuple(x.spec for x in self.inputs), dict.fromkeys(self.axes, 2)
        return mc.verify(space["f"], *inputs, in_specs=specs, out_specs="", meshes=shape, schedules=0, **given)


# ------------------------------------------------------------------------------------------------------ what is wrong


class Scaled(torch.autograd.Function):
    """A backward that divides."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, n: int) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.n = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g / ctx.n, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, _: None) -> Tensor:
        return t.clone()


def half(x: Tensor, n: int) -> Tensor:
    """The value as it is, and a part of its gradient."""
    return x / n + (x - x / n).detach()


def hooked(x: Tensor, n: int) -> Tensor:
    """A gradient that is multiplied on its way."""
    if x.requires_grad:
        x.register_hook(lambda g: g * n)
    return x


Mistake = Callable[[Value, str, Drawn], "str | None"]


def _at(*ops: str) -> Callable[[Callable[[Value, str], str]], Mistake]:
    return lambda change: lambda value, text, _: change(value, text) if value.op in ops else None


def _operand(text: str) -> str:
    return text.partition("(")[2].partition(",")[0]


MISTAKES: dict[str, Mistake] = {
    "no pvary": _at("pvary")(lambda _, text: f"{_operand(text)} * 1"),
    "no reduction": _at("all_reduce")(lambda _, text: f"{_operand(text)} * 1"),
    "reduced twice": _at("all_reduce")(lambda value, text: f"mc.all_reduce({text}, {value.axis!r})"),
    "mean for sum": _at("all_reduce")(lambda _, text: f"{text[:-1]}, 'mean')"),
    "max for sum": _at("all_reduce")(lambda _, text: f"{text[:-1]}, 'max')"),
    "scaled": _at("all_reduce", "mean")(lambda value, text: f"{text} * mc.axis_size({value.axis!r})"),
    "all_gather": _at("all_gather_invariant")(lambda _, text: text.replace("_invariant", "")),
    "half a gradient": _at("all_reduce")(lambda value, text: f"half({text}, mc.axis_size({value.axis!r}))"),
    "detach": lambda value, text, _: None if value.op else f"({text}).detach()",
    "a wrong backward": lambda value, text, of: None if value.op else f"Scaled.apply({text}, mc.axis_size({of.axes[0]!r}))",
    "a hook": lambda value, text, of: None if value.op else f"hooked({text}, mc.axis_size({of.axes[0]!r}))",
    "one rank's own factor": lambda value, text, _: (
        None if value.op or not value.along else f"({text}) * (1 + mc.axis_index({min(value.along)!r}))"
    ),
}  # fmt: skip


def broken(program: Drawn, mistake: str, seed: int) -> tuple[list[str], int] | None:
    """The lines with this mistake, and the number of its line; None where there is no place for it."""
    places = []
    for at, value in enumerate(program.made):
        name, _, text = program.lines[at].partition(" = ")
        wrong = MISTAKES[mistake](value, text, program)
        if wrong is not None and program.counts(at):
            places.append((at, f"{name} = {wrong}"))
    if not places:
        return None
    at, line = random.Random(seed).choice(places)
    return [*program.lines[:at], line, *program.lines[at + 1 :]], at


def blamed(report: mc.Report, lines: list[str], at: int, name: str) -> bool:
    """Whether the line is that of the mistake, or a line of the helper that it calls; of what is left out, that of what
    is taken or of who takes it.
    """
    line = report.findings[0].line
    made, _, text = lines[at].partition(" = ")
    near = [made, *re.findall(r"\b[hx]\d+\b", text)] if text.endswith("* 1") or "mc.all_gather(" in text else []
    good = {at} | {i for i, other in enumerate(lines) if any(re.search(rf"\b{each}\b", other) for each in near)}
    return line in {f"{name}:{i + 2}" for i in good} or (line.startswith("verify_programs.py") and "(" in text)


def main(what: str, first: int, last: int) -> None:
    """A sweep, and its counts."""
    counts: Counter[tuple[str, str]] = Counter()
    for seed in range(first, last):
        program = Drawn(seed)
        if what == "right":
            report = program.verified()
            counts["right", "passes" if report.ok else "FALSE ALARM"] += 1
            print("" if report.ok else f"{seed}: {report}", end="")
            continue
        for mistake in MISTAKES:
            found = broken(program, mistake, seed)
            if found is not None:
                report = program.verified(found[0], f"p{seed}.py")
                where = "the line" if not report.ok and blamed(report, *found, f"p{seed}.py") else "another line"
                noted = "noted" if any("no output depends" in note for note in report.notes) else "passes"
                counts[mistake, noted if report.ok else where] += 1
    for (mistake, outcome), count in sorted(counts.items()):
        print(f"{mistake}: {outcome} {count}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
