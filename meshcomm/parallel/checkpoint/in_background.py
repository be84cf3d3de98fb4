"""Saves that go on while the program computes: each rank writes what it had when the save began, on its own thread.

    the ranks' threads   agree, copy to the host       ...the program's own...      wait, or the next save: one answer
    beside them          write a file, say ".done"  ->  the first: all are done, the table, publish

No such thread calls a collective: what a rank has written, or that it could not, stands in a file beside the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshcomm.axis import Axis
from meshcomm.errors import MeshError, text
from meshcomm.parallel.checkpoint.files import MetadataIndex, Planner, Root, SavePlan, Writer
from meshcomm.parallel.checkpoint.parts import Entries, Layout, Mark, Marks, layout_of, refuse_others
from meshcomm.parallel.fingerprints import Fingerprint, fingerprint_of
from meshcomm.watch import out_of_sight

_WHERE = "checkpoint.async_save"
_DONE = ".done-"
_SEEN_EVERY = 0.01
"""Seconds between two looks at what the others have written, at most."""
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
    """What this rank has to write, as it is now, in memory of the host: in that of ``before``, where it fits."""

    def __init__(self, planner: Planner, plan: SavePlan, before: OnHost | None = None) -> None:
        super().__init__()
        known = {} if before is None else before.tensors
        for item in plan.items:
            if item.tensor_data is None:
                self.plain[item.index.fqn] = _as_it_is(planner.plain[item.index.fqn])
                continue
            x, room = planner.tensors[item.index].detach(), known.get(item.index)
            if room is None or room.shape != x.shape or room.dtype != x.dtype:
                room = torch.empty(x.shape, dtype=x.dtype, device="cpu")  # of its own: of a part torch writes a copy
            self.tensors[item.index] = room.copy_(x)

    def boxes(self) -> dict[Mark, Tensor]:
        """The tensors by name and place."""
        return {(index.fqn, tuple(index.offset or ())): x for index, x in self.tensors.items()}


def _as_it_is(value: Any) -> Any:
    """A copy of plain data."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        same = value.copy()
        for key, each in value.items():
            same[key] = _as_it_is(each)
        return same
    return type(value)(map(_as_it_is, value)) if type(value) in (list, tuple) else value


class Saving:
    """A save that goes on, as ``async_save`` gives it."""

    path: str
    """The folder of the checkpoint, which is there when it is complete."""

    def __init__(self, begun: Begun, copied: OnHost, layout: Layout, marks: Marks | None = None) -> None:
        """``marks``: of what others write and is to be the same here, if that has not been seen yet."""
        self.begun, self.copied, self.layout = begun, copied, layout
        self._marks = marks
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

    def succeeded(self) -> bool:
        """Whether, as far as this rank knows, it has become a checkpoint."""
        if self.over:
            return self._told is None
        return (
            self._written.is_set()
            and self._failed is None
            and (self.begun.axis.index != 0 or not self._thread.is_alive())
        )

    @out_of_sight
    def wait(self) -> str:
        """Until the checkpoint is there; all ranks of the mesh call.

        Returns: the folder of the checkpoint.

        Raises:
            MeshError: on all ranks, if one could not write; the next save says so where nobody waits.
        """
        if not self.over:
            settled(self.begun.team, self)
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
            what = f"step {self.begun.step} was not saved: {type(self._failed).__name__}: {self._failed}"
            raise MeshError(text(_WHERE, f"{what.rstrip('.')}.")) from self._failed

    def end(self, told: Exception | None) -> None:
        """All ranks know what has become of it."""
        self._told = told
        self._given_up.set()
        self._thread.join()
        if self.begun.axis.index == 0:
            self.begun.root.close(self.partial)
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
        if self.begun.axis.index == 0:
            try:
                self._publish(results)
            except BaseException as error:
                self._failed = error
            finally:
                self.begun.root.close(self.partial)

    def _write(self) -> Sequence[Any]:
        begun = self.begun
        results: Sequence[Any] = self._writer.write(begun.shares.plan, self.copied)
        if self._marks is not None:
            boxes = self.copied.boxes().items()
            self._marks |= {key: fingerprint_of(x) for key, x in boxes if key in begun.shares.common}
        self._say(results)
        return results

    def _say(self, results: Sequence[Any] | None) -> None:
        """What this rank has written, or that it could not, for the first one."""
        said = (
            None if results is None else {"rows": [_row(each) for each in results], "marks": _told_marks(self._marks)}
        )
        path = os.path.join(self.partial, f"{_DONE}{self.begun.axis.index}")
        with contextlib.ExitStack() as stack:
            if results is None:
                stack.enter_context(contextlib.suppress(OSError))
            with open(f"{path}.new", "w") as file:
                json.dump(said, file)
            os.rename(f"{path}.new", path)

    def _publish(self, own: Sequence[Any] | None) -> None:
        begun = self.begun
        said = [self._said_by(rank) for rank in range(1, begun.axis.size)]
        if own is None or None in said:  # who could not says why
            return
        others = [each for each in said if each is not None]
        refuse_others(_WHERE, [self._marks or {}, *(_marks_told(each["marks"]) for each in others)])
        every = [own, *([_result(own[0], row) for row in each["rows"]] for each in others)]
        for rank in range(begun.axis.size):
            os.remove(os.path.join(self.partial, f"{_DONE}{rank}"))
        self._writer.conclude(begun.shares.table, every, begun.shares.together.aliases)
        begun.root.publish(_WHERE, self.partial, begun.step)
        if begun.keep is not None:
            begun.root.prune(begun.keep, begun.step)

    def _said_by(self, rank: int) -> dict[str, Any] | None:
        path, ended, pause = os.path.join(self.partial, f"{_DONE}{rank}"), None, _SEEN_EVERY / 16
        while not os.path.isfile(path):
            if self._given_up.is_set():
                return None
            if not threading.main_thread().is_alive():
                ended = ended or time.monotonic()
                if time.monotonic() - ended > _PATIENCE:
                    return None
            time.sleep(pause)
            pause = min(2 * pause, _SEEN_EVERY)
        with open(path) as file:
            said: dict[str, Any] | None = json.load(file)
        return said


