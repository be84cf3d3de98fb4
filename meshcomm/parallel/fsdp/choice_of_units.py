"""Which parts of a module are gathered by themselves, and to which of them each parameter belongs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from meshcomm import _torch
from meshcomm.axis import Axis, AxisName
from meshcomm.errors import fail, names
from meshcomm.parallel.cut_parameters import all_known, known_around
from meshcomm.parallel.fewer_axes import all_matched
from meshcomm.parallel.fsdp.slots import Door, Policy, Slot
from meshcomm.parallel.fsdp.units import Sharded, is_sharded, owner_of, sharded_of
from meshcomm.parallel.later_values import refuse_lazy

Choice = str | type[nn.Module] | nn.Module


def units_chosen(module: nn.Module, units: Iterable[Choice] | None, methods: Collection[str]) -> dict[str, nn.Module]:
    """The units by name, the module itself first."""
    found: dict[str, nn.Module] = {"": module}
    if units is None:
        found.update(_items_of_lists(module, ""))
        return found
    where = "fully_shard"
    if not isinstance(units, (str, type, nn.Module, Iterable)):
        fail(where, f"units={units!r} is not a list of parts.", fix='patterns such as "blocks.*", classes or modules')
    if isinstance(units, nn.Sequential):  # the parts of a list, not a list of parts that are one
        units = list(units)
    choices = [units] if isinstance(units, (str, type, nn.Module)) else list(units)
    named = {name: part for name, part in module.named_modules() if name}
    picked: set[nn.Module] = set()
    for choice in choices:
        if isinstance(choice, str):
            fits = {name for name in named if fnmatchcase(name, choice) and name.count(".") == choice.count(".")}
        elif isinstance(choice, type):
            fits = {name for name, part in named.items() if isinstance(part, choice)}
        else:
            fits = {name for name, part in named.items() if part is choice}
        if not fits:
            fail(where, f"units: {choice if isinstance(choice, (str, type)) else type(choice).__name__!r} is no part "
                 "of the module.", got=f"parts {names(list(named)[:8])}")  # fmt: skip
        for name in fits:
            items = _items(named[name], methods)
            if not items:
                fail(where, f"units: {name!r} has no forward, and no part that has.", fix="a part that is called")
            picked |= items
    found.update({name: part for name, part in named.items() if part in picked})
    return found


def _items(part: nn.Module, methods: Collection[str]) -> set[nn.Module]:
    """What is called of it: itself or, of a container, which has no forward, the items, and theirs."""
    if _is_called(part) or any(callable(getattr(part, name, None)) for name in methods):
        return {part}
    return {each for child in part.children() for each in _items(child, methods)}


def _is_called(part: nn.Module) -> bool:
    if isinstance(part, torch.jit.ScriptModule):
        return True
    forward = getattr(part.forward, "__func__", part.forward)
    return forward is not nn.Module.forward


def _items_of_lists(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList) and "expert" in name.lower():
            continue  # a rank may call some of them and not others: they are gathered with who calls them
        if not isinstance(module, nn.ModuleList):
            found.update(_items_of_lists(child, f"{prefix}{name}."))
        else:
            called = {each for each in _items(child, ()) if next(each.parameters(), None) is not None}
            inside = child.named_modules(prefix=f"{prefix}{name}")
            found.update({path: part for path, part in inside if part in called})
    return found


def parts_sharded_before(module: nn.Module, axis: Axis) -> tuple[set[nn.Module], dict[str, nn.Module]]:
    """Parts that were sharded over another axis before, and all of theirs: they stay as they are. And by name those
    that were sharded over this one, which become units of the module.
    """
    where, apart, before = "fully_shard", set[nn.Module](), dict[str, nn.Module]()
    inside: set[nn.Module] = set()
    for name, part in module.named_modules():
        owner = sharded_of(part)
        if part in inside:
            continue
        if part is not module and owner is not None:
            inside.update(part.modules())
            if owner.policy.axis.name == axis.name:
                before[name] = part
            else:
                apart.update(part.modules())
        elif is_sharded(part):
            around = [type(each).__name__ for each in known_around(part) if each is not module and sharded_of(each)]
            what = f"{name or 'the module'!r} is sharded already{f', as a part of {around[0]}' if around else ''}."
            fix = (
                "parts that are gathered by themselves first and the module around them last; or that one alone, with "
                "units=; a part that goes over another axis, before"
            )
            fail(where, what, fix=fix)
    return apart, before


def refuse_sharded(where: str, part: nn.Module) -> None:
    """MeshError for a module of a list that is sharded already."""
    if is_sharded(part):
        fail(where, f"a {type(part).__name__} of the list is sharded already.", fix="each module in one call")


def parts_by_owner(before: Mapping[str, nn.Module]) -> Iterator[tuple[Sharded, list[str]]]:
    """Who stands behind parts that were sharded before, each once, and the names of its modules."""
    named = {part: name for name, part in before.items()}
    owners = {id(owner): owner for owner in [owner_of("fully_shard", part) for part in named]}
    for owner in owners.values():
        own = owner.units[0].modules
        missing = [type(part).__name__ for part in own if part not in named]
        if missing:
            one = next(named[part] for part in own if part in named)
            what = f"{one!r} was sharded in one list with a {missing[0]} that is no part of the module."
            fail("fully_shard", what, fix="lists of modules that are parts of the same one")
        yield owner, [named[part] for part in own]


def refuse_other_ways(before: Mapping[str, nn.Module], policy: Policy, mean_over: AxisName | None) -> None:
    """MeshError if parts that become units of a module come to their gradients in another way."""
    for name, part in before.items():
        owner = owner_of("fully_shard", part)
        theirs = owner.policy
        replicas = [None if each.replica is None else each.replica.name for each in (theirs, policy)]
        pairs: dict[str, list[Any]] = {
            "mesh": [theirs.axis.mesh, policy.axis.mesh],
            "grads": [theirs.op, policy.op],
            "replica_axis": replicas,
        }
        if owner.mean is not None and owner.mean.told:
            pairs["mean_over"] = [owner.mean.over, None if mean_over is None else policy.axis.mesh.axes_of(mean_over)]
        for key, (inner, outer) in pairs.items():
            if inner != outer:
                what = f"{name!r} was sharded with {key}={inner!r}, and the module around it is with {outer!r}."
                fail(
                    "fully_shard", what, fix=f"the same {key} in each call: gradients of all of it are reduced together"
                )


def is_plain(param: nn.Parameter) -> bool:
    """Whether a parameter is numbers alone: dense, and of no class that has another meaning of them, though it may be
    of one that only has another name.
    """
    kind = _torch.kind_of(param)
    own = issubclass(kind, nn.Parameter) and kind.__torch_function__ == nn.Parameter.__torch_function__
    is_number = kind is nn.Parameter or param.is_floating_point() or param.is_complex()
    return own and is_number and not nn.parameter.is_lazy(param) and param.layout is torch.strided


def parameters_of_units(
    module: nn.Module, chosen: dict[str, nn.Module], ignore: Collection[str], apart: set[nn.Module]
) -> tuple[dict[str, list[Slot]], dict[nn.Module, Door]]:
    """Each unit's parameters: those of which it is the innermost unit around all users; and the tables to look them up
    in.
    """
    where = "fully_shard"
    unit_of = {part: name for name, part in chosen.items()}
    chains: dict[nn.Parameter, list[tuple[str, ...]]] = {}
    slots: dict[nn.Parameter, Slot] = {}
    doors: dict[nn.Module, Door] = {}
    ignored: set[str] = set()
    others = {param for part in apart for param in dict.values(_torch.own_parameters(part)) if param is not None}
    known = [found for found in map(sharded_of, all_known()) if found is not None]
    others |= {slot.param for found in known for _, _, slot in found.slots()}

    def walk(part: nn.Module, path: str, chain: tuple[str, ...]) -> None:
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and part not in apart:
            fail(where, f"{path[:-1] or 'the module'!r} has sparse gradients, and shards have dense ones.",
                 fix="sparse=False; or data_parallel, which has both")  # fmt: skip
        if part in unit_of:
            chain = (*chain, unit_of[part])
        for name, param in _torch.own_parameters(part).items():
            full = f"{path}{name}"
            pattern = next((each for each in ignore if fnmatchcase(full, each)), None)
            if param is None or pattern is not None:
                ignored.add(pattern or "")
                continue
            if part in apart:
                continue
            if isinstance(part, torch.jit.ScriptModule):
                fail(where, f"{path[:-1] or 'the module'!r} is torch.jit's, which keeps parameters where nothing can "
                     "stand in their place.", fix=f"ignore=['{path}*'], torch.compile, or data_parallel")  # fmt: skip
            if param in others:
                fail(where, f"parameter {full!r} is one of a part that was sharded before.",
                     fix="shard all modules that share it in one call; units= says what is gathered alone; of stages "
                         "of a pipeline, which tie it by name, a copy.deepcopy of each")  # fmt: skip
            refuse_lazy(where, [(full, param)])
            if not is_plain(param):
                fail(where, f"parameter {full!r} is a {type(param).__name__}, not a dense Parameter.",
                     fix=f"exclude it: ignore=[{full!r}]")  # fmt: skip
            if part not in doors:
                doors[part] = Door(_torch.own_parameters(part))
            slot = slots.setdefault(param, Slot(full, param, []))
            if not any(door is doors[part] and site == name for door, site in slot.sites):  # tables may look equal
                slot.sites.append((doors[part], name))
            chains.setdefault(param, []).append(chain)
        for name, child in part.named_children():
            walk(child, f"{path}{name}.", chain)

    walk(module, "", ())
    all_matched(where, "ignore", ignore, ignored)
    plan: dict[str, list[Slot]] = {name: [] for name in chosen}
    for param, slot in slots.items():
        *_, innermost = itertools.takewhile(lambda names: len({*names}) == 1, zip(*chains[param], strict=False))
        plan[innermost[0]].append(slot)
    return plan, doors


def called_outside(roots: Collection[nn.Module], units: set[nn.Module], apart: set[nn.Module]) -> Iterator[nn.Module]:
    """Parts outside of the units that may be called by themselves, such as an encoder: those around units, and what
    stands beside them.
    """
    inside = {part for root in roots for part in root.modules()}
    holders = {part for part in inside if not units.isdisjoint({*part.modules()} - {part})}
    for part in {child for holder in holders - units | {*roots} for child in holder.children()}:
        if part not in units and part not in apart and _is_called(part) and next(part.parameters(), None) is not None:
            yield part
