"""Where a module begins and ends, whatever is inside of it: a gather at the entrance, a sum at the exit.

    sequence                 outside                        inside
    no                       whole, the same on all ranks   whole, and used by each rank with its part of the weights
    yes                      cut along the sequence         gathered, and used by each rank with its part of the weights

Inside, columns enter no more, and a row leaves. Which modules are inside follows from their names and not from what
runs, so that what is computed again in backward is computed in the same way.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshcomm.collectives.gather import all_gather_invariant, shard
from meshcomm.errors import fail, names
from meshcomm.parallel.tensor.plan import WHERE, Block, indivisible
from meshcomm.parallel.tensor.state import Parallel


def blocks_of(state: Parallel, found: Sequence[tuple[str, nn.Module, Block]]) -> dict[nn.Module, Boundary]:
    """Those of the plan; tells the state which modules are inside of one that enters."""
    made: dict[nn.Module, Boundary] = {}
    for path, part, how in found:
        known = made.setdefault(part, Boundary(path, part, how, state))
        if known.how != how:
            fail(WHERE, f"{known.path!r} and {path!r} are one module, and two blocks.", fix="the same Block for both")
    entered = [path for path, _, how in found if how.before == "enter"]
    outside: set[nn.Module] = set()
    for path, part in state.module.named_modules(remove_duplicate=False):
        around = [each for each in entered if each in ("", path) or path.startswith(f"{each}.")]
        if len(around) > 1:
            what = f"block {around[1]!r} is inside of block {around[0]!r}, and both enter."
            fail(WHERE, what, fix="Block(None, ...) for the inner one")
        (state.inside if around else outside).add(part)
    both = next((path for path, part in state.module.named_modules() if part in state.inside and part in outside), None)
    if both is not None:
        fail(WHERE, f"{both!r} is one module with two names, one of them inside of a block that enters.",
             fix="the same for both places")  # fmt: skip
    return made


class Boundary:
    """What is done around the forward of a module."""

    def __init__(self, path: str, module: nn.Module, how: Block, state: Parallel) -> None:
        self.path, self.how, self.state = path, how, state
        self.parts = set(module.modules())
        params = inspect.signature(module.forward).parameters
        self.names = tuple(params)
        any_name = any(each.kind is each.VAR_KEYWORD for each in params.values())
        self.inputs = how.inputs or self.names[:1]
        wrong = [
            name for name in (*how.inputs, *how.whole, *how.own, *how.divided) if name not in params and not any_name
        ]
        if wrong:
            what = f"block {path!r}: the forward of {type(module).__name__} has no argument {names(wrong)}."
            fail(WHERE, what, got=f"arguments {names(self.names)}", fix="the names of its arguments")
        for name, (_, heads) in how.divided.items():
            if heads < 1 or heads % state.axis.size:
                indivisible(f"block {path!r}: {name!r}, which has {heads} heads,", state.axis)

    def call(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """In place of forward."""
        how = self.how
        args = [self._given(self.names[at] if at < len(self.names) else "", x) for at, x in enumerate(args)]
        kwargs = {name: self._given(name, x) for name, x in kwargs.items()}
        if how.before == "join":
            self.state.streams.whole()
        elif how.before is not None and not (how.before == "split" and self.state.short):
            self.state.streams.cut()
        with self.state.shown(self.parts) if how.before == "enter" else contextlib.nullcontext():
            result = method(*args, **kwargs)
        return result if how.after is None else self._replaced(result, self._left)

    def _given(self, name: str, x: Any) -> Any:
        """What the module is given as an argument."""
        how = self.how
        if name in how.divided:
            dim, heads = how.divided[name]
            return _mapped(x, lambda each: self._of_heads(name, each, dim, heads))
        if name in how.whole and how.before == "enter":
            return _mapped(x, lambda each: self.state.enter(each, False))
        if name in self.inputs and how.before is not None:
            by = {"enter": self._entered, "split": self._split, "join": self._joined}
            return _mapped(x, by[how.before])
        if how.before == "enter" and name not in how.own and torch.is_grad_enabled():
            for each in _tensors(x):
                if each.requires_grad:
                    what = f"block {self.path!r}: its argument {name!r} needs a gradient, and is not said to enter."
                    fix = (
                        f"inputs={(*self.inputs, name)}; or whole={(name,)}, where only others are cut along the "
                        f"sequence; or own={(name,)}, if it is this rank's own part already"
                    )
                    fail(WHERE, what, fix=fix)
        return x

    def _entered(self, x: Tensor) -> Tensor:
        sequence = self.state.cuts_sequence()
        if sequence or x.is_floating_point() or x.is_complex():
            return self.state.enter(x, sequence)
        return x

    def _split(self, x: Tensor) -> Tensor:
        state = self.state
        if not state.cuts_sequence():
            return x
        if x.ndim < 2 or x.shape[-2] % state.axis.size:
            if not torch.is_grad_enabled() and state.placed is not None:
                state.short = True
                return x
            what = f"block {self.path!r}: an input of shape {list(x.shape)} has no sequence that axis {state.name!r}"
            fix = "pad the sequence to a multiple of it; where gradients are off any length will do"
            fail(WHERE, f"{what} (size {state.axis.size}) divides.", fix=fix)
        return shard(x, state.name, x.ndim - 2, mesh=state.mesh)

    def _joined(self, x: Tensor) -> Tensor:
        return all_gather_invariant(x, self.state.name, -1, mesh=self.state.mesh)

    def _of_heads(self, name: str, x: Tensor, dim: int, heads: int) -> Tensor:
        if not -x.ndim <= dim < x.ndim or x.shape[dim] % heads:
            what = f"block {self.path!r}: {name!r} of shape {list(x.shape)} has not {heads} heads along dim {dim}."
            fail(WHERE, what, fix="divided={name: (dim, heads)}, as they are on one rank")
        dim %= x.ndim
        mine: Tensor = shard(x.unflatten(dim, (-1, heads)), self.state.name, dim + 1, mesh=self.state.mesh)
        return mine.flatten(dim, dim + 1)

    def _left(self, y: Tensor) -> Tensor:
        state = self.state
        sequence = state.cuts_sequence()
        if self.how.after == "leave":
            return state.leave(y, sequence)
        if self.how.after == "part":
            state.streams.cut()
            return shard(y, state.name, -1, mesh=state.mesh)
        if not sequence:
            return y
        state.streams.whole()
        return all_gather_invariant(y, state.name, y.ndim - 2, mesh=state.mesh)

    def _replaced(self, result: Any, by: Callable[[Tensor], Tensor]) -> Any:
        """The result with its first tensor replaced; what comes with it needs no gradient, or is refused."""
        if isinstance(result, Tensor):
            return by(result)
        found: list[tuple[Any, Any]] = []
        if isinstance(result, (dict, tuple, list)):
            found = list(result.items()) if isinstance(result, dict) else list(enumerate(result))
        first = next(((key, x) for key, x in found if isinstance(x, Tensor)), None)
        if first is None:
            what = f"block {self.path!r} gives no tensor but {type(result).__name__}."
            fail(WHERE, what, fix="Block(...) around another module")
        for key, x in found:
            if self.how.after == "leave" and key != first[0] and any(each.requires_grad for each in _tensors(x)):
                what = f"block {self.path!r} gives tensors that need a gradient at {first[0]!r} and at {key!r}."
                fail(WHERE, what, fix="Block(...) around a module with one result")
        if isinstance(result, dict):
            result[first[0]] = by(first[1])
            return result
        made = [by(x) if key == first[0] else x for key, x in found]
        return type(result)(*made) if hasattr(result, "_fields") else type(result)(made)


def _mapped(x: Any, by: Callable[[Tensor], Tensor]) -> Any:
    """Each tensor in it replaced."""
    if isinstance(x, Tensor):
        return by(x)
    if isinstance(x, (tuple, list)) and not hasattr(x, "_fields"):
        return type(x)(_mapped(each, by) for each in x)
    if type(x) is dict:
        return {key: _mapped(each, by) for key, each in x.items()}
    return x


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for each in x:
            yield from _tensors(each)
    elif isinstance(x, dict):
        for each in x.values():
            yield from _tensors(each)
