"""What the checker of varying types makes of hooks on gradients: they run in backward, which is not looked at else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshcomm._torch import without_modes
from meshcomm.errors import names
from meshcomm.runtime.callsite import call_site
from meshcomm.spmd.types.rules.operands import along_of, text_of
from meshcomm.spmd.types.rules.operations import Operations
from meshcomm.spmd.types.vma import Type

__all__ = ["Hooks"]

_OTHERS = ("meshcomm.", "torch.")


class Hooks(Operations):
    """A gradient has the type of its value, and a hook must leave it so."""

    def _hooked(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of register_hook and the like, with a hook that is looked at while it runs."""
        x, hook = args[0], args[-1]
        mine = self.type_of(x)
        if len(args) != 2 or not callable(hook) or mine is None or not mine.axes < self._all:
            return args
        if str(getattr(hook, "__module__", "")).startswith(_OTHERS):  # it knows what it does
            return args
        after = name == "register_post_accumulate_grad_hook"
        return x, self._watched(hook, self._of_gradient(mine), f"{name} at {call_site()}", after)

    def _watched(self, hook: Callable[[Tensor], Any], kind: Type, where: str, after: bool) -> Callable[[Tensor], Any]:
        @functools.wraps(hook, updated=())
        def watched(x: Tensor) -> Any:
            g = x.grad if after else x
            if g is None:
                return hook(x)
            with self:
                with without_modes():
                    self._note(g, kind)
                result = hook(x)
                with without_modes():
                    for changed in (g, x.grad if after else result):
                        self._left(changed, kind, where)
            return result

        return watched

    def _left(self, g: Any, kind: Type, where: str) -> None:
        """A gradient after a hook."""
        theirs = self.type_of(g) if isinstance(g, Tensor) else None
        if theirs is not None and (extra := theirs.axes - kind.axes):
            self._refuse(
                f"a hook of {where}",
                f"makes the gradient of a value that is invariant along {names(sorted(extra))} vary along it.",
                f"the gradient {text_of(g)}, {along_of(theirs)}",
                "multiply in forward, where a pvary is inserted; or reduce what it is changed by",
            )
