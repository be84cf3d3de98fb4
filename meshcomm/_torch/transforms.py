"""The private names of torch behind ``torch.func`` and dispatch modes: a part of :mod:`meshcomm._torch`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshcomm._torch.autograd import functorch_active
from meshcomm._versions import find, lack
from meshcomm.errors import fail

__all__ = [
    "alive",
    "default_device",
    "dispatch_modes",
    "function_modes",
    "lasting",
    "outside_dispatch_modes",
    "outside_transforms",
    "plain_now",
    "unwrap_if_dead",
    "without_modes",
]

T = TypeVar("T")


def _as_it_is(x: Tensor) -> Tensor:
    return x


unwrap_if_dead: Callable[[Tensor], Tensor] = find(
    "torch._C._functorch.unwrap_if_dead", "a tensor that has leaked out of a torch.func transform may fail", _as_it_is
)
"""The tensor in one that a transform has wrapped, if the transform has ended."""

_OUT = "torch._C._DisableFuncTorch"
_SINGLE = "torch._functorch.autograd_function.enable_single_level_autograd_function"
_no_functorch: Any = find(_OUT, "collectives inside of torch.func transforms are refused")
_any_function: Any = find(_SINGLE, "collectives inside of torch.func transforms are refused")
_no_dispatch_modes: Any = find(
    "torch.utils._python_dispatch._disable_current_modes",
    "dispatch modes (selective checkpoints, fake tensors) see what the library does inside",
    contextlib.nullcontext,
)


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """Make plain tensors, whatever transform, tracing or inference mode the caller is in."""
    if _no_functorch is None or _any_function is None:
        if functorch_active():
            fail("torch.func", **lack(f"{_OUT} or {_SINGLE}", "call collectives outside of torch.func transforms, or "))
        with _out_of_inference(), _no_dispatch_modes():
            yield
        return
    with _out_of_inference(), _no_functorch(), _no_dispatch_modes(), _any_function():
        yield


@contextlib.contextmanager
def _out_of_inference() -> Iterator[None]:
    """Torch's own way switches grad mode on, whatever it was."""
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


_plainly = contextlib.nullcontext()
_depth_of_modes: Any = find(
    "torch._C._len_torch_dispatch_stack",
    "collectives of fully_shard and small draws of rng cost more, each call of a process group half a µs",
)
dispatch_modes: Callable[[], int] = _depth_of_modes or (lambda: 1)
"""How many modes see what torch is called for on this thread; one, where it does not tell."""

function_modes: Callable[[], int] = find("torch._C._len_torch_function_stack", "draws of rng cost 3 µs more", lambda: 1)
"""The same of those that see torch's functions, the one of a default device among them."""


_CPU = torch.device("cpu")


def default_device() -> torch.device:
    """torch's, without its looking for it where nobody has set one: that takes some µs."""
    return torch.get_default_device() if function_modes() else _CPU


def plain_now() -> bool:
    """Whether what torch makes is plain tensors: no transform is active, and no dispatch mode."""
    return _depth_of_modes is not None and _depth_of_modes() == 0 and not functorch_active()


def lasting(make: Callable[..., T], *args: Any) -> T:
    """``make(*args)``, plain tensors that outlive whatever their first user is in the middle of."""
    if plain_now() and not (torch.is_inference_mode_enabled() or function_modes()):
        return make(*args)  # to leave nothing takes longer than the rest
    with outside_transforms(), _plainly if _unseen is None else _unseen():
        return make(*args)


def outside_dispatch_modes() -> contextlib.AbstractContextManager[object]:
    """What runs inside is seen by no dispatch mode of the user's: one that counts calls, as that of selective
    checkpoints does, must not count ours. Fake tensors stay fake, what traces goes on tracing, and a mode whose class
    has ``sees_meshcomm`` (it measures) goes on seeing.
    """
    if _depth_of_modes is not None and _depth_of_modes() == 0:
        return _plainly
    return _without_dispatch_modes()


@contextlib.contextmanager
def _without_dispatch_modes() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        kinds = {mode: _kind_of(mode) for mode in stack.enter_context(_no_dispatch_modes()) or ()}
        if set(kinds.values()) <= {"", "FAKE"}:
            for mode, kind in kinds.items():
                if kind or getattr(mode, "sees_meshcomm", False):
                    stack.enter_context(mode)
        else:
            stack.close()
        yield


def _kind_of(mode: object) -> str:
    """Of a mode that is torch's own infrastructure: FAKE, PROXY, FUNCTIONAL; nothing for any other."""
    key = getattr(mode, "_mode_key", None)
    return "" if key is None else str(getattr(key, "name", key))


_UNSEEN = "torch._C.DisableTorchFunction"
_unseen: Any = find(_UNSEEN, "check_vma and rng are refused")


def alive(x: Tensor) -> Tensor:
    """``x``, or the innermost tensor in it that no ended torch.func transform has wrapped."""
    while (inner := unwrap_if_dead(x)) is not x:
        x = inner
    return x


def _refused() -> contextlib.AbstractContextManager[None]:
    fail("check_vma", **lack(_UNSEEN, "shard_map(check_vma=False), or "))


without_modes: Callable[[], contextlib.AbstractContextManager[None]] = _refused if _unseen is None else _unseen
"""What runs inside is seen by no mode and no subclass of tensors."""
