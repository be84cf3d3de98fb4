"""Pytrees of tensors: the leaves of one dtype and device go together in flat buckets, one collective each::

    leaves ── a copy, or where they lie ── one collective ── views that autograd takes for tensors of their own

Where each element goes by itself, or first dims are cut or joined, torch packs and parts them in one call each, with a
node of autograd where a gradient is needed. Other dims, transforms, graphs, and derivatives that need the values take
torch's differentiable operations leaf by leaf, so that all a single tensor can do a tree can do.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from meshcomm import _torch
from meshcomm._trees import rebuilt, sortable, walk
from meshcomm.axis import Axis
from meshcomm.collectives import check
from meshcomm.collectives.trees.bucket_sizes import groups_of
from meshcomm.errors import MeshError
from meshcomm.runtime.pending import then_all

T = TypeVar("T")
Check = Callable[[Tensor], object]
"""Raises for a leaf that the collective cannot take."""
_KIND = "__class__", "dtype", "device", "layout", "is_nested"
_all_but_shape, _all = attrgetter(*_KIND), attrgetter(*_KIND, "shape")
"""On what it depends whether a collective takes a tensor, where its shape does not matter and where it does."""


class _OfTorch(NamedTuple):
    """The form of what torch's pytrees have taken apart, and where in their order each of our leaves is."""

    spec: Any
    order: list[int]


def leaves_of(
    where: str,
    tree: Any,
    axis: Axis,
    accept: Check | None = None,
    ragged: int | None = None,
    dims: Mapping[str, int] | None = None,
    *,
    any_shape: bool = False,
    gradients: bool = False,
) -> tuple[list[Tensor], Any, tuple[Any, ...], bool]:
    """The leaves of a tree, every one a tensor that ``accept`` lets through; what :func:`rebuild` needs; what a link is
    told of them, if it wants to know, with the first call that they are in; and whether they are known to be of one
    dtype on one device.

    Dicts are taken in order of their keys: two ranks may have filled theirs in different orders. ``ragged``: the dim
    whose length may differ between ranks. ``dims``: those that all ranks must have named alike: what is moved in a
    bucket is the same for each. ``any_shape``: ``accept`` looks at no shape. ``gradients``: the link is also told which
    leaves need none beside others that do, for a rank that needs one of them would sum what the others leave out.
    """
    try:
        leaves, form = _taken_apart(tree)
    except RecursionError:
        check.explain(where, "x contains itself, or is nested too deeply.", axis, fix="a list or a dict of tensors")
    each: Iterable[int] = range(len(leaves))
    alike = False
    if type(form) is tuple and len(leaves) > 1:
        kinds = list(map(_all_but_shape if accept is None or any_shape else _all, leaves))
        found = set(kinds)
        each = [0]
        if len(found) > 1:
            each = sorted(dict(zip(reversed(kinds), reversed(range(len(kinds))), strict=True)).values())
        alike = len({kind[1:3] for kind in found}) == 1
    for at in each:
        try:
            check.tensor(where, leaves[at], axis)
            if accept is not None:
                accept(leaves[at])
        except MeshError as error:
            path = _paths(form, len(leaves))[at]
            if not path:  # the tree is one leaf
                raise
            raise MeshError(f"{error}\n  leaf: x{path}") from None
    link = axis.link
    if not leaves or torch.compiler.is_compiling() or not (link.watched or (link.hears and leaves[0].is_cpu)):
        return leaves, form, (), alike
    seen = _kept(_forms, form if type(form) is tuple else form.spec, lambda: _Seen(form, len(leaves)))
    frozen = _frozen(leaves) if gradients and torch.is_grad_enabled() and _is_plain() else ()
    return leaves, form, seen.described(leaves, ragged, dims or {}, frozen), alike


def _frozen(leaves: Sequence[Tensor]) -> tuple[int, ...]:
    """Where the leaves are that need no gradient and could have one, if others need theirs."""
    needing = list(map(_needs_grad, leaves))
    if all(needing) or True not in needing:
        return ()
    pairs = enumerate(zip(leaves, needing, strict=True))
    return tuple(at for at, (x, needs) in pairs if not needs and check.differentiable(x))


