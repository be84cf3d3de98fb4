"""The last linear layer and its cross-entropy together, a few rows of logits at a time.

::

    x  [t, d]   ----- rows i to j -----+
                                       v
    W  [v/n, d]  ------------>  z = x W^T + b   [j-i, v/n], nobody keeps it
                                       |
              +------------------------+-------------------------+
              v                        v                         v
    log sum exp z   [t]      z of the target  [t]        sum of z  [t]        what ranks sum up: three numbers a row

Backward makes each ``z`` again, and so does the backward of backward.

t rows, d width, v vocabulary, n size of the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from meshcomm._torch import dual_level_open, functorch_active
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.collectives.reduce import all_reduce, pvary
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor.functions import are_tensors, enter, own_rows, wrong
from meshcomm.parallel.tensor.losses import checked_targets, reduced
from meshcomm.runtime.ops import Op

_WHERE = "linear_cross_entropy"
_LEAST = 256
"""Rows at once, where that is not said and the vocabulary is no smaller than all of ``x``."""


@Op("linear_cross_entropy", "``x`` as :func:`enter` has it", composed=True)
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    axis: AxisName | None = None,
    sequence: bool = False,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    rows: int | None = None,
    mesh: Mesh | None = None,
) -> Tensor:
    """Cross-entropy of a linear layer's outputs, which never exist as a whole.

    ::

        "b s d, (tp v) d, b s ->"

    The same as :func:`vocab_cross_entropy` of :func:`column_linear`, and without ``axis`` as
    ``torch.nn.functional.cross_entropy`` of ``linear``. A vocabulary of 128,000 has logits 30 times as large as the
    activations, and torch keeps them more than once.

    Type: ``x`` as :func:`enter` has it; weight and bias varying; target and result invariant. Without ``axis`` nothing
        is sent, and the result varies as what it is made of.

    Args:
        x: ``[..., d]``, floating point; this rank's ``[..., s/n, d]`` with ``sequence``.
        weight: ``[v/n, d]``, this rank's rows of the last layer.
        target: integers ``[...]``, from 0 to v - 1, or ``ignore_index``; of the whole sequence.
        bias: ``[v/n]``.
        axis: a name, or a tuple of names, over which the vocabulary is cut; none where each rank has all of it.
        sequence: whether ``x`` is cut along the last dim but one.
        reduction: "mean" over what is not ignored, "sum", or "none". For a mean over the tokens of several ranks or
            microbatches take "sum" and :func:`meshcomm.weighted_mean`.
        ignore_index: a target that counts nothing.
        label_smoothing: how much of the target is spread evenly over the vocabulary, from 0 to 1.
        rows: how many rows of logits are there at a time; by default as many as take the memory of ``x``, at least 256.
        mesh: the current mesh by default.

    Returns: ``[]``; ``[...]`` with "none". The dtype of ``x``, float32 for half precision.

    Backward: makes the logits again, as many at a time; the gradient of ``x`` is summed over the axis.

    Cost: all_reduces of one number per target for the maximum, and of two (three with smoothing) for the sums; in
        backward one of the gradient of ``x``. A third more products than without, and no memory of the logits.

    Raises:
        MeshError: shapes that do not fit; targets that are no integers, or (on the CPU) not in the vocabulary; an
            unknown reduction; no such axis.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm.parallel import linear_cross_entropy
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> x, table, target = torch.zeros(1, 3), torch.randn(4, 3), torch.tensor([2])
        >>> def loss():
        ...     mine = table.chunk(2)[mesh.rank]
        ...     return round(linear_cross_entropy(x, mine, target, axis="tp", mesh=mesh).item(), 4)
        >>> mc.launch(loss, ranks=2)
        [1.3863, 1.3863]

    Source: Cut Your Losses (Wijmans et al., 2024), Liger Kernel (Hsu et al., 2024); Megatron-LM's cut vocabulary.
    """
    ax = None if axis is None else check.axis_of(_WHERE, axis, mesh)
    _check(x, weight, target, bias, rows, ax)
    here = x.shape[:-1]
    whole = here if ax is None or not sequence or not here else (*here[:-1], here[-1] * ax.size)
    checked_targets(_WHERE, "rows of x", x, whole, target, reduction, label_smoothing, ax)
    places, mine = own_rows(_WHERE, target, weight.shape[0], ax, ignored=ignore_index)
    if axis is not None:
        x = enter(x, axis, sequence=sequence, mesh=mesh)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    flat = x.reshape(-1, x.shape[-1])
    step = rows or max(_LEAST, -(-flat.numel() // max(weight.shape[0], 1)))
    with torch.autocast(x.device.type, enabled=False):
        given = (flat, weight, bias, places.reshape(-1), mine.reshape(-1), step)
        # A jvp of a jvp of a Function is zero in torch; forward mode keeps nothing, and needs none.
        found = _Parts.forward(*given) if dual_level_open() else _Parts.apply(*given)  # type: ignore[no-untyped-call]
    log, picked, total = (part.view(target.shape) for part in found)
    count = weight.shape[0]
    if ax is not None and axis is not None:
        count *= ax.size
        with torch.no_grad():  # it cancels
            top = all_reduce(log, axis, "max", mesh=ax.mesh)
        parts = [(log - pvary(top, axis, mesh=ax.mesh)).exp(), picked, *([total] if label_smoothing else [])]
        sums = all_reduce(torch.stack(parts), axis, mesh=ax.mesh)
        log, picked, total = sums[0].log() + top, sums[1], sums[-1]
    loss = log - picked
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (log - total / count)
    return reduced(loss, target != ignore_index, reduction)


def _check(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, rows: int | None, axis: Axis | None) -> None:
    are_tensors(_WHERE, axis, x=x, weight=weight, target=target, bias=bias)
    if not x.is_floating_point():
        wrong(_WHERE, "x is not floating point.", axis, x, "cast with x.float()")
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1]:
        what = f"weight {list(weight.shape)} does not fit x.shape[-1] = {x.shape[-1] if x.ndim else 'none'}."
        wrong(_WHERE, what, axis, x, "weight is [v, d], this rank's rows of the vocabulary")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        what = f"bias {list(bias.shape)} does not fit weight {list(weight.shape)}."
        wrong(_WHERE, what, axis, x, "bias is [v], this rank's part")
    if not torch.is_autocast_enabled(x.device.type):
        for name, p in (("weight", weight), ("bias", bias)):
            if p is not None and p.dtype != x.dtype:
                wrong(_WHERE, f"{name} is {p.dtype}, x is {x.dtype}.", axis, x, "cast one of them, or use autocast")
    if rows is not None and not (check.whole_number(rows) and rows > 0):
        wrong(_WHERE, f"rows={rows!r} is no number of rows.", axis, x, "such as 1024, or None")


# ------------------------------------------------------------------------------------------------- what is of one rank


class _Rows(NamedTuple):
    """Some rows, and where their targets are in this rank's part of the vocabulary."""

    x: Tensor
    places: Tensor
    mine: Tensor
    at: slice

    def logits(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _widened(F.linear(self.x, weight, bias))

    def softmax(self, weight: Tensor, bias: Tensor | None, log: Tensor) -> Tensor:
        return self.logits(weight, bias).sub_(log[self.at, None]).exp_()

    def of_target(self, z: Tensor) -> Tensor:
        """What ``z`` has for each row's target; 0 where another rank has it."""
        return z.gather(1, self.places[:, None]).squeeze(1).masked_fill(~self.mine, 0)

    def back(self, p: Tensor, g: Sequence[Tensor | None], *, into: bool = False) -> Tensor:
        """The gradient of the logits, of which ``p`` is the softmax; written ``into`` it."""
        log, picked, total = (None if part is None else part[self.at, None] for part in g)
        add, scatter = (Tensor.add_, Tensor.scatter_add_) if into else (Tensor.add, Tensor.scatter_add)
        z = torch.zeros_like(p) if log is None else p.mul_(log) if into else p * log
        z = z if total is None else add(z, total)
        where = self.places[:, None], self.mine[:, None]
        return z if picked is None else scatter(z, 1, where[0], picked.masked_fill(~where[1], 0))


def _each(x: Tensor, places: Tensor, mine: Tensor, step: int) -> Iterator[_Rows]:
    for start in range(0, max(x.shape[0], 1), step):
        at = slice(start, start + step)
        yield _Rows(x[at], places[at], mine[at], at)


def _widened(z: Tensor) -> Tensor:
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z


def _added(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``total + a^T b``, in place where nobody would see it; sums of half precision are float32's."""
    if total is None or torch.is_grad_enabled() or functorch_active() or a.dtype != total.dtype:
        product = _widened(a.mT @ b)
        return product if total is None else total + product
    return total.addmm_(a.mT, b)


def _concatenated(parts: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


class _Parts(Function):
    """Log of the sum of exponentials, target's logit and sum of the logits of this rank's part, of each row."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor, mine: Tensor, step: int) -> Any:
        def of(rows: _Rows) -> tuple[Tensor, ...]:
            z = rows.logits(weight, bias)
            return z.logsumexp(1), rows.of_target(z), z.sum(1)

        return _concatenated(map(of, _each(x, places, mine, step)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *given, ctx.step = inputs
        ctx.save_for_backward(*given, output[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        need = frozenset(i for i in range(3) if ctx.needs_input_grad[i])
        found = _Back.apply(*ctx.saved_tensors, *g, ctx.step, need)  # type: ignore[no-untyped-call]
        return *_only(found, need, None), None, None, None


class _Back(Function):
    """The gradients of ``x``, weight and bias; empty where nobody needs one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor, mine: Tensor, log: Tensor,
        g_log: Tensor | None, g_picked: Tensor | None, g_total: Tensor | None, step: int, need: frozenset[int],
    ) -> Any:  # fmt: skip
        of_x, of_weight, of_bias = [], None, None
        for rows in _each(x, places, mine, step):
            p = rows.softmax(weight, bias, log)
            z = rows.back(p, (g_log, g_picked, g_total), into=not functorch_active())
            narrow = z.to(x.dtype)
            of_x += [narrow @ weight] if 0 in need else []
            of_weight = _added(of_weight, narrow, rows.x) if 1 in need else None
            of_bias = (z.sum(0) if of_bias is None else of_bias + z.sum(0)) if 2 in need else None
        nothing = x.new_empty(0)
        return (
            torch.cat(of_x) if of_x else nothing,
            nothing if of_weight is None else of_weight.to(weight.dtype),
            nothing.clone() if of_bias is None else of_bias.to(x.dtype),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *given, ctx.step, ctx.need = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        x, weight, bias, places, mine, log, *g = ctx.saved_tensors
        cotangents = _only(given, ctx.need, None)
        of_weight: Tensor | None = None
        of_x, of_sums, of_bias = [], [], x.new_zeros(weight.shape[0])
        for rows in _each(x, places, mine, ctx.step):
            p = rows.softmax(weight, bias, log)
            z = rows.back(p, g).to(x.dtype)
            q = _tangent(rows, weight, cotangents)
            r = torch.zeros_like(p) if g[0] is None else p * q * g[0][rows.at, None]
            narrow = r.to(x.dtype)
            of_weight = _added(of_weight, narrow, rows.x)
            of_weight = of_weight if cotangents[0] is None else _added(of_weight, z, cotangents[0][rows.at])
            of_x.append(narrow @ weight if cotangents[1] is None else narrow @ weight + z @ cotangents[1])
            of_bias = of_bias + r.sum(0)
            of_sums.append((-r.sum(1), (p * q).sum(1), rows.of_target(q), q.sum(1)))
        assert of_weight is not None  # there are rows, or one time none
        weights = of_weight.to(weight.dtype), None if bias is None else of_bias.to(bias.dtype)
        of_log, *of_g = _concatenated(of_sums)
        of_given = (None if one is None else found for one, found in zip(g, of_g, strict=True))
        return torch.cat(of_x), *weights, None, None, of_log, *of_given, None, None


def _only(parts: Iterable[Any], need: frozenset[int], other: Any) -> list[Any]:
    return [part if i in need else other for i, part in enumerate(parts)]


def _tangent(rows: _Rows, weight: Tensor, given: Sequence[Any]) -> Tensor:
    """What the logits do where ``x``, weight and bias do as ``given``, which begins with theirs; None: nothing."""
    t_x, t_weight, t_bias = given[:3]
    z = rows.x.new_zeros(()).expand(rows.x.shape[0], weight.shape[0])
    z = z if t_x is None else F.linear(t_x[rows.at], weight)
    z = z if t_weight is None else z + F.linear(rows.x, t_weight)
    return _widened(z if t_bias is None else z + t_bias)
