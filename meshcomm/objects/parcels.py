"""Bytes between the ranks of an axis, of lengths that only their owners know, and errors that all ranks raise together.

Every call begins with a row of fixed size from each rank: what it called, what is wrong with its arguments, how many
bytes it has, and the bytes themselves if they are few. So ranks that disagree find out before anything of another shape
moves, and what one rank cannot do is an error on all.

n = size of the axis.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.axis import Axis
from meshcomm.collectives import check
from meshcomm.errors import MeshError, fail, held
from meshcomm.objects.pickles import byte_view
from meshcomm.runtime.call import Call
from meshcomm.runtime.hooks.ranges import calling
from meshcomm.runtime.transports.dry.world import said_by

FIX = "\n  fix: "
_ROW = 1024
_HEAD = struct.Struct("=4q")
_ROOM = _ROW - _HEAD.size
_CHUNK = 2**26
"""Bytes that move at a time, over all ranks: what moves is copied once, by chunks."""
_BRIEF = (Call, "exchange of objects", (), (), None, None), (), None
"""What a link is told that is not watched: the rows say the rest, and which rank's arguments are wrong."""
_FEW = 2**16
"""Bytes up to which padding is not counted."""


def home_of(axis: Axis, device: torch.device | None = None) -> torch.device:
    """The device that bytes travel from and to: this one, the CPU by default, if the axis can move what lies there."""
    home = torch.device("cpu") if device is None else device
    return axis.mesh.device if axis.link.check_device(home) is not None else home


