"""Who watches this thread's calls: the checker of varying types, while it is on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, Protocol, TypeVar

from torch import Tensor

from meshcomm.in_thread import in_thread

Given = ParamSpec("Given")
R = TypeVar("R")


class Watcher(Protocol):
    """Knows along which axes each value varies."""

    def called(self, fn: Any, args: tuple[Any, ...], /) -> Any:
        """Call ``fn``, a public collective, of which these are all arguments in order: check what it takes, and note
        what it gives.
        """

    def collective(self, fn: Any, x: Any, axis: Any, /, *args: Any, mesh: Any, **kwargs: Any) -> Any:
        """The same for what takes a tensor or a pytree, with the arguments as a user gives them."""

    def made(self, fn: Any, axis: Any, mesh: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call ``fn(*args, **kwargs)``, which takes no tensor and gives one that varies along ``axis``."""

    def tied(self, fn: Any, x: Any, others: Any, /) -> Any:
        """Call ``fn(x, *others)``, whose result has the types of ``x``."""

    def joined(self, name: str, fn: Any, operands: Any, axis: Any, mesh: Any, /) -> Any:
        """Call ``fn(*operands)``, whose results vary along ``axis`` and along the axes of all operands."""

    def laid_out(self, fn: Any, layouts: str, /, *operands: Tensor, mesh: Any, **kwargs: Any) -> Any:
        """Call ``fn``, whose types stand in a string."""

    def host_value(self, what: str) -> None:
        """Refuse a Python number that differs between ranks."""

    def numbers(self, x: Tensor, values: list[int], where: str) -> list[Any]:
        """The entries of ``x``, which are these, as sizes that know along which axes they vary."""

    def drawn(self, x: Tensor) -> None:
        """Note that ``x`` was drawn at random, differently along ``here.draws_along``."""

    def whole(self, where: str, x: Any, label: str, mesh: Any) -> None:
        """Refuse a tensor that varies at all, on ``mesh``."""

    def made_whole(self, x: Tensor, what: str, mesh: Any) -> None:
        """Note that ``x`` is invariant along all axes of ``mesh``."""

    def gathered(self, name: str, whole: Sequence[Tensor], of: Sequence[Tensor], axes: Any, mesh: Any) -> None:
        """Note that ``whole`` were gathered of these leaves, and that their gradients are summed over ``axes``."""


class _Here(Protocol):
    watcher: Watcher | None
    draws_along: frozenset[str] | None
    """The axes along which random functions draw differently; None: all."""
    draws_over: Any
    """The mesh whose axes these are; None: the one that is checked."""


here: _Here = in_thread


def by_name(fn: Any, args: Sequence[Any], after: int = 0) -> dict[str, Any]:
    """All arguments of a function, which are given in order, by name; those after the first so many."""
    return dict(zip(fn.__code__.co_varnames[after:], args[after:], strict=False))


def told_of_call(watcher: Any, fn: Any, args: Sequence[Any]) -> Any:
    """Let one who watches call a public collective, of which these are all arguments in order."""
    given = by_name(fn, args)
    if "x" not in given:
        return watcher.made(fn, given["axis"], given["mesh"], **given)
    return watcher.collective(fn, given.pop("x"), given.pop("axis"), **given)


def paused() -> AbstractContextManager[None]:
    """What runs inside is the library's own: who watches this thread, if anybody, does not look at it."""
    return nullcontext() if here.watcher is None else watched_by(None)


def out_of_sight(fn: Callable[Given, R]) -> Callable[Given, R]:
    """Decorate what is the library's own as a whole: who watches this thread does not look at what it does."""

    @functools.wraps(fn)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> R:
        with paused():
            return fn(*args, **kwargs)

    return run


@contextmanager
def watched_by(watcher: Watcher | None) -> Iterator[None]:
    """What runs inside is looked at by this one, or by nobody."""
    outer, here.watcher = here.watcher, watcher
    try:
        yield
    finally:
        here.watcher = outer


class drawing:  # noqa: N801  # as a function is called
    """Inside, random functions draw differently along these axes of a mesh, and alike along all others."""

    def __init__(self, along: frozenset[str], over: Any) -> None:
        self._inside = along, over

    def __enter__(self) -> None:
        self._outer = here.draws_along, here.draws_over
        here.draws_along, here.draws_over = self._inside

    def __exit__(self, *exc: object) -> None:
        here.draws_along, here.draws_over = self._outer
