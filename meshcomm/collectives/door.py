"""The door of all collectives: what a type checker knows of how they may be called, and who stands between the call
and the function: who watches this thread, and the call's own time-out.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

from typing_extensions import Required, TypedDict

from meshcomm.mesh import Mesh
from meshcomm.watch import here
from meshcomm.work import limited

__all__ = ["Later", "LaterOfLocal", "LaterOfTree", "Now", "NowOfLocal", "NowOfTree", "aside"]


class Now(TypedDict, total=False):
    """The keywords of a call that gives its result."""

    mesh: Mesh | None
    async_op: Literal[False]
    timeout: float | timedelta | None


class Later(TypedDict, total=False):
    """The keywords of a call that gives a Work of it."""

    mesh: Mesh | None
    async_op: Required[Literal[True]]
    timeout: None


class NowOfTree(Now, total=False):
    """The same where x may be a pytree."""

    bucket_mb: float


class LaterOfTree(Later, total=False):
    """The same where x may be a pytree."""

    bucket_mb: float


class NowOfLocal(TypedDict, total=False):
    """The same where nothing is sent, for which nobody waits."""

    mesh: Mesh | None
    async_op: Literal[False]
    bucket_mb: float


class LaterOfLocal(TypedDict, total=False):
    """The same where nothing is sent, for which nobody waits."""

    mesh: Mesh | None
    async_op: Required[Literal[True]]
    bucket_mb: float


def aside(fn: Callable[..., Any], x: Any, axis: Any, /, *args: Any, timeout: Any, async_op: bool, **how: Any) -> Any:
    """A call of ``fn``, a public collective, that is watched or has a time-out: by who watches, or begun, waited for so
    long, and given up then. Each of the two calls ``fn`` again without itself.
    """
    if here.watcher is not None:
        return here.watcher.collective(fn, x, axis, *args, timeout=timeout, async_op=async_op, **how)
    return limited(fn, timeout, async_op, x, axis, *args, **how)
