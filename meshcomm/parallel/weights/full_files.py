"""Files of whole tensors that are laid out before any value is known, and filled place by place as values come.

    layout      names, shapes and dtypes say where each tensor stands in which file: headers are written, room is left
    put         bytes of a tensor at their place
    finish      all files take their names at once, and those of an earlier save that are no part of this one go

What is written until then stands in files of other names, which an interrupted save leaves none of.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import fail
from meshcomm.parallel.global_places import Kind

SAFE, OF_TORCH = ".safetensors", (".pt", ".pth", ".bin", ".ckpt")
_KINDS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""Of the format ``.safetensors``."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_OLD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class Lot(NamedTuple):
    """Tensors of a module that go into files together."""

    sources: list[str]
    kinds: dict[str, Kind]
    """What is in the files."""
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None
    """Makes it of them, whole; None: the one source as it is."""


def bytes_in(where: str, size: object) -> int:
    """Of ``"5GB"``, or of a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]B)\s*", size, re.IGNORECASE) if isinstance(size, str) else None
    number = float(match[1]) * _UNITS[match[2].upper()] if match else size
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number) or number < 1:
        fail(where, f"max_shard_size={size!r} is no size.", fix='bytes, or a text such as "5GB"')
    return int(number)


def nbytes(kind: Kind) -> int:
    """Of a tensor."""
    return kind.dtype.itemsize * math.prod(kind.shape)


class _Place(NamedTuple):
    """Where a tensor begins."""

    path: str
    start: int


