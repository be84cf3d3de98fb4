"""The results of a dataset that the ranks worked through in turns, back in order: collect_results.

n = size of the axis.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch

from meshcomm.axis import Axis, AxisName
from meshcomm.collectives import check
from meshcomm.errors import MeshError, few, held
from meshcomm.mesh import Mesh
from meshcomm.objects.objects import packed, unpacked
from meshcomm.objects.parcels import FIX, Courier
from meshcomm.objects.pickles import pack
from meshcomm.runtime.ops import Op

T = TypeVar("T")
_WHERE = "collect_results"


@Op("collect_results", "V -> one rank", compared=("size", "dst", "order", "files"))
def collect_results(
    parts: Sequence[T],
    size: int,
    axis: AxisName,
    dst: int = 0,
    *,
    order: Literal["stride", "contiguous"] | None = None,
    device: str | torch.device = "cpu",
    tmpdir: str | os.PathLike[str] | None = None,
    mesh: Mesh | None = None,
) -> list[T] | None:
    """Put the ranks' results for a dataset in the order of the dataset, on one rank.

    ::

        rank 0  [r0 r2 r4]      [r0 r1 r2 r3 r4]
        rank 1  [r1 r3 r0]  ->  None                size=5, dst=0, order="stride"

        rank 0  [r0 r1 r2]      [r0 r1 r2 r3 r4]
        rank 1  [r3 r4]     ->  None                size=5, dst=0, order="contiguous"

    Pickle carries the results: use it among processes
    that trust each other.

    Type: varying -> one rank.

    Args:
        parts: this rank's results in order, anything that can be pickled; lengths may differ between ranks.
        size: how many samples the dataset has; equal on every rank.
        axis: a name, or a tuple of names, of which the first is major.
        dst: the index along ``axis`` that gets them.
        order: "stride" if rank i has worked on samples i, i + n, i + 2n, ..., as ``DistributedSampler`` and
            ``DataLoader`` hand them out; "contiguous" if the ranks have worked on one run of samples after the other,
            of any lengths. What a rank has beyond its share of ``size`` is padding and stays behind: of runs that of
            ranks with equally many. It may be left out only where the lengths tell.
        device: what the bytes travel through: "cpu", or the mesh's device ("cuda"), where its backend is faster. A mesh
            whose backend cannot move CPU tensors uses its device.
        tmpdir: a folder that all ranks see. If given, the results go through files in it, which ``dst`` removes, and
            only a kilobyte from each rank through collectives. Nobody but this user can read the files; a digest of
            each goes through the collectives, and ``dst`` unpickles nothing that is not what its peer has written.
        mesh: the current mesh by default.

    Returns: on ``dst`` a list of ``size`` new objects; None elsewhere. Tensors inside arrive on the receiver's device
    (those on the CPU on the CPU).

    Backward: none.

    Cost: the bytes of the pickle, sent by each rank to ``dst`` in chunks, and two steps with a kilobyte from each rank;
    one more unless the order is "stride".

    Raises:
        MeshError: on all ranks: fewer results than samples, lengths that do not tell the order, a ``size``, ``dst`` or
            ``order`` that differs, what cannot be pickled (with the path to the culprit), a ``tmpdir`` that a rank
            cannot write or ``dst`` not see;
            no such axis or index; a device that is neither the CPU nor the mesh's.

    Example:
        >>> import meshcomm as mc
        >>> mesh = mc.make_mesh({"dp": 2})
        >>> def main():
        ...     mine = [f"r{i % 5}" for i in range(mesh.rank, 6, 2)]
        ...     return mc.collect_results(mine, 5, "dp", order="stride", mesh=mesh)
        >>> mc.launch(main, ranks=2)
        [['r0', 'r1', 'r2', 'r3', 'r4'], None]

    Source: ``mmengine.dist.collect_results``.
    """
    ax = check.axis_of(_WHERE, axis, mesh)
    courier = Courier(_WHERE, ax, None, size=size, dst=dst, order=order, files=tmpdir is not None)
    try:
        with held():
            dst = check.checked_index(_WHERE, dst, ax, "dst")
            if not check.whole_number(size) or size < 0:
                check.explain(_WHERE, f"size={size!r} is not a number of samples.", ax, fix="len(dataset)")
            if order not in (None, "stride", "contiguous"):
                check.explain(_WHERE, f"order={order!r} is no order.", ax, fix="'stride' or 'contiguous'")
            if tmpdir is not None and not isinstance(tmpdir, (str, os.PathLike)):
                check.explain(_WHERE, f"tmpdir={tmpdir!r} is no path.", ax, fix="a folder that all ranks see, or None")
            route = _route(device, ax)
    except MeshError as error:
        courier.refuse(error)
        raise
    courier = Courier(_WHERE, ax, route, size=size, dst=dst, order=order, files=tmpdir is not None)
    places, problem = _places(courier, parts, size, order)
    mine = list(parts[: len(places[ax.index])]) if problem is None else []
    data = bytearray()
    if problem is None:
        packed_up, problem = packed(lambda: pack(mine, "parts"))
        data = packed_up or data
    if tmpdir is None:
        got = courier.gather(data, dst, problem)
    else:
        got = _through_files(courier, data, dst, Path(tmpdir), problem)
    lists = unpacked(courier, got or ())
    if got is None:
        return None
    found = {at: result for places_of_one, results in zip(places, lists, strict=True)
             for at, result in zip(places_of_one, results, strict=True)}  # fmt: skip
    return [found[at] for at in range(size)]


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


def _places(courier: Courier, parts: Sequence[T], size: int, order: str | None) -> tuple[list[range], str | None]:
    """Which samples the results of each rank are, padding left out; or what is wrong with this rank's."""
    n, me = courier.axis.size, courier.axis.index
    strided = [range(i, size, n) for i in range(n)]
    if not isinstance(parts, Sequence) or isinstance(parts, (str, bytes)):
        problem = f"parts is a {type(parts).__name__}{FIX}pass a list with one result per sample"
        if order != "stride":
            courier.meet(problem)
        return strided, problem
    if order == "stride" or n == 1:
        return strided, _too_few(len(parts), strided[me], size, me, n)
    lengths = courier.meet(None, len(parts)).sizes
    runs = _runs(lengths, size)
    if order is None:
        fits = all(length >= len(samples) for length, samples in zip(lengths, strided, strict=True))
        if fits and (runs is None or [*map(list, runs)] == [*map(list, strided)]):
            return strided, None
        if fits:
            what = f"the lengths of the ranks' results, {few(lengths)}, do not tell in which order they are."
            fix = (
                f"order='stride' if rank i has samples i, i + {n}, ... (DistributedSampler),"
                " order='contiguous' if it has a run of them"
            )
            check.explain(_WHERE, what, courier.axis, fix=fix)
    if runs is None:
        what = f"the ranks have {sum(lengths)} results ({few(lengths)}), and there are {size} samples."
        check.explain(_WHERE, what, courier.axis, fix="one result per sample, and padding at the end alone; or size=")
    return runs, None


def _runs(lengths: Sequence[int], size: int) -> list[range] | None:
    """The samples of each rank if they are one run after the other; None if there are not as many."""
    ends = list(itertools.accumulate(lengths, initial=0))
    if ends[-1] != size and (ends[-1] < size or min(lengths) < max(lengths)):
        return None
    return [range(min(begin, size), min(end, size)) for begin, end in itertools.pairwise(ends)]


def _too_few(length: int, samples: range, size: int, me: int, n: int) -> str | None:
    if length >= len(samples):
        return None
    what = f"has {length} results, but {len(samples)} of the {size} samples are its own"
    return f"{what}{FIX}give each rank i samples i, i + {n}, ... (here {me}, {me + n}, ...), or correct size="


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
        with contextlib.suppress(OSError, ValueError):  # as above; Python 3.13 ignores errors of the system's alone
            if me == dst:
                shutil.rmtree(folder, ignore_errors=True)
            else:
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
