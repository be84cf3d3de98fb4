"""What the examples print: the collectives that one rank sends along each axis, forwards and backwards."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import meshcomm as mc

PRIMITIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast")


@contextlib.contextmanager
def issued(mesh: mc.Mesh) -> Iterator[Counter[str]]:
    """Count what this rank gives to the links of its axes: ``{"all_reduce over dp": 3}``."""
    found: Counter[str] = Counter()
    before = []
    for name in mesh.axis_names:
        link: Any = mesh.axis(name).link
        if mesh.axis(name).size > 1:
            for form in {id(each): each for each in (link, link.later())}.values():
                before.append((form, type(form)))
                form.__class__ = _counting(type(form), name, found)
    try:
        yield found
    finally:
        for form, kind in before:
            form.__class__ = kind


def _counting(kind: type, axis: str, found: Counter[str]) -> type:
    inside: list[str] = []  # some are made of others

    def counted(name: str) -> Any:
        def call(self: Any, *args: Any) -> Any:
            if not inside:
                found[f"{name} over {axis}"] += 1
            inside.append(name)
            try:
                return getattr(kind, name)(self, *args)
            finally:
                inside.pop()

        return call

    return type(kind.__name__, (kind,), {name: counted(name) for name in PRIMITIVES})


def said(found: Counter[str]) -> str:
    """``3 all_reduce over dp, 1 broadcast over dp``, or ``nothing``."""
    return ", ".join(f"{count} {what}" for what, count in sorted(found.items())) or "nothing"
