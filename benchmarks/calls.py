"""Each collective three times: meshcomm's, what a user of torch.distributed would write, and what must come out.

Torch's side has the same meaning as ours: the input stays as it is and the result is a new tensor. What must come out
is computed on each rank alone, from every rank's values: integers so small that every sum is exact in the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import meshcomm as mc
from benchmarks.bandwidth import ROOT
from benchmarks.peers import gather_single, scatter_single

AXIS = "ranks"
PERIOD = 65_521  # values repeat after so many elements: a prime, so that shares of a power of two differ
SPREAD = 100  # the largest value, if a reduction of such values is exact
EXACT: Mapping[torch.dtype, int] = {
    torch.float32: 2**24,
    torch.float64: 2**53,
    torch.float16: 2**11,
    torch.bfloat16: 2**8,
    torch.int8: 2**7 - 1,
    torch.uint8: 2**8 - 1,
    torch.int32: 2**31 - 1,
    torch.int64: 2**63 - 1,
}
"""The dtypes that gloo and NCCL both take; all integers up to this one are exact."""
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
TWOS = 6  # ranks whose factors of a product are not all 1


@dataclass(frozen=True)
class Problem:
    """One collective on ``count`` elements (of a share, where the buffer is cut over the ranks), seen by one rank."""

    collective: str
    count: int
    op: str  # "none" where nothing is reduced
    dtype: torch.dtype
    rank: int
    ranks: int
    device: torch.device
    mesh: mc.Mesh

    @property
    def is_root(self) -> bool:
        return self.rank == ROOT

    def stretched(self, tile: Tensor, start: int = 0) -> Tensor:
        """``count`` elements of the endless repetition of ``tile``, from ``start`` on."""
        repeated = tile.to(self.dtype).roll(-(start % PERIOD)).repeat(-(-self.count // PERIOD))
        return repeated[: self.count].to(self.device)

    def tile(self, rank: int) -> Tensor:
        """The values of a rank, which repeat."""
        return tile_of(rank, self.ranks, self.dtype, self.op)

    def share(self, rank: int, index: int = 0) -> Tensor:
        """Share ``index`` of what a rank holds."""
        return self.stretched(self.tile(rank), index * self.count)

    def reduced(self, index: int = 0) -> Tensor:
        """Share ``index`` of the reduction of what all ranks hold."""
        tiles = [self.tile(rank) for rank in range(self.ranks)]
        return self.stretched(reduced_tile(tiles, self.op), index * self.count)


def tile_of(rank: int, ranks: int, dtype: torch.dtype, op: str) -> Tensor:
    """A rank's values: random, the same on every rank that asks, and as small as ``op`` over the ranks needs them."""
    random = torch.Generator().manual_seed(rank)
    if op == "product":
        return torch.randint(1, 3 if rank < TWOS else 2, (PERIOD,), generator=random)
    step = ranks if op == "mean" else 1  # a mean of multiples is an integer
    largest = EXACT[dtype] // (step * ranks if op in ("sum", "mean") else 1)
    if largest < 1:
        raise ValueError(f"a {op} over {ranks} ranks is not exact in {dtype}: choose another --dtype")
    return step * torch.randint(0, min(SPREAD, largest) + 1, (PERIOD,), generator=random)


def reduced_tile(tiles: list[Tensor], op: str) -> Tensor:
    stack = torch.stack(tiles)
    if op == "max":
        return stack.amax(0)
    if op == "min":
        return stack.amin(0)
    if op == "product":
        return stack.prod(0)
    total = stack.sum(0)
    return total // len(tiles) if op == "mean" else total


# ------------------------------------------------------------------------------------------ what goes in and comes out


def given(p: Problem) -> Tensor:
    """What this rank passes. Where only the root's counts, the others pass something else."""
    if p.collective in ("reduce_scatter", "all_to_all", "scatter"):
        return torch.cat([p.share(p.rank, index) for index in range(p.ranks)])
    return p.share(p.rank)


def expected(p: Problem) -> Tensor | None:
    """What this rank must get."""
    if p.collective in ("all_reduce", "pvary"):
        return p.reduced()
    if p.collective == "reduce_scatter":
        return p.reduced(p.rank)
    if p.collective == "reduce":
        return p.reduced() if p.is_root else None
    if p.collective in ("all_gather", "all_gather_invariant") or (p.collective == "gather" and p.is_root):
        return torch.cat([p.share(rank) for rank in range(p.ranks)])
    if p.collective == "gather" or (p.collective == "send" and not receives(p)):
        return None
    if p.collective == "all_to_all":
        return torch.cat([p.share(rank, p.rank) for rank in range(p.ranks)])
    if p.collective == "scatter":
        return p.share(ROOT, p.rank)
    source = {"broadcast": ROOT, "shift": (p.rank - 1) % p.ranks, "permute": mirrored(p), "send": p.rank - 1}
    return p.share(source[p.collective])


