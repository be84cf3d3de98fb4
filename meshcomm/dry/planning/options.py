"""Which options of a program's calls are worth a try, and a run in which they are changed.

The adaptors ask a dry run before they begin (``has_options``): a Listener notes what they are given, and gives them
what a Change makes of it. So every call of fully_shard in the program, whoever makes it, has the other option.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["Change", "Listener", "options_worth_a_try"]

_MATRIX = 2


class Change(NamedTuple):
    """Other options of one function."""

    name: str
    """``"fully_shard(regather=False)"``."""
    of: str
    """The function."""
    run: Callable[[Callable[..., Any], dict[str, Any]], Any]
    """``run(fn, given)``: call it otherwise; ``given`` are its arguments by name."""
    told: str = ""
    """What else it changes."""


class Listener:
    """Hears what the functions are given, and changes it."""

    def __init__(self, change: Change | None = None) -> None:
        self.change = change
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call."""
        bound = inspect.signature(fn).bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        self.calls.append((fn.__name__, {**given, "width": _widths(given)}))
        if self.change is None or self.change.of != fn.__name__:
            return fn(*args, **kwargs)
        return self.change.run(fn, given)


def _widths(given: dict[str, Any]) -> set[torch.dtype]:
    """In which dtypes its parameters are."""
    found = next(iter(given.values()))
    modules = [found] if isinstance(found, nn.Module) else list(found)
    return {p.dtype for module in modules if isinstance(module, nn.Module) for p in module.parameters()}


def _with(of: str, told: str = "", **options: Any) -> Change:
    """The same call with these options, where it has others."""
    texts = [f"{name}={_text(value)}" for name, value in options.items()]
    return Change(f"{of}({', '.join(texts)})", of, lambda fn, given: fn(**{**given, **options}), told)


def _text(value: Any) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


def options_worth_a_try(calls: list[tuple[str, dict[str, Any]]]) -> Iterator[Change]:
    """Of what was called; the same for all calls of a function."""
    for of, found in (("fully_shard", _of_shards), ("data_parallel", _of_replicas), ("tensor_parallel", _of_parts),
                      ("pipelined", _of_stages)):  # fmt: skip
        given = [each for name, each in calls if name == of]
        if given:
            yield from found(given)


def _of_shards(calls: list[dict[str, Any]]) -> Iterator[Change]:
    of = "fully_shard"
    yield _with(of, regather=not any(each["regather"] for each in calls))
    ahead = max(each["prefetch"] for each in calls)
    yield _with(of, prefetch=ahead + 1)
    if ahead:
        yield _with(of, prefetch=0)
    yield Change("fully_shard(units=) of two each", of, _in_pairs)
    yield Change("fully_shard(units=) of each layer", of, _of_layers)
    wide = {torch.float32, torch.float64}
    if any(each["param_dtype"] is None and each["width"] & wide for each in calls):
        yield _with(of, "rounds parameters", param_dtype=torch.bfloat16)
    if any((each["reduce_dtype"] or each["param_dtype"] or torch.float32) in wide for each in calls):
        yield _with(of, "rounds sums of gradients", reduce_dtype=torch.bfloat16)


def _in_pairs(fn: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Each unit with the next one."""
    module = given["module"]
    rest = {name: value for name, value in given.items() if name not in ("module", "units", "axes", "methods")}
    choice: Any = importlib.import_module("meshcomm.parallel.fsdp.choice_of_units")  # there since it was called
    found = choice.units_chosen(module, given["units"], given["methods"]) if _one(module) else {}
    units = list(found.values())[1:]
    if len(units) < 2 or given["axes"] or any(a is not b and a in set(b.modules()) for a in units for b in units):
        raise ValueError("there are no two units beside each other")
    for at in range(0, len(units) - 1, 2):
        fn(units[at : at + 2], **rest)
    single = [units[-1]] if len(units) % 2 else []
    return fn(**{**given, "units": single})


def _of_layers(fn: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Each part that has a matrix is a unit."""
    module = given["module"]
    parts = [
        part
        for part in (module.modules() if _one(module) else ())
        if part is not module and any(p.ndim >= _MATRIX for p in part.parameters(recurse=False))
    ]
    if len(parts) < 2:
        raise ValueError("it has no parts with matrices")
    return fn(**{**given, "units": parts})


def _one(module: Any) -> bool:
    return isinstance(module, nn.Module)


def _of_replicas(calls: list[dict[str, Any]]) -> Iterator[Change]:
    bucket = max(each["bucket_mb"] for each in calls)
    yield _with("data_parallel", bucket_mb=4 * bucket)
    yield _with("data_parallel", bucket_mb=bucket / 4)
    if any(each["reduce_dtype"] is None and each["width"] & {torch.float32, torch.float64} for each in calls):
        yield _with("data_parallel", "rounds sums of gradients", reduce_dtype=torch.bfloat16)


def _of_parts(calls: list[dict[str, Any]]) -> Iterator[Change]:
    yield _with("tensor_parallel", sequence=not any(each["sequence"] for each in calls))


def _of_stages(calls: list[dict[str, Any]]) -> Iterator[Change]:
    of, first = "pipelined", calls[0]
    yield _with(of, microbatches=2 * first["microbatches"])
    if first["microbatches"] > 1:
        yield _with(of, microbatches=first["microbatches"] // 2)
    yield _with(of, remat=not first["remat"])
    one = ("gpipe", "1f1b", "zb-h1")
    if first["schedule"] in one:
        yield from (_with(of, schedule=other) for other in one if other != first["schedule"])
