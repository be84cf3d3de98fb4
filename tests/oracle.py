"""What every collective means, written down without communication: functions from a list of shards to a list of shards.

``xs[r]`` is what rank r of the mesh holds, in row-major order of the mesh's axes. Values that are invariant along an axis are
one and the same tensor object on the ranks of that axis, so that torch's own autograd through a program of these functions
counts them once, and gives the gradients that the library's backwards are compared with.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Oracle", "axis_choices", "distinct", "tree"]

Axis = "str | tuple[str, ...]"
Shards = list[Tensor]


def axis_choices(shape: Mapping[str, int]) -> list[Any]:
    """Every axis, and every tuple of two or more of them in every order."""
    orders = [order for count in range(2, len(shape) + 1) for order in itertools.permutations(shape, count)]
    return [*shape, *orders]


def distinct(xs: Sequence[Tensor]) -> list[Tensor]:
    """Each logical value once."""
    return list({id(x): x for x in xs}.values())


class Oracle:
    """The collectives of a mesh of this shape."""

    def __init__(self, shape: Mapping[str, int]) -> None:
        self.shape = dict(shape)
        self.size = math.prod(shape.values())
        places = itertools.product(*(range(length) for length in shape.values()))
        self.coordinates = [dict(zip(shape, place, strict=True)) for place in places]

    def axis_size(self, axis: Any) -> int:
        return math.prod(self.shape[name] for name in _names(axis))

    def groups(self, axis: Any) -> list[list[int]]:
        """The ranks that differ along ``axis`` only, each list in order of the index along it."""
        parts = _names(axis)

        def rest(rank: int) -> tuple[int, ...]:
            return tuple(place for name, place in self.coordinates[rank].items() if name not in parts)

        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            found.setdefault(rest(rank), []).append(rank)
        return [sorted(ranks, key=lambda rank: self.index(rank, axis)) for ranks in found.values()]

    def index(self, rank: int, axis: Any) -> int:
        """Where ``rank`` is along ``axis``: the first name of a tuple is major."""
        place = 0
        for name in _names(axis):
            place = place * self.shape[name] + self.coordinates[rank][name]
        return place

    def spread(self, make: Callable[[int], Tensor], invariant_along: Any = ()) -> Shards:
        """``make(rank)`` on every rank; along ``invariant_along`` the first rank's object on all."""
        xs: list[Any] = [None] * self.size
        for ranks in self.groups(invariant_along):
            xs_of_group = [make(ranks[0])] * len(ranks)
            for rank, x in zip(ranks, xs_of_group, strict=True):
                xs[rank] = x
        return xs

    def local(self, fn: Callable[..., Tensor], *args: Sequence[Any]) -> Shards:
        """A function that each rank applies to its own values; equal objects stay one object."""
        done: dict[tuple[int, ...], Tensor] = {}
        results = []
        for values in zip(*args, strict=True):
            key = tuple(id(value) for value in values)
            if key not in done:
                done[key] = fn(*values)
            results.append(done[key])
        return results

    def _grouped(self, xs: Shards, axis: Any, fn: Callable[[Shards], Shards]) -> Shards:
        """``fn`` of each group; groups of equal objects, along which the value is invariant, get equal objects."""
        done: dict[tuple[int, ...], Shards] = {}
        results: list[Any] = [None] * self.size
        for ranks in self.groups(axis):
            group = [xs[rank] for rank in ranks]
            key = tuple(id(x) for x in group)
            if key not in done:
                done[key] = fn(group)
            for rank, y in zip(ranks, done[key], strict=True):
                results[rank] = y
        return results

    # ------------------------------------------------------------------------------------------------ collectives

    def pvary(self, xs: Shards, axis: Any) -> Shards:
        return self._grouped(xs, axis, lambda group: [x.view_as(x) for x in group])

    def all_reduce(self, xs: Shards, axis: Any, op: str = "sum") -> Shards:
        return self._grouped(xs, axis, lambda group: [fold(group, op)] * len(group))

    def scan(self, xs: Shards, axis: Any, op: str = "sum", exclusive: bool = False, reverse: bool = False) -> Shards:
        def fn(group: Shards) -> Shards:
            group = group[::-1] if reverse else group
            nothing = fold([group[0] * 0 + 1], "product") if op == "product" else extreme(group[0], op)
            taken = [group[: i if exclusive else i + 1] for i in range(len(group))]
            ys = [fold(part, op) if part else nothing for part in taken]
            return ys[::-1] if reverse else ys

        return self._grouped(xs, axis, fn)

    def all_gather(self, xs: Shards, axis: Any, dim: int = 0, sizes: Any = None) -> Shards:
        return self._grouped(xs, axis, lambda group: [joined(group, dim) for _ in group])

    def all_gather_invariant(self, xs: Shards, axis: Any, dim: int = 0, sizes: Any = None) -> Shards:
        return self._grouped(xs, axis, lambda group: [joined(group, dim)] * len(group))

    def shard(self, xs: Shards, axis: Any, dim: int = 0, sizes: Any = None) -> Shards:
        def fn(group: Shards) -> Shards:
            return [cut(x, len(group), dim, sizes)[i] for i, x in enumerate(group)]

        return self._grouped(xs, axis, fn)

    def reduce_scatter(self, xs: Shards, axis: Any, dim: int = 0, op: str = "sum", sizes: Any = None) -> Shards:
        return self._grouped(xs, axis, lambda group: cut(fold(group, op), len(group), dim, sizes))

    def all_to_all(
        self, xs: Shards, axis: Any, split_dim: int, concat_dim: int, own: Sequence[dict[str, Any]] | None = None
    ) -> Shards:
        def fn(group: Shards) -> Shards:
            n = len(group)
            sends = [None if own is None else own[i].get("send_sizes") for i in range(n)]
            pieces = [cut(x, n, split_dim, sizes) for x, sizes in zip(group, sends, strict=True)]
            return [torch.cat([pieces[source][target] for source in range(n)], concat_dim) for target in range(n)]

        return self._grouped(xs, axis, fn)

    def permute(self, xs: Shards, axis: Any, perm: Sequence[tuple[int, int]]) -> Shards:
        def fn(group: Shards) -> Shards:
            source_of = {destination: source for source, destination in perm}
            return [group[source_of[i]].clone() if i in source_of else torch.zeros_like(x) for i, x in enumerate(group)]

        return self._grouped(xs, axis, fn)

    def shift(self, xs: Shards, axis: Any, offset: int = 1, wrap: bool = True) -> Shards:
        n = self.axis_size(axis)
        pairs = [(i, i + offset) for i in range(n)]
        return self.permute(xs, axis, [(i, j % n) for i, j in pairs if wrap or 0 <= j < n])

    def broadcast(self, xs: Shards, axis: Any, src: int = 0) -> Shards:
        return self._grouped(xs, axis, lambda group: [group[src].clone()] * len(group))


