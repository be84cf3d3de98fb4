"""Numbers that attention reads to reshape what it computes: which of them count what a rank has a part of."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

from meshcomm.collectives import check

Divide = dict[str, int]
"""By the path of an attribute, by what it is divided."""

_OTHERS = ("window", "max", "length", "position", "layer", "stride", "rank", "bucket", "pad", "kernel", "chunk", "idx")
"""Words in the names of numbers that count neither heads nor features."""
_INNER = ("all_head_size", "inner_dim", "split_size", "attention_dim", "q_dim", "inner_size", "total_head_dim")
"""Widths of all heads, as they are often called; others may be those of the stream."""


def read_in(part: nn.Module) -> set[str]:
    """The names that the methods of its classes read, also those in decorators."""
    found: set[str] = set()
    for kind in type(part).__mro__:
        if kind is nn.Module:
            break
        for name, value in vars(kind).items():
            code = getattr(inspect.unwrap(getattr(value, "__func__", value)), "__code__", None)
            if isinstance(code, CodeType) and not any(word in name for word in ("init", "reset", "extra_repr")):
                found |= _names_of(code)
    return found


def _names_of(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*(_names_of(each) for each in inner))


def _numbers(path: str, part: nn.Module) -> Iterator[tuple[str, str, int]]:
    """Path, name and value of what it reads, also of its configuration."""
    read = read_in(part)
    for name, value in vars(part).items():
        if check.whole_number(value) and value > 1 and (name in read or "group" in name):
            yield f"{path}.{name}".lstrip("."), name, value
    config: Any = vars(part).get("config")
    if "config" in read and config is not None:
        for name, value in getattr(config, "__dict__", {}).items():
            if check.whole_number(value) and value > 1 and name in read and name not in vars(part):
                yield f"{path}.config.{name}".lstrip("."), name, value


def divisions(path: str, part: nn.Module, heads: int, kv_heads: int, width: int, n: int) -> list[Divide]:
    """What may be divided, the likeliest first; as many for each layer of a kind, and some of them alike.

    Args:
        path: of the module in which attention is computed.
        part: that module.
        heads: of queries.
        kv_heads: of keys and values.
        width: of all heads of values together.
        n: ranks.
    """
    shared = max(1, n // kv_heads)  # so many ranks have the same head of keys
    surely: Divide = {}
    inner: Divide = {}
    outer: Divide = {}
    for place, name, value in _numbers(path, part):
        by = n
        if any(word in name for word in _OTHERS):
            continue
        if "group" in name:
            if value == heads // kv_heads and shared > 1:
                surely[place] = shared
            continue
        if value == kv_heads and kv_heads != heads:
            by = min(n, kv_heads)
        elif value not in (heads, width) and not (kv_heads != heads and value == kv_heads * (width // heads)):
            continue
        elif value not in (heads, width):
            by = min(n, kv_heads)
        if by == 1 or value % by:
            continue
        if value in (heads, kv_heads) and "head" in name and "dim" not in name and "size" not in name:
            surely[place] = by
        else:
            (inner if name in _INNER else outer)[place] = by
    return [{**surely, **inner}, {**surely, **inner, **outer}, surely, {**surely, **outer}, {}]
