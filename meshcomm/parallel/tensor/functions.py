"""Tensor and sequence parallelism as functions: matrices, vocabularies and heads are cut over an axis.

    column   "b s d, (tp f) d -> b s (tp f)"              x is the same on all ranks, its gradient is summed
    row      "b s (tp f), d (tp f) -> b s d"              ends in a sum
    with sequence=True activations between them are cut along s, "b (tp s) d": an all_gather, and a reduce_scatter

Weights lie as torch's modules have them. b batch, s sequence (the last dim but one), d width, f features of a layer,
v vocabulary, h heads, k length of a head, n size of the axis.
"""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from meshcomm._torch import functorch_active, unwrapped
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.gather import all_gather
from meshcomm.collectives.place import axis_index
from meshcomm.collectives.reduce import all_reduce, pvary, reduce_scatter
from meshcomm.errors import fail, shape_text
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.dry.world import is_dry
from meshcomm.watch import here


@Op("enter", "I -> V", composed=True)
def enter(x: Tensor, axis: AxisName, *, sequence: bool = False, mesh: Mesh | None = None) -> Tensor:
    """Take activations to where each rank uses them with its own part of the weights.

    Type: invariant -> varying; varying -> varying with ``sequence``.

    Args:
        x: ``[..., d]``; with ``sequence`` this rank's ``[..., s/n, d]``.
        axis: a name, or a tuple of names.
        sequence: whether ``x`` is cut along the last dim but one.
        mesh: the current mesh by default.

    Returns: ``[..., d]``, whole. Several layers that use it cost one collective: enter once.

    Backward: an all_reduce; a reduce_scatter with ``sequence``.

    Cost: nothing; an all_gather with ``sequence``.

    Raises:
        MeshError: no such axis; not a tensor; fewer than two dims with ``sequence``.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import enter
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> mc.launch(lambda: enter(x[mesh.rank][None], "tp", sequence=True, mesh=mesh).tolist(), ranks=2)
        [[[1.0], [2.0]], [[1.0], [2.0]]]

    Source: the operators f and g-bar of Megatron-LM (Shoeybi et al., 2019; Korthikanti et al., 2022).
    """
    if not sequence:
        return pvary(x, axis, mesh=mesh)
    return all_gather(x, axis, _sequence_dim("enter", x, axis, mesh), mesh=mesh)


@Op("leave", "V -> I", composed=True)
def leave(y: Tensor, axis: AxisName, *, sequence: bool = False, mesh: Mesh | None = None) -> Tensor:
    """Sum what each rank has computed with its own part of the weights.

    Type: varying -> invariant; varying -> varying with ``sequence``.

    Args:
        y: ``[..., s, d]``, this rank's part of the sum.
        axis: a name, or a tuple of names.
        sequence: whether each rank keeps a part of the last dim but one.
        mesh: the current mesh by default.

    Returns: ``[..., s, d]``; ``[..., s/n, d]`` with ``sequence``.

    Backward: nothing is sent; an all_gather with ``sequence``.

    Cost: an all_reduce; a reduce_scatter with ``sequence``.

    Raises:
        MeshError: no such axis; not a tensor; with ``sequence`` a dim that the axis does not divide.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import leave
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> mc.launch(lambda: leave(torch.ones(1), "tp", mesh=mesh).tolist(), ranks=2)
        [[2.0], [2.0]]

    Source: the operators g and g-bar of Megatron-LM.
    """
    if not sequence:
        return all_reduce(y, axis, mesh=mesh)
    return reduce_scatter(y, axis, _sequence_dim("leave", y, axis, mesh), mesh=mesh)


def _sequence_dim(where: str, x: Tensor, axis: AxisName, mesh: Mesh | None) -> int:
    if not isinstance(x, Tensor):
        check.tensor(where, x, check.axis_of(where, axis, mesh))
    if x.ndim < 2:
        check.explain(
            where, "there is no dim of the sequence.", check.axis_of(where, axis, mesh), x=x, fix="[..., s, d]"
        )
    return x.ndim - 2


