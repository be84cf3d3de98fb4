"""Processes that were forked from a rank: they have its objects, but not its threads, nor its place among the ranks."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from meshcomm.errors import fail

F = TypeVar("F", bound=Callable[[], Any])

parent: dict[str, int] = {}
"""Its rank, in a process that was forked from one; empty in all others."""


def in_every_fork(do: F) -> F:
    """Call this in every process that is forked from this one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=do)
    return do


def on_fork(rank_of: Callable[[], int | None], forget: Callable[[], object]) -> None:
    """In every fork: if ``rank_of`` gives what rank its parent was, keep that, and call ``forget``, which gives what is
    to be kept as it is.
    """

    @in_every_fork
    def forked() -> None:
        rank = rank_of()
        if rank is not None:
            parent["rank"] = rank
        _keep_for_ever(forget())


def _keep_for_ever(found: object) -> None:
    """At the end of the interpreter too: what lets go of a process group waits for its threads, which are the
    parent's.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))


def is_fork() -> bool:
    """Whether this process was forked from a rank."""
    return bool(parent)


def refuse(where: str) -> NoReturn:
    """What only the parent may do."""
    fail(
        where,
        f"this process is a fork of rank {parent['rank']}, and no rank itself.",
        got=f"process {os.getpid()}, forked from process {os.getppid()}",
        fix="communicate in the rank alone (not in a worker of a DataLoader, or of multiprocessing's fork); a process"
        " of its own is started with multiprocessing's spawn",
    )


def refuse_if_forked(where: str) -> None:
    """As :func:`refuse`, in a fork."""
    if parent:
        refuse(where)
