"""Batch norm over the batches of all ranks of an axis.

n = size of the axis, b = this rank's batch, c = channels.
"""

from __future__ import annotations

import math
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.gather import all_gather
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.parallel.cut_parameters import checked_module
from meshcomm.parallel.stand_ins import around_innermost
from meshcomm.runtime.ops import Op

M = TypeVar("M", bound=nn.Module)
_WHERE = "sync_batch_norm"
_HALF = (torch.float16, torch.bfloat16)
_LAZY = nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d
_KINDS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}


@Op("sync_batch_norm", "V -> V", composed=True)
def sync_batch_norm(
    x: Tensor,
    axis: AxisName,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    mesh: Mesh | None = None,
) -> Tensor:
    """Batch norm with the mean and the variance of the batches of all ranks.

    ::

        rank 0  [a]      [(a - m) / s]      m, s: of a and b together
        rank 1  [b]  ->  [(b - m) / s]

    Type: varying -> varying. ``weight`` and ``bias`` are varying too: :func:`meshcomm.pvary` of what is replicated.

    Args:
        x: ``[b, c, ...]``, floating point; b may differ between ranks, and be 0 on some.
        axis: a name, or a tuple of names.
        weight: ``[c]``; 1 by default.
        bias: ``[c]``; 0 by default.
        running_mean: ``[c]``, changed in place in training, and used otherwise. Invariant.
        running_var: the same for the variance, which is the unbiased one.
        training: whether to use the statistics of the batches. Without running statistics they are used always.
        momentum: how much of the running statistics is replaced.
        eps: added to the variance.
        mesh: the current mesh by default.

    Returns: the shape and dtype of ``x``, new storage. Statistics of half precision are computed in float32.

    Backward: through the statistics too; the all_gather becomes a reduce_scatter.

    Cost: one all_gather of 2 c + 1 numbers per rank, and a reduce_scatter of as many in backward; nothing where the
        running statistics are used.

    Raises:
        MeshError: fewer than two dims; not floating point; a weight, a bias or statistics that are not ``[c]``.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import sync_batch_norm
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def normed():
        ...     return sync_batch_norm(torch.tensor([[2.0 * mesh.rank]]), "dp", eps=0.0, mesh=mesh).item()
        >>> mc.launch(normed, ranks=2)
        [-1.0, 1.0]

    Source: Ioffe and Szegedy, 2015; statistics of parts put together as Chan et al., 1983; ``torch.nn.SyncBatchNorm``.
    """
    ax = check.axis_of(_WHERE, axis, mesh)
    check.tensor(_WHERE, x, ax)
    if x.ndim < 2:
        check.explain(_WHERE, "x has no dim of channels.", ax, x=x, fix="[batch, channels, ...]")
    if not x.is_floating_point():
        check.explain(_WHERE, "x is not floating point.", ax, x=x, fix="cast with x.float()")
    given = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            check.tensor(_WHERE, value, ax, name)
        if value is not None and tuple(value.shape) != (x.shape[1],):
            what = f"{name} is not [{x.shape[1]}] but {list(value.shape)}."
            check.explain(_WHERE, what, ax, x=x, fix="one number per channel")
    if (running_mean is None) != (running_var is None):
        check.explain(_WHERE, "running_mean and running_var are given together.", ax, fix="both of them, or none")
    for name, number, most in (("momentum", momentum, 1), ("eps", eps, math.inf)):
        if not isinstance(number, (int, float)) or not 0 <= number <= most:
            fix = "from 0 to 1" if most == 1 else "from 0 on"
            check.explain(_WHERE, f"{name}={number!r} is not a number {fix}.", ax, fix=f"a number {fix}")
    if training or running_mean is None or running_var is None:
        mean, var, count = _statistics(x, ax)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
                unbiased = var.detach() * (count / (count - 1).clamp(min=1))
                running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    else:
        mean, var = running_mean, running_var
    return _normed(x, mean, var, weight, bias, eps)


