"""Over which axes the gradients of which parameters of a data parallel module are reduced."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from meshcomm import _torch
from meshcomm.axis import Axis
from meshcomm.collectives.agree import agree
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.parallel.fewer_axes import Axes, Fewer, axis_over
from meshcomm.parallel.stand_ins import Site


class Over:
    """Axes of a mesh, as the rank that asks sees them as one; none: this rank alone."""

    def __init__(self, mesh: Mesh, axes: Axes, where: str) -> None:
        self.mesh, self.axes, self._where = mesh, axes, where
        self._alone = None if axes else axis_over(mesh, axes, where)

    @property
    def axis(self) -> Axis:
        """All of them as one."""
        return self._alone or axis_over(self.mesh, self.axes, self._where)

    def __deepcopy__(self, memo: dict[int, Any]) -> Over:
        return self


class Spread:
    """Of each parameter and buffer of a module, wherever it stands, the axes along which it is the same."""

    def __init__(self, module: nn.Module, over: Over, fewer: Mapping[int, Fewer], ignored: Collection[int]) -> None:
        self.over = over
        self.fewer: dict[Over, list[tuple[nn.Module, str]]] = {}
        """Where those stand that go over fewer axes."""
        self._ignored: list[tuple[nn.Module, str]] = []
        made = {over.axes: over}
        for part in module.modules():
            for name, x in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                known = fewer.get(id(x))
                if id(x) in ignored:
                    self._ignored.append((part, name))
                elif known is not None:
                    axes = known.of(over.axes) if known.told is None else known.told
                    mine = made.setdefault(axes, Over(over.mesh, axes, over._where))
                    self.fewer.setdefault(mine, []).append((part, name))

    def known(self, sites: list[Site]) -> list[Site]:
        """All but those of what is ignored."""
        if not self._ignored:
            return sites
        left = {(id(part), name) for part, name in self._ignored}
        return [site for site in sites if (id(site.module), site.name) not in left]

    def without_ignored(self, here: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same of what is known by name."""
        left = {id(_standing(*at)) for at in self._ignored}
        return {name: x for name, x in here.items() if id(x) not in left}

    def lists(self, tensors: Sequence[Tensor]) -> list[tuple[Over, list[int]]]:
        """Which of these go over which axes, by their places; those that go over all of them first."""
        if not self.fewer:
            return [(self.over, [*range(len(tensors))])]
        over_of = {id(_standing(*at)): over for over, places in self.fewer.items() for at in places}
        found: dict[Over, list[int]] = {over: [] for over in (self.over, *self.fewer)}
        for place, x in enumerate(tensors):
            found[over_of.get(id(x), self.over)].append(place)
        return [(over, places) for over, places in found.items() if places]

    def refuse_others(self, where: str) -> None:
        """MeshError, on every rank, where ranks differ in which axes there are fewer of."""
        axis = self.over.axis
        mine = [zlib.crc32(repr(over.axes).encode()) for over in self.fewer]
        rows = agree([len(mine), zlib.crc32(repr(mine).encode())], axis) if axis.size > 1 else []
        if any(row != rows[0] for row in rows):
            got = f"on index {axis.own_index} along axis {axis.name!r} {[over.axes for over in self.fewer] or 'all'}"
            what = "some parameters go over other axes on one rank than on another."
            fail(where, what, got=got, fix="the same axes= on all ranks, and the same mark_varying before")


def _standing(part: nn.Module, name: str) -> Tensor | None:
    """What stands there now."""
    table = _torch.own_parameters(part)
    return table[name] if name in table else dict(part.named_buffers(recurse=False)).get(name)
