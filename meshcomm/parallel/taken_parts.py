"""What a rank takes of whole tensors: found and checked first, then memory is made where there is none, then filled."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshcomm.errors import fail, names
from meshcomm.parallel.checkpoint.parts import Named, named, state_names
from meshcomm.parallel.global_places import Spread
from meshcomm.parallel.hub_names import ignored
from meshcomm.parallel.later_values import has_no_values, has_values, made_again, make_room
from meshcomm.parallel.whole_tensors import Boxes, Whole

_COUNTER = "num_batches_tracked"
"""Of batch norm: older files have none, and it is 0 then, as torch has it."""


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
        wrong: list[str] = []
        empty: list[str] = []
        seen: set[int] = set()
        for given in module.state_dict():
            name = clean(given)
            found_as = next((each for each in (name, *groups[name]) if each in there), None)
            x = here.params.get(name)
            if x is None:
                x = _buffer(module, given)
            if found_as is None:
                if x is not None and has_no_values(x):
                    (self._zeros.append(x) if name.endswith(_COUNTER) else empty.append(name))
            elif x is None:
                self._rest[given] = found_as
            elif id(x) not in seen:
                seen.add(id(x))
                self._take(here, given, name, found_as, x, wrong)
        self._refuse(wrong, empty)
        self._made = made_again(where, module, device)
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

    def _refuse(self, wrong: Sequence[str], empty: Sequence[str]) -> None:
        if wrong:
            more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            fail(self._where, f"{'; '.join(wrong[:4])}{more}.", fix="the state_dict of the module on one rank")
        if empty:
            fix = "give them, too: the module was made on the meta device, and nothing else gives them values"
            fail(self._where, f"there are no values for {len(empty)} tensors.", got=names(empty[:4]), fix=fix)

    def check(self) -> None:
        """See that what will be read is whole."""
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
    """Whether its class takes a ``state_dict`` in a way of its own, which torch's do not, but for what old files lack."""
    way = "_load_from_state_dict"
    return any(way in vars(kind) and not kind.__module__.startswith("torch.nn.modules.") for kind in type(part).__mro__)


# ------------------------------------------------------------------------------------------------------------- names


def refuse_names(where: str, module: nn.Module, source: Whole, groups: Mapping[str, Sequence[str]]) -> None:
    """RuntimeError, as of ``load_state_dict``, for names that one side lacks; ``groups``: of all ranks."""
    there, known = {*source.names}, {*groups}
    for each in groups.values():
        known.update(each)
    missing = [name for name, others in groups.items() if not there & {name, *others}
               and not name.endswith(_COUNTER) and not _any(ignored(module, "missing"), name)]  # fmt: skip
    odd = [name for name in source.names if name not in known and not _any(ignored(module, "unexpected"), name)]
    if missing or odd:
        said = [f"Missing key(s): {_few(missing)}."] if missing else []
        said += [f"Unexpected key(s): {_few(odd)}."] if odd else []
        fix = _renamed(missing, odd) or "the state_dict of this module on one rank; or strict=False"
        fail(where, f"the names are not those of {type(module).__name__}. {' '.join(said)}", fix=fix, kind=RuntimeError)


def _few(found: Sequence[str], most: int = 8) -> str:
    return names(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def _any(patterns: Sequence[re.Pattern[str]], name: str) -> bool:
    return any(pattern.search(name) for pattern in patterns)


def _renamed(missing: Sequence[str], odd: Sequence[str]) -> str:
    """What to do, if all that is missing is there under a prefix, or without one."""
    for here, there in ((missing, {*odd}), (odd, {*missing})):
        for name in there if here else ():
            prefix = name.removesuffix(here[0])
            if prefix.endswith(".") and name != prefix and all(f"{prefix}{each}" in there for each in here):
                if here is missing:
                    way = f"{{name.removeprefix({prefix!r}): x for name, x in state.items()}}"
                    *outer, last = prefix[:-1].split(".")
                    return f"names begin with {prefix!r} there: {way}" + (
                        "" if outer else f", or load into torch.nn.ModuleDict({{{last!r}: module}})"
                    )
                return f"load into its part: load_full_state_dict(module.{prefix[:-1]}, ...)"
    return ""
