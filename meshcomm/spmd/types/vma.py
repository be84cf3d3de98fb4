"""The type of a value: the axes along which it varies, and since when. (vma: varying manual axes, JAX's name for it.)

A type is noted on the tensor itself. Not on its storage, for what pvary gives shares that of its input; but what is
written into a storage in place, all of its views have.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm._torch.autograd import functorch_active, unwrapped
from meshcomm._torch.views import version_of
from meshcomm.runtime.callsite import CallSite, call_site
from meshcomm.spmd.types.foreign_memory import any_lent, lend_foreign, with_the_same_memory
from meshcomm.spmd.types.grids import ANYWHERE, Grid, written_along
from meshcomm.spmd.types.notes import Ever, Note
from meshcomm.spmd.types.seen_changes import NOTED_AT, by_hand, inside, not_again, stamp, storage_of


class Origin(NamedTuple):
    """Where something happened to a value."""

    what: str
    site: CallSite | str = ""
    leaf: bool = False
    """It was so from the beginning, and no operation's doing."""

    def __str__(self) -> str:
        return f"{self.what} at {self.site}" if self.site else self.what


class Type(Note):
    """The axes along which a value varies, with the origin of each; all others it is invariant along."""

    __slots__ = ("_twin", "axes", "ended", "grid", "leaf", "plain", "since", "sort")

    def __init__(
        self,
        since: dict[str, Origin],
        ended: dict[str, Origin] | None = None,
        *,
        plain: bool = False,
        grid: Grid | None = None,
    ) -> None:
        self.since = since
        self.ended = ended or {}
        """Where it was made invariant, by axis."""
        self.axes = one_of(frozenset(since))
        """One object for all types with these."""
        sort = self.axes, frozenset(self.ended)
        self.sort = _sorts.setdefault(sort, sort)
        """Its axes, those that vary and those that have ended: one object, too."""
        self.leaf = False
        for origin in since.values():
            if origin.leaf:
                self.leaf = True
        self.plain = plain
        """It was noted on a tensor that did not require grad."""
        self.grid = grid
        """Of whose axes it speaks; None until it is noted for a mesh."""
        self._twin: Type | None = None

    def placed_on(self, grid: Grid) -> Type:
        """From now on it speaks of the axes of this one, unless it speaks of others already."""
        if self.grid is None:
            self.grid = grid
            if self._twin is not None:
                self._twin.grid = grid
        return self

    def moved(self, grid: Grid, axes: frozenset[str]) -> Type:
        """The type of the same value on another mesh, where it varies along these axes."""
        first = next(iter(self.since.values()), None)
        since = {axis: self.since.get(axis, first) for axis in axes} if first is not None else {}
        end = next(iter(self.ended.values()), None)
        ended = None if end is None else dict.fromkeys(grid.shape.keys() - axes, end)
        return Type(since, ended, plain=self.plain, grid=grid)

    def seen(self, requires_grad: bool) -> Type:
        """The type as it is noted on a tensor that requires grad, or that does not."""
        if self.plain != requires_grad:
            return self
        twin = self._twin
        if twin is None:
            twin = Type.__new__(Type)
            twin.since, twin.ended, twin.axes, twin.sort = self.since, self.ended, self.axes, self.sort
            twin.leaf, twin.grid, twin.plain, twin._twin = self.leaf, self.grid, not self.plain, self
            self._twin = twin  # now that it is whole: other ranks have this type, too
        return twin

    def ends(self, axes: Iterable[str], origin: Origin) -> Type:
        """Made invariant along these axes."""
        since = {axis: origin for axis, origin in self.since.items() if axis not in axes}
        return Type(since, self.ended | dict.fromkeys(axes, origin), grid=self._kept_grid)

    def begins(self, axes: Iterable[str], origin: Origin) -> Type:
        """Made varying along these axes too."""
        ended = {axis: origin for axis, origin in self.ended.items() if axis not in axes}
        return Type(dict.fromkeys(axes, origin) | self.since, ended, grid=self._kept_grid)

    @property
    def _kept_grid(self) -> Grid | None:
        return None if self.grid is ANYWHERE else self.grid

    def __repr__(self) -> str:
        return f"Type({', '.join(sorted(self.axes)) or 'invariant'})"


