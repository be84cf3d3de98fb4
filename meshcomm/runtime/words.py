"""A call in words: one text, whoever says it: a time-out, the guard, ranks of one process, a dump, a trace.

``all_reduce f32[1000] (op='sum') over 'dp' at train.py:12``: the operation, on what, with which arguments, along which
axis, from which line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from meshcomm.errors import shape_text

__all__ = [
    "Words", "arguments_text", "axis_text", "call_text", "calls_text", "leaves_text", "messages_text", "place_of",
    "primitive_arguments", "primitive_text", "sentence", "told",
]  # fmt: skip

_MOST = 900
"""Characters of a call: of a large tree the first leaves."""
_LEAVES = 8
"""The leaves of a tree that are named."""
_TO = ("permute", "reduce", "gather")
"""The primitives whose one rank is where something goes to."""


# ------------------------------------------------------------------------------------------------------- one call


def call_text(what: str, x: str = "", arguments: Sequence[str] = (), *more: str) -> str:
    """``all_reduce f32[8] (op='sum') that needs a gradient``."""
    shown = f"({', '.join(arguments)})" if arguments else ""
    text = " ".join(part for part in (what, x, shown, *more) if part)
    return text if len(text) <= _MOST else text[:_MOST] + " ..."


def sentence(call: str, axis: str, site: object) -> str:
    """``all_reduce f32[8] (op='sum') over 'dp' at train.py:88``; what is not known (``""`` or None) is left out."""
    return f"{call}{f' over {axis}' if axis else ''}{f' at {site}' if site else ''}"


def arguments_text(names: Iterable[str], values: Iterable[object]) -> list[str]:
    """``op='sum'``, of each that is given."""
    return [f"{name}={value!r}" for name, value in zip(names, values, strict=True) if value is not None]


def leaves_text(tree: Sequence[tuple[str, Any, Any]]) -> str:
    """``x['b'] f32[2], x['w'] f32[8]``."""
    shown = [f"x{path} {shape_text(dtype, shape)}" for path, dtype, shape in tree[:_LEAVES]]
    return ", ".join(shown) + (" ..." if len(tree) > _LEAVES else "")


def primitive_text(what: str, name: str, op: str, dtype: Any, shape: Iterable[int], root: int) -> str:
    """Of a call of which only the primitive is known: ``what`` is what it is called, ``name`` the primitive's."""
    arguments = primitive_arguments(name, op, root)
    x = "" if dtype is None else shape_text(dtype, shape)
    return call_text(what, x, arguments_text(arguments, arguments.values()))


def primitive_arguments(name: str, op: str, root: Any) -> dict[str, object]:
    """What a primitive's reduce op and root are in the public call; of messages the root is no number."""
    found: dict[str, object] = {"op": op} if op else {}
    if isinstance(root, int) and root >= 0:
        found["dst" if name in _TO else "src"] = root
    return found


def messages_text(sent: Iterable[Sequence[Any]], wanted: Iterable[Sequence[Any]]) -> str:
    """``to 1 (tag 0) f32[3], from 2 (tag 0) f32[3]``. Each message: its other side, its tag, and dtype and shape where
    they are known.
    """
    parts = [("to", message) for message in sent] + [("from", message) for message in wanted]
    return ", ".join(f"{way} {it[0]} (tag {it[1]}){f' {shape_text(*it[2:])}' if it[2:] else ''}" for way, it in parts)


class Words(NamedTuple):
    """A call in words, as they travel."""

    place: str
    """Of the rank: ``dp=3,tp=1``."""
    call: str
    """``all_reduce f32[8] (op='sum')``."""
    axis: str
    site: str
    send: tuple[int, ...] = ()
    recv: tuple[int, ...] = ()

    def __str__(self) -> str:
        return sentence(self.call, self.axis, self.site)

    def write(self) -> bytes:
        """For a peer."""
        return json.dumps(self).encode()

    @staticmethod
    def read(data: bytes) -> Words:
        """The inverse of ``write``."""
        place, call, axis, site, send, recv = json.loads(data)
        return Words(place, call, axis, site, tuple(send), tuple(recv))


def place_of(axis: Any) -> str:
    """``dp=3,tp=1``: where this rank is on the mesh of the axis."""
    coordinate = getattr(axis, "coordinate", None)
    return "?" if coordinate is None else ",".join(f"{name}={place}" for name, place in coordinate.items())


def axis_text(axis: Any) -> str:
    """``'dp'``."""
    return repr(getattr(axis, "name", "?"))


# ---------------------------------------------------------------------------------------------------- several ranks


def told(groups: Sequence[tuple[Sequence[str], str]]) -> str:
    """``dp=3,tp=1 called ... at train.py:88; the other 7 called ... at train.py:91``: the fewest first.

    Each group: the places of its ranks, and what they did.
    """
    ordered = sorted(groups, key=lambda group: len(group[0]))
    lines = []
    for at, (places, did) in enumerate(ordered):
        last = at == len(ordered) - 1
        who = f"the other {len(places)}" if last and at > 0 and len(places) > 1 else _some(places)
        lines.append(f"{who} {did}" if did.startswith("called ") else f"{who}: {did}")
    return "; ".join(lines)


def calls_text(calls: Iterable[Words]) -> str:
    """Who called what, equal calls together."""
    groups: dict[str, list[str]] = {}
    for words in calls:
        groups.setdefault(f"called {words}", []).append(words.place)
    return told([(places, did) for did, places in groups.items()])


def _some(places: Sequence[str]) -> str:
    return " and ".join(places) if len(places) < 4 else f"{', '.join(places[:3])} and {len(places) - 3} more"
