"""Programs with a mistake in them: what each rank does then, and which ranks cannot finish.

Which ones cannot is worked out on paper, from who calls what in which order: calls of one group meet by their number, and
who waits for a call that never comes, or that is another one, does not finish. So is who can: what it has must be right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fuzz_programs import KINDS as PROGRAM_KINDS
from fuzz_programs import Dice, Drawn, program_of
from fuzz_steps import (
    BF16,
    BOOL,
    C64,
    C128,
    F32,
    F64,
    I32,
    I64,
    MESSAGES,
    OBJECTS,
    REDUCTIONS,
    TYPED,
    U8,
    Call,
    Program,
    Run,
    Step,
    Wait,
    made,
    run_backward,
)
from hypothesis import assume
from hypothesis import strategies as st
from oracle import Oracle, axis_choices
from torch import Tensor
from torch.utils._pytree import tree_map_only

import meshcomm as mc

__all__ = [
    "KINDS",
    "Break",
    "Outcome",
    "UserError",
    "break_of",
    "broken_of",
    "broken_programs",
    "follow",
    "foreseen",
    "go_on",
    "ready",
    "run_broken",
    "works_again",
]

KINDS = (
    "skip", "extra", "op", "axis", "reduce op", "dim", "dtype", "shape", "split", "root", "perm", "gradient", "swap",
    "user error", "return", "argument", "argument everywhere",
)  # fmt: skip
TWISTS = ("op", "axis", "reduce op", "dim", "dtype", "shape", "split", "root", "perm", "gradient", "argument")

OTHER = {
    F64: F32, F32: F64, BF16: F32, I64: I32, I32: I64, U8: I32, BOOL: U8, C64: C128, C128: C64,
}  # fmt: skip
"""Another dtype for each."""


class UserError(Exception):
    """Something that a program raises for a reason of its own."""


@dataclass(frozen=True)
class Break:
    """``ranks`` do something else at the event ``at``."""

    kind: str
    at: int
    ranks: tuple[int, ...]
    detail: Any = None


Action = tuple[str, int]
"""What to do, and with which event."""


def actions_of(program: Program, broken: Break | None, rank: int) -> list[Action]:
    """All that a rank does."""
    actions = [("do", place) for place in range(len(program.events))]
    if broken is None or rank not in broken.ranks:
        return actions
    at, kind = broken.at, broken.kind.removesuffix(" everywhere")
    if kind in TWISTS:
        actions[at] = ("twist", at)
    elif kind == "skip":
        actions[at] = ("skip", at)
    elif kind == "swap":
        actions.insert(at, actions.pop(broken.detail))
    elif kind == "extra":
        actions.insert(at, ("extra", at))
    else:  # the rest is not reached
        actions[at:] = [(kind, at)]
    return actions


# ------------------------------------------------------------------------------------------------------------ twists


def twisted(broken: Break, call: Call) -> Call:
    """The call that a rank makes in the place of this one."""
    name, args, kwargs = call
    kwargs = dict(kwargs)
    kind, detail = broken.kind.removesuffix(" everywhere"), broken.detail
    if kind == "op":
        return _another(call)
    if kind in ("dtype", "shape", "gradient"):
        change: Callable[[Tensor], Tensor] = {
            "dtype": lambda x: x.to(OTHER[x.dtype]),
            "shape": lambda x: torch.stack([x, x]),
            "gradient": lambda x: x.detach() if detail else x.detach().requires_grad_(),
        }[kind]
        return name, (tree_map_only(Tensor, change, args[0]), *args[1:]), kwargs
    if kind in ("axis", "argument"):
        axis = detail if kind == "axis" else "nowhere"
        place = next(i for i, arg in enumerate(args) if isinstance(arg, (str, tuple)))
        return name, (*args[:place], axis, *args[place + 1 :]), kwargs
    return name, args, kwargs | detail


def _another(call: Call) -> Call:
    name, args, _ = call
    axis = next(arg for arg in args if isinstance(arg, (str, tuple)))
    if name in ("all_gather_object", "gather_object"):
        return "broadcast_object", (args[0], axis), {}
    if name in OBJECTS:
        return "all_gather_object", (args[0], axis), {}
    if name in TYPED and name != "shift":
        return "shift", args, {}
    return "all_gather", (torch.ones(7), axis), {}


def break_of(dice: Dice, program: Program) -> Break | None:
    """A mistake that the program can have, if there is one."""
    oracle = Oracle(program.axes)
    kinds = [kind for kind in KINDS if _places(program, oracle, kind)]
    if not kinds:
        return None
    kind = dice.one_of(kinds)
    at = dice.one_of(_places(program, oracle, kind))
    if kind == "argument everywhere":
        return Break(kind, at, tuple(range(program.size)))
    if kind == "swap":
        ranks = dice.order(range(program.size))[: dice.number(1, program.size - 1)]
        return Break(kind, at, tuple(sorted(ranks)), _partner(program, at))
    rank = dice.one_of([rank for rank in range(program.size) if _details(program, oracle, kind, at, rank)])
    return Break(kind, at, (rank,), dice.one_of(_details(program, oracle, kind, at, rank)))


def broken_of(dice: Dice, meshes: Sequence[dict[str, int]]) -> tuple[Program, Break | None]:
    """A program and its mistake; with no barrier, which is how ranks go on together."""
    program = program_of(dice, meshes, 5, [kind for kind in PROGRAM_KINDS if kind != "barrier"])
    return program, break_of(dice, program)


@st.composite
def broken_programs(draw: Any, meshes: Sequence[dict[str, int]]) -> tuple[Program, Break]:
    """Programs with a mistake in them."""
    program, broken = broken_of(Drawn(draw), meshes)
    assume(broken)
    assert broken is not None
    return program, broken


def _places(program: Program, oracle: Oracle, kind: str) -> list[int]:
    """The events at which this can go wrong: calls that move something."""
    steps = {
        place: event
        for place, event in enumerate(program.events)
        if isinstance(event, Step) and event.communicates and oracle.axis_size(event.axis) > 1
    }
    if kind in ("skip", "extra", "op", "argument", "argument everywhere", "user error", "return"):
        return list(steps)
    if kind == "swap":
        return [place for place in steps if _partner(program, place)]
    return [
        place for place in steps
        if any(_details(program, oracle, kind, place, rank) for rank in range(oracle.size))
    ]  # fmt: skip


def _partner(program: Program, place: int) -> int | None:
    """A later call that could as well be made before this one."""
    step = program.events[place]
    if not isinstance(step, Step) or step.later or step.op in MESSAGES:
        return None
    for other in range(place + 1, len(program.events)):
        event = program.events[other]
        if isinstance(event, Wait) or event.later:
            return None
        if event.communicates and event.op not in MESSAGES:
            ready = all(value < program.first_of[place] for value in event.of)
            return other if ready and max(program.axes.values()) > 1 else None
    return None


def _details(program: Program, oracle: Oracle, kind: str, place: int, rank: int) -> list[Any]:
    """How exactly."""
    step = program.events[place]
    assert isinstance(step, Step)
    n, kwargs = oracle.axis_size(step.axis), step.kwargs
    xs = [program.shards[i][rank] for i in step.of]
    if kind == "axis":
        mine = _group(oracle, step.axis, rank)
        others = [(axis, _group(oracle, axis, rank)) for axis in axis_choices(program.axes)]
        return [axis for axis, group in others if group != mine and len(group) > 1]
    if kind == "reduce op" and "op" in kwargs:
        return [{"op": op} for op in REDUCTIONS[xs[0].dtype] if op != kwargs["op"]]
    if kind == "dim":
        names = [name for name in ("dim", "split_dim", "concat_dim") if name in kwargs and step.op != "scatter"]
        return [{name: dim} for name in names for dim in range(max(x.ndim for x in xs)) if dim != kwargs[name]]
    if kind == "dtype" and step.op in (*TYPED, "reduce", "gather"):
        return [True]
    if kind == "shape" and step.op in (*TYPED, "reduce", "gather"):
        return [True]
    if kind == "split":
        return _other_splits(kwargs, oracle.index(rank, step.axis))
    if kind == "root":
        return [
            {name: i}
            for name in ("src", "dst")
            if name in kwargs and step.op != "send"
            for i in range(n)
            if i != kwargs[name]
        ]
    if kind == "perm" and "perm" in kwargs:
        return [{"perm": []} if kwargs["perm"] else {"perm": [(0, 0)]}]
    if kind == "perm" and step.op == "shift":
        return [{"offset": kwargs["offset"] + 1}, {"wrap": not kwargs["wrap"]}]
    if kind == "gradient" and step.op in TYPED:
        if any(x.requires_grad for x in xs):
            return [True]
        return [False] if all(x.dtype.is_floating_point for x in xs) else []
    return [None] if kind in ("skip", "extra", "op", "argument", "user error", "return") else []


def _other_splits(kwargs: dict[str, Any], index: int) -> list[Any]:
    if "traffic" in kwargs:
        row = kwargs["traffic"][index]
        return [{"send_sizes": [*row[1:], row[0]]}] if len(set(row)) > 1 else []
    sizes = kwargs.get("sizes", [])
    return [{"sizes": [*sizes[1:], sizes[0]]}] if len(set(sizes)) > 1 else []


def _group(oracle: Oracle, axis: Any, rank: int) -> tuple[int, ...]:
    """The ranks of an axis, which calls meet."""
    return next(tuple(ranks) for ranks in oracle.groups(axis) if rank in ranks)


# -------------------------------------------------------------------------------------------------------- on paper


@dataclass
class Foreseen:
    """Which ranks finish; ``exact``: whether that is known of all; ``trusted``: whether no call can have met another
    one that looks the same.
    """

    finished: set[int]
    exact: bool
    trusted: bool


@dataclass
class _Meeting:
    came: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    later: bool = False
    wrong: bool = False


class _Paper:
    def __init__(self, program: Program, broken: Break | None) -> None:
        self.program, self.broken, self.oracle = program, broken, Oracle(program.axes)
        self.actions = {rank: actions_of(program, broken, rank) for rank in range(program.size)}
        self.next = dict.fromkeys(self.actions, 0)
        self.counts: dict[tuple[int, tuple[int, ...]], int] = {}
        self.meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self.begun: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
        self.waits: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        self.dead: set[int] = set()
        self.exact = self.trusted = True

    def run(self) -> Foreseen:
        while [rank for rank in self.actions if self.advance(rank)]:
            pass
        stuck = {rank for rank, waits in self.waits.items() if waits and rank not in self.dead}
        finished = {r for r in self.actions if r not in self.dead | stuck and self.next[r] == len(self.actions[r])}
        return Foreseen(finished, self.exact, self.trusted)

    def advance(self, rank: int) -> bool:
        """As far as this rank gets; whether that was any further."""
        moved = False
        while rank not in self.dead:
            waits = self.waits.get(rank, [])
            if any(self.meetings[each].wrong for each in waits):
                self.dead.add(rank)
                return True
            if any(len(self.meetings[each].came) < len(each[0]) for each in waits):
                return moved
            self.waits[rank] = []
            if self.next[rank] == len(self.actions[rank]):
                return moved
            self.take(rank, *self.actions[rank][self.next[rank]])
            self.next[rank] += 1
            moved = True
        return moved

    def take(self, rank: int, what: str, place: int) -> None:
        event = self.program.events[place]
        if isinstance(event, Wait):
            self.waits[rank] = [self.begun[rank, step] for step in event.steps if (rank, step) in self.begun]
            return
        if what in ("user error", "return"):
            if what == "user error":
                self.dead.add(rank)
            return
        if what == "skip" or not event.communicates:
            return
        if event.op in MESSAGES:
            self.exact = self.exact and what == "do" and self.broken is None
            return
        axis = event.axis
        if what == "twist":
            assert self.broken is not None
            if self.broken.kind.startswith("argument"):
                self.dead.add(rank)
                return
            axis = self.broken.detail if self.broken.kind == "axis" else axis
        self.come(rank, _group(self.oracle, axis, rank), (what, place), event.later and what != "extra", place)

    def come(self, rank: int, group: tuple[int, ...], key: tuple[Any, ...], later: bool, place: int) -> None:
        if len(group) == 1:
            return
        number = self.counts.get((rank, group), 0)
        self.counts[rank, group] = number + 1
        meeting = self.meetings.setdefault((group, number), _Meeting())
        meeting.later |= later
        meeting.wrong |= any(not self.agree(key, other) for other in meeting.came.values())
        meeting.came[rank] = key
        if meeting.wrong and meeting.later:
            self.exact = False
        if later:
            self.begun[rank, place] = (group, number)
        else:
            self.waits[rank] = [(group, number)]

    def agree(self, one: tuple[Any, ...], two: tuple[Any, ...]) -> bool:
        if one == two:
            return True
        if one[1] == two[1] or self.looks(one) != self.looks(two):
            return False
        self.exact = self.trusted = False
        return True

    def looks(self, key: tuple[Any, ...]) -> Any:
        """What may be the same for two calls."""
        what, place = key
        step = self.program.events[place]
        assert isinstance(step, Step)
        if what == "extra":
            return "extra"
        if self.broken is not None and self.broken.kind not in ("skip", "extra", "swap"):
            return step.op  # one of them may be changed
        xs = [self.program.shards[i][0] for i in step.of]
        return step.op, () if step.op in OBJECTS else [(x.dtype, x.shape) for x in xs]


def foreseen(program: Program, broken: Break | None) -> Foreseen:
    """Who finishes, and who cannot."""
    return _Paper(program, broken).run()


# ------------------------------------------------------------------------------------------------------- on ranks


@dataclass
class Outcome:
    """What became of a rank: its values, or the error; its gradients, or that error; whether all work together again."""

    values: list[Tensor] | None = None
    error: str = ""
    gradients: list[Tensor] | None = None
    backward_error: str = ""
    again: str = ""


def run_broken(program: Program, broken: Break, *, caught: bool = True) -> Outcome:
    """On this rank: the program, and after it all ranks go on together."""
    mesh = mc.make_mesh(program.axes)
    ready(mesh)
    outcome = Outcome()
    mine = Run(program, program.sent(mesh.rank), mesh)
    given = mine.values[: len(program.inputs)]
    try:
        follow(mine, broken)
        outcome.values = [value if value is None else value.detach() for value in mine.values]
    except (mc.CommError, mc.MeshError, UserError) as error:
        if not caught:
            raise
        outcome.error = f"{type(error).__name__}: {error}"
    if outcome.values is not None and not any(value is None for value in outcome.values):
        try:
            outcome.gradients = run_backward(program, given, mine.values, mesh)
        except (mc.CommError, mc.MeshError) as error:
            outcome.backward_error = f"{type(error).__name__}: {error}"
    axes = axes_of(program, broken)
    go_on(mesh, axes)
    for work, _ in mine.works.values():  # begun before the error: they end too
        with contextlib.suppress(mc.CommError):
            mc.wait(work, timeout=150)
    outcome.again = works_again(mesh, axes)
    return outcome


def follow(mine: Run, broken: Break) -> None:
    """All that this rank does."""
    program, rank = mine.program, mine.mesh.rank
    for what, place in actions_of(program, broken, rank):
        event = program.events[place]
        if what == "do":
            mine.do(place)
        elif what == "twist":
            mine.do(place, lambda call: twisted(broken, call))
        elif what == "return":
            return
        elif what == "user error":
            raise UserError(f"rank {rank} has had enough")
        elif what == "extra":
            assert isinstance(event, Step)
            made(("all_gather", (torch.ones(7), event.axis), {}), mine.mesh)
        else:
            assert what == "skip"
            assert isinstance(event, Step)
            first = program.first_of[place]
            right = [program.shards[i][rank] for i in range(first, first + event.gives)]
            mine.put(place, [x.detach().clone().requires_grad_(x.requires_grad) for x in right])


def ready(mesh: mc.Mesh) -> None:
    """Among processes the members of an axis set it up together: do so before anything can go wrong."""
    for axis in axis_choices(mesh.shape):
        mesh.axis(axis)


def axes_of(program: Program, broken: Break | None = None) -> list[Any]:
    """The axes of the mesh, and the tuples that any rank may use."""
    axes = [*program.axes, *(step.axis for step in program.events if isinstance(step, Step) and step.axis is not None)]
    axes += [tuple(sorted(along)) for along in program.varying if len(along) > 1]
    if broken is not None and broken.kind == "axis":
        axes.append(broken.detail)
    return list(dict.fromkeys(axes))


def go_on(mesh: mc.Mesh, axes: list[Any]) -> None:
    """What a program does that has caught an error and wants to go on: meet along each axis, and each tuple, in use."""
    for axis in axes:
        mc.barrier(axis, timeout=150, mesh=mesh)


def works_again(mesh: mc.Mesh, axes: list[Any]) -> str:
    """Fresh calls along each axis, with a gradient and a message; what is wrong with them."""
    for axis in axes:
        along = mesh.axis(axis)
        index, n = along.index, along.size
        x = torch.tensor([1.0 + index, 2.0], requires_grad=True)
        y = mc.all_reduce(x, axis, mesh=mesh)
        if y.tolist() != [n * (n + 1) / 2, 2.0 * n]:
            return f"all_reduce over {axis} gave {y.tolist()} on index {index} of {n}"
        (g,) = torch.autograd.grad(
            mc.all_reduce((mc.pvary(y, axis, mesh=mesh) * (index + 1)).sum(), axis, mesh=mesh), x
        )
        if g.tolist() != [n * (n + 1) / 2] * 2:
            return f"the gradient over {axis} is {g.tolist()} on index {index} of {n}"
        work = mc.all_gather(x.detach(), axis, mesh=mesh, async_op=True)
        told = (index + 1) % n, (index - 1) % n
        got = mc.exchange([(torch.tensor(index), told[0], 10**6)], [(told[1], (), torch.int64, 10**6)], axis, mesh=mesh)
        if got[0].item() != told[1]:
            return f"a message over {axis} brought {got} to index {index} of {n}"
        if work.wait()[::2].tolist() != [1.0 + i for i in range(n)]:
            return f"all_gather over {axis} gave {work.wait().tolist()} on index {index} of {n}"
    return "right"