def rebuild(leaves: Sequence[Tensor], form: Any) -> Any:
    """The tree that :func:`leaves_of` took apart, with these leaves."""
    if type(form) is tuple:
        return rebuilt(form, iter(leaves))
    placed: list[Any] = [None] * len(form.order)
    for at, leaf in zip(form.order, leaves, strict=True):
        placed[at] = leaf
    return _torch.tree_unflatten(placed, form.spec)


def _taken_apart(tree: Any) -> tuple[list[Any], Any]:
    if not torch.compiler.is_compiling():
        leaves: list[Any] = []
        with contextlib.suppress(LookupError):
            form = walk(tree, leaves)
            return leaves, form
    found, spec = _torch.tree_flatten(tree)

    def in_order() -> list[int]:
        numbers = _torch.tree_unflatten(list(range(len(found))), spec)
        return _torch.tree_flatten(_by_key(numbers))[0]

    order = in_order() if torch.compiler.is_compiling() else _kept(_orders, spec, in_order)
    return [found[at] for at in order], _OfTorch(spec, order)


def _by_key(tree: Any) -> Any:
    """The tree with its dicts in order of their keys."""
    if isinstance(tree, dict):
        return {key: _by_key(tree[key]) for key in sorted(tree, key=sortable)}
    return [_by_key(part) for part in tree] if isinstance(tree, (list, tuple)) else tree


_MOST_FORMS = 100
_orders: dict[Any, list[int]] = {}
_forms: dict[Any, _Seen] = {}


def _kept(cache: dict[Any, T], key: Any, make: Callable[[], T]) -> T:
    """What it makes, once for the same key."""
    try:
        known = cache.get(key)
    except TypeError:  # something in it has no hash
        return make()
    if known is None:
        known = make()
        if len(cache) >= _MOST_FORMS:
            cache.clear()
        cache[key] = known
    return known


class _Seen:
    """What trees of one form have in common."""

    def __init__(self, form: Any, count: int) -> None:
        self.paths = _paths(form, count)
        self._described: dict[Any, tuple[Any, ...]] = {}

    def described(
        self, leaves: Sequence[Tensor], ragged: int | None, dims: Mapping[str, int], frozen: tuple[int, ...]
    ) -> tuple[Any, ...]:
        """Path, dtype and shape of each leaf: the same object for the same."""
        key = ragged, frozen, *dims.values(), *[(leaf.dtype, leaf.shape) for leaf in leaves]
        known = self._described.get(key)
        if known is None:
            known = tuple(
                (path + _named(dims, leaf, at in frozen), leaf.dtype, _without(leaf.shape, ragged))
                for at, (path, leaf) in enumerate(zip(self.paths, leaves, strict=True))
            )
            if len(self._described) >= _MOST_FORMS:
                self._described.clear()
            self._described[key] = known
        return known


def _paths(form: Any, count: int) -> list[str]:
    """The text of the path to each leaf."""
    numbers: Any = rebuild(range(count), form)  # type: ignore[arg-type]
    found = {number: path for path, number in _torch.tree_leaves_with_path(numbers)}
    return [found[at] for at in range(count)]


def _named(dims: Mapping[str, int], leaf: Tensor, is_frozen: bool) -> str:
    named = "".join(f" {name}={dim % max(1, leaf.ndim)}" for name, dim in dims.items())
    return named + " requires_grad=False" if is_frozen else named


def _without(shape: tuple[int, ...], ragged: int | None) -> tuple[int, ...]:
    if ragged is None or not shape:
        return tuple(shape)
    return *shape[: ragged % len(shape)], -1, *shape[ragged % len(shape) :][1:]


_SIMPLE = frozenset({Tensor, Parameter})
_needs_grad, _shape_of = attrgetter("requires_grad"), attrgetter("shape")


