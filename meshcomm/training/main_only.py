"""What one rank does for all: main_only, as a decorator and as a context."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.errors import MeshError, fail
from meshcomm.mesh import Mesh
from meshcomm.objects.objects import packed, unpacked
from meshcomm.objects.parcels import Courier
from meshcomm.objects.pickles import pack
from meshcomm.runtime.ops import Op
from meshcomm.training.process import is_main

P = ParamSpec("P")
R = TypeVar("R")
Shared = TypeVar("Shared", bound=bool)
_WHERE = "main_only"


@overload
def main_only(fn: Callable[P, R], /) -> Callable[P, R | None]: ...
@overload
def main_only(
    fn: None = None, /, *, axis: AxisName | None = None, broadcast: Literal[True], mesh: Mesh | None = None
) -> _MainOnly[Literal[True]]: ...
@overload
def main_only(
    fn: None = None, /, *, axis: AxisName | None = None, broadcast: bool = False, mesh: Mesh | None = None
) -> _MainOnly[bool]: ...
@Op("main_only")
def main_only(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    axis: AxisName | None = None,
    broadcast: bool = False,
    mesh: Mesh | None = None,
) -> Any:
    """Have one rank do it: printing, writing a file, downloading, building a vocabulary.

    As a decorator, ``@main_only`` or ``@main_only(...)``: the function runs on the main rank, and the others get None
    at once; with ``broadcast`` they wait, as long as the mesh's time-out, and get its result. As a context, ``with
    main_only(...) as main:``: the body runs on every rank, ``if main:`` tells which one it is, and with ``broadcast``
    all meet at its end, after which ``main.result`` is what the main rank has assigned to it.

    Args:
        fn: the function, where it is used as a decorator without parentheses.
        axis: None: rank 0 of the world (with ``broadcast``, of the mesh) is the main one. A name or a tuple of names:
            the first along it, so that each group has one.
        broadcast: give the result to the other ranks, by pickle: use it among processes that trust each other.
        mesh: the current mesh by default; not needed without ``axis`` and ``broadcast``.

    Returns: the function, or what serves as a decorator and as a context.

    Cost: nothing; with ``broadcast`` that of :func:`broadcast_object`.

    Raises:
        MeshError: no such axis. With ``broadcast``, on the other ranks: the main one has raised, whose own error stays
            what it is; on all: its result cannot be pickled.

    Example:
        >>> import meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> @mc.main_only(axis="dp", broadcast=True, mesh=mesh)
        ... def vocabulary():
        ...     return sorted("mesh")
        >>> mc.launch(vocabulary, ranks=2)
        [['e', 'h', 'm', 's'], ['e', 'h', 'm', 's']]
        >>> def main():
        ...     with mc.main_only(broadcast=True, mesh=mesh) as main:
        ...         if main:
        ...             main.result = "found"
        ...     return main.result
        >>> mc.launch(main, ranks=2)
        ['found', 'found']

    Source: ``mmengine.dist.master_only``.
    """
    if not isinstance(broadcast, bool):
        fail(_WHERE, f"broadcast={broadcast!r} is not a bool.", fix="True or False")
    if fn is None:
        return _MainOnly[bool](axis, broadcast, mesh)
    if not callable(fn):
        fail(
            _WHERE, f"fn is not callable but {type(fn).__name__}.", fix="options are given by name: main_only(axis=...)"
        )
    return _MainOnly[bool](axis, broadcast, mesh)(fn)


class _MainOnly(Generic[Shared]):
    """Options of :func:`main_only`, which serve any number of functions and ``with`` statements."""

    def __init__(self, axis: AxisName | None, broadcast: bool, mesh: Mesh | None) -> None:
        self._axis, self._broadcast, self._mesh = axis, broadcast, mesh
        self._local = threading.local()  # ranks of one process may share it

    def _main(self) -> Main:
        if not self._broadcast:
            return Main(is_main(self._axis, mesh=self._mesh), None)
        mesh = check.mesh_of(_WHERE, self._axis or "", self._mesh)
        axis = check.axis_of(_WHERE, mesh.axis_names if self._axis is None else self._axis, mesh)
        return Main(axis.is_at(0), axis)

    @overload
    def __call__(self: _MainOnly[Literal[True]], fn: Callable[P, R]) -> Callable[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R]) -> Callable[P, R | None]: ...
    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def on_the_main_rank(*args: Any, **kwargs: Any) -> Any:
            main = self._main()
            error = None
            if main:
                try:
                    main.result = fn(*args, **kwargs)
                except Exception as raised:
                    error = raised
            main.share(error)
            return main.result

        return on_the_main_rank

    def __enter__(self) -> Main:
        entered = vars(self._local).setdefault("entered", [])
        entered.append(self._main())
        return entered[-1]  # type: ignore[no-any-return]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        main = self._local.entered.pop()
        if isinstance(error, Exception) or error is None:
            main.share(error)


class Main:
    """In ``with main_only() as main:``: true on the main rank; ``result`` is what it shares."""

    def __init__(self, mine: bool, axis: Axis | None) -> None:
        self._mine = mine
        self._axis = axis
        self.result: Any = None

    def __bool__(self) -> bool:
        return self._mine

    def share(self, error: Exception | None) -> None:
        """Raise the error of this rank; else give the main rank's result to all, or raise what one of them raised."""
        if self._axis is None:
            if error is not None:
                raise error
            return
        courier = Courier(_WHERE, self._axis)
        data, problem = None, None
        if error is not None:
            problem = f"raised {type(error).__name__}: {error}".strip()
        elif self._mine:
            data, problem = packed(lambda: pack(self.result, "result"))
        try:
            got = courier.broadcast(data, 0, problem)
        except MeshError:
            if error is not None:
                raise error from None
            raise
        self.result = unpacked(courier, [got])[0]