def _row(result: Any) -> list[Any]:
    index, info = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, result.size_in_bytes, info.relative_path, info.offset, info.length]


def _result(like: Any, row: Sequence[Any]) -> Any:
    name, offset, number, size, path, begins, length = row
    index = MetadataIndex(name, None if offset is None else torch.Size(offset), number)
    info = dataclasses.replace(like.storage_data, relative_path=path, offset=begins, length=length)
    return dataclasses.replace(like, index=index, size_in_bytes=size, storage_data=info)


def _told_marks(marks: Marks | None) -> list[Any]:
    return [[*key, *mark] for key, mark in (marks or {}).items()]


def _marks_told(told: Sequence[Any]) -> Marks:
    return {
        (name, tuple(offsets)): Fingerprint(least, norm, size, tuple(samples))
        for name, offsets, least, norm, size, samples in told
    }


# ------------------------------------------------------------------------------------------------------- the last one

_last: dict[tuple[tuple[int, ...], int], Saving] = {}
"""Of the ranks of a mesh, on each of them."""


def begin(begun: Begun, layout: Layout, planner: Planner) -> Saving:
    """Copy what this rank has to write, and begin to write it; the ranks agree once more that all could."""
    key = begun.axis.ranks, begun.axis.index
    before = None if _last.get(key) is None else _last[key].copied
    copied = begun.team.all(lambda: OnHost(planner, begun.shares.plan, before))
    _last[key] = Saving(begun, copied, layout)
    return _last[key]


def begin_again(
    team: Any, root: Root, keep: int | None, find: Callable[[Container[Mark]], Entries],
    folder: Callable[[], tuple[int, str]], planner_of: Callable[[Entries, Any, int | None], Planner],
) -> Saving | None:  # fmt: skip
    """Where every rank has what it had at the last save, with other values, and that one is over: who writes what is
    known, and all that the ranks have to agree on is said at once. None where it is not so.

    What is to be the same on several ranks is compared when it has been written.
    """
    axis: Axis = team.axis
    last, made = _last.get((axis.ranks, axis.index)), list[tuple[Entries, OnHost]]()

    def ready() -> tuple[str, tuple[int, str] | None]:
        if last is None or not last.succeeded():
            return "", None
        found, done = find(last.copied.boxes()), None
        if layout_of(found) != last.layout:
            return "", None
        if axis.index == 0:
            done = folder()
        planner = planner_of(found, last.begun.shares, done and done[0])
        made.append((found, OnHost(planner, last.begun.shares.plan, last.copied)))
        return os.path.basename(last.partial), done

    every = team.report(ready)
    names = {name for name, _ in every}
    if last is None or len(names) != 1 or "" in names:
        return None
    (step, partial), [(found, copied)] = every[0][1], made
    if not last.over:
        last.end(None)
    shares = last.begun.shares
    marks = {key: mark for key, mark in found.marks.items() if key in shares.common}
    begun = Begun(team, axis, root, step, partial, shares, keep)
    _last[axis.ranks, axis.index] = Saving(begun, copied, last.layout, marks)
    return _last[axis.ranks, axis.index]


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
