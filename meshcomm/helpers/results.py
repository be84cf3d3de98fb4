"""The results of a dataset that the ranks worked through in turns, back in order: collect_results.

n = size of the axis.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from meshcomm.collectives import check
from meshcomm.errors import MeshError, held
from meshcomm.helpers.objects import packed, unpacked
from meshcomm.helpers.parcels import FIX, Courier
from meshcomm.helpers.pickles import pack
from meshcomm.mesh import Axis, AxisName, Mesh

__all__ = ["collect_results"]

T = TypeVar("T")
_WHERE = "collect_results"


def collect_results(
    parts: Sequence[T],
    size: int,
    axis: AxisName,
    dst: int = 0,
    *,
    device: str | torch.device = "cpu",
    tmpdir: str | os.PathLike[str] | None = None,
    mesh: Mesh | None = None,
) -> list[T] | None:
    """Put the ranks' results for a dataset in the order of the dataset, on one rank.

    ::

        rank 0  [r0 r2 r4]      [r0 r1 r2 r3 r4]
        rank 1  [r1 r3 r0]  ->  None                size=5, dst=0

    Rank i has worked on samples i, i + n, i + 2n, ..., as ``DistributedSampler`` and ``DataLoader`` hand them out; what
    it has beyond its share of ``size`` is padding and stays behind. Pickle carries the results: use it among processes
    that trust each other.

    Type: varying -> one rank.

    Args:
        parts: this rank's results in order, anything that can be pickled; lengths may differ between ranks.
        size: how many samples the dataset has; equal on every rank.
        axis: a name, or a tuple of names, of which the first is major.
        dst: the index along ``axis`` that gets them.
        device: what the bytes travel through: "cpu", or the mesh's device ("cuda"), where its backend is faster. A mesh
            whose backend cannot move CPU tensors uses its device.
        tmpdir: a folder that all ranks see. If given, the results go through files in it, which ``dst`` removes, and
            only a kilobyte from each rank through collectives. Nobody but this user can read the files; a digest of
            each goes through the collectives, and ``dst`` unpickles nothing that is not what its peer has written.
        mesh: the current mesh by default.

    Returns: on ``dst`` a list of ``size`` new objects; None elsewhere. Tensors inside arrive on the receiver's device
    (those on the CPU on the CPU).

    Backward: none.

    Cost: the bytes of the pickle, sent by each rank to ``dst`` in chunks, and two steps with a kilobyte from each rank.

    Raises:
        MeshError: on all ranks: fewer results on one of them than its share, a ``size`` or ``dst`` that differs, what
            cannot be pickled (with the path to the culprit), a ``tmpdir`` that a rank cannot write or ``dst`` not see;
            no such axis or index; a device that is neither the CPU nor the mesh's.

    Example:
        >>> import meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def main():
        ...     mine = [f"r{i % 5}" for i in range(mesh.rank, 6, 2)]
        ...     return mc.collect_results(mine, 5, "dp", mesh=mesh)
        >>> mc.launch(main, ranks=2)
        [['r0', 'r1', 'r2', 'r3', 'r4'], None]

    Source: ``mmengine.dist.collect_results``.
    """
    ax = check.axis_of(_WHERE, axis, mesh)
    courier = Courier(_WHERE, ax, None, size=size, dst=dst, files=tmpdir is not None)
    try:
        with held():
            dst = check.checked_index(_WHERE, dst, ax, "dst")
            if not check.whole_number(size) or size < 0:
                check.explain(_WHERE, f"size={size!r} is not a number of samples.", ax, fix="len(dataset)")
            if tmpdir is not None and not isinstance(tmpdir, (str, os.PathLike)):
                check.explain(_WHERE, f"tmpdir={tmpdir!r} is no path.", ax, fix="a folder that all ranks see, or None")
            route = _route(device, ax)
    except MeshError as error:
        courier.refuse(error)
        raise
    courier = Courier(_WHERE, ax, route, size=size, dst=dst, files=tmpdir is not None)
    mine, problem = _share(parts, size, ax)
    data = bytearray()
    if problem is None:
        packed_up, problem = packed(lambda: pack(mine, "parts"))
        data = packed_up or data
    if tmpdir is None:
        got = courier.gather(data, dst, problem)
    else:
        got = _through_files(courier, data, dst, Path(tmpdir), problem)
    lists = unpacked(courier, got or ())
    return None if got is None else [lists[i % ax.size][i // ax.size] for i in range(size)]


def _route(device: str | torch.device, axis: Axis) -> torch.device:
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        kind = None
    own = axis.mesh.device
    if kind not in ("cpu", own.type):
        check.explain(
            _WHERE, f"device={device!r} is neither the CPU nor the mesh's device, {own}.", axis,
            fix=f"'cpu' or {own.type!r}",
        )  # fmt: skip
    return own if kind == own.type else torch.device("cpu")


def _share(parts: Sequence[T], size: int, axis: Axis) -> tuple[list[T], str | None]:
    """This rank's results without its padding; or what is wrong with them."""
    if not isinstance(parts, Sequence) or isinstance(parts, (str, bytes)):
        return [], f"parts is a {type(parts).__name__}{FIX}pass a list with one result per sample"
    wanted = len(range(axis.index, size, axis.size))
    if len(parts) < wanted:
        what = f"has {len(parts)} results, but {wanted} of the {size} samples are its own"
        samples = f"{axis.index}, {axis.index + axis.size}, ..."
        return [], f"{what}{FIX}give each rank i samples i, i + {axis.size}, ... (here {samples}), or correct size="
    return list(parts[:wanted]), None


