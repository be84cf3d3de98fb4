"""What the thread of a rank finds around it: the modes of who launches, and which core it runs on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import torch

from meshcomm._torch.transforms import default_device
from meshcomm.runtime.process import accelerator

Modes = Callable[[], contextlib.AbstractContextManager[object]]
_NOTHING = contextlib.nullcontext()


def caller_modes() -> Modes:
    """The caller's grad mode, autocast and default device, which torch keeps per thread, for a new thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    device = default_device()
    cache = torch.is_autocast_cache_enabled()
    casts = [(kind, dtype) for kind, dtype, enabled in accelerator.casts(device) if enabled]
    plain = not (inference or casts or device.type != "cpu")

    def modes() -> contextlib.AbstractContextManager[object]:
        # Backward of a device runs on one thread of the process otherwise, where ranks would block each other.
        torch.autograd.set_multithreading_enabled(False)
        if torch.is_grad_enabled() != grad:
            torch.set_grad_enabled(grad)
        if plain:
            return _NOTHING
        stack = contextlib.ExitStack()
        if inference:
            stack.enter_context(torch.inference_mode())
            torch.set_grad_enabled(grad)
        if device.type != "cpu":
            stack.enter_context(device)
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
        return stack

    return modes


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this thread, and those that it starts, on one core where torch computes with one thread: only one of them
    runs at a time, and what one has written another one reads. On two cores all of it takes twice as long.
    """
    if not hasattr(os, "sched_setaffinity") or torch.get_num_threads() != 1:
        yield
        return
    cores = os.sched_getaffinity(0)
    _cores.update(cores)
    try:
        os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
        yield
    finally:
        os.sched_setaffinity(0, cores)


def let_others_finish() -> None:
    """As of a batch, a thread that is woken does not push aside the one that wakes it, which has the interpreter still:
    this one, and those that it starts.
    """
    if hasattr(os, "sched_setscheduler") and torch.get_num_threads() == 1:
        with contextlib.suppress(OSError):  # what the caller has asked for stays
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


_cores: set[int] = set()


def leave_the_core() -> None:
    """A process forked in a rank, such as a worker of a DataLoader, may use all cores again."""
    if _cores:
        os.sched_setaffinity(0, _cores)
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_BATCH:
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
