"""Which mesh was the current one when a node of a graph was made: a backward that calls the user's code again (a
checkpoint, a hook, a custom function) finds it, wherever and on whichever thread it runs.

Autograd numbers the nodes that a thread makes. So it is enough to note, whenever a thread comes to another mesh, the
number of its next node. An accelerator's nodes run on a thread of autograd's own, which has no mesh: there the one of
the thread that called the backward pass stands in for it.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from contextvars import ContextVar
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

import torch

from meshcomm._torch import backward_context, backward_pass, current_node, next_sequence_number, sequence_number
from meshcomm.in_thread import in_thread
from meshcomm.runtime.transports.threads.scheduler import current_rank, local

_MOST = 10_000
"""Changes from mesh to mesh that are kept for a thread; the graphs of those before have ended long ago."""


class _Thread:
    """The eras of one thread, which begins to have any: the first node of each, and the mesh."""

    def __init__(self) -> None:
        self.rank, self.ident = local.rank, get_ident()
        self.by_autograd = backward_pass() >= 0
        """Whether it came to its first mesh in a backward pass: as a rule it is a thread of autograd's."""
        self.starts: list[int] = []
        self.things: list[weakref.ref[Any] | None] = []
        _threads[self.ident] = weakref.ref(self)

    def begin(self, thing: object | None) -> None:
        start = next_sequence_number()
        if self.starts and self.starts[-1] == start:  # nothing was made in the last one
            self.starts.pop()
            self.things.pop()
        self.starts.append(start)
        self.things.append(None if thing is None else weakref.ref(thing))
        if len(self.starts) > _MOST:
            del self.starts[: _MOST // 2], self.things[: _MOST // 2]

    def at(self, number: int) -> object | None:
        place = bisect_right(self.starts, number) - 1
        thing = None if place < 0 else self.things[place]
        return None if thing is None else thing()


_threads: dict[int, weakref.ref[_Thread]] = {}
"""By number, which a later thread may have again."""


def _alive() -> list[_Thread]:
    return [each for ref in list(_threads.values()) if (each := ref()) is not None]


class _OfThread(Protocol):
    mesh: Any
    """The current one."""
    within: int
    """The backward pass in which it became the current one, if it did in one; or -1."""
    first: str
    """The key of the first mesh that was current in this thread; or ""."""
    several: bool
    """Whether another one was, too: only then may a graph be of another mesh than the current one."""
    body: Any
    """The mesh of the shard_map whose function runs."""
    eras: _Thread | None
    """When which mesh was the current one; None: none was."""


of_thread: _OfThread = in_thread
_mine: ContextVar[_Thread] = ContextVar("_mine")
"""Of the thread whose context it is: torch takes that along to the threads of autograd."""


def begin(thing: object | None) -> None:
    """From now on this is the mesh of the nodes that this thread makes."""
    eras = of_thread.eras
    if eras is None:
        eras = of_thread.eras = _Thread()
    eras.begin(thing)
    _mine.set(eras)


def of_current_node() -> Any:
    """That of the node which autograd runs on this thread, or of the one that made it; None outside of a backward, or
    if it is not known.
    """
    node = current_node()
    found = None if node is None else _of(node)
    if found is None and node is not None:  # a backward inside of that of a node, as a checkpoint may be
        frame = sys._getframe(1).f_back
        while frame is not None and found is None:
            ctx = frame.f_locals.get("ctx")
            found = _of(ctx) if isinstance(ctx, torch.autograd.function.BackwardCFunction) else None
            frame = frame.f_back
    return found


def of_caller() -> Any:
    """That which is current now in the thread that called the backward pass, if torch says which that is, or only one
    is in a backward pass.
    """
    context = backward_context()
    if context is not None:
        caller = context.get(_mine)
        return None if caller is None else caller.at(sys.maxsize)
    frames = sys._current_frames()
    callers = [each for each in _alive() if each.ident in frames and _is_in_backward(frames[each.ident])]
    return callers[0].at(sys.maxsize) if len(callers) == 1 else None


def _is_in_backward(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__") != torch.autograd.__name__:
        frame = frame.f_back
    return frame is not None


def _of(node: Any) -> object | None:
    number = sequence_number(node)
    if current_rank() is not None:
        return None if of_thread.eras is None else of_thread.eras.at(number)
    # Autograd has threads of its own, and each thread has its own numbers; few graphs are made by the former.
    for by_autograd in (False, True):
        threads = [each for each in _alive() if each.rank is None and each.by_autograd == by_autograd]
        every = [thing for each in threads if (thing := each.at(number)) is not None]
        if every:
            return every[0] if all(thing is every[0] for thing in every) else None
    return None
