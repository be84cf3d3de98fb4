"""A mesh of ranks with named axes, and which one is the current one."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshcomm import _torch, watch
from meshcomm.axis import Axis, AxisName, ReadAxis
from meshcomm.elsewhere import Answers
from meshcomm.errors import fail
from meshcomm.pictures.grid import mesh_grids
from meshcomm.pictures.picture import Picture, Shown
from meshcomm.runtime.axis_names import Sizes, Together, checked_names, ranks_along
from meshcomm.runtime.ops import Op
from meshcomm.runtime.recorder import log_of
from meshcomm.runtime.transports.dry.places import PlaceReads, ReadCoordinate, by_program
from meshcomm.runtime.transports.protocol import Place
from meshcomm.runtime.transports.solo import SoloLink
from meshcomm.runtime.transports.threads import eras
from meshcomm.runtime.transports.threads.eras import of_thread
from meshcomm.runtime.transports.threads.scheduler import carry_over, current_rank
from meshcomm.runtime.transports.threads.scheduler import local as _ranks

_keys = itertools.count()


_making: dict[tuple[str, tuple[str, ...]], threading.Lock] = {}
"""Axes of meshes, by their keys, that are made at this moment."""


@contextlib.contextmanager
def _one_at_a_time(key: tuple[str, tuple[str, ...]]) -> Iterator[None]:
    """Who comes second finds what the first has made; where that has failed, makes it, and no third one beside it."""
    with _making.setdefault(key, threading.Lock()):
        yield
        _making.pop(key, None)


_meshes: weakref.WeakValueDictionary[str, Mesh] = weakref.WeakValueDictionary()
_makers: dict[str, Callable[..., Mesh]] = {}


def makes_meshes(make: Callable[..., Mesh]) -> None:
    """``make`` is what the method of its name calls: a mesh itself does not know how processes begin."""
    _makers[make.__name__] = make


def let_go_of_groups() -> None:
    """Drop what refers to process groups: one that outlives its end takes the interpreter down at exit."""
    for mesh in list(_meshes.values()):
        mesh.axes.clear()
        mesh._device_mesh = None


@_torch.at_trace_time
def _prepare(key: str, name: AxisName, where: str) -> str:
    """Set up an axis while a function that uses it is compiled, for that does not trace; the mesh holds it by this
    name.
    """
    mesh = _meshes[key]
    axis = mesh._resolve(name, where)
    attribute = f"_axis_{axis.key}"
    setattr(mesh, attribute, axis)
    return attribute


def mesh_with_key(key: str) -> Mesh:
    """The mesh that code speaks of which is being compiled."""
    return _meshes[key]


class Mesh(Answers, Shown):
    """Ranks in an N-dimensional grid whose axes have names. Made by :func:`make_mesh`."""

    def __init__(
        self,
        shape: Mapping[str, int],
        ranks: tuple[int, ...],
        place: Place,
        world_size: int,
        device_mesh: DeviceMesh | None = None,
        names: Together | None = None,
    ) -> None:
        self.names = dict(names or {})
        """What stands for several axes, and for which."""
        self._shape = Sizes(shape, self.names) if names else dict(shape)
        self.ranks = ranks
        self.place = place
        self.world_size = world_size
        self._device_mesh = device_mesh
        self._on_cpu = device_mesh is not None and device_mesh.device_type == "cpu"
        self.axes: dict[AxisName, Axis] = {}
        self._identity = place.identify(shape, ranks)
        self.reads: PlaceReads | None = getattr(place, "reads", None)
        """Who wants to know what a rank asks of its place, if anybody does."""
        self.in_process = place.in_process
        """Whether its ranks are those of one process."""
        self.key = str(next(_keys))  # a graph takes a number that has changed for one that may be any
        self.strict = False
        """Whether a tensor on a device that the backends cannot move is an error."""
        self.timeout: timedelta | None = None
        """After how long its collectives give up; None: after as long as ``init`` was told."""
        self.kept: Any = None
        """What the ranks of one ``shard_map`` over it have left for those of the next."""
        _meshes[self.key] = self

    # ------------------------------------------------------------------------------------------------- what it is

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names, major first."""
        return tuple(self._shape)

    @property
    def shape(self) -> dict[str, int]:
        """Name to size."""
        return Sizes(self._shape, self.names) if self.names else dict(self._shape)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's position in the mesh, in row-major order of its axes. Raises MeshError outside the mesh, and
        VaryingError where varying types are checked: there :func:`axis_index` gives it as a tensor.
        """
        if watch.here.watcher is not None:
            watch.here.watcher.host_value("mesh.rank")
        if self.reads is not None:
            self.reads.note(self._shape, self.axis_names)
        return self.own_index()

    def own_index(self) -> int:
        """:attr:`rank`, for the library itself: no checker is asked."""
        if self.reads is not None and by_program():
            self.reads.note_rank()
        mine = self.place.rank()
        if mine is None:
            self._outside_a_rank("mesh.rank")
        if self.place.world_size() != self.world_size:
            fail(
                "mesh.rank",
                f"a mesh made for {self.world_size} ranks is used among {self.place.world_size()}.",
                got=f"mesh {self._shape}",
                fix="launch as many ranks as the mesh has, or make the mesh inside the launched function",
            )
        if mine < len(self.ranks) and self.ranks[mine] == mine:  # most meshes: nothing to look for among thousands
            return mine
        if mine not in self.ranks:
            fail(
                "mesh.rank",
                f"rank {mine} is not in the mesh.",
                got=f"mesh {self._shape} of ranks {list(self.ranks)}",
                fix="call its collectives on those ranks only",
            )
        return self.ranks.index(mine)

    @property
    def coordinate(self) -> dict[str, int]:
        """Axis name to this rank's index along it, as Python ints. Raises as :attr:`rank` does."""
        if watch.here.watcher is not None:
            watch.here.watcher.host_value("mesh.coordinate")
        if self.reads is not None:
            return ReadCoordinate(self.own_coordinate(), self.reads, self._shape)
        return self.own_coordinate()

    def own_coordinate(self) -> dict[str, int]:
        """:attr:`coordinate`, for the library itself: no checker is asked."""
        if self.reads is not None and by_program():
            self.reads.note_rank()
        return self.coordinate_of(self.own_index())

    def coordinate_of(self, index: int) -> dict[str, int]:
        """Where the rank at this place of ``ranks`` is."""
        places = {}
        for name, length in reversed(self._shape.items()):
            index, places[name] = divmod(index, length)
        return dict(reversed(places.items()))

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return torch.device("cpu") if self._on_cpu else self.place.device()

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's DeviceMesh over the same process groups, for DTensor, DCP, FSDP2 and pipelining.

        Raises MeshError in-process: there are no process groups.
        """
        if self._device_mesh is None:
            if self.in_process:
                fail(
                    "mesh.device_mesh",
                    "ranks in one process have no torch process groups.",
                    got=f"in-process mesh {self._shape}",
                    fix="mc.reshard, mc.einsum, mc.shard_map and mc.parallel need none; for DTensor, FSDP2 and DCP run "
                    "under torchrun, or mc.launch(..., runtime='processes')",
                )
            self._device_mesh = self._make_device_mesh()
        return self._device_mesh

    def _make_device_mesh(self) -> DeviceMesh:
        home = self.own_coordinate()  # of a rank outside, which has no groups, there is none
        along = [ranks_along(self._shape, self.ranks, (name,), home) for name in self._shape]
        groups = [self.place.group(ranks, self.timeout) for ranks in along]
        grid = torch.tensor(self.ranks, dtype=torch.int, device="cpu").view(*self._shape.values())
        only = len(groups) == 1
        return DeviceMesh.from_group(
            groups[0] if only else groups,
            self.device.type,
            mesh=None if only else grid,
            mesh_dim_names=self.axis_names,
        )

    @staticmethod
    def from_device_mesh(device_mesh: DeviceMesh, *, names: Mapping[str, tuple[str, ...]] | None = None) -> Mesh:
        """The same ranks and names as torch's DeviceMesh, which must have ``mesh_dim_names``; ``names`` as of
        :func:`make_mesh`. No communication but to set up process groups, by the members of each axis together.
        """
        return _makers["from_device_mesh"](device_mesh, names)

    @Op("Mesh.split", composed=True)
    def split(self, axis: str, /, **sizes: int) -> Mesh:
        """A finer mesh over the same ranks, in which ``axis`` goes on naming the whole of what it is split into.

        ::

            {"pp": 2, "fsdp": 8}  ──►  {"pp": 2, "efsdp": 2, "ep": 4}, names={"fsdp": ("efsdp", "ep")}

        Args:
            axis: one of :attr:`axis_names`.
            sizes: name to size of its parts, major first; one may be -1.

        Returns: another mesh, with its own sequences of calls; all ranks make it. Names for several axes stay.

        Cost: that of :func:`make_mesh`.

        Raises:
            MeshError: no such axis, or one in another name; sizes that do not multiply to its size; a name twice.

        Example:
            >>> import torch, meshcomm as mc
            >>> (mesh := mc.make_mesh({"fsdp": 4}).split("fsdp", efsdp=2, ep=2))
            Mesh({'efsdp': 2, 'ep': 2}, names={'fsdp': ('efsdp', 'ep')})
            >>> mc.launch(lambda: mc.all_reduce(torch.ones(1), "fsdp", mesh=mesh).item(), ranks=4)
            [4.0, 4.0, 4.0, 4.0]
        """
        return _makers["split"](self, axis, sizes)

    # ------------------------------------------------------------------------------------------------------ axes

    def axis(self, name: AxisName, where: str = "mesh.axis") -> Axis:
        """The axis of this name, or of these names as one, for the rank that asks; ``where`` names the caller in
        errors.
        """
        try:
            # Outside a launch, and on meshes that are not of one, the axes are the mesh's own.
            if not self.in_process or (rank := _ranks.rank) is None:
                return self.axes[name]
            found: Axis = rank.axes[self, name]
            return found
        except (KeyError, TypeError):
            return self._find(name, where)

    def places(self) -> dict[int, str]:
        """Rank of the world to its place on the mesh: ``dp=1,tp=0``."""
        grid = itertools.product(*(range(length) for length in self._shape.values()))
        return {
            rank: ",".join(f"{name}={i}" for name, i in zip(self._shape, place, strict=True))
            for rank, place in zip(self.ranks, grid, strict=True)
        }

    def axes_of(self, name: AxisName, where: str = "mesh.axes_of") -> tuple[str, ...]:
        """The axes that a name, or a tuple of names, is of; needs no rank."""
        return checked_names(name, self._shape, where)

    def size_of(self, name: AxisName, where: str = "mesh.size_of") -> int:
        """How many ranks the axis has; needs no rank."""
        return math.prod([self._shape[part] for part in checked_names(name, self._shape, where)])  # dynamo knows lists

    def _find(self, name: AxisName, where: str) -> Axis:
        if torch.compiler.is_compiling():
            found: Axis = getattr(self, _prepare(self.key, name, where))
            return found
        return self._resolve(name, where)

    def _resolve(self, name: AxisName, where: str) -> Axis:
        parts = checked_names(name, self._shape, where)
        if self.place.rank() is None:
            self._outside_a_rank(where)
        rank = current_rank() if self.in_process else None
        # A name and the tuple of it alone are one axis; and two threads that ask for it find the same.
        with _one_at_a_time((self.key, parts)) if rank is None else contextlib.nullcontext():
            axes: dict[Any, Axis] = self.axes if rank is None else rank.axes
            keys: list[Any] = [name, parts, *(parts if len(parts) == 1 else ())]
            keys = keys if rank is None else [(self, key) for key in keys]
            found = next((axes[key] for key in keys if key in axes), None) or self._made(parts)
            axes.update(dict.fromkeys(keys, found))
        return found

    def _made(self, parts: tuple[str, ...]) -> Axis:
        mine = self.own_index()
        coordinate = self.coordinate_of(mine)
        ranks = ranks_along(self._shape, self.ranks, parts, coordinate)
        alone = len(ranks) == 1
        link = SoloLink() if alone else self.place.link(ranks, self.timeout, self._identity, parts)
        index = ranks.index(self.ranks[mine])
        kind = Axis if self.reads is None else ReadAxis
        found = kind(self, parts[0] if len(parts) == 1 else parts, ranks, index, link, coordinate)
        if (log := log_of(link)) is not None:
            log.named(found.name, coordinate)
        return found

    def _outside_a_rank(self, where: str) -> NoReturn:
        if self.in_process:
            fail(
                where,
                "called outside a rank.",
                got=f"in-process mesh {self._shape} in a thread that is not a rank's own",
                fix=f"run it inside mc.launch(fn, ranks={self.world_size}), or start with torchrun --nproc-per-node "
                f"{self.world_size}",
            )
        fail(where, "the mesh's process group is gone.", got=f"mesh {self._shape}", fix="make the mesh after mc.init()")

    def picture(self) -> Picture:
        """Where each rank of the world is."""
        return mesh_grids(self._shape, self.ranks, repr(self))

    def __repr__(self) -> str:
        return f"Mesh({self._shape}{f', names={self.names}' if self.names else ''})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self

    def __reduce__(self) -> NoReturn:
        fail("Mesh", "a mesh belongs to its process and cannot be pickled.", fix="make it inside the launched function")


# ---------------------------------------------------------------------------------------------- the current mesh


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
        self._outer: list[tuple[Mesh | None, int]] = []

    def __enter__(self) -> Mesh:
        self._outer.append((of_thread.mesh, of_thread.within))
        begin(self._mesh)
        return self._mesh

    def __exit__(self, *exc: object) -> None:
        of_thread.mesh, of_thread.within = self._outer.pop()
        if not torch.compiler.is_compiling():
            eras.begin(of_thread.mesh)


def begin(mesh: Mesh) -> None:
    """``mesh`` is the current one of this thread."""
    _set_current(mesh)
    if not torch.compiler.is_compiling():
        of_thread.within = _torch.backward_pass()
        eras.begin(mesh)


def _set_current(mesh: Mesh | None) -> None:
    of_thread.mesh = mesh
    if mesh is not None and mesh.key != of_thread.first:
        of_thread.several, of_thread.first = of_thread.first != "", mesh.key


def current_mesh() -> Mesh | None:
    """The mesh of the innermost ``with use_mesh(...)`` in this thread, or None. What a backward calls again finds the
    one that was current when its graph was made.

    Example:
        >>> import meshcomm as mc
        >>> with mc.use_mesh(mc.make_mesh({"dp": 1})):
        ...     mc.current_mesh()
        Mesh({'dp': 1})
    """
    mesh: Mesh | None = of_thread.mesh
    if (mesh is None or of_thread.several) and not torch.compiler.is_compiling():
        number = _torch.backward_pass()
        if number >= 0 and (mesh is None or number != of_thread.within):
            return cast("Mesh | None", eras.of_current_node() or mesh or eras.of_caller())
    return mesh


def _capture_current() -> Callable[[], None] | None:
    return None if of_thread.mesh is None else partial(_set_current, of_thread.mesh)


carry_over(_capture_current)
