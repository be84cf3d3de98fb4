"""Units of a module that is on the meta device: one after another gets memory, and values that are the same on every
rank, before it is cut.

A parameter that several units use belongs to none of them but to one around them. The first that is filled makes
room for it, and each of them initialises it: the last one, which is the one around them if it uses it, for good.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from meshcomm import _torch
from meshcomm.parallel.cut_parameters import parts_of
from meshcomm.parallel.later_values import has_values, make_room

Init = Callable[[nn.Module], object]


def reset(part: nn.Module) -> None:
    """What initialises a part if nobody says what does."""
    part.reset_parameters()  # type: ignore[operator]


def parts_on_meta(module: nn.Module) -> set[nn.Module]:
    """Those that have a parameter or a buffer of their own there."""
    return {part for part in module.modules() if _is_on_meta(part)}


def values_come_later(module: nn.Module, empty: Collection[nn.Module]) -> bool:
    """Whether not all parts that are on the meta device can be initialised: one has no ``reset_parameters``, or a part
    of a parameter that is cut already.
    """
    cut = parts_of(module)
    return any(
        not callable(getattr(part, "reset_parameters", None))
        or any(id(p) in cut for p in part.parameters(recurse=False))
        for part in empty
    )


def fill(
    parts: Collection[nn.Module],
    params: Collection[nn.Parameter],
    device: torch.device,
    init: Init | None,
    seed: int,
) -> None:
    """Make these parts, which were on the meta device, real, and initialise them as every rank does; without ``init``
    values come later. ``params``: those that are cut, theirs and others.
    """
    used = {id(p) for part in parts for p in part.parameters(recurse=False)}
    for param in params:
        if id(param) in used and param.is_meta:
            make_room(param, device)
            if init is not None:
                has_values(param)
    if init is None or not parts:
        return
    for part in parts:
        for key, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(part, key, torch.empty_like(buffer, device=device))
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.no_grad():
        torch.manual_seed(seed)
        for part in parts:
            init(part)


def parts_of_unit(unit: nn.Module, units: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The unit and what is below it in no other unit."""
    seen = {unit}
    todo = [unit]
    while todo:
        part = todo.pop()
        yield part
        for child in reversed([*part.children()]):
            if child not in units and child not in seen:
                seen.add(child)
                todo.append(child)


def _is_on_meta(part: nn.Module) -> bool:
    own = [*_torch.own_parameters(part).values(), *(buffer for _, buffer in part.named_buffers(recurse=False))]
    return any(x is not None and x.is_meta for x in own)
