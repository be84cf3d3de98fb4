"""Keys and values go around the ranks, and each takes what its queries see of them.

n ranks; index r has the keys of r - i in step i, while those of the next step are on their way::

    forward            step 0      1        2                 backward, gathered again: the same way once more, and with
    rank 0   q0   kv0 ----> kv2 ----> kv1                     each kv its gradient, which goes one step further, home
    rank 1   q1   kv1 ----> kv0 ----> kv2                     kept: the gradients go the other way, from the last step
    rank 2   q2   kv2 ----> kv1 ----> kv0                     to the first

Shifts are the same on all ranks whatever a rank has to compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from meshcomm._torch import dual_level_open, functorch_active, without_modes
from meshcomm.axis import Axis
from meshcomm.collectives.exchange.permute import shift
from meshcomm.collectives.gather import all_gather
from meshcomm.parallel.context import blocks
from meshcomm.parallel.context.blocks import Seen
from meshcomm.watch import paused

Pair = tuple[Tensor, Tensor]


class Ring(NamedTuple):
    """How it goes around."""

    axis: Axis | None
    """None: nowhere."""
    seen: Seen
    regather: bool

    def begun(self, pair: Pair, offset: int = 1) -> Any:
        """The Work of what comes from the neighbour."""
        assert self.axis is not None
        return shift(pair, self.axis.name, offset, mesh=self.axis.mesh, async_op=True)

    def begun_first(self, pair: Pair, needs_grad: bool) -> Any:
        """The same of the first step: who compares calls compares whether backward will go around as well."""
        if not needs_grad:
            return self.begun(pair)
        with torch.enable_grad():
            return self.begun((pair[0].requires_grad_(), pair[1].requires_grad_()))

    def source(self, step: int) -> int:
        """Whose keys are here."""
        return (self.seen.mine - step) % self.seen.n


def attend(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Pair:
    """``[b, h, s, e]`` of q's dtype and ``[b, h, s]`` of the wide one, with derivatives of every order."""
    if torch.compiler.is_compiling() or functorch_active() or dual_level_open():
        return _at_once(q, k, v, ring)
    found: Pair = _Around.apply(q, k, v, ring)  # type: ignore[no-untyped-call]
    return found


