"""Checkpoints on disk: folders that appear whole or not at all, in the format of ``torch.distributed.checkpoint``.

A folder is written under another name, brought to the disk, and renamed. What is unpickled of it is a table of names,
sizes and places, by an unpickler that knows the classes of such tables and no others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import math
import os
import pickle
import re
import shutil
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
from meshcomm.parallel.checkpoint_parts import Box, Entries, Path, Spread

__all__ = [
    "Metadata", "Planner", "Reader", "Root", "SavePlan", "Writer", "global_plan", "local_plan", "read_metadata",
]  # fmt: skip

_TABLE = ".metadata"
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
        return sorted(step for step in found if os.path.isfile(os.path.join(self.folder(step), _TABLE)))

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


# ---------------------------------------------------------------------------------------------------------- reading


class _Tables(pickle.Unpickler):
    """Knows the classes of a table and nothing else: what it makes are values, no file can have it call a function."""

    _KNOWN = frozenset(
        [
            *(("torch.distributed.checkpoint.metadata", name) for name in (
                "Metadata", "TensorStorageMetadata", "TensorProperties", "BytesStorageMetadata", "ChunkStorageMetadata",
                "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")),
            *(("pathlib._local", name) for name in ("PosixPath", "WindowsPath", "Path")),
            ("collections", "OrderedDict"),
        ]
    )  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a table of contents")
        return super().find_class(module, name)


def read_metadata(where: str, folder: str) -> Metadata:
    """The table of a checkpoint, as far as it is plain data."""
    try:
        with open(os.path.join(folder, _TABLE), "rb") as file:
            table = _Tables(file).load()
        if not isinstance(table, Metadata) or not isinstance(table.state_dict_metadata, dict):
            raise pickle.UnpicklingError(f"a {type(table).__name__} is no table of contents")
        table.planner_data = dict(table.planner_data or {})
        table.storage_data = dict(table.storage_data)
    except FileNotFoundError:
        fail(where, f"there is no finished checkpoint at {folder!r}.",
             fix="what save was given, one of its steps, or what torch.distributed.checkpoint wrote")  # fmt: skip
    except Exception as error:  # whatever a file that is no table makes of the unpickler
        fail(where, f"the table of contents of {folder!r} cannot be read: {type(error).__name__}: {error}.")
    return table


class _Piece(NamedTuple):
    """A part of what is stored, and where it goes."""

    offsets: Sequence[int]
    lengths: Sequence[int]
    target: Tensor


class Reader:
    """Reads tensors in part, and plain data; nothing is looked at that was not asked for."""

    def __init__(self, where: str, folder: str) -> None:
        self.where, self.folder = where, folder
        self.sums = False
        """Whether the files have check sums, which torch writes by default and does not look at."""
        self.table = read_metadata(where, folder)
        self.paths: dict[str, Path] = {
            key: tuple(self.table.planner_data.get(key, (key,))) for key in self.table.state_dict_metadata
        }

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """What is known of a tensor; None if it is none."""
        found = self.table.state_dict_metadata.get(key)
        return found if isinstance(found, TensorStorageMetadata) else None

    def known(self, key: str) -> TensorStorageMetadata:
        """The same of one that is there."""
        found = self.tensor(key)
        if found is None:
            fail(self.where, f"{key!r} is no tensor.", got=self.folder)
        return found

    def plain(self, key: str) -> Any:
        """A value that is no tensor."""
        info = self._info(MetadataIndex(key))
        check_files(self.where, self.folder, [info])
        return self._load(info)

    def plan(self, wanted: Iterable[tuple[str, Spread]]) -> dict[str, dict[MetadataIndex, list[_Piece]]]:
        """What to read from which file; checks that it is there."""
        files: dict[str, dict[MetadataIndex, list[_Piece]]] = {}
        infos = []
        for key, spread in wanted:
            stored = self.known(key)
            boxes = [box for box in spread.boxes if math.prod(box.sizes)]
            here = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
            count = 0
            for item in create_read_items_for_chunk_list(key, stored, here):
                info = self._info(item.storage_index)
                infos.append(info)
                box = boxes[item.dest_index.index]  # type: ignore[index]
                piece = _Piece(item.storage_offsets, item.lengths, _narrowed(box, item.dest_offsets, item.lengths))
                files.setdefault(info.relative_path, {}).setdefault(item.storage_index, []).append(piece)
                count += math.prod(item.lengths)
            if count != sum(math.prod(box.sizes) for box in boxes):
                fail(self.where, f"the checkpoint has not all of {key!r}.", got=self.folder)
        check_files(self.where, self.folder, infos)
        return files

    def read(self, files: Mapping[str, Mapping[MetadataIndex, Sequence[_Piece]]]) -> None:
        """Fill the targets."""
        for items in files.values():
            for index, pieces in sorted(items.items(), key=lambda item: self._info(item[0]).offset):
                stored = self._load(self._info(index))
                known = self.known(index.fqn)
                sizes = next(chunk.sizes for chunk in known.chunks if chunk.offsets == index.offset)
                if type(stored) is not Tensor or stored.dtype != known.properties.dtype or stored.shape != sizes:
                    fail(
                        self.where,
                        f"the file is not what the table says it is: a part of {index.fqn!r}.",
                        got=self.folder,
                    )
                for piece in pieces:
                    part = stored
                    for dim, (offset, length) in enumerate(zip(piece.offsets, piece.lengths, strict=True)):
                        part = part.narrow(dim, offset, length)
                    piece.target.copy_(part)

    def _info(self, index: MetadataIndex) -> Any:
        try:
            info = self.table.storage_data[index]
        except KeyError:
            fail(self.where, f"the table does not say where {index.fqn!r} is.", got=self.folder)
        name = info.relative_path
        if name != os.path.basename(name) or name in ("", ".", "..") or info.transform_descriptors:
            fail(self.where, f"{index.fqn!r} is not in a file of the checkpoint, or is compressed.",
                 got=f"{name!r}, {info.transform_descriptors}")  # fmt: skip
        return info

    def _load(self, info: Any) -> Any:
        with open(os.path.join(self.folder, info.relative_path), "rb") as file:
            file.seek(info.offset)
            data = io.BytesIO(file.read(info.length))
        if self.sums:
            self._check_sums(data, info.relative_path)
        return torch.load(data, map_location="cpu", weights_only=True)

    def _check_sums(self, data: io.BytesIO, name: str) -> None:
        try:
            with zipfile.ZipFile(data) as members:
                bad = members.testzip()
        except zipfile.BadZipFile as error:
            bad = str(error)
        if bad is not None:
            fail(self.where, f"file {name!r} in {self.folder!r} is damaged.", got=bad, fix="take an earlier checkpoint")
        data.seek(0)


def _narrowed(box: Box, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    target = box.view
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        target = target.narrow(dim, offset, length)
    return target


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