_Sort = tuple[frozenset[str], frozenset[str]]
_sorts: dict[_Sort, _Sort] = {}
_axes: dict[frozenset[str], frozenset[str]] = {}


def one_of(axes: frozenset[str]) -> frozenset[str]:
    """One object for all that are equal: who compares them need not look inside."""
    return _axes.setdefault(axes, axes)


INVARIANT = Type({}, plain=True, grid=ANYWHERE)


def join(types: Sequence[Type], name: str) -> Type:
    """The type of what is computed from values of these types by the operation ``name``."""
    first = types[0]
    for each in types:
        if each.sort is not first.sort:
            break
    else:
        return first
    axes = first.axes
    for each in types:
        axes |= each.axes
    even = all([len(each.axes) == len(axes) for each in types])  # noqa: C419 -- a generator costs twice as much
    ended: dict[str, Origin] = {}
    for each in types:
        if each.ended:
            ended |= each.ended
    if ended:
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
            here = here or Origin(name, call_site())
            origin = here
        since[axis] = origin
    return Type(since, ended)


# -------------------------------------------------------------------------------------------- what is noted on a tensor

NAME = "_meshcomm_type"
"""The attribute with the type of a tensor."""
WRITTEN = "_meshcomm_written"
"""The attribute of a storage with what was written into it: a type, or where something unknown came from."""
_IN_SPITE = "_meshcomm_in_spite"
"""The unknown write into its storage after which the type of a tensor was declared."""


def marked(x: Tensor) -> Type | None:
    """The type noted on this very tensor."""
    found = getattr(x, NAME, None)
    return found if type(found) is Type else None


def behind(x: Tensor) -> Tensor | None:
    """The tensor whose type ``x`` has, if none is noted on it: what torch.func has wrapped, or what a view that was
    made out of sight is of.
    """
    if (inner := unwrapped(x)) is not None:  # of a transform that has ended, too
        return inner
    base = x._base
    return None if base is None or getattr(base, _SPLIT, False) else base


_SPLIT = "_meshcomm_split"
"""Views of this tensor have different types."""


_LIKE = "_meshcomm_like"


def alike(x: Tensor, kind: Type) -> None:
    """Note that ``x`` was made in the image of a value of this type."""
    setattr(x, _LIKE, kind)


def made_like(x: Tensor) -> Type | None:
    """The type of the value in whose image ``x`` was made."""
    found = getattr(x, _LIKE, None)
    return found if type(found) is Type else None


def unmark(x: Tensor) -> None:
    """Forget what is noted on ``x``."""
    setattr(x, NAME, None)


def note(x: Tensor, kind: Type, known: Container[int] = (), of: Iterable[Any] = ()) -> None:
    """Note the type of ``x``, and of what torch.func has wrapped in it: that is what remains of it afterwards.

    known: the ids of tensors whose types are kept elsewhere. of: the tensors that were there before.
    """
    setattr(x, NAME, kind if kind.plain != x.requires_grad else kind.seen(kind.plain))
    try:
        if at := version_of(x):
            setattr(x, NOTED_AT, at)
    except RuntimeError:  # an inference tensor does not count
        pass
    base = x._base
    if base is not None and not (
        getattr(base, NAME, None) is kind and (not kind.axes or getattr(base, HELD, None) is kind)
    ):
        note_base(base, kind, known, of)
    if functorch_active():
        for inner in inside(x):
            setattr(inner, NAME, kind.seen(inner.requires_grad))
            stamp(inner)


def note_base(base: Tensor, kind: Type, known: Container[int], of: Iterable[Any]) -> None:
    """Note that a view of ``base`` has this type."""
    _hold(base, kind)
    found = marked(base)
    if found is None and id(base) not in known:
        # What is seen of a base of others says nothing about the rest of it.
        if not any(x is base or (isinstance(x, Tensor) and x._base is base) for x in of):
            setattr(base, NAME, kind.seen(base.requires_grad))
            stamp(base)
    elif found is None or found.axes != kind.axes:
        setattr(base, _SPLIT, True)


