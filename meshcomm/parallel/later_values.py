"""Modules on the meta device: adaptors cut what has no values yet, and a load makes memory for what a rank keeps.

    torch.device("meta")  ->  tensor_parallel, fully_shard, ...: shapes are cut  ->  load_full_state_dict: values

Until then such a module refuses to run. Buffers that no file has, such as the frequencies of rotary embeddings, are
made again by the module that owns them, or by what initialises it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshcomm.errors import fail, names
from meshcomm.parallel.stand_ins import Around

_WAITS = "_meshcomm_waits"
"""Of a module: what refuses."""
_MOVES = ("to", "to_empty", "cpu", "cuda")
"""Methods that are of no use before."""
_EMPTY = "_meshcomm_has_no_values"
"""Of a tensor: there is memory for it, and nothing in it."""


def has_no_values(x: Tensor) -> bool:
    """Whether nothing was ever written to it."""
    return x.is_meta or _EMPTY in vars(x)


def has_values(x: Tensor) -> None:
    """They have been written."""
    vars(x).pop(_EMPTY, None)


def refuse_lazy(where: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """There is none of torch's lazy modules, whose shapes come with their first batch, among these."""
    lazy = next((name for name, x in named if nn.parameter.is_lazy(x)), None)
    if lazy is not None:
        fail(where, f"{lazy!r} has no shape yet.", fix="run the module once before")


