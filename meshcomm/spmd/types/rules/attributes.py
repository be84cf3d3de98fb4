"""What the checker of varying types makes of properties: ``x.T``, ``x.grad``, ``x.data = ...``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshcomm.runtime.callsite import call_site
from meshcomm.spmd.types.rules.operands import SIMPLE, along_of, text_of, tracked
from meshcomm.spmd.types.rules.torch_rules import Kind
from meshcomm.spmd.types.rules.writes import Writes, of_leaf
from meshcomm.spmd.types.seen_changes import stamp
from meshcomm.spmd.types.vma import Type, lie_apart, lies_apart, made_like, marked, unmark


class Attributes(Writes):
    """Sees what is asked of a tensor and set on it."""

    def _get(self, kind: Kind, func: Any, args: tuple[Any, ...]) -> Any:
        """A property: x.T and the like have the type of x, and so has its gradient."""
        x, result = args[0], func(*args)
        if type(result) in SIMPLE or not isinstance(result, Tensor) or result is x or kind.name == "_base":
            return result
        if kind.name == "data":
            self._shares(x)
        mine = self.type_of(x)
        if kind.name == "grad":
            self._got_gradient(x, mine, result)
        elif mine is not None:
            self._note(result, mine, args)
        return result

    def _got_gradient(self, x: Tensor, mine: Type | None, g: Tensor) -> None:
        seen = marked(g)
        if seen is not None and (mine is None or seen.axes >= mine.axes):
            stamp(g)  # a backward has added to it
        elif mine is not None:
            self._note(g, self._of_gradient(mine), (x,))
            if x.is_leaf:
                of_leaf(g)
                if lies_apart(x):  # as parts of fully sharded parameters do, and their gradients
                    lie_apart(g)

    def _own_leaf(self, x: Tensor, begins: bool) -> None:
        """What was made in the image of something that varies, and becomes a leaf, is each rank's own."""
        if begins and not x.requires_grad and made_like(x) is not None and (mine := self.type_of(x)) is not None:
            self._note(x, self._own(x, mine, "requires_grad_"), (x,))

    def _set(self, kind: Kind, func: Any, args: tuple[Any, ...]) -> Any:
        """A property that is set: gradients keep the type of their leaf, data that of the graph around it."""
        x, value = args[0], args[1] if len(args) > 1 else None
        if kind.name == "requires_grad":
            self._own_leaf(x, bool(value))
        if isinstance(value, Tensor) and kind.name in ("grad", "data"):
            mine, theirs = self.type_of(x), self.type_of(value)
            name = f"x.{kind.name} = ..."
            if theirs is None and mine is not None and x.requires_grad:
                self._unknown(value, [value], name)
            if kind.name == "grad" and mine is not None and theirs is not None and mine.axes != theirs.axes:
                got = f"x {text_of(x)} {along_of(mine)}; the gradient {along_of(theirs)}"
                self._refuse(name, "sets a gradient of another type than x has.", got, "leave gradients alone")
            if kind.name == "data" and mine is not None and theirs is not None:
                self._stays(x, theirs, name)
                if (inside := tracked(x)) and (lacks := theirs.axes - mine.axes):
                    self._out_of_graph(x, mine, lacks, f"{name} at {call_site()}")
                result = func(*args)
                self._note(x, mine if inside else self._as_declared(x, theirs), (x,))
                return result
            if kind.name == "data":
                self._known.pop(id(x), None)
                unmark(x)
        result = func(*args)
        if kind.name == "requires_grad":
            self._counted(x)
        elif kind.name == "grad" and isinstance(value, Tensor):
            self._growing[id(x)] = x, value
        return result
