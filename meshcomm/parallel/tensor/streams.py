"""Two streams of random numbers for a tensor parallel module: what is whole draws alike on all ranks, and what is cut
draws differently.

Both live in torch's default generators and nowhere else, so that whatever puts a generator back and computes again, as
``torch.utils.checkpoint`` does, draws the same again. Which of them is drawn from, and where in its chain, is told by
the generator's seed: a mark, a kind and 40 bits. A layer whose result is cut seeds the generator by these bits and the
rank's index; one whose result is whole takes the index out again and goes to the next bits. What was drawn in between,
by the module or by anybody else, and how much of it, makes no difference to either.
"""

from __future__ import annotations

import inspect
import zlib
from types import CodeType
from typing import Any

import torch
from torch import nn

from meshcomm import _torch
from meshcomm.axis import AxisName, axes_in
from meshcomm.collectives.agree import sync_seed
from meshcomm.collectives.broadcast import broadcast
from meshcomm.mesh import Mesh
from meshcomm.watch import here, paused

_REST, _WHOLE, _CUT = 1, 2, 3
_BITS = 40
_MASK = (1 << _BITS) - 1
_MARK = 0x2B6D3
"""Of 18 bits, in front of 4 for the axis, 2 for the kind and the 40 that change."""
_FACTORS = (0x9E3779B97F | 1, 0xBF58476D1D | 1)
_INVERSES = tuple(pow(factor, -1, 1 << _BITS) for factor in _FACTORS)
_STEP = 0x94D049BB13
_NEXT = -1
"""An index that no rank has."""


