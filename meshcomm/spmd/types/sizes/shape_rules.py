"""The shapes that common functions of torch give, from the shapes of what they take.

Any function can be asked for its shapes on the meta device; for these it takes a few µs, and no compiler is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from meshcomm.spmd.types.sizes.size_rules import words

__all__ = ["Part", "Rule", "quick_rule"]

Shape = tuple[int, ...]


class Part:
    """Stands for a tensor of this shape; ``indexes``: that may be an index."""

    __slots__ = ("indexes", "shape")

    def __init__(self, shape: Shape, *, indexes: bool = True) -> None:
        self.shape, self.indexes = shape, indexes


Rule = Callable[[Sequence[Any], dict[str, Any]], list[Shape] | None]
"""None where it cannot say."""


def _parts(args: Sequence[Any]) -> list[Part]:
    return [arg for arg in args if isinstance(arg, Part)]


def _together(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    """The shape of all operands, broadcast."""
    shapes = [part.shape for part in _parts([*args, *kwargs.values()])]
    found: list[int] = []
    for i in range(max(len(shape) for shape in shapes)):
        sizes = {shape[-1 - i] for shape in shapes if len(shape) > i} - {1}
        if len(sizes) > 1:
            raise ValueError("shapes do not go together")
        found.insert(0, sizes.pop() if sizes else 1)
    return [tuple(found)]


def _first(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    """The shape of the first operand."""
    return [args[0].shape] if args and isinstance(args[0], Part) else None


def _whole_or_dim(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    """The shape of a reduction."""
    if not isinstance(args[0], Part) or set(kwargs) - {"dim", "keepdim", "dtype"} or len(args) > 3:
        return None
    shape, dim = args[0].shape, args[1] if len(args) > 1 else kwargs.get("dim")
    keep = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    if dim is None:
        return None if keep else [()]
    if isinstance(dim, bool):
        return None
    if not isinstance(dim, (int, tuple, list)):
        return None
    dims = {each % len(shape) for each in (dim if isinstance(dim, (tuple, list)) else (dim,))}
    if not dims:
        return None
    return [tuple(1 if i in dims else n for i, n in enumerate(shape) if keep or i not in dims)]


def _sizes(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    """The shape of what is told its sizes, one by one or together."""
    given: Sequence[Any] = args if args else (kwargs.get("size"),)
    if given and isinstance(given[0], (tuple, list)):
        given = given[0]
    return [tuple(int(n) for n in given)] if all(isinstance(n, int) for n in given) else None


def _sizes_behind(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    return _sizes(args[1:], kwargs)


def _reshaped(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    told = _sizes(args[1:], kwargs if len(args) == 1 else {})
    if told is None or not isinstance(args[0], Part):
        return None
    total, sizes = math.prod(args[0].shape), list(told[0])
    if -1 in sizes:
        at = sizes.index(-1)
        rest = math.prod(sizes[:at] + sizes[at + 1 :])
        if not rest:
            return None
        sizes[at] = total // rest
    if math.prod(sizes) != total:
        raise ValueError("as many elements as before")
    return [tuple(sizes)]


def _cat(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    if not args or not isinstance(args[0], (tuple, list)) or len(_parts(args[0])) != len(args[0]):
        return None
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    shapes = [part.shape for part in args[0] if part.shape != (0,)]
    if not shapes or not isinstance(dim, int):
        return None
    dim %= len(shapes[0])
    rests = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(rests) > 1:
        raise ValueError("shapes do not go together")
    return [(*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])]


def _linear(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    if not isinstance(args[0], Part) or not isinstance(weight, Part) or len(weight.shape) != 2:
        return None
    if args[0].shape[-1] != weight.shape[1]:
        raise ValueError("shapes do not go together")
    return [(*args[0].shape[:-1], weight.shape[0])]


def _matmul(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    if len(_parts(args)) != 2 or len(args[1].shape) != 2 or len(args[0].shape) < 2:
        return None
    if args[0].shape[-1] != args[1].shape[0]:
        raise ValueError("shapes do not go together")
    return [(*args[0].shape[:-1], args[1].shape[1])]


def _indexed(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    """At most one index that is a tensor, and where it stands its shape stands then."""
    shape, index = list(args[0].shape), args[1] if isinstance(args[1], tuple) else (args[1],)
    if len(_parts(index)) > 1 or any(isinstance(each, (bool, list)) for each in index):
        return None
    taken = sum(each is not None and each is not Ellipsis for each in index)
    found: list[int] = []
    at = 0
    for each in index:
        if each is None:
            found.append(1)
            continue
        if each is Ellipsis:
            left = len(shape) - taken
            found += shape[at : at + left]
            at += left
            continue
        if isinstance(each, Part):
            if not each.indexes:
                return None
            found += each.shape
        elif isinstance(each, slice):
            if not all(end is None or isinstance(end, int) for end in (each.start, each.stop, each.step)):
                return None
            found.append(len(range(*each.indices(shape[at]))))
        elif not isinstance(each, int):
            return None
        elif not -shape[at] <= each < shape[at]:
            raise IndexError("out of range")
        at += 1
    return [tuple(found + shape[at:])]


def _transposed(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    shape = list(args[0].shape)
    if len(args) != 3 or not all(isinstance(arg, int) for arg in args[1:]):
        return None
    i, j = args[1:]
    shape[i], shape[j] = shape[j], shape[i]
    return [tuple(shape)]


def _unsqueezed(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    if len(args) != 2 or not isinstance(args[1], int):
        return None
    shape = list(args[0].shape)
    shape.insert(args[1] % (len(shape) + 1), 1)
    return [tuple(shape)]


def _turned(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    """x.T and x.mT of a matrix."""
    return [args[0].shape[::-1]] if len(args[0].shape) == 2 else None


def _sorted(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    return [args[0].shape] * 2 if isinstance(args[0], Part) else None


def _counted(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Shape] | None:
    """arange with one end."""
    return [(max(math.ceil(args[0]), 0),)] if len(args) == 1 and isinstance(args[0], (int, float)) else None


_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        words(
            """
            add sub mul div true_divide floor_divide remainder pow rsub eq ne lt le gt ge __eq__ __ne__ __lt__ __le__
            __gt__ __ge__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __pow__
            __rpow__ __and__ __or__ __xor__ maximum minimum where clamp masked_fill logical_and logical_or bitwise_and
            bitwise_or lerp atan2 hypot
            """
        ),
        _together,
    ),
    **dict.fromkeys(
        words(
            """
            neg __neg__ __invert__ exp log log1p expm1 sqrt rsqrt abs tanh sigmoid relu gelu silu elu
            leaky_relu softplus sin cos square sign reciprocal logical_not bitwise_not isnan erf floor ceil
            round clone detach contiguous to float double half bfloat16 long int bool type softmax log_softmax
            dropout layer_norm rms_norm normalize argsort cumsum cumprod flip roll index_add index_copy
            scatter scatter_add zeros_like ones_like empty_like full_like rand_like randn_like index_fill
            clamp_min clamp_max logsigmoid mish hardtanh masked_scatter data real requires_grad_ type_as
            """
        ),
        _first,
    ),
    **dict.fromkeys(words("sum mean prod amax amin any all logsumexp"), _whole_or_dim),
    **dict.fromkeys(words("zeros ones empty rand randn"), _sizes),
    **dict.fromkeys(words("new_zeros new_ones new_empty"), _sizes_behind),
    **dict.fromkeys(words("view reshape"), _reshaped),
    **dict.fromkeys(words("cat concat concatenate"), _cat),
    **dict.fromkeys(words("matmul mm __matmul__"), _matmul),
    "linear": _linear,
    "__getitem__": _indexed,
    "transpose": _transposed,
    "unsqueeze": _unsqueezed,
    "sort": _sorted,
    **dict.fromkeys(words("T mT t"), _turned),
    "arange": _counted,
}


def quick_rule(name: str) -> Rule | None:
    """The rule for a function, if it has one."""
    return _RULES.get(name)
