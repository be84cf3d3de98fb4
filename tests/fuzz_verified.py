"""The fuzzer's programs under mc.verify, with the oracle as their twin: each event has a line of its own.

python tests/fuzz_verified.py 0 600     # right ones, and what is found of each kind of breakage, on which line
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import fuzz_breaks
import fuzz_programs
import fuzz_steps
import torch
from fuzz_breaks import Break, UserError, actions_of, broken_of, twisted
from fuzz_programs import Rolled
from fuzz_steps import Given, Program, Run, Step, meaning
from oracle import Oracle
from torch import Tensor

import meshcomm as mc
from meshcomm.runtime import callsite

MESHES = [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}]
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool, torch.float64)
"""Those that verify leaves as they are."""
FAR = 10
"""Lines from an event to the next one."""


def drawn(seed: int) -> tuple[Program, Break | None]:
    """A program, and what breaks it."""
    kept, fuzz_programs.DTYPES = fuzz_programs.DTYPES, DTYPES
    try:
        return broken_of(Rolled(seed), MESHES)
    finally:
        fuzz_programs.DTYPES = kept


def _at(event: int, text: str) -> Callable[..., Any]:
    space: dict[str, Any] = {"UserError": UserError, "mc": mc, "torch": torch}
    exec(compile("\n" * (FAR * (event + 1) - 1) + f"def go{text}", "drawn.py", "exec"), space)
    return space["go"]  # type: ignore[no-any-return]


def blamed_event(report: mc.Report) -> int | None:
    """The event whose line is blamed."""
    name, _, line = report.findings[0].line.partition(":")
    return int(line) // FAR - 1 if name == "drawn.py" else None


def _followed(program: Program, broken: Break | None, mine: Run) -> None:
    for what, place in actions_of(program, broken, mine.mesh.rank):
        event = program.events[place]
        if what == "return":
            return
        if what == "user error":
            _at(place, "(): raise UserError('of its own')")()
        elif what == "extra":
            assert isinstance(event, Step)
            _at(place, "(axis, mesh): mc.all_gather(torch.ones(7), axis, mesh=mesh)")(event.axis, mine.mesh)
        elif what == "skip":
            assert isinstance(event, Step)
            first = program.first_of[place]
            right = [program.shards[i][mine.mesh.rank] for i in range(first, first + event.gives)]
            mine.put(place, [x.detach().clone().requires_grad_(x.requires_grad) for x in right])
        else:
            own = None if what == "do" or broken is None else (lambda call: twisted(broken, call))
            _at(place, "(mine, place, own): mine.do(place, own)")(mine, place, own)


def _spec(along: frozenset[str], axes: dict[str, int], ndim: int) -> str:
    """A dim for each axis in front."""
    front = [f"({axis} i{axis})" if axis in along else f"i{axis}" for axis in axes]
    return " ".join([*front, *(f"d{i}" for i in range(ndim))])


def _places(program: Program, along: frozenset[str]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Where there is another part along these axes, and on which rank."""
    names, oracle = list(program.axes), Oracle(program.axes)
    for at in itertools.product(*(range(n if axis in along else 1) for axis, n in program.axes.items())):
        ranks = (r for r in range(oracle.size) if all(oracle.index(r, a) == i for a, i in zip(names, at, strict=True)))
        yield at, next(ranks)


def _whole(program: Program, parts: list[Tensor], along: frozenset[str]) -> Tensor:
    """Parts of ranks as a global value."""
    mine = [parts[rank] for _, rank in _places(program, along)]
    return torch.stack(mine).reshape(*(n if a in along else 1 for a, n in program.axes.items()), *mine[0].shape)


def verified(program: Program, broken: Break | None) -> mc.Report:
    """What verify says of it."""
    axes, oracle = program.axes, Oracle(program.axes)
    outs = program.scored() or [len(program.shards) - 1]

    def fn(*xs: Tensor) -> tuple[Tensor | None, ...]:
        mesh = mc.make_mesh(axes)
        mine = Run(program, [x.reshape(x.shape[len(axes) :]) for x in xs], mesh)
        _followed(program, broken, mine)
        ys = [mine.values[i] for i in outs]
        return tuple(None if y is None else y.reshape((1,) * len(axes) + y.shape) for y in ys)

    def shards_of(given: Given, x: Tensor) -> list[Tensor]:
        made: dict[tuple[int, ...], Tensor] = {}
        place = [
            tuple(oracle.index(r, a) if a in given.varying else 0 for a in axes) for r in range(oracle.size)
        ]  # fmt: skip
        return [made.setdefault(at, x[at].clone()) if at not in made else made[at] for at in place]

    def twin(*xs: Tensor) -> tuple[Tensor, ...]:
        shards = [shards_of(given, x) for given, x in zip(program.inputs, xs, strict=True)]
        for event in program.events:
            if isinstance(event, Step):
                shards += meaning(oracle, event, [shards[i] for i in event.of])
        return tuple(_whole(program, shards[i], program.varying[i]) for i in outs)

    inputs = []
    for i, given in enumerate(program.inputs):
        x = _whole(program, [x.detach() for x in program.shards[i]], given.varying)
        inputs.append(x.requires_grad_(given.grad))
    in_specs = tuple(_spec(given.varying, axes, len(given.shape)) for given in program.inputs)
    out_specs = tuple(_spec(program.varying[i], axes, program.shards[i][0].ndim) for i in outs)
    files = {module.__file__: True for module in (fuzz_steps, fuzz_breaks, sys.modules[__name__])}
    callsite.known_files.update(files)  # type: ignore[arg-type]  # the lines are those of events
    try:
        return mc.verify(
            fn, *inputs, in_specs=in_specs, out_specs=out_specs, twin=twin, meshes=axes, schedules=0,
            derivatives=("vjp",),
        )  # fmt: skip
    finally:
        for file in files:
            callsite.known_files.pop(file)  # type: ignore[arg-type]


def outcome(program: Program, broken: Break) -> str:
    """``"the line"``, ``"another line"``, or ``"passes"``."""
    report = verified(program, broken)
    if report.ok:
        return "passes"
    return "the line" if blamed_event(report) in (broken.at, broken.detail) else "another line"


def main(first: int, last: int) -> None:
    """A sweep, and its counts."""
    counts: Counter[tuple[str, str]] = Counter()
    for seed in range(first, last):
        program, broken = drawn(seed)
        if broken is not None:
            counts["right", "passes" if verified(program, None).ok else "FALSE ALARM"] += 1
            found = outcome(program, broken)
            counts[broken.kind, found] += 1
            if found != "the line":
                print(seed, broken, found)
    for (kind, found), count in sorted(counts.items()):
        print(f"{kind}: {found} {count}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
