"""Fully sharded parameters for an ``nn.Module``.

n = size of the axis, p = number of elements of all parameters, u = of the largest unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshcomm import _torch
from meshcomm.collectives import check
from meshcomm.collectives.agree import agree
from meshcomm.collectives.broadcast import broadcast, take_from
from meshcomm.collectives.one_rank import scatter
from meshcomm.errors import fail, names
from meshcomm.mesh import Axis, AxisName, Mesh
from meshcomm.parallel.alike import refuse_other_modules
from meshcomm.parallel.cut_parameters import (
    Flat,
    Part,
    all_known,
    checked_module,
    know,
    know_as,
    known_around,
    refuse_copies,
    refuse_overlap,
)
from meshcomm.parallel.cut_states import mark_states
from meshcomm.parallel.data.means import checked_mean, mean_of
from meshcomm.parallel.data.replica import Grads
from meshcomm.parallel.fsdp import from_meta
from meshcomm.parallel.fsdp.flat_buffers import Layout
from meshcomm.parallel.fsdp.groups import Group
from meshcomm.parallel.fsdp.slots import Door, Policy, Slot
from meshcomm.parallel.fsdp.state import all_matched
from meshcomm.parallel.fsdp.units import Sharded, Unit, is_sharded, owner_of, register, sharded_of
from meshcomm.parallel.later_values import wait_for_values
from meshcomm.parallel.optimizers.gradient_dtypes import refuse_narrower, watch_wide_gradients
from meshcomm.parallel.optimizers.over_parts import watch_steps
from meshcomm.parallel.stand_ins import Around, follow_recurrent, refuse_renormalised
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.threads.scheduler import claim

M = TypeVar("M", bound="nn.Module | list[nn.Module] | tuple[nn.Module, ...]")
Choice = str | type[nn.Module] | nn.Module


@Op("fully_shard", composed=True)
def fully_shard(
    module: M,
    axis: AxisName,
    *,
    grads: Grads,
    units: Iterable[Choice] | None = None,
    replica_axis: AxisName | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    accumulate_dtype: torch.dtype | None = None,
    regather: bool = True,
    prefetch: int = 1,
    whole: bool | Collection[str] = False,
    offload: bool = False,
    ignore: Collection[str] = (),
    init: Callable[[nn.Module], object] | None = None,
    sync: bool = True,
    methods: Collection[str] = (),
    mean_over: AxisName | None = None,
    mesh: Mesh | None = None,
) -> M:
    """Keep 1/n of each parameter, its gradient and its optimiser state; gather a unit's parameters when it runs.

    ::

                 forward of a unit                       its backward
        rank 0   shard -> all_gather -> use, let go      all_gather -> gradients -> reduce_scatter -> shard.grad
        rank 1   shard -> all_gather -> use, let go      all_gather -> gradients -> reduce_scatter -> shard.grad

    The module stays what it is: its class, its names in ``state_dict`` and ``named_parameters``, its hooks and its
    Parameter objects, so that optimisers may be made before or after. Each Parameter
    becomes this rank's slice, flat; inside of forward the module sees the whole parameters. Parameters belong to the
    innermost unit that contains all their users; those of no unit are gathered when ``module`` itself runs, and kept
    until backward has used them.

    Parts may be sharded by themselves before, as with FSDP2: ``for block in model.layers: fully_shard(block, ...)`` and
    then ``fully_shard(model, ...)``. They become units of the module, each with the options of its own call (dtypes,
    ``regather``, ``prefetch``, ``offload``, ``whole``; axes and ``grads`` are the same in all), and the rest is of the
    module itself, unless ``units`` says more. The module comes last.

    ``state_dict``, of a part too, has this rank's slices, for this rank: its metadata say which they are, and
    ``load_state_dict`` refuses those of another rank, and whole tensors. What others shall read, files above all, is
    written by :func:`full_state_dict` or :mod:`meshcomm.parallel.checkpoint`; ``save_pretrained``, if the module has
    it, takes ``state_dict=full_state_dict(module)`` and refuses slices.

    Args:
        module: changed in place; or a list of modules, each of which is sharded by itself, as parts of the one around
            them that comes last (``fully_shard([model.norm, model.head], ...)``). Its parameters may be on the meta
            device: then one unit after another is made real, initialised and cut, so that no rank ever holds more than
            its shards and one unit.
        axis: a name, or a tuple of names: the ranks that keep a slice each.
        grads: "sum": gradients are summed, for a loss that you reduce over the ranks (the library's rule). "mean": they
            are averaged over the ranks, for a local loss, as FSDP2 has it. Means over unequal numbers of
            tokens: "sum" and :func:`weighted_mean`.
        units: the submodules that are gathered each by itself: patterns of their names such as "blocks.*", classes, or
            the modules. What has no forward (a ModuleList, a ModuleDict) stands for its items, and so does a Sequential
            that is not in a list. None: the items of every ModuleList that is in no other one and is not named experts:
            a unit must run on all ranks or on none.
        replica_axis: ranks along it keep equal shards (HSDP), and gradients are reduced over it after ``axis``.
        param_dtype: parameters are gathered and used in this dtype, and floating inputs of units are cast to it;
            shards, gradients and the optimiser keep their own.
        reduce_dtype: gradients are reduced in this dtype; by default that in which they were computed.
        accumulate_dtype: gradients of microbatches are added up in it, such as ``torch.float32`` of bfloat16: under
            :func:`no_sync`, and in ``.grad``, which has it (``param.grad_dtype``) where parameters are narrower. They
            are reduced in it, too, unless ``reduce_dtype`` says otherwise. Adam and its kin, and fused steps, see them
            rounded to the dtype of the parameter, as torch's take no others. By default they are added up under
            ``no_sync`` in the dtype in which they are reduced, and in ``.grad`` in that of the parameter. Compiled with
            ``fullgraph=True`` each reduction ends in the dtype of the parameter.
        regather: backward gathers a unit's parameters again; otherwise autograd keeps them.
        prefetch: how many units are gathered ahead, in the order of the last pass; 0: none.
        whole: True, or patterns of names of units: of these each parameter is kept whole by one rank, for optimisers
            that need matrices (Muon). On the others it has shape [0]. A unit is sent as n times what its fullest rank
            has, so units shall have many parameters.
        offload: shards, gradients and optimiser state stay on the CPU, and units are gathered on the mesh's device.
        ignore: patterns of names of parameters that stay as they are, as parts do that were sharded over another axis
            before.
        init: called with each submodule that has parameters or buffers on the meta device, by default its
            ``reset_parameters()``. All ranks draw the same random numbers, whatever the mesh. Where one has no such
            method, or ``tensor_parallel`` has cut it already, nothing is initialised: :func:`load_full_state_dict`
            gives the values before the module runs.
        sync: parameters and buffers become those of index 0. Without it they must be equal on all ranks already.
        methods: names of methods of units (and of ``module``) that gather as forward does.
        mean_over: the axes over whose ranks the loss is a mean, where these are not the ones that gradients are reduced
            over: of experts, the axes of the tokens that all_to_all brings, ``("fsdp", "ep")``. By default those of the
            module around this one that is sharded over more axes, or ``axis`` and ``replica_axis``. Where neither
            says it, and an input has just come by all_to_all over another axis, that is an error.
        mesh: the current mesh by default.

    Returns: ``module``.

    Backward: reduce_scatter per unit while backward goes on, then all_reduce over ``replica_axis``; waited for at its
    end. A parameter without a gradient in a unit that has some gets zeros. Double backward works: buffers are then
    kept. Backward raises if parameters have changed since forward.

    Cost: each rank receives (n-1)/n of p in forward, of p in backward (not without ``regather``), and sends (n-1)/n of
    the gradients. Memory: p/n, and between forward and backward nothing of the units; while one runs u, and u for each
    unit that is gathered ahead.

    Under ``torch.compile(fullgraph=True)`` units gather inside of the graph, whose backward gathers them again;
    otherwise graphs end where a unit begins. In one graph nothing is gathered ahead but by the compiler; ``offload``
    and :func:`no_sync` do not go into it.

    Raises:
        MeshError: no such axis; a replica axis that has a part of the other one; flags that are no bools, patterns that
            are no lists; a choice that matches nothing; a module that is sharded already, or within one that is, or
            that is data parallel; parts that were sharded in another way; a weight that one of them shares; a parameter
            that ``tensor_parallel`` has cut along the same axis, or that is no plain dense tensor; an embedding with
            sparse gradients or ``max_norm``. On all ranks: a module that differs between them in
            classes, or parameters in names, dtypes, shapes or whether they are trained. In forward: a parameter that is
            written in place.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import fully_shard
        >>> mesh = mc.make_mesh({"fsdp": 2})
        >>> def main():
        ...     model = fully_shard(torch.nn.Linear(8, 2, bias=False), "fsdp", grads="mean", mesh=mesh)
        ...     model(torch.full((1, 8), 1.0 + mesh.rank)).sum().backward()
        ...     return model.weight.shape, model.weight.grad[:2].tolist()
        >>> mc.launch(main, ranks=2)
        [(torch.Size([8]), [1.5, 1.5]), (torch.Size([8]), [1.5, 1.5])]

    Source: ZeRO stage 3; torch's ``fully_shard``, whose result it is with ``grads="mean"``.
    """
    where = "fully_shard"
    if isinstance(module, (list, tuple)):
        for part in _checked_list(module):
            fully_shard(
                part, axis, grads=grads, units=units, replica_axis=replica_axis,
                param_dtype=param_dtype, reduce_dtype=reduce_dtype, accumulate_dtype=accumulate_dtype,
                regather=regather, prefetch=prefetch, whole=whole, offload=offload, ignore=ignore, init=init, sync=sync,
                methods=methods, mean_over=mean_over, mesh=mesh,
            )  # fmt: skip
        return module
    checked_module(where, module)
    ax = check.axis_of(where, axis, mesh)
    if replica_axis is not None:
        check.apart(where, ax, replica_axis, "replica_axis")
    replica = None if replica_axis is None else check.axis_of(where, replica_axis, mesh)
    if grads not in ("sum", "mean"):
        fail(where, f"grads={grads!r}.", fix='"sum" if you reduce the loss over the ranks, "mean" for a local loss')
    checked_mean(where, grads, ax.mesh, mean_over)
    if not check.whole_number(prefetch) or prefetch < 0:
        fail(where, f"prefetch={prefetch!r} is not a number of units.", fix="0 or more")
    kept_whole = () if isinstance(whole, bool) else whole
    _checked_kinds(
        {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "accumulate_dtype": accumulate_dtype},
        {"regather": regather, "offload": offload, "sync": sync},
        {"ignore": ignore, "methods": methods, "whole": kept_whole},
    )
    if init is not None and not callable(init):
        fail(where, f"init is not callable but {type(init).__name__}.", fix="a function of a module, or None")
    refuse_copies(where, module, "fully_shard(..., replica_axis=) in place of it; a data_parallel part before")
    claim(module, where)
    refuse_renormalised(where, module)
    apart, before = _sharded_parts(module, ax)
    taken = {inner for part in before.values() for inner in part.modules()}
    _refuse_narrower(module, accumulate_dtype, param_dtype, ignore, apart | taken)
    chosen = {name: part for name, part in _chosen(module, () if before and units is None else units, methods).items()
              if part not in apart and part not in taken}  # fmt: skip
    all_matched(where, "whole", kept_whole, chosen)
    known = {name for name in methods if any(hasattr(part, str(name)) for part in chosen.values())}
    all_matched(where, "methods", methods, known)
    empty = from_meta.parts_on_meta(module) - taken
    if init is None and not from_meta.values_come_later(module, empty):
        init = from_meta.reset
    device = ax.mesh.device if offload else _device(module, ax)
    policy = Policy(ax, replica, grads, param_dtype, reduce_dtype, accumulate_dtype, prefetch, device, offload)
    owner = Sharded(policy, torch.empty(0, device=policy.device))
    _refuse_other_ways(before, policy, mean_over)
    plan, doors = _owned(module, chosen, ignore, apart | taken)
    params = [slot.param for slots in plan.values() for slot in slots]
    own = {*map(id, params)}
    for over in policy.axes:
        refuse_overlap(where, module, over, own)
    for over in policy.axes:
        mine = [(slot.name, slot.param) for slots in plan.values() for slot in slots]
        refuse_other_modules(where, module, mine, over, apart | taken)
    for part, door in doors.items():
        _torch.set_own_parameters(part, door)
    real = {name: any(not slot.param.is_meta for slot in slots) for name, slots in plan.items()}
    seed = _shared_seed(policy) if init is not None and any(param.is_meta for param in params) else 0
    made: dict[str, list[Group]] = {}
    loads = [0] * ax.size
    units_of = {*chosen.values(), *before.values()}
    for number, (name, part) in enumerate(reversed(chosen.items())):  # the root last: it may share what units use
        inside = [each for each in from_meta.parts_of_unit(part, units_of) if each in empty]
        from_meta.fill(inside, params, policy.device, init, seed + number)
        keep = whole if isinstance(whole, bool) else any(fnmatchcase(name, pattern) for pattern in whole)
        said = f"unit {name!r} of {type(module).__name__}" if name else f"{type(module).__name__} itself"
        made[name] = _groups(owner, plan[name], keep, sync and real[name], loads, said)
    if sync:
        _share_buffers(module, policy)
    for name, part in chosen.items():
        unit = Unit(owner, name, part, made[name], regather, policy)
        owner.units.append(unit)
        _attach(unit, part, methods)
    know(module, ax.mesh, {id(slot.param): _part(ax, group, at, slot) for group, at, slot in owner.slots()})
    for name, part in before.items():
        owner.take_in(owner_of(where, part), name)
        know_as(part, name, where, ax.name)
    place = {part: at for at, part in enumerate(module.modules())}
    owner.units.sort(key=lambda unit: place[unit.module])
    for part in _entrances(module, {unit.module for unit in owner.units}, apart | taken):
        owner.entrances.append(part.register_forward_pre_hook(owner.enter_part, prepend=True))
        owner.entrances.append(part.register_forward_hook(owner.leave_part, always_call=True))
    for part in module.modules():
        if isinstance(part, nn.RNNBase) and part not in apart and part not in taken:
            follow_recurrent(part)
    register(module, owner)
    mark_states(module)
    watch_steps()
    if accumulate_dtype is not None:
        watch_wide_gradients()
    wait_for_values(module, where)
    owner.mean = mean_of(module, grads, ax.mesh, tuple(over.name for over in policy.axes), mean_over)
    return module


def _checked_list(parts: Sequence[object]) -> Sequence[nn.Module]:
    """Modules that have nothing in common."""
    whose: dict[int, int] = {}
    for at, part in enumerate(parts):
        checked_module("fully_shard", part)
        assert isinstance(part, nn.Module)
        for each in (part, *part.parameters()):
            if whose.setdefault(id(each), at) != at:
                what = f"parts {whose[id(each)]} and {at} of the list share a parameter, or are one."
                fail("fully_shard", what, fix="leave them to the module around them, which gathers its own at once")
    if not parts:
        fail("fully_shard", "a list of no modules.", fix="the parts that are to be sharded")
    return [part for part in parts if isinstance(part, nn.Module)]


def _checked_kinds(dtypes: Mapping[str, object], flags: Mapping[str, object], lists: Mapping[str, object]) -> None:
    """Options are what their names say."""
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            fail("fully_shard", f"{name}={dtype!r} is not a floating dtype.", fix="such as torch.bfloat16")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            fail("fully_shard", f"{name}={flag!r} is not a bool.", fix="True or False")
    for name, patterns in lists.items():
        if isinstance(patterns, str) or not isinstance(patterns, Collection):
            fail("fully_shard", f"{name}={patterns!r} is not a list of patterns.", fix="such as ['*.bias']")


def _refuse_narrower(
    module: nn.Module,
    dtype: torch.dtype | None,
    used: torch.dtype | None,
    ignore: Collection[str],
    apart: Collection[nn.Module],
) -> None:
    """MeshError if gradients cannot be added up in ``dtype``, of what is of the module's own."""
    others = {id(p) for part in apart for p in part.parameters()}
    own = {name: p for name, p in module.named_parameters() if id(p) not in others}
    ignored = {name for name in own if any(fnmatchcase(name, pattern) for pattern in ignore)}
    refuse_narrower("fully_shard", dtype, {name: p for name, p in own.items() if name not in ignored}, used)


# ----------------------------------------------------------------------------------------------------- what is whose


def _device(module: nn.Module, axis: Axis) -> torch.device:
    return next((param.device for param in module.parameters() if not param.is_meta), axis.mesh.device)


def _chosen(module: nn.Module, units: Iterable[Choice] | None, methods: Collection[str]) -> dict[str, nn.Module]:
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


def _sharded_parts(module: nn.Module, axis: Axis) -> tuple[set[nn.Module], dict[str, nn.Module]]:
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


def _refuse_other_ways(before: Mapping[str, nn.Module], policy: Policy, mean_over: AxisName | None) -> None:
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
    kind = type(param)
    own = issubclass(kind, nn.Parameter) and kind.__torch_function__ == nn.Parameter.__torch_function__
    is_number = kind is nn.Parameter or param.is_floating_point() or param.is_complex()
    return own and is_number and not nn.parameter.is_lazy(param) and param.layout is torch.strided


def _owned(
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
                     fix="shard all modules that share it in one call; units= says what is gathered alone")  # fmt: skip
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


def _groups(owner: Sharded, slots: list[Slot], whole: bool, sync: bool, loads: list[int], said: str) -> list[Group]:
    """Cut the parameters of a unit."""
    policy = owner.policy
    kinds: dict[tuple[torch.dtype, bool], list[Slot]] = {}
    for slot in slots:
        kinds.setdefault((slot.param.dtype, slot.param.requires_grad), []).append(slot)
    groups = []
    for members in kinds.values():
        tensors = [slot.param.detach() for slot in members]
        layout = Layout([x.shape for x in tensors], policy.axis.size, whole=whole, loads=loads)
        with torch.no_grad():
            shard = _cut(tensors, layout, policy, sync)
            stored = layout.row(policy.axis.index).total
            shard = shard[:stored].clone() if stored < shard.numel() else shard
        shard = shard.cpu() if policy.offload else shard
        for slot in members:
            slot.param.grad = None  # of this rank's own pass, and of the whole
        groups.append(Group(owner, members, layout, shard, said))
    return groups


def _cut(tensors: list[Tensor], layout: Layout, policy: Policy, sync: bool) -> Tensor:
    """This rank's shard; it may be as long as the chunk."""
    axis, mesh, rows = policy.axis, policy.axis.mesh, None
    if not sync:
        return layout.stored_of(tensors, axis.index).to(policy.device)
    if axis.index == 0:
        rows = layout.buffer.join(tensors, tensors[0]).view(axis.size, layout.chunk).to(policy.device)
    like = torch.empty(1, layout.chunk, dtype=tensors[0].dtype, device=policy.device)
    own = scatter(rows, axis.name, src=0, like=like, mesh=mesh)[0]
    return own if policy.replica is None else broadcast(own, policy.replica.name, src=0, mesh=mesh)


def _share_buffers(module: nn.Module, policy: Policy) -> None:
    buffers = [each for each in module.buffers() if not each.is_meta]
    for axis in policy.axes:
        take_from(0, buffers, axis)


def _part(axis: Axis, group: Group, at: int, slot: Slot) -> Part:
    """What this rank keeps of a parameter, for who asks how it is cut."""
    ranges = tuple(group.layout.range_of(at, index) for index in range(axis.size))
    how = Flat(group.layout.entries[at].shape, *ranges[group.index], ranges)
    return Part(slot.name, "fully_shard", axis.mesh, axis.name, group.index, how)


def _shared_seed(policy: Policy) -> int:
    seed = int(torch.randint(2**48, (), device="cpu").item())
    for axis in policy.axes:
        [[seed]] = agree([seed], axis, 0)
    return seed


# -------------------------------------------------------------------------------------------------- the hooks


class _Entry:
    """Where a unit is called: gathers before, casts what goes in, and lets go after. It is copied with the module."""

    def __init__(self, unit: Unit, dtype: torch.dtype | None) -> None:
        self.unit, self.dtype = unit, dtype

    def _cast(self, tree: Any) -> Any:
        leaves, spec = _torch.tree_flatten(tree)
        cast = [x.to(self.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves]
        return _torch.tree_unflatten(cast, spec)

    def before_and_cast(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward begins: a hook."""
        self.unit.before(module, args)
        return self._cast(args), self._cast(kwargs)

    def call(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Another method."""
        try:
            self.unit.before(None, args)
            return method(*args, **kwargs) if self.dtype is None else method(*self._cast(args), **self._cast(kwargs))
        finally:
            self.unit.after()


def _entrances(module: nn.Module, units: set[nn.Module], apart: set[nn.Module]) -> Iterator[nn.Module]:
    """Parts outside of the units that may be called by themselves, such as an encoder: those around units, and what
    stands beside them.
    """
    holders = {part for name, part in module.named_modules() if not units.isdisjoint({*part.modules()} - {part})}
    for part in {child for holder in holders - units | {module} for child in holder.children()}:
        if part not in units and part not in apart and _is_called(part) and next(part.parameters(), None) is not None:
            yield part


def _attach(unit: Unit, module: nn.Module, methods: Collection[str]) -> None:
    """Gather before forward and these methods, and let go after."""
    entry = _Entry(unit, unit.policy.param_dtype)
    if entry.dtype is None:
        module.register_forward_pre_hook(unit.before, prepend=True)
    else:
        module.register_forward_pre_hook(entry.before_and_cast, prepend=True, with_kwargs=True)
    module.register_forward_hook(unit.after, always_call=True)
    for name in methods:
        if callable(getattr(module, name, None)):
            setattr(module, name, Around(entry.call, getattr(module, name)))
