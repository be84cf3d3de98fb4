"""The steps of programs that are drawn at random: what they mean on lists of shards, and what they do on ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from oracle import Oracle, distinct
from torch import Tensor

import meshcomm as mc

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
I64, I32, U8, BOOL = torch.int64, torch.int32, torch.uint8, torch.bool
C64, C128 = torch.complex64, torch.complex128
SMOOTH = (F64, C128)
"""Dtypes whose values are any numbers and are compared with a tolerance; the others hold small whole numbers."""
DTYPES = (F64, F32, BF16, I64, I32, U8, BOOL, C64, C128)
REDUCTIONS = {
    **dict.fromkeys((F64, F32, BF16), ("sum", "mean", "max", "min", "product")),
    **dict.fromkeys((I64, I32, U8), ("sum", "max", "min", "product", "band", "bor", "bxor")),
    **dict.fromkeys((C64, C128), ("sum", "mean", "product")),
    BOOL: ("max", "min", "band", "bor", "bxor"),
}
SHAPES = ((2,), (), (4, 2), (6,), (0,), (3, 0), (1, 4), (2, 3, 2), (6, 1), (5,), (2, 1, 6))
LONGEST, FOLDED = 6, 4
"""A dim longer than the first becomes as long as the second."""

TYPED = (
    "all_reduce", "all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all", "permute", "shift", "broadcast",
)  # fmt: skip
ONE_RANK = ("reduce", "gather", "scatter")
OBJECTS = ("all_gather_object", "broadcast_object", "gather_object", "scatter_object")
MESSAGES = ("exchange", "send")
TO_INVARIANT = ("all_reduce", "all_gather_invariant", "broadcast", "all_gather_object", "broadcast_object")
NO_LATER = (*OBJECTS, "pvary")
FORMS = ("plain", "strided", "transposed", "conjugate")


@dataclass(frozen=True)
class Given:
    """An input."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    varying: frozenset[str]
    grad: bool
    seed: int


@dataclass(frozen=True)
class Step:
    """One call: ``of`` are the numbers of the values that it takes; it gives as many, but for a join and a barrier."""

    op: str
    of: tuple[int, ...]
    axis: Any = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    form: str = "plain"
    tree: str = ""
    later: bool = False
    tag: int = 0

    @property
    def gives(self) -> int:
        return {"join": 1, "barrier": 0}.get(self.op, len(self.of))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the axes."""
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    @property
    def communicates(self) -> bool:
        return self.op not in ("join", "weighted", "pvary", "shard")


@dataclass(frozen=True)
class Wait:
    """Works to wait for, by the number of their step; ``turned``: each rank begins with another one."""

    steps: tuple[int, ...]
    turned: bool = False
    together: bool = False
    polled: bool = False


@dataclass
class Program:
    axes: dict[str, int]
    inputs: list[Given] = field(default_factory=list)
    events: list[Step | Wait] = field(default_factory=list)
    varying: list[frozenset[str]] = field(default_factory=list, repr=False)
    shards: list[list[Tensor]] = field(default_factory=list, repr=False)
    """What each value is on every rank; with a graph while it is drawn."""
    first_of: dict[int, int] = field(default_factory=dict, repr=False)
    """The number of the first value that the step at this place gives."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        lines = [f"inputs[{i}] = {given}" for i, given in enumerate(self.inputs)]
        for place, event in enumerate(self.events):
            first = self.first_of.get(place, 0)
            given = f"{first}..{first + event.gives - 1} = " if isinstance(event, Step) else ""
            lines.append(f"[{place}] {given}{event}")
        printer.text(f"{self.axes}\n  " + "\n  ".join(lines))

    @property
    def size(self) -> int:
        return len(self.shards[0])

    def light(self) -> Program:
        """Without a graph, to be sent to processes."""
        shards = [[x.detach().requires_grad_(x.requires_grad) for x in xs] for xs in self.shards]
        return replace(self, shards=shards)

    def scored(self) -> list[int]:
        """The values that the loss is made of."""
        return [i for i, xs in enumerate(self.shards) if xs[0].requires_grad][-4:]

    def sent(self, rank: int) -> list[Tensor]:
        """The inputs of a rank, as leaves of its own."""
        return [self.shards[i][rank].detach().clone().requires_grad_(given.grad) for i, given in enumerate(self.inputs)]