def _scrambled(bits: int, index: int) -> int:
    """Other 40 bits for each index, from which these can be had back."""
    bits = (bits + (index + 2) * _STEP) & _MASK
    for factor in _FACTORS:
        bits = ((bits ^ (bits >> _BITS // 2)) * factor) & _MASK
    return bits ^ (bits >> _BITS // 2)


def _unscrambled(bits: int, index: int) -> int:
    bits ^= bits >> _BITS // 2
    for inverse in reversed(_INVERSES):
        bits = (bits * inverse) & _MASK
        bits ^= bits >> _BITS // 2
    return (bits - (index + 2) * _STEP) & _MASK


class Streams:
    """Those of one module."""

    def __init__(self, module: nn.Module, mesh: Mesh, name: AxisName) -> None:
        self.mesh, self.name = mesh, name
        self._names = frozenset(axes_in(name))
        self._mark = _MARK << 4 | zlib.crc32(repr((name, mesh.size_of(name))).encode()) & 15
        self._parts = [part for part in module.modules() if _draws(part)]
        self.seen = False
        """The module has drawn, though nothing in it looked like that."""
        self.used = False
        """They were in use: a layer has something to do."""
        self._calls = 0
        self._before: Any = None
        self._along: frozenset[str] | None = None

    # --------------------------------------------------------------------------------------------------- generators

    def _generators(self) -> list[torch.Generator]:
        found = [torch.default_generator]
        device = self.mesh.device
        if device.type not in ("cpu", "meta"):
            module: Any = torch.get_device_module(device)
            own = getattr(module, "default_generators", ())
            if own:
                found.append(own[device.index or 0])
        return found

    def _read(self) -> tuple[int, int]:
        """Kind and bits; 0 and 0 where the generator has another seed than ours."""
        seed = torch.default_generator.initial_seed()
        if seed >> _BITS + 2 != self._mark:
            return 0, 0
        return seed >> _BITS & 3, seed & _MASK

    def _write(self, kind: int, bits: int) -> None:
        seed = (self._mark << 2 | kind) << _BITS | bits
        for generator in self._generators():
            generator.manual_seed(seed)

    def make_equal(self) -> None:
        """The generators of all ranks along the axis go on as that of index 0."""
        axis = self.mesh.axis(self.name)
        with paused(), _torch.outside_transforms(), _torch.without_modes(), torch.no_grad():
            for generator in self._generators() if axis.size > 1 else ():
                state = generator.get_state()
                there = state if axis.link.check_device(state.device) is None else state.to(self.mesh.device)
                first = broadcast(there, self.name, mesh=self.mesh).to(state.device)
                if axis.own_index:
                    generator.set_state(first)

    # -------------------------------------------------------------------------------------------------- in a forward

    def begin(self, training: bool) -> bool:
        """The module's forward begins; whether :meth:`end` is to be called."""
        if torch.compiler.is_compiling() or not (training or any(part.training for part in self._parts)):
            return False
        if not (self._parts or self.seen):
            self._calls += 1
            if self._calls > 8 and self._calls % 16:  # a look costs as much as a small layer
                return False
            self._before = torch.default_generator.get_state()
            return True
        kind, bits = self._read()
        if kind in (_WHOLE, _CUT):  # the module around this one has begun
            return False
        self.used, self._along = True, here.draws_along
        if kind == 0:
            bits = sync_seed(self.name, mesh=self.mesh) & _MASK
        self._write(_WHOLE, _scrambled(bits, _NEXT))
        self._tell(_WHOLE)
        return True

    def end(self) -> None:
        """It has ended, in one way or another."""
        if self._before is not None:
            with _torch.without_modes(), _torch.outside_transforms():
                self.seen = not torch.equal(self._before, torch.default_generator.get_state())
            self._before = None
            return
        kind, bits = self._read()
        if kind:
            self._write(_REST, _scrambled(self._common(kind, bits), _NEXT))
        self._tell(0)

    def _common(self, kind: int, bits: int) -> int:
        return _unscrambled(bits, self.mesh.axis(self.name).index) if kind == _CUT else bits

    def cut(self) -> None:
        """What follows is computed of what is cut."""
        if self.used and not torch.compiler.is_compiling():
            kind, bits = self._read()
            if kind == _WHOLE:
                self._write(_CUT, _scrambled(bits, self.mesh.axis(self.name).index))
                self._tell(_CUT)

    def whole(self) -> None:
        """What follows is computed of what is the same on all ranks."""
        if self.used and not torch.compiler.is_compiling():
            kind, bits = self._read()
            if kind == _CUT:
                self._write(_WHOLE, _scrambled(self._common(kind, bits), _NEXT))
                self._tell(_WHOLE)

    def has_drawn_apart(self) -> bool:
        """Whether numbers that differ between ranks were drawn since what follows is computed of what is cut."""
        if not self.used or torch.compiler.is_compiling() or self._read()[0] != _CUT:
            return False
        with _torch.without_modes(), _torch.outside_transforms():
            fresh = [torch.Generator(each.device).manual_seed(each.initial_seed()) for each in self._generators()]
            states = [(each.get_state(), own.get_state()) for each, own in zip(fresh, self._generators(), strict=True)]
            return not all(torch.equal(x, y) for x, y in states)

    def _tell(self, kind: int) -> None:
        """Who checks types knows along which axes random functions draw differently."""
        if here.watcher is None:
            return
        along = self._along
        if kind == _WHOLE and along is None:
            along = frozenset(self.mesh.axis_names) - self._names
        elif kind == _CUT and along is not None:
            along = along | self._names
        here.draws_along = along


# ------------------------------------------------------------------------------------------------- what looks like it

_RANDOM = frozenset((
    "alpha_dropout", "bernoulli", "bernoulli_", "dropout", "dropout1d", "dropout2d", "dropout3d", "exponential_",
    "feature_alpha_dropout", "gumbel_softmax", "multinomial", "normal_", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "randperm", "rrelu", "uniform_",
))  # fmt: skip


def _draws(part: nn.Module) -> bool:
    """Whether a module looks as if it drew random numbers in training."""
    dropping = [value for name, value in vars(part).items()
                if isinstance(value, (int, float)) and not isinstance(value, bool)
                and (("drop" in name.lower()) or (name == "p" and "drop" in type(part).__name__.lower()))]  # fmt: skip
    if dropping:
        return any(value > 0 for value in dropping)
    for kind in type(part).__mro__:
        if kind is nn.Module:
            return False
        codes = [getattr(inspect.unwrap(value), "__code__", None) for name, value in vars(kind).items()
                 if not any(part in name for part in ("init", "reset"))]  # fmt: skip
        if not kind.__module__.startswith("torch.") and any(_names_one(code) for code in codes if code is not None):
            return True
    return False


def _names_one(code: CodeType) -> bool:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return not _RANDOM.isdisjoint(code.co_names) or any(_names_one(each) for each in inner)
