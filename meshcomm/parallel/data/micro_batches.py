"""Micro-batches: gradients that are reduced once for several backward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from meshcomm.errors import fail
from meshcomm.parallel.data.replica import Replica, replica_of
from meshcomm.parallel.fsdp.units import Sharded, sharded_of
from meshcomm.runtime.ops import Op


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Add gradients up on each rank, and reduce nothing: for all but the last micro-batch of a step.

    ::

        with no_sync(model):
            loss(model(x0)).backward()  # nothing is sent
        loss(model(x1)).backward()  # reduces the gradients of both

    What counts is where the forward pass runs: a backward pass reduces if its forward pass was outside, wherever it
    runs itself, and then reduces what was collected before too. :func:`reduce_gradients` does so without one.

    Args:
        module: what :func:`data_parallel` or :func:`fully_shard` was given, or a module around such ones.

    Returns: a context manager.

    Cost: none with data_parallel. With fully_shard the unreduced gradients of all parameters stay on each rank, and not
        in ``.grad``.

    Raises:
        MeshError: another module. And in a backward pass of data_parallel that has both kinds of gradients.

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
    with contextlib.ExitStack() as stack:
        for adaptor in _adaptors("no_sync", module):
            stack.enter_context(adaptor.no_sync())
        yield


@Op("reduce_gradients", "afterwards each ``.grad``", composed=True)
def reduce_gradients(module: nn.Module) -> None:
    """Reduce now what :func:`no_sync` has collected, without another step.

    ::

        with no_sync(model):
            for x in micro_batches:
                loss(model(x)).backward()
        reduce_gradients(model)

    Type: afterwards each ``.grad`` is what it would be had the last of the backward passes reduced. All ranks call.

    Args:
        module: what :func:`data_parallel` or :func:`fully_shard` was given, or a module around such ones.

    Returns: nothing. Where nothing was collected nothing changes.

    Cost: that of the reductions of a step, none of which runs beside a backward pass; with fully_shard first an
        all_reduce of a number per unit.

    Raises:
        MeshError: another module.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def step():
        ...     model = mc.parallel.data_parallel(torch.nn.Linear(1, 1, bias=False), "dp", grads="sum", mesh=mesh)
        ...     with mc.parallel.no_sync(model):
        ...         model(torch.tensor([[1.0 + mesh.rank]])).sum().backward()
        ...     mc.parallel.reduce_gradients(model)
        ...     return model.weight.grad.item()
        >>> mc.launch(step, ranks=2)
        [3.0, 3.0]

    Source: none.
    """
    for adaptor in _adaptors("reduce_gradients", module):
        adaptor.reduce_collected()


def _adaptors(where: str, module: nn.Module) -> list[Sharded | Replica]:
    """Who has collected something, in the order of the module."""
    inner = list(module.modules()) if isinstance(module, nn.Module) else []
    found = [known for part in inner for known in (sharded_of(part), replica_of(part)) if known is not None]
    if not found:
        what = f"{type(module).__name__} is neither data parallel nor sharded."
        fail(where, what, fix="pass the module that data_parallel or fully_shard was given")
    return found