# ------------------------------------------------------------------------------------------------------ local parts


def squashed(y: Tensor) -> Tensor:
    """Small again; differentiable, and exact where the values are whole."""
    if y.dtype.is_complex:
        y = y.resolve_conj()
        return torch.complex(squashed(y.real), squashed(y.imag))
    if y.dtype == F64:
        return (0.7 * y).tanh() + 0.1 * y.sin()
    if y.dtype == BOOL:
        return y
    if y.dtype.is_floating_point:
        y = y + (y.round() - y).detach()
        return torch.remainder(y, 5) - 2
    return torch.remainder(y, 5) if y.dtype == U8 else torch.remainder(y, 5) - 2


def folded(y: Tensor, dim: int) -> Tensor:
    """The dim cut to a few elements that depend on all of it."""
    count = -(-y.shape[dim] // FOLDED)
    whole = y.long() if y.dtype == BOOL else y
    pieces = padded(whole, dim, count * FOLDED).unflatten(dim, (count, FOLDED))
    shape = [count if i == dim else 1 for i in range(pieces.ndim)]
    weights = torch.arange(1, count + 1).to(whole.dtype).view(shape)
    total = (pieces * weights).sum(dim)
    return total % 2 == 1 if y.dtype == BOOL else total.to(y.dtype)


def padded(y: Tensor, dim: int, length: int) -> Tensor:
    shape = list(y.shape)
    shape[dim] = length - y.shape[dim]
    return torch.cat([y, y.new_zeros(shape)], dim) if shape[dim] else y


def settled(y: Tensor) -> Tensor:
    y = squashed(y)
    for dim, length in enumerate(y.shape):
        if length > LONGEST:
            y = squashed(folded(y, dim))
    return y


def joined(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype == BOOL:
        return x ^ y
    return settled(x * y + x)


def formed(x: Tensor, form: str) -> Tensor:
    """The same values, lying otherwise in memory."""
    if form == "strided":
        return torch.stack([x, x], -1)[..., 0]
    if form == "transposed" and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if form == "conjugate" and x.dtype.is_complex:
        return x.conj().resolve_conj().conj()
    return x


def before(step: Step, x: Tensor, index: int) -> Tensor:
    """What a rank at this index gives to the collective: where lengths differ its own part."""
    kwargs = step.kwargs
    if step.op in ("all_gather", "all_gather_invariant") and "sizes" in kwargs:
        return x.narrow(kwargs["dim"], 0, kwargs["sizes"][index])
    if "traffic" in kwargs:
        return x.narrow(kwargs["split_dim"], 0, sum(kwargs["traffic"][index]))
    return x


def after(step: Step, y: Tensor) -> Tensor:
    """What came, in a shape that is the same on all ranks."""
    kwargs = step.kwargs
    if step.op in ("shard", "reduce_scatter") and "sizes" in kwargs:
        y = padded(y, kwargs["dim"] % y.ndim, max(kwargs["sizes"]))
    if "traffic" in kwargs:
        y = padded(y, kwargs["split_dim"], max(sum(column) for column in zip(*kwargs["traffic"], strict=True)))
    return y if step.op == "pvary" else settled(y)


# ------------------------------------------------------------------------------------------------------ the meaning


def meaning(oracle: Oracle, step: Step, shards: list[list[Tensor]]) -> list[list[Tensor]]:
    """What the step gives on every rank."""
    if step.op == "barrier":
        return []
    if step.op == "join":
        return [oracle.local(joined, *shards)]
    return [_meaning(oracle, step, xs) for xs in shards]


def _meaning(oracle: Oracle, step: Step, xs: list[Tensor]) -> list[Tensor]:
    indices = [oracle.index(rank, step.axis) for rank in range(oracle.size)]
    if step.op == "weighted":
        return oracle.local(lambda x, i: settled(weighted(x, i)), xs, indices)
    kwargs = dict(step.kwargs)
    if step.op in (*TYPED, "pvary", "shard"):
        kwargs.pop("bucket_mb", None)
        given = oracle.local(lambda x, i: before(step, x, i), xs, indices)
        traffic = kwargs.pop("traffic", None)
        if traffic is not None:
            kwargs["own"] = [{"send_sizes": row} for row in traffic]
        ys = getattr(oracle, step.op)(given, step.axis, **kwargs)
    else:
        ys = oracle._grouped(oracle.local(torch.detach, xs), step.axis, lambda group: plain_meaning(step, group))
    return oracle.local(lambda y: after(step, y), ys)


def plain_meaning(step: Step, group: list[Tensor]) -> list[Tensor]:
    """Of what has no gradient, for the ranks of one group."""
    n, kwargs = len(group), step.kwargs
    root = kwargs.get("src", kwargs.get("dst", 0))
    if step.op == "reduce":
        total = Oracle({"x": n}).all_reduce(group, "x", kwargs["op"])[0]
        return [total if i == root else torch.zeros_like(x) for i, x in enumerate(group)]
    if step.op == "gather":
        whole = torch.cat([x.reshape(1) if x.ndim == 0 else x for x in group], kwargs["dim"])
        return [whole if i == root else torch.zeros_like(whole) for i in range(n)]
    if step.op == "scatter":
        return list(group[root].chunk(n, kwargs["dim"])) if group[root].numel() else _empty_rows(group[root], n, kwargs)
    if step.op == "all_gather_object":
        return [torch.stack(group)] * n
    if step.op == "broadcast_object":
        return [group[root].clone()] * n
    if step.op == "gather_object":
        whole = torch.stack(group)
        return [whole if i == root else torch.zeros_like(whole) for i in range(n)]
    if step.op == "scatter_object":
        return [weighted(group[root], i) for i in range(n)]
    if step.op == "exchange":
        return [group[(i - kwargs["offset"]) % n].clone() for i in range(n)]
    assert step.op == "send"
    return [group[root].clone() if i == kwargs["to"] else x for i, x in enumerate(group)]


def _empty_rows(x: Tensor, n: int, kwargs: dict[str, Any]) -> list[Tensor]:
    shape = list(x.shape)
    shape[kwargs["dim"]] //= n
    return [x.new_zeros(shape) for _ in range(n)]


def weighted(x: Tensor, index: int) -> Tensor:
    """Another value at each index."""
    return x ^ (index % 2 == 1) if x.dtype == BOOL else x * (1 + index)


# -------------------------------------------------------------------------------------------------------- on a rank


def arranged(tree: str, xs: list[Any]) -> Any:
    if tree == "list":
        return list(xs)
    if tree == "dict":
        return {f"k{len(xs) - i}": x for i, x in enumerate(xs)}
    if tree == "nested":
        return {"first": (xs[0],), "rest": [{"x": x} for x in xs[1:]]}
    return xs[0]


def taken_apart(tree: str, got: Any, count: int) -> list[Any]:
    if tree == "list":
        return list(got)
    if tree == "dict":
        return [got[f"k{count - i}"] for i in range(count)]
    if tree == "nested":
        return [got["first"][0], *(each["x"] for each in got["rest"])]
    return [got]


Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A function's name, arguments and keyword arguments."""
Own = Callable[[Call], Call]


def invoke(step: Step, xs: list[Tensor], mesh: mc.Mesh, own: Own | None = None) -> Any:
    """Make the call of this rank, as changed by ``own``: the result, or a work of it."""
    axis = mesh.axis(step.axis)
    index, n, kwargs = axis.index, axis.size, dict(step.kwargs)
    if "traffic" in kwargs:
        traffic = kwargs.pop("traffic")
        kwargs |= {"send_sizes": traffic[index], "recv_sizes": [row[index] for row in traffic]}
    args: tuple[Any, ...]
    if step.op in (*TYPED, "pvary", "shard"):
        args = (arranged(step.tree, [formed(before(step, x, index), step.form) for x in xs]), step.axis)
    elif step.op == "barrier":
        args = (step.axis,)
    else:
        call = _plain_call(step, formed(xs[0].detach(), step.form), index, n)
        if call is None:
            return xs[0].detach()
        return made(call if own is None else own(call), mesh, step.later)
    return made((step.op, args, kwargs) if own is None else own((step.op, args, kwargs)), mesh, step.later)


def made(call: Call, mesh: mc.Mesh, later: bool = False) -> Any:
    name, args, kwargs = call
    more = {"async_op": True} if later and name not in NO_LATER else {}
    return getattr(mc, name)(*args, **kwargs, **more, mesh=mesh)


def _plain_call(step: Step, x: Tensor, index: int, n: int) -> Call | None:
    """None where this rank has nothing to do."""
    kwargs = dict(step.kwargs)
    if step.op == "scatter":
        like = kwargs.pop("like")
        if like:
            kwargs["like"] = x.narrow(kwargs["dim"], 0, x.shape[kwargs["dim"]] // n).clone()
        return "scatter", (x if index == kwargs["src"] else None, step.axis), kwargs
    if step.op in ("all_gather_object", "gather_object"):
        return step.op, ({"from": index, "x": x}, step.axis), kwargs
    if step.op == "scatter_object":
        objs = [weighted(x, i) for i in range(n)] if index == kwargs["src"] else None
        return step.op, (objs, step.axis), kwargs
    if step.op == "exchange":
        to, source = (index + kwargs["offset"]) % n, (index - kwargs["offset"]) % n
        return "exchange", ([(x, to, step.tag)], [(source, tuple(x.shape), x.dtype, step.tag)], step.axis), {}
    if step.op == "send":
        if index == kwargs["src"]:
            return "send", (x, step.axis, kwargs["to"]), {"tag": step.tag}
        if index == kwargs["to"]:
            told = {"shape": tuple(x.shape), "dtype": x.dtype, "tag": step.tag}
            return "recv", (step.axis, kwargs["src"]), told
        return None
    return step.op, (x, step.axis), kwargs


def result_of(step: Step, got: Any, xs: list[Tensor], mesh: mc.Mesh) -> list[Tensor]:
    """The values that the step gives on this rank."""
    if step.op == "barrier":
        assert got is None
        return []
    if step.op in (*TYPED, "pvary", "shard"):
        return [after(step, y) for y in taken_apart(step.tree, got, len(xs))]
    x, n = xs[0].detach(), mesh.axis(step.axis).size
    if step.op in ("all_gather_object", "gather_object") and got is not None:
        assert [each["from"] for each in got] == list(range(n))
        got = torch.stack([each["x"] for each in got])
    elif step.op == "exchange":
        got = got[0]
    elif step.op == "send" and got is None:
        got = x
    elif got is None:
        got = _nothing(step, x, n)
    return [after(step, got)]


def _nothing(step: Step, x: Tensor, n: int) -> Tensor:
    """In the place of what only one rank gets."""
    if step.op == "reduce":
        return torch.zeros_like(x)
    if step.op == "gather_object":
        return x.new_zeros((n, *x.shape))
    shape = list(x.shape) or [1]
    shape[step.kwargs["dim"]] *= n
    return x.new_zeros(shape)


def waited_for(works: list[Any], wait: Wait, rank: int) -> list[Any]:
    """The results, in the order of the works."""
    if wait.together:
        return list(mc.wait(works))
    results: list[Any] = [None] * len(works)
    for place in range(len(works)):
        at = (place + rank) % len(works) if wait.turned else place
        for _ in range(20 if wait.polled and isinstance(works[at], mc.Work) else 0):
            if works[at].done():
                break
            time.sleep(1e-5)
        results[at] = works[at].wait() if isinstance(works[at], mc.Work) else works[at]
    return results


class Run:
    """What this rank has of a program's values; those of inputs first."""

    def __init__(self, program: Program, xs: Sequence[Tensor], mesh: mc.Mesh) -> None:
        self.program, self.mesh = program, mesh
        self.values: list[Any] = [*xs, *[None] * (len(program.shards) - len(xs))]
        self.works: dict[int, tuple[Any, list[Tensor]]] = {}

    def do(self, place: int, own: Own | None = None) -> None:
        """The event at this place."""
        event = self.program.events[place]
        if isinstance(event, Wait):
            self.wait(event)
            return
        taken = [self.values[i] for i in event.of]
        if event.op == "join":
            self.put(place, [joined(*taken)])
        elif event.op == "weighted":
            self.put(place, [settled(weighted(taken[0], self.mesh.axis(event.axis).index))])
        elif event.later:
            self.works[place] = (invoke(event, taken, self.mesh, own), taken)
        else:
            self.put(place, result_of(event, invoke(event, taken, self.mesh, own), taken, self.mesh))

    def wait(self, event: Wait) -> None:
        here = [place for place in event.steps if place in self.works]
        got = waited_for([self.works[place][0] for place in here], event, self.mesh.rank)
        for place, each in zip(here, got, strict=True):
            step = self.program.events[place]
            assert isinstance(step, Step)
            self.put(place, result_of(step, each, self.works.pop(place)[1], self.mesh))

    def put(self, place: int, values: list[Tensor]) -> None:
        first = self.program.first_of[place]
        self.values[first : first + len(values)] = values


def run(program: Program, xs: Sequence[Tensor], mesh: mc.Mesh) -> list[Tensor]:
    """All values on this rank."""
    mine = Run(program, xs, mesh)
    for place in range(len(program.events)):
        mine.do(place)
    return mine.values


# -------------------------------------------------------------------------------------------------------- gradients


def score(y: Tensor) -> Tensor:
    """Each element counts differently, by small whole numbers."""
    if y.dtype.is_complex:
        return score(y.real) + 2 * score(y.imag)
    weights = torch.arange(y.numel(), dtype=y.dtype).remainder(3).view(y.shape) + 1
    return (y * weights).sum()


def loss_of(program: Program, values: list[Tensor], mesh: mc.Mesh) -> Tensor:
    """Of this rank: the same number everywhere."""
    total = torch.zeros((), dtype=F64)
    for i in program.scored():
        along = tuple(sorted(program.varying[i]))
        mine = score(values[i])
        total = total + (mc.all_reduce(mine, along, mesh=mesh) if along else mine).double()
    return total


def run_backward(program: Program, xs: Sequence[Tensor], values: list[Tensor], mesh: mc.Mesh) -> list[Tensor]:
    """The gradient of each input that has one, on this rank."""
    leaves = [x for x in xs if x.requires_grad]
    if not leaves or not program.scored():
        return []
    return list(torch.autograd.grad(loss_of(program, values, mesh), leaves, materialize_grads=True))


def gradients_of(program: Program) -> list[list[Tensor]]:
    """As the oracle says: for each input that has one, on every rank."""
    inputs = [i for i, given in enumerate(program.inputs) if given.grad]
    if not inputs or not program.scored():
        return []
    total = torch.zeros((), dtype=F64)
    for i in program.scored():
        total = total + torch.stack([score(x).double() for x in distinct(program.shards[i])]).sum()
    leaves = distinct([x for i in inputs for x in program.shards[i]])
    found = torch.autograd.grad(total, leaves, materialize_grads=True)
    of = {id(leaf): g for leaf, g in zip(leaves, found, strict=True)}
    return [[of[id(x)] for x in program.shards[i]] for i in inputs]
