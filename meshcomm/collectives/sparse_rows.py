"""Sums over ranks of sparse gradients, of which each rank has some rows: those of embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from meshcomm.collectives.agree import agree
from meshcomm.collectives.rule import apply, rule_named
from meshcomm.mesh import Axis


def sum_of_rows(
    g: Tensor | None,
    kind: tuple[torch.Size, torch.dtype, torch.device],
    axis: Axis,
    over: int = 1,
    travels: torch.dtype | None = None,
) -> Tensor | None:
    """The sum of what the ranks have, divided by ``over``: sparse, with each row that any rank has, or dense where one
    of them is; None where none has a gradient. ``kind``: its shape, dtype and device. Rows travel in ``travels``.

    Cost: each rank receives the rows of the others, padded to the most that one of them has.
    """
    shape, dtype, device = kind
    is_dense = g is not None and not g.is_sparse
    if g is not None:
        g = (g.to_sparse(1) if is_dense else g).coalesce()
    counts, dense = zip(*agree([-1 if g is None else g._nnz(), is_dense], axis), strict=True)
    if max(counts) < 0:
        return None
    sizes = tuple(max(count, 0) for count in counts)
    if g is None:
        rows, values = torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, *shape[1:], device=device)
    else:
        rows, values = g.indices()[0], g.values()
    values = values.to(travels or dtype)
    if sum(sizes):
        gather = rule_named("all_gather")
        rows, values = apply(gather, rows, axis, (0, sizes)), apply(gather, values, axis, (0, sizes))
    values = (values if over == 1 else values / over).to(dtype)
    total = torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False)
    return total.to_dense() if any(dense) else total.coalesce()
