"""Tensor parallelism of a module that knows nothing of it, by a plan of names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from meshcomm.axis import Axis, AxisName, axes_in
from meshcomm.collectives import check
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.parallel.alike import refuse_other_modules
from meshcomm.parallel.cut_parameters import (
    Part,
    checked_module,
    know,
    refuse_copies,
    refuse_cut_elsewhere,
    refuse_overlap,
)
from meshcomm.parallel.cut_states import mark_states
from meshcomm.parallel.later_values import as_made, wait_for_values
from meshcomm.parallel.optimizers.over_parts import watch_steps
from meshcomm.parallel.stand_ins import Around, refuse_sliced
from meshcomm.parallel.tensor.blocks import Boundary, blocks_of
from meshcomm.parallel.tensor.layers import Layer, layers_of, past_forward
from meshcomm.parallel.tensor.plan import WHERE, Block, Style, divided, read
from meshcomm.parallel.tensor.state import HERE, Parallel, known_of
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.dry.options import has_options
from meshcomm.runtime.transports.threads.scheduler import claim
from meshcomm.spmd.types.told import remember, tell
from meshcomm.watch import out_of_sight

M = TypeVar("M", bound=nn.Module)


@Op("tensor_parallel", "what goes in and comes out is invariant", composed=True)
@has_options
@out_of_sight
def tensor_parallel(
    module: M,
    plan: Mapping[str, str | Style | Block] | Literal["auto"],
    *,
    axis: AxisName,
    sequence: bool = False,
    divide: Sequence[str] | Mapping[str, int] = (),
    mesh: Mesh | None = None,
) -> M:
    """Let each rank of ``axis`` keep and compute a part of the layers of ``module``.

    ::

        {"*.qkv": Column(3), "*.proj": "row", "*.up": "column", "*.down": "row", "*.norm*": "replicated"}

    The module is changed in place: its parameters take the values of index 0, so that a seed gives the same model on
    any mesh, and those that are cut keep this rank's part alone. They are the same objects under the same names.
    Layers that are named in the plan do what is said there; all others do what they did, on fewer features.
    ``state_dict`` has this rank's parts, and says so: see :func:`fully_shard`.

    Random numbers in training, of dropout and all that torch draws: what is whole draws alike on all ranks, and what is
    cut draws differently, from a column (or another layer whose result is cut) to the next row (or another one whose
    result is whole); with ``sequence`` from the first layer that cuts on. Both follow from torch's default generators,
    made equal along ``axis``, so that ``torch.utils.checkpoint`` draws the same again. Which elements are dropped
    depends on how the module is cut; under :func:`meshcomm.rng` it does not. What is whole and drawn between a column
    and its row, such as a residual stream beside them, would differ too: draw it before, or under :func:`meshcomm.rng`;
    :func:`meshcomm.check_vma` refuses it.

    Type: what goes in and comes out is invariant along ``axis``, unless the last layer is a column (varying: give it
    to :func:`vocab_cross_entropy`) or the plan ends on a cut sequence. The loss is the same on all ranks: do not
    reduce it over ``axis``.

    Args:
        module: the same on every rank but for the values. On the meta device shapes are cut, and
            :func:`load_full_state_dict` makes the values, of each rank its own, before it runs.
        plan: for patterns of names (``*``, ``?``, ``[ab]``) of parameters, or of modules with all that they have, what
            is done. The first one that fits counts, so that ``"*": "replicated"`` may come last.

            ``"column"``, :class:`Column`: a ``Linear`` of whose outputs each rank computes a part; so are GPT-2's
            ``Conv1D``, whose weight lies the other way, torch's ``Conv1d`` with a kernel of 1, and an ``Embedding``,
            which is cut along its width.
            ``"row"``, :class:`Row`: a ``Linear``, ``Conv1D`` or such a ``Conv1d`` of whose inputs each rank has a part.
            ``"heads"``: torch's ``MultiheadAttention``, all of it: each rank computes some of its heads.
            ``"vocab"``, :class:`Vocab`: an ``Embedding`` of which each rank has some rows; with ``sequence`` its result
            is cut.
            ``"replicated"``: whole, and used in the same way on all ranks.
            ``"summed"``: whole, and used by each rank with its own part of other things, such as norms of heads.
            ``"once"``: the same for what is added to a part of a sum: it is added on one rank. On
            others it is zero to whoever reads it in the module: forwards, methods, what is computed again in backward.
            ``"sequence"``: whole, and used on a part of the sequence: norms, with ``sequence``. If they were called
            replicated, each rank would have the gradient of its part; ``check_vma("error")`` says so.
            ``"split"``: whole, and the result is then cut along the sequence: position embeddings, with ``sequence``.
            :class:`Cut`: a parameter of any module, cut along a dim: experts, tables with something for each head.
            :class:`Block`: what is done where a module begins and ends. Its pattern names modules, and the parameters
            inside are named beside it.
        axis: a name, or a tuple of names.
        sequence: whether activations between a row and a column are cut along the last dim but one; with "auto" from
            the first to the last layer of each list of layers.
        divide: patterns of names of attributes that count what is now on this rank, such as ``"*.attn.heads"``: they
            are divided by the size of the axis, or by the numbers of a dict. ``"*.attn.config.heads"`` is one of an
            object that the module has, of which the module gets a copy.
        mesh: the current mesh by default; it is kept.

    Returns: ``module``.

    Backward: of a column an all_reduce of the gradient of its input, once for several columns of one input. Gradients
        of what is replicated are the same on all ranks; of ``"sequence"`` they are summed over ``axis``.

    Cost: at the start two numbers per rank, one broadcast of the parameters, and of the generators' states; one of 8
        bytes when a module that draws runs for the first time, or after ``torch.manual_seed``. Per row one all_reduce
        forwards, per input of columns one backwards; with ``sequence`` an all_gather and a reduce_scatter each. A table
        in rows counts as a row, a block that enters as a column, one that leaves as a row; :class:`Column` and
        :class:`Row` say what is more. On the CPU an all_gather of at most 256 numbers per whole parameter after steps
        1, 2, 4 and so on.

    Raises:
        MeshError: not a module; no such axis; a pattern for which nothing is left; a parameter that no pattern
            names; a style that does not fit the kind of layer, or a layer with a forward that does something else; a
            dim or an attribute that the axis does not divide; ``"sequence"`` and ``"split"`` without ``sequence``; a
            parameter that stands in layers of other styles; a module that is tensor parallel or sharded already, or
            data parallel along ``axis``. In a forward: a generator as its result, or a function
            of parameters that ranks use in their own way; an argument of a block that needs a
            gradient and is not said to enter; what is whole after random numbers that differ between ranks; on the CPU,
            after steps 1, 2, 4 and so on, parameters that are whole and differ between ranks. On all ranks: a module
            that differs between them in classes, or parameters in names, dtypes, shapes or whether they are trained.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import tensor_parallel
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> def program():
        ...     mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        ...     tensor_parallel(mlp, {"0": "column", "2": "row"}, axis="tp", mesh=mesh)
        ...     return tuple(mlp[0].weight.shape), tuple(mlp(torch.ones(3, 4)).shape)
        >>> mc.launch(program, ranks=2)
        [((4, 4), (3, 4)), ((4, 4), (3, 4))]

    Source: Megatron-LM; torch's ``parallelize_module``.
    """
    checked_module(WHERE, module)
    ax = check.axis_of(WHERE, axis, mesh)
    claim(module, WHERE)
    if known_of(module) is not None:
        fail(WHERE, "the module is tensor parallel already.", fix="one plan for all of it")
    if not isinstance(sequence, bool):
        fail(WHERE, f"sequence={sequence!r} is neither True nor False.", fix="True or False")
    refuse_sliced(WHERE, module, "call tensor_parallel before fully_shard")
    refuse_copies(WHERE, module, "tensor parallelism over another axis than data_parallel's", ax)
    refuse_overlap(WHERE, module, ax)
    refuse_cut_elsewhere(WHERE, module)
    if isinstance(plan, str) and plan == "auto":
        plan = _found(module, ax, sequence)
    if not divide:
        divide = getattr(plan, "divide", divide)
    state = Parallel(module, ax, sequence)
    known = read(module, plan, sequence)
    blocks = blocks_of(state, known.blocks)
    layers = layers_of(state, known.params)
    attributes = list(divided(module, divide, ax))
    attributes += [each for layer in layers.values() for each in layer.counts()]
    attributes += past_forward(module, {*layers, *blocks})
    refuse_other_modules(WHERE, module, module.named_parameters(), ax)
    with as_made(module.parameters()):
        state.make_parts(module)
    for part, name, value in attributes:
        setattr(part, name, value)
    changed: list[tuple[nn.Module, Layer | Boundary]] = [*layers.items(), *blocks.items()]
    for part, around in changed:
        part.forward = Around(around.call, part.forward)
    module.forward = Around(state.call, module.forward)
    setattr(module, HERE, state)
    state.see_anywhere()
    params = dict(module.named_parameters(remove_duplicate=False))
    know(module, ax.mesh, {id(params[path]): Part(path, WHERE, ax.mesh, ax.name, ax.own_index, how)
                           for path, how in state.cuts.items()})  # fmt: skip
    cut, along = {id(params[path]) for path in state.cuts}, axes_in(ax.name)
    for p in params.values():
        tell(WHERE, p, ax.mesh, along if id(p) in cut else (), along)
    for each in module.buffers():
        tell(WHERE, each, ax.mesh, (), along)
    remember(module)
    mark_states(module)
    watch_steps()
    wait_for_values(module, WHERE)
    return module


def _found(module: nn.Module, axis: Axis, sequence: bool) -> Mapping[str, Any]:
    """A plan that is looked for; printed by the first rank of the mesh."""
    auto: Any = importlib.import_module("meshcomm.parallel.tensor.auto.auto_plan")  # whose proof needs this module
    plan: Mapping[str, Any] = auto.auto_plan(module, axis.name, sequence=sequence, mesh=axis.mesh)
    if not any(axis.mesh.own_coordinate().values()):
        sys.stdout.write(f"tensor_parallel(..., axis={axis.name!r}):\n{plan}\n")
    return plan


@Op("whole_parameters", "-> I", composed=True)
def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a tensor parallel module as they were without it: each part gathered.

    Type: -> invariant along its axis.

    Args:
        module: one that :func:`tensor_parallel` gave.

    Returns: name to tensor, on all ranks, new storage; no gradients.

    Cost: an all_gather of each parameter that is cut.

    Raises:
        MeshError: another module.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import tensor_parallel, whole_parameters
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> def program():
        ...     layer = torch.nn.Sequential(torch.nn.Linear(4, 8))
        ...     tensor_parallel(layer, {"0": "column"}, axis="tp", mesh=mesh)
        ...     return {name: tuple(x.shape) for name, x in whole_parameters(layer).items()}
        >>> mc.launch(program, ranks=2)[0]
        {'0.weight': (8, 4), '0.bias': (8,)}

    Source: none.
    """
    state = known_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        got, fix = type(module).__name__, "the one that tensor_parallel gave"
        fail("whole_parameters", "the module is not tensor parallel.", got=got, fix=fix)
    return {name: state.whole(name, p.detach()) for name, p in module.named_parameters()}
