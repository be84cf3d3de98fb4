"""One rank of a mesh whose other ranks are not there: shapes and dtypes of what they would send are known, values are
not. Nothing moves, so a mesh may have thousands of ranks.

::

    a tensor without memory   link.all_gather(x)  ->  [n, *x.shape], without memory
    numbers of the host       link.agree([3, 5])  ->  [[3, 5], [3, 5], ...]     the others say what this rank says
    bytes in a message        want from rank 1    ->  what the run of rank 1 has posted; MissingError, if nobody ran it

The second is right where ranks agree on something, and that is what these numbers are for; the third is for outlines of
pytrees between stages of a pipeline, and objects that are sent: who runs ranks one after the other (``dry_run``) runs
the sender first.

n = number of ranks in the group.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import fail
from meshcomm.runtime.call import Post, Want, told
from meshcomm.runtime.ledger import Ledger
from meshcomm.runtime.pending import Pending
from meshcomm.runtime.process.neighbours import SWITCH
from meshcomm.runtime.process.reuse import Reserve
from meshcomm.runtime.transports import dtypes, exact
from meshcomm.runtime.transports.algorithms import LARGE
from meshcomm.runtime.transports.dry.places import by_program
from meshcomm.runtime.transports.dry.world import DryWorld, Message, here
from meshcomm.runtime.transports.protocol import Defaults, Empty, Link, Parts

_ALL, _RUNS, _SAID = -1, -1, -2
"""To everybody; what stands for a tag where bytes are cut into runs, and where a rank says something to all."""


class DryPlace:
    """Where the ranks are: nowhere, but the one that runs."""

    in_process = False

    def __init__(self, world: DryWorld) -> None:
        self._run, self.reads = world, world.reads

    def rank(self) -> int:
        """The rank that runs."""
        if by_program():
            self.reads.note_rank()
        return self._run.rank

    def world_size(self) -> int:
        """How many there would be."""
        return self._run.size

    def identify(self, shape: Mapping[str, int], ranks: tuple[int, ...]) -> str:
        """Alike in the runs of all of its ranks."""
        kind = (*shape.items(), ranks)
        self._run.made[kind] += 1
        name = f"{dict(shape)} of {ranks[0]} to {ranks[-1]}, {self._run.made[kind]}"
        self.reads.made(name, shape, ranks)
        return name

    def link(self, ranks: tuple[int, ...], timeout: timedelta | None, mesh: str, axis: tuple[str, ...]) -> Link:
        """One that counts."""
        made = DryLink(self._run, ranks, f"{mesh}: {','.join(axis)}", axis)
        self.reads.linked(mesh, axis, made.name)
        self._run.linked(made)
        return cast(Link, made)

    def group(self, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
        """There is none."""
        fix = "what needs one of torch's groups runs on processes: start with torchrun"
        fail("dry_run", "a dry run has no process group.", fix=fix)

    def device(self) -> torch.device:
        """The caller's default device."""
        return torch.get_default_device()


class _Arrived(Pending):
    """What was begun; what it was given stays until somebody waits, as it would."""

    __slots__ = ("_kept", "_spare", "_value")

    def __init__(self, value: Any, kept: Any, spare: int) -> None:
        self._value, self._kept, self._spare = value, kept, spare

    def wait(self, timeout: float | None) -> Any:
        """It is there."""
        _take_for_a_moment(self._spare)
        self._kept, self._spare = None, 0
        return self._value

    def done(self) -> bool:
        """It is."""
        return True

    def abandon(self) -> None:
        """Nobody has to know."""
        self._kept = None


def _take_for_a_moment(spare: int) -> None:
    """Room of the CPU's, in which who waits adds what came."""
    if spare:
        torch.empty(spare, dtype=torch.uint8, device="cpu")


def _result(value: Any, given: Any = None, spare: int = 0) -> Any:
    """``spare``: bytes that who waits needs beside it."""
    if told.later:
        return _Arrived(value, given, spare)
    _take_for_a_moment(spare)
    return value


