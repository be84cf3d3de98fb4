"""The private names of torch, and of Python, behind what is kept for each thread: a part of :mod:`meshcomm._torch`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from meshcomm._versions import find

__all__ = ["hide_thread", "show_thread", "state_of_thread"]

_COSTS = "each shard_map and launch of ranks in one process starts new threads, which takes 1.5 times as long"
_function_modes: Any = find("torch._C._len_torch_function_stack", _COSTS)
_dispatch_modes: Any = find("torch._C._len_torch_dispatch_stack", _COSTS)
_functions: Any = find("torch._C._is_torch_function_enabled", _COSTS)
_included: Any = find("torch._C._dispatch_tls_local_include_set", _COSTS)
_excluded: Any = find("torch._C._dispatch_tls_local_exclude_set", _COSTS)
_tangents: Any = find("torch._C._is_fwd_grad_enabled", _COSTS)
_saves: Any = find("torch._C._autograd._top_saved_tensors_default_hooks", _COSTS)
_may_save: Any = find("torch._C._autograd._saved_tensors_hooks_is_enabled", _COSTS)
_profiled: Any = find("torch.autograd._profiler_enabled", _COSTS)
_frames: Any = find("torch._C._dynamo.eval_frame.get_eval_frame_callback", _COSTS)
_ASKED: tuple[Callable[..., Any], ...] = (
    _function_modes, _dispatch_modes, _functions, _included, _excluded, _tangents, _saves, _may_save, _profiled,
    _frames,
)  # fmt: skip
_LISTED, _LOCK = "_active", "_active_limbo_lock"
_ALL = all(each is not None for each in _ASKED) and hasattr(threading, _LISTED) and hasattr(threading, _LOCK)


def state_of_thread() -> tuple[Any, ...] | None:
    """What torch keeps for this thread, but for the grad mode, whether backward takes several threads, and the number
    of the next node; None where it does not tell all of it.

    Modes and transforms that are open, autocast, inference mode, hooks on what is saved, profilers, what the compiler
    does with frames, and with how many threads it computes.
    """
    if not _ALL:
        return None
    return (
        _function_modes(),
        _dispatch_modes(),
        _functions(),
        _included().raw_repr(),
        _excluded().raw_repr(),
        _tangents(),
        _saves(False),
        _may_save(),
        _profiled(),
        _frames(),
        torch.is_autocast_cache_enabled(),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
    )


def hide_thread(thread: threading.Thread) -> None:
    """``threading.enumerate`` has it no more, until it is shown; only where :func:`state_of_thread` tells."""
    with getattr(threading, _LOCK):
        del getattr(threading, _LISTED)[thread.ident]


def show_thread(thread: threading.Thread) -> None:
    """It is there again."""
    with getattr(threading, _LOCK):
        getattr(threading, _LISTED)[thread.ident] = thread
