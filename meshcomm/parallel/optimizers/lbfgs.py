"""LBFGS where ranks have parts of the parameters, or losses of their own.

Its step is torch's own, over vectors of which each rank has a part: ``x.dot(y)``, ``x.sum()`` and ``x.max()`` of them
are of all ranks, so that all come to the same decisions; everything else is of each number by itself.

::

    rank 0   flat gradient [g0 g1]     history [s0 s1] [y0 y1]     dot of its part \\
                                                                                    all_reduce -> rate, direction
    rank 1   flat gradient [g2 g3]     history [s2 s3] [y2 y3]     dot of its part /
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import LBFGS

from meshcomm import _torch
from meshcomm.collectives.reduce import all_reduce
from meshcomm.mesh import Mesh
from meshcomm.parallel.cut_parameters import Part, axes_of_parts, ranks_with
from meshcomm.parallel.optimizers.gradient_dtypes import put_gradient
from meshcomm.watch import paused


class Over:
    """All ranks of a mesh, and how many of them have each number of this rank's part of a vector."""

    def __init__(self, params: Sequence[Tensor], parts: Mapping[int, Sequence[Part]], mesh: Mesh) -> None:
        self.mesh = mesh
        shares, lengths = [], []
        for p in params:
            cut, elsewhere = axes_of_parts(p, parts.get(id(p), ()), mesh)
            ways = elsewhere * math.prod(mesh.shape[axis] for axis in cut if axis in mesh.shape)
            shares.append(ways / (mesh.size * ranks_with(p)))
            lengths.append(p.numel() * (2 if p.is_complex() else 1))
        self.share = shares[0]
        self.shares: Tensor | None = None
        if len({*shares}) > 1:
            counts = torch.tensor(lengths, device=params[0].device)
            self.shares = torch.tensor(shares, device=params[0].device, dtype=torch.float64).repeat_interleave(counts)

    def counted(self, x: Tensor) -> Tensor:
        """With what is on several ranks in part on each."""
        return x * self.share if self.shares is None else x * self.shares.to(x.dtype)

    def reduced(self, x: Tensor, op: Literal["sum", "mean", "max"]) -> Tensor:
        """Over all ranks."""
        with paused():
            return all_reduce(x, self.mesh.axis_names, op, mesh=self.mesh)


class Vector(Tensor):
    """A vector of which each rank has a part."""

    over: Over

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Torch's functions of it."""
        given = {id(x): x for each in args for x in (each if isinstance(each, (list, tuple)) else (each,))}
        over = next(x.over for x in given.values() if isinstance(x, Vector))
        with _torch.without_modes():
            if func is Tensor.dot:
                return over.reduced(over.counted(args[0]).dot(args[1]), "sum")
            if func is Tensor.sum and len(args) == 1:
                return over.reduced(over.counted(args[0]).sum(), "sum")
            if func is Tensor.max and len(args) == 1:
                own = args[0].max() if args[0].numel() else args[0].new_full((), -math.inf)
                return over.reduced(own, "max")
            found = func(*args, **(kwargs or {}))
            if not isinstance(found, Tensor) or id(found) in given:
                return found
            return vector(found, over)


def vector(x: Tensor, over: Over) -> Vector:
    """The same memory."""
    found = x.as_subclass(Vector)
    found.over = over
    return found


def plain(x: Any) -> Any:
    """The same memory as a tensor, of what has lists of them too."""
    if isinstance(x, list):
        return [plain(each) for each in x]
    with _torch.without_modes():
        return x.as_subclass(Tensor) if isinstance(x, Vector) else x


def begin_step(
    optimizer: LBFGS, closure: Callable[[], Any], parts: Mapping[int, Sequence[Part]], mesh: Mesh
) -> tuple[LBFGS, Callable[[], Tensor]]:
    """Who makes the step in place of ``optimizer``, and its closure: with the mean of all ranks' losses."""
    [group] = optimizer.param_groups
    params = group["params"]
    over = Over(params, parts, mesh)
    here = [p.detach() for p in params]
    other = LBFGS(here, **{key: group[key] for key in optimizer.defaults})
    other.state[here[0]] = optimizer.state[params[0]]

    def evaluate() -> Tensor:
        loss = closure()
        for x, p in zip(here, params, strict=True):
            x.grad = None
            if p.grad is not None:
                with _torch.without_modes():
                    put_gradient(x, vector(p.grad.detach(), over))
        loss = (
            loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64, device=mesh.device)
        )
        return over.reduced(loss, "mean")

    return other, evaluate


def end_step(optimizer: LBFGS, other: LBFGS) -> None:
    """Its states are plain tensors again."""
    for p, here in zip(optimizer.param_groups[0]["params"][:1], other.param_groups[0]["params"][:1], strict=True):
        optimizer.state[p] = {key: plain(x) for key, x in other.state[here].items()}
