"""Whole tensors by name, of which each rank reads the parts that it needs: from memory, or from a file or a folder.

    a mapping        tensors, which may be mapped into memory
    .safetensors     slices of a file, read where they are copied to
    .pt, .bin, ...   what torch.save has written, mapped into memory; no code is run
    a folder         model.safetensors, or shards with their model.safetensors.index.json; pytorch_model.bin, or shards
    a checkpoint     stored boxes, read through its table

Opening reads names, shapes and dtypes, and finds what is missing or damaged, before any tensor is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshcomm.errors import described, fail, names
from meshcomm.parallel.checkpoint.files import TABLE, Root
from meshcomm.parallel.checkpoint.parts import Path, dotted, without_wrappers
from meshcomm.parallel.checkpoint.reader import Files, Reader
from meshcomm.parallel.checkpoint.state import EXTRA, Leaf, built
from meshcomm.parallel.global_places import Box, Kind, Spread, part_of

try:
    import safetensors
except ImportError:
    safetensors = None  # type: ignore[assignment]

INSTALL = "pip install safetensors (the extra meshcomm[weights])"
_SUFFIX, _INDEX = ".safetensors", ".index.json"
_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""In a folder, the first that is there."""
COUNTER = "num_batches_tracked"
"""Of batch norm: older files have none, and it is 0 then, as torch has it."""
_MAPPED = 2**24
"""Bytes of tensors that were looked into, after which a file is opened anew: pages that are mapped are let go of."""


class Whole(Protocol):
    """Whole tensors, and what else a ``state_dict`` has, by name."""

    @property
    def names(self) -> Collection[str]:
        """In the order in which they are best read."""

    def kind(self, name: str) -> Kind | None:
        """Of a tensor; None for what is none."""

    def plain(self, name: str) -> Any:
        """What is no tensor."""

    def fill(self, name: str, boxes: Sequence[Box]) -> None:
        """Copy parts of a tensor to where they go, converted to the dtype there."""

    def close(self) -> None:
        """Nothing is read after it."""


def whole_of(source: Whole, name: str) -> Tensor:
    """All of a tensor, in memory of its own."""
    kind = source.kind(name)
    assert kind is not None
    found = torch.empty(kind.shape, dtype=kind.dtype, device="cpu")
    source.fill(name, [Box((0,) * found.ndim, kind.shape, found)])
    return found


def opened(where: str, given: Any) -> Whole:
    """What ``load_full_state_dict`` was given, under names without traces of wrappers."""
    source = _source(where, given)
    clean: dict[str, str] = {}
    for name in (name for name in source.names if isinstance(name, str)):
        first = clean.setdefault(without_wrappers(name), name)
        if first != name:
            source.close()
            fail(where, f"{first!r} and {name!r} are one name without the wrappers' parts.", fix="one of them")
    return Renamed(source, clean) if any(name != theirs for name, theirs in clean.items()) else source


def _source(where: str, given: Any) -> Whole:
    if isinstance(given, (str, os.PathLike)):
        path = os.fspath(given)
        if os.path.isdir(path):
            return _folder(where, path)
        if not os.path.isfile(path):
            fix = (
                "a file of whole tensors (.safetensors, torch.save), a folder of them, or one of checkpoint.save; "
                "of a model of the hub, huggingface_hub.snapshot_download(name)"
            )
            fail(where, f"there is no file or folder {path!r}.", fix=fix)
        return _file(where, path)
    if not isinstance(given, Mapping):
        fix = "the whole state_dict on every rank; what is on one rank alone goes through mc.broadcast_object"
        fail(where, f"state is neither a mapping nor a path, but {type(given).__name__}.", fix=fix)
    return Given(where, given)


def _file(where: str, path: str) -> Whole:
    if path.endswith(_INDEX):
        return Shards(where, path)
    return SafeFile(where, path) if path.endswith(_SUFFIX) else Given(where, _unpickled(where, path))


