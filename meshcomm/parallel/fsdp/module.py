"""Fully sharded parameters for an ``nn.Module``.

n = size of the axis, p = number of elements of all parameters, u = of the largest unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshcomm import _torch
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.agree import agree
from meshcomm.collectives.broadcast import broadcast, take_from
from meshcomm.collectives.one_rank import scatter
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.parallel.cut_parameters import (
    Flat,
    Part,
    checked_module,
    know,
    know_as,
    refuse_copies,
    refuse_cut_elsewhere,
)
from meshcomm.parallel.cut_states import mark_states
from meshcomm.parallel.data.means import checked_mean, mean_of
from meshcomm.parallel.data.replica import Grads
from meshcomm.parallel.fewer_axes import all_matched, checked_axes, checked_patterns
from meshcomm.parallel.fsdp import from_meta
from meshcomm.parallel.fsdp.buffers.flat_buffers import Layout
from meshcomm.parallel.fsdp.choice_of_units import (
    Choice,
    called_outside,
    parameters_of_units,
    parts_by_owner,
    parts_sharded_before,
    refuse_other_ways,
    refuse_sharded,
    units_chosen,
)
from meshcomm.parallel.fsdp.groups import Group
from meshcomm.parallel.fsdp.policies import WHERE, Policies
from meshcomm.parallel.fsdp.slots import Policy, Slot
from meshcomm.parallel.fsdp.together import Together, checked_list, modules_of, name_around
from meshcomm.parallel.fsdp.units import Sharded, Unit, register
from meshcomm.parallel.later_values import refuse_lazy, wait_for_values
from meshcomm.parallel.optimizers.gradient_dtypes import refuse_narrower, watch_wide_gradients
from meshcomm.parallel.optimizers.over_parts import watch_steps
from meshcomm.parallel.stand_ins import Around, follow_recurrent, refuse_renormalised
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.dry.options import has_options
from meshcomm.runtime.transports.dry.places import forgotten
from meshcomm.runtime.transports.threads.scheduler import claim
from meshcomm.watch import out_of_sight

M = TypeVar("M", bound="nn.Module | list[nn.Module] | tuple[nn.Module, ...]")


@Op("fully_shard", composed=True)
@has_options
@out_of_sight
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
    axes: Mapping[str, AxisName | tuple[()]] | None = None,
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
    until backward has used them: with ``grads="mean"`` a loss may read them, as ``model.lm_head.weight``.

    Parts may be sharded by themselves before, as with FSDP2: ``for block in model.layers: fully_shard(block, ...)`` and
    then ``fully_shard(model, ...)``. They become units of the module, each with the options of its own call (dtypes,
    ``regather``, ``prefetch``, ``offload``, ``whole``; axes and ``grads`` are the same in all), and the rest is of the
    module itself, unless ``units`` says more. The module comes last.

    ``state_dict``, of a part too, has this rank's slices, for this rank: its metadata say which they are, and
    ``load_state_dict`` refuses those of another rank, and whole tensors. What others shall read, files above all, is
    written by :func:`full_state_dict` or :mod:`meshcomm.parallel.checkpoint`; ``save_pretrained``, if the module has
    it, takes ``state_dict=full_state_dict(module)`` and refuses slices.

    Args:
        module: changed in place; or a list of modules that are one unit, as parts of the one around them that comes
            last (``fully_shard([model.norm, model.head], ...)``): the first that runs gathers for all of them, and what
            it gathered stays until the last has run. They may share parameters; in patterns names begin with the
            module's place in the list. In one graph of ``torch.compile`` each of them gathers. Parameters may be on the
            meta device: then one unit after another is made real, initialised and cut, so that no rank ever holds more
            than its shards and one unit.
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
        axes: patterns of names of parts or parameters, such as ``{"*.experts": "efsdp"}``, and the axes, of ``axis``
            and ``replica_axis``, that these are sharded over in place of ``axis``: those along which they are the
            same, as experts are not along the axis of :func:`experts`. ``()``: over none. Their gradients are reduced
            over these and over ``replica_axis``, if ``tensor_parallel`` or :func:`meshcomm.mark_varying` has not said
            that they differ along it (else they take the values of its index 0), and a "mean" is over the ranks of the
            whole module. What ``mark_varying`` was told to vary along an axis goes over the others.
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
        MeshError: no such axis; a replica axis that has a part of the other one; ``axes`` that are not the module's, or
            of what is cut along them, or that name nothing; flags that are no bools, patterns that
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
    where = WHERE
    if isinstance(module, (list, tuple)):
        parts = checked_list(where, module)
        for part in parts:
            claim(part, where)
            refuse_copies(where, part, "fully_shard(..., replica_axis=) in place of it; a data_parallel part before")
            refuse_sharded(where, part)
        fully_shard(
            Together(parts) if len(parts) > 1 else parts[0], axis, grads=grads, units=units, replica_axis=replica_axis,
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, accumulate_dtype=accumulate_dtype,
            regather=regather, prefetch=prefetch, whole=whole, offload=offload, ignore=ignore, init=init, sync=sync,
            methods=methods, mean_over=mean_over, axes=axes, mesh=mesh,
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
    refuse_cut_elsewhere(where, module)
    refuse_lazy(where, module.named_buffers())
    claim(module, where)
    refuse_renormalised(where, module)
    apart, before = parts_sharded_before(module, ax)
    taken = {inner for part in before.values() for inner in part.modules()}
    _refuse_narrower(module, accumulate_dtype, param_dtype, ignore, apart | taken)
    found = units_chosen(module, () if before and units is None else units, methods)
    chosen = {name: part for name, part in found.items() if part not in apart and part not in taken}
    all_matched(where, "whole", kept_whole, chosen)
    known = {name for name in methods if any(hasattr(part, str(name)) for part in chosen.values())}
    all_matched(where, "methods", methods, known)
    empty = from_meta.parts_on_meta(module) - taken
    if init is None and not from_meta.values_come_later(module, empty):
        init = from_meta.reset
    device = _device(module, ax, offload)
    policy = Policy(ax, replica, grads, param_dtype, reduce_dtype, accumulate_dtype, prefetch, device, offload)
    told = checked_axes(where, axes, ax.mesh, policy.names)
    owner = Sharded(policy, torch.empty(0, device=policy.device))
    refuse_other_ways(before, policy, mean_over)
    together = [*parts_by_owner(before)]
    policies = Policies(module, policy, told, {id(p) for part in apart | taken for p in part.parameters()})
    plan, doors = parameters_of_units(module, chosen, ignore, apart | taken)
    slots_of_all = [slot for slots in plan.values() for slot in slots]
    params = [slot.param for slot in slots_of_all]
    policies.refuse_overlaps(params)
    policies.refuse_others(slots_of_all, apart | taken)
    for part, door in doors.items():
        _torch.set_own_parameters(part, door)
    real = {name: any(not slot.param.is_meta for slot in slots) for name, slots in plan.items()}
    seed = _shared_seed(policy) if init is not None and any(param.is_meta for param in params) else 0
    made: dict[str, list[Group]] = {}
    units_of = {*chosen.values(), *before.values()}
    for number, (name, part) in enumerate(reversed(chosen.items())):  # the root last: it may share what units use
        inside = [each for each in from_meta.parts_of_unit(part, units_of) if each in empty]
        from_meta.fill(inside, params, policy.device, init, seed + number)
        keep = whole if isinstance(whole, bool) else any(fnmatchcase(name, pattern) for pattern in whole)
        said = f"unit {name!r} of {type(module).__name__}" if name else f"{type(module).__name__} itself"
        made[name] = _groups(owner, plan[name], keep, sync and real[name], policies, said)
    if sync:
        _share_buffers(module, policies)
    for name, part in chosen.items():
        unit = Unit(owner, name, part, made[name], regather, policy)
        owner.units.append(unit)
        for each in unit.modules:
            _attach(unit, each, methods)
    made_of = {id(slot.param): _part(group, at, slot) for group, at, slot in owner.slots()}
    know(module, ax.mesh, made_of)
    policies.tell_types(slots_of_all, sync)
    for inner, names in together:
        own, along = inner.units[0].module, {group.policy.axis.name for group, _, _ in inner.slots()}
        owner.take_in(inner, names)
        know_as(modules_of(own), name_around(own, names), where, along)
    place = {part: at for at, part in enumerate(module.modules())}
    owner.units.sort(key=lambda unit: min(place[part] for part in (unit.module, *unit.modules) if part in place))
    runs = {part for unit in owner.units for part in unit.modules}
    for part in called_outside(modules_of(module), runs, apart | taken):
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
    for part in modules_of(module):
        wait_for_values(part, where)
        owner.mean = mean_of(part, grads, ax.mesh, policy.names, mean_over, owner.mean)
    return module


def _checked_kinds(dtypes: Mapping[str, object], flags: Mapping[str, object], lists: Mapping[str, object]) -> None:
    """Options are what their names say."""
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            fail("fully_shard", f"{name}={dtype!r} is not a floating dtype.", fix="such as torch.bfloat16")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            fail("fully_shard", f"{name}={flag!r} is not a bool.", fix="True or False")
    for name, patterns in lists.items():
        checked_patterns("fully_shard", name, patterns)


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


# ------------------------------------------------------------------------------------------------- cutting and sending


def _device(module: nn.Module, axis: Axis, offload: bool) -> torch.device:
    """Where units are gathered: where the module is; of one that is offloaded already on the CPU, that of the mesh."""
    known = (p.device for p in module.parameters() if not p.is_meta and not (offload and p.device.type == "cpu"))
    return next(known, axis.mesh.device)


def _groups(owner: Sharded, slots: list[Slot], whole: bool, sync: bool, policies: Policies, said: str) -> list[Group]:
    """Cut the parameters of a unit."""
    kinds: dict[tuple[torch.dtype, bool, Policy], list[Slot]] = {}
    for slot in slots:
        kinds.setdefault((slot.param.dtype, slot.param.requires_grad, policies.of(slot.param)), []).append(slot)
    groups = []
    for (_, _, policy), members in kinds.items():
        tensors = [slot.param.detach() for slot in members]
        layout = Layout([x.shape for x in tensors], policy.axis.size, whole=whole, loads=policies.loads_of(policy))
        with torch.no_grad():
            shard = _cut(tensors, layout, policy, sync)
            stored = layout.row(policy.axis.own_index).total
            shard = shard[:stored].clone() if stored < shard.numel() else shard
        shard = shard.cpu() if policy.offload else shard
        for slot in members:
            slot.param.grad = None  # of this rank's own pass, and of the whole
        groups.append(Group(owner, members, layout, shard, said, policy))
    return groups


def _cut(tensors: list[Tensor], layout: Layout, policy: Policy, sync: bool) -> Tensor:
    """This rank's shard; it may be as long as the chunk."""
    axis, mesh, rows = policy.axis, policy.axis.mesh, None
    if not sync:
        return forgotten(layout.stored_of(tensors, axis.own_index)).to(policy.device)
    if axis.own_index == 0:
        rows = layout.buffer.join(tensors, tensors[0]).view(axis.size, layout.chunk).to(policy.device)
    like = torch.empty(1, layout.chunk, dtype=tensors[0].dtype, device=policy.device)
    own = scatter(rows, axis.name, src=0, like=like, mesh=mesh)[0] if rows is None or axis.size > 1 else rows[0]
    return own if policy.replica is None else broadcast(own, policy.replica.name, src=0, mesh=mesh)


def _share_buffers(module: nn.Module, policies: Policies) -> None:
    over: dict[Policy, list[Tensor]] = {}
    for each in module.buffers():
        if not each.is_meta:
            over.setdefault(policies.of(each), []).append(each)
    for policy, buffers in over.items():
        for axis in policy.axes:
            take_from(0, buffers, axis)


def _part(group: Group, at: int, slot: Slot) -> Part:
    """What this rank keeps of a parameter, for who asks how it is cut."""
    axis = group.policy.axis
    ranges = tuple(group.layout.range_of(at, index) for index in range(axis.size))
    how = Flat(group.layout.entries[at].shape, *ranges[group.index], ranges)
    return Part(slot.name, "fully_shard", axis.mesh, axis.name, group.index, how)


def _shared_seed(policy: Policy) -> int:
    with _torch.outside_transforms():
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
