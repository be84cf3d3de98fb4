"""Norms of activations that are cut along the sequence.

s sequence, d width, n size of the axis.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from meshcomm.axis import AxisName
from meshcomm.collectives import check
from meshcomm.collectives.reduce import pvary
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor.functions import are_tensors
from meshcomm.runtime.ops import Op


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