class Rows(NamedTuple):
    """How leaves become rows ``[rows, k]`` of a bucket, and what comes of these leaves again; by default one row."""

    size: int = 1
    """Of the axis."""
    cut: int | None = None
    """The dim that is cut into as many rows."""
    joined: int | None = None
    """The dim along which as many rows that come are joined."""

    def of(self, leaf: Tensor) -> Tensor:
        """The rows of a leaf."""
        if self.cut is None:
            return leaf.reshape(1, leaf.numel())
        return cut_rows(leaf, self.cut % leaf.ndim, self.size)

    def back(self, part: Tensor, form: torch.Size) -> Tensor:
        """What comes of a leaf of this shape, of the rows that come of its rows."""
        shape = form if self.cut is None else slice_shape(form, self.cut % len(form), self.size)
        if self.joined is None:
            return part.reshape(shape)
        return join_rows(part, shape, self.joined % len(form), self.size)


ELEMENTS = Rows()
"""What is done with each element depends on no other."""


def cut_rows(leaf: Tensor, dim: int, size: int) -> Tensor:
    """``[n, k]``: row i holds slice i of ``leaf`` along ``dim``."""
    if dim == 0:
        return leaf.reshape(size, leaf.numel() // size)
    whole = leaf.unflatten(dim, (size, leaf.shape[dim] // size)).movedim(dim, 0)
    rows: Tensor = whole.reshape(size, leaf.numel() // size)
    return rows


def slice_shape(form: torch.Size, dim: int, size: int) -> torch.Size:
    """The shape of one of ``size`` equal slices along ``dim``."""
    return torch.Size((*form[:dim], form[dim] // size, *form[dim + 1 :]))


def join_rows(part: Tensor, shape: torch.Size, dim: int, size: int) -> Tensor:
    """Concatenate along ``dim`` the rows of ``[n, k]``, each of which holds one rank's tensor of this shape."""
    if math.prod(shape[:dim]) == 1:  # they lie so
        return part.reshape(*shape[:dim], size * shape[dim], *shape[dim + 1 :])
    return part.reshape(size, *shape).movedim(0, dim).flatten(dim, dim + 1)


Run = Callable[[Tensor, tuple[Any, ...], bool], Any]
Unpack = Callable[[Tensor], Sequence[Tensor]]


def in_buckets(
    where: str,
    leaves: Sequence[Tensor],
    axis: Axis,
    bucket_mb: float,
    run: Run,
    rows: Rows = ELEMENTS,
    saves: bool = False,
    said: tuple[Any, ...] = (),
    *,
    alike: bool = False,
    all_need: bool = False,
) -> list[Tensor]:
    """Apply what works on dim 0 to buckets. ``said``: of the leaves, handed to ``run`` with the first one. ``alike``:
    as in :func:`groups_of`.

    ``run`` is told whether the bucket is a copy that nobody else has. It may give a Pending, and the leaves that come
    of it are one then. ``saves``: the derivative needs the values. ``all_need``: all that comes of a bucket needs a
    gradient if one leaf does; by default what comes of those that do.
    """
    check.checked_size(where, bucket_mb, axis)
    groups = groups_of(leaves, bucket_mb, alike=alike)
    begun: list[Any] = []
    backs: list[Unpack] = []
    for bucket in groups:
        whole, is_copy, back = _packed([leaves[at] for at in bucket], rows, saves, all_need)
        begun.append(run(whole, () if begun else said, is_copy))
        backs.append(back)

    def unpack(done: list[Tensor]) -> list[Tensor]:
        if len(groups) == 1:
            return list(backs[0](done[0]))
        results: dict[int, Tensor] = {}
        for bucket, back, whole in zip(groups, backs, done, strict=True):
            results.update(zip(bucket, back(whole), strict=True))
        return [results[at] for at in range(len(leaves))]

    return then_all(begun, unpack)


def _packed(leaves: list[Tensor], rows: Rows, saves: bool, all_need: bool) -> tuple[Tensor, bool, Unpack]:
    """The leaves as one tensor, whether that is a copy, and what takes apart what comes of it."""
    plain, places = _is_plain(), None
    if plain and len(leaves) > 1 and (set(map(type, leaves)) <= _SIMPLE or set(map(_torch.kind_of, leaves)) <= _SIMPLE):
        leaves = list(map(_torch.unwrap_if_dead, leaves))
        shapes = tuple(map(_shape_of, leaves))  # as they are now: what comes of them may come later
        places = (1, _places(1, shapes)) if rows is ELEMENTS else _places_of(rows, shapes)
    if places is not None:
        needing = list(map(_needs_grad, leaves)) if torch.is_grad_enabled() else []
        cut, there = places
        lie = cut == 1 and _adjacent(leaves)
        if True not in needing:
            whole = _as_one(leaves) if lie else _torch.packed(leaves, cut)
            return whole, not lie, there.parted
        if not saves:
            # A leaf that needs no gradient may share a bucket with one that does.
            return (
                _packed_node(lie, cut, *leaves),
                not lie,
                lambda whole: _parted_node(whole, there, None if all_need else needing),
            )
    parts = [rows.of(leaf) for leaf in leaves]
    widths, forms = [part.shape[1] for part in parts], [leaf.shape for leaf in leaves]

    def back(whole: Tensor) -> list[Tensor]:
        pieces = zip(whole.split(widths, 1), forms, strict=True)
        results = [rows.back(part, form) for part, form in pieces]
        if all_need or not plain:
            return results
        return [y if x.requires_grad else y.detach() for y, x in zip(results, leaves, strict=True)]

    return *_beside(parts, saves), back


def _is_plain() -> bool:
    return not (torch.compiler.is_compiling() or _torch.functorch_active() or _torch.dual_level_open())


def _beside(parts: Sequence[Tensor], saves: bool) -> tuple[Tensor, bool]:
    """The parts beside each other, ``[rows, sum of k]``, and whether that is a copy: not if they lie so.

    Also a copy where a derivative needs the values: a change in place of a part that counts its versions by itself, as
    parameters do, would not be noticed in a view.
    """
    if len(parts) == 1:
        return parts[0], False
    needing = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    if parts[0].shape[0] != 1 or (needing and saves) or not _is_plain() or not _adjacent(parts):
        return torch.cat(list(parts), 1), True
    return _packed_node(True, 1, *parts) if needing else _as_one(parts), False


def _adjacent(leaves: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before it ends, in one storage. What is traced has none."""
    first = leaves[0]
    if _torch.kind_of(first) not in _SIMPLE:
        return False
    at, storage = _torch.places_like(first), first.untyped_storage()
    place = at(first)
    end = place - first.storage_offset() * first.element_size() + storage.nbytes()
    for leaf in leaves:
        if at(leaf) != place or not leaf.is_contiguous() or leaf.is_conj() or leaf.is_neg():
            return False
        place += leaf.nbytes
    return place <= end and end > 0


def _as_one(leaves: Sequence[Tensor]) -> Tensor:
    width = sum(map(Tensor.numel, leaves))
    return leaves[0].detach().as_strided((1, width), (width, 1))


class _Places(NamedTuple):
    """Where tensors are in ``[rows, all]``: in each row a part of each, one behind the other."""

    rows: int
    like: Sequence[Tensor]
    """Of their shapes; the rows are parts of their first dim."""
    wide: Sequence[Tensor] = ()
    """Of the shapes that they have as rows, if these are several."""
    widths: Sequence[int] = ()

    def parted(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The tensors, which to autograd have nothing to do with each other nor with ``whole``."""
        flat = whole.reshape(-1)
        if self.rows > 1:
            flat = torch.empty_like(flat)
            torch.split_with_sizes_copy(whole, self.widths, 1, out=_torch.parted(flat, self.wide))
        return _torch.parted(flat, self.like)


def parted(whole: Tensor, shapes: tuple[torch.Size, ...]) -> Sequence[Tensor]:
    """What lies one behind the other in ``whole``, without a copy: while no graph is made, tensors that to autograd
    have nothing to do with each other.
    """
    plain = type(whole) is Tensor and _is_plain() and _torch.plain_now()
    if plain and not (torch.is_grad_enabled() and whole.requires_grad):
        return _torch.parted_in_shape(whole, _like(shapes), _empty_of(shapes))
    parts = whole.split_with_sizes(list(map(torch.Size.numel, shapes)))
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@lru_cache(maxsize=100)
def _places(rows: int, shapes: tuple[torch.Size, ...]) -> _Places:
    if rows == 1:
        return _Places(1, _like(shapes))
    widths = [shape.numel() // rows for shape in shapes]
    return _Places(rows, _like(shapes), _like(tuple(torch.Size((rows, width)) for width in widths)), widths)


@lru_cache(maxsize=100)
def _places_of(rows: Rows, shapes: tuple[torch.Size, ...]) -> tuple[int, _Places] | None:
    """Into how many rows leaves of these shapes are cut, and where what comes of them is; None if it is not by their
    first dims, or if some are empty.
    """
    dims = [dim for dim in (rows.cut, rows.joined) if dim is not None]
    if any(dim % len(shape) for shape in shapes for dim in dims) or not all(map(torch.Size.numel, shapes)):
        return None
    cut, joined = (1 if dim is None else rows.size for dim in (rows.cut, rows.joined))
    return cut, _places(joined, tuple(torch.Size((shape[0] // cut * joined, *shape[1:])) for shape in shapes))


@lru_cache(maxsize=100)
def _empty_of(shapes: tuple[torch.Size, ...]) -> list[int]:
    return [at for at, shape in enumerate(shapes) if not shape.numel()]


@lru_cache(maxsize=100)
def _like(shapes: tuple[torch.Size, ...]) -> list[Tensor]:
    """Tensors of these shapes, which take no memory."""
    return _torch.lasting(lambda: [torch.empty((), device="cpu").expand(shape) for shape in shapes])


def _pack(tensors: Sequence[Tensor], rows: int) -> Tensor:
    """Them as ``[rows, all]``, new."""
    if _is_plain():
        if torch.is_grad_enabled() and any(map(_needs_grad, tensors)):
            return _packed_node(False, rows, *tensors)  # type: ignore[no-any-return]
        with contextlib.suppress(RuntimeError):  # of one that stands for many: is_grads_batched=True
            return _torch.packed(tensors, rows)
    return torch.cat([x.reshape(rows, x.numel() // rows) for x in tensors], 1)


def _part(whole: Tensor, places: _Places) -> Sequence[Tensor]:
    """What was packed."""
    if _is_plain():
        if torch.is_grad_enabled() and whole.requires_grad:
            return _parted_node(whole, places, None)  # type: ignore[no-any-return]
        with contextlib.suppress(RuntimeError):  # the same
            return places.parted(whole)
    parts = whole.split([x.numel() // places.rows for x in places.like], 1)
    return [part.reshape(x.shape) for part, x in zip(parts, places.like, strict=True)]


class _Packed(Function):
    """Tensors as one: their memory if they lie so, or a copy."""

    @staticmethod
    def forward(ctx: Any, as_they_lie: bool, rows: int, *tensors: Tensor) -> Tensor:
        ctx.of = rows, tuple(map(_shape_of, tensors))
        return _as_one(tensors) if as_they_lie else _torch.packed(tensors, rows)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_part(g, _places(*ctx.of))


class _Parted(Function):
    """One tensor as several, which to autograd have nothing to do with each other: they have no element in common."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, places: _Places, needing: Sequence[bool] | None) -> tuple[Tensor, ...]:
        ctx.rows, found = places.rows, places.parted(whole)
        if needing is not None and not all(needing):
            ctx.mark_non_differentiable(*[y for y, needs in zip(found, needing, strict=True) if not needs])
        return found

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> tuple[Tensor, None, None]:
        return _pack(gs, ctx.rows), None, None


_packed_node: Any = super(Function, _torch.shortened(_Packed, "of")).apply  # type: ignore[misc]
_parted_node: Any = super(Function, _torch.shortened(_Parted, "rows")).apply  # type: ignore[misc]