HELD = "_meshcomm_held"
"""The attribute of a tensor with the widest type of a view of it."""


def _hold(base: Tensor, kind: Type) -> None:
    """Keep the widest type of a view of ``base``."""
    if kind.axes:
        before = held(base)
        if before is None or not kind.axes <= before.axes:
            setattr(base, HELD, kind if before is None else Type(kind.since | before.since, grid=kind.grid))


def held(x: Tensor) -> Type | None:
    """The widest type that was noted on a view that has its memory and its graph in common with ``x``, if any varies:
    it stays on that view when the whole is overwritten with what is invariant.
    """
    found = getattr(x if x._base is None else x._base, HELD, None)
    return found if type(found) is Type else None


def declare(x: Tensor, kind: Type) -> None:
    """Note the type of ``x`` as somebody says that it is, whatever it was; that says nothing of other views."""
    setattr(x, _DECLARED, tuple(sorted(kind.axes)))
    note_by_hand(x, kind)


def note_by_hand(x: Tensor, kind: Type) -> None:
    """Note the type of ``x``, which no operation gave it."""
    setattr(x, NAME, kind.seen(x.requires_grad))
    stamp(x)
    by_hand(x)
    in_spite(x)
    lend_foreign(x)
    if x._base is None:
        forget(x)
    else:
        _hold(x._base, kind)


_DECLARED = "_meshcomm_declared"


def declared(x: Tensor) -> tuple[str, ...]:
    """The axes along which somebody has said that ``x`` varies, in a check or outside of one."""
    found = getattr(x, _DECLARED, ())
    return found if type(found) is tuple else ()


writes = Ever()
"""Of what was written and the types of views do not tell."""


def write(x: Tensor, kind: Type) -> None:
    """Note that values of a type were written into ``x``, so that all its views have them."""
    storage = storage_of(x)
    if storage is not None:
        _write(storage, kind)
        for other in with_the_same_memory(storage):
            _write(other, kind)


def written_in(x: Tensor) -> Type | Origin | None:
    """What was written into the storage of ``x``: values of a type, or unknown ones."""
    found: Type | Origin | None = getattr(storage_of(x), WRITTEN, None)
    return found


def nothing_wider_in(x: Tensor, kind: Type, grid: Grid) -> bool:
    """Whether nothing was written into the storage of ``x`` that varies where ``kind`` does not, or is unknown."""
    written = written_in(x)
    return written is None or no_wider(written, kind, grid)


def no_wider(written: Type | Origin, kind: Type, grid: Grid) -> bool:
    """Whether what was written is known, and varies nowhere where ``kind`` does not."""
    return type(written) is Type and written.grid is grid and written.axes <= kind.axes


def says_all(x: Tensor, kind: Type, grid: Grid) -> bool:
    """Whether, once all of ``x`` is of this type, what was written into its storage says no more and no less."""
    before = written_in(x) if writes.any else None
    if before is None:
        return not kind.axes
    return type(before) is Type and before.axes == kind.axes and before.grid is grid and not any_lent()


_APART = "_meshcomm_apart"
"""The attribute of a storage that has leaves beside each other, which share no element."""


def lie_apart(x: Tensor) -> None:
    """Note that leaves in the storage of ``x`` share no element: what is written into one says nothing of others."""
    if (storage := storage_of(x)) is not None:
        setattr(storage, _APART, True)


def lies_apart(x: Tensor) -> bool:
    """Whether that was noted."""
    return getattr(storage_of(x), _APART, False) is True


def is_written(storage: torch.UntypedStorage | None, kind: Type, grid: Grid) -> bool:
    """Whether :func:`write` of that on a mesh would find it noted on a storage already, or there is nothing to note."""
    before = getattr(storage, WRITTEN, None)
    if before is None and getattr(storage, _APART, False) is True:
        return True
    if before is None or any_lent():
        return False
    return type(before) is not Type or (kind.axes <= before.axes and before.grid is grid)


