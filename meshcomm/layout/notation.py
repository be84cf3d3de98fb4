"""The notation: einops' patterns in which parentheses hold mesh axes and a dim, as in ``"(dp b) s (tp d)"``.

einops parses; here is what the parts mean, and where in the string something is wrong.
"""

from __future__ import annotations

import math
import re
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from einops.parsing import ParsedExpression

from meshcomm.elsewhere import layout_said_by
from meshcomm.errors import fail, likely, names
from meshcomm.runtime.axis_names import key_of, sizes_with_key, together_of, written_out

_ELLIPSIS = "..."
_TOKEN = re.compile(r"\.\.\.|\w+|[^ ]")
_CUT, _NAME = re.compile(r"\((?:\w+ )+(\w+)\)"), r"\1"
_NEARLY_AN_ARROW = re.compile(r"[-=<>→⇒]")


class Dim(NamedTuple):
    """One dim of a tensor: its name, and the mesh axes that it is cut over, major first."""

    name: str
    """``"1"`` for a dim of length 1 without a name."""
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"({' '.join((*self.axes, self.name))})" if self.axes else self.name


class Layout(tuple[Dim, ...]):
    """How one tensor lies on a mesh: its dims. Along the axes that none of them names it is invariant."""

    at: tuple[int, ...] = ()
    """Where each dim's name stands in the string that the layout was read from; empty for one made otherwise."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it is cut over, in the order in which they stand."""
        return tuple(axis for dim in self for axis in dim.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dims."""
        return tuple(dim.name for dim in self)

    def parts(self, shape: Mapping[str, int]) -> tuple[int, ...]:
        """Into how many pieces each dim is cut; ``shape`` is that of the mesh."""
        return tuple([math.prod([shape[axis] for axis in dim.axes]) for dim in self])

    def __str__(self) -> str:
        return " ".join(map(str, self))


class Pattern(NamedTuple):
    """A whole string: the layouts on the left of the arrow and the one on its right."""

    text: str
    inputs: tuple[Layout, ...]
    output: Layout

    @property
    def spoken(self) -> tuple[str, ...]:
        """The mesh axes that are named anywhere in it."""
        return tuple(dict.fromkeys(axis for layout in (*self.inputs, self.output) for axis in layout.axes))


def parse(where: str, text: object, mesh: Mapping[str, int]) -> Layout:
    """One layout; ``mesh`` is the shape of the mesh. An ellipsis is a dim called ``...``, see :func:`expand`."""
    return _parse(where, _string(where, text, mesh, "(dp b) s (tp d)"), key_of(mesh))


def parse_arrow(where: str, text: object, mesh: Mapping[str, int], inputs: int | None = None) -> Pattern:
    """Layouts, an arrow and a layout. ``inputs``: how many there must be on the left."""
    example = "b (tp s) -> (tp b) s" if inputs == 1 else "b d, d (tp f) -> b (tp f)"
    return _parse_arrow(where, _string(where, text, mesh, example), key_of(mesh), inputs)


def expand(layout: Layout, count: int) -> Layout:
    """With its ellipsis, if it has one, written as so many dims, counted from the last."""
    dims: list[Dim] = []
    at: list[int | None] = []
    for dim, place in zip(layout, layout.at or [None] * len(layout), strict=True):
        some = [Dim(f"...{i}") for i in range(count, 0, -1)] if dim.name == _ELLIPSIS else [dim]
        dims += some
        at += [place] * len(some)
    return _placed(dims, at)


def _placed(dims: Sequence[Dim], at: Sequence[int | None]) -> Layout:
    layout = Layout(dims)
    layout.at = tuple(place for place in at if place is not None)
    return layout


def pointed(what: str, text: str, at: int | None = None) -> str:
    """What is wrong, and under it the string with a caret under the character ``at``."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    if at is None:
        return f"{what}\n    {shown}"
    wide = sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "FW" else 1 for c in shown[:at]
    )
    return f"{what}\n    {shown}\n    {' ' * wide}^"


def as_text(spec: Any) -> Any:
    """A PartitionSpec as the layout that it says; what is not one as it is."""
    return spec if isinstance(spec, str) else layout_said_by(spec) or spec


