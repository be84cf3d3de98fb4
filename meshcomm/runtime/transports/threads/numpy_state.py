"""numpy's random numbers: its generator, which ranks exchange, and what it costs to seed one.

numpy loads them when somebody first asks. Before that there is nothing to exchange; when a rank is the one who asks,
it finds the generator that it would have had::

    nobody asked   a rank asks: what numpy begins with is kept, the rank's own takes its place   the end: what was kept
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import get_ident
from types import ModuleType
from typing import Any

NAME = "numpy.random"
_WORDS = 624


def module() -> ModuleType | None:
    """``numpy.random``, once it is loaded, if it can exchange generators (numpy 1.24 on)."""
    found = sys.modules.get(NAME)
    return found if hasattr(found, "set_bit_generator") else None


class _Finder(MetaPathFinder):
    """Finds nothing by itself, but hears when ``numpy.random`` is loaded."""

    tell: Callable[[ModuleType], object]
    begun: Any = None
    """The generator with which it began."""

    def __init__(self) -> None:
        self.looking: set[int] = set()  # the threads that ask the others

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the others find; when that has been executed, it is told."""
        if name != NAME or self not in sys.meta_path or (me := get_ident()) in self.looking:
            return None
        self.looking.add(me)
        try:
            spec = find_spec(name)
        finally:
            self.looking.discard(me)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(loaded: ModuleType) -> None:
                execute(loaded)
                with contextlib.suppress(ValueError):
                    sys.meta_path.remove(self)  # not before: who looks for it need not load it
                if hasattr(loaded, "set_bit_generator"):
                    self.begun = loaded.get_bit_generator()
                    self.tell(loaded)

            loader.exec_module = exec_module
        return spec


_finder = _Finder()


def when_loaded(tell: Callable[[ModuleType], object]) -> None:
    """Call ``tell(numpy.random)`` when it is loaded from now on."""
    if _finder not in sys.meta_path and NAME not in sys.modules:
        _finder.tell = tell
        sys.meta_path.insert(0, _finder)


_SAVED = 16


@cache
def second_normal(random: Any) -> memoryview[int] | None:
    """Where numpy keeps the second of two normal numbers that it makes at once, for the next call: whether there is
    one, and which. None where a trial does not show where. With another generator it forgets that number, and to ask
    for it takes ten times as long as the rest of a change-over.
    """
    its: Any = sys.modules.get(f"{random.__name__}.mtrand")  # its functions may have been replaced
    if its is None or sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    one, other = its.RandomState(1), its.RandomState(2)
    one.randn()
    kept = one.get_state(legacy=False)
    whole, number = bytes(_memory(one, 0)), struct.pack("d", kept["gauss"])
    at = whole.find(number) - _SAVED // 2
    if at < object.__basicsize__ or whole.count(number) != 1:
        return None
    _memory(other, at)[:_SAVED] = _memory(one, at)[:_SAVED]
    if not (is_saved := other.get_state(legacy=False))["has_gauss"] or is_saved["gauss"] != kept["gauss"]:
        return None
    expected = [one.randn() for _ in range(3)]
    other.set_state(kept | {"has_gauss": 0, "gauss": 0.0})
    _memory(other, at)[:_SAVED] = whole[at : at + _SAVED]
    alike = [other.randn() for _ in range(3)] == expected and not any(_memory(its.RandomState(3), at)[:_SAVED])
    own = getattr(its.rand, "__self__", None)
    return _memory(own, at)[:_SAVED].cast("q") if alike and type(own) is type(one) else None


def _memory(state: Any, start: int) -> memoryview[int]:
    size = type(state).__basicsize__
    found: Any = (ctypes.c_ubyte * size).from_address(id(state))
    found.of = state  # which lives as long as what looks into it
    return memoryview(found).cast("B")[start:]


def first(random: Any) -> Any:
    """The generator with which numpy began, if somebody heard it."""
    return random.get_bit_generator() if _finder.begun is None else _finder.begun


def seeded(random: Any, seed: int) -> Any:
    """``MT19937(seed)``, in a third of the time where numpy computes its numbers as it did when this was written."""
    fast = _fast(random)
    return random.MT19937(seed) if fast is None else fast(seed)


@cache
def _fast(random: Any) -> Callable[[int], Any] | None:
    before, after = _constants()

    def make(seed: int) -> Any:
        sequence = _sequences(random)(seed)
        words = (sequence.pool ^ before) * after
        sequence.words = (words ^ (words >> 16)).ravel().tolist()
        return random.MT19937(sequence)

    draws = [each.random_raw(3 * _WORDS).tolist() for each in (make(1 << 63), random.MT19937(1 << 63))]
    return make if draws[0] == draws[1] else None


def _constants() -> Any:
    """Those of the hash that makes a generator's words of the four words in which a SeedSequence mixes the seed."""
    before, after, constant = [], [], 0x8B51F9DD
    for _ in range(_WORDS):
        before.append(constant)
        constant = constant * 0x58F38DED & 0xFFFFFFFF
        after.append(constant)
    return [sys.modules["numpy"].array(each, dtype="uint32").reshape(-1, 4) for each in (before, after)]


@cache
def _sequences(random: Any) -> Any:
    class Sequence(random.SeedSequence):  # type: ignore[misc]
        """numpy's own, but the words that it generates first are given: in a list, which is read ten times as fast."""

        words: list[int] | None = None

        def generate_state(self, *args: Any, **kwargs: Any) -> Any:
            words, self.words = self.words, None
            return super().generate_state(*args, **kwargs) if words is None else words

        def __reduce__(self) -> Any:
            return partial(random.SeedSequence, **self.state), ()

    return Sequence
