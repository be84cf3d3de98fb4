"""Names of mesh axes: one, several in order, or a name that stands for several: the one place that writes those out.

::

    mesh {"pp": 2, "efsdp": 2, "ep": 4} with names {"fsdp": ("efsdp", "ep")}

    "fsdp"          ──► ("efsdp", "ep")          what is behind this line knows the axes of the mesh only
    ("pp", "fsdp")  ──► ("pp", "efsdp", "ep")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshcomm.elsewhere import layout_said_by
from meshcomm.errors import fail, likely, names

Together = Mapping[str, tuple[str, ...]]
"""Names that stand for several axes each, and those axes, major first."""


class Sizes(dict[str, int]):
    """The size of each axis of a mesh, and the names that stand for several of them."""

    def __init__(self, sizes: Mapping[str, int], together: Together) -> None:
        super().__init__(sizes)
        self.together = dict(together)


def together_of(sizes: Mapping[str, int]) -> Together:
    """The names that stand for several axes of a mesh of these sizes; most meshes have none."""
    return sizes.together if isinstance(sizes, Sizes) else {}


def key_of(sizes: Mapping[str, int]) -> tuple[tuple[str, Any], ...]:
    """The sizes and names of a mesh as what a cache can be asked with."""
    return (*sizes.items(), *together_of(sizes).items())


def sizes_with_key(key: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """Undoes :func:`key_of`."""
    sizes = {name: size for name, size in key if not isinstance(size, tuple)}
    together = {name: axes for name, axes in key if isinstance(axes, tuple)}
    return Sizes(sizes, together) if together else sizes


def written_out(parts: Iterable[str], together: Together) -> tuple[str, ...]:
    """These names, with its axes in place of each that stands for several."""
    return tuple([axis for part in parts for axis in together.get(part, (part,))])


def checked_names(name: object, sizes: Mapping[str, int], where: str) -> tuple[str, ...]:
    """The axes that a name is of, or a tuple of names, as one; each of them once."""
    parts: tuple[Any, ...] = name if isinstance(name, tuple) else (name,)
    together = together_of(sizes)
    for part in parts:
        if not isinstance(part, str) or (part not in sizes and part not in together):
            what = f"no axis {part!r} in the mesh." if isinstance(part, str) else f"an axis is a name, not {part!r}."
            said = None if isinstance(part, str) else layout_said_by(name)
            layout = "" if said is None else f"; of a PartitionSpec the layout is {said!r}, for mc.reshard"
            known = (*sizes, *together)
            fail(
                where,
                what,
                got=f"axis {name!r}; {_mesh(sizes)}",
                fix=f"one of {names(known)}, or a tuple{likely(part, known)}{layout}",
            )
    axes = written_out(parts, together) if together else parts
    if len(set(axes)) != len(axes):
        fail(where, "an axis is named twice.", got=f"axis {name!r}; {_mesh(sizes)}", fix="name each axis once")
    if not axes:
        fail(where, "no axis is named.", got=f"axis (); {_mesh(sizes)}", fix=f"one of {names(sizes)}")
    return axes


def _mesh(sizes: Mapping[str, int]) -> str:
    together = together_of(sizes)
    return f"mesh {dict(sizes)}{f' with names {dict(together)}' if together else ''}"


def checked_together(where: str, given: object, sizes: Mapping[str, int]) -> Together:
    """``names=`` of a mesh: each stands for axes of it that are neighbours, in their order, and no axis for two."""
    example = 'such as names={"fsdp": ("efsdp", "ep")}'
    if not isinstance(given, Mapping):
        fail(where, f"names is no mapping but {type(given).__name__}.", fix=example)
    order, taken, found = list(sizes), dict[str, str](), dict[str, tuple[str, ...]]()
    got = f"names {dict(given)}; mesh {dict(sizes)}"
    for name, parts in given.items():
        if not isinstance(name, str) or not name.isidentifier():
            fail(where, f"the name {name!r} is not an identifier.", got=got, fix=example)
        if name in sizes:
            fail(where, f"{name!r} is an axis already.", got=got, fix="a name that no axis has")
        if not isinstance(parts, (tuple, list)) or not parts:
            fail(where, f"{name!r} stands for {parts!r}, which is no tuple of axes.", got=got, fix=example)
        for part in parts:
            if not isinstance(part, str) or part not in sizes:
                fix = f"of {names(sizes)}{likely(str(part), sizes)}"
                fail(where, f"{name!r} stands for {part!r}, which is no axis of the mesh.", got=got, fix=fix)
            if part in taken:
                whose = f"{taken[part]!r} and {name!r}" if taken[part] != name else f"{name!r} twice"
                fail(where, f"axis {part!r} is in {whose}.", got=got, fix="each axis in one name at most, once")
            taken[part] = name
        first = order.index(parts[0])
        if list(parts) != order[first : first + len(parts)]:
            inside = tuple(sorted(parts, key=order.index))
            what = f"the axes of {name!r} are not neighbours in the mesh, in its order."
            side_by_side = list(inside) == order[order.index(inside[0]) :][: len(inside)]
            fix = repr(inside) if side_by_side else "make the mesh with them side by side, major first"
            fail(where, what, got=got, fix=fix)
        found[name] = tuple(parts)
    return found


def ranks_along(
    sizes: Mapping[str, int], ranks: tuple[int, ...], parts: tuple[str, ...], home: Mapping[str, int]
) -> tuple[int, ...]:
    """The ranks of a mesh that share the place ``home`` on all axes but ``parts``, in the order of those."""
    if parts == tuple(sizes):
        return ranks
    strides, step = {}, len(ranks)
    for name, length in sizes.items():
        strides[name] = step = step // length
    base = sum(home[name] * stride for name, stride in strides.items() if name not in parts)
    places = [base]
    for name in parts:
        steps = [i * strides[name] for i in range(sizes[name])]
        places = [place + step for place in places for step in steps]
    return tuple([ranks[place] for place in places])
