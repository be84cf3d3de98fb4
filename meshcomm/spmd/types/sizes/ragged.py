"""Tensors whose sizes depend on data: what shape each would have on ranks that have selected other rows.

The shapes elsewhere are found by computing there as well: on the meta device, which has shapes and no values, and once
for all calls alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from meshcomm._torch import functorch_active, unwrapped
from meshcomm.runtime.ops import Op
from meshcomm.spmd.types.notes import Note
from meshcomm.spmd.types.rules.operands import SIMPLE, gather, mapped
from meshcomm.spmd.types.sizes.varying_numbers import COUNTS, Varying, made, plain, varying
from meshcomm.spmd.types.vma import Origin, Type, join, note

_NAME = "_meshcomm_ragged"
_HERE = range(len(COUNTS))
Shape = tuple[int, ...]


class Ragged(Note):
    """The shapes that a tensor has elsewhere, None where that is not known, and along which axes they differ."""

    __slots__ = ("kind", "shapes")

    def __init__(self, shapes: Sequence[Shape | None], kind: Type) -> None:
        self.shapes, self.kind = tuple(shapes), kind

    def dims(self, shape: Shape) -> list[int]:
        """The dims whose size differs."""
        known = [other for other in self.shapes if other is not None]
        return [i for i, size in enumerate(shape) if any(other[i] != size for other in known) or _differ(known, i)]


def _differ(shapes: Sequence[Shape], i: int) -> bool:
    return any(shape[i] != shapes[0][i] for shape in shapes)


class Rows:
    """Stands for an index along one dim that selects as many as a number says."""

    def __init__(self, number: Varying) -> None:
        self.number = number


def ragged_of(x: Tensor) -> Ragged | None:
    """The shapes of ``x`` elsewhere; None: its sizes are the same everywhere."""
    found = getattr(x, _NAME, None)
    return found if type(found) is Ragged else None


_NESTED = frozenset([tuple, list, torch.Size])


def untouched(values: Iterable[Any]) -> bool:
    """Whether there is for certain nothing among arguments whose size depends on data."""
    for value in values:
        kind = type(value)
        if kind in SIMPLE:
            continue
        if kind is Tensor or kind is Parameter:
            if getattr(value, _NAME, None) is not None:
                return False
        elif kind in _NESTED:
            if not untouched(value):
                return False
        elif kind is not slice or not untouched((value.start, value.stop, value.step)):
            return False
    return True


def note_ragged(x: Tensor, ragged: Ragged | None) -> None:
    """Note the shapes of ``x`` elsewhere."""
    if ragged is not None:
        made.any = True
        setattr(x, _NAME, ragged)
    elif ragged_of(x) is not None:
        setattr(x, _NAME, None)


def within(x: Tensor) -> Tensor | None:
    """The innermost tensor that transforms of torch.func have wrapped in ``x``."""
    found, inner = None, unwrapped(x)
    while inner is not None:
        found, inner = inner, unwrapped(inner)
    return found


def carried_within(results: Any, operands: Sequence[Tensor], name: str) -> None:
    """What is a batch to ``vmap`` may be one of rows."""
    inputs = [inner for x in operands if (inner := within(x)) is not None and ragged_of(inner) is not None]
    if inputs:
        guessed([inner for y in tensors_of(results) if (inner := within(y)) is not None], inputs, name)


def carried(x: Tensor, y: Any) -> None:
    """``y`` has the shape of ``x``, wherever it is."""
    if made.any and isinstance(y, Tensor) and (ragged := ragged_of(x)) is not None:
        note_ragged(y, ragged)


def differing(y: Tensor, inputs: Sequence[Tensor], others: Sequence[Tensor] = ()) -> set[int]:
    """By place: the dims of an input of as many dims that differ, unless what it meets there says that they do not; all
    dims if there is none.
    """
    for x in inputs:
        ragged = ragged_of(x)
        if ragged is not None and x.dim() == y.dim():
            same = [z for z in others if z.dim() == y.dim() and ragged_of(z) is None]
            return {
                i for i in ragged.dims(x.shape) if y.shape[i] == 1 or not any(z.shape[i] == y.shape[i] for z in same)
            }
    return set(range(y.dim()))


def collected(
    op: Op, x: Tensor | None, y: Tensor, along: Origin, axes: frozenset[str], named: Mapping[str, Any]
) -> None:
    """Note the sizes of what a collective over these axes has made of ``x``: they are equal along them, unless it was
    told sizes. ``named``: its arguments behind the axis.
    """
    ragged = None if x is None else ragged_of(x)
    told = [sizes for sizes in op.cuts if named.get(sizes) is not None]
    if ragged is None and not told:
        note_ragged(y, None)
        return
    rest = None if ragged is None else ragged.kind.ends(axes, along)
    dims = set() if ragged is None or x is None else differing(y, [x])
    if told:
        own = Type(dict.fromkeys(axes, along))
        rest = own if rest is None else join([rest, own], op.name)
        dims = dims | {int(named.get(dim, 0)) % y.dim() for dim in op.dims}
    note_ragged(y, None if rest is None or not rest.axes else fresh(y.shape, dims, rest))


def without_numbers(args: Any, kwargs: Any) -> tuple[Any, Any, list[Tensor]]:
    """The arguments with this rank's sizes, and what stands for those that differ."""
    if not made.any:
        return args, kwargs, []
    numbers: list[Varying] = []
    gather((args, kwargs), Varying, numbers)
    return (
        (plain(args), plain(kwargs), [standing_for(each.kind) for each in numbers]) if numbers else (args, kwargs, [])
    )


