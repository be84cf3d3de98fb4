"""What verify is asked for, checked before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshcomm.errors import fail
from meshcomm.make_mesh import make_mesh
from meshcomm.verifying import meshes as sizes
from meshcomm.verifying.derivatives import KINDS
from meshcomm.verifying.program import WHERE, Program, in_group, own_words


def fits(program: Program, shape: Mapping[str, int]) -> None:
    """MeshError where the inputs cannot be cut so."""
    with own_words():
        for leaf in program.cut:
            sizes.divides(leaf.spec, tuple(leaf.value.shape), leaf.label, shape, WHERE)
    for leaf in program.leaves:
        if not isinstance(leaf.value, Tensor) and leaf.value is not None and leaf.spec is not None:
            what = f"{leaf.label} is no tensor but {type(leaf.value).__name__}, and its spec is {leaf.spec!r}."
            fail(WHERE, what, fix="the spec None, or pass a tensor")


def in_order(fn: Callable[..., Any], specs: Any, count: int) -> Any:
    """A spec per input."""
    if isinstance(specs, Mapping):
        target = fn.forward if isinstance(fn, torch.nn.Module) else fn
        names = list(inspect.signature(target).parameters)[:count]
        unknown = [name for name in specs if name not in names]
        if unknown or len(specs) != count:
            got = f"specs for {list(specs)}; the inputs are {names}"
            fail(WHERE, "in_specs does not name the inputs.", got=got, fix="a spec per input, by position or by name")
        return tuple(specs[name] for name in names)
    if isinstance(specs, (list, tuple)):
        if len(specs) != count:
            fail(
                WHERE,
                f"in_specs has {len(specs)} specs for {count} inputs.",
                got=repr(specs),
                fix="one per input, or a single layout for all",
            )
        return tuple(specs)
    return (specs,) * count


def kinds_of(given: Any) -> list[str]:
    """Which derivatives, in order."""
    kinds = (given,) if isinstance(given, str) else given
    if not isinstance(kinds, (tuple, list)) or any(kind not in KINDS for kind in kinds):
        fail(WHERE, f"derivatives={given!r}.", fix='some of "vjp", "jvp", "second"; () for values alone')
    return [kind for kind in KINDS if kind in kinds]


def dtypes_of(given: Any) -> list[torch.dtype]:
    """In which dtypes."""
    dtypes = (given,) if isinstance(given, torch.dtype) else given
    good = isinstance(dtypes, (tuple, list)) and dtypes
    if not good or not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes):
        fail(WHERE, f"dtypes={given!r}.", fix="floating point dtypes, such as (torch.float64, torch.bfloat16)")
    return list(dtypes)


def group_size() -> int | None:
    """How many ranks a running group has; None where there is none."""
    return make_mesh({"every": -1}).size if in_group() else None
