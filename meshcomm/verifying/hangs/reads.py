"""Which lines of a program read a tensor on the host, and what the ranks read there."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshcomm._torch import operation_name, watch_operations
from meshcomm.runtime.callsite import call_site
from meshcomm.spmd.types.checker import Checker
from meshcomm.watch import here

__all__ = ["Reads", "said_of"]

_NAMES = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__complex__",
          "__dlpack__")  # fmt: skip
_FUNCTIONS: dict[Any, str] = {getattr(Tensor, name): name for name in _NAMES if hasattr(Tensor, name)}
_FUNCTIONS |= dict.fromkeys((torch.equal, Tensor.equal), "equal()")
_FUNCTIONS |= dict.fromkeys((torch.allclose, Tensor.allclose), "allclose()")
_FUNCTIONS |= dict.fromkeys((torch.nonzero, Tensor.nonzero, torch.argwhere), "nonzero()")
_FUNCTIONS |= dict.fromkeys((torch.unique, Tensor.unique), "unique()")
_FUNCTIONS |= dict.fromkeys((torch.masked_select, Tensor.masked_select), "masked_select()")
_MASK = "a mask as an index"
_SAID = {_MASK: _MASK, "__bool__": "bool()", "__int__": "int()", "__float__": "float()", "__index__": "an index"}
_SAID |= {"_local_scalar_dense": "item()", "is_nonzero": "bool()", "_unique2": "unique()"}
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_UNTAGGED = "_nnz", "_pack_padded_sequence", "_to_sparse"
"""The same, of which torch does not say so."""


class Reads(TorchFunctionMode):
    """Notes each read of this thread. What the library reads inside of its calls is not the program's."""

    def __init__(self) -> None:
        super().__init__()
        self._inside = watch_operations(self._hear)
        self._named = False
        self.found: dict[str, list[Any]] = {}
        """What is called at a line, to what was read there in turn."""
        self.varying: set[str] = set()
        """Those of them that have read what is not known to be the same on every rank."""

    def __enter__(self) -> Reads:
        """With what torch's functions read inside (a slice by a tensor), and hooks of backward: this mode sees none of
        it by itself.
        """
        self._inside.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._inside.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and note what it gives if that is read."""
        name = _name_of(func, args)
        if name is None:
            return func(*args, **(kwargs or {}))
        self._named, was = True, self._named
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self._named = was
        self._note(name, result, args)
        return result

    def _hear(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note an operation of which a value comes, or a size that depends on one."""
        name = operation_name(func).removeprefix("aten::")
        if self._named or (_BY_VALUE.isdisjoint(func.tags) and name not in _UNTAGGED):
            return
        if name != "index" or _has_mask(tuple(args[1])):
            self._note(_MASK if name == "index" else name, result, args)

    def _note(self, name: str, result: Any, args: tuple[Any, ...]) -> None:
        if _by_the_library(sys._getframe(1)):
            return
        kept = result if isinstance(result, (bool, int, float, complex, list)) else None
        called = f"{_SAID.get(name, name.strip('_()') + '()')} at {call_site()}"
        self.found.setdefault(called, []).append(kept)
        if not all(_is_invariant(x) for x in args if isinstance(x, Tensor)):
            self.varying.add(called)


def _name_of(func: Any, args: tuple[Any, ...]) -> str | None:
    """What a function is called that reads values."""
    if func is Tensor.__getitem__ and _has_mask(args[1]):
        return _MASK
    if func in (torch.tensor_split, Tensor.tensor_split) and isinstance(args[1], Tensor):
        return "tensor_split()"
    return _FUNCTIONS.get(func)


def _has_mask(index: Any) -> bool:
    """Whether how large the result is depends on values."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) and part.ndim for part in parts)


def _by_the_library(frame: FrameType | None) -> bool:
    """Whether it reads for itself, and hands the program none of it: its own calls part nowhere."""
    while frame is not None and (frame.f_code.co_name in _MODES or frame.f_code.co_filename.startswith(_BETWEEN)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OWN)


_HERE = Path(__file__).parents[2]
_BETWEEN = str(Path(torch.__file__).parent), str(_HERE / "spmd" / "types"), str(_HERE / "_torch"), __file__
"""What calls an operation for who has called it: torch, and the checker of varying types."""
_MODES = "__torch_function__", "__torch_dispatch__"
"""So do modes of the library (mc.rng, stages of a pipeline) and of the program."""
_ROOMS = "collectives", "layout", "objects", "parallel", "runtime", "spmd"
_OWN = *(str(_HERE / room) for room in _ROOMS), str(_HERE / "training" / "equal.py")


def said_of(found: Mapping[int, Reads]) -> list[str]:
    """A line for each place, and whether all ranks that came there have read one value."""
    every: dict[str, list[Sequence[Any]]] = {}
    for reads in found.values():
        for called, values in reads.found.items():
            every.setdefault(called, []).append(values)
    varying = {called for reads in found.values() for called in reads.varying}
    return [
        called + (_alike(values, len(found)) if called in varying else " (by its type the same on every rank)")
        for called, values in every.items()
    ]


def _is_invariant(x: Tensor) -> bool:
    """Whether the checker of varying types, if it is on, knows that ``x`` is the same on every rank."""
    checker = here.watcher
    if not isinstance(checker, Checker) or checker.mesh.size != checker.mesh.world_size:
        return False
    kind = checker.type_of(x)
    return kind is not None and not kind.axes


def _alike(values: Sequence[Sequence[Any]], ranks: int) -> str:
    alike = len(values) == ranks and all(each == values[0] and None not in each for each in values)
    return " (all ranks read the same there)" if alike else ""