def _folder(where: str, path: str) -> Whole:
    checkpoint = path if os.path.isfile(os.path.join(path, TABLE)) else Root(path).latest()
    if checkpoint is not None:
        return Boxes(where, checkpoint)
    inner = sorted(os.listdir(path))
    fit = [name for name in inner if name.endswith(f"{_SUFFIX}{_INDEX}")] or [
        name for name in inner if name.endswith(_SUFFIX)
    ]
    fit = next(([name] for name in _FILES if name in inner), fit)
    if len(fit) == 1:
        return _file(where, os.path.join(path, fit[0]))
    what = f"there are several files, and no index of them, in {path!r}" if fit else f"there are no weights in {path!r}"
    fail(where, f"{what}.", got=names((fit or inner)[:8]), fix=f"one of these files, or a folder with {names(_FILES)}")


class Renamed:
    """Those of another source, under other names."""

    def __init__(self, source: Whole, theirs: Mapping[str, str]) -> None:
        self._source, self._theirs = source, theirs
        self.names: Collection[str] = list(theirs)

    def kind(self, name: str) -> Kind | None:
        """Of a tensor."""
        return self._source.kind(self._theirs[name])

    def plain(self, name: str) -> Any:
        """What is no tensor."""
        return self._source.plain(self._theirs[name])

    def fill(self, name: str, boxes: Sequence[Box]) -> None:
        """Copy."""
        self._source.fill(self._theirs[name], boxes)

    def close(self) -> None:
        """Close the files."""
        self._source.close()


# ------------------------------------------------------------------------------------------------------------ memory


class Given:
    """A ``state_dict``."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self._where, self._values = where, values
        self.names = list(values)

    def kind(self, name: str) -> Kind | None:
        """Of a tensor."""
        x = self._values[name]
        if isinstance(x, Tensor) and x.is_meta:
            fail(self._where, f"{name!r} in the state_dict is on the meta device: it has no values.")
        return Kind(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None

    def plain(self, name: str) -> Any:
        """The value, a tensor too."""
        return self._values[name]

    def fill(self, name: str, boxes: Sequence[Box]) -> None:
        """Copy."""
        for box in boxes:
            box.view.copy_(part_of(self._values[name].detach(), box.offsets, box.sizes))

    def close(self) -> None:
        """It is the caller's."""


def _unpickled(where: str, path: str) -> Mapping[str, Any]:
    """What ``torch.save`` has written."""
    try:
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            found = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except Exception as error:
        fix = "a file of tensors that torch.save has written; loading runs no code"
        fail(where, f"file {path!r} cannot be read.", got=described(error), fix=fix)
    if not isinstance(found, Mapping):
        fail(where, f"in file {path!r} is no mapping but {type(found).__name__}.", fix="torch.save(state_dict, path)")
    return found


# --------------------------------------------------------------------------------------------------------- safetensors


class SafeFile:
    """A ``.safetensors`` file. Its library reads the header, and finds one that does not fit the file."""

    def __init__(self, where: str, path: str) -> None:
        self._where, self._path = where, path
        if safetensors is None:
            fail(where, f"{path!r} is read by safetensors, which is not installed.", fix=INSTALL)
        self._open()
        self.names = list(self._file.offset_keys() if hasattr(self._file, "offset_keys") else self._file.keys())

    def _open(self) -> None:
        self._read = 0
        try:
            self._file: Any = safetensors.safe_open(self._path, framework="pt", device="cpu")
        except Exception as error:
            fix = "write or copy it again, whole; git lfs pull, where its pointer stands there"
            fail(self._where, f"file {self._path!r} cannot be read.", got=described(error), fix=fix)

    def kind(self, name: str) -> Kind:
        """Of a tensor: all are."""
        found = self._file.get_slice(name)
        shape = tuple(found.get_shape())
        return Kind(shape, (found[:0] if shape and shape[0] else self._file.get_tensor(name)).dtype)

    def plain(self, name: str) -> Tensor:
        """A tensor."""
        return whole_of(self, name)

    def fill(self, name: str, boxes: Sequence[Box]) -> None:
        """Copy slices, which are mapped into memory."""
        found = self._file.get_slice(name)
        for box in boxes:
            if not box.sizes:
                box.view.copy_(self._file.get_tensor(name))
            elif box.view.numel():
                at = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
                box.view.copy_(found[at])
            self._read += math.prod(found.get_shape()) * box.view.itemsize
        del found
        if self._read > _MAPPED:
            self.let_go()

    def let_go(self) -> None:
        """Of the pages that are mapped."""
        if self._read:
            self._open()

    def close(self) -> None:
        """Close the file."""
        del self._file