def standing_for(kind: Type) -> Tensor:
    """A tensor of this type, to be an operand beside others."""
    x = torch.zeros((), device="cpu")
    note(x, kind)
    return x


def guessed(result: Any, operands: Sequence[Tensor], name: str) -> None:
    """Note the sizes of what somebody's own function gives."""
    inputs = [x for x in operands if ragged_of(x) is not None] if made.any else []
    if inputs:
        kind = join([ragged.kind for x in inputs if (ragged := ragged_of(x)) is not None], name)
        for y in tensors_of(result):
            if not any(y is x for x in operands):
                note_ragged(y, fresh(y.shape, differing(y, inputs, operands), kind))


def fresh(shape: Iterable[int], dims: Iterable[int], kind: Type) -> Ragged | None:
    """These dims could have any size."""
    own = tuple(shape)
    found = {dim % len(own) for dim in dims} if own else set()
    if not found:
        return None
    return Ragged([tuple(count if i in found else size for i, size in enumerate(own)) for count in COUNTS], kind)


def number_of(kind: Type, times: int = 1) -> Varying:
    """A number of which nothing is known."""
    found: Varying = varying(0, [count * times for count in COUNTS], kind)
    return found


class _UnknownError(Exception):
    """A shape elsewhere cannot be told."""


@dataclass(frozen=True, slots=True)
class _Twin:
    """A tensor elsewhere, which has a shape and no values."""

    shape: Shape
    stride: Shape | None
    dtype: torch.dtype

    def made(self) -> Tensor:
        """It on the meta device."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


def _twin(value: Any, world: int) -> Any:
    """What an argument, or a part of one, is elsewhere."""
    if isinstance(value, Tensor):
        ragged = ragged_of(value)
        if ragged is not None:
            return _Twin(_known(ragged.shapes[world]), None, value.dtype)
        if value.layout is not torch.strided:
            raise _UnknownError
        return _Twin(tuple(value.shape), None if functorch_active() else value.stride(), value.dtype)
    if isinstance(value, Varying):
        return _known(value.others[world])
    if isinstance(value, Rows):
        return _Twin((_known(value.number.others[world]),), None, torch.int64)
    return "meta" if isinstance(value, torch.device) or (type(value) is str and _names_a_device(value)) else value


@functools.cache
def _names_a_device(text: str) -> bool:
    try:
        return bool(torch.device(text))
    except RuntimeError:
        return False


def _known(value: Any) -> Any:
    if value is None:
        raise _UnknownError
    return value


def shapes_elsewhere(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], results: int
) -> list[list[Shape] | None]:
    """The shapes of so many results in each of the other places; None where it cannot be computed there."""
    given = list(args), {name: value for name, value in kwargs.items() if name != "out"}
    found: list[list[Shape] | None] = []
    for world in _HERE:
        try:
            shapes = _shapes(func, *mapped(functools.partial(_twin, world=world), given))
        except _UnknownError:
            shapes = None
        found.append(shapes if shapes is not None and len(shapes) == results else None)
    return found


def _shapes(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    try:
        key = func, _frozen(args), _frozen(kwargs)
        return _seen[key]
    except TypeError:  # an argument that is no key
        return _on_meta(func, args, kwargs)
    except KeyError:
        if len(_seen) >= _MANY:
            _seen.clear()
        return _seen.setdefault(key, _on_meta(func, args, kwargs))


_MANY, _LONG = 5_000, 100
_seen: dict[Any, list[Shape] | None] = {}
"""What was computed before: it takes some hundred times as long as to look it up."""


def _frozen(value: Any) -> Any:
    """A key for an argument; 1, 1.0 and True are three. What is long is data, and no key."""
    kind = type(value)
    if kind is slice:
        value = value.start, value.stop, value.step
    elif kind is dict:
        value = *value, *value.values()
    if isinstance(value, (tuple, list)):
        if len(value) > _LONG:
            raise TypeError(f"a {kind.__name__} of {len(value)}")
        return kind, *map(_frozen, value)
    return kind, value


def _on_meta(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    def made(value: Any) -> Any:
        return value.made() if isinstance(value, _Twin) else value

    try:
        with torch.no_grad(), torch.device("meta"):
            return [tuple(y.shape) for y in tensors_of(func(*mapped(made, args), **mapped(made, kwargs)))]
    except Exception:  # whatever it does not like about tensors without values
        return None


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors in a result."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [y for part in result for y in tensors_of(part)]
    return []
