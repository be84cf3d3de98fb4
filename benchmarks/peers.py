"""What who uses torch.distributed writes in place of each collective, and the floor: torch's own C++ call under it.

Each takes a tensor and the dim that is cut or joined, and gives a new tensor of the same meaning as ours. Where the dim
is not the first one and something lies before it, torch's call needs a copy, and so does everybody who makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has renamed two; the old names warn there, which costs time.
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Peer = Callable[[Tensor], Tensor]
OPTIONS = dist.AllreduceOptions()  # of a sum, by default


def joined(out: Tensor, dim: int) -> Tensor:
    """[ranks, *shape] with the ranks put before ``dim`` and joined with it: a view where that can be."""
    return out.flatten(0, 1) if dim == 0 else out.movedim(0, dim).flatten(dim, dim + 1)


def parted(x: Tensor, dim: int, ranks: int) -> Tensor:
    """The other way round: parts one behind the other, contiguous."""
    return x.unflatten(dim, (ranks, -1)).movedim(dim, 0).flatten(0, 1).contiguous() if dim else x


# ------------------------------------------------------------------------------------------------------ torch's calls


def all_reduce(x: Tensor, call: Callable[[Tensor], Any]) -> Tensor:
    out = x.clone()
    call(out)
    return out


def all_gather(x: Tensor, dim: int, ranks: int, call: Callable[[Tensor, Tensor], Any]) -> Tensor:
    if dim == 0:
        out = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
        call(out, x)
        return out
    out = x.new_empty((ranks, *x.shape))
    call(out.view(-1, *x.shape[1:]), x)
    return joined(out, dim)


def reduce_scatter(x: Tensor, dim: int, ranks: int, call: Callable[[Tensor, Tensor], Any]) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= ranks
    out = x.new_empty(shape)
    call(out, parted(x, dim, ranks))
    return out


def all_to_all(x: Tensor, dim: int, ranks: int, call: Callable[[Tensor, Tensor], Any]) -> Tensor:
    """Cut at the first dim, joined at ``dim``."""
    out = torch.empty_like(x)
    call(out, x)
    return out if dim == 0 else joined(out.view(ranks, -1, *x.shape[1:]), dim)


def in_a_ring(x: Tensor, ranks: int) -> Tensor:
    out = torch.empty_like(x)
    pair = [dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, out, ranks - 1)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return out


def in_a_ring_of(x: Tensor, ranks: int, group: dist.ProcessGroup) -> Tensor:
    """The same in C++ alone."""
    out = torch.empty_like(x)
    works = [group.send([x], 1, 0), group.recv([out], ranks - 1, 0)]
    for work in works:
        work.wait()
    return out


def shard(x: Tensor, dim: int, ranks: int) -> Tensor:
    return x.narrow(dim, 0, x.shape[dim] // ranks).clone()


def later(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same with ``async_op=True``, waited for at once."""
    return lambda *args: call(*args, async_op=True).wait()


def peers_of(ranks: int, dim: int, *, asynchronous: bool = False) -> Mapping[str, tuple[Peer, str]]:
    """By collective: what a user writes, and its name."""
    how = later if asynchronous else lambda call: call
    broadcast = how(partial(dist.broadcast, src=0))
    return {
        "all_reduce": (partial(all_reduce, call=how(dist.all_reduce)), "clone + all_reduce"),
        "all_gather": (
            partial(all_gather, dim=dim, ranks=ranks, call=how(gather_single)), f"empty + {gather_single.__name__}",
        ),
        "reduce_scatter": (
            partial(reduce_scatter, dim=dim, ranks=ranks, call=how(scatter_single)),
            f"empty + {scatter_single.__name__}",
        ),
        "all_to_all": (
            partial(all_to_all, dim=dim, ranks=ranks, call=how(dist.all_to_all_single)), "empty + all_to_all_single",
        ),
        "broadcast": (partial(all_reduce, call=broadcast), "clone + broadcast"),
        "permute": (partial(in_a_ring, ranks=ranks), "empty + batch_isend_irecv"),
        "shift": (partial(in_a_ring, ranks=ranks), "empty + batch_isend_irecv"),
        "shard": (partial(shard, dim=dim, ranks=ranks), "narrow + clone"),
    }  # fmt: skip


def floors_of(ranks: int, dim: int, group: dist.ProcessGroup) -> Mapping[str, Peer]:
    """By collective: the same result by torch's C++ call itself, private where it must be."""
    raw: Any = group
    return {
        "all_reduce": partial(all_reduce, call=lambda x: group.allreduce([x], OPTIONS).wait()),
        "all_gather": partial(all_gather, dim=dim, ranks=ranks, call=lambda out, x: raw._allgather_base(out, x).wait()),
        "reduce_scatter": partial(
            reduce_scatter, dim=dim, ranks=ranks,
            call=lambda out, x: raw._reduce_scatter_base(out, x, dist.ReduceScatterOptions()).wait(),
        ),
        "all_to_all": partial(
            all_to_all, dim=dim, ranks=ranks, call=lambda out, x: group.alltoall_base(out, x, [], []).wait()
        ),
        "broadcast": partial(all_reduce, call=lambda x: group.broadcast([x], dist.BroadcastOptions()).wait()),
        "permute": partial(in_a_ring_of, ranks=ranks, group=group),
        "shift": partial(in_a_ring_of, ranks=ranks, group=group),
        "shard": partial(shard, dim=dim, ranks=ranks),
    }  # fmt: skip
