"""What a function can reach besides its arguments: the tensors in its closure, its modules, its defaults, and where
they stand, so that others can stand there for a while.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from meshcomm.mesh import Mesh

_MANY = 10_000
"""Containers with more entries are data, and looking through them at each call would take long."""
_ABSENT = object()
_OPAQUE = sys.stdlib_module_names - {"collections", "functools", "types"}
"""Instances of classes of these modules hold no tensors, or hold half the program."""
_PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.BuiltinFunctionType, Mesh)


class Slot(NamedTuple):
    """A place where a tensor, or a tuple with one, stood when it was found."""

    value: Any
    read: Callable[[], Any]
    write: Callable[[Any], None]
    of_module: bool
    """It is a module's, and functional_call may put something else there for a while."""


class Reachable:
    """All tensors that a function reaches, each once, with a name for errors."""

    def __init__(self, *roots: Any) -> None:
        self.tensors: dict[int, tuple[str, Tensor]] = {}
        self.slots: list[Slot] = []
        self._seen: dict[int, Any] = {}
        self._packages = {package_of(part) for root in roots for part in _callables(root)}
        for root in roots:
            self._look(root, "")

    def _value(
        self, value: Any, name: str, read: Callable[[], Any], write: Callable[[Any], None], of_module: bool = False
    ) -> None:
        """Something that stands where something else can be put."""
        if isinstance(value, Tensor):
            self.tensors.setdefault(id(value), (name, value))
            self.slots.append(Slot(value, read, write, of_module))
        elif isinstance(value, tuple):
            if any(isinstance(part, Tensor) for part in _flat(value)):
                self.slots.append(Slot(value, read, write, of_module))
            self._look(value, name)
        else:
            self._look(value, name)

    def _look(self, thing: Any, name: str) -> None:
        if isinstance(thing, _PLAIN) or id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            self.tensors.setdefault(id(thing), (name, thing))
        elif isinstance(thing, dict):
            self._entries(thing, thing if len(thing) <= _MANY else (), name)
        elif isinstance(thing, list):
            self._entries(thing, range(len(thing) if len(thing) <= _MANY else 0), name)
        elif isinstance(thing, tuple):
            for i, part in enumerate(thing[:_MANY]):
                self._look(part, f"{name}[{i}]")
        elif isinstance(thing, types.FunctionType):
            self._function(thing)
        elif isinstance(thing, types.MethodType):
            self._look(thing.__self__, "self")
            self._look(thing.__func__, name)
        elif isinstance(thing, functools.partial):
            self._partial(thing, name)
        elif isinstance(thing, (set, frozenset, deque)):
            for part in list(thing)[:_MANY]:
                self._look(part, name)
        elif package_of(type(thing)) not in _OPAQUE:
            if hasattr(thing, "__dict__"):
                self._entries(vars(thing), vars(thing), name, isinstance(thing, Module))
            for slot in _slots(type(thing)):
                self._look(getattr(thing, slot, None), f"{name}.{slot}".strip("."))

    def _entries(self, container: Any, keys: Any, name: str, of_module: bool = False) -> None:
        for key in list(keys):
            step = key if isinstance(key, str) else f"[{key!r}]"
            inner = name if step == "_modules" else f"{name}.{step}".strip(".")
            if of_module and key in ("_parameters", "_buffers"):
                self._entries(container[key], container[key], name, of_module)
            else:
                self._value(container[key], inner, *_item(container, key), of_module)

    def _function(self, fn: types.FunctionType) -> None:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not yet assigned
                continue
            self._value(value, name, *_attribute(cell, "cell_contents"))
        self._value(fn.__defaults__, "default", *_attribute(fn, "__defaults__"))
        self._look(fn.__kwdefaults__, "default")
        if package_of(fn) in self._packages:  # libraries have tensors of their own
            self._entries(fn.__globals__, [name for name in _names(fn.__code__) if name in fn.__globals__], "")
        self._look(fn.__dict__, "")

    def _partial(self, bound: functools.partial[Any], name: str) -> None:
        def write(args: Any) -> None:
            bound.__setstate__((bound.func, args, bound.keywords, vars(bound)))  # type: ignore[attr-defined]

        self._look(bound.func, name)
        self._value(bound.args, name, lambda: bound.args, write)
        self._look(bound.keywords, name)


def _slots(cls: type) -> Iterator[str]:
    """The names of attributes that stand in no ``__dict__``."""
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def package_of(thing: Any) -> str:
    """The library, or the program, that a thing comes from."""
    return str(getattr(thing, "__module__", None)).split(".")[0]


def _callables(root: Any) -> Iterator[Any]:
    """The functions that a callable is made of."""
    while isinstance(root, functools.partial):
        root = root.func
    yield from (root, type(root))


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that a function and those defined in it may look up globally."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _item(container: Any, key: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    def read() -> Any:
        return container.get(key, _ABSENT) if isinstance(container, dict) else container[key]

    def write(value: Any) -> None:
        if value is _ABSENT:
            del container[key]
        else:
            container[key] = value

    return read, write


def _attribute(thing: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(thing, name), lambda value: setattr(thing, name, value)


def _flat(value: tuple[Any, ...]) -> Iterator[Any]:
    for part in value:
        if isinstance(part, tuple):
            yield from _flat(part)
        else:
            yield part


@contextlib.contextmanager
def in_place_of(slots: list[Slot], others: Mapping[int, Tensor]) -> Iterator[None]:
    """Put back what stood in the slots when it was found, with ``others``, by id, in place of tensors; at the end
    restore what stands there now.
    """

    def exchanged(value: Any) -> Any:
        if isinstance(value, tuple):
            parts = [exchanged(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return others.get(id(value), value)

    def stays(slot: Slot, now: Any) -> bool:
        parts = _flat(slot.value) if isinstance(slot.value, tuple) else (slot.value,)
        return now is slot.value and not any(id(part) in others for part in parts)

    before: list[tuple[Slot, Any]] = []
    try:
        for slot in slots:
            now = slot.read()
            if not stays(slot, now):
                before.append((slot, now))
                slot.write(exchanged(slot.value))
        yield
    finally:
        for slot, value in reversed(before):
            slot.write(value)
