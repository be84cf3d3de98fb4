"""Whether ranks have modules that are alike: of the same classes, with tensors of the same names, dtypes and shapes,
trained in the same parts.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor, nn

from meshcomm.axis import Axis
from meshcomm.collectives.agree import agree
from meshcomm.errors import fail


def refuse_other_modules(
    where: str, module: nn.Module, here: Iterable[tuple[str, Tensor]], axis: Axis, besides: Container[nn.Module] = ()
) -> None:
    """Raise on every rank where modules differ along ``axis`` in classes, or these tensors of theirs in names, dtypes,
    shapes or whether they are trained; values may. Call it when all else has been checked.

    ``besides``: parts that are not looked at.
    """
    if axis.size == 1:
        return
    lines = [f"{name!r} {x.dtype} {_shape(x)}{' frozen' * (not x.requires_grad)}" for name, x in here]
    parts = [(name, part) for name, part in module.named_modules() if part not in besides]
    lines += [f"{name or 'the module'!r} is a {type(part).__name__}" for name, part in parts]
    refuse_others(where, "modules differ between ranks in more than values.", lines, axis,
                  "the same module on each rank, made with the same numbers and frozen in the same parts")  # fmt: skip


def refuse_others(where: str, what: str, lines: Sequence[str], axis: Axis, fix: str) -> None:
    """Raise on every rank where ``lines`` differ along ``axis``, with the first of each that does."""
    if axis.size == 1:
        return
    rows = agree([len(lines), zlib.crc32("\n".join(lines).encode())], axis)
    if all(row == rows[0] for row in rows):
        return
    most = max(count for count, _ in rows)
    marks = agree([zlib.crc32(line.encode()) for line in lines] + [0] * (most - len(lines)), axis)
    at = next(at for at in range(most) if len({row[at] for row in marks}) > 1)
    said = (lines[at] if at < len(lines) else "nothing").encode()
    longest = max(length for [length] in agree([len(said)], axis))
    found: dict[str, list[int]] = {}
    for index, row in enumerate(agree([*said, *[32] * (longest - len(said))], axis)):
        found.setdefault(bytes(row).decode(errors="replace").rstrip(), []).append(index)
    told = "; ".join(
        f"{text} on {'index' if len(has) == 1 else 'indices'} {str(has)[1:-1]}" for text, has in found.items()
    )
    fail(where, what, got=f"along axis {axis.name!r} {told}", fix=fix)


def lines_of(params: Sequence[Tensor]) -> list[str]:
    """What is compared of an optimiser's parameters, which have numbers and no names."""
    without, frozen = " without a gradient", " frozen"
    return [
        f"parameter {at} {p.dtype} {_shape(p)}{without * (p.grad is None)}{frozen * (not p.requires_grad)}"
        for at, p in enumerate(params)
    ]


def _shape(x: Tensor) -> tuple[int, ...] | None:
    return None if torch.nn.parameter.is_lazy(x) else tuple(x.shape)
