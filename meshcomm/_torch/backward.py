"""The private names of torch behind backward passes: which one runs, in which order, and who watches it. A part of
:mod:`meshcomm._torch`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from types import FrameType
from typing import Any

import torch
from torch.autograd import Function

from meshcomm._versions import find, has

__all__ = [
    "after_backward",
    "backward_context",
    "backward_pass",
    "current_node",
    "has_sequence_numbers",
    "next_sequence_number",
    "sequence_number",
    "set_sequence_number",
    "watch_backward",
    "watch_checkpoints",
]


_IN_TLS = "torch._C._is_key_in_tls"
_is_in_tls: Any = find(
    _IN_TLS, "a checkpoint on an accelerator may not find its mesh where several threads have meshes"
)


def backward_context() -> Context | None:
    """The context variables of the thread that called the backward pass, on a thread of autograd's too; None outside of
    one, or where torch does not keep them.
    """
    if _is_in_tls is None or not _is_in_tls("context"):
        return None
    found = torch._C._get_obj_in_tls("context")
    return found if isinstance(found, Context) else None


_current_pass: Any = find(
    "torch._C._current_graph_task_id", "some µs of each collective in backward; on CUDA one backward inside of another"
)
_STARTS = {torch.autograd.backward.__code__, torch.autograd.grad.__code__}


def _pass_on_the_stack() -> int:
    """The backward pass that this thread is in, as far as its stack tells: autograd runs nodes of the CPU on the thread
    that has called it, and those of a device on a thread of its own.
    """
    frame: FrameType | None = sys._getframe(1)
    last = frame
    while frame is not None:
        if frame.f_code in _STARTS:
            return id(frame)
        last, frame = frame, frame.f_back
    assert last is not None
    return 0 if last.f_globals.get("__name__") == Function.__module__ else -1


backward_pass: Callable[[], int] = _pass_on_the_stack if _current_pass is None else _current_pass
"""Which backward pass of autograd is running on this thread: one inside of another has a number of its own; or -1."""

_can_order = has(
    "torch.autograd.function.BackwardCFunction._set_sequence_nr", "sums of gradients do not overlap with backward"
)

_ERAS = "what a backward calls again does not find the mesh that its forward had: pass mesh="
_current_node: Any = find("torch._C._current_autograd_node", _ERAS)
_tells_number = has("torch.autograd.function.BackwardCFunction._sequence_nr", _ERAS)
_next_number: Any = find("torch._C._autograd._get_sequence_nr", _ERAS)


def current_node() -> Any:
    """The node that autograd runs on this thread; None outside of a backward, or where torch does not tell."""
    return None if _current_node is None else _current_node()


def next_sequence_number() -> int:
    """The number that autograd will give to the next node that this thread makes."""
    return 0 if _next_number is None else int(_next_number())


def sequence_number(node: Any) -> int:
    """The number of a node; -1 where torch does not tell."""
    return int(node._sequence_nr()) if _tells_number and hasattr(node, "_sequence_nr") else -1


def has_sequence_numbers() -> bool:
    """Whether the order in which autograd runs ready nodes can be set."""
    return _can_order


def set_sequence_number(node: Any, number: int) -> None:
    """Have autograd run ``node``, when ready, before nodes with lower numbers; without that call nothing changes."""
    if has_sequence_numbers():
        node._set_sequence_nr(number)


_after_backward: Any = find(
    "torch.autograd.Variable._execution_engine.queue_callback", "offloaded shards are copied while the host waits"
)


def after_backward(fn: Callable[[], object]) -> bool:
    """Have ``fn`` called when the backward pass that runs on this thread has ended; False where torch cannot."""
    if _after_backward is None:
        return False
    _after_backward(fn)
    return True


_engine: Any = find(
    "torch.autograd._engine_run_backward", "a leaf that two ranks of one process train is not refused, but shared"
)


def watch_checkpoints(look: Callable[[], object]) -> None:
    """From now on ``look`` is called where a reentrant checkpoint begins: torch's, those of others that have its name,
    and reversible layers, which do the same; of those that are there already. Again, for those that have come since.
    """
    if look not in _checkpoint_lookers:
        _checkpoint_lookers.append(look)
    kinds: list[Any] = list(torch.autograd.Function.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind.__name__ in ("CheckpointFunction", "_ReversibleFunction") and kind not in _watched_checkpoints:
            _watched_checkpoints.add(kind)
            kind.forward = staticmethod(_looked_at(kind.forward))


def _looked_at(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        for look in _checkpoint_lookers:
            look()
        return own(*args, **kwargs)

    return forward


_checkpoint_lookers: list[Callable[[], object]] = []
_watched_checkpoints: weakref.WeakSet[Any] = weakref.WeakSet()


@contextlib.contextmanager
def watch_backward(watch: Callable[[Sequence[Any], Sequence[Any], bool], object]) -> Iterator[None]:
    """While this is open, call ``watch(roots, inputs, whether leaves accumulate)`` before each pass of autograd;
    without the function that starts them, nothing is called.
    """
    if _engine is None:
        yield
        return
    start: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # which somebody else may watch

    def watched(roots: Any, *args: Any, **kwargs: Any) -> Any:
        watch(roots, args[3] if len(args) > 3 else (), kwargs.get("accumulate_grad", False))
        return start(roots, *args, **kwargs)

    engine: Any = torch.autograd
    engine._engine_run_backward = watched
    try:
        yield
    finally:
        engine._engine_run_backward = start
