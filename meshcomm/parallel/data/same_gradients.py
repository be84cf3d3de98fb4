"""Whether the ranks have come to the same gradients, asked once for each module.

What a method does with parameters is reduced. What is done with them elsewhere is not, and is right only where all
ranks do it with equal values, such as a penalty; else ``.grad`` is another one on each rank, and soon the parameters
are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from meshcomm._torch import is_without_memory
from meshcomm.collectives.agree import agree
from meshcomm.errors import fail
from meshcomm.mesh import Axis

_MISSING = -1.0
_LEAST = {torch.float64: 1e-7, torch.float32: 1e-4}
"""From which difference of norms on: sums are the same bits on all ranks, and kernels of devices need not be."""


def compare(where: str, names: Sequence[str], leaves: Sequence[Tensor], axis: Axis) -> bool:
    """Fail, on every rank, if a gradient has another norm on one of them; False if none has any."""
    mine = _norms(leaves)
    rows = [_floats(row) for row in agree(_bits(mine), axis)]
    for at, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        found = [row[at] for row in rows]
        low, high = min(found), max(found)
        if low != high and (high == float("inf") or high - low > _LEAST.get(leaf.dtype, 1e-2) * high):
            _differ(where, name, found, axis)
    return any(norm != _MISSING for row in rows for norm in row)


def _differ(where: str, name: str, found: Sequence[float], axis: Axis) -> NoReturn:
    fail(
        where,
        f"the gradient of {name!r} is another one on each rank: the parameter was used outside of the module's "
        "methods, where gradients are not reduced.",
        got=f"norms {', '.join('none' if norm == _MISSING else f'{norm:.6g}' for norm in found[:8])} "
        f"along axis {axis.name!r}",
        fix='use it in forward, or in a method named in methods=; or mc.pvary(parameter, axis) there with grads="sum"',
    )


def _norms(leaves: Sequence[Tensor]) -> list[float]:
    with torch.no_grad():
        found = [_MISSING if g is None else _norm(g) for g in (leaf.grad for leaf in leaves)]
    return [norm if norm == norm else float("inf") for norm in found]


def _norm(g: Tensor) -> float:
    if is_without_memory(g):
        return 0.0
    norm: float = torch.linalg.vector_norm(g.coalesce().values() if g.is_sparse else g).item()
    return norm


def _bits(norms: Sequence[float]) -> list[int]:
    return list(struct.unpack(f"{len(norms)}q", struct.pack(f"{len(norms)}d", *norms)))


def _floats(bits: Sequence[int]) -> tuple[float, ...]:
    return struct.unpack(f"{len(bits)}d", struct.pack(f"{len(bits)}q", *bits))
