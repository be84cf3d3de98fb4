"""Tensor and sequence parallelism as functions: matrices are cut over an axis, and activations along the sequence.

    column   "b s d, (tp f) d -> b s (tp f)"              x is the same on all ranks, its gradient is summed
    row      "b s (tp f), d (tp f) -> b s d"              ends in a sum
    with sequence=True activations between them are cut along s, "b (tp s) d": an all_gather, and a reduce_scatter

Weights lie as torch's modules have them. b batch, s sequence (the last dim but one), d width, f features of a layer,
n size of the axis.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from meshcomm.collectives import check
from meshcomm.collectives.gather import all_gather
from meshcomm.collectives.reduce import all_reduce, pvary, reduce_scatter
from meshcomm.mesh import Axis, AxisName, Mesh
from meshcomm.runtime.ops import Op

__all__ = [
    "are_tensors", "column_linear", "enter", "leave", "row_linear", "sequence_layer_norm", "sequence_rms_norm",
]  # fmt: skip


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


def are_tensors(where: str, axis: Axis, **given: Tensor | None) -> None:
    """Those that are given are tensors, of whatever class: the first one, which is communicated, is a plain one."""
    for number, (name, x) in enumerate(given.items()):
        if x is not None and (number == 0 or not isinstance(x, Tensor)):
            check.tensor(where, x, axis, name)


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


# ------------------------------------------------------------------------------------------------------------- norms


@Op("sequence_layer_norm", "``x`` and result varying", communicates=False, composed=True)
def sequence_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    axis: AxisName,
    eps: float = 1e-5,
    mesh: Mesh | None = None,
) -> Tensor:
    """Layer norm of activations that are cut along the sequence.

    Type: ``x`` and result varying; weight and bias invariant.

    Args:
        x: ``[..., s/n, d]``.
        weight: ``[d]``.
        bias: ``[d]``.
        axis: a name, or a tuple of names.
        eps: added to the variance.
        mesh: the current mesh by default.

    Returns: the shape of ``x``.

    Backward: the gradients of weight and bias are summed over the axis.

    Cost: nothing; an all_reduce of ``[d]`` each in backward.

    Raises:
        MeshError: a weight that is not ``[d]``; no such axis.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import sequence_layer_norm
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> mc.launch(lambda: sequence_layer_norm(torch.tensor([[1.0, 3.0]]), axis="tp", eps=0, mesh=mesh).tolist(), 2)
        [[[-1.0, 1.0]], [[-1.0, 1.0]]]

    Source: Korthikanti et al., 2022.
    """
    w, b = _varied("sequence_layer_norm", x, (weight, bias), axis, mesh, eps)
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


@Op("sequence_rms_norm", "``x`` and result varying", communicates=False, composed=True)
def sequence_rms_norm(
    x: Tensor, weight: Tensor | None = None, *, axis: AxisName, eps: float | None = None, mesh: Mesh | None = None
) -> Tensor:
    """RMS norm of activations that are cut along the sequence.

    Type: ``x`` and result varying; weight invariant.

    Args:
        x: ``[..., s/n, d]``.
        weight: ``[d]``.
        axis: a name, or a tuple of names.
        eps: added to the mean square; the smallest of the dtype by default.
        mesh: the current mesh by default.

    Returns: the shape of ``x``.

    Backward: the gradient of the weight is summed over the axis.

    Cost: nothing; an all_reduce of ``[d]`` in backward.

    Raises:
        MeshError: a weight that is not ``[d]``; no such axis.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import sequence_rms_norm
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> mc.launch(lambda: sequence_rms_norm(torch.tensor([[2.0, 2.0]]), axis="tp", mesh=mesh).tolist(), ranks=2)
        [[[1.0, 1.0]], [[1.0, 1.0]]]

    Source: Korthikanti et al., 2022; Zhang and Sennrich, 2019.
    """
    (w,) = _varied("sequence_rms_norm", x, (weight,), axis, mesh, eps)
    return F.rms_norm(x, x.shape[-1:], w, eps)


def _varied(
    where: str, x: Tensor, params: tuple[Tensor | None, ...], axis: AxisName, mesh: Mesh | None, eps: float | None
) -> list[Tensor | None]:
    ax = check.axis_of(where, axis, mesh)
    are_tensors(where, ax, x=x)
    if not x.ndim:
        check.explain(where, "x has no dims.", ax, x=x, fix="[..., s/n, d]")
    if not x.is_floating_point():
        check.explain(where, "x is not floating point.", ax, x=x, fix="cast with x.float()")
    if eps is not None and (not isinstance(eps, (int, float)) or not eps >= 0):
        check.explain(where, f"eps={eps!r} is not a number from 0 on.", ax, x=x, fix="such as 1e-5")
    for p in params:
        if p is not None and not isinstance(p, Tensor):
            check.tensor(where, p, ax, "a parameter")
        if p is not None and p.shape != x.shape[-1:]:
            what = f"a parameter of shape {list(p.shape)} is not [{math.prod(x.shape[-1:])}]."
            check.explain(where, what, ax, x=x, fix="[d], the same on every rank")
    return [None if p is None else pvary(p, axis, mesh=ax.mesh) for p in params]
