"""make_mesh: a mesh over whatever ranks there are, in processes, in this process, or one alone; and the one of torch's
DeviceMesh.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from numbers import Integral
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshcomm._versions import say_if_untested
from meshcomm.errors import fail
from meshcomm.errors import names as quoted
from meshcomm.mesh import Mesh, let_go_of_groups, makes_meshes
from meshcomm.runtime import groups
from meshcomm.runtime.axis_names import Together, checked_together
from meshcomm.runtime.groups import identity
from meshcomm.runtime.ops import Op
from meshcomm.runtime.start import world
from meshcomm.runtime.start.request import duration
from meshcomm.runtime.transports.dry.link import DryPlace
from meshcomm.runtime.transports.dry.world import dry_world
from meshcomm.runtime.transports.protocol import Link, Place
from meshcomm.runtime.transports.solo import SoloLink
from meshcomm.runtime.transports.threads.scheduler import current_rank

world.on_shutdown(let_go_of_groups)
_outside = itertools.count()


@cache
def _threads() -> Any:
    """The transport among threads; programs on processes do without."""
    return importlib.import_module("meshcomm.runtime.transports.threads.transport")


class _OneDevice:
    """What computes on the caller's default device."""

    def device(self) -> torch.device:
        """The caller's default device."""
        return torch.get_default_device()


