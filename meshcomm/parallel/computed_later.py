"""Methods of modules that give what computes with their parameters when the method has ended."""

from __future__ import annotations

import itertools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from meshcomm.errors import fail
from meshcomm.spmd.types.reachable import Reachable

_LATER = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, map, filter, itertools.starmap)
_FINISHED = (Tensor, str, bytes, int, float, complex, type(None), type)


def refuse_later(where: str, module: nn.Module, result: object, params: Callable[[], Iterable[Tensor]]) -> None:
    """MeshError for a method that gives what computes after it has ended: it would see the parameters as they are.

    ``params``: of which it must not see that. What it has read of them while the method ran may be in what it gives.
    """
    if isinstance(result, _LATER):
        _refuse_later(where, module, result)
    if isinstance(result, _FINISHED) or torch.compiler.is_compiling():
        return
    found = list(_left_to_do(result, objects=True))
    if not found:
        return
    for each in found:
        if isinstance(each, _LATER):
            _refuse_later(where, module, each)
    named = {id(p): name for name, p in module.named_parameters()}
    wanted, reached = {id(p) for p in params()}, Reachable(*found).tensors
    for key in reached:
        if key in wanted:
            _refuse_later(where, module, found[0], f"it uses {named.get(key, 'a parameter')!r}")


def _refuse_later(where: str, module: nn.Module, later: object, got: str = "") -> NoReturn:
    what = f"a method of {type(module).__name__} gives a {type(later).__name__}, which computes when it has ended."
    fail(where, what, got=got, fix="give a list or a tensor; or make the modules parallel that it calls")


def _left_to_do(x: Any, objects: bool) -> Iterator[Any]:
    """What in a result may yet compute: functions, iterators that call them, modules and what holds one."""
    if isinstance(x, _FINISHED):
        return
    if isinstance(x, _LATER) or callable(x):
        yield x
    elif isinstance(x, (dict, list, tuple, set, frozenset, deque)):
        for each in x.values() if isinstance(x, dict) else x:
            yield from _left_to_do(each, objects)
    if objects and not callable(x):
        for each in getattr(x, "__dict__", {}).values():
            yield from _left_to_do(each, False)
