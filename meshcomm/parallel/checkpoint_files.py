"""Checkpoints on disk: folders that appear whole or not at all, in the format of ``torch.distributed.checkpoint``.

A folder is written under another name, brought to the disk, and renamed. ``checkpoint_reader`` reads it: nothing here
does, for torch's own way is to unpickle it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from meshcomm.parallel.checkpoint_parts import Entries, Path

__all__ = [
    "TABLE", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "Planner", "Root", "SavePlan", "TensorProperties",
    "TensorStorageMetadata", "Writer", "check_files", "create_read_items_for_chunk_list", "global_plan", "local_plan",
]  # fmt: skip

TABLE = ".metadata"
"""The file with the table of contents."""
_FINISHED = re.compile(r"step-(\d+)\Z")
_PARTIAL, _REMOVED = ".partial-", ".removed-"


# ------------------------------------------------------------------------------------------------------- the folders


class Root:
    """A folder of checkpoints, each in a folder named by its step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """The finished ones, in order."""
        try:
            inner = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [int(match[1]) for match in map(_FINISHED.match, inner) if match]
        return sorted(step for step in found if os.path.isfile(os.path.join(self.folder(step), TABLE)))

    def folder(self, step: int) -> str:
        """Where the checkpoint of a step is."""
        return os.path.join(self.path, f"step-{step:08d}")

    def open(self, step: int) -> str:
        """Make the folder to write to; what interrupted saves have left goes first, and leaves its room."""
        os.makedirs(self.path, exist_ok=True)
        self.sweep()
        partial = os.path.join(self.path, f"{_PARTIAL}step-{step:08d}-{uuid.uuid4().hex[:8]}")
        os.mkdir(partial)
        return partial

    def sweep(self) -> None:
        """Remove what is no checkpoint, or no longer."""
        for name in os.listdir(self.path):
            if name.startswith((_PARTIAL, _REMOVED)):
                shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)

    def publish(self, partial: str, step: int) -> None:
        """From now on there is a checkpoint of this step."""
        _to_disk(partial)
        os.rename(partial, self.folder(step))
        _to_disk(self.path)

    def prune(self, keep: int, step: int) -> None:
        """Of the others leave the ``keep - 1`` latest."""
        others = [other for other in self.steps() if other != step]
        for other in others[: len(others) - (keep - 1)]:
            with contextlib.suppress(OSError):  # what cannot be removed does not make the save fail
                os.rename(self.folder(other), os.path.join(self.path, f"{_REMOVED}{uuid.uuid4().hex}"))
        self.sweep()


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


class Planner(DefaultSavePlanner):
    """Gives the writer what this rank has."""

    def __init__(self, found: Entries | None = None) -> None:
        super().__init__()
        self._tensors: dict[MetadataIndex, Tensor] = {}
        self._plain: dict[str, Any] = {}
        if found is not None:
            self._plain = {_dotted(path): value for path, value in found.plain.items()}
            for path, spread in found.tensors.items():
                for box in spread.boxes:
                    self._tensors[MetadataIndex(_dotted(path), box.offsets)] = box.view

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The bytes of one item."""
        if write_item.type != WriteItemType.BYTE_IO:
            return self._tensors[write_item.index].detach().contiguous()
        data = io.BytesIO()
        torch.save(self._plain[write_item.index.fqn], data)
        return data


def local_plan(found: Entries) -> SavePlan:
    """What this rank could write."""
    items: list[WriteItem] = []
    for path, spread in found.tensors.items():
        properties = TensorProperties(dtype=spread.dtype)
        for box in spread.boxes:
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            data = TensorWriteData(chunk, properties, torch.Size(spread.shape))
            items.append(WriteItem(MetadataIndex(_dotted(path), box.offsets), WriteItemType.SHARD, tensor_data=data))
    items += [WriteItem(MetadataIndex(_dotted(path)), WriteItemType.BYTE_IO) for path in found.plain]
    return SavePlan(items, planner_data={_dotted(path): path for path in (*found.tensors, *found.plain)})


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
        return self.write_data(plans[-1], planner).wait()

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


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


# ------------------------------------------------------------------------------------------------------ what is there


def check_files(where: str, folder: str, infos: Iterable[Any]) -> None:
    """The files are there, and as long as they must be."""
    ends: dict[str, int] = {}
    for info in infos:
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in _short(folder, ends):
        fix = "all ranks must see one file system" if where.endswith("save") else "take an earlier checkpoint"
        fail(where, f"file {name!r} in {folder!r} is missing or cut short.", got=f"it should have {end} bytes", fix=fix)


def _short(folder: str, ends: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    for name, end in ends.items():
        path = os.path.join(folder, name)
        if not os.path.isfile(path) or os.path.getsize(path) < end:
            yield name, end
