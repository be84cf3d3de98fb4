"""Strategies for hypothesis: meshes, layouts on them, and global tensors that a layout can cut.

::

    @given(data())
    def test_norm(data):
        sizes = data.draw(strategies.meshes(("dp", "tp")))                  {'dp': 2, 'tp': 3}
        layout = data.draw(strategies.layouts(sizes, dims=2))               '(tp a) (dp b)'
        x = data.draw(strategies.tensors(layout, sizes))                    f64[6, 4]
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise ImportError("meshcomm.testing.strategies needs hypothesis: pip install 'meshcomm[testing]'") from missing

from meshcomm.errors import fail

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIM = re.compile(r"\(([^()]*)\)|(\S+)")


@st.composite
def meshes(
    draw: st.DrawFn, axes: Sequence[str] = ("dp", "tp"), *, most: int = 8, sizes: Sequence[int] = (1, 2, 3, 4)
) -> dict[str, int]:
    """Sizes of a mesh with these axes, of at most so many ranks; hypothesis shrinks to sizes of 1."""
    if not axes or not all(isinstance(axis, str) and axis.isidentifier() for axis in axes):
        fail("testing.strategies.meshes", f"axes={axes!r} are no names of axes.", fix='("dp", "tp")')
    found: dict[str, int] = {}
    for axis in axes:
        room = most // math.prod(found.values())
        fits = [size for size in sizes if size <= room]
        if not fits:
            what = f"no size for axis {axis!r} leaves at most {most} ranks."
            fail("testing.strategies.meshes", what, got=f"sizes {tuple(sizes)}", fix="a size of 1 among them")
        found[axis] = draw(st.sampled_from(sorted(fits)))
    return found


@st.composite
def layouts(
    draw: st.DrawFn, mesh: Mapping[str, int] | Sequence[str], *, dims: int | Sequence[str] = 2, every: bool = False
) -> str:
    """A layout of a tensor of so many dims, or of dims of these names, in which each axis of the mesh cuts at most one
    of them; ``every``: each does.
    """
    names = tuple(_unused(mesh, dims)) if isinstance(dims, int) else tuple(dims)
    if not names and every and mesh:
        fail("testing.strategies.layouts", "a tensor without dims cannot be cut.", fix="every=False")
    over: dict[str, list[str]] = {name: [] for name in names}
    for axis in draw(st.permutations(list(mesh))):
        choices = [*names] if every else [None, *names]
        name = draw(st.sampled_from(choices)) if choices else None
        if name is not None:
            over[name].append(axis)
    return " ".join(f"({' '.join(axes)} {name})" if axes else name for name, axes in over.items())


def _unused(mesh: Mapping[str, int] | Sequence[str], count: int) -> list[str]:
    return [letter for letter in _LETTERS if letter not in mesh][:count]


@st.composite
def tensors(
    draw: st.DrawFn,
    layout: str,
    mesh: Mapping[str, int],
    *,
    dtype: torch.dtype = torch.float64,
    most: int = 3,
    requires_grad: bool = False,
) -> Tensor:
    """A global tensor of random numbers, each dim of which the layout's axes divide: from one to ``most`` elements of
    it on each rank. Its numbers follow from a seed that is drawn, so that a failing example is given again.
    """
    shape = []
    for parts, alone in _DIM.findall(layout):
        axes = [] if alone else parts.split()[:-1]
        unknown = [axis for axis in axes if axis not in mesh]
        if unknown:
            fail("testing.strategies.tensors", f"no axis {unknown[0]!r} in the mesh.", got=f"{layout!r}; {dict(mesh)}")
        shape.append(math.prod(mesh[axis] for axis in axes) * draw(st.integers(1, most)))
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    if dtype == torch.bool:
        return torch.rand(shape, generator=numbers, device="cpu") < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-8, 9, shape, generator=numbers, device="cpu").to(dtype)
    return (
        torch.randn(shape, generator=numbers, dtype=torch.float64, device="cpu").to(dtype).requires_grad_(requires_grad)
    )
