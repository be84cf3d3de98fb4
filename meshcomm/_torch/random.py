"""The private names of torch behind random numbers, their memory and their seeds: a part of :mod:`meshcomm._torch`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from meshcomm._versions import has

__all__ = [
    "generator_cells",
    "seeds_in_wait",
    "set_seeds_in_wait",
]


_CDATA = has("torch.Generator._cdata", "each change-over between ranks of one process takes some µs longer")
_WORDS = 624
"""How many numbers a generator has; ``get_state`` makes a tensor of twice their size. In it they lie side by side::

    seed, left, seeded, next | 624 words | a float and a double that are kept for the next call of normal_, if they are
"""
_BEFORE, _BEHIND = 20, 28
_HEADER = 24  # of what get_state gives, whose words have twice the length
_FARTHEST = 256


def _cells(generator: torch.Generator, start: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(generator._cdata + start)).cast("B")  # type: ignore[attr-defined]


def _words(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    wide = ctypes.string_at(state.data_ptr() + _HEADER, 8 * _WORDS)
    return b"".join([wide[i : i + 4] for i in range(0, 8 * _WORDS, 8)])


def _place(generator: torch.Generator) -> int | None:
    """Where in it its words begin. Only where they seem to is more looked at than any generator must have."""
    words = _words(generator)
    for start in range(_BEFORE, _FARTHEST, 4):
        if _cells(generator, start, 16) == words[:16]:
            return start if _cells(generator, start, len(words)) == words else None
    return None


def _alike(one: torch.Generator, other: torch.Generator) -> bool:
    """Whether both give the same numbers from now on."""
    draws = [
        (each.get_state(), torch.empty(3, device="cpu").normal_(generator=each), _words(each)) for each in (one, other)
    ]
    return bool(torch.equal(draws[0][0], draws[1][0]) and torch.equal(draws[0][1], draws[1][1]))


def generator_cells(generator: torch.Generator) -> memoryview | None:
    """The memory of its state, to be copied and written; None where a trial does not show that this is it."""
    if not _CDATA:
        return None
    one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    torch.empty(3, device="cpu").normal_(generator=one)  # of pairs: one is kept
    start, size = _place(one), _BEFORE + 4 * _WORDS + _BEHIND
    if start is None or {start, _place(other), _place(generator)} != {start}:
        return None
    mine, others = (_cells(each, start - _BEFORE, size) for each in (one, other))
    before, kept = other.get_state(), bytes(others)
    others[:] = mine
    if not _alike(one, other):
        return None
    others[:] = kept
    return _cells(generator, start - _BEFORE, size) if torch.equal(other.get_state(), before) else None


_has_tracker = has(
    "torch._utils._LazySeedTracker", "ranks of one process that seed an accelerator before its first use share the seed"
)


def seeds_in_wait(module: Any) -> tuple[Any, Any, list[Any]] | None:
    """The calls with which an accelerator that is not in use yet, of this module, will be seeded: for all of its
    devices, for one, and these in order. None where torch does not say.
    """
    tracker = getattr(module, "_lazy_seed_tracker", None) if _has_tracker else None
    return None if tracker is None else (tracker.manual_seed_all_cb, tracker.manual_seed_cb, tracker.call_order)


def set_seeds_in_wait(module: Any, seeds: tuple[Any, Any, list[Any]]) -> None:
    """Exchange them."""
    tracker = module._lazy_seed_tracker
    tracker.manual_seed_all_cb, tracker.manual_seed_cb, tracker.call_order = seeds
