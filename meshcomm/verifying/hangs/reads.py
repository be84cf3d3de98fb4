"""Which lines of a program read a tensor on the host, and what the ranks read there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshcomm.runtime.callsite import call_site

__all__ = ["Reads", "said_of"]

_NAMES = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__complex__")
_FUNCTIONS: dict[Any, str] = {getattr(Tensor, name): name for name in _NAMES if hasattr(Tensor, name)}
_FUNCTIONS |= dict.fromkeys((torch.equal, Tensor.equal), "equal()")
_FUNCTIONS |= dict.fromkeys((torch.allclose, Tensor.allclose), "allclose()")
_FUNCTIONS |= dict.fromkeys((torch.nonzero, Tensor.nonzero, torch.argwhere), "nonzero()")
_FUNCTIONS |= dict.fromkeys((torch.unique, Tensor.unique), "unique()")
_SAID = {"__bool__": "bool()", "__int__": "int()", "__float__": "float()", "__index__": "an index"}


class Reads(TorchFunctionMode):
    """Notes each read of this thread. What the library reads inside of its calls is not the program's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[Any]] = {}
        """What is called at a line, to what was read there in turn."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and note what it gives if that is read."""
        result = func(*args, **(kwargs or {}))
        name = _FUNCTIONS.get(func)
        if name is not None:
            kept = result if isinstance(result, (bool, int, float, complex, list)) else None
            called = f"{_SAID.get(name, name.rstrip('()') + '()')} at {call_site()}"
            self.found.setdefault(called, []).append(kept)
        return result


def said_of(found: Mapping[int, Reads]) -> list[str]:
    """A line for each place, and whether all ranks that came there have read one value."""
    every: dict[str, list[Sequence[Any]]] = {}
    for reads in found.values():
        for called, values in reads.found.items():
            every.setdefault(called, []).append(values)
    return [called + _alike(values, len(found)) for called, values in every.items()]


def _alike(values: Sequence[Sequence[Any]], ranks: int) -> str:
    alike = len(values) == ranks and all(each == values[0] and None not in each for each in values)
    return " (all ranks read the same there)" if alike else ""
