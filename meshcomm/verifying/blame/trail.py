"""What happened on a rank, step by step: each operation of torch and each collective, with its line, its results and,
after a backward pass, their gradients.

A step of a rank and the same step of the twin belong together if line and name are the same, and both come there
equally often.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from meshcomm._torch import alive, tree_flatten, tree_unflatten
from meshcomm.collectives.check import differentiable
from meshcomm.runtime.callsite import call_site, is_ours
from meshcomm.runtime.ops import ops
from meshcomm.verifying.blame.partings import Issued
from meshcomm.verifying.meshes import axes_of
from meshcomm.watch import told_of_call, watched_by
from meshcomm.work import Work

_MOST = 4000
_MOST_BYTES = 2**28
_MOST_NODES = 64
"""Of autograd, of one step."""


class Step(NamedTuple):
    """One result of an operation."""

    key: tuple[str, str, int]
    """Line, name, and the how manieth time."""
    axis: str
    """Of a collective: over which; empty else."""
    reduction: str
    """Of one that reduces: how."""
    of: tuple[int, ...]
    """The steps that made what it took."""
    value: Tensor
    live: bool
    """Whether it has a gradient."""
    gradient: Tensor | None = None
    off: bool = False
    """Whether it was made under torch.no_grad."""
    along: frozenset[str] | None = None
    """The axes along which it varies, as its operands and the collectives have it; None: not known."""
    back: Mapping[int, Tensor] = MappingProxyType({})
    """What it adds to the gradients of the steps that made what it took."""

    @property
    def line(self) -> str:
        """Where."""
        return self.key[0]

    @property
    def name(self) -> str:
        """``all_reduce at train.py:33``."""
        return f"{self.key[1]} at {self.key[0]}" if self.key[0] else self.key[1]


class Trail(TorchFunctionMode):
    """Notes every step of this thread while it is entered; it stands for the checker, which knows all calls."""

    def __init__(self, nudges: Mapping[int, Tensor] | None = None, *, tangents: bool = False) -> None:
        """``nudges``: what is added to the results of steps. ``tangents``: of each result that is noted."""
        super().__init__()
        self._nudges, self._tangents = nudges or {}, tangents
        self.steps: list[Step] = []
        self.calls: list[Issued] = []
        self.gradients: dict[int, Tensor] = {}
        self.again: dict[int, Tensor] = {}
        """In a second backward pass: the gradients of results."""
        self.of_gradients: dict[int, Tensor] = {}
        """And those of the gradients of the first one."""
        self.second = False
        self._primals: list[Tensor] = []
        self._made: dict[int, tuple[int, Tensor]] = {}
        self._nodes: dict[Any, int] = {}
        self._back: dict[int, dict[int, Tensor]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._quiet = False
        self._bytes = 0
        self._stack = ExitStack()

    def __enter__(self) -> Trail:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._stack.enter_context(watched_by(self))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def given(self, label: str, x: Tensor, along: frozenset[str]) -> None:
        """An input, which comes from nowhere, and is cut along these axes."""
        self._quiet = True
        self._note(x, "", label, "", (), along=along)
        self._quiet = False

    def _note(
        self, y: Tensor, line: str, name: str, axis: str, of: tuple[int, ...], how: str = "",
        along: frozenset[str] | None = None,
    ) -> None:  # fmt: skip
        if len(self.steps) >= _MOST or self._bytes > _MOST_BYTES:
            return
        number = len(self.steps)
        self._counts[line, name] += 1
        value = _tangent_of(y) if self._tangents else y.detach().clone()
        self._bytes += value.numel() * value.element_size()
        key, off = (line, name, self._counts[line, name]), not torch.is_grad_enabled()
        along = self._along(name, axis, of) if along is None else along
        self.steps.append(Step(key, axis, how, of, value, y.requires_grad, off=off, along=along))
        self._made[id(y)] = number, y  # kept, so that the id stays its own
        if y.grad_fn is not None:
            self._nodes[y.grad_fn] = number
        if self._tangents:
            self._primals.append(alive(y.detach()))
        self._hear(number, y)

    def _hear(self, number: int, y: Tensor) -> None:
        if y.requires_grad and differentiable(y):
            y.register_hook(lambda g: self._add(number, g))
        if y.grad_fn is not None and not self._tangents:
            self._hear_back(number, y.grad_fn)

    def _hear_back(self, number: int, root: Any) -> None:
        """From the nodes that a step has made: what they hand on to those of other steps."""
        todo, seen = [root], {root}
        while todo and len(seen) < _MOST_NODES:
            node = todo.pop()
            to: dict[int, int] = {}
            for at, (after, _) in enumerate(node.next_functions):
                made = None if after is None else self._nodes.get(after, self._leaf(after))
                if made is not None and made != number:
                    to[at] = made
                elif after is not None and after not in seen:
                    seen.add(after)
                    todo.append(after)
            if to:
                node.register_hook(lambda given, _, to=to: self._add_back(number, to, given))

    def _add_back(self, number: int, to: Mapping[int, int], given: Sequence[Tensor | None]) -> None:
        """What one node hands on, by the number of its operand."""
        mine = self._back.setdefault(number, {})
        for at, made in () if self.second else to.items():
            g = given[at]
            if g is not None:
                mine[made] = mine[made] + g.detach() if made in mine else g.detach().clone()

    def _along(self, name: str, axis: str, of: tuple[int, ...]) -> frozenset[str] | None:
        """The axes along which the result of a step varies, of these."""
        every = [self.steps[i].along for i in of]
        if any(each is None for each in every):
            return None
        before = frozenset[str]().union(*(each for each in every if each is not None))
        over, op = frozenset(axis.split(",")) - {""}, ops.get(name)
        return before - over if over and op is not None and op.gives == "I" else before | over

    def _add(self, number: int, g: Tensor) -> None:
        if self.second:
            self.again[number] = g.detach().clone()
            return
        self.gradients[number] = g.detach().clone()
        if g.requires_grad:
            g.register_hook(lambda d: self.of_gradients.__setitem__(number, d.detach().clone()))

    def _nudged(self, result: Any) -> Any:
        """The result of a step with what is added to it."""
        if not self._nudges:
            return result
        leaves, form = tree_flatten(result)
        at, found = len(self.steps), []
        for leaf in leaves:
            nudge = self._nudges.get(at) if isinstance(leaf, Tensor) else None
            found.append(leaf if nudge is None else leaf + nudge)
            at += isinstance(leaf, Tensor)
        return tree_unflatten(found, form)

    def _takes(self, tree: Any) -> tuple[int, ...]:
        found = dict.fromkeys(self._maker(x) for x in tree_flatten(tree)[0] if isinstance(x, Tensor))
        return tuple(number for number in found if number is not None)

    def _maker(self, x: Tensor) -> int | None:
        entry = self._made.get(id(x))
        if entry is None and self._tangents:
            return self._like(x)
        if entry is not None and x.requires_grad and not self.steps[entry[0]].live:  # made within a custom function
            self.steps[entry[0]] = self.steps[entry[0]]._replace(live=True)
            self._hear(entry[0], x)
        if entry is None and x.grad_fn is not None:  # of a function that nobody has seen, such as a custom one
            name = x.grad_fn.name().removesuffix("Backward")
            before = {self._nodes.get(node, self._leaf(node)) for node, _ in x.grad_fn.next_functions}
            self._note(x, str(call_site()), name, "", tuple(sorted(number for number in before if number is not None)))
            entry = self._made.get(id(x))
        return None if entry is None else entry[0]

    def _like(self, x: Tensor) -> int | None:
        """The last step of these numbers: what a custom function is given under forward mode, and gives, is another
        tensor; its tangent shows outside of it.
        """
        here = alive(x.detach())
        for number in reversed(range(len(self._primals))):
            if self._primals[number].shape == here.shape and torch.equal(self._primals[number], here):
                tangent = _tangent_of(x)
                if differentiable(x) and tangent.any():
                    self.steps[number] = self.steps[number]._replace(value=tangent)
                return number
        return None

    def _leaf(self, node: Any) -> int | None:
        entry = self._made.get(id(getattr(node, "variable", None)))
        return None if entry is None else entry[0]

    def maker_of(self, x: Tensor) -> int | None:
        """The number of the step that made this."""
        return self._maker(x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        self._quiet = True
        try:
            name = getattr(func, "__name__", "")
            if (name.startswith("_") and name not in _OPERATORS) or _in_a_transport():
                return func(*args, **kwargs)
            of = self._takes((args, kwargs))
            line = str(call_site())
            result = self._nudged(func(*args, **kwargs))
            name = _OPERATORS.get(name, name)
            for y in tree_flatten(result)[0]:
                if isinstance(y, Tensor):
                    self._note(y, line, name, "", of)
            if name == "setitem" and args and isinstance(args[0], Tensor):
                self._note(args[0], line, name, "", of)
            return result
        finally:
            self._quiet = False

    # ---------------------------------------------------------------------------------- what a watcher is told

    def called(self, fn: Any, args: tuple[Any, ...], /) -> Any:
        """Call it."""
        return told_of_call(self, fn, args)

    def collective(self, fn: Any, x: Any, axis: Any, /, *args: Any, mesh: Any, **kwargs: Any) -> Any:
        """Call it, and note what it gives."""
        how = str(kwargs.get("op", args[0] if args else ""))
        return self._called(fn.__name__, axis, x, lambda x: fn(x, axis, *args, mesh=mesh, **kwargs), how)

    def _called(
        self, name: str, axis: Any, x: Any, call: Any, how: str = "", along: frozenset[str] | None = None
    ) -> Any:
        if self._quiet:
            with watched_by(None):
                return call(x)
        line, over = str(call_site()), axis if isinstance(axis, str) else ",".join(axis or ())
        self._quiet = True
        try:
            leaves, form = tree_flatten(x)
            live = torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
            self.calls.append(Issued(line, name, over, live))
            of = [self._takes(leaf) for leaf in leaves]
            everything = tuple(dict.fromkeys(each for some in of for each in some))
            with watched_by(None):
                given = [leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                result = call(tree_unflatten(given, form))

            def noted(result: Any) -> Any:
                result = self._nudged(result)
                made = [y for y in tree_flatten(result)[0] if isinstance(y, Tensor)]
                for i, y in enumerate(made):
                    self._note(y, line, name, over, of[i] if len(made) == len(of) else everything, how, along)
                return result

            return result.then(noted) if isinstance(result, Work) else noted(result)
        finally:
            self._quiet = False

    def made(self, fn: Any, axis: Any, mesh: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what takes no tensor."""
        return self._called(fn.__name__, axis, (), lambda _: fn(*args, **kwargs))

    def tied(self, fn: Any, x: Any, others: Any, /) -> Any:
        """Call what gives the values of ``x``."""
        return self._called(fn.__name__, "", x, lambda x: fn(x, *others))

    def joined(self, name: str, fn: Any, operands: Any, axis: Any, mesh: Any, /) -> Any:
        """Call it."""
        return self._called(name, axis, list(operands), lambda given: fn(*given))

    def laid_out(self, fn: Any, layouts: str, /, *operands: Tensor, mesh: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._called(
            fn.__name__, "", list(operands), lambda given: fn(layouts, *given, mesh=mesh, **kwargs)
            if fn.__name__ != "reshard" else fn(*given, layouts, mesh=mesh, **kwargs),
            along=frozenset(axes_of((layouts.rpartition("->")[2],), fn.__name__)),
        )  # fmt: skip

    def host_value(self, what: str) -> None:
        """Nothing is refused."""

    def numbers(self, x: Tensor, values: list[int], where: str) -> list[Any]:
        """As they are."""
        return values

    def drawn(self, x: Tensor) -> None:
        """Not of interest."""

    def whole(self, where: str, x: Any, label: str, mesh: Any) -> None:
        """Nothing is refused."""

    def made_whole(self, x: Tensor, what: str, mesh: Any) -> None:
        """Not of interest."""

    def gathered(self, name: str, whole: Sequence[Tensor], of: Sequence[Tensor], axes: Any, mesh: Any) -> None:
        """Not of interest."""

    def finished(self) -> list[Step]:
        """All steps, with the gradients that have come; after a second backward pass with those of it."""
        if not self.second:
            return [
                step._replace(gradient=self.gradients.get(i), back=self._back.get(i, {}))
                for i, step in enumerate(self.steps)
            ]
        return [
            step._replace(value=self.of_gradients.get(i, torch.zeros_like(step.value)), gradient=self.again.get(i))
            for i, step in enumerate(self.steps)
        ]


def _in_a_transport() -> bool:
    """Whether it is what moves bytes that calls torch: one rank of a meeting puts together what all have given."""
    frame = sys._getframe(2)
    while is_ours(file := frame.f_code.co_filename) and frame.f_back is not None:
        if file.startswith(_MOVES):
            return True
        frame = frame.f_back
    return False


_HERE = Path(__file__).parents[2]
_MOVES = (str(_HERE / "runtime"), str(_HERE / "collectives"))


def _tangent_of(y: Tensor) -> Tensor:
    """As forward mode has it; of what has none zeros, of what can have none its values."""
    if not differentiable(y):
        return alive(y.detach()).clone()
    tangent = forward_ad.unpack_dual(y).tangent
    return torch.zeros_like(y).detach() if tangent is None else tangent.detach().clone()


_OPERATORS = {
    f"__{'r' * right}{name}__": name
    for name in ("add", "sub", "mul", "truediv", "matmul", "pow", "floordiv", "mod", "and", "or", "xor")
    for right in (False, True)
} | {
    "__getitem__": "getitem",
    "__setitem__": "setitem",
    "__neg__": "neg",
    "__get__": "attribute",
    "__iadd__": "add_",
    "__imul__": "mul_",
}


class Followed(NamedTuple):
    """One rank's steps, and the ones that its outputs are."""

    steps: list[Step]
    outputs: list[int | None]
    tensors: list[Tensor]
    calls: Sequence[Issued] = ()
    """The collectives that it has called, in order."""


def paired(mine: Sequence[Sequence[Step]], other: Sequence[Step]) -> Mapping[int, int]:
    """The steps of the ranks, which have done the same ones, and of the twin that belong together."""
    least = min(len(steps) for steps in mine)  # after an error some have come further
    keys = [[step.key for step in steps[:least]] for steps in mine]
    if any(each != keys[0] for each in keys):
        return {}
    if any(len(steps) != least for steps in mine):
        mine = [steps[:least] for steps in mine]
        places = {step.key: i for i, step in enumerate(other)}
        return {i: places[key] for i, key in enumerate(keys[0]) if key in places}
    counts = Counter(step.key[:2] for step in mine[0])
    theirs = Counter(step.key[:2] for step in other)
    places = {step.key: i for i, step in enumerate(other)}
    return {i: places[step.key] for i, step in enumerate(mine[0]) if counts[step.key[:2]] == theirs[step.key[:2]]}


def stop_of(steps: Sequence[Step], of: Mapping[int, Step] | None = None) -> Step | None:
    """The first step at which a gradient stops; with ``of``, the steps of the twin beside these: and does not there."""
    for i, step in enumerate(steps):
        if not step.live and differentiable(step.value) and any(steps[j].live for j in step.of):
            twin = None if of is None else of.get(i)
            if twin is None or twin.live:
                return step
    return None


def is_reduction(step: Step) -> bool:
    """Whether it is a collective that reduces."""
    op = ops.get(step.key[1])
    return bool(step.axis and op is not None and op.reduces)
