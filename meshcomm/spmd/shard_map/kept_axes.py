"""The axes of a mesh's ranks, with their links and the logs of their calls, from one run of all ranks to the next.

::

    run 1   made by the ranks ──► all calls have met, and nobody has an axis or a link ──► kept by the mesh
    run 2   taken: the ranks of this run are theirs now, and their logs are empty, as if they had just been made

Only what cannot be told from new ones is kept. After an error, where a Work or a graph of the run is still there, where
a trace listens or the ranks have made meshes of their own, the next run makes its own.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from meshcomm.axis import Axis, axes_in
from meshcomm.mesh import Mesh
from meshcomm.runtime.transports.threads.scheduler import World

Axes = dict[Any, Axis]
"""Those of one rank, as it has them: by mesh and name, of which each has several."""


class Kept(NamedTuple):
    """What one run leaves for the next one."""

    axes: list[Axes]
    links: list[Any]
    """The links of all ranks to others, and whose they are."""
    shared: dict[Any, Any]


def take(mesh: Mesh, world: World) -> None:
    """The ranks of ``world``, which has not begun, have what the last run over ``mesh`` has left; once."""
    kept, mesh.kept = mesh.kept, None
    if kept is None or any([link.hooks for link, _ in kept.links]):  # noqa: C419  # a generator takes twice as long
        return
    world.shared, ranks = kept.shared, world.ranks
    for rank, axes in zip(ranks, kept.axes, strict=True):
        rank.axes = axes
    for link, index in kept.links:
        link.sit_down(ranks[index])


def leave(mesh: Mesh, world: World) -> None:
    """``world`` has come to a good end: keep what its ranks had, if nobody can tell."""
    every, links = [rank.axes for rank in world.ranks], []
    for index, axes in enumerate(every):
        own = _nobodys(axes, mesh)
        if own is None:
            return
        links += [(link, index) for link in own]
    for link, _ in links:
        link.sit_down(None)  # what a rank gave is not to be kept
    if links:
        mesh.kept = Kept(every, links, world.shared)


def _nobodys(axes: Axes, mesh: Mesh) -> list[Any] | None:
    """The links to others, if all axes are of this mesh, at rest, and nobody else has one of them, or its link.

    Counted in this frame alone: while the compiler looks at frames, a function that is given a thing adds one.
    """
    found = []
    names = list(map(id, axes.values()))
    for key in axes:
        if key[0] is not mesh:
            return None
        axis = axes[key]
        if key[1] != axes_in(axis.name):  # of its names one is the tuple of the axes of the mesh
            continue
        link: Any = axis.link
        held = names.count(id(axis))
        if axis.size > 1:
            if link.hooks or not link.at_rest():
                return None
            held += link.references_to(axis)
            found.append(link)
            if sys.getrefcount(link) > _ALONE + 2:  # the axis's and the list's
                return None
        if sys.getrefcount(axis) > _ALONE + held:
            return None
    return found


def _alone() -> int:
    """What Python says of a thing that nobody has but who asks."""
    thing = object()
    return sys.getrefcount(thing)


_ALONE = _alone()
