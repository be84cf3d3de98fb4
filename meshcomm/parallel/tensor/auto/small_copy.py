"""A small copy of a model, on which a plan can be tried: of layers that are alike two stay, with random numbers.

layers 0 1 2 3 4 5 ... 31  ->  layers 0 1        what is found for layers.0 and layers.1 holds of all
of two kinds A A B B B ... ->  A A B B
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_KEPT = 2
"""Of layers that are alike: what one gives, the other one is given."""


class SmallCopy(NamedTuple):
    """A copy, and which of its parts stands for which of the model's."""

    module: nn.Module
    stands: dict[str, dict[str, str]]
    """By the path of a list of layers, as it is in the model: for each layer the one that stands for it."""

    def place_of(self, path: str) -> str:
        """Where a part or a parameter of the model stands in the copy."""
        here, there = "", []
        for name in path.split("."):
            there.append(self.stands.get(here, {}).get(name, name))
            here = f"{here}.{name}" if here else name
        return ".".join(there)


def alike(part: nn.Module) -> Any:
    """What two layers have in common that compute the same of other numbers."""
    params = tuple((name, tuple(p.shape), p.dtype) for name, p in part.named_parameters())
    inside = []
    for name, each in part.named_modules():
        said = tuple(
            (key, value) for key, value in sorted(vars(each).items())
            if isinstance(value, (str, bool, int)) and not key.startswith("_")
            and not any(word in key for word in ("idx", "index", "layer_id", "layer_number"))
        )  # fmt: skip
        inside.append((name, type(each), said))
    return params, tuple(inside)


def _shortened(module: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, nn.Module], dict[str, str]]]:
    """The lists of layers that can be shorter: where, which, what stays of them, and what stands for what."""
    for path, part in module.named_modules():
        if not isinstance(part, (nn.ModuleList, nn.Sequential)) or len(part) <= _KEPT:
            continue
        kept: dict[str, nn.Module] = {}
        stands: dict[str, str] = {}
        seen: dict[Any, list[str]] = {}
        before: Any = None
        for name, item in part.named_children():
            kind = alike(item)
            if isinstance(part, nn.Sequential) and kind != before:
                seen = {}  # those behind each other alone: what comes next must fit
            before = kind
            places = seen.setdefault(kind, [])
            if len(places) < _KEPT or not any(True for _ in item.parameters()):
                places.append(str(len(kept)))
                kept[places[-1]] = item
                stands[name] = places[-1]
            else:
                stands[name] = places[0]
        named = all(name.isdigit() for name, _ in part.named_children())
        if len(kept) < len(part) and named:
            yield path, part, kept, stands


def _results_of(module: nn.Module) -> dict[int, Any]:
    """By their ids what a copy has in place of tensors that the last call has left, as recurrent layers keep states."""
    kept = [x for part in module.modules() for x in vars(part).values() if isinstance(x, Tensor)]
    return {id(x): x.detach().clone() for x in kept if x.grad_fn is not None}


def small_copy_of(module: nn.Module, device: torch.device, dtype: torch.dtype | None, shorter: bool) -> SmallCopy:
    """A copy with random numbers; ``shorter``: with fewer layers."""
    stands: dict[str, dict[str, str]] = {}
    before: list[tuple[nn.Module, Any]] = []
    try:
        for path, part, kept, places in list(_shortened(module)) if shorter else ():
            before.append((part, vars(part)["_modules"]))
            vars(part)["_modules"] = kept
            stands[path] = places
        made = copy.deepcopy(module, _results_of(module))
    finally:
        for part, modules in before:
            vars(part)["_modules"] = modules
    if dtype is None:
        dtype = torch.float64 if sum(p.numel() for p in made.parameters()) < 1 << 27 else torch.float32
    _fill(made, device, dtype)
    return SmallCopy(made.eval(), stands)


@torch.no_grad()
def _fill(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Other numbers than zeros and ones, which would hide much; the same on all ranks."""
    draws = torch.Generator("cpu").manual_seed(11)
    done: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, p in list(vars(part)["_parameters"].items()):
            if p is None:
                continue
            if id(p) not in done:
                done[id(p)] = p if not p.is_floating_point() else _drawn(name, p, draws, device, dtype)
                done[id(done[id(p)])] = done[id(p)]
            vars(part)["_parameters"][name] = done[id(p)]
        for name, x in list(vars(part)["_buffers"].items()):
            if x is not None:
                vars(part)["_buffers"][name] = _buffer(x, draws, device, dtype)


def _drawn(name: str, p: Tensor, draws: torch.Generator, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    x = torch.randn(p.shape, generator=draws, dtype=torch.float32, device="cpu")
    if p.ndim < 2:
        x = 0.3 * x + (1 if "weight" in name else 0)
    else:
        x /= math.sqrt(max(p.shape[-1], 1))
    made = nn.Parameter(x.to(device, dtype))
    vars(made).update(vars(p))
    return made


def _buffer(x: Tensor, draws: torch.Generator, device: torch.device, dtype: torch.dtype) -> Tensor:
    if not x.is_meta:
        return x.to(device, dtype) if x.dtype in (torch.float16, torch.bfloat16, torch.float32) else x.to(device)
    if x.is_floating_point():
        return torch.rand(x.shape, generator=draws, device="cpu").to(device, dtype)
    return torch.ones(x.shape, dtype=x.dtype, device=device) if x.dtype == torch.bool else torch.zeros(
        x.shape, dtype=x.dtype, device=device
    )  # fmt: skip
