"""What the checker of varying types makes of writes in place: all that shares the memory varies from then on, and what
is replicated and trained stays replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshcomm._torch import functorch_active, version_of, without_modes
from meshcomm.axis import Axis
from meshcomm.collectives.rule import apply, rule_named
from meshcomm.errors import names
from meshcomm.runtime.callsite import call_site
from meshcomm.spmd.types.core import Core
from meshcomm.spmd.types.leaf_numbers import is_declared, next_time, numbered
from meshcomm.spmd.types.notes import Ever
from meshcomm.spmd.types.rules.operands import along_of, differentiated, text_of, tracked, version, versions_of
from meshcomm.spmd.types.seen_changes import NOTED_AT, SEEN, saw, storage_of
from meshcomm.spmd.types.vma import (
    NAME,
    Origin,
    Type,
    forget,
    held,
    is_written,
    join,
    made_like,
    marked,
    says_all,
    shared,
    sharing_with,
    unseen_write,
    write,
)

_GRADIENT = "_meshcomm_gradient"


_MADE_AT = "_meshcomm_made_at"
"""How often the memory of a parameter had been changed when it was made."""


gradients = Ever()
"""Of the gradient of a leaf."""


def of_leaf(x: Tensor) -> None:
    """Note that ``x`` is the gradient that a leaf has."""
    gradients.any = True
    setattr(x, _GRADIENT, True)


def is_gradient(x: Tensor) -> bool:
    """Whether ``x`` was noted as the gradient of a leaf."""
    return gradients.any and getattr(x, _GRADIENT, False) is True


def is_trained(x: Tensor) -> bool:
    """Whether ``x`` is a leaf that requires grad, or the gradient of one."""
    return (x.requires_grad and x.is_leaf) or is_gradient(x)


def is_new(x: Tensor) -> bool:
    """Whether ``x`` is a leaf that was made here, and that nobody has written into yet."""
    return x.is_leaf and not is_declared(x) and x.grad is None and version(x) == getattr(x, _MADE_AT, 0)


class Writes(Core):
    """Follows what is written. What varies is refused in a leaf that requires grad and is invariant, and in its
    gradient: the ranks would drift apart without a word.
    """

    def _join_here(self, types: tuple[Type, ...], name: str) -> Type:
        """The type of what is made of operands of these types by the user's instruction that has led here."""
        raise NotImplementedError

    def _stays(self, x: Tensor, kind: Type, name: str) -> None:
        """Before, or after, something of this type was written into ``x``."""
        if not kind.axes or functorch_active():
            return
        owner = x if x._base is None else x._base
        if not is_trained(owner):
            owner = sharing_with(x)
            if owner is x or not is_trained(owner):
                return
        mine = self.type_of(owner)
        if mine is not None and (lacks := kind.axes - mine.axes):
            self._drifts(owner, mine, kind, lacks, name)

    def _of_gradient(self, kind: Type) -> Type:
        """The type of the gradient of a value: what is invariant has been summed by the backward of pvary."""
        axes = self._all - kind.axes
        return self._here("backward", kind, lambda origin: kind.ends(axes, origin)) if axes else kind

    def _counted(self, x: Any) -> Any:
        """``x`` itself, which has just become a leaf if it is one that requires grad: it gets its number."""
        if isinstance(x, Tensor) and x.requires_grad and x.is_leaf and (mine := self.type_of(x)) is not None:
            numbered(x, mine.axes, next_time(f"made at {call_site()}"), declared=False)
            if (noted := marked(x)) is not None and not functorch_active():
                setattr(x, NAME, noted.seen(True))
        return x

    def parameter(self, made: Tensor, data: Tensor) -> None:
        """``made`` is a parameter with the values of ``data``, and its memory."""
        if made is data:
            return
        with without_modes():
            kind = self.type_of(data)
            if kind is None:
                return
            self._shares(data)
            self._note(made, self._own(data, kind, "Parameter") if made.requires_grad else kind)
            setattr(made, _MADE_AT, version(made))
            self._counted(made)

    def _own(self, x: Tensor, kind: Type, name: str) -> Type:
        """The type of a leaf with the values of ``x``, of this type: what was made in the image of something that
        varies is each rank's own.
        """
        like = made_like(x)
        return kind if like is None or like.grid is not self.grid else join([like, kind], name)

    def _shares(self, x: Tensor) -> None:
        """What has the memory of ``x`` and is no view of it has been made."""
        if is_trained(x):
            shared(x)

    def _as_declared(self, x: Tensor, kind: Type) -> Type:
        """The type of ``x`` when all of it is overwritten with what has this one. A leaf that is a rank's own part
        stays so where all parts begin alike, and a gradient has the type of its leaf; what a collective has made equal
        is equal.
        """
        old = marked(x) if is_trained(x) else None
        if old is None or old.axes <= kind.axes or not (old.leaf or is_gradient(x)):
            return kind
        if kind.ended.keys() >= old.axes - kind.axes:
            return kind
        return old if kind.axes <= old.axes else join([old, kind], "a write in place")

    def _drifts(self, x: Tensor, mine: Type, kind: Type, lacks: frozenset[str], name: str) -> None:
        leaf = "the gradient of a leaf that is" if is_gradient(x) else "a leaf that requires grad and is"
        along = names(sorted(lacks))
        fix = f"reduce it over {along} first; norms and scales of gradients, too (mc.parallel.clip_grad_norm)"
        self._refuse(
            name,
            f"writes what varies along {along} into {leaf} invariant: from then on the ranks would differ.",
            f"{text_of(x)}, {along_of(mine)}; what is written {along_of(kind)}",
            f"{fix}; mc.mark_varying(x, {self._names(kind.axes)!r}) before, if each rank shall have its own",
        )

    # ------------------------------------------------------------------------------------------------- what was written

    def _changed(
        self, operands: Sequence[Tensor], versions: Sequence[int], whole: Type, name: str, evened: bool = False
    ) -> None:
        """Which of the operands an operation has written into shows in their versions."""
        now = self._saw(operands, versions)
        for x, before, after in zip(operands, versions, now, strict=True):
            if before != after:
                mine = self.type_of(x)
                lacks = whole.axes - mine.axes if mine is not None else frozenset()
                if lacks and x.requires_grad and (evened or (tracked(x) and not torch.is_grad_enabled())):
                    assert mine is not None
                    self._out_of_graph(x, mine, lacks, f"{name} at {call_site()}")
                self._written(x, whole, name)

    @staticmethod
    def _saw(operands: Sequence[Tensor], versions: Sequence[int]) -> list[int]:
        """Note that what has changed since was seen; the versions now."""
        now = versions_of(operands)
        if now != versions:
            for x, before, after in zip(operands, versions, now, strict=True):
                if before != after:
                    saw(x, before, after)
        return now

    def _written(self, x: Tensor, kind: Type, name: str = "") -> None:
        """Values of a type were written into ``x``; ``name``: by what, if nobody has looked before whether they may."""
        if name:
            self._stays(x, kind, name)
        old = self.type_of(x)
        if old is not None and (
            old is not kind or old is not marked(x) or old.plain == x.requires_grad or functorch_active()
        ):
            kind = self._join_here((kind, old), "a write in place")
            self._note(x, kind, (x,))
        if x._base is not None and (base := self.type_of(x._base)) is not None:
            self._note(x._base, self._join_here((base, kind), "a write in place"))
        self._spread(x, kind)

    def _again(self, x: Tensor, before: int, kind: Type) -> None:
        """``x``, which is no view, has been changed in place by what has its own type."""
        storage, after = storage_of(x), version_of(x)
        seen = getattr(storage, SEEN, None)
        if seen is not None and seen[-1][1] == before:  # as saw does it, for what is asked most often
            seen[-1][1] = after
            setattr(x, NOTED_AT, after)
        else:
            saw(x, before, after)
        if kind.axes and not is_written(storage, kind, self.grid):
            self._spread(x, kind)

    def _spread(self, x: Tensor, kind: Type) -> None:
        """All that shares the memory of ``x`` varies, too."""
        if kind.axes and not is_written(storage_of(x), kind, self.grid):
            write(x, self._begun_here("a write in place", kind.axes))

    def _overwritten(self, x: Tensor, kind: Type) -> None:
        """All values of ``x`` are now of a type, whatever they were."""
        if x._base is not None:
            self._written(x, kind)
            if self.type_of(x) is None:
                self._note(x, kind, (x,))
            return
        kind = self._as_declared(x, kind)
        self._note(x, kind)
        if not says_all(x, kind, self.grid):
            forget(x)
            self._spread(x, kind)

    def _kept(self, target: Tensor, operands: Sequence[Tensor]) -> list[Type]:
        """The types that the base or other views of a target have, whatever is written: through all of them the graph
        of what is written is reached.
        """
        if not torch.is_grad_enabled():
            return []
        for x in operands:
            if x is not target and differentiated(x):
                break
        else:
            return []
        base = target._base
        found = [held(target), None if base is None else self.type_of(base)]
        return [kind for kind in found if kind is not None and kind.axes and kind.grid is self.grid]

    def _make_room(self, target: Tensor, whole: Type, name: str, operands: Sequence[Tensor]) -> Tensor | None:
        """Before something that varies is written into what requires grad and is invariant: pvary of that, in place.
        What was varied, and all views of it with that; None if nothing was.
        """
        owner = target if target._base is None else target._base
        mine = self.type_of(owner) or self.type_of(target)
        if mine is None or not tracked(owner):
            return None
        missing = whole.axes - mine.axes
        if not missing:
            return None
        if functorch_active():
            self._refuse(
                name,
                f"writes what varies along {names(sorted(missing))} into a value that is invariant, under a transform "
                "of torch.func: no pvary can be inserted there.",
                f"{text_of(target)}, {along_of(mine)}",
                f"write it out of place, or mc.pvary(x, {self._names(missing)!r}) before",
            )
        if not self.insert:
            self._due(target, missing, name, operands, [])
        versions = versions_of([owner])
        with self._apart(), torch.enable_grad():
            _VaryInPlace.apply(owner, self._axis(missing))  # type: ignore[no-untyped-call]
        self._saw([owner], versions)
        self._note(owner, mine.begins(missing, Origin(name, call_site())))
        return owner

    def _unknown_in_changed(self, operands: Sequence[Tensor], versions: Sequence[int], name: str) -> None:
        """Something unknown was written into those that have changed since."""
        for x, before, after in zip(operands, versions, self._saw(operands, versions), strict=True):
            if before != after:
                self._unknown_in(x, operands, name)

    def _unknown_in(self, x: Tensor, operands: Sequence[Tensor], name: str) -> None:
        """Something unknown was written into ``x``, which must not be taken for what it was."""
        if x.requires_grad and self.type_of(x) is not None:
            self._unknown(next(y for y in operands if self.type_of(y) is None), operands, name)
        unseen_write(x, Origin(name, call_site()))


class _VaryInPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return apply(rule_named("all_reduce"), g, ctx.axis, ("sum",)), None
