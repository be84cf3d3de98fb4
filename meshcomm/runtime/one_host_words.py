"""What a rank writes of a call for the others on its machine: in numbers, and those in words."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from meshcomm.errors import shape_text
from meshcomm.runtime.protocol import REDUCE_OPS
from meshcomm.runtime.shared_memory import ENTRIES, Box
from meshcomm.runtime.whose import ordinal_of

__all__ = ["LENGTHS", "PERMUTE", "code_of", "dtype_of", "last_said", "lengths_of", "name_of", "named", "said"]

LENGTHS = 5
"""Of a shape, that have room in an entry."""

_CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "reduce", "gather",
          "scatter", "barrier")  # fmt: skip
_DTYPES = tuple(
    sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=lambda each: str(each))
)
_CALL = {call: number << 16 for number, call in enumerate(_CALLS)}
_OP = {op: number << 8 for number, op in enumerate(("", *REDUCE_OPS))}
_DTYPE = {dtype: number for number, dtype in enumerate(_DTYPES)}


def code_of(name: str, op: str, dtype: torch.dtype) -> int:
    """A primitive, its reduce op and dtype as a number."""
    return _CALL[name] + _OP[op] + _DTYPE[dtype]


def name_of(code: int) -> str:
    """Of the primitive."""
    return _CALLS[code >> 16]


def dtype_of(code: int) -> torch.dtype:
    """Of its tensor."""
    return _DTYPES[code & 255]


PERMUTE = _CALLS.index("permute")


def lengths_of(shape: Sequence[int]) -> list[int]:
    """A shape in the room that an entry has for it: what is behind the last place stands there as one number."""
    if len(shape) <= LENGTHS:
        return [*shape, *[-1] * (LENGTHS - len(shape))]
    return [*shape[: LENGTHS - 1], -2 - zlib.crc32(repr(tuple(shape)).encode())]


def said(code: int, count: int, root: int, lengths: Sequence[int] = ()) -> str:
    """``all_reduce of f32[8] (sum)``."""
    call, op, dtype = _CALLS[code >> 16], ("", *REDUCE_OPS)[code >> 8 & 255], _DTYPES[code & 255]
    extra = [op] if op else []
    if root < -1:
        extra.append(f"the gradient of leaf {ordinal_of(-1 - root)}")
    if root >= 0:
        extra.append(f"{'to' if call in ('permute', 'reduce', 'gather') else 'from'} {root}")
    shown = shape_text(dtype, [length for length in lengths if length >= 0] if lengths else (count,))
    shown = f"{shown[:-1]}, ...]" if lengths and lengths[-1] < -1 else shown
    return f"{call} of {shown}{' (' + ', '.join(extra) + ')' if extra else ''}"


def last_said(box: Box | None) -> str:
    """The last call that a mailbox speaks of."""
    if box is None:
        return "it has not made a mesh with this axis yet"
    at = max((box.at(slot) for slot in range(ENTRIES)), key=lambda at: box.cells[at])
    number, code, count, root = box.cells[at : at + 4].tolist()
    return f"its last call here is number {number}, {said(code, count, root)}" if number else "it has made no call here"


def named(missing: Sequence[int]) -> str:
    """``indices 1, 2``."""
    return f"{'index' if len(missing) == 1 else 'indices'} {', '.join(map(str, missing))}"
