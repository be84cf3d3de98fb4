"""Whether ranks have modules that are alike: of the same names, dtypes and shapes, trained in the same parts."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from meshcomm.collectives.agree import agree
from meshcomm.errors import fail
from meshcomm.mesh import Axis


def refuse_other_kinds(where: str, here: Iterable[tuple[str, Tensor]], axis: Axis) -> None:
    """Raise on every rank where tensors differ along ``axis`` in names, dtypes, shapes or whether they are trained;
    values may.
    """
    if axis.size == 1:
        return
    lines = [f"{name} {x.dtype} {_shape(x)} {x.requires_grad}" for name, x in here]
    rows = agree([len(lines), zlib.crc32("\n".join(lines).encode())], axis)
    if all(row == rows[0] for row in rows):
        return
    got = f"{[count for count, _ in rows]} of them on the ranks"
    if all(count == len(lines) for count, _ in rows):
        first, *rest = agree([zlib.crc32(line.encode()) for line in lines], axis)
        at = next(at for at, mark in enumerate(first) if any(marks[at] != mark for marks in rest))
        got = f"on one rank, {lines[at]!r} on index {axis.index}"
    what = "parameters or buffers differ between ranks in more than values."
    got = f"along axis {axis.name!r} {got}"
    fail(
        where,
        what,
        got=got,
        fix="the same module on each rank, made with the same numbers and frozen in the same parts",
    )


def _shape(x: Tensor) -> tuple[int, ...] | None:
    return None if torch.nn.parameter.is_lazy(x) else tuple(x.shape)
