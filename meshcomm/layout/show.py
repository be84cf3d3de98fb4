"""show: how a tensor lies on a mesh, and a mesh, plan or trace, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from meshcomm.collectives import check
from meshcomm.errors import fail
from meshcomm.layout.grids import layout_grids
from meshcomm.layout.notation import parse
from meshcomm.layout.plan import plan
from meshcomm.layout.shapes import checked_shape, cut, fit
from meshcomm.mesh import Mesh
from meshcomm.pictures.grid import grids
from meshcomm.pictures.picture import Picture


@runtime_checkable
class Drawn(Protocol):
    """What draws itself."""

    def picture(self) -> Picture:
        """Of it."""
        ...


def show(what: str | Drawn, shape: Sequence[int] | None = None, mesh: Mesh | None = None) -> Picture:
    """Draw which rank has which part of a tensor; or a mesh, a :class:`Plan`, a :class:`Trace`.

    Type: nothing of tensors: a picture is the same on every rank.

    Args:
        what: a layout such as ``"(dp b) (tp d)"``; ``"src -> dst"``, of which the plan is drawn; or a mesh, a plan, a
            trace.
        shape: of a layout, the global shape, or a tensor that has it.
        mesh: of a layout, the current mesh by default.

    Returns: a ``Picture``: text when it is printed or stands at the prompt, SVG in a notebook, and
        ``save("name.svg")``, ``.html`` or ``.txt``. Colours can be told apart by the colour-blind.

    Backward: none, for there is nothing to differentiate.

    Cost: none.

    Raises:
        MeshError: a layout that is none, or does not fit the shape; no shape; nothing that can be drawn.

    Example:
        >>> import meshcomm as mc
        >>> mc.show("(dp b) (tp d)", (4, 6), mc.make_mesh({"dp": 2, "tp": 2}))
        (dp b) (tp d) of (4, 6): (2, 3) on each rank
                  d 0:3    d 3:6
          b 0:2   rank 0   rank 1
          b 2:4   rank 2   rank 3

    Source: ``jax.debug.visualize_array_sharding``.
    """
    where = "show"
    if not isinstance(what, str):
        if not isinstance(what, Drawn):
            fail(
                where, f"there is no picture of a {type(what).__name__}.", fix="a layout, a mesh, a plan or a trace",
            )  # fmt: skip
        return what.picture()
    if shape is None:
        fail(where, f"the layout {what!r} needs a shape.", fix=f"mc.show({what!r}, x.shape)")
    if "->" in what:
        return plan(what, shape, mesh).picture()
    here = check.mesh_of(where, "", mesh)
    whole = checked_shape(where, shape)
    layout = fit(where, parse(where, what, here.shape), whole, here.shape, what)
    part = cut(where, layout, whole, here.shape, what)
    title = f"{what} of {whole}: {part} on each rank"
    return grids(layout_grids(layout, whole, here.shape, here.ranks, title), title)
