"""Recurrent modules of a fully sharded module: torch's keep a list of their weights beside the parameters."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from meshcomm import _torch

__all__ = ["follow"]


def follow(module: nn.RNNBase) -> None:
    """Have the list made anew from the whole parameters in each forward, and keep none of them after it."""
    forget(module)
    vars(module)["flatten_parameters"] = _leave_as_it_is
    module.register_forward_hook(forget, always_call=True)


def forget(module: nn.Module, *_: Any) -> None:
    """Put the slices into the list, and mark it as one that the next forward makes again: a hook."""
    kept, table = vars(module), _torch.own_parameters(module)
    names = kept["_flat_weights_names"]
    kept["_flat_weights"] = [dict.get(table, name) for name in names]
    kept["_flat_weight_refs"] = [weakref.ref(module)] * len(names)


def _leave_as_it_is() -> None:
    """In place of ``flatten_parameters``: neither slices nor views of what was gathered go into a buffer of cuDNN's."""
