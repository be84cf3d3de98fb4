"""Sizes that depend on data: numbers that know along which axes they differ between the ranks.

Beside its value on this rank each has values that it could have on others: that of a rank on which nothing was
selected, and of two on which very much was. They are the same on every rank, so what follows from them is decided alike
everywhere.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from meshcomm.errors import VaryingError, fail, names
from meshcomm.runtime.callsite import asked_in, call_site
from meshcomm.spmd.types.notes import Ever
from meshcomm.spmd.types.rules.operands import mapped
from meshcomm.spmd.types.vma import Type, join
from meshcomm.watch import here

COUNTS = (0, 2**25 - 39, 2**26 - 5)
"""How many could have been selected elsewhere: prime, so that what divides a size by chance is seen as chance."""

Other = int | float | None
"""A value elsewhere; None where it cannot be computed."""


made = Ever()
"""Of a size that depends on data."""


class _UnhashableError(VaryingError, TypeError):
    """As sizes of ``torch.compile`` cannot be keys: who caches by sizes goes without when told so by a TypeError."""


def _is_number(x: object) -> bool:
    return isinstance(x, (Varying, int, float)) or (hasattr(x, "__index__") and not isinstance(x, Tensor))


def _computes(fn: Callable[..., Any], turned: bool = False) -> Callable[..., Any]:
    def method(x: Any, y: Any) -> Any:
        if not _is_number(y) and not (isinstance(y, Tensor) and here.watcher is None):
            return NotImplemented
        return computed(fn, y, x) if turned else computed(fn, x, y)

    return method


def _applied(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: computed(fn, *operands)


def _compares(fn: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def method(x: Varying, y: object) -> Any:
        if isinstance(y, Tensor) and here.watcher is None:
            return fn(x.value, y)
        return x._agreed(fn, (x, y), "a comparison") if _is_number(y) else NotImplemented

    return method


class Varying:
    """A number that differs between ranks. What is computed from it does so too; what asks for its value is refused."""

    value: int | float
    others: tuple[Other, ...]
    kind: Type

    def __hash__(self) -> int:
        if here.watcher is None:
            return hash(self.value)
        self._refuse("a key", "look it up by a tensor: table[torch.tensor(n)]", kind=_UnhashableError)

    if TYPE_CHECKING:

        def __floordiv__(self, other: Any) -> Any: ...

        def __rfloordiv__(self, other: Any) -> Any: ...

        def __mod__(self, other: Any) -> Any: ...

        def __rmod__(self, other: Any) -> Any: ...

    def __init__(self, value: int | float, others: tuple[Other, ...], kind: Type) -> None:
        self.value, self.others, self.kind = value, others, kind

    def _refuse(self, what: str, fix: str, kind: type[VaryingError] = VaryingError) -> NoReturn:
        since = "; ".join(f"along {axis!r} since {self.kind.since[axis]}" for axis in sorted(self.kind.axes))
        fail(
            "check_vma",
            f"{what} at {call_site()} of a size that depends on data and varies along {names(sorted(self.kind.axes))}.",
            got=f"{self.value}; it varies {since}",
            fix=fix,
            kind=kind,
        )

    def _host(self, what: str, fix: str) -> Any:
        if here.watcher is not None and not asked_in("torch."):
            self._refuse(what, fix)
        return self.value

    def __index__(self) -> int:
        return int(self._host("range, an index of a list or another use as a plain number", _LOOP))

    def __int__(self) -> int:
        return int(self._host("int()", "math.floor, math.ceil or // give a size that is followed; " + _LOOP))

    def __float__(self) -> float:
        return float(self._host("float()", "n / 1, n ** 0.5 and the like are followed, and so is torch.sym_float(n)"))

    def __complex__(self) -> complex:
        return complex(self._host("complex()", "n / 1"))

    def __bool__(self) -> bool:
        return self._agreed(bool, (self,), "if")

    @staticmethod
    def _agreed(fn: Callable[..., bool], operands: tuple[Any, ...], what: str) -> bool:
        """What is equally true wherever it could be otherwise is true."""
        found: bool
        found, others = _everywhere(fn, operands)
        if all(other is None or other == found for other in others) and any(other is not None for other in others):
            return found
        if here.watcher is not None and not asked_in("torch."):
            next(x for x in operands if isinstance(x, Varying))._refuse(what, _BRANCH)
        return found

    __eq__, __ne__ = _compares(operator.eq), _compares(operator.ne)
    __lt__, __le__ = _compares(operator.lt), _compares(operator.le)
    __gt__, __ge__ = _compares(operator.gt), _compares(operator.ge)

    def __repr__(self) -> str:
        return repr(self.value)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self.value), (self.value,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Varying:
        return self

    __sym_float__, __sym_int__ = _applied(float), _applied(math.trunc)
    __sym_max__, __sym_min__ = _applied(max), _applied(min)

    def bit_length(self) -> Any:
        """As that of an int."""
        return computed(int.bit_length, self)

    def is_integer(self) -> bool:
        """As that of a float."""
        return self._agreed(lambda x: float(x).is_integer(), (self,), "if")

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __round__(self, digits: int | None = None) -> Any:
        return computed(lambda x: round(x, digits), self)


class VaryingInt(Varying):
    """Taken by torch wherever it takes a size."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """While the checker looks, which makes it plain for torch, a ``torch.SymInt`` for whoever asks."""
        return int if _plain_now() else torch.SymInt


class VaryingFloat(Varying):
    """What comes of dividing a size."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """``float`` and ``torch.SymFloat``, as for ints."""
        return float if _plain_now() else torch.SymFloat


_TRANSFORMS = torch.vmap.__module__.rpartition(".")[0] + "."


def _plain_now() -> bool:
    return here.watcher is None or asked_in(_TRANSFORMS)


_LOOP = (
    "an operation on whole tensors in place of a loop; mc.split_rows(rows, counts) for parts; or a number that is the "
    'same on every rank: mc.all_reduce(torch.tensor(n), axis, "max").item()'
)
_BRANCH = (
    "torch.where, or let the operation run on what is empty; torch.sym_max(n, 1) and torch.sym_min in place of max and "
    'min; or ask what is the same on every rank: mc.all_reduce(torch.tensor(n), axis, "max").item()'
)


def varying(value: int | float, others: Iterable[Other], kind: Type) -> Any:
    """A number that varies as ``kind`` says."""
    made.any = True
    if isinstance(value, float):
        return VaryingFloat(value, tuple(others), kind)
    return VaryingInt(value, tuple(others), kind)


def computed(fn: Callable[..., Any], *operands: Any) -> Any:
    """``fn`` of numbers, some of which vary."""
    value, others = _everywhere(fn, operands)
    if here.watcher is None or not isinstance(value, (int, float)):
        return value
    return varying(value, others, join([x.kind for x in operands if isinstance(x, Varying)], "a size"))


def _everywhere(fn: Callable[..., Any], operands: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """``fn`` of the values here, and of those elsewhere."""
    value = fn(*[x.value if isinstance(x, Varying) else x for x in operands])
    others: list[Any] = []
    for i in range(len(COUNTS)):
        there = [x.others[i] if isinstance(x, Varying) else x for x in operands]
        try:
            others.append(None if None in there else fn(*there))
        except (ArithmeticError, ValueError):
            others.append(None)
    return value, others


def _operators() -> None:
    """The magic methods, which are all alike."""
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor"):
        fn = getattr(operator, name)
        setattr(Varying, f"__{name.rstrip('_')}__", _computes(fn))
        setattr(Varying, f"__r{name.rstrip('_')}__", _computes(fn, turned=True))
    for name in ("neg", "pos", "abs", "invert"):
        setattr(Varying, f"__{name}__", _applied(getattr(operator, name)))
    for name in ("floor", "ceil", "trunc"):
        setattr(Varying, f"__{name}__", _applied(getattr(math, name)))
    for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tanh"):  # numpy asks for methods of these names
        setattr(Varying, name, _applied(getattr(math, name)))
    for name in ("real", "imag", "numerator", "denominator"):
        setattr(Varying, name, property(_applied(operator.attrgetter(name))))


_operators()


def plain(value: Any) -> Any:
    """An argument with this rank's numbers in place of those that know that they vary."""
    return mapped(lambda leaf: leaf.value if isinstance(leaf, Varying) else leaf, value)
