"""Checkpoints on disk: folders that appear whole or not at all, in the format of ``torch.distributed.checkpoint``.

A folder is written under another name, brought to the disk, and renamed. ``reader`` reads it: nothing here
does, for torch's own way is to unpickle it.

    .partial-step-00000100-<owner>-<number>    being written, or left by an owner that has ended
    step-00000100                              a checkpoint
    .removed-<number>                          no longer one
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import math
import os
import random
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from meshcomm.errors import fail, shape_text
from meshcomm.parallel.checkpoint.parts import Entries, dotted
from meshcomm.runtime.health import peers

__all__ = [
    "TABLE", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "Planner", "Root", "SavePlan", "TensorProperties",
    "TensorStorageMetadata", "Writer", "check_files", "create_read_items_for_chunk_list", "global_plan", "local_plan",
]  # fmt: skip

TABLE = ".metadata"
"""The file with the table of contents."""
_FINISHED = re.compile(r"step-(\d+)\Z")
_PARTIAL, _REMOVED = ".partial-", ".removed-"
_UNFINISHED = re.compile(r"\.partial-step-(?P<step>\d+)-(?P<owner>[0-9a-f]{8}-\d+-\d+)-[0-9a-f]{8}\Z")
_ABANDONED = 24 * 3600.0
"""Seconds without a change after which nobody writes to a folder whose owner cannot be seen from here."""
_open: set[str] = set()
"""What this process writes to now."""


# ------------------------------------------------------------------------------------------------------- the folders


class Root:
    """A folder of checkpoints, each in a folder named by its step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """The finished ones, in order."""
        return sorted(step for step in self._named() if os.path.isfile(os.path.join(self.folder(step), TABLE)))

    def latest(self) -> str | None:
        """The folder of the last one, if there is one."""
        steps = self.steps()
        return self.folder(steps[-1]) if steps else None

    def _named(self) -> list[int]:
        """What is called as finished ones are."""
        try:
            inner = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [int(match[1]) for match in map(_FINISHED.match, inner) if match]

    def folder(self, step: int) -> str:
        """Where the checkpoint of a step is."""
        return os.path.join(self.path, f"step-{step:08d}")

    def open(self, where: str, step: int | None) -> tuple[int, str]:
        """Make the folder to write to, of the next step if none is given; what interrupted saves have left goes first,
        and leaves its room.

        Other jobs may do the same: whoever sees another one's folder of the same step after making its own gives way,
        so that never two have one.
        """
        os.makedirs(self.path, exist_ok=True)
        self.sweep()
        while True:
            taken = [*self._named(), *(begun for begun, _ in self._begun())]
            now = max(taken, default=-1) + 1 if step is None else step
            partial = os.path.join(self.path, f"{_PARTIAL}step-{now:08d}-{_owner()}-{uuid.uuid4().hex[:8]}")
            _open.add(partial)  # first: other threads of this process sweep, too
            os.mkdir(partial)
            rivals = [path for begun, path in self._begun() if begun == now and path != partial]
            if step is not None:  # those of another machine may have ended, and this be their next life
                rivals = [path for path in rivals if _life(path) == "here"]
            if not rivals and not os.path.lexists(self.folder(now)):
                return now, partial
            os.rmdir(partial)
            _open.discard(partial)
            if step is not None:
                self.refuse_twice(where, step)
                fail(where, f"another job is saving a checkpoint of step {step} to {self.path!r}.",
                     fix="another step or folder; a job of its own has a folder of its own")  # fmt: skip
            time.sleep(random.Random(uuid.uuid4().int).uniform(0, 0.05))

    def refuse_twice(self, where: str, step: int) -> None:
        """There must be no checkpoint of this step."""
        if os.path.lexists(self.folder(step)):
            fail(where, f"there is a checkpoint of step {step} already.", got=self.folder(step),
                 fix="another step or folder, or remove it first")  # fmt: skip

    def _begun(self) -> list[tuple[int, str]]:
        """The steps that somebody writes now, or did, and where."""
        found = map(_UNFINISHED.match, os.listdir(self.path))
        return [(int(match["step"]), os.path.join(self.path, match[0])) for match in found if match]

    def sweep(self) -> None:
        """Remove what is no checkpoint, or no longer; nothing that another job is writing."""
        for name in os.listdir(self.path):
            path = os.path.join(self.path, name)
            if name.startswith(_REMOVED) or (name.startswith(_PARTIAL) and _life(path) == "ended"):
                shutil.rmtree(path, ignore_errors=True)

    def close(self, partial: str) -> None:
        """Nobody writes to it any more: it is a checkpoint now, or goes."""
        shutil.rmtree(partial, ignore_errors=True)
        _open.discard(partial)

    def publish(self, where: str, partial: str, step: int) -> None:
        """From now on there is a checkpoint of this step."""
        _to_disk(partial)
        self.refuse_twice(where, step)
        os.rename(partial, self.folder(step))
        _to_disk(self.path)

    def prune(self, keep: int, step: int) -> None:
        """Of the others leave the ``keep - 1`` latest."""
        others = [other for other in self.steps() if other != step]
        for other in others[: len(others) - (keep - 1)]:
            with contextlib.suppress(OSError):  # what cannot be removed does not make the save fail
                os.rename(self.folder(other), os.path.join(self.path, f"{_REMOVED}{uuid.uuid4().hex}"))
        self.sweep()