@Op("column_linear", "``x`` as :func:`enter` has it", composed=True)
def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    axis: AxisName,
    sequence: bool = False,
    mesh: Mesh | None = None,
) -> Tensor:
    """A linear layer of whose outputs each rank computes a part.

    ::

        "b s d, (tp f) d -> b s (tp f)"                   with sequence: "b (tp s) d, (tp f) d -> b s (tp f)"

    Type: ``x`` as :func:`enter` has it; weight, bias and result varying.

    Args:
        x: ``[..., d]``; ``[..., s/n, d]`` with ``sequence``.
        weight: ``[f/n, d]``, this rank's rows.
        bias: ``[f/n]``.
        axis: a name, or a tuple of names.
        sequence: whether ``x`` is cut along the sequence.
        mesh: the current mesh by default.

    Returns: ``[..., f/n]``, for the whole sequence.

    Backward: the gradient of ``x`` is summed over the axis; weight and bias have their own.

    Cost: nothing, and an all_reduce of the gradient of ``x``; with ``sequence`` an all_gather, and a reduce_scatter.

    Raises:
        MeshError: shapes that do not fit; no such axis.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import column_linear
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> w = torch.tensor([[1.0], [2.0]])
        >>> mc.launch(lambda: column_linear(torch.ones(1), w[mesh.rank][None], axis="tp", mesh=mesh).tolist(), ranks=2)
        [[1.0], [2.0]]

    Source: Megatron-LM.
    """
    _fits("column_linear", x, weight, bias, axis, mesh, alike=(weight, bias))
    return F.linear(enter(x, axis, sequence=sequence, mesh=mesh), weight, bias)


@Op("row_linear", "``x`` and weight varying", composed=True)
def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    axis: AxisName,
    sequence: bool = False,
    mesh: Mesh | None = None,
) -> Tensor:
    """A linear layer of whose inputs each rank has a part.

    ::

        "b s (tp f), d (tp f) -> b s d"                   with sequence: "b s (tp f), d (tp f) -> b (tp s) d"

    Type: ``x`` and weight varying; bias invariant; the result invariant, varying with ``sequence``.

    Args:
        x: ``[..., f/n]``, such as :func:`column_linear` gives.
        weight: ``[d, f/n]``, this rank's columns.
        bias: ``[d]``, added once.
        axis: a name, or a tuple of names.
        sequence: whether each rank keeps a part of the sequence.
        mesh: the current mesh by default.

    Returns: ``[..., d]``; ``[..., s/n, d]`` with ``sequence``.

    Backward: nothing is sent; with ``sequence`` the gradient is gathered, and that of the bias summed.

    Cost: an all_reduce; with ``sequence`` a reduce_scatter.

    Raises:
        MeshError: shapes that do not fit; no such axis; with ``sequence`` a sequence that the axis does not divide.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import row_linear
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> x, w = torch.tensor([1.0, 2.0]), torch.tensor([[10.0, 100.0]])
        >>> def program():
        ...     mine = slice(mesh.rank, mesh.rank + 1)
        ...     return row_linear(x[mine], w[:, mine], axis="tp", mesh=mesh).tolist()
        >>> mc.launch(program, ranks=2)
        [[210.0], [210.0]]

    Source: Megatron-LM.
    """
    _fits("row_linear", x, weight, bias, axis, mesh, alike=(weight,))
    y = leave(F.linear(x, weight), axis, sequence=sequence, mesh=mesh)
    if bias is None:
        return y
    return y + (pvary(bias, axis, mesh=mesh) if sequence else bias)


def are_tensors(where: str, axis: Axis | None, **given: Tensor | None) -> None:
    """Those that are given are tensors, of whatever class: the first one, which is communicated, is a plain one."""
    for number, (name, x) in enumerate(given.items()):
        if axis is not None and x is not None and (number == 0 or not isinstance(x, Tensor)):
            check.tensor(where, x, axis, name)
        elif x is not None and not isinstance(x, Tensor):
            fail(where, f"{name} is not a tensor but {type(x).__name__}.", fix="torch.as_tensor")


