"""The private names of torch behind modules and what they call: a part of :mod:`meshcomm._torch`."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import multi_head_attention_forward

from meshcomm._versions import has, lack
from meshcomm.errors import fail

__all__ = [
    "attention_of_linears",
    "own_parameters",
    "set_own_parameters",
    "tables_of",
]


_PARAMETERS = "torch.nn.Module._parameters"
_tables = has(_PARAMETERS, "fully_shard is refused", torch.nn.Module())


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The table in which a module looks up the parameters that are its own and not its children's."""
    if _tables:
        return module._parameters
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def tables_of(module: torch.nn.Module) -> tuple[dict[str, Tensor | None], dict[str, torch.nn.Module | None]]:
    """The tables in which a module has its own parameters and its children; of a scripted or traced one they lead into
    its C++ part.
    """
    own = vars(module)
    if "_modules" in own:
        return own["_parameters"], own["_modules"]
    return module._parameters, module._modules  # type: ignore[return-value]  # traced


def set_own_parameters(module: torch.nn.Module, table: dict[str, torch.nn.Parameter | None]) -> None:
    """Have a module look them up in ``table``."""
    if not _tables:
        fail("fully_shard", **lack(_PARAMETERS, "mc.parallel.fsdp's functions, or "))
    module.__dict__["_parameters"] = table


def _of_linears() -> Callable[..., Any] | None:
    """The function that ``nn.MultiheadAttention`` calls, but that it does not give itself to a mode as one call."""
    fn = multi_head_attention_forward
    if not isinstance(fn, FunctionType) or "has_torch_function" not in fn.__globals__:
        return None
    names = {**fn.__globals__, "has_torch_function": lambda _: False}
    made = FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__ = fn.__kwdefaults__
    return made


_linears = _of_linears()


def attention_of_linears(func: Any) -> Callable[..., Any] | None:
    """For ``multi_head_attention_forward`` a function like it whose linear layers a mode hears of, one by one; None for
    every other one, and where torch has it in another way: the mode hears of the whole.
    """
    return _linears if func is multi_head_attention_forward else None
