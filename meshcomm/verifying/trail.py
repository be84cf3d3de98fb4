"""What happened on a rank, step by step: each operation of torch and each collective, with its line, its results and,
after a backward pass, their gradients.

A step of a rank and the same step of the twin belong together if line and name are the same, and both come there
equally often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshcomm._torch import tree_flatten, tree_unflatten
from meshcomm.collectives.check import differentiable
from meshcomm.runtime.callsite import call_site
from meshcomm.runtime.ops import ops
from meshcomm.verifying.program import OnRank
from meshcomm.watch import watched_by
from meshcomm.work import Work

_MOST = 4000
_MOST_BYTES = 2**28


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

    def __init__(self, nudge: tuple[int, Tensor] | None = None) -> None:
        """``nudge``: what is added to the result of a step."""
        super().__init__()
        self._nudge = nudge
        self.steps: list[Step] = []
        self.gradients: dict[int, Tensor] = {}
        self._made: dict[int, tuple[int, Tensor]] = {}
        self._nodes: dict[Any, int] = {}
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

    def given(self, label: str, x: Tensor) -> None:
        """An input, which comes from nowhere."""
        self._quiet = True
        self._note(x, "", label, "", ())
        self._quiet = False

    def _note(self, y: Tensor, line: str, name: str, axis: str, of: tuple[int, ...], how: str = "") -> None:
        if len(self.steps) >= _MOST or self._bytes > _MOST_BYTES:
            return
        number = len(self.steps)
        self._counts[line, name] += 1
        value = y.detach().clone()
        self._bytes += value.numel() * value.element_size()
        key, off = (line, name, self._counts[line, name]), not torch.is_grad_enabled()
        self.steps.append(Step(key, axis, how, of, value, y.requires_grad, off=off))
        self._made[id(y)] = number, y  # kept, so that the id stays its own
        if y.grad_fn is not None:
            self._nodes[y.grad_fn] = number
        if y.requires_grad and differentiable(y):
            y.register_hook(lambda g: self._add(number, g))

    def _add(self, number: int, g: Tensor) -> None:
        self.gradients[number] = g.detach().clone()

    def _takes(self, tree: Any) -> tuple[int, ...]:
        found = dict.fromkeys(self._maker(x) for x in tree_flatten(tree)[0] if isinstance(x, Tensor))
        return tuple(number for number in found if number is not None)

    def _maker(self, x: Tensor) -> int | None:
        entry = self._made.get(id(x))
        if entry is None and x.grad_fn is not None:  # of a function that nobody has seen, such as a custom one
            name = x.grad_fn.name().removesuffix("Backward")
            before = {self._nodes.get(node, self._leaf(node)) for node, _ in x.grad_fn.next_functions}
            self._note(x, str(call_site()), name, "", tuple(sorted(number for number in before if number is not None)))
            entry = self._made.get(id(x))
        return None if entry is None else entry[0]

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
            if name.startswith("_") and name not in _OPERATORS:
                return func(*args, **kwargs)
            of = self._takes((args, kwargs))
            line = str(call_site())
            result = func(*args, **kwargs)
            if self._nudge is not None and isinstance(result, Tensor) and len(self.steps) == self._nudge[0]:
                result = result + self._nudge[1]
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

    def collective(self, fn: Any, x: Any, axis: Any, /, *args: Any, mesh: Any, **kwargs: Any) -> Any:
        """Call it, and note what it gives."""
        how = str(kwargs.get("op", args[0] if args else ""))
        return self._called(fn.__name__, axis, x, lambda x: fn(x, axis, *args, mesh=mesh, **kwargs), how)

    def _called(self, name: str, axis: Any, x: Any, call: Any, how: str = "") -> Any:
        if self._quiet:
            with watched_by(None):
                return call(x)
        line, along = str(call_site()), axis if isinstance(axis, str) else ",".join(axis or ())
        self._quiet = True
        try:
            leaves, form = tree_flatten(x)
            of = [self._takes(leaf) for leaf in leaves]
            everything = tuple(dict.fromkeys(each for some in of for each in some))
            with watched_by(None):
                given = [leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                result = call(tree_unflatten(given, form))
            if self._nudge is not None and isinstance(result, Tensor) and len(self.steps) == self._nudge[0]:
                result = result + self._nudge[1]

            def noted(result: Any) -> Any:
                made = [y for y in tree_flatten(result)[0] if isinstance(y, Tensor)]
                for i, y in enumerate(made):
                    self._note(y, line, name, along, of[i] if len(made) == len(of) else everything, how)
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
            if fn.__name__ != "reshard" else fn(*given, layouts, mesh=mesh, **kwargs)
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
        """All steps, with the gradients that have come."""
        return [step._replace(gradient=self.gradients.get(i)) for i, step in enumerate(self.steps)]


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


def follow(rank: OnRank, cotangents: Sequence[Any], *, to_error: bool = False) -> Followed:
    """Run the program and its backward on a rank, step by step. ``to_error``: forward only, as far as it comes."""
    trail = Trail()
    with torch.enable_grad():
        xs = [x.detach().clone().requires_grad_() for x in rank.targets]
        try:
            result = rank(xs, within=trail)
        except Exception:
            if not to_error:
                raise
            return Followed(trail.finished(), [], [])
        outputs = [trail.maker_of(y) for y in result.tensors]
        ends = [y for y in result.tensors if differentiable(y)]
        gs = rank.program.parts(rank.mesh, list(cotangents), rank.place)
        pairs = [(y, g) for y, g in zip(ends, gs, strict=True) if y.requires_grad]
        if pairs and not to_error:
            heads, given = zip(*pairs, strict=True)
            torch.autograd.grad(heads, xs, given, allow_unused=True)
    return Followed(trail.finished(), outputs, [y.detach() for y in result.tensors])


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
