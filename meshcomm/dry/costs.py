"""What one operation of torch's computes and moves, by shapes alone.

flops: torch's formulas (``torch.utils.flop_counter``); bytes: what is read of its operands and written. A view, and an
allocation, are nothing. Of a table of which rows are taken, the rows count.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from meshcomm._torch import backward_pass, gives_views, named_arguments, operation_name, tree_flatten, written_by

__all__ = ["Op", "cost_of"]

_formulas = FlopCounterMode(display=False).flop_registry
PRODUCT, ATTENTION, OTHER = "product", "attention", "other"

_FREE = frozenset(
    f"aten::{name}"
    for name in (
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "detach_", "lift_fresh",
        "resize_", "set_", "_unsafe_view", "_reshape_alias",
    )
)  # fmt: skip
_ROWS = frozenset(
    f"aten::{name}" for name in ("embedding", "index_select", "gather", "index", "take", "_embedding_bag")
)
"""Reads as much as it gives."""
_PUT = frozenset(
    f"aten::{name}"
    for name in ("index_add_", "index_copy_", "index_put_", "_index_put_impl_", "scatter_", "scatter_add_")
)
"""Writes as much as it is given."""
_FILLS = frozenset(
    f"aten::{name}"
    for name in (
        "copy_",
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "random_",
        "bernoulli_",
        "_foreach_copy_",
        "_foreach_zero_",
    )
)
"""Writes what it does not read."""


class Op(NamedTuple):
    """An operation that ran."""

    name: str
    kind: str
    """"product", "attention" or "other"."""
    flops: int
    """As torch's formulas have them."""
    work: int
    """Those that a kernel does: of causal attention about half."""
    moved: int
    """Bytes."""
    dtype: torch.dtype | None
    """In which it computes."""
    shape: tuple[int, int, int, int]
    """Of a product: how many, rows, columns, and the length of the sums."""
    backward: bool


_NO_SHAPE = (0, 0, 0, 0)


def cost_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Op | None:
    """Of an operation that gave ``result``; None for what takes no time."""
    name = operation_name(func)
    written = _tensors(written_by(func, args, kwargs))
    if name in _FREE or (gives_views(func) and not written):
        return None
    given, made = _tensors((args, kwargs)), _tensors(result)
    if not made and not written:
        return None  # something is asked of a tensor
    flops = work = 0
    kind, shape = OTHER, _NO_SHAPE
    if "attention" in name and given and given[0].ndim == 4:
        kind = ATTENTION
        flops, work = _attention(func, name, args, kwargs)
    elif name == "aten::_grouped_mm":
        kind, shape = PRODUCT, (1, math.prod(given[0].shape[:-1]), given[1].shape[-1], given[0].shape[-1])
        flops = work = 2 * math.prod(shape)
    elif (formula := _formulas.get(func.overloadpacket)) is not None:
        kind = PRODUCT
        flops = work = int(formula(*args, **kwargs, out_val=result))
        shape = _product(given, made, flops)
    operands = (*given, *made)
    first = next((x for x in operands if x.is_floating_point() or x.is_complex()), operands[0] if flops else None)
    return Op(
        name.removeprefix("aten::"), kind, flops, work, _moved(name, given, made, written),
        None if first is None else first.dtype, shape, backward_pass() != -1,
    )  # fmt: skip


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


def _bytes(x: Tensor) -> int:
    """Of it that there are: what is expanded is there once."""
    if 0 not in x.stride():
        return x.numel() * x.element_size()
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or not size)
    return math.prod(sizes) * x.element_size()


def _moved(name: str, given: list[Tensor], made: list[Tensor], written: list[Tensor]) -> int:
    if name in _ROWS:
        return 2 * sum(map(_bytes, made)) + sum(map(_bytes, given[1:]))
    if name in _PUT:
        return 3 * sum(map(_bytes, given[1:]))
    ids = {id(x) for x in given}
    total = sum(map(_bytes, written)) + sum(_bytes(x) for x in made if id(x) not in ids)
    fills = {id(x) for x in written} if name in _FILLS else ()
    return total + sum(_bytes(x) for x in given if id(x) not in fills)


def _product(given: list[Tensor], made: list[Tensor], flops: int) -> tuple[int, int, int, int]:
    """How many products of which sizes: convolutions as one."""
    if not made or made[0].ndim < 2 or not flops:
        return _NO_SHAPE
    *many, rows, columns = made[0].shape
    count = math.prod(many)
    if made[0].ndim > 3 or not rows * columns * count:
        return _NO_SHAPE
    return count, rows, columns, max(1, flops // (2 * rows * columns * count))


def _attention(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Two products forwards, five backwards, as torch's formulas have it; of causal ones half is left out."""
    named = named_arguments(func, args, kwargs)
    q, k, v = (named.get(x, named.get(long)) for x, long in (("query", "q"), ("key", "k"), ("value", "v")))
    if q is None or k is None or v is None:
        return 0, 0
    batch, heads, queries, width = q.shape
    keys, out = k.shape[-2], v.shape[-1]
    pairs = 2 * batch * heads * queries * keys
    flops = pairs * (3 * width + 2 * out) if "backward" in name else pairs * (width + out)
    causal = bool(named.get("is_causal", False))
    return flops, flops * (keys + 1) // (2 * keys) if causal and queries == keys else flops
