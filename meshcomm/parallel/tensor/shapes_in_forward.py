"""What to write in the plan where the forward of a module stumbles over shapes: torch says two numbers, and not whose.

A column gives each rank 1/n of its features. What follows and reads how many there are, or has a number for each of
them, fails in torch, on all ranks alike and at the same line. Here it is found out in which module that was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import TracebackType

from torch import Tensor, nn

from meshcomm.axis import Axis
from meshcomm.collectives import check
from meshcomm.errors import fail
from meshcomm.parallel.tensor.kinds.products import kind_of

_SHAPES = re.compile(
    r"size of tensor a|is invalid for input of size|shapes cannot be multiplied|[Ss]izes of tensors must match"
    r"|normalized_shape|split_with_sizes|expanded size of the tensor|expected input|must match the size"
    r"|mat1 and mat2|size mismatch|Expected size|inconsistent tensor size|does not broadcast|number of channels"
)
"""What torch says where a shape is not the one that an operation wants."""


def explain(where: str, module: nn.Module, axis: Axis, cuts: Mapping[str, object], error: RuntimeError) -> None:
    """Fail with the name of the module and the way, if it was for a shape that torch has raised this in a forward."""
    said = " ".join(str(error).split())
    if type(error) is not RuntimeError or not cuts or not _SHAPES.search(said):
        return
    paths = {part: path for path, part in module.named_modules()}
    part = next((each for each in _parts(error.__traceback__) if each in paths), None)
    if part is None or part is module:
        return
    own = dict(part.named_parameters(recurse=False))
    path = paths[part]
    shapes = ", ".join(f"{name} {list(p.shape)}" for name, p in own.items())
    cut = [name for name in own if f"{path}.{name}" in cuts]
    what = f"{path!r} ({type(part).__name__}) was given a shape that does not fit: {said}."
    fail(where, what, got=f"axis {axis.name!r} of size {axis.size}{'; ' if shapes else ''}{shapes}",
         fix=_way(path, part, own, cut, axis.size))  # fmt: skip


def _parts(trace: TracebackType | None) -> Iterator[nn.Module]:
    """Modules in whose methods it went wrong, or that were given to a function in which it did; the innermost first."""
    found: list[nn.Module] = []
    while trace is not None:
        names = trace.tb_frame.f_locals
        found += [names[name] for name in ("module", "self") if isinstance(names.get(name), nn.Module)]
        trace = trace.tb_next
    return reversed(found)


def _way(path: str, part: nn.Module, own: Mapping[str, Tensor], cut: list[str], size: int) -> str:
    """What the plan may say instead."""
    here = f"*.{path.rpartition('.')[2]}"
    if own and all(p.ndim == 1 for p in own.values()):
        return (
            f"where it follows a column and needs all features, as a norm over all heads does, {here!r}: Block('join', "
            "'part') beside 'replicated'; of heads that ranks share (kv_heads) that is not possible"
        )
    if kind_of(part) is not None and cut:
        return f"what comes before it is whole: {here!r}: Row(split=True), or a column before it"
    if kind_of(part) is not None:
        return "what comes before it is cut: 'row' for it, or Column(gather=True) for what comes before"
    counts = [name for name, value in vars(part).items() if check.whole_number(value) and value > 0 == value % size]
    found = f", such as {', '.join(repr(f'{here}.{name}') for name in counts[:4])}" if counts else ""
    return (
        f"each rank has 1/{size} of what a column gives: divide= for the numbers that its forward reads{found}; or "
        "Column(gather=True) for what it needs whole"
    )
