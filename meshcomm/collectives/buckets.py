"""Pytrees of tensors: the leaves of one dtype and device go together in flat buckets, one collective each.

Flattening and splitting are torch's own differentiable operations, so that all a single tensor can do a tree can do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from meshcomm import _torch
from meshcomm.collectives import check
from meshcomm.errors import MeshError
from meshcomm.mesh import Axis
from meshcomm.runtime.pending import then_all

Check = Callable[[Tensor], object]
"""Raises for a leaf that the collective cannot take."""


def leaves_of(
    where: str,
    tree: Any,
    axis: Axis,
    accept: Check | None = None,
    ragged: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> tuple[list[Tensor], tuple[Any, list[int]], tuple[Any, ...]]:
    """The leaves of a tree, every one a tensor that ``accept`` lets through; what :func:`rebuild` needs; and what a
    link is told of them, if it wants to know, with the first call that they are in.

    Dicts are taken in order of their keys: two ranks may have filled theirs in different orders. ``ragged``: the dim
    whose length may differ between ranks. ``dims``: those that all ranks must have named alike: what is moved in a
    bucket is the same for each.
    """
    found, spec = _flattened(where, tree, axis)
    form = _form_of(spec, len(found))
    order = form.order
    leaves = [found[at] for at in order]
    for at, leaf in zip(order, leaves, strict=True):
        try:
            check.tensor(where, leaf, axis)
            if accept is not None:
                accept(leaf)
        except MeshError as error:
            path = _torch.tree_leaves_with_path(tree)[at][0]
            if not path:  # the tree is one leaf
                raise
            raise MeshError(f"{error}\n  leaf: x{path}") from None
    told = axis.link.watched or (axis.link.hears and bool(leaves) and leaves[0].is_cpu)
    said = form.described(leaves, ragged, dims or {}) if told and not torch.compiler.is_compiling() else ()
    return leaves, (spec, order), said


class _Form:
    """What trees of one form have in common."""

    def __init__(self, spec: Any, count: int) -> None:
        numbers = _torch.tree_unflatten(list(range(count)), spec)
        self.order: list[int] = _torch.tree_flatten(_by_key(numbers))[0]
        """Of the leaves."""
        self._numbers = numbers
        self._paths: list[str] = []
        self._described: dict[Any, tuple[Any, ...]] = {}

    def described(self, leaves: Sequence[Tensor], ragged: int | None, dims: Mapping[str, int]) -> tuple[Any, ...]:
        """Path, dtype and shape of each leaf: the same object for the same."""
        key = ragged, *dims.values(), *[(leaf.dtype, leaf.shape) for leaf in leaves]
        known = self._described.get(key)
        if known is None:
            paths = self._paths or [path for path, _ in _torch.tree_leaves_with_path(self._numbers)]
            known = tuple(
                (paths[at] + _named(dims, leaf), leaf.dtype, _without(leaf.shape, ragged))
                for at, leaf in zip(self.order, leaves, strict=True)
            )
            if len(self._described) >= _MOST_FORMS:
                self._described.clear()
            self._paths, self._described[key] = paths, known
        return known


_MOST_FORMS = 100
_forms: dict[Any, _Form] = {}


def _form_of(spec: Any, count: int) -> _Form:
    try:
        known = None if torch.compiler.is_compiling() else _forms.get(spec)
    except TypeError:  # something in it has no hash
        return _Form(spec, count)
    if known is None:
        known = _Form(spec, count)
        if not torch.compiler.is_compiling():
            if len(_forms) >= _MOST_FORMS:
                _forms.clear()
            _forms[spec] = known
    return known


def _named(dims: Mapping[str, int] | None, leaf: Tensor) -> str:
    return "".join(f" {name}={dim % max(1, leaf.ndim)}" for name, dim in (dims or {}).items())


def _flattened(where: str, tree: Any, axis: Axis) -> tuple[list[Any], Any]:
    try:
        return _torch.tree_flatten(tree)
    except RecursionError:
        check.explain(where, "x contains itself, or is nested too deeply.", axis, fix="a list or a dict of tensors")


def _without(shape: tuple[int, ...], ragged: int | None) -> tuple[int, ...]:
    if ragged is None or not shape:
        return tuple(shape)
    return *shape[: ragged % len(shape)], -1, *shape[ragged % len(shape) :][1:]


def _by_key(tree: Any) -> Any:
    """The tree with its dicts in order of their keys."""
    if isinstance(tree, dict):
        return {key: _by_key(tree[key]) for key in sorted(tree, key=_sortable)}
    return [_by_key(part) for part in tree] if isinstance(tree, (list, tuple)) else tree


def _sortable(key: object) -> tuple[str, Any]:
    return type(key).__name__, key if isinstance(key, (str, int, float, bytes)) else repr(key)


def rebuild(leaves: Sequence[Tensor], structure: tuple[Any, list[int]]) -> Any:
    """The tree that :func:`leaves_of` took apart, with these leaves."""
    spec, order = structure
    placed: list[Any] = [None] * len(order)
    for at, leaf in zip(order, leaves, strict=True):
        placed[at] = leaf
    return _torch.tree_unflatten(placed, spec)


def checked_size(where: str, bucket_mb: float, axis: Axis) -> None:
    """A bucket has a positive size."""
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)) or not bucket_mb > 0:
        check.explain(where, f"bucket_mb={bucket_mb!r} is not a positive number.", axis, fix="a size in MiB such as 25")


def groups_of(where: str, leaves: Sequence[Tensor], bucket_mb: float, axis: Axis) -> list[list[int]]:
    """Positions of the leaves that go together, at most ``bucket_mb`` MiB unless one leaf alone is larger."""
    checked_size(where, bucket_mb, axis)
    limit = bucket_mb * 2**20
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for at, leaf in enumerate(leaves):
        kind, size = (leaf.dtype, leaf.device), leaf.numel() * leaf.element_size()
        bucket, filled = filling.get(kind, ([], 0))
        if bucket and filled + size > limit:
            bucket, filled = [], 0
        if not bucket:
            full.append(bucket)
        bucket.append(at)
        filling[kind] = bucket, filled + size
    return full


class Rows(NamedTuple):
    """How a leaf becomes rows ``[rows, k]`` of a bucket, and what comes of them a leaf; by default they are one row."""

    of: Callable[[Tensor], Tensor] = lambda leaf: leaf.reshape(1, leaf.numel())
    back: Callable[[Tensor, Tensor], Tensor] = lambda part, leaf: part.view(leaf.shape)
    """Of a part of the result and the leaf that it is of."""


ELEMENTS = Rows()


def in_buckets(
    where: str,
    leaves: Sequence[Tensor],
    axis: Axis,
    bucket_mb: float,
    run: Callable[[Tensor, tuple[Any, ...], bool], Tensor],
    rows: Rows = ELEMENTS,
    saves: bool = False,
    said: tuple[Any, ...] = (),
) -> list[Tensor]:
    """Apply what works on dim 0 to buckets. ``said``: of the leaves, handed to ``run`` with the first one.

    ``run`` is told whether the bucket is a copy that nobody else has. It may give a Pending, and the leaves that come
    of it are one then. ``saves``: the derivative needs the values.
    """
    groups = groups_of(where, leaves, bucket_mb, axis)
    packed = [[rows.of(leaves[at]) for at in bucket] for bucket in groups]
    widths = [[part.shape[1] for part in parts] for parts in packed]
    begun = []
    for at, parts in enumerate(packed):
        whole, is_copy = joined(parts, saves)
        begun.append(run(whole, () if at else said, is_copy))
    plain = not (torch.compiler.is_compiling() or _torch.functorch_active() or _torch.dual_level_open())

    def unpack(done: list[Tensor]) -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for bucket, width, whole in zip(groups, widths, done, strict=True):
            for at, part in zip(bucket, whole.split(width, 1), strict=True):
                result = rows.back(part, leaves[at])
                # A leaf that needs no gradient may share a bucket with one that does.
                results[at] = result if not plain or leaves[at].requires_grad else result.detach()
        return [results[at] for at in range(len(leaves))]

    return then_all(begun, unpack)


def joined(parts: Sequence[Tensor], saves: bool = False) -> tuple[Tensor, bool]:
    """The parts beside each other, ``[rows, sum of k]``, and whether that is a copy: not if they lie so.

    Also a copy where a derivative needs the values: a change in place of a part that counts its versions by itself, as
    parameters do, would not be noticed in a view.
    """
    if len(parts) == 1:
        return parts[0], False
    if torch.compiler.is_compiling() or _torch.functorch_active() or _torch.dual_level_open() or not _adjacent(parts):
        return torch.cat(list(parts), 1), True
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        if saves:
            return torch.cat(list(parts), 1), True
        whole: Tensor = _Joined.apply(*parts)  # type: ignore[no-untyped-call]
        return whole, False
    return _as_one(parts), False


def _adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether each row-shaped part begins where the one before it ends, in one storage."""
    first = parts[0]
    if first.shape[0] != 1:
        return False
    storage, place = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if part.data_ptr() != place or not part.is_contiguous() or part.is_conj() or part.is_neg():
            return False
        if part.untyped_storage().data_ptr() != storage:
            return False
        place += part.numel() * part.element_size()
    return True


def _as_one(parts: Sequence[Tensor]) -> Tensor:
    width = sum(part.shape[1] for part in parts)
    return parts[0].detach().as_strided((1, width), (width, 1))


class _Joined(Function):
    """Rows that lie side by side as one, without a copy."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.widths = [part.shape[1] for part in parts]
        return _as_one(parts)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.split(ctx.widths, 1))