def _fits(
    where: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: AxisName,
    mesh: Mesh | None,
    *,
    alike: tuple[Tensor | None, ...],
) -> None:
    ax = check.axis_of(where, axis, mesh)
    are_tensors(where, ax, x=x, weight=weight, bias=bias)
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1]:
        what = f"weight {list(weight.shape)} does not fit x.shape[-1] = {x.shape[-1] if x.ndim else 'none'}."
        check.explain(where, what, ax, x=x, fix="weight is [out, in], this rank's part")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        what = f"bias {list(bias.shape)} does not fit weight {list(weight.shape)}."
        check.explain(where, what, ax, x=x, fix="bias is [out], this rank's part in a column")
    for p in alike:
        if p is not None and p.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            name = "weight" if p is weight else "bias"
            what = f"{name} is {p.dtype}, x is {x.dtype}."
            check.explain(where, what, ax, x=x, fix="cast one of them, or use autocast")


# --------------------------------------------------------------------------------------------- vocabularies and heads


@Op("vocab_embedding", "ids invariant", composed=True)
def vocab_embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    axis: AxisName,
    padding_idx: int | None = None,
    sequence: bool = False,
    mesh: Mesh | None = None,
) -> Tensor:
    """Look up rows of a table of which each rank has a part.

    ::

        "(tp v) d"  ->  "b s d"                           with sequence: "b (tp s) d"

    Type: ids invariant; weight varying; the result invariant, varying with ``sequence``.

    Args:
        ids: integers ``[...]``, from 0 to v - 1.
        weight: ``[v/n, d]``, this rank's rows.
        axis: a name, or a tuple of names.
        padding_idx: an id whose row gets no gradient.
        sequence: whether each rank keeps a part of the last dim of ``ids``.
        mesh: the current mesh by default.

    Returns: ``[..., d]``; ``[..., s/n, d]`` with ``sequence``.

    Backward: each rank's rows get their gradients; with ``sequence`` the gradient is gathered first.

    Cost: an all_reduce of the result; with ``sequence`` a reduce_scatter.

    Raises:
        MeshError: ids that are no integers, or (on the CPU) not in the vocabulary; no such axis.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import vocab_embedding
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> table = torch.tensor([[10.0], [11.0], [12.0], [13.0]])
        >>> def look_up():
        ...     return vocab_embedding(torch.tensor([3, 0]), table.chunk(2)[mesh.rank], axis="tp", mesh=mesh).tolist()
        >>> mc.launch(look_up, ranks=2)
        [[[13.0], [10.0]], [[13.0], [10.0]]]

    Source: Megatron-LM.
    """
    ax = check.axis_of("vocab_embedding", axis, mesh)
    are_tensors("vocab_embedding", ax, ids=ids, weight=weight)
    if weight.ndim != 2:
        check.explain("vocab_embedding", f"weight {list(weight.shape)} is not [v/n, d].", ax, fix="this rank's rows")
    count = weight.shape[0] * ax.size
    if padding_idx is not None and not (check.whole_number(padding_idx) and -count <= padding_idx < count):
        what = f"padding_idx={padding_idx!r} is not in a vocabulary of {count}."
        check.explain("vocab_embedding", what, ax, fix="an id of the whole vocabulary, or None")
    rows, mine = own_rows("vocab_embedding", ids, weight.shape[0], ax)
    padding = None
    if padding_idx is not None:
        local = padding_idx % count - ax.index * weight.shape[0]
        padding = local if 0 <= local < weight.shape[0] else None
    found = F.embedding(rows, weight, padding).masked_fill(~mine.unsqueeze(-1), 0)
    return leave(found, axis, sequence=sequence, mesh=ax.mesh)


