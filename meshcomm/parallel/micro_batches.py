"""Micro-batches: gradients that are reduced once for several backward passes."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from meshcomm.errors import fail
from meshcomm.parallel import ddp, fsdp_state
from meshcomm.parallel.fsdp_units import is_sharded

__all__ = ["no_sync"]


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Add gradients up on each rank, and reduce nothing: for all but the last micro-batch of a step.

    ::

        with no_sync(model):
            loss(model(x0)).backward()  # nothing is sent
        loss(model(x1)).backward()  # reduces the gradients of both

    Args:
        module: what :func:`data_parallel` or :func:`fully_shard` was given.

    Returns: a context manager.

    Cost: none with data_parallel. With fully_shard the unreduced gradients of all parameters stay on each rank.

    Raises:
        MeshError: another module.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def step():
        ...     model = mc.parallel.data_parallel(torch.nn.Linear(1, 1, bias=False), "dp", grads="sum", mesh=mesh)
        ...     with mc.parallel.no_sync(model):
        ...         model(torch.tensor([[1.0]])).sum().backward()
        ...     model(torch.tensor([[10.0 * mesh.rank]])).sum().backward()
        ...     return model.weight.grad.item()
        >>> mc.launch(step, ranks=2)
        [12.0, 12.0]

    Source: ``DistributedDataParallel.no_sync``.
    """
    if not isinstance(module, nn.Module) or not (is_sharded(module) or ddp.is_data_parallel(module)):
        what = f"{type(module).__name__} is neither data parallel nor sharded."
        fail("no_sync", what, fix="pass the module that data_parallel or fully_shard was given")
    return fsdp_state.no_sync(module) if is_sharded(module) else ddp.no_sync(module)
