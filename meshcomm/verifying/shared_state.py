"""Python objects that all ranks of one process share, such as a list in a closure: what a run has changed of them.

Processes share none: what one rank writes there and another one reads is another number on a cluster.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshcomm._torch import version_hint
from meshcomm.mesh import Mesh

_MANY = 20_000
"""So many places are looked at."""
_NUMBERS = (str, bytes, int, float, complex, bool, type(None))
_SKIPPED = sys.stdlib_module_names - {"collections", "functools", "types", "random"} | {"torch", "meshcomm", "numpy"}
"""Instances of classes of these are no state of the program's, or half of it."""


class SharedState:
    """What the function that ranks run reaches besides what it makes, at one moment; and how to put it back."""

    def __init__(self, *roots: Any) -> None:
        self.places: dict[str, Any] = {}
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []
        self._packages = {_package(root) for root in roots}
        for root in roots:
            self._look(root, "")

    def changed(self, before: SharedState) -> list[str]:
        """The names under which something is other than it was."""
        names = [name for name in {**before.places, **self.places}
                 if before.places.get(name, self) != self.places.get(name, before)]  # fmt: skip
        return list(dict.fromkeys(name.partition("[")[0] or name for name in names))

    def restore(self) -> None:
        """As it was when this was made."""
        for undo in self._undo:
            undo()

    def _look(self, thing: Any, name: str) -> None:
        if id(thing) in self._seen or len(self.places) > _MANY:
            return
        if isinstance(thing, _NUMBERS):
            self.places[name] = thing
            return
        self._seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            self._tensor(thing, name)
        elif isinstance(thing, types.FunctionType):
            self._function(thing, name)
        elif isinstance(thing, types.MethodType):
            self._look(thing.__func__, name)
            self._look(thing.__self__, name or "self")
        elif isinstance(thing, functools.partial):
            for part in (thing.func, *thing.args, *thing.keywords.values()):
                self._look(part, name)
        elif isinstance(thing, (dict, list, set, deque)):
            self._container(thing, name)
        elif isinstance(thing, (tuple, frozenset)):
            for i, part in enumerate(thing):
                self._look(part, f"{name}[{i}]")
        elif isinstance(thing, random.Random):
            state = thing.getstate()
            self.places[name] = hash(state)
            self._undo.append(lambda: thing.setstate(state))
        elif isinstance(thing, torch.Generator):
            kept = thing.get_state()
            self.places[name] = hash(bytes(kept.tolist()))
            self._undo.append(lambda: _ignored(thing.set_state(kept)))
        elif isinstance(thing, type(functools.lru_cache(_ignored))):
            self.places[f"{name}()"] = thing.cache_info().currsize
            self._undo.append(thing.cache_clear)
            self._look(thing.__wrapped__, name)
        elif isinstance(thing, type):
            self._class(thing, name)
        elif isinstance(thing, itertools.count):
            self.places[name] = repr(thing)
        elif isinstance(thing, types.GeneratorType):
            self.places[name] = None if thing.gi_frame is None else thing.gi_frame.f_lasti
        elif not isinstance(thing, (type, types.ModuleType, types.BuiltinFunctionType, Mesh)):
            self._instance(thing, name)

    def _tensor(self, x: Tensor, name: str) -> None:
        self.places[name] = id(x), version_hint(x), tuple(x.shape)
        if not x.requires_grad and x.numel() <= _MANY:  # of leaves the runtime knows
            kept = x.detach().clone()
            self._undo.append(lambda: None if torch.equal(x, kept) else _ignored(x.copy_(kept)))

    def _function(self, fn: types.FunctionType, name: str) -> None:
        for free, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not yet assigned
                continue
            self._look(value, free)
            self._undo.append(functools.partial(setattr, cell, "cell_contents", value))
        self._look(fn.__defaults__, name)
        self._look(fn.__kwdefaults__, name)
        if _package(fn) in self._packages:
            for each in _names(fn.__code__):
                if each in fn.__globals__:
                    value = fn.__globals__[each]
                    self._look(value, each)
                    self._undo.append(functools.partial(fn.__globals__.__setitem__, each, value))
        self._container(vars(fn), f"{name or fn.__name__}.__dict__")

    def _class(self, thing: type, name: str) -> None:
        if _package(thing) not in self._packages:
            return
        for key, value in list(vars(thing).items()):
            if not key.startswith("__") and not isinstance(
                value, (types.MemberDescriptorType, types.GetSetDescriptorType)
            ):
                self._look(value, f"{name}.{key}")
                self._undo.append(functools.partial(setattr, thing, key, value))

    def _container(self, thing: Any, name: str) -> None:
        kept = thing.copy()
        self.places[name] = type(thing), len(thing)
        items = thing.items() if isinstance(thing, dict) else enumerate(kept)
        for key, value in list(items):
            self._look(value, f"{name}[{key!r}]")

        def undo() -> None:
            thing.clear()
            (thing.extend if isinstance(thing, (list, deque)) else thing.update)(kept)

        self._undo.append(undo)

    def _instance(self, thing: Any, name: str) -> None:
        if _package(type(thing)) in _SKIPPED and not isinstance(thing, nn.Module):
            return
        kept = getattr(thing, "__dict__", None)
        if isinstance(kept, dict):
            self._container(kept, name)


def _ignored(_: object) -> None:
    """What a call gives."""


def _package(thing: Any) -> str:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return str(getattr(thing, "__module__", None)).split(".")[0]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
