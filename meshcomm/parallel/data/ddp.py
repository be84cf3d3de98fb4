"""Data parallelism: the parameters are the same on all ranks and meet other data on each: ``pvary``, and its transpose.

    forward     pvary(params, "dp")      nothing is sent
    backward    all_reduce(gradients)    in buckets, while the rest of the backward pass runs

n = size of the axis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

import torch
from torch import nn

from meshcomm.axis import AxisName, axes_in
from meshcomm.collectives import check
from meshcomm.errors import fail, likely, names
from meshcomm.mesh import Mesh
from meshcomm.parallel.cut_parameters import checked_module, know, refuse_overlap
from meshcomm.parallel.data.means import checked_mean, mean_of
from meshcomm.parallel.data.replica import HERE, WHERE, Grads, Replica, replica_of
from meshcomm.parallel.fewer_axes import all_matched, checked_axes, checked_patterns, fewer_axes
from meshcomm.parallel.later_values import wait_for_values
from meshcomm.parallel.optimizers.gradient_dtypes import refuse_narrower, watch_wide_gradients
from meshcomm.parallel.optimizers.over_parts import watch_steps
from meshcomm.parallel.stand_ins import Around, refuse_renormalised, refuse_sliced
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.dry.options import has_options
from meshcomm.runtime.transports.threads.scheduler import claim
from meshcomm.spmd.types.told import remember, tell
from meshcomm.watch import out_of_sight

M = TypeVar("M", bound=nn.Module)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@Op("data_parallel", "parameters and buffers invariant", composed=True)
@has_options
@out_of_sight
def data_parallel(
    module: M,
    axis: AxisName,
    *,
    grads: Grads,
    bucket_mb: float = 25,
    mesh: Mesh | None = None,
    reduce_dtype: torch.dtype | None = None,
    accumulate_dtype: torch.dtype | None = None,
    buffers: Literal["broadcast", "leave"] = "broadcast",
    methods: Sequence[str] = ("forward",),
    mean_over: AxisName | None = None,
    axes: Mapping[str, AxisName | tuple[()]] | None = None,
    ignore: Collection[str] = (),
) -> M:
    """Train ``module`` on other data on each rank of ``axis``: its gradients are reduced over the axis.

    ::

        rank 0  loss(w, rows 0)      w.grad = g0 + g1    (sum)
        rank 1  loss(w, rows 1)  ->  w.grad = g0 + g1

    The module is changed in place: its parameters and buffers take the values of index 0, and while one of its
    ``methods`` runs, its parameters are seen through :func:`meshcomm.pvary`. Everything else is as it was: the
    parameters themselves and their names, so that optimisers (made before or after), hooks and ``state_dict`` work as
    they did, and methods that are not named. What is done with the parameters elsewhere is not reduced, which is right
    for a penalty that is the same on all ranks. After the first backward pass the norms of the gradients are compared,
    and such as differ between ranks are an error.

    Type: parameters and buffers invariant; what goes into the module and what comes out varying.

    Args:
        module: the same on every rank but for the values. Frozen parameters, parameters that stand in several places
            or that some ranks or all do not use, and dtypes that differ are fine; so is one that is tensor parallel,
            and so are embeddings with sparse gradients, whose rows go to all ranks when backward ends.
            What is on the meta device gets memory, and its values by :func:`load_full_state_dict` before it runs.
        axis: a name, or a tuple of names.
        grads: "sum": gradients are summed; reduce the loss once yourself, the library's rule. "mean": they are
            averaged; the loss is local, as DistributedDataParallel has it. Means over unequal numbers of
            tokens: "sum" and :func:`weighted_mean`.
        bucket_mb: gradients are reduced together until they have this many MiB.
        mesh: the current mesh by default; it is kept.
        reduce_dtype: gradients travel in it, such as ``torch.bfloat16``, which halves the bytes of float32; on the
            CPU they are added up in float32. Not under ``torch.func`` and in compiled code, where they travel as
            they are.
        accumulate_dtype: gradients of microbatches are added up in it, such as ``torch.float32`` of bfloat16: under
            :func:`no_sync`, and in ``.grad``, which has it (``param.grad_dtype``) where parameters are narrower. They
            are reduced in it, too, unless ``reduce_dtype`` says otherwise. Adam and its kin, and fused steps, see them
            rounded to the dtype of the parameter, as torch's take no others. By default they are added up in
            the dtype of the parameter.
        buffers: "broadcast": after each forward pass of training that is not under :func:`no_sync`, buffers take the
            values of index 0. "leave": each rank keeps its own.
        methods: the names of the methods that use the parameters and whose gradients are reduced.
        mean_over: the axes over whose ranks the loss is a mean, where these are not the ones that gradients are reduced
            over: of experts, the axes of the tokens that all_to_all brings, ``("dp", "ep")``. By default those of the
            module around this one that is parallel over more axes, or ``axis``. Where neither
            says it, and an input has just come by all_to_all over another axis, that is an error.
        axes: patterns of names of parts or parameters, such as ``{"*.experts": "dp"}``, and the axes, of ``axis``,
            along which these are the same: values and gradients go over them alone, and a "mean" is over the ranks of
            the whole module. ``()``: over none. What :func:`meshcomm.mark_varying` was told to vary along an axis goes
            over the others.
        ignore: patterns of names of parameters and buffers that stay as they are on each rank, and so do their
            gradients.

    Returns: ``module``.

    Backward: one all_reduce per bucket. A parameter that no rank has used gets no gradient; one that some have used
        counts as zero on the others. Under ``torch.no_grad()`` nothing is done, and nothing sent.

    Cost: at the start one broadcast of parameters and buffers; per step 2 (n-1)/n times the bytes of the gradients
        per rank, and a broadcast of the buffers; after the first backward pass an all_gather of a number per
        parameter.

    Raises:
        MeshError: not a module; no such axis, ``grads``, ``buffers`` or method; ``axes`` that are not the module's, or
            that name nothing, as ``ignore``; a module that is data parallel or
            sharded already; a parameter that ``tensor_parallel`` has cut along ``axis``; parameters or buffers that
            have other names, shapes or dtypes on another rank (said on all ranks); a lazy parameter that has no shape
            yet; an embedding with ``max_norm``; a tensor on a device that the mesh cannot move. From forward: one that
            gives a generator, a function or a module that uses parameters, or is async, and so computes when it has
            ended. From backward: gradients that differ between ranks, because a parameter was used elsewhere.

    Parts of the module may be under ``torch.utils.checkpoint``. With ``use_reentrant=True`` all gradients are reduced
    when backward ends, none beside it, for that kind computes again outside of the module's forward; with ``mean_over``
    it is refused.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import data_parallel
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def step():
        ...     model = data_parallel(torch.nn.Linear(1, 1, bias=False), "dp", grads="mean", mesh=mesh)
        ...     model(torch.tensor([[1.0 + mesh.rank]])).sum().backward()
        ...     return model.weight.grad.item()
        >>> mc.launch(step, ranks=2)
        [1.5, 1.5]

    Source: DistributedDataParallel; Goyal et al., 2017.
    """
    checked_module(WHERE, module)
    ax = check.axis_of(WHERE, axis, mesh)
    _checked("grads", grads, ("sum", "mean"))
    checked_mean(WHERE, grads, ax.mesh, mean_over)
    _checked("buffers", buffers, ("broadcast", "leave"))
    check.checked_size(WHERE, bucket_mb, ax)
    if reduce_dtype not in (None, *_FLOATS):
        fail(WHERE, f"reduce_dtype={reduce_dtype!r} is not a dtype that gradients can travel in.", fix=names(_FLOATS))
    if accumulate_dtype not in (None, *_FLOATS):
        what = f"accumulate_dtype={accumulate_dtype!r} is not a dtype that gradients can be added up in."
        fail(WHERE, what, fix=names(_FLOATS))
    refuse_narrower(WHERE, accumulate_dtype, dict(module.named_parameters()))
    claim(module, WHERE)
    if replica_of(module) is not None:
        fail(WHERE, "the module is data parallel already.", fix="name all axes at once: axis=('dp', 'replica')")
    refuse_sliced(WHERE, module, "pass fully_shard(..., replica_axis=)")
    checked_patterns(WHERE, "ignore", ignore)
    every = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    left = {id(x) for name, x in every.items() if any(fnmatchcase(name, each) for each in ignore)}
    all_matched(WHERE, "ignore", ignore, every)
    within = axes_in(ax.name)
    told = checked_axes(WHERE, axes, ax.mesh, within)
    fewer = fewer_axes(WHERE, module, told, ax.mesh, within, left)
    refuse_renormalised(WHERE, module)
    if isinstance(methods, str) or not isinstance(methods, Collection) or not methods:
        fail(WHERE, f"methods={methods!r} is not a list of names.", fix="('forward',)")
    for name in methods:
        if not isinstance(name, str) or not callable(getattr(module, name, None)):
            fail(WHERE, f"the module has no method {name!r}.", got=type(module).__name__)
    state = Replica(module, ax.mesh, ax.name, grads, bucket_mb, reduce_dtype, buffers == "broadcast", fewer, left)
    params = list(module.parameters())
    for over, at in state.spread.lists(params):
        refuse_overlap(WHERE, module, over.axis, {id(params[place]) for place in at} - left)
    state.accumulates = accumulate_dtype
    state.make_equal()
    for name in methods:
        setattr(module, name, Around(state.call, getattr(module, name)))
    setattr(module, HERE, state)
    know(module, ax.mesh, copies=ax.name)
    for x in every.values():
        known = fewer.get(id(x))
        if id(x) not in left:
            same = within if known is None else known.of(within) if known.told is None else known.told
            tell(WHERE, x, ax.mesh, () if known is None else known.others(within), same)
    remember(module)
    watch_steps()
    if accumulate_dtype is not None:
        watch_wide_gradients()
    wait_for_values(module, WHERE)
    state.mean = mean_of(module, grads, ax.mesh, (ax.name,), mean_over)
    return module


@Op("join", composed=True)
@contextlib.contextmanager
def join(module: nn.Module, step: Callable[[], object] | None = None) -> Iterator[None]:
    """Let ranks run out of data at different times: who is done contributes zero until all are.

    ::

        with join(model, step=step):            def step():
            for rows in my_batches:                 optimizer.step()
                loss(model(rows)).backward()        optimizer.zero_grad()
                step()

    At the end of the block a rank goes on, for each forward and backward pass of those that are not done, to take part
    in the reductions, and then calls ``step``. So parameters and the optimiser's state stay the same on all ranks.
    With ``grads="mean"`` sums are divided by n, however many ranks are left.

    Args:
        module: one that :func:`data_parallel` gave; each of its forward passes is followed by one backward pass.
        step: what a rank does after each backward pass. None: nothing; after the block parameters and buffers take
            the values of the first of the ranks that were done last, but an optimiser's state differs.

    Cost: one all_gather of n numbers more per step.

    Raises:
        MeshError: another module; a join inside a join; a synchronised batch norm in the module.

    Other collectives of the module over the same axis are not made by who is done.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import data_parallel, join
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def train():
        ...     model = data_parallel(torch.nn.Linear(1, 1, bias=False), "dp", grads="sum", mesh=mesh)
        ...     torch.nn.init.ones_(model.weight)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ...
        ...     def step():
        ...         sgd.step()
        ...         sgd.zero_grad()
        ...
        ...     with join(model, step=step):
        ...         for x in [1.0, 2.0, 1.0][: 1 + 2 * mesh.rank]:
        ...             model(torch.tensor([[x]])).sum().backward()
        ...             step()
        ...     return round(model.weight.item(), 4)
        >>> mc.launch(train, ranks=2)
        [0.5, 0.5]

    Source: torch's ``Join``, which leaves the optimisers of those that are done behind.
    """
    state = replica_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        fail("join", "the module is not data parallel.", got=type(module).__name__, fix="the one data_parallel gave")
    if step is not None and not callable(step):
        fail("join", f"step is not callable but {type(step).__name__}.", fix="a function of nothing, or None")
    if state.joined:
        fail("join", "a join inside a join of the same module.", fix="one join around the whole loop")
    if state.spread.fewer:
        what = f"some parameters go over {[over.axes for over in state.spread.fewer]} alone."
        fail("join", what, fix="as much data on all ranks: who is done sends no tokens to experts")
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        fail("join", "who is done takes no part in a synchronised batch norm.", fix="do without one of the two")
    state.joined, state.last = True, list(range(state.axis.size))
    try:
        yield
        state.shadow(step)
    finally:
        state.joined = False


def _checked(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        fail(WHERE, f"{name}={value!r} is none of {names(known)}.", fix=f"one of them{likely(value, known)}")