def _owner() -> str:
    """This process, in the name of a folder."""
    machine, pid, began = peers.sign().split("\t")
    return f"{zlib.crc32(machine.encode()):08x}-{pid}-{began}"


def _life(partial: str) -> str:
    """Of who writes to it: "here", on this machine, "elsewhere", where it cannot be seen, or "ended"."""
    match, machine = _UNFINISHED.match(os.path.basename(partial)), peers.sign().partition("\t")[0]
    if partial in _open:
        return "here"
    if match and machine and match["owner"].startswith(f"{zlib.crc32(machine.encode()):08x}-"):
        gone = match["owner"] == _owner() or peers.ended("\t".join((machine, *match["owner"].split("-")[1:])))
        return "ended" if gone else "here"
    try:
        latest = max(os.stat(path).st_mtime for path in (partial, *(each.path for each in os.scandir(partial))))
    except OSError:  # it has gone meanwhile
        return "elsewhere"
    return "ended" if time.time() - latest > _ABANDONED else "elsewhere"


def _to_disk(folder: str) -> None:
    """A name is kept once the folder that has it is."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do not do this to folders
                raise
        finally:
            os.close(handle)


# ---------------------------------------------------------------------------------------------------------- writing


_PROBE = 2**20
"""Bytes that are written where more could not be, to hear why."""


class Planner(DefaultSavePlanner):
    """Gives the writer what this rank has."""

    def __init__(self, found: Entries | None = None) -> None:
        super().__init__()
        self.tensors: dict[MetadataIndex, Tensor] = {}
        self.plain: dict[str, Any] = {}
        if found is not None:
            self.plain = {dotted(path): value for path, value in found.plain.items()}
            for path, spread in found.tensors.items():
                for box in spread.boxes:
                    self.tensors[MetadataIndex(dotted(path), box.offsets)] = box.view

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The bytes of one item."""
        if write_item.type != WriteItemType.BYTE_IO:
            return self.tensors[write_item.index].detach().contiguous()
        data = io.BytesIO()
        torch.save(self.plain[write_item.index.fqn], data)
        return data


def local_plan(found: Entries) -> SavePlan:
    """What this rank could write."""
    items: list[WriteItem] = []
    for path, spread in found.tensors.items():
        properties = TensorProperties(dtype=spread.dtype)
        for box in spread.boxes:
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            data = TensorWriteData(chunk, properties, torch.Size(spread.shape))
            items.append(WriteItem(MetadataIndex(dotted(path), box.offsets), WriteItemType.SHARD, tensor_data=data))
    items += [WriteItem(MetadataIndex(dotted(path)), WriteItemType.BYTE_IO) for path in found.plain]
    return SavePlan(items, planner_data={dotted(path): path for path in (*found.tensors, *found.plain)})


