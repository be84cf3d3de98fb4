"""What ranks agree on: small numbers of the host, for which no tensor is made, sent and read back but in the link; of
these, seeds, and random states that are the same on some ranks and differ between others.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from meshcomm import _torch
from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.runtime.call import Call, for_later
from meshcomm.runtime.hooks.ranges import calling
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.threads.random_state import RandomState, mixed
from meshcomm.watch import drawing, paused


def agree(values: Sequence[int], axis: Axis, src: int | None = None, op: str = "") -> list[list[int]]:
    """The numbers of every rank along ``axis``, as many on each, in order of index; with ``src`` those of that index
    alone, with ``op`` one row in which they are reduced.
    """
    return for_later(False, _agree, values, axis, src, op)


def begin_to_agree(values: Sequence[int], axis: Axis, src: int | None = None, op: str = "") -> Any:
    """The same; or a Pending of it."""
    return for_later(True, _agree, values, axis, src, op)


def _agree(values: Sequence[int], axis: Axis, src: int | None, op: str) -> Any:
    with paused(), torch.no_grad():
        what = "broadcast" if src is not None else "all_reduce" if op else "all_gather"
        given = {"src": src} if src is not None else {"op": op} if op else {}
        call = Call(what, tuple(given.values()), tuple(given), None, axis, torch.int64, (len(values),))
        with calling(axis, call):
            return axis.link.agree(values, src, op)


@Op("sync_seed", "a Python int", composed=True)
def sync_seed(axis: AxisName, *, mesh: Mesh | None = None) -> int:
    """A seed on which all ranks along ``axis`` agree.

    ::

        rank 0  draws 17      17
        rank 1  draws 42  ->  17

    Type: a Python int, the same on every rank along ``axis``.

    Args:
        axis: a name, or a tuple of names.
        mesh: the current mesh by default.

    Returns: an int from 0 to 2**63 - 1. Index 0 has drawn it from torch's generator of the CPU, which
        ``torch.manual_seed`` seeds. Every rank draws, so that generators that were alike stay so.

    Backward: none, for a seed is a Python int.

    Cost: a broadcast of 8 bytes.

    Raises:
        MeshError: no such axis; called outside a rank.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> first, second = mc.launch(lambda: mc.sync_seed("dp", mesh=mesh), ranks=2)
        >>> first == second
        True

    Source: ``sync_random_seed`` of MMEngine.
    """
    return _agreed("sync_seed", axis, mesh)


def _agreed(where: str, axis: AxisName, mesh: Mesh | None) -> int:
    ax = check.axis_of(where, axis, mesh)
    with paused(), _torch.outside_transforms(), _torch.without_modes():
        seed = int(torch.empty(1, dtype=torch.int64, device="cpu").random_().item())
    return agree([seed], ax, 0)[0][0]


class _Local(threading.local):
    forks = 0


_local = _Local()


def forks_open() -> int:
    """How many :func:`fork_rng` this thread is inside of."""
    return _local.forks


_APART = 0x666F726B
"""So that a seed that the program has started from does not give its numbers again."""


@Op("fork_rng", "random tensors vary along ``axis``", composed=True)
@contextlib.contextmanager
def fork_rng(axis: AxisName | tuple[()], *, seed: int | None = None, mesh: Mesh | None = None) -> Iterator[None]:
    """Inside, random functions draw differently on each index along ``axis`` and alike along all other axes.

    ::

        with fork_rng("dp"):             tp=0        tp=1
            torch.rand(1)        dp=0   [0.31]      [0.31]
                                 dp=1   [0.87]      [0.87]

    The states are those of torch, on the CPU and on the accelerator if it is in use, of numpy's ``random`` module and
    of Python's. On leaving, by an exception too, they are what they were before, but for what drawing the seed took.
    What :func:`torch.utils.checkpoint.checkpoint` computes again inside draws the same torch numbers again. The
    innermost of several counts.

    Which numbers an index draws depends on the seed and the index alone, and so what a tensor holds depends on how it
    is cut. :func:`rng` draws what does not.

    Type: random tensors vary along ``axis`` and are invariant along all other axes, provided that all ranks draw alike.

    Args:
        axis: a name; a tuple of names, whose indices count as one, the first major; ``()`` for the same on all ranks.
        seed: an int, the same on every rank. By default one is agreed on at each entry as by :func:`sync_seed`, so that
            the next entry draws other numbers, and all of them follow from the ``torch.manual_seed`` of the mesh's
            first rank.
        mesh: the current mesh by default.

    Returns: a context manager, and a decorator.

    Backward: none, for it only chooses the numbers.

    Cost: without a seed a broadcast of 8 bytes over all axes of the mesh; with one nothing is communicated.

    Raises:
        MeshError: no such axis; a seed that is no int; called outside a rank.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2, "tp": 2})
        >>> def draw():
        ...     with mc.fork_rng("dp", mesh=mesh):
        ...         return torch.rand(1).item()
        >>> a, b, c, d = mc.launch(draw, ranks=4)
        >>> a == b, c == d, a == c
        (True, True, False)

    Source: the random states of Megatron's tensor parallel regions; ``torch.random.fork_rng``.
    """
    where = "fork_rng"
    over = check.mesh_of(where, axis, mesh)
    parts = () if axis == () else over.axes_of(axis, where)
    sizes = over.shape
    if seed is not None and not check.whole_number(seed):
        fail(where, f"seed={seed!r} is not an int.", fix="an int that is the same on every rank, or None")
    place = over.axis(over.axis_names[0], where).coordinate
    index = 0
    for part in parts:
        index = index * sizes[part] + place[part]
    if over.device.type not in ("cpu", "meta"):
        torch.empty(0, device=over.device)  # in use from now on, and its state is one of those to exchange
    if seed is None:
        seed = _agreed(where, over.axis_names, over)
    outer = RandomState()
    _local.forks += 1
    try:
        RandomState(mixed(int(seed), _APART), index).load()
        with drawing(frozenset(parts), over):
            yield
    finally:
        outer.load()
        _local.forks -= 1
