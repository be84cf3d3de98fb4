"""The plan of a reshard: the cheapest way between two layouts, what it sends, and how it is printed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from meshcomm.collectives import check
from meshcomm.errors import fail, names
from meshcomm.layout.grids import layout_grids
from meshcomm.layout.notation import Dim, Layout, Pattern, parse_arrow
from meshcomm.layout.search import Step, cheapest
from meshcomm.layout.shapes import checked_shape, cut, fit
from meshcomm.mesh import Mesh
from meshcomm.pictures.grid import Arrow, Grid, grids
from meshcomm.pictures.picture import Picture
from meshcomm.runtime.process.garbage import LaterCollection


class Plan(NamedTuple):
    """What :func:`meshcomm.reshard` will do. ``str`` prints it with the bytes that each rank sends."""

    text: str
    shape: tuple[int, ...]
    """The global shape, its dims in the order of the left side."""
    itemsize: int
    mesh: dict[str, int]
    steps: tuple[Step, ...]
    dims: tuple[str, ...]
    """The names of the dims."""
    order: tuple[int, ...]
    """Where each dim of the result is on the left."""

    @property
    def bytes_sent(self) -> int:
        """The bytes that each rank sends, in all."""
        return self.itemsize * sum(step.elements for step in self.steps)

    @property
    def bytes_by_axes(self) -> dict[tuple[str, ...], int]:
        """The bytes that each rank sends, per axis or tuple of axes."""
        found: dict[tuple[str, ...], int] = {}
        for step in self.steps:
            if step.elements:
                found[step.axes] = found.get(step.axes, 0) + self.itemsize * step.elements
        return found

    @property
    def collectives(self) -> tuple[str, ...]:
        """The names of those that communicate, in order."""
        return tuple(step.op for step in self.steps if step.elements)

    def __str__(self) -> str:
        lines = [f"{self.text}: {self.bytes_sent:,} bytes sent per rank"]
        for step in self.steps:
            what = f"{step.op} over {' '.join(step.axes)}"
            where = f"dim {self.dims[step.dim]}"
            if step.op == "all_to_all":
                where += f" to dim {self.dims[step.to]}"
            layout = Layout(Dim(name, axes) for name, axes in zip(self.dims, step.after, strict=True))
            told = "" if step.op == "permute" else f", {where}"
            lines.append(f"  {what}{told}: {self.itemsize * step.elements:,} bytes -> {layout}")
        if self.order != tuple(range(len(self.order))):
            lines.append("  the dims are moved: 0 bytes")
        return "\n".join(lines)

    def picture(self) -> Picture:
        """Which rank has which part at first and after each step, and what is sent between."""
        ranks = range(math.prod(self.mesh.values()))
        layout, _ = sides_of("plan", parse_arrow("plan", self.text, self.mesh, 1), self.shape, self.mesh)
        parts: list[Grid | Arrow] = [*layout_grids(layout, self.shape, self.mesh, ranks, str(layout))]
        for step in self.steps:
            layout = Layout(Dim(name, axes) for name, axes in zip(self.dims, step.after, strict=True))
            sent = f"{self.itemsize * step.elements:,} bytes sent" if step.elements else "nothing sent"
            parts.append(Arrow((f"{step.op} over {' '.join(step.axes)}", sent)))
            parts += layout_grids(layout, self.shape, self.mesh, ranks, str(layout))
        return grids(parts, self.text)

    def _repr_html_(self) -> str:
        return self.picture().svg


# ------------------------------------------------------------------------------------------------------- the plan


def sides_of(where: str, pattern: Pattern, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[Layout, Layout]:
    """Both sides of an arrow with their ellipses written out, for a tensor with so many dims."""
    text = pattern.text
    source = fit(where, pattern.inputs[0], shape, sizes, text)
    extra = sum(name.startswith("...") for name in source.names)
    dotted = ["..." in layout.names for layout in (pattern.inputs[0], pattern.output)]
    if dotted[0] != dotted[1]:
        fail(where, "an ellipsis stands on one side only.", got=repr(text), fix="write it on both")
    target = (
        fit(where, pattern.output, shape, sizes, text)
        if len(pattern.output) - dotted[1] + extra == len(shape)
        else None
    )
    if target is None or sorted(source.names) != sorted(target.names):
        left, right = (names(layout.names) or "none" for layout in (pattern.inputs[0], pattern.output))
        fail(where, f"the sides have other dims: {left}; {right}.", got=repr(text), fix="the same names on both sides")
    return _told_apart(source), _told_apart(target)


def _told_apart(layout: Layout) -> Layout:
    """With dims of length 1 numbered, for they all have the same name."""
    ones = itertools.count(1)
    return Layout(dim._replace(name=f"1.{next(ones)}") if dim.name == "1" else dim for dim in layout)


def plan(layouts: str, shape: Sequence[int], mesh: Mesh | None = None, *, dtype: torch.dtype = torch.float32) -> Plan:
    """What :func:`reshard` does, and what it sends.

    Args:
        layouts: ``"src -> dst"``, as for :func:`reshard`.
        shape: the global shape, or a tensor that has it, its dims in the order of ``src``.
        mesh: the current mesh by default.
        dtype: of the tensor.

    Returns: a :class:`Plan`: ``steps``, ``bytes_sent`` per rank, ``bytes_by_axes``, ``collectives``; printed as a list.

    Cost: none.

    Raises:
        MeshError: layouts that are none; other dims on the two sides; a dim that its axes do not divide.

    Example:
        >>> import meshcomm as mc
        >>> print(mc.plan("b (tp s) h -> b s (tp h)", (2, 8, 4), mc.make_mesh({"tp": 4})))
        b (tp s) h -> b s (tp h): 48 bytes sent per rank
          all_to_all over tp, dim s to dim h: 48 bytes -> b s (tp h)
    """
    where = "plan"
    sizes = check.mesh_of(where, "", mesh).shape
    whole = checked_shape(where, shape)
    if not isinstance(dtype, torch.dtype):
        fail(where, f"dtype={dtype!r} is not a dtype.", fix="such as torch.float32")
    with LaterCollection():
        return plan_of(where, parse_arrow(where, layouts, sizes, 1), whole, sizes, dtype.itemsize)


def plan_of(where: str, pattern: Pattern, whole: tuple[int, ...], sizes: dict[str, int], itemsize: int) -> Plan:
    """The plan for a global shape."""
    source, target = sides_of(where, pattern, whole, sizes)
    order = tuple(source.names.index(name) for name in target.names)
    for layout, lengths in ((source, whole), (target, [whole[at] for at in order])):
        cut(where, layout, lengths, sizes, pattern.text)
    spoken = tuple((axis, sizes[axis]) for axis in sizes if axis in pattern.spoken)
    goal: list[tuple[str, ...]] = [()] * len(order)
    for dim, at in zip(target, order, strict=True):
        goal[at] = dim.axes
    steps = cheapest(tuple(dim.axes for dim in source), tuple(goal), whole, spoken)
    return Plan(pattern.text, whole, itemsize, sizes, steps, source.names, order)
