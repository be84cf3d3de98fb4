"""The errors a user of meshcomm can meet, and the one shape that all of their texts have."""

from __future__ import annotations

import difflib
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch

made: list[Callable[[], object]] = []
"""Who is told where one of our errors is made: runtime/tracebacks.py."""


class OurError(Exception):
    """An error of this library: its traceback is shown as far as the user's line."""

    def __init__(self, *args: object) -> None:
        self.args = args  # and not by super(), which torch.compile cannot trace: its error would stand before ours
        if not torch.compiler.is_compiling():
            for tell in made:
                tell()


class MeshError(OurError, ValueError):
    """A call that cannot be right: an unknown axis, a size that does not divide, a wrong dtype, a launch that does
    not fit.

    Raised before any communication, from values that are the same on every rank, so that all ranks raise together.
    """


class CommError(OurError, RuntimeError):
    """Ranks that do not agree: a deadlock, two different collectives that met, a peer that failed, a time-out."""


class VaryingError(OurError, RuntimeError):
    """A value used as invariant along an axis on which it varies."""


class VerifyError(OurError, AssertionError):
    """A program that is not what it is on one device: the text is the report of :func:`meshcomm.verify`."""


class HangError(OurError, RuntimeError):
    """A program whose ranks wait for each other for ever, or may: what :func:`meshcomm.prove_no_hang` found."""


FIRST_CAUSE = "look at the other ranks: the first one that failed or stopped is the cause"
"""The fix of what another rank has brought about."""


def text(where: str, what: str, *, got: str = "", fix: str = "") -> str:
    """``meshcomm.<where>: <what>`` with a line for what was given and a line for what to do."""
    lines = [f"meshcomm.{where}: {what}"]
    if got:
        lines.append(f"  got: {got}")
    if fix:
        lines.append(f"  fix: {fix}")
    return "\n".join(lines)


listeners: list[Callable[[str], object]] = []
"""Who is told of the calls that are refused: the guard."""


class _Held(threading.local):
    depth = 0


_held = _Held()


@contextmanager
def held() -> Iterator[None]:
    """What is refused in here is caught and handled: the other ranks need not know, or are told otherwise."""
    _held.depth += 1
    try:
        yield
    finally:
        _held.depth -= 1


def is_held() -> bool:
    """Whether nobody is told."""
    return _held.depth > 0


def fail(where: str, what: str, *, got: str = "", fix: str = "", kind: type[Exception] = MeshError) -> NoReturn:
    """Raise ``kind`` with the house's text."""
    message = text(where, what, got=got, fix=fix)
    if listeners and kind is MeshError and not _held.depth:
        for listener in listeners:
            listener(message)
    raise_alone(kind(message))


def raise_alone(error: Exception) -> NoReturn:
    """Raise it without the exception that is being handled, if any: only then ``from None``, which dynamo of torch 2.11
    fails of with an error of its own.
    """
    try:
        if sys.exc_info()[0] is None:
            raise error
        raise error from None
    finally:
        del error  # its traceback has this frame: a circle would keep what all frames of the user's have


def names(items: Iterable[object]) -> str:
    """``'a', 'b', 'c'``: a list of known names for an error."""
    return ", ".join(repr(item) for item in items)


def few(items: Sequence[object], most: int = 8) -> str:
    """``0, 1, 2, ...``: the first ones of a list that may be long."""
    return ", ".join(map(str, items[:most])) + (", ..." if len(items) > most else "")


def likely(given: object, known: Iterable[str]) -> str:
    """``; did you mean 'tp'?``, if a known name is near; what its letters are, if they only look like those of one."""
    if not isinstance(given, str):
        return ""
    lower = {name.lower(): name for name in known}
    odd = next((letter for letter in given if not letter.isascii()), None)
    if odd is not None and all(name.isascii() for name in lower):
        return f"; {odd!r} is {unicodedata.name(odd, f'U+{ord(odd):04X}')}"
    near = difflib.get_close_matches(given.lower(), lower, 1)
    return f"; did you mean {lower[near[0]]!r}?" if near else ""


def described(error: BaseException) -> str:
    """An exception in one line: its type, and the first line of what it says."""
    return f"{type(error).__name__}: {error}".split("\n", 1)[0].removesuffix(": ")


_SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "complex64": "c64", "complex128": "c128",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8",
    "uint64": "u64", "uint32": "u32", "uint16": "u16", "uint8": "u8",
}  # fmt: skip


def shape_text(dtype: object, shape: Iterable[int]) -> str:
    """``f32[8, 30]``."""
    name = str(dtype).removeprefix("torch.")
    return f"{_SHORT.get(name, name)}[{', '.join(str(length) for length in shape)}]"
