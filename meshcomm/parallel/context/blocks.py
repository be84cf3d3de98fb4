"""One block: some queries of this rank and the keys of one rank, by a kernel where there is one, else by hand.

b batch, h heads, s queries, t keys, e width; k and v may have fewer heads, each of which then serves h / heads of q.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from meshcomm._torch import Attention, attention_kernel
from meshcomm.parallel.context.order import Piece, pieces, places

Mask = Callable[[Tensor, Tensor], Tensor]


class Seen(NamedTuple):
    """Who attends to whom, over all ranks."""

    n: int
    mine: int
    """This rank's index."""
    causal: bool
    order: str
    documents: Tensor | None
    """``[n, s]`` or ``[n, b, s]``: of all ranks."""
    mask: Mask | None
    scale: float

    def blocks(self, s: int, t: int, other: int, device: torch.device) -> list[tuple[Piece, Tensor | None]]:
        """What is to be computed of ``s`` queries here and ``t`` keys of another rank, each with its mask, if it has
        one that is not its diagonal alone.
        """
        if not self.causal:
            whole = Piece(slice(0, s), slice(0, t), False)
            return [(whole, self._mask(whole, s, t, other, device))]
        return [
            (piece, self._mask(piece, s, t, other, device)) for piece in pieces(s, self.n, self.mine, other, self.order)
        ]

    def _mask(self, piece: Piece, s: int, t: int, other: int, device: torch.device) -> Tensor | None:
        if self.documents is None and self.mask is None:
            return None
        i = places(s, self.n, self.mine, self.order)[piece.queries, None].to(device)
        j = places(t, self.n, other, self.order)[None, piece.keys].to(device)
        parts = [i >= j] if piece.diagonal else []
        if self.mask is not None:
            parts.append(self.mask(i, j))
        if self.documents is not None:
            mine = self.documents[self.mine][..., piece.queries, None]
            same = mine == self.documents[other][..., None, piece.keys]
            parts.append(same if same.dim() == 2 else same.unsqueeze(1))
        seen = parts[0]
        for part in parts[1:]:
            seen = seen & part
        return seen.expand(*seen.shape[:-2], i.shape[0], j.shape[1])

    def whole(self, s: int, t: int, device: torch.device) -> Tensor | None:
        """The mask of this rank's queries and the keys of all ranks; None: each attends to each."""
        if not (self.causal or self.documents is not None or self.mask is not None):
            return None
        i = places(s, self.n, self.mine, self.order)[:, None].to(device)
        j = torch.cat([places(t, self.n, other, self.order) for other in range(self.n)])[None].to(device)
        seen = i >= j if self.causal else torch.ones(i.shape[0], j.shape[1], dtype=torch.bool, device=device)
        if self.mask is not None:
            seen = seen & self.mask(i, j)
        if self.documents is not None:
            keys = torch.cat(list(self.documents), -1)
            same = self.documents[self.mine][..., :, None] == keys[..., None, :]
            seen = seen & (same if same.dim() == 2 else same.unsqueeze(1))
        return seen


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which blocks are put together."""
    return torch.promote_types(dtype, torch.float32)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, diagonal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The result ``[b, h, s, e]``, and the log of the sum of exponentials ``[b, h, s]``, -inf where nothing is seen."""
    of = Attention(q, k, v, mask, diagonal and mask is None, scale)
    if (kernel := attention_kernel(of)) is not None:
        return kernel.forward(of)
    return by_hand(q, k, v, _with_diagonal(mask, diagonal, q, k), scale)


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The same in operations that have all derivatives, in the wide dtype."""
    z = _scores(q, k, mask, scale)
    top = z.detach().amax(-1, keepdim=True) if k.shape[2] else z.new_full((*z.shape[:-1], 1), -torch.inf)
    top = top.masked_fill(top == -torch.inf, 0)
    p = (z - top).exp()
    total = p.sum(-1)
    none = total == 0
    total = total.masked_fill(none, 1)
    out = _over_groups(p, v.to(p.dtype)) / total.unsqueeze(-1)
    return out, (total.log() + top.squeeze(-1)).masked_fill(none, -torch.inf)


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    g_lse: Tensor | None,
    mask: Tensor | None,
    diagonal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v where ``out`` and ``lse`` are those of all keys, lse +inf where nothing was seen."""
    of = Attention(q, k, v, mask, diagonal and mask is None, scale)
    if g_lse is None and (kernel := attention_kernel(of)) is not None:
        return kernel.backward(of, g, out, lse)
    z = _scores(q, k, _with_diagonal(mask, diagonal, q, k), scale)
    p = (z - lse.unsqueeze(-1)).exp()
    g, q, k, v, out = (x.to(p.dtype) for x in (g, q, k, v, out))
    lost = (g * out).sum(-1, keepdim=True)
    lost = lost if g_lse is None else lost - g_lse.unsqueeze(-1)
    of_z = p * (_over_groups(g, v.mT) - lost) * scale
    return _over_groups(of_z, k), _of_groups(of_z, q, k), _of_groups(p, g, v)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    dtype = wide(q.dtype)
    z = _over_groups(q.to(dtype), k.to(dtype).mT) * scale
    return z if mask is None else z.masked_fill(~mask, -torch.inf)


def _with_diagonal(mask: Tensor | None, diagonal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    if mask is not None or not diagonal:
        return mask  # which has it
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()


def _over_groups(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y`` of h heads and of fewer."""
    if x.shape[1] == y.shape[1]:
        return x @ y
    found: Tensor = x.unflatten(1, (y.shape[1], -1)) @ y.unsqueeze(2)
    return found.flatten(1, 2)


def _of_groups(x: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """``x^T @ y``, summed over the heads that share one of ``like``."""
    if x.shape[1] == like.shape[1]:
        return x.mT @ y
    parts = like.shape[1], -1
    found: Tensor = x.unflatten(1, parts).mT @ y.unflatten(1, parts)
    return found.sum(2)