class Courier:
    """One call of one rank: what it is called, along which axis, with which arguments that all must share."""

    def __init__(self, where: str, axis: Axis, device: torch.device | None = None, **given: object) -> None:
        self.where = where
        self.axis = axis
        self._given = {name: int(value) if check.whole_number(value) else value for name, value in given.items()}  # type: ignore[call-overload]
        self._home = home_of(axis, device)

    def __str__(self) -> str:
        return f"{self.where}({', '.join(f'{name}={value!r}' for name, value in self._given.items())})"

    # ----------------------------------------------------------------------------------------------------- agreement

    def meet(self, problem: str | None = None, size: int = 0, inline: bytes | bytearray = b"") -> _Rows:
        """Every rank's row, in order of index.

        Raises:
            MeshError: on all ranks alike, where one has a problem (whose fix may follow :data:`FIX`) or made another
                call.
        """
        told = (problem or "").encode()
        if len(told) > _ROOM:
            told = told[: _ROOM - 4].decode(errors="ignore").encode() + b" ..."
        body = told or inline
        row = bytearray(_ROW)
        digest = zlib.crc32(f"{self.where}{sorted(self._given.items())!r}".encode())
        _HEAD.pack_into(row, 0, digest, len(told), size, len(inline))
        row[_HEAD.size : _HEAD.size + len(body)] = body
        rows = _Rows(self._gathered(row))
        if rows.digests.count(digest) < len(rows):
            self._disagreement()
        if any(rows.told):
            of_ranks = [row.problem for row in rows]
            self._raise(list(dict.fromkeys(filter(None, of_ranks))), of_ranks)
        return rows

    def _raise(self, problems: list[str], of_ranks: list[str]) -> NoReturn:
        said = []
        for problem in problems[:3]:
            who = [i for i, other in enumerate(of_ranks) if other == problem]
            everywhere = len(who) == self.axis.size
            said.append(("" if everywhere else f"index {', '.join(map(str, who))}: ") + problem.partition(FIX)[0])
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        got, fix = f"axis {self.axis.name!r} of size {self.axis.size}", problems[0].partition(FIX)[2]
        fail(self.where, f"{'; '.join(said)}{more}.", got=got, fix=fix)

    def index(self, value: int, name: str) -> None:
        """``value`` is an index along the axis; where it is not on one rank, all raise."""
        try:
            with held():
                check.checked_index(self.where, value, self.axis, name)
        except MeshError as error:
            self.refuse(error)

    def refuse(self, error: MeshError) -> None:
        """Raise what is wrong with this rank's arguments on all ranks, which would wait for it otherwise."""
        lines = str(error).removeprefix(f"meshcomm.{self.where}: ").split("\n")
        fix = next((line for line in lines if f"\n{line}".startswith(FIX)), "")
        self.meet(lines[0].rstrip(".") + (f"\n{fix}" if fix else ""))

    def _disagreement(self) -> NoReturn:
        row = bytearray(str(self).encode()[:_ROW].ljust(_ROW, b"\0"))
        got = self._gathered(row)
        rows = [got[at : at + _ROW] for at in range(0, len(got), _ROW)]
        calls = [row.rstrip(b"\0").decode(errors="ignore") for row in rows]
        ranks = {call: [i for i, other in enumerate(calls) if other == call] for call in calls}
        told = "; ".join(f"{call} on index {', '.join(map(str, indices))}" for call, indices in ranks.items())
        fix = "make the same call with the same arguments on every rank of the axis"
        fail(self.where, f"the ranks along {self.axis.name!r} made different calls.", got=told, fix=fix)

    def _gathered(self, row: bytearray) -> bytearray:
        got = bytearray(self.axis.size * _ROW)
        with _torch.outside_transforms():
            self._move(byte_view(row), self.axis.link.all_gather, byte_view(got).view(self.axis.size, _ROW))
        return got

    def _move(self, x: Tensor, primitive: Callable[[Tensor], Tensor], out: Tensor) -> None:
        """Send ``x`` over its device, and put what comes into ``out``."""
        with self._called(), torch.no_grad():
            out.copy_(primitive(x.to(self._home)))

    def _called(self) -> AbstractContextManager[Any]:
        """What runs inside belongs to this call."""
        call = Call(self.where, tuple(self._given.values()), tuple(self._given), None, self.axis)
        return calling(self.axis, call, _BRIEF)

    # ---------------------------------------------------------------------------------------------------------- bytes

    def all_gather(self, data: bytearray, problem: str | None = None) -> list[bytearray]:
        """The bytes of every rank, on every rank."""
        with _torch.outside_transforms():
            rows = self._open(data, problem)
            return self._inlined(rows) or self._gather_chunks(data, rows.sizes)

    def broadcast(self, data: bytearray | None, src: int, problem: str | None = None) -> bytearray:
        """The bytes of ``src``."""
        with _torch.outside_transforms(), said_by(src):
            row = self._open(data or bytearray(), problem)[src]
            if row.size <= _ROOM:
                return row.inline
            return self._one(data, row.size, src)

    def gather(self, data: bytearray, dst: int, problem: str | None = None) -> list[bytearray] | None:
        """The bytes of every rank, on ``dst``."""
        with _torch.outside_transforms():
            rows = self._open(data, problem)
            me, lengths = self.axis.index, rows.sizes
            found = self._inlined(rows)
            if found is not None:
                return found if me == dst else None
            out = [bytearray(length) for length in lengths] if me == dst else None
            step = max(_CHUNK // self.axis.size, _ROOM)
            for at in range(0, max(lengths), step):
                runs = [max(0, min(length - at, step)) for length in lengths]
                send = [runs[me] if i == dst else 0 for i in range(self.axis.size)]
                self._runs(data[at : at + step], send, runs if me == dst else [0] * self.axis.size, out, at)
            return out

    def scatter(self, datas: Sequence[bytearray] | None, src: int, problem: str | None = None) -> bytearray:
        """One of the byte strings of ``src``."""
        with _torch.outside_transforms():
            me, size = self.axis.index, self.axis.size
            self.meet(problem)
            lengths = [len(data) for data in datas] if datas is not None and me == src else [0] * size
            with self._called(), said_by(src):
                [every] = self.axis.link.agree(lengths, src)
            out = [bytearray(every[me] if i == src else 0) for i in range(size)]
            step = max(_CHUNK // size, _ROOM)
            for at in range(0, max(every), step):
                runs = [max(0, min(length - at, step)) for length in every]
                recv = [runs[me] if i == src else 0 for i in range(size)]
                if datas is None or me != src:
                    self._runs(bytearray(), [0] * size, recv, out, at)
                else:
                    joined = bytearray().join(data[at : at + step] for data in datas)
                    self._runs(joined, runs, recv, out, at)
            return out[src]

    def _open(self, data: bytearray, problem: str | None) -> _Rows:
        return self.meet(problem, len(data), data if len(data) <= _ROOM else b"")

    def _inlined(self, rows: _Rows) -> list[bytearray] | None:
        return [row.inline for row in rows] if max(rows.sizes) <= _ROOM else None

    def _gather_chunks(self, data: bytearray, lengths: list[int]) -> list[bytearray]:
        """Chunk by chunk: padded to the longest, or from one rank after the other where that would move twice as
        much.
        """
        size, out = self.axis.size, [bytearray(length) for length in lengths]
        step = max(_CHUNK // size, _ROOM)
        for at in range(0, max(lengths), step):
            runs = [max(0, min(length - at, step)) for length in lengths]
            longest = max(runs)
            if size * longest > max(_FEW, 2 * sum(runs)):
                for src, run in enumerate(runs):
                    if run:
                        out[src][at : at + run] = self._one(data[at : at + step], run, src)
                continue
            got = bytearray(size * longest)
            row = data[at : at + step].ljust(longest, b"\0")
            self._move(byte_view(row), self.axis.link.all_gather, byte_view(got).view(size, longest))
            for i, run in enumerate(runs):
                out[i][at : at + run] = got[i * longest : i * longest + run]
        return out

    def _one(self, data: bytearray | None, length: int, src: int) -> bytearray:
        out = bytearray(length)
        into = byte_view(out)
        whole = byte_view(data) if data is not None and self.axis.own_index == src else into
        for part, place in zip(whole.split(_CHUNK), into.split(_CHUNK), strict=True):
            self._move(part, lambda x: self.axis.link.broadcast(x, src), place)
        return out

    def _runs(self, data: bytearray, send: list[int], recv: list[int], out: list[bytearray] | None, at: int) -> None:
        got = bytearray(sum(recv))
        self._move(byte_view(data), lambda x: self.axis.link.all_to_all(x, send, recv), byte_view(got))
        start = 0
        for i, run in enumerate(recv):
            if out is not None and run:
                out[i][at : at + run] = got[start : start + run]
            start += run


class _Rows:
    """What all ranks say of their calls: each is taken apart when somebody looks at it, for they may be thousands."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        words = memoryview(data).cast("q")
        self.digests, self.told, self.sizes = (words[at :: _ROW // 8].tolist() for at in range(3))

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[_Row]:
        return (self[at] for at in range(len(self)))

    def __getitem__(self, at: int) -> _Row:
        return _Row(bytes(memoryview(self._data)[at * _ROW : (at + 1) * _ROW]))


class _Row:
    """What a rank says of its call."""

    def __init__(self, row: bytes) -> None:
        _, told, self.size, inline = _HEAD.unpack_from(row)
        body = row[_HEAD.size :]
        self.problem = body[:told].decode(errors="ignore")
        self.inline = bytearray(b"" if told else body[:inline])