def mirrored(p: Problem) -> int:
    """Whom this rank exchanges with in the permutation; in the middle, itself."""
    return p.ranks - 1 - p.rank


def receives(p: Problem) -> bool:
    """Whether this rank gets a message, from the one before it, which gets none."""
    return p.rank % 2 == 1


def sends(p: Problem) -> bool:
    """The others do, where there is one after them."""
    return p.rank % 2 == 0 and p.rank + 1 < p.ranks


def count_wrong(result: Tensor | None, wanted: Tensor | None) -> int:
    """The elements of a result that are not what they must be; all of them if its shape or dtype is another."""
    if wanted is None:
        return 0 if result is None else result.numel()
    if result is None or result.shape != wanted.shape or result.dtype != wanted.dtype:
        return wanted.numel()
    return int((result != wanted).sum())


# ------------------------------------------------------------------------------------------------------------ ours

Collective = Callable[[Problem, Tensor], Tensor | None]


def pvary_backward(p: Problem, x: Tensor) -> Tensor:
    """Forward pvary is no operation: what is timed is both, whose gradient is ``x`` summed."""
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(mc.pvary(leaf, AXIS, mesh=p.mesh), leaf, x)[0]


def permute(p: Problem, x: Tensor) -> Tensor:
    return mc.permute(x, AXIS, [(rank, p.ranks - 1 - rank) for rank in range(p.ranks)], mesh=p.mesh)


def send(p: Problem, x: Tensor) -> Tensor | None:
    if sends(p):
        mc.send(x, AXIS, p.rank + 1, mesh=p.mesh)
    return mc.recv(AXIS, p.rank - 1, shape=x.shape, dtype=x.dtype, mesh=p.mesh) if receives(p) else None


def scatter(p: Problem, x: Tensor) -> Tensor:
    """With ``like``, as torch's is told the shape of its result."""
    return mc.scatter(x if p.is_root else None, AXIS, ROOT, like=x[: p.count], mesh=p.mesh)


OURS: Mapping[str, Collective] = {
    "all_reduce": lambda p, x: mc.all_reduce(x, AXIS, p.op, mesh=p.mesh),
    "all_gather": lambda p, x: mc.all_gather(x, AXIS, mesh=p.mesh),
    "all_gather_invariant": lambda p, x: mc.all_gather_invariant(x, AXIS, mesh=p.mesh),
    "reduce_scatter": lambda p, x: mc.reduce_scatter(x, AXIS, op=p.op, mesh=p.mesh),
    "all_to_all": lambda p, x: mc.all_to_all(x, AXIS, 0, 0, mesh=p.mesh),
    "broadcast": lambda p, x: mc.broadcast(x, AXIS, ROOT, mesh=p.mesh),
    "shift": lambda p, x: mc.shift(x, AXIS, mesh=p.mesh),
    "permute": permute,
    "send": send,
    "reduce": lambda p, x: mc.reduce(x, AXIS, ROOT, p.op, mesh=p.mesh),
    "gather": lambda p, x: mc.gather(x, AXIS, ROOT, mesh=p.mesh),
    "scatter": scatter,
    "pvary": pvary_backward,
}


# ------------------------------------------------------------------------------------- the floor: in private memory


def copied(p: Problem, xs: list[Tensor], out: Tensor | None = None) -> Tensor | None:
    """What this rank has to copy and to sum for its result, were all ranks' tensors ``xs`` in its own memory. It is
    written to ``out``, whose memory has been touched, or to new memory.
    """
    if p.collective in ("all_reduce", "pvary"):
        out, parts = torch.empty_like(xs[0]) if out is None else out, [x.tensor_split(p.ranks) for x in xs]
        for index, into in enumerate(out.tensor_split(p.ranks)):
            summed([each[index] for each in parts], into) if index == p.rank else into.copy_(parts[index][index])
        return out
    if p.collective == "reduce_scatter":
        rows = [x.chunk(p.ranks)[p.rank] for x in xs]
        return summed(rows, torch.empty_like(rows[0]) if out is None else out)
    if (p.collective in ("reduce", "gather") and not p.is_root) or (p.collective == "send" and not receives(p)):
        return None
    if p.collective == "reduce":
        return summed(xs, torch.empty_like(xs[0]) if out is None else out)
    if p.collective in ("all_gather", "all_gather_invariant", "gather"):
        return torch.cat(xs, out=out)
    if p.collective == "all_to_all":
        return torch.cat([x.chunk(p.ranks)[p.rank] for x in xs], out=out)
    source = xs[ROOT][: p.count]
    return source.clone() if out is None else out.copy_(source)


