"""experts: tokens go to the ranks that have their experts, and come back.

Two ranks, four experts, a token's choice beside it::

    rank 0  a->2  b->0  c->3        by expert  b | a c        arrive  b e | .     fn of experts 0 1
    rank 1  d->3  e->0              by expert  e | d     -->  arrive  a | c d     fn of experts 2 3

and the rows that fn gives go back the same way, each times its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from meshcomm._torch import functorch_active, nodes_of_graph, without_modes
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.exchange.all_to_all import all_to_all
from meshcomm.collectives.exchange.ragged import all_to_all_ragged, lengths_of
from meshcomm.collectives.messages import tie
from meshcomm.errors import shape_text
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.dry.world import is_dry
from meshcomm.spmd.types.reachable import Reachable
from meshcomm.watch import here, paused

_WHERE = "experts"
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_NEAR = 256
"""Nodes of a graph that are looked at: more than fn has."""

Fn = Callable[[Tensor, Tensor], Tensor]


@overload
def experts(
    x: Tensor,
    choice: Tensor,
    weight: Tensor,
    fn: Fn,
    *,
    axis: AxisName,
    count: int,
    capacity: int | None = None,
    return_dropped: Literal[False] = False,
    mesh: Mesh | None = None,
) -> Tensor: ...
@overload
def experts(
    x: Tensor,
    choice: Tensor,
    weight: Tensor,
    fn: Fn,
    *,
    axis: AxisName,
    count: int,
    capacity: int | None = None,
    return_dropped: Literal[True],
    mesh: Mesh | None = None,
) -> tuple[Tensor, Tensor]: ...
@Op(_WHERE, "V -> V", composed=True)
def experts(
    x: Tensor,
    choice: Tensor,
    weight: Tensor,
    fn: Fn,
    *,
    axis: AxisName,
    count: int,
    capacity: int | None = None,
    return_dropped: bool = False,
    mesh: Mesh | None = None,
) -> Any:
    """Send each token to the experts that it has chosen, which are cut along an axis, and add up what comes back.

    ::

        def fn(rows, counts):  # of this rank's experts, whose weights it has
            return parallel.grouped_matmul(torch.relu(parallel.grouped_matmul(rows, up, counts)), down, counts)


        weight, choice = router(x).softmax(-1).topk(2)
        y = parallel.experts(x, choice, weight, fn, axis="ep", count=64)

    Index i has experts i*count/n to (i+1)*count/n - 1: ``tensor_parallel(experts, {"w": Cut(0)}, axis="ep")`` cuts a
    parameter so, and :func:`clip_grad_norm`, :func:`full_state_dict` and checkpoints know of it. Without ``capacity``
    no token is dropped. Shared experts are ordinary layers beside it; experts that are cut once more,
    :func:`column_linear` and :func:`row_linear` inside of ``fn``. :func:`grouped_matmul` is one kernel for all own
    experts, and :func:`split_rows` gives the rows of each.

    Type: varying -> varying. Weights of experts vary along ``axis``; along the data axes they are replicated.

    Args:
        x: ``[t, d]``, floating point; ranks may have different t, also 0.
        choice: integers ``[t, k]``, from 0 to count - 1.
        weight: ``[t, k]``, floating point; with gradients.
        fn: ``fn(rows, counts)``: rows ``[r, d]`` by own expert, then source, then token; counts int64 ``[count/n]``,
            how many rows each own expert has, perhaps none; gives ``[r, d']``, as many rows in the same order. It is a
            module, or has its weights in its closure: where it makes nothing of no rows, these tell that others wait
            for this rank in backward.
        axis: a name, or a tuple of names.
        count: of all experts; n divides it.
        capacity: the most rows of one expert from one rank; those that come later in x are dropped, and add nothing.
        return_dropped: whether to give how many choices of this rank were dropped as well.
        mesh: the current mesh by default.

    Returns: ``[t, d']`` of fn's dtype, new storage; with ``return_dropped`` a pair of it and int64 ``[]``.

    Backward: the same ways back, of rows; each weight has the gradient of what its expert gave.

    Cost: all_to_alls of the counts, of the rows for experts elsewhere, and of as many rows back; those of rows in
        backward. The host reads the counts, which waits for an accelerator.

    Raises:
        MeshError: shapes or dtypes that do not fit; a choice that is no expert (on the CPU; elsewhere the device
            asserts); a count that n does not divide; a capacity that is no number of rows; fn that gives another
            number of rows, or integers; no such axis.
        CommError: not every rank came in time; the transport failed.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm import parallel
        >>> mesh = mc.make_mesh({"ep": 2})
        >>> def main():
        ...     x = torch.tensor([[1.0], [2.0], [3.0]]) + 10 * mesh.rank
        ...     choice = torch.tensor([[0], [1], [0]])
        ...
        ...     def fn(rows, counts):
        ...         return rows * (mesh.rank + 1)
        ...
        ...     return (
        ...         parallel.experts(x, choice, torch.ones(3, 1), fn, axis="ep", count=2, mesh=mesh).flatten().tolist()
        ...     )
        >>> mc.launch(main, ranks=2)
        [[1.0, 4.0, 3.0], [11.0, 24.0, 13.0]]

    Source: GShard (Lepikhin et al., 2020); MegaBlocks (Gale et al., 2022), whose dropless dispatch this is.
    """
    ax = check.axis_of(_WHERE, axis, mesh)
    with paused(), without_modes():
        _fits(x, choice, weight, fn, count, capacity, return_dropped, ax)
    own, k = count // ax.size, choice.shape[1]
    flat = choice.reshape(-1).long()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=count)
    dropped = None
    if capacity is not None:
        counts, everyone = counts.clamp(max=capacity), counts
        dropped = flat.shape[0] - counts.sum()
        order = order[_first_of(everyone, counts, sum(lengths_of(counts, ax)))]
    mine, token = counts.view(ax.size, own), order // k
    rows, theirs = all_to_all_ragged(x[token], mine, axis, mesh=ax.mesh)
    expert = (
        torch.arange(own, device=x.device)
        .repeat(ax.size)
        .repeat_interleave(theirs.flatten(), output_size=rows.shape[0])
    )
    by_expert = expert.argsort(stable=True)
    given = rows[by_expert]
    found = fn(given, theirs.sum(0))
    with paused(), without_modes():
        _gives(found, given, ax)
    if not _comes_from(found, given):
        found = tie(found, given)  # backward goes both ways on all ranks, whatever fn makes of no rows
    if not (found.shape[0] or found.requires_grad) and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        found = tie(found, [w for _, w in Reachable(fn).tensors.values() if w.requires_grad])
    sizes = lengths_of(theirs, ax), lengths_of(mine, ax)
    back = all_to_all(found[by_expert.argsort()], axis, 0, 0, *sizes, mesh=ax.mesh)
    weighted = back * weight.reshape(-1)[order].unsqueeze(1).to(back.dtype)
    y = weighted.new_zeros(x.shape[0], back.shape[1]).index_add(0, token, weighted)
    if not return_dropped:
        return y
    return y, counts.new_zeros(()) if dropped is None else dropped


def _first_of(counts: Tensor, kept: Tensor, total: int) -> Tensor:
    """Where the first ``kept`` of each ``counts`` rows lie: a mask would be read to know how many there are."""
    gaps = counts.cumsum(0) - counts - (kept.cumsum(0) - kept)
    return torch.arange(total, device=counts.device) + gaps.repeat_interleave(kept, output_size=total)


def _comes_from(found: Tensor, given: Tensor) -> bool:
    """Whether backward from the one reaches the other anyway, or there is none; False where that cannot be seen."""
    if here.watcher is not None or torch.compiler.is_compiling() or functorch_active():
        return False
    if not given.requires_grad or not torch.is_grad_enabled():
        return True
    end = given.grad_fn
    return found.grad_fn is not None and any(node is end for node in islice(nodes_of_graph([found]), _NEAR))


def _fits(
    x: Any, choice: Any, weight: Any, fn: Any, count: Any, capacity: Any, return_dropped: Any, axis: Axis
) -> None:
    for name, value in (("x", x), ("choice", choice), ("weight", weight)):
        check.tensor(_WHERE, value, axis, name)
    if x.dim() != 2 or not x.is_floating_point():
        _wrong(f"x is {shape_text(x.dtype, x.shape)}.", axis, "floats [t, d]: x.flatten(0, -2) of what has more dims")
    if choice.dim() != 2 or choice.shape[0] != x.shape[0] or choice.dtype not in _INTEGERS or not choice.shape[1]:
        what = f"choice is {shape_text(choice.dtype, choice.shape)}."
        _wrong(what, axis, f"integers [{x.shape[0]}, k]: the experts of each row of x")
    if weight.shape != choice.shape or not weight.is_floating_point():
        what = f"weight is {shape_text(weight.dtype, weight.shape)}."
        _wrong(what, axis, f"floats {list(choice.shape)}, as choice")
    if not check.whole_number(count) or count < 1 or count % axis.size:
        what = f"count={count!r} experts are not as many for each index of axis {axis.name!r} (size {axis.size})."
        _wrong(what, axis, f"a multiple of {axis.size}")
    if capacity is not None and (not check.whole_number(capacity) or capacity < 0):
        _wrong(f"capacity={capacity!r} is not a number of rows.", axis, "an int, at least 0; None drops nothing")
    if not callable(fn):
        _wrong(f"fn is not a function but {type(fn).__name__}.", axis, "fn(rows, counts) gives as many rows")
    for name, value in (("choice", choice), ("weight", weight)):
        if value.device != x.device:
            _wrong(f"{name} is on {value.device}, and x on {x.device}.", axis, "all on one device")
    if not isinstance(return_dropped, bool):
        _wrong(f"return_dropped={return_dropped!r} is not a bool.", axis, "True or False")
    check_choice(_WHERE, choice, count, axis)


def check_choice(where: str, choice: Tensor, count: int, axis: Axis) -> None:
    """On the CPU, where reading is free, each choice is an expert."""
    if choice.device.type != "cpu" or not choice.numel() or (not torch.compiler.is_compiling() and is_dry()):
        return
    try:
        with paused(), without_modes():
            least, most = (int(end) for end in choice.aminmax())
    except RuntimeError:
        if not functorch_active():
            raise
        fix = "the same choice for all of the batch, or a loop"
        check.explain(where, "choice is batched by vmap.", axis, fix=fix)
    if least < 0 or most >= count:
        what = f"choice {least if least < 0 else most} is not one of {count} experts."
        check.explain(where, what, axis, fix=f"0 to {count - 1}")


def _gives(found: Any, given: Tensor, axis: Axis) -> None:
    if not isinstance(found, Tensor) or found.dim() != 2 or found.shape[0] != given.shape[0]:
        got = shape_text(found.dtype, found.shape) if isinstance(found, Tensor) else type(found).__name__
        what = f"fn gives {got} of {given.shape[0]} rows."
        _wrong(what, axis, f"[{given.shape[0]}, d'], in the order of its rows; of no rows too")
    if not (found.is_floating_point() or found.is_complex()):
        _wrong(f"fn gives {shape_text(found.dtype, found.shape)}.", axis, "floats, which the weights multiply")


def _wrong(what: str, axis: Axis, fix: str) -> NoReturn:
    check.explain(_WHERE, what, axis, fix=fix)
