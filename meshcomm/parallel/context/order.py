"""Which places of a sequence each rank has.

Four ranks and a causal mask: who comes later attends to more. In zigzag each has one early and one late chunk::

    contiguous   0 0 1 1 2 2 3 3        rank 3 has 7 times the work of rank 0
    zigzag       0 1 2 3 3 2 1 0        all have the same
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshcomm.axis import AxisName
from meshcomm.collectives import check
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op

ORDERS = "zigzag", "contiguous"


class Piece(NamedTuple):
    """Some of this rank's queries and some keys of one rank."""

    queries: slice
    keys: slice
    diagonal: bool
    """Whether these are the same places, of which each attends to those up to it; else each attends to all."""


def places(length: int, n: int, index: int, order: str) -> Tensor:
    """Where in the sequence the ``length`` places of this index are."""
    if order == "contiguous":
        return torch.arange(index * length, (index + 1) * length, device="cpu")
    half = length // 2
    early, late = index * half, (2 * n - 1 - index) * half
    return torch.cat(
        [torch.arange(early, early + half, device="cpu"), torch.arange(late, late + length - half, device="cpu")]
    )


def pieces(length: int, n: int, mine: int, other: int, order: str) -> list[Piece]:
    """What a causal mask leaves of the queries of ``mine`` and the keys of ``other``."""
    every = slice(0, length)
    if mine == other:
        return [Piece(every, every, True)]
    if order == "contiguous":
        return [Piece(every, every, False)] if other < mine else []
    half = length // 2
    if other < mine:  # its early chunk is before both of these, its late one after both
        return [Piece(every, slice(0, half), False)]
    return [Piece(slice(half, length), every, False)]


@Op("context_order", "invariant", communicates=False)
def context_order(length: int, axis: AxisName, order: str = "zigzag", *, mesh: Mesh | None = None) -> Tensor:
    """The permutation of a sequence after which chunk r of it is what index r has in :func:`context_attention`.

    ::

        tokens = tokens[:, parallel.context_order(tokens.shape[1], "cp")]  # labels and positions, too; once
        mine = mc.shard(tokens, "cp", 1)

    Of 2n chunks of a sequence index r has, in zigzag, chunk r and chunk 2n-1-r, so that under a causal mask all have
    as much to compute. ``order.argsort()`` takes results back.

    Type: invariant.

    Args:
        length: of the whole sequence.
        axis: a name, or a tuple of names, over which the sequence goes around; with ``heads_axis`` not that one, along
            which each chunk is cut once more: ``"b (cp heads s)"``.
        order: "zigzag" or "contiguous".
        mesh: the current mesh by default.

    Returns: int64 ``[length]`` on the mesh's device, new storage: the place in the sequence of each place after it.

    Backward: none.

    Cost: none.

    Raises:
        MeshError: no such axis or order; a length that 2n (contiguous: n) does not divide.

    Example:
        >>> import meshcomm as mc
        >>> from meshcomm import parallel
        >>> parallel.context_order(8, "cp", mesh=mc.make_mesh({"cp": 2})).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]

    Source: Striped Attention (Brandon et al., 2023); Llama 3 (Dubey et al., 2024), whose chunks these are.
    """
    where = "context_order"
    over = check.mesh_of(where, axis, mesh)
    n = over.size_of(axis, where)
    if not isinstance(order, str) or order not in ORDERS:
        fail(where, f"order={order!r} is no order.", fix='"zigzag" or "contiguous"')
    if not check.whole_number(length) or length < 0:
        fail(where, f"length={length!r} is not a length.", fix="an int: of the whole sequence")
    parts = n * (2 if order == "zigzag" and n > 1 else 1)
    if length % parts:
        what = f"a sequence of {length} cannot be cut into {parts} chunks as long as each other."
        other = ', or order="contiguous"' if order == "zigzag" else ""
        fail(where, what, got=f"mesh {over.shape}", fix=f"pad it to {-(-length // parts) * parts}{other}")
    found = torch.cat([places(length // n, n, index, order) for index in range(n)])
    return found.to(over.device)