def lent(p: Problem, x: Tensor) -> list[Tensor]:
    """What the others read of this rank's tensor, which it has to write to where they can."""
    if p.collective in ("reduce_scatter", "all_to_all") or (p.collective == "scatter" and p.is_root):
        return [row for rank, row in enumerate(x.chunk(p.ranks)) if rank != p.rank]
    if p.collective in ("reduce", "gather"):
        return [] if p.is_root else [x]
    if p.collective in ("broadcast", "scatter"):
        return [x] if p.is_root else []
    if p.collective == "send":
        return [x] if sends(p) else []
    return [] if p.collective == "permute" and mirrored(p) == p.rank else [x]


def lent_and_copied(p: Problem, x: Tensor, room: Tensor, xs: list[Tensor], out: Tensor | None = None) -> Tensor | None:
    """The same copies and sums as between processes: what the others read is written to ``room``, then as above."""
    start = 0
    for part in lent(p, x):
        room[start : start + part.numel()].copy_(part)
        start += part.numel()
    return copied(p, xs, out)


def summed(xs: list[Tensor], out: Tensor) -> Tensor:
    """One after the other, each into the same memory."""
    torch.add(xs[0], xs[1], out=out)
    for x in xs[2:]:
        out.add_(x)
    return out


# -------------------------------------------------------------------------------------------- torch.distributed's own


def dist_all_reduce(p: Problem, x: Tensor) -> Tensor:
    out = x.clone()
    dist.all_reduce(out, REDUCE_OPS[p.op])
    return out


def dist_all_gather(p: Problem, x: Tensor) -> Tensor:
    out = x.new_empty(p.ranks * p.count)
    gather_single(out, x)
    return out


def dist_reduce_scatter(p: Problem, x: Tensor) -> Tensor:
    out = x.new_empty(p.count)
    scatter_single(out, x, REDUCE_OPS[p.op])
    return out


def dist_all_to_all(p: Problem, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def dist_broadcast(p: Problem, x: Tensor) -> Tensor:
    out = x.clone()
    dist.broadcast(out, ROOT)
    return out


def dist_shift(p: Problem, x: Tensor) -> Tensor:
    return send_and_receive(x, (p.rank + 1) % p.ranks, (p.rank - 1) % p.ranks)


def dist_permute(p: Problem, x: Tensor) -> Tensor:
    other = mirrored(p)
    return x.clone() if other == p.rank else send_and_receive(x, other, other)


def send_and_receive(x: Tensor, to: int, source: int) -> Tensor:
    out = torch.empty_like(x)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, to), dist.P2POp(dist.irecv, out, source)]):
        work.wait()
    return out


def dist_send(p: Problem, x: Tensor) -> Tensor | None:
    if sends(p):
        dist.send(x, p.rank + 1)
    if not receives(p):
        return None
    out = torch.empty_like(x)
    dist.recv(out, p.rank - 1)
    return out


def dist_reduce(p: Problem, x: Tensor) -> Tensor | None:
    out = x.clone()
    dist.reduce(out, ROOT, REDUCE_OPS[p.op])
    return out if p.is_root else None


def dist_gather(p: Problem, x: Tensor) -> Tensor | None:
    out = x.new_empty(p.ranks * p.count) if p.is_root else None
    dist.gather(x, None if out is None else list(out.chunk(p.ranks)), ROOT)
    return out


def dist_scatter(p: Problem, x: Tensor) -> Tensor:
    out = x.new_empty(p.count)
    dist.scatter(out, list(x.chunk(p.ranks)) if p.is_root else None, ROOT)
    return out


THEIRS: Mapping[str, tuple[Collective, str]] = {
    "all_reduce": (dist_all_reduce, "clone + all_reduce"),
    "all_gather": (dist_all_gather, f"empty + {gather_single.__name__}"),
    "all_gather_invariant": (dist_all_gather, f"empty + {gather_single.__name__}"),
    "reduce_scatter": (dist_reduce_scatter, f"empty + {scatter_single.__name__}"),
    "all_to_all": (dist_all_to_all, "empty + all_to_all_single"),
    "broadcast": (dist_broadcast, "clone + broadcast"),
    "shift": (dist_shift, "empty + batch_isend_irecv"),
    "permute": (dist_permute, "empty + batch_isend_irecv"),
    "send": (dist_send, "send, empty + recv"),
    "reduce": (dist_reduce, "clone + reduce"),
    "gather": (dist_gather, "empty + gather into its parts"),
    "scatter": (dist_scatter, "empty + scatter of the parts"),
    "pvary": (dist_all_reduce, "clone + all_reduce of the gradient"),
}
