"""Modules that are gathered as one: what the first of them gathers stays until the last one has run.

::

    forward   first part: all_gather -> use ─ kept ─> last part: use, let go
              in between the modules have their shards, as modules have that do not run
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshcomm.errors import fail
from meshcomm.parallel.cut_parameters import checked_module


class Together(nn.Module):
    """What stands for a list of modules where their parameters are cut; nobody runs it."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        for at, part in enumerate(parts):
            self.add_module(str(at), part)


def modules_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """Those that run: the module itself, or the list that it stands for."""
    return tuple(module.children()) if isinstance(module, Together) else (module,)


def name_around(module: nn.Module, names: Sequence[str]) -> Callable[[str], str]:
    """What a path in a module, or in what stands for a list, is in one around it that has the parts under ``names``."""

    def name(path: str) -> str:
        if not isinstance(module, Together):
            return f"{names[0]}.{path}" if path else names[0]
        at, _, rest = path.partition(".")
        return (f"{names[int(at)]}.{rest}" if rest else names[int(at)]) if path else ", ".join(names)

    return name


def checked_list(where: str, parts: Sequence[object]) -> list[nn.Module]:
    """Modules, none of which is in another one."""
    found: list[nn.Module] = []
    for at, part in enumerate(parts):
        checked_module(where, part)
        assert isinstance(part, nn.Module)
        inside = {*part.modules()}
        for before, other in enumerate(found):
            if other in inside or part in {*other.modules()}:
                what = f"parts {before} and {at} of the list are one, or one is a part of the other."
                fail(where, what, fix="each module once; parts inside of another one by units=, or by a call before")
        found.append(part)
    if not parts:
        fail(where, "a list of no modules.", fix="the parts that are to be sharded")
    return found


class _Kept(NamedTuple):
    """What was gathered, and how."""

    made_of: Any
    views: list[list[Tensor]]
    buffers: Sequence[Tensor]
    use: Any
    token: Tensor | None
    again: Any


class Between:
    """What a unit of several modules keeps while some have run and others have not."""

    __slots__ = ("_buffers", "_kept", "_made_of", "_parts", "_to_run")

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = [part for part in parts if type(part).forward is not nn.Module.forward]
        self._to_run: set[nn.Module] = set()
        self._buffers: Sequence[Tensor] = ()
        self._made_of: Any = None
        self._kept: _Kept | None = None

    def opened(self, unit: Any, buffers: Sequence[Tensor]) -> None:
        """The unit was gathered in forward."""
        self._to_run, self._kept = {*self._parts}, None
        self._buffers, self._made_of = buffers, _state(unit)

    def ended(self, unit: Any, part: nn.Module | None, again: Any) -> None:
        """The forward of a part has ended, and the unit is about to be shut."""
        self._to_run.discard(part)
        if not self._to_run:
            self.forget()
        elif self._kept is None and unit.is_open and self._buffers:
            token = None if unit.use is None else unit.use.token
            self._kept = _Kept(self._made_of, unit.views, self._buffers, unit.use, token, again)
            if unit not in unit.owner.between:
                unit.owner.between.append(unit)

    def taken(self, unit: Any) -> _Kept | None:
        """What the part before has left, if it is what this one would gather."""
        kept = self._kept
        if kept is not None and not _same(kept.made_of, _state(unit)):
            self.forget()
            return None
        return kept

    def forget(self) -> None:
        """Let go of it."""
        self._kept, self._buffers, self._made_of = None, (), None
        self._to_run.clear()


def _state(unit: Any) -> tuple[Any, ...]:
    """What must be as it was for the same views to serve again."""
    shards = [group.checked() for group in unit.groups]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), unit.owner.collects
    return shards, (*modes, unit.version(), [group.needy() for group in unit.groups])


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(map(is_, one[0], other[0])) and one[1] == other[1]
