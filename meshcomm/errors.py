"""The errors a user of meshcomm can meet, and the one shape that all of their texts have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

__all__ = ["CommError", "MeshError", "VaryingError", "fail", "names", "shape_text", "text"]


class MeshError(ValueError):
    """A call that cannot be right: an unknown axis, a size that does not divide, a wrong dtype, a launch that does
    not fit.

    Raised before any communication, from values that are the same on every rank, so that all ranks raise together.
    """


class CommError(RuntimeError):
    """Ranks that do not agree: a deadlock, two different collectives that met, a peer that failed, a time-out."""


class VaryingError(RuntimeError):
    """A value used as invariant along an axis on which it varies."""


def text(where: str, what: str, *, got: str = "", fix: str = "") -> str:
    """``meshcomm.<where>: <what>`` with a line for what was given and a line for what to do."""
    lines = [f"meshcomm.{where}: {what}"]
    if got:
        lines.append(f"  got: {got}")
    if fix:
        lines.append(f"  fix: {fix}")
    return "\n".join(lines)


def fail(where: str, what: str, *, got: str = "", fix: str = "", kind: type[Exception] = MeshError) -> NoReturn:
    """Raise ``kind`` with the house's text."""
    raise kind(text(where, what, got=got, fix=fix)) from None


def names(items: Iterable[object]) -> str:
    """``'a', 'b', 'c'``: a list of known names for an error."""
    return ", ".join(repr(item) for item in items)


_SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "complex64": "c64", "complex128": "c128",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8",
    "uint64": "u64", "uint32": "u32", "uint16": "u16", "uint8": "u8",
}  # fmt: skip


def shape_text(dtype: object, shape: Iterable[int]) -> str:
    """``f32[8, 30]``."""
    name = str(dtype).removeprefix("torch.")
    return f"{_SHORT.get(name, name)}[{', '.join(str(length) for length in shape)}]"
