"""A call in words: one text, whoever says it: a time-out, the guard, ranks of one process, a dump, a trace.

``all_reduce f32[1000] (op='sum') over 'dp' at train.py:12``: the operation, on what, with which arguments, along which
axis, from which line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from meshcomm.errors import shape_text

_MOST = 900
"""Characters of a call: of a large tree the first leaves."""
_LEAVES = 8
"""The leaves of a tree that are named."""
_GROUPS, _PARTS = 3, 4
"""How much of what differs is told of."""
_SHORT = 300
"""Characters of a value that are shown."""
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
    send: Sequence[int] = ()
    recv: Sequence[int] = ()
    parts: Mapping[str, str] = {}
    """Names and values of what is compared; ``operation``, ``dtype`` and ``shape`` among them."""
    moved: str = ""
    """What the primitive sees."""

    def __str__(self) -> str:
        return sentence(self.call, self.axis, self.site)

    def write(self) -> bytes:
        """For a peer."""
        return json.dumps(self).encode()

    @staticmethod
    def read(data: bytes) -> Words:
        """The inverse of ``write``."""
        return Words(*json.loads(data))

    def unlike(self, other: Words) -> list[tuple[str, str, str]]:
        """What differs, the operation or arguments: its name, its value here and its value there."""
        mine, theirs = self.parts, other.parts
        names = [*mine, *(each for each in theirs if each not in mine)]
        if mine.get("operation") != theirs.get("operation"):
            names = ["operation"]
        if self.moved == other.moved:  # then these may differ, with sizes
            names = [name for name in names if name not in ("dtype", "shape")]
        none = "not there"
        found = [(name, mine.get(name, none), theirs.get(name, none)) for name in names]
        return [each for each in found if each[1] != each[2]]


def place_of(axis: Any) -> str:
    """``dp=3,tp=1``: where this rank is on the mesh of the axis."""
    coordinate = getattr(axis, "own_coordinate", None)
    return "?" if coordinate is None else ",".join(f"{name}={place}" for name, place in coordinate.items())


def axis_text(axis: Any) -> str:
    """``'dp'``."""
    return repr(getattr(axis, "name", "?"))


# ---------------------------------------------------------------------------------------------------- several ranks


def ranks_text(groups: Sequence[tuple[Sequence[str], str]]) -> str:
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
    """Who called what, equal calls together, and which arguments of them differ."""
    groups: dict[str, list[Words]] = {}
    for words in calls:
        groups.setdefault(f"called {words}", []).append(words)
    places = {did: [words.place for words in same] for did, same in groups.items()}
    unlike = differing([(f"on {_some(places[did])}", same[0]) for did, same in groups.items()], operation=False)
    return "; ".join([ranks_text([(where, did) for did, where in places.items()]), *unlike.values()])


def differing(groups: Sequence[tuple[str, Words]], *, operation: bool = True) -> dict[str, str]:
    """The arguments that differ, by name: ``op='sum' on dp=0, 'max' on dp=1``. Each group: who it is, and what it
    called; the others are compared with the first. ``operation``: where that differs, say so.
    """
    shown: dict[str, list[str]] = {}
    for there, theirs in groups[1 : 1 + _GROUPS]:
        here, mine = groups[0]
        for name, own, other in mine.unlike(theirs)[:_PARTS]:
            shown.setdefault(name, [f"{name}={_cut(own)} {here}"]).append(f"{_cut(other)} {there}")
    return {name: ", ".join(each) for name, each in shown.items() if operation or name != "operation"}


def _cut(value: str) -> str:
    return value if len(value) <= _SHORT else f"{value[:_SHORT]} ..."


def _some(places: Sequence[str]) -> str:
    return " and ".join(places) if len(places) < 4 else f"{', '.join(places[:3])} and {len(places) - 3} more"