def own_rows(
    where: str, ids: Tensor, count: int, axis: Axis | None, *, ignored: int | None = None
) -> tuple[Tensor, Tensor]:
    """Where in this rank's part each id is (0 if elsewhere), and whether it is there; with no axis it has all."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        wrong(where, "ids are not integers.", axis, ids, "cast with x.long()")
    total = count * (1 if axis is None else axis.size)
    if ids.is_cpu and ids.numel() and not torch.compiler.is_compiling() and not is_dry():
        known = _values(ids)
        known = known if ignored is None else known.masked_fill(known == ignored, 0)
        low, high = (int(bound) for bound in known.aminmax())
        if low < 0 or high >= total:
            outside = low if low < 0 else high
            fix = f"ids from 0 to {total - 1}, of the whole vocabulary" if total else "each rank has a part of it"
            wrong(where, f"id {outside} is not in a vocabulary of {total}.", axis, ids, fix)
    rows = ids if axis is None else ids - _index(axis).to(ids.device) * count
    mine = (rows >= 0) & (rows < count)
    return rows.masked_fill(~mine, 0), mine


def _index(axis: Axis) -> Tensor:
    """This rank's; who tracks types must see where it comes from."""
    return axis.index_tensor if here.watcher is None else axis_index(axis.name, mesh=axis.mesh)


def _values(x: Tensor) -> Tensor:
    """Those of all batches, under vmap."""
    inner = unwrapped(x) if functorch_active() else None
    return x if inner is None else _values(inner)


def wrong(where: str, what: str, axis: Axis | None, x: Tensor, fix: str) -> NoReturn:
    """Say what is wrong with ``x``, of a call that may have no axis."""
    if axis is not None:
        check.explain(where, what, axis, x=x, fix=fix)
    fail(where, what, got=f"x {shape_text(x.dtype, x.shape)}", fix=fix)


@Op("heads_of", "V -> V", communicates=False, composed=True)
def heads_of(weight: Tensor, heads: int, *, axis: AxisName, mesh: Mesh | None = None) -> Tensor:
    """This rank's heads of a weight that all ranks have whole, because there are fewer heads than ranks.

    ::

        4 ranks, 2 heads          rank 0, 1  [w0]          rank 2, 3  [w1]

    Type: varying -> varying: :func:`meshcomm.pvary` of a replicated weight.

    Args:
        weight: ``[h*k, ...]``, a weight or a bias.
        heads: h, which divides n.
        axis: a name, or a tuple of names.
        mesh: the current mesh by default.

    Returns: ``[k, ...]``, a view.

    Backward: zeros for the other heads; the all_reduce of pvary sums over the ranks that share one.

    Cost: nothing; the weight is on all ranks.

    Raises:
        MeshError: heads that do not divide the axis or the weight; no such axis.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import heads_of
        >>> mesh = mc.make_mesh({"tp": 4})
        >>> mc.launch(lambda: heads_of(torch.tensor([1.0, 2.0]), 2, axis="tp", mesh=mesh).item(), ranks=4)
        [1.0, 1.0, 2.0, 2.0]

    Source: grouped-query attention (Ainslie et al., 2023) with more ranks than groups.
    """
    ax = check.axis_of("heads_of", axis, mesh)
    are_tensors("heads_of", ax, weight=weight)
    if not weight.ndim:
        check.explain("heads_of", "weight has no dims.", ax, fix="[h*k, ...]")
    if not check.whole_number(heads) or heads < 1 or ax.size % heads or weight.shape[0] % heads:
        what = (
            f"{heads!r} heads do not divide axis {ax.name!r} (size {ax.size}) and weight.shape[0] = {weight.shape[0]}."
        )
        check.explain("heads_of", what, ax, x=weight, fix="where the axis divides the heads, cut the weight")
    length = weight.shape[0] // heads
    return weight.narrow(0, ax.index // (ax.size // heads) * length, length)
