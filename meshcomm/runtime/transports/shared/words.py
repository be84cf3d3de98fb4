"""What a rank writes of a call for the others on its machine: in numbers, and those in words."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from meshcomm.runtime.call import Call
from meshcomm.runtime.process.boxes import ENTRIES, Box
from meshcomm.runtime.transports.protocol import PRIMITIVES, REDUCE_OPS
from meshcomm.runtime.transports.shared.lexicon import Lexicon, Meaning
from meshcomm.runtime.whose import ordinal_of
from meshcomm.runtime.words import primitive_text

(_NUMBER, CODE, COUNT, ROOT, FD, SERIAL, SIZE, KEPT, LATER, OFFSET, LENGTH, DIGEST, PLACE, STANDS, GRADIENT, WHY,
 ENTRY_CELLS) = range(17)  # fmt: skip
"""The cells of an entry: the number of the call, what is called, where what is lent lies, a digest of the call, and
where in the lexicon its words are. Under guard also how the rank stands to the call, whether it needs a gradient, and
where the reason is for which it was given up: see the guard.
"""

Given = tuple[int, int]
"""The number of a call and its digest."""

_DTYPES = tuple(
    sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=lambda each: str(each))
)
_CALL = {call: number << 16 for number, call in enumerate(PRIMITIVES)}
_OP = {op: number << 8 for number, op in enumerate(("", *REDUCE_OPS))}
ITEMSIZES = tuple(dtype.itemsize for dtype in _DTYPES)
"""Bytes of an element of a call's tensor, by the last byte of its code."""
_DTYPE = {dtype: number for number, dtype in enumerate(_DTYPES)}


def meaning_of(
    known: Lexicon, key: Hashable, called: tuple[Any, ...], tree: tuple[Any, ...],
    name: str, op: str, dtype: torch.dtype, shape: torch.Size, root: int,
) -> Meaning:  # fmt: skip
    """Of a primitive with this key. ``called``: what makes the call that it belongs to, and its arguments."""
    seen = () if name == "all_to_all" else tuple(shape)  # there it may differ
    call: Call = called[0](*called[1:]) if called else _alone(name, op, root)
    if call.dtype is None and name != "barrier":
        call = call._replace(dtype=dtype, shape=shape)
    call = call._replace(tree=tree or call.tree, moved=(name, op, dtype, seen, root))
    return known.learn(key, code_of(name, op, dtype), call.digest[0], call.meaning.write())


def brief(call: Call) -> tuple[Any, ...]:
    """What all ranks say alike of a call, as ``told.call`` has it: what makes it, the tree, whose gradient it sums."""
    what, given, names, _, _, dtype, shape, fixed, tree, whose, *_ = call
    return (Call, what, given, tuple(names), None, None, dtype, shape, fixed), tree, whose


def _alone(name: str, op: str, root: int) -> Call:
    """Of a primitive that belongs to no call that is known."""
    return Call(name, (op or None, None if root < 0 else root), ("op", "root"))


def code_of(name: str, op: str, dtype: torch.dtype) -> int:
    """A primitive, its op and the dtype of its tensor in one number."""
    return _CALL[name] + _OP[op] + _DTYPE[dtype]


def name_of(code: int) -> str:
    """Of the primitive."""
    return PRIMITIVES[code >> 16]


def number_of(dtype: torch.dtype) -> int:
    """The last byte of its codes."""
    return _DTYPE[dtype]


def dtype_of(code: int) -> torch.dtype:
    """Of its tensor."""
    return _DTYPES[code & 255]


PERMUTE = PRIMITIVES.index("permute")
_TO_ONE = {PERMUTE, PRIMITIVES.index("reduce"), PRIMITIVES.index("gather")}
"""What is lent there the root alone reads; elsewhere all do, whoever lends it."""


TURNS = 2**19
"""A root as large is none: it says which part of which call of a larger axis this is."""


def said(code: int, count: int, root: int) -> str:
    """``all_reduce f32[8] (op='sum')``."""
    root = -1 if root >= TURNS else root
    name, op, dtype = PRIMITIVES[code >> 16], ("", *REDUCE_OPS)[code >> 8 & 255], _DTYPES[code & 255]
    text = primitive_text(name, name, op, None if name == "barrier" else dtype, (count,), root)
    return f"{text} for the gradient of leaf {ordinal_of(-1 - root)}" if root < -1 else text


def entry_of(box: Box | None, number: int) -> list[int] | None:
    """What stands there of a call."""
    if box is None:
        return None
    at = box.at(number)
    return box.cells[at : at + ENTRY_CELLS].tolist() if box.cells[at] == number else None


def is_lent_to(index: int, entry: Sequence[int]) -> bool:
    """Whether what this entry lends is for this index among the others, whatever that one has called itself."""
    return entry[SERIAL] != 0 and (entry[CODE] >> 16 not in _TO_ONE or entry[ROOT] == index)


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