class Shards:
    """Several files, and an index that says which has what."""

    def __init__(self, where: str, index: str) -> None:
        folder = os.path.dirname(index)
        try:
            with open(index, encoding="utf-8") as file:
                found = json.load(file)
            self._file_of: dict[str, str] = dict(found["weight_map"])
            odd = [x for x in self._file_of.values() if not isinstance(x, str) or os.path.basename(x) != x or not x]
        except Exception as error:
            fail(where, f"index {index!r} cannot be read.", got=described(error), fix='{"weight_map": {name: file}}')
        if odd:
            fail(where, f"index {index!r} names what is no file beside it.", got=names(odd[:4]))
        files = sorted({*self._file_of.values()})
        lacking = [name for name in files if not os.path.isfile(os.path.join(folder, name))]
        if lacking:
            got = f"{len(lacking)} of {len(files)}: {names(lacking[:4])}"
            fail(where, f"files that {index!r} names are not there.", got=got, fix="fetch or write them again")
        self._files = {name: _file(where, os.path.join(folder, name)) for name in files}
        self._now: Whole | None = None
        there = {name: {*file.names} for name, file in self._files.items()}
        wrong = [name for name, file in self._file_of.items() if name not in there[file]]
        if wrong:
            got = f"{names(wrong[:4])} in {self._file_of[wrong[0]]!r}"
            fail(where, f"index {index!r} names tensors that are not in their file.", got=got)
        self.names = [name for file, of in self._files.items() for name in of.names if self._file_of.get(name) == file]

    def _of(self, name: str) -> Whole:
        return self._files[self._file_of[name]]

    def kind(self, name: str) -> Kind | None:
        """Of a tensor."""
        return self._of(name).kind(name)

    def plain(self, name: str) -> Any:
        """What is no tensor."""
        return self._of(name).plain(name)

    def fill(self, name: str, boxes: Sequence[Box]) -> None:
        """Copy from its file, and let go of the one before."""
        file = self._of(name)
        if file is not self._now and isinstance(self._now, SafeFile):
            self._now.let_go()
        self._now = file
        file.fill(name, boxes)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()


# --------------------------------------------------------------------------------------------------------- checkpoints


class Boxes:
    """The model in a folder of :func:`meshcomm.parallel.checkpoint.save`, or of ``torch.distributed.checkpoint``."""

    def __init__(self, where: str, folder: str) -> None:
        self._reader = Reader(where, folder)
        self._reader.find_sums()
        paths = self._reader.paths
        below = any(path[0] == "model" and len(path) > 1 for path in paths.values())
        self._keys: dict[str, list[tuple[str, Path]]] = {}
        for key, path in paths.items():
            if not below or path[0] == "model":
                path = path[below:]
                end = path.index(EXTRA) + 1 if EXTRA in path else len(path)
                self._keys.setdefault(dotted(path[:end]), []).append((key, path[end:]))
        self.names = list(self._keys)

    def kind(self, name: str) -> Kind | None:
        """Of a tensor, all of which is in the files."""
        (key, tail), *more = self._keys[name]
        if more or tail or self._reader.tensor(key) is None:
            return None
        stored = self._reader.backed(key)
        return Kind(tuple(stored.size), stored.properties.dtype)

    def plain(self, name: str) -> Any:
        """What is no tensor; there may be some in it."""
        return built([Leaf(tail, self._value(key)) for key, tail in self._keys[name]])

    def _value(self, key: str) -> Any:
        if self._reader.tensor(key) is None:
            return self._reader.plain(key)
        stored = self._reader.backed(key)
        found = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
        self._reader.read(self._reader.plan([(key, Spread.whole(found))]))
        return found

    def _plan(self, wanted: Iterable[tuple[str, Sequence[Box]]]) -> Files:
        """``Spread``'s own shape and dtype are of no use here."""
        spreads = ((self._keys[name][0][0], Spread((), torch.float32, [*boxes])) for name, boxes in wanted)
        return self._reader.plan(spreads)

    def check(self, wanted: Iterable[tuple[str, Sequence[Box]]]) -> None:
        """Read all that will be read, and use nothing of it."""
        self._reader.check(self._plan(wanted))

    def fill(self, name: str, boxes: Sequence[Box]) -> None:
        """Copy from the stored boxes of which a part is in one of these."""
        self._reader.read(self._plan([(name, boxes)]))

    def close(self) -> None:
        """No file is open."""
