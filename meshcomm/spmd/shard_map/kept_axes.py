"""The axes of a mesh's ranks, with their links and the logs of their calls, from one run of all ranks to the next.

::

    run 1   made by the ranks ──► all calls have met, and nobody has an axis or a link ──► kept by the mesh
    run 2   taken: the ranks of this run are theirs now, and their logs are empty, as if they had just been made

Only what cannot be told from new ones is kept: after an error, a Work that is still there, a graph of the run that is
alive, a trace that listens, ranks that have made meshes of their own, the next run makes its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, NamedTuple

from meshcomm.mesh import Axis, Mesh
from meshcomm.runtime.transports.threads.scheduler import Rank, World

Axes = dict[Any, Axis]
"""Those of one rank, as it has them: by mesh and name."""


class Kept(NamedTuple):
    """What one run leaves for the next one."""

    axes: list[Axes]
    shared: dict[Any, Any]


def take(mesh: Mesh, world: World) -> None:
    """The ranks of ``world``, which has not begun, have what the last run over ``mesh`` has left; once."""
    kept, mesh.kept = mesh.kept, None
    if kept is None or any(axis.link.hooks for axes in kept.axes for axis in axes.values()):
        return
    world.shared = kept.shared
    for rank, axes in zip(world.ranks, kept.axes, strict=True):
        rank.axes = axes
        for axis in axes.values():
            _sit_down(axis, rank)


def leave(mesh: Mesh, world: World) -> None:
    """``world`` has come to a good end: keep what its ranks had, if nobody can tell."""
    every = [rank.axes for rank in world.ranks]
    if all([_is_nobodys(axes, mesh) for axes in every]):  # noqa: C419
        for axes in every:
            for axis in axes.values():
                _sit_down(axis, None)  # what a rank gave is not to be kept
        mesh.kept = Kept(every, world.shared)


def _sit_down(axis: Axis, rank: Rank | None) -> None:
    if axis.size > 1:
        link: Any = axis.link
        link.sit_down(rank)


def _is_nobodys(axes: Axes, mesh: Mesh) -> bool:
    """Whether all of them are of this mesh, at rest, and nobody else has one of them, or its link."""
    if any([key[0] is not mesh for key in axes]):  # noqa: C419
        return False
    count = Counter(map(id, axes.values()))
    for axis in axes.values():
        link: Any = axis.link
        if link.hooks or not (axis.size == 1 or link.at_rest()):
            return False
        calls = 0 if axis.size == 1 else link.references_to(axis)
        if _references(axis) > _ALONE + count[id(axis)] + calls or _references(link) > _ALONE + 1:
            return False
    return True


def _references(thing: object) -> int:
    return sys.getrefcount(thing)


def _alone() -> int:
    """What :func:`_references` says of a thing that nobody has but who asks."""
    thing = object()
    return _references(thing)


_ALONE = _alone()
