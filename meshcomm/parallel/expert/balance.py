"""balance: experts that are chosen too often become less attractive."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.reduce import all_reduce
from meshcomm.errors import shape_text
from meshcomm.mesh import Mesh
from meshcomm.parallel.expert.experts import check_choice
from meshcomm.runtime.ops import Op

_WHERE = "balance"
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@Op(_WHERE, "invariant", composed=True)
def balance(bias: Tensor, choice: Tensor, axis: AxisName, *, rate: float, mesh: Mesh | None = None) -> Tensor:
    """The next bias of a router that balances its experts without a loss: once per optimiser step.

    ::

        choice = (scores + bias).topk(k).indices  # chosen with the bias
        weight = scores.gather(1, choice)  # weighted without it
        bias = parallel.balance(bias, choice, ("dp", "ep"), rate=1e-3)

    Type: invariant, of an invariant ``bias`` and a varying ``choice``.

    Args:
        bias: ``[count]``, floating point, one number per expert, the same on all ranks.
        choice: integers of any shape, the experts that this rank's tokens have chosen.
        axis: a name, or a tuple of names: all along which tokens differ.
        rate: how much a bias changes.
        mesh: the current mesh by default.

    Returns: ``[count]`` of bias' dtype, new storage: ``bias + rate * sign(mean - chosen)``.

    Backward: none; a bias is learned by this alone.

    Cost: one all_reduce of as many int64 as there are experts.

    Raises:
        MeshError: shapes or dtypes that do not fit; a choice that is no expert (on the CPU); a rate that is no number;
            no such axis.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm import parallel
        >>> mesh = mc.make_mesh({"ep": 2})
        >>> def main():
        ...     choice = torch.tensor([[0, 0, 1], [0, 1, 2]][mesh.rank])
        ...     return parallel.balance(torch.zeros(3), choice, "ep", rate=0.5, mesh=mesh).tolist()
        >>> mc.launch(main, ranks=2)
        [[-0.5, 0.0, 0.5], [-0.5, 0.0, 0.5]]

    Source: Auxiliary-Loss-Free Load Balancing (Wang et al., 2024), as DeepSeek-V3 has it.
    """
    ax = check.axis_of(_WHERE, axis, mesh)
    _fits(bias, choice, rate, ax)
    with torch.no_grad():
        chosen = all_reduce(torch.bincount(choice.reshape(-1), minlength=bias.shape[0]), axis, mesh=ax.mesh)
        short = chosen.sum() - chosen * bias.shape[0]  # the mean and each, times their number: exact
        return bias + rate * short.sign().to(bias.dtype)


def _fits(bias: Any, choice: Any, rate: Any, axis: Axis) -> None:
    check.tensor(_WHERE, bias, axis, "bias")
    check.tensor(_WHERE, choice, axis, "choice")
    if bias.dim() != 1 or not bias.is_floating_point():
        what = f"bias is {shape_text(bias.dtype, bias.shape)}."
        check.explain(_WHERE, what, axis, fix="floats [count], one per expert")
    if choice.dtype not in _INTEGERS:
        check.explain(_WHERE, f"choice is {choice.dtype}.", axis, fix="integers, the experts that were chosen")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not math.isfinite(rate):
        check.explain(_WHERE, f"rate={rate!r} is not a number.", axis, fix="such as 1e-3")
    if choice.device != bias.device:
        check.explain(
            _WHERE, f"choice is on {choice.device}, and bias on {bias.device}.", axis, fix="both on one device"
        )
    check_choice(_WHERE, choice, bias.shape[0], axis)
