"""Saves that go on while the program computes: each rank writes what it had when the save began, on its own thread.

    the ranks' threads   agree, copy to the host       ...the program's own...      wait, or the next save: one answer
    beside them          write a file, say ".done"  ->  the first: all are done, the table, publish

No such thread calls a collective: what a rank has written, or that it could not, stands in a file beside the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm.errors import MeshError, text
from meshcomm.mesh import Axis
from meshcomm.parallel.checkpoint.files import MetadataIndex, Planner, Root, SavePlan, Writer
from meshcomm.watch import out_of_sight

_WHERE = "checkpoint.async_save"
_DONE = ".done-"
_SEEN_EVERY = 0.01
"""Seconds between two looks at what the others have written."""
_PATIENCE = 60.0
"""Seconds for which a program that has ended waits for what others write."""


class Begun(NamedTuple):
    """All that a save needs once its ranks have agreed."""

    team: Any
    """The :class:`Team` of ``team.py``, which stands above."""
    axis: Axis
    root: Root
    step: int
    partial: str
    shares: Any
    keep: int | None


class OnHost(Planner):
    """What this rank has to write, as it is now, in memory of the host."""

    def __init__(self, planner: Planner, plan: SavePlan, room: Tensor | None) -> None:
        super().__init__()
        found = [(item.index, planner.resolve_data(item)) for item in plan.items]
        tensors = [(index, x) for index, x in found if isinstance(x, Tensor)]
        self._bytes = {index: x.getvalue() for index, x in found if isinstance(x, io.BytesIO)}
        ends, end = [], 0
        for _, x in tensors:
            end += -(-x.nbytes // 64) * 64
            ends.append(end)
        self.room = (
            room if room is not None and room.numel() >= end else torch.empty(end, dtype=torch.uint8, device="cpu")
        )
        self._copies: dict[MetadataIndex, Tensor] = {}
        for (index, x), stop in zip(tensors, ends, strict=True):
            at = stop - -(-x.nbytes // 64) * 64
            copy = self.room[at : at + x.nbytes].view(x.dtype).view(x.shape)
            copy.copy_(x)
            self._copies[index] = copy

    def resolve_data(self, write_item: Any) -> Tensor | io.BytesIO:
        """The bytes of one item."""
        copy = self._copies.get(write_item.index)
        return io.BytesIO(self._bytes[write_item.index]) if copy is None else copy


class Saving:
    """A save that goes on, as ``async_save`` gives it."""

    path: str
    """The folder of the checkpoint, which is there when it is complete."""

    def __init__(self, begun: Begun, copied: OnHost) -> None:
        self._begun, self._copied = begun, copied
        self.room = copied.room
        self.path = begun.root.folder(begun.step)
        self.partial = begun.partial
        self._writer = Writer(begun.partial, self.path, begun.axis.index)
        self._written, self._given_up = threading.Event(), threading.Event()
        self._failed: BaseException | None = None
        self._told: Exception | None = None
        self.over = False
        """All ranks have been told what has become of it."""
        name = f"meshcomm-save-{begun.step}-{begun.axis.index}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)
        self._thread.start()

    def done(self) -> bool:
        """Whether nobody writes to it any more, so that :meth:`wait` does not wait for the disk; asks no other rank."""
        return self.over or (self._written.is_set() and not os.path.isdir(self.partial))

    @out_of_sight
    def wait(self) -> str:
        """Until the checkpoint is there; all ranks of the mesh call.

        Returns: the folder of the checkpoint.

        Raises:
            MeshError: on all ranks, if one could not write; the next save says so where nobody waits.
        """
        if not self.over:
            settled(self._begun.team, self)
        if self._told is not None:
            raise self._told
        return self.path

    def written(self) -> None:
        """Until this rank has written its part; raises why it could not."""
        self._written.wait()
        self._raise()

    def published(self) -> None:
        """On the first rank, once all have written: until the checkpoint is there."""
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._failed is not None:
            what = f"step {self._begun.step} was not saved: {type(self._failed).__name__}: {self._failed}"
            raise MeshError(text(_WHERE, f"{what.rstrip('.')}.")) from self._failed

    def end(self, told: Exception | None) -> None:
        """All ranks know what has become of it."""
        self._told = told
        self._given_up.set()
        self._thread.join()
        if self._begun.axis.index == 0:
            self._begun.root.close(self.partial)
        self.over = True

    # --------------------------------------------------------------------------------------------- beside the program

    def _run(self) -> None:
        results: Sequence[Any] | None = None
        try:
            results = self._write()
        except BaseException as error:
            self._failed = error
            self._say(None)
        finally:
            self._written.set()
        if self._begun.axis.index == 0:
            try:
                self._publish(results)
            except BaseException as error:
                self._failed = error
            finally:
                self._begun.root.close(self.partial)

    def _write(self) -> Sequence[Any]:
        begun = self._begun
        results: Sequence[Any] = self._writer.write(begun.shares.plan, self._copied)
        self._say(results)
        return results

    def _say(self, results: Sequence[Any] | None) -> None:
        """What this rank has written, or that it could not, for the first one."""
        rows = None if results is None else [_row(each) for each in results]
        path = os.path.join(self.partial, f"{_DONE}{self._begun.axis.index}")
        with contextlib.ExitStack() as stack:
            if results is None:
                stack.enter_context(contextlib.suppress(OSError))
            with open(f"{path}.new", "w") as file:
                json.dump(rows, file)
            os.rename(f"{path}.new", path)

    def _publish(self, own: Sequence[Any] | None) -> None:
        begun = self._begun
        said = [self._said_by(rank) for rank in range(1, begun.axis.size)]
        if own is None or None in said:  # who could not says why
            return
        every = [own, *([_result(own[0], row) for row in rows] for rows in said if rows is not None)]
        for rank in range(begun.axis.size):
            os.remove(os.path.join(self.partial, f"{_DONE}{rank}"))
        self._writer.conclude(begun.shares.table, every, begun.shares.together.aliases)
        begun.root.publish(_WHERE, self.partial, begun.step)
        if begun.keep is not None:
            begun.root.prune(begun.keep, begun.step)

    def _said_by(self, rank: int) -> list[Any] | None:
        path, ended = os.path.join(self.partial, f"{_DONE}{rank}"), None
        while not os.path.isfile(path):
            if self._given_up.is_set():
                return None
            if not threading.main_thread().is_alive():
                ended = ended or time.monotonic()
                if time.monotonic() - ended > _PATIENCE:
                    return None
            time.sleep(_SEEN_EVERY)
        with open(path) as file:
            rows: list[Any] | None = json.load(file)
        return rows


def _row(result: Any) -> list[Any]:
    index, info = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, result.size_in_bytes, info.relative_path, info.offset, info.length]


def _result(like: Any, row: Sequence[Any]) -> Any:
    name, offset, number, size, path, begins, length = row
    index = MetadataIndex(name, None if offset is None else torch.Size(offset), number)
    info = dataclasses.replace(like.storage_data, relative_path=path, offset=begins, length=length)
    return dataclasses.replace(like, index=index, size_in_bytes=size, storage_data=info)


# ------------------------------------------------------------------------------------------------------- the last one

_last: dict[tuple[tuple[int, ...], int], Saving] = {}
"""Of the ranks of a mesh, on each of them."""


def begin(begun: Begun, planner: Planner) -> Saving:
    """Copy what this rank has to write, and begin to write it; the ranks agree once more that all could."""
    key = begun.axis.ranks, begun.axis.index
    before = _last.get(key)
    room = None if before is None else before.room
    _last[key] = Saving(begun, begun.team.all(lambda: OnHost(planner, begun.shares.plan, room)))
    return _last[key]


def settle(team: Any, axis: Axis, *, tell: bool = True) -> None:
    """What these ranks have begun to save is saved, or not; ``tell``: why not is an error, once."""
    last = _last.get((axis.ranks, axis.index))
    mine = last if last is not None and not last.over else None
    if True in team.everyone(mine is not None):
        told = settled(team, mine)
        if tell and told is not None:
            raise told


def settled(team: Any, mine: Saving | None) -> Exception | None:
    """All ranks come to know what has become of it: what went wrong, if anything did."""
    told: Exception | None = None
    try:
        team.all(lambda: None if mine is None else mine.written())
        team.first(lambda: None if mine is None else mine.published())
    except MeshError as error:
        told = error
    if mine is not None:
        mine.end(told)
    return told