def as_made(tensors: Iterable[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Where these get other memory in inference mode: outside of it, unless they were made in it."""
    if not torch.is_inference_mode_enabled() or any(x.is_inference() for x in tensors):
        return contextlib.nullcontext()
    return torch.inference_mode(False)


def make_room(x: Tensor, device: torch.device) -> None:
    """Memory for a tensor on the meta device, which stays the same object; no values."""
    with as_made([x]):
        room: Tensor = torch.empty_like(x, device=device, requires_grad=False)
        if isinstance(x, nn.Parameter):
            room = nn.Parameter(room, x.requires_grad)
    vars(room).update(vars(x) | vars(room))  # what has no memory keeps there on which device it is
    torch.utils.swap_tensors(x, room)
    vars(x)[_EMPTY] = True


def wait_for_values(module: nn.Module, where: str) -> None:
    """Let the module refuse to run, and to be moved, before its parameters have values."""
    if not any(map(has_no_values, module.parameters())):
        return
    known: _Refusal | None = vars(module).get(_WAITS)
    refusal = vars(module)[_WAITS] = known or _Refusal(where)
    if known:
        known.handle.remove()  # it comes before the hooks of the adaptor that is new
    refusal.look(module)
    refusal.handle = module.register_forward_pre_hook(refusal, prepend=True)
    for name in () if known else _MOVES:
        setattr(module, name, Around(functools.partial(_move, module, where, name), getattr(module, name)))
    if not known:
        module.register_load_state_dict_post_hook(_taken)


def find_marks(module: nn.Module) -> None:
    """Copies of tensors have no marks; the module around them knows which had some."""
    for part in module.modules():
        refusal: _Refusal | None = vars(part).get(_WAITS)
        for name in refusal.names if refusal else ():
            vars(part.get_parameter(name))[_EMPTY] = True


def end_waiting(modules: Iterable[nn.Module]) -> None:
    """Of those of which all has values now."""
    for part in [*modules]:
        refusal: _Refusal | None = vars(part).get(_WAITS)
        if refusal and not refusal.look(part):
            refusal.handle.remove()
            for name in (_WAITS, *_MOVES):
                del vars(part)[name]


class _Refusal:
    """A hook of forward."""

    handle: RemovableHandle

    def __init__(self, where: str) -> None:
        self.where = where
        self.names: list[str] = []

    def look(self, module: nn.Module) -> list[str]:
        """Which parameters have no values."""
        self.names = [name for name, p in module.named_parameters() if has_no_values(p)]
        return self.names

    def __call__(self, module: nn.Module, args: object) -> None:
        find_marks(module)
        empty = self.look(module)
        if not empty:
            end_waiting([module])
            return
        what = f"{type(module).__name__} was made on the meta device, and {len(empty)} of its parameters have no"
        fix = "before it runs parallel.load_full_state_dict(module, state_or_path); or fully_shard(..., init=)"
        fail(self.where, f"{what} values yet.", got=names(empty[:3]), fix=fix)


def _move(module: nn.Module, where: str, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """In place of ``to`` and its like."""
    both = (module.named_parameters(), module.named_buffers())
    empty = [name for each in both for name, x in each if x.is_meta]
    if empty:
        fix = "parallel.load_full_state_dict(module, state_or_path), which makes it on the device of the mesh"
        what = f"{name}() of {type(module).__name__}, of which {len(empty)} tensors are on the meta device: there is"
        fail(where, f"{what} nothing to move.", got=names(empty[:3]), fix=fix)
    return own(*args, **kwargs)


def _taken(module: nn.Module, keys: Any) -> None:
    """A hook of ``load_state_dict``."""
    if not keys.missing_keys:
        for x in module.parameters():
            has_values(x)
        end_waiting(module.modules())


# --------------------------------------------------------------------------------------------- buffers in no state_dict


class Unsaved(NamedTuple):
    """A buffer on the meta device that no ``state_dict`` has."""

    name: str
    owner: nn.Module
    key: str
    """Its name there."""


def unsaved_buffers(module: nn.Module) -> list[Unsaved]:
    """Those of a module."""
    saved = {*module.state_dict()}
    found = []
    for path, part in module.named_modules():
        for key, x in part.named_buffers(recurse=False):
            name = f"{path}.{key}" if path else key
            if x.is_meta and name not in saved:
                found.append(Unsaved(name, part, key))
    return found


def made_again(where: str, module: nn.Module, device: torch.device) -> list[tuple[Unsaved, Tensor]]:
    """Their values; MeshError for those that nothing makes. The module keeps what it has."""
    makers = dict(_makers(module))
    owners: dict[nn.Module, list[Unsaved]] = {}
    for each in unsaved_buffers(module):
        owners.setdefault(each.owner, []).append(each)
    made: list[tuple[Unsaved, Tensor]] = []
    lost: list[Unsaved] = []
    for owner, unsaved in owners.items():
        maker = makers.get(owner)
        found = [] if maker is None else [_filled(owner, unsaved, maker, with_, device) for with_ in (0, 1)]
        for each in unsaved:
            first, second = (values.get(each.key) for values in found) if found else (None, None)
            if first is not None and second is not None and torch.equal(first, second):
                made.append((each, first))
            else:
                lost.append(each)
    if lost:
        what = f"{len(lost)} buffers are on the meta device and in no state_dict, and nothing makes their values again"
        one = f"part.{lost[0].key} = values, for each {type(lost[0].owner).__name__} of module.modules()"
        fix = f"set them as their __init__ does, before the load: {one}"
        fail(where, f"{what}.", got=names([each.name for each in lost[:4]]), fix=fix)
    return made


def _makers(module: nn.Module, above: Callable[[nn.Module], object] | None = None) -> Iterator[Any]:
    """What gives the buffers of a part their values: it itself, or the model around it, which may be of models."""
    own = getattr(module, "_init_weights", None)
    above = own if callable(own) else above
    reset = getattr(module, "reset_parameters", None)
    if callable(reset) and not [*module.parameters(recurse=False)]:
        yield module, lambda part, reset=reset: reset()
    elif above is not None:
        yield module, above
    for child in module.children():
        yield from _makers(child, above)


def _filled(
    owner: nn.Module, unsaved: list[Unsaved], maker: Callable[[nn.Module], object], value: int, device: torch.device
) -> Mapping[str, Tensor]:
    """What the maker writes over this value: what it does not write is not the same for another value."""
    table: dict[str, Tensor | None] = vars(owner)["_buffers"]
    kept = dict(table)
    params = [p for p in owner.parameters(recurse=False) if not has_no_values(p)]
    if params:  # it would give them other values, too
        return {}
    try:
        for each in unsaved:
            x = kept[each.key]
            assert x is not None
            table[each.key] = torch.full_like(x, value, device=device)
        with torch.no_grad(), torch.random.fork_rng([]):
            maker(owner)
        return {each.key: x for each in unsaved for x in [table[each.key]] if x is not None and not x.is_meta}
    except Exception:
        return {}
    finally:
        table.update(kept)
