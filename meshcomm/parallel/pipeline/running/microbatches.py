"""A batch in microbatches: rows of every tensor of a pytree, and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import fail
from meshcomm.runtime.transports.dry.world import is_dry

WHERE = "pipelined"


def rows_of(tree: Any, name: str) -> int:
    """How many rows all tensors of a batch have that have any dims; -1 for what is not given."""
    if tree is None:
        return -1
    seen = {len(leaf) for leaf in _torch.tree_flatten(tree)[0] if isinstance(leaf, Tensor) and leaf.ndim}
    if len(seen) == 1:
        return seen.pop()
    lengths = {path: len(leaf) for path, leaf in _torch.tree_leaves_with_path(tree)
               if isinstance(leaf, Tensor) and leaf.ndim}  # fmt: skip
    if not lengths:
        fail(WHERE, f"{name} has no tensor with rows.", got=type(tree).__name__, fix="a batch: rows along dim 0")
    first, *others = lengths.items()
    path, length = next(each for each in others if each[1] != first[1])
    what = f"{name}{first[0]} has {first[1]} rows and {name}{path} {length}."
    fail(WHERE, what, fix="tensors of equal length along dim 0; what all microbatches share without dims")


def spans(rows: int, microbatches: int) -> list[tuple[int, int]]:
    """Which rows each microbatch has: as even as can be, and never none."""
    parts = min(rows, microbatches)
    size, more = divmod(rows, parts)
    starts = [at * size + min(at, more) for at in range(parts + 1)]
    return list(itertools.pairwise(starts))


def rows_from(tree: Any, span: tuple[int, int]) -> Any:
    """These rows of a batch, outside of every graph."""
    leaves, form = _torch.tree_flatten(tree)
    return _torch.tree_unflatten([_part(leaf, span) for leaf in leaves], form)


def _part(leaf: Any, span: tuple[int, int]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    part = leaf.detach()
    return part[span[0] : span[1]] if part.ndim else part


def joined(trees: Sequence[Any]) -> Any:
    """Outputs of microbatches as those of the batch; what has no rows is the first one's."""
    flat = [_torch.tree_flatten(tree) for tree in trees]
    leaves = [
        torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim else parts[0]
        for parts in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return _torch.tree_unflatten(leaves, flat[0][1])


def shares_of(weights: Any, cuts: Sequence[tuple[int, int]], rows: int) -> list[float]:
    """What each microbatch's mean counts for in that of the batch. ``weights``: of microbatches or of rows; None: as
    many as it has rows.
    """
    if weights is None:
        return [(stop - start) / rows for start, stop in cuts]
    try:
        given = torch.as_tensor(weights, device="cpu").detach().double().cpu()
    except (TypeError, ValueError, RuntimeError):
        fail(WHERE, f"weights are no numbers but {type(weights).__name__}.", fix="a tensor, or a list, of counts")
    if given.ndim != 1 or len(given) not in (len(cuts), rows):
        what = f"weights of shape {list(given.shape)} for {len(cuts)} microbatches of {rows} rows."
        fail(WHERE, what, fix="a number per microbatch, or per row, such as how many tokens count")
    if len(given) != len(cuts):
        given = torch.stack([given[start:stop].sum() for start, stop in cuts])
    total = given.sum().item()
    if is_dry() and not total:  # nobody knows them
        return shares_of(None, cuts, rows)
    if not total > 0 or not bool((given >= 0).all()):
        fail(WHERE, "weights that are negative, no numbers, or all zero.", got=f"their sum {total}", fix="counts")
    return [each / total for each in given.tolist()]
