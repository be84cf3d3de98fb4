"""auto_plan: a plan of tensor parallelism for a model that nobody has written one for.

model -> small copy -> what flows where -> regions, each with candidates -> a proof of all together
                                                                         -> else one region after another
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from meshcomm.axis import AxisName
from meshcomm.collectives import check
from meshcomm.errors import fail, names
from meshcomm.make_mesh import make_mesh
from meshcomm.mesh import Mesh
from meshcomm.parallel.alike import refuse_other_modules
from meshcomm.parallel.cut_parameters import checked_module
from meshcomm.parallel.later_values import refuse_lazy
from meshcomm.parallel.tensor.auto.example_inputs import LENGTH, examples_of
from meshcomm.parallel.tensor.auto.flow import OPAQUE, Flow, Leaf, flow_of
from meshcomm.parallel.tensor.auto.found_plan import TensorPlan
from meshcomm.parallel.tensor.auto.in_sequence import Picked, Ways, ends_in, first_right, stacks_of
from meshcomm.parallel.tensor.auto.patterns import plan_for
from meshcomm.parallel.tensor.auto.proof import Proof, floats_of, placed
from meshcomm.parallel.tensor.auto.regions import (
    Candidate,
    Region,
    experts_of,
    heads_of,
    pairs_of,
    past_forward,
    region_of,
    single_of,
    tables_of,
)
from meshcomm.parallel.tensor.auto.small_copy import SmallCopy, small_copy_of
from meshcomm.parallel.tensor.auto.without_values import outside
from meshcomm.parallel.tensor.plan import Cut
from meshcomm.parallel.tensor.state import known_of
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.dry.world import is_dry
from meshcomm.runtime.transports.threads.scheduler import current_rank

WHERE = "auto_plan"


@Op("auto_plan", "-> I", composed=True)
def auto_plan(
    module: nn.Module,
    axis: AxisName,
    *,
    example: Any = None,
    unsure: Literal["refuse", "whole"] = "refuse",
    sequence: bool = False,
    mesh: Mesh | None = None,
) -> TensorPlan:
    """Find a plan of tensor parallelism for ``module`` over ``axis``, and prove it.

    ::

        plan = auto_plan(model, "tp")
        print(plan)
        tensor_parallel(model, plan, axis="tp")

    A small copy of the module, in which two of each kind of layers stay and numbers are random, runs once: from the
    graph that autograd makes follows which layers take what other layers give. Attention is told by its softmax and
    has q, k and v, one matrix of them, or heads that are made of what all heads share; feed-forwards may be gated or
    fused; tables of tokens and heads as long as they are cut in rows. What is thought of is then proved: the copy is
    cut, and its results and all its gradients are held against those of the whole copy. Where a way fails the next one
    is tried, the last one being to cut the weights alone and to gather what they give. So a plan that this function
    returns has computed the right thing on the copy. In training, dropout is as :func:`tensor_parallel` has it.

    Type: -> invariant along ``axis``; every rank of it calls this.

    Args:
        module: the same on every rank of the axis; it is left as it is, and may be on the meta device.
        axis: a name, or a tuple of names. Outside of ranks, with a mesh of this process, ranks are started to prove it.
        example: what to call the module with, to look at it: a tensor, a tuple of arguments, or a dict of them by name.
            By default a few tokens, rows or small pictures, as its signature and its first layers have it.
        unsure: "refuse": an error that names modules with large weights that are not understood. "whole": they stay
            whole on all ranks, as the table says.
        sequence: whether activations are cut along the sequence, too, from the first to the last layer of each list of
            them: norms, dropout and what else is between the blocks runs on a part of it. Pass the plan to
            ``tensor_parallel(..., sequence=True)``.
        mesh: the current mesh by default.

    Returns: a dict of patterns and styles, with ``divide``: pass it to :func:`tensor_parallel`, or edit it before.
        ``print`` shows what is cut, what is gathered or summed, and how many bytes a rank sends per token and step.

    Cost: a forward and a backward pass of the copy per trial, with what the plan communicates, on 21 tokens. Memory of
        the copy three times, in float64 up to 2 ** 27 parameters, in float32 beyond and where an
        operation of the model has no float64, as products of grouped experts.

    Raises:
        MeshError: not a module; no such axis; a module for which no example is known, or that cannot be copied;
            modules that are not understood, by name; nothing that can be cut; with ``sequence`` a model in which
            nothing that is right was found, as where attention stays whole or the sequence is not divisible.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import auto_plan
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        >>> print(auto_plan(mlp, "tp", mesh=mc.make_mesh({"tp": 2})))
        pattern                          layers  style   cut         gathered or summed  B/token
        0                                1       column  dim 0 of 8
        2                                1       row     dim 1 of 8  sum of outputs      16
        a rank sends per token and step                                                  16

    Source: none; names of styles as torch's ``parallelize_module`` and Megatron-LM have them.
    """
    checked_module(WHERE, module)
    if unsure not in ("refuse", "whole"):
        fail(WHERE, f"unsure={unsure!r}.", fix="'refuse' or 'whole'")
    here, n = _mesh_of(axis, mesh)
    refuse_lazy(WHERE, (*module.named_parameters(), *module.named_buffers()))
    if known_of(module) is not None:
        fail(WHERE, "the module is tensor parallel already.", fix="the module as it was, and one plan for all of it")
    if not isinstance(sequence, bool):
        fail(WHERE, f"sequence={sequence!r} is neither True nor False.", fix="True or False")
    if is_dry():
        return outside(lambda twin, given: _found_apart(twin, n, given, unsure, sequence), module, example)
    small, flow, proof = _seen(module, axis, here, example, (5 * n, 4 * n, 2 * n, n) if sequence else (LENGTH,))
    regions, odd = _regions(small.module, flow, n)
    if regions and (current_rank() is not None or not here.in_process):
        refuse_other_modules(WHERE, module, module.named_parameters(), here.axis(axis))
    chosen, why = _chosen(regions, proof, small.module)
    unknown = {
        **odd,
        **{each.name: f"{why[each.key]}" for each in regions if each.key in why and "experts" in each.key},
    }
    if unknown and unsure == "refuse":
        some = list(unknown)[:6]
        fail(
            WHERE,
            f"not sure of {names(some)}{' and others' if len(unknown) > 6 else ''}.",
            got="; ".join(f"{name}: {unknown[name]}" for name in some),
            fix="plan=auto_plan(module, axis, unsure='whole'), which leaves these whole on all ranks; "
            "or a plan by hand (docs/models.md)",
        )
    if not chosen:
        what = "nothing in the module can be cut so that it computes the same."
        got = "; ".join(f"{each.name}: {why.get(each.key) or each.reason}" for each in regions[:6]) or "no Linear in it"
        fail(WHERE, what, got=got, fix="data_parallel or fully_shard, which ask nothing of a module; or a plan by hand")
    notes = {**unknown, **{each.name: why.get(each.key) or each.reason for each in regions if each.key not in chosen}}
    picked = [(each, each.candidates[chosen[each.key]]) for each in regions if each.key in chosen]
    if sequence:
        return _in_sequence(module, small, flow, proof, picked, notes, n)
    cut = [candidate for _, candidate in picked]
    return plan_for(module, small, assembled(cut, small.module), cut, notes, n)


def _in_sequence(
    module: nn.Module, small: SmallCopy, flow: Flow, proof: Proof, picked: Picked, notes: dict[str, str], n: int
) -> TensorPlan:
    """The same with a cut sequence."""
    tried, odd = stacks_of(small.module, flow, picked, n)
    ways = [Ways(small.module, flow, picked, stacks) for stacks in tried]
    right, cut, found, why = first_right(
        ways,
        lambda each: assembled(each, small.module),
        lambda styles, divide: proof.why_wrong(styles, divide, sequence=True),
    )
    if right is None:
        whole = [name for name in notes if any(each.item(name) for stacks in tried for each in stacks)]
        got = "; ".join(f"{name or 'the module'}: {each}" for name, each in odd.items()) if odd and not tried else why
        got += f"; whole stay {names(whole[:4])}" if whole else ""
        fix = "sequence=False; or a plan by hand, with Block() where the sequence is to be gathered (docs/models.md)"
        fail(WHERE, "no plan with sequence=True that computes the same was found.", got=got, fix=fix)
    left = {region.name: "with sequence=True" for (region, _), each in zip(picked, cut, strict=True) if not each.styles}
    return plan_for(module, small, found, cut, {**notes, **left, **odd}, n, ends_in(module, small, right.stacks))


def _found_apart(
    module: nn.Module, n: int, example: Any, unsure: Literal["refuse", "whole"], sequence: bool
) -> TensorPlan:
    """On ranks that are started for it."""
    return auto_plan(module, "auto", example=example, unsure=unsure, sequence=sequence, mesh=make_mesh({"auto": n}))


def _mesh_of(axis: AxisName, mesh: Mesh | None) -> tuple[Mesh, int]:
    here = check.mesh_of(WHERE, axis, mesh)
    return here, here.size_of(axis, WHERE)


def _seen(
    module: nn.Module, axis: AxisName, mesh: Mesh, example: Any, lengths: tuple[int, ...]
) -> tuple[SmallCopy, Flow, Proof]:
    """A small copy, what it can be given, and what flows in it; of the whole depth if need be, and in float32 where
    some operation has no float64."""
    device = mesh.device
    problems: list[str] = []
    for shorter, narrow in itertools.product((True, False), (None, torch.float32)):
        try:
            small = small_copy_of(module, device, narrow, shorter)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            fail(WHERE, f"the module cannot be copied: {error}", fix="a plan by hand")
        dtype = next((p.dtype for p in small.module.parameters() if p.is_floating_point()), torch.float64)
        for p in small.module.parameters():
            p.requires_grad_(p.is_floating_point())
        for each in itertools.chain.from_iterable(examples_of(module, example, WHERE, length) for length in lengths):
            given = placed(each, device, dtype)
            try:
                flow = flow_of(small.module, given)
                found = floats_of(flow.result)
                if any(x.requires_grad for x in found) and all(bool(x.isfinite().all()) for x in found):
                    return small, flow, Proof(small.module, given, axis, mesh)
            except Exception as error:  # whatever it wants is another input
                problems.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                continue
            problems.append("its results are no finite numbers that need a gradient")
    what = (
        "the module cannot be run on what was thought of to look at it." if example is None else "it fails on example."
    )
    fail(
        WHERE, what, got="; ".join(dict.fromkeys(problems[-4:])), fix="example=: what it is called with, few and short"
    )


def _regions(module: nn.Module, flow: Flow, n: int) -> tuple[list[Region], dict[str, str]]:
    """What may be cut, tables first; and what is not understood."""
    closed = {leaf for leaf in flow.leaves if leaf.kind is not None and past_forward(leaf, flow, module)}
    found: list[Region] = []
    tables, taken = tables_of(flow, module, n)
    if tables is not None:
        found.append(tables)
    taken |= closed
    for pair in pairs_of(flow, taken):
        found.append(region_of(pair, flow, module, n))
    odd: dict[str, str] = {leaf.path: "its weight is read past its forward" for leaf in flow.leaves
                           if leaf in closed and leaf.linear and _large(leaf, flow)}  # fmt: skip
    for leaf in flow.leaves:
        if leaf in taken or not _large(leaf, flow):
            continue
        if type(leaf.module).forward is nn.MultiheadAttention.forward:
            found.append(heads_of(leaf, n))
        elif leaf.linear and leaf.outputs:
            found += [single_of(leaf, n)] if _large(leaf, flow, 2) else []
        elif leaf.kind is None and not isinstance(leaf.module, (*OPAQUE, *_CONVOLUTIONS)):
            experts = experts_of(leaf, flow, n)
            if experts is not None:
                found.append(experts)
            elif any(p.ndim >= 2 for p in leaf.module.parameters()):
                odd[leaf.path] = f"a {type(leaf.module).__name__}, which is no layer that is known"
    return found, odd


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _large(leaf: Leaf, flow: Flow, part: int = 4) -> bool:
    """Whether it is worth it: such a part of the largest layer."""

    def size(each: Leaf) -> int:
        return sum(p.numel() for p in each.module.parameters())

    return part * size(leaf) >= max(size(each) for each in flow.leaves if each.linear or each is leaf)


def _chosen(regions: list[Region], proof: Proof, module: nn.Module) -> tuple[dict[Any, int], dict[Any, str]]:
    """For each kind of region the first candidate that is right, together with all others; and why none is."""
    kinds = {each.key: len(each.candidates) for each in regions if each.candidates}
    for each in regions:  # of one kind, and not alike
        kinds[each.key] = (
            min(kinds.get(each.key, 0), len(each.candidates)) if each.candidates else kinds.get(each.key, 0)
        )
    kinds = {key: count for key, count in kinds.items() if count}
    why: dict[Any, str] = {}

    def wrong(choice: dict[Any, int]) -> str:
        styles, divide = assembled([each.candidates[choice[each.key]] for each in regions
                                    if each.key in choice and each.candidates], module)  # fmt: skip
        return proof.why_wrong(styles, divide)

    first = dict.fromkeys(kinds, 0)
    if not first or not wrong(first):
        return first, why
    chosen: dict[Any, int] = {}
    for key, count in kinds.items():
        for at in range(count):
            told = wrong({**chosen, key: at})
            if not told:
                chosen[key] = at
                why.pop(key, None)
                break
            why.setdefault(key, told)
    return chosen, why


def assembled(picked: list[Candidate], module: nn.Module) -> tuple[dict[str, Any], dict[str, int]]:
    """A plan of exact names, for every parameter; a parameter that stands elsewhere too is cut there as well."""
    styles: dict[str, Any] = {}
    divide: dict[str, int] = {}
    blocks: dict[str, Any] = {}
    for each in picked:
        styles |= each.styles
        divide |= each.divide
        blocks |= each.blocks
    params = dict(module.named_parameters(remove_duplicate=False))
    of_params = dict(_spread(styles, params))
    cut = {id(params[path]): (path, style) for path, style in of_params.items() if style != "replicated"}
    for path, p in params.items():
        if path not in of_params:
            of_params[path] = _elsewhere(module, path, *cut[id(p)]) if id(p) in cut else "replicated"
    return {**blocks, **of_params}, divide


def _spread(styles: dict[str, Any], params: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for path in params:
        place = path
        while place:
            if place in styles:
                yield path, styles[place]
                break
            place = place.rpartition(".")[0]


def _elsewhere(module: nn.Module, path: str, first: str, style: Any) -> Any:
    """What is said of a parameter at another place than the one where it is cut."""
    here, there = (module.get_submodule(each.rpartition(".")[0]) for each in (path, first))
    if type(here) is type(there) or here is there:
        return style
    if (path.count(".") and style in ("column", "vocab")) or (isinstance(style, tuple) and not isinstance(style, Cut)):
        return Cut(0)
    return style
