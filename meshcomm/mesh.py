"""A mesh of ranks with named axes, and what an axis is for the rank that asks."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from numbers import Integral
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshcomm import _torch, watch
from meshcomm._versions import say_if_untested
from meshcomm.errors import fail, likely, names
from meshcomm.places import InProcess, Place, Processes, Solo, rank_here
from meshcomm.runtime import groups as process_groups
from meshcomm.runtime.hooks.wrapped import bare
from meshcomm.runtime.start import world
from meshcomm.runtime.start.request import duration
from meshcomm.runtime.transports.compiled import TracedLink
from meshcomm.runtime.transports.process_group import ProcessLink
from meshcomm.runtime.transports.protocol import Link
from meshcomm.runtime.transports.solo import SoloLink
from meshcomm.runtime.transports.threads import eras
from meshcomm.runtime.transports.threads.scheduler import carry_over, current_rank
from meshcomm.runtime.transports.threads.scheduler import local as _ranks

__all__ = [
    "Axis", "AxisName", "Mesh", "all_axes", "axis_with_key", "current_mesh", "make_mesh", "mesh_with_key",
    "on_new_axis", "use_mesh",
]  # fmt: skip

AxisName = str | tuple[str, ...]
"""The name of a mesh axis, or several in order, the first one major."""

_keys = itertools.count()


class Axis:
    """One rank's view of an axis (or of several as one): its size, this rank's index on it and the link to the
    others.
    """

    def __init__(
        self,
        mesh: Mesh,
        name: AxisName,
        ranks: tuple[int, ...],
        index: int,
        link: Link,
        index_tensor: Tensor | None = None,
    ) -> None:
        self.mesh = mesh
        self.name = name
        self.ranks = ranks
        self.size = len(ranks)
        self.index = index
        self.link = link
        self.coordinate = mesh._coordinate()
        self.devices: set[torch.device] = set()  # those that the link is known to move
        self.key = next(_keys)
        _axes[self.key] = self
        self.is_traced = index_tensor is not None
        if index_tensor is None:
            with _torch.outside_transforms():  # it outlives whatever the first user is in the middle of
                index_tensor = torch.tensor(index, device=mesh.device)
        self.index_tensor = index_tensor
        self._later: Axis | None = None
        for told in _told:
            told(self)

    @property
    def later(self) -> Axis:
        """The same axis with a link whose primitives do not wait."""
        if self._later is None:
            twin = copy.copy(self)
            twin.link = self.link.later()
            twin._later = twin
            self._later = twin
        return self._later

    def traced(self, index_tensor: Tensor) -> Axis:
        """The same axis with a link whose operations trace.

        ``index_tensor`` is an input of the graph: a constant would make the ranks' graphs differ, and the compiler
        might drop from one of them what another one waits for.
        """
        if self.is_traced:
            return self
        link: Any = bare(self.link)
        if isinstance(link, ProcessLink):
            link = cast(Link, TracedLink(link))  # what goes to or from one rank is not traced
        return Axis(self.mesh, self.name, self.ranks, self.index, link, index_tensor)

    def places(self) -> dict[int, str]:
        """Rank of the world to its place on the mesh: ``dp=1,tp=0``."""
        return self.mesh.places()

    def __repr__(self) -> str:
        at = ", ".join(f"{name}={place}" for name, place in self.coordinate.items())
        return f"{self.name!r} ({at})"


_axes: weakref.WeakValueDictionary[int, Axis] = weakref.WeakValueDictionary()

_told: list[Callable[[Axis], object]] = []


def on_new_axis(tell: Callable[[Axis], object]) -> None:
    """Call ``tell`` with every axis that is made from now on."""
    _told.append(tell)


def all_axes() -> list[Axis]:
    """Those of all meshes, and of all ranks of this process."""
    return [axis for ref in _axes.valuerefs() if (axis := ref()) is not None]


_meshes: weakref.WeakValueDictionary[int, Mesh] = weakref.WeakValueDictionary()


def _let_go() -> None:
    """Drop what refers to process groups: one that outlives its end takes the interpreter down at exit."""
    for mesh in list(_meshes.values()):
        mesh._axes.clear()
        mesh._device_mesh = None


world.on_shutdown(_let_go)


@_torch.at_trace_time
def _prepare(key: int, name: AxisName, where: str) -> str:
    """Set up an axis while a function that uses it is compiled, for that does not trace; the mesh holds it by this
    name.
    """
    mesh = _meshes[key]
    axis = mesh._resolve(name, where)
    attribute = f"_axis_{axis.key}"
    setattr(mesh, attribute, axis)
    return attribute


def mesh_with_key(key: int) -> Mesh:
    """The mesh that code speaks of which is being compiled."""
    return _meshes[key]


def axis_with_key(key: int) -> Axis:
    """The axis that a compiled graph speaks of."""
    try:
        return _axes[key]
    except KeyError:
        fail("mesh", "a compiled function uses a mesh that is gone.", fix="compile it again with the new mesh")


class Mesh:
    """Ranks in an N-dimensional grid whose axes have names. Made by :func:`make_mesh`."""

    def __init__(
        self,
        shape: Mapping[str, int],
        ranks: tuple[int, ...],
        place: Place,
        world_size: int,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        self._shape = dict(shape)
        self._ranks = ranks
        self._place = place
        self._world_size = world_size
        self._device_mesh = device_mesh
        self._on_cpu = device_mesh is not None and device_mesh.device_type == "cpu"
        self._axes: dict[AxisName, Axis] = {}
        self._making: dict[tuple[str, ...], threading.Lock] = {}
        self._identity = place.identify(shape, ranks)
        self._threads = isinstance(place, InProcess)
        self._key = next(_keys)
        self.strict = False
        """Whether a tensor on a device that the backends cannot move is an error."""
        self.timeout: timedelta | None = None
        """After how long its collectives give up; None: after as long as ``init`` was told."""
        _meshes[self._key] = self

    # ------------------------------------------------------------------------------------------------- what it is

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names, major first."""
        return tuple(self._shape)

    @property
    def shape(self) -> dict[str, int]:
        """Name to size."""
        return dict(self._shape)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self._ranks)

    @property
    def rank(self) -> int:
        """This rank's position in the mesh, in row-major order of its axes. Raises MeshError outside the mesh, and
        VaryingError where varying types are checked: there :func:`axis_index` gives it as a tensor.
        """
        if watch.here.watcher is not None:
            watch.here.watcher.host_value("mesh.rank")
        return self._rank()

    def _rank(self) -> int:
        mine = self._place.rank()
        if mine is None:
            self._outside_a_rank("mesh.rank")
        if self._place.world_size() != self._world_size:
            fail(
                "mesh.rank",
                f"a mesh made for {self._world_size} ranks is used among {self._place.world_size()}.",
                got=f"mesh {self._shape}",
                fix="launch as many ranks as the mesh has, or make the mesh inside the launched function",
            )
        if mine not in self._ranks:
            fail(
                "mesh.rank",
                f"rank {mine} is not in the mesh.",
                got=f"mesh {self._shape} of ranks {list(self._ranks)}",
                fix="call its collectives on those ranks only",
            )
        return self._ranks.index(mine)

    @property
    def coordinate(self) -> dict[str, int]:
        """Axis name to this rank's index along it, as Python ints. Raises as :attr:`rank` does."""
        if watch.here.watcher is not None:
            watch.here.watcher.host_value("mesh.coordinate")
        return self._coordinate()

    def _coordinate(self) -> dict[str, int]:
        rest, places = self._rank(), {}
        for name, length in reversed(self._shape.items()):
            rest, places[name] = divmod(rest, length)
        return {name: places[name] for name in self._shape}

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return torch.device("cpu") if self._on_cpu else self._place.device()

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's DeviceMesh over the same process groups, for DTensor, DCP, FSDP2 and pipelining.

        Raises MeshError in-process: there are no process groups.
        """
        if self._device_mesh is None:
            if isinstance(self._place, InProcess):
                fail(
                    "mesh.device_mesh",
                    "ranks in one process have no torch process groups.",
                    got=f"in-process mesh {self._shape}",
                    fix="run under torchrun, or mc.launch(..., runtime='processes')",
                )
            self._device_mesh = self._make_device_mesh()
        return self._device_mesh

    def _make_device_mesh(self) -> DeviceMesh:
        if isinstance(self._place, Solo):
            world.solo_process_group()
        self._rank()  # a rank outside has no groups: say so
        groups = [process_groups.group_of(self._ranks_along((name,)), self.timeout) for name in self._shape]
        grid = torch.tensor(self._ranks, dtype=torch.int, device="cpu").view(*self._shape.values())
        only = len(groups) == 1
        return DeviceMesh.from_group(
            groups[0] if only else groups,
            self.device.type,
            mesh=None if only else grid,
            mesh_dim_names=self.axis_names,
        )

    @staticmethod
    def from_device_mesh(device_mesh: DeviceMesh) -> Mesh:
        """The same ranks and names as torch's DeviceMesh, which must have ``mesh_dim_names``. No communication but
        the set-up of process groups, by the members of each axis together.
        """
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
        ranks = tuple(int(rank) for rank in grid.flatten().tolist())
        if here is None:
            return Mesh(shape, ranks, Solo(), 1, device_mesh)
        return _with_links(Mesh(shape, ranks, Processes(), here.size, device_mesh))

    # ------------------------------------------------------------------------------------------------------ axes

    def axis(self, name: AxisName, where: str = "mesh.axis") -> Axis:
        """The axis of this name, or of these names as one, for the rank that asks; ``where`` names the caller in
        errors.
        """
        rank = _ranks.rank
        try:
            # Outside a launch, and on meshes that are not of one, the axes are the mesh's own.
            return self._axes[name] if rank is None or not self._threads else rank.axes[self, name]
        except (KeyError, TypeError):
            return self._find(name, where)

    def places(self) -> dict[int, str]:
        """Rank of the world to its place on the mesh: ``dp=1,tp=0``."""
        grid = itertools.product(*(range(length) for length in self._shape.values()))
        return {
            rank: ",".join(f"{name}={i}" for name, i in zip(self._shape, place, strict=True))
            for rank, place in zip(self._ranks, grid, strict=True)
        }

    def size_of(self, name: AxisName, where: str = "mesh.size_of") -> int:
        """How many ranks the axis has; needs no rank."""
        return math.prod(self._shape[part] for part in self._checked_names(name, where))

    def _find(self, name: AxisName, where: str) -> Axis:
        if torch.compiler.is_compiling():
            found: Axis = getattr(self, _prepare(self._key, name, where))
            return found
        return self._resolve(name, where)

    def _resolve(self, name: AxisName, where: str) -> Axis:
        parts = self._checked_names(name, where)
        if self._place.rank() is None:
            self._outside_a_rank(where)
        # A name and the tuple of it alone are one axis; and two threads that ask for it find the same.
        with contextlib.nullcontext() if self._threads else self._making.setdefault(parts, threading.Lock()):
            axes: dict[Any, Axis] = rank_here().axes if self._threads else self._axes
            keys: list[Any] = [name, parts, *(parts if len(parts) == 1 else ())]
            keys = [(self, key) for key in keys] if self._threads else keys
            found = next((axes[key] for key in keys if key in axes), None) or self._made(parts)
            axes.update(dict.fromkeys(keys, found))
        return found

    def _made(self, parts: tuple[str, ...]) -> Axis:
        ranks = self._ranks_along(parts)
        alone = len(ranks) == 1
        link = SoloLink() if alone else self._place.link(ranks, self.timeout, self._identity, parts)
        found = Axis(self, parts[0] if len(parts) == 1 else parts, ranks, ranks.index(self._ranks[self._rank()]), link)
        if (log := getattr(bare(link), "log", None)) is not None:
            log.named(found.name, found.coordinate)
        return found

    def _checked_names(self, name: object, where: str) -> tuple[str, ...]:
        parts = name if isinstance(name, tuple) else (name,)
        for part in parts:
            if not isinstance(part, str) or part not in self._shape:
                what = (
                    f"no axis {part!r} in the mesh." if isinstance(part, str) else f"an axis is a name, not {part!r}."
                )
                fail(
                    where,
                    what,
                    got=f"axis {name!r}; mesh {self._shape}",
                    fix=f"one of {names(self._shape)}, or a tuple{likely(part, self._shape)}",
                )
        if len(set(parts)) != len(parts):
            fail(where, "an axis is named twice.", got=f"axis {name!r}; mesh {self._shape}", fix="name each axis once")
        if not parts:
            fail(where, "no axis is named.", got=f"axis (); mesh {self._shape}", fix=f"one of {names(self._shape)}")
        return parts

    def _ranks_along(self, parts: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that share this rank's place on all other axes, in the order in which the axes are written."""
        home = self._coordinate()
        strides = dict(zip(self._shape, _strides(list(self._shape.values())), strict=True))
        base = sum(home[name] * stride for name, stride in strides.items() if name not in parts)
        places = itertools.product(*(range(self._shape[name]) for name in parts))
        return tuple(
            self._ranks[base + sum(i * strides[name] for i, name in zip(place, parts, strict=True))] for place in places
        )

    def _outside_a_rank(self, where: str) -> NoReturn:
        if isinstance(self._place, InProcess):
            fail(
                where,
                "called outside a rank.",
                got=f"in-process mesh {self._shape} in a thread that is not a rank's own",
                fix=f"run it inside mc.launch(fn, ranks={self._world_size}), or start with torchrun --nproc-per-node "
                f"{self._world_size}",
            )
        fail(where, "the mesh's process group is gone.", got=f"mesh {self._shape}", fix="make the mesh after mc.init()")

    def __repr__(self) -> str:
        return f"Mesh({self._shape})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self

    def __reduce__(self) -> NoReturn:
        fail("Mesh", "a mesh belongs to its process and cannot be pickled.", fix="make it inside the launched function")


