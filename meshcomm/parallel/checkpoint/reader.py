"""Reading a checkpoint that may be wrong or hostile: its table of contents, its tensors and its plain data.

Nothing of a file is run, nothing outside of the folder is named, and what the table says is not taken on trust: boxes
lie inside of their tensor and do not overlap, and there are bytes for what it promises before memory is made for it.
"""

from __future__ import annotations

import io
import math
import os
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from meshcomm.errors import fail
from meshcomm.parallel.checkpoint.files import (
    TABLE,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    check_files,
    create_read_items_for_chunk_list,
)
from meshcomm.parallel.checkpoint.parts import Path
from meshcomm.parallel.checkpoint.pickles import Name, Record, read_pickle, refuse
from meshcomm.parallel.global_places import Box, Spread, part_of

T = TypeVar("T")

OURS = "meshcomm"
"""Under which stands what :func:`meshcomm.parallel.checkpoint.save` adds."""
_METADATA = "torch.distributed.checkpoint.metadata."
_DTYPES = {str(x): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
_PATHS = {f"pathlib{inner}.{pure}{kind}Path" for inner in ("", "._local") for pure in ("", "Pure")
          for kind in ("", "Posix", "Windows")}  # fmt: skip
_KNOWN = frozenset([
    *(_METADATA + name for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "BytesStorageMetadata", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    "torch.distributed.checkpoint.filesystem._StorageInfo", "torch.serialization._get_layout", "torch.Size",
    *_DTYPES, *_PATHS,
])  # fmt: skip
"""The names in a table that torch writes."""
_MOST = 2**63 - 1
_DIMS, _DEPTH = 64, 256
"""The most dims of a tensor, as torch has it; and of keys to a value in nested dicts."""
_LARGEST = 2**32
"""Bytes of a table. That of a million boxes has 2**27."""
_SLICE = 1024


class Info(NamedTuple):
    """Where a part is stored."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str]


Files = dict[str, dict[MetadataIndex, list[Box]]]
"""What to read from which file: parts of what is stored, and where each goes."""


# ------------------------------------------------------------------------------------------------ the table's values


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """What an object of this class would have."""
    if type(value) is not Record or value.name != kind or value.args or type(value.state) not in (dict, type(None)):
        found = value.name if type(value) in (Record, Name) else f"a {type(value).__name__}"
        refuse(f"{found} is no {kind.rpartition('.')[2]}")
    return value.state or {}


def _as(kind: type[T], value: Any, what: str) -> T:
    return value if type(value) is kind else refuse(f"{what} is a {type(value).__name__}, no {kind.__name__}")


def _count(value: Any, what: str) -> int:
    found = _as(int, value, what)
    return found if 0 <= found <= _MOST else refuse(f"{what} is {found}")


def _size(value: Any, what: str) -> tuple[int, ...]:
    """What was a ``torch.Size``."""
    if type(value) is not Record or value.name != "torch.Size" or len(value.args) != 1:
        refuse(f"{what} is no torch.Size")
    found = _as(tuple, value.args[0], what)
    if len(found) > _DIMS:
        refuse(f"{what} has {len(found)} dims")
    return tuple([_count(each, what) for each in found])


def _dtype(value: Any) -> torch.dtype:
    """That of a tensor's properties; the others have no meaning any more."""
    state = value.state if type(value) is Record and value.name == f"{_METADATA}TensorProperties" else None
    name = state[0].text if type(state) is tuple and state and type(state[0]) is Name else ""
    return _DTYPES[name] if name in _DTYPES else refuse("a tensor without a dtype")


def _stored(value: Any) -> TensorStorageMetadata:
    """A tensor's entry."""
    fields = _fields(value, f"{_METADATA}TensorStorageMetadata")
    size, dtype = _size(fields.get("size"), "its size"), _dtype(fields.get("properties"))
    if math.prod(max(length, 1) for length in size) * dtype.itemsize > _MOST:
        refuse(f"its size is {list(size)}")
    chunks = []
    for each in _as(list, fields.get("chunks"), "its list of boxes"):
        inner = _fields(each, f"{_METADATA}ChunkStorageMetadata")
        offsets, sizes = _size(inner.get("offsets"), "an offset"), _size(inner.get("sizes"), "the size of a box")
        if len(offsets) != len(size) or len(sizes) != len(size):
            refuse(f"a box of {len(sizes)} dims in a tensor of {len(size)}")
        if any(offset + length > whole for offset, length, whole in zip(offsets, sizes, size, strict=True)):
            refuse(f"a box of {list(sizes)} at {list(offsets)} in a tensor of {list(size)}")
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    if _overlap(chunks):
        refuse("boxes that overlap")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether two boxes have an element in common."""
    full = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if len(full) < 2:
        return False
    starts = torch.tensor([list(chunk.offsets) for chunk in full], device="cpu")
    ends = starts + torch.tensor([list(chunk.sizes) for chunk in full], device="cpu")
    own = 0
    for at in range(0, len(full), _SLICE):
        a, b = starts[at : at + _SLICE, None], ends[at : at + _SLICE, None]
        own += int(((a < ends) & (starts < b)).all(-1).sum())
    return own > len(full)


def _path(key: str, value: Any) -> Path:
    """Where a value stands in nested dicts; all of it may have been joined to one key."""
    if type(value) not in (tuple, list) or not 0 < len(value) <= _DEPTH:
        return (key,)
    return tuple(value) if all(type(each) in (str, int) for each in value) else (key,)


def _info(value: Any) -> Info:
    fields = _fields(value, "torch.distributed.checkpoint.filesystem._StorageInfo")
    name = _as(str, fields.get("relative_path"), "the name of a file")
    how = fields.get("transform_descriptors") or ()
    if type(how) not in (list, tuple) or not all(type(each) is str for each in how):
        refuse("how a file is compressed is no list of names")
    return Info(name, _count(fields.get("offset"), "an offset"), _count(fields.get("length"), "a length"), how)


def _place(value: Any) -> tuple[str, tuple[int, ...] | None]:
    """A name, and of a tensor where the part begins."""
    fields = _fields(value, f"{_METADATA}MetadataIndex")
    offset = fields.get("offset")
    return _as(str, fields.get("fqn"), "a name"), None if offset is None else _size(offset, "an offset")


class Table:
    """What a checkpoint says that it has."""

    def __init__(self, data: bytes) -> None:
        value = read_pickle(data, _KNOWN)
        if type(value) is not Record:
            refuse(f"a {type(value).__name__} is no table of contents")
        root = _fields(value, f"{_METADATA}Metadata")
        self._entries = _as(dict, root.get("state_dict_metadata"), "the list of contents")
        paths = root.get("planner_data")
        if paths is not None:
            _as(dict, paths, "the list of paths")
        self.paths = {_as(str, key, "a name"): _path(key, (paths or {}).get(key)) for key in self._entries}
        self.places: dict[tuple[str, tuple[int, ...] | None], Info] = {}
        for index, info in _as(dict, root.get("storage_data"), "the list of places").items():
            place = _place(index)
            if place in self.places:
                refuse("two places for one part")
            self.places[place] = _info(info)
        self._known: dict[str, TensorStorageMetadata | None] = {}

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """A tensor's entry; None if it is none."""
        if key not in self._known:
            entry = self._entries.get(key)
            plain = type(entry) is Record and entry.name == f"{_METADATA}BytesStorageMetadata"
            self._known[key] = None if entry is None or plain else _stored(entry)
        return self._known[key]


def _bytes_of(path: str, limit: int) -> bytes:
    """All of a file. Not of a pipe: nobody need ever write to it."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            refuse(f"it is no file, or has more than {limit} bytes")
        return file.read()


# ---------------------------------------------------------------------------------------------------------- reading


class Reader:
    """Reads tensors in part, and plain data; nothing is looked at that was not asked for."""

    def __init__(self, where: str, folder: str) -> None:
        self.where, self.folder = where, folder
        self.sums = False
        """Whether the files have check sums, which torch writes by default and does not look at."""
        try:
            self._table = self._trying(lambda: Table(_bytes_of(os.path.join(folder, TABLE), _LARGEST)))
        except FileNotFoundError:
            fail(where, f"there is no finished checkpoint at {folder!r}.",
                 fix="what save was given, one of its steps, or what torch.distributed.checkpoint wrote")  # fmt: skip
        self.paths = self._table.paths

    def find_sums(self) -> None:
        """Compare them, if who wrote says that they are there."""
        self.sums = f"{OURS}.sums" in self.paths and self.plain(f"{OURS}.sums") is True

    def _trying(self, do: Callable[[], T], what: str = "") -> T:
        """What is wrong with the table is an error that names it."""
        try:
            return do()
        except FileNotFoundError:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            fail(self.where, f"the table of contents of {self.folder!r} cannot be read: {what}{told}.")

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """What is known of a tensor; None if it is none."""
        return self._trying(lambda: self._table.tensor(key), f"{key!r}: ")

    def known(self, key: str) -> TensorStorageMetadata:
        """The same of one that is there."""
        found = self.tensor(key)
        if found is None:
            fail(self.where, f"{key!r} is no tensor.", got=self.folder)
        return found

    def backed(self, key: str) -> TensorStorageMetadata:
        """The same of one for which memory will be made: as many bytes are in the files."""
        stored = self.known(key)
        infos = []
        for chunk in stored.chunks:
            infos.append(self._info(key, chunk.offsets))
            if infos[-1].length < math.prod(chunk.sizes) * stored.properties.dtype.itemsize:
                self._not_all(key)
        if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
            self._not_all(key)
        check_files(self.where, self.folder, infos)
        return stored

    def plain(self, key: str) -> Any:
        """A value that is no tensor."""
        info = self._info(key, None)
        check_files(self.where, self.folder, [info])
        return self._load(info)

    def plan(self, wanted: Iterable[tuple[str, Spread]]) -> Files:
        """What to read from which file; checks that it is there."""
        files: Files = {}
        infos = []
        for key, spread in wanted:
            boxes = [box for box in spread.boxes if math.prod(box.sizes)]
            here = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
            count = 0
            for item in create_read_items_for_chunk_list(key, self.known(key), here):
                info = self._info(key, item.storage_index.offset)
                infos.append(info)
                target = boxes[item.dest_index.index].view  # type: ignore[index]
                piece = Box(item.storage_offsets, item.lengths, part_of(target, item.dest_offsets, item.lengths))
                files.setdefault(info.relative_path, {}).setdefault(item.storage_index, []).append(piece)
                count += math.prod(item.lengths)
            if count != sum(math.prod(box.sizes) for box in boxes):
                self._not_all(key)
        check_files(self.where, self.folder, infos)
        return files

    def check(self, files: Files) -> None:
        """Read everything, and use nothing of it."""
        for info, index, _ in self._in_order(files):
            self._dense(info, index)
        self.sums = False  # they have been compared

    def read(self, files: Files) -> None:
        """Fill the targets."""
        for info, index, pieces in self._in_order(files):
            stored = self._dense(info, index)
            for piece in pieces:
                piece.view.copy_(part_of(stored, piece.offsets, piece.sizes))

    def _in_order(self, files: Files) -> Iterator[tuple[Info, MetadataIndex, list[Box]]]:
        """Of the bytes."""
        for items in files.values():
            order = [(self._info(index.fqn, index.offset), index, pieces) for index, pieces in items.items()]
            yield from sorted(order, key=lambda each: each[0].offset)

    def _dense(self, info: Info, index: MetadataIndex) -> Tensor:
        """A stored box."""
        stored, known = self._load(info), self.known(index.fqn)
        sizes = next(chunk.sizes for chunk in known.chunks if chunk.offsets == index.offset)
        dense = type(stored) is Tensor and stored.layout is torch.strided and stored.device.type == "cpu"
        if not dense or stored.dtype != known.properties.dtype or stored.shape != sizes:
            what = f"the file is not what the table says it is: a part of {index.fqn!r}."
            fail(self.where, what, got=self.folder)
        return stored  # type: ignore[no-any-return]

    def _not_all(self, key: str) -> Any:
        fail(self.where, f"the checkpoint has not all of {key!r}.", got=self.folder)

    def _info(self, key: str, offset: Sequence[int] | None) -> Info:
        info = self._table.places.get((key, None if offset is None else tuple(offset)))
        if info is None:
            fail(self.where, f"the table does not say where {key!r} is.", got=self.folder)
        name = info.relative_path
        if name != os.path.basename(name) or name in ("", ".", "..") or info.transform_descriptors:
            fail(self.where, f"{key!r} is not in a file of the checkpoint, or is compressed.",
                 got=f"{name[:200]!r}, {list(info.transform_descriptors)[:4]}")  # fmt: skip
        return info

    def _load(self, info: Info) -> Any:
        with open(os.path.join(self.folder, info.relative_path), "rb") as file:
            file.seek(info.offset)
            data = io.BytesIO(file.read(info.length))
        self._check_archive(data, info.relative_path)
        return torch.load(data, map_location="cpu", weights_only=True, mmap=False)

    def _check_archive(self, data: io.BytesIO, name: str) -> None:
        """It is as long as what it holds, and undamaged where that can be told."""
        bad: str | None
        try:
            with zipfile.ZipFile(data) as members:
                inner = members.infolist()
                whole = all(each.compress_type == zipfile.ZIP_STORED for each in inner)
                fits = whole and sum(each.file_size for each in inner) <= len(data.getbuffer())
                bad = (members.testzip() if self.sums else None) if fits else "it is compressed"
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError) as error:
            bad = str(error)
        if bad is not None:
            fail(self.where, f"file {name!r} in {self.folder!r} is damaged.", got=bad, fix="take an earlier checkpoint")
        data.seek(0)
