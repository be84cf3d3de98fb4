"""The story of a program that is wrong: the steps of all ranks beside those of one device."""

from __future__ import annotations

import contextlib

from meshcomm.mesh import Mesh
from meshcomm.verifying.blame.followed import follow, follow_tangents
from meshcomm.verifying.blame.story import Story
from meshcomm.verifying.blame.trail import Followed
from meshcomm.verifying.derivatives import Reference
from meshcomm.verifying.program import OnRank


def story_of(reference: Reference, ones: Mesh, mesh: Mesh, kind: str = "vjp", *, to_error: bool = False) -> Story:
    """Run the program on both meshes, step by step. ``kind``: what is wrong. ``to_error``: forward only, as far as it
    comes.
    """
    program, given = reference.program, reference.directions

    def job(rank: OnRank) -> Followed:
        if kind == "jvp":
            return follow_tangents(rank, given.tangents)
        seconds = given.seconds if kind == "second" else None
        return follow(rank, given.cotangents, to_error=to_error, seconds=seconds)

    ranks: list[Followed] = program.run(mesh, job)
    other = Followed([], [], [])
    if program.twin is None:
        other = program.run(ones, job)[0]
    else:
        with contextlib.suppress(Exception):  # it need not run on one device
            other = program.run(ones, job)[0]
    return Story(mesh, ranks, other, kind)
