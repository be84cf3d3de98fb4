"""What the ``state_dict`` of a module whose parameters are cut says of them, and what is taken back.

A ``state_dict`` of slices looks like any other one. So that no rank takes the slices of another one, or a whole tensor
for a slice, its metadata, which ``torch.save`` writes and ``load_state_dict`` hands to hooks, say what each slice is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshcomm.errors import fail
from meshcomm.parallel.checkpoint.parts import state_names
from meshcomm.parallel.cut_parameters import Flat, Part, cuts_of, place_of
from meshcomm.parallel.global_places import Place
from meshcomm.parallel.stand_ins import Around

_SLICES = "meshcomm_slices"
_MARKED = "_meshcomm_marks_states"
_LOAD, _WRITE, _READ = "load_state_dict", "save_pretrained", "from_pretrained"


class _Cut(NamedTuple):
    """What is here of a parameter."""

    place: Place
    said: str


def mark_states(module: nn.Module) -> None:
    """Let the ``state_dict`` of a module, of its parts and of copies say what slices are, and refuse others' slices."""
    for each in module.modules():
        if _MARKED not in vars(each) and (each is module or any(cuts_of(inner) for inner in each.modules())):
            _watch(each)


def _watch(module: nn.Module) -> None:
    setattr(module, _MARKED, True)
    module.register_state_dict_post_hook(_say)
    module.register_load_state_dict_pre_hook(_check)
    own = getattr(module, _WRITE, None)
    if callable(own):
        setattr(module, _WRITE, Around(functools.partial(_write, module), own))
    if callable(getattr(module, _READ, None)):
        setattr(module, _READ, _read)


def _cuts(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, _Cut | None]]:
    """Every name of every parameter, and how it is cut, if it is."""
    clean = state_names(module)
    for path, part in module.named_modules(remove_duplicate=False):
        cuts = cuts_of(part)
        for name, p in part.named_parameters(prefix=path, recurse=False, remove_duplicate=False):
            made = cuts.get(name.rpartition(".")[2])
            yield clean(name), p, _Cut(place_of(p, made), _said(made)) if made else None


def _said(parts: Sequence[Part]) -> str:
    said = []
    for part in reversed(parts):
        of = f"index {part.at} of {part.size} along axis {part.axis!r}"
        how = part.how
        if isinstance(how, Flat):
            said.append(f"elements {how.start} to {how.stop} of {list(how.shape)}, {of}")
        else:
            said.append(f"a part of dim {how.dim}, {of}")
    return ", of that ".join(said)


# ------------------------------------------------------------------------------------------------------- both ways


def _say(module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """A hook of ``state_dict``."""
    marks = {name: (cut.place.plain(), cut.said) for name, _, cut in _cuts(module) if cut is not None}
    if marks:
        metadata[_SLICES] = marks


def _check(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:  # fmt: skip
    """A hook of ``load_state_dict``, before anything is changed."""
    marks, clean = metadata.get(_SLICES, {}), state_names(module)
    values = {clean(name[len(prefix) :]): x for name, x in state.items() if name.startswith(prefix)}
    for name, p, cut in _cuts(module):
        x = values.get(name)
        if isinstance(x, Tensor) and not nn.parameter.is_lazy(x):
            place, said = marks.get(name, (None, ""))
            if cut is not None:
                _fits(prefix + name, x, place, said, p, cut)
            elif place is not None and x.shape != p.shape:
                _refuse(f"{prefix + name!r} is a slice ({said}), and the parameter here is whole")


def _fits(name: str, x: Tensor, place: Any, said: str, p: nn.Parameter, cut: _Cut) -> None:
    here = f"here is {cut.said}, of shape {list(p.shape)}"
    if place is not None and place != cut.place.plain():
        _refuse(f"{name!r} is a slice of another rank, or of another mesh ({said}); {here}")
    if x.shape != p.shape:
        whole = "whole, of" if tuple(x.shape) == cut.place.shape else "of"
        _refuse(f"{name!r} is {whole} shape {list(x.shape)}; {here}")


def _refuse(what: str) -> None:
    fix = "each rank the state_dict that it has made itself; or whole tensors (full_state_dict) by load_full_state_dict"
    fail(_LOAD, f"{what}.", fix=f"{fix}; or checkpoint.save and load")


def _write(module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """In place of a module's ``save_pretrained``, as models have it that a hub knows: its files are for others, and so
    have what is whole.
    """
    given = next((x for x in (*kwargs.values(), *args) if _is_state(x)), None)
    for name, p, cut in _cuts(module):
        x = p if given is None else given.get(name)
        if cut is not None and isinstance(x, Tensor) and tuple(x.shape) != cut.place.shape:
            what = f"{name!r} would be written as a slice ({cut.said}), which no other model can read."
            fix = "state = full_state_dict(module, 0), and save_pretrained(folder, state_dict=state) on that rank"
            fail(_WRITE, what, fix=f"{fix}; to go on training: checkpoint.save")
    return own(*args, **kwargs)


def _read(*args: Any, **kwargs: Any) -> Any:
    """In place of a module's ``from_pretrained``, which is its class's and makes another one."""
    fix = "load_full_state_dict(module, folder); or type(module).from_pretrained for another module"
    fail(_READ, "it would make another module, which is not spread over any rank.", fix=fix)


def _is_state(x: Any) -> bool:
    return isinstance(x, Mapping) and any(isinstance(value, Tensor) for value in x.values())