class _Processes:
    """The ranks are processes."""

    in_process = False

    def rank(self) -> int | None:
        """This process's rank in the world; None when there is no world any more."""
        here = world.current()
        return None if here is None else here.rank

    def world_size(self) -> int | None:
        """How many processes there are."""
        here = world.current()
        return None if here is None else here.size

    def identify(self, shape: Mapping[str, int], ranks: tuple[int, ...]) -> str:
        """Names a mesh that is made now, alike in all of its processes."""
        return groups.identify(shape, ranks)

    def link(self, ranks: tuple[int, ...], timeout: timedelta | None, mesh: str, axis: tuple[str, ...]) -> Link:
        """A link between these ranks for an axis of the mesh of this name; the first one between them is made by all
        of them together.
        """
        return cast(Link, groups.link_of(ranks, timeout, mesh, axis))

    def group(self, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
        """The one that these ranks have; they make it together, once."""
        return groups.group_of(ranks, timeout)

    def device(self) -> torch.device:
        """The device that ``init`` chose."""
        here = world.current()
        return torch.get_default_device() if here is None else here.device


class _InProcess(_OneDevice):
    """The ranks are threads of this process: who this rank is depends on who asks."""

    in_process = True

    def rank(self) -> int | None:
        """The rank that is running; None outside a launch."""
        here = current_rank()
        return None if here is None else here.index

    def world_size(self) -> int | None:
        """How many ranks the launch has."""
        here = current_rank()
        return None if here is None else here.world.size

    def identify(self, shape: Mapping[str, int], ranks: tuple[int, ...]) -> str:
        """Names a mesh that is made now: by a rank, alike on all of them; outside of a launch it is the one object."""
        here = current_rank()
        if here is None:
            return f"made outside, {next(_outside)}"
        key = (*shape.items(), ranks)
        here.made[key] = here.made.get(key, 0) + 1
        return identity(shape, ranks, here.made[key])

    def link(self, ranks: tuple[int, ...], timeout: timedelta | None, mesh: str, axis: tuple[str, ...]) -> Link:
        """A link of the rank that is running to these ranks; no time passes among them."""
        return cast(Link, _threads().InProcessLink(current_rank(), ranks, f"{mesh}: {','.join(axis)}"))

    def group(self, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
        """Not among threads: the mesh says so."""
        raise NotImplementedError


class _Solo(_OneDevice):
    """One rank that is alone, with no process group and no launch."""

    in_process = False

    def rank(self) -> int | None:
        """The only one."""
        return 0

    def world_size(self) -> int | None:
        """One."""
        return 1

    def identify(self, shape: Mapping[str, int], ranks: tuple[int, ...]) -> str:
        """Nobody asks."""
        return ""

    def link(self, ranks: tuple[int, ...], timeout: timedelta | None, mesh: str, axis: tuple[str, ...]) -> Link:
        """A link to nobody."""
        return SoloLink()

    def group(self, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
        """One of one, which torch wants."""
        world.solo_process_group()
        return groups.group_of(ranks, timeout)


# -------------------------------------------------------------------------------------------------- making a mesh


@Op("make_mesh", composed=True)
def make_mesh(
    axes: Mapping[str, int],
    *,
    names: Mapping[str, tuple[str, ...]] | None = None,
    ranks: Sequence[int] | None = None,
    strict: bool = False,
    timeout: float | timedelta | None = None,
) -> Mesh:
    """A mesh over all ranks, or over ``ranks``, with these axes, the first one major.

    Under a launcher (torchrun, mpiexec, srun) or with torch.distributed initialised the ranks are processes, and
    :func:`meshcomm.init` is called when needed. Inside a rank of :func:`meshcomm.launch` they are the ranks of the
    launch. In a plain process the result is an in-process mesh of any size for ``launch`` to run on; with size 1 it
    can be used directly.

    Each axis of each mesh has its own sequence of calls, as after MPI_Comm_dup: threads may communicate at the same
    time, each over a mesh or an axis for itself. Two threads must not share one axis: its calls meet in the order in
    which they are made. What tells one mesh from another, on all ranks alike, is its axes, its ranks, and how many of
    these were made before: so all of its ranks make the same meshes in the same order (threads: meshes with other
    names, or before they start).

    Args:
        axes: name to size; names are identifiers. One size may be -1: as many as there are ranks left (1 in a plain
            process).
        names: what stands for several axes together, such as ``{"fsdp": ("efsdp", "ep")}``: neighbours, major first.
            It stands wherever an axis does, and is the same as the tuple of them; shapes, coordinates and traces
            speak of the axes alone.
        ranks: the ranks of the world that the mesh is made of, in row-major order; all of them when None. Every rank
            of the world may call; the others get a mesh whose ``rank`` and collectives raise.
        strict: whether a tensor on a device that the mesh's backends cannot move is an error. It goes by way of a
            device that they can move, and its result comes back to it, when False.
        timeout: seconds or a timedelta, equal on every rank, after which a collective over an axis of this mesh gives
            up with an error that says who did not come; None: as long as :func:`meshcomm.init` was told, 5 minutes by
            default. Among the ranks of one process
            no time passes, and a rank that does not come is an error at once.

    Returns: a :class:`Mesh`. It is not the current mesh until ``with use_mesh(mesh):``.

    Cost: the members of each axis set up a process group together, once per set of ranks and time-out; nothing
        in-process. Where torch's own collectives are used (NCCL, more than 32 ranks), every further mesh over the same
        ranks sets up one of its own, on NCCL now and else at an axis' first collective, and gives it back when the
        mesh is gone; on NCCL to meshes with any time-out. A tuple of axes has its own at the first call over it, to
        which all of its ranks come, and not while a CUDA graph is captured.

    Raises:
        MeshError: sizes that do not multiply to the number of ranks, bad names or sizes, ranks twice or out of range, a
            time-out that is not positive; in ``names`` a name that an axis has, what is no axis, axes that are no
            neighbours or in two names.

    Example:
        >>> import meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2, "tp": 2})
        >>> mesh.axis_names, mesh.size
        (('dp', 'tp'), 4)
        >>> mc.launch(lambda: mesh.coordinate, ranks=4)[3]
        {'dp': 1, 'tp': 1}
        >>> mc.axis_size("all", mesh=mc.make_mesh({"dp": 2, "tp": 2}, names={"all": ("dp", "tp")}))
        4
    """
    shape = _checked_shape("make_mesh", axes)
    if ranks is not None and not isinstance(ranks, Sequence):
        fail("make_mesh", f"ranks is a list of ints, not {ranks!r}.", fix="a list, in the order of the mesh")
    if not isinstance(strict, bool):
        fail("make_mesh", f"strict={strict!r} is not a bool.", fix="True or False")
    limit = duration("make_mesh", timeout)
    together = checked_together("make_mesh", {} if names is None else names, shape)
    mesh = _mesh_over(shape, ranks, limit, together)
    mesh.strict, mesh.timeout = strict, limit
    if not mesh.place.rank():  # the first rank, or who calls all of them
        say_if_untested()
    return mesh


_MOST = 2**20
"""Of a mesh that knows its ranks one by one and has no launcher to bound them."""


def _mesh_over(shape: dict[str, int], ranks: Sequence[int] | None, timeout: timedelta | None, names: Together) -> Mesh:
    """Over whatever ranks there are."""
    dry = dry_world()
    if dry is not None:
        return _sized(shape, ranks, DryPlace(dry), dry.size, "the dry run has", names)
    inside = current_rank()
    if inside is not None:
        return _sized(shape, ranks, _InProcess(), inside.world.size, "mc.launch started", names)
    here = world.ensure()
    if here is not None:
        mesh = _sized(shape, ranks, _Processes(), here.size, "the launcher started", names)
        mesh.timeout = timeout  # before there are links
        return _with_links(mesh)
    total = math.prod(abs(length) for length in shape.values()) if ranks is None else len(ranks)
    if total > _MOST:
        what = f"{total} are more ranks than a mesh of ranks in one process may have, {_MOST}."
        fail("make_mesh", what, got=repr(shape), fix="smaller sizes, or start the ranks with a launcher")
    if total == 1:
        return _sized(shape, ranks, _Solo(), 1, "a plain process has", names)
    size = (
        total
        if ranks is None
        else max([total, *(rank + 1 for rank in ranks if isinstance(rank, int) and rank < _MOST)])
    )
    return _sized(shape, ranks, _InProcess(), size, "there are", names)


def _with_links(mesh: Mesh) -> Mesh:
    """Set up the axes now, while all ranks are here together."""
    if mesh.place.rank() in mesh.ranks:
        for name in mesh.axis_names:
            mesh.axis(name).link.connect()
    return mesh


def _checked_shape(where: str, axes: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(axes, Mapping) or not axes:
        fail(where, "a mesh needs a mapping of axis names to sizes.", got=repr(axes), fix='such as {"dp": 2, "tp": 4}')
    for name, length in axes.items():
        if not isinstance(name, str) or not name.isidentifier():
            fail(where, f"axis name {name!r} is not an identifier.", got=repr(dict(axes)), fix="such as 'dp'")
        if isinstance(length, bool) or not isinstance(length, Integral) or (length < 1 and length != -1):
            fail(where, f"axis {name!r} has size {length!r}.", got=repr(dict(axes)), fix="a positive int, or one -1")
    if list(axes.values()).count(-1) > 1:
        fail(where, "more than one size is -1.", got=repr(dict(axes)), fix="give all sizes but one")
    return {name: int(length) for name, length in axes.items()}


def _sized(
    shape: dict[str, int], ranks: Sequence[int] | None, place: Place, world_size: int, who: str, names: Together
) -> Mesh:
    """Fill in -1 and compare with the number of ranks."""
    chosen = tuple(range(world_size)) if ranks is None else tuple(ranks)
    whole = all(isinstance(rank, int) and not isinstance(rank, bool) for rank in chosen)
    if not chosen or not whole or len(set(chosen)) != len(chosen) or not all(0 <= rank < world_size for rank in chosen):
        fail("make_mesh", "ranks must be different ranks of the world.", got=f"ranks {chosen}; {world_size} ranks")
    given = math.prod(length for length in shape.values() if length != -1)
    if -1 in shape.values() and len(chosen) % given == 0:
        shape = {name: len(chosen) // given if length == -1 else length for name, length in shape.items()}
    if -1 in shape.values() or math.prod(shape.values()) != len(chosen):
        needed = f"a multiple of {given} ranks" if -1 in shape.values() else f"{given} ranks"
        count = f"{who} {world_size}" if ranks is None else f"ranks= names {len(chosen)}"
        fail(
            "make_mesh",
            f"the sizes do not agree: the mesh needs {needed}, {count}.",
            got=repr(shape),
            fix="change the sizes or the number of ranks, or name a part of them with ranks=",
        )
    return Mesh(shape, chosen, place, world_size, names=names)


@makes_meshes
def from_device_mesh(device_mesh: DeviceMesh, names: Mapping[str, tuple[str, ...]] | None) -> Mesh:
    """What :meth:`Mesh.from_device_mesh` calls."""
    where = "Mesh.from_device_mesh"
    if not isinstance(device_mesh, DeviceMesh):
        fix = "init_device_mesh(..., mesh_dim_names=...) of torch.distributed makes one; mc.make_mesh one of ours"
        fail(where, f"expected a torch DeviceMesh, got {type(device_mesh).__name__}.", fix=fix)
    if device_mesh.mesh_dim_names is None:
        fail(where, "the DeviceMesh has no names.", fix="pass mesh_dim_names= when making it")
    here = world.ensure()
    alone = here is None and world.is_met()  # the group of one that a mesh of one makes for torch's sake
    if here is None and not alone:
        fail(where, "there is no torch process group.", fix="call dist.init_process_group or mc.init first")
    grid = device_mesh.mesh
    shape = _checked_shape(where, dict(zip(device_mesh.mesh_dim_names, grid.shape, strict=True)))
    together = checked_together(where, {} if names is None else names, shape)
    ranks = tuple(int(rank) for rank in grid.flatten().tolist())
    if here is None:
        return Mesh(shape, ranks, _Solo(), 1, device_mesh, together)
    return _with_links(Mesh(shape, ranks, _Processes(), here.size, device_mesh, together))


@makes_meshes
def split(mesh: Mesh, axis: str, sizes: Mapping[str, int]) -> Mesh:
    """What :meth:`Mesh.split` calls."""
    where, shape = "Mesh.split", mesh.shape
    got = f"axis {axis!r} into {dict(sizes)}; {mesh}"
    if not isinstance(axis, str) or axis not in shape:
        what = f"{axis!r} stands for several axes." if axis in (*mesh.names,) else f"no axis {axis!r} in the mesh."
        fail(where, what, got=got, fix=f"one of {quoted(shape)}")
    whole = next((name for name, parts in mesh.names.items() if axis in parts), None)
    if whole is not None:
        fix = "mc.make_mesh({...}, names={...}) of all axes at once"
        fail(where, f"axis {axis!r} is a part of {whole!r}, and no axis is in two names.", got=got, fix=fix)
    taken = next((name for name in sizes if name in shape or name in mesh.names), None)
    if taken is not None:
        fail(where, f"the mesh has the name {taken!r} already.", got=got, fix="other names for the parts")
    parts = _checked_shape(where, sizes)
    given = math.prod(length for length in parts.values() if length != -1)
    parts = {name: shape[axis] // given if length == -1 else length for name, length in parts.items()}
    if math.prod(parts.values()) != shape[axis]:
        fix = "sizes whose product is that of the axis, or one of them -1"
        fail(where, f"the sizes do not multiply to {shape[axis]}, that of axis {axis!r}.", got=got, fix=fix)
    finer: dict[str, int] = {}
    for name, length in shape.items():
        finer |= parts if name == axis else {name: length}
    names = {**mesh.names, axis: tuple(parts)}
    made = Mesh(finer, mesh.ranks, mesh.place, mesh.world_size, names=names)
    made.strict, made.timeout = mesh.strict, mesh.timeout
    return _with_links(made) if isinstance(mesh.place, _Processes) else made
