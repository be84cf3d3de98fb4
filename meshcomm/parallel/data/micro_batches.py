"""Micro-batches: gradients that are reduced once for several backward passes."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from meshcomm.errors import fail
from meshcomm.parallel.data.replica import Replica, replica_of
from meshcomm.parallel.fsdp.buffers.memory import Held
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


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, fully sharded parameters are gathered once, and kept until they change or it ends.

    ::

        with gathered(model), no_sync(model):
            for x in micro_batches:
                loss(model(x)).backward()  # one all_gather per unit in all, and none in backward
        reduce_gradients(model)

    Type: nothing is changed but what is sent.

    Args:
        module: what :func:`fully_shard` was given, or a module around such ones, such as the step of a pipeline.

    Returns: a context manager. A parameter that is written meanwhile, by an optimiser, is gathered again.

    Cost: none of its own; units are gathered once in all, and the memory of all whole parameters is kept meanwhile.

    Raises:
        MeshError: a module that has nothing that is sharded.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import fully_shard, gathered
        >>> mesh = mc.make_mesh({"fsdp": 2})
        >>> def main():
        ...     model = fully_shard(torch.nn.Linear(8, 2), "fsdp", grads="mean", mesh=mesh)
        ...     with mc.trace() as seen, gathered(model):
        ...         for _ in range(3):
        ...             model(torch.ones(1, 8)).sum().backward()
        ...     return sum(event.operation == "all_gather" for event in seen.events)
        >>> mc.launch(main, ranks=2)
        [1, 1]

    Source: ``set_reshard_after_forward(False)`` and ``set_reshard_after_backward(False)`` of FSDP2.
    """
    inside = _found_in(module) if isinstance(module, nn.Module) else []
    found = [adaptor for adaptor in inside if isinstance(adaptor, Sharded)]
    if not found:
        fail("gathered", f"{type(module).__name__} is not fully sharded.", fix="the module that fully_shard was given")
    before = [known.held for known in found]
    for known in found:
        known.held = known.held or Held()
    try:
        yield
    finally:
        for known, held in zip(found, before, strict=True):
            known.held = held


@contextlib.contextmanager
def reduced_once(modules: Iterable[nn.Module]) -> Iterator[None]:
    """All backward passes of these modules inside are reduced together at the end, once each, and their buffers are
    sent then; nothing where they have no adaptors, or are under :func:`no_sync` already.
    """
    found = [adaptor for module in modules for adaptor in _found_in(module) if not _is_quiet(adaptor)]
    shared = _shared(found)
    before = [p.grad for p in shared]
    for p in shared:
        p.grad = None
    reduced: dict[nn.Parameter, Tensor | None] = {}
    with contextlib.ExitStack() as stack:
        for adaptor in found:
            stack.enter_context(adaptor.no_sync())
        yield
    for adaptor in found:
        adaptor.reduce_collected()
        own = {*adaptor.module.parameters()} if isinstance(adaptor, Replica) else set()
        for p in own.intersection(shared):
            reduced.setdefault(p, p.grad)
            p.grad = None
    for p, old in zip(shared, before, strict=True):
        g = reduced[p]
        p.grad = old if g is None else g if old is None else old + g
    for adaptor in found:
        if isinstance(adaptor, Replica) and adaptor.buffers and adaptor.module.training:
            adaptor.send_buffers()


def _shared(found: Iterable[Sharded | Replica]) -> list[nn.Parameter]:
    """Parameters that several replicas have, such as two stages of a model on one rank: the first one reduces them."""
    held = collections.Counter(p for each in found if isinstance(each, Replica) for p in {*each.module.parameters()})
    return [p for p, times in held.items() if times > 1]


def _is_quiet(adaptor: Sharded | Replica) -> bool:
    return adaptor.quiet if isinstance(adaptor, Sharded) else not adaptor.syncs


def _found_in(module: nn.Module) -> list[Sharded | Replica]:
    every = [known for part in module.modules() for known in (sharded_of(part), replica_of(part)) if known is not None]
    return list(dict.fromkeys(every))  # modules of a list have one


def _adaptors(where: str, module: nn.Module) -> list[Sharded | Replica]:
    """Who has collected something, in the order of the module."""
    found = _found_in(module) if isinstance(module, nn.Module) else []
    if not found:
        what = f"{type(module).__name__} is neither data parallel nor sharded."
        fail(where, what, fix="pass the module that data_parallel or fully_shard was given")
    return found
