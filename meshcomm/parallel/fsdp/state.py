"""What can be asked of a fully sharded module: its counters, and which part of each parameter this rank has."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from meshcomm.parallel.fsdp.slots import Counts
from meshcomm.parallel.fsdp.units import owner_of


def counts(module: nn.Module) -> Counts:
    """What a sharded module has communicated since :func:`fully_shard`.

    Args:
        module: what :func:`fully_shard` was given.

    Returns: a copy of the counters: ``gathers`` (``regathers`` of them for backward, ``ahead`` of them before they
    were needed), ``reductions``, ``replica_reductions``, ``bytes_gathered`` and ``bytes_reduced``.

    Cost: none.

    Raises:
        MeshError: the module is not sharded.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import counts, fully_shard, no_sync
        >>> mesh = mc.make_mesh({"fsdp": 2})
        >>> def main():
        ...     model = fully_shard(torch.nn.Linear(8, 1), "fsdp", grads="mean", mesh=mesh)
        ...     with no_sync(model):
        ...         model(torch.ones(1, 8)).sum().backward()
        ...     model(torch.ones(1, 8)).sum().backward()
        ...     return model.weight.grad[:2].tolist(), counts(model).reductions
        >>> mc.launch(main, ranks=2)[0]
        ([2.0, 2.0], 1)
    """
    return Counts(**vars(owner_of("counts", module).counts))


class Piece(NamedTuple):
    """What this rank keeps of a parameter: elements ``start`` to ``stop`` of the flattened ``shape``."""

    shape: torch.Size
    start: int
    stop: int
    whole: bool


def pieces(module: nn.Module) -> dict[str, Piece]:
    """What this rank keeps of each parameter, by its name.

    Args:
        module: what :func:`fully_shard` was given.

    Returns: name to :class:`Piece`; a parameter with several names has the first. Of a whole parameter that another
    rank owns ``start`` and ``stop`` are equal.

    Cost: none.

    Raises:
        MeshError: the module is not sharded.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import fully_shard
        >>> from meshcomm.parallel import pieces
        >>> mesh = mc.make_mesh({"fsdp": 2})
        >>> mc.launch(
        ...     lambda: pieces(fully_shard(torch.nn.Linear(8, 2), "fsdp", grads="sum", mesh=mesh))["weight"], ranks=2
        ... )
        [Piece(shape=torch.Size([2, 8]), start=0, stop=16, whole=False),
         Piece(shape=torch.Size([2, 8]), start=0, stop=0, whole=False)]
    """
    found = {}
    for group, at, slot in owner_of("pieces", module).slots():
        start, stop = group.layout.range_of(at, group.index)
        found[slot.name] = Piece(group.layout.entries[at].shape, start, stop, group.layout.whole)
    return found
