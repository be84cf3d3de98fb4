"""One random state per in-process rank: torch's on the CPU and the accelerator, numpy's and ``random``'s.

The states are global to the process, so they are exchanged whenever another rank goes on.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from meshcomm._torch import random as of_torch
from meshcomm.runtime.process import accelerator
from meshcomm.runtime.transports.threads import numpy_state, twister
from meshcomm.runtime.transports.threads.twister import OWN

_MASK = (1 << 64) - 1
_ALL = slice(None)
_OWN: dict[str, Any] = vars(OWN)


def mixed(seed: int, index: int) -> int:
    """A seed of 64 bits per index, far apart for seeds and indices that are close (the finaliser of splitmix64)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


_in_place: RandomState | None = None
"""The one that was loaded last. No attribute of the class: to set one makes Python look up all others anew."""
_numpy: ModuleType | None = None
"""``numpy.random``, once somebody has loaded it."""
_kept_by_numpy: memoryview[int] | None = None
"""As :func:`numpy_state.second_normal`, since then."""


class RandomState:
    """A random state that is put in place by :meth:`load` and taken away by :meth:`save`."""

    def __init__(self, seed: int | None = None, rank: int = 0) -> None:
        """The states as they are now, or those that start from ``(seed, rank)``."""
        self._seed = None if seed is None else mixed(seed, rank)
        self._own: twister.State | None = None  # torch's on the CPU and Python's; None until it is loaded first
        self._numpy: Any = None
        self._normal: Any = None  # what numpy keeps beside its generator, if there is something; or all of its state
        self._numpy_seed = self._seed  # what numpy's is to be seeded with when somebody loads it
        self._device: Any = None  # the accelerator's, once it is in use
        self._waiting: Any = None  # what it is to be seeded with when it is used first
        if (module := numpy_state.module()) is not _numpy:
            _found(module)
        self._accelerator = accelerator.module()
        self._of_torch, self._of_python = cells = twister.memory()
        self._copied = None not in cells and self._accelerator is None
        if self._seed is None:
            self.save()
            if _numpy is None and _in_place is not None:
                self._numpy_seed = _in_place._numpy_seed
        else:
            numpy_state.when_loaded(_numpy_loaded)

    def save(self) -> None:
        """Keep the global states here."""
        self._own = twister.take(self._own)
        if (module := _numpy) is not None:
            self._save_numpy(module)
        if (unused := self._accelerator) is None:
            return
        if (device := accelerator.in_use()) is not None:
            self._device = device.get_rng_state()
        else:
            self._waiting = of_torch.seeds_in_wait(unused)

    def give_way(self, other: RandomState) -> None:
        """Keep the global states here, and make those of ``other`` the global ones."""
        global _in_place
        mine, its = self._own, other._own
        cells: Any = self._of_torch
        others: Any = self._of_python
        if mine is None or its is None or not self._copied:
            self.save()
            other.load()
            return
        # As these do it, without their calls, which take as long.
        mine[0][_ALL], mine[1][_ALL], mine[2] = cells, others, _OWN["gauss_next"]
        cells[_ALL], others[_ALL], _OWN["gauss_next"] = its
        _in_place = other
        if (module := _numpy) is not None:
            self._save_numpy(module)
            other.load_numpy(module)

    def load(self) -> None:
        """Make these states the global ones."""
        global _in_place
        _in_place = self
        if self._own is None:
            assert self._seed is not None
            twister.seed(self._seed)
        else:
            twister.put(self._own)
        if (module := _numpy) is not None:
            self.load_numpy(module)
        if self._accelerator is not None:
            self._load_device()

    def _save_numpy(self, module: ModuleType) -> None:
        self._numpy = module.get_bit_generator()
        if (kept := _kept_by_numpy) is None:
            self._normal = module.get_state(legacy=False)
        else:
            self._normal = (kept[0], kept[1]) if kept[0] else None

    def load_numpy(self, module: ModuleType) -> None:
        """Make numpy's the global one."""
        if self._numpy is None:
            seed = self._numpy_seed
            self._numpy = numpy_state.first(module) if seed is None else numpy_state.seeded(module, seed)
        module.set_bit_generator(self._numpy)
        if (normal := self._normal) is None:
            return
        if (kept := _kept_by_numpy) is None:
            module.set_state(normal)
        else:
            kept[0], kept[1] = normal

    def _load_device(self) -> None:
        device, unused = accelerator.in_use(), self._accelerator
        if device is not None and self._device is not None:
            device.set_rng_state(self._device)
        elif self._waiting is None:  # the first time of a rank; also where torch does not say what waits
            if unused is not None and self._seed is not None:
                unused.manual_seed(self._seed)  # takes effect when it is used first
        elif device is None:
            of_torch.set_seeds_in_wait(unused, self._waiting)
        else:  # another rank was the first to use it: as if this one had been
            device.manual_seed(torch.Generator().initial_seed())
            for call, _ in filter(None, self._waiting[2]):
                call()


def _found(module: ModuleType | None) -> None:
    global _numpy, _kept_by_numpy
    _numpy, _kept_by_numpy = module, None if module is None else numpy_state.second_normal(module)


def _numpy_loaded(module: ModuleType) -> None:
    """Whose state is in place finds the one of numpy that it would have found there."""
    _found(module)
    if _in_place is not None and _in_place._numpy_seed is not None:
        _in_place.load_numpy(module)