def _at_once(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Pair:
    """The same in functions that torch and this library know all derivatives of; the scores are there as a whole."""
    t = k.shape[2]
    if ring.axis is not None:
        k, v = all_gather((k, v), ring.axis.name, 2, mesh=ring.axis.mesh)
    out, lse = blocks.by_hand(q, k, v, ring.seen.whole(q.shape[2], t, q.device), ring.seen.scale)
    return out.to(q.dtype), lse


class _Around(Function):
    """Backward goes around again; where a graph of it is made, it is that of :func:`_at_once`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Pair:
        with paused(), without_modes():
            out, lse, kept = _forward(q, k, v, ring, any(ctx.needs_input_grad))
        ctx.ring = ring
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *(x for pair in kept for x in pair))
        return out, lse

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *kept = ctx.saved_tensors
        g = torch.zeros_like(out) if g is None else g
        with paused(), without_modes():
            if torch.is_grad_enabled():
                return *_differentiably(q, k, v, g, g_lse, ctx.ring), None
            pairs = list(zip(kept[::2], kept[1::2], strict=True))
            return *_backward((g, g_lse), q, (k, v), (out, lse), pairs, ctx.ring), None


def _forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring, needs_grad: bool) -> tuple[Tensor, Tensor, list[Pair]]:
    n, s, t, dtype = ring.seen.n, q.shape[2], k.shape[2], blocks.wide(q.dtype)
    out = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=dtype)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    pair, kept = (k.detach(), v.detach()), []
    for step in range(n):
        first = step == 0 and n > 1
        work = ring.begun_first(pair, needs_grad) if first else ring.begun(pair) if step < n - 1 else None
        pair = pair[0].detach(), pair[1].detach()
        for piece, mask in ring.seen.blocks(s, t, ring.source(step), q.device):
            at, keys = (slice(None), slice(None), piece.queries), (slice(None), slice(None), piece.keys)
            found = blocks.forward(q[at], pair[0][keys], pair[1][keys], mask, piece.diagonal, ring.seen.scale)
            out[at], lse[at] = _merged(out[at], lse[at], *found)
        if work is not None:
            coming = work.wait()
            pair = coming[0].detach(), coming[1].detach()
            kept += [] if ring.regather else [pair]
    return out.to(q.dtype), lse, kept


def _merged(out: Tensor, lse: Tensor, more: Tensor, its: Tensor) -> Pair:
    """What two sets of keys give together."""
    whole = torch.logaddexp(lse, its)
    top = whole.masked_fill(whole == -torch.inf, 0)
    return out * (lse - top).exp().unsqueeze(-1) + more * (its - top).exp().unsqueeze(-1), whole


def _backward(
    gradients: tuple[Tensor, Tensor | None], q: Tensor, own: Pair, results: Pair, kept: list[Pair], ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    (g, g_lse), (out, lse) = gradients, results
    s, t, dtype = q.shape[2], own[0].shape[2], blocks.wide(q.dtype)
    of_q = torch.zeros_like(q, dtype=dtype)
    if ring.seen.documents is not None or ring.seen.mask is not None:  # else each place sees itself, or all
        none = lse == -torch.inf
        g, lse = g.masked_fill(none.unsqueeze(-1), 0), lse.masked_fill(none, torch.inf)  # exp(z - lse) is 0 there
        g_lse = None if g_lse is None else g_lse.masked_fill(none, 0)  # of a function of -inf it may be no number

    def of_keys(pair: Pair, step: int) -> Pair:
        of_k, of_v = (torch.zeros_like(x, dtype=dtype) for x in pair)
        for piece, mask in ring.seen.blocks(s, t, ring.source(step), q.device):
            at, keys = (slice(None), slice(None), piece.queries), (slice(None), slice(None), piece.keys)
            mine = g_lse if g_lse is None else g_lse[at]
            here, there = (q[at], pair[0][keys], pair[1][keys]), (out[at], lse[at])
            found = blocks.backward(g[at], *here, *there, mine, mask, piece.diagonal, ring.seen.scale)
            for total, part in zip((of_q[at], of_k[keys], of_v[keys]), found, strict=True):
                total += part
        return of_k, of_v

    of_k, of_v = _home(of_keys, own, ring) if ring.regather else _back(of_keys, [own, *kept], ring)
    return of_q.to(q.dtype), of_k.to(q.dtype), of_v.to(q.dtype)


def _home(of_keys: Any, pair: Pair, ring: Ring) -> Pair:
    """Keys go around once more, and what each rank adds to their gradients goes with them, in the wide dtype: rounded
    at each of n steps it would be wrong by about sqrt(n) times as much. The last step carries what is complete.
    """
    n, narrow = ring.seen.n, pair[0].dtype
    coming: Any = None
    for step in range(n):
        work = ring.begun(pair) if step < n - 1 else None
        total: Pair = of_keys(pair, step)
        if coming is not None:
            total = _sum(coming.wait(), total)
        if step == n - 1:
            total = total[0].to(narrow), total[1].to(narrow)
        coming = ring.begun(total) if n > 1 else None
        pair = pair if work is None else work.wait()
    return total if coming is None else coming.wait()


def _back(of_keys: Any, pairs: list[Pair], ring: Ring) -> Pair:
    """All keys are here: their gradients go the other way."""
    coming: Any = None
    for step in reversed(range(ring.seen.n)):
        total: Pair = of_keys(pairs[step], step)
        if coming is not None:
            total = _sum(coming.wait(), total)
        coming = ring.begun(total, -1) if step else None
    return total


def _sum(one: Pair, other: Pair) -> Pair:
    return one[0] + other[0], one[1] + other[1]


def _differentiably(q: Tensor, k: Tensor, v: Tensor, g: Tensor, g_lse: Tensor | None, ring: Ring) -> Iterator[Tensor]:
    """The gradients as functions of all that they are made of."""
    given = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = _at_once(given[0], given[1], given[2], ring)
    results = [(out, g)] + ([] if g_lse is None else [(lse, g_lse)])
    return iter(torch.autograd.grad([y for y, _ in results], given, [of for _, of in results], create_graph=True))
