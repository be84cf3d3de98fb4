"""Steps of Adafactor and Muon, which look at whole tensors, where a parameter is cut: one after another is put together
for its step, and each rank takes its part again.

::

    parts of p, g, momentum  --all_gather-->  whole  --torch's own step-->  whole  --own part-->  parts

What they keep for every number (momentum) stays in parts; means over rows and columns are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshcomm.collectives.gather import all_gather_invariant
from meshcomm.parallel.cut_parameters import Dim, Flat, Part
from meshcomm.parallel.optimizers.gradient_dtypes import put_gradient
from meshcomm.parallel.optimizers.shares import WHOLE_STATES
from meshcomm.parallel.optimizers.stand_in import stand_in, step_of


def step_whole(optimizer: Optimizer, group: dict[str, Any], p: Tensor, parts: Sequence[Part]) -> None:
    """Torch's step of one parameter that is cut; ``parts``: what was made of it, slices first."""
    flat = parts[0].how
    if isinstance(flat, Flat) and _has_owner(flat) and flat.stop - flat.start < flat.shape.numel():
        optimizer.state.pop(p, None)  # of a checkpoint, and of yesterday after this step
        return
    state = optimizer.state.get(p, {})
    whole = _whole(p.detach(), parts)
    assert p.grad is not None
    put_gradient(whole, _whole(p.grad.detach(), parts))
    cut = {key for key, x in state.items() if isinstance(x, Tensor) and x.shape == p.shape and key not in WHOLE_STATES}
    held = {key: _whole(x, parts) if key in cut else x for key, x in state.items()}
    groups = [[whole] if each is group else [] for each in optimizer.param_groups]
    one = stand_in(optimizer, groups, [(whole, held)] if held else [])
    one.param_groups = [each for each in one.param_groups if each["params"]]
    step_of(type(optimizer))(one)
    p.copy_(_part(whole, parts).view(p.shape))
    optimizer.state[p] = {
        key: _part(x, parts).view(p.shape).clone() if _is_like(key, x, whole) else x
        for key, x in one.state[whole].items()
    }


def _is_like(key: str, x: object, whole: Tensor) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0 and x.shape == whole.shape and key not in WHOLE_STATES


def _has_owner(flat: Flat) -> bool:
    """One rank has all of it, and makes the step by itself."""
    return any(last - first == flat.shape.numel() for first, last in flat.ranges)


def _whole(x: Tensor, parts: Sequence[Part]) -> Tensor:
    for part in parts:
        how = part.how
        if isinstance(how, Dim):
            x = _joined(x, part, how)
        elif _has_owner(how):
            x = x.reshape(how.shape)
        else:
            sizes = [last - first for first, last in how.ranges]
            x = all_gather_invariant(x.reshape(-1), part.axis, sizes=sizes, mesh=part.mesh).view(how.shape)
    return x.clone(memory_format=torch.contiguous_format)


def _joined(x: Tensor, part: Part, how: Dim) -> Tensor:
    """Cut along a dim, in each of some lengths."""
    size = part.size
    found = all_gather_invariant(x, part.axis, how.dim, mesh=part.mesh)
    if len(how.lengths) == 1:
        return found
    ranks = [each.split([length // size for length in how.lengths], how.dim) for each in found.chunk(size, how.dim)]
    return torch.cat([of_rank[at] for at in range(len(how.lengths)) for of_rank in ranks], how.dim)


def _part(x: Tensor, parts: Sequence[Part]) -> Tensor:
    """What this rank has of a tensor that is whole."""
    for part in reversed(parts):
        how = part.how
        if isinstance(how, Flat):
            x = x.reshape(-1)[how.start : how.stop]
        else:
            size = part.size
            x = torch.cat([each.chunk(size, how.dim)[part.at] for each in x.split(how.lengths, how.dim)], how.dim)
    return x
