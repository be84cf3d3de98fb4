"""Layouts as DTensor's placements, and tensors from one to the other.

The only module that imports DTensor, a second and more; so it is loaded when one of its functions is first asked for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshcomm.collectives import check
from meshcomm.errors import fail, names
from meshcomm.layout.notation import Dim, Layout, as_text, parse, pointed
from meshcomm.layout.shapes import dim_names, fit, no_ellipsis
from meshcomm.mesh import Mesh

# ---------------------------------------------------------------------------------------------------- the notations


def placements(layout: str, mesh: Mesh | None = None) -> tuple[Placement, ...]:
    """A layout as DTensor's placements: per mesh axis ``Shard(dim)`` or ``Replicate()``.

    Type: names, the same on every rank.

    Args:
        layout: such as ``"(dp b) s (tp d)"``; no ellipsis. Several axes of one dim in the order of the mesh, for
            placements know no other.
        mesh: the current mesh by default; an in-process one too.

    Returns: a tuple, one entry per axis in the order of the mesh.

    Backward: none, for there are no tensors.

    Cost: none.

    Raises:
        MeshError: a layout that is none; an ellipsis; axes of a dim in another order than that of the mesh.

    Example:
        >>> import meshcomm as mc
        >>> mc.placements("(dp b) s (tp d)", mc.make_mesh({"dp": 2, "pp": 2, "tp": 2}))
        (Shard(dim=0), Replicate(), Shard(dim=2))

    Source: ``torch.distributed.tensor.placement_types``.
    """
    where = "placements"
    sizes = check.mesh_of(where, "", mesh).shape
    parsed = parse(where, layout, sizes)
    no_ellipsis(where, parsed, layout, sizes)
    return _placements(where, parsed, layout, sizes)


def _placements(where: str, layout: Layout, text: str, sizes: dict[str, int]) -> tuple[Placement, ...]:
    order = list(sizes)
    for dim in layout:
        axes = tuple(sorted(dim.axes, key=order.index))
        wrong = next((axis for axis, other in zip(dim.axes, axes, strict=True) if axis != other), None)
        if wrong is not None:
            what = f"DTensor cuts a dim over axes in the order of the mesh, and {dim} has another."
            fix = f"{Dim(dim.name, axes)}, or make the mesh with its axes in the other order"
            found = re.search(rf"\b{wrong}\b", text)
            fail(where, pointed(what, text, found and found.start()), got=f"mesh {sizes}", fix=fix)
    cut = {axis: i for i, dim in enumerate(layout) for axis in dim.axes}
    return tuple(Shard(cut[axis]) if axis in cut else Replicate() for axis in order)


def layout_from(
    placements: Sequence[Placement], dims: str | None = None, mesh: Mesh | None = None, ndim: int | None = None
) -> str:
    """The layout that DTensor's placements say: undoes :func:`placements`.

    Type: names, the same on every rank.

    Args:
        placements: per mesh axis ``Shard(dim)`` or ``Replicate()``.
        dims: the names of the dims, such as ``"b s d"``; ``d0 d1 ...`` by default.
        mesh: the current mesh by default.
        ndim: how many dims the tensor has; as many as ``dims`` names, or as the placements need, by default.

    Returns: a string, such as ``"(dp b) s (tp d)"``.

    Backward: none, for there are no tensors.

    Cost: none.

    Raises:
        MeshError: a partial or strided placement; another number of placements than axes; a dim that is none; names
            that are none, or not ``ndim`` of them.

    Example:
        >>> import meshcomm as mc
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> mc.layout_from((Shard(0), Replicate(), Shard(2)), "b s d", mc.make_mesh({"dp": 2, "pp": 2, "tp": 2}))
        '(dp b) s (tp d)'

    Source: ``torch.distributed.tensor.placement_types``.
    """
    where = "layout_from"
    return _layout_text(where, placements, dims, check.mesh_of(where, "", mesh).shape, ndim)


def _layout_text(where: str, given: object, dims: str | None, sizes: dict[str, int], ndim: int | None) -> str:
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(p, Placement) for p in given):
        fail(where, f"{given!r} are no placements.", fix="a tuple of Shard(dim) and Replicate(), one per mesh axis")
    shown = f"placements {tuple(given)}; mesh {sizes}"
    if len(given) != len(sizes):
        fail(where, f"{len(given)} placements for a mesh of {len(sizes)} axes.", got=shown, fix="one per mesh axis")
    if ndim is not None and (not check.whole_number(ndim) or ndim < 0):
        fail(where, f"ndim={ndim!r} is not a number of dims.", got=shown, fix="x.ndim")
    shards: dict[str, int] = {}
    for axis, placement in zip(sizes, given, strict=True):
        if placement.is_partial():
            fix = "redistribute to Replicate() or Shard(dim) first"
            fail(where, f"the tensor is partial along {axis!r}, which no layout says.", got=shown, fix=fix)
        if type(placement) is Shard:
            shards[axis] = placement.dim
        elif type(placement) is not Replicate:
            fix = "redistribute to Replicate() or Shard(dim) first"
            fail(where, f"{placement} along {axis!r} is neither Shard nor Replicate.", got=shown, fix=fix)
    if ndim is None and any(dim < 0 for dim in shards.values()) and dims is None:
        fail(where, "a dim is counted from the last, of an unknown number.", got=shown, fix="pass ndim= or dims=")
    least = max((dim + 1 for dim in shards.values()), default=0) if ndim is None else ndim
    called = dim_names(where, dims, sizes, least, exact=ndim is not None)
    cut: list[list[str]] = [[] for _ in called]
    for axis, dim in shards.items():
        if not -len(called) <= dim < len(called):
            count = f"{len(called)} dim{'' if len(called) == 1 else 's'}"
            fail(where, f"{axis!r} cuts dim {dim} of a tensor with {count}.", got=shown, fix="a dim that there is")
        cut[dim].append(axis)
    for name, axes in zip(called, cut, strict=True):
        if axes and name == "1":
            fail(where, f"a dim called 1 is cut over {names(axes)}.", got=f"{shown}; dims {dims!r}", fix="name it")
    return str(Layout(Dim(name, tuple(axes)) for name, axes in zip(called, cut, strict=True)))


# ------------------------------------------------------------------------------------------------------ the tensors
# DTensor's own from_local and to_local give a first derivative; where they redistribute a gradient its graph is lost.
# These two are each other's transposes, so derivatives of every order follow.


class _ToDTensor(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, placed: tuple[Placement, ...]) -> Tensor:
        ctx.placed = placed
        return DTensor.from_local(x.detach(), mesh, placed, run_check=False)

    @staticmethod
    def backward(ctx: Any, g: DTensor) -> Any:
        return _apply(_FromDTensor, g.redistribute(placements=ctx.placed)), None, None


class _FromDTensor(Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.mesh, ctx.placed = x.device_mesh, x.placements
        local: Any = x.to_local()
        if hasattr(local, "wait"):  # DTensor's collectives give tensors that are still under way
            local = local.wait()
        plain: Tensor = local.detach()
        return plain

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _apply(_ToDTensor, g, ctx.mesh, ctx.placed)


def _apply(function: type[Function], *args: Any) -> Any:
    return function.apply(*args)


def to_dtensor(x: Tensor, layout: str | Collection[Any], mesh: Mesh | None = None) -> DTensor:
    """The DTensor of which this rank has the part ``x``.

    Type: as the layout says: varying along the axes that it names, invariant along the others, where the ranks' ``x``
    must be equal. This is not checked, for that would communicate.

    Args:
        x: this rank's part, of the same shape and dtype on every rank, with one dim for each of the layout's.
        layout: such as ``"(dp b) s (tp d)"``, or with an ellipsis, or a PartitionSpec; see :func:`placements`.
        mesh: the current mesh by default; one of processes, for DTensor needs torch's process groups.

    Returns: a DTensor over ``mesh.device_mesh`` that shares ``x``'s storage.

    Backward: :func:`from_dtensor` of the gradient, redistributed to the layout of ``x`` if it has another.

    Cost: none. Backward what the redistribution costs: nothing, or all_reduce where the gradient is partial.

    Raises:
        MeshError: a layout that is none, that has another number of dims, or that no placements say; not a plain
            tensor; a tensor on another kind of device than the mesh; an in-process mesh.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"tp": 1})
        >>> mc.to_dtensor(torch.ones(2, 3), "b (tp d)", mesh).placements
        (Shard(dim=1),)
        >>> mc.shutdown()

    Source: ``torch.distributed.tensor.DTensor.from_local``.
    """
    where, text = "to_dtensor", as_text(layout)
    here = check.mesh_of(where, "", mesh)
    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        fail(where, f"x is a {type(x).__name__}, not a rank's part.", got=f"mesh {here.shape}", fix="a plain tensor")
    sizes = here.shape
    placed = _placements(where, fit(where, parse(where, text, sizes), x.shape, sizes, text), text, sizes)
    device_mesh = here.device_mesh
    if x.device.type != device_mesh.device_type:
        fix = f"x.to({device_mesh.device_type!r})"
        fail(where, f"x is on {x.device}, the mesh on {device_mesh.device_type}.", got=f"mesh {sizes}", fix=fix)
    done: DTensor = _apply(_ToDTensor, x, device_mesh, placed)
    return done


def from_dtensor(dtensor: DTensor, dims: str | None = None, mesh: Mesh | None = None) -> tuple[Tensor, str]:
    """This rank's part of a DTensor, and the layout in which it is one: undoes :func:`to_dtensor`.

    Type: as the layout says: varying along the axes that it names, invariant along the others.

    Args:
        dtensor: over the ranks and axes of ``mesh``; neither partial nor cut unevenly.
        dims: the names of the dims, such as ``"b s d"``; ``d0 d1 ...`` by default.
        mesh: the current mesh by default.

    Returns: the part, which shares the DTensor's storage, and the layout as a string.

    Backward: :func:`to_dtensor` of the gradient, which has the layout of the part: equal on the ranks along which that
    is invariant.

    Cost: none.

    Raises:
        MeshError: no DTensor; one over another mesh; partial or strided placements; a dim that its axes do not divide;
            names that are none, or not one per dim.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"tp": 1})
        >>> mc.from_dtensor(mc.to_dtensor(torch.ones(1, 2), "b (tp d)", mesh), "b d", mesh)
        (tensor([[1., 1.]]), 'b (tp d)')
        >>> mc.shutdown()

    Source: ``torch.distributed.tensor.DTensor.to_local``.
    """
    where = "from_dtensor"
    here = check.mesh_of(where, "", mesh)
    if not isinstance(dtensor, DTensor):
        fail(where, f"expected a DTensor, got {type(dtensor).__name__}.", got=f"mesh {here.shape}", fix="to_dtensor")
    _same_mesh(where, dtensor.device_mesh, here)
    layout = _layout_text(where, dtensor.placements, dims, here.shape, dtensor.ndim)
    counts = parse(where, layout, here.shape).parts(here.shape)
    for i, (length, parts) in enumerate(zip(dtensor.shape, counts, strict=True)):
        if length % parts:
            given = f"DTensor {tuple(dtensor.shape)}, {dtensor.placements}; mesh {here.shape}"
            fix = f"pad it to {-(-length // parts) * parts}, or redistribute to Replicate()"
            fail(where, f"dim {i} of length {length} is cut unevenly into {parts} parts.", got=given, fix=fix)
    return _apply(_FromDTensor, dtensor), layout


def _same_mesh(where: str, theirs: DeviceMesh, mesh: Mesh) -> None:
    """Refuse a DTensor unless its mesh has the same ranks in the same grid, and the same names if it has names."""
    ours = mesh.device_mesh
    if theirs == ours:
        return
    named = theirs.mesh_dim_names in (None, ours.mesh_dim_names)
    if not named or theirs.device_type != ours.device_type or theirs.mesh.tolist() != ours.mesh.tolist():
        fail(
            where,
            f"the DTensor lies on another mesh: {theirs}.",
            got=f"mesh {mesh.shape} of ranks {ours.mesh.tolist()}",
            fix="pass mesh=mc.Mesh.from_device_mesh(dtensor.device_mesh)",
        )
