"""A plan for a module of a dry run, whose tensors have no values: it is found for a twin outside of that run.

dry run      module: shapes and dtypes        tensor_parallel(module, plan)
                |                                 ^
its thread   twin on the meta device  ->  small copy with random numbers, cut and proved on ranks of this process
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshcomm import _torch
from meshcomm.parallel.tensor.auto.example_inputs import remembered

T = TypeVar("T")


def outside(find: Callable[[nn.Module, Any], T], module: nn.Module, example: Any) -> T:
    """``find(module, example)`` of a module and an example with values, where no dry run is: in a thread of its own."""

    def found() -> T:
        memo: dict[int, Any] = {id(x): _on_meta(x) for x in _tensors_of(module)}
        memo.update((id(x), _with_values(x)) for x in _leaves(remembered(module)))
        return find(
            copy.deepcopy(module, memo), copy.deepcopy(example, {id(x): _with_values(x) for x in _leaves(example)})
        )

    with ThreadPoolExecutor(1, "meshcomm auto_plan") as thread:
        return thread.submit(found).result()


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        for kept in (vars(part), vars(part)["_parameters"], vars(part)["_buffers"]):
            yield from (x for x in kept.values() if isinstance(x, Tensor))


def _leaves(tree: Any) -> list[Tensor]:
    return [x for x in _torch.tree_flatten(tree)[0] if isinstance(x, Tensor) and _torch.is_without_memory(x)]


def _on_meta(x: Tensor) -> Tensor:
    made = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


def _with_values(x: Tensor) -> Tensor:
    """Zeros are indices that any table has."""
    return (
        torch.randn(x.shape, dtype=x.dtype, device="cpu")
        if x.is_floating_point()
        else torch.zeros(x.shape, dtype=x.dtype, device="cpu")
    )
