"""Who this process is among those of its launch: the questions that need no mesh, and no initialisation either.

A rank of ``mc.launch`` in one process is answered for itself. Before ``init`` the launcher's variables answer, without
communication; in a plain process the answers are those of one rank alone.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from meshcomm import watch
from meshcomm.axis import AxisName
from meshcomm.collectives import check
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.runtime.identity import identity
from meshcomm.runtime.transports.dry.world import dry_world

T = TypeVar("T")


def _known(value: T | None, where: str) -> T:
    if value is None:
        fail(
            where,
            "the launcher has not told, and the processes have not met yet.",
            fix="call mc.init() first, or set LOCAL_RANK and LOCAL_WORLD_SIZE (torchrun, srun and mpiexec do)",
        )
    return value


def _differs(what: str, at: int | None = None, *, alone: bool = True) -> None:
    """A number that differs between ranks is read, or whether it is ``at``; not ``alone``: an axis will say so."""
    if watch.here.watcher is not None:
        watch.here.watcher.host_value(what)
    if alone and (dry := dry_world()) is not None:
        dry.reads.note_rank(at)


def rank() -> int:
    """This rank's number in the world, from 0; 0 in a plain process.

    A position on a mesh is ``mesh.rank`` or ``mesh.coordinate``; in differentiated or compiled code use
    :func:`axis_index`.

    Returns: an int, from 0 to ``world_size() - 1``.

    Cost: none; nobody is asked.

    Raises:
        MeshError: the launcher's variables contradict each other.
        VaryingError: where varying types are checked.

    Example:
        >>> import meshcomm as mc
        >>> mc.rank(), mc.world_size()
        (0, 1)
        >>> mc.launch(mc.rank, ranks=3)
        [0, 1, 2]
    """
    _differs("rank()")
    return identity().rank


def world_size() -> int:
    """How many ranks there are; 1 in a plain process.

    Returns: an int.

    Cost: none; nobody is asked.

    Raises:
        MeshError: the launcher's variables contradict each other.

    Example: see :func:`rank`.
    """
    return identity().size


def local_rank() -> int:
    """This rank's number among those on its machine.

    Returns: an int, from 0 to ``local_world_size() - 1``.

    Cost: none; nobody is asked.

    Raises:
        MeshError: called before ``init`` under a launcher that does not tell; variables that contradict each other.
        VaryingError: where varying types are checked.

    Example:
        >>> import meshcomm as mc
        >>> mc.launch(lambda: (mc.local_rank(), mc.local_world_size(), mc.node_rank()), ranks=2)
        [(0, 2, 0), (1, 2, 0)]
    """
    _differs("local_rank()")
    return _known(identity().local_rank, "local_rank")


def local_world_size() -> int:
    """How many ranks this machine has.

    Returns: an int.

    Cost: none; nobody is asked.

    Raises:
        MeshError: called before ``init`` under a launcher that does not tell; variables that contradict each other.

    Example: see :func:`local_rank`.
    """
    return _known(identity().local_world_size, "local_world_size")


def node_rank() -> int:
    """The number of this machine among those of the launch.

    Returns: an int.

    Cost: none; nobody is asked.

    Raises:
        MeshError: called before ``init`` under a launcher that does not tell; variables that contradict each other.
        VaryingError: where varying types are checked.

    Example: see :func:`local_rank`.
    """
    _differs("node_rank()")
    return _known(identity().node_rank, "node_rank")


def backend() -> str | None:
    """What moves tensors between the ranks, as torch writes it: "gloo", "cpu:gloo,cuda:nccl".

    Returns: before ``init`` what it would choose; "in-process" on a rank of ``mc.launch`` in one process; None in a
    plain process.

    Cost: none; nobody is asked.

    Raises:
        MeshError: the launcher's variables contradict each other.

    Example:
        >>> import meshcomm as mc
        >>> mc.backend() is None, mc.launch(mc.backend, ranks=1)
        (True, ['in-process'])
    """
    return identity().backend


def device() -> torch.device:
    """The device that this rank computes on; torch's default device in a plain process and on its ranks.

    Returns: a ``torch.device``.

    Cost: none; nobody is asked.

    Raises:
        MeshError: called before ``init`` under a launcher that does not tell; variables that contradict each other.

    Example:
        >>> import meshcomm as mc
        >>> mc.device()
        device(type='cpu')
    """
    return _known(identity().device, "device")


def is_distributed() -> bool:
    """Whether this is a rank of a launch: in-process, of a launcher, of an initialised process group; of one rank too.

    Returns: a bool.

    Cost: none; nobody is asked.

    Raises:
        MeshError: the launcher's variables contradict each other.

    Example:
        >>> import meshcomm as mc
        >>> mc.is_distributed(), mc.launch(mc.is_distributed, ranks=2)
        (False, [True, True])
    """
    return identity().launched


def get_dist_info() -> tuple[int, int]:
    """:func:`rank` and :func:`world_size`.

    Returns: two ints.

    Cost: none; nobody is asked.

    Raises:
        MeshError: the launcher's variables contradict each other.
        VaryingError: where varying types are checked.

    Example:
        >>> import meshcomm as mc
        >>> mc.get_dist_info()
        (0, 1)

    Source: ``mmengine.dist.get_dist_info``.
    """
    _differs("get_dist_info()")
    here = identity()
    return here.rank, here.size


def is_main(axis: AxisName | None = None, *, mesh: Mesh | None = None) -> bool:
    """Whether this is the one rank that prints and writes.

    Args:
        axis: None for the first rank of the world; a name or a tuple of names for the first along it.
        mesh: the current mesh by default; not needed without ``axis``.

    Returns: a bool.

    Cost: none; nobody is asked.

    Raises:
        MeshError: no such axis; the launcher's variables contradict each other.
        VaryingError: where varying types are checked.

    Example:
        >>> import meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2, "tp": 2})
        >>> mc.launch(lambda: (mc.is_main(), mc.is_main("tp", mesh=mesh)), ranks=4)
        [(True, True), (False, False), (False, True), (False, False)]
    """
    if axis is None:
        _differs("is_main()", 0)
        return identity().rank == 0
    _differs("is_main()", alone=False)
    return check.axis_of("is_main", axis, mesh).is_at(0)
