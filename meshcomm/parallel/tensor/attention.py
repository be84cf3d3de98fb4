"""Attention of which each rank computes some heads.

b batch, s sequence, d width, h heads, k length of a head, n size of the axis.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from meshcomm.axis import AxisName
from meshcomm.collectives import check
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor.functions import are_tensors, enter, row_linear
from meshcomm.runtime.ops import Op


@Op("parallel_attention", "as :func:`enter` and :func:`leave` have it", composed=True)
def parallel_attention(
    x: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    axis: AxisName,
    heads: int,
    kv_heads: int | None = None,
    causal: bool = True,
    sequence: bool = False,
    mesh: Mesh | None = None,
) -> Tensor:
    """Attention of which each rank computes some heads.

    ::

        "b s d, (tp h k) d -> b s (tp h k)" for q, k, v;  attention per head;  "b s (tp h k), d (tp h k) -> b s d"

    Type: as :func:`enter` and :func:`leave` have it; weights varying.

    Args:
        x: ``[b, s, d]``; ``[b, s/n, d]`` with ``sequence``.
        q: ``[h*k/n, d]``, this rank's heads.
        k: ``[kv_heads*k/n, d]``; where there are fewer of them than ranks ``[k, d]``, as :func:`heads_of` gives.
        v: as ``k``.
        out: ``[d, h*k/n]``.
        axis: a name, or a tuple of names.
        heads: h, of all ranks; the axis divides them.
        kv_heads: of keys and values, which groups of query heads share; h by default.
        causal: whether a place sees those before it only.
        sequence: whether activations outside are cut along the sequence.
        mesh: the current mesh by default.

    Returns: the shape of ``x``.

    Backward: one sum for the gradient of ``x``, whatever the number of weights.

    Cost: one all_reduce forwards and one backwards; with ``sequence`` an all_gather and a reduce_scatter each way.

    Raises:
        MeshError: heads that the axis does not divide; kv_heads that neither divide nor are divided by the axis;
            weights that do not fit.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import parallel_attention
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> def attend():
        ...     w = torch.eye(4).chunk(2)[mesh.rank]  # two heads of length two
        ...     return parallel_attention(torch.ones(1, 3, 4), w, w, w, w.T, axis="tp", heads=2, mesh=mesh).sum().item()
        >>> mc.launch(attend, ranks=2)
        [12.0, 12.0]

    Source: Megatron-LM; Ainslie et al., 2023.
    """
    where = "parallel_attention"
    ax = check.axis_of(where, axis, mesh)
    are_tensors(where, ax, x=x, q=q, k=k, v=v, out=out)
    kv_heads = heads if kv_heads is None else kv_heads
    for name, number in (("heads", heads), ("kv_heads", kv_heads)):
        if not check.whole_number(number) or number < 1:
            check.explain(where, f"{name}={number!r} is not a positive int.", ax, fix="how many there are on all ranks")
    if heads % ax.size or heads % kv_heads or (kv_heads % ax.size and ax.size % kv_heads):
        what = (
            f"{heads} heads and {kv_heads} of keys and values cannot be divided over axis {ax.name!r} (size {ax.size})."
        )
        check.explain(where, what, ax, x=x, fix="heads that the axis divides, and kv_heads that divide them")
    if x.ndim < 2:
        check.explain(where, f"x {list(x.shape)} is not [b, s, d].", ax, x=x, fix="x.unsqueeze(0) for a batch of one")
    here, groups = heads // ax.size, max(1, kv_heads // ax.size)
    length = q.shape[0] // here if q.ndim else 0
    for name, weight, count in (("q", q, here), ("k", k, groups), ("v", v, groups)):
        if tuple(weight.shape) != (count * length, x.shape[-1]):
            what = f"{name} {list(weight.shape)} is not [{count * length}, {x.shape[-1]}]."
            check.explain(where, what, ax, x=x, fix="[heads here * length, d], this rank's heads")
    if tuple(out.shape) != (x.shape[-1], here * length):
        what = f"out {list(out.shape)} is not [{x.shape[-1]}, {here * length}]."
        check.explain(where, what, ax, x=x, fix="[d, heads here * length], this rank's columns")
    x = enter(x, axis, sequence=sequence, mesh=ax.mesh)
    queries, keys, values = (
        F.linear(x, weight).unflatten(-1, (count, length)).transpose(-2, -3)
        for weight, count in ((q, here), (k, groups), (v, groups))
    )
    y = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=here != groups)
    return row_linear(y.transpose(-2, -3).flatten(-2), out, axis=axis, sequence=sequence, mesh=ax.mesh)
