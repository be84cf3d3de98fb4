"""What the checker of varying types says of a program that is wrong: where a pvary is missing."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from meshcomm.errors import VaryingError, held
from meshcomm.make_mesh import make_mesh
from meshcomm.mesh import Mesh
from meshcomm.objects.objects import all_gather_object
from meshcomm.spmd.shard_map.function import shard_map
from meshcomm.spmd.types.reachable import in_place_of
from meshcomm.verifying.blame.line import Blame
from meshcomm.verifying.program import Program, in_group

_LINE = re.compile(r" at (\S+:\d+)")
_MEANT = ("a pvary is missing", "multiplies it by the number of ranks", "which its spec", "takes what is invariant")


def refused(program: Program, mesh: Mesh) -> Blame | None:
    """What the checker of varying types says of the program."""
    text = _checked(program, mesh)
    if text is None or not any(each in text for each in _MEANT):
        return None
    head, *lines = text.split("\n")
    said = {line.strip().partition(": ")[0]: line.strip().partition(": ")[2] for line in lines}
    what = head.partition(": ")[2]
    place = _LINE.search(head) or _LINE.search(said.get("got", ""))
    fix = said.get("fix", "").partition(";")[0]
    where = _LINE.search(head)
    if where and fix.endswith("before"):
        fix += f" {what.partition(' takes')[0]}"
    return Blame("" if place is None else place[1], (what.removesuffix("."),), fix)


def _checked(program: Program, mesh: Mesh) -> str | None:
    """What the first rank is told that the checker refuses."""
    values = iter(leaf.value.clone() for leaf in program.cut)
    leaves = []
    wanted = {id(program.cut[i].value) for i in program.wanted}
    for leaf in program.leaves:
        x = leaf.value
        y = next(values) if isinstance(x, Tensor) else x
        leaves.append(y.requires_grad_() if id(x) in wanted else y)
    specs = tuple(leaf.spec for leaf in program.leaves)
    instead = {key: program.cast(x).clone().requires_grad_(x.requires_grad) for key, _, x in program.closed}
    error = None
    if not in_group() or mesh.place.rank() in mesh.ranks:
        with torch.enable_grad(), in_place_of(program.reach.slots, instead), held():
            try:
                shard_map(
                    program.on_leaves(), mesh=mesh, in_specs=specs, out_specs=program.out_specs, check_vma="error"
                )(*leaves)
            except VaryingError as raised:
                error = str(raised)
            except Exception:
                error = None
    if not in_group():
        return error
    found = all_gather_object(error, "every", mesh=make_mesh({"every": -1}))
    return next((each for each in found if each is not None), None)
