"""What a rank says of a call that it makes, so that others can compare it with theirs and put it into words."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from meshcomm.errors import shape_text
from meshcomm.runtime.callsite import CallSite, called_at, in_backward
from meshcomm.runtime.transports.protocol import Note, Primitive
from meshcomm.runtime.whose import differ

__all__ = ["Meant", "Said", "Words", "axis_text", "calls_text", "digest_of", "fingerprint", "place_of", "told"]

_MOST = 900
"""Bytes of a description: of a large tree the first leaves."""
_RUNS = 250
"""The most runs of an all_to_all that are compared."""
_LEAVES = 1000
"""The leaves of a tree that are put into words."""
_NAMED = re.compile(r"( \w*dim=\d+)+$")
"""The dims at the end of a leaf's path."""
_GRADIENTS = {False: 0, True: 1, None: 2}


class Words(NamedTuple):
    """A call in words."""

    place: str
    """Of the rank: ``dp=3,tp=1``."""
    call: str
    """``all_reduce f32[8] (op='sum')``."""
    axis: str
    site: str
    send: tuple[int, ...] = ()
    recv: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.call} over {self.axis} at {self.site}"

    def write(self) -> bytes:
        """For a peer."""
        return json.dumps(self).encode()

    @staticmethod
    def read(data: bytes) -> Words:
        """The inverse of ``write``."""
        place, call, axis, site, send, recv = json.loads(data)
        return Words(place, call, axis, site, tuple(send), tuple(recv))


class Said(NamedTuple):
    """A call in numbers, which are equal on all ranks that call the same."""

    digest: tuple[int, int]
    gradient: int
    """Whether one is needed: no, yes, unknown; and above these two bits the word of the leaf whose gradient it is."""
    words: bytes

    def agrees(self, digest: tuple[int, int], gradient: int) -> bool:
        """Whether another rank has called the same."""
        if self.digest != digest or differ(self.gradient >> 2, gradient >> 2):
            return False
        mine, theirs = self.gradient & 3, gradient & 3
        return mine == theirs or 2 in (mine, theirs)


def fingerprint(note: Note, what: Primitive, site: CallSite) -> Said:
    """What is said of this primitive, which belongs to this note."""
    few = len(what.send) <= _RUNS
    words = Words(
        place_of(note.axis), _call_text(note, what), axis_text(note.axis), called_at(site, backward=in_backward()),
        tuple(what.send) if few else (), tuple(what.recv) if few else (),
    )  # fmt: skip
    return Said(digest_of(note, what), _GRADIENTS[note.needs_grad] + (note.word << 2), words.write())


def digest_of(note: Note, what: Primitive) -> tuple[int, int]:
    """Two numbers of 64 bits that are equal where the same is called."""
    compared = note.what, note.given, what.key, note.fixed, note.tree
    digest = hashlib.blake2b(repr(compared).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)


class Meant(NamedTuple):
    """What a digest stands for, in words."""

    call: str
    """``all_reduce f32[8] (op='sum')``."""
    parts: Sequence[Sequence[str]]
    """Names and values of what is compared; ``operation``, ``dtype`` and ``shape`` among them."""
    moved: str
    """What the primitive sees."""

    @staticmethod
    def of(note: Note, what: Primitive) -> Meant:
        """This primitive, which belongs to this note."""
        parts = [("operation", note.what)]
        parts += [(name, repr(value)) for name, value in zip(note.names, note.given, strict=True)]
        for path, dtype, shape in note.tree[:_LEAVES]:
            bare = _NAMED.sub("", path)
            parts.append((f"x{bare}", shape_text(dtype, shape) + path[len(bare) :]))
        if not note.tree and note.dtype is not None:
            parts += [("dtype", str(note.dtype)), ("shape", str(list(note.shape)))]
        return Meant(_call_text(note, what), parts, repr((what.key, note.fixed)))

    def write(self) -> bytes:
        """For others."""
        return json.dumps(self).encode()

    @staticmethod
    def read(data: bytes) -> Meant:
        """The inverse of ``write``."""
        return Meant(*json.loads(data))

    def unlike(self, other: Meant) -> list[tuple[str, str, str]]:
        """What differs: its name, its value here and its value there."""
        mine, theirs = (_pairs(each.parts) for each in (self, other))
        if mine["operation"] != theirs["operation"]:
            return [("operation", mine["operation"], theirs["operation"])]
        names = [name for name in (*mine, *(each for each in theirs if each not in mine)) if name != "operation"]
        if self.moved == other.moved:  # then these may differ, with sizes
            names = [name for name in names if name not in ("dtype", "shape")]
        none = "not there"
        found = [(name, mine.get(name, none), theirs.get(name, none)) for name in names]
        return [each for each in found if each[1] != each[2]]


def _pairs(parts: Sequence[Sequence[str]]) -> dict[str, str]:
    return dict(zip(*zip(*parts, strict=True), strict=True)) if parts else {}


def _call_text(note: Note, what: Primitive) -> str:
    parts = [note.what]
    if note.tree:
        parts.append(", ".join(f"x{path} {shape_text(dtype, shape)}" for path, dtype, shape in note.tree[:8]))
        parts += ["..."] if len(note.tree) > 8 else []
    elif note.dtype is not None:
        parts.append(shape_text(note.dtype, note.shape))
    elif what.x is not None:
        parts.append(shape_text(what.x.dtype, what.x.shape))
    shown = [f"{name}={value!r}" for name, value in zip(note.names, note.given, strict=True) if value is not None]
    if what.name == "all_to_all" and what.send:
        shown.append(f"sending {list(what.send)} and receiving {list(what.recv)} elements")
    parts += [f"({', '.join(shown)})"] if shown else []
    parts += ["that needs a gradient"] if note.needs_grad else []
    parts += [f"for {note.whose}"] if note.whose is not None else []
    text = " ".join(parts)
    return text if len(text) <= _MOST else text[:_MOST] + " ..."


def place_of(axis: Any) -> str:
    """``dp=3,tp=1``: where this rank is on the mesh of the axis."""
    coordinate = getattr(axis, "coordinate", None)
    return "?" if coordinate is None else ",".join(f"{name}={place}" for name, place in coordinate.items())


def axis_text(axis: Any) -> str:
    """``'dp'``."""
    return repr(getattr(axis, "name", "?"))


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
