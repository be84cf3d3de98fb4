"""The private names of torch behind forward mode: its levels, and tangents: a part of :mod:`meshcomm._torch`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from meshcomm._torch.autograd import functorch_active
from meshcomm._versions import find, has, lack
from meshcomm.errors import fail

__all__ = [
    "carries_tangents",
    "carry_tangents",
    "dual_level_open",
    "forward_ad_shared",
    "forward_ad_state",
    "forward_mode_on",
    "has_tangent",
    "primal_of",
    "set_forward_ad_state",
]


def _one() -> Tensor:
    return torch.ones((), device="cpu")


_LEVEL = "torch.autograd.forward_ad._current_level"
_NESTING = "torch._functorch.eager_transforms.JVP_NESTING"
_LEVELS = "forward mode (jvp, dual tensors) is refused on ranks of one process"

_shares_levels = has(_NESTING, _LEVELS)

if has(_LEVEL, f"{_LEVELS}, and every collective takes some µs longer"):

    def dual_level_open() -> bool:
        """Whether a forward-mode level is open: a dual tensor needs no grad, and would lose its tangent."""
        return forward_ad._current_level >= 0
else:

    def dual_level_open() -> bool:
        """Whether a forward-mode level is open."""
        one = _one()
        return forward_ad.unpack_dual(one).primal is not one  # where none is, nothing is unpacked

    _shares_levels = False

eager_transforms: Any = torch._functorch.eager_transforms if _shares_levels else None


def forward_ad_state() -> tuple[int, int]:
    """The forward-mode bookkeeping that torch keeps per process and not per thread."""
    return (forward_ad._current_level, eager_transforms.JVP_NESTING) if _shares_levels else (-1, 0)


def set_forward_ad_state(state: tuple[int, int]) -> tuple[int, int]:
    """Put back what :func:`forward_ad_state` gave, and give what it would give now."""
    if not _shares_levels:
        return state
    before = forward_ad._current_level, eager_transforms.JVP_NESTING
    if before != state:
        forward_ad._current_level, eager_transforms.JVP_NESTING = state
    return before


@contextlib.contextmanager
def forward_ad_shared() -> Iterator[None]:
    """Let several threads, of which one runs at a time, each hold forward-mode level 0 open.

    The level itself is one per process, and closing it wipes every tangent in it. So the first thread to enter opens
    it and the last one to leave closes it; what a thread sees as its current level is exchanged by
    :func:`set_forward_ad_state`.
    """
    if not _shares_levels:
        with _no_levels():
            yield
        return
    enter: Any
    leave: Any
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    holders = 0

    def enter_shared() -> int:
        nonlocal holders
        if forward_ad._current_level >= 0:
            return int(enter())  # nested in this thread: torch's own error
        holders += 1
        if holders == 1:
            return int(enter())
        forward_ad._current_level = 0
        return 0

    def leave_shared(*, level: int | None = None) -> None:
        nonlocal holders
        if holders > 1 and forward_ad._current_level == 0 and level in (None, 0):
            forward_ad._current_level = -1
        else:
            leave(level=level)
        holders -= 1

    before = forward_ad_state()
    forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter_shared, leave_shared
    try:
        yield
    finally:
        forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter, leave
        set_forward_ad_state(before)


@contextlib.contextmanager
def _no_levels() -> Iterator[None]:
    """Threads cannot share a level, so none of them opens one."""

    def refused(*_: Any, **__: Any) -> NoReturn:
        fail("launch", **lack(f"{_LEVEL} or {_NESTING}", 'runtime="processes", or '))

    enter: Any = forward_ad.enter_dual_level
    forward_ad.enter_dual_level = refused
    try:
        yield
    finally:
        forward_ad.enter_dual_level = enter


_CARRIES = "ranks of one process of which some are in forward mode may meet an error of torch's"
carries_tangents: Callable[[], bool] = find("torch._C._is_fwd_grad_enabled", _CARRIES, lambda: False)
"""Whether operations of this thread carry tangents."""
carry_tangents: Callable[[bool], object] = find("torch._C._set_fwd_grad_enabled", _CARRIES, lambda on: None)
"""Have them do so, or not."""

_TANGENTS = "torch.autograd.forward_ad._set_fwd_grad_enabled"
_set_tangents: Any = find(_TANGENTS, "jvp of collectives that depend on the value (max, product, ...) is refused")


def forward_mode_on() -> contextlib.AbstractContextManager[None]:
    """Let operations carry tangents, in the ``jvp`` of a Function too."""
    if _set_tangents is None:
        fail("jvp", **lack(_TANGENTS, "backward mode (torch.func.vjp), or "))
    return _set_tangents(True)  # type: ignore[no-any-return]


def primal_of(x: Tensor) -> Tensor:
    """``x`` without its tangent of the innermost level; those of outer levels stay."""
    primal: Tensor = forward_ad.unpack_dual(x, level=0).primal
    return primal


def has_tangent(x: Tensor) -> bool:
    """Whether ``x`` has one, of this level or of any around it: the transforms of outer levels hide theirs from
    :func:`torch.autograd.forward_ad.unpack_dual`, and call the ``jvp`` of a Function all the same.
    """
    if not functorch_active():
        return dual_level_open() and forward_ad.unpack_dual(x, level=0).tangent is not None
    if not (x.is_floating_point() or x.is_complex()):
        return False
    heard: list[bool] = []
    _listen(x, heard.append)  # not the list, which torch would copy
    return bool(heard)


class _Listening(Function):
    """Hears of tangents."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, hear: Callable[[bool], None]) -> Tensor:
        return x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.hear = inputs[1]

    @staticmethod
    def jvp(ctx: Any, t: Tensor | None, _: object) -> Tensor | None:
        if t is None:
            return None
        ctx.hear(True)
        return t.new_empty(0)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, hear: Callable[[bool], None]) -> tuple[Any, None]:
        return _listen(x, hear), None


_listen: Any = _Listening.apply
