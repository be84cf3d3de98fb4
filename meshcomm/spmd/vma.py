"""The type of a value: the axes along which it varies, and since when. (vma: varying manual axes, JAX's name for it.)

A type is noted on the tensor itself. Not on its storage, for what pvary gives shares that of its input; but what is
written into a storage in place, all of its views have.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm._torch import functorch_active, unwrapped
from meshcomm.runtime.callsite import call_site

__all__ = ["INVARIANT", "Origin", "Type", "also_written", "join", "marked", "note", "noted", "write"]


class Origin(NamedTuple):
    """Where something happened to a value."""

    what: str
    site: str = ""
    leaf: bool = False
    """It was so from the beginning, and no operation's doing."""

    def __str__(self) -> str:
        return f"{self.what} at {self.site}" if self.site else self.what


class Type:
    """The axes along which a value varies, with the origin of each; all others it is invariant along."""

    __slots__ = ("_twin", "axes", "ended", "leaf", "plain", "since")

    def __init__(
        self, since: dict[str, Origin], ended: dict[str, Origin] | None = None, *, plain: bool = False
    ) -> None:
        self.since = since
        self.ended = ended or {}
        """Where it was made invariant, by axis."""
        self.axes = frozenset(since)
        self.leaf = any(origin.leaf for origin in since.values())
        self.plain = plain
        """It was noted on a tensor that did not require grad."""
        self._twin: Type | None = None

    def seen(self, requires_grad: bool) -> Type:
        """The same for a tensor of either kind."""
        if self.plain != requires_grad:
            return self
        if self._twin is None:
            self._twin = Type(self.since, self.ended, plain=not self.plain)
            self._twin._twin = self
        return self._twin

    def ends(self, axes: Iterable[str], origin: Origin) -> Type:
        """Made invariant along these axes."""
        since = {axis: origin for axis, origin in self.since.items() if axis not in axes}
        return Type(since, self.ended | dict.fromkeys(axes, origin))

    def begins(self, axes: Iterable[str], origin: Origin) -> Type:
        """Made varying along these axes too."""
        ended = {axis: origin for axis, origin in self.ended.items() if axis not in axes}
        return Type(dict.fromkeys(axes, origin) | self.since, ended)

    def __reduce__(self) -> tuple[Any, ...]:
        # Nothing of it: a tensor that is saved with this on it must load where only plain data may.
        return OrderedDict, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Type:
        return self

    def __repr__(self) -> str:
        return f"Type({', '.join(sorted(self.axes)) or 'invariant'})"


INVARIANT = Type({}, plain=True)


def join(types: Sequence[Type], name: str) -> Type:
    """The type of what is computed from values of these types by the operation ``name``."""
    first = types[0]
    if all(each is first for each in types):
        return first
    axes = frozenset().union(*(each.axes for each in types))
    even = all(len(each.axes) == len(axes) for each in types)
    ended: dict[str, Origin] = {}
    for each in types:
        ended |= each.ended
    for axis in axes:
        ended.pop(axis, None)
    for each in types:
        if len(each.axes) == len(axes) and (even or not each.leaf) and ended.keys() == each.ended.keys():
            return each
    since: dict[str, Origin] = {}
    here: Origin | None = None
    for axis in axes:
        origin = next(each.since[axis] for each in types if axis in each.axes)
        if origin.leaf and not all(axis in each.axes for each in types):
            here = here or Origin(name, str(call_site()))
            origin = here
        since[axis] = origin
    return Type(since, ended)


# -------------------------------------------------------------------------------------------- what is noted on a tensor

_NAME = "_meshcomm_type"
_WRITTEN = "_meshcomm_written"


def marked(x: Tensor) -> Type | None:
    """The type noted on this very tensor."""
    found = getattr(x, _NAME, None)
    return found if type(found) is Type else None


def noted(x: Tensor) -> Type | None:
    """The type of ``x``; None if it is unknown."""
    found = getattr(x, _NAME, None)
    if type(found) is Type:
        return found
    if functorch_active() and (inner := unwrapped(x)) is not None:
        return noted(inner)
    base = x._base  # a view that was made out of sight
    return None if base is None or getattr(base, _SPLIT, False) else marked(base)


_SPLIT = "_meshcomm_split"
"""Views of this tensor have different types."""


def note(x: Tensor, kind: Type, known: Container[int] = ()) -> None:
    """Note the type of ``x``, and of what torch.func has wrapped in it: that is what remains of it afterwards.

    known: the ids of tensors whose types are kept elsewhere.
    """
    setattr(x, _NAME, kind.seen(x.requires_grad))
    base = x._base
    if base is not None:
        found = marked(base)
        if found is None and id(base) not in known:
            setattr(base, _NAME, kind.seen(base.requires_grad))
        elif found is None or found.axes != kind.axes:
            setattr(base, _SPLIT, True)
    if functorch_active():
        for inner in _inside(x):
            setattr(inner, _NAME, kind.seen(inner.requires_grad))


def _inside(x: Tensor) -> Iterator[Tensor]:
    inner = unwrapped(x)
    while inner is not None:
        yield inner
        inner = unwrapped(inner)


def write(x: Tensor, kind: Type) -> None:
    """Note that values of a type were written into ``x``, so that all its views have them."""
    storage = _storage(x)
    before = getattr(storage, _WRITTEN, None)
    if before is None or not kind.axes <= before.axes:
        setattr(storage, _WRITTEN, kind if before is None else Type(kind.since | before.since))


def also_written(x: Tensor, kind: Type) -> Type:
    """The type of ``x``, noted as ``kind``, with what was written into its storage."""
    written = getattr(_storage(x), _WRITTEN, None)
    if written is None or written.axes <= kind.axes:
        return kind
    return kind.begins(written.axes - kind.axes, next(iter(written.since.values()))).seen(x.requires_grad)


def _storage(x: Tensor) -> torch.UntypedStorage:
    innermost = x
    for inner in _inside(x):
        innermost = inner
    return innermost.untyped_storage()
