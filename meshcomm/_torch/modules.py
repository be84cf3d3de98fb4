"""The private names of torch behind the tables of a module: a part of :mod:`meshcomm._torch`."""

from __future__ import annotations

import torch
from torch import Tensor

from meshcomm._versions import has, lack
from meshcomm.errors import fail

__all__ = [
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
