"""Ranks that call the same with tensors of other lengths: which dim, how long on each rank, and what to write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from meshcomm.runtime.ops import op_named

_DIM = re.compile(r"\b(?:split_)?dim=(-?\d+)")
_SHAPE = re.compile(r"\b([a-z]+\d+|bool)\[([\d, ]*)\]")


def dims_said(calls: Mapping[int, str], size: int) -> str:
    """Of calls in words, by index along the axis of this size: lines about the first dim that differs, or nothing."""
    texts = list(calls.values())
    name = _name(texts[0]) if texts else ""
    op = op_named(name)
    if op is None or not op.lengths or any(_name(text) != name or "sizes=" in text for text in texts):
        return ""
    dims, shapes = [_DIM.findall(text) for text in texts], [_SHAPE.findall(text) for text in texts]
    if any(each != dims[0] for each in dims) or not dims[0] or len({len(each) for each in shapes}) > 1:
        return ""
    for leaf in zip(*shapes, strict=True):
        lengths = [[int(length) for length in shape.split(",") if length.strip()] for _, shape in leaf]
        if len({dtype for dtype, _ in leaf}) > 1 or len({len(each) for each in lengths}) > 1:
            return ""
        differing = [at for at, each in enumerate(zip(*lengths, strict=True)) if len(set(each)) > 1]
        if differing:
            own = int(dims[0][0]) % len(lengths[0])
            at = own if own in differing and len(differing) == 1 else next(d for d in differing if d != own)
            found = dict(zip(calls, (each[at] for each in lengths), strict=True))
            return _along(op.lengths, at, found, size) if at == own else _other(at, found, own)
    return ""


def _along(fix: str, dim: int, found: Mapping[int, int], size: int) -> str:
    """The lines about the lengths of the dim along which the ranks' parts may differ, by index."""
    lengths = [found.get(index) for index in range(size)]
    shown = f"[{', '.join('?' if length is None else str(length) for length in lengths)}]"
    return f"\n  lengths of dim {dim}: {_each(found)}\n  fix: {fix.format(lengths=shown, dim=dim)}"


def _other(dim: int, found: Mapping[int, int], own: int) -> str:
    fix = f"only dim {own} may have another length on each rank, with sizes="
    return f"\n  lengths of dim {dim}: {_each(found)}\n  fix: {fix}"


def _each(found: Mapping[int, int]) -> str:
    by_length: dict[int, list[int]] = {}
    for index, length in sorted(found.items()):
        by_length.setdefault(length, []).append(index)
    return ", ".join(f"{length} on {_indices(where)}" for length, where in by_length.items())


def _indices(where: Sequence[int]) -> str:
    shown = ", ".join(map(str, where[:8])) + (", ..." if len(where) > 8 else "")
    return f"{'index' if len(where) == 1 else 'indices'} {shown}"


def _name(text: str) -> str:
    return re.match(r"\w*", text)[0]  # type: ignore[index]
