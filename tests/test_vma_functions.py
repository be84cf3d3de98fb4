"""Custom functions of autograd whose varying tensors are no arguments, and what the checker of varying types makes of
them.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from vma_twins import F64, check, refused

import meshcomm as mc


class Box:
    def __init__(self, x: Any) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


@dataclass
class Record:
    x: Any


@dataclass(frozen=True)
class Frozen:
    x: Any


class Named(NamedTuple):
    x: Any


def found_in(thing: Any) -> Tensor:
    """The tensor somewhere in it."""
    if isinstance(thing, Tensor):
        return thing
    if isinstance(thing, Named):
        return found_in(thing.x)
    if isinstance(thing, functools.partial):
        return found_in(thing.args)
    if isinstance(thing, dict):
        return found_in(next(iter(thing.values())))
    if isinstance(thing, (tuple, list, set, frozenset, deque)):
        return found_in(next(iter(thing)))
    return found_in(thing() if isinstance(thing, types.FunctionType) else thing.x)


class Mul(Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor, where: Any) -> Tensor:
        ctx.where = where
        return s * found_in(where)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * found_in(ctx.where), None


class OnlyBackward(Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor, where: Any) -> Tensor:
        ctx.where = where
        return s.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * found_in(ctx.where), None


class SetUp(Function):
    @staticmethod
    def forward(s: Tensor, where: Any) -> Tensor:
        return s * found_in(where)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.where = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * found_in(ctx.where), None


PLACES: dict[str, Callable[[Tensor], Any]] = {
    "object": Box,
    "slots": Slotted,
    "dataclass": Record,
    "frozen": Frozen,
    "named tuple": Named,
    "dict": lambda x: {"mask": x},
    "dict of an object": lambda x: {"mask": Box(x)},
    "nested": lambda x: [[({"a": [Box(Record(x))]},)]],
    "ordered": lambda x: OrderedDict(a=x),
    "deque": lambda x: deque([x]),
    "set": lambda x: {Box(x)},
    "partial": lambda x: functools.partial(abs, x),
    "function": lambda x: {"fn": lambda: x},
    "slots of an object": lambda x: Box(Slotted(x)),
    "module": lambda x: [Held(x)],
}


class Held(nn.Module):
    """A buffer that is found as ``x``."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.register_buffer("x", x)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cls", [Mul, OnlyBackward, SetUp])
def test_inside_of_an_argument(cls: Any, place: str) -> None:
    check(lambda s, x: (cls.apply(s, PLACES[place](x)) * (x if cls is OnlyBackward else 1)).sum())


STATE: dict[str, Any] = {}
HOLDER = Box(None)


def helper() -> Tensor:
    found: Tensor = STATE["x"]
    return found


class OfState(Function):
    """Its state is another rank's by the time of the backward, so that is kept."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.slope


class Globals(OfState):
    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Any:
        ctx.slope = STATE["x"]
        return s * ctx.slope


class Helper(OfState):
    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Any:
        ctx.slope = helper()
        return s * ctx.slope


class Object(OfState):
    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Any:
        ctx.slope = HOLDER.x
        return s * ctx.slope


class Attribute(OfState):
    x: Any = None

    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Any:
        ctx.slope = Attribute.x
        return s * ctx.slope


class Inherited(Attribute):
    """What it takes stands in the class that it is made of."""


@pytest.mark.parametrize("cls", [Globals, Helper, Object, Attribute, Inherited])
def test_of_the_program(cls: Any) -> None:
    """One rank runs at a time, up to its next collective, and there is none between these lines."""

    def program(s: Tensor, x: Tensor) -> Tensor:
        STATE["x"] = HOLDER.x = Attribute.x = x
        return (cls.apply(s) * 1).sum()

    check(program)


def test_closures_of_forward_and_backward() -> None:
    def program(s: Tensor, x: Tensor) -> Tensor:
        class Both(Function):
            @staticmethod
            def forward(ctx: Any, s: Tensor) -> Tensor:
                return s * x

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Any:
                return g * x

        class Backward(Function):
            @staticmethod
            def forward(ctx: Any, s: Tensor) -> Tensor:
                return s * 1

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx: Any, g: Tensor) -> Any:
                return g * x

        return Both.apply(s).sum() + (Backward.apply(s) * x).sum()

    check(program)


def test_what_is_invariant_stays_so() -> None:
    def body(x: Tensor, w: Tensor) -> Any:
        return Mul.apply(w, {"scale": Box(torch.full((2,), 3.0, dtype=F64))})

    w = torch.ones(2, dtype=F64, requires_grad=True)
    fn = mc.shard_map(body, mesh=mc.make_mesh({"dp": 2}), in_specs=("(dp n)", "n"), out_specs="n")
    assert torch.autograd.grad(fn(torch.ones(4, dtype=F64), w).sum(), w)[0].tolist() == [3.0, 3.0]


def test_of_unknown_type() -> None:
    refused(
        lambda s, x: Mul.apply(s, Box(torch.from_numpy(x.new_ones(2).numpy()))).sum() + x.sum(), "made out of sight"
    )
