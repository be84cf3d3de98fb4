"""The private names of torch behind what modes do not see, which is watched instead, and behind counts of who has a
storage: a part of :mod:`meshcomm._torch`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from meshcomm._versions import find, has

__all__ = [
    "counts_uses",
    "of_tensor",
    "profiler_on",
    "watch_capsules",
    "watch_functions",
    "watch_operations",
    "watch_parameters",
    "watch_storages",
    "watch_swaps",
    "watch_total_norms",
    "watch_unscaled",
]


profiler_on: Callable[[], bool] = find(
    "torch.autograd._profiler_enabled", "torch's profiler does not show what collectives are called", lambda: False
)
"""Whether torch's profiler is on in this thread."""


def watch_functions(watch: Callable[..., Any]) -> None:
    """From now on ``MyFunction.apply(...)`` is ``watch(MyFunction, torch's own apply, args, kwargs)``: modes do not see
    the call, and autograd takes ``backward`` on trust.
    """
    descriptor: Any = Function.__dict__.get("apply")

    def bound(cls: Any, *args: Any, **kwargs: Any) -> Any:
        apply = super(Function, cls).apply if descriptor is None else descriptor.__get__(None, cls)
        return apply(*args, **kwargs)

    own = getattr(descriptor, "__func__", bound)  # since torch 2.15 it is written in C, and there is no function

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return watch(cls, own, args, kwargs)

    apply.__wrapped__ = descriptor  # type: ignore[attr-defined]  # as functools.wraps does
    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]


_Mode: Any = find(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "prove_no_hang does not list what torch's functions read inside, as a slice by a tensor does",
    object,
)


def watch_operations(look: Callable[[Any, tuple[Any, ...], Any], object]) -> contextlib.AbstractContextManager[object]:
    """Inside, each operation of this thread is shown to ``look``, with what it was given and what it gives."""
    return contextlib.nullcontext() if _Mode is object else _Looking(look)


class _Looking(_Mode):  # type: ignore[misc]
    def __init__(self, look: Callable[[Any, tuple[Any, ...], Any], object]) -> None:
        super().__init__()
        self._look = look

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing that is compiled comes here, and torch's compiler takes seconds to be loaded."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._look(func, args, result)
        return result


def watch_total_norms(look: Callable[[list[Tensor]], object]) -> None:
    """From now on ``look`` is called with the tensors of which ``torch.nn.utils`` is about to take the total norm,
    whoever has imported its functions before. Where torch has them in another shape nothing is seen.
    """
    if look in _lookers:
        return
    _lookers.append(look)
    home: Any = torch.nn.utils.clip_grad
    own = getattr(home, _GROUPING, None) if _groups_norms else None
    if own is None or len(_lookers) > 1:
        return

    def grouped(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and sys._getframe(1).f_code.co_name == "_get_total_norm":
            for each in _lookers:
                each(tensors[0])
        return own(tensors, *args, **kwargs)

    setattr(home, _GROUPING, grouped)


_GROUPING = "_group_tensors_by_device_and_dtype"
_groups_norms = has(
    f"torch.nn.utils.clip_grad.{_GROUPING}", "torch's clip_grad_norm_ of cut parameters is not refused, and wrong"
)
_lookers: list[Callable[[list[Tensor]], object]] = []


def _tell_of(owner: Any, name: str, tell: Callable[..., object]) -> None:
    """From now on ``tell(result, *args, **kwargs)`` is called after each call of this function."""
    own = getattr(owner, name)

    @functools.wraps(own)
    def told(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        tell(result, *args, **kwargs)
        return result

    setattr(owner, name, told)


def watch_unscaled(agree: Callable[[torch.optim.Optimizer, Tensor, dict[torch.device, Tensor]], object]) -> None:
    """From now on ``agree`` is called with what a ``GradScaler`` has found of the gradients of an optimizer: by device
    whether one is not finite, as tensors that may be written to, and a zero to be put there where there are none.
    """
    if _unscales and agree not in _agreeing:
        _agreeing.append(agree)
        scaler: Any = torch.amp.GradScaler
        _tell_of(scaler, _UNSCALE, lambda found, _, optimizer, scale, own, *rest: agree(optimizer, own, found))


_UNSCALE = "_unscale_grads_"
_unscales = has(
    f"torch.amp.GradScaler.{_UNSCALE}", "ranks that have parts of the parameters may skip other steps than others"
)
_agreeing: list[Callable[..., object]] = []


def watch_storages(watch: Callable[[torch.UntypedStorage], object]) -> None:
    """From now on ``watch`` is called with each storage of a tensor into which another storage was copied: modes do not
    see that.
    """
    _tell_of(torch.UntypedStorage, "copy_", lambda result, to, *_, **__: watch(to) if of_tensor(to) else None)


def watch_capsules(watch: Callable[[Tensor], object]) -> None:
    """From now on ``watch`` is called with each tensor whose memory ``to_dlpack`` hands out: modes do not see that."""
    own: Any = getattr(torch.utils.dlpack, "to_dlpack", None)
    for place in (torch.utils.dlpack, torch):
        if own is not None and getattr(place, "to_dlpack", None) is own:
            _tell_of(place, "to_dlpack", lambda capsule, tensor: watch(tensor))


def watch_parameters(watch: Callable[[Parameter, Any], object]) -> None:
    """From now on ``watch(parameter, data)`` is called for each ``Parameter(data)``: modes do not see that."""
    _tell_of(Parameter, "__new__", lambda made, cls, data=None, *_, **__: watch(made, data))


def watch_swaps(watch: Callable[..., None]) -> None:
    """From now on ``torch.utils.swap_tensors(x, y)`` is ``watch(torch's own, x, y)``: modes do not see that, and torch
    refuses tensors that somebody refers to weakly.
    """
    own: Any = torch.utils.swap_tensors

    @functools.wraps(own)
    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        watch(own, t1, t2)

    torch.utils.swap_tensors = swap_tensors


_count_of: Any = find(
    "torch._C._storage_Use_Count",
    "deepcopy of a tensor under check_vma gives one of unknown type; memory of large results is not used again",
    None,
)


def counts_uses() -> bool:
    """Whether :func:`of_tensor` can tell."""
    return _count_of is not None


def of_tensor(storage: torch.UntypedStorage, besides: int = 0) -> bool:
    """Whether any tensor has this storage, ``besides`` so many: one that was just made, as by ``storage.clone()``, has
    none.
    """
    return _count_of is None or _count_of(storage._cdata) > 1 + besides