def extreme(x: Tensor, op: str) -> Tensor:
    """What changes nothing: nothing for sums, and what each is less than, or more."""
    if op not in ("max", "min"):
        return torch.zeros_like(x)
    ends = (False, True) if x.dtype == torch.bool else (-math.inf, math.inf)
    ends = (
        ends
        if x.dtype.is_floating_point or x.dtype == torch.bool
        else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
    )
    return torch.full_like(x, ends[op == "min"])


def _names(axis: Any) -> tuple[str, ...]:
    return axis if isinstance(axis, tuple) else (axis,)


def fold(xs: Shards, op: str) -> Tensor:
    """The reduction, through one stacked tensor, whose gradients torch knows."""
    if op in _BITWISE:
        return functools.reduce(_BITWISE[op], xs).clone()
    stacked = torch.stack([x.resolve_conj() for x in xs])
    if op == "mean":
        return stacked.sum(0) / len(xs)
    if op in ("max", "min") and stacked.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return getattr(stacked.to(torch.int64), f"a{op}")(0).to(stacked.dtype)
    if op in ("max", "min"):
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    return (stacked.sum(0) if op == "sum" else stacked.prod(0)).to(xs[0].dtype)


def tree(xs: Sequence[Tensor], op: str = "sum") -> Tensor:
    """The bits of a sum, mean or product: level by level, neighbours in pairs; halves in single precision."""
    half = xs[0].dtype in (torch.float16, torch.bfloat16)
    level = [x.float() if half else x for x in xs]
    while len(level) > 1:
        pairs = [level[at : at + 2] for at in range(0, len(level), 2)]
        level = [math.prod(pair[1:], start=pair[0]) if op == "product" else sum(pair[1:], pair[0]) for pair in pairs]
    return (level[0] / len(xs) if op == "mean" else level[0]).to(xs[0].dtype)


_BITWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def joined(xs: Shards, dim: int) -> Tensor:
    return torch.cat([x.reshape(1) if x.ndim == 0 else x for x in xs], dim)


def cut(x: Tensor, n: int, dim: int, sizes: Sequence[int] | None) -> list[Tensor]:
    lengths = [x.shape[dim] // n] * n if sizes is None else list(sizes)
    return list(x.split(lengths, dim))