def _write(storage: torch.UntypedStorage, kind: Type) -> None:
    before = getattr(storage, WRITTEN, None)
    if isinstance(before, Origin):
        return
    if before is None or before.grid is not kind.grid or not kind.axes <= before.axes:
        writes.any = True
        written_along(kind.axes, kind.grid)
        not_again(storage)
        if before is not None and before.grid is not kind.grid:  # what it is now can be said on neither
            written_along(kind.axes, None)
            setattr(storage, WRITTEN, next(iter(kind.since.values())))
            return
        setattr(storage, WRITTEN, kind if before is None else Type(kind.since | before.since, grid=kind.grid))


def unseen_write(x: Tensor, origin: Origin) -> None:
    """Note that something of unknown type was written into ``x``: so is the type of all its views now."""
    storage = storage_of(x)
    if storage is not None:
        unknown_in(storage, origin)


def unknown_in(storage: torch.UntypedStorage, origin: Origin) -> None:
    """Note that something of unknown type was written into a storage."""
    writes.any = True
    written_along(frozenset(), None)
    for each in (storage, *with_the_same_memory(storage)):
        setattr(each, WRITTEN, origin)
        not_again(each)


def in_spite(x: Tensor) -> None:
    """The type of ``x`` that is said now holds whatever unknown was written into its storage before."""
    written = written_in(x) if writes.any else None
    if isinstance(written, Origin):
        setattr(x, _IN_SPITE, written)


def forget(x: Tensor) -> None:
    """All of ``x`` is other values now, if it is all of its storage."""
    storage = storage_of(x) if writes.any else None
    if getattr(storage, WRITTEN, None) is not None and x.numel() * x.element_size() == storage.nbytes():  # type: ignore[union-attr]
        setattr(storage, WRITTEN, None)
        not_again(storage)


def also_written(x: Tensor, kind: Type, grid: Grid) -> Type | Origin:
    """The type of ``x``, noted as ``kind``, with what was written into its storage; or where unknown values were."""
    written = written_in(x)
    if written is None or isinstance(written, Origin):
        return kind if written is None or written is getattr(x, _IN_SPITE, None) else written
    if written.grid is not grid:
        there = None if written.grid is None else written.grid.moved(written.axes, grid)
        if there is None:
            return next(iter(written.since.values()))
        written = written.moved(grid, there.axes)
    if written.axes <= kind.axes:
        return kind
    return kind.begins(written.axes - kind.axes, next(iter(written.since.values()))).seen(x.requires_grad)


# ------------------------------------------------------------------------------------- leaves under other names

LEAF = "_meshcomm_leaf"
"""The attribute of a storage with the leaf whose memory it is, weakly."""


shared_leaves = Ever()
"""Of a leaf that has another name."""


def shared(x: Tensor) -> None:
    """Note that the memory of ``x`` can be written under another name: ``x.data``, ``x.detach()``."""
    storage = storage_of(x)
    if storage is not None:
        shared_leaves.any = True
        setattr(storage, LEAF, weakref.ref(x))
        not_again(storage)


def sharing_with(x: Tensor) -> Tensor:
    """The tensor for which that was noted; ``x`` if there is none."""
    found = getattr(storage_of(x), LEAF, None) if shared_leaves.any else None
    other = found() if isinstance(found, weakref.ref) else None
    return other if isinstance(other, Tensor) else x


def swap_notes(run: Callable[[Tensor, Tensor], object], x: Tensor, y: Tensor) -> None:
    """Let ``run`` make of each what the other one is. What is noted on a tensor goes with it, but for its memory's note
    of whose it is.
    """
    owners = [(storage_of(each), other) for each, other in ((x, y), (y, x)) if sharing_with(each) is each]
    noted = [(storage, other) for storage, other in owners if getattr(storage, LEAF, None) is not None]
    for storage, _ in noted:
        setattr(storage, LEAF, None)
    run(x, y)
    for storage, other in noted:
        setattr(storage, LEAF, weakref.ref(other))
        not_again(storage)
