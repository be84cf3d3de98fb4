"""The private names of torch behind pytrees, and behind many tensors as one: a part of :mod:`meshcomm._torch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshcomm import _trees
from meshcomm._versions import find

__all__ = [
    "apart",
    "packed",
    "parted",
    "parted_in_shape",
    "tree_flatten",
    "tree_leaves_with_path",
    "tree_unflatten",
]


_MANY = "trees of many tensors take some µs longer for each"
_pack: Any = find("torch._C._nn.flatten_dense_tensors", _MANY)
_part: Any = find("torch._C._nn.unflatten_dense_tensors", _MANY)
_below: Any = find("torch._C._AutoDispatchBelowADInplaceOrView", _MANY)
_in_rows: Any = find("torch._chunk_cat", _MANY)


def packed(tensors: Sequence[Tensor], rows: int = 1) -> Tensor:
    """Two or more of one dtype as ``[rows, all]``, new: in row i slice i of the first dim of each, one behind the
    other. None is empty, if there are several rows.
    """
    return _pack(tensors).view(1, -1) if rows == 1 else _in_rows(tensors, 0, rows)  # type: ignore[no-any-return]


def parted(flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What lies one behind the other, in the shapes of ``like``: in the memory of ``flat``, but tensors that to
    autograd have nothing to do with each other.
    """
    with _below():
        return _part(flat, like)  # type: ignore[no-any-return]


def apart(flat: Tensor, widths: Sequence[int], like: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
    """The same of so many elements each, of which some are given the shape of a tensor: their numbers, and that."""
    with _below():
        parts = list(flat.split_with_sizes(widths))
        for at, shaped in like:
            parts[at] = parts[at].view_as(shaped)
        return parts


def parted_in_shape(flat: Tensor, like: Sequence[Tensor], empty: Sequence[int]) -> list[Tensor]:
    """The same where some are ``empty``, at these places: torch gives those as ``[0]``."""
    parts = list(parted(flat, like))
    for at in empty:
        parts[at] = parts[at].view(like[at].shape)
    return parts


if None in (_pack, _part, _below, _in_rows):

    def packed(tensors: Sequence[Tensor], rows: int = 1) -> Tensor:
        """Two or more of one dtype as ``[rows, all]``, new: in row i slice i of the first dim of each."""
        return torch.cat([x.reshape(rows, x.numel() // rows) for x in tensors], 1)

    def parted(flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What lies one behind the other, in the shapes of ``like``, in the memory of ``flat``."""
        with torch.no_grad():
            parts = flat.split([x.numel() for x in like])
            return tuple(part.view(x.shape).detach() for part, x in zip(parts, like, strict=True))

    def apart(flat: Tensor, widths: Sequence[int], like: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """The same of so many elements each, of which some are given the shape of a tensor."""
        with torch.no_grad():
            parts, shaped = flat.split_with_sizes(widths), dict(like)
            return [(part.view_as(shaped[at]) if at in shaped else part).detach() for at, part in enumerate(parts)]


_PYTREE = "torch.utils._pytree"
_COSTS = "trees are Python's containers only: what is registered with torch's pytrees is a leaf"
_pytree: Any = find(_PYTREE, _COSTS)
_flatten: Any = find(f"{_PYTREE}.tree_flatten", _COSTS)
_unflatten: Any = find(f"{_PYTREE}.tree_unflatten", _COSTS)
_leaf: Any = None if _flatten is None else _flatten(0)[1]
_with_path: Any = find(f"{_PYTREE}.tree_flatten_with_path", _COSTS)
_keystr: Any = find(f"{_PYTREE}.keystr", _COSTS)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a pytree (``None`` is a leaf) and what is needed to build it again."""
    return ([tree], _leaf) if type(tree) is Tensor else _flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """The pytree with these leaves."""
    return leaves[0] if spec is _leaf else _unflatten(leaves, spec)


def tree_leaves_with_path(tree: Any) -> list[tuple[str, Any]]:
    """The leaves with the text of the path to each, such as ``['layers'][0]``."""
    return [(_keystr(path), leaf) for path, leaf in _with_path(tree)[0]]


if None in (_flatten, _unflatten, _with_path, _keystr):
    tree_flatten, tree_leaves_with_path = _trees.flatten, _trees.leaves_with_path
    tree_unflatten = _trees.unflatten
