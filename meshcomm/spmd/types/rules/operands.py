"""Tensors among the arguments of a function, and what there is to ask of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshcomm._torch import functorch_active, unwrapped, version_of
from meshcomm.errors import shape_text
from meshcomm.spmd.types.vma import Type

SIMPLE = frozenset([int, float, bool, complex, str, type(None), torch.dtype, torch.device, type(Ellipsis)])
"""Types of values that are nothing but themselves."""

T = TypeVar("T")


def gather(values: Iterable[Any], wanted: type[T], into: list[T]) -> None:
    """Add what is of a type among ``values`` to a list."""
    for value in values:
        kind = type(value)
        if kind in SIMPLE:  # to ask torch whether it is a tensor takes long
            continue
        if isinstance(value, wanted):
            into.append(value)
        elif isinstance(value, (tuple, list)):
            gather(value, wanted, into)
        elif kind is slice:
            gather((value.start, value.stop, value.step), wanted, into)
        elif isinstance(value, dict):
            gather(value.values(), wanted, into)


def mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    """An argument with ``fn`` of all that is in it, where :func:`gather` looks."""
    kind = type(value)  # not isinstance: what stands for a size says of its class what it likes
    if kind is Tensor or kind in SIMPLE:
        return fn(value)
    if issubclass(kind, (tuple, list)):
        parts = [mapped(fn, part) for part in value]
        return parts if issubclass(kind, list) else tuple(parts)  # a NamedTuple is a tuple for torch
    if kind is slice:
        return slice(mapped(fn, value.start), mapped(fn, value.stop), mapped(fn, value.step))
    if issubclass(kind, dict):
        return {key: mapped(fn, part) for key, part in value.items()}
    return fn(value)


def replaced(value: Any, others: dict[int, Tensor]) -> Any:
    """An argument with others, by id, in place of its tensors."""
    return mapped(lambda leaf: others.get(id(leaf), leaf), value)


def is_among(x: Tensor, target: Any) -> bool:
    """Whether ``x`` is the target, or one of them."""
    return x is target or (isinstance(target, (tuple, list)) and any(x is y for y in target))


def several(value: Any) -> Sequence[Any]:
    """The value, or its parts."""
    return value if isinstance(value, (tuple, list)) else (value,)


def tracked(x: Tensor) -> bool:
    """Whether ``x`` is a result in a graph."""
    if functorch_active():
        inner: Tensor | None = x
        while inner is not None:
            if inner.requires_grad:
                return True
            inner = unwrapped(inner)
        return False
    return x.requires_grad and not x.is_leaf


def of_tracked(x: Tensor) -> bool:
    """Whether ``x`` came to require grad with what it is a view of."""
    return x._base is not None and x._base.requires_grad


def is_array(data: Any) -> bool:
    """Whether ``data`` is somebody's memory, and no numbers of Python."""
    return hasattr(data, "__array_interface__") and getattr(data, "ndim", 0) > 0


def differentiated(x: Tensor) -> bool:
    """Whether ``x`` may have a gradient."""
    return x.requires_grad or (functorch_active() and (x.is_floating_point() or x.is_complex()))


def same_place(x: Tensor, y: Tensor) -> bool:
    """Whether both have the same numbers, because these lie in the same memory in the same way."""
    if functorch_active():
        x, y = _innermost(x), _innermost(y)
    if x.dtype is not y.dtype:
        return False
    try:
        return x.is_set_to(y)
    except (NotImplementedError, RuntimeError):  # sparse and the like have no memory to compare
        return x.shape == y.shape


def _innermost(x: Tensor) -> Tensor:
    while (inner := unwrapped(x)) is not None:
        x = inner
    return x


def version(x: Tensor) -> int:
    """How often ``x`` was changed in place; -1 where nobody counts."""
    try:
        return version_of(x)
    except RuntimeError:
        return -1


def versions_of(operands: Sequence[Tensor]) -> list[int]:
    """How often each was changed in place."""
    try:
        return list(map(version_of, operands))
    except RuntimeError:  # inference tensors do not count
        return [version(x) for x in operands]


def text_of(x: Tensor) -> str:
    """The dtype and shape of ``x``."""
    return shape_text(x.dtype, x.shape)


def along_of(kind: Type) -> str:
    """Along which axes a type varies, and since when."""
    if not kind.axes:
        return "invariant"
    return "varies " + ", ".join(f"along {axis!r} since {kind.since[axis]}" for axis in sorted(kind.axes))