class Files:
    """The files of one save."""

    def __init__(self, where: str, path: str, kinds: Mapping[str, Kind], called: Mapping[str, str], most: int) -> None:
        """``called``: all names in a ``state_dict``, to those of ``kinds``; ``most``: bytes of a shard in a folder."""
        self._where, self._kinds, self._places = where, kinds, dict[str, _Place]()
        self._names: dict[str, str] = {}
        """What is written, and what it is called in the end."""
        self._sums: dict[str, int] = {}
        self._zips: dict[str, dict[str, str]] = {}
        self._folder = path if not path.endswith((SAFE, *OF_TORCH)) else None
        try:
            if self._folder is None:
                self._one_file(path, called)
            else:
                self._shards(path, most)
        except BaseException:
            self.drop()
            raise

    # ---------------------------------------------------------------------------------------------------- layout

    def _new(self, path: str) -> str:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if os.path.isdir(path):
            fail(self._where, f"{path!r} is a folder.", fix="the path of a file, or of a folder without such an ending")
        stem, ending = os.path.splitext(path)  # torch calls what is in its files as they are called up to the last dot
        written = f"{stem}.partial-{os.getpid()}-{ending[1:]}"
        self._names[written] = path
        return written

    def _one_file(self, path: str, called: Mapping[str, str]) -> None:
        written = self._new(path)
        if path.endswith(SAFE):
            self._lay_out(written, [*self._kinds])
        else:
            self._lay_out_zip(written, called)

    def _shards(self, folder: str, most: int) -> None:
        if os.path.exists(folder) and not os.path.isdir(folder):
            fail(
                self._where, f"{folder!r} is there, and is no folder.", fix=f"a folder, or a file named *{SAFE} or *.pt"
            )
        os.makedirs(folder, exist_ok=True)
        shards = _split(self._kinds, most)
        called = [f"model-{at:05d}-of-{len(shards):05d}{SAFE}" for at in range(1, len(shards) + 1)]
        called = called if len(shards) > 1 else [f"model{SAFE}"]
        for file, inside in zip(called, shards, strict=True):
            self._lay_out(self._new(os.path.join(folder, file)), inside)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(map(nbytes, self._kinds.values()))},
                "weight_map": {name: file for file, inside in zip(called, shards, strict=True) for name in inside},
            }
            with open(self._new(os.path.join(folder, f"model{SAFE}.index.json")), "w", encoding="utf-8") as out:
                out.write(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _lay_out(self, path: str, inside: Sequence[str]) -> None:
        """The header of a ``.safetensors`` file, and room: what is larger stands first, so that all is aligned."""
        inside = sorted(inside, key=lambda name: (-self._kinds[name].dtype.itemsize, name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        for name in inside:
            kind = self._kinds[name]
            said = _KINDS.get(str(kind.dtype).removeprefix("torch."))
            if said is None:
                fail(self._where, f"{name!r} is {kind.dtype}, which {SAFE} files do not have.", fix="a path *.pt")
            starts[name], end = end, end + nbytes(kind)
            header[name] = {"dtype": said, "shape": list(kind.shape), "data_offsets": [starts[name], end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
        self._places |= {name: _Place(path, 8 + len(text) + start) for name, start in starts.items()}

    def _lay_out_zip(self, path: str, called: Mapping[str, str]) -> None:
        """What ``torch.save`` writes of a ``state_dict``, in which all names of a tensor have one storage."""
        with _torch.without_memory():
            made = {name: torch.empty(kind.shape, dtype=kind.dtype, device="cpu") for name, kind in self._kinds.items()}
            state = {name: made[first] for name, first in called.items()}
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(state, path)
        with zipfile.ZipFile(path) as found, open(path, "rb") as file:
            inner = {record.filename.partition("/")[2]: record for record in found.infolist()}
            for at, name in enumerate(dict.fromkeys(called.values())):
                record = inner[f"data/{at}"]
                assert record.file_size == nbytes(self._kinds[name]), name
                file.seek(record.header_offset + 26)
                self._places[name] = _Place(path, record.header_offset + 30 + sum(struct.unpack("<HH", file.read(4))))
                self._zips.setdefault(path, {})[record.filename] = name

    # ---------------------------------------------------------------------------------------------------- values

    def put(self, name: str, at: int, x: Tensor) -> None:
        """Write the elements that begin at ``at`` of the flattened tensor; all of one tensor in order."""
        path, start = self._places[name]
        data = x.contiguous().reshape(-1).view(torch.uint8).numpy().data
        with open(path, "r+b") as out:
            out.seek(start + at * x.itemsize)
            out.write(data)
        if path in self._zips:
            self._sums[name] = zlib.crc32(data, self._sums.get(name, 0))

    def finish(self) -> None:
        """Bring all of it to the disk and give it its names."""
        for written in self._names:
            if written in self._zips:
                self._sign(written)
            with open(written, "r+b") as out:
                os.fsync(out.fileno())
        new = {os.path.basename(path) for path in self._names.values()}
        for written in [*self._names]:
            os.replace(written, self._names.pop(written))
        for old in os.listdir(self._folder) if self._folder is not None else ():
            if _OLD.fullmatch(old) and old not in new:
                os.remove(os.path.join(self._folder or "", old))

    def _sign(self, path: str) -> None:
        """The check sums of a zip, behind what they are of and in its table."""
        with zipfile.ZipFile(path) as found:
            records = found.infolist()
            at = found.start_dir
        with open(path, "r+b") as out:
            for record in records:
                out.seek(at)
                entry = out.read(46)
                name = self._zips[path].get(record.filename)
                if name is not None:
                    mark = struct.pack("<I", self._sums.get(name, 0))
                    self._patch(out, at + 16, mark)
                    after = self._places[name].start + record.file_size
                    out.seek(after)
                    signed = out.read(4) == b"PK\x07\x08"
                    if signed:
                        self._patch(out, after + 4, mark)
                at += 46 + sum(struct.unpack("<HHH", entry[28:34]))

    @staticmethod
    def _patch(out: object, at: int, data: bytes) -> None:
        out.seek(at)  # type: ignore[attr-defined]
        out.write(data)  # type: ignore[attr-defined]

    def drop(self) -> None:
        """Leave nothing of what has not been finished."""
        for written in self._names:
            with contextlib.suppress(FileNotFoundError):
                os.remove(written)
        self._names.clear()


def _split(kinds: Mapping[str, Kind], most: int) -> list[list[str]]:
    """Into shards, in order, as ``huggingface_hub`` does: what is larger than one stands alone."""
    shards: list[list[str]] = []
    now: list[str] = []
    size = 0
    for name, kind in kinds.items():
        more = nbytes(kind)
        if more > most:
            shards.append([name])
            continue
        if size + more > most:
            shards.append(now)
            now, size = [], 0
        now.append(name)
        size += more
    return [shard for shard in [*shards, now] if shard] or [[]]
