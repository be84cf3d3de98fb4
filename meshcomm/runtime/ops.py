"""The table of the public functions that have to do with other ranks: one Op each, made in the file of its function.

Everything that is known of such a function by its name stands here and nowhere else. Who asks: the differentiable rules
(what is compared, which arguments are dims), the guard and the checks (whether a refused call is told), traces and
budgets (what operations there are), the checker of varying types (what is taken and given), the texts about lengths.
A function that has not been imported is not known, and need not be: nobody can have called it. Who must know all of
them, because a person has written a name, asks :func:`operations`, which imports what is left.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(eq=False, repr=False, match_args=False)  # what is not made takes no time at import
class Op:
    """One public function; as a decorator it takes the function in, and gives it back as it is."""

    name: str
    """As it stands in errors, behind ``meshcomm.``, and in traces."""
    types: str = ""
    """What it takes and gives, ``V -> I``: how the Type line of its docstring begins, with V and I for varying and
    invariant; nothing where that has none.
    """
    communicates: bool = True
    """Whether ranks wait for each other in it: then a call that is wrong on one of them is told to those who wait."""
    composed: bool = False
    """Made of other functions, by whose names its traffic is called."""
    compared: tuple[str, ...] = ()
    """The arguments that must be equal on all ranks."""
    dims: tuple[str, ...] = ()
    """The arguments that are dims of x."""
    cuts: tuple[str, ...] = ()
    """The arguments that, if they are given, make the size of the result in ``dims`` this rank's own."""
    reduces: bool = False
    """Puts the values of all ranks together by its argument ``op``: what is equal on all counts once per rank."""
    others: bool = False
    """Gives what another rank had, of which this one does not know along which axes it varies."""
    primitive: str = ""
    """The one call of the transport that it makes, if it reads x in that alone."""
    lengths: str = ""
    """What to write where ranks have come with other lengths."""
    fn: Callable[..., Any] | None = None
    """The function itself."""

    def __post_init__(self) -> None:
        before = ops.get(self.name)
        assert before is None or before.was_lost(), self.name
        ops[self.name] = self

    def __call__(self, fn: F) -> F:
        """Decorate the function."""
        self.fn = fn
        return fn

    def was_lost(self) -> bool:
        """Whether the import of its module came to no end, by Ctrl-C: the next one begins anew."""
        fn = self.fn
        module = None if fn is None else sys.modules.get(fn.__module__)
        return fn is None or module is None or vars(module) is not fn.__globals__

    @cached_property
    def takes(self) -> str:
        """V or I, if the types say so."""
        return self.types.split(" -> ")[0]

    @cached_property
    def gives(self) -> str:
        """V or I, if the types say so."""
        return self.types.split(" -> ")[-1]

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What was given behind x and the axis, by name."""
        assert self.fn is not None
        code = self.fn.__code__
        return dict(zip(code.co_varnames[2 : code.co_argcount], args, strict=False)) | kwargs


ops: dict[str, Op] = {}
"""By name; those whose module has been imported."""


def op_named(name: str) -> Op | None:
    """What is known of the function of this name."""
    return ops.get(name)


def talks(name: str) -> bool:
    """Whether ranks wait for each other in the function of this name."""
    op = ops.get(name)
    return op is not None and op.communicates


def is_operation(name: str) -> bool:
    """Whether the events of traces are called so."""
    if name not in ops:
        _look_for(name.split(".", 1)[0])
    return name in ops and ops[name].communicates and not ops[name].composed


def operations() -> list[str]:
    """All names that events of traces have; those of methods and of modules last."""
    for space in _spaces():
        for name in space.__all__:
            getattr(space, name)
    return sorted(filter(is_operation, ops), key=lambda name: ("." in name, name))


def _look_for(name: str) -> None:
    """Bring a public name, and with it the Ops that stand in its module."""
    for space in _spaces():
        getattr(space, name, None)


def _spaces() -> tuple[Any, Any]:
    """Where public names are, each of which is imported when it is asked for."""
    root: Any = sys.modules[__name__.partition(".")[0]]
    return root, root.parallel