class DryLink(Defaults):
    """The link of one rank to others that are not there."""

    def __init__(self, world: DryWorld, ranks: tuple[int, ...], name: str, axis: tuple[str, ...]) -> None:
        self.size, self._index = len(ranks), ranks.index(world.rank)
        self._run, self._ranks, self.name = world, ranks, name
        self.axis = axis[0] if len(axis) == 1 else axis
        self._numbers: Counter[tuple[int, ...]] = Counter()
        self.orders: dict[Any, list[list[int]]] = {}
        if world.reserve is None:
            world.reserve = Reserve(lambda: 0.0, lambda: True)
        self._empty, self._shares = world.reserve.empty, os.environ.get(SWITCH) != "0"
        self.ledger = Ledger()

    @property
    def index(self) -> int:
        """This rank's."""
        if by_program():
            self._run.reads.note_along(self.name)
        return self._index

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those of the group, which say where this one is."""
        if by_program():
            self._run.reads.note_rank()
        return self._ranks

    def is_of(self, world: DryWorld) -> bool:
        """Whether it is one of this run."""
        return self._run is world

    def copies(self, name: str, x: Tensor) -> bool:
        """As an accelerator's backend: what it reduces in place begins with a copy."""
        return name in ("broadcast", "all_reduce")

    def moves_beside(self, device: torch.device) -> bool:
        """What an accelerator's backend does."""
        return device.type != "cpu"

    def _new(self, shape: Sequence[int], x: Tensor) -> Tensor:
        """A result, which lies where that of processes of one machine would."""
        return self._empty(shape, x) if x.is_cpu else x.new_empty(shape)

    def _like(self, x: Tensor) -> Tensor:
        return self._new(x.shape, x)

    def _reduced(self, shape: Sequence[int], x: Tensor, op: str, *, cut: bool) -> Tensor:
        """The result of a reduction of parts of this shape, ``cut`` if of one for each rank; the CPU's are added here,
        and kept until then. Where processes share no memory, what the others have sent has room of its own: their
        parts, or all that they have of what is small.
        """
        given, y = [x] if x.is_cpu or cut else [], self._new(shape, x)
        spare = dtypes.spare_bytes(op, x.dtype, y.numel(), self.size) if x.is_cpu else 0
        if not self._shares and x.is_cpu and (cut or self.size > 2):
            in_steps = not cut and x.nbytes * self.size > LARGE
            came = x.numel() if cut or in_steps else self.size * x.numel()
            given.append(x.new_empty(came - (0 if in_steps else y.numel())))  # a result is made when all has come
            spare += 0 if in_steps else y.nbytes
        return cast(Tensor, _result(y, given, spare))

    def agree(self, values: Sequence[int], src: int | None = None, op: str = "") -> list[list[int]]:
        """The others say what this rank says."""
        with _torch.outside_transforms():
            mine, mean = torch.tensor(values, dtype=torch.int64, device="cpu"), list(values)
            if src is not None:
                mean = self._of_host(mine, src if here.source is not None else self._index).tolist()
                self.broadcast(mine, src)
            elif op:
                self.all_reduce(mine, op)
                mean = dtypes.fold(op, [mine] * self.size).tolist() if op not in exact.EXACT else mean
            else:
                rows: Any = self.all_gather(mine)
                if here.source is not None:
                    return _result((rows.wait(None) if isinstance(rows, Pending) else rows).tolist())  # type: ignore[no-any-return]
        return _result([mean] * (1 if src is not None or op else self.size))  # type: ignore[no-any-return]

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """As large as ``x``."""
        if _host(x):
            return cast(Tensor, _result(dtypes.fold(op.removeprefix("exact "), [x] * self.size)))
        return self._reduced(x.shape, x, op, cut=False)

    def all_reduce_own(self, x: Tensor, op: str) -> Tensor:
        """In place, but for the CPU's, which processes read where it was copied to."""
        return self.all_reduce(x, op) if x.is_cpu or op in exact.EXACT else cast(Tensor, _result(x))

    def takes_parts(self, device: torch.device, dtype: torch.dtype) -> bool:
        """As processes that share memory do, which copy them there."""
        return self._shares and told.later and device.type == "cpu" and dtype in dtypes.FLOATS

    def sum_parts(self, x: Parts) -> Tensor:
        """As large as all of them."""
        return self._reduced(x.shape, torch.empty(0, dtype=x.dtype, device="cpu"), "sum", cut=False)

    def scatter_parts(self, x: Parts, op: str) -> Tensor:
        """Of which this rank gets one of n parts."""
        return self._reduced(x.shape[1:], torch.empty(0, dtype=x.dtype, device="cpu"), op, cut=True)

    def all_gather(self, x: Tensor) -> Tensor:
        """n times as large."""
        if _host(x) and here.each:
            return cast(Tensor, _result(torch.stack(self._of_each(x)), x))
        y = x.expand(self.size, *x.shape).clone() if _host(x) else self._new((self.size, *x.shape), x)
        if _host(x) and here.source is not None:
            y[here.source] = self._of_host(x, here.source)
        return cast(Tensor, _result(y, x))

    def gather_flat(self, x: Tensor, empty: Empty | None = None) -> Any:
        """The same, one behind the other."""
        first, *others = x.shape
        if _host(x):
            return _result(x.repeat(self.size, *(1 for _ in others)), x)
        return _result(self._new((first * self.size, *others), x) if empty is None else empty(x, first * self.size), x)

    def reduce_scatter(self, x: Tensor, op: str) -> Tensor:
        """A row."""
        if _host(x):
            return cast(Tensor, _result(dtypes.fold(op.removeprefix("exact "), [x[self._index]] * self.size)))
        return self._reduced(x.shape[1:], x, op, cut=True)

    def scatter_flat(self, x: Tensor, op: str) -> Any:
        """The same of what lies so."""
        return self._reduced((x.shape[0] // self.size, *x.shape[1:]), x, op, cut=True)

    def all_to_all(self, x: Tensor, send: Sequence[int], recv: Sequence[int]) -> Tensor:
        """As many as are received."""
        if not _host(x):
            return cast(Tensor, _result(self._new((sum(recv),), x), x))
        number = self._count(0, 0, _RUNS)
        for to, run in zip(self._ranks, x.split(list(send)), strict=True):
            self._run.post((self.name, self._run.rank, to, _RUNS, number), run)
        runs = [self._run.take((self.name, src, self._run.rank, _RUNS, number)) if length else x[:0]
                for src, length in zip(self._ranks, recv, strict=True)]  # fmt: skip
        return cast(Tensor, _result(torch.cat(cast("list[Tensor]", runs)), x))

    def swap_flat(self, x: Tensor) -> Any:
        """As many as are given."""
        return _result(self._like(x), x)

    def permute(self, x: Tensor, source: int | None, destination: int | None) -> Tensor:
        """What came; zeros are unknown too, for others have none."""
        return cast(Tensor, _result(self._like(x), x))

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """As large as ``x``."""
        return cast(Tensor, _result(self._of_host(x, src).clone() if _host(x) else self._like(x)))

    def reduce(self, x: Tensor, op: str, dst: int) -> Tensor | None:
        """On ``dst`` as large as ``x``; the backend's copy is there on the others too, until it has been sent."""
        y = self._like(x)
        self._run.reads.note_index(self.name, dst)
        return cast("Tensor | None", _result(y if self._index == dst else None, y))

    def gather(self, x: Tensor, dst: int) -> Tensor | None:
        """On ``dst`` n times as large."""
        self._run.reads.note_index(self.name, dst)
        return cast("Tensor | None", _result(self._new((self.size, *x.shape), x) if self._index == dst else None, x))

    def scatter(self, x: Tensor | None, like: Tensor, src: int) -> Tensor:
        """As large as ``like``."""
        return cast(Tensor, _result(self._like(like), x))

    def exchange(self, posts: Sequence[Post], wants: Sequence[Want]) -> list[Tensor]:
        """Bytes as they were posted; of all else only the shapes. What the CPU sends lies where it is read at once."""
        for x, dst, tag in posts:
            held = None if _torch.is_without_memory(x) else x.clone()
            self._run.post(self._message(self._run.rank, self._ranks[dst], tag), held)
        got = []
        for src, shape, dtype, tag, device in wants:
            message = self._message(self._ranks[src], self._run.rank, tag)
            held = self._run.take(message) if dtype is torch.uint8 else None
            got.append(self._new(shape, torch.empty(0, dtype=dtype, device=device)) if held is None else held)
        return cast("list[Tensor]", _result(got, [x for x, *_ in posts if not x.is_cpu]))

    def _message(self, src: int, dst: int, tag: int) -> Message:
        return self.name, src, dst, tag, self._count(src, dst, tag)

    def _count(self, *key: int) -> int:
        self._numbers[key] += 1
        return self._numbers[key]

    def _of_host(self, x: Tensor, src: int) -> Tensor:
        """What the rank of index ``src`` gives where this one gives ``x``; bytes are not those of this rank."""
        number = self._count(0, 0, _SAID)
        self._run.post((self.name, self._run.rank, _ALL, _SAID, number), x.clone())
        if src == self._index or (x.dtype is not torch.uint8 and here.source is None):
            return x
        return cast(Tensor, self._run.take((self.name, self._ranks[src], _ALL, _SAID, number)))

    def _of_each(self, x: Tensor) -> list[Tensor]:
        """What each rank gives where this one gives ``x``."""
        number = self._count(0, 0, _SAID)
        messages = [(self.name, rank, _ALL, _SAID, number) for rank in self._ranks]
        self._run.post(messages[self._index], x.clone())
        return cast("list[Tensor]", self._run.take_all(messages))

    def barrier(self) -> object:
        """Everyone is here."""
        return _result(None)

    def barrier_within(self, seconds: float) -> None:
        """The same."""


def _host(x: Tensor) -> bool:
    """Whether it holds numbers of the host's: what the library makes of them has memory, outside of all modes."""
    return not _torch.is_without_memory(x) and _torch.plain_now()