def _statistics(x: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance over all ranks, and of how many values per channel."""
    dims = [dim for dim in range(x.ndim) if dim != 1]
    here = x.float() if x.dtype in _HALF else x
    size = x.numel() // max(x.shape[1], 1)
    mean = here.sum(dims) / max(size, 1)
    squares = (here - _along(mean, x)).square().sum(dims)
    parts = all_gather(torch.cat([mean, squares, mean.new_tensor([size])])[None], axis.name, mesh=axis.mesh)
    means, sums, sizes = parts.split([len(mean), len(mean), 1], 1)
    sizes = sizes.detach()
    count = sizes.sum()
    whole = (means * sizes).sum(0) / count.clamp(min=1)
    squares = sums.sum(0) + ((means - whole).square() * sizes).sum(0)
    return whole, squares / count.clamp(min=1), count


def _normed(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    scale = (var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    y = (x - _along(mean, x)) * _along(scale, x)
    return (y if bias is None else y + _along(bias, x)).to(x.dtype)


def _along(values: Tensor, x: Tensor) -> Tensor:
    """Per channel, to be used with ``x``."""
    return values.view(1, -1, *[1] * (x.ndim - 2))


class SyncBatchNorm(nn.SyncBatchNorm):
    """A module for :func:`sync_batch_norm` with the parameters, buffers and arguments of ``torch.nn.BatchNorm1d`` to
    ``3d``; made by :func:`convert_batch_norm`.
    """

    def __init__(
        self,
        num_features: int,
        axis: AxisName,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        mesh: Mesh | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, None, device, dtype)
        ax = check.axis_of(_WHERE, axis, mesh)
        self.axis, self.mesh = ax.name, ax.mesh
        self.ndims: tuple[int, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise: ``[b, c, ...]`` of this rank."""
        if self.ndims is not None and x.ndim not in self.ndims:
            what = f"x has {x.ndim} dims, and {' or '.join(map(str, self.ndims))} were expected."
            fail(_WHERE, what, fix="[batch, channels, ...]")
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # an average of all batches
                momentum = 1.0 / float(self.num_batches_tracked)
        return sync_batch_norm(
            x,
            self.axis,
            weight=self.weight,
            bias=self.bias,
            running_mean=self.running_mean,
            running_var=self.running_var,
            training=self.training,
            momentum=momentum,
            eps=self.eps,
            mesh=self.mesh,
        )


def convert_batch_norm(module: M, axis: AxisName, *, mesh: Mesh | None = None) -> M:
    """Make each ``BatchNorm1d``, ``2d`` and ``3d`` in ``module`` a :class:`SyncBatchNorm` over ``axis``.

    The modules stay where they are, with their parameters, buffers and hooks, and become of that class. Classes of
    one's own that are derived from these, and those whose forward was replaced, stay what they are.

    Args:
        module: the same on every rank.
        axis: a name, or a tuple of names.
        mesh: the current mesh by default.

    Returns: ``module``.

    Cost: nothing is sent.

    Raises:
        MeshError: not a module; no such axis; a lazy batch norm, which becomes another module with its first batch.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import convert_batch_norm
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> mc.launch(lambda: type(convert_batch_norm(model, "dp", mesh=mesh)[1]).__name__, ranks=2)
        ['SyncBatchNorm', 'SyncBatchNorm']

    Source: ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``.
    """
    checked_module("convert_batch_norm", module)
    ax = check.axis_of("convert_batch_norm", axis, mesh)
    lazy = [(path, part) for path, part in module.named_modules() if isinstance(part, _LAZY)]
    if lazy:  # what it becomes with its first batch would normalise by the rows of each rank
        [(path, first), *_] = lazy
        who = repr(path) if path else "the module"
        what = f"{who} is still a {type(first).__name__}, which becomes another module with its first batch."
        fail("convert_batch_norm", what, fix="run the module once before")
    for part in module.modules():
        if type(part) in _KINDS and _runs_forward_of_its_class(part):
            _convert(part, ax)
    return module


def _runs_forward_of_its_class(part: nn.Module) -> bool:
    """Whether no other function stands in the place of its forward; adaptors stand around it."""
    around = around_innermost(part.forward)
    return getattr(part.forward if around is None else around.own, "__func__", None) is type(part).forward


def _convert(part: Any, axis: Axis) -> None:
    """In place: who holds it, hooks and adaptors among them, goes on with it."""
    around = around_innermost(part.forward)
    part.axis, part.mesh, part.ndims, part.process_group = axis.name, axis.mesh, _KINDS[type(part)], None
    part.__class__ = SyncBatchNorm
    if around is not None:
        around.own = MethodType(SyncBatchNorm.forward, part)


def local_batch_norms(module: nn.Module) -> list[str]:
    """The names of batch norms in ``module`` that normalise by the rows of each rank alone."""
    return [name for name, part in module.named_modules() if isinstance(part, tuple(_KINDS))]