def global_plan(where: str, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Each part is written by one rank, so that all have as much to write; checked to be all of each tensor."""
    known: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is None:
                continue
            mine = item.tensor_data.size, item.tensor_data.properties.dtype
            first = known.setdefault(item.index.fqn, mine)
            if first != mine:
                what = f"{item.index.fqn!r} is {shape_text(first[1], first[0])} on one rank"
                fail(where, f"{what}, {shape_text(mine[1], mine[0])} on rank {rank} of the mesh.")
    _checked_fill(where, known, plans)
    plans, table = Planner().create_global_plan(_plain_once(plans))
    return plans, table


def _plain_once(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """What is no tensor is the first rank's that has it."""
    seen: set[str] = set()
    found = []
    for plan in plans:
        items = [item for item in plan.items if item.tensor_data is not None or item.index.fqn not in seen]
        seen |= {item.index.fqn for item in items}
        found.append(dataclasses.replace(plan, items=items))
    return found


def _checked_fill(where: str, known: Mapping[str, Any], plans: Sequence[SavePlan]) -> None:
    """The parts are all of each tensor."""
    there: dict[MetadataIndex, int] = {}
    for plan in plans:
        for item in plan.items:
            if item.tensor_data is not None:
                there[item.index] = math.prod(item.tensor_data.chunk.sizes)
    filled = dict.fromkeys(known, 0)
    for index, count in there.items():
        filled[index.fqn] += count
    written = {item.index.fqn for plan in plans for item in plan.items}
    short = sorted({repr(key) for plan in plans for key in plan.planner_data if key not in written})
    short += [f"{key!r} ({filled[key]} of {math.prod(known[key][0])})" for key in known
             if filled[key] != math.prod(known[key][0])]  # fmt: skip
    if short:
        fail(where, "the ranks of the mesh do not have each element of these tensors once.", got=", ".join(short[:4]),
             fix="pass the mesh of all ranks over which the module is spread")  # fmt: skip


class Writer(FileSystemWriter):
    """Torch's writer; the table names the folder that will be, and tensors that have two names once."""

    def __init__(self, partial: str, folder: str, rank: int) -> None:
        super().__init__(partial, overwrite=False)
        self._folder, self._partial, self._rank = folder, partial, rank
        self.set_up_storage_writer(rank == 0, rank=rank)

    def storage_meta(self) -> StorageMeta:
        """What the table says of itself."""
        return StorageMeta(checkpoint_id=self._folder, save_id=self.save_id)

    def write(self, plan: SavePlan, planner: Planner) -> list[WriteResult]:
        """This rank's file, which is named by the place of its plan among all."""
        plans = self.prepare_global_plan([*(SavePlan([]) for _ in range(self._rank)), plan])
        try:
            return self.write_data(plans[-1], planner).wait()
        except OSError:
            raise
        except Exception as error:  # torch's archive writer does not say what the system has said
            with open(os.path.join(self._partial, f".probe-{self._rank}"), "wb") as file:
                file.write(bytes(_PROBE))
                file.flush()
                os.fsync(file.fileno())
            os.remove(file.name)
            raise error

    def conclude(self, table: Metadata, results: Sequence[Sequence[WriteResult]], aliases: Mapping[str, str]) -> None:
        """The table, once all files are seen to be there."""
        every = [result for of_rank in results for result in of_rank]
        check_files("save", self._partial, (result.storage_data for result in every))
        twins: list[WriteResult] = []
        for alias, name in aliases.items():
            table.state_dict_metadata[alias] = table.state_dict_metadata[name]
            table.planner_data[alias] = tuple(alias.split(".", 1))
            twins += [dataclasses.replace(each, index=dataclasses.replace(each.index, fqn=alias))
                      for each in every if each.index.fqn == name]  # fmt: skip
        self.finish(table, [every, twins])


# ------------------------------------------------------------------------------------------------------ what is there


def check_files(where: str, folder: str, infos: Iterable[Any]) -> None:
    """The files are there, and as long as they must be."""
    ends: dict[str, int] = {}
    for info in infos:
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = os.path.join(folder, name)
        if not os.path.isfile(path) or os.path.getsize(path) < end:
            fix = "all ranks must see one file system" if where.endswith("save") else "take an earlier checkpoint"
            got = f"it should have {end} bytes"
            fail(where, f"file {name!r} in {folder!r} is missing or cut short.", got=got, fix=fix)