def _string(where: str, text: object, mesh: Mapping[str, int], example: str) -> str:
    if not isinstance(text, str):
        said = layout_said_by(text)
        if said is not None and "->" in example:
            said = f"{_CUT.sub(_NAME, said)} -> {said}"
        fail(
            where,
            f"a layout is a string, not {type(text).__name__}.",
            got=f"mesh {dict(mesh)}",
            fix=f"write it as {example!r}" if said is None else f"write it as {said!r}",
        )
    return text


@lru_cache(1000)
def _parse(where: str, text: str, mesh: tuple[tuple[str, Any], ...]) -> Layout:
    return _Reader(where, text, sizes_with_key(mesh)).layout(0, len(text))


@lru_cache(1000)
def _parse_arrow(where: str, text: str, mesh: tuple[tuple[str, Any], ...], inputs: int | None) -> Pattern:
    reader = _Reader(where, text, sizes_with_key(mesh))
    arrow = reader.arrow()
    commas = [at for at in range(arrow) if text[at] == ","]
    if "," in text[arrow:]:
        reader.wrong(text.index(",", arrow), "there is one result.", "write one layout after the arrow")
    starts, ends = [0, *(at + 1 for at in commas)], [*commas, arrow]
    if inputs is not None and len(starts) != inputs:
        at = commas[inputs - 1] if len(commas) >= inputs > 0 else arrow
        what = f"{_count(len(starts), 'layout')} for {_count(inputs, 'tensor')}."
        reader.wrong(at, what, "write one layout per tensor, with commas between them")
    sides = [reader.layout(start, end) for start, end in zip(starts, ends, strict=True)]
    return Pattern(text, tuple(sides), reader.layout(arrow + 2, len(text)))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class _Reader:
    """Takes layouts out of a string, and points into it."""

    def __init__(self, where: str, text: str, mesh: dict[str, int]) -> None:
        self.where, self.text, self.mesh = where, text, mesh
        self.together = together_of(mesh)
        self.known = (*mesh, *self.together)

    def wrong(self, at: int, what: str, fix: str) -> NoReturn:
        """Fail, pointing at a character."""
        fail(self.where, pointed(what, self.text, at), got=f"mesh {self.mesh}", fix=fix)

    def arrow(self) -> int:
        """Where the only arrow stands."""
        arrows = [found.start() for found in re.finditer("->", self.text)]
        fix = 'from -> to, as in "b (tp s) -> b s"'
        if len(arrows) > 1:
            self.wrong(arrows[1], f"{len(arrows)} arrows instead of one.", fix)
        if not arrows:
            near = _NEARLY_AN_ARROW.search(self.text)
            self.wrong(near.start() if near else len(self.text), "there is no arrow.", fix)
        return arrows[0]

    def layout(self, start: int, end: int) -> Layout:
        """The layout between these places of the string."""
        at = self._check(start, end)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about names that are keywords
            try:
                parsed = ParsedExpression(self.text[start:end])
            except Exception as error:
                self.wrong(start, f"einops cannot read this: {error}.", "see einops' documentation of patterns")
        dims = []
        for part in parsed.composition:
            if isinstance(part, str):
                dims.append(Dim(_ELLIPSIS))
            elif not part:
                dims.append(Dim("1"))
            else:
                *axes, name = part
                dims.append(Dim(str(name), written_out(map(str, axes), self.together)))
        return _placed(dims, at)

    def _check(self, start: int, end: int) -> list[int]:
        """Whatever is wrong is found here, where its place is known. Gives the places of the dims."""
        seen: dict[str, str] = {}
        places: list[int] = []
        group: list[tuple[str, int]] | None = None
        opened = behind = start
        for token, at in self._tokens(start, end):
            if token == "(":
                if group is not None:
                    self.wrong(at, "parentheses inside parentheses.", "put all mesh axes of a dim in one pair")
                group, opened = [], at
            elif token == ")":
                if group is None:
                    self.wrong(at, "a parenthesis is closed that was not opened.", 'as in "(tp d)"')
                self._check_group(group, opened)
                places.append(group[-1][1])
                group = None
            else:
                self._check_name(token, at, seen)
                if at == behind and at > start:
                    self.wrong(at, "an ellipsis stands by itself.", "put a space between it and a name")
                behind = at + len(token)
                if group is not None:
                    group.append((token, at))
                elif token in self.known:
                    whole = f', which is P("{token}"): "({token} dim0) ..."' if self.text.strip() == token else ""
                    fix = f"write the dim that it cuts behind it: ({token} name){whole}"
                    self.wrong(at, f"{token!r} is a mesh axis and stands as a dim.", fix)
                else:
                    places.append(at)
        if group is not None:
            self.wrong(opened, "a parenthesis is not closed.", 'as in "(tp d)"')
        return places

    def _tokens(self, start: int, end: int) -> Iterator[tuple[str, int]]:
        for found in _TOKEN.finditer(self.text, start, end):
            yield found.group(), found.start()

    def _check_name(self, token: str, at: int, seen: dict[str, str]) -> None:
        if token == "1":
            return
        if token != _ELLIPSIS and not token.isidentifier():
            self._check_symbol(token, at)
        if token.startswith("_") or token.endswith("_"):
            self.wrong(at, f"einops' names neither begin nor end with an underscore, as {token!r} does.", "rename it")
        if seen.get(token) == token:
            kind = "mesh axis" if token in self.known else "dim"
            fix = "a tensor is cut over an axis once" if token in self.known else "give each dim a name of its own"
            what = "an ellipsis stands" if token == _ELLIPSIS else f"the {kind} {token!r} stands"
            self.wrong(at, f"{what} twice in one layout.", "write one" if token == _ELLIPSIS else fix)
        for part in written_out((token,), self.together):
            if part in seen:
                both = " and ".join(
                    f"{name!r}, which is {' '.join(self.together[name])}" if name in self.together else repr(name)
                    for name in (seen[part], token)
                )
                fix = "a tensor is cut over an axis once"
                self.wrong(at, f"the mesh axis {part!r} is used twice in one layout: in {both}.", fix)
            seen[part] = token
        seen[token] = token

    def _check_symbol(self, token: str, at: int) -> NoReturn:
        """What is no name, in the words of what it may have been meant to be."""
        known = "names of dims, names of mesh axes, parentheses, 1 and ..."
        if token.isdigit():
            what = f"1, for a dim of length 1, is the only number in a layout, and {token!r} is another."
            self.wrong(at, what, "give the dim a name; the tensor knows its length")
        if token[0].isalnum() or token[0] == "_":
            self.wrong(at, f"{token!r} is not a name.", f"letters, digits and underscores, a letter first; {known}")
        if token == ",":
            self.wrong(
                at, "a comma stands between the layouts of two tensors, and here is one.", "part dims with spaces"
            )
        if self.text.startswith("->", at):
            self.wrong(at, "an arrow leads from one layout to another, and here is one.", "write a single layout")
        if token.isspace():
            self.wrong(
                at, f"names are parted by spaces, not by {token!r}.", "write the layout on one line, with spaces"
            )
        self.wrong(at, f"{token!r} means nothing here.", known)

    def _check_group(self, group: Sequence[tuple[str, int]], opened: int) -> None:
        if not group:
            self.wrong(opened, "parentheses with nothing in them.", "write 1 for a dim of length 1")
        *axes, (name, at) = group
        for axis, place in axes:
            if axis in (_ELLIPSIS, "1") or axis not in self.known:
                what = f"{axis!r} is not an axis of the mesh; in parentheses all but the last are."
                fix = f"one of {names(self.known)}; a dim stands last, as in (tp d){likely(axis, self.known)}"
                self.wrong(place, what, fix)
        if name in self.known:
            what = f"the last name in parentheses is a dim, and {name!r} is a mesh axis."
            self.wrong(at, what, f"write the name of the dim behind it: ({' '.join([*(a for a, _ in axes), name])} d)")
        if name in (_ELLIPSIS, "1"):
            self.wrong(at, f"{name!r} cannot be cut.", "give the dim a name")
