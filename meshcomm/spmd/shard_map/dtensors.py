"""DTensors as inputs and outputs of shard_map, on processes."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from torch import Tensor

from meshcomm.layout.notation import Dim, Layout
from meshcomm.layout.reshard import reshard
from meshcomm.mesh import Mesh

# It imports DTensor, a second and more, which whoever has one has done already.
_dtensor = functools.partial(importlib.import_module, "meshcomm.layout.dtensor")


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor, without importing it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def part_of(x: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """This rank's part in this layout of a DTensor in any."""
    part, lies = _dtensor().from_dtensor(x, mesh=mesh)
    wanted = _numbered(layout)
    return part if lies == wanted else reshard(part, f"{lies} -> {wanted}", mesh=mesh)


def as_dtensor(y: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """The DTensor of which this rank has its part."""
    whole: Tensor = _dtensor().to_dtensor(y, _numbered(layout), mesh)
    return whole


def _numbered(layout: Layout) -> str:
    """With the names that :func:`from_dtensor` gives to dims."""
    return str(Layout(Dim(f"d{i}", dim.axes) for i, dim in enumerate(layout)))
