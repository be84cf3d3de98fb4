"""What the ranks of one process get of a call, made of what all have brought, by the one that came last.

Results are large or small: large ones lie in memory that was used before, as those of processes of one machine do, for
fresh pages cost more than what is written to them. Each rank has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from meshcomm.runtime.process import reuse
from meshcomm.runtime.process.reuse import reserve
from meshcomm.runtime.transports import dtypes

_DENSE = Tensor, Parameter
_CLONE = Tensor.clone


def copied(x: Tensor) -> Tensor:
    """One tensor."""
    return _copy(x, *_places(x, x.shape, 1))


def reduced(op: str, xs: list[Tensor]) -> list[Tensor]:
    """Folded by index, whatever the order of arrival."""
    if xs[0].nbytes < reuse.LEAST:  # most calls; and each step less is felt
        y = dtypes.fold(op, xs)
        return [y, *map(_CLONE, [y] * (len(xs) - 1))]
    places = _places(xs[0], xs[0].shape, len(xs))
    return _copies(dtypes.fold(op, xs, out=places[0]), places)


def reduced_to(dst: int, op: str, xs: list[Tensor]) -> list[Tensor | None]:
    """The same, for one rank."""
    return _only(dst, dtypes.fold(op, xs, out=_places(xs[0], xs[0].shape, 1)[0]), len(xs))


def gathered(xs: list[Tensor]) -> list[Tensor]:
    """Stacked in order of index."""
    places = _places(xs[0], (len(xs), *xs[0].shape), len(xs))
    return _copies(torch.stack(xs, out=places[0]), places)


def joined(xs: list[Tensor]) -> list[Tensor]:
    """One behind the other in order of index."""
    if xs[0].nbytes * len(xs) < reuse.LEAST:
        y = torch.stack(xs).flatten(0, 1)
        return list(map(_CLONE, [y] * len(xs)))  # none is a view
    length, *rest = xs[0].shape
    places = _places(xs[0], (len(xs) * length, *rest), len(xs))
    return _copies(torch.cat(xs, out=places[0]).contiguous(), places)


def gathered_to(dst: int, xs: list[Tensor]) -> list[Tensor | None]:
    """The same, for one rank."""
    return _only(dst, torch.stack(xs, out=_places(xs[0], (len(xs), *xs[0].shape), 1)[0]), len(xs))


def scattered(op: str, xs: list[Tensor]) -> list[Tensor]:
    """Each row folded by index."""
    places = _places(xs[0], xs[0].shape[1:], len(xs))
    if places[0] is None:
        return [_copy(row) for row in dtypes.fold(op, xs)]
    return [dtypes.fold(op, [x[i] for x in xs], out=into) for i, into in enumerate(places)]


def scattered_flat(op: str, xs: list[Tensor]) -> list[Tensor]:
    """The same of rows that lie one behind the other."""
    count, (length, *rest) = len(xs), xs[0].shape
    if xs[0].nbytes < reuse.LEAST:
        return list(map(_CLONE, dtypes.fold(op, xs).view(count, length // count, *rest).unbind()))
    return scattered(op, [x.reshape(count, length // count, *rest) for x in xs])


def rows_of(src: int, xs: list[Tensor | None]) -> list[Tensor]:
    """Those of what ``src`` has brought."""
    whole = xs[src]
    assert whole is not None
    places = _places(whole, whole.shape[1:], len(xs))
    return [_copy(row, into) for row, into in zip(whole.unbind(), places, strict=True)]


def sent(src: int, xs: list[Tensor]) -> list[Tensor]:
    """Copies of what ``src`` has brought."""
    if xs[src].nbytes * len(xs) < reuse.LEAST:
        y = _copy(xs[src])
        return [y, *map(_CLONE, [y] * (len(xs) - 1))]
    return [_copy(xs[src], into) for into in _places(xs[src], xs[src].shape, len(xs))]


def permuted(given: list[tuple[Tensor, int | None]]) -> list[Tensor]:
    """Every rank takes what its source has brought; zeros without one."""
    first = given[0][0]
    if first.nbytes * len(given) < reuse.LEAST:
        return [x.new_zeros(x.shape) if source is None else _copy(given[source][0]) for x, source in given]
    places = iter(_places(first, first.shape, sum(source is not None for _, source in given)))
    return [
        x.new_zeros(x.shape) if source is None else _copy(given[source][0], next(places)) for x, source in given
    ]  # fmt: skip


def swapped(given: list[tuple[Tensor, Sequence[int], Sequence[int]]]) -> list[Tensor]:
    """Runs handed over; what one sends must be what the other expects. Who gives more than one dim has equal runs, and
    gets what lies as that does; others may have come to the same call with sizes.
    """
    first, count = given[0][0], len(given)
    shapes = [x.shape if x.ndim > 1 else (sum(recv),) for x, _, recv in given]
    lengths = set[int]().union(*(send for _, send, _ in given), *(recv for *_, recv in given))
    if len(lengths) == 1:
        [length] = lengths
        rows = [x.reshape(count, length) for x, _, _ in given]
        places = _places(first, shapes[0], count) if shapes.count(shapes[0]) == count else [None] * count
        if places[0] is None:  # with one copy for all, not one for each pair of ranks
            found = torch.stack(rows, 1).unbind()
            return [_copy(row.reshape(shape)) for row, shape in zip(found, shapes, strict=True)]
        return [_laid([row[i] for row in rows], into) for i, into in enumerate(places)]
    runs = [x.reshape(-1).split(list(send)) for x, send, _ in given]
    for source, (_, send, _) in enumerate(given):
        for target, (_, _, recv) in enumerate(given):
            if send[target] != recv[source]:
                raise ValueError(
                    f"index {source} sends {send[target]} elements to index {target}, which expects {recv[source]}."
                )
    places = [_places(first, shape, 1)[0] for shape in shapes]
    return [
        _laid([run[i] for run in runs], first.new_empty(shape) if into is None else into)
        for i, (shape, into) in enumerate(zip(shapes, places, strict=True))
    ]


def swapped_flat(given: list[tuple[Tensor, Sequence[int], Sequence[int]]]) -> list[Tensor]:
    """The same, in less time where all give alike."""
    first, runs, _ = given[0]
    count, shape = len(given), first.shape
    if first.nbytes < reuse.LEAST and all(x.shape == shape and send == runs == recv for x, send, recv in given):
        rows = torch.stack([x.reshape(count, runs[0]) for x, _, _ in given], 1)
        return list(map(_CLONE, rows.view(count, *shape).unbind()))
    return swapped(given)


def _laid(runs: list[Tensor], into: Any) -> Tensor:
    """Runs one behind the other, in memory of any shape; a view of that would refuse to be written in grad mode."""
    torch.cat(runs, out=into.view(-1))
    return into  # type: ignore[no-any-return]


def _places(like: Tensor, shape: Sequence[int], count: int) -> Sequence[Tensor | None]:
    """Where so many results go, of the dtype of ``like``; None: to memory that torch takes."""
    if like.nbytes * count < reuse.LEAST:  # no result is greater than all that was given
        return [None] * count
    if count and type(like) in _DENSE and like.is_cpu and (found := reserve.find(shape, like, count)) is not None:
        return found
    return [None] * count


def _copy(x: Tensor, into: Tensor | None = None) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if into is None else into.copy_(x)


def _copies(x: Tensor, places: Sequence[Tensor | None]) -> list[Tensor]:
    # One tensor object handed to several ranks would share its grad_fn between them.
    return [x, *[x.clone() if into is None else into.copy_(x) for into in places[1:]]]  # contiguous, as it is


def _only(dst: int, x: Tensor, count: int) -> list[Tensor | None]:
    return [x if index == dst else None for index in range(count)]
