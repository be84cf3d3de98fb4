"""Cross-entropy over a vocabulary of which each rank has a part.

b batch, s sequence, v vocabulary, n size of the axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.reduce import all_reduce, pvary
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor.functions import are_tensors, own_rows, wrong
from meshcomm.runtime.ops import Op


@Op("vocab_cross_entropy", "logits varying", composed=True)
def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    axis: AxisName,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    mesh: Mesh | None = None,
) -> Tensor:
    """Cross-entropy of logits of which each rank has a part of the vocabulary; they are never gathered.

    ::

        "b s (tp v), b s ->"

    Type: logits varying; target and result invariant: reduce it over the other axes only.

    Args:
        logits: ``[..., v/n]``, floating point; half precision is computed in float32.
        target: integers ``[...]``, from 0 to v - 1, or ``ignore_index``.
        axis: a name, or a tuple of names.
        reduction: "mean" over what is not ignored, "sum", or "none".
        ignore_index: a target that counts nothing.
        label_smoothing: how much of the target is spread evenly over the vocabulary, from 0 to 1.
        mesh: the current mesh by default.

    Returns: ``[]``; ``[...]`` with "none". The dtype of the logits, float32 for half precision.

    Backward: softmax minus target, each rank its part; nothing is sent.

    Cost: all_reduces of one number per target for the maximum, and of two (three with smoothing) for the sums.

    Raises:
        MeshError: shapes that do not fit; targets that are no integers, or (on the CPU) not in the vocabulary; an
            unknown reduction; no such axis.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import vocab_cross_entropy
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
        >>> def loss():
        ...     mine = logits.chunk(2, 1)[mesh.rank]
        ...     return round(vocab_cross_entropy(mine, torch.tensor([2]), axis="tp", mesh=mesh).item(), 4)
        >>> mc.launch(loss, ranks=2)
        [1.3863, 1.3863]

    Source: Megatron-LM.
    """
    where = "vocab_cross_entropy"
    ax = check.axis_of(where, axis, mesh)
    are_tensors(where, ax, logits=logits, target=target)
    if not logits.is_floating_point():
        check.explain(where, "logits are not floating point.", ax, x=logits, fix="cast with x.float()")
    checked_targets(where, "logits", logits, logits.shape[:-1], target, reduction, label_smoothing, ax)
    rows, mine = own_rows(where, target, logits.shape[-1], ax, ignored=ignore_index)
    x = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    with torch.no_grad():  # it cancels
        top = all_reduce(x.amax(-1), axis, "max", mesh=ax.mesh)
    x = x - pvary(top, axis, mesh=ax.mesh).unsqueeze(-1)
    picked = x.gather(-1, rows.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
    parts = [x.exp().sum(-1), picked, *([x.sum(-1)] if label_smoothing else [])]
    sums = all_reduce(torch.stack(parts), axis, mesh=ax.mesh)
    log = sums[0].log()
    loss = log - sums[1]
    if label_smoothing:
        even = log - sums[2] / (logits.shape[-1] * ax.size)
        loss = (1 - label_smoothing) * loss + label_smoothing * even
    return reduced(loss, target != ignore_index, reduction)


def checked_targets(
    where: str,
    name: str,
    x: Tensor,
    rows: Sequence[int],
    target: Tensor,
    reduction: object,
    label_smoothing: object,
    axis: Axis | None,
) -> None:
    """What a loss of the rows of ``x`` is told besides: targets, how they are reduced, how smooth they are.

    ``rows``: the shape of all of them, which may be on several ranks.
    """
    if not x.ndim or (*rows,) != (*target.shape,):
        what = f"target {list(target.shape)} does not fit the {name}."
        wrong(where, what, axis, x, f"one target for each row of the {name}")
    if reduction not in ("mean", "sum", "none"):
        wrong(where, f"reduction={reduction!r} is none of 'mean', 'sum', 'none'.", axis, x, "one of them")
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
        wrong(where, f"label_smoothing={label_smoothing!r} is not from 0 to 1.", axis, x, "such as 0.1")


def reduced(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """The mean or sum of those that count, or all of them with zeros for the others."""
    losses = losses.masked_fill(~counted, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()
