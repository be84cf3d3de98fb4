"""Changes of tensors in place, for the checker of varying types: which of them it has seen.

torch counts the changes of a tensor together with those of its views. A type holds as of a count, which is noted beside
it; each change that is seen is noted on the storage. Where the count has moved and nothing is noted, somebody has
changed the values out of sight, and their type is unknown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshcomm._torch.autograd import functorch_active, unwrapped
from meshcomm._torch.views import version_of
from meshcomm.spmd.types.notes import Note

NOTED_AT = "_meshcomm_version"
"""The attribute with the count as of which a tensor has its type; without it that is 0."""
_DECLARED = "_meshcomm_declared_at"
SEEN = "_meshcomm_seen"
"""The attribute of a storage with the changes that were seen: from which count to which."""
_FEW = 16
AGAIN = "_meshcomm_again"
"""The attribute of a tensor that is written into again and again, and of its storage, as long as both are as they were:
the same object.
"""

_moments = itertools.count(1)


class Again(Note):
    """What was found of a tensor that was written into: nothing of that is to be looked for again."""

    __slots__ = ("at", "grid", "kind", "span")

    def __init__(self, kind: Any, grid: Any, span: list[int] | None, at: int) -> None:
        self.kind, self.grid = kind, grid
        """Its type, and that of all that was written into its memory, if it varies along any axes of this grid."""
        self.span, self.at = span, at
        """The last changes of its memory that were seen, up to this count; None: none were."""


def not_again(storage: torch.UntypedStorage | None) -> None:
    """Something else is noted of a storage now: who writes into it must look."""
    if getattr(storage, AGAIN, None) is not None:
        setattr(storage, AGAIN, None)


def moment() -> int:
    """A number that is larger than all before."""
    return next(_moments)


def stamp(x: Tensor) -> None:
    """Note that the type of ``x`` holds as of now."""
    try:
        if at := version_of(x):
            setattr(x, NOTED_AT, at)
    except RuntimeError:  # an inference tensor does not count
        pass


def by_hand(x: Tensor) -> None:
    """Note that somebody has said of which type ``x`` is, which holds for what is not looked at, too."""
    setattr(x, _DECLARED, moment())


def noted_at(x: Tensor) -> int:
    """The count as of which ``x`` has its type."""
    return getattr(x, NOTED_AT, 0)


def saw(x: Tensor, before: int, after: int) -> None:
    """Note that all changes between two counts were seen."""
    if functorch_active():
        for inner in inside(x):
            _saw(inner, noted_at(inner), version_of(inner))
    _saw(x, before, after)


def _saw(x: Tensor, before: int, after: int) -> None:
    if getattr(x, NOTED_AT, 0) == before:
        setattr(x, NOTED_AT, after)
    base = x._base
    if base is not None and getattr(base, NOTED_AT, 0) == before:
        setattr(base, NOTED_AT, after)
    storage = storage_of(x)
    if storage is None or before >= after:
        return
    seen: list[list[int]] | None = getattr(storage, SEEN, None)
    if seen is None:
        setattr(storage, SEEN, [[before, after]])
        return
    for span in seen:  # there may be several counts for one storage: x.data has one of its own
        if span[1] == before:
            span[1] = after
            return
        if span[0] <= before and after <= span[1]:
            return
    seen.append([before, after])
    del seen[:-_FEW]
    not_again(storage)


def accounted(x: Tensor, at: int, since: int, entered: int, passed: int) -> bool:
    """Whether ``x`` keeps its type, as all changes from a count on were seen, or were made where nobody looks.

    since: when its type was declared, 0 if it was not. A declared type holds for what is done between two checks, of
    which this one was ``entered`` then; that of a parameter also for what is done in a backward pass or where a check
    is off, which last ended when ``passed``.
    """
    storage = storage_of(x)
    after = version_of(x)
    for span in getattr(storage, SEEN, ()):
        if span[0] <= at and after <= span[1]:
            return True
    if since and (since < entered or (since < passed and x.requires_grad and x.is_leaf)):
        return True
    return storage is None and after == at


def declared_at(x: Tensor) -> int:
    """When somebody said of which type ``x`` is; 0: never."""
    return getattr(x, _DECLARED, 0)


def inside(x: Tensor) -> Iterator[Tensor]:
    """What torch.func has wrapped in ``x``, outermost first."""
    inner = unwrapped(x)
    while inner is not None:
        yield inner
        inner = unwrapped(inner)


def storage_of(x: Tensor) -> torch.UntypedStorage | None:
    """None for tensors that have none to share, such as sparse ones and parameters of lazy modules before their first
    call.
    """
    if functorch_active():
        for inner in inside(x):
            x = inner
    try:
        return x.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):
        return None
