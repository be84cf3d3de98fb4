"""What the checker of varying types makes of writes into leaves: what is replicated and trained stays replicated."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshcomm._torch import functorch_active, without_modes
from meshcomm.errors import names
from meshcomm.runtime.callsite import call_site
from meshcomm.spmd.types.core import Core
from meshcomm.spmd.types.leaf_numbers import is_declared, next_time, numbered
from meshcomm.spmd.types.notes import Ever
from meshcomm.spmd.types.rules.operands import along_of, text_of, version
from meshcomm.spmd.types.vma import Type, join, made_like, marked, shared, sharing_with

__all__ = ["Leaves", "is_gradient", "is_new", "is_trained", "of_leaf"]

_GRADIENT = "_meshcomm_gradient"


_MADE_AT = "_meshcomm_made_at"
"""How often the memory of a parameter had been changed when it was made."""


_gradients = Ever()
"""Of the gradient of a leaf."""


def of_leaf(x: Tensor) -> None:
    """Note that ``x`` is the gradient that a leaf has."""
    _gradients.any = True
    setattr(x, _GRADIENT, True)


def is_gradient(x: Tensor) -> bool:
    """Whether ``x`` was noted as the gradient of a leaf."""
    return _gradients.any and getattr(x, _GRADIENT, False) is True


def is_trained(x: Tensor) -> bool:
    """Whether ``x`` is a leaf that requires grad, or the gradient of one."""
    return (x.requires_grad and x.is_leaf) or is_gradient(x)


def is_new(x: Tensor) -> bool:
    """Whether ``x`` is a leaf that was made here, and that nobody has written into yet."""
    return x.is_leaf and not is_declared(x) and x.grad is None and version(x) == getattr(x, _MADE_AT, 0)


class Leaves(Core):
    """Refuses to write what varies into a leaf that requires grad and is invariant, or into its gradient: the ranks
    would drift apart without a word.
    """

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

    def _counted(self, x: Any) -> Any:
        """``x`` itself, which has just become a leaf if it is one that requires grad: it gets its number."""
        if isinstance(x, Tensor) and x.requires_grad and x.is_leaf and (mine := self.type_of(x)) is not None:
            numbered(x, mine.axes, next_time(f"made at {call_site()}"), declared=False)
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
