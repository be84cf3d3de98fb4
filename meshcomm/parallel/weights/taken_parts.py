"""What a rank takes of whole tensors: found and checked first, then memory is made where there is none, then filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshcomm.errors import fail, names
from meshcomm.parallel.checkpoint.parts import Named, named, state_names
from meshcomm.parallel.cut_parameters import known_around
from meshcomm.parallel.global_places import Spread
from meshcomm.parallel.later_values import end_waiting, has_no_values, has_values, made_again, make_room
from meshcomm.parallel.weights.whole_tensors import COUNTER, Boxes, Whole


class _Take(NamedTuple):
    """A tensor of the module, and under which name the source has it."""

    name: str
    x: Tensor
    spread: Callable[[Tensor], Spread]
    """Where what is shaped like it lies in the whole."""


class Loading:
    """One load. All that can be wrong is said before :meth:`fill`, which changes the module."""

    def __init__(
        self, where: str, module: nn.Module, source: Whole, groups: Mapping[str, Sequence[str]], device: torch.device
    ) -> None:
        """``groups``: each name in the module's ``state_dict``, and the others of what stands there."""
        self._where, self._module, self._source, self._device = where, module, source, device
        self._takes: list[_Take] = []
        self._rest: dict[str, _Take | str] = {}
        """By names in the ``state_dict``: what ``load_state_dict`` shall take."""
        self._zeros: list[Tensor] = []
        here, clean, there = named(module, later=True), state_names(module), {*source.names}
        self._empty: list[str] = []
        wrong: list[str] = []
        seen: set[int] = set()
        for given in module.state_dict():
            name = clean(given)
            found_as = next((each for each in (name, *groups[name]) if each in there), None)
            x: Tensor | None = here.params.get(name)
            x = _buffer(module, given) if x is None else x
            if found_as is None:
                if x is not None and has_no_values(x):
                    (self._zeros.append(x) if name.endswith(COUNTER) else self._empty.append(name))
            elif x is None:
                self._rest[given] = found_as
            elif id(x) not in seen:
                seen.add(id(x))
                self._take(here, given, name, found_as, x, wrong)
        if wrong:
            more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            fail(where, f"{'; '.join(wrong[:4])}{more}.", fix="the state_dict of the module on one rank")
        order = {name: at for at, name in enumerate(source.names)}
        self._takes.sort(key=lambda take: order[take.name])

    def _take(self, here: Named, given: str, name: str, found_as: str, x: Tensor, wrong: list[str]) -> None:
        kind, is_param = self._source.kind(found_as), name in here.params
        spread = here.place(x).of if is_param else Spread.whole
        shape = tuple(spread(x).shape)
        if kind is None:
            value = self._source.plain(found_as)
            fail(self._where, f"{name!r} is no tensor but {type(value).__name__}.", fix="the whole tensor")
        if kind.shape != shape:
            wrong.append(f"{name!r} has shape {kind.shape}, the {'parameter' if is_param else 'buffer'} {shape}")
        elif not torch.can_cast(kind.dtype, x.dtype):
            wrong.append(f"{name!r} is {kind.dtype}, which does not become {x.dtype} of itself")
        elif _loads_itself(self._module.get_submodule(given.rpartition(".")[0])):
            self._rest[given] = _Take(found_as, x, spread)
        else:
            self._takes.append(_Take(found_as, x, spread))

    def check(self) -> None:
        """See that all will have values, and that what will be read is whole."""
        if self._empty:
            fix = "give them, too: the module was made on the meta device, and nothing else gives them values"
            what = f"there are no values for {len(self._empty)} tensors."
            fail(self._where, what, got=names(self._empty[:4]), fix=fix)
        self._made = made_again(self._where, self._module, self._device)
        if isinstance(self._source, Boxes):
            self._source.check([(take.name, take.spread(take.x).boxes) for take in self._takes])

    @torch.no_grad()
    def fill(self) -> None:
        """Make memory for what has none, and copy; what has a way of its own to be loaded goes that way."""
        theirs = [each for each in self._rest.values() if isinstance(each, _Take)]
        for x in (*(take.x for take in (*self._takes, *theirs)), *self._zeros):
            if x.is_meta:
                make_room(x, self._device)
        for unsaved, value in self._made:
            vars(unsaved.owner)["_buffers"][unsaved.key] = value
        for x in self._zeros:
            has_values(x.zero_())
        for take in self._takes:
            self._source.fill(take.name, take.spread(take.x).boxes)
        rest = {given: self._value(each) for given, each in self._rest.items()}
        self._module.load_state_dict(rest, strict=False)
        for take in (*self._takes, *theirs):
            has_values(take.x)
        end_waiting({*self._module.modules(), *known_around(self._module)})

    def _value(self, given: _Take | str) -> Any:
        """What a ``load_state_dict`` takes."""
        if isinstance(given, str):
            return self._source.plain(given)
        part = torch.empty_like(given.x, device="cpu")
        self._source.fill(given.name, given.spread(part).boxes)
        return part


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    """A buffer by its name in a ``state_dict``; None for what is none."""
    try:
        return module.get_buffer(name)
    except AttributeError:
        return None


def _loads_itself(part: nn.Module) -> bool:
    """Whether its class takes a ``state_dict`` in a way of its own; torch's do so for what old files lack alone."""
    way = "_load_from_state_dict"
    return any(way in vars(kind) and not kind.__module__.startswith("torch.nn.modules.") for kind in type(part).__mro__)