def _strides(lengths: Sequence[int]) -> list[int]:
    return [math.prod(lengths[i + 1 :]) for i in range(len(lengths))]


# -------------------------------------------------------------------------------------------------- making a mesh


def make_mesh(
    axes: Mapping[str, int],
    *,
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
        ranks sets up one at an axis' first collective, and gives it back when the mesh is gone.

    Raises:
        MeshError: sizes that do not multiply to the number of ranks, bad names or sizes, ranks twice or out of range, a
            time-out that is not positive.

    Example:
        >>> import meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2, "tp": 2})
        >>> mesh.axis_names, mesh.size
        (('dp', 'tp'), 4)
        >>> mc.launch(lambda: mesh.coordinate, ranks=4)[3]
        {'dp': 1, 'tp': 1}
    """
    shape = _checked_shape("make_mesh", axes)
    if ranks is not None and not isinstance(ranks, Sequence):
        fail("make_mesh", f"ranks is a list of ints, not {ranks!r}.", fix="a list, in the order of the mesh")
    if not isinstance(strict, bool):
        fail("make_mesh", f"strict={strict!r} is not a bool.", fix="True or False")
    limit = duration("make_mesh", timeout)
    mesh = _mesh_over(shape, ranks, limit)
    mesh.strict, mesh.timeout = strict, limit
    if not mesh._place.rank():  # the first rank, or who calls all of them
        say_if_untested()
    return mesh


_MOST = 2**20
"""Of a mesh that knows its ranks one by one and has no launcher to bound them."""


def _mesh_over(shape: dict[str, int], ranks: Sequence[int] | None, timeout: timedelta | None) -> Mesh:
    """Over whatever ranks there are."""
    inside = current_rank()
    if inside is not None:
        return _sized(shape, ranks, InProcess(), inside.world.size, "mc.launch started")
    here = world.ensure()
    if here is not None:
        mesh = _sized(shape, ranks, Processes(), here.size, "the launcher started")
        mesh.timeout = timeout  # before there are links
        return _with_links(mesh)
    total = math.prod(abs(length) for length in shape.values()) if ranks is None else len(ranks)
    if total > _MOST:
        what = f"{total} are more ranks than a mesh of ranks in one process may have, {_MOST}."
        fail("make_mesh", what, got=repr(shape), fix="smaller sizes, or start the ranks with a launcher")
    if total == 1:
        return _sized(shape, ranks, Solo(), 1, "a plain process has")
    size = (
        total
        if ranks is None
        else max([total, *(rank + 1 for rank in ranks if isinstance(rank, int) and rank < _MOST)])
    )
    return _sized(shape, ranks, InProcess(), size, "there are")


def _with_links(mesh: Mesh) -> Mesh:
    """Set up the axes now, while all ranks are here together."""
    if mesh._place.rank() in mesh._ranks:
        for name in mesh.axis_names:
            mesh.axis(name)
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


def _sized(shape: dict[str, int], ranks: Sequence[int] | None, place: Place, world_size: int, who: str) -> Mesh:
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
    return Mesh(shape, chosen, place, world_size)


# ---------------------------------------------------------------------------------------------- the current mesh


class _Local(threading.local):
    mesh: Mesh | None = None


_local = _Local()


class use_mesh:  # noqa: N801  # reads as a verb, as torch.no_grad does
    """``with use_mesh(mesh):`` functions called without ``mesh=`` use this mesh, in this thread and in ranks launched
    in it.

    Example:
        >>> import meshcomm as mc
        >>> with mc.use_mesh(mc.make_mesh({"dp": 1})) as mesh:
        ...     mc.axis_size("dp"), mc.current_mesh() is mesh
        (1, True)
    """

    def __init__(self, mesh: Mesh) -> None:
        if not isinstance(mesh, Mesh):
            fail("use_mesh", f"expected a Mesh, got {type(mesh).__name__}.", fix="mc.make_mesh({...})")
        self._mesh = mesh
        self._outer: list[Mesh | None] = []

    def __enter__(self) -> Mesh:
        self._outer.append(_local.mesh)
        _local.mesh = self._mesh
        _graphs_are_of(self._mesh)
        return self._mesh

    def __exit__(self, *exc: object) -> None:
        _local.mesh = self._outer.pop()
        _graphs_are_of(_local.mesh)


def _graphs_are_of(mesh: Mesh | None) -> None:
    if not torch.compiler.is_compiling():
        eras.begin(mesh)


def current_mesh() -> Mesh | None:
    """The mesh of the innermost ``with use_mesh(...)`` in this thread, or None. What a backward calls again finds the
    one that was current when its graph was made.

    Example:
        >>> import meshcomm as mc
        >>> with mc.use_mesh(mc.make_mesh({"dp": 1})):
        ...     mc.current_mesh()
        Mesh({'dp': 1})
    """
    mesh = _local.mesh
    if mesh is None and not torch.compiler.is_compiling() and _torch.backward_pass() >= 0:
        return cast("Mesh | None", eras.of_current_node())
    return mesh


def _capture_current() -> Callable[[], None]:
    mesh = _local.mesh

    def apply() -> None:
        _local.mesh = mesh

    return apply


carry_over(_capture_current)