# -------------------------------------------------------------------------------------------------------- through files


def _through_files(
    courier: Courier, data: bytearray, dst: int, folder: Path, problem: str | None
) -> list[bytearray] | None:
    """Each rank writes a file, ``dst`` reads them. Nobody waits for a file: all are there when all have said so."""
    me = courier.axis.index
    token = courier.broadcast(bytearray(secrets.token_hex(8).encode()), dst, problem).decode()
    here = folder / f"meshcomm-{token}"
    with _removed(here, me, dst):
        trouble = None
        try:
            here.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(here / str(me), "xb", opener=_private) as file:
                file.write(data)
        except (OSError, ValueError) as error:  # a path that no system can have is a ValueError
            trouble = f"cannot write to tmpdir {str(folder)!r}: {getattr(error, 'strerror', None) or error}"
        rows = courier.meet(trouble, len(data), hashlib.sha256(data).digest())
        sent = [(row.size, bytes(row.inline)) for row in rows]
        got, trouble = _read(here, sent) if me == dst else (None, None)
        courier.meet(trouble)
    return got


@contextlib.contextmanager
def _removed(folder: Path, me: int, dst: int) -> Iterator[None]:
    """At the end ``dst`` removes the folder; the others their files, for the folder may not be one for all."""
    try:
        yield
    finally:
        if me == dst:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            with contextlib.suppress(OSError, ValueError):
                (folder / str(me)).unlink()
                folder.rmdir()


def _private(path: str, flags: int) -> int:
    """Opens no link, waits for no pipe, and makes what only this user can read."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _read(folder: Path, sent: Sequence[tuple[int, bytes]]) -> tuple[list[bytearray] | None, str | None]:
    """What the ranks have written. It will be unpickled: so it must have the digest that its rank has told."""
    found = []
    for i, (size, digest) in enumerate(sent):
        try:
            with open(folder / str(i), "rb", opener=_private) as file:
                there = os.fstat(file.fileno())
                whole = stat.S_ISREG(there.st_mode) and there.st_size == size
                found.append(bytearray(file.read() if whole else b""))
        except OSError as error:
            return None, (
                f"cannot read what index {i} wrote to tmpdir: {error.strerror or error}"
                f"{FIX}use a folder that all machines share, or leave tmpdir= out"
            )
        if not whole:
            return None, f"index {i} wrote {size} bytes to tmpdir, {there.st_size} are there"
        if hashlib.sha256(found[-1]).digest() != digest:
            return None, f"what index {i} wrote to tmpdir has been changed{FIX}a folder that nobody else can write to"
    return found, None
