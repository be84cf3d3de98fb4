"""What a custom function of autograd takes beside its arguments: in an object or a dict, a closure, a global."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from meshcomm.spmd.types.reachable import Reachable

__all__ = ["beside", "inside_of"]

_LIBRARIES = ("torch", "meshcomm")
"""These say themselves what they do."""


def inside_of(args: Sequence[Any], kwargs: Mapping[str, Any], operands: Sequence[Tensor]) -> list[Tensor]:
    """The tensors inside of its arguments that are none themselves."""
    return _others(Reachable(list(args), dict(kwargs)), operands)


def beside(cls: Any, operands: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that its methods reach by closures, defaults, globals and attributes of the class."""
    if str(cls.__module__).split(".")[0] in _LIBRARIES:
        return []
    return _others(Reachable(*_parts(cls)), operands)


def _parts(cls: Any) -> Iterator[Any]:
    for base in cls.__mro__:
        if base is Function:
            return
        for name in vars(base):
            value = getattr(cls, name, None)
            if isinstance(value, types.FunctionType) or not name.startswith("__"):
                yield value


def _others(reach: Reachable, operands: Sequence[Tensor]) -> list[Tensor]:
    known = {id(x) for x in operands}
    return [x for _, x in reach.tensors.values() if id(x) not in known]
